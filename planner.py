"""Choose the fastest plan of a training step that fits memory.

A plan says how many GPUs share a sequence (sp), how sequences form micro-batches, how model states
are sharded (p, g, os), and which activations layers keep, swap or recompute. costs.py predicts a
plan's seconds and counts its bytes. The planner solves

    minimize     seconds of a step * GPUs / tokens of a step
    subject to   GPU bytes <= memory of a GPU,  host bytes <= host memory per rank

This is AMSP's problem (section IV), with InternEvo's degrees of freedom and Memo's activation
plans. A flag fixes one choice, and the planner makes the others. It needs no GPU. Use it as a
command or as a function:

    python planner.py --model 7b --ranks 4 --seq 1M --batch 1 --cluster h200x8
    plan(constraints, model, hardware)      # returns a list of Plans, best first

Legend:

    p, g, os     shards of parameters, of gradients, of optimizer states. intra: the states of each
                 matrix are cut into os parts; inter: one rank owns all of them (shard.py)
    sp           GPUs that share a sequence. They form one data-parallel group
    dp           data-parallel groups. Each has sequences of its own
    tp, pp       GPUs that share each layer's matrices; stages of a pipeline. A stage has pp_chunks
                 virtual stages
    head groups  parts of a GPU's heads, which attention runs one after the other (attention.py)
    chunk        tokens that a layer runs at once
    n            layers that backward reaches: all, unless the first ones are frozen
    k            the last k of these layers are resident: they copy no activations to the host
    alpha        the other n - k layers swap their input x, attention's output o, and this fraction
                 of S_others, which are all other activations that they save (offload.py)
    m            layers per group. Only the first layer of a group saves x
    X            layers that drop o, and run attention again in backward
    d            lag: before layer i + d, compute waits for layer i's copies to the host
    TGS          tokens per GPU per second

    resident states    the number of layers whose optimizer states stay on the GPU, while those of
                       the other layers are on the host. They are the first layers. (Resident layers
                       are something else: they keep activations.)

This is a part of what the command above prints:

    choice                      value                   why
    GPUs per sequence (sp)      4                       the only legal value with --batch 1
    head groups                 8                       fastest; more groups need less memory
    shards of model states      p=1 g=1 os=2 intra      fastest; on a tie on the GPU, then the ...
    activations                 2 of 32 layers resident with 81% of their chunks, alpha=0.00, ...

    plan   s per step   TGS   MFU causal   GPU memory
    1      427.2        614   53.6%        126.0 GiB

Why --batch 1 forces sp 4: the 4 GPUs form 4 / sp data-parallel groups, which share the sequences of
a step equally. 4 or 2 groups cannot share one sequence, so sp 1 and 2 are illegal (batch_choices).
With --batch 4 all three are legal, and sp 4 still wins: it takes 1709 s per step. With --sp 2 the
best plan takes 1780 s, and with --sp 1 it takes 2131 s. A GPU holds a quarter of a sequence with
sp 4, a half with sp 2, and all of it with sp 1. The more tokens a GPU holds, the fewer activations
per token it can save. With sp 2 only 1 layer in 5 saves its input, and backward recomputes the
other inputs. Besides, 4 of 32 layers drop attention's output, and run attention twice. With sp 1,
29 layers do that, which leaves memory for the input of 1 layer in 3.

How the search works. Each degree of freedom is a function that lists its legal values. A
combination of the values that the functions in SHAPE list is a *shape*: a plan without the sharding
of its model states. For each shape the search compares the shardings that `sharding_choices` lists
(p, g, os, and the GPU or the host for optimizer states). `fit` completes such a plan:
plan_activations chooses what layers keep. If optimizer states are on the host, `fit` also tries
several numbers of layers whose states stay on the GPU. The search skips a shape if a lower bound of
its seconds says that it cannot win. There are two rounds:

    usual shapes      such as those with 4 head groups and with chunks of 16K or 8K tokens
    unusual shapes    all other values, if a bound says that they may be faster than the best plan
                      so far. Sizes of chunks are powers of two from 2K to 64K, or all tokens

Because of the second round, a flag that is set by hand hardly ever gives a faster plan than the
search finds without it. The printed alternatives to the best plan are less exact, because they come
from usual shapes only: in the example with --batch 4, the command without --sp says that sp 2 takes
1806 s, and with --sp 2 it finds 1780 s. Two plans tie if their times differ by less than 0.2 %. Of
plans that tie, `preference` takes the simpler one: a smaller tp, fewer stages, no host memory, a
smaller sp, fewer shards. place_nodes orders the nodes of a cluster so that few bytes cross the
spine of its switches (AMSP, section V-D).

With tensor parallelism tp and a pipeline of pp stages, the R = ranks / (tp pp) ranks with the same
stage and tp rank share model states and sequences. All stages use the same activation plan. It is
made for one micro-batch's pass through the largest virtual stage. A stage holds the activations of
several such passes at once, and the first stage holds the most. So each pass may use this fraction
of the memory that is left for activations: 1 / (passes that the first stage holds). (The memory
that is left is counted for an imaginary stage that has the most of everything: costs.py.)

Left out: a different activation plan for each stage.
"""

import argparse
import bisect
import functools
import itertools
import json
import math
import operator
import os
import re
import sys
import typing
from dataclasses import Field, asdict, astuple, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch

from attention import KERNELS, head_group_counts
from costs import (
    OVERLAP_CHOICES,
    Estimator,
    LayerBytes,
    LayerSeconds,
    Plan,
    activation_gpu_bytes,
    activation_host_bytes,
    ceil_div,
    copy_waits,
    layer_seconds,
    link_busy_seconds,
    memory_of_states,
    most_lag,
    most_swapped_chunks,
    nearest_kernel,
    recomputation_seconds,
    skeletal_bytes,
    step_seconds,
    traffic_seconds,
    with_bytes,
)
from data import regular
from fp8 import MULTIPLE, fits_tensor_cores
from hardware import FLOAT8_PRODUCTS, Profile, launch_host, load_profile, profile_files, scaled
from model import ARCHITECTURES, MODELS, ModelConfig, divisors, param_counts
from offload import ActivationPlan
from optim import OPTIMIZERS
from pipeline import why_no_order
from shard import (
    MOST_ROUNDED_SUMMANDS,
    Factors,
    illegal,
    legal_factors,
    parse_strategy,
)
from streams import GIB, NO_LIMIT, in_unit, unit_of

# ---------------------------------------------------------------------------- flags


UNITS = {"G": 2**30, "M": 2**20, "K": 2**10, "": 1}


def size(text):
    """Return the whole number that a text such as '4096', '64K' or '1.5M' says. K, M and G are
    binary."""
    number = re.fullmatch(r"(-?\d{1,18}(?:\.\d{1,18})?)([KMG]?)", text.upper())
    value = float(number[1]) * UNITS[number[2]] if number else None
    if value is None or value != int(value):
        raise argparse.ArgumentTypeError(
            f"{text} is not a whole number. Write it as 4096, 64K or 1.5M"
        )
    return int(value)


def in_size(value):
    """Return a value as text that `size` reads, in the largest unit that leaves a whole number."""
    for letter, unit in UNITS.items():
        if type(value) is int and value and value % unit == 0:
            return f"{value // unit}{letter}"
    return "auto" if value is None else f"{value}"


def flag(default, text: str, low: float = 1, high: float = 2**20, among=(), group: str = ""):
    """Return a dataclass field that is a flag: a number from `low` to `high`, or a word of `among`.
    text: its help. group: if given, a group of flags with this title begins here in --help."""
    return field(
        default=default,
        metadata={"help": text, "range": (low, high), "among": among, "group": group},
    )


def flags_of(program) -> dict[str, Field]:
    """Return the fields of a dataclass that are flags, by name. A program's own flags come before
    those that it inherits from Constraints."""
    flags = {f.name: f for f in fields(program) if f.metadata}
    return {name: flags[name] for name in [*program.__annotations__, *flags] if name in flags}


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def home_path(text):
    """Return a flag's text with ~ and ~USER replaced by the home folder at the beginning of a path.

    Shells replace them only at the beginning of a word. So they leave --out=~/run, hf:~/model and
    the second path of a.txt,~/b.txt as they are. A text that is not a path is returned unchanged.
    Raises ArgumentTypeError if there is no such home folder.
    """
    parts = re.split("(^hf:|,(?=~))", text)
    for i, part in enumerate(parts):
        if part.startswith("~"):
            parts[i] = os.path.expanduser(part)
        if parts[i].startswith("~"):
            raise argparse.ArgumentTypeError(
                f"{text}: this machine knows no home folder {part.partition('/')[0]}. "
                f"Write the whole path, or ./{part} if that is the file's name"
            )
    return "".join(parts)


home_path.__name__ = "str"  # --help and argparse's errors show this name as the type of a flag


def flag_type(f):
    """Return the function that converts a flag's text to its value. If the field may be None, the
    text `auto` means None. Every flag of type str goes through home_path, because it may be a path.
    """
    value_type, *optional = typing.get_args(f.type) or [f.type]
    value_type = {int: size, str: home_path}.get(value_type, value_type)

    def convert(text):
        return None if optional and text == "auto" else value_type(text)

    convert.__name__ = value_type.__name__  # argparse says "invalid float value"
    return convert


def make_parser(program: type, description: str) -> argparse.ArgumentParser:
    """Return a parser of a dataclass's flags. Its result has only the flags that a command
    gives."""
    group = parser = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog="Sizes may end in K, M or G, which are binary: 4K is 4096. If a flag is auto, the "
        "program chooses its value and prints it.",
    )
    for name, f in flags_of(program).items():
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        shown = "" if str(f.default) in ("", "None", "False") else f" ({f.default})"
        options = {"help": (f.metadata["help"] + shown).replace("%", "%%")}
        if f.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            convert = options["type"] = flag_type(f)
            options["metavar"] = "|".join(f.metadata["among"]) or convert.__name__.upper()
        if name == "resume":
            options |= {"nargs": "?", "const": "latest"}
        group.add_argument(flag_name(name), **options)
    return parser


