"""What a command leaves open: how many ranks share a sequence, how states are sharded, how many
sequences run at once, and what layers keep, by predicted time and counted bytes.

    cfg (train.py's flags, some left open) + the model + budgets of memory  ->  Plan

Of every combination that the flags allow, bytes are counted (device_bytes), a small mixed-integer
program decides what layers keep (plan_activations), and the least predicted time a token wins,

    seconds of a micro-batch = 3 * forward + lost to recomputation and copies + AdamW's / M,

ties going to fewer ranks a sequence, larger micro-batches, less host memory, fewer shards. What is
set by hand stays. Layers are predicted by the rates of the device (RATES; of one that is not in the
table, as measured at start), and train.py measures a layer before it settles what layers keep.

Left out, and to come here: the time of communication that computation does not hide, profiles of
clusters, a ranked list of plans, tensor and pipeline degrees.

Legend: M micro-batches a step and rank, N tokens of one on a rank, p, g, os shards of parameters,
gradients and optimizer states, sp ranks that share a sequence.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import Bounds, LinearConstraint, milp

import model as llama
from attention import MAX_ELEMENTS, Attention, legal_sp
from model import LOSS_ELEMENTS, ModelConfig, accumulation_dtype, param_count, rope_tables
from offload import GIB, ActivationPlan, block_saves
from shard import OPTIMIZER, Factors, check_factors, legal_factors, parse_mesh, parse_strategy

if TYPE_CHECKING:  # for annotations: train.py imports this file
    from train import Config, Sequences

# ---------------------------------------------------------------------------- hardware


@dataclass(frozen=True)
class Rates:
    """What a device does in a second: to compare plans before anything runs."""

    matmul: float  # FLOP/s of a layer's matrix products, bf16 on GPUs
    attention: float  # FLOP/s of causal attention's forward, half of the matrix counted
    memory: float  # bytes/s read and written
    host: float  # bytes/s to the host, while all GPUs of a node copy
    peer: float  # bytes/s that a GPU sends to others of its node
    source: str
    peak: float | None = None  # dense bf16 FLOP/s of the data sheet; None: unknown, so no MFU


def shares_of(peak: float, memory: float, peer: float, host: float, source: str) -> Rates:
    """Rates that nobody measured here: of the data sheet, the shares that an H200 reaches."""
    return Rates(0.75 * peak, 0.62 * peak, 0.81 * memory, 0.7 * host, 0.55 * peer,
                 f"data sheet ({source}), by the shares that an H200 reaches of its own", peak)


RATES = {  # by PyTorch's device name; data sheets: dense bf16, memory, NVLink one way, PCIe one way
    r"A100.*40GB": shares_of(312e12, 1.555e12, 300e9, 32e9, "NVIDIA A100 40GB"),
    r"A800": shares_of(312e12, 2.039e12, 200e9, 32e9, "NVIDIA A800 80GB"),
    r"A100": shares_of(312e12, 2.039e12, 300e9, 32e9, "NVIDIA A100 80GB"),
    r"H100 PCIe": shares_of(756e12, 2.0e12, 64e9, 64e9, "NVIDIA H100 PCIe"),
    r"H(100|200) NVL": shares_of(835e12, 3.9e12, 300e9, 64e9, "NVIDIA H100 NVL"),
    # eight H200s at once copy to the host at 22 GB/s each, one of either kind alone at 55
    r"H100|H800": Rates(700e12, 487e12, 2.7e12, 22e9, 250e9, "measured on one, with cuDNN's "
                        "attention; several: as H200s", 989.4e12),
    r"H200": Rates(742e12, 613e12, 3.9e12, 22e9, 250e9, "measured", 989.4e12),
    r"B200": shares_of(2250e12, 7.7e12, 900e9, 64e9, "NVIDIA B200"),
    r"CPU": Rates(1e11, 5e10, 1e10, 5e9, 1e9, "a guess at a few cores: only ratios matter"),
}


def known_rates(device_name: str) -> Rates | None:
    """Return a device's row of RATES, by PyTorch's name of it; None if it is not there."""
    hits = (v for k, v in RATES.items() if re.search(rf"\b({k})\b", device_name))
    return next(hits, None)


def peak_flops(device_name: str) -> float | None:
    """Return dense bf16 FLOP/s of a device, None if it is not in the table: no MFU, then."""
    rates = known_rates(device_name)
    return rates.peak if rates else None


def measure_rates(device: torch.device, dtype: torch.dtype, kernel: str) -> Rates:
    """Measure this device, and all ranks at once what they copy and send, in seconds; the slowest
    rank's. A collective."""
    gpu = device.type == "cuda"
    n, heads, seq = (4096, 16, 8192) if gpu else (512, 4, 512)
    size = 2**28 if gpu else 2**22

    def seconds(fn) -> float:
        """Of a call, on the slowest rank: the least of ten, after one that warms up."""
        least = float("inf")
        for i in range(11):
            dist.barrier()
            start = time.perf_counter()
            fn()
            if gpu:
                torch.cuda.synchronize(device)
            if i:
                least = min(least, time.perf_counter() - start)
        slowest = torch.tensor(least, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    x = torch.randn(2 * n, n, device=device).to(dtype)
    w = torch.randn(n, n, device=device).to(dtype)
    q = torch.randn(1, seq, heads, 128, device=device).to(dtype)
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=gpu)
    attention = Attention(kernel)
    twice = torch.empty_like(here)
    world = dist.get_world_size()
    host = size / seconds(lambda: there.copy_(here, non_blocking=True))
    peer = host
    if world > 1:
        part = here[: size // world * world]
        peer = part.numel() / seconds(
            lambda: dist.all_to_all_single(twice[: part.numel()], part))
    return Rates(matmul=4 * n**3 / seconds(lambda: x @ w),
                 attention=2 * heads * 128 * seq**2 / seconds(lambda: attention.forward(q, q, q)),
                 memory=2 * size / seconds(lambda: twice.copy_(here)),
                 host=host, peer=peer, source="measured at start")


def find_rates(name: str, device: torch.device, dtype: torch.dtype, kernel: str,
               say=print) -> Rates:
    """Return a device's rates by its name, or as measured here, if it is not in RATES on any rank.
    A collective."""
    rates = known_rates(name)
    unknown = torch.tensor(float(rates is None), device=device)
    dist.all_reduce(unknown, dist.ReduceOp.MAX)
    if unknown.item():
        rates = measure_rates(device, dtype, kernel)
        say(f"{name}: not in the table of rates; measured: matrix products "
            f"{rates.matmul / 1e12:.3g} TFLOP/s, attention {rates.attention / 1e12:.3g}, memory "
            f"{rates.memory / 1e9:.0f} GB/s, to the host {rates.host / 1e9:.0f}, to other ranks "
            f"{rates.peer / 1e9:.0f}; no MFU, whose peak comes from data sheets alone", flush=True)
    return rates


def group_limit() -> int | None:
    """Return the bytes that control groups allow this process, None if they do not say."""
    limits = []
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)  # version 2 has no kinds
        here = (root / "memory" if "memory" in kinds else root) / path.lstrip("/")
        for folder in (here, *here.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((folder / name).read_text()))
    return min((x for x in limits if x < 2**50), default=None)  # version 1: none is a huge number


