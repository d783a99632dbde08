"""Train a LLaMA on text: config -> data -> plan -> checkpoints -> loop, in the order of the file.

    python train.py                                   a laptop: a tiny model, the machine's own text
    torchrun --nproc_per_node 8 train.py --model 7b   one process a GPU, the same code path
    python train.py --help                            every flag

A step draws `batch` sequences, whose order depends on seed and step alone, and splits them over
the data-parallel ranks and then into micro-batches; the sp ranks of each hold parts of the same
sequences. The loss is the sum over all valid tokens divided by their number, so no split changes
it. What is left open (sp, p, g, os, what layers keep) is chosen in planner.py by counted bytes and
measured times, and printed. Stopped by SIGTERM or SIGINT, a run finishes its step and
saves; killed, it continues from OUT/latest with `--resume` as if nothing had happened.

Left out: tokenizers, data mixtures, and shuffling within a sequence.

Legend: R = dp * sp ranks, M micro-batches a step and rank, B sequences a micro-batch, T tokens a
sequence, T/sp on a rank.
"""
import argparse
import contextlib
import dataclasses
import difflib
import functools
import gc
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import typing
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import attention
import model as llama
import shard
from attention import CommStream, Exchange, Groups, Ulysses, pick_kernel
from memplan import (ALLOCATOR_ALIGN_BYTES, MIN_PLANNED_BYTES, Buffer, StepMemory, library,
                     live_arena, lower_bound, simulate)
from model import (IGNORE, MODELS, LLaMA, ModelConfig, accumulation_dtype, check_exportable,
                   flops_per_token, hf_config, hf_export, hf_open, initial_weight, param_count)
from offload import GIB, ChunkedLayers, recomputed_layers
from planner import (Plan, all_to_all_bytes, choose_degrees, choose_plan, device_bytes, find_rates,
                     gpu_budget, host_budget, measure, nearest, set_activations,
                     swapped_host_bytes, wanted_factors)
from shard import OPTIMIZER, STREAMS, States

# ---------------------------------------------------------------------------- config


def size(text: str) -> int:
    """'4096', '64K', '1.5M': whole numbers with binary suffixes."""
    number = re.fullmatch(r"(-?\d+(?:\.\d+)?)([KMG]?)", text.upper())
    value = float(number[1]) * 2 ** (10 * " KMG".index(number[2] or " ")) if number else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: a whole number, as 4096, 64K or 1.5M")
    return int(value)


def flag(default, text: str):
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every flag. None is `auto`: chosen by what the help says, and set here when it is known."""

    model: str = flag("auto", f"auto (tiny on a CPU, 7b on GPUs), {', '.join(MODELS)}")
    seq: int | None = flag(None, "tokens a sequence; auto: 256 for tiny, else 4096")
    sp: int | None = flag(None, "ranks that share a sequence; auto: by predicted time")
    steps: int = flag(200, "optimizer steps of the whole run; 0: initialise, save or export, end")
    batch: int | None = flag(None, "sequences a step over all ranks; auto: a resumed run's, else 4K"
                             " tokens for tiny and 512K tokens for others")
    batch_tokens: int | None = flag(None, "the same in tokens (as 4M), a multiple of --seq")
    micro_batch: int | None = flag(None, "sequences that sp ranks run at once; auto: the most"
                                   " within 8K tokens a rank")
    lr: float | None = flag(None, "peak learning rate; auto: 3e-3 for tiny, 6e-4 for 160m, else"
                            " 3e-4")
    min_lr: float = flag(0.1, "the cosine's end, as a fraction of --lr")
    warmup: int | None = flag(None, "steps of linear warm-up; auto: a twentieth of --steps")
    weight_decay: float = flag(0.1, "AdamW's, on matrices, not on norms")
    beta1: float = flag(0.9, "AdamW's")
    beta2: float = flag(0.95, "AdamW's")
    clip: float = flag(1.0, "largest global norm of the gradient; 0: no clipping")
    max_skips: int = flag(5, "non-finite steps in a row that end the run")
    seed: int = flag(0, "of the weights and of the order of the data")
    data: str = flag("stdlib", "a text file, a folder of them (bytes are the tokens), a .bin file"
                     " of token ids, a folder with .bin files (val.bin is the validation split), or"
                     " stdlib: the sources of Python's standard library")
    token_bytes: int = flag(2, "of an id in .bin files: 2 (uint16) or 4 (uint32)")
    ignore_token: int = flag(-1, "an id (padding, say) that is never a label; -1: none")
    eval_every: int = flag(0, "steps between validations; 0: at the end; -1: never")
    eval_sequences: int = flag(64, "most sequences of a validation")
    out: str = flag("out", "folder of log.jsonl, loss.png and checkpoints")
    save_every: int = flag(0, "steps between checkpoints; 0: at the end or when stopped; -1: never")
    keep: int = flag(2, "checkpoints kept")
    resume: str = flag("", "never, latest, auto (latest if there is one), or a checkpoint's folder;"
                       " alone: latest; without it: never, but auto under a torchrun restart")
    init: str = flag("random", "random, or hf:DIR: a Hugging Face LLaMA checkpoint")
    export: str = flag("", "folder for a Hugging Face checkpoint of the final weights")
    rope_theta: float | None = flag(None, "rotary base; auto: the model's")
    rope_scaling: str = flag("", "for sequences past the trained length: linear:FACTOR or"
                             " yarn:FACTOR")
    p: str | None = flag(None, "parameter shards: a number, or GPUs in a node x nodes (8, 8x4);"
                         " auto: by predicted time, then the fewest shards, p before g before os")
    g: str | None = flag(None, "gradient shards, p or os; auto: likewise")
    os: str | None = flag(None, "optimizer state shards, a multiple of p; auto: likewise")
    per_node: int | None = flag(None, "ranks of a node; auto: torchrun's local world size")
    strategy: str = flag("", "factors by name: ddp, zero1, zero2, zero3, mics:K, zero++:K,"
                         " zero1.5:K")
    os_layout: str = flag("intra", "of optimizer states: inter (whole tensors, greedy) or intra"
                          " (each tensor split evenly)")
    overlap: str = flag(",".join(STREAMS), "communication that runs under computation, a list, or"
                        " none: param_gather (weights before they are used), grad_scatter (a"
                        " matrix's gradient to its shards), grad_reduce (shards over replicas),"
                        " param_broadcast (updated weights to those who hold them)")
    reduce_dtype: str = flag("auto", "of gradients on the wire: auto (--dtype) or fp32")
    recompute: str = flag("auto", "auto: layers keep, swap or recompute chunks of tokens, as the"
                          " program of planner.py says; none: they keep everything; full: their"
                          " input alone, and all of them runs again, attention included")
    alpha: float | None = flag(None, "fraction of tokens whose activations a swapped layer swaps;"
                               " auto: by the program")
    resident_layers: int | None = flag(None, "last layers whose inputs and attention outputs stay"
                                       " on the GPU; auto: by the program")
    chunk: int | None = flag(None, "most tokens that a layer runs at once, which cuts them into"
                             " equal parts; auto: 16K")
    head_groups: int | None = flag(None, "parts of a rank's heads; the next one's all-to-all runs"
                                   " under this one's attention; auto: at most 4")
    host_memory: int | None = flag(None, "bytes of a node (as 400G) for swapped activations; auto:"
                                   " what the control group or the machine allows, less an eighth")
    gpu_memory: int | None = flag(None, "bytes of a GPU that may be used (as 80G); auto: all")
    attention: str = flag("auto", "kernel: auto, fa4, cudnn, fa2, flash, cpu")
    device: str = flag("auto", "auto, cpu or cuda")
    dtype: str = flag("auto", "of weights and activations: auto (bf16 on GPUs), bf16, fp32, fp64")
    memplan: str = flag("off", "addresses of a step's tensors, planned once: on, off, or auto: on"
                        " if it saves a GPU 1 % of its memory")
    compile: bool = flag(True, "torch.compile the element-wise parts, on GPUs")
    timeout: float = flag(600.0, "seconds after which a collective gives up on a lost rank")
    dry_run: bool = flag(False, "print config, counts and memory need, and end")
    ranks: int | None = flag(None, "with --dry-run: plan for so many, and simulate the first one's"
                             " step; none of them need be there; auto: the ranks that are")


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
CHOICES = {"os_layout": ("intra", "inter"), "reduce_dtype": ("auto", "fp32"),
           "recompute": ("auto", "none", "full"), "dtype": ("auto", *DTYPES),
           "memplan": ("on", "off", "auto")}
LIMITS = {  # what a number may be, if it is not auto
    "seq": (1, 2**40), "steps": (0, 2**40), "batch": (1, 2**40), "micro_batch": (1, 2**40),
    "batch_tokens": (1, 2**60), "alpha": (0, 1), "rope_theta": (1, 1e30),
    "lr": (0, 1e30), "min_lr": (0, 1), "warmup": (0, 2**40), "weight_decay": (0, 1e6),
    "beta1": (0, 1 - 1e-9), "beta2": (0, 1 - 1e-9), "clip": (0, 1e30), "max_skips": (1, 2**40),
    "seed": (0, 2**31 - 1), "ignore_token": (-1, 2**32), "eval_every": (-1, 2**40),
    "eval_sequences": (1, 2**40), "save_every": (-1, 2**40), "keep": (1, 2**40),
    "timeout": (1, 1e9), "per_node": (1, 2**40), "sp": (1, 2**20), "chunk": (1, 2**40),
    "resident_layers": (2, 2**20), "head_groups": (1, 2**20), "host_memory": (0, 2**60),
    "gpu_memory": (1, 2**60), "ranks": (1, 2**20),
}
SIZES = ("seq", "steps", "batch", "batch_tokens", "micro_batch", "chunk", "host_memory",
         "gpu_memory")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """argparse's own message, with the nearest flag for an unknown one."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].split("=")[0]
        near = difflib.get_close_matches(unknown, self._option_string_actions, 1)
        super().error(message + (f" (nearest: {near[0]})" if unknown and near else ""))


