"""Who holds what, and when does it travel? Parameters, gradients, optimizer states, sharded (AMSP).

R ranks hold the states of a model with P parameters. Three factors say in how many shards each kind
lies, p | g | os | R, so that a rank holds (bf16 parameters, AdamW in float32; AMSP, section IV)

    2P/p parameters  +  2P/g gradients (4P/g with several micro-batches)  +  12P/os master, moments

Ranks stand node by node, and shards fill a node before they cross it, so every group is a block of
neighbours or a comb through blocks. With p = 2, os = 4, R = 8, where a letter is a p-shard:

    rank        0   1   2   3   4   5   6   7
    holds       a   b   a   b   a   b   a   b         param gather: {0,1} {2,3} {4,5} {6,7}
    updates     a0  b0  a1  b1  a0  b0  a1  b1        os group: {0,1,2,3} {4,5,6,7}
                                                      subgroup (same p-shard in it): {0,2} {1,3} ..
                                                      cross os (same states): {0,4} {1,5} ..
                                                      replicate (same p-shard): {0,2,4,6} ..

What runs beside computation has a CUDA stream of its kind (CommStream): launch, compute, wait.

    stream           launched in          hidden under                     waited for in
    param_gather     launch_param_gather  the layer before; in backward,   unshard
                                          if layers run whole and once,
                                          the matrix before
    grad_scatter     scatter_grad         the backward of the layers that  add_grad (buffer free),
                                          follow it                        reduce_unit (stream),
                                                                           finish_gradients
    grad_reduce      reduce_unit          the same, last micro-batch only  finish_gradients
    param_broadcast  broadcast_params     the update of the layers that    unshard (p = 1),
                                          follow, the next forward         launch_param_gather
    host_update      update, if states    the next forward                 the same; by
                     lie on the host                                       param_broadcast, if any

A gradient's way to its owner, and the parameters' way back:

                   layout intra                          layout inter
    (S,) -> S/p    reduce-scatter, from scatter_grad     the same
    S/p -> S/os    reduce-scatter in the subgroup:       all-reduce over all replicas: from
                   from scatter_grad if g = os, from     scatter_grad if g = os (over the subgroup
                   reduce_unit if g = p                  alone before the last micro-batch), from
                                                         reduce_unit if g = p
    over replicas  all-reduce over cross os, from        nothing: the all-reduce above has
                   reduce_unit                           summed over replicas
    back           all-gather, from broadcast_params     broadcasts, from broadcast_params

In backward the next matrix alone is gathered, so that a gather never delays a reduction (AMSP,
section V-C); where layers run in chunks or are recomputed it is all of layer i - 1, once for its
forward that runs again and its backward. Vectors' gradients, the norm and the loss are summed in
the open: they are small. Where a stream does not overlap, it is the compute stream. Gathered
weights and whole gradients lie in fixed buffers, two of each kind of matrix, that neighbouring
layers take in turn; the model's parameters are views of them.

The factors say how often a state is cut; `place` says where the optimizer's states lie: on the GPU,
or in page-locked memory of the host, from which they visit it (HostStates), 12P/os bytes there and
12P/os back.

A matrix has one gradient a pass. One that is used twice or never ends the step by its name, on all
ranks (find_misuse); none waits for a reduction that another has not launched, since all launch a
layer's in the same order, whatever they use. Where nothing runs beside computation (a CPU, or
--overlap none), a rank that skips a matrix may still keep others waiting in a gather (p > 1, layers
that run whole) or an exchange of tokens.

Left out: quantised communication, learning rates by parameter, matrices that are used twice.

Legend: R ranks, r one of them; p, g, os factors, f all of them; S elements of a matrix with
padding; x a gradient on its way; m, v AdamW's moments, t its updates; i, n, k counts.
"""
import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attention import CommStream, wait
from model import Cut, Matrix, Vector, accumulation_dtype, compiled
from offload import pin_host_buffers
from ranks import (ConfigError, Groups, all_gather, error_of_any, on_all_ranks,
                   reduce_scatter)

SHARD_ALIGN_ELEMENTS = 128  # every shard starts where the fastest kernels and copies want it
VISIT_ELEMENTS = 2**25  # most of a matrix that is updated at once, if states lie on the host ...
VISIT_BUFFERS = 3  # ... in so many buffers
STREAMS = ("param_gather", "grad_scatter", "grad_reduce", "param_broadcast", "host_update")

# ---------------------------------------------------------------------------- factors


@dataclass(frozen=True)
class Factors:
    """Numbers of shards of parameters, gradients and optimizer states (AMSP, section IV)."""

    p: int = 1
    g: int = 1
    os: int = 1


def strategies(ranks: int, k: int) -> dict[str, Factors]:
    """Return the named baselines, rows of factors; k is their parameter, NAME:K."""
    return {  #                      p      g      os
        "ddp": Factors(1, 1, 1),
        "zero1": Factors(1, 1, ranks),
        "zero2": Factors(1, ranks, ranks),
        "zero3": Factors(ranks, ranks, ranks),
        "mics": Factors(k, k, k),
        "zero1.5": Factors(1, 1, k),
    }


def parse_strategy(text: str, ranks: int) -> Factors:
    """Return the factors of 'zero3' or 'mics:4'. Raises ValueError with the names."""
    name, _, number = text.partition(":")
    k = int(number) if number.isdigit() else 0
    table = strategies(ranks, k)
    with_k = ("mics", "zero1.5")
    if name not in table or (name in with_k) != (k > 0):
        names = ", ".join(row + ":K" if row in with_k else row for row in table)
        raise ValueError(f"--strategy {text}: one of {names}")
    return table[name]


