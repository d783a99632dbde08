"""Prove that a fork trains right: every mechanism gives the losses of plain PyTorch.

    pytest test_all.py     all of this file
    make check             after an edit: all tests that need neither many ranks nor many seconds
    make test              everything, with the tests in tests/ that a fork does not touch

The file holds a second LLaMA (`Plain`). It is written with torch.nn, uses PyTorch's autograd and
runs in one process. A *case* is one line of CASES that says how the project runs the same model:

    4 sp=2 groups=4 p=2 g=4 os=4 keep=swapped             # keys stay for the next group, too

    4              on 4 ranks, which are 4 processes of this machine
    sp=2           2 ranks share each sequence (Ulysses), so that 2 groups of ranks share the batch
    groups=4       attention runs 4 groups of heads one after the other
    p=2 g=4 os=4   parameters in 2 shards, gradients in 4, optimizer states in 4
    keep=swapped   layers run in token chunks: the first 3 of 5 layers are swapped to the host and
                   prefetched for backward, the last 2 keep x and o and recompute the rest
    # ...          why the case is there
    other keys     have their defaults, which are the first values in VALUES

Such a case trains four steps. They include gradient clipping, an evaluation, and one step whose
loss or gradients are not finite and which must change nothing. Its losses, gradient norms and
updated weights are compared with Plain's. In float64 they agree to 1e-10.

Two tricks turn races into wrong numbers. Buffers are filled with NaN when they may be overwritten,
and so are messages after they are sent, so a value that is read too late is NaN. And streams and
messages are delayed at random. A case that fails prints the seed of its delays, and
`DELAY_SEED=... pytest ...` repeats them.

Read from top to bottom: the plain model, one case, how ranks are started, all cases, forks that are
refused, forks that work (examples/), and a run that is resumed under other cases. If you change
model.Block, write the same change in PlainLayer and run the file. If you add a mechanism, give it a
key in VALUES, a line in `mechanisms`, and cases. Then
test_cases_cover_all_pairs_of_mechanisms says which pairs of mechanisms no case has yet.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # each core runs a rank, and idle threads spin

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytest import raises
from torch.distributed.elastic.utils.distributed import get_free_port

import attention
import checkpoint
import costs
import data
import hf
import model as m
import offload
import ops
import optim
import pipeline
import planner
import shard
import streams
import tensor
import train

# each example adds rows to a table: KERNELS, ARCHITECTURES, OPTIMIZERS or SCHEDULES
from examples import alibi, ema, gelu, gemma, local, muon, schedule  # noqa: F401
from examples.block import ForkBlock
from examples.lora import ALPHA, RANK, LoRABlock, LoRAModel
from ranks import Groups, use_more_queues

torch.set_num_threads(1)  # if torch was imported before OMP_NUM_THREADS was set above
ROOT = Path(__file__).parent  # the project's folder
ALL_COMBINATIONS = bool(os.environ.get("ALL_COMBINATIONS"))  # make test-all: many more cases
RUN_SECONDS = 10800 if ALL_COMBINATIONS else 1200  # limit for train.py or a worker of many cases
# The seed of the random delays. It is the time, so that each round of tests has other delays; set
# it to repeat a round. Processes that this one starts inherit it.
DELAY_SEED = os.environ.setdefault("DELAY_SEED", str(int(time.time())))
parametrize = pytest.mark.parametrize
slow = pytest.mark.skipif("CHECK" in os.environ, reason="make check")  # starts ranks or takes long
GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
train.EVAL_SEQUENCES = 8  # instead of 64, with which an evaluation takes longer than a short run
# train.py's flags for a short run of a tiny model
QUICK_FLAGS = "--device cpu --seq 32 --batch 6 --steps 6 --eval-every -1"
SMALL = replace(
    m.MODELS["tiny"], dim=48, layers=2, heads=6, kv_heads=2, head_dim=8, ffn=80, vocab=101
)

# ---------------------------------------------------------------------------- the plain model
# Plain is LLaMA as torch.nn and PyTorch's autograd compute it, in float64 and in one process. All
# cases are compared with Plain. If a fork changes model.Block, PlainLayer needs the same change.

SEQ = 48  # tokens per sequence
BATCH = 8  # sequences per step
CLIP_NORMS = (0.2, 0.0, 0.2, 0.2)  # --clip of each step, below its gradient norm; 0: no clipping
NONFINITE_STEP = 2  # in this step one rank's loss or gradient is not finite; nothing may change
END_TOKEN = 5  # the token that ends a document, if a case has documents
IGNORED_TOKEN = 3  # where the label is this token, the loss leaves it out
# Relative errors allowed in (losses, gradient norms, weight updates). For comparison: Plain itself
# in bf16, with its float64 weights rounded before each step, errs by up to 0.002, 0.023 and 0.25,
# over all sizes and blocks except "deep" and "deeper". With float8 products in bf16 it errs by up
# to 0.007, 0.11 and 0.70. There, bf16's errors decide which way some operands are rounded, and
# Adam's first steps change each element by about the same size. No update at all would err by 1.
TOLERANCES = {
    "fp64": (1e-10, 1e-10, 1e-10),
    "fp32": (2e-5, 2e-4, 0.03),  # sums are in float64 (wide_sums)
    "bf16": (0.004, 0.08, 0.4),
    "bf16 fp8": (0.014, 0.22, 0.85),
}
Block = m.Block
SIZES = {  # vocab, C, layers, heads, key/value heads, F, head dim
    "gqa": m.ModelConfig(67, 24, 5, 8, 4, 40, 8),
    "mha": m.ModelConfig(67, 24, 5, 8, 8, 40, 8),
    "mqa": m.ModelConfig(67, 24, 5, 8, 1, 40, 8),
    "deep": m.ModelConfig(67, 24, 9, 8, 4, 40, 8),
    "deeper": m.ModelConfig(67, 24, 17, 8, 4, 40, 8),  # for virtual stages with several layers
    "wide": m.ModelConfig(67, 256, 5, 16, 8, 256, 64),  # for the kernels of GPUs
}


def size_of(model: str, products: str) -> m.ModelConfig:
    """Return a row of SIZES. With float8 products C and F are multiples of 16, on 4 tp ranks, too.

    With C = 24 and F = 40 no matrix would be multiplied in float8.
    """
    size = SIZES[model]
    return replace(size, dim=32, ffn=64) if products == "fp8" and size.dim % 16 else size


def round_to_float8(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers of float8_e4m3 that are nearest to x, in float64.

    These numbers have 4 significant bits. Below 2^-6 they are multiples of 2^-9. A value halfway
    between two of them becomes the even one. PyTorch casts float64 to float32 first, and so does
    this: otherwise values that lie within 1e-8 of halfway would differ.
    """
    x = x.float().double()
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, 1/2 <= |mantissa| < 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-5) - 4)  # between two numbers
    return torch.round(x / step) * step  # round() rounds half to even


def quantise(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., K) as float8 represents it.

    Each row is divided by a scale that makes its largest value 448, the largest float8 number. Then
    it is rounded, and multiplied by the scale again.
    """
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return round_to_float8(x / scale) * scale


class Float8Product(torch.autograd.Function):
    """Compute y = x W^T, and dx and dW in backward. The operands of all three are in float8.

    x (B, T, cols), W (rows, cols). numbers (B, T): the project computes dW from tokens with the
    same number in one product, so these tokens share the scales of dy^T and x^T.
    """

    @staticmethod
    def forward(ctx, x, weight, numbers):
        ctx.save_for_backward(x, weight, numbers)
        return quantise(x) @ quantise(weight).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight, numbers = ctx.saved_tensors
        dx = quantise(dy) @ quantise(weight.t()).t()
        dw = torch.zeros_like(weight)
        for number in numbers.unique():
            tokens = numbers == number  # (B, T)
            dw += quantise(dy[tokens].t()) @ quantise(x[tokens].t()).t()
        return dx, dw, None


def gated(activation: Callable) -> Callable:
    """Return the function of gate|up (..., 2F) that gives activation(gate) * up (..., F)."""

    def function(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    return function


gelu_of_tanh = torch.nn.GELU("tanh")
ACTIVATIONS = {  # block -> activation of its MLP; blocks without a row have that of "plain"
    "plain": gated(F.silu),
    "geglu": gated(gelu_of_tanh),
    "gemma": gated(gelu_of_tanh),
    "gelu": gelu_of_tanh,
}


class PlainLayer(torch.nn.Module):
    """A LLaMA layer made of PyTorch's modules. Its weights have model.py's names.

    block: "plain" is LLaMA's layer. "norms" adds Qwen's biases and norms of q and k. "gated" adds
    the gate of GatedBlock. "fork", "gelu", "geglu" and "gemma" are layers of examples/.
    adapters: whether the matrices have adapters, as in examples/lora.py.
    """

    def __init__(self, cfg: m.ModelConfig, block: str, adapters: bool):
        super().__init__()
        nn, c, d, f = torch.nn, cfg.dim, cfg.head_dim, cfg.ffn
        self.block = block
        self.heads = [cfg.heads, cfg.kv_heads, cfg.kv_heads]
        self.norm1, self.norm2 = nn.RMSNorm(c, cfg.norm_eps), nn.RMSNorm(c, cfg.norm_eps)
        self.qkv = nn.Linear(c, sum(self.heads) * d, bias=block in ("norms", "fork"))
        self.out = nn.Linear(cfg.heads * d, c, bias=False)
        self.gate_up = nn.Linear(c, f if block == "gelu" else 2 * f, bias=False)
        self.down = nn.Linear(f, c, bias=False)
        if self.qkv.bias is not None:
            self.q_norm, self.k_norm = nn.RMSNorm(d, cfg.norm_eps), nn.RMSNorm(d, cfg.norm_eps)
        if block == "fork":
            self.last_norm = nn.RMSNorm(c, cfg.norm_eps)
        if block in ("fork", "gated"):
            self.gate = nn.Linear(c, 3, bias=False)
        if block == "gemma":
            self.attention_norm = nn.RMSNorm(c, cfg.norm_eps)
            self.mlp_norm = nn.RMSNorm(c, cfg.norm_eps)
        self.adapters = adapters
        if adapters:
            for matrix in (self.qkv, self.out, self.gate_up, self.down):
                matrix.a = nn.Linear(matrix.in_features, RANK, bias=False)
                matrix.b = nn.Linear(RANK, matrix.out_features, bias=False)

    def product(self, matrix, x, numbers):
        """Return x W^T, and add what an adapter computes. numbers: see `forward`."""
        y = self.linear(matrix, x, numbers)
        if self.adapters:
            # W cut by rows has A with cut="whole", W cut by columns has B with cut="whole"
            # (examples/lora.py). A matrix with cut="whole" is not multiplied in float8
            by_rows = matrix in (self.qkv, self.gate_up)
            a = self.linear(matrix.a, x, None if by_rows else numbers)
            y = y + ALPHA / RANK * self.linear(matrix.b, a, numbers if by_rows else None)
        return y

    def linear(self, matrix, x, numbers):
        """Return x W^T + bias. It is computed in float8 if the sizes of W are multiples of 16."""
        if numbers is None or any(size % 16 for size in matrix.weight.shape):
            return matrix(x)
        y = Float8Product.apply(x, matrix.weight, numbers)
        return y if matrix.bias is None else y + matrix.bias

    def forward(self, x, rotation, mask, numbers=None):
        """Return the layer's output (B, T, C).

        rotation: RoPE's unit complex numbers (B, 1, T, D/2). mask: (B, 1 or H, T, T), True where a
        query attends to a key, or numbers that are added to the scores. numbers: see Float8Product;
        None if products are not in float8.
        """

        def rotate(t):  # (B, heads, T, D), with the pairs (i, i + D/2) as complex numbers
            t = torch.complex(*t.double().chunk(2, -1)) * rotation
            return torch.cat((t.real, t.imag), -1).to(x.dtype)

        # attention
        heads = self.product(self.qkv, self.norm1(x), numbers)
        heads = heads.unflatten(-1, (sum(self.heads), -1))
        q, k, v = heads.transpose(1, 2).split(self.heads, 1)
        if self.qkv.bias is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        o = F.scaled_dot_product_attention(rotate(q), rotate(k), v, mask, enable_gqa=True)
        if self.block == "gated":
            o = o * torch.sigmoid(self.gate(x)).sum(-1)[:, None, :, None]
        o = self.product(self.out, o.transpose(1, 2).flatten(2), numbers)
        if self.block == "gemma":
            o = self.attention_norm(o)
        h = x + o

        # MLP
        activation = ACTIVATIONS.get(self.block, ACTIVATIONS["plain"])
        gate_up = self.product(self.gate_up, self.norm2(h), numbers)
        y = self.product(self.down, activation(gate_up), numbers)
        if self.block == "gemma":
            y = self.mlp_norm(y)
        y = h + y
        if self.block != "fork":
            return y

        gate = torch.sigmoid(self.gate(x)).sum(-1, keepdim=True)
        return torch.tanh(self.last_norm(y)) * gate + x


class Plain(torch.nn.Module):
    """LLaMA made of PlainLayers, in float64. Its forward returns a batch's mean loss over labels.

    The first value of each weight depends only on its name and shape. frozen: see `freezes`.
    kernel: as in VALUES; "alibi" and "local" change the mask, and others do not matter.
    """

    def __init__(self, cfg: m.ModelConfig, block: str, kernel: str, frozen: str = "none"):
        super().__init__()
        self.cfg = cfg
        self.kernel = kernel
        self.embedding_scale = cfg.dim**0.5 if block == "gemma" else 1.0
        self.embed = torch.nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = torch.nn.ModuleList(
            PlainLayer(cfg, block, frozen == "base") for _ in range(cfg.layers)
        )
        self.norm = torch.nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.head = torch.nn.Linear(cfg.dim, cfg.vocab, bias=False)
        if cfg.tied:
            self.head.weight = self.embed.weight
        self.double()
        for name, p in self.named_parameters():
            rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(p.shape, generator=rng, dtype=torch.float64)
            p.data = 1 + 0.1 * drawn if p.dim() == 1 else drawn / p.shape[1] ** 0.5
            if name.endswith(".b.weight"):
                p.data *= 0.25  # so that adapters add half as much as their matrices compute
            p.requires_grad_(not freezes(frozen, our_name(name)))

    def logits(self, tokens, documents: bool, numbers=None):
        """Return the logits (B, T, vocab) of tokens (B, T). numbers: see PlainLayer.forward."""
        index = torch.arange(tokens.shape[1]).expand(tokens.shape)
        begins_document = torch.zeros_like(tokens, dtype=torch.bool)
        if documents:
            begins_document[:, 1:] = tokens[:, :-1] == END_TOKEN

        # the mask: a query attends to the earlier tokens of its document
        document = begins_document.cumsum(1)
        mask = (document[:, :, None] == document[:, None]).tril()[:, None]  # (B, 1, T, T)
        if self.kernel == "alibi":
            slopes = 0.5 ** (1 + torch.arange(self.cfg.heads).double())  # for 8 heads
            bias = slopes[:, None, None] * (index[0] - index[0][:, None])
            mask = torch.where(mask, bias, -torch.inf)  # (B, H, T, T)
        masks = [mask for _ in self.blocks]
        if self.kernel == "local":  # every second layer has a window
            near = index[0][:, None] - index[0] < local.WINDOW
            masks[::2] = [mask & near for _ in masks[::2]]

        # RoPE: positions count from the beginning of each document
        positions = index - torch.where(begins_document, index, 0).cummax(1).values
        exponent = torch.arange(0, self.cfg.head_dim, 2).double() / self.cfg.head_dim
        angle = positions[:, None, :, None] * self.cfg.rope_theta**-exponent  # (B, 1, T, D/2)
        rotation = torch.polar(torch.ones_like(angle), angle)

        x = self.embed(tokens) * self.embedding_scale
        for block, mask in zip(self.blocks, masks):
            x = block(x, rotation, mask, numbers)
        return self.head(self.norm(x))

    def forward(self, batch: np.ndarray, documents: bool = False, numbers=None):
        """Return the mean loss of a batch (B, T + 1). The end of a document predicts nothing.
        numbers: see PlainLayer.forward."""
        tokens, labels = torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
        ignored = labels == IGNORED_TOKEN
        if documents:
            ignored = ignored | (tokens == END_TOKEN)
        labels = labels.masked_fill(ignored, -100)
        logits = self.logits(tokens, documents, numbers)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters by model.py's names."""
        return {our_name(name): p.detach().clone() for name, p in self.named_parameters()}


