"""What happens, in order? flags -> device -> model -> data -> plan -> build -> loop.

    python train.py                                   a laptop: a tiny model, the machine's own text
    torchrun --nproc_per_node 8 train.py --model 7b   one process a GPU, the same code path
    python train.py --help                            every flag

A step draws `batch` sequences (data.py), and splits them over the data-parallel ranks and then into
micro-batches; the sp ranks of each hold parts of the same sequences. The loss is the sum over all
valid tokens divided by their number, so no split changes it. What flags leave open (sp, p, g, os,
what layers keep) is chosen by planner.py, from counted bytes and predicted times, and printed.
Stopped by SIGTERM or SIGINT, a run finishes its step and saves (checkpoint.py); killed, it
continues from OUT's newest step with `--resume` as if nothing had happened.

    settle     flags, device, model, data and plan, in straight code
    prepare    build makes a rank's part of the model and its states; first weights
    train      is the loop; run_step is a step, and its docstring says what runs beside what

Legend: pp * dp * sp * tp ranks, R = dp * sp of them of one stage and column; M micro-batches a step
and rank, B sequences a micro-batch, T tokens a sequence, T/sp on a rank.
"""

import contextlib
import gc
import itertools
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import checkpoint
import costs
import hardware
import hf
import planner
from attention import (
    KERNELS,
    Attention,
    Documents,
    Exchange,
    Ring,
    check_ring,
    make_exchange,
    pick_kernel,
    sequence_positions,
)
from data import (
    Sequences,
    check_tokens,
    fingerprint,
    open_corpus,
    open_to_append,
    own_or_absent,
    replace_file,
    split,
    tokenise,
)
from model import (
    MODELS,
    LLaMA,
    ModelConfig,
    flops_per_token,
    initial_weight,
    param_count,
    rope_kind,
    whole_layers,
)
from offload import ChunkedLayers
from ops import IGNORE, accumulation_dtype
from optim import OPTIMIZERS, check_optimizer
from pipeline import Pipeline, in_flight, keep_stage, pipeline_order
from planner import (
    DTYPES,
    Constraints,
    Hardware,
    check_values,
    flag,
    flag_name,
    flags_of,
    make_parser,
)
from ranks import (
    ConfigError,
    Groups,
    UnexpectedError,
    check_same,
    error_of_any,
    heartbeat,
    of_all_ranks,
    on_all_ranks,
    on_rank_0,
    patient_group,
    print0,
    start_ranks,
    use_more_queues,
)
from replay import StepMemory, mark
from shard import States, check_weights
from streams import GIB, CommStream, host_budget, in_unit
from tensor import Columns, check_columns, split_columns

EVAL_SEQUENCES = 64  # most of a validation
MAX_SKIPS = 5  # non-finite steps in a row that end the run

# ---------------------------------------------------------------------------- flags


@dataclass(frozen=True)
class Config(Constraints):
    """Every flag: these, and what they leave to the planner. None is `auto`, and stays so but for
    what defines a run: model, seq, batch, lr, document_token."""

    # fmt: off
    model: str = flag(
        "auto", "auto: tiny on a CPU, 7b on GPUs, of --init its own", among=("auto", *MODELS),
        group="what is trained, on what, how long")
    init: str = flag(
        "random", "first weights: random, or hf:DIR, a Hugging Face folder of Llama, Mistral, "
        "Qwen2, Qwen2.5 or Qwen3 in safetensors; a resumed run does not need DIR")
    rope_scaling: str = flag(
        "", "for sequences past the trained length: linear:FACTOR, llama3:FACTOR or yarn:FACTOR "
        "times what the model reaches, which keeps its own kind; or theta:BASE, another base")
    data: str = flag(
        "stdlib", "a text file or a folder of them (bytes are the tokens, without --tokenizer), "
        "a .bin file of ids or a folder of them (val.bin: validation; uint16, or as FILE.bin.json "
        'says: {"token_bytes": 4, "ignore": 0}: 0 is no label), or stdlib: the sources of Python')
    seq: int | None = flag(None, "tokens a sequence; auto: 256 for tiny, else 4096", 1, 2**40)
    steps: int = flag(
        200, "of the whole run; 0: initialise, save, export; with --eval-every 1 evaluate alone",
        0, 2**40)
    lr: float | None = flag(
        None, "peak learning rate; auto: 3e-3 for tiny, 6e-4 for 160m, 2e-5 for --init, else 3e-4",
        0, 1e30)
    min_lr: float = flag(
        0.1, "the cosine decay's end, as a fraction of --lr, at --steps of the first command: a "
        "resumed run that has more goes on at it", 0, 1)
    warmup: int | None = flag(
        None, "steps of linear warm-up; auto: a quarter of --steps, at most 500", 0, 2**40)
    weight_decay: float = flag(0.1, "of matrices, not of norms and biases", 0)
    clip: float = flag(1.0, "largest global norm of the gradient; 0: no clipping", 0, 1e30)
    seed: int = flag(0, "of the weights and of the order of the data", 0, 2**31 - 1)
    device: str = flag("auto", "auto: GPUs, if any", among=("auto", "cpu", "cuda"),
                      group="on which machine")
    dtype: str = flag("auto", "auto: bf16 on GPUs, else fp32", among=("auto", *DTYPES))
    memplan: str = flag(
        "off", "addresses of a step's tensors, planned once; on one GPU with its states and whole "
        "layers a step becomes a CUDA graph, in which Python runs no more: a fork's may not change "
        "with the step, nor wait for the GPU", among=("off", "on"))
    timeout: float = flag(600.0, "seconds after which a collective gives up on a lost rank", 1, 1e9)
    dry_run: bool = flag(False, "print the best plans and their memory, and end")
    out: str = flag(
        "out", "folder of log.jsonl, loss.png (by step, and by position) and checkpoints",
        group="files")
    eval_every: int = flag(0, "steps between validations; 0: at the end; -1: never", -1, 2**40)
    save_every: int = flag(
        0, "steps between checkpoints; 0: at the end or when stopped; -1: never", -1, 2**40)
    keep: int = flag(2, "checkpoints kept")
    save_async: bool = flag(False, "write them while steps go on, from copies in host memory")
    resume: str = flag(
        "never", "never, latest (said alone, too), auto (latest, if there is one) or a "
        "checkpoint's folder: goes on under its flags, but for those that are given")
    export: str = flag(
        "", "folder for a Hugging Face checkpoint of the last weights in --dtype, of the "
        "architecture that was imported (else Llama), with its tokenizer and license")
    # fmt: on

    def __post_init__(self):
        """Raise ValueError for flags out of their range, or that contradict each other."""
        check_values(self)
        if not re.fullmatch("random|hf:.+", self.init):
            raise ValueError(f"--init {self.init}: random or hf:DIR")

    @property
    def import_folder(self) -> str:
        """Return DIR of --init hf:DIR, else an empty text."""
        return self.init.partition("hf:")[2]