@functools.cache
def legal_sizes(ranks: int, per_node: int) -> list[int]:
    """Return the shard counts: divisors of all ranks that divide a node's, or are whole nodes."""
    return [n for n in range(1, ranks + 1)
            if ranks % n == 0 and (per_node % n == 0 or n % per_node == 0)]


def illegal(f: Factors, ranks: int, per_node: int) -> str | None:
    """Return the rule that f breaks, in words, or None (AMSP, section IV). A stricter rule is
    another `if` here: what is listed, checked and said follows. A looser one needs more. For g
    between p and os, say: groups for the two halves of the way (make_groups), the size of
    grad_shard and its owned part (shard), and what runs on them (sum_grad, reduce_unit); States
    asserts that g is p or os."""
    sizes = legal_sizes(ranks, per_node)
    for count in (f.p, f.g, f.os):
        if count not in sizes:
            return f"{count} shards do not fit {ranks} ranks, {per_node} a node: {sizes}"
    if f.os % f.p:
        return "the dependency rule is p <= g <= os, each dividing the next"
    if f.g not in (f.p, f.os):
        return "g must be p or os"
    return None


def legal_factors(ranks: int, per_node: int) -> list[Factors]:
    """Return all (p, g, os) that break no rule, fewest shards first. One node of 8 has 16."""
    sizes = legal_sizes(ranks, per_node)
    every = [Factors(p, g, os) for p in sizes for g in sizes for os in sizes]
    return [f for f in every if illegal(f, ranks, per_node) is None]


def check_factors(f: Factors, ranks: int, per_node: int) -> None:
    """Raise ValueError with the broken rule and the nearest legal factors, if f breaks one."""
    rule = illegal(f, ranks, per_node)
    if rule is not None:
        near = min(legal_factors(ranks, per_node),
                   key=lambda n: abs(n.p - f.p) + abs(n.g - f.g) + abs(n.os - f.os))
        raise ValueError(f"p={f.p} g={f.g} os={f.os}: {rule}; nearest: --p {near.p} --g {near.g} "
                         f"--os {near.os}")


# ---------------------------------------------------------------------------- optimizers

BETAS = (0.9, 0.95)  # of AdamW's moments
EPS = 1e-8


@dataclass(frozen=True)
class Optimizer:
    """A function and the names of its states: all that an optimizer is.

    update(weight, grad, states, scalars, decay) writes weight and states in place. weight: of the
    compute dtype, grad: of that or wider, both (size,), a part of a matrix; with `whole`, all of
    it, (rows, cols). states: a tuple of tensors of their shape, in accum_dtype, as named; the first
    is "master", the weight itself, the others start at 0. scalars (5,), on the device, so that
    nothing waits for the host: the learning rate, the factor on the gradient (clipping), 1 -
    beta1^t, 1 - beta2^t, and 1 if the gradients are finite, else 0: then update changes nothing:
    with torch.where, as in adamw below, since what is not finite times 0 is not 0.
    Another one is a row of OPTIMIZERS: states, checkpoints and counted bytes follow
    (hardware.update_bytes counts AdamW's). It updates every Matrix: embedding, head, and q|k|v
    and gate|up as they are fused. One that is `whole` runs with --os-layout inter --p 1 --tp 1.
    """

    update: Callable
    states: tuple[str, ...]
    whole: bool = False  # it needs whole matrices: layout inter, p = 1 and tp = 1


@functools.partial(compiled, dynamic=None)  # matrices of many sizes
def adamw(weight: Tensor, grad: Tensor, states: tuple[Tensor, Tensor, Tensor], scalars: Tensor,
          decay: float) -> None:
    """Update flat tensors by AdamW, 14 bytes read and 14 written a bf16 parameter (`Optimizer`)."""
    master, m, v = states
    beta1, beta2 = BETAS
    lr, clip, correction1, correction2, finite = scalars.unbind()
    grad = grad.to(master.dtype) * clip
    m_new = m + (1 - beta1) * (grad - m)
    v_new = v + (1 - beta2) * (grad * grad - v)
    step = lr / correction1 * m_new / ((v_new / correction2).sqrt() + EPS)
    new = torch.where(finite > 0, master * (1 - lr * decay) - step, master)
    m.copy_(torch.where(finite > 0, m_new, m))
    v.copy_(torch.where(finite > 0, v_new, v))
    master.copy_(new)
    weight.copy_(new)


ADAMW = Optimizer(adamw, ("master", "exp_avg", "exp_avg_sq"))
OPTIMIZERS = {"adamw": ADAMW}  # of matrices, by the name in a plan; vectors have AdamW

# ---------------------------------------------------------------------------- what a rank holds


@dataclass
class Buffer:
    """A fixed place for a whole weight, or for one micro-batch's whole gradient. Matrices of a
    shape, two and more, take it in turn."""

    data: Tensor  # (S,)
    holder: object = None  # the ShardedParam whose newest weight it holds, or will at `event`
    # of param_gather: the weight is here; of grad_scatter: the gradient was read, the place is free
    event: object = None


