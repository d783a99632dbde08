"""Show that forks which would train wrong without an error are refused by name."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from pytest import raises

import attention
import checkpoint
import costs
import hf
import model
import offload
import ops
import optim
import shard
import tensor
import test_all
import train
from examples.block import ForkBlock
from test_all import (
    SEQ,
    SIZES,
    SpoilingStream,
    activations_of,
    example,
    losses,
    main,
    make_case,
    make_run,
    on_ranks,
    parametrize,
    read_log,
    run,
    seeded_model,
    slow,
)

CPU = torch.device("cpu")


def run_chunked(kept: str) -> None:
    """Run a model's layers in token chunks, forward and backward.

    kept: a row of test_all.KEEPS, which says how many chunks are kept, swapped and recomputed.
    """
    llama = seeded_model(SIZES["gqa"], attention.Attention("cpu"))
    plan = activations_of(kept, 5, 3)
    offload.ChunkedLayers(llama, (2, SEQ), plan, SEQ - 10, CPU, torch.float64)
    llama(*example(seq=SEQ, vocab=67)).backward()


class AddsInPlace(model.Block):
    def post(self, x, o, positions):
        x += self.out(o.flatten(2))
        return x + ops.project(self.down, ops.SWIGLU, self.gate_up(x))


class GatesInPlace(model.Block):
    def post(self, x, o, positions):
        o *= 2
        return super().post(x, o, positions)


class ScalesInputInPlace(model.Block):
    def pre(self, x, positions):
        return super().pre(x.mul_(2), positions)


class ChangesWhatIsSaved(model.Block):
    def post(self, x, o, positions):
        gate_up = self.gate_up(x + self.out(o.flatten(2)))
        y = ops.project(self.down, ops.SWIGLU, gate_up)
        gate_up.zero_()  # backward needs it
        return x + y


@parametrize("block", [AddsInPlace, GatesInPlace, ScalesInputInPlace, ChangesWhatIsSaved])
@parametrize("kept", ["kept", "swapped", "mixed", "neither", "again"])
def test_changes_in_place_are_refused(block, kept, monkeypatch, group):
    """A block that writes to its input, or to a tensor that backward needs, is refused.

    trace_block finds this on the meta device before the first step. If it did not, the step itself
    would still end with an error. Catches wrong gradients without an error: chunks that are saved
    do not go through PyTorch's own check of versions.
    """
    monkeypatch.setattr(model, "Block", block)
    half = "pre" if block is ScalesInputInPlace else "post"
    with raises(ValueError, match=f"block.{half} changes in place .* write `x = x \\+ y`"):
        run_chunked(kept)
    monkeypatch.setattr(offload, "trace_block", functools.partial(unchecked, offload.trace_block))
    # while a chunk is recomputed, autograd saves tensors, and PyTorch's own check finds the change
    recomputed = block is ChangesWhatIsSaved and kept in ("neither", "again")
    error = RuntimeError if recomputed else ValueError
    with raises(error, match="in ?place"):
        run_chunked(kept)


def unchecked(trace_block, *args):
    """Stand for trace_block, as if the block changed nothing in place on the meta device."""
    blocks, model.Block = model.Block, model.Block.__base__
    args = [model.Block(a.cfg) if isinstance(a, blocks) else a for a in args]
    try:
        return trace_block(*args)
    finally:
        model.Block = blocks


# ---------------------------------------------------------------------------- kernels


def softcap_scores(q, k, mask):
    """Return scores (B, heads, queries, keys) that tanh keeps below 5, as in Gemma 2."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = 5 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5 / 5)
    if mask.causal:
        later = torch.ones(q.shape[1], k.shape[1]).triu(1).bool()
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def softcap_forward(q, k, v, mask):
    scores = softcap_scores(q, k, mask)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def backward_by_autograd(do, q, k, v, o, lse, mask):
    """Return softcap_forward's gradients, as if these keys were all keys."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(softcap_forward(*inputs, mask)[0], inputs, do)


def backward_from_o(do, q, k, v, o, lse, mask):
    """Return softcap_forward's gradients, where o and lse belong to the keys of all ranks."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        shares = (softcap_scores(*inputs[:2], mask) - lse[..., None]).exp()
        v = inputs[2].repeat_interleave(q.shape[2] // v.shape[2], 2)
        o_of_these_keys = torch.einsum("bhqk,bkhd->bqhd", shares, v)
        # the part of the gradient that goes through the softmax's denominator
        through_denominator = (do * o).sum(-1).transpose(1, 2)
        loss = (o_of_these_keys * do).sum() - (shares.sum(-1) * through_denominator).sum()
        return torch.autograd.grad(loss, inputs)


def forward_by_position(q, k, v, mask):
    """Weight later keys more. It is right if all keys are present, and wrong on a ring."""
    return softcap_forward(q, k * torch.arange(1, k.shape[1] + 1)[:, None, None], v, mask)


@parametrize("heads, kv_heads", [(4, 4), (4, 2), (1, 1)])
def test_a_kernel_proves_that_it_may_run_on_a_ring(heads, kv_heads, monkeypatch):
    """A kernel that is right only on whole sequences is refused on a ring.

    Catches a kernel whose loss on a ring was right although its gradient was 15 % off.
    """

    def check(forward, backward):
        kernel = attention.Kernel(forward, backward, (), plain=True)
        monkeypatch.setitem(attention.KERNELS, "softcap", kernel)
        attention.check_ring("softcap", heads, kv_heads, 16, CPU, torch.float64)

    for dtype in (torch.float32, torch.float64):
        attention.check_ring("cpu", heads, kv_heads, 16, CPU, dtype)
    check(softcap_forward, backward_from_o)
    with raises(ValueError, match="--attention softcap on a ring: dq differs by 0.* --ring 1"):
        check(softcap_forward, backward_by_autograd)
    with raises(ValueError, match="--attention softcap on a ring: o differs by"):
        check(forward_by_position, backward_from_o)


def test_a_kernel_with_a_narrow_log_sum_exp_is_refused(monkeypatch):
    """A kernel that returns the log-sum-exp (lse) in a narrower dtype than it should is refused.

    Catches a kernel whose lse takes fewer bytes than its host buffer has, and is less exact.
    """
    cpu = attention.KERNELS["cpu"]

    def forward(q, k, v, mask):
        o, lse = cpu.forward(q, k, v, mask)
        return o, lse.float()

    monkeypatch.setitem(attention.KERNELS, "cpu", attention.Kernel(forward, cpu.backward, ()))
    with raises(ValueError, match="returned lse in torch.float32: it must be in torch.float64"):
        run_chunked("kept")


def test_a_kernel_that_does_not_declare_documents_is_refused(monkeypatch):
    """A kernel that does not declare that it takes documents is refused for data with documents.

    Catches a kernel whose author has not thought of documents, and which attends across their
    borders.
    """
    kernel = attention.Kernel(softcap_forward, backward_from_o, ())
    monkeypatch.setitem(attention.KERNELS, "softcap", kernel)
    assert attention.pick_kernel("softcap", CPU, torch.float32) == "softcap"
    with raises(ValueError, match="softcap takes no documents"):
        attention.pick_kernel("softcap", CPU, torch.float32, documents=True)


# ---------------------------------------------------------------------------- tensor parallelism


class WithoutParts(model.Block):
    """A layer with q, k and v in one matrix of rows that does not say where each of them ends."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.qkv = model.Matrix(*self.qkv.shape, cut="rows")


class JoinedOutput(model.Block):
    """A layer with one matrix of columns for attention's output and the MLP's, side by side."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.joined = model.Matrix(
            cfg.dim, cfg.heads * cfg.head_dim + 2 * cfg.ffn, cut="columns", residual=True
        )

    def post(self, x, o, positions):
        return super().post(x, o, positions) + self.joined(
            torch.cat((o.flatten(2), self.gate_up(x)), -1)
        )


