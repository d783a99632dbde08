"""How do FSDP2, DeepSpeed and transformers take the same training step as this project?

bench.py compares our step with the steps of three *peers*. For each peer this file has a function
that builds a Step, which is called like ours. The label of a row in bench.py says which peer runs,
and how:

    fsdp2 WHAT [host]        the same model and kernels under PyTorch's FSDP2 with Ulysses. Model
                             states are sharded over os ranks, as ZeRO-3 if p > 1 and as ZeRO-2
                             otherwise. WHAT is a key of RECOMPUTED, which says which layers are
                             recomputed in backward. host: all model states are in host memory.
                             Words such as ZeRO-2, HSDP and reshard change nothing; they only name
                             what the row's flags --p, --g and --os say. HSDP: there are replicas of
                             the shards. reshard: parameters are freed after each use (p > 1)
    deepspeed WHAT           the same model and kernels under DeepSpeed's ZeRO-3, with Ulysses in
                             our attention instead of DeepSpeed's wrapper. WHAT is as for fsdp2
    transformers DTYPE ...   transformers' model on one GPU, compiled. fp32: float32 weights under
                             autocast; bf16: weights and optimizer states in bf16. More words:
        fp8                  torchao's float8 training, which needs a GPU that has float8
        by-layer             each layer is compiled by itself, instead of the whole model
        liger-loss           only with by-layer: head and loss are Liger's, which never hold the
                             logits of all tokens at once
        liger                all of Liger's kernels, without compilation, because Liger's loss does
                             not compile
        half                 every second layer is recomputed in backward
        three-quarters       three of four layers are recomputed
        full                 every layer is recomputed

Example: "transformers bf16 fp8 by-layer half" is transformers_step(run, ["bf16", "fp8", "by-layer",
"half"]).

fp8 is torchao's recipe "tensorwise", the fastest in its documentation. A tensor has one scale,
which is computed from its values at each cast. Our --products fp8 has one scale per row. torchao
rounds gradients of outputs to float8_e5m2, and we round them to float8_e4m3. The head stays in
bf16, and so do matrices that torchao's own filter finds too small to gain, for example k and v of
llama3-8b.

by-layer saves memory in gradient accumulation. The backward of a model that is compiled as a whole
returns all gradients together. So all gradients are in memory twice: the sums of earlier
micro-batches, and the new gradients that are added to them. If each layer is compiled by itself,
only one layer's gradients are in memory twice. Example: llama3-8b in bf16 takes 60 GiB for weights,
moments and the sums of gradients. The new gradients would take 15 GiB more, and fill an 80 GB GPU.

fsdp2 and deepspeed use our attention, which shares a sequence by heads, as Ulysses does. So both
run our kernels. Their all-to-alls are those of NCCL, also inside a node. For DeepSpeed this is
simpler than its own wrapper of Ulysses, with which we have not compared it. DeepSpeed sums
gradients in bf16, its default.

A peer runs micro-batches of the size that the planner predicts to be the fastest with unlimited
memory, unless its row or the command sets --micro-batch.

Left out: which rows are timed, and how (bench.py). Whether peers compute the same losses as our
model is tested in tests/test_bench.py.

Legend: as in bench.py.
"""

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import train
from attention import Attention
from data import Window
from hf import export_config
from model import Block, LLaMA, ModelConfig, run_block
from ops import Positions
from ranks import ConfigError, Groups
from replay import StepMemory
from streams import in_unit
from train import Run

# ---------------------------------------------------------------------------- steps

# Seconds after which a collective fails. NCCL counts from the launch, and a step may take many
# minutes. A dead rank is found sooner (ranks.heartbeat)
TIMEOUT_S = 3600.0


