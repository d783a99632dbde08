"""Show that prepare.py loses no text, refuses what it cannot read, and goes on after a fault."""

import bz2
import gzip
import importlib.util
import itertools
import json
import lzma
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx, raises

import prepare
from helpers import fail_disk_full, make_tokenizer
from test_all import ROOT, parametrize, read_log, run, slow

# The words and the special tokens of the small tokenizer. A text's other words are <unk>. A token's
# id is its position in WORDS + SPECIAL, and has the name below.
WORDS = "<unk> hi oh you be good <s>".split()
SPECIAL = "<|end|> <|user|> <|assistant|> <|/|> <|system|>".split()
UNK, HI, OH, YOU, BE, GOOD, BOS, END, USER, BOT, TURN, SYSTEM = range(12)

# A chat template of the usual kind: {% generation %} does not occur, and \n ends a turn
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|/|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word_tokenizer(folder: Path, template: str = TEMPLATE, adds: str = "", **config) -> Path:
    """Save the small tokenizer as a Hugging Face folder. Return the folder.

    adds: a token that it puts before each text. config: more entries of tokenizer_config.json.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    if adds:
        rows = [(adds, WORDS.index(adds))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{adds} $A", None, rows)
    folder.mkdir()
    tokenizer.save(f"{folder}/tokenizer.json")
    config = {"eos_token": "<|end|>", "chat_template": template} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def command(inputs, tokenizer, out, flags: str = "") -> list[str]:
    """Return the arguments of prepare.py. inputs: a path, or a list of paths."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    return [*map(str, inputs), "--tokenizer", f"{tokenizer}", "--out", f"{out}", *flags.split()]


def prepared(inputs, tokenizer, out, flags: str = "") -> list[int]:
    """Run prepare.py in this process, with one worker unless a flag says more. Return the ids."""
    if "--workers" not in flags:
        flags += " --workers 1"
    assert prepare.main(command(inputs, tokenizer, out, flags)) == 0
    width = json.loads(Path(f"{out}.json").read_text())["token_bytes"]
    return np.fromfile(out, f"<u{width}").tolist()


def refusal(inputs, tokenizer, out, capsys, flags: str = "") -> str:
    """Run prepare.py, which must refuse the command with one sentence. Return the sentence."""
    capsys.readouterr()
    assert prepare.main(command(inputs, tokenizer, out, f"{flags} --workers 1")) == 2
    said = capsys.readouterr().err.split("\n")
    (line,) = [line for line in said if line.startswith("prepare.py: error: ")]
    assert not Path(out).exists() and line == said[-2]
    return line


def lines(*records) -> str:
    """Return records as JSON Lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


def conversation(*turns) -> dict:
    """Return a conversation. A turn is (role, content)."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# ---------------------------------------------------------------------------- text


def test_prepare_the_example_of_its_docstring(tmp_path):
    """prepare.py writes the files that the example in its docstring shows.

    Catches a docstring that is not true, and a sidecar that tells train.py something else.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    text, chat, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "new" / "a.bin"
    text.write_text(lines({"text": "hi"}, {"text": "oh you"}))
    assert prepared(text, tokenizer, out) == [1, 7, 2, 3, 7]
    sidecar = {"token_bytes": 2, "document_token": 7, "vocab": 12}
    assert json.loads(Path(f"{out}.json").read_text()) == sidecar
    assert sorted(path.name for path in out.parent.iterdir()) == ["a.bin", "a.bin.json"]

    chat.write_text(lines(conversation(("user", "hi"), ("assistant", "oh you"))))
    out = tmp_path / "chats.bin"
    assert prepared(chat, tokenizer, out, "--chat") == [8, 1, 10, 9, 2, 3, 10, 7]
    assert [*(tmp_path / "chats.mask").read_bytes()] == [0, 0, 0, 0, 1, 1, 1, 0]
    assert json.loads(Path(f"{out}.json").read_text()) == sidecar | {"mask": "chats.mask"}


def test_prepare_reads_each_format(tmp_path):
    """Each format gives the ids that transformers gives, with one worker and with three.

    Names have spaces, lines end as on Windows, and a file begins with a byte order mark. Catches
    text that a format loses or changes, and an order that depends on the number of workers.
    """
    from transformers import PreTrainedTokenizerFast

    texts = [f"line {i}\r\n\tü 世界 {'grass ' * (i % 7)}\n\n" for i in range(800)]
    texts[5] = ""
    make_tokenizer(tmp_path / "the tokenizer", "".join(texts[:50]))
    theirs = PreTrainedTokenizerFast(tokenizer_file=f"{tmp_path}/the tokenizer/tokenizer.json")
    end = theirs.convert_tokens_to_ids("<end>")
    expected = []
    for text in texts:
        expected += theirs.encode(text, add_special_tokens=False) + [end]

    folder = tmp_path / "a folder"
    folder.mkdir()
    content = lines(*({"id": i, "text": text} for i, text in enumerate(texts))).encode()
    (folder / "a b.jsonl").write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n\n"))
    (folder / "c.json.gz").write_bytes(gzip.compress(content[:999]) + gzip.compress(content[999:]))
    (folder / "d.ndjson.bz2").write_bytes(bz2.compress(content[:99]) + bz2.compress(content[99:]))
    streams = lzma.compress(content[:999]), lzma.compress(content[999:])
    (folder / "e.txt.xz").write_bytes((b"\0" * 8).join(streams))  # zeros may follow a stream
    (folder / "f.jsonl").write_bytes(gzip.compress(content))  # content decides
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    (folder / "g.csv").write_text("".join(f"{i},{t}\r\n" for i, t in enumerate(["text", *quoted])))
    tabs = "".join(f"{t}\t{i}\n" for i, t in enumerate(["text", *quoted]))
    (folder / "h.tsv.gz").write_bytes(gzip.compress(tabs.encode()))
    for i, text in enumerate(texts[:200]):
        (folder / f"text {i:04}").write_bytes(text.encode())

    out = tmp_path / "three workers.bin"
    got = prepared(folder, tmp_path / "the tokenizer", out, "--workers 3")
    short = expected[: [i for i, token in enumerate(expected) if token == end][199] + 1]
    for _ in range(7):
        assert got[: len(expected)] == expected
        del got[: len(expected)]
    assert got == short
    one = tmp_path / "one.bin"
    prepared(folder, tmp_path / "the tokenizer", one)
    assert out.read_bytes() == one.read_bytes()
    assert Path(f"{out}.json").read_text() == Path(f"{one}.json").read_text()


@parametrize("kind", ["parquet", "arrow", "stream", "dataset", "zst"])
def test_prepare_reads_tables(kind, tmp_path):
    """Parquet, Arrow, saved datasets and zstd of several frames give the ids that JSON Lines give.

    It needs the libraries of requirements-data.txt. Catches rows that are lost or doubled.
    """
    library = {"dataset": "datasets", "zst": "zstandard"}.get(kind, "pyarrow")
    pytest.importorskip(library)
    records = [{"id": i, "text": f"hi {'oh ' * (i % 5)}you"} for i in range(1000)]
    records[3]["text"] = ""
    tokenizer = word_tokenizer(tmp_path / "tok")
    (tmp_path / "a.jsonl").write_text(lines(*records))
    path = tmp_path / f"b.{kind}"
    if kind == "zst":
        import zstandard

        path = tmp_path / "b.jsonl.zst"
        compress = zstandard.ZstdCompressor().compress
        content = lines(*records).encode()
        path.write_bytes(compress(content[:777]) + compress(content[777:]))
    else:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(records)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=70)
        elif kind == "dataset":
            import datasets

            memory = datasets.table.InMemoryTable(table)
            datasets.Dataset(memory, fingerprint="any").save_to_disk(path)
        else:
            path = path.with_suffix(".arrow")
            new = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
            with new(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=90)
    expected = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin")
    assert prepared(path, tokenizer, tmp_path / "b.bin") == expected

    # a resumed command begins in the middle: 123 of the 1000 rows are done
    if kind != "zst":
        source = prepare.identify(str(path))
        chunks = prepare.READERS[source.kind](source, prepare.Cursor(0, 0, 123), ["text"])
        rest = b"".join(chunk.content for chunk in chunks).splitlines()
        assert len(rest) == 877 and json.loads(rest[0])["text"] == records[123]["text"]


def test_prepare_long_documents(tmp_path, monkeypatch):
    """A document up to the limit has the ids of the whole text. A longer one is cut, and loses
    nothing at the cuts.

    The limit is small here. A text without spaces is cut between characters. A file and a line of
    JSON with the same text have the same ids. Catches a character that a cut breaks, and an end
    token inside a document.
    """
    from tokenizers import Tokenizer

    make_tokenizer(tmp_path / "tok", "the grass is green\n" * 99)
    tokenizer = Tokenizer.from_file(f"{tmp_path}/tok/tokenizer.json")
    tokenizer.no_truncation()
    monkeypatch.setattr(prepare, "BATCH_BYTES", 300)
    texts = ["the grass\r\n  is ü green\n\n" * 40, "世" * 700, "grass is " * 200, "", "a\n" * 500]
    for limit in (100, 2**20):
        monkeypatch.setattr(prepare, "DOCUMENT_BYTES", limit)
        for i, text in enumerate(texts):
            (tmp_path / f"{limit}-{i}.txt").write_bytes(text.encode())
        (tmp_path / f"{limit}.jsonl").write_text(lines(*({"text": text} for text in texts)))
        inputs = [tmp_path / f"{limit}-{i}.txt" for i in range(len(texts))]
        ids = prepared(inputs, tmp_path / "tok", tmp_path / f"{limit}.bin")
        assert ids == prepared(
            tmp_path / f"{limit}.jsonl", tmp_path / "tok", tmp_path / f"{limit}j.bin"
        )
        for text in texts:
            at = ids.index(0)  # the end token
            assert tokenizer.decode(ids[:at]) == text
            if limit > 100 or "世" not in text:  # cuts are where tokens begin
                assert ids[:at] == tokenizer.encode(text, add_special_tokens=False).ids
            del ids[: at + 1]
        assert not ids


@slow
def test_prepare_millions_of_small_documents(tmp_path, monkeypatch):
    """Two million documents of one token take less than a minute of processor time.

    Catches work that is done per document although it could be done per batch.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text":"hi"}\n' * 2_000_000)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    began = time.process_time()
    assert prepare.main(command(path, tokenizer, tmp_path / "a.bin", "--workers 1")) == 0
    assert time.process_time() - began < 60
    ids = np.fromfile(tmp_path / "a.bin", "<u2").reshape(-1, 2)
    assert len(ids) == 2_000_000 and (ids == [HI, END]).all()


