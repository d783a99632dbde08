"""Prove that a fork trains right: every mechanism gives the losses of plain PyTorch.

    pytest test_all.py     all of this file
    make check             after an edit: all tests that need neither many ranks nor many seconds
    make test              everything, with what lies in tests/ and a fork does not touch

The file holds a second LLaMA (`Plain`), which is written with torch.nn and its autograd and runs in
one process. A *case* is one line of CASES that says how the project runs the same model:

    4 sp=2 groups=4 p=2 g=4 os=4 keep=swapped             # keys stay for the next group, too

    4              on 4 ranks, which are 4 processes of this machine
    sp=2           2 ranks share each sequence (Ulysses), so that 2 groups of ranks share the batch
    groups=4       attention runs 4 groups of heads one after the other
    p=2 g=4 os=4   parameters in 2 shards, gradients in 4, optimizer states in 4
    keep=swapped   layers run in chunks of tokens: the first 3 of 5 layers are swapped to the host
                   and come back for backward, the last 2 keep x and o and recompute the rest
    # ...          why the case is there
    the rest       has its default, the first value of its row in VALUES

Such a case trains four steps: with gradient clipping, with an evaluation in between, and with one
step whose loss or gradients are not finite and which must change nothing. Its losses, gradient
norms and updated weights are compared with Plain's, in float64 up to 1e-10. Reused buffers are
filled with NaN, so a value that is read too late is wrong and not merely old; so are messages that
have left. Streams and messages are late now and then, each round at other places: a case that fails
prints the seed of its delays, and `DELAY_SEED=... pytest ...` repeats them.

Read from top to bottom: the plain model, one case, how ranks are started, all cases, what is
refused, what a fork may do (examples/), and a run that is resumed under other cases. If you change
model.Block, write the change a second time in PlainLayer and run the file. If you add a mechanism,
give it a key in VALUES, a line in `mechanisms`, and cases; test_cases_are_all_that_may_be says
which pairs of mechanisms no case has yet.
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
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # ranks are as many as cores, and threads wait by spinning

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
import examples.alibi  # noqa: F401  (it adds a row to attention.KERNELS)
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
from examples.block import ForkBlock
from examples.muon import FLAG, muon
from ranks import Groups, use_more_queues

ROOT = Path(__file__).parent  # the project's folder
ALL_COMBINATIONS = bool(os.environ.get("ALL_COMBINATIONS"))  # make test-all: many more cases
RUN_SECONDS = 10800 if ALL_COMBINATIONS else 1200  # of train.py, or of a worker of many cases
# of what the harness delays: the time, so that rounds differ; set it to repeat a round. Processes
# that this one starts inherit it
DELAY_SEED = os.environ.setdefault("DELAY_SEED", str(int(time.time())))
parametrize = pytest.mark.parametrize
slow = pytest.mark.skipif("CHECK" in os.environ, reason="make check")  # processes, or seconds
GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
QUICK = "--device cpu --seq 32 --batch 6 --steps 6 --eval-every -1"  # of a tiny model
SMALL = replace(
    m.MODELS["tiny"], dim=48, layers=2, heads=6, kv_heads=2, head_dim=8, ffn=80, vocab=101
)

# ---------------------------------------------------------------------------- the plain model
# Plain is LLaMA as torch.nn and its autograd compute it, in float64 and in one process. A fork of
# model.Block is written here a second time, in PlainLayer. Everything else is compared with Plain.

SEQ = 48  # tokens a sequence
BATCH = 8  # sequences a step
CLIPS = (0.3, 0.0, 0.3, 0.3)  # of each step's gradients, whose norm is larger; 0: not clipped
SKIPPED = 2  # the step in which one rank's loss or gradient is not finite: nothing changes
END = 5  # the token that ends a document, if a case has them
IGNORED = 3  # the token that is no label
# how far losses, norms and updates may be off. Plain itself in bf16, its float64 weights rounded
# before each step, is up to 0.002, 0.023 and 0.25 off, of all sizes and blocks but the deep one
NOISE = {"fp64": (1e-10, 1e-10, 1e-10), "bf16": (0.004, 0.08, 0.4)}
Block = m.Block
SIZES = {  # vocab, C, layers, heads, key/value heads, F, head dim
    "gqa": m.ModelConfig(67, 24, 5, 8, 4, 40, 8),
    "mha": m.ModelConfig(67, 24, 5, 8, 8, 40, 8),
    "mqa": m.ModelConfig(67, 24, 5, 8, 1, 40, 8),
    "deep": m.ModelConfig(67, 24, 17, 8, 4, 40, 8),
    "wide": m.ModelConfig(67, 256, 5, 16, 8, 256, 64),  # for the kernels of GPUs
}


class PlainLayer(torch.nn.Module):
    """A layer of LLaMA by PyTorch's modules, with model.py's names."""

    def __init__(self, cfg: m.ModelConfig, block: str):
        super().__init__()
        nn, c, d, f = torch.nn, cfg.dim, cfg.head_dim, cfg.ffn
        self.block = block
        self.heads = [cfg.heads, cfg.kv_heads, cfg.kv_heads]
        self.norm1, self.norm2 = nn.RMSNorm(c, cfg.norm_eps), nn.RMSNorm(c, cfg.norm_eps)
        self.qkv = nn.Linear(c, sum(self.heads) * d, bias=block in ("norms", "fork"))
        self.out = nn.Linear(cfg.heads * d, c, bias=False)
        self.gate_up = nn.Linear(c, 2 * f, bias=False)
        self.down = nn.Linear(f, c, bias=False)
        if self.qkv.bias is not None:
            self.q_norm, self.k_norm = nn.RMSNorm(d, cfg.norm_eps), nn.RMSNorm(d, cfg.norm_eps)
        if block == "fork":
            self.last_norm = nn.RMSNorm(c, cfg.norm_eps)
        if block in ("fork", "gated"):
            self.gate = nn.Linear(c, 3, bias=False)

    def forward(self, x, turn, mask):
        def rotate(t):  # (B, heads, T, D), the pairs (i, i + D/2) as complex numbers
            t = torch.complex(*t.double().chunk(2, -1)) * turn
            return torch.cat((t.real, t.imag), -1).to(x.dtype)

        heads = self.qkv(self.norm1(x)).unflatten(-1, (sum(self.heads), -1))
        q, k, v = heads.transpose(1, 2).split(self.heads, 1)
        if self.qkv.bias is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        o = F.scaled_dot_product_attention(rotate(q), rotate(k), v, mask, enable_gqa=True)
        if self.block == "gated":
            o = o * torch.sigmoid(self.gate(x)).sum(-1)[:, None, :, None]
        h = x + self.out(o.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(h)).chunk(2, -1)
        y = h + self.down(F.silu(gate) * up)
        if self.block != "fork":
            return y
        gate = torch.sigmoid(self.gate(x)).sum(-1, keepdim=True)
        return torch.tanh(self.last_norm(y)) * gate + x


class Plain(torch.nn.Module):
    """LLaMA, whose weights follow from their names; a batch's loss is the mean over its labels."""

    def __init__(self, cfg: m.ModelConfig, block: str, kernel: str):
        super().__init__()
        self.cfg = cfg
        self.kernel = kernel
        self.embed = torch.nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = torch.nn.ModuleList(PlainLayer(cfg, block) for _ in range(cfg.layers))
        self.norm = torch.nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.head = torch.nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.double()
        for name, p in self.named_parameters():
            rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(p.shape, generator=rng, dtype=torch.float64)
            p.data = 1 + 0.1 * drawn if p.dim() == 1 else drawn / p.shape[1] ** 0.5

    def logits(self, tokens, documents: bool):
        count = torch.arange(tokens.shape[1]).expand(tokens.shape)
        first = torch.zeros_like(tokens, dtype=torch.bool)  # of a document
        if documents:
            first[:, 1:] = tokens[:, :-1] == END
        of = first.cumsum(1)
        mask = (of[:, :, None] == of[:, None]).tril()[:, None]  # (B, 1, T, T)
        if self.kernel == "alibi":
            bias = 0.5 ** (1 + torch.arange(self.cfg.heads).double())  # 8 heads
            bias = bias[:, None, None] * (count[0] - count[0][:, None])
            mask = torch.where(mask, bias, -torch.inf)  # (B, H, T, T)
        positions = count - torch.where(first, count, 0).cummax(1).values
        exponent = torch.arange(0, self.cfg.head_dim, 2).double() / self.cfg.head_dim
        angle = positions[:, None, :, None] * self.cfg.rope_theta**-exponent  # (B, 1, T, D/2)
        turn = torch.polar(torch.ones_like(angle), angle)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, turn, mask)
        return self.head(self.norm(x))

    def forward(self, batch: np.ndarray, documents: bool = False):
        tokens, labels = torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
        ignored = (labels == IGNORED) | (tokens == END) & bool(documents)
        labels = labels.masked_fill(ignored, -100)
        return F.cross_entropy(self.logits(tokens, documents).flatten(0, 1), labels.flatten())

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by model.py's names: it holds biases as vectors of their own."""
        return {
            name.replace("qkv.bias", "qkv_bias.weight"): p.detach().clone()
            for name, p in self.named_parameters()
        }


