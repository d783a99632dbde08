"""Time a training step, its kernels by themselves, and FSDP2, DeepSpeed and transformers.

    python bench.py                              table machine: how fast this machine trains the
                                                 largest model that it holds, with many short
                                                 sequences per step and with one long sequence. It
                                                 takes less than five minutes on a GPU, and about a
                                                 minute on a CPU
    python bench.py --quick                      the same with a small model, in a minute
    python bench.py step                         table step: the same beside FSDP2, in less than
                                                 ten minutes
    torchrun --nproc_per_node 8 bench.py long    another table, on all GPUs together
    torchrun --nproc_per_node 8 bench.py --profile NAME
                                                 measure the rates from which planner.py predicts
                                                 seconds, and write profiles/NAME.json in --out

A table (make_tables) has rows. A row is one measurement: a label, and flags of train.py. The label
says what runs. A label that begins with fsdp2, deepspeed or transformers runs a *peer*, another
system on the same task, and peers.py says what its other words mean. Any other label runs our step,
as train.py does. Example: the row "fsdp2 selective host" is the same model under FSDP2, which
recomputes all but attention, with all model states in host memory. A peer runs micro-batches of the
size that the planner predicts to be the fastest with unlimited memory. --micro-batch sets another
size.

Steps run on random tokens. A time is the median of at least three steps after a warm-up; of steps
that should take more than 20 seconds, only one is timed. MFU counts the model's FLOPs
(model.flops_per_token), but not those of recomputation. Causal MFU counts half of the attention
matrix, full MFU all of it. The kernel bound is the causal MFU that a step would have if it ran only
its attention and matrix kernels. The percent of kernel bound is the step's causal MFU divided by
the kernel bound.

A row is one line of JSON in results/MONTH-MACHINE/TABLE.jsonl, for example
results/2026-11-4xh200/long.jsonl. It holds the label, the flags, what was measured, the hardware,
the versions, the commit and the command. Rows are only added to a file. results/report.py turns
these files into tables and pictures, and shows only the newest rows of a repeated command. The last
line of output is a JSON object with the command's rows. Only table machine ends with sentences
instead.

Left out: whether a step computes the right numbers. The tests check that.

Legend: p, g, os shards of parameters, gradients, optimizer states; sp GPUs per sequence; M
micro-batches, B sequences per micro-batch, T tokens per sequence, of which a rank holds T/sp. In
the column "plan", "2,2,4 sp=4 k=14 alpha=0.50 chunk=16384" means p=2, g=2 and os=4; k layers keep
their activations on the GPU, the other layers swap the fraction alpha of theirs to the host, and
token chunks have 16,384 tokens. "os on the host but for 12 layers" means that optimizer states are
on the host, except those of the first 12 layers. "attention twice in 6" means that the first 6
layers drop attention's output, so that backward runs attention again. ring, tp and pp appear if
they are above 1.
"""

import argparse
import collections
import contextlib
import functools
import gc
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from shlex import quote

import torch
import torch.distributed as dist
from scipy import stats

import costs
import fp8
import planner
import train
from attention import KERNELS, Attention, pick_kernel, why_not
from hardware import processor_name, profile_text
from measure import Machine, host_copy_rate
from memplan import write_plan
from model import MODELS, param_count
from offload import ActivationPlan
from peers import PEERS, TIMEOUT_S, Step, groups_of, random_batch
from ranks import (
    ConfigError,
    UnexpectedError,
    all_or_none,
    gather_objects,
    heartbeat,
    on_rank_0,
    print0,
    start_ranks,
    use_more_queues,
)
from streams import GIB, NO_LIMIT, host_budget
from train import Config, Run, device_name

HERE = Path(__file__).parent
SHORT_SEQ = {"cuda": 4096, "cpu": 256}  # tokens of a short sequence, by device
# Short sequences per rank in a step of tables machine and step. With one sequence of 4K tokens per
# rank, launching kernels and the update would take most of a step, and nobody trains like this
SHORT_SEQS_PER_RANK = {"cuda": 16, "cpu": 4}
# A step of ours that is predicted to take longer is warmed up by a step of fewer layers
SHALLOW_WARM_UP_SECONDS = 180
# Seconds that a rank whose row failed waits for the other ranks (await_ranks). Ranks mostly run out
# of memory together, in the same layer
FAILED_ROW_WAIT_S = 60
# the most seconds that a step of one long sequence may take by prediction, with --quick or on a CPU
QUICK_SECONDS = 4

# ---------------------------------------------------------------------------- steps of a Config


@dataclass
class Bench:
    """One command of bench.py: what all of its rows share, and the rows measured so far."""

    device: torch.device
    rank: int
    world: int
    quick: bool
    file: Path  # the results file, to which rows are added; with --profile, the profile's file
    about: dict  # what every row says of the machine and the command
    rows: list[dict] = field(default_factory=list)
    # results of kernel_seconds: shapes -> [seconds of a layer, seconds of the head]
    kernels: dict[tuple, list] = field(default_factory=dict)

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.gpu else torch.float32

    def add(self, row: dict) -> None:
        """Print a row, and add it to the file at once. If the table is stopped, its earlier rows
        are in the file."""
        self.rows.append(row | self.about)
        on_rank_0(append_line, self.file, json.dumps(self.rows[-1]))
        titles, lines = as_text([row])
        label, *cells = lines[0]
        values = [f"{title} {cell}" for title, cell in zip(titles[1:], cells)]
        print0(f"{label}: {', '.join(values)}")


def append_line(file: Path, line: str) -> None:
    """Add a line to a file. If the file does not end with a newline, add one first."""
    with file.open("a+b") as f:
        if f.tell() > 0:
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":
                f.write(b"\n")
        f.write(line.encode() + b"\n")


def config(flags: str) -> Config:
    """Parse train.py's flags. Raises ValueError."""
    return Config(**train.parse(flags.split()))


def plan_runs(bench: Bench, cfg: Config, gpu_bytes: float | None = None) -> list[Run]:
    """Return train.py's best plans for these flags on all ranks, each as a run. gpu_bytes: the GPU
    memory to plan for, by default this GPU's. Raises ConfigError. A collective."""
    cfg = replace(cfg, document_token=-1, dtype="bf16" if bench.gpu else "fp32")
    cfg, model, *_ = train.choose_model(cfg, bench.device, None)
    kernel = all_or_none(pick_kernel, cfg.attention, bench.device, bench.dtype)
    plans, cluster = train.choose_plans(cfg, model, bench.device, kernel, gpu_bytes)
    return [Run(cfg, bench.rank, bench.device, kernel, plan, cluster) for plan in plans]


def make_step(run: Run) -> Step:
    """Build a step as train.py does. A collective."""
    groups = groups_of(run.plan.tp, run.plan.pp)
    train.print_plan(run)
    train.warn_of_short_host_memory(run.plan)
    model, states = train.build_model(run, train.make_attention(run, groups), groups)
    train.load_random_weights(run, states)
    train.warn_of_short_gpu_memory(run)
    batch = random_batch(run)
    if run.plan.pp > 1:
        model.warm_up(next(batch.micro_batches()))
    step = Step(run, model, states, batch, train.plan_memory(run))
    if step.memory:
        step.cleanup.callback(step.memory.give_back)
    return step


# ---------------------------------------------------------------------------- peers


def peer_run(bench: Bench, cfg: Config) -> Run:
    """Return the run of a peer. Layers run whole, and attention has one head group, whose
    all-to-alls NCCL sends. It is planned for unlimited memory, because whether a peer fits is
    measured."""
    whole_layers = {"head_groups": 1, "ring": 1, "recompute": "none"}
    cfg = replace(cfg, **whole_layers, os_place="gpu", resident_states=None)
    run, *_ = plan_runs(bench, cfg, gpu_bytes=NO_LIMIT)
    # with per_node=0, attention.make_exchange uses NCCL instead of copies within a node
    return replace(run, plan=replace(run.plan, per_node=0))


# ---------------------------------------------------------------------------- clocks


