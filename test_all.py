"""Every mechanism equals the plain single-process model; every refusal comes with its numbers.

    python -m pytest -q test_all.py

test                                  the bug that it catches
test_counts                           a size or a FLOP formula that drifted from the published one
test_model_equals_plain_pytorch       a wrong gradient in a hand-written backward, a lost label
test_rope_*                           angles in float32, a factor that counts from the wrong length
test_attention_*                      head groups that mix heads, a kernel where it cannot run
test_optimizer_*                      AdamW or clipping that differs, a skip that changes state
test_gradient_pieces                  micro-batches summed in bf16, stale gradients of the last step
test_factors*                         an illegal factor accepted, more shards than needed
test_sharding_equals_one_process      a stale or early-read buffer, a sum over the wrong ranks
test_sequences_and_chunks_*            a stale chunk, a position or gradient of another rank's
test_pipeline*                        a message read early or late, stages that wait for each other
test_activation_plans_*, test_plan_*  memory that is promised twice, time lost for nothing
test_rings_*, test_spine_*            a sum over other ranks or of other bytes than shard.py runs
test_placement_*, test_leaf_flag      blocks that straddle leaves where they need not, a lost node
test_papers_*, test_scale_*           a constant bent to a paper, predictions of an older planner
test_profiles_*, test_known_*         a rate of no machine, or of another one
test_step_seconds_*, test_streams_*   a prediction that forgets or doubles what shard.py launches
test_more_*, test_twice_*             a search that misses the best, or shuns a better machine
test_planner_*                        advice that does not help, a flag that is not heard
test_documents_*                      attention, a position or a label across a border
test_tensor_modes_*                   a sum or a gather that is missing, twice or stale
test_tensor_checkpoints_*, test_cuts_*  a column's part of a matrix in another one's place
test_swapping_run_*                   the same through train.py, saved and resumed
test_recomputation_flags              a flag that does nothing, or more than it says
test_sharded_checkpoints_*            states read back into the wrong place
test_memory_*, test_memplan_*         addresses that overlap, a peak wrongly called optimal
test_hf_*                             rows of a fused matrix in the wrong order, a tied head lost,
                                      a key of config.json that is not heard, an export of another
                                      architecture, a resume that needs what it was made from
test_data_*                           a sample drawn twice, windows cut wrong at a file's end, ids
                                      read at another width, text that is lost between tokens
test_eval_*                           a loss at another position or of another rank
test_schedule_*                       a rate that rises again where a run is extended
test_ranks_and_micro_batches          a loss that depends on how a batch is split
test_killed_*, test_restart           a torn checkpoint, an order of data that forgets the step
test_going_back_*                     a log with a hole, under a checkpoint that it does not reach
test_signals                          a stop without a checkpoint, or a hang
test_lost_*, test_failed_*            a dead rank that nobody names, a node that cannot come back
test_gpu*                             a missing wait, a stale copy, an index past 2^31: on GPUs
test_refused                          bad input that is found late, or on one rank only
test_readme_*                         a number, flag, file or command of README that is none

Tests with ranks are real processes under torchrun, over gloo.
"""
import contextlib
import copy
import dataclasses
import functools
import gc
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
import torch.nn.functional as F

import attention
import bench
import checkpoint
import costs
import data
import hardware
import memplan
import model as m
import offload
import parallel
import placement
import planner
import shard
import train

HERE = Path(__file__).parent
ALL_COMBINATIONS = bool(os.environ.get("ALL_COMBINATIONS"))  # make test-all: the whole grids
STEPS = 5 if ALL_COMBINATIONS else 3  # of each combination
RUN_SECONDS = 10800 if ALL_COMBINATIONS else 300  # of train.py, or of a worker of many cases
README = (HERE / "README.md").read_text()
slow = pytest.mark.skipif("CHECK" in os.environ, reason="make check")
SMALL = dataclasses.replace(m.MODELS["tiny"], dim=48, layers=2, heads=6, kv_heads=2, head_dim=8,
                            ffn=80, vocab=101)
H200 = hardware.load_profile("h200x2")
QUICK = "--model tiny --device cpu --seq 32 --batch 6 --steps 6 --eval-every -1".split()


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
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(args, ranks: int = 0, code: str = "", **env) -> subprocess.Popen:
    """train.py in a process of its own, or under torchrun; `code` is run before it starts."""
    script = [str(HERE / "train.py")]
    if code:
        script = [str(Path(env.pop("tmp")) / "driver.py")]
        imports = "import os, ranks, signal, sys, train\nfrom pathlib import Path\n"
        Path(script[0]).write_text(f"{imports}{code}\ntrain.main()\n")
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    torchrun += env.pop("rendezvous", ["--standalone"]) + env.pop("torchrun", [])
    command = [sys.executable, *(torchrun if ranks else []), *script, *map(str, args)]
    hidden = {} if "test_all.gpu" in code else {"CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", **hidden, **env}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=env, cwd=HERE)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork_ranks(args, ranks: int, code: str, file: Path, env: dict) -> list:
    """train.py as `launch` does, without torchrun, which adds nothing but seconds of imports: its
    processes are forked from one that has imported torch. What they print goes to a file."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["train", "pytest", "matplotlib.pyplot"])
    port = str(free_port())
    processes = []
    for rank in range(max(1, ranks)):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env, **(of_rank if ranks else {})}
        script = f"""
import os, signal, sys
from pathlib import Path
os.environ.update({own!r})
os.chdir({str(HERE)!r})
for stream in (1, 2):
    os.dup2(os.open({str(file)!r}, os.O_WRONLY | os.O_APPEND), stream)
sys.argv = {["train.py", *map(str, args)]!r}
import train
{code}
train.main()
"""
        processes.append(fork.Process(target=exec, args=(script, {"__name__": "__main__"})))
        processes[-1].start()
    return processes


def run(args, ranks: int = 0, code: str = "", expect: int = 0, **env) -> str:
    """Return what train.py prints, with `ranks` under torchrun if it needs that, or a GPU; `code`
    is run before it starts. `expect`: the exit status."""
    if "torchrun" in env or "test_all.gpu" in code:
        process = launch(args, ranks, code, **env)
        text = process.communicate(timeout=RUN_SECONDS)[0]
        assert process.returncode == expect, text[-3000:]
        return text
    env.pop("tmp", None)
    with tempfile.NamedTemporaryFile() as file:
        processes = fork_ranks(args, ranks, code, Path(file.name), env)
        deadline = time.time() + RUN_SECONDS
        for process in processes:
            process.join(max(0, deadline - time.time()))
            process.kill()
            process.join()
        text = Path(file.name).read_text()
    assert {process.exitcode for process in processes} == {expect}, text[-3000:]
    return text


def log(out) -> list[dict]:
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse)
            for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def losses(out) -> list:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in log(out) if "loss" in r]


def relative(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---------------------------------------------------------------------------- the model


@pytest.mark.parametrize("name, count", [
    ("7b", 6_738_415_616), ("13b", 13_015_864_320), ("30b", 32_528_943_616),
    ("65b", 65_285_660_672), ("llama3-8b", 8_030_261_248)])
def test_counts(name, count):
    cfg = m.MODELS[name]
    assert m.param_count(cfg) == count
    with torch.device("meta"):
        few = dataclasses.replace(cfg, layers=2)
        assert sum(p.numel() for p in m.LLaMA(few).parameters()) == m.param_count(few)
    causal, full = m.flops_per_token(cfg, 2**20)
    attention = 6 * cfg.layers * cfg.dim * 2**20  # 6 n h s: heads * head_dim = dim in all of these
    assert causal == 6 * count + attention and full == causal + attention


@pytest.mark.parametrize("sizes, fields, count", [
    ((32768, 4096, 32, 32, 8, 14336), {}, 7_248_023_552),  # Mistral-7B v0.3
    ((131072, 5120, 40, 32, 8, 14336), {}, 12_247_782_400),  # Mistral-Nemo
    ((152064, 3584, 28, 28, 4, 18944), {"qkv_bias": True}, 7_615_616_512),  # Qwen2.5-7B
    ((151936, 4096, 36, 32, 8, 12288), {"qk_norm": True}, 8_190_735_360)])  # Qwen3-8B
def test_counts_of_imports(sizes, fields, count):
    cfg = m.ModelConfig(*sizes, **fields)
    assert m.param_count(cfg) == count
    with torch.device("meta"):
        few = dataclasses.replace(cfg, layers=2)
        assert sum(p.numel() for p in m.LLaMA(few).parameters()) == m.param_count(few)


def test_counts_of_memory_and_peak():
    # 11 1/3 b s h elements a layer for F = 8/3 C (Memo, section 3, has 16 with two norms and
    # SwiGLU's output, which are computed again), plus the float32 log-sum-exp
    cfg = dataclasses.replace(m.MODELS["7b"], dim=3072, heads=24, kv_heads=24, ffn=8192)
    counted = 32 * sum(costs.layer_bytes(cfg, 10, torch.bfloat16))
    assert counted == 32 * 10 * (34 * 1024 * 2 + 24 * 4)
    peak = hardware.peak_flops
    assert peak("NVIDIA A800-SXM4-80GB") == peak("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak("NVIDIA H200") == peak("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak("NVIDIA H100 PCIe") == 756e12 and peak("NVIDIA B200") == 2250e12
    assert peak("NVIDIA H20") is None and peak("CPU") is None


def test_profiles_by_name_or_measured(group):
    """A GPU without a profile has another one's by their data sheets, one without either is
    measured, and the log says so; a plan for an A100 is not a plan for an H200."""
    small, large = (hardware.known_profile(f"NVIDIA A100-SXM4-{n}GB", 8) for n in (40, 80))
    base = hardware.known_profile("NVIDIA H200", 8)
    assert small.memory < 0.8 * large.memory < 0.4 * base.memory
    assert "data sheets" in large.sources["all"]
    slow = [hardware.known_profile(f"NVIDIA {n}", 8).products["forward"][0][-1] for n in (
        "A100-SXM4-80GB", "H100 PCIe", "H100 80GB HBM3", "B200")]
    assert slow == sorted(slow)
    said, cpu = [], torch.device("cpu")
    measured = hardware.find_profile("NVIDIA H20", cpu, torch.float32, "cpu", 1,
                                     lambda t, **_: said.append(t))
    assert "NVIDIA H20: no profile and no data sheet of it here; measured: matrix p" in said[0]
    assert measured.sources == {"all": "measured"} and measured.peak_flops is None
    hardware.check_profile(measured, "measured")
    known = hardware.find_profile("CPU", cpu, torch.float32, "cpu", 1,
                                  lambda t, **_: said.append(t))
    assert known == hardware.load_profile("cpu") and len(said) == 1
    seconds = [choose(8, 80, seq=2**15, profile=profile).token_s for profile in (large, H200)]
    assert seconds[0] > 2.5 * seconds[1]


@pytest.mark.parametrize("sizes, message", [
    (dict(heads=6, kv_heads=4), "kv_heads is 4, which does not divide the 6 heads; nearest: 3"),
    (dict(head_dim=7), "head_dim is 7.*nearest: 8"),
    (dict(dim=48.0), "dim is 48.0: a whole number from 1")])
def test_model_sizes_that_no_kernel_computes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **sizes)


def test_logits_follow_from_earlier_tokens_and_distances():
    """Later tokens change none, nor does a shift of all positions."""
    model = m.LLaMA(SMALL).double()
    model.init_weights(0)
    tokens, _ = example()
    later = torch.arange(40) >= 30
    logits = model(tokens)
    changed = model((tokens + later) % SMALL.vocab)
    assert torch.equal((changed != logits).any(-1), later.expand(2, -1))
    shifted = model(tokens, positions=torch.arange(40) + 2**20)
    assert relative(shifted, logits) < 1e-9


def test_seeds_make_other_weights():
    """Also those that differ above the 32 bits that a CPU's generator takes, and only by a bit."""
    def weight(seed, name="embed.weight"):
        return m.initial_weight(SMALL, name, (8, 8), seed, torch.device("cpu"))

    seeds = [0, 1, 2, 2**16, 2**30, 2**31 - 1]
    drawn = [weight(s) for s in seeds] + [weight(0, "head.weight")]
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.equal(a, b)
    assert torch.equal(weight(7), weight(7))


def plain_llama(model: m.LLaMA, tokens, labels):
    """LLaMA from PyTorch's own operators, sharing nothing with model.py but the weights."""
    cfg, t = model.cfg, tokens.shape[1]
    freq = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2).double() / cfg.head_dim)
    angle = torch.outer(torch.arange(t).double(), freq)
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(x, module):
        return F.rms_norm(x, x.shape[-1:], module.weight, cfg.norm_eps)

    def rotate(x):  # (B, heads, T, D), the pairs (i, i + D/2) as complex numbers
        z = torch.complex(*x.double().chunk(2, -1)) * turn
        return torch.cat((z.real, z.imag), -1).to(x.dtype)

    x = F.embedding(tokens, model.embed.weight)
    for b in model.blocks:
        bias = b.qkv_bias.weight if cfg.qkv_bias else None
        heads = F.linear(norm(x, b.norm1), b.qkv.weight, bias).unflatten(-1, (-1, cfg.head_dim))
        q, k, v = heads.transpose(1, 2).split([cfg.heads, cfg.kv_heads, cfg.kv_heads], dim=1)
        if cfg.qk_norm:
            q, k = norm(q, b.q_norm), norm(k, b.k_norm)
        k, v = (s.repeat_interleave(cfg.heads // cfg.kv_heads, dim=1) for s in (rotate(k), v))
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        o = F.scaled_dot_product_attention(rotate(q), k, v, seen)
        h = x + F.linear(o.transpose(1, 2).flatten(2), b.out.weight)
        gate, up = F.linear(norm(h, b.norm2), b.gate_up.weight).chunk(2, -1)
        x = h + F.linear(F.silu(gate) * up, b.down.weight)
    logits = F.linear(norm(x, model.norm), model.head.weight)
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=m.IGNORE)


def example(batch=2, seq=40, vocab=101, seed=1):
    rng = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(vocab, (batch, seq), generator=rng) for _ in range(2))
    labels[0, 3:17] = m.IGNORE
    return tokens, labels


@pytest.mark.parametrize("changes", [
    {"kv_heads": 1}, {"kv_heads": 2}, {"kv_heads": 6}, {"qkv_bias": True}, {"qk_norm": True},
    {"qkv_bias": True, "qk_norm": True, "kv_heads": 3}], ids=str)
@pytest.mark.parametrize("loss_elements", [2**27, 101 * 7])  # one chunk; chunks of 7 tokens, ragged
def test_model_equals_plain_pytorch(changes, loss_elements, monkeypatch):
    monkeypatch.setattr(m, "LOSS_ELEMENTS", loss_elements)
    model = m.LLaMA(dataclasses.replace(SMALL, **changes)).double()
    model.init_weights(3)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (0 if "bias" in name else 1)).all(), name
            p.data.copy_(random_vectors(name, p.shape))
    tokens, labels = example()
    loss = model(tokens, labels)
    (3 * loss).backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    logits, plain = plain_llama(model, tokens, labels)
    (3 * plain).backward()
    assert abs(loss.item() - plain.item()) < 1e-13
    assert relative(model(tokens), logits) < 1e-13
    for name, p in model.named_parameters():
        assert relative(ours[name], p.grad) < 1e-12, name


def test_all_labels_ignored():
    model = m.LLaMA(SMALL)
    model.init_weights(0)
    tokens, labels = example()
    loss = model(tokens, torch.full_like(labels, m.IGNORE))
    loss.backward()
    assert loss.item() == 0 and model.blocks[0].qkv.weight.grad.abs().max() == 0


def published_frequencies(kind: str) -> np.ndarray:
    """Return the angles a position of 64 pairs, at 8 times the trained 4096 tokens: as Llama 3.1's
    code has them, and arXiv 2309.00071 (A.2, YaRN)."""
    i = np.arange(64, dtype=np.longdouble)
    freq = np.longdouble(10000) ** (-i / 64)
    keep = {"default": 1.0, "linear": 0.0}.get(kind)  # how much of a frequency is as it was
    if kind == "llama3":
        wavelength = 2 * np.pi / freq
        keep = np.clip((4096 / wavelength - 1) / (4 - 1), 0, 1)
    if kind == "yarn":
        fast, slow = (64 * np.log(4096 / (turns * 2 * np.pi)) / np.log(10000) for turns in (32, 1))
        keep = 1 - np.clip((i - np.floor(fast)) / (np.ceil(slow) - np.floor(fast)), 0, 1)
    return keep * freq + (1 - keep) * freq / 8


@pytest.mark.parametrize("kind", ["default", *m.ROPE_KEYS])
def test_rope_at_a_million_positions(kind):
    """In float64: in float32 angles would be wrong by 1/32, and with a ramp in it by 1/10."""
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 4096,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    cfg = dataclasses.replace(m.MODELS["7b"], rope_scaling={} if kind == "default" else scaling)
    positions = torch.tensor([0, 1, 2**19 + 1, 2**20 - 1])
    angles = positions.numpy()[:, None] * published_frequencies(kind)
    factor = 0.1 * np.log(8) + 1 if kind == "yarn" else 1.0
    cos, sin = m.rope_tables(cfg, positions, torch.float64)
    assert np.abs(cos.numpy() - factor * np.cos(angles)).max() < 1e-9
    assert np.abs(sin.numpy() - factor * np.sin(angles)).max() < 1e-9


@pytest.mark.parametrize("queries, keys", [(50, 50), (25, 50), (50, 25)])  # a square, rectangles
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("limit", [2**31 - 1, 2500])  # at most three heads of 50 tokens at once
def test_attention_equals_its_definition(limit, kv_heads, queries, keys, monkeypatch):
    """Forward and backward, whole and in parts of heads, of which none has more elements than a
    kernel counts; a ring's rectangles have no mask."""
    def counted(function):
        def run(*args):
            assert max(x.numel() for x in args[:-1]) <= limit
            return function(*args)
        return run

    monkeypatch.setattr(attention, "MAX_ELEMENTS", limit)
    kernel = attention.KERNELS["cpu"]
    kernel = dataclasses.replace(kernel, forward=counted(kernel.forward),
                                 backward=counted(kernel.backward))
    q, do = torch.randn(2, 2, queries, 6, 16).double()
    k, v = torch.randn(2, 2, keys, kv_heads, 16).double()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    all_k, all_v = (x.repeat_interleave(6 // kv_heads, dim=2) for x in leaves[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], all_k) / 4  # the root of 16
    if queries == keys:
        scores = scores + torch.full((50, 50), -math.inf).triu(1)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), all_v)
    wanted = (o, scores.logsumexp(-1), *torch.autograd.grad(o, leaves, do))
    mask = attention.Mask(causal=queries == keys)
    o, lse = attention.attention_forward(kernel, q, k, v, mask)
    for groups, in_place in ((1, False), (kv_heads, False), (kv_heads, True)):
        inputs = [x.clone() for x in (q, k, v)]
        grads = attention.attention_backward(kernel, do, *inputs, o, lse, groups, in_place, mask)
        for ours, want in zip((o, lse, *grads), wanted, strict=True):
            assert relative(ours, want) < 1e-13


def test_attention_choice():
    cpu = torch.device("cpu")
    assert attention.pick_kernel("auto", cpu, torch.float32, documents=True) == "cpu"
    no_gpu = dict.fromkeys(("fa4", "cudnn", "flash"), "it needs a GPU, this is cpu")
    for name, reason in (no_gpu | {"fa5": "no such kernel"}).items():
        with pytest.raises(ValueError, match=f"--attention {name}: .*{reason}.*; usable: cpu"):
            attention.pick_kernel(name, cpu, torch.float32)


# ---------------------------------------------------------------------------- states


def build(dtype, micro_batches=1, factors=shard.Factors(), recompute=False,
          op=m.plain_attention, columns=None, **options):
    with torch.device("meta"):
        model = m.LLaMA(SMALL, op)
    if columns:
        parallel.split_columns(model, columns)
    if recompute:
        model.layer_runner = offload.recomputed_layers
    states = shard.States(model, torch.device("cpu"), dtype, micro_batches, factors,
                          gather_layers=recompute, **options)
    for name, shape in model.shapes.items():
        states.load(name, m.initial_weight(SMALL, name, shape, 0, torch.device("cpu")))
    return model, states


def cover(legal=lambda *row: True, **choices) -> list[tuple]:
    """Legal combinations of the choices in which every pair of values of two of them occurs that
    any has; with ALL_COMBINATIONS every combination."""
    every = [row for row in itertools.product(*choices.values()) if legal(*row)]
    if ALL_COMBINATIONS:
        return every

    def pairs(row: tuple) -> set:
        return set(itertools.combinations(enumerate(row), 2))

    missing = set().union(*map(pairs, every))  # of legal rows
    rows = []
    while missing:
        rows.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


def in_parts(tokens, labels, micro_batches=1, scale=None, positions=None):
    """A batch (N, T) as train.run_step takes it: (M, B, T), and 1 / valid labels."""
    if scale is None:
        scale = 1 / (labels != m.IGNORE).sum().double()
    return train.Batch(tokens.unflatten(0, (micro_batches, -1)),
                       labels.unflatten(0, (micro_batches, -1)), positions, scale=scale)


def make_run(model, seq, ranks=1, factors=shard.Factors(), activations=None, several=1,
             chunk=2**14, head_groups=1, dtype=torch.bfloat16, ring=1, document_token=-1,
             **flags) -> train.Run:
    """A run over one sequence of all ranks, planned by hand."""
    cfg = train.Config(seq=seq, per_node=ranks, ranks=ranks, document_token=document_token,
                       **flags)
    plan = costs.Plan(model, dtype, ranks, ranks, seq, ranks, ring, several, 1, head_groups,
                      "auto" if activations else "none", chunk, factors,
                      accumulates=several > 1, activations=activations)
    plan = planner.with_memory(plan)
    return train.Run(cfg, 0, ranks, torch.device("cpu"), dtype, "cpu", model, plan=plan)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_optimizer_equals_torch(clip, group):
    model, states = build(torch.float64)
    plain = m.LLaMA(SMALL).double()
    for name, p in plain.named_parameters():
        p.data.copy_(states.full(name))
    decay = [p for n, p in plain.named_parameters() if "norm" not in n]
    rest = [p for n, p in plain.named_parameters() if "norm" in n]
    adamw = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}],
                              betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for step in range(5):
        tokens, labels = example(seed=step)
        _, norm, finite = train.run_step(model, states, in_parts(tokens, labels), 1e-2, clip)
        adamw.zero_grad()
        plain_llama(plain, tokens, labels)[1].backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or 1e9)
        adamw.param_groups[0]["lr"] = adamw.param_groups[1]["lr"] = 1e-2
        adamw.step()
        assert finite and abs(norm.item() - expected.item()) < 1e-12
    for name, p in plain.named_parameters():
        assert relative(states.full(name), p) < 1e-11, name


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_optimizer_skips_what_is_not_finite(place, group):
    model, states = build(torch.bfloat16, place=place)
    tokens, labels = example()
    share = states.by_name["blocks.0.qkv.weight"]
    for poison, loss in ((None, 1.0), (torch.nan, 1.0), (torch.inf, 1.0), (None, torch.nan)):
        before = {k: part.values.clone() for k, part in states.state_parts().items()}
        states.begin_step()
        model(tokens, labels).backward()
        if poison:
            share.grad_shard[7] = poison
        states.finish_gradients()
        norm, finite = states.update(1e-2, 1.0, torch.tensor(loss))
        same = all(torch.equal(part.values, before[k])
                   for k, part in states.state_parts().items())
        good = poison is None and loss == 1.0
        assert bool(finite) == good and same != good
    assert states.updates == 1
    for s in states.sharded_params.values():  # the weights are the masters, rounded
        assert torch.equal(s.param_shard, s.states["master"].to(torch.bfloat16))


