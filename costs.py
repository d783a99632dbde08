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

Left out: ranks that wait for a slower one, the first step's compilation, and gathers of weights
that the host still updates. If you change model.Block, only its matrices are counted; its
element-wise kernels are assumed to be ours. A pipeline's parts are timed as if a micro-batch ran
through all of a stage's layers at once.

Legend: N tokens on a rank at once (of all its columns), L layers, M micro-batches a step, C width,
H query heads, K key/value heads, D head width, F feed-forward width, V vocabulary; p, g, os shards;
mesh (GPUs in a node, nodes) of a group of ranks; of pipelines P stages, V parts of the model on
one; of what layers keep n layers, k resident layers, m layers of which one keeps x, X without o.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import model as llama
from hardware import Profile, interpolate, interpolate_twice, mesh_name, update_bytes
from model import LOSS_ELEMENTS, ModelConfig, accumulation_dtype, param_count
from offload import ActivationPlan, block_saves
from parallel import part_layers
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
    ring: int = (
        1  # of them, by context: each has a part of the tokens; the others share heads
    )
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
    memory: dict[str, float] = field(
        default_factory=dict
    )  # bytes of a GPU, by what they are for
    host: dict[str, float] = field(
        default_factory=dict
    )  # bytes of a rank there, likewise
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
    def end(self) -> tuple[int, int]:
        """Return (rows, cols) of the embedding, and of the head."""
        return self.model.vocab, self.model.dim

    @property
    def ends(self) -> int:
        """Return how many of them a stage has."""
        return 2 if self.pp == 1 else 1

    @property
    def accum_bytes(self) -> int:
        """Return the bytes of an element where sums are kept: in float32, or wider."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def grad_bytes(self) -> int:
        """Return the bytes of a gradient's element where it is kept."""
        return self.accum_bytes if self.accumulates else self.dtype.itemsize

    @property
    def part_layers(self) -> int:
        """Return the most layers of a part of the model."""
        return -(-self.model.layers // (self.pp * self.pp_chunks))

    @property
    def stage_layers(self) -> int:
        """Return the most layers of a stage: the last one's."""
        parts = self.pp * self.pp_chunks
        return sum(
            len(part_layers(self.model.layers, self.pp, self.pp_chunks, part))
            for part in range(self.pp - 1, parts, self.pp)
        )

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
        return min(self.per_node, self.ranks // self.pp) // self.tp

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
    def in_flight(self) -> int:
        """Return how many layers' activations wait for their backward on a stage, at the most."""
        v = self.pp_chunks
        passes = self.pp if v == 1 else self.pp * (v + 1) - 1
        return min(passes, v * self.micro_batches) * self.part_layers

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank has its part of tokens alone between products."""
        return self.tp > 1 and self.tp_mode != "mtp"

    @property
    def gpu_bytes(self) -> float:
        return sum(self.memory.values())

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
    return replace(
        cfg, heads=cfg.heads // tp, kv_heads=cfg.kv_heads // tp, ffn=cfg.ffn // tp
    )


@functools.cache
def block_matrices(block_class, cfg: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return (rows, cols) of a block's matrices in the order of use."""
    with torch.device("meta"):
        block = block_class(cfg)
    return tuple(m.shape for m in block.modules() if isinstance(m, llama.Matrix))


# ---------------------------------------------------------------------------- bytes of layers


def layer_bytes(
    cfg: ModelConfig, tokens: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Return S_input, S_attn and S_others of `tokens` tokens (Memo, section 4.1): x; o and the
    log-sum-exp; what model.Block saves beside them, as it really does: q, k, v, h and gate|up.

    With H = K and F = 8/3 C a layer so keeps 11 1/3 C elements a token (Memo's 16 C less norm(x),
    norm(h) and SwiGLU, which are computed again)."""
    e = dtype.itemsize
    heads = cfg.heads * cfg.head_dim
    qkv = heads + 2 * cfg.kv_heads * cfg.head_dim
    sums = cfg.heads * accumulation_dtype(dtype).itemsize
    pre, post, _ = block_saves(cfg, tokens, dtype)
    others = tokens * qkv * e + sum(t.nbytes for t in pre + post)
    return tokens * cfg.dim * e, tokens * (heads * e + sums), others


def column_bytes(plan: Plan) -> tuple[float, float, float]:
    """Return layer_bytes of a plan's micro-batch on one rank: in fsp x and h are of own tokens."""
    x, attn, others = layer_bytes(plan.column, plan.tokens, plan.dtype)
    own = x / plan.tp if plan.tp_mode == "fsp" else x
    return own, attn, others - x + own


def kept_parts(plan: ActivationPlan) -> tuple:
    """Return the number of layers whose x, and whose o, stay on the GPU; then the same for the
    host. Fields may be arrays (an entry a plan)."""
    away = plan.layers - plan.resident
    dropped = plan.layers_recomputing_attention
    inputs_away = away // plan.stride  # groups leave as wholes
    inputs = -(-plan.layers // plan.stride) - inputs_away
    outputs = np.minimum(plan.resident, plan.layers - dropped)
    return inputs, outputs, inputs_away, np.maximum(0, away - dropped)


def rounding_bytes(plan: ActivationPlan, layer: tuple[float, float, float]) -> float:
    """Return the bytes of two rounding buffers; layer: layer_bytes. Also of many plans."""
    x, attn, others = layer
    _, _, groups, outputs = kept_parts(plan)
    swapped = np.ceil(plan.swapped_chunks / np.maximum(1, plan.layers - plan.resident))
    # a group keeps most if it is the last that leaves
    largest = x + np.minimum(plan.stride, outputs) * attn + swapped * others / plan.chunks
    return 2 * (groups > 0) * largest


def resident_bytes(plan: ActivationPlan, layer: tuple[float, float, float]) -> float:
    """Return the most bytes of a rank that hold what layers keep: in resident layers, in two
    rounding buffers, and what backward makes again of a group of layers. Also of many plans.
    """
    x, attn, others = layer
    n, m = plan.layers, plan.stride
    away = n - plan.resident
    dropped = plan.layers_recomputing_attention
    most = 0.0
    # it is most at the last groups, one of which has fewer layers, and at the last that drop o
    last_dropping = np.maximum(0, dropped - 1) // m
    for group in ((n - 1) // m, n // m - 1, last_dropping, last_dropping - 1):
        first = np.maximum(0, group) * m
        end = np.minimum(n, first + m)
        inputs = -(-np.maximum(0, end - away) // m)
        outputs = np.maximum(0, end - np.maximum(away, dropped))
        again = (end - first - 1) * x + np.clip(dropped - first, 0, end - first) * attn
        kept = (end == n) * plan.kept_chunks * others / plan.chunks
        most = np.maximum(most, inputs * x + outputs * attn + again + kept)
    return most + rounding_bytes(plan, layer)


def host_bytes(plan: ActivationPlan, layer: tuple[float, float, float]) -> float:
    """Return the bytes of a rank for the host buffers of the layers that are swapped. Also of many
    plans."""
    x, attn, others = layer
    _, _, inputs, outputs = kept_parts(plan)
    return inputs * x + outputs * attn + plan.swapped_chunks * others / plan.chunks


# ---------------------------------------------------------------------------- bytes of a step


def sent_bytes(plan: Plan) -> float:
    """Return the bytes of all-to-all buffers: q, k, v, o and do of two head groups, dq, dk and dv
    of one (attention.Ulysses). Groups that share a key/value head have one place for it.
    """
    cfg = plan.column
    groups = plan.head_groups
    if plan.head_ranks == 1:
        return 0
    kv_groups = min(groups, cfg.kv_heads // plan.head_ranks)
    heads = (3 * min(2, groups) + 1) * cfg.heads / groups
    heads += (2 * min(2, kv_groups) + 2) * cfg.kv_heads / kv_groups
    return plan.tokens * cfg.head_dim * plan.dtype.itemsize * heads


def bytes_of_sums(plan: Plan) -> int:
    """Return the bytes of an element of dk, dv on its way around a ring."""
    return plan.dtype.itemsize if plan.ring == 2 else plan.accum_bytes


def ring_traffic(plan: Plan) -> float:
    """Return the bytes that a rank sends around its ring in a step."""
    kv = 2 * plan.tokens * plan.column.kv_heads * plan.column.head_dim
    of_layer = kv * (2 * plan.dtype.itemsize + bytes_of_sums(plan))
    return (plan.ring - 1) * of_layer * plan.model.layers * plan.micro_batches


def working_bytes(plan: Plan) -> float:
    """Return the bytes that a step needs at most beside all that lasts: in attention's backward, in
    a chunk's products, or in head and loss."""
    cfg, groups, e = plan.column, plan.head_groups, plan.dtype.itemsize
    token = plan.tokens * e
    x = token * cfg.dim
    q = token * cfg.heads * cfg.head_dim
    kv = 2 * token * cfg.kv_heads * cfg.head_dim
    kept = plan.activations
    inputs = buffers = ring = first = 0.0
    grads = q + kv
    rows = min(plan.chunk, plan.tokens) * e * (4 * cfg.ffn + 3 * cfg.dim)
    if kept is not None:
        rows *= 2  # made again, like q, k, v unless the last layer's stay
        saved, _, _ = block_saves(cfg, plan.tokens, plan.dtype)
        inputs = grads * (kept.kept_chunks < kept.chunks)
        inputs += sum(t.nbytes for t in saved)
        if kept.chunks > 1 and plan.head_ranks * groups > 1:  # in the places of q, k, v
            grads = 0.0
    if plan.head_ranks > 1:  # of two groups what is sent and received
        buffers = min(2, groups) * 2 * (4 * q + 2 * kv) / groups
        first = (3 * q + kv) / groups
    elif groups > 1:
        buffers = (4 * q + 2 * kv) / groups
    if plan.ring > 1:
        # k, v and sums of this step and the next; dq; copies of several sequences
        wide = bytes_of_sums(plan) / e
        ring = ((3 * wide + 1 + 2 * (groups > 1)) * kv + 3 * q) / groups
        ring += (plan.micro_batch > 1) * (1.5 * q + kv / 2) / groups
        first += 2 * kv / groups
    # the kernel's sums in float32: of q, and with fewer key/value heads of k and v
    sums = 4 / e * (q + kv * (cfg.heads > cfg.kv_heads)) / groups
    columns = 0.0
    if plan.tp > 1:  # dy, dx, inputs of all tokens, and copies for a sum
        columns = 3 * x + 2 * min(plan.chunk, plan.tokens) * e * cfg.dim
    tokens = plan.tokens // (plan.tp if plan.splits_tokens else 1)
    logits = 2 * min(LOSS_ELEMENTS, tokens * cfg.vocab) + cfg.vocab * cfg.dim
    return max(
        2 * x + inputs + q + grads + buffers + ring + 2 * sums,
        2 * x + inputs + q + first + sent_bytes(plan) + rows + columns,
        plan.accum_bytes * logits + 3 * tokens * e * cfg.dim + sent_bytes(plan),
    )


def stage_params(plan: Plan) -> float:
    """Return the parameters of a rank, before they are sharded."""
    layers = param_count(plan.column) - 2 * math.prod(plan.end)
    return layers * plan.stage_layers / plan.model.layers + plan.ends * math.prod(
        plan.end
    )


def state_bytes(
    params: float,
    f: Factors,
    dtype: torch.dtype,
    accumulates: bool,
    optimizer: str = "adamw",
) -> dict[str, float]:
    """Return the bytes of states of a rank (AMSP, section IV); `accumulates`: several micro-batches
    add up, in float32."""
    e = dtype.itemsize
    accum_bytes = accumulation_dtype(dtype).itemsize
    return {
        "parameters": e * params / f.p,
        "gradients": (accum_bytes if accumulates else e) * params / f.g,
        "optimizer": len(OPTIMIZERS[optimizer].states) * accum_bytes * params / f.os,
    }


def largest_matrix(plan: Plan) -> int:
    return max(math.prod(matrix) for matrix in (*plan.matrices, plan.end))


def imbalance(plan: Plan) -> float:
    """Return the largest share of whole matrices among their owners over the mean (layout inter):
    nearly as much for all, or the largest matrix."""
    if plan.os_layout == "intra":
        return 1.0
    owners = plan.factors.os / plan.factors.p
    return max(1.0, largest_matrix(plan) * owners / stage_params(plan))


def with_memory(plan: Plan) -> Plan:
    """Return the plan with its bytes counted."""
    f, e = plan.factors, plan.dtype.itemsize
    optimizer = OPTIMIZERS[plan.optimizer]
    memory = state_bytes(
        stage_params(plan), f, plan.dtype, plan.accumulates, plan.optimizer
    )
    memory["optimizer"] *= imbalance(plan)
    memory["gradients"] *= imbalance(plan) if f.g > f.p else 1
    # of embedding and head one each, of a layer's matrices two (shard.States)
    ends = plan.ends * math.prod(plan.end)
    layers = 2 * sum(math.prod(matrix) for matrix in plan.matrices)
    in_chunks = plan.chunks > 1
    adds_up = in_chunks and not plan.accumulates  # in float32
    memory["gathered weights"] = (layers + ends) * e * (f.p > 1)
    memory["whole gradients"] = ends * e * (f.g > 1) + (f.g > 1 or adds_up) * layers * (
        plan.accum_bytes if in_chunks else e
    )
    layer, kept = column_bytes(plan), plan.activations
    memory["activations"] = plan.in_flight * sum(layer)
    host = {}
    if kept is not None:
        times = plan.in_flight / kept.layers
        memory["activations"] = times * resident_bytes(kept, layer)
        host["activations"] = times * host_bytes(kept, layer)
    if plan.os_place == "host":
        host["optimizer"] = memory.pop("optimizer")
        visit = largest_matrix(plan) / (f.p if plan.os_layout == "inter" else f.os)
        visit = visit if optimizer.whole else min(visit, VISIT_ELEMENTS)
        memory["visiting states"] = (
            VISIT_BUFFERS * len(optimizer.states) * plan.accum_bytes * visit
        )
    memory["messages"] = 4 * message_bytes(plan)  # sent and received, there and back
    memory["working"] = working_bytes(plan)
    return replace(plan, memory=memory, host=host)


def message_bytes(plan: Plan) -> float:
    """Return the bytes of a micro-batch between two stages, if there are several."""
    columns = plan.tp if plan.splits_tokens else 1
    return (plan.pp > 1) * plan.tokens * plan.model.dim * plan.dtype.itemsize / columns


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
        rate = interpolate_twice(
            self.profile.products[kind], tokens, math.sqrt(rows * cols)
        )
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
        tables = {
            tuple(map(int, name.split("x"))): points
            for name, points in self.profile.collectives[op].items()
        }
        if not tables:
            raise ValueError(
                f"profile {self.profile.name}: measured on one rank, it has no rates "
                f"of {op}; --ranks 1, or another --cluster"
            )
        per_node, nodes = mesh
        alike = [there for there in tables if (there[1] > 1) == (nodes > 1)] or list(
            tables
        )
        nearest = min((g for g, _ in alike), key=lambda g: abs(math.log(g / per_node)))
        rates = sorted(
            [n, interpolate(tables[g, n], size)] for g, n in alike if g == nearest
        )
        known = min(max(nodes, rates[0][0]), rates[-1][0])
        if (nearest, known) != mesh:
            self.held.add(
                f"{op} over {mesh_name(mesh)} as over {mesh_name((nearest, known))}"
            )
        return size / interpolate(rates, known)


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

    def products(matrices: Iterable, *kinds: str) -> float:
        return plan.chunks * sum(
            est.product(kind, tokens, *matrix) for matrix in matrices for kind in kinds
        )

    first, *others = plan.matrices
    back = "input_grad", weight_grad
    heads = cfg.heads * cfg.head_dim
    qkv = heads + 2 * cfg.kv_heads * cfg.head_dim
    copied = plan.chunks > 1  # chunks are put together and cut
    # norms are of own tokens
    dim = cfg.dim / plan.tp if plan.tp_mode == "fsp" else cfg.dim
    # read and written, in columns: norms, rotation; second norm, residuals, SwiGLU; backward
    pre = products([first], "forward") + est.moved(plan, 2 * dim, (2 + 2 * copied) * qkv)
    post = products(others, "forward") + est.moved(
        plan, 7 * dim, 3 * cfg.ffn, copied * 2 * cfg.dim
    )
    final = products(others[-1:], *back) + est.moved(plan, 6 * cfg.ffn)
    backward = (
        final
        + products(plan.matrices[:-1], *back)
        + est.moved(plan, 10 * dim, 2 * qkv, copied * (2 * heads + 3 * cfg.dim))
    )
    kernel, exchange = attention_seconds(est, plan, False)
    kernel_back, exchange_back = attention_seconds(est, plan, True)
    columns, columns_back = column_exchanges(est, plan)
    post += columns  # where layers run in chunks, products are joined there
    return LayerSeconds(
        forward=pre + kernel + exchange + post,
        backward=backward + kernel_back + exchange_back + columns_back,
        final=final,
        attention=kernel + exchange,
        post=post,
        # the last product is left out, and its sum over columns
        recompute=pre + post - products(others[-1:], "forward") - columns / 2,
        kernels=kernel + kernel_back,
        exchange=exchange + exchange_back,
        columns=columns + columns_back,
    )


def column_exchanges(est: Estimator, plan: Plan) -> tuple[float, float]:
    """Return the seconds of what columns exchange, in the open, in a layer's forward and in its
    backward."""
    size = plan.tokens * plan.model.dim * plan.dtype.itemsize
    ops = ("all_reduce",) if plan.tp_mode == "mtp" else ("all_gather", "reduce_scatter")
    first, *others = (2 * est.collective(op, size, (plan.tp, 1)) for op in ops)
    both = first + sum(others)
    return both, both + first * (plan.tp_mode == "fsp")


def attention_seconds(est: Estimator, plan: Plan, backward: bool) -> tuple[float, float]:
    """Return the seconds of attention's kernel, forward or backward, with what is copied for it;
    and of the all-to-alls and the ring that no computation hides. Other head groups and the ring's
    next part travel under the kernel; the first group's way there and the last one's way back in
    the open, but in backward of chunks under products (attention.Ulysses)."""
    cfg, groups, e = plan.column, plan.head_groups, plan.dtype.itemsize
    q = cfg.heads * cfg.head_dim
    kv = 2 * cfg.kv_heads * cfg.head_dim
    # columns that travel to heads, and back to tokens
    there, back = (3 * q + kv, q + kv) if backward else (q + kv, q)
    flops = (5 if backward else 2) * q * plan.tokens * plan.seq
    rates = est.profile.attention["backward" if backward else "forward"]
    # a ring's kernels are squares of its part of a sequence
    kernel = flops / interpolate(rates, plan.seq / plan.ring)
    if plan.ring > 1:  # merged, and summed, in float32
        steps = 3.75 * (plan.ring - 1)
        kernel += est.moved(plan, 10 * q + 4 * kv if backward else 6 * q, steps * back)
    if plan.head_ranks * groups > 1:  # copies to and from the order of heads
        kernel += est.moved(plan, 2 * there, 2 * back)
    if plan.sp == 1:
        return kernel, 0.0
    exchange = sum(
        est.collective(
            "all_to_all", plan.tokens * columns * e / groups, plan.mesh(plan.head_ranks)
        )
        for columns in (there, back)
    )
    kv_groups = min(groups, cfg.kv_heads // plan.head_ranks)  # or each has one head
    parts = plan.ring * plan.tokens * kv * e / kv_groups
    around = groups * est.collective(
        "all_gather", parts, plan.mesh(plan.sp, plan.head_ranks)
    )
    if backward:  # dk, dv too
        around *= 1 + bytes_of_sums(plan) / e
    # a ring takes multiprocessors; all-to-alls in a node, copy engines alone
    slow = est.profile.overlap["collectives" if plan.ring > 1 else "all_to_all"]
    opened = 0.0 if backward and plan.recompute == "auto" else exchange
    return kernel, opened + sum(beside(kernel, groups * exchange - opened + around, slow))


def head_seconds(est: Estimator, plan: Plan) -> float:
    """Return the seconds of head and loss, whose gradients are computed at once, and of the
    embedding's."""
    vocab, dim = plan.end
    tokens = plan.tokens // (plan.tp if plan.splits_tokens else 1)
    rows = min(tokens, max(1, LOSS_ELEMENTS // vocab))
    products = sum(
        est.product(kind, rows, vocab, dim) * tokens / rows
        for kind in ("forward", "input_grad", "weight_grad_sum")
    )
    e, accum_bytes = plan.dtype.itemsize, plan.accum_bytes
    logits = tokens * vocab * (5 * accum_bytes + e)  # read and written
    ends = vocab * dim * (2 * accum_bytes + 4 * e)  # gradients
    return products + (logits + ends + 6 * tokens * dim * e) / est.profile.memory


# ---------------------------------------------------------------------------- seconds of states


def unit_seconds(
    est: Estimator, plan: Plan, matrices: tuple[tuple[int, int], ...]
) -> dict[str, float]:
    """Return the table in shard.py's docstring in seconds, each alone, of a layer's matrices, or of
    the embedding or the head: by streams, and what the GPU itself does for them."""
    f, e = plan.factors, plan.dtype.itemsize
    counts = [math.prod(matrix) for matrix in matrices]
    is_end = plan.end in matrices
    intra = plan.os_layout == "intra"
    kept_apart = f.g > f.p  # a rank keeps its owned part of gradients alone

    def alone(op: str, shards: int, mesh: tuple[int, int]) -> float:
        return sum(est.collective(op, e * count / shards, mesh) for count in counts)

    subgroup = plan.mesh(f.os, f.p)
    summed = f.os if intra else f.p  # shards of what is summed over the ranks that are left
    in_node, nodes = plan.mesh(plan.state_ranks, summed)
    over = alone("all_reduce", summed, (in_node * (plan.tp if is_end else 1), nodes))
    scatter = alone("reduce_scatter", 1, plan.mesh(f.p))
    inside = alone("reduce_scatter" if intra else "all_reduce", f.p, subgroup)
    each = scatter + inside * kept_apart
    if intra:
        last, reduce = each, over + inside * (not kept_apart)
    else:
        last, reduce = scatter + over * kept_apart, over * (not kept_apart)
    moved = sum(counts) / f.g / est.profile.memory
    keep = moved * (e + 2 * plan.grad_bytes) * (f.g > 1)
    if plan.chunks > 1 and f.g > 1 and not is_end:
        # they add up in float32, and are cast whole
        keep += moved * f.g * (plan.accum_bytes + e)
    owned = sum(counts) / f.os * imbalance(plan)
    visiting = 0
    if plan.os_place == "host":
        visiting = len(OPTIMIZERS[plan.optimizer].states) * plan.accum_bytes
    return {
        "param_gather": alone("all_gather", 1, plan.mesh(f.p)),
        "param_broadcast": alone("all_gather" if intra else "broadcast", f.p, subgroup),
        "earlier_scatter": each,  # of micro-batches before the last
        "grad_scatter": last,
        "grad_reduce": reduce,
        "host_update": owned * visiting / est.profile.visits,  # there and back
        "keep": keep,  # a micro-batch's gradients are added to grad_shard
        # to the type in which they travel, and back
        "cast": moved * 2 * (plan.grad_bytes + e) * (reduce > 0 and plan.grad_bytes != e),
        "update": owned * update_bytes(plan.dtype) / est.profile.optimizer,
    }


def visit_seconds(est: Estimator, plan: Plan) -> float:
    """Return seconds of a layer's forward in which optimizer states take the link to the host."""
    return unit_seconds(est, plan, plan.matrices)["host_update"] / plan.micro_batches


def across_nodes(plan: Plan) -> dict[str, bool]:
    """Return which streams cross nodes."""
    f = plan.factors
    nodes = plan.state_ranks > plan.in_node
    wide = f.os > plan.in_node
    return {
        "param_gather": f.p > plan.in_node,
        "param_broadcast": wide,
        "grad_reduce": nodes,
        "grad_scatter": wide or (nodes and plan.os_layout == "inter"),
    }


def not_hidden(
    est: Estimator, plan: Plan, compute: float, traffic: dict[str, float]
) -> dict[str, float]:
    """Return the seconds by which communication makes a pass longer, by its stream. What stays in a
    node and what crosses nodes take other wires, of which the busier one counts; what does not
    overlap runs in the open."""
    across = across_nodes(plan)
    wires: list[dict[str, float]] = [{}, {}]
    found = {}
    for name, seconds in traffic.items():
        (wires[across[name]] if name in plan.overlap else found)[name] = seconds
    wire = max(wires, key=lambda wire: sum(wire.values()))
    total = max(1e-30, sum(wire.values()))
    exposed, slowed = beside(compute, total, est.profile.overlap["collectives"])
    found |= {name: seconds * exposed / total for name, seconds in wire.items()}
    return found | {"slowed by communication": slowed}


def traffic_seconds(
    est: Estimator, plan: Plan, forward: float, backward: float, final: float
) -> dict[str, float]:
    """Return what states add to a step: communication by its stream, as far as no pass hides it,
    and what the GPU itself does. forward, backward: a micro-batch's seconds of all layers of a
    stage; final: LayerSeconds.final of all.

    The first forward hides new parameters, the last backward sums over replicas, each pass what is
    gathered for it. In the open are the embedding's and the first layer's before the one, and
    after the other. In backward a whole layer gathers a matrix ahead, behind the gradients of the
    layer before: these and half of the weights hide under the last matrix alone.
    """
    layers, count = plan.stage_layers, plan.micro_batches
    layer = unit_seconds(est, plan, plan.matrices)
    end = unit_seconds(est, plan, (plan.end,))
    total = {name: layers * layer[name] + plan.ends * end[name] for name in layer}
    alone = {name: layer[name] + end[name] for name in layer}

    def hidden(*names: str) -> dict[str, float]:
        return {name: total[name] - alone[name] for name in names}

    # the last two layers' buffers still hold their weights
    gathers = {"param_gather": max(0, layers - 2) * layer["param_gather"]}
    across = across_nodes(plan)
    backward += total["keep"]
    passes = [
        (1, 0.0, {name: alone[name] for name in across}),
        (1, forward, hidden("param_gather", "param_broadcast")),
        (count - 1, forward, gathers),
        (count - 1, backward, gathers | {"grad_scatter": total["earlier_scatter"]}),
        (1, backward + total["cast"], gathers | hidden("grad_scatter", "grad_reduce")),
    ]
    norm = stage_params(plan) / plan.factors.os * plan.grad_bytes / est.profile.memory
    under = forward if "host_update" in plan.overlap else 0.0
    seconds = Counter(
        {
            "gradient sums": count * total["keep"] + total["cast"],
            "optimizer": norm + total["update"],
            "host_update": max(0.0, total["host_update"] - under),
        }
    )
    for times, compute, traffic in passes:
        more = not_hidden(est, plan, compute, traffic)
        if "grad_scatter" in traffic and compute and plan.recompute == "none":
            behind = {
                name: value
                for name, value in traffic.items()
                if across[name] == across["param_gather"]
            }
            behind["param_gather"] /= 2
            if behind["param_gather"]:
                more = max(
                    more,
                    not_hidden(est, plan, final, behind),
                    key=lambda found: sum(found.values()),
                )
        for name, value in more.items():
            seconds[name] += times * value
    return seconds


# ---------------------------------------------------------------------------- seconds of a step


def lost_seconds(
    plan: ActivationPlan,
    layer: tuple[float, float, float],
    s: LayerSeconds,
    bandwidth: float,
    busy: float,
) -> tuple[float, float]:
    """Return the seconds of a micro-batch's backward in which parts of its forward run again, and
    of its forward in which compute waits for copies. busy: of a layer's forward, in which others
    copy. Also of many plans, whose numbers are arrays."""
    saved = (plan.kept_chunks + plan.swapped_chunks) / plan.chunks
    inputs, _, inputs_away, _ = kept_parts(plan)
    dropped = plan.layers_recomputing_attention
    again = (
        np.maximum(0.0, plan.layers - saved) * s.recompute
        + (plan.layers - inputs - inputs_away) * s.post
        + (dropped - dropped // plan.stride) * (s.forward - s.attention - s.post)
        + dropped * s.attention
    )
    hidden = (plan.layers - plan.resident) * max(0.0, s.forward - busy)
    return again, np.maximum(0.0, host_bytes(plan, layer) / bandwidth - hidden)


def step_seconds(est: Estimator, plan: Plan, states: bool = True) -> dict[str, float]:
    """Return a step's seconds by what takes them: they add up to the step. states: with what these
    add; what layers lose is counted once they say what they keep."""
    layers, count = plan.stage_layers, plan.micro_batches
    passes = count * layers
    layer = layer_seconds(est, plan)
    again = waits = 0.0
    if plan.activations is not None:
        lost = lost_seconds(
            plan.activations,
            column_bytes(plan),
            layer,
            est.profile.to_host,
            visit_seconds(est, plan),
        )
        again, waits = (float(seconds) / plan.part_layers for seconds in lost)
    # the host must launch a pass in less than it takes
    forward = max(layer.forward, plan.chunks * est.profile.launch["forward"])
    backward = max(layer.backward + again, plan.chunks * est.profile.launch["backward"])
    everyone = mesh_of(plan.ranks, 1, plan.per_node)
    seconds = {
        "attention": passes * layer.kernels,
        "all-to-all": passes * layer.exchange,  # and around a ring
        "tensor exchanges": passes * layer.columns,
        "rest of layers": passes
        * (
            layer.forward
            + layer.backward
            - layer.kernels
            - layer.exchange
            - layer.columns
        ),
        "recomputation": passes * again,
        "copies": passes * waits,
        "launches": passes
        * (forward + backward - layer.forward - layer.backward - again),
        "head and loss": count * head_seconds(est, plan),
        # while a micro-batch goes through a part of each other stage
        "pipeline idle": (plan.model.layers - layers)
        * (forward + backward)
        / plan.pp_chunks,
    }
    if states:
        # loss, norm, vectors, labels, facts: of a MiB, since less takes as long
        seconds["small sums"] = 5 * est.collective("all_reduce", 2.0**20, everyone)
        seconds["stage messages"] = exposed_messages(plan) * est.collective(
            "all_gather",
            2 * message_bytes(plan),
            (1, 2) if plan.ranks > plan.per_node else (2, 1),
        )
        seconds |= traffic_seconds(
            est, plan, layers * forward, layers * backward, layers * layer.final
        )
    return {name: value for name, value in seconds.items() if value}


def exposed_messages(plan: Plan) -> float:
    """Return how many messages all stages wait for. With one part a stage, whose first backward is
    due as it arrives, P micro-batches wait for the 2 (P - 1) of one; and at first and last for
    those to and from other stages than the last. With several parts there are passes to run
    meanwhile, but under the first micro-batch."""
    stages = plan.pp
    if plan.pp_chunks > 1:
        return 2 * (stages * plan.pp_chunks - 1)
    return 2 * (stages - 1) * plan.micro_batches / stages + 2 * (stages - 2)
