"""Check which tokens come next: text, files of ids, tokenizers, and the order of samples."""

import bz2
import contextlib
import gzip
import itertools
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytest import approx, raises
from safetensors.torch import load_file

import checkpoint
import costs
import data
import model as m
import prepare
import train
from helpers import make_tokenizer
from ranks import ConfigError
from test_all import QUICK_FLAGS, ROOT, main, parametrize, read_log, run, seeded_model, slow


@parametrize("name", data.BUILT_IN)
def test_data_built_in_is_large_sorted_text(name):
    """Built-in data have enough text for long sequences, in a fixed order.

    Catches data that are too small for a long sequence.
    """
    corpus, val = data.open_corpus(name)
    paths = [file.path for file in corpus.files]
    assert val is None and paths == sorted(paths, key=str)
    sequences, val = data.split(corpus, None, 2**19, 0)
    assert sequences.count >= 8 and val.count >= 1


def test_data_default_is_the_same_for_everybody():
    """The default data are those of the version that requirements.txt pins, byte for byte.

    Catches a version that is raised in one place only. Then take the new checksum, and the losses
    in README, from this version.
    """
    (pinned,) = re.findall("^transformers==([^ ]+)", (ROOT / "requirements.txt").read_text(), re.M)
    assert train.Config().data == "transformers" and data.PACKAGE_VERSION == pinned
    files, difference = data.package_files()
    content = b"".join(file.read_bytes() for file in files)
    assert (zlib.crc32(content), difference) == (data.PACKAGE_CRC32, "")
    assert 0.95 * data.PACKAGE_BYTES < len(content) <= data.PACKAGE_BYTES


def fake_package(folder: Path, monkeypatch, version: str, files: dict[str, str]) -> None:
    """Make a folder the only one in which packages are installed, and install a package
    transformers in it. It has these files, all of which its RECORD lists."""
    info = folder / f"transformers-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    )
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(folder)])


ORDINARY = {"transformers/b.py": "b = 1\n" * 99, "transformers/a.py": "a = 1\n" * 99}


@parametrize(
    "version, files, names, sentence",
    [
        ("9.1", ORDINARY, ["a.py", "b.py"], "transformers 9.1 is installed, not"),
        (data.PACKAGE_VERSION, ORDINARY, ["a.py", "b.py"], "have been changed or removed here"),
        # installed in editable mode: the list has no file of the package
        ("9.1", {"__editable___finder.py": "x = 1"}, None, "without a list of its files"),
        # files that are not text, not Python or not in the package's folder are left out
        (
            "9.1",
            ORDINARY
            | {
                "transformers/c.py": "\0",
                "transformers/d.txt": "d",
                "other/e.py": "e",
                "transformers/../f.py": "f",
            },
            ["a.py", "b.py"],
            "transformers 9.1 is installed",
        ),
    ],
)
def test_data_of_another_package_are_said_to_differ(
    version, files, names, sentence, tmp_path, monkeypatch
):
    """If the package is not the pinned one, the run reads what is there, and says so in a sentence.

    Catches losses that differ from README's for no visible reason.
    """
    fake_package(tmp_path / "site", monkeypatch, version, files)
    found, difference = data.package_files.__wrapped__()
    assert sentence in difference
    if names is None:
        assert found == data.stdlib_files()
    else:
        assert [file.name for file in found] == names


def test_data_without_the_package(tmp_path, monkeypatch, capsys):
    """Without the package, a run reads the standard library, and says that its losses differ. It
    also says that it does not read a folder with the name transformers.

    Catches losses that differ from README's, and data that a user takes for the folder's, for no
    visible reason.
    """
    missing = data.PackageFiles(data.stdlib_files(), "transformers is not installed")
    monkeypatch.setattr(data, "package_files", lambda: missing)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "transformers").mkdir()
    main("--steps 1 --save-every -1 --out o")
    text = capsys.readouterr().out
    assert "transformers is not installed. So the losses will differ from those in README" in text
    assert "is built-in data, not the transformers in this folder. That is ./transformers" in text
    main("--steps 1 --save-every -1 --out o --data stdlib")
    assert "--data stdlib: the losses depend on the version of Python" in capsys.readouterr().out

    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "no packages")])
    found, difference = data.package_files.__wrapped__()
    assert found == data.stdlib_files() and "transformers is not installed" in difference


def test_data_of_the_library_have_each_file_once(tmp_path, monkeypatch):
    """A file of the library that two names lead to is read once.

    Catches a run with Debian's Python that is refused because the data has the same file twice.
    """
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").symlink_to("a.py")
    (tmp_path / "c.py").write_text("x = 1")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    found = data.stdlib_files.__wrapped__()  # not what an earlier test has cached
    assert [f.name for f in found] == ["a.py", "c.py"]


def test_data_windows_cover_everything_once(tmp_path):
    """In each epoch, samples cover all training data once, in a new order. An epoch can be drawn
    before the earlier ones.

    Samples cross the borders of files, one of which is empty. Catches a sample that is drawn twice,
    and a token that is lost at a file's end.
    """
    text = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    (tmp_path / "sub").mkdir()
    for name, part in zip(("0", "1", "2", "sub/3"), np.split(text, [10, 10, 503])):
        part.tofile(tmp_path / name)
    windows = [text[start : start + 11].tolist() for start in range(0, 989, 10)]
    corpus, _ = data.open_corpus(str(tmp_path))
    orders = [windows[:95]]  # of the 99 windows, a twentieth (4) is held out for validation
    for seed, epoch in ((5, 1), (5, 0), (6, 0)):
        sequences, val = data.split(corpus, None, 10, seed)
        assert [val.window(i).tokens.tolist() for i in range(val.count)] == windows[95:]
        orders.append([sequences.sample(95 * epoch + i).tokens.tolist() for i in range(95)])
        assert sorted(orders[-1]) == sorted(windows[:95])
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@parametrize(
    "width, num_ids, sidecar, val_sidecar, vocab, message",
    [
        (2, 65_536, "", "", 65_536, ""),
        (2, 300, '{"token_bytes": 2, "ignore": 5}', "", 70_000, ""),
        (4, 70_000, '{"token_bytes": 4, "vocab": 70000}', '{"token_bytes": 4}', 70_000, ""),
        # each file has a width of its own
        (2, 300, '{"token_bytes": 2}', '{"token_bytes": 4}', 2**32, ""),
        (2, 50_257, '{"token_bytes": 4}', "", 128_256, "ends at 128255.*another token_bytes"),
        (2, 65_000, "", "", 60_000, "of .*train.bin is .* ends at 59999.*another token_bytes"),
        (4, 128_256, '{"token_bytes": 4}', "", 32_000, "token .* ends at 31999; .*another model"),
        (2, 300, '{"vocab": 5}', "", 300, "train.bin.json is not of the form"),
        (2, 300, '{"token_bytes": 3}', "", 300, "train.bin.json is not of the form"),
        (2, 300, '{"token_bytes": 2, "ignore": "x"}', "", 300, "train.bin.json is not of the form"),
        (
            2,
            300,
            '{"token_bytes": 2, "document_token": -2}',
            "",
            300,
            "document_token -2 is no num",
        ),
        (2, 300, '{"token_bytes": 2.0}', "", 300, "token_bytes is neither 2 nor 4"),
        (2, 300, '{"token_bytes": 2, "mask": 1}', "", 300, "mask is no name of a file"),
        (2, 300, '{"token_bytes": 2, "Vocab": 9}', "", 300, "there is no field Vocab"),
        (2, 300, '{"token_bytes"', "", 300, "train.bin.json is not of the form"),
        (
            2,
            300,
            '{"token_bytes": 2, "vocab": 301}',
            "",
            300,
            "301 ids, but the model has only 300",
        ),
        (
            *(2, 300, '{"token_bytes": 2, "vocab": 299}', '{"token_bytes": 2, "vocab": 298}', 300),
            "299 ids in .*train.bin and 298 ids in .*val.bin",
        ),
    ],
)
def test_data_token_files(width, num_ids, sidecar, val_sidecar, vocab, message, tmp_path):
    """Files of ids have two or four bytes per id, as FILE.bin.json says. Without this sidecar, the
    ids themselves must show their width.

    Catches ids that are read at another width or place. width: the bytes per id, where the sidecar
    does not say it, or says something else. val_sidecar: "" means the same sidecar.
    """
    ids = np.random.default_rng(0).integers(0, num_ids, 20_000)
    for name, text in (("train", sidecar), ("val", val_sidecar or sidecar)):
        token_bytes = json.loads(text)["token_bytes"] if text and not message else width
        ids.astype(f"<u{token_bytes}").tofile(tmp_path / f"{name}.bin")
        if text:
            (tmp_path / f"{name}.bin.json").write_text(text)
    with raises(ValueError, match=message) if message else contextlib.nullcontext():
        corpora = data.open_corpus(str(tmp_path))
        data.check_same_ids(corpora, vocab)
        data.check_tokens(corpora, vocab, 0, 1)
        for corpus in corpora:
            window = corpus.read(777, len(corpus))
            assert np.array_equal(window.tokens, ids[777:])
            ignored = 5 if "ignore" in sidecar else -1
            assert np.array_equal(window.is_label, ids[777:] != ignored)
        os.truncate(tmp_path / "val.bin", 0)
        with raises(ValueError, match="20000 tokens, its val.bin 0, too few"):
            data.check_lengths([data.Source("a", 1)], [data.open_corpus(str(tmp_path))], 8)


