"""Which factors? How many ranks share a sequence, how states are sharded, how many sequences run at
once, and what layers keep: by predicted time and counted bytes.

    python planner.py --model 7b --ranks 8 --seq 1M --batch 1 --cluster h200x8
    plan(constraints, model, hardware) -> [Plan]        best first, a pure function

Constraints are what the flags of a command say, None where they leave it open. Each degree of a
plan is a function of SHAPE or `states`, which lists its legal values, and says of one that is not
why, and which are near. costs.py says what a plan takes,

    least  seconds of a step / its tokens     subject to  bytes <= memory of a GPU, of the host

(AMSP, section IV, with InternEvo's degrees and Memo's activations). What has one best answer is a
rule (RULES), the rest loops, in the order of bounds of the time: a shape's computation alone, then
a step that recomputes nothing, then with what its layers keep (`plan_activations`).

Ties, within 0.2 %, go to fewer stages, columns and ranks a sequence, larger micro-batches, states
on the GPU, less host memory, fewer shards (`preference`).

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
import contextlib
import difflib
import functools
import heapq
import itertools
import json
import math
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, asdict, astuple, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from attention import KERNELS, head_group_counts
from costs import (
    Estimator,
    LayerSeconds,
    Plan,
    column_bytes,
    host_bytes,
    layer_seconds,
    lost_seconds,
    resident_bytes,
    ring_traffic,
    rounding_bytes,
    step_seconds,
    visit_seconds,
    with_memory,
)
from hardware import Profile, find_sheet, load_profile, profile_names, scaled
from model import MODELS, ModelConfig, flops_per_token, param_count
from offload import GIB, ActivationPlan
from parallel import no_order
from placement import Ring, make_rings, parse_leaf, place_nodes
from shard import OPTIMIZERS, STREAMS, Factors, illegal, legal_factors, parse_strategy

# ---------------------------------------------------------------------------- flags


def size(text: str) -> int:
    """Return the number of '4096', '64K' or '1.5M': whole, with binary suffixes."""
    number = re.fullmatch(r"(-?\d{1,18}(?:\.\d{1,18})?)([KMG]?)", text.upper())
    value = float(number[1]) * 2 ** (10 * " KMG".index(number[2] or " ")) if number else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: a whole number, as 4096, 64K or 1.5M")
    return int(value)


def flag(default, text: str, low: float = 1, high: float = 2**20, among: Iterable[str] = (),
         group: str = ""):
    """Return a field that is a flag: a number between `low` and `high`, or a word of `among`.
    group: the title of those that begin with it in --help."""
    return field(default=default, metadata={
        "help": text, "range": (low, high), "among": among, "group": group})


def flags_of(program) -> dict[str, Field]:
    """Return a dataclass's fields that are flags, by name."""
    return {f.name: f for f in fields(program) if "help" in f.metadata}


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """End with argparse's own message, and the nearest flag for an unknown one."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].split("=")[0]
        near = difflib.get_close_matches(unknown, self._option_string_actions, 1)
        super().error(message + (f" (nearest: {near[0]})" if unknown and near else ""))


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def types_of(f: Field) -> tuple[type, ...]:
    return typing.get_args(f.type) or (f.type,)


def flag_type(f: Field):
    """Return the function text -> value of a field; auto is None where that is allowed."""
    kind = size if int in types_of(f) else types_of(f)[0]

    def convert(text: str):
        return None if text == "auto" and type(None) in types_of(f) else kind(text)

    convert.__name__ = kind.__name__  # argparse says "invalid float value"
    return convert


def make_parser(program: type, description: str) -> Parser:
    """Return a parser of a dataclass's flags, its own before those of Constraints. What it parses
    has those alone that a command gives."""
    group = parser = Parser(
        description=description, usage="%(prog)s [flags]", allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog="Sizes may end in K, M or G, which are binary: 4K is 4096. What is auto is chosen "
        "by the program, and printed.")
    flags = flags_of(program)
    own = [name for name in program.__annotations__ if name in flags]
    for name in dict.fromkeys([*own, *flags]):
        f = flags[name]
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        shown = "" if f.default in ("", None) or f.default is False else f" ({f.default})"
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
    """Raise ValueError for a number out of its range, or a word that is none of its choices."""
    for name, f in flags_of(program).items():
        value = getattr(program, name)
        among, (low, high) = f.metadata["among"], f.metadata["range"]
        if among and value not in among:
            raise ValueError(f"{flag_name(name)} {value}: one of {', '.join(among)}")
        if type(value) in (int, float) and not low <= value <= high:  # a NaN is not, either
            raise ValueError(f"{flag_name(name)} {value}: from {low} to {high}")


OVERLAPS = (*STREAMS, "pipeline")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


Count = int | None  # None: auto


@dataclass(frozen=True)
class Constraints:
    """What a command fixes; None, or auto, is open. A program's flags are these and its own."""

    seq: int | None = flag(4096, "tokens a sequence", 1, 2**40)
    batch: int | None = flag(
        None, "sequences a step over all ranks; auto: 512K tokens (4K for tiny); of a resumed run "
        "its tokens", group="a step and its tokens")
    micro_batch: int | None = flag(
        None, "sequences that sp ranks run at once; auto: the most within 8K tokens a rank, or "
        "fewer, by predicted time")
    tokenizer: str = flag(
        "", "Hugging Face folder whose tokenizer.json makes tokens of text, kept in OUT/tokens")
    document_token: int | None = flag(
        None, "id that ends a document, in which attention stays, and behind which no label "
        "counts; -1: none; auto: what --tokenizer ends texts with, else none", -1, 2**32)
    attention: str = flag("auto", "kernel: auto, fa4, cudnn, flash, cpu")
    dtype: str = flag("bf16", "of weights and activations", among=DTYPES)
    p: int | None = flag(
        None, "parameter shards; auto: by predicted time, then the fewest", group="sharding")
    g: int | None = flag(None, "gradient shards, p or os; auto: likewise")
    os: int | None = flag(None, "optimizer state shards, a multiple of p; auto: likewise")
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
    tp: int | None = flag(1, "neighbours that share each layer's matrices; auto: by predicted time")
    tp_mode: str = flag(
        "msp", "of them: all have all tokens (mtp), tokens are split between products, and (fsp) "
        "gathered again in backward", among=("mtp", "msp", "fsp"))
    pp: int | None = flag(1, "stages of a pipeline; auto: by predicted time")
    pp_chunks: int | None = flag(
        None, "parts of the model on a stage, interleaved; auto: by predicted time")
    sp: int | None = flag(
        None, "ranks that share a sequence; auto: by predicted time", group="sequences over ranks")
    ring: int | None = flag(
        None, "of them, by context, around which k, v travel; the other sp / ring by heads; auto: "
        "the fewest")
    head_groups: int | None = flag(
        None, "parts of a rank's heads: the next one's all-to-all runs under this one's attention; "
        "without --sp they save memory; auto: 4, or more")
    recompute: str = flag(
        "auto", "layers keep, swap or recompute chunks as planned; keep everything (none); or keep "
        "their input alone and run again, attention included (full)",
        among=("auto", "none", "full"), group="memory")
    chunk: int | None = flag(
        None, "most tokens that a layer runs at once, in equal parts; auto: 16K or 8K", 1, 2**40)
    alpha: float | None = flag(
        None, "fraction of tokens whose activations a swapped layer swaps; auto: as planned", 0, 1)
    resident_layers: int | None = flag(
        None, "last layers whose inputs and attention outputs stay on the GPU; auto: as planned", 2)
    host_memory: int | None = flag(
        None, "bytes of a node (as 400G) for states and activations; auto: what the control group "
        "or the machine allows, less an eighth", 0, 2**60)
    gpu_memory: int | None = flag(
        None, "bytes of a GPU that may be used (as 80G); auto: all", 1, 2**60)
    optimizer: str = "adamw"
    default_batch: int = 1  # sequences a step that are usual; rounded up to the ranks
    most_sequences: int | None = None  # that the data has
    resumes: bool = False  # a run, whose batch it keeps

    @property
    def overlaps(self) -> tuple[str, ...]:
        """Return what overlaps. Raises ValueError."""
        names = () if self.overlap == "none" else tuple(self.overlap.split(","))
        if not set(names) <= set(OVERLAPS):
            raise ValueError(f"--overlap {self.overlap}: a list of {', '.join(OVERLAPS)}, or none")
        return names

    @property
    def no_ring(self) -> str:
        """Return why a sequence cannot go by context, "" if it can."""
        end = self.document_token
        if bool(self.tokenizer) if end is None else end >= 0:
            return (
                "attention inside documents (--document-token; -1: none) goes by heads alone: "
                "--ring 1"
            )
        if self.attention in KERNELS and KERNELS[self.attention].sees_heads:
            return (
                f"--attention {self.attention}, which sees heads and where their keys stand, "
                "goes by heads alone: --ring 1"
            )
        return ""


