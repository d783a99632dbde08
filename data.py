"""Read text or token files as sequences, in an order that only a seed decides.

A corpus is one long row of tokens from one or many files. It is cut into windows of T + 1 tokens,
one window per sequence. The last token of a window is a label only, so neighbouring windows overlap
by one token. (A model that predicts the next n tokens has windows of T + n tokens.) For T = 4:

    tokens     0  1  2  3  4  5  6  7  8  9 ...
    window 0   0  1  2  3  4                      inputs 0-3, labels 1-4
    window 1               4  5  6  7  8          inputs 4-7, labels 5-8

Training draws each window once per epoch. The order of epoch e is a permutation that depends on
(seed, e) only. So a sample's number i, counted since step 0, decides which window it is, whatever
the number of ranks. A resumed run needs only the number of samples that it has seen.

    corpus, val_corpus = open_corpus("transformers")
    train, val = split(corpus, val_corpus, seq=256, seed=0)
    train.sample(0).tokens              # (T + 1,) int64: the first sample of step 0
    train.sample(0).is_label            # (T + 1,) bool: which of these tokens may be labels

A token is a byte of a text, or an id in a .bin file. FILE.bin.json beside FILE.bin, the *sidecar*,
says what a .bin file holds:

    {"token_bytes": 2 or 4, "document_token": ID, "ignore": ID, "vocab": N, "mask": "FILE.mask"}

    token_bytes      bytes per id, which are little endian and unsigned
    document_token   the id that ends each document; -1: none. Absent: --document-token says it
    ignore           an id that is never a label, such as padding
    vocab            the number of ids of the tokenizer that wrote the file
    mask             a file with one byte per token. 1: the token counts as a label. 0: it is never
                     a label, but attention still sees it. Example: a user's words in a conversation

Only token_bytes is required. If Megatron-LM prepared FILE.bin, there is an *index* FILE.idx, which
says the width of the ids and where documents end. A .bin file with neither a sidecar nor an index
is read as 2-byte ids if it cannot hold 4-byte ids. Otherwise it is refused (certain_width).

A Mixture draws samples from several corpora by weight: --data a.bin:0.7,b.bin:0.3.

Left out: packing that cuts no document, shuffling within a sequence, and reading records such as
JSON Lines (prepare.py turns them into .bin files).

Legend: T tokens per sequence, i the number of a sample since step 0.
"""

import bisect
import codecs
import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import struct
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

SCAN_TOKENS = 2**24  # tokens, or bytes of a text, that a check reads at a time
END_BYTES = 2**14  # bytes at the end of a file that tell whether it was only appended to
MOST_IDS = 2**20  # every tokenizer has fewer ids
# Samples per block of a mixture. Every block has the same number of samples of a source (Mixture)
MIX_BLOCK = 1000


# ---------------------------------------------------------------------------- opening files safely
#
# A folder that somebody else prepared may hold anything. Opening a FIFO blocks, reading a device
# never ends, and a link may lead to a private file. Three functions check a path before it is
# opened. They are used for checkpoints, imported Hugging Face models, tokenizers, the files beside
# FILE.bin, and the files that a run writes. A missing file passes each check. A path that exists
# must be:
#
#     regular          a regular file, or a link to one
#     own_file         the same, if the file lies in the given folder
#     own_or_absent    a regular file, but no link, because the run writes to it
#
# They do not check the files of --data. Those may be links: find_files takes a link that leads to a
# regular file.


def regular(path: Path) -> Path:
    """Return `path`, after a check that it is a regular file or does not exist. It may be a link to
    a regular file. Raises OSError if it is a FIFO, a device or a folder, or if this user may not
    read it."""
    try:
        if path.exists():
            if not path.is_file():
                raise OSError(f"{path} is no regular file")
            open(path, "rb").close()
    except PermissionError as e:
        raise may_not_read(path) from e
    return path


def may_not_read(path: Path) -> PermissionError:
    """Return the error for a file that exists, but that this user may not read. Without it, a
    library's error would say that the file is missing or broken."""
    try:
        status = path.stat()
        who = f"it has mode {status.st_mode & 0o777:o}, and user {status.st_uid} owns it"
    except OSError:
        who = "a folder above it is closed"
    return PermissionError(
        f"{path} exists, but user {os.geteuid()} may not read it (Permission denied): {who}. Let "
        "the owner allow it, for example by chmod a+rX, or copy it"
    )


def own_file(path: Path, folder: Path) -> Path:
    """Return `path`, after a check that it is a regular file in `folder`.

    Raises OSError if it is a link that leads out of the folder, because an export copies the
    files of a tokenizer's folder, and would publish the file that the link leads to. There is one
    exception. In a Hugging Face cache, the files of a snapshot are links to the folder `blobs`,
    which lies outside of the snapshot:

        models--org--name/snapshots/REVISION/config.json -> ../../blobs/HASH
    """
    root = folder.resolve()
    target = regular(path).resolve()
    in_cache = root.parent.name == "snapshots" and target.is_relative_to(root.parents[1] / "blobs")
    if not (target.is_relative_to(root) or in_cache):
        raise OSError(f"{path} is a link out of its folder, to {target}: copy the file instead")
    return path


def own_or_absent(path: Path) -> Path:
    """Return `path`, after a check that a run may write this file in its own folder. Raises OSError
    if it is a link, which might lead out of the folder, or no regular file."""
    if path.is_symlink():
        raise OSError(f"{path} is a link, through which nothing is written. Remove the link")
    return regular(path)