@dataclass(eq=False)
class ShardedParam:
    """What this rank holds of one matrix; tensors are flat, and stay where they are for good."""

    name: str  # of the parameter, as in a checkpoint
    module: Matrix
    unit: "Unit"
    owner: int  # layout inter: index in the subgroup of the rank that updates this p-shard
    start: int  # of what this rank updates, within the matrix
    size: int  # of it, elements; S/os, or S/p and 0 in layout inter
    param_shard: Tensor  # (S/p,) newest after broadcast_done
    unsharded_param: Buffer  # (S,) from its event until the layer after the next; p = 1: the shard
    grad_shard: Tensor  # (S/g,) sum of the step's micro-batches, final after finish_gradients
    unsharded_grad: Buffer  # (S,) from the first chunk until its event; or grad_shard itself
    owned_param: Tensor  # (size,) the part of param_shard that this rank updates
    owned_grad: Tensor  # (size,) the same part of the gradient
    # over whom its gradient is summed in the end; None: this rank is alone
    cross_os_group: dist.ProcessGroup | None  # that update the same elements
    replicate_group: dist.ProcessGroup | None  # that have the same p-shard
    num_chunks: int  # contributions to its gradient in one backward pass
    states: dict[str, Tensor] = field(default_factory=dict)  # (size,) each, on the GPU or the host
    chunks_done: int = 0  # contributions of this pass
    uses: int = 0  # contributions of this step
    # event of param_broadcast, or of host_update alone: new parameters are in param_shard
    broadcast_done: object = None

    @property
    def grad_stays(self) -> bool:
        """Return whether gradients add up in grad_shard, without a buffer and its scatter."""
        return self.unsharded_grad.data is self.grad_shard

    @property
    def count(self) -> int:
        """Return the elements of the matrix, S without the padding."""
        return math.prod(self.module.shape)

    def as_matrix(self, flat: Tensor) -> Tensor:
        """Return the view (rows, cols) of a flat tensor (S,)."""
        return flat[: self.count].view(self.module.shape)


@dataclass(eq=False)
class Unit:
    """The matrices of a layer; or the embedding, or the head."""

    name: str  # such as "blocks.0"
    index: int  # in the order of use
    is_layer: bool
    params: list[ShardedParam] = field(default_factory=list)  # in the order of use
    passes_done: int = 0  # backward passes of this step
    scattered: int = 0  # gradients of this pass that are on their way, from the last param on


@dataclass(frozen=True)
class StatePart:
    """A part of a state on this rank, as checkpoint.py saves and loads it. It lies anywhere in the
    flat tensor, or in what a column of ranks has of it, so what some factors, layout and tensor
    mode have saved any others can load."""

    values: Tensor  # (count,), a view: what is loaded is written here
    start: int  # of its first element in the flat tensor
    shape: tuple[int, ...]  # of the whole tensor, without padding
    saves: bool  # this rank saves it: one of those that hold the same
    cut: Cut | None = None  # the flat tensor is this of the whole one; None: all


