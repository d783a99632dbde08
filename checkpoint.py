"""What is on disk? Checkpoints that resume under any factors.

    OUT/step-00000100/               a step's states
        rank-00000-0.safetensors     what a rank saves: of every tensor a part, flat; a file has as
        rank-00000-1.safetensors     many layers as 4 GiB hold, and says what parts they are
        meta.json                    written last: step, samples seen, model, flags, data; size and
                                     checksum of every file, and of itself
    OUT/log.jsonl                    a line a step
    OUT/lock                         held by the run that writes here

Elements [start, start + count) of a flat tensor are a part. Whoever resumes, under any factors,
reads of all files what overlaps with its own parts:

    saved, os = 2       |------- rank 0 -------|------- rank 1 -------|
    loaded, os = 3      |---- 0 -----|------ 1 ------|------ 2 -------|

Of a matrix that columns of ranks share (tensor.py's modes) the flat tensor is what one of
them has, and a part says which rows and columns of the whole that is (its cut). Who has the same
cut reads as above; who has another one puts the whole matrix together first, one at a time.

A checkpoint is written under another name, synced, and renamed, so whoever is killed, a folder of
that name is whole; the newest is the highest step. A resume reads each file once to compare its
checksum, on the rank of the same number, whose own parts then lie in memory. Nothing that is read
can run code.

    find_checkpoint(...) -> Checkpoint     load_checkpoint(states, found)     Saver(...).begin(meta)

Left out: checkpoints in several places. Hugging Face's folders are hf.py's.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data import open_to_append, regular, replace_file
from model import ModelConfig
from ops import Cut
from ranks import ConfigError, check_same, of_all_ranks, on_all_ranks, on_rank_0, print0
from shard import StatePart, States
from streams import buffer_bytes, carve, in_unit, pin_host_buffers

# ---------------------------------------------------------------------------- a checkpoint's files

FILE_BYTES = 4 * 2**30  # of tensors in one file


def pack(sizes):
    """Return the names of {name: bytes} file by file: in order, FILE_BYTES each, or one tensor that
    is larger."""
    files = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def write_tensors(tensors, path, metadata):
    """Write a safetensors file in a folder, which is made. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    try:
        save_file(tensors, path, metadata)
        # it makes files that their owner alone can read: who may list the folder may read them
        with contextlib.suppress(OSError):  # storage that has no modes
            path.chmod(path.parent.stat().st_mode & 0o666)
    except SafetensorError as e:
        raise OSError(f"{path}: {e}") from e


def checksum(path):
    """Return size and crc32 of a file. Raises OSError."""
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            crc32 = zlib.crc32(block, crc32)
        return [file.tell(), crc32]


