"""CUDA streams for what runs beside computation, and page-locked host memory to copy to.

Each kind of communication or copy has a stream of its own. It always follows one pattern: launch,
compute, wait.

    with stream.after_compute():            # starts when compute has come this far
        dist.all_reduce(x, group=group)
    event = stream.last_event()
    ...                                     # compute goes on, and hides the all-reduce
    wait(event)                             # compute waits; the host does not

On a CPU, or where overlap is switched off, a CommStream is the compute stream itself. Then all runs
in the order of the program, and no wait is needed, so every test of the engine runs without a GPU.

Host buffers are allocated once. They are page-locked, so that copies run beside kernels, and
`carve` cuts one buffer of bytes into tensors.

Left out: a general transfer queue. shard.py, attention.py and offload.py each write down, in their
first docstrings, what hides each of their transfers.
"""

import contextlib
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

# ---------------------------------------------------------------------------- streams


class CommStream:
    """A CUDA stream for one kind of communication. It has high priority, so that its few thread
    blocks are scheduled before those of a large compute kernel.

    On a CPU, or with `overlap` off, it is the compute stream itself: then everything happens in the
    order of the program, and nothing needs a wait.
    """

    def __init__(self, device: torch.device, overlap: bool = True):
        self.stream = None
        self.overlap = overlap
        if overlap and device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)

    def after_compute(self):
        """Launch what follows on this stream, after all that compute has enqueued so far."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        return self.beside_compute()

    def beside_compute(self):
        """Launch what follows on this stream, which waits for no computation."""
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def last_event(self):
        """An event behind all that was launched so far, for `wait`; None where nothing can wait."""
        return self.stream.record_event() if self.stream else None

    def used(self, *buffers: Tensor) -> None:
        """Mark buffers as read on the current stream: from here on they may be filled again. Does
        nothing; the streams of tests, which start late, fill the buffers with NaN here."""


def wait(event) -> None:
    """Let the current stream go on when the event is reached; the host does not stop."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


@dataclass
class Way:
    """Tensors on their way from tokens to heads, back, or around a ring."""

    arrived: list[Tensor] | Tensor
    event: object = None  # they are there
    sent: list[Tensor] = field(default_factory=list)  # read until then

    def wait(self) -> list[Tensor] | Tensor:
        """Let compute wait until they are there, and return them."""
        wait(self.event)
        self.sent.clear()
        return self.arrived


@dataclass
class Buffer:
    """A fixed place for a whole weight, for one micro-batch's whole gradient, or for states that
    visit. A gradient or state that is put there waits for its event; a weight, for compute."""

    data: Tensor | list[Tensor]  # (S,); for states, one tensor per state
    holder: object = None  # the ShardedParam whose newest weight it holds, or will at `event`
    # of param_gather: the weight is here; of grad_scatter: the gradient was read, the place is free
    event: object = None


# ---------------------------------------------------------------------------- host memory

GIB = 2**30
NO_LIMIT = 2.0**60  # bytes of a memory that is not planned for
HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # of this machine
HOST_ALIGN_BYTES = 512  # where a tensor starts in a host buffer


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return the bytes and the name of the largest of GiB, MiB and KiB of which there is at least
    one; of less than a KiB the smallest, and of nothing the largest."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if nbytes >= unit or not nbytes:
            return unit, name
    return 2**10, "KiB"


def in_unit(nbytes: float, digits: int = 1) -> str:
    """Return bytes in words, so that a small size is not printed as 0.0 GiB: '131.7 GiB',
    '1.3 MiB'; 'any size' of a memory that has no limit."""
    if nbytes >= NO_LIMIT / 2:
        return "any size"
    unit, name = unit_of(nbytes)
    return f"{nbytes / unit:.{digits}f} {name}"


def host_budget(ranks: int, asked: int | None) -> float:
    """Return the bytes of host memory that a rank may use for states and activations: its share of
    what was asked for, or else of seven eighths of what control groups and the machine allow.
    ranks: how many share the node; asked: --host-memory, bytes of the node. Raises ValueError if
    less is allowed than was asked for."""
    limits = [HOST_BYTES]
    path = Path("/proc/self/cgroup").read_text().partition("::")[2].strip()
    group = Path("/sys/fs/cgroup" + path)
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int((folder / "memory.max").read_text()))
    allowed = min(limits)
    if (asked or 0) > allowed:
        raise ValueError(
            f"--host-memory {in_unit(asked)}: this machine, or its control group, "
            f"allows {in_unit(allowed)}, and other things need some of it"
        )
    return (allowed * 7 // 8 if asked is None else asked) / ranks


def pin_host_buffers(sizes: list[int], pin: bool) -> list[Tensor]:
    """Return host buffers of so many bytes, of zeros, page-locked if `pin`. Raises MemoryError.

    Page faults are what takes the time: huge pages have fewer, and threads, as many as cores, touch
    buffers in parallel. (PyTorch's own pinned allocator would round up to a power of two.) A copy
    must not cross two registrations, so a buffer has one of its own.
    """
    if not pin:
        return [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    cudart = torch.cuda.cudart()
    device = torch.cuda.current_device()

    def lock(size: int) -> Tensor:
        torch.cuda.set_device(device)  # of this thread
        mapped = max(1, size)  # a rank may save nothing
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, mapped, flags=private)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # before a page is touched
        view = memoryview(memory)
        buffer = torch.frombuffer(view, dtype=torch.uint8)
        buffer[:: mmap.PAGESIZE] = 0  # what is mapped is 0
        address = buffer.data_ptr()
        error = int(cudart.cudaHostRegister(address, mapped, 0))
        if error:
            raise MemoryError(
                f"pinning {in_unit(size)} of {in_unit(sum(sizes))} of host "
                f"memory failed: CUDA error {error}; lower --host-memory"
            )
        # the call keeps the mapping until it is unregistered
        gone = weakref.finalize(view, lambda _: cudart.cudaHostUnregister(address), memory)
        gone.atexit = False
        return buffer[:size]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lock, sizes))


def aligned(size: int) -> int:
    return -(-size // HOST_ALIGN_BYTES) * HOST_ALIGN_BYTES


def buffer_bytes(tensors: dict[object, Tensor]) -> int:
    """Return the bytes of a buffer that has room for such tensors."""
    return sum(aligned(t.nbytes) for t in tensors.values())


def carve(memory: Tensor, tensors: dict[object, Tensor]) -> dict[object, Tensor]:
    """Return room for such tensors, one after the other in a buffer of bytes."""
    places = {}
    start = 0
    for name, t in tensors.items():
        place = memory[start : start + t.nbytes]
        places[name] = place.view(t.dtype).view(t.shape)
        start += aligned(t.nbytes)
    return places
