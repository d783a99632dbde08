"""Turn text, JSON Lines, CSV, Parquet or conversations into files of token ids for train.py.

    python prepare.py corpus.jsonl.gz docs/ --tokenizer DIR --out data/train.bin
    python prepare.py chats.jsonl --tokenizer DIR --chat --out data/chats.bin
    python train.py --data data/train.bin

The first command writes two files, and --chat writes a third one:

    train.bin        token ids, one after the other, little endian
    train.bin.json   {"token_bytes": 2, "document_token": 258, "vocab": 300}
    chats.mask       one byte per token of chats.bin. 1: the token counts as a label. 0: it does not

token_bytes is the number of bytes per id: 2 if all ids fit uint16, else 4. document_token is the id
that ends each document (-1: none). vocab is the tokenizer's largest id plus one. With --chat the
JSON file also names the mask: chats.bin.json has "mask": "chats.mask".

A document is a plain text file, a line of a JSON Lines file, or a row of a table. Every document,
even an empty one, is followed by the document token. For example, let a small tokenizer have the
ids hi = 1, oh = 2, you = 3, and 7 for the document token <|end|>. Then the two lines {"text": "hi"}
and {"text": "oh you"} become the ids 1 7 2 3 7.

With --chat a document is a conversation, and the tokenizer's chat template makes its text. Only the
assistant's tokens count as labels, together with the token that ends the assistant's turn. For
example, with the same tokenizer this conversation becomes the text, ids and mask below it:

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh you"}]}

    text   <|user|>  hi  <|/|>  <|assistant|>  oh  you  <|/|>  <|end|>
    id        8       1   10          9         2    3    10       7
    mask      0       0    0          0         1    1     1       0

A *source* is an input file, or the folder of a dataset that Hugging Face's library datasets saved.
A *chunk* is a piece of a source. A *batch* is a list of chunks.

The main process reads the sources and cuts them into batches. Worker processes turn batches into
ids. The main process writes the ids in the order of the inputs, so the files are the same for any
number of workers. The main steps, in this order:

    find_sources    lists the sources, and finds out what each one is
    read_batches    reads the sources in batches of about a megabyte, or of one larger chunk. Each
                    chunk knows its position in the sources
    Encoder         turns a batch into ids: it parses, applies the chat template, and tokenises
    append          appends ids to OUT.partial/ids, and notes its progress in
                    OUT.partial/progress.json (OUT is the file of --out)
    finish          renames OUT.partial/ids to OUT as the last step, so OUT is always complete

If a command was killed, start the same command again. It checks the ids that progress.json counts
against the checksum in progress.json, cuts off ids written later, and continues from there.

A document or a message may spell a special token, such as <|end|>. It stays ordinary text, unless
--special-tokens is given. Some tokenizers cannot treat it as text. Then the command ends with an
error if a conversation spells any special token, but for other documents only if the text spells
the document token.

Memory is bounded for any number and size of files:

    plain text      A file may be larger than memory.
    JSON Lines      A line may have about 256 MiB (LINE_BYTES). Several such lines may be in memory.
    long documents  A document of at most 4 MiB (DOCUMENT_BYTES) is tokenised as a whole, so its ids
                    are those of the tokenizer for the whole text. A longer document is cut into
                    parts, if possible where a line begins. A tokenizer that puts a space before
                    each text puts one before each part. Conversations are never cut.
    workers         A worker needs up to 0.7 GiB of memory for a document of 4 MiB.

Left out: validation files (train.py holds out the last twentieth of its data), shuffling,
deduplication, filters.
"""

import argparse
import bz2
import collections
import contextlib
import csv
import errno
import fcntl
import functools
import gzip
import hashlib
import importlib
import io
import itertools
import json
import lzma
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data import (
    FORMATS,
    describe,
    find_files,
    is_json_lines,
    kind_of,
    own_file,
    own_or_absent,
    refuse_format,
    regular,
    replace_file,
)

DOCUMENT_BYTES = 2**22  # a longer document is cut into parts of at most this many bytes
LINE_BYTES = 2**28  # the longest line of JSON Lines
BATCH_BYTES = 2**20  # a batch has at most this many bytes, unless a single chunk has more
BATCH_CHUNKS = 4096  # a batch has at most this many chunks, because many files may be empty
SMALL_BYTES = 2**24  # train.py starts no workers for less text than this
TABLE_ROWS = 32  # number of table rows that are read at a time
COMMIT_SECONDS = 5.0  # time between two writes of progress.json
HEAD_BYTES = 4096  # number of bytes at the start of a file that tell what it is
CONVERSATION_FIELDS = ("messages", "conversations")  # a record has its conversation in one of them
CHAT_FIELDS = (*CONVERSATION_FIELDS, "tools")  # all fields that --chat reads

PIP = "pip install -r requirements-data.txt"


# ---------------------------------------------------------------------------- inputs
#
# The first bytes of a file tell what it is. If they do not, the ending of its name does.


@dataclass(frozen=True)
class Source:
    """An input file, or the folder of a dataset."""

    path: str
    kind: str  # a key of READERS
    compression: str  # a key of DECOMPRESSORS, or empty
    size: int  # bytes on disk
    modified: int  # time of the last change, in nanoseconds since 1970


LINE_ENDINGS = (".jsonl", ".ndjson", ".json")
TABLE_ENDINGS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
}
COMPRESSION_ENDINGS = {
    ".gz": "gzip",
    ".bz2": "bz2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
}


def find_sources(inputs: list[str], outputs: list[str]) -> list[Source]:
    """Return the sources of all inputs: the inputs in the order given, and the files of each folder
    sorted by name.

    Hidden files and folders in a folder are left out, and so are `outputs`, the paths that this
    command writes. Links are followed. A file or folder that an input reaches by several links is
    read once, so links that form a loop do no harm. An input that is named twice is read twice.
    Raises ValueError or OSError.
    """
    left_out = {os.path.realpath(path) for path in outputs}
    sources = []
    for name in inputs:
        if not os.path.lexists(name):
            raise ValueError(f"{name}: there is no such file or folder")
        found = [identify(path) for path in walk(name, left_out, set())]
        if not found:
            raise ValueError(
                f"{name} holds no file to read. Hidden files and the files of --out do not count"
            )
        sources += found
    return sources


def walk(path: str, left_out: set[str], seen: set[str]) -> Iterator[str]:
    """Yield the files and the dataset folders below a path, sorted by name. If the path is itself a
    file or a dataset folder, yield it.

    left_out: real paths that are not read. seen: real paths that were met before; walk adds to it.
    Raises ValueError for a FIFO, a device, or a link that leads nowhere.
    """
    real = os.path.realpath(path)
    if real in left_out or real in seen:
        return
    seen.add(real)
    if not os.path.isdir(path):
        if not os.path.isfile(path):
            raise ValueError(
                f"{path} is neither a regular file nor a folder, so it cannot be read. Remove it, "
                "or name the other files"
            )
        yield path
    elif is_dataset(path):
        yield path
    else:
        for name in sorted(os.listdir(path)):
            if not name.startswith("."):
                yield from walk(os.path.join(path, name), left_out, seen)


def is_dataset(folder: str) -> bool:
    """Return whether a folder is a dataset that save_to_disk of Hugging Face's datasets wrote.
    Raises ValueError if it is a DatasetDict, which holds a folder per split."""
    splits = Path(folder, "dataset_dict.json")
    if splits.is_file():
        names = [name for name in sorted(os.listdir(folder)) if Path(folder, name).is_dir()]
        raise ValueError(
            f"{folder} holds the splits of a dataset. Name those to read: "
            + " ".join(os.path.join(folder, name) for name in names)
        )
    return Path(folder, "state.json").is_file() and Path(folder, "dataset_info.json").is_file()


