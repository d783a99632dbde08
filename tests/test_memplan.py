"""Test planned memory: address plans, replay, and the bytes of a step, counted and simulated."""

import contextlib
import gc
import itertools
import random
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pytest import approx, raises
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import costs
import fp8
import memplan
import model as m
import offload
import ops
import optim
import replay
import shard
import streams
import train
from helpers import built, planned_run, swapping_plan
from test_all import (
    ALL_COMBINATIONS,
    BATCH,
    ROOT,
    SMALL,
    example,
    make_case,
    make_run,
    needs_gpu,
    on_ranks,
    parametrize,
    read_log,
    run,
    seeded_model,
    slow,
)


def random_buffers(n, seed):
    rng = random.Random(seed)
    return [
        memplan.Lifetime(start, start + rng.randint(1, 6), rng.randint(1, 50))
        for start in rng.choices(range(12), k=n)
    ]


def is_plan(buffers, offsets, peak: int) -> bool:
    """Return whether no two buffers overlap and none leaves [0, peak). It compares each pair."""
    placed = [*zip(buffers, offsets, strict=True)]
    apart = all(
        a.end <= b.start or b.end <= a.start or x + a.size <= y or y + b.size <= x
        for (a, x), (b, y) in itertools.combinations(placed, 2)
    )
    return apart and all(0 <= x <= peak - b.size for b, x in placed)


# Buffers that no plan places without a gap. At most 136 bytes are alive at once, but the lowest
# possible peak is 144, and memplan's first fits need more than 144.
HOLES = [
    memplan.Lifetime(*box)
    for box in zip(
        (3, 1, 2, 1, 0, 0, 2, 4), (6, 4, 4, 3, 2, 1, 3, 6), (61, 31, 44, 8, 97, 39, 53, 75)
    )
]
LARGE = [b._replace(size=b.size * 10**9 + i) for i, b in enumerate(HOLES)]


@parametrize("buffers", [HOLES, LARGE, *(random_buffers(3 + n % 5, n) for n in range(12))])
def test_memory_plans_are_the_best(buffers):
    """A plan's peak is the lowest one, and the lower bound proves it.

    The best of first fits in all orders is the best plan. The bound is exact up to floating-point
    error. Catches buffers that overlap, a peak above the best, and a lower bound above the best.
    """
    plan = memplan.solve(buffers, time_limit=20)
    rows = memplan.as_rows(buffers)
    orders = itertools.permutations(range(len(buffers)))
    best = min(memplan.first_fit(rows, order)[1] for order in orders)
    assert is_plan(buffers, plan.offsets, plan.peak)
    assert plan.peak == best >= plan.lower_bound > 0.9999 * plan.peak


def test_memory_plan_checker_is_the_definition():
    """The checker accepts a plan only if no buffers overlap and none leaves the arena.

    It accepts all such plans. Catches a checker that lets a wrong plan pass.
    """
    rng, seen = random.Random(0), set()
    for seed in range(2000):
        buffers = random_buffers(rng.randint(1, 6), seed)
        offsets = [rng.randrange(120) for _ in buffers]
        good = is_plan(buffers, offsets, 150)
        seen.add(good)
        with contextlib.nullcontext() if good else raises(ValueError, match="overlap|leave"):
            memplan.check(buffers, offsets, 150)
    assert seen == {True, False}


def test_memory_plan_ends_in_time(tmp_path, monkeypatch):
    """The integer program runs in a process of its own, which is ended when its time is over.

    Catches a solver that runs on after its time limit.
    """
    monkeypatch.setattr(memplan, "FEW_PAIRS", 0)  # small problems, too, run in a process
    assert memplan.solve(HOLES).optimal
    slow_solver = tmp_path / "slow.py"
    slow_solver.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(memplan, "__file__", slow_solver)  # the process runs this file
    plan = memplan.solve(HOLES, time_limit=1)
    assert plan.method == "first fit" and plan.seconds < 30