def test_data_tokenised_text(tmp_path, capsys):
    """Text gets the token ids that transformers gives it, and an end token after each file.

    There are many files, some of them empty, and one with a line so long that it is read in parts.
    The ids are kept for a second call, unless a text has changed. Catches text that is lost or cut,
    and the ids of another tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    lines = [
        f"the grass is {'very ' * (i % 4)}{'green' * (i % 3)}: \u00e4\u4e16\n" for i in range(9000)
    ]
    long_line = "grass" * 40_000 + "\r\nend"
    texts = ["".join(lines), "", long_line, *lines[:70]]
    make_tokenizer(tmp_path / "hf", "".join(lines[:90]))
    (tmp_path / "text").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "text" / f"{i:02}.txt").write_bytes(text.encode())
    args = f"{tmp_path}/text", f"{tmp_path}/hf", tmp_path / "t"
    path, last = prepare.tokenise_data(*args)
    corpus, _ = data.open_corpus(path)
    ids = corpus.read(0, len(corpus)).tokens.tolist()
    assert "100%" in capsys.readouterr().err
    theirs = PreTrainedTokenizerFast(tokenizer_file=f"{tmp_path}/hf/tokenizer.json")
    for text in texts:
        end = ids.index(last)
        if text == long_line:
            assert theirs.decode(ids[:end]) == text
        else:
            assert ids[:end] == theirs.encode(text, add_special_tokens=False)
        del ids[: end + 1]
    assert not ids and last == theirs.convert_tokens_to_ids("<end>")

    # a second call finds the file of the first one
    assert prepare.tokenise_data(*args) == (path, last) and not capsys.readouterr().err
    os.utime(tmp_path / "text" / "02.txt", (1, 1))
    assert prepare.tokenise_data(*args)[0] != path
    # A file of ids is not tokenised again. If it does not say how many ids its tokenizer has, the
    # tokenizer is not even read. If it does, the tokenizer must have as many
    assert prepare.tokenise_data(path, f"{tmp_path}/hf", tmp_path) == (path, -1)
    make_tokenizer(tmp_path / "other", "sky")
    with raises(
        ValueError, match=r"other: it has \d+ ids, but the tokenizer that wrote .* has \d+"
    ):
        prepare.tokenise_data(path, f"{tmp_path}/other", tmp_path)
    Path(f"{path}.json").write_text('{"token_bytes": 2}')
    assert prepare.tokenise_data(path, "no folder", tmp_path) == (path, -1)

    # a folder with ids and text
    write_ids(tmp_path / "both" / "val.bin", np.arange(9))
    (tmp_path / "both" / "a.txt").write_text("one two")
    with raises(ValueError, match="a.txt is text, but .*val.bin has token ids.*with prepare.py"):
        prepare.tokenise_data(f"{tmp_path}/both", f"{tmp_path}/hf", tmp_path / "t")


def test_data_too_short_source_of_a_mixture(tmp_path):
    """If a source of a mixture is too short for --seq, the error names it, and the longest --seq
    that all sources allow.

    Catches advice that is refused in its turn.
    """
    sources = []
    for name, size in (("a", 100), ("b", 30)):
        (tmp_path / f"{name}.txt").write_bytes(b"x" * size)
        sources.append(data.Source(f"{tmp_path}/{name}.txt", 1))
    opened = [data.open_corpus(source.path) for source in sources]
    with raises(ValueError, match="b.txt has 30 tokens, too few .*longest that fits is --seq 14"):
        data.check_lengths(sources, opened, 60)
    data.check_lengths(sources, opened, 14)


@parametrize("val, least", [(False, 3), (True, 2)])
def test_data_too_short_for_any_seq(val, least, tmp_path):
    """If the data are too short for each --seq, the error says how many tokens a run needs. With so
    many tokens, --seq 1 is legal.

    Catches the advice to pass --seq 0, which is refused in its turn.
    """
    sources = [data.Source(str(tmp_path), 1)]
    for count in range(least + 1):
        write_ids(tmp_path / "train.bin", np.arange(count))
        if val:
            write_ids(tmp_path / "val.bin", np.arange(count))
        opened = [data.open_corpus(str(tmp_path))]
        if count == least:
            data.check_lengths(sources, opened, 1)
            assert all(part.count for part in data.split(*opened[0], 1, 0))
        else:
            with raises(ValueError, match=f"has {count} tokens.*a run needs at least {least}"):
                data.check_lengths(sources, opened, 1)


def test_data_tokenised_to_four_bytes(tmp_path):
    """Ids of 2^16 and more have four bytes.

    A file that is not text, ids beyond the model's vocabulary, and a tokenizer without an end token
    are refused, and no half-written file is left. Catches ids that are cut to two bytes.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel({**words, "the end": 70_000}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    text = tmp_path / "a.txt"
    text.write_text("w69999 w5\nw65536")

    def tokenise() -> data.Corpus:
        path, _ = prepare.tokenise_data(str(text), str(tmp_path), tmp_path / "t")
        corpus, _ = data.open_corpus(path)
        return corpus

    for config, message in (
        ("{}", "it has no end token.*--document-token ID"),
        ('{"eos_token": null}', "it has no end token.*--document-token ID"),
        ('{"eos_token": "of"}', "its eos_token of is not in its vocabulary"),
        ("[", "tokenizer_config.json cannot be read"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(config)
        with raises(ValueError, match=message):
            tokenise()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "the end"}')
    corpus = tokenise()
    assert corpus.read(0, len(corpus)).tokens.tolist() == [69_999, 5, 65_536, 70_000]
    with raises(ValueError, match="token 3 of .* is 70000, .*ends at 69999; .* or tokenizer"):
        data.check_tokens([corpus], 70_000, 0, 1)
    text.write_bytes(b"w5\n\xff\xfe")
    with raises(ValueError, match="a.txt is not UTF-8 text: .* at position 3"):
        tokenise()
    assert len([*(tmp_path / "t").iterdir()]) == 2  # the ids, and the json about them


@slow
def test_data_tokenised_by_the_first_of_two_ranks(tmp_path):
    """The second rank waits while the first one tokenises, even longer than --timeout. If the first
    one fails, both end with its error message.

    Catches a wait that is too short.
    """
    text = tmp_path / "a.txt"
    text.write_text("the grass is green " * 999)
    make_tokenizer(tmp_path / "hf", text.read_text(), 1)  # the text's letters, and an end token
    flags = f"--steps 0 --save-every -1 --tokenizer {tmp_path}/hf --data {text} --out {tmp_path}/o"
    code = """
tokenise = train.tokenise_data
train.tokenise_data = lambda *args: (time.sleep(10), tokenise(*args))[1]
"""
    said = run(f"{flags} --timeout 8", 2, code)
    assert f"data {text}: 18,982 tokens" in said and said.count("100%") == 1
    text.write_bytes(b"\xff" * 9999)
    said = run(flags, 2, expect=1)
    assert len(re.findall("ConfigError: .*a.txt is not UTF-8 text", said)) == 2


def bare_loss(windows: list[data.Window], end: int) -> float:
    """Return the mean loss of documents, each run by itself through the tiny model of seed 0.

    end: the token that ends documents. A label that is the first token of the next document does
    not count, and neither does a label that its window masks.
    """
    model = seeded_model(m.MODELS["tiny"])
    found = []
    for window, counts in (map(torch.from_numpy, window) for window in windows):
        ends = ((window[:-1] == end).nonzero().flatten() + 1).tolist()
        parts = [part.tensor_split(ends) for part in (window[:-1], window[1:], counts[1:])]
        for tokens, labels, label_counts in zip(*parts):
            if len(tokens):
                each = F.cross_entropy(model(tokens[None])[0], labels, reduction="none")
                found.append(each[(tokens != end) & label_counts])
    return torch.cat(found).mean().item()


def test_data_goes_on_where_it_was_left(tmp_path):
    """A resumed run reads the samples that follow in the order, with its old or a new batch size.

    The learning rate is zero, so each step's loss is that of the first weights on its documents.
    Flags that a resumed run keeps need not be given again. Catches samples that are drawn twice or
    skipped on resume, and a label that counts across a document's border.
    """
    flags = f"--out {tmp_path} --steps"
    main(f"{flags} 2 --dtype fp64 --lr 0 --document-token 32 --batch 4")
    for more in ("3", "4 --batch 5"):
        train.main(f"--device cpu --resume {flags} {more}".split())
    sequences, _ = data.split(data.open_corpus(train.Config.data)[0], None, 32, 0)
    ends = (0, 4, 8, 12, 17)
    for row, first, end in zip(read_log(tmp_path), ends[:-1], ends[1:], strict=True):
        windows = [sequences.sample(i) for i in range(first, end)]
        assert row["loss"] == approx(bare_loss(windows, 32), rel=1e-11)
        assert 1 < row["keys_seen"] < 32


def test_data_held_out_stay_held_out(tmp_path, capsys):
    """val_loss of a resumed run is measured on tokens that no --seq of the run has trained on. If
    there are none left, or if data are new to the run, it says so.

    Catches a validation on training data, which looks like a better model.
    """
    ids = np.random.default_rng(0).integers(0, 256, 2300)
    write_ids(tmp_path / "a.bin", ids)

    def run_on(seq, steps):
        main(
            f"--data {tmp_path}/a.bin --seq {seq} --batch 1 --eval-every 9 --steps {steps} "
            f"--resume auto --out {tmp_path}/o"
        )
        meta = json.loads((tmp_path / "o" / f"step-{steps:08}" / "meta.json").read_text())
        return [*meta["trained_to"].values()], meta["samples"], capsys.readouterr().out

    # 143 windows of 16 tokens. The last 7 are held out
    trained_to, _, text = run_on(16, 3)
    assert trained_to == [136 * 16] and "136 training and 7 validation" in text
    # with 23 tokens the last 4 of 99 windows would begin at token 2185, after token 2176
    trained_to, samples, text = run_on(23, 4)
    assert trained_to == [95 * 23] and samples == 3 * 16 // 23 + 1 and "WARNING" not in text
    # with 50 tokens the last 2 of 45 would begin at 2150. So they begin at 2185, and 2 fit
    corpus, _ = data.open_corpus(f"{tmp_path}/a.bin")
    _, validation = data.split(corpus, None, 50, 0, trained_to=2185)
    assert (validation.first, validation.count) == (2185, 2)
    # after token 2249 one window of 50 and its label fit, and after 2250 none
    for trained_to, place in ((2249, (2249, 1)), (2250, (2150, 2))):
        _, validation = data.split(corpus, None, 50, 0, trained_to=trained_to)
        assert (validation.first, validation.count) == place
    assert "43 training and 2 validation" in run_on(50, 5)[2]
    # with 200 tokens no window fits after 2185. The last of 11 begins at 2000
    _, _, text = run_on(200, 6)
    assert "WARNING: with --seq 200, 92% of the tokens that val_loss is measured on were" in text

    write_ids(tmp_path / "a.bin", ids[::-1])  # as many tokens as before
    trained_to, samples, text = run_on(200, 7)
    assert "WARNING: some of the data are new to this run" in text
    assert trained_to == [2185, 2000] and samples == 1  # the first sample of these data


def test_data_that_a_run_knows_go_on(tmp_path, capsys):
    """A resumed run goes on in its epoch if its data have moved, if their val.bin is another one,
    or if there are also new data.

    Catches samples that are drawn again.
    """
    ids = np.random.default_rng(0).integers(0, 256, 900)
    write_ids(tmp_path / "a" / "a.bin", ids)
    write_ids(tmp_path / "a" / "val.bin", ids[:100])
    write_ids(tmp_path / "b" / "b.bin", ids[::-1])
    flags = f"--seq 16 --batch 2 --eval-every 9 --out {tmp_path}/o"
    main(f"--data {tmp_path}/a {flags} --steps 2")

    def samples_after(steps, folders):
        capsys.readouterr()
        sources = ",".join(f"{tmp_path}/{folder}:1" for folder in folders.split())
        main(f"--data {sources} {flags} --steps {steps} --resume")
        meta = json.loads((tmp_path / "o" / f"step-{steps:08}" / "meta.json").read_text())
        warned = "WARNING: some of the data are new to this run" in capsys.readouterr().out
        return meta["samples"], warned

    write_ids(tmp_path / "a" / "val.bin", ids[:200])
    assert samples_after(3, "a") == (6, False)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "c" / "a.bin").rename(tmp_path / "c" / "other.bin")
    (tmp_path / "c" / "a.bin.json").rename(tmp_path / "c" / "other.bin.json")
    assert samples_after(4, "c") == (8, False)
    assert samples_after(5, "c b") == (10, True)
    assert samples_after(6, "c b") == (12, False)


# ---------------------------------------------------------------------------- masks


def write_ids(path: Path, ids: np.ndarray, mask: np.ndarray | None = None, **sidecar) -> Path:
    """Write a .bin file of 2-byte ids with its sidecar, and with a mask if there is one."""
    path.parent.mkdir(exist_ok=True)
    ids.astype("<u2").tofile(path)
    if mask is not None:
        mask.astype("u1").tofile(path.with_suffix(".mask"))
        sidecar["mask"] = path.with_suffix(".mask").name
    Path(f"{path}.json").write_text(json.dumps({"token_bytes": 2} | sidecar))
    return path


def conversations(path: Path) -> Path:
    """Write random ids below 256 as documents that end with 10. Half of the tokens, in spans of 5,
    are masked: they are no labels."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 256, 3000)
    ids[rng.random(3000) < 0.05] = 10
    mask = np.repeat(rng.random(600) < 0.5, 5)
    return write_ids(path, ids, mask, document_token=10)


def test_data_masks_are_read_with_their_tokens(tmp_path):
    """Each token is read with its own mask byte, across files with and without a mask.

    Catches a mask that is shifted, lost at a file's border, or read for another file.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, 1000)
    mask = rng.random(1000) < 0.5
    write_ids(tmp_path / "d" / "a.bin", ids[:400], mask[:400])
    write_ids(tmp_path / "d" / "b.bin", ids[400:450])
    write_ids(tmp_path / "d" / "c.bin", ids[450:], mask[450:], ignore=7)
    mask[400:450] = True
    mask[450:] &= ids[450:] != 7
    corpus, _ = data.open_corpus(str(tmp_path / "d"))
    data.check_tokens([corpus], 200, 0, 1)
    sequences, val = data.split(corpus, None, 9, 0, ahead=3)
    for source in (sequences, val):
        for i in range(source.count):
            start = source.first + 9 * i
            tokens, counts = source.window(i)
            assert tokens.tolist() == ids[start : start + 12].tolist()
            assert counts.tolist() == mask[start : start + 12].tolist()


@parametrize(
    "spoil, message",
    [
        ("truncate -s 2999 ids.mask", "ids.mask has 2999 bytes, but .*ids.bin has 3000 tokens"),
        ("truncate -s 1K ids.bin", "ids.mask has 3000 bytes, but .*ids.bin has 512 tokens"),
        ("printf '\\2' | dd of=ids.mask bs=1 seek=70 conv=notrunc", "byte 70 of .*ids.mask is 2"),
        ("rm ids.mask", "names the mask 'ids.mask', which is no file in"),
        ("mkdir m && mv ids.mask m && sed -i s,ids.m,m/ids.m, *.json", "'m/ids.mask', which is no"),
        ("rm ids.mask && mkfifo ids.mask", "ids.mask is no regular file"),
        ("rm ids.mask && mkdir ids.mask", "ids.mask is no regular file"),
        ("mv ids.mask ../x && ln -s ../x ids.mask", "ids.mask is a link out of its folder, to"),
    ],
)
def test_data_masks_that_are_refused(spoil, message, tmp_path):
    """A mask of another length, with other values, or somewhere else is refused by name.

    Catches labels that are chosen by a file which is not the mask.
    """
    conversations(tmp_path / "d" / "ids.bin")
    subprocess.run(spoil, shell=True, cwd=tmp_path / "d", check=True, capture_output=True)
    with raises((ValueError, OSError), match=message):
        corpus, _ = data.open_corpus(str(tmp_path / "d" / "ids.bin"))
        data.check_tokens([corpus], 256, 0, 1)


def test_data_mask_that_becomes_shorter(tmp_path):
    """If a mask becomes shorter while a run reads it, an error names it.

    Catches labels that are chosen without a mask.
    """
    corpus, _ = data.open_corpus(str(conversations(tmp_path / "ids.bin")))
    os.truncate(tmp_path / "ids.mask", 20)
    with raises(OSError, match="ids.mask has become shorter than the 3000 tokens"):
        corpus.read(0, 40)


@parametrize("name", ["ids.bin", "ids.mask", "text.txt"])
def test_data_that_changes_in_place(name, tmp_path):
    """If a file is written anew while a run reads it, an error names it, whatever its new length.
    A file may be appended to.

    Catches training on other tokens, and an IndexError for a token that the model does not have.
    """
    conversations(tmp_path / "ids.bin")
    (tmp_path / "text.txt").write_text("one two " * 400)
    path = tmp_path / name
    content = path.read_bytes()
    corpus, _ = data.open_corpus(str(path.with_suffix(".bin") if "ids" in name else path))
    before = corpus.read(0, 40).tokens.tolist()
    with open(path, "ab") as file:
        file.write(b"\1" * 999)
    assert corpus.read(0, 40).tokens.tolist() == before
    other = bytes(value ^ 1 for value in content)
    for new in (other, other * 2, other[:-100]):
        path.write_bytes(new)
        os.utime(path, (1, 1))  # the clock of some file systems is too coarse for a fast test
        with raises(OSError, match=f"--data: .*{name} has changed since the run began. Prepare"):
            corpus.read(0, 40)
    path.unlink()
    with raises(OSError, match=name):
        corpus.read(0, 40)


def weights_after(flags: str, out: Path) -> dict[str, torch.Tensor]:
    """Train with these flags, and return all tensors of the checkpoint."""
    main(f"{flags} --out {out}")
    (folder,) = checkpoint.steps_of(out)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@parametrize("documents", [-1, 10])
def test_data_masked_labels_change_no_bit(documents, tmp_path, monkeypatch, capsys):
    """If the masked labels are replaced by other tokens, no bit of the weights after two steps
    changes. If the labels that count are replaced, the weights differ.

    The inputs stay as they are. Catches a masked label that carries loss.
    """
    flags = f"--steps 2 --batch 2 --data {conversations(tmp_path / 'ids.bin')}"
    flags += f" --document-token {documents}"
    expected = weights_after(flags, tmp_path / "plain")
    said = capsys.readouterr().out
    assert ("; attention crosses documents, because" in said) == (documents == -1)
    make_labels = train.make_labels

    def weights_with_other_labels(replace_masked: bool) -> dict[str, torch.Tensor]:
        """Train with other tokens in place of the masked labels, or of the labels that count."""

        def other_labels(run, windows, counts, own_tokens):
            others = torch.randint(11, 256, windows.shape)
            replaced = counts.logical_not() if replace_masked else counts
            replaced = replaced & (windows != 10)  # the end of a document has a meaning, and stays
            return make_labels(run, torch.where(replaced, others, windows), counts, own_tokens)

        with monkeypatch.context() as patch:
            patch.setattr(train, "make_labels", other_labels)
            return weights_after(flags, tmp_path / f"masked-{replace_masked}")

    found = weights_with_other_labels(replace_masked=True)
    assert expected and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    found = weights_with_other_labels(replace_masked=False)
    assert not all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_data_masks_by_hand(tmp_path):
    """Losses with a mask equal those of the bare model on each document, in training, after a
    resume, and in an evaluation.

    The learning rate is zero, so each step's loss is that of the first weights. Catches a mask that
    is lost at a resume or in an evaluation, and a mean over labels that do not count.
    """
    path = conversations(tmp_path / "ids.bin")
    flags = f"--out {tmp_path}/o --data {path} --dtype fp64 --lr 0 --batch 4 --eval-every 0 --steps"
    main(f"{flags} 1")
    main(f"{flags} 2 --resume")
    corpus, _ = data.open_corpus(str(path))
    sequences, val = data.split(corpus, None, 32, 0)
    rows = read_log(tmp_path / "o")
    for i, row in enumerate(rows):
        windows = [sequences.sample(4 * i + k) for k in range(4)]
        assert row["loss"] == approx(bare_loss(windows, 10), rel=1e-11)
    windows = [val.window(i) for i in range(val.count)]
    assert rows[-1]["val_loss"] == approx(bare_loss(windows, 10), rel=1e-11)
    assert len(rows) == 2 and not all(window.is_label.all() for window in windows)


@slow
def test_data_masks_on_two_ranks(tmp_path):
    """With a mask, two ranks train and evaluate as one rank does, whether they share sequences or
    have sequences of their own. Some sequences have no label that counts.

    Catches a rank that takes another rank's mask, or divides by its own number of labels.
    """
    path = conversations(tmp_path / "ids.bin")
    mask = np.fromfile(tmp_path / "ids.mask", "u1")
    mask[:700] = 0
    mask.tofile(tmp_path / "ids.mask")
    flags = f"--data {path} --dtype fp64 --batch 4 --warmup 0 --min-lr 1 --eval-every 0 --steps"
    main(f"{flags} 2 --out {tmp_path}/1")
    run(f"{flags} 1 --sp 2 --micro-batch 2 --out {tmp_path}/2", 2)
    run(f"{flags} 2 --sp 1 --micro-batch 1 --out {tmp_path}/2 --resume", 2)
    ours, theirs = read_log(tmp_path / "2"), read_log(tmp_path / "1")
    for key in ("loss", "grad_norm", "keys_seen"):
        assert [row[key] for row in ours] == approx([row[key] for row in theirs], rel=1e-10)
    assert ours[-1]["val_loss"] == approx(theirs[-1]["val_loss"], rel=1e-10)
    bins, expected_bins = (rows[-1]["val_loss_by_position"] for rows in (ours, theirs))
    assert np.array(bins) == approx(np.array(expected_bins), rel=1e-10)


def test_data_masks_of_several_labels(tmp_path, monkeypatch, group):
    """With several labels per token, each label has the mask of its own token.

    Catches a label two tokens ahead that has the mask of the next token.
    """
    monkeypatch.setattr(m.LLaMA, "labels_ahead", 2)
    corpus, _ = data.open_corpus(str(conversations(tmp_path / "ids.bin")))
    sequences, _ = data.split(corpus, None, 8, 0, ahead=2)
    plan = costs.Plan(m.MODELS["tiny"], torch.float32, 1, 1, 8, batch=2)
    run = train.Run(train.Config(), 0, torch.device("cpu"), "cpu", plan, training=sequences)
    run = replace(run, cfg=replace(run.cfg, document_token=-1))
    labels = train.load_batch(run, 0).labels.flatten(0, 1)  # (2, T, 2)
    for i in range(2):
        tokens, counts = sequences.sample(i)
        expected = np.where(counts, tokens, m.IGNORE)
        assert labels[i, :, 0].tolist() == expected[1:9].tolist()
        assert labels[i, :, 1].tolist() == expected[2:10].tolist()


def test_a_loss_with_other_parts_is_logged_without_labels(tmp_path, monkeypatch):
    """If a fork's loss has a part that needs no labels, the log has this part when no label counts.

    Catches a loss that is lost because the cross-entropy has no labels.
    """

    class Penalised(m.LLaMA):
        def apply_head(self, x, *args):
            return super().apply_head(x, *args) + 0.01 * x.square().mean()

    monkeypatch.setattr(train, "LLaMA", Penalised)
    path = write_ids(tmp_path / "ids.bin", np.arange(4000) % 200, mask=np.zeros(4000))
    main(f"--data {path} --seq 32 --batch 1 --steps 2 --eval-every -1 --out {tmp_path}/o")
    assert all(row["loss"] for row in read_log(tmp_path / "o"))


def test_an_evaluation_counts_first_labels(tmp_path, monkeypatch):
    """A model that predicts several tokens has the val_loss of its first label, as the plain model.

    Catches a mean over the tokens whose last label counts.
    """

    class Ahead(m.LLaMA):
        labels_ahead = 2

        def apply_head(self, x, labels, *args):
            return super().apply_head(x, labels[..., 0], *args)

    flags = "--steps 0 --eval-every 1 --dtype fp64 --document-token 10 --out"
    main(f"{flags} {tmp_path}/plain")
    monkeypatch.setattr(train, "LLaMA", Ahead)
    main(f"{flags} {tmp_path}/ahead")
    expected, found = (read_log(tmp_path / name)[0]["val_loss"] for name in ("plain", "ahead"))
    assert found == approx(expected, rel=1e-11)


def test_data_of_no_labels_have_a_finite_loss(tmp_path, group):
    """A batch in which no label counts has a loss of 0. Catches a division by the number of labels,
    which makes the loss NaN and skips the step."""
    path = write_ids(tmp_path / "ids.bin", np.full(200, 7), mask=np.zeros(200))
    sequences, _ = data.split(data.open_corpus(str(path))[0], None, 8, 0)
    plan = costs.Plan(m.MODELS["tiny"], torch.float32, 1, 1, 8, batch=2)
    run = train.Run(train.Config(), 0, torch.device("cpu"), "cpu", plan, training=sequences)
    batch = train.load_batch(replace(run, cfg=replace(run.cfg, document_token=-1)), 0)
    assert (batch.labels == m.IGNORE).all() and batch.scale == 1 and batch.valid_labels == 0


def test_step_without_labels_logs_no_loss(tmp_path, capsys):
    """The log has no loss of a step in which no label counts, and the run goes on.

    Catches a loss of 0 in the log, which makes a mean over steps too low.
    """
    mask = np.arange(4000) < 1300  # most sequences have no label
    path = write_ids(tmp_path / "ids.bin", np.arange(4000) % 200, mask=mask)
    main(f"--data {path} --seq 32 --batch 1 --steps 8 --eval-every -1 --out {tmp_path}/o")
    found = [row["loss"] for row in read_log(tmp_path / "o")]
    assert None in found and any(found) and 0 not in found
    text = capsys.readouterr().out
    assert text.count("loss none (all labels are ignored) grad 0.000") == found.count(None)


def test_data_many_documents_are_fast(tmp_path, group):
    """Two million documents of one token each are loaded in seconds.

    Catches work that grows faster than the number of documents.
    """
    path = write_ids(tmp_path / "ids.bin", np.full(2_100_000, 9), document_token=9)
    corpus, _ = data.open_corpus(str(path))
    assert data.choose_document_token([corpus], None) == 9
    sequences, _ = data.split(corpus, None, 10**6, 0)
    plan = costs.Plan(m.MODELS["tiny"], torch.float32, 1, 1, 10**6, batch=2)
    cfg = train.Config(document_token=9)
    run = train.Run(cfg, 0, torch.device("cpu"), "cpu", plan, training=sequences)
    started = time.perf_counter()
    batch = train.load_batch(run, 0)
    assert time.perf_counter() - started < 30
    assert len(batch.documents[0].bounds) == 10**6 + 1
    assert (batch.labels == m.IGNORE).all() and not batch.positions.any()


# ---------------------------------------------------------------------------- the width of ids


def halves(ids) -> np.ndarray:
    """Return the 2-byte numbers that a file of 4-byte ids seems to hold."""
    return np.asarray(ids).astype("<u4").view("<u2")


RANDOM = np.random.default_rng(0)


@parametrize(
    "ids, vocab, is_certain",  # is_certain: whether the ids can only have 2 bytes
    [
        # nanoGPT's files of GPT-2's, Llama 3's and characters' ids
        (RANDOM.integers(0, 50_257, 1000).astype("<u2"), 50_304, True),
        (RANDOM.integers(0, 65_000, 1000).astype("<u2"), 128_256, True),
        (RANDOM.integers(0, 65, 1000).astype("<u2"), 256, True),
        (RANDOM.integers(0, 4, 1000).astype("<u2"), 8, True),  # four letters
        (np.zeros(1001, "<u2"), 8, True),  # 4 does not divide the file's size
        (np.array([], "<u2"), 256, True),
        (np.array([7], "<u2"), 256, True),
        (np.array([7, 9000], "<u2"), 10_000, True),
        (np.r_[np.zeros(10**5), 7, 9000].astype("<u2"), 10_000, True),  # padding first
        # 4 bytes, or every second id is 0 or small
        (halves(RANDOM.integers(0, 200, 1000)), 256, False),
        (halves(RANDOM.integers(0, 50_257, 1000)), 50_304, False),
        (halves(RANDOM.integers(0, 128_256, 1000)), 128_256, False),
        # a tokenizer with more ids than the model
        (halves(RANDOM.integers(0, 128_256, 1000)), 100_277, False),
        (halves([1, 70_000]), 256, False),
        (np.zeros(1000, "<u2"), 256, False),
        (np.arange(1000, dtype="<i8").view("<u2"), 50_304, False),
    ],
)
def test_data_widths_are_certain_or_refused(ids, vocab, is_certain, tmp_path):
    """Ids without a sidecar are read if they can only have 2 bytes, and refused otherwise. The
    error has a line that makes a sidecar.

    Catches 4-byte ids that are read as 2-byte ids, so that every second one is 0.
    """
    path = tmp_path / "a b.bin"
    ids.tofile(path)
    if is_certain:
        corpus, _ = data.open_corpus(str(path), vocab)
        assert len(corpus) == len(ids)
        if len(ids):
            assert corpus.read(0, len(ids)).tokens.tolist() == ids.tolist()
        return
    with raises(ValueError, match="Write one line into .*a b.bin.json: ") as refused:
        data.open_corpus(str(path), vocab)
    line = str(refused.value).split(" or ")[-1]
    Path(f"{path}.json").write_text(line)
    assert len(data.open_corpus(str(path), vocab)[0]) == len(ids) // 2


@parametrize(
    "content, message",
    [
        (b"what is written here is no ids\n" * 9, "is text, but files of this ending hold token"),
        (b"\x93NUMPY\1\0" + bytes(90), "is a NumPy array.*numpy.load.*astype"),
        (b"PK\3\4" + bytes(90), "is a zip archive"),  # torch.save writes these
        (b"PAR1" + bytes(90), "is Parquet.*python prepare.py"),
    ],
)
def test_data_other_files_that_are_called_bin(content, message, tmp_path):
    """A .bin file that holds something else is refused, and the error says what it holds.

    Catches text that is taken for ids because the vocabulary is large.
    """
    (tmp_path / "a.bin").write_bytes(content)
    with raises(ValueError, match=message):
        data.open_corpus(str(tmp_path / "a.bin"), 128_256)


def write_megatron(path: Path, documents: list[list[int]], code: int, dtype: str) -> None:
    """Write documents of ids and their index as Megatron-LM does. code: its number of the dtype."""
    np.concatenate(documents).astype(dtype).tofile(path)
    sizes = np.array([len(document) for document in documents], "<i4")
    first_bytes = (sizes.cumsum() - sizes) * np.dtype(dtype).itemsize
    with open(path.with_suffix(".idx"), "wb") as index:
        header = (b"MMIDIDX\0\0", 1, code, len(sizes), len(sizes) + 1)
        index.write(struct.pack("<9sQBQQ", *header))
        for row in (sizes, first_bytes.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8")):
            index.write(row.tobytes())


@parametrize("code, dtype", [(4, "<i4"), (8, "<u2"), (5, "<i8"), (1, "u1")])
def test_data_megatrons_files(code, dtype, tmp_path, monkeypatch):
    """Megatron's index says the width, and which token ends documents, if one ends them all.

    Catches ids at the wrong width, and an end token that only looks like one.
    """
    monkeypatch.setattr(data, "SCAN_TOKENS", 7)  # documents end in several blocks, and at borders
    path = tmp_path / "x_text_document.bin"

    def opened() -> data.Corpus:
        corpus, _ = data.open_corpus(str(path))
        for rank in range(3):
            data.check_tokens([corpus], 200, rank, 3)
        return corpus

    good = [[1, 2, 3, 9], [9], [4, 5, 6, 7, 8, 5, 4, 9], [], [2, 9]]
    write_megatron(path, good, code, dtype)
    corpus = opened()
    assert corpus.read(0, len(corpus)).tokens.tolist() == sum(good, [])
    assert data.choose_document_token([corpus], None) == 9
    assert data.choose_document_token([corpus], -1) == -1
    with raises(ValueError, match="--document-token 5 contradicts .*end with token 9"):
        data.choose_document_token([corpus], 5)

    write_megatron(path, [*good, [9, 3, 9]], code, dtype)
    with raises(ValueError, match="ends with token 9, but at position 15 this token is inside"):
        opened()
    write_megatron(path, [*good, [3, 3]], code, dtype)
    with raises(ValueError, match="but at position 16 this token does not end the document, .* -1"):
        opened()
    data.check_tokens([data.open_corpus(str(path))[0]], 200, 0, 1, with_documents=False)
    write_megatron(path, [[1, 201]], code, dtype)
    with raises(ValueError, match="token 1 of .* is 201, but the model's vocabulary ends at 199"):
        opened()
    if dtype[1:] in ("i4", "i8"):
        write_megatron(path, [[1, -2]], code, dtype)
        with raises(ValueError, match="token 1 of .* but the model's vocabulary ends at 199"):
            opened()


@parametrize(
    "spoil, message",
    [
        (lambda index: b"TNTIDX\0\0" + index[8:], "no index of Megatron's: .*begin with MMIDIDX"),
        (lambda index: index[:20], "no index of Megatron's"),
        (lambda index: index[:-1], "no index of Megatron's: .*cut off"),
        (lambda index: index[:17] + b"\7" + index[18:], "no index of Megatron's: KeyError: 7"),
        (lambda index: index[:17] + b"\4" + index[18:], "do not stand one after the other"),
        (lambda index: index[:-8] + bytes(8), "documents do not hold all of them"),
    ],
)
def test_data_megatrons_files_that_are_refused(spoil, message, tmp_path):
    """An index that is broken, or of another format, is refused by name.

    Catches ids that are read by a wrong index.
    """
    path = tmp_path / "x.bin"
    write_megatron(path, [[1, 2, 3], [4, 3]], 8, "<u2")
    index = path.with_suffix(".idx")
    index.write_bytes(spoil(index.read_bytes()))
    with raises(ValueError, match=f"x.idx.* {message}"):
        data.open_corpus(str(path))


def test_data_megatrons_files_and_sidecars(tmp_path):
    """A sidecar beside Megatron's index may add to it, but not contradict it.

    Catches a file of which one of two contradicting widths is chosen, and a file that its index
    does not describe.
    """
    path = tmp_path / "x.bin"
    write_megatron(path, [[1, 2, 3], [4, 3, 3]], 8, "<u2")
    Path(f"{path}.json").write_text('{"token_bytes": 2, "document_token": 3, "ignore": 1}')
    corpus, _ = data.open_corpus(str(path))
    data.check_tokens([corpus], 200, 0, 1)  # token 3 may end more documents than the index has
    assert data.choose_document_token([corpus], None) == 3
    assert corpus.read(0, 2).is_label.tolist() == [False, True]
    Path(f"{path}.json").write_text('{"token_bytes": 4}')
    with raises(ValueError, match="two widths of an id, 4 in .*x.bin.json and 2 in .*x.idx bytes"):
        data.open_corpus(str(path))
    os.unlink(f"{path}.json")
    os.truncate(path, 10)
    with raises(ValueError, match="x.bin has 5 tokens, but .*x.idx 6"):
        data.open_corpus(str(path))


# ---------------------------------------------------------------------------- what is text

RECORDS = b'{"text": "one"}\n{"text": "two"}\n'


@parametrize(
    "name, content, message",
    [
        (
            "a.txt",
            RECORDS,
            "a.txt is JSON Lines, not plain text.*python prepare.py .*a.txt --token",
        ),
        ("a b.txt", b"\r\n \n" + RECORDS, "prepare.py '.*a b.txt' --tokenizer DIR --out NAME.bin"),
        ("a.jsonl", b'{"text": "' + 10**5 * b"x" + b'"}', "a.jsonl is JSON Lines"),
        ("a.JSONL", b"", "a.JSONL is JSON Lines"),
        ("a.txt", gzip.compress(b"text"), "a.txt is gzip-compressed, .*prepare.py"),
        ("a.bz2", bz2.compress(b"text"), "a.bz2 is bzip2-compressed, .*prepare.py"),
        ("a.txt", lzma.compress(b"text"), "a.txt is xz-compressed, .*prepare.py"),
        ("a.zst", b"\x28\xb5\x2f\xfd1234", "a.zst is zstd-compressed, .*prepare.py"),
        ("a.txt", b"PK\3\4text", "a.txt is a zip archive, not plain text. Extract its text first"),
        ("a.txt", b"%PDF-1.7\ntext", "a.txt is a PDF file, not plain text. Extract its text first"),
        ("a.txt", b"PAR1text", "a.txt is Parquet, .*prepare.py"),
        ("a.arrow", b"\xff\xff\xff\xff", "a.arrow is Arrow, .*prepare.py"),
        ("a.npy", b"\x93NUMPY\1\0text", "a.npy is a NumPy array.*tofile"),
        ("a.csv", b"text,label\none,1\n", "a.csv is a table, .*prepare.py"),
        (
            "a.txt",
            "z\u00fc".encode("utf-16"),
            "a.txt is not UTF-8 text",
        ),
        (
            "a.txt",
            "z\u00fcx".encode("latin-1"),
            "not UTF-8 text: .*(at byte|at position) 1",
        ),
        ("a.txt", b"text\0text", "a.txt is not UTF-8 text: .*(at byte|at position) 4"),
        ("a.txt", b"text\0text\xff", "not UTF-8 text: .*(at byte|at position) 4"),
        ("a.txt", 14 * b"x" + b"\xe4\xb8", "not UTF-8 text: .*(at byte|at position) 14"),
        # files that are text
        ("a.txt", 14 * b"x" + "\u4e16\u754c\U0001f600".encode(), ""),  # cut by blocks
        ("a.txt", b"one\r\n\r\ntwo\r\n", ""),
        ("a.json", b'{\n  "text": "one"\n}\n', ""),
        ("a.py", b"{1: 2}\n{3: 4}\n", ""),
        ("a.txt", b'{"text": "one line only"}\nand words\n', ""),
        ("README", b"BZh is how bzip2 begins", ""),
        ("a.gz", b"the name does not matter", ""),
        ("a.txt", b"", ""),
    ],
)
def test_data_only_text_is_text(name, content, message, tmp_path, monkeypatch):
    """A file that is not plain text is refused by name, with the command that prepares it, whether
    it is read as bytes or tokenised.

    The content decides first, and then the ending of the name. Catches a model that learns JSON's
    braces, or compressed bytes.
    """
    if "JSON" not in message:
        monkeypatch.setattr(data, "SCAN_TOKENS", 16)  # characters are cut by blocks
    path = tmp_path / name
    path.write_bytes(content)
    make_tokenizer(tmp_path / "hf", "the grass is green")

    with raises(ValueError, match=message) if message else contextlib.nullcontext():
        corpus, _ = data.open_corpus(str(path))
        data.check_tokens([corpus], 256, 0, 1)
        assert len(corpus) == len(content)
        if content:
            assert bytes(corpus.read(0, len(corpus)).tokens.tolist()) == content
    with raises(ValueError, match=message) if message else contextlib.nullcontext():
        prepare.tokenise_data(str(path), f"{tmp_path}/hf", tmp_path / "t")


def test_data_text_is_checked_by_all_ranks(tmp_path):
    """Each text is checked by one of the ranks. A byte that is no id of the model is refused.

    Catches a file that no rank checks.
    """
    for i in range(7):
        (tmp_path / f"{i}.txt").write_bytes(b"text" if i != 4 else b"te\xff")
    corpus, _ = data.open_corpus(str(tmp_path))
    data.check_tokens([corpus], 256, 0, 3)
    with raises(ValueError, match="4.txt is not UTF-8 text"):
        data.check_tokens([corpus], 256, 1, 3)
    data.check_tokens([corpus], 256, 2, 3)
    (tmp_path / "4.txt").write_bytes(b"text~")
    with raises(ValueError, match="4.txt has a byte of value 126, .* vocabulary ends at 125"):
        data.check_tokens([corpus], 126, 1, 3)


# ---------------------------------------------------------------------------- links, OUT


def names_in(folder: Path, *leave_out: Path) -> list[str]:
    train_files, _ = data.find_files(str(folder), leave_out)
    return [str(path.relative_to(folder)) for path in train_files]


def test_data_linked_folders_are_followed_once(tmp_path):
    """Links to files and folders are followed, each file is taken once, and links in a circle end.

    Catches files that are left out silently, or that are taken twice.
    """
    real, links = tmp_path / "real", tmp_path / "my links"
    (real / "sub").mkdir(parents=True)
    links.mkdir()
    for path in (real / "a.txt", real / "sub" / "b.txt", links / "c.txt", real / ".hidden"):
        path.write_text("text")
    (links / "linked").symlink_to(real)
    assert names_in(links) == ["c.txt", "linked/a.txt", "linked/sub/b.txt"]
    (links / "z").mkdir()
    (links / "z" / "e.txt").write_text("text")
    (links / "a").symlink_to(links / "z")
    assert names_in(links)[-1] == "z/e.txt"  # not a/e.txt: real folders come first
    shutil.rmtree(links / "z")
    (links / "a").unlink()
    (links / "again").symlink_to(real / "sub")
    (links / "d.txt").symlink_to(links / "c.txt")
    (real / "sub" / "up").symlink_to(real)
    (real / "round").symlink_to(links)
    (links / "self").symlink_to(links)
    os.mkfifo(links / "fifo")
    assert len(names_in(links)) == 3  # by one of the paths that lead to them
    (links / "self").unlink()
    (real / "round").unlink()
    top = tmp_path / "top"
    top.symlink_to(links)
    assert len(names_in(top)) == 3
    (links / "gone.txt").symlink_to(tmp_path / "nowhere")
    with raises(OSError, match="gone.txt is a link that leads to no file. Remove it"):
        names_in(links)


def test_data_val_is_held_out_under_any_name(tmp_path):
    """val.bin is not trained on, even if a link with another name leads to it.

    Catches training on the validation data.
    """
    write_ids(tmp_path / "train.bin", np.arange(300))
    write_ids(tmp_path / "val.bin", np.arange(300, 600))
    (tmp_path / "also.bin").symlink_to("val.bin")
    train_files, val_files = data.find_files(str(tmp_path))
    assert [file.name for file in train_files + val_files] == ["train.bin", "val.bin"]


def test_data_never_has_files_of_the_run(tmp_path):
    """OUT and --export are no data, however they are nested or linked.

    Catches a run that trains on its own checkpoints, log or tokens.
    """
    folder, out = tmp_path / "d", tmp_path / "d" / "sub" / "o"
    (out / "tokens").mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    (out / "log.jsonl").write_text("{}")
    (out / "tokens" / "0.bin").write_bytes(b"1234")
    for link, target in (("x", out), ("y", out / "tokens"), ("z.bin", out / "tokens" / "0.bin")):
        (folder / link).symlink_to(target)
    assert names_in(folder, tmp_path / "e", out) == ["a.txt"]
    (tmp_path / "other").symlink_to(out)  # OUT is named by a link
    assert names_in(folder, tmp_path / "other") == ["a.txt"]
    for inside in (out, out / "tokens", tmp_path / "other", folder / "y"):
        with raises(ValueError, match="lies in .*o, where the run writes its own files. .*--out"):
            names_in(inside, out)
    # a file that is named is taken wherever it lies
    assert data.find_files(str(out / "tokens" / "0.bin"), [out])[0] == [out / "tokens" / "0.bin"]


def test_data_with_out_inside_starts_twice(tmp_path, capsys):
    """If OUT lies in the folder of the data, a second start and a resume read the same tokens.

    Catches ids in OUT/tokens that become the data, without the ends of documents.
    """
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "a.txt").write_text("the grass is green\n" * 200)
    make_tokenizer(tmp_path / "hf", "the grass is green\n", 1)
    for flags in (f"--tokenizer {tmp_path}/hf --out {folder}/o", f"--out {folder}/u/o"):
        main(f"--data {folder} --batch 1 --steps 1 {flags}")
        first = re.findall("data .*: (.* tokens.*)", capsys.readouterr().out)
        main(f"--data {folder} --batch 1 --steps 2 {flags} --resume")
        assert re.findall("data .*: (.* tokens.*)", capsys.readouterr().out) == first != []


# ---------------------------------------------------------------------------- end tokens


@parametrize(
    "files, expected",
    [
        ({"tokenizer_config.json": {"eos_token": "<a>"}}, 0),
        ({"tokenizer_config.json": {"eos_token": {"content": "<b>", "__type": "AddedToken"}}}, 1),
        ({"special_tokens_map.json": {"eos_token": {"content": "<b>"}}}, 1),
        (
            {
                "tokenizer_config.json": {"eos_token": "<a>"},
                "special_tokens_map.json": {"eos_token": "<b>"},
            },
            1,
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "<a>", "added_tokens_decoder": {}},
                "special_tokens_map.json": {"eos_token": "<b>"},
            },
            0,
        ),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 1}}, 1),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {}}, None),
        (
            {
                "config.json": {"eos_token_id": 0},
                "generation_config.json": {"eos_token_id": [1, 0]},
            },
            1,
        ),
        ({}, None),
    ],
)
def test_data_end_tokens_are_found(files, expected, tmp_path):
    """The end token stands in one of four files, and transformers finds the same one.

    Catches a tokenizer that is refused although it has an end token.
    """
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert prepare.find_end_token(tokenizer, tmp_path) == expected
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token_id
    assert theirs == (None if "config.json" in files else expected)