def identify(path: str) -> Source:
    """Find out what a file, or the folder of a dataset, is. Raises ValueError if prepare.py cannot
    read it."""
    info = os.stat(path)
    if stat.S_ISDIR(info.st_mode):
        files = [file for file in sorted(Path(path).iterdir()) if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        modified = max(file.stat().st_mtime_ns for file in files)
        source = Source(path, "dataset", "", size, modified)
        table_library(source)  # a missing library is reported before any work
        return source

    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    name, ending = os.path.splitext(path.lower())
    found = kind_of(head)
    compression = found if found in DECOMPRESSORS else ""
    if ending in COMPRESSION_ENDINGS:
        if compression != COMPRESSION_ENDINGS[ending]:
            raise ValueError(
                f"{path}: its name ends in {ending}, but its content is not compressed that way. "
                "The file may be cut short: fetch it again, or rename it"
            )
        ending = os.path.splitext(name)[1]
    source = Source(path, "text", compression, info.st_size, info.st_mtime_ns)
    if compression:
        with decompressed(source) as (stream, _):
            head = stream.read(HEAD_BYTES)

    kind = content_kind(path, head, ending)
    # train.py refuses JSON Lines, whatever the file's ending, and says that prepare.py reads them
    if kind == "text" and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        with decompressed(source) as (stream, _):
            kind = "lines" if is_json_lines(stream) else "text"
    if compression and kind in ("parquet", "arrow"):
        raise ValueError(f"{path}: a compressed {kind} file cannot be read. Decompress it first")
    source = replace(source, kind=kind)
    if kind in TABLE_LIBRARIES:
        table_library(source)
    return source


def has_changed(source: Source) -> bool:
    """Return whether a source's size or modification time is no longer what identify() read. Raises
    OSError if the source is gone."""
    if source.kind == "dataset":
        return identify(source.path) != source
    info = os.stat(source.path)
    return (info.st_size, info.st_mtime_ns) != (source.size, source.modified)


def content_kind(path: str, head: bytes, ending: str) -> str:
    """Return the kind of a file, which is a key of READERS. head: its first bytes, decompressed.
    ending: the ending of its name. Raises ValueError if there is no reader for it."""
    found = kind_of(head)
    if found in READERS:
        return found
    kind = TABLE_ENDINGS.get(ending)
    if kind == "parquet":
        raise ValueError(f"{path}: its name ends in {ending}, but its content is not Parquet")
    if kind == "arrow":
        return kind  # Arrow's streams, which `datasets` writes, have no fixed first bytes
    if found and not FORMATS[found].prepared:
        words = FORMATS[found].words
        raise ValueError(f"{path} is {words}, which cannot be read. Extract its text first")
    if ending == ".bin":
        raise ValueError(
            f"{path}: a .bin file holds token ids already, and is read by train.py --data"
        )
    if b"\0" in head:
        raise ValueError(
            f"{path} is not UTF-8 text: byte 0x00 at position {head.index(0)}. Text in UTF-16 can "
            "be converted by iconv -f UTF-16 -t UTF-8"
        )
    if ending in LINE_ENDINGS:
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if start.startswith(b"["):
            raise ValueError(
                f"{path} is one JSON array. JSON Lines has one object per line: convert it by "
                f"jq -c '.[]' {path} > new.jsonl"
            )
        if ending == ".json" and start.split(b"\n")[0].strip() == b"{":
            raise ValueError(
                f"{path} is one JSON document of several lines. JSON Lines has one object per "
                f"line: convert it by jq -c . {path} > new.jsonl, or leave it out"
            )
        return "lines"
    return kind or "text"


class Frames(io.RawIOBase):
    """Reads a compressed file of one or several frames, one behind the other (bz2 and xz call them
    streams). Raises an error if a frame is damaged or cut short.

    The readers of the libraries raise no error in some of these cases. If a stream behind the first
    one is damaged, those of bz2 and xz leave out the rest of the file. If the file ends within a
    frame, the reader of zstandard returns what it has read so far.
    """

    def __init__(self, file: BinaryIO, new_frame: Callable, padding: bytes = b""):
        """new_frame: a function that returns the decompressor of a new frame. padding: a byte that
        may occur between frames, any number of times."""
        self.file = file
        self.new_frame = new_frame
        self.padding = padding
        self.frame = None  # the state of an unfinished frame
        self.input = b""  # compressed bytes of the next frame
        self.output = memoryview(b"")  # decompressed bytes that nobody has read yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.output:
            compressed = self.input or self.file.read(2**14)
            self.input = b""
            if not compressed:
                if self.frame:
                    raise EOFError("it ends within a frame")
                return 0
            if self.padding and not self.frame:
                compressed = compressed.lstrip(self.padding)
                if not compressed:
                    continue
            self.frame = self.frame or self.new_frame()
            self.output = memoryview(self.frame.decompress(compressed))
            self.input = self.frame.unused_data if self.frame.eof else b""
            if self.frame.eof:
                self.frame = None
        count = min(len(buffer), len(self.output))
        buffer[:count] = self.output[:count]
        self.output = self.output[count:]
        return count


def open_zstd(file: BinaryIO) -> BinaryIO:
    """Open a zstd file with Python's own library (from Python 3.14 on), else with zstandard. Raises
    ValueError if neither is installed."""
    try:
        from compression import zstd
    except ImportError:
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"{file.name}: reading zstd needs the library zstandard: {PIP}"
            ) from None
        decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        return io.BufferedReader(Frames(file, decompressor.decompressobj), 2**17)
    return zstd.ZstdFile(file)


DECOMPRESSORS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    "": lambda file: file,
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "bz2": lambda file: io.BufferedReader(Frames(file, bz2.BZ2Decompressor), 2**17),
    "xz": lambda file: io.BufferedReader(Frames(file, lzma.LZMADecompressor, b"\0"), 2**17),
    "zstd": open_zstd,
}