@pytest.mark.parametrize("dtype, noise", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("pieces", [1, 3])
def test_gradient_pieces(dtype, noise, pieces, group):
    """Several micro-batches, over two steps with poisoned buffers, against the plain gradient."""
    model, states = build(dtype, pieces)
    plain = m.LLaMA(SMALL).double()
    weights = dict(model.named_parameters())
    for name, p in plain.named_parameters():
        p.data.copy_(weights[name])
    tokens, labels = example(batch=3)
    scale = 1 / (labels != m.IGNORE).sum().to(states.scalars.dtype)
    for _ in range(2):
        for s in states.sharded_params.values():
            s.grad_shard.fill_(torch.nan)
        train.run_step(model, states, in_parts(tokens, labels, pieces, scale), None, 0.0)
    plain_llama(plain, tokens, labels)[1].backward()
    for name, p in plain.named_parameters():
        grad = weights[name].grad if "norm" in name else (
            states.by_name[name].grad_shard[: p.numel()].view(p.shape))
        wide = pieces > 1 or "norm" in name
        assert grad.dtype == (m.accumulation_dtype(dtype) if wide else dtype)
        assert relative(grad, p.grad) < noise, name


# ---------------------------------------------------------------------------- sharding


def test_factors():
    legal = shard.legal_factors(8, 8)
    assert len(legal) == 16 and legal[0] == shard.Factors(1, 1, 1)
    assert all(f.os % f.p == 0 and f.g in (f.p, f.os) for f in legal)
    # four nodes of 8: a shard fills its node before it crosses
    assert shard.legal_sizes(32, 8) == [1, 2, 4, 8, 16, 32]
    for name, f in (("zero3", (8, 8, 8)), ("mics:4", (4, 4, 4)), ("zero1.5:2", (1, 1, 2)),
                    ("zero2", (1, 8, 8)), ("ddp", (1, 1, 1))):
        assert shard.parse_strategy(name, 8) == shard.Factors(*f)
        shard.check_factors(shard.Factors(*f), 8, 8)
    for f, rule in (((1, 2, 4), "g must be p or os"), ((3, 3, 3), "3 shards do not fit 8 ranks"),
                    ((4, 4, 2), "dependency rule")):
        with pytest.raises(ValueError, match=rf"{rule}.*nearest: --p \d --g \d --os \d$"):
            shard.check_factors(shard.Factors(*f), 8, 8)
    need = costs.state_bytes(1000, shard.Factors(2, 4, 8), torch.bfloat16, False)
    assert need == {"parameters": 1000, "gradients": 500, "optimizer": 1500}
    need = costs.state_bytes(1000, shard.Factors(2, 4, 8), torch.bfloat16, True)
    assert need["gradients"] == 1000


def choose(world, gpu_gib, model="7b", profile=H200, seq=4096, host_memory=2**40,
           **flags) -> costs.Plan:
    """What planner.py chooses for `world` ranks of one node, in bf16, with so many GiB a GPU."""
    constraints = planner.Constraints(seq, torch.bfloat16, max(1, 2**19 // seq), **flags)
    there = planner.Hardware(world, world, profile, gpu_gib * 2**30, host_memory / world)
    plans = planner.plan(constraints, m.MODELS[model], there)
    assert all(plan.memory.total() <= gpu_gib * 2**30 for plan in plans)
    return plans[0]


def test_plan_takes_the_fewest_shards_that_fit_and_are_fast():
    many = dict(seq=4096, batch=4096)
    for gpu, want in ((130, (1, 1, 2)), (80, (1, 1, 8)), (45, (1, 8, 8)), (30, (8, 8, 8))):
        plan = choose(8, gpu, os_place="gpu", **many)
        assert (plan.factors.p, plan.factors.g, plan.factors.os) == want, gpu
        assert planner.layers_text(plan).startswith("all")
        assert plan.sp == 1 and plan.batch == 4096
    swaps = choose(8, 28, os_place="gpu", **many)
    assert swaps.activations.resident < 32  # they swap where all do not fit
    plan = choose(8, 30, **many)  # 256 micro-batches hide the way of states from the host ...
    assert plan.os_place == "host" and plan.factors.p == 1 and not plan.host["activations"]
    assert choose(8, 30, host_memory=2**30, **many).os_place == "gpu"  # ... where they have room
    one = choose(1, 75, seq=2**15, batch=1, host_memory=112 * 2**30)
    assert one.os_place == "host" and one.activations.resident == 32
    assert one.host["optimizer"] == 12 * m.param_count(m.MODELS["7b"])
    assert choose(8, 139, seq=4096, batch=8).factors.os == 8  # its update would take as long
    assert choose(8, 139, p=2, **many).factors.p == 2
    plan = choose(8, 132, seq=2**20, host_memory=480 * 2**30)
    assert plan.sp == 8 and plan.batch == 1 and plan.activations.resident >= 2
    assert not plan.activations.layers_recomputing_attention
    sizes = costs.layer_bytes(m.MODELS["7b"], 2**17, torch.bfloat16)
    assert plan.host_bytes == costs.host_bytes(plan.activations, sizes) <= 60 * 2**30
    assert plan.memory.total() > 0.9 * 132 * 2**30
    plan = choose(8, 132, seq=2**18, host_memory=480 * 2**30)
    assert planner.layers_text(plan) == "all"
    plan = choose(8, 132, seq=2**19, host_memory=480 * 2**30)
    assert plan.activations.alpha > 0.2 and plan.chunk == 2**14
    plan = choose(8, 132, seq=2**18, sp=8, alpha=0.5, resident_layers=4, chunk=2**13,
                  head_groups=2, host_memory=480 * 2**30)
    assert plan.activations.alpha == 0.5 and plan.activations.resident == 4
    assert plan.chunk == 2**13 and plan.head_groups == 2
    with pytest.raises(ValueError, match="room for .* GiB on the GPU and 0.1 on the host"):
        choose(8, 110, seq=2**22, host_memory=2**30, chunk=2**14, ring=1)
    with pytest.raises(ValueError, match=r"258.0 GiB a rank, 60.2 where layers drop all that"):
        choose(8, 110, seq=2**22, host_memory=2**30, ring=1)
    ring = choose(8, 130, seq=2**22, host_memory=2**30)  # fewer ranks by heads: more head groups
    assert ring.ring > 1 and ring.activations.stride > 1 and ring.head_groups == 16
    with pytest.raises(ValueError, match="needs .* GiB a GPU even with p=8 g=8 os=8.*room for 12"):
        choose(8, 12, recompute="none", os_place="gpu", **many)
    with pytest.raises(ValueError, match="a rank has 4 key/value heads at a time; one of 1, 2, 4"):
        choose(8, 132, seq=2**18, sp=8, ring=1, head_groups=3)


def test_plans_are_ranked():
    """Plans come best first, of a pure function."""
    constraints = planner.Constraints(2**19, torch.bfloat16, 1)
    eight = planner.Hardware(8, 8, H200, 132 * 2**30, 60 * 2**30)
    best, *others = planner.plan(constraints, m.MODELS["7b"], eight)
    assert [best, *others] == planner.plan(constraints, m.MODELS["7b"], eight)  # a function
    assert len(others) == 9 and all(
        plan.token_s >= (1 - planner.TIE) * best.token_s for plan in others)
    assert [p.token_s for p in others] == sorted(p.token_s for p in others)
    for change in (best, constraints, eight):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change.seq = change.sp = change.ranks = 1


# papers and large machines: results/scale.py


@pytest.fixture(scope="module")
def scale():
    """The program, beside the modules."""
    path = HERE / "results" / "scale.py"
    spec = importlib.util.spec_from_file_location("scale", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_scale_profiles_are_written_by_their_sources(scale):
    for make in (scale.a800, scale.h200x8, scale.h200x8_400g):
        profile = make()
        text = (hardware.PROFILES / f"{profile.name}.json").read_text()
        assert text == hardware.profile_text(profile), "python results/scale.py profiles"
        assert hardware.load_profile(profile.name).sources["all"] != "measured"
        said = {*profile.sources, "name", "device", "per_node", "kernel", "sources", "about"}
        fields = {f.name for f in dataclasses.fields(profile)}
        assert fields - said <= {"gpu_bytes", "peak_flops"}, profile.name


def test_scale_network_is_what_others_measured(scale):
    """A small all-reduce over 32 nodes took 62 to 71 us (nccl issue 652). A large one has the bus
    bandwidth of the NICs, of which each of 8 groups has an eighth; one of a node that of NVLink."""
    assert 55e-6 < scale.seconds("all_reduce", 64, (8, 32), 8, 158e9, 83e9) < 75e-6
    size = 2**34
    for mesh, bus in (((8, 1), 158e9), ((8, 2), 93e9), ((1, 2), 93e9 / 8), ((4, 4), 93e9 / 2)):
        k = mesh[0] * mesh[1]
        for op, share in (("all_reduce", 2 * (k - 1) / k), ("all_gather", (k - 1) / k)):
            rate = share * size / scale.seconds(op, size, mesh, 8, 158e9, 93e9)
            assert 0.99 * bus < rate < bus, (mesh, op)


def test_papers_choices(scale):
    """AMSP's choice for 7B is the best on 1024 GPUs, and ties on 64, as that for 30B does; all of
    the papers' are legal and fit. Where they are not the best, results/README.md shows by how much
    and says why."""
    gpu = scale.a800s(8).gpu_budget / 2**30
    rows = {(r["setting"], r["gpus"]): (r["theirs"], r["best"]) for r in scale.choices()}
    assert len(rows) == 8
    for theirs, best in rows.values():
        assert theirs["gpu_gib"] <= gpu and best["gpu_gib"] <= gpu
        assert best["step_s"] <= (1 + planner.TIE) * theirs["step_s"]
    theirs, best = rows["AMSP 7b", 1024]
    assert theirs == best and best["shards"] == "1,1,8 inter"
    for name in ("7b", "30b"):
        theirs, best = rows[f"AMSP {name}", 64]
        assert theirs["step_s"] <= (1 + planner.TIE) * best["step_s"]
    for name, shards in (("13b", "4,4,8 inter"), ("30b", "8,8,32 inter")):
        assert rows[f"AMSP {name}", 1024][0]["shards"] == shards
    theirs = rows["InternEvo 7b, layers whole", 128][0]
    assert (theirs["sp"], theirs["layers"], theirs["shards"]) == ("32", "all", "4,4,8 inter")


@pytest.mark.parametrize("table", ["choices", "table_5", "figures_11_and_12", "fits"])
def test_scale_predictions_are_the_planners(scale, table, monkeypatch):
    """results/scale.json is not older than the planner (of what fits, a third is asked again)."""
    saved = json.loads((HERE / "results" / "scale.json").read_text())[table.partition("_11")[0]]
    if table == "fits" and not ALL_COMBINATIONS:
        monkeypatch.setattr(scale, "MEMORY", {"80 GB": scale.MEMORY["80 GB"]})
        saved = [row for row in saved if row["memory"] == "80 GB"]
    assert scale.rounded(getattr(scale, table)(), 5) == saved, "python results/scale.py predictions"


def brute_force_activations(n, s, c, bandwidth, gpu, host, keeps=True):
    """The least seconds of planner.plan_activations's program, by trying everything; without
    `keeps`, where no layer keeps intermediates."""
    best, io, part = float("inf"), s.input + s.attn, s.intermediates / c
    for k, swapped in [(k, x) for k in range(2, n + 1) for x in range(c * (n - k) + 1) if keeps]:
        per_layer = -(-swapped // max(1, n - k))
        buffers = 2 * (io + per_layer * part) * (k < n)
        for kept, dropped in [(x, d) for x in range(c * k + 1) for d in range(n - k + 1)]:
            out = (n - k) * io - dropped * s.attn + swapped * part
            if k * io + kept * part + buffers > gpu or 2 * buffers > gpu or out > host:
                continue
            waits = max(0.0, out / bandwidth - (n - k) * s.layer_s)
            seconds = waits + dropped * s.attn_s + (n - (kept + swapped) / c) * s.recompute_s
            best = min(best, seconds)
    for stride, k, dropped in itertools.product(range(1, n + 1), range(2, n + 1), range(n + 1)):
        away = n - k
        if away % stride:
            continue
        size = [s.input * (i % stride == 0) + s.attn * (i >= dropped) for i in range(n)]
        buffers = 2 * max((sum(size[i : i + stride]) for i in range(0, away, stride)), default=0)
        # in backward, what a group's layers lack is made again beside what those before it keep
        entering = [sum(size[away : first + stride]) + sum(io - x for x in size[first:][:stride])
                    for first in range(0, n, stride)]
        if max(*entering, 2 * io * (away > 0)) + buffers > gpu or sum(size[:away]) > host:
            continue
        waits = max(0.0, sum(size[:away]) / bandwidth - away * s.layer_s)
        remade = sum(i % stride > 0 for i in range(n))
        again = sum(i % stride < stride - 1 for i in range(dropped))  # q, k, v of remade outputs
        best = min(best, waits + dropped * s.attn_s + remade * s.post_s + n * s.recompute_s
                   + again * (s.layer_s - s.attn_s - s.post_s))
    return best


def test_activation_plans_are_the_best():
    rng = np.random.default_rng(0)
    solved = 0
    for _ in range(40):
        x, attn, others = (rng.uniform(0.2, 4, 3) * 2**30).tolist()
        s = planner.Sizes(x, attn, others, *rng.uniform(0.2, 1, 4).tolist())
        n, c, gpu, host = 5, 2, rng.uniform(4, 40) * 2**30, rng.uniform(1, 20) * 2**30
        bandwidth = rng.uniform(1, 20) * 2**30
        want = brute_force_activations(n, s, c, bandwidth, gpu, host)
        if want == float("inf"):
            with pytest.raises(ValueError, match="do not fit"):
                planner.plan_activations(n, s, c, bandwidth, gpu, host)
            continue
        activations, lost = planner.plan_activations(n, s, c, bandwidth, gpu, host)
        assert want - 1e-6 <= lost <= want + 5e-3, activations  # ties cost up to 0.1 ms a GiB
        assert costs.resident_bytes(activations, (x, attn, others)) <= gpu * (1 + 1e-9)
        assert costs.host_bytes(activations, (x, attn, others)) <= host * (1 + 1e-9)
        stored = [activations.num_saved_chunks(i) for i in range(n)]
        assert all(0 <= a <= c for a in stored)
        assert sum(stored) == activations.kept_chunks + activations.swapped_chunks
        solved += 1
    assert solved > 20


def test_dropped_inputs_and_outputs_are_the_fewest():
    rng = np.random.default_rng(1)
    solved = strides = 0
    for _ in range(150):
        x, attn = (rng.uniform(0.5, 2, 2) * 2**30).tolist()
        recompute, attn_s, post = (rng.uniform(0.2, 1, 3) * (1, 3, 1)).tolist()
        s = planner.Sizes(x, attn, 10 * x, recompute + attn_s + post, recompute, attn_s, post)
        n, gpu, host = 12, rng.uniform(6, 30) * 2**30, rng.uniform(0, 20) * 2**30
        want = brute_force_activations(n, s, 2, 4 * 2**30, gpu, host, keeps=False)
        value, plan, waits = planner.best_dropping(n, s, 2, 4 * 2**30, gpu, host, None, 0.0)
        if want == float("inf"):
            assert value == want
            continue
        lost = waits + planner.recomputed_seconds(plan, s)
        assert want - 1e-9 <= lost <= want + 5e-3, plan
        assert planner.least_lost(n, s, gpu + host) <= lost
        assert planner.bytes_missing(n, s, gpu, host) <= 0
        solved += 1
        strides += plan.stride > 1
    assert solved > 60 and strides > 20


@pytest.mark.parametrize("host", [1e10, 1e11, 4e11, 1e13])
@pytest.mark.parametrize("layer_s", [0.2, 0.5, 2.0])
def test_activation_plans_with_memos_restrictions_are_memos_rule(host, layer_s):
    s, n, bandwidth = planner.Sizes(2e9, 1e9, 28e9, layer_s, 0.1, 0.1, 0.1), 32, 16e9
    alpha = min(1, (bandwidth * layer_s - 3e9) / 28e9, (host / (n - 2) - 3e9) / 28e9)
    activations, _ = planner.plan_activations(n, s, 1024, bandwidth, np.inf, host, resident=2)
    drops = activations.stride > 1 or activations.layers_recomputing_attention > 0
    assert drops == (alpha < 0)  # Memo has no plan
    if not drops:  # to a chunk of one layer
        assert activations.alpha == pytest.approx(alpha, abs=1 / (1024 * (n - 2)))


def test_swapping_run_equals_plain_and_resumes(tmp_path):
    """train.py itself: sequences over ranks, chunks, swapping; saved, resumed with others."""
    args = [*QUICK, "--dtype", "fp64", "--keep", "9"]
    run([*args, "--out", tmp_path / "a", "--eval-every", "6"], 0)
    swap = "--sp 2 --chunk 10 --alpha 0.5 --resident-layers 2 --g 2 --os 2 --head-groups 3".split()
    text = run([*args, *swap, "--out", tmp_path / "b", "--save-every", "3", "--eval-every", "6"], 2)
    assert "2 of 4 layers resident" in text and "alpha 0.5" in text and "sp=2, 3 head" in text
    other = "--sp 2 --ring 2 --chunk 7 --alpha 0.25 --micro-batch 2".split()
    text = run([*args, *other, "--out", tmp_path / "c", "--resume",
                tmp_path / "b" / "step-00000003", "--eval-every", "6"], 2)
    assert "sp=2 ring=2" in text
    for name, first in (("b", 0), ("c", 3)):
        rows = zip(log(tmp_path / "a")[first:], log(tmp_path / name), strict=True)
        for a, b in rows:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-11)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-11)


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("plan", [
    None, "full", (4, 3, 9), (2, 3, 2, 2), (2, 0, 0, 3, 2)], ids=str)
def test_documents_equal_each_alone(kv_heads, plan, monkeypatch, group):
    """Logits and gradients of two micro-batches of three sequences, whose layers run whole, again,
    or in chunks that cross borders, of a kernel in parts and in head groups."""
    cfg = dataclasses.replace(SMALL, layers=4, heads=6, kv_heads=kv_heads, qk_norm=True)
    monkeypatch.setattr(attention, "MAX_ELEMENTS", 3 * 24 * cfg.head_dim * 4)
    op = attention.Attention("cpu")
    op.head_groups = 2
    model = m.LLaMA(cfg, op).double()
    model.init_weights(3)
    windows = with_documents(6, 24, cfg.vocab, seed=1)
    logits, loss = each_document_alone(model, windows)
    loss.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    run = make_run(cfg, 24, document_token=END)
    run = run.but(plan=dataclasses.replace(run.plan, batch=6, micro_batch=3),
                  train=SimpleNamespace(sample=lambda i: windows[i]))
    batch = train.load_batch(run, 0)
    ends = windows[:, :-1] == END
    before = [len(row) for tokens in ends for row in np.split(tokens, np.flatnonzero(tokens) + 1)]
    pairs = [i for n in before for i in range(1, n + 1)]
    assert batch.seen.item() == pytest.approx(sum(2 * n - 1 for n in pairs) / ends.size)
    if plan == "full":
        model.layer_runner = offload.recomputed_layers
    elif plan:
        offload.ChunkedLayers(model, (3, 24), offload.ActivationPlan(4, 3, *plan), 29,
                              torch.device("cpu"), torch.float64, poison=True)
    found = 0
    for i, (tokens, labels, scale, *where) in enumerate(batch.micro_batches()):
        with torch.no_grad():
            here = logits[3 * i : 3 * i + 3]
            assert relative(model(tokens, None, None, *where), here) < 1e-12
        part = model(tokens, labels, scale.double(), *where)
        part.backward()
        found += part.item()
    assert found == pytest.approx(loss.item(), rel=1e-12)
    for name, p in model.named_parameters():
        assert relative(p.grad, want[name]) < 1e-11, name


def test_documents_run(tmp_path):
    """train.py itself, whose documents are lines of text: on one rank, and swapping on two."""
    args = [*QUICK, "--dtype", "fp64", "--steps", 2, "--eval-every", 2, "--document-token", 10]
    few = "train.EVAL_SEQUENCES = 5"
    text = run([*args, "--out", tmp_path / "a"], 0, few)
    assert "documents end with token 10" in text
    swap = "--sp 2 --chunk 10 --alpha 0.5 --resident-layers 2 --head-groups 3 --micro-batch 2"
    run([*args, *swap.split(), "--os", 2, "--out", tmp_path / "b"], 2, few)
    for a, b in zip(log(tmp_path / "a"), log(tmp_path / "b"), strict=True):
        for name in ("loss", "grad_norm", "val_loss"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-10), name
    ours, theirs = (row["val_loss_by_position"] for row in (a, b))
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-10)
    model = m.LLaMA(m.MODELS["tiny"]).double()
    model.init_weights(0)
    sequences, _ = data.split(data.open_corpus("stdlib", 256)[0], None, 32, 0)
    windows = np.stack([sequences.sample(i) for i in range(6)])
    loss = each_document_alone(model, windows, last=10)[1].item()
    assert log(tmp_path / "a")[0]["loss"] == pytest.approx(loss, rel=1e-10)
    assert 1 < log(tmp_path / "a")[0]["keys_seen"] < 32
    text = run([*args[:-2], "--steps", 3, "--resume", "--out", tmp_path / "a"], 0)
    assert "documents end with token 10" in text and "changed: steps 2 -> 3\n" in text


def test_positions_follow_the_shards():
    run = make_run(m.MODELS["7b"], 2**20, 8)
    parts = [train.local_positions(run.but(rank=r)) for r in range(16)]
    assert np.array_equal(np.concatenate(parts[:8]), np.arange(2**20))
    assert np.array_equal(np.concatenate(parts[8:]), np.arange(2**20))
    run = make_run(m.MODELS["7b"], 2**20, 8, ring=2)
    quarters = np.arange(2**20).reshape(4, -1)
    for first, wanted in ((0, quarters[[0, 3]]), (4, quarters[[1, 2]])):
        parts = [train.local_positions(run.but(rank=r)) for r in range(first, first + 4)]
        assert np.array_equal(np.concatenate(parts), wanted.flatten())


def test_progress_inside_a_step(capsys):
    class Running:
        def progress(self):
            return "backward layer 3/4"

    shown = train.Progress(Running(), False)
    shown.every = 0.01
    shown.begin(7)
    shown.start()
    time.sleep(0.2)
    shown.end()
    assert "step 7: backward layer 3/4, 0 s, GPU" in capsys.readouterr().out


END = 5  # the token that ends a document


def with_documents(count: int, seq: int, vocab: int, seed: int) -> np.ndarray:
    """Windows (count, seq + 1) in which documents end: some with the first or the last token, some
    two in a row, some sequences with none."""
    rng = np.random.default_rng(seed)
    windows = rng.integers(END + 1, vocab, (count, seq + 1))
    windows[rng.random(windows.shape) < 0.15] = END
    windows[0] = np.maximum(windows[0], END + 1)
    windows[1, [0, 7, 8, seq - 1]] = END
    return windows


def each_document_alone(model, windows: np.ndarray, last: int = END):
    """Logits (count, T, V) and loss of documents, each by itself in plain PyTorch."""
    logits, losses, labels = [], [], torch.from_numpy(windows[:, 1:].copy())
    tokens = torch.from_numpy(windows[:, :-1].copy())
    labels[tokens == last] = m.IGNORE
    for row, wanted in zip(tokens, labels):
        ends = [*(i + 1 for i, token in enumerate(row.tolist()) if token == last), len(row)]
        begin = 0
        for end in sorted(set(ends)):
            alone, _ = plain_llama(model, row[None, begin:end], wanted[None, begin:end].clamp(0))
            logits.append(alone[0])
            losses.append(torch.nn.functional.cross_entropy(
                alone[0], wanted[begin:end], reduction="sum", ignore_index=m.IGNORE))
            begin = end
    loss = sum(losses) / (labels != m.IGNORE).sum()
    return torch.cat(logits).view(*labels.shape, -1), loss


def train_plainly(batches, loss_of=lambda model, batch: plain_llama(model, *batch)[1]):
    """One process, torch's AdamW, float64: the trained model, and loss and norm of each step."""
    plain, wanted = m.LLaMA(SMALL).double(), []
    for name, p in plain.named_parameters():
        p.data.copy_(m.initial_weight(SMALL, name, p.shape, 0, p.device))
    kinds = [[p for p in plain.parameters() if (p.dim() == 1) == vector] for vector in (0, 1)]
    adamw = torch.optim.AdamW([{"params": kinds[0]}, {"params": kinds[1], "weight_decay": 0.0}],
                              lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for batch in batches:
        adamw.zero_grad()
        loss = loss_of(plain, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        wanted.append((loss.item(), norm.item()))
    return plain, wanted


def tokens_of(tokens, labels, rows, positions, several, own=lambda labels: labels) -> train.Batch:
    """A rank's part of a step's tokens and labels (N, T), and the scale of all. own: of its labels
    those whose loss it computes."""
    scale = 1 / (labels != m.IGNORE).sum().double()
    return in_parts(tokens[rows, positions], own(labels[rows, positions]), several, scale,
                    positions)


def documents_of(windows, rows, run) -> train.Batch:
    """A rank's part of a step's windows (N, T + 1), whose tokens attend inside their documents."""
    scale = torch.tensor(1 / (windows[:, :-1] != END).sum())
    return dataclasses.replace(train.local_batch(list(windows[rows]), run), scale=scale)


def equals_plain(model, states, steps, known, case, before=lambda i, parts: None) -> None:
    """Train, and compare each loss and norm and the last parameters with train_plainly's. before(i,
    parts): what runs before step i, and changes nothing."""
    plain, wanted = known
    for i, (parts, want) in enumerate(zip(steps, wanted, strict=True)):
        before(i, parts)
        loss, norm, _ = train.run_step(model, states, parts, 1e-2, 0.5)
        assert (loss.item(), norm.item()) == pytest.approx(want, rel=1e-11), case
    for name, p in plain.named_parameters():
        assert relative(states.full(name), p) < 1e-11, (case, name)


def sharding_worker(cases: str):
    """Runs under torchrun: each case's losses, norms and parameters against one plain process."""
    torch.set_num_threads(1)
    rank, world, _ = train.start_ranks(100)
    global SMALL
    SMALL = dataclasses.replace(SMALL, dim=24, heads=3, kv_heads=1, ffn=40, vocab=67,
                                qkv_bias=cases == "once", qk_norm=cases == "once")

    def batch(step):
        tokens, labels = example(batch=24, seq=12, vocab=67, seed=step)
        labels[::3, :5] = m.IGNORE
        return tokens, labels

    known = train_plainly([batch(step) for step in range(STEPS)])
    groups, factors = attention.Groups(), shard.legal_factors(world, int(os.environ["PER_NODE"]))
    rows = cover(factors=factors, layouts=("inter", "intra"), several=(1, 3),
                 recompute=(False, True), place=("gpu", "host"))
    if cases == "once":
        rows = [(f, ("inter", "intra")[i % 2], (1, 3)[i // 2 % 2], i % 3 == 0,
                 ("gpu", "host")[i // 3 % 2]) for i, f in enumerate(factors)]
    shard.VISIT_ELEMENTS = 300  # several visits of a matrix
    for f, layout, several, recompute, place in rows:
        model, states = build(torch.float64, several, f, recompute, layout=layout, groups=groups,
                              poison=True, bucket_bytes=8000, place=place)
        mine = slice(rank * 24 // world, (rank + 1) * 24 // world)
        steps = [in_parts(tokens[mine], labels[mine], several,
                          1 / (labels != m.IGNORE).sum().double())
                 for tokens, labels in map(batch, range(STEPS))]
        equals_plain(model, states, steps, known, (f, layout, several, recompute, place))
        count = sum(p.numel() for p in known[0].parameters() if p.dim() > 1)
        formula = costs.state_bytes(count, f, torch.float64, several > 1)
        if layout == "intra":  # the rest is padding, which is large only in matrices as small
            assert all(formula[k] <= v < 1.3 * formula[k] for k, v in states.bytes().items())
    # ZeRO-2 in bf16: micro-batches add up in float32, and nothing rounds the sum
    model, states = build(torch.bfloat16, 3, shard.Factors(1, world, world), groups=groups)
    parts = in_parts(*(x[mine] for x in batch(0)), 3, torch.tensor(0.01))
    train.run_step(model, states, parts, None, 0.0)
    sums = [s.grad_shard for s in states.sharded_params.values()]
    assert any((x != x.bfloat16()).any() for x in sums if x.dtype == torch.float32)
    print(f"rank {rank}: {len(rows)} cases equal", flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks, per_node, cases, count", [
    (4, 2, "cover", 144 if ALL_COMBINATIONS else 18), (8, 8, "once", 16)])
def test_sharding_equals_one_process(ranks, per_node, cases, count, tmp_path):
    """4 ranks as 2 nodes of 2: a cover of factors x layouts x micro-batches x recomputation x the
    place of optimizer states; 8 ranks: each of the 16 factors. What was released or used is
    poisoned in all of them."""
    code = f"import test_all; test_all.sharding_worker('{cases}')"
    text = run([], ranks, code, tmp=tmp_path, PER_NODE=str(per_node))
    assert text.count(f"{count} cases equal") == ranks


def test_recomputation_flags(tmp_path):
    """Layers run again lie on the plain bf16 curve of as many ranks; of one rank, they change no
    bit."""
    args = [*QUICK, "--dtype", "bf16", "--save-every", "-1"]
    run([*args, "--out", tmp_path / "one"], 0)
    run([*args, "--out", tmp_path / "again", "--recompute", "full"], 0)
    assert losses(tmp_path / "one") == losses(tmp_path / "again")
    run([*args, "--out", tmp_path / "plain"], 2)
    text = run([*args, "--p", "2", "--recompute", "full", "--out", tmp_path / "full"], 2)
    assert "recomputed: full" in text
    for a, b in zip(losses(tmp_path / "plain"), losses(tmp_path / "full"), strict=True):
        assert a == pytest.approx(b, rel=1e-2)


def test_sharded_checkpoints_fit_each_other(tmp_path):
    """Saved under some factors, ranks and layout; resumed, evaluated and exported under others."""
    args = [*QUICK, "--dtype", "fp64", "--micro-batch", "1", "--keep", "99", "--eval-every", "5"]
    run([*args, "--out", tmp_path / "a", "--save-every", "3", "--export", tmp_path / "x"], 0)
    want, others = losses(tmp_path / "a"), [
        (2, "--p 2 --os-layout inter --os-place host"), (3, "--strategy zero3 --overlap none"),
        (2, "--os 2 --g 1 --per-node 1 --os-place host --save-async"),
        (2, "--strategy zero2 --os-layout inter")]
    last = tmp_path / "a" / "step-00000003"
    for i, (ranks, flags) in enumerate(others):
        out, export = tmp_path / f"o{i}", tmp_path / f"x{i}"
        run([*args, *flags.split(), "--out", out, "--resume", last, "--save-every", "1",
             "--export", export], ranks)
        for a, b in zip(want[3:], losses(out), strict=True):
            assert a == pytest.approx(b, rel=1e-11), flags
        last = out / "step-00000003" if (out / "step-00000003").exists() else last
        a, b = (checkpoint.hf_open(x, checkpoint.hf_config(x)) for x in (tmp_path / "x", export))
        for name in ("embed.weight", "blocks.1.qkv.weight", "norm.weight"):
            assert relative(a(name), b(name)) < 1e-11
    # and from the last of them, sharded twice, back to one process
    run([*args, "--out", tmp_path / "b", "--resume", tmp_path / "o3" / "step-00000004"], 0)
    for a, b in zip(want[4:], losses(tmp_path / "b"), strict=True):
        assert a == pytest.approx(b, rel=1e-11)


def muon(weight, grad, states, scalars, betas, eps, decay):
    """Momentum whose singular values Newton-Schulz brings near 1: it needs the whole matrix."""
    master, momentum = states
    lr, clip, _, _, finite = scalars.unbind()
    new_momentum = betas[0] * momentum + grad.to(master.dtype) * clip
    x = new_momentum / (new_momentum.norm() + eps)
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    new = master * (1 - lr * decay) - lr * x
    momentum.copy_(torch.where(finite > 0, new_momentum, momentum))
    master.copy_(torch.where(finite > 0, new, master))
    weight.copy_(master)


MUON = shard.Optimizer(muon, ("master", "momentum"), whole=True)


def muon_worker(file: str):
    """Runs under torchrun: three steps; rank 0 saves the weights."""
    rank, world, _ = train.start_ranks(100)
    model, states = build(torch.float64, 1, shard.Factors(1, 1, world), layout="inter", poison=True,
                          optimizer=MUON, place="host" if world == 4 else "gpu")
    for step in range(3):
        tokens, labels = example(batch=8, seed=step)
        scale = 1 / (labels != m.IGNORE).sum().double()
        parts = in_parts(tokens[rank::world], labels[rank::world], 1, scale)
        train.run_step(model, states, parts, 1e-2, 0.5)
    weights = {name: states.full(name).clone() for name, _ in model.named_parameters()}
    if rank == 0:
        torch.save(weights, file)
        assert any(name.startswith("momentum.") for name in states.state_parts())
    os._exit(0)


def test_another_optimizer_is_a_function_and_its_states(tmp_path, group):
    """Muon, on one rank and on four, where each owns whole matrices, with states on the host."""
    for ranks in (1, 4):
        code = f"import test_all; test_all.muon_worker('{tmp_path}/{ranks}')"
        run([], ranks, code, tmp=tmp_path)
    one, four = torch.load(tmp_path / "1"), torch.load(tmp_path / "4")
    assert one.keys() == four.keys()
    for name, weight in one.items():
        assert relative(four[name], weight) < 1e-11, name
    for layout, p in (("intra", 1), ("inter", 2)):
        with pytest.raises(ValueError, match=f"layout={layout} p={p}: .* with layout=inter p=1"):
            build(torch.float64, 1, shard.Factors(p, p, p), layout=layout, optimizer=MUON)


# ---------------------------------------------------------------------------- sequences, offload

# eighths of the others swapped, resident layers of 5, chunks kept in them, layers that drop o, and
# of how many layers one keeps x
PLANS = [(0, 2, 0, 0, 1), (1, 2, 2, 0, 1), (4, 3, 1, 1, 1), (8, 2, 99, 0, 1), (0, 5, 99, 0, 1),
         (0, 5, 0, 0, 1), (3, 4, 6, 0, 1), (0, 3, 0, 0, 2), (0, 2, 0, 4, 3), (0, 5, 0, 2, 2)]


def sequence_worker():
    """Runs under torchrun: sequence degrees x rings x plans x chunk sizes x kv heads, of which some
    have biases and norms on q and k, x documents x factors, five steps each, against one plain
    process. What was used is poisoned."""
    torch.set_num_threads(1)
    rank, world, _ = train.start_ranks(100)
    groups, count, cpu = attention.Groups(), 0, torch.device("cpu")
    stream = attention.CommStream(cpu)
    for kv_heads, degrees in ((4, [world // 2, world]), (2, [4]), (1, [4])):
        global SMALL
        SMALL = dataclasses.replace(SMALL, dim=24, heads=8, kv_heads=kv_heads, ffn=40, vocab=67,
                                    layers=5, head_dim=4, qkv_bias=kv_heads < 4,
                                    qk_norm=kv_heads == 2)
        batch = [example(batch=8, seq=24, vocab=67, seed=i) for i in range(STEPS)]
        windows = [with_documents(8, 24, 67, seed=i) for i in range(STEPS)]
        whole = train_plainly(batch)
        alone = train_plainly(windows, lambda *args: each_document_alone(*args)[1])
        legal = shard.legal_factors(world, world)
        for sp in [n for n in degrees if n <= world]:
            every = 2 if world == 4 and not ALL_COMBINATIONS else 1
            some = list(enumerate(PLANS))[count % every :: every]
            for i, (eighths, resident, kept, dropped, stride) in some:
                chunk, several = (13, 16, 99)[i % 3], (1, 2)[i % 2]
                ring = max(2 ** (count % sp.bit_length()), sp // kv_heads)  # 1 to sp
                in_documents = ring == 1 and count % 4 < 2
                head_ranks = sp // ring
                head_groups = 1 + i % 2 if head_ranks > 1 else (1, 2, 4)[i % 3]
                head_groups = math.gcd(head_groups, kv_heads // head_ranks)
                f = legal[(count + i) % len(legal)]
                dp, part = world // sp, 24 // sp
                rows = 8 // dp // several
                chunks = -(-rows * part // chunk)
                activations = offload.ActivationPlan(
                    5, chunks, resident, min(kept, resident * chunks),
                    eighths * chunks * (5 - resident) // 8, dropped, stride)
                op = attention.Ulysses("cpu", sp, groups, stream, head_groups, poison=True,
                                       ring=ring)
                model, states = build(torch.float64, several, f, True, op, groups=groups,
                                      num_chunks=chunks, poison=True,
                                      layout=("intra", "inter")[i % 2])
                offload.ChunkedLayers(model, (rows, part), activations, chunk, cpu, torch.float64,
                                      poison=True)
                mine = slice(rank // sp * 8 // dp, (rank // sp + 1) * 8 // dp)
                positions = attention.sequence_positions(24, sp, ring, rank % sp)
                run = make_run(SMALL, 24, world, document_token=END)
                run = run.but(rank=rank, plan=dataclasses.replace(run.plan, sp=sp,
                                                                  micro_batch=rows))
                case = (kv_heads, sp, ring, head_groups, activations, chunk, f, several,
                        in_documents)
                if in_documents:
                    steps = [documents_of(rows_of_step, mine, run) for rows_of_step in windows]
                else:
                    steps = [tokens_of(*step, mine, positions, several) for step in batch]

                def evaluate(i, parts):
                    with torch.no_grad():
                        model(*next(parts.micro_batches()))

                equals_plain(model, states, steps, alone if in_documents else whole, case, evaluate)
                count += 1
    print(f"rank {rank}: {count} cases equal", flush=True)
    os._exit(0)


def ring_worker():
    """Runs under torchrun: attention alone over rings x ranks by heads x head groups, of one and of
    two sequences, twice each, against one process; what was used is poisoned."""
    torch.set_num_threads(1)
    rank, world, _ = train.start_ranks(100)
    groups, stream = attention.Groups(), attention.CommStream(torch.device("cpu"))
    plain, count = attention.Attention("cpu"), 0
    for (heads, kv_heads), ring, head_ranks, head_groups, batch in itertools.product(
            ((6, 6), (12, 4), (8, 1)), (2, 4, 8), (1, 2, 3, 4), (1, 2), (1, 2)):
        sp = ring * head_ranks
        if world % sp or kv_heads % (head_ranks * head_groups):
            continue
        rng = torch.Generator().manual_seed(count)
        q, k, v, do = (torch.randn(batch, 48, n, 4, dtype=torch.float64, generator=rng)
                       for n in (heads, kv_heads, kv_heads, heads))
        o, lse = plain.forward(q, k, v)
        want = o, *plain.backward(do, q, k, v, o, lse)
        op = attention.Ulysses("cpu", sp, groups, stream, head_groups, poison=True, ring=ring)
        here = attention.sequence_positions(48, sp, ring, rank % sp)
        mine = [t[:, here].contiguous() for t in (q, k, v)]
        for prefetches in (False, True):
            o, lse = op.forward(*mine)
            prefetched = op.prefetch_backward(*mine, o) if prefetches else None
            op.prefetch_do(prefetched, do[:, here])
            found = o, *op.backward(do[:, here], *mine, o, lse, prefetched)
            for a, b in zip(found, want):
                case = heads, kv_heads, ring, head_ranks, head_groups, batch
                assert relative(a, b[:, here]) < 1e-12, case
        count += 1
    print(f"rank {rank}: {count} rings equal", flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks, count", [(4, 26), (8, 44)])
def test_rings_equal_one_process(ranks, count, tmp_path):
    text = run([], ranks, "import test_all; test_all.ring_worker()", tmp=tmp_path)
    assert text.count(f"{count} rings equal") == ranks


PIPELINE_PLANS = (  # what layers keep: (resident, eighths swapped, kept, dropped, stride)
    "all", "input", (2, 3, 4, 0, 1), (2, 2, 0, 1, 1), (2, 1, 0, 1, 2))


def pipelined(case, groups, cpu, cfg, seq):
    """Return a stage of a model that is cut as a case says, its states, and its op."""
    pp, chunks, several, sp, mode, head_groups, f, layout, keep, rows = case
    stage, stream = groups.stage, attention.CommStream(cpu)
    op = attention.Ulysses("cpu", sp, groups, stream, head_groups, poison=True)
    with torch.device("meta"):
        model = m.LLaMA(cfg, op)
    columns = PoisonedColumns(mode, groups, stream)
    parallel.split_columns(model, columns)
    parts = parallel.keep_stage(model, stage, pp, chunks)
    runners = [{"all": m.whole_layers, "input": offload.recomputed_layers}.get(keep)] * chunks
    pieces = 1
    if not isinstance(keep, str):
        resident, eighths, kept, dropped, stride = keep
        pieces = 3
        chunk = rows * seq // sp // pieces
        order = parallel.pipeline_order(stage, pp, chunks, several)
        for v, part in enumerate(parts):
            n = len(part)
            k = max(min(resident, n), n % stride)
            plan = offload.ActivationPlan(
                n, pieces, k, 0 if stride > 1 else min(kept, k * pieces),
                0 if stride > 1 else eighths * pieces * (n - k) // 8,
                min(dropped, n), stride if (n - k) % stride == 0 else 1)
            offload.ChunkedLayers(model, (rows, seq // sp), plan, chunk, cpu, torch.float64,
                                  parallel.in_flight(order, v), part, poison=True)
            runners[v] = model.layer_runner
    states = shard.States(model, cpu, torch.float64, several, f, layout, groups,
                          gather_layers=keep != "all", num_chunks=pieces, poison=True)
    for name, shape in model.shapes.items():
        states.load(name, m.initial_weight(cfg, name, shape, 0, cpu))
    pipeline = PoisonedPipeline(model, parts, runners, groups, several, columns.between_layers,
                                cpu, torch.float64)
    return pipeline, states


class PoisonedColumns(parallel.Columns):
    """What was sent becomes NaN after use, and what was gathered."""

    def scatter(self, x):
        wait = super().scatter(x)
        sent = wait.__self__.sent

        def arrived():
            part = wait()
            sent.fill_(torch.nan)
            return part

        return arrived


class PoisonedSplit(parallel.Split):
    def __init__(self, kind, columns):
        super().__init__(kind, columns)
        self.columns = columns

    def used(self, x, dy=None):
        """x is not, if backward needs it."""
        gather = self.columns.gather
        if not isinstance(self.columns, PoisonedColumns):
            return
        if self.input == gather and (dy is not None or not self.keeps_input):
            x.fill_(torch.nan)
        if self.output_grad == gather and dy is not None:
            dy.fill_(torch.nan)


parallel.Split = PoisonedSplit


class PoisonedPipeline(parallel.Pipeline):
    """What was received becomes NaN after use."""

    def run_forward(self, this, x, *more):
        live = super().run_forward(this, x, *more)
        live.received = x
        return live

    def run_backward(self, this, there, dy):
        dx = super().run_backward(this, there, dy)
        for received in (there.received, dy):
            if received is not None:
                received.fill_(torch.nan)
        return dx


def pipeline_worker():
    """Runs under torchrun: stages x parts x micro-batches x ranks of a sequence x tensor modes x
    factors x what layers keep, three steps each, against one plain process. Messages are poisoned
    when they were read, and late."""
    torch.set_num_threads(1)
    rank, world, _ = train.start_ranks(100)
    cpu, seq = torch.device("cpu"), 24
    global SMALL
    SMALL = dataclasses.replace(SMALL, dim=24, heads=8, kv_heads=4, ffn=40, vocab=67, head_dim=4,
                                layers=5 if world == 2 else 9, qkv_bias=True)
    batch = [example(batch=8, seq=seq, vocab=67, seed=i) for i in range(STEPS)]
    known = train_plainly(batch)
    late = random.Random(rank)
    launch = parallel.Link.launch

    def launch_late(link, tensor):
        if link.leaves and late.random() < 0.2:
            time.sleep(0.003)
        return launch(link, tensor)

    parallel.Link.launch = launch_late
    made = {(pp, tp): attention.Groups(pp=pp, tp=tp) for pp in (2, 4, 8) for tp in (1, 2)
            if pp * tp <= world}

    def fits(pp, chunks, several, layout, sp, mode, keep):
        groups = made.get((pp, 2 if mode else 1))
        if groups is None or pp * chunks > SMALL.layers or groups.ranks % sp:
            return False
        return (8 % (groups.ranks // sp * several) == 0
                and parallel.no_order(pp, chunks, several) is None)

    always = dict(pp=(2, 4, 8), chunks=(1, 2), several=(1, 2, 4), layout=("intra", "inter"))
    rows = cover(fits, **always, sp=(1, 2, 4), mode=("",), keep=PIPELINE_PLANS)
    rows += cover(fits, **always, sp=(1,), mode=("mtp", "msp", "fsp"), keep=("all", "input"))
    count = 0
    every = 1 if ALL_COMBINATIONS else {2: 1, 4: 2, 8: 3}[world]
    for i, (pp, chunks, several, layout, sp, mode, keep) in enumerate(rows[::every]):
        groups = made[pp, 2 if mode else 1]
        legal = shard.legal_factors(groups.ranks, groups.ranks)
        f = legal[i % len(legal)]
        dp = groups.ranks // sp
        head_groups = 2 if sp < 4 and not mode and (not isinstance(keep, str) or i % 2) else 1
        case = pp, chunks, several, sp, mode, head_groups, f, layout, keep, 8 // dp // several
        pipeline, states = pipelined(case, groups, cpu, SMALL, seq)
        r = groups.rank
        mine = slice(r // sp * 8 // dp, (r // sp + 1) * 8 // dp)
        positions = torch.arange(seq).chunk(sp)[r % sp]

        def evaluate_and_warm_up(i, parts):
            if i == 1:
                losses = pipeline(*next(parts.micro_batches()))
                assert losses.isfinite().all() and losses.any() == (groups.stage == pp - 1)
                pipeline.warm_up(next(parts.micro_batches()))

        steps = [tokens_of(*step, mine, positions, several) for step in batch]
        equals_plain(pipeline, states, steps, known, case, evaluate_and_warm_up)
        count += 1
    print(f"rank {rank}: {count} cases equal", flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pipelines_equal_one_process(ranks, tmp_path):
    text = run([], ranks, "import test_all; test_all.pipeline_worker()", tmp=tmp_path)
    assert len(re.findall(r"rank \d: [1-9]\d* cases equal", text)) == ranks


@pytest.mark.parametrize("stages, micro_batches, chunks", [(2, 4, 2), (4, 8, 2), (4, 8, 4)])
def test_pipeline_order_is_torchs(stages, micro_batches, chunks):
    from torch.distributed.pipelining import schedules
    for stage in range(stages):
        theirs = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
        vars(theirs).update(n_local_stages=chunks, microbatches_per_round=stages,
                            pp_group_size=stages, _n_microbatches=micro_batches)
        found = [(one.computation_type == schedules.FORWARD, one.microbatch_index,
                  one.stage_index // stages)
                 for one in theirs._calculate_single_rank_operations(stage) if one]
        ours = parallel.pipeline_order(stage, stages, chunks, micro_batches)
        assert [(one.forward, one.micro_batch, one.chunk) for one in ours] == found


def test_pipeline_bubbles_are_the_formulas():
    """No order waits for ever, each pass comes once, and of equal passes a stage is idle as long as
    the formula says."""
    for case in itertools.product(range(2, 6), (1, 2, 3), (1, 2, 4, 5, 6, 8)):
        if parallel.no_order(*case):
            continue
        stages, chunks, several = case
        orders = [parallel.pipeline_order(s, *case) for s in range(stages)]
        for order in orders:
            assert len(set(order)) == len(order) == 2 * chunks * several
        times = parallel.run_times(orders, [1] * stages * chunks, [2] * stages * chunks)
        whole = max(end for done in times for _, end in done)
        busy = 3 * chunks * several
        assert 1 - busy / whole == pytest.approx(parallel.bubble(*case)), case
    assert parallel.draw_order(2, 1, 2).splitlines() == [
        "  stage 0  01..aa.bb", "  stage 1  .0aa1bb.."]
    with pytest.raises(ValueError, match="wait for each other"):
        parallel.run_times([order[::-1] for order in orders], [1] * 15, [2] * 15)


@pytest.mark.parametrize("seq, sp, ring", [(24, 1, 1), (24, 4, 1), (24, 4, 2), (24, 6, 2),
                                           (48, 8, 8), (48, 6, 2), (45, 3, 1), (72, 12, 4)])
def test_parts_of_a_sequence_are_all_of_it(seq, sp, ring):
    """Each token once; and of the causal triangle each ring rank as much as any other."""
    of_rank = [attention.sequence_positions(seq, sp, ring, r).tolist() for r in range(sp)]
    assert sorted(i for tokens in of_rank for i in tokens) == list(range(seq))
    assert all(tokens == sorted(tokens) and len(tokens) == seq // sp for tokens in of_rank)
    if ring > 1:
        by_ring = [of_rank[i : i + sp // ring] for i in range(0, sp, sp // ring)]
        assert len({sum(i for tokens in ranks for i in tokens) for ranks in by_ring}) == 1


@pytest.mark.parametrize("ranks, count", [
    (2, 20), (4, 40 if ALL_COMBINATIONS else 20)])
def test_sequences_and_chunks_equal_one_process(ranks, count, tmp_path):
    text = run([], ranks, "import test_all; test_all.sequence_worker()", tmp=tmp_path)
    assert text.count(f"{count} cases equal") == ranks


def test_fields_that_would_be_dropped_are_refused(tmp_path, monkeypatch, group):
    """A model that a fork has given another field: neither an export nor a resume forgets it."""
    @dataclasses.dataclass(frozen=True)
    class Config(m.ModelConfig):
        span: int = 0

    monkeypatch.setattr(checkpoint, "ModelConfig", Config)
    small = {f.name: getattr(SMALL, f.name) for f in dataclasses.fields(SMALL)}
    assert checkpoint.hf_architecture(Config(**small), {}) == "llama"
    with pytest.raises(ValueError, match="config.json has no key for span=64"):
        checkpoint.hf_architecture(Config(**small, span=64), {})
    old = tmp_path / "step-00000001"
    old.mkdir()
    meta = {"version": checkpoint.VERSION, "number": 1, "step": 1, "samples": 1,
            "decay_steps": 1, "threads": 1, "source": {}, "data": {}, "files": {}, "tensors": {},
            "model": dataclasses.asdict(SMALL), "config": {"model": "tiny", "init": "random"}}
    checkpoint.write_meta(old, meta)
    found = checkpoint.find_checkpoint(tmp_path, str(old))
    assert found.folder == old
    checkpoint.check_same_model(found, Config(**small), set())
    with pytest.raises(ValueError, match=r"another model: span 0 \(here 64\)"):
        checkpoint.check_same_model(found, Config(**small, span=64), set())
    meta["model"]["experts"] = 8
    checkpoint.write_meta(old, meta)
    with pytest.raises(ValueError, match=r"another model: experts 8 \(here unknown\)"):
        checkpoint.check_same_model(checkpoint.open_checkpoint(old), Config(**small), set())


class QKNormBlock(m.Block):
    """What a fork changes: norms on q and k, biases on all of them, and a norm behind the layer."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.q_norm, self.k_norm = m.Vector(cfg.head_dim), m.Vector(cfg.head_dim)
        self.last_norm = m.Vector(cfg.dim)
        self.bias = m.Vector(self.qkv.shape[0])

    def pre(self, x, rope):
        qkv = m.norm_linear(x, self.norm1, self.qkv, 1e-5) + self.bias.weight.to(x.dtype)
        heads = self.cfg.heads, self.cfg.kv_heads, self.cfg.kv_heads
        q, k, v = qkv.unflatten(-1, (sum(heads), -1)).split(heads, 2)
        q, k = (m.rms_norm(t, n.weight, 1e-5) for t, n in ((q, self.q_norm), (k, self.k_norm)))
        return m.rotate(q, rope), m.rotate(k, rope), v.contiguous()

    def post(self, x, o):
        return torch.tanh(m.rms_norm(super().post(x, o), self.last_norm.weight, 1e-5)) + x


def tensor_worker():
    """Runs under torchrun: modes x factors x layouts x micro-batches x recomputation x degrees and
    rings of a sequence, of models with and without biases and norms on q and k, and of documents,
    against one plain process. What was sent, gathered or used is poisoned."""
    torch.set_num_threads(1)
    rank, world, _ = train.start_ranks(100)
    global SMALL
    cpu, count = torch.device("cpu"), 0
    for tp in (n for n in (2, 4) if n <= world):
        groups = attention.Groups(tp=tp)
        ranks = world // tp
        column = groups.place(rank)[2]
        count_of_step = max(2, ranks)
        batch = [example(batch=count_of_step, seq=24, vocab=67, seed=i) for i in range(STEPS)]
        windows = [with_documents(count_of_step, 24, 67, seed=i) for i in range(STEPS)]
        heads, kv_heads = (3, 1) if ranks == 1 else (4, 2)  # of a column
        small = dataclasses.replace(SMALL, dim=24, heads=heads * tp, kv_heads=kv_heads * tp,
                                    ffn=20 * tp, vocab=67, head_dim=4)
        models = {"plain": small, "norms": dataclasses.replace(small, qkv_bias=True, qk_norm=True),
                  "documents": dataclasses.replace(small, qkv_bias=True)}
        wanted = {}
        for kind, SMALL in models.items():
            if kind == "documents":
                wanted[kind] = train_plainly(windows, lambda *args: each_document_alone(*args)[1])
            else:
                wanted[kind] = train_plainly(batch)
        degrees = [(sp, ring) for sp in (1, 2, 4) for ring in (1, 2, 4)
                   if ranks % sp == 0 and sp % ring == 0 and kv_heads * ring % sp == 0]
        rows = cover(mode=parallel.MODES, factors=shard.legal_factors(ranks, ranks),
                     layout=("inter", "intra")[:ranks], size=(1, 2), recompute=(False, True),
                     degrees=degrees, kind=models)
        rows = [row for row in rows if row[-1] != "documents" or row[-2][1] == 1]
        for mode, f, layout, size, recompute, (sp, ring), kind in rows:
            each = count_of_step * sp // ranks  # sequences of a rank
            size = min(size, each)
            several = each // size
            SMALL = models[kind]
            stream = attention.CommStream(cpu)
            op = attention.Ulysses("cpu", sp, groups, stream, poison=True, ring=ring)
            columns = PoisonedColumns(mode, groups, stream)
            model, states = build(torch.float64, several, f, recompute, op, columns, groups=groups,
                                  layout=layout, poison=True, bucket_bytes=8000)
            run = make_run(SMALL, 24, world, document_token=END)
            run = run.but(rank=rank, plan=dataclasses.replace(
                run.plan, sp=sp, ring=ring, tp=tp, tp_mode=mode, micro_batch=size))
            stage, data_rank, sp_rank, found = run.coordinates
            assert (stage, found) == (0, column)
            mine = slice(data_rank * each, (data_rank + 1) * each)
            here = attention.sequence_positions(24, sp, ring, sp_rank)
            case = tp, mode, f, layout, several, recompute, sp, ring, kind
            if kind == "documents":
                steps = [documents_of(rows_of_step, mine, run) for rows_of_step in windows]
            else:
                steps = [tokens_of(*step, mine, here, several,
                                   functools.partial(train.own_labels, run=run)) for step in batch]

            def evaluate(i, parts):
                if i != 1:
                    return
                first = next(parts.micro_batches())
                with torch.no_grad():
                    losses = model(*first, each=True)
                    assert losses.shape == first[1].shape
                    assert abs(losses.sum() * first[2] - model(*first)) < 1e-12, case

            equals_plain(model, states, steps, wanted[kind], case, evaluate)
            count += 1
    print(f"rank {rank}: {count} cases equal", flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks", [2, 4] + [8] * ALL_COMBINATIONS)
def test_tensor_modes_equal_one_process(ranks, tmp_path):
    text = run([], ranks, "import test_all; test_all.tensor_worker()", tmp=tmp_path)
    counts = re.findall("rank [0-9]+: ([0-9]+) cases equal", text)
    assert len(counts) == ranks and min(map(int, counts)) > 10, text[-3000:]


def test_tensor_checkpoints_fit_each_other(tmp_path):
    """Saved by columns and stages; resumed, evaluated and exported by others, and by none."""
    code = "from model import MODELS, ModelConfig\n"
    code += "MODELS['tiny'] = ModelConfig(256, 48, 2, 8, 4, 80, 8, qkv_bias=True)\n"
    code += "train.EVAL_SEQUENCES = 5\n"
    code += "train.draw_losses = lambda out: None"  # which takes longer than the steps
    args = [*QUICK, "--dtype", "fp64", "--micro-batch", "1", "--keep", "99", "--steps", "4",
            "--eval-every", "4", "--save-every", "1", "--data", HERE / "test_all.py"]
    run([*args, "--out", tmp_path / "a", "--export", tmp_path / "x"], 0, code)
    want, rows = losses(tmp_path / "a"), log(tmp_path / "a")
    last = tmp_path / "a" / "step-00000001"
    others = [(1, 2, "--tp 2 --tp-mode mtp"),  # the step that it resumes, ranks, flags
              (2, 4, "--tp 2 --sp 2 --p 2 --os-layout inter --recompute full --save-async"),
              (3, 4, "--tp 2 --tp-mode fsp --pp 2 --os-place host"),
              (3, 2, "--pp 2 --os-layout inter"), (3, 0, "")]
    for i, (step, ranks, flags) in enumerate(others):
        out, export = tmp_path / f"o{i}", tmp_path / f"x{i}"
        text = run([*args, *flags.split(), "--out", out, "--resume", last, "--export", export],
                   ranks, code)
        assert ("layers: " in text) == ("--tp" in flags) and ("idle" in text) == ("--pp" in flags)
        for a, b in zip(want[step:], losses(out), strict=True):
            assert a == pytest.approx(b, rel=1e-11), flags
        for a, b in zip([r for r in rows if "val_loss" in r and r["step"] > step], [
                         r for r in log(out) if "val_loss" in r], strict=True):
            assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-11), flags
            parts = zip(a["val_loss_by_position"], b["val_loss_by_position"], strict=True)
            assert all(x == pytest.approx(y, rel=1e-11) for x, y in parts), flags
        if step < 3:
            last = out / f"step-{step + 1:08d}"
        a, b = (checkpoint.hf_open(x, checkpoint.hf_config(x)) for x in (tmp_path / "x", export))
        for name in m.LLaMA(checkpoint.hf_config(export)).shapes:
            assert relative(a(name), b(name)) < 1e-11, (flags, name)


@pytest.mark.parametrize("cuts, message", [
    ([[[[0, 2], [4, 6]], [0, 4]], [[[2, 4]], [0, 4]]], ""),
    ([[[[0, 6]], [0, 2]], [[[0, 6]], [2, 4]]], ""),
    ([[[[0, 6]], [0, 2]], [[[0, 6]], [1, 3]]], "columns 1 to 3 of .6, 4. are there twice"),
    ([[[[0, 2]], [0, 4]], [[[4, 6]], [0, 4]]], "cuts have 16 elements of .6, 4."),
    ([[[[0, 6]], [0, 2]], [[[0, 6]], [2, 5]]], "columns 2 to 5 of .6, 4."),
    ([[[[0, 6]], [0, 4]], None], "cut parts of .6, 4., and others"),
    ([[[[0, 6]], [0, 2]], [[[0, 6], [6, 6]], [2, 4]]], "rows 6 to 6"),
    ([[[[0, -6]], [0, 4]]], "no counts"), ([[[[0, 6]]]], "not enough values"), ([3], "int")])
def test_cuts_of_a_checkpoint_are_a_matrix(cuts, message):
    """Each element once; each cut by parts that follow each other."""
    file, parts = "rank-00000.safetensors", []
    for cut in cuts:
        count = 8
        with contextlib.suppress(TypeError, ValueError, IndexError):
            count = sum(b - a for a, b in cut[0]) * (cut[1][1] - cut[1][0]) // 2
        parts += [{"file": file, "offset": 0, "start": start, "count": count, "crc32": [0]}
                  | ({"cut": cut} if cut else {}) for start in (0, count)]
    files, entry = {file: {"bytes": 999}}, {"dtype": "F32", "shape": [6, 4], "parts": parts}
    if message:
        with pytest.raises((ValueError, TypeError), match=message):  # read_meta makes them one
            checkpoint.read_tensor(files, entry)
        return
    checkpoint.read_tensor(files, entry)
    parts[-1]["start"] -= 1
    with pytest.raises(ValueError, match="after element"):
        checkpoint.read_tensor(files, entry)
    del parts[-1]
    with pytest.raises(ValueError, match="elements of Cut"):
        checkpoint.read_tensor(files, entry)


def random_vectors(name, shape):
    """Norms and biases that are not what they begin with, the same on every rank."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(name))) + 0.5


def forked_block_worker():
    """Runs under torchrun: a changed block, and this one with biases and norms on q and k, under
    plain autograd and in chunks, sharded."""
    torch.set_num_threads(1)
    rank, world, _ = train.start_ranks(100)
    small = dataclasses.replace(SMALL, dim=24, heads=4, kv_heads=2, ffn=40, vocab=67, layers=4)
    ours = dataclasses.replace(small, qkv_bias=True, qk_norm=True)
    saves = offload.block_saves(small, 6, torch.float64, QKNormBlock)
    assert saves.final_matrix is None and len(saves.pre) == 2, saves  # q and k before their norms
    saves = offload.block_saves(small, 6, torch.float64)
    for field in ("qkv_bias", "qk_norm"):  # keep no more than a plain layer
        assert offload.block_saves(dataclasses.replace(small, **{field: True}), 6,
                                   torch.float64) == saves and not saves.pre
    ways = [changed_block(block, cfg, rank, world)
            for block, cfg in ((QKNormBlock, small), (m.Block, ours))]
    print(f"rank {rank}: {ways} ways equal", flush=True)
    os._exit(0)


def changed_block(block: type, cfg: m.ModelConfig, rank: int, world: int) -> int:
    """Return in how many ways a block's gradients are those of plain autograd."""
    global SMALL
    SMALL = cfg
    m.Block, cpu, groups = block, torch.device("cpu"), attention.Groups()
    tokens, labels = example(batch=2, seq=24, vocab=67)
    scale = 1 / (labels != m.IGNORE).sum().double()
    part, cut = 24 // world, slice(rank * 24 // world, (rank + 1) * 24 // world)
    plans = {"plain": None, "full": None, "keep": (4, 4, 99), "recompute": (4, 4, 0),
             "swap": (4, 2, 8, 8), "some": (4, 2, 3, 3), "without o": (4, 2, 3, 3, 2),
             "without x": (4, 2, 0, 0, 0, 2)}
    want = None
    for kind, plan in plans.items():
        op = attention.Ulysses("cpu", world, groups, attention.CommStream(cpu), 1)
        f = shard.Factors(world, world, world)
        model, states = build(torch.float64, 1, f, plan is not None or kind == "full", op,
                              groups=groups, num_chunks=4 if plan else 1, poison=True)
        for name, p in model.named_parameters():
            if p.dim() == 1:
                states.load(name, random_vectors(name, p.shape))
        if plan:
            kept = offload.ActivationPlan(4, *plan)
            offload.ChunkedLayers(model, (2, part), kept, part // 2, cpu, torch.float64,
                                  poison=True)
        for step in range(2):
            parts = in_parts(tokens[:, cut], labels[:, cut], 1, scale, torch.arange(24)[cut])
            train.run_step(model, states, parts, None, 0.0)
            grads = {s.name: s.owned_grad.clone() for s in states.sharded_params.values()}
            grads["vectors"] = states.vector_grad.clone()
            states.update(1e-2, 0.0)
        if want is None:
            want = grads
        for name, grad in grads.items():
            assert grad.isfinite().all() and relative(grad, want[name]) < 1e-12, (kind, name)
    if world == 1:  # and plain autograd alone, without states, kernels and chunks
        plain = m.LLaMA(SMALL).double()
        for name, p in plain.named_parameters():
            p.data.copy_(m.initial_weight(SMALL, name, p.shape, 0, cpu) if p.dim() > 1 else
                         random_vectors(name, p.shape))
        states.begin_step()
        for name, p in plain.named_parameters():
            states.load(name, p.detach())
        states.loaded()
        model(tokens, labels, scale).backward()
        plain(tokens, labels, scale).backward()
        for name, p in plain.named_parameters():
            if p.dim() > 1:
                got = states.by_name[name].grad_shard[: p.numel()].view(p.shape)
                assert relative(got, p.grad) < 1e-12, name
    return len(plans)


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_block_changes_the_block_alone(ranks, tmp_path):
    """What a fork relies on: norms, biases and an end of the layer that nothing outside knows are
    right in chunks that are kept, swapped and recomputed, and where o or x is dropped; poisoned."""
    text = run([], ranks, "import test_all; test_all.forked_block_worker()", tmp=tmp_path)
    assert text.count("[8, 8] ways equal") == ranks


def test_forgotten_activations_are_freed(group):
    """A forward without a backward (out of memory, say) and one with it leave nothing behind: what
    autograd saves does not hold what holds its graph."""
    model = m.LLaMA(SMALL, attention.Attention("cpu"))
    model.init_weights(0)
    plan = offload.ActivationPlan(SMALL.layers, 4, SMALL.layers, 5)
    layers = offload.ChunkedLayers(model, (2, 20), plan, 10, torch.device("cpu"), torch.float32)
    made, forward = [], layers.forward

    def spy(batch, i, x, needs_backward):
        y = forward(batch, i, x, needs_backward)
        assert not any(t.requires_grad for t in batch.saved[i].tensors())  # nor hold a graph
        made.extend([weakref.ref(batch.saved[i]), *map(weakref.ref, batch.saved[i].tensors())])
        return y

    layers.forward = spy
    for backward in (True, False):
        loss = model(*example(seq=20))
        if backward:
            loss.backward()
        assert len(made) > 8 and any(ref() is not None for ref in made) != backward
        del loss
        gc.collect()
        assert all(ref() is None for ref in made)
        made.clear()


class Gates(m.Block):
    """Saves several views of one tensor."""

    def post(self, x, o):
        y = super().post(x, o)
        gate = torch.sigmoid(y[..., :2])
        return y * gate[..., :1].expand_as(y) + x * gate[..., 1:].expand_as(x)


class Complex(m.Block):
    """Saves x as another dtype."""

    def post(self, x, o):
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return super().post(x, o) + torch.view_as_real(z * z).flatten(-2)


class Transposed(m.Block):
    """Returns what is not contiguous, and saves a square and its transpose."""

    def post(self, x, o):
        y = super().post(x, o)
        square = y[..., :36].unflatten(-1, (6, 6))
        y = y + (square @ square.transpose(-1, -2)).sum((-1, -2))[..., None]
        return y.transpose(-1, -2).contiguous().transpose(-1, -2)


class PassesOn(m.Block):
    """Hands its gradient on as it is, and its output does not end in SwiGLU's product."""

    def post(self, x, o):
        return x + self.out(o.flatten(2))


class Forgets(m.Block):
    """Does not use its input."""

    def post(self, x, o):
        return self.out(o.flatten(2))


class Nested(m.Block):
    """Has matrices of one name and size."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.a, self.b = (torch.nn.ModuleDict({"proj": m.Matrix(cfg.dim, cfg.dim)}) for _ in "ab")

    def post(self, x, o):
        y = super().post(x, o)
        return y + self.b["proj"](torch.tanh(self.a["proj"](y)))


@pytest.mark.parametrize("block", [Gates, Complex, Transposed, PassesOn, Forgets, Nested])
def test_blocks_that_save_what_nobody_guessed(block, monkeypatch, group):
    """In chunks as under plain autograd, with a skip connection around two layers, of a model whose
    class is not model.Block any more, and whose embedding is frozen."""
    cfg, cpu = dataclasses.replace(SMALL, layers=4), torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(m, "Block", block)
        models = [m.LLaMA(cfg, attention.Attention("cpu")).double() for _ in range(2)]
    for model in models:
        model.init_weights(0)
    plain, model = models
    x = torch.randn(1, 20, cfg.dim).double()
    rope = m.rope_tables(cfg, torch.arange(20), torch.float64)

    def gradients(model, run_layer, seen):
        y = run_layer(0, x.clone())  # which needs no gradient: its weights do
        y.register_hook(lambda dy: seen.append(dy.clone()))
        z = run_layer(3, run_layer(2, run_layer(1, y))) + y
        (z * torch.arange(20).view(1, 20, 1)).sum().backward()
        grads = {n: p.grad for n, p in model.blocks.named_parameters() if p.grad is not None}
        for p in model.parameters():
            p.grad = None
        return grads

    dy_plain, seen = [], []
    want = gradients(plain, m.whole_layers(plain, rope, plain.attention), dy_plain)
    plans = {10: [(2, 4, 8), (2, 4, 0), (2, 2, 4, 4), (2, 2, 1, 1, 1), (2, 2, 0, 0, 0, 2)],
             20: [(1, 4, 4), (1, 2, 2, 2), (1, 4, 0, 0, 3, 4)]}
    for chunk, plan in [(c, p) for c in plans for p in plans[c]]:
        layers = offload.ChunkedLayers(model, (1, 20), offload.ActivationPlan(4, *plan), chunk, cpu,
                                       torch.float64)  # the skip reads what poison would spoil
        got = gradients(model, layers.start(model, rope, model.attention), seen)
        assert got.keys() == want.keys()
        for name, grad in got.items():
            assert relative(grad, want[name]) < 1e-12, (chunk, plan, name)
        assert relative(seen[-1], dy_plain[0]) < 1e-12
    got = gradients(model, offload.recomputed_layers(model, rope, model.attention), seen)
    assert all(relative(grad, want[name]) < 1e-12 for name, grad in got.items())
    if block is Nested:  # no two matrices of a layer share a buffer
        with torch.device("meta"), monkeypatch.context() as patch:
            patch.setattr(m, "Block", block)
            sharded = m.LLaMA(cfg)
        states = shard.States(sharded, cpu, torch.bfloat16, num_chunks=2)
        for unit in states.units:
            assert len({id(p.unsharded_grad) for p in unit}) == len(unit)


@pytest.mark.parametrize("plan", [(3, 5, 1), (0, 0, 0, 2), (0, 0, 3, 2)])
def test_several_micro_batches_in_flight(plan, group):
    """Forward, forward, backward, backward, as pipelines run them: state belongs to a micro-batch
    and a layer. More than there are host buffers for are refused."""
    grads = []
    cfg = dataclasses.replace(SMALL, layers=4)
    for in_flight in (1, 2):
        model = m.LLaMA(cfg, attention.Attention("cpu")).double()
        model.init_weights(0)
        activations = offload.ActivationPlan(4, 4, 2, *plan)
        offload.ChunkedLayers(model, (2, 20), activations, 10, torch.device("cpu"), torch.float64,
                              in_flight=in_flight, poison=True)
        scale = torch.ones(()).double()
        batches = [example(seq=20, seed=i) for i in range(4)]
        for pair in (batches[:2], batches[2:]):
            if in_flight == 2:  # the first in, the first out
                for loss in [model(*batch, scale) for batch in pair]:
                    loss.backward()
            else:
                for batch in pair:
                    model(*batch, scale).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert relative(grads[1][name], grad) < 1e-14, name
    waiting = [model(*batches[0], scale)]
    model(*batches[0], scale)  # is forgotten at once, so its host buffers are free again
    waiting.append(model(*batches[1], scale))
    with pytest.raises(RuntimeError, match="2 forward passes wait.*in_flight=2"):
        model(*batches[2], scale)


# ---------------------------------------------------------------------------- planned memory


def random_buffers(n: int, seed: int) -> list[memplan.Buffer]:
    rng = random.Random(seed)
    return [memplan.Buffer(start, start + rng.randint(1, 6), rng.randint(1, 50))
            for start in rng.choices(range(12), k=n)]


def best_peak(left: list[memplan.Buffer], placed: tuple = (), best: float = math.inf) -> float:
    """Return the least peak of first fits in all orders: the order of a best plan's addresses is
    among them. placed: (address, buffer); best: of the orders tried so far."""
    if not left:
        return min(best, max(low + b.size for low, b in placed))
    for i, b in enumerate(left):
        at = 0
        for low, other in sorted(placed):
            if b.start < other.end and other.start < b.end:
                if low - at >= b.size:
                    break
                at = max(at, low + other.size)
        if at + b.size < best:
            best = best_peak(left[:i] + left[i + 1 :], (*placed, (at, b)), best)
    return best


def is_plan(buffers: list[memplan.Buffer], offsets: list[int], peak: int) -> bool:
    """Return whether no two overlap, and none leaves [0, peak): the definition, pair by pair."""
    placed = list(zip(buffers, map(int, offsets), strict=True))
    apart = all(a.end <= b.start or b.end <= a.start or x + a.size <= y or y + b.size <= x
                for (a, x), (b, y) in itertools.combinations(placed, 2))
    return apart and all(0 <= x <= peak - b.size for b, x in placed)


# start, end and size of buffers that no plan stacks without a hole: their best peak is above the
# largest sum that is alive, 136, and below that of first fits
HOLES = [memplan.Buffer(*box) for box in (
    (3, 6, 61), (1, 4, 31), (2, 4, 44), (1, 3, 8), (0, 2, 97), (0, 1, 39), (2, 3, 53), (4, 6, 75))]


LARGE = [b._replace(size=b.size * 10**9 + i) for i, b in enumerate(HOLES)]


@pytest.mark.parametrize("buffers", [HOLES, LARGE,
                                     *(random_buffers(3 + n % 5, n) for n in range(12))])
def test_memory_plans_are_the_best(buffers):
    """And proved so, to what floating point tells apart: no bound is above the best."""
    plan = memplan.solve(buffers, time_limit=20)
    assert is_plan(buffers, plan.offsets, plan.peak)
    assert plan.peak == best_peak(buffers) >= plan.lower_bound > 0.9999 * plan.peak


def test_memory_plan_checker_is_the_definition():
    rng, seen = random.Random(0), set()
    for seed in range(2000):
        buffers = random_buffers(rng.randint(1, 6), seed)
        offsets = [rng.randrange(120) for _ in buffers]
        good = is_plan(buffers, offsets, 150)
        seen.add(good)
        with contextlib.nullcontext() if good else pytest.raises(ValueError, match="overlap|leave"):
            memplan.check(buffers, offsets, 150)
    assert seen == {True, False}
    many = [memplan.Buffer(i, i + 9000, 8) for i in range(18000)]  # 9,000 are alive together
    offsets = [8 * (i % 9000) for i in range(18000)]  # each where the one 9,000 before it has gone
    memplan.check(many, offsets, 72000)
    for i, shift in ((17191, 1), (17192, -1)):
        moved = [*offsets[:i], offsets[i] + shift, *offsets[i + 1 :]]
        with pytest.raises(ValueError, match=f"buffers {i + shift - 9000 * (shift > 0)} and"):
            memplan.check(many, moved, 72000)


def test_memory_plan_of_two_levels():
    """Nine equal passes, each at its best, and a buffer that outlives them: Memo's two levels."""
    buffers = [memplan.Buffer(0, 90, 17)]
    for start in range(0, 90, 10):
        buffers += [memplan.Buffer(start + b.start, start + b.end, b.size, f"pass {start}")
                    for b in HOLES]
    random.Random(0).shuffle(buffers)
    plan = memplan.solve(buffers, time_limit=20)
    assert is_plan(buffers, plan.offsets, plan.peak)
    assert plan.peak == best_peak(HOLES) + 17
    assert plan.method.startswith("two levels") and "first fit: " in str(plan)  # both are said


def test_memory_plan_of_a_first_fit_where_blocks_cost_more():
    """The last buffer fits above what remains of the pass, but not above its block."""
    buffers = [memplan.Buffer(0, 2, 10, "pass"), memplan.Buffer(1, 4, 2, "pass"),
               memplan.Buffer(2, 6, 10)]
    plan = memplan.solve(buffers, time_limit=20)
    assert is_plan(buffers, plan.offsets, 12)
    assert plan.method == "first fit" and "two levels" in str(plan)


@slow
def test_planned_run_is_bit_equal(tmp_path):
    """train.py --memplan on: with sequences over ranks, chunks, evaluation and a checkpoint in
    between, the losses are those without it."""
    args = [*QUICK, "--sp", "2", "--chunk", "16", "--alpha", "0.5", "--eval-every", "5",
            "--save-every", "4", "--out"]
    run([*args, tmp_path / "off"], 2)
    text = run([*args, tmp_path / "on", "--memplan", "on"], 2)
    assert re.search("memory plan of a step: .* buffers, peak .*two levels", text)
    off, on = (log(tmp_path / name) for name in ("off", "on"))
    counts = {row["step"]: row.pop("memplan") for row in on if "memplan" in row}
    assert [*counts] == [4, 5, 6] and min(count["hits"] for count in counts.values()) > 100
    for key in ("loss", "grad_norm", "val_loss"):
        assert [row.get(key) for row in off] == [row.get(key) for row in on], key


def simulated_backward(do, q, k, v, o, lse, mask):
    """The CPU's, requesting what FlashAttention-4's does: its sums of dq, and two rows."""
    grads = attention.KERNELS["cpu"].backward(do, q, k, v, o, lse, mask)
    _ = q.new_empty(q.shape, dtype=torch.float32), lse.clone(), lse.clone()
    return grads


@contextlib.contextmanager
def simulation(running: list):
    """Inside, a step on fake tensors of the CPU, in a process group that sends nothing, requests
    what it does on GPUs. running: a stack, whose last is a token of the fused kernel or side stream
    that would run; what is born and dies in it is left out."""
    @contextlib.contextmanager
    def one_kernel():
        running.append(object())
        try:
            yield
        finally:
            running.pop()

    def after_compute(stream):
        return one_kernel() if stream.overlap else contextlib.nullcontext()

    def map_memory(exchange, elements: int, like: torch.Tensor) -> None:
        exchange.memory = like.new_empty(elements)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_coalescing_manager", lambda *_, **__: contextlib.nullcontext())
        for module in (train, shard):  # nobody else is there
            patch.setattr(module, "on_all_ranks", lambda check: check())
        for module in (m, shard, attention):
            for name, fn in list(vars(module).items()):
                casts_on_a_cpu = name in ("matmul_fp32", "weight_grad_into")
                if getattr(fn, "is_compiled", False) or casts_on_a_cpu:
                    patch.setattr(module, name, one_kernel()(fn))
        for name in ("update_param", "update_vectors"):  # one kernel, if compiled
            patch.setattr(shard.States, name, one_kernel()(getattr(shard.States, name)))
        patch.setattr(attention.CommStream, "after_compute", after_compute)
        patch.setattr(attention.Exchange, "map_memory", map_memory)
        yield


def simulate_step(run: train.Run) -> tuple[list[memplan.Buffer], int]:
    """Return the first rank's buffers in a step on GPUs, as large as are planned, and the bytes of
    what lasts between steps, on fake tensors."""
    running = [None]

    def make():
        groups = train.make_groups(run, {})
        op = train.make_attention(run, groups)
        op.kernel = dataclasses.replace(op.kernel, backward=simulated_backward)
        if run.plan.head_ranks > 1:
            op.exchange.peer_access = op.one_node
        model, states = train.build(run, op, groups)
        shape = (run.plan.micro_batches, run.plan.micro_batch, run.cfg.seq // run.plan.sp)
        tokens = torch.zeros(shape, dtype=torch.int64)
        batch = train.Batch(tokens, tokens, torch.arange(shape[2]),
                            scale=torch.ones((), dtype=states.accum_dtype))
        return lambda: train.run_step(model, states, batch, 1e-4, run.cfg.clip)

    torch.compiler.set_stance("force_eager")
    with simulation(running):
        buffers, lasting = memplan.simulate(
            make, run.world, lambda: running[-1], memplan.MIN_PLANNED_BYTES["cuda"],
            memplan.ALLOCATOR_ALIGN_BYTES["cuda"])
    return buffers, lasting - round(run.plan.host_bytes)  # on the CPU here, too


@pytest.mark.parametrize("kv_heads, groups", [(8, 1), (8, 2), (2, 1), (8, 4)])
def test_places_of_all_to_alls_take_what_is_counted(kv_heads, groups):
    """The memory that ranks of a node map, as a simulated forward makes it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    cfg, sp, tokens = m.ModelConfig(64, 64, 1, 8, kv_heads, 64, 64), 2, 64
    dist.init_process_group("fake", rank=0, world_size=sp, store=FakeStore())
    try:
        stream = attention.CommStream(torch.device("cpu"))
        op = attention.Ulysses("cpu", sp, attention.Groups(), stream, groups, sp)
        op.exchange.peer_access = True
        with simulation([None]):
            op.forward(*(torch.zeros(1, tokens, h, 64) for h in (8, kv_heads, kv_heads)))
        counted = costs.all_to_all_bytes(cfg, tokens, torch.float32, sp, groups)
        assert op.exchange.memory.nbytes == counted > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("alpha, chunks", [(0.5, 2), (0.25, 4), (0.125, 8), (1.0, 1)])
def test_alpha_by_hand_finds_chunks(alpha, chunks):
    """Also where all tokens would run at once."""
    plan = choose(1, 2**20, seq=2**14, sp=1, batch=1, micro_batch=1, alpha=alpha,
                  resident_layers=2)
    assert plan.activations.chunks == chunks and plan.activations.alpha == alpha


def test_alpha_needs_a_layer_that_swaps(monkeypatch, tmp_path):
    monkeypatch.setitem(m.MODELS, "tiny", dataclasses.replace(m.MODELS["tiny"], layers=2))
    with pytest.raises(ValueError, match="--alpha 0.5: the last two layers never swap.* has 2"):
        train.main([*QUICK, "--alpha", "0.5", "--out", str(tmp_path)])


def test_pieces_add_up_in_float32(group):
    """Gradients of bf16 matrices in four pieces: kept in float32, as of two micro-batches (here the
    second has no labels), they are what is kept in bf16, before it is rounded."""
    kept, tokens = [], torch.arange(64).remainder(SMALL.vocab)[None]
    for several in (1, 2):
        with torch.device("meta"):
            model = m.LLaMA(SMALL, attention.Attention("cpu"))
        states = shard.States(model, torch.device("cpu"), torch.bfloat16, several,
                              gather_layers=True, num_chunks=4, poison=True)
        for name, p in model.named_parameters():
            states.load(name, m.initial_weight(SMALL, name, p.shape, 0, "cpu"))
        plan = offload.ActivationPlan(SMALL.layers, 4, SMALL.layers)
        offload.ChunkedLayers(model, (1, 64), plan, 16, torch.device("cpu"), torch.bfloat16)
        for _ in range(2):
            labels = torch.cat([tokens, torch.full_like(tokens, m.IGNORE)])[:several]
            parts = in_parts(tokens.expand(several, -1), labels, several, torch.ones(()))
            train.run_step(model, states, parts, None, 0.0)
        kept.append({s.name: s.grad_shard for s in states.sharded_params.values()})
        count = m.param_count(SMALL) - states.vector_grad.numel()
        formula = costs.state_bytes(count, states.factors, torch.bfloat16,
                                      several > 1)
        assert states.bytes()["gradients"] == pytest.approx(formula["gradients"], rel=0.1)
    for name, narrow in kept[0].items():
        assert narrow.dtype == torch.bfloat16 and narrow.abs().sum() > 0
        assert torch.equal(narrow, kept[1][name].bfloat16()), name


@pytest.mark.parametrize("several", [1, 2])
def test_simulated_step_requests_what_a_step_does(several, group):
    """Fake tensors against the CPU's allocator, in sizes and lifetimes: the same at the peak up to
    what kernels request inside."""
    def make():
        cfg = dataclasses.replace(SMALL, layers=3)
        with torch.device("meta"):
            model = m.LLaMA(cfg, attention.Attention("cpu"))
        states = shard.States(model, torch.device("cpu"), torch.float32, several,
                              gather_layers=True, num_chunks=2)
        plan = offload.ActivationPlan(3, 2, 2, 3, 1)
        offload.ChunkedLayers(model, (1, 64), plan, 32, torch.device("cpu"), torch.float32)
        tokens = torch.arange(64 * several).remainder(SMALL.vocab).view(several, 1, 64)
        batch = train.Batch(tokens, tokens, torch.arange(64), scale=torch.ones(()))
        return lambda: train.run_step(model, states, batch, 1e-3, 1.0)

    step, memory = make(), memplan.StepMemory()
    for _ in range(2):
        step()
    memory.record(step)
    dist.destroy_process_group()
    requests, lasting = memplan.simulate(make, min_bytes=memory.min_bytes, align=memory.align)
    real, simulated = memplan.lower_bound(memory.buffers), memplan.lower_bound(requests)
    assert simulated == pytest.approx(real, rel=0.05)
    assert abs(len(requests) - len(memory.buffers)) < 0.2 * len(requests)
    params = m.param_count(dataclasses.replace(SMALL, layers=3))
    assert lasting > 16 * params  # weights, gradients and AdamW's states in float32
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="in the way"):
        memplan.simulate(make)


@pytest.mark.parametrize("case", [
    ("7b", 4, 2**19, (1, 1, 4), (8, 2, 10), 1), ("7b", 8, 2**19, (8, 8, 8), (4, 2, 0, 4), 1),
    ("7b", 4, 2**17, (2, 4, 4), (2, 4, 8), 1), ("7b", 4, 2**16, (1, 1, 2), (1, 4, 2), 1),
    ("7b", 1, 2**14, (), (1, 2), 1), ("7b", 1, 2**15, (), (2, 2), 1),
    ("7b", 4, 2**18, (1, 1, 4), (4, 2, 0, 0, 0, 2), 1), ("7b", 1, 2**17, (), (8, 2, 10), 1),
    ("7b", 8, 2**19, (8, 8, 8), (4, 2, 0, 0, 3, 2), 1),
    ("llama3-8b", 8, 2**16, (1, 1, 8), (1, 2, 2), 2),
    # in rings of 2 and 4
    ("7b", 4, 2**18, (1, 1, 4), (4, 2, 5), 1, 4),
    ("llama3-8b", 2, 2**17, (1, 1, 2), (4, 2, 0, 4), 1, 2),
    ("7b", 8, 2**19, (8, 8, 8), (4, 2, 0, 0, 3, 2), 1, 2)])
def test_counted_memory_is_what_a_step_needs(case):
    """The formula by which planner.py plans, against simulated steps of some layers (GPUs measured
    122.2 GiB where 122.1 were simulated, of 32 layers in the first case)."""
    name, ranks, seq, factors, activations, several, *ring = case
    ring = sum(ring) or 1
    model = dataclasses.replace(m.MODELS[name], layers=4)
    groups = 1 + 7 * (seq > 2**16) if ranks == 1 else math.gcd(4, model.kv_heads * ring // ranks)
    run = make_run(model, seq, ranks, shard.Factors(*factors),
                   offload.ActivationPlan(4, *activations), several, head_groups=groups, ring=ring)
    requests, lasting = simulate_step(run)
    simulated = lasting + memplan.lower_bound(requests)
    norm = 2 * 4 * model.dim * seq // ranks  # the last one's backward is fused on a GPU alone
    assert simulated - norm <= run.plan.memory.total() <= 1.2 * simulated


def recorded_steps():
    """Rows of results/ of whole steps in chunks whose requests are there, too, and those files: the
    short ones, or with ALL_COMBINATIONS all."""
    for path in sorted((HERE / "results").glob("memplan-*.json")):
        for r in json.loads(path.read_text())["rows"]:
            trace = path.with_name(f"memplan-{r['seq'] // 1024}k-{r['gpus']}x.csv")
            whole = r["system"] == "planned" and r["model"] == "7b" and not r["oom"]
            whole = whole and (r["seq"] <= 2**14 or ALL_COMBINATIONS)
            if whole and r.get("activations") and trace.exists():
                yield pytest.param(r, trace, id=trace.stem)


@pytest.mark.parametrize("row, trace", [*recorded_steps()])
def test_simulated_step_requests_what_a_gpu_did(row, trace):
    """Fake tensors against what bench.py recorded of PyTorch's allocator on GPUs."""
    _, real = memplan.read_trace(trace)
    known = offload.ActivationPlan.__dataclass_fields__
    activations = {k: v for k, v in row["activations"].items() if k in known}
    requests, _ = simulate_step(make_run(
        m.MODELS["7b"], row["seq"], row["gpus"], shard.Factors(row["p"], row["g"], row["os"]),
        offload.ActivationPlan(**activations), 1, row["chunk"], row["head_groups"]))
    assert memplan.lower_bound(requests) == pytest.approx(memplan.lower_bound(real), rel=1e-3)
    ours, theirs = (Counter(r.size for r in x) for x in (requests, real))
    assert (ours & theirs).total() > 0.999 * len(real)
    assert len(requests) < 1.002 * len(real)

    def step():  # a thousandth of the sizes
        alive = {}
        for _, born, i in events:
            if born:
                alive[i] = torch.empty(real[i].size >> 10, dtype=torch.uint8)
            else:
                del alive[i]

    events = sorted([(r.start, 1, i) for i, r in enumerate(real)]
                    + [(r.end, 0, i) for i, r in enumerate(real)])
    memory = memplan.StepMemory(min_bytes=512)
    for _ in range(4):  # the last by what was recorded
        memory.run(step)
    assert memory.counts["hits"] == len(real), memory.counts
    memory.give_back()


@pytest.mark.parametrize("chunk", [40000, 65535, 3000, 2**17])
def test_chunks_by_hand_hold_what_is_counted(chunk):
    """Chunks are equal parts, so what some of them store is their share."""
    seq, model = 2**16, m.MODELS["7b"]
    plan = choose(1, 190, seq=seq, host_memory=60 * 2**30, sp=1, batch=1, micro_batch=1,
                  chunk=chunk, p=1, g=1, os=1)
    assert plan.chunk <= chunk and plan.activations.swapped_chunks > 0
    layers = offload.ChunkedLayers.__new__(offload.ChunkedLayers)  # its fields, not its buffers
    layers.plan, layers.tokens = plan.activations, seq
    layers.cfg, layers.dtype = model, torch.bfloat16
    with torch.device("meta"):
        layers.blocks = 32 * [m.Block(model)]
    layers.chunks = [slice(i, min(i + plan.chunk, seq)) for i in range(0, seq, plan.chunk)]
    buffers = sum(offload.buffer_bytes(layers.fields(i)) for i in range(32) if layers.plan.swaps(i))
    assert buffers <= 1.001 * plan.host_bytes <= 1.001 * 60 * 2**30


def test_dry_run_of_ranks_that_are_not_there():
    args = "--model 160m --seq 4K --dtype bf16 --gpu-memory 20G --host-memory 64G --batch 2".split()
    text = run([*args, "--ranks", "8", "--dry-run", "--sp", "4", "--chunk", "512"], 0)
    counted = float(re.search(r"([\d.]+) GiB in all", text)[1])
    assert "of 8 ranks" in text and 0 < counted < 20
    alone = launch(["--ranks", "8"])
    *_, line = alone.communicate()[0].splitlines()  # before it, gloo of a host without a name
    assert line == "train.py: error: --ranks 8: of a plan alone; with --dry-run"
    assert alone.returncode == 2


def test_memory_replay_is_bit_equal():
    """Steps on planned addresses beside a twin's: one of another length harms nothing, and a step
    that has changed is recorded again."""
    x = torch.randn(512, 512)  # whose product is so large that a first fit of all meets the bound

    def make_step():
        model = m.LLaMA(SMALL)
        model.init_weights(0)
        optimizer = torch.optim.AdamW(model.parameters())
        kept = []

        def step(seed: int, seq: int) -> float:
            memplan.mark("forward")
            loss = model(*example(seed=seed, seq=seq)) + (x @ x).mean()
            memplan.mark("")
            kept.append(loss.detach().expand(5000).clone())
            del kept[:-4]  # of a recorded step, in the next one that is
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        return step

    plain, planned, memory = make_step(), make_step(), memplan.StepMemory()
    for seed, seq in enumerate([40, 40, 40, 40, 40, 23, 40, 40]):
        assert memory.run(lambda: planned(seed, seq)) == plain(seed, seq)
        all_met = memory.counts.get("hits") == len(memory.buffers) > 50
        assert all_met == (seed in (3, 4, 7)), seed  # the third, and what follows 23, are recorded
    assert memory.plans == 2 and "two levels" in str(memory.plan)
    assert memory.give_back()


@pytest.mark.parametrize("first, second", [([9000], [8000]), ([9000], [2000, 3000]),
                                           ([2000, 3000], [9000])])
def test_memory_replay_refuses_what_is_taken(first, second):
    """Tensors that were never alive together get one place; then they are, and keep what they
    hold."""
    kept = []

    def step(hold: bool = False) -> None:
        ones = [torch.ones(size) for size in first]
        if hold:
            kept.extend(ones)
        del ones
        zeros = [torch.zeros(size) for size in second]
        if hold:
            kept.extend(zeros)

    memory = memplan.StepMemory()
    for _ in range(4):
        memory.run(step)
    assert memory.plan.peak == 36032  # 4 * 9000 bytes, in whole 64
    assert memory.counts["hits"] == len(first) + len(second)
    memory.run(lambda: step(hold=True))
    assert (memory.counts["hits"], memory.counts["occupied"]) == (len(first), len(second))
    assert [x.unique().tolist() for x in kept] == [[1.0]] * len(first) + [[0.0]] * len(second)
    assert not memory.give_back()
    kept.clear()
    assert memory.give_back()


def test_memplan_program(tmp_path, capsys):
    """From one file to the other, with passes and whatever order of columns; a plan is a trace."""
    trace, plan, plot = tmp_path / "t.csv", tmp_path / "p.csv", tmp_path / "p.png"
    trace.write_text('pass,id,upper,lower,size\r\n"forward, layer 1",a,3,0,8\r\n,b,9,0,4\r\n'
                     '"forward, layer 1",c,3,1,8\r\n', encoding="utf-8-sig")  # as Excel writes
    args = ["--time-limit", "9", "--out", str(plan), "--plot", str(plot)]
    assert memplan.main([str(trace), *args]) == 0
    assert "3 buffers, peak 20, " in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows, offsets = zip(*(line.rsplit(",", 1) for line in plan.read_text().splitlines()))
    assert rows == ("id,lower,upper,size,pass", 'a,0,3,8,"forward, layer 1"', "b,0,9,4,",
                    'c,1,3,8,"forward, layer 1"')
    a, b, c = (memplan.Buffer(*map(int, row.split(",")[1:4])) for row in rows[1:])
    assert is_plan([a, b, c], offsets[1:], 20)
    assert memplan.main([str(plan)]) == 0 and "3 buffers, peak 20, " in capsys.readouterr().out


@pytest.mark.parametrize("text, message", [
    ("", "line 1: the columns"), ("id,lower,size\n", "line 1: the columns are"),
    ("id,size,upper,size\n", "line 1: .* each once"),
    ("id,lower,upper,size\na,0,1,2\nb,0,x,2\n", "line 3: .*whole numbers"),
    ("id,lower,upper,size\na,0,1,1_000\n", "line 2: .*whole"),
    ("id,lower,upper,size\na,4,4,2\n", "line 2: a buffer is alive"),
    ("id,lower,upper,size\na,0,1,2\na,0,1,2\n", "line 3: id a is on line 2")])
def test_memplan_names_the_line(text, message, tmp_path, capsys):
    trace = tmp_path / "t.csv"
    trace.write_text(text)
    assert memplan.main([str(trace)]) == 2
    assert re.search(message, capsys.readouterr().err)


# ---------------------------------------------------------------------------- Hugging Face

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True}
PUBLISHED = {  # what config.json of each says, at a small size: trained at 64 tokens
    "Llama 2": ("llama", {}),
    "Llama 3.1": ("llama", {"num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "Llama 3.2": ("llama", {"num_key_value_heads": 2, "rope_theta": 5e5, "head_dim": 16,
                            "rope_scaling": LLAMA3 | {"factor": 32.0},
                            "tie_word_embeddings": True}),
    "TinyLlama": ("llama", {"num_key_value_heads": 1, "rope_scaling": None}),
    "Vicuna v1.5 16K": ("llama", {"rope_scaling": {"factor": 4.0, "type": "linear"},
                                  "max_position_embeddings": 16, "max_sequence_length": 64}),
    "Yarn-Llama-2": ("llama", {"rope_scaling": YARN}),
    "Mistral-Nemo": ("mistral", {"num_key_value_heads": 2, "rope_theta": 1e6, "head_dim": 24,
                                 "sliding_window": None}),
    "Qwen2": ("qwen2", {"num_key_value_heads": 2, "rope_theta": 1e6, "sliding_window": 32,
                        "use_sliding_window": False, "max_window_layers": 1}),
    "Qwen2.5, small": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True,
                                 "rms_norm_eps": 1e-6, "use_sliding_window": False}),
    "Qwen3": ("qwen3", {"num_key_value_heads": 2, "rope_theta": 1e6, "head_dim": 24,
                        "attention_bias": False, "use_sliding_window": False,
                        "sliding_window": None, "tie_word_embeddings": True}),
}


def hf_model(folder, kind="llama", shard="60KB", **kw):
    """Save a small model of transformers, with random weights, whose config.json also says kw."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    size = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
                rms_norm_eps=1e-5)
    config = AutoConfig.for_model(kind, **copy.deepcopy(size | kw))  # it adds to rope_scaling
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in hf.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    hf.save_pretrained(folder, max_shard_size=shard)
    return hf


def hf_edit(folder, file="config.json", **changes) -> Path:
    """Change keys of a JSON file; ... takes one away."""
    path = Path(folder) / file
    c = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in c.items() if v is not ...}))
    return path


def hf_error(model, hf, seq: int) -> float:
    """Return how far the logits are from those of transformers."""
    tokens, _ = example(seq=seq, vocab=300)
    return relative(model(tokens), hf(tokens).logits)


def hf_back(model, folder: Path, source: dict | None = None, dtype=torch.float32):
    """Export a model, and return it as transformers loads it."""
    from transformers import AutoModelForCausalLM

    weights = dict(model.named_parameters())
    checkpoint.hf_export(folder, model.cfg, lambda name: weights[name].data, dtype,
                         source=source)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.mark.parametrize("name", PUBLISHED)
def test_hf_published(name, tmp_path, monkeypatch):
    """As each is published: logits within and beyond the trained length, and back as the same
    architecture in several files, for transformers 4 and 5."""
    monkeypatch.setattr(checkpoint, "HF_FILE_BYTES", 60_000)
    kind, keys = PUBLISHED[name]
    hf = hf_model(tmp_path / "in", kind, **{"max_position_embeddings": 64} | keys)
    cfg = checkpoint.hf_config(tmp_path / "in")
    older = {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None, "dtype": ...,
             "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "x.Y"}} | keys
    hf_edit(tmp_path / "in", **older)
    model = checkpoint.hf_model(tmp_path / "in")
    back = hf_back(model, tmp_path / "out", checkpoint.hf_source(tmp_path / "in"))
    assert type(back) is type(hf) and cfg.max_positions == 64
    assert cfg.tied == back.config.tie_word_embeddings == keys.get("tie_word_embeddings", False)
    for seq in (40, 90):
        assert hf_error(model, hf, seq) < 2e-6 and hf_error(model, back, seq) < 2e-6
    written = checkpoint.hf_source(tmp_path / "out")
    assert model.cfg == cfg == checkpoint.hf_config(tmp_path / "out")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1 and "auto_map" not in written
    if older["rope_scaling"] != YARN:  # what transformers 4 reads; its first did not know YaRN
        for key in ("rope_theta", "rope_scaling"):
            assert written[key] == older[key]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_hf_keys_that_are_left_out(kind, tmp_path):
    """They have the values that transformers gives them."""
    from transformers import AutoConfig

    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                 num_attention_heads=32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    ours, theirs = checkpoint.hf_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.kv_heads == theirs.num_key_value_heads and ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)


@pytest.mark.parametrize("kind, keys, window", [
    ("mistral", {}, 40), ("qwen2", {"use_sliding_window": False}, 0),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 40),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 0),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, 40),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"],
               "use_sliding_window": True}, 40)])
def test_hf_windows(kind, keys, window, tmp_path):
    """A window counts from where transformers' logits are others: where the sequence is longer, in
    whichever layer. It goes along on export."""
    hf = hf_model(tmp_path / "in", kind, sliding_window=40, **keys)
    source = checkpoint.hf_source(tmp_path / "in")
    assert checkpoint.hf_window(source) == window
    if "layer_types" not in keys:  # files of older releases have none
        assert checkpoint.hf_window(source | {"layer_types": None}) == window
    model = checkpoint.hf_model(tmp_path / "in")
    for seq in (40, 60):
        assert (hf_error(model, hf, seq) < 2e-6) == (not window or seq <= window)
    assert hf_error(model, hf_back(model, tmp_path / "out", source), 40) < 2e-6
    exported = checkpoint.hf_source(tmp_path / "out")
    for key in ("sliding_window", "layer_types", *keys):
        assert exported.get(key) == source.get(key), key


@pytest.mark.parametrize("changes, kind, message", [
    ({}, "llama", ""), ({"qkv_bias": True}, "qwen2", ""), ({"qk_norm": True}, "qwen3", ""),
    ({"qkv_bias": True, "qk_norm": True}, "", "Qwen.*no key for q.*=True"),
    ({"qk_norm": True}, "mistral", "MistralForCausalLM's config.json has no key for qk_norm"),
    ({"dim": 50}, "", "6 heads do not divide its width 50")])
def test_hf_exports_what_computes_it(changes, kind, message, tmp_path):
    """Of a model from scratch, or refuses what transformers would compute in another way."""
    model = m.LLaMA(dataclasses.replace(SMALL, vocab=300, **changes))
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape).bfloat16() / 8)
    if message:
        with pytest.raises(ValueError, match=message):
            hf_back(model, tmp_path, {"model_type": kind} if kind else None)
    else:
        back = hf_back(model, tmp_path, dtype=torch.bfloat16)
        assert (back.config.model_type, back.dtype) == (kind, torch.bfloat16)
        assert hf_error(model, back.float(), 40) < 2e-6


@pytest.mark.parametrize("key, value, message", [  # value: JSON; none: the key is missing
    ("hidden_act", '"gelu"', "hidden_act is 'gelu'; only \"silu\" is built"),
    ("attention_bias", "true", "attention_bias is True; only false is built"),
    ("partial_rotary_factor", "0.5", "partial_rotary_factor is 0.5; only 1.0 is built"),
    ("hidden_size", "", "no key 'hidden_size'"),
    ("hidden_size", '"64"', "dim is '64': a whole number"),
    ("num_hidden_layers", "1" + "0" * 400, "layers is 10000.*: a whole number from 1 to 4096"),
    ("rms_norm_eps", "NaN", "norm_eps is nan: a number"),
    ("rope_parameters", "[1]", "rope_parameters is .1.: an object"),
    ("rope_parameters", '{"rope_type": "dynamic", "factor": 2}', "'dynamic' is not built; linear,"),
    ("rope_parameters", '{"rope_type": "yarn", "factor": 2, "truncate": false}',
     "rope_parameters with .'truncate'. is not built"),
    ("rope_parameters", '{"rope_type": "linear", "factor": Infinity}', "factor of linear .* inf"),
    ("rope_theta", "7e5", "rope_parameters says .* rope_theta says .*delete one"),
    ("rope_scaling", json.dumps(LLAMA3), "rope_parameters says .* says .*delete one")])
def test_hf_keys_that_are_not_built_are_refused(key, value, message, tmp_path):
    hf_model(tmp_path)
    hf_edit(tmp_path, **{key: json.loads(value) if value else ...})
    with pytest.raises(ValueError, match=message):
        checkpoint.hf_config(tmp_path)


@pytest.mark.parametrize("place", ["../x.safetensors", "/tmp/x.safetensors", "a\\b.safetensors",
                                   "..", "a.bin", 3, None])
def test_hf_index_that_leads_elsewhere_is_refused(place, tmp_path):
    hf_model(tmp_path)
    hf_edit(tmp_path, "model.safetensors.index.json", weight_map={"lm_head.weight": place})
    with pytest.raises(ValueError, match="index.json: "):
        checkpoint.hf_open(tmp_path, checkpoint.hf_config(tmp_path))


def test_hf_tied_head_that_is_stored_too(tmp_path):
    """Some checkpoints hold it, and it is the embedding; one that is another is not dropped."""
    from safetensors.torch import load_file, save_file

    hf_model(tmp_path, tie_word_embeddings=True, shard="1GB")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    assert torch.equal(checkpoint.hf_model(tmp_path).head.weight, embedding)
    save_file(tensors | {"lm_head.weight": embedding + 1}, file)
    with pytest.raises(ValueError, match="lm_head.weight is model.embed_tokens.weight.*another"):
        checkpoint.hf_model(tmp_path)


@pytest.mark.parametrize("name, flag, scaling, positions", [
    ("Llama 2", "yarn:4", {"rope_type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 64}, 256),
    ("Llama 3.1", "llama3:2", LLAMA3 | {"factor": 16.0}, 128),
    ("Yarn-Llama-2", "yarn:2.5", {"rope_type": "yarn", "factor": 10.0,
                                  "original_max_position_embeddings": 16}, 160),
    ("Vicuna v1.5 16K", "linear:2", {"rope_type": "linear", "factor": 8.0}, 128)])
def test_rope_scaling_counts_from_the_trained_length(name, flag, scaling, positions, tmp_path):
    """Through the command, and into an export: a factor is multiplied by the import's."""
    kind, keys = PUBLISHED[name]
    hf_model(tmp_path / "in", kind, **{"max_position_embeddings": 64} | keys)
    train.main([*QUICK[2:], "--steps", "0", "--init", f"hf:{tmp_path}/in", "--rope-scaling", flag,
                "--out", f"{tmp_path}/o", "--export", f"{tmp_path}/out"])
    written = checkpoint.hf_source(tmp_path / "out")
    del written["rope_parameters"]["rope_theta"]
    assert written["rope_parameters"] == scaling
    assert written["max_position_embeddings"] == positions


def test_hf_train_and_export(tmp_path, capsys):
    """Import a tied head, train, export with what lay beside it, and import the export."""
    from transformers import AutoModelForCausalLM

    hf_model(tmp_path / "in", tie_word_embeddings=True, shard="1GB")
    beside = {"tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja", "LICENSE",
              "USE_POLICY.md", "generation_config.json"}
    for name in beside | {"my_token", "pytorch_model.bin"}:
        (tmp_path / "in" / name).write_text("{}")
    states = []
    for steps, source, target in ((2, "in", "a"), (0, "a", "b")):
        train.main([*QUICK[2:], "--steps", f"{steps}", "--init", f"hf:{tmp_path / source}", "--out",
                    f"{tmp_path}/{target}-out", "--export", f"{tmp_path / target}"])
        assert f"exported {tmp_path / target}: llama, fp32" in capsys.readouterr().out
        hf = AutoModelForCausalLM.from_pretrained(tmp_path / target)
        states.append(hf.state_dict())
    files = {file.name for file in (tmp_path / "a").iterdir()}
    assert files == {*beside, "config.json", "model.safetensors"}
    assert not hf.config.tie_word_embeddings  # two matrices, trained apart
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@slow
def test_hf_resumes_without_its_folder(tmp_path, capsys):
    """The model comes from the checkpoint, whether or not flags name it again; a factor counts from
    the import; an export does without a tokenizer."""
    from transformers import AutoModelForCausalLM

    hf = hf_model(tmp_path / "in", "qwen3", max_position_embeddings=64, eos_token_id=[7, 8])
    init = ["--init", f"hf:{tmp_path}/in", "--rope-scaling", "yarn:2"]
    args = [*QUICK[2:], "--seq", "160", "--batch", "2", "--steps", "2", "--save-every", "1"]
    train.main([*args, *init, "--out", f"{tmp_path}/a"])
    assert ("--seq 160 is past the 128 tokens that the rotary embedding reaches; "
            "--rope-scaling yarn:3 extends it") in capsys.readouterr().out
    (tmp_path / "in").rename(tmp_path / "gone")
    for flags in ([], init):
        out = f"{tmp_path}/b{len(flags)}"
        train.main([*args, *flags, "--resume", f"{tmp_path}/a/step-00000001", "--out", out,
                    "--export", f"{out}/hf"])
        assert losses(out) == losses(tmp_path / "a")[1:]
        assert f"{tmp_path}/in is not there any more" in capsys.readouterr().out
        back = AutoModelForCausalLM.from_pretrained(f"{out}/hf")
        assert type(back) is type(hf) and back.config.eos_token_id == [7, 8]
        assert back.config.max_position_embeddings == 128
        assert back.config.rope_parameters["factor"] == 2.0


# ---------------------------------------------------------------------------- data


def test_data_default_is_large_sorted_text():
    corpus, val = data.open_corpus("stdlib", 256)
    assert val is None and corpus.files == sorted(corpus.files)
    sequences, val = data.split(corpus, None, 2**20, 0)
    assert sequences.count >= 8 and val.count >= 1


def test_data_windows_cover_everything_once(tmp_path):
    """Over the borders of files, of which one is empty; each epoch in another order, which needs no
    history."""
    text = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    (tmp_path / "sub").mkdir()
    for name, part in zip(("0", "1", "2", "sub/3"), np.split(text, [10, 10, 503])):
        part.tofile(tmp_path / name)
    windows = [text[start : start + 11].tolist() for start in range(0, 989, 10)]
    corpus, _ = data.open_corpus(str(tmp_path), 256)
    orders = [windows[:95]]  # a twentieth of the 99 is held out
    for seed, epoch in ((5, 1), (5, 0), (6, 0)):
        sequences, val = data.split(corpus, None, 10, seed)
        assert [val.window(i).tolist() for i in range(val.count)] == windows[95:]
        orders.append([sequences.sample(95 * epoch + i).tolist() for i in range(95)])
        assert sorted(orders[-1]) == sorted(windows[:95])
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("width, most, said, of_val, vocab, message", [
    (2, 65_536, "", "", 65_536, ""), (2, 4, "", "", 300, ""),
    (2, 300, '{"token_bytes": 2, "ignore": 5}', "", 70_000, ""),
    (4, 70_000, '{"token_bytes": 4, "vocab": 70000}', '{"token_bytes": 4}', 70_000, ""),
    (2, 50_257, '{"token_bytes": 4}', "", 128_256, "token .* the model's vocabulary ends at 128255"
     ".*another token_bytes"),
    (4, 300, "", "", 50_304, 'train.bin is next to 0.*say {"token_bytes": 4} in train.bin.json'),
    (4, 128_256, "", "", 128_256, "train.bin is next to 0"),
    (4, 128_256, '{"token_bytes": 4, "vocab": 128256}', "", 32_000,
     "train.bin.json says a vocabulary of 128256, the model's has 32000"),
    (2, 300, '{"vocab": 5}', "", 300, "train.bin.json is not of the form"),
    (2, 300, '{"token_bytes": 3}', "", 300, "train.bin.json is not of the form"),
    (2, 300, '{"token_bytes": 2, "ignore": "5"}', "", 300, "train.bin.json is not of the form"),
    (2, 300, '{"token_bytes"', "", 300, "train.bin.json is not of the form"),
    (2, 300, '{"token_bytes": 2}', '{"token_bytes": 4}', 300,
     "train.bin.json, token_bytes 2: .*val.bin.json says 4"),
    (2, 300, '{"token_bytes": 2}', '{"token_bytes": 2, "ignore": 5}', 300,
     "ignore ids .-1, 5., which differ")])
def test_data_token_files(width, most, said, of_val, vocab, message, tmp_path):
    """Ids of two or four bytes, as nanoGPT writes them. FILE.bin.json says which; without a word,
    they have two, and what looks like four is refused."""
    ids = np.random.default_rng(0).integers(0, most, 20_000)
    for name, sidecar in (("train", said), ("val", of_val or said)):
        ids.astype(f"<u{width}").tofile(tmp_path / f"{name}.bin")
        if sidecar:
            (tmp_path / f"{name}.bin.json").write_text(sidecar)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        corpora = data.open_corpus(str(tmp_path), vocab)
        data.check_tokens(corpora, vocab, 0, 1)
        for corpus in corpora:
            assert np.array_equal(corpus.read(777, len(corpus)), ids[777:])
            assert corpus.ignored_id == (5 if "ignore" in said else -1)


def make_tokenizer(folder: Path, text: str, vocab: int = 300) -> None:
    """Write a byte-level tokenizer that is trained on a text, as a Hugging Face folder has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=alphabet, special_tokens=["<end>"],
        show_progress=False))
    tokenizer.enable_truncation(8)  # some files have it: it must not cut a text
    folder.mkdir()
    tokenizer.save(f"{folder}/tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')


def test_data_tokenised_text(tmp_path, capsys):
    """The ids are those of transformers' own class, and an end after each text: of files that are
    read in parts, empty ones, and many; a line that is cut loses nothing."""
    from transformers import PreTrainedTokenizerFast

    lines = [f"the grass is {'very ' * (i % 4)}{'green' * (i % 3)}: \u00e4\u4e16\n"
             for i in range(9000)]
    long_line = "grass" * 40_000 + "\r\nend"
    texts = ["".join(lines), "", long_line, *lines[:70]]
    make_tokenizer(tmp_path / "hf", "".join(lines[:90]))
    (tmp_path / "text").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "text" / f"{i:02}.txt").write_bytes(text.encode())
    args = f"{tmp_path}/text", f"{tmp_path}/hf", tmp_path / "t", 300
    path = data.tokenise(*args)
    corpus, _ = data.open_corpus(str(path), 300)
    ids = corpus.read(0, len(corpus)).tolist()
    assert f"{len(ids):,} tokens" in capsys.readouterr().out
    hf = PreTrainedTokenizerFast(tokenizer_file=f"{tmp_path}/hf/tokenizer.json")
    for text in texts:
        end = ids.index(hf.convert_tokens_to_ids("<end>"))
        if text == long_line:
            assert hf.decode(ids[:end]) == text
        else:
            assert ids[:end] == hf.encode(text, add_special_tokens=False)
        del ids[: end + 1]
    assert not ids
    assert data.tokenise(*args) == path and capsys.readouterr().out == ""  # of the earlier run
    os.utime(tmp_path / "text" / "02.txt", (1, 1))
    assert data.tokenise(*args) != path
    assert data.tokenise(str(path), "no folder", tmp_path, 300) is None  # ids already


def test_data_tokenised_to_four_bytes(tmp_path):
    """Ids past 2^16, and no file of text that is none, of ids past the model's, or without an end
    of a text; nothing half is left."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel({**words, "the end": 70_000}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    text = tmp_path / "a.txt"
    text.write_text("w69999 w5\nw65536")

    def tokenise(vocab: int = 70_001) -> Path:
        return data.tokenise(str(text), str(tmp_path), tmp_path / "t", vocab)

    with pytest.raises(ValueError, match="no id that ends a text.*eos_token_id in config.json"):
        tokenise()
    (tmp_path / "config.json").write_text('{"eos_token_id": [99999, 70000]}')
    with pytest.raises(ValueError, match="token 'the end' is 70000, .*ends at 69999; take its own"):
        tokenise(70_000)
    corpus, _ = data.open_corpus(str(tokenise()), 70_001)
    assert corpus.read(0, len(corpus)).tolist() == [69_999, 5, 65_536, 70_000]
    text.write_bytes(b"w5\n\xff\xfe")
    with pytest.raises(ValueError, match="a.txt is not UTF-8 text"):
        tokenise()
    assert len([*(tmp_path / "t").iterdir()]) == 2  # ids and what is said of them


@slow
def test_data_tokenised_by_the_first_of_two_ranks(tmp_path):
    """The second waits longer than --timeout, and ends with the sentence that the first finds."""
    text = tmp_path / "a.txt"
    text.write_text("the grass is green " * 999)
    make_tokenizer(tmp_path / "hf", text.read_text(), 257)  # of which the last never occurs
    args = [*QUICK, "--steps", 0, "--save-every", -1, "--tokenizer", tmp_path / "hf", "--timeout",
            8, "--data", text, "--out", tmp_path / "o"]
    said = run(args, 2, """
import time
tokenise = train.tokenise
train.tokenise = lambda *args: (time.sleep(10), tokenise(*args))[1]
""")
    tokens, = (tmp_path / "o" / "tokens").glob("*.bin")
    assert f"a.txt as {tokens}: 18,982 tokens" in said and said.count("each text ends with") == 1
    text.write_bytes(b"\xff" * 9999)
    said = run(args, 2, expect=1)
    assert len(re.findall("ConfigError: .*a.txt is not UTF-8 text", said)) == 2


# ---------------------------------------------------------------------------- the loop


def test_log_checkpoint_and_evaluation(tmp_path, capsys):
    train.main([*QUICK, "--out", f"{tmp_path}", "--steps", "7", "--save-every", "2", "--keep", "2",
                "--eval-every", "3"])
    text, rows = capsys.readouterr().out, log(tmp_path)
    keys = "step loss grad_norm lr tgs mfu_causal mfu_full gpu_gib host_gib seconds".split()
    assert [r["step"] for r in rows] == list(range(1, 8)) and all(set(keys) <= set(r) for r in rows)
    assert [r["step"] for r in rows if "val_loss" in r] == [3, 6, 7]
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[0]["mfu_causal"] is None
    assert "parameters" in text and "seq=32" in text and "left 0:00:0" in text
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000006", "step-00000007"]
    assert os.readlink(tmp_path / "latest") == "step-00000007"
    assert (tmp_path / "loss.png").read_bytes()[1:4] == b"PNG"
    train.main([*QUICK, "--out", f"{tmp_path}", "--steps", "2"])  # anew: the old run is kept
    assert len(log(tmp_path)) == 2 and len(log(tmp_path / "earlier-1")) == 7
    assert (tmp_path / "earlier-1" / "latest" / "meta.json").exists()


def test_dry_run_and_zero_steps(tmp_path, capsys):
    train.main(["--dry-run", "--model", "7b", "--device", "cpu", "--seq", "16K", "--dtype", "bf16",
                "--batch", "1", "--out", f"{tmp_path}/a"])
    text = capsys.readouterr().out
    assert "6,738,415,616 parameters" in text and "parameters 12.55, gradients 12.55" in text
    assert "optimizer 75.31" in text and not (tmp_path / "a" / "log.jsonl").exists()
    train.main(["--dry-run", "--ranks", "4", "--model", "160m", "--device", "cpu", "--seq", "4K",
                "--dtype", "bf16", "--batch", "2", "--sp", "2", "--pp", "2", "--micro-batch", "1",
                "--pp-chunks", "1", "--chunk", "512", "--out", f"{tmp_path}/a"])
    text = capsys.readouterr().out
    assert "stage 1  .0aa1bb" in text
    train.main([*QUICK, "--steps", "0", "--out", f"{tmp_path}/b"])
    assert (tmp_path / "b" / "latest" / "meta.json").exists()
    train.main([*QUICK, "--steps", "2", "--resume", "--out", f"{tmp_path}/b"])
    train.main([*QUICK, "--steps", "2", "--out", f"{tmp_path}/c"])
    assert losses(tmp_path / "b") == losses(tmp_path / "c")


@pytest.mark.parametrize("loss_elements", [2**27, 101 * 7])
def test_eval_losses_of_tokens(loss_elements, monkeypatch):
    monkeypatch.setattr(m, "LOSS_ELEMENTS", loss_elements)
    model = m.LLaMA(SMALL).double()
    model.init_weights(3)
    tokens, labels = example()
    logits, _ = plain_llama(model, tokens, labels)
    with torch.no_grad():
        losses = model(tokens, labels, each=True)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    assert relative(losses, plain.view(2, 40)) < 1e-13
    assert losses.count_nonzero() == (labels != m.IGNORE).sum() < 80


def ids_without_spaces(path: Path) -> Path:
    """Write the standard library's bytes as ids of which spaces (32) are never labels."""
    corpus, _ = data.open_corpus("stdlib", 256)
    corpus.read(0, 10**6).astype("<u2").tofile(path)
    Path(f"{path}.json").write_text('{"token_bytes": 2, "ignore": 32}')
    return path


def test_eval_of_ranks_equals_one_model(tmp_path):
    """Quarters 0, 3 and 1, 2 of each sequence on two pairs of ranks, some of which have none: the
    loss and that of every position are those of the bare model."""
    args = [*QUICK, "--seq", 96, "--micro-batch", 3, "--dtype", "fp64", "--steps", 0,
            "--eval-every", 1, "--data", ids_without_spaces(tmp_path / "ids.bin")]
    run([*args, "--sp", 2, "--ring", 2, "--p", 2, "--g", 2, "--os", 2, "--out", tmp_path], 4,
        "train.EVAL_SEQUENCES = 7")
    row, = log(tmp_path)
    assert not list(tmp_path.glob("step-*")) and (tmp_path / "position.png").exists()
    model = m.LLaMA(m.MODELS["tiny"]).double()
    model.init_weights(0)

    _, val = data.split(data.open_corpus(str(tmp_path / "ids.bin"), 256)[0], None, 96, 0)
    windows = torch.from_numpy(np.stack([val.window(i) for i in range(7)]))
    logits, labels = model(windows[:, :-1]), windows[:, 1:]
    want = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").detach()
    want = want.masked_fill(labels == 32, float("nan"))
    assert row["val_loss"] == pytest.approx(want.nanmean().item(), rel=1e-12)
    ends = [0, 1, 2, 4, 8, 16, 32, 64, 96]
    assert row["val_loss_by_position"] == [
        [a, pytest.approx(want[:, a:b].nanmean().item(), rel=1e-12)]
        for a, b in zip(ends, ends[1:])]


def test_eval_alone(tmp_path, capsys, monkeypatch):
    """Of a finished run: the same numbers once more, and no checkpoint; of an import whose tokens
    are surely not bytes, with a sentence."""
    import matplotlib.axes

    drawn, plot = [], matplotlib.axes.Axes.plot
    monkeypatch.setattr(matplotlib.axes.Axes, "plot", lambda self, *args, **kw: (
        drawn.append((kw["label"], list(args[0]))), plot(self, *args, **kw))[1])
    args = [*QUICK, "--out", f"{tmp_path}/a", "--steps", "4", "--eval-every", "2"]
    train.main(args)
    last = log(tmp_path / "a")[-1]
    saved = sorted(tmp_path.glob("a/step-*/*"))
    capsys.readouterr()
    train.main([*args, "--steps", "0", "--eval-every", "1", "--resume"])
    again = log(tmp_path / "a")[-1]
    assert f"step 4 val_loss {last['val_loss']:.4f}\n" in capsys.readouterr().out
    assert set(again) == {"step", "val_loss", "val_loss_by_position"} and again["step"] == 4
    assert again["val_loss"] == pytest.approx(last["val_loss"], rel=1e-9)
    assert len(log(tmp_path / "a")) == 5 and sorted(tmp_path.glob("a/step-*/*")) == saved
    assert drawn[2:4] == [("step 4", [1, 2, 4, 8, 16, 32]), ("step 2", [1, 2, 4, 8, 16, 32])]
    assert (tmp_path / "a" / "position.png").read_bytes()[1:4] == b"PNG"
    np.full(999, 7, "<u2").tofile(tmp_path / "same.bin")  # whose every label is ignored
    (tmp_path / "same.bin.json").write_text('{"token_bytes": 2, "ignore": 7}')
    train.main([*QUICK, "--steps", "0", "--eval-every", "1", "--out", f"{tmp_path}/b", "--data",
                f"{tmp_path}/same.bin"])
    assert "step 0 val_loss none (all labels are ignored)\n" in capsys.readouterr().out
    assert log(tmp_path / "b") == [{"step": 0, "val_loss": None, "val_loss_by_position": []}]
    hf_model(tmp_path / "in")
    for has in (False, True):
        if has:
            (tmp_path / "in" / "tokenizer.json").write_text("{}")
        train.main(["--dry-run", "--device", "cpu", "--init", f"hf:{tmp_path}/in", "--seq", "64"])
        text = capsys.readouterr().out
        assert (f"--tokenizer {tmp_path}/in makes tokens of the text" in text) == has


def test_schedule_equals_torchs():
    """torch.optim's, from the end of the warm-up to the end of the decay; then nothing changes."""
    cfg = train.Config(lr=0.01, warmup=5, min_lr=0.2)
    rates = [train.learning_rate(cfg, 25, step) for step in range(90)]
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20, 0.002)
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    for rate in rates[5:26]:
        assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        opt.step()
        schedule.step()
    assert set(rates[25:]) == {rates[25]}


def test_schedule_of_an_extended_run(tmp_path, capsys):
    """It stays where the checkpoint's ended, also of a run that is extended again."""
    args = [*QUICK, "--out", f"{tmp_path}", "--keep", "9"]

    def rates(*flags):
        train.main([*args, *flags])
        return [r["lr"] for r in log(tmp_path) if "lr" in r]

    first = rates("--warmup", "2")
    assert first[1] == 3e-3 and first[5] < first[4]
    resume = ("--resume", f"{tmp_path}/step-00000006")
    assert rates("--steps", "8", *resume) == pytest.approx([*first, 3e-4, 3e-4])
    assert ("step-00000006: --lr 0.003 --min-lr 0.1 --warmup 2; --lr decays until step 6\n"
            in capsys.readouterr().out)
    assert len(rates("--steps", "0", "--eval-every", "1", *resume)) == 8  # it takes no row back
    assert checkpoint.read_meta(tmp_path / "latest")["decay_steps"] == 6
    assert rates("--steps", "9", "--resume") == pytest.approx([*first, 3e-4, 3e-4, 3e-4])


def test_diverging_run_skips_stops_and_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "MAX_SKIPS", 3)
    with pytest.raises(SystemExit, match="not finite"):
        train.main([*QUICK, "--steps", "20", "--lr", "1e30", "--warmup", "0", "--clip", "0",
                    "--out", f"{tmp_path}"])
    rows = log(tmp_path)
    assert [r.get("skipped", False) for r in rows[-3:]] == [True] * 3 and len(rows) < 20
    assert rows[-1]["grad_norm"] is None and (tmp_path / "latest" / "meta.json").exists()
    text = run([*QUICK, "--lr", "1e30", "--warmup", "0", "--clip", "0", "--save-every", "-1",
                "--out", tmp_path / "two"], 2, "train.MAX_SKIPS = 1", expect=1)
    assert text.count("train.py: the loss or the gradient was not finite") == 1  # of all ranks


def test_eval_that_is_not_finite_is_drawn(tmp_path, monkeypatch, capsys):
    """In the log it is null, since NaN is no JSON."""
    found = {"val_loss": torch.nan, "val_loss_by_position": [[0, torch.inf], [1, 2.5]]}
    monkeypatch.setattr(train, "evaluate", lambda *_: found)
    train.main([*QUICK, "--steps", "0", "--eval-every", "1", "--out", f"{tmp_path}"])
    assert log(tmp_path) == [
        {"step": 0, "val_loss": None, "val_loss_by_position": [[0, None], [1, 2.5]]}]
    assert "step 0 val_loss nan\n" in capsys.readouterr().out
    assert (tmp_path / "position.png").exists()


def test_ranks_and_micro_batches(tmp_path):
    """float64, labels ignored unevenly (32 is the space): the same losses for every split."""
    args = [*QUICK, "--dtype", "fp64", "--eval-every", "3", "--steps", "5", "--save-every", "-1",
            "--data", ids_without_spaces(tmp_path / "ids.bin")]
    splits = {"one": (0, 6), "micro": (0, 1), "two": (2, 3), "three": (3, 1)}
    for name, (ranks, micro) in splits.items():
        run([*args, "--micro-batch", micro, "--out", tmp_path / name], ranks,
            "train.EVAL_SEQUENCES = 7")
    want = losses(tmp_path / "one")
    vals = [r["val_loss"] for r in log(tmp_path / "one") if "val_loss" in r]
    assert len(vals) == 2
    for name in splits:
        for a, b in zip(want, losses(tmp_path / name), strict=True):
            assert a == pytest.approx(b, rel=1e-11), name
        assert [r["val_loss"] for r in log(tmp_path / name) if "val_loss" in r] == pytest.approx(
            vals, rel=1e-11)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run of one process."""
    out = tmp_path_factory.mktemp("straight")
    run([*QUICK, "--steps", "9", "--save-every", "2", "--out", out])
    return losses(out)


DIE = {  # where the process kills itself, in the second save or after
    "in a step": "where = train.States; name = 'update'; calls = 5",
    "in a save": "where = train.checkpoint; name = 'write_states'; calls = 2",
    "in a save beside steps": "where = train.checkpoint; name = 'write_states'; calls = 2",
    "before a checkpoint's name": "where = os; name = 'rename'; calls = 2",
    "before the link's name": "where = os; name = 'replace'; calls = 2",
}


@pytest.mark.parametrize("where", DIE)
def test_killed_and_resumed_bitwise(where, straight, tmp_path):
    code = DIE[where] + """
count, old = [0], getattr(where, name)
def fatal(*args, **kw):
    count[0] += 1
    if count[0] == calls and where is os:
        os.kill(os.getpid(), signal.SIGKILL)
    result = old(*args, **kw)
    if count[0] == calls:
        if name == 'write_states':
            args[0].write_bytes(args[0].read_bytes()[:1000])
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(where, name, fatal)
"""
    args = [*QUICK, "--steps", "9", "--save-every", "2", "--out", tmp_path]
    if "beside" in where:
        args += ["--save-async"]
    run(args, code=code, expect=-signal.SIGKILL, tmp=tmp_path)
    assert len(losses(tmp_path)) >= 4
    assert bool(list(tmp_path.glob("*.tmp"))) == (where != "in a step")
    text = run([*args, "--resume", "auto"])
    assert f"resumed {tmp_path}/step-0000000{4 if where == 'in a step' else 2}" in text
    assert losses(tmp_path) == straight and not list(tmp_path.glob("*.tmp"))


def test_resume_on_other_ranks(tmp_path):
    args = [*QUICK, "--dtype", "fp64", "--micro-batch", "1", "--out", tmp_path / "a", "--keep", "9"]
    run([*args, "--save-every", "3"], 2)
    want = losses(tmp_path / "a")
    for ranks in (0, 3):
        run([*args, "--resume", tmp_path / "a" / "step-00000003"], ranks)
        for a, b in zip(want, losses(tmp_path / "a"), strict=True):
            assert a == pytest.approx(b, rel=1e-11)


def test_order_of_data_follows_from_samples_seen(tmp_path, monkeypatch):
    """A default batch is the checkpoint's on any number of ranks; one that they do not divide is
    refused with the nearest; another one goes on where the data was left."""
    args = "--model tiny --device cpu --seq 32 --eval-every -1 --save-every 2 --keep 9".split()
    run([*args, "--out", tmp_path / "a", "--steps", "4"], 2)
    meta = json.loads((tmp_path / "a" / "latest" / "meta.json").read_text())
    assert (meta["samples"], meta["config"]["batch"]) == (4 * 128, 128)
    first = tmp_path / "a" / "step-00000002"
    text = run([*args, "--out", tmp_path / "b", "--steps", "4", "--resume", first], 3, expect=1)
    assert "--batch 128, which a resumed run keeps: not divisible by 3 data-parallel ranks; " \
        "nearest: 126 or 129" in text
    drawn, load = [], data.Sequences.sample
    monkeypatch.setattr(data.Sequences, "sample", lambda self, i: drawn.append(i) or load(self, i))
    train.main([*args, "--out", f"{tmp_path}/b", "--steps", "4", "--resume", f"{first}"])
    assert drawn == list(range(256, 512)) and [r["step"] for r in log(tmp_path / "b")] == [3, 4]
    for a, b in zip(losses(tmp_path / "a")[2:], losses(tmp_path / "b"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    drawn.clear()
    train.main([*args, "--out", f"{tmp_path}/c", "--steps", "4", "--resume", f"{first}",
                "--batch", "32"])
    assert drawn == list(range(256, 256 + 2 * 32))
    meta = json.loads((tmp_path / "c" / "latest" / "meta.json").read_text())
    assert (meta["samples"], meta["step"]) == (256 + 64, 4)


def test_newest_whole_checkpoint_is_found(tmp_path, capsys):
    """`latest` dangling, looping or missing; torn folders beside whole ones; a clock that went
    backwards; a run that went back to an earlier step."""
    args = [*QUICK, "--out", f"{tmp_path}", "--keep", "2", "--save-every", "1"]
    train.main([*args, "--steps", "3"])
    latest, second = tmp_path / "latest", tmp_path / "step-00000002"
    os.utime(second, (2e9, 2e9))  # from the future
    torn = tmp_path / "step-00000009"
    torn.mkdir()
    (tmp_path / "step-00000001.old").mkdir()
    for link in ("nowhere", "latest", None):
        latest.unlink()
        if link:
            latest.symlink_to(link)
        found = checkpoint.find_checkpoint(tmp_path, "auto")
        assert found.folder == tmp_path / "step-00000003"
        assert "leads nowhere" in capsys.readouterr().out
        latest.unlink(missing_ok=True)
        latest.symlink_to("step-00000003")
    train.main([*args, "--steps", "5", "--resume"])
    assert [c.folder.name for c in checkpoint.whole_checkpoints(tmp_path)] == [
        "step-00000004", "step-00000005"] and not list(tmp_path.glob("*.old"))
    train.main([*args, "--steps", "6", "--resume", f"{tmp_path}/step-00000004"])  # back
    whole = ["step-00000005-1", "step-00000006"]
    assert [c.folder.name for c in checkpoint.whole_checkpoints(tmp_path)] == whole
    latest.unlink()
    with pytest.raises(ValueError, match="no checkpoint in"):
        checkpoint.find_checkpoint(tmp_path / "empty", "latest")
    assert checkpoint.find_checkpoint(tmp_path / "empty", "auto") is None
    part = next((tmp_path / whole[-1]).glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    assert checkpoint.find_checkpoint(tmp_path, "auto").folder.name == whole[0]


def test_going_back_is_one_with_the_log(tmp_path, monkeypatch):
    """A run goes back to an earlier step and dies before it saves: the next one goes on from there,
    as the log does. An evaluation or an export of an earlier step takes nothing back."""
    args = [*QUICK, "--out", f"{tmp_path}", "--keep", "9", "--save-every", "2"]
    train.main(args)
    want = losses(tmp_path)
    back = [*args, "--resume", f"{tmp_path}/step-00000002"]
    for flags in (["--eval-every", "1"], ["--export", f"{tmp_path}/hf"]):
        train.main([*back, "--steps", "0", *flags])
        assert os.readlink(tmp_path / "latest") == "step-00000006"
        assert losses(tmp_path) == want

    def dies(*_):
        raise LookupError

    with monkeypatch.context() as patch:
        patch.setattr(train, "run_step", dies)
        with pytest.raises(LookupError):
            train.main(back)
    dist.destroy_process_group()
    assert os.readlink(tmp_path / "latest") == "step-00000002"
    train.main([*args, "--resume"])
    assert losses(tmp_path) == want


def test_checkpoint_files_are_safetensors_and_say_what_they_hold(tmp_path, monkeypatch):
    """Every element once, by name, shape and offset: read here by the safetensors library, and
    checked with checksums of extents that do not divide tensors."""
    from safetensors import safe_open

    monkeypatch.setattr(checkpoint, "SUM_BYTES", 4000)
    train.main([*QUICK, "--steps", "2", "--out", f"{tmp_path}", "--export", f"{tmp_path}/hf"])
    folder = (tmp_path / "latest").resolve()
    meta = json.loads((folder / "meta.json").read_text())
    assert sorted(p.name for p in folder.iterdir()) == ["meta.json", "rank-00000.safetensors"]
    read = checkpoint.hf_open(tmp_path / "hf", checkpoint.hf_config(tmp_path / "hf"))
    with safe_open(folder / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(meta["tensors"])
        for name, tensor in ((name, file.get_tensor(name)) for name in file.keys()):
            entry = meta["tensors"][name]
            part, = entry["parts"]
            assert list(tensor.shape) == entry["shape"]
            assert (part["start"], part["count"]) == (0, tensor.numel())
            assert len(part["crc32"]) == -(-tensor.nbytes // 4000)
            state, _, param = name.partition(".")
            if state == "master":
                assert torch.equal(tensor, read(param))
            elif name == "updates":
                assert tensor == 2
            else:
                assert tensor.abs().sum() > 0, name
    read_at, sizes = checkpoint.read_at, []
    monkeypatch.setattr(checkpoint, "read_at",
                        lambda path, size, *more: sizes.append(size) or read_at(path, size, *more))
    some = shard.StatePart(torch.zeros(5000), 7777, (256, 192), False)  # as of some factors
    checkpoint.read_states(checkpoint.open_checkpoint(folder), {"exp_avg.embed.weight": some})
    with safe_open(folder / "rank-00000.safetensors", "pt") as file:
        whole = file.get_tensor("exp_avg.embed.weight").view(-1)
    assert torch.equal(some.values, whole[7777:12777])
    header = meta["files"]["rank-00000.safetensors"]["header"][0]
    assert sum(sizes) - header <= 4 * 5000 + 2 * 4000


def test_damaged_checkpoints_are_not_believed(tmp_path):
    """One bit, in a weight, a moment, the count of updates, a file's header, meta.json."""
    args = [*QUICK, "--out", f"{tmp_path}"]
    train.main([*args, "--steps", "1"])
    folder = (tmp_path / "latest").resolve()
    meta, file = folder / "meta.json", folder / "rank-00000.safetensors"
    tensors = json.loads(meta.read_text())["tensors"]

    def inside(name):
        part = tensors[name]["parts"][0]
        return part["offset"] + 4 * (part["count"] // 2)

    step = meta.read_bytes().index(b'"step": 1') + len(b'"step": ')
    places = [(file, inside("master.blocks.1.qkv.weight")), (file, 20), (meta, step),
              (file, inside("exp_avg_sq.norm.weight")), (file, tensors["updates"]["parts"][0][
                  "offset"])]
    for path, place in places:
        whole = path.read_bytes()
        for flags in ("--resume", "--resume auto"):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises(ValueError, match="not what w(as|ere) written.*checksum differs"):
                train.main([*args, "--steps", "2", *flags.split()])
            dist.destroy_process_group()
        path.write_bytes(whole)
    train.main([*args, "--steps", "2", "--resume"])


def test_checkpoints_run_no_code(tmp_path):
    """A pickle that would, by a path that leads out of the folder."""
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    args = [*QUICK, "--out", f"{tmp_path}"]
    train.main([*args, "--steps", "1"])
    folder = (tmp_path / "latest").resolve()
    meta = folder / "meta.json"
    whole = meta.read_bytes()
    evil = pickle.dumps(Evil())
    (tmp_path / "rank-1.safetensors").write_bytes(evil)
    escape = "../rank-1.safetensors"
    changed_meta(meta, lambda c: [part.update(file=escape) for entry in c["tensors"].values()
                                  for part in entry["parts"]]
                 + [c["files"].update({escape: {"bytes": 2**40, "header": [8, 0]}})])
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        train.main([*args, "--steps", "2", "--resume"])
    dist.destroy_process_group()
    assert not (tmp_path / "ran").exists()
    pickle.loads(evil)
    assert (tmp_path / "ran").exists()  # it would have
    meta.write_bytes(whole)
    train.main([*args, "--steps", "2", "--resume"])


def test_meta_of_another_kind_is_refused_in_words(tmp_path):
    """Another version, and wrong types at any depth with a checksum that is right: never anything
    but a ValueError, or a run that goes on."""
    (tmp_path / "a.txt").write_text("x" * 5000)
    args = [*QUICK, "--out", f"{tmp_path}", "--data", f"{tmp_path}/a.txt"]
    train.main([*args, "--steps", "1"])
    meta = (tmp_path / "latest" / "meta.json").resolve()
    flags = [train.parse([*args, "--resume"]), train.parse([*args[2:], "--resume"])]
    whole = json.loads(meta.read_text())
    tensor = next(iter(whole["tensors"]))
    paths = [(key,) for key in whole] + [("model", "dim"), ("config", "batch"), ("config", "lr")]
    paths += [("files", "rank-00000.safetensors"), ("files", "rank-00000.safetensors", "header")]
    paths += [("tensors", tensor), ("tensors", tensor, "dtype"), ("tensors", tensor, "shape")]
    paths += [("tensors", tensor, "parts"), ("tensors", tensor, "parts", 0)]
    paths += [("tensors", tensor, "parts", 0, key) for key in ("file", "start", "crc32")]
    refused = 0
    for path in paths:
        for value in (None, "x", [], {}, -1, 1.5, True, [[]], 10**9):
            def change(c):
                for key in path[:-1]:
                    c = c[key]
                c[path[-1]] = value

            changed_meta(meta, change)
            for cfg in flags:  # the model by its name, or from the checkpoint
                try:
                    found = checkpoint.find_checkpoint(tmp_path, "latest")
                    train.with_files(train.machine(cfg, 0, 1, 0, found), found)
                except ValueError as e:
                    assert f"--resume: {meta.parent}" in str(e), (path, value)
                    refused += 1
            meta.write_text(json.dumps(whole))
    assert refused > 300
    for text in ("[" * 100_000, "", "\xff", "3", '{"version": 3}'):
        meta.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="not a whole checkpoint"):
            checkpoint.read_meta(meta.parent)


def test_log_with_bad_lines_is_mended_and_said(tmp_path, capsys):
    args = [*QUICK, "--out", f"{tmp_path}"]
    train.main([*args, "--steps", "2"])
    rows = log(tmp_path)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('3\n{"step": null}\n{"no": 1}\n\xff\n{"step": 3, "lo')
    train.main([*args, "--steps", "3", "--resume"])
    assert "log.jsonl: dropped what is no step's: line 3, line 4, line 5" in capsys.readouterr().out
    assert log(tmp_path)[:2] == rows and len(log(tmp_path)) == 3


def test_changed_data_is_said(tmp_path, capsys):
    text = bytes(range(256)) * 20
    (tmp_path / "a.txt").write_bytes(text)
    args = [*QUICK, "--data", f"{tmp_path}/a.txt", "--out", f"{tmp_path}/o"]
    train.main([*args, "--steps", "1"])
    train.main([*args, "--steps", "2", "--resume"])
    assert "DATA HAS CHANGED" not in capsys.readouterr().out
    (tmp_path / "a.txt").write_bytes(text[:-1] + b"?")  # of the same size
    train.main([*args, "--steps", "3", "--resume"])
    assert "THE DATA HAS CHANGED since the checkpoint" in capsys.readouterr().out


def test_saving_that_fails_ends_no_run(tmp_path, monkeypatch, capsys):
    """A full disk, a folder that has gone: said at each step; the next save that works ends it. If
    the last one fails, so does the command."""
    real, full = checkpoint.write_at, [False]

    def write_at(*args):
        if full[0]:
            raise OSError(28, "No space left on device")  # the system names no file
        return real(*args)

    def step(*args, old=train.run_step, **kw):
        steps[0] += 1
        if steps[0] == 4:
            time.sleep(1)  # what step 2 has saved beside these is written before the disk is full
        full[0] = steps[0] in when
        return old(*args, **kw)

    monkeypatch.setattr(checkpoint, "write_at", write_at)
    monkeypatch.setattr(train, "run_step", step)
    args = [*QUICK, "--steps", "6", "--save-every", "2", "--out", f"{tmp_path}/o"]
    for flags in ([], ["--save-async"]):
        steps, when = [0], (4, 5)
        train.main([*args, *flags])
        text = capsys.readouterr().out
        assert f"step 4 was not saved: {tmp_path}/o/step-00000004.tmp: No space left" in text
        told = [line[:6] for line in text.splitlines() if "(step 4 was not" in line]
        assert told == ["step 5", "step 6"]
        out = tmp_path / "o"
        assert [p.name for p in sorted(out.glob("step*"))] == ["step-00000002", "step-00000006"]
    steps, when = [0], (6,)
    with pytest.raises(SystemExit, match="step 6 was not saved: .*: No space left"):
        train.main(args)
    dist.destroy_process_group() if dist.is_initialized() else None
    assert os.readlink(out / "latest") == "step-00000004" and not list(out.glob("*.tmp"))

    def step(*args, old=train.run_step, **kw):
        if (tmp_path / "gone" / "step-00000002").exists():
            shutil.rmtree(tmp_path / "gone")
        return old(*args, **kw)

    monkeypatch.setattr(train, "run_step", step)
    with pytest.raises(SystemExit, match="step 6 was not saved: .*No such file or directory"):
        train.main([*args, "--out", f"{tmp_path}/gone"])
    assert "step 6/6" in capsys.readouterr().out


def test_log_on_a_full_disk_is_said(tmp_path, capsys):
    run = SimpleNamespace(cfg=SimpleNamespace(out=str(tmp_path)))
    log = train.Log(run, open("/dev/full", "a"))
    log.append({"step": 1})
    assert log.failed == "log.jsonl cannot be written: No space left on device"
    log.close()
    assert "could not be written: No space left on device" in capsys.readouterr().out


def test_saving_beside_steps_saves_the_same(tmp_path, monkeypatch, capsys):
    """Copies are taken at once, however late they are written, also of states that lie on the host;
    without host memory it says so."""
    args = [*QUICK, "--steps", "5", "--save-every", "2", "--keep", "9", "--out"]
    train.main([*args, f"{tmp_path}/a"])
    real = checkpoint.write_states
    monkeypatch.setattr(checkpoint, "write_states", lambda *a: time.sleep(0.2) or real(*a))
    train.main([*args, f"{tmp_path}/b", "--save-async", "--os-place", "host"])
    text = capsys.readouterr().out
    assert "GiB of host memory a rank" in text
    for step in (2, 4, 5):
        a, b = (tmp_path / x / f"step-0000000{step}" / "rank-00000.safetensors" for x in "ab")
        assert a.read_bytes() == b.read_bytes()
    assert text.index("step 5/5", text.index("save-async")) > text.rindex("step-00000002")
    train.main([*args, f"{tmp_path}/c", "--save-async", "--host-memory", "1M"])
    assert "are left: steps wait while checkpoints are written" in capsys.readouterr().out


def test_one_run_writes_to_a_folder(tmp_path):
    """A second one is refused with the first one's process, and ends; a dead one holds none."""
    process = launch([*QUICK, "--steps", "1000000", "--out", tmp_path])
    deadline = time.time() + 120
    while not (tmp_path / "log.jsonl").exists():
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.1)
    text = run([*QUICK, "--out", tmp_path], 2, expect=1)
    assert re.search(f"another run writes there .*process {process.pid}", text)
    process.kill()
    process.wait()
    train.main([*QUICK, "--steps", "1", "--out", f"{tmp_path}"])


def test_storage_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def no_locks(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(checkpoint.fcntl, "flock", no_locks)
    with checkpoint.locked(tmp_path):
        assert "not guarded against a second run" in capsys.readouterr().out


def test_learning_rate_of_zero_changes_nothing(tmp_path):
    train.main([*QUICK, "--steps", "3", "--lr", "0", "--out", f"{tmp_path}", "--export",
                f"{tmp_path}/hf"])
    assert all(r["lr"] == 0 for r in log(tmp_path))
    from safetensors.torch import load_file

    embed = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    first = m.initial_weight(m.MODELS["tiny"], "embed.weight", embed.shape, 0, embed.device)
    assert torch.equal(embed, first)


@pytest.fixture(scope="module")
def straight_on_two(tmp_path_factory):
    """An uninterrupted run of two ranks."""
    out = tmp_path_factory.mktemp("two")
    run([*QUICK, "--save-every", "-1", "--out", out], 2)
    return losses(out)


def test_restart(straight_on_two, tmp_path):
    """One of two ranks dies; torchrun starts both again, and they go on where they had saved."""
    args = [*QUICK, "--save-every", "2", "--resume", "auto"]
    code = f"""
old, flag, count = train.States.update, Path(r'{tmp_path}/died'), [0]
def fatal(*args):
    count[0] += 1
    if count[0] == 4 and os.environ['RANK'] == '1' and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return old(*args)
train.States.update = fatal
"""
    text = run([*args, "--out", tmp_path / "b"], 2, code, tmp=tmp_path,
               torchrun=["--max-restarts", "1", "--shutdown-timeout", "5"])
    assert (tmp_path / "died").exists() and "resumed" in text
    assert straight_on_two == losses(tmp_path / "b")


@pytest.mark.parametrize("ranks, number", [(0, signal.SIGTERM), (0, signal.SIGINT),
                                           (2, signal.SIGTERM)])
def test_signals(ranks, number, tmp_path):
    """The step is finished, saved, and the worker exits 0; the run goes on from there."""
    code = "import atexit; atexit.register(lambda: print('worker ends', flush=True))"
    process = launch([*QUICK, "--steps", "1000000", "--out", tmp_path], ranks, code, tmp=tmp_path)
    deadline = time.time() + 120
    while not ((tmp_path / "log.jsonl").exists() and len(losses(tmp_path)) > 2):
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    text = process.communicate(timeout=120)[0]
    done = len(losses(tmp_path))
    assert f"stopped by {number.name} after step {done}" in text
    assert text.count("worker ends") == max(ranks, 1)
    if not ranks:
        assert process.returncode == 0, text[-2000:]
    assert os.readlink(tmp_path / "latest") == f"step-{done:08d}"


def test_last_step_that_is_stopped_is_exported(tmp_path):
    """A signal in the last step leaves nothing out."""
    code = """
old, count = train.run_step, [0]
def signalled(*args):
    count[0] += 1
    if count[0] == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return old(*args)
train.run_step = signalled
"""
    run([*QUICK, "--steps", "2", "--out", tmp_path / "out", "--export", tmp_path / "hf"], 0, code)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 2**20


@pytest.mark.parametrize("change, message", [
    ("data.unlink()", "No such file or directory: '.*words.txt'"),
    ("os.truncate(data, 3000)", "words.txt has become shorter than the 40000 tokens")])
@pytest.mark.parametrize("ranks", [0, 2])
def test_data_that_goes_away(change, message, ranks, tmp_path):
    """What was trained is saved, one sentence names the file, and with the file back it goes on."""
    text = bytes(range(97, 122)) * 1600
    (tmp_path / "words.txt").write_bytes(text)
    code = f"""
old, count = train.run_step, [0]
data = Path(r'{tmp_path}/words.txt')
def change(*args):
    count[0] += 1
    if count[0] == 3 and os.environ.get('RANK', '0') == '0':
        {change}
    return old(*args)
train.run_step = change
"""
    args = [*QUICK, "--data", tmp_path / "words.txt", "--out", tmp_path / "out"]
    told = run(args, ranks, code, expect=1)
    assert re.search(f"the run ends after step [34]: .*{message}", told), told
    assert "Traceback" not in told
    done = len(losses(tmp_path / "out"))
    (tmp_path / "words.txt").write_bytes(text)
    assert f"at step {done}" in run([*args, "--resume"], ranks)
    assert len(losses(tmp_path / "out")) == 6


@pytest.mark.parametrize("name, flags", [
    ("config.json", "--init hf:{tmp}"), ("tokenizer.json", "--tokenizer {tmp}"),
    ("ids.bin.json", "--data {tmp}/ids.bin"), ("safetensors", "--init hf:{tmp}"),
    ("meta.json", "--resume {tmp}")])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_files_that_are_none(name, flags, kind, tmp_path):
    """A FIFO would be waited for without end, and a device be read without end."""
    np.arange(250, dtype="<u2").tofile(tmp_path / "ids.bin")
    if name == "safetensors":
        hf_broken(tmp_path, "")
        tmp_path /= "hf"
        name = sorted(file.name for file in tmp_path.glob("*.safetensors"))[0]
        (tmp_path / name).unlink()
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    args = [*QUICK[2:], "--out", f"{tmp_path}/o", *flags.replace("{tmp}", str(tmp_path)).split()]
    with pytest.raises(ValueError, match=f"{name} (is no regular file|is not of the form)"):
        train.main(args)


def test_log_that_is_no_file(tmp_path):
    args = [*QUICK, "--steps", "1", "--out", f"{tmp_path}"]
    train.main(args)
    (tmp_path / "log.jsonl").unlink()
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="log.jsonl is no regular file"):
        train.main([*args, "--steps", "2", "--resume"])


def test_threads_of_a_rank_are_recorded(tmp_path):
    """Sums on a CPU depend on them: one a rank whatever starts ranks, and a resume says if it has
    others."""
    args = [*QUICK, "--out", tmp_path]
    run([*args, "--steps", "2"], 0, "os.sched_getaffinity = lambda pid: {0, 1, 2}")
    text = run([*args, "--steps", "3", "--resume"], 2, OMP_NUM_THREADS="2")
    assert "saved by ranks of 3 threads, these have 1: losses differ by the order of sums" in text


def test_weights_that_are_not_finite_are_not_resumed(tmp_path, monkeypatch):
    begin = checkpoint.Saver.begin

    def broken(saver, meta):
        parts = saver.states.state_parts()
        next(p for name, p in parts.items() if name.endswith("embed.weight")).values[7] = math.nan
        begin(saver, meta)

    args = [*QUICK, "--out", f"{tmp_path}", "--steps"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Saver, "begin", broken)
        train.main([*args, "1"])
    with pytest.raises(ValueError, match="step-00000001: .*embed.weight has values that are not"):
        train.main([*args, "2", "--resume"])


# ---------------------------------------------------------------------------- several nodes


def test_lost_node_comes_back(straight_on_two, tmp_path):
    """Two torchruns, a rank each; one is killed with its rank. Both go on when it is there again,
    though counts of restarts differ, and one sees OUT as it was."""
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                  f"127.0.0.1:{free_port()}", "--rdzv-id", "x", "--max-restarts", "2",
                  "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2"]
    code = """
old, count = train.States.update, [0]
if os.environ['RANK'] == '1':
    train.checkpoint.newest_checkpoint = lambda out: None
def fatal(*args):
    count[0] += 1
    if count[0] == 4 and 'LOST' in os.environ:
        train.time.sleep(1)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return old(*args)
train.States.update = fatal
"""

    def node(name, **env):
        (tmp_path / name).mkdir()
        return launch([*QUICK, "--save-every", "2", "--resume", "auto", "--per-node", "2", "--out",
                       tmp_path / "out"], 1, code, tmp=tmp_path / name, rendezvous=rendezvous,
                      TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env)

    first = node("first")  # holds the rendezvous
    deadline = time.time() + 60
    while socket.socket().connect_ex(("127.0.0.1", int(rendezvous[5].split(":")[1]))):
        assert time.time() < deadline and first.poll() is None
        time.sleep(0.1)
    node("second", LOST="1").wait(120)
    again = node("again")
    texts = [process.communicate(timeout=120)[0] for process in (first, again)]
    assert first.returncode == again.returncode == 0, texts
    assert re.search("resumed .*step-00000002 at step 2", "".join(texts))
    assert losses(tmp_path / "out") == straight_on_two


@pytest.mark.parametrize("victim, says", [
    (1, "rank 1 on host {host} .process {pid}. gave no sign for 2 s: it is dead or unreachable"),
    (0, "the store on rank 0's node, 127.0.0.1, has not answered for 2 s")])
def test_failed_rank_is_named(victim, says, tmp_path):
    """The other one, in a collective that hangs as its sockets stay open, ends and says why."""
    code = f"""
import ranks
ranks.BEAT_S = 0.2
old, count = train.States.update, [0]
def stop(*args):
    count[0] += 1
    if count[0] == 4 and os.environ['RANK'] == '{victim}':
        os.kill(os.getpid(), signal.SIGSTOP)
    return old(*args)
train.States.update = stop
"""
    file = tmp_path / "said"
    file.touch()
    both = fork_ranks([*QUICK, "--save-every", "-1", "--out", tmp_path], 2, code, file, {})
    both[1 - victim].join(120)
    assert both[victim].is_alive()
    both[victim].kill()
    both[victim].join(30)
    text = file.read_text()
    says = says.format(host=r"\S+", pid=both[victim].pid)
    assert both[1 - victim].exitcode == 1 and "Traceback" not in text, text
    assert re.search(f"rank {1 - victim}: {says}.*; this run ends", text), text


def test_ranks_that_wait_or_have_ended_are_not_dead(tmp_path):
    """One loads for longer than a silent rank has, and ends as much earlier than the other."""
    code = """
import ranks
ranks.BEAT_S = 0.05
load, rank = train.load_weights, int(os.environ['RANK'])
train.load_weights = lambda *args: (train.time.sleep(2 * rank), load(*args))[1]
train.dist.barrier = lambda: train.time.sleep(2 - 2 * rank)
"""
    text = run([*QUICK, "--steps", "2", "--save-every", "-1", "--out", tmp_path], 2, code)
    assert "step 2/2" in text and "this run ends" not in text


# ---------------------------------------------------------------------------- refusals


def hf_broken(tmp_path, what):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "hf"
    keys = {"window": ("mistral", {"sliding_window": 16}),
            "yarn over llama3": PUBLISHED["Llama 3.1"]}
    kind, more = keys.get(what, ("llama", {}))
    hf_model(folder, kind, **more)
    shard = sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    changes = {
        "shape": {"intermediate_size": 97}, "kind": {"model_type": "gpt2"},
        "kv heads": {"num_key_value_heads": 3}, "layers": {"num_hidden_layers": 10**9},
        "quantized": {"quantization_config": {"quant_method": "gptq"}}}
    if what in changes:
        hf_edit(folder, **changes[what])
    elif what == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif what == "missing":
        shard.unlink()
    elif what == "config":
        (folder / "config.json").unlink()
    elif what in ("pickle", "pth"):
        for file in folder.iterdir():
            if what == "pth" or file.name != "config.json":
                file.unlink()
        (folder / ("pytorch_model.bin" if what == "pickle" else "consolidated.00.pth")).touch()
    elif what == "two files":
        save_file(tensors, folder / "model.safetensors")
    elif what == "not finite":
        tensors[name].view(-1)[3] = torch.nan
        save_file(tensors, shard)
    elif what == "fp8":
        save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, shard)
    return f"hf:{folder}"


REFUSED = {
    "seq": ("--seq 64M", r"67108864.*longest that fits is --seq \d{7}"),
    "model": ("--model llama-8b", "llama-8b.*65b.*nearest: llama3-8b"),
    "attention": ("--attention fa4", "fa4.*needs a GPU.*usable: cpu"),
    "document token": ("--document-token 256", "--document-token 256: .*vocabulary ends at 255"),
    "planned documents": ("--document-token 10 --memplan on", "--memplan on: requests differ with"),
    "dtype": ("--dtype int8", "int8.*bf16, fp32"),
    "no host memory": ("--chunk 8 --alpha 1 --host-memory 0", "room for.*0.0 on the host"),
    "micro": ("--micro-batch 4", "4.*6 sequences.*nearest --batch: 4 or 8"),
    "negative": ("--steps -3", "--steps -3: from 0"),
    "alpha": ("--alpha 2", "--alpha 2.0: from 0 to 1"),
    "alpha, nothing recomputed": ("--alpha 0.5 --recompute none", "say different things"),
    "head groups": ("--head-groups 4", "a rank has 6 key/value heads at .*; one of 1, 2, 3, 6$"),
    "resident layers": ("--resident-layers 1", "--resident-layers 1: from 2"),
    "more resident layers": ("--resident-layers 5",
                             "--resident-layers 5: from 2.*the 4 that the model has"),
    "more than a stage has": ("--pp 2 --ranks 2 --dry-run --resident-layers 3",
                              "--resident-layers 3: from 2.* parts has"),
    "nothing to swap": ("--resident-layers 4 --alpha 0.5", "no layer swaps if all 4 are resident"),
    "data missing": ("--data {tmp}/no", "no such file"),
    "data empty": ("--data {tmp}/empty", "no files"),
    "data short": ("--data {tmp}/short.txt", "--seq 32.*20 tokens.*--seq 9"),
    "data of one token": ("--data {tmp}/one.txt", "--seq 32: the data has 1 tokens, too few for "
                          "training and validation; even --seq 1 needs 3$"),
    "data torn": ("--data {tmp}/odd.bin", "odd.bin is not a whole number of 2-byte"),
    "data vocabulary": ("--data {tmp}/big.bin", "token 3 is 999.*255"),
    "out": ("--out {tmp}/short.txt/x", "short.txt/x cannot be written"),
    "scaling": ("--rope-scaling ntk:2", "ntk:2.*llama3:FACTOR, yarn:FACTOR or theta:BASE"),
    "init": ("--init gpt2", "gpt2: random or hf:DIR"),
    "init without a folder": ("--init hf:", "hf:: random or hf:DIR"),
    "export": ("--export {tmp}", "not empty"),
    "export to out": ("--export {tmp}/o", "or --out"),
    "four bytes as two": ("--data {tmp}/wide.bin", "wide.bin is next to 0.*token_bytes.: 4"),
    "said vocabulary": ("--data {tmp}/said.bin", "said.bin.json says a vocabulary of 300.* 256"),
    "tokenizer": ("--tokenizer {tmp}/empty", "empty: no tokenizer.json"),
    "learning rate": ("--lr nan", "--lr nan: from 0"),
    "seed": ("--seed -1", "--seed -1: from 0"),
    "time-out": ("--timeout 0", "--timeout 0.0: from 1"),
    "rope base": ("--rope-scaling theta:0.5", "theta:0.5: .*theta:BASE, from 1"),
    "time-out, not a number": ("--timeout nan", "--timeout nan: from 1"),
    "time-out, infinite": ("--timeout inf", "--timeout inf: from 1"),
    "time-out, negative": ("--timeout -1", "--timeout -1.0: from 1"),
    "sp 0": ("--sp 0", "--sp 0: from 1"),
    "batch 0": ("--batch 0", "--batch 0: from 1"),
    "batch of tokens": ("--batch 4M", "--batch 4194304: the data has [0-9]+ training sequences of "
                        "32 tokens.*--batch counts sequences"),
    "unreadable": ("--data {tmp}/locked.txt", "Permission denied.*locked.txt"),
    "p": ("--p 2", "p=2 g=1 os=1: 2 shards do not fit 1 ranks.*nearest: --p 1"),
    "strategy": ("--strategy zero4", "zero4: one of ddp, zero1.*mics:K"),
    "layout": ("--os-layout whole", "whole: one of auto, intra, inter"),
    "place": ("--os-place disk", "--os-place disk: one of auto, gpu, host"),
    "place without memory": ("--os-place host --host-memory 1M", "optimizer states on the host with"
                             " p=1 g=1 os=1 are 0.0 GiB a rank, there is room for 0.0; more ranks"),
    "columns": ("--tp 2", "--tp 2: it must divide 1 GPUs of a node, .*: one of 1$"),
    "tensor mode": ("--tp-mode isp", "--tp-mode isp: one of mtp, msp, fsp"),
    "streams": ("--overlap grad_reduce,all", "all: a list of param_gather"),
    "per node": ("--per-node 2", "--per-node 2: does not divide 1 ranks"),
    "resume nothing": ("--resume", "there is no"),
    "resume path": ("--resume {tmp}/short.txt", "not a whole checkpoint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path, monkeypatch):
    def locked(path, *args, real=open, **kw):  # root may read everything: deny it here
        if str(path).endswith("locked.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kw)

    monkeypatch.setattr("builtins.open", locked)
    (tmp_path / "locked.txt").write_text("x" * 1000)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("x" * 20)
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "odd.bin").write_bytes(b"x" * 2001)
    ids = np.zeros(500, "<u2")
    ids[3] = 999
    ids.tofile(tmp_path / "big.bin")
    (ids % 256).tofile(tmp_path / "ids.bin")
    for name in ("wide", "said"):
        np.arange(250, dtype="<u4").tofile(tmp_path / f"{name}.bin")
    (tmp_path / "said.bin.json").write_text('{"token_bytes": 4, "vocab": 300}')
    flags, message = REFUSED[case]
    args = [*QUICK, "--out", f"{tmp_path}/o", *flags.replace("{tmp}", str(tmp_path)).split()]
    with pytest.raises(ValueError, match=message):
        train.main(args)
    assert not (tmp_path / "o" / "log.jsonl").exists()


@pytest.mark.parametrize("what, message", [
    ("truncated", "missing or truncated"), ("missing", "missing or truncated"),
    ("shape", r"gate_proj.weight is \(96, 64\).*\(97, 64\)"),
    ("kind", "model_type is 'gpt2'; one of llama, mistral, qwen2, qwen3"),
    ("kv heads", "config.json.*kv_heads is 3, which does not divide the 4 heads; nearest: 2"),
    ("layers", "layers is 1000000000: a whole number from 1 to 4096"),
    ("config", "config.json cannot be read"),
    ("pickle", r"pytorch_model.bin is a pickle.*save_pretrained\('.*/hf'\)"),
    ("pth", "consolidated.00.pth is a pickle.*convert_llama_weights_to_hf --input_dir .*/hf "),
    ("window", "--seq 32: .*sliding windows of 16 tokens.*; at most --seq 16"),
    ("yarn over llama3", "yarn:2: its rotary.* llama3 scaling already; extend it with llama3:F"),
    ("quantized", "quantization_config is .*gptq.* only null is built"),
    ("two files", "model.safetensors and model.safetensors.index.json, which names model-00001.*"
                  "delete one"),
    ("not finite", "model.*weight has values that are not finite"),
    ("fp8", "model.*weight is stored as F8_E4M3; F64, F32, F16 and BF16 are read")])
def test_refused_hf(what, message, tmp_path):
    args = QUICK[2:]  # without --model
    if what == "yarn over llama3":
        args += ["--rope-scaling", "yarn:2"]
    with pytest.raises(ValueError, match=message):
        train.main([*args, "--init", hf_broken(tmp_path, what), "--out", f"{tmp_path}/o"])


def test_refused_windows_of_a_resumed_import(tmp_path):
    folder = tmp_path / "hf"
    hf_model(folder, "mistral", sliding_window=40)
    args = [*QUICK[2:], "--steps", "1", "--out", f"{tmp_path}/o"]  # without --model
    train.main([*args, "--init", f"hf:{folder}"])
    with pytest.raises(ValueError, match="--seq 41: .*windows of 40 tokens.*at most --seq 40"):
        train.main([*args, "--resume", f"{tmp_path}/o/latest", "--seq", "41"])


def changed_meta(path: Path, change) -> None:
    """Change a meta.json as somebody would who wants it to be believed."""
    meta = json.loads(path.read_text())
    del meta["crc32"]
    change(meta)
    checkpoint.write_meta(path.parent, meta)


def test_refused_checkpoints(tmp_path):
    args = [*QUICK, "--out", f"{tmp_path}"]
    train.main([*args, "--steps", "1"])
    part = next((tmp_path / "latest").resolve().glob("*.safetensors"))
    whole = part.read_bytes()

    def refused(flags, message):
        with pytest.raises(ValueError, match=message):
            train.main([*args, *flags.split()])
        dist.destroy_process_group()

    refused("--resume --model 160m --seq 64", r"another model.* dim 192 \(here 768\)")
    meta = (tmp_path / "latest" / "meta.json").resolve()
    text = meta.read_text()
    changed_meta(meta, lambda c: c["model"].update(rope_theta=5e5))
    refused("--resume", r"another model: rope_theta 500000.0 \(here 10000.0\)")
    train.main([*args, "--steps", "1", "--resume", "--rope-scaling",
                "theta:70000"])  # knowingly another
    meta.write_text(text)
    part.write_bytes(whole[:-1])
    refused("--resume", f"{len(whole) - 1} bytes, not {len(whole)}")
    part.unlink()
    refused("--resume auto", f"{part.name} is missing")


def test_refused_flags(capsys):
    for args, message in (["--batch-size 5", "unrecognized.*--batch-size 5 .nearest: --batch"],
                          [f"--seq {'4' * 400}", "argument --seq: 4{400}: a whole number, as 4096"],
                          ["--seq 5T", "5T: a whole number, as 4096"],
                          ["--seq 0.3K", "0.3K: a whole number"]):
        with pytest.raises(SystemExit):
            train.parse(args.split())
        assert re.search(message, capsys.readouterr().err)
    assert train.parse(["--seq", "64K", "--batch", "1M"]).seq == 65536


@pytest.mark.parametrize("code, message", [
    ("sys.argv += ['--lr', '1e-' + str(3 + int(os.environ['RANK']))]",
     "ranks were started differently: --lr is 0.001 on rank 0, 0.0001 on rank 1"),
    ("sys.argv += ['--lr', 'nan'] * (os.environ['RANK'] == '1')",
     r"--lr nan: from 0 to 1e.30 \(on ranks \[1\]\)"),
    ("sys.argv += ['--timeout', '0'] * (os.environ['RANK'] == '0')",
     r"--timeout 0.0: from 1 to 1000000000.0 \(on ranks \[0\]\)"),
    ("train.fingerprint = lambda c: {'crc32': os.environ['RANK']}",
     "the data is {'crc32': '0'} on rank 0, {'crc32': '1'} on rank 1"),
    ("os.chdir(os.environ['RANK'])", "--out out: another folder.*storage that all nodes share")])
def test_ranks_that_differ_are_refused(code, message, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    code = f"os.chdir({str(tmp_path)!r}); {code}"
    text = run([*QUICK, "--out", "out"], 2, code, expect=1, tmp=tmp_path)
    assert len(re.findall("ConfigError.*" + message, text)) >= 2, text


def test_files_that_rank_0_does_not_see_are_no_checkpoint(tmp_path):
    """Storage that is not shared, if the start could not tell; and a disk that is full for one."""
    code = f"""
import time
class Late:
    calls = 0
def begin(self, meta, old=train.checkpoint.Saver.begin):
    Late.calls += 1
    old(self, meta)
def write(path, parts, old=train.checkpoint.write_states):
    if os.environ['RANK'] == '1' and Late.calls == 1:
        path = Path(r'{tmp_path}') / path.name
    if os.environ['RANK'] == '0' and Late.calls == 3:
        time.sleep(8)  # longer than --timeout: the others wait
    if os.environ['RANK'] == '1' and Late.calls == 2:
        raise OSError(28, 'No space left on device', 'disk of rank 1')
    return old(path, parts)
train.checkpoint.Saver.begin = begin
train.checkpoint.write_states = write
"""
    text = run([*QUICK, "--out", tmp_path / "o", "--steps", "3", "--save-every", "1", "--timeout",
                "5"], 2, code, tmp=tmp_path)
    assert "step 1 was not saved: " in text and "rank 1's file is not there for rank 0" in text
    assert "step 2 was not saved: disk of rank 1: No space left on device (on ranks [1])" in text
    assert [p.name for p in (tmp_path / "o").glob("step*")] == ["step-00000003"]


@pytest.mark.parametrize("flags, message", [
    ("--batch 5 --sp 1", "--batch 5: not divisible by 2 data-parallel ranks; nearest: 4 or 6"),
    ("--sp 3", "--sp 3: it must divide 2 ranks and --seq 32, and sp / ring the 6 key/value "
     "heads: one of 1, 2"),
    ("--ring 4", "--ring 4: it must divide --sp, which divides 2 ranks.*: one of 1, 2"),
    ("--chunk 8 --alpha 1 --host-memory 4K", "do not fit.*0.0 on the host"),
    ("--tp 2 --chunk 8", "--tp 2: its layers run whole, without --chunk, --alpha"),
    ("--tp 2 --seq 33", "--seq 33: no multiple of sp 1 x tp 2; nearest: 32 or 34"),
    ("--data {tmp}/one", r"no such file or folder \(on ranks \[1\]\)")])
def test_refused_on_all_ranks(flags, message, tmp_path):
    """Also what one rank alone finds: all end, none waits for the others."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("x" * 9999)
    code = "real = Path.exists; hidden = os.environ['RANK'] == '1'\n"
    code += "Path.exists = lambda p: False if hidden and p.name == 'one' else real(p)"
    start = time.time()
    text = run([*QUICK, *flags.replace("{tmp}", str(tmp_path)).split(), "--out", tmp_path / "o"], 2,
               code, expect=1, tmp=tmp_path)
    assert len(re.findall("ConfigError.*" + message, text)) >= 2 and time.time() - start < 60


# ---------------------------------------------------------------------------- GPUs
# What a CPU does not have: streams that run beside each other, copy engines, memory that the
# allocator gives again, kernels that index with 32 bits. `make test-gpu` runs these.

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
MEDIUM = dataclasses.replace(m.MODELS["160m"], layers=8, heads=16, kv_heads=8)


def gpu_ranks() -> tuple[int, int, torch.device]:
    """Join the ranks of a worker under torchrun, a GPU each."""
    rank, world, local_rank = train.start_ranks(300)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    train.expandable_segments()
    return rank, world, device


def learnable(cfg, count: int, seq: int) -> torch.Tensor:
    """Sequences (count, seq + 1) with something to learn: most ids follow from the one before."""
    ids = torch.randint(200, (count, seq + 1), generator=torch.Generator().manual_seed(0))
    for t in range(seq):
        ids[:, t + 1] = (7 * ids[:, t] + ids[:, t + 1] % 3) % 200
    return ids


def on_gpu(cfg, device, op, columns=None, **options) -> tuple[m.LLaMA, shard.States]:
    with torch.device("meta"):
        model = m.LLaMA(cfg, op)
    if columns:
        parallel.split_columns(model, columns)
    states = shard.States(model, device, torch.bfloat16, **options)
    for name, shape in model.shapes.items():
        states.load(name, m.initial_weight(cfg, name, shape, 0, device))
    return model, states


def exact_kernel(device) -> str:
    """The best kernel that sums in one order, if it is asked to: not cuDNN's."""
    torch.use_deterministic_algorithms(True)
    return next(name for name in ("fa4", "flash")
                if attention.why_not(name, device, torch.bfloat16) is None)


def gpu_factors_worker():
    """20 steps under all legal factors, bf16, what was used poisoned: losses and norms near those
    of p = g = os = 1."""
    rank, world, device = gpu_ranks()
    cfg, seq, steps = dataclasses.replace(MEDIUM, layers=3), 512, 20
    ids = learnable(cfg, steps * 8, seq).view(steps, 8, seq + 1).to(device)
    mine = ids[:, rank * 8 // world : (rank + 1) * 8 // world]
    scale, groups = torch.tensor(1 / (8 * seq), device=device), attention.Groups()
    kernel = attention.pick_kernel("auto", device, torch.bfloat16)
    rows = [(shard.Factors(), "intra", 1, False)] + [
        (f, layout, several, layout == "inter") for several in (1, 2)
        for f in shard.legal_factors(world, world) for layout in ("intra", "inter")]
    first = None
    for f, layout, several, recompute in rows:
        model, states = on_gpu(cfg, device, attention.Attention(kernel), factors=f, layout=layout,
                               micro_batches=several, gather_layers=recompute, poison=True,
                               groups=groups)
        if recompute:
            model.layer_runner = offload.recomputed_layers
        curve = []
        for batch in mine:
            parts = in_parts(batch[:, :-1], batch[:, 1:], several, scale)
            curve.append(torch.stack(train.run_step(model, states, parts, 5e-4, 1.0)[:2]))
        curve = torch.stack(curve)
        first = curve if first is None else first
        assert curve[-1, 0] < 0.8 * curve[0, 0], "it learns"
        assert (curve - first)[:, 0].abs().max() < 0.02, (f, layout, several, recompute)
    print(f"rank {rank}: {len(rows)} curves alike", flush=True)
    os._exit(0)


def gpu_swap_worker():
    """20 steps of a sequence over all ranks whose layers keep, swap and recompute: the same sums,
    so the same bits, also with everything poisoned after use and copies that start late. Without
    waits this must fail."""
    rank, world, device = gpu_ranks()
    cfg, seq, steps, chunk = MEDIUM, 4096, 20, 512
    ids = learnable(cfg, steps, seq).to(device)
    part = seq // world
    cut, c = slice(rank * part, (rank + 1) * part), -(-part // chunk)
    positions = torch.arange(seq, device=device)[cut]
    scale, groups, kernel = (torch.tensor(1 / seq, device=device), attention.Groups(),
                             exact_kernel(device))
    kinds = {"plain, NCCL": None, "plain": None, "kept": (8, 8 * c), "recomputed": (8, 0),
             "attention again": (2, 2 * c, 3 * c, 3), "inputs of one in 3": (2, 0, 0, 0, 3),
             "both": (4, 0, 0, 6, 2)}
    kinds |= {f"alpha {alpha}": (2, 2 * c, round(6 * c * alpha)) for alpha in (0, 0.25, 1)}
    kinds |= {f"{name}, {how}": kinds[name] for name in ("alpha 0.25", "alpha 1")
              for how in ("poisoned", "without waits", "NCCL", "NCCL, poisoned")}
    if world == 1:  # nothing travels
        kinds = {kind: plan for kind, plan in kinds.items() if "NCCL" not in kind}
    found = {}
    for kind, plan in kinds.items():
        hard = "poisoned" in kind or "without" in kind
        stream = attention.CommStream(device)
        op = attention.Ulysses(kernel, world, groups, stream, math.gcd(2, cfg.kv_heads // world),
                               world, hard, 3 * 10**6 * hard)
        if "NCCL" in kind:
            op.exchange.peer_access = False  # as GPUs that do not reach each other's memory
        model, states = on_gpu(cfg, device, op, factors=shard.Factors(1, world, world),
                               gather_layers=plan is not None, num_chunks=c if plan else 1,
                               poison=hard, groups=groups)
        if plan:
            offload.ChunkedLayers(model, (1, part), offload.ActivationPlan(8, c, *plan), chunk,
                                  device, torch.bfloat16, poison=hard, delay=3 * 10**7 * hard)
        offload.wait = (lambda _: None) if "without" in kind else attention.wait
        curve = []
        for i, row in enumerate(ids[:, None]):
            parts = in_parts(row[:, :-1][:, cut], row[:, 1:][:, cut], 1, scale, positions)
            lr = 1e-4 * min(1, (i + 1) / 20)
            curve.append(torch.stack(train.run_step(model, states, parts, lr, 1.0)[:2]))
        found[kind] = torch.stack(curve)
    offload.wait = attention.wait
    for kind, curve in found.items():
        like = found["plain" if "plain" in kind else "kept"]
        assert torch.equal(curve, like) != ("without waits" in kind), kind
    assert (found["kept"] - found["plain"])[:, 0].abs().max() < 0.05
    print(f"rank {rank}: {len(kinds) - 2} ways equal, 2 without waits are not", flush=True)
    os._exit(0)


def gpu_ring_worker():
    """Rings over all ranks, two micro-batches a step: attention near that of the whole sequence, 12
    steps near those of sp = 1, and all ways to keep a layer equal to the last bit, also with what
    was received poisoned after use and messages that start late. Without waits this must fail."""
    rank, world, device = gpu_ranks()
    cfg, seq, steps, chunk = MEDIUM, 4096, 12, 512
    groups, kernel = attention.Groups(), exact_kernel(device)
    here = attention.sequence_positions(seq, world, world, rank).to(device)

    def ring(hard: bool) -> attention.Ulysses:
        return attention.Ulysses(kernel, world, groups, attention.CommStream(device), 1, world,
                                 hard, 3 * 10**6 * hard, world, attention.CommStream(device))

    random = torch.Generator(device).manual_seed(0)
    q, k, v, do = (torch.randn(1, seq, heads, 64, generator=random, device=device).bfloat16()
                   for heads in (16, 4, 4, 16))
    whole = attention.Attention(kernel)
    o, lse = whole.forward(q, k, v)
    want = o, *whole.backward(do, q, k, v, o, lse)
    mine = [t[:, here].contiguous() for t in (q, k, v)]
    op = ring(hard=True)
    o, lse = op.forward(*mine)
    found = o, *op.backward(do[:, here].contiguous(), *mine, o, lse)
    for got, exact in zip(found, want):
        error = (got - exact[:, here]).float().norm() / exact[:, here].float().norm()
        assert error < 0.01, f"rank {rank}: {error:.4f} from attention of the whole sequence"

    ids = learnable(cfg, 2 * steps, seq).view(steps, 2, seq + 1).to(device)
    c = -(-seq // world // chunk)
    kinds = {"whole": None, "plain": None, "kept": (8, 8 * c),
             "attention again": (2, 2 * c, 3 * c, 3), "alpha 0.25": (2, 2 * c, round(1.5 * c))}
    kinds |= {f"{name}, poisoned": kinds[name] for name in ("plain", "alpha 0.25")}
    kinds |= {f"{name}, without waits": kinds[name] for name in ("plain", "alpha 0.25")}
    curves = {}
    for kind, plan in kinds.items():
        hard = "poisoned" in kind or "without" in kind
        op = whole if kind == "whole" else ring(hard)
        tokens = torch.arange(seq, device=device) if kind == "whole" else here
        copies = world if kind == "whole" else 1  # of each token
        scale = torch.tensor(1 / (2 * copies * seq), device=device)
        model, states = on_gpu(cfg, device, op, factors=shard.Factors(1, world, world),
                               gather_layers=plan is not None, num_chunks=c if plan else 1,
                               micro_batches=2, poison=hard, groups=groups)
        if plan:
            offload.ChunkedLayers(model, (1, len(tokens)), offload.ActivationPlan(8, c, *plan),
                                  chunk, device, torch.bfloat16, poison=hard,
                                  delay=3 * 10**7 * hard)
        attention.wait = (lambda _: None) if "without" in kind else offload.wait
        curve = []
        for i, rows in enumerate(ids):
            parts = in_parts(rows[:, :-1][:, tokens], rows[:, 1:][:, tokens], 2, scale, tokens)
            lr = 1e-4 * min(1, (i + 1) / 10)
            curve.append(torch.stack(train.run_step(model, states, parts, lr, 1.0)[:2]))
        curves[kind] = torch.stack(curve)
    attention.wait = offload.wait
    for kind, curve in curves.items():
        way = kind.partition(",")[0]
        like = curves[way if way in ("whole", "plain") else "kept"]
        assert torch.equal(curve, like) != ("without waits" in kind), kind
    for kind in ("plain", "kept"):
        loss, norm = (curves[kind] - curves["whole"]).abs().unbind(1)
        assert loss.max() < 0.05 and norm[0] < 0.01 * curves["whole"][0, 1], (kind, loss, norm)
    print(f"rank {rank}: {len(kinds) - 2} ways alike, 2 without waits are not", flush=True)
    os._exit(0)


class LateStream(attention.CommStream):
    """Starts so many GPU cycles late."""

    def __init__(self, device, delay: int):
        super().__init__(device)
        self.delay = delay

    @contextlib.contextmanager
    def after_compute(self):
        with super().after_compute():
            torch.cuda._sleep(self.delay)
            yield


def gpu_pipeline_worker():
    """Pipelines over all ranks, with parts and layers that swap: 12 steps near those of one GPU,
    and equal to the last bit where messages are poisoned after use and late. Without waits
    this must fail."""
    parallel.use_more_queues()
    rank, world, device = gpu_ranks()
    cfg, seq, steps, several = dataclasses.replace(MEDIUM, layers=8), 2048, 12, 2 * world
    groups, kernel = attention.Groups(pp=world), exact_kernel(device)
    ids = learnable(cfg, several * steps, seq).view(steps, several, seq + 1).to(device)
    positions = torch.arange(seq, device=device)

    def curve_of(chunks: int, swaps: bool, hard: bool) -> torch.Tensor:
        with torch.device("meta"):
            model = m.LLaMA(cfg, attention.Attention(kernel))
        parts = parallel.keep_stage(model, rank, world, chunks)
        order = parallel.pipeline_order(rank, world, chunks, several)
        runners = [m.whole_layers] * chunks
        pieces = 4 if swaps else 1
        for v, part in enumerate(parts if swaps else ()):
            n = len(part)
            plan = offload.ActivationPlan(n, pieces, 2, 2 * pieces, (n - 2) * 2)
            runners[v] = offload.ChunkedLayers(
                model, (1, seq), plan, seq // pieces, device, torch.bfloat16,
                parallel.in_flight(order, v), part, hard, 10**6 * hard).start
        states = shard.States(model, device, torch.bfloat16, several, groups=groups,
                              gather_layers=swaps, num_chunks=pieces, poison=hard)
        for name, shape in model.shapes.items():
            if states.holds(name):
                states.load(name, m.initial_weight(cfg, name, shape, 0, device))
        parallel.CommStream = functools.partial(LateStream, delay=3 * 10**6 * hard)
        make = PoisonedPipeline if hard else parallel.Pipeline
        pipeline = make(model, parts, runners, groups, several, 1, device, torch.bfloat16)
        parallel.CommStream = attention.CommStream
        tokens = ids[0, :1, :-1]
        pipeline.warm_up((tokens, tokens, torch.ones((), device=device), positions))
        return learn(pipeline, states, 1 / (several * seq))

    def learn(model, states, scale: float) -> torch.Tensor:
        curve = []
        for i, rows in enumerate(ids):
            batch = in_parts(rows[:, :-1], rows[:, 1:], several,
                             torch.tensor(scale, device=device), positions)
            lr = 1e-4 * min(1, (i + 1) / 10)
            curve.append(torch.stack(train.run_step(model, states, batch, lr, 1.0)[:2]))
        return torch.stack(curve)

    whole = learn(*on_gpu(cfg, device, attention.Attention(kernel), micro_batches=several,
                          groups=attention.Groups()), 1 / (world * several * seq))
    kinds = {"stages": (1, False), "parts": (2, False), "stages that swap": (1, True)}
    unlike = 0
    for kind, (chunks, swaps) in kinds.items():
        curve = curve_of(chunks, swaps, False)
        loss, norm = (curve - whole).abs().unbind(1)
        assert loss.max() < 0.05 and norm[0] < 0.01 * whole[0, 1], (kind, loss, norm)
        assert torch.equal(curve_of(chunks, swaps, True), curve), kind
        parallel.wait = lambda _: None
        unlike += not torch.equal(curve_of(chunks, swaps, True), curve)
        parallel.wait = attention.wait
    assert unlike == len(kinds)
    print(f"rank {rank}: {len(kinds)} pipelines alike, without waits they are not", flush=True)
    os._exit(0)


def gpu_tensor_worker():
    """Layers in columns, in every mode, two micro-batches a step: 12 steps near those of one
    column, and equal to the last bit where what was sent or gathered is poisoned after use and the
    stream starts late. Without waits this must fail."""
    rank, world, device = gpu_ranks()
    cfg, seq, steps, tp = dataclasses.replace(MEDIUM, layers=4), 2048, 12, math.gcd(world, 4)
    op, curves = attention.Attention(exact_kernel(device)), {}
    groups = {n: attention.Groups(tp=n) for n in (1, tp)}
    ids = learnable(cfg, 2 * steps, seq).view(steps, 2, seq + 1).to(device)
    kinds = [mode + how for mode in parallel.MODES for how in ("", ", poisoned", ", without waits")]
    for kind in ("whole", *kinds):
        mode, _, how = kind.partition(", ")
        there = groups[1 if kind == "whole" else tp]
        stream = LateStream(device, delay=3 * 10**6 * bool(how))
        columns = (PoisonedColumns if how else parallel.Columns)(mode, there, stream)
        model, states = on_gpu(cfg, device, op, columns, micro_batches=2, groups=there)
        scale = torch.tensor(there.tp / (2 * world * seq), device=device)  # copies of each token
        attention.wait = (lambda _: None) if how == "without waits" else offload.wait
        curve = []
        for i, rows in enumerate(ids):
            labels = torch.full_like(rows[:, 1:], m.IGNORE)
            labels[:, columns.own(seq)] = rows[:, 1:][:, columns.own(seq)]
            parts = in_parts(rows[:, :-1], labels, 2, scale)
            lr = 1e-4 * min(1, (i + 1) / 10)
            curve.append(torch.stack(train.run_step(model, states, parts, lr, 1.0)[:2]))
        curves[kind] = torch.stack(curve)
    attention.wait = offload.wait
    for kind in kinds:
        mode, _, how = kind.partition(", ")
        assert torch.equal(curves[kind], curves[mode]) != (how == "without waits"), kind
    for mode in parallel.MODES:
        loss, norm = (curves[mode] - curves["whole"]).abs().unbind(1)
        assert loss.max() < 0.05 and norm[0] < 0.01 * curves["whole"][0, 1], (mode, loss, norm)
    print(f"rank {rank}: 3 modes alike, 3 without waits are not", flush=True)
    os._exit(0)


def gpu_host_worker():
    """12 steps with optimizer states on the host equal those with states on the GPU to the last
    bit, under all factors, also with everything poisoned after use and copies that start late.
    Without waits this must fail."""
    rank, world, device = gpu_ranks()
    cfg, seq, steps = dataclasses.replace(MEDIUM, layers=3), 512, 12
    ids = learnable(cfg, steps * world, seq).view(steps, world, seq + 1)[:, rank].to(device)
    scale, groups = torch.tensor(1 / (world * seq), device=device), attention.Groups()
    op = attention.Attention(exact_kernel(device))
    shard.VISIT_ELEMENTS = 2**21  # several visits of a matrix
    rows = [(f, layout) for f in shard.legal_factors(world, world)
            for layout in ("intra", "inter")[: 1 + (f.os > f.p)]]
    kinds = ("gpu", "host", "host, not overlapped", "host, poisoned", "host, poisoned, alone",
             "host, without waits")
    for f, layout in rows:
        found = {}
        for kind in kinds:
            hard = "poisoned" in kind or "without" in kind
            overlap = ("host_update",) if "alone" in kind else shard.STREAMS[
                : -1 if "not" in kind else None]
            model, states = on_gpu(cfg, device, op, factors=f, layout=layout, poison=hard,
                                   place=kind.partition(",")[0], delay=10**7 * hard,
                                   overlap=overlap, groups=groups)
            shard.wait = (lambda _: None) if "without" in kind else attention.wait
            curve = []
            for row in ids[:, None]:
                parts = in_parts(row[:, :-1], row[:, 1:], 1, scale)
                curve.append(torch.stack(train.run_step(model, states, parts, 1e-4, 1.0)[:2]))
            found[kind] = torch.stack(curve), [part.values.cpu()
                                               for part in states.state_parts().values()]
        shard.wait = attention.wait
        curve, parts = found.pop("gpu")
        for kind, (other, others) in found.items():
            same = torch.equal(curve, other) and all(map(torch.equal, parts, others))
            assert same != ("without" in kind), (f, layout, kind)
    print(f"rank {rank}: {len(rows)} factors equal with states on the host", flush=True)
    os._exit(0)


def gpu_replay_worker():
    """Steps at planned addresses equal others to the last bit: whole and in chunks, with steps of
    another shape in between."""
    rank, world, device = gpu_ranks()
    cfg, seq = dataclasses.replace(MEDIUM, layers=6), 8192
    kernel, part, groups = exact_kernel(device), seq // world, attention.Groups()
    for plan in (None, offload.ActivationPlan(6, 4, 3, 8, 6)):
        curves = []  # the first run compiles kernels for both shapes, the others find them
        for memory in (None, None, memplan.StepMemory(str(device))):
            op = attention.Ulysses(kernel, world, groups, attention.CommStream(device),
                                   math.gcd(2, cfg.kv_heads // world), world)
            model, states = on_gpu(cfg, device, op, factors=shard.Factors(1, world, world),
                                   gather_layers=plan is not None, num_chunks=4 if plan else 1,
                                   groups=groups)
            if plan:
                offload.ChunkedLayers(model, (1, part), plan, part // 4, device, torch.bfloat16)
            curve = []
            for i in range(9):
                n = part // 2 if i in (4, 6) and not plan else part
                ids = learnable(cfg, 1, n * world).to(device)[:, rank * n : (rank + 1) * n + 1]
                parts = in_parts(ids[:, :-1], ids[:, 1:], 1, torch.tensor(1 / seq, device=device),
                                 torch.arange(n, device=device) + rank * n)
                step = functools.partial(train.run_step, model, states, parts, 1e-4, 1.0)
                curve.append(torch.stack([x.float() for x in (
                    memory.run(step) if memory else step())]))
            curves.append(torch.stack(curve))
            if memory:
                assert memory.counts["hits"] > 0.9 * len(memory.buffers), memory.counts
                memory.give_back()
        assert torch.equal(*curves[1:]), f"planned addresses change the arithmetic: {curves}"
    print(f"rank {rank}: equal at planned addresses", flush=True)
    os._exit(0)


@needs_gpus
@pytest.mark.parametrize("worker, says", [
    (gpu_factors_worker, "curves alike"), (gpu_swap_worker, "2 without waits are not"),
    (gpu_ring_worker, "2 without waits are not"),
    (gpu_pipeline_worker, "without waits they are not"),
    (gpu_tensor_worker, "3 without waits are not"),
    (gpu_host_worker, "equal with states on the host"),
    (gpu_replay_worker, "equal at planned addresses")])
def test_gpu(worker, says, tmp_path):
    ranks = torch.cuda.device_count()
    text = run([], ranks, f"import test_all; test_all.{worker.__name__}()", tmp=tmp_path)
    assert text.count(says) == ranks, text[-2000:]


@needs_gpu
def test_gpu_attention_past_two_to_the_31():
    """A million tokens of 17 heads: the last head as alone, and its rows past the middle as the
    definition in float64 has them."""
    device, seq, heads = torch.device("cuda"), 2**20, 17
    op = attention.Attention(attention.pick_kernel("auto", device, torch.bfloat16))
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, seq, heads, 128, device=device).bfloat16() for _ in range(4))
    o, lse = op.forward(q, k, v)
    whole = [o, *op.backward(do, q, k, v, o, lse)]
    last = [x[:, :, -1:].contiguous() for x in (q, k, v, do)]
    o, lse = op.forward(*last[:3])
    for ours, alone in zip(whole, [o, *op.backward(last[3], *last[:3], o, lse)]):
        assert relative(ours[:, :, -1:], alone) < 1e-3
    at = torch.arange(seq // 2 + 1, seq, seq // 9, device=device)
    q, k, v, do = (x[0, :, 0].double() for x in last)  # (T, D)
    scores = q[at] @ k.t() / 128**0.5
    scores.masked_fill_(torch.arange(seq, device=device) > at[:, None], -torch.inf)
    p = scores.softmax(-1)
    o = p @ v
    ds = p * (do[at] @ v.t() - (do[at] * o).sum(-1, keepdim=True))
    assert relative(whole[0][0, at, -1], o) < 0.02
    assert relative(whole[1][0, at, -1], ds @ k / 128**0.5) < 0.02


@needs_gpu
@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_gpu_documents(kernel):
    """Of two sequences, with documents of one token and of thousands, against each document alone
    and against the definition in float64."""
    device = torch.device("cuda")
    if why := attention.why_not(kernel, device, torch.bfloat16, documents=True):
        pytest.skip(why)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, 6000, heads, 128, device=device).bfloat16()
                   for heads in (8, 2, 2, 8))
    bounds = (0, 1, 2, 130, 131, 5000, 6000, 6064, 6065, 6600, 11999, 12000)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    op = attention.Attention(kernel)
    ours = op.within(attention.Documents(bounds, offsets))
    o, lse = ours.forward(q, k, v)
    found = [o, *ours.backward(do, q, k, v, o, lse)]
    rows = [t.flatten(0, 1)[None] for t in (q, k, v, do)]
    for cut in ours.mask.documents.cuts():
        alone = [t[:, cut].contiguous() for t in rows]
        o, lse = op.forward(*alone[:3])
        same = [o, *op.backward(alone[3], *alone[:3], o, lse)]
        q1, k1, v1 = (t[0].transpose(0, 1).double().requires_grad_() for t in alone[:3])
        exact = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True)
        exact.backward(alone[3][0].transpose(0, 1).double())
        for name, x, y, z in zip("o dq dk dv".split(), found, same, (exact, q1.grad, k1.grad,
                                                                    v1.grad)):
            x = x.flatten(0, 1)[cut].float()
            size = z.norm().item() + 1e-3 * x.numel() ** 0.5  # a lone token's dq, dk are 0
            assert (x - y[0].float()).norm() < 0.01 * size, (cut, name)
            assert (x - z.transpose(0, 1).float()).norm() < 0.01 * size, (cut, name)


# ---------------------------------------------------------------------------- the planner


def cluster(per_node=4, nodes=2, **changes) -> hardware.Profile:
    """An H200's profile with nodes of so many GPUs; a network between them a tenth as fast."""
    meshes = hardware.meshes_of(per_node * nodes, per_node)
    tables = {op: {hardware.mesh_name(mesh): [[size, rate / (10 if mesh[1] > 1 else 1)]
                                              for size, rate in of_two["2x1"]]
                   for mesh in meshes} for op, of_two in H200.collectives.items()}
    return dataclasses.replace(H200, name="cluster", per_node=per_node, collectives=tables,
                               **changes)


def varied(some: random.Random, profile: hardware.Profile) -> hardware.Profile:
    """A profile whose rates are up to twice or half of another one's, each by itself."""
    def vary(x):
        if isinstance(x, dict):
            return {key: vary(value) for key, value in x.items()}
        return [[*at, rate * 2 ** some.uniform(-1, 1)] for *at, rate in x]

    return dataclasses.replace(
        profile, **{name: vary(getattr(profile, name))
                    for name in ("products", "attention", "collectives")},
        **{name: getattr(profile, name) * 2 ** some.uniform(-1, 1)
           for name in ("memory", "optimizer", "to_host")},
        overlap={kind: [some.uniform(1, 1.5), some.uniform(1, 2)] for kind in profile.overlap})


def test_profiles_between_points_and_at_their_ends():
    points = [[1e6, 10.0], [1e8, 30.0]]
    rates = [hardware.interpolate(points, at) for at in (1, 1e6, 1e7, 1e8, 1e12)]
    assert rates == pytest.approx([10, 10, 20, 30, 30])  # linear in the logarithm
    grid = [[16, 1, 1.0], [16, 4, 3.0], [64, 1, 5.0], [64, 4, 7.0]]
    assert hardware.interpolate_twice(grid, 32, 2) == pytest.approx(4)
    assert hardware.interpolate_twice(grid, 1, 99) == 3 and hardware.interpolate_twice(
        grid, 99, 0) == 5
    est = costs.Estimator(cluster(8, 4))
    of_two = hardware.interpolate(H200.collectives["all_gather"]["2x1"], 2**23)
    assert est.bandwidth("all_gather", 2**23, (8, 2)) == pytest.approx(of_two / 10)
    assert not est.held
    est.bandwidth("all_gather", 2**23, (8, 16))
    est.bandwidth("all_gather", 2**23, (3, 1))
    assert est.held == {"all_gather over 8x16 as over 8x4", "all_gather over 3x1 as over 4x1"}


@pytest.mark.parametrize("changes, message", [
    ({"memory": 0.0}, "memory: .*positive numbers"), ({"to_host": -1.0}, "to_host: .*positive"),
    ({"optimizer": float("nan")}, "optimizer: .*positive"),
    ({"gpu_bytes": float("inf")}, "gpu_bytes: .*positive"),
    ({"products": H200.products | {"forward": [[4096, 4096, 1e14], [2048, 4096, 1e14]]}},
     "products forward: .*ascending"),
    ({"products": H200.products | {"input_grad": []}}, "products input_grad: .*positive"),
    ({"products": {"forward": [[1, 1, 1e14]]}}, "lacks input_grad, weight_grad, weight_grad_sum"),
    ({"attention": {"forward": [[4096, 1e14]]}}, "lacks .*backward"),
    ({"collectives": {"all_gather": {"2x1": [[1, 1]]}}},
     "lacks reduce_scatter, all_reduce, broadcast, all_to_all"),
    ({"collectives": H200.collectives | {"all_reduce": {"2x1": [[1, 0]]}}},
     "all_reduce 2x1: .*positive"),
    ({"memory": "fast"}, "memory.*positive numbers")])
def test_profiles_that_are_none(changes, message, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(hardware.profile_text(dataclasses.replace(H200, **changes)))
    with pytest.raises(ValueError, match=f"--cluster .*mine.json: .*{message}"):
        hardware.load_profile(str(file))


def test_first_weights():
    """A product is as large as its input; what writes into the residual stream adds up to it."""
    cfg = m.MODELS["1b"]

    def std(name, *shape):
        return m.initial_weight(cfg, name, shape, 0, "cpu").std().item()

    assert std("embed.weight", 500, 2048) == pytest.approx(1, rel=0.01)
    assert std("head.weight", 500, 2048) == pytest.approx(2048**-0.5, rel=0.01)
    assert std("blocks.0.qkv.weight", 500, 2048) == pytest.approx(2048**-0.5, rel=0.01)
    assert std("blocks.0.down.weight", 500, 5504) == pytest.approx((5504 * 48) ** -0.5, rel=0.01)
    assert m.initial_weight(cfg, "norm.weight", (9,), 0, "cpu").equal(torch.ones(9))


def test_profiles_are_files(tmp_path):
    for name in hardware.profile_names():
        profile = hardware.load_profile(name)
        assert profile.name == name and profile.sources and profile.per_node
        file = tmp_path / "copy.json"
        file.write_text(hardware.profile_text(profile))
        assert hardware.load_profile(str(file)) == profile
    (tmp_path / "H100").mkdir()  # a file is read, whatever its path is called
    file.rename(tmp_path / "H100" / "copy.json")
    assert hardware.load_profile(str(tmp_path / "H100" / "copy.json")) == profile
    for text, message in (("{", "is no profile"), ('{"names": 1}', "is no profile.*names")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            hardware.load_profile(str(tmp_path / "bad.json"))
    with pytest.raises(ValueError, match="or one of .*h200x2"):
        hardware.load_profile("h300")


def test_a_gpu_has_one_profile_whatever_the_case():
    """By its name, of nodes of 8; what these share of one GPU's profile is an H200's, scaled."""
    for name, per_node in (("H100", None), ("H100", 8), ("A800", None), ("H200", None)):
        assert (hardware.load_profile(name, per_node)
                == hardware.load_profile(name.lower(), per_node))
    one, eight = (hardware.load_profile("h100", n) for n in (None, 8))
    assert eight.products == one.products and one.per_node == 1 and eight.per_node == 8
    assert eight.host_bytes > one.host_bytes and eight.collectives["all_gather"]
    plans = [planned("--ranks 1 --seq 64K", 0, cluster) for cluster in ("H100", "h100")]
    assert plans[0] == plans[1]


def planned(flags: str, status: int, cluster: str = "h200x8") -> str:
    """Return what planner.py prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        args = f"--model 7b --batch 1 --cluster {cluster} {flags}"
        assert planner.main(args.split()) == status
    return text.getvalue()


def test_flops_bind_where_attention_is_most_of_a_step():
    text = planned("--ranks 8 --seq 1M --sp 8 --ring 1 --p 1 --g 1 --os 8 --chunk 16K", 0)
    assert re.search("what binds: FLOP/s: with no limit to it a step would take 9.* less", text)


def test_nothing_fits_names_the_memory_that_lacks():
    """States of 65b on the host: each plan lacks hundreds of GiB there, whatever a GPU holds."""
    text = planned("--model 65b --ranks 8 --seq 32K", 1, "H100")
    assert re.match("nothing fits: optimizer states on the host .* are 91.* GiB a rank, there is "
                    "room for 61", text)
    assert "GPU" not in text.splitlines()[0].partition(";")[0]


def test_known_profiles_are_those_of_the_node(monkeypatch):
    """The smallest node that has so many GPUs, else the largest; a machine of one GPU says nothing
    of its network."""
    three = {name: dataclasses.replace(cluster(n), name=name, device="NVIDIA H200")
             for name, n in (("two", 2), ("four", 4), ("eight", 8))}
    three["one"] = dataclasses.replace(H200, name="one", device="NVIDIA H100 80GB HBM3",
                                       per_node=1, collectives=dict.fromkeys(
                                           hardware.COLLECTIVES, {}))
    monkeypatch.setattr(hardware, "profile_names", lambda: list(three))
    monkeypatch.setattr(hardware, "load_profile", three.get)
    for per_node, name in ((1, "two"), (2, "two"), (3, "four"), (8, "eight"), (16, "eight")):
        assert hardware.known_profile("NVIDIA H200", per_node).name == name
    assert hardware.known_profile("NVIDIA H20", 8) is None
    scaled = hardware.known_profile("NVIDIA A100-SXM4-80GB", 8)
    network = scaled.collectives["all_gather"]["8x1"][-1][-1]
    assert network == pytest.approx(300 / 450 * H200.collectives["all_gather"]["2x1"][-1][-1])
    assert scaled.peak_flops == 312e12 and scaled.to_host == H200.to_host / 2
    for per_node in (1, 8):
        known = hardware.known_profile("NVIDIA H100 80GB HBM3", per_node)
        assert known.products == H200.products
        there = planner.Hardware(per_node, per_node, known)
        assert planner.plan(planner.Constraints(4096, torch.bfloat16, 8), m.MODELS["7b"], there)


def measured_profile_worker():
    rank, world, _ = train.start_ranks(100)
    profile = hardware.measure_profile("here", torch.device("cpu"), torch.float32, "cpu", world,
                                       hardware.ON_CPU)
    hardware.check_profile(profile, "here")
    assert set(profile.collectives["all_gather"]) == ({"2x1"} if world > 1 else set())
    if rank == 0:
        print("measured: " + json.dumps(dataclasses.asdict(profile)), flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_profiles_are_measured(ranks, tmp_path):
    text = run([], ranks, "import test_all; test_all.measured_profile_worker()", tmp=tmp_path)
    found = json.loads(re.search("measured: (.*)", text)[1])
    rates = [found[name] for name in ("memory", "optimizer", "to_host")]
    rates += [points[0][-1] for kind in ("products", "attention")
              for points in found[kind].values()]
    assert len(rates) == 9 and all(1e6 < rate < 1e15 for rate in rates)
    assert found["device"] == "CPU" and found["sources"] == {"all": "measured"}


# -- what a plan costs


def every_choice(ranks, per_node, seq=2**13, several=(1, 2, 5)):
    """Plans of all factors, layouts, places, numbers of micro-batches and ways to run a layer."""
    for f, layout, place, count, (recompute, chunk) in itertools.product(
            shard.legal_factors(ranks, per_node), ("intra", "inter"), ("gpu", "host"), several,
            (("none", seq), ("auto", 3000), ("auto", seq), ("full", seq))):
        yield costs.Plan(COSTED, torch.bfloat16, ranks, per_node, seq, 1, 1, count * ranks, 1, 1,
                         recompute, chunk, f, layout, place, accumulates=count > 1)


class Recorded(costs.StepTimeline):
    """A step, and the seconds of all that it launches, by stream."""

    def __init__(self, est, plan, recomputed=0.0):
        self.alone = Counter()
        super().__init__(est, plan, recomputed)

    def launch(self, kind, seconds, across=False):
        self.alone[kind] += seconds
        return super().launch(kind, seconds, across)

    def whole(self) -> "Recorded":
        """Run each micro-batch, none counted for others."""
        self.update()
        self.alone["host_update"] = sum(unit.visit for unit in self.units)
        for i in range(self.plan.micro_batches):
            self.micro_batch(i == self.plan.micro_batches - 1)
        return self


COSTED = dataclasses.replace(m.MODELS["1b"], layers=5)


@pytest.mark.parametrize("ranks, per_node", [(1, 1), (4, 4), (8, 4)])
def test_step_seconds_add_up(ranks, per_node):
    """Named parts are the clock of the timeline, those of a step whose equal micro-batches are
    simulated once are those of the whole; also where the host's launches hold layers back."""
    some = random.Random(ranks)
    for plan in every_choice(ranks, per_node):
        profile = varied(some, cluster(launch={"forward": 4e-3 * some.random(),
                                               "backward": 8e-3 * some.random()}))
        est = costs.Estimator(profile)
        again = some.choice((0.0, 1e-3)) if plan.recompute == "auto" else 0.0
        parts = costs.step_seconds(est, plan, 5 * again, 1e-4)
        if plan.recompute == "full":
            again = costs.layer_seconds(est, plan).whole
        line = Recorded(est, plan, again).whole()
        extra = parts.pop("small sums", 0.0) + parts.pop("copies")
        assert extra >= 1e-4 * plan.micro_batches and all(x > 0 for x in parts.values())
        assert sum(parts.values()) == pytest.approx(line.now, rel=2e-3), plan
        assert not any(line.wires), plan  # all that was launched has been waited for
        if plan.micro_batches < 5:
            assert sum(parts.values()) == pytest.approx(line.now, rel=1e-9), plan
        listed = {part for degree in planner.DEGREES for part in degree.seconds}
        assert set(parts) <= listed, plan
        if ranks == 1:
            sent = {*shard.STREAMS, "all-to-all", "slowed by communication"} & set(parts)
            assert sent <= ({"host_update"} if plan.os_place == "host" else set())


def test_communication_is_hidden_but_not_free():
    """Where nothing slows, a step lies between its longest part and the sum of all; where a stream
    does not overlap, or both slow down, it takes longer."""
    some = random.Random(0)
    for plan in every_choice(8, 4):
        slow = varied(some, cluster())
        free = dataclasses.replace(slow, overlap={kind: [1.0, 1.0] for kind in slow.overlap})
        line = Recorded(costs.Estimator(free), plan).whole()
        line.micro_batches()  # fills in `computed`, of a step's
        compute = sum(line.computed.values())
        line = Recorded(line.est, plan).whole()
        assert line.slowed == 0 and line.now >= compute * (1 - 1e-9)
        copied = line.alone["host_update"]
        assert line.now >= max(copied, sum(line.alone.values()) - copied) * (1 - 1e-9)
        assert line.now <= (compute + sum(line.alone.values())) * (1 + 1e-9)
        assert sum(line.exposed.values()) == pytest.approx(line.now - compute, abs=1e-9)
        both = Recorded(costs.Estimator(slow), plan).whole()
        assert both.now >= line.now * (1 - 1e-9)
        hidden = dataclasses.replace(plan, overlap=())
        bare = Recorded(line.est, hidden).whole()
        assert bare.now == pytest.approx(compute + sum(bare.alone.values())), plan
        kind = some.choice(shard.STREAMS)
        without = dataclasses.replace(plan, overlap=tuple(s for s in shard.STREAMS if s != kind))
        bare = Recorded(line.est, without).whole()
        assert bare.exposed.get(kind, 0) == pytest.approx(bare.alone[kind])
        if plan.os_place == "gpu":  # else a late broadcast may stand on the wire before a gather
            assert bare.now >= line.now * (1 - 1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("layout", ["intra", "inter"])
def test_streams_carry_what_shard_launches(layout, several, recompute, monkeypatch):
    """The bytes of each stream in a step of rank 0 of 8, of collectives none of which runs, where a
    collective of so many bytes takes as many seconds. (All ways to lay them out in one process.)"""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    cfg = m.ModelConfig(128, 64, 5, 4, 4, 128, 16)  # matrices are multiples of 8 * 128 elements
    launched = Counter()
    current = []

    @contextlib.contextmanager
    def after_compute(stream):
        current.append(next(name for name, s in states.streams.items() if s is stream))
        yield
        current.pop()

    def add(x):
        if current:  # else a small sum
            launched[current[-1]] += x.nbytes

    monkeypatch.setattr(attention.CommStream, "after_compute", after_compute)
    monkeypatch.setattr(shard, "all_gather", lambda out, x, group: add(out))
    monkeypatch.setattr(shard, "reduce_scatter", lambda out, x, group: add(x))
    monkeypatch.setattr(dist, "broadcast", lambda x, group, group_src: add(x))
    monkeypatch.setattr(dist, "all_reduce", lambda x, *_, **__: add(x))
    flat = {op: {"2x1": [[1.0, 1.0]]} for op in hardware.COLLECTIVES}
    est = costs.Estimator(dataclasses.replace(H200, collectives=flat))
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        groups = attention.Groups()
        for f in shard.legal_factors(8, 4):
            with torch.device("meta"):
                model = m.LLaMA(cfg, m.plain_attention)
            if recompute == "full":
                model.layer_runner = offload.recomputed_layers
            states = shard.States(model, torch.device("cpu"), torch.bfloat16, several, f, layout,
                                  groups, gather_layers=recompute == "full")
            tokens = torch.zeros(several, 1, 32, dtype=torch.int64)
            batch = train.Batch(tokens, tokens, scale=torch.ones(()))
            launched.clear()
            train.run_step(model, states, batch, 0.1, 1.0)
            plan = costs.Plan(cfg, torch.bfloat16, 8, 4, 32, 1, 1, 8 * several,
                              recompute=recompute, chunk=32, factors=f, os_layout=layout,
                              accumulates=several > 1)
            alone = Recorded(est, plan).whole().alone
            assert {name: alone[name] for name in shard.STREAMS} == pytest.approx(
                {name: launched[name] for name in shard.STREAMS}), f
    finally:
        dist.destroy_process_group()


def test_bytes_are_those_of_the_degrees():
    """Every field of a plan that is a choice is in the table of degrees, and with_memory counts
    the terms of all."""
    given = {"model", "dtype", "ranks", "per_node", "seq", "overlap", "accumulates"}
    found = {"activations", "memory", "host", "seconds"}
    names = [name for degree in planner.DEGREES for name in degree.names]
    assert len(set(names)) == len(names)
    assert {f.name for f in dataclasses.fields(costs.Plan)} == {*names} | given | found
    for plan in every_choice(8, 4):
        if plan.recompute == "auto":
            kept = offload.ActivationPlan(5, -(-plan.tokens // plan.chunk), 5, 5)
            plan = dataclasses.replace(plan, activations=kept)
        counted = planner.with_memory(plan)
        terms = [degree.bytes(plan) for degree in planner.DEGREES]
        assert sum(counted.memory.lasting.values()) == pytest.approx(
            sum(sum(t.values()) for t in terms), rel=1e-12)
        peak = max(sum(terms.values()) for terms in counted.memory.peaks.values())
        assert counted.memory.total() == sum(counted.memory.lasting.values()) + peak
        assert sum(planner.memory_terms(counted).values()) == pytest.approx(
            counted.memory.total() / 2**30)


@pytest.mark.parametrize("pp, v", [(2, 1), (4, 1), (4, 2), (4, 4), (2, 2), (8, 1)])
def test_pipelines_are_idle_as_long_as_their_passes(pp, v):
    """Of equal passes idle / total = (P - 1) / (V*M + P - 1), and the bound of the search is it;
    of others it is what parallel.py's order takes, also of so many micro-batches that some are
    simulated for all; messages only add."""
    cfg = dataclasses.replace(COSTED, layers=pp * v)
    for m_ in (pp, 2 * pp, 40 * pp):
        plan = costs.Plan(cfg, torch.bfloat16, 8 * pp, 8, 2**13, batch=8 * m_, pp=pp, pp_chunks=v)
        assert plan.micro_batches == m_
        found = costs.makespan(plan, (1.0,) * (pp * v), (2.0,) * (pp * v), 0.0)
        busy = 3.0 * m_ * v
        assert 1 - busy / found == pytest.approx(parallel.bubble(pp, v, m_)), m_
        assert found == pytest.approx(busy + 3.0 * (pp - 1))
        with_messages = costs.makespan(plan, (1.0,) * (pp * v), (2.0,) * (pp * v), 0.1)
        assert with_messages >= found + 2 * 0.1 * (pp - 1) * (1 - 1e-9)
        if m_ == pp:
            orders = [parallel.pipeline_order(s, pp, v, m_) for s in range(pp)]
            times = parallel.run_times(orders, [1.0] * pp * v, [2.0] * pp * v)
            assert found == pytest.approx(max(end for done in times for _, end in done))
    est = costs.Estimator(cluster(8, pp))
    plan = dataclasses.replace(plan, chunk=2**13, accumulates=True)
    parts = costs.step_seconds(est, plan)  # the last part takes longer, with the head
    assert parts["pipeline idle"] > 0 and parts["stage messages"] > 0
    computed = sum(costs.computation_seconds(est, plan).values())
    assert computed <= sum(costs.bound_seconds(est, plan, computed).values()) <= sum(parts.values())


def test_bytes_of_stages_are_those_in_flight():
    """A stage has its layers' states, and what waits for its backward: of the first P
    micro-batches, of the last one."""
    cfg = dataclasses.replace(COSTED, layers=8)
    whole = costs.Plan(cfg, torch.bfloat16, 8, 8, 2**15, batch=8, chunk=2**15)
    plan = dataclasses.replace(whole, ranks=32, pp=4, batch=64)
    params = [costs.stage_params(plan, stage) for stage in range(4)]
    assert sum(params) == pytest.approx(m.param_count(cfg), rel=1e-5)  # the last norm
    assert params[0] == params[3] > params[1] == params[2]
    assert [costs.in_flight(plan, stage) for stage in range(4)] == [8, 6, 4, 2]
    one = planner.kept_bytes(whole)["activations"]
    assert planner.kept_bytes(plan)["activations"] == one
    assert planner.kept_bytes(plan, 3)["activations"] == one / 4
    memory = planner.with_memory(plan).memory
    assert "head and loss" not in memory.peaks and memory.lasting["messages"] == 8 * 2**15 * cfg.dim
    for v in (1, 2):  # as the engine counts passes
        order = parallel.pipeline_order(1, 4, v, 16)
        equal = costs._in_flight((1,) * v, 1, 4, 12)
        most = [parallel.in_flight(order, chunk) for chunk in range(v)]
        assert max(most) <= equal <= sum(most)


@pytest.mark.parametrize("mode, forward, backward", [
    ("mtp", {"all_reduce": 2}, {}),
    ("msp", {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 2}),
    ("fsp", {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 2})])
def test_columns_exchange_what_no_product_hides(mode, forward, backward):
    """Seconds of a layer's collectives of (N, C), where each operation has another bandwidth, and
    products hide the rest; and bytes: h, x and what qkv and gate|up take."""
    rates = {op: 1e12 + 1e11 * i for i, op in enumerate(hardware.COLLECTIVES)}
    tables = {op: {"2x1": [[1.0, rate]], "4x1": [[1.0, rate]]} for op, rate in rates.items()}
    usual = cluster()
    profile = dataclasses.replace(usual, collectives=tables,
                                  overlap={"collectives": [1.0, 1.0], "all_to_all": [1.0, 1.0]})
    cfg = dataclasses.replace(m.MODELS["7b"], layers=4)
    est = costs.Estimator(profile)
    plan = costs.Plan(cfg, torch.bfloat16, 4, 4, 2**13, batch=1, chunk=2**13, tp=4, tp_mode=mode)
    layer = costs.layer_seconds(est, plan)
    size = 2**13 * cfg.dim * 2
    seconds = [sum(count * size / rates[op] for op, count in ops.items())
               for ops in (forward, backward)]
    assert layer.columns == pytest.approx(sum(seconds))
    more, *_ = costs.column_exchanges(est, plan, "weight_grad")
    assert more == pytest.approx(seconds[0])
    x, attn, others = costs.layer_bytes(cfg, 2**13, torch.bfloat16)
    kept = sum(costs.column_bytes(plan))
    split = 2 * x / (1 if mode == "mtp" else 4) + (2 * x if mode == "msp" else 0)
    assert kept == pytest.approx(split + (attn + others - x) / 4)
    parts = costs.step_seconds(est, plan)
    at_ends = 2 * size / rates["all_gather"] if mode == "mtp" else 0
    assert parts["tensor exchanges"] == pytest.approx(4 * sum(seconds) + at_ends)
    ends = 2 * cfg.vocab * cfg.dim
    assert costs.stage_params(plan, 0) - ends == pytest.approx(
        (m.param_count(cfg) - ends) / 4, rel=1e-3)


# -- the choice


def every_cut(constraints, model, there):
    """All tp, pp, pp_chunks that constraints leave open, of powers of two."""
    if constraints.tp == constraints.pp == 1:
        return [(1, 1, 1)]
    sizes = [n for n in (1, 2, 4, 8) if there.ranks % n == 0]
    return [(tp, pp, v) for tp, pp, v in itertools.product(sizes, sizes, (1, 2, 4))
            if model.kv_heads % tp == there.per_node % tp == 0 and tp * pp <= there.ranks
            and pp * v <= model.layers and (pp > 1 or v == 1)]


def every_plan(constraints, model, there, filters=True):
    """Plans with their bytes and seconds, of all choices; `filters`: those that planner.py and AMSP
    leave out are left out, too."""
    est = costs.Estimator(there.profile)
    for cut in every_cut(constraints, model, there):
        for plan in every_plan_of(cut, constraints, model, there, filters):
            yield est, plan


def every_plan_of(cut, constraints, model, there, filters):
    tp, pp, v = cut
    ranks, seq = there.ranks // (tp * pp), constraints.seq
    per_node = min(there.per_node, there.ranks // pp) // tp
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for sp, ring in itertools.product(sizes, sizes):
        each = constraints.batch * sp // ranks
        heads = model.kv_heads // tp
        if (constraints.batch * sp % ranks or sp % ring or heads % (sp // ring)
                or ring > 1 and (per_node % (sp // ring) or seq % (2 * ring))):
            continue
        of_rank = heads // (sp // ring)
        heads = [n for n in range(1, of_rank + 1) if of_rank % n == 0]
        states = [shard.Factors(p, g, os) for p, g, os in itertools.product(sizes, repeat=3)
                  if os % p == 0 and (g in (p, os) or not filters and g % p == os % g == 0)]
        for micro_batch, groups, run, size, f, layout, place in itertools.product(
                [n for n in range(1, each + 1) if each % n == 0], heads, ("none", "auto", "full"),
                (2**14, 2**13, 2**12), states, ("intra", "inter"), ("gpu", "host")):
            tokens = micro_batch * seq // sp
            usual = (micro_batch == 1 or tokens <= 2**13) and groups <= 4
            params = m.param_count(model) / (tp * pp)
            held = costs.state_bytes(params, f, constraints.dtype, False)["optimizer"]
            if v > 1 and each // micro_batch % pp or tp > 1 and run == "auto":
                continue
            usual = usual and (place == "gpu" or held > there.gpu_budget / 20)
            if (filters and not usual or sp == ring and groups > 1
                    or run != "auto" and size < 2**14
                    or f.os == f.p and layout == "inter"):
                continue
            chunk = -(-tokens // -(-tokens // size)) if run == "auto" else tokens
            yield costs.Plan(
                model, constraints.dtype, there.ranks, there.per_node, seq, sp, ring,
                constraints.batch, micro_batch, groups, run, chunk, f, layout, place,
                accumulates=each > micro_batch, tp=tp, tp_mode=constraints.tp_mode, pp=pp,
                pp_chunks=v)


def best_of_all(constraints, model, there, filters=True) -> costs.Plan | None:
    """The fastest plan that fits, by trying everything; None if none does."""
    best = None
    search = planner.Search(constraints, model, there)
    for est, plan in every_plan(constraints, model, there, filters):
        lost = 0.0, 0.0
        if plan.pp > 1:  # each stage has its own room
            with contextlib.suppress(planner.TooLarge):
                plan, lost = search.fit(plan)
                plan = dataclasses.replace(plan, seconds=costs.step_seconds(est, plan, *lost))
                best = plan if best is None or plan.token_s < best.token_s else best
            continue
        chunks = -(-plan.tokens // plan.chunk)
        if plan.recompute == "auto":
            keeps = offload.ActivationPlan(model.layers, chunks, model.layers,
                                           model.layers * chunks)
            plan = dataclasses.replace(plan, activations=keeps)
        plan = planner.with_memory(plan)
        host = there.host_budget - plan.host.get("optimizer", 0.0)
        if host < 0:
            continue
        if plan.memory.total() > there.gpu_budget:
            if plan.recompute != "auto":
                continue
            layer = costs.layer_seconds(est, plan)
            sizes = planner.Sizes(*costs.layer_bytes(model, plan.tokens, constraints.dtype),
                                  layer.forward, layer.recompute, layer.attention, layer.post)
            try:
                for _ in range(3):  # a last layer that is not kept whole needs q, k, v, too
                    others = plan.memory.total() - plan.memory.lasting["activations"]
                    kept, seconds = planner.plan_activations(
                        model.layers, sizes, chunks, there.profile.to_host,
                        there.gpu_budget - others, host,
                        busy=planner.link_seconds(est, plan))
                    plan = planner.with_memory(dataclasses.replace(plan, activations=kept))
                    if plan.memory.total() <= there.gpu_budget:
                        break
                    none = dataclasses.replace(kept, kept_chunks=0)
                    plan = planner.with_memory(dataclasses.replace(plan, activations=none))
            except ValueError:
                continue
            again = planner.recomputed_seconds(kept, sizes)
            lost = again, max(0.0, seconds - again)
            assert plan.memory.total() <= there.gpu_budget and plan.activations == kept
        plan = dataclasses.replace(plan, seconds=costs.step_seconds(est, plan, *lost))
        if best is None or plan.token_s < best.token_s:
            best = plan
    return best


def between(unit_seconds):
    """costs.unit_seconds also for p < g < os, as it would run: gradients to g as if os were g, then
    once a step to os as if p were g."""
    def run(est, plan, matrices):
        f = plan.factors
        if f.g in (f.p, f.os):
            return unit_seconds(est, plan, matrices)
        first, last, rest = (
            unit_seconds(est, dataclasses.replace(plan, factors=shard.Factors(*factors)), matrices)
            for factors in ((f.p, f.g, f.g), (f.g, f.g, f.os), (f.p, f.os, f.os)))
        return dataclasses.replace(rest, scatter=first.scatter, last_scatter=first.scatter,
                                   keep=first.keep, reduce=last.reduce, cast=last.cast)

    return run


SMALL_CASES = [  # model of some layers, GPUs, of a node, tokens a sequence, sequences, GiB, of host
    ("tiny", 4, 2, 2, 2**10, 8, 1, 1), ("160m", 3, 4, 2, 2**12, 8, 0.9, 1),
    ("160m", 3, 4, 4, 2**15, 4, 3, 2), ("1b", 2, 8, 4, 2**12, 8, 5.5, 4),
    ("1b", 3, 8, 8, 2**15, 8, 2.8, 1), ("1b", 3, 4, 2, 2**16, 2, 6, 8),
    ("1b", 3, 4, 4, 2**12, 16, 4, 1), ("1b", 2, 2, 1, 2**14, 4, 200, 200),
    ("1b", 2, 4, 4, 2**14, 4, 0.5, 0.1)]


@pytest.mark.parametrize("name, layers, ranks, per_node, seq, batch, gpu, host", SMALL_CASES)
def test_plan_is_the_best_of_all(name, layers, ranks, per_node, seq, batch, gpu, host, monkeypatch):
    """Against brute force under the same filters, whatever a machine is good at; without them (g
    anywhere between p and os, any micro-batch and head groups) little is lost: pytest -s shows."""
    model = dataclasses.replace(m.MODELS[name], layers=layers)
    constraints = planner.Constraints(seq, torch.bfloat16, batch=batch)
    some = random.Random(ranks)
    usual = cluster(per_node, ranks // per_node)
    sums = [[*at, rate / 4] for *at, rate in usual.products["weight_grad_sum"]]
    slow_sums = dataclasses.replace(usual, products=usual.products | {"weight_grad_sum": sums})
    for profile in (varied(some, usual), slow_sums, usual):
        there = planner.Hardware(ranks, per_node, profile, gpu * 2**30, host * 2**30)
        best = best_of_all(constraints, model, there)
        if best is None:
            with pytest.raises(planner.TooLarge):
                planner.plan(constraints, model, there)
            continue
        plans = planner.plan(constraints, model, there)
        assert min(plan.token_s for plan in plans) == pytest.approx(best.token_s, rel=1e-9), best
        assert plans[0].token_s <= (1 + planner.TIE) * best.token_s
        assert [plan.token_s for plan in plans[1:]] == sorted(p.token_s for p in plans[1:])
    if best is not None:
        with monkeypatch.context() as patch:
            patch.setattr(costs, "unit_seconds", between(costs.unit_seconds))
            free = best_of_all(constraints, model, there, filters=False)
        regret = best.token_s / free.token_s - 1
        print(f"{name}, {layers} layers, {ranks} GPUs: without filters "
              f"{planner.difference(best, free) or 'the same'}: regret {regret:.2%}")
        assert 0 <= regret + 1e-9 < 0.1


@pytest.mark.parametrize("name, layers, ranks, per_node, seq, batch, gpu, host", [
    ("tiny", 5, 4, 2, 2**10, 4, 1, 1), ("1b", 4, 4, 4, 2**15, 1, 3.5, 4)])
def test_columns_and_stages_are_the_best_of_all(name, layers, ranks, per_node, seq, batch, gpu,
                                                host):
    """As above with tensor modes and pipelines: the bounds of plans are bounds of these, too."""
    model = dataclasses.replace(m.MODELS[name], layers=layers)
    some = random.Random(7)
    usual = cluster(per_node, ranks // per_node)
    for profile, mode in ((varied(some, usual), "fsp"), (usual, "mtp")):
        constraints = planner.Constraints(seq, torch.bfloat16, batch=batch, tp=None, pp=None,
                                          tp_mode=mode)
        there = planner.Hardware(ranks, per_node, profile, gpu * 2**30, host * 2**30)
        best = best_of_all(constraints, model, there)
        found = planner.plan(constraints, model, there)
        print(planner.choices(best), best.seconds)
        assert min(plan.token_s for plan in found) == pytest.approx(best.token_s, rel=1e-9), best
        assert found[0].token_s <= (1 + planner.TIE) * best.token_s


def test_more_of_a_machine_never_takes_longer():
    """Memory of GPU and host, network, copies, memory bandwidth: each may tie, and none costs."""
    some = random.Random(1)
    solved = 0
    for _ in range(9):
        per_node = some.choice((2, 4))
        ranks = per_node * some.choice((1, 2))
        model = dataclasses.replace(m.MODELS["1b"], layers=some.choice((3, 4)))
        seq = 2 ** some.randint(12, 16)
        constraints = planner.Constraints(seq, torch.bfloat16, batch=ranks * some.choice((1, 4)))
        there = planner.Hardware(ranks, per_node, varied(some, cluster(per_node, 2)),
                                 some.uniform(2, 8) * 2**30, some.uniform(0.5, 4) * 2**30)
        profile = there.profile
        try:
            least = min(p.token_s for p in planner.plan(constraints, model, there))
        except planner.TooLarge:
            continue
        solved += 1
        for changes in ({"gpu_budget": 1.5 * there.gpu_budget},
                        {"host_budget": 1.5 * there.host_budget},
                        *({"profile": hardware.scaled(profile, "more", **{name: 1.5})}
                          for name in ("network", "host", "memory", "flops"))):
            more = dataclasses.replace(there, **changes)
            found = min(p.token_s for p in planner.plan(constraints, model, more))
            assert found <= (1 + planner.TIE) * least, (changes.keys(), constraints, there)
    assert solved > 5


@pytest.mark.parametrize("name, seq, gpu", [("1b", 2**12, 8), ("1b", 2**15, 5),
                                            ("7b", 2**14, 40)])
def test_twice_as_many_gpus_never_take_longer(name, seq, gpu):
    """While they divide the batch, for a step of the same tokens."""
    model = dataclasses.replace(m.MODELS[name], layers=8)
    before = None
    for ranks in (1, 2, 4, 8, 16):
        there = planner.Hardware(ranks, min(ranks, 4), cluster(4, 8), gpu * 2**30, 16 * 2**30)
        constraints = planner.Constraints(seq, torch.bfloat16, batch=32)
        try:
            found = min(p.step_s for p in planner.plan(constraints, model, there))
        except planner.TooLarge:
            continue
        assert before is None or found <= (1 + planner.TIE) * before, ranks
        before = found


# -- the program


JSON_KEYS = ("dp sp ring tp tp_mode pp pp_chunks p g os os_layout os_place micro_batch recompute "
             "alpha resident_layers chunk head_groups step_s tgs mfu_causal mfu_full gpu_gib "
             "host_gib").split()
ASKED = "--model 1b --ranks 4 --per-node 2 --seq 8K --batch 16 --cluster h200x2".split()


def ask(capsys, *args) -> tuple[int, str]:
    """The exit status and text of planner.py."""
    status = planner.main([str(arg) for arg in args])
    return status, capsys.readouterr().out


def test_planner_prints_plans(capsys):
    status, text = ask(capsys, *ASKED, "--gpu-memory", "30G", "--top", 4, "--leaf", 1)
    assert status == 0 and len(re.findall(r"^ *\d+  .*%", text, re.M)) == 4
    assert "what binds: " in text and "order of nodes: 0..1" in text
    assert "not in the profile: " in text  # h200x2 has no network between nodes
    status, text = ask(capsys, *ASKED, "--json")
    found = json.loads(text)
    assert status == 0 and list(found) == ["plans", "binding"] and found["binding"]
    assert len(found["plans"]) == 10 and all(list(p) == JSON_KEYS for p in found["plans"])
    ties = sum(p["tgs"] >= found["plans"][0]["tgs"] / (1 + planner.TIE) for p in found["plans"])
    status, text = ask(capsys, *ASKED)
    assert f"{ties - 1} of these tie with the first within 0.2%" in text or ties == 1


def test_planner_respects_flags(capsys):
    by_hand = "--p 2 --g 4 --os 4 --os-layout inter --sp 2 --micro-batch 4 --head-groups 2"
    by_hand += " --ring 2 --os-place gpu"
    _, text = ask(capsys, *ASKED, *by_hand.split(), *"--alpha 0.5 --resident-layers 4".split(),
                  "--chunk", "2K", "--json")
    found, = json.loads(text)["plans"]
    want = {"p": 2, "g": 4, "os": 4, "os_layout": "inter", "os_place": "gpu",
            "sp": 2, "ring": 2, "dp": 2, "micro_batch": 4, "head_groups": 2, "alpha": 0.5,
            "resident_layers": 4, "chunk": 2048}
    assert {key: found[key] for key in want} == want
    _, text = ask(capsys, *ASKED, "--recompute", "full", "--json")
    assert {p["recompute"] for p in json.loads(text)["plans"]} == {"full"}


def test_planner_places_rings(capsys, tmp_path):
    """Every second node under one leaf: the two nodes of a ring come together, and what goes
    around it is counted."""
    leaves = tmp_path / "leaves"
    leaves.write_text("".join(f"node{i} {i % 2}\n" for i in range(4)))
    flags = "--model llama3-8b --ranks 16 --per-node 4 --seq 1M --batch 2 --sp 8 --ring 2".split()
    status, text = ask(capsys, *flags, "--cluster", "h200x8-400g", "--leaf", leaves)
    assert status == 0 and "order of nodes: node0, node2, node1, node3" in text
    assert re.search(r"\bring\b", text.partition("order of nodes")[2]), text
    plan = costs.Plan(m.MODELS["llama3-8b"], torch.bfloat16, 16, 4, 2**20, 8, 2, 2, 1, 2)
    # k, v forward and backward, sums in bf16
    sent = 2 * 3 * 2**17 * 8 * 128 * 2 * 32
    assert costs.ring_traffic(plan) == sent


@pytest.mark.parametrize("flags, message", [
    ("--cluster h300", "--cluster h300: .*one of .*h200x2"),
    ("--ranks 6 --per-node 4", "--per-node 4: does not divide 6 ranks; nearest: 3"),
    ("--ranks 8 --sp 3", "--sp 3: it must divide 8 ranks"),
    ("--ranks 8 --sp 8 --ring 3", "--ring 3: with --sp 8 .* 16 key/value heads .* of 1, 2, 4, 8"),
    ("--ranks 8 --model llama3-8b --sp 8 --ring 1 --head-groups 2", "1 key/value heads .* of 1$"),
    ("--ranks 16 --per-node 16 --model llama3-8b --sp 16 --ring 1", "--ring 1: .* of 2, 4, 8, 16"),
    ("--ranks 8 --sp 8 --ring 8 --seq 40", "--ring 8: .* --seq 40 .* one of 1, 2, 4$"),
    ("--ranks 8 --ring 2 --document-token 0", "--ring 2: attention inside documents .*: --ring 1"),
    ("--ranks 8 --sp 3 --tokenizer x", "--sp 3: .* and ring is 1 with documents: one"),
    ("--ranks 8 --tp 3", "--tp 3: .* 16 heads, 16 key/value heads, .*: one of 1, 2, 4, 8$"),
    ("--ranks 8 --per-node 4 --tp 8", "--tp 8: it must divide 4 GPUs of a node"),
    ("--ranks 8 --per-node 4 --pp 16", "--pp 16: .* nearest: 8$"),
    ("--ranks 24 --per-node 4 --pp 4", "--pp 4: .* whole nodes of 4, .* nearest: 3 or 6$"),
    ("--ranks 8 --pp 8 --pp-chunks 4", "--pp-chunks 4: 8 stages x 4 parts .* 24 layers; at most 3"),
    ("--ranks 8 --pp-chunks 2", "--pp-chunks 2: of a pipeline; --pp from 2, or auto"),
    ("--ranks 8 --pp 4 --pp-chunks 2 --sp 1 --batch 6",
     "--pp-chunks 2: 3 micro-batches are no multiple of 4 stages.* --batch: 8"),
    ("--ranks 4 --tp 4 --sp 4", "--sp 4: it must divide 1 ranks"),
    ("--ranks 4 --tp 4 --seq 18", "--seq 18: no multiple of sp 1 x tp 4; nearest: 16 or 20$"),
    ("--ranks 4 --tp 4 --alpha 0.5", "--tp 4: its layers run whole, without --chunk, --alpha"),
    ("--top 0", "--top 0: from 1"),
    ("--ranks 8 --leaf 0", "--leaf 0: neither a number"), ("--seq x", "a whole number"),
    ("--p 3", "3 shards do not fit"), ("--no-such-flag", "unrecognized arguments")])
def test_planner_refuses(flags, message, capsys):
    with pytest.raises(SystemExit) as e:
        planner.main(["--model", "1b", *flags.split()])
    assert e.value.code == 2 and re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("flags", [
    "--model 7b --ranks 1 --seq 4M --cluster h200x2", "--model 13b --ranks 2 --seq 4K --batch 2 "
    "--cluster h200x2 --host-memory 8G --gpu-memory 60G"])
def test_planner_says_what_would_fit(flags, capsys):
    """Nothing fits, and each change that is named really does."""
    status, text = ask(capsys, *flags.split())
    assert status == 1 and re.search(r"nothing fits: .* GiB", text)
    status, only = ask(capsys, *flags.split(), "--json")
    assert status == 1 and json.loads(only)["plans"] == []
    changes = text.partition("what would fit, the smallest change first:\n")[2].splitlines()
    assert len(changes) > 1
    for change in changes:
        number = int(re.search(r"\d+", change)[0])
        if "--seq" in change:
            more = ["--seq", number]
        elif "of host memory" in change:
            more = ["--host-memory", f"{number}G"]
        elif "of memory a GPU" in change:
            continue  # more than the profile's machine has
        else:
            more = ["--ranks", number]
        status, _ = ask(capsys, *flags.split(), *more, "--top", 1)
        assert status == 0, change


def test_planner_is_fast():
    """Under a second for a node, under ten for 1024 GPUs; here three times as long is allowed."""
    for name, ranks, profile, seq, batch, most in (
            ("7b", 8, H200, 2**18, 2, 3), ("7b", 1024, cluster(8, 128), 2**12, 1024, 30)):
        there = planner.Hardware(ranks, 8, profile, 132 * 2**30, 60 * 2**30)
        constraints = planner.Constraints(seq, torch.bfloat16, batch=batch)
        start = time.perf_counter()
        planner.plan(constraints, m.MODELS[name], there)
        assert time.perf_counter() - start < most


def test_dry_run_prints_the_planners_table(capsys):
    flags = "--model 160m --ranks 2 --per-node 2 --seq 4K --batch 4 --dtype bf16".split()
    flags += "--gpu-memory 20G --host-memory 64G".split()
    profile = hardware.known_profile("NVIDIA H200", 2).name
    _, table = ask(capsys, *flags, "--cluster", profile)
    table = table[table.index("step s"):].partition("\n\nGiB of a GPU")[0]
    train.main([*flags, "--dry-run", "--device", "cpu"])
    text = capsys.readouterr().out
    assert table in text and "second best: " in text and "% predicted" in text


# ---------------------------------------------------------------------------- placement


@pytest.mark.parametrize("f", [shard.Factors(1, 1, 1), shard.Factors(1, 1, 8),
                               shard.Factors(2, 2, 4), shard.Factors(2, 4, 4),
                               shard.Factors(1, 4, 4), shard.Factors(8, 8, 8),
                               shard.Factors(4, 4, 8)])
@pytest.mark.parametrize("layout", ["intra", "inter"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_rings_are_what_shard_launches(f, layout, micro_batches, monkeypatch):
    """The collectives of a step of rank 0 of 8, none of which runs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    cfg = dataclasses.replace(SMALL, layers=4)
    launched = Counter()
    groups = attention.Groups()

    def add(group, size, times):
        for (name, *members), made in groups.made.items():
            if made is group:
                launched[name, *members] += times * size * (1 - 1 / len(members))

    monkeypatch.setattr(shard, "all_gather", lambda out, x, group: add(group, out.nbytes, 1))
    monkeypatch.setattr(shard, "reduce_scatter", lambda out, x, group: add(group, x.nbytes, 1))
    monkeypatch.setattr(dist, "broadcast",
                        lambda x, group, group_src: add(group, x.nbytes, 1))
    monkeypatch.setattr(dist, "all_reduce",  # the norm is small
                        lambda x, *_, group=None, **__: x.ndim and add(group, x.nbytes, 2))
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        with torch.device("meta"):
            model = m.LLaMA(cfg, m.plain_attention)
        states = shard.States(model, torch.device("cpu"), torch.bfloat16, micro_batches, f, layout,
                              groups)
        tokens = torch.arange(32 * micro_batches).remainder(cfg.vocab).view(micro_batches, 1, 32)
        launched.clear()  # what making groups has sent
        batch = train.Batch(tokens, tokens, scale=torch.ones(()))
        train.run_step(model, states, batch, 0.1, 1.0)
    finally:
        dist.destroy_process_group()
    elements = [param.param_shard.numel() * f.p for unit in states.units for param in unit]
    layers = sum(param.param_shard.numel() * f.p for unit in states.units[1:-1] for param in unit)
    rings = placement.make_rings(8, f, layout, micro_batches, 2 * sum(elements), 2 * sum(elements))
    sent = Counter()
    for ring in rings:
        name = ring.kind.replace("scatter", "reduce")  # they share communicators
        sent[name, *range(0, ring.block, ring.stride)] += ring.sent
    assert launched.keys() == sent.keys()
    for name, *members in sent:
        if name == "param_gather":  # a weight that its buffer still holds is not gathered again
            least = 2 * micro_batches * layers * (1 - 2 / cfg.layers)
            assert least <= launched[name, *members] / 2 * len(members) / (len(members) - 1)
            assert launched[name, *members] <= sent[name, *members]
        else:
            assert launched[name, *members] == pytest.approx(sent[name, *members])


def walk_of_rings(leaves, per_node, f, layout, micro_batches, param_bytes, grad_bytes, sp,
                  exchanged):
    """Return the spine bytes of a step by kind, rank by rank and edge by edge."""
    ranks = len(leaves) * per_node
    total = Counter()

    def ring(kind, key, size, times):
        for name in {key(r) for r in range(ranks)}:
            group = [r for r in range(ranks) if key(r) == name]
            for r, then in zip(group, group[1:] + group[:1]):
                if leaves[r // per_node] != leaves[then // per_node]:
                    total[kind] += times * size * (len(group) - 1) / len(group)

    def p_group(r):
        return r // f.p

    def subgroup(r):
        return r // f.os, r % f.p

    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        ring("param_gather", p_group, param_bytes, 2)
        ring("grad_scatter", p_group, grad_bytes, 1)
        if f.g > f.p and layout == "intra":
            ring("grad_scatter", subgroup, grad_bytes / f.p, 1)
        elif f.g > f.p:
            ring("grad_scatter", (lambda r: r % f.p) if last else subgroup, grad_bytes / f.p, 2)
    if layout == "inter" and f.g == f.p:
        ring("grad_reduce", lambda r: r % f.p, grad_bytes / f.p, 2)
    if layout == "intra":
        if f.g == f.p:
            ring("grad_reduce", subgroup, grad_bytes / f.p, 1)
        ring("grad_reduce", lambda r: r % f.os, grad_bytes / f.os, 2)
    ring("param_broadcast", subgroup, param_bytes / f.p, 1)
    for r, other in itertools.permutations(range(ranks), 2):
        if r // sp == other // sp and leaves[r // per_node] != leaves[other // per_node]:
            total["all_to_all"] += exchanged / sp
    return total


def ring_cases(num_nodes, per_node):
    """Yield arguments of make_rings: all factors, layouts and sp, and small and large exchanges."""
    ranks = num_nodes * per_node
    for f in shard.legal_factors(ranks, per_node):
        for sp in [n for n in range(1, ranks + 1) if ranks % n == 0]:
            for layout, micro_batches, exchanged in (("intra", 1, 3e8), ("inter", 4, 2e10)):
                yield ranks, f, layout, micro_batches, 1e9, 2e9, sp, exchanged


@pytest.mark.parametrize("num_nodes, per_node", [(3, 4), (4, 2), (6, 2)])
def test_spine_bytes_equal_a_walk(num_nodes, per_node):
    """Also where sp or the ring of a comb do not fit nodes."""
    some = random.Random(0)
    for ranks, f, *rest in ring_cases(num_nodes, per_node):
        leaves = [some.choice("abc") for _ in range(num_nodes)]
        placed = placement.place_nodes(leaves, placement.make_rings(ranks, f, *rest), per_node)
        for order, counted in ((range(num_nodes), placed.before), (placed.order, placed.after)):
            by_walk = walk_of_rings([leaves[node] for node in order], per_node, f, *rest)
            assert {kind: value for kind, value in counted.items() if value} \
                == pytest.approx(by_walk)


def leaf_sizes(total, most):
    """Yield all ways to give leaves at most `most` of `total` nodes, largest first."""
    if total == 0:
        yield ()
    for count in range(min(total, most), 0, -1):
        yield from ((count, *others) for others in leaf_sizes(total - count, count))


def orders_of_leaves(counts):
    """Return all orders of leaves (orders, N), without those that swap leaves of one size."""
    rows = []

    def extend(row, left):
        if not any(left):
            rows.append(row)
        unused = set()  # sizes of leaves without a place so far
        for leaf, count in enumerate(left):
            if count and (count < counts[leaf] or count not in unused):
                unused |= {count} if count == counts[leaf] else set()
                extend([*row, leaf], [n - (i == leaf) for i, n in enumerate(left)])

    extend([], counts)
    return np.array(rows)


@pytest.mark.parametrize("num_nodes", range(2, 9))
def test_placement_is_the_best(num_nodes):
    """No other order sends fewer bytes across the spine, whatever the leaves of up to 8 nodes (of
    the largest numbers some cases)."""
    some = random.Random(num_nodes)
    share = 1 if num_nodes < 6 or ALL_COMBINATIONS else 0.3
    assert len(orders_of_leaves((2, 2, 1))) == 15 and len(orders_of_leaves((4, 4))) == 35
    for counts in leaf_sizes(num_nodes, num_nodes):
        orders = orders_of_leaves(counts)
        cut = (orders[:, :, None] != orders[:, None, :]).reshape(len(orders), -1).astype(float)
        leaves = [leaf for leaf, count in enumerate(counts) for _ in range(count)]
        for case in ring_cases(num_nodes, 2):
            if some.random() > share:
                continue
            some.shuffle(leaves)
            rings = placement.make_rings(*case)
            placed = placement.place_nodes(leaves, rings, 2)
            assert sorted(placed.order) == list(range(num_nodes))
            traffic = sum(placement.place_traffic(rings, num_nodes, 2).values(),
                          np.zeros((num_nodes, num_nodes)))
            best = (cut @ traffic.reshape(-1)).min()
            assert sum(placed.after.values()) == pytest.approx(best, abs=1), (case, leaves)
            if sum(placed.before.values()) <= best + 0.5:
                assert placed.order == list(range(num_nodes))  # nothing moves for nothing


@pytest.mark.parametrize("f, sp", [((8, 8, 32), 1), ((32, 32, 64), 64), ((64, 64, 1024), 16)])
def test_placement_of_many_nodes(f, sp):
    some = random.Random(0)
    leaves = [f"leaf{i}" for i, count in enumerate((20, 16, 16, 15, 13, 13, 10, 9, 8, 5, 2, 1))
              for _ in range(count)]
    rings = placement.make_rings(1024, shard.Factors(*f), "inter", 4, 14e9, 14e9, sp, 4e9)
    placed = placement.place_nodes(leaves, rings, 8)
    grouped = sum(placed.before.values())
    assert sum(placed.after.values()) <= grouped
    some.shuffle(leaves)
    start = time.perf_counter()
    placed = placement.place_nodes(leaves, rings, 8)
    assert time.perf_counter() - start < 1  # seconds; it takes 0.1
    assert sum(placed.after.values()) <= grouped < sum(placed.before.values()) / 2
    assert sorted(placed.order) == list(range(128))
    if max(f) < 1024:  # blocks that leaves of these sizes can hold do not straddle them
        used = [leaves[node] for node in placed.order]
        size = f[0] // 8
        straddling = sum(len(set(used[i : i + size])) > 1 for i in range(0, 128, size))
        whole = sum(count // size for count in Counter(leaves).values())
        assert straddling == 128 // size - whole


def test_placement_lines():
    rings = placement.make_rings(8, shard.Factors(4, 4, 8), "intra", 1, 2**32, 2**32)
    placed = placement.place_nodes(list("abab"), rings, 2)
    assert placed.order == [0, 2, 1, 3]
    assert placed.describe([f"n{i:02}" for i in range(8, 12)]) == (
        "order of nodes: n08, n10, n09, n11\n"
        "spine traffic 36.00 -> 8.00 GiB a step, 78 % saved\n"
        "  param_gather 24.00 -> 0.00, grad_scatter 12.00 -> 0.00, param_broadcast 0.00 -> 4.00, "
        "grad_reduce 0.00 -> 4.00")
    placed = placement.place_nodes(list("aaaa"), rings, 2)
    assert placed.describe(list("0123")) == ("order of nodes: 0..3\n"
                                             "spine traffic 0.00 -> 0.00 GiB a step")
    names = "a08 a09 a10 a2 b3 b4 login 7 8 3".split()
    assert placement.in_ranges(names) == "a08..a10, a2, b3..b4, login, 7..8, 3"


def test_leaf_flag(tmp_path):
    assert placement.parse_leaf("2", 5) == (list("01234"), list("00112"))
    file = tmp_path / "nodes.txt"

    def parse(text, num_nodes=2):
        file.write_text(text)
        return placement.parse_leaf(str(file), num_nodes)

    assert parse("# the third row\nn2 left  # new\n\nn1\tright\n") == (["n2", "n1"],
                                                                      ["left", "right"])
    for text, message in (("n1 a\nn2\n", "line 2: 'n2': a node's name"),
                          ("n1 a b\n", "line 1: 'n1 a b': a node's name"),
                          ("n1 a\nn2 a\nn1 b", "line 3: node n1 is under leaf a already"),
                          ("n1 a\n\nn2 a\nn3 b", "line 4: node n3 is one more than 2"),
                          ("n1 a\n\n", "1 nodes of 2; one a line"),
                          ("", "0 nodes of 2; one a line")):
        with pytest.raises(ValueError, match=message):
            parse(text)
    for text in ("0", "-1", "2.5", str(tmp_path / "none")):
        with pytest.raises(ValueError, match="neither a number of nodes a leaf, from 1 on, nor"):
            placement.parse_leaf(text, 2)


# ---------------------------------------------------------------------------- the project


@pytest.mark.parametrize("program", ["train.py", "bench.py", "memplan.py", "planner.py"])
def test_help(program):
    done = subprocess.run([sys.executable, HERE / program, "--help"], text=True,
                          capture_output=True)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr[-2000:]
    if program == "train.py":
        text = " ".join(done.stdout.split())
        assert "K, M or G, which are binary: 4K is 4096" in text
        assert "a quarter of --steps, at most 500" in text
        rates = "else 3e-3 for tiny, 6e-4 for 160m, 2e-5 for --init hf:DIR, else 3e-4"
        assert f"{rates} (default: auto)" in text
        assert set(re.findall(r"--([a-z0-9-]+)", text)) >= {
            f.name.replace("_", "-") for f in dataclasses.fields(train.Config)}


@pytest.mark.parametrize("flags, ranks, message", [
    ("long", 0, "table long measures GPUs, and there are none here; a CPU can measure step$"),
    ("nodes --nodes 2", 2, "table nodes measures GPUs"),
    ("step --nodes 2", 0, "--nodes 2: splits the ranks of tables nodes, ring, not of step"),
    ("step --model 1b", 0, "--model 1b: of table long alone, not of step"),
    ("steps", 0, "no table steps; there are: step, long"),
    ("step --nodes 0", 0, "--nodes 0: at least 1"),
    ("long --seq 0", 0, "--seq 0: at least 1 token"),
    ("step --seq 64K", 0, "--seq: of tables long, .*, not of step"),
    ("long --skip foo", 0, "--skip foo: of full, swap, fsdp2"),
    ("step --gpu-memory -1", 0, "--gpu-memory -1: at least 1"),
    ("--out {tmp}/file/x", 2, "file/x cannot be written.*name another --out")])
def test_bench_refuses_before_it_measures(flags, ranks, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    flags = flags.replace("{tmp}", str(tmp_path)).split()
    if not ranks:
        monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        assert ended.value.code == 2 and re.search(message, capsys.readouterr().err)
        return
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run([sys.executable, *torchrun, HERE / "bench.py", *flags], text=True,
                          capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    text = done.stdout + done.stderr
    assert done.returncode and re.search(message, text), text[-3000:]
    if "cannot be written" not in message:
        assert len(re.findall(message, text)) >= ranks  # each rank says it, none waits for another


def test_bench_says_which_ranks_a_table_needs():
    assert bench.why_not("shard", 1, 1, True) == (
        "table shard needs 2 GPUs or more, one a rank: torchrun --nproc_per_node 2 bench.py shard")
    assert bench.why_not("nodes", 4, 1, True) == "table nodes needs --nodes 2 or more"
    assert bench.why_not("nodes", 4, 3, True) == "--nodes 3: does not divide 4 ranks"
    assert "--nproc_per_node 4 bench.py nodes --nodes 2" in bench.why_not("nodes", 1, 2, True)
    assert all(bench.why_not(n, 8, 1 + (n == "nodes"), True) is None for n in bench.TABLES)


def test_bench_keeps_its_rows_when_it_is_stopped(tmp_path):
    process = subprocess.Popen(
        [sys.executable, HERE / "bench.py", "--out", tmp_path], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # where tests run in the background, SIGINT is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for line in process.stdout:
        if line.startswith("ours, without"):
            break
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "stopped; the rows so far are in" in text
    rows = json.loads(next(tmp_path.glob("step-*.json")).read_text())["rows"]
    assert "ours, without optimizer" in [r["system"] for r in rows] and len(rows) < 7
    assert json.loads(text.splitlines()[-1])["rows"] == rows


def test_bench_of_what_does_not_fit_is_a_row(monkeypatch, group):
    """The largest model that fits is taken, the next larger one is a row with its numbers, and so
    is a sequence that runs out of memory, before a shorter one."""
    tiny = m.MODELS["tiny"]
    models = {"tiny": tiny, "wide": dataclasses.replace(tiny, dim=1024, heads=8, kv_heads=8),
              "wider": dataclasses.replace(tiny, dim=2048, heads=8, kv_heads=8)}
    for module in (bench, train):
        monkeypatch.setattr(module, "MODELS", models)
    monkeypatch.setitem(bench.QUICK_PARAMS, "cpu", 1e9)
    make_step = bench.make_step

    def small_machine(table, cfg, **options):
        if cfg.seq > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_step(table, cfg, **options)

    monkeypatch.setattr(bench, "make_step", small_machine)
    table = bench.Bench(torch.device("cpu"), 0, 1, memory={"gpu_memory": 160 * 2**20})
    bench.table_step(table)
    too_large, bound, *ceilings, _, ours = table.rows[:7]
    missed, longest = table.rows[-2:]
    assert len(ceilings) == 3 and too_large["model"] == "wide"
    assert too_large["oom"] and "GiB a GPU" in too_large["error"]
    assert bench.cells(too_large)[3] == "does not fit" and bench.cells(missed)[3] == "out of memory"
    assert ours["model"] == longest["model"] == "tiny" and not ours["oom"]
    assert missed["seq"] == 2 * longest["seq"] == 1024 and longest["step_s"] > 0


def test_bench_writes_results(tmp_path):
    text = subprocess.run([sys.executable, HERE / "bench.py", "step", "--out", tmp_path], text=True,
                          capture_output=True, check=True).stdout
    last = json.loads(text.splitlines()[-1])
    saved = json.loads(next(tmp_path.glob("step-*.json")).read_text())
    assert saved["rows"] == last["rows"]
    assert {"hardware", "versions", "commit", "command"} <= set(saved)
    *ceilings, bound, without, ours, longest = saved["rows"]
    assert [r["system"] for r in (bound, without, ours, longest)] == [
        "bound", "ours, without optimizer", "ours", "ours, longest in the time"]
    assert len(ceilings) == 3 and all(r["flops"] > 1e8 for r in ceilings)
    assert not any(r["bound_ratio"] for r in (without, ours, longest))  # launches, another length
    assert longest["seq"] > ours["seq"]
    for r in (bound, without, ours, longest):
        assert r["tgs"] == pytest.approx(r["seq"] / r["step_s"]) and r["step_s"] > 0


def test_longest_sequence_is_the_last_that_fits():
    gib = 2**30
    four = planner.Hardware(4, 4, H200, 40 * gib, 30 * gib)
    asked = planner.Constraints(1, torch.bfloat16)
    longest = planner.of_one_sequence(asked, four, planner.longest(asked, m.MODELS["1b"], four))
    plan = planner.plan(longest, m.MODELS["1b"], four, top=1)[0]
    need, host = plan.memory.total(), plan.host_bytes
    assert 39 * gib < need <= 40 * gib or 29 * gib < host <= 30 * gib
    longer = dataclasses.replace(longest, seq=longest.seq + 4 * 2**14)
    with pytest.raises(planner.TooLarge, match="more ranks, (or )?a shorter --seq") as e:
        planner.plan(longer, m.MODELS["1b"], four)
    assert e.value.over > 0
    alone = dataclasses.replace(four, ranks=1, per_node=1)
    assert not planner.longest(asked, m.MODELS["7b"], alone)


def test_kernels_of_a_long_step_are_compiled_on_two_chunks(monkeypatch, group):
    """With the shapes of its chunks, whatever its layers keep."""
    ran, run_step, planned = [], train.run_step, bench.plan_run
    kept = offload.ActivationPlan(4, 4, 4, 0, 0, 3)

    def plan_run(table, cfg):
        run = planned(table, cfg)
        return run.but(plan=dataclasses.replace(run.plan, activations=kept))

    monkeypatch.setattr(bench, "plan_run", plan_run)
    monkeypatch.setattr(train, "run_step", lambda model, states, batch, *others: ran.append(
        (model.layer_runner.__self__.plan, batch.tokens.shape)) or run_step(
            model, states, batch, *others))
    cfg = train.Config(model="tiny", seq=64, batch=1, chunk=16, head_groups=2, device="cpu")
    bench.make_long_step(bench.Bench(torch.device("cpu"), 0, 1), cfg)
    (plan, shape), = ran
    assert shape == (1, 1, 32) and plan == offload.ActivationPlan(2, 2, 2, 0, 0, 2)


def test_one_layer_gains_nothing_by_dropping():
    s = planner.Sizes(2**20, 2**20, 2**23, 1.0, 0.5, 0.2, 0.3)
    plan, lost = planner.plan_activations(1, s, 2, 1e9, 2.5 * 2**20, 0.0)
    assert (plan.resident, plan.layers_recomputing_attention) == (1, 0)
    assert lost == pytest.approx(s.recompute_s)
    with pytest.raises(planner.TooLarge):
        planner.plan_activations(1, s, 2, 1e9, 1.5 * 2**20, 0.0)


def fsdp2_worker():
    """Runs under torchrun: FSDP2 behind the methods that train.run_step calls, on CPUs; and the
    table of rings."""
    rank, world, _ = train.start_ranks(100)
    mesh = dist.init_device_mesh("cpu", (world,))
    small = {"gpu_memory": 2**20}  # of our plans: what fits is FSDP2's to say
    table = bench.Bench(torch.device("cpu"), rank, world, memory=small)
    for reshard, sp in ((True, 1), (False, 1), (True, world)):
        cfg = train.Config(model="tiny", seq=64, sp=sp, batch=2 * world // sp, micro_batch=1)
        step = bench.fsdp2_step(table, cfg, mesh, reshard)
        losses = [step()[0].item() for _ in range(4)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] < 6, losses
    m.MODELS["7b"] = m.MODELS["llama3-8b"] = m.ModelConfig(64, 64, 3, 8, 4, 64, 8)
    table = bench.Bench(torch.device("cpu"), rank, world, seqs=[64])
    measured = bench.sustained  # for seconds, since GPUs take long to reach the rate that they hold
    bench.sustained = lambda fn, device, seconds: measured(fn, device, 0.01)
    bench.table_ring(table)
    rings = [(r["ring"], r["sp"], r["oom"]) for r in table.rows if r["system"] != "kernels alone"]
    assert rings == 2 * [(1, 2, False), (2, 2, False)], table.rows
    print(f"rank {rank}: it learns", flush=True)
    os._exit(0)


def test_bench_runs_fsdp2_through_the_same_step(tmp_path):
    text = run([], 2, "import test_all; test_all.fsdp2_worker()", tmp=tmp_path)
    assert text.count("it learns") == 2


def test_bench_counts_like_model(monkeypatch):
    monkeypatch.setattr(bench, "peak_flops", lambda name: 1e15)
    cfg, table = m.MODELS["7b"], bench.Bench(torch.device("cpu"), 0, 1)
    r = bench.row(table, "ours", cfg, "7b", 4096, 8192, 2.0, {"flops": 1e14})
    assert r["tgs"] == 4096 and r["mfu_full"] == 4096 * m.flops_per_token(cfg, 4096)[1] / 1e15
    assert r["bound_ratio"] == 4096 * m.flops_per_token(cfg, 4096)[0] / 1e14
    assert bench.row(table, "ours", cfg, "7b", 4096, 8192, None)["oom"]


def test_readme_numbers_are_the_results():
    done = subprocess.run([sys.executable, HERE / "results" / "report.py", "--check"], text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_readme_names_every_file_and_is_short():
    assert len(README.splitlines()) <= 220
    for file in (*HERE.glob("*.py"), *HERE.glob("csrc/*.cpp")):
        assert f"`{file.relative_to(HERE)}`" in README, file.name


def test_readme_names_flags_and_functions_that_exist(monkeypatch, capsys):
    real = set(torch.distributed.run.get_args_parser()._option_string_actions)
    real |= {"--nodes", "--ntasks-per-node", "--gpus-per-node"}  # Slurm's
    for program in (train, bench, memplan, planner):
        monkeypatch.setattr(sys, "argv", [program.__name__, "--help"])
        with pytest.raises(SystemExit):
            program.main()
        real |= set(re.findall(r"--[a-z][a-z_-]*", capsys.readouterr().out))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", README)) <= real
    for command in re.findall(r"train\.py( --(?!help).*)", README.replace("\\\n", "")):
        train.parse(command.partition("#")[0].split())
    for name, path in re.findall(r"`(\w+)\.([\w.]+)`", README):
        if path not in ("py", "cpp") and name in sys.modules:
            assert functools.reduce(getattr, path.split("."), sys.modules[name]), (name, path)


def test_versions_are_checked_and_in_readme(monkeypatch):
    """README's matrix is attention.VERSIONS; others are named at start, too old ones refused."""
    for first, last in attention.VERSIONS.values():
        assert first in README and last in README
    assert attention.untried_versions("cpu") == []
    installed = {"torch": "2.14.1+cu131", "flash-attn-4": "4.1.0"}
    monkeypatch.setattr(attention.metadata, "version", installed.get)
    assert attention.untried_versions("fa4") == [
        "torch 2.14.1+cu131 was not tried, 2.11 to 2.13 were",
        "flash-attn-4 4.1.0 was not tried, 4.0.0b36 to 4.0.0b36 were"]
    installed["torch"] = "2.9.1"
    with pytest.raises(ValueError, match="torch 2.9.1: this needs what 2.11 to 2.13 have"):
        attention.untried_versions("cpu")


def test_readme_shows_pictures_that_exist():
    for page in (HERE / "README.md", HERE / "results" / "README.md"):
        shown = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        assert shown and all((page.parent / link).exists() for link in shown), shown


def test_readme_walk(tmp_path):
    """The walk of README runs as it stands, in a folder that looks like this one."""
    for file in HERE.iterdir():
        if file.suffix in (".py", ".cpp") or file.name == "csrc":
            (tmp_path / file.name).symlink_to(file)
    walk, = re.findall(r"(?:^    .*\n)*^    .*save_pretrained.*\n(?:^    .*\n)*", README, re.M)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-ec", textwrap.dedent(walk)], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    positions, difference = re.findall(r"(\d+) positions, logits differ by (\S+)", done.stdout)[0]
    assert positions == "1024" and float(difference) < 1e-5