def our_name(name: str) -> str:
    """Return model.py's name of a parameter of Plain. There a bias is a Vector."""
    return name.replace("qkv.bias", "qkv_bias.weight")


def freezes(frozen: str, name: str) -> bool:
    """Return whether a case with this value of the key `frozen` freezes a weight.

    none    no weight
    base    all but the adapters of examples/lora.py
    some    the embedding, the first two layers, and about half of the other weights
    """
    if frozen == "base":
        return not name.endswith((".a.weight", ".b.weight"))
    if frozen == "some":
        all_frozen = name.startswith(("embed.", "blocks.0.", "blocks.1.", "blocks.3."))
        return all_frozen or zlib.crc32(name.encode()) % 2 == 0
    return False


def naive_forward(q, k, v, mask):
    """Compute attention by its definition, document by document. Return o and its log-sum-exp.

    This and naive_backward are an attention kernel as a fork would add one.
    """
    if mask.documents is not None:
        results = [
            naive_forward(*(t[None, rows] for t in (q, k, v)), attention.CAUSAL)
            for rows in mask.documents.slices()
        ]
        o, lse = zip(*results)
        return torch.cat(o, 1)[0], torch.cat(lse, 2)[0]
    scores, wide_v = naive_scores(q, k, v, mask)
    lse = scores.logsumexp(-1)  # (B, H, T)
    o = torch.einsum("bhts,bshd->bthd", (scores - lse[..., None]).exp(), wide_v)
    return o.to(q.dtype), lse


