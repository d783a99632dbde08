"""What a command leaves open: how many ranks share a sequence, how states are sharded, how many
sequences run at once, and what layers keep, by predicted time and counted bytes.

    cfg (train.py's flags, some left open) + the model + a device's room  ->  Plan

Every combination that the flags allow is treated: bytes are counted (memory_need), the program of
offload.py decides what layers keep, and the least predicted time a token wins,

    seconds of a micro-batch = 3 * forward + lost to recomputation and copies + AdamW's / M,

ties going to fewer ranks a sequence, larger micro-batches, less host memory, fewer shards. What is
set by hand stays. Layers are predicted by the rates of the device (RATES; of one that is not in the
table, as measured at start), and train.py measures a layer before it settles what layers keep
(treat, again).

Left out, and to come here: the time of communication that computation does not hide, profiles of
clusters, a ranked list of plans, tensor and pipeline degrees.

Legend: M micro-batches a step and rank, N tokens of one on a rank, p, g, os shards of parameters,
gradients and optimizer states, sp ranks that share a sequence.
"""
from __future__ import annotations

import dataclasses
import os
import re
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from model import LOSS_ELEMENTS, Attention, ModelConfig, activation_bytes, param_count
from offload import (GIB, Fates, Sizes, choose, gpu_bytes, host_limit, host_need, layer_bytes,
                     places_bytes, repeated_share, working_bytes)
from shard import (Factors, check_factors, legal_factors, legal_sp, parse_mesh, parse_strategy,
                   state_bytes)

