"""Show that sample.py writes the model's text, from a checkpoint and from a Hugging Face folder.

Its greedy texts are compared with those of transformers. A folder that cannot be read is refused by
name.
"""

import io
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from pytest import approx, raises

import checkpoint
import data
import hf
import sample
import train
from helpers import edit_meta, hf_model, make_tokenizer
from test_all import ROOT, main, parametrize, read_log, run, slow

CPU = torch.device("cpu")
TEXT = "one two three four five six seven\n" * 99


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with folders that sample.py reads:

    run       a run on bytes
    export    the export of this run
    text      a tokenizer
    words     a run with this tokenizer
    ids       a run on a file of ids, which does not say which tokenizer made them
    """
    folder = tmp_path_factory.mktemp("sample")
    make_tokenizer(folder / "text", TEXT, 40)
    (folder / "a.txt").write_text(TEXT)
    (folder / "ids.bin").write_bytes(bytes([1, 0, 7, 0]) * 999)
    (folder / "ids.bin.json").write_text('{"token_bytes": 2}')
    flags = "--steps 2 --save-every 1 --lr 0.02 --warmup 0"
    run(f"{flags} --data {folder}/a.txt --out {folder}/run --export {folder}/export")
    run(f"{flags} --data {folder}/a.txt --tokenizer {folder}/text --out {folder}/words")
    run(f"--steps 1 --data {folder}/ids.bin --out {folder}/ids")
    return folder


def load(folder: Path, tokenizer: str = "") -> sample.Loaded:
    return sample.load(str(folder), tokenizer, CPU, torch.float32)


def greedy(loaded: sample.Loaded, prompt: list[int], count: int) -> list[int]:
    ends = loaded.vocabulary.end_tokens
    return list(sample.generate(loaded.model, prompt, count, 0.0, ends))


def write(*argv: str) -> tuple[int, str]:
    """Run sample.py in this process. Return its exit status, and the text that it writes."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(written):
        status = sample.main([*map(str, argv)])
    return status, written.buffer.getvalue().decode()


# ---------------------------------------------------------------------------- what is written