@parametrize(
    "name, content, message",
    [
        ("a.txt", b"hi\n\xff\xfe", r"a.txt is not UTF-8 text: byte 0xff at position 3, .*UTF-8"),
        ("a.jsonl", b'{"text": "hi"}\n{"text": "\xe4"}\n', "a.jsonl is not UTF-8.*0xe4 at.* 25,"),
        ("a.csv", b"text\n" + b"hi\n" * 9999 + b"\xff\n", "a.csv is not UTF-8.*position 30002,"),
        ("a.jsonl", b'{"text": "hi"}\n\n{"text": "hi"\n', "a.jsonl line 3: broken JSON: Expecting"),
        (
            "a.jsonl",
            b'{"text": "hi"}\n{"body": ""}',
            "line 2: it has no field text. .*are body: na",
        ),
        ("a.jsonl", b'{"text": null}', "a.jsonl line 1: its field text is not text, but null"),
        ("a.jsonl", b'{"text": ["hi"]}', r"line 1: its field text is not text, but \[.hi.\]"),
        ("a.jsonl", b'"hi"', "line 1: a JSON object is expected, and this is a str"),
        ("a.jsonl", b'{"text": "hi \\ud83d"}', r"line 1: character 3 is \\ud83d, the half of a"),
        ("a.jsonl", b"[" * 200_000, "a.jsonl is one JSON array.*jq -c '.\\[\\]' "),
        ("a.jsonl", b'{"text":' + b"[" * 3000, "a.jsonl line 1: broken JSON: maximum recursion"),
        (
            "a.json",
            b'{\n "text": "hi"\n}',
            "a.json is one JSON document of several lines.*jq -c . ",
        ),
        ("a.json", b'[{"text": "hi"}]', "a.json is one JSON array.*jq -c '.\\[\\]' "),
        ("a.jsonl", b'{"text": "' + b"a" * 9000 + b'"}', "line 1: the line is longer than 0 MiB"),
        ("a.jsonl", b"\n \n", "the inputs hold no document"),
        ("a.jsonl", b"", "the inputs hold no document"),
        ("a.csv", b"", "the inputs hold no document"),
        ("a.tsv", b"\xef\xbb\xbf\r\n\n", "the inputs hold no document"),
        ("a.csv", b"id,body\n1,hi\n", "has no column text. Its columns are id, body: .*--field"),
        ("a.csv", b"id,text\n1,hi\n2\n", "a.csv, .*before line 3: it has 1 columns, .*line has 2"),
        ("a.csv", b'text\n"hi', "a.csv line .: unexpected end of data"),
        ("a.gz", b"hi", "a.gz: its name ends in .gz, but its content is not compressed that way"),
        ("a.gz", b"", "a.gz: its name ends in .gz, but"),
        ("a.gz", gzip.compress(b"hi " * 99_999)[:-9], "damaged or cut short.*end-of-stream"),
        ("a.jsonl.xz", lzma.compress(b'{"text": ""}\n' * 9999)[:-40], "xz is damaged or cut short"),
        ("a.jsonl.bz2", bz2.compress(b'{"text": ""}\n' * 9999)[:-9], "bz2 is damaged or cut short"),
        # a stream behind the first one is damaged at its first bytes
        ("a.bz2", bz2.compress(b"hi") + b"BZx" + bz2.compress(b"oh")[3:], "bz2 is damaged or"),
        ("a.xz", lzma.compress(b"hi") + b"\xfd8" + lzma.compress(b"oh")[2:], "xz is damaged or"),
        ("a.txt", "hi".encode("utf-16"), "a.txt is not UTF-8 text: byte 0x00 at .*iconv"),
        ("a.npy", b"\x93NUMPY\x01", "a.npy is a NumPy array, which cannot be read"),
        ("a.txt", b"PK\x03\x04", "a.txt is a zip archive"),
        ("a.bin", b"\x01\x00", "a .bin file holds token ids already, and is read by train.py"),
        ("a.parquet", b"hi", "its name ends in .parquet, but its content is not Parquet"),
        ("a", b"PAR1" + b"\0" * 99 + b"PAR1", "a(: reading it .parquet. needs .*pip|: the rows a)"),
        ("a.arrow", b"hi", "a.arrow(: reading it .arrow. needs .*pip install -r|: the rows after)"),
        ("a.zst", b"\x28\xb5\x2f\xfd\x04", "a.zst(: reading zstd needs .*pip install|.*cut short)"),
    ],
)
def test_prepare_refuses_what_it_cannot_read(name, content, message, tmp_path, capsys, monkeypatch):
    """A file that cannot be read is refused by its name and line, and nothing is written.

    Catches bytes of another format that are taken for text, and text that is left out silently.
    """
    monkeypatch.setattr(prepare, "LINE_BYTES", 5000)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)
    tokenizer = word_tokenizer(tmp_path / "tok")
    (tmp_path / name).write_bytes(content)
    said = refusal(tmp_path / name, tokenizer, tmp_path / "o" / "x.bin", capsys)
    assert re.search(message, said), said
    assert not (tmp_path / "o").exists() or not [*(tmp_path / "o").iterdir()]