def naive_forward(q, k, v, mask):
    """Attention as it is defined: a fork's kernel is two functions and a row."""
    if mask.documents is not None:
        parts = [
            naive_forward(*(t[None, cut] for t in (q, k, v)), attention.CAUSAL)
            for cut in mask.documents.slices()
        ]
        o, lse = zip(*parts)
        return torch.cat(o, 1)[0], torch.cat(lse, 2)[0]
    scores, _, v = naive_scores(q, k, v, mask)
    lse = scores.logsumexp(-1)  # (B, H, T)
    return torch.einsum("bhts,bshd->bthd", (scores - lse[..., None]).exp(), v), lse


def naive_scores(q, k, v, mask):
    """Return scores (B, H, T, S), and k, v with the heads of q."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    if mask.causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores, k, v


def naive_backward(do, q, k, v, o, lse, mask):
    if mask.documents is not None:
        parts = [
            naive_backward(
                *(t[None, cut] for t in (do, q, k, v, o)), lse[None, :, cut], attention.CAUSAL
            )
            for cut in mask.documents.slices()
        ]
        return [torch.cat(grads, 1)[0] for grads in zip(*parts)]
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():  # o and lse are a whole ring's, and constants here
        scores, _, v = naive_scores(*inputs, mask)
        p = (scores - lse[..., None]).exp()
        given = (do * o).sum(-1).transpose(1, 2)[..., None]
        dp = torch.einsum("bthd,bshd->bhts", do, v)
        grads = torch.autograd.grad((p * (dp - given)).sum(), inputs)
    return [grad.contiguous() for grad in grads]


attention.KERNELS["naive"] = attention.Kernel(
    naive_forward, naive_backward, (), documents=True, plain=True
)


def learning_rate(step: int) -> float:
    return 1e-2 / (step + 1)


@functools.cache
def windows(i: int) -> np.ndarray:
    """Return sample i (SEQ + 1,): in some end documents, also with the first or last token, or
    twice in a row; ids follow from each other, so that there is something to learn."""
    rng = np.random.default_rng(i)
    ids = (7 * np.arange(SEQ + 1) + rng.integers(3, size=SEQ + 1) + i) % 61 + 6
    ids[rng.random(SEQ + 1) < 0.1] = END
    ids[rng.random(SEQ + 1) < 0.1] = IGNORED
    if i % BATCH == 1:
        ids[[0, 7, 8, SEQ - 1]] = END
    return ids if i % BATCH else np.where(ids == END, END + 1, ids)


@functools.cache
def answer(
    model: str, block: str, optimizer: str, documents: tuple[int, ...], kernel: str = "cpu"
) -> tuple:
    """Return the first weights, the (loss, norm) of each step, and the last weights. documents: of
    each step, whether it has them."""
    plain = Plain(SIZES[model], block, kernel)
    before = plain.weights()
    vectors, matrices = (
        [p for p in plain.parameters() if (p.dim() > 1) == big] for big in (False, True)
    )
    adamw = torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    states = {p: (p.data, torch.zeros_like(p)) for p in matrices if optimizer == "muon"}
    found = []
    for step, inside in enumerate(documents):
        batch = np.stack([windows(step * BATCH + i) for i in range(BATCH)])
        adamw.zero_grad()
        loss = plain(batch, inside)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIPS[step % 4] or math.inf)
        assert norm > CLIPS[step % 4]
        found.append((loss.item(), norm.item()))
        if step == SKIPPED:
            continue
        scalars = optim.make_scalars(torch.device("cpu"), torch.float64)
        scalars.lr.fill_(learning_rate(step))
        for p, (master, momentum) in states.items():
            named = {"master": master, "momentum": momentum}
            muon(optim.Update("", 0, p.data, p.grad, named, weight_decay=0.1, **scalars._asdict()))
            p.grad = None  # AdamW leaves it
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step)
        adamw.step()
    return before, found, plain.weights()


def answer_of(case: dict) -> tuple:
    """Return what a case's steps shall be."""
    documents = 4 * (case["docs"],)
    return answer(case["model"], case["block"], case["optimizer"], documents, case["kernel"])


# ---------------------------------------------------------------------------- one case
# A case is a model, what it is split by and what its layers keep. Its losses, gradient norms and
# weights are those of Plain. Cases reach the project through `make_run`.

# What layers keep of their skeletal activations for backward. None: layers run whole and keep all.
# Else they run in chunks of tokens: resident layers (the last ones, which keep x and o on the GPU),
# the share of the resident layers' chunks that is kept, the share of the other layers' chunks that
# is swapped, how many layers drop o, and one layer in how many keeps x.
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
    "model": ("gqa", "mha", "mqa", "deep"),  # a row of SIZES
    "block": ("plain", "norms", "fork"),  # norms: Qwen's biases and norms; fork: examples/block.py
    "docs": (0, 1),  # 1: attention stays inside documents
    "micro": (1, 2, 4),  # micro-batches of a step
    "sp": (1, 2, 4, 8),  # ranks that share a sequence
    "ring": (1, 2, 4),  # of these, how many stand around a ring
    "groups": (1, 2, 4, 8),  # groups of heads, one after the other
    "tp": (1, 2, 4),  # ranks that share matrices (tensor parallelism)
    "mode": ("msp", "mtp", "fsp"),  # of tensor parallelism
    "pp": (1, 2, 4),  # pipeline stages
    "parts": (1, 2),  # virtual stages of each stage
    "p": (1, 2, 4),  # shards of parameters
    "g": (1, 2, 4, 8),  # shards of gradients
    "os": (1, 2, 4, 8),  # shards of optimizer states
    "layout": ("intra", "inter"),  # of optimizer states: each split evenly, or whole matrices
    "place": ("gpu", "host"),  # where optimizer states lie
    "open": (0, 1),  # 1: nothing overlaps
    "keep": tuple(KEEPS),
    "chunks": (3, 1),  # of tokens, in a layer
    "optimizer": ("adamw", "muon"),  # of matrices; muon: examples/muon.py
    "dtype": ("fp64", "bf16"),
    "device": ("cpu", "cuda"),
    "kernel": ("cpu", "naive", "alibi"),  # naive: above; alibi: examples/alibi.py
}
DEFAULTS = {key: values[0] for key, values in VALUES.items()}


def make_case(line: str) -> dict:
    """'2 sp=2  # why' -> the case of 2 ranks, with defaults."""
    ranks, *words = line.partition("#")[0].split()
    case = {"ranks": ranks} | dict(word.split("=") for word in words)
    assert case.keys() <= DEFAULTS.keys(), line
    return DEFAULTS | {key: type(DEFAULTS[key])(value) for key, value in case.items()}


def activations_of(keep: str, layers: int, chunks: int) -> offload.ActivationPlan | None:
    """Return what so many layers of so many chunks keep; None: they run whole."""
    if KEEPS[keep] is None:
        return None
    resident, kept, swapped, dropped, stride = KEEPS[keep]
    resident = min(layers, resident)
    resident += (layers - resident) % stride
    return offload.ActivationPlan(
        layers,
        chunks,
        resident,
        round(kept * resident * chunks),
        round(swapped * (layers - resident) * chunks),
        min(dropped, layers),
        stride,
    )