@contextlib.contextmanager
def decompressed(source: Source) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file. Yield a stream of its decompressed content, and the file itself. The position of
    the file says how many of its bytes were read. Raises ValueError if compressed content is
    damaged or cut short."""
    with open(source.path, "rb") as file:
        try:
            yield DECOMPRESSORS[source.compression](file), file
        except ValueError:
            raise
        except Exception as e:  # each library raises its own errors
            if not source.compression or getattr(e, "errno", None):  # then it is the disk's fault
                raise
            raise ValueError(
                f"{source.path} is damaged or cut short, so it cannot be decompressed: {e}"
            ) from e


# ---------------------------------------------------------------------------- reading


class Cursor(NamedTuple):
    """How far the sources are read. Example: with Cursor(2, 900, 7), sources 0 and 1 are read, and
    of source 2 the first 900 bytes, which are 7 lines."""

    source: int = 0  # an index into the list of sources
    position: int = 0  # in bytes after decompression; 0 in a table
    line: int = 0  # in JSON Lines: lines; in a table: rows; 0 in plain text


class Chunk(NamedTuple):
    """A piece of a source: a part of a plain text, or whole lines of JSON.

    The rows of a table become lines of JSON, so the code after the readers knows no tables. A plain
    text file is one document, which may have several chunks.
    """

    content: bytes
    start: Cursor
    end: Cursor  # where the next chunk begins
    bytes_read: int  # for the progress bar: bytes of the file on disk that were read so far
    first: bool = True  # plain text: the document begins with this chunk
    last: bool = True  # plain text: the document ends with this chunk


def read_batches(sources: list[Source], cursor: Cursor, fields: list[str]) -> Iterator[list[Chunk]]:
    """Yield batches of all sources from the cursor on. fields: the columns to read from a table.

    Raises ValueError or OSError if a source cannot be read, but first yields the chunks before the
    fault. If one of those chunks has a fault of its own, for example broken JSON, the user sees
    that one first.
    """
    batch, size = [], 0
    try:
        for index in range(cursor.source, len(sources)):
            start = cursor if index == cursor.source else Cursor(index)
            for chunk in READERS[sources[index].kind](sources[index], start, fields):
                too_large = size and size + len(chunk.content) > BATCH_BYTES
                if too_large or len(batch) == BATCH_CHUNKS:
                    yield batch
                    batch, size = [], 0
                batch.append(chunk)
                size += len(chunk.content)
    except (ValueError, OSError):
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def skip(path: str, stream: BinaryIO, count: int) -> None:
    """Read `count` bytes of a stream and drop them, because not every decompressor can seek. Raises
    ValueError if the stream has fewer bytes."""
    while count:
        read = stream.read(min(count, 2**20))
        if not read:
            raise ValueError(f"{path} has become shorter")
        count -= len(read)


def read_text(source: Source, start: Cursor, fields: list[str]) -> Iterator[Chunk]:
    """Yield a text file, which is one document, in parts of at most DOCUMENT_BYTES bytes."""
    with decompressed(source) as (stream, file):
        skip(source.path, stream, start.position)
        position = start.position
        rest = b""
        while True:
            # One byte more than a part may have shows whether this part is the last one
            rest += stream.read(DOCUMENT_BYTES + 1 - len(rest))
            part = rest[: cut_position(rest)]
            if b"\0" in part:
                raise ValueError(
                    f"{source.path} is not UTF-8 text: byte 0x00 at position "
                    f"{position + part.index(0)}. Leave the file out"
                )
            last = len(part) == len(rest)
            at = Cursor(start.source, position)
            after = Cursor(start.source, position + len(part))
            if last:
                after = Cursor(start.source + 1)
            yield Chunk(part, at, after, file.tell(), first=position == 0, last=last)
            if last:
                return
            rest = rest[len(part) :]
            position += len(part)


def cut_position(text: bytes) -> int:
    """Return the length in bytes of the first part of a UTF-8 text. A text of at most
    DOCUMENT_BYTES bytes is one part.

    The first part of a longer text ends in the last 64 KiB of the text's first DOCUMENT_BYTES
    bytes. The first rule that finds a place there decides, and takes the last such place:

        1. before a line that does not begin with white space
        2. before the space between two words
        3. between two characters: at DOCUMENT_BYTES bytes, or up to 3 bytes before

    At the places of rules 1 and 2, most tokenizers begin a new token anyway.
    """
    if len(text) <= DOCUMENT_BYTES:
        return len(text)
    end = DOCUMENT_BYTES
    # The last condition ends the loop in content that is not UTF-8
    while text[end] & 0xC0 == 0x80 and end > DOCUMENT_BYTES - 4:  # this byte continues a character
        end -= 1
    tail = text[max(0, end - 2**16) : end].decode(errors="ignore")
    for pattern in (r"(?<=\n)(?=\S)", r"(?<=\S)(?= \S)"):
        places = [match.start() for match in re.finditer(pattern, tail)]
        if places:
            return end - len(tail[places[-1] :].encode())
    return end


def read_lines(source: Source, start: Cursor, fields: list[str]) -> Iterator[Chunk]:
    """Yield whole lines of a JSON Lines file, about BATCH_BYTES at a time. Raises ValueError for a
    line that is too long."""
    with decompressed(source) as (stream, file):
        skip(source.path, stream, start.position)
        _, position, line = start
        while content := stream.read(BATCH_BYTES):
            if not content.endswith(b"\n"):
                rest = stream.readline(LINE_BYTES)
                if len(rest) == LINE_BYTES:
                    number = line + content.count(b"\n") + 1
                    raise ValueError(
                        f"{source.path} line {number}: the line is longer than "
                        f"{LINE_BYTES >> 20} MiB, the longest that can be read"
                    )
                content += rest
            at = Cursor(start.source, position, line)
            position += len(content)
            line += content.count(b"\n")
            yield Chunk(content, at, Cursor(start.source, position, line), file.tell())


def read_table(rows: Callable) -> Callable:
    """Return a reader that turns each row of a table into a line of JSON.

    rows(source, first, fields) yields pairs, from row `first` on. The first item of a pair is a
    list of rows, each a dict of those `fields` that the table has. The second item is the fraction
    of the table that was read so far.
    """

    def read(source: Source, start: Cursor, fields: list[str]) -> Iterator[Chunk]:
        row = start.line
        records = rows(source, row, fields)
        try:
            for batch, share in records:
                lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in batch]
                content = "".join(lines).encode()
                at = Cursor(start.source, 0, row)
                row += len(batch)
                after = Cursor(start.source, 0, row)
                yield Chunk(content, at, after, int(share * source.size))
        except Exception as e:
            # Each library raises its own errors, and json.dumps refuses a picture or a date. An
            # error that names the file already is good as it is
            if str(e).startswith(source.path):
                raise
            raise ValueError(
                f"{source.path}: the rows after row {row} cannot be read: {type(e).__name__}: {e}"
            ) from e

    return read


def chosen_columns(path: str, columns: list[str], fields: list[str]) -> list[str]:
    """Return those of the fields that a table has as columns. Raises ValueError if it has none."""
    chosen = [name for name in fields if name in columns]
    if not chosen:
        # With --chat there are several fields, and --field has no effect
        advice = ": name one of them with --field" if len(fields) == 1 else ""
        raise ValueError(
            f"{path} has no column {' or '.join(fields)}. Its columns are "
            f"{', '.join(columns)}{advice}"
        )
    return chosen


def csv_rows(source: Source, first: int, fields: list[str]) -> Iterator[tuple[list[dict], float]]:
    """Yield the rows of a CSV or TSV file, as read_table says. The first line that is not blank
    names the columns. `fields` has one name, and only this column is read. Line ends within quotes
    stay. A file without such a line, for example an empty file, has no rows."""
    csv.field_size_limit(LINE_BYTES)
    with decompressed(source) as (stream, file):
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter="\t" if source.kind == "tsv" else ",", strict=True)
        try:
            lines = filter(None, reader)  # a blank line is no row
            columns = next(lines, None)
            if columns is None:
                return
            (name,) = chosen_columns(source.path, columns, fields)
            column = columns.index(name)
            rows = itertools.islice(lines, first, None)
            while records := list(itertools.islice(rows, TABLE_ROWS)):
                for record in records:
                    if len(record) != len(columns):
                        raise ValueError(
                            f"{source.path}, a row that ends at or before line {reader.line_num}: "
                            f"it has {len(record)} columns, and the first line has {len(columns)}"
                        )
                    if source.kind == "tsv" and (merged := merged_rows(record)):
                        raise ValueError(
                            f"{source.path}, column {columns[merged]!r}: the text that begins with "
                            f"a quote and {record[merged][:40]!r} looks like several rows, up to "
                            "the next quote. Write the file as JSON Lines, or quote all texts"
                        )
                yield [{name: record[column]} for record in records], file.tell() / source.size
        except csv.Error as e:
            raise ValueError(f"{source.path} line {reader.line_num}: {e}") from e
        except UnicodeDecodeError as e:
            raise not_utf8(source.path, e, first_bad_byte(source)) from e


def merged_rows(record: list[str]) -> int | None:
    """Return the number of the column of a TSV row whose text looks like several rows, because its
    lines have as many tabs as rows have; None if there is none. Column 0 counts as none: there a
    text of two lines looks like that, too.

    Many programs write TSV without quotes. Then a text that begins with a quote would swallow all
    rows up to the next quote."""
    tabs = len(record) - 1  # of a row
    for column, text in enumerate(record[1:], 1):
        if "\n" in text:
            first, *middle, last = (line.count("\t") for line in text.split("\n"))
            if (first, last) == (tabs - column, column) and all(n == tabs for n in middle):
                return column
    return None


def first_bad_byte(source: Source) -> int:
    """Return the position of the first byte that is not UTF-8. The caller knows that there is
    one."""
    position = 0
    with decompressed(source) as (stream, _):
        for line in stream:
            try:
                line.decode()
            except UnicodeDecodeError as e:
                return position + e.start
            position += len(line)
    return position


def parquet_rows(source: Source, first: int, fields: list[str]) -> Iterator:
    """Yield the rows of a Parquet file, as read_table says. Row groups before row `first` are not
    read."""
    parquet = table_library(source)
    with open(source.path, "rb") as file:
        table = parquet.ParquetFile(file)
        columns = chosen_columns(source.path, table.schema_arrow.names, fields)
        total = table.metadata.num_rows
        done = 0
        for group in range(table.num_row_groups):
            size = table.metadata.row_group(group).num_rows
            if done + size > first:
                for batch in table.iter_batches(TABLE_ROWS, [group], columns):
                    records = batch.to_pylist()[max(0, first - done) :]
                    done += len(batch)
                    if records:
                        yield records, done / total
            else:
                done += size


def arrow_rows(source: Source, first: int, fields: list[str]) -> Iterator:
    """Yield the rows of an Arrow file, as read_table says. The file is in Arrow's file format,
    which begins with ARROW1, or in Arrow's stream format, which the library datasets writes."""
    pyarrow = table_library(source)
    with pyarrow.OSFile(source.path) as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(0)
            reader = pyarrow.ipc.open_stream(file)
            batches = iter(reader)
        columns = chosen_columns(source.path, reader.schema.names, fields)
        done = 0
        for batch in batches:
            skipped = min(max(0, first - done), len(batch))
            done += len(batch)
            for row in range(skipped, len(batch), TABLE_ROWS):
                rows = batch.select(columns).slice(row, TABLE_ROWS)
                yield rows.to_pylist(), file.tell() / source.size


def dataset_rows(source: Source, first: int, fields: list[str]) -> Iterator:
    """Yield the rows of a folder that Hugging Face's datasets saved, as read_table says."""
    table = table_library(source).load_from_disk(source.path)
    columns = chosen_columns(source.path, table.column_names, fields)
    for row in range(first, len(table), TABLE_ROWS):
        values = table.select_columns(columns)[row : row + TABLE_ROWS]
        records = [dict(zip(columns, record)) for record in zip(*(values[c] for c in columns))]
        yield records, min(1.0, (row + TABLE_ROWS) / len(table))


TABLE_LIBRARIES = {"parquet": "pyarrow.parquet", "arrow": "pyarrow", "dataset": "datasets"}


def table_library(source: Source):
    """Return the library that reads a table. Raises ValueError with the command that installs it if
    it is missing."""
    try:
        return importlib.import_module(TABLE_LIBRARIES[source.kind])
    except ImportError as e:
        raise ValueError(
            f"{source.path}: reading it ({source.kind}) needs the libraries datasets and pyarrow: "
            f"{PIP} ({e})"
        ) from None


READERS = {
    "text": read_text,
    "lines": read_lines,
    "csv": read_table(csv_rows),
    "tsv": read_table(csv_rows),
    "parquet": read_table(parquet_rows),
    "arrow": read_table(arrow_rows),
    "dataset": read_table(dataset_rows),
}


def not_utf8(path: str, e: UnicodeDecodeError, position: int) -> ValueError:
    """Return the error for a file that is not UTF-8. e: what decode() raised. position: the
    index of the first wrong byte in the file."""
    return ValueError(
        f"{path} is not UTF-8 text: byte 0x{e.object[e.start]:02x} at position {position}, "
        f"{e.reason}. Convert the file to UTF-8, or leave it out"
    )


# ---------------------------------------------------------------------------- the tokenizer


@dataclass(frozen=True)
class Settings:
    """What a worker needs to turn a batch into ids."""

    sources: list[Source]
    tokenizer_folder: str
    document_token: int  # the id that ends each document; -1: none
    vocab: int  # the tokenizer's largest id plus one
    bos: list[int] = field(default_factory=list)  # --bos: the ids that begin a document
    text_field: str = "text"
    special_tokens: bool = False  # text that spells a special token becomes that token
    chat: bool = False
    template: str = ""
    template_tokens: dict[str, str] = field(default_factory=dict)  # such as {"bos_token": "<s>"}
    other_ends: str = ""  # document tokens that an error suggests instead
    date: str = ""  # today as YYYY-MM-DD, if the template writes the date; else empty

    @property
    def dtype(self) -> np.dtype:
        """The type of the ids in OUT: little endian, unsigned."""
        return np.dtype("<u2" if max(self.vocab - 1, self.document_token) < 2**16 else "<u4")

    @property
    def fields(self) -> list[str]:
        """The fields of a record that are read."""
        return list(CHAT_FIELDS) if self.chat else [self.text_field]