def sync(path):
    """Bring a file, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_states(folder: Path, parts: dict[str, StatePart]) -> dict[str, list[int]]:
    """Write what this rank saves of {name of a tensor: a part of it} as its files. Of GPUs' states
    one file's are on the host at a time, and a file is summed while the next is written. Returns
    size and crc32 of each by its name. Raises OSError."""
    saved = {name: part.values.nbytes for name, part in parts.items() if part.saves}
    sums = {}
    with ThreadPoolExecutor() as pool:
        for i, names in enumerate(pack(saved)):
            path = folder / f"rank-{dist.get_rank():05d}-{i}.safetensors"
            tensors = {}
            places = {}
            for name in names:
                part = parts[name]
                tensors[name] = part.values.cpu()
                places[name] = place_text(part)
            write_tensors(tensors, path, places)
            sums[path] = pool.submit(checksum, path)
    for path in sums:
        sync(path)
    return {path.name: found.result() for path, found in sums.items()}


def write_meta(folder: Path, meta: dict) -> None:
    """Write meta.json, whose last key is the checksum of all that goes before."""
    body = json.dumps(meta, indent=1).removesuffix("\n}")
    path = folder / "meta.json"
    path.write_text(f'{body},\n "crc32": {zlib.crc32(body.encode())}\n}}\n')
    sync(path)


# ---------------------------------------------------------------------------- reading
#
# A checkpoint may come from anybody. Nothing of it is believed before it is checked: the checksum
# of meta.json, the numbers that a resume computes with, the flags of the run (by train.Config), the
# names, kinds and sizes of the files, and that the parts of each state cover each of its elements
# exactly once.


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there, and its meta.json."""

    folder: Path
    meta: dict


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint of a folder. Raises ValueError if anything in it is not what was
    written; the checksums of large files are compared by check_files."""
    try:
        text = regular(folder / "meta.json").read_text()
        body, _, crc32 = text.rpartition(',\n "crc32": ')
        if crc32 != f"{zlib.crc32(body.encode())}\n}}\n":
            raise ValueError("meta.json is not what was written: its checksum differs")
        meta = json.loads(body + "}")
        check_meta(meta)
        saved = Checkpoint(folder, meta)
        for name, (size, _) in meta["files"].items():
            if not os.path.lexists(folder / name):
                raise ValueError(f"{name} is missing")
            if (folder / name).is_symlink() or not (folder / name).is_file():
                raise ValueError(f"{name} is no regular file")
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} bytes, not {size}")
        open_parts(saved)
    except Exception as e:  # whatever such files may hold
        raise ValueError(
            f"--resume: {folder} is not a whole checkpoint: {e or repr(e)}; others, if there are "
            "any, are beside it"
        ) from e
    return saved


def check_meta(meta: dict) -> None:
    """Raise ValueError unless what a resumed run computes with are numbers in their range, and file
    names are those that write_states gives."""

    def check_number(numbers: dict, name: str, low: int) -> None:
        value = numbers[name]
        if type(value) is not int or not low <= value < 2**63:
            raise ValueError(f"{name} in meta.json is {value!r}, not a whole number from {low} on")

    for name in ("config", "model", "source", "files"):
        if type(meta[name]) is not dict:
            raise ValueError(f"{name} in meta.json is {meta[name]!r}")
    for name in ("step", "samples"):
        check_number(meta, name, 0)
    for name, low in (("seq", 1), ("batch", 1), ("decay_steps", 0)):
        check_number(meta["config"], name, low)
    check_number(meta["model"], "max_positions", 1)
    if not meta["files"]:
        raise ValueError("meta.json names no files")
    for name, (size, crc32) in meta["files"].items():
        if not re.fullmatch(r"rank-\d{5}-\d+\.safetensors", name):
            raise ValueError(f"meta.json names a file {name!r}, which is no checkpoint's")
        check_number({"the size of a file": size}, "the size of a file", 0)
        check_number({"a file's crc32": crc32}, "a file's crc32", 0)


@dataclass(frozen=True)
class SavedPart:
    """Elements [start, start + count) of a flat tensor, in a file."""

    start: int
    count: int
    elements: object  # a slice of safetensors: what is indexed is read


@dataclass(frozen=True)
class SavedState:
    """All parts of a state, by the cut of the whole tensor that they are parts of; None: all."""

    shape: tuple[int, ...]
    parts: dict[Cut | None, list[SavedPart]]


def open_parts(saved: Checkpoint) -> dict[str, SavedState]:
    """Return what a checkpoint's files hold, by the names of states; nothing but their headers is
    read. Raises ValueError unless the parts of each state cover each element exactly once."""
    states = {}
    for file in saved.meta["files"]:
        handle = safe_open(saved.folder / file, "pt")
        places = handle.metadata() or {}
        if places.keys() != set(handle.keys()):
            raise ValueError(f"{file} does not say where its tensors belong")
        for name, text in places.items():
            start, shape, cut = read_place(text)
            elements = handle.get_slice(name)
            (count,) = elements.get_shape()
            state = states.setdefault(name, SavedState(shape, {}))
            if state.shape != shape:
                raise ValueError(f"{name} has two shapes, {state.shape} and {shape}")
            state.parts.setdefault(cut, []).append(SavedPart(start, count, elements))
    for name, state in states.items():
        check_cover(name, state)
    return states


def place_text(part: StatePart) -> str:
    """Return where a part belongs, as text for its file."""
    cut = part.cut and {"rows": part.cut.rows, "cols": part.cut.cols}
    return json.dumps({"start": part.start, "shape": part.shape, "cut": cut})


def read_place(text: str) -> tuple[int, tuple[int, ...], Cut | None]:
    """Return start, shape and cut of place_text. Raises ValueError if they are no such numbers."""
    place = json.loads(text)
    shape = tuple(place["shape"])
    numbers = [place["start"], *shape]
    cut = None
    if place["cut"] is not None:
        rows = tuple((first, end) for first, end in place["cut"]["rows"])
        first_col, end_col = place["cut"]["cols"]
        cut = Cut(shape, rows, (first_col, end_col))
        bounds = [bound for run in rows for bound in run]
        numbers += [*bounds, first_col, end_col]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{text} is no place of a tensor")
    if cut and not (
        len(shape) == 2
        and bounds == sorted(bounds)
        and bounds[-1] <= shape[0]
        and first_col < end_col <= shape[1]
    ):
        raise ValueError(f"{text} is no cut of a matrix")
    return place["start"], shape, cut


def check_cover(name: str, state: SavedState) -> None:
    """Raise ValueError unless a state's cuts cover the whole tensor, and their parts each cut,
    element by element exactly once."""
    size = math.prod(state.shape)
    cuts = [cut for cut in state.parts if cut is not None]
    areas = [math.prod(cut.shape) for cut in cuts]
    if cuts:
        overlap = any(overlaps(one, two) for one, two in itertools.combinations(cuts, 2))
        if len(cuts) < len(state.parts) or overlap or sum(areas) != size:
            raise ValueError(f"the parts of {name} that ranks share do not make the whole")
    for cut, parts in state.parts.items():
        end = 0
        for part in sorted(parts, key=lambda part: part.start):
            if part.start > end:
                raise ValueError(f"elements {end} to {part.start - 1} of {name} are missing")
            if part.start < end:
                last = min(end, part.start + part.count) - 1
                raise ValueError(f"elements {part.start} to {last} of {name} are there twice")
            end = part.start + part.count
        whole = math.prod(cut.shape) if cut else size
        if end != whole:
            raise ValueError(f"{name} ends at element {end}, not {whole}")


def overlaps(one: Cut, two: Cut) -> bool:
    """Return whether two cuts of a matrix have an element in common."""

    def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return max(a[0], b[0]) < min(a[1], b[1])

    return meet(one.cols, two.cols) and any(meet(a, b) for a in one.rows for b in two.rows)


def check_files(saved: Checkpoint) -> None:
    """Compare the checksums of files: rank r reads those of saved ranks r, r + world size, and so
    on. Raises OSError, or ValueError if they are not what was written."""

    def check(name):
        if checksum(saved.folder / name) != saved.meta["files"][name]:
            raise ValueError(
                f"--resume: {saved.folder / name} is not what was written: its "
                "checksum differs; others, if there are any, are beside it"
            )

    own = [
        name
        for name in saved.meta["files"]
        if int(name[5:10]) % dist.get_world_size() == dist.get_rank()
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(check, own))


def read_states(saved: Checkpoint, parts: dict[str, StatePart]) -> None:
    """Set parts of tensors from a checkpoint, of which no more is read than they need. Raises
    ValueError, also for what is not finite, or OSError."""
    states = open_parts(saved)
    one_at_a_time = threading.Lock()

    def read(name):
        part = parts[name]
        state = states.get(name)
        if state is None or state.shape != part.shape:
            raise ValueError(
                f"--resume: {saved.folder} does not hold {name} {part.shape}: it is "
                "of another model or optimizer"
            )
        if part.cut in state.parts:
            fill(part.values, state.parts[part.cut], part.start)
        else:
            with one_at_a_time:  # a whole matrix takes memory
                whole = read_whole(state, part.values.dtype)
                here = part.cut.of(whole) if part.cut else whole
                part.values.copy_(part.within(here))
        if not is_finite(part.values):
            raise ValueError(
                f"--resume: {saved.folder}: {name} has values that are not finite; "
                "others, if there are any, are beside it"
            )

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, parts))


def fill(values: Tensor, parts: list[SavedPart], first: int) -> None:
    """Set values (n,) to elements [first, first + n) of a flat tensor that lies in parts:

    a part      start |---------------| start + count
    values                  first |--------------------| first + n
    copied                        |---| of the part, to the first places of values
    """
    for part in parts:
        begin = max(first, part.start)
        end = min(first + len(values), part.start + part.count)
        if begin < end:
            found = part.elements[begin - part.start : end - part.start]
            values[begin - first : end - first].copy_(found)


def read_whole(state: SavedState, dtype: torch.dtype) -> Tensor:
    """Return a state's whole tensor, put together from all of its cuts."""
    whole = torch.empty(state.shape, dtype=dtype)
    rows, cols = state.shape
    everything = Cut(state.shape, ((0, rows),), (0, cols))
    for cut, parts in state.parts.items():
        box = cut or everything
        values = whole.new_empty(math.prod(box.shape))
        fill(values, parts, 0)
        box.put(values.view(box.shape), whole)
    return whole


