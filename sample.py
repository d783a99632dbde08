"""Write text with a model that train.py has trained, or with one of Hugging Face's.

    python sample.py out/tiny                              the newest checkpoint of a run
    python sample.py out/tiny/step-00000200                one of its checkpoints
    python sample.py DIR --prompt "Once upon a time"       a Hugging Face folder, such as an export

A model computes a probability for each token that may come next. `generate` draws one token with
these probabilities, appends it to the text, and runs the model on the longer text:

    text      d e f   m a i        the logits of the last token, "i", decide what comes next
    drawn                   n      and so on, until --tokens are drawn or a token ends the text

--temperature divides the logits. Below 1, likely tokens become more likely. At 0 the most likely
token is always taken. With the same seed, device and dtype the text is the same.

The prompt and the text go to the standard output while the text is drawn. A line about the model
goes to the standard error:

    $ python sample.py out/tiny --prompt "def " --tokens 40
    out/tiny/step-00000200: 1,869,504 parameters on CPU in fp32. A token is a byte. ...
    def _get_attention_mask(self, config, ...

This is one process, on a CPU or on one GPU, for short texts. The whole text runs through the model
for each new token, so n tokens cost about n*n/2 times the work of one. Programs for serving, such
as vLLM, have a cache of keys and values, with which n tokens cost about n times the work of one. So
for long texts or many users, load an export (train.py --export) in such a program.

Models are read from safetensors and JSON only, so no file can run code. A checkpoint is checked as
it is before a resume (checkpoint.py).

Left out: a cache, several texts at once, chat templates, top-k and nucleus sampling.
"""

import argparse
import contextlib
import itertools
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import hf
import train
from attention import KERNELS, Attention, pick_kernel
from data import own_file
from model import LLaMA, param_count, plain_attention
from ops import accumulation_dtype
from optim import OPTIMIZERS, round_weight
from planner import DTYPES, home_path
from prepare import config_ids, load_tokenizer, named_tokens

# ---------------------------------------------------------------------------- drawing tokens


def generate(
    model: LLaMA,
    tokens: list[int],
    count: int,
    temperature: float = 1.0,
    end_tokens: Collection[int] = (),
    seed: int = 0,
) -> Iterator[int]:
    """Yield up to `count` tokens that continue `tokens`, one after the other.

    A token of end_tokens ends the text, and is not yielded. seed: seeds the random numbers, which a
    temperature of 0 does not use. Raises ValueError if a logit is not finite.
    """
    random = torch.Generator().manual_seed(seed)
    text = torch.tensor([tokens], device=model.embed.weight.device)  # (1, T)
    for _ in range(count):
        with torch.no_grad():
            logits = model(text)[0, -1]  # (V,)
        token = draw(logits.double().cpu(), temperature, random)
        if token in end_tokens:
            return
        yield token
        text = torch.cat([text, text.new_tensor([[token]])], 1)


def draw(logits: Tensor, temperature: float, random: torch.Generator) -> int:
    """Draw a token with the probabilities softmax(logits / temperature), and return it. logits
    (V,)."""
    if not logits.isfinite().all():
        raise ValueError(
            "the model computes logits that are not finite. Its training may have diverged, or "
            "--dtype may be too narrow: try --dtype fp32"
        )
    if temperature == 0:
        return int(logits.argmax())
    # After the subtraction no logit is above 0. So a tiny temperature gives -inf, whose probability
    # is 0, but never inf, which would give NaN
    probabilities = ((logits - logits.max()) / temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=random))


# ---------------------------------------------------------------------------- text and tokens