def plan_of(case: dict) -> costs.Plan:
    is_ = SimpleNamespace(**case)
    norms = is_.block == "norms"
    model = replace(SIZES[is_.model], qkv_bias=norms, qk_norm=norms)
    micro_batch = BATCH * is_.sp * is_.tp * is_.pp // is_.ranks // is_.micro
    tokens = micro_batch * SEQ // is_.sp
    chunk = min(tokens, tokens // is_.chunks + 1)  # the last one is shorter
    return costs.Plan(
        model,
        planner.DTYPES[is_.dtype],
        is_.ranks,
        per_node=is_.ranks,
        seq=SEQ,
        sp=is_.sp,
        ring=is_.ring,
        batch=BATCH,
        micro_batch=micro_batch,
        head_groups=is_.groups,
        recompute="none" if is_.keep == "all" else "auto",
        chunk=chunk if KEEPS[is_.keep] else tokens,
        factors=shard.Factors(is_.p, is_.g, is_.os),
        os_layout=is_.layout,
        os_place=is_.place,
        optimizer=is_.optimizer,
        activations=activations_of(is_.keep, -(-model.layers // (is_.pp * is_.parts)), is_.chunks),
        tp=is_.tp,
        tp_mode=is_.mode,
        pp=is_.pp,
        pp_chunks=is_.parts,
    )


def groups_of(plan: costs.Plan, made: dict) -> Groups:
    key = plan.tp, plan.pp
    if key not in made:
        made[key] = Groups(tp=plan.tp, pp=plan.pp)
    return made[key]


def let_streams_be(kind: type) -> None:
    for module in (offload, optim, shard, train):
        module.CommStream = kind


class GatedBlock(Block):
    """A gate a token of attention's output, of which a column has some heads."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate = m.Matrix(3, cfg.dim, cut="whole")

    def post(self, x, o, positions):
        gate = torch.sigmoid(self.gate(x)).sum(-1)[..., None, None]
        return super().post(x, o * gate, positions)


def make_run(case: dict, groups: dict, stream: type) -> tuple:
    """Build a case with train.py: its run, model and states on this rank, with streams of a kind.
    groups: made by cases before. This, plan_of and refusal are all that the harness knows of the
    project."""
    plan = plan_of(case)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # as GPUs that do not reach each other's memory, where ranks share one
    if case["device"] == "cuda" and torch.cuda.device_count() < ranks:
        plan = replace(plan, per_node=1)
    cfg = train.Config(
        document_token=END if case["docs"] else -1,
        overlap="none" if case["open"] else train.Config.overlap,
    )
    run = train.Run(
        cfg,
        rank,
        (
            torch.device("cuda", torch.cuda.current_device())
            if case["device"] == "cuda"
            else torch.device("cpu")
        ),
        case["kernel"],
        plan,
        training=SimpleNamespace(sample=windows),
        ignored_id=IGNORED,
    )
    m.Block = {"fork": ForkBlock, "gated": GatedBlock}.get(case["block"], Block)
    there = groups_of(plan, groups)
    let_streams_be(stream)
    built, states = train.build_model(run, train.make_attention(run, there), there)
    return run, built, states


def equal(
    case: dict, groups: dict, answers: tuple, folder: Path | None = None, only: int = -1
) -> None:
    """Assert, on all ranks alike, that a case's steps are the answers. only: the one step that it
    runs, whose states come from the last checkpoint in the folder, and go there."""
    run, model, states = make_run(case, groups, Spoiled)
    before, wanted, after = answers
    loss_noise, norm_noise, update_noise = NOISE[case["dtype"]]
    last = dist.get_rank() == dist.get_world_size() - 1
    wrong = []
    if only <= 0:
        states.load(before.get)
    else:
        checkpoint.load_checkpoint(states, checkpoint.find_checkpoint(folder, "latest"))
    for i in range(4) if only < 0 else [only]:
        batch = train.load_batch(run, i * BATCH)
        if i == 0 and run.plan.pp > 1:
            model.warm_up(next(batch.micro_batches()))
        if i == SKIPPED:
            loss = evaluation(run, model, batch)  # of weights that were just updated
            wrong += near(loss, wanted[i][0], loss_noise, "evaluation")
        if i == SKIPPED and last:  # not even the loss is finite; or it is, but no gradient
            factor = math.nan if case["micro"] > 1 else 1e305
            batch = replace(batch, scale=batch.scale * factor)
        if i % 2 and run.device.type == "cuda":
            torch.cuda._sleep(3 * 10**8)  # all else could begin at once
        loss, norm, finite = train.run_step(model, states, batch, learning_rate(i), CLIPS[i % 4])
        if i == SKIPPED:
            wrong += ["a step that is not finite counts"] * bool(finite)
        else:
            wrong += near(loss, wanted[i][0], loss_noise, f"step {i}, loss")
            wrong += near(norm, wanted[i][1], norm_noise, f"step {i}, norm")
    if (case["dtype"], case["layout"], case["g"]) == ("bf16", "intra", run.plan.state_ranks):
        wrong += [  # sums of several are no numbers of bf16, if they need not travel to other ranks
            f"gradients of {param.name} were rounded"
            for param in states.sharded_params.values()
            if case["micro"] > 1
            and param.replicas is None
            and param.grad_shard.any()  # no padding alone
            and torch.equal(param.grad_shard.bfloat16(), param.grad_shard)
        ]
    if only < 0 or only == len(wanted) - 1:
        found = {name: states.full_param(name).cpu() for name in after}
        for name, (update, wanted_update) in updates(before, found, after, case["dtype"]).items():
            error = relative(update, wanted_update)
            wrong += [f"update of {name}: {error:.3g}"] * (not error < update_noise)
    if only >= 0:
        save(states, folder, only + 1)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    assert not any(every), next(filter(None, every))


def updates(before: dict, found: dict, after: dict, dtype: str) -> dict:
    """Return what was added to each weight, found and wanted. In bf16 vectors count together: of
    so few elements Adam's first steps, of one size, turn with any noise."""
    pairs = {name: (found[name] - w, after[name] - w) for name, w in before.items()}
    if dtype == "fp64":
        return pairs
    vectors = [pairs.pop(name) for name, w in before.items() if w.dim() == 1]
    return pairs | {"vectors": [torch.cat(both) for both in zip(*vectors)]}


def near(found: torch.Tensor, wanted: float, noise: float, what: str) -> list[str]:
    """Return what is wrong, also of a NaN."""
    same = abs(found.item() / wanted - 1) < noise
    return [] if same else [f"{what}: {found.item()}, not {wanted}"]


def evaluation(run: train.Run, model, batch: train.Batch) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for tokens, labels, scale, *where in batch.micro_batches():
        with torch.no_grad():
            total += (model(tokens, labels, None, *where, per_token=True) * scale).sum()
    dist.all_reduce(total)
    return total


def saved_by(states: shard.States) -> torch.Tensor:
    """Return a copy of all that this rank would save."""
    return torch.cat([part.values.flatten() for part in states.state_parts().values()])


def save(states: shard.States, folder: Path, step: int) -> None:
    saver = checkpoint.Saver(folder, 2, states)
    about = {"seq": 1, "batch": 1, "decay_steps": 0}
    saver.begin(
        {"step": step, "samples": 0, "config": about, "model": {"max_positions": 1}, "source": {}}
    )
    saver.finish()


class Spoiled(streams.CommStream):
    """A CommStream that spoils what was used, and now and then starts late, or lets compute be
    late: by more than two layers take. Delays are other ones in each round (DELAY_SEED)."""

    random = random.Random(DELAY_SEED)  # of a rank, from `seed_delays` on

    def done_reading(self, *buffers):
        for x in buffers:
            nan = torch.full_like(
                x,
                torch.nan if x.is_floating_point() else 77,
                device=self.stream.device if self.stream else None,
            )
            x.copy_(nan, non_blocking=True)

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
        chance = self.random.random()
        if self.stream is not None and chance < 0.1:
            torch.cuda._sleep(10**8)  # the current stream
        if self.stream is None and chance < 0.02:
            time.sleep(0.003)  # messages come in another order


class Message:
    """What pipeline.Link launches, late now and then. Of ranks that share a GPU it goes by way of
    the host: gloo has no messages of its memory."""

    launch = pipeline.Link.launch

    def __init__(self, link, way, x):
        if Spoiled.random.random() < 0.02:
            time.sleep(0.003)
        self.sends = way is dist.isend
        self.x = self.sent = x
        if x.is_cuda and torch.cuda.device_count() < dist.get_world_size():
            self.sent = x.cpu() if self.sends else torch.empty_like(x, device="cpu")
        self.work = Message.launch(link, way, self.sent)

    def wait(self):
        """Let compute wait. A message that was received is there; one that was sent has left, and
        is spoiled, because its memory may belong to others now."""
        self.wait_for_work()
        if self.sends:
            self.x.fill_(math.nan)
        elif self.sent is not self.x:
            self.x.copy_(self.sent)

    def wait_for_work(self):
        self.work.wait()


def seed_delays(what: str) -> None:
    """Let this rank's delays from here on follow from DELAY_SEED and from what runs, so that a case
    has the same delays by itself as among others."""
    Spoiled.random.seed(f"{DELAY_SEED}, rank {dist.get_rank()}, {what}")


def make_small() -> None:
    """Let what is tiny here have several parts."""
    torch.use_deterministic_algorithms(True)  # with fill_uninitialized_memory
    optim.PIECE_ELEMENTS, ops.LOSS_ELEMENTS = 300, 67 * 7
    seed_delays("")
    pipeline.Link.launch = lambda *message: Message(*message)


def check_cases(cases: list[dict], folder: Path, first: int = -1) -> None:
    """Runs on each rank: all cases, in which reused buffers are spoiled, and fresh ones begin as
    NaN, against the answers in the folder. first: they are the steps of one run, from this on."""
    make_small()
    groups, wrong = {}, []
    for i, (case, wanted) in enumerate(zip(cases, torch.load(folder / "answers"))):
        # in float64 what is computed counts, in bf16 how a kernel rounds
        stance = "force_eager" if case["dtype"] == "fp64" else "default"
        what = {key: value for key, value in case.items() if value != DEFAULTS[key]}
        seed_delays(str(what))
        try:
            with torch.compiler.set_stance(stance):
                equal(case, groups, wanted, folder, -1 if first < 0 else first + i)
        except AssertionError as e:
            wrong.append(f"{what}: {e}")
    assert not wrong, (
        f"{len(wrong)} of {len(cases)} cases are wrong; DELAY_SEED={DELAY_SEED} repeats their "
        "delays\n" + "\n".join(wrong)
    )


# ---------------------------------------------------------------------------- processes
# All cases of a number of ranks run in one start of processes.


@pytest.fixture
def group():
    """A process group of this process alone, as train.py makes it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def clean_up():
    """train.main in this process: undo what it leaves, also when it refuses."""
    handlers = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    yield
    for s, handler in handlers:
        signal.signal(s, handler)
    let_streams_be(streams.CommStream)
    if dist.is_initialized():
        dist.destroy_process_group()


def main(flags: str) -> None:
    """Be train.py, with a short run's flags and these."""
    train.main(f"{QUICK} {flags}".split())


def start(target: Callable, ranks: int, file: Path, *args, method="forkserver") -> list:
    """Start target(rank, file, *args) on so many ranks, in processes that are forked from one that
    has imported this file. What they print goes to the file."""
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["test_all", "matplotlib.pyplot", "torch._dynamo"])
    file.touch()
    processes = [context.Process(target=target, args=(r, file, *args)) for r in range(ranks)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list, file: Path, expect: int = 0) -> str:
    """Return what ranks have printed when all have ended, with this status."""
    deadline = time.time() + RUN_SECONDS
    for process in processes:
        process.join(max(0, deadline - time.time()))
        process.kill()
        process.join()
    text = file.read_text()
    assert {process.exitcode for process in processes} == {expect}, text[-5000:]
    return text


def print_to(file: Path) -> None:
    for stream in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)


def on_ranks(ranks: int, worker: Callable, *args, gpus: int = 0) -> str:
    """Run worker(*args) on so many ranks, and return what they print. gpus: that they have."""
    method = "spawn" if gpus else "forkserver"
    if gpus:
        use_more_queues()  # as train.py; the processes inherit it before their CUDA starts
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "said"
        rest = ranks, get_free_port(), gpus, worker, args
        return finish(start(be_rank, ranks, file, *rest, method=method), file)


def be_rank(
    rank: int, file: Path, ranks: int, port: int, gpus: int, worker: Callable, args: tuple
) -> None:
    """Be one of on_ranks' ranks."""
    print_to(file)
    if gpus:
        torch.cuda.set_device(rank % gpus)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    backend = "gloo" if gpus < ranks else "cpu:gloo,cuda:nccl"
    if 0 < gpus < ranks:  # they share one, over gloo
        dist._coalescing_manager = lambda *args, **options: contextlib.nullcontext()  # NCCL's
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=100)
    )
    worker(*args)
    print(f"rank {rank} is done", flush=True)
    os._exit(0)  # without NCCL's farewells


