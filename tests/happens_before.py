"""A happens-before checker: which accesses to the same bytes does no wait separate?

A GPU runs streams beside each other, so a missing wait shows only now and then, in a wrong number.
This checker runs on a CPU and needs no luck. Each CommStream is replaced by a pretended stream. A
case runs once, in the order of the program, and a Recorder notes a *trace*:

    access   an operation on a stream reads or writes bytes of a tensor
    mark     an event is recorded on a stream
    wait     a stream, or the host, waits for an event
    follow   a stream waits for all that another one has been given so far
    free     the last tensor in some memory is gone

`unordered(trace)` then goes through the trace with a vector clock per stream. Two accesses to the
same bytes, at least one of which writes, are a pair unless the later one's stream has waited for
the earlier one. Memory that is freed may be given to others on the stream that allocated it (the
rule of PyTorch's caching allocator), so that stream must have waited for all accesses to it.
`unordered(trace, left_out)` does the same as if one line of the source did not wait. It needs no
second run of the case.

What counts as what:

    collectives        operations on the current stream, as NCCL runs them if they are synchronous
    messages           operations on a stream per communicator (pipeline.Link)
    pinned memory      belongs to the host: a copy between it and other memory runs on the current
                       stream; an operation on pinned memory only runs on the host
    the host           launches in the order of the program. It waits for a stream where it reads a
                       value (item), copies without non_blocking, or calls event.synchronize()

Left out: all-to-alls by copies between GPUs, and CUDA graphs, which need GPUs. The bytes of a
strided tensor are all from its first to its last one.
"""

import contextlib
import functools
import linecache
import re
import sys
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
COMPUTE, HOST, WRITER = "compute", "host", "writer"  # WRITER: the thread that writes checkpoints

# ---------------------------------------------------------------------------- what runs is recorded


@functools.cache
def engine_file(code: CodeType) -> str | None:
    """Return the name of the engine's file that code belongs to, None if it is another file."""
    path = Path(code.co_filename)
    return path.name if path.name in ENGINE and path.parent == ROOT else None


