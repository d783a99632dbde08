"""Which tokens come next? Text or token files as sequences, in an order that a seed decides.

A corpus is one long row of tokens from one or many files. It is cut into windows of T + 1 tokens,
of which the last is a label only, so windows overlap by one token. Training sequences are drawn
without repetition: epoch e is a permutation that depends on (seed, e) alone. The i-th sample since
step 0 is therefore known without any state, whatever ranks there are: a resumed run says how many
samples it has seen, and goes on.

    corpus, val_corpus = open_corpus("stdlib", vocab=256)
    train, val = split(corpus, val_corpus, seq=256, seed=0)
    train.sample(0)                     # (T + 1,) int64: the first sample of step 0

A token is a byte of text, or an id in a .bin file (uint16 or uint32, as nanoGPT writes them).
FILE.bin.json may lie beside FILE.bin: {"token_bytes": 4, "vocab": 128256, "ignore": 0}, the width
of an id, what all ids lie below, and one (padding, say) that is never a label. tokenise() writes
such a pair from text.

Left out: mixtures of corpora, packing that cuts no document, shuffling within a sequence.

Legend: T tokens of a sequence, i a sample since step 0.
"""
import functools
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

SCAN_TOKENS = 2**24  # that a rank checks at a time
SAMPLES = 16  # blocks of a file, and
SAMPLE_BYTES = 4096  # of each, that a fingerprint reads
SEGMENT_CHARS = 2**17  # of text that is tokenised at once ...
BATCH_SEGMENTS = 64  # ... with so many others, on as many threads as the machine has
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# of the standard library: what differs between machines
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus:
    """Tokens of one or many files as one long sequence, read where and when they are asked for."""

    def __init__(self, files: list[Path], token_bytes: int, ignored_id: int = -1):
        """token_bytes: 1 for text. ignored_id: never a label; -1: none. Raises OSError or
        ValueError if a file is unreadable or torn."""
        if not files:
            raise ValueError("--data: no files with text or .bin tokens there")
        self.dtype = np.dtype(f"<u{token_bytes}")
        self.files = files
        self.ignored_id = ignored_id
        counts = [0]
        for file in files:
            with open(file, "rb") as handle:  # an unreadable file fails here, before any work
                size = handle.seek(0, os.SEEK_END)
            if size % token_bytes:
                raise ValueError(f"--data: {file} is not a whole number of {token_bytes}-byte "
                                 "tokens")
            counts.append(size // token_bytes)
        self.bounds = np.cumsum(counts)  # where each file begins, in tokens, and the end

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) as int64."""
        parts = []
        i = int(np.searchsorted(self.bounds, start, side="right")) - 1  # the file that holds start
        while start < stop:
            begin, end = self.bounds[i : i + 2].tolist()
            if end > start:  # the file is not empty
                tokens = np.memmap(self.files[i], self.dtype, "r", shape=(end - begin,))
                parts.append(tokens[start - begin : stop - begin].astype(np.int64))
            start = max(start, end)
            i += 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def find_files(data: str) -> tuple[list[Path], list[Path]]:
    """Return the files of --data, of a folder the .bin files if there are any; and its val.bin, if
    there is one. Raises ValueError."""
    if data == "stdlib":
        found = []
        for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
            folders[:] = set(folders) - NOT_STDLIB  # not walked: installed packages are many files
            found += [Path(folder, name) for name in names
                      if name.endswith(".py") and name not in NOT_STDLIB]
        return sorted(found), []
    root = Path(data)
    if not root.exists():
        raise ValueError(f"--data {data}: no such file or folder")
    if root.is_file():
        return [root], []
    files = [f for f in sorted(root.rglob("*"))
             if f.is_file() and not any(p.startswith(".") for p in f.relative_to(root).parts)]
    binary = [f for f in files if f.suffix == ".bin"]
    val = [f for f in binary if f.name == "val.bin"]
    return [f for f in binary or files if f not in val], val


def are_ids(files: list[Path]) -> bool:
    return any(file.suffix == ".bin" for file in files)


def open_corpus(data: str, vocab: int) -> tuple[Corpus, Corpus | None]:
    """Return the corpus of --data, and a validation corpus of its own if the folder has a val.bin.
    vocab: the model's. Raises ValueError."""
    train, val = find_files(data)
    width, ignored = id_format(train + val, vocab) if are_ids(train + val) else (1, -1)
    return Corpus(train, width, ignored), Corpus(val, width, ignored) if val else None