class NormOverHeads(model.Block):
    """A layer with a norm over all heads of a token. A tensor-parallel rank has only some heads."""

    def post(self, x, o, positions):
        size = o.square().mean((2, 3), keepdim=True).sqrt()
        return super().post(x, o / size, positions)


class NormOfWeight(model.Block):
    """A layer that divides a weight by its norm. A tensor-parallel rank has only a part of it."""

    def post(self, x, o, positions):
        return super().post(x, o / self.out.weight.detach().norm(), positions)


@parametrize("mode", ["mtp", "msp", "fsp"])
def test_a_layer_proves_that_it_may_be_split(mode, monkeypatch):
    """A layer that tensor parallelism would split wrongly is refused under --tp.

    Catches matrices whose `cut` says something wrong about their rows or columns, and sums over
    heads that are not matrix products. They would train wrong without an error.
    """
    for name in ("7b", "llama3-8b"):
        for flags in ({}, {"qkv_bias": True, "qk_norm": True}):
            tensor.check_tensor_parallel(replace(model.MODELS[name], **flags), mode)
    monkeypatch.setattr(model, "Block", ForkBlock)
    tensor.check_tensor_parallel(model.MODELS["7b"], mode)
    for block in (WithoutParts, JoinedOutput, NormOverHeads, NormOfWeight):
        monkeypatch.setattr(model, "Block", block)
        with raises(ValueError, match=f"--tp-mode {mode}: a layer that is split between two ranks"):
            tensor.check_tensor_parallel(model.MODELS["7b"], mode)


class SecondLayerWithoutParts(model.LLaMA):
    """A model whose second layer has a fused matrix without `parts`; its first layer is right."""

    def __init__(self, *args):
        super().__init__(*args)
        qkv = self.blocks[1].qkv
        qkv.parts = (sum(qkv.parts),)


def test_layers_that_only_differ_in_a_matrix_are_both_tested(monkeypatch):
    """A layer that tensor parallelism would split wrongly is refused, also if another layer of the
    same class, with weights of the same names and shapes, is right.

    Catches a test that runs the first of these layers only.
    """
    architecture = model.Architecture(model.Block, SecondLayerWithoutParts)
    monkeypatch.setitem(model.ARCHITECTURES, "second", architecture)
    cfg = replace(model.MODELS["7b"], architecture="second")
    with raises(ValueError, match="parts="):
        tensor.check_tensor_parallel(cfg, "mtp")


class SkipsProduct(model.Block):
    """A layer that multiplies by a split matrix on the first rank only, as if the second rank had
    no tokens for an expert."""

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        if self.out.tp_slice and self.out.tp_slice.cols[0] == 0:
            y = y + self.out(o.flatten(2))
        return y


def test_a_layer_that_exchanges_on_one_rank_only_is_refused(monkeypatch):
    """A layer in which one rank makes more exchanges than the other is refused, without waiting
    for the other rank. Catches a run that would wait for ever, and a traceback about threads."""
    monkeypatch.setattr(model, "Block", SkipsProduct)
    with raises(ValueError, match="does not run: .*one rank makes more exchanges than the other"):
        tensor.check_tensor_parallel(model.MODELS["7b"], "mtp")


class GateBesideHeads(model.Block):
    """A layer that gates attention's output by x, so both must have the same tokens."""

    def post(self, x, o, positions):
        return super().post(x, o * x.mean(-1)[..., None, None], positions)


class TokensInPairs(model.Block):
    """A layer that needs an even number of tokens. In the check, a rank has three of six."""

    def pre(self, x, positions):
        return super().pre(x.unflatten(1, (-1, 2)).flatten(1, 2), positions)


class NeedsSixTokens(model.Block):
    """A layer that fails with an error of its own unless it gets all six tokens of the check."""

    def post(self, x, o, positions):
        return super().post(x + {6: 0.0}[x.shape[1]], o, positions)


