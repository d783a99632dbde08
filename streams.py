"""CUDA streams that overlap communication with computation, and page-locked host memory.

Each kind of communication or copy has a stream of its own (CommStream). The compute stream, here
also called "compute", is PyTorch's current stream, on which all other kernels run. The users of a
CommStream always follow one pattern: launch, compute, wait.

    with stream.after_compute():            # starts when compute has done all work queued so far
        dist.all_reduce(x, group=group)     # launch: runs on the stream, the host does not stop
    event = stream.record_event()
    y = a @ b                               # compute: this product hides the all-reduce
    wait(event)                             # wait: compute's next kernel may read x

On a CPU, or when overlap is switched off, a CommStream is the compute stream itself. Then all work
runs in program order, and nothing has to wait. So the same code runs, and is tested, without a GPU.

Host memory is allocated once (`pin_host_buffers`). It is page-locked, because only then does a copy
run concurrently with kernels. `carve` lays several tensors out in one such buffer.

Left out: a queue that schedules transfers. Each module launches its own. The docstrings at the top
of shard.py, attention.py and offload.py say where a transfer is launched, what hides it, and what
waits for it.
"""

import contextlib
import mmap
import os
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# ---------------------------------------------------------------------------- streams


class CommStream:
    """A CUDA stream for one kind of communication or copy.

    It has high priority, so that its few thread blocks are scheduled before those of a large
    compute kernel. On a CPU, or if `overlap` is off, it is the compute stream itself.
    """

    def __init__(self, device: torch.device, overlap: bool = True):
        self.stream = None  # None: the compute stream
        self.overlap = overlap
        if overlap and device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)

    def after_compute(self):
        """Return a context: work launched in it runs on this stream, after all work that compute
        has queued so far."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        return self.beside_compute()

    def beside_compute(self):
        """Return a context: work launched in it runs on this stream at once, without a wait for
        compute."""
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def record_event(self):
        """Return an event that is reached when all work launched on this stream so far is done.

        Pass it to `wait`. It is None if this is the compute stream: then nothing has to wait.
        """
        return self.stream.record_event() if self.stream else None

    def done_reading(self, *buffers: Tensor) -> None:
        """Do nothing. A test overrides this method to overwrite the buffers with NaN.

        Call it after the last read of a buffer is launched on the current stream, because from
        there on the buffer may be overwritten. In the test, a later read then gives wrong numbers.
        (This is not Tensor.record_stream, and protects nothing. The buffer is safe because whoever
        fills it again first waits for an event.)
        """


def wait(event) -> None:
    """Make the current stream wait for an event that `record_event` returned. The host does not
    stop."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


@dataclass
class Transfer:
    """Tensors that attention's ranks exchange on a CommStream: by all-to-all, or around a ring."""

    tensors: list[Tensor] | Tensor  # what this rank receives
    done_event: object = None  # reached when the tensors have arrived; None: nothing to wait for
    # the tensors that the transfer reads. They stay alive until compute has waited. If they were
    # freed earlier, PyTorch could give their memory to the next tensor of the compute stream while
    # the transfer still reads it
    keep_alive: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor] | Tensor:
        """Make compute wait until the tensors have arrived, and return them."""
        wait(self.done_event)
        self.keep_alive.clear()
        return self.tensors


@dataclass
class Buffer:
    """A buffer at a fixed address of the GPU. Usually several matrices use it in turn.

    What `event` means depends on what lies in the buffer:

        unsharded parameter   it has been gathered. Compute waits for this before it reads.
        unsharded gradient    it has been reduced. Compute waits for this before it writes the
                              next one.
        optimizer states      their new values are back on the host. The copy that brings the next
                              states waits for this. (Only if states lie on the host.)
    """

    # (S,) for a matrix of S elements, padding included. For optimizer states: one tensor per state
    data: Tensor | list[Tensor]
    # the ShardedParam whose newest values are gathered here, or will be once `event` is reached
    held_param: object = None
    event: object = None


# ---------------------------------------------------------------------------- host memory

GIB = 2**30
NO_LIMIT = 2.0**60  # bytes; as the size of a memory it means that a plan need not fit
HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # memory of this machine
HOST_ALIGN_BYTES = 512  # a tensor in a host buffer begins at a multiple of this


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return the unit in which to print a size, as its bytes and its name.

    It is the largest of GiB, MiB and KiB that is not larger than the size. A size below one KiB is
    printed in KiB, and 0 in GiB.
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if nbytes >= unit or not nbytes:
            return unit, name
    return 2**10, "KiB"


def in_unit(nbytes: float, digits: int = 1) -> str:
    """Return a size as text in the unit that suits it: '131.7 GiB', '1.3 MiB'.

    So a small size is not printed as '0.0 GiB'. NO_LIMIT is 'any size'.
    """
    if nbytes >= NO_LIMIT / 2:
        return "any size"
    unit, name = unit_of(nbytes)
    return f"{nbytes / unit:.{digits}f} {name}"


