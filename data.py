"""Which tokens come next? Text or token files as sequences, in an order that a seed decides.

A corpus is one long row of tokens from one or many files. It is cut into windows of T + 1 tokens,
of which the last is a label only, so windows overlap by one token. Training sequences are drawn
without repetition: epoch e is a permutation that depends on (seed, e) alone. The i-th sample since
step 0 is therefore known without any state, whatever ranks there are: a resumed run says how many
samples it has seen, and goes on.

    corpus, val_corpus = open_corpus("stdlib", 2)
    train, val = split(corpus, val_corpus, seq=256, seed=0)
    train.sample(0)                     # (T + 1,) int64: the first sample of step 0

Left out: tokenizers, mixtures of corpora, shuffling within a sequence.

Legend: T tokens of a sequence, i a sample since step 0.
"""
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np

SCAN_TOKENS = 2**24  # that a rank checks at a time
SAMPLES = 16  # blocks of a file, and
SAMPLE_BYTES = 4096  # of each, that a fingerprint reads
# of the standard library: what differs between machines
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus:
    """Tokens of one or many files as one long sequence, read where and when they are asked for."""

    def __init__(self, files: list[Path], token_bytes: int):
        """token_bytes: 1 for text. Raises OSError or ValueError if a file is unreadable or torn."""
        if not files:
            raise ValueError("--data: no files with text or .bin tokens there")
        self.dtype = {1: np.uint8, 2: np.dtype("<u2"), 4: np.dtype("<u4")}[token_bytes]
        self.files = files
        counts = []
        for file in files:
            with open(file, "rb") as handle:  # an unreadable file fails here, before any work
                size = handle.seek(0, os.SEEK_END)
            if size % token_bytes:
                raise ValueError(
                    f"--data: {file} is not a whole number of {token_bytes}-byte tokens")
            counts.append(size // token_bytes)
        self.ends = np.cumsum(counts)  # of each file, in tokens

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) as int64."""
        parts = []
        i = int(np.searchsorted(self.ends, start, side="right"))  # the file that holds start
        while start < stop:
            begin = int(self.ends[i - 1]) if i else 0
            end = int(self.ends[i])
            if end > start:  # the file is not empty
                tokens = np.memmap(self.files[i], self.dtype, "r", shape=(end - begin,))
                parts.append(tokens[start - begin : stop - begin].astype(np.int64))
            start = max(start, end)
            i += 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def open_corpus(data: str, token_bytes: int) -> tuple[Corpus, Corpus | None]:
    """Return the corpus of --data, and a validation corpus of its own if the folder has a val.bin.
    Raises ValueError."""
    if data == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in sorted(root.rglob("*.py"))
                 if not NOT_STDLIB & set(f.relative_to(root).parts)]
        return Corpus(files, 1), None
    root = Path(data)
    if not root.exists():
        raise ValueError(f"--data {data}: no such file or folder")
    if token_bytes not in (2, 4):
        raise ValueError(f"--token-bytes {token_bytes}: 2 (uint16) or 4 (uint32)")
    if root.is_file():
        return Corpus([root], token_bytes if root.suffix == ".bin" else 1), None
    files = [f for f in sorted(root.rglob("*"))
             if f.is_file() and not any(p.startswith(".") for p in f.relative_to(root).parts)]
    binary = [f for f in files if f.suffix == ".bin"]
    if not binary:
        return Corpus(files, 1), None
    val = [f for f in binary if f.name == "val.bin"]
    train = Corpus([f for f in binary if f not in val], token_bytes)
    return train, Corpus(val, token_bytes) if val else None


class Sequences:
    """Windows of T + 1 tokens (the last is a label only) of a part of a corpus."""

    def __init__(self, corpus: Corpus, first: int, count: int, seq: int, seed: int):
        """first: the token where the part begins; count: windows in it."""
        self.corpus = corpus
        self.first = first
        self.count = count
        self.seq = seq
        self.seed = seed
        self.epoch = -1  # whose order is kept
        self.order = np.arange(count)

    def window(self, i: int) -> np.ndarray:
        """Return the i-th window (T + 1,) in the order of the corpus."""
        start = self.first + i * self.seq
        return self.corpus.read(start, start + self.seq + 1)

    def sample(self, i: int) -> np.ndarray:
        """Return the i-th sample (T + 1,) since step 0: every epoch is a permutation."""
        epoch, position = divmod(i, self.count)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return self.window(int(self.order[position]))


def split(corpus: Corpus, val: Corpus | None, seq: int, seed: int) -> tuple[Sequences, Sequences]:
    """Return training and validation sequences; these are a twentieth from the end, at least one,
    where there is no val. Raises ValueError with the longest legal --seq."""
    if val is None:
        needs = [(corpus, 2, "training and validation")]
    else:
        needs = [(corpus, 1, "one sequence"), (val, 1, "one sequence")]
    for part, windows, what in needs:
        longest = max(0, (len(part) - 1) // windows)
        if seq > longest:
            raise ValueError(f"--seq {seq}: the data has {len(part)} tokens, too few for {what}; "
                             f"the longest that fits is --seq {longest}")
    count = (len(corpus) - 1) // seq
    if val is not None:
        return (Sequences(corpus, 0, count, seq, seed),
                Sequences(val, 0, (len(val) - 1) // seq, seq, seed))
    held_out = max(1, count // 20)
    kept = count - held_out
    return (Sequences(corpus, 0, kept, seq, seed),
            Sequences(corpus, kept * seq, held_out, seq, seed))


def check_tokens(corpora: list[Corpus], vocab: int, rank: int, world: int) -> None:
    """Raise ValueError if an id has no row in the embedding. Each rank scans its share."""
    for corpus in corpora:
        if corpus.dtype == np.uint8 and vocab >= 256:
            continue
        for start in range(rank * SCAN_TOKENS, len(corpus), world * SCAN_TOKENS):
            tokens = corpus.read(start, min(start + SCAN_TOKENS, len(corpus)))
            largest = int(tokens.max(initial=0))
            if largest >= vocab:
                raise ValueError(
                    f"--data: token {start + int(tokens.argmax())} is {largest}, the model's "
                    f"vocabulary ends at {vocab - 1}; take another model, or --token-bytes")


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
