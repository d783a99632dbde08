"""Run training steps at planned addresses: record one step, plan it, replay it (Memo, section 4.2).

The steps of a run request the same memory in the same order. So one step is recorded, and
memplan.py computes an address for each of its requests, all in one block of memory, the *arena*.
Later steps get these addresses, so that memory does not fragment. memplan.py knows nothing of
PyTorch. This file installs an allocator (csrc/allocator.cpp) in front of PyTorch's own one. In a
replay it serves requests at planned addresses. All other requests it passes on to PyTorch's
allocator. Each run of the step is in one of three states:

    runs     state      what happens
    1, 2     warm up    The step runs as usual. Memory that is allocated once and outlives a
                        step, such as workspaces of libraries, is allocated in these runs.
    3        record     The step runs as usual. The allocator notes each request's size, birth and
                        death. (Time is counted in births and deaths.) Then memplan.solve plans the
                        addresses.
    4 ...    replay     Request number n gets the n-th planned address. On one GPU the first replay
                        may be captured as a CUDA graph. Then later replays launch the graph.

If fewer than nine tenths of the planned requests got their planned address in a replay, the next
run records again. At most three plans are made.

Example: a step requests 4 MB (a) and 2 MB (b), frees a, and requests 3 MB (c). The plan puts b at
offset 0, and both a and c at offset 2 MB, because a and c are never alive together. The peak is
6 MB.

A wrong plan costs memory, but never gives a wrong result. A step may leave the plan, for example
because it skips a request. Then later requests are matched to the plan again by their sizes.
PyTorch's allocator serves a request that matches no request of the plan, and also a request whose
planned addresses hold a live tensor. Both kinds are counted (StepMemory.COUNTS).

    memory = StepMemory("cuda")
    memory.run(step, *inputs)       # in place of step(*inputs)
"""

import ctypes
import functools
import hashlib
import os
import socket
import subprocess
from bisect import bisect
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from memplan import AddressPlan, Lifetime, check, solve
from streams import CommStream, wait

# planned addresses are multiples of this, like those of PyTorch's own allocators, because kernels
# rely on it
ALLOCATOR_ALIGN_BYTES = {"cpu": 64, "cuda": 512}
# smaller requests are not planned. On a GPU, PyTorch serves them from a pool of small blocks
MIN_PLANNED_BYTES = {"cpu": 2**10, "cuda": 2**20}

WARM_UP_RUNS = 2
# the fraction of planned requests that must get their planned address in a replay. If fewer do, the
# step is recorded again
MIN_HITS = 0.9
MAX_PLANS = 3

# device type -> the arena that the device's allocator points into. It must not be freed, so it is
# referenced here even if its StepMemory is gone
live_arena: dict[str, object] = {}
recorder: "StepMemory | None" = None  # the object whose step is being recorded


def mark(name: str) -> None:
    """Begin a pass of the step, such as "forward, layer 3/32". It ends at the next mark.

    The step calls this while it runs. memplan.py first makes a plan for each pass, then one for the
    whole step (Memo's two levels). After a mark with an empty name, buffers belong to no pass. If
    no step is being recorded, mark does nothing.
    """
    if recorder is not None:
        recorder.marks.append((recorder.allocator.now(), name))


def with_passes(buffers: list[Lifetime], marks: list[tuple[int, str]]) -> list[Lifetime]:
    """Return the buffers, each with the name of the pass in which it is born and dies.

    marks: pairs (time, name), as `mark` notes them. The time is the number of births and deaths so
    far. For example, with marks at 0 ("a"), 10 ("b") and 20 ("a"):

        alive from 3 to 8       in pass "a"
        alive from 3 to 12      in no pass, ""
        alive from 21 to 25     in pass "a #2", the second one of this name
    """
    times = [time for time, _ in marks]
    names = [""]  # names[n] is the pass after n marks
    uses = Counter()
    for _, name in marks:
        uses[name] += 1
        if name and uses[name] > 1:
            name = f"{name} #{uses[name]}"
        names.append(name)
    marked = []
    for b in buffers:
        marks_before_birth = bisect(times, b.start)
        marks_before_death = bisect(times, b.end)
        in_one_pass = marks_before_birth == marks_before_death
        marked.append(b._replace(in_pass=names[marks_before_birth] if in_one_pass else ""))
    return marked