def test_prepare_names_the_first_fault_for_any_number_of_workers(tmp_path, capsys, monkeypatch):
    """With several workers, the error names the fault that comes first in the inputs.

    Catches an error that depends on which worker is faster.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    monkeypatch.setattr(prepare, "BATCH_BYTES", 10_000)
    (tmp_path / "a.jsonl").write_text('{"text": "hi"}\n' * 9000 + "{\n")
    (tmp_path / "b.csv").write_text("text\nhi,hi\n")
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.csv"]
    assert prepare.main(command(inputs, tokenizer, tmp_path / "x.bin", "--workers 2")) == 2
    assert "a.jsonl line 9001: broken JSON" in capsys.readouterr().err


def test_prepare_empty_files_beside_others(tmp_path):
    """An empty table and empty JSON Lines have no documents. An empty plain text is one document.

    Catches a folder that is refused because of an empty file.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    folder = tmp_path / "d"
    folder.mkdir()
    for name, content in (("a.csv", ""), ("b.jsonl", ""), ("c.txt", ""), ("d.csv", "text\nhi\n")):
        (folder / name).write_text(content)
    assert prepared(folder, tokenizer, tmp_path / "a.bin") == [END, HI, END]


def test_prepare_byte_order_marks(tmp_path, monkeypatch):
    """A byte order mark at the beginning of a file is no text, in each format. Later in a text,
    also where a long text is cut, U+FEFF is a character like any other.

    Catches a first token that only some files have, and a character that is lost.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    contents = {
        "a.txt": "hi",
        "b.txt": "",
        "c.jsonl": '{"text": "hi"}\n',
        "d.csv": "text\nhi\n",
        "e.txt": "\ufeff hi",  # two marks: the second one is text
    }
    (tmp_path / "d").mkdir()
    for name, content in contents.items():
        (tmp_path / "d" / name).write_text("\ufeff" + content, encoding="utf-8")
    ids = prepared(tmp_path / "d", tokenizer, tmp_path / "a.bin")
    assert ids == [HI, END, END, HI, END, HI, END, UNK, HI, END]

    monkeypatch.setattr(prepare, "DOCUMENT_BYTES", 8)
    (tmp_path / "long.txt").write_text("\ufeff" + "hi oh \ufeff you " * 9, encoding="utf-8")
    ids = prepared(tmp_path / "long.txt", tokenizer, tmp_path / "b.bin")
    assert ids.count(UNK) == 9 and ids.count(YOU) == 9 and ids[0] == HI


def test_prepare_folders(tmp_path, capsys):
    """In a folder, links to folders are followed once. Hidden files, and the files that the command
    itself writes, are left out.

    A FIFO and a link that leads nowhere are refused. Catches a loop, a file that is read twice,
    and a command that reads its own output.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    docs, far = tmp_path / "docs", tmp_path / "far away"
    for folder in (docs / "sub", docs / ".git", far):
        folder.mkdir(parents=True)
    for path in (docs / "a.txt", docs / ".hidden", docs / ".git" / "x", docs / "sub" / "c"):
        path.write_text("hi")
    (far / "d").write_text("oh you")
    (docs / "b").symlink_to(far)
    (docs / "sub" / "again").symlink_to(far)
    (docs / "sub" / "loop").symlink_to(docs)
    (docs / "link").symlink_to(docs / "a.txt")
    out = docs / "sub" / "train.bin"
    expected = [HI, END, OH, YOU, END, HI, END]
    assert prepared(docs, tokenizer, out) == expected
    out.unlink()
    assert prepared(docs, tokenizer, out) == expected  # its .json was there
    assert prepared([docs / "a.txt"] * 2, tokenizer, tmp_path / "2.bin") == 2 * [HI, END]

    other = tmp_path / "x.bin"
    assert "train.bin: a .bin file holds token ids" in refusal(docs, tokenizer, other, capsys)
    os.mkfifo(far / "pipe")
    assert "pipe is neither a regular file nor" in refusal(far, tokenizer, other, capsys)
    (far / "pipe").unlink()
    (far / "self").symlink_to(far / "self")
    assert "self is neither a regular file nor" in refusal(far, tokenizer, other, capsys)
    assert "no such file" in refusal(tmp_path / "none", tokenizer, other, capsys)
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    assert "holds no file" in refusal(tmp_path / "empty", tokenizer, other, capsys)


# ---------------------------------------------------------------------------- tokenizers


