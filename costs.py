"""What does a plan cost? Bytes and seconds of a step on one rank, from the profile of a machine.

Bytes are named terms: those that shard.py, offload.py and model.py really allocate. Seconds come in
three stages,

    operations   FLOPs / rate(shape), bytes / bandwidth(operation, bytes, mesh): Estimator
    layers       products, attention with its all-to-alls, element-wise parts: layer_seconds
    step         each pass with the communication that runs beside it (`beside`): what is longer
                 counts, and neither hides the other for free: step_seconds

and no number is fitted to whole steps: they follow from a Profile (hardware.py).

For a pipeline we count the bytes of the fullest stage and the seconds of the longest one, plus the
time it idles (`idle_seconds`). Of T columns of a layer (tensor modes) one has H/T, K/T heads and
F/T: `column_model`, which counts and times it as any other model; what the columns exchange is
added. With e bytes an element and N tokens of all columns

    mode   a layer's forward            its backward             x, h that are kept
    mtp    2 all-reduces (N, C)         the same                 N tokens
    msp    2 all-gathers of N, 2        the same                 N
           reduce-scatters
    fsp    as msp                       and 2 all-gathers more   N/T

Left out: ranks that wait for a slower one, the first step's compilation, and gathers of weights
that the host still updates. If you change model.Block, only its matrices are counted; its
element-wise kernels are assumed to be ours. A pipeline's parts are timed as if a micro-batch ran
through all of a stage's layers at once, and each micro-batch in flight is counted with rounding
buffers of its own.

Legend: N tokens on a rank at once (of all its columns), L layers, M micro-batches a step, C width,
H query heads, K key/value heads, D head width, F feed-forward width, V vocabulary; p, g, os shards;
mesh (GPUs in a node, nodes) of a group of ranks; of pipelines P stages, V parts of the model on
one.
"""
import functools
import heapq
import itertools
import math
from collections import Counter
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

    def terms(self) -> dict[str, float]:
        """Return all of them, the highest moment's as one."""
        return self.lasting | {"working": self.working()}

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
    swapped = np.ceil(plan.swapped_chunks / np.maximum(1, plan.layers - plan.resident))
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


def kept_bytes(plan: Plan, stage: int) -> float:
    """Return what a stage's layers keep on the GPU, of all that is in flight there."""
    layer = column_bytes(plan)
    layers = in_flight(plan, stage)
    kept = plan.activations
    if kept is not None and kept.kept_chunks < kept.layers * kept.chunks:
        return resident_bytes(kept, layer) * (layers / kept.layers)
    return layers * sum(layer)


def states_of_stage(plan: Plan, stage: int) -> dict[str, float]:
    """Return the bytes of a rank's states, of the rank that owns most."""
    f = plan.factors
    states = state_bytes(stage_params(plan, stage), f, plan.dtype, plan.accumulates,
                         plan.optimizer)
    if plan.os_layout == "inter":
        most = imbalance(plan, stage)
        states["optimizer"] *= most
        if f.g > f.p:
            states["gradients"] *= most
    return states


def stage_memory(plan: Plan, stage: int) -> Memory:
    """Return the bytes of a GPU of a stage."""
    lasting = states_of_stage(plan, stage)
    lasting["optimizer"] *= plan.os_place == "gpu"
    lasting |= weight_buffer_bytes(plan, stage) | visit_bytes(plan, stage)
    lasting |= message_bytes(plan) | {"activations": kept_bytes(plan, stage)}
    peaks = {"head and loss": loss_peak(plan)} if stage == plan.pp - 1 else {}
    return Memory(lasting, peaks | layer_peaks(plan))


def host_states(plan: Plan) -> float:
    """Return the bytes of host memory of a rank for optimizer states."""
    if plan.os_place == "gpu":
        return 0.0
    return max(states_of_stage(plan, stage)["optimizer"] for stage in fullest_stages(plan))


def with_memory(plan: Plan) -> Plan:
    """Return the plan with its bytes counted: on the GPU those of the stage that needs most."""
    stages = fullest_stages(plan)
    kept = plan.activations
    host = {}
    if kept:
        times = max(in_flight(plan, stage) for stage in stages) / kept.layers
        host["activations"] = times * host_bytes(kept, column_bytes(plan))
    if plan.os_place == "host":
        host["optimizer"] = host_states(plan)
    memory = max((stage_memory(plan, stage) for stage in stages), key=Memory.total)
    return replace(plan, memory=memory, host=host)