@parametrize("mode", ["msp", "fsp"])
def test_a_layer_that_needs_all_tokens_is_refused(mode, monkeypatch):
    """A layer that cannot run on a part of the tokens is refused by a sentence that names the mode.

    In tensor modes msp and fsp, a layer gets x of the rank's own tokens and o of all tokens.
    Catches a run that ends with a traceback about shapes, and a rank whose error hides behind
    another rank's wait.
    """
    for block in (GateBesideHeads, TokensInPairs, NeedsSixTokens):
        monkeypatch.setattr(model, "Block", block)
        with raises(ValueError, match=f"--tp-mode {mode}: .*does not run.*legal.*--tp-mode mtp"):
            tensor.check_tensor_parallel(model.MODELS["7b"], mode)
        tensor.check_tensor_parallel(model.MODELS["7b"], "mtp")


# ---------------------------------------------------------------------------- optimizers


def lars(u):
    """Scale each update by the norm of the weight that it gets, which may be only a part."""
    master = u.states["master"]
    new = master - u.lr * u.grad * master.norm() / u.grad.norm()
    master.copy_(torch.where(u.finite, new, master))
    u.weight.copy_(optim.round_weight(master, u.weight.dtype))


def cautious(u):
    """Skip elements whose momentum and gradient disagree, and scale the other updates by the share
    of elements that agree, which is counted only in this part."""
    master, momentum = u.states["master"], u.states["momentum"]
    agree = (momentum * u.grad > 0.1).to(master.dtype)
    new = master - u.lr * momentum * agree / agree.mean()
    master.copy_(torch.where(u.finite, new, master))
    u.weight.copy_(optim.round_weight(master, u.weight.dtype))


def by_index_in_part(u):
    """Scale each update by the element's index in the part, which is wrong in a second half."""
    master = u.states["master"]
    new = master - u.lr * u.grad * torch.arange(len(master))
    master.copy_(torch.where(u.finite, new, master))
    u.weight.copy_(optim.round_weight(master, u.weight.dtype))


def by_index_in_matrix(u):
    """Scale each update by the element's index in the matrix, which is right in any part."""
    master = u.states["master"]
    new = master - u.lr * u.grad * (u.start + torch.arange(len(master)))
    master.copy_(torch.where(u.finite, new, master))
    u.weight.copy_(optim.round_weight(master, u.weight.dtype))


def forgets_skips(u):
    """Update also after a step that is not finite."""
    master = u.states["master"]
    master.sub_(u.lr * u.grad)
    u.weight.copy_(optim.round_weight(master, u.weight.dtype))


@parametrize(
    "update, states, says",
    [
        (lars, "master", "updating a matrix in two halves differs .* 'master'.* whole=True"),
        (cautious, "master momentum", "updating a matrix in two halves"),
        (by_index_in_part, "master", "updating a matrix in two halves"),
        (by_index_in_matrix, "master", None),
        (forgets_skips, "master", "a step that is not finite changes 'master'"),
        (lars, "weight", 'its states are weight; .* one must be "master"'),
        (lars, "master frozen", "a state may not be named frozen"),
        (lars, "master master", "its states are master, master; states must have different names"),
    ],
)
def test_an_optimizer_proves_that_it_may_update_parts(update, states, says):
    """An optimizer that takes a part for the whole matrix is refused.

    So is one that updates after a step that is not finite, and one whose list of states is wrong.
    Catches weights that are wrong without an error as soon as ranks shard a matrix.
    """
    optim.check_optimizer("adamw", optim.ADAMW)
    optim.check_optimizer("muon", optim.OPTIMIZERS["muon"])
    narrow = optim.Optimizer(lars, (optim.State("master", torch.bfloat16),))
    with raises(ValueError, match='the state "master" is in torch.bfloat16'):
        optim.check_optimizer("narrow", narrow)
    optimizer = optim.Optimizer(update, tuple(map(optim.State, states.split())))
    if says is None:
        optim.check_optimizer("other", optimizer)
    else:
        with raises(ValueError, match=f"--optimizer other: {says}"):
            optim.check_optimizer("other", optimizer)


# ---------------------------------------------------------------------------- exports


class ParallelMLP(model.Block):
    """A layer with attention and MLP side by side, from one norm. norm2 is never used."""

    def post(self, x, o, positions):
        gate_up = ops.project(self.gate_up, self.norm, x, self.norm1.weight)
        return x + self.out(o.flatten(2)) + ops.project(self.down, ops.SWIGLU, gate_up)


class WithoutPositions(model.Block):
    """A layer without rotary embedding (NoPE)."""

    def pre(self, x, positions):
        cos, sin = torch.ones_like(positions.cos), torch.zeros_like(positions.sin)
        return super().pre(x, positions._replace(cos=cos, sin=sin))


