"""No access to memory races another one, and no wait is without a reason.

The cases run on CPUs with pretended streams (happens_before.py), so a race is found without luck
and without a GPU. The first test wants no pair of accesses without an order. The second one leaves
out each line of the source that waits, and wants a pair then. Together they say that the engine
has the waits that it needs, and that a change which loses one will be noticed.

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
import train
from test_all import (
    ALL_COMBINATIONS,
    BATCH,
    ROOT,
    evaluate_batch,
    make_case,
    make_run,
    on_ranks,
    parametrize,
    slow,
    use_small_pieces,
)
from test_all import CASES as ALL_CASES

# Lines as in test_all.py. Each case trains two steps, with an evaluation between them. Three more
# words say what else happens:
#     +save      after each step a checkpoint is saved from copies (--save-async)
#     +graph     steps run as those that become a CUDA graph do, on a stream of their own
#     +buffers   optimizer states have as many buffers as they have pieces
CASES = """
1 place=host micro=2 keep=mixed +save
1 place=host +buffers                       # so few pieces that no buffer is filled twice in a step
1 open=1 +graph
1 keep=neither model=deep                   # inputs are made again from every second layer's
2 pp=2 micro=4 keep=swapped model=deep      # a pipeline that swaps
2 pp=2 parts=2 micro=2                      # an interleaved pipeline
2 p=2 g=2 os=2 place=host keep=kept         # parameters in two shards, states on the host
2 p=2 g=2 os=2 micro=2
2 g=2 os=2 layout=inter place=host
2 sp=2 ring=2 g=2 os=2                      # a ring
2 sp=2 groups=4 keep=mixed                  # Ulysses: chunks are kept, swapped and recomputed
2 tp=2 mode=mtp keep=swapped                # tensor parallelism, with and without chunks
2 tp=2 mode=msp os=1
2 os=2 keep=no-o                            # two layers drop o
2 os=2 keep=no-x +save                      # inputs are made again from every third layer's
2 dtype=bf16 keep=again                     # a gradient is cast, and then summed over replicas
4 sp=4 ring=2 groups=2                      # a ring between ranks that share heads
4 sp=4 ring=4 p=2 g=2 os=4                  # sums of a ring that go on more than once
"""
PIECE_BUFFERS = optim.PIECE_BUFFERS
EXTRAS = {"+save", "+graph", "+buffers"}


def parse(line: str) -> tuple[dict, set[str]]:
    """Return the case of a line, and what else happens in it."""
    words = line.partition("#")[0].split()
    case = make_case(" ".join(word for word in words if word not in EXTRAS))
    return case, EXTRAS.intersection(words)


LINES = {line.partition("#")[0].strip(): parse(line) for line in CASES.strip().splitlines()}

# Calls that look like a wait, and that the checker does not judge: a file, or a call in it -> why.
NOT_JUDGED = {
    "bench.py": "it times kernels, and no case runs it",
    "measure.py": "it times kernels, and no case runs it",
    "ranks.py finished.wait": "a thread of the host sleeps",
    "tensor.py self.barrier.wait": "threads of the host wait for each other",
    "shard.py self.host_states.synchronize": "it calls HostStates.synchronize, which is judged",
    "attention.py torch.cuda.synchronize": "GPUs map each other's memory; a CPU has none",
    "pipeline.py torch.cuda.synchronize": "it separates two communicators of NCCL, and no accesses",
}


# ---------------------------------------------------------------------------- the checker


def pairs_of(program) -> list[str]:
    """Return the pairs without an order of a program that takes a stream, in words."""
    recorder = happens_before.Recorder()
    with recorder:
        stream = happens_before.PretendedStream(torch.device("cpu"))
        recorder.names[stream.name] = "stream"
        kept = program(stream)
    del kept
    found = happens_before.unordered(recorder.shared_trace())
    return sorted(
        re.sub(r" \[.*?\]", "", happens_before.describe(p, {stream.name: "stream"})) for p in found
    )


def test_checker_finds_what_is_wrong():
    """The checker finds a wait that is missing before, behind and beside a stream's work, and none
    in a program that waits. Catches a checker that is blind."""

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

        return pairs_of(run)

    assert program() == program(pinned=True) == []
    assert program(waits=False, other_half=True) == []
    assert program(waits=False) == ["write on stream || read on compute"]
    assert program(pinned=True, waits=False) == ["write on stream || read on host"]
    assert program(begins=False) == [
        "write on compute || read on stream",
        "write on compute || write on stream",
    ]
    assert program(frees=True) == [
        "read on stream || its memory is given to others on compute",
        "write on stream || its memory is given to others on compute",
    ]


# ---------------------------------------------------------------------------- cases


def record(case: dict, extras: set[str], groups: dict, folder: Path) -> happens_before.Recorder:
    """Run a case on this rank, and record it."""
    optim.PIECE_BUFFERS = 1000 if "+buffers" in extras else PIECE_BUFFERS
    recorder = happens_before.Recorder()
    with recorder:
        run, model, states = make_run(case, groups, happens_before.PretendedStream)
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
    """Runs on each rank: record all cases, and write into the folder, by case, the pairs that have
    no order; and for each line that waits the pairs without it."""
    use_small_pieces()
    happens_before.pretend()
    torch.compiler.set_stance("force_eager")
    groups, results = {}, {}
    for number, (line, (case, extras)) in enumerate(cases.items()):
        recorder = record(case, extras, groups, folder / f"saves-{number}")
        trace = recorder.shared_trace()

        def pairs(left_out=None) -> list[str]:
            found = happens_before.unordered(trace, left_out)
            return [happens_before.describe(pair, recorder.names) for pair in found]

        waits = {
            f"{file}:{number}": pairs((file, number))[:2]
            for file, number in sorted(happens_before.sites(trace))
        }
        results[line] = {"accesses": len(recorder.trace), "pairs": pairs()[:9], "waits": waits}
    (folder / f"rank-{dist.get_rank()}").write_text(json.dumps(results))


def check_on_ranks(cases: dict[str, tuple]) -> dict[str, list[dict]]:
    """Return what check_order finds, of each case a result per rank."""
    found = {}
    for ranks in sorted({case["ranks"] for case, _ in cases.values()}):
        some = {line: case for line, case in cases.items() if case[0]["ranks"] == ranks}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for number in range(len(some)):
                (folder / f"saves-{number}").mkdir()
            on_ranks(ranks, check_order, some, folder)
            of_ranks = [json.loads((folder / f"rank-{r}").read_text()) for r in range(ranks)]
        found |= {line: [of_rank[line] for of_rank in of_ranks] for line in some}
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    """What is found in the cases above. They run once for all tests of this file, also if they
    fail."""
    return check_on_ranks(LINES)


def assert_ordered(of_ranks: list[dict]) -> None:
    for rank, found in enumerate(of_ranks):
        assert found["accesses"] > 1000, "the recorder saw nothing"
        assert not found["pairs"], f"no wait separates, on rank {rank}:\n" + "\n".join(
            found["pairs"]
        )


@slow
@parametrize("line", LINES)
def test_accesses_have_an_order(line, results):
    """Any two accesses to the same bytes, of which one writes, are separated by a wait; and memory
    is freed behind all that other streams do with it. Catches a race that a GPU shows now and then:
    a buffer that is filled while it is still read, a tensor that is read before it has arrived."""
    assert_ordered(results[line])


@pytest.mark.skipif(not ALL_COMBINATIONS, reason="make test-all")
@parametrize("ranks", [1, 2, 4, 8])
def test_accesses_of_all_cases_have_an_order(ranks):
    """The same of all cases of test_all.py. Catches a race of two mechanisms that meet in none of
    the cases above."""
    cases = {str(case): (case, set()) for case in ALL_CASES if case["ranks"] == ranks}
    for of_ranks in check_on_ranks(cases).values():
        assert_ordered(of_ranks)


# ---------------------------------------------------------------------------- waits


def waiting_calls() -> list[tuple[str, ast.Call]]:
    """Return all calls in the project's files that may let a stream or the host wait, with the name
    of the file. streams.py has what they call."""
    return [
        (path.name, node)
        for path in sorted(ROOT.glob("*.py"))
        if path.name not in ("streams.py", "test_all.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in ("wait", "after_compute", "synchronize")
    ]


def names_in_table(file: str, call: ast.Call) -> set[str]:
    return {file, f"{file} {ast.unparse(call.func)}"}.intersection(NOT_JUDGED)


WAITS = {
    f"{file}:{call.lineno}": (file, call.lineno, call.end_lineno, ast.unparse(call))
    for file, call in waiting_calls()
    if not names_in_table(file, call)
}


@slow
@parametrize("wait", WAITS)
def test_each_wait_has_a_reason(wait, results):
    """Without this line of the source some case has a pair of accesses that nothing separates.
    Catches a wait that no case reaches, so that nobody would notice if it were lost; and a wait
    that another one makes needless, which costs time."""
    file, first, end, call = WAITS[wait]
    lines = [f"{file}:{number}" for number in range(first, end + 1)]
    reaching = {
        case: [
            pair for found in of_ranks for line in lines for pair in found["waits"].get(line, [])
        ]
        for case, of_ranks in results.items()
        if any(line in found["waits"] for found in of_ranks for line in lines)
    }
    assert reaching, f"{wait}: no case reaches {call}"
    for case, pairs in reaching.items():
        if pairs:
            print(f"{wait} {call}\n    in case {case}: {pairs[0]}")
    assert any(reaching.values()), f"{wait}: {call} left out changes nothing in {list(reaching)}"


@slow
def test_waits_are_those_of_the_source(results):
    """Each line that waits in a case is a call that this file has found in the source, and each row
    of NOT_JUDGED excuses one. Catches a wait under a new name, which no test would leave out."""
    known = {
        f"{file}:{number}"
        for file, first, end, _ in WAITS.values()
        for number in range(first, end + 1)
    }
    reached = {
        line for of_ranks in results.values() for found in of_ranks for line in found["waits"]
    }
    assert reached <= known
    excused = [names_in_table(file, call) for file, call in waiting_calls()]
    assert set().union(*excused) == set(NOT_JUDGED)