@dataclass(frozen=True)
class Vocabulary:
    """How text becomes tokens, and tokens become text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]  # takes the ids of a prompt, or of a prompt and more tokens
    end_tokens: frozenset[int]
    name: str  # a sentence for messages that says what a token is


def bytes_as_tokens(end_token: int = -1) -> Vocabulary:
    """Return the vocabulary of a model whose tokens are bytes. end_token: -1 if there is none."""

    def decode(tokens: list[int]) -> str:
        # a model may have ids above 255. They become the byte 255, which occurs in no UTF-8 text,
        # so they are shown as the replacement character
        return bytes(min(token, 255) for token in tokens).decode("utf-8", "replace")

    end_tokens = frozenset({end_token} - {-1})
    return Vocabulary(lambda text: [*text.encode()], decode, end_tokens, "A token is a byte")


def tokens_of(folder: Path, end_token: int, add_special_tokens: bool) -> Vocabulary:
    """Return the vocabulary of a Hugging Face folder's tokenizer. Raises ValueError.

    Each end token that the folder names ends a text, and so does end_token (-1: none).
    add_special_tokens: whether a prompt begins with the special tokens that the tokenizer puts
    before a text, such as <s>. prepare.py and train.py do not put them before documents.

    If a prompt spells a special token, it becomes that token, as a prompt for a chat needs it. In
    training this is so only with --special-tokens, and for the tokens that a chat template writes
    (prepare.py --chat). Otherwise training reads it as text.
    The decoded text has all special tokens, except those that the tokenizer put before the prompt.
    """
    if not folder.exists():
        raise ValueError(
            f"--tokenizer {folder}: there is no such folder. Pass --tokenizer with the folder of "
            "the tokenizer that made the model's tokens"
        )
    tokenizer = load_tokenizer(folder)
    named = named_tokens(folder).get("eos_token")
    end_tokens = {end_token, tokenizer.token_to_id(named or "")}
    end_tokens |= {*config_ids(folder, "eos_token_id")}
    end_tokens -= {-1, None}

    def with_mask(text: str) -> list[tuple[int, int]]:
        """Return (id, 1 if the tokenizer has added it, else 0) for each token of a prompt."""
        encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        pairs = [*zip(encoding.ids, encoding.special_tokens_mask)]
        while pairs and pairs[-1][1] and pairs[-1][0] in end_tokens:
            pairs.pop()  # some tokenizers also put an end token after the text
        return pairs

    def encode(text: str) -> list[int]:
        return [token for token, _ in with_mask(text)]

    # the number of tokens that the tokenizer puts before each text
    num_first = len([*itertools.takewhile(lambda pair: pair[1], with_mask("a"))])

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids[num_first:], skip_special_tokens=False)

    name = f"The tokenizer is that of {folder}"
    return Vocabulary(encode, decode, frozenset(end_tokens), name)


def stream(decode: Callable, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of the prompt and of the tokens, piece by piece.

    A character may consist of several tokens. Until the last of them is drawn, the decoded text
    ends in U+FFFD, the replacement character. So replacement characters at the end are held back.
    Bytes that never become a character also decode to U+FFFD. They are yielded with the next
    complete character, or at the end.
    """
    ids = [*prompt]
    shown = 0  # characters
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        complete = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        yield text[shown:complete]
        shown = max(shown, complete)
    yield decode(ids)[shown:]


def printable(text: str) -> str:
    """Return the text with each control character, which could change the settings of a terminal,
    replaced by the replacement character. Line breaks and tabs stay."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(char) == "Cc" and char not in "\n\t"
        else char
        for char in text
    )


# ---------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Loaded:
    """A model, and what is known about its text."""

    model: LLaMA
    folder: Path  # from which it was read
    positions: int  # the most tokens that a text may have, prompt included
    # Tokens per training sequence. Those of an import are not known. So for an import, and for a
    # run that began with one, this is the number of the model's positions
    trained_length: int
    vocabulary: Vocabulary


def load(folder: str, tokenizer: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Return the model in a folder: of a run, of one of its checkpoints, or of Hugging Face.

    folder: may begin with hf:, as in train.py's --init. tokenizer: the flag --tokenizer; "" means
    that the model's folder or checkpoint says it. Raises ValueError or OSError.
    """
    path = Path(folder.removeprefix("hf:"))
    if path.is_file():
        raise ValueError(f"FOLDER {folder} is a file. Pass the folder of a run or of a model")
    if folder.startswith("hf:") or (path / "config.json").exists():
        return load_hugging_face(path, tokenizer, device, dtype)
    if (path / "meta.json").exists() or checkpoint.steps_of(path):
        return load_checkpoint(path, tokenizer, device, dtype)

    if not path.exists():
        problem = "there is no such folder"
    else:
        problem = "it has neither a checkpoint (step-N) nor a Hugging Face model (config.json)"
    runs = sorted({found.parent for found in path.parent.glob("*/step-*/")})
    runs += sorted({found.parent for found in path.glob("*/step-*/")})
    nearest = f"Did you mean {' or '.join(map(str, runs[:3]))}?" if runs else "Train a model first"
    raise ValueError(f"FOLDER {folder}: {problem}. {nearest}")