def compare(ranks: int, cases: list[dict], folder: Path, gpus: int = 0) -> None:
    torch.save([answer_of(case) for case in cases], folder / "answers")
    text = on_ranks(ranks, check_cases, cases, folder, gpus=gpus)
    assert text.count("is done") == ranks


def start_train(flags: str, ranks: int, file: Path, code: str = "") -> list:
    """Start train.py as torchrun does, which adds nothing but seconds of imports."""
    return start(train_rank, max(1, ranks), file, ranks, get_free_port(), flags, code)


def train_rank(rank: int, file: Path, ranks: int, port: int, flags: str, code: str) -> None:
    print_to(file)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if ranks:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    exec(code, globals())
    main(flags)


def run(flags: str, ranks: int = 0, code: str = "", expect: int = 0) -> str:
    """Return what train.py prints on so many ranks; `code` is run before it starts. expect: the
    exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "said"
        return finish(start_train(flags, ranks, file, code), file, expect)


def log(out) -> list[dict]:
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return [
        json.loads(line, parse_constant=refuse)
        for line in (Path(out) / "log.jsonl").read_text().splitlines()
    ]


def losses(out) -> list:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in log(out) if "loss" in r]


def relative(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def seeded(*args) -> m.LLaMA:
    """Return a model in float64, with the weights of seed 0."""
    model = m.LLaMA(*args).double()
    model.init_weights(0)
    return model


def example(batch=2, seq=40, vocab=101, seed=1):
    rng = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(vocab, (batch, seq), generator=rng) for _ in range(2))
    labels[0, 3:17] = m.IGNORE
    return tokens, labels


# ---------------------------------------------------------------------------- all cases


def mechanisms(case: dict) -> set[str]:
    """Return what a case has that plain training has not."""
    is_ = SimpleNamespace(**case)
    found = {
        "heads": is_.sp > is_.ring,
        "ring": is_.ring > 1,
        "long ring": is_.ring > 2,
        "groups": is_.groups > 1,
        f"tp {is_.mode}": is_.tp > 1,
        "stages": is_.pp > 1,
        "parts": is_.parts > 1,
        "p>1": is_.p > 1,
        "g>p": is_.g > is_.p,
        "os>g": is_.os > is_.g,
        "replicas": is_.ranks // (is_.tp * is_.pp) > is_.os,
        "inter": is_.layout == "inter",
        "host": is_.place == "host",
        "in the open": is_.open,
        "micro-batches": is_.micro > 1,
        f"chunks {is_.keep}": KEEPS[is_.keep] is not None,
        "documents": is_.docs,
        f"block {is_.block}": is_.block != "plain",
        f"kv {is_.model}": is_.model in ("mha", "mqa"),
        "bf16": is_.dtype == "bf16",
        "whole matrices": is_.optimizer == "muon",
    }
    return {name for name, there in found.items() if there}


MECHANISMS = sorted(
    "heads,ring,long ring,groups,tp msp,tp mtp,tp fsp,stages,parts,p>1,g>p,os>g,replicas,inter,"
    "host,in the open,micro-batches,chunks x,chunks kept,chunks again,chunks swapped,chunks mixed,"
    "chunks no-o,chunks no-x,chunks neither,documents,block norms,block fork,kv mha,kv mqa,bf16,"
    "whole matrices".split(",")
)


def pairs(case: dict) -> set[tuple[str, str]]:
    return set(itertools.combinations(sorted(mechanisms(case)), 2))


# Two mechanisms that never meet, by how their names begin -> a case that has both, and a regular
# expression of the reason for which it is refused.
NEVER_MEET = {
    ("documents", "ring"): ("2 docs=1 sp=2 ring=2", "--ring 2: .*inside documents"),
    ("documents", "long ring"): ("4 docs=1 sp=4 ring=4", "--ring 4: .*inside documents"),
    ("chunks", "tp fsp"): ("2 tp=2 mode=fsp keep=mixed", "--tp-mode fsp: .*layers run whole"),
    ("chunks", "tp msp"): ("2 tp=2 mode=msp keep=again", "--tp-mode msp: .*layers run whole"),
    ("g>p", "os>g"): ("4 p=1 g=2 os=4", "g must be p or os"),
    ("kv mqa", "tp"): ("2 model=mqa tp=2", "--tp 2: tensor parallelism must divide"),
    ("heads", "kv mqa"): ("2 model=mqa sp=2", "share 1 key/value heads"),
    ("p>1", "whole matrices"): ("2 layout=inter p=2 g=2 os=2 optimizer=muon", "--p 1"),
    ("tp", "whole matrices"): (
        "2 layout=inter tp=2 optimizer=muon",
        "--optimizer muon needs .*inter --p 1 --tp 1. Nearest legal choices: none, unless other",
    ),
}
REFUSED = [row for row in NEVER_MEET.values() if row] + [
    (
        "1 groups=3",
        "--head-groups 3: groups must have equally many of a rank's 8 query heads and of its 4",
    ),
    ("2 sp=2 ring=2 kernel=alibi", "--ring 2: --attention alibi, which may see heads.* --ring 1"),
]


def never_meet(a: str, b: str) -> bool:
    """Return whether no case has both, in the order of the alphabet."""
    excluded = any(a.startswith(x) and b.startswith(y) for x, y in NEVER_MEET)
    return excluded or a.split()[0] == b.split()[0]


def refusal(case: dict) -> str | None:
    """Return why the planner refuses a case."""
    is_ = SimpleNamespace(**case)
    if BATCH * is_.tp * is_.pp * is_.sp % (is_.ranks * is_.micro):
        return "no such micro-batch"
    plan = plan_of(case)
    same = (
        "seq batch micro_batch sp ring tp tp_mode pp pp_chunks head_groups os_layout os_place "
        "optimizer recompute chunk"
    )
    constraints = planner.Constraints(
        **{name: getattr(plan, name) for name in same.split()},
        **dataclasses.asdict(plan.factors),
        dtype=is_.dtype,
        document_token=END if is_.docs else -1,
        attention=is_.kernel,
    )
    try:
        planner.shapes(constraints, plan.model, planner.Hardware(is_.ranks, is_.ranks, None))
    except ValueError as e:
        return str(e)
    return None


def fits(case: dict) -> bool:
    """Return whether a case may be run, and does what its keys say."""
    if case["dtype"] == "bf16" and case["model"] == "deep":
        return False  # too far from float64
    if case["parts"] > 1 == case["pp"] or case["chunks"] == 1 and KEEPS[case["keep"]] is None:
        return False  # a key that is not heard
    if refusal(case) is not None or any(never_meet(*pair) for pair in pairs(case)):
        return False
    kept = plan_of(case).activations
    return kept is None or kept.resident < kept.layers or KEEPS[case["keep"]][0] >= 9  # some leave


def random_cases(ranks: int, count: int) -> list[dict]:
    """Return so many of all legal combinations, which are more than ten thousand."""
    rng = random.Random(ranks)
    drawn = (
        {
            key: rng.choice(
                [
                    n
                    for n in values
                    if key == "micro" or not isinstance(n, int) or n <= max(ranks, 4)
                ]
            )
            for key, values in VALUES.items()
        }
        | {"ranks": ranks, "device": "cpu", "kernel": "cpu"}
        for _ in itertools.count()
    )
    return list(itertools.islice(filter(fits, drawn), count))


ALONE = [
    make_case(line)
    for line in """
