"""Which factors? How many ranks share a sequence, how states are sharded, how many sequences run at
once, and what layers keep: by predicted time and counted bytes.

    python planner.py --model 7b --ranks 8 --seq 1M --batch 1 --cluster h200x8
    plan(constraints, model, hardware) -> [Plan]        best first, a pure function

Constraints are what the flags of a command say, None where they leave it open. Each degree of a
plan is a function of SHAPE or `states`, which lists its legal values, and says of one that is not
why, and which are near. costs.py says what a plan takes,

    least  seconds of a step / its tokens     subject to  bytes <= memory of a GPU, of the host

(AMSP, section IV, with InternEvo's degrees and Memo's activations). What has one best answer is a
rule (RULES), the rest loops: over shapes of the computation, those that compute fastest first, and
for each over states, by the seconds of a step that recomputes nothing; what layers keep is planned
last (`plan_activations`), and what can be no better than what is found is left out (`late`).

The search has two stages. The usual values of each degree are priced first: a few head groups,
chunks of 16K and 8K tokens. All other values that a flag could ask for follow, as far as they could
still be faster, so that a flag given by hand finds nothing better (within the tie below).

Ties, within 0.2 %, go to fewer stages and columns, no need of host memory, fewer ranks a sequence,
micro-batches near 8K tokens, states on the GPU, fewer shards (`preference`). Nodes are put in an
order in which few bytes cross the spine of a cluster's switches (`place_nodes`; AMSP, section V-D).

With tp columns of layers and a pipeline of pp stages, states and sequences are shared by the R =
ranks / (tp pp) ranks of one stage and column, per_node / tp of them in a node. What a stage's
layers keep is planned for one micro-batch through its largest part, with the memory of the stage
that has the least for it, over what is in flight there.

Left out: other plans of what layers keep for other stages.

Legend: M micro-batches a step and rank, N tokens of one on a rank, p, g, os shards of parameters,
gradients and optimizer states, sp ranks that share a sequence; tp columns of layers, pp stages of a
pipeline, pp_chunks parts of the model on one; of what layers keep n layers, c chunks of one, k
resident layers, K kept and S swapped chunks, m layers of which one keeps x, X layers without o.
"""

import argparse
import bisect
import functools
import itertools
import json
import math
import operator
import re
import sys
import typing
from dataclasses import Field, asdict, astuple, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch

from attention import KERNELS, head_group_counts
from costs import (
    Estimator,
    Plan,
    host_bytes,
    layer_seconds,
    lost_seconds,
    memory_of_states,
    resident_bytes,
    skeletal_bytes,
    step_seconds,
    streaming_seconds,
    traffic_seconds,
    with_bytes,
)
from data import regular
from hardware import Profile, load_profile, nearest_host, nearest_kernel, profile_files, scaled
from model import MODELS, ModelConfig, divisors, param_count
from offload import ActivationPlan
from optim import OPTIMIZERS
from pipeline import why_no_order
from shard import STREAMS, Factors, illegal, legal_factors, parse_strategy
from streams import GIB, NO_LIMIT, in_unit, unit_of

# ---------------------------------------------------------------------------- flags


UNITS = {"G": 2**30, "M": 2**20, "K": 2**10, "": 1}


def size(text):
    """Return the number of '4096', '64K' or '1.5M': whole, with binary suffixes."""
    number = re.fullmatch(r"(-?\d{1,18}(?:\.\d{1,18})?)([KMG]?)", text.upper())
    value = float(number[1]) * UNITS[number[2]] if number else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: a whole number, as 4096, 64K or 1.5M")
    return int(value)


def in_size(value):
    """Return a value as `size` reads it, in its largest unit."""
    for letter, unit in UNITS.items():
        if type(value) is int and value and value % unit == 0:
            return f"{value // unit}{letter}"
    return "auto" if value is None else f"{value}"


def flag(default, text: str, low: float = 1, high: float = 2**20, among=(), group: str = ""):
    """Return a field that is a flag: a number between `low` and `high`, or a word of `among`.
    group: the title of those that begin with it in --help."""
    return field(
        default=default,
        metadata={"help": text, "range": (low, high), "among": among, "group": group},
    )


def flags_of(program) -> dict[str, Field]:
    """Return a dataclass's fields that are flags, by name: its own before those of Constraints."""
    flags = {f.name: f for f in fields(program) if f.metadata}
    return {name: flags[name] for name in [*program.__annotations__, *flags] if name in flags}


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def flag_type(f):
    """Return the function text -> value of a field; auto is None where that is allowed."""
    kind, *auto = typing.get_args(f.type) or [f.type]
    if kind is int:
        kind = size

    def convert(text):
        return None if auto and text == "auto" else kind(text)

    convert.__name__ = kind.__name__  # argparse says "invalid float value"
    return convert


def make_parser(program: type, description: str) -> argparse.ArgumentParser:
    """Return a parser of a dataclass's flags. What it parses has those alone that a command
    gives."""
    group = parser = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog="Sizes may end in K, M or G, which are binary: 4K is 4096. What is auto is chosen "
        "by the program, and printed.",
    )
    for name, f in flags_of(program).items():
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        shown = "" if str(f.default) in ("", "None", "False") else f" ({f.default})"
        kind = {"help": (f.metadata["help"] + shown).replace("%", "%%")}
        if f.type is bool:
            kind["action"] = argparse.BooleanOptionalAction
        else:
            convert = kind["type"] = flag_type(f)
            kind["metavar"] = "|".join(f.metadata["among"]) or convert.__name__.upper()
        if name == "resume":
            kind |= {"nargs": "?", "const": "latest"}
        group.add_argument(flag_name(name), **kind)
    return parser


def check_values(program) -> None:
    """Raise ValueError for a number out of its range, a word that is none of its choices, or flags
    that contradict each other."""
    for name, f in flags_of(program).items():
        value = getattr(program, name)
        among, (low, high) = f.metadata["among"], f.metadata["range"]
        kinds = typing.get_args(f.type) or (f.type,)
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            raise ValueError(f"{flag_name(name)} {value!r}: not of type {f.type}")
        if among and value not in among:
            raise ValueError(f"{flag_name(name)} {value}: one of {', '.join(among)}")
        if type(value) in (int, float) and not low <= value <= high:  # a NaN is not, either
            raise ValueError(f"{flag_name(name)} {value}: from {low} to {high}")
    by_hand = [
        flag_name(name)
        for name in ("alpha", "resident_layers", "chunk")
        if getattr(program, name) is not None
    ]
    if by_hand and program.recompute != "auto":
        raise ValueError(
            f"{' '.join(by_hand)} and --recompute {program.recompute} say different "
            "things: drop one"
        )


OVERLAPS = (*STREAMS, "pipeline")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
Count = int | None  # None: auto