def is_finite(values):
    return all(bound.isfinite() for bound in values.aminmax())  # a NaN is both of them


def load_checkpoint(states: States, saved: Checkpoint) -> None:
    """Read states from a checkpoint of any factors and ranks, whose files choose_checkpoint has
    checked. Raises ConfigError on all ranks if one of them does not get what was written. A
    collective of all ranks."""
    on_all_ranks(read_states, saved, states.state_parts())
    states.loaded()


# ---------------------------------------------------------------------------- saving


@dataclass
class Saver:
    """Saves a run's checkpoints: in the open, or (with `room` for it) copied to host memory at once
    and written by a thread while steps go on. A save that fails ends nothing: `failed` says why,
    and what was saved before stands.

        begin(meta)     collective: the states are copied, or written
        writing         this rank's thread has not done yet
        finish()        collective: all files are there, the checkpoint gets its name
    """

    out: Path
    keep: int
    states: States
    group: dist.ProcessGroup | None = None  # ranks.patient_group(), as one may write for long
    room: float | None = None  # bytes of host memory that copies may take; None: no copies
    failed: str = ""  # why the last save was none, in a sentence

    def __post_init__(self):
        """Raise MemoryError if there is no room for copies."""
        self.job = None  # of the thread: the files of this rank
        self.thread = ThreadPoolExecutor(1)
        if self.room is not None:
            tensors = {
                name: part.values for name, part in self.states.state_parts().items() if part.saves
            }
            size = buffer_bytes(tensors)
            if size > self.room:
                raise MemoryError(
                    f"--save-async: copies take {in_unit(size)} of host memory "
                    f"per rank, {in_unit(self.room)} are left; --no-save-async"
                )
            self.copies = carve(
                *pin_host_buffers([size], self.states.device.type == "cuda"), tensors
            )

    @property
    def writing(self) -> bool:
        return self.job is not None and not self.job.done()

    def begin(self, meta: dict) -> None:
        """Begin to save the states of step meta["step"]. meta: what a resumed run must know, as
        JSON. A collective of all ranks."""
        self.finish()
        self.meta = meta
        self.folder = self.out / f"step-{meta['step']:08d}.tmp"
        parts = self.states.state_parts()
        if self.room is not None:  # page-locked: at the speed of the link, or of memory
            parts = {
                name: replace(parts[name], values=copy.copy_(parts[name].values))
                for name, copy in self.copies.items()
            }
        self.job = self.thread.submit(write_states, self.folder, parts)
        if self.room is None:
            self.finish()

    def finish(self) -> None:
        """Wait for the files of all ranks, and give the checkpoint its name. A collective of all
        ranks."""
        if self.job is None:
            return

        def complete():  # as the files of all ranks are there
            files = {}
            for of_rank in written:
                files |= of_rank
            write_meta(self.folder, self.meta | {"files": files})
            sync(self.folder)
            final = self.folder.with_suffix("")
            self.folder.rename(final)
            sync(self.out)
            print(f"saved {final}")
            for old in steps_of(self.out)[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)

        try:
            written = of_all_ranks(on_all_ranks(self.job.result, group=self.group), self.group)
            # nobody goes on, and is killed, before it has its name
            on_rank_0(complete, group=self.group)
            self.failed = ""
        except ConfigError as e:
            on_rank_0(shutil.rmtree, self.folder, True, group=self.group)
            self.failed = f"step {self.meta['step']} was not saved: {self.folder}: {e}"
            print0(self.failed)
        self.job = None


