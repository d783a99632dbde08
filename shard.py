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
    host_update      update, if states    the next forward                 broadcast_params (stream)
                     lie on the host
    stream_in, _out  HostStates.visits    the updates of other parts       HostStates.visits

A gradient's way to its owner, and the parameters' way back. Layout intra: a p-shard is split evenly
in its subgroup, as above; inter (AMSP's): a matrix's p-shard has one owner there, which updates it.

                   layout intra                          layout inter
    (S,) -> S/p    reduce-scatter, from scatter_grad     the same
    S/p -> S/os    reduce-scatter in the subgroup:       all-reduce over all replicas: from
                   from scatter_grad if g > p, from      scatter_grad if g > p (over the subgroup
                   reduce_unit if g = p                  alone before the last micro-batch), from
                                                         reduce_unit if g = p
    over replicas  all-reduce over cross os, from        nothing: the all-reduce above has
                   reduce_unit                           summed over replicas
    back           all-gather, from broadcast_params     broadcasts, from broadcast_params

In backward the next matrix alone is gathered, so that a gather never delays a reduction (AMSP,
section V-C); where layers run in chunks or are recomputed it is all of layer i - 1, once for its
forward that runs again and its backward. Vectors' gradients, the norm and the loss are summed in
the open: they are small. Where a stream does not overlap, it is the compute stream, and a layer is
gathered whole as it begins. Gathered weights and whole gradients lie in fixed buffers, two of each
kind of matrix, that neighbouring layers take in turn (embedding and head have one each); the
model's parameters are views of them, or of the shard where p = 1.

The factors say how often a state is cut; `storage` says where the optimizer's states lie: on the GPU,
or in page-locked memory of the host, from which they visit it (HostStates), 12P/os bytes there and
12P/os back.

A matrix has one gradient a pass. One that is used twice or never ends the step by its name, on all
ranks (finish_gradients); none waits for a gather or a reduction that another has not launched,
since all launch a layer's in the same order, whatever they use (end_pass). What may still keep
others waiting, where a rank skips a matrix: on a CPU, where nothing runs beside computation, a
gather (p > 1, layers that run whole) and a reduction of several ranks; gathers of a layer whose
input is made again; and an exchange of tokens, or of columns.

Left out: quantised communication, learning rates by parameter, matrices that are used twice.

Legend: R ranks, r one of them; p, g, os factors, f all of them; S elements of a matrix with
padding; x a gradient on its way; m, v AdamW's moments, t its updates; i, n, k counts.
"""

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, astuple, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import divisors
from ops import Matrix, TensorSlice, Vector, accumulation_dtype
from optim import (
    ADAMW,
    Optimizer,
    Update,
    adamw,
    allocate_states,
    global_norm,
    make_scalars,
    set_scalars,
)
from ranks import ConfigError, Groups, all_gather, all_or_none, first_error, reduce_scatter
from streams import Buffer, CommStream, wait

SHARD_ALIGN_ELEMENTS = 128  # every shard starts where the fastest kernels and copies want it
STREAMS = ("param_gather", "grad_scatter", "grad_reduce", "param_broadcast", "host_update")

# ---------------------------------------------------------------------------- factors


@dataclass(frozen=True)
class Factors:
    """Numbers of shards of parameters, gradients and optimizer states (AMSP, section IV)."""

    p: int = 1
    g: int = 1
    os: int = 1


def parse_strategy(text: str, ranks: int) -> Factors:
    """Return the factors of a named baseline, "zero3" or "mics:4". Raises ValueError with the
    names."""
    name, _, number = text.partition(":")
    k = int(number) if number.isdigit() else 0
    # fmt: off
    rows = {  #         p      g      os
        "ddp": Factors(1, 1, 1),
        "zero1": Factors(1, 1, ranks),
        "zero2": Factors(1, ranks, ranks),
        "zero3": Factors(ranks, ranks, ranks),
        "mics:K": Factors(k, k, k),
        "zero1.5:K": Factors(1, 1, k),
    }
    # fmt: on
    found = rows.get(f"{name}:K" if k else name)
    if not found:
        raise ValueError(f"--strategy {text}: one of {', '.join(rows)}")
    return found


@functools.cache
def legal_sizes(ranks: int, per_node: int) -> list[int]:
    """Return the shard counts: divisors of all ranks that divide a node's, or are whole nodes."""
    return [n for n in divisors(ranks) if per_node % n == 0 or n % per_node == 0]


def illegal(f: Factors, ranks: int, per_node: int) -> str | None:
    """Return the rule that f breaks, in words, or None (AMSP, section IV). A stricter rule is
    another `if` here: what is listed, checked and said follows. A looser one needs more. For g
    between p and os, say: groups for the two halves of the way (make_groups: first every so many
    ranks, then neighbours, so that what a rank owns stays where broadcast_params gathers it), the
    size of grad_shard and its owned part (shard), what runs on them (scatter_grad, reduce_unit,
    sum_replicas), and what it costs (costs.collectives)."""
    sizes = legal_sizes(ranks, per_node)
    for count in (f.p, f.os):
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
    every = itertools.starmap(Factors, itertools.product(sizes, repeat=3))
    return [f for f in every if not illegal(f, ranks, per_node)]


def check_factors(f: Factors, ranks: int) -> None:
    """Raise ValueError with the broken rule and the nearest legal factors, if f breaks one, as if
    one node had all ranks."""
    if rule := illegal(f, ranks, ranks):
        near = min(
            legal_factors(ranks, ranks), key=lambda legal: math.dist(astuple(legal), astuple(f))
        )
        raise ValueError(
            f"p={f.p} g={f.g} os={f.os}: {rule}; nearest: --p {near.p} --g {near.g} --os {near.os}"
        )


# ---------------------------------------------------------------------------- what a rank holds


@dataclass(eq=False)
class ShardedParam:
    """What this rank holds of one matrix; tensors are flat, and stay where they are for good."""

    name: str  # of the parameter, as in a checkpoint
    module: Matrix
    unit: "Unit"
    owner: int  # layout inter: index in the subgroup of the rank that updates this p-shard
    start: int  # of what this rank updates, within the matrix
    param_shard: Tensor  # (S/p,) newest after broadcast_done
    unsharded_param: Buffer  # (S,) from its event until the layer after the next; p = 1: the shard
    # (S/g,), as owned_param if g > p; sum of the micro-batches, final after finish_gradients
    grad_shard: Tensor
    unsharded_grad: Buffer  # (S,) from the first chunk until its event; or grad_shard itself
    # the part of param_shard that this rank updates: (S/os,); layout inter: (S/p,), others (0,)
    owned_param: Tensor
    owned_grad: Tensor  # the same part of the gradient
    replicas: dist.ProcessGroup | None  # over whom the gradient is summed last; None: nobody
    num_chunks: int  # contributions to its gradient in one backward pass
    # by name, each as large as owned_param, on the GPU or the host
    states: dict[str, Tensor] = field(default_factory=dict)
    chunks_done: int = 0  # contributions of this pass
    # event of param_broadcast, or of host_update: new parameters are in param_shard
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
    params: list[ShardedParam] = field(default_factory=list)  # in the order of use
    after: Sequence[ShardedParam] = ()  # those of the unit after it
    before: Sequence[ShardedParam] = ()  # those of the layer before it
    passes_done: int = 0  # backward passes of this step
    scattered: int = 0  # gradients of this pass that are on their way, from the last param on

    @property
    def is_layer(self) -> bool:
        return self.name.startswith("blocks.")


@dataclass(frozen=True)
class StatePart:
    """A part of a state on this rank, as checkpoint.py saves and loads it. It lies anywhere in the
    flat tensor, or in what a column of ranks has of it, so what some factors, layout and tensor
    mode have saved any others can load."""

    values: Tensor  # (count,), a view: what is loaded is written here
    start: int  # of its first element in the flat tensor
    shape: tuple[int, ...]  # of the whole tensor, without padding
    saves: bool  # this rank saves it: one of those that hold the same
    tp_slice: TensorSlice | None = None  # the flat tensor is this of the whole one; None: all

    def within(self, flat: Tensor) -> Tensor:
        """Return the view (count,) of where it lies in the flat tensor, whatever its shape."""
        return flat.reshape(-1)[self.start : self.start + len(self.values)]


def sum_and_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum of x over the group's n ranks, (S,) -> (S/n,): a
    reduce-scatter on the stream that is current."""
    part = x.new_empty(x.numel() // group.size())
    reduce_scatter(part, x, group=group)
    return part


# ---------------------------------------------------------------------------- states


def check_weights(model: nn.Module, stages: int = 1) -> None:
    """Raise ValueError for a weight that would not train, or would train wrong: one that is no
    Matrix's or Vector's, one that is frozen, a buffer on meta, or a module that two places share.
    stages: of a pipeline, into which the model will be cut."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (Matrix, Vector)):
            paths.setdefault(module, []).append(path)
    for module, (path, *others) in paths.items():
        if others and isinstance(module, Matrix):
            raise ValueError(
                f"{path} and {others[0]} are one Matrix: each use of a matrix in a pass needs a "
                "matrix of its own"
            )
        if others and stages > 1:
            raise ValueError(
                f"--pp {stages}: {path} and {others[0]} are one Vector, and may lie on two stages: "
                "make two, or --pp 1"
            )
    sharded = {id(module.weight) for module in paths}
    wrong = [
        name
        for name, weight in model.named_parameters()
        if id(weight) not in sharded or not weight.requires_grad
    ]
    wrong += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: what is sharded is the weight of a model.Matrix (large) or "
            "Vector (small) that trains, no nn.Linear's and no buffer"
        )


