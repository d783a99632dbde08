"""What does a plan cost? Bytes and seconds of a step on one rank, from the profile of a machine.

Bytes are named terms: states, their buffers and what layers keep, as shard.py and offload.py
allocate them, and of what works beside them the largest of three upper terms (`working_bytes`).
Seconds come in three stages,

    operations   FLOPs / rate(shape), bytes / bandwidth(operation, bytes, mesh): Estimator
    layers       products, attention with its all-to-alls, element-wise parts: layer_seconds
    step         each pass with the communication that runs beside it (`beside`): what is longer
                 counts, and neither hides the other for free: step_seconds

and no number is fitted to whole steps: they follow from a Profile (hardware.py).

For a pipeline we count the bytes of a stage that has the most of everything (micro-batches in
flight as the first, layers and logits as the last), and the seconds of the last one, which has most
layers, plus the time it idles. Of T columns of a layer (tensor modes) one has H/T, K/T heads and
F/T: `Plan.column`, which is counted and timed as any other model; what the columns exchange is
added. With e bytes an element and N tokens of all columns

    mode   a layer's forward            its backward             x, h that are kept
    mtp    2 all-reduces (N, C)         the same                 N tokens
    msp    2 all-gathers of N, 2        the same                 N
           reduce-scatters
    fsp    as msp                       and 2 all-gathers more   N/T

Left out: ranks that wait for a slower one, the first step's compilation, sums of a few numbers (0.1
% of the shortest steps), and gathers of weights that the host still updates. If you change
model.Block, only its matrices are counted; its element-wise kernels are assumed to be ours. A
pipeline's parts are timed as if a micro-batch ran through all of a stage's layers at once.

Legend: N tokens on a rank at once (of all its columns), L layers, M micro-batches a step, C width,
H query heads, K key/value heads, D head width, F feed-forward width, V vocabulary; p, g, os shards;
mesh (GPUs in a node, nodes) of a group of ranks; of pipelines P stages, V parts of the model on
one; of what layers keep n layers, k resident layers, m layers of which one keeps x, X without o.
"""

import functools
import math
from collections import Counter
from dataclasses import astuple, dataclass, field, replace

import numpy as np
import torch