@slow
@parametrize("name", ["16k", "64k", "256k"])
def test_memory_plans_of_recorded_steps(name):
    """Plans of steps that bench.py recorded on GPUs need no more bytes than are alive at once.

    Catches a peak above the best on steps of real size.
    """
    _, buffers = memplan.read_trace(ROOT / "results" / "2026-11-2xh200" / f"memplan-{name}.csv")
    plan = memplan.solve(buffers)
    memplan.check(buffers, plan.offsets, plan.peak)
    assert plan.optimal


PASSES = [
    b._replace(start=b.start + t, end=b.end + t, in_pass=f"pass {t}")
    for t in range(0, 90, 10)
    for b in HOLES
]
# The last buffer fits above the pass's buffers that are still alive, but not above its whole block.
LONG_PASS = [
    memplan.Lifetime(0, 2, 10, "a"),
    memplan.Lifetime(1, 4, 2, "a"),
    memplan.Lifetime(2, 6, 10),
]


@parametrize(
    "buffers, peak, method, other",
    [
        ([*PASSES, memplan.Lifetime(0, 90, 17)], 144 + 17, "two levels", "first fit"),
        (LONG_PASS, 12, "first fit", "two levels"),
    ],
)
def test_memory_plan_of_two_levels(buffers, peak, method, other):
    """Memo's two levels are used, unless a first fit of all buffers has a lower peak.

    In the first case nine equal passes are planned one by one, and a buffer outlives them. In the
    second case a buffer outlives its pass. The text of a plan names both peaks. Catches a plan of
    two levels that is used although one level needs less.
    """
    plan = memplan.solve(buffers, time_limit=20)
    assert is_plan(buffers, plan.offsets, peak)
    assert plan.method.startswith(method) and f"({other}" in str(plan)