def naive_scores(q, k, v, mask):
    """Return scores (B, H, T, S), and v with as many heads as q has.

    Both are in float32 or wider, as a kernel's lse must be.
    """
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    q, k, v = (t.to(ops.accumulation_dtype(t.dtype)) for t in (q, k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    if mask.causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores, v


def naive_backward(do, q, k, v, o, lse, mask):
    """Return the gradients of q, k and v."""
    if mask.documents is not None:
        results = [
            naive_backward(
                *(t[None, rows] for t in (do, q, k, v, o)), lse[None, :, rows], attention.CAUSAL
            )
            for rows in mask.documents.slices()
        ]
        return [torch.cat(grads, 1)[0] for grads in zip(*results)]

    # o and lse are constants here: on a ring they belong to all keys, not only to these
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    do = do.to(ops.accumulation_dtype(do.dtype))
    with torch.enable_grad():
        scores, v = naive_scores(*inputs, mask)
        p = (scores - lse[..., None]).exp()
        row_sums = (do * o).sum(-1).transpose(1, 2)[..., None]  # of do * o, (B, H, T, 1)
        dp = torch.einsum("bthd,bshd->bhts", do, v)
        grads = torch.autograd.grad((p * (dp - row_sums)).sum(), inputs)
    return [grad.contiguous() for grad in grads]


attention.KERNELS["naive"] = attention.Kernel(
    naive_forward, naive_backward, (), documents=True, plain=True
)


def learning_rate(step: int) -> float:
    return 1e-2 / (step + 1)


@functools.cache
def make_sample(i: int) -> np.ndarray:
    """Return the token ids of sample i, (SEQ + 1,).

    An id depends on the one before it, so that there is something to learn. In most samples some
    documents end. Sample 1 of each batch has ends at its first and last token and two in a row;
    sample 0 has none.
    """
    rng = np.random.default_rng(i)
    ids = (7 * np.arange(SEQ + 1) + rng.integers(3, size=SEQ + 1) + i) % 61 + 6
    ids[rng.random(SEQ + 1) < 0.1] = END_TOKEN
    ids[rng.random(SEQ + 1) < 0.1] = IGNORED_TOKEN
    if i % BATCH == 1:
        ids[[0, 7, 8, SEQ - 1]] = END_TOKEN  # the last one is the last input; id SEQ is a label
    if i % BATCH == 0:
        return np.where(ids == END_TOKEN, END_TOKEN + 1, ids)
    return ids


def make_window(i: int) -> data.Window:
    """Return sample i as the data give it: IGNORED_TOKEN does not count as a label."""
    ids = make_sample(i)
    return data.Window(ids, ids != IGNORED_TOKEN)


@functools.cache
def reference_steps(
    model: str,
    block: str,
    optimizer: str,
    documents: tuple[int, ...],
    kernel: str = "cpu",
    frozen: str = "none",
    moments: str = "fp32",
    tied: int = 0,
    numbers: tuple = (),
) -> tuple:
    """Train Plain. Return its first weights, (loss, gradient norm) of each step, its last weights.

    documents: for each step, whether attention stays inside documents. numbers: for each step, what
    `product_numbers` returns; (): products are not in float8.
    """
    size = size_of(model, "fp8" if numbers else "dtype")
    plain = Plain(replace(size, tied=bool(tied)), block, kernel, frozen)
    first_weights = plain.weights()
    trained = [p for p in plain.parameters() if p.requires_grad]
    vectors = [p for p in trained if p.dim() == 1]
    matrices = [p for p in trained if p.dim() > 1]
    adamw = torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    # an optimizer that torch does not have runs as a function of optim.py, on whole matrices
    row = optimizer if moments == "fp32" else f"{optimizer}-{moments}"
    own_optimizer = None if row == "adamw" else optim.OPTIMIZERS[row]
    own_states = {}  # name of a matrix -> (the matrix, its states)
    if own_optimizer:
        dtypes = own_optimizer.dtypes(torch.float64)
        for name, p in plain.named_parameters():
            if p.dim() > 1 and p.requires_grad:
                states = {key: torch.zeros_like(p, dtype=dtype) for key, dtype in dtypes.items()}
                own_states[name] = p, states | {"master": p.data}

    scalars = optim.make_scalars(torch.device("cpu"), torch.float64)
    steps = []
    for step, has_documents in enumerate(documents):
        batch = np.stack([make_sample(step * BATCH + i) for i in range(BATCH)])
        adamw.zero_grad()
        loss = plain(batch, has_documents, torch.tensor(numbers[step]) if numbers else None)
        loss.backward()
        clip_norm = CLIP_NORMS[step % 4]
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm or math.inf)
        assert norm > clip_norm, "this step would not clip"
        steps.append((loss.item(), norm.item()))
        if step == NONFINITE_STEP:
            continue  # the case makes this step's loss or gradient not finite: no update

        # torch's AdamW leaves parameters without gradients as they are
        optim.set_scalars(scalars, learning_rate(step), 0.0, norm, 0.0)
        for name, (p, states) in own_states.items():
            tensors = [p.data, p.grad, *states.values()]
            if not own_optimizer.whole:  # an update gets a range of the flat matrix
                tensors = [tensor.view(-1) for tensor in tensors]
            weight, grad, *values = tensors
            named = dict(zip(states, values))
            own_optimizer.update(
                optim.Update(name, 0, weight, grad, named, weight_decay=0.1, **scalars._asdict())
            )
            p.grad = None

        for param_group in adamw.param_groups:
            param_group["lr"] = learning_rate(step)
        adamw.step()
    return first_weights, steps, plain.weights()


def reference_of_case(case: dict) -> tuple:
    """Return reference_steps of the model that a case trains, for four steps."""
    documents = 4 * (case["docs"],)
    return reference_steps(
        case["model"],
        case["block"],
        case["optimizer"],
        documents,
        case["kernel"],
        case["frozen"],
        case["moments"],
        case["tied"],
        4 * (product_numbers(case),) if case["products"] == "fp8" else (),
    )


def product_numbers(case: dict) -> tuple[tuple[int, ...], ...]:
    """Return a number for each sequence and position of a batch, (BATCH, SEQ). Two tokens have the
    same number if a case multiplies them at once.

    That is, if they belong to the same micro-batch of the same data-parallel group, to the same
    sequence-parallel rank, and to the same token chunk.
    """
    plan = plan_of(case)
    rank_tokens = SEQ // plan.sp  # of one sequence
    sequence = np.arange(BATCH)[:, None]
    position = np.arange(SEQ)

    # a data-parallel group has consecutive sequences, and so has a micro-batch
    micro_batch, row = np.divmod(sequence, plan.micro_batch)

    # the sequence has 2R parts, and ring rank r of R has the parts r and 2R - 1 - r, one after the
    # other. If R = 1, this is all of the sequence. The ranks of Ulysses share these tokens evenly
    part, index = np.divmod(position, SEQ // (2 * plan.ring))
    is_second = part >= plan.ring
    ring_rank = np.where(is_second, 2 * plan.ring - 1 - part, part)
    index = index + is_second * SEQ // (2 * plan.ring)
    heads_rank, index = np.divmod(index, rank_tokens)
    sp_rank = ring_rank * (plan.sp // plan.ring) + heads_rank

    # a chunk has consecutive tokens of a rank's sequences, which lie one after the other
    chunk = (row * rank_tokens + index) // plan.chunk
    numbers = (micro_batch * plan.sp + sp_rank) * BATCH * SEQ + chunk
    return tuple(map(tuple, numbers.tolist()))


# ---------------------------------------------------------------------------- one case
# A case says which model it trains, how ranks split it, and what its layers keep for backward.
# A case reaches the project through `make_run`.

# What layers keep of their skeletal activations for backward (offload.ActivationPlan). None: layers
# run whole and keep all. Otherwise they run in token chunks, and a row has five numbers:
#   1  the number of resident layers: the last ones, which keep x and o on the GPU. 9 or 99 means
#      all layers that a virtual stage has
#   2  the fraction of the resident layers' chunks that is kept
#   3  the fraction of the remaining layers' chunks that is swapped
#   4  the number of layers that drop o
#   5  m, if layers 0, m, 2m, ... keep x
KEEPS = {
    "all": None,
    "x": (99, 0, 0, 99, 1),
    "kept": (9, 1, 0, 0, 1),
    "again": (9, 0, 0, 0, 1),
    "swapped": (2, 0, 1, 0, 1),
    "mixed": (3, 0.5, 0.5, 0, 1),
    "no-o": (2, 0.5, 0.25, 2, 1),
    "no-x": (2, 0, 0, 0, 3),
    "neither": (2, 0, 0, 2, 2),
}
VALUES = {  # the keys of a case line, and the values that each one takes, its default first
    "ranks": (1, 2, 4, 8),
    "model": ("gqa", "mha", "mqa", "deep", "deeper"),  # a row of SIZES
    "block": ("plain", "norms", "fork"),  # norms: Qwen's biases and norms; fork: examples/block.py
    "frozen": ("none", "base", "some"),  # which weights do not train: see `freezes`
    "tied": (0, 1),  # 1: embedding and head are one matrix
    "docs": (0, 1),  # 1: attention stays inside documents
    "micro": (1, 2, 4),  # micro-batches per step
    "sp": (1, 2, 4, 8),  # ranks that share a sequence
    "ring": (1, 2, 4),  # how many of these form a ring
    "groups": (1, 2, 4, 8),  # groups of heads, one after the other
    "tp": (1, 2, 4),  # ranks that share matrices (tensor parallelism)
    "mode": ("msp", "mtp", "fsp"),  # --tp-mode
    "pp": (1, 2, 4),  # pipeline stages
    "parts": (1, 2),  # virtual stages per stage
    "p": (1, 2, 4),  # shards of parameters
    "g": (1, 2, 4, 8),  # shards of gradients
    "os": (1, 2, 4, 8),  # shards of optimizer states
    "layout": ("intra", "inter"),  # --os-layout: each state is split evenly, or stays whole
    # where optimizer states lie; "both": those of a stage's first layer and of the embedding on the
    # GPU, the others on the host
    "place": ("gpu", "host", "both"),
    "open": (0, 1),  # 1: nothing overlaps
    "keep": tuple(KEEPS),
    "chunks": (3, 1),  # token chunks per layer
    "optimizer": ("adamw", "muon"),  # for matrices; muon: examples/muon.py
    "moments": ("fp32", "bf16"),  # --moments
    "sums": ("fp32", "dtype"),  # --grad-sums
    "products": ("dtype", "fp8"),  # --products
    "dtype": ("fp64", "bf16"),
    "device": ("cpu", "cuda"),
    "kernel": ("cpu", "naive", "alibi"),  # naive: naive_forward; alibi: examples/alibi.py
}
DEFAULTS = {key: values[0] for key, values in VALUES.items()}


def make_case(line: str) -> dict:
    """Parse a case line: '2 sp=2  # why' is the case of 2 ranks with sp=2 and defaults."""
    ranks, *words = line.partition("#")[0].split()
    case = {"ranks": ranks} | dict(word.split("=") for word in words)
    assert case.keys() <= DEFAULTS.keys(), line
    return DEFAULTS | {key: type(DEFAULTS[key])(value) for key, value in case.items()}


def activations_of(keep: str, layers: int, chunks: int) -> offload.ActivationPlan | None:
    """Return the plan of a row of KEEPS for this many layers and token chunks per layer.

    None: layers run whole. If the layers that are not resident would not divide into groups of m,
    more layers are resident. Example: "no-x" has m = 3, so of 9 layers not 2 but 3 are resident.
    """
    if KEEPS[keep] is None:
        return None
    resident, kept, swapped, dropping_o, stride = KEEPS[keep]
    resident = min(layers, resident)
    resident += (layers - resident) % stride
    return offload.ActivationPlan(
        layers,
        chunks,
        resident,
        round(kept * resident * chunks),
        round(swapped * (layers - resident) * chunks),
        min(dropping_o, layers),
        stride,
        lag=max(2, resident),
    )


def plan_of(case: dict) -> costs.Plan:
    """Return the plan that a case runs, as the planner would make it."""
    value = SimpleNamespace(**case)
    norms = value.block == "norms"
    model = replace(
        size_of(value.model, value.products),
        qkv_bias=norms,
        qk_norm=norms,
        tied=bool(value.tied),
        architecture=architecture_of(case),
    )
    micro_batch = BATCH * value.sp * value.tp * value.pp // value.ranks // value.micro
    tokens = micro_batch * SEQ // value.sp
    chunk = min(tokens, tokens // value.chunks + 1)  # so the last chunk is shorter
    layers = costs.ceil_div(model.layers, value.pp * value.parts)  # per virtual stage, at most
    return costs.Plan(
        model,
        planner.DTYPES[value.dtype],
        value.ranks,
        per_node=value.ranks,
        seq=SEQ,
        sp=value.sp,
        ring=value.ring,
        batch=BATCH,
        micro_batch=micro_batch,
        head_groups=value.groups,
        recompute="none" if value.keep == "all" else "auto",
        chunk=chunk if KEEPS[value.keep] else tokens,
        factors=shard.Factors(value.p, value.g, value.os),
        os_layout=value.layout,
        os_place="gpu" if value.place == "gpu" else "host",
        resident_states=int(value.place == "both"),
        optimizer=value.optimizer if value.moments == "fp32" else "adamw-bf16",
        grad_sums=value.sums,
        products=value.products,
        keeps_casts=value.products == "fp8" and value.p == 1,  # p > 1: while a layer runs
        activations=activations_of(value.keep, layers, value.chunks),
        tp=value.tp,
        tp_mode=value.mode,
        pp=value.pp,
        pp_chunks=value.parts,
    )


def groups_of(plan: costs.Plan, made: dict) -> Groups:
    """Return a plan's process groups. `made` holds those of earlier cases, by (tp, pp).

    They all share one table of communicators, by name and ranks (Groups.made), because NCCL takes
    seconds to make a communicator."""
    key = plan.tp, plan.pp
    if key not in made:
        groups = Groups(tp=plan.tp, pp=plan.pp)
        for earlier_groups in made.values():
            groups.made = earlier_groups.made
        made[key] = groups
    return made[key]


def use_stream_class(stream_class: type) -> None:
    """Let the engine make streams of this class instead of CommStream."""
    for module in (offload, optim, shard, train):
        module.CommStream = stream_class


class GatedBlock(Block):
    """A layer that multiplies attention's output by a gate per token.

    With tensor parallelism each rank has only some of the heads, but needs the whole gate.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate = m.Matrix(3, cfg.dim, cut="whole")

    def post(self, x, o, positions):
        gate = torch.sigmoid(self.gate(x)).sum(-1)[..., None, None]
        return super().post(x, o * gate, positions)


class PartlyFrozen(m.LLaMA):
    """A model with frozen weights in some layers."""

    def __init__(self, *args):
        super().__init__(*args)
        for name, p in self.named_parameters():
            p.requires_grad_(not freezes("some", name))


# rows for the values of the key `frozen`, with each block that a case may have beside it
m.ARCHITECTURES["gated"] = m.Architecture(GatedBlock)
for name, block in (("llama", Block), ("fork", ForkBlock), ("gated", GatedBlock)):
    m.ARCHITECTURES[f"{name} some"] = m.Architecture(block, PartlyFrozen)
    adapted = type(f"LoRA{block.__name__}", (LoRABlock, block), {})
    m.ARCHITECTURES[f"{name} base"] = m.Architecture(adapted, LoRAModel)


def architecture_of(case: dict) -> str:
    """Return the row of model.ARCHITECTURES that a case trains."""
    name = case["block"] if case["block"] in m.ARCHITECTURES else "llama"
    return name if case["frozen"] == "none" else f"{name} {case['frozen']}"


def make_run(case: dict, groups: dict, stream_class: type) -> tuple:
    """Build a case with train.py. Return this rank's run, model and states.

    groups: the process groups of earlier cases (groups_of). This function, plan_of and
    refusal_reason are all that the harness knows of the project.
    """
    plan = plan_of(case)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if case["device"] == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.device_count() < ranks:  # ranks share a GPU: no peer-to-peer copies
            plan = replace(plan, per_node=1)
    else:
        device = torch.device("cpu")
    cfg = train.Config(
        document_token=END_TOKEN if case["docs"] else -1,
        overlap="none" if case["open"] else train.Config.overlap,
    )
    run = train.Run(
        cfg,
        rank,
        device,
        case["kernel"],
        plan,
        training=SimpleNamespace(sample=make_window),
    )
    m.Block = Block
    process_groups = groups_of(plan, groups)
    use_stream_class(stream_class)
    op = train.make_attention(run, process_groups)
    model, states = train.build_model(run, op, process_groups)
    return run, model, states


def assert_equals_plain(
    case: dict,
    groups: dict,
    reference: tuple,
    folder: Path | None = None,
    only_step: int | None = None,
) -> None:
    """Run a case's four steps and compare them with Plain's (reference_steps).

    The assertion fails on all ranks or on none. only_step: run only this step. Its states come
    from the last checkpoint in the folder, and are saved there again.
    """
    run, model, states = make_run(case, groups, SpoilingStream)
    first_weights, expected_steps, expected_weights = reference
    row = "bf16 fp8" if case["dtype"] == "bf16" and case["products"] == "fp8" else case["dtype"]
    loss_tolerance, norm_tolerance, update_tolerance = TOLERANCES[row]
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    errors = []

    if only_step is None or only_step == 0:
        states.load(first_weights.get)
    else:
        checkpoint.load_checkpoint(states, checkpoint.find_checkpoint(folder, "latest"))

    for i in range(4) if only_step is None else [only_step]:
        batch = train.load_batch(run, i * BATCH)
        expected_loss, expected_norm = expected_steps[i]
        if i == 0 and run.plan.pp > 1:
            model.warm_up(next(batch.micro_batches()))

        if i == NONFINITE_STEP:
            # an evaluation sees the weights that the last step has just updated
            loss = evaluate_batch(run, model, batch)
            errors += compare_numbers(loss, expected_loss, loss_tolerance, "evaluation")
            states_before = values_to_save(states)
        if i == NONFINITE_STEP and is_last_rank:
            # NaN: the loss itself is not finite. 1e305: the loss is finite, its gradient is not.
            factor = math.nan if case["micro"] > 1 else 1e305
            batch = replace(batch, scale=batch.scale * factor)
        if i % 2 and run.device.type == "cuda":
            torch.cuda._sleep(3 * 10**8)  # compute is late: streams that do not wait run ahead

        rate, clip_norm = learning_rate(i), CLIP_NORMS[i % 4]
        loss, norm, finite = train.run_step(model, states, batch, rate, clip_norm)
        if i == NONFINITE_STEP:
            if finite:
                errors.append("a step whose loss or gradients are not finite updated the weights")
            if not torch.equal(values_to_save(states), states_before):
                errors.append("a step whose loss or gradients are not finite changed the states")
        else:
            errors += compare_numbers(loss, expected_loss, loss_tolerance, f"step {i}, loss")
            errors += compare_numbers(norm, expected_norm, norm_tolerance, f"step {i}, norm")

    if case["dtype"] == "bf16" and case["micro"] > 1:
        if case["layout"] == "intra" and case["g"] == run.plan.state_ranks:
            errors += find_wrong_rounding(states, rounds=case["sums"] == "dtype")

    if only_step is None or only_step == len(expected_steps) - 1:
        weights = {name: states.full_param(name).cpu() for name in expected_weights}
        for name in [name for name in weights if freezes(case["frozen"], name)]:
            weight = weights.pop(name)
            dtype = run.plan.dtype if weight.dim() > 1 else run.plan.accum_dtype
            first_weight = first_weights[name].to(dtype).to(run.plan.accum_dtype)
            if not torch.equal(weight, first_weight):
                errors.append(f"{name} is frozen, and has changed")
        updates = weight_updates(first_weights, weights, expected_weights, case["dtype"])
        for name, (update, expected_update) in updates.items():
            error = relative(update, expected_update)
            if not error < update_tolerance:  # so written, NaN is an error
                errors.append(f"update of {name}: {error:.3g}")

    if case["tied"] and case["pp"] > 1:
        errors += find_different_copies(states)
    if only_step is not None:
        save_checkpoint(states, folder, only_step + 1)
    errors_by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(errors_by_rank, errors)
    assert not any(errors_by_rank), next(filter(None, errors_by_rank))


def find_rounded_gradients(states: shard.States) -> list[str]:
    """Return an error for each gradient that was accumulated in bf16 instead of float32.

    A sum over several micro-batches has bits that bf16 drops. Left out are parameters with
    replicas, because their gradients travel in bf16, and shards that hold only padding.
    """
    return [
        f"gradients of {param.name} were rounded to bf16"
        for param in states.sharded_params.values()
        if param.replica_group is None
        and param.grad_shard.any()
        and torch.equal(param.grad_shard.bfloat16(), param.grad_shard)
    ]


def find_wrong_rounding(states: shard.States, rounds: bool) -> list[str]:
    """Return errors if sums of gradients over several micro-batches were rounded to bf16, or if
    they were not although they are kept in bf16. rounds: whether they are (--grad-sums dtype)."""
    rounded = find_rounded_gradients(states)
    trained = [module for module in states.sharded_params if not module.frozen]
    if not rounds:
        return rounded
    # of the others this rank may have only padding
    return ["gradients were not rounded to bf16"] if len(rounded) < len(trained) / 2 else []


def find_different_copies(states: shard.States) -> list[str]:
    """Return an error for each part of a tied matrix that differs between two ranks.

    The first and the last pipeline stage hold copies of its weights and its optimizer states. All
    bits must be equal. A collective of all ranks.
    """
    parts = {}  # (name, index of the first element) -> the bytes of the elements
    for name, part in states.state_parts().items():
        if name.endswith(".embed.weight"):
            parts[name, part.start] = part.read()
    if states.device.type == "cuda":
        torch.cuda.synchronize()  # the new parameters are broadcast
    for param in states.sharded_params.values():
        if param.name == "embed.weight":
            parts["the parameters", states.param_index] = param.param_shard

    found = {key: values.cpu().view(torch.uint8).numpy().tobytes() for key, values in parts.items()}
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    holders = Counter(key for of_rank in by_rank for key in of_rank)
    assert holders and min(holders.values()) > 1, "only one stage holds the matrix"
    expected = {key: values for of_rank in by_rank for key, values in of_rank.items()}
    return [
        f"copies of a tied matrix differ: {name} from element {start}"
        for (name, start), values in found.items()
        if values != expected[name, start]
    ]


def weight_updates(first: dict, last: dict, expected: dict, dtype: str) -> dict:
    """Return what four steps added to each weight in `last`: name -> (update, Plain's update).

    In bf16 all vectors are joined into one row. They have few elements, and Adam's first steps
    change each element by the same size, so noise that flips a few signs would count too much.
    """
    updates = {name: (w - first[name], expected[name] - first[name]) for name, w in last.items()}
    vectors = [name for name, w in last.items() if w.dim() == 1]
    if dtype == "fp64" or not vectors:
        return updates
    vectors = [updates.pop(name) for name in vectors]
    return updates | {"vectors": [torch.cat(both) for both in zip(*vectors)]}


def compare_numbers(value: torch.Tensor, expected: float, tolerance: float, what: str) -> list[str]:
    """Return a list with an error message, or an empty list. NaN is an error."""
    if abs(value.item() / expected - 1) < tolerance:
        return []
    return [f"{what}: {value.item()}, not {expected}"]


def evaluate_batch(run: train.Run, model, batch: train.Batch) -> torch.Tensor:
    """Return the mean loss of a batch over all ranks, as train.py's evaluation computes it."""
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for tokens, labels, scale, *positions in batch.micro_batches():
        with torch.no_grad():
            total += (model(tokens, labels, None, *positions, per_token=True) * scale).sum()
    dist.all_reduce(total)
    return total


def values_to_save(states: shard.States) -> torch.Tensor:
    """Return a copy of all values that this rank would save in a checkpoint, in one row."""
    return torch.cat([part.read().flatten() for part in states.state_parts().values()])


def save_checkpoint(states: shard.States, folder: Path, step: int) -> None:
    """Save states as the checkpoint of a step, with made-up facts about the run."""
    saver = checkpoint.Saver(folder, 2, states)  # the folder keeps the last 2 checkpoints
    config = {"seq": 1, "batch": 1, "schedule_steps": 0, "warmup_steps": 0}
    meta = {"config": config, "model": {"max_positions": 1}, "source": {}, "trained_to": {}}
    saver.begin(meta | {"step": step, "samples": 0})
    saver.finish()


class SpoilingStream(streams.CommStream):
    """A CommStream that fills buffers with NaN when they may be overwritten, and is late at random.

    On a GPU it sometimes starts its work late, or makes compute late, by more than the time of two
    layers. On a CPU it sometimes stops the host. DELAY_SEED decides when.
    """

    random = random.Random(DELAY_SEED)  # `seed_delays` gives each rank and case its own seed

    def done_reading(self, *buffers):
        """Fill the buffers with NaN, or with 77 if they hold integers, such as bytes."""
        for x in buffers:
            spoiled = torch.full_like(
                x,
                torch.nan if x.is_floating_point() else 77,
                device=self.stream.device if self.stream else None,
            )
            x.copy_(spoiled, non_blocking=True)

    @contextlib.contextmanager
    def after_compute(self):
        self.sleep()
        with super().after_compute():
            self.sleep()
            yield

    @contextlib.contextmanager
    def beside_compute(self):
        with super().beside_compute():
            self.sleep()
            yield

    def sleep(self):
        """Delay the current stream (GPU) or the host (CPU) now and then."""
        chance = self.random.random()
        if self.stream is not None and chance < 0.1:
            torch.cuda._sleep(10**8)
        if self.stream is None and chance < 0.02:
            time.sleep(0.003)  # so messages arrive in another order


class DelayedMessage:
    """Stands for the message that pipeline.Link.launch returns, and is late now and then.

    If ranks share a GPU, the message goes through host memory, because gloo does not send from GPU
    memory.
    """

    launch = pipeline.Link.launch

    def __init__(self, link, operation, x):
        if SpoilingStream.random.random() < 0.02:
            time.sleep(0.003)
        self.is_send = operation is dist.isend
        self.x = self.sent = x
        if x.is_cuda and torch.cuda.device_count() < dist.get_world_size():
            self.sent = x.cpu() if self.is_send else torch.empty_like(x, device="cpu")
        self.work = DelayedMessage.launch(link, operation, self.sent)

    def wait(self):
        """Let compute wait for the message. Then fill a sent message with NaN.

        The memory of a sent message may belong to another tensor from now on.
        """
        self.wait_for_work()
        if self.is_send:
            self.x.fill_(math.nan)
        elif self.sent is not self.x:
            self.x.copy_(self.sent)

    def wait_for_work(self):  # a method of its own, because tests of waits replace it
        self.work.wait()


def seed_delays(what: str) -> None:
    """Seed this rank's delays with DELAY_SEED and the case that follows.

    So a case has the same delays whether it runs by itself or among others.
    """
    SpoilingStream.random.seed(f"{DELAY_SEED}, rank {dist.get_rank()}, {what}")


def expose_races() -> None:
    """Let tiny tensors have several pieces, delay messages, and make PyTorch deterministic.

    So a race shows as a wrong number. It lasts until the end of this process.
    """
    # this also fills fresh memory with NaN (fill_uninitialized_memory, PyTorch's default)
    torch.use_deterministic_algorithms(True)
    optim.PIECE_ELEMENTS, ops.LOSS_ELEMENTS, ops.LOSS_GRAD_TOKENS = 300, 67 * 7, 14
    seed_delays("")
    pipeline.Link.launch = lambda *message: DelayedMessage(*message)


@contextlib.contextmanager
def wide_sums(dtype: str):
    """Let cases in fp32 have their sums, states and vectors in float64 while the `with` block runs.

    So they run the code for a dtype that is narrower than its sums, as cases in bf16 do, but their
    tolerances are a tenth of those of bf16, or less. (They do not show whether a sum is rounded too
    early: float32 rounds too little for that.)
    """
    narrow = ops.accumulation_dtype
    with pytest.MonkeyPatch.context() as patch:
        if dtype == "fp32":
            for module in [*sys.modules.values()]:
                if vars(module).get("accumulation_dtype") is narrow:
                    patch.setattr(module, "accumulation_dtype", lambda dtype: torch.float64)
        yield


def check_cases(cases: list[dict], folder: Path, first_step: int | None = None) -> None:
    """Compare all cases with the references that the folder holds. Runs on each rank.

    first_step: None: each case trains all four steps. Otherwise the cases are consecutive steps of
    one run. The first case runs only this step, the next case only the step after it, and so on.
    """
    expose_races()
    groups, errors = {}, []
    for i, (case, reference) in enumerate(zip(cases, torch.load(folder / "references"))):
        # float64 and fp32 show whether the formulas are right, so nothing is compiled. In bf16 it
        # matters how a compiled kernel rounds.
        stance = "default" if case["dtype"] == "bf16" else "force_eager"
        non_defaults = {key: value for key, value in case.items() if value != DEFAULTS[key]}
        seed_delays(str(non_defaults))
        only_step = None if first_step is None else first_step + i
        start = time.perf_counter()
        verdict = "right"
        try:
            with torch.compiler.set_stance(stance), wide_sums(case["dtype"]):
                assert_equals_plain(case, groups, reference, folder, only_step)
        except AssertionError as e:
            verdict = "WRONG"
            errors.append(f"{non_defaults}: {e}")
        if dist.get_rank() == 0:  # at once, because a later case may never end
            print(f"{verdict} in {time.perf_counter() - start:.1f} s: {non_defaults}", flush=True)
    assert not errors, (
        f"{len(errors)} of {len(cases)} cases are wrong; DELAY_SEED={DELAY_SEED} repeats their "
        "delays\n" + "\n".join(errors)
    )


# ---------------------------------------------------------------------------- processes
# Processes start once per number of ranks, and run all cases of that number.


@pytest.fixture
def group():
    """A process group with only this process, as train.py makes it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def clean_up():
    """Undo what train.main leaves in this process: signal handlers, streams, a process group."""
    handlers = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    yield
    for s, handler in handlers:
        signal.signal(s, handler)
    use_stream_class(streams.CommStream)
    if dist.is_initialized():
        dist.destroy_process_group()


def main(flags: str, picture: bool = False) -> None:
    """Run train.py in this process with QUICK_FLAGS and these flags.

    picture: draw loss.png at the end. This takes longer than the steps of a short run, so only
    tests that look at the picture ask for it. gc.freeze is left out, because a process of tests has
    many runs, and would never free the reference cycles of the earlier ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "freeze_gc", lambda: None)
        if not picture:
            patch.setattr(train, "draw_losses", lambda log: None)
        train.main(f"{QUICK_FLAGS} {flags}".split())


def start_processes(target: Callable, ranks: int, file: Path, *args, method="forkserver") -> list:
    """Start target(rank, file, *args) in one process per rank. Their output goes to the file.

    method "forkserver": processes are forked from one that has run tests/warm_start.py, which saves
    seconds of imports.
    """
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["tests.warm_start"])
    file.touch()
    processes = [context.Process(target=target, args=(r, file, *args)) for r in range(ranks)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list, file: Path, expect: int = 0, show: bool = False) -> str:
    """Wait until all processes end, and return their output.

    expect: their exit status. show: print the output as they write it, too.
    """
    deadline = time.time() + RUN_SECONDS
    with open(file) as output:
        while show and any(process.is_alive() for process in processes) and time.time() < deadline:
            time.sleep(0.5)
            print(output.read(), end="", flush=True)
    for process in processes:
        process.join(max(0, deadline - time.time()))
        process.kill()
        process.join()
    text = file.read_text()
    assert {process.exitcode for process in processes} == {expect}, text[-5000:]
    return text


def redirect_output(file: Path) -> None:
    """Append this process's stdout and stderr to a file."""
    for stream in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)


def on_ranks(ranks: int, worker: Callable, *args, gpus: int = 0) -> str:
    """Run worker(*args) on this many ranks, and return their output. gpus: how many they share."""
    method = "spawn" if gpus else "forkserver"
    if gpus:
        use_more_queues()  # as train.py does; processes inherit it before they start CUDA
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "output"
        rest = ranks, get_free_port(), gpus, worker, args
        processes = start_processes(run_rank, ranks, file, *rest, method=method)
        # GPUs take minutes, and `pytest -s` shows which cases were right before a later one hangs
        return finish(processes, file, show=gpus > 0)


def run_rank(
    rank: int, file: Path, ranks: int, port: int, gpus: int, worker: Callable, args: tuple
) -> None:
    """Run worker(*args) as one rank of on_ranks."""
    redirect_output(file)
    if gpus:
        torch.cuda.set_device(rank % gpus)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    backend = "gloo" if gpus < ranks else "cpu:gloo,cuda:nccl"
    if 0 < gpus < ranks:
        # ranks share a GPU and use gloo, which does not coalesce collectives as NCCL does
        dist._coalescing_manager = lambda *args, **options: contextlib.nullcontext()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=100)
    )
    worker(*args)
    print(f"rank {rank} is done", flush=True)
    os._exit(0)  # leave out NCCL's shutdown


