"""Measure what exists: print ceiling, measurement and ratio; write results/NAME.json.

    python bench.py                              what this machine does with the largest model that
                                                 it holds: table step, under ten minutes
    python bench.py --quick                      the same with a small model, in a minute
    torchrun --nproc_per_node 8 bench.py long    another table, of all GPUs together

Each table prints first what the hardware allows, measured in the same run (a matrix product, the
attention kernel, a few layers alone), then what the project reaches, then the ratio: machines are
noisy, ratios less so. Times are medians after a warm-up; a speed is never taken from zeros. MFU
counts model FLOPs (model.flops_per_token), recomputation never: "causal" counts half of the
attention matrix, "full" all of it. The last line of output is one JSON object with the same rows.

Legend: T tokens a sequence, C width, L layers.
"""
import argparse
import dataclasses
import functools
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import offload
import planner
import train
from attention import Attention, CommStream, Exchange, Groups, Ulysses, pick_kernel, wait
from attention import why_not as why_no_kernel
from memplan import StepMemory, write_plan
from model import (MODELS, LLaMA, ModelConfig, flops_per_token, initial_weight, param_count,
                   rope_tables, whole_layers)
from offload import GIB, ActivationPlan, ChunkedLayers, recomputed_layers
from planner import (Plan, Sizes, choose_plan, device_bytes, find_rates, peak_flops,
                     plan_activations, state_bytes)
from shard import STREAMS, Factors, States, legal_factors
from train import Config, ConfigError, local_positions, on_all_ranks, size, start_ranks

HERE = Path(__file__).parent
SEQS: list[int] = []  # of the tables long and memplan, from --seq
SKIP: list[str] = []  # rows of it that --skip names
KEEP: list = [lambda rows: None, HERE]  # of a table: a function that writes its rows, the folder
GROUPS = Groups()  # of all tables: the memory of NCCL's communicators does not come back
QUICK: list[bool] = [False]  # of the table step, from --quick
MEMORY: dict[str, int] = {}  # host_memory and gpu_memory of it, from --host-memory, --gpu-memory
TRACE = HERE / "results" / "trace.json.gz"  # of the table trace, for chrome://tracing


def clock(fn, repeats: int, device: torch.device, warmup: int = 3) -> float:
    """Median seconds of fn() on an otherwise idle device."""
    times = []
    for i in range(warmup + repeats):
        sync(device)
        start = time.perf_counter()
        fn()
        sync(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warmup:])


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what a finished table held (modules and their states refer to each other)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_gib(device: torch.device) -> float | None:
    """Of PyTorch's allocator; and what ranks have mapped from each other, which lies outside it."""
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device) + Exchange.mapped_bytes()) / GIB