1                                                     # each mechanism alone, or almost
1 micro=4 block=norms
1 docs=1 keep=mixed block=fork
1 place=host micro=2
1 dtype=bf16 micro=2 block=norms
1 keep=swapped chunks=1 groups=2                      # one chunk: the whole layer leaves
1 keep=kept chunks=1 groups=2
1 model=mqa groups=4 keep=mixed kernel=alibi          # heads share a key's, and know their numbers
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
1 groups=8 kernel=alibi                               # of one head each
2 sp=2 ring=2 model=mqa
2 tp=2 mode=mtp
2 tp=2 mode=msp
2 tp=2 mode=fsp
2 pp=2 micro=4
2 pp=2 parts=2 micro=2
2 keep=x docs=1
2 keep=x sp=2 g=2 os=2 micro=4 place=host dtype=bf16
2 keep=x p=2 g=2 os=2
2 keep=swapped g=2 os=2
2 keep=neither model=deep block=norms
2 keep=kept block=fork
2 dtype=bf16 sp=2 os=2 g=2 keep=swapped block=norms
2 os=2 layout=inter optimizer=muon micro=2            # an optimizer of whole matrices
2 pp=2 micro=4 keep=swapped model=deep                # several in flight, each with host buffers
2 tp=2 mode=mtp keep=swapped docs=1
2 tp=2 mode=mtp keep=mixed block=norms micro=2
""".strip().splitlines()
]
PICKED = [
    make_case(line)
    for line in """
2 pp=2 parts=2 micro=4 keep=mixed model=deep          # a stage's parts have other layers to swap
4 os=4 layout=inter optimizer=muon place=host
4 pp=4 parts=2 micro=4 model=deep                     # more parts than layers divide into
4 pp=2 parts=2 micro=2 keep=neither model=deep os=2
4 p=2 g=2 os=2 micro=2                                # two replicas of all
4 p=1 g=2 os=2 layout=inter micro=2                   # the kept half joins the last sum once
4 tp=2 sp=2 g=2 os=2 micro=2
4 tp=2 sp=2 groups=2 kernel=alibi
4 sp=2 groups=4 p=2 g=4 os=4 keep=swapped             # keys stay for the next group, too
4 tp=2 mode=fsp p=2 g=2 os=2
4 tp=2 docs=1
4 tp=4 mode=mtp                                       # a rank has one key/value head
2 tp=2 mode=mtp keep=kept block=fork                  # split matrices in token chunks
2 tp=2 mode=mtp keep=mixed block=gated                # whole weights meet split ones
2 tp=2 mode=mtp keep=again groups=2
2 tp=2 mode=mtp keep=no-x
2 tp=2 mode=mtp keep=neither model=deep
4 tp=2 mode=mtp sp=2 keep=no-o
4 tp=2 mode=mtp p=2 g=2 os=2 keep=mixed block=norms
4 sp=4 ring=4 model=mqa                               # keys that go on more than once
4 sp=4 ring=4 keep=swapped g=4 os=4
4 p=4 g=4 os=4 keep=again
8 sp=8 ring=4 p=2 g=8 os=8
8 sp=8 model=mha g=4 os=4
""".strip().splitlines()
]
COVER = [
    make_case(line)
    for line in """
1 model=mqa docs=1 layout=inter keep=swapped
1 model=mha groups=2 layout=inter place=host open=1 keep=swapped
1 model=mqa block=norms docs=1 layout=inter keep=neither optimizer=muon
2 model=mha block=norms docs=1 groups=2 p=2 g=2 os=2 layout=inter place=host open=1 keep=neither \
  dtype=bf16