@dataclass
class Step:
    """A training step on random tokens. Each call runs it once. Used with `with`, it calls
    `cleanup` at the end."""

    run: Run
    model: nn.Module
    states: object  # States, or an object with the same methods
    batch: train.Batch
    memory: StepMemory | None = None  # plans the addresses of the step's tensors
    # at the end, frees planned memory and undoes changes to transformers' modules
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __call__(self):
        lr, clip = 1e-4, 1.0
        return train.run_planned(self.memory, self.model, self.states, self.batch, lr, clip)

    def __enter__(self) -> "Step":
        return self

    def __exit__(self, *_) -> None:
        self.cleanup.close()


@functools.cache
def groups_of(tp: int, pp: int) -> Groups:
    """Return the process groups for these degrees. All rows share them, because NCCL does not free
    a communicator's memory. A collective."""
    return Groups(TIMEOUT_S, tp, pp)


def init_randomly(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw all weights with standard deviation 0.02: matrices around 0, and norms' weights, which
    have one dimension, around 1."""
    for p in model.parameters():
        mean = 1.0 if p.dim() == 1 else 0.0
        nn.init.normal_(p, mean, 0.02, generator=generator)


def random_batch(run: Run) -> train.Batch:
    """Return uniform random tokens and their labels (M, B, T/sp). Data-parallel ranks get
    different ones."""
    random = np.random.default_rng(run.coordinates.data_rank)
    size = run.plan.seq + 1

    def window(_: int) -> Window:
        return Window(random.integers(run.plan.model.vocab, size=size), np.ones(size, bool))

    return train.load_batch(run, 0, window)


class TorchStates:
    """PyTorch's gradient clipping and fused AdamW, with the methods of States that train.run_step
    calls."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def begin_step(self) -> None:
        pass

    finish_gradients = begin_step

    def update(self, lr: float, clip: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, loss.isfinite()


# ---------------------------------------------------------------------------- transformers

CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@contextlib.contextmanager
def without_mask() -> Iterator[None]:
    """Let transformers call PyTorch's attention with is_causal=True and without a mask tensor.
    Compiled with torch before 2.14, attention would otherwise read a mask from memory."""
    from transformers import AttentionMaskInterface

    make_mask = AttentionMaskInterface()["sdpa"]
    AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", make_mask)


@contextlib.contextmanager
def liger_kernels(model: nn.Module) -> Iterator[None]:
    """Run transformers' model with Liger's kernels. Liger replaces functions and classes in the
    module modeling_llama, for every model in this process, so they are put back at the end."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    original = dict(vars(modeling_llama))
    try:
        apply_liger_kernel_to_llama(model=model)
        yield
    finally:
        vars(modeling_llama).update(original)


@contextlib.contextmanager
def float8_linears(model: nn.Module, emulate: bool = False) -> Iterator[None]:
    """Let torchao compute the products of transformers' layers in float8.

    emulate: round operands to float8, but multiply them in float32, as a test does on a CPU.

    torchao changes two functions of PyTorch's compiler for every model in this process, so they are
    put back at the end. Raises ConfigError if no matrix is large enough for torchao's filter.
    """
    from torch._inductor.codegen.triton import TritonOverrides
    from torchao.float8 import (
        Float8LinearConfig,
        _auto_filter_for_recipe,
        _inductor_patch,
        convert_to_float8_training,
    )
    from torchao.float8.float8_linear import Float8Linear

    recipe = Float8LinearConfig.from_recipe_name("tensorwise")
    original = {name: vars(TritonOverrides)[name] for name in ("minimum", "maximum")}
    try:
        convert_to_float8_training(
            model,
            config=replace(recipe, emulate=emulate),
            module_filter_fn=_auto_filter_for_recipe("tensorwise", filter_fqns=["lm_head"]),
        )
        if not any(isinstance(module, Float8Linear) for module in model.modules()):
            raise ConfigError("torchao's filter finds every matrix of this model too small for fp8")
        yield
    finally:
        for name, function in original.items():
            setattr(TritonOverrides, name, function)
        _inductor_patch._PATCHED = False  # so that torchao changes them again for the next row


# word of a label -> keep_every of is_recomputed
TRANSFORMERS_RECOMPUTED = {"half": 2, "three-quarters": 4, "full": 0}


def is_recomputed(layer: int, keep_every: int) -> bool:
    """Return whether backward recomputes a layer. Layers 0, keep_every, 2 * keep_every, ... are not
    recomputed. So keep_every=1 recomputes no layer, and 2 every second one. 0 recomputes all."""
    return keep_every == 0 or layer % keep_every > 0


def recompute_layers(model: nn.Module, keep_every: int) -> None:
    """Let backward recompute the layers of transformers' model that is_recomputed names."""
    model.gradient_checkpointing_enable()
    for i, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = is_recomputed(i, keep_every)


def by_layer_loss(model: nn.Module, liger_loss: bool) -> Callable:
    """Compile each layer of transformers' model by itself, and its head with the loss.

    Returns a function of (tokens, labels, scale) whose result is the loss. liger_loss: Liger's head
    and loss, which are not compiled.
    """
    for layer in model.model.layers:
        layer.compile(dynamic=False)

    if liger_loss:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss_of_head = LigerFusedLinearCrossEntropyLoss(reduction="sum")

        def head_loss(hidden, labels, scale):
            rows = hidden.flatten(0, 1)
            return loss_of_head(model.lm_head.weight, rows, labels.flatten()) * scale
    else:

        @functools.partial(torch.compile, dynamic=False)
        def head_loss(hidden, labels, scale):
            return model.loss_function(
                model.lm_head(hidden),
                labels,
                model.config.vocab_size,
                num_items_in_batch=1 / scale,
                shift_labels=labels,
            )

    def loss_of(tokens, labels, scale):
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        return head_loss(hidden, labels, scale)

    return loss_of


def whole_model_loss(model: nn.Module, compiled: bool) -> Callable:
    """Compile transformers' model as a whole, if `compiled`.

    Returns a function of (tokens, labels, scale) whose result is the loss.
    """
    call_model = torch.compile(model, dynamic=False) if compiled else model

    def loss_of(tokens, labels, scale):
        return call_model(
            tokens,
            labels=labels,
            shift_labels=labels,
            use_cache=False,
            num_items_in_batch=1 / scale,
        ).loss

    return loss_of


def transformers_step(run: Run, options: list[str]) -> Step:
    """Build a step of transformers' model on one rank. With the same weights its losses are
    those of our model, up to rounding.

    options: the words of the row's label after "transformers".
    """
    from transformers import AutoModelForCausalLM

    bf16_weights = "bf16" in options
    weights_dtype = torch.bfloat16 if bf16_weights else torch.float32
    hf_config = export_config(run.plan.model, {}, weights_dtype)
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(without_mask())
        with run.device:
            model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa")
        if "liger" in options:
            cleanup.enter_context(liger_kernels(model))
        if "fp8" in options:
            cleanup.enter_context(float8_linears(model))
        for word in TRANSFORMERS_RECOMPUTED.keys() & set(options):
            recompute_layers(model, TRANSFORMERS_RECOMPUTED[word])
        # forget what earlier rows have compiled, because it counts toward PyTorch's limit of
        # recompilations
        torch.compiler.reset()
        if "by-layer" in options:
            model_loss = by_layer_loss(model, "liger-loss" in options)
        else:
            model_loss = whole_model_loss(model, compiled="liger" not in options)

        def loss_of(tokens, labels, scale, *_):
            with torch.autocast(run.device.type, torch.bfloat16, enabled=not bf16_weights):
                return model_loss(tokens, labels, scale)

        # Our loop over micro-batches, which calls loss_of in place of our model. The order of
        # kernels holds in its backward, too, because recomputation chooses a kernel again
        with_cudnn_first = sdpa_kernel(CUDNN_FIRST, set_priority=True)
        model.forward_backward = with_cudnn_first(
            functools.partial(LLaMA.forward_backward, loss_of)
        )
        # pop_all: the changes stay until the step ends, and not only until this function returns
        return Step(run, model, TorchStates(model), random_batch(run), cleanup=cleanup.pop_all())


# ---------------------------------------------------------------------------- FSDP2, DeepSpeed


class AttentionOperator:
    """Our attention, called as an operator of PyTorch, so that selective checkpointing can name it.

    An operator of PyTorch takes tensors and numbers, but no Attention. So it gets a number, and
    finds its Attention in `by_number`. An entry lives as long as its Attention, which this object
    and so the model refer to.
    """

    by_number: ClassVar = weakref.WeakValueDictionary()  # number -> Attention
    next_number: ClassVar = itertools.count()

    def __init__(self, attention: Attention):
        self.attention = attention
        self.number = next(self.next_number)
        self.by_number[self.number] = attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention_operator(q, k, v, self.number)

    def of_layer(self, i: int) -> "AttentionOperator":
        return self


@torch.library.custom_op("bench::attention", mutates_args=())
def attention_operator(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of the Attention that has this number."""
    return AttentionOperator.by_number[number].forward(q, k, v)


def save_attention(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *qkv, ctx.number = inputs
    ctx.save_for_backward(*qkv, *output)


def attention_backward(ctx, do: Tensor, _) -> tuple:
    """Return the gradients of q, k and v, and None for the number."""
    attention = AttentionOperator.by_number[ctx.number]
    return *attention.backward(lambda: (do, []), *ctx.saved_tensors), None


attention_operator.register_autograd(attention_backward, setup_context=save_attention)

KEEP_ATTENTION = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.bench.attention.default]
)
# WHAT in a row's label (see the top of this file) -> flags of checkpoint(), and keep_every of
# is_recomputed. selective: a recomputed layer does not run attention again, because attention's
# result is kept
RECOMPUTED = {
    "none": ({}, 1),
    "half-selective": ({"context_fn": KEEP_ATTENTION}, 2),
    "three-quarters-selective": ({"context_fn": KEEP_ATTENTION}, 4),
    "selective": ({"context_fn": KEEP_ATTENTION}, 0),
    "full": ({}, 0),
}


class WholeBlock(Block):
    """A Block whose call runs the whole layer. FSDP2 needs this, because it unshards and reshards
    parameters in hooks that run before and after a module's call."""

    forward = run_block


class WholeLayerModel(LLaMA):
    """Our model, made of WholeBlocks. recomputed: the key of RECOMPUTED that says which of them are
    recomputed in backward."""

    def __init__(self, cfg: ModelConfig, attention: Attention, recomputed: str):
        checkpoint_flags, keep_every = RECOMPUTED[recomputed]
        super().__init__(cfg, AttentionOperator(attention) if checkpoint_flags else attention)
        self.checkpoint_flags = checkpoint_flags
        self.keep_every = keep_every
        self.blocks = nn.ModuleList(WholeBlock(cfg) for _ in self.blocks)
        self.layer_runner = WholeLayerModel.start_layers

    def start_layers(self, positions: Positions, attention: Callable) -> Callable:
        """Return run_layer(i, x), which calls layer i."""

        def run_layer(i, x):
            block = self.blocks[i]
            if is_recomputed(i, self.keep_every):
                return checkpoint(
                    block, x, positions, attention, use_reentrant=False, **self.checkpoint_flags
                )
            return block(x, positions, attention)

        return run_layer


class Fsdp2States(TorchStates):
    """The model states under PyTorch's fully_shard, with its fastest settings: it communicates in
    bf16 and prefetches. As ZeRO-2 it reduces gradients once per step, in the last micro-batch."""

    def __init__(self, model: LLaMA, run: Run, on_host: bool):
        """Shard the model over os ranks. With p > 1 parameters are resharded after each pass
        (ZeRO-3). With p = 1 parameters and gradients stay whole until the backward of the last
        micro-batch (ZeRO-2).

        on_host: the shards of all model states are kept and updated in host memory.
        """
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        plan, f = run.plan, run.plan.factors
        mesh = fsdp2_mesh(run.device.type, plan.ranks // f.os, f.os)
        self.reshard = f.p > 1
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
        )
        offload = OffloadPolicy()
        if on_host:
            offload = CPUOffloadPolicy(pin_memory=run.device.type == "cuda")
        shard = functools.partial(
            fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload
        )
        for block in model.blocks:
            shard(block, reshard_after_forward=self.reshard)
        shard(model, reshard_after_forward=False)

        model.to_empty(device="cpu" if on_host else run.device)
        torch.manual_seed(0)  # on every rank, as DTensor asks for; a step can then be repeated
        init_randomly(model)
        for block, next_block in zip(model.blocks, model.blocks[1:]):
            block.set_modules_to_forward_prefetch([next_block])
            next_block.set_modules_to_backward_prefetch([block])

        super().__init__(model)
        self.ranks = plan.ranks

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Do what LLaMA.forward_backward does. Each of our losses is a summand of the step's loss,
        so gradients must be summed over ranks. FSDP2 takes their mean. So the loss is multiplied by
        the number of ranks before backward."""
        micro_batches = list(micro_batches)
        total = 0.0
        for i, micro_batch in enumerate(micro_batches):
            self.begin_micro_batch(last=i == len(micro_batches) - 1)
            loss = self.model(*micro_batch)
            (loss * self.ranks).backward()
            total += loss.detach()
        return total

    def begin_micro_batch(self, last: bool) -> None:
        """Tell FSDP2 whether this micro-batch is the last of its step."""
        self.model.set_is_last_backward(last)
        self.model.set_requires_all_reduce(last)
        if not self.reshard:  # ZeRO-2: gradients stay whole until the last micro-batch
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)


@functools.cache
def fsdp2_mesh(device_type: str, replicas: int, shards: int) -> dist.DeviceMesh:
    """Return FSDP2's mesh of ranks. `shards` neighbours share the model states, and there are
    `replicas` such groups. The mesh is made once, for the same reason as groups_of."""
    mesh = dist.init_device_mesh(
        device_type, (replicas, shards), mesh_dim_names=("replicate", "shard")
    )
    return mesh if replicas > 1 else mesh["shard"]


# Bytes per parameter of FSDP2's model states in host memory, all float32: the parameter, its
# gradient and AdamW's two moments
FSDP2_HOST_BYTES = 16


def check_host_memory(run: Run) -> None:
    """Raise ConfigError if FSDP2's model states do not fit in the host memory of this run.

    Without this check, Linux would kill the process, and with it the rest of the table.
    """
    needed = FSDP2_HOST_BYTES * run.plan.params / run.plan.factors.os
    if needed > run.hardware.host_budget:
        raise ConfigError(
            f"FSDP2 with model states on the host needs {in_unit(needed)} of host memory per rank "
            f"({FSDP2_HOST_BYTES} bytes per parameter), of {in_unit(run.hardware.host_budget)}"
        )


def fsdp2_step(run: Run, options: list[str]) -> Step:
    """Build a step of the same model and kernels under FSDP2, sharded over os ranks. options: the
    words of the row's label after "fsdp2", the first of which is a key of RECOMPUTED. Raises
    ConfigError if the host's memory is too small. A collective."""
    if "host" in options:
        check_host_memory(run)
    attention = train.make_attention(run, groups_of(1, 1))
    with torch.device("meta"):
        model = WholeLayerModel(run.plan.model, attention, recomputed=options[0])
    states = Fsdp2States(model, run, "host" in options)
    model.forward_backward = states.forward_backward
    return Step(run, model, states, random_batch(run))


DEEPSPEED_BUCKET = 500_000_000  # elements that DeepSpeed gathers ahead, and reduces together


class DeepSpeedStates:
    """The states of DeepSpeed's ZeRO-3, with the methods of States that train.run_step calls."""

    def __init__(self, model: LLaMA, run: Run, cleanup: contextlib.ExitStack):
        """Shard the model (bf16, whole on every rank) over all ranks. cleanup: gets a callback that
        frees everything at the end, also if this method fails.

        Master weights and moments are float32. PyTorch's fused AdamW updates them, because
        DeepSpeed's own has to be compiled. A layer is one unit of ZeRO-3 (a leaf module), so that
        its matrices are gathered together. Weights outside of layers are registered with the whole
        model, which gathers them when it is called.
        """
        import deepspeed

        self.engine = None
        self.modules = list(model.modules())
        cleanup.callback(self.give_back)
        deepspeed.utils.logger.setLevel("WARNING")
        # DeepSpeed reads LOCAL_RANK, which only torchrun sets
        os.environ.setdefault("LOCAL_RANK", str(run.device.index or 0))
        deepspeed.utils.set_z3_leaf_modules(model, [WholeBlock])
        for name, p in model.named_parameters():
            if not name.startswith("blocks."):
                deepspeed.zero.register_external_parameter(model, p)

        settings = {
            "train_micro_batch_size_per_gpu": run.plan.micro_batch,
            "gradient_accumulation_steps": run.plan.micro_batches,
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": DEEPSPEED_BUCKET,
                "stage3_prefetch_bucket_size": DEEPSPEED_BUCKET,
                # True replaces PyTorch's function `linear`, also for the rows that follow
                "memory_efficient_linear": False,
            },
        }
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self.ranks = run.plan.ranks

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Do what LLaMA.forward_backward does. Each of our losses is a summand of the step's loss,
        so gradients must be summed over ranks. DeepSpeed takes their mean. So the loss is
        multiplied by the number of ranks before backward."""
        loss = 0.0
        for micro_batch in micro_batches:
            micro_batch_loss = self.engine(*micro_batch)
            self.engine.backward(micro_batch_loss * self.ranks, scale_wrt_gas=False)
            if not self.engine.is_gradient_accumulation_boundary():
                self.engine.step()  # counts the micro-batch
            loss += micro_batch_loss.detach()
        return loss

    def begin_step(self) -> None:
        pass

    finish_gradients = begin_step

    def update(self, lr: float, clip: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        optimizer = self.engine.optimizer
        optimizer.clip_grad = clip
        for group in optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm()), loss.isfinite()

    def give_back(self) -> None:
        """Free the memory of this row. DeepSpeed's caches refer to the model's modules, and to the
        coordinator that gathers their parameters, for as long as the process runs. These objects
        stay, but their attributes, and so the tensors, are deleted."""
        cached_objects = self.modules
        if self.engine:
            cached_objects.append(self.engine.optimizer.parameter_offload.get_param_coordinator())
            self.engine.destroy()
        for cached in cached_objects:
            vars(cached).clear()


def deepspeed_step(run: Run, options: list[str]) -> Step:
    """Build a step of the same model and kernels under DeepSpeed's ZeRO-3. options: the words of
    the row's label after "deepspeed", the first of which is a key of RECOMPUTED. A collective."""
    attention = train.make_attention(run, groups_of(1, 1))
    with torch.device("meta"):
        model = WholeLayerModel(run.plan.model, attention, recomputed=options[0])
    model.to(torch.bfloat16).to_empty(device=run.device)
    # ranks draw the same weights, because DeepSpeed keeps small ones whole on every rank
    generator = torch.Generator(run.device).manual_seed(0)
    init_randomly(model, generator)

    with contextlib.ExitStack() as cleanup:
        states = DeepSpeedStates(model, run, cleanup)
        model.forward_backward = states.forward_backward
        return Step(run, model, states, random_batch(run), cleanup=cleanup.pop_all())


# by a label's first word
PEERS = {"fsdp2": fsdp2_step, "deepspeed": deepspeed_step, "transformers": transformers_step}
