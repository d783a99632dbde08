"""Which factors? How many ranks share a sequence, how states are sharded, how many sequences run at
once, and what layers keep: by predicted time and counted bytes.

    plan(constraints, model, hardware) -> [Plan]        best first, a pure function

Constraints are what the flags of a command say, None where they leave it open. Of every combination
that they allow, bytes are counted (memory), a small mixed-integer program decides what layers keep
(plan_activations), and the least predicted time a token wins,

    seconds of a micro-batch = 3 * forward + lost to recomputation and copies + AdamW's / M,

ties going to fewer ranks a sequence, larger micro-batches, less host memory, fewer shards. It is
called twice: with a device's rates (RATES; of one that is not in the table, as measured at start),
and, for the degrees that won, with the times of a layer that `measure` took on this machine.

Left out, and to come here: the time of communication that computation does not hide, profiles of
clusters, tensor and pipeline degrees.

Legend: M micro-batches a step and rank, N tokens of one on a rank, p, g, os shards of parameters,
gradients and optimizer states, sp ranks that share a sequence; in plan_activations n layers, c
chunks of one, k resident layers.
"""
import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import Bounds, LinearConstraint, milp

import model as llama
from attention import MAX_ELEMENTS, Attention, legal_sp
from model import LOSS_ELEMENTS, ModelConfig, accumulation_dtype, param_count, rope_tables
from offload import GIB, ActivationPlan, block_saves
from shard import (OPTIMIZER, Factors, check_factors, legal_factors, parse_mesh, parse_strategy)

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


def least_seconds(fn: Callable, repeats: int, device: torch.device) -> float:
    """Return the least seconds of a call, after one that warms up, on the slowest rank. A
    collective."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()  # all ranks copy and send at the same time
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(min(times[1:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure_rates(device: torch.device, dtype: torch.dtype, kernel: str) -> Rates:
    """Measure this device, and all ranks at once what they copy and send, in seconds; the slowest
    rank's. A collective."""
    gpu = device.type == "cuda"
    n, heads, seq = (4096, 16, 8192) if gpu else (512, 4, 512)
    size = 2**28 if gpu else 2**22

    def seconds(fn) -> float:
        return least_seconds(fn, 10, device)

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


@dataclass(frozen=True)
class Memory:
    """Bytes of a device, by what they are for."""

    lasting: dict[str, float]  # through a step
    peaks: dict[str, dict[str, float]]  # moment that may be the highest: what lives then, too

    def highest(self) -> str:
        """Return the moment at which most is needed."""
        return max(self.peaks, key=lambda moment: sum(self.peaks[moment].values()))

    def total(self) -> float:
        return sum(self.lasting.values()) + sum(self.peaks[self.highest()].values())

    def describe(self) -> str:
        """Return lines for people: the terms of each moment in GiB."""
        def gib(terms: dict[str, float]) -> str:
            return ", ".join(f"{name} {value / GIB:.2f}" for name, value in terms.items() if value)

        lines = [f"memory a device, GiB: {gib(self.lasting)}"]
        for moment, terms in self.peaks.items():
            mark = " (the highest)" if moment == self.highest() else ""
            lines.append(f"  at {moment}{mark}: {sum(terms.values()) / GIB:.2f}: {gib(terms)}")
        return "\n".join(lines + [f"  {self.total() / GIB:.2f} GiB in all"])


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