2 model=mqa block=fork pp=2 layout=inter place=host open=1 keep=kept optimizer=muon
2 model=mha block=fork micro=2 groups=4 pp=2 parts=2 layout=inter open=1 keep=x
2 block=fork docs=1 layout=inter place=host open=1 keep=swapped optimizer=muon dtype=bf16
2 model=mha block=norms docs=1 sp=2 groups=4 os=2 layout=inter open=1 keep=no-o optimizer=muon
2 block=norms docs=1 groups=2 pp=2 layout=inter place=host open=1 keep=again dtype=bf16
2 model=mqa block=norms sp=2 ring=2 g=2 os=2 layout=inter place=host open=1 keep=no-x dtype=bf16
2 model=mqa block=norms docs=1 p=2 g=2 os=2 place=host open=1 keep=mixed dtype=bf16
2 model=mha block=fork sp=2 ring=2 groups=2 os=2 layout=inter place=host keep=no-x chunks=1 \
  optimizer=muon
2 model=mha docs=1 groups=4 tp=2 mode=fsp layout=inter open=1 dtype=bf16
2 model=mqa block=norms micro=2 pp=2 parts=2 layout=inter keep=again optimizer=muon
2 block=fork docs=1 micro=2 groups=2 g=2 os=2 layout=inter keep=no-o optimizer=muon dtype=bf16
2 model=mha block=norms sp=2 groups=4 layout=inter place=host keep=mixed dtype=bf16
2 model=mha block=fork micro=2 pp=2 parts=2 place=host keep=kept dtype=bf16
2 model=mha block=fork layout=inter place=host open=1 keep=again optimizer=muon
2 model=mha block=fork docs=1 sp=2 groups=2 p=2 g=2 os=2 layout=inter place=host keep=kept
2 model=mqa block=norms micro=2 sp=2 ring=2 os=2 layout=inter open=1 keep=x optimizer=muon
2 model=mqa block=norms p=2 g=2 os=2 place=host open=1 keep=no-o
2 groups=2 os=2 layout=inter keep=mixed optimizer=muon dtype=bf16
2 model=deep block=norms docs=1 micro=2 groups=2 pp=2 parts=2 layout=inter keep=no-x
2 model=mha block=fork docs=1 groups=2 tp=2 dtype=bf16
2 model=mha block=fork micro=2 groups=2 tp=2 mode=mtp layout=inter place=host open=1 dtype=bf16
2 block=norms sp=2 ring=2 groups=2 os=2 place=host keep=kept
4 groups=4 p=2 g=2 os=4 layout=inter place=host keep=swapped dtype=bf16
4 block=fork sp=4 ring=4 p=2 g=4 os=4 keep=mixed
4 block=fork sp=2 tp=2 mode=fsp g=2 os=2 place=host open=1
4 model=mha sp=4 ring=4 p=2 g=2 os=2 layout=inter place=host keep=no-x
4 model=mha sp=2 groups=2 pp=2 os=2 place=host open=1 keep=again
4 block=norms micro=2 groups=2 tp=2 pp=2 parts=2 layout=inter open=1
4 model=mha micro=2 tp=2 mode=mtp pp=2 parts=2 keep=x
4 model=deep micro=2 sp=2 pp=2 parts=2 layout=inter place=host keep=no-o
4 model=mha sp=2 ring=2 tp=2 p=2 g=2 os=2 place=host
4 block=fork docs=1 sp=2 tp=2 mode=mtp g=2 os=2 layout=inter place=host
4 block=fork micro=2 sp=4 ring=4 p=2 g=4 os=4 layout=inter keep=kept
4 block=norms sp=2 groups=2 layout=inter place=host open=1 keep=no-x
4 model=mha block=fork sp=2 groups=4 layout=inter place=host open=1 keep=neither
4 block=norms docs=1 tp=2 mode=fsp os=2 layout=inter
4 model=mha groups=2 tp=2 mode=mtp os=2 dtype=bf16
4 model=mha block=fork docs=1 tp=2 os=2 layout=inter open=1
4 sp=4 ring=4 p=2 g=4 os=4 layout=inter place=host keep=neither
4 model=deep block=fork micro=2 pp=2 parts=2 p=2 g=2 os=2 keep=swapped
8 model=mha micro=2 sp=4 ring=4 groups=4 pp=2 parts=2 p=2 g=4 os=4 layout=inter open=1 keep=again
8 model=mqa sp=4 ring=4 os=2 layout=inter place=host open=1 keep=no-o optimizer=muon dtype=bf16
8 block=norms micro=2 tp=2 mode=fsp pp=2 parts=2
8 model=mha block=norms sp=4 ring=4 groups=4 tp=2 mode=fsp p=2 g=4 os=4 layout=inter open=1
8 block=norms sp=4 ring=4 groups=2 tp=2 mode=mtp layout=inter keep=x
8 block=fork sp=4 ring=4 tp=2 layout=inter open=1
""".strip().splitlines()
]
CASES = ALONE + PICKED + COVER


@parametrize("size, block", [("gqa", "plain"), ("mqa", "norms"), ("mha", "fork")])
def test_model_equals_plain_pytorch(size, block, monkeypatch):
    """The model by itself, under PyTorch's autograd, has Plain's logits, its loss although that is
    computed in parts, and its gradients. Catches a wrong gradient in a hand-written backward, and a
    label that is lost."""
    norms = block == "norms"
    monkeypatch.setattr(m, "Block", ForkBlock if block == "fork" else Block)
    monkeypatch.setattr(ops, "LOSS_ELEMENTS", 67 * 7)
    cfg = replace(SIZES[size], qkv_bias=norms, qk_norm=norms)
    model, plain = m.LLaMA(cfg).double(), Plain(cfg, block, "cpu")
    model.load_state_dict(plain.weights())
    batch = np.stack([windows(i) for i in range(3)])
    tokens, labels = torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
    assert relative(model(tokens), plain.logits(tokens, False)) < 1e-13
    (3 * model(tokens, labels.masked_fill(labels == IGNORED, m.IGNORE))).backward()
    (3 * plain(batch)).backward()
    grads = {
        name.replace("qkv.bias", "qkv_bias.weight"): p.grad for name, p in plain.named_parameters()
    }
    for name, p in model.named_parameters():
        assert relative(p.grad, grads[name]) < 1e-12, name


@parametrize("queries, keys", [(50, 50), (25, 50), (50, 25)])  # a square, rectangles
@parametrize("kv_heads", [6, 2, 1])
@parametrize("limit", [2**31 - 1, 5000])  # three heads of two times 50 tokens
def test_attention_equals_its_definition(limit, kv_heads, queries, keys, monkeypatch):
    """Attention's forward and backward equal the definition, whole and in groups of heads, none of
    which has more elements than a kernel counts; the rectangles of a ring have no mask. Catches
    heads that are mixed up, and an index past 2^31."""

    def counted(function):
        def run(*args):
            assert max(x.numel() for x in args[:-1]) <= limit
            return function(*args)

        return run

    monkeypatch.setattr(attention, "MAX_ELEMENTS", limit)
    kernel = attention.KERNELS["cpu"]
    kernel = replace(kernel, forward=counted(kernel.forward), backward=counted(kernel.backward))
    q, do = torch.randn(2, 2, queries, 6, 16).double()
    k, v = torch.randn(2, 2, keys, kv_heads, 16).double()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = attention.Mask(causal=queries == keys)
    o, lse = naive_forward(*leaves, mask)
    wanted = o, lse, *torch.autograd.grad(o, leaves, do)
    for groups, in_place in ((1, False), (kv_heads, False), (6, True)):
        op = attention.Attention("cpu", groups)
        op.kernel, op.mask = kernel, mask
        inputs = [x.clone() for x in (q, k, v)]
        o, lse = op.forward(*inputs)
        grads = op.backward(lambda: (do, []), *inputs, o, lse, in_place)
        lse = lse.transpose(0, 1).flatten(1, 2)  # (G, B, h, T) -> (B, H, T)
        for ours, want in zip((o, lse, *grads), wanted, strict=True):
            assert relative(ours, want) < 1e-13


@slow
@parametrize("ranks", [1, 2, 4, 8])
def test_equals_one_process(ranks, tmp_path):
    """All cases of a number of ranks equal Plain. Catches a buffer that is stale or swapped for
    another, a sum over the wrong ranks, a gradient that is counted twice or halved, and a norm that
    lacks a rank's share."""
    cases = [case for case in CASES if case["ranks"] == ranks]
    if ALL_COMBINATIONS:
        cases += random_cases(ranks, 300)
    compare(ranks, cases, tmp_path)