def read_json(folder: Path, name: str) -> dict:
    """Return the JSON object in a file of a tokenizer's folder, or {} if there is no such file.
    Raises ValueError if the file cannot be read."""
    path = folder / name
    if not path.exists():
        return {}
    try:
        content = json.loads(own_file(path, folder).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, OSError) as e:
        raise ValueError(f"--tokenizer {folder}: {name} cannot be read: {e}") from e
    return content


def load_tokenizer(folder: Path):
    """Return the tokenizer of a Hugging Face folder. As in transformers, the tokens of
    named_tokens() are special tokens, too. Raises ValueError."""
    from tokenizers import AddedToken, Tokenizer

    if folder.name == "tokenizer.json" and folder.is_file():
        raise ValueError(
            f"--tokenizer {folder} is a file. Pass its folder: --tokenizer {folder.parent}"
        )
    if not folder.is_dir():
        advice = "`hf download NAME --local-dir DIR` fetches one"
        if str(folder) == "bytes":
            advice = "Drop --tokenizer: without it, train.py's tokens of a text are its bytes"
        raise ValueError(f"--tokenizer {folder}: there is no such folder. {advice}")
    try:
        tokenizer = Tokenizer.from_file(str(own_file(folder / "tokenizer.json", folder)))
    except Exception as e:  # the library raises no narrower class
        raise ValueError(
            f"--tokenizer {folder}: the folder has no tokenizer.json that can be read: {e}. If it "
            "has another kind of tokenizer, load it with transformers' AutoTokenizer, and "
            "save_pretrained it to a new folder"
        ) from e
    tokenizer.no_truncation()  # some tokenizer.json files ask for truncation
    tokenizer.no_padding()
    known = tokenizer.get_vocab()
    named = [token for token in named_tokens(folder).values() if token in known]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in named])
    return tokenizer


def named_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that have a name, such as {"eos_token": "</s>"}. Raises ValueError.

    tokenizer_config.json has them. If it has no added_tokens_decoder, which came in 2023, then
    special_tokens_map.json is read, too, and takes precedence. transformers does the same.
    """
    fields = read_json(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in fields:
        fields = fields | read_json(folder, "special_tokens_map.json")
    tokens = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            value = value.get("content")
        if re.fullmatch("(bos|eos|unk|sep|pad|cls|mask)_token", key) and isinstance(value, str):
            tokens[key] = value
    return tokens


def config_ids(folder: Path, key: str) -> list[int]:
    """Return the ids that generation_config.json and config.json, in this order, give for a key
    such as eos_token_id. Its value may be one id or a list of ids. Raises ValueError."""
    ids = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder, name).get(key)
        for i in value if isinstance(value, list) else [value]:
            if isinstance(i, int) and i not in ids:
                ids.append(i)
    return ids


def find_end_token(tokenizer, folder: Path) -> int | None:
    """Return the id of the tokenizer's end token, or None if the folder names none. Raises
    ValueError if the token that it names is not in the vocabulary."""
    token = named_tokens(folder).get("eos_token")
    if token is not None:
        end, name = tokenizer.token_to_id(token), f"eos_token {token}"
    else:
        ids = config_ids(folder, "eos_token_id")
        if not ids:
            return None
        end, name = ids[0], f"eos_token_id {ids[0]}"
    if end is None or tokenizer.id_to_token(end) is None:
        raise ValueError(
            f"--tokenizer {folder}: its {name} is not in its vocabulary. Name the id that ends a "
            "document with --document-token ID"
        )
    return end


def no_end_token(folder: Path) -> ValueError:
    """Return the error for a tokenizer without an end token."""
    return ValueError(
        f"--tokenizer {folder}: it has no end token: there is no eos_token in "
        "tokenizer_config.json or special_tokens_map.json, and no eos_token_id in "
        "generation_config.json or config.json. Name the id that ends a document with "
        "--document-token ID"
    )


def find_first_tokens(tokenizer, folder: Path) -> list[int]:
    """Return the ids that --bos puts before a document: those that the tokenizer itself puts before
    a text, else its bos_token. Raises ValueError if it has neither."""
    encoding = tokenizer.encode("a")
    # the mask is 1 for each token that the tokenizer has added
    pairs = zip(encoding.ids, encoding.special_tokens_mask)
    if added := [i for i, _ in itertools.takewhile(lambda pair: pair[1], pairs)]:
        return added
    token = named_tokens(folder).get("bos_token")
    ids = [] if token is None else [tokenizer.token_to_id(token)]
    ids = ids or config_ids(folder, "bos_token_id")[:1]
    if not ids or ids[0] is None or tokenizer.id_to_token(ids[0]) is None:
        raise ValueError(
            f"--bos: the tokenizer {folder} adds no token before a text, and has no bos_token in "
            "its vocabulary. Drop --bos"
        )
    return ids


def find_template(folder: Path) -> str:
    """Return the tokenizer's chat template: chat_template.jinja, else the one in
    tokenizer_config.json, where the one named "default" is taken if there are several. Raises
    ValueError if there is none."""
    path = folder / "chat_template.jinja"
    template = read_json(folder, "tokenizer_config.json").get("chat_template")
    if path.exists():
        template = own_file(path, folder).read_text(encoding="utf-8")
    elif isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"--chat: the tokenizer {folder} has no chat template: neither chat_template.jinja, "
            "nor chat_template in tokenizer_config.json. Put one there, such as that of the "
            "model's chat version"
        )
    return template


# ---------------------------------------------------------------------------- encoding


# The text of a document or of a part of it; whether the document begins with this text; whether it
# ends with this text. There may be millions of them, so this is a plain tuple, which is fast.
TextPart = tuple[str, bool, bool]


class Encoder:
    """Turns batches into ids. Every worker process has its own Encoder."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.tokenizer = load_tokenizer(Path(settings.tokenizer_folder))
        self.tokenizer.encode_special_tokens = not (settings.special_tokens or settings.chat)
        self.conversations = Conversations(settings, self.tokenizer) if settings.chat else None

    def encode(self, chunks: list[Chunk]) -> tuple[bytes, bytes, int]:
        """Return the ids of a batch as bytes, its mask as bytes (empty without --chat), and the
        number of documents that end in it. Raises ValueError, which names the file if it can."""
        # A batch may hold no document, and np.concatenate needs at least one array
        ids = [np.zeros(0, dtype=int)]
        mask = [np.zeros(0, dtype=np.uint8)]
        documents = 0
        if self.conversations:
            for chunk in chunks:
                is_table = self.settings.sources[chunk.start.source].kind in TABLE_LIBRARIES
                encode = functools.partial(self.conversations.encode, is_table=is_table)
                for document_ids, document_mask in self.each_record(chunk, encode):
                    ids.append(document_ids)
                    mask.append(document_mask)
                    documents += 1
        else:
            for group in self.groups(chunks):
                ids.append(self.encode_texts(group))
                documents += sum(last for _, _, last in group)
        ids = np.concatenate(ids).astype(self.settings.dtype)
        return ids.tobytes(), np.concatenate(mask).tobytes(), documents

    def groups(self, chunks: list[Chunk]) -> Iterator[list[TextPart]]:
        """Yield the texts of a batch in groups, because the tokenizers library needs more than a
        hundred bytes of memory per character of a group. A group has at most DOCUMENT_BYTES
        characters, or only one text."""
        group, size = [], 0
        for chunk in chunks:
            for part in self.texts(chunk):
                if group and size + len(part[0]) > DOCUMENT_BYTES:
                    yield group
                    group, size = [], 0
                group.append(part)
                size += len(part[0])
        if group:
            yield group

    def texts(self, chunk: Chunk) -> Iterator[TextPart]:
        """Yield the texts of a chunk: its part of a plain text, or one text per line of JSON.
        Raises ValueError."""
        if self.settings.sources[chunk.start.source].kind == "text":
            yield self.decode(chunk), chunk.first, chunk.last
            return
        name = self.settings.text_field
        for text in self.each_record(chunk, lambda record: record_text(record, name)):
            if len(text) * 4 <= DOCUMENT_BYTES:  # UTF-8 has at most 4 bytes per character
                yield text, True, True
            else:
                yield from text_parts(text)

    def encode_texts(self, group: list[TextPart]) -> np.ndarray:
        """Return the ids of texts, one text after the other, as (tokens,). Adds the tokens that
        begin and end a document. Raises ValueError if a text spells the document token and the
        tokenizer does not treat it as text."""
        texts = [text for text, _, _ in group]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        bos, end = self.settings.bos, self.settings.document_token
        ids = []
        for (text, first, last), encoding in zip(group, encodings):
            found = encoding.ids
            if end in found and not self.settings.special_tokens:  # it would end a document here
                raise ValueError(
                    f"the text that begins with {text[:40]!r} spells the document token {end}, and "
                    "this tokenizer cannot treat that as text. Pass --special-tokens, or another "
                    "--document-token"
                )
            if first:
                ids += bos
            ids += found
            if last and end >= 0:
                ids.append(end)
        return np.array(ids, dtype=int)

    def decode(self, chunk: Chunk) -> str:
        """Return a chunk's text, without a byte order mark at the beginning of its file. Raises
        ValueError that names the file and the position."""
        try:
            text = chunk.content.decode()
        except UnicodeDecodeError as e:
            path = self.settings.sources[chunk.start.source].path
            raise not_utf8(path, e, chunk.start.position + e.start) from e
        # a row of a table has no byte order mark: its chunk is JSON, which begins with {
        return text.removeprefix("\ufeff") if chunk.start.position == 0 else text

    def each_record(self, chunk: Chunk, act: Callable) -> Iterator:
        """Yield act(record) for each line of JSON that is not blank. Raises ValueError, which names
        the file and the line or row."""
        source = self.settings.sources[chunk.start.source]
        text = self.decode(chunk)
        for number, line in enumerate(text.split("\n"), chunk.start.line + 1):
            if not line or line.isspace():
                continue
            try:
                yield act(parse_record(line))
            except (ValueError, RecursionError) as e:  # JSON may be nested too deeply
                unit = "line" if source.kind == "lines" else "row"
                raise ValueError(f"{source.path} {unit} {number}: {e}") from e


