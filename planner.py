"""Which factors? How many ranks share a sequence, how states are sharded, how many sequences run at
once, and what layers keep: by predicted time and counted bytes.

    python planner.py --model 7b --ranks 8 --per-node 8 --seq 1M --cluster h200x8
    plan(constraints, model, hardware) -> [Plan]        best first, a pure function

Constraints are what the flags of a command say, None where they leave it open. A plan is a value
for each row of DEGREES; costs.py says what it takes,

    least  seconds of a step / its tokens     subject to  bytes <= memory of a GPU, of the host

(AMSP, section IV, with InternEvo's degrees and Memo's activations.) The search is exact, best first
by bounds that get better (Search.best_first):

    a shape: columns, stages, sp, micro-batch,      its computation alone, and the least that
      head groups, chunk                              a pipeline is idle
    with shards, layout, place                      all communication hidden, or one wire's alone
    ... that fit, simulated                         a step that recomputes what has no room at all
    with what layers keep (plan_activations)        its step; it is found if no bound is less

Ties, within 0.2 %, go to fewer ranks a sequence and a ring, larger micro-batches, states on the
GPU, less host memory, fewer shards (`preference`).

With tp columns of layers and a pipeline of pp stages, states and sequences are shared by the R =
ranks / (tp pp) ranks of one stage and column, per_node / tp of them in a node.
What a stage's layers keep is planned for one micro-batch through its largest part, with the memory
of the stage that has the least for it, over what is in flight there.

Left out: other plans of what layers keep for other stages.

Legend: M micro-batches a step and rank, N tokens of one on a rank, p, g, os shards of parameters,
gradients and optimizer states, sp ranks that share a sequence; tp columns of layers, pp stages of a
pipeline, pp_chunks parts of the model on one; of what layers keep n layers, c chunks of one, k
resident layers, m layers of which one keeps x, X layers without o.
"""
import bisect
import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from attention import KERNELS, MAX_ELEMENTS, head_group_counts
from costs import (Estimator, Memory, Plan, column_bytes,
                   computation_seconds, fullest_stages, host_bytes, imbalance,
                   in_flight, kept_parts, layer_bytes, layer_peaks, layer_seconds, loss_peak,
                   message_bytes, resident_bytes, ring_traffic, rounding_bytes, slowest_stage,
                   stage_ends, stage_layers, stage_params, state_bytes, step_seconds, unit_seconds,
                   visit_bytes, weight_buffer_bytes)
from hardware import Profile, find_sheet, load_profile, profile_names, scaled
from model import ModelConfig, flops_per_token, param_count
from offload import GIB, ActivationPlan
from parallel import no_order
from placement import Ring, make_rings, parse_leaf, place_nodes
from shard import OPTIMIZERS, STREAMS, Factors, check_factors, legal_factors, parse_strategy

# ---------------------------------------------------------------------------- constraints


@dataclass(frozen=True)
class Sizes:
    """Bytes of one layer on one rank, and seconds of its forward."""

    input: int  # x
    attn: int  # o and the log-sum-exp
    intermediates: int  # what a block saves beside them: q, k, v, h, gate|up
    layer_s: float  # forward
    recompute_s: float  # of it, what recomputing the intermediates takes
    attn_s: float  # of it, attention
    post_s: float  # of it, what follows attention

    @property
    def layer(self) -> tuple[int, int, int]:
        """Return the bytes, as costs.layer_bytes does."""
        return self.input, self.attn, self.intermediates


@dataclass(frozen=True)
class Constraints:
    """What a command fixes; None, or an empty text, is open. Fields are train.py's flags."""

    seq: int
    dtype: torch.dtype
    default_batch: int = 1  # sequences a step that are usual; rounded up to the ranks
    most_sequences: int | None = None  # that the data has
    resumes: bool = False  # a run, whose batch it keeps
    batch: int | None = None
    micro_batch: int | None = None
    sp: int | None = None
    ring: int | None = None
    tp: int | None = 1
    tp_mode: str = "msp"
    pp: int | None = 1
    pp_chunks: int | None = None
    head_groups: int | None = None
    p: int | None = None
    g: int | None = None
    os: int | None = None
    strategy: str = ""
    os_layout: str = "auto"
    os_place: str = "auto"
    optimizer: str = "adamw"
    layers_run: str = ""  # none, auto: of these alone
    overlap: str = ",".join(STREAMS)
    recompute: str = "auto"
    chunk: int | None = None
    alpha: float | None = None
    resident_layers: int | None = None
    document_token: int | None = None
    tokenizer: str = ""
    attention: str = "auto"

    @property
    def no_ring(self) -> str:
        """Return why a sequence cannot go by context, "" if it can."""
        end = self.document_token
        if bool(self.tokenizer) if end is None else end >= 0:
            return "attention inside documents (--document-token; -1: none)"
        if self.attention in KERNELS and KERNELS[self.attention].sees_heads:
            return f"--attention {self.attention}, which sees heads and where their keys stand,"
        return ""


def constraints_of(flags, dtype: torch.dtype, default_batch: int,
                   most_sequences: int | None = None, resumes: bool = False) -> Constraints:
    """Return the constraints of flags, an object whose attributes have the names of fields."""
    known = {f.name for f in dataclasses.fields(Constraints)}
    given = {name: value for name, value in vars(flags).items() if name in known}
    return Constraints(**given | {"dtype": dtype, "default_batch": default_batch,
                                  "most_sequences": most_sequences, "resumes": resumes})


@dataclass(frozen=True)
class Hardware:
    """The ranks, and what one of them has."""

    ranks: int
    per_node: int  # ranks of a node
    profile: Profile
    gpu_budget: float = 2.0**60  # bytes of a GPU to plan with
    host_budget: float = 2.0**60  # bytes of host memory of a rank, for states and to swap to


def check(constraints: Constraints, model: ModelConfig, ranks: int, per_node: int) -> None:
    """Raise ValueError for constraints that no plan meets, whatever memory there is."""
    search = Search(constraints, model, Hardware(ranks, per_node, None))
    if not search.has_shape():
        raise search.errors[0]


