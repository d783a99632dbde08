"""Run training steps at planned addresses: record one step, plan it, replay the plan (Memo, 4.2).

memplan.py plans addresses, and knows nothing of PyTorch. This file is the other half: it gives
PyTorch an allocator of our own (csrc/allocator.cpp), which delegates everything to PyTorch's except
while a step is recorded or replayed.

    runs 1 and 2    as they are: whatever lasts longer than a step is allocated here
    run 3           recorded: the size, the birth and the death of each request, counted in events;
                    memplan.solve then gives each request an offset in one arena
    run 4 onwards   replayed: request n of a step gets the n-th planned address. On one GPU a step
                    that is one stream then becomes one launch, a CUDA graph
    if fewer than nine tenths of the plan's requests were met in a replay, the step is recorded and
    planned again, three times in all, once no tensor lies in the arena any more

A wrong plan costs memory and never a wrong number: a request that differs from the plan goes to
PyTorch's pool, and so does one whose planned block would overlap a live tensor. Both are counted.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
from bisect import bisect
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from memplan import AddressPlan, Lifetime, check, solve
from streams import CommStream, wait

ALLOCATOR_ALIGN_BYTES = {"cpu": 64, "cuda": 512}  # where PyTorch's kernels want a tensor to start
MIN_PLANNED_BYTES = {"cpu": 2**10, "cuda": 2**20}  # of a request; cuda: those of large blocks
live_arena: dict[str, object] = {}  # of a kind of device: what its allocator points into
recorder: "StepMemory | None" = None  # of the step that is being recorded


def mark(name: str) -> None:
    """Begin a pass, such as "forward, layer 3/32", which ends at the next mark; an empty name
    begins none. Does nothing where no step is recorded."""
    if recorder is not None:
        recorder.marks.append((recorder.allocator.now(), name))


def with_passes(buffers, marks):
    """Return the buffers, whose times count events, with their passes: of one that lives and dies
    between two marks, the name of the first. A name that comes again gets a number."""
    times = [at for at, _ in marks]
    names, seen = [""], Counter()
    for _, name in marks:
        seen[name] += 1
        names.append(f"{name} #{seen[name]}" if name and seen[name] > 1 else name)
    marked = []
    for b in buffers:
        first, last = bisect(times, b.start), bisect(times, b.end)  # marks before birth and death
        marked.append(b._replace(in_pass=names[first] if first == last else ""))
    return marked


@functools.cache
def load_allocator(kind: str) -> ctypes.CDLL:
    """Return csrc/allocator.cpp for "cpu" or "cuda", installed for good: outside of record and
    replay it only delegates. Compiled at first use (some seconds) and kept in the user's cache.
    Raise ValueError with the compiler's words."""
    from torch.utils.cpp_extension import CUDA_HOME, include_paths

    packages = Path(torch.__file__).parents[1]
    include = include_paths()
    options = ["-lc10"]
    if kind == "cuda":  # its headers are the toolkit's, or pip's packages
        homes = [CUDA_HOME] if CUDA_HOME else packages.glob("nvidia/cu*")
        include += [f"{home}/include" for home in homes]
        options += ["-DMEMPLAN_CUDA", "-lc10_cuda"]
    file = Path(__file__).parent / "csrc" / "allocator.cpp"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(file)]
    command += [f"-I{path}" for path in include]
    command += [f"-L{packages}/torch/lib", *options]
    made_by = f"{command} {torch.__version__}"
    key = hashlib.sha256(file.read_bytes() + made_by.encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memplan"
    built = folder / f"{key[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = built.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", made], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        made.rename(built)  # whole at any moment, whoever compiles
    allocator = ctypes.CDLL(str(built))
    allocator.recorded.restype = ctypes.POINTER(ctypes.c_int64)
    allocator.counted.restype = ctypes.POINTER(ctypes.c_int64)
    allocator.load.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    allocator.begin.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    if kind == "cuda":
        torch.cuda.init()  # before, PyTorch has no allocator to ask
    allocator.install()
    return allocator