def greedy_of_transformers(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers draws greedily after a prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([prompt])
    drawn = model.generate(tokens, do_sample=False, max_new_tokens=count, pad_token_id=0)
    return drawn[0, len(prompt) :].tolist()


@slow
def test_greedy_text_equals_transformers(folders):
    """From a checkpoint and from its export, the greedy text is that of transformers.

    Catches positions, a mask or a rounding that differ from those in training, and a wrong weight.
    """
    prompt = [*b"one two"]
    theirs = greedy_of_transformers(folders / "export", prompt, 20)
    assert len(theirs) == 20 and len(set(theirs)) > 1
    for name in ("run", "run/step-00000002", "export"):
        assert greedy(load(folders / name), prompt, 20) == theirs, name
    assert greedy(load(folders / "run/step-00000001"), prompt, 20) != theirs


@slow
@parametrize("name", ["run", "export"])
def test_weights_are_rounded_as_training_rounds_them(name, folders, monkeypatch):
    """In bf16 a weight in the middle between two bf16 numbers is rounded away from zero, as in
    training, from a checkpoint and from a Hugging Face folder. Norms stay in float32.

    Catches PyTorch's rounding, to the number whose last bit is 0, and norms that lose their small
    digits.
    """
    tie = 1 + 2.0**-8
    open_weights, load_model = checkpoint.open_weights, hf.load_model

    def open_ties(*args):
        read = open_weights(*args)
        return lambda weight: torch.full_like(read(weight), tie)

    def load_ties(folder: str):
        model = load_model(folder)
        for p in model.parameters():
            p.data.fill_(tie)
        return model

    monkeypatch.setattr(checkpoint, "open_weights", open_ties)
    monkeypatch.setattr(hf, "load_model", load_ties)
    loaded = sample.load(str(folders / name), "", CPU, torch.bfloat16)
    for weight in loaded.model.parameters():
        is_matrix = weight.dim() > 1
        assert weight.dtype == (torch.bfloat16 if is_matrix else torch.float32)
        assert (weight == (1 + 2.0**-7 if is_matrix else tie)).all()


@parametrize("kind", ["llama", "qwen3"])
def test_greedy_text_of_an_import_equals_transformers(kind, tmp_path):
    """The greedy text of a Hugging Face folder is that of transformers, up to the end token.

    The folder's config.json names two end tokens, 77 and 78, and its tokenizer a third one. Catches
    an end token that is not found.
    """
    hf_model(tmp_path / "in", kind, head_dim=16, eos_token_id=[77, 78])
    prompt = [3, 5, 250]
    make_tokenizer(tmp_path / "text", TEXT)
    (tmp_path / "text/tokenizer.json").rename(tmp_path / "in/tokenizer.json")
    (tmp_path / "text/tokenizer_config.json").rename(tmp_path / "in/tokenizer_config.json")
    loaded = load(f"hf:{tmp_path}/in")
    (end,) = load(tmp_path / "in").vocabulary.end_tokens - {77, 78}
    assert loaded.model.cfg.vocab == 300 and loaded.vocabulary.encode("<end>") == [end]

    # without end tokens, our text goes on where that of transformers ends
    drawn = list(sample.generate(loaded.model, prompt, 20, 0.0))
    theirs = greedy_of_transformers(tmp_path / "in", prompt, 20)
    stop = next((i for i, token in enumerate(drawn) if token in (77, 78, end)), 20)
    assert stop > 5
    assert drawn[:stop] == [token for token in theirs if token not in (77, 78)][:stop]
    # with one of the drawn tokens as the end token, the text ends before it
    ended = list(sample.generate(loaded.model, prompt, 20, 0.0, {drawn[5]}))
    assert ended == drawn[: drawn.index(drawn[5])]


@slow
def test_greedy_text_of_a_tied_import_equals_transformers(tmp_path):
    """A tied model, whose head is its embedding, is read from a folder and from a checkpoint.

    Catches a head that is not in the files, and is left without values.
    """
    hf_model(tmp_path / "in", "qwen2", tie_word_embeddings=True)
    flags = f"--init hf:{tmp_path}/in --steps 1 --lr 0.02 --warmup 0"
    run(f"{flags} --out {tmp_path}/run --export {tmp_path}/export")
    prompt = [3, 5, 250]
    for folder, ours in (("in", "in"), ("export", "export"), ("export", "run")):
        loaded = load(tmp_path / ours, "bytes")
        assert loaded.model.cfg.tied and loaded.positions == 256
        drawn = list(sample.generate(loaded.model, prompt, 12, 0.0))
        theirs = greedy_of_transformers(tmp_path / folder, prompt, 12)
        assert len(theirs) > 3 and drawn[: len(theirs)] == theirs, ours


@parametrize("flags", ["", "--architecture gemma --attention local", "--architecture lora --lr 1"])
def test_a_checkpoint_has_the_run_s_validation_loss(flags, tmp_path):
    """The model of a checkpoint has the loss that the run's last evaluation had.

    This holds also for a fork with its own layers and kernel, and for adapters on a frozen model.
    Catches a kernel or a layer that sample.py replaces by Llama's, and frozen weights that are not
    read.
    """
    run(f"--steps 3 --lr 0.02 --warmup 0 --eval-every 0 {flags} --out {tmp_path}")
    val_loss = read_log(tmp_path)[-1]["val_loss"]
    model = load(tmp_path).model
    corpus, _ = data.open_corpus(train.Config.data)
    _, validation = data.split(corpus, None, 32, 0)
    count = train.EVAL_SEQUENCES
    windows = torch.stack([torch.from_numpy(validation.window(i).tokens) for i in range(count)])
    losses = model(windows[:, :-1], windows[:, 1:].contiguous(), per_token=True)
    assert losses.mean().item() == approx(val_loss, rel=1e-5)


@slow
def test_text_of_a_split_model_equals_that_of_its_export(tmp_path):
    """A checkpoint of tensor-parallel ranks gives the weights that an export has. If the optimizer
    averages the weights, both have the average.

    Catches a slice of a matrix at a wrong place, and text of other weights than the export's.
    """
    flags = "--steps 2 --lr 0.02 --warmup 0 --tp 2 --tp-mode msp --optimizer ema"
    run(f"{flags} --out {tmp_path}/run --export {tmp_path}/export", 2)
    ours, exported = load(tmp_path / "run"), load(tmp_path / "export")
    for name, weight in exported.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], weight), name