class AddsNorm(model.Block):
    """A layer with one more norm at its end, for which Hugging Face's files have no name."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.last_norm = model.Vector(cfg.dim, "norm")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@slow
@parametrize(
    "flags",
    [
        {},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"tied": True},
        {"rope_scaling": YARN, "max_positions": 2048},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_an_export_proves_itself(flags, monkeypatch):
    """An export is refused if transformers would compute other logits from it.

    Catches an export that says llama although the model is not one.
    """
    cfg = replace(model.MODELS["tiny"], **flags)
    hf.check_export(cfg, {})
    for block in (ParallelMLP, WithoutPositions):
        monkeypatch.setattr(model, "Block", block)
        with raises(ValueError, match="--export: transformers computes other logits .* by [01]"):
            hf.check_export(cfg, {})
    monkeypatch.setattr(model, "Block", AddsNorm)
    with raises(ValueError, match="Hugging Face's files have no 'last_norm'"):
        hf.check_export(cfg, {})
    monkeypatch.undo()
    embed_tokens = model.LLaMA.embed_tokens
    monkeypatch.setattr(model.LLaMA, "embed_tokens", lambda *args: 8 * embed_tokens(*args))
    with raises(ValueError, match="--export: transformers computes other logits"):
        hf.check_export(cfg, {})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@slow
@parametrize(
    "flags",
    [
        {"max_positions": 2**21},
        {"max_positions": 2**20, "layers": 16, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"max_positions": 2**17, "rope_scaling": YARN | {"factor": 256.0}},
    ],
)
def test_an_export_of_a_long_context_proves_itself(flags, monkeypatch):
    """Rotary angles in float32, which transformers has, are no reason to refuse an export.

    A wrong scaling at far positions still is. Catches a run of 128K tokens or more that cannot
    export, and a far position that transformers would rotate by another angle.
    """
    cfg = replace(model.MODELS["tiny"], **flags)
    hf.check_export(cfg, {})

    frequencies = model.rope_frequencies

    def a_little_faster(cfg, device=None):
        freq, factor = frequencies(cfg, device)
        return freq * (1 + 1e-5), factor

    monkeypatch.setattr(model, "rope_frequencies", a_little_faster)
    with raises(ValueError, match="--export: transformers computes other logits"):
        hf.check_export(cfg, {})


def test_an_export_that_transformers_refuses_is_a_sentence():
    """If transformers refuses a fork's configuration, the export ends with one error message.

    The example is a width that is no multiple of the heads. Catches a traceback from transformers.
    """
    with raises(ValueError, match="transformers refuses its config.json"):
        hf.export_config(model.ModelConfig(131, 7, 2, 4, 4, 4, 2), {}, torch.float32)


# ---------------------------------------------------------------------------- sizes, first weights


class WideEveryThird(model.LLaMA):
    """A model that has one more matrix in every third layer."""

    def __init__(self, cfg, *args):
        super().__init__(cfg, *args)
        for block in self.blocks[::3]:
            block.wide = model.Matrix(4 * cfg.ffn, cfg.dim)


def test_parameters_are_counted_layer_by_layer(monkeypatch):
    """Parameters are counted right if layers differ.

    Catches a count that multiplies the first layer's parameters by the number of layers.
    """
    cfg = replace(model.MODELS["tiny"], layers=5)
    plain = model.param_count(cfg)
    monkeypatch.setattr(model, "LLaMA", WideEveryThird)
    assert model.param_count(cfg) == plain + 2 * 4 * cfg.ffn * cfg.dim
    plan = costs.Plan(cfg, torch.float32, 1, 1, 64)
    vectors = cfg.dim * (2 * cfg.layers + 1)
    assert plan.params == model.param_count(cfg) - vectors


def test_initial_weights_do_not_depend_on_names():
    """A weight's initial values depend on its class and its arguments, not on its name.

    Catches values that follow from the end of a name: a matrix kv_down that begins 2.8 times too
    small, and a bias norm1_bias that begins at 1.
    """
    cfg = replace(model.MODELS["tiny"], layers=2)
    llama = model.LLaMA(cfg)
    block = llama.blocks[0]
    block.kv_down = model.Matrix(64, 100)
    block.fanout = model.Matrix(64, 100, residual=True)
    block.norm1_bias = model.Vector(64, "bias")
    block.scale = model.Vector(64, "norm")
    mean_and_std = llama.weight_init
    assert mean_and_std["blocks.0.kv_down.weight"] == (0.0, 0.1)  # 1 / sqrt(100 columns)
    assert mean_and_std["blocks.0.fanout.weight"] == (0.0, 0.05)  # and 1 / sqrt(2 x 2 layers)
    assert mean_and_std["blocks.0.norm1_bias.weight"] == (0.0, 0.0)
    assert mean_and_std["blocks.0.scale.weight"] == (1.0, 0.0)
    assert mean_and_std["embed.weight"] == (0.0, 1.0)
    with raises(ValueError, match="Vector\\(64, 'gain'\\): kind must be norm or bias"):
        model.Vector(64, "gain")


# ---------------------------------------------------------------------------- tied matrices


class OwnVocabulary(model.Block):
    """A layer with a matrix that has the embedding's name and size."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.embed = model.Matrix(cfg.vocab, cfg.dim)


def test_only_embedding_and_head_may_be_one_matrix(group):
    """A matrix that a model has under two names is refused, unless it is the embedding and the head
    of a tied model.

    Catches a matrix with two uses of which one use's gradient is lost, and a model that is tied
    although its configuration, from which exports and plans follow, says that it is not.
    """
    cfg = model.MODELS["tiny"]
    tied_cfg = replace(cfg, tied=True)

    def tie_head(llama):
        llama.head = llama.embed

    def untie_head(llama):
        llama.head = model.Matrix(cfg.vocab, cfg.dim)

    def share_out(llama):
        llama.blocks[2].out = llama.blocks[1].out

    def use_embedding_in_layer(llama):
        llama.blocks[0].lookup = llama.embed

    def add_second_head(llama):
        llama.head2 = llama.head

    for config, change, error in (
        (cfg, tie_head, "embed and head are the same Matrix.* if ModelConfig.tied is True"),
        (tied_cfg, untie_head, "ModelConfig.tied is True, but embed and head are two matrices"),
        (tied_cfg, share_out, r"blocks\.1\.out and blocks\.2\.out are the same Matrix"),
        (tied_cfg, use_embedding_in_layer, r"embed and blocks\.0\.lookup are the same Matrix"),
        (tied_cfg, add_second_head, "embed and head2 are the same Matrix"),
        (cfg, add_second_head, "head and head2 are the same Matrix"),
    ):
        llama = model.LLaMA(config)
        change(llama)
        for stages in (1, 2):
            with raises(ValueError, match=error):
                shard.check_weights(llama, stages)
    shard.check_weights(model.LLaMA(tied_cfg), 2)


@parametrize("frozen", [False, True])
def test_a_pipeline_refuses_a_matrix_that_is_on_every_stage(frozen, group):
    """A pipeline refuses a Matrix outside the embedding, the layers and the head.

    Catches copies of one matrix that train apart, or that an export adds up and a checkpoint holds
    twice.
    """
    llama = model.LLaMA(model.MODELS["tiny"])
    llama.embed.table = model.Matrix(4, 8, frozen=frozen)
    llama.head.extra = model.Matrix(4, 8, frozen=frozen)
    llama.blocks[1].extra = model.Matrix(4, 8, frozen=frozen)
    shard.check_weights(llama, 2)
    llama.positions = model.Matrix(4, 8, frozen=frozen)
    shard.check_weights(llama)
    with raises(ValueError, match=r"--pp 2: .* the Matrix positions\. .*self\.embed\.NAME = "):
        shard.check_weights(llama, 2)