def reserved(device: torch.device) -> dict:
    """What the allocator held at most, and how often it had to empty its cache for a request."""
    if device.type != "cuda":
        return {"reserved_gib": None, "retries": None}
    return {"reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0)}


def row(system: str, cfg: ModelConfig, name: str, seq: int, tokens: int, seconds: float | None,
        device: torch.device, bound: dict | None = None, **more) -> dict:
    """A line of a table and of the results file. tokens: of one step on one device; seconds: None
    if it ran out of memory."""
    peak, tgs = peak_flops(device_name(device)), tokens / seconds if seconds else None
    causal, full = (f * tgs / peak if peak and tgs else None for f in flops_per_token(cfg, seq))
    flops = flops_per_token(cfg, seq)[0] * tgs if tgs else None
    ratio = None
    if bound and bound["flops"] and flops:  # known without a peak
        ratio = flops / bound["flops"]
    return {"system": system, "model": name, "seq": seq, "gpus": int(device.type == "cuda"),
            "tgs": tgs, "step_s": seconds, "flops": flops, "mfu_causal": causal, "mfu_full": full,
            "bound_ratio": ratio, "gpu_gib": peak_gib(device), "host_gib": None, **reserved(device),
            "oom": seconds is None, **more}


TIMES = "step_s", "tgs", "flops", "mfu_causal", "mfu_full"  # of a row


def make(cfg: ModelConfig, kernel: str, device, dtype, recompute: bool = False, attention=None,
         chunked: bool = False, **options):
    """The model and its states (shard.States' options), freshly initialised; chunked: its layers
    will run in chunks."""
    with torch.device("meta"):
        model = LLaMA(cfg, attention or Attention(kernel))
    if recompute:
        model.layer_runner = recomputed_layers
    states = States(model, device, dtype, groups=GROUPS, gather_layers=recompute or chunked,
                    **options)
    for name, p in model.named_parameters():
        states.load(name, initial_weight(cfg, name, p.shape, 0, device))
    return model, states


def random_batch(cfg: ModelConfig, seq: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens, labels (1, T): uniform random ids, others on each rank."""
    rng = torch.Generator(device).manual_seed(dist.get_rank())
    tokens = torch.randint(cfg.vocab, (1, seq + 1), device=device, generator=rng)
    return tokens[:, :-1], tokens[:, 1:]


def layers_alone(name: str, seq: int, kernel: str, device, dtype, repeats: int) -> dict:
    """The rate of a few layers on one device, forward and backward: the same products, kernels and
    element-wise parts, but no embedding, head, loss, optimizer or communication."""
    few = dataclasses.replace(MODELS[name], layers=min(6, MODELS[name].layers))
    with torch.device(device):
        model = LLaMA(few, Attention(kernel)).to(dtype)
    model.init_weights(0)
    run_layer = whole_layers(
        model, rope_tables(few, torch.arange(seq, device=device), torch.float32))
    x = torch.randn(1, seq, few.dim, device=device).to(dtype).requires_grad_()

    def layers():
        y = x
        for i in range(few.layers):
            y = run_layer(i, y)
        y.backward(x.detach())
        model.zero_grad()

    seconds = clock(layers, repeats, device)
    bound = row("bound", few, f"{name}, {few.layers} layers", seq, seq, seconds, device,
                kernel=kernel)
    ends = 6 * 2 * few.vocab * few.dim  # FLOPs a token of embedding and head, which did not run
    share = 1 - ends / flops_per_token(few, seq)[0]
    bound["flops"] *= share
    for k, flops in zip(("mfu_causal", "mfu_full"), flops_per_token(few, seq)):
        bound[k] = bound[k] and bound[k] * (1 - ends / flops)
    return bound


def train_step(model, states, batch, micro_batches: int):
    """A function that runs one step of this rank on the same sequence `micro_batches` times."""
    tokens = batch[0].numel() * dist.get_world_size()
    scale = torch.full((), 1 / (tokens * micro_batches), device=batch[0].device)

    def step():
        states.begin_step()
        for _ in range(micro_batches):
            model(*batch, scale).backward()
            states.end_micro_batch()
        states.finish_gradients()
        states.update(1e-4, 1.0)

    step.states = states
    return step


def ceilings(kernel: str, seq: int, device, dtype) -> list[dict]:
    """Rows of what the device does with one matrix product and with attention alone, as shares of
    its data sheet."""
    gpu = device.type == "cuda"
    n, heads = (8192, 32) if gpu else (1024, 6)
    op, peak = Attention(kernel), peak_flops(device_name(device))
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    q, k, v, do = (torch.randn(1, seq, heads, 128, device=device).to(dtype) for _ in range(4))
    o, lse = op.forward(q, k, v)
    pairs = 2 * heads * 128 * seq**2  # FLOPs of one product with half of the (T, T) matrix
    rows = []
    for label, flops, fn in (
            (f"matrix product of {n}", 2 * n**3, lambda: a @ b),
            (f"attention forward, {kernel}", pairs, lambda: op.forward(q, k, v)),
            (f"attention backward, {kernel}", 2.5 * pairs,
             lambda: op.backward(do, q, k, v, o, lse))):
        rate = flops / clock(fn, 10, device)
        rows.append({"system": label, "model": "-", "seq": seq, "flops": rate, "tgs": None,
                     "step_s": flops / rate, "mfu_causal": peak and rate / peak, "mfu_full": None,
                     "bound_ratio": None, "gpu_gib": None, "host_gib": None, "oom": False})
    return rows


LONG_STEP_S = 45.0  # a first step and a timed one, with what building takes: two minutes
QUICK_STEP_S = 4.0
QUICK_PARAMS = {"cuda": 2e9, "cpu": 1e7}  # models with fewer


def table_step(device: torch.device) -> list[dict]:
    """What this machine does: ceilings; training steps of the largest model whose states fit its
    GPUs, as train.py plans them, against a few of its layers alone; and one step at the longest
    sequence that two minutes allow. On a CPU, the tiny model."""
    world, gpu = dist.get_world_size(), device.type == "cuda"
    quick = QUICK[0] or not gpu
    dtype = torch.bfloat16 if gpu else torch.float32
    kernel, repeats = pick_kernel("auto", device, dtype), 3 if quick else 10
    names = sorted(MODELS, key=lambda name: param_count(MODELS[name]), reverse=True)
    if quick:
        names = [n for n in names if param_count(MODELS[n]) < QUICK_PARAMS[device.type]]
    rows, too_large = [], None
    for name in names:
        seq = 4096 if gpu else 256
        cfg = Config(model=name, seq=seq, batch=world, **MEMORY)
        try:
            plan = config_plan(dataclasses.replace(cfg), device)
            break
        except ConfigError as e:
            too_large = name, str(e)
    else:
        raise ConfigError(f"no model fits: {too_large[1]}")
    if too_large:  # the smallest one that is
        rows.append(row("ours", MODELS[too_large[0]], too_large[0], seq, seq, None, device,
                        gpus=world, error=too_large[1]) | {"gpu_gib": None})
    rows += ceilings(kernel, seq, device, dtype)
    rows.append(bound := layers_alone(name, seq, kernel, device, dtype, repeats))
    show_new(rows)
    for label, update in (("ours, without optimizer", False), ("ours", True)):
        attempt(rows, label, name, seq, seq, bound, device,
                lambda: config_step(dataclasses.replace(cfg), device, update=update), repeats,
                warmup=3, kernel=kernel)
    if not rows[-1]["oom"]:
        states = 28 * param_count(plan.model) / rows[-1]["os"]  # bytes that an update moves
        update_s = rows[-1]["step_s"] - rows[-2]["step_s"] if not rows[-2]["oom"] else None
        rows[-1] |= {"optimizer_s": update_s,
                     "optimizer_tb_s": update_s and gpu and states / update_s / 1e12 or None}
        attempt_longest(rows, name, bound, device, QUICK_STEP_S if quick else LONG_STEP_S, kernel)
    return rows


def attempt_longest(rows: list, name: str, bound: dict, device, limit: float, kernel: str) -> None:
    """A row of one sequence over all ranks: the longest power of two that fits and whose step, at
    the rate of the last row, takes no more than `limit` seconds; shorter where it does not fit."""
    world, flops = dist.get_world_size(), rows[-1]["flops"]
    seconds = {seq: flops_per_token(MODELS[name], seq)[0] * seq / world / flops
               for seq in (2**i for i in range(9, 24))}
    seq = max((seq for seq, s in seconds.items() if s <= limit), default=min(seconds))
    shortest = rows[-1]["seq"]
    while seq >= shortest:
        cfg = Config(model=name, seq=seq, batch=1, **MEMORY)
        attempt(rows, "ours, longest in the time", name, seq, seq // world, bound, device,
                lambda: config_step(dataclasses.replace(cfg), device), repeats=1, warmup=1,
                kernel=kernel)
        if not rows[-1]["oom"]:
            return
        seq //= 2


# ---------------------------------------------------------------------------- sharding


def fsdp2_step(cfg: ModelConfig, kernel: str, device, micro_batches: int, mesh, reshard: bool,
               batch, attention=None):
    """The same model under PyTorch's fully_shard with its best settings: bf16 on the wire, fused
    AdamW, prefetching, gradients synchronised in the last micro-batch alone if they stay whole.
    attention: over a sequence that all ranks share; layers are then recomputed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = LLaMA(cfg, attention or Attention(kernel))
    if attention is not None:
        model.layer_runner = recomputed_layers
    wire = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16,
                                cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=wire)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=wire)
    model.to_empty(device=device)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.02) if p.dim() > 1 else torch.nn.init.ones_(p)
    for here, after in zip(model.blocks, model.blocks[1:]):
        here.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([here])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    part, positions = batch[0].shape[1], None
    scale = torch.full((), 1 / (batch[0].numel() * micro_batches), device=device)
    if attention:
        positions = torch.arange(part, device=device) + dist.get_rank() * part

    def step():
        for m in range(micro_batches):
            last = m == micro_batches - 1
            model.set_is_last_backward(last)
            if not reshard:  # ZeRO-2 keeps whole gradients until the last micro-batch
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            model(*batch, scale, positions).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def attempt(rows: list, label: str, name: str, seq: int, tokens: int, bound: dict | None, device,
            build, repeats: int = 5, warmup: int = 2, **more) -> None:
    """Build a step, time it, append its row; out of memory on any rank is a row too."""
    release(device)
    seconds, step, gpus = math.inf, None, dist.get_world_size()
    try:
        step = build()
        seconds = clock(step, repeats, device, warmup=min(warmup, repeats))
    except (torch.OutOfMemoryError, ConfigError) as e:  # it ran out, or said before that it would
        more["error"] = str(e)[:600]
    if states := getattr(step, "states", None):
        more["state_bytes"] = states.bytes()
        more["state_bytes_formula"] = state_bytes(param_count(MODELS[name]), states.factors,
                                                  states.dtype, states.accumulates)
    if plan := getattr(step, "plan", None):
        more |= chosen(step.config, plan)
    slowest = torch.tensor(seconds, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = slowest.item() if slowest.isfinite() else None
    rows.append(row(label, MODELS[name], name, seq, tokens, seconds, device, bound, gpus=gpus,
                    **more))
    show_new(rows, 1)
    step = states = None
    release(device)


def show_new(rows: list, count: int = 0) -> None:
    """Keep the rows so far, and print the last `count` of them; without, all."""
    KEEP[0](rows)
    if dist.get_rank() == 0:
        show(rows[-count:], head=count in (0, len(rows)))


def chosen(cfg: Config, plan: Plan) -> dict:
    """What a row says of a plan."""
    f, kept = plan.factors, plan.activations
    return {"p": f.p, "g": f.g, "os": f.os, "sp": cfg.sp, "chunk": cfg.chunk,
            "reason": plan.reason, "head_groups": cfg.head_groups,
            "activations": kept and dataclasses.asdict(kept),
            "planned_gib": {k: v / GIB for k, v in device_bytes(cfg, plan).items()},
            "alpha": kept and kept.alpha,
            "host_gib": kept and cfg.per_node / GIB * planner.swapped_host_bytes(cfg, plan)}


def table_shard(device: torch.device) -> list[dict]:
    """All ranks of one node, 7B: our factors beside FSDP2's modes, M = 1 and 8."""
    world, (name, seq) = dist.get_world_size(), ("7b", 4096)
    cfg, dtype = MODELS[name], torch.bfloat16
    kernel, rows = pick_kernel("auto", device, dtype), []
    rows.append(bound := layers_alone(name, seq, kernel, device, dtype, 5))
    batch = random_batch(cfg, seq, device)
    half = max(1, world // 2)
    for m in (1, 8):
        for p, g, os_, layout in [(1, 1, world, "intra"), (1, 1, world, "inter"),
                                  (1, world, world, "intra"), (half, half, world, "intra"),
                                  (world, world, world, "intra"), (half, half, half, "intra")]:
            f = Factors(p, g, os_)
            attempt(rows, f"ours {p},{g},{os_} {layout} M={m}", name, seq, seq * m, bound, device,
                    lambda: train_step(*make(cfg, kernel, device, dtype, micro_batches=m, factors=f,
                                             layout=layout), batch, m),
                    5 if m == 1 else 3, micro_batches=m)
        flat = dist.init_device_mesh("cuda", (world,))
        two = dist.init_device_mesh("cuda", (world // half, half),
                                    mesh_dim_names=("rep", "shard"))
        for label, mesh, reshard in (("ZeRO-3", flat, True), ("ZeRO-2-like", flat, False),
                                     ("HSDP, reshard", two, True), ("HSDP", two, False)):
            attempt(rows, f"fsdp2 {label} M={m}", name, seq, seq * m, bound, device,
                    lambda: fsdp2_step(cfg, kernel, device, m, mesh, reshard, batch),
                    5 if m == 1 else 3, micro_batches=m)
    return rows


def table_curves(device: torch.device) -> list[dict]:
    """20 steps under all legal factors, bf16, released buffers poisoned: how far losses and norms
    lie from those of p=g=os=1, whose own repetitions (the first rows) show the noise of runs."""
    world, seq, steps = dist.get_world_size(), 1024, 20
    cfg, rows = dataclasses.replace(MODELS["160m"], layers=4), []
    first, ids = None, noisy_sequences(cfg, steps * 8, seq).view(steps, 8, seq + 1)
    mine = ids[:, dist.get_rank() * 8 // world : (dist.get_rank() + 1) * 8 // world].to(device)
    scale = torch.tensor(1 / (8 * seq), device=device)
    kernel = pick_kernel("auto", device, torch.bfloat16)
    legal = legal_factors(world, world) + [Factors(world, world, world, world // 2)]
    for m in (1, 2):
        for f, layout, recompute in [(Factors(), "intra", False)] * (3 if m == 1 else 0) + [
                (f, layout, layout == "inter") for f in legal for layout in ("intra", "inter")]:
            model, states = make(cfg, kernel, device, torch.bfloat16, recompute, micro_batches=m,
                                 factors=f, layout=layout, poison=True)
            curve = []
            for batch in mine:
                states.begin_step()
                total = torch.zeros((), device=device)
                for part in batch.chunk(m):
                    loss = model(part[:, :-1], part[:, 1:], scale)
                    loss.backward()
                    states.end_micro_batch()
                    total += loss.detach()
                states.finish_gradients()
                norm, _ = states.update(3e-3, 1.0, total)
                dist.all_reduce(total)
                curve.append(torch.stack([total, norm]))
            curve = torch.stack(curve)
            first = curve if first is None else first
            off = (curve - first).abs().amax(0).tolist()
            name = f"{f.p},{f.g},{f.os}" + (f",{f.secondary}" if f.secondary else "")
            label = f"{name} {layout} M={m}" + (" recompute" if recompute else "")
            rows.append(row(label, cfg, "160m/3", seq, 0, None, device, gpus=world) | {
                "oom": False, "loss_first": curve[0, 0].item(), "loss_last": curve[-1, 0].item(),
                "largest_loss_difference": off[0], "largest_norm_difference": off[1]})
            KEEP[0](rows)
    if dist.get_rank() == 0:
        assert all(r["largest_loss_difference"] < 0.02 for r in rows), "a loss curve is off"
    return rows


def noisy_sequences(cfg: ModelConfig, count: int, seq: int) -> torch.Tensor:
    """(count, seq + 1) ids with something to learn: most follow from the one before."""
    ids = torch.randint(200, (count, seq + 1), generator=torch.Generator().manual_seed(0))
    for t in range(seq):
        ids[:, t + 1] = (7 * ids[:, t] + ids[:, t + 1] % 3) % 200
    return ids


def table_swap(device: torch.device) -> list[dict]:
    """50 steps with a sequence over all ranks and layers that keep, swap or recompute, against the
    plain model: same arithmetic, so all but the plain ones must agree to the last bit, and those
    two, whose all-to-alls are NCCL's and copy engines', with each other; also with everything
    poisoned after use and copies that start late, which finds a missing wait."""
    world, seq, steps, chunk = dist.get_world_size(), 4096, 50, 512
    cfg = dataclasses.replace(MODELS["160m"], layers=8, heads=16, kv_heads=4)
    rows = []
    ids = noisy_sequences(cfg, steps, seq).to(device)
    part = seq // world
    cut = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    positions, c = torch.arange(seq, device=device)[cut], -(-part // chunk)
    scale = torch.tensor(1 / seq, device=device)
    exact, f = torch.use_deterministic_algorithms, Factors(1, world, world)
    kernel = next(k for k in ("fa4", "flash", "cpu")  # cuDNN's backward adds up in any order
                  if why_no_kernel(k, device, torch.bfloat16) is None)
    kinds = {"plain, NCCL": None, "plain": None, "all kept": ActivationPlan(8, c, 8, 8 * c),
             "all recomputed": ActivationPlan(8, c, 8, 0)}
    kinds |= {f"alpha {a}": ActivationPlan(8, c, 2, 2 * c, round(6 * c * a)) for a in (0, 0.25, 1)}
    kinds["attention again"] = ActivationPlan(8, c, 2, 2 * c, 3 * c, 3)
    kinds["alpha 1, poisoned"] = kinds["alpha 0.25, poisoned"] = None
    if device.type == "cuda":  # the control: without the waits, the same test must fail
        kinds["alpha 1, poisoned, no waits"] = None
    exact(True)
    first = like = None
    for label in kinds:
        kept, hard = kinds[label.partition(",")[0]], "poisoned" in label
        attention = Ulysses(kernel, world, GROUPS, CommStream(device), 2,
                            0 if "NCCL" in label else world, hard, 3 * 10**6 * hard)
        model, states = make(cfg, kernel, device, torch.bfloat16, attention=attention,
                             factors=f, chunked=kept is not None, poison=hard,
                             num_chunks=c if kept else 1)
        if kept:
            ChunkedLayers(model, (1, part), kept, chunk, device, torch.bfloat16, poison=hard,
                          delay=3 * 10**7 * hard)
        curve, offload.wait = [], (lambda _: None) if "no waits" in label else wait
        for i, row_ in enumerate(ids[:, None]):
            states.begin_step()
            loss = model(row_[:, :-1][:, cut], row_[:, 1:][:, cut], scale, positions)
            loss.backward()
            states.end_micro_batch()
            states.finish_gradients()
            loss = loss.detach()
            norm, _ = states.update(1e-4 * min(1, (i + 1) / 20), 1.0, loss)
            dist.all_reduce(loss)
            curve.append(torch.stack([loss, norm]))
        curve = torch.stack(curve)
        first = curve if first is None else first
        same = like is not None and torch.equal(curve, like)
        like = curve if label in ("plain, NCCL", "all kept") else like
        off = (curve - first).abs().amax(0).tolist()
        rows.append(row(f"{label}, bit-equal" if same else label, cfg, "160m/8", seq, 0, None,
                        device, gpus=world) | {
            "oom": False, "loss_first": curve[0, 0].item(), "loss_last": curve[-1, 0].item(),
            "largest_loss_difference": off[0], "largest_norm_difference": off[1],
            "bit_equal": same})
        show_new(rows, 1)
    exact(False)
    offload.wait = wait
    control = [rows.pop()] if device.type == "cuda" else []
    if dist.get_rank() == 0:
        assert all(r["bit_equal"] for r in rows[1:2] + rows[3:]), "what is kept changes the sums"
        assert all(r["largest_loss_difference"] < 0.05 for r in rows), "a loss curve is off"
        assert not any(r["bit_equal"] for r in control), "this test does not see a missing wait"
    return rows + control


# ---------------------------------------------------------------------------- long sequences


def sustained(fn, device: torch.device, seconds: float = 1.0) -> float:
    """Seconds of fn() at the clock rate that a GPU holds under load: back to back, the second half
    of at least twice `seconds`."""
    fn()
    sync(device)
    start = time.perf_counter()
    fn()
    sync(device)
    calls = max(1, math.ceil(seconds / (time.perf_counter() - start)))
    return clock(lambda: [fn() for _ in range(calls)], 1, device, warmup=1) / calls


def kernel_bound(cfg: ModelConfig, name: str, seq: int, kernel: str, device, dtype,
                 chunk: int) -> dict:
    """The rate of attention and matrix kernels alone: one sequence over all ranks, no norms, no
    rotary, no loss but its products, no communication, nothing twice. A layer's kernels follow one
    another in the order of a step, for seconds: what they draw together sets the clock rate."""
    world, e = dist.get_world_size(), dict(device=device, dtype=dtype)
    tokens, op = seq // world, Attention(kernel)
    chunk = tokens // -(-tokens // chunk)  # equal parts
    heads = (cfg.heads // world, max(1, cfg.kv_heads // world))
    q, k, v, do = (torch.randn(1, seq, heads[i], cfg.head_dim, **e) for i in (0, 1, 1, 0))
    qkv = cfg.head_dim * (cfg.heads + 2 * cfg.kv_heads)
    shapes = [(qkv, cfg.dim), (cfg.dim, cfg.dim), (2 * cfg.ffn, cfg.dim), (cfg.dim, cfg.ffn)]

    def operands(rows: int, cols: int) -> list[torch.Tensor]:
        return [torch.randn(*shape, **e) for shape in ((chunk, cols), (chunk, rows), (rows, cols))]

    def products(passes: str, matrices: list) -> None:
        for _ in range(tokens // chunk):
            for x, y, w in matrices:
                (x @ w.t()) if passes == "forward" else (y @ w, y.t() @ x)

    matrices, head = [operands(*shape) for shape in shapes], [operands(cfg.vocab, cfg.dim)]

    def layer() -> None:
        products("forward", matrices[:1])
        o, lse = op.forward(q, k, v)
        products("forward", matrices[1:])
        products("backward", matrices[:0:-1])
        op.backward(do, q, k, v, o, lse)
        products("backward", matrices[:1])

    total = cfg.layers * sustained(layer, device, 2.0)
    total += sustained(lambda: [products(p, head) for p in ("forward", "backward")], device, 0.5)
    slowest = torch.tensor(total, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return row("kernels alone", cfg, name, seq, tokens, slowest.item(), device, gpus=world,
               kernel=kernel)


def config_plan(cfg: Config, device) -> Plan:
    """What train.py chooses for these flags on all ranks. Raises ConfigError."""
    world, gpu = dist.get_world_size(), device.type == "cuda"
    cfg.per_node, cfg.dtype = world, "bf16" if gpu else "fp32"
    dtype = train.DTYPES[cfg.dtype]
    kernel = pick_kernel("auto", device, dtype)
    plan = Plan(MODELS[cfg.model], device, dtype, kernel, None, None,
                gpu_budget=planner.gpu_budget(cfg, device), host_budget=planner.host_budget(cfg))
    train.min_budget_over_ranks(plan)
    plan.rates = find_rates(device_name(device), device, dtype, kernel,
                            print if dist.get_rank() == 0 else lambda *_, **__: None)
    return on_all_ranks(lambda: choose_plan(cfg, plan, world, dist.get_rank()))


def long_plan(cfg: Config, device) -> Plan:
    """The same for one sequence over all ranks."""
    cfg.batch, cfg.sp = 1, dist.get_world_size()
    return config_plan(cfg, device)


def config_step(cfg: Config, device, plan: Plan | None = None, update: bool = True):
    """A function that runs a step of train.py under its own choices, or as planned, on random
    tokens; update: or only its forward, backward and reductions."""
    world, rank, as_planned = dist.get_world_size(), dist.get_rank(), plan is not None
    plan = plan or config_plan(cfg, device)
    say = print if rank == 0 else (lambda *a, **k: None)
    train.cap_gpu(cfg, plan)
    llama, states = train.build(cfg, plan, say, as_planned, GROUPS)
    for name, p in llama.named_parameters():
        states.load(name, initial_weight(plan.model, name, p.shape, 0, device))
    train.wait_for_host_memory(llama, say)
    part = slice(rank % cfg.sp * (cfg.seq // cfg.sp), (rank % cfg.sp + 1) * (cfg.seq // cfg.sp))
    sequences = cfg.batch * cfg.sp // world
    tokens, labels = (
        t[:, part].reshape(-1, cfg.micro_batch, cfg.seq // cfg.sp)  # (M, B, T/sp)
        for t in random_sequence(plan.model, cfg.seq, device, rank // cfg.sp, sequences))
    scale = torch.full((), 1 / (cfg.batch * cfg.seq), device=device, dtype=states.accum_dtype)
    positions = local_positions(cfg, rank, device)

    def step():
        if update:
            return train.run_step(llama, states, (tokens, labels, scale), positions, 1e-4, 1.0)
        states.begin_step()
        for micro_batch in zip(tokens, labels):
            llama(*micro_batch, scale, positions).backward()
            states.end_micro_batch()
        states.finish_gradients()

    step.plan, step.config, step.states = plan, cfg, states
    return step


def long_step(cfg: Config, device, plan: Plan | None = None):
    """The same for one sequence over all ranks."""
    return config_step(cfg, device, plan or long_plan(cfg, device))


def random_sequence(cfg: ModelConfig, seq: int, device, seed: int = 0,
                    count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens, labels (count, T): the same on all ranks with this seed."""
    rng = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(cfg.vocab, (count, seq + 1), device=device, generator=rng)
    return tokens[:, :-1], tokens[:, 1:]


def table_long(device: torch.device) -> list[dict]:
    """7B, one sequence over all ranks, train.py's own choices, beside the kernels alone, beside
    what Memo compares with (full recomputation; all of it swapped, two layers resident), and
    beside FSDP2 with Ulysses and full recomputation of each layer: same model, same kernels."""
    world, rank, name, rows = dist.get_world_size(), dist.get_rank(), "7b", []
    kinds = {"ours": ("ours", {}), "full": ("ours, full recompute", {"recompute": "full"}),
             "swap": ("ours, full swap", {"alpha": 1.0, "resident_layers": 2})}
    kernel = pick_kernel("auto", device, torch.bfloat16)
    for seq in SEQS or [2**13 * world * i for i in (1, 2, 4, 8)]:
        rows.append(bound := kernel_bound(MODELS[name], name, seq, kernel, device, torch.bfloat16,
                                          2**14))
        show(rows[-1:], head=len(rows) == 1) if rank == 0 else None
        repeats = 1 if seq // world > 2**14 else 3
        warmup = 0 if seq // world > 2**17 else 2  # of steps of many minutes, the first is timed
        for label, by_hand in (v for k, v in kinds.items() if k not in SKIP):
            attempt(rows, label, name, seq, seq // world, bound, device, lambda: long_step(
                Config(model=name, seq=seq, **MEMORY, **by_hand), device), repeats, warmup)
        if "fsdp2" not in SKIP:
            tokens = (t[:, rank * seq // world : (rank + 1) * seq // world].contiguous()
                      for t in random_sequence(MODELS[name], seq, device))
            flat = dist.init_device_mesh("cuda", (world,))
            attention = Ulysses(kernel, world, GROUPS, CommStream(device), 1)
            attempt(rows, "fsdp2 ZeRO-3, Ulysses, full", name, seq, seq // world, bound, device,
                    lambda: fsdp2_step(MODELS[name], kernel, device, 1, flat, True, tuple(tokens),
                                       attention), repeats, warmup)
    return rows


def exact_replay(device: torch.device) -> int:
    """Steps at planned addresses equal others to the last bit: whole and in chunks, over all
    ranks, with steps of another shape in between. Returns how many requests met the plans."""
    world, seq, hits = dist.get_world_size(), 8192, 0
    cfg = dataclasses.replace(MODELS["160m"], layers=6, heads=16, kv_heads=4)
    kernel, tokens = pick_kernel("auto", device, torch.bfloat16), seq // world
    torch.use_deterministic_algorithms(True)
    for kept in (None, ActivationPlan(6, 4, 3, 8, 6)):
        curves = []  # the first run compiles kernels for both shapes, the others find them
        for memory in (None, None, StepMemory(f"cuda:{device.index}")):
            model, states = make(
                cfg, kernel, device, torch.bfloat16, chunked=kept is not None,
                attention=Ulysses(kernel, world, GROUPS, CommStream(device), 2, world),
                factors=Factors(1, world, world), num_chunks=4 if kept else 1)
            if kept:
                ChunkedLayers(model, (1, tokens), kept, tokens // 4, device, torch.bfloat16)
            curve = []
            for i in range(9):
                n = tokens // 2 if i in (4, 6) and not kept else tokens
                cut = slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)
                ids, labels = (t[None, :, cut] for t in random_sequence(cfg, n * world, device, i))
                batch = ids, labels, torch.tensor(1 / seq, device=device)
                step = functools.partial(train.run_step, model, states, batch,
                                         torch.arange(n * world, device=device)[cut], 1e-4, 1.0)
                curve.append(torch.stack([x.float() for x in (memory.run(step) if memory
                                                              else step())]))
                hits += memory.counts.get("hits", 0) if memory else 0
            curves.append(torch.stack(curve))
            if memory:
                assert memory.counts["hits"] > 0.9 * len(memory.buffers), memory.counts
                memory.give_back()
        assert torch.equal(*curves[1:]), f"planned addresses change the arithmetic: {curves}"
    torch.use_deterministic_algorithms(False)
    return hits


ALLOCATORS = "caching allocator", "expandable segments", "planned"


def under(label: str, device: torch.device, build) -> tuple:
    """A function that builds a step with build() and runs it under one of ALLOCATORS until nothing
    new happens in it; and the memory that it plans with, or None."""
    train.set_allocator(f"expandable_segments:{label != ALLOCATORS[0]}")
    memory = StepMemory(f"cuda:{device.index}") if label == "planned" else None

    def build_and_warm():
        step = build()

        def run():
            if memory is None:
                return step()
            return memory.replay(step) if memory.plan else memory.run(step)

        for _ in range(3 if memory else 1):  # the third is recorded
            run()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)
        run.plan, run.config = step.plan, step.config
        return run

    return build_and_warm, memory


def table_memplan(device: torch.device) -> list[dict]:
    """A step of 7B on addresses that were planned once, beside PyTorch's allocator, with segments
    that expand and without. Reserved: the most that the allocator held after warm-up. Of sequences
    whose steps take minutes, a step of the first and last two layers, with the others' memory taken
    as planned."""
    world, rank, rows = dist.get_world_size(), dist.get_rank(), []
    MODELS["7b/4"] = dataclasses.replace(MODELS["7b"], layers=4)
    hits = exact_replay(device)
    print(f"equal at planned addresses, {hits:,} requests") if rank == 0 else None
    for seq in SEQS or [2**14 * world, 2**16 * world]:
        for label in ALLOCATORS:
            cfg = Config(model="7b", seq=seq, **MEMORY)
            whole = seq // world <= 2**16
            build, memory = under(label, device, lambda: long_step(cfg, device) if whole else (
                proof_step(cfg, device, long_plan(cfg, device), pin=False)))
            attempt(rows, label, "7b" if whole else "7b/4", seq, seq // world, None, device, build,
                    2 if whole else 1, warmup=1)
            if memory and memory.counts:
                p, c = memory.plan, memory.counts
                if rank == 0:
                    file = str(KEEP[1] / f"memplan-{seq // 1024}k-{world}x")
                    memory.draw(f"{file}.png")
                    write_plan(f"{file}.csv", range(len(p.offsets)), memory.buffers, p.offsets)
                rows[-1] |= {"requests": len(memory.buffers), "planned_peak_gib": p.peak / GIB,
                             "lower_bound_gib": p.lower_bound / GIB, "solve_s": p.seconds,
                             "method": p.method, "optimal": p.optimal, "counts": c,
                             "hit_requests": c["hits"] / (
                                 c["hits"] + c["unmatched"] + c["occupied"]),
                             "hit_bytes": c["hit_bytes"] / c["bytes"]}
                memory.give_back()
            KEEP[0](rows)
    train.expandable_segments()
    return rows


def table_capped(device: torch.device) -> list[dict]:
    """The longest sequence of 7B, all kept, of which a step fits under a cap of GPU memory (80 GiB
    without --gpu-memory), to 512 tokens a rank: as above, by what gives the memory (a plan's step
    is recorded with segments that expand)."""
    world, rows, layers, step = dist.get_world_size(), [], MODELS["7b"].layers, 512
    cap = MEMORY.get("gpu_memory") or 80 * GIB

    def planned(tokens: int) -> tuple[Config, Plan]:
        cfg = Config(model="7b", seq=tokens * world, resident_layers=layers,
                     **dict.fromkeys(("p", "g", "os"), str(world)))
        plan = long_plan(cfg, device)  # for the whole GPU: here not the plan is to set the limit
        cfg.gpu_memory = cap
        return cfg, plan

    counted = step  # the most that would fit as planner.py counts it
    while sum(device_bytes(*planned(counted + step)).values()) <= cap:
        counted += step
    for label in ALLOCATORS:
        good, bad, found = counted - 4 * step, counted + 4 * step, []
        while bad - good > step:
            middle = (good + bad) // 2 // step * step
            cfg, plan = planned(middle)
            build, memory = under(label, device, lambda: long_step(cfg, device, plan))
            attempt(tried := [], label, "7b", cfg.seq, middle, None, device, build, 1, warmup=0)
            if memory:
                memory.give_back()
            if tried[0]["oom"]:
                bad = middle
            else:
                good, found = middle, tried
        rows += found or tried
        rows[-1] |= dict.fromkeys(TIMES)  # of one step each
        KEEP[0](rows)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    train.expandable_segments()
    return rows


def longest(name: str, ranks: int, device, gpu: float,
            host: float) -> tuple[Config, Plan] | None:
    """The most tokens of one sequence over `ranks` that there is a plan for, in steps of 16K a
    rank, by default hardware rates. gpu, host: bytes of a rank to plan with."""
    def fits(steps: int) -> tuple[Config, Plan] | None:
        cfg = Config(model=name, seq=steps * ranks * 2**14, batch=1, sp=ranks, per_node=ranks,
                     dtype="bf16", **MEMORY)
        plan = Plan(MODELS[name], device, torch.bfloat16, "auto", None, None, gpu_budget=gpu,
                    host_budget=host)
        try:
            return cfg, choose_plan(cfg, plan, ranks, 1)
        except ValueError:
            return None

    best, good, bad = None, 0, 1
    while found := fits(bad):
        best, good, bad = found, bad, 2 * bad
    while bad - good > 1:
        if found := fits(middle := (good + bad) // 2):
            best, good = found, middle
        else:
            bad = middle
    return best


def proof_step(cfg: Config, device, plan: Plan, pin: bool = True):
    """A step of the first and the last two layers, with all else allocated as planned (pin: on the
    host, too). It shows that memory suffices; its time, of a first step, is none of training."""
    kept = plan.activations
    few = ActivationPlan(4, kept.chunks, 2, min(kept.kept_chunks, 2 * kept.chunks),
                         2 * kept.most_swapped_chunks(), min(1, kept.layers_recomputing_attention))
    part = dataclasses.replace(plan, model=dataclasses.replace(plan.model, layers=4),
                               activations=few)
    gpu = sum(device_bytes(cfg, plan).values()) - sum(device_bytes(cfg, part).values())
    host = planner.swapped_host_bytes(cfg, plan) - planner.swapped_host_bytes(cfg, part)
    held = [torch.empty(int(gpu), dtype=torch.uint8, device=device),
            [buffer.result() for buffer in offload.pin_host_buffers(
                [2**32] * int(host / 2**32) * pin, device.type == "cuda")]]
    step = long_step(cfg, device, part)
    step.held, step.plan = held, plan
    return step


def table_longest(device: torch.device) -> list[dict]:
    """The longest sequence of 7B: of 8 H200s with 560 GiB of host memory by plan, and of this
    machine by plan and by a step of its first and last layers."""
    world, rank, rows, name = dist.get_world_size(), dist.get_rank(), [], "7b"
    MODELS["7b/4"] = dataclasses.replace(MODELS[name], layers=4)
    own = Plan(MODELS[name], device, torch.bfloat16, "auto", None, None,
               gpu_budget=planner.gpu_budget(Config(**MEMORY), device),
               host_budget=planner.host_budget(Config(per_node=world, **MEMORY)))
    train.min_budget_over_ranks(own)
    for label, ranks, gpu, host in (
            ("8 x H200, 560 GiB host, by plan", 8, planner.GPU_SHARE * 139.8 * GIB, 490 * GIB / 8),
            ("this machine, by plan", world, own.gpu_budget, own.host_budget)):
        found = longest(name, ranks, device, gpu, host)
        if found is None:
            raise SystemExit(f"bench.py: {label}: not even {ranks * 2**14:,} tokens")
        cfg, plan = found
        plan.kernel = pick_kernel("auto", device, torch.bfloat16)
        rows.append(row(label, plan.model, name, cfg.seq, 0, None, device, gpus=ranks,
                        **chosen(cfg, plan)) | {"oom": False, "gpu_gib": None})
    show(rows) if rank == 0 else None
    attempt(rows, "its first and last layers", "7b/4", cfg.seq, cfg.seq // world, None, device,
            lambda: proof_step(cfg, device, plan), repeats=1, warmup=0)
    rows[-1] |= dict.fromkeys(TIMES[1:])
    return rows


def table_million(device: torch.device) -> list[dict]:
    """Attention of a million tokens, where the elements of its heads pass 2^31: relative distance
    of the last head from a run of that head alone, and of rows past 2^19 from the definition in
    float64."""
    gpu = device.type == "cuda"
    seq, heads, dtype = (2**20, 17, torch.bfloat16) if gpu else (2**9, 3, torch.float32)
    rows, kernel = [], pick_kernel("auto", device, dtype)
    op = Attention(kernel)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, seq, heads, 128, device=device).to(dtype) for _ in range(4))
    o, lse = op.forward(q, k, v)
    all_heads = dict(zip(("o", "dq", "dk", "dv"), (o, *op.backward(do, q, k, v, o, lse))))
    last = [x[:, :, -1:].contiguous() for x in (q, k, v, do)]
    o, lse = op.forward(*last[:3])
    alone = dict(zip(("o", "dq", "dk", "dv"), (o, *op.backward(last[3], *last[:3], o, lse))))

    def add(label: str, wanted: dict, have: dict) -> None:
        distance = {x: ((have[x].double() - wanted[x].double()).norm()
                        / wanted[x].double().norm()).item() for x in wanted}
        rows.append({"system": label, "seq": seq, "heads": heads, "kernel": kernel,
                     **dict.fromkeys(("o", "dq", "dk", "dv")), **distance})
        KEEP[0](rows)

    add("the last head, to itself alone", alone, {k: x[:, :, -1:] for k, x in all_heads.items()})
    at = torch.arange(seq // 2 + 1, seq, seq // 9, device=device)
    q, k, v, do = (x[0, :, 0].double() for x in last)  # (T, D)
    scores = q[at] @ k.t() / 128**0.5
    scores.masked_fill_(torch.arange(seq, device=device) > at[:, None], -math.inf)
    p = scores.softmax(-1)
    o = p @ v
    ds = p * (do[at] @ v.t() - (do[at] * o).sum(-1, keepdim=True))
    add("its rows past the middle, to the definition", {"o": o, "dq": ds @ k / 128**0.5},
        {x: all_heads[x][0, at, -1] for x in ("o", "dq")})
    return rows


MEMO = {64: 52.34, 128: 50.96, 256: 53.62, 384: 53.04, 512: 51.84, 640: 52.59, 768: 51.89,
        896: 52.71, 1024: 52.30}  # K tokens: published MFU of 7B on 8 A800s (table 3)
MEMO_ALPHA = {256: 1.0, 384: 0.5, 512: 0.125, 768: 0.0, 896: 0.0, 1024: 0.0}  # table 7


def table_alpha(device: torch.device) -> list[dict]:
    """Memo's rule for 7B on 8 A800s (2 TB of host memory, 32 GB/s and 80 GB a GPU), from sizes and
    the published MFU, beside the published alpha. No device is used."""
    cfg, rows = MODELS["7b"], []
    for k, mfu in MEMO.items():
        n, e = k * 1024 // 8, 2
        flops = flops_per_token(cfg, k * 1024)[0] * n
        layer_s = flops / 3 / (312e12 * mfu / 100) / cfg.layers
        io, others = 2 * n * cfg.dim * e, 14 * n * cfg.dim * e  # Memo's 16 bsh elements
        sizes = Sizes(io // 2, io // 2, others, layer_s, layer_s, layer_s)
        memo, _ = plan_activations(cfg.layers, sizes, 8, 32e9, math.inf, 2e12 / 8, memo=True)
        rows.append({
            "system": f"7b, {k}K tokens", "rule_alpha": memo.alpha,
            "by_bandwidth": (32e9 * layer_s - io) / others,
            "by_host": (2e12 / 8 / (cfg.layers - 2) - io) / others,
            "published_alpha": MEMO_ALPHA.get(k),
            "host_gib": (cfg.layers - 2) * (io + MEMO_ALPHA.get(k, 0) * others) / GIB,
            "buffers_gib": 2 * (io + others) / GIB, "buffers_alpha0_gib": (2 * io + others) / GIB})
    return rows


def table_memory(device: torch.device) -> list[dict]:
    """Bytes of parameters, gradients and optimizer states on rank 0, under all legal factors, as
    they are allocated and by the formula."""
    world, name, rows = dist.get_world_size(), "7b", []
    cfg = MODELS[name]
    for m in (1, 2):
        for f in legal_factors(world, world):
            for layout in ("intra", "inter"):
                with torch.device("meta"):
                    model = LLaMA(cfg)
                release(device)
                states = States(model, device, torch.bfloat16, m, f, layout, groups=GROUPS)
                r = row(f"ours {f.p},{f.g},{f.os} {layout} M={m}", cfg, name, 0, 0, None, device,
                        gpus=world, state_bytes=states.bytes(), state_bytes_formula=state_bytes(
                            param_count(cfg), f, torch.bfloat16, m > 1))
                rows.append(r | {"oom": False, "imbalance": states.imbalance})
                KEEP[0](rows)
                del model, states
    return rows


def table_overlap(device: torch.device) -> list[dict]:
    """What each overlap is worth (AMSP, table V): switched off one after the other."""
    world, (name, seq) = dist.get_world_size(), ("7b", 4096)
    cfg, dtype = MODELS[name], torch.bfloat16
    kernel, rows = pick_kernel("auto", device, dtype), []
    batch = random_batch(cfg, seq, device)
    kinds = {"all overlaps": STREAMS, "without param_broadcast": STREAMS[:3],
             "without param_broadcast, grad_reduce": STREAMS[:2], "none": ()}
    for f in (Factors(1, 1, world), Factors(world, world, world)):
        for m in (1, 2, 4, 8):
            for label, overlap in kinds.items():
                attempt(rows, f"{f.p},{f.g},{f.os} M={m} {label}", name, seq, seq * m, None, device,
                        lambda: train_step(*make(cfg, kernel, device, dtype, micro_batches=m,
                                                 factors=f, layout="intra",
                                                 overlap=overlap), batch, m),
                        repeats=3, micro_batches=m)
    return rows


def table_nodes(device: torch.device) -> list[dict]:
    """The same ranks as "nodes" with sockets between them: NCCL_HOSTID tells NCCL that they are
    apart. A smaller model, since whole gathers of 7B would take 10 s a micro-batch."""
    world, (name, seq) = dist.get_world_size(), ("1b", 4096)
    nodes = len(set(every_rank(os.environ["NCCL_HOSTID"])))
    cfg, dtype, k = MODELS[name], torch.bfloat16, world // nodes
    kernel, rows = pick_kernel("auto", device, dtype), []
    batch = random_batch(cfg, seq, device)
    for f in dict.fromkeys((Factors(1, 1, k), Factors(k, k, k), Factors(1, 1, world),
                            Factors(world, world, world))):
        attempt(rows, f"ours {f.p},{f.g},{f.os} nodes={nodes}", name, seq, seq, None, device,
                lambda: train_step(*make(cfg, kernel, device, dtype, factors=f, layout="intra"),
                                   batch, 1), repeats=3)
    two = dist.init_device_mesh("cuda", (nodes, k), mesh_dim_names=("rep", "shard"))
    flat = dist.init_device_mesh("cuda", (world,))
    for label, mesh, reshard in (("HSDP", two, False), ("ZeRO-3", flat, True)):
        attempt(rows, f"fsdp2 {label} nodes={nodes}", name, seq, seq, None, device,
                lambda: fsdp2_step(cfg, kernel, device, 1, mesh, reshard, batch), repeats=3)
    return rows


def every_rank(value) -> list:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def exposed_ms(events) -> dict[str, float]:
    """Of a profile's device events: milliseconds in which anything, communication, and
    communication without any computation beside it ran."""
    spans = {True: [], False: []}
    for e in events:
        if e.device_type == torch.autograd.DeviceType.CUDA and "Memset" not in e.name:
            spans["nccl" in e.name.lower()].append((e.time_range.start, e.time_range.end))

    def union(parts):
        total, end = 0.0, float("-inf")
        for a, b in sorted(parts):
            total, end = total + max(0.0, b - max(a, end)), max(end, b)
        return total / 1e3

    busy, compute = union(spans[True] + spans[False]), union(spans[False])
    return {"busy_ms": busy, "communication_ms": union(spans[True]), "exposed_ms": busy - compute}


def table_trace(device: torch.device) -> list[dict]:
    """One profiled step for each of three factors: communication, and what of it is exposed."""
    world, (name, seq) = dist.get_world_size(), ("7b", 4096)
    cfg, dtype = MODELS[name], torch.bfloat16
    kernel, rows = pick_kernel("auto", device, dtype), []
    batch = random_batch(cfg, seq, device)
    for f in (Factors(1, 1, world), Factors(1, world, world), Factors(world, world, world)):
        def build():
            model, states = make(cfg, kernel, device, dtype, factors=f, layout="intra")
            step = train_step(model, states, batch, 1)
            for _ in range(3):
                step()
            sync(device)
            kinds = torch.profiler.ProfilerActivity
            with torch.profiler.profile(activities=[kinds.CUDA]) as profile:
                step()
                step()  # parameters travel under the next forward
                sync(device)
            build.times = {k: v / 2 for k, v in exposed_ms(profile.events()).items()}
            if f.p > 1 and dist.get_rank() == 0:
                TRACE.parent.mkdir(exist_ok=True)
                profile.export_chrome_trace(str(TRACE))
            return step

        attempt(rows, f"ours {f.p},{f.g},{f.os} trace", name, seq, seq, None, device, build, 3)
        rows[-1] |= build.times
        if dist.get_rank() == 0:
            print(build.times)
    return rows


@dataclass(frozen=True)
class Table:
    measure: Callable[[torch.device], list[dict]]
    ranks: int = 1  # that it needs
    cpu: bool = False  # a machine without GPUs can measure it


TABLES = {"step": Table(table_step, cpu=True), "alpha": Table(table_alpha, cpu=True),
          "million": Table(table_million, cpu=True), "swap": Table(table_swap),
          "long": Table(table_long), "longest": Table(table_longest),
          "memplan": Table(table_memplan), "capped": Table(table_capped, 2),
          "shard": Table(table_shard, 2), "memory": Table(table_memory, 2),
          "curves": Table(table_curves, 2), "trace": Table(table_trace, 2),
          "overlap": Table(table_overlap, 2), "nodes": Table(table_nodes, 4)}


def why_not(name: str, world: int, nodes: int, gpu: bool) -> str | None:
    """The reason why a table cannot be measured by these ranks, with what to type; or None."""
    table = TABLES[name]
    if not gpu and not table.cpu:
        here = ", ".join(n for n, t in TABLES.items() if t.cpu)
        return f"table {name} measures GPUs, and there are none here; a CPU can measure {here}"
    if world < table.ranks:
        split = " --nodes 2" if name == "nodes" else ""
        return (f"table {name} needs {table.ranks} GPUs or more, one a rank: torchrun "
                f"--nproc_per_node {table.ranks} bench.py {name}{split}")
    if (name == "nodes") != (nodes > 1):
        return ("table nodes needs --nodes 2 or more" if nodes == 1 else
                f"--nodes {nodes}: splits the ranks of table nodes alone, not of {name}")
    if world % nodes:
        return f"--nodes {nodes}: does not divide {world} ranks"
    return None


def cells(r: dict) -> list[str]:
    """A row as text, in the tables' order; what does not apply is a dash."""
    def text(x, form):
        return form.format(x) if x is not None else "-"

    ms, name = r["step_s"] * 1e3 if r["step_s"] else None, r["system"]
    if r["model"] == "-":  # a ceiling
        name += f", {r['flops'] / 1e12:.3g} TFLOP/s"
    if r.get("sp"):  # what train.py has chosen
        name += f" {r['p']},{r['g']},{r['os']}"
        kept = r.get("activations") or r.get("fates")  # as older files call them
        if kept:
            name += f" k={kept['resident']} alpha={r['alpha']:.2f} chunk={r['chunk']}"
            twice = kept.get("layers_recomputing_attention") or kept.get("dropped")
            name += f", attention twice in {twice}" if twice else ""
    took = text(ms, "{:,.1f}")
    if r["oom"]:  # while it ran, or it was refused before
        took = "out of memory" if "CUDA" in r.get("error", "CUDA") else "does not fit"
    return [name, r["model"], f"{r['seq']:,}", took, text(r["tgs"], "{:,.0f}"), *(
        text(r[k], "{:.1%}") for k in ("mfu_causal", "mfu_full", "bound_ratio")), *(
        text(r[k], "{:.1f}") for k in ("gpu_gib", "host_gib"))]


HEAD = ["system", "model", "tokens", "step ms", "TGS", "MFU causal", "MFU full", "of bound",
        "GPU GiB", "host GiB"]


def memory_cells(r: dict) -> list[str]:
    """A row of the table memory: GiB held / GiB by the formula, for each kind of states."""
    pairs = [(r["state_bytes"][k] / GIB, r["state_bytes_formula"][k] / GIB)
             for k in ("parameters", "gradients", "optimizer")]
    worst = max(abs(have / want - 1) for have, want in pairs)
    return [r["system"], *(f"{have:.2f} / {want:.2f}" for have, want in pairs), f"{worst:.2%}"]


def curve_cells(r: dict) -> list[str]:
    return [r["system"], *(f"{r[k]:.4f}" for k in (
        "loss_first", "loss_last", "largest_loss_difference", "largest_norm_difference"))]


def trace_cells(r: dict) -> list[str]:
    return [r["system"], *(f"{x:.1f}" for x in (
        r["step_s"] * 1e3, r["communication_ms"], r["exposed_ms"]))]


def alpha_cells(r: dict) -> list[str]:
    shown = "-" if r["published_alpha"] is None else f"{r['published_alpha']:.3f}"
    return [r["system"], *(f"{r[k]:.2f}" for k in ("by_bandwidth", "by_host", "rule_alpha")), shown,
            *(f"{r[k]:.1f}" for k in ("host_gib", "buffers_gib", "buffers_alpha0_gib"))]


def memplan_cells(r: dict) -> list[str]:
    def text(k, form):
        return form.format(r[k]) if r.get(k) is not None else "-"

    return [r["system"], r["model"], f"{r['seq']:,}",
            "out of memory" if r["oom"] else text("step_s", "{:,.3f}"), text("gpu_gib", "{:.2f}"),
            text("reserved_gib", "{:.2f}"), text("retries", "{}"), text("requests", "{:,}"),
            text("planned_peak_gib", "{:.2f}"), text("lower_bound_gib", "{:.2f}"),
            text("solve_s", "{:.1f}"),
            text("hit_requests", "{:.2%}"), text("hit_bytes", "{:.2%}")]


def million_cells(r: dict) -> list[str]:
    return [r["system"], f"{r['seq']:,}", str(r["heads"]), *(
        "-" if r[k] is None else f"{r[k]:.1e}" for k in ("o", "dq", "dk", "dv"))]


def layout(rows: list[dict]) -> tuple:
    """The head of a table, and the function that writes its cells, by what the rows hold."""
    if "rule_alpha" in rows[0]:
        return ["system", "alpha by bandwidth", "by host memory", "rule", "published",
                "host GiB", "buffers GiB", "at alpha 0"], alpha_cells
    if "largest_loss_difference" in rows[0]:
        return ["system", "first loss", "last loss", "difference", "of the norm"], curve_cells
    if "exposed_ms" in rows[0]:
        return ["system", "step ms", "communication ms", "of it exposed ms"], trace_cells
    if rows[0]["system"] == "caching allocator":
        return ["system", "model", "tokens", "step s", "GPU GiB", "reserved GiB", "retries",
                "requests", "planned GiB", "lower bound", "solved in s", "hits",
                "of bytes"], memplan_cells
    if "dq" in rows[0]:
        return ["system", "tokens", "heads", "o", "dq", "dk", "dv"], million_cells
    if "imbalance" in rows[0]:
        return ["system", "parameters", "gradients", "optimizer", "deviation"], memory_cells
    return HEAD, cells


def show(rows: list[dict], head: bool = True) -> None:
    titles, write = layout(rows)
    for line in [titles] * head + [write(r) for r in rows]:
        print(f"{line[0]:<34}" + "".join(f"{c:>16}" for c in line[1:]), flush=True)


def versions() -> dict:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("flash-attn-4", "flash-attn", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                  "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def commit() -> str:
    """The commit that is measured, + if files differ from it. BENCH_COMMIT names it where the files
    were copied without their history."""
    git = ["git", "-C", str(HERE)]
    try:
        if told := os.environ.get("BENCH_COMMIT"):
            return told
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True,
                                       stderr=subprocess.DEVNULL)
        dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode
        return head.strip() + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


README_MARKS = "<!-- results -->\n", "<!-- end of results -->\n"


def readme_tables(folder: Path) -> str:
    """Markdown tables of the results files, for README.md."""
    text = ""
    for file in sorted(folder.glob("*.json")):
        if file.name.startswith(("memory", "curves", "swap-h200", "swap-2x")):  # all alike
            continue
        r = json.loads(file.read_text())
        head, write = layout(r["rows"])
        text += (f"`{r['command']}` on {r['hardware']}, torch {r['versions']['torch']}, commit "
                 f"{r['commit']} ([file](results/{file.name})):\n\n"
                 f"| {' | '.join(head)} |\n|---|---|{'--:|' * (len(head) - 2)}\n")
        for x in r["rows"]:
            text += f"| {' | '.join(write(x))} |\n"
        text += "\n"
    return text


def write_readme() -> None:
    path = HERE / "README.md"
    start, end = (path.read_text().index(mark) for mark in README_MARKS)
    text = path.read_text()
    path.write_text(text[: start + len(README_MARKS[0])] + readme_tables(HERE / "results")
                    + text[end:])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="Sizes may end in K, M or G, which are binary: 64K is 65536.")
    parser.add_argument("tables", nargs="*", default=["step"], metavar="table",
                        help=f"of {', '.join(TABLES)}; default: step")
    parser.add_argument("--quick", action="store_true",
                        help="table step with a small model, in a minute")
    parser.add_argument("--out", help="folder of the results files; default: results on GPUs, "
                        "out/results on a CPU, whose figures README does not show")
    parser.add_argument("--readme", action="store_true",
                        help="measure nothing, write README.md's tables from results/")
    parser.add_argument("--nodes", type=int, default=1, help="split a node's ranks into this many"
                        " that reach each other by sockets alone, as nodes do (table nodes)")
    parser.add_argument("--seq", type=lambda text: [size(x) for x in text.split(",")], default=[],
                        help="tokens of the sequences of the tables long and memplan: 64K,128K")
    parser.add_argument("--skip", default="", help="rows that the table long leaves out: full "
                        "(recomputation), swap (all of it) and fsdp2, as full,swap")
    parser.add_argument("--host-memory", type=size, help="bytes of a node that it may swap to, as "
                        "160G (pinning them takes time); default: what the machine allows")
    parser.add_argument("--gpu-memory", type=size, help="bytes of a GPU that it may use, as 80G, "
                        "to imitate another; default: all")
    args = parser.parse_args()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"no table {', '.join(unknown)}; there are: {', '.join(TABLES)}")
    gpu, world = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
    reasons = [why_not(name, world, args.nodes, gpu) for name in args.tables]
    if refused := [r for r in reasons if r]:  # known to each rank, so all of them say it
        parser.error(refused[0])
    return args


def try_folder(folder: Path) -> None:
    """Raise ValueError if results cannot be written there: before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise ValueError(f"{folder} cannot be written: {e}; name another --out") from e


def command_line(args: argparse.Namespace, name: str, world: int) -> tuple[str, str]:
    """The command that measures a table as this run does, and what sets its file's name apart."""
    seqs, gib = [f"{s // 1024}K" for s in args.seq], (args.gpu_memory or 0) // GIB
    flags = {"nodes": args.nodes if args.nodes > 1 else None, "seq": ",".join(seqs),
             "skip": args.skip, "gpu-memory": f"{gib}G" if gib else None,
             "host-memory": args.host_memory and f"{args.host_memory // GIB}G"}
    launcher = f"torchrun --nproc_per_node {world}" if world > 1 else "python"
    command = f"{launcher} bench.py {name}" + " --quick" * args.quick + "".join(
        f" --{k} {v}" for k, v in flags.items() if v)
    file = name + f"{args.nodes}" * (args.nodes > 1) + "-quick" * args.quick
    return command, file + "".join(f"-{s.lower()}" for s in seqs) + f"-{gib}g" * (gib > 0)


def main() -> None:
    args = parse()
    SEQS[:], SKIP[:], QUICK[:] = args.seq, args.skip.split(","), [args.quick]
    MEMORY.update(host_memory=args.host_memory, gpu_memory=args.gpu_memory)
    if args.readme:
        return write_readme()
    local, gpu = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.is_available()
    if args.nodes > 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ["NCCL_HOSTID"] = f"node{local * args.nodes // int(os.environ['WORLD_SIZE'])}"
    rank, world, local_rank = start_ranks(600)
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    out = Path(args.out or HERE / ("results" if gpu else "out/results"))
    on_all_ranks(lambda: try_folder(out) if rank == 0 else None)
    if gpu:
        torch.cuda.set_device(device)
        train.expandable_segments()
    torch.compiler.set_stance("default" if gpu else "force_eager")
    hardware = torch.cuda.get_device_name(device) if gpu else f"CPU, {os.cpu_count()} cores"
    hardware = f"{world} x {hardware}" if world > 1 else hardware
    if rank == 0 and (count := torch.cuda.device_count()) > world == 1:
        print(f"one of {count} GPUs; all of them: torchrun --nproc_per_node {count} bench.py "
              f"{' '.join(args.tables)}")
    last, stopped = [], False
    for name in args.tables:
        release(device)
        command, file = command_line(args, name, world)
        results = {"hardware": hardware if name != "alpha" else "no device (calculated)",
                   "versions": versions(), "commit": commit(), "command": command, "rows": []}
        if name != "alpha":
            file += "-" + hardware.replace("NVIDIA ", "").split(",")[0].replace(" ", "").lower()

        def keep(rows: list[dict]) -> None:
            """Write the rows so far: a table that is cut short leaves what it has measured."""
            results["rows"] = rows
            if rank == 0:
                (out / f"{file}.json").write_text(json.dumps(results, indent=1) + "\n")

        KEEP[:] = [keep, out]
        try:
            keep(TABLES[name].measure(device))
        except KeyboardInterrupt:
            stopped = True
        if rank == 0:
            print(f"\n{name}: {hardware}, {results['versions']}, commit {results['commit']}")
            show(results["rows"]) if results["rows"] else None
            print(f"{'stopped; the rows so far are' if stopped else 'written'} in "
                  f"{out / file}.json")
        last.append({"table": name, **results})
        if stopped:
            break
    if rank == 0:
        print(json.dumps(last[0] if len(last) == 1 else {"tables": last}))
    if stopped:  # in the middle of something: other ranks may wait in it
        sys.stdout.flush()
        os._exit(130)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ConfigError as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"bench.py: error: {e}", file=sys.stderr)
        sys.exit(2)
