"""Save the model states of a run, and read them under any sharding factors.

    OUT/step-00000100/               the checkpoint of one step
        rank-00000-0.safetensors     what rank 0 saves: its parts of the states, as flat tensors. If
        rank-00000-1.safetensors     several ranks hold the same part, one of them saves it. A file
        ...                          takes up to 4 GiB, and says where its parts belong
        meta.json                    written last: the step, the samples seen, the model, the flags
                                     and the data of the run; the size and the checksum of each
                                     file; and its own checksum
    OUT/log.jsonl                    one line per step
    OUT/lock                         held by the run that writes here

A checkpoint holds the optimizer states of each weight, and the number of updates. With AdamW the
states are the float32 `master` weight, `exp_avg` and `exp_avg_sq`. It holds no bf16 weights and no
gradients. A resume makes the bf16 weights again by rounding the master weights
(States.restore_weights, StatePart.write). An export reads the master weights. A frozen weight is
the exception. It has one state, `frozen`, which is the weight itself, in the dtype in which the run
holds it.

Another number of ranks can read it. A part is the elements [start, start + count) of a state's flat
tensor. A rank that resumes, under any factors, finds in all files the parts that overlap with its
own part, and copies the overlaps:

    saved with os = 2     |------- rank 0 -------|------- rank 1 -------|
    read with os = 3      |---- 0 -----|------ 1 ------|------ 2 -------|

Here rank 1 of three reads the end of the old rank 0's part, and the beginning of the old rank 1's.

With tensor parallelism a rank has some rows or columns of a matrix (ops.TensorSlice). Then `start`
is an index in the flattened slice, and the file says which slice it is. A rank that has the same
slice reads as above. A rank with another slice first assembles the whole matrix in memory, one
matrix at a time, and takes its slice from there.

A checkpoint is written into a folder step-N.tmp, flushed to the disk, and then renamed. So a folder
without .tmp is complete, even if the run was killed while it saved. A resume compares the checksum
of each file, and nothing that is read can run code.

    saved = choose_checkpoint(out, resume)       which checkpoint, with all checksums compared
    load_checkpoint(states, saved)               read this rank's parts
    saver = Saver(out, keep, states)             saver.begin(meta), saver.finish()

    saved = choose_in_one_process(folder)        the same without ranks, for sample.py
    read = open_weights(saved, shapes)           read(name) -> a whole weight

Left out: checkpoints in several places. hf.py reads and writes Hugging Face's folders.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data import may_not_read, open_to_append, regular, replace_file
from model import ModelConfig
from ops import TensorSlice
from ranks import (
    ConfigError,
    all_or_none,
    check_same,
    first_error,
    gather_objects,
    on_rank_0,
    print0,
)
from shard import StatePart, States
from streams import buffer_bytes, carve, in_unit, pin_host_buffers

# ---------------------------------------------------------------------------- a checkpoint's files

FILE_BYTES = 4 * 2**30  # of tensors in one file


def pack(sizes: dict[str, int]) -> list[list[str]]:
    """Divide tensors among files, and return the names of the tensors in each file, in order.
    sizes: bytes by name. A file takes at most FILE_BYTES, or a single tensor that is larger."""
    files = []
    room = 0  # bytes left in the last file
    for name, size in sizes.items():
        if size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, and make its folder if there is none. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    try:
        save_file(tensors, path, metadata)
        # save_file makes files that only their owner can read; give them the folder's rights
        with contextlib.suppress(OSError):  # storage that has no modes
            path.chmod(path.parent.stat().st_mode & 0o666)
    except SafetensorError as e:
        raise OSError(f"{path}: {e}") from e


@contextlib.contextmanager
def name_in_errors(path: Path):
    """Add the file's name to an OSError that the `with` block raises without it. The system names a
    file that it cannot open, but not an open file that it cannot read."""
    try:
        yield
    except OSError as e:
        if str(path) in str(e):
            raise
        raise OSError(f"{path}: {e}") from e


def checksum(path: Path) -> list[int]:
    """Return [size in bytes, crc32] of a file. Raises OSError."""
    crc32 = 0
    with name_in_errors(path), open(path, "rb") as file:
        while block := file.read(2**24):
            crc32 = zlib.crc32(block, crc32)
        return [file.tell(), crc32]


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_states(folder: Path, parts: dict[str, StatePart]) -> dict[str, list[int]]:
    """Write the files of this rank, and return [size, crc32] of each by its name. Raises OSError.

    parts: this rank's part of each state, by the state's name. Those with `saved_here` are written.
    At any time the host has copies of states for one file only. While a file is written, other
    threads compute the checksums of the files before it."""
    sizes = {name: part.nbytes for name, part in parts.items() if part.saved_here}
    checksums = {}
    with ThreadPoolExecutor() as pool:
        for i, names in enumerate(pack(sizes)):
            path = folder / f"rank-{dist.get_rank():05d}-{i}.safetensors"
            tensors = {name: parts[name].read() for name in names}
            positions = {name: position_text(parts[name]) for name in names}
            write_tensors(tensors, path, positions)
            del tensors  # before the next file's tensors are read
            checksums[path] = pool.submit(checksum, path)
    for path in checksums:
        sync(path)
    return {path.name: future.result() for path, future in checksums.items()}


def write_meta(folder: Path, meta: dict) -> None:
    """Write meta.json. Its last key is the crc32 of the text before that key."""
    body = json.dumps(meta, indent=1).removesuffix("\n}")
    path = folder / "meta.json"
    path.write_text(f'{body},\n "crc32": {zlib.crc32(body.encode())}\n}}\n')
    sync(path)


# ---------------------------------------------------------------------------- reading
#
# A checkpoint may come from anybody, so nothing in it is believed before it is checked:
#     the checksum of meta.json, and the numbers in it that a resume computes with (check_meta)
#     the flags of the run (train.Config)
#     the files: their names and sizes, that none is a link, their checksums (open_checkpoint,
#         find_damage)
#     the parts of each state: they cover each of its elements exactly once (check_cover)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that open_checkpoint has checked, and the contents of its meta.json."""

    folder: Path
    meta: dict


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises ValueError if anything in it is missing or not as it was written, and OSError if a file
    cannot be read. It does not compare the checksums of the large files; find_damage does that.
    """
    try:
        meta_file = folder / "meta.json"
        with name_in_errors(meta_file):
            check_regular(meta_file, may_be_link=True)
            text = meta_file.read_text()
        body, _, crc32 = text.rpartition(',\n "crc32": ')
        if crc32 != f"{zlib.crc32(body.encode())}\n}}\n":
            raise ValueError("meta.json is not what was written: its checksum differs")
        meta = json.loads(body + "}")
        check_meta(meta)
        saved = Checkpoint(folder, meta)
        for name, (size, _) in meta["files"].items():
            with name_in_errors(folder / name):
                size_now = check_regular(folder / name, may_be_link=False)
                if size_now != size:
                    raise ValueError(f"{name} has {size_now} bytes, not {size}")
        open_parts(saved)
    # There are two kinds of errors, because --resume auto and latest skip a checkpoint only if it
    # is damaged (ValueError). A missing file is a ValueError, too (check_regular)
    except OSError as e:
        raise OSError(f"--resume: {folder} may be whole, but cannot be read: {e}") from e
    except Exception as e:  # a file that anybody has written may raise any exception
        raise ValueError(
            f"--resume: {folder} is not a whole checkpoint: {e or repr(e)}; name another one in "
            "the same folder, if there is one"
        ) from e
    return saved


def check_regular(path: Path, may_be_link: bool) -> int:
    """Return the size of a checkpoint's file.

    Raises ValueError if the file is missing or is no regular file. Raises OSError if the file may
    exist but cannot be examined or opened. (os.path.lexists does not tell the two cases apart.)

    may_be_link: accept a link to a regular file."""
    try:
        status = path.stat(follow_symlinks=may_be_link)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise ValueError(f"{path.name} is missing: {e}") from e
    except PermissionError as e:
        raise may_not_read(path) from e
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is no regular file")
    regular(path)
    return status.st_size


def check_meta(meta: dict) -> None:
    """Raise ValueError unless the numbers that a resumed run uses are in their ranges, and the
    names of the files have the form that write_states gives them."""

    def check_number(name: str, value: object, low: int) -> None:
        if type(value) is not int or not low <= value < 2**63:
            raise ValueError(
                f"{name} in meta.json is {value!r}; it must be a whole number of at least {low}"
            )

    for name in ("config", "model", "source", "files"):
        if type(meta[name]) is not dict:
            raise ValueError(f"{name} in meta.json is {meta[name]!r}; it must be a dict")
    for name in ("step", "samples"):
        check_number(name, meta[name], 0)
    for name, low in (("seq", 1), ("batch", 1), ("schedule_steps", 0), ("warmup_steps", 0)):
        check_number(name, meta["config"][name], low)
    check_number("max_positions", meta["model"]["max_positions"], 1)
    if type(meta["trained_to"]) is not dict:
        raise ValueError(f"trained_to in meta.json is {meta['trained_to']!r}; it must be a dict")
    for end in meta["trained_to"].values():
        check_number("trained_to", end, 0)
    if not meta["files"]:
        raise ValueError("meta.json names no files")
    for name, (size, crc32) in meta["files"].items():
        if not re.fullmatch(r"rank-\d{5}-\d+\.safetensors", name):
            raise ValueError(f"meta.json names a file {name!r}, which no checkpoint has")
        check_number("the size of a file", size, 0)
        check_number("a file's crc32", crc32, 0)


@dataclass(frozen=True)
class SavedPart:
    """Elements [start, start + count) of a state's flat tensor, in a file."""

    start: int
    count: int
    elements: object  # from safetensors' get_slice: only indexing it reads elements from the file