def test_layers_leave_the_gradient_of_a_tied_matrix_alone(group, monkeypatch):
    """No layer's gradient uses the buffer in which a tied matrix waits for its second contribution.

    Catches a fork whose layer has a matrix with the embedding's name and size.
    """
    monkeypatch.setattr(model, "Block", OwnVocabulary)
    with torch.device("meta"):
        llama = model.LLaMA(replace(model.MODELS["tiny"], tied=True))
    states = shard.States(llama, torch.device("cpu"), torch.bfloat16, num_chunks=2)
    tied, *layers = states.sharded_params.values()
    assert tied.name == "embed.weight" and tied.contributions == 2
    assert tied.unsharded_grad.data.dtype == torch.float32
    assert len(layers) == 5 * len(llama.blocks)
    assert all(param.unsharded_grad is not tied.unsharded_grad for param in layers)


def test_both_stages_choose_the_same_owner_of_a_tied_matrix():
    """In layout inter, owner 0 updates a tied matrix, whatever other matrices a stage has.

    Catches a pipeline whose first and last stage would sum different gradients.
    """
    for sizes in ((5, 7), (1, 2, 3, 9), (4, 4, 4)):
        layers = {f"blocks.{i}.out": size for i, size in enumerate(sizes)}
        for path in ("embed", "head"):
            for vocab in (1, 4, 100):
                owners = shard.assign_owners(layers | {path: vocab}, 2, path)
                assert owners[path] == 0 and set(owners.values()) == {0, 1}


# ---------------------------------------------------------------------------- the ends of the model


FORKS = '''
import math
import attention, ops
from ops import IGNORE

class TwoAhead(m.LLaMA):
    """Predicts the token after the next one, too, by a head of its own."""

    labels_ahead = 2

    def __init__(self, *args):
        super().__init__(*args)
        self.head.second = m.Matrix(*self.head.shape)

    def apply_head(self, x, labels, scale, per_token, positions):
        first = super().apply_head(x, labels[..., 0], scale, per_token, positions)
        if per_token:
            return first
        head = self.head
        self.head = head.second
        second = super().apply_head(x, labels[..., 1], scale, per_token, positions)
        self.head = head
        return first + 0.3 * second

class Learned(m.LLaMA):
    """Adds a wave of each token's position to its embedding."""

    def embed_tokens(self, tokens, positions):
        x = super().embed_tokens(tokens, positions)
        return x + torch.sin(0.1 * positions)[..., None].to(x.dtype)

class Table(m.LLaMA):
    """Adds a learned vector of each token's position to its embedding."""

    def __init__(self, cfg, *args):
        super().__init__(cfg, *args)
        self.embed.positions = m.Matrix(256, cfg.dim, std=0.5)

    def embed_tokens(self, tokens, positions):
        x = super().embed_tokens(tokens, positions)
        return x + ops.embedding(self.embed.positions, positions)

class WithoutAngles(m.Block):
    """Every second layer has no rotary embedding, because Alternating says so."""

    has_angles = True

    def pre(self, x, positions):
        if self.has_angles:
            return super().pre(x, positions)
        qkv = self.project(self.qkv, self.norm, x, self.norm1.weight)
        return qkv.unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=2)

class Alternating(m.LLaMA):
    def __init__(self, *args):
        super().__init__(*args)
        for block in self.blocks[::2]:
            block.has_angles = False

class Weighted(m.LLaMA):
    """Later tokens count more."""

    def apply_head(self, x, labels, scale, per_token, positions):
        x = x * (1 + 0.01 * positions)[..., None].to(x.dtype)
        return super().apply_head(x, labels, scale, per_token, positions)

class LogN(m.Block):
    """Scales queries, and the residual stream, by the logarithm of the token's position."""

    def pre(self, x, positions):
        q, k, v = super().pre(x, positions)
        return q * torch.log(2.0 + positions.qkv_positions)[..., None, None].to(q.dtype), k, v

    def post(self, x, o, positions):
        scale = torch.log(2.0 + positions.x_positions)[..., None]
        return super().post(x * scale.to(x.dtype), o, positions)
'''


@slow
@parametrize("fork", ["TwoAhead", "Learned", "Table", "Alternating", "Weighted", "LogN"])
def test_forks_that_look_at_positions_are_right_on_any_rank(fork, tmp_path):
    """Forks that use the positions they are given train right on any rank.

    The forks use waves or a learned table of positions, no positions in every second layer, weights
    by position, log-n attention, and a label two tokens ahead. Catches positions or labels that
    count the tokens of a call as if they were a whole sequence, which is wrong when ranks share a
    sequence or layers run in token chunks; and a matrix of a fork that is on a wrong stage of a
    pipeline, or twice in a checkpoint.
    """
    replaced_class = "m.Block" if fork == "LogN" else "train.LLaMA"
    code = f"{FORKS}\n{replaced_class} = {fork}\n"
    if fork == "Alternating":
        code += "m.Block = WithoutAngles\n"
    found = {}  # whether the data has documents -> the results of all runs on such data
    for i, (ranks, flags) in enumerate(
        (
            (0, ""),
            (0, "--recompute auto --chunk 12 --resident-layers 2 --alpha 0.5 --document-token 10"),
            (0, "--document-token 10"),
            (2, "--sp 2"),
            (2, "--sp 2 --ring 2 --recompute auto --chunk 8"),
            (2, "--tp 2 --tp-mode msp"),
            (2, "--tp 2 --tp-mode fsp"),
            (2, "--pp 2 --micro-batch 1"),
        )
    ):
        out = tmp_path / f"{i}"
        run(f"--steps 2 --eval-every 1 --dtype fp64 --batch 2 {flags} --out {out}", ranks, code)
        checkpoint.open_checkpoint(out / "step-00000002")
        rows = [(row["loss"], row["grad_norm"], row["val_loss"]) for row in read_log(out)]
        found.setdefault("--document-token" in flags, []).append(rows)
    for one_rank, *others in found.values():
        assert others
        for rows in others:
            assert np.allclose(rows, one_rank, rtol=1e-9), fork