def test_memplan_program(tmp_path, capsys):
    """memplan.py reads a trace with passes and its columns in any order, and writes a trace again.

    Catches a trace that is read wrongly, including one that Excel wrote.
    """
    trace, plan, plot = tmp_path / "t.csv", tmp_path / "p.csv", tmp_path / "p.png"
    trace.write_text(
        'pass,id,upper,lower,size\r\n"forward, layer 1",a,3,0,8\r\n,b,9,0,4\r\n'
        '"forward, layer 1",c,3,1,8\r\n',
        encoding="utf-8-sig",  # as Excel writes it
    )
    args = ["--time-limit", "9", "--out", str(plan), "--plot", str(plot)]
    assert memplan.main([str(trace), *args]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plan.read_text() == (
        'id,lower,upper,size,pass,offset\na,0,3,8,"forward, layer 1",0\nb,0,9,4,,16\n'
        'c,1,3,8,"forward, layer 1",8\n'
    )
    assert memplan.main([str(plan)]) == 0 and "3 buffers, peak 20, " in capsys.readouterr().out


@parametrize(
    "text, message",
    [
        ("", "line 1: there is no id, lower, size, upper among"),
        ("id,lower,size\n", "line 1: there is no upper among"),
        ("id,lower,upper,size\na,0,1,2\nb,0,x,2\n", "line 3: invalid literal for int.*x"),
        ("id,lower,upper,size\na,4,4,2\n", "line 2: a buffer.s start must be before"),
    ],
)
def test_memplan_names_the_line(text, message, tmp_path, capsys):
    """A file that is not a trace is refused, and the error names the line.

    Catches a bad row that is skipped or ends in a traceback.
    """
    trace = tmp_path / "t.csv"
    trace.write_text(text)
    assert memplan.main([str(trace)]) == 2
    assert re.search(message, capsys.readouterr().err)


# ---------------------------------------------------------------------------- replay


def test_memory_replay_is_bit_equal():
    """Steps at planned addresses equal those of a twin without a plan.

    One step of another length does no harm, but the step after it is recorded and planned again.
    Catches a changed step whose tensors overlap because it runs on an old plan.
    """

    def make_step():
        model = seeded_model(SMALL)
        optimizer = torch.optim.AdamW(model.parameters())
        kept = []

        def step(seed, seq):
            replay.mark("forward")
            loss = model(*example(seed=seed, seq=seq))
            replay.mark("")
            kept.append(loss.detach().expand(5000).clone())
            del kept[:-4]  # frees the oldest, which a step before this one made
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    plain, planned, memory = make_step(), make_step(), replay.StepMemory()
    for seed, seq in enumerate([40, 40, 40, 40, 40, 23, 40, 40]):
        assert memory.run(lambda: planned(seed, seq)) == plain(seed, seq)
        all_planned = memory.counts.get("hits") == len(memory.buffers) > 50
        # step 2 is recorded; 5 has another length, and 6 is recorded again
        assert all_planned == (seed in (3, 4, 7)), seed
    assert memory.plans == 2 and "two levels" in str(memory.plan)
    assert memory.give_back()


@parametrize("first, second", [([9000], [8000]), ([9000], [2000, 3000]), ([2000, 3000], [9000])])
def test_memory_replay_gives_no_address_twice(first, second):
    """Tensors that share planned addresses keep their values if they are alive together.

    The plan lets them share addresses because they were never alive together in the recorded step.
    Catches a tensor that is placed over a live one. first, second: sizes of tensors.
    """
    kept = []

    def step(held):
        held.extend([torch.ones(size) for size in first])
        held.extend([torch.zeros(size) for size in second])

    memory = replay.StepMemory()
    for _ in range(4):
        memory.run(lambda: step(deque(maxlen=0)))
    assert memory.plan.peak == 36032  # 4 * 9000 bytes, rounded up to a multiple of 64
    assert memory.counts["hits"] == len(first) + len(second)
    memory.run(lambda: step(kept))
    assert (memory.counts["hits"], memory.counts["occupied"]) == (len(first), len(second))
    assert [x.unique().tolist() for x in kept] == [[1.0]] * len(first) + [[0.0]] * len(second)
    assert not memory.give_back()
    kept.clear()
    assert memory.give_back()


def check_planned_steps(device: str, keep: str, least: int) -> None:
    """Compare seven steps with and without a plan, bit for bit. least: requests that are
    planned."""
    torch.compiler.set_stance("force_eager")
    case = make_case(f"1 micro=2 keep={keep} device={device} kernel=naive")
    curves = []
    for memory in (None, replay.StepMemory(device, 2**14, as_graph=keep == "all")):
        run, model, states = make_run(case, {}, streams.CommStream)
        train.load_random_weights(run, states)
        curves.append([])
        for i in range(7):
            batch = train.load_batch(run, i * BATCH)
            results = train.run_planned(memory, model, states, batch, 1e-2 / (1 + i), 0.5)
            curves[-1] += torch.hstack(results).tolist()
            if memory and i == 4:
                assert memory.give_back()  # drops the graph, so step 5 captures it again
    assert curves[0] == curves[1]
    assert memory.counts["hits"] > 0.9 * len(memory.buffers) > least, memory.counts
    assert memory.as_graph == (memory.graph is not None)
    assert memory.give_back()


@parametrize(
    "device, keep, least",
    [
        ("cpu", "mixed", 100),
        pytest.param("cuda", "mixed", 100, marks=needs_gpu),
        pytest.param("cuda", "all", 20, marks=needs_gpu),
    ],
)
def test_planned_steps_are_bit_equal(device, keep, least):
    """Training at planned addresses equals training without a plan.

    Layers swap in token chunks, or run whole as a CUDA graph. Catches a tensor that is placed over
    one that is still needed, and a graph that goes on with the inputs of its first step.
    """
    on_ranks(1, check_planned_steps, device, keep, least, gpus=int(device == "cuda"))


@slow
def test_planned_run_is_bit_equal(tmp_path):
    """train.py has the same losses with `--memplan on` and without.

    Ranks share sequences, layers run in chunks, and there is an evaluation and a checkpoint.
    Catches a plan that changes a loss.
    """
    flags = "--sp 2 --chunk 16 --alpha 0.5 --eval-every 5 --save-every 4"
    run(f"{flags} --out {tmp_path}/off", 2)
    text = run(f"{flags} --out {tmp_path}/on --memplan on", 2)
    assert re.search("memory plan of a step: .* buffers, peak .*two levels", text)
    off, on = (read_log(tmp_path / name) for name in ("off", "on"))
    counts = {row["step"]: row["memplan"] for row in on if row["memplan"]}
    assert [*counts] == [4, 5, 6] and min(count["hits"] for count in counts.values()) > 100
    for key in ("loss", "grad_norm", "val_loss"):
        assert [row.get(key) for row in off] == [row.get(key) for row in on], key


# ---------------------------------------------------------------------------- the bytes of a step


@contextlib.contextmanager
def as_on_a_gpu(one_kernel: Callable):
    """Make a step on the CPU allocate as on a GPU, on one rank.

    Functions that are one kernel on a GPU, and work on side streams, run inside one_kernel().
    """

    def after_compute(stream):
        return one_kernel() if stream.overlap else contextlib.nullcontext()

    def map_memory(exchange, elements, like):
        exchange.memory = like.new_empty(elements)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_coalescing_manager", lambda *_, **__: contextlib.nullcontext())
        for module in (train, shard):
            patch.setattr(module, "all_or_none", lambda check, *args: check(*args))

        # Functions that are one kernel on a GPU: compiled ones, products that cast on a CPU, and
        # those of float8, which a CPU emulates.
        fused = [(shard.States, "update_param")]
        fused += [(ops, name) for name in ("matmul_fp32", "weight_grad_into", "embedding_grad")]
        fused += [(fp8, "largest_values"), (fp8, "cast_both"), (fp8, "product")]
        fused += [
            (module, name)
            for module in (m, ops, optim, shard, attention, fp8)
            for name, fn in vars(module).items()
            if getattr(fn, "is_compiled", False)
        ]
        for owner, name in fused:
            patch.setattr(owner, name, one_kernel()(getattr(owner, name)))
        cast_after = fp8.prologue_with_cast.__wrapped__
        patch.setattr(fp8, "prologue_with_cast", lambda f: one_kernel()(cast_after(f)))
        # a norm's Prologue holds the function for backward as it was when the Prologue was made
        patch.setattr(m, "norm_prologue", ops.norm_prologue.__wrapped__)
        patch.setattr(streams.CommStream, "after_compute", after_compute)
        patch.setattr(attention.Exchange, "map_memory", map_memory)
        yield


def simulate_step(plan: costs.Plan) -> tuple[list[memplan.Lifetime], float, float]:
    """Simulate a GPU's step on rank 0. Return (buffers, lasting bytes, counted bytes).

    buffers: those of the step that are large enough to be planned (1 MiB). Buffers that are made
    and freed inside a fused kernel or on a side stream are left out. lasting bytes: what stays
    allocated between steps. counted bytes: what the planner counts for the GPU.

    The step runs on fake tensors of the CPU, in a process group that sends nothing.
    """
    clock = itertools.count()
    # a stack whose last entry stands for the kernel or side stream that is running; None: neither
    running = [None]
    alive = {}  # birth -> (bytes, the kernel or side stream that allocated it)
    dead = []  # buffers with birth, death and bytes, rounded up to 512
    run = planned_run(plan)

    def note_death(born):
        size, kernel = alive.pop(born)
        if size >= 2**20 and (kernel is None or kernel is not running[-1]):
            dead.append(memplan.Lifetime(born, next(clock), -(-size // 512) * 512))

    class NoteBirths(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and not hasattr(t.untyped_storage(), "born"):
                    storage = t.untyped_storage()
                    storage.born = next(clock)
                    alive[storage.born] = storage.nbytes(), running[-1]
                    weakref.finalize(storage, note_death, storage.born)
            return out

    @contextlib.contextmanager
    def one_kernel():
        running.append(object())
        yield
        running.pop()

    dist.init_process_group("fake", rank=0, world_size=plan.ranks, store=FakeStore())
    with as_on_a_gpu(one_kernel), FakeTensorMode(allow_non_fake_inputs=True), NoteBirths():
        *_, step = built(run, as_on_gpus=True)
        step()  # tensors that are alive after a step stay alive between steps
        lasting = sum(size for size, _ in alive.values())
        first = next(clock)
        step()
        buffers = [b for b in dead if b.start > first]
    dist.destroy_process_group()
    lasting -= round(run.plan.host_bytes)  # in the simulation, host buffers are on the same device
    return buffers, lasting, run.plan.gpu_bytes


def peak_alive(buffers):
    """Return the most bytes that are alive at once."""
    return memplan.live_bytes(memplan.as_rows(buffers)).max()


@slow
@parametrize(
    "name, ranks, seq, factors, kept, choices",
    [
        ("7b", 4, 2**19, (1, 1, 4), (4, 8, 2, 10), {"head_groups": 4}),
        ("7b", 4, 2**17, (2, 4, 4), (4, 2, 4, 8), {}),
        ("7b", 1, 2**17, (1, 1, 1), (4, 8, 2, 10), {"head_groups": 8}),
        (
            "7b",
            8,
            2**19,
            (8, 8, 8),
            (4, 4, 2, 0, 0, 3, 2),
            {"head_groups": 4},  # layers drop x and o
        ),
        ("llama3-8b", 8, 2**16, (1, 1, 8), (4, 1, 2, 2), {"batch": 2}),
        # a tied matrix is summed in a float32 buffer of its own (g = 1), or of all gradients
        ("llama3-8b tied", 4, 2**16, (1, 1, 4), (), {}),
        ("llama3-8b tied", 4, 2**17, (2, 4, 4), (4, 2, 4, 8), {}),
        ("7b", 4, 2**18, (1, 1, 4), (4, 4, 2, 5), {"ring": 4}),
        ("7b", 4, 2**17, (1, 1, 4), (8, 2, 5, 8, 6), {}),  # a lag of 4 layers
        ("llama3-8b", 1, 2**15, (1, 1, 1), (9, 1, 6, 5, 3), {"chunk": 2**15}),  # of 5
        (
            *("7b", 4, 2**16, (1, 1, 1), (4, 4, 2, 5)),
            {"sp": 1, "tp": 4, "tp_mode": "mtp"},
        ),
        *(
            ("7b", 4, 2**15, (1, 1, 1), (), {"sp": 1, "tp": 4, "tp_mode": mode})
            for mode in ("msp", "fsp")
        ),
        # block.pre's backward needs most: the product of qkv, or the norms of q and k
        ("7b", 1, 2**16, (1, 1, 1), (4, 2, 4, 4), {"chunk": 2**15}),
        ("7b qk_norm", 1, 2**16, (1, 1, 1), (4, 2, 4, 8), {"chunk": 2**15}),
    ],
)
def test_counted_memory_is_what_a_step_needs(name, ranks, seq, factors, kept, choices):
    """The bytes that planner.py counts are those of simulated steps, or up to 8 % more.

    The models have only a few of their layers. With 32 layers in the first case, GPUs measured
    122.2 GiB, and the simulation gives 122.1 GiB. Catches a peak that the formula lacks, for
    example one with layers whose copies to the host are under way.
    """
    name, *options = name.split()  # options: fields of ModelConfig that are True
    layers = kept[0] if kept else 4
    model = replace(m.MODELS[name], layers=layers, **dict.fromkeys(options, True))
    plan = swapping_plan(model, ranks, seq, factors, kept, **{"chunk": 2**14, **choices})
    requests, lasting, counted = simulate_step(plan)
    simulated = lasting + peak_alive(requests)
    assert 0.999 <= counted / simulated <= 1.08


@slow
@parametrize(
    "name, ranks, seq, factors, kept, choices",
    [
        ("1b", 1, 2**13, (1, 1, 1), (), {"batch": 2, "keeps_casts": True}),
        ("llama3-8b", 1, 2**16, (1, 1, 1), (4, 4, 2, 2, 3), {}),
        ("7b", 2, 2**15, (2, 2, 2), (4, 2, 4, 4), {"sp": 1, "batch": 4, "micro_batch": 1}),
        ("7b", 4, 2**16, (1, 1, 1), (4, 4, 2, 5), {"sp": 1, "tp": 4, "tp_mode": "mtp"}),
    ],
)
def test_counted_memory_of_float8(name, ranks, seq, factors, kept, choices):
    """With float8 products, the planner counts the casts of activations and of weights.

    The cases are casts that are kept for a step, casts that last for a layer, unsharded parameters,
    and matrices that tensor parallelism splits. Catches an operand that is counted in bf16, and a
    cast that lives longer than the planner counts.
    """
    model = replace(m.MODELS[name], layers=4)
    choices = {"chunk": 2**14, "products": "fp8", **choices}
    plan = swapping_plan(model, ranks, seq, factors, kept, **choices)
    requests, lasting, counted = simulate_step(plan)
    assert 0.995 <= counted / (lasting + peak_alive(requests)) <= 1.02


@slow
@parametrize(
    "frozen, name, ranks, seq, factors, kept, choices",
    [
        ("base", "llama3-8b", 4, 2**17, (4, 4, 4), (4, 2, 2, 3), {}),  # adapters, in token chunks
        ("base", "7b", 1, 2**14, (1, 1, 1), (), {}),
        # two of four layers have no backward, so an activation plan is for the other two
        ("some", "7b", 1, 2**14, (1, 1, 1), (), {}),
        ("some", "7b", 1, 2**15, (1, 1, 1), (2, 2, 2, 4), {}),
        ("some", "llama3-8b", 4, 2**17, (4, 4, 4), (2, 2, 2, 1), {}),
        *(
            ("base", "7b", 4, 2**14, (1, 1, 1), (), {"sp": 1, "tp": 4, "tp_mode": mode})
            for mode in ("mtp", "msp", "fsp")
        ),
        (
            "base",
            "llama3-8b",
            4,
            2**13,
            (1, 1, 1),
            (),
            {"sp": 1, "tp": 2, "tp_mode": "fsp", "micro_batch": 2, "batch": 4},
        ),
    ],
)
def test_counted_memory_of_frozen_weights(frozen, name, ranks, seq, factors, kept, choices):
    """The planner counts what a step with frozen weights needs, or up to 5 % more; in token chunks,
    up to 12 % more.

    Catches gradients or optimizer states that are counted for a frozen matrix, and gradients of an
    adapter's input that are not counted. With --tp it catches gradients of the whole group's tokens
    that are counted at a moment when they are freed, and activations that adapters save in addition
    to those of the frozen matrices.
    """
    model = replace(m.MODELS[name], layers=4, architecture=f"llama {frozen}")
    plan = swapping_plan(model, ranks, seq, factors, kept, **{"chunk": 2**14, **choices})
    requests, lasting, counted = simulate_step(plan)
    assert 0.999 <= counted / (lasting + peak_alive(requests)) <= (1.12 if kept else 1.05)


@slow
@parametrize(
    "name, seq, factors, kept, chunk",
    [
        ("16k", 2**14, (1, 1, 2), (32, 1, 32, 32), 2**13),
        ("64k", 2**16, (2, 2, 2), (32, 2, 23, 46, 14), 2**14),
    ][: 1 + ALL_COMBINATIONS],
)
def test_simulated_step_requests_what_a_gpu_did(name, seq, factors, kept, chunk):
    """A step on fake tensors requests the same memory as a step that bench.py recorded on GPUs.

    The plans are those in results/2026-11-2xh200/memplan.jsonl. Catches a simulation that requests
    what no GPU did.
    """
    _, real = memplan.read_trace(ROOT / "results" / "2026-11-2xh200" / f"memplan-{name}.csv")
    plan = swapping_plan(m.MODELS["7b"], 2, seq, factors, kept, chunk=chunk, head_groups=4)
    requests, _, _ = simulate_step(plan)
    # The recorded program had two float32 tensors of 4,194 tokens, logits and their gradients. Now
    # the logits have 4,096 tokens, and the gradients are in bf16
    saved = (2 * 4 * 4194 - (4 + 2) * 4096) * 32000
    assert peak_alive(requests) == approx(peak_alive(real) - saved, rel=1e-4)
    # compare all requests but those of logits, their gradients and other tensors (n, V)
    ours, theirs = (
        Counter(r.size for r in trace if r.size % (2 * 32000)) for trace in (requests, real)
    )
    assert (ours & theirs).total() > 0.999 * theirs.total() > 0.99 * len(real)
    # Since the recording, the engine makes three more requests per layer and chunk: two for sums of
    # the residual stream, and one for a sum of its gradients.
    assert len(requests) < 1.002 * len(real) + 3 * kept[0] * seq // chunk


@parametrize("tied", [False, True])
def test_gradients_of_chunks_are_rounded_once(tied, group):
    """Gradients of bf16 matrices that token chunks accumulate are rounded only once.

    So is the gradient of a tied matrix, to which the head and the embedding contribute. There are
    four chunks. With one micro-batch the sum is rounded to bf16 at the end. With a second one,
    which has no labels, it stays in float32. So the two differ by half a bit of bf16 at most, as
    Adam's first moment sees it. Catches gradients of chunks or micro-batches that add up in bf16.
    """
    found = []  # of one and of two micro-batches: Adam's first moments by name
    model = replace(SMALL, tied=tied)
    summed = "embed" if tied else "head"  # not an untied embedding
    tokens = torch.arange(64).remainder(SMALL.vocab)
    for several in (1, 2):
        run = planned_run(
            swapping_plan(model, 1, 64, (1, 1, 1), (2, 4, 2), chunk=16, batch=several)
        )
        module, states, _ = built(run)
        train.load_random_weights(run, states)
        labels = torch.stack([tokens, torch.full_like(tokens, m.IGNORE)])[:several, None]
        rest = several * [torch.arange(64)], torch.ones(())
        batch = train.Batch(tokens.expand(several, 1, 64), labels, *rest)
        train.run_step(module, states, batch, 1e-9, 0.0)
        found.append(
            {
                name: part.read()
                for name, part in states.state_parts().items()
                if re.match(rf"exp_avg\.(blocks|{summed})", name) and "norm" not in name
            }
        )
    in_bf16, in_fp32 = found
    # four matrices per layer, and the embedding or the head
    assert len(in_bf16) == 4 * model.layers + 1
    for name, narrow in in_bf16.items():
        wide = in_fp32[name]
        assert (narrow - wide).abs().max() > 0, name
        assert ((narrow - wide).abs() <= 1.01 * 2**-8 * wide.abs() + 1e-12).all(), name


def test_forgotten_activations_are_freed(group):
    """A forward leaves no memory behind, whether or not a backward follows.

    No backward follows if memory runs out, for example. Catches a cycle of references, such as a
    tensor that autograd saves and that holds the graph, because of which memory is never freed.
    """
    model = seeded_model(SMALL, attention.Attention("cpu"))
    plan = offload.ActivationPlan(SMALL.layers, 4, SMALL.layers, 5)
    layers = offload.ChunkedLayers(model, (2, 20), plan, 10, torch.device("cpu"), torch.float64)
    made, forward = [], layers.forward

    def spy(batch, i, x):
        y = forward(batch, i, x)
        tensors = batch.saved[i].tensors.values()
        assert not any(t.requires_grad for t in tensors)  # and they hold no graph
        made.extend(map(weakref.ref, [batch.saved[i], *tensors]))
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


@parametrize("lag", [2, 3])
def test_lag_is_how_many_swapped_layers_are_on_the_gpu(lag, group):
    """When layer i ends, the GPU has the activations of the swapped layers i - lag + 1 to i, and of
    no earlier one, because compute has waited for the copies of layers up to i - lag only.

    Catches a layer that is freed too late, which takes memory that nobody counts, and a wait that
    comes too soon, so that nothing hides the copy.
    """
    model = seeded_model(replace(SMALL, layers=7), attention.Attention("cpu"))
    plan = offload.ActivationPlan(7, 2, 3, 1, 5, lag=lag)
    layers = offload.ChunkedLayers(model, (2, 20), plan, 20, torch.device("cpu"), torch.float64)
    on_gpu, forward = [], layers.forward

    def note_layers(batch, i, x):
        y = forward(batch, i, x)
        swapped = [batch.saved[j] for j in range(min(i + 1, plan.swapped_layers))]
        on_gpu.append([j for j, s in enumerate(swapped) if s.tensors is not s.on_host])
        return y

    layers.forward = note_layers
    model(*example(seq=20)).backward()
    swapped = range(plan.swapped_layers)
    assert on_gpu == [[j for j in swapped if i - lag < j <= i] for i in range(plan.layers)]


def test_prefetches_are_launched_a_layer_ahead(group):
    """The backward of layer i launches the prefetch of layer i - 1. The last two swapped layers are
    prefetched when backward begins. Catches a prefetch that is launched when its layer needs it, so
    that nothing hides it."""
    model = seeded_model(replace(SMALL, layers=7), attention.Attention("cpu"))
    plan = offload.ActivationPlan(7, 2, 3, 1, 5, lag=3)
    layers = offload.ChunkedLayers(model, (2, 20), plan, 20, torch.device("cpu"), torch.float64)
    launched, backward = {}, layers.backward

    def note_prefetches(batch, i, dy):
        dx = backward(batch, i, dy)
        launched[i] = sorted(batch.prefetch_done)
        return dx

    layers.backward = note_prefetches
    model(*example(seq=20)).backward()
    assert launched == {i: [j for j in range(4) if j >= min(i, 3) - 1] for i in range(7)}


@parametrize(
    "kept, choices, reason",
    [
        ((3, 2, 3), {}, "backward reaches 4 layers, but the plan is for 3"),
        ((4, 3, 4), {}, "40 tokens make 2 chunks of 20, but the plan has 3"),
        ((4, 2, 2), {"lag": 1}, "a copy needs at least one layer's forward"),
        ((4, 2, 2), {"lag": 3}, "the last 3 layers must be resident"),
        ((4, 2, 3), {"stride": 2}, "must be whole groups of 2"),
        ((4, 2, 2, 1), {"stride": 2}, "none is kept or swapped"),
        ((4, 2, 2, 0, 1), {"stride": 2}, "none is kept or swapped"),
    ],
)
def test_activation_plans_that_cannot_run_are_refused(kept, choices, reason, group):
    """A plan that is for other layers or chunks, or that its buffers and waits do not allow, is
    refused. Catches a copy that is still running when backward overwrites or reads its memory."""
    model = seeded_model(replace(SMALL, layers=4), attention.Attention("cpu"))
    plan = offload.ActivationPlan(*kept, **choices)
    with raises(AssertionError, match=reason):
        offload.ChunkedLayers(model, (2, 20), plan, 20, torch.device("cpu"), torch.float64)