def flag_size(nbytes: float) -> str:
    """Return a size, rounded down, as a flag takes it: '131G', '2037M'. From 16K on, at most
    6 % are lost."""
    for unit, letter in ((2**30, "G"), (2**20, "M")):
        if nbytes >= 16 * unit:
            return f"{int(nbytes // unit)}{letter}"
    return f"{int(nbytes // 2**10)}K"


class HostMemory(NamedTuple):
    """The host memory of this machine, or of one of this process's control groups, in bytes."""

    name: str  # "this machine", or the file with the group's limit
    limit: int
    left: float  # bytes that can still be allocated; NO_LIMIT if Linux does not say how many


def host_memories(root: Path = Path("/")) -> list[HostMemory]:
    """Return the memories that limit this process: the machine's and those of its control groups.

    Linux frees caches when memory is needed, so caches count as left. root: the folder in which
    proc and sys lie; tests have another one.
    """
    machine = read_numbers(root / "proc/meminfo")  # "MemAvailable:   24117248 kB"
    kib = machine.get("MemAvailable:")
    memories = [HostMemory("this machine", HOST_BYTES, NO_LIMIT if kib is None else kib * 2**10)]

    for file, limit in control_group_limits(root).items():
        folder = Path(file).parent
        # version 2 of control groups has the first of these two files, and version 1 the other
        used = [*read_lines(folder / "memory.current"), *read_lines(folder / USAGE_V1)]
        left = NO_LIMIT
        if used and used[0].isdecimal():
            stat = read_numbers(folder / "memory.stat")
            # in version 1, only the names with "total_" also count the groups below
            prefix = "total_" if "total_inactive_file" in stat else ""
            caches = sum(stat.get(f"{prefix}{state}_file", 0) for state in ("active", "inactive"))
            # caches of the kernel itself, which only version 2 counts as used
            caches += stat.get("slab_reclaimable", 0)
            left = max(0, limit - int(used[0]) + caches)
        memories.append(HostMemory(file, limit, left))
    return memories


def host_budget(ranks: int, asked: int | None, root: Path = Path("/")) -> float:
    """Return the bytes of host memory that a rank may use for optimizer states and activations.

    ranks: number of ranks on this node, which share its memory equally.
    asked: --host-memory, in bytes per node. None: seven eighths of the smallest limit.
    root: as in host_memories.

    Memory that is already in use is not subtracted from the limit. Most of it is usually the cache
    of files, which Linux frees when memory is needed. Raises ValueError if `asked` is more than the
    smallest limit.
    """
    limit_name, allowed, _ = min(host_memories(root), key=lambda memory: memory.limit)
    if asked is None:
        return allowed * 7 // 8 / ranks
    if asked > allowed:
        raise ValueError(
            f"--host-memory {in_unit(asked)} is too much: {limit_name} allows {in_unit(allowed)}. "
            "Ask for less than that, because other processes on the node need some of it."
        )
    return asked / ranks


def own_host_bytes() -> tuple[int, int]:
    """Return the bytes of host memory that this process takes now, and the most that it has taken.
    Both are 0 if Linux does not say. Memory that processes share counts in each of them."""
    status = read_numbers(Path("/proc/self/status"))  # "VmRSS:     24117248 kB"
    return status.get("VmRSS:", 0) * 2**10, status.get("VmHWM:", 0) * 2**10


# The files of a control group that limit its memory, by type of file system: "cgroup2" is version
# 2, "cgroup" version 1 (see control_group_limits). memory.high is a limit, too: Linux does not kill
# a group above it, but slows it down until memory is reclaimed. Pinned memory cannot be reclaimed,
# so the group would stand still. In memory.stat only the line hierarchical_memory_limit is a limit
LIMIT_FILES = {
    "cgroup2": ("memory.max", "memory.high"),
    "cgroup": ("memory.limit_in_bytes", "memory.stat"),
}
USAGE_V1 = "memory.usage_in_bytes"  # what a group uses; in version 2, memory.current says it
# Where these file systems usually are mounted, in case /proc/self/mountinfo does not say it. Each
# entry is like one of control_group_mounts
USUAL_MOUNTS = [("cgroup2", "/", "/sys/fs/cgroup"), ("cgroup", "/", "/sys/fs/cgroup/memory")]