def test_text_of_a_tokenizer(folders, capsys):
    """A run with a tokenizer is sampled with it, also from another folder by --tokenizer.

    Catches ids that are shown as bytes, and a document's end that does not end the text.
    """
    loaded = load(folders / "words")
    (end,) = loaded.vocabulary.end_tokens
    prompt = loaded.vocabulary.encode("one two")
    assert loaded.vocabulary.decode([*prompt, end]) == "one two<end>"
    drawn = greedy(loaded, prompt, 20)
    status, text = write(
        folders / "words", "--prompt", "one two", "--temperature", "0", "--tokens", "20"
    )
    assert status == 0 and text == loaded.vocabulary.decode(prompt + drawn) + "\n"
    assert f"The tokenizer is that of {folders}/text" in capsys.readouterr().err
    for tokenizer in (folders / "text", "bytes"):
        status, text = write(
            folders / "ids", "--prompt", "one", "--tokens", "2", "--tokenizer", tokenizer
        )
        assert status == 0 and text.startswith("one")


def test_prompts_keep_the_end_tokens_that_they_spell(tmp_path):
    """If a tokenizer puts an end token after each text, a prompt loses it, but keeps an end token
    that it spells.

    Catches a text that ends before it begins, and a turn's end that a prompt for a chat lacks.
    """
    from tokenizers import Tokenizer, processors

    folder = tmp_path / "text"
    make_tokenizer(folder, TEXT)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing("$A <end>", None, [("<end>", end)])
    tokenizer.save(f"{folder}/tokenizer.json")
    encode = sample.tokens_of(folder, -1, add_special_tokens=True).encode
    plain = sample.tokens_of(folder, -1, add_special_tokens=False).encode
    assert encode("one") == plain("one") and plain("one")
    assert encode("one<end>") == plain("one<end>") == [*plain("one"), end]


@parametrize("adds", ["", "<s> $A", "<s> $A <end>"])
def test_special_tokens_of_a_prompt_are_shown(adds, tmp_path):
    """The text has the special tokens that the prompt spells and that the model draws, but not
    those that the tokenizer puts around the prompt.

    Catches a conversation whose turns cannot be told apart.
    """
    from tokenizers import Tokenizer, processors

    folder = tmp_path / "text"
    make_tokenizer(folder, TEXT)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.add_special_tokens(["<s>", "<|user|>"])
    if adds:
        rows = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "<end>")]
        tokenizer.post_processor = processors.TemplateProcessing(adds, None, rows)
    tokenizer.save(f"{folder}/tokenizer.json")
    vocabulary = sample.tokens_of(folder, -1, add_special_tokens=True)
    drawn = [tokenizer.token_to_id("<|user|>"), *tokenizer.encode("two").ids[-1:]]
    for prompt in ("<|user|>one<end>\n", "<s>one", "one two"):
        ids = vocabulary.encode(prompt)
        text = "".join(sample.stream(vocabulary.decode, ids, drawn))
        assert text.startswith(f"{prompt}<|user|>"), text
        assert text == prompt + tokenizer.decode(drawn, skip_special_tokens=False)


def test_sampling_is_reproducible(folders):
    """The same seed draws the same text. A small temperature draws the greedy text.

    Catches random numbers that another part of the program draws, and a division that overflows.
    """
    model = load(folders / "run").model
    prompt = [*b"one"]

    def texts(temperature: float, *seeds: int) -> list[list[int]]:
        return [list(sample.generate(model, prompt, 20, temperature, seed=seed)) for seed in seeds]

    one, again, other = texts(1.0, 1, 1, 2)
    assert one == again != other
    cold, coldest, zero, zero_again = texts(1e-9, 3) + texts(5e-324, 4) + texts(0.0, 5, 6)
    assert cold == coldest == zero == zero_again