def caller_lines(depth: int = 3) -> tuple[tuple[str, int], ...]:
    """Return the innermost lines (file, number) of the engine that are running."""
    frame = sys._getframe(2)
    lines = []
    while frame and len(lines) < depth:
        if name := engine_file(frame.f_code):
            lines.append((name, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def waiting_line() -> tuple[str, int] | None:
    """Return the engine's line (file, number) that waits: streams.py only passes a wait on."""
    frame = sys._getframe(2)
    while frame and (name := engine_file(frame.f_code)) in (None, "streams.py"):
        frame = frame.f_back
    return (name, frame.f_lineno) if frame else None


expired = torch.UntypedStorage._expired  # of a weak reference's address: asked at each operation


class Memory:
    """A storage: its number, the stream that allocated it, and whether it is the host's."""

    def __init__(self, storage: torch.UntypedStorage, number: int, stream: str, on_host: bool):
        self.ref = StorageWeakRef(storage)
        self.address = self.ref.cdata
        self.number = number
        self.stream = stream
        self.on_host = on_host


class Operator:
    """What an operator does to its arguments, by its schema."""

    SYNCHRONIZES = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero")
    READS_NOTHING = ("empty", "new_", "zeros_like", "ones_like", "full_like", "aten::set_")

    def __init__(self, func):
        schema = func._schema
        self.name = schema.name
        self.is_collective = self.name.startswith("c10d::")
        self.is_message = self.is_collective and ("send" in self.name or "recv" in self.name)
        # of a collective that has an output and an input the output comes first
        one_way = "base" in self.name or "alltoall" in self.name
        self.positional = [
            (not one_way or i == 0) if self.is_collective else self.writes(argument)
            for i, argument in enumerate(schema.arguments)
        ]
        self.named = {a.name: w for a, w in zip(schema.arguments, self.positional)}
        returns = schema.returns
        self.is_view = (
            not any(self.positional)
            and bool(returns)
            and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        )
        self.reads_nothing = any(part in self.name for part in self.READS_NOTHING)
        self.allocates_only = "empty" in self.name
        self.synchronizes = self.name in self.SYNCHRONIZES
        names = [argument.name for argument in schema.arguments]
        self.non_blocking_at = names.index("non_blocking") if "non_blocking" in names else 99

    @staticmethod
    def writes(argument) -> bool:
        return bool(argument.alias_info and argument.alias_info.is_write)


operator = functools.cache(Operator)


def tensors_in(x):
    if isinstance(x, torch.Tensor):
        if x.device.type != "meta" and x.numel():
            yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors_in(y)


class Recorder(TorchDispatchMode):
    """Records the trace of what runs inside it, on pretended streams."""

    current: "Recorder | None" = None  # the one that pretended streams tell

    def __init__(self):
        super().__init__()
        self.trace = []
        self.names = {}  # of streams, in words
        self.stack = [COMPUTE]  # the current stream is the last one
        self.memory: dict[int, Memory] = {}  # by the storage's address
        self.shared: dict[int, Memory] = {}  # that other streams than its own access
        self.shared_numbers = set()
        self.made = 0  # storages, streams and events, for their numbers

    def __enter__(self):
        Recorder.current = self
        return super().__enter__()

    def __exit__(self, *error):
        self.note_freed()
        Recorder.current = None
        return super().__exit__(*error)

    def number(self) -> int:
        self.made += 1
        return self.made

    # -- memory

    def memory_of(self, t: torch.Tensor, on_host: bool = False) -> Memory:
        """Return the memory of a tensor. Memory that was not seen before belongs to the current
        stream, or to the host."""
        storage = t.untyped_storage()
        key = storage._cdata
        memory = self.memory.get(key)
        if memory is None or expired(memory.address):
            stream = HOST if on_host else self.stack[-1]
            memory = Memory(storage, self.number(), stream, on_host)
            self.memory[key] = memory
        return memory

    def note_freed(self) -> None:
        """Note which shared memory is gone since the last operation."""
        gone = [key for key, memory in self.shared.items() if expired(memory.address)]
        for key in gone:
            memory = self.shared.pop(key)
            if not memory.on_host:
                self.trace.append(("free", memory.number, memory.stream))

    def access(self, t: torch.Tensor, write: bool, stream: str, where: tuple = ()) -> None:
        memory = self.memory_of(t)
        first = t.storage_offset() * t.itemsize
        span = sum((n - 1) * abs(step) for n, step in zip(t.shape, t.stride())) + 1
        end = first + span * t.itemsize
        if stream != memory.stream and memory.number not in self.shared_numbers:
            self.shared_numbers.add(memory.number)
            self.shared[t.untyped_storage()._cdata] = memory
        where = where or caller_lines()
        self.trace.append(("access", stream, memory.number, first, end, write, where))

    # -- operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.note_freed()
        op = operator(func)
        out = func(*args, **kwargs)
        if op.is_view or op.is_message:
            return out
        accesses = []
        if not op.reads_nothing:
            for value, write in zip(args, op.positional):
                accesses += [(t, write) for t in tensors_in(value)]
            for name, value in kwargs.items():
                accesses += [(t, op.named.get(name, False)) for t in tensors_in(value)]
        known = {t.untyped_storage()._cdata for t, _ in accesses}
        hosts = [self.memory_of(t).on_host for t, _ in accesses]
        on_host = bool(hosts) and all(hosts)
        stream = HOST if on_host else self.stack[-1]
        for t in tensors_in(out):
            if t.untyped_storage()._cdata not in known:
                self.memory_of(t, on_host)
                if not op.allocates_only:
                    accesses.append((t, True))
        where = caller_lines()
        for t, write in accesses:
            self.access(t, write, stream, where)
        blocking = not any(args[op.non_blocking_at :][:1]) and not kwargs.get("non_blocking")
        blocking_copy = any(hosts) and not on_host and blocking
        if op.synchronizes or blocking_copy:
            self.trace.append(("follow", HOST, stream, None))
        return out

    def shared_trace(self) -> list[tuple]:
        """Return the trace without accesses to memory that only one stream uses."""
        return [
            event for event in self.trace if event[0] != "access" or event[2] in self.shared_numbers
        ]


class PretendedEvent:
    """An event: a number in the trace."""

    def __init__(self, stream: str):
        self.number = Recorder.current.number()
        Recorder.current.trace.append(("mark", stream, self.number))

    def synchronize(self) -> None:
        Recorder.current.trace.append(("wait", HOST, self.number, waiting_line()))


def wait(event: PretendedEvent | None) -> None:
    """Stands for streams.wait."""
    recorder = Recorder.current
    if event is not None:
        recorder.trace.append(("wait", recorder.stack[-1], event.number, waiting_line()))


class PretendedStream(streams.CommStream):
    """Stands for a CommStream, whose work runs at once, and is recorded as this stream's."""

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
        return PretendedEvent(self.name) if self.stream else None


class PretendedWork:
    """Stands for the work of a message, whose wait lets the current stream wait."""

    def __init__(self, work: dist.Work, stream: str):
        self.work = work
        self.event = PretendedEvent(stream)

    def wait(self) -> None:
        self.work.wait()
        wait(self.event)


def launch_message(link: pipeline.Link, way, x: torch.Tensor, launch=pipeline.Link.launch):
    """Stands for Link.launch: NCCL runs a message on its communicator's stream, behind compute."""
    recorder = Recorder.current
    stream = f"messages of {id(link.group)}"
    recorder.names.setdefault(stream, f"messages {len(recorder.names)}")
    recorder.trace.append(("follow", stream, recorder.stack[-1], None))
    recorder.access(x, way is dist.irecv, stream)
    return PretendedWork(launch(link, way, x), stream)


def pin_host_buffers(sizes: list[int], pin: bool, allocate=streams.pin_host_buffers):
    """Stands for streams.pin_host_buffers: what it returns belongs to the host."""
    with _disable_current_modes():
        buffers = allocate(sizes, pin)
    for buffer in buffers:
        Recorder.current.memory_of(buffer, on_host=True)
    return buffers


class RecordedPool(ThreadPoolExecutor):
    """Stands for checkpoint.Saver's thread, which reads what it writes to the disk."""

    def submit(self, write, *args):
        recorder = Recorder.current
        if write is checkpoint.write_states:
            recorder.trace.append(("follow", WRITER, HOST, None))
            for part in args[1].values():
                if part.saved_here:
                    on_host = recorder.memory_of(part.values).on_host
                    recorder.access(part.values, False, WRITER if on_host else COMPUTE)
        job = super().submit(write, *args)
        if write is checkpoint.write_states:
            result = job.result

            def wait_for_result(*timeout):
                recorder.trace.append(("follow", HOST, WRITER, None))
                return result(*timeout)

            job.result = wait_for_result
        return job


def pretend() -> None:
    """Replace, in this process for good, streams, waits, messages and pinned memory."""
    for module in (attention, offload, optim, replay, shard, streams):
        module.wait = wait
    for module in (offload, optim, replay, shard, train):
        module.CommStream = PretendedStream
    for module in (checkpoint, offload, optim):
        module.pin_host_buffers = pin_host_buffers
    pipeline.Link.launch = launch_message
    attention.gpus_reach_each_other = lambda: False
    checkpoint.ThreadPoolExecutor = RecordedPool
    replay.load_allocator = lambda kind: None  # a step's first two runs need none


# ---------------------------------------------------------------------------- what has no order


def join(clock: dict, other: dict) -> None:
    for stream, epoch in other.items():
        if clock.get(stream, 0) < epoch:
            clock[stream] = epoch


def sites(trace: list[tuple]) -> set[tuple[str, int]]:
    """Return the lines (file, number) that wait in a trace."""
    return {e[3] for e in trace if e[0] in ("wait", "follow") and e[3] is not None}


def unordered(trace: list[tuple], left_out: tuple[str, int] | None = None) -> Counter:
    """Return the pairs of accesses that no wait separates: (earlier, later) -> how often, each a
    kind, a stream and lines. left_out: a line that does not wait."""
    clocks = defaultdict(dict)  # by stream: what it has waited for, as an epoch of each stream
    events = {}
    accesses = defaultdict(dict)  # by memory: the last one of each stream, kind and range
    host_version, seen_host = 0, defaultdict(int)
    pairs = Counter()
    for kind, *rest in trace:
        if kind == "access":
            stream, number, first, end, write, where = rest
            clock = clocks[stream]
            if stream == HOST:
                host_version += 1
            elif seen_host[stream] != host_version:  # nothing runs before it was launched
                seen_host[stream] = host_version
                join(clock, clocks[HOST])
            for (other, wrote, a, b), (epoch, earlier) in accesses[number].items():
                conflict = other != stream and (write or wrote) and a < end and first < b
                if conflict and clock.get(other, 0) < epoch:
                    pairs[(wrote, other, earlier), (write, stream, where)] += 1
            clock[stream] = clock.get(stream, 0) + 1
            accesses[number][stream, write, first, end] = clock[stream], where
        elif kind == "mark":
            stream, event = rest
            events[event] = dict(clocks[stream])
        elif kind == "wait":
            stream, event, site = rest
            if site is None or site != left_out:
                join(clocks[stream], events[event])
                host_version += stream == HOST
        elif kind == "follow":
            stream, other, site = rest
            if site is None or site != left_out:
                join(clocks[stream], clocks[other])
                host_version += stream == HOST
        else:
            number, stream = rest
            clock = clocks[stream]
            for (other, wrote, _, _), (epoch, earlier) in accesses.pop(number, {}).items():
                if other != stream and clock.get(other, 0) < epoch:
                    pairs[(wrote, other, earlier), ("free", stream, ())] += 1
    return pairs


def describe(pair: tuple, names: dict[str, str]) -> str:
    """Return a pair in words."""

    def in_words(access) -> str:
        write, stream, where = access
        if write == "free":
            return f"its memory is given to others on {names.get(stream, stream)}"
        lines = " < ".join(f"{file}:{line}" for file, line in where)
        return f"{'write' if write else 'read'} on {names.get(stream, stream)} [{lines}]"

    return " || ".join(map(in_words, pair))