@parametrize(
    "files, flags, expected",
    [
        ({"tokenizer_config.json": {"eos_token": "<|/|>"}}, "", TURN),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|/|>"}}}, "", TURN),
        (
            {
                "tokenizer_config.json": {"eos_token": None},
                "special_tokens_map.json": {"eos_token": {"content": "<|/|>"}},
            },
            "",
            TURN,
        ),
        ({"special_tokens_map.json": {"eos_token": "<|/|>"}}, "", TURN),
        ({"generation_config.json": {"eos_token_id": [TURN, END]}}, "", TURN),
        ({"config.json": {"eos_token_id": TURN}}, "", TURN),
        ({}, "--document-token 10", TURN),
        ({"tokenizer_config.json": {"eos_token": "<|/|>"}}, "--document-token 7", END),
        ({}, "--document-token -1", -1),
        ({}, "", "it has no end token: .*--document-token ID"),
        ({"tokenizer_config.json": {"eos_token": "of"}}, "", "eos_token of is not in its voc"),
        ({"config.json": {"eos_token_id": 99}}, "", "eos_token_id 99 is not in its vocabulary"),
        ({"config.json": []}, "", "config.json cannot be read: it is not a JSON object"),
        ({}, "--document-token 12", "--document-token 12: .* has 12 tokens, so its ids end at 11"),
        ({}, "--document-token -2", "--document-token -2: choose an id, or -1"),
    ],
)
def test_prepare_end_tokens(files, flags, expected, tmp_path, capsys):
    """The end token is the one that transformers would use, and a tokenizer without one is refused.

    Catches documents that end with a token that the run does not know.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    (tokenizer / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tokenizer / name).write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("hi")
    args = tmp_path / "a.txt", tokenizer, tmp_path / "a.bin"
    if isinstance(expected, str):
        assert re.search(expected, refusal(*args, capsys, flags))
    else:
        assert prepared(*args, flags) == [HI] + [expected] * (expected >= 0)
        sidecar = json.loads((tmp_path / "a.bin.json").read_text())
        assert sidecar["document_token"] == expected


def test_prepare_first_tokens(tmp_path, capsys, monkeypatch):
    """Only with --bos, the tokenizer's own first token stands before each document.

    Catches a token that is doubled or missing, and a long document whose parts each have one.
    """
    (tmp_path / "a.jsonl").write_text(lines({"text": "hi"}, {"text": ""}))
    (tmp_path / "long.txt").write_text(50 * "oh ")
    for name, adds, config in (("own", "<s>", {}), ("named", "", {"bos_token": "<s>"})):
        tokenizer = word_tokenizer(tmp_path / name, adds=adds, **config)
        ids = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / f"{name}.bin", "--bos")
        assert ids == [BOS, HI, END, BOS, END]
        ids = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / f"{name}-without.bin")
        assert ids == [HI, END, END]
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "DOCUMENT_BYTES", 30)  # the document is cut into parts
            ids = prepared(tmp_path / "long.txt", tokenizer, tmp_path / f"{name}-long.bin", "--bos")
        assert ids == [BOS, *(50 * [OH]), END]
    tokenizer = word_tokenizer(tmp_path / "neither")
    said = refusal(tmp_path / "a.jsonl", tokenizer, tmp_path / "x.bin", capsys, "--bos")
    assert "--bos: the tokenizer" in said and "has no bos_token" in said


def test_prepare_text_that_spells_special_tokens(tmp_path, capsys):
    """Text that spells a special token is text, unless --special-tokens says otherwise.

    Catches a document that somebody's text cuts in two.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    text = tmp_path / "a.txt"
    text.write_text("hi <|end|> you<|/|>you")
    assert prepared(text, tokenizer, tmp_path / "a.bin") == [HI, UNK, UNK, END]
    ids = prepared(text, tokenizer, tmp_path / "b.bin", "--special-tokens")
    assert ids == [HI, END, YOU, TURN, YOU, END]

    # here the end token <s> is also a word of the tokenizer, so plain text can spell it
    tokenizer = word_tokenizer(tmp_path / "other", eos_token="<s>")
    text.write_text("hi <s> you")
    said = refusal(text, tokenizer, tmp_path / "c.bin", capsys)
    assert "begins with 'hi <s> you' spells the document token 6, and this tokenizer" in said
    ids = prepared(text, tokenizer, tmp_path / "c.bin", "--special-tokens")
    assert ids == [HI, BOS, YOU, BOS]


def test_prepare_messages_with_a_special_token_of_one_character(tmp_path, capsys):
    """A message that has a special token of one character is refused, unless --special-tokens is
    given: a token of one character cannot be broken up.

    Catches a special token that a user's message makes.
    """
    tokenizer = word_tokenizer(tmp_path / "tok", TEMPLATE.replace("<|/|>", "§"))
    file = tokenizer / "tokenizer.json"
    file.write_text(file.read_text().replace("<|/|>", "§"))
    chat = tmp_path / "a.jsonl"
    chat.write_text(lines(conversation(("user", "hi § you"), ("assistant", "you"))))
    said = refusal(chat, tokenizer, tmp_path / "a.bin", capsys, "--chat")
    assert "the character '§', which is a special token" in said


def test_prepare_refuses_rows_that_a_quote_merges(tmp_path, capsys):
    """A TSV file without quotes is refused if a text that begins with a quote swallows rows. Texts
    of several lines in quotes are read as they are.

    Catches documents that are joined without notice.
    """
    tokenizer, table = word_tokenizer(tmp_path / "tok"), tmp_path / "a.tsv"
    table.write_text('id\ttext\n1\t"hi\n2\toh\n3\tyou"\n4\tbe\n')
    said = refusal(table, tokenizer, tmp_path / "a.bin", capsys)
    assert r"the text that begins with a quote and 'hi\n2\toh\n3\tyou' looks like" in said
    table.write_text('text\tid\tmore\n"hi\noh"\t1\t\nyou\t2\t"hi\thi\nbe\tbe"\n')
    ids = prepared(table, tokenizer, tmp_path / "a.bin", "--field text")
    assert ids == [HI, OH, END, YOU, END]


def test_prepare_four_bytes(tmp_path):
    """Ids of 2^16 and more have four bytes.

    Catches ids that are cut to two bytes.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel({**words, "the end": 70_000}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "the end"}')
    (tmp_path / "a.txt").write_text("w69999 w5\nw65536")
    ids = prepared(tmp_path / "a.txt", tmp_path, tmp_path / "a.bin")
    assert ids == [69_999, 5, 65_536, 70_000]
    assert json.loads((tmp_path / "a.bin.json").read_text())["vocab"] == 70_001


# ---------------------------------------------------------------------------- conversations


@parametrize(
    "record, expected, mask",
    [
        (  # a system message and two turns
            conversation(
                ("system", "be good"),
                ("user", "hi"),
                ("assistant", "oh you"),
                ("user", "hi hi"),
                ("assistant", "hi"),
            ),
            [SYSTEM, BE, GOOD, TURN, USER, HI, TURN, BOT, OH, YOU, TURN]
            + [USER, HI, HI, TURN, BOT, HI, TURN, END],
            "00000000 111 00000 11 0",
        ),
        (  # an answer that is empty, and one that follows an answer
            conversation(("user", "hi"), ("assistant", ""), ("assistant", "oh")),
            [USER, HI, TURN, BOT, TURN, BOT, OH, TURN, END],
            "0000 1 0 11 0",
        ),
        (  # the assistant begins, and the user has the last word
            conversation(("assistant", "hi"), ("user", "oh")),
            [BOT, HI, TURN, USER, OH, TURN, END],
            "0 11 0000",
        ),
        (  # ShareGPT's names
            {
                "conversations": [
                    {"from": "system", "value": "be"},
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "oh"},
                ]
            },
            [SYSTEM, BE, TURN, USER, HI, TURN, BOT, OH, TURN, END],
            "0000000 11 0",
        ),
        (  # messages that spell special tokens
            conversation(("user", "hi<|/|>you <|end|>"), ("assistant", "oh <|user|>")),
            [USER, UNK, UNK, TURN, BOT, OH, UNK, TURN, END],
            "00000 111 0",
        ),
    ],
)
def test_prepare_masks_of_conversations(record, expected, mask, tmp_path):
    """Only the assistant's text and its ends of turns count as labels. The ids are those of
    transformers.

    Catches a label in the user's text, and an assistant that never learns to stop.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = word_tokenizer(tmp_path / "tok")
    (tmp_path / "a.jsonl").write_text(lines(record, record))
    ids = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin", "--chat")
    assert ids == 2 * expected
    assert [*(tmp_path / "a.mask").read_bytes()] == 2 * [int(bit) for bit in mask if bit != " "]
    if "messages" in record and UNK not in expected:
        theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer)
        chat = theirs.apply_chat_template(record["messages"], return_dict=False)
        assert [*chat, END] == expected


def test_prepare_special_tokens_in_parts_of_a_message_and_in_tools(tmp_path):
    """A user cannot spell a special token by parts of a message that a template joins, nor by the
    name of a field of a tool.

    Catches a user's text that begins a turn of its own.
    """
    template = TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
    )
    tokenizer = word_tokenizer(tmp_path / "tok", "{{ tools[0].keys() | list | join }} " + template)
    parts = [{"text": "hi <|us"}, {"text": "er|> you"}]
    record = conversation(("user", parts), ("assistant", "oh")) | {"tools": [{"<|end|>": "x"}]}
    (tmp_path / "a.jsonl").write_text(lines(record))
    ids = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin", "--chat")
    assert ids == [UNK, USER, HI, UNK, YOU, TURN, BOT, OH, TURN, END]