@dataclass(frozen=True)
class SavedState:
    """All parts of a state."""

    shape: tuple[int, ...]  # of the whole tensor
    # by the tensor-parallel slice to which the parts belong; None: they belong to the whole tensor
    parts: dict[TensorSlice | None, list[SavedPart]]


def open_parts(saved: Checkpoint) -> dict[str, SavedState]:
    """Return the states that a checkpoint's files hold, by name. Only the files' headers are read.
    Raises ValueError unless the parts of each state cover each element exactly once."""
    states = {}
    for file in saved.meta["files"]:
        with name_in_errors(saved.folder / file):
            handle = safe_open(saved.folder / file, "pt")
        positions = handle.metadata() or {}
        if positions.keys() != set(handle.keys()):
            raise ValueError(f"{file} does not say where its tensors belong")
        for name, text in positions.items():
            start, shape, tp_slice = read_position(text)
            elements = handle.get_slice(name)
            (count,) = elements.get_shape()
            state = states.setdefault(name, SavedState(shape, {}))
            if state.shape != shape:
                raise ValueError(f"{name} has two shapes, {state.shape} and {shape}")
            state.parts.setdefault(tp_slice, []).append(SavedPart(start, count, elements))
    for name, state in states.items():
        check_cover(name, state)
    return states