def id_format(files: list[Path], vocab: int) -> tuple[int, int]:
    """Return the width of an id in .bin files, and the id that is never a label: what FILE.json
    says, else 2 and -1. Raises ValueError if these contradict each other, the model or the ids."""
    width = None
    ignored = set()
    source = ""
    silent = []
    for file in files:
        said = read_sidecar(file)
        if not said:
            silent.append(file)
            continue
        if said.get("vocab", 0) > vocab:
            raise ValueError(f"--data: {file}.json says a vocabulary of {said['vocab']}, the "
                             f"model's has {vocab}: take another model, or other tokens")
        if width not in (None, said["token_bytes"]):
            raise ValueError(f"--data: {source}: {file}.json says {said['token_bytes']}")
        width = said["token_bytes"]
        source = f"{file}.json, token_bytes {width}"
        ignored.add(said.get("ignore", -1))
    if len(ignored) > 1:
        raise ValueError(f"--data: files say to ignore ids {sorted(ignored)}, which differ")
    width = width or 2
    for file in silent:
        if width == 2 and looks_like_four_bytes(file):
            raise ValueError(
                f"--data: every second 2-byte id of {file} is next to 0, as in a file of 4-byte "
                f'ids: say {{"token_bytes": 4}} in {file.name}.json beside it, or 2 if they are '
                "right")
    return width, max(ignored, default=-1)


def read_sidecar(file: Path) -> dict:
    """Return what FILE.json says of the ids in a .bin file, {} if there is none. Raises
    ValueError."""
    sidecar = Path(f"{file}.json")
    if not sidecar.exists():
        return {}
    try:
        said = json.loads(sidecar.read_text())
        width, vocab, ignore = said["token_bytes"], said.get("vocab", 0), said.get("ignore", -1)
        if type(width) is type(vocab) is type(ignore) is int and width in (2, 4) and vocab >= 0:
            return said
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f'--data: {sidecar} is not of the form {{"token_bytes": 2 or 4, "vocab": N, '
                     '"ignore": ID}')


def looks_like_four_bytes(file: Path) -> bool:
    """Return whether 2-byte ids are lower and upper halves of 4-byte ones, by a sample from 16
    places: upper halves are below 16 (ids below 2^20), and most lower ones are larger."""
    count = file.stat().st_size // 4
    if not count:
        return False
    pairs = np.memmap(file, "<u2", "r", shape=(count, 2))
    starts = np.linspace(0, max(0, count - 2**12), 16, dtype=int)
    low, high = np.concatenate([pairs[start : start + 2**12] for start in starts]).T
    return bool(high.max() < 16 and np.median(low) > high.max())


@functools.lru_cache(1)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of an epoch's windows, of which a run needs one at a time."""
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclass(frozen=True)
class Sequences:
    """Windows of T + 1 tokens (the last is a label only) of a part of a corpus."""

    corpus: Corpus
    first: int  # the token where the part begins
    count: int  # windows in it
    seq: int
    seed: int

    def window(self, i: int) -> np.ndarray:
        """Return the i-th window (T + 1,) in the order of the corpus."""
        start = self.first + i * self.seq
        return self.corpus.read(start, start + self.seq + 1)

    def sample(self, i: int) -> np.ndarray:
        """Return the i-th sample (T + 1,) since step 0: every epoch is a permutation."""
        epoch, position = divmod(i, self.count)
        return self.window(int(epoch_order(self.seed, epoch, self.count)[position]))


def document_starts(tokens: np.ndarray, end: int) -> np.ndarray:
    """Return where documents begin in the tokens (T,) of a sequence: at 0, and behind each `end`,
    a document's last token. The first may have begun before, and the last go on behind."""
    return np.concatenate([[0], np.flatnonzero(tokens[:-1] == end) + 1])