LOCAL = '''
import attention

def local_forward(q, k, v, mask):
    """Layers 1 and 2 attend to the last eight tokens only."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    at = torch.arange(q.shape[1])
    behind = at[:, None] - at
    seen = (behind >= 0) & ((behind < 8) if mask.layer in (1, 2) else True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)

def local_backward(do, q, k, v, o, lse, mask):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(local_forward(*inputs, mask)[0], inputs, do)

attention.KERNELS["local"] = attention.Kernel(local_forward, local_backward, ())
'''


@slow
def test_attention_may_differ_by_layer(tmp_path):
    """A kernel knows its layer, so local and global layers may alternate.

    Catches a kernel that is not told its layer, or that is told the first layer's number for all
    layers, as it was in token chunks.
    """
    cases = (
        (0, ""),
        (0, "--recompute full"),
        (0, "--recompute auto --chunk 12 --resident-layers 2 --alpha 0.5"),
        (2, "--sp 2 --head-groups 3"),
        (2, "--tp 2"),
        (2, "--pp 2 --micro-batch 1 --recompute auto --chunk 12 --resident-layers 2"),
    )
    found = []
    for i, (ranks, flags) in enumerate(cases):
        out = tmp_path / f"{i}"
        flags += f" --attention local --steps 2 --dtype fp64 --batch 2 --out {out}"
        run(flags, ranks, LOCAL)
        found.append(losses(out))
    run(f"--steps 2 --dtype fp64 --batch 2 --out {tmp_path}/global", 0)
    for rows in found[1:]:
        assert np.allclose(rows, found[0], rtol=1e-9)
    assert not np.allclose(losses(tmp_path / "global"), found[0], rtol=1e-6)


updated = []  # (name, first element, end) of each update by momentum_in_bf16


def momentum_in_bf16(u):
    """SGD with momentum in bf16. It notes the elements that it updates."""
    master, momentum = u.states["master"], u.states["momentum"]
    assert (master.dtype, momentum.dtype) == (torch.float32, torch.bfloat16)
    assert u.weight.shape == master.shape == momentum.shape == u.grad.shape
    updated.append((u.name, u.start, u.start + len(u.weight)))
    new = 0.9 * momentum.float() + u.clip_factor * u.grad.float()
    momentum.copy_(torch.where(u.finite, new, momentum.float()))
    master.copy_(torch.where(u.finite, master - u.lr * new, master))
    u.weight.copy_(optim.round_weight(master, u.weight.dtype))


@parametrize("place", ["gpu", "host"])
@parametrize("layout", ["intra", "inter"])
def test_states_have_the_dtypes_that_an_optimizer_declares(place, layout, group, monkeypatch):
    """States have the dtypes that their optimizer declares, wherever they lie.

    Catches a state that is allocated, counted, moved to the host or loaded in another dtype, and an
    element whose index in the matrix is wrong.
    """
    states = (optim.State("master"), optim.State("momentum", torch.bfloat16))
    sgd = optim.Optimizer(momentum_in_bf16, states)
    monkeypatch.setattr(optim, "PIECE_ELEMENTS", 1000)  # each matrix has several pieces
    monkeypatch.setitem(optim.OPTIMIZERS, "sgd", sgd)
    updated.clear()
    with torch.device("meta"):
        llama = model.LLaMA(replace(model.MODELS["tiny"], layers=2))
    held = shard.States(llama, CPU, torch.float32, layout=layout, storage=place, optimizer=sgd)
    held.load(
        lambda name: model.initial_weight(name, held.shapes[name], held.weight_init[name], 0, CPU)
    )
    for _ in range(2):
        held.begin_step()
        tokens = torch.arange(64)[None]
        llama(tokens, tokens).backward()
        held.finish_gradients()
        held.update(0.1, 1.0)
    for name, part in held.state_parts().items():
        if name.startswith("momentum."):
            assert part.stored.dtype == torch.bfloat16 and part.stored.any(), name
    parameters = sum(param.num_elements for param in held.sharded_params.values())
    assert held.bytes()["optimizer"] == 6 * parameters
    plan = costs.Plan(llama.cfg, torch.float32, 1, 1, 64, optimizer="sgd")
    assert plan.optimizer_bytes_per_param == 6
    for param in held.sharded_params.values():
        seen = [(first, end) for name, first, end in updated if name == param.name]
        firsts = list(range(0, param.num_elements, param.num_elements if place == "gpu" else 1000))
        assert [first for first, _ in seen] == 2 * firsts
        assert seen[-1][1] == len(param.owned_param)


# ---------------------------------------------------------------------------- frozen weights


def frozen_model(frozen: Callable[[str], bool], *args) -> model.LLaMA:
    """Return a small model whose weights are frozen if frozen(name) says so."""
    llama = seeded_model(SIZES["gqa"], *args)
    for name, p in llama.named_parameters():
        p.requires_grad_(not frozen(name))
    return llama


def is_in_first_layers(name: str) -> bool:
    return name.startswith(("embed.", "blocks.0.", "blocks.1."))