@dataclass(frozen=True)
class Hardware:
    """The ranks, and what one of them has."""

    ranks: int
    per_node: int  # ranks of a node
    profile: Profile
    gpu_budget: float = 2.0**60  # bytes of a GPU to plan with
    host_budget: float = 2.0**60  # bytes of host memory of a rank, for states and to swap to


GPU_SHARE = 0.95  # of a GPU to plan with: context, communicators and fragments want the rest


def gpu_budget(device: torch.device, asked: int | None) -> float:
    """Return the bytes of a device to plan with. asked: --gpu-memory."""
    total = 2**60
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    return GPU_SHARE * min(total, asked or total)


def host_budget(ranks: int, asked: int | None, elsewhere: bool = False) -> float:
    """Return the bytes of host memory of a rank to swap to: as asked, or what control groups or the
    machine allow, less an eighth for all else. ranks: that share a node; asked: --host-memory;
    elsewhere: the plan is for another machine. Raises ValueError if control groups allow less."""
    if asked is not None and elsewhere:
        return asked / ranks
    limits = [int(Path("/proc/meminfo").read_text().split()[1]) * 1024]
    path = Path("/proc/self/cgroup").read_text().partition("::")[2].strip()
    group = Path("/sys/fs/cgroup" + path)
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int((folder / "memory.max").read_text()))
    allowed = min(limits)
    if asked is not None and asked > allowed:
        raise ValueError(
            f"--host-memory {asked / GIB:.0f}G: this machine, or its control group, "
            f"allows {allowed / GIB:.0f}G, and other things need some of it"
        )
    return (allowed * 7 // 8 if asked is None else asked) / ranks


# ---------------------------------------------------------------------------- what layers keep


class TooLarge(ValueError):
    """A step that does not fit; over: how many times too much it needs of a memory."""

    def __init__(self, message: str, over: float):
        super().__init__(message)
        self.over = over


MOST_STRIDE = 8  # layers of which one keeps its input: a group's are on the GPU together
TIE_S = 1e-4 / GIB  # seconds a byte: what need not be pinned and copied stays


def plan_activations(
    n: int, layer: tuple[float, float, float], s: LayerSeconds, chunks: int,
    bandwidth: float, gpu: float, host: float,
    resident: int | None = None, alpha: float | None = None, busy: float = 0.0,
) -> tuple[ActivationPlan, float]:
    """Return the plan that loses the least time, and the seconds lost in a step's forward and
    backward: of all k, m, X (whole groups of m layers leave) and some S at once, with as many kept
    chunks K as have room. Raises TooLarge.

    layer: bytes of one, as costs.column_bytes; bandwidth: bytes/s to the host, with all GPUs
    copying; busy: seconds of a layer's forward in which other things are copied; gpu, host: bytes a
    rank can give to activations; resident, alpha: set by hand.

        min  seconds recomputed and waited      (+ a tenth of a millisecond a GiB swapped)
             resident_bytes <= gpu,  host_bytes <= host, and in forward the rounding buffers and two
             layers that are leaving <= gpu
    """
    if resident and resident > n:
        raise ValueError(f"--resident-layers {resident}: a stage runs {n} layers; at most {n}")
    _, attn, others = layer
    part = others / chunks
    x, drops, m, k, rule = ways_to_keep(n)
    away = n - k
    hideable = bandwidth * away * max(0.0, s.forward - busy)
    everything = host_bytes(ActivationPlan(n, chunks, k), layer)
    least, hidden = (
        np.ceil((everything - room) / attn - 1e-9) for room in (host, np.minimum(host, hideable))
    )
    x = np.where(drops > 0, np.clip(np.choose(drops, [x, least, hidden, away]), 0, away), x)
    plans = ActivationPlan(n, chunks, k, 0, 0, x, m)
    copied = host_bytes(plans, layer)
    most = np.minimum(np.floor((host - copied) / part + 1e-9), chunks * away)
    hides = (hideable - copied) / part
    eighths = np.rint(chunks * np.minimum(rule, 8) / 8) * away
    swapped = np.choose(
        np.maximum(0, rule - 8), [eighths, most, np.floor(hides + 1e-9), np.ceil(hides - 1e-9)]
    )
    if alpha is not None:  # the nearest number of chunks
        swapped = np.rint(alpha * chunks * away)
    saves = (m == 1) & (x <= away)  # intermediates
    feasible = (most >= 0) & (0 <= swapped) & (swapped <= most) & (saves | (swapped == 0))
    plans = replace(plans, swapped_chunks=np.where(feasible, swapped, 0))
    kept = np.floor((gpu - resident_bytes(plans, layer)) / part + 1e-9)
    plans = replace(plans, kept_chunks=np.where(saves, np.clip(kept, 0, chunks * k), 0))
    # in forward two layers are leaving, whole
    leaving = rounding_bytes(plans, layer) + rounding_bytes(
        replace(plans, stride=1, layers_recomputing_attention=0), layer
    )
    feasible &= (kept >= 0) & (leaving <= gpu) & (k == (resident or k)) & ((k < n) | (not alpha))
    lost = sum(lost_seconds(plans, layer, s, bandwidth, busy))
    value = np.where(feasible, lost + TIE_S * host_bytes(plans, layer), np.inf)
    at = np.argmin(value)
    if value[at] == np.inf:
        asked = f"--alpha {alpha} " if alpha is not None else ""
        asked += f"--resident-layers {resident} of " if resident else ""
        raise TooLarge(
            f"{asked}{n} layers: activations do not fit {gpu / GIB:.1f} GiB of a GPU and "
            f"{host / GIB:.1f} of the host a rank", math.inf)
    chosen = (int(each[at]) for each in (k, plans.kept_chunks, plans.swapped_chunks, x, m))
    return ActivationPlan(n, chunks, *chosen), float(lost[at])


@functools.cache
def ways_to_keep(n: int) -> np.ndarray:
    """Return X, a rule for X, m, k and a rule for S, of all plans in question: each X of layers
    that swap no intermediates; else the least X that the host allows, the least whose copies hide
    too, or all that leave, and from 0 to 8 eighths of a layer, the most that the host has, the most
    chunks whose copies hide, or one more.

    Time falls with S as long as copies hide behind computation, so S is what a rounding buffer of
    so many chunks a layer has room for, the most that the host has, or the most that still hides.
    Layers that drop inputs (m > 1) keep no intermediates. With k = 2, m = 1, where waiting for a
    copy costs more than it saves, S is Memo's rule, to a chunk:

        max alpha:  (input + attn + alpha*S_others)/bandwidth <= layer_s
                    (n - 2)*(input + attn + alpha*S_others) <= host
    """
    ways = [
        (x, 0, m, k, 0)
        for m in range(1, MOST_STRIDE + 1)
        for k in range(min(2, n), n + 1)
        if (n - k) % m == 0
        for x in range(n + 1)
    ]
    ways += [
        (0, drops, 1, k, rule)
        for k in range(min(2, n), n)
        for drops in (1, 2, 3)
        for rule in range(1, 12)
    ]
    return np.array(ways).T


# ---------------------------------------------------------------------------- degrees


def divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def legal(
    c: Constraints,
    names: Sequence[str],
    every: Iterable[tuple[int, ...]],
    why_not: Callable[..., str | None],
) -> list[tuple[int, ...]]:
    """Return the values of flags, of `every`, that are as asked and break no rule. Raises
    ValueError with the rule that what is asked breaks, and the legal values that are near."""
    every = [values for values in every if not why_not(*values)]
    asked = [getattr(c, name) for name in names]
    found = [
        values
        for values in every
        if all(want in (None, value) for want, value in zip(asked, values))
    ]
    if found:
        return found

    def said(values: Iterable) -> str:
        return " ".join(f"{flag_name(name)} {value}" for name, value in zip(names, values))

    wish = [want or 1 for want in asked]
    every.sort(key=lambda values: sum(abs(a - b) for a, b in zip(values, wish)))
    raise ValueError(
        f"{said(wish)}: {why_not(*wish)}; legal here: "
        + (", ".join(map(said, sorted(every[:4]))) or "none")
    )


def columns(c: Constraints, hardware: Hardware, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with columns of a layer's matrices: neighbours in a node, each with as many
    heads and features."""
    model = plan.model

    def why_not(tp: int) -> str:
        if math.gcd(hardware.per_node, model.heads, model.kv_heads, model.ffn) % tp:
            return (
                f"it must divide {hardware.per_node} GPUs of a node, {model.heads} heads, "
                f"{model.kv_heads} key/value heads, {model.ffn} features"
            )
        whole = tp > 1 and OPTIMIZERS[c.optimizer].whole
        return "this optimizer needs whole matrices: --tp 1" if whole else ""

    for (tp,) in legal(c, ["tp"], zip(divisors(hardware.per_node)), why_not):
        yield replace(plan, tp=tp, tp_mode=c.tp_mode)


def stages(c: Constraints, hardware: Hardware, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with stages of a pipeline, and parts of the model on one."""
    ranks, per_node, layers = hardware.ranks, hardware.per_node, plan.model.layers

    def why_not(pp: int, parts: int) -> str:
        of_stage = ranks // pp
        if ranks % pp or of_stage % plan.tp or of_stage % per_node * (per_node % of_stage):
            return (
                f"each stage has whole nodes of {per_node}, or parts that divide one, of "
                f"{ranks} ranks in columns of {plan.tp}"
            )
        if pp * parts > layers or pp == 1 < parts:
            return (
                f"{pp} stages x {parts} parts of {layers} layers, and several parts are of a "
                "pipeline"
            )
        return ""

    every = itertools.product(divisors(ranks), range(1, layers + 1))
    for pp, parts in legal(c, ["pp", "pp_chunks"], every, why_not):
        if c.pp_chunks or parts in (1, 2, 4):
            yield replace(plan, pp=pp, pp_chunks=parts)


def sequences(c: Constraints, hardware: Hardware, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with ranks that share a sequence, and of them the least ring that leaves those
    that share heads in one node: their all-to-alls cross no network. Long sequences try larger ones
    too: where fewer ranks share the heads there are more groups of them, which need less memory."""
    ranks, in_node, kv_heads = plan.state_ranks, plan.in_node, plan.column.kv_heads

    def why_not(sp: int, ring: int) -> str:
        if ranks % sp or c.seq % (sp * plan.tp):
            return (
                f"it must divide {ranks} ranks, and --seq {c.seq} be a multiple of sp x tp = "
                f"{sp} x {plan.tp}"
            )
        heads = max(1, sp // ring)
        if ring > 1 and c.no_ring:
            return c.no_ring
        if sp % ring or kv_heads % heads:
            return f"sp / ring ranks share {kv_heads} key/value heads"
        if ring > 1 and (in_node % heads or c.seq % (2 * ring)):
            return (
                f"ranks that share heads are of one node of {in_node}, and --seq {c.seq} is cut in "
                "2 x ring parts"
            )
        return ""

    every = [(sp, ring) for sp in divisors(ranks) for ring in divisors(sp)]
    rings = {}
    for sp, ring in legal(c, ["sp", "ring"], every, why_not):
        rings.setdefault(sp, []).append(ring)
    for sp, some in rings.items():
        some.sort(key=lambda ring: (in_node % (sp // ring) > 0, ring))
        for ring in some if c.seq // sp > 2**16 else some[:1]:
            yield replace(plan, sp=sp, ring=ring)


def batches(c: Constraints, hardware: Hardware, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with sequences a step, and at once: within 8K tokens a rank the most, the next
    and one."""
    dp = plan.dp
    most = 2**40 if c.most_sequences is None else c.most_sequences
    batch = c.batch or max(dp, min(-(-c.default_batch // dp), most // dp) * dp)
    each, left = divmod(batch, dp)
    if batch > most:
        raise ValueError(
            f"--batch {batch}: the data has {most} training sequences of {c.seq} "
            "tokens; --batch counts sequences"
        )
    if left:
        kept = ", which a resumed run keeps" if c.resumes else ""
        raise ValueError(
            f"--batch {batch}{kept}: not divisible by {dp} data-parallel ranks; "
            f"nearest: {each * dp or dp} or {(each + 1) * dp}"
        )

    def why_not(size: int) -> str | None:
        if each % size:
            return f"it does not divide the {each} sequences of a rank (--batch {batch} over {dp})"
        turns = dp * size * plan.pp
        reason = no_order(plan.pp, plan.pp_chunks, each // size)
        return reason and (
            f"--pp-chunks {plan.pp_chunks}: {reason}; nearest --batch: "
            f"{-(-batch // turns) * turns}"
        )

    sizes = [size for size, in legal(c, ["micro_batch"], zip(divisors(each)), why_not)]
    if c.micro_batch is None:
        sizes = [n for n in sizes if n <= max(sizes[0], 2**13 * plan.sp // c.seq)]
    for size in {*sizes[-2:], sizes[0]}:
        yield replace(plan, batch=batch, micro_batch=size, accumulates=each > size)


def head_groups(c: Constraints, hardware: Hardware, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with parts of a rank's heads: 4 hide all-to-alls; of long sequences the most
    too, which need less memory."""
    column, ranks = plan.column, plan.head_ranks
    heads, kv_heads = column.heads // ranks, column.kv_heads // ranks
    counts = head_group_counts(heads, kv_heads, plan.tokens * column.heads * column.head_dim)

    def why_not(groups: int) -> str:
        if groups in counts:
            return ""
        return (
            f"a rank has {heads} query heads at a time, and {kv_heads} of keys and values; a head "
            f"of {plan.tokens} tokens may have too many elements: more --sp"
        )

    found = [n for n, in legal(c, ["head_groups"], zip(range(1, heads + 1)), why_not)]
    limits = (4, 16) if ranks > 1 else (1, 8)
    for limit in limits if plan.tokens > 2**16 and len(found) > 1 else limits[:1]:
        yield replace(plan, head_groups=max(n for n in found if n <= max(limit, found[0])))


def treatments(c: Constraints, hardware: Hardware, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with layers that run whole, and in equal chunks of at most 16K and 8K tokens:
    below that products slow down. What is said of chunks by hand asks for them."""
    by_hand = c.alpha is not None or c.resident_layers or c.chunk and c.chunk < plan.tokens
    # chunks alone let a group's gradients take its tensors' places
    in_chunks = c.recompute == "full" or by_hand or plan.sp == 1 < plan.head_groups
    if c.recompute == "none" or not in_chunks:
        yield replace(plan, recompute="none", chunk=plan.tokens)
    elif plan.splits_tokens:
        raise ValueError(
            f"--tp-mode {plan.tp_mode}: a column has its part of every chunk's tokens,"
            " so layers run whole, without --chunk, --alpha, --resident-layers,"
            " --recompute full and, of sp 1, --head-groups: --tp-mode mtp"
        )
    if c.recompute == "none" or plan.splits_tokens:
        return
    whole = Fraction(c.alpha or 0).limit_denominator(8).denominator  # alpha is a number of chunks
    for most in {min(plan.tokens, c.chunk or size) for size in (2**14, 2**13)}:
        parts = -(-plan.tokens // most)
        if not c.chunk:
            parts = min(plan.tokens, -(-parts // whole) * whole)
        yield replace(plan, recompute="auto", chunk=-(-plan.tokens // parts))


every_legal_factor = functools.cache(legal_factors)


def states(c: Constraints, hardware: Hardware, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with the legal factors, fewest shards first, and places of optimizer states.
    Layout intra: all ranks have as much to update."""
    world, in_node = plan.state_ranks, plan.in_node
    if c.strategy:
        if c.p or c.g or c.os:
            raise ValueError(f"--strategy {c.strategy} sets all factors: drop --p --g --os")
        c = replace(c, **asdict(parse_strategy(c.strategy, world)))
    whole = OPTIMIZERS[c.optimizer].whole  # its rank updates whole matrices

    def why_not(p: int, g: int, os: int) -> str | None:
        if whole and (p > 1 or c.os_layout == "intra"):
            return "this optimizer needs whole matrices: --os-layout inter --p 1"
        return illegal(Factors(p, g, os), world, in_node)

    layout = c.os_layout if c.os_layout != "auto" else "inter" if whole else "intra"
    places = ("gpu", "host") if c.os_place == "auto" else (c.os_place,)
    for f in legal(c, ["p", "g", "os"], map(astuple, every_legal_factor(world, in_node)), why_not):
        for place in places:
            yield replace(plan, factors=Factors(*f), os_layout=layout, os_place=place)


SHAPE = (columns, stages, sequences, batches, head_groups, treatments)  # of the computation


# ---------------------------------------------------------------------------- the search

TIE = 0.002  # of a step's time: less is no difference
FAR = 1.3  # times the best: what takes longer is not looked at


def plan(
    constraints: Constraints, model: ModelConfig, hardware: Hardware, top: int = 10
) -> list[Plan]:
    """Return the plan of the least predicted time a token that fits, and the best ones of other
    kinds (`kind`), best first. Raises ValueError with what is missing if none fits."""
    return Search(constraints, model, hardware).best()[:top]


def check(constraints: Constraints, model: ModelConfig, ranks: int, per_node: int) -> None:
    """Raise ValueError for constraints that no plan meets, whatever memory there is."""
    search = Search(constraints, model, Hardware(ranks, per_node, None))
    if not search.choose([search.start], columns, stages, states, sequences):
        raise search.errors[0]


def kind(plan: Plan) -> tuple[int, int, int]:
    """Return what plans of a kind have in common: columns, stages, ranks that share a sequence."""
    return plan.tp, plan.pp, plan.sp


class Search:
    """Plans in the order of bounds of their time."""

    def __init__(self, constraints: Constraints, model: ModelConfig, hardware: Hardware):
        c = self.constraints = constraints
        self.hardware = hardware
        self.est = Estimator(hardware.profile)
        self.start = Plan(
            model,
            DTYPES[c.dtype],
            hardware.ranks,
            hardware.per_node,
            c.seq,
            optimizer=c.optimizer,
            overlap=c.overlaps,
        )
        self.errors: list[ValueError] = []
        self.tried: list[tuple[int, Plan]] = []  # and how often its bound was made better

    def choose(self, plans: Iterable[Plan], *degrees: Callable) -> list[Plan]:
        """Return the plans with all that the degrees may choose."""
        for degree in degrees:
            found = []
            for plan in plans:
                try:
                    found += degree(self.constraints, self.hardware, plan)
                except ValueError as e:
                    self.errors.append(e)
            plans = found
        return plans

    def best(self) -> list[Plan]:
        """Return the best plan of each kind, fastest first, but for what ties with the first."""
        found: dict[tuple, list[Plan]] = {}  # by kind, the fastest first
        queue = []
        order = itertools.count()  # equal bounds: as listed, fewest shards first

        def put(level: int, plan: Plan) -> None:
            heapq.heappush(queue, (plan.token_s, next(order), level, plan))

        for shape in self.choose([self.start], *SHAPE):
            put(0, replace(shape, seconds=step_seconds(self.est, shape, states=False)))
        while queue:
            seconds, _, level, plan = heapq.heappop(queue)
            alike = found.get(kind(plan))
            first = next(iter(found.values()), [plan])[0]
            late = seconds > FAR * first.token_s or (
                alike and seconds > (1 + TIE) * alike[0].token_s
            )
            if late or level == 2:
                self.tried.append((level, plan))
            if level == 2 and not late:
                found.setdefault(kind(plan), []).append(plan)
            elif level == 0 and not late:
                for better in self.choose([plan], states):
                    put(1, replace(better, seconds=step_seconds(self.est, better)))
            elif not late:
                try:
                    put(2, self.fit(plan))
                except TooLarge as e:
                    self.errors.append(e)
                    self.tried.append((level, replace(plan, seconds={"never": math.inf})))
        if not found:  # the reason of the plan that is nearest to fitting, or the first
            raise min(self.errors, key=lambda e: getattr(e, "over", math.inf))
        others = sorted(map(self.preferred, found.values()), key=lambda plan: plan.token_s)
        best = self.preferred(others)
        return [best, *(plan for plan in others if plan is not best)]

    def preferred(self, plans: list[Plan]) -> Plan:
        """Return of the plans that tie with the first the one with fewer stages, columns, ranks a
        sequence, small micro-batches, states and activations on the host, and shards."""

        def preference(plan: Plan) -> tuple:
            share = round(20 * plan.host_bytes / max(1.0, self.hardware.host_budget))
            return (
                plan.pp,
                plan.tp,
                plan.pp_chunks,
                plan.sp,
                plan.ring,
                -plan.micro_batch,
                plan.os_place,
                share,
                astuple(plan.factors),
                plan.recompute != "none",
                plan.head_groups,
            )

        most = (1 + TIE) * plans[0].token_s
        return min((plan for plan in plans if plan.token_s <= most), key=preference)

    def fit(self, plan: Plan) -> Plan:
        """Return the plan with what its layers keep, its bytes and its seconds. Raises TooLarge."""
        plan = with_memory(replace(plan, activations=self.kept(plan)))
        gpu, host = self.hardware.gpu_budget, self.hardware.host_budget
        over = max(plan.gpu_bytes / gpu, plan.host_bytes / max(1.0, host))
        if over > 1 + 1e-9:
            raise TooLarge(
                f"a step needs {plan.gpu_bytes / GIB:.1f} GiB a GPU of {gpu / GIB:.1f} "
                f"({in_gib(plan)}), and {plan.host_bytes / GIB:.1f} GiB of host memory a rank of "
                f"{host / GIB:.1f}, with {in_words(plan)}",
                over,
            )
        return replace(plan, seconds=step_seconds(self.est, plan))

    def kept(self, plan: Plan) -> ActivationPlan | None:
        """Return what layers keep: what loses least; what needs least if nothing has room."""
        if plan.recompute == "none":
            return None
        c, n, layer = self.constraints, plan.part_layers, column_bytes(plan)
        drop_all = [
            ActivationPlan(n, plan.chunks, n, 0, 0, n, m) for m in range(1, MOST_STRIDE + 1)
        ]
        if c.recompute == "full":
            return drop_all[0]
        least = min(drop_all, key=lambda kept: resident_bytes(kept, layer))
        beside = with_memory(replace(plan, activations=least))
        times = plan.in_flight / n
        gpu = self.hardware.gpu_budget - beside.gpu_bytes + beside.memory["activations"]
        host = self.hardware.host_budget - beside.host.get("optimizer", 0)
        try:
            return plan_activations(
                n,
                layer,
                layer_seconds(self.est, plan),
                plan.chunks,
                self.est.profile.to_host,
                gpu / times,
                host / times,
                c.resident_layers,
                c.alpha,
                visit_seconds(self.est, plan),
            )[0]
        except TooLarge:
            if c.alpha is not None or c.resident_layers:
                raise
            return least

    def fits(self) -> bool:
        """Return whether there is a plan, however slow."""
        for plan in self.choose([self.start], *SHAPE, states):
            with contextlib.suppress(TooLarge):
                self.fit(plan)
                return True
        return False


def predict(plan: Plan, profile: Profile) -> Plan:
    """Return a plan, what its layers keep included, with its bytes and seconds."""
    return replace(with_memory(plan), seconds=step_seconds(Estimator(profile), plan))


# ---------------------------------------------------------------------------- what to say

RULES = {  # choice -> how often a bound must be made better to know it; why it is as it is
    "tp": (0, "columns exchange in the open: as asked"),
    "pp": (0, "stages wait for each other: as asked"),
    "sp": (0, "the fewest ranks a sequence that fit and are fast"),
    "ring": (0, "the least that leaves ranks that share heads in one node"),
    "groups": (0, "4 hide all-to-alls, more need less memory"),
    "batch": (0, "micro-batches as large as 8K tokens a rank, for large products"),
    "p,g,os": (1, "the fewest shards that fit and are fast"),
    "layers keep": (2, "what fits and loses the least time"),
}


def choices(plan: Plan) -> dict[str, str]:
    """Return what a plan chooses, in words."""
    f, kept = plan.factors, plan.activations
    host = ", os on the host" if plan.os_place == "host" else ""
    keeps = "all"
    if kept is not None:
        keeps = f"k={kept.resident} alpha={kept.alpha:.2f}, chunks of {plan.chunk:,}"
        if kept.kept_chunks == kept.layers * kept.chunks:
            keeps = f"all, {kept.chunks} chunks"
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


def in_gib(plan: Plan) -> str:
    """Return the bytes of a GPU, by what they are for."""
    return ", ".join(
        f"{name} {size / GIB:.2f}" for name, size in plan.memory.items() if size > GIB / 200
    )


def figures(plan: Plan, hardware: Hardware) -> dict:
    """Return a plan as --json prints it: all fields of costs.Plan, and what follows from them."""
    rate = plan.batch * plan.seq / plan.step_s
    peak = (hardware.profile.peak_flops or math.inf) * plan.ranks  # unknown: no MFU
    causal, full = (flops * rate / peak for flops in flops_per_token(plan.model, plan.seq))
    return (
        asdict(plan)
        | asdict(plan.factors)
        | {
            "dtype": f"{plan.dtype}",
            "dp": plan.dp,
            "step_s": plan.step_s,
            "tgs": rate / plan.ranks,
            "tokens_a_day": 86400 * rate,
            "mfu_causal": causal or None,
            "mfu_full": full or None,
            "gpu_gib": plan.gpu_bytes / GIB,
            "host_gib": plan.host_bytes * plan.per_node / GIB,
            "command": command(plan),
        }
    )


def command(plan: Plan) -> str:
    """Return the command that runs a plan."""
    values = vars(plan) | asdict(plan.factors) | {"overlap": ",".join(plan.overlap) or "none"}
    del values["chunk" if plan.recompute == "none" else "recompute"], values["dtype"]
    model = next((name for name, model in MODELS.items() if model == plan.model), "?")
    flags = [
        f"{flag_name(name)} {values[name]}"
        for name, f in flags_of(Constraints).items()
        if name in values and values[name] != f.default
    ]
    return (
        f"torchrun --nproc_per_node {min(plan.ranks, plan.per_node)} --nnodes "
        f"{-(-plan.ranks // plan.per_node)} train.py --model {model} {' '.join(flags)}"
    )


def describe_plans(plans: list[Plan], hardware: Hardware) -> str:
    """Return lines for people: the best plan and those that differ in kind; where the best one's
    seconds and bytes go."""
    rows = []
    for plan in plans:
        found = figures(plan, hardware)
        mfu = [f"{found[key] or math.nan:.1%}" for key in ("mfu_causal", "mfu_full")]
        rows.append(
            {
                "step s": f"{plan.step_s:.4g}",
                "TGS": f"{found['tgs']:,.0f}",
                "MFU causal": mfu[0],
                "full": mfu[1],
                **choices(plan),
                "GPU GiB": f"{found['gpu_gib']:.1f}",
                "host GiB a node": f"{found['host_gib']:.1f}",
            }
        )
    cells = [rows[0].keys(), *(row.values() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    seconds = [
        f"{name} {value:.3g}"
        for name, value in plans[0].seconds.items()
        if value > 5e-4 * plans[0].step_s
    ]
    return "\n".join(
        [
            *("  ".join(map(str.rjust, line, widths)) for line in cells),
            "batch: data-parallel ranks x micro-batches x sequences of one",
            f"seconds of a step (of communication what nothing hides): {', '.join(seconds)}",
            f"GiB of a GPU: {in_gib(plans[0])}",
        ]
    )


def describe_choice(plan: Plan, second: Plan | None, hardware: Hardware) -> str:
    """Return a line for people: what the step is predicted to take, and the best plan of another
    kind."""
    text = f"predicted by profile {hardware.profile.name}: {plan.step_s:.4g} s a step"
    if second is not None:
        more = second.token_s / plan.token_s - 1
        tie = " (a tie)" if abs(more) <= TIE else ""
        text += f"; second best: {in_words(second, plan)}: {more:+.2%} predicted{tie}"
    return text


def reasons(search: Search, best: Plan) -> list[str]:
    """Return a line a choice: its rule, and the best other value."""
    lines = []
    for name, text in choices(best).items():
        needed, rule = RULES[name]
        others = [
            (plan.token_s / best.token_s - 1, choices(plan)[name])
            for level, plan in search.tried
            if level >= needed
        ]
        more, other = min((pair for pair in others if pair[1] != text), default=(0, ""))
        instead = f"; {other}: {more:+.1%}" if more < math.inf else f"; {other} does not fit"
        lines.append(f"  {name} {text}: {rule}" + (instead if other else ""))
    return lines


def binding(search: Search, best: Plan) -> str:
    """Return what holds the best plan back: what would shorten its step most, if there were a
    thousand times as much of it."""
    hardware, plenty = search.hardware, 1000.0
    times = {}
    for name, rate in (
        ("FLOP/s", "flops"),
        ("copies to the host", "host"),
        ("the network", "network"),
        ("memory bandwidth", "memory"),
    ):
        times[name] = predict(best, scaled(hardware.profile, "", **{rate: plenty}))
    for name, budget in (("GPU memory", "gpu_budget"), ("host memory", "host_budget")):
        there = replace(hardware, **{budget: plenty * getattr(hardware, budget)})
        times[name] = plan(search.constraints, best.model, there)[0]
    gains = sorted(
        ((1 - there.token_s / best.token_s, name) for name, there in times.items()), reverse=True
    )
    return "a step would take less without a limit to " + ", ".join(
        f"{name} ({gain:.1%})" for gain, name in gains if gain > TIE
    )


# ---------------------------------------------------------------------------- the program


def changes_that_fit(constraints: Constraints, model: ModelConfig, hardware: Hardware) -> list[str]:
    """Return changes with which there is a plan, in words, the smallest first: fewer tokens, more
    memory of the host or of a GPU, more GPUs."""

    def fits(seq: int = constraints.seq, **changes: float) -> bool:
        usual = constraints.default_batch * constraints.seq // seq
        asked = replace(constraints, seq=seq, default_batch=usual)
        return Search(asked, model, replace(hardware, **changes)).fits()

    def more_gpus(ranks: int) -> bool:  # which share their nodes' memory
        per_node = min(ranks, max(hardware.per_node, hardware.profile.per_node))
        return fits(ranks=ranks, per_node=per_node, host_budget=node * GIB / per_node)

    seq, ranks, gpu = constraints.seq, hardware.ranks, hardware.gpu_budget / GIB
    node = hardware.host_budget * hardware.per_node / GIB
    unit = math.lcm(1024, ranks) if seq > 2**14 else 64
    found = []
    for text, now, values, works in (  # values from the smallest change on
        ("--seq {}", seq, range((seq - 1) // unit * unit, 0, -unit), fits),
        (
            "{} GiB of host memory a node to plan with",
            node,
            range(int(node), int(16 * node)),
            lambda gib: fits(host_budget=gib * GIB / hardware.per_node),
        ),
        (
            "{} GiB of memory a GPU to plan with",
            gpu,
            range(int(gpu), int(16 * gpu)),
            lambda gib: fits(gpu_budget=gib * GIB),
        ),
        ("{} GPUs", ranks, [ranks * 2**i for i in range(1, 6)], more_gpus),
    ):
        at = bisect.bisect_left(values, True, key=works)
        if at < len(values):
            found.append(
                (
                    max(values[at] / now, now / values[at]),
                    f"{text.format(values[at])} instead of {now:.0f}",
                )
            )
    return [text for _, text in sorted(found)]


@dataclass(frozen=True)
class Question(Constraints):
    """What the program is asked."""

    model: str = flag("7b", ", ".join(MODELS), among=MODELS, group="the question")
    cluster: str = flag(
        "h200x8", f"profile of the machine: {', '.join(profile_names())}, a GPU (A100, H100, ...), "
        "or a file of bench.py --profile")
    ranks: Count = flag(None, "GPUs; auto: those of a node")
    per_node: Count = flag(None, "GPUs of a node; auto: the cluster's")
    top: int = flag(4, "plans to print: the best of another tp, pp or sp follow the first")
    json: bool = flag(False, "print them as JSON, and nothing else", 0)
    leaf: str = flag(
        "", "nodes under a leaf switch, or a file with a node's and its leaf's name a line: print "
        "the best order of nodes")

    def hardware(self) -> Hardware:
        """Return the machine. Raises ValueError."""
        # of a GPU by its name, nodes of 8
        named = find_sheet(self.cluster) and not self.cluster.endswith(".json")
        per_node = 8 if named else load_profile(self.cluster).per_node
        ranks = self.ranks or per_node
        per_node = self.per_node or math.gcd(per_node, ranks)
        profile = load_profile(self.cluster, per_node)
        gpu = GPU_SHARE * min(profile.gpu_bytes, self.gpu_memory or profile.gpu_bytes)
        host = (self.host_memory or profile.host_bytes * 7 // 8) / min(per_node, ranks)
        return Hardware(ranks, per_node, profile, gpu, host)


def main(argv: list[str] | None = None) -> int:
    """Print the best plan of a command, and why. Returns the exit status: 1 if nothing fits."""
    parser = make_parser(
        Question, "Which factors? Print the best plan for a cluster, on any " "machine."
    )
    asked = Question(**vars(parser.parse_args(argv)))
    asked = replace(asked, default_batch=max(1, 2**19 // max(1, asked.seq)))
    model = MODELS.get(asked.model)
    try:
        check_values(asked)
        hardware = asked.hardware()
        check(asked, model, hardware.ranks, hardware.per_node)
        if asked.leaf:  # refused before it is used
            parse_leaf(asked.leaf, hardware.ranks // hardware.per_node)
        search = Search(asked, model, hardware)
        plans = search.best()[: asked.top]
        placed = place(plans[0], asked.leaf) if asked.leaf else ""
    except TooLarge as e:
        lines = [
            str(e),
            "what would fit, the smallest change first:",
            *changes_that_fit(asked, model, hardware),
        ]
        print(
            json.dumps({"plans": [], "binding": lines})
            if asked.json
            else "nothing fits: " + "\n  ".join(lines)
        )
        return 1
    except ValueError as e:
        parser.error(str(e))
    if asked.json:
        found = [figures(plan, hardware) for plan in plans]
        print(json.dumps({"plans": found, "binding": binding(search, plans[0])}))
    else:
        print(describe(search, plans), placed, sep="\n")
    return 0


def place(plan: Plan, leaf: str) -> str:
    """Return the order of nodes that sends the fewest bytes across the spine, in words. Raises
    ValueError."""
    if plan.tp * plan.pp > 1:
        raise ValueError(
            f"--leaf {leaf}: places nodes of --tp 1 --pp 1, and the best plan has "
            f"--tp {plan.tp} --pp {plan.pp}"
        )
    names, leaves = parse_leaf(leaf, plan.ranks // plan.per_node)
    model = plan.model
    e = plan.dtype.itemsize
    size = param_count(model) * e
    # q, k, v, o, and twice as much in backward
    columns = 3 * 2 * (model.heads + model.kv_heads) * model.head_dim
    exchanged = columns * plan.tokens * e * model.layers * plan.micro_batches
    rings = make_rings(
        plan.ranks,
        plan.factors,
        plan.os_layout,
        plan.micro_batches,
        size,
        size,
        plan.head_ranks,
        exchanged,
    )
    if plan.ring > 1:
        rings.append(Ring("ring", plan.sp, plan.head_ranks, ring_traffic(plan)))
    return place_nodes(leaves, rings, plan.per_node).describe(names)


def describe(search: Search, plans: list[Plan]) -> str:
    """Return what a command prints: the question, the plan, why, and what follows."""
    hardware, best = search.hardware, plans[0]
    profile = hardware.profile
    found = figures(best, hardware)
    lines = [
        f"{param_count(best.model) / 1e9:.2f} billion parameters, {best.seq:,} tokens a "
        f"sequence, sequences a step: {best.batch}, GPUs: {hardware.ranks}, "
        f"{hardware.per_node} a node; {hardware.gpu_budget / GIB:.0f} GiB of a GPU, "
        f"{hardware.host_budget * hardware.per_node / GIB:.0f} of a node's host memory to "
        "plan with",
        f"profile {profile.name}: {profile.device}, "
        f"{profile.sources.get('all', 'see its file')}",
        "",
        *reasons(search, best),
        "",
        found["command"],
        "",
        describe_plans(plans, hardware),
        f"{found['tokens_a_day']:,.0f} tokens a day",
        f"what binds: {binding(search, best)}",
    ]
    if search.est.held:
        lines.append("not in the profile: " + "; ".join(sorted(search.est.held)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