def open_to_append(path: Path):
    """Open a file in a run's own folder to read it and to append to it. A missing file is created.
    Raises OSError as own_or_absent does, also for a link that appears only after that check."""

    def without_links(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(own_or_absent(path), "a+", opener=without_links)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file in one step. write(new_path) writes the new file in a fresh folder, and then
    the new file is renamed to `path`. So readers see either the old file or the whole new one. If
    `path` is a link, the link is replaced, and not the file that it leads to."""
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))
    try:
        new = folder / path.name
        write(new)
        os.replace(new, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fresh_folder(path: Path) -> None:
    """Make an empty folder. A file or folder of this name is deleted first; if it is a link, only
    the link is deleted. Raises OSError."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
    path.mkdir()


# ---------------------------------------------------------------------------- which files


class Source(NamedTuple):
    """A file or folder of --data, and its weight: how many samples come from it, relative to the
    other sources."""

    path: str
    weight: float


def parse_mixture(data: str) -> list[Source]:
    """Return the sources of --data: one, or several with weights as in "a.bin:0.7,b.bin:0.3".

    If the whole text is the name of a file or folder, it is one source, even with commas and colons
    in its name. A single name without commas and colons is not checked here: find_files does that.
    Raises ValueError for a source that does not exist or is named twice, and for a weight that is
    missing or not a positive number.
    """

    def exists(path: str) -> bool:
        return path in BUILT_IN or os.path.exists(path)

    if exists(data) or not re.search("[,:]", data):
        return [Source(data, 1.0)]

    form = "Write --data PATH:WEIGHT,PATH:WEIGHT, such as a.bin:0.7,b.bin:0.3"
    sources = []
    # PATH:WEIGHT of the next source, as far as it is known. It grows until PATH exists, because a
    # path may have commas itself
    text = ""
    for piece in data.split(","):
        text += piece
        path, _, weight = text.rpartition(":")
        if exists(path):
            if not is_positive_number(weight):
                raise ValueError(
                    f"--data {data}: the weight {weight!r} of {path} is no positive number. {form}"
                )
            sources.append(Source(path, float(weight)))
            text = ""
        else:
            text += ","
    if text:
        first = text.split(",")[0]
        if exists(first):
            raise ValueError(f"--data {data}: {first} has no weight. {form}")
        missing = first.rpartition(":")[0] or first
        raise ValueError(f"--data {data}: there is no file or folder {missing!r}. {form}")

    paths = [os.path.realpath(source.path) for source in sources]
    for path, source in zip(paths, sources):
        if paths.count(path) > 1:
            raise ValueError(f"--data {data}: {source.path} is named twice. Add its weights")
    return sources


def is_positive_number(text: str) -> bool:
    """Return whether a text is a positive number."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def find_files(data: str, leave_out: Iterable[str | Path] = ()) -> tuple[list[Path], list[Path]]:
    """Return the sorted files of a source to train on, and its files for validation.

    data: a file, a folder, or a name of BUILT_IN.
    leave_out: folders that the run writes. If `data` is a folder, no file in these folders is
    taken, even if a link leads to it.

    If `data` is a folder, only the file val.bin at its top is for validation. The run trains on the
    other .bin files, or on all other files if there is no other .bin file. Hidden files and folders
    are left out. Links to folders are followed. A file or folder that several links lead to is
    taken once. Raises ValueError if there are no files, and OSError if a folder cannot be read.
    """
    root = Path(data)
    if data in BUILT_IN:
        files = list(BUILT_IN[data]())
    elif root.is_file():
        files = [root]
    elif root.is_dir():
        files = walk(root, [Path(folder).resolve() for folder in leave_out])
    else:
        files = []
    if not (data and files):  # the path "" is the current folder, which nobody has named
        advice = "" if root.is_dir() else ". Name one file or folder, or a.bin:0.7,b.bin:0.3"
        raise ValueError(f"--data {data}: no such file or folder, or no files in it{advice}")

    val = [file for file in files if file == root / "val.bin"]
    others = [file for file in files if file not in val]
    binary = [file for file in others if file.suffix == ".bin"]
    return binary or others, val


def walk(root: Path, leave_out: list[Path]) -> list[Path]:
    """Return the sorted files below a folder. leave_out: as in find_files, as real paths, which
    have no links in them. Raises ValueError or OSError as find_files does."""

    def is_left_out(real: Path) -> bool:
        return any(real.is_relative_to(folder) for folder in leave_out)

    def fail(error: OSError):
        raise error

    if is_left_out(root.resolve()):
        raise ValueError(
            f"--data {root} lies in {' or '.join(map(str, leave_out))}, where the run writes its "
            "own files. Name another --out or --export"
        )

    # real paths, so that nothing is taken twice, and links cannot lead in a circle
    found = {}  # real path of a file -> the path by which it was found
    folders = set()
    for name, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        folder, real_folder = Path(name), Path(name).resolve()
        if real_folder in folders or is_left_out(real_folder):
            subfolders.clear()
            continue
        folders.add(real_folder)
        visible = [sub for sub in subfolders if not sub.startswith(".")]
        # links come last, so that a file is found by its own path first
        subfolders[:] = sorted(visible, key=lambda sub: ((folder / sub).is_symlink(), sub))
        # val.bin comes first, so that it is for validation even if a second name leads to it
        for file in sorted(files, key=lambda file: (file != "val.bin", file)):
            path = folder / file
            real = path.resolve() if path.is_symlink() else real_folder / file
            if file.startswith(".") or is_left_out(real):
                continue
            if not real.exists():
                raise OSError(f"--data: {path} is a link that leads to no file. Remove it")
            if real.is_file():
                found.setdefault(real, path)
    return sorted(found.values())


# ---------------------------------------------------------------------------- built-in data
#
# The default data are the Python files of the package transformers, in the version that
# requirements.txt pins. Everybody has these files, so everybody sees the same losses.

PACKAGE = "transformers"
PACKAGE_VERSION = "5.23.0"
PACKAGE_BYTES = 8_000_000  # the package has more. The files that come last by name are left out
PACKAGE_CRC32 = 3077760862  # checksum of the files that are read, one after the other


class PackageFiles(NamedTuple):
    """The files of --data transformers on this machine."""

    files: tuple[Path, ...]
    difference: str  # a clause: how they differ from PACKAGE_VERSION's files; "" if they do not


@functools.cache
def package_files() -> PackageFiles:
    """Return the package's Python files, sorted by name: as many whole files as fit into
    PACKAGE_BYTES.

    Nothing is imported. The package's RECORD, which pip writes, lists its files. Files that the
    user has added to its folder are not in this list. If there is no package, the files are those
    of Python's standard library.
    """
    try:
        package = metadata.distribution(PACKAGE)
        listed = package.files or []
    except metadata.PackageNotFoundError:
        return PackageFiles(
            stdlib_files(),
            f"{PACKAGE} is not installed, so the files of this Python's standard library are read",
        )
    names = [
        str(file)
        for file in listed
        if file.suffix == ".py" and file.parts[0] == PACKAGE and ".." not in file.parts
    ]

    files = []
    size = crc32 = 0
    for name in sorted(names):
        path = Path(package.locate_file(name))
        if not is_text(path):
            continue
        content = path.read_bytes()
        size += len(content)
        if size > PACKAGE_BYTES:
            break
        files.append(path)
        crc32 = zlib.crc32(content, crc32)

    difference = ""
    if not files:  # for example because the package is installed in editable mode
        files = stdlib_files()
        difference = (
            f"{PACKAGE} is installed without a list of its files, so the files of this Python's "
            "standard library are read"
        )
    elif package.version != PACKAGE_VERSION:
        difference = f"{PACKAGE} {package.version} is installed, not {PACKAGE_VERSION}"
    elif crc32 != PACKAGE_CRC32:
        difference = f"files of {PACKAGE} {PACKAGE_VERSION} have been changed or removed here"
    return PackageFiles(tuple(files), difference)


@functools.cache
def stdlib_files() -> tuple[Path, ...]:
    """Return the sources of Python's standard library that are UTF-8 text, sorted. They differ
    between versions of Python, and between distributions of the same version."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [*root.glob("*.py")]
    for package in sys.stdlib_module_names:  # leaves out site-packages
        found += (root / package).rglob("*.py")

    hidden = re.compile(r"(^|/)\.[^/]")
    files = {f for f in found if f.is_file() and not hidden.search(str(f.relative_to(root)))}
    # one file of Debian's library is a link to another one, so take each real file only once
    once = {f.resolve(): f for f in sorted(files, reverse=True)}
    return tuple(sorted(filter(is_text, once.values())))


def is_text(file: Path) -> bool:
    """Return whether a file can be read, and is UTF-8 text without a NUL byte."""
    try:
        return "\0" not in file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # some packages have files in other encodings, as tests
        return False


# name in --data -> function that returns its files
BUILT_IN = {
    "transformers": lambda: package_files().files,
    "stdlib": stdlib_files,
}


def built_in_notes(paths: Iterable[str]) -> list[str]:
    """Return what a user should know about the built-in data among these paths, as sentences."""
    notes = []
    for path in paths:
        if path not in BUILT_IN:
            continue
        if path == "stdlib":
            notes.append(
                "--data stdlib: the losses depend on the version of Python. --data transformers "
                "gives everybody the same losses"
            )
        elif difference := package_files().difference:
            notes.append(f"{difference}. So the losses will differ from those in README")
        if os.path.exists(path):
            notes.append(
                f"--data {path} is built-in data, not the {path} in this folder. That is ./{path}"
            )
    return notes


# ---------------------------------------------------------------------------- what is text
#
# A file's first bytes say what it is. If they do not, the ending of its name does.


class Format(NamedTuple):
    """A file format that is not plain text, and that a file's first bytes tell."""

    words: str  # completes a message "FILE is ..."
    pattern: bytes  # a regular expression that matches the file's first bytes
    prepared: bool  # whether prepare.py reads such files


FORMATS = {
    "gzip": Format("gzip-compressed", rb"\x1f\x8b", True),
    "bz2": Format("bzip2-compressed", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", True),
    "xz": Format("xz-compressed", rb"\xfd7zXZ\x00", True),
    "zstd": Format("zstd-compressed", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", True),
    "parquet": Format("Parquet", rb"PAR1", True),
    "arrow": Format("Arrow", rb"ARROW1", True),
    "numpy": Format("a NumPy array", rb"\x93NUMPY", False),
    "zip": Format("a zip archive", rb"PK\x03\x04", False),
    "pdf": Format("a PDF file", rb"%PDF-", False),
    "hdf5": Format("an HDF5 file", rb"\x89HDF", False),
}
# Endings of files that hold records, with the text in one field. prepare.py reads all of them
RECORD_ENDINGS = {
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".csv": "a table",
    ".tsv": "a table",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
}


def kind_of(head: bytes) -> str:
    """Return the key of FORMATS for a file that begins with these bytes, or "" if there is none."""
    for kind, known in FORMATS.items():
        if re.match(known.pattern, head):
            return kind
    return ""


def format_of(path: Path) -> tuple[str, bool]:
    """Return the format of a file that is not plain text, such as "gzip-compressed", and whether
    prepare.py reads it. ("", False) means that no format is recognised.

    Whatever its ending, a file may be JSON Lines (is_json_lines). Raises OSError.
    """
    with open(path, "rb") as handle:
        head = handle.read(16)
        if kind := kind_of(head):
            return FORMATS[kind].words, FORMATS[kind].prepared
        handle.seek(0)
        if is_json_lines(handle):
            return "JSON Lines", True
    ending = path.suffix.lower()
    return RECORD_ENDINGS.get(ending, ""), ending in RECORD_ENDINGS


def is_json_lines(file: BinaryIO) -> bool:
    """Return whether a file is JSON Lines: whether its first two lines that are not blank are JSON
    objects. The file is read from its current position on."""
    # a record may be very long, so a line is read only up to a limit
    lines = iter(lambda: file.readline(SCAN_TOKENS), b"")
    records = filter(bytes.strip, lines)  # leaves out blank lines
    return is_json_object(next(records, b"")) and is_json_object(next(records, b""))


def is_json_object(line: bytes) -> bool:
    """Return whether a line is a whole JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def refuse_format(path: Path) -> None:
    """Raise ValueError if format_of recognises a file as something other than text or ids."""
    name, prepared = format_of(path)
    if name == FORMATS["numpy"].words:
        raise ValueError(
            f"--data: {path} is {name}. If it holds token ids, write them without its header: "
            f"numpy.load({str(path)!r}).astype('<u4').tofile('NAME.bin'), with "
            '{"token_bytes": 4} in NAME.bin.json'
        )
    if prepared:
        raise ValueError(
            f"--data: {path} is {name}, not plain text. Turn it into token ids first: python "
            f"prepare.py {shlex.quote(str(path))} --tokenizer DIR --out NAME.bin"
        )
    if name:
        raise ValueError(f"--data: {path} is {name}, not plain text. Extract its text first")


def check_text(path: Path, vocab: int = 256) -> None:
    """Raise ValueError unless a file is plain UTF-8 text, with bytes below `vocab`. Reads all of
    it."""
    refuse_format(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0  # the position of the block's first byte in the file
    with open(path, "rb") as handle:
        while True:
            block = handle.read(SCAN_TOKENS)  # empty at the end of the file
            text, nul, _ = block.partition(b"\0")  # nul is empty if the block has no NUL byte
            # the decoder keeps the first bytes of a character that the previous block cut
            kept = len(decoder.getstate()[0])
            try:
                decoder.decode(text, final=not block)
            except UnicodeDecodeError as e:
                refuse_bytes(path, start - kept + e.start, e.reason)
            if nul:
                refuse_bytes(path, start + len(text), "a NUL byte")
            if vocab < 256 and block and max(block) >= vocab:
                raise ValueError(
                    f"--data: {path} has a byte of value {max(block)}, and each byte is a token, "
                    f"but the model's vocabulary ends at {vocab - 1}; use another model, or "
                    "--tokenizer"
                )
            if not block:
                return
            start += len(block)


def refuse_bytes(path: Path, position: int, reason: str) -> None:
    """Raise ValueError for a file that is not text. position: of its first wrong byte."""
    raise ValueError(
        f"--data: {path} is not UTF-8 text: {reason} at byte {position}. Convert it, for example "
        "with iconv, or keep it out of the folder. If it holds token ids, call it NAME.bin"
    )


# ---------------------------------------------------------------------------- tokens on disk


class Window(NamedTuple):
    """Neighbouring tokens of a corpus."""

    tokens: np.ndarray  # (n,) int64
    is_label: np.ndarray  # (n,) bool: whether a token counts as a label


class Stamp(NamedTuple):
    """What a file was like when the run began."""

    size: int  # bytes
    modified: int  # time of the last change, in nanoseconds since 1970
    end: int  # checksum of the last END_BYTES bytes


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file."""
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns, checksum_before(path, status.st_size))


def has_changed(path: Path, stamp: Stamp) -> bool:
    """Return whether a file was written anew since its stamp was taken. A file that something was
    only appended to has not changed."""
    status = os.stat(path)
    if status.st_size > stamp.size:
        return checksum_before(path, stamp.size) != stamp.end
    return (status.st_size, status.st_mtime_ns) != (stamp.size, stamp.modified)


def checksum_before(path: Path, position: int) -> int:
    """Return the CRC-32 of a file's END_BYTES bytes before a position, or of as many as it has."""
    start = max(0, position - END_BYTES)
    return zlib.crc32(np.fromfile(path, np.uint8, position - start, offset=start))


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens, as describe() finds it. read() reads its tokens from disk at each call."""

    path: Path
    dtype: np.dtype  # of a token; uint8 for text
    count: int  # tokens
    document_token: int | None = None  # the id that ends each document; -1: none; None: not known
    ignored_id: int = -1  # an id that is never a label; -1: none
    vocab: int = 0  # number of ids of the tokenizer that wrote the file; 0: not known
    mask: Path | None = None  # a file with one byte per token. 1: the token counts as a label
    index: Path | None = None  # Megatron's FILE.idx, if document_token was found with its help
    # the file, and its mask if there is one -> its stamp
    stamps: dict[Path, Stamp] = field(default_factory=dict, compare=False)

    @property
    def is_text(self) -> bool:
        return self.path.suffix != ".bin"

    def read(self, start: int, count: int) -> Window:
        """Return the tokens start ... start + count - 1. Raises OSError if the file has changed
        since the run began (has_changed)."""
        tokens = self.read_array(self.path, self.dtype, start, count).astype(np.int64)
        is_label = tokens != self.ignored_id
        if self.mask:
            is_label &= self.read_mask(start, count) == 1
        return Window(tokens, is_label)

    def read_mask(self, start: int, count: int) -> np.ndarray:
        """Return the bytes (count,) of the mask. Raises OSError as read() does."""
        return self.read_array(self.mask, np.dtype("u1"), start, count)

    def read_array(self, path: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
        """Return the elements start ... start + count - 1 of a file, which has one per token.
        Raises OSError as read() does."""
        # no memory map: if a mapped file becomes shorter, reading it kills the process (SIGBUS)
        array = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
        if len(array) < count:
            raise OSError(
                f"--data: {path} has become shorter than the {self.count} tokens that it had"
            )
        stamp = self.stamps.get(path)
        if stamp and has_changed(path, stamp):  # checked last, to notice a change during the read
            raise OSError(
                f"--data: {path} has changed since the run began. Prepare new data under another "
                "name"
            )
        return array


def describe(path: Path, vocab: int = 0) -> TokenFile:
    """Return what a file of --data holds. A .bin file holds ids. Any other file holds text.

    vocab: the number of ids that the model has, or 0 if it is not known. Raises OSError if a file
    cannot be read. Raises ValueError if the width of the ids is not certain, or if FILE.bin and the
    files beside it contradict each other.
    """
    try:
        with open(path, "rb") as handle:  # a file that cannot be read fails before any work
            size = handle.seek(0, os.SEEK_END)
    except PermissionError as e:
        raise PermissionError(f"--data: {may_not_read(path)}") from e
    stamps = {path: stamp_of(path)}
    if path.suffix != ".bin":
        return TokenFile(path, np.dtype("u1"), size, stamps=stamps)

    sidecar_path, index_path = Path(f"{path}.json"), path.with_suffix(".idx")
    sidecar = read_sidecar(sidecar_path)
    index = read_index(index_path)
    widths = {}  # file that tells the width -> dtype of an id
    if sidecar:
        widths[sidecar_path] = np.dtype(f"<u{sidecar['token_bytes']}")
    if index:
        widths[index_path] = index.dtype
    if not widths:
        widths[path] = certain_width(path, size, vocab)
    if len({dtype.itemsize for dtype in widths.values()}) > 1:
        said = " and ".join(f"{dtype.itemsize} in {file}" for file, dtype in widths.items())
        raise ValueError(f"--data: {path} has two widths of an id, {said} bytes. Mend one of them")

    dtype = next(iter(widths.values()))
    count, rest = divmod(size, dtype.itemsize)
    if rest:
        raise ValueError(f"--data: {path} is not a whole number of {dtype.itemsize}-byte tokens")
    if index and count != index.tokens:
        raise ValueError(f"--data: {path} has {count} tokens, but {index_path} {index.tokens}")

    file = TokenFile(
        path,
        dtype,
        count,
        sidecar.get("document_token"),
        sidecar.get("ignore", -1),
        sidecar.get("vocab", 0),
        stamps=stamps,
    )
    if sidecar.get("mask"):
        mask = find_mask(path, sidecar["mask"], count)
        file = replace(file, mask=mask, stamps=stamps | {mask: stamp_of(mask)})
    if index and file.document_token is None and len(index.ends):
        # An index says where documents end, but not with which token. So take the last token of
        # the first document. check_tokens checks that it ends all documents
        last_token = int(file.read(index.ends[0], 1).tokens[0])
        file = replace(file, document_token=last_token, index=index_path)
    return file


def read_sidecar(path: Path) -> dict:
    """Return the content of FILE.bin.json, or {} if there is none. Raises ValueError."""
    try:
        fields = json.loads(regular(path).read_text(encoding="utf-8"))
        if type(fields["token_bytes"]) is not int or fields["token_bytes"] not in (2, 4):
            raise ValueError("token_bytes is neither 2 nor 4")
        for name, least in (("document_token", -1), ("ignore", -1), ("vocab", 1)):
            value = fields.get(name, least)
            if type(value) is not int or not least <= value < 2**32:
                raise ValueError(f"{name} {value!r} is no number from {least} to 2^32 - 1")
        if not isinstance(fields.get("mask", ""), str):
            raise ValueError("mask is no name of a file")
        # if a misspelt field were ignored, a run could learn from other labels
        unknown = fields.keys() - {"token_bytes", "document_token", "ignore", "vocab", "mask"}
        if unknown:
            raise ValueError(f"there is no field {', '.join(sorted(unknown))}")
        return fields
    except FileNotFoundError:
        return {}
    except Exception as e:  # the file may hold anything
        raise ValueError(
            f'--data: {path} is not of the form {{"token_bytes": 2 or 4, "document_token": ID, '
            '"ignore": ID, "vocab": N, "mask": "NAME.mask"}, where only token_bytes is required: '
            f"{type(e).__name__}: {e}"
        ) from e


def find_mask(path: Path, name: str, count: int) -> Path:
    """Return the path of a .bin file's mask. Raises ValueError unless it is a file in the same
    folder, with one byte for each of `count` tokens; OSError if it is a link out of the folder."""
    mask = path.parent / name
    if Path(name).name != name or not own_file(mask, path.parent).exists():
        raise ValueError(
            f"--data: {path}.json names the mask {name!r}, which is no file in {path.parent}"
        )
    size = mask.stat().st_size
    if size != count:
        raise ValueError(
            f"--data: {mask} has {size} bytes, but {path} has {count} tokens. A mask has one byte "
            "per token"
        )
    return mask


class MegatronIndex(NamedTuple):
    """What Megatron-LM's FILE.idx says about FILE.bin."""

    dtype: np.dtype  # of an id
    tokens: int
    ends: np.ndarray  # the position of each document's last token, ascending


# Megatron's code -> dtype. Most of Megatron's types are signed. Ids are not negative, so unsigned
# types of the same width read them, too. A negative 4-byte or 8-byte id, which would be an error,
# becomes too large for any vocabulary, so it is refused
MEGATRON_DTYPES = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}


def read_index(path: Path) -> MegatronIndex | None:
    """Read Megatron-LM's FILE.idx. Return None if there is no such file. Raises ValueError if the
    file is not an index of Megatron's, or is cut off.

    A document has one or several sequences, which stand one after the other. The file has these
    fields, and all numbers are little endian:

        bytes             content
        9                 "MMIDIDX", 0, 0
        8                 version: 1
        1                 code of the ids' type
        8                 S, the number of sequences
        8                 D, the number of documents, plus 1
        S int32           tokens of each sequence
        S int64           first byte of each sequence in FILE.bin
        D int64           0, then for each document the number of the first sequence after it
        (S int8           only in multimodal files; not read)
    """
    if not regular(path).exists():
        return None
    try:
        with open(path, "rb") as handle:
            magic, version, code, sequences, documents = struct.unpack("<9sQBQQ", handle.read(34))
            if magic != b"MMIDIDX\0\0" or version != 1:
                raise ValueError("it does not begin with MMIDIDX and version 1")
            dtype = np.dtype(MEGATRON_DTYPES[code])
            if path.stat().st_size < 34 + 12 * sequences + 8 * documents:
                raise ValueError("it is cut off")
            sizes = np.fromfile(handle, "<i4", sequences).astype(np.int64)
            first_bytes = np.fromfile(handle, "<i8", sequences)
            borders = np.fromfile(handle, "<i8", documents)
    except (KeyError, struct.error, ValueError) as e:
        raise ValueError(
            f"--data: {path} is no index of Megatron's: {type(e).__name__}: {e}. Rename it if it "
            f"does not belong to {path.stem}.bin"
        ) from e

    bounds = np.concatenate([[0], sizes.cumsum()])  # the first token of each sequence, and the end
    in_a_row = (sizes >= 0).all() and np.array_equal(first_bytes, bounds[:-1] * dtype.itemsize)
    ascending = len(borders) and borders[0] == 0 and (np.diff(borders) >= 0).all()
    if not (in_a_row and ascending and borders[-1] == sequences):
        raise ValueError(
            f"--data: {path}: its sequences do not stand one after the other, or its documents do "
            "not hold all of them. Write the file again"
        )
    ends = np.unique(bounds[borders])  # an empty document ends where the one before it does
    return MegatronIndex(dtype, int(bounds[-1]), ends[ends > 0] - 1)


def certain_width(path: Path, size: int, vocab: int) -> np.dtype:
    """Return uint16 if the ids of a .bin file without sidecar and index certainly have 2 bytes.

    size: bytes of the file. vocab: the number of ids that the model has, or 0 if it is not known.
    2-byte ids that are read as 4-byte ids give numbers that are larger than the ids of any
    tokenizer, such as the last one here:

        bytes             0b 00 0c 00     1f 01 c2 05
        2-byte ids        11    12        287   1474
        4-byte ids        786443          96600351

    The ids certainly have 2 bytes in three cases:

        - 4 does not divide the size of the file.
        - A 4-byte id would be MOST_IDS or more, and not below `vocab`.
        - All 2-byte ids are below 16, and a 4-byte id would be 65536 or more. In real 4-byte ids
          only the upper half is so small, and some lower halves are 16 or more. (16 is MOST_IDS /
          65536. A larger `vocab` raises it.)

    Only about the first 32 MiB are read. Raises ValueError if the width is not certain, or if the
    file is text or has another format than ids.
    """
    refuse_format(path)
    limit = max(vocab, MOST_IDS)  # every real 4-byte id is below it
    high_limit = limit >> 16  # so the upper half of a real 4-byte id is at most this
    largest = largest_low = largest_high = 0
    with open(path, "rb") as handle:
        block = handle.read(2**16)
        if len(block) >= 64 and b"\0" not in block and is_utf8(block):
            raise ValueError(
                f"--data: {path} is text, but files of this ending hold token ids. Name it "
                f'{path.with_suffix(".txt")}, or write {{"token_bytes": 2}} into {path}.json if '
                "it does hold ids"
            )
        if size % 4 or not size:
            return np.dtype("<u2")
        while block and handle.tell() <= 2 * SCAN_TOKENS:
            largest = max(largest, int(np.frombuffer(block, "<u4").max()))
            if largest >= limit:
                return np.dtype("<u2")
            low, high = np.frombuffer(block, "<u2").reshape(-1, 2).max(0).tolist()
            largest_low, largest_high = max(largest_low, low), max(largest_high, high)
            block = handle.read(2**16)

    if largest_high and largest_low < high_limit:
        return np.dtype("<u2")
    raise ValueError(
        f"--data: {path} may hold {size // 2} ids of 2 bytes, or {size // 4} ids of 4 bytes, and "
        f"nothing says which. As 2-byte ids they go up to {max(largest_low, largest_high)}, as "
        f"4-byte ids up to {largest}. Write one line into "
        f'{path}.json: {{"token_bytes": 2}} or {{"token_bytes": 4}}'
    )


def is_utf8(head: bytes) -> bool:
    """Return whether a file that begins with these bytes may be UTF-8 text. The last character may
    be cut off."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        return True
    except UnicodeDecodeError:
        return False


class Corpus:
    """The tokens of one or many files as one long row. They are not kept in memory: read() reads
    them from the files."""

    def __init__(self, files: list[TokenFile]):
        self.files = files
        # the first token of each file, and the end of the last one
        self.bounds = [0, *itertools.accumulate(file.count for file in files)]

    def __len__(self) -> int:
        return self.bounds[-1]

    @functools.cached_property
    def content(self) -> str:
        """Text that tells corpora apart: the number of tokens, and a checksum of the lengths of all
        files and of the first, the middle and the last 32K tokens of at most 1,000 files. Which of
        these tokens may be labels enters the checksum, too. Names do not, so files may move.
        Raises OSError."""
        crc32 = zlib.crc32(repr([file.count for file in self.files]).encode())
        for file in self.files[:: math.ceil(len(self.files) / 1000)]:
            count = min(file.count, 2**15)
            for start in sorted({0, (file.count - count) // 2, file.count - count}):
                for array in file.read(start, count):
                    crc32 = zlib.crc32(array, crc32)
        return f"{len(self)}-{crc32:08x}"

    def read(self, start: int, stop: int) -> Window:
        """Return the tokens start ... stop - 1. Raises OSError if a file has changed, as
        TokenFile.read says."""
        parts = []
        i = bisect.bisect_right(self.bounds, start) - 1  # the file that holds start
        while start < stop:
            begin, end = self.bounds[i : i + 2]
            count = min(stop, end) - start
            parts.append(self.files[i].read(start - begin, count))
            start += count
            i += 1
        return Window(*map(np.concatenate, zip(*parts)))


def open_corpus(
    data: str, vocab: int = 0, leave_out: Iterable[str | Path] = ()
) -> tuple[Corpus, Corpus | None]:
    """Return the corpus of one source of --data, and the corpus of its val.bin, or None if it has
    no val.bin. vocab: as in describe. leave_out: as in find_files. Raises OSError or ValueError."""
    train, val = find_files(data, leave_out)
    corpus = Corpus([describe(file, vocab) for file in train])
    return corpus, Corpus([describe(file, vocab) for file in val]) if val else None


def choose_document_token(corpora: list[Corpus], flag: int | None) -> int:
    """Return the id that ends each document of --data, or -1 if attention crosses documents.

    flag: --document-token, or None if it is auto. The result depends on it:

        flag     result                            raises ValueError
        -1       -1, whatever the files name       never
        an id    this id                           if a file names another id, or -1
        None     what the files name; -1 if they   if two files differ, even if one names an id and
                 name nothing                      the other one names nothing
    """
    # document token -> a file that names it. None -> a file that names none
    files = {file.document_token: file for corpus in corpora for file in corpus.files}
    if flag == -1:
        return -1
    if flag is not None:
        for token, file in files.items():
            if token not in (None, flag):
                ends = "have no end token" if token == -1 else f"end with token {token}"
                raise ValueError(
                    f"--document-token {flag} contradicts {file.path}, whose documents {ends}. "
                    "Pass --document-token auto, or -1 to let attention cross documents"
                )
        return flag
    if len(files) > 1:
        said = ", ".join(
            f"{'nothing' if token is None else token} in {file.path}"
            for token, file in files.items()
        )
        raise ValueError(
            f"--data: its files must end documents with the same token, but document_token is "
            f"{said}. Write the same one into FILE.bin.json beside each, if their documents do end "
            "with it. Otherwise prepare the files again, all with one --document-token"
        )
    (token,) = files
    return -1 if token is None else token


def check_apart(corpora: list[Corpus]) -> None:
    """Raise ValueError if two sources have the same file. Each source holds out its own validation
    data, so the run would train on one source's validation data as a part of the other source."""
    found = {}  # real path -> the path by which it was found
    for file in [file for corpus in corpora for file in corpus.files]:
        first = found.setdefault(file.path.resolve(), file.path)
        if first is not file.path:
            raise ValueError(
                f"--data: two sources have the same file, {first} and {file.path}. Then one would "
                "train on what the other one holds out for validation"
            )


def check_same_ids(corpora: list[Corpus], vocab: int) -> None:
    """Raise ValueError if files say that their tokenizers differ, or if a tokenizer has more ids
    than the model. vocab: the number of the model's ids."""
    files = [file for corpus in corpora for file in corpus.files]
    texts = [file for file in files if file.is_text]
    file_by_vocab = {file.vocab: file for file in files if file.vocab}  # 0: not known
    for file in files:
        if file.vocab > vocab:
            raise ValueError(
                f"--data: {file.path} has ids of a tokenizer with {file.vocab} ids, but the model "
                f"has only {vocab}. Take another model or tokenizer"
            )
        if texts and not file.is_text and file.vocab != 256:
            raise ValueError(
                f"--data: {file.path} has token ids, but {texts[0].path} is text, whose tokens are "
                "bytes. Pass --tokenizer with the folder of the tokenizer that wrote the ids"
            )
    if len(file_by_vocab) > 1:
        both = " and ".join(f"{vocab} ids in {file.path}" for vocab, file in file_by_vocab.items())
        raise ValueError(f"--data: its files are of different tokenizers: {both}")


def check_tokens(
    corpora: list[Corpus], vocab: int, rank: int, world: int, with_documents: bool = True
) -> None:
    """Read all tokens. Raise ValueError if a token has no row in the embedding, if a text file is
    not text, if a mask has other values than 0 and 1, or if the documents of a Megatron index do
    not all end with the same token.

    with_documents: whether attention stays inside documents. If not, their ends are not checked.
    The `world` ranks share the work. A piece of work is a whole text, or a block of SCAN_TOKENS
    ids. Rank r takes the pieces r, r + world, r + 2 world ... A file of ids is skipped if none of
    these errors can occur in it. For example, 2-byte ids are below 65536, so they all fit a larger
    vocabulary.
    """
    numbers = itertools.count()  # numbers the pieces of work: 0, 1, 2 ...
    for file in [file for corpus in corpora for file in corpus.files]:
        if file.is_text:
            if next(numbers) % world == rank:
                check_text(file.path, vocab)
            continue

        ends = read_index(file.index).ends if file.index and with_documents else None
        all_fit = vocab > np.iinfo(file.dtype).max  # no token of this type can be too large
        if all_fit and ends is None and not file.mask:
            continue
        for start in range(0, file.count, SCAN_TOKENS):
            if next(numbers) % world == rank:
                check_block(file, start, vocab, ends)


def check_block(file: TokenFile, start: int, vocab: int, ends: np.ndarray | None) -> None:
    """Do the work of check_tokens for the SCAN_TOKENS ids from `start` on.

    ends: MegatronIndex.ends, or None if the ends of documents are not checked.
    """
    count = min(SCAN_TOKENS, file.count - start)
    tokens = file.read_array(file.path, file.dtype, start, count)
    largest = tokens.argmax()
    if tokens[largest] >= vocab:
        raise ValueError(
            f"--data: token {start + largest} of {file.path} is {tokens[largest]}, but the model's "
            f"vocabulary ends at {vocab - 1}; use another model or tokenizer, or another "
            "token_bytes in FILE.bin.json"
        )

    if file.mask:
        values = file.read_mask(start, count)
        wrong = values.argmax()
        if values[wrong] > 1:
            raise ValueError(
                f"--data: byte {start + wrong} of {file.mask} is {values[wrong]}. A mask has only "
                "1 (the token counts as a label) and 0"
            )

    if ends is not None:
        first, stop = np.searchsorted(ends, [start, start + count])
        ends_of_block = ends[first:stop]
        found = start + np.flatnonzero(tokens == file.document_token)
        # positions that are in one of the two arrays only
        differing = np.setxor1d(found, ends_of_block, assume_unique=True)
        if len(differing):
            at = differing[0]
            where = "is inside a document" if at in found else "does not end the document"
            raise ValueError(
                f"--data: the first document of {file.path} ends with token {file.document_token}, "
                f"but at position {at} this token {where}, as {file.index.name} says. So attention "
                "cannot stay inside documents: pass --document-token -1 to let it cross them"
            )


def fingerprint(corpora: list[Corpus]) -> dict[str, int]:
    """Return the number of data files, and a checksum of their names, dtypes, token counts, ignored
    ids and masks' names. The tokens themselves do not enter it. train.py compares both numbers
    between ranks, and with the checkpoint that a run resumes."""
    files = [
        (file.path.name, file.dtype.str, file.count, file.ignored_id, file.mask and file.mask.name)
        for corpus in corpora
        for file in corpus.files
    ]
    return {"files": len(files), "crc32": zlib.crc32(repr(files).encode())}


# ---------------------------------------------------------------------------- sequences


@dataclass(frozen=True)
class Sequences:
    """The windows in one range of a corpus, for training or for validation.

    A window has T + `ahead` tokens. The last `ahead` tokens are labels only. If `ahead` > 1, the
    last window of a corpus may have fewer tokens, but at least T + 1.
    """

    corpus: Corpus
    first: int  # the first token of the range
    count: int  # the number of windows in the range
    seq: int  # T
    seed: int  # decides the order of the windows
    ahead: int = 1  # labels per input token. 1: the next token; n: the next n tokens
    # Epoch -> the order of its windows. Only one epoch is kept, because a run needs one at a time
    orders: dict[int, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of the windows in an epoch, a permutation of 0 ... count - 1."""
        if epoch not in self.orders:
            self.orders.clear()
            self.orders[epoch] = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return self.orders[epoch]

    @property
    def end(self) -> int:
        """The token after the inputs of the last window."""
        return self.first + self.count * self.seq

    def window(self, i: int) -> Window:
        """Return window i in the order of the corpus. It has T + `ahead` tokens, or fewer at the
        corpus's end."""
        start = self.first + i * self.seq
        return self.corpus.read(start, min(start + self.seq + self.ahead, len(self.corpus)))

    def sample(self, i: int) -> Window:
        """Return the window that is sample i, counted since step 0. Each epoch has each window
        once, in an order of its own."""
        epoch, position = divmod(i, self.count)
        return self.window(self.order(epoch)[position])


def longest_seq(corpus: Corpus, val: Corpus | None) -> int:
    """Return the longest --seq for which there is a window for training and one for validation."""
    if val is None:
        return max(0, (len(corpus) - 1) // 2)
    return max(0, min(len(corpus), len(val)) - 1)


def check_lengths(
    sources: list[Source], opened: list[tuple[Corpus, Corpus | None]], seq: int
) -> None:
    """Raise ValueError if a source has too little data for --seq. The message names the shortest
    source, and says the longest --seq that fits all of them. opened: the corpora of each source."""
    lengths = [longest_seq(corpus, val) for corpus, val in opened]
    longest = min(lengths)
    if seq > longest:
        shortest = lengths.index(longest)
        corpus, val = opened[shortest]
        name = "the data" if len(sources) == 1 else sources[shortest].path
        and_val_tokens = "" if val is None else f", its val.bin {len(val)}"
        advice = f"the longest that fits is --seq {longest}"
        if longest < 1:  # with --seq 1, a sequence has 2 tokens, and the next one shares a token
            least = "at least 3" if val is None else "at least 2 of each"
            advice = (
                f"a run needs {least}: one sequence to train on and one for validation. Name more "
                "data"
            )
        raise ValueError(
            f"--seq {seq}: {name} has {len(corpus)} tokens{and_val_tokens}, too few for training "
            f"and validation; {advice}"
        )


def split(
    corpus: Corpus,
    val: Corpus | None,
    seq: int,
    seed: int,
    ahead: int = 1,
    trained_to: int = 0,
) -> tuple[Sequences, Sequences]:
    """Return training and validation sequences.

    The validation sequences come from `val`. If it is None, they are the last twentieth of the
    corpus's windows, rounded down, but at least one window. check_lengths must allow --seq.

    trained_to: a resumed run has already trained on the tokens before this one, perhaps with
    another --seq. If the last twentieth begins before this token, and there is room for a window
    after it, the validation sequences begin at this token instead.
    """
    assert seq <= longest_seq(corpus, val)
    windows = (len(corpus) - 1) // seq
    if val is None:
        val_windows = max(1, windows // 20)
        windows -= val_windows
        train = Sequences(corpus, 0, windows, seq, seed, ahead)
        first = windows * seq
        untrained_windows = (len(corpus) - 1 - trained_to) // seq
        if trained_to > first and untrained_windows > 0:
            first, val_windows = trained_to, untrained_windows
        return train, Sequences(corpus, first, val_windows, seq, seed, ahead)
    train = Sequences(corpus, 0, windows, seq, seed, ahead)
    return train, Sequences(val, 0, (len(val) - 1) // seq, seq, seed, ahead)


def block_shares(sources: list[Source]) -> list[int]:
    """Return how many of the MIX_BLOCK samples of a block each source gets.

    The shares are proportional to the weights. They are rounded so that their sum is MIX_BLOCK:
    the shares with the largest fractional parts are rounded up. For example, three equal weights
    give 334, 333 and 333. Raises ValueError if a source gets no samples.
    """
    # the weights are divided by the largest one, because the sum of huge weights would be infinite
    largest = max(source.weight for source in sources)
    relative = [source.weight / largest for source in sources]
    total = math.fsum(relative)
    quotas = [MIX_BLOCK * (weight / total) for weight in relative]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sources)), key=lambda k: shares[k] - quotas[k])
    for k in by_remainder[: MIX_BLOCK - sum(shares)]:
        shares[k] += 1
    for source, share in zip(sources, shares):
        if not share:
            raise ValueError(
                f"--data: the weight {source.weight:g} of {source.path} is less than a thousandth "
                f"of all weights. Give it at least {largest / MIX_BLOCK * total:g}"
            )
    return shares


@dataclass(frozen=True)
class Mixture:
    """The sequences of one or several sources, mixed by weight.

    Each block of MIX_BLOCK samples has shares[k] samples of source k, spread evenly. Sample i of
    the mixture is sample j of source k. Only i and the shares decide k and j. Example, with blocks
    of 4 samples and the shares 3 and 1:

        i    0  1  2  3    4  5  6  7
        k    0  0  1  0    0  0  1  0
        j    0  1  0  2    3  4  1  5

    Each source has its own epochs: when all of its windows are drawn, it begins again, in a new
    order. If the weights change on resume, each source continues where it would be if the run had
    had the new weights from the start. Example: after 1000 samples a source's share rises from 300
    to 700 of 1000. It continues at its sample 700, so its samples 300 to 699 are skipped. If the
    share falls from 700 to 300, its samples 300 to 699 are drawn again.
    """

    sources: tuple[Sequences, ...]
    shares: tuple[int, ...]

    @functools.cached_property
    def block(self) -> tuple[np.ndarray, np.ndarray]:
        """For each sample of a block: its source, and the number of samples of this source that
        come before it in the block."""
        source = np.repeat(np.arange(len(self.shares)), self.shares)
        before = np.concatenate([np.arange(share) for share in self.shares])
        # source k divides the block into shares[k] equal parts, and has a sample in the middle of
        # each part. Sorting the middles of all sources gives the order of the block
        order = ((before + 0.5) / np.array(self.shares)[source]).argsort(kind="stable")
        return source[order], before[order]

    @property
    def count(self) -> int:
        """About how many samples of the mixture it takes to draw every window of every source."""
        total = sum(self.shares)
        pairs = zip(self.sources, self.shares)
        return max(math.ceil(source.count * total / share) for source, share in pairs)

    def place(self, i: int) -> tuple[int, int]:
        """Return (k, j): sample i of the mixture is sample j of source k."""
        source, before = self.block
        number, position = divmod(i, len(source))
        k = int(source[position])
        return k, number * self.shares[k] + int(before[position])

    def sample(self, i: int) -> Window:
        """Return sample i, counted since step 0."""
        k, number = self.place(i)
        return self.sources[k].sample(number)

    def window(self, i: int) -> Window:
        """Return validation window i. Sources alternate as in sample(), but each source's windows
        keep the order of its corpus."""
        k, number = self.place(i)
        return self.sources[k].window(number % self.sources[k].count)

    def epochs(self, samples: int) -> list[float]:
        """Return for each source how many epochs of it are drawn in the first `samples` samples of
        the mixture."""
        drawn = [samples * share / sum(self.shares) for share in self.shares]
        return [count / source.count for count, source in zip(drawn, self.sources)]