@functools.cache
def load_allocator(device_type: str) -> ctypes.CDLL:
    """Compile csrc/allocator.cpp for "cpu" or "cuda", install it, and return the library.

    It stays installed until the process ends. Compiling takes some seconds at first use; the result
    is kept in the user's cache. Raises ValueError with the compiler's message if it fails.
    """
    from torch.utils.cpp_extension import CUDA_HOME, include_paths

    packages = Path(torch.__file__).parents[1]
    include = include_paths()
    options = ["-lc10"]
    if device_type == "cuda":  # CUDA's headers: from the toolkit, or from pip's packages
        homes = [CUDA_HOME] if CUDA_HOME else packages.glob("nvidia/cu*")
        include += [f"{home}/include" for home in homes]
        options += ["-DMEMPLAN_CUDA", "-lc10_cuda"]
    source = Path(__file__).parent / "csrc" / "allocator.cpp"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(source)]
    command += [f"-I{path}" for path in include]
    command += [f"-L{packages}/torch/lib", *options]

    # the library's name is a hash of all that it is made from: the source, the command and PyTorch
    made_by = f"{command} {torch.__version__}"
    key = hashlib.sha256(source.read_bytes() + made_by.encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memplan"
    library = folder / f"{key[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # machines that share the folder may run processes with the same number
        unfinished = library.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        unfinished.replace(library)  # atomic, so that no other process loads half a file

    allocator = ctypes.CDLL(str(library))
    allocator.recorded.restype = ctypes.POINTER(ctypes.c_int64)
    allocator.counted.restype = ctypes.POINTER(ctypes.c_int64)
    allocator.load.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    allocator.begin.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    if device_type == "cuda":
        torch.cuda.init()  # creates PyTorch's GPU allocator, which install() needs
    allocator.install()
    return allocator


class StepMemory:
    """Runs a step, which requests the same memory each time, at planned addresses.

        memory = StepMemory()
        memory.run(step, *inputs)   # as often as you like
        memory.counts               # of the last replay: number of requests per outcome (COUNTS)
        memory.give_back()          # frees the arena until the next run, if other code needs memory

    On a CPU, the tensors of the whole process are planned. On a GPU, only the tensors that the
    current stream of the current device requests are planned. Requests below min_bytes stay with
    PyTorch's allocator, and so do requests that outlive the step.

    as_graph (GPU only): the first replay is captured as a CUDA graph at planned addresses, and
    later replays launch the graph. The inputs must be tensors and hold all that changes from step
    to step. In the step the host must not wait for the GPU. The results lie in the same tensors
    each time. Numbers that Python computes in the step, and `counts`, stay those of the capture.

    Other streams: as soon as planned memory is freed, another request may get it. So a tensor that
    another stream reads or writes must stay alive until the planned stream has waited for that
    stream. The modules of this project keep this rule in three ways. All-to-alls and copies to the
    host keep their tensors alive until then. Unsharded parameters, gradients and rounding buffers
    outlive the step. Memory that ranks map from each other does not come from this allocator.

    Use one StepMemory per device type at a time. An arena must live as long as any tensor in it. So
    a run raises RuntimeError if it needs an arena while tensors lie in another StepMemory's arena.
    """

    RECORD, REPLAY = 1, 2  # modes of csrc/allocator.cpp
    # what became of a replay's requests:
    #     hits         they got their planned address
    #     unplanned    they outlive the step, so they have no planned address
    #     unmatched    they match no request of the plan
    #     occupied     a live tensor lies at their planned address
    # all but the hits went to PyTorch's allocator
    COUNTS = ("hits", "unplanned", "unmatched", "occupied")

    def __init__(self, device: str = "cpu", min_bytes: int = 0, as_graph: bool = False):
        self.device = device
        self.device_type = device.partition(":")[0]
        self.align = ALLOCATOR_ALIGN_BYTES[self.device_type]
        self.min_bytes = min_bytes or MIN_PLANNED_BYTES[self.device_type]
        self.allocator = load_allocator(self.device_type)
        self.as_graph = as_graph
        self.graph = None  # of the step; it lives as long as its arena
        self.inputs = None  # the tensors that the graph reads
        self.results = None  # what the graph returns
        # if as_graph, the stream of all runs. Libraries allocate workspaces per stream, at first
        # use. That must not happen during the capture, so the warm-up has to use the same stream
        self.stream = None
        self.runs = 0  # number of runs so far, with the current one
        self.marks: list[tuple[int, str]] = []  # of the recorded step, as with_passes takes them
        self.requests = np.empty((0, 3), np.int64)  # of the recorded step: see `record`
        self.buffers: list[Lifetime] = []  # the planned requests: they do not outlive the step
        self.plan: AddressPlan | None = None
        self.plans = 0  # number of plans made so far
        self.arena = None  # a tensor of bytes, while the allocator points into it
        self.counts: dict[str, int] = {}  # of the last replay

    def run(self, step, *inputs):
        """Return step(*inputs). If the step becomes a graph, it runs on a stream of its own."""
        if not self.as_graph:
            return self.run_on_current_stream(step, inputs)
        self.stream = self.stream or CommStream(torch.device(self.device))
        # the stream waits until the inputs are computed and compute has read the last results
        with self.stream.after_compute():
            results = self.run_on_current_stream(step, inputs)
        # waits for the results; exposed, because the caller reads them next
        wait(self.stream.record_event())
        return results

    def run_on_current_stream(self, step, inputs):
        """Run the step: as usual in a warm-up, by the plan if there is one, or else recorded. After
        a recording, make the plan."""
        self.runs += 1
        self.drop_plan_with_misses()
        if self.runs <= WARM_UP_RUNS:
            return step(*inputs)
        if self.plan is not None:
            return self.replay(step, inputs)
        result = self.record(step, inputs)
        plan = solve(self.buffers, time_limit=10.0)
        check(self.buffers, plan.offsets, plan.peak)
        self.plan = plan
        self.plans += 1
        return result

    def drop_plan_with_misses(self) -> None:
        """Drop the plan if too few requests of the last replay got their planned addresses.

        While a tensor lies in the arena, the plan cannot be dropped. Then this run replays it, too.
        """
        if not self.counts or self.plans == MAX_PLANS:
            return
        too_few_hits = self.counts["hits"] < MIN_HITS * len(self.buffers)
        if too_few_hits and self.give_back():
            self.counts = {}
            self.plan = None

    def begin(self, mode: int) -> None:
        """Let the allocator record (mode RECORD) or serve (REPLAY) requests on the current stream.

        Requests on other streams go to PyTorch: a planned address may be given out again as soon as
        its memory is freed, which is right only in the order of one stream.
        """
        stream = None
        if self.device_type == "cuda":
            stream = torch.cuda.current_stream().cuda_stream
        self.allocator.begin(mode, self.min_bytes, self.align, stream)

    def record(self, step, inputs):
        """Run the step, and note its requests in self.requests and self.buffers.

        requests: a row (birth, death, size) per request, in the order of births. The death is -1 if
        the memory outlives the step. buffers: the requests with a death, and their passes.
        """
        global recorder
        if self.device_type == "cuda":  # so that PyTorch's pool then reserves only what steps need
            torch.cuda.empty_cache()
        self.marks = []
        self.begin(self.RECORD)
        recorder = self
        try:
            result = step(*inputs)
        finally:
            recorder = None
            n = self.allocator.end()
        numbers = self.allocator.recorded()[: 3 * n]
        requests = np.array(numbers, np.int64).reshape(n, 3)
        requests[:, 2] += -requests[:, 2] % self.align  # sizes, rounded up
        self.requests = requests
        buffers = [Lifetime(*r) for r in requests.tolist() if r[1] >= 0]
        self.buffers = with_passes(buffers, self.marks)
        self.counts = {}  # they belong to the last plan
        return result

    def replay(self, step, inputs):
        """Run the step at planned addresses; if as_graph, capture it once and launch the graph."""
        if self.arena is None:
            self.load_arena()
        if not self.as_graph:
            return self.run_at_planned_addresses(step, inputs)
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            self.inputs = [x.clone() for x in inputs]  # the graph reads these
            # the capture uses the stream of the warm-up. "thread_local": other threads, such as
            # NCCL's, may go on with calls that a capture forbids
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.results = self.run_at_planned_addresses(step, self.inputs)
            self.graph = graph
        torch._foreach_copy_(self.inputs, inputs)
        self.graph.replay()
        return self.results

    def run_at_planned_addresses(self, step, inputs):
        """Run the step, whose requests the allocator serves by plan, and set self.counts."""
        self.begin(self.REPLAY)
        try:
            return step(*inputs)
        finally:
            self.allocator.end()
            self.counts = dict(zip(self.COUNTS, self.allocator.counted()))

    def load_arena(self) -> None:
        """Allocate the arena, and give it and the plan to the allocator.

        Raises RuntimeError if tensors still lie in an earlier arena. That arena would be freed, and
        PyTorch would give the memory of these tensors to other tensors.
        """
        _, death, size = self.requests.T
        offsets = np.full_like(size, -1)  # -1: not planned, since the request outlives the step
        offsets[death >= 0] = self.plan.offsets
        entries = np.stack([size, offsets])
        arena = torch.empty(self.plan.peak, dtype=torch.uint8, device=self.device)
        used = self.allocator.load(arena.data_ptr(), entries.ctypes.data, len(size))
        if used:
            raise RuntimeError(
                f"{used} tensors of an earlier plan are still in use, so no other plan can begin: "
                "free them first"
            )
        self.arena = live_arena[self.device_type] = arena

    def give_back(self) -> bool:
        """Free the arena if no tensor lies in it. Return whether no arena is left."""
        if self.arena is None:
            return True
        # load(None) makes the allocator forget the arena, unless tensors still lie in it
        tensors_in_arena = self.allocator.load(None, None, 0)
        if tensors_in_arena:
            return False
        self.graph = None
        self.arena = live_arena[self.device_type] = None
        return True