OF_A_COMMAND = {"resume", "out", "export", "dry_run"}  # not of the run that it goes on with


def parse(argv: list[str] | None = None) -> dict:
    """Return the flags that a command gives, by the names of their fields."""
    return vars(make_parser(Config, __doc__.split("\n")[0]).parse_args(argv))


def resumed_flags(given, old):
    """Return the flags of the run to resume, updated by those that are given: the same tokens a
    step, if --seq is given and --batch is not. Raises ValueError, also for weights from another
    folder than that of the run, however it is spelt."""
    known = flags_of(Config).keys() & old.keys() - OF_A_COMMAND
    try:
        Config(**{name: old[name] for name in known})
    except Exception as e:  # whatever a file may say
        raise ValueError(f"--resume: meta.json does not hold the flags of a run: {e}") from e
    init = given.get("init", old["init"])
    if len({Path(text.removeprefix("hf:")).resolve() for text in (init, old["init"])}) > 1:
        raise ValueError(f"--init {init}: the run to resume began with {old['init']}; drop it")
    flags = {name: old[name] for name in known} | given
    flags["seq"] = flags["seq"] or old["seq"]
    if "batch" not in given:
        flags["batch"] = max(1, old["batch"] * old["seq"] // flags["seq"])
    return Config(**flags)


# ---------------------------------------------------------------------------- setup

# said once by a backward's thread, whose context PyTorch then makes
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")


def expandable_segments() -> None:
    """Let PyTorch's allocator map memory where a block needs it: without, the pieces between what
    layers keep add up to gigabytes. What the environment says goes before."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@dataclass(frozen=True)
class Run:
    """What a command has settled."""

    cfg: Config
    rank: int
    device: torch.device
    kernel: str
    plan: costs.Plan
    hardware: Hardware | None = None
    train: Sequences | None = None
    val: Sequences | None = None
    ignored_id: int = -1  # that is never a label, as the data says; -1: none
    start: int = 0  # the step, and ...
    samples: int = 0  # ... the sequences seen, that it goes on from
    record: dict | None = None  # what a checkpoint says of it
    resumed: checkpoint.Checkpoint | None = None  # that it goes on from, or ...
    read: Callable | None = None  # ... of an import: name -> tensor

    @property
    def coordinates(self) -> tuple:
        """Return this rank's stage, its number among data-parallel ranks, among those of a
        sequence, and its column."""
        plan = self.plan
        return tuple(map(int, np.unravel_index(self.rank, (plan.pp, plan.dp, plan.sp, plan.tp))))


def choose_device(cfg, local_rank):
    """Return this process's device, and make a GPU the current one. Raises ValueError if it is not
    there."""
    if torch.__version__ < "2.11":
        raise ValueError(f"torch {torch.__version__}: at least 2.11")
    gpus = torch.cuda.device_count()
    if cfg.device == "cpu" or (cfg.device == "auto" and not gpus):
        return torch.device("cpu")
    if local_rank >= gpus:
        raise ValueError(
            f"--device {cfg.device}: this node has {gpus} GPUs, and this process is "
            f"number {local_rank}; --device cpu, or at most {gpus} processes a node"
        )
    if cfg.pp != 1:
        use_more_queues()
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    expandable_segments()
    return device


def choose_model(cfg: Config, device: torch.device, resumed: checkpoint.Checkpoint | None) -> tuple:
    """Return the flags with the model's name (auto: an import's), --seq and --lr; the model;
    config.json of an import, {} of others; and what reads its weights, name -> tensor, if it is
    new. Raises ValueError, also if the checkpoint to resume is of another model: only a
    --rope-scaling, the first or of the same kind, may be new."""
    name, read = cfg.model, None
    source = resumed.meta["source"] if resumed else {}
    if cfg.import_folder and not resumed:
        imported, source = hf.read_config(cfg.import_folder)
        if name != "auto":
            raise ValueError(f"--model {name}: with --init hf:DIR the model is DIR's; drop it")
        read = hf.open_weights(cfg.import_folder, imported)
    elif name == "auto" and not source:
        name = "tiny" if device.type == "cpu" else "7b"
    model = hf.model_of(source) if name == "auto" else MODELS[name]
    usual = {"tiny": 3e-3, "160m": 6e-4, "auto": 2e-5}
    cfg = replace(
        cfg,
        model=name,
        seq=cfg.seq or (256 if name == "tiny" else 4096),
        lr=usual.get(name, 3e-4) if cfg.lr is None else cfg.lr,
    )
    window = hf.sliding_window(source)
    if 0 < window < cfg.seq:
        raise ValueError(
            f"--seq {cfg.seq}: the weights were trained with sliding windows of "
            f"{window} tokens, which are not built; at most --seq {window}"
        )
    model = hf.with_rope(cfg.rope_scaling, model)
    kind, _, _ = cfg.rope_scaling.partition(":")
    if resumed:
        changes = "rope_theta" if kind == "theta" else "rope_scaling"
        checkpoint.check_same_model(resumed, model, {"max_positions", kind and changes})
        reach = resumed.meta["model"]["max_positions"]  # it may have been trained at more
    # an import reaches further by its flags alone, and YaRN's reach is a number to compute by
    elif source and kind != "theta" or rope_kind(model.rope_scaling) == "yarn":
        reach = 0
    else:
        reach = cfg.seq
    return cfg, replace(model, max_positions=max(model.max_positions, reach)), source, read


def open_data(cfg, model):
    """Return the flags with --document-token, training and validation sequences, and what tells
    changed data from the same. Tokens that --tokenizer makes of text the first rank writes, if they
    are not there; the others wait, which may take hours. Raises ConfigError. A collective of all
    ranks."""
    path, end = cfg.data, -1
    if cfg.tokenizer:
        # a first rank that dies closes its connections, which ends the others
        path, end = on_rank_0(
            tokenise, cfg.data, cfg.tokenizer, Path(cfg.out) / "tokens", group=patient_group()
        )
    if cfg.document_token is None:
        cfg = replace(cfg, document_token=end)

    if cfg.document_token >= model.vocab:
        raise ConfigError(
            f"--document-token {cfg.document_token}: the model's vocabulary ends at "
            f"{model.vocab - 1}"
        )
    if cfg.document_token >= 0 and cfg.memplan == "on":
        raise ConfigError(
            "--memplan on: requests differ with each batch's documents: --memplan "
            "off, or --document-token -1"
        )

    def read():
        corpora = open_corpus(path)
        there = [*filter(None, corpora)]
        check_tokens(there, model.vocab, dist.get_rank(), dist.get_world_size())
        return *split(*corpora, cfg.seq, cfg.seed, LLaMA.labels_ahead), fingerprint(there)

    return cfg, *on_all_ranks(read)


def try_folder(folder: str) -> None:
    """Raise ValueError if files cannot be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise ValueError(f"{folder} cannot be written: {e}; name another") from e