def check_utf8(flag: str, value: str) -> None:
    """Raise ValueError if the bytes of a flag's value are not UTF-8. A file of such a name can be
    written, but not always read again: safetensors refuses it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{flag} {os.fsencode(value)!r}: these bytes are not UTF-8. Rename the file or folder"
        ) from None


def check_values(program) -> None:
    """Raise ValueError for a number that is out of range, for an unknown word, and for flags that
    contradict each other."""
    for name, f in flags_of(program).items():
        value = getattr(program, name)
        among, (low, high) = f.metadata["among"], f.metadata["range"]
        types = typing.get_args(f.type) or (f.type,)
        is_legal_type = type(value) in types or (type(value) is int and float in types)
        if not is_legal_type:
            names = [t.__name__ for t in types if t is not type(None)]
            raise ValueError(f"{flag_name(name)} {value!r} must be of type {' or '.join(names)}")
        if isinstance(value, str):
            check_utf8(flag_name(name), value)
        if among and value not in among:
            hint = ""
            if name in ("architecture", "optimizer", "schedule"):  # a fork may add rows
                hint = ". A fork's row exists only if this program imports the fork's module"
            raise ValueError(f"{flag_name(name)} {value}: choose one of {', '.join(among)}{hint}")
        if type(value) in (int, float) and not low <= value <= high:  # rejects NaN, too
            raise ValueError(f"{flag_name(name)} {value}: choose a value from {low} to {high}")
    if program.document_token is not None:
        check_documents(program.memplan, program.document_token)
    by_hand = [
        flag_name(name)
        for name in ("alpha", "resident_layers", "chunk")
        if getattr(program, name) is not None
    ]
    if by_hand and program.recompute != "auto":
        raise ValueError(
            f"{' '.join(by_hand)} and --recompute {program.recompute} contradict each other. Drop "
            "one of them"
        )


def check_documents(memplan: str, document_token: int) -> None:
    """Raise ValueError if --memplan on would have to plan steps with documents."""
    if memplan == "on" and document_token >= 0:
        raise ValueError(
            "--memplan on cannot plan steps with documents, because the tensors of a step differ "
            "with each batch's documents. Pass --memplan off, or --document-token -1"
        )


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
Count = int | None  # None: auto


@dataclass(frozen=True)
class Constraints:
    """The flags that restrict a plan. None, `auto` on the command line, leaves the choice to the
    planner. A program such as train.py inherits these flags and adds its own."""

    # fmt: off
    seq: int = flag(4096, "Tokens per sequence.", 1, 2**40)
    batch: Count = flag(
        None, "Sequences per step, over all GPUs. auto: 512K tokens (4K for tiny), or one sequence "
        "per data-parallel group if that is more. A resumed run keeps its batch.",
        group="a step and its tokens")
    micro_batch: Count = flag(
        None, "Sequences that run at once on a GPU, or on the sp GPUs that share them. auto: the "
        "fastest size by predicted time.")
    tokenizer: str = flag(
        "", "Hugging Face folder whose tokenizer.json turns text into tokens. They are kept in "
        "OUT/tokens.")
    document_token: Count = flag(
        None, "Id of the token that ends a document. Attention stays inside documents, and the "
        "token after a document's end is no label. -1: attention crosses documents. auto: the "
        "token with which --tokenizer ends texts, or the one that the .bin files name. If there is "
        "neither, -1.",
        -1, 2**32 - 1)
    attention: str = flag("auto", "Attention kernel: auto, fa4, cudnn, flash or cpu.")
    dtype: str = flag("bf16", "Dtype of parameters and activations.", among=DTYPES)
    p: Count = flag(
        None, "Number of parameter shards. auto: the fastest by predicted time, on a tie the "
        "fewest.", group="sharding")
    g: Count = flag(None, "Number of gradient shards, equal to p or os. auto: as for --p.")
    os: Count = flag(None, "Number of optimizer state shards, a multiple of p. auto: as for --p.")
    strategy: str = flag(
        "", "Set p, g and os by a name: ddp, zero1, zero2, zero3, mics:K or zero1.5:K.")
    optimizer: str = flag(
        "adamw", "Optimizer of matrices, a row of optim.OPTIMIZERS. Norms and biases have AdamW, "
        "unless the row says otherwise.", among=OPTIMIZERS)
    os_layout: str = flag(
        "auto", "Layout of optimizer states: a rank owns whole tensors (inter), or each tensor is "
        "split evenly (intra). auto: intra, if the optimizer allows it.",
        among=("auto", "intra", "inter"))
    os_place: str = flag(
        "auto", "Where optimizer states lie. From the host they stream through the GPU during the "
        "next forward, except those that --resident-states keeps on the GPU. auto: the faster "
        "place that fits, on a tie the GPU.",
        among=("auto", "gpu", "host"))
    resident_states: Count = flag(
        None, "If optimizer states are on the host: how many of the first layers keep theirs on "
        "the GPU all the same, so that no copy delays their update. A number above 0 implies "
        "--os-place host. auto: as planned.", 0)
    moments: str = flag(
        "fp32", "Dtype of AdamW's two moments of a matrix. bf16 takes 4 bytes per parameter less, "
        "and rounds them stochastically. Either kind resumes from the other.",
        among=("fp32", "bf16"))
    grad_sums: str = flag(
        "fp32", "Dtype in which the gradients of a step's micro-batches add up. fp32: float32. "
        "dtype: in the dtype that --dtype names, which takes 2 bytes per parameter less in bf16, "
        f"and rounds each sum. It adds up at most {MOST_ROUNDED_SUMMANDS} micro-batches.",
        among=("fp32", "dtype"))
    products: str = flag(
        "dtype", "How the layers multiply matrices. dtype: in the dtype that --dtype names. fp8: "
        "in float8 with a scale per row (fp8.py), which is faster on H100 and H200, and less "
        "precise.",
        among=("dtype", "fp8"))
    overlap: str = flag(
        ",".join(OVERLAP_CHOICES), "What overlaps with computation: a list of names, or none. "
        "param_gather: all-gathers of parameters. grad_scatter: reduce-scatters of gradients. "
        "grad_reduce: sums of gradients over replicas. param_broadcast: broadcasts of updated "
        "parameters. host_update: updates of optimizer states on the host. pipeline: messages "
        "between stages.")
    tp: Count = flag(
        1, "Tensor parallelism: neighbouring GPUs that share each layer's matrices. auto: the "
        "planner searches it.")
    tp_mode: str = flag(
        "msp", "What these GPUs hold between products. mtp: all tokens. msp: a part of the tokens. "
        "fsp: a part, which backward gathers again.", among=("mtp", "msp", "fsp"))
    pp: Count = flag(1, "Stages of a pipeline. auto: the planner searches them.")
    pp_chunks: Count = flag(
        None, "Virtual stages per stage, which interleave. auto: the fastest by predicted time.")
    sp: Count = flag(
        None, "Sequence parallelism: GPUs that share a sequence. auto: the fastest by predicted "
        "time, on a tie the fewest.", group="sequence parallelism")
    ring: Count = flag(
        None, "Factor of sp: GPUs around which k and v travel (ring attention). The other factor, "
        "sp / ring, shares the heads (Ulysses). auto: the fastest by predicted time, on a tie the "
        "smallest.")
    head_groups: Count = flag(
        None, "Groups of a GPU's heads. The next group's all-to-all runs during this group's "
        "attention. With sp 1 groups save memory. auto: the fastest by predicted time.")
    recompute: str = flag(
        "auto", "auto: layers keep, swap or recompute chunks of tokens as planned. none: keep "
        "everything. full: keep only each layer's input, and run attention again, too.",
        among=("auto", "none", "full"), group="memory")
    chunk: Count = flag(
        None, "The most tokens that a layer runs at once. Chunks are equal. auto: the fastest by "
        "predicted time.", 1, 2**40)
    alpha: float | None = flag(
        None, "Fraction of the activations that a swapped layer swaps, besides its input and "
        "attention's output (Memo). It is rounded to whole token chunks. auto: as planned.", 0, 1)
    resident_layers: Count = flag(
        None, "How many of the last layers copy no activations to the host. auto: as planned.", 2)
    memplan: str = flag(
        "off", "on: plan the addresses of a step's tensors once. On one GPU that holds all model "
        "states and all activations, a step also becomes a CUDA graph. Python does not run in such "
        "a step, so your changes to it must not depend on the step or wait for the GPU.",
        among=("off", "on"))
    host_memory: Count = flag(
        None, "Bytes of a node's host memory for model states and activations, such as 400G. auto: "
        "7/8 of what the control group or the machine allows.", 0, 2**60)
    gpu_memory: Count = flag(
        None, "Bytes of a GPU that may be used, such as 80G. A plan takes 95 % of them. auto: "
        "all.", 2**20, 2**60)
    # fmt: on
    default_tokens: int = 0  # per step, if --batch is auto; batch_choices rounds it
    most_sequences: Count = None  # sequences that the data has

    @property
    def has_documents(self) -> bool:
        """Return whether attention stays inside documents."""
        if self.document_token is None:
            return bool(self.tokenizer)
        return self.document_token >= 0

    @property
    def matrix_optimizer(self) -> str:
        """Return the row of optim.OPTIMIZERS for matrices. Raises ValueError."""
        if self.optimizer == "adamw-bf16":  # one way to say it
            raise ValueError("--optimizer adamw-bf16: say --optimizer adamw --moments bf16")
        if self.moments == "fp32":
            return self.optimizer
        if self.optimizer != "adamw":
            raise ValueError(
                f"--moments {self.moments}: only AdamW has these moments, and the optimizer is "
                f"{self.optimizer}. Drop --moments"
            )
        return f"adamw-{self.moments}"

    @property
    def overlaps(self) -> tuple[str, ...]:
        """Return the names in --overlap. Raises ValueError."""
        names = () if self.overlap == "none" else tuple(self.overlap.split(","))
        if not set(names) <= set(OVERLAP_CHOICES):
            raise ValueError(
                f"--overlap {self.overlap}: choose a list of {', '.join(OVERLAP_CHOICES)}, or none"
            )
        return names


@dataclass(frozen=True)
class Hardware:
    """The ranks, and the memory and rates of one rank."""

    ranks: int
    per_node: int  # ranks per node
    profile: Profile
    gpu_budget: float = NO_LIMIT  # bytes of a GPU to plan with
    host_budget: float = NO_LIMIT  # bytes of host memory per rank, for states and activations
    kernel: str = "auto"  # the attention kernel that runs; auto: the best one in the profile
    processor: str = ""  # processor of the host that launches; empty: the profile's first one

    @functools.cached_property
    def est(self):
        """The Estimator of this machine. It remembers the rates that plans have asked for."""
        return Estimator(self.profile, self.kernel, self.processor)


# The planner may use this share of a GPU. CUDA's context, NCCL's communicators and fragments of the
# allocator take the rest.
GPU_SHARE = 0.95


# ---------------------------------------------------------------------------- activations

# Which activations do layers keep, swap or recompute? Memo (section 4.1) swaps as much as its two
# constraints allow. All but two layers are swapped. S_input are the bytes of a layer's x, S_attn
# those of o, S_others those of all its other activations. T_layer is the seconds of its forward,
# and M_CPU the bytes of host memory:
#
#     max alpha:  (S_input + S_attn + alpha * S_others) / bandwidth <= T_layer
#                 (n - 2) * (S_input + S_attn + alpha * S_others)   <= M_CPU
#
# This planner differs in three ways. It also chooses k, the number of resident layers. GPU memory
# is a third constraint. And copies may take longer than one layer's forward, if the lag allows it
# (costs.most_lag). So the first constraint becomes: swapping chunks must not make layers wait
# longer than swapping only x and o does, which is usually 0 s (costs.copy_waits).
#
# If x and o do not fit, layers drop them: only one layer in m keeps x, and X layers drop o. For
# each candidate (k, m, X), the plan swaps as many chunks as all three constraints allow. Then the
# resident layers keep as many chunks as fit. The candidate that loses the least time wins.
#
# Example: 4 layers of 4 chunks. x and o take 1 GiB each, a chunk of S_others 2 GiB. A layer's
# forward takes 1 s, its recomputation 0.3 s. The link to the host carries 5 GiB/s. The GPU has 24
# GiB, the host 12 GiB. The candidate k = 2 (m = 1, X = 0) swaps x and o of 2 layers. How many
# chunks can each limit take, and what follows?
#
#     GPU          x and o of 2 resident layers and of 2 rounding buffers take 8 GiB, so 16 GiB are
#                  left for chunks. If a swapped layer swaps c chunks, forward has c chunks in four
#                  places: the 2 buffers, the layer that runs, and the layer that is being copied.
#                  4 c * 2 GiB <= 16 GiB, so c = 2, and the 2 swapped layers swap 4 chunks
#     host         x and o take 4 GiB, and the other 8 GiB hold 4 chunks
#     bandwidth    1 s of a layer's forward hides 5 GiB. x, o and 1 chunk are 4 GiB, so each of the
#                  2 swapped layers swaps 1 chunk: 2 chunks
#     swap         min(4, 4, 2) = 2 chunks, of the 8 of the swapped layers: alpha = 1/4
#     keep         16 GiB hold 8 chunks. 2 of them are needed for the 2 rounding buffers, which hold
#                  1 chunk each. So the resident layers keep 6 chunks
#     lost         all 16 chunks, less 2 swapped and 6 kept: 8 are recomputed, which is 2 layers'
#                  recomputation, 2 * 0.3 s = 0.6 s
#
# The candidate k = 4 loses 0.6 s, too: it needs no rounding buffer, keeps 8 chunks and recomputes
# 8. It swaps nothing. On a tie the candidate with fewer swapped layers wins, so k = 4 wins.


class TooLarge(ValueError):
    """No legal plan fits memory."""


MOST_STRIDE = 8  # largest m that is tried. Backward recomputes m - 1 inputs of a group at once


@dataclass(frozen=True)
class Candidates:
    """Candidates for an activation plan: arrays with one entry per candidate. (The module docstring
    explains the letters.)"""

    k: np.ndarray  # resident layers
    stride: np.ndarray  # m
    dropped_outputs: np.ndarray  # X
    saves_chunks: np.ndarray  # whether the candidate may keep and swap chunks
    gpu_bytes: np.ndarray  # GPU memory that the candidate needs if it keeps and swaps no chunk
    host_bytes: np.ndarray  # host memory that it needs then

    def __getitem__(self, indices) -> "Candidates":
        return Candidates(*(getattr(self, f.name)[indices] for f in fields(self)))


@functools.lru_cache(maxsize=8)
def activation_candidates(n, layer, resident, must_swap) -> Candidates:
    """Return the candidates for an activation plan of n layers. They are cached, because many plans
    differ only in model states.

    layer: from costs.skeletal_bytes. resident: k, if it is set by hand. must_swap: whether at least
    one chunk has to be swapped. At least two layers are resident, because the lag is at least 2
    (offload.py).
    """
    stride, swapped_layers, dropped_outputs = np.mgrid[
        1 : MOST_STRIDE + 1, : max(1, n - 1), : n + 1
    ]
    # If m > 1, no chunk is kept or swapped. The first X layers drop o. If X > n - k, some of them
    # are resident layers, and then no chunk is kept or swapped either
    saves_chunks = (stride == 1) & (dropped_outputs <= swapped_layers)

    legal = swapped_layers % stride == 0  # whole groups are swapped
    if must_swap:
        legal &= saves_chunks & (swapped_layers > 0)
    if resident:
        legal &= n - swapped_layers == resident

    k, stride, dropped_outputs = (n - swapped_layers)[legal], stride[legal], dropped_outputs[legal]
    without_chunks = ActivationPlan(
        n, 1, resident=k, layers_recomputing_attention=dropped_outputs, stride=stride
    )
    return Candidates(
        k,
        stride,
        dropped_outputs,
        saves_chunks[legal],
        gpu_bytes=activation_gpu_bytes(without_chunks, layer),
        host_bytes=activation_host_bytes(without_chunks, layer),
    )


def whole_chunks(number):
    """Round down to a whole number of chunks. 1e-9 is added because float arithmetic may give
    2.9999999 for 3."""
    return np.floor(number + 1e-9)


def largest(holds, most):
    """Return the largest whole numbers from 0 to `most` for which holds(numbers) is true.

    most: an array. holds: a function of an array of numbers that returns an array of bools. It is
    true for 0, and if it is false for a number, then for all larger ones, too.
    """
    least = np.zeros_like(most)  # the results are in [least, most]
    while (least < most).any():
        middle = np.ceil((least + most) / 2)
        holds_at_middle = holds(middle)
        least = np.where(holds_at_middle, middle, least)
        most = np.where(holds_at_middle, most, middle - 1)
    return least


ALPHA_MISS = 0.02  # a plan may miss --alpha by so much without notice
TRIED_CANDIDATES = 64  # how many candidates `may_be_best` evaluates to exclude others


@dataclass(frozen=True)
class ActivationProgram:
    """The problem that plan_activations solves: layers, and the limits of memory and bandwidth."""

    n: int  # layers that backward reaches
    layer: LayerBytes  # bytes (x, o with its log-sum-exp, S_others) of a layer: skeletal_bytes
    s: LayerSeconds  # seconds of a layer
    chunks: int  # chunks of tokens per layer
    bandwidth: float  # bytes per second to the host, while all GPUs copy
    gpu: float  # bytes that a rank can give to activations
    host: float  # the same, of host memory
    busy: float  # seconds of a layer's forward in which the link to the host has other copies

    @property
    def chunk_bytes(self) -> float:
        """Return the bytes of S_others of one chunk."""
        *_, others = self.layer
        return others / self.chunks

    def most_swapped(self, candidates: Candidates) -> np.ndarray:
        """Return the most chunks that each candidate can swap within GPU and host memory.

        c: chunks that a swapped layer swaps. room: GPU bytes that are left if the candidate neither
        keeps nor swaps any chunk.

            backward    the two rounding buffers hold c chunks each:
                        2 c chunk_bytes <= room
            forward     the buffers stay allocated. Two swapped layers hold c chunks each, too: the
                        one that runs, and the one before it, whose copies may still run:
                        4 c chunk_bytes <= room + (k - 2) (x + attn)

        Why (k - 2) (x + attn): `room` is counted for backward, in which the GPU holds x and o of k
        resident layers. While swapped layers run forward, no resident layer has run yet, and the
        GPU holds x and o of the two swapped layers only.
        """
        x, attn, _ = self.layer
        room = self.gpu - candidates.gpu_bytes
        fit_backward = room / (2 * self.chunk_bytes)
        fit_forward = (room + (candidates.k - 2) * (x + attn)) / (4 * self.chunk_bytes)
        per_layer = np.minimum(whole_chunks(np.minimum(fit_backward, fit_forward)), self.chunks)

        swapped_layers = self.n - candidates.k
        fit_gpu = np.where(candidates.saves_chunks, swapped_layers * per_layer, 0)
        fit_host = whole_chunks((self.host - candidates.host_bytes) / self.chunk_bytes)
        return np.minimum(fit_host, fit_gpu)

    def plans(self, candidates: Candidates, swapped: np.ndarray) -> ActivationPlan:
        """Return the candidates' plans as one ActivationPlan of arrays. swapped: how many chunks
        each of them swaps.

        The lag is as large as it may be. The resident layers keep as many chunks as fit beside the
        rounding buffers:

            kept = room / chunk_bytes - 2 * (chunks that a layer swaps, rounded up)
        """
        plans = ActivationPlan(
            self.n,
            self.chunks,
            candidates.k,
            0,
            swapped,
            candidates.dropped_outputs,
            candidates.stride,
        )
        room = self.gpu - candidates.gpu_bytes
        kept = whole_chunks(room / self.chunk_bytes) - 2 * most_swapped_chunks(plans)
        may_keep = (room >= 0) & candidates.saves_chunks
        most_kept = np.where(may_keep, self.chunks * candidates.k, 0)
        plans = replace(plans, kept_chunks=np.clip(kept, 0, most_kept))
        return replace(plans, lag=most_lag(plans, self.layer))

    def chunks_to_swap(self, candidates: Candidates, most_chunks: np.ndarray) -> np.ndarray:
        """Return how many chunks each candidate swaps: as many as fit in memory and do not make
        layers wait longer than if it swapped none. most_chunks: how many fit in memory.

        The exception: it swaps none if it loses less time then. This happens because rounding
        buffers with chunks take memory in which resident layers could keep chunks."""
        swapped = np.zeros_like(candidates.gpu_bytes)
        can_swap = np.flatnonzero(most_chunks >= 1)
        if can_swap.size:
            can_swap_any = candidates[can_swap]
            no_chunks = swapped[can_swap]

            def waits_if_swapping(number):
                return self.waits(self.plans(can_swap_any, number))

            longest_wait = waits_if_swapping(no_chunks) + 1e-12
            most = largest(
                lambda number: waits_if_swapping(number) <= longest_wait, most_chunks[can_swap]
            )
            lost_with_none = self.lost_seconds(can_swap_any, no_chunks)
            pays = self.lost_seconds(can_swap_any, most) <= lost_with_none
            swapped[can_swap] = np.where(pays, most, no_chunks)
        return swapped

    def lost_seconds(self, candidates: Candidates, swapped: np.ndarray) -> np.ndarray:
        """Return the seconds that each candidate loses, by recomputation and by waits for copies.
        swapped: how many chunks each of them swaps."""
        plans = self.plans(candidates, swapped)
        return recomputation_seconds(plans, self.s) + self.waits(plans)

    def waits(self, plans: ActivationPlan) -> np.ndarray:
        """Return the seconds that the layers of each plan wait for copies."""
        return copy_waits(plans, self.layer, self.s, self.bandwidth, self.busy)

    def may_be_best(self, candidates: Candidates, most_chunks: np.ndarray) -> np.ndarray:
        """Return the indices of the candidates that may lose the least time, or none if nothing
        fits.

        This is cheap, and leaves few candidates to `chunks_to_swap`. Two numbers are compared:

            at_best    what a candidate loses if it swaps all chunks that fit in memory, keeps as
                       many as if it swapped none, and never waits. It cannot lose less than this
            least      what the best of a few candidates loses without swapping any chunk

        A candidate whose at_best is above `least` is not the best one."""
        fitting = np.flatnonzero((self.gpu >= candidates.gpu_bytes) & (most_chunks >= 0))
        if not fitting.size:
            return fitting
        fitting_candidates = candidates[fitting]
        no_chunks = np.zeros(fitting.size)
        recomputed_s = recomputation_seconds(self.plans(fitting_candidates, no_chunks), self.s)
        # `least` is the seconds that the best one loses of the candidates that recompute least
        tried = np.argsort(recomputed_s)[:TRIED_CANDIDATES]
        least = self.lost_seconds(fitting_candidates[tried], no_chunks[tried]).min()
        at_best = recomputed_s - most_chunks[fitting] / self.chunks * self.s.recompute
        return fitting[at_best <= least + 1e-12]

    def plan_at(self, candidates: Candidates, swapped: np.ndarray, i: int) -> ActivationPlan:
        """Return the plan of candidate i. swapped: how many chunks each candidate swaps."""
        one = candidates[[i]]
        plans = self.plans(one, swapped[[i]])
        numbers = (
            one.k,
            plans.kept_chunks,
            swapped[[i]],
            one.dropped_outputs,
            one.stride,
            plans.lag,
        )
        return ActivationPlan(self.n, self.chunks, *(int(number[0]) for number in numbers))

    def nearest_to_fitting(self, candidates: Candidates, swapped: np.ndarray) -> ActivationPlan:
        """Return the plan that needs the fewest GPU bytes. If some candidates fit the host, only
        these are compared."""
        beyond_host = candidates.host_bytes > max(0.0, self.host)
        best, *_ = np.lexsort((candidates.gpu_bytes, beyond_host))
        return self.plan_at(candidates, swapped, best)


@functools.lru_cache(maxsize=2**14)  # many plans differ only in what this function does not read
def plan_activations(
    n, layer, s, chunks, bandwidth, gpu, host, resident=None, alpha=None, busy=0.0
) -> tuple[ActivationPlan, float]:
    """Return the activation plan that loses the least time, and the seconds that it loses.

    The seconds are those of one micro-batch through one virtual stage, forward and backward. They
    count what backward recomputes and how long compute waits for copies. If nothing fits, the
    seconds are inf, and the plan is the one that is nearest to fitting (nearest_to_fitting).

    resident: the k of --resident-layers. alpha: the value of --alpha. None: the planner chooses.
    ActivationProgram explains the other arguments.
    """
    set_by_hand = alpha is not None or resident is not None
    if not set_by_hand and n * sum(layer) <= gpu:  # every layer keeps everything
        return ActivationPlan(n, chunks, n, n * chunks, 0, 0), 0.0

    program = ActivationProgram(n, layer, s, chunks, bandwidth, gpu, host, busy)
    candidates = activation_candidates(n, layer, resident, must_swap=bool(alpha))
    most_chunks = program.most_swapped(candidates)
    if alpha is None:
        may_be_best = program.may_be_best(candidates, most_chunks)
        if not may_be_best.size:
            no_chunks = np.zeros_like(most_chunks)
            return program.nearest_to_fitting(candidates, no_chunks), math.inf
        candidates, most_chunks = candidates[may_be_best], most_chunks[may_be_best]
    swapped_layers = n - candidates.k

    # ---- how many chunks each candidate swaps
    if alpha is None:
        swapped = program.chunks_to_swap(candidates, most_chunks)
    else:
        at_least = 1 if alpha > 0 else 0
        swapped = np.maximum(at_least, np.rint(alpha * chunks * swapped_layers))
    feasible = (gpu >= candidates.gpu_bytes) & (swapped <= most_chunks)
    if alpha is not None and feasible.any():
        # a whole number of chunks is rarely exactly alpha. Take the candidates that miss it by
        # ALPHA_MISS at most; if there is none, those that miss it the least
        missed = np.abs(swapped / (chunks * np.maximum(1, swapped_layers)) - alpha)
        feasible &= missed <= max(ALPHA_MISS, missed[feasible].min())

    # ---- the candidate that loses the least time
    lost = np.where(feasible, program.lost_seconds(candidates, swapped), np.inf)
    best = np.argmin(lost)  # on a tie the first: the smallest m, then the fewest swapped layers
    if lost[best] == np.inf:
        return program.nearest_to_fitting(candidates, swapped), math.inf
    return program.plan_at(candidates, swapped, best), float(lost[best])


# ---------------------------------------------------------------------------- legal choices

# Each function below is a degree of freedom. It takes constraints (c) and a plan, and lists its
# legal choices. A choice is a dict of the plan's fields to change, such as {"tp": 2}. The function
# lists the usual choices, or all choices if `exhaustive` is true. (Chunk sizes are the exception:
# even then only powers of two, and all tokens, are listed.) It raises ValueError if no choice is
# legal. To add a degree, add a function to SHAPE.

# choice -> why the search takes it if no flag sets it. Each entry stands above its function
REASONS = {}


def round_up(a, b):
    """Return the smallest multiple of b that is at least a."""
    return ceil_div(a, b) * b


def legal_choices(c, names, candidates, why_not):
    """Return the candidates that break no rule and agree with the flags, as dicts name -> value.

    candidates: tuples of values of the flags `names`. why_not(*values) returns the rule that the
    values break, or something false if they are legal. Raises ValueError with the rule that the
    flags break, and the nearest legal choices.
    """
    candidates = list(candidates)
    legal = [values for values in candidates if not why_not(*values)]
    asked = [getattr(c, name) for name in names]

    def agrees(values):
        return all(wish in (None, value) for wish, value in zip(asked, values))

    agreeing = [dict(zip(names, values)) for values in legal if agrees(values)]
    if agreeing:
        return agreeing

    def as_flags(values):
        return " ".join(
            f"{flag_name(name)} {value}" for name, value in zip(names, values) if value is not None
        )

    with_ones = [wish or 1 for wish in asked]
    nearest = sorted(sorted(legal, key=lambda values: math.dist(values, with_ones))[:4])
    advice = ", ".join(map(as_flags, nearest)) or "none, unless other flags change, too"

    # Which rule do the flags break? To answer this, flags that are not set need values, too. They
    # get those of the last candidate that agrees with the flags that are set. If no candidate
    # agrees, they get those of the last candidate of all
    shown, broken = with_ones, with_ones
    if any(asked):
        others = ([*filter(agrees, candidates)] or candidates)[-1]
        shown, broken = asked, [wish or other for wish, other in zip(asked, others)]
    raise ValueError(f"{as_flags(shown)}: {why_not(*broken)}. Nearest legal choices: {advice}")


REASONS["tp"] = "fastest; on a tie the fewest GPUs"


def tensor_parallel_choices(c, plan, exhaustive=False):
    """List the numbers of GPUs that may share a layer's matrices. They are neighbours in a node,
    and each has equally many heads and features of the MLP."""
    model, per_node = plan.model, plan.per_node
    shared = math.gcd(per_node, model.heads, model.kv_heads, model.ffn)

    if c.products == "fp8" and c.tp_mode == "fsp" and c.tp != 1 and per_node > 1:
        raise ValueError(
            "--tp-mode fsp: it gathers a prologue's result, which --products fp8 casts in the same "
            "kernel. Nearest legal choice: --tp-mode msp"
        )

    def why_not(tp):
        if shared % tp:
            return (
                f"tensor parallelism must divide the {per_node} GPUs of a node, {model.heads} "
                f"heads, {model.kv_heads} key/value heads and {model.ffn} features"
            )
        split = replace(plan, tp=tp)
        for whole, part in zip(plan.float8_matrices, split.float8_matrices):
            if not fits_tensor_cores(part):
                return (
                    f"--products fp8 needs multiples of {MULTIPLE}, and a matrix {whole[0]} x "
                    f"{whole[1]} would be {part[0]} x {part[1]} on each GPU"
                )

    return legal_choices(c, ["tp"], [(tp,) for tp in divisors(per_node)], why_not)


REASONS["pp"] = "fastest; on a tie the fewest stages"


def pipeline_choices(c, plan, exhaustive=False):
    """List the numbers of stages, and of virtual stages on each. A stage is whole nodes, or an
    equal part of one node."""
    ranks, per_node, layers = plan.ranks, plan.per_node, plan.model.layers

    def fits_nodes(pp):
        stage_ranks = ranks // pp
        if ranks % pp or stage_ranks % plan.tp:
            return False
        return stage_ranks % per_node == 0 or per_node % stage_ranks == 0

    def why_not(pp, virtual_stages):
        if not fits_nodes(pp):
            return (
                f"{ranks} GPUs, {per_node} per node, cannot form {pp} stages of whole nodes or of "
                f"equal parts of a node, with --tp {plan.tp}"
            )
        if virtual_stages > 1 and pp == 1:
            return "virtual stages need a pipeline of several stages"
        if pp > layers:
            return f"{pp} stages are more than {layers} layers"
        if pp * virtual_stages > layers:
            return f"{pp} stages x {virtual_stages} virtual stages are more than {layers} layers"

    def numbers_of_virtual_stages(pp):
        if c.pp_chunks:
            return {1, 2, 4, c.pp_chunks}
        if not exhaustive:
            return {1, 2, 4}
        # depth: layers of the largest virtual stage. Several numbers of virtual stages can give the
        # same depth. Of these only the smallest is listed, because it is the fastest and needs the
        # least memory
        return {ceil_div(layers, pp * depth) for depth in range(1, layers + 1)}

    pairs = [
        (pp, virtual_stages)
        for pp in divisors(ranks)
        for virtual_stages in sorted(numbers_of_virtual_stages(pp))
    ]
    return legal_choices(c, ["pp", "pp_chunks"], pairs, why_not)


REASONS["sp"] = "fastest; on a tie no host memory, then the fewest GPUs"
REASONS["ring"] = "fastest; on a tie the smallest ring"


def sequence_choices(c, plan, exhaustive=False):
    """List the numbers sp of GPUs per sequence, and the ring factors of each. batch_choices leaves
    out those whose data-parallel groups cannot share --batch equally.

    The usual ring of an sp is the smallest one with which the sp / ring GPUs that share heads lie
    in one node, so that their all-to-alls stay inside the node. With more than 64K tokens per GPU
    all rings are usual, because a larger ring can need less memory: fewer GPUs share the heads, so
    each GPU has more heads, which can form more head groups.
    """
    ranks, in_node, kv_heads = (
        plan.state_ranks,
        plan.state_ranks_per_node,
        plan.local_model.kv_heads,
    )
    kernel_without_ring = ""  # the kernel that was asked for, if it cannot run around a ring
    if c.attention in KERNELS and not KERNELS[c.attention].plain:
        kernel_without_ring = (
            f"--attention {c.attention}, which may see heads or positions of keys,"
        )

    def why_not(sp, ring):
        head_ranks = max(1, sp // ring)
        if ranks % sp:
            return f"sequence parallelism must divide {ranks} GPUs"
        if c.seq % (sp * plan.tp):
            return f"--seq {c.seq} must be a multiple of sp x tp = {sp} x {plan.tp}"
        if ring > 1 and kernel_without_ring:
            return f"{kernel_without_ring} cannot run around a ring. It takes --ring 1"
        if sp % ring:
            return "a ring is a part of the GPUs that share a sequence, so --ring must divide --sp"
        if kv_heads % head_ranks:
            reason = f"sp / ring GPUs must share {kv_heads} key/value heads equally"
            if kernel_without_ring:
                return f"{reason}, and {kernel_without_ring} cannot run around a ring"
            return reason
        if ring > 1 and in_node % head_ranks:
            return (
                f"the sp / ring = {head_ranks} GPUs that share heads must divide a node's {in_node}"
            )
        if ring > 1 and c.seq % (2 * ring):
            return f"--seq {c.seq} must be a multiple of 2 x ring = {2 * ring}"

    pairs = [(sp, ring) for sp in divisors(ranks) for ring in divisors(sp)]
    legal = legal_choices(c, ["sp", "ring"], pairs, why_not)

    def leaves_node(choice):
        return in_node % (choice["sp"] // choice["ring"]) > 0

    # sp -> its smallest ring whose all-to-alls stay in a node, or if there is none, its smallest
    # one
    usual_ring = {}
    for choice in sorted(legal, key=leaves_node):
        sp, ring = choice["sp"], choice["ring"]
        usual_ring.setdefault(sp, ring)
        if ring == usual_ring[sp] or c.seq // sp > 2**16 or exhaustive:
            yield choice


class UnequalShares(ValueError):
    """A number of data-parallel groups cannot share the sequences of a step equally. Another number
    of them may."""


REASONS["batch"] = "fastest; on a tie micro-batches near 8K tokens per GPU"


def batch_choices(c, plan, exhaustive=False):
    """List the sequences per step, and per micro-batch. Usual micro-batches have one sequence, or
    as many as have at most 4K, 8K or 32K tokens per GPU. (32K because a GPU computes 8K tokens of a
    small model in less time than its host needs to launch the kernels.)"""
    dp = plan.dp
    most = c.most_sequences or 2**40
    usual = c.default_tokens // c.seq
    batch = c.batch or max(dp, min(round_up(usual, dp), most // dp * dp))
    per_group, remainder = divmod(batch, dp)
    if batch > most:
        raise ValueError(
            f"--batch {batch}: the data has only {most} training sequences of {c.seq} tokens, and "
            "--batch counts sequences"
        )
    if remainder:
        advice = f"Nearest legal choice: --batch {max(1, min(round(batch / dp), most // dp)) * dp}"
        if dp > most:
            advice = (
                f"The data has only {most} training sequences, so take a larger --sp or more data"
            )
        raise UnequalShares(
            f"--batch {batch}: {dp} data-parallel groups cannot share these sequences equally. "
            f"{advice}"
        )

    def why_not(size):
        if per_group % size:
            return (
                f"it must divide the {per_group} sequences of a data-parallel group (--batch "
                f"{batch} over {dp} groups)"
            )
        if c.grad_sums == "dtype" and per_group // size > MOST_ROUNDED_SUMMANDS:
            return (
                f"--grad-sums dtype would round a sum of {per_group // size} micro-batches, and "
                f"adds up at most {MOST_ROUNDED_SUMMANDS}"
            )
        reason = why_no_order(plan.pp, plan.pp_chunks, per_group // size)
        if reason:
            unit = dp * size * plan.pp
            legal_batch = min(round_up(batch, unit), most // unit * unit)
            advice = f". --batch {legal_batch} is legal" if legal_batch else ""
            return f"with --pp-chunks {plan.pp_chunks}, {reason}{advice}"

    legal = legal_choices(c, ["micro_batch"], [(size,) for size in divisors(per_group)], why_not)
    sizes = [choice["micro_batch"] for choice in legal]
    if exhaustive:
        return [{"batch": batch, "micro_batch": size} for size in sizes]

    def num_sizes_within(tokens):
        return bisect.bisect(sizes, tokens * plan.sp // c.seq)

    usual_indices = {max(1, num_sizes_within(tokens)) - 1 for tokens in (0, 2**12, 2**13, 2**15)}
    return [{"batch": batch, "micro_batch": sizes[i]} for i in usual_indices]


REASONS["head groups"] = "fastest; more groups need less memory"


def head_group_choices(c, plan, exhaustive=False):
    """List the numbers of head groups.

    Usual is the largest legal number up to 4, because 4 groups are enough to hide all-to-alls. More
    groups need less memory, so with more than 64K tokens per GPU the largest legal number up to 16
    is usual, too. If there are no all-to-alls, as with sp 1, these limits are 1 and 8 instead.
    """
    model, ranks = plan.local_model, plan.head_ranks
    heads, kv_heads = model.heads // ranks, model.kv_heads // ranks
    counts = head_group_counts(heads, kv_heads, plan.tokens * model.heads * model.head_dim)

    def why_not(groups):
        if groups not in head_group_counts(heads, kv_heads, 0):
            return (
                f"groups must have equally many of a rank's {heads} query heads and of its "
                f"{kv_heads} key/value heads, or equal parts of the query heads of one key/value "
                "head"
            )
        if groups not in counts:
            return (
                f"a group of {heads // groups} query heads has {plan.tokens * ranks} x "
                f"{heads // groups * model.head_dim} elements, more than attention takes at once. "
                "Take more --head-groups, or a larger --sp"
            )

    legal = legal_choices(c, ["head_groups"], [(groups,) for groups in divisors(heads)], why_not)
    if exhaustive:
        return legal

    def most_within(limit):
        within = [choice for choice in legal if choice["head_groups"] <= limit]
        return within[-1] if within else legal[0]

    few, many = (4, 16) if ranks > 1 else (1, 8)
    usual = [most_within(few)]
    if plan.tokens > 2**16 and most_within(many) not in usual:
        usual.append(most_within(many))
    return usual


REASONS["activations"] = (
    "with these shards: fits, and recomputes and waits the least; on a tie the fewest chunks"
)


def activation_modes(c, plan, exhaustive=False):
    """List how layers run: whole, or in equal chunks of tokens.

    Chunks of 16K and 8K tokens are usual: smaller ones slow matrix products down, and larger ones
    need more memory. Layers do not run whole if --alpha, --resident-layers or --recompute full is
    set, if --chunk is less than all tokens, or with several head groups and sp 1."""
    swaps = bool(c.alpha)  # at least one layer is swapped
    most_resident = plan.reached_layers - 1 if swaps else plan.reached_layers
    least_resident = c.resident_layers or (2 if swaps else 0)
    if least_resident > most_resident:
        asked = [f"--alpha {c.alpha}"] if c.alpha is not None else []
        if c.resident_layers:
            asked.append(f"--resident-layers {c.resident_layers}")
            rule = f"at most {most_resident} can stay on the GPU"
        else:
            rule = "one has to be swapped, and 2 others stay on the GPU"
        raise ValueError(
            f"{' '.join(asked)}: backward reaches {plan.reached_layers} layers of a virtual stage; "
            f"{rule}"
        )

    limit = min(c.chunk or plan.tokens, plan.tokens)  # a larger --chunk changes nothing
    by_hand = c.alpha is not None or c.resident_layers or limit < plan.tokens
    # with chunks a head group's gradients can reuse the memory of its q, k and v
    groups_save_memory = plan.sp == 1 and plan.head_groups > 1
    in_chunks = c.recompute == "full" or by_hand or groups_save_memory
    if c.recompute == "none" or not in_chunks:
        yield {"recompute": "none", "chunk": plan.tokens}
    elif plan.splits_tokens:
        raise ValueError(
            f"--tp-mode {plan.tp_mode}: each GPU has a part of every chunk's tokens, so layers "
            "run whole, without --chunk, --alpha, --resident-layers, --recompute full, and, with "
            "sp 1, --head-groups. --tp-mode mtp allows them"
        )
    if c.recompute == "none" or plan.splits_tokens:
        return

    sizes = (2**14, 2**13)
    if limit < plan.tokens:
        sizes = (limit,)
    elif exhaustive:
        sizes = (plan.tokens, *(2**i for i in range(16, 10, -1)))
    numbers_of_chunks = {ceil_div(plan.tokens, min(size, plan.tokens)) for size in sizes}
    for count in sorted(numbers_of_chunks):
        yield {"recompute": "auto", "chunk": ceil_div(plan.tokens, count)}


REASONS["states"] = "fastest; on a tie on the GPU, then the fewest shards"


def sharding_choices(c, plan, exhaustive=True):
    """List the legal combinations of sharding factors and of the place of optimizer states, in the
    order of p, then g, then os.

    With --products fp8 and p = 1, each combination is listed twice: with and without float8 casts
    of the weights that are kept for a whole step. Layout auto is intra if possible, because then
    all ranks update equally many elements."""
    world, in_node = plan.state_ranks, plan.state_ranks_per_node
    if c.strategy:
        if c.p or c.g or c.os:
            raise ValueError(f"--strategy {c.strategy} sets all factors. Drop --p, --g and --os")
        factors = parse_strategy(c.strategy, world)
        if reason := illegal(factors, world, in_node):
            raise ValueError(
                f"--strategy {c.strategy} means p={factors.p} g={factors.g} os={factors.os}: "
                f"{reason}. Choose another number, or --p, --g and --os instead of --strategy"
            )
        c = replace(c, **asdict(factors))
    whole = OPTIMIZERS[c.matrix_optimizer].whole  # a rank updates whole matrices
    layout = c.os_layout
    if layout == "auto":
        layout = "inter" if whole else "intra"

    def why_not(p, g, os):
        if whole and (plan.tp > 1 or p > 1 or c.os_layout == "intra"):
            return f"--optimizer {c.optimizer} needs whole matrices: --os-layout inter --p 1 --tp 1"
        if c.resident_states and layout == "inter" and os > p:
            other_layout = "" if whole else "--os-layout intra, or "
            return (
                "--resident-states: with --os-layout inter the ranks own whole matrices, so some "
                f"would keep more states on their GPUs than others. Choose {other_layout}"
                f"--resident-states 0, or as many --os as --p ({p})"
            )
        reason = illegal(Factors(p, g, os), world, in_node)
        if reason and world < plan.ranks:
            return (
                f"{reason} (--tp {plan.tp} --pp {plan.pp} leave {world} of {plan.ranks} ranks for "
                "the states)"
            )
        return reason

    places = ("gpu", "host") if c.os_place == "auto" else (c.os_place,)
    if c.resident_states:
        if c.os_place == "gpu":
            raise ValueError(
                f"--resident-states {c.resident_states}: with --os-place gpu all states stay on "
                "the GPU. Drop --os-place, or pass --resident-states auto"
            )
        places = ("host",)
        if c.resident_states > plan.stage_layers:
            raise ValueError(
                f"--resident-states {c.resident_states}: a GPU has only {plan.stage_layers} "
                f"layers. Nearest legal choice: --resident-states {plan.stage_layers}"
            )
    candidates = map(astuple, legal_factors(world, in_node))
    for factors in legal_choices(c, ["p", "g", "os"], candidates, why_not):
        # if p > 1, a rank has whole weights of only a few layers at a time. Kept casts of all
        # layers would take more memory than sharding the parameters saves
        can_keep_casts = c.products == "fp8" and factors["p"] == 1
        for place in places:
            for keeps_casts in (False, True) if can_keep_casts else (False,):
                yield {
                    "factors": Factors(**factors),
                    "os_layout": layout,
                    "os_place": place,
                    "resident_states": c.resident_states or 0,
                    "keeps_casts": keeps_casts,
                }


def most_resident_states(c, plan):
    """Return for how many layers of a stage the planner may leave the optimizer states on the GPU.

    It is the plan's own number if all states are on the GPU, or if --resident-states is set. In
    layout inter it is 0 if ranks own different matrices, because then some ranks would keep more
    states on their GPUs than others."""
    if plan.os_place == "gpu" or c.resident_states is not None:
        return plan.resident_states
    owners = plan.factors.os // plan.factors.p
    if plan.os_layout == "inter" and owners > 1:
        return 0
    return plan.stage_layers


def most_sharded(c, plan, exhaustive=False):
    """List one sharding, with which every shape begins: the last one of sharding_choices.

    It has the most shards, and with --os-place auto its optimizer states are on the host. The
    search compares the other shardings of a shape later.
    """
    return [list(sharding_choices(c, plan))[-1]]


# The degrees of a plan's shape, which is everything but model states.
SHAPE = (
    tensor_parallel_choices,
    pipeline_choices,
    most_sharded,
    sequence_choices,
    batch_choices,
    head_group_choices,
    activation_modes,
)

# ---------------------------------------------------------------------------- search

LEAST_FLOAT8_GAIN = 0.03  # below it, a plan says that --products fp8 gives little
LEAST_GRAPH_GAIN = 0.01  # from it on, a plan says what --memplan on gives
TIE = 0.002  # plans whose times differ by less than this share tie
LEAST_GAIN = 0.001  # resident states are tried if they might save this share of a step
# a plan is skipped if it takes more than this many times as long as the best plan with another
# (tp, pp, sp)
PRUNE_FACTOR = 1.3
NEVER = {"never": math.inf}  # the seconds of a plan that does not fit

token_s = operator.attrgetter("token_s")
parallelism = operator.attrgetter("tp", "pp", "sp")  # the best plan of each is printed
sharding_of = operator.attrgetter("factors", "os_place", "keeps_casts")
# an unusual shape is first tried with the shardings of this many best plans, and with the best
# sharding of each p (price_unusual)
LIKELY_SHARDINGS = 3
shape_of = operator.attrgetter(
    *("tp", "pp", "pp_chunks", "sp", "ring", "micro_batch", "head_groups", "recompute", "chunk")
)


def preference(plan):
    """Return a key. Of plans that tie in time, the one with the smallest key is chosen."""
    return (
        plan.tp,
        plan.pp,
        plan.host_bytes > 0,
        plan.sp,
        plan.ring,
        abs(plan.tokens - 2**13),  # micro-batches near 8K tokens: larger ones need more memory
        plan.os_place,  # gpu before host
        astuple(plan.factors),
        plan.keeps_casts,
        plan.chunks,
        plan.in_chunks,  # whole layers launch fewer kernels than chunks
    )


def plan(constraints: Constraints, model: ModelConfig, hardware: Hardware) -> list[Plan]:
    """Return the plan that fits and has the least predicted time per token (of plans that tie, the
    one that `preference` takes), followed by up to 9 best plans with other tp, pp or sp. Raises
    ValueError with what is missing if none fits."""
    return best_per_parallelism(search(constraints, model, hardware))[:10]


def best_per_parallelism(plans):
    """Return the best of some plans, and after it the best plan with each other (tp, pp, sp),
    fastest first. plans: fastest first."""
    tie_limit = (1 + TIE) * plans[0].token_s
    first = min((plan for plan in plans if plan.token_s <= tie_limit), key=preference)
    best = {}
    for plan in [first, *plans]:
        best.setdefault(parallelism(plan), plan)
    return [*best.values()]


def search(c, model, hardware):
    """Return plans that fit, fastest first. The first one is the best of all shapes. For each other
    (tp, pp, sp) there is the best of its usual shapes, unless it is far slower.

    Raises ValueError with the broken rule if the flags are illegal, and TooLarge with the need of
    the nearest plan if no plan fits.
    """
    searcher = Search(c, model, hardware)
    usual = shapes(c, model, hardware)
    searcher.price_usual(usual)
    searcher.price_unusual(usual)
    if not searcher.fitting:
        raise nothing_fits(c, searcher.too_large, hardware)
    searcher.price_simpler()
    return sorted(searcher.fitting, key=token_s)


class Search:
    """The plans that were priced so far, and which plans are still worth a price."""

    def __init__(self, c, model, hardware):
        self.c, self.model, self.hardware = c, model, hardware
        self.fitting = []  # plans that fit, with their seconds
        self.too_large = []  # plans, or best cases of shapes, that do not fit
        self.fastest = {}  # (tp, pp, sp) -> the least seconds per token
        self.least_bytes = {}  # a cache for best_case
        self.seconds_of_states = {}  # a cache for with_state_seconds

    # -- bounds: `skip` below is one of these two

    def cannot_win(self, plan):
        """Return whether a plan cannot be chosen. Either it is slower than the best plan with the
        same (tp, pp, sp) by more than a tie. Or it takes more than PRUNE_FACTOR times as long as
        the best plan with some other (tp, pp, sp)."""
        for tp_pp_sp, seconds in self.fastest.items():
            factor = 1 + TIE if tp_pp_sp == parallelism(plan) else PRUNE_FACTOR
            if plan.token_s > seconds * factor:
                return True
        return False

    def cannot_be_fastest(self, plan):
        """Return whether a plan is no faster than the best plan of all."""
        return plan.token_s * (1 + 1e-6) >= min(self.fastest.values(), default=math.inf)

    # -- which plans to price

    def promising(self, shapes, skip):
        """Return the shapes that may fit and that `skip` does not exclude, fastest first. `skip`
        judges a shape by a cheap bound, the seconds of a step that recomputes nothing. The result
        is sorted by a closer bound, best_case."""
        cases = []
        for shape in sort_by_bound(self.hardware, shapes):
            if skip(shape):
                continue
            case = best_case(self.c, shape, self.hardware, self.least_bytes)
            if case.step_s < math.inf:
                cases.append(case)
            else:
                self.too_large.append(case)
        return sorted(cases, key=token_s)

    def possible_shardings(self, shape, skip):
        """Return the plans of a shape that may fit, and that `skip` does not exclude by a lower
        bound of their seconds."""
        plans = choose(self.c, [shape], [sharding_choices])
        if self.fitting:
            plans = with_room(self.c, shape, plans, self.hardware)
        plans = with_state_seconds(self.c, self.hardware, shape, plans, self.seconds_of_states)
        return [plan for plan in plans if not skip(plan)]

    # -- pricing

    def price(self, plan):
        """Complete and predict a plan (`fit`), and add it to `fitting` or to `too_large`.

        Return its seconds per token, which are infinite if it does not fit.
        """
        plan = fit(self.c, plan, self.hardware, self.cannot_win)
        if plan.step_s < math.inf:
            self.fitting.append(plan)
            before = self.fastest.get(parallelism(plan), math.inf)
            self.fastest[parallelism(plan)] = min(plan.token_s, before)
        else:
            self.too_large.append(plan)
        return plan.token_s

    def price_shardings(self, shape, skip, tried_shardings=()):
        """Price a shape with every sharding of its model states except `tried_shardings`, the
        lowest bound first, until `skip` excludes the rest."""
        if skip(shape):
            return
        plans = self.possible_shardings(shape, skip)
        plans = [plan for plan in plans if sharding_of(plan) not in tried_shardings]
        for plan in sort_by_bound(self.hardware, plans, self.c):
            if skip(plan):
                break
            self.price(plan)

    def price_usual(self, usual):
        """Price the usual shapes with every legal sharding."""
        for shape in self.promising(usual, self.cannot_win):
            self.price_shardings(shape, self.cannot_win)

    def price_unusual(self, usual):
        """Price the other shapes, if a bound says that they may be faster than all plans so far.

        Each of them is tried with the shardings of the best plans, and with the best sharding of
        each p. Then they are tried with all other shardings, beginning with the shape that was
        fastest in the first try. The number of these shapes is not limited, because a shape that is
        slow with the likely shardings can be the best with another one.
        """
        usual_shapes = set(map(shape_of, usual))
        unusual = [
            shape
            for shape in shapes(self.c, self.model, self.hardware, exhaustive=True)
            if shape_of(shape) not in usual_shapes
        ]
        by_time = sorted(self.fitting, key=token_s)
        best_of_p = {plan.factors.p: sharding_of(plan) for plan in reversed(by_time)}
        likely = {sharding_of(plan) for plan in by_time[:LIKELY_SHARDINGS]} | set(
            best_of_p.values()
        )

        tried = []  # (seconds per token, shape, shardings)
        for shape in self.promising(unusual, self.cannot_be_fastest):
            if self.cannot_be_fastest(shape):
                continue
            plans = self.possible_shardings(shape, self.cannot_be_fastest)
            # if none of the likely ones is possible: the last two. They have the most shards, with
            # optimizer states on the GPU and on the host
            plans = [plan for plan in plans if sharding_of(plan) in likely] or plans[-2:]
            if plans:
                tried_shardings = {sharding_of(plan) for plan in plans}
                tried.append((min(map(self.price, plans)), shape, tried_shardings))

        for _, shape, tried_shardings in sorted(tried, key=lambda row: row[0]):
            self.price_shardings(shape, self.cannot_be_fastest, tried_shardings)

    def price_simpler(self):
        """If the best plan keeps casts of weights, price it without these, too. If it runs each
        layer in one chunk, also price it with whole layers.

        Such plans often tie with the best one, and then `preference` takes them. But a bound may
        have made the search skip them. The printed command fixes most flags, so its own search is
        short, and may well price a simpler plan and choose it. Then it would run another plan than
        is printed.
        """
        best, *_ = best_per_parallelism(sorted(self.fitting, key=token_s))
        if best.keeps_casts:
            self.price(replace(best, activations=None, keeps_casts=False))
            best, *_ = best_per_parallelism(sorted(self.fitting, key=token_s))
        if not best.in_chunks or best.chunks > 1:
            return
        for mode in activation_modes(self.c, best):
            if mode["recompute"] == "none":
                self.price(replace(best, activations=None, **mode))


def nothing_fits(c, too_large, hardware):
    """Return the TooLarge error that says what the plan nearest to fitting needs."""
    too_large.sort(key=lambda plan: worst_ratio(plan, hardware))
    # worst_ratio of a shape does not count optimizer states on the host, so the nearest shape need
    # not contain the nearest plan. Keep the nearest shape for each (tp, pp, sp, micro_batch), and
    # complete the first 24 of these
    nearest_shapes = {}
    for shape in too_large:
        nearest_shapes.setdefault((*parallelism(shape), shape.micro_batch), shape)
    shapes = [*nearest_shapes.values()]
    plan = min(
        (fit(c, plan, hardware) for plan in choose(c, shapes[:24], [sharding_choices])),
        key=lambda plan: (worst_ratio(plan, hardware), plan.gpu_bytes),
    )
    limits = {"host_memory": None, "gpu_memory": None}  # they choose nothing
    asked = non_default_flags(vars(c) | limits)
    fixed = f". The command fixes {asked}; other values may need less" if asked else ""
    return TooLarge(
        f"a step needs at least {in_unit(plan.gpu_bytes)} per GPU of "
        f"{in_unit(hardware.gpu_budget)} ({by_purpose(plan)}), and {in_unit(plan.host_bytes)} of "
        f"host memory per rank of {in_unit(hardware.host_budget)}. That is the plan nearest to "
        f"fitting: {in_words(plan)}{fixed}"
    )


def sort_by_bound(hardware, plans, c=None):
    """Return plans with a lower bound of their seconds, fastest first.

    c: None, or the constraints. With c the bound also counts the seconds of model states, and the
    plans must come from best_case. Two things keep it a lower bound:

        copies    The plans still have the activation plan of best_case. If optimizer states use the
                  link to the host, too, its copies would take longer, but another activation plan
                  could avoid that. So no more seconds of copies count than in best_case.
        states    As many layers as allowed keep their states on the GPU, even if they do not fit.
    """
    timed = []
    for plan in plans:
        if c is None:
            seconds = step_seconds(hardware.est, plan, states=False)
        else:
            most_resident = replace(plan, resident_states=most_resident_states(c, plan))
            seconds = step_seconds(hardware.est, most_resident)
            seconds["copies"] = min(seconds["copies"], plan.seconds["copies"])
        timed.append(replace(plan, seconds=seconds))
    return sorted(timed, key=token_s)


def with_room(c, case, plans, hardware):
    """Return the plans that may fit: their model states leave room for the smallest activations
    that layers can save. This takes much less time than `fit`. case: what best_case returned for
    the shape of these plans."""
    activations = case.memory["activations"]
    if case.in_chunks and c.recompute == "auto":
        n, layer = case.reached_layers, skeletal_bytes(case)
        candidates = activation_candidates(n, layer, c.resident_layers, bool(c.alpha))
        needed = case.passes_in_flight * candidates.gpu_bytes.min()
        activations = min(activations, needed)

    without_states = activations + sum(case.memory[name] for name in ("messages", "working"))
    may_fit = []
    for plan in plans:
        # a plan needs the fewest GPU bytes with the optimizer states of as few layers as possible
        # on the GPU, and the fewest host bytes with as many. Each is counted at its best
        memory, _ = memory_of_states(plan)
        most_resident = replace(plan, resident_states=most_resident_states(c, plan))
        _, host = memory_of_states(most_resident)
        least = replace(plan, memory=memory | {"others": without_states}, host=host)
        if worst_ratio(least, hardware) <= 1 + 1e-9:
            may_fit.append(plan)
    return may_fit


def with_state_seconds(c, hardware, case, plans, cached_seconds):
    """Return plans with a lower bound of their seconds. It is the sum of two terms: the seconds of
    `case`, which is what best_case returned for the shape of these plans; and the seconds that
    model states take even if passes are endless and hide all communication that can overlap.
    cached_seconds: a cache of the second term, which is filled here."""
    timed = []
    for plan in plans:
        key = (
            *sharding_of(plan),
            plan.os_layout,
            plan.tp,
            plan.pp,
            plan.pp_chunks,
            plan.micro_batches,
            plan.chunks > 1,
            plan.recompute,
        )
        if key not in cached_seconds:
            endless = math.inf, math.inf, math.inf  # forward, backward, last_matrix
            most_resident = replace(plan, resident_states=most_resident_states(c, plan))
            cached_seconds[key] = sum(
                traffic_seconds(hardware.est, most_resident, *endless).values()
            )
        timed.append(replace(plan, seconds=case.seconds | {"states": cached_seconds[key]}))
    return timed


def shapes(c, model, hardware, exhaustive=False):
    """Return plans with all shapes that SHAPE may choose. For now their model states have the most
    shards. Raises ValueError."""
    start = Plan(
        model,
        DTYPES[c.dtype],
        hardware.ranks,
        hardware.per_node,
        c.seq,
        optimizer=c.matrix_optimizer,
        grad_sums=c.grad_sums,
        products=c.products,
        memplan=c.memplan,
        overlap=c.overlaps,
        tp_mode=c.tp_mode,
    )
    if c.products == "fp8" and not any(start.in_float8):
        raise ValueError(
            "--products fp8: no matrix of the layers has rows and columns that are multiples of "
            f"{MULTIPLE}, so nothing would run in float8. Nearest legal choice: --products dtype"
        )
    # the search compares shapes by lower bounds of their seconds. So a shape has the faster choice
    # here, which is to keep casts
    all_shapes = choose(c, [start], SHAPE, exhaustive)
    return [replace(plan, keeps_casts=c.products == "fp8") for plan in all_shapes]


def choose(c, plans, degrees, exhaustive=False):
    """Return the plans with all combinations that the degrees may choose. A plan for which a degree
    has no legal choice is dropped. Raises ValueError if no plan is left."""
    for degree in degrees:
        changed, errors = [], []
        for plan in plans:
            try:
                changed += [replace(plan, **choice) for choice in degree(c, plan, exhaustive)]
            except ValueError as e:
                errors.append(e)
        if not changed:
            # plans that differ in sp have different numbers of data-parallel groups. So unequal
            # shares are the reason only if no plan gets as far as another rule
            raise next((e for e in errors if not isinstance(e, UnequalShares)), errors[0])
        plans = changed
    return plans


def any_plan_fits(c: Constraints, model: ModelConfig, hardware: Hardware) -> bool:
    """Return whether any legal plan fits, however slow it is."""
    least_bytes = {}
    try:
        return any(
            fit(c, plan, hardware).step_s < math.inf
            for shape in smallest(shapes(c, model, hardware, exhaustive=True))
            if best_case(c, shape, hardware, least_bytes).step_s < math.inf
            for plan in choose(c, [shape], [sharding_choices])
        )
    except ValueError:
        return False


def smallest(plans):
    """Yield the shapes that may need the least memory. Of shapes that differ only in head groups
    and chunks, these have the most or the fewest head groups, and for each of the two the smallest
    chunks or chunks of all tokens."""
    but_groups_and_chunks = operator.attrgetter(
        *("tp", "pp", "pp_chunks", "sp", "ring", "micro_batch")
    )
    plans = sorted(plans, key=but_groups_and_chunks)
    for _, alike in itertools.groupby(plans, but_groups_and_chunks):
        alike = list(alike)
        groups = [plan.head_groups for plan in alike]
        for number in sorted({min(groups), max(groups)}, reverse=True):
            by_chunk = [plan for plan in alike if plan.head_groups == number]
            by_chunk.sort(key=lambda plan: (plan.chunk, plan.recompute))
            yield by_chunk[0]
            yield from [plan for plan in by_chunk[1:] if plan.chunk == plan.tokens]


def best_case(c, shape, hardware, least_bytes):
    """Return a shape with the activation plan and the seconds that it would have in the best case.
    No plan of this shape is faster.

    In the best case model states take no time, and take only the memory of the smallest legal
    sharding. least_bytes: a cache of that memory, which is filled here."""
    shape = replace(shape, os_place="gpu", keeps_casts=c.products == "fp8")
    accumulates = shape.micro_batches > 1
    key = shape.tp, shape.pp, shape.pp_chunks, accumulates, shape.chunks > 1
    if key not in least_bytes:
        plans = choose(c, [shape], [sharding_choices])
        least_bytes[key] = min(sum(memory_of_states(plan)[0].values()) for plan in plans)
    excess = sum(memory_of_states(shape)[0].values()) - least_bytes[key]
    shape, fits = with_activations(c, shape, hardware, excess)
    seconds = step_seconds(hardware.est, shape, states=False) if fits else NEVER
    return replace(shape, seconds=seconds)


def worst_ratio(plan, hardware):
    """Return the memory that a plan needs, divided by the memory that there is. This is the larger
    of two ratios, of GPU memory and of host memory. The plan fits if it is at most 1."""
    host = plan.host_bytes / max(1.0, hardware.host_budget)
    return max(host, plan.gpu_bytes / hardware.gpu_budget)


def fit(c, plan, hardware, skip=lambda plan: False):
    """Return the plan with its resident states, its activation plan, its bytes and its seconds,
    which are infinite if it does not fit.

    First the plan leaves the optimizer states of as few layers as possible on the GPU. Then an
    estimate says how many seconds more such layers could gain at most. In two cases no other number
    is tried: if this gain is below LEAST_GAIN of the step, or if `skip` would exclude this plan
    even if it became faster by the whole gain."""
    plan = replace(plan, resident_states=c.resident_states or 0)
    counts = possible_resident_states(c, plan, hardware)
    plans = {}

    def best_of(some_counts):
        for count in some_counts:
            if count not in plans:
                with_states = replace(plan, resident_states=count)
                plans[count] = fit_activations(c, with_states, hardware)
        if all(tried.step_s == math.inf for tried in plans.values()):  # the nearest to fitting
            return min(sorted(plans), key=lambda count: worst_ratio(plans[count], hardware))
        return min(sorted(plans), key=lambda count: plans[count].step_s)  # on a tie the fewest

    first = plans[best_of(counts[:1])]
    if len(counts) == 1:
        return first
    gained = most_gained_by_resident_states(first)
    if gained < LEAST_GAIN * first.step_s:
        return first
    if gained < math.inf and skip(replace(first, seconds={"at best": first.step_s - gained})):
        return first

    # The more layers keep their states on the GPU, the less the others wait for copies, and the
    # less room is left for activations. The best number may lie anywhere among the counts. So try
    # up to nine of them at equal distances, and then all counts near the best of these. Several of
    # the nine may be equally good: a layer drops all of its x or o, so a little more room may
    # change nothing
    distance = ceil_div(len(counts), 8)
    best = best_of([*counts[::distance], counts[-1]])
    fits = plans[best].step_s < math.inf
    ties = [n for n in plans if fits and plans[n].step_s == plans[best].step_s] or [best]
    return plans[best_of(n for n in counts if min(abs(n - tie) for tie in ties) <= distance)]


def possible_resident_states(c, plan, hardware):
    """Return, as a range, for how many layers optimizer states may stay on the GPU so that some
    activation plan fits. If none fits, the range has the number that is nearest to fitting.

    The more states stay on the GPU, the more room there is on the host, and the less on the GPU. So
    the numbers with which a plan fits are consecutive. (In a pipeline the range may have a gap.
    `fit` finds that the numbers in the gap do not fit.) This function takes much less time than
    choosing an activation plan for each number."""
    fewest, most = plan.resident_states, most_resident_states(c, plan)
    if fewest == most:
        return range(most, most + 1)

    # the bytes of each activation plan that may be chosen
    keeping_least = with_bytes(with_inputs_only(plan))
    gpu, host = np.array([keeping_least.memory["activations"]]), np.zeros(1)
    if plan.in_chunks and c.recompute == "auto":
        candidates = activation_candidates(
            plan.reached_layers, skeletal_bytes(plan), c.resident_layers, bool(c.alpha)
        )
        gpu = plan.passes_in_flight * candidates.gpu_bytes
        host = plan.passes_in_flight * candidates.host_bytes
    # A plan that needs more bytes of the GPU than another one can be nearer to fitting only if it
    # needs fewer bytes of the host. Leave out all others, which are nearly all
    order = np.lexsort((host, gpu))
    gpu, host = gpu[order], host[order]
    fewest_so_far = np.minimum.accumulate(host)
    useful = np.append(True, host[1:] < fewest_so_far[:-1])
    gpu = gpu[useful] + keeping_least.memory["messages"] + keeping_least.memory["working"]
    host = host[useful]

    # the number of resident states changes only where optimizer states lie. So all other bytes are
    # counted once
    memory, on_host = memory_of_states(replace(plan, resident_states=0))
    gpu = gpu + sum(memory.values())
    bytes_per_param = on_host["optimizer"] / max(1, plan.trained_params)

    ratios = []  # by number of resident states: what the nearest plan needs, over what there is
    for count in range(fewest, most + 1):
        params_on_gpu, params_on_host = plan.params_by_place(count)
        of_gpu = (gpu + bytes_per_param * params_on_gpu) / hardware.gpu_budget
        of_host = (host + bytes_per_param * params_on_host) / max(1.0, hardware.host_budget)
        ratios.append(np.maximum(of_gpu, of_host).min())
    fitting = np.flatnonzero(np.array(ratios) <= 1 + 1e-9)
    if not fitting.size:
        fitting = [np.argmin(ratios)]
    return range(fewest + int(fitting[0]), fewest + int(fitting[-1]) + 1)


def most_gained_by_resident_states(plan):
    """Return an estimate of the most seconds that a step gains if more optimizer states stay on the
    GPU. plan: one that streams as many states as possible from the host.

    There are two gains. Layers no longer wait for copies. And the states leave host memory, into
    which layers can swap more activations, so they recompute less. If the plan does not fit, the
    estimate is infinite.

    The estimate is not an upper bound, because a byte of attention's output saves more
    recomputation than a byte of other activations. In a test, 48 of 2,001 random plans gained more
    than the estimate. In the worst plan that is known, this loses 0.74 % of a step. With an upper
    bound instead, some searches took three times as long."""
    if plan.step_s == math.inf:
        return math.inf
    gained = plan.seconds["host_update"] + plan.seconds["copies"]
    if plan.activations and plan.activations.swapped_layers:
        *_, others = skeletal_bytes(plan)
        share = plan.host["optimizer"] / (plan.stage_layers * others)
        gained += plan.seconds["recomputation"] * min(1.0, share)
    return gained


def fit_activations(c, plan, hardware):
    """Return the plan with its activation plan, its bytes and its seconds, which are infinite if it
    does not fit."""
    plan, fits = with_activations(c, plan, hardware)
    seconds = step_seconds(hardware.est, plan) if fits else NEVER
    return replace(plan, seconds=seconds)


def with_inputs_only(plan):
    """Return the plan with layers that keep only their inputs, unless they run whole."""
    if not plan.in_chunks:
        return plan
    n = plan.reached_layers
    inputs_only = ActivationPlan(
        n, plan.chunks, resident=n, kept_chunks=0, layers_recomputing_attention=n
    )
    return replace(plan, activations=inputs_only)


def with_activations(c, plan, hardware, excess=0.0):
    """Return the plan with its activation plan and its bytes, and whether it fits.

    excess: GPU bytes to subtract from those of the plan. Only best_case subtracts any.
    """
    est, n = hardware.est, plan.reached_layers
    lost = 0.0

    def counted(plan):
        plan = with_bytes(plan)
        if not excess:
            return plan
        return replace(plan, memory=plan.memory | {"other states save": -excess})

    plan = counted(with_inputs_only(plan))

    if plan.in_chunks and c.recompute == "auto":
        # The activation plan is for the pass of one micro-batch through one virtual stage. At most
        # `passes` of them, in the first stage, hold activations at the same time and share the room
        passes = plan.passes_in_flight
        room = hardware.gpu_budget - plan.gpu_bytes + plan.memory["activations"]
        host_room = hardware.host_budget - plan.host.get("optimizer", 0)
        activations, lost = plan_activations(
            n,
            skeletal_bytes(plan),
            layer_seconds(est, plan),
            plan.chunks,
            est.profile.to_host,
            room / passes,
            host_room / passes,
            c.resident_layers,
            c.alpha,
            link_busy_seconds(est, plan),
        )
        plan = counted(replace(plan, activations=activations))
    return plan, lost < math.inf and worst_ratio(plan, hardware) <= 1 + 1e-9


# ---------------------------------------------------------------------------- the order of nodes

# A scheduler gives N nodes under some leaf switches, in any order. Which order sends the fewest
# bytes across the spine that connects the leaves (AMSP, section V-D)? Bytes are counted as rings
# send them. The k ranks of a group stand in order, each sends to the next one, and the last one to
# the first. S is the bytes of the whole tensor that the group gathers or reduces:
#
#     spine bytes = sum over groups, over ranks r whose next rank is under another leaf, of sent
#     sent        = S * (k - 1)/k    all-gather, reduce-scatter, broadcast
#                   2S * (k - 1)/k   all-reduce
#                                    an all-to-all is k - 1 rings, one to each other rank
#
# If the nodes of a group stand in order under n > 1 leaves, n edges of the ring cross the spine.
# Example: four nodes of 2 ranks, p = g = 4, os = 8, and M micro-batches. S is the bytes of all
# parameters. There are two kinds of groups:
#
#     p groups     ranks 0 to 3 and ranks 4 to 7. An edge of their rings carries 9/4 M S bytes per
#                  step (param_gather and grad_scatter)
#     os groups    ranks r and r + 4. An edge carries S/4 bytes per step (grad_reduce and
#                  param_broadcast)
#
# Two nodes are under leaf a, and two under leaf b. Place i is the i-th node in the order of ranks.
# How many edges, and so how many bytes, cross the spine?
#
#     place                 0    1    2    3
#     ranks                 0 1  2 3  4 5  6 7    of p groups    of os groups    bytes
#     leaves as given       a    b    a    b      4              0               9 M S
#     order [0, 2, 1, 3]    a    a    b    b      0              8               2 S
#
# The best order is a partition of a graph into parts of given sizes, which is NP-hard to find. The
# search begins with the nodes sorted by leaf, the largest leaf first, rotated by 0 to 31 places. It
# swaps two nodes as long as that saves bytes. In a test on up to 8 nodes, this finds the best order
# for every p, g and os, each with a random sp. Left out: trees and NVLink SHARP, whose edges lie
# elsewhere, and several levels of spines.


@dataclass(frozen=True)
class Traffic:
    """The bytes that ranks send in one kind of communication. In every block of `block` neighbours,
    each rank sends to the rank `stride` further in the block, and the last ones to the first."""

    kind: str  # one of shard.STREAMS, "all_to_all", or "ring" of attention
    block: int  # ranks
    stride: int  # ranks
    sent: float  # bytes that each rank sends per step


def plan_traffic(plan):
    """Yield the Traffic of a step's communication, as shard.py and attention.py launch it."""
    model, head_ranks, e = plan.model, plan.head_ranks, plan.dtype.itemsize
    counts = param_counts(model)
    micro_batches = plan.micro_batches

    for row in plan.collectives:
        # frozen parameters are only gathered
        params = sum(counts) if row.stream == "param_gather" else counts.trained
        nbytes = params * e * (1 / row.inner - 1 / row.ranks)  # of all shards together
        times = micro_batches - 1 if row.in_earlier else 0
        if row.in_last:
            times += 1
        # gathers run in forward and in backward; an all-reduce reduces, then gathers
        if row.stream == "param_gather" or row.op == "all_reduce":
            times *= 2
        yield Traffic(row.stream, row.ranks, row.inner, times * nbytes)

    q, kv = plan.q_kv_widths
    tokens = plan.tokens * model.layers * micro_batches
    # forward exchanges q, o and k, v; backward q, o, do, dq and k, v, dk, dv. kv is the width of k
    # and v together
    exchanged = (6 * q + 3 * kv) * e * tokens
    # around a ring travel k and v, in forward and in backward, and the sums of dk and dv
    around = kv * (2 * e + plan.ring_sum_bytes) * tokens
    around *= (plan.ring - 1) * plan.head_groups / plan.kv_groups
    for distance in range(1, head_ranks):
        yield Traffic("all_to_all", head_ranks, distance, exchanged / head_ranks)
    yield Traffic("ring", plan.sp, head_ranks, around)


