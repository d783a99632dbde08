"""How fast? Print ceiling, measurement and ratio; write results/NAME.json.

    python bench.py                              what this machine does with the largest model that
                                                 it holds: table step, under ten minutes
    python bench.py --quick                      the same with a small model, in a minute
    torchrun --nproc_per_node 8 bench.py long    another table, of all GPUs together
    torchrun --nproc_per_node 8 bench.py --profile NAME    what planner.py wants to know of a
                                                 machine, as results/profiles/NAME.json

A row is a Config (train.py's flags), which train.run_step runs on random tokens, and what was
measured. Each table prints first what the hardware allows, measured in the same run (a matrix
product, the attention kernel, a few layers alone), then what the project reaches, then the ratio:
machines are noisy, ratios less so. Times are medians after a warm-up; a speed is never taken from
zeros. MFU counts model FLOPs (model.flops_per_token), recomputation never: "causal" counts half of
the attention matrix, "full" all of it. The last line of output is one JSON object with the same
rows. results/report.py writes tables and pictures of all results.

Left out: whether results are right, which test_all.py shows, on GPUs too.

Legend: T tokens a sequence, C width, L layers, M micro-batches.
"""
import argparse
import functools
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import costs
import planner
import train
from attention import Attention, pick_kernel
from costs import state_bytes
from hardware import PROFILES, Machine, Profile, peak_flops, profile_text
from memplan import StepMemory, draw, write_plan
from model import (MODELS, Block, LLaMA, ModelConfig, accumulation_dtype, flops_per_token,
                   param_count, rms_norm, rope_tables, whole_layers)
from offload import GIB, ActivationPlan
from planner import size
from ranks import (ConfigError, Groups, heartbeat, of_all_ranks, on_all_ranks, on_rank_0,
                   print0, start_ranks)
from shard import STREAMS, Factors, States
from train import Config, Run, device_name

HERE = Path(__file__).parent
TIMES = ("step_s", "tgs", "flops", "mfu_causal", "mfu_full")  # of a row
# of all tables: the memory of NCCL's communicators does not come back
GROUPS: dict[tuple[int, int], Groups] = {}

# ---------------------------------------------------------------------------- rows


@dataclass
class Bench:
    """What a table is given, and where its rows go."""

    device: torch.device
    rank: int
    world: int
    out: Path = HERE  # folder of results files
    seqs: list[int] = field(default_factory=list)  # --seq
    skip: list[str] = field(default_factory=list)  # --skip
    model: str = "7b"  # --model
    batch: int = 1  # --batch
    nodes: int = 1  # --nodes
    quick: bool = False
    memory: dict[str, int | None] = field(default_factory=dict)  # --host-memory, --gpu-memory
    rows: list[dict] = field(default_factory=list)
    keep: Callable[[list[dict]], None] = lambda rows: None  # writes the rows so far

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.gpu else torch.float32

    def kernel(self) -> str:
        return pick_kernel("auto", self.device, self.dtype)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def add(self, *rows: dict) -> None:
        """Keep rows, and print them."""
        first = not self.rows
        self.rows += rows
        self.keep(self.rows)
        show(rows, head=first)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(fn: Callable, repeats: int, device: torch.device, warmup: int = 3) -> float:
    """Return the median seconds of fn(), as train.py's steps follow each other: from the end of
    one's computation to that of the next's, under which its copies run on."""
    sync(device)
    gc.collect()
    gc.freeze()  # as train.train does
    times = []
    try:
        for _ in range(warmup + repeats):
            start = time.perf_counter()
            fn()
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - start)
        sync(device)
    finally:
        gc.unfreeze()
    return statistics.median(times[warmup:])