if TYPE_CHECKING:  # for annotations: train.py imports this file
    from pathlib import Path

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
    """Of RATES, by PyTorch's name of a device; None if it is not there."""
    hits = (v for k, v in RATES.items() if re.search(rf"\b({k})\b", device_name))
    return next(hits, None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device, None if it is not in the table: then no MFU, never a guess."""
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

    x, w = torch.randn(2 * n, n, device=device).to(dtype), torch.randn(n, n, device=device).to(dtype)
    q = torch.randn(1, seq, heads, 128, device=device).to(dtype)
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=gpu)
    attention, twice = Attention(kernel), torch.empty_like(here)
    world, host = dist.get_world_size(), size / seconds(lambda: there.copy_(here, non_blocking=True))
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
    """Of a device by its name, or as measured here, if it is not in RATES on any rank. A
    collective."""
    rates = known_rates(name)
    unknown = torch.tensor(float(rates is None), device=device)
    dist.all_reduce(unknown, dist.ReduceOp.MAX)
    if unknown.item():
        rates = measure_rates(device, dtype, kernel)
        say(f"{name}: not in the table of rates; measured: matrix products {rates.matmul / 1e12:.3g}"
            f" TFLOP/s, attention {rates.attention / 1e12:.3g}, memory {rates.memory / 1e9:.0f} GB/s,"
            f" to the host {rates.host / 1e9:.0f}, to other ranks {rates.peer / 1e9:.0f}; no MFU, "
            "whose peak comes from data sheets alone", flush=True)
    return rates


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
    read: object = None  # name -> tensor of the imported checkpoint
    resume: Path | None = None
    samples: int = 0  # sequences that a resumed run has seen
    rates: Rates = RATES["H200"]
    micro_batches: int = 1  # M
    factors: Factors = Factors()
    fates: Fates | None = None  # what layers keep; None: all, or their input if recomputed in full
    why: str = ""  # what decided
    room: float = 2.0**60  # bytes of a GPU to plan with
    host: float = 2.0**60  # bytes of host memory of a rank to swap to

    def tokens(self, cfg: Config) -> int:
        """N: of a micro-batch on a rank."""
        return cfg.micro_batch * cfg.seq // cfg.sp


def choose_plan(cfg: Config, plan: Plan, world: int, rank: int) -> Plan:
    """Set sp, batch, micro-batch, head groups and chunk in cfg, and return the plan with factors
    and fates (the one given was for trials): the least predicted time a token; within 1 %, the
    smallest sp and the largest micro-batch; for these, within 0.2 %, the least host memory and the
    fewest shards. Raises ValueError if nothing fits."""
    asked, found, errors = dataclasses.replace(cfg), [], []
    degrees, factors = choose_degrees(cfg, plan.model.heads, world), wanted_factors(cfg, world)
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
                cfg.sp, cfg.batch, cfg.micro_batch = sp, batch, b
                plan.micro_batches, plan.factors = batch // dp // b, f
                try:
                    set_heads_and_chunk(cfg, asked, plan)
                    seconds = treat(cfg, plan, *estimate(cfg, plan), chunked=b == micro_batches[-1])
                except ValueError as e:
                    errors.append(e)
                    continue
                update = 28 * count / f.os / plan.rates.memory / plan.micro_batches  # AdamW's
                host = round(20 * host_bytes(cfg, plan) / plan.host)  # twentieths: less is equal
                found.append(((seconds + update) / plan.tokens(cfg), (sp, -b), host,
                              dataclasses.replace(cfg), dataclasses.replace(plan)))
    if not found:
        raise errors[-1]
    least = min(x[0] for x in found)
    shape = min(x[1] for x in found if x[0] <= 1.01 * least)
    found = [x for x in found if x[1] == shape]
    least = min(x[0] for x in found)
    *_, chosen, plan = min((x for x in found if x[0] <= 1.002 * least), key=lambda x: x[2])
    plan.why += f" (all by usual rates: {plan.rates.source})"
    vars(cfg).update(vars(chosen))
    usual = asked.batch or usual_batch(cfg, plan)
    if cfg.batch != usual and rank == 0:
        print(f"--batch: {usual} by default, {cfg.batch} so that {world // cfg.sp} data-parallel "
              "ranks divide it")
    return plan


def usual_batch(cfg: Config, plan: Plan) -> int:
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
        low, high = wish.get("p", 1), wish.get("os", world)
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
    batch = cfg.batch or -(-usual_batch(cfg, plan) // dp) * dp
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
    """What offload.measure would find, from usual rates; to compare plans before anything runs."""
    m, n, rates = plan.model, plan.tokens(cfg), plan.rates
    matrices = (param_count(m) - 2 * m.vocab * m.dim) / m.layers
    tokenwise = 2 * matrices * n / rates.matmul
    attn = 2 * m.heads * m.head_dim * cfg.seq * n / rates.attention
    sent = n * (2 * m.heads + 2 * m.kv_heads) * m.head_dim * plan.dtype.itemsize
    attn += sent * (1 - 1 / cfg.sp) / rates.peer / cfg.head_groups
    others = tokenwise * repeated_share(m)
    return Sizes(*layer_bytes(m, n, plan.dtype), tokenwise + attn, others, attn), rates.host


def treat(cfg: Config, plan: Plan, sizes: Sizes, bandwidth: float, chunked: bool = True) -> float:
    """Set plan.fates. Returns predicted seconds of a micro-batch's layers. Raises ValueError if the
    step does not fit (chunked: in chunks, if not whole)."""
    n, layers, f = plan.tokens(cfg), plan.model.layers, plan.factors
    plan.fates, lost = None, 0.0
    need, in_chunks = memory_need(cfg, plan), False
    if cfg.recompute == "auto":  # with sp, Layers' order hides more of the all-to-alls
        in_chunks = (cfg.alpha is not None or cfg.resident_layers or cfg.chunk < n
                     or (cfg.sp > 1 if sum(need.values()) <= plan.room else chunked))
    if in_chunks:
        plan.fates = Fates(layers, -(-n // cfg.chunk), layers)
        need = memory_need(cfg, plan)
        del need["activations"]
    left = plan.room - sum(need.values())
    listed = ", ".join(f"{k} {v / GIB:.1f}" for k, v in need.items())
    instead = "" if in_chunks or cfg.recompute == "full" else "--recompute full, "
    if left < 0:
        raise ValueError(f"--model {cfg.model}: a step needs {sum(need.values()) / GIB:.0f} GiB a "
                         f"GPU{' beside activations' * in_chunks} even with p={f.p} g={f.g} "
                         f"os={f.os}, there is room for {plan.room / GIB:.0f} ({listed}); more "
                         f"ranks, {instead}a shorter --seq, a smaller --micro-batch or model")
    if in_chunks:
        try:
            plan.fates, lost = choose(
                layers, sizes, plan.fates.chunks, bandwidth, left, plan.host,
                cfg.resident_layers, cfg.alpha)
        except ValueError as e:
            raise ValueError(f"--seq {cfg.seq} with sp={cfg.sp} p={f.p} g={f.g} os={f.os}: {e} "
                             f"(GiB of {plan.room / GIB:.0f} a GPU beside them: {listed})") from e
    if cfg.recompute == "full":
        lost = layers * sizes.layer_s
    forward = sizes.layer_s * layers
    plan.why = (f"{forward:.3g} s forward a micro-batch, {lost:.3g} s lost to recomputation and "
                f"copies, at {bandwidth / 1e9:.0f} GB/s to the host")
    return 3 * forward + lost


def memory_need(cfg: Config, plan: Plan) -> dict[str, float]:
    """Bytes on a device, by what they are for."""
    m, e, count = plan.model, plan.dtype.itemsize, param_count(plan.model)
    f, fates, tokens, wide = plan.factors, plan.fates, plan.tokens(cfg), max(4, e)
    several = plan.micro_batches > 1 or cfg.reduce_dtype == "fp32"
    pieces = fates.chunks > 1 if fates else False
    ends = 2 * m.vocab * m.dim  # embedding and head: one buffer each; two for a layer's matrices
    whole = 2 * (count - ends) / m.layers
    buffers = (whole + ends) * e * (f.p > 1) + ends * e * (f.g > 1)
    if f.g > 1 or pieces and not several and e < wide:  # where a gradient's pieces add up
        buffers += whole * (wide if pieces else e)
    if cfg.recompute == "full":
        kept = m.layers * tokens * m.dim * e + activation_bytes(m, tokens, e) / m.layers
    else:
        kept = activation_bytes(m, tokens, e)
    need = state_bytes(count, f, plan.dtype, several)
    need |= {"buffers": buffers, "activations": kept}
    if fates:
        need["activations"] = gpu_bytes(fates, layer_bytes(m, tokens, plan.dtype))
    loss = 2 * wide * min(LOSS_ELEMENTS, tokens * m.vocab) + wide * m.vocab * m.dim
    loss += 3 * tokens * m.dim * e + places_bytes(m, tokens, plan.dtype, cfg.sp, cfg.head_groups)
    layer = working_bytes(m, tokens, min(cfg.chunk, tokens), plan.dtype, cfg.sp, cfg.head_groups)
    need["working"] = max(loss, layer if fates or cfg.sp > 1 else 0)
    return need


def gpu_room(cfg: Config, device: torch.device) -> float:
    """Bytes of a device to plan with."""
    if device.type == "cpu":
        return GPU_SHARE * (cfg.gpu_memory or 2**60)
    total = torch.cuda.get_device_properties(device).total_memory
    return GPU_SHARE * min(total, cfg.gpu_memory or total)


def host_room(cfg: Config) -> float:
    """Bytes of host memory of a rank to swap to."""
    ranks = max(cfg.per_node, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # that share it
    if cfg.ranks and cfg.host_memory is not None:  # not of the machine at hand
        return cfg.host_memory / ranks
    return host_limit(cfg.host_memory) / ranks


def host_bytes(cfg: Config, plan: Plan) -> float:
    """Bytes of host memory of a rank that its plan swaps to."""
    layer = layer_bytes(plan.model, plan.tokens(cfg), plan.dtype)
    return host_need(plan.fates, layer) if plan.fates else 0.0