def test_prepare_masks_of_other_templates(tmp_path):
    """If a template marks the assistant's text by {% generation %}, only this text counts. A
    template of the older kind, which has no generation prompt and ends with white space, works too.

    Catches a mark that is ignored, and white space that counts although it follows the end of a
    turn.
    """
    record = conversation(("user", "hi"), ("assistant", "oh you"), ("user", "be"))
    (tmp_path / "a.jsonl").write_text(lines(record))
    marked = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "<|/|>{% endfor %}"
    )
    old = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|> {{ m.content }} "
        "<|system|>{% else %} {{ m.content }}<|/|> {% endif %}{% endfor %}"
    )
    for name, template, expected, mask in (
        (
            "marked",
            marked,
            [USER, HI, TURN, BOT, OH, YOU, TURN, USER, BE, TURN, END],
            "00001100000",
        ),
        ("old", old, [BOS, USER, HI, SYSTEM, OH, YOU, TURN, USER, BE, SYSTEM, END], "00001110000"),
    ):
        tokenizer = word_tokenizer(tmp_path / name, template, bos_token="<s>")
        out = tmp_path / f"{name}.bin"
        assert prepared(tmp_path / "a.jsonl", tokenizer, out, "--chat") == expected
        assert [*out.with_suffix(".mask").read_bytes()] == [*map(int, mask)]
        # the template may also stand in a file, or among several
        config = json.loads((tokenizer / "tokenizer_config.json").read_text())
        (tokenizer / "chat_template.jinja").write_text(config.pop("chat_template"))
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
        assert prepared(tmp_path / "a.jsonl", tokenizer, f"{out}2.bin", "--chat") == expected
        (tokenizer / "chat_template.jinja").unlink()
        config["chat_template"] = [{"name": "tool", "template": ""}]
        config["chat_template"].append({"name": "default", "template": template})
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
        assert prepared(tmp_path / "a.jsonl", tokenizer, f"{out}3.bin", "--chat") == expected


def test_prepare_masks_tokens_of_white_space(tmp_path):
    """White space before the assistant's text does not count. If a character has several tokens,
    all of them count, or none.

    The tokenizer's post-processor leaves white space out of its offsets, as those of GPT-2 and
    Llama 3 do. Catches a mask that is shifted by a token.
    """
    from tokenizers import Tokenizer, processors

    template = TEMPLATE.replace("|>", "|>\n\n").replace("<|/|>\n\n", "<|/|>")
    make_tokenizer(tmp_path / "tok", "oh you\n\n" * 99)
    tokenizer = Tokenizer.from_file(f"{tmp_path}/tok/tokenizer.json")
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|/|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(f"{tmp_path}/tok/tokenizer.json")
    config = {"eos_token": "<end>", "chat_template": template}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    record = conversation(("user", "you"), ("assistant", " 世 \n"), ("user", "\n"))
    (tmp_path / "a.jsonl").write_text(lines(record))
    ids = prepared(tmp_path / "a.jsonl", tmp_path / "tok", tmp_path / "a.bin", "--chat")
    mask = [*(tmp_path / "a.mask").read_bytes()]
    answer = [token for token, counts in zip(ids, mask) if counts]
    assert tokenizer.decode(answer, skip_special_tokens=False) == " 世 \n<|/|>"


# name -> (a published model's chat template, shortened; the labels of the answers " oh \n" and
# "you") Phi 3's special tokens include the white space after them.
PUBLISHED = {
    "Qwen2.5": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nbe good<|im_end|>\\n' }}"
        "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + "
        "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\\n' }}{% endif %}",
        [" oh \n<|im_end|>", "you<|im_end|>"],
    ),
    "Llama 3": (
        "{% for m in messages %}{% set text = '<|start|>' + m.role + '<|stop|>\\n\\n' + "
        "m.content | trim + '<|eot|>' %}{% if loop.first %}{% set text = bos_token + text %}"
        "{% endif %}{{ text }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}",
        ["oh<|eot|>", "you<|eot|>"],
    ),
    "Mistral, Llama 2": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) "
        "%}{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + ' </s>' }}"
        "{% endif %}{% endfor %}",
        [" oh </s>", " you </s>"],
    ),
    "Gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% set role = 'model' "
        "%}{% else %}{% set role = m.role %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + "
        "m.content | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<start_of_turn>model\\n' }}{% endif %}",
        ["oh<end_of_turn>", "you<end_of_turn>"],
    ),
    "Phi 3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|stop|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        [" oh \n<|stop|>", "you<|stop|>"],
    ),
    "no special tokens": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        [" oh \n\n\n", " you\n\n"],  # the space before `you` is part of its token
    ),
}