def check_folders(cfg, model, source):
    """Raise ValueError unless --out and --export can be written, and an export overwrites and
    drops nothing."""
    try_folder(cfg.out)
    for name in ("lock", "log.jsonl"):
        own_or_absent(Path(cfg.out, name))
    if cfg.export:
        try_folder(cfg.export)
        if {*os.listdir(cfg.export)} - {"partial"} or os.path.samefile(cfg.export, cfg.out):
            raise ValueError(
                f"--export {cfg.export}: the folder is not empty, or --out; name another"
            )
        if cfg.attention in KERNELS and not KERNELS[cfg.attention].plain:
            raise ValueError(f"--export: nobody else computes --attention {cfg.attention}")
        hf.export_config(model, source, torch.float32)
        hf.files_beside(folders_beside(cfg))


def choose_plans(
    cfg: Config,
    model: ModelConfig,
    device: torch.device,
    kernel: str,
    gpu: float | None = None,
) -> tuple[list[costs.Plan], Hardware]:
    """Return the best plans for what flags leave open but dtype, by predicted time, and what they
    are for: the ranks, the profile of their devices, and the memory that the smallest of them has.
    kernel: the attention kernel that runs, whose rates predict the time. gpu: bytes of a GPU to plan with, if not its own. Raises ConfigError. A collective of all ranks:
    all come to the same plans."""
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    profile = on_rank_0(hardware.known_profile, device_name(device), per_node)
    total = 2**60
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    gpus = of_all_ranks(gpu or planner.GPU_SHARE * min(total, cfg.gpu_memory or total))
    hosts = of_all_ranks(on_all_ranks(host_budget, per_node, cfg.host_memory))
    processor = on_rank_0(hardware.processor_name)  # of all ranks, one plan
    there = Hardware(world, per_node, profile, min(gpus), min(hosts), kernel, processor)
    usual = 2**12 if cfg.model == "tiny" else 2**19
    return on_all_ranks(planner.plan, replace(cfg, default_tokens=usual), model, there), there


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def cap_gpu(run: Run) -> None:
    """Hold PyTorch's allocator to --gpu-memory, less what ranks map from each other beside it."""
    if run.cfg.gpu_memory and run.device.type == "cuda":
        _, total = torch.cuda.mem_get_info()
        share = (run.cfg.gpu_memory - costs.sent_bytes(run.plan)) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def introduce(run, plans):
    """Print the flags that are not as usual, the model, the data, and what was chosen."""
    cfg, model = run.cfg, run.plan.model
    print0(
        "config:",
        *(
            f"{name}={getattr(cfg, name)}"
            for name, f in flags_of(cfg).items()
            if getattr(cfg, name) != f.default
        ),
    )
    causal, full = flops_per_token(model, cfg.seq)
    print0(
        f"model: {param_count(model):,} parameters, {causal:.3g} FLOPs a token causal, "
        f"{full:.3g} full, at {cfg.seq:,} tokens; on {device_name(run.device)}, attention by "
        f"{run.kernel}"
    )
    if cfg.seq > model.max_positions:
        print0(
            f"--seq {cfg.seq:,} is past the {model.max_positions:,} tokens that the rotary "
            "embedding reaches; a larger factor of --rope-scaling extends it"
        )
    if model.tied:
        print0(
            "the head of the import is its embedding: here they are trained as two matrices, "
            "and exported as two unless they are still equal"
        )
    print0(
        f"data {cfg.data}: {len(run.train.corpus):,} tokens, {run.train.count:,} training and "
        f"{run.val.count:,} validation sequences"
        f"{f'; documents end with token {cfg.document_token}' * (cfg.document_token >= 0)}"
    )
    describe(run, plans[1:] if cfg.dry_run else plans[1:2])