def parse_record(line: str) -> dict:
    """Return the JSON object on a line. Raises ValueError if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"broken JSON: {e}") from e
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, and this is a {type(record).__name__}")
    return record


def record_text(record: dict, name: str) -> str:
    """Return the text in the field `name` of a record. Raises ValueError if it has none."""
    text = record.get(name)
    if isinstance(text, str):
        check_surrogates(text)
        return text
    if name in record:
        raise ValueError(f"its field {name} is not text, but {json.dumps(text)[:40]}")
    raise ValueError(
        f"it has no field {name}. Its fields are {', '.join(record) or 'none'}: name one of them "
        "with --field"
    )


def check_surrogates(text: str) -> None:
    """Raise ValueError if a text has half of a surrogate pair, such as \\ud83d. JSON can spell it,
    but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(
            f"character {e.start} is \\u{ord(text[e.start]):04x}, the half of a surrogate pair, "
            "which is no character. Repair the text"
        ) from e


def text_parts(text: str) -> Iterator[TextPart]:
    """Yield a text in parts, which are cut like those of a text file: see cut_position."""
    content = text.encode()
    start = 0
    while start < len(content):
        size = cut_position(content[start : start + DOCUMENT_BYTES + 1])
        end = start + size
        yield content[start:end].decode(), start == 0, end == len(content)
        start = end