# ---------------------------------------------------------------------------- a run's folder


def steps_of(out: Path) -> list[Path]:
    """Return the folders of checkpoints in OUT, by their steps; those that are being written or
    deleted have other names."""
    return sorted(out.glob("step-" + 8 * "[0-9]"))


def find_checkpoint(out: Path, resume: str, passed_over: Sequence[Path] = ()) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None. resume: never, latest, auto (latest, if
    there is one) or a folder. passed_over: folders that are known not to be whole. Raises
    ValueError."""
    if resume == "never":
        return None
    if resume not in ("auto", "latest"):
        return open_checkpoint(Path(resume))
    for folder in reversed(steps_of(out)):
        if folder not in passed_over:
            try:
                return open_checkpoint(folder)
            except ValueError as e:
                print(f"passed over: {e}")
    if resume == "latest":
        raise ValueError(f"--resume {resume}: there is no checkpoint in {out}")
    return None


def choose_checkpoint(out: Path, resume: str) -> Checkpoint | None:
    """Return what find_checkpoint finds on rank 0, with every file read and its checksum compared:
    each rank reads those of the rank of its number, whose parts it then needs. `auto` and `latest`
    pass over what is not whole. Raises ConfigError on all ranks. A collective of all ranks."""
    passed_over = []
    while True:
        # rank 0's choice: for a minute, another node may see a shared folder as it was
        saved = on_rank_0(find_checkpoint, out, resume, passed_over)
        if saved is None:
            return None
        try:
            on_all_ranks(check_files, saved)
            return saved
        except ConfigError as e:
            if resume not in ("auto", "latest"):
                raise
            print0(f"passed over: {e}")
            passed_over.append(saved.folder)


def check_same_model(saved: Checkpoint, model: ModelConfig, may_differ: set[str]) -> None:
    """Raise ValueError if a checkpoint is of another model. may_differ: fields that flags set, and
    those that change no weight."""
    ours = asdict(model)
    theirs = saved.meta["model"]
    wrong = [
        f"{name} {theirs.get(name)} (here {ours.get(name)})"
        for name in ours | theirs
        if name not in may_differ and ours.get(name) != theirs.get(name)
    ]
    if wrong:
        raise ValueError(
            f"--resume: {saved.folder} is of another model: {', '.join(wrong)}; a "
            "resume takes the checkpoint's, without --model, --init, --rope-scaling"
        )


def prepare_out(out: Path, resumed: Checkpoint | None, trains: bool) -> None:
    """Clear what a killed run left. If the run that goes on here trains, it goes back to the
    checkpoint that it resumes: later ones are put aside, and the log ends at its step. Of any other
    run all is put aside. Raises OSError."""
    for torn in out.glob("step-*.tmp"):
        if torn.is_symlink():
            torn.unlink()  # and not what it leads to
        else:
            shutil.rmtree(torn)
    last = -1
    if resumed and resumed.folder.resolve().parent.samefile(out):
        last = resumed.meta["step"] if trains else math.inf
    later = [folder for folder in steps_of(out) if int(folder.name[5:]) > last]
    if last < 0:
        later += [*out.glob("log.jsonl"), *out.glob("*.png")]
    if later:  # before the log is cut, lest it end before a later checkpoint
        n = 1
        while (out / f"earlier-{n}").exists():
            n += 1
        aside = out / f"earlier-{n}"
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        print(f"moved {', '.join(path.name for path in later)} to {aside}")
    log = out / "log.jsonl"
    if log.exists():
        kept = [json.dumps(row) + "\n" for row in read_log(log) if row["step"] <= last]
        replace_file(log, lambda new: new.write_text("".join(kept)))


def read_log(log: Path) -> list[dict]:
    """Return the rows of a log.jsonl; lines that are none are said. Raises OSError."""
    rows = []
    for line in regular(log).read_bytes().splitlines():
        try:
            row = json.loads(line)
            row["step"] + 0
            rows.append(row)
        except Exception:  # a crash leaves anything
            print(f"{log}: dropped what is no step's: {line[:60]}")
    return rows


@contextlib.contextmanager
def locked(out: Path):
    """Hold OUT for one run. Raises ValueError, with who has it, if another run does. The lock is
    the system's: it goes with the process, however that ends, so none is ever stale. Storage that
    has no locks (some shared file systems) is said, and not guarded."""
    with open_to_append(out / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"--out {out}: another run writes there ({file.read().strip()}); name another --out"
            ) from None
        except OSError as e:
            print(f"--out {out}: not guarded against a second run: {e}")
        file.truncate(0)
        print(
            f"host {os.uname().nodename}, process {os.getpid()}, since {time.ctime()}",
            file=file,
            flush=True,
        )
        os.fsync(file.fileno())  # other nodes read it
        yield


def check_shared(out: Path) -> None:
    """Raise ConfigError if a rank does not see the folder that rank 0 has locked. A collective of
    all ranks."""
    lock = out / "lock"

    def read() -> str:
        return regular(lock).read_text().strip() if lock.exists() else "another"

    what = f"the lock of --out {out}, which must be on storage that all nodes share,"
    check_same({what: on_all_ranks(read)})