def flag_type(f: dataclasses.Field):
    """text -> value of a field; the word auto is None where that is allowed."""
    kinds = typing.get_args(f.type) or (f.type,)
    kind = size if f.name in SIZES else kinds[0]

    def convert(text: str):
        return None if text == "auto" and type(None) in kinds else kind(text)

    convert.__name__ = kind.__name__  # argparse says "invalid float value"
    return convert


def parse(argv: list[str] | None = None) -> Config:
    parser = Parser(
        description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="Sizes may end in K, M or G, which are binary: 4K is 4096. What is auto is chosen "
        "by the program, as its help says, and the choice is printed.")
    for f in dataclasses.fields(Config):
        default = "auto" if f.default is None else f.default
        shown = "" if default in ("", False) else f" (default: {default})"
        kind = {"default": f.default, "help": (f.metadata["help"] + shown).replace("%", "%%")}
        if f.type is bool:
            kind["action"] = argparse.BooleanOptionalAction
        else:
            kind["type"] = flag_type(f)
        if f.name == "resume":
            kind |= {"nargs": "?", "const": "latest"}
        parser.add_argument("--" + f.name.replace("_", "-"), **kind)
    return Config(**vars(parser.parse_args(argv)))


# ---------------------------------------------------------------------------- data


class Corpus:
    """Tokens of one or many files as one long sequence, read where and when they are asked for."""

    def __init__(self, files: list[Path], token_bytes: int):
        """token_bytes: 1 for text. Raises OSError or ValueError if a file is unreadable or torn."""
        if not files:
            raise ValueError("--data: no files with text or .bin tokens there")
        self.dtype = {1: np.uint8, 2: np.dtype("<u2"), 4: np.dtype("<u4")}[token_bytes]
        self.files, counts = files, []
        for f in files:
            with open(f, "rb") as handle:  # an unreadable file fails here, before any work
                count, rest = divmod(handle.seek(0, os.SEEK_END), token_bytes)
            if rest:
                raise ValueError(f"--data: {f} is not a whole number of {token_bytes}-byte tokens")
            counts.append(count)
        self.ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int64."""
        out, filled = np.empty(stop - start, np.int64), 0
        i = int(np.searchsorted(self.ends, start, side="right"))
        while filled < len(out):
            count = min(int(self.ends[i]) - start, len(out) - filled)
            if count:
                size_i = int(self.ends[i] - (self.ends[i - 1] if i else 0))
                tokens = np.memmap(self.files[i], self.dtype, "r", shape=(size_i,))
                offset = size_i - (int(self.ends[i]) - start)
                out[filled : filled + count] = tokens[offset : offset + count]
            start, filled, i = start + count, filled + count, i + 1
        return out


def open_corpus(data: str, token_bytes: int) -> tuple[Corpus, Corpus | None]:
    """--data -> (corpus, a validation corpus of its own if the folder has a val.bin)."""
    root = Path(sysconfig.get_path("stdlib") if data == "stdlib" else data)
    if data == "stdlib":  # without tests and installed packages, which differ between machines
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        return Corpus([f for f in sorted(root.rglob("*.py"))
                       if not skip & set(f.relative_to(root).parts)], 1), None
    if not root.exists():
        raise ValueError(f"--data {data}: no such file or folder")
    if token_bytes not in (2, 4):
        raise ValueError(f"--token-bytes {token_bytes}: 2 (uint16) or 4 (uint32)")
    if root.is_file():
        return Corpus([root], token_bytes if root.suffix == ".bin" else 1), None
    files = [f for f in sorted(root.rglob("*")) if f.is_file()
             and not any(p.startswith(".") for p in f.relative_to(root).parts)]
    if not (bins := [f for f in files if f.suffix == ".bin"]):
        return Corpus(files, 1), None
    val = [f for f in bins if f.name == "val.bin"]
    return Corpus([f for f in bins if f not in val], token_bytes), (
        Corpus(val, token_bytes) if val else None)


class Sequences:
    """Non-overlapping windows of T + 1 tokens (the last is a label only) of [0, stop) or a tail."""

    def __init__(self, corpus: Corpus, first: int, count: int, seq: int, seed: int):
        self.corpus, self.first, self.count, self.seq, self.seed = corpus, first, count, seq, seed
        self.epoch, self.order = -1, np.arange(count)

    def window(self, i: int) -> np.ndarray:
        start = self.first + i * self.seq
        return self.corpus.read(start, start + self.seq + 1)

    def sample(self, i: int) -> np.ndarray:
        """The i-th sample since step 0: every epoch is a permutation that depends on the seed."""
        epoch, i = divmod(i, self.count)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return self.window(int(self.order[i]))


def split(corpus: Corpus, val: Corpus | None, seq: int, seed: int) -> tuple[Sequences, Sequences]:
    """Training and validation sequences; these are a twentieth from the end, at least one, where
    there is no val. Raises ValueError with the longest legal --seq."""
    for c, need in ((corpus, 1 if val else 2), (val, 1)):
        if c is not None and (len(c) - 1) // seq < need:
            what = "training and validation" if need == 2 else "one sequence"
            raise ValueError(f"--seq {seq}: the data has {len(c)} tokens, too few for {what}; "
                             f"the longest that fits is --seq {max(0, (len(c) - 1) // need)}")
    count = (len(corpus) - 1) // seq
    held = 0 if val else max(1, count // 20)
    train = Sequences(corpus, 0, count - held, seq, seed)
    return train, Sequences(val, 0, (len(val) - 1) // seq, seq, seed) if val else (
        Sequences(corpus, (count - held) * seq, held, seq, seed))


def check_tokens(corpora: list[Corpus], vocab: int, rank: int, world: int) -> None:
    """Raise ValueError if an id has no row in the embedding. Each rank scans its share."""
    for c in corpora:
        if c.dtype == np.uint8 and vocab >= 256:
            continue
        step = 2**24
        for start in range(rank * step, len(c), world * step):
            tokens = c.read(start, min(start + step, len(c)))
            if (top := int(tokens.max(initial=0))) >= vocab:
                at = start + int(tokens.argmax())
                raise ValueError(f"--data: token {at} is {top}, the model's vocabulary ends at "
                                 f"{vocab - 1}; take another model, or --token-bytes")


# ---------------------------------------------------------------------------- ranks


# said once by a backward's thread, whose context PyTorch then makes
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")


def set_allocator(settings: str) -> None:
    """PyTorch's CUDA allocator, as PYTORCH_ALLOC_CONF would set it: torch 2.11 and later rename
    this."""
    getattr(torch._C, "_accelerator_setAllocatorSettings",
            torch.cuda.memory._set_allocator_settings)(settings)


def expandable_segments() -> None:
    """PyTorch's allocator maps memory where a block needs it: without, the pieces between what
    layers keep add up to gigabytes. What the environment says goes before."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        set_allocator("expandable_segments:True")