def compare_with_plain(ranks: int, cases: list[dict], folder: Path, gpus: int = 0) -> None:
    """Run cases on this many ranks and compare them with Plain. The output has each case's seconds:
    `pytest -rP` shows it at the end. On GPUs, `pytest -s` shows a case when it ends."""
    torch.save([reference_of_case(case) for case in cases], folder / "references")
    text = on_ranks(ranks, check_cases, cases, folder, gpus=gpus)
    assert text.count("is done") == ranks
    if not gpus:
        print(text)


def start_train(flags: str, ranks: int, file: Path, code: str = "") -> list:
    """Start train.py on this many ranks as torchrun would, but without its seconds of imports.

    ranks 0: one process without torchrun's variables. code: run it before train.main starts.
    """
    args = ranks, get_free_port(), flags, code
    return start_processes(run_train_rank, max(1, ranks), file, *args)


def run_train_rank(rank: int, file: Path, ranks: int, port: int, flags: str, code: str) -> None:
    """Run train.py as one rank of start_train."""
    redirect_output(file)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if ranks:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    exec(code, globals())
    main(flags)


def run(flags: str, ranks: int = 0, code: str = "", expect: int = 0) -> str:
    """Run train.py and return its output. See start_train and, for expect, finish."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "output"
        return finish(start_train(flags, ranks, file, code), file, expect)


def read_log(out) -> list[dict]:
    """Return the rows of a run's log.jsonl. NaN and Infinity are errors, because JSON has none."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return [
        json.loads(line, parse_constant=refuse)
        for line in (Path(out) / "log.jsonl").read_text().splitlines()
    ]