import model as llama
from hardware import Profile, interpolate, interpolate_twice
from model import ModelConfig, flops_per_token
from offload import ActivationPlan, block_saves, matrices_of
from ops import LOSS_ELEMENTS, accumulation_dtype
from optim import ADAMW, OPTIMIZERS, VISIT_BUFFERS, VISIT_ELEMENTS
from shard import STREAMS, Factors

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
    optimizer: str = "adamw"  # of matrices: a row of optim.OPTIMIZERS
    overlap: tuple[str, ...] = STREAMS
    activations: ActivationPlan | None = None  # of layers in chunks
    memory: dict[str, float] = field(default_factory=dict)  # bytes of a GPU, by what they are for
    host: dict[str, float] = field(default_factory=dict)  # bytes of a rank there, likewise
    seconds: dict[str, float] | None = None  # of a step, by what takes them
    tp: int = 1  # ranks that share a layer's matrices
    tp_mode: str = "msp"
    pp: int = 1  # stages of a pipeline
    pp_chunks: int = 1  # V: parts of the model on a stage

    @functools.cached_property
    def column(self) -> ModelConfig:
        """Return the model whose layers are one column of the model's."""
        cfg, tp = self.model, self.tp
        return replace(
            cfg,
            heads=cfg.heads // tp,
            kv_heads=cfg.kv_heads // tp,
            ffn=cfg.ffn // tp,
        )

    @property
    def matrices(self):
        """Return (rows, cols) of a column's block, in the order of use."""
        return block_matrices(llama.Block, self.column)

    @property
    def widths(self):
        """Return the columns of q or o, and of k and v together."""
        cfg = self.column
        return cfg.heads * cfg.head_dim, 2 * cfg.kv_heads * cfg.head_dim

    @property
    def end(self):
        """Return (rows, cols) of the embedding, and of the head."""
        return self.model.vocab, self.model.dim

    @property
    def ends(self) -> int:
        """Return how many of them a stage has."""
        return 2 if self.pp == 1 else 1

    @functools.cached_property
    def params(self) -> int:
        """Return the parameters of a rank before they are sharded, but for vectors."""
        layers = self.stage_layers * sum(map(math.prod, self.matrices))
        return layers + self.ends * math.prod(self.end)

    @property
    def accum_bytes(self) -> int:
        """Return the bytes of an element where sums are kept: in float32, or wider."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def grad_bytes(self) -> int:
        """Return the bytes of a gradient's element where it is kept: sums of several are wide."""
        return self.accum_bytes if self.micro_batches > 1 else self.dtype.itemsize

    @property
    def moment_bytes(self) -> int:
        """Return the bytes of optimizer states per parameter."""
        return OPTIMIZERS[self.optimizer].bytes_per_parameter(accumulation_dtype(self.dtype))

    @property
    def part_layers(self) -> int:
        """Return the most layers of a part of the model."""
        return -(-self.model.layers // (self.pp * self.pp_chunks))

    @property
    def stage_layers(self) -> int:
        """Return the most layers of a stage."""
        return self.pp_chunks * self.part_layers

    @property
    def tokens(self) -> int:
        """Return N."""
        return self.micro_batch * self.seq // self.sp

    @property
    def own_tokens(self) -> int:
        """Return the tokens that a column has alone between products."""
        return self.tokens // (self.tp if self.splits_tokens else 1)

    @property
    def splits_tokens(self) -> bool:
        """Whether columns have parts of the tokens between products."""
        return self.tp > 1 and self.tp_mode != "mtp"

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
        return min(self.per_node, self.ranks // self.pp) // self.tp

    def mesh(self, ranks, inner=1):
        """Return (GPUs in a node, nodes) of every inner-th of `ranks` neighbours of these."""
        node = self.in_node
        return (min(ranks, node) // min(inner, node), -(-ranks // node) // -(-inner // node))

    @property
    def dp(self) -> int:
        """Return how many sequences, or parts of so many, are under way on all ranks."""
        return self.state_ranks // self.sp

    @property
    def head_ranks(self) -> int:
        """Return U, the ranks that share the heads of the same tokens."""
        return self.sp // self.ring

    @property
    def kv_groups(self) -> int:
        """Return how many head groups have key/value heads of their own; others share one, which
        goes around a ring with each of them."""
        return min(self.head_groups, max(1, self.column.kv_heads // self.head_ranks))

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of an element of dk, dv on its way around a ring."""
        return self.dtype.itemsize if self.ring == 2 else self.accum_bytes

    @property
    def micro_batches(self) -> int:
        """Return M."""
        return self.batch // self.dp // self.micro_batch

    @property
    def in_flight(self) -> int:
        """Return how many layers' activations wait for their backward on a stage, at the most."""
        v = self.pp_chunks
        passes = self.pp if v == 1 else self.pp * (v + 1) - 1
        return min(passes, v * self.micro_batches) * self.part_layers

    @functools.cached_property
    def collectives(self):
        """Return the table in shard.py's docstring, a row a collective: its stream and operation,
        among every inner-th of so many neighbours, which hold an inner-th part of each matrix, and
        inner; whether micro-batches before the last run it, and whether the last does."""
        p, g, os = astuple(self.factors)
        apart = g > p  # a rank keeps its owned part of gradients alone
        intra = self.os_layout == "intra"
        sums = "grad_scatter" if apart else "grad_reduce"
        # of layout inter the last sum over all replicas takes the place of that inside
        last, inner = ("grad_reduce", os) if intra else (sums, p)
        return (
            ("param_gather", "all_gather", p, 1, True, True),
            ("grad_scatter", "reduce_scatter", p, 1, True, True),
            (sums, "reduce_scatter" if intra else "all_reduce", os, p, apart, intra),
            (last, "all_reduce", self.state_ranks, inner, False, True),
            ("param_broadcast", "all_gather" if intra else "broadcast", os, p, False, True),
        )

    @property
    def gpu_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def step_s(self) -> float:
        return float(sum(self.seconds.values()))  # numpy's are among them

    def rates(self, seconds: float, peak: float | None, seen: float | None = None) -> dict:
        """Return what a step that takes so many seconds does: tokens a GPU and second (TGS), and
        MFU, None of a GPU whose FLOP/s are not known. seen: flops_per_token's."""
        tgs = self.batch * self.seq / seconds / self.ranks
        causal, full = (
            peak and flops * tgs / peak for flops in flops_per_token(self.model, self.seq, seen)
        )
        return {"tgs": tgs, "mfu_causal": causal, "mfu_full": full}

    @property
    def token_s(self) -> float:
        """Return seconds a token of a rank: plans of other batches compare by it."""
        return self.step_s * self.ranks / (self.batch * self.seq)


@functools.cache
def block_matrices(block_class, cfg):
    """Return (rows, cols) of a block's matrices in the order of use."""
    with torch.device("meta"):
        return tuple(matrix.shape for matrix in matrices_of(block_class(cfg)))


# ---------------------------------------------------------------------------- bytes of layers

LayerBytes = tuple[float, float, float]  # of x, of o and its log-sum-exp, of all else


def column_bytes(plan: Plan) -> LayerBytes:
    """Return S_input, S_attn and S_others of a micro-batch on one rank (Memo, section 4.1): x; o
    and the log-sum-exp; what model.Block saves beside them, as it really does: q, k, v, h, gate|up
    and 1 / rms of x and h. In fsp x and h are of own tokens (1 / rms, too: 8 bytes, counted of
    all).

    With H = K and F = 8/3 C a layer so keeps 11 1/3 C elements a token, the log-sum-exp and two
    numbers (Memo's 16 C less norm(x), norm(h) and SwiGLU, which are computed again)."""
    cfg, e, tokens = plan.column, plan.dtype.itemsize, plan.tokens
    q, kv = plan.widths
    x = tokens * cfg.dim * e
    pre, post, *_ = block_saves(cfg, tokens, plan.dtype)
    others = tokens * (q + kv) * e + sum(t.nbytes for t in pre + post)
    elsewhere = x - x / plan.tp if plan.tp_mode == "fsp" else 0
    attn = tokens * (q * e + cfg.heads * plan.accum_bytes)
    return x - elsewhere, attn, others - elsewhere


def parts_on_host(plan):
    """Return of how many layers x, and o, leave for the host. Fields may be arrays (an entry a
    plan), here and below."""
    away = plan.swapped_layers
    outputs = np.maximum(0, away - plan.layers_recomputing_attention)
    return away // plan.stride, outputs  # groups leave as wholes


def resident_bytes(plan: ActivationPlan, layer: LayerBytes) -> float:
    """Return the most bytes of a rank that hold what layers keep: in resident layers, in two
    rounding buffers, and what backward makes again of a group of layers. layer: column_bytes."""
    x, attn, others = layer
    n, m = plan.layers, plan.stride
    away, dropped = plan.swapped_layers, plan.layers_recomputing_attention
    most = 2 * (away > 0) * (x + attn)  # in forward two are leaving
    # it is most at the last groups, one of which has fewer layers, and at the last that drop o
    last_dropping = (dropped - 1) // m
    for group in ((n - 1) // m, n // m - 1, last_dropping, last_dropping - 1):
        first = np.maximum(0, group) * m
        end = np.minimum(n, first + m)
        # what resident layers have left, and what is made again
        inputs = -(-np.maximum(0, end - away) // m) + end - first - 1
        again = np.clip(dropped - first, 0, end - first)
        outputs = np.maximum(0, end - np.maximum(away, dropped)) + again
        kept = (end == n) * plan.kept_chunks * others / plan.chunks
        most = np.maximum(most, inputs * x + outputs * attn + kept)
    groups, outputs = parts_on_host(plan)
    swapped = -(-plan.swapped_chunks // np.maximum(1, away))
    # of two rounding buffers: a group keeps most if it is the last that leaves
    largest = x + np.minimum(m, outputs) * attn + swapped * others / plan.chunks
    return most + 2 * (groups > 0) * largest


def host_bytes(plan: ActivationPlan, layer: LayerBytes) -> float:
    """Return the bytes of a rank for the host buffers of the layers that are swapped."""
    x, attn, others = layer
    inputs, outputs = parts_on_host(plan)
    return inputs * x + outputs * attn + plan.swapped_chunks * others / plan.chunks


# ---------------------------------------------------------------------------- bytes of a step


def sent_bytes(plan: Plan) -> float:
    """Return the bytes of all-to-all buffers: q, k, v, o and do of two head groups, dq, dk and dv
    of one (attention.Ulysses). Groups that share a key/value head have one place for it."""
    q, kv = plan.widths
    groups, kv_groups = plan.head_groups, plan.kv_groups
    columns = (3 * min(2, groups) + 1) * q / groups
    columns += (min(2, kv_groups) + 1) * kv / kv_groups
    return (plan.head_ranks > 1) * plan.tokens * columns * plan.dtype.itemsize


def working_bytes(plan):
    """Return the bytes that a step needs at most beside all that lasts: in attention's backward, in
    a chunk's products, or in head and loss."""
    cfg, groups, e = plan.column, plan.head_groups, plan.dtype.itemsize
    wide = plan.accum_bytes / e
    x, (q, kv) = cfg.dim, plan.widths  # in columns of N tokens, as all but logits and loss
    products = 4 * cfg.ffn / plan.chunks  # of down da, a and dgate|up
    grads = q + kv
    held = 2 * x + q
    kept = plan.activations
    if kept:
        again = kept.kept_chunks < kept.chunks  # gate|up, q, k, v, unless the last layer's stay
        products *= 1 + again / 2
        held += again * grads * (1 + cfg.qk_norm)
        if kept.chunks > 1 and plan.head_ranks * groups > 1:  # in the places of q, k, v
            grads = 0.0
    # of a head group q, k, v, o, do and gradients; of two what is sent and received
    several = 2 * min(2, groups) if plan.head_ranks > 1 else groups > 1
    buffers = several * (4 * q + 2 * kv) / groups
    # the kernel's sums in float32: of q, with fewer key/value heads of k and v, and two of rows;
    # those of one head group are still there as the next one begins
    sums = wide * (q + kv * (cfg.heads > cfg.kv_heads) + 2 * cfg.heads) / groups
    first = (plan.head_ranks > 1) * (3 * q + kv) / groups
    if plan.ring > 1:
        # k, v and sums of this step and the next; dq
        turning = 3 * plan.sum_bytes / e + 1 + 2 * (groups > 1)
        buffers += (turning * kv + 3 * q) / groups
        first += 2 * kv / groups
    if plan.tp > 1:  # dy, dx, inputs of all tokens, and copies for a sum
        products += 3 * x + 2 * x / plan.chunks
    logits = 2 * min(LOSS_ELEMENTS, plan.own_tokens * cfg.vocab) + cfg.vocab * x
    loss = plan.accum_bytes * logits + 3 * plan.own_tokens * e * x
    column = plan.tokens * e
    angles = plan.in_flight / plan.part_layers * wide * cfg.head_dim  # of each pass
    return column * angles + max(
        column * (held + grads + buffers + min(2, groups) * sums),
        sent_bytes(plan) + max(column * (held + first + products), loss),
    )


def largest_matrix(plan):
    return max(map(math.prod, (*plan.matrices, plan.end)))


def imbalance(plan):
    """Return the largest share of whole matrices among their owners over the mean (layout inter):
    nearly as much for all, or the largest matrix."""
    owners = (plan.os_layout == "inter") * plan.factors.os / plan.factors.p
    return max(1.0, largest_matrix(plan) * owners / plan.params)


def state_bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of states of a rank (AMSP, section IV); gradients of several micro-batches
    add up in float32."""
    f, more = plan.factors, imbalance(plan)
    return {
        "parameters": plan.dtype.itemsize * plan.params / f.p,
        "gradients": plan.grad_bytes * plan.params / f.g * (more if f.g > f.p else 1),
        "optimizer": plan.moment_bytes * plan.params / f.os * more,
    }


def with_memory(plan: Plan) -> Plan:
    """Return the plan with its bytes counted."""
    f, e, kept = plan.factors, plan.dtype.itemsize, plan.activations
    # of embedding and head one each, of a layer's matrices two (shard.States)
    ends = plan.ends * math.prod(plan.end)
    layers = 2 * sum(map(math.prod, plan.matrices))
    # chunks add up in float32, those of several micro-batches where these do
    adds_up = plan.chunks > 1 and plan.micro_batches == 1
    wide = plan.accum_bytes if plan.chunks > 1 else e
    layer = column_bytes(plan)
    memory = state_bytes(plan) | {
        "gathered weights": (layers + ends) * e * (f.p > 1),
        "whole gradients": ends * e * (f.g > 1) + (f.g > 1 or adds_up) * layers * wide,
        "activations": plan.in_flight * sum(layer),
        "messages": 4 * message_bytes(plan),  # sent and received, there and back
        "working": working_bytes(plan),
    }
    host = {}
    if kept:
        times = plan.in_flight / kept.layers
        memory["activations"] = times * resident_bytes(kept, layer)
        host["activations"] = times * host_bytes(kept, layer)
    if plan.os_place == "host":
        host["optimizer"] = memory.pop("optimizer")
        visit = largest_matrix(plan) / (f.p if plan.os_layout == "inter" else f.os)
        if not OPTIMIZERS[plan.optimizer].whole:
            visit = min(visit, VISIT_ELEMENTS)
        memory["visiting states"] = VISIT_BUFFERS * plan.moment_bytes * visit
    return replace(plan, memory=memory, host=host)


def message_bytes(plan):
    """Return the bytes of a micro-batch between two stages, if there are several."""
    return (plan.pp > 1) * plan.own_tokens * plan.model.dim * plan.dtype.itemsize


# ---------------------------------------------------------------------------- seconds of operations


class Estimator:
    """Seconds of operations on a machine."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.held = set()  # what lies outside the profile's points, in words
        self.products = functools.cache(self.products)
        self.collective = functools.cache(self.collective)

    def products(self, kinds, tokens, rows, cols):
        """Return seconds of products of (tokens, cols) and a matrix (rows, cols)."""
        flops, width = 2 * tokens * rows * cols, math.sqrt(rows * cols)
        return sum(
            flops / interpolate_twice(self.profile.products[kind], tokens, width) for kind in kinds
        )

    def moved(self, plan, columns):
        """Return seconds of element-wise kernels that read and write tensors (N, columns)."""
        return plan.tokens * columns * plan.dtype.itemsize / self.profile.memory

    def collective(self, op, size, mesh):
        """Return seconds of a collective on so many bytes (AMSP, section IV): t = bytes /
        bandwidth(op, bytes, mesh). Between measured numbers of nodes the bandwidth is interpolated,
        for GPUs of a node the nearest is taken, and outside it is held."""
        if mesh == (1, 1) or not size:
            return 0.0
        per_node, nodes = mesh
        tables = self.profile.collectives[op]
        if f"{per_node}x{nodes}" not in tables:
            self.held.add(f"{op} over {per_node}x{nodes}")
        by_distance = {}
        for name, points in tables.items():
            near, known = map(int, name.split("x"))
            distance = (known > 1) != (nodes > 1), abs(math.log(near / per_node))
            by_distance.setdefault(distance, []).append([known, interpolate(points, size)])
        return size / interpolate(sorted(by_distance[min(by_distance)]), nodes)


def beside(compute, other, slow):
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
    named: dict[str, float]  # of both passes: attention, all-to-all, tensor exchanges


def layer_seconds(est: Estimator, plan: Plan) -> LayerSeconds:
    """Return the seconds of model.Block, whole or in chunks of tokens."""
    cfg = plan.column
    copied = plan.chunks > 1  # chunks are put together and cut
    # in the gradient's own place, in float32, where several contributions add up
    summed = copied or (plan.micro_batches > 1 and plan.factors.g == 1)

    def products(*kinds):
        return [
            plan.chunks * est.products(kinds, plan.tokens / plan.chunks, *matrix)
            for matrix in plan.matrices
        ]

    first, *later = products("forward")
    *earlier, last = products("input_grad", "weight_grad_sum" if summed else "weight_grad")
    q, kv = plan.widths
    # columns exchange in the open; in forward as part of post, where chunks' products are joined
    size = plan.tokens * cfg.dim * plan.dtype.itemsize
    ops = ("all_reduce",) if plan.tp_mode == "mtp" else ("all_gather", "reduce_scatter")
    exchanged = [2 * est.collective(op, size, (plan.tp, 1)) for op in ops]
    columns = sum(exchanged)
    columns_back = columns + exchanged[0] * (plan.tp_mode == "fsp")
    # norms are of own tokens
    dim = cfg.dim / plan.tp if plan.tp_mode == "fsp" else cfg.dim
    # read and written, in columns: norms, rotation; second norm, residuals, SwiGLU; backward
    pre = first + est.moved(plan, 2 * dim + (2 + 2 * copied) * (q + kv))
    moved = 7 * dim + 3 * cfg.ffn + copied * 2 * cfg.dim
    post = sum(later) + est.moved(plan, moved) + columns
    final = last + est.moved(plan, 6 * cfg.ffn)
    moved = 10 * dim + 2 * (q + kv) + copied * (2 * q + 3 * cfg.dim)
    rest = sum(earlier) + est.moved(plan, moved)
    kernel, exchange = attention_seconds(est, plan, False)
    kernel_back, exchange_back = attention_seconds(est, plan, True)
    return LayerSeconds(
        forward=pre + kernel + exchange + post,
        backward=final + rest + kernel_back + exchange_back + columns_back,
        final=final,
        attention=kernel + exchange,
        post=post,
        recompute=pre + post - later[-1] - columns / 2,  # without the last product, and its sum
        named={
            "attention": kernel + kernel_back,
            "all-to-all": exchange + exchange_back,  # and around a ring
            "tensor exchanges": columns + columns_back,
        },
    )


def attention_seconds(est, plan, backward):
    """Return the seconds of attention's kernel, forward or backward, with what is copied for it;
    and of the all-to-alls and the ring that no computation hides. Other head groups and the ring's
    next part travel under the kernel; the first group's way there and the last one's way back in
    the open, but in backward of chunks under products (attention.Ulysses)."""
    groups, e = plan.head_groups, plan.dtype.itemsize
    q, kv = plan.widths
    # columns that travel to heads, and back to tokens, and that a ring merges
    name, flops, there, back, merged = (
        ("backward", 5, 3 * q + kv, q + kv, 10 * q + 4 * kv)
        if backward
        else ("forward", 2, q + kv, q, 6 * q)
    )
    # a ring's kernels are squares of its part of a sequence
    rate = interpolate(est.profile.attention[name], plan.seq / plan.ring)
    kernel = flops * q * plan.tokens * plan.seq / rate
    if plan.ring > 1:  # merged, and summed, in float32
        kernel += est.moved(plan, merged + 3.75 * (plan.ring - 1) * back)
    if plan.head_ranks * groups > 1:  # copies to and from the order of heads
        kernel += est.moved(plan, 2 * (there + back))
    exchange = sum(
        est.collective("all_to_all", plan.tokens * columns * e / groups, plan.mesh(plan.head_ranks))
        for columns in (there, back)
    )
    parts = plan.ring * plan.tokens * kv * e / plan.kv_groups
    ring = plan.mesh(plan.sp, plan.head_ranks)
    around = groups * est.collective("all_gather", parts, ring)
    if backward:  # dk, dv too
        around *= 1 + plan.sum_bytes / e
    # a ring takes multiprocessors; all-to-alls in a node, copy engines alone
    slow = est.profile.overlap["collectives" if plan.ring > 1 else "all_to_all"]
    opened = 0.0 if backward and plan.recompute == "auto" else exchange
    return kernel, opened + sum(beside(kernel, groups * exchange - opened + around, slow))


def head_seconds(est, plan):
    """Return the seconds of head and loss, whose gradients are computed at once, and of the
    embedding's."""
    vocab, dim = plan.end
    e, wide = plan.dtype.itemsize, plan.accum_bytes
    kinds = "forward", "input_grad", "weight_grad_sum"
    products = est.products(kinds, plan.own_tokens, vocab, dim)
    logits = plan.own_tokens * vocab * (5 * wide + e)  # read and written
    ends = vocab * dim * (2 * wide + 4 * e)  # gradients
    return products + (logits + ends) / est.profile.memory


# ---------------------------------------------------------------------------- seconds of states


def unit_seconds(est, plan, matrices):
    """Return the seconds, each stream alone, of a layer's matrices, or of the embedding or the
    head: param_gather, grad_scatter, grad_reduce, param_broadcast (as STREAMS), and grad_scatter of
    micro-batches before the last."""
    found = np.zeros(5)
    for stream, op, ranks, inner, earlier, last in plan.collectives:
        mesh, size = plan.mesh(ranks, inner), plan.dtype.itemsize / inner
        seconds = sum(est.collective(op, size * math.prod(matrix), mesh) for matrix in matrices)
        found[STREAMS.index(stream)] += last * seconds
        found[4] += (stream == "grad_scatter") * earlier * seconds
    return found


def update_bytes(dtype: torch.dtype) -> int:
    """Return the bytes per parameter that AdamW reads and writes: it reads a gradient, the master
    weight and two moments, and writes a weight, the master weight and two moments."""
    return 2 * (dtype.itemsize + ADAMW.bytes_per_parameter(accumulation_dtype(dtype)))


def visit_seconds(est: Estimator, plan: Plan) -> float:
    """Return seconds of a layer's forward in which optimizer states take the link to the host:
    there and back."""
    moved = state_bytes(plan)["optimizer"] * (plan.os_place == "host")
    return moved / est.profile.visits / (plan.stage_layers * plan.micro_batches)


def not_hidden(est, plan, compute, traffic, final=math.inf):
    """Yield by name the seconds by which communication makes a pass longer. What stays in a node
    and what crosses nodes take other wires, of which the one that is late counts; what does not
    overlap runs in the open, by its stream. final: of backward, LayerSeconds.final of all layers.
    There a whole layer gathers a matrix ahead, behind the gradients of the layer before: these and
    half of the weights hide under the last matrix alone."""
    across = {stream for stream, _, ranks, *_ in plan.collectives if ranks > plan.in_node}
    wires = [0.0, 0.0]
    for name, seconds in traffic.items():
        if name in plan.overlap:
            wires[name in across] += seconds
        else:
            yield name, seconds
    hides = [compute, compute]
    slow_compute, slow_other = slow = est.profile.overlap["collectives"]
    weights = traffic["param_gather"]
    if weights and plan.recompute == "none":
        behind = final + weights / 2 * slow_other / slow_compute
        hides["param_gather" in across] = min(compute, behind)
    inside, between = (beside(hide, wire, slow) for hide, wire in zip(hides, wires))
    late, slowed = max(inside, between, key=sum)
    yield "communication " + ("in a node" if sum(inside) > sum(between) else "across nodes"), late
    yield "slowed by communication", slowed


def traffic_seconds(est, plan, forward, backward, final):
    """Return what states add to a step: communication as far as no pass hides it, and what the GPU
    itself does. forward, backward: a micro-batch's seconds of all layers of a stage; final:
    LayerSeconds.final of all.

    The first forward hides new parameters, the last backward sums over replicas, each pass what is
    gathered for it. In the open are the embedding's and the first layer's before the one, and
    after the other."""
    layers, count = plan.stage_layers, plan.micro_batches
    layer = unit_seconds(est, plan, plan.matrices)
    end = unit_seconds(est, plan, [plan.end])
    *alone, first_earlier = layer + end
    gather, scatter, reduce, broadcast, earlier = (layers - 1) * layer + (plan.ends - 1) * end
    sums, casts, update = own_seconds(est, plan)
    casts *= alone[2] > 0
    backward += sums
    # the last two layers' buffers still hold their weights
    gathers = {"param_gather": max(0, layers - 2) * layer[0]}
    passes = [
        (1, 0.0, dict(zip(STREAMS, alone))),
        (1, forward, {"param_gather": gather, "param_broadcast": broadcast}),
        (count - 1, forward, gathers),
        (count - 1, backward, gathers | {"grad_scatter": earlier + first_earlier}, final),
        (1, backward + casts, gathers | {"grad_scatter": scatter, "grad_reduce": reduce}, final),
    ]
    visits = layers * count * visit_seconds(est, plan)
    total = Counter(
        {
            "gradient sums": count * sums + casts,
            "optimizer": update,
            "host_update": max(0.0, visits - forward * ("host_update" in plan.overlap)),
        }
    )
    for times, *rest in passes:
        for name, seconds in not_hidden(est, plan, *rest):
            total[name] += times * seconds
    return total


def own_seconds(est, plan):
    """Return the seconds in which a GPU adds a micro-batch's gradients to those it keeps; casts
    their sums to the type in which they travel, and back; and takes their norm and updates."""
    f, e, wide = plan.factors, plan.dtype.itemsize, plan.grad_bytes
    added = (e + 2 * wide) / f.g
    if plan.chunks > 1:  # they add up in float32, and are cast whole
        added += plan.accum_bytes + e
    element = plan.params / est.profile.memory
    moved = imbalance(plan) * update_bytes(plan.dtype) / est.profile.optimizer
    return (
        (f.g > 1) * added * element,
        (wide != e) * 2 * (wide + e) / f.g * element,
        (plan.params * moved + wide * element) / f.os,
    )


# ---------------------------------------------------------------------------- seconds of a step


def lost_seconds(
    plan: ActivationPlan, layer: LayerBytes, s: LayerSeconds, bandwidth: float, busy: float
) -> tuple[float, float]:
    """Return the seconds of a micro-batch's backward in which parts of its forward run again, and
    of its forward in which compute waits for copies. busy: of a layer's forward, in which others
    copy."""
    saved = (plan.kept_chunks + plan.swapped_chunks) / plan.chunks
    inputs = -(-plan.layers // plan.stride)
    dropped = plan.layers_recomputing_attention
    again = (
        (plan.layers - saved) * s.recompute
        + (plan.layers - inputs) * s.post
        + (dropped - dropped // plan.stride) * (s.forward - s.attention - s.post)
        + dropped * s.attention
    )
    hidden = plan.swapped_layers * max(0.0, s.forward - busy)
    return again, np.maximum(0.0, host_bytes(plan, layer) / bandwidth - hidden)


def step_seconds(est: Estimator, plan: Plan, states: bool = True) -> dict[str, float]:
    """Return a step's seconds by what takes them: they add up to the step. states: with what these
    add; what layers lose is counted once they say what they keep."""
    layers, count = plan.stage_layers, plan.micro_batches
    layer, launch = layer_seconds(est, plan), est.profile.launch
    again = waits = 0.0
    if plan.activations:
        lost = lost_seconds(
            plan.activations,
            column_bytes(plan),
            layer,
            est.profile.to_host,
            visit_seconds(est, plan),
        )
        again, waits = (seconds / plan.part_layers for seconds in lost)
    # the host must launch a pass in less than it takes
    forward = max(layer.forward, plan.chunks * launch["forward"])
    backward = max(layer.backward + again, plan.chunks * launch["backward"])
    both = layer.forward + layer.backward
    of_layer = layer.named | {
        "rest of layers": both - sum(layer.named.values()),
        "recomputation": again,
        "copies": waits,
        "launches": forward + backward - both - again,
    }
    seconds = {name: count * layers * value for name, value in of_layer.items()}
    seconds["head and loss"] = count * head_seconds(est, plan)
    # while a micro-batch goes through a part of each other stage
    seconds["pipeline idle"] = (forward + backward) * (plan.model.layers - layers) / plan.pp_chunks
    if states:
        pair = (1, 2) if plan.ranks > plan.per_node else (2, 1)
        message = est.collective("all_gather", 2 * message_bytes(plan), pair)
        seconds["stage messages"] = exposed_messages(plan) * message
        seconds |= traffic_seconds(
            est, plan, layers * forward, layers * backward, layers * layer.final
        )
    return seconds


def exposed_messages(plan):
    """Return how many messages all stages wait for. With one part a stage, whose first backward is
    due as it arrives, P micro-batches wait for the 2 (P - 1) of one; and at first and last for
    those to and from other stages than the last. With several parts there are passes to run
    meanwhile, but under the first micro-batch."""
    stages = plan.pp
    if plan.pp_chunks > 1:
        return 2 * (stages * plan.pp_chunks - 1)
    return 2 * (stages - 1) * plan.micro_batches / stages + 2 * (stages - 2)


def predict(plan: Plan, profile: Profile) -> Plan:
    """Return a plan, what its layers keep included, with its bytes and seconds."""
    return replace(with_memory(plan), seconds=step_seconds(Estimator(profile), plan))