@dataclass(eq=False)
class States:
    """A model's parameters, gradients and optimizer states on this rank, and their travels. Raises
    ValueError if the factors are not legal, or the optimizer needs whole matrices and a rank has
    parts; ConfigError if a rank gets no host memory. A collective of all ranks."""

    # on any device, "meta" best: its parameters are replaced, and its matrices raise their events
    # here: unshard, add_grad
    model: InitVar[nn.Module]
    device: torch.device
    dtype: torch.dtype
    micro_batches: int = 1  # forward and backward passes between two updates
    factors: Factors = Factors()
    # a p-shard is split evenly in its subgroup; or "inter": it has one owner there (AMSP's)
    layout: str = "intra"
    groups: Groups = field(default_factory=Groups)
    overlap: InitVar[tuple[str, ...]] = STREAMS  # those that run under computation
    # a layer's backward uses its matrices more than once, so they are gathered together
    gather_layers: bool = False
    num_chunks: int = 1  # of tokens, if layers run in chunks: contributions to a gradient in a pass
    decay: float = 0.1  # of matrices' weights
    storage: InitVar[str] = "gpu"  # of the optimizer's states, or "host" (HostStates)
    optimizer: Optimizer = ADAMW  # of matrices

    def __post_init__(self, model: nn.Module, overlap: tuple[str, ...], storage: str):
        f, tp = self.factors, self.groups.tp
        if self.optimizer.whole and (self.layout, f.p, tp) != ("inter", 1, 1):
            raise ValueError(
                f"layout={self.layout} p={f.p} tp={tp}: this optimizer needs whole "
                "matrices, which a rank owns with layout=inter p=1 tp=1"
            )
        check_factors(f, self.groups.ranks)
        check_weights(model)
        self.accum_dtype = accumulation_dtype(self.dtype)
        self.grad_dtype = self.accum_dtype if self.micro_batches > 1 else self.dtype
        self.streams = {name: CommStream(self.device, name in overlap) for name in STREAMS}
        self.shapes, self.weight_init = model.shapes, model.weight_init
        self.scalars = make_scalars(self.device, self.accum_dtype)
        # what a checkpoint holds of this rank, by f"{state}.{parameter name}"
        updates = self.scalars.step.view(1)
        self.parts = {"updates": StatePart(updates, 0, (), dist.get_rank() == 0)}
        self.counted_grads: list[Tensor] = []  # of the norm: each element on one rank of all
        self.make_groups()
        self.make_params(model)
        self.make_states(storage)
        self.make_vectors(model)
        self.last_pass = None  # (backward, unit) whose matrix was used last
        self.open_unit: Unit | None = None  # whose backward pass has begun, and is not complete
        self.on_phase: Callable[[str], None] = lambda phase: None  # told when one is enqueued
        self.begin_step()

    # -- who holds what

    def make_groups(self) -> None:
        """Make the groups that this rank is in, by the ranks' arithmetic; None: it is alone. Groups
        of one name and the same ranks share a communicator: a factor's scatter and
        reduce are never over the same two ranks. A collective of all ranks."""
        f = self.factors
        groups = self.groups
        self.subgroup_index = groups.rank % f.os // f.p
        self.param_index = groups.rank % f.p
        self.param_gather_group = groups.get("param_gather", lambda r: r // f.p)
        self.grad_scatter_group = groups.get("grad_reduce", lambda r: r // f.p)
        self.grad_subgroup = groups.get("grad_reduce", lambda r: (r // f.os, r % f.p))
        self.param_subgroup = groups.get("param_broadcast", lambda r: (r // f.os, r % f.p))
        # cross os (intra) or replicate (inter) of a column's part of a matrix; and of embedding,
        # head and whatever a layer does not cut, which are on the ranks of all columns
        n = f.os if self.layout == "intra" else f.p
        self.replicas_of_parts = groups.get("grad_reduce", lambda r: r % n)
        self.replicas_of_wholes = groups.by_position(
            "grad_reduce", lambda stage, r, tp_rank: (stage, r % n)
        )

    def make_params(self, model: nn.Module) -> None:
        """Shard all matrices: allocate what this rank holds, and make their weights views of it."""
        matrices = {
            path: module for path, module in model.named_modules() if isinstance(module, Matrix)
        }
        multiple = self.factors.os * SHARD_ALIGN_ELEMENTS
        padded = {
            path: math.ceil(math.prod(module.shape) / multiple) * multiple
            for path, module in matrices.items()
        }
        owners = {}  # in layout inter: greedy, largest first (AMSP, section IV)
        loads = [0] * (self.factors.os // self.factors.p)
        for path in sorted(padded, key=padded.get, reverse=True):
            owners[path] = loads.index(min(loads))
            loads[owners[path]] += padded[path]
        units: dict[str, Unit] = {}
        self.sharded_params: dict[Matrix, ShardedParam] = {}
        # two for each matrix of a layer, by the layer's parity; embedding and head have one
        self.buffer = functools.cache(
            lambda kind, parity, name, count, dtype: Buffer(self.zeros(count, dtype))
        )
        for path, module in matrices.items():
            name = ".".join(path.split(".")[:2])  # "blocks.0.qkv": "blocks.0"
            unit = units.setdefault(name, Unit(name, len(units)))
            param = self.shard(path, module, unit, padded[path], owners[path])
            module.weight = nn.Parameter(param.as_matrix(param.unsharded_param.data))
            module.events = self
            self.sharded_params[module] = param
            unit.params.append(param)
        self.units = list(units.values())
        for one, two in itertools.pairwise(self.units):
            one.after = two.params
            two.before = one.params if one.is_layer else ()

    def zeros(self, shape, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def shard(self, path: str, module: Matrix, unit: Unit, padded: int, owner: int) -> ShardedParam:
        """Allocate what this rank holds of a matrix of S = padded elements."""
        f = self.factors
        part = padded // f.p
        size = padded // f.os
        first = self.subgroup_index * size
        owned = slice(first, first + size)  # of the p-shard
        if self.layout == "inter":
            owned = slice(0, part if owner == self.subgroup_index else 0)
        param_shard = self.zeros(part, self.dtype)
        owned_param = param_shard[owned]
        grad_shard = self.zeros(part if f.g == f.p else len(owned_param), self.grad_dtype)
        num_chunks = self.num_chunks if unit.is_layer else 1
        place = unit.index % 2, path.replace(f"{unit.name}.", ""), padded
        unsharded_param = Buffer(param_shard)
        if f.p > 1:
            unsharded_param = self.buffer("param", *place, self.dtype)
        unsharded_grad = Buffer(grad_shard)
        if f.g > 1 or num_chunks > 1 and self.grad_dtype != self.accum_dtype:
            dtype = self.accum_dtype if num_chunks > 1 else self.dtype  # where chunks add up
            unsharded_grad = self.buffer("grad", *place, dtype)
        return ShardedParam(
            f"{path}.weight",
            module,
            unit,
            owner,
            self.param_index * part + owned.start,
            param_shard,
            unsharded_param,
            grad_shard,
            unsharded_grad,
            owned_param,
            grad_shard[owned] if f.g == f.p else grad_shard,
            self.replicas_of_parts if module.tp_slice else self.replicas_of_wholes,
            num_chunks,
        )

    def make_states(self, storage: str) -> None:
        """Give each matrix its states, zeros. One of the ranks that hold the same states saves them
        and counts their gradients in the norm: another rank for each matrix."""
        params = self.sharded_params.values()
        sizes = [len(param.owned_param) for param in params]
        states, self.host_states = allocate_states(
            self.optimizer, sizes, self.accum_dtype, self.device, storage
        )
        groups = self.groups
        replica = groups.rank // self.factors.os
        replicas = groups.ranks // self.factors.os
        for i, param in enumerate(params):
            param.states = states[i]
            length = min(len(param.owned_param), param.count - param.start)
            if length <= 0:
                continue  # padding alone, or in layout inter another rank's
            cut = param.module.tp_slice
            saves = i % replicas == replica and (groups.tp_rank == 0 or cut is not None)
            if saves:
                self.counted_grads.append(param.owned_grad)
            for state, values in param.states.items():
                self.parts[f"{state}.{param.name}"] = StatePart(
                    values[:length], param.start, self.shapes[param.name], saves, cut
                )

    def make_vectors(self, model: nn.Module) -> None:
        """Make the small weights of the whole model parts of one vector on every rank, in
        accum_dtype: they are their own masters. Autograd adds to their gradients in place; ranks
        add zeros to those of other stages."""
        names = [name for name, shape in self.shapes.items() if len(shape) == 1]
        sizes = [math.prod(self.shapes[name]) for name in names]
        self.vector_grad = self.zeros(sum(sizes), self.accum_dtype)
        self.vector_states = {
            state.name: self.zeros(sum(sizes), self.accum_dtype) for state in ADAMW.states
        }
        saves = dist.get_rank() == 0
        self.counted_grads.append(self.vector_grad if saves else self.vector_grad[:0])
        modules = dict(model.named_modules())
        flats = self.vector_grad, *self.vector_states.values()
        for name, grad, *states in zip(names, *(flat.split(sizes) for flat in flats)):
            if module := modules.get(name.removesuffix(".weight")):
                module.weight = nn.Parameter(states[0])
                module.weight.grad = grad
            for state, values in zip(self.vector_states, states):
                self.parts[f"{state}.{name}"] = StatePart(values, 0, self.shapes[name], saves)

    # -- parameters: gathered ahead of their use

    def unshard(self, module: Matrix, backward: bool) -> Tensor:
        """Return the weight (rows, cols), whole, and launch the gathers of those that follow.

        backward: the direction of the pass. What reads the weight is enqueued before the next layer
        is unsharded: then the one behind it may be gathered into its place.
        """
        param = self.sharded_params[module]
        unit = param.unit
        if self.last_pass != (backward, unit):
            self.last_pass = backward, unit
            self.begin_pass(unit)
            self.enter_phase(
                f"{'backward' if backward else 'forward'}, {unit.name}, "
                f"{unit.index + 1}/{len(self.units)}"
            )
        if self.factors.p == 1:
            wait(param.broadcast_done)  # they are new; hidden by the update and layers before
            param.broadcast_done = None
            return module.weight
        for params in self.gathers(param, backward):
            self.launch_param_gather(params)
        # hidden by the layer before; in backward by the matrix, unless layers are gathered whole
        wait(param.unsharded_param.event)
        return module.weight

    def gathers(
        self, param: ShardedParam, backward: bool
    ) -> tuple[list[ShardedParam], list[ShardedParam]]:
        """Return what to gather where `param` is used, if it was not gathered ahead, and what to
        gather ahead. All ranks gather in one order, also where one does not use a matrix."""
        unit = param.unit
        if not self.streams["param_gather"].overlap:
            return unit.params, []
        if not backward:
            return unit.params, unit.after
        if self.gather_layers:  # the layer before, once for both of its passes
            return [param], unit.before
        # the next matrix alone: its gather delays no reduction (AMSP, section V-C)
        i = unit.params.index(param)
        return unit.params[i:][::-1], (unit.params[:i] or unit.before)[-1:]

    def launch_param_gather(self, params: list[ShardedParam]) -> None:
        """Launch the all-gathers, (S/p,) -> (S,), of weights that their buffers do not hold yet."""
        params = [param for param in params if param.unsharded_param.held_param is not param]
        if not params:
            return
        stream = self.streams["param_gather"]
        with stream.after_compute():  # buffers are free: the last layer but one is enqueued
            for param in params:
                buffer = param.unsharded_param
                wait(param.broadcast_done)  # param_shard is new; hidden by update and layers before
                all_gather(buffer.data, param.param_shard, group=self.param_gather_group)
                buffer.held_param = param
                buffer.event = stream.record_event()

    def enter_phase(self, phase: str) -> None:
        """Record an event of the compute stream that `progress` can ask for, and tell on_phase; a
        CUDA graph has no phases."""
        event = None
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            event = torch.cuda.current_stream().record_event()
        self.progress_events.append((phase, event))
        self.on_phase(phase)

    def progress(self) -> str:
        """Return the last phase that the device has begun, "" if no other since the last call. It
        does not wait for the device; any thread may ask."""
        text = ""
        events = self.progress_events
        while events and (events[0][1] is None or events[0][1].query()):
            text, _ = events.popleft()
        return text

    # -- gradients: reduced behind their computation

    def begin_step(self) -> None:
        """Begin a step: no gradient of the last one counts."""
        self.misuse = ""  # which matrix was not used once a pass, in words
        # (phase in words, its event); new, since a thread may still read the last step's
        self.progress_events = deque(maxlen=10 * len(self.units))
        for unit in self.units:
            unit.passes_done = 0
        self.vector_grad.zero_()

    def add_grad(self, module: Matrix, compute: Callable[[Tensor, int], Tensor]) -> None:
        """Add a chunk's contribution to a gradient, and launch the reductions after the last one.

        compute(out, beta) writes beta * out + contribution into out (rows, cols). Returns None:
        nothing is left to autograd.
        """
        param = self.sharded_params[module]
        unit = param.unit
        self.begin_pass(unit)
        if param.chunks_done == param.num_chunks or unit.passes_done == self.micro_batches:
            self.misuse = f"{param.name} was used more than once a pass"
            return  # its gradient has gone
        self.open_unit = unit
        buffer = param.unsharded_grad
        if param.chunks_done == 0:
            wait(buffer.event)  # its place is free; hidden by the backward of layer i + 1
        adds = param.chunks_done > 0 or (param.grad_stays and unit.passes_done > 0)
        compute(param.as_matrix(buffer.data), int(adds))
        param.chunks_done += 1
        self.scatter_unit(unit)

    def begin_pass(self, unit: Unit) -> None:
        """End the backward pass of another unit, if it is still open: this one is in use now."""
        if self.open_unit not in (None, unit):
            self.end_pass(self.open_unit)

    def end_pass(self, unit: Unit) -> None:
        """End a unit's backward pass, in which a matrix was not used: what it would have launched
        is what other ranks wait for."""
        if self.factors.p > 1 and unit.is_layer:
            self.launch_param_gather(unit.params[::-1])
        for param in unit.params:
            if param.chunks_done < param.num_chunks:
                self.misuse = self.misuse or (
                    f"{param.name} was used {param.chunks_done} times in "
                    f"a pass, not {param.num_chunks}"
                )
                param.chunks_done = param.num_chunks
        self.scatter_unit(unit)

    def scatter_unit(self, unit: Unit) -> None:
        """Launch the reductions of a unit's gradients of this pass, last param first, up to the
        first that is not complete: all ranks launch the same in the same order, whatever each of
        them uses."""
        last = unit.passes_done == self.micro_batches - 1
        for param in unit.params[::-1][unit.scattered :]:
            if param.chunks_done < param.num_chunks:
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
        """Launch the way of a micro-batch's gradient (S,) to what is kept of it (grad_shard), where
        it is added to the micro-batches before. last: of the step."""
        f = self.factors
        stream = self.streams["grad_scatter"]
        x = param.unsharded_grad.data
        replaces = param.unit.passes_done == 0
        with stream.after_compute():  # it is computed; the last update has read grad_shard
            if f.g > 1:
                x = x.to(self.dtype)  # else reduce_unit sends it
            if f.p > 1:  # (S,) -> (S/p,)
                x = sum_and_scatter(x, self.grad_scatter_group)
            if f.g > f.p and self.layout == "intra":  # (S/p,) -> (S/os,)
                x = sum_and_scatter(x, self.grad_subgroup)
            elif f.g > f.p:  # (S/p,) -> (S/p,) all-reduce, then select & drop (AMSP, section IV)
                size = len(param.grad_shard)
                if last and not replaces:
                    x[:size] += param.grad_shard  # joins before the final sum, once
                dist.all_reduce(x, group=param.replicas if last else self.grad_subgroup)
                x = x[:size]
                replaces = replaces or last
            if replaces:
                param.grad_shard.copy_(x)
            else:
                param.grad_shard.add_(x)
            stream.done_reading(param.as_matrix(param.unsharded_grad.data))
        param.unsharded_grad.event = stream.record_event()

    def reduce_unit(self, unit: Unit) -> None:
        """Launch the sum over the replicas of a layer's gradients, which are complete: (S/g,) to
        what this rank owns; in layout inter with g = p, to all of it. All-reduces in one
        launch, but for gradients that are cast: a whole layer's copies would take memory."""
        if self.factors.g > self.factors.p and self.layout == "inter":
            return  # scatter_grad has summed over all replicas
        if self.factors.g == self.factors.os and not any(param.replicas for param in unit.params):
            return  # there is one of each gradient: no sum
        casts = self.grad_dtype != self.dtype
        with self.streams["grad_reduce"].after_compute():
            # their grad_shards are complete; hidden by the backward of the layers that follow
            wait(self.streams["grad_scatter"].record_event())
            for _, params in itertools.groupby(
                unit.params, lambda param: param if casts else param.replicas
            ):
                self.sum_replicas(list(params))

    def sum_replicas(self, params: list[ShardedParam]) -> None:
        """Enqueue the sum of gradients over their replicas: all-reduces in one launch. (A function,
        whose copies are gone before the next ones are made.)"""
        intra = self.layout == "intra"
        scatters = intra and self.factors.g < self.factors.os
        group = params[0].replicas
        if not (group or scatters):
            return
        parts = [param.grad_shard.to(self.dtype) for param in params]
        if scatters:  # (S/p,) -> (S/os,)
            parts = [sum_and_scatter(x, self.grad_subgroup) for x in parts]
        if group:
            with dist._coalescing_manager(group):
                for x in parts:
                    dist.all_reduce(x, group=group)
        for param, x in zip(params, parts):
            if x is not param.grad_shard:
                kept = param.owned_grad if intra else param.grad_shard
                kept.copy_(x)

    def finish_gradients(self) -> None:
        """Sum vectors' gradients after the step's last backward, and let compute wait for all. A
        step whose gradients are not those of its passes becomes one that is not finite, on all
        ranks: vectors' gradients and the norm tell them, so that no step waits for an agreement."""
        for unit in reversed(self.units):
            while unit.passes_done < self.micro_batches:  # a matrix came in never
                self.end_pass(unit)
        for module, param in self.sharded_params.items():
            if module.weight.grad is not None:
                self.misuse = f"{param.name} was used beside model.project"
                module.weight.grad = None
        self.last_pass = None
        self.enter_phase("update")
        if self.misuse:
            self.vector_grad.fill_(math.nan)
        dist.all_reduce(self.vector_grad)
        # every grad_shard is final; hidden by the backward, but for its last layers' reductions
        wait(self.streams["grad_scatter"].record_event())
        wait(self.streams["grad_reduce"].record_event())

    def check_uses(self) -> None:
        """Raise ConfigError on all ranks if a step was not finite since one of them has not used
        each matrix once a pass. A collective of all ranks."""
        advice = "every rank uses a Matrix once in each pass, if need be with no tokens, x[:0]"
        if error := first_error(self.misuse and f"{self.misuse}; {advice}"):
            raise ConfigError(error)

    # -- the update

    def update(
        self, lr: float | Tensor, clip: float, loss: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Update all weights with the gradient's global norm clipped to `clip` (0: off), and launch
        the new parameters' travel. A tensor lr, on the device, is heard by a CUDA graph, too.

        Returns the norm, and whether it and the loss of all ranks are finite, on the device; if
        not, nothing was changed.
        """
        # weights may change: in unshard, compute has waited for all gathers and broadcasts of them
        norm = global_norm(self.counted_grads, self.accum_dtype)
        finite = set_scalars(self.scalars, lr, clip, norm, loss)
        # small weights by AdamW without decay, on every rank alike: they are their own masters
        unused = torch.empty_like(self.vector_grad)
        adamw(
            Update(
                "vectors",
                0,
                unused,
                self.vector_grad,
                self.vector_states,
                decay=0.0,
                **self.scalars._asdict(),
            )
        )
        beside = contextlib.nullcontext()
        if self.host_states:
            self.host_states.begin()
            beside = self.streams["host_update"].after_compute()  # gradients and scalars are final
        with beside:
            for unit in self.units:
                for param in unit.params:
                    if len(param.owned_param):
                        self.update_param(param)
                self.broadcast_params(unit)
        return norm, finite

    def update_param(self, param: ShardedParam) -> None:
        """Update what this rank owns of a matrix: where its states lie, or as they visit."""
        visits = [(slice(None), param.states)]
        if self.host_states:
            visits = self.host_states.visits(param.states)
        for part, states in visits:
            weight, grad = param.owned_param[part], param.owned_grad[part]
            if self.optimizer.whole:  # (S,) -> (rows, cols)
                weight, grad = param.as_matrix(weight), param.as_matrix(grad)
                states = {name: param.as_matrix(state) for name, state in states.items()}
            first = param.start + (part.start or 0)
            self.optimizer.update(
                Update(
                    param.name,
                    first,
                    weight,
                    grad,
                    states,
                    decay=self.decay,
                    **self.scalars._asdict(),
                )
            )

    def broadcast_params(self, unit: Unit) -> None:
        """Launch the travel of a unit's new parameters to the subgroup: in layout inter from their
        owners, (S/p,), else (S/os,) -> (S/p,)."""
        stream = self.streams["param_broadcast"]
        group = self.param_subgroup
        for param in unit.params:
            param.unsharded_param.held_param = None  # what was gathered is old
        if not (group or self.host_states):
            return  # they are new where compute goes on
        on_gpu = self.device.type == "cuda"
        with stream.after_compute():  # the unit is updated
            if group and self.layout == "inter":
                # of several owners, in one launch of NCCL's
                with dist._coalescing_manager(group, self.device if on_gpu else None):
                    for param in unit.params:
                        dist.broadcast(param.param_shard, group=group, group_src=param.owner)
            elif group:
                for param in unit.params:
                    # gloo may not read where it writes
                    own = param.owned_param if on_gpu else param.owned_param.clone()
                    all_gather(param.param_shard, own, group=group)
        # where broadcasts do not overlap, they run where the update does
        broadcast_done = stream.record_event() or self.streams["host_update"].record_event()
        for param in unit.params:
            param.broadcast_done = broadcast_done

    # -- loading and saving

    def state_parts(self) -> dict[str, StatePart]:
        """Return what a checkpoint holds of this rank, by f"{state}.{parameter name}", and the
        number of updates. Of states on the host it is what they are until the next update."""
        if self.host_states:
            self.host_states.synchronize()
        return self.parts

    def load(self, weight: Callable[[str], Tensor]) -> None:
        """Set all parameters: weight(name) returns a whole one, of any dtype and device, and each
        rank takes what it owns. Raises ConfigError on all ranks. A collective of all ranks."""

        def load_masters() -> None:
            parts = self.state_parts()
            for name in self.shapes:
                if part := parts.get(f"master.{name}"):
                    whole = weight(name)
                    here = part.tp_slice.extract(whole) if part.tp_slice else whole
                    part.values.copy_(part.within(here))

        all_or_none(load_masters)
        self.loaded()

    def loaded(self) -> None:
        """Set the weights to their masters, after a checkpoint was read into state_parts()."""
        for unit in self.units:
            for param in unit.params:
                param.owned_param.copy_(param.states["master"])
            self.broadcast_params(unit)

    def full(self, name: str) -> Tensor:
        """Return a whole parameter in accum_dtype; a collective of all ranks."""
        whole = self.zeros(self.shapes[name], self.accum_dtype)
        part = self.state_parts().get(f"master.{name}")
        if part and part.saves:
            here = part.tp_slice.extract(whole) if part.tp_slice else whole  # zeros, too
            part.within(here).copy_(part.values)
            if part.tp_slice:
                part.tp_slice.insert(here, whole)
        dist.all_reduce(whole)  # an element's one owner, and zeros
        return whole

    def bytes(self) -> dict[str, int]:
        """Return the bytes that this rank really holds of each kind, the vectors apart."""
        params = self.sharded_params.values()
        return {
            "parameters": sum(param.param_shard.nbytes for param in params),
            "gradients": sum(param.grad_shard.nbytes for param in params),
            "optimizer": sum(state.nbytes for param in params for state in param.states.values()),
        }