def layer_peaks(cfg: ModelConfig, tokens: int, chunk: int, dtype: torch.dtype, sp: int,
                head_groups: int) -> dict[str, dict[str, float]]:
    """Return what a layer's backward needs beside what was kept, at its two high moments: in
    attention's backward, and in that of the products before it; all chunks recomputed."""
    e = dtype.itemsize
    d = cfg.head_dim
    x = tokens * cfg.dim * e
    q = tokens * cfg.heads * d * e  # and o
    k = tokens * cfg.kv_heads * d * e  # and v
    k_sent = k // cfg.kv_heads * math.lcm(cfg.kv_heads, sp * head_groups)  # heads are repeated
    repeated = 2 * k_sent if k_sent > k else 0
    sums = tokens * d * 4 * cfg.heads
    if cfg.heads != cfg.kv_heads:
        sums += tokens * d * 4 * 2 * cfg.kv_heads
    if sp > 1:  # of two head groups what is sent and received; the first group, and its buffers
        in_flight = (4 * (3 * q + 2 * k_sent) + 4 * (q + 2 * k_sent)) / head_groups
        first_group = (3 * q + 2 * k_sent) / head_groups
    else:  # copies of a part of too many heads
        in_flight = 2 * q if tokens * cfg.heads * d > MAX_ELEMENTS else 0
        first_group = 0
    saved = block_saves(cfg, tokens, dtype).pre
    pre = sum(math.prod(shape) * of.itemsize for shape, of in saved)
    return {
        "attention's backward": {
            "dy, dx": 2 * x, "q, o, do, dq": 4 * q, "k, v": 2 * k, "dk, dv": 2 * k_sent,
            "repeated k, v": repeated, "head groups": in_flight,
            "sums of the kernel": 2 * sums / head_groups, "saved by block.pre": pre},
        "block.post's backward": {
            "dy, dx": 2 * x, "q, do": 2 * q, "k, v": 2 * k, "repeated k, v": repeated,
            "first head group": first_group,
            "all-to-all buffers": all_to_all_bytes(cfg, tokens, dtype, sp, head_groups),
            "temporaries of a chunk": chunk * (8 * cfg.ffn + 6 * cfg.dim) * e,
            "saved by block.pre": pre}}


def loss_peak(cfg: ModelConfig, tokens: int, dtype: torch.dtype, sp: int,
              head_groups: int) -> dict[str, float]:
    """Return what head and loss need beside what layers keep."""
    accum_bytes = accumulation_dtype(dtype).itemsize
    return {"logits": 2 * accum_bytes * min(LOSS_ELEMENTS, tokens * cfg.vocab),
            "gradient of the head": accum_bytes * cfg.vocab * cfg.dim,
            "x, norm, dx": 3 * tokens * cfg.dim * dtype.itemsize,
            "all-to-all buffers": all_to_all_bytes(cfg, tokens, dtype, sp, head_groups)}


def weight_buffer_bytes(cfg: ModelConfig, f: Factors, dtype: torch.dtype, in_chunks: bool,
                        accumulates: bool) -> dict[str, float]:
    """Return the bytes of the buffers for gathered weights and whole gradients: one each for the
    embedding and the head, two for each matrix of a layer (shard.States)."""
    e = dtype.itemsize
    accum_bytes = accumulation_dtype(dtype).itemsize
    ends = 2 * cfg.vocab * cfg.dim
    layers = 2 * (param_count(cfg) - ends) / cfg.layers
    adds_up = in_chunks and not accumulates and e < accum_bytes  # chunks' gradients, in float32
    gradients = ends * e if f.g > 1 else 0
    if f.g > 1 or adds_up:
        gradients += layers * (accum_bytes if in_chunks else e)
    return {"gathered weights": (layers + ends) * e if f.p > 1 else 0,
            "whole gradients": gradients}