def position_text(part: StatePart) -> str:
    """Return where a part belongs, as JSON for its file's header."""
    tp_slice = None
    if part.tp_slice is not None:
        tp_slice = {"rows": part.tp_slice.rows, "cols": part.tp_slice.cols}
    return json.dumps({"start": part.start, "shape": part.shape, "slice": tp_slice})


def read_position(text: str) -> tuple[int, tuple[int, ...], TensorSlice | None]:
    """Return the start, shape and slice that position_text has written. Raises ValueError or
    another exception for any other text."""
    position = json.loads(text)
    start = position["start"]
    shape = tuple(position["shape"])
    check_counts(text, [start, *shape])
    if position["slice"] is None:
        return start, shape, None

    rows = tuple((first, end) for first, end in position["slice"]["rows"])
    first_col, end_col = position["slice"]["cols"]
    bounds = [bound for run in rows for bound in run]
    check_counts(text, [*bounds, first_col, end_col])
    is_slice = (
        len(shape) == 2
        and bounds == sorted(bounds)
        and bounds[-1] <= shape[0]
        and first_col < end_col <= shape[1]
    )
    if not is_slice:
        raise ValueError(f"{text} is no slice of a matrix")
    return start, shape, TensorSlice(shape, rows, (first_col, end_col))


def check_counts(text: str, numbers: list) -> None:
    """Raise ValueError unless all numbers are integers from 0 on."""
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{text} is no position of a tensor")


def check_cover(name: str, state: SavedState) -> None:
    """Raise ValueError unless the slices of a state make up its whole tensor, and the parts of each
    slice cover each of its elements exactly once."""
    size = math.prod(state.shape)
    slices = [tp_slice for tp_slice in state.parts if tp_slice is not None]
    if slices:
        areas = [math.prod(tp_slice.shape) for tp_slice in slices]
        whole_too = None in state.parts
        overlap = any(overlaps(one, two) for one, two in itertools.combinations(slices, 2))
        if whole_too or overlap or sum(areas) != size:
            raise ValueError(
                f"the tensor-parallel slices of {name} overlap, or do not make the whole tensor"
            )

    for tp_slice, parts in state.parts.items():
        end = 0  # elements before this one are covered
        for part in sorted(parts, key=lambda part: part.start):
            if part.start > end:
                raise ValueError(f"elements {end} to {part.start - 1} of {name} are missing")
            if part.start < end:
                last = min(end, part.start + part.count) - 1
                raise ValueError(f"elements {part.start} to {last} of {name} are there twice")
            end = part.start + part.count
        count = size if tp_slice is None else math.prod(tp_slice.shape)
        if end != count:
            raise ValueError(f"{name} ends at element {end}, not {count}")


