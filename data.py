"""Which tokens come next? Text or token files as sequences, in an order that a seed decides.

A corpus is one long row of tokens from one or many files. It is cut into windows of T + 1 tokens,
of which the last is a label only, so windows overlap by one token. Training sequences are drawn
without repetition: epoch e is a permutation that depends on (seed, e) alone. The i-th sample since
step 0 is therefore known without any state, whatever ranks there are: a resumed run says how many
samples it has seen, and goes on.

    corpus, val_corpus = open_corpus("stdlib")
    train, val = split(corpus, val_corpus, seq=256, seed=0)
    train.sample(0)                     # (T + 1,) int64: the first sample of step 0

A token is a byte of text, or an id in a .bin file: uint16, as nanoGPT writes them, or as
FILE.bin.json beside FILE.bin says, {"token_bytes": 4, "ignore": 0}: the width of an id, and one
(padding, say) that is never a label. tokenise() writes such a pair from text.

Left out: mixtures of corpora, packing that cuts no document, shuffling within a sequence.

Legend: T tokens of a sequence, i a sample since step 0.
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

SCAN_TOKENS = 2**24  # that a rank checks at a time
SEGMENT_CHARS = 2**17  # of text that is tokenised at once


# ---------------------------------------------------------------------------- opening files safely
#
# A folder that somebody else prepared may hold anything. A FIFO blocks whoever opens it, a device
# never ends, and a link may lead to a file that is nobody's business. These functions guard
# checkpoints, imports, tokenizers, sidecars and what a run writes. Files of --data itself may be
# links; find_files takes regular files only.


def regular(path: Path) -> Path:
    """Return the path of a file to read. Raises OSError if something is there that is no regular
    file: a FIFO would block, and a device would be read without end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")
    return path


def own_file(path: Path, folder: Path) -> Path:
    """Return the path of a regular file to read that belongs to a folder. Raises OSError if it is a
    link that leads out of the folder: an export copies such files, and would publish what the link
    leads to. Links into `blobs` of a Hugging Face cache, of which `folder` is a snapshot, may be
    followed:

        models--org--name/snapshots/REVISION/config.json -> ../../blobs/HASH
    """
    root = folder.resolve()
    target = regular(path).resolve()
    in_cache = root.parent.name == "snapshots" and target.is_relative_to(root.parents[1] / "blobs")
    if not (target.is_relative_to(root) or in_cache):
        raise OSError(f"{path} is a link out of its folder, to {target}: copy the file instead")
    return path


def own_or_absent(path: Path) -> Path:
    """Return the path of a file of our own folder that is to be written. Raises OSError if it is a
    link, which might lead out of the folder, or no regular file."""
    if path.is_symlink():
        raise OSError(f"{path} is a link, through which nothing is written; remove it")
    return regular(path)