def control_group_limits(root: Path = Path("/")) -> dict[str, int]:
    """Return the memory limits of this process's control groups: {file of the limit: bytes}.

    Linux limits the memory of a container, a service or a Slurm job by control groups. A group is a
    folder. A process must stay within the limits of its group and of every group above it. There
    are two versions of control groups, and a machine may use both. /proc/self/cgroup names the
    process's group in each version, and /proc/self/mountinfo says where the folders are:

        version   line of /proc/self/cgroup    mounted as               the limit is in
        1         9:memory:/slurm/job_7        cgroup, with "memory"    memory.limit_in_bytes
        2         0::/system.slice/job         cgroup2                  memory.max, memory.high

    With version 1, a container sees only its own group. hierarchical_memory_limit in that group's
    memory.stat is the smallest limit of the group and of all groups above it. "No limit" is the
    word max, or in version 1 a number that is larger than any memory.
    """
    groups = {}  # type of the file system -> this process's group
    for line in read_lines(root / "proc/self/cgroup"):
        _, _, controllers_and_group = line.partition(":")
        controllers, _, group = controllers_and_group.partition(":")
        if not controllers:
            groups["cgroup2"] = group
        elif "memory" in controllers.split(","):
            groups["cgroup"] = group

    limits = {}
    for kind, mounted_group, mount_point in control_group_mounts(root) or USUAL_MOUNTS:
        if kind not in groups:
            continue
        top = root / mount_point.lstrip("/")
        below = os.path.relpath(groups[kind], mounted_group)
        # A container may not see the folder of its own group by this path ("below" is then ../...).
        # In this case the mounted folder is its group
        names = () if below.startswith("..") else Path(below).parts
        for depth in range(len(names) + 1):
            folder = top.joinpath(*names[:depth])
            for name in LIMIT_FILES[kind]:
                for line in read_lines(folder / name):
                    key, _, value = line.rpartition(" ")
                    if key in ("", "hierarchical_memory_limit") and value.isdecimal():
                        limits[str(folder / name)] = int(value)
    return limits


def control_group_mounts(root: Path) -> list[tuple[str, str, str]]:
    """Return (type of the file system, mounted group, mount point) of each mount of control groups
    that may limit memory, from /proc/self/mountinfo. Example of a line of that file, shortened:

        31 25 0:27 /docker/7f /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
    """
    mounts = []
    for line in read_lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        fields = mount.split(" ")
        kind = file_system.partition(" ")[0]
        options = file_system.rpartition(" ")[2].split(",")
        if len(fields) > 4 and (kind == "cgroup2" or (kind == "cgroup" and "memory" in options)):
            mounts.append((kind, unescaped(fields[3]), unescaped(fields[4])))
    return mounts


def unescaped(text: str) -> str:
    r"""Return a path of mountinfo as it is. The file writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):  # the file is missing, may not be read, or is not text
        return []


def read_numbers(path: Path) -> dict[str, int]:
    """Return the first two words of each line of a file, if the second one is a number:
    {"inactive_file": 4096, ...}. Empty if the file cannot be read."""
    pairs = (line.split()[:2] for line in read_lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def pin_host_buffers(sizes: list[int], pin: bool) -> list[Tensor]:
    """Return one host buffer of zeros per size, in bytes; page-locked if `pin`.

    Raises MemoryError if CUDA cannot lock that much. Most of the time goes into page faults. So
    buffers use huge pages, which have fewer faults, and threads touch several buffers in parallel,
    as many as there are cores. PyTorch's own pinned allocator is not used, because it rounds sizes
    up to a power of two. Each buffer is registered with CUDA by itself, because a copy must not
    cross two registrations.
    """
    if not pin:
        return [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    cudart = torch.cuda.cudart()
    device = torch.cuda.current_device()

    def lock(size: int) -> Tensor:
        torch.cuda.set_device(device)  # a new thread starts with device 0
        mapped = max(1, size)  # a rank may save nothing, and a mapping needs a byte
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, mapped, flags=private)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # before the first page is touched
        view = memoryview(memory)
        buffer = torch.frombuffer(view, dtype=torch.uint8)
        buffer[:: mmap.PAGESIZE] = 0  # touch each page; a new mapping reads as zeros anyway

        address = buffer.data_ptr()
        error = int(cudart.cudaHostRegister(address, mapped, 0))
        if error:
            raise MemoryError(
                f"pinning {in_unit(size)} of {in_unit(sum(sizes))} of host "
                f"memory failed with CUDA error {error}. Lower --host-memory."
            )
        # unregister when the buffer is freed; the argument `memory` keeps the mapping until then.
        # Not at exit: the end of the process releases everything
        finalizer = weakref.finalize(view, lambda _: cudart.cudaHostUnregister(address), memory)
        finalizer.atexit = False
        return buffer[:size]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lock, sizes))


def aligned(size: int) -> int:
    """Round a size in bytes up to a multiple of HOST_ALIGN_BYTES."""
    return -(-size // HOST_ALIGN_BYTES) * HOST_ALIGN_BYTES


def buffer_bytes(tensors: dict[object, Tensor]) -> int:
    """Return the size of a buffer into which `carve` can lay out these tensors."""
    return sum(aligned(t.nbytes) for t in tensors.values())


def carve(memory: Tensor, tensors: dict[object, Tensor]) -> dict[object, Tensor]:
    """Lay out tensors one after the other in a buffer of bytes, and return views of it.

    The views have the names, shapes and dtypes of `tensors`. No values are copied.
    """
    views = {}
    start = 0
    for name, t in tensors.items():
        view = memory[start : start + t.nbytes]
        views[name] = view.view(t.dtype).view(t.shape)
        start += aligned(t.nbytes)
    return views