def overlaps(one: TensorSlice, two: TensorSlice) -> bool:
    """Return whether two slices of a matrix have an element in common."""

    def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return max(a[0], b[0]) < min(a[1], b[1])

    return meet(one.cols, two.cols) and any(meet(a, b) for a in one.rows for b in two.rows)


def find_damage(saved: Checkpoint, rank: int = 0, world: int = 1) -> str:
    """Compare the checksums of the files. Return an error that names a file that is not as it was
    written, or "".

    Rank r reads the files that ranks r, r + world size, and so on have saved. With the same ranks
    and factors as before, os = ranks and tp = 1, these are the files that rank r resumes from. So
    the system still has them in its cache when they are read again. Raises OSError if a file cannot
    be read: that does not mean that it is damaged.
    """

    def differs(name: str) -> bool:
        return checksum(saved.folder / name) != saved.meta["files"][name]

    own = []
    for name in saved.meta["files"]:
        saved_rank = int(name.split("-")[1])  # rank-00003-0.safetensors
        if saved_rank % world == rank:
            own.append(name)
    with ThreadPoolExecutor() as pool:
        for name, damaged in zip(own, pool.map(differs, own)):
            if damaged:
                return (
                    f"--resume: {saved.folder / name} is not what was written: its checksum "
                    "differs; name another checkpoint in the same folder, if there is one"
                )
    return ""


def read_states(saved: Checkpoint, parts: dict[str, StatePart]) -> None:
    """Fill this rank's parts of the states from a checkpoint. For a part, only its own elements are
    read, or the whole matrix if its tensor-parallel slice is not one of the saved slices. Raises
    OSError, or ValueError, also for values that are not finite."""
    states = open_parts(saved)
    one_at_a_time = threading.Lock()  # held while a whole matrix is in memory

    def read(name: str) -> None:
        part = parts[name]
        check_holds(saved.folder, states, name, part.shape)
        state = states[name]
        if part.tp_slice in state.parts:  # saved from the same slice
            for index, elements in overlapping(state.parts[part.tp_slice], part.start, part.count):
                part.write(elements, index)
        else:
            with one_at_a_time:
                whole = read_whole(state, part.dtype)
                local = whole if part.tp_slice is None else part.tp_slice.extract(whole)
                part.write(part.select(local))
        if not all(map(is_finite, part.pieces(torch.device("cpu")))):
            raise ValueError(
                f"--resume: {saved.folder}: {name} has values that are not finite; name another "
                "checkpoint in the same folder, if there is one"
            )

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, parts))


def check_holds(
    folder: Path, states: dict[str, SavedState], name: str, shape: tuple[int, ...]
) -> None:
    """Raise ValueError unless a checkpoint's states have one of this name and shape. folder: the
    checkpoint's, for the error."""
    kind, _, weight = name.partition(".")
    if kind == "frozen" and f"master.{weight}" in states:
        raise ValueError(
            f"--resume: {weight} is frozen here, but the run of {folder} trained it. A resumed run "
            "trains the same weights: export that run, and import the export"
        )
    if kind != "frozen" and f"frozen.{weight}" in states:
        raise ValueError(
            f"--resume: {weight} is frozen in {folder}, and would train here. A resumed run trains "
            "the same weights: export that run, and import the export"
        )
    if name not in states or states[name].shape != shape:
        raise ValueError(
            f"--resume: {folder} does not hold {name} {shape}: it is of another model or "
            "optimizer. Drop --model and --optimizer"
        )


def check_holds_no_more(saved: Checkpoint, weights: set[str]) -> None:
    """Raise ValueError if a checkpoint has a weight that is not among the model's. A resumed run
    would train without it, and its next checkpoints would not have it."""
    more = sorted({weight_of(name) for name in open_parts(saved)} - weights)
    if more:
        raise ValueError(
            f"--resume: {saved.folder} also holds {first_names(more)}, which this model does not "
            "have. Resume with the files of the project that trained it"
        )