@parametrize("name", PUBLISHED)
def test_prepare_masks_of_published_templates(name, tmp_path):
    """For each kind of chat template, the ids are those of transformers, and the labels are the
    answers with their ends of turns. This holds also if a message spells a special token.

    Catches a mask that is right for one family of models only.
    """
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    template, answers = PUBLISHED[name]
    special = "<|im_start|> <|im_end|> <|start|> <|stop|> <|eot|> </s> <s> <start_of_turn> "
    special = f"{special}<end_of_turn> <|user|> <|assistant|>".split()
    make_tokenizer(tmp_path / "tok", "oh you hi be good\n\n" * 99)
    tokenizer = Tokenizer.from_file(f"{tmp_path}/tok/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.add_special_tokens([AddedToken(s, rstrip=name == "Phi 3") for s in special])
    tokenizer.save(f"{tmp_path}/tok/tokenizer.json")
    config = {"eos_token": "<end>", "bos_token": "<s>", "chat_template": template}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    turns = [("user", "hi"), ("assistant", " oh \n"), ("user", "be"), ("assistant", "you")]
    spelled = [("user", "hi <|eot|></s>"), *turns[1:]]
    (tmp_path / "a.jsonl").write_text(lines(conversation(*turns), conversation(*spelled)))
    ids = prepared(tmp_path / "a.jsonl", tmp_path / "tok", tmp_path / "a.bin", "--chat")
    mask = [*(tmp_path / "a.mask").read_bytes()]

    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tok")
    chat = theirs.apply_chat_template(conversation(*turns)["messages"], return_dict=False)
    first = len(chat) + 1
    assert ids[:first] == [*chat, 0]
    for part in (slice(0, first), slice(first, None)):
        found = np.flatnonzero(mask[part])
        runs = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
        said = [theirs.decode([ids[part][i] for i in run]) for run in runs]
        expected = [answer.lstrip() for answer in answers] if name == "Phi 3" else answers
        assert said == expected
    spelling = theirs.decode(ids[first:])
    assert "hi <|eot|></s>" in spelling
    assert ids[first:].count(tokenizer.token_to_id("<|eot|>")) == 4 * (name == "Llama 3")
    assert ids[first:].count(tokenizer.token_to_id("</s>")) == 2 * (name == "Mistral, Llama 2")


@parametrize(
    "template, record, message",
    [
        (
            TEMPLATE + "{% if messages[0].role != 'user' %}{{ raise_exception('no such role') }}"
            "{% endif %}",
            conversation(("system", "be"), ("assistant", "hi")),
            "line 2: the chat template refuses the conversation: TemplateError: no such role",
        ),
        ("{% for %}", {}, "the chat template refuses the conversation: TemplateSyntaxError"),
        ("{{ messages.append(1) }}", {}, "the chat template refuses .*: SecurityError"),
        ("{{ ''.__class__.__mro__ }}", {}, "the chat template refuses .*: SecurityError"),
        (
            "{% for m in messages %}{{ m.role }}{% if loop.last %}{{ m.thoughts }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "hi", "thoughts": "oh"},
                    {"role": "user", "content": "hi"},
                ]
            },
            "the chat template changes the text of message 2 .*earlier thinking.*{% generation %}",
        ),
        (
            TEMPLATE.replace("<|/|>", "<|end|>"),
            {},
            r"document token 7 \(<\|end\|>\) also occurs within.*--document-token ID: 10 "
            r"\(<\|/\|>\)",
        ),
        ("", {"text": "hi"}, "it has no field messages .*Its fields are text"),
        ("", {"messages": []}, "it has no field messages"),
        ("", {"messages": ["hi"]}, "messages is not a list of"),
        ("", {"messages": [{"role": "user"}]}, "message 1 has no content"),
        ("", {"conversations": [{"from": "alien", "value": ""}]}, "message 1 has .*role: .alien"),
        ("", {"conversations": [{"from": ["user"], "value": ""}]}, "message 1 has .*role: ..user"),
        ("", {"messages": json.loads("[" * 500 + "]" * 500)}, "line 2: .* recursion depth"),
        ("", conversation(("user", None)), "the content of message 1 is null"),
        ("", conversation(("user", "hi")), "no message has the role assistant"),
        ("", conversation(("user", "hi"), ("assistant", "\ud83d")), r"is \\ud83d, the half of"),
        ("hi", {}, "no token counts as a label: the chat template marks nothing"),
    ],
)
def test_prepare_refuses_conversations(template, record, message, tmp_path, capsys):
    """A conversation that the template refuses, or whose answers cannot be found, is refused.

    Catches a mask that is wrong without an error, and a template that runs code.
    """
    good = conversation(("user", "hi"), ("assistant", "oh"))
    tokenizer = word_tokenizer(tmp_path / "tok", template, pad_token="<|/|>")
    (tmp_path / "a.jsonl").write_text(lines(good, record or good))
    said = refusal(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin", capsys, "--chat")
    assert re.search(message, said), said


def test_prepare_null_entries_of_messages(tmp_path):
    """An entry that is null counts as absent, because tables fill in null for absent entries.

    Catches a template that takes each message for a call of a tool.
    """
    template = TEMPLATE.replace("{{ m.content }}", "{{ 'be' if 'calls' in m else m.content }}")
    tokenizer = word_tokenizer(tmp_path / "tok", template)
    record = conversation(("user", "hi"), ("assistant", "oh"))
    record["tools"] = record["conversations"] = record["messages"][0]["calls"] = None
    record["messages"][1]["calls"] = [{"name": "good", "id": None}]
    (tmp_path / "a.jsonl").write_text(lines(record))
    ids = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin", "--chat")
    assert ids == [USER, HI, TURN, BOT, BE, TURN, END]


def test_prepare_nulls_in_what_a_tool_is_called_with():
    """In JSON Lines, a null in a tool's arguments or in its parameters is a value, and stays. In a
    table it only says that another row has this key.

    Catches calls of tools that lack arguments which the data have.
    """
    call = {"id": None, "function": {"name": "w", "arguments": {"city": "Rome", "unit": None}}}
    schema = {"properties": {"unit": {"default": None}}}
    record = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"function": {"name": "w", "parameters": schema, "strict": None}}],
    }
    for is_table, arguments, unit in (
        (False, {"city": "Rome", "unit": None}, {"default": None}),
        (True, {"city": "Rome"}, {}),
    ):
        call = {"function": {"name": "w", "arguments": arguments}}
        parameters = {"properties": {"unit": unit}}
        assert prepare.without_nulls(record, is_table) == {
            "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
            "tools": [{"function": {"name": "w", "parameters": parameters}}],
        }


@parametrize("flags", ["--chat", "--chat --special-tokens"])
def test_prepare_empty_tools(flags, tmp_path):
    """An empty list of tools counts as absent, because tables fill in empty lists. With
    --special-tokens it does, too.

    Catches a template that writes a message about tools although there are none.
    """
    template = "{% if tools is not none %}good {% endif %}" + TEMPLATE
    tokenizer = word_tokenizer(tmp_path / "tok", template)
    record = conversation(("user", "hi"), ("assistant", "oh")) | {"tools": []}
    (tmp_path / "a.jsonl").write_text(lines(record))
    ids = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin", flags)
    assert ids == [USER, HI, TURN, BOT, OH, TURN, END]


