"""What does a plan cost? Bytes and seconds of a step on one rank, from the profile of a machine.

Bytes are named terms: those that shard.py, offload.py and model.py really allocate. Seconds come in
three stages,

    operations   FLOPs / rate(shape), bytes / bandwidth(operation, bytes, mesh): Estimator
    layers       products, attention with its all-to-alls, element-wise parts: layer_seconds
    step         a StepTimeline, on which compute and communication run beside each other as
                 shard.py launches them and waits for them, and slow each other down

and no number is fitted to whole steps: they follow from a Profile (hardware.py).

Of a pipeline the bytes are those of the stage that needs most, and the seconds those of the stage
with most layers, which runs its M micro-batches one after the other and waits for the others:

    step = a stage's timeline + idle + messages

where it is idle (`pipeline_seconds`) before its first pass and after its last. Of T columns of a
layer (tensor modes) one has H/T, K/T heads and F/T: `column_model`, which counts and times it as
any other model; what the columns exchange is added. With e bytes an element and N tokens of all
columns

    mode   a layer's forward            its backward             x, h that are kept
    mtp    2 all-reduces (N, C)         the same                 N tokens
    msp    2 all-gathers of N, 2        the same                 N
           reduce-scatters
    fsp    as msp                       and 2 all-gathers more   N/T

Left out: ranks that wait for a slower one, the first step's compilation, gathers of weights that
the host still updates or that inputs which are made again need, and of a forker's other block
whatever its matrices do not say (element-wise parts are counted as model.Block's); of pipelines
that parts alternate (a stage's layers are gathered as if a micro-batch ran through all of them),
and that the rounding buffers of what is swapped are not needed once a micro-batch in flight, as
they are counted.

Legend: N tokens on a rank at once (of all its columns), L layers, M micro-batches a step, C width,
H query heads, K key/value heads, D head width, F feed-forward width, V vocabulary; p, g, os shards;
mesh (GPUs in a node, nodes) of a group of ranks; of pipelines P stages, V parts of the model on
one.
"""
import functools
import heapq
import itertools
import math
import operator
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import model as llama
from hardware import Profile, interpolate, interpolate_twice, mesh_name, update_bytes
from model import LOSS_ELEMENTS, ModelConfig, accumulation_dtype, param_count
from offload import GIB, ActivationPlan, block_saves
from parallel import part_layers, pipeline_order
from shard import OPTIMIZERS, STREAMS, VISIT_BUFFERS, VISIT_ELEMENTS, Factors