class StepMemory:
    """Planned memory of a step, a callable that requests the same each time.

        memory = StepMemory()
        memory.run(step, *inputs)   # again and again; counts says how well the plan was met
        memory.give_back()          # until the next run, for whatever else needs memory

    as_graph: a step whose inputs, tensors, say all that changes, and in which the host waits for
    nothing, is captured in planned memory, and then launched as one: a CUDA graph, with its results
    in the same tensors each time. What Python computes in it is what it was then, as are counts.
    On a CPU, all of the process's tensors; on a GPU those of the current device and stream. A
    tensor that other streams use must be in use until this stream has waited for them. In train.py,
    gathered weights, whole gradients and rounding buffers lie in memory that outlives steps, and
    what ranks map from each other lies outside the allocator; what all-to-alls and copies to the
    host read or write is held until this stream has waited for their event.
    Requests below min_bytes, and those that outlive the step, stay with PyTorch's allocator.
    Marks (`mark`, from within the step) name the passes of a plan's two levels.
    One StepMemory a kind of device at a time: its arena must live as long as any tensor in it, so
    an arena is not loaded (RuntimeError) while tensors of another's steps are in use.
    """

    RECORD, REPLAY = 1, 2  # what the allocator does
    COUNTS = ("hits", "unplanned", "unmatched", "occupied")

    def __init__(self, device: str = "cpu", min_bytes: int = 0, as_graph: bool = False):
        self.device = device
        self.as_graph = as_graph
        self.graph = None  # of the step, while its arena is there
        self.stream = None  # of all runs of what becomes a graph: a stream's first take memory
        self.kind = device.partition(":")[0]
        self.align = ALLOCATOR_ALIGN_BYTES[self.kind]
        self.min_bytes = min_bytes or MIN_PLANNED_BYTES[self.kind]
        self.allocator = load_allocator(self.kind)
        self.buffers: list[Lifetime] = []  # of the recorded step
        self.plan: AddressPlan | None = None
        self.arena = None  # memory, while the allocator points into it
        self.counts: dict[str, int] = {}  # of the last replay
        self.runs = 0
        self.plans = 0  # made of recorded steps

    def run(self, step, *inputs):
        """Run the step, on a stream of its own if it becomes a graph."""
        if not self.as_graph:
            return self.run_here(step, inputs)
        self.stream = self.stream or CommStream(torch.device(self.device))
        with self.stream.after_compute():  # inputs are there, the last results were read
            results = self.run_here(step, inputs)
        wait(self.stream.record_event())  # in the open: results are read next
        return results

    def run_here(self, step, inputs):
        """Run the step: the first two as they are, for what lasts; the third is recorded; then by
        plan, and recorded again (three times in all) after one that met less than nine tenths of
        its plan."""
        self.runs += 1
        missed = self.counts and self.counts["hits"] < 0.9 * len(self.buffers)
        if missed and self.plans < 3 and self.give_back():
            self.counts = {}
            self.plan = None
        if self.runs < 3:
            return step(*inputs)
        if self.plan is not None:
            return self.replay(step, inputs)
        result = self.record(step, inputs)
        if self.give_back():  # else what is in the arena outlives the step: the next one, maybe
            self.plan = solve(self.buffers, time_limit=10.0)
            self.plans += 1
            check(self.buffers, self.plan.offsets, self.plan.peak)
        return result

    def begin(self, mode) -> None:
        """Have the allocator record or serve requests on the current stream: there alone memory
        that is freed may be given out again at once."""
        stream = None
        if self.kind == "cuda":
            stream = torch.cuda.current_stream().cuda_stream
        self.allocator.begin(mode, self.min_bytes, self.align, stream)

    def record(self, step, inputs):
        """Run the step, and note its requests: sizes, lifetimes counted in events, and passes."""
        global recorder
        if self.kind == "cuda":  # what it reserves is to be what the step needs
            torch.cuda.empty_cache()
        self.marks = []  # (events so far, name)
        self.begin(self.RECORD)
        recorder = self
        try:
            result = step(*inputs)
        finally:
            recorder = None
            n = self.allocator.end()
        numbers = self.allocator.recorded()[: 3 * n]
        requests = np.array(numbers, np.int64).reshape(n, 3)
        requests[:, 2] += -requests[:, 2] % self.align
        self.requests = requests  # start, end (-1: outlives the step), size
        buffers = [Lifetime(*r) for r in requests.tolist() if r[1] >= 0]
        self.buffers = with_passes(buffers, self.marks)
        self.counts = {}  # of a plan that is not followed any more
        return result

    def replay(self, step, inputs):
        """Run the step on planned addresses, or launch it as a graph."""
        if self.arena is None:
            self.load_arena()
        if not self.as_graph:
            return self.follow(step, inputs)
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            self.inputs = [x.clone() for x in inputs]
            # what other threads do, as NCCL's, is not captured, and goes on
            here = torch.cuda.current_stream()  # whose first runs have taken what lasts
            with torch.cuda.graph(graph, stream=here, capture_error_mode="thread_local"):
                self.results = self.follow(step, self.inputs)
            self.graph = graph
        torch._foreach_copy_(self.inputs, inputs)
        self.graph.replay()
        return self.results

    def follow(self, step, inputs):
        """Run the step by plan; self.counts: how many requests met it."""
        self.begin(self.REPLAY)
        try:
            return step(*inputs)
        finally:
            self.allocator.end()
            self.counts = dict(zip(self.COUNTS, self.allocator.counted()))

    def load_arena(self) -> None:
        """Give the allocator the plan, and one block of PyTorch's for it."""
        _, died, size = self.requests.T
        entries = np.stack([size, np.full_like(size, -1)])  # sizes, offsets (-1: not planned)
        entries[1, died >= 0] = self.plan.offsets
        arena = torch.empty(self.plan.peak, dtype=torch.uint8, device=self.device)
        # refused while tensors lie in the last arena: its memory would go to others under them
        used = self.allocator.load(arena.data_ptr(), entries.ctypes.data, len(size))
        if used:
            raise RuntimeError(f"{used} tensors of an earlier plan are still in use")
        self.arena = live_arena[self.kind] = arena  # as long as the allocator may point into it

    def give_back(self) -> bool:
        """Give the arena's memory to PyTorch's allocator if no tensor is in it, and return
        whether it was."""
        if self.arena is not None and not self.allocator.load(None, None, 0):
            self.arena = live_arena[self.kind] = self.graph = None
        return self.arena is None