@parametrize(
    "frozen",
    [
        lambda name: True,
        lambda name: "norm" not in name,
        lambda name: name in ("head.weight", "blocks.2.qkv.weight", "blocks.3.norm2.weight"),
        lambda name: name.startswith("blocks"),
        is_in_first_layers,
    ],
)
@parametrize("kept", ["all", "mixed", "neither"])
def test_frozen_weights_compute_no_gradient(frozen, kept, monkeypatch, group):
    """Frozen weights get no gradient, and no product for one runs. The other weights' gradients are
    the same as in a model in which nothing is frozen.

    Catches a product whose result nobody needs, a float32 gradient of a frozen head, and a gradient
    that changes when another weight is frozen.
    """
    shapes = Counter()  # shape of a weight -> products that ran for gradients of such weights

    def count_products(dy, x, out, beta):
        shapes[dy.shape[1], x.shape[1]] += 1
        return weight_grad_into(dy, x, out, beta)

    weight_grad_into = ops.weight_grad_into
    monkeypatch.setattr(ops, "weight_grad_into", count_products)
    grads = []
    for freezes in (lambda name: False, frozen):
        llama = frozen_model(freezes, attention.Attention("cpu"))
        if kept != "all":
            plan = activations_of(kept, 5 - llama.forward_only_layers, 3)
            offload.ChunkedLayers(llama, (2, SEQ), plan, SEQ - 10, CPU, torch.float64)
        shapes.clear()
        loss = llama(*example(seq=SEQ, vocab=67))
        if loss.requires_grad:
            loss.backward()
        grads.append({name: p.grad for name, p in llama.named_parameters()})
    for name, expected in grads[0].items():
        found = grads[1][name]
        assert found is None if frozen(name) else torch.equal(found, expected), name

    # one product per token chunk for each matrix of a layer that trains. The embedding has none,
    # and the head's products depend on its own pieces
    head_shape = tuple(llama.head.shape)
    trained = Counter(tuple(p.shape) for p in llama.blocks.parameters() if p.requires_grad)
    chunks = 1 if kept == "all" else 3
    expected = {shape: chunks * count for shape, count in trained.items() if len(shape) == 2}
    assert (head_shape in shapes) == (not frozen("head.weight"))
    del shapes[head_shape]
    assert shapes == expected


class RecordsReads(ops.PlainEvents):
    """Notes which matrices backward reads."""

    def __init__(self):
        self.read_in_backward = []

    def unshard(self, matrix, backward):
        if backward:
            self.read_in_backward.append(matrix)
        return super().unshard(matrix, backward)


@parametrize(
    "trained, first",
    [
        ("blocks.2.norm1.weight", 2),  # backward passes through the products of layer 2
        ("blocks.4.down.weight", 4),
        ("head.weight", 5),
        ("norm.weight", 5),
        ("blocks.0.norm1.weight", 0),
        ("embed.weight", 0),
    ],
)
@parametrize("kept", ["all", "swapped", "neither"])
def test_first_layers_that_are_frozen_have_no_backward(trained, first, kept, group):
    """Backward ends at the first layer with a weight that trains, and earlier ones save nothing.

    Catches activations that are saved, swapped or recomputed for a gradient that nobody needs.
    """
    llama = frozen_model(lambda name: name != trained, attention.Attention("cpu"))
    assert llama.forward_only_layers == first
    events = RecordsReads()
    for module in llama.modules():
        if isinstance(module, model.Matrix):
            module.events = events
    layers = None
    if kept != "all":
        plan = activations_of(kept, 5 - first, 3)
        layers = offload.ChunkedLayers(llama, (2, SEQ), plan, SEQ - 10, CPU, torch.float64)
        assert layers.first == first and len(layers.blocks) == 5 - first

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = llama(*example(seq=SEQ, vocab=67))
    if first == 5:
        # x and 1 / rms of the last norm, its weight, and the gradients of the head
        assert len(saved) <= 5
    loss.backward()
    reads = {llama.get_submodule(f"blocks.{i}.down") for i in range(first, 5)}
    reads_of_down = {m for m in events.read_in_backward if m in {b.down for b in llama.blocks}}
    assert reads_of_down == reads
    assert llama.get_parameter(trained).grad.norm() > 0
    if layers:
        assert len(layers.free_host_buffers) == 1


def test_gradients_accumulate_in_float32_or_bf16(group):
    """Gradients of micro-batches are accumulated in float32, or in bf16 with --grad-sums dtype. In
    bf16, more than 128 micro-batches are refused.

    Catches a sum that takes the other dtype's memory, and a sum in bf16 that has grown so large
    that the next micro-batch is rounded away.
    """
    for grad_sums, size in (("fp32", 4), ("dtype", 2)):
        with torch.device("meta"):
            llama = model.LLaMA(SIZES["gqa"])
        states = shard.States(llama, CPU, torch.bfloat16, micro_batches=2, grad_sums=grad_sums)
        sums = [param.grad_shard for param in states.sharded_params.values()]
        assert {t.itemsize for t in sums} == {size}
        assert states.bytes()["gradients"] == sum(t.nbytes for t in sums)
    with torch.device("meta"):
        llama = model.LLaMA(SIZES["gqa"])
    with raises(ValueError, match="a sum of 129 micro-batches would round .* at most 128"):
        shard.States(llama, CPU, torch.bfloat16, micro_batches=129, grad_sums="dtype")


def test_states_of_frozen_weights_are_their_values(group):
    """A frozen weight has only its values, without a gradient or an optimizer state, in memory and
    in a checkpoint.

    Catches memory that a frozen weight takes in vain, and values that a checkpoint lacks.
    """
    with torch.device("meta"):
        llama = model.LLaMA(SIZES["gqa"])
    llama.requires_grad_(False)
    llama.blocks[3].down.frozen = llama.norm.frozen = False
    states = shard.States(llama, CPU, torch.bfloat16, micro_batches=2, num_chunks=3)
    sizes = states.bytes()
    trained = 1024  # elements: `down` has 24 x 40, and is padded
    assert sizes["gradients"] == 4 * trained and sizes["optimizer"] == 12 * trained
    matrices = sum(p.numel() for p in llama.parameters() if p.dim() > 1)
    assert 2 * matrices <= sizes["parameters"] <= 2 * matrices + 2 * 128 * 22  # with padding

    parts = states.state_parts()
    kinds = Counter(name.split(".")[0] for name in parts)
    assert kinds == {"frozen": 31, "master": 2, "exp_avg": 2, "exp_avg_sq": 2, "updates": 1}
    assert parts["frozen.blocks.1.qkv.weight"].dtype == torch.bfloat16
    assert parts["frozen.blocks.1.norm1.weight"].dtype == torch.float32