def split(corpus: Corpus, val: Corpus | None, seq: int, seed: int) -> tuple[Sequences, Sequences]:
    """Return training and validation sequences; these are a twentieth from the end, at least one,
    where there is no val. Raises ValueError with the longest legal --seq, if there is one."""
    if val is None:
        needs = [(corpus, 2, "training and validation")]
    else:
        needs = [(corpus, 1, "one sequence"), (val, 1, "one sequence")]
    for part, windows, what in needs:
        longest = max(0, (len(part) - 1) // windows)
        if seq > longest:
            nearest = f"the longest that fits is --seq {longest}"
            if longest == 0:
                nearest = f"even --seq 1 needs {windows + 1}"
            raise ValueError(f"--seq {seq}: the data has {len(part)} tokens, too few for {what}; "
                             f"{nearest}")
    count = (len(corpus) - 1) // seq
    held_out = max(1, count // 20) if val is None else 0
    kept = count - held_out
    train = Sequences(corpus, 0, kept, seq, seed)
    if val is None:
        return train, Sequences(corpus, kept * seq, held_out, seq, seed)
    return train, Sequences(val, 0, (len(val) - 1) // seq, seq, seed)


def check_tokens(corpora: list[Corpus], vocab: int, rank: int, world: int) -> None:
    """Raise ValueError if an id has no row in the embedding. Each rank scans its share."""
    for corpus in corpora:
        width = corpus.dtype.itemsize
        if width == 1 and vocab >= 256:
            continue
        for start in range(rank * SCAN_TOKENS, len(corpus), world * SCAN_TOKENS):
            tokens = corpus.read(start, min(start + SCAN_TOKENS, len(corpus)))
            largest = int(tokens.max(initial=0))
            if largest >= vocab:
                other = ", or another token_bytes in FILE.bin.json" if width > 1 else ""
                raise ValueError(
                    f"--data: token {start + int(tokens.argmax())} is {largest}, the model's "
                    f"vocabulary ends at {vocab - 1}; take another model{other}")


def fingerprint(corpora: list[Corpus]) -> dict[str, int]:
    """Return what tells changed data from the same: files, tokens, and a checksum of the files'
    sizes and of SAMPLES blocks of each. Raises OSError."""
    crc32 = 0
    for corpus in corpora:
        for file in corpus.files:
            with open(file, "rb") as handle:
                size = handle.seek(0, os.SEEK_END)
                crc32 = zlib.crc32(str(size).encode(), crc32)
                for start in sorted({size * i // SAMPLES for i in range(SAMPLES)}):
                    handle.seek(start)
                    crc32 = zlib.crc32(handle.read(SAMPLE_BYTES), crc32)
    return {"files": sum(len(corpus.files) for corpus in corpora),
            "tokens": sum(map(len, corpora)), "crc32": crc32}


# ---------------------------------------------------------------------------- text to tokens


def load_tokenizer(folder: str):
    """Return the tokenizer of a Hugging Face folder. Raises ValueError."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    except Exception as e:  # the library raises nothing narrower
        raise ValueError(f"--tokenizer {folder}: no tokenizer.json that can be read: {e}") from e
    tokenizer.no_truncation()  # which some files ask for
    tokenizer.no_padding()
    return tokenizer


def end_of_text(folder: str, tokenizer) -> int:
    """Return the id that ends a text, as the folder's files or the usual names have it. Raises
    ValueError if there is none."""
    def read(name: str, key: str):
        try:
            return json.loads((Path(folder) / name).read_text()).get(key)
        except (OSError, ValueError, AttributeError):
            return None

    named = read("tokenizer_config.json", "eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    ids = [tokenizer.token_to_id(named) if isinstance(named, str) else None]
    for file in ("generation_config.json", "config.json"):
        value = read(file, "eos_token_id")
        ids += value if isinstance(value, list) else [value]
    ids += [tokenizer.token_to_id(name) for name in EOS_NAMES]
    for i in ids:
        if type(i) is int and i >= 0 and tokenizer.id_to_token(i) is not None:
            return i
    raise ValueError(f"--tokenizer {folder}: no id that ends a text: eos_token in "
                     "tokenizer_config.json, eos_token_id in config.json, or a token "
                     + ", ".join(EOS_NAMES))


def tokenise(data: str, folder: str, cache: Path, vocab: int) -> Path | None:
    """Return the .bin file of the tokens of --data by the tokenizer of a folder, written in `cache`
    if no earlier run did; None if the data are ids already. Its name follows from names, sizes and
    times of the files, and from the tokenizer. After each file comes the id that ends a text.

    Text is read in segments that are cut after a line (a line longer than SEGMENT_CHARS anywhere),
    so files may be larger than memory. No token spans a cut: a run of blank lines there becomes two
    tokens, and a tokenizer that begins each text with a space begins each segment with one. vocab:
    the model's. Raises ValueError or OSError; then nothing is left in `cache`.
    """
    files, val = find_files(data)
    if are_ids(files + val):
        return None
    tokenizer = load_tokenizer(folder)
    eos = end_of_text(folder, tokenizer)
    stats = [file.stat() for file in files]
    rules = hashlib.sha256((Path(folder) / "tokenizer.json").read_bytes()).hexdigest()
    key = [rules, eos, [(str(f), s.st_size, s.st_mtime_ns) for f, s in zip(files, stats)]]
    path = cache / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16] + ".bin")
    if path.exists():
        return path
    width = 2 if max(tokenizer.get_vocab().values()) < 2**16 else 4
    cache.mkdir(parents=True, exist_ok=True)
    writing = cache / f"{path.name}.{os.getpid()}.tmp"
    print(f"--tokenizer {folder}: each text ends with {tokenizer.id_to_token(eos)!r}", flush=True)
    show = tokenise_progress(sum(s.st_size for s in stats))
    segments = read_segments(files)
    largest = eos
    try:
        with open(writing, "wb") as out:
            while batch := list(itertools.islice(segments, BATCH_SEGMENTS)):
                encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                rows = (e.ids if text else [eos] for text, e in zip(batch, encoded))
                ids = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
                largest = max(largest, int(ids.max(initial=0)))
                if largest >= vocab:
                    raise ValueError(
                        f"--tokenizer {folder}: token {tokenizer.id_to_token(largest)!r} is "
                        f"{largest}, the model's vocabulary ends at {vocab - 1}; take its own")
                ids.astype(f"<u{width}").tofile(out)
                show(sum(len(text.encode()) for text in batch), len(ids))
            os.fsync(out.fileno())
        said = {"token_bytes": width, "vocab": largest + 1, "tokenizer": folder, "data": data}
        Path(f"{path}.json").write_text(json.dumps(said) + "\n")
        os.replace(writing, path)  # whoever finds it finds all of it
    finally:
        writing.unlink(missing_ok=True)
    return path


def read_segments(files: list[Path]) -> Iterator[str]:
    """Yield the text of files in segments that end with a line, and after each file an empty one.
    Raises ValueError if a file is not text."""
    for file in files:
        try:
            with open(file, encoding="utf-8", newline="") as text:
                while segment := text.read(SEGMENT_CHARS):
                    yield segment + text.readline(SEGMENT_CHARS)
        except UnicodeDecodeError as e:
            raise ValueError(f"--data: {file} is not UTF-8 text: {e}; without --tokenizer any file "
                             "is read as bytes") from None
        yield ""


def tokenise_progress(total: int) -> Callable[[int, int], None]:
    """Return show(bytes, tokens), called with what has been done since the last call: of `total`
    bytes. A terminal gets one line that is rewritten, a file one every half minute and at the
    end."""
    every = 1.0 if sys.stdout.isatty() else 30.0
    start = shown = time.perf_counter()
    done = tokens = 0

    def show(more_bytes: int, more_tokens: int) -> None:
        nonlocal shown, done, tokens
        done += more_bytes
        tokens += more_tokens
        now = time.perf_counter()
        if now - shown < every and (done < total or not more_bytes):
            return
        shown = now
        left = timedelta(seconds=round((now - start) * (total - done) / max(done, 1)))
        line = (f"tokenised {done / 2**20:,.1f} of {total / 2**20:,.1f} MiB: {tokens:,} tokens, "
                f"{tokens / (now - start):,.0f} a second, left {left}")
        if every == 1 and done < total:
            print(f"\r{line}\033[K", end="\r", flush=True)
        else:
            print(line, flush=True)

    return show