def test_draw_follows_the_probabilities():
    """Tokens are drawn as often as softmax(logits / temperature) says.

    Catches a temperature that multiplies.
    """
    logits = torch.tensor([0.0, 1.0, 3.0, -40.0], dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample.draw(logits, 2.0, random) for _ in range(4000)])
    shares = drawn.bincount(minlength=4) / 4000
    assert torch.allclose(shares.double(), (logits / 2).softmax(0), atol=0.03)
    with raises(ValueError, match="not finite"):
        sample.draw(torch.tensor([0.0, torch.nan]), 1.0, random)


def test_stream_shows_whole_characters():
    """A character is shown when it is complete. The replacement character stands for bytes that are
    not UTF-8, and for control characters.

    Catches half a character, a text that is held back for ever, and a text that changes the
    terminal.
    """
    decode = sample.bytes_as_tokens().decode
    pieces = list(sample.stream(decode, [*b"a"], "é€🎉".encode()))
    assert "".join(pieces) == "aé€🎉" and pieces[:2] == ["a", "é"]
    pieces = list(sample.stream(decode, [*b"a"], [0xC3, 0x28, 300, 0xFF, 0x41, 0xE2, 0x82]))
    assert "".join(pieces) == "a\ufffd(\ufffd\ufffdA\ufffd"
    assert "".join(sample.stream(decode, [0xFF], [])) == "\ufffd"
    assert sample.printable("a\x1b[2J\x9b\r\n\tü\u3000") == "a\ufffd[2J\ufffd\ufffd\n\tü\u3000"


# ---------------------------------------------------------------------------- what is refused


