"""A race detector for streams: find accesses to the same bytes that no wait separates.

A GPU runs streams concurrently, so a missing wait shows only now and then, as a wrong number. This
checker runs on a CPU, and finds a missing wait each time. It replaces each CommStream by a
simulated one. A case runs once, in the order of the program, and a Recorder writes a *trace*, which
is a list of tuples:

    ("access", stream, memory, first, end, write, lines)   an operation on a stream reads or writes
                                                           bytes first to end of some memory
    ("mark", stream, event)             an event is recorded on a stream
    ("wait", stream, event, site)       a stream, or the host, waits for an event
    ("follow", stream, other, site)     a stream waits for all work launched on another one so far
    ("free", memory, stream)            the last tensor in some memory is gone; `stream` is the
                                        stream that allocated the memory

`find_races(trace)` then goes through the trace with a vector clock per stream. Two accesses to the
same bytes, at least one of them a write, are a race unless the stream of the later access has
waited for the earlier access. For example, this is a race, because compute does not wait for the
write:

    compute    x = torch.zeros(8)                              x.sum()
    stream            ... waits for compute, writes x ...

PyTorch's caching allocator reuses freed memory on the stream that allocated it. So when memory is
freed, that stream must have waited for all accesses to the memory.

`find_races(trace, ignored_site)` finds the races that there would be if one line (file, number) of
the source did not wait. It needs no second run of the case.

How the checker sees a program:

    collectives        operations on the current stream, as NCCL runs synchronous collectives
    messages           operations on a stream per communicator (pipeline.Link)
    pinned memory      belongs to the host. A copy between it and other memory runs on the current
                       stream. An operation whose tensors are all pinned runs on the host.
    the host           launches in the order of the program. It waits for a stream when it reads a
                       value (item), copies without non_blocking, or calls event.synchronize()

It leaves out all-to-alls by copies between GPUs, and CUDA graphs, because they need GPUs. A strided
tensor counts as all bytes from its first to its last element.
"""

import contextlib
import functools
import linecache
import math
import re
import sys
import weakref
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import attention
import checkpoint
import offload
import optim
import pipeline
import replay
import shard
import streams
import train

ROOT = Path(streams.__file__).parent
ENGINE = {path.name for path in ROOT.glob("*.py")} - {"test_all.py"}
# Names of streams in a trace. WRITER is the thread that writes checkpoints, and WRITER_ON_GPU is
# what this thread reads from the GPU.
COMPUTE, HOST, WRITER, WRITER_ON_GPU = "compute", "host", "writer", "writer on the GPU"

# ---------------------------------------------------------------------------- recording


@functools.cache
def engine_file(code: CodeType) -> str | None:
    """Return the name of the engine's file that has this code, or None if no engine file has it."""
    path = Path(code.co_filename)
    return path.name if path.name in ENGINE and path.parent == ROOT else None


