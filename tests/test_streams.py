"""Show that no two accesses to memory race, and that each wait in the source is needed.

The cases run on CPUs with simulated streams (happens_before.py), so a race is found without luck
and without a GPU. A *race* is a pair of accesses to the same bytes, at least one a write, that no
wait separates.

    test_accesses_have_an_order       runs the cases, and fails if there is a race
    test_each_wait_has_a_reason       ignores one waiting line of the source at a time, and fails
                                      if no case has a race then
    test_waits_are_those_of_the_source    fails if a case waits at a line that was not ignored

Together they show that the engine has the waits that it needs, and that a change which loses one
will be noticed.

`make test` runs the cases below. `make test-all` also runs all cases of test_all.py.
"""

import ast
import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import checkpoint
import happens_before
import optim
import replay
import shard
import train
from test_all import (
    ALL_COMBINATIONS,
    BATCH,
    ROOT,
    evaluate_batch,
    expose_races,
    make_case,
    make_run,
    on_ranks,
    parametrize,
    slow,
)
from test_all import CASES as ALL_CASES

# Case lines as in test_all.py. Each case trains two steps, with an evaluation between them. A line
# may have three more words:
#     +save      save a checkpoint from copies after each step (--save-async)
#     +graph     run steps on a stream of their own, as steps that become a CUDA graph do
#     +buffers   give each piece of the optimizer states a buffer of its own
CASES = """
1 place=host micro=2 keep=mixed dtype=bf16 +save   # the host stores the rest of the master weights
1 place=host +buffers                       # no buffer is filled twice in a step
1 open=1 +graph
1 keep=neither model=deep                   # x is recomputed from every second layer's x
2 pp=2 micro=4 keep=swapped model=deep      # a pipeline that swaps
2 pp=2 parts=2 micro=2 tied=1               # an interleaved pipeline, both ends share a matrix
2 p=2 g=2 os=2 place=host keep=kept         # parameters in two shards, states on the host
2 p=2 g=2 os=2 micro=2 tied=1               # a gradient stays in its buffer while layers run
2 g=2 os=2 layout=inter place=host dtype=bf16
2 sp=2 ring=2 g=2 os=2                      # a ring
2 sp=2 groups=4 keep=mixed                  # Ulysses, with chunks kept, swapped and recomputed
2 tp=2 mode=mtp keep=swapped                # tensor parallelism, with and without chunks
2 tp=2 mode=msp os=1
2 os=2 keep=no-o                            # two layers drop o
2 os=2 keep=no-x +save                      # x is recomputed from every third layer's x
2 dtype=bf16 keep=again                     # a gradient is cast, and then summed over replicas
2 frozen=some p=2 g=2 os=2 micro=2          # frozen layers, first and in the middle
2 frozen=some p=2 g=2 os=2 keep=swapped place=host
4 pp=4 micro=4 place=both +save             # stages whose states all stay on the GPU
2 frozen=base pp=2 micro=2 tied=1 keep=mixed
2 frozen=some pp=2 parts=2 micro=2          # a stage without a backward
4 sp=4 ring=2 groups=2 docs=1               # a ring between ranks that share heads; documents
4 sp=4 ring=4 p=2 g=2 os=4                  # gradients are passed on more than once
"""
PIECE_BUFFERS = optim.PIECE_BUFFERS
EXTRAS = {"+save", "+graph", "+buffers"}


def parse(line: str) -> tuple[dict, set[str]]:
    """Parse a line of CASES. Return its case and its extra words."""
    words = line.partition("#")[0].split()
    case = make_case(" ".join(word for word in words if word not in EXTRAS))
    return case, EXTRAS.intersection(words)


LINES = {line.partition("#")[0].strip(): parse(line) for line in CASES.strip().splitlines()}

# Calls that look like a wait, but that the tests do not ignore in turn: a file, or a call in a file
# -> the reason.
NOT_JUDGED = {
    "bench.py": "it times kernels, and no case runs it",
    "measure.py": "it times kernels, and no case runs it",
    "prepare.py": "its processes wait for each other, and it has no streams",
    "ranks.py self.finished.wait": "a thread of the host sleeps",
    "tensor.py self.barrier.wait": "threads of the host wait for each other",
    "shard.py self.host_states.synchronize": "it calls HostStates.synchronize, which is judged",
    "attention.py torch.cuda.synchronize": "GPUs map each other's memory; a CPU has none",
    "pipeline.py torch.cuda.synchronize": "it separates two communicators of NCCL, and no accesses",
    "train.py finished.wait": "a thread of the host sleeps",
    "train.py torch.cuda.current_stream().synchronize": "an evaluation waits, so it can be left",
}


# ---------------------------------------------------------------------------- the checker