@pytest.mark.skipif("CHECK" not in os.environ, reason="test_equals_one_process has them")
def test_some_equal_one_process(tmp_path):
    """The cases of two ranks that differ from plain training in one thing equal Plain, for `make
    check`. Catches a position or a label of another rank, in less time than all cases take."""
    compare(2, [case for case in ALONE if case["ranks"] == 2], tmp_path)


def test_cases_are_all_that_may_be():
    """Each case is legal, each value of each key occurs, each two mechanisms meet in a case or are
    refused together, and a run with any of them is saved and goes on from any other. Catches two
    mechanisms that no case has together."""
    assert all(map(fits, CASES + RESUMES + WHOLE_RESUMES))
    assert len(CASES + RESUMES + WHOLE_RESUMES) <= 150
    for key, values in VALUES.items():
        assert {case[key] for case in CASES} - {"gated"} == set(values) - {"cuda", "naive"}, key
    met = set().union(*map(pairs, CASES))
    for pair in itertools.combinations(MECHANISMS, 2):
        assert (pair in met) != never_meet(*pair), pair
    of_models = {name for name in MECHANISMS if re.match("block|kv|bf16|whole", name)}
    for some in (RESUMES[:-1], RESUMES[1:]):
        assert set().union(*map(mechanisms, some)) == set(MECHANISMS) - of_models


@parametrize("line, why", REFUSED)
def test_refused_cases(line, why):
    """Mechanisms that never meet are refused together, with a reason. Catches a pair that is
    refused unsaid, or is no longer refused and has no case."""
    assert re.search(why, refusal(make_case(line)))


# ---------------------------------------------------------------------------- refused forks


class ExpertBlock(Block):
    """A layer with an expert, which has tokens on ranks below `users`; first, as it is defined."""

    users = 0

    def __init__(self, cfg: m.ModelConfig):
        m.nn.Module.__init__(self)
        self.expert = m.Matrix(cfg.dim, cfg.dim)
        expert = self.expert
        super().__init__(cfg)
        self.expert = expert

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


def misuse_matrices(lines: list[str]) -> None:
    """Runs on each rank: steps in which a matrix is used twice, or never, by all or by one."""
    global Block
    torch.compiler.set_stance("force_eager")
    groups, plain, llama = {}, Block, m.LLaMA
    for line in lines:
        for users, twice in ((2, False), (1, False), (0, False), (2, True), (3, False)):
            Block, ExpertBlock.users = ExpertBlock, users
            train.LLaMA = EmbedsTwice if twice else llama
            run, model, states = make_run(make_case(line), groups, Spoiled)
            train.load_random_weights(run, states)
            before = saved_by(states)
            _, norm, finite = train.run_step(model, states, train.load_batch(run, 0), 0.1, 0.0)
            same = torch.equal(before, saved_by(states))
            wrong = users != 2 or twice
            assert [not finite, bool(norm.isnan()), same] == 3 * [wrong], (line, users, twice)
            try:
                states.check_uses()
            except train.ConfigError as e:
                print(f"{e}\n", end="", flush=True)
    Block, train.LLaMA = plain, llama


def test_misused_matrices_end_a_step():
    """A matrix that is used twice, never, or outside `project` ends the step on all ranks alike, by
    its name, also on a rank that has not launched what the other ranks wait for. Catches gradients
    that are lost: of a matrix that is used twice, or of an expert that has no tokens on some
    rank."""
    lines = ["2", "2 g=2 os=2 micro=2", "2 g=2 os=2 layout=inter micro=2", "2 os=2 micro=4"]
    lines += ["2 p=2 g=2 os=2 keep=mixed", "2 p=2 g=2 os=2 open=1", "2 sp=2 os=2 place=host"]
    text = on_ranks(2, misuse_matrices, lines)
    told = Counter(re.findall(r"(?m)^(\S+ was used .*?); ", text))
    never = "blocks.4.expert.weight was used 0 times per pass instead of"
    assert told == {
        f"{never} 1": 24,
        f"{never} 3": 4,
        "embed.weight was used more than once per pass": 14,
        "blocks.4.expert.weight was used outside project()": 14,
    }
    assert text.count(" (on ranks [1])") == 14


class SparseBlock(Block):
    """A layer whose shapes depend on data."""

    def post(self, x, o, positions):
        return super().post(x, o, positions) + x[x > 0].sum()


def test_shapes_that_depend_on_data_are_refused():
    """A layer whose shapes depend on data is refused by a sentence of this project. Catches experts
    that take only their own tokens, which PyTorch would refuse in words of its own."""
    with raises(ValueError, match="so that its shapes are known.* all tokens, masked"):
        offload.trace_block(SMALL, 16, torch.float32, SparseBlock(SMALL))


class DependsOnData(m.Block):
    """Saves more of tensors that hold data."""

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        return y if y.is_meta else torch.tanh(y)


def test_blocks_whose_shapes_depend_on_data_are_refused(monkeypatch, group):
    """A layer that saves more with data than on meta tensors is refused, with its number and the
    bytes. Catches a memory plan that counts too little."""
    monkeypatch.setattr(m, "Block", DependsOnData)
    model = m.LLaMA(SIZES["gqa"], attention.Attention("cpu"))
    plan = activations_of("swapped", 5, 3)
    offload.ChunkedLayers(model, (2, SEQ), plan, SEQ - 10, torch.device("cpu"), torch.float32)
    with raises(ValueError, match=r"layer 0 saved [\d,]+ bytes, but [\d,]+ .*: the shapes"):
        model(*example(seq=SEQ, vocab=67))


class Holds(m.Block):
    def post(self, x, o, positions):
        self.penalty = x.square().mean()
        return super().post(x, o, positions)


def test_forks_that_would_train_wrong_are_refused(group):
    """Refused are weights that do not train, are tied or are buffers; a layer that takes something
    else than what the layer before it has made, because recomputation makes that again; and a layer
    that holds for other layers what one chunk has made. A product that recomputation leaves out is
    NaN for whoever reads it. Catches weights, layers and products that a fork uses in a way that
    would train wrong."""
    cpu = torch.device("cpu")
    model = m.LLaMA(SMALL)
    model.embed.weight.requires_grad_(False)
    with raises(
        ValueError, match="^embed.weight: these would not train.* if it requires a gradient"
    ):
        shard.States(model, cpu, torch.float32)
    model = m.LLaMA(SMALL)
    model.head.weight = model.embed.weight
    with raises(ValueError, match="head.weight is another module's weight"):
        shard.States(model, cpu, torch.float32)
    model = m.LLaMA(SMALL)
    model.register_buffer("scale", torch.empty(1, device="meta"))
    with raises(ValueError, match="^scale: .* a buffer on the meta device gets no values"):
        shard.States(model, cpu, torch.float32)
    model = seeded(SIZES["gqa"], attention.Attention("cpu"))
    chunked = functools.partial(
        offload.ChunkedLayers, model, (2, SEQ), activations_of("no-x", 5, 3), SEQ - 10, cpu
    )
    layers = chunked(torch.float64)
    model.blocks[1] = Holds(model.cfg)
    with raises(ValueError, match="stores tensors in attributes .*penalty.*would be wrong"):
        chunked(torch.float64)
    model.layer_runner = lambda *a: lambda i, x, run=layers.start(*a): run(i, x + 1)
    with raises(ValueError, match="layer 1 does not take the very tensor that layer 0 returned"):
        model(*example(seq=SEQ, vocab=67))
    with ops.recomputation(model.head):
        assert model.head(torch.zeros(2, model.cfg.dim)).isnan().all()


def test_refused_weights_that_are_not_sharded(group):
    """Weights of PyTorch's own modules are refused by their names. Catches a parameter that no rank
    shards and no optimizer updates."""
    with torch.device("meta"):
        model = m.LLaMA(SMALL)
        model.blocks[0].gate = torch.nn.Linear(8, 8)
        model.blocks[1].scale = torch.nn.Parameter(torch.ones(8))
    model.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    names = "blocks.0.gate.weight, blocks.0.gate.bias, blocks.1.scale"
    with raises(ValueError, match=f"^{names}: .* model.Matrix"):
        shard.States(model, torch.device("cpu"), torch.float32)