@dataclass(frozen=True)
class Constraints:
    """What a command fixes; None, or auto, is open. A program's flags are these and its own."""

    # fmt: off
    seq: int = flag(4096, "tokens a sequence", 1, 2**40)
    batch: Count = flag(
        None, "sequences a step over all ranks; auto: 512K tokens (4K for tiny), or one for each "
        "rank that may have one of its own; a resumed run keeps its own",
        group="a step and its tokens")
    micro_batch: Count = flag(
        None, "sequences that run at once on a rank, or on the sp ranks that share them; auto: "
        "one, or the most within 4K, 8K or 32K tokens a rank, by predicted time")
    tokenizer: str = flag(
        "", "Hugging Face folder whose tokenizer.json makes tokens of text, kept in OUT/tokens")
    document_token: Count = flag(
        None, "id that ends a document, in which attention stays, and behind which no label "
        "counts; -1: none; auto: what --tokenizer ends texts with, else none", -1, 2**32)
    attention: str = flag("auto", "kernel: auto, fa4, cudnn, flash, cpu")
    dtype: str = flag("bf16", "of weights and activations", among=DTYPES)
    p: Count = flag(
        None, "parameter shards; auto: by predicted time, then the fewest", group="sharding")
    g: Count = flag(None, "gradient shards, p or os; auto: likewise")
    os: Count = flag(None, "optimizer state shards, a multiple of p; auto: likewise")
    strategy: str = flag("", "p, g, os by name: ddp, zero1, zero2, zero3, mics:K, zero1.5:K")
    os_layout: str = flag(
        "auto", "of optimizer states: whole tensors (inter), or each split evenly; auto: intra",
        among=("auto", "intra", "inter"))
    os_place: str = flag(
        "auto", "where optimizer states lie; from the host they visit the GPU under the next "
        "forward", among=("auto", "gpu", "host"))
    overlap: str = flag(
        ",".join(OVERLAPS), "what runs under computation, a list, or none: weights before they are "
        "used, gradients to shards, shards over replicas, new weights to who holds them, states on "
        "the host, messages between stages")
    tp: Count = flag(
        1, "neighbours that share each layer's matrices; auto: searched, by predicted time")
    tp_mode: str = flag(
        "msp", "of them: all have all tokens (mtp), tokens are split between products, and (fsp) "
        "gathered again in backward", among=("mtp", "msp", "fsp"))
    pp: Count = flag(1, "stages of a pipeline; auto: searched, by predicted time")
    pp_chunks: Count = flag(
        None, "parts of the model on a stage, interleaved; auto: by predicted time")
    sp: Count = flag(
        None, "ranks that share a sequence; auto: by predicted time", group="sequences over ranks")
    ring: Count = flag(
        None, "of them, by context, around which k, v travel; the other sp / ring by heads; auto: "
        "the fewest")
    head_groups: Count = flag(
        None, "parts of a rank's heads: the next one's all-to-all runs under this one's attention; "
        "without --sp they save memory; auto: by predicted time")
    recompute: str = flag(
        "auto", "layers keep, swap or recompute chunks as planned; keep everything (none); or keep "
        "their input alone and run again, attention included (full)",
        among=("auto", "none", "full"), group="memory")
    chunk: Count = flag(
        None, "most tokens that a layer runs at once, in equal parts; auto: by predicted time", 1,
        2**40)
    alpha: float | None = flag(
        None, "fraction of tokens whose activations a swapped layer swaps; auto: as planned", 0, 1)
    resident_layers: Count = flag(
        None, "last layers whose inputs and attention outputs stay on the GPU; auto: as planned", 2)
    host_memory: Count = flag(
        None, "bytes of a node (as 400G) for states and activations; auto: what the control group "
        "or the machine allows, less an eighth", 0, 2**60)
    gpu_memory: Count = flag(
        None, "bytes of a GPU that may be used (as 80G); auto: all", 2**20, 2**60)
    # fmt: on
    optimizer: str = "adamw"
    default_tokens: int = 0  # of a step, that are usual; rounded up to a sequence a rank
    most_sequences: Count = None  # that the data has

    @property
    def has_documents(self) -> bool:
        """Return whether attention stays inside documents."""
        if self.document_token is None:
            return bool(self.tokenizer)
        return self.document_token >= 0

    @property
    def overlaps(self) -> tuple[str, ...]:
        """Return what overlaps. Raises ValueError."""
        names = () if self.overlap == "none" else tuple(self.overlap.split(","))
        if not set(names) <= set(OVERLAPS):
            raise ValueError(f"--overlap {self.overlap}: a list of {', '.join(OVERLAPS)}, or none")
        return names


@dataclass(frozen=True)
class Hardware:
    """The ranks, and what one of them has."""

    ranks: int
    per_node: int  # ranks of a node
    profile: Profile
    gpu_budget: float = NO_LIMIT  # bytes of a GPU to plan with
    host_budget: float = NO_LIMIT  # bytes of host memory of a rank, for states and to swap to
    kernel: str = "auto"  # the attention kernel that runs; auto: the best that the profile has
    processor: str = ""  # of the host that launches; empty: the profile's first one

    @functools.cached_property
    def est(self):
        return Estimator(self.profile, self.kernel, self.processor)


GPU_SHARE = 0.95  # of a GPU to plan with: context, communicators and fragments want the rest


# ---------------------------------------------------------------------------- what layers keep


class TooLarge(ValueError):
    """A step that does not fit."""


MOST_STRIDE = 8  # layers of which one keeps its input: a group's are on the GPU together


def whole_chunks(number):
    return np.floor(number + 1e-9)


@functools.lru_cache(maxsize=8)
def bytes_of_ways(n, layer, resident, swaps):
    """Return the bytes of a GPU and of the host that each of ways_to_keep needs at least. Plans
    that differ in model states only ask for the same ones."""
    m, away, x, _ = ways_to_keep(n, resident, swaps)
    plans = ActivationPlan(n, 1, n - away, 0, 0, x, m)
    return resident_bytes(plans, layer), host_bytes(plans, layer)


@functools.cache
def ways_to_keep(n, resident, swaps):
    """Return m, layers that leave and X of all plans that are as asked, and whether they save
    intermediates."""
    m, away, x = np.mgrid[1 : MOST_STRIDE + 1, : max(1, n - 1), : n + 1]
    saves = (m == 1) & (x <= away)
    asked = (
        (away % m == 0)
        & (saves & (away > 0) | (not swaps))
        & ((n - away == resident) | (not resident))
    )
    return [each[asked] for each in (m, away, x, saves)]


def plan_activations(
    n, layer, s, chunks, bandwidth, gpu, host, resident=None, alpha=None, busy=0.0
):
    """Return the plan that loses the least time of those that swap as many chunks S as copies hide
    behind computation, and then keep as many chunks K as have room, and the seconds lost in forward
    and backward of a micro-batch through one part: of all k, m, X (whole groups of m layers leave)
    at once. If nothing fits, the plan that needs least, and inf.

    layer, s: bytes and seconds of one, as costs.skeletal_bytes and LayerSeconds; bandwidth: bytes/s
    to the host, with all GPUs copying; gpu, host: bytes a rank can give to activations; resident,
    alpha: set by hand; busy: seconds of a layer's forward in which other things are copied.

        min  seconds recomputed and waited
             resident_bytes <= gpu,  host_bytes <= host

    With k = 2, m = 1 that is Memo's rule, to a chunk:

        max alpha:  (input + attn + alpha*S_others)/bandwidth <= layer_s
                    (n - 2)*(input + attn + alpha*S_others) <= host
    """
    part = layer[-1] / chunks
    if alpha is None and resident is None and n * sum(layer) <= gpu:  # everything has room
        return ActivationPlan(n, chunks, n, n * chunks, 0, 0), 0.0
    m, away, x, saves = ways_to_keep(n, resident, bool(alpha))
    k = n - away
    needed, copied = bytes_of_ways(n, layer, resident, bool(alpha))
    room = gpu - needed
    # of a layer: in two buffers, and in forward on two of the k layers' room
    buffered = whole_chunks(np.minimum(2 * room, room + (k - 2) * sum(layer[:2])) / (4 * part))
    most = np.minimum(
        whole_chunks((host - copied) / part), saves * away * np.minimum(buffered, chunks)
    )
    hidden = whole_chunks((bandwidth * away * max(0.0, s.forward - busy) - copied) / part)
    swapped = np.clip(hidden, 0, np.maximum(0, most))
    if alpha is not None:  # the nearest number of chunks, but some if that is asked for
        swapped = np.maximum(alpha > 0, np.rint(alpha * chunks * away))
    feasible = (room >= 0) & (swapped <= most)
    if alpha is not None and feasible.any():  # of these, the ones that come near what is asked
        missed = np.abs(swapped / (chunks * np.maximum(1, away)) - alpha)
        feasible &= missed <= max(0.02, missed[feasible].min())
    kept = whole_chunks(room / part) - 2 * np.ceil(swapped / np.maximum(1, away))
    kept = np.clip(kept, 0, feasible * saves * chunks * k)
    plans = ActivationPlan(n, chunks, k, kept, swapped, x, m)
    lost = np.where(feasible, sum(lost_seconds(plans, layer, s, bandwidth, busy)), np.inf)
    at = np.argmin(lost)  # the first, of those that tie: fewer layers are copied
    if lost[at] == np.inf:
        at, *_ = np.lexsort((needed, copied > max(0.0, host)))
    chosen = (int(each[at]) for each in (k, kept, swapped, x, m))
    return ActivationPlan(n, chunks, *chosen), float(lost[at])