def races_of(program) -> list[str]:
    """Run a program that takes a stream, and return its races in words, sorted."""
    recorder = happens_before.Recorder()
    with recorder:
        stream = happens_before.SimulatedStream(torch.device("cpu"))
        recorder.names[stream.name] = "stream"
        result = program(stream)  # alive until the recording ends, so that it is not freed in it
    del result
    races = happens_before.find_races(recorder.shared_trace())
    names = {stream.name: "stream"}
    described = [happens_before.describe(race, names) for race in races]
    return sorted(re.sub(r" \[.*?\]", "", text) for text in described)  # without lines


def test_checker_finds_what_is_wrong():
    """The checker finds a missing wait before and after a stream's work, and when memory is freed.

    It finds no race in a program that waits. Catches a checker that sees nothing, or that reports
    a race where there is none.
    """

    # A stream copies x to the host, and writes the first half of x. Then compute reads x.
    #   begins       the stream's work waits for compute, which makes x
    #   waits        compute waits for the stream
    #   frees        compute does not read x, but frees it
    #   other_half   compute reads the half of x that the stream does not write
    #   pinned       not compute but the host reads: the copy in pinned memory, not x
    def program(begins=True, waits=True, frees=False, other_half=False, pinned=False):
        def run(stream):
            x = torch.zeros(8)
            host = happens_before.pin_host_buffers([32], False)[0].view(torch.float32)
            with stream.after_compute() if begins else stream.beside_compute():
                host.copy_(x, non_blocking=True)
                x[:4] = 1
            event = stream.record_event()
            if frees:
                x = None
                torch.zeros(8)
            if waits:
                event.synchronize() if pinned else happens_before.wait(event)
            if pinned:
                host.sum()
            elif not frees:
                (x[4:] if other_half else x[:4]).sum()
            return x

        return races_of(run)

    assert program() == program(pinned=True) == []
    assert program(waits=False, other_half=True) == []
    assert program(waits=False) == ["write on stream || read on compute"]
    assert program(pinned=True, waits=False) == ["write on stream || read on host"]
    assert program(begins=False) == [
        "write on compute || read on stream",
        "write on compute || write on stream",
    ]
    assert program(frees=True) == [
        "read on stream || its memory is reused on compute",
        "write on stream || its memory is reused on compute",
    ]


def test_checker_sees_what_a_save_reads(monkeypatch):
    """The thread that writes a checkpoint may read the states at any time until it is done. The
    checker finds a write to these states, on the GPU or on the host, unless the save has ended
    before it.

    Catches a checker that would miss a save of weights which the next update changes meanwhile.
    """
    monkeypatch.setattr(checkpoint, "write_states", lambda folder, parts: {})

    def program(ends: bool, writes_weight: bool):
        def run(stream):
            weight = torch.zeros(8, dtype=torch.bfloat16)
            rest = happens_before.pin_host_buffers([16], False)[0].view(torch.int16)
            part = shard.StatePart(rest, 0, (8,), True, weight=weight)
            job = happens_before.RecordedPool(1).submit(checkpoint.write_states, None, {"a": part})
            if ends:
                job.result()
            (weight if writes_weight else rest).fill_(1)
            return weight, rest

        return races_of(run)

    assert program(ends=True, writes_weight=True) == program(ends=True, writes_weight=False) == []
    assert program(False, writes_weight=True) == ["read on writer on the GPU || write on compute"]
    assert program(False, writes_weight=False) == ["read on writer || write on host"]


# ---------------------------------------------------------------------------- cases


def record(case: dict, extras: set[str], groups: dict, folder: Path) -> happens_before.Recorder:
    """Run a case on this rank: two steps, an evaluation between them. Return what was recorded."""
    optim.PIECE_BUFFERS = 1000 if "+buffers" in extras else PIECE_BUFFERS
    recorder = happens_before.Recorder()
    with recorder:
        run, model, states = make_run(case, groups, happens_before.SimulatedStream)
        recorder.names |= {s.name: kind for kind, s in states.streams.items() if s.stream}
        states.load(lambda name: torch.ones(states.shapes[name]))
        memory = replay.StepMemory("cpu", as_graph=True) if "+graph" in extras else None
        saver = checkpoint.Saver(folder, 2, states, room=1e9) if "+save" in extras else None
        for i in range(2):
            batch = train.load_batch(run, i * BATCH)
            if i == 0 and run.plan.pp > 1:
                model.warm_up(next(batch.micro_batches()))
            if i == 1:
                evaluate_batch(run, model, batch)
            train.run_planned(memory, model, states, batch, 1e-2, 0.3)
            del batch
            if saver:
                saver.begin({"step": i})
        if saver:
            saver.finish()
    return recorder


def check_order(cases: dict[str, tuple], folder: Path) -> None:
    """Record all cases, and write their races into the folder as JSON. Runs on each rank.

    A case's entry has the number of accesses, its races, and for each line that waits the races
    there would be without this wait.
    """
    expose_races()
    happens_before.simulate_streams()
    torch.compiler.set_stance("force_eager")
    groups, results = {}, {}
    for number, (line, (case, extras)) in enumerate(cases.items()):
        recorder = record(case, extras, groups, folder / f"saves-{number}")
        trace = recorder.shared_trace()

        def races(ignored_site=None, most=9) -> list[str]:
            found = happens_before.find_races(trace, ignored_site, most)
            return [happens_before.describe(race, recorder.names) for race in found]

        races_without = {
            f"{file}:{line_number}": races((file, line_number), most=2)
            for file, line_number in sorted(happens_before.waiting_sites(trace))
        }
        results[line] = {
            "accesses": len(recorder.trace),
            "races": races(),
            "races_without": races_without,
        }
    (folder / f"rank-{dist.get_rank()}").write_text(json.dumps(results))