def sum_and_scatter(x: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part (count,) of the sum of x over the group's ranks: a reduce-scatter on
    the stream that is current."""
    part = x.new_empty(count)
    reduce_scatter(part, x, group=group)
    return part


# ---------------------------------------------------------------------------- states on the host


class HostStates:
    """Optimizer states in page-locked memory of the host. They visit the GPU part by part, in three
    buffers that take turns: while one is filled and one goes back, one waits for its update, whose
    kernel has to find room between those of the next forward.

        stream_in      part 0 -> A   part 1 -> B   part 2 -> C     part 3 -> A
        host_update                 |0|           |1|             |2|
        stream_out                      A -> part 0   B -> part 1     C -> part 2

    The first buffers are filled under the backward: what they hold does not depend on it.
    """

    def __init__(self, params: list[ShardedParam], optimizer: Optimizer, dtype: torch.dtype,
                 device: torch.device, make_stream: Callable[..., CommStream]):
        """Give all params their states, zeros in `dtype`. Raises ConfigError if a rank gets no
        memory. A collective of all ranks."""
        count = len(optimizer.states)
        largest = max((param.size for param in params), default=0)
        self.visit_elements = largest if optimizer.whole else min(largest, VISIT_ELEMENTS)
        self.buffers = deque(
            Buffer(torch.empty(count, self.visit_elements, dtype=dtype, device=device))
            for _ in range(VISIT_BUFFERS))  # the first one is taken next
        self.stream_in = make_stream(device)
        self.stream_out = make_stream(device)
        sizes = [count * param.size * dtype.itemsize for param in params]
        memory = on_all_ranks(lambda: pin_host_buffers(sizes, device.type == "cuda"))
        for param, place in zip(params, memory):
            rows = place.view(dtype).view(count, param.size)
            param.states = dict(zip(optimizer.states, rows))

    def begin(self) -> None:
        """Begin an update: what is read must be what the last one has written."""
        with self.stream_in.beside_compute():
            wait(self.stream_out.last_event())  # hidden by a whole step

    def visits(self, states: dict[str, Tensor]):
        """Yield which part of a matrix's states is on the GPU, and the tensors, whose new values
        go back when the caller asks for the next."""
        size = len(states["master"])
        for first in range(0, size, self.visit_elements):
            part = slice(first, min(first + self.visit_elements, size))
            buffer = self.buffers[0]
            self.buffers.rotate(-1)
            there = [state[part] for state in states.values()]
            here = [row[: part.stop - part.start] for row in buffer.data]
            with self.stream_in.beside_compute():
                wait(buffer.event)  # what was in it is on the host; hidden by the visits between
                for x, state in zip(here, there):
                    x.copy_(state, non_blocking=True)
            wait(self.stream_in.last_event())  # hidden by the forward that host_update runs under
            yield part, here
            with self.stream_out.after_compute():  # hidden by the next part's way in
                for x, state in zip(here, there):
                    state.copy_(x, non_blocking=True)
                self.stream_out.used(*here)
            buffer.event = self.stream_out.last_event()

    def settle(self) -> None:
        """Let the host wait until its memory holds what the last update has written."""
        event = self.stream_out.last_event()
        if event is not None:
            event.synchronize()


# ---------------------------------------------------------------------------- states


class States:
    """A model's parameters, gradients and optimizer states on this rank, and their travels.

    model: built on any device, "meta" best: its parameters are replaced, and its matrices raise
    their events here: unshard, reshard, add_grad. micro_batches: forward and backward passes
    between two updates. layout: "inter" (whole p-shards have one owner in a subgroup, AMSP's) or
    "intra" (each is split evenly). overlap: those of STREAMS that run under computation.
    gather_layers: a layer's backward uses its matrices more than once, so they are gathered
    together. num_chunks: of tokens, if layers run in chunks, and so contributions to a gradient in
    each pass. decay: of matrices' weights. place: of the optimizer's states, "gpu" or "host"
    (HostStates). optimizer: of matrices. make_stream: as CommStream. Raises ValueError if the
    optimizer needs whole matrices and a rank has parts.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype,
                 micro_batches: int = 1, factors: Factors = Factors(), layout: str = "intra",
                 groups: Groups | None = None, overlap: tuple[str, ...] = STREAMS,
                 gather_layers: bool = False, num_chunks: int = 1, decay: float = 0.1,
                 place: str = "gpu", optimizer: Optimizer = ADAMW,
                 make_stream: Callable[..., CommStream] = CommStream):
        tp = groups.tp if groups else 1
        if optimizer.whole and (layout, factors.p, tp) != ("inter", 1, 1):
            raise ValueError(f"layout={layout} p={factors.p} tp={tp}: this optimizer needs whole "
                             "matrices, which a rank owns with layout=inter p=1 tp=1")
        assert factors.g in (factors.p, factors.os), f"{factors}: gradients lie as p or as os do"
        self.device = device
        self.dtype = dtype
        self.micro_batches = micro_batches
        self.factors = factors
        self.layout = layout
        self.gather_layers = gather_layers
        self.num_chunks = num_chunks
        self.optimizer = optimizer
        self.decay = decay
        self.accum_dtype = accumulation_dtype(dtype)
        self.accumulates = micro_batches > 1
        self.grad_dtype = self.accum_dtype if self.accumulates else dtype
        self.streams = {name: make_stream(device, name in overlap) for name in STREAMS}
        self.shapes = model.shapes
        self.make_groups(groups or Groups())
        self.make_params(model)
        params = list(self.sharded_params.values())
        self.host_states = None
        if place == "host":
            self.host_states = HostStates(params, optimizer, self.accum_dtype, device, make_stream)
        else:
            for param in params:
                param.states = {state: self.zeros(param.size, self.accum_dtype)
                                for state in optimizer.states}
        self.make_vectors(model)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.scalars = torch.ones(5, dtype=self.accum_dtype, device=device)  # of Optimizer
        self.last_pass = None  # (backward, unit) whose matrix was used last
        self.progress_events = deque(maxlen=10 * len(self.units))  # (phase in words, its event)
        self.on_phase: Callable[[str], None] = lambda phase: None  # told when one is enqueued
        self.begin_step()

    # -- who holds what

    def make_groups(self, groups: Groups) -> None:
        """Make the groups that this rank is in, by the ranks' arithmetic; None: it is alone. Groups
        of one name and the same ranks share a communicator: gradients' two streams may, since
        grad_reduce begins when grad_scatter is done. A collective of all ranks."""
        f = self.factors
        self.groups = groups
        self.subgroup_size = f.os // f.p
        self.subgroup_index = groups.rank % f.os // f.p
        self.param_index = groups.rank % f.p
        self.param_gather_group = groups.get("param_gather", lambda r: r // f.p)
        self.grad_scatter_group = groups.get("grad_reduce", lambda r: r // f.p)
        self.grad_subgroup = groups.get("grad_reduce", lambda r: (r // f.os, r % f.p))
        self.param_subgroup = groups.get("param_broadcast", lambda r: (r // f.os, r % f.p))
        # (cross os, replicate) of a column's part of a matrix; and of embedding, head and whatever
        # a layer does not cut, which are on the ranks of all columns
        self.replicas_of_parts = [groups.get("grad_reduce", lambda r: r % n) for n in (f.os, f.p)]
        self.replicas_of_wholes = [
            groups.of_places("grad_reduce", lambda stage, r, column: (stage, r % n))
            for n in (f.os, f.p)]
        self.stage_group = dist.group.WORLD
        if groups.pp > 1:
            self.stage_group = groups.of_places("vectors", lambda stage, r, column: stage)
        # who owns every element of the whole model once, but those that all columns have
        self.norm_group = groups.of_places("grad_reduce", lambda stage, r, column: r // f.os)

    def make_params(self, model: nn.Module) -> None:
        """Shard all matrices: allocate what this rank holds, and make their weights views of it."""
        matrices = {f"{name}.weight": module for name, module in model.named_modules()
                    if isinstance(module, Matrix)}
        multiple = self.factors.os * SHARD_ALIGN_ELEMENTS
        padded = {name: math.ceil(math.prod(module.shape) / multiple) * multiple
                  for name, module in matrices.items()}
        owners = self.assign_owners(padded)
        units: dict[str, Unit] = {}
        self.sharded_params: dict[Matrix, ShardedParam] = {}
        self.buffers: dict[tuple, Buffer] = {}
        for name, module in matrices.items():
            unit_name = ".".join(name.split(".")[:-1][:2])  # "blocks.0.qkv.weight": "blocks.0"
            is_layer = unit_name.startswith("blocks.")
            unit = units.setdefault(unit_name, Unit(unit_name, len(units), is_layer))
            param = self.shard(name, module, unit, padded[name], owners[name])
            module.weight = nn.Parameter(param.as_matrix(param.unsharded_param.data))
            module.events = self
            self.sharded_params[module] = param
            unit.params.append(param)
        self.units = list(units.values())
        self.by_name = {param.name: param for param in self.sharded_params.values()}
        order = [param for unit in reversed(self.units) if unit.is_layer
                 for param in reversed(unit.params)]
        self.next_in_backward = {param: [then] for param, then in zip(order, order[1:])}

    def assign_owners(self, padded: dict[str, int]) -> dict[str, int]:
        """Return who updates each matrix in layout inter, an index in the subgroup: greedy, largest
        first (AMSP, section IV). padded: S by name. Sets `imbalance`: largest load / mean - 1."""
        loads = [0] * self.subgroup_size
        owners = {}
        for name in sorted(padded, key=lambda name: -padded[name]):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += padded[name]
        self.imbalance = 0.0
        if self.layout == "inter":
            self.imbalance = max(loads) * len(loads) / max(1, sum(loads)) - 1
        return owners

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def shard(self, name: str, module: Matrix, unit: Unit, padded: int,
              owner: int) -> ShardedParam:
        """Allocate what this rank holds of a matrix of S = padded elements."""
        f = self.factors
        part = padded // f.p
        if self.layout == "intra":
            size = part // self.subgroup_size
            offset = self.subgroup_index * size  # within the p-shard
        else:
            size = part if owner == self.subgroup_index else 0
            offset = 0
        owned = slice(offset, offset + size)
        num_chunks = self.num_chunks if unit.is_layer else 1
        param_shard = self.zeros(part, self.dtype)
        unsharded_param = Buffer(param_shard)
        if f.p > 1:
            unsharded_param = self.buffer("param", name, unit, padded, self.dtype)
        grad_shard = self.zeros(part if f.g == f.p else size, self.grad_dtype)
        sum_dtype = self.accum_dtype if num_chunks > 1 else self.dtype  # where chunks add up
        unsharded_grad = Buffer(grad_shard)
        if f.g > 1 or num_chunks > 1 and self.grad_dtype != self.accum_dtype:
            unsharded_grad = self.buffer("grad", name, unit, padded, sum_dtype)
        return ShardedParam(
            name, module, unit, owner, self.param_index * part + offset, size,
            param_shard, unsharded_param, grad_shard, unsharded_grad,
            param_shard[owned], grad_shard[owned] if f.g == f.p else grad_shard,
            *(self.replicas_of_parts if module.part else self.replicas_of_wholes), num_chunks)

    def buffer(self, kind: str, name: str, unit: Unit, padded: int, dtype: torch.dtype) -> Buffer:
        """Return the buffer for a matrix: of each matrix of a layer there are two, by the layer's
        parity; embedding and head have one."""
        of_layer = name.split(".", 2)[2:] or [name]
        key = kind, padded, *of_layer, unit.index % 2
        if key not in self.buffers:
            self.buffers[key] = Buffer(self.zeros(padded, dtype))
        return self.buffers[key]

    def make_vectors(self, model: nn.Module) -> None:
        """Make small weights parts of one vector on every rank, in accum_dtype: they are their own
        masters. Autograd adds to their gradients in place."""
        vectors = {f"{name}.weight": module for name, module in model.named_modules()
                   if isinstance(module, Vector)}
        total = 0
        self.vector_slices: dict[str, slice] = {}
        for name, module in vectors.items():
            self.vector_slices[name] = slice(total, total + module.weight.numel())
            total += module.weight.numel()
        self.vector_states = {state: self.zeros(total, self.accum_dtype) for state in ADAMW.states}
        self.vector_grad = self.zeros(total, self.accum_dtype)
        for name, module in vectors.items():
            part = self.vector_slices[name]
            module.weight = nn.Parameter(self.vector_states["master"][part])
            module.weight.grad = self.vector_grad[part]

    # -- parameters: gathered ahead of their use

    def unshard(self, module: Matrix, backward: bool) -> Tensor:
        """Return the weight (rows, cols), whole, and launch the gathers of those that follow.

        backward: the direction of the pass. The weight may be read until the layer after the next
        is unsharded.
        """
        param = self.sharded_params[module]
        unit = param.unit
        if self.last_pass != (backward, unit):
            self.last_pass = backward, unit
            self.end_pass(unit)
            self.enter_phase(f"{'backward' if backward else 'forward'}, {self.words(unit)}")
        if self.factors.p == 1:
            wait(param.broadcast_done)  # they are new; hidden by the update and layers before
            param.broadcast_done = None
            return module.weight
        now, ahead = self.gathers(param, backward)
        self.launch_param_gather(now)  # if it was not launched ahead
        if self.streams["param_gather"].overlap:
            self.launch_param_gather(ahead)
        # hidden by the layer before; in backward: the matrix
        wait(param.unsharded_param.event)
        return module.weight

    def gathers(self, param: ShardedParam,
                backward: bool) -> tuple[list[ShardedParam], list[ShardedParam]]:
        """Return what to gather where `param` is used, and what for later (AMSP, section V-C): in
        forward whole layers, so that ranks agree where one does not use a matrix."""
        if backward and not self.gather_layers:  # the next matrix alone
            return [param], self.next_in_backward.get(param, [])
        index = param.unit.index + (-1 if backward else 1)
        ahead = [other for unit in self.units if unit.index == index for other in unit.params]
        if not backward:
            return param.unit.params, ahead
        # the layer before, once for both of its passes
        return [param], [other for other in ahead if other.unit.is_layer]

    def launch_param_gather(self, params: list[ShardedParam]) -> None:
        """Launch the all-gathers, (S/p,) -> (S,), of weights that their buffers do not hold yet."""
        params = [param for param in params if param.unsharded_param.holder is not param]
        if not params:
            return
        stream = self.streams["param_gather"]
        with stream.after_compute():  # buffers are free: the layer before the last has read them
            for param in params:
                wait(param.broadcast_done)  # param_shard is new; hidden by update and layers before
                param.broadcast_done = None
                all_gather(param.unsharded_param.data, param.param_shard,
                           group=self.param_gather_group)
        gathered = stream.last_event()
        for param in params:
            param.unsharded_param.holder = param
            param.unsharded_param.event = gathered

    def reshard(self, module: Matrix) -> None:
        """Free nothing: the layer after the next takes the buffer."""

    def words(self, unit: Unit) -> str:
        """Return what `progress` calls a unit."""
        if unit.is_layer:
            number = int(unit.name.partition(".")[2]) + 1
            return f"layer {number}/{sum(other.is_layer for other in self.units)}"
        return unit.name

    def enter_phase(self, phase: str) -> None:
        """Record an event of the compute stream that `progress` can ask for, and tell on_phase."""
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.current_stream().record_event()
        self.progress_events.append((phase, event))
        self.on_phase(phase)

    def progress(self) -> str:
        """Return the last phase that the device has begun, "" if no other since the last call. It
        does not wait for the device; any thread may ask."""
        text = ""
        while self.progress_events:
            _, event = self.progress_events[0]
            if event is not None and not event.query():
                break
            text, _ = self.progress_events.popleft()
        return text

    # -- gradients: reduced behind their computation

    def begin_step(self) -> None:
        """Begin a step: no gradient of the last one counts."""
        self.open_unit: Unit | None = None  # whose backward pass has begun, and is not complete
        self.misuse = ""  # which matrix was not used once a pass, in words
        for unit in self.units:
            unit.passes_done = unit.scattered = 0
            for param in unit.params:
                param.chunks_done = param.uses = 0
        self.vector_grad.zero_()

    def add_grad(self, module: Matrix, compute: Callable[[Tensor, int], Tensor]) -> None:
        """Add a chunk's contribution to a gradient, and launch the reductions after the last one.

        compute(out, beta) writes beta * out + contribution into out (rows, cols). Returns None:
        nothing is left to autograd.
        """
        param = self.sharded_params[module]
        unit = param.unit
        param.uses += 1
        self.end_pass(unit, param.chunks_done == param.num_chunks)
        if unit.passes_done == self.micro_batches:  # the step's gradient has gone
            self.misuse = f"{param.name}: a gradient came in after the last pass of its unit"
            return
        self.open_unit = unit
        buffer = param.unsharded_grad
        if param.chunks_done == 0:
            wait(buffer.event)  # its place is free; hidden by the backward of layer i + 1
        adds = param.chunks_done > 0 or (param.grad_stays and unit.passes_done > 0)
        compute(param.as_matrix(buffer.data), int(adds))
        param.chunks_done += 1
        self.scatter_unit(unit)

    def end_pass(self, unit: Unit, again: bool = False) -> None:
        """End the backward pass that is open, as `unit` begins one, or another (`again`): what a
        matrix that was not used would have launched is what other ranks wait for."""
        if again or self.open_unit not in (None, unit):
            self.scatter_unit(self.open_unit, complete=False)

    def scatter_unit(self, unit: Unit, complete: bool = True) -> None:
        """Launch the reductions of a unit's gradients of this pass, last param first: all ranks
        launch the same in the same order, whatever each of them uses. complete: of those up to the
        first that is not complete; else of all, since the pass is over."""
        last = unit.passes_done == self.micro_batches - 1
        for param in unit.params[::-1][unit.scattered :]:
            if complete and param.chunks_done < param.num_chunks:
                return
            if not param.grad_stays:
                self.scatter_grad(param, last)
            unit.scattered += 1
        self.open_unit = None
        unit.scattered = 0
        unit.passes_done += 1
        for param in unit.params:
            param.chunks_done = 0
        if last:
            self.reduce_unit(unit)

    def scatter_grad(self, param: ShardedParam, last: bool) -> None:
        """Launch the reduction of a micro-batch's gradient (S,) to what is kept of it (S/g,), where
        it is added to the micro-batches before. last: of the step."""
        stream = self.streams["grad_scatter"]
        with stream.after_compute():  # it is computed; the last update has read grad_shard
            self.sum_grad(param, last)
            stream.used(param.as_matrix(param.unsharded_grad.data))
        param.unsharded_grad.event = stream.last_event()

    def sum_grad(self, param: ShardedParam, last: bool) -> None:
        """Enqueue the way of a whole gradient (S,) into grad_shard (S/g,)."""
        f = self.factors
        x = param.unsharded_grad.data
        if f.g > 1:
            x = x.to(self.dtype)  # else reduce_unit sends it
        if f.p > 1:  # (S,) -> (S/p,)
            x = sum_and_scatter(x, param.param_shard.numel(), self.grad_scatter_group)
        replaces = param.unit.passes_done == 0
        if f.g > f.p and self.layout == "intra":  # (S/p,) -> (S/os,)
            x = sum_and_scatter(x, param.size, self.grad_subgroup)
        elif f.g > f.p:  # (S/p,) -> (S/p,) all-reduce, then select & drop (AMSP, section IV)
            if last and not replaces:
                x[: param.size] += param.grad_shard  # joins before the final sum, once
            dist.all_reduce(x, group=param.replicate_group if last else self.grad_subgroup)
            x = x[: param.size]
            replaces = replaces or last
        if replaces:
            param.grad_shard.copy_(x)
        else:
            param.grad_shard.add_(x)

    def reduce_unit(self, unit: Unit) -> None:
        """Launch the sum over the replicas of a layer's gradients, which are complete: (S/g,) to
        what this rank owns (size,); in layout inter with g = p, to all of it. In one launch, but
        for gradients that are cast: a whole layer's copies would take memory."""
        if self.factors.g > self.factors.p and self.layout == "inter":
            return  # sum_grad has summed over all replicas
        launches = [[param] for param in unit.params]
        if self.grad_dtype == self.dtype:  # a part of a matrix has other replicas than a whole one
            launches = [[param for param in unit.params if bool(param.module.part) == is_part]
                        for is_part in (False, True)]
        with self.streams["grad_reduce"].after_compute():
            # their grad_shards are complete; hidden by the backward of the layers that follow
            wait(self.streams["grad_scatter"].last_event())
            for params in filter(None, launches):
                self.sum_replicas(params)

    def sum_replicas(self, params: list[ShardedParam]) -> None:
        """Enqueue the sum of gradients over their replicas, in one launch."""
        intra = self.layout == "intra"
        group = params[0].cross_os_group if intra else params[0].replicate_group
        if group is None and self.factors.g == self.factors.os:
            return
        parts = [param.grad_shard.to(self.dtype) for param in params]
        if intra and self.factors.g < self.factors.os:  # (S/p,) -> (S/os,)
            parts = [sum_and_scatter(x, param.size, self.grad_subgroup)
                     for param, x in zip(params, parts)]
        if group is not None:
            with dist._coalescing_manager(group):
                for x in parts:
                    dist.all_reduce(x, group=group)
        for param, x in zip(params, parts):
            if x is not param.grad_shard:
                kept = param.owned_grad if intra else param.grad_shard
                kept.copy_(x)

    def finish_gradients(self) -> None:
        """Sum vectors' gradients after the step's last backward, and let compute wait for all."""
        for unit in reversed(self.units):
            while unit.passes_done < self.micro_batches:  # a matrix came in never: others wait
                self.scatter_unit(unit, complete=False)
        self.last_pass = None
        self.enter_phase("update")
        self.find_misuse()
        if self.stage_group is not None:
            dist.all_reduce(self.vector_grad, group=self.stage_group)
        # every grad_shard is final; hidden by the backward, but for its last layers' reductions
        wait(self.streams["grad_scatter"].last_event())
        wait(self.streams["grad_reduce"].last_event())

    def find_misuse(self) -> None:
        """Make a step whose gradients are not those of its passes one that is not finite, on all
        ranks: vectors' gradients and the norm tell them, so that no step waits for an agreement."""
        for param in self.sharded_params.values():
            due = param.num_chunks * self.micro_batches
            if param.uses != due:
                how = "more than once a pass" if param.uses > due else "not in each pass"
                how = how if param.uses else "never"
                self.misuse = (
                    f"{param.name} was used {how}: {param.uses} gradients came in, not {due}; every"
                    " rank uses a Matrix once in each pass, if need be with no tokens, x[:0]")
        if self.misuse:
            self.vector_grad.fill_(math.nan)

    def check_uses(self) -> None:
        """Raise ConfigError on all ranks if a step was not finite since one of them has not used
        each matrix once a pass. A collective of all ranks."""
        if error := error_of_any(self.misuse):
            raise ConfigError(error)

    # -- the update

    def update(self, lr: float, clip: float, loss: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Update all weights with the gradient's global norm clipped to `clip` (0: off), and launch
        the new parameters' travel.

        Returns the norm, and whether it and the loss of all ranks are finite, on the device; if
        not, nothing was changed.
        """
        # weights may change: in unshard, compute has waited for all gathers and broadcasts of them
        norm = self.grad_norm()
        finite = norm.isfinite()
        if loss is not None:
            finite = finite & loss.isfinite()
        self.updates += finite
        self.write_scalars(lr, clip, norm, finite)
        # small weights by AdamW without decay, on every rank alike: they are their own masters
        unused = torch.empty_like(self.vector_grad)
        adamw(unused, self.vector_grad, tuple(self.vector_states.values()), self.scalars, 0.0)
        beside = contextlib.nullcontext()
        if self.host_states is not None:
            self.host_states.begin()
            beside = self.streams["host_update"].after_compute()  # gradients and scalars are final
        with beside:
            for unit in self.units:
                for param in unit.params:
                    if param.size:
                        self.update_param(param)
                self.broadcast_params(unit)
        return norm, finite

    def counts(self, param: ShardedParam) -> bool:
        """Return whether what this rank owns of a matrix is no other column's, too."""
        return param.size > 0 and (self.groups.column == 0 or param.module.part is not None)

    @property
    def counts_vectors(self) -> bool:
        """Return whether this rank's vectors count, of those that have the same."""
        return self.groups.rank % self.factors.os == self.groups.column == 0

    def grad_norm(self) -> Tensor:
        """Return the global norm of the step's gradient, in accum_dtype. A collective."""
        grads = [param.owned_grad for param in self.sharded_params.values() if self.counts(param)]
        grads.append(self.vector_grad if self.counts_vectors else self.vector_grad[:0])
        norms = [torch.linalg.vector_norm(grad, dtype=self.accum_dtype) for grad in grads]
        squares = torch.stack(norms).square().sum()
        if self.norm_group is not None:
            dist.all_reduce(squares, group=self.norm_group)
        return squares.sqrt()

    def write_scalars(self, lr: float, clip: float, norm: Tensor, finite: Tensor) -> None:
        """Set the scalars that an optimizer's update reads (`Optimizer`)."""
        t = self.updates.to(norm.dtype).clamp(min=1)
        factor = (clip / (norm + 1e-6)).clamp(max=1) if clip else torch.ones_like(norm)
        self.scalars.copy_(torch.stack([
            torch.full_like(norm, lr), factor, 1 - BETAS[0] ** t, 1 - BETAS[1] ** t,
            finite.to(norm.dtype)]))

    def update_param(self, param: ShardedParam) -> None:
        """Update what this rank owns of a matrix: where its states lie, or as they visit."""
        visits = [(slice(None), param.states.values())]
        if self.host_states is not None:
            visits = self.host_states.visits(param.states)
        for part, states in visits:
            tensors = [param.owned_param[part], param.owned_grad[part], *states]
            if self.optimizer.whole:  # (S,) -> (rows, cols)
                tensors = [param.as_matrix(flat) for flat in tensors]
            weight, grad, *states = tensors
            self.optimizer.update(weight, grad, tuple(states), self.scalars, self.decay)

    def broadcast_params(self, unit: Unit) -> None:
        """Launch the travel of a unit's new parameters from their owners to the subgroup."""
        stream = self.streams["param_broadcast"]
        if self.subgroup_size > 1:
            with stream.after_compute(), self.one_launch():  # the unit is updated
                for param in unit.params:
                    self.broadcast_param(param)
        if self.host_states is not None and (self.subgroup_size == 1 or stream.stream is None):
            stream = self.streams["host_update"]  # on which all of it was enqueued
        broadcast_done = stream.last_event()
        for param in unit.params:
            param.unsharded_param.holder = None  # what was gathered is old
            param.broadcast_done = broadcast_done

    def broadcast_param(self, param: ShardedParam) -> None:
        """Enqueue the travel of one matrix's new parameters: inter, the owner's (S/p,); intra, an
        all-gather (S/os,) -> (S/p,)."""
        if self.layout == "inter":
            dist.broadcast(param.param_shard, group=self.param_subgroup, group_src=param.owner)
            return
        own = param.owned_param
        if self.device.type != "cuda":
            own = own.clone()  # gloo may not read where it writes
        all_gather(param.param_shard, own, group=self.param_subgroup)

    def one_launch(self):
        """Return a context that launches a unit's broadcasts, of several owners, as one: NCCL."""
        if self.layout == "inter" and self.device.type == "cuda":
            return dist._coalescing_manager(self.param_subgroup, device=self.device)
        return contextlib.nullcontext()

    # -- loading and saving

    def settle(self) -> None:
        """Let the host see the states that lie there as the last update leaves them."""
        if self.host_states is not None:
            self.host_states.settle()

    def load(self, name: str, tensor: Tensor) -> None:
        """Set a parameter, each rank its shards, from the whole tensor of any dtype and device."""
        self.settle()
        if name in self.vector_slices:
            self.vector_states["master"][self.vector_slices[name]].copy_(tensor)
            return
        if name not in self.by_name:
            assert name in self.shapes, f"no parameter {name}"
            return  # another stage has it
        param = self.by_name[name]
        cut = param.module.part
        flat = (tensor if cut is None else cut.of(tensor)).reshape(-1)
        shard_start = self.param_index * param.param_shard.numel()
        places = ((param.param_shard, shard_start), (param.states["master"], param.start))
        for part, start in places:
            values = flat[start : start + part.numel()]
            part[: values.numel()].copy_(values)

    def holds(self, name: str) -> bool:
        """Return whether this rank's stage has a parameter."""
        return name in self.by_name or name in self.vector_slices

    def full(self, name: str) -> Tensor:
        """Return a whole parameter in accum_dtype; a collective of all ranks."""
        self.settle()
        whole = torch.zeros(self.shapes[name], dtype=self.accum_dtype, device=self.device)
        param = self.by_name.get(name)
        if name in self.vector_slices and self.counts_vectors:
            whole.copy_(self.vector_states["master"][self.vector_slices[name]])
        elif param is not None and self.counts(param):
            flat = self.zeros(param.count, self.accum_dtype)
            own = flat[param.start : param.start + param.size]  # without the padding
            own.copy_(param.states["master"][: own.numel()])
            if param.module.part is None:
                whole.copy_(flat.view_as(whole))
            else:
                param.module.part.put(param.as_matrix(flat), whole)
        if self.norm_group is not None:
            dist.all_reduce(whole, group=self.norm_group)  # an element's one owner, and zeros
        return whole

    def state_parts(self) -> dict[str, StatePart]:
        """Return what a checkpoint holds of this rank, by f"{state}.{parameter name}", and the
        number of updates. Replicas share the saving, matrix by matrix. Of states on the host it is
        what they are until the next update."""
        self.settle()
        replica = self.groups.rank // self.factors.os
        replicas = self.groups.ranks // self.factors.os
        first = self.groups.rank == self.groups.column == 0  # of its stage
        parts = {"updates": StatePart(self.updates.view(1), 0, (), dist.get_rank() == 0)}
        for state, vector in self.vector_states.items():
            for name, part in self.vector_slices.items():
                values = vector[part]
                parts[f"{state}.{name}"] = StatePart(values, 0, tuple(values.shape), first)
        for i, param in enumerate(self.sharded_params.values()):
            length = min(param.size, param.count - param.start)
            if length <= 0:
                continue  # padding alone, or in layout inter another rank's
            saves = i % replicas == replica and self.counts(param)
            for state, values in param.states.items():
                parts[f"{state}.{param.name}"] = StatePart(
                    values[:length], param.start, self.shapes[param.name], saves,
                    param.module.part)
        return parts

    def loaded(self) -> None:
        """Set the weights to their masters, after a checkpoint was read into state_parts()."""
        for unit in self.units:
            for param in unit.params:
                param.owned_param.copy_(param.states["master"])
            self.broadcast_params(unit)

    def bytes(self) -> dict[str, int]:
        """Return the bytes that this rank really holds of each kind, the vectors apart."""
        params = self.sharded_params.values()
        return {"parameters": sum(param.param_shard.nbytes for param in params),
                "gradients": sum(param.grad_shard.nbytes for param in params),
                "optimizer": sum(values.nbytes for param in params
                                 for values in param.states.values())}