# ---------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Plan:
    """What is chosen, and what it costs."""

    model: ModelConfig
    dtype: torch.dtype
    ranks: int
    per_node: int  # of them
    seq: int  # tokens of a sequence
    sp: int = 1  # ranks that share one
    ring: int = 1  # of them, by context: each has a part of the tokens; the others share heads
    batch: int = 1  # sequences a step
    micro_batch: int = 1  # sequences that sp ranks run at once
    head_groups: int = 1
    recompute: str = "none"  # auto: layers run in chunks; none: whole
    chunk: int = 0  # tokens, the most that a layer runs at once
    factors: Factors = Factors()
    os_layout: str = "intra"
    os_place: str = "gpu"  # or host: where optimizer states lie
    optimizer: str = "adamw"  # of matrices: a row of shard.OPTIMIZERS
    overlap: tuple[str, ...] = STREAMS
    accumulates: bool = False  # gradients add up in float32
    activations: ActivationPlan | None = None  # of layers in chunks
    memory: "Memory | None" = None
    host: dict[str, float] = field(default_factory=dict)  # bytes of a rank there, by what they are
    seconds: dict[str, float] | None = None  # of a step, by what takes them
    tp: int = 1  # ranks that share a layer's matrices
    tp_mode: str = "msp"
    pp: int = 1  # stages of a pipeline
    pp_chunks: int = 1  # V: parts of the model on a stage

    @property
    def column(self) -> ModelConfig:
        """Return the model whose layers are one column of the model's."""
        return column_model(self.model, self.tp)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Return (rows, cols) of a column's block, in the order of use."""
        return block_matrices(llama.Block, self.column)

    @property
    def accum_bytes(self) -> int:
        """Return the bytes of an element where sums are kept: in float32, or wider."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the layers of each part of the model."""
        return all_parts(self.model.layers, self.pp, self.pp_chunks)

    @property
    def tokens(self) -> int:
        """Return N."""
        return self.micro_batch * self.seq // self.sp

    @property
    def chunks(self) -> int:
        """Return in how many parts of its tokens a layer runs."""
        return -(-self.tokens // self.chunk) if self.recompute == "auto" else 1

    @property
    def state_ranks(self) -> int:
        """Return R, the ranks over which states of a stage and a column are sharded."""
        return self.ranks // (self.tp * self.pp)

    @property
    def in_node(self) -> int:
        """Return how many of these a node has."""
        of_stage = self.per_node if self.pp == 1 else min(self.per_node, self.ranks // self.pp)
        return of_stage // self.tp

    def mesh(self, ranks: int, inner: int = 1) -> tuple[int, int]:
        """Return (GPUs in a node, nodes) of a group of `ranks` neighbours of these; of every
        inner-th of them, if inner > 1."""
        return mesh_of(ranks, inner, self.in_node)

    @property
    def dp(self) -> int:
        """Return how many sequences, or parts of so many, are under way on all ranks."""
        return self.state_ranks // self.sp

    @property
    def head_ranks(self) -> int:
        """Return U, the ranks that share the heads of the same tokens."""
        return self.sp // self.ring

    @property
    def micro_batches(self) -> int:
        """Return M."""
        return self.batch // self.dp // self.micro_batch

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank has its part of tokens alone between products."""
        return self.tp > 1 and self.tp_mode != "mtp"

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def token_s(self) -> float:
        """Return seconds a token of a rank: plans of other batches compare by it."""
        return self.step_s * self.ranks / (self.batch * self.seq)


# ---------------------------------------------------------------------------- stages and columns


def mesh_of(ranks: int, inner: int, per_node: int) -> tuple[int, int]:
    """Return (GPUs in a node, nodes) of every inner-th of `ranks` neighbours."""
    def nodes(n):  # of neighbours; some lie in two where they do not divide a node
        straddle = n < per_node and per_node % n
        return 2 if straddle else -(-n // per_node)

    in_node = ranks // nodes(ranks) // max(1, inner // nodes(inner))
    return max(1, in_node), nodes(ranks) // nodes(inner)


@functools.cache
def column_model(cfg: ModelConfig, tp: int) -> ModelConfig:
    """Return the model whose layers are one of tp columns of the model's."""
    return replace(cfg, heads=cfg.heads // tp, kv_heads=cfg.kv_heads // tp, ffn=cfg.ffn // tp)


@functools.cache
def all_parts(layers: int, stages: int, chunks: int) -> tuple[int, ...]:
    """Return the layers of each part of the model."""
    return tuple(len(part_layers(layers, stages, chunks, part))
                 for part in range(stages * chunks))


def stage_layers(plan: Plan, stage: int) -> int:
    """Return the layers of all parts on a stage."""
    return sum(plan.parts[stage :: plan.pp])


def stage_ends(plan: Plan, stage: int) -> int:
    """Return how many of embedding and head are on a stage."""
    return (stage == 0) + (stage == plan.pp - 1)


def slowest_stage(plan: Plan) -> int:
    """Return the stage of most layers; the last, with the head, if it is one of them."""
    return max(range(plan.pp), key=lambda stage: (stage_layers(plan, stage), stage))


def fullest_stages(plan: Plan) -> set[int]:
    """Return the stages of which one needs the most memory: the first has most in flight, the last
    the head, another may have a layer more."""
    return {0, plan.pp - 1, slowest_stage(plan)}


def stage_params(plan: Plan, stage: int) -> float:
    """Return the parameters of a rank of a stage, before they are sharded."""
    end = plan.model.vocab * plan.model.dim
    layers = param_count(plan.column) - 2 * end
    share = stage_layers(plan, stage) / plan.model.layers
    return layers * share + stage_ends(plan, stage) * end


def in_flight(plan: Plan, stage: int) -> int:
    """Return how many layers' activations wait for their backward on a stage, at the most."""
    if plan.pp == 1:
        return plan.model.layers
    count = min(plan.micro_batches, 3 * plan.pp)  # more than are ever in flight
    return _in_flight(plan.parts[stage :: plan.pp], stage, plan.pp, count)


@functools.cache
def _in_flight(parts: tuple[int, ...], stage: int, stages: int, micro_batches: int) -> int:
    order = pipeline_order(stage, stages, len(parts), micro_batches)
    changes = (parts[one.chunk] if one.forward else -parts[one.chunk] for one in order)
    return max(itertools.accumulate(changes))


# ---------------------------------------------------------------------------- bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of a device, by what they are for."""

    lasting: dict[str, float]  # through a step
    peaks: dict[str, dict[str, float]]  # moment that may be the highest: what lives then, too

    def highest(self) -> str:
        """Return the moment at which most is needed."""
        return max(self.peaks, key=lambda moment: sum(self.peaks[moment].values()))

    def working(self) -> float:
        """Return the bytes that this moment needs beside those that last."""
        return sum(self.peaks[self.highest()].values())

    def total(self) -> float:
        return sum(self.lasting.values()) + self.working()

    def beside_activations(self) -> float:
        """Return the bytes of all but what layers keep."""
        return self.total() - self.lasting["activations"]

    def describe(self) -> str:
        """Return lines for people: the terms of each moment in GiB."""
        def gib(terms: dict[str, float]) -> str:
            return ", ".join(f"{name} {value / GIB:.2f}" for name, value in terms.items() if value)

        lines = [f"memory a device, GiB: {gib(self.lasting)}"]
        for moment, terms in self.peaks.items():
            mark = " (the highest)" if moment == self.highest() else ""
            lines.append(f"  at {moment}{mark}: {sum(terms.values()) / GIB:.2f}: {gib(terms)}")
        return "\n".join(lines + [f"  {self.total() / GIB:.2f} GiB in all"])


def layer_bytes(cfg: ModelConfig, tokens: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return S_input, S_attn and S_others of `tokens` tokens (Memo, section 4.1): x; o and the
    log-sum-exp; what model.Block saves beside them, as it really does: q, k, v, h and gate|up.

    With H = K and F = 8/3 C a layer so keeps 11 1/3 C elements a token (Memo's 16 C less norm(x),
    norm(h) and SwiGLU, which are computed again)."""
    e = dtype.itemsize
    accum_bytes = accumulation_dtype(dtype).itemsize
    heads = cfg.heads * cfg.head_dim
    qkv = (heads + 2 * cfg.kv_heads * cfg.head_dim) * e
    pre, post, _ = block_saves(cfg, tokens, dtype)
    intermediates = tokens * qkv + sum(t.nbytes for t in pre + post)
    return tokens * cfg.dim * e, tokens * (heads * e + cfg.heads * accum_bytes), intermediates


def column_bytes(plan: Plan) -> tuple[float, float, float]:
    """Return layer_bytes of a plan's micro-batch on one rank."""
    x, attn, intermediates = layer_bytes(plan.column, plan.tokens, plan.dtype)
    own = x / plan.tp
    if not plan.splits_tokens:
        return x, attn, intermediates
    if plan.tp_mode == "fsp":  # x and h are own tokens'
        return own, attn, intermediates - x + own
    return x, attn, intermediates


def all_to_all_bytes(cfg: ModelConfig, tokens: int, dtype: torch.dtype, head_ranks: int,
                     head_groups: int) -> int:
    """Return the bytes of all-to-all buffers: q, k, v, o and do of two head groups, dq, dk and dv
    of one (attention.Ulysses). Groups that share a key/value head have one place for it."""
    if head_ranks == 1:
        return 0
    kv_groups = min(head_groups, cfg.kv_heads // head_ranks)
    heads = (3 * min(2, head_groups) + 1) * cfg.heads / head_groups
    heads += (2 * min(2, kv_groups) + 2) * cfg.kv_heads / kv_groups
    return round(tokens * cfg.head_dim * dtype.itemsize * heads)


def sent_bytes(plan: Plan) -> int:
    """Return all_to_all_bytes of a plan."""
    return all_to_all_bytes(plan.column, plan.tokens, plan.dtype, plan.head_ranks,
                            plan.head_groups)


def layer_peaks(plan: Plan) -> dict[str, dict[str, float]]:
    """Return what the last layer's backward needs beside what was kept, at its high moments: in
    attention's backward, and in those of the products before and after it. Where layers run whole,
    or all chunks of that layer stay, its q, k, v are among the activations."""
    kept = plan.activations
    cfg = plan.column
    head_groups = plan.head_groups
    x, q, k, sums = attention_bytes(plan)
    ring, ring_prefetch = ring_bytes(plan)
    first_group = groups = 0
    if plan.head_ranks > 1:  # of two head groups what is sent and received; the first, its buffers
        first_group = (3 * q + 2 * k) / head_groups
        groups = min(2, head_groups) * 2 * (4 * q + 4 * k) / head_groups
    elif head_groups > 1:  # a group's copies, and its gradients
        groups = (4 * q + 4 * k) / head_groups
    # gradients take the places of q, k, v, unless one group's are all there are
    in_place = plan.head_ranks * head_groups > 1 and kept is not None and kept.chunks > 1
    pre = saved_by_pre(plan)
    inputs = q + 2 * k
    element = min(plan.chunk, plan.tokens) * plan.dtype.itemsize  # of a chunk's tokens
    temporaries = element * (8 * cfg.ffn + 6 * cfg.dim)
    if kept is None or kept.kept_chunks >= kept.chunks:
        inputs = 0
    if kept is None:  # gate|up, h and what block.pre saves are among them, too
        temporaries = element * (4 * cfg.ffn + 3 * cfg.dim)
        pre = 0
    gathered = 2 * element * cfg.dim * (plan.tp > 1)  # copies for a sum
    if plan.splits_tokens:  # dy and dx of all tokens; in fsp what the product took, too
        gathered = (3 if plan.tp_mode == "fsp" else 2) * x
        x /= plan.tp
    return {
        "attention's backward": {
            "dy, dx": 2 * x, "q, k, v": inputs, "do": q,
            "dq, dk, dv": 0 if in_place else q + 2 * k, "head groups": groups, "ring": ring,
            "sums of the kernel": 2 * sums / head_groups, "saved by block.pre": pre},
        "block.post's backward": {
            "dy, dx": 2 * x, "q, k, v": inputs, "do": q, "first head group": first_group,
            "ring": ring_prefetch,
            "all-to-all buffers": sent_bytes(plan), "temporaries of a chunk": temporaries,
            "tokens of all columns": gathered, "saved by block.pre": pre}}


def bytes_of_sums(plan: Plan) -> int:
    """Return the bytes of an element of dk, dv on its way around a ring."""
    return plan.dtype.itemsize if plan.ring == 2 else plan.accum_bytes


def ring_bytes(plan: Plan) -> tuple[float, float]:
    """Return what attention.Ring has beside attention's own in backward, at the highest; and of it
    what travels before attention's backward."""
    if plan.ring == 1:
        return 0.0, 0.0
    _, q, k, _ = attention_bytes(plan)
    q, k = q / plan.head_groups, k / plan.head_groups  # a group at a time
    kv = 2 * k
    wide = plan.accum_bytes / plan.dtype.itemsize
    sums = kv * bytes_of_sums(plan) / plan.dtype.itemsize
    arriving = kv if plan.ring == 2 else 2 * kv
    if plan.head_groups > 1:
        arriving += 2 * kv  # the next group's, under way
    if plan.micro_batch > 1:  # of several sequences a part is a copy: of do, q and o, and k, v
        arriving += 1.5 * q + kv / 2
    # k, v of this step and the next; sums of dk, dv, sent and received; dq; a step's dq, dk, dv
    return arriving + 2 * sums + (wide + 1) * q + kv, 2 * kv


def ring_traffic(plan: Plan) -> float:
    """Return the bytes that a rank sends around its ring in a step."""
    _, _, k, _ = attention_bytes(plan)
    of_layer = 2 * k * (2 + bytes_of_sums(plan) / plan.dtype.itemsize)
    return (plan.ring - 1) * of_layer * plan.model.layers * plan.micro_batches


def attention_bytes(plan: Plan) -> tuple[int, int, int, int]:
    """Return the bytes of x; of q, o or do; of k or v; and of the kernel's sums, in float32."""
    cfg = plan.column
    token = plan.tokens * plan.dtype.itemsize
    q = token * cfg.heads * cfg.head_dim
    k = token * cfg.kv_heads * cfg.head_dim
    summed = cfg.heads if cfg.heads == cfg.kv_heads else cfg.heads + 2 * cfg.kv_heads
    return token * cfg.dim, q, k, plan.tokens * cfg.head_dim * 4 * summed


def saved_by_pre(plan: Plan) -> int:
    """Return the bytes that block.pre saves beside q, k, v."""
    pre, _, _ = block_saves(plan.column, plan.tokens, plan.dtype)
    return sum(t.nbytes for t in pre)


def loss_peak(plan: Plan) -> dict[str, float]:
    """Return what head and loss need beside what layers keep."""
    cfg = plan.model
    tokens = plan.tokens // (plan.tp if plan.splits_tokens else 1)
    return {"logits": 2 * plan.accum_bytes * min(LOSS_ELEMENTS, tokens * cfg.vocab),
            "gradient of the head": plan.accum_bytes * cfg.vocab * cfg.dim,
            "x, norm, dx": 3 * tokens * cfg.dim * plan.dtype.itemsize,
            "all-to-all buffers": sent_bytes(plan)}


def message_bytes(plan: Plan, stage: int = 0) -> dict[str, float]:
    """Return what a stage of a pipeline needs beside its layers' activations: messages, sent and
    received, forward and back."""
    if plan.pp == 1:
        return {}
    messages = 4 * plan.tokens * plan.model.dim * plan.dtype.itemsize
    if plan.splits_tokens:
        messages /= plan.tp
    return {"messages": messages}


def weight_buffer_bytes(plan: Plan, stage: int = 0) -> dict[str, float]:
    """Return the bytes of the buffers for gathered weights and whole gradients: one each for the
    embedding and the head, as far as the stage has them, two for each matrix of a layer
    (shard.States)."""
    cfg = plan.column
    f = plan.factors
    e = plan.dtype.itemsize
    end = cfg.vocab * cfg.dim
    ends = stage_ends(plan, stage) * end
    layers = 2 * (param_count(cfg) - 2 * end) / cfg.layers
    in_chunks = plan.activations is not None and plan.activations.chunks > 1
    # chunks' gradients, in float32
    adds_up = in_chunks and not plan.accumulates and e < plan.accum_bytes
    gradients = ends * e if f.g > 1 else 0
    if f.g > 1 or adds_up:
        gradients += layers * (plan.accum_bytes if in_chunks else e)
    return {"gathered weights": (layers + ends) * e if f.p > 1 else 0,
            "whole gradients": gradients}


def kept_parts(plan: ActivationPlan) -> tuple:
    """Return how many of the resident layers keep x, and o, and how many of those that leave. Also
    of many plans at once, whose numbers are arrays."""
    away = plan.layers - plan.resident
    dropped = plan.layers_recomputing_attention
    inputs_away = away // plan.stride  # groups leave as wholes
    inputs = -(-plan.layers // plan.stride) - inputs_away
    outputs = np.minimum(plan.resident, plan.layers - dropped)
    return inputs, outputs, inputs_away, np.maximum(0, away - dropped)


def rounding_bytes(plan: ActivationPlan, layer: tuple[int, int, int]) -> float:
    """Return the bytes of two rounding buffers; layer: layer_bytes. Also of many plans."""
    x, attn, intermediates = layer
    _, _, groups, outputs = kept_parts(plan)
    swapped = plan.most_swapped_chunks() if plan.swapped_chunks else 0
    # a group keeps most if it is the last that leaves
    largest = x + np.minimum(plan.stride, outputs) * attn
    return 2 * (groups > 0) * (largest + swapped * intermediates / plan.chunks)


def resident_bytes(plan: ActivationPlan, layer: tuple[int, int, int]) -> float:
    """Return the most bytes of a rank that hold what layers keep: in resident layers, in two
    rounding buffers, and what backward makes again of a group of layers. Also of many plans."""
    x, attn, intermediates = layer
    n, m = plan.layers, plan.stride
    away = n - plan.resident
    dropped = plan.layers_recomputing_attention

    def entering(g):
        """Bytes as backward enters group g: what the layers behind it kept is gone."""
        first = g * m
        end = np.minimum(n, first + m)
        inputs = -(-np.maximum(0, end - away) // m)
        outputs = np.maximum(0, end - np.maximum(away, dropped))
        again = (end - first - 1) * x + np.clip(dropped - first, 0, end - first) * attn
        return inputs * x + outputs * attn + again

    # bytes grow from group to group, but for the last, of fewer layers, and from the last that drop
    # o to those that do not
    kept = entering((n - 1) // m) + plan.kept_chunks * intermediates / plan.chunks
    last_dropping = np.maximum(0, dropped - 1) // m
    for g in (n // m - 1, last_dropping, last_dropping - 1):
        kept = np.maximum(kept, entering(np.maximum(0, g)))
    return kept + rounding_bytes(plan, layer)


def host_bytes(plan: ActivationPlan, layer: tuple[int, int, int]) -> float:
    """Return the bytes of a rank for the host buffers of the layers that are swapped. Also of many
    plans."""
    x, attn, intermediates = layer
    _, _, inputs, outputs = kept_parts(plan)
    return inputs * x + outputs * attn + plan.swapped_chunks * intermediates / plan.chunks


def imbalance(plan: Plan, stage: int) -> float:
    """Return the largest share of a stage's whole matrices among their owners over the mean, as
    shard.States.assign_owners gives them out (layout inter)."""
    owners = plan.factors.os // plan.factors.p
    return _imbalance(plan.column, owners, stage_layers(plan, stage), stage_ends(plan, stage))


@functools.cache
def _imbalance(cfg: ModelConfig, owners: int, layers: int, num_ends: int) -> float:
    sizes = [rows * cols for rows, cols in block_matrices(llama.Block, cfg)] * layers
    sizes += [cfg.vocab * cfg.dim] * num_ends
    loads = [0] * owners
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads) * owners / sum(loads)


def visit_bytes(plan: Plan, stage: int = 0) -> dict[str, float]:
    """Return the bytes of the buffers in which optimizer states visit the GPU, if they lie on the
    host."""
    if plan.os_place == "gpu":
        return {}
    sizes = [rows * cols for rows, cols in block_matrices(llama.Block, plan.column)]
    largest = max(*sizes, plan.model.vocab * plan.model.dim)
    largest /= plan.factors.p if plan.os_layout == "inter" else plan.factors.os
    optimizer = OPTIMIZERS[plan.optimizer]
    if not optimizer.whole:
        largest = min(largest, VISIT_ELEMENTS)
    count = VISIT_BUFFERS * len(optimizer.states)
    return {"visiting states": count * plan.accum_bytes * largest}


def state_bytes(params: int, f: Factors, dtype: torch.dtype, accumulates: bool,
                optimizer: str = "adamw") -> dict[str, float]:
    """Return the bytes of states of a rank (AMSP, section IV); `accumulates`: several micro-batches
    add up, in float32."""
    e = dtype.itemsize
    accum_bytes = accumulation_dtype(dtype).itemsize
    return {"parameters": e * params / f.p,
            "gradients": (accum_bytes if accumulates else e) * params / f.g,
            "optimizer": len(OPTIMIZERS[optimizer].states) * accum_bytes * params / f.os}


# ---------------------------------------------------------------------------- seconds of operations


class Estimator:
    """Seconds of operations on a machine."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.held: set[str] = set()  # what lies outside the profile's points, in words
        self.cache: dict[tuple, object] = {}  # what has been computed, by what it depends on
        self.product = functools.cache(self.product)
        self.collective = functools.cache(self.collective)

    def product(self, kind: str, tokens: float, rows: int, cols: int) -> float:
        """Return seconds of a product of (tokens, cols) and a matrix (rows, cols)."""
        rate = interpolate_twice(self.profile.products[kind], tokens, math.sqrt(rows * cols))
        return 2 * tokens * rows * cols / rate

    def moved(self, plan: Plan, elements: float) -> float:
        """Return seconds of an element-wise kernel that reads and writes so many elements."""
        return elements * plan.dtype.itemsize / self.profile.memory

    def attention(self, kind: str, cfg: ModelConfig, tokens: int, seq: int, ring: int = 1) -> float:
        """Return seconds of the kernel for a rank's share of sequences, all heads of `tokens`;
        ring: at the rate of a square of so many parts of the sequence."""
        flops = 2 * cfg.heads * cfg.head_dim * seq * tokens
        if kind == "backward":
            flops *= 2.5
        return flops / interpolate(self.profile.attention[kind], seq / ring)

    def collective(self, op: str, size: float, mesh: tuple[int, int]) -> float:
        """Return seconds of a collective on so many bytes (AMSP, section IV): t = bytes /
        bandwidth(op, bytes, mesh). Between measured numbers of nodes the bandwidth is interpolated,
        for GPUs of a node the nearest is taken, and outside it is held."""
        if mesh == (1, 1) or not size:
            return 0.0
        return size / self.bandwidth(op, size, mesh)

    def bandwidth(self, op: str, size: float, mesh: tuple[int, int]) -> float:
        tables = {tuple(map(int, name.split("x"))): points
                  for name, points in self.profile.collectives[op].items()}
        if not tables:
            raise ValueError(f"profile {self.profile.name}: measured on one rank, it has no rates "
                             f"of {op}; --ranks 1, or another --cluster")
        across = mesh[1] > 1
        alike = [g_n for g_n in tables if (g_n[1] > 1) == across] or list(tables)
        in_node = min((g for g, _ in alike), key=lambda g: abs(math.log(g / mesh[0])))
        by_nodes = sorted([n, interpolate(tables[g, n], size)] for g, n in alike if g == in_node)
        if in_node != mesh[0] or not by_nodes[0][0] <= mesh[1] <= by_nodes[-1][0]:
            nearest = min(by_nodes, key=lambda point: abs(math.log(point[0] / mesh[1])))[0]
            self.held.add(f"{op} over {mesh_name(mesh)} as over {mesh_name((in_node, nearest))}")
        return interpolate(by_nodes, mesh[1])


@functools.cache
def block_matrices(block_class, cfg: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return (rows, cols) of a block's matrices in the order of use."""
    with torch.device("meta"):
        block = block_class(cfg)
    return tuple(m.shape for m in block.modules() if isinstance(m, llama.Matrix))


# ---------------------------------------------------------------------------- a timeline


class Timeline:
    """Compute, and communication that runs beside it: what stays in a node and what crosses nodes
    take other wires, on each of which the order is that of the launch. While both run, compute
    takes `slow_compute` and communication `slow_other` times as long, so neither is ever hidden for
    free (Galvatron's two coefficients)."""

    def __init__(self, slow_compute: float, slow_other: float):
        self.slow_compute = slow_compute
        self.slow_other = slow_other
        # of jobs [kind, seconds left, if it ran alone]: in a node, across nodes
        self.wires: tuple[deque[list], deque[list]] = (deque(), deque())
        self.now = 0.0
        self.exposed: dict[str, float] = defaultdict(float)  # seconds in which compute waits
        self.slowed = 0.0  # seconds that compute takes longer because something runs beside it

    def launch(self, kind: str, seconds: float, across: bool = False) -> list | None:
        """Begin communication after all that was launched before on its wire. Returns what to wait
        for."""
        if not seconds:
            return None
        job = [kind, seconds]
        self.wires[across].append(job)
        return job

    def pass_time(self, most: float, slow: float) -> float:
        """Let both wires work until one of their jobs is done, for `most` seconds at most; slow:
        their factor. Returns the seconds."""
        working = [wire for wire in self.wires if wire]
        both = min(most, slow * min(wire[0][1] for wire in working))
        self.now += both
        for wire in working:
            wire[0][1] -= both / slow
            if wire[0][1] <= 1e-12:
                wire.popleft()[1] = 0.0
        return both

    def run(self, seconds: float) -> None:
        """Compute."""
        while seconds > 0 and any(self.wires):
            both = self.pass_time(seconds * self.slow_compute, self.slow_other)
            self.slowed += both - both / self.slow_compute
            seconds -= both / self.slow_compute
        self.now += max(0.0, seconds)

    def idle_until(self, when: float, kind: str) -> None:
        """Let compute wait for something else."""
        start = self.now
        while self.now < when and any(self.wires):
            self.pass_time(when - self.now, 1.0)
        self.now = max(self.now, when)
        if self.now > start:
            self.exposed[kind] += self.now - start

    def wait(self, job: list | None) -> None:
        """Let compute wait for a job, and so for all before it on its wire."""
        while job is not None and job[1]:
            wire = self.wires[any(job is other for other in self.wires[1])]
            kind = wire[0][0]
            self.exposed[kind] += self.pass_time(math.inf, 1.0)


# ---------------------------------------------------------------------------- seconds of a layer


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer for a micro-batch, if nothing runs beside it."""

    forward: float
    attention: float  # of it, with its all-to-alls
    backward: tuple[float, ...]  # from one matrix's use to the next, last matrix first
    exchange: float  # of both passes, all-to-alls that no computation hides
    kernels: float  # of both passes, attention alone
    recompute: float  # of the intermediates of all tokens, in backward
    post: float  # of what makes the next layer's input again
    columns: float  # of both passes, what columns exchange that no computation hides


def layer_seconds(est: Estimator, plan: Plan) -> LayerSeconds:
    """Return the seconds of model.Block, whole or in chunks of tokens."""
    key = (plan.column, plan.dtype, plan.in_node, plan.tokens, plan.seq, plan.sp, plan.ring,
           plan.head_groups, plan.recompute, plan.chunk, plan.tp, plan.tp_mode,
           plan.accumulates and plan.factors.g == 1)
    if key not in est.cache:
        est.cache[key] = compute_layer_seconds(est, plan)
    return est.cache[key]


def compute_layer_seconds(est: Estimator, plan: Plan) -> LayerSeconds:
    # in the gradient's own place: in float32 where several contributions add up
    summed = plan.chunks > 1 or (plan.accumulates and plan.factors.g == 1)
    weight_grad = "weight_grad_sum" if summed else "weight_grad"
    pre, post, backward = tokenwise_seconds(est, plan, weight_grad)
    before = after = 0.0
    if plan.recompute == "auto":  # offload.py's order: under block.post's, and one product
        before = sum(backward[:-1])
        after = est.product(weight_grad, plan.tokens / plan.chunks, *plan.matrices[1])
    kernel, attention = attention_seconds(est, plan, "forward")
    kernel_back, attention_back = attention_seconds(est, plan, "backward", before, after)
    backward[-2] += attention_back
    # which a recomputed layer leaves out
    last = product_seconds(est, plan, "forward", plan.matrices[-1])
    columns, of_rows, of_cols = column_exchanges(est, plan)
    more = (of_cols, of_rows, of_cols, of_rows)  # down, gate|up, out, qkv
    post += columns  # where layers run in chunks, products are joined there
    layer = pre + attention + post
    return LayerSeconds(
        layer, attention, tuple(map(operator.add, backward, more)),
        attention - kernel + (attention_back - kernel_back), kernel + kernel_back,
        pre + post - last - columns / 2, post, columns + sum(more))


def product_seconds(est: Estimator, plan: Plan, kind: str, matrix: tuple[int, int]) -> float:
    """Return the seconds of a matrix's products with all tokens, chunk by chunk."""
    return plan.chunks * est.product(kind, plan.tokens / plan.chunks, *matrix)


def tokenwise_seconds(est: Estimator, plan: Plan,
                      weight_grad: str) -> tuple[float, float, list[float]]:
    """Return the seconds of block.pre and of block.post, and of their backward by matrix, the last
    one first. weight_grad: the kind of product."""
    cfg = plan.column
    qkv = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
    copied = plan.chunks > 1  # chunks are put together and cut
    dim = cfg.dim / plan.tp if plan.tp_mode == "fsp" else cfg.dim  # norms are of own tokens
    product = functools.partial(product_seconds, est, plan)

    def moved(*columns: float) -> float:
        return est.moved(plan, plan.tokens * sum(columns))

    # read and written, in columns: norms, rotation; second norm, residuals, SwiGLU
    first, *others = plan.matrices
    pre = product("forward", first) + moved(2 * dim, 2 * qkv, copied * 2 * qkv)
    post = sum(product("forward", matrix) for matrix in others)
    post += moved(7 * dim, 3 * cfg.ffn, copied * 2 * cfg.dim)
    backward = [product("input_grad", matrix) + product(weight_grad, matrix)
                for matrix in reversed(plan.matrices)]
    backward[0] += moved(6 * cfg.ffn)
    backward[1] += moved(5 * dim)
    backward[-1] += moved(5 * dim, 2 * qkv, copied * 2 * cfg.heads * cfg.head_dim,
                          copied * 3 * cfg.dim)
    return pre, post, backward


def attention_seconds(est: Estimator, plan: Plan, kind: str, before: float = 0.0,
                      after: float = 0.0) -> tuple[float, float]:
    """Return the seconds of attention's kernel, forward or backward, with what is copied for it;
    and with the all-to-alls and the ring that neither it hides nor the computation before and after
    it."""
    cfg = plan.column
    q = cfg.heads * cfg.head_dim
    backward = kind == "backward"
    kernel = est.attention(kind, cfg, plan.tokens, plan.seq, plan.ring)

    def moved(columns: float) -> float:
        return est.moved(plan, plan.tokens * columns)

    if plan.head_ranks == 1 < plan.head_groups:  # a group's tensors, to it and back
        kernel += moved((8 if backward else 4) * (cfg.heads + cfg.kv_heads) * cfg.head_dim)
    if plan.sp == 1:
        return kernel, kernel
    kv = cfg.kv_heads * cfg.head_dim
    there, back = (3 * q + 2 * kv, q + 2 * kv) if backward else (q + 2 * kv, q)
    if plan.ring > 1:  # merged, and summed, in float32
        steps = 3.75 * (plan.ring - 1)
        kernel += moved((10 * q + 8 * kv if backward else 6 * q) + steps * back)
    if plan.head_ranks > 1:
        # copies to and from the order of heads take the multiprocessors from all else
        kernel += moved(2 * there + 2 * back)
    return kernel, exchanged(est, plan, kernel, there, back, kv, before, after, backward)


def column_exchanges(est: Estimator, plan: Plan) -> tuple[float, float, float]:
    """Return the seconds of what columns exchange around a layer's products, which nothing hides:
    in forward, and in backward of a matrix cut by rows and one cut by columns."""
    if plan.tp == 1:
        return 0.0, 0.0, 0.0
    size = plan.tokens * plan.model.dim * plan.dtype.itemsize
    mesh = (plan.tp, 1)
    if plan.tp_mode == "mtp":
        reduction = est.collective("all_reduce", size, mesh)
        return 2 * reduction, reduction, 0.0
    gather = est.collective("all_gather", size, mesh)
    scatter = est.collective("reduce_scatter", size, mesh)
    again = gather if plan.tp_mode == "fsp" else 0.0
    return 2 * gather + 2 * scatter, scatter + again, gather


def exchanged(est: Estimator, plan: Plan, kernel: float, there: int, back: int, kv: int,
              before: float = 0.0, after: float = 0.0, backward: bool = False) -> float:
    """Return seconds of attention whose heads travel in groups (attention.Attention), and k, v
    around a ring (attention.Ring). kernel: its seconds for all groups; there, back: columns that
    travel to heads and to tokens; kv: of k or v. before, after: seconds of computation that hides
    the first group's way there and the last one's way back."""
    groups = plan.head_groups
    kv_groups = min(groups, plan.column.kv_heads // plan.head_ranks)  # or each has one head
    # what goes around a ring takes multiprocessors; all-to-alls in a node, copy engines alone
    line = Timeline(*est.profile.overlap["collectives" if plan.ring > 1 else "all_to_all"])
    across = plan.sp > plan.in_node
    step = kernel / groups / plan.ring
    # a step around the ring with a group's k, v: one of the R - 1 that an all-gather takes
    around = plan.tokens * (2 * kv / kv_groups) * plan.dtype.itemsize * plan.ring
    keys = est.collective("all_gather", around, plan.mesh(plan.sp, plan.head_ranks))
    keys /= max(1, plan.ring - 1)
    sums = keys * bytes_of_sums(plan) / plan.dtype.itemsize

    def travel(kind: str, seconds: float) -> list | None:
        return line.launch(kind, seconds, across)

    def exchange(kind: str, columns: int) -> list | None:
        """Launch one head group's all-to-all of tensors (N, columns)."""
        size = plan.tokens * columns / plan.head_groups * plan.dtype.itemsize
        return line.launch(kind, est.collective("all_to_all", size, plan.mesh(plan.head_ranks)))

    def run_kernel(passing: list | None) -> None:
        """Run the ring's steps: in forward the square first, in backward last."""
        if not backward:
            passing = travel("k, v", keys)
            line.run(step)
        summing = None
        for i in range(1, plan.ring):
            line.wait(passing)
            if i + 1 < plan.ring:
                passing = travel("k, v", keys)
            line.run(step)
            if backward:
                line.wait(summing)
                summing = travel("dk, dv", sums)
        if backward:
            line.run(step)
            line.wait(summing)

    first = exchange("there", there)
    passing = travel("k, v", keys) if backward else None
    line.run(before)
    for g in range(groups):
        arriving = after_next = None
        if g + 1 < groups:  # the next group's way, under this group's kernel
            arriving = exchange("there", there)
            after_next = travel("k, v", keys) if backward else None
        line.wait(first)
        run_kernel(passing)
        last = exchange("back", back)
        first, passing = arriving, after_next
    line.run(after)
    line.wait(last)
    return line.now - before - after


def head_seconds(est: Estimator, plan: Plan) -> float:
    """Return the seconds of head and loss, whose gradients are computed at once, and of the
    embedding's."""
    cfg = plan.model
    tokens = plan.tokens // (plan.tp if plan.splits_tokens else 1)
    rows = min(tokens, max(1, LOSS_ELEMENTS // cfg.vocab))
    products = sum(est.product(kind, rows, cfg.vocab, cfg.dim) * tokens / rows
                   for kind in ("forward", "input_grad", "weight_grad_sum"))
    e = plan.dtype.itemsize
    logits = tokens * cfg.vocab * (5 * plan.accum_bytes + e)  # read and written
    ends = cfg.vocab * cfg.dim * (2 * plan.accum_bytes + 4 * e)  # gradients
    return products + (logits + ends) / est.profile.memory + est.moved(plan, 6 * tokens * cfg.dim)


# ---------------------------------------------------------------------------- pipelines


def part_seconds(plan: Plan, layer: float, end: float) -> tuple[float, ...]:
    """Return the seconds of a pass through each part; layer: of one; end: of the last part beside
    its layers."""
    *parts, last = [layers * layer for layers in plan.parts]
    return *parts, last + end


def message_seconds(est: Estimator, plan: Plan) -> float:
    """Return the seconds of a micro-batch's way from one stage to the next, across nodes if any
    are."""
    size = plan.tokens * plan.model.dim * plan.dtype.itemsize
    if plan.splits_tokens:
        size /= plan.tp
    mesh = (1, 2) if plan.ranks > plan.per_node else (2, 1)
    return est.collective("all_gather", 2 * size, mesh)


def pipeline_seconds(plan: Plan, parts: tuple[float, ...]) -> float:
    """Return the seconds of all stages' passes, if a micro-batch takes so long through each part,
    there and back. The longest stage is idle while one micro-batch goes through a part of each
    other stage: M V t + (P - 1) t, if parts are alike."""
    stages = [sum(parts[stage :: plan.pp]) for stage in range(plan.pp)]
    longest = max(stages)
    return plan.micro_batches * longest + (sum(stages) - longest) / plan.pp_chunks


def exposed_messages(plan: Plan) -> float:
    """Return how many messages all stages wait for. With one part a stage, whose first backward is
    due as it arrives, P micro-batches wait for the 2 (P - 1) of one; and at first and last for
    those to and from other stages than the last. With several parts there are passes to run
    meanwhile, but under the first micro-batch."""
    stages = plan.pp
    if plan.pp_chunks > 1:
        return 2 * (stages * plan.pp_chunks - 1)
    return 2 * (stages - 1) * plan.micro_batches / stages + 2 * (stages - 2)


# ---------------------------------------------------------------------------- seconds of a step


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds of one unit's communication, each alone: of a layer, the embedding or the head."""

    gather: tuple[float, ...]  # by matrix, in the order of use
    scatter: float  # of a micro-batch's gradients
    last_scatter: float  # of the last micro-batch's
    keep: float  # a micro-batch's gradients are added to grad_shard: beside compute, but computed
    reduce: float  # over replicas, once a step
    cast: float  # to the type in which they travel, and back: likewise
    broadcast: float  # of new parameters, once a step
    update: float  # of what a rank owns: compute
    visit: float  # of its states, if they lie on the host: there and back, the update between


NOTHING = UnitSeconds((), 0, 0, 0, 0, 0, 0, 0, 0)  # of an end that another stage has


def end_seconds(est: Estimator, plan: Plan) -> UnitSeconds:
    """Return the seconds of the embedding, or of the head."""
    return unit_seconds(est, plan, ((plan.model.vocab, plan.model.dim),))


def unit_seconds(est: Estimator, plan: Plan, matrices: tuple[tuple[int, int], ...]) -> UnitSeconds:
    """Return the table in shard.py's docstring in seconds."""
    key = (plan.model, plan.dtype, plan.ranks, plan.per_node, plan.tp, plan.pp, plan.pp_chunks,
           plan.factors, plan.os_layout, plan.os_place, plan.optimizer, plan.accumulates,
           plan.chunks > 1, matrices)
    if key not in est.cache:
        est.cache[key] = compute_unit_seconds(est, plan, matrices)
    return est.cache[key]


def compute_unit_seconds(est: Estimator, plan: Plan,
                         matrices: tuple[tuple[int, int], ...]) -> UnitSeconds:
    f = plan.factors
    counts = [rows * cols for rows, cols in matrices]

    def seconds(op: str, element_bytes: int, shards: int, mesh: tuple[int, int]) -> list[float]:
        """Return the seconds of each matrix's collective, of a 1/shards of it."""
        return [est.collective(op, element_bytes * count / shards, mesh) for count in counts]

    e = plan.dtype.itemsize
    gather = tuple(seconds("all_gather", e, 1, plan.mesh(f.p)))
    # with inter a matrix has one owner
    broadcast = seconds("all_gather" if plan.os_layout == "intra" else "broadcast", e, f.p,
                        plan.mesh(f.os, f.p))
    scatter, last_scatter, reduce = grad_seconds(plan, matrices, seconds)
    wire = plan.dtype.itemsize
    held = grad_bytes(plan)
    moved = sum(counts) / f.g / est.profile.memory
    keep = moved * (wire + 2 * held) if f.g > 1 else 0.0
    in_chunks = plan.chunks > 1 and matrices == plan.matrices
    if in_chunks and f.g > 1:  # they add up in float32, and are cast whole
        keep += moved * f.g * (plan.accum_bytes + wire)
    cast = moved * 2 * (held + wire) if reduce and held != wire else 0.0
    owned = sum(counts) / f.os
    if plan.os_layout == "inter":
        owned *= imbalance(plan, slowest_stage(plan))
    update = owned * update_bytes(plan.dtype) / est.profile.optimizer
    visit = 0.0
    if plan.os_place == "host":
        states = OPTIMIZERS[plan.optimizer].states
        visit = owned * len(states) * plan.accum_bytes / est.profile.visits
    return UnitSeconds(gather, scatter, last_scatter, keep, reduce, cast, sum(broadcast), update,
                       visit)


def grad_seconds(plan: Plan, matrices: tuple[tuple[int, int], ...],
                 seconds: Callable) -> tuple[float, float, float]:
    """Return the seconds in which a micro-batch's gradients are scattered, the last one's, and in
    which they are reduced once a step. seconds: of each matrix's collective."""
    f = plan.factors
    wire = plan.dtype.itemsize
    subgroup = plan.mesh(f.os, f.p)
    replicas = plan.mesh(plan.state_ranks, f.p)
    cross_os = plan.mesh(plan.state_ranks, f.os)
    if matrices != plan.matrices:  # all columns have the embedding and the head
        replicas, cross_os = ((plan.tp * in_node, nodes) for in_node, nodes in (replicas, cross_os))
    scatter = sum(seconds("reduce_scatter", wire, 1, plan.mesh(f.p)))
    if plan.os_layout == "intra":
        in_subgroup = sum(seconds("reduce_scatter", wire, f.p, subgroup))
        reduce = sum(seconds("all_reduce", wire, f.os, cross_os))
        if f.g > f.p:
            return scatter + in_subgroup, scatter + in_subgroup, reduce
        return scatter, scatter, in_subgroup + reduce
    over_replicas = sum(seconds("all_reduce", wire, f.p, replicas))
    if f.g > f.p:
        in_subgroup = sum(seconds("all_reduce", wire, f.p, subgroup))
        return scatter + in_subgroup, scatter + over_replicas, 0.0
    return scatter, scatter, over_replicas


class StepTimeline(Timeline):
    """A step as train.run_step enqueues it: the update, whose parameters travel under what follows,
    then forward and backward of each micro-batch. (A step begins with its last part, so that it
    ends where nothing is on its way.) Of a pipeline the stage with most layers, which never waits
    for the others."""

    def __init__(self, est: Estimator, plan: Plan, recomputed: float):
        """recomputed: seconds of a layer's backward in which its forward runs again."""
        super().__init__(*est.profile.overlap["collectives"])
        self.est = est
        self.plan = plan
        self.stage = slowest_stage(plan)
        self.layers = stage_layers(plan, self.stage)
        self.sharded = plan.factors.p > 1
        self.across = crosses_nodes(plan)
        layer = layer_seconds(est, plan)
        computed = {"forward": layer.forward, "backward": sum(layer.backward) + recomputed}
        self.seconds = {  # of a layer's pass; the host must launch it in less than it takes
            kind: max(seconds, plan.chunks * est.profile.launch[kind])
            for kind, seconds in computed.items()}
        self.of_layer = {  # of both passes, by what they are for
            "attention": layer.kernels, "all-to-all": layer.exchange,  # and around a ring
            "tensor exchanges": layer.columns,
            "rest of layers": (layer.forward + sum(layer.backward) - layer.exchange - layer.kernels
                               - layer.columns),
            "recomputation": recomputed,
            "launches": (self.seconds["forward"] - layer.forward + self.seconds["backward"]
                         - computed["backward"])}
        # the host's part is spread likewise
        launched = self.seconds["backward"] / computed["backward"]
        self.by_matrix = tuple(launched * compute for compute in layer.backward)
        ends = end_seconds(est, plan)
        first = ends if self.stage == 0 else NOTHING
        last = ends if self.stage == plan.pp - 1 else NOTHING
        of_layer = unit_seconds(est, plan, plan.matrices)
        self.units = [first, *[of_layer] * self.layers, last]  # embedding, layers, head
        self.head = 0.0 if last is NOTHING else head_seconds(est, plan)
        self.computed: dict[str, float] = {}  # seconds of computation, by what it is for
        self.fresh: list = []  # travels of new parameters, of the first units
        self.updated: list[float] = []  # by unit: when it is updated, if under the next forward
        self.gathered: dict = {}  # of units, of (unit, matrix)
        self.scattered: dict[int, list | None] = {}  # by unit
        self.reduced: list | None = None  # the last one's

    def send(self, kind: str, seconds: float) -> list | None:
        """Launch one of shard.STREAMS; compute waits at once if that stream does not overlap."""
        job = self.launch(kind, seconds, self.across[kind])
        if kind not in self.plan.overlap:
            self.wait(job)
        return job

    def update(self) -> None:
        """States.update: the norm, then unit by unit, each one's new parameters leave."""
        plan = self.plan
        norm = stage_params(plan, self.stage) / plan.factors.os * grad_bytes(plan)
        norm_s = norm / self.est.profile.memory
        self.run(norm_s)
        later = plan.os_place == "host" and "host_update" in plan.overlap
        when = self.now
        for unit in self.units:
            when += unit.visit
            if later:
                self.updated.append(when)
                continue
            self.idle_until(self.now + unit.visit, "host_update")
            self.run(unit.update)
            self.fresh.append(self.send("param_broadcast", unit.broadcast))
        self.computed["optimizer"] = norm_s + sum(unit.update for unit in self.units)

    def arrive(self, unit: int) -> None:
        """Let compute wait for a unit's new parameters. Those that were updated meanwhile leave;
        their kernels take what compute would have."""
        if self.updated:
            self.idle_until(self.updated[unit], "host_update")
        while len(self.fresh) < len(self.updated) and self.updated[len(self.fresh)] <= self.now:
            fresh = self.units[len(self.fresh)]
            self.run(fresh.update)
            self.fresh.append(self.send("param_broadcast", fresh.broadcast))
        self.wait(self.fresh[unit])

    def gather(self, unit: int) -> None:
        """Launch the all-gathers of a unit's weights, unless its buffers hold them."""
        if unit not in self.gathered:
            self.gathered[unit] = self.send("param_gather", sum(self.units[unit].gather))

    def forward(self) -> None:
        """All of the next layer's weights are gathered under a layer."""
        last = self.layers + 1
        for unit in range(last + 1):
            self.arrive(unit)
            if self.sharded:
                self.gather(unit)
                if unit < last:
                    self.gather(unit + 1)
                self.wait(self.gathered[unit])
                if 2 < unit < last:  # the layer after the next takes a layer's buffers
                    self.gathered.pop(unit - 2, None)
            if 0 < unit < last:
                self.run(self.seconds["forward"])
        self.run(self.head)

    def backward(self, last: bool) -> None:
        """Where layers run whole and once, the next matrix is gathered under one; else all of the
        layer before under a layer. Gradients leave as they are complete."""
        self.reduce_grads(self.layers + 1, last)
        for unit in range(self.layers, 0, -1):
            self.wait(self.scattered.get(self.had_buffers(unit)))  # they are free
            if self.sharded and self.plan.recompute == "none":
                self.backward_by_matrix(unit)
            else:
                if self.sharded:
                    self.gather(unit)
                    if unit > 1:
                        self.gather(unit - 1)
                    self.wait(self.gathered[unit])
                    if unit + 2 <= self.layers:
                        self.gathered.pop(unit + 2, None)
                self.run(self.seconds["backward"])
            self.reduce_grads(unit, last)
        self.reduce_grads(0, last)

    def had_buffers(self, unit: int) -> int:
        """Return the unit that had a layer's buffers last: the layer but one behind; of a stage's
        last layers one of its first, in the micro-batch before."""
        if unit + 2 <= self.layers or self.plan.pp == 1:
            return unit + 2
        return 2 - unit % 2

    def backward_by_matrix(self, unit: int) -> None:
        """While a matrix's gradients are computed, the next one's weight arrives."""
        last = len(self.plan.matrices) - 1
        held = unit in self.gathered  # the last two layers' weights are still there
        seconds = self.units[unit].gather
        job = self.gathered.pop((unit, last), None)
        if not held and job is None:
            job = self.send("param_gather", seconds[last])
        for j, compute in zip(range(last, -1, -1), self.by_matrix):
            arriving = None
            if j and not held:
                arriving = self.send("param_gather", seconds[j - 1])
            elif not j and unit > 1 and unit - 1 not in self.gathered:
                self.gathered[unit - 1, last] = self.send("param_gather", seconds[last])
            self.wait(job)
            self.run(compute)
            job = arriving
        self.gathered.setdefault(unit, None)  # the next forward finds the first two layers' ...
        if unit + 2 <= self.layers:
            self.gathered.pop(unit + 2, None)  # ... and the layer but one before takes a buffer

    def reduce_grads(self, unit: int, last: bool) -> None:
        seconds = self.units[unit]
        scatter = seconds.last_scatter if last else seconds.scatter
        self.scattered[unit] = self.send("grad_scatter", scatter)
        self.run(seconds.keep + last * seconds.cast)  # their kernels take what compute would have
        if last:
            self.reduced = self.send("grad_reduce", seconds.reduce) or self.reduced

    def micro_batch(self, last: bool) -> None:
        self.forward()
        self.backward(last)
        if last:  # finish_gradients
            for job in (*self.scattered.values(), self.reduced):
                self.wait(job)

    def micro_batches(self) -> None:
        """Run all of a step's; those between the second and the last are alike, or, of a few
        layers, once so many have passed as fill the wires."""
        count = self.plan.micro_batches
        second = 1 if self.plan.pp == 1 else 1 + 8 // self.layers
        for m in sorted({*range(min(second + 1, count)), count - 1}):
            before = self.now, self.slowed, dict(self.exposed)
            self.micro_batch(m == count - 1)
            if m == second and count > second + 2:
                self.repeat(*before, count - second - 2)
        self.computed["head and loss"] = count * self.head
        self.computed["gradient sums"] = sum(
            count * unit.keep + unit.cast for unit in self.units)
        for name, seconds in self.of_layer.items():
            self.computed[name] = count * self.layers * seconds

    def repeat(self, now: float, slowed: float, exposed: dict[str, float], times: int) -> None:
        """Count so many times more what has happened since then."""
        self.now += times * (self.now - now)
        self.slowed += times * (self.slowed - slowed)
        for kind, seconds in self.exposed.items():
            self.exposed[kind] += times * (seconds - exposed.get(kind, 0.0))


def step_seconds(est: Estimator, plan: Plan, recomputed: float = 0.0,
                 waits: float = 0.0) -> dict[str, float]:
    """Return a step's seconds by what takes them: they add up to the step. recomputed, waits: of a
    micro-batch's way through the largest part of the model, what plan_activations loses to
    recomputation and to copies."""
    layers = max(plan.parts)
    line = StepTimeline(est, plan, recomputed / layers)
    line.update()
    line.micro_batches()
    everyone = mesh_of(plan.ranks, 1, plan.per_node)
    small = est.collective("all_reduce", 2.0**20, everyone)  # less takes as long
    parts = line.computed | line.exposed
    parts["small sums"] = 5 * small  # loss, norm, vectors, labels, facts
    parts["slowed by communication"] = line.slowed
    parts["copies"] = float(waits) * plan.micro_batches * line.layers / layers
    if plan.pp > 1:
        passes = part_seconds(plan, sum(line.seconds.values()), line.head)
        alone = plan.micro_batches * sum(passes[line.stage :: plan.pp])
        parts["pipeline idle"] = pipeline_seconds(plan, passes) - alone
        parts["stage messages"] = exposed_messages(plan) * message_seconds(est, plan)
    return {name: seconds for name, seconds in parts.items() if seconds}


def computation_seconds(est: Estimator, plan: Plan) -> dict[str, float]:
    """Return the seconds of a step's layers and head alone, and of a pipeline's idle time: a bound
    for all factors, of which some add gradients up in their own place and others do not."""
    least = math.inf
    for accumulates in {plan.accumulates, False}:
        layer = layer_seconds(est, replace(plan, accumulates=accumulates))
        least = min(least, layer.forward + sum(layer.backward))
    parts = part_seconds(plan, least, head_seconds(est, plan))
    return {"computation": pipeline_seconds(plan, parts)}


def bound_seconds(est: Estimator, plan: Plan, computed: float) -> dict[str, float]:
    """Return seconds that a step takes at least: its computation with the update, and communication
    that is all hidden, which slows computation down; or the communication of one wire alone, or the
    visits of states that lie on the host. computed: computation_seconds, in all."""
    m = plan.micro_batches
    stage = slowest_stage(plan)
    layer = unit_seconds(est, plan, plan.matrices)
    across = crosses_nodes(plan)
    wires = [0.0, 0.0]
    visits = 0.0
    for unit, count in ((end_seconds(est, plan), stage_ends(plan, stage)),
                        (layer, stage_layers(plan, stage))):
        computed += count * (unit.update + m * unit.keep + unit.cast)
        visits += count * unit.visit
        wires[across["param_broadcast"]] += count * unit.broadcast
        wires[across["grad_reduce"]] += count * unit.reduce
        wires[across["grad_scatter"]] += count * ((m - 1) * unit.scatter + unit.last_scatter)
        if plan.factors.p > 1:  # the last two layers' weights are still there for backward
            gathers = m * sum(unit.gather) if unit is layer else sum(unit.gather)
            wires[across["param_gather"]] += max(0, count - 2 * (unit is layer)) * gathers
    slow_compute, slow_other = est.profile.overlap["collectives"]
    share = min(1.0, slow_other * (1 - 1 / slow_compute))
    return {"bound": max(computed + share * max(wires), *wires, visits)}


def crosses_nodes(plan: Plan) -> dict[str, bool]:
    """Return which kinds of communication cross nodes."""
    f = plan.factors
    in_node = plan.in_node
    nodes = plan.state_ranks > in_node
    return {"param_gather": f.p > in_node, "param_broadcast": f.os > in_node,
            "grad_scatter": f.os > in_node or (nodes and plan.os_layout == "inter"),
            "grad_reduce": nodes}


def grad_bytes(plan: Plan) -> int:
    """Return the bytes of a gradient's element where it is kept."""
    return plan.accum_bytes if plan.accumulates else plan.dtype.itemsize