def check_on_ranks(cases: dict[str, tuple]) -> dict[str, list[dict]]:
    """Run check_order. Return for each case its results, one per rank."""
    results = {}
    for ranks in sorted({case["ranks"] for case, _ in cases.values()}):
        cases_of_size = {line: case for line, case in cases.items() if case[0]["ranks"] == ranks}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for number in range(len(cases_of_size)):
                (folder / f"saves-{number}").mkdir()
            on_ranks(ranks, check_order, cases_of_size, folder)
            by_rank = [json.loads((folder / f"rank-{r}").read_text()) for r in range(ranks)]
        for line in cases_of_size:
            results[line] = [of_rank[line] for of_rank in by_rank]
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    """The results of all cases above, which run once for all tests of this file."""
    return check_on_ranks(LINES)


def assert_ordered(by_rank: list[dict]) -> None:
    """Assert that a case has no race on any rank."""
    for rank, result in enumerate(by_rank):
        assert result["accesses"] > 1000, "the recorder saw almost nothing"
        message = f"on rank {rank} no wait separates these accesses:\n"
        assert not result["races"], message + "\n".join(result["races"])


@slow
@parametrize("line", LINES)
def test_accesses_have_an_order(line, results):
    """No case has a race, and memory is freed only after other streams have finished with it.

    Catches a race that a GPU shows only now and then: a buffer that is filled while it is still
    read, or a tensor that is read before it has arrived.
    """
    assert_ordered(results[line])


@pytest.mark.skipif(not ALL_COMBINATIONS, reason="make test-all")
@parametrize("ranks", [1, 2, 4, 8])
def test_accesses_of_all_cases_have_an_order(ranks):
    """No case of test_all.py has a race either.

    Catches a race between two mechanisms that meet in none of the cases above.
    """
    cases = {str(case): (case, set()) for case in ALL_CASES if case["ranks"] == ranks}
    for by_rank in check_on_ranks(cases).values():
        assert_ordered(by_rank)


# ---------------------------------------------------------------------------- waits


def waiting_calls() -> list[tuple[str, ast.Call]]:
    """Return (file, call) for each call that may make a stream or the host wait.

    They are found by name in the project's files, except in streams.py, which defines the waits.
    """
    return [
        (path.name, node)
        for path in sorted(ROOT.glob("*.py"))
        if path.name not in ("streams.py", "test_all.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in ("wait", "after_compute", "synchronize")
    ]


def rows_that_excuse(file: str, call: ast.Call) -> set[str]:
    """Return the keys of NOT_JUDGED that name this call or its file."""
    return {file, f"{file} {ast.unparse(call.func)}"}.intersection(NOT_JUDGED)


WAITS = {
    f"{file}:{call.lineno}": (file, call.lineno, call.end_lineno, ast.unparse(call))
    for file, call in waiting_calls()
    if not rows_that_excuse(file, call)
}


@slow
@parametrize("wait", WAITS)
def test_each_wait_has_a_reason(wait, results):
    """If this line of the source did not wait, some case would have a race.

    Catches a wait that no case reaches, so that nobody would notice its loss. Catches also a wait
    that other waits make needless, which costs time.
    """
    file, first, end, call = WAITS[wait]
    lines = [f"{file}:{number}" for number in range(first, end + 1)]
    races_by_case = {}  # of the cases that reach the call
    for case, by_rank in results.items():
        for result in by_rank:
            for line in lines:
                if line in result["races_without"]:
                    races_by_case.setdefault(case, []).extend(result["races_without"][line])

    assert races_by_case, f"{wait}: no case reaches {call}"
    for case, races in races_by_case.items():
        if races:
            print(f"{wait} {call}\n    in case {case}: {races[0]}")
    assert any(races_by_case.values()), (
        f"{wait}: without {call} there is still no race in the cases {list(races_by_case)}"
    )


@slow
def test_waits_are_those_of_the_source(results):
    """Each line at which a case waits is in WAITS, and each row of NOT_JUDGED is still needed.

    Catches a wait with a new name, which test_each_wait_has_a_reason would not try.
    """
    known = {
        f"{file}:{number}"
        for file, first, end, _ in WAITS.values()
        for number in range(first, end + 1)
    }
    reached = set()
    for by_rank in results.values():
        for result in by_rank:
            reached |= result["races_without"].keys()
    assert reached <= known

    excused = [rows_that_excuse(file, call) for file, call in waiting_calls()]
    assert set().union(*excused) == set(NOT_JUDGED)
