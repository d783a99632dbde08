"""Read text or token files as sequences, in an order that only a seed decides.

A corpus is one long row of tokens from one or many files. It is cut into windows of T + 1 tokens,
one window per sequence. The last token of a window is a label only, so neighbouring windows overlap
by one token. (A model that predicts the next n tokens has windows of T + n tokens.) For T = 4:

    tokens     0  1  2  3  4  5  6  7  8  9 ...
    window 0   0  1  2  3  4                      inputs 0-3, labels 1-4
    window 1               4  5  6  7  8          inputs 4-7, labels 5-8

Training draws each window once per epoch. The order of epoch e is a permutation that depends on
(seed, e) only. So the number i of a sample, counted since step 0, decides which window it is, on
any number of ranks. A resumed run needs only the number of samples that it has seen.

    corpus, val_corpus = open_corpus("stdlib")
    train, val = split(corpus, val_corpus, seq=256, seed=0)
    train.sample(0)                     # (T + 1,) int64: the first sample of step 0

A token is a byte of text, or an id in a .bin file. Ids are uint16, as nanoGPT writes them, unless
FILE.bin.json beside FILE.bin says something else: {"token_bytes": 4, "ignore": 0} means uint32, and
that id 0 (padding, for example) is never a label. tokenise() makes these two files from text.

Left out: mixtures of corpora, packing without cutting documents, shuffling within a sequence.

Legend: T tokens per sequence, i the number of a sample since step 0.
"""

import bisect
import functools
import itertools
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCAN_TOKENS = 2**24  # tokens that check_tokens reads at a time
SEGMENT_CHARS = (
    2**17
)  # the tokenizer reads this many characters at a time, then to the end of the line


# ---------------------------------------------------------------------------- opening files safely
#
# A folder that somebody else prepared may hold anything. Opening a FIFO blocks, reading a device
# never ends, and a link may lead to a private file. These functions guard checkpoints, imports,
# tokenizers, FILE.bin.json and the files that a run writes. Only the files of --data themselves may
# be links. find_files takes those that lead to a regular file.


def regular(path: Path) -> Path:
    """Return `path`, after a check that it may be read: it is a regular file, or does not exist.
    Raises OSError if it is a FIFO, a device or a folder, or if this user may not read it."""
    try:
        if path.exists():
            if not path.is_file():
                raise OSError(f"{path} is no regular file")
            open(path, "rb").close()
    except PermissionError as e:
        raise may_not_read(path) from e
    return path