def swap_nodes(order, leaf, traffic):
    """Improve an order by the best swap of two nodes, until no swap saves bytes, and return it.

    leaf: the leaf of each node. traffic: an array (places, places) of the bytes that place i sends
    to place j, where place i is the i-th node of the order. Let D[i, j] be the bytes between place
    i and all places under the leaf of place j. Then a swap of the nodes at places i and j saves

        D[i, j] - D[i, i] + D[j, i] - D[j, j] - 2 * (bytes between i and j, which still cross)
    """
    between = traffic + traffic.T
    np.fill_diagonal(between, 0)
    while True:
        to_leaf = between @ (leaf[order, None] == leaf[order])
        own = to_leaf.diagonal()
        saved = to_leaf + to_leaf.T - own[:, None] - own - 2 * between
        i, j = np.unravel_index(saved.argmax(), saved.shape)
        if saved[i, j] <= 0:
            return order
        order[[i, j]] = order[[j, i]]


def place_nodes(leaves, communications, per_node):
    """Return the order of nodes that sends the fewest bytes across the spine, and the bytes per
    step that cross it in the given order and in the returned one (AMSP, section V-D).

    leaves: the leaf of each node, in the given order. communications: Traffic of a step. In the
    returned order, node order[k] has the ranks from k * per_node on. If no order sends fewer bytes,
    it is the given one.
    """
    _, leaf, counts = np.unique(leaves, return_inverse=True, return_counts=True)
    num_nodes = len(leaf)
    given_order = np.arange(num_nodes)
    rank = np.arange(num_nodes * per_node)
    traffic = np.zeros((num_nodes, num_nodes))  # whole bytes that a place sends to another
    for kind in communications:
        first_of_block = rank // kind.block * kind.block
        next_rank = first_of_block + (rank + kind.stride) % kind.block
        np.add.at(traffic, (rank // per_node, next_rank // per_node), round(kind.sent))

    def spine_bytes(order):
        return traffic[leaf[order, None] != leaf[order]].sum()

    by_leaf = np.lexsort((leaf, -counts[leaf]))
    # rotated, because blocks of ranks may begin in the middle of a leaf
    orders = (swap_nodes(np.roll(by_leaf, places), leaf, traffic) for places in range(32))
    best = min([given_order, *orders], key=spine_bytes)  # on a tie the first
    return best.tolist(), spine_bytes(given_order), spine_bytes(best)


def parse_leaf(text, num_nodes):
    """Return {name of a node: name of its leaf}, in the given order, from the value of --leaf.

    The value is a number of nodes per leaf, or a file with a line `node leaf` for each node. In the
    file, a comment begins with #. Raises ValueError.
    """
    try:
        if text.isdecimal() and int(text):
            rows = [(f"{node}", f"{node // int(text)}") for node in range(num_nodes)]
        else:
            lines = re.sub("#.*", "", regular(Path(text)).read_text()).splitlines()
            rows = [line.split() for line in lines if line.strip()]
        leaf_of = dict(rows)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"--leaf {text} must be a number of nodes per leaf, at least 1, or a file whose lines "
            f"are a node's name and its leaf's name: {e}"
        ) from e
    if not len(rows) == len(leaf_of) == num_nodes:
        raise ValueError(
            f"--leaf {text} must name each of {num_nodes} nodes once. It has {len(rows)} lines "
            f"with {len(leaf_of)} different nodes"
        )
    return leaf_of


def describe_order(plan, leaf):
    """Return text that says which order of nodes sends the fewest bytes across the spine. leaf: the
    value of --leaf. Raises ValueError."""
    if plan.tp * plan.pp > 1:
        raise ValueError(
            f"--leaf {leaf} needs a plan with --tp 1 --pp 1, and the best plan has --tp {plan.tp} "
            f"--pp {plan.pp}. Set both to 1"
        )
    names, leaves = zip(*parse_leaf(leaf, plan.ranks // plan.per_node).items())
    order, before, after = place_nodes(leaves, plan_traffic(plan), plan.per_node)
    unit_bytes, unit = unit_of(before)
    best = "keep the given order"
    if after < before:
        best = ", ".join(names[node] for node in order)
    return (
        f"order of nodes: {best}\n"
        f"spine traffic {before / unit_bytes:.2f} -> {after / unit_bytes:.2f} {unit} per step, "
        f"{(before - after) / max(1.0, before):.0%} saved"
    )


# ---------------------------------------------------------------------------- printing

TITLES = {  # choice -> its title in the table of choices
    "tp": "tensor parallelism (tp)",
    "pp": "pipeline stages (pp)",
    "sp": "GPUs per sequence (sp)",
    "ring": "GPUs per ring (1: no ring)",
    "head groups": "head groups",
    "batch": "data-parallel groups x micro-batches x sequences",
    "states": "shards of model states",
    "activations": "activations",
}
FLAGS_OF_CHOICE = {
    "tp": ("tp",),
    "pp": ("pp", "pp_chunks"),
    "sp": ("sp",),
    "ring": ("ring",),
    "head groups": ("head_groups",),
    "batch": ("batch", "micro_batch"),
    "states": ("p", "g", "os", "strategy", "os_layout", "os_place", "resident_states"),
    "activations": ("recompute", "chunk", "alpha", "resident_layers"),
}


def choices(plan: Plan) -> dict[str, str]:
    """Return what a plan chooses, in words, by the names in TITLES."""
    f = plan.factors
    stages = f"{plan.pp}"
    if plan.pp_chunks > 1:
        stages += f" x {plan.pp_chunks} virtual stages"
    states = f"p={f.p} g={f.g} os={f.os} {plan.os_layout}"
    if plan.os_place == "host":
        states += ", optimizer states on the host"
    if plan.resident_states:
        states += f", {resident_states_in_words(plan.resident_states, plan.pp)}"
    if plan.keeps_casts:
        states += ", float8 casts kept for a step"
    return {
        "tp": f"{plan.tp} {plan.tp_mode}" if plan.tp > 1 else "1",
        "pp": stages,
        "sp": f"{plan.sp}",
        "ring": f"{plan.ring}",
        "head groups": f"{plan.head_groups}",
        "batch": f"{plan.dp} x {plan.micro_batches} x {plan.micro_batch}",
        "states": states,
        "activations": activations_in_words(plan),
    }


def resident_states_in_words(layers: int, stages: int = 1) -> str:
    """Say which states are on the GPU: 'those of the first 12 layers on the GPU'."""
    first = "the first layer" if layers == 1 else f"the first {layers} layers"
    of_stage = " of each stage" if stages > 1 else ""
    return f"those of {first}{of_stage} on the GPU"


def activations_in_words(plan):
    """Say what layers do with their activations, such as '8 of 32 layers resident, alpha=0.05,
    chunks of 16,384 tokens'."""
    activations = plan.activations
    if activations is None:
        return "keep all"
    text = "keep all"
    if activations.kept_chunks < activations.layers * activations.chunks:
        text = f"{activations.resident} of {activations.layers} layers resident"
        of_resident = activations.resident * activations.chunks
        if of_resident and activations.kept_chunks == 0:
            text += " with x and o only"
        elif activations.kept_chunks < of_resident:
            text += f" with {activations.kept_chunks / of_resident:.0%} of their chunks"
        text += f", alpha={activations.alpha:.2f}"
    if activations.chunks > 1:
        text += f", chunks of {plan.chunk:,} tokens"
    if activations.stride > 1:
        text += f", 1 in {activations.stride} layers saves its input"
    if count := activations.layers_recomputing_attention:
        text += f", {count} {'layer runs' if count == 1 else 'layers run'} attention twice"
    if activations.swapped_layers and activations.lag > 2:
        text += f", lag {activations.lag}"
    return text


def in_words(plan: Plan, other: Plan | None = None) -> str:
    """Return a plan's choices in one line. other: leave out the choices that are the same there."""
    known = choices(other) if other else {}
    return "; ".join(
        f"{name}: {text}" for name, text in choices(plan).items() if text != known.get(name)
    )


def by_purpose(plan):
    """Return the bytes of a GPU by purpose, in one line, in the unit that suits their sum."""
    unit, _ = unit_of(plan.gpu_bytes)
    return ", ".join(
        f"{name} {size / unit:.2f}" for name, size in plan.memory.items() if size > unit / 200
    )


def figures(plan: Plan, hardware: Hardware) -> dict:
    """Return a plan as --json prints it: all fields of costs.Plan, and what follows from them."""
    rates = plan.rates(plan.step_s, hardware.profile.peak_flops)
    return (
        asdict(plan)
        | asdict(plan.factors)
        | rates
        | {
            "dtype": f"{plan.dtype}",
            "dp": plan.dp,
            "step_s": plan.step_s,
            "tokens_a_day": 86400 * plan.ranks * rates["tgs"],
            "gpu_gib": plan.gpu_bytes / GIB,
            "host_gib": plan.host_bytes * plan.per_node / GIB,
        }
    )


def default_tokens(model: str) -> int:
    """Return about how many tokens a step has if --batch is auto. model: a row of MODELS."""
    return 2**12 if model == "tiny" else 2**19


def command(plan: Plan, asked) -> str:
    """Return the command that runs a plan, to be started on each node.

    It repeats the flags that were asked for, and fixes what the planner chose. Flags that have
    their defaults are left out. The run itself chooses resident states and the activation plan
    again, unless they were asked for. asked: the flags of a program, with a model.
    """
    values = vars(asked) | vars(plan) | asdict(plan.factors)
    values |= {"overlap": ",".join(plan.overlap) or "none", "strategy": ""}
    values |= {"dtype": asked.dtype, "optimizer": asked.optimizer}  # as flags spell them
    values["resident_states"] = asked.resident_states
    if plan.in_chunks:
        values["recompute"] = asked.recompute
    if values["recompute"] != "auto":
        del values["chunk"]
    del values["seq"]  # train.py has another default, so the command always says it
    architecture = ""
    if asked.architecture != "llama":
        architecture = f" --architecture {asked.architecture}"
    nodes = plan.ranks // plan.per_node
    rendezvous = ""
    if nodes > 1:
        rendezvous = " --rdzv-backend c10d --rdzv-id RUN --rdzv-endpoint FIRST_NODE:29400"
    return (
        f"torchrun --nproc_per_node {plan.per_node} --nnodes {nodes}{rendezvous} train.py "
        f"--model {asked.model}{architecture} --seq {in_size(plan.seq)} {non_default_flags(values)}"
    )


def non_default_flags(values):
    """Return the flags of Constraints whose values are not their defaults, as a command has
    them."""
    return " ".join(
        f"{flag_name(name)} {in_size(values[name])}"
        for name, f in flags_of(Constraints).items()
        if values.get(name, f.default) != f.default
    )


def rates_in_words(hardware: Hardware) -> str:
    """Say which kernel's rates and which host's launches a prediction uses."""
    kernel = nearest_kernel(hardware.profile, hardware.kernel)
    attention = f"Attention is predicted by the rates of kernel {kernel}"
    if hardware.kernel not in ("auto", kernel):
        attention += f", because the profile has none of {hardware.kernel}"
    host = launch_host(hardware.profile, hardware.processor)
    launches = f"Launches were measured on {host}"
    if hardware.processor not in ("", host):
        launches += f", and this host is {hardware.processor}"
    return f"{attention}. {launches}."


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return rows as lines of text. Each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in (header, *rows)
    )


def plan_row(number: int, plan: Plan, hardware: Hardware, differs_from: Plan) -> dict[str, str]:
    """Return a plan's row in the table of plans, by the titles of its columns. The last column has
    the choices in which the plan differs from the plan `differs_from`."""
    numbers = figures(plan, hardware)
    row = {
        "plan": f"{number}",
        "s per step": f"{plan.step_s:.4g}",
        "TGS": f"{numbers['tgs']:,.0f}",
    }
    if numbers["mfu_full"]:
        row["MFU causal"] = f"{numbers['mfu_causal']:.1%}"
        row["MFU full"] = f"{numbers['mfu_full']:.1%}"
    return row | {
        "tokens per day": f"{numbers['tokens_a_day']:,.0f}",
        "GPU memory": in_unit(plan.gpu_bytes),
        "host memory per node": in_unit(plan.host_bytes * plan.per_node),
        "choices": in_words(plan, differs_from) or "as above",
    }


def seconds_table(plan: Plan, hardware: Hardware) -> str:
    """Return a table of where a step's seconds go."""
    rows = [
        [name, f"{value:10.3f}", f"{value / plan.step_s:6.1%}"]
        for name, value in plan.seconds.items()
        if value > 5e-4 * plan.step_s
    ]
    return table([f"time of plan 1, by profile {hardware.profile.name}", "s per step", ""], rows)


def memory_table(plan: Plan) -> str:
    """Return a table of where a GPU's bytes go."""
    unit_bytes, unit = unit_of(plan.gpu_bytes)
    rows = [
        [name, f"{value / unit_bytes:11.2f}"]
        for name, value in [*plan.memory.items(), ("total", plan.gpu_bytes)]
        if value > unit_bytes / 200
    ]
    return table(["memory of plan 1", f"{unit} per GPU"], rows)


def describe_plans(plans: list[Plan], hardware: Hardware) -> str:
    """Return tables: a row per plan, with what differs from the first plan, whose choices are
    printed already; and the seconds and the memory of the first plan."""
    best = plans[0]
    rows = [plan_row(i + 1, plan, hardware, best) for i, plan in enumerate(plans)]
    return "\n".join(
        [
            table([*rows[0]], [[*row.values()] for row in rows]),
            "TGS: tokens per GPU per second.",
            "",
            seconds_table(best, hardware),
            "Communication counts only as far as nothing hides it.",
            rates_in_words(hardware),
            "",
            memory_table(best),
            *float8_gain_in_words(best, hardware),
        ]
    )


def float8_gain_in_words(plan: Plan, hardware: Hardware) -> list[str]:
    """Return a line that says how much --products fp8 gives, if a plan uses it."""
    if plan.products != "fp8":
        return []
    if any(kind not in hardware.profile.products for kind in FLOAT8_PRODUCTS):
        return [f"Profile {hardware.profile.name} has no rates of products in float8."]
    seconds = step_seconds(hardware.est, replace(plan, products="dtype", keeps_casts=False))
    gain = sum(seconds.values()) / plan.step_s - 1
    comparison = "slower" if gain < 0 else "faster"
    text = f"With products in float8, a step is predicted to be {abs(gain):.1%} {comparison}"
    if gain < LEAST_FLOAT8_GAIN:
        text += ". That is little: the flag makes training less precise and gives hardly any speed"
    return [text + "."]


def alpha_in_words(c, plan: Plan) -> list[str]:
    """Return a line that says so if a plan does not swap the fraction that --alpha asks for."""
    activations = plan.activations
    if c.alpha is None or activations is None or abs(activations.alpha - c.alpha) <= ALPHA_MISS:
        return []
    all_chunks = activations.chunks * activations.swapped_layers
    return [
        f"--alpha {c.alpha:g} became {activations.alpha:.2f}, because whole chunks of tokens are "
        f"swapped, and the layers that swap have {all_chunks} in all. A smaller --chunk or "
        "--resident-layers may come closer."
    ]


def graph_gain_in_words(c, plan: Plan) -> list[str]:
    """Return a line that says what --memplan on would give, if a plan's step could become a CUDA
    graph and its GPU waits for the host. (Steps with documents differ, so they take no graph.)"""
    saved = plan.seconds["launches"] / plan.step_s
    if c.has_documents or not plan.on_one_stream or saved < LEAST_GRAPH_GAIN:
        return []
    return [
        "The host launches kernels more slowly than the GPU runs them. With --memplan on, a step "
        f"becomes a CUDA graph, which is predicted to take {saved:.1%} less time."
    ]


def why(c, plan, name):
    """Return why a plan has one of its choices: because of flags, or the search's reason."""
    if name in ("tp", "pp") and getattr(c, name) == 1:
        return f"the default; --{name} auto searches it"
    if name in ("sp", "ring") and plan.state_ranks == 1:
        return "the only legal value"
    flags = FLAGS_OF_CHOICE[name]
    values = {flag: getattr(c, flag) for flag in flags}
    asked = non_default_flags({flag: value for flag, value in values.items() if value is not None})
    if asked and (len(flags) == 1 or (name == "activations" and c.recompute == "full")):
        return f"set by {asked}"
    if name == "sp" and c.batch:
        # sp = state_ranks / dp, and dp divides state_ranks and the batch
        least = plan.state_ranks // math.gcd(plan.state_ranks, c.batch)
        if least == plan.state_ranks > 1:
            return f"the only legal value with --batch {c.batch}"
        if least > 1:
            return f"--batch {c.batch} needs {least} or more; {REASONS[name]}"
    if asked:
        return f"with {asked}: {REASONS[name]}"
    return REASONS[name]


def describe_choices(c, plans, best):
    """Return a table with a row per choice of the best plan: its value, why it is chosen, and the
    best other value. plans: all plans that were priced and fit, fastest first."""
    rows = []
    for name, text in choices(best).items():
        next_best = "-"
        for other in plans:
            if choices(other)[name] != text:
                more = other.token_s / best.token_s - 1
                next_best = f"{choices(other)[name]}: {more:+.1%}"
                if abs(more) <= TIE:
                    next_best += " (a tie)"
                break
        rows.append([TITLES[name], text, why(c, best, name), next_best])
    lines = [table(["choice", "value", "why", "next best: time per token"], rows)]
    activations = choices(best)["activations"]
    if "resident" in activations:
        lines.append(
            "Resident layers copy nothing to the host. They recompute the chunks that they do not "
            "keep. The other layers swap the inputs x and the attention outputs o that they save, "
            "and a fraction alpha of their other activations."
        )
    if "lag" in activations:
        lines.append("Lag d: a layer's copies have the forward of d - 1 layers to finish in.")
    return "\n".join(lines)


def describe_limits(c, hardware, best):
    """Return a line that says what binds the best plan: how much shorter its step would be if one
    limit were lifted, with a new activation plan. A rate is lifted by a factor of 1000."""
    rates = {
        "FLOP/s": "flops",
        "copies to the host": "host",
        "the network": "network",
        "memory bandwidth": "memory",
    }
    lifted = {
        name: {"profile": scaled(hardware.profile, "", **{rate: 1000.0})}
        for name, rate in rates.items()
    }
    lifted["GPU memory"] = {"gpu_budget": NO_LIMIT}
    lifted["host memory"] = {"host_budget": NO_LIMIT}
    gains = sorted(
        (
            (1 - fit(c, best, replace(hardware, **limit)).token_s / best.token_s, name)
            for name, limit in lifted.items()
        ),
        reverse=True,
    )
    shown = ", ".join(f"{name} {gain:.1%}" for gain, name in gains if gain > TIE)
    return f"what binds (how much shorter a step would be without this limit): {shown or '-'}"


def describe(c, hardware, plans, best_plans):
    """Return what the program prints: the question, the choices, plans and what binds them, and the
    command. plans: all that were priced and fit. best_plans: those to print."""
    profile, best = hardware.profile, best_plans[0]
    lines = [
        f"model: {c.model}, {param_counts(best.model)}; {best.batch} x {best.seq:,} "
        "tokens per step",
        f"hardware: {hardware.ranks} x {profile.device}, {hardware.per_node} per node; to plan "
        f"with: {in_unit(hardware.gpu_budget)} per GPU, "
        f"{in_unit(hardware.host_budget * hardware.per_node)} of host memory per node",
        f"rates: profile {profile.name}, {profile.sources.get('all', 'see its file')}",
        "",
        describe_choices(c, plans, best),
        "",
        describe_plans(best_plans, hardware),
        *alpha_in_words(c, best),
        *graph_gain_in_words(c, best),
        "",
        describe_limits(c, hardware, best),
    ]
    # a new Estimator, because hardware.est remembers what all plans have asked for
    est = Estimator(profile, hardware.kernel, hardware.processor)
    step_seconds(est, best)
    if est.outside_profile:
        lines.append(
            "not in the profile, at the nearest rates: " + "; ".join(sorted(est.outside_profile))
        )
    lines.append("")
    if profile.device != "CPU" and c.dtype != "bf16":
        lines.append(
            f"No attention kernel of a GPU computes in {c.dtype}. So train.py runs this command on "
            "CPUs only, and needs --dtype bf16 on GPUs:"
        )
    lines.append(command(best, c))
    return "\n".join(lines)


# ---------------------------------------------------------------------------- the program


@dataclass(frozen=True)
class PlannerFlags(Constraints):
    """All flags of planner.py: the fields below, and the Constraints."""

    # fmt: off
    model: str = flag(
        "7b", f"Model: {', '.join(MODELS)}.", among=MODELS, group="the question")
    architecture: str = flag(
        "llama", "Classes of the model and of its layers, a row of model.ARCHITECTURES.",
        among=ARCHITECTURES)
    cluster: str = flag(
        "h200x8", f"Hardware profile: {', '.join(profile_files())}, a GPU's name (A100, H100, "
        "...), or a file of bench.py --profile.")
    ranks: Count = flag(None, "Number of GPUs. auto: those of one node.")
    per_node: Count = flag(None, "GPUs per node. auto: as the cluster has.")
    top: int = flag(
        4, "How many plans to print. After the first one come the best plans with another tp, pp "
        "or sp.")
    json: bool = flag(False, "Print the plans as JSON, and nothing else.")
    leaf: str = flag(
        "", "Print the order of nodes that sends the fewest bytes between leaf switches. The value "
        "is a number of nodes per leaf, or a file with a node's name and its leaf's name per "
        "line.")
    # fmt: on
    default_tokens: int = 2**19

    @property
    def sizes(self) -> ModelConfig:
        """Return the model to plan for."""
        return replace(MODELS[self.model], architecture=self.architecture)

    def hardware(self):
        """Return the Hardware that the flags describe. Raises ValueError."""
        per_node = load_profile(self.cluster).per_node
        ranks = self.ranks or per_node
        # auto: as the cluster has, or fewer, so that all nodes are equally full. Example: 12 ranks
        # of a cluster with 8 GPUs per node are planned as 3 nodes of 4
        per_node = self.per_node or math.gcd(min(per_node, ranks), ranks)
        per_node = min(ranks, per_node)
        if ranks % per_node:
            raise ValueError(
                f"--ranks {ranks}: nodes of --per-node {per_node} GPUs cannot hold them equally. "
                f"Legal numbers per node: {', '.join(map(str, divisors(ranks)))}"
            )
        if self.attention not in ("auto", *KERNELS):
            raise ValueError(
                f"--attention {self.attention}: choose one of auto, {', '.join(KERNELS)}"
            )
        profile = load_profile(self.cluster, per_node)
        gpu = GPU_SHARE * (self.gpu_memory or profile.gpu_bytes)
        host = profile.host_bytes * 7 // 8 if self.host_memory is None else self.host_memory
        return Hardware(ranks, per_node, profile, gpu, host / per_node, self.kernel_of(profile))

    def kernel_of(self, profile):
        """Return the attention kernel that the flags ask for. With documents, auto is the profile's
        best kernel that takes documents. Raises ValueError if the kernel takes no documents."""
        names = [name for name in KERNELS if KERNELS[name].documents]
        if not self.has_documents or self.attention in names:
            return self.attention
        if self.attention == "auto":
            return min(names, key=lambda name: name not in profile.attention)
        raise ValueError(
            f"--attention {self.attention} takes no documents. Choose auto or {', '.join(names)}, "
            "or pass --document-token -1, with which attention crosses documents"
        )


def next_gib(nbytes):
    """Return the smallest whole number of GiB, in bytes, that is larger than a number of bytes."""
    return (nbytes // GIB + 1) * GIB


def changes_that_fit(asked, hardware):
    """Return changes of one flag with which a plan fits, the smallest change first.

    They are: fewer tokens per sequence, fewer sequences per step, the planner's own --micro-batch,
    --head-groups or --chunk instead of the one that was asked for, another --tp-mode, more memory
    of the host or of a GPU, and more GPUs.
    """
    seq, ranks = asked.seq, hardware.ranks
    # limits that were not asked for are rounded to GiB, so that they can be read
    gpu = asked.gpu_memory or round(hardware.gpu_budget / GPU_SHARE / GIB) * GIB
    node = asked.host_memory
    if node is None:
        node = int(hardware.host_budget * hardware.per_node / GIB) * GIB
    unit = math.lcm(256, ranks)
    batch = asked.batch or max(1, asked.default_tokens // seq)
    changes = {}  # text -> how large the change is

    def fits_with(name, value, **more):
        changed = replace(asked, **{name: value}, **more)
        return any_plan_fits(changed, changed.sizes, changed.hardware())

    def fits_with_some_batch(name, value):
        # With --batch auto, a step of shorter sequences has more of them. Then a shorter sequence
        # may not fit where a longer one does. So the number of sequences first stays what it is. If
        # the data-parallel groups cannot share that number, --batch auto is tried
        if name == "seq" and fits_with(name, value, batch=batch):
            return True
        return fits_with(name, value)

    # the values of each flag are listed by the size of the change. Find the first one that fits, by
    # bisection, because all values after it fit as well. (With --seq and --batch auto this is not
    # certain. Then the change may be larger than needed)
    for name, now, values in (
        ("seq", seq, range((seq - 1) // unit * unit, 0, -unit)),
        ("host_memory", node, range(next_gib(node), 16 * node + 2**10 * GIB, GIB)),
        ("gpu_memory", gpu, range(next_gib(gpu), 192 * GIB, GIB)),  # the largest GPU's
        ("ranks", ranks, [ranks * 2**i for i in range(1, 6)]),
    ):
        first = bisect.bisect_left(values, True, key=functools.partial(fits_with_some_batch, name))
        if first < len(values):
            value = values[first]
            flags = f"{flag_name(name)} {in_size(value)}"
            if name == "seq" and not fits_with(name, value):
                flags += f" --batch {batch}"
            changes[f"{flags} instead of {in_size(now)}"] = abs(math.log(value / max(1, now)))

    # set one flag back to auto, or take a smaller batch. A smaller batch can save memory, because a
    # step of one micro-batch does not accumulate gradients in float32
    smaller = [("batch", n, abs(math.log(n / batch))) for n in divisors(ranks) if n < batch]
    as_auto = [(name, None, 0.0) for name in ("micro_batch", "head_groups", "chunk")]
    modes = [("tp_mode", mode, 0.0) for mode in ("mtp", "fsp")] if asked.tp != 1 else []
    for name, value, change in (*smaller[::-1], *as_auto, *modes):
        now = getattr(asked, name)
        known = any(text.startswith(flag_name(name)) for text in changes)
        if value != now and not known and fits_with(name, value):
            text = f"{flag_name(name)} {in_size(value)} instead of {in_size(now)}"
            changes[text] = change
    return sorted(changes, key=changes.get)


def main(argv: list[str] | None = None) -> int:
    """Print the best plan for a command's flags, and why. Return the exit status: 1 if nothing
    fits."""
    parser = make_parser(
        PlannerFlags,
        "Choose the fastest plan that fits a cluster, by prediction. It runs on any machine.",
    )
    asked = PlannerFlags(**vars(parser.parse_args(argv)))
    asked = replace(asked, default_tokens=default_tokens(asked.model))
    try:
        check_values(asked)
        # a tokenizer ends documents with a token, unless --document-token says -1
        check_documents(asked.memplan, 0 if asked.has_documents else -1)
        hardware = asked.hardware()
        plans = search(asked, asked.sizes, hardware)
        best_plans = best_per_parallelism(plans)[: asked.top]
        text = describe(asked, hardware, plans, best_plans)
        if asked.leaf:
            text += "\n" + describe_order(best_plans[0], asked.leaf)
    except TooLarge as e:
        best_plans = []
        changes = changes_that_fit(asked, hardware)
        advice = "what would fit, the smallest change first:"
        if not changes:
            advice = "none of the changes that the planner tries makes a plan fit"
        text = "\n  ".join([f"nothing fits: {e}", advice, *changes])
    except ValueError as e:
        parser.error(str(e))
    if asked.json:
        rows = [figures(plan, hardware) | {"command": command(plan, asked)} for plan in best_plans]
        text = json.dumps({"plans": rows, "text": text})
    print(text)
    return int(not best_plans)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # whoever reads the output has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
