"""What is on disk? Checkpoints that resume under any factors, and Hugging Face's files.

    OUT/step-00000100/             a step's states
        rank-00000.safetensors     what a rank saves: of every tensor a part, flat
        meta.json                  step, samples seen, model, flags, data; of every tensor its shape
                                   and its parts; checksums of all that was written
    OUT/latest                     a link to the newest
    OUT/log.jsonl                  a line a step
    OUT/lock                       held by the run that writes here

Elements [start, start + count) of a flat tensor are a part. Whoever resumes, under any factors,
reads the extents of parts that overlap with its own (an extent is what has one checksum):

    saved, os = 2       |------- rank 0 -------|------- rank 1 -------|
    loaded, os = 3      |---- 0 -----|------ 1 ------|------ 2 -------|

Of a matrix that columns of ranks share (parallel.py's tensor modes) the flat tensor is what one of
them has, and a part says which rows and columns of the whole that is (its cut). Who has the same
cut reads as above; who has another one puts the whole matrix together first, one at a time.

A checkpoint is written under another name, synced, and renamed; then the link is replaced. Both are
atomic, so what `latest` names is whole at any moment, whoever is killed. Nothing that is read can
run code. Hugging Face's files are read and written one tensor at a time; ours are fused: qkv holds
q, k and v, gate_up two matrices.

    find_checkpoint(...) -> Checkpoint  load_checkpoint(states, found)       Saver(...).begin(meta)
    hf_config(source) -> ModelConfig    hf_open(folder, config) -> read      hf_export(...)

Left out: checkpoints in several places, and Hugging Face's files of other architectures
(_ARCHITECTURES), or in pickles.
"""
import contextlib
import errno
import fcntl
import functools
import itertools
import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data import regular
from model import ROPE_KEYS, ROPE_OPTIONS, Cut, LLaMA, ModelConfig, rope_kind
from offload import Field, buffer_bytes, carve, pin_host_buffers
from ranks import ConfigError, error_of_any, on_all_ranks
from shard import StatePart, States

# ---------------------------------------------------------------------------- a checkpoint's files

VERSION = 3  # of the format
DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}  # safetensors' names
SUM_BYTES = 2**24  # under one checksum: what is read to believe any of them
THREADS = 8  # of a rank, that copy, sum and write: zlib and the system let go of Python's lock
META = {"version": int, "number": int, "step": int, "samples": int, "decay_steps": int,
        "model": dict, "config": dict, "source": dict, "data": dict, "threads": int, "files": dict,
        "tensors": dict}


@dataclass(frozen=True)
class StoredPart:
    """Where elements of a flat tensor, or of a cut of it, lie in a checkpoint."""

    file: str
    offset: int  # bytes, of the first element in the file
    start: int  # of the first element in the tensor
    count: int  # elements
    crc32: list[int]  # of every SUM_BYTES
    cut: Cut | None = None  # in a file its rows and columns, or no key: then the tensor is not cut


# dtype, shape, and parts by their cut, of which each has all of its elements
StoredTensor = tuple[torch.dtype, tuple[int, ...], dict[Cut | None, list[StoredPart]]]