def may_not_read(path: Path) -> PermissionError:
    """Return the error for a file that exists and that this user may not read. Libraries would say
    that it is missing or broken."""
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

    Raises OSError if it is a link that leads out of the folder, because an export copies the files
    of such folders, and would publish the file that the link leads to. One kind of link may lead
    out of the folder. In a Hugging Face cache, the files of a snapshot are links to `blobs`:

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
    """Open a file in a run's own folder, to read it and to append to it. A missing file is made.
    Raises OSError as own_or_absent does, even if a link appears after that check."""

    def without_links(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(own_or_absent(path), "a+", opener=without_links)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file at once: write(new_path) writes a new file in a fresh folder, which then takes
    the place of `path`. Readers see the old file or the new one, and no link is written through."""
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


# ---------------------------------------------------------------------------- tokens on disk


class Corpus:
    """The tokens of one or many files as one long row. They are not kept in memory: each read()
    reads the files."""

    def __init__(self, files: list[Path], dtype: np.dtype, ignored_id: int):
        """dtype: the type of a token in the files; uint8 for text. ignored_id: an id that is never
        a label; -1 if there is none. Raises OSError if a file cannot be read, ValueError if it ends
        within a token."""
        self.files = files
        self.dtype = dtype
        self.ignored_id = ignored_id
        self.bounds = [0]  # the first token of each file, and the end of the last one
        for file in files:
            try:
                with open(file, "rb") as handle:  # a file that cannot be read fails before any work
                    count, rest = divmod(handle.seek(0, os.SEEK_END), dtype.itemsize)
            except PermissionError as e:
                raise PermissionError(f"--data: {may_not_read(file)}") from e
            if rest:
                raise ValueError(
                    f"--data: {file} is not a whole number of {dtype.itemsize}-byte tokens"
                )
            self.bounds.append(self.bounds[-1] + count)

    def __len__(self) -> int:
        return self.bounds[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens start ... stop - 1 as int64. Raises OSError if a file has become
        shorter."""
        parts = []
        i = bisect.bisect_right(self.bounds, start) - 1  # the file that holds start
        while start < stop:
            begin, end = self.bounds[i : i + 2]
            count = min(stop, end) - start
            # not a memory map, because a signal kills the process if a mapped file becomes shorter
            tokens = np.fromfile(
                self.files[i], self.dtype, count, offset=(start - begin) * self.dtype.itemsize
            )
            if len(tokens) < count:
                raise OSError(
                    f"--data: {self.files[i]} has become shorter than the {end - begin} "
                    "tokens that it had"
                )
            parts.append(tokens)
            start += count
            i += 1
        return np.concatenate(parts).astype(np.int64)


def find_files(data: str) -> tuple[list[Path], list[Path]]:
    """Return the files of --data to train on, sorted, and a list with val.bin, or an empty one.

    data: a file, a folder, or "stdlib" for the sources of Python's standard library. If a folder
    has .bin files, only these are taken. Hidden files and folders are left out. Raises ValueError
    if there are no files.
    """
    if data == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = [*root.glob("*.py")]
        for package in sys.stdlib_module_names:  # leaves out site-packages
            found += (root / package).rglob("*.py")
    else:
        root = Path(data)
        found = [root, *root.rglob("*")]

    def is_hidden(file: Path) -> bool:
        return re.search(r"(^|/)\.[^/]", str(file.relative_to(root))) is not None

    files = sorted(file for file in found if file.is_file() and not is_hidden(file))
    if not (data and files):
        raise ValueError(f"--data {data}: no such file or folder, or no files in it")

    val = [file for file in files if file == root / "val.bin"]
    binary = [file for file in files if file.suffix == ".bin"]
    train = [file for file in binary or files if file not in val]
    return train, val


def open_corpus(data: str) -> tuple[Corpus, Corpus | None]:
    """Return the corpus of --data, and the corpus of its val.bin, or None if it has no val.bin.
    Raises OSError or ValueError."""
    train, val = find_files(data)
    formats = {id_format(file) for file in train + val}
    if len(formats) > 1:
        raise ValueError(
            f"--data {data}: its .bin files hold ids of {formats} (type, ignored id): "
            "let FILE.bin.json beside each say the same"
        )
    dtype, ignored_id = formats.pop()
    val_corpus = Corpus(val, dtype, ignored_id) if val else None
    return Corpus(train, dtype, ignored_id), val_corpus


def id_format(file: Path) -> tuple[np.dtype, int]:
    """Return the type of a file's tokens, and the id that is never a label (-1: none).

    FILE.bin.json says both for FILE.bin; without it, a .bin file has uint16 ids. Any other file is
    read as bytes. Raises ValueError if FILE.bin.json cannot be understood.
    """
    if file.suffix != ".bin":
        return np.dtype("u1"), -1
    sidecar = Path(f"{file}.json")
    try:
        fields = json.loads(regular(sidecar).read_text())
        return np.dtype(f"<u{fields['token_bytes']}"), int(fields.get("ignore", -1))
    except FileNotFoundError:
        return np.dtype("<u2"), -1
    except Exception as e:  # the file may hold anything
        raise ValueError(
            f'--data: {sidecar} is not of the form {{"token_bytes": 2 or 4, "ignore": '
            f"ID}}: {type(e).__name__}: {e}"
        ) from e


@functools.lru_cache(1)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of windows in an epoch, a permutation of 0 ... count - 1. Only the last one
    is cached, because a run needs one epoch at a time."""
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclass(frozen=True)
class Sequences:
    """The windows in one range of a corpus, for training or for validation.

    A window has T + `ahead` tokens, of which the last `ahead` ones are labels only. If `ahead` > 1,
    the last window of a corpus may have fewer tokens, but at least T + 1.
    """

    corpus: Corpus
    first: int  # the first token of the range
    count: int  # the number of windows in the range
    seq: int  # T
    seed: int  # of the order of the windows
    ahead: int = 1  # labels per token: 1 is the next token, n are the next n tokens

    def window(self, i: int) -> np.ndarray:
        """Return window i, (T + ahead,) or fewer tokens, in the order of the corpus."""
        start = self.first + i * self.seq
        return self.corpus.read(start, min(start + self.seq + self.ahead, len(self.corpus)))

    def sample(self, i: int) -> np.ndarray:
        """Return sample i, counted since step 0: a window. Each epoch has each window once."""
        epoch, position = divmod(i, self.count)
        return self.window(epoch_order(self.seed, epoch, self.count)[position])


def split(
    corpus: Corpus, val: Corpus | None, seq: int, seed: int, ahead: int = 1
) -> tuple[Sequences, Sequences]:
    """Return training and validation sequences.

    The validation sequences come from `val`. If it is None, they are the last twentieth of the
    corpus's windows, rounded down, but at least one window. Raises ValueError if there is too
    little data for --seq; it says the longest --seq that fits.
    """
    if val is None:
        longest = (len(corpus) - 1) // 2  # one window for training, one for validation
        and_val_tokens = ""
    else:
        longest = min(len(corpus), len(val)) - 1
        and_val_tokens = f", its val.bin {len(val)}"
    if seq > longest:
        raise ValueError(
            f"--seq {seq}: the data has {len(corpus)} tokens{and_val_tokens}, too few for training "
            f"and validation; the longest that fits is --seq {max(0, longest)}"
        )

    windows = (len(corpus) - 1) // seq
    if val is None:
        val_windows = max(1, windows // 20)
        windows -= val_windows
        train = Sequences(corpus, 0, windows, seq, seed, ahead)
        return train, Sequences(corpus, windows * seq, val_windows, seq, seed, ahead)
    train = Sequences(corpus, 0, windows, seq, seed, ahead)
    return train, Sequences(val, 0, (len(val) - 1) // seq, seq, seed, ahead)


def check_tokens(corpora: list[Corpus], vocab: int, rank: int, world: int) -> None:
    """Raise ValueError if a token has no row in the embedding. The ranks share the work: of `world`
    ranks, each reads every world-th block of SCAN_TOKENS tokens."""
    for corpus in corpora:
        if vocab > np.iinfo(corpus.dtype).max:  # no token of this type can be too large
            continue
        for start in range(rank * SCAN_TOKENS, len(corpus), world * SCAN_TOKENS):
            tokens = corpus.read(start, min(start + SCAN_TOKENS, len(corpus)))
            largest = tokens.argmax()
            if tokens[largest] >= vocab:
                raise ValueError(
                    f"--data: token {start + largest} is {tokens[largest]}, but the model's "
                    f"vocabulary ends at {vocab - 1}; use another model or tokenizer, or another "
                    "token_bytes in FILE.bin.json"
                )


def fingerprint(corpora: list[Corpus]) -> dict[str, int]:
    """Return the number of data files, and a checksum of their names and sizes. train.py compares
    both between ranks, and with the checkpoint that a run resumes."""
    files = [(file.name, file.stat().st_size) for corpus in corpora for file in corpus.files]
    return {"files": len(files), "crc32": zlib.crc32(repr(files).encode())}


# ---------------------------------------------------------------------------- text to tokens


def tokenise(data: str, folder: str, cache: Path) -> tuple[str, int]:
    """Tokenise the text files of --data into one .bin file in the folder `cache`.

    Returns the path of the .bin file, and the id that is written after each text file: the
    tokenizer's eos_token. If --data has .bin files already, returns --data and -1.

    folder: a Hugging Face folder with tokenizer.json and tokenizer_config.json. The name of the
    .bin file is a checksum of the tokenizer and of the text files' names, sizes and times, so a
    later run with the same ones finds it. Raises ValueError or OSError; then no new file is left in
    `cache`.

    Files may be larger than memory, because text is read in segments. A segment ends at the end of
    a line, or inside a line that is longer than SEGMENT_CHARS. The tokenizer sees each segment by
    itself, which has two effects: blank lines that would be one token may become two, and a
    tokenizer that puts a space before each text puts one before each segment.
    """
    from tokenizers import Tokenizer
    from tqdm import tqdm

    files, val = find_files(data)
    if any(file.suffix == ".bin" for file in files + val):
        return data, -1
    try:
        root = Path(folder)
        tokenizer = Tokenizer.from_file(str(own_file(root / "tokenizer.json", root)))
        config = json.loads(own_file(root / "tokenizer_config.json", root).read_text())
        eos_token = config["eos_token"]
        if isinstance(eos_token, dict):
            eos_token = eos_token["content"]
        eos_id = tokenizer.get_vocab()[eos_token]
    except Exception as e:  # the library raises no narrower class
        raise ValueError(
            f"--tokenizer {folder}: the folder has no tokenizer.json that can be read, with the "
            f"eos_token of tokenizer_config.json: {type(e).__name__}: {e}"
        ) from e
    tokenizer.no_truncation()  # some tokenizer.json files ask for it
    tokenizer.no_padding()

    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = repr((tokenizer.to_str(), eos_id, stats))
    path = cache / f"{zlib.crc32(key.encode()):08x}.bin"
    if path.exists():
        return str(path), eos_id

    if cache.is_symlink():
        raise OSError(f"{cache} is a link, through which nothing is written. Remove the link")
    cache.mkdir(parents=True, exist_ok=True)
    writing = cache / f"{path.name}.{os.getpid()}.tmp"
    writing.unlink(missing_ok=True)  # a killed process with the same number may have left it
    segments = read_segments(files)
    size = sum(size for _, size, _ in stats)
    progress = tqdm(total=size, unit="B", unit_scale=True, mininterval=2)
    try:
        with progress, open(writing, "xb") as out:
            # the tokenizer's threads share the 64 segments of a batch
            while batch := list(itertools.islice(segments, 64)):
                encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                # an empty segment stands for the end of a file
                rows = [e.ids if text else [eos_id] for text, e in zip(batch, encoded)]
                np.concatenate(rows).astype("<u4").tofile(out)
                progress.update(sum(len(text.encode()) for text in batch))
        sidecar = Path(f"{path}.json")
        replace_file(sidecar, lambda new: new.write_text('{"token_bytes": 4}\n'))
        os.replace(writing, path)  # last, so that a file of this name is always complete
    finally:
        writing.unlink(missing_ok=True)
    return str(path), eos_id


def read_segments(files: list[Path]) -> Iterator[str]:
    """Yield the text of files in segments that end at the end of a line, and an empty segment after
    each file. A line longer than SEGMENT_CHARS may be cut. Raises ValueError if a file is not UTF-8
    text."""
    for file in files:
        try:
            with open(file, encoding="utf-8", newline="") as text:
                while segment := text.read(SEGMENT_CHARS):
                    yield segment + text.readline(SEGMENT_CHARS)
        except UnicodeDecodeError as e:
            raise ValueError(
                f"--data: {file} is not UTF-8 text: {e}. Without --tokenizer, any file is read as "
                "bytes"
            ) from None
        yield ""