def weight_of(state: str) -> str:
    """Return the name of a state's weight. Example: blocks.0.qkv for master.blocks.0.qkv. A state
    of the whole run, such as "updates", gives ""."""
    return state.partition(".")[2]


def first_names(names: list[str]) -> str:
    """Return the first four names as text for an error, with dots if there are more."""
    return ", ".join([*names[:4], "..."] if len(names) > 4 else names)


def fill(values: Tensor, parts: list[SavedPart], first: int) -> None:
    """Set values (n,) to the elements [first, first + n) of a flat tensor, which is saved in
    parts."""
    for index, elements in overlapping(parts, first, len(values)):
        values[index : index + len(elements)].copy_(elements)


def overlapping(parts: list[SavedPart], first: int, n: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the elements [first, first + n) of a flat tensor that is saved in parts. Each part that
    has some of them gives one pair (index, elements). Index 0 is the element `first`.

    a saved part   start |---------------| start + count
    wanted                     first |--------------------| first + n
    yielded                          |---|                            with index 0
    """
    for part in parts:
        begin = max(first, part.start)
        end = min(first + n, part.start + part.count)
        if begin < end:
            yield begin - first, part.elements[begin - part.start : end - part.start]


def read_whole(state: SavedState, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor of a state, assembled from all of its slices."""
    whole = torch.empty(state.shape, dtype=dtype)
    for tp_slice, parts in state.parts.items():
        if tp_slice is None:
            fill(whole.view(-1), parts, 0)
            continue
        values = whole.new_empty(math.prod(tp_slice.shape))
        fill(values, parts, 0)
        tp_slice.insert(values.view(tp_slice.shape), whole)
    return whole


def open_weights(
    saved: Checkpoint, shapes: dict[str, tuple], state_name: str = "master"
) -> Callable[[str], Tensor]:
    """Check that a checkpoint has exactly the weights of a model. Return read(name) -> the whole
    weight in float32, on the CPU.

    A weight is read from the files when read() is called. shapes: LLaMA.shapes. state_name: which
    state of a trained weight read() returns, for example Optimizer.exported, which an export
    writes. Raises ValueError if names or shapes differ from the model's. read() raises ValueError
    if a value is not finite.
    """
    states = open_parts(saved)
    weights = {}
    for name, state in states.items():
        kind, _, weight = name.partition(".")
        if kind in (state_name, "frozen"):
            weights[weight] = state
    wrong = [
        name
        for name in sorted(shapes.keys() | weights.keys())
        if name not in shapes or name not in weights or weights[name].shape != shapes[name]
    ]
    if wrong:
        raise ValueError(
            f"{saved.folder} is of another model than this one: {first_names(wrong)} differ. Read "
            "it with the files of the project that trained it"
        )

    def read(name: str) -> Tensor:
        values = read_whole(weights[name], torch.float32)
        if not is_finite(values):
            raise ValueError(f"{saved.folder}: {name} has values that are not finite")
        return values

    return read


def is_finite(values: Tensor) -> bool:
    low, high = values.aminmax()  # one pass; both are NaN if any value is
    return bool(low.isfinite() and high.isfinite())


def load_checkpoint(states: States, saved: Checkpoint) -> None:
    """Read the model states from a checkpoint that choose_checkpoint has checked. It may come from
    a run with other factors and another number of ranks. A collective of all ranks. Raises
    ConfigError on all ranks if one of them cannot read its parts, or if the checkpoint has more
    weights than the model."""
    parts = states.state_parts()
    # a pipeline stage has only some of the model's weights
    of_ranks = gather_objects([weight_of(name) for name in parts])
    all_or_none(check_holds_no_more, saved, set(itertools.chain(*of_ranks)))
    all_or_none(read_states, saved, parts)
    states.restore_weights()


# ---------------------------------------------------------------------------- saving


@dataclass
class Saver:
    """Saves a run's checkpoints.

    With `room` (--save-async), the states are first copied to host memory, and a thread writes the
    files while training goes on. Without `room`, training waits for the files.

        begin(meta)     finish the previous save; copy the states, and start to write them
        writing         whether this rank's thread is still at work
        finish()        wait for the files of all ranks, and give the checkpoint its name

    begin and finish are collectives of all ranks. A save that fails does not end the run: `failed`
    says why, and earlier checkpoints stay.
    """

    out: Path
    keep: int  # how many checkpoints stay in OUT; older ones are deleted
    states: States
    # a group whose collectives wait long enough for a rank that writes slowly (ranks.patient_group)
    group: dist.ProcessGroup | None = None
    # bytes of host memory that the copies of --save-async may take; None: make no copies
    room: float | None = None
    failed: str = ""  # why the last save failed, as a sentence; "" if it did not
    began: float = 0.0  # when the last save began, on the clock of time.perf_counter
    seconds: float = 0.0  # how long the last save took; with copies, only this rank's files

    def __post_init__(self):
        """Allocate the copies. Raises MemoryError if `room` is too small for them."""
        self.job = None  # the future of write_states, while a save is under way
        self.thread = ThreadPoolExecutor(1)
        if self.room is None:
            return
        parts = self.states.state_parts()
        tensors = {
            name: torch.empty(part.count, dtype=part.dtype, device="meta")
            for name, part in parts.items()
            if part.saved_here
        }
        size = buffer_bytes(tensors)
        if size > self.room:
            raise MemoryError(
                f"--save-async: copies take {in_unit(size)} of host memory per rank, but only "
                f"{in_unit(self.room)} are left. Use --no-save-async, or raise --host-memory"
            )
        on_gpu = self.states.device.type == "cuda"
        (buffer,) = pin_host_buffers([size], pin=on_gpu)
        self.copies = carve(buffer, tensors)

    @property
    def writing(self) -> bool:
        return self.job is not None and not self.job.done()

    def begin(self, meta: dict) -> None:
        """Begin to save the states of step meta["step"]. meta: what a resumed run must know, as
        JSON. A collective of all ranks.

        Nothing is written if another run has locked OUT meanwhile (check_owner)."""
        self.finish()
        self.began = time.perf_counter()
        self.meta = meta
        self.folder = self.out / f"step-{meta['step']:08d}.tmp"
        try:
            on_rank_0(check_owner, self.out, group=self.group)
        except ConfigError as e:
            self.failed = self.failure(e)
            return
        parts = self.states.state_parts()
        if self.room is not None:  # a copy to page-locked memory runs at the full speed of PCIe
            copied = {}
            for name, copy in self.copies.items():
                # If a master weight is stored as two tensors, the GPU joins them here, and the copy
                # is the whole float32 weight (weight=None). So the thread need not join anything
                parts[name].copy_to(copy, self.states.device)
                copied[name] = replace(parts[name], stored=copy, weight=None)
            parts = copied
        self.job = self.thread.submit(write_states, self.folder, parts)
        self.job.add_done_callback(lambda _: self.set_seconds())
        if self.room is None:
            self.finish()
            self.set_seconds()  # once more, because finish has waited for the slowest rank

    def set_seconds(self) -> None:
        """Set `seconds` to the time since the last save began."""
        self.seconds = time.perf_counter() - self.began

    def finish(self) -> None:
        """Wait for the files of all ranks, and give the checkpoint its name. A collective of all
        ranks. Does nothing if no save is under way."""
        if self.job is None:
            return
        try:
            written = all_or_none(self.job.result, group=self.group)
            files_of_ranks = gather_objects(written, self.group)
            # All ranks wait until rank 0 has renamed the folder. Otherwise another rank could reach
            # the end of the run and exit before that, and so end the run without this checkpoint
            on_rank_0(self.complete, files_of_ranks, group=self.group)
            self.failed = ""
        except ConfigError as e:
            ignore_errors = True
            on_rank_0(shutil.rmtree, self.folder, ignore_errors, group=self.group)
            self.failed = self.failure(e)
        self.job = None

    def failure(self, e: ConfigError) -> str:
        """Print and return why this save failed, as a sentence."""
        text = f"step {self.meta['step']} was not saved: {self.folder}: {e}"
        print0(text)
        return text

    def complete(self, files_of_ranks: list[dict[str, list[int]]]) -> None:
        """Write meta.json, rename the folder, and delete older checkpoints, so that `keep` stay. A
        checkpoint of a later step, which only another run can have written, is not deleted and not
        counted.

        Runs on rank 0, once the files of all ranks are written. files_of_ranks: what write_states
        has returned on each rank."""
        check_owner(self.out)  # the files may have taken minutes
        files = {}
        for files_of_rank in files_of_ranks:
            files |= files_of_rank
        write_meta(self.folder, self.meta | {"files": files})
        sync(self.folder)
        final = self.folder.with_suffix("")
        self.folder.rename(final)
        sync(self.out)
        older = [folder for folder in steps_of(self.out) if folder < final]
        for old in older[: max(0, len(older) + 1 - self.keep)]:
            shutil.rmtree(old, ignore_errors=True)
        print0(f"saved {final}")


# ---------------------------------------------------------------------------- a run's folder


def steps_of(out: Path) -> list[Path]:
    """Return the folders of all checkpoints in OUT, in the order of their steps. A checkpoint that
    is being written is not among them, because its name ends in .tmp."""
    return sorted(out.glob("step-" + 8 * "[0-9]"))


def find_checkpoint(out: Path, resume: str, passed_over: Sequence[Path] = ()) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None to start anew. Raises ValueError, or OSError
    if a file cannot be read.

    resume: --resume, which is "never", "latest", "auto" (the latest, if there is any) or a folder.
    "latest" and "auto" skip a checkpoint that is not whole, and take the one before it. They do not
    skip one that cannot be read, because it may be whole.
    passed_over: folders to skip, because the caller has found wrong checksums there."""
    if resume == "never":
        return None
    if resume not in ("auto", "latest"):
        folder = Path(resume)
        if steps_of(folder) and not (folder / "meta.json").exists():
            raise ValueError(
                f"--resume {resume}: this is the folder of a run. Name one of its checkpoints; the "
                f"newest is {steps_of(folder)[-1]}"
            )
        return open_checkpoint(folder)
    # steps_of would find no checkpoints in a folder that this user may not read
    if out.exists() and not os.access(out, os.R_OK | os.X_OK):
        raise may_not_read(out)
    for folder in reversed(steps_of(out)):
        if folder in passed_over:
            continue
        try:
            return open_checkpoint(folder)
        except ValueError as e:
            print0(f"passed over: {e}")
    if resume == "latest":
        raise ValueError(f"--resume {resume}: there is no checkpoint in {out}")
    return None


def choose_checkpoint(out: Path, resume: str) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None to start anew. Rank 0 chooses it
    (find_checkpoint), and all ranks compare the checksums of its files. "latest" and "auto" skip a
    checkpoint whose checksums differ, but not one that a rank cannot read. A collective of all
    ranks. Raises ConfigError on all ranks."""
    passed_over = []
    while True:
        # only rank 0 chooses, because other nodes may see an old listing of a shared folder for a
        # minute
        saved = on_rank_0(find_checkpoint, out, resume, passed_over)
        if saved is None:
            return None
        damage = first_error(
            all_or_none(find_damage, saved, dist.get_rank(), dist.get_world_size())
        )
        if not damage:
            return saved
        if resume not in ("auto", "latest"):
            raise ConfigError(damage)
        print0(f"passed over: {damage}")
        passed_over.append(saved.folder)


def is_outdated(
    saved: Checkpoint | None, resume: str, out: Path, steps_before: Sequence[Path]
) -> bool:
    """Return whether --resume would choose another checkpoint now than `saved`, because another run
    has written to OUT, or has replaced `saved` by a checkpoint of the same step. steps_before:
    steps_of(out) before the choice."""
    if resume in ("auto", "latest") and set(steps_of(out)) - set(steps_before):
        return True
    if saved is None:
        return False
    try:
        return open_checkpoint(saved.folder).meta != saved.meta
    except ValueError:  # it is gone or damaged
        return True


def choose_in_one_process(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder step-N, or the newest whole checkpoint of a run's folder
    OUT, with all checksums compared. Needs no ranks. Raises ValueError, or OSError."""
    if (folder / "meta.json").exists():
        saved = open_checkpoint(folder)
        if damage := find_damage(saved):
            raise ValueError(damage)
        return saved
    passed_over = []
    while True:
        saved = find_checkpoint(folder, "latest", passed_over)
        damage = find_damage(saved)
        if not damage:
            return saved
        print0(f"passed over: {damage}")
        passed_over.append(saved.folder)


def check_same_model(saved: Checkpoint, model: ModelConfig, may_differ: set[str]) -> None:
    """Raise ValueError if a checkpoint is of another model. may_differ: the fields of ModelConfig
    that flags set, and those that change no weight."""
    ours = asdict(model)
    theirs = saved.meta["model"]
    wrong = [
        f"{name} {theirs.get(name)} (here {ours.get(name)})"
        for name in ours | theirs
        if name not in may_differ and ours.get(name) != theirs.get(name)
    ]
    if wrong:
        raise ValueError(
            f"--resume: {saved.folder} is of another model: {', '.join(wrong)}. A resumed run has "
            "the checkpoint's model: drop --model, --architecture, --init and --rope-scaling"
        )


def prepare_out(out: Path, resumed: Checkpoint | None, trains: bool) -> None:
    """Prepare the folder OUT for a run. Raises OSError.

    Folders step-N.tmp, which a killed run left unfinished, are deleted. What does not belong to the
    new run is moved into OUT/earlier-N. Only rows of the log are dropped without a copy:

        this run ...                                   what happens to OUT
        resumes a checkpoint of OUT, and trains        later checkpoints are moved, and later rows
                                                       of the log are dropped
        resumes a checkpoint of OUT, and does not      everything stays
          train, because --steps is reached
        does anything else                             everything is moved: checkpoints, the log
                                                       and pictures
    """
    for unfinished in out.glob("step-*.tmp"):
        if unfinished.is_symlink():
            unfinished.unlink()  # remove the link, and keep the folder that it points to
        else:
            shutil.rmtree(unfinished)

    last_step = -1  # only checkpoints and log rows up to this step stay
    # OUT/step-N may be a link to a folder elsewhere, and a link elsewhere may lead to OUT/step-N
    if resumed and any(
        folder.parent.samefile(out) for folder in (resumed.folder, resumed.folder.resolve())
    ):
        last_step = resumed.meta["step"] if trains else math.inf
    later = [
        folder for folder in steps_of(out) if int(folder.name.removeprefix("step-")) > last_step
    ]
    if last_step < 0:
        later += [*out.glob("log.jsonl"), *out.glob("*.png")]

    # checkpoints are moved before the log is cut. So even after a crash between the two, no
    # checkpoint is later than the end of the log
    if later:
        n = 1
        while (out / f"earlier-{n}").exists():
            n += 1
        aside = out / f"earlier-{n}"
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        print0(f"moved {', '.join(path.name for path in later)} to {aside}")

    log = out / "log.jsonl"
    if log.exists():
        kept = [json.dumps(row) + "\n" for row in read_log(log) if row["step"] <= last_step]
        replace_file(log, lambda new: new.write_text("".join(kept)))


def read_log(log: Path) -> list[dict]:
    """Return the rows of a log.jsonl. A line that is no row is dropped, and printed. Raises
    OSError."""
    rows = []
    for line in regular(log).read_bytes().splitlines():
        try:
            row = json.loads(line)
            row["step"] + 0  # raises unless it is a number
            rows.append(row)
        except Exception:  # a crash may leave any bytes
            print0(f"{log}: dropped a line that is no step's row: {line[:60]}")
    return rows


@contextlib.contextmanager
def locked(out: Path):
    """Hold the folder OUT for one run. Raises ValueError that names the owner if another run holds
    it.

    The operating system releases the lock when the process ends, even if it is killed. So a file
    that is left behind does not block the next run. Some shared file systems have no locks: then a
    warning is printed, and the run goes on."""
    with open_to_append(out / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"--out {out}: another run writes there ({file.read().strip()}). Name another "
                "folder"
            ) from None
        except OSError as e:
            print0(f"--out {out}: a second run that writes here would not be noticed: {e}")
        file.truncate(0)
        print(f"{this_process()}, since {time.ctime()}", file=file, flush=True)
        os.fsync(file.fileno())  # other nodes read it (check_shared)
        yield


def this_process() -> str:
    """Return the words that name this process in the lock of OUT."""
    return f"host {os.uname().nodename}, process {os.getpid()}"


def check_owner(out: Path) -> None:
    """Raise ValueError if the lock of OUT names another process than this one, rank 0 of the run.

    If somebody renames or deletes the folder of a run, and starts another run under its name, then
    each of the two has locked a file of its own, and both would write here."""
    lock = out / "lock"
    owner = regular(lock).read_text().strip() if lock.exists() else ""
    if owner and not owner.startswith(f"{this_process()}, "):
        raise ValueError(
            f"another run writes to {out} now ({owner}): the folder that this run had locked was "
            "renamed or deleted"
        )


def check_shared(out: Path) -> None:
    """Raise ConfigError if a rank does not see the folder that rank 0 has locked. A collective of
    all ranks."""
    lock = out / "lock"

    def read() -> str:
        return regular(lock).read_text().strip() if lock.exists() else "missing"

    what = f"the lock of --out {out}, which must be on storage that all nodes share,"
    check_same({what: all_or_none(read)})