@parametrize(
    "argv, sentence",
    [
        ("nothing", "FOLDER nothing: there is no such folder. Did you mean ids or run or words?"),
        (".", "(step-N) nor a Hugging Face model (config.json). Did you mean ids or run or words?"),
        ("text", "has neither a checkpoint"),
        ("a.txt", "FOLDER a.txt is a file. Pass the folder of a run or of a model"),
        ("hf:run", "run: there is no run/config.json"),
        ("ids", "does not say which tokenizer made them. Pass --tokenizer DIR, or --tokenizer by"),
        ("run --tokenizer nothing", "--tokenizer nothing: there is no such folder"),
        ("run --tokenizer text/tokenizer.json", "is a file. Pass its folder: --tokenizer text"),
        ("run --tokenizer run", "--tokenizer run: the folder has no tokenizer.json"),
        ("run --tokens 0", "--tokens 0: choose at least 1"),
        ("run --tokens 1024", "reaches 1024 positions, and the prompt takes 1 of them. Choose at "
         "most --tokens 1023"),
        ("run --prompt " + 2000 * "a", "--prompt: it has 2000 tokens, and the model reaches 1024 "
         "positions. Shorten it to at most 1023"),
        ("run --prompt=", '--prompt "": the model continues a text'),
        ("run --prompt \udcff", "is not UTF-8 text"),
        ("words --prompt qz", "the tokenizer makes no tokens of it"),
        ("run --temperature -1", "--temperature -1.0: choose 0, or a positive number"),
        ("run --temperature nan", "--temperature nan: choose 0, or a positive number"),
        ("run --seed -1", "--seed -1: choose a whole number from 0"),
        ("run --device cuda", "Pass --device cpu"),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_sample_refuses(argv, sentence, folders, monkeypatch, capsys):
    """A wrong flag or folder is refused with the nearest legal choice, and exit status 2.

    Catches a traceback, and an error after a long wait for the weights.
    """
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(folders)
    assert write(*argv.split(" ")) == (2, "")
    error = capsys.readouterr().err
    assert error.startswith("sample.py: error: ") and sentence in error


def test_usage_takes_one_line(capsys):
    """Before an error of argparse there is one line, as in train.py.

    Catches an error that is hard to find below a list of all flags.
    """
    with raises(SystemExit):
        sample.main(["--token=5"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith(" [FOLDER] [flags]")
    assert error.endswith("error: unrecognized arguments: --token=5")


def test_several_processes_are_refused(folders, monkeypatch, capsys):
    """torchrun with one process may start sample.py, but not with two.

    Catches a text that is written twice, by two processes at once.
    """
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert write(folders / "run", "--tokens", 1)[0] == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    capsys.readouterr()
    assert write(folders / "run") == (2, "")
    sentence = "sample.py: error: sample.py is one process: start it without torchrun\n"
    assert capsys.readouterr().err == sentence


def break_file(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_meta(change: str):
    return lambda folder: edit_meta(folder / "meta.json", change)


def link(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.rename(folder.parent / "moved")
    file.symlink_to(folder.parent / "moved")


@parametrize(
    "damage, sentence",
    [
        (break_file, "is not what was written: its checksum differs"),
        (link, "is no regular file"),
        (change_meta("c['config']['tokenizer'] = 7"), "the flags in the checkpoint's meta.json"),
        (change_meta("c['config']['model'] = '160m'"), "is of another model"),
        (change_meta("c['model']['layers'] = 10**9"), "is of another model"),
        (change_meta("c['config']['attention'] = 'evil'"), "--attention evil"),
    ],
)
def test_damaged_checkpoints_are_refused(damage, sentence, tmp_path, capsys):
    """A checkpoint that is not what was written is refused by name. If the folder of its run is
    named, and the files of the checkpoint are damaged, the checkpoint before it is read.

    Catches text of weights that nobody trained.
    """
    main(f"--steps 2 --save-every 1 --out {tmp_path}/run")
    newest = tmp_path / "run/step-00000002"
    damage(newest)
    capsys.readouterr()
    assert write(newest) == (2, "") and sentence in capsys.readouterr().err
    if damage in (break_file, link):
        assert write(tmp_path / "run", "--tokens", "2")[0] == 0
        error = capsys.readouterr().err
        assert "passed over: " in error and f"{tmp_path}/run/step-00000001: 1,8" in error


def test_a_checkpoint_of_changed_files_is_refused(folders):
    """A checkpoint whose weights are not those of the model is refused by their names.

    Catches a fork's weight that is left out.
    """
    saved = checkpoint.choose_in_one_process(folders / "run")
    shapes = {name: tuple(p.shape) for name, p in load(folders / "run").model.named_parameters()}
    checkpoint.open_weights(saved, shapes)("norm.weight")
    for changed in (
        {name: shape for name, shape in shapes.items() if name != "norm.weight"},
        shapes | {"norm.weight": (191,)},
        shapes | {"blocks.0.gate.weight": (6, 192)},
    ):
        with raises(ValueError, match="another model than this one: (norm|blocks.0.gate).weight "):
            checkpoint.open_weights(saved, changed)


@slow
def test_sample_as_a_program(folders):
    """The program writes only the text to its standard output, in any encoding. It ends without an
    error if the reader of its output has ended.

    Catches a message in the text, and an error in place of a text.
    """
    program = [sys.executable, ROOT / "sample.py", "run", "--prompt", "é ", "--tokens", "9"]
    done = subprocess.run(
        program,
        cwd=folders,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and done.stdout.startswith(b"? ") and done.stdout.endswith(b"\n")
    assert b"run/step-00000002: 1,869,504 parameters on CPU in fp32" in done.stderr

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(program, cwd=folders, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 0 and b"Error" not in done.stderr


def test_make_train_ends_with_a_text():
    """`make train` trains, and then samples from the folder in which it has trained. Both commands
    parse.

    Catches a first run that shows no text of its model.
    """
    lines = (ROOT / "Makefile").read_text().splitlines()
    commands = [line.split() for line in lines if line.startswith("\t.venv/bin/python ")]
    (trains,) = [words[2:] for words in commands if words[1] == "train.py"]
    (samples,) = [words[2:] for words in commands if words[1] == "sample.py"]
    flags = sample.make_parser().parse_args(shlex.split(" ".join(samples)))
    assert flags.folder == train.parse(trains)["out"] and flags.tokens == 200