def host_limit(asked: int | None = None) -> int:
    """Return the bytes of a node for what is swapped: as asked, or what control groups or the
    machine allow, less an eighth for all else. Raises ValueError if control groups allow less."""
    allowed = group_limit()
    if asked is not None and allowed and asked > allowed:
        raise ValueError(f"--host-memory {asked / GIB:.0f}G: the control group allows "
                         f"{allowed / GIB:.0f}G, and other things need some of it")
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return (allowed or total) * 7 // 8 if asked is None else asked


@dataclass(frozen=True)
class Sizes:
    """Bytes of one layer on one rank, and seconds of its forward."""

    input: int  # x
    attn: int  # o and the log-sum-exp
    intermediates: int  # what a block saves beside them: q, k, v, h, gate|up
    layer_s: float  # forward
    recompute_s: float  # of it, what recomputing the intermediates takes
    attn_s: float  # of it, attention


# ---------------------------------------------------------------------------- bytes


def layer_bytes(cfg: ModelConfig, tokens: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return S_input, S_attn and S_others of `tokens` tokens (Memo, section 4.1): x; o and the
    log-sum-exp; what model.Block saves beside them, as it really does."""
    e = dtype.itemsize
    accum_bytes = accumulation_dtype(dtype).itemsize
    heads = cfg.heads * cfg.head_dim
    qkv = (heads + 2 * cfg.kv_heads * cfg.head_dim) * e
    intermediates = tokens * qkv + block_saves(cfg, tokens, dtype).bytes()
    return tokens * cfg.dim * e, tokens * (heads * e + cfg.heads * accum_bytes), intermediates


def activation_bytes(cfg: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Return what all layers keep for the backward of `tokens` tokens, if they keep everything.

    For model.Block these are x, q, k, v, o, h and gate|up: with H = K and F = 8/3 C 11 1/3 C
    elements a token (Memo's 16 C less norm(x), norm(h) and SwiGLU, which are computed again)."""
    return cfg.layers * sum(layer_bytes(cfg, tokens, dtype))


def all_to_all_bytes(cfg: ModelConfig, tokens: int, dtype: torch.dtype, sp: int,
                     head_groups: int) -> int:
    """Return the bytes of all-to-all buffers: q, k, v, o and do of two head groups, dq, dk and dv
    of one (attention.Ulysses)."""
    if sp == 1:
        return 0
    kv = math.lcm(cfg.kv_heads, sp * head_groups)  # with the heads that are repeated
    return tokens * cfg.head_dim * dtype.itemsize * (7 * cfg.heads + 6 * kv) // head_groups


def backward_peak_bytes(cfg: ModelConfig, tokens: int, chunk: int, dtype: torch.dtype, sp: int,
                        head_groups: int, recomputed: float = 1.0) -> int:
    """Return what a layer's backward needs beside what was kept, at the higher of two peaks.

    Attention's: dy, dx, do; o, if it was dropped; q, k, v and their gradients, repeated heads among
    them; of two head groups what is sent and received, or the copies of a part of too many heads;
    the kernel's float32 sums. That of the products before it: dy, dx, do, q, k, v, one chunk's
    temporaries, the first group's parts, and where head groups will be received. At both, what
    block.pre saves of chunks that are recomputed, a fraction `recomputed` of all.
    """
    e = dtype.itemsize
    d = cfg.head_dim
    x = tokens * cfg.dim * e
    qo = tokens * cfg.heads * d * e
    kv = tokens * cfg.kv_heads * d * e
    kv_sent = kv // cfg.kv_heads * math.lcm(cfg.kv_heads, sp * head_groups)  # heads are repeated
    whole = 2 * x + 4 * qo + 2 * kv + 2 * kv_sent + 2 * (kv_sent if kv_sent > kv else 0)
    groups = (4 * (3 * qo + 2 * kv_sent) + 4 * (qo + 2 * kv_sent)) / head_groups
    received = (3 * qo + 2 * kv_sent) / head_groups  # a group's parts
    received += all_to_all_bytes(cfg, tokens, dtype, sp, head_groups)
    received += 2 * (kv_sent if kv_sent > kv else 0)
    if sp == 1:
        groups = 0 if tokens * cfg.heads * d <= MAX_ELEMENTS else 2 * qo
        received = 0
    sums = 2 * tokens * (cfg.heads + (cfg.heads != cfg.kv_heads) * 2 * cfg.kv_heads) * d * 4
    temporaries = chunk * (8 * cfg.ffn + 6 * cfg.dim) * e
    attention = whole + groups + sums / head_groups
    products = 2 * x + 2 * qo + 2 * kv + temporaries + received
    saves = block_saves(cfg, tokens, dtype).pre
    pre = sum(math.prod(shape) * dtype.itemsize for shape, dtype in saves)
    return round(max(attention, products) + recomputed * pre)


def resident_bytes(plan: ActivationPlan, layer: tuple[int, int, int]) -> float:
    """Return the bytes of a rank for what resident layers keep, and for two rounding buffers;
    layer: layer_bytes."""
    x, attn, intermediates = layer
    buffers = 0
    if plan.resident < plan.layers:
        swapped = plan.most_swapped_chunks() * intermediates / plan.chunks
        buffers = 2 * (x + attn + swapped)
    return plan.resident * (x + attn) + plan.kept_chunks * intermediates / plan.chunks + buffers


def host_bytes(plan: ActivationPlan, layer: tuple[int, int, int]) -> float:
    """Return the bytes of a rank for the host buffers of the layers that are swapped."""
    x, attn, intermediates = layer
    return ((plan.layers - plan.resident) * (x + attn) - plan.layers_recomputing_attention * attn
            + plan.swapped_chunks * intermediates / plan.chunks)


def state_bytes(params: int, f: Factors, dtype: torch.dtype, accumulates: bool) -> dict[str, float]:
    """Return the bytes of states of a rank (AMSP, section IV); `accumulates`: several micro-batches
    add up, in float32."""
    e = dtype.itemsize
    accum_bytes = accumulation_dtype(dtype).itemsize
    secondary = e * params / f.secondary if f.secondary else 0
    return {"parameters": e * params / f.p + secondary,
            "gradients": (accum_bytes if accumulates else e) * params / f.g,
            "optimizer": len(OPTIMIZER.states) * accum_bytes * params / f.os}


# ---------------------------------------------------------------------------- what layers keep


def plan_activations(n: int, s: Sizes, chunks: int, bandwidth: float, gpu: float, host: float,
                     resident: int | None = None, alpha: float | None = None,
                     memo: bool = False) -> tuple[ActivationPlan, float]:
    """Return the plan that loses the least time, and the seconds lost in a step's forward and
    backward.

    bandwidth: bytes/s to the host, with all GPUs copying; gpu, host: bytes a rank can give to
    activations. With the number of resident layers k, of kept chunks K, of swapped chunks S, of
    layers without o, X, and of seconds w in which compute waits for copies:

        min  w + X*attn_s - (K + S)*recompute_s/c      (+ a tenth of a millisecond a GiB swapped)
        GPU    k*(input + attn) + K*S_others/c + 2*(input + attn + a*S_others/c)   <= gpu
               (and, while layers leave in forward,  4*(input + attn + a*S_others/c) <= gpu)
        host   (n - k)*(input + attn) - X*attn + S*S_others/c                    <= host
        time   (n - k)*(input + attn) - X*attn + S*S_others/c  <= bandwidth*((n - k)*layer_s + w)
               K <= c*k,  S <= a*(n - k),  X <= n - k

    where a, the chunks that a rounding buffer has room for, takes some values in turn (eighths of a
    layer, as Memo's alpha). The backward takes twice the forward's time and copies as much, so it
    never binds. resident, alpha: set by hand. memo: k = 2, K = 2c, X = w = 0, any fraction of a
    chunk: exactly Memo's rule,

        max alpha:  (input + attn + alpha*S_others)/bandwidth <= layer_s
                    (n - 2)*(input + attn + alpha*S_others) <= host

    Raises ValueError with what is missing.
    """
    c = chunks
    io = (s.input + s.attn) / GIB
    best = None
    tie = 0 if memo else 1e-4  # seconds a GiB: what need not be pinned and copied stays
    attn = s.attn / GIB
    part = s.intermediates / chunks / GIB
    rate, gpu, host = bandwidth / GIB, gpu / GIB, host / GIB
    if memo:
        resident = 2
    if alpha is not None:
        some = [math.ceil(alpha * c)]
    else:
        some = [c] if memo else sorted({round(c * e / 8) for e in range(9)})
    for a in [*some, None]:  # None: nothing is swapped, no buffers
        swap = a is not None
        low, high = (2, n - 1) if swap else (n, n)
        if resident is not None:
            low, high = max(low, resident), min(high, resident)
        if low > high or (not swap and (alpha or memo)):
            continue
        a = a or 0
        if swap and 4 * (io + a * part) > gpu:  # in forward, two layers on their way, and buffers
            continue
        kept = 2 * c if memo else 0
        bounds = Bounds([low, kept, 0, 0, 0],
                        [high, c * n, c * n, 0 if memo else n, 0 if memo else np.inf])
        #                k                K     S     X      w
        rows = np.array([
            [-c, 1, 0, 0, 0],  # K <= c*k
            [a, 0, 1, 0, 0],  # S <= a*(n - k)
            [1, 0, 0, 1, 0],  # X <= n - k
            [io, part, 0, 0, 0],  # GPU
            [-io, 0, part, -attn, 0],  # host
            [-io + rate * s.layer_s, 0, part, -attn, -rate]])  # time
        limits = np.array([0, a * n, n, gpu - 2 * swap * (io + a * part), host - n * io,
                           n * rate * s.layer_s - n * io])
        least = np.full(6, -np.inf)
        if alpha is not None:  # S = alpha*c*(n - k), to the nearest chunk
            rows[1, 0] = alpha * c
            least[1] = alpha * c * n - 0.5
            limits[1] = alpha * c * n + 0.5
        cost = [-tie * io, -s.recompute_s / c, -s.recompute_s / c + tie * part, s.attn_s, 1]
        found = milp(cost, integrality=[int(not memo)] * 4 + [0], bounds=bounds,
                     constraints=LinearConstraint(rows, least, limits))
        if found.x is None:
            continue
        value = found.fun + tie * n * io
        if best is None or value < best[0] - 1e-9:
            best = value, found.x
    if best is None:
        need = (f"layer inputs and attention outputs are {n * io:.1f} GiB a rank, {4 * io:.1f} at "
                "least of them on the GPU (two layers, two buffers)")
        if resident is not None or alpha is not None:
            k = resident or 2
            slot = io + (alpha or 0) * c * part
            need = (f"with {k} resident layers and alpha {alpha or 0:g} they take "
                    f"{max(4 * slot, k * io + 2 * slot):.1f} GiB of a GPU and {(n - k) * slot:.1f} "
                    "of the host a rank")
        raise ValueError(
            f"activations do not fit: {need}; there is room for {gpu:.1f} GiB on the GPU and "
            f"{host:.1f} on the host; a larger --sp, --host-memory or --gpu-memory, more ranks, or "
            "a shorter --seq")
    k, kept, swapped, dropped, waits = best[1]
    lost = waits + dropped * s.attn_s + max(0.0, n - (kept + swapped) / c) * s.recompute_s
    whole = (k, kept, swapped, dropped) if memo else map(round, (k, kept, swapped, dropped))
    return ActivationPlan(n, c, *whole), lost


def recomputed_share(cfg: ModelConfig) -> float:
    """Return the share of a layer's matrix products that recomputing its intermediates takes: all
    but the last, if that ends the block."""
    return _recomputed_share(llama.Block, cfg)


@functools.cache
def _recomputed_share(block_class, cfg: ModelConfig) -> float:
    with torch.device("meta"):
        block = block_class(cfg)
    sizes = {name: m.weight.numel() for name, m in block.named_modules()
             if isinstance(m, llama.Matrix)}
    final = block_saves(cfg, 1, torch.float32).final_matrix
    return 1 - sizes.get(final, 0) / sum(sizes.values())


def measure(cfg: ModelConfig, attention: Attention, shape: tuple[int, int], chunk: int,
            device: torch.device, dtype: torch.dtype) -> tuple[Sizes, float]:
    """Time a layer's forward on this machine, part by part, and the bytes/s to the host with all
    ranks copying at once. shape: (B, T) of this rank. A collective of all ranks; needs the memory
    of a layer."""
    n = shape[0] * shape[1]
    with torch.device(device):
        block = llama.Block(cfg).to(dtype)
    for p in block.parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    c = min(chunk, n)
    x = torch.randn(1, c, cfg.dim, device=device).to(dtype)
    rope = rope_tables(cfg, torch.arange(c, device=device), accumulation_dtype(dtype))
    o = torch.randn(1, c, cfg.heads, cfg.head_dim, device=device).to(dtype)
    q = torch.randn(*shape, cfg.heads, cfg.head_dim, device=device).to(dtype)
    kv = torch.randn(*shape, cfg.kv_heads, cfg.head_dim, device=device).to(dtype)

    def seconds(fn, repeats: int) -> float:
        """Of one call, on the slowest rank."""
        times = []
        for _ in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            fn()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(min(times[1:]), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    with torch.no_grad():
        tokenwise = (seconds(lambda: block.pre(x, rope), 3) + seconds(lambda: block.post(x, o), 3))
        attn = seconds(lambda: attention.forward(q, kv, kv), 1)
    tokenwise *= n / c
    size = 2**28 if device.type == "cuda" else 2**22
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rate = size / seconds(lambda: there.copy_(here, non_blocking=True), 3)
    recompute = tokenwise * recomputed_share(cfg)
    return Sizes(*layer_bytes(cfg, n, dtype), tokenwise + attn, recompute, attn), rate


# ---------------------------------------------------------------------------- plans

GPU_SHARE = 0.95  # of a GPU to plan with: context, communicators and fragments want the rest


@dataclass
class Plan:
    """What the flags come to: everything that is needed to build and run."""

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kernel: str
    train: Sequences
    val: Sequences
    pretrained: object = None  # name -> tensor of the imported checkpoint
    resume: Path | None = None
    samples: int = 0  # sequences that a resumed run has seen
    rates: Rates = RATES["H200"]
    micro_batches: int = 1  # M
    factors: Factors = Factors()
    activations: ActivationPlan | None = None  # None: all, or inputs if recomputed in full
    reason: str = ""  # what decided
    gpu_budget: float = 2.0**60  # bytes of a GPU to plan with
    host_budget: float = 2.0**60  # bytes of host memory of a rank to swap to

    def tokens(self, cfg: Config) -> int:
        """N: of a micro-batch on a rank."""
        return cfg.micro_batch * cfg.seq // cfg.sp


def choose_plan(cfg: Config, plan: Plan, world: int, rank: int) -> Plan:
    """Set sp, batch, micro-batch, head groups and chunk in cfg, and return the plan with factors
    and activations (the one given was for trials): the least predicted time a token; within 1 %,
    the smallest sp and the largest micro-batch; for these, within 0.2 %, the least host memory and
    the fewest shards. Raises ValueError if nothing fits."""
    asked = dataclasses.replace(cfg)
    found = []
    errors = []
    degrees = choose_degrees(cfg, plan.model.heads, world)
    factors = wanted_factors(cfg, world)
    count = param_count(plan.model)
    for sp in degrees:
        dp = world // sp
        try:
            batch, micro_batches = choose_batch(asked, plan, dp, sp)
        except ValueError as e:
            errors.append(e)
            continue
        for b in micro_batches:
            for f in factors:
                cfg.sp = sp
                cfg.batch = batch
                cfg.micro_batch = b
                plan.micro_batches = batch // dp // b
                plan.factors = f
                try:
                    set_heads_and_chunk(cfg, asked, plan)
                    seconds = set_activations(cfg, plan, *estimate(cfg, plan),
                                              chunked=b == micro_batches[-1])
                except ValueError as e:
                    errors.append(e)
                    continue
                update = 28 * count / f.os / plan.rates.memory / plan.micro_batches  # AdamW's
                host = swapped_host_bytes(cfg, plan) / max(1, plan.host_budget)
                host = round(20 * host)  # less than a twentieth is equal
                found.append(((seconds + update) / plan.tokens(cfg), (sp, -b), host,
                              dataclasses.replace(cfg), dataclasses.replace(plan)))
    if not found:
        raise errors[-1]
    least = min(x[0] for x in found)
    shape = min(x[1] for x in found if x[0] <= 1.01 * least)
    found = [x for x in found if x[1] == shape]
    least = min(x[0] for x in found)
    *_, chosen, plan = min((x for x in found if x[0] <= 1.002 * least), key=lambda x: x[2])
    plan.reason += f" (all by default hardware rates: {plan.rates.source})"
    vars(cfg).update(vars(chosen))
    usual = asked.batch or default_batch(cfg, plan)
    if cfg.batch != usual and rank == 0:
        print(f"--batch: {usual} by default, {cfg.batch} so that {world // cfg.sp} data-parallel "
              "ranks divide it")
    return plan


def default_batch(cfg: Config, plan: Plan) -> int:
    """Sequences a step: by tokens, and no more than the data has."""
    batch = max(1, (2**12 if cfg.model == "tiny" else 2**19) // cfg.seq)
    return min(batch, plan.train.count) if plan.train else batch


def nearest(value: int, step: int) -> str:
    """The multiples of step around value, for messages."""
    low = value // step * step
    return " or ".join(str(n) for n in (low, low + step) if n > 0)


def wanted_factors(cfg: Config, world: int) -> list[Factors]:
    """The legal factors that the flags allow, fewest shards first. Raises ValueError."""
    if world % cfg.per_node:
        legal = [n for n in range(1, world + 1) if world % n == 0]
        raise ValueError(f"--per-node {cfg.per_node}: does not divide {world} ranks; nearest: "
                         f"{min(legal, key=lambda n: abs(n - cfg.per_node))}")
    wish = {k: parse_mesh(text, cfg.per_node)
            for k, text in (("p", cfg.p), ("g", cfg.g), ("os", cfg.os)) if text is not None}
    if cfg.strategy:
        if wish:
            raise ValueError(f"--strategy {cfg.strategy} sets all factors: drop "
                             f"--{' --'.join(wish)}")
        factors = [parse_strategy(cfg.strategy, world)]
        check_factors(factors[0], world, cfg.per_node)
        return factors
    factors = [f for f in legal_factors(world, cfg.per_node)
               if all(getattr(f, k) == v for k, v in wish.items())]
    if not factors:
        low = wish.get("p", 1)
        high = wish.get("os", world)
        check_factors(Factors(low, wish.get("g", high), high), world, cfg.per_node)
        raise AssertionError("check_factors accepts what is not legal")
    return factors


def choose_degrees(cfg: Config, heads: int, world: int) -> list[int]:
    """The sequence degrees to try. Raises ValueError with the legal ones."""
    legal = [n for n in legal_sp(heads, world) if cfg.seq % n == 0]
    if cfg.sp is not None and cfg.sp not in legal:
        raise ValueError(f"--sp {cfg.sp}: it must divide {world} ranks, {heads} heads and --seq "
                         f"{cfg.seq}: one of {', '.join(map(str, legal))}")
    return [cfg.sp] if cfg.sp else legal


def choose_batch(cfg: Config, plan: Plan, dp: int, sp: int) -> tuple[int, list[int]]:
    """The batch, and the micro-batches to try, largest first, on dp * sp ranks. Raises ValueError
    with the nearest --batch."""
    batch = cfg.batch or -(-default_batch(cfg, plan) // dp) * dp
    if plan.train and cfg.ranks is None and batch > plan.train.count:
        raise ValueError(f"--batch {batch}: the data has {plan.train.count} training sequences of "
                         f"{cfg.seq} tokens; --batch counts sequences, --batch-tokens tokens")
    if batch % dp:
        kept = ", which a resumed run keeps" if plan.resume else ""
        raise ValueError(f"--batch {batch}{kept}: not divisible by {dp} data-parallel ranks; "
                         f"nearest: {nearest(batch, dp)}")
    each = batch // dp
    if cfg.micro_batch is None:
        most = min(each, max(1, 2**13 * sp // cfg.seq))
        return batch, [b for b in range(most, 0, -1) if each % b == 0]
    if each % cfg.micro_batch:
        raise ValueError(f"--micro-batch {cfg.micro_batch}: does not divide the {each} sequences "
                         f"of a rank (--batch {batch} over {dp}); nearest --batch: "
                         f"{nearest(batch, cfg.micro_batch * dp)}")
    return batch, [cfg.micro_batch]


def set_heads_and_chunk(cfg: Config, asked: Config, plan: Plan) -> None:
    """Resolve --head-groups and --chunk for cfg.sp. Raises ValueError with the legal groups."""
    heads = plan.model.heads // cfg.sp
    legal = [g for g in range(1, heads + 1) if heads % g == 0 and (cfg.sp > 1 or g == 1)]
    if asked.head_groups is not None and asked.head_groups not in legal:
        raise ValueError(f"--head-groups {asked.head_groups}: with sp={cfg.sp} a rank has {heads} "
                         f"heads; one of {', '.join(map(str, legal))}")
    cfg.head_groups = asked.head_groups or max(g for g in legal if g <= 4)
    n = plan.tokens(cfg)
    parts = -(-n // (asked.chunk or 2**14))
    if not asked.chunk:  # --alpha is a number of them
        least = Fraction(asked.alpha or 0).limit_denominator(8).denominator
        parts = -(-parts // least) * least
    cfg.chunk = -(-n // min(n, parts))  # equal parts of at most that many


def estimate(cfg: Config, plan: Plan) -> tuple[Sizes, float]:
    """Return what measure would find, by default hardware rates: to compare plans beforehand."""
    m = plan.model
    n = plan.tokens(cfg)
    rates = plan.rates
    matrices = (param_count(m) - 2 * m.vocab * m.dim) / m.layers
    tokenwise = 2 * matrices * n / rates.matmul
    attn = 2 * m.heads * m.head_dim * cfg.seq * n / rates.attention
    sent = n * (2 * m.heads + 2 * m.kv_heads) * m.head_dim * plan.dtype.itemsize
    attn += sent * (1 - 1 / cfg.sp) / rates.peer / cfg.head_groups
    sizes = layer_bytes(m, n, plan.dtype)
    return Sizes(*sizes, tokenwise + attn, tokenwise * recomputed_share(m), attn), rates.host


def set_activations(cfg: Config, plan: Plan, sizes: Sizes, bandwidth: float,
                    chunked: bool = True) -> float:
    """Set plan.activations, and return predicted seconds of a micro-batch's layers. Raises
    ValueError if the step does not fit (chunked: in chunks, if not whole)."""
    n = plan.tokens(cfg)
    layers = plan.model.layers
    f = plan.factors
    plan.activations = None
    lost = 0.0
    need = device_bytes(cfg, plan)
    in_chunks = False
    if cfg.recompute == "auto":  # with sp, the order of ChunkedLayers hides more of the all-to-alls
        in_chunks = (cfg.alpha is not None or cfg.resident_layers or cfg.chunk < n
                     or (cfg.sp > 1 if sum(need.values()) <= plan.gpu_budget else chunked))
    if in_chunks:
        plan.activations = ActivationPlan(layers, -(-n // cfg.chunk), layers)
        need = device_bytes(cfg, plan)
        del need["activations"]
    left = plan.gpu_budget - sum(need.values())
    listed = ", ".join(f"{k} {v / GIB:.1f}" for k, v in need.items())
    instead = "" if in_chunks or cfg.recompute == "full" else "--recompute full, "
    if left < 0:
        raise ValueError(f"--model {cfg.model}: a step needs {sum(need.values()) / GIB:.0f} GiB a "
                         f"GPU{' beside activations' * in_chunks} even with p={f.p} g={f.g} "
                         f"os={f.os}, there is room for {plan.gpu_budget / GIB:.0f} ({listed}); "
                         f"more ranks, {instead}a shorter --seq, a smaller --micro-batch or model")
    if in_chunks:
        try:
            plan.activations, lost = plan_activations(
                layers, sizes, plan.activations.chunks, bandwidth, left, plan.host_budget,
                cfg.resident_layers, cfg.alpha)
        except ValueError as e:
            raise ValueError(f"--seq {cfg.seq} with sp={cfg.sp} p={f.p} g={f.g} os={f.os}: {e} "
                             f"(GiB of {plan.gpu_budget / GIB:.0f} a GPU beside them: "
                             f"{listed})") from e
    if cfg.recompute == "full":
        lost = layers * sizes.layer_s
    forward = sizes.layer_s * layers
    plan.reason = (f"{forward:.3g} s forward a micro-batch, {lost:.3g} s lost to recomputation and "
                   f"copies, at {bandwidth / 1e9:.0f} GB/s to the host")
    return 3 * forward + lost


def device_bytes(cfg: Config, plan: Plan) -> dict[str, float]:
    """Return the bytes on a device, by what they are for."""
    m = plan.model
    e = plan.dtype.itemsize
    params = param_count(plan.model)
    f = plan.factors
    kept = plan.activations
    tokens = plan.tokens(cfg)
    accum_bytes = accumulation_dtype(plan.dtype).itemsize
    accumulates = plan.micro_batches > 1 or cfg.reduce_dtype == "fp32"
    in_chunks = kept is not None and kept.chunks > 1
    need = state_bytes(params, f, plan.dtype, accumulates)

    ends = 2 * m.vocab * m.dim  # embedding and head: one buffer each; two for a layer's matrices
    layers = 2 * (params - ends) / m.layers
    need["buffers"] = 0.0
    if f.p > 1:  # gathered weights
        need["buffers"] += (layers + ends) * e
    if f.g > 1:  # whole gradients of embedding and head
        need["buffers"] += ends * e
    adds_up = in_chunks and not accumulates and e < accum_bytes  # chunks' gradients, in float32
    if f.g > 1 or adds_up:
        need["buffers"] += layers * (accum_bytes if in_chunks else e)

    need["activations"] = activation_bytes(m, tokens, plan.dtype)
    if cfg.recompute == "full":  # all layers' inputs, and one whole layer
        need["activations"] = m.layers * tokens * m.dim * e + need["activations"] / m.layers
    if kept is not None:
        need["activations"] = resident_bytes(kept, layer_bytes(m, tokens, plan.dtype))

    buffers = all_to_all_bytes(m, tokens, plan.dtype, cfg.sp, cfg.head_groups)
    logits = 2 * accum_bytes * min(LOSS_ELEMENTS, tokens * m.vocab)
    loss = logits + accum_bytes * m.vocab * m.dim + 3 * tokens * m.dim * e + buffers
    layer = backward_peak_bytes(m, tokens, min(cfg.chunk, tokens), plan.dtype, cfg.sp,
                                cfg.head_groups)
    need["working"] = max(loss, layer if kept is not None or cfg.sp > 1 else 0)
    return need


def gpu_budget(cfg: Config, device: torch.device) -> float:
    """Return the bytes of a device to plan with."""
    if device.type == "cpu":
        return GPU_SHARE * (cfg.gpu_memory or 2**60)
    total = torch.cuda.get_device_properties(device).total_memory
    return GPU_SHARE * min(total, cfg.gpu_memory or total)


def host_budget(cfg: Config) -> float:
    """Return the bytes of host memory of a rank to swap to."""
    ranks = max(cfg.per_node, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # that share it
    if cfg.ranks and cfg.host_memory is not None:  # not of the machine at hand
        return cfg.host_memory / ranks
    return host_limit(cfg.host_memory) / ranks


def swapped_host_bytes(cfg: Config, plan: Plan) -> float:
    """Return the bytes of host memory of a rank that its plan swaps to."""
    layer = layer_bytes(plan.model, plan.tokens(cfg), plan.dtype)
    return host_bytes(plan.activations, layer) if plan.activations else 0.0