# ---------------------------------------------------------------------------- conversations

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
}
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversations:
    """Turns conversations into ids and a mask, with the tokenizer's chat template.

    The template makes one text of a conversation. A character of the text *counts*, which means
    that its token is a label, if the assistant wrote it. Some templates mark the assistant's text
    by {% generation %}, and then exactly the marked characters count. Any other template is applied
    to prefixes of the conversation. The generation prompt is what the template puts before an
    answer, such as <|assistant|>. For the assistant's message k:

        prompt   messages before k, with the generation prompt    <|user|>hi<|/|>\\n<|assistant|>
        upto     messages up to and including k                   ... <|assistant|>oh you<|/|>\\n
        counts   what `upto` has after `prompt`                   oh you<|/|>

    The model stops at the last special token of its turn, here <|/|>. So white space after it, here
    \\n, does not count. Of an empty message only the token that ends its turn counts.

    A token counts if one of its characters does. There is one exception: some special tokens take
    in the white space beside them. This white space does not make such a token count.
    """

    def __init__(self, settings: Settings, tokenizer):
        from transformers.utils.chat_template_utils import render_jinja_template

        self.settings = settings
        self.tokenizer = tokenizer
        # A post-processor may leave spaces out of a token's offsets
        self.tokenizer.post_processor = None
        self.render_template = render_jinja_template

        added = tokenizer.get_added_tokens_decoder()
        # The ids of the tokens that take in the white space beside them
        self.taking_spaces = {i for i, token in added.items() if token.lstrip or token.rstrip}

        special = [token for token in added.values() if token.special]
        # A regular expression takes the first alternative that matches, so the longest come first
        special.sort(key=lambda token: -len(token.content))
        names = [re.escape(token.content) for token in special]
        names_with_spaces = []
        for token, name in zip(special, names):
            before = r"\s*" if token.lstrip else ""
            after = r"\s*" if token.rstrip else ""
            names_with_spaces.append(before + name + after)

        nothing = "(?!)"  # matches nowhere, if there are no special tokens
        self.special = re.compile("|".join(names) or nothing)
        # Like self.special, but with the white space that a token takes in. The group makes
        # re.split keep the tokens
        self.splitter = re.compile("(" + ("|".join(names_with_spaces) or nothing) + ")")

    # ---- the text of a conversation

    def render(self, messages: list, tools: list | None, prompt=False, marks=False):
        """Return the text that the template makes of messages, and the spans that it marks.

        prompt: end the text with the generation prompt. marks: return the spans that the template
        marks by {% generation %}; without this flag the list of spans is empty. transformers runs
        the template in jinja2's sandbox, because templates come from other people. Raises
        ValueError if the template raises an error.
        """
        try:
            texts, spans = self.render_template(
                [messages],
                tools=tools,
                chat_template=self.settings.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self.settings.template_tokens,
            )
        except Exception as e:  # a template may raise anything
            raise ValueError(
                "the chat template refuses the conversation"
                f"{' up to an assistant message' if prompt else ''}: {type(e).__name__}: {e}"
            ) from e
        return texts[0], spans[0] if spans else []

    def text(self, record: dict, is_table: bool) -> tuple[str, np.ndarray, str]:
        """Return (text, counts, breaker) for a conversation. Raises ValueError. is_table: the
        record is a row of a table.

        text      what the template makes of it, with the breakers that protect() puts in
        counts    (characters,): 1 for a character that counts, else 0
        breaker   the character that protect() puts in, or "" if it puts in none
        """
        check_surrogates(json.dumps(record, ensure_ascii=False))
        record = without_nulls(record, is_table)
        messages, tools = read_messages(record), record.get("tools")
        if not isinstance(tools, list | None):
            raise ValueError("its field tools is not a list")
        tools = tools or None  # in a table, a conversation without tools may have an empty list
        breaker = ""
        if not self.settings.special_tokens:
            breaker, messages, tools = self.protect(messages, tools)

        if GENERATION.search(self.settings.template):
            text, spans = self.render(messages, tools, marks=True)
        else:
            text, spans = self.spans_of_prefixes(messages, tools)
        counts = np.zeros(len(text), dtype=np.uint8)
        for start, end in spans:
            counts[start:end] = 1
        return text, counts, breaker

    def spans_of_prefixes(self, messages: list, tools: list | None) -> tuple[str, list]:
        """Return the text of a conversation, and the spans of the assistant's messages in it.
        Raises ValueError if the text of a prefix of the conversation is not a prefix of the
        text."""
        whole, _ = self.render(messages, tools)
        spans = []
        for k, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt, _ = self.render(messages[:k], tools, prompt=True)
            upto, _ = self.render(messages[: k + 1], tools)
            if not (whole.startswith(upto) and upto.startswith(prompt)):
                raise ValueError(
                    f"the chat template changes the text of message {k + 1} or of earlier "
                    "ones when later ones follow (some drop earlier thinking), so the assistant's "
                    "part cannot be found. Mark it in the template by {% generation %} and "
                    "{% endgeneration %}, or end the conversation at its first answer"
                )
            turn = upto[len(prompt) :]
            ends = [match.end() for match in self.special.finditer(turn)]
            if ends and not turn[ends[-1] :].strip():
                turn = turn[: ends[-1]]
            spans.append((len(prompt), len(prompt) + len(turn)))
        return whole, spans

    # ---- text that spells a special token

    def protect(self, messages: list, tools: list | None) -> tuple:
        """Break up special tokens that messages spell, so that the tokenizer does not see them.

        Puts a character, the breaker, after the first character of each: <|end|> becomes <X|end|>
        if X is the breaker. The breaker occurs neither in the conversation nor in the template.
        split() removes it. Returns the breaker, and the new messages and tools. The breaker is
        empty if no message spells a special token.
        """
        content = json.dumps([messages, tools], ensure_ascii=False)
        private = map(chr, range(0xE000, 0xF8FF))  # Unicode leaves these to private use
        breaker = next(c for c in private if c not in content and c not in self.settings.template)

        def broken_up(match):
            token = match[0]
            if len(token) == 1:
                raise ValueError(
                    f"a message has the character {token!r}, which is a special token of this "
                    "tokenizer. Change the message, or pass --special-tokens"
                )
            return token[0] + breaker + token[1:]

        def change(value):
            if isinstance(value, str):
                return self.special.sub(broken_up, value)
            if isinstance(value, list):
                return [change(item) for item in break_joints(value)]
            if isinstance(value, dict):
                return {change(key): change(item) for key, item in value.items()}
            return value

        def break_joints(items: list) -> list:
            """A template may join the texts of a message's parts. Put a breaker before each part if
            they spell a special token only together."""

            def is_text(item):
                return isinstance(item, dict) and isinstance(item.get("text"), str)

            texts = [item["text"] for item in items if is_text(item)]
            together = len(self.special.findall("".join(texts)))
            if together <= sum(len(self.special.findall(text)) for text in texts):
                return items
            return [
                item | {"text": breaker + item["text"]} if is_text(item) else item for item in items
            ]

        changed = change(messages), change(tools)
        if changed == (messages, tools):
            return "", messages, tools
        return breaker, *changed

    # ---- ids and mask

    def encode(self, record: dict, is_table: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation and its mask, both (tokens,). is_table: the record is a
        row of a table. Raises ValueError, also if the document token occurs before the end of the
        conversation."""
        whole, whole_counts, breaker = self.text(record, is_table)
        parts = self.split(whole, whole_counts, breaker) if breaker else [(whole, whole_counts)]
        ids, mask = [], []
        for text, counts in parts:
            if isinstance(text, int):  # the id of a special token
                ids.append(text)
                mask.append(counts.any())
            else:
                self.tokenizer.encode_special_tokens = bool(breaker)
                encoding = self.tokenizer.encode(text, add_special_tokens=False)
                spans = [
                    without_spaces(text, *span) if token in self.taking_spaces else span
                    for token, span in zip(encoding.ids, encoding.offsets)
                ]
                ids += encoding.ids
                mask += token_counts(spans, counts).tolist()
        self.tokenizer.encode_special_tokens = False

        end = self.settings.document_token
        if end in ids[:-1]:
            token = self.tokenizer.id_to_token(end)
            raise ValueError(
                f"the document token {end} ({token}) also occurs within the "
                "conversation, where it would end the document. Name another one with "
                f"--document-token ID: {self.settings.other_ends}"
            )
        # A template may write the document token itself. It may then count, as an end of turn
        if end >= 0 and ids[-1:] != [end]:
            ids.append(end)
            mask.append(0)
        return np.array(ids, dtype=int), np.array(mask, dtype=np.uint8)

    def split(self, text: str, counts: np.ndarray, breaker: str) -> list[tuple]:
        """Cut a text at its special tokens, and remove the breakers.

        Returns a pair per part. Its first item is the id of a special token, or the text between
        two special tokens. Its second item says for each character of the part whether it counts.
        Raises ValueError if the ids of the parts, before breakers are removed, are not the ids of
        the whole text, because this tokenizer gives other ids if a text is cut.
        """
        parts, ids_of_parts = [], []
        position = 0
        for piece in filter(None, self.splitter.split(text)):
            piece_counts = counts[position : position + len(piece)]
            position += len(piece)
            if self.splitter.fullmatch(piece):
                token = self.tokenizer.token_to_id(piece.strip())
                start, end = without_spaces(piece, 0, len(piece))
                parts.append((token, piece_counts[start:end]))
                ids_of_parts.append(token)
            else:
                keep = np.array([character != breaker for character in piece])
                parts.append((piece.replace(breaker, ""), piece_counts[keep]))
                ids_of_parts += self.tokenizer.encode(piece, add_special_tokens=False).ids
        whole = self.tokenizer.encode(text, add_special_tokens=False).ids
        if ids_of_parts != whole:
            raise ValueError(
                "a message spells a special token, and this tokenizer cannot "
                "treat it as text. Change the message, or pass --special-tokens"
            )
        return parts


def without_spaces(text: str, start: int, end: int) -> tuple[int, int]:
    """Return where text[start:end] begins and ends without the white space around it. A span of
    only white space stays as it is."""
    content = text[start:end]
    if not content.strip():
        return start, end
    return end - len(content.lstrip()), start + len(content.rstrip())


def token_counts(offsets: list[tuple[int, int]], counts: np.ndarray) -> np.ndarray:
    """Return 1 for each token that has a character that counts, else 0. offsets: per token, the
    index of its first character and of the one after its last. counts: (characters,), 0 or 1.

    For example, counts 0 0 1 1 and offsets (0, 2) and (2, 4) give 0 1.
    """
    if not offsets:
        return np.zeros(0, dtype=np.uint8)
    starts, ends = np.array(offsets).T
    ends = np.maximum(ends, starts + 1)  # an empty span stands for the character at it
    # before[i]: how many of the first i characters count. The last entry is for an empty span at
    # the end of the text, where no character counts
    before = np.concatenate([[0], np.cumsum(counts, dtype=int), [0]])
    before[-1] = before[-2]
    limit = len(before) - 1
    return (before[np.minimum(ends, limit)] > before[np.minimum(starts, limit)]).astype(np.uint8)


# Entries of a conversation that may hold any JSON: the arguments of a tool's call, and the schema
# of a tool's parameters. There, null is a value like any other
FREE_FORM = ("arguments", "parameters")


def without_nulls(value, is_table: bool):
    """Return a JSON value whose objects have no null entries, except for "content".

    In a table each row has an entry for each key, and it is null where JSON Lines would leave the
    key out. Templates ask whether a message has the key tool_calls, and would take a null for one.
    In JSON Lines, a null inside an entry of FREE_FORM was written on purpose, and stays.
    """
    if isinstance(value, list):
        return [without_nulls(item, is_table) for item in value]
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            if key in FREE_FORM and not is_table and item is not None:
                kept[key] = item
            elif item is not None or key == "content":
                kept[key] = without_nulls(item, is_table)
        return kept
    return value


def read_messages(record: dict) -> list[dict]:
    """Return a conversation's messages, each with at least "role" and "content" or "tool_calls".

    Other entries of a message stay as they are. Messages in ShareGPT's format keep only "from" and
    "value", as "role" and "content". Raises ValueError.
    """
    name = next((name for name in CONVERSATION_FIELDS if record.get(name)), None)
    if name is None:
        raise ValueError(
            f"it has no field messages (or conversations) with a conversation. Its fields are "
            f"{', '.join(record) or 'none'}"
        )
    messages = record[name]
    if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise ValueError(f'its field {name} is not a list of {{"role": ..., "content": ...}}')
    if "from" in messages[0]:
        messages = [
            # str(), because "from" may be a list, which cannot be looked up
            {"role": SHAREGPT_ROLES.get(str(m.get("from"))), "content": m.get("value")}
            for m in messages
        ]
    for k, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            original = record[name][k]
            raise ValueError(
                f"message {k + 1} has an unknown role: "
                f"{json.dumps(original.get('role', original.get('from')))[:40]}"
            )
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"message {k + 1} has no content")
        if message.get("content") is None and "tool_calls" not in message:
            raise ValueError(f"the content of message {k + 1} is null")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            "no message has the role assistant, so no token would count as a label. "
            "Leave the conversation out"
        )
    return messages


# ---------------------------------------------------------------------------- workers

ENCODER: Encoder | None = None  # the Encoder of this worker process


def start_worker(settings: Settings) -> None:
    """Prepare a worker process. It ends when the main process ends, even if that was killed."""
    global ENCODER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the main process ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores

    def end_with_parent():
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    ENCODER = Encoder(settings)


def encode_in_worker(chunks: list[Chunk]) -> tuple[bytes, bytes, int]:
    """Return what Encoder.encode returns, in a worker process."""
    return ENCODER.encode(chunks)


def encoded(batches: Iterable[list[Chunk]], settings: Settings, workers: int) -> Iterator[tuple]:
    """Yield pairs in the order of the inputs: a batch, and what Encoder.encode returns for it.

    Raises an error of the reader or of a worker: the one whose batch is first in the inputs.
    """
    if workers == 1:
        encoder = Encoder(settings)
        for batch in batches:
            yield batch, encoder.encode(batch)
        return

    # A fork of a process with threads may hang. So workers are forks of a server process without
    # threads, which imports this program once
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, start_worker, (settings,))
    waiting = collections.deque()  # (batch, its bytes, future), oldest first
    in_flight = 0  # bytes of the batches that wait
    failure = None  # the reader's error, which is raised after the batches before it
    try:
        batches = iter(batches)
        while True:
            try:
                batch = next(batches, None)
            except (ValueError, OSError) as e:
                failure, batch = e, None  # this is the last turn: it yields all that wait
            if batch:
                size = sum(len(chunk.content) for chunk in batch)
                waiting.append((batch, size, pool.submit(encode_in_worker, batch)))
                in_flight += size
            while waiting and (
                batch is None
                or len(waiting) >= 2 * workers
                or in_flight > 2 * workers * DOCUMENT_BYTES
            ):
                oldest, size, future = waiting.popleft()
                in_flight -= size
                yield oldest, future.result()
            if batch is None:
                break
        if failure:
            raise failure
    except BrokenProcessPool:
        raise OSError(
            f"a worker process died, perhaps because memory ran out. Pass fewer than --workers "
            f"{workers}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------- writing


@dataclass
class Progress:
    """How far a command is: the content of OUT.partial/progress.json."""

    job: str  # the checksum of job_key()
    cursor: list[int] = field(default_factory=lambda: list(Cursor()))  # where the next batch begins
    tokens: int = 0  # written so far, including document tokens
    documents: int = 0
    labels: int = 0  # --chat: tokens that count as labels
    ids_crc32: int = 0
    mask_crc32: int = 0


def job_key(settings: Settings) -> str:
    """Return a checksum of all that decides the ids: flags, the tokenizer's content, the template,
    and the names, sizes and times of the inputs. The name of the tokenizer's folder does not
    count, so that the folder may move."""
    tokenizer = load_tokenizer(Path(settings.tokenizer_folder)).to_str()
    limits = DOCUMENT_BYTES, str(settings.dtype)
    sources, _folder, *flags = astuple(settings)
    content = repr((tokenizer, limits, [sources, *flags]))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def outputs_of(out: Path) -> dict[str, Path]:
    """Return the paths that a command writes, for example of OUT a.bin: a.bin, a.bin.json, a.mask,
    and the folder a.bin.partial."""
    return {
        "ids": out,
        "sidecar": Path(f"{out}.json"),
        "mask": out.with_suffix(".mask"),
        "partial": Path(f"{out}.partial"),
    }


def write(settings: Settings, out: Path, workers: int) -> Progress:
    """Write OUT, its sidecar OUT.json and its mask. Continue where the same command was
    interrupted. Return the final progress, which counts tokens, documents and labels.

    Errors, and what becomes of the folder OUT.partial:

        error        cause                                                  OUT.partial
        ValueError   the content of an input is wrong, a source has         is removed
                     changed, or a new day has begun (commit)
        ValueError   OUT, another sidecar or another mask exists, another   stays
                     command writes OUT now, OUT.partial belongs to
                     another command, or its content does not have the
                     checksum in progress.json
        OSError      a file cannot be read or written, or a worker died     stays, and the same
                                                                            command continues
    """
    paths = outputs_of(out)
    for path in paths.values():
        if path.is_symlink():
            raise OSError(f"{path} is a link, through which nothing is written. Remove the link")
    if out.exists():
        raise ValueError(
            f"--out {out} exists already, and nothing is overwritten. Remove it, or name another "
            "file"
        )
    if not (paths["partial"] / "progress.json").exists():
        check_beside(settings, paths)
    paths["partial"].mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(own_or_absent(paths["partial"] / "lock"), "a"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {out}: another command writes this file now") from None
        except OSError:
            pass  # some shared file systems have no locks
        progress = read_progress(paths, job_key(settings))
        cut_to_progress(settings, paths, progress)
        try:
            if progress.cursor[0] < len(settings.sources):
                append(settings, paths["partial"], progress, workers)
            if not progress.tokens:
                raise ValueError("the inputs hold no document, so there is nothing to write")
            if settings.chat and not progress.labels:
                raise ValueError(
                    "no token counts as a label: the chat template marks nothing of the assistant's"
                )
            check_unchanged(settings.sources)
        except ValueError:
            shutil.rmtree(paths["partial"])  # a corrected input has another job_key
            raise
        finish(settings, paths)
    return progress


def check_beside(settings: Settings, paths: dict[str, Path]) -> None:
    """Raise ValueError if a command that begins anew would replace a sidecar or a mask. They may
    belong to a .bin file that was renamed. A sidecar with the same content may be there."""
    found = []
    if settings.chat and paths["mask"].exists():
        found.append(paths["mask"])
    sidecar = regular(paths["sidecar"])
    if sidecar.exists() and sidecar.read_bytes() != sidecar_of(settings, paths).encode():
        found.append(sidecar)
    if found:
        raise ValueError(
            f"--out {paths['ids']}: {found[0]} exists already, and nothing is overwritten. Remove "
            "it, or name another --out"
        )


def check_unchanged(sources: list[Source]) -> None:
    """Raise ValueError if a source has changed since it was found."""
    for source in sources:
        if has_changed(source):
            raise ValueError(f"{source.path} has changed while it was read. Start again")


def read_progress(paths: dict[str, Path], job: str) -> Progress:
    """Return how far an earlier command was, or a new Progress if there was none. Raises ValueError
    if the earlier command had another job_key, or if progress.json cannot be read."""
    partial = paths["partial"]
    path = own_or_absent(partial / "progress.json")
    if not path.exists():
        return Progress(job)
    advice = f"Remove {partial} to begin again, or name another --out"
    try:
        progress = Progress(**json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path} cannot be read: {e}. {advice}") from e
    if progress.job != job:
        raise ValueError(
            f"{partial} was begun with other flags, another tokenizer or other inputs, or on "
            f"another day if the chat template writes the date. {advice}"
        )
    return progress


def bytes_per_token(settings: Settings) -> dict[str, int]:
    """Return the names of the files in OUT.partial that append() writes, and their bytes per
    token."""
    widths = {"ids": settings.dtype.itemsize}
    if settings.chat:
        widths["mask"] = 1
    return widths


def cut_to_progress(settings: Settings, paths: dict[str, Path], progress: Progress) -> None:
    """Cut off what was written after the progress was noted. Raises ValueError if the rest does not
    have the checksum in progress.json."""
    complete = progress.cursor[0] == len(settings.sources)
    for name, width in bytes_per_token(settings).items():
        path = own_or_absent(paths["partial"] / name)
        if name == "mask" and complete and not path.exists():
            path = paths["mask"]  # finish() has renamed it already
        path.touch()
        size = progress.tokens * width
        if checksum(path, size) != getattr(progress, f"{name}_crc32"):
            raise ValueError(
                f"{path} is not what was written there. Remove {paths['partial']} to begin again"
            )
        os.truncate(path, size)


def checksum(path: Path, size: int) -> int | None:
    """Return the CRC-32 of the first `size` bytes of a file, or None if it has fewer."""
    crc32 = 0
    with open(path, "rb") as file:
        while size:
            block = file.read(min(size, 2**20))
            if not block:
                return None
            crc32 = zlib.crc32(block, crc32)
            size -= len(block)
    return crc32


def append(settings: Settings, partial: Path, progress: Progress, workers: int) -> None:
    """Append the ids of all batches from the progress on, and write progress.json every few
    seconds. Raises ValueError or OSError."""
    from tqdm import tqdm

    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(open(partial / name, "ab"))
            for name in bytes_per_token(settings)
        }
        sizes = [source.size for source in settings.sources]
        before = [0, *itertools.accumulate(sizes)]  # bytes of the sources before each one
        bar = stack.enter_context(
            tqdm(total=before[-1], unit="B", unit_scale=True, mininterval=2, desc="tokenise")
        )
        if progress.tokens:
            bar.write(f"going on after {progress.tokens:,} tokens", file=sys.stderr)
        batches = read_batches(settings.sources, Cursor(*progress.cursor), settings.fields)
        saved = time.monotonic()
        for batch, (ids, mask, documents) in encoded(batches, settings, workers):
            files["ids"].write(ids)
            if settings.chat:
                files["mask"].write(mask)
            progress.tokens += len(ids) // settings.dtype.itemsize
            progress.documents += documents
            progress.labels += mask.count(1)
            progress.ids_crc32 = zlib.crc32(ids, progress.ids_crc32)
            progress.mask_crc32 = zlib.crc32(mask, progress.mask_crc32)
            progress.cursor = list(batch[-1].end)
            done = before[batch[-1].start.source] + batch[-1].bytes_read
            bar.update(done - bar.n)
            if time.monotonic() - saved > COMMIT_SECONDS:
                commit(settings, partial, progress, files)
                saved = time.monotonic()
        progress.cursor = list(Cursor(len(settings.sources)))
        commit(settings, partial, progress, files)


def commit(settings: Settings, partial: Path, progress: Progress, files: dict) -> None:
    """Write progress.json, after the ids and the mask that it counts are on the disk. Raises
    ValueError if the template writes the date and a new day has begun."""
    if settings.date and settings.date != time.strftime("%Y-%m-%d"):
        raise ValueError(
            "the chat template writes the date, and a new day has begun, so conversations would "
            "differ. Start the command again"
        )
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    content = json.dumps(vars(progress))
    replace_file(partial / "progress.json", lambda new: new.write_text(content))


def sidecar_of(settings: Settings, paths: dict[str, Path]) -> str:
    """Return the content of OUT.json."""
    sidecar = {
        "token_bytes": settings.dtype.itemsize,
        "document_token": settings.document_token,
        "vocab": settings.vocab,
    }
    if settings.chat:
        sidecar["mask"] = paths["mask"].name
    return json.dumps(sidecar) + "\n"


def finish(settings: Settings, paths: dict[str, Path]) -> None:
    """Give the files their final names: the mask, then the sidecar, then the ids.

    The ids come last, so OUT is always complete. If a command is killed between two files, the same
    command continues with the next one. If it is killed after the ids, only OUT.partial is left.
    """
    if settings.chat and (paths["partial"] / "mask").exists():
        os.replace(paths["partial"] / "mask", paths["mask"])
    content = sidecar_of(settings, paths)
    replace_file(paths["sidecar"], lambda new: new.write_text(content))
    os.replace(paths["partial"] / "ids", paths["ids"])
    shutil.rmtree(paths["partial"])


# ---------------------------------------------------------------------------- commands


def make_settings(
    sources: list[Source],
    tokenizer_folder: str,
    text_field: str = "text",
    document_token: int | None = None,
    bos: bool = False,
    special_tokens: bool = False,
    chat: bool = False,
) -> Settings:
    """Return the settings for flags and inputs. Raises ValueError for a wrong flag, tokenizer or
    kind of input. It does not read the content of the inputs."""
    folder = Path(tokenizer_folder)
    tokenizer = load_tokenizer(folder)
    vocab = vocab_of(tokenizer)
    end = find_end_token(tokenizer, folder) if document_token is None else document_token
    if end is None:
        raise no_end_token(folder)
    if end >= vocab:
        raise ValueError(
            f"--document-token {end}: the tokenizer {folder} has {vocab} tokens, so its ids end at "
            f"{vocab - 1}"
        )
    if chat and bos:
        raise ValueError("--bos: with --chat the chat template writes the first token. Drop --bos")
    if not chat:
        first_tokens = find_first_tokens(tokenizer, folder) if bos else []
        return Settings(sources, str(folder), end, vocab, first_tokens, text_field, special_tokens)

    for source in sources:
        if source.kind in ("text", "csv", "tsv"):
            raise ValueError(
                f"{source.path}: --chat reads conversations from JSON Lines, Parquet, Arrow and "
                f"datasets, and this is {source.kind}"
            )
    template = find_template(folder)
    tokens = named_tokens(folder)
    # Ids that an error suggests, because few conversations have them: other end tokens, and padding
    pad = tokenizer.token_to_id(tokens.get("pad_token", ""))
    candidates = [*config_ids(folder, "eos_token_id"), pad]
    names = {i: tokenizer.id_to_token(i) for i in candidates if i not in (None, end)}
    suggested = " or ".join(f"{i} ({token})" for i, token in names.items() if token)
    return Settings(
        sources,
        str(folder),
        end,
        vocab,
        special_tokens=special_tokens,
        chat=True,
        template=template,
        template_tokens=tokens,
        other_ends=suggested or "an id that no conversation has, or -1 for none",
        date=time.strftime("%Y-%m-%d") if "strftime_now" in template else "",
    )


def vocab_of(tokenizer) -> int:
    """Return the number of ids that a model needs for this tokenizer: its largest id, plus 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_same_vocab(files: list[Path], folder: str) -> None:
    """Raise ValueError if a .bin file says that its tokenizer has another number of ids than the
    tokenizer in `folder`. Otherwise a run would decode and export with the wrong tokenizer."""
    for file in map(describe, files):
        if not file.vocab:  # the file does not say it
            continue
        vocab = vocab_of(load_tokenizer(Path(folder)))
        if file.vocab != vocab:
            raise ValueError(
                f"--tokenizer {folder}: it has {vocab} ids, but the tokenizer that wrote "
                f"{file.path} has {file.vocab}. Pass that one, or drop --tokenizer"
            )


def tokenise_data(
    data: str,
    folder: str,
    cache: Path,
    document_token: int | None = None,
    special_tokens: bool = False,
    vocab: int = 0,
    leave_out: Iterable[str | Path] = (),
) -> tuple[str, int]:
    """Tokenise plain text for train.py --tokenizer, into one .bin file in the folder `cache`.

    Returns the path of the .bin file, and the id that ends each document (-1: none). If `data` has
    .bin files already, returns `data` itself and -1. If they say how many ids their tokenizer has,
    this tokenizer must have as many.

    data             one source of train.py's --data: a file, a folder, or built-in data
    folder           the tokenizer's folder
    document_token   train.py's --document-token; None: auto. If the tokenizer has an end token, the
                     end token is written, and a different id is refused. If the tokenizer has
                     none, this id is written, and None is refused. -1 is never refused: the end
                     token is written if there is one
    special_tokens   whether text that spells a special token becomes this token
    vocab            the number of ids that the model has; 0: not checked
    leave_out        folders that data.find_files leaves out

    The name of the .bin file is job_key's checksum of the settings and the files' names, sizes and
    times. So a later call with the same arguments finds the file, and returns at once.
    Raises ValueError or OSError.
    """
    files, val = find_files(data, leave_out)
    if binaries := [file for file in files + val if file.suffix == ".bin"]:
        texts = [file for file in files + val if file.suffix != ".bin"]
        if texts:
            raise ValueError(
                f"--data {data}: {texts[0]} is text, but {binaries[0]} has token ids. --tokenizer "
                f"makes ids of text only where there are no ids yet. Make ids of the text with "
                f"prepare.py, or take {binaries[0].name} out of the folder"
            )
        check_same_vocab(binaries, folder)
        return data, -1
    for file in files:
        refuse_format(file)  # a file is a document here; other formats need prepare.py's flags

    tokenizer = load_tokenizer(Path(folder))
    end = find_end_token(tokenizer, Path(folder))
    if end is None:
        end = document_token
    if end is None:
        raise no_end_token(Path(folder))
    if document_token not in (None, -1, end):
        raise ValueError(
            f"--document-token {document_token} contradicts --tokenizer {folder}, which ends texts "
            f"with token {end}. Pass --document-token auto, or -1 to let attention cross documents"
        )
    sources = []
    for file in files:
        info = file.stat()
        sources.append(Source(str(file), "text", "", info.st_size, info.st_mtime_ns))
    settings = make_settings(sources, folder, document_token=-1, special_tokens=special_tokens)
    # `end` may be an id that only the model has, which make_settings would refuse
    settings = replace(settings, document_token=end)
    if vocab and settings.vocab > vocab:
        raise ValueError(
            f"--tokenizer {folder}: it has {settings.vocab} ids, but the model has only {vocab}. "
            "Take another model or tokenizer"
        )

    path = cache / f"{job_key(settings)[:16]}.bin"
    if not path.exists():
        if cache.is_symlink():
            raise OSError(f"{cache} is a link, through which nothing is written. Remove the link")
        size = sum(source.size for source in sources)
        write(settings, path, 1 if size < SMALL_BYTES else usable_cores())
    return str(path), end


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="If a command was interrupted, start it again: it continues where it was.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="Files and folders to read: plain text, JSON Lines, CSV, TSV (each also compressed "
        "with gzip, bz2, xz or zstd), Parquet, Arrow, and folders that Hugging Face's datasets "
        "saved.",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="Hugging Face folder whose tokenizer.json turns text into tokens.",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="NAME.bin",
        help="File to write. It must not exist yet. NAME.bin.json beside it says how to read it.",
    )
    parser.add_argument(
        "--field",
        default="text",
        help="Field of a JSON line, or column of a table, that holds the text. (text)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Each document is a conversation: its field messages is a list of objects with role "
        "and content. Or its field conversations is a list with from and value (ShareGPT). The "
        "tokenizer's chat template makes its text. NAME.mask says which tokens count as labels: "
        "only the assistant's.",
    )
    parser.add_argument(
        "--bos",
        action="store_true",
        help="Begin each document with the tokens that the tokenizer puts before a text, else with "
        "its bos_token.",
    )
    parser.add_argument(
        "--document-token",
        type=int,
        metavar="ID",
        help="Id of the token that ends each document. The default is the tokenizer's end token. "
        "-1: no token ends a document.",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="Text that spells a special token becomes that token. Without this flag it is text.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=usable_cores(),
        metavar="N",
        help="Number of processes that tokenise. The default is the number of cores that may be "
        "used. The files are the same for any number.",
    )
    return parser


def one_line(text: str) -> str:
    """Return a message on one line. Messages of libraries may have several."""
    return " ".join(text.split())


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return the exit status: 0, or 2 after an error, which is printed."""
    args = make_parser().parse_args(argv)
    out = Path(os.path.expanduser(args.out))
    try:
        if out.suffix != ".bin":
            raise ValueError(f"--out {args.out}: its name must end in .bin: --out {out}.bin")
        if args.workers < 1:
            raise ValueError(f"--workers {args.workers}: choose at least 1")
        if args.document_token is not None and args.document_token < -1:
            raise ValueError(f"--document-token {args.document_token}: choose an id, or -1")
        inputs = [os.path.expanduser(path) for path in args.inputs]
        settings = make_settings(
            find_sources(inputs, [str(path) for path in outputs_of(out).values()]),
            os.path.expanduser(args.tokenizer),
            args.field,
            args.document_token,
            args.bos,
            args.special_tokens,
            args.chat,
        )
        written = write(settings, out, args.workers)
    except OSError as e:
        reason = f"{e}"
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"{out} cannot be written: {e.strerror}. Make space on that disk"
        if outputs_of(out)["partial"].exists():
            reason += ". What is done is kept: start the same command again, and it goes on"
        print(f"prepare.py: error: {one_line(reason)}", file=sys.stderr)
        return 2
    except ValueError as e:
        print(f"prepare.py: error: {one_line(str(e))}", file=sys.stderr)
        return 2

    text = f"{out}: {written.documents:,} documents, {written.tokens:,} tokens"
    text += f" of {settings.dtype.itemsize} bytes"
    if settings.chat:
        text += f", of which {written.labels:,} count as labels"
    print(f"{text}; document token {settings.document_token}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("prepare.py: interrupted. Start the same command again, and it goes on")