def caller_lines(depth: int = 3) -> tuple[tuple[str, int], ...]:
    """Return the engine's innermost lines (file, number) on the call stack, at most `depth`."""
    frame = sys._getframe(2)
    lines = []
    while frame and len(lines) < depth:
        if name := engine_file(frame.f_code):
            lines.append((name, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def waiting_line() -> tuple[str, int] | None:
    """Return the engine's line (file, number) that waits, outside of streams.py."""
    frame = sys._getframe(2)
    while frame and (name := engine_file(frame.f_code)) in (None, "streams.py"):
        frame = frame.f_back
    return (name, frame.f_lineno) if frame else None


# Returns whether the storage behind a weak reference's address is gone. It is called at each
# operation, so it must be fast.
expired = torch.UntypedStorage._expired


class Memory:
    """A storage, its number, the stream that allocated it, and whether it is the host's memory."""

    def __init__(self, storage: torch.UntypedStorage, number: int, stream: str, on_host: bool):
        self.ref = StorageWeakRef(storage)
        self.address = self.ref.cdata
        self.number = number
        self.stream = stream
        self.on_host = on_host


class Operator:
    """What an operator does with its arguments, read from its schema."""

    SYNCHRONIZES = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero")
    READS_NOTHING = ("empty", "new_", "zeros_like", "ones_like", "full_like", "aten::set_")

    def __init__(self, func):
        schema = func._schema
        self.name = schema.name
        self.is_collective = self.name.startswith("c10d::")
        self.is_message = self.is_collective and ("send" in self.name or "recv" in self.name)

        # Whether it writes each argument. c10d's schemas do not say it: a collective with an output
        # and an input has its output first, and other collectives work in place.
        has_output_and_input = "base" in self.name or "alltoall" in self.name
        self.writes_at = []
        for i, argument in enumerate(schema.arguments):
            if not self.is_collective:
                self.writes_at.append(self.writes(argument))
            else:
                self.writes_at.append(i == 0 or not has_output_and_input)
        self.writes_named = {a.name: w for a, w in zip(schema.arguments, self.writes_at)}

        returns = schema.returns
        self.is_view = (
            not any(self.writes_at)
            and bool(returns)
            and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        )
        self.reads_nothing = any(part in self.name for part in self.READS_NOTHING)
        self.allocates_only = "empty" in self.name
        self.synchronizes = self.name in self.SYNCHRONIZES
        names = [argument.name for argument in schema.arguments]
        self.non_blocking_at = names.index("non_blocking") if "non_blocking" in names else None

    @staticmethod
    def writes(argument) -> bool:
        """Return whether the schema marks an argument as written, as in `Tensor(a!) self`."""
        return bool(argument.alias_info and argument.alias_info.is_write)

    def is_non_blocking(self, args: tuple, kwargs: dict) -> bool:
        """Return whether a call of the operator has non_blocking=True, by position or by name."""
        position = self.non_blocking_at
        if position is not None and position < len(args):
            return bool(args[position])
        return bool(kwargs.get("non_blocking"))


operator = functools.cache(Operator)


def tensors_in(x):
    """Yield the tensors that have bytes in an argument, also in nested lists."""
    if isinstance(x, torch.Tensor):
        if x.device.type != "meta" and x.numel():
            yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors_in(y)


class Recorder(TorchDispatchMode):
    """A context that records the trace of all operators that run in it."""

    current: "Recorder | None" = None  # the active recorder, to which simulated streams add

    def __init__(self):
        super().__init__()
        self.trace = []
        self.names = {}  # stream -> its name in messages
        self.stack = [COMPUTE]  # the current stream is the last one
        self.memory: dict[int, Memory] = {}  # by the address of the storage
        # the numbers of shared memory: more than one stream accesses it. They stay after it is
        # freed
        self.shared_numbers = set()
        self.freed: list[Memory] = []  # shared memory that was freed since the last operation
        self.made = 0  # the last number given to a storage, a stream or an event

    def __enter__(self):
        Recorder.current = self
        return super().__enter__()

    def __exit__(self, *error):
        self.note_freed()
        Recorder.current = None
        return super().__exit__(*error)

    def number(self) -> int:
        """Return a new number."""
        self.made += 1
        return self.made

    # -- memory

    def memory_of(self, t: torch.Tensor, on_host: bool = False) -> Memory:
        """Return a tensor's memory.

        If it was not seen before, it was allocated by the current stream, or by the host.
        """
        storage = t.untyped_storage()
        key = storage._cdata
        memory = self.memory.get(key)
        if memory is None or expired(memory.address):
            stream = HOST if on_host else self.stack[-1]
            memory = Memory(storage, self.number(), stream, on_host)
            self.memory[key] = memory
        return memory

    def note_freed(self) -> None:
        """Add a "free" for each shared memory that was freed since the last operation."""
        while self.freed:
            memory = self.freed.pop(0)
            self.trace.append(("free", memory.number, memory.stream))

    def access(self, t: torch.Tensor, write: bool, stream: str, where: tuple = ()) -> None:
        """Add an access to all bytes of a tensor. where: the lines that make it."""
        memory = self.memory_of(t)
        first = t.storage_offset() * t.itemsize
        elements = sum((n - 1) * abs(step) for n, step in zip(t.shape, t.stride())) + 1
        end = first + elements * t.itemsize
        if stream != memory.stream and memory.number not in self.shared_numbers:
            self.shared_numbers.add(memory.number)
            if not memory.on_host:
                weakref.finalize(t.untyped_storage(), self.freed.append, memory)
        where = where or caller_lines()
        self.trace.append(("access", stream, memory.number, first, end, write, where))

    # -- operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.note_freed()
        op = operator(func)
        out = func(*args, **kwargs)
        if op.is_view or op.is_message:
            return out  # a view touches no bytes; launch_message records messages

        # the accesses to its arguments
        accesses = []
        if not op.reads_nothing:
            for value, write in zip(args, op.writes_at):
                accesses += [(t, write) for t in tensors_in(value)]
            for name, value in kwargs.items():
                accesses += [(t, op.writes_named.get(name, False)) for t in tensors_in(value)]

        # It runs on the host if all of its tensors are pinned memory.
        known = {t.untyped_storage()._cdata for t, _ in accesses}
        hosts = [self.memory_of(t).on_host for t, _ in accesses]
        on_host = bool(hosts) and all(hosts)
        stream = HOST if on_host else self.stack[-1]

        # New memory in its result is allocated here, and written unless it is empty.
        for t in tensors_in(out):
            if t.untyped_storage()._cdata not in known:
                self.memory_of(t, on_host)
                if not op.allocates_only:
                    accesses.append((t, True))
        where = caller_lines()
        for t, write in accesses:
            self.access(t, write, stream, where)

        # The host waits for the stream if it reads a value, or copies without non_blocking.
        copies_to_or_from_host = any(hosts) and not on_host
        blocking_copy = copies_to_or_from_host and not op.is_non_blocking(args, kwargs)
        if op.synchronizes or blocking_copy:
            self.trace.append(("follow", HOST, stream, None))
        return out

    def shared_trace(self) -> list[tuple]:
        """Return the trace without accesses to memory that only one stream uses."""
        return [
            event for event in self.trace if event[0] != "access" or event[2] in self.shared_numbers
        ]


class SimulatedEvent:
    """Stands for a CUDA event. Recording it adds a "mark" to the trace."""

    def __init__(self, stream: str):
        self.number = Recorder.current.number()
        Recorder.current.trace.append(("mark", stream, self.number))

    def synchronize(self) -> None:
        Recorder.current.trace.append(("wait", HOST, self.number, waiting_line()))


def wait(event: SimulatedEvent | None) -> None:
    """Stands for streams.wait: the current stream waits for an event."""
    recorder = Recorder.current
    if event is not None:
        recorder.trace.append(("wait", recorder.stack[-1], event.number, waiting_line()))


class SimulatedStream(streams.CommStream):
    """Stands for a CommStream. Its work runs at once, and is recorded as work of this stream."""

    def __init__(self, device: torch.device, overlap: bool = True):
        self.overlap = overlap
        self.stream = None
        if overlap:
            caller = sys._getframe(1)
            line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
            assigned = re.search(r"(\w+) = CommStream", line)
            self.name = f"{assigned[1] if assigned else 'stream'} {Recorder.current.number()}"
            self.stream = SimpleNamespace(device=device)

    def after_compute(self):
        if self.stream:
            recorder = Recorder.current
            recorder.trace.append(("follow", self.name, recorder.stack[-1], waiting_line()))
        return self.beside_compute()

    def beside_compute(self):
        return self if self.stream else contextlib.nullcontext()

    def __enter__(self):
        Recorder.current.stack.append(self.name)

    def __exit__(self, *error):
        Recorder.current.stack.pop()

    def record_event(self):
        return SimulatedEvent(self.name) if self.stream else None


class SimulatedWork:
    """Stands for a launched message. Its wait makes the current stream wait."""

    def __init__(self, work: dist.Work, stream: str):
        self.work = work
        self.event = SimulatedEvent(stream)

    def wait(self) -> None:
        self.work.wait()
        wait(self.event)


def launch_message(link: pipeline.Link, operation, x: torch.Tensor, launch=pipeline.Link.launch):
    """Stands for Link.launch.

    As with NCCL, a message runs on a stream of its communicator, after the current stream's work.
    """
    recorder = Recorder.current
    stream = f"messages of {id(link.group)}"
    recorder.names.setdefault(stream, f"messages {len(recorder.names)}")
    recorder.trace.append(("follow", stream, recorder.stack[-1], None))
    recorder.access(x, operation is dist.irecv, stream)
    return SimulatedWork(launch(link, operation, x), stream)


def pin_host_buffers(sizes: list[int], pin: bool, allocate=streams.pin_host_buffers):
    """Stands for streams.pin_host_buffers. Its buffers are the host's memory, but not pinned."""
    with _disable_current_modes():
        buffers = allocate(sizes, pin)
    for buffer in buffers:
        Recorder.current.memory_of(buffer, on_host=True)
    return buffers


class RecordedPool(ThreadPoolExecutor):
    """Stands for checkpoint.Saver's thread, which reads the states that it writes to the disk."""

    def submit(self, write, *args):
        recorder = Recorder.current
        if write is checkpoint.write_states:
            recorder.trace.append(("follow", WRITER, HOST, None))
            # The thread may launch a copy from the GPU at any time until it is done. So the copy is
            # ordered after the work that compute has launched before, but not before later work.
            recorder.trace.append(("follow", WRITER_ON_GPU, COMPUTE, None))
            for part in args[1].values():
                if not part.saved_here:
                    continue
                for tensor in (part.stored, part.weight):
                    if tensor is not None:
                        on_host = recorder.memory_of(tensor).on_host
                        recorder.access(tensor, False, WRITER if on_host else WRITER_ON_GPU)
        job = super().submit(write, *args)
        if write is checkpoint.write_states:
            result = job.result

            def wait_for_result(*timeout):
                for stream in (WRITER, WRITER_ON_GPU):
                    recorder.trace.append(("follow", HOST, stream, None))
                return result(*timeout)

            job.result = wait_for_result
        return job


def simulate_streams() -> None:
    """Replace streams, waits, messages and pinned memory. It lasts until this process ends."""
    for module in (attention, offload, optim, replay, shard, streams):
        module.wait = wait
    for module in (offload, optim, replay, shard, train):
        module.CommStream = SimulatedStream
    for module in (checkpoint, offload, optim):
        module.pin_host_buffers = pin_host_buffers
    pipeline.Link.launch = launch_message
    attention.gpus_reach_each_other = lambda: False
    checkpoint.ThreadPoolExecutor = RecordedPool
    # the allocator is for GPUs, and the first two runs of a step do without it
    replay.load_allocator = lambda kind: None


# ---------------------------------------------------------------------------- finding races


def join(clock: dict, other: dict) -> None:
    """Raise `clock` to `other` where that is later, because the stream of `clock` has waited for
    everything that `other` has waited for."""
    for stream, epoch in other.items():
        if clock.get(stream, 0) < epoch:
            clock[stream] = epoch


def waiting_sites(trace: list[tuple]) -> set[tuple[str, int]]:
    """Return the lines (file, number) of the source at which a trace waits."""
    return {e[3] for e in trace if e[0] in ("wait", "follow") and e[3] is not None}


def find_races(
    trace: list[tuple], ignored_site: tuple[str, int] | None = None, most: float = math.inf
) -> Counter:
    """Return the races of a trace, and how often each one occurs.

    ignored_site: the line whose waits are ignored. most: how many different races are enough; the
    search ends when it has found them.

    A race is (earlier access, later access), each of them (write, stream, lines). A later access
    ("free", stream, ()) means that the memory may be reused on the stream.

    A stream's epoch counts its accesses. Its vector clock says up to which epoch of each stream it
    has waited.
    """
    clocks = defaultdict(dict)  # stream -> its vector clock
    events = {}  # event -> the vector clock of its stream when it was recorded
    # memory -> {(stream, write, first byte, end): (epoch, lines) of the last such access}
    accesses = defaultdict(dict)
    # Work on a stream comes after everything that the host did before it launched the work, so each
    # access joins its stream's clock with the host's. To save time, this is done only if the host's
    # clock has changed (host_version) since the stream joined it last (seen_host).
    host_version, seen_host = 0, defaultdict(int)
    races = Counter()
    for kind, *rest in trace:
        if len(races) >= most:
            break
        if kind == "access":
            stream, number, first, end, write, where = rest
            clock = clocks[stream]
            if stream == HOST:
                host_version += 1
            elif seen_host[stream] != host_version:
                seen_host[stream] = host_version
                join(clock, clocks[HOST])

            for (other, wrote, a, b), (epoch, earlier) in accesses[number].items():
                overlaps = a < end and first < b
                conflict = other != stream and (write or wrote) and overlaps
                if conflict and clock.get(other, 0) < epoch:
                    races[(wrote, other, earlier), (write, stream, where)] += 1

            clock[stream] = clock.get(stream, 0) + 1
            accesses[number][stream, write, first, end] = clock[stream], where
        elif kind == "mark":
            stream, event = rest
            events[event] = dict(clocks[stream])
        elif kind == "wait":
            stream, event, site = rest
            if site is None or site != ignored_site:
                join(clocks[stream], events[event])
                if stream == HOST:
                    host_version += 1
        elif kind == "follow":
            stream, other, site = rest
            if site is None or site != ignored_site:
                join(clocks[stream], clocks[other])
                if stream == HOST:
                    host_version += 1
        else:  # "free"
            number, stream = rest
            clock = clocks[stream]
            for (other, wrote, _, _), (epoch, earlier) in accesses.pop(number, {}).items():
                if other != stream and clock.get(other, 0) < epoch:
                    races[(wrote, other, earlier), ("free", stream, ())] += 1
    return races


def describe(race: tuple, names: dict[str, str]) -> str:
    """Return a race in words: "write on prefetch 7 [shard.py:400] || read on compute [...]"."""

    def in_words(access) -> str:
        write, stream, where = access
        if write == "free":
            return f"its memory is reused on {names.get(stream, stream)}"
        lines = " < ".join(f"{file}:{line}" for file, line in where)
        return f"{'write' if write else 'read'} on {names.get(stream, stream)} [{lines}]"

    return " || ".join(map(in_words, race))