# ---------------------------------------------------------------------------- which plan


# A degree is a function of constraints and a plan that yields, as changes to it, its legal choices:
# the usual ones, or with `every` all that could be asked for by hand.


def legal(c, names, every, why_not):
    """Return the values of flags, of `every`, that are as asked and break no rule. Raises
    ValueError with the rule that what is asked breaks, and the legal values that are near."""
    every = [values for values in every if not why_not(*values)]
    asked = [getattr(c, name) for name in names]
    found = [
        dict(zip(names, values))
        for values in every
        if all(want in (None, value) for want, value in zip(asked, values))
    ]
    if not found:
        wish = [want or 1 for want in asked]
        every.sort(key=lambda values: math.dist(values, wish))
        said, *near = [
            " ".join(f"{flag_name(name)} {value}" for name, value in zip(names, values))
            for values in (wish, *sorted(every[:4]))
        ]
        raise ValueError(
            f"{said}: {why_not(*wish)}; legal here: "
            f"{', '.join(near) or 'none by these flags alone'}"
        )
    return found


def columns(c, plan, every=False):
    """Columns of a layer's matrices are neighbours in a node, each with as many heads and
    features."""
    model, per_node = plan.model, plan.per_node
    shared = math.gcd(per_node, model.heads, model.kv_heads, model.ffn)
    return legal(
        c,
        ["tp"],
        zip(divisors(per_node)),
        lambda tp: (
            shared % tp
            and (
                f"it must divide {per_node} GPUs of a node, {model.heads} heads, {model.kv_heads} "
                f"key/value heads, {model.ffn} features"
            )
        ),
    )