def test_prepare_dates_of_templates(tmp_path):
    """If a template writes the date, all conversations have the same one. On a new day, the command
    ends with an error.

    Catches a resumed command whose conversations have two dates.
    """
    template = TEMPLATE.replace("<|/|>", " {{ strftime_now('%Y-%m-%d') }}<|/|>")
    tokenizer = word_tokenizer(tmp_path / "tok", template)
    (tmp_path / "a.jsonl").write_text(lines(conversation(("user", "hi"), ("assistant", "oh"))))
    ids = prepared(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin", "--chat")
    assert ids == [USER, HI, UNK, TURN, BOT, OH, UNK, TURN, END]
    sources = prepare.find_sources([str(tmp_path / "a.jsonl")], [])
    settings = prepare.make_settings(sources, str(tokenizer), chat=True)
    assert settings.date == time.strftime("%Y-%m-%d")
    with raises(ValueError, match="the chat template writes the date, and a new day has begun"):
        prepare.write(replace(settings, date="1999-12-31"), tmp_path / "b.bin", 1)


def test_prepare_chat_needs_conversations_and_a_template(tmp_path, capsys):
    """--chat refuses plain text, --bos, and a tokenizer without a template.

    Catches a command that writes an empty file, or conversations without their template.
    """
    tokenizer = word_tokenizer(tmp_path / "tok", None)
    (tmp_path / "a.txt").write_text("hi")
    (tmp_path / "a.jsonl").write_text(lines(conversation(("user", "hi"), ("assistant", "oh"))))
    for name, flags, message in (
        ("a.txt", "--chat", "a.txt: --chat reads conversations from JSON Lines"),
        ("a.jsonl", "--chat", "has no chat template: neither chat_template.jinja"),
        ("a.jsonl", "--chat --bos", "--bos: with --chat the chat template writes"),
    ):
        assert message in refusal(tmp_path / name, tokenizer, tmp_path / "x.bin", capsys, flags)


# ---------------------------------------------------------------------------- faults

# A program that runs prepare.py, which notes its progress after each batch here. The program kills
# itself at the nth audit event of Python (sys.addaudithook) that has a certain name and whose path
# matches a regular expression.
KILLED = """
import os, re, signal, sys
sys.path.insert(0, {root!r})
import prepare
prepare.COMMIT_SECONDS, prepare.BATCH_BYTES, left = 0, 3000, {nth}

def hook(name, args):
    global left
    if name == {event!r} and re.search({path!r}, str(args[0])):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
sys.exit(prepare.main({argv!r}))
"""


@parametrize(
    "event, path, nth, goes_on",
    [
        ("open", "progress.json", 1, False),  # no progress is noted yet
        ("open", "progress.json", 12, True),
        ("os.rename", "progress.json", 12, True),  # ids are written, but not noted
        # all ids are written, and only the last renames are missing
        ("os.rename", "partial/mask", 1, False),
        ("open", "new-.*/a.bin.json", 1, False),
        ("os.rename", "partial/ids", 1, False),
    ],
)
def test_prepare_goes_on_after_a_kill(event, path, nth, goes_on, tmp_path, capsys):
    """A command that is killed leaves no file that looks complete. If it is repeated, its files are
    those of a command that nothing has interrupted, bit for bit.

    Catches ids that are lost or doubled. goes_on: whether the repeated command says that it goes on
    in the middle of the texts.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    records = [
        conversation(("user", "hi " * (i % 9)), ("assistant", "oh " * (i % 4))) for i in range(900)
    ]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(*records[:500]).encode()))
    (tmp_path / "b.jsonl").write_text(lines(*records[500:]))
    inputs = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"]
    out = tmp_path / "a.bin"
    argv = command(inputs, tokenizer, out, "--chat --workers 1")
    code = KILLED.format(root=str(ROOT), event=event, path=path, nth=nth, argv=argv)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    assert not out.exists()
    prepared(inputs, tokenizer, out, "--chat")
    said = capsys.readouterr().err
    assert ("going on after" in said) == goes_on
    prepared(inputs, tokenizer, tmp_path / "whole.bin", "--chat")
    assert out.read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert (tmp_path / "a.mask").read_bytes() == (tmp_path / "whole.mask").read_bytes()
    assert not [*tmp_path.glob("*.partial")]


def fill_disk_after(tokens: int, monkeypatch) -> None:
    """Let prepare.py find a full disk when it notes its progress after more than so many tokens."""
    commit = prepare.commit

    def commit_unless_full(settings, partial, progress, files):
        if progress.tokens > tokens:
            fail_disk_full()
        commit(settings, partial, progress, files)

    monkeypatch.setattr(prepare, "commit", commit_unless_full)


@parametrize("fault", ["in a write", "at a commit"])
def test_prepare_goes_on_after_a_full_disk(fault, tmp_path, capsys, monkeypatch):
    """A full disk ends the command with a sentence. The repeated command goes on where it was.

    The disk is full in the middle of a write, for which the system's limit on the size of files
    stands, or when progress is noted. Catches half a batch that is taken for a whole one.
    """
    monkeypatch.setattr(prepare, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 3000)
    tokenizer = word_tokenizer(tmp_path / "tok")
    (tmp_path / "a.txt").write_text("hi oh you " * 3000)
    (tmp_path / "b.jsonl").write_text(lines(*({"text": "oh " * (i % 9)} for i in range(3000))))
    inputs, out = [tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "o" / "a.bin"
    if fault == "in a write":
        _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (25_001, most))
        try:
            said = refusal(inputs, tokenizer, out, capsys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "a.bin cannot be written: File too large. Make space on that disk" in said
    else:
        with monkeypatch.context() as patch:
            fill_disk_after(9500, patch)
            said = refusal(inputs, tokenizer, out, capsys)
        assert "a.bin cannot be written: No space left on device" in said
    assert said.endswith("What is done is kept: start the same command again, and it goes on")
    assert [path.name for path in out.parent.iterdir()] == ["a.bin.partial"]
    ids = prepared(inputs, tokenizer, out)
    assert "going on after" in capsys.readouterr().err
    assert ids == prepared(inputs, tokenizer, tmp_path / "whole.bin")


def test_prepare_goes_on_only_with_its_own_files(tmp_path, capsys, monkeypatch):
    """If OUT.partial was begun with other flags or inputs, or is damaged, the command is refused.
    OUT is never overwritten.

    Catches ids of two tokenizers in one file.
    """
    monkeypatch.setattr(prepare, "COMMIT_SECONDS", 0)
    tokenizer = word_tokenizer(tmp_path / "tok")
    text, out = tmp_path / "a.jsonl", tmp_path / "a.bin"
    text.write_text(lines({"text": "hi", "body": "oh"}))
    args = text, tokenizer, out, capsys
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "finish", lambda *_: fail_disk_full())
        assert "No space left" in refusal(*args)
    partial = tmp_path / "a.bin.partial"
    other = "was begun with other flags, another tokenizer or other inputs.*Remove .*a.bin.partial"
    assert re.search(other, refusal(*args, "--field body"))
    assert re.search(other, refusal(*args, "--special-tokens"))
    assert re.search(other, refusal(tmp_path / "tok" / ".." / "a.jsonl", *args[1:]))
    os.utime(text, (1, 1))
    assert re.search(other, refusal(*args))
    (partial / "progress.json").write_text("{")
    assert "progress.json cannot be read" in refusal(*args)
    (partial / "progress.json").unlink()
    (partial / "ids").unlink()
    (partial / "ids").symlink_to(text)
    assert "ids is a link, through which nothing is written" in refusal(*args)
    assert text.read_text().startswith("{")

    (partial / "ids").unlink()
    assert prepared(*args[:3]) == [HI, END]
    assert prepare.main(command(*args[:3])) == 2
    assert "exists already, and nothing is overwritten" in capsys.readouterr().err
    assert np.fromfile(out, "<u2").tolist() == [HI, END]


@parametrize("flags, name", [("", "a.bin.json"), ("--chat", "a.bin.json"), ("--chat", "a.mask")])
def test_prepare_overwrites_no_file_of_another(flags, name, tmp_path, capsys):
    """A sidecar or a mask that lies beside OUT already is not replaced. Without --chat no mask is
    written, so a mask does not matter.

    Catches a .bin file that was renamed, and whose labels are then chosen by another file's mask.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    record = conversation(("user", "hi"), ("assistant", "oh")) | {"text": "hi"}
    (tmp_path / "a.jsonl").write_text(lines(record))
    args = tmp_path / "a.jsonl", tokenizer, tmp_path / "a.bin"
    (tmp_path / name).write_text("of another file")
    before = sorted(tmp_path.iterdir())
    said = refusal(*args, capsys, flags)
    assert f"{name} exists already, and nothing is overwritten. Remove it, or name another" in said
    assert (tmp_path / name).read_text() == "of another file"
    assert sorted(tmp_path.iterdir()) == before
    if name == "a.mask":
        assert prepared(*args) == [HI, END]
        assert (tmp_path / name).read_text() == "of another file"


def test_prepare_killed_after_the_last_rename(tmp_path, capsys, monkeypatch):
    """A command that was killed at its very end leaves OUT.partial beside OUT. If OUT is then
    removed, the repeated command ends with an error, and does not create OUT.

    Catches an empty OUT, which train.py would read as tokens.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    (tmp_path / "a.jsonl").write_text(lines({"text": "hi"}))
    out = tmp_path / "a.bin"
    with monkeypatch.context() as patch:
        patch.setattr(prepare.shutil, "rmtree", lambda *args, **flags: None)
        assert prepared(tmp_path / "a.jsonl", tokenizer, out) == [HI, END]
    out.unlink()
    said = refusal(tmp_path / "a.jsonl", tokenizer, out, capsys)
    assert "ids is not what was written there. Remove" in said and not out.exists()


def test_prepare_notices_damage(tmp_path, capsys, monkeypatch):
    """A changed byte in the ids that are written already, and an input that changes while it is
    read, are noticed.

    Catches ids of a text that no input has.
    """
    monkeypatch.setattr(prepare, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 100)
    tokenizer = word_tokenizer(tmp_path / "tok")
    text = tmp_path / "a.jsonl"
    text.write_text(lines(*({"text": "hi"} for _ in range(99))))
    args = text, tokenizer, tmp_path / "a.bin", capsys
    with monkeypatch.context() as patch:
        fill_disk_after(50, patch)
        assert "No space left" in refusal(*args)
    ids = tmp_path / "a.bin.partial" / "ids"
    content = bytearray(ids.read_bytes())
    content[9] ^= 1
    ids.write_bytes(content)
    assert "ids is not what was written there. Remove" in refusal(*args)
    ids.unlink()
    assert "ids is not what was written there. Remove" in refusal(*args)

    def grow(settings, partial, progress, files):
        with open(text, "a") as file:
            file.write('{"text": "hi"}\n')

    monkeypatch.setattr(prepare, "commit", grow)
    args = text, tokenizer, tmp_path / "b.bin", capsys
    assert "a.jsonl has changed while it was read" in refusal(*args)


def test_prepare_flags(tmp_path, capsys, monkeypatch):
    """--help names each flag, ~ is expanded, and illegal values are refused.

    Catches a flag that --help leaves out, and a value that leads to a late error.
    """
    with raises(SystemExit):
        prepare.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for flag in ("--tokenizer", "--out", "--field", "--chat", "--bos", "--document-token"):
        assert flag in said
    tokenizer = word_tokenizer(tmp_path / "tok")
    (tmp_path / "a.txt").write_text("hi")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare.main("~/a.txt --tokenizer=~/tok --out=~/b.bin --workers 1".split()) == 0
    assert (tmp_path / "b.bin").exists()
    text, out = tmp_path / "a.txt", tmp_path / "c.bin"
    assert "must end in .bin: --out" in refusal(text, tokenizer, tmp_path / "c", capsys)
    assert "no such folder. `hf download" in refusal(text, tmp_path / "none", out, capsys)
    assert "no tokenizer.json that can be read" in refusal(text, tmp_path, out, capsys)
    said = refusal(text, tokenizer / "tokenizer.json", out, capsys)
    assert said.endswith(f"tokenizer.json is a file. Pass its folder: --tokenizer {tokenizer}")
    assert "--tokenizer bytes: there is no such folder. Drop --tok" in refusal(
        text, "bytes", out, capsys
    )
    capsys.readouterr()
    assert prepare.main(command(text, tokenizer, out, "--workers 0")) == 2
    assert "--workers 0: choose at least 1" in capsys.readouterr().err


def test_prepare_needs_no_library_for_text():
    """prepare.py can be imported without torch, transformers, datasets, pyarrow, jinja2 and
    zstandard.

    Catches an import because of which a laptop needs them even for text and JSON Lines.
    """
    code = "import sys, prepare; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in out.stdout.split()}
    assert "prepare" in loaded
    assert not loaded & {"torch", "transformers", "datasets", "pyarrow", "jinja2", "zstandard"}
    assert importlib.util.find_spec("transformers")


def test_prepare_for_train(tmp_path):
    """tokenise_data, which train.py calls, finds the file of an earlier call again, and writes a
    new one if an input or a flag has changed.

    Catches ids of another text.
    """
    tokenizer = word_tokenizer(tmp_path / "tok")
    text = tmp_path / "a.txt"
    text.write_text("hi <|end|>you")
    args = str(text), str(tokenizer), tmp_path / "cache"
    path, end = prepare.tokenise_data(*args)
    assert end == END and np.fromfile(path, "<u2").tolist() == [HI, UNK, END]
    assert prepare.tokenise_data(path, *args[1:]) == (path, -1)  # it has ids already
    os.truncate(path, 2)  # a second call does not write it again
    assert prepare.tokenise_data(*args) == (path, END) and os.path.getsize(path) == 2
    other, _ = prepare.tokenise_data(*args, special_tokens=True)
    assert other != path and np.fromfile(other, "<u2").tolist() == [HI, END, YOU, END]
    with raises(ValueError, match=f"--document-token {TURN} contradicts --tokenizer"):
        prepare.tokenise_data(*args, document_token=TURN)
    os.utime(text, (1, 1))
    assert prepare.tokenise_data(*args)[0] not in (path, other)
    text.write_bytes(b"\xff")
    with raises(ValueError, match="a.txt is not UTF-8 text"):
        prepare.tokenise_data(*args)
    assert len([*(tmp_path / "cache").iterdir()]) == 6


# ---------------------------------------------------------------------------- to the end


@slow
def test_conversations_from_prepare_to_export(tmp_path):
    """Conversations are prepared, trained on by two ranks that share each sequence, resumed by one
    rank, and exported.

    The validation loss is that of transformers with the export, over the assistant's tokens only.
    Catches a mask that is lost, or shifted, on the way.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = word_tokenizer(tmp_path / "tok")
    words = [w for w in WORDS if not w.startswith("<")]
    records = [
        conversation(
            ("user", " ".join(words[j % 5] for j in range(i % 4 + 1))),
            ("assistant", " ".join(words[(i + j) % 5] for j in range(i % 3 + 1))),
            ("user", "hi"),
            ("assistant", words[i % 5]),
        )
        for i in range(150)
    ]
    (tmp_path / "chats.jsonl").write_text(lines(*records))
    ids = prepared(tmp_path / "chats.jsonl", tokenizer, tmp_path / "chats.bin", "--chat")
    mask = np.frombuffer((tmp_path / "chats.mask").read_bytes(), bool)
    assert 0.2 < mask.mean() < 0.5

    flags = (
        f"--device cpu --data {tmp_path}/chats.bin --seq 64 --batch 4 --steps 4 --lr 0.003 "
        "--eval-every 4 --save-every 2 --dtype fp32"
    )
    run(f"{flags} --sp 2 --out {tmp_path}/two", 2)
    (tmp_path / "one").mkdir()
    shutil.copytree(tmp_path / "two" / "step-00000002", tmp_path / "one" / "step-00000002")
    said = run(f"{flags} --sp 1 --resume latest --out {tmp_path}/one --export {tmp_path}/hf")
    assert "documents end with token 7" in said
    two, one = read_log(tmp_path / "two"), read_log(tmp_path / "one")
    assert [row["step"] for row in one] == [3, 4]
    for row, same in zip(one, two[2:]):
        assert row["loss"] == approx(same["loss"], rel=1e-5)

    # the last twentieth of the windows is for validation; attention stays inside documents
    windows = (len(ids) - 1) // 64
    first = (windows - max(1, windows // 20)) * 64
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    losses = []
    for start in range(first, windows * 64, 64):
        tokens = ids[start : start + 65]
        begins = [0, *(i + 1 for i, token in enumerate(tokens[:64]) if token == END), 64]
        for begin, end in itertools.pairwise(begins):
            labels = torch.tensor(tokens[begin + 1 : end + 1])
            counts = torch.from_numpy(mask[start + begin + 1 : start + end + 1].copy())
            # the label after a document's end is the next document's first token
            counts[torch.tensor(tokens[begin:end]) == END] = False
            if begin < end:
                logits = theirs(torch.tensor([tokens[begin:end]])).logits[0]
                losses += F.cross_entropy(logits[counts], labels[counts], reduction="none").tolist()
    assert one[-1]["val_loss"] == approx(np.mean(losses), rel=1e-4)