def start_ranks(timeout: float) -> tuple[int, int, int]:
    """Join torchrun's group, or make a group of one (timeout in seconds). Returns rank, R, local
    rank."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
        # torchrun's store outlives a restart: without a prefix, the new ranks read the addresses
        # of the dead ones
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)
    else:
        store, rank, world = dist.HashStore(), 0, 1
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world)
    return rank, world, int(os.environ.get("LOCAL_RANK", 0))


def launch_name() -> str:
    """The same on all ranks and after a restart by torchrun, another for another launch."""
    name = [os.environ.get("TORCHELASTIC_RUN_ID", "none")]
    if name == ["none"]:  # no rendezvous, so rank 0 stays where it is: its parent is the launcher
        name = [f"{os.uname().nodename} {os.getppid()}"]
    dist.broadcast_object_list(name)
    return name[0]


class ConfigError(ValueError):
    """Bad input, found before any work, raised on all ranks alike."""


def on_all_ranks(check):
    """Return check() of every rank; if one fails, the same ConfigError on all: none hangs."""
    if dist.get_backend() == "fake":  # of a simulated step: nobody else is there
        return check()
    result = error = None
    try:
        result = check()
    except (ValueError, OSError, MemoryError) as e:
        error = str(e)
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if failed := [(r, e) for r, e in enumerate(errors) if e]:
        where = "" if len(failed) == len(errors) else f" (on ranks {[r for r, _ in failed]})"
        raise ConfigError(failed[0][1] + where)
    return result


# ---------------------------------------------------------------------------- flags and files


def check_flags(cfg: Config) -> None:
    """Raise ValueError for a number out of its range, a word that is none of its choices, flags
    that contradict each other. It reads flags alone, so all ranks of a command refuse alike."""
    for name, values in CHOICES.items():
        if getattr(cfg, name) not in values:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: one of "
                             f"{', '.join(values)}")
    for name, (least, most) in LIMITS.items():
        value = getattr(cfg, name)
        if value is not None and not least <= value <= most:  # a NaN is not, either
            raise ValueError(f"--{name.replace('_', '-')} {value}: from {least} to {most}")
    if cfg.batch is not None and cfg.batch_tokens is not None:
        raise ValueError(f"--batch {cfg.batch} and --batch-tokens {cfg.batch_tokens} say the same "
                         "in sequences and in tokens: drop one")
    old = {"gather": "param_gather", "scatter": "grad_scatter", "reduce": "grad_reduce",
           "spread": "param_broadcast"}
    words = set(cfg.overlap.split(",")) if cfg.overlap != "none" else set()
    if renamed := [f"{word} is now {old[word]}" for word in old if word in words]:
        raise ValueError(f"--overlap {cfg.overlap}: {', '.join(renamed)}")
    if not words <= set(STREAMS):
        raise ValueError(f"--overlap {cfg.overlap}: a list of {', '.join(STREAMS)}, or none")
    by_hand = [f"--{k.replace('_', '-')}" for k in ("alpha", "resident_layers", "chunk")
               if getattr(cfg, k) is not None]
    if by_hand and cfg.recompute != "auto":
        raise ValueError(f"{' '.join(by_hand)} and --recompute {cfg.recompute} say different things"
                         ": drop one")
    if cfg.ranks and not cfg.dry_run:
        raise ValueError(f"--ranks {cfg.ranks}: of a plan alone; with --dry-run")
    if cfg.init != "random" and not cfg.init.startswith("hf:"):
        raise ValueError(f"--init {cfg.init}: random or hf:DIR")


def choose_device(cfg: Config, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count()
    if cfg.device == "auto":
        cfg.device = "cuda" if gpus else "cpu"
    if cfg.device not in ("cpu", "cuda") or (cfg.device == "cuda" and local_rank >= gpus):
        raise ValueError(f"--device {cfg.device}: this node has {gpus} GPUs, and this process is "
                         f"number {local_rank}; cpu" + f", or --nproc_per_node {gpus} or fewer" * (
                             gpus > 0))
    if cfg.dtype == "auto":
        cfg.dtype = "bf16" if cfg.device == "cuda" else "fp32"
    return torch.device(cfg.device, local_rank if cfg.device == "cuda" else None)


def choose_model(cfg: Config):
    """The model of --model or --init with the flags' rotary settings, and (for --init hf:DIR)
    name -> tensor, else None."""
    read = None
    if cfg.init.startswith("hf:"):
        if cfg.model not in ("auto", "hf"):
            raise ValueError(f"--model {cfg.model}: with --init hf:DIR the model is DIR's; drop it")
        model, cfg.model = hf_config(cfg.init[3:]), "hf"
        read = hf_open(cfg.init[3:], model)
    else:
        if cfg.model == "auto":
            cfg.model = "tiny" if cfg.device == "cpu" else "7b"
        if cfg.model not in MODELS:
            near = difflib.get_close_matches(cfg.model.lower(), MODELS, 1)
            raise ValueError(f"--model {cfg.model}: auto, {', '.join(MODELS)}"
                             + (f"; nearest: {near[0]}" if near else ""))
        model = MODELS[cfg.model]
    scaling = model.rope_scaling
    if cfg.rope_scaling:
        kind, _, factor = cfg.rope_scaling.partition(":")
        if kind not in ("linear", "yarn") or not (
                factor.replace(".", "", 1).isdigit() and float(factor) >= 1):
            raise ValueError(f"--rope-scaling {cfg.rope_scaling}: linear:FACTOR or yarn:FACTOR, "
                             "from 1")
        trained = scaling.get("original_max_position_embeddings", model.max_positions)
        scaling = {"rope_type": kind, "factor": float(factor),
                   "original_max_position_embeddings": trained}
    if cfg.seq is None:
        cfg.seq = 256 if cfg.model == "tiny" else 4096
    return dataclasses.replace(
        model, rope_theta=cfg.rope_theta or model.rope_theta, rope_scaling=scaling,
        max_positions=max(model.max_positions, cfg.seq)), read


def check_folders(cfg: Config, model: ModelConfig) -> None:
    """--out and --export can be written, and an export overwrites and drops nothing."""
    export = Path(cfg.export)
    if cfg.export and (export.resolve() == Path(cfg.out).resolve() or export.is_dir() and any(
            f.name != "partial" for f in export.iterdir())):
        raise ValueError(f"--export {cfg.export}: the folder is not empty, or --out; name another")
    if cfg.export:
        check_exportable(model)
    for folder in {cfg.out, cfg.export} - {""}:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as e:
            raise ValueError(f"{folder} cannot be written: {e}") from e


def make_plan(cfg: Config, rank: int, world: int, local_rank: int, launch: str) -> Plan:
    """What flags, files and devices settle (in cfg, in place); planner.choose_plan does the rest.
    Raises ValueError for what cannot work, with numbers."""
    device = choose_device(cfg, local_rank)
    model, read = choose_model(cfg)
    if cfg.lr is None:
        cfg.lr = {"tiny": 3e-3, "160m": 6e-4}.get(cfg.model, 3e-4)
    if cfg.warmup is None:
        cfg.warmup = cfg.steps // 20
    if cfg.per_node is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        cfg.per_node = math.gcd(8, world) if cfg.ranks else here
    if cfg.batch_tokens is not None:
        if cfg.batch_tokens % cfg.seq:
            raise ValueError(f"--batch-tokens {cfg.batch_tokens}: not a multiple of --seq "
                             f"{cfg.seq}; nearest: {nearest(cfg.batch_tokens, cfg.seq)}")
        cfg.batch = cfg.batch_tokens // cfg.seq
    kernel = cfg.attention = pick_kernel(cfg.attention, device, DTYPES[cfg.dtype])
    choose_degrees(cfg, model.heads, world), wanted_factors(cfg, world)  # they refuse early
    corpus, val_corpus = open_corpus(cfg.data, cfg.token_bytes)
    train, val = split(corpus, val_corpus, cfg.seq, cfg.seed)
    check_tokens([c for c in (corpus, val_corpus) if c], model.vocab, rank, world)
    if not cfg.dry_run:
        check_folders(cfg, model)
    resume = find_checkpoint(cfg, model, launch)
    samples = 0
    if resume:
        meta = json.loads((resume / "meta.json").read_text())
        old = meta["config"]
        samples = meta.get("samples", meta["step"] * old["batch"]) * old["seq"] // cfg.seq
        if cfg.batch is None:  # the same tokens a step, whatever ranks there are now
            cfg.batch = max(1, old["batch"] * old["seq"] // cfg.seq)
    if cfg.resident_layers and cfg.resident_layers > model.layers:
        raise ValueError(f"--resident-layers {cfg.resident_layers}: from 2, whose backward starts "
                         f"at once, to the model's {model.layers}")
    if cfg.alpha and model.layers <= 2:
        raise ValueError(f"--alpha {cfg.alpha}: the last two layers never swap, and --model "
                         f"{cfg.model} has {model.layers}")
    if cfg.alpha and cfg.resident_layers == model.layers:
        raise ValueError(f"--alpha {cfg.alpha}: no layer swaps if all {model.layers} are resident")
    return Plan(model, device, DTYPES[cfg.dtype], kernel, train, val, read, resume, samples,
                gpu_budget=gpu_budget(cfg, device), host_budget=host_budget(cfg))


def cap_gpu(cfg: Config, plan: Plan) -> None:
    """Hold PyTorch's allocator to --gpu-memory, less what ranks map from each other beside it."""
    if plan.device.type == "cuda":
        total = torch.cuda.get_device_properties(plan.device).total_memory
        mapped = all_to_all_bytes(plan.model, plan.tokens(cfg), plan.dtype, cfg.sp, cfg.head_groups)
        share = min(1.0, (cfg.gpu_memory - mapped) / total) if cfg.gpu_memory else 1.0
        torch.cuda.set_per_process_memory_fraction(share, plan.device)