def group_limit() -> int | None:
    """Return the bytes that control groups allow this process, None if they do not say."""
    limits = []
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)  # version 2 has no kinds
        here = (root / "memory" if "memory" in kinds else root) / path.lstrip("/")
        for folder in (here, *here.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((folder / name).read_text()))
    return min((x for x in limits if x < 2**50), default=None)  # version 1: none is a huge number


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
    allowed = group_limit()
    if asked is not None and allowed and asked > allowed:
        raise ValueError(f"--host-memory {asked / GIB:.0f}G: the control group allows "
                         f"{allowed / GIB:.0f}G, and other things need some of it")
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return ((allowed or total) * 7 // 8 if asked is None else asked) / ranks


# ---------------------------------------------------------------------------- what layers keep


class TooLarge(ValueError):
    """A step that does not fit; over: bytes of a rank that are missing."""

    def __init__(self, message: str, over: float):
        super().__init__(message)
        self.over = over


def plan_activations(n: int, s: Sizes, chunks: int, bandwidth: float, gpu: float, host: float,
                     resident: int | None = None, alpha: float | None = None,
                     busy: float = 0.0) -> tuple[ActivationPlan, float]:
    """Return the plan that loses the least time, and the seconds lost in a step's forward and
    backward.

    bandwidth: bytes/s to the host, with all GPUs copying; busy: seconds of a layer's forward in
    which other things are copied; gpu, host: bytes a rank can give to activations. With the number
    of resident layers k, of kept chunks K, of swapped chunks S, of layers without o, X, and of
    seconds w in which compute waits for copies:

        min  w + X*attn_s - (K + S)*recompute_s/c      (+ a tenth of a millisecond a GiB swapped)
        GPU    k*(input + attn) + K*S_others/c + 2*(input + attn + a*S_others/c)   <= gpu
               (and, while layers leave in forward,  4*(input + attn + a*S_others/c) <= gpu)
        host   (n - k)*(input + attn) - X*attn + S*S_others/c                    <= host
        time   (n - k)*(input + attn) - X*attn + S*S_others/c
                                                     <= bandwidth*((n - k)*(layer_s - busy) + w)
               K <= c*k,  S <= a*(n - k),  X <= n - k

    where a, the chunks that a rounding buffer has room for, takes some values in turn (eighths of a
    layer); with k = n there are no buffers. Memo's alpha, the fraction that is swapped, is S/(c*(n
    - k)). The backward takes twice the forward's time and copies as much, so it never binds.
    resident, alpha: set by hand. With k = 2, where waiting for a copy costs more than it saves, S
    is Memo's rule, to a chunk:

        max alpha:  (input + attn + alpha*S_others)/bandwidth <= layer_s
                    (n - 2)*(input + attn + alpha*S_others) <= host

    Where X > 0, or copies are waited for, what drops x or o and keeps no intermediates may lose
    less (`best_dropping`). Raises TooLarge, a ValueError, with what is missing.
    """
    if (missing := bytes_missing(n, s, gpu, host)) > 0:
        raise TooLarge(what_is_missing(n, s, gpu, host, resident, alpha), missing)
    best = best_swapping(n, s, chunks, bandwidth, gpu, host, resident, alpha, busy)
    value, activations, waits = best
    if alpha is None and (
            value == math.inf or waits or activations.layers_recomputing_attention):
        dropping = best_dropping(n, s, chunks, bandwidth, gpu, host, resident, busy)
        value, activations, waits = min(best, dropping, key=operator.itemgetter(0))
    if value == math.inf:
        missing = n * (s.input + s.attn) - max(0.0, gpu) - host
        raise TooLarge(what_is_missing(n, s, gpu, host, resident, alpha), max(1.0, missing))
    return activations, waits + recomputed_seconds(activations, s)


def best_swapping(n: int, s: Sizes, c: int, bandwidth: float, gpu: float, host: float,
                  resident: int | None, alpha: float | None,
                  busy: float) -> tuple[float, ActivationPlan | None, float]:
    """Return the least value of plan_activations' program if all layers keep x, the plan, and the
    seconds of waiting; the value is infinite if nothing is feasible. All a, k and X are tried at
    once, of X the least that the host allows if more gains nothing: for them K is the most that has
    room, and the value is convex in S with one kink, where copies begin to be waited for. (A solver
    of integer programs takes fifty times as long.)"""
    io = s.input + s.attn
    part = s.intermediates / c
    low = max(min(2, n), resident or 0)
    high = min(n - 1 if alpha else n, resident or n)
    if low > high:
        return math.inf, None, 0.0
    rooms = sorted({round(c * eighth / 8) for eighth in range(9)})
    if alpha is not None:
        rooms = [math.ceil(alpha * c)]
    a = np.array(rooms)[:, None, None, None]
    k = np.arange(low, high + 1)[None, :, None, None]
    away = n - k
    x = np.arange(n + 1)[None, None, :, None]
    # what a layer without o saves at most: the host's room for others, and a copy
    saved = s.attn / s.intermediates * s.recompute_s + s.attn / bandwidth
    if s.attn_s > saved:
        x = np.maximum(0, np.ceil((away * io - host) / s.attn - 1e-9)).astype(int)
    buffers = 2 * (away > 0) * (io + a * part)
    kept = np.minimum(c * k, np.floor((gpu - k * io - buffers) / part + 1e-9))
    by_host = (host - away * io + x * s.attn) / part
    covered = away * max(0.0, s.layer_s - busy)  # seconds that hide copies
    hidden = (bandwidth * covered - away * io + x * s.attn) / part  # copies, to the kink
    limit = np.minimum(a * away, np.floor(by_host + 1e-9))
    shape = np.broadcast_shapes(kept.shape, limit.shape, hidden.shape)
    kink = np.clip(hidden, 0, limit)
    swapped = np.concatenate([np.broadcast_to(count, shape) for count in (
        limit, np.floor(kink + 1e-9), np.minimum(limit, np.ceil(kink - 1e-9)), 0 * limit)], -1)
    if alpha is not None:  # the nearest number of chunks
        swapped = np.broadcast_to(np.rint(alpha * c * away), shape)
    waits = np.maximum(0, (away * io - x * s.attn + swapped * part) / bandwidth - covered)
    feasible = ((kept >= 0) & (x <= away) & (2 * buffers <= gpu) & (swapped >= 0)
                & (swapped <= np.minimum(a * away, by_host + 1e-9)))
    tie = 1e-4 / GIB  # seconds a byte: what need not be pinned and copied stays
    value = (waits + x * s.attn_s - (kept + swapped) * s.recompute_s / c
             + tie * (away * io + swapped * part))
    value = np.where(feasible, value, np.inf)
    at = np.unravel_index(np.argmin(value), value.shape)
    chosen = [int(np.broadcast_to(y, value.shape)[at]) for y in (k, kept, swapped, x)]
    return float(value[at]), ActivationPlan(n, c, *chosen), float(waits[at])


MOST_STRIDE = 8  # layers of which one keeps its input: a group's are on the GPU together


def best_dropping(n: int, s: Sizes, c: int, bandwidth: float, gpu: float, host: float,
                  resident: int | None,
                  busy: float) -> tuple[float, ActivationPlan | None, float]:
    """Return the least value of plan_activations' program if no intermediates are kept and layers
    drop x (all but one in m) or o (the first X), the plan, and the seconds of waiting; the value is
    infinite if nothing fits. All m, k and X are tried at once.

        min  (n - n/m)*post_s + X*attn_s + (X - X/m)*pre_s + w
    """
    x, m, k = ways_to_drop(n)
    plans = ActivationPlan(n, c, k, 0, 0, x, m)
    kept = resident_bytes(plans, s.layer)
    # in forward, beside the buffers that backward will take, two layers that are leaving
    leaving = rounding_bytes(plans, s.layer) + 2 * (s.input + s.attn)
    copied = host_bytes(plans, s.layer)
    feasible = (np.where(k < n, np.maximum(kept, leaving), kept) <= gpu) & (copied <= host)
    if resident is not None:
        feasible &= k == resident
    waits = waiting_seconds(plans, s, bandwidth, busy)
    value = recomputed_seconds(plans, s) - n * s.recompute_s + waits + 1e-4 / GIB * copied
    value = np.where(feasible, value, np.inf)
    at = np.unravel_index(np.argmin(value), value.shape)
    chosen = replace(plans, resident=int(k[at]), layers_recomputing_attention=int(x[at]),
                     stride=int(m[at]))
    return float(value[at]), chosen, float(waits[at])


@functools.cache
def ways_to_drop(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return X, m and k, as arrays (X, pairs of m and k of which whole groups leave)."""
    m, k = np.array([(m, k) for m in range(1, MOST_STRIDE + 1) for k in range(min(2, n), n + 1)
                     if (n - k) % m == 0]).T
    x = np.arange(n + 1)[:, None]
    return np.broadcast_arrays(x, m, k)


def least_lost(n: int, s: Sizes, room: float) -> float:
    """Return seconds that a micro-batch's backward recomputes at least, if what layers keep has so
    many bytes of room on GPU and host together: what costs least a byte is dropped first, in long
    sequences intermediates, then inputs, then o."""
    missing = n * sum(s.layer) - room
    rates = (s.recompute_s / s.intermediates, s.post_s / s.input, s.attn_s / s.attn)
    if missing <= 0 or sorted(rates) != list(rates):  # attention of short sequences is cheap
        return max(0.0, missing) * min(rates)
    intermediates = min(missing, n * s.intermediates)
    inputs = min(missing - intermediates, (1 - 1 / MOST_STRIDE) * n * s.input)
    outputs = missing - intermediates - inputs
    return sum(size * rate for size, rate in zip((intermediates, inputs, outputs), rates))


@functools.cache
def least_bytes(n: int, s: Sizes) -> tuple[float, float]:
    """Return what layers keep at least if they drop all that they can: on GPU and host together,
    and on the GPU (two resident layers, or two that leave, and two buffers of inputs)."""
    together = min(resident_bytes(ActivationPlan(n, 1, n, 0, 0, n, m), s.layer)
                   for m in range(1, MOST_STRIDE + 1))
    return together, min(together, 4 * s.input + 2 * s.attn)


def bytes_missing(n: int, s: Sizes, gpu: float, host: float) -> float:
    """Return what is missing of that."""
    together, on_gpu = least_bytes(n, s)
    return max(together - max(0.0, gpu) - host, on_gpu - gpu)


def what_is_missing(n: int, s: Sizes, gpu: float, host: float, resident: int | None,
                    alpha: float | None) -> str:
    """Return why no plan fits, for people."""
    io = (s.input + s.attn) / GIB
    together, on_gpu = (size / GIB for size in least_bytes(n, s))
    need = (f"layer inputs and attention outputs are {n * io:.1f} GiB a rank, {together:.1f} where "
            f"layers drop all that they can, {on_gpu:.1f} of it on the GPU")
    if resident is not None or alpha is not None:
        k = resident or 2
        buffer = io + (alpha or 0) * s.intermediates / GIB
        need = (f"with {k} resident layers and alpha {alpha or 0:g} they take "
                f"{max(4 * buffer, k * io + 2 * buffer):.1f} GiB of a GPU and "
                f"{(n - k) * buffer:.1f} of the host a rank")
    return (f"activations do not fit: {need}; there is room for {gpu / GIB:.1f} GiB on the GPU and "
            f"{host / GIB:.1f} on the host; a larger --sp, --host-memory or --gpu-memory, more "
            "ranks, or a shorter --seq")


def recomputed_seconds(activations: ActivationPlan, s: Sizes) -> float:
    """Return the seconds of a micro-batch's backward in which parts of its forward run again. Also
    of many plans at once, whose numbers are arrays."""
    saved = (activations.kept_chunks + activations.swapped_chunks) / activations.chunks
    again = np.maximum(0.0, activations.layers - saved) * s.recompute_s
    inputs, _, inputs_away, _ = kept_parts(activations)
    again += (activations.layers - inputs - inputs_away) * s.post_s
    dropped = activations.layers_recomputing_attention
    again += (dropped - dropped // activations.stride) * (s.layer_s - s.attn_s - s.post_s)
    return again + dropped * s.attn_s


def waiting_seconds(activations: ActivationPlan, s: Sizes, bandwidth: float, busy: float) -> float:
    """Return the seconds of a micro-batch's forward in which compute waits for copies. Also of many
    plans."""
    away = activations.layers - activations.resident
    copies = host_bytes(activations, s.layer) / bandwidth
    return np.maximum(0.0, copies - away * max(0.0, s.layer_s - busy))


def lost_seconds(activations: ActivationPlan, s: Sizes, bandwidth: float,
                 busy: float) -> tuple[float, float]:
    """Return the seconds of a micro-batch that are lost to recomputation and to copies."""
    return recomputed_seconds(activations, s), waiting_seconds(activations, s, bandwidth, busy)




# ---------------------------------------------------------------------------- degrees


def no_bytes(plan: Plan, stage: int = 0) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Degree:
    """One choice of a plan, of one field or several that go together."""

    names: tuple[str, ...]  # of Plan's fields
    legal: Callable[..., list[tuple]]  # (constraints, hardware, plan) -> values of them,
    # given what the degrees above have chosen; raises ValueError with what would be legal
    seconds: tuple[str, ...]  # parts of step_seconds that come from it
    bytes: Callable[..., dict[str, float]] = no_bytes  # (plan, stage) -> what lasts through a
    # step on a stage


def values(plan: Plan, degrees: tuple[Degree, ...], *left_out: str) -> dict:
    """Return a plan's values for degrees, by name."""
    return {name: getattr(plan, name) for degree in degrees for name in degree.names
            if name not in left_out}


def legal_tensor(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return (columns of a layer's matrices, mode): neighbours in a node, each with as many heads
    and features; if they are open, powers of two. Raises ValueError with the legal ones."""
    model = plan.model
    shared = {"GPUs of a node": hardware.per_node, "heads": model.heads,
              "key/value heads": model.kv_heads, "features": model.ffn}
    legal = divisors(math.gcd(*shared.values()))
    if OPTIMIZERS[constraints.optimizer].whole:  # a column has parts of matrices
        legal = [1]
        if constraints.tp not in (None, 1):
            raise ValueError(f"--tp {constraints.tp}: this optimizer needs whole matrices: --tp 1")
    if constraints.tp is None:
        return [(n, constraints.tp_mode) for n in legal if n & (n - 1) == 0]
    if constraints.tp not in legal:
        counts = ", ".join(f"{count} {name}" for name, count in shared.items())
        raise ValueError(f"--tp {constraints.tp}: it must divide {counts}: one of {listed(legal)}")
    return [(constraints.tp, constraints.tp_mode)]


def legal_pipeline(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return (stages, parts of the model on one). Raises ValueError with the nearest legal ones."""
    ranks, per_node, layers = hardware.ranks, hardware.per_node, plan.model.layers
    pp, chunks = constraints.pp, constraints.pp_chunks
    if pp == 1 and (chunks or 1) > 1:
        raise ValueError(f"--pp-chunks {chunks}: of a pipeline; --pp from 2, or auto")
    stages = [n for n in divisors(ranks) if n <= layers
              and in_nodes(ranks // n, per_node) and ranks // n % plan.tp == 0]
    if pp not in (None, 1, *stages):
        raise ValueError(f"--pp {pp}: each of at most {layers} stages, one a layer, has "
                         f"whole nodes of {per_node}, or parts that divide one, of {ranks} ranks "
                         f"in columns of {plan.tp}; nearest: {nearest_of(pp, stages)}")
    found = []
    if pp in (None, 1) and (chunks or 1) == 1:
        found.append((1, 1))
    for n in stages:
        if n == 1 or pp not in (None, n):
            continue
        most = layers // n
        if chunks and chunks > most and pp:
            raise ValueError(f"--pp-chunks {chunks}: {n} stages x {chunks} parts are more than the "
                             f"{layers} layers; at most {most}")
        found += [(n, v) for v in ([chunks] if chunks else (1, 2, 4)) if v <= most]
    if not found:
        raise ValueError(f"--pp-chunks {chunks}: no --pp that divides {ranks} ranks has so many "
                         f"parts of {layers} layers")
    return found


def in_nodes(ranks: int, per_node: int) -> bool:
    """Return whether so many neighbours are whole nodes, or divide one."""
    return ranks % per_node == 0 or per_node % ranks == 0


def divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def listed(legal: Iterable[int]) -> str:
    return ", ".join(map(str, legal))


def nearest_of(value: int, legal: list[int]) -> str:
    """Return those of the legal ones that are next to value, for messages."""
    low = [n for n in legal if n < value][-1:]
    high = [n for n in legal if n > value][:1]
    return " or ".join(map(str, low + high))


def legal_sequences(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return (sp, ring): columns share a sequence, too. Raises ValueError."""
    found = legal_degrees(constraints, plan)
    if plan.tp == 1:
        return found
    legal = [(sp, ring) for sp, ring in found if constraints.seq % (sp * plan.tp) == 0]
    if not legal:
        sp = min(sp for sp, _ in found)
        raise ValueError(f"--seq {constraints.seq}: no multiple of sp {sp} x tp {plan.tp}; "
                         f"nearest: {nearest(constraints.seq, sp * plan.tp)}")
    return legal


def legal_batches(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return (batch, micro-batch), largest micro-batch first: parts that alternate on a stage want
    so many as fill all stages. Raises ValueError with the nearest --batch."""
    dp = plan.dp
    most = constraints.most_sequences
    batch = constraints.batch or -(-constraints.default_batch // dp) * dp
    if constraints.batch is None and most is not None and most >= dp:
        batch = min(batch, most // dp * dp)
    if most is not None and batch > most:
        raise ValueError(f"--batch {batch}: the data has {most} training sequences of "
                         f"{constraints.seq} tokens; --batch counts sequences")
    if batch % dp:
        kept = ", which a resumed run keeps" if constraints.resumes else ""
        raise ValueError(f"--batch {batch}{kept}: not divisible by {dp} data-parallel ranks; "
                         f"nearest: {nearest(batch, dp)}")
    each = batch // dp
    size = constraints.micro_batch
    if size is not None and each % size:
        raise ValueError(
            f"--micro-batch {size}: does not divide the {each} sequences of a rank (--batch "
            f"{batch} over {dp}); nearest --batch: {nearest(batch, size * dp)}")
    largest = min(each, max(1, 2**13 * plan.sp // constraints.seq))
    sizes = [n for n in reversed(divisors(each)) if n <= largest] if size is None else [size]
    if plan.pp_chunks == 1:
        return [(batch, size) for size in sizes]
    why = {size: no_order(plan.pp, plan.pp_chunks, each // size) for size in sizes}
    legal = [(batch, size) for size, reason in why.items() if reason is None]
    if not legal:
        size = sizes[-1]
        raise ValueError(f"--pp-chunks {plan.pp_chunks}: {why[size]}; --pp-chunks 1, or the "
                         f"nearest --batch: {nearest(batch, dp * size * plan.pp)}")
    return legal


def legal_recompute(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return how layers may run. What is said of chunks by hand asks for them. Raises ValueError
    where columns that split tokens are to have some, and for layers that there are not."""
    if constraints.recompute == "none":
        return [("none",)]
    k = constraints.resident_layers
    alpha = constraints.alpha
    n = max(plan.parts)
    has = f"each of {plan.pp * plan.pp_chunks} parts" if plan.pp > 1 else "the model"
    if k and k > n:
        raise ValueError(f"--resident-layers {k}: from 2, whose backward starts at once, to the {n}"
                         f" that {has} has")
    if alpha and n <= 2:
        raise ValueError(f"--alpha {alpha}: the last two layers never swap, and {has} has {n}")
    if alpha and k == n:
        raise ValueError(f"--alpha {alpha}: no layer swaps if all {n} are resident")
    cut = constraints.chunk is not None and constraints.chunk < plan.tokens
    by_hand = constraints.alpha is not None or constraints.resident_layers
    # chunks alone let a group's gradients take its tensors' places
    full = constraints.recompute == "full"
    in_chunks = full or cut or by_hand or plan.sp == 1 < plan.head_groups
    if in_chunks and plan.splits_tokens:
        raise ValueError(f"--tp-mode {plan.tp_mode}: a column has its part of every chunk's tokens,"
                         " so layers run whole, without --chunk, --alpha, --resident-layers,"
                         " --recompute full and, of sp 1, --head-groups: --tp-mode mtp")
    if in_chunks:
        return [("auto",)]
    ways = ("none",) if plan.splits_tokens else ("none", "auto")
    return [(how,) for how in ways if constraints.layers_run in ("", how)]


def legal_chunks(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return the most tokens that a layer runs at once: equal parts of at most --chunk, of 16K, 8K
    or 4K if that is open."""
    tokens = plan.tokens
    if plan.recompute != "auto":
        return [(tokens,)]
    found = []
    for most in [constraints.chunk] if constraints.chunk else (2**14, 2**13, 2**12):
        parts = -(-tokens // most)
        if not constraints.chunk:  # --alpha is a number of them
            least = Fraction(constraints.alpha or 0).limit_denominator(8).denominator
            parts = -(-parts // least) * least
        found.append((-(-tokens // min(tokens, parts)),))
    return list(dict.fromkeys(found))


def legal_states(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return the legal factors that the flags allow, fewest shards first. Raises ValueError."""
    world = plan.state_ranks
    per_node = plan.in_node
    if world % per_node:
        closest = min(divisors(world), key=lambda n: abs(n - per_node))
        raise ValueError(f"--per-node {per_node}: does not divide {world} ranks; nearest: "
                         f"{closest}")
    asked = {"p": constraints.p, "g": constraints.g, "os": constraints.os}
    wish = {name: count for name, count in asked.items() if count is not None}
    if constraints.strategy:
        if wish:
            raise ValueError(f"--strategy {constraints.strategy} sets all factors: drop "
                             f"--{' --'.join(wish)}")
        factors = [parse_strategy(constraints.strategy, world)]
        check_factors(factors[0], world, per_node)
    else:
        factors = [f for f in legal_factors(world, per_node)
                   if all(getattr(f, name) == count for name, count in wish.items())]
    if not factors:
        low = wish.get("p", 1)
        high = wish.get("os", world)
        check_factors(Factors(low, wish.get("g", high), high), world, per_node)
        raise AssertionError("check_factors accepts what is not legal")
    if OPTIMIZERS[constraints.optimizer].whole:  # its rank updates whole matrices
        factors = [f for f in factors if f.p == 1 and constraints.os_layout != "intra"]
        if not factors:
            raise ValueError("this optimizer needs whole matrices: --os-layout inter --p 1")
    return [(f,) for f in factors]


def legal_places(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return places of optimizer states; the host is tried where they are a twentieth of what a GPU
    has, or more."""
    if constraints.os_place != "auto":
        return [(constraints.os_place,)]
    params = param_count(plan.model) / (plan.tp * plan.pp)
    held = state_bytes(params, plan.factors, constraints.dtype, False, plan.optimizer)
    large = held["optimizer"] > hardware.gpu_budget / 20
    return [("gpu",), ("host",)] if large else [("gpu",)]


def legal_layouts(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return layouts of optimizer states; where a subgroup has one rank, they are the same."""
    if constraints.os_layout != "auto":
        return [(constraints.os_layout,)]
    if OPTIMIZERS[constraints.optimizer].whole:
        return [("inter",)]
    return [("intra",), ("inter",)] if plan.factors.os > plan.factors.p else [("intra",)]


def kept_bytes(plan: Plan, stage: int = 0) -> dict[str, float]:
    """Return what a stage's layers keep, of all that is in flight there."""
    layer = column_bytes(plan)
    layers = in_flight(plan, stage)
    kept = plan.activations
    if kept is not None and kept.kept_chunks < kept.layers * kept.chunks:
        return {"activations": resident_bytes(kept, layer) * (layers / kept.layers)}
    return {"activations": layers * sum(layer)}


def factor_bytes(plan: Plan, stage: int = 0) -> dict[str, float]:
    """Return the bytes of a stage's states, and of the buffers of their weights and gradients."""
    f = plan.factors
    states = state_bytes(stage_params(plan, stage), f, plan.dtype, plan.accumulates,
                         plan.optimizer)
    states["optimizer"] *= plan.os_place == "gpu"
    if plan.os_layout == "inter":  # of the rank that owns most
        most = imbalance(plan, stage)
        states["optimizer"] *= most
        if f.g > f.p:
            states["gradients"] *= most
    return states | weight_buffer_bytes(plan, stage)


def nearest(value: int, step: int) -> str:
    """Return the multiples of step around value, for messages."""
    low = value // step * step
    return " or ".join(str(n) for n in (low, low + step) if n > 0)


def legal_degrees(constraints: Constraints, plan: Plan) -> list[tuple[int, int]]:
    """Return (sp, ring) to try: in a ring, ranks that share heads are of one node. Raises
    ValueError with the legal ones."""
    seq = constraints.seq
    ranks = plan.state_ranks
    per_node = plan.in_node
    model = plan.column
    no_ring = constraints.no_ring
    legal = []
    for sp in (n for n in divisors(ranks) if seq % n == 0):
        for ring in divisors(sp):
            head_ranks = sp // ring
            cut = not no_ring and per_node % head_ranks == 0 and seq % (2 * ring) == 0
            if model.kv_heads % head_ranks == 0 and (ring == 1 or cut):
                legal.append((sp, ring))
    sp, ring = constraints.sp, constraints.ring
    if no_ring and ring not in (None, 1):
        raise ValueError(f"--ring {ring}: {no_ring} goes by heads alone: --ring 1")
    asked = [pair for pair in legal if sp in (None, pair[0]) and ring in (None, pair[1])]
    if asked:
        return asked
    of_sp = sorted({pair[1] for pair in legal if pair[0] == sp})
    if ring is not None and of_sp:
        raise ValueError(
            f"--ring {ring}: with --sp {sp} the other {sp} / ring ranks share {model.kv_heads} "
            f"key/value heads inside a node of {per_node}, and --seq {seq} is cut in 2 x ring "
            f"parts: one of {listed(of_sp)}")
    if sp is not None:
        alone = f", since {no_ring} goes by heads alone" if no_ring else ""
        raise ValueError(
            f"--sp {sp}: it must divide {ranks} ranks and --seq {seq}, and sp / ring the "
            f"{model.kv_heads} key/value heads{alone}: one of "
            f"{listed(sorted({n for n, _ in legal}))}")
    raise ValueError(f"--ring {ring}: it must divide --sp, which divides {ranks} ranks, and "
                     f"--seq {seq} must be a multiple of 2 x ring: one of "
                     f"{listed(sorted({n for _, n in legal}))}")


def legal_head_groups(constraints: Constraints, hardware: Hardware, plan: Plan) -> list[tuple]:
    """Return the parts of a rank's heads; if they are open, at most 4 of a sequence on several
    ranks, or 16 of a long one, and 1 or at most 8 of a long one on one rank, for less memory.
    Raises ValueError with the legal ones."""
    model = plan.column
    heads, kv_heads = model.heads // plan.head_ranks, model.kv_heads // plan.head_ranks
    legal = head_group_counts(heads, kv_heads, plan.tokens * model.heads * model.head_dim)
    wanted = constraints.head_groups
    if wanted is not None and wanted not in legal:
        raise ValueError(f"--head-groups {wanted}: a rank has {heads} query heads at a time, and "
                         f"{kv_heads} of keys and values; one of {listed(legal)}")
    if wanted is not None:
        return [(wanted,)]
    if not legal:
        raise ValueError(f"--seq {constraints.seq}: one head of {plan.tokens} tokens at a time has "
                         f"over {MAX_ELEMENTS} elements; more --sp, or less --micro-batch")
    usual, most = (4, 16) if plan.head_ranks > 1 else (1, 8)
    tried = {n for n in legal if n <= max(usual, legal[0])}
    # layers of columns that split tokens run whole
    if plan.tokens > 2**16 and (plan.head_ranks > 1 or not plan.splits_tokens):
        tried.add(max(n for n in legal if n <= max(most, legal[0])))
    return [(n,) for n in sorted(tried)]


SHAPE = (  # of the computation
    Degree(("tp", "tp_mode"), legal_tensor, ("tensor exchanges",)),
    Degree(("pp", "pp_chunks"), legal_pipeline, ("pipeline idle", "stage messages"),
           message_bytes),
    Degree(("sp", "ring"), legal_sequences, ("all-to-all",)),
    Degree(("batch", "micro_batch"), legal_batches, ("attention", "head and loss")),
    Degree(("head_groups",), legal_head_groups, ("all-to-all",)),
    Degree(("recompute",), legal_recompute, ("recomputation", "copies"), kept_bytes),
    Degree(("chunk",), legal_chunks, ("rest of layers", "launches")),
)
STATES = (  # of model states: AMSP's
    Degree(("factors",), legal_states,
           ("param_gather", "grad_scatter", "grad_reduce", "param_broadcast", "optimizer",
            "gradient sums", "small sums", "slowed by communication"), factor_bytes),
    Degree(("os_layout",), legal_layouts, ("grad_reduce", "param_broadcast")),
    Degree(("os_place",), legal_places, ("host_update",), visit_bytes),
)
DEGREES = SHAPE + STATES


# ---------------------------------------------------------------------------- the search

TIE = 0.002  # of a step's time: less is no difference


def plan(constraints: Constraints, model: ModelConfig, hardware: Hardware,
         top: int = 10) -> list[Plan]:
    """Return the `top` plans of the least predicted time a token that fit, best first; of those
    that tie with the fastest the first by `preference`. Raises ValueError with what is missing if
    none fits."""
    search = Search(constraints, model, hardware)
    found: list[Plan] = []
    steps = set()
    for candidate in search.best_first():
        if (step := same_step(candidate)) in steps:
            continue
        steps.add(step)
        if len(found) >= top and candidate.token_s > (1 + TIE) * found[0].token_s:
            break
        found.append(candidate)
    if not found:
        raise search.why_not()
    ties = [p for p in found if p.token_s <= (1 + TIE) * found[0].token_s]
    best = min(ties, key=lambda p: preference(p, hardware))
    return [best, *(p for p in found if p is not best)][:top]


def preference(plan: Plan, hardware: Hardware) -> tuple:
    """Return what decides between plans that tie, less is better: ranks a sequence and a ring,
    small micro-batches, states on the host, a twentieth of its memory, shards."""
    f = plan.factors
    share = round(20 * plan.host_bytes / max(1, hardware.host_budget))
    return (plan.pp, plan.tp, plan.pp_chunks, plan.sp, plan.ring, -plan.micro_batch,
            plan.os_place != "gpu", share, f.p, f.g, f.os, plan.os_layout != "intra",
            plan.recompute != "none", plan.head_groups, -plan.chunk)


def same_step(plan: Plan) -> tuple:
    """Return what is equal of plans that do the same under other names: layers of a single chunk
    that keep everything run whole."""
    keep = layers_text(plan).partition(",")[0]
    how = plan.chunk if keep != "all" else ""
    return (*values(plan, DEGREES, "recompute", "chunk").values(), keep, how, plan.step_s)


class Search:
    """All plans in the order of their time, found by ever better bounds of it."""

    def __init__(self, constraints: Constraints, model: ModelConfig, hardware: Hardware):
        self.constraints = constraints
        self.hardware = hardware
        self.est = Estimator(hardware.profile)
        self.start = Plan(model, constraints.dtype, hardware.ranks, hardware.per_node,
                          constraints.seq, optimizer=constraints.optimizer)
        self.errors: list[ValueError] = []

    def best_first(self) -> Iterator[Plan]:
        """Yield plans, fastest first. A heap holds bounds, and how often they were made better."""
        better = (self.with_states, self.with_seconds, self.with_activations)
        order = itertools.count()  # equal bounds: as listed, fewest shards first
        heap = [(shape.token_s, next(order), 0, shape) for shape in self.shapes()]
        heapq.heapify(heap)
        while heap:
            _, _, times, candidate = heapq.heappop(heap)
            if times == len(better):
                yield candidate
                continue
            try:
                for plan in better[times](candidate):
                    heapq.heappush(heap, (plan.token_s, next(order), times + 1, plan))
            except TooLarge as e:
                self.errors.append(e)

    def choose(self, degrees: tuple[Degree, ...], plan: Plan) -> Iterator[Plan]:
        """Yield the plan with all that the degrees may choose."""
        if not degrees:
            yield plan
            return
        degree, *others = degrees
        try:
            legal = degree.legal(self.constraints, self.hardware, plan)
        except ValueError as e:
            self.errors.append(e)
            return
        for chosen in legal:
            yield from self.choose(others, replace(plan, **dict(zip(degree.names, chosen))))

    def choose_shape(self) -> Iterator[Plan]:
        """Yield plans without states and costs."""
        c = self.constraints
        overlap = tuple(c.overlap.split(",")) if c.overlap != "none" else ()
        for shape in self.choose(SHAPE, replace(self.start, overlap=overlap)):
            yield replace(shape, accumulates=shape.micro_batches > 1)

    def shapes(self) -> Iterator[Plan]:
        """Yield plans without states, with the seconds of their computation alone; not those that
        one with another ring, and else alike, beats in each pass of a layer and in memory (by more
        than a tie, or with a smaller ring)."""
        alike: dict[tuple, list[Plan]] = {}
        for shape in self.choose_shape():
            shape = replace(shape, seconds=computation_seconds(self.est, shape))
            key = tuple(values(shape, SHAPE, "ring", "head_groups").values())
            alike.setdefault(key, []).append(shape)
        for shapes in alike.values():
            if len({shape.ring for shape in shapes}) == 1:
                yield from shapes
                continue
            prices = [self.prices(shape) for shape in shapes]
            for shape, price in zip(shapes, prices):
                if not any(all(map(operator.le, others, price))
                           and (other.ring < shape.ring or other.ring > shape.ring
                                and (1 + TIE) * other.step_s < shape.step_s)
                           for other, others in zip(shapes, prices)):
                    yield shape

    def prices(self, shape: Plan) -> tuple[float, ...]:
        """Return what a step with these shapes needs at least: seconds of a layer's passes, and of
        what may run again, and bytes beside states and what layers keep."""
        layer = layer_seconds(self.est, shape)
        kept = None
        if shape.recompute == "auto":
            n = max(shape.parts)
            kept = ActivationPlan(n, shape.chunks, n)
        plan = replace(shape, activations=kept)
        working = Memory({}, layer_peaks(plan) | {"head and loss": loss_peak(plan)}).total()
        return layer.forward, layer.backward, layer.attention, working

    def with_states(self, shape: Plan) -> Iterator[Plan]:
        """Yield the plans of a shape, with the seconds that they take at least."""
        for plan in self.choose(STATES, shape):
            yield plan

    def with_seconds(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with the seconds of a step whose layers lose the least that memory allows.
        Raises TooLarge."""
        yield replace(plan, seconds=step_seconds(self.est, plan, self.least_lost(plan)))

    def least_lost(self, plan: Plan) -> float:
        """Return seconds of a micro-batch that are recomputed at least. Raises TooLarge if there is
        not even room for all but what layers keep."""
        if plan.recompute != "auto":
            self.fit(plan)
            return 0.0
        everything = self.keeping_all(plan)
        sizes = layer_sizes(self.est, plan)
        return least_lost(everything.activations.layers, sizes, sum(self.rooms(everything)))

    def rooms(self, plan: Plan) -> tuple[float, float]:
        """Return the bytes of a GPU and of its host that there are for what one micro-batch's way
        through a part keeps, on the stage that has least. Raises TooLarge."""
        host = self.host_left(plan)
        budget = self.hardware.gpu_budget
        if plan.pp == 1:
            return budget - plan.memory.beside_activations(), host
        stages = memory_of_stages(plan)
        times = {stage: in_flight(plan, stage) / plan.activations.layers for stage in stages}
        gpu = min((budget - memory.beside_activations()) / times[stage]
                  for stage, memory in stages.items())
        return gpu, host / max(times.values())

    def with_activations(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with what its layers keep, its bytes and its seconds. Raises TooLarge."""
        plan, lost = self.fit(plan)
        if any(lost):
            plan = replace(plan, seconds=step_seconds(self.est, plan, *lost))
        yield plan

    def fit(self, plan: Plan) -> tuple[Plan, tuple[float, float]]:
        """Return the plan with what its layers keep and its bytes; and the seconds of a micro-batch
        that are lost to recomputation and to copies. Raises TooLarge."""
        if plan.recompute == "auto":
            return self.fit_chunks(plan)
        plan = with_memory(plan)
        self.check_memory(plan, plan.memory)
        return plan, (0.0, 0.0)

    def has_shape(self) -> bool:
        """Return whether columns and stages leave factors and ways to share a sequence."""
        tensor, pipeline, sequences, *_ = SHAPE
        states, *_ = STATES
        return any(all(any(self.choose((degree,), cut)) for degree in (states, sequences))
                   for cut in self.choose((tensor, pipeline), self.start))

    def check_memory(self, plan: Plan, memory: Memory) -> None:
        """Raise TooLarge, with numbers and what to change, if a GPU has less memory than that, or
        the host less than its optimizer states take. What both lack adds up: else a plan that lacks
        much of the one would seem nearer to fitting than one that lacks a little of the other."""
        room = self.hardware.gpu_budget
        over = max(0.0, memory.total() - room)
        try:
            self.host_left(plan)
        except TooLarge as e:
            more = f"; and a GPU lacks {over / GIB:.0f} GiB" if over else ""
            raise TooLarge(f"{e}{more}", e.over + over) from None
        if not over:
            return
        c = self.constraints
        f = plan.factors
        beside = " beside activations" if plan.activations else ""
        instead = "--recompute full, " if c.recompute == "none" else ""
        instead += "--os-place host, " if c.os_place == "gpu" else ""
        kept = memory.lasting.get("activations", 0)
        terms = in_gib(memory) + (f", activations {kept / GIB:.1f}" if kept else "")
        raise TooLarge(
            f"a step needs {memory.total() / GIB:.0f} GiB a GPU{beside} even with p={f.p} g={f.g} "
            f"os={f.os}, there is room for {room / GIB:.0f} ({terms}); more ranks, {instead}a "
            "shorter --seq, a smaller --micro-batch or --model", over)

    def host_left(self, plan: Plan) -> float:
        """Return the bytes of host memory beside optimizer states. Raises TooLarge."""
        states = plan.host.get("optimizer", 0.0)
        left = self.hardware.host_budget - states
        if left < 0:
            f = plan.factors
            raise TooLarge(f"optimizer states on the host with p={f.p} g={f.g} os={f.os} are "
                           f"{states / GIB:.1f} GiB a rank, there is room for "
                           f"{self.hardware.host_budget / GIB:.1f}; more ranks, a larger --os or "
                           "--host-memory, or a smaller --model", -left)
        return left

    def keeping_all(self, plan: Plan) -> Plan:
        """Return a plan in chunks that keep everything, with its bytes. Raises TooLarge if they do
        not even fit without what layers keep."""
        hardware = self.hardware
        n = max(plan.parts)
        kept = ActivationPlan(n, plan.chunks, n, n * plan.chunks)
        plan = with_memory(replace(plan, activations=kept))
        without = Memory(plan.memory.lasting | {"activations": 0.0}, plan.memory.peaks)
        try:
            self.check_memory(plan, without)
        except TooLarge as e:  # layers find no room, either
            x, attn, _ = layer_bytes(plan.model, plan.tokens, plan.dtype)
            e.over += max(0.0, n * (x + attn) - hardware.host_budget)
            raise
        return plan

    def fit_chunks(self, plan: Plan) -> tuple[Plan, tuple[float, float]]:
        """Return the plan with the solution of plan_activations, and what it loses."""
        c = self.constraints
        everything = self.keeping_all(plan)
        by_hand = c.alpha is not None or c.resident_layers
        budget = self.hardware.gpu_budget
        sizes = layer_sizes(self.est, plan)
        host_rate = self.est.profile.to_host
        busy = link_seconds(self.est, plan)
        if c.recompute == "full":  # all layers keep x alone
            n = max(plan.parts)
            kept = ActivationPlan(n, plan.chunks, n, layers_recomputing_attention=n)
            plan = with_memory(replace(plan, activations=kept))
            self.check_memory(plan, plan.memory)
            return plan, lost_seconds(kept, sizes, host_rate, busy)
        if everything.memory.total() <= budget and not by_hand:
            return everything, (0.0, 0.0)
        gpu, host = self.rooms(everything)
        others = everything.memory.beside_activations()
        asked = everything.activations
        for _ in range(3):
            try:
                activations, _ = plan_activations(
                    asked.layers, sizes, asked.chunks, host_rate, gpu, host, c.resident_layers,
                    c.alpha, busy)
            except TooLarge as e:
                f = plan.factors
                raise TooLarge(
                    f"--seq {c.seq} with sp={sp_text(plan)} p={f.p} g={f.g} os={f.os}: {e} (of "
                    f"{budget / GIB:.0f} GiB a GPU {others / GIB:.1f} are for all else: "
                    f"{in_gib(everything.memory)})", e.over) from e
            plan = with_memory(replace(plan, activations=activations))
            if plan.memory.total() <= budget:
                break
            # the last layer is not kept whole, so its backward needs q, k, v
            kept = replace(activations, kept_chunks=0)
            again = with_memory(replace(plan, activations=kept))
            others = again.memory.beside_activations()
            gpu, _ = self.rooms(again)
        assert plan.memory.total() <= budget + 1, plan
        return plan, lost_seconds(activations, sizes, host_rate, busy)

    def fits(self) -> bool:
        """Return whether there is a plan, however slow."""
        for shape in self.choose_shape():
            for plan in self.choose((STATES[0], STATES[-1]), shape):  # layouts need the same
                with contextlib.suppress(TooLarge):
                    self.fit(plan)
                    return True
        return False

    def why_not(self) -> ValueError:
        """Return the reason of the plan that is nearest to fitting, once nothing was found."""
        too_large = [e for e in self.errors if isinstance(e, TooLarge)]
        return min(too_large, key=lambda e: e.over) if too_large else self.errors[-1]


def link_seconds(est: Estimator, plan: Plan) -> float:
    """Return seconds of a layer's forward, in the mean, in which optimizer states take the link to
    the host."""
    if plan.os_place == "gpu":
        return 0.0
    stage = slowest_stage(plan)
    layers = stage_layers(plan, stage)
    layer = unit_seconds(est, plan, plan.matrices)["host_update"]
    end = unit_seconds(est, plan, ((plan.model.vocab, plan.model.dim),))["host_update"]
    visits = layers * layer + stage_ends(plan, stage) * end
    return visits / layers / plan.micro_batches


def layer_sizes(est: Estimator, plan: Plan) -> Sizes:
    """Return the bytes and the seconds of a layer, by a profile."""
    layer = layer_seconds(est, plan)
    return Sizes(*column_bytes(plan), layer.forward, layer.recompute, layer.attention, layer.post)


def predict(plan: Plan, profile: Profile) -> Plan:
    """Return a plan, what its layers keep included, with its bytes and seconds."""
    est = Estimator(profile)
    lost = (0.0, 0.0)
    if plan.activations is not None:
        lost = lost_seconds(plan.activations, layer_sizes(est, plan), profile.to_host,
                            link_seconds(est, plan))
    return replace(with_memory(plan), seconds=step_seconds(est, plan, *lost))


def with_memory(plan: Plan) -> Plan:
    """Return the plan with its bytes counted: on the GPU those of the stage that needs most."""
    stages = memory_of_stages(plan)
    kept = plan.activations
    host = {}
    if kept:
        times = max(in_flight(plan, stage) for stage in stages) / kept.layers
        host["activations"] = times * host_bytes(kept, column_bytes(plan))
    if plan.os_place == "host":
        on_gpu = replace(plan, os_place="gpu")
        host["optimizer"] = max(factor_bytes(on_gpu, stage)["optimizer"] for stage in stages)
    return replace(plan, memory=max(stages.values(), key=Memory.total), host=host)


def memory_of_stages(plan: Plan) -> dict[int, Memory]:
    """Return the bytes of the stages of which one needs the most."""
    found = {}
    for stage in fullest_stages(plan):
        lasting: dict[str, float] = {}
        for degree in reversed(DEGREES):
            lasting |= degree.bytes(plan, stage)
        peaks = {"head and loss": loss_peak(plan)} if stage == plan.pp - 1 else {}
        found[stage] = Memory(lasting, peaks | layer_peaks(plan))
    return found


def in_gib(memory: Memory) -> str:
    terms = memory.lasting | {"working": memory.working()}
    return ", ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items()
                     if value and name != "activations")


# ---------------------------------------------------------------------------- what to say


def figures(plan: Plan, hardware: Hardware) -> dict:
    """Return a plan as --json prints it."""
    f = plan.factors
    kept = plan.activations
    tgs = plan.batch * plan.seq / plan.step_s / plan.ranks
    peak = hardware.profile.peak_flops
    causal, full = (peak and flops * tgs / peak for flops in flops_per_token(plan.model, plan.seq))

    return {"dp": plan.dp, "sp": plan.sp, "ring": plan.ring, "tp": plan.tp,
            "tp_mode": plan.tp_mode if plan.tp > 1 else None, "pp": plan.pp,
            "pp_chunks": plan.pp_chunks, "p": f.p, "g": f.g, "os": f.os,
            "os_layout": plan.os_layout,
            "os_place": plan.os_place, "micro_batch": plan.micro_batch, "recompute": plan.recompute,
            "alpha": kept.alpha if kept else None,
            "resident_layers": kept.resident if kept else None, "chunk": plan.chunk,
            "head_groups": plan.head_groups, "step_s": plan.step_s, "tgs": tgs,
            "mfu_causal": causal, "mfu_full": full, "gpu_gib": plan.memory.total() / GIB,
            "host_gib": plan.host_bytes * plan.per_node / GIB}


def table(rows: list[dict[str, str]]) -> str:
    """Return numbered rows as lines, in columns by name; - where a row lacks one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [["", *names]]
    cells += [[f"{i}", *(row.get(name, "-") for name in names)] for i, row in enumerate(rows, 1)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()
                     for row in cells)


def shards_text(plan: Plan) -> str:
    """Return p, g, os, and how and where optimizer states lie."""
    f = plan.factors
    place = ", os on the host" if plan.os_place == "host" else ""
    return f"{f.p},{f.g},{f.os} {plan.os_layout}{place}"


def layers_text(plan: Plan) -> str:
    """Return what layers keep, in a few words."""
    kept = plan.activations
    if kept is None:
        return "all"
    if kept.resident == kept.layers and kept.kept_chunks == kept.layers * kept.chunks:
        return f"all, chunks of {plan.chunk:,}"
    twice = kept.layers_recomputing_attention
    return (f"k={kept.resident} alpha={kept.alpha:.2f}, chunks of {plan.chunk:,}"
            + (f", inputs of one in {kept.stride}" if kept.stride > 1 else "")
            + (f", attention twice in {twice}" if twice else ""))


def describe_plans(plans: list[Plan], hardware: Hardware) -> str:
    """Return tables for people: the choices and what they reach, the seconds, the bytes."""
    rows = []
    for plan in plans:
        found = figures(plan, hardware)
        mfu = ["-" if found[k] is None else f"{found[k]:.1%}" for k in ("mfu_causal", "mfu_full")]
        row = {"step s": f"{plan.step_s:.4g}", "TGS": f"{found['tgs']:,.0f}",
               "MFU causal": mfu[0], "full": mfu[1]}
        if any(other.tp > 1 for other in plans):
            row["tp"] = tp_text(plan)
        if any(other.pp > 1 for other in plans):
            row["pp"] = pp_text(plan)
        rows.append(row | {
            "dp": f"{plan.dp}", "sp": sp_text(plan), "groups": f"{plan.head_groups}",
            "p,g,os": shards_text(plan),
            "batch": f"{plan.micro_batches}x{plan.micro_batch}", "layers keep": layers_text(plan),
            "GPU GiB": f"{found['gpu_gib']:.1f}", "host GiB a node": f"{found['host_gib']:.1f}"})
    return "\n\n".join([
        table(rows),
        "seconds of a step; of communication what computation does not hide\n"
        + terms_table([plan.seconds for plan in plans], "{:.4g}"),
        "GiB of a GPU\n" + terms_table([memory_terms(plan) for plan in plans], "{:.2f}")])


def memory_terms(plan: Plan) -> dict[str, float]:
    """Return the GiB of a GPU by what they are for, the highest moment's as one."""
    memory = plan.memory
    terms = memory.lasting | {f"working, {memory.highest()}": memory.working()}
    return {name: size / GIB for name, size in terms.items() if size}


def terms_table(plans: list[dict[str, float]], form: str) -> str:
    shown = {name for terms in plans for name, value in terms.items() if value > 5e-5}
    return table([{name: form.format(value) for name, value in terms.items()
                   if value and name in shown} for terms in plans])


def describe_choice(plan: Plan, second: Plan | None, hardware: Hardware) -> str:
    """Return a line for people: what the step is predicted to take, and the second best plan."""
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in plan.seconds.items()
                      if seconds > 1e-3 * plan.step_s)
    text = f"predicted by profile {hardware.profile.name}: {plan.step_s:.4g} s a step: {parts}"
    if second is not None:
        more = second.token_s / plan.token_s - 1
        text += (f"\nsecond best: {difference(plan, second)}: {more:+.2%} predicted"
                 + (" (a tie)" if abs(more) <= TIE else ""))
    return text


def sp_text(plan: Plan) -> str:
    return f"{plan.sp}" if plan.ring == 1 else f"{plan.sp} ring={plan.ring}"


def tp_text(plan: Plan) -> str:
    return "1" if plan.tp == 1 else f"{plan.tp} {plan.tp_mode}"


def pp_text(plan: Plan) -> str:
    """Return stages x parts of each."""
    return f"{plan.pp}x{plan.pp_chunks}" if plan.pp_chunks > 1 else f"{plan.pp}"


def choices(plan: Plan) -> dict[str, str]:
    """Return what a plan chooses, in words; columns and stages where there are several."""
    cut = {"tp": tp_text(plan), "pp": pp_text(plan)}
    return {name: text for name, text in cut.items() if text != "1"} | {
            "sp": sp_text(plan), "p,g,os": shards_text(plan),
            "batch": f"{plan.batch}", "micro-batch": f"{plan.micro_batch}",
            "head groups": f"{plan.head_groups}", "layers keep": layers_text(plan)}


def difference(plan: Plan, other: Plan) -> str:
    """Return the choices of another plan that differ."""
    mine, others = choices(plan), choices(other)
    return ", ".join(f"{name} {others.get(name, 1)}" for name in mine | others
                     if others.get(name) != mine.get(name))


def binding(constraints: Constraints, model: ModelConfig, hardware: Hardware,
            best: Plan) -> str:
    """Return what holds the best plan back, in words: what would shorten the step most if there
    were a thousand times as much of it."""
    plenty = 1000.0

    def faster(**rates: float) -> Hardware:
        profile = hardware.profile
        return replace(hardware, profile=scaled(profile, profile.name, **rates))

    relaxed = {
        "FLOP/s": faster(flops=plenty),
        "GPU memory": replace(hardware, gpu_budget=plenty * hardware.gpu_budget),
        "host memory": replace(hardware, host_budget=plenty * hardware.host_budget),
        "copies to the host": faster(host=plenty), "the network": faster(network=plenty),
        "memory bandwidth": faster(memory=plenty)}
    gains = {}
    for name, there in relaxed.items():
        fastest = next(Search(constraints, model, there).best_first())
        gains[name] = 1 - fastest.token_s / best.token_s
    name = max(gains, key=gains.get)
    gain = gains.pop(name)
    others = ", ".join(f"{other} {value:.1%}" for other, value in gains.items() if value > TIE)
    if gain <= TIE:
        return "nothing: neither FLOP/s, memory nor bandwidths would shorten the step"
    return (f"{name}: with no limit to it a step would take {gain:.1%} less"
            + (f" (then {others})" if others else ""))


def of_one_sequence(constraints: Constraints, hardware: Hardware, seq: int) -> Constraints:
    """Return the constraints of a step of one sequence over all ranks, whose layers run in chunks.
    """
    return replace(constraints, seq=seq, batch=1, tp=1, pp=1, sp=hardware.ranks,
                               layers_run="auto")


def longest(constraints: Constraints, model: ModelConfig, hardware: Hardware) -> int:
    """Return the most tokens of one sequence over all ranks that fit, in steps of 16K a rank; 0 if
    not even one step does."""
    step = hardware.ranks * 2**14

    def too_long(count: int) -> bool:
        asked = of_one_sequence(constraints, hardware, count * step)
        return not Search(asked, model, hardware).fits()

    bad = 1
    while not too_long(bad):
        bad *= 2
    return step * (least(too_long, bad // 2 + 1, bad) - 1)


def least(works: Callable[[int], bool], low: int, high: int) -> int:
    """Return the smallest number from low on that works; high, if none below it does."""
    return low + bisect.bisect_left(range(low, high), True, key=works)


def changes_that_fit(constraints: Constraints, model: ModelConfig,
                     hardware: Hardware) -> list[str]:
    """Return changes with which there is a plan, in words, the smallest first: fewer tokens, more
    memory of the host or of a GPU, more GPUs."""
    def fits(seq: int = constraints.seq, **changes) -> bool:
        usual = constraints.default_batch * constraints.seq // seq
        asked = replace(constraints, seq=seq, default_batch=usual)
        return Search(asked, model, replace(hardware, **changes)).fits()

    found = []
    unit = math.lcm(1024, hardware.ranks) if constraints.seq > 2**14 else 64
    most = constraints.seq // unit - 1
    if most > 0 and fits(seq=constraints.seq - most * unit):
        fewer = least(lambda n: fits(seq=constraints.seq - n * unit), 1, most)
        seq = constraints.seq - fewer * unit
        found.append((constraints.seq / seq, f"--seq {seq} instead of {constraints.seq}"))
    node = hardware.host_budget * hardware.per_node / GIB
    for name, field, there in (("host memory a node", "host_budget", node),
                               ("memory a GPU", "gpu_budget", hardware.gpu_budget / GIB)):
        of_one = getattr(hardware, field) / there
        most = math.ceil(16 * there)
        if fits(**{field: most * of_one}):
            gib = least(lambda n: fits(**{field: n * of_one}), math.ceil(there), most)
            found.append((gib / there, f"{gib} GiB of {name} to plan with instead of {there:.0f}"))
    for times in (2, 4, 8, 16, 32):
        more = times * hardware.ranks
        per_node = min(more, max(hardware.per_node, hardware.profile.per_node))
        of_one = hardware.host_budget * hardware.per_node / per_node  # they share their nodes'
        if fits(ranks=more, per_node=per_node, host_budget=of_one):
            found.append((times, f"{more} GPUs instead of {hardware.ranks}"))
            break
    return [text for _, text in sorted(found)]


# ---------------------------------------------------------------------------- the program


def main(argv: list[str] | None = None) -> int:
    """Print the best plans of a command. Returns the exit status: 1 if nothing fits."""
    import train  # whose flags these are: the one import that points upward, for the program alone

    parser = train.make_parser("Which factors? Print the best plans of train.py's flags for a "
                               "cluster, on any machine.")
    parser.add_argument("--cluster", default="h200x8", help="profile of the machine: "
                        f"{', '.join(profile_names())}, or a file of bench.py --profile (default: "
                        "%(default)s)")
    parser.add_argument("--top", type=int, default=10, help="plans to print (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print them as JSON, and nothing else")
    parser.add_argument("--leaf", default="", help="nodes under a leaf switch, or a file with a "
                        "node's and its leaf's name a line: print the best order of nodes")
    args = parser.parse_args(argv)
    try:
        if args.top < 1:
            raise ValueError(f"--top {args.top}: from 1")
        constraints, model, hardware = asked(args)
        if args.leaf:
            parse_leaf(args.leaf, hardware.ranks // hardware.per_node)  # refused before it is used
        plans = plan(constraints, model, hardware, args.top)
        if args.leaf and plans[0].tp * plans[0].pp > 1:
            raise ValueError(f"--leaf {args.leaf}: places nodes of --tp 1 --pp 1, and the best "
                             f"plan has --tp {plans[0].tp} --pp {plans[0].pp}")
    except TooLarge as e:
        changes = changes_that_fit(constraints, model, hardware)
        if args.json:
            print(json.dumps({"plans": [], "binding": "; ".join([str(e), *changes])}))
        else:
            print(f"nothing fits: {e}\nwhat would fit, the smallest change first:",
                  *(changes or ["none of fewer tokens, more memory, more GPUs"]), sep="\n  ")
        return 1
    except ValueError as e:
        parser.error(str(e))
    held = binding(constraints, model, hardware, plans[0])
    if args.json:
        found = [figures(p, hardware) for p in plans]
        print(json.dumps({"plans": found, "binding": held}))
        return 0
    print(describe(hardware, plans, held))
    if args.leaf:
        print(place(plans[0], args.leaf))
    return 0


def place(plan: Plan, leaf: str) -> str:
    """Return the order of nodes that sends the fewest bytes across the spine, in words. Raises
    ValueError."""
    names, leaves = parse_leaf(leaf, plan.ranks // plan.per_node)
    model = plan.model
    # q, k, v, o, and twice as much in backward
    width = 2 * (model.heads + model.kv_heads) * model.head_dim
    e = plan.dtype.itemsize
    exchanged = 3 * width * plan.tokens * e * model.layers * plan.micro_batches
    rings = make_rings(
        plan.ranks, plan.factors, plan.os_layout, plan.micro_batches,
        param_count(model) * e, param_count(model) * e,
        plan.head_ranks, exchanged)
    if plan.ring > 1:
        rings.append(Ring("ring", plan.sp, plan.head_ranks, ring_traffic(plan)))
    return place_nodes(leaves, rings, plan.per_node).describe(names)


def asked(args) -> tuple[Constraints, ModelConfig, Hardware]:
    """Return what a command asks for. Raises ValueError."""
    import train

    flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(train.Config)}
    # of a GPU by its name, nodes of 8
    named = find_sheet(args.cluster) and not args.cluster.endswith(".json")
    per_node = 8 if named else load_profile(args.cluster).per_node
    cfg, model = train.planned_flags(train.Config(**flags), per_node)
    profile = load_profile(args.cluster, cfg.per_node)
    hardware = Hardware(
        cfg.ranks, cfg.per_node, profile,
        GPU_SHARE * min(profile.gpu_bytes, cfg.gpu_memory or profile.gpu_bytes),
        (cfg.host_memory or profile.host_bytes * 7 // 8) / max(1, min(cfg.per_node, cfg.ranks)))
    constraints = constraints_of(cfg, train.DTYPES[cfg.dtype], train.usual_batch(cfg))
    check(constraints, model, cfg.ranks, cfg.per_node)
    return constraints, model, hardware


def describe(hardware: Hardware, plans: list[Plan], held: str) -> str:
    """Return what a command prints: the question, the plans, ties, what binds, what was guessed."""
    profile = hardware.profile
    best = plans[0]
    est = Estimator(profile)
    for candidate in plans:
        step_seconds(est, candidate)  # which notes what lies outside the profile's points
    ties = sum(p.token_s <= (1 + TIE) * best.token_s for p in plans) - 1
    lines = [f"{param_count(best.model) / 1e9:.2f} billion parameters, {best.seq:,} tokens a "
             f"sequence, {best.batch} sequences a step, {hardware.ranks} GPUs, "
             f"{hardware.per_node} a node; {hardware.gpu_budget / GIB:.0f} GiB of a GPU, "
             f"{hardware.host_budget * hardware.per_node / GIB:.0f} of a node's host memory to "
             "plan with",
             f"profile {profile.name}: {profile.device}, "
             f"{profile.sources.get('all', 'see its file')}",
             "", describe_plans(plans, hardware), ""]
    if ties > 0:
        lines.append(f"{ties} of these tie with the first within {TIE:.1%}; it has the fewest "
                     "ranks a sequence and a ring, then the largest micro-batch, states on the "
                     "GPU, the least host memory, the fewest shards")
    if est.held:
        lines.append("not in the profile: " + "; ".join(sorted(est.held)))
    return "\n".join(lines + [f"what binds: {held}"])


if __name__ == "__main__":
    from planner import main as planner_main  # the module that train imports, not a second copy

    sys.exit(planner_main())