# ---------------------------------------------------------------------------- seconds of operations


class Estimator:
    """Seconds of operations on a machine."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.held: set[str] = set()  # what lies outside the profile's points, in words
        self.product = functools.cache(self.product)
        self.collective = functools.cache(self.collective)

    def product(self, kind: str, tokens: float, rows: int, cols: int) -> float:
        """Return seconds of a product of (tokens, cols) and a matrix (rows, cols)."""
        rate = interpolate_twice(self.profile.products[kind], tokens, math.sqrt(rows * cols))
        return 2 * tokens * rows * cols / rate

    def moved(self, plan: Plan, *columns: float) -> float:
        """Return seconds of element-wise kernels that read and write tensors (N, columns)."""
        return plan.tokens * sum(columns) * plan.dtype.itemsize / self.profile.memory

    def collective(self, op: str, size: float, mesh: tuple[int, int]) -> float:
        """Return seconds of a collective on so many bytes (AMSP, section IV): t = bytes /
        bandwidth(op, bytes, mesh). Between measured numbers of nodes the bandwidth is interpolated,
        for GPUs of a node the nearest is taken, and outside it is held."""
        if mesh == (1, 1) or not size:
            return 0.0
        tables = {tuple(map(int, name.split("x"))): points
                  for name, points in self.profile.collectives[op].items()}
        if not tables:
            raise ValueError(f"profile {self.profile.name}: measured on one rank, it has no rates "
                             f"of {op}; --ranks 1, or another --cluster")
        per_node, nodes = mesh
        alike = [there for there in tables if (there[1] > 1) == (nodes > 1)] or list(tables)
        nearest = min((g for g, _ in alike), key=lambda g: abs(math.log(g / per_node)))
        rates = sorted([n, interpolate(tables[g, n], size)] for g, n in alike if g == nearest)
        known = min(max(nodes, rates[0][0]), rates[-1][0])
        if (nearest, known) != mesh:
            self.held.add(f"{op} over {mesh_name(mesh)} as over {mesh_name((nearest, known))}")
        return size / interpolate(rates, known)


@functools.cache
def block_matrices(block_class, cfg: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return (rows, cols) of a block's matrices in the order of use."""
    with torch.device("meta"):
        block = block_class(cfg)
    return tuple(m.shape for m in block.modules() if isinstance(m, llama.Matrix))


def beside(compute: float, other: float, slow: list[float]) -> tuple[float, float]:
    """Return the seconds of communication that computation does not hide, and those that it takes
    longer meanwhile. slow: the factors on the seconds of computation and of communication while
    both run, so that neither is ever hidden for free (Galvatron's two coefficients)."""
    slow_compute, slow_other = slow
    hidden = min(other, compute * slow_compute / slow_other)
    return other - hidden, hidden * slow_other * (1 - 1 / slow_compute)