def describe(run: Run, others: Sequence[costs.Plan] = ()) -> None:
    """Print what was chosen; what a GPU is predicted to do, also by other plans."""
    print0(
        f"plan: {planner.in_words(run.plan)} (batch: data-parallel ranks x micro-batches x "
        "sequences of one)"
    )
    if run.device.type == "cuda" or run.cfg.dry_run:
        print0(planner.describe_plans([run.plan, *others], run.hardware))


# ---------------------------------------------------------------------------- build, step


def make_attention(run: Run, groups: Groups) -> Attention:
    """Return attention over the ranks of a sequence. A collective of all ranks."""
    plan = run.plan
    exchange = make_exchange(
        groups, plan.head_ranks, CommStream(run.device), plan.per_node // plan.tp
    )
    return Attention(
        run.kernel,
        plan.head_groups,
        exchange,
        Ring(groups, plan.sp, plan.ring, CommStream(run.device)),
        groups.column,
    )


def try_parts(run: Run) -> None:
    """Try on small random tensors what a fork may get wrong without a word, of what this run uses:
    an optimizer that updates parts of a matrix, a kernel on a ring, a layer cut in columns, an
    export. Raises ConfigError with what differs. A collective of all ranks."""
    plan = run.plan
    on_all_ranks(check_optimizer, plan.optimizer, OPTIMIZERS[plan.optimizer])
    if plan.ring > 1:
        cfg = plan.column
        heads, kv_heads = cfg.heads // plan.head_ranks, cfg.kv_heads // plan.head_ranks
        on_all_ranks(check_ring, run.kernel, heads, kv_heads, cfg.head_dim, run.device, plan.dtype)
    if plan.tp > 1:
        on_all_ranks(check_columns, plan.model, plan.tp_mode)
    if run.cfg.export:
        on_rank_0(hf.check_export, plan.model, run.record["source"])


def works_alone(run: Run) -> bool:
    """Return whether a step is one stream of a GPU: of one rank, with its states and all that its
    layers keep."""
    where = run.device.type, run.plan.os_place, dist.get_world_size()
    return where == ("cuda", "gpu", 1) and run.plan.activations is None