def test_refused_matrix_that_does_not_say_how_it_is_cut():
    """Under tensor parallelism a matrix has to say how it is cut. Catches a fork's matrix of which
    each rank would hold all, or the wrong part."""
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
        with raises(ValueError, match=r'parts are of rows, .* belong to cut="rows"'):
            m.Matrix(8, 8, cut, parts)


def test_pipeline_that_hands_on_another_dtype_is_refused(tmp_path):
    """Layers that hand on another dtype than the pipeline's messages have are refused. Catches
    activations that the next stage would read as other numbers."""
    code = (
        "layers = m.LLaMA.run_layers; dtypes = torch.float32, torch.bfloat16\n"
        "m.LLaMA.run_layers = lambda *a: layers(*a).to(dtypes[dist.get_rank()])\n"
        "torch.compiler.set_stance('force_eager')"
    )
    said = run(f"--pp 2 --dtype bf16 --out {tmp_path}", 2, code, expect=1)
    assert "return torch.float32, but messages between stages are torch.bfloat16" in said


def test_refused_optimizer(group):
    """An optimizer of whole matrices is refused where matrices are split, before any memory is
    taken. Catches a rank that updates a part of a matrix as if it were all of it."""
    with raises(ValueError, match="layout=intra p=1 tp=1: .* with layout=inter p=1 tp=1"):
        muon = optim.OPTIMIZERS["muon"]
        shard.States(m.LLaMA(SMALL), torch.device("cpu"), torch.float32, optimizer=muon)


@dataclasses.dataclass(frozen=True)
class ForkedConfig(m.ModelConfig):
    span: int = 0


def test_fields_that_would_be_dropped_are_refused(tmp_path, monkeypatch):
    """A fork has given the model another field: an export and a resume refuse to forget it. Catches
    a fork's field that is dropped without a word."""
    tiny = {f.name: getattr(m.MODELS["tiny"], f.name) for f in dataclasses.fields(m.ModelConfig)}
    for module in (hf, train):
        monkeypatch.setattr(module, "ModelConfig", ForkedConfig)
    for span, says in ((0, ""), (64, "llama's config.json has no key for span=64;")):
        monkeypatch.setitem(m.MODELS, "tiny", ForkedConfig(**tiny, span=span))
        with raises(ValueError, match=says) if says else contextlib.nullcontext():
            main(f"--steps 0 --out {tmp_path}/{span} --export {tmp_path}/hf-{span}")
    dist.destroy_process_group()
    with raises(ValueError, match=r"another model: span 0 \(here 64\)"):
        main(f"--resume --out {tmp_path}/0")
    dist.destroy_process_group()
    monkeypatch.setattr(m, "Block", ForkBlock)
    with raises(ValueError, match="blocks.0.last_norm.weight: Hugging Face's files have no"):
        main(f"--model 160m --out {tmp_path}/c --export {tmp_path}/d")


# ---------------------------------------------------------------------------- what a fork may do


@slow
def test_fork_optimizer(tmp_path):
    """examples/muon.py trains on two ranks that share the matrices, with its flag in train.py.
    Catches an example whose lines do not run, and a plan that splits matrices that it wants
    whole."""
    place = "    steps: int = flag("
    source = (ROOT / "train.py").read_text().replace(place, f"    {FLAG}\n{place}")
    (tmp_path / "fork.py").write_text(source)
    code = f"exec(Path({str(tmp_path / 'fork.py')!r}).read_text(), vars(train))"
    flags = f"--out {tmp_path}/o --optimizer muon"
    said = run(f"{flags} --p 2", 2, code, expect=1)
    assert "needs whole matrices: --os-layout inter --p 1" in said
    assert " inter, " in run(f"{flags} --os 2", 2, code)
    first, *_, last = losses(tmp_path / "o")
    assert last[1] < first[1]


class Gates(m.Block):
    """Saves several views of one tensor."""

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        gate = torch.sigmoid(y[..., :2])
        return y * gate[..., :1].expand_as(y) + x * gate[..., 1:].expand_as(x)


class Complex(m.Block):
    """Saves x as another dtype."""

    def post(self, x, o, positions):
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return super().post(x, o, positions) + torch.view_as_real(z * z).flatten(-2)


class Transposed(m.Block):
    """Returns what is not contiguous, and saves a square and its transpose."""

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        square = torch.tanh(y[..., :16]).unflatten(-1, (4, 4))
        y = y + (square @ square.transpose(-1, -2)).sum((-1, -2))[..., None]
        return y.transpose(-1, -2).contiguous().transpose(-1, -2)


class PassesOn(m.Block):
    """Hands its gradient on as it is, and its output does not end in SwiGLU's product."""

    def post(self, x, o, positions):
        return x + self.out(o.flatten(2))


class Forgets(m.Block):
    """Does not use its input."""

    def post(self, x, o, positions):
        return self.out(o.flatten(2))


class Squashes(m.Block):
    """Saves the very q that attention gets."""

    def pre(self, x, positions):
        q, k, v = super().pre(x, positions)
        return torch.tanh(q), k, v


class Nested(m.Block):
    """Has matrices of one name and size."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.a, self.b = (torch.nn.ModuleDict({"proj": m.Matrix(cfg.dim, cfg.dim)}) for _ in "ab")

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        return y + self.b["proj"](torch.tanh(self.a["proj"](y)))


class EndsInNorm(m.Block):
    """Its last product is of a norm, whose backward wants 1 / rms, too."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.last = m.Matrix(cfg.dim, cfg.dim)
        self.last_norm = m.Vector(cfg.dim, "norm")

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        return y + ops.project(self.last, self.norm, y, self.last_norm.weight)


@parametrize("block", [Gates, Complex, Transposed, PassesOn, Forgets, Squashes, Nested, EndsInNorm])
def test_blocks_that_save_what_nobody_guessed(block, monkeypatch, group):
    """Layers that save views, other dtypes, transposed or no tensors have the gradients of plain
    autograd, in chunks, in one chunk, and by groups of heads. Catches a fork's layer whose saved
    tensors are put in the wrong place."""
    monkeypatch.setattr(m, "Block", block)
    let_streams_be(Spoiled)

    def gradients(keep: str, chunks: int = 3) -> dict[str, torch.Tensor]:
        model = seeded(SIZES["gqa"], attention.Attention("cpu", 2))
        plan = activations_of(keep, 5, chunks)
        if plan:
            offload.ChunkedLayers(
                model,
                (2, SEQ),
                plan,
                SEQ - 10 if chunks > 1 else 2 * SEQ,
                torch.device("cpu"),
                torch.float64,
            )
        model(*example(seq=SEQ, vocab=67)).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradients("all")
    for keep, chunks in [("kept", 1), *((k, 3) for k in KEEPS if KEEPS[k])]:
        found = gradients(keep, chunks)
        assert found.keys() == wanted.keys()
        for name, grad in found.items():
            assert relative(grad, wanted[name]) < 1e-12, (keep, name)


# ---------------------------------------------------------------------------- a resume
# One run, each of whose steps goes on from the checkpoint of another case.

RESUMES = [
    make_case(line)
    for line in """
1 keep=kept
2 p=2 g=2 os=2 open=1
2 os=2 layout=inter groups=2 keep=mixed
2 sp=2 g=2 os=2 keep=swapped place=host
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
4 p=2 g=2 os=4 place=host micro=2
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


@slow
@parametrize("block, optimizer", [("norms", "adamw"), ("fork", "muon")])
def test_resumed_under_others(block, optimizer, tmp_path):
    """One run, each of whose steps goes on from the checkpoint of another case, equals Plain.
    Catches a state that is read from or written into the wrong place, of rows, of columns or of
    another rank."""
    lines = RESUMES if optimizer == "adamw" else WHOLE_RESUMES
    answers = answer("gqa", block, optimizer, tuple(case["docs"] for case in lines))
    first = 0
    for ranks, some in itertools.groupby(lines, lambda case: case["ranks"]):
        cases = [case | {"block": block, "optimizer": optimizer} for case in some]
        torch.save([answers] * len(cases), tmp_path / "answers")
        on_ranks(ranks, check_cases, cases, tmp_path, first)
        first += len(cases)