def losses(out) -> list:
    """Return (step, loss, gradient norm) of each step that a run has logged."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_log(out) if "loss" in r]


def relative(a, b) -> float:
    """Return the relative error ||a - b|| / ||b||."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def seeded_model(*args) -> m.LLaMA:
    """Return a model in float64, with the weights of seed 0."""
    model = m.LLaMA(*args).double()
    model.init_weights(0)
    return model


def example(batch=2, seq=40, vocab=101, seed=1):
    """Return random tokens and labels (B, T). Some labels of the first row are ignored."""
    rng = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(vocab, (batch, seq), generator=rng) for _ in range(2))
    labels[0, 3:17] = m.IGNORE
    return tokens, labels


# ---------------------------------------------------------------------------- all cases


def mechanisms(case: dict) -> set[str]:
    """Return the names of a case's mechanisms: all that plain training does not have."""
    value = SimpleNamespace(**case)
    replicas = value.ranks // (value.tp * value.pp)
    uses = {
        "heads": value.sp > value.ring,
        "ring": value.ring > 1,
        "long ring": value.ring > 2,
        "groups": value.groups > 1,
        f"tp {value.mode}": value.tp > 1,
        "stages": value.pp > 1,
        "virtual stages": value.parts > 1,
        "p>1": value.p > 1,
        "g>p": value.g > value.p,
        "os>g": value.os > value.g,
        "replicas": replicas > value.os,
        "inter": value.layout == "inter",
        "host": value.place != "gpu",
        "resident states": value.place == "both",
        "no overlap": value.open == 1,
        "micro-batches": value.micro > 1,
        f"chunks {value.keep}": KEEPS[value.keep] is not None,
        "documents": value.docs == 1,
        "tied": value.tied == 1,
        f"block {value.block}": value.block != "plain",
        f"frozen {value.frozen}": value.frozen != "none",
        f"kv {value.model}": value.model in ("mha", "mqa"),
        "bf16": value.dtype == "bf16",
        "whole matrices": value.optimizer == "muon",
        "moments bf16": value.moments == "bf16",
        "products fp8": value.products == "fp8",
    }
    return {name for name, used in uses.items() if used}


MECHANISMS = sorted(
    "heads,ring,long ring,groups,tp msp,tp mtp,tp fsp,stages,virtual stages,p>1,g>p,os>g,replicas,"
    "inter,host,resident states,no overlap,micro-batches,chunks x,chunks kept,chunks again,"
    "chunks swapped,chunks mixed,chunks no-o,chunks no-x,chunks neither,documents,"
    "block norms,block fork,"
    "frozen base,frozen some,kv mha,kv mqa,bf16,whole matrices,moments bf16,products fp8,"
    "tied".split(",")
)


def mechanism_pairs(case: dict) -> set[tuple[str, str]]:
    """Return all pairs of a case's mechanisms, each pair in the order of the alphabet."""
    return set(itertools.combinations(sorted(mechanisms(case)), 2))


# Pairs of mechanisms that the planner refuses together. A key has the first words of the two names.
# A value has a case with both, and a regular expression for the reason of the refusal.
NEVER_MEET = {
    ("chunks", "tp fsp"): ("2 tp=2 mode=fsp keep=mixed", "--tp-mode fsp: .*layers run whole"),
    ("chunks", "tp msp"): ("2 tp=2 mode=msp keep=again", "--tp-mode msp: .*layers run whole"),
    ("g>p", "os>g"): ("4 p=1 g=2 os=4", "g must be p or os"),
    ("kv mqa", "tp"): ("2 model=mqa tp=2", "--tp 2: tensor parallelism must divide"),
    ("heads", "kv mqa"): ("2 model=mqa sp=2", "share 1 key/value heads"),
    ("moments bf16", "whole matrices"): (
        "2 layout=inter optimizer=muon moments=bf16",
        "--moments bf16: only AdamW has",
    ),
    ("products fp8", "tp fsp"): (
        "2 tp=2 mode=fsp products=fp8",
        "--tp-mode fsp: .* which --products fp8 casts .*--tp-mode msp",
    ),
    ("p>1", "whole matrices"): ("2 layout=inter p=2 g=2 os=2 optimizer=muon", "--p 1"),
    ("tp", "whole matrices"): (
        "2 layout=inter tp=2 optimizer=muon",
        "--optimizer muon needs .*inter --p 1 --tp 1. Nearest legal choices: none, unless other",
    ),
}
REFUSED = list(NEVER_MEET.values()) + [
    (
        "1 groups=3",
        "--head-groups 3: groups must have equally many of a rank's 8 query heads and of its 4",
    ),
    ("2 sp=2 ring=2 kernel=alibi", "--ring 2: --attention alibi, which may see heads.* --ring 1"),
    ("2 sp=2 ring=2 kernel=local", "--ring 2: --attention local, which may see heads.* --ring 1"),
]


def never_meet(a: str, b: str) -> bool:
    """Return whether no case has mechanisms a and b, which are in the order of the alphabet.

    The planner refuses them together, or both are values of one key, such as "kv mha", "kv mqa".
    """
    is_refused = any(a.startswith(x) and b.startswith(y) for x, y in NEVER_MEET)
    return is_refused or a.split()[0] == b.split()[0]


def refusal_reason(case: dict) -> str | None:
    """Return why the planner refuses a case. None: the case is legal."""
    value = SimpleNamespace(**case)
    if BATCH * value.tp * value.pp * value.sp % (value.ranks * value.micro):
        return "ranks and micro-batches do not divide the batch"
    plan = plan_of(case)
    shared_fields = (
        "seq batch micro_batch sp ring tp tp_mode pp pp_chunks head_groups os_layout os_place "
        "resident_states recompute chunk"
    )
    constraints = planner.Constraints(
        **{name: getattr(plan, name) for name in shared_fields.split()},
        **dataclasses.asdict(plan.factors),
        dtype=value.dtype,
        optimizer=value.optimizer,
        moments=value.moments,
        grad_sums=value.sums,
        products=value.products,
        document_token=END_TOKEN if value.docs else -1,
        attention=value.kernel,
    )
    hardware = planner.Hardware(value.ranks, value.ranks, None)
    try:
        planner.shapes(constraints, plan.model, hardware)
    except ValueError as e:
        return str(e)
    return None


def is_usable(case: dict) -> bool:
    """Return whether a case is legal, comparable with Plain, and does what all of its keys say."""
    keep = KEEPS[case["keep"]]
    if case["dtype"] == "bf16" and case["model"] in ("deep", "deeper"):
        return False  # rounding errors grow too large over so many layers
    if case["parts"] > 1 and case["pp"] == 1:
        return False  # without stages, parts would be ignored
    if case["sums"] == "dtype" and case["micro"] == 1:
        return False  # without several micro-batches, nothing would add up
    if case["chunks"] == 1 and keep is None:
        return False  # without token chunks, their number would be ignored
    if refusal_reason(case) is not None:
        return False
    if any(never_meet(*pair) for pair in mechanism_pairs(case)):
        return False
    # `keep` asks for layers that are not resident, so a stage must have enough layers for some
    plan = plan_of(case).activations
    return plan is None or plan.resident < plan.layers or keep[0] >= 9


def random_cases(ranks: int, count: int) -> list[dict]:
    """Draw this many of all usable combinations, of which there are more than ten thousand."""
    rng = random.Random(ranks)
    cases = []
    while len(cases) < count:
        case = {}
        for key, values in VALUES.items():
            # nearly all cases with an 8 need 8 ranks, so leave it out if there are fewer
            possible = [value for value in values if value != 8 or ranks == 8]
            case[key] = rng.choice(possible)
        case |= {"ranks": ranks, "device": "cpu", "kernel": "cpu"}
        if is_usable(case):
            cases.append(case)
    return cases


# CASES is the list below. ALONE has each mechanism by itself, or almost. PICKED has combinations
# that somebody thought of, with the reason. COVER has the remaining pairs of mechanisms.
ALONE = [
    make_case(line)
    for line in """
1                                                     # each mechanism by itself
1 micro=4 block=norms
1 docs=1 keep=mixed block=fork
1 place=host micro=2
1 dtype=bf16 micro=2 block=norms
1 keep=swapped chunks=1 groups=2                      # one chunk: the whole layer is swapped
1 keep=kept chunks=1 groups=2
1 model=mqa groups=4 keep=mixed kernel=alibi          # heads share keys, and know their numbers
1 model=deep keep=neither micro=2                     # several groups of layers between inputs
1 model=deep keep=no-x
2 p=2 g=2 os=2
2 g=2 os=2 micro=2
2 os=2 layout=inter open=1
2 os=2 place=host
2 sp=2
2 sp=2 groups=2
2 sp=2 groups=4 keep=mixed kernel=alibi
2 tp=2 mode=mtp kernel=alibi
1 groups=8 kernel=alibi                               # groups of one head
2 sp=2 ring=2 model=mqa
2 tp=2 mode=mtp
2 tp=2 mode=msp
2 tp=2 mode=fsp
2 pp=2 micro=4
2 pp=2 parts=2 micro=2
1 frozen=base                                         # adapters only
1 frozen=some micro=2                                 # backward ends at layer 2
2 keep=x docs=1
2 docs=1 sp=2 ring=2 micro=2
2 docs=1 sp=2 ring=2 model=mqa groups=2 keep=mixed
4 docs=1 sp=4 ring=2 groups=2 keep=swapped
2 keep=x sp=2 g=2 os=2 micro=4 place=both dtype=bf16
2 keep=x p=2 g=2 os=2
2 keep=swapped g=2 os=2
2 keep=neither model=deep block=norms
2 keep=kept block=fork
2 dtype=bf16 sp=2 os=2 g=2 keep=swapped block=norms
2 os=2 layout=inter optimizer=muon micro=2            # an optimizer of whole matrices
2 pp=2 micro=4 keep=swapped model=deep                # micro-batches in flight have host buffers
2 tp=2 mode=mtp keep=swapped docs=1
2 tp=2 mode=mtp keep=mixed block=norms micro=2
1 tied=1
2 tied=1 pp=2 micro=4
2 tied=1 p=2 g=2 os=2 micro=2                         # gathered once, used twice
1 products=fp8 micro=2
1 products=fp8 keep=mixed                             # dW is rounded per chunk; the last is shorter
2 products=fp8 sp=2 ring=2 micro=2                    # ... and per rank
2 products=fp8 tp=2 mode=mtp                          # ranks have parts of the same rows
""".strip().splitlines()
]
PICKED = [
    make_case(line)
    for line in """
2 pp=2 parts=2 micro=4 keep=mixed model=deeper          # virtual stages swap different numbers
4 os=4 layout=inter optimizer=muon place=host
4 pp=4 parts=2 micro=4 model=deeper                     # 17 layers on 8 virtual stages
4 frozen=some pp=2 parts=2 micro=2 keep=neither model=deeper os=2
4 frozen=base p=2 g=2 os=2 micro=2 place=both         # two replicas of all states
4 p=1 g=2 os=2 layout=inter micro=2                   # the kept half is summed once at the end
4 frozen=some tp=2 sp=2 g=2 os=2 micro=2 moments=bf16 products=fp8
4 tp=2 sp=2 groups=2 kernel=alibi
4 frozen=some sp=2 groups=4 p=2 g=4 os=4 keep=swapped products=fp8 # keys stay for the next group
4 frozen=base tp=2 mode=fsp p=2 g=2 os=2 moments=bf16
4 frozen=base tp=2 docs=1
4 tp=4 mode=mtp products=fp8                          # one key/value head per rank
2 frozen=base tp=2 mode=mtp keep=kept block=fork moments=bf16 products=fp8 # split, in chunks
2 frozen=some tp=2 mode=mtp keep=mixed block=gated    # whole weights meet split ones
2 frozen=base tp=2 mode=mtp keep=again groups=2
2 tp=2 mode=mtp keep=no-x moments=bf16 products=fp8
2 tp=2 mode=mtp keep=neither model=deep
4 tp=2 mode=mtp sp=2 keep=no-o
4 frozen=base tp=2 mode=mtp p=2 g=2 os=2 keep=mixed block=norms
4 sp=4 ring=4 model=mqa                               # keys are passed on more than once
4 frozen=base sp=4 ring=4 keep=swapped g=4 os=4
4 frozen=some p=4 g=4 os=4 keep=again
8 sp=8 ring=4 p=2 g=8 os=8
8 sp=8 model=mha g=4 os=4
4 tied=1 pp=2 g=2 os=2 layout=inter                   # the owners of both copies are equal
4 tied=1 pp=4 parts=2 micro=4 model=deep place=host
4 tied=1 tp=2 pp=2 dtype=bf16 micro=2 sums=dtype
1 dtype=bf16 micro=4 sums=dtype                       # each product adds to the sum in bf16
1 dtype=bf16 micro=2 sums=dtype keep=mixed tied=1     # chunks add up in float32 first
1 dtype=bf16 micro=2 sums=dtype products=fp8 moments=bf16
2 dtype=bf16 micro=2 sums=dtype p=2 g=2 os=2 block=norms
2 dtype=bf16 micro=2 sums=dtype os=2 place=both frozen=some
2 dtype=bf16 micro=2 os=2 layout=inter                # the sum over replicas is cast back
""".strip().splitlines()
]

