"""Check which tokens come next: text, files of ids, tokenizers, and the order of samples."""

import contextlib
import itertools
import json
import os
import re

import numpy as np
import torch
import torch.nn.functional as F
from pytest import approx, raises

import data
import model as m
import train
from helpers import make_tokenizer
from test_all import main, parametrize, read_log, run, seeded_model, slow


def test_data_default_is_large_sorted_text():
    """The default data have enough text for a sequence of a million tokens, in a fixed order.

    Without `--data` they are the standard library's sources. Catches data that are too small for a
    long sequence.
    """
    corpus, val = data.open_corpus("stdlib")
    paths = [file.path for file in corpus.files]
    assert val is None and paths == sorted(paths)
    sequences, val = data.split(corpus, None, 2**20, 0)
    assert sequences.count >= 8 and val.count >= 1


def test_data_windows_cover_everything_once(tmp_path):
    """In each epoch samples cover all data once, in a new order that needs no history.

    Samples cross the borders of files, one of which is empty. Catches a sample that is drawn twice,
    and a token that is lost at a file's end.
    """
    text = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    (tmp_path / "sub").mkdir()
    for name, part in zip(("0", "1", "2", "sub/3"), np.split(text, [10, 10, 503])):
        part.tofile(tmp_path / name)
    windows = [text[start : start + 11].tolist() for start in range(0, 989, 10)]
    corpus, _ = data.open_corpus(str(tmp_path))
    orders = [windows[:95]]  # a twentieth of the 99 windows is held out
    for seed, epoch in ((5, 1), (5, 0), (6, 0)):
        sequences, val = data.split(corpus, None, 10, seed)
        assert [val.window(i).tokens.tolist() for i in range(val.count)] == windows[95:]
        orders.append([sequences.sample(95 * epoch + i).tokens.tolist() for i in range(95)])
        assert sorted(orders[-1]) == sorted(windows[:95])
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@parametrize(
    "width, most, said, of_val, vocab, message",
    [
        (2, 65_536, "", "", 65_536, ""),
        (2, 300, '{"token_bytes": 2, "ignore": 5}', "", 70_000, ""),
        (4, 70_000, '{"token_bytes": 4, "vocab": 70000}', '{"token_bytes": 4}', 70_000, ""),
        (2, 300, '{"token_bytes": 2}', '{"token_bytes": 4}', 2**32, ""),  # each file has its own
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
        (2, 300, '{"token_bytes": 2, "mask": 1}', "", 300, "mask is no name of a file"),
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
def test_data_token_files(width, most, said, of_val, vocab, message, tmp_path):
    """Files of ids have two or four bytes per id, as FILE.bin.json says.

    Without it, the file must tell. Catches ids that are read at another width or place.
    """
    ids = np.random.default_rng(0).integers(0, most, 20_000)
    for name, sidecar in (("train", said), ("val", of_val or said)):
        dtype = (
            f"<u{json.loads(sidecar)['token_bytes']}" if not message and sidecar else f"<u{width}"
        )
        ids.astype(dtype).tofile(tmp_path / f"{name}.bin")
        if sidecar:
            (tmp_path / f"{name}.bin.json").write_text(sidecar)
    with raises(ValueError, match=message) if message else contextlib.nullcontext():
        corpora = data.open_corpus(str(tmp_path))
        data.check_same_ids(corpora, vocab)
        data.check_tokens(corpora, vocab, 0, 1)
        for corpus in corpora:
            window = corpus.read(777, len(corpus))
            assert np.array_equal(window.tokens, ids[777:])
            assert np.array_equal(window.counts, ids[777:] != (5 if "ignore" in said else -1))
        os.truncate(tmp_path / "val.bin", 0)
        with raises(ValueError, match="20000 tokens, its val.bin 0, too few"):
            data.split(*data.open_corpus(str(tmp_path)), 8, 0)


def test_data_tokenised_text(tmp_path, capsys):
    """Text gets the token ids that transformers gives it, and an end token after each file.

    Files are read in parts, some are empty, and there are many. A line that a part cuts loses
    nothing. Catches text that is lost or cut, and the ids of another tokenizer.
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
    path, last = data.tokenise(*args)
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
    assert (
        data.tokenise(*args) == (path, last) and not capsys.readouterr().err
    )  # the file that the earlier call wrote
    os.utime(tmp_path / "text" / "02.txt", (1, 1))
    assert data.tokenise(*args)[0] != path
    assert data.tokenise(path, "no folder", tmp_path) == (path, -1)  # the file has ids already


def test_data_tokenised_to_four_bytes(tmp_path):
    """Ids of 2^16 and more have four bytes, and bad texts are refused.

    Refused are a file that is not text, ids beyond the model's vocabulary, and texts without an end
    token. No half-written file is left. Catches ids that are cut to two bytes.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel({**words, "the end": 70_000}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    text = tmp_path / "a.txt"
    text.write_text("w69999 w5\nw65536")

    def tokenise() -> data.Corpus:
        return data.open_corpus(data.tokenise(str(text), str(tmp_path), tmp_path / "t")[0])[0]

    for config, message in (
        ("{}", "it has no end token.*--document-token ID"),
        ('{"eos_token": null}', "it has no end token.*--document-token ID"),
        ('{"eos_token": "of"}', "its end token cannot be read.*KeyError: 'of'"),
        ("[", "its end token cannot be read"),
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
    with raises(ValueError, match="a.txt is not UTF-8 text: .* at byte 3"):
        tokenise()
    assert len([*(tmp_path / "t").iterdir()]) == 2  # the ids, and the json about them


@slow
def test_data_tokenised_by_the_first_of_two_ranks(tmp_path):
    """The second rank waits while the first one tokenises, even longer than --timeout.

    Then it ends with the first rank's error message. Catches a wait that is too short.
    """
    text = tmp_path / "a.txt"
    text.write_text("the grass is green " * 999)
    make_tokenizer(tmp_path / "hf", text.read_text(), 1)  # the text's letters, and an end token
    flags = f"--steps 0 --save-every -1 --tokenizer {tmp_path}/hf --data {text} --out {tmp_path}/o"
    code = """
tokenise = train.tokenise
train.tokenise = lambda *args: (time.sleep(10), tokenise(*args))[1]
"""
    said = run(f"{flags} --timeout 8", 2, code)
    assert f"data {text}: 18,982 tokens" in said and said.count("100%") == 1
    text.write_bytes(b"\xff" * 9999)
    said = run(flags, 2, expect=1)
    assert len(re.findall("ConfigError: .*a.txt is not UTF-8 text", said)) == 2


def bare_loss(windows: list[np.ndarray], end: int) -> float:
    """Return the mean loss of documents, each run by itself through the tiny model of seed 0.

    The label after the end of a document does not count.
    """
    model = seeded_model(m.MODELS["tiny"])
    found = []
    for window in map(torch.from_numpy, windows):
        ends = ((window[:-1] == end).nonzero().flatten() + 1).tolist()
        parts = zip(window[:-1].tensor_split(ends), window[1:].tensor_split(ends))
        for tokens, labels in parts:
            if len(tokens):
                each = F.cross_entropy(model(tokens[None])[0], labels, reduction="none")
                found.append(each[tokens != end])
    return torch.cat(found).mean().item()


def test_data_goes_on_where_it_was_left(tmp_path):
    """A resumed run reads the samples that follow in the order, with its old or a new batch size.

    The learning rate is zero, so each step's loss is that of the first weights on its documents.
    Flags that a resumed run keeps need not be given again. Catches samples that are drawn twice or
    skipped on resume, and a label that counts across a document's border.
    """
    flags = f"--out {tmp_path} --steps"
    main(f"{flags} 2 --dtype fp64 --lr 0 --document-token 10 --batch 4")
    for more in ("3", "4 --batch 2"):
        train.main(f"--device cpu --resume {flags} {more}".split())
    sequences, _ = data.split(data.open_corpus("stdlib")[0], None, 32, 0)
    ends = (0, 4, 8, 12, 14)
    for row, first, end in zip(read_log(tmp_path), ends[:-1], ends[1:], strict=True):
        windows = [sequences.sample(i).tokens for i in range(first, end)]
        assert row["loss"] == approx(bare_loss(windows, 10), rel=1e-11)
        assert 1 < row["keys_seen"] < 32