def load_checkpoint(path: Path, tokenizer: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Return the model of a run's checkpoint. Its flags and its model are checked as for a resume.
    Raises ValueError or OSError."""
    # stdout is for the text only, and this call prints which damaged checkpoints it passes over
    with contextlib.redirect_stdout(sys.stderr):
        saved = checkpoint.choose_in_one_process(path)
    old_flags = saved.meta["config"]
    flags = train.resumed_flags({}, old_flags)
    _, cfg, source, _ = train.choose_model(flags, device, saved)

    # All plain kernels compute the same attention, so PyTorch's takes their place. A kernel that is
    # not plain, such as examples/alibi.py, computes something else, so it must run here, too
    attention = plain_attention
    kernel = KERNELS.get(flags.attention)
    if flags.attention != "auto" and not (kernel and kernel.plain):
        attention = Attention(pick_kernel(flags.attention, device, dtype))

    with torch.device("meta"):
        model = LLaMA(cfg, attention).requires_grad_(False)
        for weight in model.parameters():  # sets only dtypes: on meta, weights have no values
            weight.data = as_in_training(weight.data, dtype)
    # the optimizer's state that an export would write as the weights. It is used here, too
    exported = OPTIMIZERS[flags.optimizer].exported
    read = checkpoint.open_weights(saved, model.shapes, exported)
    model.to_empty(device=device)
    for name, weight in model.named_parameters():  # only one weight at a time is in memory twice
        weight.copy_(as_in_training(read(name), dtype))

    end_token = -1 if flags.document_token is None else flags.document_token
    if tokenizer == "bytes" or (not tokenizer and saved.meta.get("bytes_are_tokens") is True):
        vocabulary = bytes_as_tokens(end_token)
    elif tokenizer := tokenizer or flags.tokenizer or flags.import_folder:
        vocabulary = tokens_of(Path(tokenizer), end_token, add_special_tokens=False)
    else:
        raise ValueError(
            f"--tokenizer: {saved.folder} was trained on files of token ids, and does not say "
            "which tokenizer made them. Pass --tokenizer DIR, or --tokenizer bytes if the ids are "
            "bytes"
        )
    positions = cfg.max_positions
    trained_length = positions if source else old_flags["seq"]
    return Loaded(model, saved.folder, within_window(positions, source), trained_length, vocabulary)


def load_hugging_face(
    path: Path, tokenizer: str, device: torch.device, dtype: torch.dtype
) -> Loaded:
    """Return the model of a Hugging Face folder. While it is read, it takes 4 bytes of host memory
    per parameter. Raises ValueError or OSError."""
    _, source = hf.read_config(str(path))
    model = hf.load_model(str(path)).requires_grad_(False)
    for weight in model.parameters():
        weight.data = as_in_training(weight.data, dtype)
    model.to(device)
    cfg = model.cfg
    has_tokenizer = own_file(path / "tokenizer.json", path).exists()
    if tokenizer == "bytes" or (not tokenizer and not has_tokenizer and cfg.vocab == 256):
        vocabulary = bytes_as_tokens()
    elif tokenizer or has_tokenizer:
        folder = Path(tokenizer) if tokenizer else path
        vocabulary = tokens_of(folder, -1, add_special_tokens=True)
    else:
        raise ValueError(
            f"--tokenizer: {path} has no tokenizer.json. Pass --tokenizer DIR, or --tokenizer "
            "bytes if the model was trained on the bytes of text"
        )
    positions = within_window(cfg.max_positions, source)
    return Loaded(model, path, positions, positions, vocabulary)


def as_in_training(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in the dtype that it has in training: a matrix in `dtype`, rounded as in
    training, and a norm or a bias in float32 or wider (ops.Vector)."""
    if weight.dim() == 1:
        return weight.to(accumulation_dtype(dtype))
    return round_weight(weight, dtype)


def within_window(positions: int, source: dict) -> int:
    """Return how many tokens a text may have: at most the sliding window of an import, because this
    project's attention has none."""
    return min(positions, hf.sliding_window(source) or positions)


# ---------------------------------------------------------------------------- the program


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        usage="%(prog)s [FOLDER] [flags]",
        epilog="The whole text runs through the model for each new token, so this is for short "
        "texts.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default="out",
        type=home_path,
        metavar="FOLDER",
        help="Folder of a run (train.py's --out), of one of its checkpoints (step-N), or of a "
        "Hugging Face model (DIR or hf:DIR). (out)",
    )
    parser.add_argument(
        "--prompt",
        default="\n",
        help="Text that the model continues. If it spells a special token of the tokenizer, it "
        "becomes that token. The default is a new line.",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        help="Number of tokens to draw. The text ends earlier if a token ends it. (200)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="Divides the logits. 1: tokens are as likely as the model says; below 1, likely "
        "tokens become more likely; 0: the most likely token is always taken. (0.8)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Seed of the random numbers. Another one gives another text. (0)",
    )
    parser.add_argument(
        "--tokenizer",
        default="",
        type=home_path,
        metavar="DIR|bytes",
        help="Hugging Face folder of the tokenizer, or the word bytes if each byte is a token. The "
        "default is the tokenizer of the run, or the one in the Hugging Face folder.",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="Where the model runs. auto: on a GPU if there is one, else on the CPU.",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="Dtype of weights and activations. auto: bf16 on a GPU, fp32 on a CPU.",
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that is out of its range, and for several processes."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # each process would write the same text
        raise ValueError("sample.py is one process: start it without torchrun")
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: choose at least 1")
    if not 0 <= args.temperature < math.inf:  # refuses NaN, too
        raise ValueError(
            f"--temperature {args.temperature}: choose 0, or a positive number such as 0.8"
        )
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed}: choose a whole number from 0 to {2**63 - 1}")
    if not args.prompt:
        raise ValueError(
            '--prompt "": the model continues a text, so pass at least one character, or drop '
            "--prompt"
        )
    try:
        args.prompt.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"--prompt {args.prompt!r} is not UTF-8 text: {e.reason}") from e