def stages(c, plan, every=False):
    """Stages of a pipeline have whole nodes or lie within one, and some parts of the model each."""
    ranks, per_node, layers = plan.ranks, plan.per_node, plan.model.layers

    def why_not(pp, parts):
        of_stage = ranks // pp
        if ranks % pp or of_stage % plan.tp or of_stage % per_node * (per_node % of_stage):
            return (
                f"{ranks} ranks, {per_node} a node, are not so many stages of whole nodes, or of "
                f"equal parts of one, in columns of {plan.tp}"
            )
        if pp * parts > layers or pp == 1 < parts:
            return (
                f"{pp} stages x {parts} parts of {layers} layers, and several parts are of a "
                "pipeline"
            )

    def numbers_of_parts(pp):
        if c.pp_chunks:
            return {1, 2, 4, c.pp_chunks}
        if not every:
            return {1, 2, 4}
        # of the numbers that give a part equally many layers, the least one needs the least memory
        # and is the fastest
        return {-(-layers // (pp * of_part)) for of_part in range(1, layers + 1)}

    pairs = [(pp, parts) for pp in divisors(ranks) for parts in sorted(numbers_of_parts(pp))]
    return legal(c, ["pp", "pp_chunks"], pairs, why_not)


def sequences(c, plan, every=False):
    """Of the ranks that share a sequence the ring is the least one that leaves those that share
    heads in one node: their all-to-alls cross no network. Larger rings are usual for long sequences:
    where fewer ranks share the heads there are more groups of them, which need less memory."""
    ranks, in_node, kv_heads = (
        plan.state_ranks,
        plan.state_ranks_per_node,
        plan.local_model.kv_heads,
    )
    by_heads = ""  # what goes by heads alone
    if c.attention in KERNELS and not KERNELS[c.attention].plain:
        by_heads = f"--attention {c.attention}, which may see heads, or where keys stand,"
    if c.has_documents:
        by_heads = "attention inside documents (--document-token; -1: none)"

    def why_not(sp, ring):
        heads = max(1, sp // ring)
        if ranks % sp or c.seq % (sp * plan.tp):
            return (
                f"it must divide {ranks} ranks, and --seq {c.seq} be a multiple of sp x tp = "
                f"{sp} x {plan.tp}"
            )
        if ring > 1 and by_heads:
            return f"{by_heads} goes by heads alone: --ring 1"
        if sp % ring or kv_heads % heads:
            no_ring = f", and {by_heads} goes by heads alone, without a ring" if by_heads else ""
            return f"sp / ring ranks share {kv_heads} key/value heads{no_ring}"
        if ring > 1 and (in_node % heads or c.seq % (2 * ring)):
            return (
                f"ranks that share heads are of one node of {in_node}, and --seq {c.seq} is cut in "
                "2 x ring parts"
            )

    pairs = [(sp, ring) for sp in divisors(ranks) for ring in divisors(sp)]
    found = legal(c, ["sp", "ring"], pairs, why_not)
    least = {}
    for pair in sorted(found, key=lambda pair: in_node % (pair["sp"] // pair["ring"]) > 0):
        sp, ring = pair.values()
        if ring == least.setdefault(sp, ring) or c.seq // sp > 2**16 or every:
            yield pair


def batches(c, plan, every=False):
    """Sequences a step, and at once: usually one, or the most within 4K, 8K or 32K tokens a rank.
    (8K of a small model a GPU computes sooner than its host launches the kernels.)"""
    dp = plan.dp
    most = c.most_sequences or 2**40
    usual = c.default_tokens // c.seq
    batch = c.batch or max(dp, min(-(-usual // dp), most // dp) * dp)
    each, left = divmod(batch, dp)
    if batch > most:
        raise ValueError(
            f"--batch {batch}: the data has {most} training sequences of {c.seq} "
            "tokens; --batch counts sequences"
        )
    if left:
        raise ValueError(
            f"--batch {batch}: not divisible by {dp} data-parallel ranks; nearest: "
            f"{max(1, min(round(batch / dp), most // dp)) * dp}"
        )

    def why_not(size):
        if each % size:
            return f"it does not divide the {each} sequences of a rank (--batch {batch} over {dp})"
        turns = dp * size * plan.pp
        reason = why_no_order(plan.pp, plan.pp_chunks, each // size)
        return reason and (
            f"--pp-chunks {plan.pp_chunks}: {reason}; nearest --batch: {-(-batch // turns) * turns}"
        )

    sizes = [x["micro_batch"] for x in legal(c, ["micro_batch"], zip(divisors(each)), why_not)]
    if every:
        return [{"batch": batch, "micro_batch": size} for size in sizes]
    within = {
        max(1, bisect.bisect(sizes, tokens * plan.sp // c.seq))
        for tokens in (0, 2**12, 2**13, 2**15)
    }
    return [{"batch": batch, "micro_batch": sizes[n - 1]} for n in within]


def head_groups(c, plan, every=False):
    """4 parts of a rank's heads hide all-to-alls. More of them need less memory: of long sequences
    the most within 8 or 16 are usual, too."""
    column, ranks = plan.local_model, plan.head_ranks
    heads, kv_heads = column.heads // ranks, column.kv_heads // ranks
    counts = head_group_counts(heads, kv_heads, plan.tokens * column.heads * column.head_dim)

    def why_not(groups):
        if groups not in head_group_counts(heads, kv_heads, 0):
            return (
                f"groups have equally many of a rank's {heads} query heads and of its {kv_heads} "
                "key/value heads, or equal parts of the query heads of one key/value head"
            )
        if groups not in counts:
            return (
                f"a group of {heads // groups} query heads has {plan.tokens} x {column.head_dim} "
                "elements of each, more than attention takes at once: more --head-groups, or more "
                "--sp"
            )

    found = legal(c, ["head_groups"], zip(divisors(heads)), why_not)
    if every:
        return found
    few, many = (4, 16) if ranks > 1 else (1, 8)
    usual = {few, many if plan.tokens > 2**16 else few}
    return [max(found, key=lambda x: x["head_groups"] * (x["head_groups"] <= n)) for n in usual]


def treatments(c, plan, every=False):
    """Layers run whole, or in equal chunks. Chunks of 16K or 8K tokens are usual: smaller ones slow
    products down, and larger ones need more memory. What is said of chunks by hand asks for
    them."""
    swaps = bool(c.alpha)  # at least one layer
    if (c.resident_layers or 2 * swaps) > plan.virtual_stage_layers - swaps:
        asked = [f"--alpha {c.alpha}"] * (c.alpha is not None)
        asked += [f"--resident-layers {c.resident_layers}"] * bool(c.resident_layers)
        most = plan.virtual_stage_layers - swaps
        if c.resident_layers:
            rule = f"at most {most} can stay on the GPU"
        else:
            rule = "one has to swap, and 2 others stay on the GPU"
        raise ValueError(
            f"{' '.join(asked)}: a stage runs {plan.virtual_stage_layers} layers; {rule}"
        )
    limit = min(c.chunk or plan.tokens, plan.tokens)  # a larger one asks for nothing
    by_hand = c.alpha is not None or c.resident_layers or limit < plan.tokens
    # chunks alone let a group's gradients take its tensors' places
    in_chunks = c.recompute == "full" or by_hand or plan.sp == 1 < plan.head_groups
    if c.recompute == "none" or not in_chunks:
        yield {"recompute": "none", "chunk": plan.tokens}
    elif plan.splits_tokens:
        raise ValueError(
            f"--tp-mode {plan.tp_mode}: a column has its part of every chunk's tokens,"
            " so layers run whole, without --chunk, --alpha, --resident-layers,"
            " --recompute full and, of sp 1, --head-groups: --tp-mode mtp"
        )
    if c.recompute == "none" or plan.splits_tokens:
        return
    sizes = (2**14, 2**13)
    if limit < plan.tokens:
        sizes = (limit,)
    elif every:
        sizes = (plan.tokens, *(2**i for i in range(16, 10, -1)))
    parts = {-(-plan.tokens // min(size, plan.tokens)) for size in sizes}
    for n in sorted(parts):
        yield {"recompute": "auto", "chunk": -(-plan.tokens // n)}


def states(c, plan, every=True):
    """States have the legal factors, and lie on GPUs or hosts. Layout intra: all ranks have as much
    to update."""
    world, in_node = plan.state_ranks, plan.state_ranks_per_node
    if c.strategy:
        if c.p or c.g or c.os:
            raise ValueError(f"--strategy {c.strategy} sets all factors: drop --p --g --os")
        c = replace(c, **asdict(parse_strategy(c.strategy, world)))
    whole = OPTIMIZERS[c.optimizer].whole  # its rank updates whole matrices

    def why_not(p, g, os):
        if whole and (plan.tp * p > 1 or c.os_layout == "intra"):
            return f"--optimizer {c.optimizer} needs whole matrices: --os-layout inter --p 1 --tp 1"
        reason = illegal(Factors(p, g, os), world, in_node)
        if reason and world < plan.ranks:
            return (
                f"{reason} (--tp {plan.tp} --pp {plan.pp} leave {world} of {plan.ranks} ranks for "
                "the states)"
            )
        return reason

    layout = c.os_layout if c.os_layout != "auto" else "inter" if whole else "intra"
    places = ("gpu", "host") if c.os_place == "auto" else (c.os_place,)
    for f in legal(c, ["p", "g", "os"], map(astuple, legal_factors(world, in_node)), why_not):
        for place in places:
            yield {"factors": Factors(**f), "os_layout": layout, "os_place": place}


def some_states(c, plan, every=False):
    """States have legal factors, the most shards for now: which of them is chosen last."""
    return [list(states(c, plan))[-1]]


# of the computation
SHAPE = (columns, stages, some_states, sequences, batches, head_groups, treatments)

TIE = 0.002  # of a step's time: less is no difference
FAR = 1.3  # times the best: what takes longer is not looked at

token_s = operator.attrgetter("token_s")
kind = operator.attrgetter("tp", "pp", "sp")  # what plans of a kind have in common
states_of = operator.attrgetter("factors", "os_place")
LIKELY_STATES = 3  # of the best plans, with which an unusual shape is tried first
shape_of = operator.attrgetter(
    *("tp", "pp", "pp_chunks", "sp", "ring", "micro_batch", "head_groups", "recompute", "chunk")
)


def preference(plan):
    """Return what is least of the plan that is chosen from those that tie: with fewer columns,
    stages, no need of host memory, fewer ranks a sequence, micro-batches of 8K tokens (more take
    memory), states on the GPU, fewer shards, and chunks, or whole layers, which launch less."""
    return (
        plan.tp,
        plan.pp,
        plan.host_bytes > 0,
        plan.sp,
        plan.ring,
        abs(plan.tokens - 2**13),
        plan.os_place,
        astuple(plan.factors),
        plan.chunks,
        plan.recompute == "auto",
    )


def plan(constraints: Constraints, model: ModelConfig, hardware: Hardware) -> list[Plan]:
    """Return the plan of the least predicted time a token that fits, and the best ones of other
    kinds (`kind`), best first. Raises ValueError with what is missing if none fits."""
    return best_of_kinds(search(constraints, model, hardware))[:10]


def best_of_kinds(found):
    """Return the best of some plans, and the best of each other kind, fastest first."""
    most = (1 + TIE) * found[0].token_s
    first = min((plan for plan in found if plan.token_s <= most), key=preference)
    best = {}
    for plan in [first, *found]:
        best.setdefault(kind(plan), plan)
    return [*best.values()]


def search(c, model, hardware):
    """Return plans that fit, fastest first, among them the best of each kind. Raises ValueError if
    there is none: with what the one that is nearest needs, or why what is asked is illegal.

    The usual shapes are priced first. The other ones follow if they may be faster than all that
    is found: each is tried with the states of the best plans so far. Then all other states are
    compared, from the shape that came out best on. A limit to the number of these shapes would miss
    plans: a shape that is slow with the likely states can be the best with other ones."""
    found, too_large, fastest, least, traffic = [], [], {}, {}, {}

    def late(plan):
        return any(
            plan.token_s > other * (1 + TIE if same == kind(plan) else FAR)
            for same, other in fastest.items()
        )

    def no_faster(plan):
        return plan.token_s * (1 + 1e-6) >= min(fastest.values(), default=math.inf)

    def possible(stage, skip):  # by the seconds without memory, then with the most of it
        stage = by_bound(hardware, stage, with_states=False)
        stage = [best_case(c, shape, hardware, least) for shape in stage if not skip(shape)]
        too_large.extend(shape for shape in stage if shape.step_s == math.inf)
        return sorted((shape for shape in stage if shape.step_s < math.inf), key=token_s)

    def price(plan):
        plan = fit(c, plan, hardware)
        if plan.step_s < math.inf:
            found.append(plan)
            fastest[kind(plan)] = min(plan.token_s, fastest.get(kind(plan), math.inf))
        else:
            too_large.append(plan)
        return plan.token_s

    def possible_states(shape, skip):
        """Return the plans of a shape that may fit and that `skip` does not exclude by their least
        seconds."""
        plans = choose(c, [shape], [states])
        if found:
            plans = with_room(c, shape, plans, hardware)
        return [plan for plan in with_traffic(hardware, shape, plans, traffic) if not skip(plan)]

    def price_states(shape, skip, known=()):
        if not skip(shape):
            plans = possible_states(shape, skip)
            plans = [plan for plan in plans if states_of(plan) not in known]
            for plan in by_bound(hardware, plans, with_states=True):
                if skip(plan):
                    break
                price(plan)

    usual = shapes(c, model, hardware)
    for shape in possible(usual, late):
        price_states(shape, late)

    known = set(map(shape_of, usual))
    every = shapes(c, model, hardware, every=True)
    by_time = sorted(found, key=token_s)
    likely = {states_of(plan) for plan in by_time[:LIKELY_STATES]}
    best_of_p = {plan.factors.p: states_of(plan) for plan in by_time[::-1]}
    likely |= set(best_of_p.values())
    tried = []
    for shape in possible([plan for plan in every if shape_of(plan) not in known], no_faster):
        plans = [] if no_faster(shape) else possible_states(shape, no_faster)
        plans = [plan for plan in plans if states_of(plan) in likely] or plans[-2:]
        if plans:
            known = {states_of(plan) for plan in plans}
            tried.append((min(map(price, plans)), len(tried), shape, known))
    for _, _, shape, known in sorted(tried, key=lambda each: each[:2]):
        price_states(shape, no_faster, known)
    if not found:
        too_large.sort(key=lambda plan: over(plan, hardware))
        nearest = choose(c, too_large[:8], [states])
        plan = min(
            (fit(c, plan, hardware) for plan in nearest),
            key=lambda plan: (over(plan, hardware), plan.gpu_bytes),
        )
        raise TooLarge(
            f"a step needs {in_unit(plan.gpu_bytes)} a GPU of "
            f"{in_unit(hardware.gpu_budget)} ({by_purpose(plan)}), and "
            f"{in_unit(plan.host_bytes)} of host memory a rank of "
            f"{in_unit(hardware.host_budget)}, with {in_words(plan)}, at least (asked for, "
            f"which may need more: {given(vars(c)) or 'nothing'})"
        )
    return sorted(found, key=token_s)


def by_bound(hardware, plans, with_states):
    """Return plans with the seconds that they take at least, fastest first. with_states: of the
    plans of a best_case, whose copies to the host wait for no states."""
    timed = []
    for plan in plans:
        seconds = step_seconds(hardware.est, plan, with_states)
        if with_states:
            seconds["copies"] = min(seconds["copies"], plan.seconds["copies"])
        timed.append(replace(plan, seconds=seconds))
    return sorted(timed, key=token_s)


def with_room(c, shape, plans, hardware):
    """Return the plans of a best_case whose states leave room for the least that layers may keep.
    This takes a small part of the time of `fit`."""
    kept = shape.memory["activations"]
    if shape.recompute == c.recompute == "auto":
        n, layer = shape.virtual_stage_layers, skeletal_bytes(shape)
        needed, _ = bytes_of_ways(n, layer, c.resident_layers, bool(c.alpha))
        kept = min(kept, shape.layers_in_flight / n * needed.min())

    without_states = kept + sum(shape.memory[name] for name in ("messages", "working"))
    found = []
    for plan in plans:
        memory, host = memory_of_states(plan)
        least = replace(plan, memory=memory | {"others": without_states}, host=host)
        if over(least, hardware) <= 1 + 1e-9:
            found.append(plan)
    return found


def with_traffic(hardware, shape, plans, known):
    """Return the plans of a best_case with fewer seconds than they take: those of the best_case, and
    those of model states, as if a pass were long enough to hide all communication. known: the
    seconds of model states, for all plans with equally many, which is filled here."""
    timed = []
    for plan in plans:
        same = (
            *states_of(plan),
            plan.os_layout,
            plan.tp,
            plan.pp,
            plan.pp_chunks,
            plan.micro_batches,
            plan.chunks > 1,
            plan.recompute,
        )
        if same not in known:
            endless = math.inf, math.inf, math.inf  # forward, backward, its last matrices
            known[same] = sum(traffic_seconds(hardware.est, plan, *endless).values())
        timed.append(replace(plan, seconds=shape.seconds | {"states": known[same]}))
    return timed


def shapes(c, model, hardware, every=False):
    """Return plans with all that SHAPE may choose, states left open. Raises ValueError."""
    start = Plan(
        model,
        DTYPES[c.dtype],
        hardware.ranks,
        hardware.per_node,
        c.seq,
        optimizer=c.optimizer,
        overlap=c.overlaps,
        tp_mode=c.tp_mode,
    )
    return choose(c, [start], SHAPE, every)


def choose(c, plans, degrees, every=False):
    """Return the plans with all that the degrees may choose. Raises ValueError if one leaves no
    legal choice."""
    for degree in degrees:
        found, errors = [], []
        for plan in plans:
            try:
                found += [replace(plan, **choice) for choice in degree(c, plan, every)]
            except ValueError as e:
                errors.append(e)
        if not found:
            raise errors[0]
        plans = found
    return plans


def fits(c: Constraints, model: ModelConfig, hardware: Hardware) -> bool:
    """Return whether there is a plan, legal and however slow."""
    least = {}
    try:
        return any(
            fit(c, plan, hardware).step_s < math.inf
            for shape in smallest(shapes(c, model, hardware, every=True))
            if best_case(c, shape, hardware, least).step_s < math.inf
            for plan in choose(c, [shape], [states])
        )
    except ValueError:
        return False


def smallest(plans):
    """Return the shapes that may need the least memory, of those that differ in head groups and
    chunks only: with the most or the fewest of both."""
    same = operator.attrgetter("tp", "pp", "pp_chunks", "sp", "ring", "micro_batch")
    for _, alike in itertools.groupby(sorted(plans, key=same), same):
        alike = list(alike)
        groups = [plan.head_groups for plan in alike]
        for number in sorted({min(groups), max(groups)}, reverse=True):
            by_chunk = [plan for plan in alike if plan.head_groups == number]
            by_chunk.sort(key=lambda plan: (plan.chunk, plan.recompute))
            yield by_chunk[0]
            yield from [plan for plan in by_chunk[1:] if plan.chunk == plan.tokens]


def best_case(c, shape, hardware, least):
    """Return a shape with what its layers keep, and seconds without those of states, if states took
    as little memory as any legal ones: no plan of this shape takes less time. least: these bytes,
    of all shapes whose states take equally many, which is filled here."""
    shape = replace(shape, os_place="gpu")
    several = shape.micro_batches > 1
    same = shape.tp, shape.pp, shape.pp_chunks, several, shape.chunks > 1
    if same not in least:
        plans = choose(c, [shape], [states])
        least[same] = min(sum(memory_of_states(plan)[0].values()) for plan in plans)
    saved = sum(memory_of_states(shape)[0].values()) - least[same]
    return fit(c, shape, hardware, saved)


def over(plan, hardware):
    """Return what a plan needs of a memory over what there is, the larger one."""
    host = plan.host_bytes / max(1.0, hardware.host_budget)
    return max(host, plan.gpu_bytes / hardware.gpu_budget)


def fit(c, plan, hardware, saved=None):
    """Return the plan with what its layers keep, its bytes and its seconds: it takes forever, if it
    does not fit. saved: bytes that other states would save, of a plan that is to be timed without
    them."""
    est, n = hardware.est, plan.virtual_stage_layers
    lost = 0.0
    if plan.recompute == "auto":
        plan = replace(plan, activations=ActivationPlan(n, plan.chunks, n, 0, 0, n))
    plan = with_bytes(plan)
    if saved:
        plan.memory["other states save"] = -saved
    if plan.recompute == c.recompute == "auto":
        times = plan.layers_in_flight / n
        room = hardware.gpu_budget - plan.gpu_bytes + plan.memory["activations"]
        spare = hardware.host_budget - plan.host.get("optimizer", 0)
        kept, lost = plan_activations(
            n,
            skeletal_bytes(plan),
            layer_seconds(est, plan),
            plan.chunks,
            est.profile.to_host,
            room / times,
            spare / times,
            c.resident_layers,
            c.alpha,
            streaming_seconds(est, plan),
        )
        plan = with_bytes(replace(plan, activations=kept))
        if saved:
            plan.memory["other states save"] = -saved
    fits = lost < math.inf and over(plan, hardware) <= 1 + 1e-9
    seconds = step_seconds(est, plan, states=saved is None) if fits else {"never": math.inf}
    return replace(plan, seconds=seconds)


# ---------------------------------------------------------------------------- the order of nodes

# A scheduler gives N nodes under some leaf switches, in any order. Bytes are counted as rings
# send them: the k ranks of a group, in order, send to the next one, the last to the first,
#
#     spine bytes = sum over groups, over r in the group:  sent * (leaf(r) != leaf(next(r)))
#     sent        = S * (k - 1)/k   all-gather, reduce-scatter, broadcasts of S bytes; all-reduce
#                                   2x; an all-to-all is a ring to each rank but the own
#
# The nodes of a group, in order under n > 1 leaves, so have n edges that cross. With 2 ranks a
# node and M micro-batches:
#
#     place                 0    1    2    3
#     ranks                 0 1  2 3  4 5  6 7    edges that cross the spine, bytes sent on each:
#     p = g = 4             p------   p------     param_gather, grad_scatter: 9/4 MS
#     os = 8                os----------------    grad_reduce, param_broadcast: S/4, {r, r + 4}
#     given leaves          a    b    a    b      4 of p, 0 of os
#     order [0, 2, 1, 3]    a    a    b    b      0 of p, 8 of os
#
# That is a partition of a graph with parts of given sizes, which is NP-hard. Here from leaf after
# leaf, the largest first, turned, two nodes are swapped as long as that saves bytes: the best one
# for every p, g, os, sp of some leaves of up to 8 nodes (a test). Left out: trees and NVLink SHARP,
# whose edges lie elsewhere; several levels of spines.


@dataclass(frozen=True)
class Ring:
    """A communication of all ranks: in every block of `block` neighbours, each rank sends to the
    one that is `stride` further in the block, the last ones to the first."""

    kind: str  # one of shard.STREAMS, "all_to_all", or "ring" of attention
    block: int  # ranks
    stride: int  # ranks
    sent: float  # bytes a step of each rank


def make_rings(plan):
    """Yield a step's communication, as shard.py and attention.py launch it."""
    model, sp, e, several = plan.model, plan.head_ranks, plan.dtype.itemsize, plan.micro_batches
    for kind, op, ranks, inner, earlier, last in plan.collectives:
        size = param_count(model) * e * (1 / inner - 1 / ranks)  # of all shards together
        # in forward and backward; there and back
        twice = kind == "param_gather" or op == "all_reduce"
        times = (1 + twice) * (earlier * (several - 1) + last)
        yield Ring(kind, ranks, inner, times * size)
    q, kv = plan.q_kv_widths  # q, o and k, v, and twice as much in backward
    tokens = plan.tokens * model.layers * several
    exchanged = (6 * q + 3 * kv) * e * tokens
    around = kv * (2 * e + plan.ring_sum_bytes) * tokens  # k, v twice; dk, dv
    around *= (plan.ring - 1) * plan.head_groups / plan.kv_groups
    for i in range(1, sp):
        yield Ring("all_to_all", sp, i, exchanged / sp)
    yield Ring("ring", plan.sp, sp, around)


def swap_nodes(order, leaf, traffic):
    """Return the order, changed by the best swap of two nodes again and again until none saves
    bytes.

    With D[i, j] the bytes between place i and all under the leaf of place j, a swap of i and j
    saves D[i, j] - D[i, i] + D[j, i] - D[j, j], less the bytes between i and j, which still cross,
    twice.
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


def place_nodes(leaves, rings, per_node):
    """Return the order of nodes that sends the fewest bytes across the spine (AMSP, section V-D),
    the given one if none sends fewer: place k, the ranks from k * per_node on, is node order[k];
    and the bytes of a step that cross in the given order, and in this one. leaves: of each node, in
    the given order.
    """
    _, leaf, counts = np.unique(leaves, return_inverse=True, return_counts=True)
    num_nodes = len(leaf)
    given = np.arange(num_nodes)
    rank = np.arange(num_nodes * per_node)
    traffic = np.zeros((num_nodes, num_nodes))  # whole bytes that a place sends to another
    for ring in rings:
        next_rank = rank // ring.block * ring.block + (rank + ring.stride) % ring.block
        np.add.at(traffic, (rank // per_node, next_rank // per_node), round(ring.sent))

    def spine_bytes(order):
        return traffic[leaf[order, None] != leaf[order]].sum()

    packed = np.lexsort((leaf, -counts[leaf]))  # turned, as blocks begin within leaves too
    orders = (swap_nodes(np.roll(packed, turn), leaf, traffic) for turn in range(32))
    best = min([given, *orders], key=spine_bytes)  # the first, of those that tie
    return best.tolist(), spine_bytes(given), spine_bytes(best)


def parse_leaf(text, num_nodes):
    """Return the leaf of each node by its name, in the given order, of --leaf N: so many nodes a
    leaf; or --leaf FILE: a node and its leaf a line, # begins a comment. Raises ValueError."""
    try:
        if text.isdecimal() and int(text):
            rows = [(f"{node}", f"{node // int(text)}") for node in range(num_nodes)]
        else:
            lines = re.sub("#.*", "", regular(Path(text)).read_text()).splitlines()
            rows = [line.split() for line in lines if line.strip()]
        leaf_of = dict(rows)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"--leaf {text}: neither a number of nodes a leaf, from 1 on, nor a file "
            f"of a node's name and its leaf's a line: {e}"
        ) from e
    if not len(rows) == len(leaf_of) == num_nodes:
        raise ValueError(
            f"--leaf {text}: {len(rows)} lines of {len(leaf_of)} nodes, instead of "
            f"one for each of {num_nodes}"
        )
    return leaf_of


def place(plan, leaf):
    """Return the order of nodes that sends the fewest bytes across the spine, in words. Raises
    ValueError."""
    if plan.tp * plan.pp > 1:
        raise ValueError(
            f"--leaf {leaf}: places nodes of --tp 1 --pp 1, and the best plan has "
            f"--tp {plan.tp} --pp {plan.pp}"
        )
    names, leaves = zip(*parse_leaf(leaf, plan.ranks // plan.per_node).items())
    order, before, after = place_nodes(leaves, make_rings(plan), plan.per_node)
    unit_bytes, unit = unit_of(before)
    best = "the given one is as good"
    if after < before:
        best = ", ".join(names[node] for node in order)
    return (
        f"order of nodes: {best}\n"
        f"spine traffic {before / unit_bytes:.2f} -> {after / unit_bytes:.2f} {unit} a step, "
        f"{(before - after) / max(1.0, before):.0%} saved"
    )


# ---------------------------------------------------------------------------- what to say

RULES = {  # choice -> why it is as it is
    "tp": "1, or as --tp says (auto: searched): columns of a layer exchange in the open",
    "pp": "1, or as --pp says (auto: searched): stages of a pipeline wait for each other",
    "sp": "the fewest ranks a sequence that fit and are fast; more, if a tie then spares host memory",
    "ring": "the least that leaves ranks that share key/value heads in one node",
    "groups": "parts of the heads: 4 hide all-to-alls under attention, more need less memory",
    "batch": "data-parallel ranks x micro-batches x sequences of one, up to 32K tokens a rank",
    "p,g,os": "the fewest shards that fit and are fast",
    "layers keep": "what fits and loses the least time",
}


def choices(plan: Plan) -> dict[str, str]:
    """Return what a plan chooses, in words."""
    f, kept = plan.factors, plan.activations
    host = ", os on the host" * (plan.os_place == "host")
    keeps = "all"
    if kept:
        if kept.kept_chunks < kept.layers * kept.chunks:
            keeps = f"k={kept.resident} alpha={kept.alpha:.2f}"
        keeps += f", chunks of {plan.chunk:,}" * (kept.chunks > 1)
        if kept.stride > 1:
            keeps += f", inputs of one in {kept.stride}"
        if kept.layers_recomputing_attention:
            keeps += f", attention twice in {kept.layers_recomputing_attention}"
    return {
        "tp": f"{plan.tp} {plan.tp_mode}" if plan.tp > 1 else "1",
        "pp": f"{plan.pp}x{plan.pp_chunks}",
        "sp": f"{plan.sp}",
        "ring": f"{plan.ring}",
        "groups": f"{plan.head_groups}",
        "batch": f"{plan.dp}x{plan.micro_batches}x{plan.micro_batch}",
        "p,g,os": f"{f.p},{f.g},{f.os} {plan.os_layout}{host}",
        "layers keep": keeps,
    }


def in_words(plan: Plan, other: Plan | None = None) -> str:
    """Return a plan's choices; those that differ from another's."""
    known = choices(other) if other else {}
    return ", ".join(
        f"{name} {text}" for name, text in choices(plan).items() if text != known.get(name)
    )


def by_purpose(plan):
    """Return the bytes of a GPU by what they are for, all in the unit that suits their sum."""
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


def command(plan: Plan, asked) -> str:
    """Return the command that runs a plan, on each node, with all else that was asked of a
    program, which names its model."""
    values = (
        vars(asked)
        | vars(plan)
        | asdict(plan.factors)
        | {"overlap": ",".join(plan.overlap) or "none", "strategy": "", "dtype": asked.dtype}
    )
    if plan.recompute == "auto":
        values["recompute"] = asked.recompute
    if values["recompute"] != "auto":
        del values["chunk"]
    del values["seq"]  # which has another default in train.py
    nodes = plan.ranks // plan.per_node
    meet = " --rdzv-backend c10d --rdzv-id RUN --rdzv-endpoint FIRST_NODE:29400" * (nodes > 1)
    return (
        f"torchrun --nproc_per_node {plan.per_node} --nnodes {nodes}{meet} train.py "
        f"--model {asked.model} --seq {in_size(plan.seq)} {given(values)}"
    )


def given(values):
    """Return the flags of Constraints that have values other than their defaults."""
    return " ".join(
        f"{flag_name(name)} {in_size(values[name])}"
        for name, f in flags_of(Constraints).items()
        if values.get(name, f.default) != f.default
    )


def rates_in_words(hardware: Hardware) -> str:
    """Say which kernel's seconds and which host's launches a prediction has."""
    kernel = nearest_kernel(hardware.profile, hardware.kernel)
    attention = f"attention takes the seconds of {kernel}"
    if hardware.kernel not in ("auto", kernel):
        attention += f", because the profile has none of {hardware.kernel}"
    host = nearest_host(hardware.profile, hardware.processor)
    launches = f"launches take those of {host}"
    if hardware.processor not in ("", host):
        launches = f"launches were measured on {host}, and this host is {hardware.processor}"
    return f"{attention}; {launches}"


def describe_plans(plans: list[Plan], hardware: Hardware) -> str:
    """Return a line a plan for people, with what differs from the first, which is in words already;
    where the first one's seconds and bytes go."""
    lines = []
    for plan in plans:
        found = figures(plan, hardware)
        mfu = ""
        if found["mfu_full"]:
            mfu = f"MFU {found['mfu_causal']:.1%} causal, {found['mfu_full']:.1%} full, "
        lines.append(
            f"{plan.step_s:.4g} s a step, {found['tgs']:,.0f} tokens a second and device (TGS), "
            f"{mfu}{found['tokens_a_day']:,.0f} tokens a day, "
            f"{in_unit(plan.gpu_bytes)} a device, "
            f"{in_unit(plan.host_bytes * plan.per_node)} of a node's host: "
            f"{in_words(plan, plans[0]) or 'as above'}"
        )
    seconds = [
        f"{name} {value:.3g}"
        for name, value in plans[0].seconds.items()
        if value > 5e-4 * plans[0].step_s
    ]
    unit_bytes, unit = unit_of(plans[0].gpu_bytes)
    return "\n".join(
        [
            *lines,
            f"seconds of a step by profile {hardware.profile.name} (of communication what nothing "
            f"hides): {', '.join(seconds)}",
            rates_in_words(hardware),
            f"{unit} of a device: {by_purpose(plans[0])}; "
            f"{plans[0].gpu_bytes / unit_bytes:.2f} in all",
        ]
    )


def reasons(found, best):
    """Return a line a choice: its rule, and the best other value that fits."""
    lines = []
    for name, text in choices(best).items():
        line = f"  {name} {text}: {RULES[name]}"
        for other in found:
            if choices(other)[name] != text:
                more = other.token_s / best.token_s - 1
                tie = " (a tie)" * (abs(more) <= TIE)
                line += f"; {choices(other)[name]}: {more:+.1%}{tie}"
                break
        lines.append(line)
    return lines


def binding(c, hardware, best):
    """Return what holds the best plan back: what would shorten its step most, if it were a thousand
    times as fast, or memory without end, and layers kept what then fits."""
    rates = {
        "FLOP/s": "flops",
        "copies to the host": "host",
        "the network": "network",
        "memory bandwidth": "memory",
    }
    without = {
        name: {"profile": scaled(hardware.profile, "", **{rate: 1000.0})}
        for name, rate in rates.items()
    }
    without["GPU memory"] = {"gpu_budget": 2.0**60}
    without["host memory"] = {"host_budget": 2.0**60}
    gains = sorted(
        (
            (1 - fit(c, best, replace(hardware, **limits)).token_s / best.token_s, name)
            for name, limits in without.items()
        ),
        reverse=True,
    )
    return "how much shorter a step would be without a limit to: " + ", ".join(
        f"{name} {gain:.1%}" for gain, name in gains if gain > TIE
    )


def describe(c, hardware, found, plans):
    """Return what a command prints: the question, the plan, why, and what follows. found: what else
    fits."""
    profile, best = hardware.profile, plans[0]
    lines = [
        f"{param_count(best.model) / 1e9:.2f} billion parameters, {best.seq:,} tokens a "
        f"sequence, sequences a step: {best.batch}, GPUs: {hardware.ranks}, "
        f"{hardware.per_node} a node; {in_unit(hardware.gpu_budget)} of a GPU, "
        f"{in_unit(hardware.host_budget * hardware.per_node)} of a node's host memory to "
        "plan with",
        f"profile {profile.name}: {profile.device}, {profile.sources.get('all', 'see its file')}",
        "",
        *reasons(found, best),
        "",
        command(best, c),
        "",
        describe_plans(plans, hardware),
        f"what binds: {binding(c, hardware, best)}",
    ]
    # another one: hardware.est knows what all plans have asked for
    est = Estimator(profile, hardware.kernel, hardware.processor)
    step_seconds(est, best)
    if est.outside_profile:
        lines.append(
            "not in the profile, at the nearest rates: " + "; ".join(sorted(est.outside_profile))
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------- the program


@dataclass(frozen=True)
class Question(Constraints):
    """What the program is asked."""

    # fmt: off
    model: str = flag("7b", ", ".join(MODELS), among=MODELS, group="the question")
    cluster: str = flag(
        "h200x8", f"profile of the machine: {', '.join(profile_files())}, a GPU (A100, H100, ...), "
        "or a file of bench.py --profile")
    ranks: Count = flag(None, "GPUs; auto: those of a node")
    per_node: Count = flag(None, "GPUs of a node; auto: the cluster's")
    top: int = flag(4, "plans to print: the best of another tp, pp or sp follow the first")
    json: bool = flag(False, "print them as JSON, and nothing else")
    leaf: str = flag(
        "", "nodes under a leaf switch, or a file with a node's and its leaf's name a line: print "
        "the best order of nodes")
    # fmt: on
    default_tokens: int = 2**19

    def hardware(self):
        """Return the machine that is asked for. Raises ValueError."""
        per_node = load_profile(self.cluster).per_node
        ranks = self.ranks or per_node
        per_node = min(ranks, self.per_node or math.gcd(min(per_node, ranks), ranks))
        if ranks % per_node:
            raise ValueError(
                f"--ranks {ranks}: not divisible by --per-node {per_node}; "
                f"legal here: {', '.join(map(str, divisors(ranks)))}"
            )
        if self.attention not in ("auto", *KERNELS):
            raise ValueError(f"--attention {self.attention}: one of auto, {', '.join(KERNELS)}")
        profile = load_profile(self.cluster, per_node)
        gpu = GPU_SHARE * (self.gpu_memory or profile.gpu_bytes)
        host = profile.host_bytes * 7 // 8 if self.host_memory is None else self.host_memory
        return Hardware(ranks, per_node, profile, gpu, host / per_node, self.kernel_of(profile))

    def kernel_of(self, profile):
        """Return the attention kernel that is asked for. auto: the best one of the profile, which
        has to take documents if there are any."""
        if self.attention == "auto" and self.has_documents:
            names = [name for name in KERNELS if KERNELS[name].documents]
            return min(names, key=lambda name: name not in profile.attention)
        return self.attention


def changes_that_fit(asked, hardware):
    """Return flags with which there is a plan, the smallest change first: fewer sequences a step or
    at once, fewer tokens, more head groups, smaller chunks, another tensor mode, more memory of the
    host or of a GPU, more GPUs."""
    seq, ranks = asked.seq, hardware.ranks
    gpu = round(hardware.gpu_budget / GPU_SHARE / GIB) * GIB
    node = int(hardware.host_budget * hardware.per_node / GIB) * GIB
    unit = math.lcm(256, ranks)
    batch = asked.batch or max(1, asked.default_tokens // seq)
    found = {}

    def enough(name, value):
        more = replace(asked, **{name: value})
        return fits(more, MODELS[more.model], more.hardware())

    # what fits, if it fits at all, with each value behind the first one that does
    for name, now, values in (
        ("seq", seq, range((seq - 1) // unit * unit, 0, -unit)),
        ("host_memory", node, range(node + GIB, 16 * node + 2**10 * GIB, GIB)),
        ("gpu_memory", gpu, range(gpu + GIB, 192 * GIB, GIB)),  # the largest GPU's
        ("ranks", ranks, [ranks * 2**i for i in range(1, 6)]),
    ):
        key = functools.partial(enough, name)
        for value in values[bisect.bisect_left(values, True, key=key) :][:1]:
            text = f"{flag_name(name)} {in_size(value)} instead of {in_size(now)}"
            found[text] = abs(math.log(value / max(1, now)))

    # what was asked by hand and need not be, and one micro-batch, which keeps no sums in float32
    smaller = [("batch", n, abs(math.log(n / batch))) for n in divisors(ranks) if n < batch]
    for name, value, change in (
        *smaller[::-1],
        *[(name, None, 0.0) for name in ("micro_batch", "head_groups", "chunk")],
        *[("tp_mode", mode, 0.0) for mode in ("mtp", "fsp") if asked.tp != 1],
    ):
        now = getattr(asked, name)
        if value != now and not any(text.startswith(flag_name(name)) for text in found):
            if enough(name, value):
                found[f"{flag_name(name)} {in_size(value)} instead of {in_size(now)}"] = change
    return sorted(found, key=found.get)


def main(argv: list[str] | None = None) -> int:
    """Print the best plan of a command, and why. Returns the exit status: 1 if nothing fits."""
    parser = make_parser(
        Question, "Which factors? Print the best plan for a cluster, on any machine."
    )
    asked = Question(**vars(parser.parse_args(argv)))
    try:
        check_values(asked)
        hardware = asked.hardware()
        found = search(asked, MODELS[asked.model], hardware)
        plans = best_of_kinds(found)[: asked.top]
        text = describe(asked, hardware, found, plans)
        if asked.leaf:
            text += "\n" + place(plans[0], asked.leaf)
    except TooLarge as e:
        plans = []
        text = "\n  ".join(
            [
                f"nothing fits: {e}",
                "what would fit, the smallest change first:",
                *changes_that_fit(asked, hardware),
            ]
        )
    except ValueError as e:
        parser.error(str(e))
    if asked.json:
        rows = [figures(plan, hardware) | {"command": command(plan, asked)} for plan in plans]
        text = json.dumps({"plans": rows, "text": text})
    print(text)
    return int(not plans)


if __name__ == "__main__":
    sys.exit(main())