def open_to_append(path: Path):
    """Open a file of our own folder to read and to append to; it is made if it is not there. Raises
    OSError as own_or_absent does."""

    def without_links(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(own_or_absent(path), "a+", opener=without_links)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file of our own folder by write(path of a new file), which then takes the place of
    `path`: readers see the old file or the new one, and no link is written through."""
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))
    try:
        new = folder / path.name
        write(new)
        os.replace(new, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fresh_folder(path: Path) -> None:
    """Make an empty folder. What was there goes; of a link only the link goes. Raises OSError."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
    path.mkdir()


# ---------------------------------------------------------------------------- tokens on disk


class Corpus:
    """Tokens of one or many files as one long sequence, read where and when they are asked for."""

    def __init__(self, files: list[Path], dtype: np.dtype, ignored_id: int):
        """dtype: uint8 for text. ignored_id: never a label; -1: none. Raises OSError or ValueError
        if a file is unreadable or torn."""
        self.files = files
        self.dtype = dtype
        self.ignored_id = ignored_id
        self.bounds = [0]  # where each file begins, in tokens, and the end
        for file in files:
            with open(file, "rb") as handle:  # an unreadable one fails before any work
                count, rest = divmod(handle.seek(0, os.SEEK_END), dtype.itemsize)
            if rest:
                raise ValueError(
                    f"--data: {file} is not a whole number of {dtype.itemsize}-byte tokens"
                )
            self.bounds.append(self.bounds[-1] + count)

    def __len__(self) -> int:
        return self.bounds[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) as int64. Raises OSError if a file has become shorter."""
        parts = []
        i = bisect.bisect_right(self.bounds, start) - 1  # the file that holds start
        while start < stop:
            begin, end = self.bounds[i : i + 2]
            count = min(stop, end) - start
            # read, not mapped: what is mapped and then cut ends the process
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
    """Return the files of --data, of a folder the .bin files if there are any; and its val.bin, if
    there is one. Raises ValueError."""
    root = Path(data)
    found = [root, *root.rglob("*")]
    if data == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = [*root.glob("*.py")]
        for package in sys.stdlib_module_names:  # not what is installed beside them
            found += (root / package).rglob("*.py")
    files = sorted(
        f
        for f in found  # but hidden ones
        if f.is_file() and not re.search(r"(^|/)\.[^/]", str(f.relative_to(root)))
    )
    if not (data and files):
        raise ValueError(f"--data {data}: no such file or folder, or no files in it")
    binary = [f for f in files if f.suffix == ".bin"]
    val = [f for f in files if f == root / "val.bin"]
    return [f for f in binary or files if f not in val], val


def open_corpus(data: str) -> tuple[Corpus, Corpus | None]:
    """Return the corpus of --data, and a validation corpus of its own if the folder has a val.bin.
    Raises OSError or ValueError."""
    train, val = find_files(data)
    formats = {id_format(file) for file in train + val}
    if len(formats) > 1:
        raise ValueError(
            f"--data {data}: its .bin files hold ids of {formats} (type, ignored id): "
            "let FILE.bin.json beside each say the same"
        )
    (format,) = formats
    return Corpus(train, *format), Corpus(val, *format) if val else None


def id_format(file: Path) -> tuple[np.dtype, int]:
    """Return the type of a file's tokens, and the id that is never a label: of a .bin file what
    FILE.json says, else uint16 and -1 (none). Raises ValueError."""
    if file.suffix != ".bin":
        return np.dtype("u1"), -1
    sidecar = Path(f"{file}.json")
    try:
        said = json.loads(regular(sidecar).read_text())
        return np.dtype(f"<u{said['token_bytes']}"), int(said.get("ignore", -1))
    except FileNotFoundError:
        return np.dtype("<u2"), -1
    except Exception as e:  # whatever it says instead
        raise ValueError(
            f'--data: {sidecar} is not of the form {{"token_bytes": 2 or 4, "ignore": '
            f"ID}}: {type(e).__name__}: {e}"
        ) from e


@functools.lru_cache(1)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of an epoch's windows, of which a run needs one at a time."""
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclass(frozen=True)
class Sequences:
    """Windows of T + `ahead` tokens (those past T are labels only) of a part of a corpus; fewer at
    its end."""

    corpus: Corpus
    first: int  # the token where the part begins
    count: int  # windows in it
    seq: int
    seed: int
    ahead: int = 1  # labels of each token: the next token, or the n that follow it

    def window(self, i: int) -> np.ndarray:
        """Return the i-th window (T + ahead,) in the order of the corpus."""
        start = self.first + i * self.seq
        return self.corpus.read(start, min(start + self.seq + self.ahead, len(self.corpus)))

    def sample(self, i: int) -> np.ndarray:
        """Return the i-th sample (T + ahead,) since step 0: every epoch is a permutation."""
        epoch, position = divmod(i, self.count)
        return self.window(epoch_order(self.seed, epoch, self.count)[position])


def split(
    corpus: Corpus, val: Corpus | None, seq: int, seed: int, ahead: int = 1
) -> tuple[Sequences, Sequences]:
    """Return training and validation sequences; these are a twentieth from the end, at least one,
    where there is no val. Raises ValueError with the longest legal --seq."""
    longest = min(len(corpus), len(val)) - 1 if val is not None else (len(corpus) - 1) // 2
    if seq > longest:
        beside = "" if val is None else f", its val.bin {len(val)}"
        raise ValueError(
            f"--seq {seq}: the data has {len(corpus)} tokens{beside}, too few for "
            f"training and validation; the longest that fits is --seq "
            f"{max(0, longest)}"
        )
    count = (len(corpus) - 1) // seq
    if val is not None:
        held_out = Sequences(val, 0, (len(val) - 1) // seq, seq, seed, ahead)
    else:
        last = max(1, count // 20)
        count -= last
        held_out = Sequences(corpus, count * seq, last, seq, seed, ahead)
    return Sequences(corpus, 0, count, seq, seed, ahead), held_out


def check_tokens(corpora: list[Corpus], vocab: int, rank: int, world: int) -> None:
    """Raise ValueError if an id has no row in the embedding. Each rank scans its share."""
    for corpus in corpora:
        if vocab > np.iinfo(corpus.dtype).max:
            continue
        for start in range(rank * SCAN_TOKENS, len(corpus), world * SCAN_TOKENS):
            tokens = corpus.read(start, min(start + SCAN_TOKENS, len(corpus)))
            largest = tokens.argmax()
            if tokens[largest] >= vocab:
                raise ValueError(
                    f"--data: token {start + largest} is {tokens[largest]}, the model's vocabulary "
                    f"ends at {vocab - 1}; take another model or tokenizer, or another token_bytes "
                    "in FILE.bin.json"
                )


def fingerprint(corpora: list[Corpus]) -> dict[str, int]:
    """Return what changes when data files come, go, or have another name or size."""
    files = [(file.name, file.stat().st_size) for corpus in corpora for file in corpus.files]
    return {"files": len(files), "crc32": zlib.crc32(repr(files).encode())}


# ---------------------------------------------------------------------------- text to tokens


def tokenise(data: str, folder: str, cache: Path) -> tuple[str, int]:
    """Return the .bin file of the tokens of --data by the tokenizer of a Hugging Face folder,
    written in `cache` if no earlier run did, and the id that comes after each file; the data and -1
    if they are ids already. Its name follows from names, sizes and times of the files, and from
    the tokenizer. Raises ValueError or OSError; then nothing is left in `cache`.

    Text is read in segments that are cut after a line (a line longer than SEGMENT_CHARS anywhere),
    so files may be larger than memory. No token spans a cut: a run of blank lines there becomes two
    tokens, and a tokenizer that begins each text with a space begins each segment with one.
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
        name = config["eos_token"]
        end = tokenizer.get_vocab()[name["content"] if isinstance(name, dict) else name]
    except Exception as e:  # the library raises nothing narrower
        raise ValueError(
            f"--tokenizer {folder}: no tokenizer.json that can be read, with the "
            f"eos_token of tokenizer_config.json: {type(e).__name__}: {e}"
        ) from e
    tokenizer.no_truncation()  # which some files ask for
    tokenizer.no_padding()
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = repr((tokenizer.to_str(), end, stats))
    path = cache / f"{zlib.crc32(key.encode()):08x}.bin"
    if path.exists():
        return str(path), end
    if cache.is_symlink():
        raise OSError(f"{cache} is a link, through which nothing is written; remove it")
    cache.mkdir(parents=True, exist_ok=True)
    writing = cache / f"{path.name}.{os.getpid()}.tmp"
    writing.unlink(missing_ok=True)  # of a process of the same number, that was killed
    segments = read_segments(files)
    size = sum(size for _, size, _ in stats)
    progress = tqdm(total=size, unit="B", unit_scale=True, mininterval=2)
    try:
        with progress, open(writing, "xb") as out:
            while batch := list(itertools.islice(segments, 64)):  # for threads to share
                encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                rows = [e.ids if text else [end] for text, e in zip(batch, encoded)]
                np.concatenate(rows).astype("<u4").tofile(out)
                progress.update(sum(len(text.encode()) for text in batch))
        sidecar = Path(f"{path}.json")
        replace_file(sidecar, lambda new: new.write_text('{"token_bytes": 4}\n'))
        os.replace(writing, path)  # whoever finds it finds all of it
    finally:
        writing.unlink(missing_ok=True)
    return str(path), end


def read_segments(files: list[Path]) -> Iterator[str]:
    """Yield the text of files in segments that end with a line, and after each file an empty one.
    Raises ValueError if a file is not text."""
    for file in files:
        try:
            with open(file, encoding="utf-8", newline="") as text:
                while segment := text.read(SEGMENT_CHARS):
                    yield segment + text.readline(SEGMENT_CHARS)
        except UnicodeDecodeError as e:
            raise ValueError(
                f"--data: {file} is not UTF-8 text: {e}; without --tokenizer any file "
                "is read as bytes"
            ) from None
        yield ""