def checkpoint_bytes(cfg: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a checkpoint: the optimizer's states, float32 or wider."""
    return len(OPTIMIZER.states) * accumulation_dtype(dtype).itemsize * param_count(cfg)


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
    layer). Memo's alpha, the fraction that is swapped, is S/(c*(n - k)). The backward takes twice
    the forward's time and copies as much, so it never binds. resident, alpha: set by hand. memo: k
    = 2, K = 2c, X = w = 0, any fraction of a chunk: exactly Memo's rule,

        max alpha:  (input + attn + alpha*S_others)/bandwidth <= layer_s
                    (n - 2)*(input + attn + alpha*S_others) <= host

    Raises ValueError with what is missing.
    """
    if memo:
        resident = 2
    rooms = [chunks] if memo else sorted({round(chunks * eighth / 8) for eighth in range(9)})
    if alpha is not None:
        rooms = [math.ceil(alpha * chunks)]
    if not alpha and not memo:
        rooms.append(None)  # nothing is swapped, no buffers
    found = [program(n, s, chunks, bandwidth, gpu, host, room, resident, alpha, memo)
             for room in rooms]
    found = [solution for solution in found if solution is not None]
    if not found:
        raise ValueError(what_is_missing(n, s, gpu, host, resident, alpha))
    best = found[0]
    for solution in found[1:]:
        if solution[0] < best[0] - 1e-9:
            best = solution
    k, kept, swapped, dropped, waits = best[1]
    recomputed = max(0.0, n - (kept + swapped) / chunks) * s.recompute_s
    if not memo:
        k, kept, swapped, dropped = (round(count) for count in (k, kept, swapped, dropped))
    activations = ActivationPlan(n, chunks, k, kept, swapped, dropped)
    return activations, waits + best[1][3] * s.attn_s + recomputed


def program(n: int, s: Sizes, c: int, bandwidth: float, gpu: float, host: float, room: int | None,
            resident: int | None, alpha: float | None,
            memo: bool) -> tuple[float, np.ndarray] | None:
    """Solve plan_activations' program where a rounding buffer has room for so many chunks (None:
    there is none). Returns its value and (k, K, S, X, w); None if nothing is feasible."""
    swaps = room is not None
    a = room or 0
    low, high = (2, n - 1) if swaps else (n, n)  # resident layers
    if resident is not None:
        low = max(low, resident)
        high = min(high, resident)
    # in GiB, near the size of everything else
    rate = bandwidth / GIB
    io = (s.input + s.attn) / GIB
    attn = s.attn / GIB
    part = s.intermediates / c / GIB
    buffer = io + a * part
    if low > high or (swaps and 4 * buffer > gpu / GIB):  # two layers on their way, and buffers
        return None
    kept = 2 * c if memo else 0
    most_x, most_w = (0, 0) if memo else (n, np.inf)
    bounds = Bounds([low, kept, 0, 0, 0], [high, c * n, c * n, most_x, most_w])
    lowest = np.full(6, -np.inf)
    #         k     K     S     X      w       <= ...
    table = [
        ([-c,   1,    0,    0,     0],        0),  # K <= c*k
        ([a,    0,    1,    0,     0],        a * n),  # S <= a*(n - k)
        ([1,    0,    0,    1,     0],        n),  # X <= n - k
        ([io,   part, 0,    0,     0],        gpu / GIB - 2 * swaps * buffer),  # GPU
        ([-io,  0,    part, -attn, 0],        host / GIB - n * io),  # host
        ([rate * s.layer_s - io, 0, part, -attn, -rate], n * (rate * s.layer_s - io)),  # time
    ]  # fmt: skip
    rows = np.array([row for row, _ in table])
    highest = np.array([limit for _, limit in table], float)
    if alpha is not None:  # S = alpha*c*(n - k), to the nearest chunk
        rows[1, 0] = alpha * c
        lowest[1] = alpha * c * n - 0.5
        highest[1] = alpha * c * n + 0.5
    tie = 0 if memo else 1e-4  # seconds a GiB: what need not be pinned and copied stays
    gain = s.recompute_s / c
    cost = [-tie * io, -gain, tie * part - gain, s.attn_s, 1]
    found = milp(cost, integrality=[int(not memo)] * 4 + [0], bounds=bounds,
                 constraints=LinearConstraint(rows, lowest, highest))
    return None if found.x is None else (found.fun + tie * n * io, found.x)


def what_is_missing(n: int, s: Sizes, gpu: float, host: float, resident: int | None,
                    alpha: float | None) -> str:
    """Return why no plan fits, for people."""
    io = (s.input + s.attn) / GIB
    need = (f"layer inputs and attention outputs are {n * io:.1f} GiB a rank, {4 * io:.1f} at "
            "least of them on the GPU (two layers, two buffers)")
    if resident is not None or alpha is not None:
        k = resident or 2
        buffer = io + (alpha or 0) * s.intermediates / GIB
        need = (f"with {k} resident layers and alpha {alpha or 0:g} they take "
                f"{max(4 * buffer, k * io + 2 * buffer):.1f} GiB of a GPU and "
                f"{(n - k) * buffer:.1f} of the host a rank")
    return (f"activations do not fit: {need}; there is room for {gpu / GIB:.1f} GiB on the GPU and "
            f"{host / GIB:.1f} on the host; a larger --sp, --host-memory or --gpu-memory, more "
            "ranks, or a shorter --seq")


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

    with torch.no_grad():
        pre = least_seconds(lambda: block.pre(x, rope), 3, device)
        post = least_seconds(lambda: block.post(x, o), 3, device)
        attn = least_seconds(lambda: attention.forward(q, kv, kv), 1, device)
    tokenwise = (pre + post) * n / c
    size = 2**28 if device.type == "cuda" else 2**22
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rate = size / least_seconds(lambda: there.copy_(here, non_blocking=True), 3, device)
    recompute = tokenwise * recomputed_share(cfg)
    return Sizes(*layer_bytes(cfg, n, dtype), tokenwise + attn, recompute, attn), rate


# ---------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Constraints:
    """What a command fixes; None, or an empty text, is open. Fields are train.py's flags."""

    seq: int
    dtype: torch.dtype
    default_batch: int = 1  # sequences a step that are usual; rounded up to the ranks
    most_sequences: int | None = None  # that the data has
    resumes: bool = False  # a run, whose batch it keeps
    batch: int | None = None
    micro_batch: int | None = None
    sp: int | None = None
    head_groups: int | None = None
    p: str | None = None
    g: str | None = None
    os: str | None = None
    strategy: str = ""
    os_layout: str = "intra"
    reduce_dtype: str = "auto"
    recompute: str = "auto"
    chunk: int | None = None
    alpha: float | None = None
    resident_layers: int | None = None