def encode_prompt(loaded: Loaded, prompt: str, count: int) -> list[int]:
    """Return the tokens of the prompt. Raises ValueError if the model's vocabulary lacks one of
    them, or if the prompt and `count` more tokens need more positions than the model has."""
    vocabulary = loaded.vocabulary
    model_ids = loaded.model.cfg.vocab
    tokens = vocabulary.encode(prompt)
    if not tokens:
        raise ValueError(f"--prompt {prompt!r}: the tokenizer makes no tokens of it")
    if max(tokens) >= model_ids:
        raise ValueError(
            f"--prompt {prompt!r} has the token {max(tokens)}, but the model has only the tokens 0 "
            f"to {model_ids - 1}. Pass --tokenizer with the tokenizer of this model"
        )
    room = loaded.positions - len(tokens)
    if room < 1:
        raise ValueError(
            f"--prompt: it has {len(tokens)} tokens, and the model reaches {loaded.positions} "
            f"positions. Shorten it to at most {loaded.positions - 1} tokens"
        )
    if count > room:
        raise ValueError(
            f"--tokens {count}: the model reaches {loaded.positions} positions, and the prompt "
            f"takes {len(tokens)} of them. Choose at most --tokens {room}"
        )
    return tokens


def sample(args: argparse.Namespace) -> None:
    """Load a model, and print a text. Raises ValueError or OSError."""
    check(args)
    device = train.choose_device(train.Config(device=args.device), 0)
    name = args.dtype
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    # the text grows with each token, and a kernel would be compiled for each of its lengths
    torch.compiler.set_stance("force_eager")

    loaded = load(args.folder, args.tokenizer, device, DTYPES[name])
    vocabulary = loaded.vocabulary
    prompt = encode_prompt(loaded, args.prompt, args.tokens)
    note = ""
    if len(prompt) + args.tokens > loaded.trained_length:
        note = (
            f". It was trained on sequences of {loaded.trained_length} tokens, so the text after "
            "these may be worse"
        )
    print(
        f"{loaded.folder}: {param_count(loaded.model.cfg):,} parameters on "
        f"{train.device_name(device)} in {name}. {vocabulary.name}{note}",
        file=sys.stderr,
    )

    tokens = generate(
        loaded.model, prompt, args.tokens, args.temperature, vocabulary.end_tokens, args.seed
    )
    sys.stdout.reconfigure(errors="replace")  # the terminal may not have all characters
    for piece in stream(vocabulary.decode, prompt, tokens):
        print(printable(piece), end="", flush=True)
    print()


def main(argv: list[str] | None = None) -> int:
    """Run a command and print its errors. Return the exit status: 0 if the text was written, 1 if
    GPU memory ran out, and 2 after another error."""
    args = make_parser().parse_args(argv)
    try:
        sample(args)
    except BrokenPipeError:  # whoever reads the text has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except torch.OutOfMemoryError as e:
        print(f"sample.py: out of GPU memory: {e}. Pass --device cpu", file=sys.stderr)
        return 1
    except (ValueError, OSError) as e:
        # messages of checkpoint.py and hf.py begin with a flag of train.py, which is not used here
        text = str(e).removeprefix("--resume: ").removeprefix("--init hf:")
        print(f"sample.py: error: {text}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print()
        sys.exit(130)