# ---------------------------------------------------------------------------- seconds of a layer


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer for a micro-batch, if no communication of states runs beside it."""

    forward: float
    backward: float
    final: float  # of backward, from its begin to the last matrix' gradients
    attention: float  # of forward, with its all-to-alls
    post: float  # of forward, what makes the next layer's input from attention's output
    recompute: float  # of the intermediates of all tokens, in backward
    kernels: float  # of both passes, attention alone
    exchange: float  # of both passes, all-to-alls and a ring that no computation hides
    columns: float  # of both passes, what columns exchange


def layer_seconds(est: Estimator, plan: Plan) -> LayerSeconds:
    """Return the seconds of model.Block, whole or in chunks of tokens."""
    cfg = plan.column
    tokens = plan.tokens / plan.chunks
    # in the gradient's own place, in float32, where several contributions add up
    summed = plan.chunks > 1 or (plan.accumulates and plan.factors.g == 1)
    weight_grad = "weight_grad_sum" if summed else "weight_grad"

    def products(kind: str, matrices) -> float:
        return plan.chunks * sum(est.product(kind, tokens, *matrix) for matrix in matrices)

    first, *others = plan.matrices
    heads = cfg.heads * cfg.head_dim
    qkv = heads + 2 * cfg.kv_heads * cfg.head_dim
    copied = plan.chunks > 1  # chunks are put together and cut
    dim = cfg.dim / plan.tp if plan.tp_mode == "fsp" else cfg.dim  # norms are of own tokens
    # read and written, in columns: norms, rotation; second norm, residuals, SwiGLU; backward
    pre = products("forward", [first]) + est.moved(plan, 2 * dim, (2 + 2 * copied) * qkv)
    post = products("forward", others) + est.moved(plan, 7 * dim, 3 * cfg.ffn, copied * 2 * cfg.dim)

    def gradients(matrices) -> float:
        return products("input_grad", matrices) + products(weight_grad, matrices)

    final = est.moved(plan, 6 * cfg.ffn) + gradients(others[-1:])
    back = est.moved(plan, 10 * dim, 2 * qkv, copied * (2 * heads + 3 * cfg.dim))
    back += final + gradients(plan.matrices[:-1])
    before = after = 0.0
    if plan.recompute == "auto":  # offload.py's order: under block.post's, and one product
        before = gradients(others)
        after = est.product(weight_grad, tokens, *others[0])
    kernel, attention = attention_seconds(est, plan, "forward", 0.0, 0.0)
    kernel_back, attention_back = attention_seconds(est, plan, "backward", before, after)
    columns, columns_back = column_exchanges(est, plan)
    post += columns  # where layers run in chunks, products are joined there
    return LayerSeconds(
        forward=pre + attention + post,
        backward=back + attention_back + columns_back,
        final=final,
        attention=attention,
        post=post,
        # the last product is left out, and its sum over columns
        recompute=pre + post - products("forward", others[-1:]) - columns / 2,
        kernels=kernel + kernel_back,
        exchange=attention - kernel + attention_back - kernel_back,
        columns=columns + columns_back)


def column_exchanges(est: Estimator, plan: Plan) -> tuple[float, float]:
    """Return the seconds of what columns exchange in the open, in a layer's forward and backward.
    """
    size = plan.tokens * plan.model.dim * plan.dtype.itemsize

    def twice(op: str) -> float:
        return 2 * est.collective(op, size, (plan.tp, 1))

    if plan.tp_mode == "mtp":
        return twice("all_reduce"), twice("all_reduce")
    both = twice("all_gather") + twice("reduce_scatter")
    return both, both + (twice("all_gather") if plan.tp_mode == "fsp" else 0.0)


def attention_seconds(est: Estimator, plan: Plan, kind: str, before: float,
                      after: float) -> tuple[float, float]:
    """Return the seconds of attention's kernel, forward or backward, with what is copied for it;
    and with the all-to-alls and the ring that no computation hides. Other head groups and the
    ring's next part travel under the kernel, the first group's way there under `before`, the last
    one's way back under `after` (attention.Ulysses)."""
    cfg = plan.column
    groups = plan.head_groups
    e = plan.dtype.itemsize
    q = cfg.heads * cfg.head_dim
    kv = cfg.kv_heads * cfg.head_dim
    backward = kind == "backward"
    # columns that travel to heads, and back to tokens
    there, back = (3 * q + 2 * kv, q + 2 * kv) if backward else (q + 2 * kv, q)
    flops = (5 if backward else 2) * q * plan.tokens * plan.seq
    # a ring's kernels are squares of its part of a sequence
    kernel = flops / interpolate(est.profile.attention[kind], plan.seq / plan.ring)
    if plan.ring > 1:  # merged, and summed, in float32
        steps = 3.75 * (plan.ring - 1)
        kernel += est.moved(plan, 10 * q + 8 * kv if backward else 6 * q, steps * back)
    if plan.head_ranks * groups > 1:  # copies to and from the order of heads
        kernel += est.moved(plan, 2 * there, 2 * back)
    if plan.sp == 1:
        return kernel, kernel

    def exchange(columns: int) -> float:
        """Return the seconds of one head group's all-to-all of tensors (N, columns)."""
        size = plan.tokens * columns * e / groups
        return est.collective("all_to_all", size, plan.mesh(plan.head_ranks))

    kv_groups = min(groups, cfg.kv_heads // plan.head_ranks)  # or each has one head
    parts = plan.ring * plan.tokens * 2 * kv * e / kv_groups
    around = groups * est.collective("all_gather", parts, plan.mesh(plan.sp, plan.head_ranks))
    if backward:  # dk, dv too
        around *= 1 + bytes_of_sums(plan) / e
    # a ring takes multiprocessors; all-to-alls in a node, copy engines alone
    slow = est.profile.overlap["collectives" if plan.ring > 1 else "all_to_all"]
    hidden = (groups - 1) * (exchange(there) + exchange(back)) + around
    return kernel, kernel + sum(
        sum(beside(compute, other, slow)) for compute, other in
        ((before, exchange(there)), (kernel, hidden), (after, exchange(back))))


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
    return products + (logits + ends + 6 * tokens * cfg.dim * e) / est.profile.memory


# ---------------------------------------------------------------------------- seconds of states


def unit_seconds(est: Estimator, plan: Plan,
                 matrices: tuple[tuple[int, int], ...]) -> dict[str, float]:
    """Return the table in shard.py's docstring in seconds, each alone, of a layer's matrices, or of
    the embedding or the head: by streams, and what the GPU itself does for them."""
    f = plan.factors
    e = plan.dtype.itemsize
    count = sum(rows * cols for rows, cols in matrices)
    is_end = matrices != plan.matrices
    intra = plan.os_layout == "intra"
    kept_apart = f.g > f.p  # a rank keeps its owned part of gradients alone

    def alone(op: str, shards: int, mesh: tuple[int, int]) -> float:
        return sum(est.collective(op, e * rows * cols / shards, mesh) for rows, cols in matrices)

    subgroup = plan.mesh(f.os, f.p)
    summed = f.os if intra else f.p  # shards of what is summed over the ranks that are left
    in_node, nodes = plan.mesh(plan.state_ranks, summed)
    if is_end:  # which all columns have
        in_node *= plan.tp
    scatter = alone("reduce_scatter", 1, plan.mesh(f.p))
    inside = alone("reduce_scatter" if intra else "all_reduce", f.p, subgroup)
    over = alone("all_reduce", summed, (in_node, nodes))
    each = scatter + inside * kept_apart
    last, reduce = (scatter, over) if not kept_apart else (scatter + over, 0.0)
    if intra:
        last, reduce = each, over + inside * (not kept_apart)
    held = grad_bytes(plan)
    moved = count / f.g / est.profile.memory
    keep = moved * (e + 2 * held) * (f.g > 1)
    if plan.chunks > 1 and f.g > 1 and not is_end:  # they add up in float32, and are cast whole
        keep += moved * f.g * (plan.accum_bytes + e)
    owned = count / f.os * (1 if intra else imbalance(plan, slowest_stage(plan)))
    states = len(OPTIMIZERS[plan.optimizer].states) * plan.accum_bytes * (plan.os_place == "host")
    return {
        "param_gather": alone("all_gather", 1, plan.mesh(f.p)),
        "param_broadcast": alone("all_gather" if intra else "broadcast", f.p, subgroup),
        "earlier_scatter": each,  # of micro-batches before the last
        "grad_scatter": last,
        "grad_reduce": reduce,
        "host_update": owned * states / est.profile.visits,  # there and back
        "keep": keep,  # a micro-batch's gradients are added to grad_shard
        # to the type in which they travel, and back
        "cast": moved * 2 * (held + e) if reduce and held != e else 0.0,
        "update": owned * update_bytes(plan.dtype) / est.profile.optimizer}


def grad_bytes(plan: Plan) -> int:
    """Return the bytes of a gradient's element where it is kept."""
    return plan.accum_bytes if plan.accumulates else plan.dtype.itemsize


def visit_seconds(est: Estimator, plan: Plan) -> float:
    """Return seconds of a layer's forward, in the mean, in which optimizer states take the link to
    the host."""
    if plan.os_place == "gpu":
        return 0.0
    stage = slowest_stage(plan)
    layers, ends = stage_layers(plan, stage), stage_ends(plan, stage)
    layer = unit_seconds(est, plan, plan.matrices)["host_update"]
    end = unit_seconds(est, plan, ((plan.model.vocab, plan.model.dim),))["host_update"]
    return (layer + ends * end / layers) / plan.micro_batches


def crosses_nodes(plan: Plan) -> dict[str, bool]:
    """Return which streams cross nodes."""
    f = plan.factors
    nodes = plan.state_ranks > plan.in_node
    return {"param_gather": f.p > plan.in_node, "param_broadcast": f.os > plan.in_node,
            "grad_scatter": f.os > plan.in_node or (nodes and plan.os_layout == "inter"),
            "grad_reduce": nodes}


def not_hidden(est: Estimator, plan: Plan, compute: float,
               traffic: dict[str, float]) -> dict[str, float]:
    """Return the seconds by which communication makes a pass longer, by its stream. What stays in a
    node and what crosses nodes take other wires, of which the busier one counts; what does not
    overlap runs in the open."""
    across = crosses_nodes(plan)
    hidden = traffic.keys() & set(plan.overlap)
    wires = [{name: traffic[name] for name in hidden if across[name] == which}
             for which in (False, True)]
    wire = max(wires, key=lambda wire: sum(wire.values()))
    total = sum(wire.values())
    exposed, slowed = beside(compute, total, est.profile.overlap["collectives"])
    found = {name: alone for name, alone in traffic.items() if name not in hidden}
    found |= {name: alone * exposed / max(total, 1e-30) for name, alone in wire.items()}
    return found | {"slowed by communication": slowed}


# ---------------------------------------------------------------------------- seconds of a step


def step_seconds(est: Estimator, plan: Plan, recomputed: float = 0.0,
                 waits: float = 0.0) -> dict[str, float]:
    """Return a step's seconds by what takes them: they add up to the step. recomputed, waits: of a
    micro-batch's way through the largest part of the model, what plan_activations loses to
    recomputation and to copies. Of a pipeline it is the stage with most layers."""
    stage = slowest_stage(plan)
    layers = stage_layers(plan, stage)
    count = plan.micro_batches
    passes = count * layers
    share = layers / max(plan.parts)
    layer = layer_seconds(est, plan)
    again = recomputed / max(plan.parts)
    # the host must launch a pass in less than it takes
    forward = max(layer.forward, plan.chunks * est.profile.launch["forward"])
    backward = max(layer.backward + again, plan.chunks * est.profile.launch["backward"])
    head = head_seconds(est, plan) if stage == plan.pp - 1 else 0.0
    traffic = traffic_seconds(est, plan, layers * forward, layers * backward,
                              layers * layer.final)
    seconds = {
        "attention": passes * layer.kernels,
        "all-to-all": passes * layer.exchange,  # and around a ring
        "tensor exchanges": passes * layer.columns,
        "rest of layers": passes * (
            layer.forward + layer.backward - layer.kernels - layer.exchange - layer.columns),
        "recomputation": passes * again,
        "copies": count * share * waits,
        "launches": passes * (forward + backward - layer.forward - layer.backward - again),
        "head and loss": count * head,
        # loss, norm, vectors, labels, facts: of a MiB, since less takes as long
        "small sums": 5 * est.collective(
            "all_reduce", 2.0**20, mesh_of(plan.ranks, 1, plan.per_node))}
    if plan.pp > 1:
        seconds["pipeline idle"] = idle_seconds(plan, forward + backward, head)
        seconds["stage messages"] = exposed_messages(plan) * message_seconds(est, plan)
    return {name: float(s) for name, s in (seconds | traffic).items() if s}


def traffic_seconds(est: Estimator, plan: Plan, forward: float, backward: float,
                    final: float) -> dict[str, float]:
    """Return what states add to a step: communication by its stream, as far as no pass hides it,
    and what the GPU itself does. forward, backward: a micro-batch's seconds of all layers of the
    slowest stage; final: LayerSeconds.final of all.

    The first forward hides new parameters, the last backward sums over replicas, each pass what is
    gathered for it. In the open are the embedding's and the first layer's before the one, and
    after the other. In backward a whole layer gathers a matrix ahead, behind the gradients of the
    layer before: both hide under the last matrix, and other weights under the rest.
    """
    stage = slowest_stage(plan)
    layers, ends = stage_layers(plan, stage), stage_ends(plan, stage)
    count = plan.micro_batches
    layer = unit_seconds(est, plan, plan.matrices)
    end = unit_seconds(est, plan, ((plan.model.vocab, plan.model.dim),))
    total = {name: layers * layer[name] + ends * end[name] for name in layer}
    alone = {name: layer[name] + min(1, ends) * end[name] for name in layer}
    hidden = {name: total[name] - alone[name] for name in layer}
    first = ("param_gather", "param_broadcast")
    last = ("grad_scatter", "grad_reduce")
    # the last two layers' buffers still hold their weights
    gathers = {"param_gather": max(0, layers - 2) * layer["param_gather"]}
    by_matrix = plan.recompute == "none" and plan.factors.p > 1
    half = {"param_gather": gathers["param_gather"] / 2}
    across = crosses_nodes(plan)
    norm = stage_params(plan, stage) / plan.factors.os * grad_bytes(plan) / est.profile.memory
    under = forward if "host_update" in plan.overlap else 0.0
    seconds = Counter({
        "gradient sums": count * total["keep"] + total["cast"],
        "optimizer": norm + total["update"],
        "host_update": max(0.0, total["host_update"] - under)})
    passes = [(1, 0.0, {name: alone[name] for name in first + last}),
              (1, forward, {name: hidden[name] for name in first}),
              (count - 1, forward, gathers)]
    backward += total["keep"]
    for times, compute, traffic in (
            (count - 1, backward, {"grad_scatter": total["earlier_scatter"]}),
            (1, backward + total["cast"], {name: hidden[name] for name in last})):
        if not by_matrix:
            passes += [(times, compute, gathers | traffic)]
            continue
        ahead = {name: alone if across[name] == across["param_gather"] else alone * final / compute
                 for name, alone in traffic.items()}
        passes += [(times, final, half | ahead), (times, compute - final, half | {
            name: alone - ahead[name] for name, alone in traffic.items()})]
    for times, compute, traffic in passes:
        for name, more in not_hidden(est, plan, compute, traffic).items():
            seconds[name] += times * more
    return seconds


# ---------------------------------------------------------------------------- pipelines


def idle_seconds(plan: Plan, layer: float, head: float) -> float:
    """Return the seconds that a pipeline's stage with most layers is idle: while one micro-batch
    goes through a part of each other stage, (P - 1) t of M V t + (P - 1) t if parts are alike; and
    while a stage with the head takes longer. layer: seconds of one there and back."""
    stages = [layer * stage_layers(plan, stage) for stage in range(plan.pp)]
    own = stages[slowest_stage(plan)] + head * (slowest_stage(plan) == plan.pp - 1)
    stages[-1] += head
    longest = max(stages)
    return plan.micro_batches * (longest - own) + (sum(stages) - longest) / plan.pp_chunks


def message_seconds(est: Estimator, plan: Plan) -> float:
    """Return the seconds of a micro-batch's way from one stage to the next, across nodes if any
    are."""
    size = plan.tokens * plan.model.dim * plan.dtype.itemsize
    if plan.splits_tokens:
        size /= plan.tp
    mesh = (1, 2) if plan.ranks > plan.per_node else (2, 1)
    return est.collective("all_gather", 2 * size, mesh)


def exposed_messages(plan: Plan) -> float:
    """Return how many messages all stages wait for. With one part a stage, whose first backward is
    due as it arrives, P micro-batches wait for the 2 (P - 1) of one; and at first and last for
    those to and from other stages than the last. With several parts there are passes to run
    meanwhile, but under the first micro-batch."""
    stages = plan.pp
    if plan.pp_chunks > 1:
        return 2 * (stages * plan.pp_chunks - 1)
    return 2 * (stages - 1) * plan.micro_batches / stages + 2 * (stages - 2)


def computation_seconds(est: Estimator, plan: Plan) -> dict[str, float]:
    """Return the seconds of a step's layers and head alone, and of a pipeline's idle time: a bound
    for all factors, of which some add gradients up in their own place and others do not."""
    least = math.inf
    for accumulates in {plan.accumulates, False}:
        layer = layer_seconds(est, replace(plan, accumulates=accumulates))
        least = min(least, layer.forward + layer.backward)
    head = head_seconds(est, plan)
    own = stage_layers(plan, slowest_stage(plan)) * least
    own += head if slowest_stage(plan) == plan.pp - 1 else 0.0
    return {"computation": plan.micro_batches * own + idle_seconds(plan, least, head)}