# cases with the model in float32, and with its sums in float64 (wide_sums)
WIDE_SUMS = """
1 micro=4 keep=mixed tied=1
1 micro=2 place=both block=norms docs=1
1 micro=2 keep=neither chunks=1 frozen=some
2 micro=2 p=2 g=2 os=2 keep=swapped tied=1
2 micro=2 g=2 os=2 place=host block=norms
2 micro=2 os=2 layout=inter place=both
2 sp=2 ring=2 keep=mixed docs=1 g=2 os=2
2 sp=2 groups=4 keep=kept
2 tp=2 mode=mtp micro=2 keep=mixed tied=1
2 tp=2 micro=2 os=1 block=norms
2 pp=2 parts=2 micro=4 tied=1 keep=again
4 micro=2 p=2 g=2 os=4 keep=mixed frozen=base
4 sp=2 ring=2 p=2 g=4 os=4 micro=2 tied=1 keep=swapped
4 tp=2 pp=2 micro=2 tied=1 place=host
4 sp=4 ring=2 docs=1 g=4 os=4 layout=inter
""".strip().splitlines()
COVER = [
    make_case(line)
    for line in """
1 model=mqa docs=1 layout=inter keep=swapped moments=bf16
1 model=mha groups=2 layout=inter place=both open=1 keep=swapped
1 frozen=base model=mqa block=norms docs=1 layout=inter keep=neither optimizer=muon tied=1 \
  products=fp8
2 model=mha block=norms docs=1 groups=2 p=2 g=2 os=2 layout=inter place=both open=1 keep=neither \
dtype=bf16 moments=bf16
2 model=mqa block=fork pp=2 layout=inter place=both open=1 keep=kept optimizer=muon tied=1
2 frozen=base model=mha block=fork micro=2 groups=4 pp=2 parts=2 layout=inter open=1 keep=x \
  moments=bf16 products=fp8
2 block=fork docs=1 layout=inter place=host open=1 keep=swapped optimizer=muon dtype=bf16 tied=1
2 frozen=base model=mha block=norms docs=1 sp=2 groups=4 os=2 layout=inter open=1 keep=no-o \
  optimizer=muon tied=1 products=fp8
2 block=norms docs=1 groups=2 pp=2 layout=inter place=both open=1 keep=again dtype=bf16
2 frozen=base model=mqa block=norms sp=2 ring=2 g=2 os=2 layout=inter place=host open=1 \
  keep=no-x dtype=bf16 tied=1
2 model=mqa block=norms docs=1 p=2 g=2 os=2 place=both open=1 keep=mixed dtype=bf16 tied=1 \
  products=fp8
2 frozen=some model=mha block=fork sp=2 ring=2 groups=2 os=2 layout=inter place=host keep=no-x \
  chunks=1 optimizer=muon
2 frozen=some model=mha docs=1 groups=4 tp=2 mode=fsp layout=inter open=1 dtype=bf16 tied=1
2 model=mqa block=norms micro=2 pp=2 parts=2 layout=inter keep=again optimizer=muon
2 block=fork docs=1 micro=2 groups=2 g=2 os=2 layout=inter keep=no-o optimizer=muon dtype=bf16 \
  sums=dtype
2 model=mha block=norms sp=2 groups=4 layout=inter place=host keep=mixed dtype=bf16
2 model=mha block=fork micro=2 pp=2 parts=2 place=host keep=kept dtype=bf16 sums=dtype
2 model=mha block=fork layout=inter place=host open=1 keep=again optimizer=muon
2 frozen=some model=mha block=fork docs=1 sp=2 groups=2 p=2 g=2 os=2 layout=inter place=host \
  keep=kept
2 frozen=some model=mqa block=norms micro=2 sp=2 ring=2 os=2 layout=inter open=1 keep=x \
  optimizer=muon
2 model=mqa block=norms p=2 g=2 os=2 place=host open=1 keep=no-o
2 groups=2 os=2 layout=inter keep=mixed optimizer=muon dtype=bf16
2 model=deeper block=norms docs=1 micro=2 groups=2 pp=2 parts=2 layout=inter keep=no-x
2 model=mha block=fork docs=1 groups=2 tp=2 dtype=bf16 tied=1
2 model=mha block=fork micro=2 groups=2 tp=2 mode=mtp layout=inter place=both open=1 dtype=bf16
2 block=norms sp=2 ring=2 groups=2 os=2 place=host keep=kept
4 groups=4 p=2 g=2 os=4 layout=inter place=host keep=swapped dtype=bf16
4 block=fork sp=4 ring=4 p=2 g=4 os=4 keep=mixed moments=bf16
4 block=fork sp=2 tp=2 mode=fsp g=2 os=2 place=both open=1
4 model=mha sp=4 ring=4 p=2 g=2 os=2 layout=inter place=both keep=no-x
4 model=mha sp=2 groups=2 pp=2 os=2 place=host open=1 keep=again moments=bf16 tied=1
4 block=norms micro=2 groups=2 tp=2 pp=2 parts=2 layout=inter open=1
4 model=mha micro=2 tp=2 mode=mtp pp=2 parts=2 keep=x tied=1
4 model=deeper micro=2 sp=2 pp=2 parts=2 layout=inter place=both keep=no-o moments=bf16
4 model=mha sp=2 ring=2 tp=2 p=2 g=2 os=2 place=both
4 block=fork docs=1 sp=2 tp=2 mode=mtp g=2 os=2 layout=inter place=host
4 block=fork micro=2 sp=4 ring=4 p=2 g=4 os=4 layout=inter keep=kept
4 block=norms sp=2 groups=2 layout=inter place=host open=1 keep=no-x
4 model=mha block=fork sp=2 groups=4 layout=inter place=host open=1 keep=neither
4 block=norms docs=1 tp=2 mode=fsp os=2 layout=inter
4 model=mha groups=2 tp=2 mode=mtp os=2 dtype=bf16
4 model=mha block=fork docs=1 tp=2 os=2 layout=inter open=1
4 docs=1 sp=4 ring=4 p=2 g=4 os=4 layout=inter place=host keep=neither
4 model=deeper block=fork micro=2 pp=2 parts=2 p=2 g=2 os=2 keep=swapped
8 model=mha micro=2 sp=4 ring=4 groups=4 pp=2 parts=2 p=2 g=4 os=4 layout=inter open=1 keep=again \
  tied=1 products=fp8
8 frozen=some model=mqa sp=4 ring=4 os=2 layout=inter place=host open=1 keep=no-o \
  optimizer=muon dtype=bf16
8 block=norms micro=2 tp=2 mode=fsp pp=2 parts=2
8 model=mha block=norms sp=4 ring=4 groups=4 tp=2 mode=fsp p=2 g=4 os=4 layout=inter open=1
8 block=norms docs=1 sp=4 ring=4 groups=2 tp=2 mode=mtp layout=inter keep=x
8 block=fork sp=4 ring=4 tp=2 layout=inter open=1
""".strip().splitlines()
]
CASES = ALONE + PICKED + COVER

# Examples that are no values in VALUES, so that they need not meet every mechanism. Each row of
# EXAMPLE_ROWS runs in each mode. To add an example, write a row, and the same change in Plain
EXAMPLE_ROWS = ["block=gelu kernel=local", "block=gemma"]
EXAMPLE_MODES = """
1 micro=2
1 keep=mixed place=host
2 sp=2 p=2 g=2 os=2 keep=swapped
2 tp=2 mode=mtp keep=kept
2 tp=2 mode=fsp
2 pp=2 micro=2 keep=again
""".strip().splitlines()
MORE_EXAMPLES = """
1 block=geglu keep=mixed
2 block=geglu tp=2 mode=mtp
1 block=gemma tied=1
2 optimizer=ema tied=1 pp=2 place=host
2 block=gemma kernel=local optimizer=ema pp=2 os=1 keep=swapped         # all at once
2 block=gemma kernel=local optimizer=ema sp=2 p=2 g=2 os=2
""".strip().splitlines()
EXAMPLES = [
    make_case(line)
    for line in [f"{mode} {row}" for row in EXAMPLE_ROWS for mode in EXAMPLE_MODES] + MORE_EXAMPLES
]