@dataclass(frozen=True)
class Hardware:
    """The ranks, and what one of them has."""

    ranks: int
    per_node: int  # ranks of a node
    rates: Rates = RATES["H200"]
    gpu_budget: float = 2.0**60  # bytes of a GPU to plan with
    host_budget: float = 2.0**60  # bytes of host memory of a rank to swap to
    measured: tuple[Sizes, float] | None = None  # of `measure`: a layer, and bytes/s to the host


@dataclass(frozen=True)
class Plan:
    """What is chosen, and what it costs."""

    sp: int  # ranks that share a sequence
    batch: int  # sequences a step
    micro_batch: int  # sequences that sp ranks run at once
    micro_batches: int  # M
    tokens: int  # N
    head_groups: int
    chunk: int  # tokens, the most that a layer runs at once
    factors: Factors
    recompute: str
    accumulates: bool  # gradients of several micro-batches add up, in float32
    activations: ActivationPlan | None = None  # None: layers run whole, and keep all or their input
    memory: Memory | None = None
    seconds: float = 0.0  # a token of a rank, forward, backward and update
    host_bytes: float = 0.0  # of a rank, that layers swap to
    reason: str = ""


def plan(constraints: Constraints, model: ModelConfig, hardware: Hardware) -> list[Plan]:
    """Return the plans that fit, best first: the least predicted time a token; within 1 %, the
    smallest sp and the largest micro-batch; for these, within 0.2 %, the least host memory and the
    fewest shards. Raises ValueError with what is missing if none fits."""
    plans = []
    errors = []
    factors = wanted_factors(constraints, hardware)
    for sp in legal_degrees(constraints, model, hardware):
        try:
            shapes = batch_shapes(constraints, hardware.ranks // sp, sp)
        except ValueError as e:
            errors.append(e)
            continue
        for batch, micro_batch in shapes:
            least = micro_batch == shapes[-1][1]
            for f in factors:
                try:
                    plans.append(one_plan(constraints, model, hardware, sp, batch, micro_batch, f,
                                          prefer_whole=not least))
                except ValueError as e:
                    errors.append(e)
    if not plans:
        raise errors[-1]
    fastest = min(plan.seconds for plan in plans)
    sp, micro_batch = min((plan.sp, -plan.micro_batch) for plan in plans
                          if plan.seconds <= 1.01 * fastest)
    alike = [plan for plan in plans if (plan.sp, -plan.micro_batch) == (sp, micro_batch)]
    fastest = min(plan.seconds for plan in alike)
    # less than a twentieth of the host's memory is equal
    best = min((plan for plan in alike if plan.seconds <= 1.002 * fastest),
               key=lambda plan: round(20 * plan.host_bytes / max(1, hardware.host_budget)))
    others = [plan for plan in plans if plan is not best]
    return [best, *sorted(others, key=lambda plan: plan.seconds)]


def check(constraints: Constraints, model: ModelConfig, hardware: Hardware) -> None:
    """Raise ValueError for constraints that no plan meets, whatever memory there is."""
    wanted_factors(constraints, hardware)
    legal_degrees(constraints, model, hardware)
    k = constraints.resident_layers
    alpha = constraints.alpha
    if k and k > model.layers:
        raise ValueError(f"--resident-layers {k}: from 2, whose backward starts at once, to the "
                         f"model's {model.layers}")
    if alpha and model.layers <= 2:
        raise ValueError(f"--alpha {alpha}: the last two layers never swap, and the model has "
                         f"{model.layers}")
    if alpha and k == model.layers:
        raise ValueError(f"--alpha {alpha}: no layer swaps if all {model.layers} are resident")


def fix(constraints: Constraints, chosen: Plan) -> Constraints:
    """Return constraints that leave open what layers keep, alone."""
    f = chosen.factors
    if not constraints.strategy:
        constraints = dataclasses.replace(constraints, p=str(f.p), g=str(f.g), os=str(f.os))
    return dataclasses.replace(
        constraints, sp=chosen.sp, batch=chosen.batch, micro_batch=chosen.micro_batch,
        head_groups=chosen.head_groups, chunk=chosen.chunk)


def one_plan(constraints: Constraints, model: ModelConfig, hardware: Hardware, sp: int, batch: int,
             micro_batch: int, f: Factors, prefer_whole: bool) -> Plan:
    """Return the plan of these degrees. prefer_whole: if layers do not fit whole, a smaller
    micro-batch is better than chunks. Raises ValueError if a step does not fit."""
    tokens = micro_batch * constraints.seq // sp
    micro_batches = batch * sp // hardware.ranks // micro_batch
    chosen = Plan(
        sp, batch, micro_batch, micro_batches, tokens, head_groups_of(constraints, model, sp),
        chunk_of(constraints, tokens), f, constraints.recompute,
        accumulates=micro_batches > 1 or constraints.reduce_dtype == "fp32")
    chosen = with_memory(chosen, model, constraints.dtype)
    sizes, host_rate = hardware.measured or estimate(chosen, constraints, model, hardware.rates)
    forward = sizes.layer_s * model.layers
    lost = forward if constraints.recompute == "full" else 0.0
    fits = chosen.memory.total() <= hardware.gpu_budget
    if runs_in_chunks(constraints, chosen, fits, prefer_whole):
        chosen, lost = with_activations(chosen, constraints, model, hardware, sizes, host_rate)
    elif not fits:
        raise ValueError(too_large(constraints, chosen, chosen.memory, hardware))
    update = 28 * param_count(model) / f.os / hardware.rates.memory / micro_batches  # AdamW's
    rates = f"all by default hardware rates: {hardware.rates.source}"
    if hardware.measured:
        rates = "a layer measured; sp and shards by default hardware rates"
    reason = (f"{forward:.3g} s forward a micro-batch, {lost:.3g} s lost to recomputation and "
              f"copies, at {host_rate / 1e9:.0f} GB/s to the host ({rates})")
    return dataclasses.replace(chosen, seconds=(3 * forward + lost + update) / tokens,
                               reason=reason)


def runs_in_chunks(constraints: Constraints, chosen: Plan, fits: bool, prefer_whole: bool) -> bool:
    """Return whether layers run in chunks of tokens: where flags ask for it, where they do not fit
    whole, and with sp, since the order of ChunkedLayers hides more of the all-to-alls."""
    if constraints.recompute != "auto":
        return False
    asked = constraints.alpha is not None or bool(constraints.resident_layers)
    if asked or chosen.chunk < chosen.tokens:
        return True
    return chosen.sp > 1 if fits else not prefer_whole


def with_memory(chosen: Plan, model: ModelConfig, dtype: torch.dtype) -> Plan:
    """Return the plan with its bytes counted."""
    layer = layer_bytes(model, chosen.tokens, dtype)
    kept = chosen.activations
    in_chunks = kept is not None and kept.chunks > 1
    activations = activation_bytes(model, chosen.tokens, dtype)
    if kept is not None:
        activations = resident_bytes(kept, layer)
    elif chosen.recompute == "full":  # all layers' inputs, and one whole layer
        activations = model.layers * layer[0] + sum(layer)
    lasting = state_bytes(param_count(model), chosen.factors, dtype, chosen.accumulates)
    lasting |= weight_buffer_bytes(model, chosen.factors, dtype, in_chunks, chosen.accumulates)
    lasting["activations"] = activations
    shape = (chosen.sp, chosen.head_groups)
    peaks = {"head and loss": loss_peak(model, chosen.tokens, dtype, *shape)}
    if kept is not None or chosen.sp > 1:
        chunk = min(chosen.chunk, chosen.tokens)
        peaks |= layer_peaks(model, chosen.tokens, chunk, dtype, *shape)
    return dataclasses.replace(chosen, memory=Memory(lasting, peaks),
                               host_bytes=host_bytes(kept, layer) if kept else 0.0)


def with_activations(chosen: Plan, constraints: Constraints, model: ModelConfig,
                     hardware: Hardware, sizes: Sizes, host_rate: float) -> tuple[Plan, float]:
    """Return the plan with what layers keep in chunks, and the seconds that are lost to it. Raises
    ValueError if it does not fit."""
    chunks = -(-chosen.tokens // chosen.chunk)
    everything = dataclasses.replace(
        chosen, activations=ActivationPlan(model.layers, chunks, model.layers))
    memory = with_memory(everything, model, constraints.dtype).memory
    others = memory.total() - memory.lasting["activations"]
    left = hardware.gpu_budget - others
    if left < 0:
        without = {name: value for name, value in memory.lasting.items() if name != "activations"}
        raise ValueError(too_large(constraints, everything, Memory(without, memory.peaks),
                                   hardware))
    try:
        activations, lost = plan_activations(
            model.layers, sizes, chunks, host_rate, left, hardware.host_budget,
            constraints.resident_layers, constraints.alpha)
    except ValueError as e:
        f = chosen.factors
        raise ValueError(f"--seq {constraints.seq} with sp={chosen.sp} p={f.p} g={f.g} os={f.os}: "
                         f"{e} (of {hardware.gpu_budget / GIB:.0f} GiB a GPU {others / GIB:.1f} "
                         f"are for all else: {in_gib(memory)})") from e
    chosen = dataclasses.replace(chosen, activations=activations)
    return with_memory(chosen, model, constraints.dtype), lost


def in_gib(memory: Memory) -> str:
    terms = memory.lasting | {"working": sum(memory.peaks[memory.highest()].values())}
    return ", ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items()
                     if value and name != "activations")


def too_large(constraints: Constraints, chosen: Plan, memory: Memory, hardware: Hardware) -> str:
    """Return that a step does not fit, with numbers and what to change, for people."""
    f = chosen.factors
    beside = " beside activations" if chosen.activations else ""
    instead = "--recompute full, "
    if chosen.activations or constraints.recompute == "full":
        instead = ""
    kept = memory.lasting.get("activations", 0)
    listed = in_gib(memory) + (f", activations {kept / GIB:.1f}" if kept else "")
    return (f"a step needs {memory.total() / GIB:.0f} GiB a GPU{beside} even with p={f.p} g={f.g} "
            f"os={f.os}, there is room for {hardware.gpu_budget / GIB:.0f} ({listed}); more ranks, "
            f"{instead}a shorter --seq, a smaller --micro-batch or --model")


def nearest(value: int, step: int) -> str:
    """Return the multiples of step around value, for messages."""
    low = value // step * step
    return " or ".join(str(n) for n in (low, low + step) if n > 0)


def wanted_factors(constraints: Constraints, hardware: Hardware) -> list[Factors]:
    """Return the legal factors that the flags allow, fewest shards first. Raises ValueError."""
    world = hardware.ranks
    per_node = hardware.per_node
    if world % per_node:
        legal = [n for n in range(1, world + 1) if world % n == 0]
        raise ValueError(f"--per-node {per_node}: does not divide {world} ranks; nearest: "
                         f"{min(legal, key=lambda n: abs(n - per_node))}")
    wish = {name: parse_mesh(getattr(constraints, name), per_node) for name in ("p", "g", "os")
            if getattr(constraints, name) is not None}
    if constraints.strategy:
        if wish:
            raise ValueError(f"--strategy {constraints.strategy} sets all factors: drop "
                             f"--{' --'.join(wish)}")
        factors = [parse_strategy(constraints.strategy, world)]
        check_factors(factors[0], world, per_node)
    else:
        factors = [f for f in legal_factors(world, per_node)
                   if all(getattr(f, name) == count for name, count in wish.items())]
    if not factors:
        low = wish.get("p", 1)
        high = wish.get("os", world)
        check_factors(Factors(low, wish.get("g", high), high), world, per_node)
        raise AssertionError("check_factors accepts what is not legal")
    if OPTIMIZER.whole:  # its rank updates whole matrices
        factors = [f for f in factors if f.p == 1 and constraints.os_layout == "inter"]
        if not factors:
            raise ValueError("this optimizer needs whole matrices: --os-layout inter --p 1")
    return factors


def legal_degrees(constraints: Constraints, model: ModelConfig, hardware: Hardware) -> list[int]:
    """Return the sequence degrees to try. Raises ValueError with the legal ones."""
    ranks = hardware.ranks
    legal = [n for n in legal_sp(model.heads, ranks) if constraints.seq % n == 0]
    if constraints.sp is None:
        return legal
    if constraints.sp not in legal:
        raise ValueError(
            f"--sp {constraints.sp}: it must divide {ranks} ranks, {model.heads} heads and --seq "
            f"{constraints.seq}: one of {', '.join(map(str, legal))}")
    return [constraints.sp]


def batch_shapes(constraints: Constraints, dp: int, sp: int) -> list[tuple[int, int]]:
    """Return (batch, micro-batch) to try on dp * sp ranks, largest micro-batch first. Raises
    ValueError with the nearest --batch."""
    most = constraints.most_sequences
    batch = constraints.batch or -(-constraints.default_batch // dp) * dp
    if constraints.batch is None and most is not None and most >= dp:
        batch = min(batch, most // dp * dp)
    if most is not None and batch > most:
        raise ValueError(f"--batch {batch}: the data has {most} training sequences of "
                         f"{constraints.seq} tokens; --batch counts sequences, --batch-tokens "
                         "tokens")
    if batch % dp:
        kept = ", which a resumed run keeps" if constraints.resumes else ""
        raise ValueError(f"--batch {batch}{kept}: not divisible by {dp} data-parallel ranks; "
                         f"nearest: {nearest(batch, dp)}")
    each = batch // dp
    if constraints.micro_batch is None:
        largest = min(each, max(1, 2**13 * sp // constraints.seq))
        return [(batch, size) for size in range(largest, 0, -1) if each % size == 0]
    if each % constraints.micro_batch:
        raise ValueError(
            f"--micro-batch {constraints.micro_batch}: does not divide the {each} sequences of a "
            f"rank (--batch {batch} over {dp}); nearest --batch: "
            f"{nearest(batch, constraints.micro_batch * dp)}")
    return [(batch, constraints.micro_batch)]


def head_groups_of(constraints: Constraints, model: ModelConfig, sp: int) -> int:
    """Return the parts of a rank's heads. Raises ValueError with the legal ones."""
    heads = model.heads // sp
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and (sp > 1 or n == 1)]
    wanted = constraints.head_groups
    if wanted is not None and wanted not in legal:
        raise ValueError(f"--head-groups {wanted}: with sp={sp} a rank has {heads} heads; one of "
                         f"{', '.join(map(str, legal))}")
    return wanted or max(n for n in legal if n <= 4)


def chunk_of(constraints: Constraints, tokens: int) -> int:
    """Return the tokens of a chunk: equal parts of at most --chunk, 16K if that is open."""
    parts = -(-tokens // (constraints.chunk or 2**14))
    if not constraints.chunk:  # --alpha is a number of them
        least = Fraction(constraints.alpha or 0).limit_denominator(8).denominator
        parts = -(-parts // least) * least
    return -(-tokens // min(tokens, parts))


def estimate(chosen: Plan, constraints: Constraints, model: ModelConfig,
             rates: Rates) -> tuple[Sizes, float]:
    """Return what `measure` would find, by a device's rates."""
    n = chosen.tokens
    matrices = (param_count(model) - 2 * model.vocab * model.dim) / model.layers
    tokenwise = 2 * matrices * n / rates.matmul
    attn = 2 * model.heads * model.head_dim * constraints.seq * n / rates.attention
    heads = 2 * model.heads + 2 * model.kv_heads  # q, o, k, v
    sent = n * heads * model.head_dim * constraints.dtype.itemsize
    attn += sent * (1 - 1 / chosen.sp) / rates.peer / chosen.head_groups
    recompute = tokenwise * recomputed_share(model)
    layer = layer_bytes(model, n, constraints.dtype)
    return Sizes(*layer, tokenwise + attn, recompute, attn), rates.host


# ---------------------------------------------------------------------------- budgets

GPU_SHARE = 0.95  # of a GPU to plan with: context, communicators and fragments want the rest


def gpu_budget(device: torch.device, asked: int | None) -> float:
    """Return the bytes of a device to plan with. asked: --gpu-memory."""
    if device.type == "cpu":
        return GPU_SHARE * (asked or 2**60)
    total = torch.cuda.get_device_properties(device).total_memory
    return GPU_SHARE * min(total, asked or total)


def host_budget(ranks: int, asked: int | None, elsewhere: bool = False) -> float:
    """Return the bytes of host memory of a rank to swap to. ranks: that share a node; asked:
    --host-memory; elsewhere: the plan is for another machine. Raises ValueError."""
    if elsewhere and asked is not None:
        return asked / ranks
    return host_limit(asked) / ranks