def clock(bench: Bench, step: Callable, repeats: int, first_counts: bool = False) -> list[float]:
    """Return the seconds of each of `repeats` steps, after one step that does not count. With
    first_counts, there is no such step before them.

    A step's time is from the end of the previous step's computation to the end of its own. As in
    train.py, a step begins while copies and broadcasts of the previous step may still run.
    """
    gc.collect()
    gc.freeze()  # as train.py does
    ends = []
    if first_counts:
        if bench.gpu:
            torch.cuda.synchronize()
        gather_objects(None)  # so that no rank's time contains what another rank still builds
        ends.append(time.perf_counter())
    try:
        for _ in range(repeats if first_counts else 1 + repeats):
            step()
            if bench.gpu:
                torch.cuda.current_stream().synchronize()
            ends.append(time.perf_counter())
    finally:
        gc.unfreeze()
    return [end - start for start, end in itertools.pairwise(ends)]


def device_seconds(bench: Bench, work: Callable) -> float:
    """Return the median seconds of work() on the device.

    It runs again and again for two seconds (on a CPU, a tenth of a second). Only the later half of
    the times counts, because by then a GPU's clock rate has fallen to what it holds under load. But
    if one call takes longer than two seconds, only the second call is timed. A pause on the GPU
    comes first, during which the host queues the calls. So no kernel waits for the host.
    """

    def time_calls(calls):
        start = time.perf_counter()
        if bench.gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2**24)  # a pause of so many cycles, some 10 ms
            begin.record()
        for _ in range(calls):
            work()
        if not bench.gpu:
            return (time.perf_counter() - start) / calls
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls

    time_calls(1)  # compiles
    seconds = time_calls(1)
    if seconds > 2:  # the first call was so long that the clock rate has fallen already
        return seconds
    calls = max(1, min(16, int(0.04 / seconds)))  # a queue has room for a thousand launches
    start = time.perf_counter()
    times = []
    while len(times) < 2 or time.perf_counter() - start < (2 if bench.gpu else 0.1):
        times.append(time_calls(calls))
    return statistics.median(times[len(times) // 2 :])


def kernels_alone(run: Run) -> tuple[Callable, Callable]:
    """Return two functions. They run the attention and matrix kernels of one layer, and the matrix
    kernels of the head, forward and backward, for one micro-batch on one rank. Products have at
    most 16K tokens each. On a ring, attention is timed as if the ranks split its heads. Products in
    float8 do not include the casts of their operands."""
    plan = run.plan
    cfg = plan.local_model
    random = functools.partial(torch.randn, device=run.device, dtype=plan.dtype)
    most = 2**14  # tokens of a product

    def operands(rows, cols, tokens=plan.tokens):
        tokens //= costs.ceil_div(tokens, most)
        return random(tokens, cols), random(tokens, rows), random(rows, cols)

    def products_of(x, dy, w):
        x @ w.t()
        dy @ w
        dy.t() @ x

    def float8_products_of(x_casts, dy_casts, w_casts):
        x, x_t = x_casts
        dy, dy_t = dy_casts
        w, w_t = w_casts
        fp8.product(x, w, plan.dtype, fast=True)
        fp8.product(dy, w_t, plan.dtype)
        fp8.product(dy_t, x_t, plan.dtype)

    layer = []  # (function, its operands) of each matrix
    for matrix, in_float8 in zip(plan.matrices, plan.in_float8):
        if in_float8:
            casts = [
                fp8.cast_both(t, *fp8.largest_values(t, True, True)) for t in operands(*matrix)
            ]
            layer.append((float8_products_of, casts))
        else:
            layer.append((products_of, operands(*matrix)))
    head_tokens = plan.tokens_between_products
    head = [(products_of, operands(*plan.vocab_matrix, head_tokens))]
    heads, kv_heads = (max(1, n // plan.sp) for n in (cfg.heads, cfg.kv_heads))
    q, k, v, do = (
        random(plan.micro_batch, plan.seq, n, cfg.head_dim)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    op = Attention(run.kernel)

    def products(matrices, tokens):
        for _ in range(costs.ceil_div(tokens, most)):
            for function, its_operands in matrices:
                function(*its_operands)

    def run_layer():
        products(layer, plan.tokens)
        o, lse = op.forward(q, k, v)
        op.backward(lambda: (do, []), q, k, v, o, lse)

    return run_layer, lambda: products(head, head_tokens)


def kernel_seconds(bench: Bench, run: Run) -> float:
    """Return the seconds that a step's attention and matrix kernels take on a rank if nothing else
    runs. Norms, rotary embedding, softmax, communication and recomputation do not count. For a
    pipeline this is the mean of its stages. A collective."""
    plan = run.plan
    shapes = (
        plan.matrices,
        plan.vocab_matrix,
        plan.tokens_between_products,
        plan.micro_batch,
        plan.seq,
        plan.sp,
        plan.local_model.heads,
        plan.products,
    )
    if shapes not in bench.kernels:
        bench.kernels[shapes] = [
            max(gather_objects(device_seconds(bench, work))) for work in kernels_alone(run)
        ]
    layer, head = bench.kernels[shapes]
    return plan.micro_batches * (plan.model.layers * layer + head) / plan.pp


# ---------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One measurement: a label, and the flags of train.py that it adds to its table's."""

    label: str  # if its first word is one of PEERS, the row runs a peer; every other label is ours
    flags: str = ""
    # as in train.py: PyTorch's allocator may grow a segment of memory instead of adding another
    expandable_segments: bool = True

    @property
    def peer(self) -> str | None:
        """Return the name of the peer that the row runs, None if it runs our step."""
        first_word = self.label.split()[0]
        return first_word if first_word in PEERS else None


def plan_row(bench: Bench, row: Row) -> Run:
    """Return the run of a row. Raises ConfigError if it does not fit. A collective."""
    cfg = config(row.flags)
    return peer_run(bench, cfg) if row.peer else plan_runs(bench, cfg)[0]


def build_step(row: Row, run: Run) -> Step:
    """Build the step of a row, ours or a peer's. A collective."""
    if row.peer is None:
        return make_step(run)
    options = row.label.split()[1:]
    return PEERS[row.peer](run, options)


def timed_steps(bench: Bench, run: Run) -> int:
    """Return how many steps of a row are timed. Steps that should take more than 20 seconds: 1.
    Other steps on a CPU: 3. On a GPU: as many as should take 20 seconds together, but 3 to 10.

    The median of three steps leaves out one that something else on the machine slowed down."""
    if run.plan.step_s > 20:
        return 1
    if not bench.gpu:
        return 3
    return max(3, min(10, int(20 / run.plan.step_s)))


def shallow_run(run: Run) -> Run:
    """Return the run of a model with two layers, or one per virtual stage, and otherwise with the
    plan of this run. So its step uses the same kernels on the same shapes.

    Its layers swap nothing, and recompute all chunks. (One chunk is kept if this run keeps or swaps
    any.) That needs the least memory, and runs the kernels of recomputation, too."""
    plan = run.plan
    layers = max(2, plan.pp * plan.pp_chunks)
    plan = replace(
        plan,
        model=replace(plan.model, layers=layers),
        resident_states=min(plan.resident_states, layers),
    )
    if plan.activations:
        n = plan.reached_layers
        keeps_any = plan.activations.kept_chunks + plan.activations.swapped_chunks > 0
        activations = ActivationPlan(
            n, plan.chunks, resident=n, kept_chunks=int(keeps_any), swapped_chunks=0
        )
        plan = replace(plan, activations=activations)
    machine = run.hardware
    return replace(run, plan=costs.predict(plan, machine.profile, run.kernel, machine.processor))


def time_step(bench: Bench, step: Step, warm: bool = False) -> list[float]:
    """Warm a step up, and return the seconds of each timed step. A collective. warm: its kernels
    were used before, so that already the first step counts."""
    repeats = timed_steps(bench, step.run)
    if warm:
        return clock(bench, step, repeats, first_counts=True)
    if step.memory:
        # replay.py records the third step, and may capture the fourth as a CUDA graph
        warm_up_steps = 4
    elif repeats > 5:
        warm_up_steps = 3
    elif repeats > 3:
        warm_up_steps = 1
    else:
        warm_up_steps = 0  # steps are long, so the one that `clock` does not count is enough
    for _ in range(warm_up_steps):
        step()
    if warm_up_steps:
        release(bench)
    return clock(bench, step, repeats)


def warm_up_shallow(bench: Bench, run: Run) -> str:
    """Run one step of a model with few layers, which compiles and loads the kernels of a long step
    in a part of its time. Return in words what it did. A collective.

    The timed step still grows the allocator's memory and maps memory for all-to-alls."""
    shallow = shallow_run(run)
    print0("warm-up by a model with few layers:")
    with make_step(shallow) as step:
        step()
    del step
    release(bench)
    return f"a step with {shallow.plan.model.layers} layers"


def await_ranks(bench: Bench, result: dict) -> None:
    """If this rank's row failed, wait until all ranks are at the end of the row.

    If a rank runs out of memory and others do not, these wait for it inside the row's step, in a
    collective that it never joins. So a rank whose row failed waits only FAILED_ROW_WAIT_S. Then it
    ends with its error, and torchrun ends the other ranks. Each rank calls this function once per
    row. result: what this rank's line will say.
    """
    if bench.world == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    keys = [f"end of row {len(bench.rows)} on rank {rank}" for rank in range(bench.world)]
    store.set(keys[bench.rank], "")
    if "error" not in result:
        return
    try:
        store.wait(keys, timedelta(seconds=FAILED_ROW_WAIT_S))
    except dist.DistStoreError:
        signal.alarm(10)  # if freeing the row's step waits for other ranks, this ends the process
        sys.exit(
            f"rank {bench.rank}: {result['label']}: {result['error']}\n"
            "Other ranks did not fail, and wait for this one. So the table ends here. Rows so far "
            "are written"
        )


def measure_row(bench: Bench, row: Row, look: Callable) -> dict:
    """Build a row's step, time it, and return what its line of the results file says.

    A row may not fit, run out of memory, lack a package, or have flags that are refused. That is a
    result, too: "oom" is true, there are no rates, and "error" says why, if this rank failed. If
    only some ranks run out of memory inside a step, the table ends (await_ranks).

    look: a function whose look(bench, step) returns what else to report. A collective.
    """
    cfg = config(row.flags)
    result = {
        "label": row.label,
        "flags": row.flags,
        "model": cfg.model,
        "seq": cfg.seq,
        "gpus": bench.world if bench.gpu else 0,
    }
    timed = [math.inf]  # seconds of each timed step. Stays infinite if the row fails
    knows_peak = False  # whether Linux counts the peak of host memory for this row only
    with contextlib.ExitStack() as cleanup:
        try:
            run = plan_row(bench, row)
            result |= plan_fields(run)
            if row.peer:  # the prediction is for our step
                result |= {"predicted_s": None, "predicted_gib": None}
            kernels = kernel_seconds(bench, run)
            release(bench)
            cleanup.enter_context(gpu_memory_limit(run))
            knows_peak = reset_host_peak()
            if not row.peer:  # a peer has no plan for the host's memory
                cleanup.enter_context(train.host_memory_watch(run.plan))
            # A peer is always warmed up by whole steps, so that no kernel is new in a timed step
            is_long = run.plan.step_s > SHALLOW_WARM_UP_SECONDS
            warm = is_long and not row.peer and run.cfg.memplan == "off"
            if warm:
                result["warm_up"] = warm_up_shallow(bench, run)
            if bench.gpu and not row.peer and run.plan.host_bytes:
                # machines with the same GPUs may copy to the host at different rates
                result["host_copy_gb_s"] = host_copy_rate(bench.device) / 1e9
            step = cleanup.enter_context(build_step(row, run))
            if not row.peer and run.plan.step_s > 30:
                print0(f"{row.label}: a step should take {run.plan.step_s:.0f} s")
            timed = time_step(bench, step, warm)
            result |= look(bench, step)
        except (torch.OutOfMemoryError, ConfigError, ImportError) as e:
            timed = [math.inf]  # again, because `look` may have failed after the step was timed
            result["error"] = str(e)[:600]
            print0(f"{row.label}: {result['error']}")

        await_ranks(bench, result)
        # the slowest rank counts. So the seconds are infinite on all ranks if the row failed on one
        timed = max(gather_objects(timed), key=statistics.median)
        seconds = statistics.median(timed)
        if math.isfinite(seconds):
            result |= run.plan.rates(seconds, run.hardware.profile.peak_flops)
            result |= {"step_s": seconds, "bound_ratio": kernels / seconds}
            result |= {"timed_steps": len(timed), "timed_s": timed}
        result["oom"] = math.isinf(seconds)
        if bench.gpu:
            result["gpu_gib"] = max(gather_objects(train.gpu_peak_gib()))
            result["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            # how often the allocator found no room for a tensor, and gave its unused memory back
            # to the GPU, which waits for all kernels. It counts from the last release(): after the
            # warm-up steps of time_step or, if there are none, before the step was built
            result["cache_flushes"] = torch.cuda.memory_stats()["num_alloc_retries"]
        # host_rank_gib: the measured peak of the rank that took most. (host_gib is what is planned
        # for a whole node, without what Python, PyTorch and CUDA take for themselves)
        peaks = gather_objects(train.host_peak_gib() if knows_peak else None)
        result["host_rank_gib"] = None if None in peaks else max(peaks)
    return result


def attempt(bench: Bench, row: Row, look: Callable) -> None:
    """Measure a row, add its result, and free the row's memory. A collective."""
    with allocator_settings(row):
        bench.add(measure_row(bench, row, look))
        release(bench)  # frees the row's step, to which nothing refers any more


def release(bench: Bench) -> None:
    """Free the memory that nothing uses any more, and reset the statistics of peak memory. Modules
    and their states refer to each other, so only the garbage collector frees them."""
    gc.collect()
    if bench.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def reset_host_peak() -> bool:
    """Let this process's peak of host memory begin anew, and return whether Linux allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # in some containers
        return False
    return True


@contextlib.contextmanager
def allocator_settings(row: Row) -> Iterator[None]:
    """Turn PyTorch's expandable segments off if a row says so. At the end, restore the setting of
    the environment. If the environment has none, restore that of train.py."""
    if row.expandable_segments:
        yield
        return
    environment = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    set_allocator = torch._C._accelerator_setAllocatorSettings
    set_allocator("expandable_segments:False")
    try:
        yield
    finally:
        set_allocator(environment or "expandable_segments:True")


@contextlib.contextmanager
def gpu_memory_limit(run: Run) -> Iterator[None]:
    """Hold PyTorch's allocator to --gpu-memory, if it is given."""
    if run.device.type == "cpu":
        yield
        return
    fraction = torch.cuda.get_per_process_memory_fraction()
    train.cap_gpu(run)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)


def plan_fields(run: Run) -> dict:
    """Return what a row of the results file says of the run's plan."""
    plan = run.plan
    activations = plan.activations
    names = (
        "sp ring chunk tp tp_mode pp pp_chunks batch micro_batch micro_batches os_layout "
        "os_place resident_states recompute head_groups optimizer grad_sums products keeps_casts"
    ).split()
    return {
        **asdict(plan.factors),
        **{name: getattr(plan, name) for name in names},
        "kernel": run.kernel,
        "predicted": plan.seconds,
        "predicted_s": plan.step_s,
        "predicted_gib": plan.gpu_bytes / GIB,
        "activations": activations and asdict(activations),
        "alpha": activations and activations.alpha,
        "planned_gib": {name: value / GIB for name, value in plan.memory.items()},
        # per node. None instead of 0, because as_text hides a column that has only None
        "host_gib": plan.per_node / GIB * plan.host_bytes or None,
    }


# ---------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """Rows that are measured one after the other, once per variant."""

    does: str  # what the table measures, as a sentence that is printed before its first row
    # the rows, or a function of (bench, the flags that the rows share) that returns them
    rows: list[Row] | Callable[[Bench, str], list[Row]]
    flags: str = ""  # shared by all rows
    # All rows are measured with each of these texts of flags in turn. If the command has --seq
    # 64K,128K, each text is used with both lengths, and a --seq in the text is dropped.
    # See variants_of
    variants: tuple[str, ...] | list[str] = ("",)
    takes: str = ""  # flags that this table accepts, besides --host-memory and --gpu-memory
    look: Callable = lambda *_: {}  # look(bench, step) returns what else a row reports
    min_ranks: int = 1


def machine_rows(bench: Bench, flags: str) -> list[Row]:
    """Return the rows of table machine, which take less than five minutes together."""
    return rows_of_largest_model(bench, flags, max_seconds=30)


def step_rows(bench: Bench, flags: str) -> list[Row]:
    """Return the rows of table step: those of table machine, with a longer time limit for the long
    sequence, and two rows of FSDP2. On a CPU or with --quick: only those of table machine."""
    short, *longest = rows_of_largest_model(bench, flags, max_seconds=45)
    if bench.quick or not bench.gpu:
        return [short, *longest]
    # FSDP2 is planned for unlimited memory, so that all sequences would run at once. It gets the
    # micro-batches with which our layers run whole
    whole = plan_runs(bench, config(f"{flags} {short.flags} --recompute none"))[0].plan
    peers = [
        Row(
            f"fsdp2 {recomputed}",
            f"{short.flags} --strategy zero3 --micro-batch {whole.micro_batch}",
        )
        for recomputed in ("none", "full")
    ]
    return [short, *peers, *longest]


def rows_of_largest_model(bench: Bench, flags: str, max_seconds: float) -> list[Row]:
    """Return two rows of the largest model that the GPUs hold. The first has many short sequences
    per step. The second has one sequence of the longest length whose step fits the memory, and is
    predicted to take at most max_seconds (QUICK_SECONDS with --quick or on a CPU). The lengths that
    are tried give each rank 2, 4, 8 ... times the tokens of a short sequence. If already the
    shortest of them is too long, there is no second row.

    The GPUs hold a model if its model states and the activations of a micro-batch of short
    sequences fit without recomputation and swapping. A step of more than 20 seconds runs twice
    (time_step). So with max_seconds=45 the second row takes about two minutes.

    Example: one H100 holds 1b. Its first row has 16 sequences of 4K tokens per step.
    """
    quick = bench.quick or not bench.gpu
    max_params = math.inf
    if quick:
        max_params = 2e9 if bench.gpu else 1e7
        max_seconds = QUICK_SECONDS

    def best_plan(row_flags: str) -> costs.Plan | None:
        """Return the plan of these flags, None if they do not fit."""
        with contextlib.suppress(ConfigError):
            return plan_runs(bench, config(f"{flags} {row_flags}"))[0].plan

    short_seq = SHORT_SEQ[bench.device.type]
    batch = bench.world * SHORT_SEQS_PER_RANK[bench.device.type]
    too_large = []
    for name, model in sorted(MODELS.items(), key=lambda item: -param_count(item[1])):
        if param_count(model) >= max_params:
            continue
        short = f"--model {name} --seq {short_seq} --batch {batch} --os-place gpu"
        if best_plan(f"{short} --recompute none"):
            break
        too_large.append(name)
    else:
        raise ConfigError(f"none of the models {', '.join(too_large)} fits this machine's memory")
    if too_large:
        print0(
            f"{', '.join(too_large)} would not fit without recomputing or swapping activations; "
            f"{name} is the largest model that does"
        )

    rows = [Row("ours, short sequences", short)]
    longest = None
    for i in range(1, 12):
        seq = 2**i * bench.world * short_seq
        row_flags = f"--model {name} --seq {seq} --batch 1 --os-place gpu"
        plan = best_plan(row_flags)
        if plan is None or plan.step_s > max_seconds:
            break
        longest = Row("ours, longest in the time", row_flags)
    return rows + [longest] if longest else rows


def plan_of_step(bench: Bench, step: Step) -> dict:
    """Return the plan of a step in words, and the train.py command that trains with this plan."""
    cfg, plan = step.run.cfg, step.run.plan
    launcher = "python"
    if plan.ranks > 1:
        launcher = f"torchrun --nproc_per_node {plan.per_node}"
    flags = f"--model {cfg.model} --seq {plan.seq} --batch {plan.batch}"
    if cfg.os_place:
        flags += f" --os-place {cfg.os_place}"
    if cfg.resident_states is not None:
        flags += f" --resident-states {cfg.resident_states}"
    if cfg.host_memory:
        flags += f" --host-memory {cfg.host_memory}"
    if cfg.gpu_memory:
        flags += f" --gpu-memory {cfg.gpu_memory}"
    return {
        "plan_in_words": train.plan_in_words(plan),
        "train_command": f"{launcher} train.py {flags}",
    }


def plan_rows(bench: Bench, flags: str) -> list[Row]:
    """Return one row for each of the planner's best plans. Its flags are those of the train.py
    command that trains with this plan."""
    # planner.command leaves these defaults out, but `flags` may say --tp auto --pp auto
    defaults = "--tp 1 --pp 1 "
    rows = []
    for i, run in enumerate(plan_runs(bench, config(flags)), 1):
        own_flags = planner.command(run.plan, run.cfg).partition("train.py ")[2]
        rows.append(Row(f"plan {i}", defaults + own_flags))
    return rows


def covered_ms(spans: list[tuple]) -> float:
    """Return the milliseconds that spans (begin, end, ...) in microseconds cover together."""
    total = 0.0
    covered = -math.inf
    for begin, end, *_ in sorted(spans):
        total += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return total / 1e3


# A part of the name of a kernel or copy -> its kind. A name without any of these parts is a
# computation kernel. by_kind takes the stream that computation kernels keep busy for longest as the
# compute stream. It files such kernels of all remaining streams under "other streams"
KINDS = {
    "nccl": "communication",
    "Memcpy PtoP": "exchange",  # attention's all-to-alls, by copy engines (attention.Exchange)
    "barrier": "barrier",  # a kernel that waits for the other ranks, before and after an exchange
    "Memcpy DtoH": "to the host",
    "Memcpy HtoD": "from the host",
    "Memset": "memset",
}


def kind_of(name: str) -> str:
    """Return the kind of a kernel or copy, given the name that PyTorch's profiler has for it."""
    kinds = (kind for part, kind in KINDS.items() if part.lower() in name.lower())
    return next(kinds, "computation")


def by_kind(events: Iterable) -> dict[str, list]:
    """Return, for each kind, the sorted (begin, end, name) of its events on this GPU."""
    spans = {kind: [] for kind in ("computation", *KINDS.values(), "other streams")}
    kernels = collections.defaultdict(list)  # stream -> spans of its computation kernels
    for e in events:
        if e.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = e.time_range.start, e.time_range.end, e.name
        kind = kind_of(e.name)
        if kind == "computation":
            kernels[e.device_resource_id].append(span)
        else:
            spans[kind].append(span)
    longest_first = sorted(kernels.values(), key=covered_ms, reverse=True)
    for i, of_stream in enumerate(longest_first):
        spans["computation" if i == 0 else "other streams"] += of_stream
    return {kind: sorted(of_kind) for kind, of_kind in spans.items()}


def profile_steps(step: Callable, steps: int) -> tuple[torch.profiler.profile, dict[str, list]]:
    """Profile `steps` steps. Return the profile and, by kind, the (begin, end, name) of everything
    that ran on this GPU, in microseconds, sorted by begin."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return profile, by_kind(profile.events())


def profiled(bench: Bench, step: Step) -> dict:
    """Profile two steps, and return the milliseconds per step in which communication (NCCL) ran,
    and in which it was exposed: nothing else except memsets ran at the same time. A row that shards
    parameters also writes its profile as trace.json.gz, for chrome://tracing."""
    # two steps, because the second step's forward hides the broadcast of the parameters that the
    # first step updated
    profile, spans = profile_steps(step, 2)
    if step.run.plan.factors.p > 1 and bench.rank == 0:
        profile.export_chrome_trace(str(bench.file.with_name("trace.json.gz")))
    communication = spans.pop("communication")
    del spans["memset"]  # memsets do not count as work that hides communication
    others = [span for kind in spans.values() for span in kind]
    exposed = covered_ms(communication + others) - covered_ms(others)
    return {"communication_ms": covered_ms(communication) / 2, "exposed_ms": exposed / 2}


def waits_of(spans: dict[str, list]) -> dict:
    """Return the milliseconds in which the compute stream was idle between its first and its last
    kernel, and those in which each kind of communication or copy ran. "waits" lists the five pairs
    of neighbouring kernels with the longest idle time between them, summed over a pair's gaps."""
    computation = spans["computation"]
    waits = collections.Counter()
    _, busy_until, last_kernel = computation[0]
    for begin, end, name in computation:
        if begin > busy_until:
            waits[last_kernel, name] += (begin - busy_until) / 1e3
        if end > busy_until:
            busy_until, last_kernel = end, name
    return {
        "idle_ms": sum(waits.values()),
        "communication_ms": covered_ms(spans["communication"]),
        "exchange_ms": covered_ms(spans["exchange"]),
        "barrier_ms": covered_ms(spans["barrier"]),
        "to_host_ms": covered_ms(spans["to the host"]),
        "from_host_ms": covered_ms(spans["from the host"]),
        "waits": [[ms, *names] for names, ms in waits.most_common(5)],
    }


def profiled_waits(bench: Bench, step: Step) -> dict:
    """Profile a step, and return what waits_of finds in it."""
    _, spans = profile_steps(step, 1)
    return waits_of(spans)


def planned_memory(bench: Bench, step: Step) -> dict:
    """Return what a row reports of a step with planned memory; {} for any other step."""
    memory = step.memory
    counts = memory and memory.counts
    if not counts:
        return {}
    plan = memory.plan
    requests = counts["hits"] + counts["unmatched"] + counts["occupied"]
    return {
        "requests": len(memory.buffers),
        "planned_peak_gib": plan.peak / GIB,
        "lower_bound_gib": plan.lower_bound / GIB,
        "solve_s": plan.seconds,
        "method": plan.method,
        "hit_requests": counts["hits"] / requests,
    }


def written_plan(bench: Bench, step: Step) -> dict:
    """Return what planned_memory returns, and write the sizes, lifetimes and addresses of the
    step's tensors as a CSV file."""
    fields = planned_memory(bench, step)
    if fields and bench.rank == 0:
        buffers, offsets = step.memory.buffers, step.memory.plan.offsets
        name = f"memplan-{step.run.plan.seq // 1024}k.csv"
        write_plan(str(bench.file.with_name(name)), range(len(buffers)), buffers, offsets)
    return fields


def long_rows(ranks: int) -> list[Row]:
    """Return the rows of table long: our step, and each peer with several settings."""
    # fmt: off
    rows = [
        Row("ours"),
        Row("ours planned memory",          "--memplan on"),
        Row("ours planned memory and bf16 moments", "--memplan on --moments bf16"),
        Row("ours full recompute",          "--recompute full"),
        Row("ours full swap",               "--alpha 1 --resident-layers 2"),
        Row("ours streams all states",      "--os-place host --resident-states 0"),
        Row("ours bf16 moments",            "--moments bf16"),
        Row("ours bf16 states",             "--moments bf16 --grad-sums dtype"),
        Row("ours streams all bf16 states", "--moments bf16 --grad-sums dtype "
                                            "--os-place host --resident-states 0"),
        Row("ours fp8",                     "--products fp8"),
        Row("ours fp8 and bf16 moments",    "--products fp8 --moments bf16"),
        Row("ours fp8 and bf16 states",     "--products fp8 --moments bf16 --grad-sums dtype"),
    ]
    # fmt: on
    sharded_peers = [
        "fsdp2 none",
        "fsdp2 half-selective",
        "fsdp2 three-quarters-selective",
        "fsdp2 selective",
        "fsdp2 selective host",
        "fsdp2 full",
        "fsdp2 full host",
        "deepspeed none",
        "deepspeed half-selective",
        "deepspeed selective",
        "deepspeed full",
    ]
    rows += [Row(label, f"--sp {ranks} --strategy zero3") for label in sharded_peers]
    # ZeRO-2 gathers parameters once per step instead of twice, and takes more memory
    whole = ["fsdp2 none ZeRO-2", "fsdp2 half-selective ZeRO-2", "fsdp2 selective ZeRO-2"]
    rows += [Row(label, f"--sp {ranks} --strategy zero2") for label in whole]
    other_peers = [
        "transformers fp32",
        "transformers bf16",
        "transformers fp32 liger",
        "transformers bf16 full",
        "transformers bf16 liger",
        "transformers bf16 liger full",
        "transformers bf16 by-layer",
        "transformers bf16 by-layer half",
        "transformers bf16 by-layer three-quarters",
        "transformers bf16 by-layer full",
        "transformers bf16 by-layer liger-loss full",
    ]
    rows += [Row(label) for label in other_peers]
    in_float8 = [
        "transformers bf16 fp8",
        "transformers bf16 fp8 full",
        "transformers bf16 fp8 by-layer",
        "transformers bf16 fp8 by-layer half",
        "transformers bf16 fp8 by-layer three-quarters",
        "transformers bf16 fp8 by-layer full",
        "transformers bf16 fp8 by-layer liger-loss",
        "transformers bf16 fp8 by-layer liger-loss half",
        "transformers bf16 fp8 by-layer liger-loss full",
    ]
    rows += [Row(label, "--products fp8") for label in in_float8]
    return rows


def make_tables(ranks: int, nodes: int, short_seq: int) -> dict[str, Table]:
    """Return every table for this number of ranks and nodes, by its name. short_seq: the tokens of
    a short sequence.

    Example: on 4 ranks, the row "ours in halves" of table shard is --p 2 --g 2 --os 2, and the
    table's second variant is --batch 32.
    """
    # lengths that need all ranks: 2, 4, 8 and 16 short sequences per rank
    seqs = [f"--seq {n * ranks * short_seq}" for n in (2, 4, 8, 16)]
    # every rank runs whole layers on whole short sequences of its own
    data_parallel = f"--sp 1 --micro-batch 1 --recompute none --seq {short_seq}"
    batches = [f"--batch {n * ranks}" for n in (1, 2, 4, 8)]  # 1, 2, 4, 8 micro-batches
    return {
        "machine": Table(
            "how fast this machine trains the largest model that it holds, with many sequences of "
            f"{short_seq:,} tokens per step, and with one long sequence per step",
            machine_rows,
            takes="quick",
            look=plan_of_step,
        ),
        "step": Table(
            "the largest model that this machine holds, with many sequences of "
            f"{short_seq:,} tokens per step (on GPUs without --quick also under FSDP2), and with "
            "one sequence of the longest length whose row takes at most two minutes",
            step_rows,
            takes="quick",
        ),
        "long": Table(
            "our step beside FSDP2, DeepSpeed and transformers, on one sequence per step",
            long_rows(ranks),
            flags="--batch 1",
            variants=seqs,
            takes="rows model seq batch micro_batch",
        ),
        **parallelism_tables(ranks, nodes, seqs, data_parallel, batches),
        **planning_tables(ranks, seqs),
        **profile_tables(seqs, f"{data_parallel} {batches[0]}"),
    }


def parallelism_tables(
    ranks: int, nodes: int, seqs: list[str], data_parallel: str, batches: list[str]
) -> dict[str, Table]:
    """Return the tables of how ranks share states, sequences, matrices and layers. The arguments
    are arguments and variables of make_tables."""
    half = max(1, ranks // 2)
    # fmt: off
    return {
        "shard": Table(
            "sharding factors beside those of FSDP2, without recomputation",
            [
                Row("ours os",                      "--strategy zero1"),
                Row("ours os inter",                "--strategy zero1 --os-layout inter"),
                Row("ours g and os",                "--strategy zero2"),
                Row("ours p and g by halves",       f"--p {half} --g {half} --os {ranks}"),
                Row("ours all",                     "--strategy zero3"),
                Row("ours in halves",               f"--p {half} --g {half} --os {half}"),
                Row("ours as planned",
                    "--micro-batch auto --sp auto --recompute auto"),
                Row("fsdp2 none ZeRO-3",            "--strategy zero3"),
                Row("fsdp2 none ZeRO-2",            "--strategy zero2"),
                Row("fsdp2 none HSDP and reshard",  f"--p {half} --g {half} --os {half}"),
                Row("fsdp2 none HSDP",              f"--p 1 --g {half} --os {half}"),
            ],
            flags=data_parallel,
            variants=[batches[0], batches[3]],
            takes="rows model seq nodes",
            min_ranks=2,
        ),
        "overlap": Table(
            "the same steps with less and less communication overlapped (AMSP, table V)",
            [
                Row("all overlaps"),
                Row("without param_broadcast",
                    "--overlap param_gather,grad_scatter,grad_reduce"),
                Row("and without grad_reduce",      "--overlap param_gather,grad_scatter"),
                Row("none",                         "--overlap none"),
            ],
            flags=data_parallel,
            variants=[
                f"--strategy {zero} {batch}" for zero in ("zero1", "zero3") for batch in batches
            ],
            takes="rows model",
            min_ranks=2,
        ),
        "ring": Table(
            "sequences shared by heads (all-to-all) and by context (ring attention)",
            [
                Row("by heads",                     "--ring 1"),
                Row("by context",                   f"--ring {max(2, nodes)}"),
            ],
            flags=f"--sp {ranks} --batch 1",
            variants=seqs[1:],
            takes="rows model seq nodes",
            min_ranks=2,
        ),
        "parallel": Table(
            "tensor parallelism and pipelines beside data parallelism",
            [
                Row("data"),
                Row("mtp",                          "--tp 2 --tp-mode mtp"),
                Row("msp",                          "--tp 2 --tp-mode msp"),
                Row("fsp",                          "--tp 2 --tp-mode fsp"),
                Row("plain pipeline",               "--pp 2 --pp-chunks 1"),
                Row("pipeline",                     "--pp 2"),
                Row("interleaved",                  "--pp 2 --pp-chunks 2"),
            ],
            flags=f"{data_parallel} {batches[3]}",
            takes="rows model seq",
            min_ranks=2,
        ),
    }
    # fmt: on


def planning_tables(ranks: int, seqs: list[str]) -> dict[str, Table]:
    """Return the tables of what is planned: addresses, the place of optimizer states, whole plans.
    seqs: as in make_tables."""
    # fmt: off
    return {
        "memplan": Table(
            "PyTorch's allocators beside planned addresses",
            [
                Row("caching allocator",            expandable_segments=False),
                Row("expandable segments"),
                Row("planned",                      "--memplan on"),
            ],
            flags=f"--sp {ranks} --batch 1",
            variants=seqs[1:],
            takes="rows model seq",
            look=written_plan,
        ),
        # In row Memo, two layers stay on the GPU, as in the paper, whose two rounding buffers hold
        # two layers. The planner chooses alpha, the fraction of activations to swap. Only the first
        # row runs without expandable segments
        "memo": Table(
            "recomputing, swapping, and planned addresses (Memo, table 4)",
            [
                Row("full recompute",               "--recompute full", expandable_segments=False),
                Row("full recompute with planned memory", "--recompute full --memplan on"),
                Row("full swap with planned memory",
                    "--alpha 1 --resident-layers 2 --memplan on"),
                Row("Memo with planned memory",     "--resident-layers 2 --memplan on"),
                Row("ours"),
            ],
            flags="--batch 1",
            variants=seqs[1:],
            takes="rows model seq",
            look=planned_memory,
        ),
        "offload": Table(
            "optimizer states on the GPU and on the host",
            [
                Row("as planned"),
                Row("states on the GPU",            "--os-place gpu"),
                Row("states on the host",           "--os-place host"),
                Row("states on the host in the open",
                    "--os-place host "
                    "--overlap param_gather,grad_scatter,grad_reduce,param_broadcast"),
            ],
            flags="--batch 1",
            variants=seqs,
            takes="rows model seq batch",
        ),
        "plans": Table(
            "the planner's best plans, with the seconds per step that it predicts for each",
            plan_rows,
            variants=seqs[:1],
            takes="model seq batch tp pp",
            min_ranks=2,
        ),
    }
    # fmt: on


def profile_tables(seqs: list[str], data_parallel_step: str) -> dict[str, Table]:
    """Return the tables of what PyTorch's profiler finds. seqs: as in make_tables.
    data_parallel_step: the flags of a step in which each rank has one short sequence."""
    # fmt: off
    return {
        "trace": Table(
            "how many milliseconds of communication are exposed, according to PyTorch's profiler",
            [
                Row("ours os",                      "--strategy zero1"),
                Row("ours g and os",                "--strategy zero2"),
                Row("ours all",                     "--strategy zero3"),
            ],
            flags=data_parallel_step,
            takes="rows model seq",
            look=profiled,
            min_ranks=2,
        ),
        "idle": Table(
            "for how long our step does not compute, and what it waits for, according to PyTorch's "
            "profiler",
            [
                Row("ours"),
                # --rows separates labels by commas, so a label must not have one
                Row("ours swaps only x and o",      "--alpha 0"),
                Row("ours bf16 states",             "--moments bf16 --grad-sums dtype"),
            ],
            flags="--batch 1",
            variants=seqs,
            takes="rows model seq batch",
            look=profiled_waits,
        ),
    }
    # fmt: on


def tables_here() -> dict[str, Table]:
    """Return the tables for the ranks and nodes that torchrun (or --nodes) says there are."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return make_tables(ranks, ranks // ranks_per_node, SHORT_SEQ[device_here()])


def device_here() -> str:
    """Return the type of the devices that rows are measured on: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------- print and write

# fmt: off
COLUMNS = {
    # title              key in shown_values        format of the value
    "label":            ("label",                   ""),
    "plan":             ("plan",                    ""),
    "model":            ("model",                   ""),
    "tokens":           ("seq",                     ","),
    "GPUs":             ("gpus",                    ""),
    "M":                ("micro_batches",           ""),
    "step s":           ("took",                    ""),
    "predicted s":      ("predicted_s",             ".4g"),
    "TGS":              ("tgs",                     ",.0f"),
    "MFU causal":       ("mfu_causal",              ".1%"),
    "MFU full":         ("mfu_full",                ".1%"),
    "kernel bound":     ("bound_mfu",               ".1%"),
    "of kernel bound":  ("bound_ratio",             ".1%"),
    "GPU GiB":          ("gpu_gib",                 ".1f"),
    "host GiB":         ("host_gib",                ".1f"),
    "communication ms": ("communication_ms",        ".1f"),
    "of it exposed":    ("exposed_ms",              ".1f"),
    "idle ms":          ("idle_ms",                 ".1f"),
    "exchange ms":      ("exchange_ms",             ".1f"),
    "barrier ms":       ("barrier_ms",              ".1f"),
    "to host ms":       ("to_host_ms",              ".1f"),
    "from host ms":     ("from_host_ms",            ".1f"),
    "to host GB/s":     ("host_copy_gb_s",          ".1f"),
    "requests":         ("requests",                ","),
    "reserved GiB":     ("reserved_gib",            ".2f"),
    "cache flushes":    ("cache_flushes",           ","),
    "planned GiB":      ("planned_peak_gib",        ".2f"),
    "lower bound":      ("lower_bound_gib",         ".2f"),
    "solved in s":      ("solve_s",                 ".2f"),
    "hits":             ("hit_requests",            ".2%"),
}
# fmt: on
UNKNOWN = "-"


def plan_text(row: dict) -> str:
    """Return the plan of a row of ours: the sharding factors p,g,os, each other degree above 1, and
    how activations are treated. The docstring of this file has an example."""
    if not row.get("sp") or row["label"].startswith(tuple(PEERS)):
        return UNKNOWN
    text = f"{row['p']},{row['g']},{row['os']}"
    for name in ("sp", "ring", "tp", "pp"):
        if row.get(name, 1) > 1:
            text += f" {name}={row[name]}"
    if activations := row.get("activations"):
        text += f" k={activations['resident']} alpha={row['alpha']:.2f} chunk={row['chunk']}"
        if twice := activations["layers_recomputing_attention"]:
            text += f", attention twice in {twice}"
    if row.get("os_place") == "host":
        text += ", os on the host"
        if layers := row.get("resident_states"):
            text += f" but for {layers} layers"
    return text


def took_text(row: dict) -> str:
    """Return the seconds of a row's step, or the reason why it has none."""
    if row.get("oom"):
        error = row.get("error", "out of memory")  # this rank did not fail, but another one did
        if "No module" in error:
            return "not installed"
        if "out of memory" in error:
            return "out of memory"
        return "does not fit" if "a step needs" in error else "refused"
    return f"{row['step_s']:.4g}" if row.get("step_s") else UNKNOWN


def shown_values(row: dict) -> dict:
    """Return the values of a row by the names that COLUMNS uses."""
    values = row | {"plan": plan_text(row), "took": took_text(row)}
    mfu, bound_ratio = row.get("mfu_causal"), row.get("bound_ratio")
    if mfu is not None and bound_ratio is not None:
        values["bound_mfu"] = mfu / bound_ratio
    return values


def as_text(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the columns in which any row has a value, and the cells of each row."""
    lines = []
    for row in rows:
        values = shown_values(row)
        cells = []
        for name, form in COLUMNS.values():
            value = values.get(name)
            cells.append(UNKNOWN if value is None else format(value, form))
        lines.append(cells)

    titles = list(COLUMNS)
    shown = [i for i in range(len(titles)) if {cells[i] for cells in lines} != {UNKNOWN}]
    return [titles[i] for i in shown], [[cells[i] for i in shown] for cells in lines]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that decide the speed."""
    names = (
        "torch flash-attn-4 triton nvidia-cudnn-cu13 nvidia-nccl-cu13 transformers liger-kernel "
        "torchao deepspeed"
    ).split()
    return {"python": platform.python_version()} | {
        package.name: package.version
        for package in metadata.distributions()
        if package.name in names
    }


def commit() -> str:
    """Return the commit that is measured, with a + if files differ from it. On a machine to which
    the files were copied without their history, the environment variable BENCH_COMMIT names it."""
    git = subprocess.run(
        "git describe --always --exclude '*' --dirty=+",
        shell=True,
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    return os.environ.get("BENCH_COMMIT") or git.stdout.strip() or "unknown"


# ---------------------------------------------------------------------------- the program

BENCH_FLAGS = {  # flag that bench.py itself handles -> its help
    "quick": "measure a small model, which takes a minute",
    "rows": "measure only the rows with these labels, for example 'ours,fsdp2 full'",
    "seq": "tokens per sequence, one or several, for example 64K,128K",
    "micro_batch": "sequences that every peer's row runs at once, for example 1; ours are planned",
    "nodes": "split this node's ranks into so many nodes, which reach each other only by sockets",
}
TRAIN_FLAGS = {  # flag of train.py, which is added to every row's flags -> its help
    "model": "the model; default: 7b on GPUs, tiny on a CPU",
    "batch": "sequences per step",
    "tp": "auto: also measure plans with tensor parallelism",
    "pp": "auto: also measure plans with a pipeline",
    "host_memory": "bytes of host memory per node that a step may use, for example 160G (pinning "
    "more takes longer)",
    "gpu_memory": "bytes of memory that a step may use per GPU, for example 80G to imitate a "
    "smaller GPU",
}


def parse() -> argparse.Namespace:
    """Parse the command line. The result has two more fields. `given` has the BENCH_FLAGS and
    TRAIN_FLAGS of the command, as {"seq": "--seq 64K", "batch": "--batch 4"}. `flags` is the text
    of the TRAIN_FLAGS among them, "--batch 4"."""
    tables = tables_here()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        allow_abbrev=False,
        epilog="Sizes may end in K, M or G, which are binary: 64K is 65536.",
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("table", nargs="?", default="machine", choices=tables, help="default: machine")
    one.add_argument(
        "--profile",
        type=str.lower,
        metavar="NAME",
        help="measure the rates that planner.py predicts by, on all ranks, in two "
        "minutes, and write profiles/NAME.json in --out; no table",
    )
    parser.add_argument(
        "--out",
        type=planner.home_path,
        metavar="DIR",
        help="folder of the results files; default: results"
        " on GPUs, out/results on a CPU, whose figures README does not show",
    )
    for name, text in (BENCH_FLAGS | TRAIN_FLAGS).items():
        takers = [table for table in tables if name in tables[table].takes.split()] or ["all"]
        kind = {"action": "store_true"} if name == "quick" else {}
        parser.add_argument(planner.flag_name(name), help=f"{text} ({', '.join(takers)})", **kind)
    args = parser.parse_args()
    args.given = {}
    for name in BENCH_FLAGS | TRAIN_FLAGS:
        value = getattr(args, name)
        if value is True:  # --quick, which takes no value
            args.given[name] = planner.flag_name(name)
        elif value:
            args.given[name] = f"{planner.flag_name(name)} {quote(str(value))}"
    args.flags = " ".join(text for name, text in args.given.items() if name in TRAIN_FLAGS)
    try:
        check(args, tables[args.table])
    except ValueError as e:  # every rank finds the same error, so all of them end
        parser.error(str(e))
    return args


def check(args: argparse.Namespace, table: Table) -> None:
    """Raise ValueError for a flag that the table does not take, or whose value cannot be used."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    name = args.table
    takes = f"{table.takes} host_memory gpu_memory".split()
    for flag in args.given:
        if args.profile:
            raise ValueError(f"{planner.flag_name(flag)}: --profile takes no flag but --out")
        if flag not in takes:
            raise ValueError(
                f"{planner.flag_name(flag)}: table {name} takes only "
                f"{', '.join(map(planner.flag_name, takes))}"
            )
    if name in ("trace", "idle") and not torch.cuda.is_available():
        raise ValueError(f"table {name} measures GPUs, and there are none here")
    if world < table.min_ranks:
        raise ValueError(
            f"table {name} needs {table.min_ranks} ranks or more: torchrun "
            f"--nproc_per_node {table.min_ranks} bench.py {name}"
        )
    for label in listed(args.rows):
        labels = [row.label for row in table.rows]
        if label not in labels:
            raise ValueError(
                f"--rows {label}: there is no such row; the rows are {', '.join(labels)}"
            )
        if reason := why_unmeasured(Row(label), world):
            raise ValueError(f"--rows {label}: {reason}")
    if args.nodes and args.nodes not in map(str, planner.divisors(world)):
        raise ValueError(f"--nodes {args.nodes} must divide the {world} ranks")
    # config raises ValueError for a value that train.py refuses
    micro_batch_flag = f"--micro-batch {args.micro_batch}" if args.micro_batch else ""
    for seq in listed(args.seq) or ["4K"]:
        cfg = config(f"{table.flags} {args.flags} --seq {seq} {micro_batch_flag}")
    if cfg.batch and cfg.micro_batch and cfg.batch % cfg.micro_batch:
        fitting = max(n for n in planner.divisors(cfg.batch) if n <= cfg.micro_batch)
        raise ValueError(
            f"--micro-batch {cfg.micro_batch} does not divide the step's {cfg.batch} sequences; "
            f"{fitting} does"
        )


def why_unmeasured(row: Row, world: int) -> str | None:
    """Return why a row is not measured on `world` ranks of this machine, None if it is."""
    if row.peer != "transformers":
        return None
    if world > 1:
        return f"transformers' model runs on one rank, not {world}"
    if "fp8" in row.label.split() and not fp8.has_float8(torch.device(device_here())):
        return "torchao's float8 products need a GPU with float8 (Hopper or later)"
    return None


def listed(text: str | None) -> tuple[str, ...]:
    """Return the items of a list such as 'ours,fsdp2 full', none if the flag was not given."""
    return tuple(text.split(",")) if text else ()


def variants_of(table: Table, seqs: str | None) -> list[str]:
    """Return the variants of a table, at the lengths of --seq if it is given.

    Example: variants --batch 2 and --batch 16, at --seq 4K,8K, are four variants.
    """
    if not seqs:
        return [*table.variants]
    others = dict.fromkeys(re.sub(r"--seq \S+", "", variant).strip() for variant in table.variants)
    return [f"{other} --seq {seq}".strip() for seq in listed(seqs) for other in others]


def measure_table(bench: Bench, args: argparse.Namespace) -> None:
    """Measure a table: all of its rows or those of --rows, at its own lengths or those of --seq.
    Ctrl-C ends the process; the rows that were measured until then are written."""
    table = tables_here()[args.table]
    print0(f"Table {args.table}: {table.does}. {duration(args, bench)}")
    print0(all_or_none(kernel_note, bench))
    print0(f"Each row is written to {bench.file} when it is done. Ctrl-C keeps these rows.")
    model = "7b" if bench.gpu else "tiny"
    stopped = False
    try:
        for variant in variants_of(table, args.seq):
            shared = f"--model {model} {table.flags} {variant} {args.flags}"
            rows = table.rows(bench, shared) if callable(table.rows) else table.rows
            for row in rows:
                if args.rows and row.label not in listed(args.rows):
                    continue
                if why_unmeasured(row, bench.world):
                    continue
                flags = f"{shared} {row.flags}"
                if row.peer and args.micro_batch:
                    flags += f" --micro-batch {args.micro_batch}"
                attempt(bench, replace(row, flags=flags), table.look)
    except KeyboardInterrupt:
        stopped = True

    titles, lines = as_text(bench.rows)
    for label, *cells in (titles, *lines):
        print0(f"{label:<34}" + "".join(f"{cell:>16}" for cell in cells))
    print0(f"{'stopped; the rows so far are' if stopped else 'written'} in {bench.file}")
    if args.table == "plans":
        for line in orders_in_words(bench.rows):
            print0(line)
    if args.table == "machine":
        print0(MACHINE_LEGEND)
        for row in bench.rows:
            print0(in_sentences(row))
    else:
        print0(json.dumps({"file": str(bench.file), "rows": bench.rows}))
    if stopped:  # at once: in a collective, other ranks may wait for this one
        os._exit(130)


def orders_in_words(rows: list[dict]) -> list[str]:
    """Return a line for each length of a sequence: its tokens, and order_in_words of its rows."""
    lines = []
    for seq, of_length in itertools.groupby(rows, lambda row: row["seq"]):
        lines.append(f"{seq:,} tokens: {order_in_words(list(of_length))}")
    return lines


def order_in_words(rows: list[dict]) -> str:
    """Return a sentence on how well plans sorted by predicted seconds agree with plans sorted by
    measured seconds: the rank correlation (Spearman) of the two, the seconds of the plan that was
    predicted to be the fastest, and those of the fastest one."""
    rows = [row for row in rows if row.get("step_s") and row.get("predicted_s")]
    if len(rows) < 3:
        return f"{len(rows)} plans are too few to compare the orders of their seconds"
    predicted = [row["predicted_s"] for row in rows]
    measured = [row["step_s"] for row in rows]
    correlation = stats.spearmanr(predicted, measured).statistic
    chosen = measured[predicted.index(min(predicted))]  # seconds of the plan predicted fastest
    return (
        f"rank correlation of predicted and measured seconds over {len(rows)} plans: "
        f"{correlation:.2f} (1: the same order, 0: no relation). The plan that was predicted to be "
        f"the fastest took {chosen:.4g} s, and the fastest one {min(measured):.4g} s"
    )


def duration(args: argparse.Namespace, bench: Bench) -> str:
    """Return how long a table takes, as a sentence."""
    small = args.quick or not bench.gpu
    if args.table in ("machine", "step") and small:
        return "This takes about a minute."
    if args.table == "machine":
        return "This takes less than five minutes."
    if args.table == "step":
        return "This takes less than ten minutes."
    return (
        "A row takes about a minute with its warm-up, or several minutes if a step takes many "
        "seconds."
    )


def kernel_note(bench: Bench) -> str:
    """Return which attention kernel runs here, and what to install for a faster one, as a sentence.
    Raises ValueError if no kernel can run."""
    name = pick_kernel("auto", bench.device, bench.dtype)
    text = f"Attention runs with kernel {name}."
    if not bench.gpu:
        return text
    major, _ = torch.cuda.get_device_capability(bench.device)
    for faster in itertools.takewhile(lambda other: other != name, KERNELS):
        if major in KERNELS[faster].capability:
            reason = why_not(faster, bench.device, bench.dtype)
            text += f" Kernel {faster} would be faster on this GPU, but {reason}."
    return text


MACHINE_LEGEND = f"""
MFU is the share of the GPU's peak that the model's FLOPs reach. Causal MFU counts half of the
attention matrix, full MFU all of it. {UNKNOWN} means that the peak of this device is not known.
The percent of kernel bound compares the step's speed with that of its attention and matrix kernels
when nothing else runs. The rest is norms, updates, recomputation, and the copies and communication
that nothing hides."""


def in_sentences(row: dict) -> str:
    """Return a row of table machine as sentences, with its plan and the command that trains with
    this plan."""
    batch = config(row["flags"]).batch
    sequences = "one sequence" if batch == 1 else f"{batch} sequences"
    head = f"{row['model']}, {sequences} of {row['seq']:,} tokens per step"
    if row["oom"]:
        return f"\n{head}: {took_text(row)}. {row.get('error', '')}"

    def percent(value: float | None) -> str:
        return UNKNOWN if value is None else f"{value:.1%}"

    unit = "GPU" if row["gpus"] else "rank"
    return (
        f"\n{head}: {row['tgs']:,.0f} tokens per {unit} per second\n"
        f"  MFU: {percent(row['mfu_causal'])} causal, {percent(row['mfu_full'])} full\n"
        f"  percent of kernel bound: {percent(row['bound_ratio'])}\n"
        f"  plan: {row['plan_in_words']}\n"
        f"  train by it: {row['train_command']}"
    )


def write_profile(bench: Bench) -> None:
    """Measure the rates of this machine, and write them as a profile for planner.py.
    A collective."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", bench.world))
    kernels = [name for name in KERNELS if why_not(name, bench.device, bench.dtype) is None]
    profile = Machine(bench.device, bench.dtype, kernels, per_node).profile(
        bench.file.stem, bench.about
    )
    on_rank_0(bench.file.write_text, profile_text(profile))
    print0(f"wrote {bench.file}")


def split_nodes(args: argparse.Namespace) -> None:
    """Set environment variables so that NCCL and train.py treat this node's ranks as ranks of
    several nodes (--nodes)."""
    nodes = int(args.nodes)
    ranks = int(os.environ["WORLD_SIZE"]) // nodes
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["NCCL_HOSTID"] = f"node{int(os.environ['LOCAL_RANK']) // ranks}"
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # train.py plans for so many ranks per node
    if not args.host_memory:  # each of these nodes gets an equal share of this node's memory
        args.flags += f" --host-memory {int(host_budget(nodes, None))}"


def results_file(args: argparse.Namespace, gpu: bool, hardware: str) -> Path:
    """Return the file that a command writes on this hardware.

    Example: results/2026-11-4xh200/long.jsonl for `bench.py long --seq 64K` on 4 H200s.
    """
    folder = Path(args.out or HERE / ("results" if gpu else "out/results"))
    if args.profile:
        return folder / f"profiles/{args.profile}.json"
    # "4 x NVIDIA H200" -> "4xh200", "NVIDIA H100 80GB HBM3" -> "h100"
    machine = re.sub("NVIDIA | [0-9]+GB.*| ", "", hardware).lower()
    machine = "-".join(re.findall(r"[a-z0-9.]+", machine))
    return folder / f"{time.strftime('%Y-%m')}-{machine}" / f"{args.table}.jsonl"


def main() -> None:
    args = parse()
    if args.nodes:
        split_nodes(args)
    if args.table == "parallel":  # some of its rows are pipelines
        use_more_queues()
    rank, world, local_rank = start_ranks(TIMEOUT_S)
    device = all_or_none(train.choose_device, config(args.flags), local_rank)
    gpu = device.type == "cuda"

    hardware = device_name(device)
    launcher = "python"
    if world > 1:
        hardware = f"{world} x {hardware}"
        launcher = f"torchrun --nproc_per_node {world}"
    command = f"--profile {args.profile}"
    if not args.profile:
        command = " ".join([args.table, *args.given.values()])
    file = results_file(args, gpu, hardware)
    # if the folder cannot be written, the command fails here rather than after the first row
    on_rank_0(train.try_folder, file.parent, "the folder of results")

    about = {
        "hardware": hardware,
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "versions": versions(),
        "commit": commit(),
        "command": f"{launcher} bench.py {command}",
    }
    bench = Bench(device, rank, world, args.quick, file, about)
    with torch.compiler.set_stance("default" if gpu else "force_eager"):
        if args.profile:
            write_profile(bench)
        else:
            with heartbeat(rank, world, "Rows so far are written"):
                measure_table(bench, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, UnexpectedError) as e:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"bench.py: error: {e}", file=sys.stderr)
        sys.exit(2 if isinstance(e, ConfigError) else 1)