def test_all_frozen_is_refused(monkeypatch, tmp_path):
    """A run that would train no weight is refused, unless it has no steps.

    Catches a run that computes for days and changes no weight.
    """

    class AllFrozen(model.LLaMA):
        def __init__(self, *args):
            super().__init__(*args)
            self.requires_grad_(False)

    monkeypatch.setitem(model.ARCHITECTURES, "fork", model.Architecture(model.Block, AllFrozen))
    with raises(ValueError, match="--steps 6: all weights of the model are frozen, .*--steps 0"):
        main(f"--out {tmp_path}/o --architecture fork")
    dist.destroy_process_group()
    main(f"--out {tmp_path}/o --architecture fork --steps 0 --save-every -1")


def test_resume_trains_the_same_weights(tmp_path, monkeypatch):
    """A resume in which another weight is frozen is refused by the weight's name.

    Catches a weight that goes on without its states, or that stays as it began.
    """
    for architecture in ("llama", "llama some"):
        monkeypatch.setitem(model.ARCHITECTURES, "forked", model.ARCHITECTURES[architecture])
        main(f"--steps 1 --out {tmp_path}/{architecture[6:]}1 --architecture forked")
    with raises(ValueError, match="embed.weight is frozen here, but the run of .* trained it. A"):
        main(f"--resume --steps 2 --out {tmp_path}/1")
    dist.destroy_process_group()
    monkeypatch.setitem(model.ARCHITECTURES, "forked", model.ARCHITECTURES["llama"])
    with raises(ValueError, match="weight is frozen in .*step-00000001, and would train here. A"):
        main(f"--resume --steps 2 --out {tmp_path}/some1")


class FrozenExpert(model.Block):
    """A layer with two frozen matrices that only the first `users` ranks use.

    They come first in the layer, so that backward uses them last.
    """

    users = 0

    def __init__(self, cfg):
        super().__init__(cfg)
        others = dict(self._modules)
        self._modules.clear()
        self.expert = model.Matrix(cfg.dim, cfg.dim, frozen=True)
        self.second = model.Matrix(cfg.dim, cfg.dim, frozen=True)
        self._modules.update(others)

    def pre(self, x, positions):
        if dist.get_rank() < self.users:
            x = x + self.second(self.expert(x))
        return super().pre(x, positions)


class AllButHead(model.LLaMA):
    def __init__(self, *args):
        super().__init__(*args)
        self.blocks.requires_grad_(False)


class WidthsDiffer(model.LLaMA):
    """A LLaMA whose first layer has a narrower MLP than the others."""

    def __init__(self, *args):
        super().__init__(*args)
        self.blocks[0] = model.Block(replace(self.cfg, ffn=self.cfg.ffn - 2))


def compare_norms_of_layers_that_differ(lines: list[str]) -> None:
    """Compare the gradient's norm of a model whose layers have different sizes with that of
    PyTorch's autograd. Runs on each rank."""
    torch.compiler.set_stance("force_eager")
    groups = {}
    train.LLaMA = WidthsDiffer
    for line in lines:
        made, llama, states = make_run(make_case(line), groups, SpoilingStream)
        train.load_random_weights(made, states)
        batch = train.load_batch(made, 0)
        _, norm, _ = train.run_step(llama, states, batch, 0.0, 0.0)

        plain = WidthsDiffer(made.plan.model, attention.Attention("cpu")).to(torch.float64)
        for name, weight in plain.named_parameters():
            first = model.initial_weight(
                name, weight.shape, plain.weight_init[name], made.cfg.seed, CPU
            )
            weight.data.copy_(first)
        for micro_batch in batch.micro_batches():
            plain(*micro_batch).backward()
        grads = [weight.grad for weight in plain.parameters()]
        for grad in grads:
            dist.all_reduce(grad)
        expected = torch.stack([grad.norm() for grad in grads]).norm()
        torch.testing.assert_close(norm.double(), expected, rtol=1e-9, atol=0)


def test_layers_may_have_different_sizes():
    """The gradient's norm is right if layers have different sizes, although they share buffers.

    Catches a larger layer's gradient that stays behind a smaller one in a buffer, and is counted.
    """
    lines = ["2 g=2 os=2", "2 p=2 g=2 os=2 micro=2", "2 os=2 micro=2"]
    on_ranks(2, compare_norms_of_layers_that_differ, lines)


class OnlyMatrices(model.LLaMA):
    """A model without a vector that trains. The expert does train."""

    def __init__(self, *args):
        super().__init__(*args)
        for module in self.modules():
            if isinstance(module, model.Vector):
                module.frozen = True
        for block in self.blocks:
            block.expert.frozen = False


def skip_frozen_matrices(lines: list[str]) -> None:
    """Run steps in which some ranks skip a frozen matrix. Runs on each rank."""
    torch.compiler.set_stance("force_eager")
    groups = {}
    test_all.Block = FrozenExpert
    for line in lines:
        for llama_class, users in ((model.LLaMA, 1), (AllButHead, 1), (AllButHead, 0)):
            train.LLaMA, FrozenExpert.users = llama_class, users
            offload._trace_block.cache_clear()  # what a layer saves depends on `users`
            made, llama, states = make_run(make_case(line), groups, SpoilingStream)
            train.load_random_weights(made, states)
            batch = train.load_batch(made, 0)
            _, norm, finite = train.run_step(llama, states, batch, 0.1, 0.0)
            assert finite and norm > 0

    # A matrix that trains must not be skipped. All ranks must notice it, even if the model has no
    # trained vector, whose gradient would tell them.
    train.LLaMA, FrozenExpert.users = OnlyMatrices, 1
    made, llama, states = make_run(make_case("2"), groups, SpoilingStream)
    train.load_random_weights(made, states)
    _, norm, finite = train.run_step(llama, states, train.load_batch(made, 0), 0.1, 0.0)
    assert norm.isnan() and not finite
    with raises(ValueError, match="expert.weight was used 0 times per pass instead of"):
        states.check_uses()


@slow
def test_frozen_matrices_may_be_skipped():
    """A rank may leave out a frozen matrix, and no other rank waits for it.

    Catches an all-gather that only some ranks launch, and a trained matrix that is left out, which
    only one rank notices because no vector trains.
    """
    on_ranks(2, skip_frozen_matrices, ["2 p=2 g=2 os=2", "2 p=2 g=2 os=2 keep=mixed"])