@parametrize(
    "size, block",
    [("gqa", "plain"), ("mqa", "norms"), ("mha", "fork"), ("gqa", "gemma"), ("mqa", "gelu")],
)
def test_model_equals_plain_pytorch(size, block, monkeypatch):
    """The model has Plain's logits, loss and gradients, in one process and without sharding.

    Its loss is computed in groups of two chunks. Catches a wrong gradient in a hand-written
    backward, and a label that is lost.
    """
    norms = block == "norms"
    architecture = block if block in m.ARCHITECTURES else "llama"
    monkeypatch.setattr(ops, "LOSS_ELEMENTS", 67 * 7)
    monkeypatch.setattr(ops, "LOSS_GRAD_TOKENS", 14)
    cfg = replace(SIZES[size], qkv_bias=norms, qk_norm=norms, architecture=architecture)
    model, plain = m.LLaMA(cfg).double(), Plain(cfg, block, "cpu")
    model.load_state_dict(plain.weights())

    batch = np.stack([make_sample(i) for i in range(3)])
    tokens, labels = torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
    assert relative(model(tokens), plain.logits(tokens, False)) < 1e-13
    # times 3: the gradient of the loss is 3, not 1, so a backward that does not use it is wrong
    (3 * model(tokens, labels.masked_fill(labels == IGNORED_TOKEN, m.IGNORE))).backward()
    (3 * plain(batch)).backward()

    grads = {our_name(name): p.grad for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        assert relative(p.grad, grads[name]) < 1e-12, name


@parametrize("queries, keys", [(50, 50), (25, 50), (50, 25)])  # a square, rectangles
@parametrize("kv_heads", [6, 2, 1])
@parametrize("limit", [2**31 - 1, 5000])  # 5000: room for 3 heads of 2 sequences of 50 tokens
def test_attention_equals_its_definition(limit, kv_heads, queries, keys, monkeypatch):
    """Attention's forward and backward equal the definition, with one group of heads and several.

    No call of a kernel gets a tensor with more than `limit` elements. The rectangles occur in a
    ring, and have no mask. Catches heads that are mixed up, and an index past 2^31.
    """

    def check_sizes(function):
        def run(*args):
            assert max(x.numel() for x in args[:-1]) <= limit
            return function(*args)

        return run

    monkeypatch.setattr(attention, "MAX_ELEMENTS", limit)
    kernel = attention.KERNELS["cpu"]
    kernel = replace(
        kernel, forward=check_sizes(kernel.forward), backward=check_sizes(kernel.backward)
    )

    q, do = torch.randn(2, 2, queries, 6, 16).double()
    k, v = torch.randn(2, 2, keys, kv_heads, 16).double()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = attention.Mask(causal=queries == keys)
    o, lse = naive_forward(*leaves, mask)
    expected = o, lse, *torch.autograd.grad(o, leaves, do)

    for groups, in_place in ((1, False), (kv_heads, False), (6, True)):
        op = attention.Attention("cpu", groups)
        op.kernel, op.mask = kernel, mask
        inputs = [x.clone() for x in (q, k, v)]
        o, lse = op.forward(*inputs)
        grads = op.backward(lambda: (do, []), *inputs, o, lse, in_place)
        lse = lse.transpose(0, 1).flatten(1, 2)  # (G, B, h, T) -> (B, H, T)
        for ours, reference in zip((o, lse, *grads), expected, strict=True):
            assert relative(ours, reference) < 1e-13


@slow
@parametrize("ranks", [1, 2, 4, 8])
def test_equals_one_process(ranks, tmp_path):
    """Each case with this number of ranks trains as Plain does, and so does each line of EXAMPLES.

    Catches a buffer that is stale or mistaken for another one, a sum over the wrong ranks, a
    gradient that is counted twice or halved, and a norm that lacks a rank's share.
    """
    cases = [case for case in CASES + EXAMPLES if case["ranks"] == ranks]
    if ALL_COMBINATIONS:
        cases += random_cases(ranks, 300)
    compare_with_plain(ranks, cases, tmp_path)


@slow
@parametrize("ranks", [1, 2, 4])
def test_equals_one_process_with_wide_sums(ranks, tmp_path):
    """Each case in WIDE_SUMS trains as Plain does.

    Catches a part of a gradient that is lost, stale or counted twice only if sums are wider than
    the model's dtype. Cases in bf16 may pass in spite of this, because of their own noise.
    """
    cases = [make_case(f"{line} kernel=naive") | {"dtype": "fp32"} for line in WIDE_SUMS]
    compare_with_plain(ranks, [case for case in cases if case["ranks"] == ranks], tmp_path)


@pytest.mark.skipif("CHECK" not in os.environ, reason="test_equals_one_process has these cases")
def test_some_equal_one_process(tmp_path):
    """For `make check`: the cases in ALONE that have two ranks train as Plain does.

    Catches a position or a label of another rank, in less time than all cases take.
    """
    compare_with_plain(2, [case for case in ALONE if case["ranks"] == 2], tmp_path)


def test_cases_cover_all_pairs_of_mechanisms():
    """Any two mechanisms meet in a case, or the planner refuses them together.

    Each case is usable, and each value of each key occurs. The resumed runs save and load with each
    mechanism. Catches two mechanisms that no case has together.
    """
    resumes = RESUMES + WHOLE_RESUMES + TIED_RESUMES + FROZEN_RESUMES
    assert all(map(is_usable, CASES + EXAMPLES + resumes))
    assert len(CASES + resumes) <= 175  # so that the tests stay quick
    for key, values in VALUES.items():
        # the block "gated" is no value of its key; tests of GPUs take "cuda" and "naive"
        assert {case[key] for case in CASES} - {"gated"} == set(values) - {"cuda", "naive"}, key

    pairs_in_cases = set().union(*map(mechanism_pairs, CASES))
    for pair in itertools.combinations(MECHANISMS, 2):
        assert (pair in pairs_in_cases) != never_meet(*pair), pair

    # A run keeps its model and optimizer when it resumes. Each other mechanism occurs in a case
    # that saves a checkpoint, and in a case that loads one
    of_the_model = {
        name
        for name in MECHANISMS
        if re.match("block|frozen|kv|bf16|whole|moments|products|tied", name)
    }
    saving, loading = RESUMES[:-1], RESUMES[1:]
    for cases in (saving, loading):
        assert set().union(*map(mechanisms, cases)) == set(MECHANISMS) - of_the_model


@parametrize("line, why", REFUSED)
def test_refused_cases(line, why):
    """The planner refuses mechanisms that never meet, with the right reason.

    Catches a pair that the planner no longer refuses, so that it needs a case.
    """
    assert re.search(why, refusal_reason(make_case(line)))


# ---------------------------------------------------------------------------- refused forks


class ExpertBlock(Block):
    """A layer with an expert, a matrix that only the ranks below `users` use.

    users 3: both ranks use the expert rightly, and they also read its weight outside `project`.
    """

    users = 0

    def __init__(self, cfg: m.ModelConfig):
        super().__init__(cfg)
        self.expert = m.Matrix(cfg.dim, cfg.dim)

    def post(self, x, o, positions):
        if dist.get_rank() < self.users:
            x = x + ops.project(self.expert, ops.IDENTITY, x)
        if self.users > 2:
            x = x + 0 * self.expert.weight.sum()
        return super().post(x, o, positions)


class EmbedsTwice(m.LLaMA):
    """A model that uses its embedding twice."""

    def embed_tokens(self, tokens, positions):
        return super().embed_tokens(tokens, positions) + super().embed_tokens(tokens, positions)


class NeverEmbeds(m.LLaMA):
    """A model whose last rank gives the embedding no gradient."""

    def embed_tokens(self, tokens, positions):
        x = super().embed_tokens(tokens, positions)
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        return x.detach().requires_grad_() if is_last_rank else x


def misuse_matrices(lines: list[str]) -> None:
    """Run steps in which no, some or all ranks misuse a matrix, and print the errors.

    A misuse must make the step not finite, with norm NaN, and leave all states as they were. Runs
    on each rank.
    """
    global Block
    torch.compiler.set_stance("force_eager")
    groups, plain, llama = {}, Block, m.LLaMA
    steps = [  # (users, the model)
        (2, llama),  # right
        (1, llama),  # never used on rank 1
        (0, llama),  # never used
        (2, EmbedsTwice),
        (3, llama),  # used outside project()
    ]
    for line in lines:
        never_embeds = [(2, NeverEmbeds)] if "tied=1" in line else []
        for users, model_class in steps + never_embeds:
            Block, ExpertBlock.users = ExpertBlock, users
            train.LLaMA = model_class
            run, model, states = make_run(make_case(line), groups, SpoilingStream)
            train.load_random_weights(run, states)
            before = values_to_save(states)
            _, norm, finite = train.run_step(model, states, train.load_batch(run, 0), 0.1, 0.0)
            unchanged = torch.equal(before, values_to_save(states))
            misused = users != 2 or model_class is not llama
            outcome = [not finite, bool(norm.isnan()), unchanged]
            assert outcome == 3 * [misused], (line, users, model_class)
            try:
                states.check_uses()
            except train.ConfigError as e:
                print(f"{e}\n", end="", flush=True)
    Block, train.LLaMA = plain, llama


@slow
def test_misused_matrices_end_a_step():
    """A matrix that is used twice, never, or outside `project` ends the run on all ranks.

    So does a tied matrix that is used three times or once. The error names the matrix. Ranks also
    stop if one of them has not launched a collective that the others wait for. Catches lost
    gradients: those of a matrix that is used twice, or of an expert that gets no tokens on some
    rank.
    """
    lines = ["2", "2 g=2 os=2 micro=2", "2 g=2 os=2 layout=inter micro=2", "2 os=2 micro=4"]
    lines += ["2 p=2 g=2 os=2 keep=mixed", "2 p=2 g=2 os=2 open=1", "2 sp=2 os=2 place=both"]
    lines += ["2 tied=1", "2 tied=1 p=2 g=2 os=2 micro=2 open=1"]
    text = on_ranks(2, misuse_matrices, lines)
    errors = Counter(re.findall(r"(?m)^(\S+ was used .*?); ", text))
    never = "blocks.4.expert.weight was used 0 times per pass instead of"
    assert errors == {  # lines x misuses x 2 ranks that print the error
        f"{never} 1": 8 * 2 * 2,
        f"{never} 3": 1 * 2 * 2,  # keep=mixed, whose layers run in 3 token chunks
        "embed.weight was used more than once per pass": 7 * 1 * 2,
        "embed.weight was used more than twice per pass": 2 * 1 * 2,  # tied=1
        "embed.weight was used 1 times per pass instead of 2": 2 * 1 * 2,  # tied=1
        "blocks.4.expert.weight was used outside project()": 9 * 1 * 2,
    }
    # in all lines the expert that rank 1 does not use, and in tied=1 NeverEmbeds
    assert text.count(" (on ranks [1])") == 9 * 2 + 2 * 2


class SparseBlock(Block):
    """A layer with a tensor whose shape depends on data."""

    def post(self, x, o, positions):
        return super().post(x, o, positions) + x[x > 0].sum()


def test_shapes_that_depend_on_data_are_refused():
    """A layer whose shapes depend on data is refused, and the error says what to do instead.

    Catches experts that take only their own tokens. PyTorch's own error would not say why.
    """
    with raises(ValueError, match="so that its shapes are known.* all tokens, masked"):
        offload.trace_block(SMALL, 16, torch.float32, SparseBlock(SMALL))


class DependsOnData(m.Block):
    """A layer that saves more when its tensors hold data than when they are meta tensors."""

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        return y if y.is_meta else torch.tanh(y)


def test_blocks_whose_shapes_depend_on_data_are_refused(monkeypatch, group):
    """A layer that saves more bytes with data than on meta tensors is refused.

    The error has the layer's number and the bytes. Catches a memory plan that counts too little.
    """
    monkeypatch.setattr(m, "Block", DependsOnData)
    model = m.LLaMA(SIZES["gqa"], attention.Attention("cpu"))
    plan = activations_of("swapped", 5, 3)
    offload.ChunkedLayers(model, (2, SEQ), plan, SEQ - 10, torch.device("cpu"), torch.float32)
    with raises(ValueError, match=r"layer 0 saved [\d,]+ bytes, but [\d,]+ .*: the shapes"):
        model(*example(seq=SEQ, vocab=67))


class StoresTensor(m.Block):
    """A layer that stores a tensor in an attribute."""

    def post(self, x, o, positions):
        self.penalty = x.square().mean()
        return super().post(x, o, positions)


class CollectsTensors(m.Block):
    """A layer that stores tensors in a list."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.penalties = []

    def post(self, x, o, positions):
        self.penalties.append(x.square().mean())
        return super().post(x, o, positions)


def test_forks_that_would_train_wrong_are_refused(group):
    """A fork that would train wrong without an error is refused with one.

    These are refused: a weight that two modules share without ModelConfig.tied; a buffer on the
    meta device, which would get no values; a layer that stores a tensor of one chunk in an
    attribute, or in a list; and a layer whose input is not the output of the layer before it,
    because recomputation would take that output. A product that recomputation leaves out can only
    be added to others, so that nobody reads it unnoticed. Catches a fork that uses weights, layers
    or products in one of these ways.
    """
    cpu = torch.device("cpu")

    # weights
    model = m.LLaMA(SMALL)
    model.head.weight = model.embed.weight
    with raises(ValueError, match="head.weight is another module's weight"):
        shard.States(model, cpu, torch.float32)
    model = m.LLaMA(SMALL)
    model.register_buffer("scale", torch.empty(1, device="meta"))
    with raises(ValueError, match="^scale: .* a buffer on the meta device gets no values"):
        shard.States(model, cpu, torch.float32)

    # layers
    model = seeded_model(SIZES["gqa"], attention.Attention("cpu"))
    chunked = functools.partial(
        offload.ChunkedLayers, model, (2, SEQ), activations_of("no-x", 5, 3), SEQ - 10, cpu
    )
    layers = chunked(torch.float64)
    for stores in StoresTensor, CollectsTensors:
        model.blocks[1] = stores(model.cfg)
        with raises(ValueError, match="stores tensors in attributes .*penalt.*would be wrong"):
            chunked(torch.float64)
    # what a fork may do to a layer's input. `x / 2 + 1` frees x, and may get its address
    for change in (lambda x: x + 1, lambda x: x / 2 + 1, lambda x: (x * x).relu()):
        model.layer_runner = lambda *a, change=change: (
            lambda i, x, run=layers.start(*a): run(i, change(x))
        )
        message = "layer 1 does not take the very tensor that layer 0 returned"
        with raises(ValueError, match=message):
            model(*example(seq=SEQ, vocab=67))
    # a fork that runs layer 1 again, after layer 2
    model.layer_runner = lambda *a: (
        lambda i, x, run=layers.start(*a): run(1, run(i, x)) if i == 2 else run(i, x)
    )
    with raises(ValueError, match=message):
        model(*example(seq=SEQ, vocab=67))

    # a product that recomputation leaves out: nothing may read it, or a sum that it is a term of
    with ops.recomputation(model.head):
        product = model.head(torch.zeros(2, model.cfg.dim))
    for y in (product, 1 + product, torch.add(product, other=product)):
        assert y.shape == (2, model.cfg.vocab) and y.unwrap().isnan().all()
        for reads in (
            lambda y: torch.cat([y, y]),
            lambda y: y > 0,
            lambda y: y.add_(1),
            lambda y: y.data,
            lambda y: y.detach(),
        ):
            with raises(ops.ProductIsReadError, match="last product is read by"):
                reads(y)


def test_refused_weights_that_are_not_sharded(group):
    """Weights that belong to PyTorch's own modules are refused, and the error names them.

    Catches a parameter that no rank shards and no optimizer updates.
    """
    with torch.device("meta"):
        model = m.LLaMA(SMALL)
        model.blocks[0].gate = torch.nn.Linear(8, 8)
        model.blocks[1].scale = torch.nn.Parameter(torch.ones(8))
    model.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    names = "blocks.0.gate.weight, blocks.0.gate.bias, blocks.1.scale"
    with raises(ValueError, match=f"^{names}: .* model.Matrix"):
        shard.States(model, torch.device("cpu"), torch.float32)


def test_refused_matrix_that_does_not_say_how_it_is_cut():
    """With tensor parallelism a matrix must say how it is cut, or it is refused.

    A matrix whose `parts` do not fit its rows or its cut is always refused. Catches a fork's matrix
    of which each rank would hold all, or the wrong part.
    """
    with torch.device("meta"):
        model = m.LLaMA(SMALL)
    tensor_parallel = SimpleNamespace(
        tp=2, tp_rank=0, tp_input=None, tp_prologue=None, tp_output=None, select_tp_tokens=None
    )
    for cut in ("", "row"):
        model.blocks[1].router = m.Matrix(8, SMALL.dim, cut)
        with raises(ValueError, match="--tp 2: the matrix 1.router does not say how it is cut"):
            tensor.split_model(model, tensor_parallel)
    for cut, parts in (("columns", (4, 4)), ("rows", (4, 3))):
        with raises(ValueError, match=r'They must add up to 8, and cut="columns" takes none'):
            m.Matrix(8, 8, cut, parts)


def test_pipeline_that_hands_on_another_dtype_is_refused(tmp_path):
    """Layers that return another dtype than the pipeline's messages have are refused.

    Catches activations whose bytes the next stage would read as other numbers.
    """
    code = (
        "layers = m.LLaMA.run_layers; dtypes = torch.float32, torch.bfloat16\n"
        "m.LLaMA.run_layers = lambda *a: layers(*a).to(dtypes[dist.get_rank()])\n"
        "torch.compiler.set_stance('force_eager')"
    )
    text = run(f"--pp 2 --dtype bf16 --out {tmp_path}", 2, code, expect=1)
    assert "return torch.float32, but messages between stages are torch.bfloat16" in text


def test_refused_optimizer(group):
    """An optimizer that needs whole matrices is refused if matrices are split.

    The refusal comes before any memory is allocated. Catches a rank that updates a part of a matrix
    as if it were the whole matrix.
    """
    with raises(ValueError, match="layout=intra p=1 tp=1: .* with layout=inter p=1 tp=1"):
        muon = optim.OPTIMIZERS["muon"]
        shard.States(m.LLaMA(SMALL), torch.device("cpu"), torch.float32, optimizer=muon)


@dataclasses.dataclass(frozen=True)
class ForkedConfig(m.ModelConfig):
    """A model's configuration to which a fork has added a field."""

    span: int = 0


def test_fields_that_would_be_dropped_are_refused(tmp_path, monkeypatch):
    """An export and a resume refuse to drop a field that a fork has added to the configuration.

    An export also refuses a weight that Hugging Face's files have no name for. Catches a field or a
    weight that is dropped without an error.
    """
    tiny = {f.name: getattr(m.MODELS["tiny"], f.name) for f in dataclasses.fields(m.ModelConfig)}
    for module in (hf, train):
        monkeypatch.setattr(module, "ModelConfig", ForkedConfig)
    for span, error in ((0, ""), (64, "llama's config.json has no key for span=64;")):
        monkeypatch.setitem(m.MODELS, "tiny", ForkedConfig(**tiny, span=span))
        with raises(ValueError, match=error) if error else contextlib.nullcontext():
            main(f"--steps 0 --out {tmp_path}/{span} --export {tmp_path}/hf-{span}")
    dist.destroy_process_group()
    with raises(ValueError, match=r"another model: span 0 \(here 64\)"):
        main(f"--resume --out {tmp_path}/0")
    dist.destroy_process_group()
    monkeypatch.setattr(m, "Block", ForkBlock)
    with raises(ValueError, match="blocks.0.last_norm.weight: Hugging Face's files have no"):
        main(f"--model 160m --out {tmp_path}/c --export {tmp_path}/d")


# ---------------------------------------------------------------------------- forks that work


@slow
def test_fork_optimizer(tmp_path):
    """examples/muon.py trains on two ranks that share the matrices.

    Catches an example whose lines do not run, and a plan that splits matrices although the
    optimizer needs whole ones.
    """
    flags = f"--out {tmp_path}/o --optimizer muon --warmup 1"
    text = run(f"{flags} --p 2", 2, expect=1)
    assert "needs whole matrices: --os-layout inter --p 1" in text
    assert " inter; " in run(f"{flags} --os 2", 2)
    first, *_, last = losses(tmp_path / "o")
    assert last[1] < first[1]


class Gates(m.Block):
    """A layer that saves several views of one tensor."""

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        gate = torch.sigmoid(y[..., :2])
        return y * gate[..., :1].expand_as(y) + x * gate[..., 1:].expand_as(x)


class Complex(m.Block):
    """A layer that saves x as another dtype."""

    def post(self, x, o, positions):
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return super().post(x, o, positions) + torch.view_as_real(z * z).flatten(-2)


class Transposed(m.Block):
    """A layer whose output is not contiguous, and which saves a square matrix and its transpose."""

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        square = torch.tanh(y[..., :16]).unflatten(-1, (4, 4))
        y = y + (square @ square.transpose(-1, -2)).sum((-1, -2))[..., None]
        return y.transpose(-1, -2).contiguous().transpose(-1, -2)


class PassesOn(m.Block):
    """A layer without an MLP: x gets the output's gradient unchanged."""

    def post(self, x, o, positions):
        return x + self.out(o.flatten(2))


class Forgets(m.Block):
    """A layer whose post does not use its input x."""

    def post(self, x, o, positions):
        return self.out(o.flatten(2))


class Squashes(m.Block):
    """A layer that saves the same tensor q that attention gets."""

    def pre(self, x, positions):
        q, k, v = super().pre(x, positions)
        return torch.tanh(q), k, v


class Nested(m.Block):
    """A layer with two matrices of the same name and size."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.a, self.b = (torch.nn.ModuleDict({"proj": m.Matrix(cfg.dim, cfg.dim)}) for _ in "ab")

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        return y + self.b["proj"](torch.tanh(self.a["proj"](y)))


class Compares(m.Block):
    """A layer that compares its last product with a number. Autograd records no such read."""

    def post(self, x, o, positions):
        h = x + self.project(self.out, ops.IDENTITY, o.flatten(2))
        gate_up = self.project(self.gate_up, self.norm, h, self.norm2.weight)
        product = self.project(self.down, ops.SWIGLU, gate_up)
        is_large = product.detach().abs().mean(-1, keepdim=True) > 0.1
        return torch.where(is_large, 0.5 * h, h) + product


class ComparesSum(m.Block):
    """A layer that compares a sum, a term of which is its last product, with a number."""

    def post(self, x, o, positions):
        h = x + self.project(self.out, ops.IDENTITY, o.flatten(2))
        gate_up = self.project(self.gate_up, self.norm, h, self.norm2.weight)
        total = h + self.project(self.down, ops.SWIGLU, gate_up)
        is_large = total.detach().abs().mean(-1, keepdim=True) > 0.8
        return torch.where(is_large, 0.5 * h, h) + total


class EndsInNorm(m.Block):
    """A layer whose last product has a norm before it, whose backward also needs 1 / rms."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.last = m.Matrix(cfg.dim, cfg.dim)
        self.last_norm = m.Vector(cfg.dim, "norm")

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        return y + ops.project(self.last, self.norm, y, self.last_norm.weight)


@parametrize(
    "block",
    [
        *(Gates, Complex, Transposed, PassesOn, Forgets),
        *(Squashes, Nested, Compares, ComparesSum, EndsInNorm),
    ],
)
def test_blocks_that_save_unusual_tensors(block, monkeypatch, group):
    """Layers that save views, other dtypes, transposed or no tensors have autograd's gradients.

    They run with two groups of heads: in three token chunks for each row of KEEPS, and in one chunk
    that is kept. Catches a fork's layer whose saved tensors are stored in the wrong place.
    """
    monkeypatch.setattr(m, "Block", block)
    use_stream_class(SpoilingStream)

    def gradients(keep: str, chunks: int = 3) -> dict[str, torch.Tensor]:
        model = seeded_model(SIZES["gqa"], attention.Attention("cpu", 2))
        plan = activations_of(keep, 5, chunks)
        if plan:
            chunk = SEQ - 10 if chunks > 1 else 2 * SEQ  # tokens
            device = torch.device("cpu")
            offload.ChunkedLayers(model, (2, SEQ), plan, chunk, device, torch.float64)
        model(*example(seq=SEQ, vocab=67)).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients("all")
    in_chunks = [(keep, 3) for keep in KEEPS if KEEPS[keep]]
    for keep, chunks in [("kept", 1), *in_chunks]:
        grads = gradients(keep, chunks)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert relative(grad, expected[name]) < 1e-12, (keep, name)


# ---------------------------------------------------------------------------- a resume
# Each step of one run is another case, and resumes from the checkpoint of the case before it.
# RESUMES are such a run's cases for AdamW, WHOLE_RESUMES for Muon, which needs whole matrices,
# TIED_RESUMES for a tied model, whose matrix one stage or two stages save and load, and
# FROZEN_RESUMES for a model with frozen weights, which are saved as they are.

RESUMES = [
    make_case(line)
    for line in """
1 keep=kept
2 p=2 g=2 os=2 open=1
2 os=2 layout=inter groups=2 keep=mixed
2 sp=2 g=2 os=2 keep=swapped place=both
2 tp=2 mode=mtp keep=x
2 tp=2 mode=mtp keep=swapped
2 tp=2 mode=fsp micro=2
2 pp=2 micro=2
2 pp=2 parts=2 micro=2 docs=1
4 p=2 g=4 os=4
4 p=4 g=4 os=4 layout=inter
4 tp=2 sp=2 os=2
4 pp=2 tp=2 mode=mtp micro=2 place=host
4 tp=4 micro=2
4 sp=4 ring=4 p=2 g=2 os=2 keep=no-x
4 pp=2 os=2 layout=inter place=host micro=4 keep=no-o
4 pp=4 micro=4
4 os=2 layout=inter
2 p=2 g=2 os=2 place=host keep=kept
2 micro=4 keep=again docs=1
1 place=host keep=neither
4 p=2 g=2 os=4 place=both micro=2
8 p=2 g=2 os=8 sp=8 ring=2
8 pp=2 tp=2 os=2 micro=2
1 micro=2
""".strip().splitlines()
]
WHOLE_RESUMES = [
    make_case(line)
    for line in """
1 layout=inter micro=2
2 layout=inter g=2 os=2 place=host
4 layout=inter os=4 keep=mixed
2 layout=inter pp=2
1 layout=inter keep=swapped
""".strip().splitlines()
]
FROZEN_RESUMES = [
    make_case(line)
    for line in """
1 frozen=some keep=swapped
2 frozen=some p=2 g=2 os=2
2 frozen=some tp=2 mode=mtp
2 frozen=some pp=2 micro=2
4 frozen=some p=2 g=4 os=4 layout=inter place=host
1 frozen=some
""".strip().splitlines()
]
TIED_RESUMES = [
    make_case(line)
    for line in """
1 tied=1 moments=bf16 products=fp8
2 tied=1 moments=bf16 products=fp8 pp=2 micro=2
2 tied=1 moments=bf16 products=fp8 p=2 g=2 os=2 place=host
4 tied=1 moments=bf16 products=fp8 pp=2 os=2 layout=inter
4 tied=1 moments=bf16 products=fp8 tp=2 os=2
4 tied=1 moments=bf16 products=fp8 pp=4 parts=1 micro=4 place=host
4 tied=1 moments=bf16 products=fp8 p=2 g=4 os=4
4 tied=1 moments=bf16 products=fp8 pp=2 tp=2 mode=mtp
""".strip().splitlines()
]


@slow
@parametrize(
    "block, optimizer, steps",
    [
        ("norms", "adamw", RESUMES),
        ("fork", "muon", WHOLE_RESUMES),
        ("plain", "adamw", TIED_RESUMES),
        ("norms", "adamw", FROZEN_RESUMES),
    ],
    ids=["adamw", "muon", "tied", "frozen"],
)
def test_resumed_under_other_cases(block, optimizer, steps, tmp_path):
    """A run whose steps each resume from another case's checkpoint trains as Plain does.

    Catches a state that is read from or written to the wrong rows, columns or rank.
    """
    documents = tuple(case["docs"] for case in steps)
    same_in_all = {"block": block, "optimizer": optimizer}  # the lines above leave these out
    options = {key: steps[0][key] for key in ("frozen", "moments", "tied")}
    if steps[0]["products"] == "fp8":
        options["numbers"] = tuple(map(product_numbers, steps))
    reference = reference_steps("gqa", block, optimizer, documents, **options)
    first_step = 0
    for ranks, group_of_steps in itertools.groupby(steps, lambda case: case["ranks"]):
        cases = [case | same_in_all for case in group_of_steps]
        torch.save([reference] * len(cases), tmp_path / "references")
        on_ranks(ranks, check_cases, cases, tmp_path, first_step)
        first_step += len(cases)