def test_data_documents_end_as_their_files_do(tmp_path):
    """The end token of the tokenizer, or of the .bin files, is the one that a run uses.

    A flag may only name the same one, or none. Catches attention that looks for another token, and
    crosses all documents.
    """
    make_tokenizer(tmp_path / "hf", "the grass is green\n", 1)
    text = tmp_path / "a.txt"
    text.write_text("the grass is green\n" * 30)

    def token(flag: int | None) -> int:
        path, end = prepare.tokenise_data(str(text), f"{tmp_path}/hf", tmp_path / "t", flag)
        corpus, _ = data.open_corpus(path)
        data.check_same_ids([corpus], 256)
        last = corpus.read(len(corpus) - 1, len(corpus)).tokens.tolist()
        assert (last == [end]) == (end >= 0)
        return data.choose_document_token([corpus], flag)

    assert [token(flag) for flag in (None, 0, -1)] == [0, 0, -1]
    with raises(ValueError, match="--document-token 5 contradicts --tokenizer .*with token 0"):
        token(5)
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    with raises(ValueError, match="it has no end token.*--document-token ID"):
        token(None)
    assert [token(flag) for flag in (200, -1)] == [200, -1]
    with raises(ValueError, match="the text that begins with .* spells the document token 5"):
        token(5)