def write_at(handle: int, data: np.ndarray, offset: int) -> None:
    """Write all bytes. Raises OSError."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(handle, view, offset)
        view = view[written:]
        offset += written


def write_states(path: Path, parts: dict[str, StatePart]) -> tuple[dict, dict[str, dict]]:
    """Write {name of a tensor: a part of it} as one safetensors file, through little host memory
    (the library's own writer holds all of it). Returns what meta.json says of the file and of each
    tensor. Raises OSError."""
    header = {}
    end = 0
    for name, part in parts.items():
        begin = end
        end += part.values.nbytes
        count = part.values.numel()
        dtype, = (name for name, dtype in DTYPES.items() if dtype == part.values.dtype)
        shape = part.shape if count == math.prod(part.shape) else [count]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def write(values: Tensor, offset: int) -> int:
        data = values.cpu().view(torch.uint8).numpy()
        write_at(file.fileno(), data, offset)
        return zlib.crc32(data)

    stored = {}
    with open(path, "wb") as file, ThreadPoolExecutor(THREADS) as pool:
        file.write(head)
        file.flush()
        for name, part in parts.items():
            begin = len(head) + header[name]["data_offsets"][0]
            extents = part.values.split(SUM_BYTES // part.values.itemsize)
            sums = pool.map(write, extents, itertools.count(begin, SUM_BYTES))
            where = {"file": path.name, "offset": begin, "start": part.start,
                     "count": part.values.numel(), "crc32": sums}
            if part.cut is not None:
                where["cut"] = [part.cut.rows, part.cut.cols]
            stored[name] = {"dtype": header[name]["dtype"], "shape": part.shape, "parts": [where]}
        for entry in stored.values():
            where, = entry["parts"]
            where["crc32"] = list(where["crc32"])  # now, that all are being written
        os.fsync(file.fileno())
    return {"bytes": len(head) + end, "header": [len(head), zlib.crc32(head)]}, stored


def sync_folder(path: Path) -> None:
    """Bring names in a folder to the disk, where they do not go with the files."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_meta(folder: Path, meta: dict) -> None:
    """Write meta.json, a line a key, with a checksum of the rest."""
    crc32 = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    lines = [f"{json.dumps(key)}: {json.dumps(value)}"
             for key, value in ({"crc32": crc32} | meta).items()]
    with open(folder / "meta.json", "w") as file:
        file.write("{" + ",\n".join(lines) + "}\n")
        file.flush()
        os.fsync(file.fileno())


def read_meta(folder: Path) -> dict:
    """Return a checkpoint's meta.json, whose "tensors" become {name: (dtype, shape, {cut: its
    parts})}. Raises ValueError if it is of another version, or not what was written."""
    try:
        meta = json.loads(regular(folder / "meta.json").read_text())
        if not isinstance(meta, dict):
            raise TypeError("not an object")
        if meta.get("version") != VERSION:
            raise ValueError(f"of version {meta.get('version')!r}; this program reads {VERSION}")
        crc32 = meta.pop("crc32")
        if crc32 != zlib.crc32(json.dumps(meta, sort_keys=True).encode()):
            raise ValueError("meta.json is not what was written: its checksum differs")
        for key, kind in META.items():
            if type(meta[key]) is not kind:
                raise TypeError(f"{key} is {meta[key]!r}")
        if meta["source"] and meta["source"].get("model_type") not in list(_ARCHITECTURES):
            raise ValueError("its source is of an architecture that is not built")
        check_counts(meta["step"], meta["samples"], meta["decay_steps"], meta["number"])
        for entry in meta["files"].values():
            check_counts(entry["bytes"], *entry["header"])
        meta["tensors"] = {name: read_tensor(meta["files"], entry)
                           for name, entry in meta["tensors"].items()}
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as e:
        why = f"no {e}" if isinstance(e, KeyError) else e
        raise ValueError(f"--resume: {folder} is not a whole checkpoint: {why}") from e
    return meta


def check_counts(*counts) -> None:
    """Raise TypeError for what is none."""
    if not all(type(n) is int and n >= 0 for n in counts):
        raise TypeError(f"{counts} are no counts")


def read_tensor(files: dict, entry: dict) -> StoredTensor:
    """Return dtype, shape and parts of a tensor. Raises ValueError if parts are missing, overlap or
    leave their files, KeyError or TypeError for what is not there or something else."""
    dtype = DTYPES[entry["dtype"]]
    shape = tuple(entry["shape"])
    check_counts(*shape)
    by_cut: dict[Cut | None, list[StoredPart]] = {}
    for part in entry["parts"]:
        cut = read_cut(shape, part.get("cut"))
        by_cut.setdefault(cut, []).append(StoredPart(**part | {"cut": cut}))
    if by_cut.keys() - {None}:
        check_cuts(shape, list(by_cut))
    for cut, parts in (by_cut or {None: []}).items():
        end = 0
        for part in sorted(parts, key=lambda part: part.start):
            check_counts(part.offset, part.start, part.count, *part.crc32)
            bytes = part.count * dtype.itemsize
            inside = part.offset + bytes <= files[part.file]["bytes"]
            summed = len(part.crc32) == -(-bytes // SUM_BYTES)
            plain = re.fullmatch(r"rank-\d+\.safetensors", part.file)  # not a path
            if part.start != end or not (inside and summed and plain):
                raise ValueError(f"{part} after element {end}")
            end += part.count
        if end != math.prod(cut.shape if cut else shape):
            raise ValueError(f"{end} elements of {cut or shape}")
    return dtype, shape, by_cut


def read_cut(shape: tuple, stored: list | None) -> Cut | None:
    """Return the cut of a stored part. Raises TypeError or ValueError if it is none."""
    if stored is None:
        return None
    rows, cols = stored
    cut = Cut(shape, tuple((first, end) for first, end in rows), tuple(cols))
    for first, end in (*cut.rows, cut.cols):
        check_counts(first, end)
    return cut


def check_cuts(shape: tuple, cuts: list[Cut | None]) -> None:
    """Raise ValueError unless cuts are all of a matrix, each element once."""
    if None in cuts or len(shape) != 2:
        raise ValueError(f"cut parts of {shape}, and others")
    boxes = [(*rows, *cut.cols) for cut in cuts for rows in cut.rows]
    for i, (top, bottom, left, right) in enumerate(boxes):
        if not (top < bottom <= shape[0] and left < right <= shape[1]):
            raise ValueError(f"rows {top} to {bottom}, columns {left} to {right} of {shape}")
        for top2, bottom2, left2, right2 in boxes[:i]:
            if top < bottom2 and top2 < bottom and left < right2 and left2 < right:
                raise ValueError(f"rows {top} to {bottom}, columns {left} to {right} of {shape} "
                                 "are there twice")
    held = sum((bottom - top) * (right - left) for top, bottom, left, right in boxes)
    if held != math.prod(shape):
        raise ValueError(f"cuts have {held} elements of {shape}")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, and its meta.json as read_meta returns it."""

    folder: Path
    meta: dict


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint of a folder. Raises ValueError if a file is missing or cut short."""
    meta = read_meta(folder)
    for name, entry in meta["files"].items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != entry["bytes"]:
            what = "is missing" if found is None else f"has {found} bytes, not {entry['bytes']}"
            raise ValueError(
                f"--resume: {folder / name} {what}; earlier checkpoints are beside it")
    return Checkpoint(folder, meta)


def read_at(path: Path, size: int, offset: int, crc32: int) -> np.ndarray:
    """Return so many bytes of a file. Raises ValueError if they are not what was written."""
    data = np.empty(size, np.uint8)
    with open(path, "rb", buffering=0) as file:
        found = os.preadv(file.fileno(), [data], offset)
    if found != size or zlib.crc32(data) != crc32:
        raise ValueError(f"--resume: {path}: {size} bytes from {offset} are not what was written: "
                         "their checksum differs; earlier checkpoints are beside it")
    return data


def read_states(saved: Checkpoint, parts: dict[str, StatePart]) -> None:
    """Set parts of tensors from a checkpoint, of which no more is read than checksums need. Raises
    ValueError, also for what is not finite, or OSError."""
    folder = saved.folder
    stored = saved.meta["tensors"]
    shapes = {name: shape for name, (_, shape, _) in stored.items()}
    wrong = [f"{name} {part.shape} (there: {shapes.get(name, 'nothing')})"
             for name, part in parts.items() if shapes.get(name) != part.shape]
    if wrong:
        raise ValueError(f"--resume: {folder} does not hold {', '.join(wrong[:3])}: it is of "
                         "another model or optimizer")

    @functools.cache
    def believe(file: str) -> None:
        """Read a file's header once: it must be what was written."""
        size, crc32 = saved.meta["files"][file]["header"]
        read_at(folder / file, size, 0, crc32)

    def run(jobs: list[tuple]) -> None:
        for file, *_ in jobs:
            believe(file)
        for done in [pool.submit(read_extent, folder / file, *job) for file, *job in jobs]:
            done.result()

    def read_whole(dtype: torch.dtype, shape: tuple, by_cut: dict) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for cut, stored_parts in by_cut.items():
            flat = whole.view(-1) if cut is None else torch.empty(math.prod(cut.shape), dtype=dtype)
            run(jobs_of(flat, 0, dtype, stored_parts))
            if cut is not None:
                cut.put(flat.view(cut.shape), whole)
        return whole

    jobs = []
    with ThreadPoolExecutor(THREADS) as pool:
        for name, part in parts.items():
            dtype, shape, by_cut = stored[name]
            if part.cut in by_cut:
                jobs += jobs_of(part.values, part.start, dtype, by_cut[part.cut])
                continue
            whole = read_whole(dtype, shape, by_cut)
            flat = (whole if part.cut is None else part.cut.of(whole)).reshape(-1)
            part.values.copy_(flat[part.start : part.start + part.values.numel()])
        run(jobs)
    for name, part in parts.items():
        if part.values.numel() and not all(x.isfinite() for x in part.values.aminmax()):  # or NaN
            raise ValueError(f"--resume: {folder}: {name} has values that are not finite; earlier "
                             "checkpoints are beside it")


def jobs_of(values: Tensor, start: int, dtype: torch.dtype, parts: list[StoredPart]) -> list[tuple]:
    """Return a file and the other arguments of `read_extent`, for each extent that has some of the
    values, which begin at element `start`."""
    jobs = []
    step = SUM_BYTES // dtype.itemsize
    for part in parts:
        for i, crc32 in enumerate(part.crc32):
            begin = part.start + i * step
            end = min(begin + step, part.start + part.count)
            first, last = max(start, begin), min(start + len(values), end)
            if first < last:
                jobs.append((part.file, part.offset + i * SUM_BYTES, end - begin, dtype, crc32,
                             first - begin, values[first - start : last - start]))
    return jobs


def read_extent(path: Path, offset: int, count: int, dtype: torch.dtype, crc32: int, first: int,
                into: Tensor) -> None:
    """Copy an extent's elements from the first on, of the `count` that must be read to believe
    them. Raises ValueError or OSError."""
    data = read_at(path, count * dtype.itemsize, offset, crc32)
    into.copy_(torch.from_numpy(data).view(dtype)[first : first + len(into)])


def load_checkpoint(states: States, saved: Checkpoint) -> None:
    """Read states from a checkpoint of any factors and ranks. Raises ConfigError on all ranks if
    one of them does not get what was written. A collective of all ranks."""
    on_all_ranks(lambda: read_states(saved, states.state_parts()))
    states.loaded()


# ---------------------------------------------------------------------------- saving


class Saver:
    """Saves a run's checkpoints: in the open, or (`background`) copied to host memory at once and
    written by a thread while steps go on. A save that fails ends nothing: `failed` says why, and
    what was saved before stands.

        begin(meta)     collective: the states are copied, or written
        writing         this rank's thread has not done yet
        finish()        collective: all files are there, the checkpoint gets its name
    """

    def __init__(self, out: Path, keep: int, states: States, background: bool = False,
                 group: dist.ProcessGroup | None = None):
        """group: ranks.patient_group(), as one may write for long. background: takes the host
        memory of `host_fields`. Raises MemoryError."""
        self.out = out
        self.keep = keep
        self.states = states
        self.group = group
        self.meta: dict = {}  # of the checkpoint that is being written, {}: none is
        self.job: Future | None = None
        self.failed = ""  # why the last save was none, in a sentence
        self.copies: dict[str, Tensor] | None = None  # (count,) of each tensor, on the host
        if background:
            self.copies = host_copies(states)

    @property
    def writing(self) -> bool:
        return self.job is not None and not self.job.done()

    @property
    def folder(self) -> Path:
        return self.out / f"step-{self.meta['step']:08d}.tmp"

    def begin(self, meta: dict) -> None:
        """Begin to save the states of step meta["step"]. meta: what a resumed run must know, as
        JSON. A collective of all ranks."""
        self.finish()
        self.meta = meta
        error = ""
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
            except OSError as e:
                error = sentence(e, self.folder)
        if self.fails(error):
            return
        parts = saved_parts(self.states)
        file = self.folder / f"rank-{dist.get_rank():05d}.safetensors"
        pool = ThreadPoolExecutor(1)
        if self.copies is not None:  # page-locked: at the speed of the link, or of memory
            parts = {name: replace(part, values=self.copies[name].copy_(part.values))
                     for name, part in parts.items()}
        self.job = pool.submit(write_states, file, parts)
        pool.shutdown(wait=False)
        if self.copies is None:
            self.finish()

    def finish(self) -> None:
        """Wait for the files of all ranks, and give the checkpoint its name. A collective of all
        ranks."""
        if self.job is None:
            return
        error = ""
        written = None
        try:
            written = self.job.result()
        except FileNotFoundError:
            error = (f"{self.folder}, which rank 0 has made, is not there: --out must stay, and be "
                     "on storage that all nodes share")
        except (OSError, RuntimeError, MemoryError) as e:
            error = sentence(e, self.folder)
        self.job = None
        if self.fails(error):
            return
        every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(written, every, group=self.group)
        if dist.get_rank() == 0:
            try:
                self.complete(every)
            except (OSError, ValueError) as e:
                error = sentence(e, self.folder)
        if not self.fails(error):  # and nobody goes on, and is killed, before `latest` names it
            self.meta = {}
            self.failed = ""

    def fails(self, error: str) -> bool:
        """Return whether a rank has an error: then this save is none. A collective."""
        error = error_of_any(error, self.group)
        if error:
            self.failed = f"step {self.meta['step']} was not saved: {error}"
            if dist.get_rank() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
                print(self.failed, flush=True)
            self.meta = {}
        return bool(error)

    def complete(self, written: list[tuple[dict, dict[str, dict]]]) -> None:
        """Give a checkpoint its name when the files of all ranks are there, let OUT/latest name it,
        and delete old ones. written: what each rank's write_states returned. Raises OSError."""
        files = {}
        tensors: dict[str, dict] = {}
        for rank, (file, stored) in enumerate(written):
            path = self.folder / f"rank-{rank:05d}.safetensors"
            if not path.exists() or path.stat().st_size != file["bytes"]:
                raise OSError(errno.ENOENT, f"rank {rank}'s file is not there for rank 0: --out "
                              "must be on storage that all nodes share", path)
            files[path.name] = file
            for name, entry in stored.items():
                parts = tensors.setdefault(name, entry | {"parts": []})["parts"]
                parts += entry["parts"]
        whole = whole_checkpoints(self.out)
        number = whole[-1].meta["number"] + 1 if whole else 1
        write_meta(self.folder, {"version": VERSION, "number": number} | self.meta
                   | {"files": files, "tensors": tensors})
        sync_folder(self.folder)
        publish(self.out, self.keep, self.folder)


def saved_parts(states: States) -> dict[str, StatePart]:
    """Return what this rank writes."""
    return {name: part for name, part in states.state_parts().items() if part.saves}


def host_fields(states: States) -> list[Field]:
    """Return what copies of all that this rank writes take on the host (offload.buffer_bytes)."""
    return [(name, tuple(part.values.shape), part.values.dtype)
            for name, part in saved_parts(states).items()]


def host_copies(states: States) -> dict[str, Tensor]:
    """Return host memory for what this rank writes, page-locked beside GPUs. Raises MemoryError."""
    fields = host_fields(states)
    sizes = [buffer_bytes(fields)]
    memory, = pin_host_buffers(sizes, states.device.type == "cuda")
    return carve(memory, fields)


def sentence(e: Exception, path: Path) -> str:
    """path: what was at work, since the system names no file when a write fails."""
    return f"{getattr(e, 'filename', None) or path}: {getattr(e, 'strerror', None) or repr(e)}"


def publish(out: Path, keep: int, writing: Path) -> None:
    """Give a whole checkpoint its name, let OUT/latest name it, and delete old ones."""
    name = writing.name.removesuffix(".tmp")
    final = out / name
    branch = 0
    while final.exists():  # an earlier branch of this run: `latest` may name it
        branch += 1
        final = out / f"{name}-{branch}"
    os.rename(writing, final)
    sync_folder(out)  # the folder that the link names is on disk before the link is
    link_latest(out, final.name)
    for old in [saved.folder for saved in whole_checkpoints(out)[:-keep]]:
        torn = old.with_name(f"{old.name}.old")
        try:
            os.rename(old, torn)  # killed while it deletes, this leaves nothing that looks whole
            shutil.rmtree(torn)
        except OSError as e:
            print(f"not deleted: {sentence(e, old)}", flush=True)
    print(f"saved {final}", flush=True)


def link_latest(out: Path, name: str) -> None:
    """Let OUT/latest name a checkpoint in OUT. Raises OSError."""
    link = out / "latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    os.replace(link, out / "latest")
    sync_folder(out)


# ---------------------------------------------------------------------------- a run's folder


def whole_checkpoints(out: Path) -> list[Checkpoint]:
    """Return the whole checkpoints of a folder, in the order in which they were saved."""
    found = []
    for folder in out.glob("step-*"):
        if not re.fullmatch(r"step-\d{8,}(-\d+)?", folder.name):
            continue  # being written or deleted
        with contextlib.suppress(ValueError, OSError):  # torn: it neither counts nor displaces
            found.append(open_checkpoint(folder))
    # not by the clock, nor the step: a run may go back to an earlier one
    return sorted(found, key=lambda saved: (saved.meta["number"], saved.folder))


def newest_checkpoint(out: Path) -> Checkpoint | None:
    """Return the checkpoint that OUT/latest names, or if that leads nowhere the newest whole one;
    None if there is none. Raises ValueError if `latest` names one that is not whole."""
    try:
        folder = (out / "latest").resolve(strict=True)
    except (OSError, RuntimeError) as e:  # not there; dangling; a link to itself
        *_, newest = [None, *whole_checkpoints(out)]
        if newest and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"{out / 'latest'} leads nowhere ({type(e).__name__}): {newest.folder} is the "
                  "newest whole checkpoint", flush=True)
        return newest
    return open_checkpoint(folder)


def find_checkpoint(out: Path, resume: str) -> Checkpoint | None:
    """Return the whole checkpoint to continue from, or None. resume: never, latest, auto (latest,
    if there is one) or a folder. Raises ValueError."""
    if resume == "never":
        return None
    if resume in ("auto", "latest"):
        newest = newest_checkpoint(out)
        if newest is None and resume == "latest":
            raise ValueError(f"--resume {resume}: there is no checkpoint in {out}")
        return newest
    folder = Path(resume)
    if not folder.exists():
        raise ValueError(f"--resume {resume}: there is no {folder}")
    return open_checkpoint(folder)


def check_same_model(saved: Checkpoint, model: ModelConfig, may_differ: set[str]) -> None:
    """Raise ValueError if a checkpoint is of another model. may_differ: fields that flags set, and
    those that change no weight."""
    ours = asdict(model)
    defaults = {f.name: f.default for f in fields(ModelConfig)}
    theirs = defaults | saved.meta["model"]  # a field newer than the checkpoint has its default
    wrong = [f"{name} {value} (here {ours.get(name, 'unknown')})" for name, value in theirs.items()
             if name not in may_differ and (name not in ours or value != ours[name])]
    if wrong:
        made = saved.meta["config"]
        source = f"--model {made.get('model')}"
        if made.get("model") == "auto":  # an import
            flags = ("init", "rope_scaling")
            source = " ".join(f"--{name.replace('_', '-')} {made[name]}" for name in flags
                              if made.get(name)) + "; a resume needs none of these flags"
        raise ValueError(f"--resume: {saved.folder} is of another model: {', '.join(wrong)}; it "
                         f"was made with {source}")


def prepare_out(out: Path, resumed: Checkpoint | None, trains: bool) -> None:
    """Clear what a killed run left. If the run that goes on here trains, it goes back to the
    checkpoint that it resumes: `latest` names it, and the log ends at its step. Any other run is
    put aside. Raises OSError."""
    for torn in (*out.glob("step-*.tmp"), *out.glob("step-*.old")):
        shutil.rmtree(torn)
    (out / "latest.tmp").unlink(missing_ok=True)
    log = out / "log.jsonl"
    folder = resumed.folder.resolve() if resumed else None
    if folder is None or folder.parent != out.resolve():
        put_aside(out)
        return
    if trains:  # before the log is cut, lest its rows be missed under a later `latest`
        link_latest(out, folder.name)
    if log.exists():
        rows, bad = read_log(log)
        if bad:
            print(f"{log}: dropped what is no step's: {', '.join(bad[:3])}")
        kept = [json.dumps(row) + "\n" for row in rows
                if not trains or row["step"] <= resumed.meta["step"]]
        (out / "log.tmp").write_text("".join(kept))
        os.replace(out / "log.tmp", log)


def read_log(log: Path) -> tuple[list[dict], list[str]]:
    """Return the rows of a log.jsonl, and in words the lines that are none. Raises OSError."""
    rows = []
    bad = []
    for number, line in enumerate(regular(log).read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row["step"]) is not int:
                raise ValueError("no step")
            rows.append(row)
        except (ValueError, KeyError, RecursionError):
            bad.append(f"line {number}")
    return rows, bad


@contextlib.contextmanager
def locked(out: Path):
    """Hold OUT for one run. Raises ValueError, with who has it, if another run does. The lock is
    the system's: it goes with the process, however that ends, so none is ever stale. Storage that
    has no locks (some shared file systems) is said, and not guarded."""
    file = open(out / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ValueError(f"--out {out}: another run writes there ({owner}); name another "
                         "--out") from None
    except OSError as e:
        print(f"--out {out}: not guarded against a second run: {e}", flush=True)
    file.truncate(0)
    file.write(f"host {os.uname().nodename}, process {os.getpid()}, since {time.ctime()}\n")
    file.flush()
    os.fsync(file.fileno())  # other nodes read it
    try:
        yield
    finally:
        file.close()


def check_shared(out: Path) -> None:
    """Raise ConfigError if a rank does not see the folder that rank 0 has locked. A collective of
    all ranks."""
    try:
        mine = (out / "lock").read_bytes()
    except OSError:
        mine = b""
    seen = [b""] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    if wrong := [rank for rank, lock in enumerate(seen) if lock != seen[0]]:
        raise ConfigError(f"--out {out}: another folder on ranks {wrong} than rank 0's: it must be "
                          "on storage that all nodes share")


def put_aside(out: Path) -> None:
    """Move an earlier run in OUT to OUT/earlier-N."""
    names = ("log.jsonl", "loss.png", "position.png", "latest")
    files = [out / name for name in names] + [*out.glob("step-*")]
    old = [path for path in files if os.path.lexists(path)]
    if not old:
        return
    n = 1
    while (out / f"earlier-{n}").exists():
        n += 1
    aside = out / f"earlier-{n}"
    aside.mkdir()
    for path in old:
        os.rename(path, aside / path.name)
    print(f"moved an earlier run to {aside}")


# ---------------------------------------------------------------------------- Hugging Face files
#
# Exactly or not at all: what is imported has the logits that transformers computes, as has what is
# exported, or a ValueError names the key, the tensor or the file that stands in the way. Keys that
# change no logits (dropout, token ids, ...) are not looked at; they go along with an export.

_HF = {  # our weight: theirs, whose rows follow one another in it
    "embed": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"],
    "norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "qkv_bias": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "q_norm": ["self_attn.q_norm"], "k_norm": ["self_attn.k_norm"],
    "out": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


_HF_KEYS = {  # our field: its key in config.json
    "vocab": "vocab_size", "dim": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "ffn": "intermediate_size",
    "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling", "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}

_LARGEST = {  # our field: the largest number of a file that is taken; sizes are whole
    "vocab": 2**31, "dim": 2**20, "layers": 2**12, "heads": 2**16, "kv_heads": 2**16,
    "ffn": 2**24, "head_dim": 2**16, "max_positions": 2**40, "norm_eps": 1.0, "rope_theta": 1e30,
}


@dataclass(frozen=True)
class Architecture:
    """A model_type of transformers, as far as it is built."""

    name: str  # its class
    implied: dict  # our fields that it has no key for
    fixed: dict  # keys, and the only value of each that is built
    defaults: dict  # of keys that a file may leave out


_ARCHITECTURES = {  # of models from scratch, the first that fits
    "llama": Architecture("LlamaForCausalLM", {}, {"attention_bias": False, "mlp_bias": False},
                          {"max_position_embeddings": 2048}),
    "mistral": Architecture("MistralForCausalLM", {}, {}, {
        "max_position_embeddings": 2**17, "num_key_value_heads": 8}),
    "qwen2": Architecture("Qwen2ForCausalLM", {"qkv_bias": True}, {}, {
        "max_position_embeddings": 2**15, "num_key_value_heads": 32}),
    "qwen3": Architecture("Qwen3ForCausalLM", {"qk_norm": True}, {"attention_bias": False}, {
        "max_position_embeddings": 2**15, "num_key_value_heads": 32, "head_dim": 128}),
}
_FIXED = {"hidden_act": "silu", "quantization_config": None, "per_layer_config": None,
          "partial_rotary_factor": 1.0, "original_max_position_embeddings": None}
_COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
           "tekken.json", "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*",
           "USE_POLICY*")  # beside the weights of an import


_CONVERSIONS = {  # files that are not read: the command that makes some that are
    "pytorch_model*.bin": "python -c \"from transformers import AutoModelForCausalLM as M; "
                          "M.from_pretrained('{0}', torch_dtype='auto').save_pretrained('{0}')\"",
    "*.pth": "pip install 'transformers<5' && python -m transformers.models.llama"
             ".convert_llama_weights_to_hf --input_dir {0} --output_dir {0}-hf",
}


def _hf_parts(cfg: ModelConfig, name: str, rows: int) -> list[tuple[str, int]]:
    """Return (their name, rows) of each part of our parameter."""
    *layer, leaf, _ = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    suffix = "bias" if leaf == "qkv_bias" else "weight"
    qkv = [n * cfg.head_dim for n in (cfg.heads, cfg.kv_heads, cfg.kv_heads)]
    split = {"qkv": qkv, "qkv_bias": qkv, "gate_up": [cfg.ffn, cfg.ffn]}.get(leaf, [rows])
    return [(f"{prefix}{part}.{suffix}", n) for part, n in zip(_HF[leaf], split)]


def hf_source(folder: str | Path) -> dict:
    """Return config.json as it is. Raises ValueError if it is not an object of an architecture that
    is built."""
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise ValueError(f"--init hf:{folder}: no such folder; `hf download NAME --local-dir DIR` "
                         "makes one")
    if not path.exists():
        _hf_files(path.parent)  # of pickles it says more
    try:
        c = json.loads(regular(path).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} cannot be read: {e}") from e
    if not isinstance(c, dict):
        raise ValueError(f"{path}: {type(c).__name__}, not an object with keys")
    if c.get("model_type") not in list(_ARCHITECTURES):  # whatever it is
        raise ValueError(f"{path}: model_type is {c.get('model_type')!r}; one of "
                         f"{', '.join(_ARCHITECTURES)} is built")
    return c


def hf_config(source: dict) -> ModelConfig:
    """Return the model of a config.json. Raises ValueError for what is not built."""
    try:
        return _hf_model(source, _ARCHITECTURES[source["model_type"]])
    except KeyError as e:
        raise ValueError(f"config.json: no key {e}") from e
    except ValueError as e:
        raise ValueError(f"config.json: {e}") from e


def _hf_model(c: dict, architecture: Architecture) -> ModelConfig:
    """Return the model of a config.json c. Raises ValueError, or KeyError for a key that is
    missing."""
    for key, only in (_FIXED | architecture.fixed).items():
        if c.get(key) not in (None, only):
            raise ValueError(f"{key} is {c[key]!r}; only {json.dumps(only)} is built")
    c = architecture.defaults | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False} | c
    theta, scaling = _hf_rope(c)
    positions = c["max_position_embeddings"]
    if scaling and "original_max_position_embeddings" in ROPE_KEYS[scaling["rope_type"]]:
        scaling.setdefault("original_max_position_embeddings", positions)
    heads = c["num_attention_heads"]
    if c.get("head_dim") is None:
        legal = type(c["hidden_size"]) is type(heads) is int and heads > 0
        c["head_dim"] = c["hidden_size"] // heads if legal else None
    if c.get("num_key_value_heads") is None:
        c["num_key_value_heads"] = heads
    ours = {field: c[key] for field, key in _HF_KEYS.items() if not field.startswith("rope")}
    ours["rope_theta"] = theta
    for field, most in _LARGEST.items():
        _check_number(field, ours[field], most)
    kind = scaling.get("rope_type")
    options = [key for key in ROPE_OPTIONS if key in scaling]
    for key in [*ROPE_KEYS.get(kind, ()), *options]:
        _check_number(f"{key} of {kind} scaling", scaling.get(key), 1e30)
    cfg = ModelConfig(**ours, rope_scaling=scaling, **architecture.implied)
    if scaling.get("rope_type") == "linear" and type(c.get("max_sequence_length")) is int:
        positions = max(positions, c["max_sequence_length"])  # of files that leave it as it was
    if scaling.get("rope_type") == "yarn":  # what it reaches, whether or not the file says it
        positions = scaling["original_max_position_embeddings"] * scaling["factor"]
    return replace(cfg, max_positions=round(positions))


def _check_number(name: str, value, most: int | float) -> None:
    """Raise ValueError unless value is a number above 0 and at most `most`, whole if that is."""
    legal = "a whole number from 1" if type(most) is int else "a number above 0, up"
    if type(value) not in (int, type(most)) or not 0 < value <= most:  # True is an int, too
        raise ValueError(f"{name} is {value!r}: {legal} to {most}")


def _hf_rope(c: dict) -> tuple[float, dict]:
    """Return rope_theta and the scaling. transformers 5 keeps both in rope_parameters, 4 in
    rope_theta and rope_scaling; a file may have all, if they agree. Raises ValueError."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = c.get(key)
        if rope in (None, {}):
            continue
        if not isinstance(rope, dict):
            raise ValueError(f"{key} is {rope!r}: an object with keys, or null")
        known = {"rope_type", "type", "rope_theta", *ROPE_OPTIONS,
                 "finetuned"}  # the last of Yarn-Llama-2: no frequency reads it
        if unknown := rope.keys() - known.union(*ROPE_KEYS.values()):
            raise ValueError(f"{key} with {sorted(unknown)} is not built")
        kind = rope_kind(rope)
        scaling = {}
        if kind != "default":
            if kind not in list(ROPE_KEYS):
                raise ValueError(f"{key} of type {kind!r} is not built; {', '.join(ROPE_KEYS)} are")
            read = ROPE_KEYS[kind] + (ROPE_OPTIONS if kind == "yarn" else ())
            scaling = {"rope_type": kind}
            scaling |= {name: rope[name] for name in read if rope.get(name) is not None}
        found[key] = (rope.get("rope_theta", c.get("rope_theta", 10000.0)), scaling)
    if "rope_theta" in c:
        found["rope_theta"] = (c["rope_theta"], next(iter(found.values()), (None, {}))[1])
    (key, rope), *others = found.items() or [("", (10000.0, {}))]
    for other, value in others:
        if value != rope:
            raise ValueError(f"{key} says {rope}, {other} says {value}: which one is meant is not "
                             "known; delete one")
    return rope


def hf_window(source: dict) -> int:
    """Return how many tokens a token attends to, itself among them, in layers with a sliding window
    of an import; 0: no layer has one. source: its config.json, or {}. Raises ValueError."""
    kind = source.get("model_type", "llama")
    window = source.get("sliding_window", 4096)
    types = source.get("layer_types")
    first = source.get("max_window_layers", 28)
    if kind == "llama":  # whose code reads none of the keys
        return 0
    if kind == "mistral":
        slides = window is not None
    elif isinstance(types, list):
        slides = "sliding_attention" in types
    else:
        slides = (source.get("use_sliding_window", False) and window is not None
                  and (type(first) is not int or first < source["num_hidden_layers"]))
    if slides and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window is {window!r}: a whole number from 1")
    return window if slides else 0


def _hf_files(root: Path) -> list[str]:
    """Return the names of the files that hold the weights. Raises ValueError."""
    index = root / "model.safetensors.index.json"
    single = root / "model.safetensors"
    if not index.exists():
        for pattern, command in _CONVERSIONS.items():
            if not single.exists() and (found := sorted(root.glob(pattern))):
                raise ValueError(f"{root}: {found[0].name} is a pickle, which is never read, since "
                                 f"it may run code; convert it first: {command.format(root)}")
        return [single.name]
    try:
        places = json.loads(regular(index).read_text())["weight_map"]
        names = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{index}: weights missing or truncated: {type(e).__name__}: {e}") from e
    for name in names or [None]:
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise ValueError(f"{index}: {name!r} is not the name of a .safetensors file beside it")
    if single.exists() and single.name not in names:
        raise ValueError(f"{root}: {single.name} and {index.name}, which names {names[0]}, both "
                         "say what the weights are; delete one of them")
    return names


def hf_open(folder: str | Path, cfg: ModelConfig) -> Callable[[str], Tensor]:
    """Check all files, names, dtypes and shapes against cfg; return name -> tensor, read when it is
    called.

    So no more than one tensor is in memory at a time. Raises ValueError naming what is missing,
    truncated, misshapen or left over; a read raises it for what is not finite.
    """
    from safetensors import SafetensorError, safe_open

    root = Path(folder)
    files = {}
    for file in _hf_files(root):
        try:
            f = safe_open(regular(root / file), "pt")
        except (OSError, ValueError, SafetensorError) as e:
            raise ValueError(f"{root / file}: weights missing or truncated: {type(e).__name__}: "
                             f"{e}") from e
        if twice := files.keys() & f.keys():
            raise ValueError(f"{folder}: {sorted(twice)[0]} is in two files; one is {file}")
        files.update(dict.fromkeys(f.keys(), f))
    with torch.device("meta"):
        shapes = LLaMA(cfg).shapes
    wanted = {part: (rows, *shape[1:]) for name, shape in shapes.items()
              for part, rows in _hf_parts(cfg, name, shape[0])}
    stored = {"lm_head.weight": "model.embed_tokens.weight"} if cfg.tied else {}
    for part, want in wanted.items():
        source = stored.get(part, part)
        if source not in files:
            raise ValueError(f"{folder}: no tensor {part} {want} in the weights")
        found = files[source].get_slice(source)
        got = tuple(found.get_shape())
        if got != want:
            raise ValueError(f"{folder}: {part} is {got}, config.json says {want}")
        if found.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{folder}: {part} is stored as {found.get_dtype()}; F64, F32, F16 "
                             "and BF16 are read")
    if extra := {n for n in files.keys() - wanted if not n.endswith("rotary_emb.inv_freq")}:
        raise ValueError(f"{folder}: {len(extra)} tensors have no place here: {sorted(extra)[:3]}")
    for name in stored.keys() & files.keys():
        pair = [files[n].get_tensor(n) for n in (name, stored[name])]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
            raise ValueError(f"{folder}: config.json says that {name} is {stored[name]} "
                             "(tie_word_embeddings), and the weights have another; make the key "
                             "false to take it, or delete the tensor")

    def read(name: str) -> Tensor:
        parts = []
        for part, _ in _hf_parts(cfg, name, shapes[name][0]):
            source = stored.get(part, part)
            tensor = files[source].get_tensor(source)
            if not all(bound.isfinite() for bound in tensor.aminmax()):  # a NaN is both of them
                raise ValueError(f"{folder}: {part} has values that are not finite")
            parts.append(tensor)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return read


def hf_model(folder: str | Path) -> LLaMA:
    """Return the model of a Hugging Face folder on the CPU, in float32. Raises ValueError."""
    cfg = hf_config(hf_source(folder))
    read = hf_open(folder, cfg)
    model = LLaMA(cfg)
    for name, p in model.named_parameters():
        p.data.copy_(read(name))
    return model


def hf_architecture(cfg: ModelConfig, source: dict) -> str:
    """Return the model_type that an export has: its import's, else the first that computes cfg.
    source: config.json of the import, or {}. Raises ValueError for a field that it has no key for:
    an export would drop it in silence."""
    defaults = {f.name: f.default for f in fields(ModelConfig) if f.name not in _HF_KEYS}
    wrong = {}  # model_type: fields
    for kind in [source["model_type"]] if source else _ARCHITECTURES:
        implied = defaults | _ARCHITECTURES[kind].implied
        wrong[kind] = [f"{name}={getattr(cfg, name)!r}" for name, value in implied.items()
                       if getattr(cfg, name) != value]
    kind = min(wrong, key=lambda kind: len(wrong[kind]))
    name = _ARCHITECTURES[kind].name
    if wrong[kind]:
        raise ValueError(f"--export: {name}'s config.json has no key for {', '.join(wrong[kind])}; "
                         "what reads it would compute another model")
    if kind == "llama" and cfg.dim % cfg.heads:
        raise ValueError(f"--export: transformers refuses a {name} whose {cfg.heads} heads do not "
                         f"divide its width {cfg.dim}")
    return kind


HF_FILE_BYTES = 4 * 2**30  # one file of an export


def hf_files(shapes: dict[str, tuple[int, ...]], itemsize: int) -> dict[str, list[str]]:
    """Return our parameters by the file that they go to: in order, HF_FILE_BYTES a file."""
    groups: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if not groups or size > room:
            groups.append([])
            room = HF_FILE_BYTES
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names
            for i, names in enumerate(groups, 1)}


def hf_settings(cfg: ModelConfig, source: dict, dtype: torch.dtype, tied: bool) -> dict:
    """Return config.json, which transformers 4 and 5 read. source: that of the import, or {}."""
    rope = cfg.rope_scaling or {"rope_type": "default"}
    older = dict(cfg.rope_scaling) or None
    if older and rope_kind(older) == "linear":  # the one kind that was there before 4.43
        older = {"type": "linear", "factor": older["factor"]}
    name = str(dtype).removeprefix("torch.")
    kind = hf_architecture(cfg, source)
    ours = {theirs: getattr(cfg, ours) for ours, theirs in _HF_KEYS.items()}
    source = {key: value for key, value in source.items() if key != "auto_map"}  # other code
    return source | ours | _ARCHITECTURES[kind].fixed | {
        "architectures": [_ARCHITECTURES[kind].name], "model_type": kind, "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": name,  # transformers 4
        "dtype": name,  # transformers 5
        "rope_scaling": older,  # 4
        "rope_parameters": {"rope_theta": cfg.rope_theta, **rope},  # 5
    }


def hf_export(folder: Path, cfg: ModelConfig, read: Callable[[str], Tensor], dtype: torch.dtype,
              write: bool = True, source: dict | None = None, beside: list[Path] = ()) -> None:
    """Write config.json and safetensors, file by file.

    read(name) -> the full tensor; where ranks read together, all call this and one has write=True.
    An imported tied head that still equals the embedding is tied again. Of the import, if there was
    one: source, its config.json, whose other settings go along. beside: folders whose tokenizer
    and license do.
    """
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = LLaMA(cfg).shapes
    tied = cfg.tied and torch.equal(read("embed.weight"), read("head.weight"))
    if tied:
        del shapes["head.weight"]
    config = hf_settings(cfg, source or {}, dtype, tied)
    if not write:
        for name in shapes:
            read(name)
        return
    folder.mkdir(parents=True, exist_ok=True)
    places = {}  # their name: file
    total = 0
    for file, names in hf_files(shapes, dtype.itemsize).items():
        tensors = {}
        for name in names:
            theirs, rows = zip(*_hf_parts(cfg, name, shapes[name][0]))
            parts = read(name).to("cpu", dtype).split(rows)
            tensors |= {part: t.contiguous() for part, t in zip(theirs, parts)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for file in [f for other in beside for pattern in _COPIED for f in other.glob(pattern)]:
        if file.is_file():
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def export(folder: Path, cfg: ModelConfig, states: States, dtype: torch.dtype, source: dict,
           beside: list[Path], group: dist.ProcessGroup | None = None) -> None:
    """Write the weights as a Hugging Face checkpoint, all of it or nothing; source and beside as in
    hf_export; group as in Saver. Raises ConfigError. A collective."""
    from safetensors import SafetensorError

    def read(name: str) -> Tensor:
        if error := error_of_any("", group):  # of rank 0, since the last tensor
            raise ConfigError(error)
        return states.full(name)

    error = ""
    writes = dist.get_rank() == 0
    partial = folder / "partial"  # its files move up when all are there
    try:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
        hf_export(partial, cfg, read, dtype, writes, source, beside)
        if writes:
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
                os.replace(file, folder / file.name)
            partial.rmdir()
    except (OSError, SafetensorError) as e:
        error = f"--export {folder}: {e}"
    if error := error_of_any(error, group):
        raise ConfigError(error)