def min_budget_over_ranks(plan: Plan) -> None:
    """Plan with what the smallest rank has: all must come to the same plan. A collective."""
    least = torch.tensor([plan.gpu_budget, plan.host_budget], dtype=torch.float64,
                         device=plan.device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    plan.gpu_budget, plan.host_budget = least.tolist()


# ---------------------------------------------------------------------------- checkpoints
# OUT/step-00000100/ holds a step's states and meta.json (config, file sizes). It is written under
# another name, synced, and renamed; then the link OUT/latest is replaced. Both are atomic, so what
# `latest` names is whole at any moment.


def sync_folder(path: Path) -> None:
    """Names in a folder reach the disk with the folder, not with the files."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def checkpoint_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a checkpoint: the optimizer's states, float32 or wider."""
    return len(OPTIMIZER.states) * accumulation_dtype(dtype).itemsize * param_count(model)


def check_disk(cfg: Config, plan: Plan) -> str:
    """Compare the free disk with what will be written, before the first step. Returns a line that
    says it. Raises ValueError if it does not fit."""
    out, each = Path(cfg.out), checkpoint_bytes(plan.model, plan.dtype)
    most = 1  # checkpoints that lie there at once: --keep of them and the one that is written
    if cfg.save_every > 0:
        most = min(cfg.keep + 1, -(-cfg.steps // cfg.save_every))
    there = len([f for f in out.glob("step-*") if f.is_dir()]) if plan.resume else 0
    need = {out: max(1, most - there) * each if cfg.save_every >= 0 else 0}
    if cfg.export:
        need[Path(cfg.export)] = param_count(plan.model) * plan.dtype.itemsize
    for folder, bytes_needed in need.items():
        free = shutil.disk_usage(folder).free
        if bytes_needed > free:
            what = f"{most} checkpoints of {each / GIB:.1f} GiB" if folder == out else "the export"
            raise ValueError(
                f"{folder} has {free / GIB:.1f} GiB free, {what} need {bytes_needed / GIB:.1f}: "
                "name another --out or --export, save less often (--save-every), keep fewer "
                "(--keep), or save none (--save-every -1)")
    if cfg.save_every < 0:
        return "checkpoints: none"
    free = shutil.disk_usage(out).free
    return f"checkpoints: {each / GIB:.2f} GiB each, {free / GIB:.1f} GiB free in {out}"


def save_checkpoint(cfg: Config, model: ModelConfig, states: States, step: int, samples: int,
                    launch: str) -> None:
    out, tmp = Path(cfg.out), Path(cfg.out) / f"step-{step:08d}.tmp"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()
    dist.barrier()
    dcp.save(states.state_dict(), checkpoint_id=tmp)
    dist.barrier()
    if rank == 0:
        files = {f.name: f.stat().st_size for f in tmp.iterdir()}
        meta = {"step": step, "samples": samples, "model": dataclasses.asdict(model),
                "files": files, "launch": launch, "config": dataclasses.asdict(cfg)}
        with open(tmp / "meta.json", "w") as f:
            json.dump(meta, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        sync_folder(tmp)
        final, n = out / f"step-{step:08d}", 0
        while final.exists():  # an earlier branch of this run: `latest` may name it
            final, n = out / f"step-{step:08d}-{n + 1}", n + 1
        os.rename(tmp, final)
        link = out / "latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        sync_folder(out)  # the folder that it names is on disk before the link is
        os.replace(link, out / "latest")
        sync_folder(out)
        kept = sorted((p for p in out.glob("step-*") if p.is_dir()), key=os.path.getmtime)
        for old in [p for p in kept if p.name != final.name][: -cfg.keep + 1 or None]:
            shutil.rmtree(old)
        print(f"saved {final}", flush=True)
    dist.barrier()


def load_states(cfg: Config, plan: Plan, model: LLaMA, states: States, say) -> int:
    """Of the checkpoint to resume, else the first weights. Returns the step that they are of. A
    collective."""
    if not plan.resume:
        for name, p in model.named_parameters():  # one tensor at a time
            if plan.pretrained:
                states.load(name, plan.pretrained(name))
            else:
                states.load(name, initial_weight(plan.model, name, p.shape, cfg.seed, plan.device))
        say(f"weights: {cfg.init}, seed {cfg.seed}")
        return 0
    dcp.load(states.state_dict(), checkpoint_id=plan.resume)
    states.loaded()
    meta = json.loads((plan.resume / "meta.json").read_text())
    changed = [f"{k} {meta['config'].get(k)} -> {v}" for k, v in dataclasses.asdict(cfg).items()
               if meta["config"].get(k) != v and k not in ("resume", "out", "device")]
    say(f"resumed {plan.resume} at step {meta['step']}"
        + (f"; changed: {', '.join(changed)}" if changed else ""))
    return meta["step"]


def export(cfg: Config, plan: Plan, states: States, rank: int) -> None:
    """The weights as a Hugging Face checkpoint in --export. A collective."""
    part = Path(cfg.export) / "partial"  # its files move up when all are there
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    source = Path(cfg.init[3:]) if cfg.init.startswith("hf:") else None
    hf_export(part, plan.model, states.full, plan.dtype, rank == 0, source)
    if rank == 0:
        for f in sorted(part.iterdir(), key=lambda f: f.name == "config.json"):
            os.replace(f, Path(cfg.export) / f.name)
        part.rmdir()


def find_checkpoint(cfg: Config, model: ModelConfig, launch: str) -> Path | None:
    """The whole checkpoint to continue from, or None. Raises ValueError if it is not as it should
    be. After a restart by torchrun, what this launch has saved goes before what the flag says."""
    latest, want = Path(cfg.out) / "latest", cfg.resume or "never"
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and latest.exists():
        if json.loads((latest / "meta.json").read_text()).get("launch") == launch:
            want = "latest"
    if want == "never" or (want == "auto" and not latest.exists()):
        return None
    path = latest.resolve() if want in ("auto", "latest") else Path(want)
    if not path.exists():
        raise ValueError(f"--resume {want}: there is no {path}")
    try:
        meta = json.loads((path / "meta.json").read_text())
        meta["files"], meta["model"], meta["config"], meta["step"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--resume: {path} is not a whole checkpoint: {e}") from e
    for name, size_bytes in meta["files"].items():
        have = (path / name).stat().st_size if (path / name).exists() else None
        if have != size_bytes:
            what = "is missing" if have is None else f"has {have} bytes, not {size_bytes}"
            raise ValueError(f"--resume: {path / name} {what}; earlier checkpoints are beside it")
    mine, may_differ = dataclasses.asdict(model), {"max_positions", "tied"}
    may_differ |= {k for k in ("rope_theta", "rope_scaling") if getattr(cfg, k)}
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    theirs = defaults | meta["model"]  # a field that is newer than the checkpoint has its default
    if wrong := [f"{k} {v} (here {mine.get(k, 'unknown')})" for k, v in theirs.items()
                 if k not in may_differ and (k not in mine or v != mine[k])]:
        made = meta["config"]
        made = "--init " + made["init"] if made["model"] == "hf" else "--model " + made["model"]
        raise ValueError(f"--resume: {path} is of another model: {', '.join(wrong)}; it was made "
                         f"with {made}")
    return path


def prepare_out(out: Path, resumed: Path | None, step: int) -> None:
    """Clear what a killed run left. Of the run that goes on here, keep the log up to the step that
    it resumes; put any other run aside."""
    for torn in out.glob("step-*.tmp"):
        shutil.rmtree(torn)
    (out / "latest.tmp").unlink(missing_ok=True)
    log = out / "log.jsonl"
    if resumed is None or resumed.parent.resolve() != out.resolve():
        old = [p for p in [log, out / "loss.png", out / "latest", *out.glob("step-*")]
               if p.is_symlink() or p.exists()]
        if old:
            n = next(n for n in range(1, 10**6) if not (out / f"earlier-{n}").exists())
            (out / f"earlier-{n}").mkdir()
            for p in old:
                os.rename(p, out / f"earlier-{n}" / p.name)
            print(f"moved an earlier run to {out / f'earlier-{n}'}")
    elif log.exists():
        kept = [line for line in log.read_text().splitlines(True)
                if line.endswith("}\n") and json.loads(line)["step"] <= step]
        (out / "log.tmp").write_text("".join(kept))
        os.replace(out / "log.tmp", log)


# ---------------------------------------------------------------------------- the loop


def learning_rate(cfg: Config, step: int) -> float:
    """Linear warm-up, then a cosine from lr to min_lr * lr; step counts from 0."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    return cfg.lr * (cfg.min_lr + (1 - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1))))


def local_positions(cfg: Config, rank: int, device: torch.device) -> torch.Tensor:
    """Where this rank's tokens (T/sp,) stand in their sequence."""
    part = cfg.seq // cfg.sp
    return torch.arange(part, device=device) + rank % cfg.sp * part


def to_device(windows: list[np.ndarray], cfg: Config, rank: int,
              device) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of T + 1 tokens -> this rank's part of tokens, labels (M, B, T/sp) on the device."""
    part = cfg.seq // cfg.sp
    first = rank % cfg.sp * part
    windows = [w[first : first + part + 1] for w in windows]
    t = torch.from_numpy(np.stack(windows)).view(-1, cfg.micro_batch, part + 1)
    t = t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t
    labels = t[..., 1:]
    return t[..., :-1].contiguous(), labels.masked_fill(labels == cfg.ignore_token, IGNORE)


def load_batch(cfg: Config, plan: Plan, samples: int, rank: int, world: int):
    """This rank's share of the next batch, and 1 / (valid labels on all ranks). samples: sequences
    that the run has seen, which alone decides what comes next."""
    each = cfg.batch * cfg.sp // world
    first = samples + rank // cfg.sp * each
    windows = [plan.train.sample(first + i) for i in range(each)]
    tokens, labels = to_device(windows, cfg, rank, plan.device)
    valid = (labels != IGNORE).sum()
    dist.all_reduce(valid)
    return tokens, labels, 1 / valid.clamp(min=1).to(torch.promote_types(plan.dtype, torch.float32))


@torch.no_grad()
def evaluate(cfg: Config, plan: Plan, model: LLaMA, rank: int, world: int) -> float:
    """Mean loss over the first validation sequences, whatever R. Ranks without one run a blank."""
    count = min(plan.val.count, cfg.eval_sequences)
    total = torch.zeros(2, dtype=torch.float64, device=plan.device)
    one, positions = torch.ones((), device=plan.device), local_positions(cfg, rank, plan.device)
    for first in range(0, count, world // cfg.sp * cfg.micro_batch):
        ids = [first + rank // cfg.sp * cfg.micro_batch + i for i in range(cfg.micro_batch)]
        tokens, labels = to_device([plan.val.window(min(i, count - 1)) for i in ids], cfg, rank,
                                   plan.device)
        labels[0, [i for i, j in enumerate(ids) if j >= count]] = IGNORE
        loss = model(tokens[0], labels[0], one, positions)
        total += torch.stack([loss.double(), (labels != IGNORE).sum()])
    dist.all_reduce(total)
    return (total[0] / total[1].clamp(min=1)).item()


class Progress(threading.Thread):
    """Where in a step the device is, for steps that take long: it polls, and nothing waits for it.
    A terminal gets one line that is rewritten, a file one every half minute."""

    def __init__(self, states: States, on: bool):
        super().__init__(daemon=True)
        self.states, self.step, self.since, self.text = states, 0, 0.0, ""
        self.every = 1.0 if sys.stdout.isatty() else 30.0
        if on:
            self.start()

    def begin(self, step: int) -> None:
        self.since, self.text, self.step = time.perf_counter(), "", step

    def end(self) -> None:
        self.step = 0

    def run(self) -> None:
        page = resource.getpagesize()
        while True:
            time.sleep(self.every)
            self.text = self.states.progress() or self.text
            if not (self.step and self.text and time.perf_counter() - self.since > self.every):
                continue
            host = int(Path("/proc/self/statm").read_text().split()[1]) * page / GIB
            gpu = 0.0
            if torch.cuda.is_initialized():
                gpu = (torch.cuda.memory_allocated() + Exchange.mapped_bytes()) / GIB
            line = (f"step {self.step}: {self.text}, {time.perf_counter() - self.since:.0f} s, GPU "
                    f"{gpu:.1f} GiB, host {host:.1f} GiB a rank")
            print(f"\r{line}\033[K" if self.every == 1 else line,
                  end="\r" if self.every == 1 else "\n", flush=True)


def simulated_requests(cfg: Config, plan: Plan, world: int, rank: int, say) -> list[Buffer]:
    """Of a step, simulated in a process that has no process group; none, if that fails. A
    collective."""
    found = [[]]
    if rank == 0:
        bare = dataclasses.replace(plan, train=None, val=None, pretrained=None)
        try:
            with get_context("spawn").Pool(1) as other:  # whose end ends it; others wait, too
                job = other.apply_async(simulate_step, (cfg, bare, world))
                found = [job.get(cfg.timeout / 2)[0]]
        except Exception as e:
            say(f"the first steps run unplanned, since none could be simulated: {e!r}")
    dist.broadcast_object_list(found)
    return found[0]


def planned_memory(cfg: Config, device: torch.device, guess: list[Buffer],
                   say) -> StepMemory | None:
    """For --memplan. Raises ValueError if its allocator cannot be built."""
    if cfg.memplan == "off" or cfg.memplan == "auto" and device.type == "cpu":
        return None
    try:
        library(device.type)
    except RuntimeError as e:
        if cfg.memplan == "on":
            raise ValueError(f"--memplan on: {e}") from None
        return say(f"--memplan auto is off: {e}")
    memory = StepMemory(str(device), guess=guess)
    if guess:
        say(f"memory plan of a simulated step: {memory.plan}", flush=True)
    return memory


def keep_if_it_saves(cfg: Config, memory: StepMemory, device: torch.device,
                     say) -> StepMemory | None:
    """Print the plan; None if it saves too little to be worth keeping."""
    say(f"memory plan of a step: {memory.plan}")
    if cfg.memplan == "on":
        return memory
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    saved = reserved - torch.cuda.memory_reserved(device) - memory.plan.peak
    say(f"that is {saved / GIB:.2f} GiB less than PyTorch's allocator reserved for the step")
    total = torch.cuda.get_device_properties(device).total_memory
    return memory if saved > total / 100 else None


def finite_or_none(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def draw_losses(out: Path) -> None:
    """OUT/log.jsonl -> OUT/loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    fig, ax = plt.subplots(figsize=(7, 4))
    for key, style in (("loss", "-"), ("val_loss", "o--")):
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        if points:
            ax.plot(*zip(*points), style, markersize=4, label=key.replace("_", " "))
    ax.set(xlabel="step", ylabel="cross-entropy, nats a token")
    ax.legend() if ax.lines else None
    fig.tight_layout()
    fig.savefig(out / "loss.png", dpi=120)
    plt.close(fig)


def describe(cfg: Config, plan: Plan, world: int, say) -> None:
    """Print what was chosen and why."""
    f, kept = plan.factors, plan.activations
    secondary = f" secondary={f.secondary}" if f.secondary else ""
    say(f"states: p={f.p} g={f.g} os={f.os}{secondary} of {world} ranks, {cfg.per_node} a node; "
        f"{cfg.os_layout}-tensor; overlapped: {cfg.overlap}; recomputed: {cfg.recompute}")
    say(f"batch: {cfg.batch} sequences = {world // cfg.sp} data-parallel ranks x "
        f"{plan.micro_batches} micro-batches x {cfg.micro_batch}; sp={cfg.sp}, {cfg.head_groups} "
        f"head groups; {plan.tokens(cfg):,} tokens a rank at once")
    if kept:
        host = swapped_host_bytes(cfg, plan)
        say(f"activations: {kept.describe()} of {cfg.chunk:,} tokens; {host / GIB:.1f} GiB of "
            f"host memory a rank; {plan.reason}")
    need = device_bytes(cfg, plan)
    say("memory a device: " + ", ".join(f"{k} {v / GIB:.2f}" for k, v in need.items())
        + f"; {sum(need.values()) / GIB:.2f} GiB", flush=True)


def build(cfg: Config, plan: Plan, say, as_planned: bool = False,
          groups: Groups | None = None) -> tuple[LLaMA, States]:
    """Make the model, with layers in chunks if that is planned, and its states. Sets
    plan.activations again, by times of this machine, if not as_planned. A collective of all
    ranks."""
    device, shape = plan.device, (cfg.micro_batch, cfg.seq // cfg.sp)
    groups = groups or Groups(timedelta(seconds=cfg.timeout))
    op = Ulysses(plan.kernel, cfg.sp, groups, CommStream(device), cfg.head_groups, cfg.per_node)
    if plan.activations and not as_planned:
        say(f"measuring a layer, in chunks of {cfg.chunk:,} tokens", flush=True)
        measured = measure(plan.model, op, shape, cfg.chunk, device, plan.dtype)
        on_all_ranks(lambda: set_activations(cfg, plan, *measured))
        plan.reason += " (a layer measured; sp and shards by default hardware rates)"
    describe(cfg, plan, dist.get_world_size(), say)
    with torch.device("meta"):
        model = LLaMA(plan.model, op)
    kept = plan.activations
    if cfg.recompute == "full":
        model.layer_runner = recomputed_layers
    elif kept:
        on_all_ranks(lambda: ChunkedLayers(model, shape, kept, cfg.chunk, device, plan.dtype))
    states = States(
        model, device, plan.dtype, plan.micro_batches, plan.factors, cfg.os_layout, groups,
        overlap=() if cfg.overlap == "none" else tuple(cfg.overlap.split(",")),
        reduce_dtype=torch.float32 if cfg.reduce_dtype == "fp32" else None,
        gather_layers=cfg.recompute == "full" or kept is not None,
        num_chunks=kept.chunks if kept else 1, betas=(cfg.beta1, cfg.beta2),
        decay=cfg.weight_decay)
    return model, states


def wait_for_host_memory(model: LLaMA, say) -> None:
    """The host memory that layers swap to is pinned while states are made and weights are read: go
    on when it is all there, on all ranks."""
    layers = getattr(model.layer_runner, "__self__", None)
    if isinstance(layers, ChunkedLayers):
        on_all_ranks(lambda: layers.wait_for_host_memory(say))


def run_step(model: LLaMA, states: States, batch, positions: torch.Tensor, lr: float, clip: float):
    """Forward, backward, update. batch: of load_batch. Returns the loss, the gradient's norm, and
    whether they are finite, on the device. In order, with what runs beside it:

        model(...)         embedding, layers, head and loss; a Matrix raises unshard before its use
                             beside it: param_broadcast of the last update, param_gather, offload
        backward           the same in reverse; a Matrix raises unshard, then add_grad
                             beside it: param_gather, grad_scatter, prefetch
                             in the last micro-batch: grad_reduce
        finish_gradients   compute waits for grad_scatter and grad_reduce; vectors' gradients
        update             global norm, clipping, OPTIMIZER on what this rank owns, unit by unit
                             beside it, and under the next forward: param_broadcast
    """
    tokens, labels, scale = batch
    states.begin_step()
    loss = torch.zeros_like(scale)
    for micro_batch in zip(tokens, labels):
        part = model(*micro_batch, scale, positions)
        part.backward()
        states.end_micro_batch()
        loss += part.detach()
    states.finish_gradients()
    dist.all_reduce(loss)
    return loss, *states.update(lr, clip, loss)


def simulated_backward(do, q, k, v, o, lse):
    """The CPU's, requesting what FlashAttention-4's does: its sums of dq, and two rows."""
    grads = attention.KERNELS["cpu"].backward(do, q, k, v, o, lse)
    _ = q.new_empty(q.shape, dtype=torch.float32), lse.clone(), lse.clone()
    return grads


@contextlib.contextmanager
def simulation(running: list, gpu: bool):
    """Inside, a step on fake tensors of the CPU, in a process group that sends nothing, requests
    what it does elsewhere: gpu, on GPUs. running: a stack, whose last is a token of the fused
    kernel or side stream that would run; what is born and dies in it is left out."""
    replaced = []

    def replace(owner, name: str, new) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def as_one_kernel(fn):
        @functools.wraps(fn)
        def run(*args, **kwargs):
            running.append(object())
            try:
                return fn(*args, **kwargs)
            finally:
                running.pop()

        return run

    @contextlib.contextmanager
    def after_compute(stream):
        if not stream.overlap:
            yield
            return
        running.append(object())
        try:
            yield
        finally:
            running.pop()

    def map_memory(exchange, elements: int, like: torch.Tensor) -> None:
        exchange.memory = like.new_empty(elements)

    for module in (llama, shard) if gpu else ():
        for name, fn in list(vars(module).items()):
            casts_on_a_cpu = name in ("matmul_fp32", "weight_grad_into")
            if getattr(fn, "is_compiled", False) or casts_on_a_cpu:
                replace(module, name, as_one_kernel(fn))
    if gpu:
        for name in ("update_param", "update_vectors"):  # one kernel, if the optimizer is compiled
            replace(States, name, as_one_kernel(getattr(States, name)))
        replace(CommStream, "after_compute", after_compute)
        replace(Exchange, "map_memory", map_memory)
    replace(dist, "_coalescing_manager", lambda *_, **__: contextlib.nullcontext())
    try:
        yield
    finally:
        for owner, name, old in reversed(replaced):
            setattr(owner, name, old)


def simulate_step(cfg: Config, plan: Plan, world: int) -> tuple[list[Buffer], int]:
    """Return the first rank's requests in a step, as large as are planned, and the bytes of what
    lasts between steps, on fake tensors. Raises RuntimeError where there is a process group."""
    gpu = plan.device.type == "cuda" or cfg.ranks is not None
    kind = "cuda" if gpu else "cpu"
    plan = dataclasses.replace(plan, device=torch.device("cpu"), kernel="cpu")
    running: list = [None]

    def make():
        model, states = build(cfg, plan, lambda *_, **__: None, as_planned=True)
        if gpu:
            cpu = attention.KERNELS["cpu"]
            model.attention.kernel = dataclasses.replace(cpu, backward=simulated_backward)
        if gpu and cfg.sp > 1:
            model.attention.exchange.peer_access = model.attention.one_node
        tokens = torch.zeros(plan.micro_batches, cfg.micro_batch, cfg.seq // cfg.sp).long()
        batch = tokens, tokens, torch.ones((), dtype=states.accum_dtype)
        positions = local_positions(cfg, 0, plan.device)
        return lambda: run_step(model, states, batch, positions, 1e-4, cfg.clip)

    torch.compiler.set_stance("force_eager")
    with simulation(running, gpu):
        requests, lasting = simulate(make, world, lambda: running[-1], MIN_PLANNED_BYTES[kind],
                                     ALLOCATOR_ALIGN_BYTES[kind])
    return requests, lasting - round(swapped_host_bytes(cfg, plan))  # on the CPU here, too


def main(argv: list[str] | None = None) -> None:
    cfg = parse(argv)
    stop = {"signal": 0}  # set by a signal, agreed on by all ranks at the end of a step

    def on_signal(number, _):
        if stop["signal"] == signal.SIGINT == number and "RANK" not in os.environ:
            raise KeyboardInterrupt  # Ctrl-C twice: now (torchrun itself sends it twice)
        stop["signal"] = number

    try:
        check_flags(cfg)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    rank, world, local_rank = start_ranks(cfg.timeout)
    world = cfg.ranks or world
    print0 = print if rank == 0 else (lambda *a, **k: None)
    launch = launch_name()
    plan = on_all_ranks(lambda: make_plan(cfg, rank, world, local_rank, launch))
    device = plan.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        expandable_segments()
    min_budget_over_ranks(plan)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    planned_for = "NVIDIA H200" if cfg.ranks and device.type == "cpu" else name
    plan.rates = find_rates(planned_for, device, plan.dtype, plan.kernel, print0)
    plan = on_all_ranks(lambda: choose_plan(cfg, plan, world, rank))
    out = Path(cfg.out)
    cap_gpu(cfg, plan)

    print0("config: " + " ".join(f"{k}={'auto' if v is None else v}"
                                 for k, v in dataclasses.asdict(cfg).items()))
    count, (causal, full) = param_count(plan.model), flops_per_token(plan.model, cfg.seq)
    print0(f"model {cfg.model}: {count:,} parameters, {causal:.3g} FLOPs a token causal, "
           f"{full:.3g} full, at {cfg.seq:,} tokens; on {name}")
    print0(f"data {cfg.data}: {len(plan.train.corpus):,} tokens, {plan.train.count:,} training and "
           f"{plan.val.count:,} validation sequences of {cfg.seq:,}")
    if cfg.dry_run:
        print0(f"a checkpoint: {checkpoint_bytes(plan.model, plan.dtype) / GIB:.2f} GiB")
        describe(cfg, plan, world, print0)
        dist.destroy_process_group()
        if cfg.ranks and plan.activations is None:
            print0("not simulated: what autograd saves is known for layers in chunks alone")
        elif cfg.ranks:
            requests, lasting = simulate_step(cfg, plan, world)
            most = lower_bound(requests)
            print0(f"simulated on fake tensors: {lasting / GIB:.2f} GiB last between steps, "
                   f"{most / GIB:.2f} come in one ({len(requests):,} requests of 1 MiB or more); "
                   f"{(lasting + most) / GIB:.2f} GiB")
        return

    print0(f"attention kernel: {plan.kernel}")
    fused = cfg.compile and device.type == "cuda"
    print0(f"element-wise parts: {'compiled' if fused else 'eager'}")
    torch.compiler.set_stance("default" if fused else "force_eager")
    print0(on_all_ranks(lambda: check_disk(cfg, plan)))
    model, states = build(cfg, plan, print0)
    if states.imbalance:
        print0(f"optimizer states: the largest share is {states.imbalance:.1%} above the mean")
    start = load_states(cfg, plan, model, states, print0)
    if rank == 0:
        prepare_out(out, plan.resume, start)
    dist.barrier()

    peak, saved, step, stopped, times = plan.rates.peak, start, start, 0, []
    skipped = skipped_in_a_row = 0
    if start >= cfg.steps > 0:
        print0(f"nothing to train: at step {start} of {cfg.steps}")
    log = open(out / "log.jsonl", "a") if rank == 0 else None
    gc.collect()
    gc.freeze()  # what lives until the end need not be walked by every collection
    positions = local_positions(cfg, rank, device)
    samples = plan.samples
    if start < cfg.steps:
        batch = load_batch(cfg, plan, samples, rank, world)
    signal.signal(signal.SIGTERM, on_signal)  # until here there is nothing to save
    signal.signal(signal.SIGINT, on_signal)
    clock = time.perf_counter()
    progress = Progress(states, rank == 0)
    guessed = cfg.memplan == "on" and plan.activations and start < cfg.steps
    guess = simulated_requests(cfg, plan, world, rank, print0) if guessed else []
    memory = on_all_ranks(lambda: planned_memory(cfg, device, guess, print0))
    wait_for_host_memory(model, print0)
    for step in range(start + 1, cfg.steps + 1):
        progress.begin(step)
        lr = learning_rate(cfg, step - 1)
        work = functools.partial(run_step, model, states, batch, positions, lr, cfg.clip)
        plans = memory and memory.plans
        loss, norm, finite = memory.run(work) if memory else work()
        del work
        if memory and memory.plans > plans:
            memory = keep_if_it_saves(cfg, memory, device, print0)
        samples += cfg.batch
        if step < cfg.steps:  # read the next batch while the GPU works
            batch = load_batch(cfg, plan, samples, rank, world)
        host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        gpu_gib = Exchange.mapped_bytes() / GIB
        if device.type == "cuda":
            gpu_gib += torch.cuda.max_memory_allocated() / GIB
        worst = torch.tensor([stop["signal"], gpu_gib, host_gib], device=device).double()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        # the only wait of a step: everything that the host must know, in one copy
        loss, norm, finite, stopped, gpu_gib, host_gib = torch.cat(
            [torch.stack([loss.double(), norm.double(), finite.double()]), worst]).tolist()
        seconds = time.perf_counter() - clock
        progress.end()

        val_loss, last = None, step == cfg.steps
        if (last and cfg.eval_every >= 0) or (cfg.eval_every > 0 and step % cfg.eval_every == 0):
            if memory:
                memory.give_back()
            val_loss = evaluate(cfg, plan, model, rank, world)
        times = times[-19:] * (step > start + 2) + [seconds]  # without the first, which compiles
        tgs = cfg.batch * cfg.seq / seconds / world
        mfu = [f * tgs / peak if peak else None for f in (causal, full)]
        left = timedelta(seconds=round(sum(times) / len(times) * (cfg.steps - step)))
        print0(f"step {step}/{cfg.steps} loss {loss:.4f} grad {norm:.3f} lr {lr:.2e} "
               f"TGS {tgs:,.0f} " + (f"MFU {mfu[0]:.1%} causal {mfu[1]:.1%} full " if peak else "")
               + (f"GPU {gpu_gib:.1f} GiB " if gpu_gib else "") + f"{seconds:.2f} s left {left}"
               + (f" val_loss {val_loss:.4f}" if val_loss is not None else "")
               + ("" if finite else " SKIPPED: not finite"), flush=True)
        if log:
            row = {"step": step, "loss": finite_or_none(loss), "grad_norm": finite_or_none(norm),
                   "lr": lr, "tgs": tgs, "mfu_causal": mfu[0], "mfu_full": mfu[1],
                   "gpu_gib": gpu_gib or None, "host_gib": host_gib, "seconds": seconds}
            row |= {} if val_loss is None else {"val_loss": val_loss}
            row |= {} if finite else {"skipped": True}
            row |= {"memplan": memory.counts} if memory and memory.counts else {}
            print(json.dumps(row), file=log, flush=True)
        skipped, skipped_in_a_row = skipped + (not finite), 0 if finite else skipped_in_a_row + 1
        if stopped:
            print0(f"stopped by {signal.Signals(int(stopped)).name} after step {step}")
        if skipped_in_a_row == cfg.max_skips:
            stopped = -1
            print0(f"{skipped_in_a_row} steps in a row were not finite: the run ends here")
        if memory and (stopped or cfg.save_every > 0 and step % cfg.save_every == 0):
            memory.give_back()
        if cfg.save_every > 0 and step % cfg.save_every == 0 or stopped and cfg.save_every >= 0:
            save_checkpoint(cfg, plan.model, states, step, samples, launch)
            saved = step
        if stopped:
            break
        clock = time.perf_counter()

    if memory:
        memory.give_back()
    if cfg.save_every >= 0 and (saved != step or not (plan.resume or step)):
        save_checkpoint(cfg, plan.model, states, step, samples, launch)
    if cfg.export and not stopped:
        export(cfg, plan, states, rank)
        print0(f"exported {cfg.export}")
    if skipped:
        print0(f"{skipped} steps were skipped: the loss or the gradient was not finite")
    if log:
        log.close()
        if step:
            draw_losses(out)
            print0(f"wrote {out / 'log.jsonl'} and {out / 'loss.png'}")
    dist.barrier()
    dist.destroy_process_group()
    if stopped == -1:
        sys.exit("train.py: stopped, the loss or the gradient was not finite; see the log")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: error: {e}", file=sys.stderr)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(2)
    except torch.OutOfMemoryError as e:
        arena = live_arena.get("cuda")
        held = "" if arena is None else f", and --memplan holds {arena.nbytes / GIB:.2f} GiB"
        sys.exit(f"train.py: out of GPU memory: {e}\nThe line 'memory a device' above says what "
                 f"was planned{held}. Shorten --seq, lower --micro-batch, --chunk, --alpha or "
                 "--resident-layers, or use more GPUs or a larger --sp. What was saved is whole: "
                 "continue with --resume.")