def build(run: Run, op: Attention, groups: Groups) -> tuple[LLaMA | Pipeline, States]:
    """Make what this rank has of the model, with layers in chunks if that is planned, and its
    states. Raises ConfigError. A collective of all ranks."""
    plan = run.plan
    kept = plan.activations
    with torch.device("meta"):
        model = LLaMA(plan.model, op)
    for of_whole in ("shapes", "starts"):  # kept from now, when the model is whole
        on_all_ranks(getattr, model, of_whole)
    on_all_ranks(check_weights, model, plan.pp)
    on_all_ranks(split_columns, model, Columns(plan.tp_mode, groups))
    parts = keep_stage(model, groups.stage, plan.pp, plan.pp_chunks)
    order = pipeline_order(groups.stage, plan.pp, plan.pp_chunks, plan.micro_batches)
    runners = on_all_ranks(
        lambda: [  # of each part of the model on this stage
            ChunkedLayers(
                model,
                (plan.micro_batch, plan.seq // plan.sp),
                kept.of_part(len(part)),
                plan.chunk,
                run.device,
                plan.dtype,
                in_flight(order, v),
                part,
            ).start
            if kept
            else whole_layers
            for v, part in enumerate(parts)
        ]
    )
    model.layer_runner = runners[0]  # of one stage, the only one
    # alone, nothing travels, and a graph's capture may not wait for other streams
    overlaps = () if works_alone(run) else run.cfg.overlaps
    states = States(
        model,
        run.device,
        plan.dtype,
        plan.micro_batches,
        plan.factors,
        plan.os_layout,
        groups,
        overlap=overlaps,
        gather_layers=kept is not None,
        num_chunks=plan.chunks,
        decay=run.cfg.weight_decay,
        place=plan.os_place,
        optimizer=OPTIMIZERS[plan.optimizer],
    )
    states.on_phase = mark  # a layer's pass, for plans of two levels
    if plan.pp > 1:
        model = Pipeline(
            model, parts, runners, groups, order, run.device, plan.dtype, "pipeline" in overlaps
        )
    return model, states


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step, by micro-batches; positions and documents of one serve all."""

    tokens: Tensor  # (M, B, n): of T/sp what this rank's column has (own_tokens)
    labels: Tensor  # likewise; (M, B, n, labels_ahead), if there are several
    positions: Tensor  # (1, T/sp), or (M, B, T/sp) of documents
    scale: Tensor  # 1 / valid labels of all ranks
    documents: Sequence[Documents | None] = (None,)  # as positions
    seen: Tensor | None = None  # 2 keys - 1, the mean of all ranks' tokens
    unread: str = ""  # why this rank could not read its part

    def micro_batches(self) -> Iterable[tuple]:
        """Return tokens, labels, scale, positions and documents of each, as a model takes them."""
        return zip(
            self.tokens,
            self.labels,
            itertools.repeat(self.scale),
            itertools.cycle(self.positions),
            itertools.cycle(self.documents),
        )


def run_step(
    model: LLaMA | Pipeline, states: States, batch: Batch, lr: float, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run forward, backward and update: the only step there is. Returns the loss, the
    gradient's norm, and whether they are finite, on the device. In order, with what runs
    beside it:

        forward_backward   of each micro-batch first embedding, layers, head and loss; a Matrix
                           raises unshard before its use
                             beside it: host_update and param_broadcast of the last update,
                             param_gather, offload, all-to-alls, rings
                           then the same in reverse; a layer's Matrix raises unshard, then add_grad
                             beside it: param_gather, grad_scatter, prefetch, all-to-alls
                             in the last micro-batch: grad_reduce
                           a stage of a pipeline alternates, in pipeline.pipeline_order
        finish_gradients   vectors' gradients; compute waits for grad_scatter and grad_reduce
        update             global norm, clipping, the optimizer on what this rank owns, unit by unit
                             beside it, and under the next forward: param_broadcast; all of it,
                             if states lie on the host: host_update
    """
    states.begin_step()
    loss = model.forward_backward(batch.micro_batches())
    states.finish_gradients()
    dist.all_reduce(loss)
    return loss, *states.update(lr, clip, loss)


def plan_memory(run: Run) -> StepMemory | None:
    """Return what plans a step's memory, if that is asked for; on a GPU that works alone steps
    become CUDA graphs. Raises ValueError if it cannot be compiled."""
    if run.cfg.memplan == "off":
        return None
    return StepMemory(str(run.device), as_graph=works_alone(run))


def run_planned(memory, model, states, batch, lr, clip):
    """Run a step in planned memory, if there is any; print a plan that is new."""
    if memory is None:
        return run_step(model, states, batch, lr, clip)

    def step(lr, *tensors):  # all that changes from step to step
        return run_step(model, states, Batch(*tensors), lr, clip)

    plans = memory.plans
    result = memory.run(
        step,
        torch.full_like(batch.scale, lr),
        batch.tokens,
        batch.labels,
        batch.positions,
        batch.scale,
    )
    if memory.plans > plans:
        print0(f"memory plan of a step: {memory.plan}", memory.as_graph * "; then a CUDA graph")
    return result


# ---------------------------------------------------------------------------- data of a step


def own_tokens(run, x):
    """Return what this rank's column has of x (..., T/sp) between layers' products."""
    *_, column = run.coordinates
    return x.chunk(run.plan.tp, -1)[column] if run.plan.splits_tokens else x


def to_device(tensor, run):
    """Return a tensor on the device; the host does not wait for the copy."""
    if run.device.type == "cuda":
        tensor = tensor.pin_memory().to(run.device, non_blocking=True)
    return tensor


def load_batch(run: Run, first: int, read: Callable | None = None, count: int = 0) -> Batch:
    """Return this rank's share of `count` sequences (0: a step's) from number `first` on, which
    alone decides what they are: read(i) gives the tokens (T + 1,) of one, or IGNORE for none;
    without it, of a training sample. Labels count on the last stage. A token has as many labels as
    LLaMA.labels_ahead says, the tokens that follow it. A collective of all ranks."""
    plan, ahead = run.plan, LLaMA.labels_ahead
    stage, data_rank, rank, _ = run.coordinates
    each = (count or plan.batch) // plan.dp
    windows = torch.full((each, plan.seq + ahead), IGNORE)  # where none is read
    unread = ""
    try:
        for i, window in enumerate(windows, first + data_rank * each):
            found = torch.as_tensor((read or run.train.sample)(i))
            window[: found.numel()] = found
    except OSError as e:  # a file has gone, or is shorter than it was: all ranks will know
        unread = str(e)
    here = sequence_positions(plan.seq, plan.sp, plan.ring, rank)
    own = own_tokens(run, here)
    tokens = windows[:, own]
    labels = torch.stack([windows[:, own + 1 + i] for i in range(ahead)], -1)  # (B, n, ahead)
    end = run.cfg.document_token
    # behind a document's end no label counts
    ended = torch.stack([windows[:, own + i] == end for i in range(ahead)], -1).cummax(-1).values
    labels[(labels == run.ignored_id) | ended | (stage < plan.pp - 1)] = IGNORE
    positions, documents = here[None], [None]
    if end >= 0:
        begins = (windows[:, : plan.seq] == end).roll(1, 1)  # a document
        begins[:, 0] = True
        at = torch.arange(plan.seq)
        positions = at - (begins * at).cummax(1).values
        positions = positions[:, here].view(-1, plan.micro_batch, len(here))
        documents = []
        for row in begins.view(-1, plan.micro_batch * plan.seq):  # a micro-batch's sequences
            bounds = *row.nonzero().flatten().tolist(), len(row)
            offsets = torch.tensor(bounds, dtype=torch.int32)
            documents.append(Documents(bounds, to_device(offsets, run)))
    seen = (1 + 2 * positions.double().mean()) / plan.ranks
    sums = to_device(torch.stack([(labels[..., 0] != IGNORE).sum(), seen]), run)
    dist.all_reduce(sums)
    scale = 1 / sums[0].clamp(min=1).to(accumulation_dtype(plan.dtype))
    # (1 + ahead, M, B, n), in one copy
    both = torch.stack([tokens.clip(0), *labels.unbind(-1)])
    tokens, *labels = to_device(both.view(1 + ahead, -1, plan.micro_batch, len(own)), run)
    labels = torch.stack(labels, -1) if ahead > 1 else labels[0]
    return Batch(tokens, labels, to_device(positions, run), scale, documents, sums[1], unread)


@torch.no_grad()
def evaluate(run, model):
    """Return what a row of the log says of a validation: the mean loss over the first sequences,
    None if all their labels are ignored; and that of positions from 0, 1, 2, 4, 8 ... on, in their
    document, as [first position, loss]. A rank without a sequence runs a blank one. Raises
    ConfigError if a rank cannot read its data. A collective of all ranks."""
    plan = run.plan
    count = min(run.val.count, EVAL_SEQUENCES)
    at_once = plan.dp * plan.micro_batch
    # loss and labels of positions 0, 1, 2 and 3, 4 to 7, ...
    total = torch.zeros(plan.seq.bit_length() + 1, 2, dtype=torch.float64, device=run.device)
    for first in range(0, count, at_once):
        batch = load_batch(
            run, first, lambda i: run.val.window(i) if i < count else IGNORE, at_once
        )
        if error := error_of_any(batch.unread):
            raise ConfigError(error)
        ((tokens, labels, _, *where),) = batch.micro_batches()
        losses = model(tokens, labels, None, *where, each=True)
        valid = (labels if LLaMA.labels_ahead == 1 else labels[..., 0]) != IGNORE  # (B, n)
        both = torch.stack([losses, valid], -1).double()  # (B, n, 2)
        positions = own_tokens(run, where[0]).expand_as(valid)
        bits = torch.frexp(positions.double()).exponent  # to write a position
        total.index_add_(0, bits.flatten(), both.flatten(0, 1))
    dist.all_reduce(total)
    loss, valid = total.sum(0).tolist()
    return {
        "val_loss": loss / valid if valid else None,
        "val_loss_by_position": [
            [2**bits // 2, loss / valid]
            for bits, (loss, valid) in enumerate(total.tolist())
            if valid
        ],
    }


# ---------------------------------------------------------------------------- weights, checkpoints


def load_random_weights(run: Run, states: States) -> None:
    states.load(
        lambda name: initial_weight(
            name, states.shapes[name], states.starts[name], run.cfg.seed, run.device
        )
    )


def folders_beside(cfg: Config) -> list[Path]:
    """Return the folders whose tokenizer and license an export copies. The tokenizer that made the
    data takes precedence over the import's, so it is the last."""
    return [Path(folder) for folder in (cfg.import_folder, cfg.tokenizer) if folder]


def export(run, states, group):
    """Write the weights to --export, with what the import had beside them. A collective."""
    cfg = run.cfg
    hf.export(
        Path(cfg.export),
        run.plan.model,
        states.full,
        run.plan.dtype,
        run.record["source"],
        folders_beside(cfg),
        group,
    )


# ---------------------------------------------------------------------------- the loop


def learning_rate(run, step):
    """Linear warm-up, then a cosine from lr to min_lr * lr at decay_steps; step counts from 0."""
    cfg, decay_steps = run.cfg, run.record["config"]["decay_steps"]
    warmup = min(decay_steps // 4, 500) if cfg.warmup is None else cfg.warmup
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = min(1, (step - warmup) / max(1, decay_steps - warmup))
    return cfg.lr * (cfg.min_lr + (1 - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


PROGRESS_SECONDS = 30.0


def watch(run, states):
    """Say twice a minute where in a long step the device is: a thread that polls, and nothing waits
    for it. Returns [the step, 0 between steps; since when it runs], for the loop to set."""
    now = [0, 0.0]

    def show():
        text, told = "", 0
        while True:
            time.sleep(PROGRESS_SECONDS)
            step, since = now
            text = states.progress() or text * (step == told)  # nothing new: the same, of this step
            told = step
            seconds = time.perf_counter() - since
            if step and text and seconds > PROGRESS_SECONDS:
                print(f"step {step}: {text}, {seconds:.0f} s", flush=True)

    if run.rank == 0:
        threading.Thread(target=show, daemon=True).start()
    return now


def listen():
    """Return a list to which signals come that ask the run to end after its step."""
    signals = []

    def take(number, _):
        signals.append(number)
        if "RANK" not in os.environ:  # Ctrl-C twice: now (torchrun itself sends it twice)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, take)
    signal.signal(signal.SIGINT, take)
    return signals


def gpu_peak_gib() -> float:
    """Return the peak of PyTorch's allocator with what ranks have mapped from each other, which
    lies outside it."""
    return (torch.cuda.max_memory_allocated() + Exchange.mapped_bytes()) / GIB


FACTS = (  # of a finished step, of all ranks, as log.jsonl names them
    "loss",
    "grad_norm",
    "finite",  # 0 or 1
    "keys_seen",  # flops_per_token's
    "signal",  # that a rank has got, else 0
    "writing",  # whether a rank still writes a checkpoint
    "unread",  # whether a rank could not read the next batch
    "gpu_gib",
    "host_gib",
)  # of the rank that has most


def agree(device, results, signals, writing, unread):
    """Return FACTS by name: the host's only wait for the device in a step, in one copy. results:
    the first four; of the others the largest of all ranks counts. A collective of all ranks."""
    host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    most = torch.tensor(
        [max(signals, default=0), writing, bool(unread), gpu_peak_gib(), host_gib], device=device
    )
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(FACTS, torch.hstack([*results, most]).tolist()))


def log_step(run, log, row, unsaved):
    """Print and log a step; unsaved: why there is no checkpoint."""
    step, steps, seconds = row["step"], run.cfg.steps, row["seconds"]
    row |= run.plan.rates(seconds, run.hardware.profile.peak_flops, row["keys_seen"])
    log_row(
        log,
        row,
        f"step {step}/{steps} loss {row['loss']:.4f} grad {row['grad_norm']:.3f}",
        f"lr {row['lr']:.2e} TGS {row['tgs']:,.0f}",
        row["mfu_full"] and f"MFU {row['mfu_causal']:.1%} causal {row['mfu_full']:.1%} full",
        row["gpu_gib"] and f"GPU {in_unit(row['gpu_gib'] * GIB)}",
        f"{seconds:.2f} s left {timedelta(seconds=round(seconds * (steps - step)))}",
        not row["finite"] and "SKIPPED: not finite",
        unsaved and f"({unsaved})",
    )


def log_row(log, row, *parts):
    """Print a line of parts and of an evaluation, if the row has one, and write the row."""
    if "val_loss" in row:
        loss = row["val_loss"]
        parts += (
            ("val_loss none (all labels are ignored)" if loss is None else f"val_loss {loss:.4f}"),
        )
    print0(*filter(None, parts))
    # null for numbers that are not finite, which JSON has not
    line = re.sub("NaN|-?Infinity", "null", json.dumps(row))
    try:
        print(line, file=log, flush=True)
    except OSError as e:  # the disk is full; what is not written is tried again with the next
        print(f"log.jsonl cannot be written: {e.strerror}")


def close_log(run, log):
    """Close log.jsonl, and draw what it holds."""
    try:
        log.close()
        if run.rank == 0:
            draw_losses(Path(log.name))
    except Exception as e:  # a damaged row is drawn, too; it must not end a run
        print(f"log.jsonl or loss.png could not be written: {e!r}")


def draw_losses(log):
    """log.jsonl -> loss.png beside it: losses by step, and of the first and the last evaluation by
    position."""
    from matplotlib.figure import Figure

    rows = checkpoint.read_log(log)
    fig = Figure(figsize=(12, 4), layout="tight")
    left, right = fig.subplots(1, 2)
    for key in ("loss", "val_loss"):
        points = {row["step"]: row[key] for row in rows if row.get(key)}
        left.plot(points.keys(), points.values(), ".-", label=key)
    left.set(xlabel="step", ylabel="cross-entropy, nats a token")
    left.legend()
    evaluated = [row for row in rows if row.get("val_loss")]
    for row in evaluated[:: max(1, len(evaluated) - 1)]:  # the first and the last
        right.plot(*np.transpose(row["val_loss_by_position"]), ".-", label=f"step {row['step']}")
        right.legend()
    right.set(
        xlabel="first position of the bin in its document",
        ylabel="validation loss, nats a token",
        xscale="symlog",
    )
    replace_file(log.with_name("loss.png"), lambda new: fig.savefig(new, dpi=120))


def spare_collections(run, step):
    """Freeze what lives until the end, so that collections need not walk it: after the first step,
    when all is compiled."""
    if step == run.start + 1:
        gc.collect()
        gc.freeze()


def train(run, model, states, memory, saver):
    """Run the steps that are left. Returns what went wrong, or "". A collective of all ranks."""
    cfg, step, samples = run.cfg, run.start, run.samples
    saved = step if run.resumed or cfg.steps == 0 < cfg.eval_every else -1  # by a checkpoint
    log = open_to_append(Path(cfg.out, "log.jsonl")) if run.rank == 0 else open(os.devnull, "a")
    trouble = ends = ""
    if step < cfg.steps:
        batch = load_batch(run, samples)
        trouble = ends = error_of_any(batch.unread)
        if run.plan.pp > 1:
            model.warm_up(next(batch.micro_batches()))
    elif cfg.eval_every > 0:
        log_row(log, {"step": step} | evaluate(run, model), f"step {step}")
    now = watch(run, states)
    signals = listen()  # until here there is nothing to save
    in_a_row = 0  # steps that were not finite
    while step < cfg.steps and not ends:
        lr = learning_rate(run, step)
        step += 1
        samples += run.plan.batch
        now[:] = step, time.perf_counter()
        results = [*run_planned(memory, model, states, batch, lr, cfg.clip), batch.seen]
        last = step == cfg.steps
        if not last:
            batch = load_batch(run, samples)  # while the GPU works at the step
        row = agree(run.device, results, signals, saver.writing, batch.unread)
        if not row["finite"]:
            states.check_uses()
        row |= {"step": step, "lr": lr, "seconds": time.perf_counter() - now[1]}
        now[0] = 0
        spare_collections(run, step)
        in_a_row = 0 if row["finite"] else in_a_row + 1
        if in_a_row == MAX_SKIPS:
            trouble = f"the loss or the gradient was not finite, {in_a_row} steps in a row"
        if row["unread"]:
            trouble = error_of_any(batch.unread)
        ends = f"stopped by {signal.Signals(row['signal']).name}" if row["signal"] else trouble
        evaluates = cfg.eval_every >= 0 and (last or cfg.eval_every and step % cfg.eval_every == 0)
        saves = cfg.save_every > 0 and step % cfg.save_every == 0
        if memory and (evaluates or saves or ends or last):
            memory.give_back()  # what is not a step must not starve beside the arena
        try:
            row |= evaluate(run, model) if evaluates else {}
        except ConfigError as e:
            trouble = ends = str(e)
        if not row["writing"]:
            saver.finish()
        log_step(run, log, row | {"memplan": memory and memory.counts}, saver.failed)
        if saves:
            saver.begin(run.record | {"step": step, "samples": samples})
            saved = step
    if ends:
        print0(f"{ends}: the run ends after step {step}")
    saver.finish()
    if cfg.save_every >= 0 and (saved != step or saver.failed):
        saver.begin(run.record | {"step": step, "samples": samples})
        saver.finish()
    close_log(run, log)
    if cfg.export and step >= cfg.steps and in_a_row < MAX_SKIPS:
        export(run, states, saver.group)
    return trouble or saver.failed


# ---------------------------------------------------------------------------- the program


def settle(given, local_rank):
    """Return the run that the flags ask for, and say what it is. Raises ConfigError. A collective
    of all ranks."""
    # ---- flags
    cfg = on_all_ranks(lambda: Config(**given))
    check_same(
        {
            flag_name(name): value
            for name, value in asdict(cfg).items()
            if name not in ("host_memory", "gpu_memory")
        }
    )  # of these the smallest counts
    resumed = checkpoint.choose_checkpoint(Path(cfg.out), cfg.resume)
    if resumed:
        old = resumed.meta["config"]
        cfg = on_all_ranks(resumed_flags, given, old)

    # ---- device
    device = on_all_ranks(choose_device, cfg, local_rank)
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "bf16" if device.type == "cuda" else "fp32"

    # ---- model
    cfg, model, source, read = on_all_ranks(choose_model, cfg, device, resumed)

    # ---- data
    if not cfg.dry_run:
        on_all_ranks(check_folders, cfg, model, source)
    cfg, training, val, data = open_data(cfg, model)

    # ---- plan
    kernel = on_all_ranks(
        pick_kernel, cfg.attention, device, DTYPES[dtype], cfg.document_token >= 0
    )
    check_same(
        {
            "the data": data,
            "the model": model,
            "--attention": kernel,
            "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE"),
        }
    )
    plans, there = choose_plans(
        replace(cfg, dtype=dtype, most_sequences=training.count), model, device, kernel
    )
    plan = plans[0]
    cfg = replace(cfg, batch=plan.batch)
    # what losses depend on: flags, the data, and the threads, which sums on a CPU follow
    config = asdict(cfg) | {
        "the data": data,
        "threads": torch.get_num_threads(),
        "decay_steps": cfg.steps,
    }
    start = samples = 0
    if resumed:
        start = resumed.meta["step"]
        samples = resumed.meta["samples"] * old["seq"] // cfg.seq
    if start:
        config["decay_steps"] = old["decay_steps"]
    record = {"config": config, "model": asdict(model), "source": source}
    run = Run(
        cfg,
        dist.get_rank(),
        device,
        kernel,
        plan,
        there,
        training,
        val,
        training.corpus.ignored_id,
        start,
        samples,
        record,
        resumed,
        read,
    )
    introduce(run, plans)
    return run


def prepare(run):
    """Build what is planned, and load the checkpoint to resume, the import, or random weights.
    Returns the model, its states, the memory that steps are planned in (or None), and what saves
    them. A collective of all ranks."""
    cfg, resumed, out = run.cfg, run.resumed, Path(run.cfg.out)
    try_parts(run)
    if cfg.save_every >= 0:
        checkpoint.check_shared(out)
    memory = on_all_ranks(plan_memory, run)
    cap_gpu(run)
    groups = Groups(cfg.timeout, run.plan.tp, run.plan.pp)
    model, states = build(run, make_attention(run, groups), groups)
    if resumed:
        checkpoint.load_checkpoint(states, resumed)
        then = resumed.meta["config"]
        changed = [
            f"{name} {then.get(name)} -> {now}"
            for name, now in run.record["config"].items()
            if name not in OF_A_COMMAND and then.get(name) != now
        ]
        print0(
            f"resumed {resumed.folder} at step {run.start}; changed:",
            ", ".join(changed) or "nothing",
        )
    elif run.read:
        states.load(run.read)  # one tensor at a time
    else:
        load_random_weights(run, states)
    room = run.hardware.host_budget - run.plan.host_bytes if cfg.save_async else None
    saver = on_all_ranks(checkpoint.Saver, out, cfg.keep, states, patient_group(), room)
    # last: a start that is refused moves nothing
    on_rank_0(checkpoint.prepare_out, out, resumed, run.start < cfg.steps)
    return model, states, memory, saver


def main(argv: list[str] | None = None) -> None:
    given = parse(argv)
    if given.get("pp", 1) != 1:
        use_more_queues()
    # one that is out of its range is refused when ranks can say so together
    rank, world, local_rank = start_ranks(min(max(1.0, given.get("timeout", Config.timeout)), 1e9))
    trouble = ""
    advice = "What was saved is whole: start it again, or continue with --resume"
    with heartbeat(rank, world, advice), contextlib.ExitStack() as lock:
        run = settle(given, local_rank)
        if not run.cfg.dry_run:
            on_rank_0(lambda: lock.enter_context(checkpoint.locked(Path(run.cfg.out))))
            trouble = train(run, *prepare(run))
            on_rank_0(lock.close)
    dist.destroy_process_group()
    if trouble:
        sys.exit(f"train.py: {trouble}" if rank == 0 else 1)


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, UnexpectedError) as e:
        if dist.get_rank() == 0:
            print(f"train.py: error: {e}", file=sys.stderr)
        dist.destroy_process_group()
        sys.exit(2 if isinstance(e, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted; what was saved is whole: continue with --resume")
    except torch.OutOfMemoryError as e:
        sys.exit(
            f"train.py: out of GPU memory: {e}\nThe line '... of a device' above says what "
            "was planned. Shorten --seq, lower --micro-batch, --chunk, --alpha or "
            "--resident-layers, or use more GPUs or a larger --sp. What was saved is whole: "
            "continue with --resume."
        )