def test_data_files_end_documents_alike(tmp_path):
    """Files that end documents in different ways are refused, unless the flag settles it.

    Catches files whose documents never end because another file's token is taken.
    """
    for name, sidecar in (("a", {"document_token": 3}), ("b", {}), ("c", {"document_token": 4})):
        write_ids(tmp_path / f"{name}.bin", np.arange(100), **sidecar)
    a, b, c = (data.open_corpus(str(tmp_path / f"{name}.bin"))[0] for name in "abc")
    assert data.choose_document_token([a], None) == 3 == data.choose_document_token([a, b], 3)
    assert data.choose_document_token([b], None) == -1 == data.choose_document_token([a, c], -1)
    with raises(ValueError, match="document_token is 3 in .*a.bin, nothing in .*b.bin. Write"):
        data.choose_document_token([a, b], None)
    with raises(ValueError, match="document_token is 3 in .*a.bin, 4 in .*c.bin"):
        data.choose_document_token([a, c], None)
    for flag, other in ((3, "c"), (4, "a")):
        with raises(ValueError, match=f"--document-token {flag} contradicts .*{other}.bin"):
            data.choose_document_token([a, c], flag)


def test_data_text_that_spells_a_special_token(tmp_path):
    """Text that spells a special token is text, unless --special-tokens is given. This holds also
    if tokenizer.json does not mark the end token as special.

    Catches a document that is cut where its author writes about tokens.
    """
    make_tokenizer(tmp_path / "hf", "the grass is green <end>")
    text = tmp_path / "a.txt"
    text.write_text("the grass <end> is green")

    def ids(special: bool, folder="hf") -> list[int]:
        path, end = prepare.tokenise_data(
            str(text), f"{tmp_path}/{folder}", tmp_path / "t", None, special
        )
        corpus, _ = data.open_corpus(path)
        found = corpus.read(0, len(corpus)).tokens.tolist()
        assert found[-1] == end == 0
        return found[:-1]

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{tmp_path}/hf/tokenizer.json")
    assert 0 not in ids(False) and ids(True).count(0) == 1
    assert tokenizer.decode(ids(False)) == "the grass <end> is green"
    assert ids(False) != ids(True)  # both are kept in the cache

    content = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    content["added_tokens"][0]["special"] = False
    (tmp_path / "word").mkdir()
    (tmp_path / "word" / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "word" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert 0 not in ids(False, "word")
    assert ids(True, "word").count(0) == 1


def test_data_tokenizer_larger_than_the_model(tmp_path):
    """A tokenizer with more ids than the model is refused with both numbers, before any text is
    tokenised.

    Catches an error that comes late, or that names a flag which was not given.
    """
    make_tokenizer(tmp_path / "hf", "the grass is green", 258)
    (tmp_path / "a.txt").write_text("the grass is green")
    with raises(ConfigError, match="--tokenizer .*hf: it has 258 ids, but the model has only 256"):
        main(f"--tokenizer {tmp_path}/hf --data {tmp_path}/a.txt --out {tmp_path}/o")
    assert not (tmp_path / "o" / "tokens").exists()


# ---------------------------------------------------------------------------- mixtures


@parametrize(
    "text, expected",
    [
        ("a.bin:0.7,b.bin:0.3", [("a.bin", 0.7), ("b.bin", 0.3)]),
        ("a.bin:7,my b,c:d.bin:3e0", [("a.bin", 7), ("my b,c:d.bin", 3)]),
        ("stdlib:1,a.bin: 2", [("stdlib", 1), ("a.bin", 2)]),
        ("a.bin:5", [("a.bin", 5)]),
        ("my b,c:d.bin", [("my b,c:d.bin", 1)]),
        ("e.bin:0.5", [("e.bin:0.5", 1)]),  # a file of this name exists
        ("none", [("none", 1)]),  # find_files says that there is no such file
        ("a.bin:0.7,b.bin", "b.bin has no weight. Write --data PATH:WEIGHT,PATH:WEIGHT"),
        ("a.bin,b.bin:0.3", "a.bin has no weight"),
        ("a.bin:0.7,c.bin:0.3", "there is no file or folder 'c.bin'"),
        ("a.bin:0.7,", "there is no file or folder ''"),
        ("a.bin:0,b.bin:1", "the weight '0' of a.bin is no positive number"),
        ("a.bin:1,b.bin:-1", "the weight '-1' of b.bin is no positive number"),
        ("a.bin:nan,b.bin:1", "the weight 'nan' of a.bin is no positive number"),
        ("a.bin:inf,b.bin:1", "the weight 'inf' of a.bin is no positive number"),
        ("a.bin:half,b.bin:1", "the weight 'half' of a.bin is no positive number"),
        ("a.bin:1,./a.bin:1", "named twice. Add its weights"),
    ],
)
def test_data_mixtures_are_spelt(text, expected, tmp_path, monkeypatch):
    """A list of paths with weights is read, and refused where it is not one.

    Catches a path that is cut at a comma, and a weight that is none.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "b.bin", "my b,c:d.bin", "e.bin:0.5"):
        Path(name).write_bytes(b"")
    if isinstance(expected, str):
        with raises(ValueError, match=re.escape(expected)):
            data.parse_mixture(text)
    else:
        assert data.parse_mixture(text) == expected


def mixture(tmp_path: Path, weights: dict[str, float], windows=(60, 7, 200)) -> data.Mixture:
    """Return the training sequences of files whose ids say the file and the window."""
    pairs = []
    for k, (name, count) in enumerate(zip(weights, windows)):
        path = write_ids(tmp_path / f"{name}.bin", np.repeat(1000 * k + np.arange(count), 4))
        pairs.append(data.split(data.open_corpus(str(path))[0], None, 4, 5)[0])
    shares = data.block_shares([data.Source(*item) for item in weights.items()])
    return data.Mixture(tuple(pairs), tuple(shares))


def test_data_mixtures_are_exact(tmp_path):
    """Each block of 1000 samples has each source's exact share, spread evenly, and each source has
    epochs of its own.

    Sample i is the same whatever was drawn before. Catches a source that is drawn too often, and an
    order that depends on the ranks or on a resume.
    """
    mixed = mixture(tmp_path, {"a": 2, "b": 1, "c": 3 * 10**-1})
    assert mixed.shares == (606, 303, 91)
    firsts = [int(mixed.sample(i).tokens[0]) for i in range(3000)]
    for start in (0, 1000, 2000):
        sources = [first // 1000 for first in firsts[start : start + 1000]]
        assert [sources.count(k) for k in range(3)] == [606, 303, 91]
        for n in range(1000):  # after any number of samples, the shares hold up to two samples
            assert abs(sources[:n].count(1) - 0.303 * n) < 2
    for k, source in enumerate(mixed.sources):
        drawn = [first % 1000 for first in firsts if first // 1000 == k]
        epoch = sorted(drawn[: source.count])
        assert len(set(epoch)) == source.count  # each window once ...
        assert sorted(drawn[source.count : 2 * source.count]) == epoch or k == 2
        if k < 2:  # ... and the next epoch has another order
            assert drawn[: source.count] != drawn[source.count : 2 * source.count]
        assert mixed.epochs(3000)[k] == approx(len(drawn) / source.count)
    again = mixture(tmp_path, {"a": 20, "b": 10, "c": 3})
    for i in (2999, 0, 1234, 17):
        assert again.sample(i).tokens[0] == firsts[i]
    one = mixture(tmp_path, {"a": 0.1})
    assert [one.place(i) for i in (0, 999, 5000)] == [(0, 0), (0, 999), (0, 5000)]
    assert one.count == one.sources[0].count


def test_data_mixtures_round_to_thousandths(tmp_path):
    """The shares of a block add up to 1000 samples. A weight that is too small for one sample of
    them is refused.

    Catches a source that is never drawn.
    """
    weights = [data.Source(str(k), 1) for k in range(7)]
    assert sorted(data.block_shares(weights)) == [142, 143, 143, 143, 143, 143, 143]
    with raises(ValueError, match="weight 0.0001 of b is less than a thousandth of all .*0.001"):
        data.block_shares([data.Source("a", 1), data.Source("b", 1e-4)])
    assert data.block_shares([data.Source("a", 1e308), data.Source("b", 1e308)]) == [500, 500]


def test_data_mixtures_validate_in_proportion(tmp_path):
    """An evaluation has each source's held-out windows in proportion and in their order, and a
    source whose windows are used up begins again. Catches an evaluation of the first source only,
    and one that draws windows of a source which it trains on."""
    sizes = 4000, 1600
    pairs = []
    for k, size in enumerate(sizes):
        path = write_ids(tmp_path / f"{k}.bin", 5000 * k + np.arange(size))
        pairs.append(data.split(data.open_corpus(str(path))[0], None, 8, 0))
    validation = data.Mixture(tuple(val for _, val in pairs), (750, 250))
    assert [val.count for _, val in pairs] == [24, 9] and validation.count == 36
    windows = [validation.window(i).tokens.tolist() for i in range(64)]
    of_second = [window for window in windows if window[0] >= 5000]
    of_first = [window for window in windows if window[0] < 5000]
    assert len(of_second) == 16
    for (_, val), found in zip(pairs, (of_first, of_second)):
        assert found == [val.window(n % val.count).tokens.tolist() for n in range(len(found))]


def test_data_mixtures_say_which_source_is_not_evaluated(tmp_path, capsys):
    """If a source has too few samples for one of the sequences of an evaluation, a run says so.

    Catches a val_loss that is believed to be the mean over all sources.
    """
    for name in ("a", "b"):
        (tmp_path / name).write_text("the grass is green\n" * 2000)
    spelt = f"--data {tmp_path}/a:300,{tmp_path}/b:1"
    train.main(f"{QUICK_FLAGS} --steps 8 --eval-every 8 --out {tmp_path}/o {spelt}".split())
    of_sources = re.findall("source .*/([ab]): (.*)", capsys.readouterr().out)
    note = f"; none of the {train.EVAL_SEQUENCES} sequences of an evaluation is from it"
    assert [(name, note in text) for name, text in of_sources] == [("a", False), ("b", True)]
    # a resumed run counts the epochs of the steps that were done before it, too
    train.main(f"{QUICK_FLAGS} --steps 400 --dry-run --out {tmp_path}/new {spelt}".split())
    expected = re.findall("[0-9.]+ epochs until step 400", capsys.readouterr().out)
    train.main(f"--device cpu --steps 400 --resume --dry-run --out {tmp_path}/o {spelt}".split())
    assert re.findall("[0-9.]+ epochs until step 400", capsys.readouterr().out) == expected != []


def test_data_special_tokens_need_a_tokenizer(tmp_path):
    """--special-tokens without --tokenizer is refused. Catches a flag that does nothing."""
    with raises(ValueError, match="--special-tokens: .* Drop --special-tokens, or pass --token"):
        train.main(f"{QUICK_FLAGS} --special-tokens --out {tmp_path}/o".split())


def test_data_mixtures_have_one_tokenizer(tmp_path):
    """Sources of different tokenizers, or of bytes and ids, are refused by name.

    Catches ids that mean different things in two sources.
    """
    for name, sidecar in (("a", {"vocab": 90}), ("b", {"vocab": 80}), ("c", {})):
        write_ids(tmp_path / f"{name}.bin", np.arange(60), **sidecar)
    (tmp_path / "d.txt").write_text("text")
    write_ids(tmp_path / "e.bin", np.arange(60), vocab=256)
    names = ("a.bin", "b.bin", "c.bin", "d.txt", "e.bin")
    a, b, c, d, e = (data.open_corpus(str(tmp_path / name))[0] for name in names)
    for corpora, message in (
        ([a, b], "90 ids in .*a.bin and 80 ids in .*b.bin"),
        ([d, c], "c.bin has token ids, but .*d.txt is text"),
        ([a, d], "a.bin has token ids, but .*d.txt is text.* --tokenizer"),
    ):
        with raises(ValueError, match=message):
            data.check_same_ids(corpora, 256)
    data.check_same_ids([a, c], 256)
    data.check_same_ids([d, e], 256)


def test_data_mixtures_hold_out_their_own(tmp_path):
    """No window is both trained on and evaluated, however many epochs a source has. A file that two
    sources have is refused.

    Catches a validation loss on training data.
    """
    paths = [write_ids(tmp_path / "d" / f"{k}.bin", np.arange(900) + 900 * k) for k in range(2)]
    pairs = [data.split(data.open_corpus(str(path))[0], None, 8, 0) for path in paths]
    training, validation = (data.Mixture(tuple(part), (900, 100)) for part in zip(*pairs))
    drawn = {int(token) for i in range(3000) for token in training.sample(i).tokens[:-1]}
    held_out = {int(token) for i in range(999) for token in validation.window(i).tokens[1:]}
    assert len(drawn) > 1600 and len(held_out) == 80 and not drawn & held_out

    (tmp_path / "link.bin").symlink_to(paths[1])
    for other in (paths[1], tmp_path / "link.bin"):
        with raises(ConfigError, match="two sources have the same file, .*/d/1.bin and .*.bin. Th"):
            main(f"--data {tmp_path}/d:1,{other}:1 --out {tmp_path}/o")
        dist.destroy_process_group()


@slow
def test_data_mixtures_on_other_ranks(tmp_path, capfd):
    """A mixture on one rank, and on two after a resume, has the same losses at each step.

    The losses are those of the first weights on the samples that Mixture says. Catches an order of
    samples that depends on the ranks, and a resume that begins again.
    """
    text = tmp_path / "my text.txt"
    text.write_text("the grass is green\r\n" * 90)
    path = conversations(tmp_path / "ids.bin")
    sidecar = json.loads(Path(f"{path}.json").read_text())
    Path(f"{path}.json").write_text(json.dumps(sidecar | {"vocab": 256}))
    flags = f"--dtype fp64 --lr 0 --batch 4 --document-token 10 --out {tmp_path}/o --steps".split()
    spelt = ["--data", f"{path}:3,{text}:1"]
    train.main(f"{QUICK_FLAGS}".split() + flags + ["1"] + spelt)
    run(f"--steps 3 --batch 4 --out {tmp_path}/o --resume", 2)
    said = capfd.readouterr().out
    assert re.search(r"source .*my text.txt: 25.0% of the samples; 1,800 tokens, 54 training", said)
    assert "0.03 epochs until step 1" in said  # 3 of 89 sequences
    assert "of an evaluation" not in said
    shares = data.parse_mixture(spelt[1])
    pairs = [data.split(data.open_corpus(share.path)[0], None, 32, 0)[0] for share in shares]
    mixed = data.Mixture(tuple(pairs), tuple(data.block_shares(shares)))
    for step, row in enumerate(read_log(tmp_path / "o")):
        windows = [mixed.sample(4 * step + i) for i in range(4)]
        assert row["loss"] == approx(bare_loss(windows, 10), rel=1e-11)


# ---------------------------------------------------------------------------- edges


def test_data_edges_of_documents_and_files(tmp_path):
    """Empty files, files of one token, Windows line ends and one long document are read unchanged.

    Catches a token that is lost or added at an end.
    """
    folder = tmp_path / "a folder"
    for name, sizes in (("a", []), ("b", [5]), ("c", range(7, 60)), ("d", [])):
        write_ids(folder / f"{name}.bin", np.array(sizes, int), np.ones(len(sizes)))
    corpus, _ = data.open_corpus(str(folder))
    data.check_tokens([corpus], 256, 0, 1)
    assert corpus.read(0, len(corpus)).tokens.tolist() == [5, *range(7, 60)]
    assert corpus.read(0, 1).tokens.tolist() == [5] and corpus.read(53, 54).is_label.all()

    make_tokenizer(tmp_path / "hf", "the grass is green\r\n", 1)
    text = tmp_path / "a folder" / "line ends.txt"
    text.write_bytes(b"the grass\r\nis\rgreen\n\r\n")
    path, _ = prepare.tokenise_data(str(text), f"{tmp_path}/hf", tmp_path / "t")
    assert len(data.open_corpus(path)[0]) == text.stat().st_size + 1


def test_data_of_no_tokens_are_too_few(tmp_path):
    """An empty text is refused because it has too few tokens. A val.bin beside texts is refused
    because bytes and ids do not mix.

    Catches an error that says that an empty file does not exist.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("")
    said = run(f"--data {tmp_path}/a --seq 8 --out {tmp_path}/o", expect=1)
    assert "--seq 8: the data has 0 tokens, too few for training" in said
    (tmp_path / "a" / "a.txt").write_text("the grass is green\n" * 90)
    np.zeros(101, "<u2").tofile(tmp_path / "a" / "val.bin")
    (tmp_path / "a" / "val.bin.json").write_text('{"token_bytes": 2}')
    said = run(f"--data {tmp_path}/a --seq 8 --out {tmp_path}/o", expect=1)
    assert re.search("val.bin has token ids, but .*a.txt is text", said)


def test_data_several_labels_end_with_their_document(tmp_path, monkeypatch, group):
    """With several labels per token, no label lies in a later document than its token, and the loss
    is divided by the number of tokens whose first label counts.

    Catches a label two tokens ahead that is predicted across the end of a document.
    """
    monkeypatch.setattr(m.LLaMA, "labels_ahead", 3)
    ids = np.array([5, 6, 10, 7, 10, 10, 8, 9, 3, 4, 10, 2, 1] * 9)
    corpus, _ = data.open_corpus(str(write_ids(tmp_path / "ids.bin", ids, document_token=10)))
    sequences, _ = data.split(corpus, None, 16, 0, ahead=3)
    plan = costs.Plan(m.MODELS["tiny"], torch.float32, 1, 1, 16, batch=2)
    run = train.Run(train.Config(), 0, torch.device("cpu"), "cpu", plan, training=sequences)
    batch = train.load_batch(replace(run, cfg=replace(run.cfg, document_token=10)), 0)
    labels = batch.labels.flatten(0, 1)  # (2, T, 3)
    for i in range(2):
        tokens = sequences.sample(i).tokens.tolist()
        for t, ahead in itertools.product(range(16), range(3)):
            crosses = 10 in tokens[t : t + 1 + ahead]
            expected = m.IGNORE if crosses else tokens[t + 1 + ahead]
            assert labels[i, t, ahead] == expected, (i, t, ahead)
    first_labels = (labels[..., 0] != m.IGNORE).sum().item()
    assert batch.valid_labels == first_labels and batch.scale == approx(1 / first_labels)


def test_data_of_the_same_size_are_told_apart(tmp_path):
    """Data that differ only in their first, middle or last token, in a mask, or in where one file
    ends, are different data to a resumed run.

    Catches other data that a run goes on with as if it had seen half of them.
    """
    ids = np.zeros(200_000, int)
    contents = []
    for changed in ([], [0], [99_999], [199_999]):
        edited = ids.copy()
        edited[changed] = 1
        path = write_ids(tmp_path / "ids.bin", edited)
        contents.append(data.open_corpus(str(path))[0].content)
    path = write_ids(tmp_path / "ids.bin", ids, mask=np.arange(200_000) != 0)
    contents.append(data.open_corpus(str(path))[0].content)
    for count in (100, 200):
        write_ids(tmp_path / str(count) / "a.bin", ids[:count])
        write_ids(tmp_path / str(count) / "b.bin", ids[count:])
        contents.append(data.open_corpus(f"{tmp_path}/{count}")[0].content)
    assert len({*contents}) == len(contents)