def memory_figures(device: torch.device) -> dict:
    """Return the peak of what was allocated; what PyTorch's allocator held at most; and how often
    it emptied its cache."""
    if device.type != "cuda":
        return {"gpu_gib": None, "reserved_gib": None, "retries": None}
    return {"gpu_gib": train.gpu_peak_gib(device),
            "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0)}


def row(bench: Bench, system: str, cfg: ModelConfig, name: str, seq: int, tokens: int,
        seconds: float | None, bound: dict | None = None, gpus: int | None = None, **more) -> dict:
    """Return a line of a table and of the results file. tokens: of one step on one device; seconds:
    None if it ran out of memory; bound: the row that it is compared with."""
    peak = peak_flops(device_name(bench.device))
    found = dict.fromkeys(TIMES)
    ratio = None
    if seconds:
        tgs = tokens / seconds
        causal, full = (flops * tgs for flops in flops_per_token(cfg, seq))
        found = {"step_s": seconds, "tgs": tgs, "flops": causal,
                 "mfu_causal": peak and causal / peak, "mfu_full": peak and full / peak}
        if bound and bound["flops"]:  # known without a peak
            ratio = causal / bound["flops"]
    return {"system": system, "model": name, "seq": seq,
            "gpus": int(bench.gpu) if gpus is None else gpus, **found, "bound_ratio": ratio,
            "host_gib": None, **memory_figures(bench.device), "oom": seconds is None, **more}


# ---------------------------------------------------------------------------- steps of a Config


@dataclass
class Step:
    """A step of train.py on random tokens: call it to run it once."""

    run: Run
    model: nn.Module
    states: object  # States, or what has their methods
    batch: train.Batch
    update: bool = True  # or forward, backward and reductions alone
    held: Tensor | None = None  # memory that is taken besides
    memory: StepMemory | None = None  # that plans it

    def __call__(self):
        lr = 1e-4 if self.update else None
        work = functools.partial(train.run_step, self.model, self.states, self.batch, lr, 1.0)
        if self.memory is None:
            return work()
        return self.memory.replay(work) if self.memory.plan else self.memory.run(work)


def plan_run(bench: Bench, cfg: Config, gpu: float | None = None) -> Run:
    """Return what train.py chooses for these flags on all ranks; gpu: bytes of a GPU to plan with,
    if not its own. Raises ConfigError. A collective."""
    cfg = replace(cfg, document_token=-1, **bench.memory)
    cfg, model, _ = train.choose_model(cfg, bench.device, None)
    kernel = on_all_ranks(lambda: pick_kernel(cfg.attention, bench.device, bench.dtype))
    plans, there = train.choose_plans(cfg, model, bench.device, bench.dtype, gpu=gpu)
    return Run(cfg, bench.rank, bench.world, bench.device, bench.dtype, kernel, model, plans[0],
               there)


def groups_of(run: Run) -> Groups:
    """Return the groups of the plan's stages and columns, made once for all plans whose model is
    cut alike."""
    key = run.plan.tp, run.plan.pp
    if key not in GROUPS:
        GROUPS[key] = Groups(timedelta(seconds=run.cfg.timeout), *key)
    return GROUPS[key]


def random_batch(run: Run) -> train.Batch:
    """Return uniform random tokens and their labels (M, B, T/sp), others on other ranks of data,
    and the scale of the loss."""
    _, data_rank, _, _ = run.coordinates
    shape = (run.plan.batch // run.plan.dp, run.plan.seq + 1)
    windows = np.random.default_rng(data_rank).integers(run.model.vocab, size=shape)
    scale = torch.full((), 1 / (run.plan.batch * run.plan.seq), device=run.device,
                       dtype=accumulation_dtype(run.dtype))
    return replace(train.local_batch(list(windows), run), scale=scale)


def make_step(bench: Bench, cfg: Config | None = None, run: Run | None = None,
              update: bool = True) -> Step:
    """Build a step of these flags under train.py's own choices, or of a run as it is planned. A
    collective."""
    run = run or plan_run(bench, cfg)
    train.cap_gpu(run)
    groups = groups_of(run)
    train.describe(run)
    model, states = train.build(run, train.make_attention(run, groups), groups)
    train.load_random_weights(run, states)
    batch = random_batch(run)
    train.warm_up(model, batch)
    return Step(run, model, states, batch, update)


def release(device: torch.device) -> None:
    """Give back what is not held any more: modules and their states refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def attempt(bench: Bench, label: str, cfg: Config, repeats: int = 5, warmup: int = 2,
            bound: dict | None = None, build: Callable[[], Step] | None = None, **more) -> dict:
    """Build a step of these flags (or what `build` returns, of their model, sequence and batch),
    time it, and add its row, which is returned; out of memory on any rank is a row too. A
    collective."""
    release(bench.device)
    seconds = math.inf
    step = None
    try:
        step = build() if build else make_step(bench, cfg)
        seconds = clock(step, repeats, bench.device, warmup)
    except (torch.OutOfMemoryError, ConfigError) as e:  # it ran out, or said before that it would
        more["error"] = str(e)[:600]
    if step and isinstance(step.states, States):  # not FSDP2's
        more |= chosen(step.run)
        more["state_bytes"] = step.states.bytes()
        more["state_bytes_formula"] = state_bytes(step.run.plan)
    seconds = max(of_all_ranks(seconds))  # infinite on all ranks, if on one
    found = row(bench, label, MODELS[cfg.model], cfg.model, cfg.seq,
                cfg.batch * cfg.seq // bench.world, seconds if math.isfinite(seconds) else None,
                bound, bench.world, **more)
    bench.add(found)
    del step
    release(bench.device)
    return found


def attempt_beside_kernels(bench: Bench, model: str, seq: int, kinds: dict[str, dict],
                           repeats: int = 3, warmup: int = 1, **flags) -> None:
    """Add the row of the kernels alone, and one of a step for each kind: label -> its own flags."""
    bound = kernel_bound(bench, model, seq)
    bench.add(bound)
    for label, own in kinds.items():
        cfg = Config(model=model, seq=seq, **flags | own)
        attempt(bench, label, cfg, repeats, warmup, bound)


def chosen(run: Run) -> dict:
    """Return what a row says of a plan."""
    plan = run.plan
    f = plan.factors
    kept = plan.activations
    names = ("sp", "ring", "chunk", "tp", "pp", "pp_chunks", "batch", "micro_batch", "os_layout",
             "os_place", "recompute", "head_groups")
    return {"p": f.p, "g": f.g, "os": f.os, **{name: getattr(plan, name) for name in names},
            "predicted": plan.seconds,
            "predicted_s": plan.step_s, "predicted_gib": plan.gpu_bytes / GIB,
            "activations": kept and asdict(kept),
            "planned_gib": {name: value / GIB for name, value in plan.memory.items()},
            "alpha": kept and kept.alpha,
            "host_gib": plan.per_node / GIB * plan.host_bytes or None}


class Fsdp2States:
    """PyTorch's fully_shard with its best settings, behind the methods that train.run_step calls of
    States: bf16 on the wire, fused AdamW, prefetching, gradients synchronised in the last
    micro-batch alone if they stay whole."""

    def __init__(self, model: LLaMA, mesh, reshard: bool, micro_batches: int, device):
        """reshard: after forward (ZeRO-3); else whole parameters and gradients stay (ZeRO-2)."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        wire = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16,
                                    cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=wire)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=wire)
        model.to_empty(device=device)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)
            else:
                nn.init.ones_(p)
        for here, after in zip(model.blocks, model.blocks[1:]):
            here.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([here])
        self.model = model
        self.reshard = reshard
        self.micro_batches = micro_batches
        model.register_forward_pre_hook(lambda *_: self.begin_micro_batch())
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95),
                                           weight_decay=0.1, fused=True)

    def begin_step(self) -> None:
        self.micro_batch = 0

    def begin_micro_batch(self) -> None:
        """Say whether its backward is the step's last."""
        self.micro_batch += 1
        last = self.micro_batch == self.micro_batches
        self.model.set_is_last_backward(last)
        if not self.reshard:  # ZeRO-2 keeps whole gradients until the last micro-batch
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)

    def finish_gradients(self) -> None:
        pass

    def update(self, lr: float, clip: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, loss.isfinite()


def checkpointed_layers(model: LLaMA, rope: tuple[Tensor, Tensor], attention: Callable):
    """A layer_runner that keeps a layer's input alone and runs all of it again, as PyTorch does."""
    return lambda i, x: checkpoint(model.blocks[i], x, rope, attention, use_reentrant=False)


def fsdp2_step(bench: Bench, cfg: Config, mesh, reshard: bool) -> Step:
    """Build a step of the same model and kernels under FSDP2. With a sequence over ranks, layers
    are recomputed, and all-to-alls are NCCL's, in one head group."""
    run = plan_run(bench, replace(cfg, head_groups=1, ring=1, recompute="none"),
                   gpu=2.0**60)  # what fits is FSDP2's to say
    plan = replace(run.plan, factors=Factors(), per_node=0)
    run = replace(run, plan=plan)
    op = train.make_attention(run, groups_of(run))
    with torch.device("meta"):
        model = LLaMA(run.model, op)
    if run.plan.sp > 1:
        model.layer_runner = checkpointed_layers
    states = Fsdp2States(model, mesh, reshard, run.plan.micro_batches, bench.device)
    return Step(run, model, states, random_batch(run))


# ---------------------------------------------------------------------------- ceilings


def ceilings(bench: Bench, seq: int) -> list[dict]:
    """Return rows of what the device does with one matrix product and with attention alone, as
    shares of its data sheet."""
    device = bench.device
    n, heads = (8192, 32) if bench.gpu else (1024, 6)
    kernel = bench.kernel()
    op = Attention(kernel)
    peak = peak_flops(device_name(device))
    a, b = (bench.random(n, n) for _ in range(2))
    q, k, v, do = (bench.random(1, seq, heads, 128) for _ in range(4))
    o, lse = op.forward(q, k, v)
    pairs = 2 * heads * 128 * seq**2  # FLOPs of one product with half of the (T, T) matrix

    def backward():
        return op.backward(lambda: (do, []), q, k, v, o, lse)

    work = {
        f"matrix product of {n}": (2 * n**3, lambda: a @ b),
        f"attention forward, {kernel}": (pairs, lambda: op.forward(q, k, v)),
        f"attention backward, {kernel}": (2.5 * pairs, backward),
    }
    rows = []
    for label, (flops, fn) in work.items():
        rate = flops / clock(fn, 10, device)
        blank = dict.fromkeys((*TIMES, "bound_ratio", "gpu_gib", "host_gib"))
        rows.append(blank | {"system": label, "model": "-", "seq": seq, "flops": rate,
                             "step_s": flops / rate, "mfu_causal": peak and rate / peak,
                             "oom": False})
    return rows


def layers_alone(bench: Bench, name: str, seq: int, repeats: int) -> dict:
    """Return the row of a few layers on one device, forward and backward: the same products,
    kernels and element-wise parts, but no embedding, head, loss, optimizer or communication."""
    device = bench.device
    few = replace(MODELS[name], layers=min(6, MODELS[name].layers))
    with torch.device(device):
        model = LLaMA(few, Attention(bench.kernel())).to(bench.dtype)
    model.init_weights(0)
    rope = rope_tables(few, torch.arange(seq, device=device), torch.float32)
    run_layer = whole_layers(model, rope, model.attention)
    x = bench.random(1, seq, few.dim).requires_grad_()

    def layers() -> None:
        y = x
        for i in range(few.layers):
            y = run_layer(i, y)
        y.backward(x.detach())
        model.zero_grad()

    seconds = clock(layers, repeats, device)
    bound = row(bench, "bound", few, f"{name}, {few.layers} layers", seq, seq, seconds,
                kernel=bench.kernel())
    ends = 6 * 2 * few.vocab * few.dim  # FLOPs a token of embedding and head, which did not run
    causal, full = flops_per_token(few, seq)
    for key, flops in (("flops", causal), ("mfu_causal", causal), ("mfu_full", full)):
        bound[key] = bound[key] and bound[key] * (1 - ends / flops)
    return bound


def sustained(fn, device: torch.device, seconds: float) -> float:
    """Seconds of fn() at the clock rate that a GPU holds under load: back to back, the second half
    of at least twice `seconds`."""
    once = clock(fn, 1, device, warmup=1)
    calls = max(1, math.ceil(seconds / once))
    return clock(lambda: [fn() for _ in range(calls)], 1, device, warmup=1) / calls


def kernel_bound(bench: Bench, name: str, seq: int, chunk: int = 2**14) -> dict:
    """Return the row of attention and matrix kernels alone: one sequence over all ranks, no norms,
    no rotary, no loss but its products, no communication, nothing twice. A layer's kernels follow
    one another in the order of a step, for seconds: what they draw together sets the clock rate. A
    collective."""
    cfg = MODELS[name]
    tokens = seq // bench.world
    chunk = tokens // -(-tokens // chunk)  # equal parts
    op = Attention(bench.kernel())
    heads = cfg.heads // bench.world
    kv_heads = max(1, cfg.kv_heads // bench.world)
    q, k, v, do = (bench.random(1, seq, n, cfg.head_dim)
                   for n in (heads, kv_heads, kv_heads, heads))

    def operands(rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, dy and w of a product."""
        return bench.random(chunk, cols), bench.random(chunk, rows), bench.random(rows, cols)

    with torch.device("meta"):
        block = Block(cfg)
    # one before attention (q, k, v), then the others (its output, gate and up, down)
    matrices = [operands(*p.shape) for p in block.parameters() if p.dim() == 2]
    head = [operands(cfg.vocab, cfg.dim)]

    def products(matrices: list, backward: bool) -> None:
        for _ in range(tokens // chunk):
            for x, dy, w in matrices:
                if backward:
                    dy @ w
                    dy.t() @ x
                else:
                    x @ w.t()

    def layer() -> None:
        products(matrices[:1], backward=False)
        o, lse = op.forward(q, k, v)
        products(matrices[1:], backward=False)
        products(matrices[:0:-1], backward=True)
        op.backward(lambda: (do, []), q, k, v, o, lse)
        products(matrices[:1], backward=True)

    def ends() -> None:
        products(head, backward=False)
        products(head, backward=True)

    seconds = cfg.layers * sustained(layer, bench.device, 2.0)
    seconds += sustained(ends, bench.device, 0.5)
    return row(bench, "kernels alone", cfg, name, seq, tokens,
               max(of_all_ranks(seconds)), gpus=bench.world, kernel=bench.kernel())


# ---------------------------------------------------------------------------- tables: one step

LONG_STEP_S = 45.0  # a first step and a timed one, with what building takes: two minutes
QUICK_STEP_S = 4.0
QUICK_PARAMS = {"cuda": 2e9, "cpu": 1e7}  # models with fewer


def table_step(bench: Bench) -> None:
    """What this machine does: ceilings; training steps of the largest model whose states fit its
    GPUs, as train.py plans them, beside a few of its layers alone (which bound neither a step whose
    launches take longer than its kernels, nor another length); and one step at the longest sequence
    that two minutes allow. On a CPU, the tiny model."""
    quick = bench.quick or not bench.gpu
    repeats = 3 if quick else 10
    names = sorted(MODELS, key=lambda name: param_count(MODELS[name]), reverse=True)
    if quick:
        names = [n for n in names if param_count(MODELS[n]) < QUICK_PARAMS[bench.device.type]]
    seq = 4096 if bench.gpu else 256
    name, refused = largest_model(bench, names, seq)
    if refused:  # the smallest one that is
        too_large, error = refused
        bench.add(row(bench, "ours", MODELS[too_large], too_large, seq, seq, None,
                      gpus=bench.world, error=error) | {"gpu_gib": None})
    bench.add(*ceilings(bench, seq), layers_alone(bench, name, seq, repeats))
    cfg = Config(model=name, seq=seq, batch=bench.world, os_place="gpu")
    alone, whole = (
        attempt(bench, label, cfg, repeats, 3,
                build=lambda: make_step(bench, cfg, update=update), kernel=bench.kernel())
        for label, update in (("ours, without optimizer", False), ("ours", True)))
    if whole["oom"]:
        return
    if not alone["oom"]:
        whole["optimizer_s"] = whole["step_s"] - alone["step_s"]
        moved = 28 * param_count(MODELS[name]) / whole["os"]  # bytes, by an update
        if bench.gpu and whole["optimizer_s"] > 0:
            whole["optimizer_tb_s"] = moved / whole["optimizer_s"] / 1e12
    attempt_longest(bench, name, whole, QUICK_STEP_S if quick else LONG_STEP_S)


def largest_model(bench: Bench, names: list[str], seq: int) -> tuple[str, tuple | None]:
    """Return the first of the models, largest first, for which there is a plan, and the last one
    without, with the reason. Raises ConfigError if there is none."""
    refused = None
    for name in names:
        try:
            plan_run(bench, Config(model=name, seq=seq, batch=bench.world, os_place="gpu"))
            return name, refused
        except ConfigError as e:
            refused = name, str(e)
    raise ConfigError(f"no model fits: {refused[1]}")


def attempt_longest(bench: Bench, name: str, last: dict, limit: float) -> None:
    """Add a row of one sequence over all ranks: the longest power of two that fits and whose step,
    at the rate of the last row, takes no more than `limit` seconds; shorter where it does not."""
    def seconds(seq: int) -> float:
        return flops_per_token(MODELS[name], seq)[0] * seq / bench.world / last["flops"]

    lengths = [2**i for i in range(9, 24)]
    seq = max((seq for seq in lengths if seconds(seq) <= limit), default=lengths[0])
    while seq >= last["seq"]:
        cfg = Config(model=name, seq=seq, batch=1, os_place="gpu")
        found = attempt(bench, "ours, longest in the time", cfg, 1, 1, kernel=bench.kernel())
        if not found["oom"]:
            return
        seq //= 2


# ---------------------------------------------------------------------------- tables: sharding


def sharded(bench: Bench, name: str, f: Factors, m: int, **flags) -> Config:
    """Return the flags of a step of whole layers under these factors, M micro-batches of one
    sequence a rank."""
    return Config(model=name, seq=4096, sp=1, batch=m * bench.world, micro_batch=1, p=f.p, g=f.g,
                  os=f.os, recompute="none", **flags)


def table_shard(bench: Bench) -> None:
    """All ranks of one node, 7B: our factors, by hand and as planned, beside FSDP2's modes, M = 1
    and 8."""
    world = bench.world
    half = max(1, world // 2)
    bound = layers_alone(bench, "7b", 4096, 5)
    bench.add(bound)
    flat = dist.init_device_mesh("cuda", (world,))
    two = dist.init_device_mesh("cuda", (world // half, half), mesh_dim_names=("rep", "shard"))
    ours = [(1, 1, world, "intra"), (1, 1, world, "inter"), (1, world, world, "intra"),
            (half, half, world, "intra"), (world, world, world, "intra"),
            (half, half, half, "intra")]
    theirs = [("ZeRO-3", flat, True), ("ZeRO-2-like", flat, False), ("HSDP, reshard", two, True),
              ("HSDP", two, False)]
    for m in (1, 8):
        repeats = 5 if m == 1 else 3
        for p, g, os_, layout in ours:
            cfg = sharded(bench, "7b", Factors(p, g, os_), m, os_layout=layout)
            attempt(bench, f"ours {p},{g},{os_} {layout} M={m}", cfg, repeats, 2, bound,
                    micro_batches=m)
        cfg = Config(model="7b", seq=4096, batch=m * world)
        attempt(bench, f"ours, as planned M={m}", cfg, repeats, 2, bound)
        cfg = sharded(bench, "7b", Factors(), m)
        for label, mesh, reshard in theirs:
            attempt(bench, f"fsdp2 {label} M={m}", cfg, repeats, 2, bound,
                    lambda: fsdp2_step(bench, cfg, mesh, reshard), micro_batches=m)


def table_overlap(bench: Bench) -> None:
    """What each overlap is worth (AMSP, table V): switched off one after the other."""
    kinds = {"all overlaps": STREAMS, "without param_broadcast": STREAMS[:3],
             "without param_broadcast, grad_reduce": STREAMS[:2], "none": ("none",)}
    for f in (Factors(1, 1, bench.world), Factors(*[bench.world] * 3)):
        for m in (1, 2, 4, 8):
            for label, streams in kinds.items():
                cfg = sharded(bench, "7b", f, m, overlap=",".join(streams))
                attempt(bench, f"{f.p},{f.g},{f.os} M={m} {label}", cfg, 3, micro_batches=m)


def table_nodes(bench: Bench) -> None:
    """The same ranks as "nodes" with sockets between them: NCCL_HOSTID tells NCCL that they are
    apart. A smaller model, since whole gathers of 7B would take 10 s a micro-batch."""
    nodes = bench.nodes
    k = bench.world // nodes
    kinds = [Factors(1, 1, k), Factors(k, k, k), Factors(1, 1, bench.world),
             Factors(*[bench.world] * 3)]
    for f in dict.fromkeys(kinds):
        cfg = sharded(bench, "1b", f, 1)
        attempt(bench, f"ours {f.p},{f.g},{f.os} nodes={nodes}", cfg, 3)
    two = dist.init_device_mesh("cuda", (nodes, k), mesh_dim_names=("rep", "shard"))
    flat = dist.init_device_mesh("cuda", (bench.world,))
    cfg = sharded(bench, "1b", Factors(), 1)
    for label, mesh, reshard in (("HSDP", two, False), ("ZeRO-3", flat, True)):
        attempt(bench, f"fsdp2 {label} nodes={nodes}", cfg, 3,
                build=lambda: fsdp2_step(bench, cfg, mesh, reshard))


def table_ring(bench: Bench) -> None:
    """One sequence over all ranks by heads alone, and by context over the nodes (of one node: over
    two halves of it), beside the kernels alone. --nodes: as in table nodes."""
    world = bench.world
    kinds = {f"ours, ring {ring}, nodes={bench.nodes}": {"ring": ring}
             for ring in (1, max(2, bench.nodes))}
    for name in ("7b", "llama3-8b"):
        for seq in bench.seqs or [2**14 * world * i for i in (1, 2, 4)]:
            attempt_beside_kernels(bench, name, seq, kinds, 1 if seq // world > 2**14 else 3,
                                   sp=world, batch=1)


def union_ms(spans: list[tuple[float, float]]) -> float:
    """Return the milliseconds that spans (begin, end) in microseconds cover together."""
    total = 0.0
    covered = float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return total / 1e3


def exposed_ms(events) -> dict[str, float]:
    """Return of a profile's device events the milliseconds in which anything, communication, and
    communication without any computation beside it ran."""
    communication = []
    computation = []
    for e in events:
        if e.device_type == torch.autograd.DeviceType.CUDA and "Memset" not in e.name:
            kind = communication if "nccl" in e.name.lower() else computation
            kind.append((e.time_range.start, e.time_range.end))
    busy = union_ms(communication + computation)
    return {"busy_ms": busy, "communication_ms": union_ms(communication),
            "exposed_ms": busy - union_ms(computation)}


def table_trace(bench: Bench) -> None:
    """One profiled step for each of three factors: communication, and what of it is exposed; and
    results/trace.json.gz, for chrome://tracing, of the last."""
    world = bench.world
    for f in (Factors(1, 1, world), Factors(1, world, world), Factors(world, world, world)):
        cfg = sharded(bench, "7b", f, 1)
        found = {}

        def build() -> Step:
            step = make_step(bench, cfg)
            for _ in range(3):
                step()
            sync(bench.device)
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=kinds) as profile:
                step()
                step()  # parameters travel under the next forward
                sync(bench.device)
            found.update({key: value / 2 for key, value in exposed_ms(profile.events()).items()})
            if f.p > 1 and bench.rank == 0:
                profile.export_chrome_trace(str(bench.out / "trace.json.gz"))
            return step

        attempt(bench, f"ours {f.p},{f.g},{f.os} trace", cfg, 3, build=build).update(found)
        print0(found)


# ---------------------------------------------------------------------------- tables: sequences


def table_long(bench: Bench) -> None:
    """A model (--model), one sequence over all ranks or --batch of them in a step, train.py's own
    choices, beside the kernels alone, beside what Memo compares with (full recomputation; all of it
    swapped, two layers resident), and beside FSDP2 with Ulysses and full recomputation of each
    layer: same model, same kernels. Of steps of minutes the first is timed, in which what runs
    whole is compiled."""
    name = bench.model
    world = bench.world
    kinds = {"ours": ("ours", {}), "full": ("ours, full recompute", {"recompute": "full"}),
             "swap": ("ours, full swap", {"alpha": 1.0, "resident_layers": 2})}
    for seq in bench.seqs or [2**13 * world * i for i in (1, 2, 4, 8)]:
        bound = kernel_bound(bench, name, seq)
        bench.add(bound)
        tokens = bench.batch * seq // world
        repeats = 1 if tokens > 2**14 else 3
        # of steps of minutes, the first is timed
        warmup = 0 if bound["step_s"] > 100 else 1 if tokens > 2**14 else 2
        make = make_step if warmup else make_long_step
        cfg = Config(model=name, seq=seq, batch=bench.batch)
        for kind, (label, by_hand) in kinds.items():
            if kind not in bench.skip:
                ours = replace(cfg, **by_hand)
                attempt(bench, label, ours, repeats, warmup, bound, lambda: make(bench, ours))
        if "fsdp2" not in bench.skip:
            flat = dist.init_device_mesh("cuda", (world,))
            theirs = replace(cfg, sp=world)
            attempt(bench, "fsdp2 ZeRO-3, Ulysses, full", theirs, repeats, warmup, bound,
                    lambda: fsdp2_step(bench, theirs, flat, True))


def make_long_step(bench: Bench, cfg: Config) -> Step:
    """Build a step of minutes, of which the first is timed: kernels of its chunks are compiled."""
    run = plan_run(bench, cfg)
    if run.plan.activations is not None:
        compile_kernels(bench, run)
    return make_step(bench, cfg)


def compile_kernels(bench: Bench, run: Run) -> None:
    """Compile the kernels of a step in chunks by two of them in two layers."""
    kept = run.plan.activations
    dropped = min(2, kept.layers_recomputing_attention)
    few = ActivationPlan(2, 2, 2, 0, 0, dropped)
    seq = 2 * run.plan.chunk * run.plan.sp
    short = of_layers(run, few, seq=seq)
    make_step(bench, run=short)()
    # the norm before the head is of all tokens at once
    tokens = run.plan.tokens
    dim = run.model.dim
    x = torch.zeros(1, tokens, dim, dtype=run.dtype, device=bench.device, requires_grad=True)
    norm = torch.ones(dim, dtype=accumulation_dtype(run.dtype), device=bench.device)
    rms_norm(x, nn.Parameter(norm), run.model.norm_eps).backward(x.detach())
    del x
    release(bench.device)


def of_layers(run: Run, kept: ActivationPlan, **planned) -> Run:
    """Return the run of a model with as many layers as `kept` is of, which keep so much."""
    model = replace(run.model, layers=kept.layers)
    plan = replace(run.plan, model=model, activations=kept, **planned)
    return replace(run, model=model, plan=planner.with_memory(plan))


def first_and_last_layers(run: Run) -> Run:
    """Return the run of a model of the first two layers (two groups of one, or one of two) and the
    last two, as they are planned."""
    kept = run.plan.activations
    away = 2
    stride = min(kept.stride, away)
    dropped = min(stride, kept.layers_recomputing_attention)
    in_resident = kept.layers_recomputing_attention - (kept.layers - kept.resident)
    if in_resident >= 0:
        dropped = away + min(2, in_resident)
    few = ActivationPlan(away + 2, kept.chunks, 2, min(kept.kept_chunks, 2 * kept.chunks),
                         away * kept.most_swapped_chunks(), dropped, stride)
    return of_layers(run, few)


def proof_step(bench: Bench, run: Run) -> Step:
    """Build a step of the first and the last two layers, with all else allocated as planned on the
    GPU."""
    few = first_and_last_layers(run)
    gpu = int(run.plan.gpu_bytes - few.plan.gpu_bytes)
    held = torch.empty(max(0, gpu), dtype=torch.uint8, device=bench.device)
    step = make_step(bench, run=few)
    step.held = held
    return step




# ---------------------------------------------------------------------------- tables: memory

ALLOCATORS = ("caching allocator", "expandable segments", "planned")


def memory_planner(bench: Bench, label: str) -> StepMemory | None:
    """Return what plans the memory of a step under one of ALLOCATORS."""
    return StepMemory(str(bench.device)) if label == "planned" else None


def warm_step(bench: Bench, label: str, memory: StepMemory | None,
              build: Callable[[], Step]) -> Step:
    """Build a step under one of ALLOCATORS, and run it until nothing new happens in it."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{label != ALLOCATORS[0]}")
    step = build()
    step.memory = memory
    for _ in range(3 if memory else 1):  # the third is recorded
        step()
    release(bench.device)
    return step


def memory_row(memory: StepMemory) -> dict:
    """Return what a row says of a planned step."""
    plan = memory.plan
    counts = memory.counts
    met = counts["hits"] / (counts["hits"] + counts["unmatched"] + counts["occupied"])
    return {"requests": len(memory.buffers), "planned_peak_gib": plan.peak / GIB,
            "lower_bound_gib": plan.lower_bound / GIB, "solve_s": plan.seconds,
            "method": plan.method, "optimal": plan.optimal, "counts": counts,
            "hit_requests": met,
            "hit_bytes": counts["hit_bytes"] / counts["bytes"]}


def table_memplan(bench: Bench) -> None:
    """A step of 7B on addresses that were planned once, beside PyTorch's allocator, with segments
    that expand and without. Reserved: the most that the allocator held after warm-up. Of sequences
    whose steps take minutes, a step of the first and last two layers, with the others' memory taken
    as planned."""
    world = bench.world
    MODELS["7b/4"] = replace(MODELS["7b"], layers=4)
    for seq in bench.seqs or [2**14 * world, 2**16 * world]:
        whole = seq // world <= 2**16
        cfg = Config(model="7b", seq=seq, sp=world, batch=1)

        def build() -> Step:
            if whole:
                return make_step(bench, cfg)
            return proof_step(bench, plan_run(bench, cfg))

        for label in ALLOCATORS:
            memory = memory_planner(bench, label)
            found = attempt(bench, label, cfg if whole else replace(cfg, model="7b/4"),
                            2 if whole else 1, 1,
                            build=lambda: warm_step(bench, label, memory, build))
            if memory and memory.counts:
                if bench.rank == 0:
                    file = str(bench.out / f"memplan-{seq // 1024}k-{world}x")
                    draw(f"{file}.png", memory.buffers, memory.plan)
                    write_plan(f"{file}.csv", range(len(memory.buffers)), memory.buffers,
                               memory.plan.offsets)
                found.update(memory_row(memory))
                memory.give_back()
            bench.keep(bench.rows)
    train.expandable_segments()



@dataclass(frozen=True)
class Table:
    measure: Callable[[Bench], None]
    ranks: int = 1  # that it needs
    cpu: bool = False  # a machine without GPUs can measure it


TABLES = {
    "step": Table(table_step, cpu=True),
    "long": Table(table_long),
    "memplan": Table(table_memplan),
    "shard": Table(table_shard, 2),
    "trace": Table(table_trace, 2),
    "overlap": Table(table_overlap, 2),
    "nodes": Table(table_nodes, 4),
    "ring": Table(table_ring, 2),
}
SPLIT = ("nodes", "ring")  # tables that --nodes splits
SIZED = ("long", "memplan", "ring")  # that --seq sizes
SKIPPED = ("full", "swap", "fsdp2")  # what --skip may name


def why_not(name: str, world: int, nodes: int, gpu: bool) -> str | None:
    """Return why a table cannot be measured by these ranks, with what to type; None if it can."""
    table = TABLES[name]
    if not gpu and not table.cpu:
        here = ", ".join(n for n, t in TABLES.items() if t.cpu)
        return f"table {name} measures GPUs, and there are none here; a CPU can measure {here}"
    if world < table.ranks:
        split = " --nodes 2" if name == "nodes" else ""
        return (f"table {name} needs {table.ranks} GPUs or more, one a rank: torchrun "
                f"--nproc_per_node {table.ranks} bench.py {name}{split}")
    if name == "nodes" and nodes == 1:
        return "table nodes needs --nodes 2 or more"
    if name not in SPLIT and nodes > 1:
        return f"--nodes {nodes}: splits the ranks of tables {', '.join(SPLIT)}, not of {name}"
    if world % nodes:
        return f"--nodes {nodes}: does not divide {world} ranks"
    return None


# ---------------------------------------------------------------------------- print and write


def system_of(r: dict) -> str:
    """Return what a row is of, with what train.py has chosen."""
    name = r["system"]
    if r.get("model") == "-":  # a ceiling
        return name + f", {r['flops'] / 1e12:.3g} TFLOP/s"
    if not r.get("sp") or name.startswith("fsdp2"):  # whose row may name factors of ours
        return name
    name += f" {r['p']},{r['g']},{r['os']}"
    if kept := r.get("activations"):
        name += f" k={kept['resident']} alpha={r['alpha']:.2f} chunk={r['chunk']}"
        if twice := kept["layers_recomputing_attention"]:
            name += f", attention twice in {twice}"
    return name


# of a table: title -> a row's cell; a dash for what does not apply
STEP_FORMS = {
    "system": "{what}", "model": "{model}", "tokens": "{seq:,}", "step ms": "{took_ms}",
    "TGS": "{tgs:,.0f}", "MFU causal": "{mfu_causal:.1%}", "MFU full": "{mfu_full:.1%}",
    "of bound": "{bound_ratio:.1%}", "GPU GiB": "{gpu_gib:.1f}", "host GiB": "{host_gib:.1f}"}
MEMORY_FORMS = {
    "system": "{system}", "model": "{model}", "tokens": "{seq:,}", "step s": "{took_s}",
    "GPU GiB": "{gpu_gib:.2f}", "reserved GiB": "{reserved_gib:.2f}", "retries": "{retries:d}",
    "requests": "{requests:,}", "planned GiB": "{planned_peak_gib:.2f}",
    "lower bound": "{lower_bound_gib:.2f}", "solved in s": "{solve_s:.1f}",
    "hits": "{hit_requests:.2%}", "of bytes": "{hit_bytes:.2%}"}
FORMS_BY_KEY = {  # what rows of a table hold -> title -> a row's cell
    "exposed_ms": {
        "system": "{system}", "step ms": "{took_ms}",
        "communication ms": "{communication_ms:.1f}", "of it exposed ms": "{exposed_ms:.1f}"},
}


def cell(form: str, r: dict) -> str:
    try:
        return form.format_map(r)
    except (KeyError, TypeError):  # it has none of that, or None
        return "-"


def cells(r: dict, forms: dict[str, str] = STEP_FORMS) -> list[str]:
    """Return a row as text, in the order of the forms."""
    took_ms = took_s = "-"
    if r.get("oom"):  # while it ran, or it was refused before
        took_ms = took_s = "out of memory" if "CUDA" in r.get("error", "CUDA") else "does not fit"
    elif r.get("step_s"):
        took_ms, took_s = f"{1e3 * r['step_s']:,.1f}", f"{r['step_s']:,.3f}"
    said = {"what": system_of(r), "took_ms": took_ms, "took_s": took_s}
    return [cell(form, r | said) for form in forms.values()]


def layout(rows: list[dict], forms_by_key: dict[str, dict] = FORMS_BY_KEY
           ) -> tuple[list[str], Callable[[dict], list[str]]]:
    """Return the head of a table, and the function that writes a row's cells, by what rows hold."""
    forms = next((forms for key, forms in forms_by_key.items() if key in rows[0]), STEP_FORMS)
    if rows[0]["system"] in ALLOCATORS:
        forms = MEMORY_FORMS
    return list(forms), functools.partial(cells, forms=forms)


def show(rows: list[dict], head: bool = True) -> None:
    titles, write = layout(rows)
    for line in [titles] * head + [write(r) for r in rows]:
        print0(f"{line[0]:<34}" + "".join(f"{text:>16}" for text in line[1:]))


def versions() -> dict:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("flash-attn-4", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                  "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def commit() -> str:
    """Return the commit that is measured, + if files differ from it. BENCH_COMMIT names it where
    the files were copied without their history."""
    told = os.environ.get("BENCH_COMMIT")
    if told:
        return told
    git = ["git", "-C", str(HERE)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True,
                                       stderr=subprocess.DEVNULL)
        dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode
        return head.strip() + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---------------------------------------------------------------------------- the program


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="Sizes may end in K, M or G, which are binary: 64K is 65536.")
    parser.add_argument("tables", nargs="*", default=["step"], metavar="table",
                        help=f"of {', '.join(TABLES)}; default: step")
    parser.add_argument("--quick", action="store_true",
                        help="table step with a small model, in a minute")
    parser.add_argument("--profile", default="", type=str.lower, metavar="NAME",
                        help="measure the rates that "
                        "planner.py predicts by, on all ranks, in two minutes, and write "
                        "results/profiles/NAME.json; no table")
    parser.add_argument("--out", help="folder of the results files; default: results on GPUs, "
                        "out/results on a CPU, whose figures README does not show")
    parser.add_argument("--nodes", type=int, default=1, help="split a node's ranks into this many"
                        " that reach each other by sockets alone, as nodes do (tables "
                        f"{', '.join(SPLIT)})")
    parser.add_argument("--seq", type=lambda text: [size(x) for x in text.split(",")], default=[],
                        help="tokens of the sequences of the tables long, memplan and ring: "
                        "64K,128K")
    parser.add_argument("--model", default="7b", choices=list(MODELS),
                        help="of the table long; default: 7b")
    parser.add_argument("--batch", type=int, default=1,
                        help="sequences a step of the table long; default: 1")
    parser.add_argument("--skip", default="", help="rows that the table long leaves out: full "
                        "(recomputation), swap (all of it) and fsdp2, as full,swap")
    parser.add_argument("--host-memory", type=size, help="bytes of a node that it may swap to, as "
                        "160G (pinning them takes time); default: what the machine allows")
    parser.add_argument("--gpu-memory", type=size, help="bytes of a GPU that it may use, as 80G, "
                        "to imitate another; default: all")
    args = parser.parse_args()
    unknown = set(args.tables) - set(TABLES)
    if unknown:
        parser.error(f"no table {', '.join(unknown)}; there are: {', '.join(TABLES)}")
    gpu = torch.cuda.is_available()
    world = int(os.environ.get("WORLD_SIZE", 1))
    for flag in ("batch", "nodes", "host_memory", "gpu_memory"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} {value}: at least 1")
    if any(seq < 1 for seq in args.seq):
        parser.error(f"--seq {','.join(map(str, args.seq))}: at least 1 token each")
    if unknown := set(filter(None, args.skip.split(","))) - set(SKIPPED):
        parser.error(f"--skip {', '.join(sorted(unknown))}: of {', '.join(SKIPPED)}")
    for name in args.tables:
        if args.seq and name not in SIZED:
            parser.error(f"--seq: of tables {', '.join(SIZED)}, not of {name}")
        reason = why_not(name, world, args.nodes, gpu)
        if reason:  # known to each rank, so all of them say it
            parser.error(reason)
        for flag in ("model", "batch"):
            value = getattr(args, flag)
            if name != "long" and value != parser.get_default(flag):
                parser.error(f"--{flag} {value}: of table long alone, not of {name}")
    return args


def command_line(args: argparse.Namespace, name: str, world: int) -> tuple[str, str]:
    """Return the command that measures a table as this run does, and what sets its file's name
    apart."""
    seqs = [f"{seq // 1024}K" for seq in args.seq]
    model = args.model if args.model != "7b" else ""
    batch, nodes = (str(count) if count > 1 else "" for count in (args.batch, args.nodes))
    gpu, host = (f"{size // GIB}G" if size else "" for size in (args.gpu_memory, args.host_memory))
    flags = {"seq": ",".join(seqs), "batch": batch, "skip": args.skip, "model": model,
             "nodes": nodes, "gpu-memory": gpu, "host-memory": host}
    command = f"{launcher(world)} bench.py {name}" + " --quick" * args.quick
    command += "".join(f" --{flag} {value}" for flag, value in flags.items() if value)
    parts = [name + nodes, model, "quick" * args.quick, *seqs, batch and f"{batch}x", gpu]
    return command, "-".join(filter(None, parts)).lower()


def in_file_names(hardware: str) -> str:
    """8 x NVIDIA H200 -> 8xh200"""
    return hardware.replace("NVIDIA ", "").split(",")[0].replace(" ", "").lower()


def launcher(world: int) -> str:
    return f"torchrun --nproc_per_node {world}" if world > 1 else "python"


def measure(bench: Bench, args: argparse.Namespace, name: str, hardware: str) -> tuple[dict, bool]:
    """Measure a table, and write its file row by row: one that is cut short leaves what it has
    measured. Returns what is written, and whether Ctrl-C has stopped it."""
    release(bench.device)
    command, file = command_line(args, name, bench.world)
    file += f"-{in_file_names(hardware)}"
    results = {"hardware": hardware, "versions": versions(), "commit": commit(),
               "command": command, "rows": []}

    def keep(rows: list[dict]) -> None:
        results["rows"] = rows
        if bench.rank == 0:
            (bench.out / f"{file}.json").write_text(json.dumps(results, indent=1) + "\n")

    bench.rows = []
    bench.keep = keep
    stopped = False
    try:
        TABLES[name].measure(bench)
    except KeyboardInterrupt:
        stopped = True
    keep(bench.rows)
    print0(f"\n{name}: {hardware}, {results['versions']}, commit {results['commit']}")
    if bench.rows:
        show(bench.rows)
    what = "stopped; the rows so far are" if stopped else "written"
    print0(f"{what} in {bench.out / file}.json")
    return {"table": name, **results}, stopped


def layer_seconds(profile: Profile, model: ModelConfig, dtype: torch.dtype, tokens: int) -> float:
    """Return what costs.py counts for a layer, forward and backward."""
    layer = costs.layer_seconds(costs.Estimator(profile), costs.Plan(model, dtype, 1, 1, tokens))
    return layer.forward + layer.backward


def write_profile(bench: Bench, name: str, per_node: int, hardware: str) -> None:
    """Measure what this machine does, and write it for planner.py. A collective."""
    about = {"hardware": hardware, "versions": versions(), "commit": commit(),
             "command": f"{launcher(bench.world)} bench.py --profile {name}"}
    machine = Machine(bench.device, bench.dtype, bench.kernel(), per_node)
    profile = machine.profile(name, layer_seconds, about)
    if bench.memory["host_memory"] is not None:  # some machines show less than they have
        profile = replace(profile, host_bytes=float(bench.memory["host_memory"]))
    path = PROFILES / f"{name}.json" if bench.gpu else bench.out / f"profile-{name}.json"
    if bench.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile_text(profile))
        print(f"wrote {path}")


def main() -> None:
    args = parse()
    gpu = torch.cuda.is_available()
    if args.nodes > 1:
        ranks = int(os.environ["WORLD_SIZE"]) // args.nodes
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ["NCCL_HOSTID"] = f"node{int(os.environ.get('LOCAL_RANK', 0)) // ranks}"
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # by which train.py plans
        args.host_memory = args.host_memory or int(planner.host_budget(args.nodes, None))
    rank, world, local_rank = start_ranks(600)
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    out = Path(args.out or HERE / ("results" if gpu else "out/results"))
    memory = {"host_memory": args.host_memory, "gpu_memory": args.gpu_memory}
    bench = Bench(device, rank, world, out, args.seq, args.skip.split(","), args.model,
                  args.batch, args.nodes, args.quick, memory)
    on_rank_0(lambda: train.try_folder(str(out), "; name another --out"))  # before it measures
    if gpu:
        torch.cuda.set_device(device)
        train.expandable_segments()
    torch.compiler.set_stance("default" if gpu else "force_eager")
    hardware = torch.cuda.get_device_name(device) if gpu else f"CPU, {os.cpu_count()} cores"
    if world > 1:
        hardware = f"{world} x {hardware}"
    count = torch.cuda.device_count()
    if count > world == 1:
        print0(f"one of {count} GPUs; all of them: torchrun --nproc_per_node {count} "
               f"bench.py {' '.join(args.tables)}")
    if args.profile:
        write_profile(bench, args.profile, int(os.environ.get("LOCAL_WORLD_SIZE", world)), hardware)
        args.tables = []
    last = []
    stopped = False
    with heartbeat(rank, world, "Rows so far are written"):
        for name in args.tables:
            results, stopped = measure(bench, args, name, hardware)
            last.append(results)
            if stopped:
                break
        if last:
            print0(json.dumps(last[0] if len(last) == 1 else {"tables": last}))
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
