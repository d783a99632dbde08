"""Shard parameters, gradients and optimizer states over ranks, each by a factor of its own (AMSP).

AMSP (arXiv 2311.00257) calls these three the model states. A sharding factor says into how many
shards one of them is split. On R ranks, the factors p (parameters), g (gradients) and os (optimizer
states) are legal if

    p | g | os | R, and g equals p or os        a | b: a divides b

Besides, p and os divide the number of ranks in a node, or are multiples of it (`legal_sizes`).

A model with P parameters in bf16, and AdamW's states in float32, takes per rank (section IV):

    2P/p     bytes of parameters
    2P/g     bytes of gradients; 4P/g if several micro-batches accumulate (see grad_sums)
    12P/os   bytes of optimizer states: the master weight and two moments. On the host they take
             10P/os, because the bf16 weight is already one half of the master weight (optim.py)

Example: p = 2 and os = 4 on R = 8 ranks. The p-shards a and b are the halves of a matrix; a0 and a1
are the halves of a.

    rank           0   1   2   3   4   5   6   7
    holds          a   b   a   b   a   b   a   b
    updates        a0  b0  a1  b1  a0  b0  a1  b1

    param gather   {0,1} {2,3} {4,5} {6,7}    its ranks hold a whole matrix together
    os group       {0,1,2,3} {4,5,6,7}        its ranks update a whole matrix together
    subgroup       {0,2} {1,3} {4,6} {5,7}    the same p-shard, in one os group
    cross os       {0,4} {1,5} {2,6} {3,7}    the same optimizer states
    replicate      {0,2,4,6} {1,3,5,7}        the same p-shard, on all ranks

Ranks are numbered node by node, and the shards of one matrix lie on neighbouring ranks. So they
fill one node before they use the next one. The example has layout "intra" (intra-tensor): a
subgroup splits its p-shard evenly. In layout "inter" (inter-tensor), which AMSP uses, the p-shard
of each matrix has one owner in the subgroup, and the owner updates all of it.

Where does a gradient go? Take R = 8 ranks, os = 8, layout intra and two micro-batches. Rank 5 holds
b, and updates b2, the third quarter of b. A matrix has S elements. There are two legal values of g:

                     p = 2, g = 2, os = 8                  p = 2, g = 8, os = 8
    micro-batch 1    reduce-scatter {4,5}: S -> S/2        reduce-scatter {4,5}: S -> S/2
                                                           reduce-scatter {1,3,5,7}: S/2 -> S/8
                     keep S/2, for b                       keep S/8, for b2
    micro-batch 2    the same; add to the S/2              the same; add to the S/8
    after it         reduce-scatter {1,3,5,7}: S/2 -> S/8  -
    update           b2, S/8                               b2, S/8
    new parameters   all-gather {1,3,5,7}: S/8 -> S/2      the same
    next forward     all-gather {4,5}: S/2 -> S            the same

Here g = os takes a quarter of the gradient memory that g = p takes. In return g = p communicates
less: it runs the second reduce-scatter once per step, and g = os once per micro-batch. The next
table says, for any legal factors, what follows the reduce-scatter S -> S/p. At first, read only the
row of intra, the default. Layout inter is for optimizers that update whole matrices.

    layout   g = p: once per step, in reduce_unit    g = os: per micro-batch, in scatter_grad
    intra    reduce-scatter in the subgroup, then    reduce-scatter in the subgroup; then, once per
             all-reduce over cross os                step in reduce_unit, all-reduce over cross os
    inter    all-reduce over replicate               all-reduce in the subgroup; in the last
                                                     micro-batch over replicate instead

A group of one rank needs no collective. New parameters return to the subgroup by all-gathers
(intra), or by broadcasts from their owners (inter).

Each kind of communication has a CUDA stream of its own (streams.CommStream). This table says which
function launches it, what computation hides it, and in which function the compute stream waits for
it. "(on X)" means that stream X waits instead:

    stream           launched in          hidden under                   waited for in
    param_gather     launch_param_gather  the layer that runs just       unshard
                                          before; in backward of layers
                                          that run whole, the matrix
                                          that is used just before
    grad_scatter     scatter_grad         the backward of the layers     add_grad, before it fills
                                          that run next                  the buffer again;
                                                                         reduce_unit (on
                                                                         grad_reduce);
                                                                         finish_gradients
    grad_reduce      reduce_unit          the same, in the last          finish_gradients
                                          micro-batch
    param_broadcast  broadcast_params     the update of the layers that  unshard (p = 1),
                                          follow, the next forward       launch_param_gather
    host_update      update, if states    the next forward               broadcast_params (on
                     are on the host                                     param_broadcast);
                                                                         state_parts (the host)
    stream_in, _out  HostStates           the updates of other pieces    HostStates
                     .stream_through      of the states                  .stream_through

When is a weight gathered, if p > 1? Here are four layers that run in token chunks, in the first
micro-batch of a step. Each gather stands below the layer whose beginning launches it:

    forward    compute       | embedding    | layer 0 | layer 1 | layer 2 | layer 3 | head |
               param_gather  | embedding, 0 | 1       | 2       | 3       | head    |      |
    backward   compute       | layer 3      | layer 2 | layer 1 | layer 0 |
               param_gather  |              | 1       | 0       |         |

Nothing hides the gathers of the embedding and of layer 0. There are two sets of buffers for the
gathered weights of a layer: even layers use one, and odd layers the other. So backward still finds
layers 3 and 2 in them, and the next micro-batch finds layers 0 and 1. Embedding and head have
buffers of their own, and are gathered once per step. If layers run whole (gather_layers is False),
backward gathers only one matrix ahead. If p = 1, nothing is gathered, and unshard waits for
param_broadcast.

A stream that does not overlap (--overlap leaves it out, or on a CPU) is the compute stream itself.
Small weights (Vector: norms and biases) are not sharded. Their gradients, the gradient's norm and
the loss are all-reduced without overlap, because they are small.

Set-up, and then a training step as train.run_step runs it:

    states = States(model, device, torch.bfloat16, micro_batches=2, factors=Factors(2, 2, 8))
    states.load(weight)                      # weight(name) returns a whole tensor

    states.begin_step()
    for tokens, labels in micro_batches:     # each Matrix calls unshard and add_grad
        model(tokens, labels, scale).backward()
    states.finish_gradients()
    norm, finite = states.update(lr, clip)

Gradients are summed over micro-batches and ranks, and never averaged. So every micro-batch on every
rank gets the same scale: 1 / (number of labels in the whole batch, on all ranks).

Every rank must use every Matrix that trains exactly once per pass. Otherwise the step changes
nothing, and check_uses raises an error that names the matrix. Uses of frozen matrices are not
counted.

A tied matrix is embedding and head (ModelConfig.tied), so it is used twice. A backward pass adds
two contributions to its gradient: the head's first, and the embedding's last. So its reduction
starts at the end of the pass, where little computation is left to hide it. If one rank has both the
embedding and the head, tying them changes what the rank holds and sends:

    unsharded weight     one buffer instead of two. Layers do not use this buffer, so it still holds
                         the weight, gathered for the embedding, when the head needs it
    unsharded gradient   one buffer instead of two, but in float32, because two contributions add up
    states, messages     of one matrix instead of two

In a pipeline the first and the last stage each hold a copy of the tied matrix, with its states. At
the end of a step, the two ranks that update the same part of it all-reduce their gradients of this
part: S/os elements, or S/p in layout inter. Nothing hides this. Both copies get the same update, so
they stay equal.

A frozen matrix (ops.Weight) takes 2/p bytes per parameter and nothing else. It is gathered in
forward and in backward like other matrices. It sends no gradients and no new parameters. A
checkpoint holds it as "frozen.NAME", in the compute dtype. The first layers may need no backward
(LLaMA.forward_only_layers). Then backward does not gather their weights.

Left out: quantised communication, learning rates per parameter, other matrices that are used twice.
"""

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, astuple, dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import divisors
from ops import Matrix, TensorSlice, Vector, accumulation_dtype
from optim import (
    ADAMW,
    REST,
    Optimizer,
    Update,
    allocate_states,
    global_norm,
    join_master,
    make_scalars,
    round_weight,
    set_scalars,
    split_master,
)
from ranks import ConfigError, Groups, all_gather, all_or_none, first_error, reduce_scatter
from streams import Buffer, CommStream, wait

SHARD_ALIGN_ELEMENTS = 128  # shards start at multiples of it, for the fastest kernels and copies
STREAMS = ("param_gather", "grad_scatter", "grad_reduce", "param_broadcast", "host_update")
# The most micro-batches that grad_sums="dtype" may add up. A sum in bf16 can lose a summand that is
# smaller than 1/256 of the sum (1 + 1/300 is rounded to 1). The last of 128 equal summands is 1/128
# of their sum, so none is lost
MOST_ROUNDED_SUMMANDS = 128
# Outside an update, master weights are rounded, joined and split in pieces, so that temporary
# tensors are small
SMALL_PIECE_ELEMENTS = 2**20

# ---------------------------------------------------------------------------- factors


@dataclass(frozen=True)
class Factors:
    """The numbers of shards of parameters, gradients and optimizer states (AMSP, section IV).

    On R ranks they are legal if p | g | os | R, if g equals p or os, and if p and os divide the
    number of ranks in a node or are multiples of it. On 8 ranks with p = 2 and os = 8, say, (2, 2,
    8) and (2, 8, 8) are legal, and (2, 4, 8) is not. The module's docstring follows a gradient
    through both.
    """

    p: int = 1
    g: int = 1
    os: int = 1


def parse_strategy(text: str, ranks: int) -> Factors:
    """Return the factors of a named strategy, such as "zero3" or "mics:4". Raises ValueError with
    all names if the name is unknown."""
    name, _, number = text.partition(":")
    k = int(number) if number.isdecimal() else 0
    # fmt: off
    rows = {  #         p      g      os
        "ddp": Factors(1, 1, 1),
        "zero1": Factors(1, 1, ranks),
        "zero2": Factors(1, ranks, ranks),
        "zero3": Factors(ranks, ranks, ranks),
        "mics:K": Factors(k, k, k),  # MiCS: each K ranks hold all model states together
        "zero1.5:K": Factors(1, 1, k),  # zero1 within each K ranks
    }
    # fmt: on
    factors = rows.get(f"{name}:K" if k else name)
    if not factors:
        raise ValueError(
            f"--strategy {text} is unknown; choose one of {', '.join(rows)}, where K is a number "
            "of ranks"
        )
    return factors


@functools.cache
def legal_sizes(ranks: int, per_node: int) -> list[int]:
    """Return the legal numbers of shards: the divisors of `ranks` that divide `per_node`, the
    number of ranks per node, or that are multiples of it."""
    return [n for n in divisors(ranks) if per_node % n == 0 or n % per_node == 0]


def illegal(f: Factors, ranks: int, per_node: int) -> str | None:
    """Return the rule that the factors break, in words, or None if they are legal (AMSP, section
    IV).

    To add a rule, add an `if` here: the planner, the error messages and legal_factors all use this
    function. Relaxing a rule takes more than deleting an `if`. AMSP has only g = p and g = os. To
    allow a g between them:

        make_groups               two groups in place of the subgroup. Per micro-batch, ranks that
                                  are os/g steps apart in the subgroup scatter (S/p,) -> (S/g,).
                                  Once per step, os/g neighbours scatter (S/g,) -> (S/os,). In this
                                  order a rank owns the slice that broadcast_params expects
        shard_matrix              the size of grad_shard, and of the part of it that a rank owns
        scatter_grad, reduce_unit, sum_replicas     the collectives of these groups
        costs.Plan.collectives                      what they cost
    """
    sizes = legal_sizes(ranks, per_node)
    for count in (f.p, f.os):
        if count not in sizes:
            return (
                f"{count} shards do not fit {ranks} ranks with {per_node} per node; legal numbers "
                f"of shards are {', '.join(map(str, sizes))}"
            )
    if f.os % f.p:
        return f"p={f.p} does not divide os={f.os}; the dependency rule is p | g | os"
    if f.g not in (f.p, f.os):
        return f"g must be p or os, here {f.p} or {f.os}"
    return None


def legal_factors(ranks: int, per_node: int) -> list[Factors]:
    """Return all legal factors, in ascending order. One node of 8 ranks has 16."""
    sizes = legal_sizes(ranks, per_node)
    candidates = itertools.starmap(Factors, itertools.product(sizes, repeat=3))
    return [f for f in candidates if not illegal(f, ranks, per_node)]


def check_factors(f: Factors, ranks: int) -> None:
    """Raise ValueError if the factors are illegal, with the broken rule and the nearest legal
    factors. It does not check the rule for nodes: it takes all ranks as one node."""
    if rule := illegal(f, ranks, ranks):
        nearest = min(
            legal_factors(ranks, ranks), key=lambda legal: math.dist(astuple(legal), astuple(f))
        )
        raise ValueError(
            f"p={f.p} g={f.g} os={f.os}: {rule}; the nearest legal choice is "
            f"--p {nearest.p} --g {nearest.g} --os {nearest.os}"
        )


# ---------------------------------------------------------------------------- what a rank holds


@dataclass(eq=False)
class ShardedParam:
    """What this rank holds of one matrix with S elements, padding included.

    All tensors are flat, and keep their addresses for the whole run. For each buffer the comment
    says how many elements it has, and when its contents are valid.
    """

    name: str  # of the parameter, as in a checkpoint
    module: Matrix
    unit: "Unit"
    # layout inter: the owner of this p-shard, as its index in the subgroup; -1 if it is frozen
    owner: int
    shard_start: int  # index of param_shard's first element in the flat matrix
    owned_start: int  # index of the first owned element in the flat matrix

    # parameters. A frozen matrix has only these two; its other tensors below are empty, (0,)
    param_shard: Tensor  # (S/p,): has the new parameters once `broadcast_done` is reached
    # (S,): valid once its `event` is reached. Every second layer uses the same buffer, so forward
    # refills layer i's buffer for layer i + 2, and backward for layer i - 2. Embedding and head
    # have buffers of their own. If p = 1, it is param_shard
    unsharded_param: Buffer

    # gradients
    # the sum over this step's micro-batches so far. After finish_gradients, its part owned_grad
    # (perhaps all of it) is also the sum over all ranks. Size: (S/g,), with one exception: in
    # layout inter with g > p, the owner has (S/p,), and the other ranks have (0,)
    grad_shard: Tensor
    # (S,): the gradient of one micro-batch, from its first contribution until its `event` is
    # reached; or grad_shard itself, if grad_accumulates_in_place
    unsharded_grad: Buffer

    # what this rank updates
    # views of param_shard and of grad_shard: (S/os,). Layout inter: (S/p,) on the owner, (0,) on
    # the other ranks
    owned_param: Tensor
    owned_grad: Tensor
    # the ranks with the same owned_grad (intra) or the same p-shard (inter), which all-reduce their
    # gradients once per step; None: only this rank
    replica_group: dist.ProcessGroup | None
    # how many times a backward pass on this rank adds to the gradient. In a layer: once per token
    # chunk. Embedding and head: once, but twice if they are one tied matrix on one rank. Frozen: 0
    contributions: int
    # optimizer states by name, each as large as owned_param, on the GPU or on the host. On the host
    # REST may replace "master" (Optimizer.stored_dtypes)
    states: dict[str, Tensor] = field(default_factory=dict)

    # progress
    contributions_done: int = 0  # so far in this backward pass
    # event of param_broadcast or of host_update: param_shard has the new parameters
    broadcast_done: object = None

    @property
    def grad_accumulates_in_place(self) -> bool:
        """Return whether backward adds to grad_shard itself, without a scatter_grad."""
        return self.unsharded_grad.data is self.grad_shard

    @property
    def is_complete(self) -> bool:
        """Return whether this backward pass has added all contributions to the gradient."""
        return self.contributions_done == self.contributions

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the matrix without padding."""
        return math.prod(self.module.shape)

    def as_matrix(self, flat: Tensor) -> Tensor:
        """Return the view (rows, cols) of a flat tensor (S,)."""
        return flat[: self.num_elements].view(self.module.shape)


@dataclass(eq=False)
class Unit:
    """The matrices of one layer, or one matrix outside the layers: the embedding, or the head. In
    forward, all matrices of a unit are gathered at once. A tied matrix belongs to the embedding."""

    name: str  # such as "blocks.0"
    index: int  # the unit's number, in the order of use
    params: list[ShardedParam] = field(default_factory=list)  # in the order of use
    # whether backward reads the unit's weights. It does not read those of embedding and head, nor
    # those of LLaMA.forward_only_layers
    read_in_backward: bool = False
    next_params: Sequence[ShardedParam] = ()  # of the next unit
    # of the previous unit, which backward gathers ahead; empty if backward does not read them
    previous_params: Sequence[ShardedParam] = ()
    # whether its optimizer states are on the GPU although the others are on the host
    has_resident_states: bool = False
    passes_done: int = 0  # backward passes of this step that are complete
    # index, in the order of backward, of the first gradient whose reduction is not launched yet
    next_to_scatter: int = 0

    @property
    def is_layer(self) -> bool:
        return self.name.startswith("blocks.")

    @property
    def trained_params(self) -> list[ShardedParam]:
        """Return the params that are not frozen, in the order of use."""
        return [param for param in self.params if not param.module.frozen]


class GatherPlan(NamedTuple):
    """Which parameters unshard gathers. It skips those whose buffers already hold them."""

    # gathered first: the parameter that is about to be used, and parameters of the same unit that
    # all ranks gather in the same order
    now: Sequence[ShardedParam]
    ahead: Sequence[ShardedParam]  # launched after them, for a later use


@dataclass(frozen=True)
class StatePart:
    """The part of one state of one parameter that this rank holds, for checkpoint.py.

    It is a range of the flat full tensor, or of the flat tensor-parallel slice of it. So a
    checkpoint can be loaded with other factors, another layout or another tensor-parallel mode.

    Its values are those that the optimizer sees. They are read and written by the methods, because
    a master weight may be stored as two tensors: the bf16 weight, and the rest (optim.join_master).
    """

    stored: Tensor  # (count,), a view of the state; if `weight` is given, the rest
    start: int  # index of the first value in the flat tensor
    shape: tuple[int, ...]  # of the full tensor, without padding
    saved_here: bool  # whether this rank, of all that hold these values, saves them to checkpoints
    # the slice of the full tensor in which `start` counts; None: the full tensor
    tp_slice: TensorSlice | None = None
    weight: Tensor | None = None  # (count,), a view of the bf16 weight; None: `stored` is the state

    @property
    def count(self) -> int:
        return len(self.stored)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values."""
        return self.stored.dtype if self.weight is None else torch.float32

    @property
    def nbytes(self) -> int:
        """Return the bytes of the values."""
        return self.count * self.dtype.itemsize

    def pieces(self, device: torch.device) -> Iterator[Tensor]:
        """Yield the values in order, in tensors (n,). If a master weight is stored as two tensors,
        join them on the device, SMALL_PIECE_ELEMENTS at a time. Other values come all at once, as
        the view `stored`.

        device: where they are joined. A thread must pass the CPU: on a GPU the join is compiled,
        and several threads must not compile at the same time."""
        if self.weight is None:
            yield self.stored
            return
        for weight, rest in zip(*map(split_into_pieces, (self.weight, self.stored))):
            master = torch.empty(len(rest), dtype=torch.float32, device=device)
            join_master(master, weight.to(device), rest.to(device))
            yield master

    def read(self) -> Tensor:
        """Return the values (count,) on the CPU: a view of the state, or a copy."""
        if self.weight is None:
            return self.stored.cpu()
        values = torch.empty(self.count, dtype=self.dtype)
        self.copy_to(values)
        return values

    def copy_to(self, values: Tensor, device: torch.device | None = None) -> None:
        """Copy the values into a tensor (count,) of any dtype and device. device: where master
        weights are joined, see `pieces`; None: where `values` are."""
        first = 0
        for piece in self.pieces(device or values.device):
            values[first : first + len(piece)].copy_(piece)
            first += len(piece)

    def write(self, values: Tensor, first: int = 0) -> None:
        """Set the values from the index `first` on. values (n,): of any dtype and device."""
        end = first + len(values)
        if self.weight is None:
            self.stored[first:end].copy_(values)
            return
        pieces = (values, self.weight[first:end], self.stored[first:end])
        for master, weight, rest in zip(*map(split_into_pieces, pieces)):
            # the rest may lie on another device than the weight
            new_weight = torch.empty_like(weight, device=master.device)
            new_rest = torch.empty_like(rest, device=master.device)
            split_master(master.to(torch.float32), new_weight, new_rest)
            weight.copy_(new_weight)
            rest.copy_(new_rest)

    def select(self, tensor: Tensor) -> Tensor:
        """Return the view (count,) of this part's elements in a tensor: the full one, or the
        tensor-parallel slice of it. The tensor need not be flat."""
        return tensor.reshape(-1)[self.start : self.start + self.count]


def split_into_pieces(flat: Tensor) -> Sequence[Tensor]:
    """Return views of a flat tensor, of SMALL_PIECE_ELEMENTS each; the last one may be shorter."""
    return flat.split(SMALL_PIECE_ELEMENTS)


def sum_and_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter x over the n ranks of a group, on the current stream: (S,) -> (S/n,)."""
    shard = x.new_empty(x.numel() // group.size())
    reduce_scatter(shard, x, group=group)
    return shard


def accumulate(total: Tensor, x: Tensor, first: bool) -> None:
    """Set the total to x, if this is the first summand; otherwise add x to it."""
    if first:
        total.copy_(x)
    else:
        total.add_(x)


# ---------------------------------------------------------------------------- before sharding


# the parts of a model that pipeline.keep_stage leaves on some stages only
STAGE_PARTS = "embed", "blocks", "norm", "head"


def check_weights(model: nn.Module, stages: int = 1) -> None:
    """Raise ValueError for a weight that would not train, or that would train wrong.

    These are: a weight that belongs to no Matrix or Vector; a buffer on the meta device; and a
    Matrix with two paths in the model, unless ModelConfig.tied says that these are embed and head.
    In a pipeline these are also: a Vector with two paths, which may be on two stages; and a Matrix
    outside embed, layers and head, of which each stage would have a copy. stages: the number of
    pipeline stages into which the model will be split.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (Matrix, Vector)):
            paths.setdefault(module, []).append(path)
    for module, (path, *others) in paths.items():
        if model.cfg.tied and path == "embed" and "head" in others:
            others.remove("head")
        if others and isinstance(module, Matrix):
            raise ValueError(
                f"{path} and {others[0]} are the same Matrix. A Matrix is used once per pass, so "
                "give each of them a Matrix of its own. Only embed and head may be one Matrix, if "
                "ModelConfig.tied is True."
            )
        if others and stages > 1:
            raise ValueError(
                f"--pp {stages}: {path} and {others[0]} are the same Vector, and may be on two "
                "pipeline stages. Make two Vectors, or use --pp 1."
            )
        if stages > 1 and isinstance(module, Matrix) and path.split(".")[0] not in STAGE_PARTS:
            raise ValueError(
                f"--pp {stages}: each pipeline stage would have a copy of the Matrix {path}. If "
                "embed_tokens uses it, make it a part of the embedding (self.embed.NAME = Matrix("
                "...)). If apply_head uses it, make it a part of the head (self.head.NAME = Matrix("
                "...)). Or use --pp 1."
            )
    embed, head = getattr(model, "embed", None), getattr(model, "head", None)
    if model.cfg.tied and None not in (embed, head) and embed is not head:
        raise ValueError(
            "ModelConfig.tied is True, but embed and head are two matrices. Write self.head = "
            "self.embed, or set ModelConfig.tied to False."
        )
    sharded = {id(module.weight) for module in paths}
    wrong = [name for name, weight in model.named_parameters() if id(weight) not in sharded]
    wrong += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: these would not train. Only the weight of a model.Matrix (large) "
            "or a model.Vector (small) is updated, unless it is frozen. The weights of other "
            "modules, such as nn.Linear, are not, and a buffer on the meta device gets no values."
        )


def assign_owners(sizes: dict[str, int], num_owners: int, first: str = "") -> dict[str, int]:
    """Return the owner of each matrix in layout inter, by its path: largest matrix first, to the
    owner with the fewest elements so far (AMSP, section IV). sizes: elements by path. first: the
    path of a matrix that is assigned before all others, so that owner 0 gets it."""
    owners = {}
    loads = [0] * num_owners
    paths = sorted(sizes, key=sizes.get, reverse=True)
    paths.sort(key=lambda path: path != first)  # moves `first` to the front, and keeps the order
    for path in paths:
        owners[path] = loads.index(min(loads))
        loads[owners[path]] += sizes[path]
    return owners


# ---------------------------------------------------------------------------- states


@dataclass(eq=False)
class States:
    """The model states on this rank: parameters, gradients and optimizer states, and the
    communication that moves them.

    The methods are in the order in which they run: set-up first, then a step. The constructor
    raises ValueError in four cases: the factors are illegal; a weight would not train; the
    optimizer needs whole matrices and this rank would own parts; grad_sums="dtype" would add up too
    many micro-batches. It raises ConfigError if a rank gets no host memory. A collective of all
    ranks.
    """

    # on any device. Use "meta", which takes no memory, because all parameters are replaced. From
    # now on its matrices call unshard and add_grad of this object
    model: InitVar[nn.Module]
    device: torch.device
    dtype: torch.dtype  # the compute dtype: of parameters, and of gradients while they are sent
    micro_batches: int = 1  # forward and backward passes per update
    factors: Factors = Factors()
    layout: str = "intra"  # or "inter": the module's docstring has both
    groups: Groups = field(default_factory=Groups)
    overlap: InitVar[tuple[str, ...]] = STREAMS  # the streams that run concurrently with compute
    # True: backward gathers all matrices of a layer at once. It must be True if layers run in token
    # chunks, or are recomputed. False: backward gathers one matrix at a time
    gather_layers: bool = False
    num_chunks: int = 1  # token chunks of a layer; each contributes to the gradients in a pass
    decay: float = 0.1  # weight decay of matrices
    storage: InitVar[str] = "gpu"  # where optimizer states are; or "host" (optim.HostStates)
    # with storage "host": how many of this stage's first layers have their states on the GPU. The
    # embedding's states then stay there, too, because the forward needs it before the layers
    resident_states: InitVar[int] = 0
    optimizer: Optimizer = ADAMW  # of matrices; its field `vectors` is the optimizer of vectors
    seed: int = 0  # of the run, for an optimizer that rounds at random
    # the dtype in which gradients of several micro-batches are summed: "fp32" (float32, or the
    # compute dtype if it is wider), or "dtype" (the compute dtype)
    grad_sums: str = "fp32"

    def __post_init__(
        self, model: nn.Module, overlap: tuple[str, ...], storage: str, resident_states: int
    ):
        f = self.factors
        tp = self.groups.tp
        if self.optimizer.whole and (self.layout, f.p, tp) != ("inter", 1, 1):
            raise ValueError(
                f"layout={self.layout} p={f.p} tp={tp}: this optimizer updates whole matrices, and "
                "a rank owns whole matrices only with layout=inter p=1 tp=1"
            )
        check_factors(f, self.groups.ranks)
        check_weights(model)

        self.accum_dtype = accumulation_dtype(self.dtype)
        sums_wide = self.grad_sums == "fp32"
        if not sums_wide and self.micro_batches > MOST_ROUNDED_SUMMANDS:
            raise ValueError(
                f"grad_sums={self.grad_sums}: a sum of {self.micro_batches} micro-batches would "
                f"round too much. Choose at most {MOST_ROUNDED_SUMMANDS}"
            )
        wide = sums_wide and self.micro_batches > 1
        self.grad_dtype = self.accum_dtype if wide else self.dtype
        self.streams = {name: CommStream(self.device, name in overlap) for name in STREAMS}
        self.shapes, self.weight_init = model.shapes, model.weight_init
        self.frozen_weights = model.frozen_weights  # names, of all stages
        self.tied = model.cfg.tied  # embedding and head are one matrix, perhaps on two stages
        self.scalars = make_scalars(self.device, self.accum_dtype)

        # for checkpoints: the part of each state on this rank, by f"{state}.{parameter name}"
        updates = self.scalars.step.view(1)
        self.parts = {"updates": StatePart(updates, 0, (), dist.get_rank() == 0)}
        # the gradients that this rank adds to the global norm: each element is on one rank only
        self.norm_grads: list[Tensor] = []
        self.make_groups()
        self.make_params(model)
        self.make_states(storage, resident_states)
        self.add_frozen_parts()
        self.make_vectors(model)

        self.current_pass = None  # (backward, unit) of the last unshard
        self.open_unit: Unit | None = None  # its backward pass has begun, and is not complete
        # called whenever the host begins to enqueue a phase
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.begin_step()

    # -- set-up: who holds what

    def make_groups(self) -> None:
        """Make this rank's process groups, by arithmetic on rank numbers. A group is None where
        this rank would be alone in it. A collective of all ranks.

        Groups with the same name and the same ranks share a communicator, whose collectives run
        one after the other. All groups for gradients may have the name "grad_reduce": the group
        that scatters over p, and the groups that reduce its result, have at most one rank in
        common. So they never share a communicator.
        """
        f = self.factors
        groups = self.groups
        self.param_index = groups.rank % f.p  # which p-shard this rank holds
        self.subgroup_index = groups.rank % f.os // f.p  # this rank's place in the subgroup
        self.param_gather_group = groups.get("param_gather", lambda r: r // f.p)
        self.grad_scatter_group = groups.get("grad_reduce", lambda r: r // f.p)
        self.grad_subgroup = groups.get("grad_reduce", lambda r: (r // f.os, r % f.p))
        self.param_subgroup = groups.get("param_broadcast", lambda r: (r // f.os, r % f.p))

        # replicas: cross os (intra) or replicate (inter). If tensor parallelism slices a matrix,
        # its replicas are ranks with the same tp_rank, which have the same slice. If it does not
        # (embedding, head, and cut="whole" in a layer), they are ranks with any tp_rank
        period = f.os if self.layout == "intra" else f.p
        self.slice_replicas = groups.get("grad_reduce", lambda r: r % period)
        self.whole_replicas = groups.by_position(
            "grad_reduce", lambda stage, r, tp_rank: (stage, r % period)
        )

        # the two ranks that update the same part of a tied matrix, on the first and the last stage
        self.tied_group = None
        if self.tied and groups.pp > 1:
            ends = 0, groups.pp - 1
            self.tied_group = groups.by_position(
                "tied",
                lambda stage, r, tp_rank: (r, tp_rank, "ends" if stage in ends else stage),
            )

    def make_params(self, model: nn.Module) -> None:
        """Shard all matrices: allocate what this rank holds, and make the weights views of it."""
        matrices = {
            path: module for path, module in model.named_modules() if isinstance(module, Matrix)
        }
        multiple = self.factors.os * SHARD_ALIGN_ELEMENTS
        padded_sizes = {
            path: math.ceil(math.prod(module.shape) / multiple) * multiple
            for path, module in matrices.items()
        }
        updated_sizes = {
            path: size for path, size in padded_sizes.items() if not matrices[path].frozen
        }
        # both stages that hold a copy of a tied matrix must choose the same owner for it, so they
        # assign it first
        tied_path = ""
        if self.tied:
            tied_path = "embed" if "embed" in matrices else "head"
        owners = assign_owners(updated_sizes, self.factors.os // self.factors.p, tied_path)
        num_uses = 2 if self.tied and self.groups.pp == 1 else 1

        units: dict[str, Unit] = {}
        self.sharded_params: dict[Matrix, ShardedParam] = {}
        self.shared_buffers: dict[tuple, Buffer] = {}
        for path, module in matrices.items():
            unit_name = ".".join(path.split(".")[:2])  # "blocks.0.qkv" belongs to "blocks.0"
            unit = units.setdefault(unit_name, Unit(unit_name, len(units)))
            if module.frozen:
                contributions = 0
            elif unit.is_layer:
                contributions = self.num_chunks
            else:
                contributions = num_uses if path == tied_path else 1
            owner = owners.get(path, -1)  # a frozen matrix has none
            param = self.shard_matrix(path, module, unit, padded_sizes[path], owner, contributions)
            if path == tied_path:
                # in checkpoints the last stage's copy has the name of the first stage's
                param.name = "embed.weight"
            module.replace_weight(param.as_matrix(param.unsharded_param.data))
            module.events = self
            self.sharded_params[module] = param
            unit.params.append(param)

        self.units = list(units.values())
        self.num_units = len(self.units)
        self.link_units(model.forward_only_layers)
        self.tied_param: ShardedParam | None = None  # a tied matrix, if both uses are on this rank
        if num_uses == 2:
            self.add_tied_head(self.sharded_params[model.embed])

    def link_units(self, forward_only_layers: int) -> None:
        """Set which units backward reads, and which parameters are gathered ahead in each unit."""
        for unit in self.units:
            if unit.is_layer:
                layer = int(unit.name.removeprefix("blocks."))
                unit.read_in_backward = layer >= forward_only_layers
        for unit, next_unit in itertools.pairwise(self.units):
            unit.next_params = next_unit.params
            if unit.read_in_backward:
                next_unit.previous_params = unit.params

    def add_tied_head(self, param: ShardedParam) -> None:
        """Make a unit for the second use of a tied matrix, as head, and put it after the last
        layer. It is not in self.units, because then its matrix would be updated twice."""
        self.tied_param = param
        last_layer = [unit for unit in self.units if unit.is_layer][-1]
        self.tied_head_unit = Unit(
            "head",
            self.num_units,
            [param],
            next_params=last_layer.next_params,
            previous_params=last_layer.params if last_layer.read_in_backward else (),
        )
        last_layer.next_params = [param]
        self.num_units += 1

    def zeros(self, shape, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def shared_buffer(
        self, kind: str, unit: Unit, path: str, module: Matrix, size: int, dtype: torch.dtype
    ) -> Buffer:
        """Return the buffer (size,) for the matrix at this path. kind: "param" or "grad".

        The layers of this rank use two buffers in turn. Without virtual stages, blocks.0.qkv,
        blocks.2.qkv and so on have one, and blocks.1.qkv, blocks.3.qkv and so on have the other.
        Embedding and head each have a buffer of their own, because layers must not fill it between
        the two uses of a tied matrix. Matrices of different shapes share none: the padding behind a
        gradient has to stay zero, because the gradient's norm counts it."""
        users = unit.index % 2 if unit.is_layer else unit.name
        path_in_unit = path.removeprefix(f"{unit.name}.")
        key = kind, users, path_in_unit, module.shape, size, dtype
        if key not in self.shared_buffers:
            self.shared_buffers[key] = Buffer(self.zeros(size, dtype))
        return self.shared_buffers[key]

    def owned_slice(self, module: Matrix, shard_size: int, owner: int) -> slice:
        """Return which elements of its p-shard of a matrix this rank updates."""
        if module.frozen:
            return slice(0, 0)
        if self.layout == "intra":
            owned_size = shard_size // (self.factors.os // self.factors.p)
            first = self.subgroup_index * owned_size
            return slice(first, first + owned_size)
        return slice(0, shard_size if owner == self.subgroup_index else 0)

    def shard_matrix(
        self,
        path: str,
        module: Matrix,
        unit: Unit,
        padded_size: int,
        owner: int,
        contributions: int,
    ) -> ShardedParam:
        """Allocate what this rank holds of a matrix with S = padded_size elements."""
        f = self.factors
        shard_size = padded_size // f.p
        owned = self.owned_slice(module, shard_size, owner)

        param_shard = self.zeros(shard_size, self.dtype)
        owned_param = param_shard[owned]
        if f.g == f.p and not module.frozen:
            grad_shard = self.zeros(shard_size, self.grad_dtype)
            owned_grad = grad_shard[owned]
        else:
            grad_shard = owned_grad = self.zeros(len(owned_param), self.grad_dtype)

        if f.p > 1:
            unsharded_param = self.shared_buffer(
                "param", unit, path, module, padded_size, self.dtype
            )
        else:
            unsharded_param = Buffer(param_shard)

        # backward adds to grad_shard itself, unless grad_shard is smaller than the whole gradient,
        # or is in bf16 although contributions must be summed in float32
        sum_needs_wider = contributions > 1 and self.grad_dtype != self.accum_dtype
        if (f.g > 1 or sum_needs_wider) and not module.frozen:
            dtype = self.accum_dtype if contributions > 1 else self.dtype
            unsharded_grad = self.shared_buffer("grad", unit, path, module, padded_size, dtype)
        else:
            unsharded_grad = Buffer(grad_shard)

        return ShardedParam(
            name=f"{path}.weight",
            module=module,
            unit=unit,
            owner=owner,
            shard_start=self.param_index * shard_size,
            owned_start=self.param_index * shard_size + owned.start,
            param_shard=param_shard,
            unsharded_param=unsharded_param,
            grad_shard=grad_shard,
            unsharded_grad=unsharded_grad,
            owned_param=owned_param,
            owned_grad=owned_grad,
            replica_group=self.slice_replicas if module.tp_slice else self.whole_replicas,
            contributions=contributions,
        )

    def make_states(self, storage: str, resident_states: int) -> None:
        """Allocate the optimizer states of all matrices that train, as zeros.

        Of the ranks that hold the same states, one saves them to checkpoints and adds the gradients
        of the same elements to the global norm.
        """
        # the units up to the last layer whose states stay on the GPU: these layers, and the
        # embedding if it is on this stage. A stage may have fewer layers than resident_states. Then
        # all of its layers are among them, but the head still is not
        resident_layers = [unit for unit in self.units if unit.is_layer][:resident_states]
        if resident_layers:
            for unit in self.units[: resident_layers[-1].index + 1]:
                unit.has_resident_states = True

        params = [param for unit in self.units for param in unit.trained_params]
        sizes = [len(param.owned_param) for param in params]
        resident = [param.unit.has_resident_states for param in params]
        states, self.host_states = allocate_states(
            self.optimizer, sizes, self.dtype, self.device, storage, resident
        )
        for i, param in enumerate(params):
            param.states = states[i]
            length = min(len(param.owned_param), param.num_elements - param.owned_start)
            if length <= 0:
                continue  # this rank owns only padding, or another rank is the owner

            saved_here = self.is_saved_here(param, i, self.factors.os)
            if saved_here:
                self.norm_grads.append(param.owned_grad)
            for state, stored in param.states.items():
                weight = None
                if state == REST:
                    state = "master"
                    weight = param.owned_param[:length]
                self.parts[f"{state}.{param.name}"] = StatePart(
                    stored[:length],
                    param.owned_start,
                    self.shapes[param.name],
                    saved_here,
                    param.module.tp_slice,
                    weight,
                )

    def is_saved_here(self, param: ShardedParam, i: int, num_shards: int) -> bool:
        """Return whether, of all ranks that hold the same part of matrix number i, this one saves
        it to checkpoints. num_shards: into how many parts the matrix is split.

            copies with the same stage and tp_rank      take turns, matrix by matrix
            copies of a matrix that no tp_rank slices   tp_rank 0 saves it
            copies of a tied matrix on two stages       the first stage saves it
        """
        groups = self.groups
        replica = groups.rank // num_shards
        num_replicas = groups.ranks // num_shards
        of_first_tp_rank = param.module.tp_slice is not None or groups.tp_rank == 0
        of_first_stage = param.name != "embed.weight" or groups.stage == 0
        return i % num_replicas == replica and of_first_tp_rank and of_first_stage

    def add_frozen_parts(self) -> None:
        """Note the frozen matrices for checkpoints. Of the ranks that hold the same p-shard, one
        saves it."""
        frozen = [param for param in self.sharded_params.values() if param.module.frozen]
        for i, param in enumerate(frozen):
            length = min(len(param.param_shard), param.num_elements - param.shard_start)
            if length <= 0:
                continue  # this rank holds only padding
            self.parts[f"frozen.{param.name}"] = StatePart(
                param.param_shard[:length],
                param.shard_start,
                self.shapes[param.name],
                self.is_saved_here(param, i, self.factors.p),
                param.module.tp_slice,
            )

    def make_vectors(self, model: nn.Module) -> None:
        """Allocate the small weights (Vector) of all pipeline stages, on every rank.

        They are views of one flat tensor in accum_dtype, and so are their gradients, to which
        autograd adds in place. They are their own master weights. On a rank of another stage the
        gradient of a vector stays 0, and adds nothing to the all-reduce. A frozen vector has only
        its values.
        """
        all_names = [name for name, shape in self.shapes.items() if len(shape) == 1]
        trained_names = [name for name in all_names if name not in self.frozen_weights]
        sizes = [math.prod(self.shapes[name]) for name in trained_names]
        # at least one element: finish_gradients writes NaN there to tell all ranks of a misuse
        total = max(1, sum(sizes))
        self.vector_grad = self.zeros(total, self.accum_dtype)
        self.vector_states = {
            state: self.zeros(total, dtype)
            for state, dtype in self.vector_optimizer.dtypes(self.accum_dtype).items()
        }
        saved_here = dist.get_rank() == 0
        self.norm_grads.append(self.vector_grad if saved_here else self.vector_grad[:0])

        modules = dict(model.named_modules())
        grads = self.vector_grad[: sum(sizes)].split(sizes)
        states = {
            state: flat[: sum(sizes)].split(sizes) for state, flat in self.vector_states.items()
        }
        self.vector_grads: list[tuple[Vector, Tensor]] = []  # of this stage: views of vector_grad
        for i, name in enumerate(trained_names):
            module = modules.get(name.removesuffix(".weight"))
            if module is not None:  # it is on this stage
                module.replace_weight(states["master"][i])
                module.weight.grad = grads[i]
                self.vector_grads.append((module, grads[i]))
            for state, values in states.items():
                self.parts[f"{state}.{name}"] = StatePart(
                    values[i], 0, self.shapes[name], saved_here
                )

        for name in set(all_names).difference(trained_names):
            values = self.zeros(self.shapes[name], self.accum_dtype)
            module = modules.get(name.removesuffix(".weight"))
            if module is not None:
                module.replace_weight(values)
            self.parts[f"frozen.{name}"] = StatePart(values, 0, self.shapes[name], saved_here)

    # -- a step begins

    def begin_step(self) -> None:
        """Begin a step: forget the previous step's gradients, even if an exception ended it."""
        self.usage_error = ""  # which matrix was used too often or too seldom, in words
        # (phase in words, its event). A new deque, because a thread may still read the old one
        self.progress_events = deque(maxlen=10 * self.num_units)
        self.open_unit = self.current_pass = None
        for unit in self.units:
            unit.passes_done = unit.next_to_scatter = 0
            for param in unit.params:
                param.contributions_done = 0
                # drop casts to float8 that an evaluation has made. A CUDA graph that captures this
                # step must make its own: a replay would read the old ones, and not cast new weights
                param.module.products.new_weights()
        self.vector_grad.zero_()

    # -- forward and backward: parameters are gathered ahead of their use

    def unshard(self, module: Matrix, backward: bool) -> Tensor:
        """Return the weight (rows, cols) of a matrix, and launch the gathers of later weights.

        backward: the pass goes from the last layer to the first. The caller must enqueue all
        kernels that read layer i's weight before it unshards layer i + 1, because that call
        launches the gather of layer i + 2 into layer i's buffer.
        """
        param = self.sharded_params[module]
        unit = self.unit_of_use(param, backward)
        if self.current_pass != (backward, unit):
            self.close_other_unit(unit)
            self.current_pass = backward, unit
            if param is self.tied_param and not backward and param.contributions_done:
                self.complete_pass(param.unit)  # the last backward has skipped the embedding
            direction = "backward" if backward else "forward"
            self.enter_phase(f"{direction}, {unit.name}, {unit.index + 1}/{self.num_units}")

        if self.factors.p == 1:
            # waits for the new parameters; hidden by the update and the forward of earlier layers
            wait(param.broadcast_done)
            param.broadcast_done = None
            return module.weight

        gathers = self.plan_gathers(param, unit, backward)
        self.launch_param_gather(gathers.now)
        self.launch_param_gather(gathers.ahead)
        # waits for the all-gather; hidden by the layer that ran just before, or, in backward
        # without gather_layers, by the matrix that was used just before
        wait(param.unsharded_param.event)
        return module.weight

    def unit_of_use(self, param: ShardedParam, backward: bool) -> Unit:
        """Return the unit that is about to use a matrix.

        The embedding and the head use a tied matrix. If a forward pass comes from a layer, the user
        is the head. In backward it is the head, too, because the embedding's backward reads no
        weight.
        """
        if param is not self.tied_param:
            return param.unit
        if backward:
            return self.tied_head_unit
        if self.current_pass is not None:
            was_backward, last_unit = self.current_pass
            if last_unit.is_layer and not was_backward:
                return self.tied_head_unit
        return param.unit

    def plan_gathers(self, param: ShardedParam, unit: Unit, backward: bool) -> GatherPlan:
        """Return what to gather when `unit` is about to use `param`. All ranks gather in the same
        order, even if one of them skips some matrices of a unit. If it skips a whole unit, the
        order differs (complete_pass)."""

        # --overlap leaves out param_gather: the whole unit as it begins, nothing ahead
        if not self.streams["param_gather"].overlap:
            return GatherPlan(now=unit.params, ahead=[])

        # forward: the whole next unit ahead
        if not backward:
            return GatherPlan(now=unit.params, ahead=unit.next_params)

        # backward of layers that run in token chunks or are recomputed: all matrices of the
        # previous layer ahead. They are gathered once, for its recomputation and its backward
        if self.gather_layers:
            return GatherPlan(now=[param], ahead=unit.previous_params)

        # other backward passes: only the next matrix ahead, because a gather of more would delay
        # the reduction of this one's gradient (AMSP, section V-C). `now` has all matrices from the
        # unit's last one to this one. As a rule all of them are gathered already. If this rank has
        # skipped one, it is gathered now, because other ranks take part in its gather
        i = unit.params.index(param)
        now = list(reversed(unit.params[i:]))
        if i > 0:
            return GatherPlan(now, ahead=[unit.params[i - 1]])
        return GatherPlan(now, ahead=unit.previous_params[-1:])

    def launch_param_gather(self, params: Sequence[ShardedParam]) -> None:
        """Launch the all-gathers (S/p,) -> (S,) of weights that are not in their buffers yet."""
        params = [param for param in params if param.unsharded_param.held_param is not param]
        if not params:
            return
        stream = self.streams["param_gather"]
        # The gathers wait for compute, so they may overwrite the buffers: the kernels that read
        # their old contents, two layers ago, are already enqueued on compute
        with stream.after_compute():
            for param in params:
                buffer = param.unsharded_param
                # waits for the new param_shard; hidden by the update and earlier layers
                wait(param.broadcast_done)
                all_gather(buffer.data, param.param_shard, group=self.param_gather_group)
                buffer.held_param = param
                buffer.event = stream.record_event()

    # -- backward: gradients are reduced under the computation that follows

    def add_grad(self, module: Matrix, compute: Callable[[Tensor, int], Tensor]) -> None:
        """Add one contribution to the gradient of a matrix: that of a token chunk, or that of one
        use of a tied matrix. After the last contribution, launch the gradient's reduction.

        compute(out, beta) writes beta * out + contribution into out (rows, cols). Returns None, so
        autograd has nothing to store.
        """
        param = self.sharded_params[module]
        unit = param.unit
        self.close_other_unit(unit)
        is_tied = param is self.tied_param
        if param.is_complete or unit.passes_done == self.micro_batches:
            often = "twice" if is_tied else "once"
            self.usage_error = f"{param.name} was used more than {often} per pass"
            return  # the reduction of its gradient is launched already
        # Between the two contributions of a tied matrix, backward goes through all layers. They
        # must not complete its pass, so it does not count as open. The embedding's contribution
        # completes the pass
        self.open_unit = None if is_tied else unit

        buffer = param.unsharded_grad
        is_first = param.contributions_done == 0
        if is_first:
            # waits until scatter_grad has read what was in the buffer, two layers ago; hidden by
            # the backward of the layer between
            wait(buffer.event)
        adds_to_micro_batches = param.grad_accumulates_in_place and unit.passes_done > 0
        beta = 0 if is_first and not adds_to_micro_batches else 1
        compute(param.as_matrix(buffer.data), beta)
        param.contributions_done += 1
        self.scatter_unit(unit)

    def close_other_unit(self, unit: Unit) -> None:
        """Complete the backward pass of the last unit, if the pass has gone on to another unit."""
        if self.current_pass is not None:
            _, last_unit = self.current_pass
            if last_unit is not unit:
                self.gather_skipped_params()
        if self.open_unit not in (None, unit):
            self.complete_pass(self.open_unit)

    def gather_skipped_params(self) -> None:
        """Launch the gathers that are missing when backward leaves a unit with frozen matrices.

        They are missing if this rank skipped a frozen matrix, and other ranks wait for them. If a
        matrix that trains is skipped, its contributions are incomplete, and complete_pass launches
        its gather. A frozen matrix has no contributions, so complete_pass would not notice it."""
        if self.current_pass is None or self.factors.p == 1:
            return
        backward, unit = self.current_pass
        has_frozen = len(unit.trained_params) < len(unit.params)
        if backward and unit.read_in_backward and has_frozen:
            self.launch_param_gather(unit.params[::-1])

    def complete_pass(self, unit: Unit) -> None:
        """Complete a unit's backward pass although a matrix was not used: launch the gathers and
        reductions that are missing, because other ranks wait for them.

        Even so, the other ranks can wait for ever for a rank that skips a matrix:

            on a CPU, where nothing overlaps   in a reduction; or in a gather, if p > 1 and
                                               gather_layers is False
            on any device                      in the gathers of a layer whose input is recomputed;
                                               in the exchanges of attention and of tensor
                                               parallelism; and, if p > 1, in the gathers after a
                                               layer of which the rank uses no matrix at all
        """
        if self.factors.p > 1 and unit.read_in_backward:
            self.launch_param_gather(unit.params[::-1])
        for param in unit.params:
            if not param.is_complete:
                if not self.usage_error:
                    self.usage_error = (
                        f"{param.name} was used {param.contributions_done} times per pass instead "
                        f"of {param.contributions}"
                    )
                param.contributions_done = param.contributions
        self.scatter_unit(unit)

    def scatter_unit(self, unit: Unit) -> None:
        """Launch the reductions of a unit's gradients, from the last param to the first, and stop
        at the first gradient that is not complete. So all ranks launch them in the same order, even
        if their gradients become complete in different orders."""
        last_micro_batch = unit.passes_done == self.micro_batches - 1
        in_backward_order = unit.params[::-1]
        for param in in_backward_order[unit.next_to_scatter :]:
            if not param.is_complete:
                return
            if not param.grad_accumulates_in_place:
                self.scatter_grad(param, last_micro_batch)
            unit.next_to_scatter += 1

        # the reductions of all of the unit's gradients in this backward pass are launched
        self.open_unit = None
        unit.next_to_scatter = 0
        unit.passes_done += 1
        for param in unit.params:
            param.contributions_done = 0
        if last_micro_batch:
            self.reduce_unit(unit)

    def scatter_grad(self, param: ShardedParam, last_micro_batch: bool) -> None:
        """Launch the reduction of a micro-batch's gradient (S,) to the part that this rank keeps,
        and add it to the part from the earlier micro-batches, in grad_shard."""
        f = self.factors
        first_micro_batch = param.unit.passes_done == 0
        kept = len(param.grad_shard)
        stream = self.streams["grad_scatter"]
        # It waits for compute, so the gradient is complete. The last update has read grad_shard,
        # too: it ran on compute; or it ran on host_update, and then this step's forward has waited
        # for it (broadcast_done)
        with stream.after_compute():
            grad = param.unsharded_grad.data
            if f.g > 1:  # it is sent in the compute dtype (g = 1: reduce_unit sends the sum)
                grad = grad.to(self.dtype)
            if f.p > 1:  # (S,) -> (S/p,)
                grad = sum_and_scatter(grad, self.grad_scatter_group)

            if f.g == f.p:
                # this rank keeps its whole p-shard; reduce_unit does the rest once per step
                accumulate(param.grad_shard, grad, first_micro_batch)
            elif self.layout == "intra":
                # (S/p,) -> (S/os,): an equal slice for each rank of the subgroup
                grad = sum_and_scatter(grad, self.grad_subgroup)
                accumulate(param.grad_shard, grad, first_micro_batch)
            elif not last_micro_batch:
                # inter: all-reduce, then select & drop (AMSP, section IV): the owner keeps (S/p,),
                # the other ranks of the subgroup (0,)
                dist.all_reduce(grad, group=self.grad_subgroup)
                accumulate(param.grad_shard, grad[:kept], first_micro_batch)
            else:
                # inter, last micro-batch: one all-reduce over the replicas in all os groups. The
                # owner in each os group already holds its group's sum of the earlier micro-batches.
                # It adds this sum to its gradient first, so the result has all micro-batches
                if not first_micro_batch:
                    grad[:kept] += param.grad_shard
                dist.all_reduce(grad, group=param.replica_group)
                param.grad_shard.copy_(grad[:kept])
            stream.done_reading(param.as_matrix(param.unsharded_grad.data))
        param.unsharded_grad.event = stream.record_event()

    def reduce_unit(self, unit: Unit) -> None:
        """Launch the sums of a unit's gradients that run once per step, after the last micro-batch.

        A gradient (S/g,) becomes (S/os,), the sum over all ranks. In layout inter with g = p it
        stays (S/p,). All-reduces in the same group run in one launch. The exception is gradients
        that are cast before they are sent: they run one by one, because the cast copies of a whole
        unit would take memory.
        """
        f = self.factors
        if f.g > f.p and self.layout == "inter":
            return  # scatter_grad has summed over all replicas
        trained = unit.trained_params
        if f.g == f.os and not any(param.replica_group for param in trained):
            return  # no other rank has anything to add

        if self.grad_dtype != self.dtype:
            launches = [[param] for param in trained]
        else:
            launches = [
                list(params)
                for _, params in itertools.groupby(trained, lambda param: param.replica_group)
            ]
        with self.streams["grad_reduce"].after_compute():
            # waits for complete grad_shards; hidden by the backward of the layers that follow
            wait(self.streams["grad_scatter"].record_event())
            for params in launches:
                self.sum_replicas(params)

    def sum_replicas(self, params: list[ShardedParam]) -> None:
        """Enqueue the sums of some gradients: first reduce-scatters in the subgroup (intra, g = p),
        then all-reduces over their replicas, in one launch.

        This is a function of its own so that its copies are freed before the next ones are made.
        """
        f = self.factors
        scatters = self.layout == "intra" and f.g < f.os
        group = params[0].replica_group
        if not (group or scatters):
            return

        grads = [param.grad_shard.to(self.dtype) for param in params]
        if scatters:  # (S/p,) -> (S/os,)
            grads = [sum_and_scatter(grad, self.grad_subgroup) for grad in grads]
        if group:
            with dist._coalescing_manager(group):
                for grad in grads:
                    dist.all_reduce(grad, group=group)

        for param, grad in zip(params, grads):
            if grad is not param.grad_shard:
                result = param.owned_grad if self.layout == "intra" else param.grad_shard
                result.copy_(grad)

    # -- backward ends

    def finish_gradients(self) -> None:
        """Sum the vectors' gradients over all ranks after the last backward of a step, and those
        of a tied matrix over two pipeline stages. Let compute wait for all reductions.

        If a rank did not use a matrix exactly once per pass, it sets the vectors' gradients to NaN.
        Their all-reduce spreads the NaN to all ranks, so the global norm is NaN, and update changes
        nothing. In this way the ranks agree without extra communication. Then check_uses names the
        matrix.
        """
        for unit in reversed(self.units):
            # passes are missing only if this rank did not use some matrix
            while unit.trained_params and unit.passes_done < self.micro_batches:
                self.complete_pass(unit)
        for module, param in self.sharded_params.items():
            if module.weight.grad is not None:
                self.usage_error = f"{param.name} was used outside project()"
                module.weight.grad = None
        self.restore_vector_grads()
        self.gather_skipped_params()
        self.current_pass = None
        self.enter_phase("update")
        if self.usage_error:
            self.vector_grad.fill_(math.nan)
        dist.all_reduce(self.vector_grad)
        # waits for all gradients. The backward hides this, except for the reductions of the layers
        # that it runs last
        wait(self.streams["grad_scatter"].record_event())
        wait(self.streams["grad_reduce"].record_event())
        if self.tied_group:
            self.sum_tied_copies()

    def restore_vector_grads(self) -> None:
        """Make the vectors' gradients views of vector_grad again, if a caller has dropped these
        views, as model.zero_grad() does. Autograd has then added to new tensors: copy them."""
        for module, grad in self.vector_grads:
            new = module.weight.grad
            if new is grad:
                continue
            if new is not None:
                grad.copy_(new)
            module.weight.grad = grad

    def sum_tied_copies(self) -> None:
        """Sum the two gradients of a tied matrix: the embedding's, on the first stage, and the
        head's, on the last stage. Both stages own the same part of it, and both get the sum.

        This runs on the compute stream, and is exposed. On the first stage, the embedding's
        gradient is the last one of a step. On the last stage, the head's gradient is complete long
        before. But if this stage launched the all-reduce early, the stream and all reductions
        queued behind it would stop until the first stage is ready.
        """
        for param in self.sharded_params.values():
            if param.name == "embed.weight" and len(param.owned_grad):
                dist.all_reduce(param.owned_grad, group=self.tied_group)

    def check_uses(self) -> None:
        """Raise ConfigError on all ranks if, in this step, one of them used a matrix too often, too
        seldom or outside project(). Call it after a step that was not finite. A collective of all
        ranks."""
        error = ""
        if self.usage_error:
            error = (
                f"{self.usage_error}; every rank must use every Matrix exactly once per pass (a "
                "tied one twice, as embedding and as head), even if it has no tokens for it: then "
                "call it with an empty input, x[:0]"
            )
        if error := first_error(error):
            raise ConfigError(error)

    # -- update

    def update(
        self, lr: float | Tensor, clip: float, loss: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Update all weights, and launch the broadcasts of the new parameters.

        clip: gradients are scaled down if their global norm is larger; 0 switches clipping off. lr:
        a tensor on the device, if a CUDA graph must see each new value. loss: already summed over
        all ranks, so that all ranks agree whether it is finite. Returns the norm before clipping,
        and whether the norm and the loss are finite, both on the device. If they are not, no weight
        and no state changes.
        """
        # it is safe to overwrite param_shard, because no gather or broadcast still uses it: compute
        # has waited for all of them in unshard
        norm = global_norm(self.norm_grads, self.accum_dtype)
        finite = set_scalars(self.scalars, lr, clip, norm, loss)
        self.update_vectors()

        if self.host_states:
            self.host_states.begin()
            # it waits for compute, so gradients and scalars are final
            update_stream = self.streams["host_update"].after_compute()
        else:
            update_stream = contextlib.nullcontext()
        with update_stream:
            for unit in self.units:
                for param in unit.trained_params:
                    if len(param.owned_param):
                        self.update_param(param)
                self.broadcast_params(unit)
        return norm, finite

    @property
    def vector_optimizer(self) -> Optimizer:
        return self.optimizer.vectors or ADAMW

    def update_vectors(self) -> None:
        """Update the small weights without weight decay, on every rank alike."""
        # An optimizer also writes the weight in the compute dtype. The model uses the master
        # weights of vectors, so nobody reads this copy
        unused = torch.empty_like(self.vector_grad)
        self.vector_optimizer.update(
            Update(
                name="vectors",
                start=0,
                weight=unused,
                grad=self.vector_grad,
                states=self.vector_states,
                weight_decay=0.0,
                **self.scalars._asdict(),
            )
        )

    def update_param(self, param: ShardedParam) -> None:
        """Update what this rank owns of a matrix: all at once, or, with storage "host", piece by
        piece, even if the matrix's own states stay on the GPU."""
        pieces = [(slice(None), param.states)]
        if self.host_states and param.unit.has_resident_states:
            pieces = self.host_states.pieces_on_gpu(param.states, param.owned_param)
        elif self.host_states:
            pieces = self.host_states.stream_through(param.states, param.owned_param)
        for piece, states in pieces:
            weight = param.owned_param[piece]
            grad = param.owned_grad[piece]
            if self.optimizer.whole:  # (S,) -> (rows, cols)
                weight = param.as_matrix(weight)
                grad = param.as_matrix(grad)
                states = {name: param.as_matrix(state) for name, state in states.items()}
            self.optimizer.update(
                Update(
                    name=param.name,
                    start=param.owned_start + (piece.start or 0),
                    weight=weight,
                    grad=grad,
                    states=states,
                    weight_decay=self.decay,
                    **self.scalars._asdict(),
                    tp_slice=param.module.tp_slice,
                    seed=self.seed,
                )
            )

    def broadcast_params(self, unit: Unit) -> None:
        """Launch the communication of a unit's new parameters to the subgroup: all-gathers (S/os,)
        -> (S/p,); in layout inter, broadcasts of (S/p,) from their owners."""
        stream = self.streams["param_broadcast"]
        group = self.param_subgroup
        trained = unit.trained_params
        for param in unit.params:
            param.unsharded_param.held_param = None  # the buffer has the old parameters
            param.module.products.new_weights()  # casts in float8 are of the old parameters, too
        if not trained:
            return  # all of the unit's matrices are frozen
        if not (group or self.host_states):
            return  # the update ran on the compute stream, and it wrote all of param_shard

        on_gpu = self.device.type == "cuda"
        with stream.after_compute():  # the unit is updated
            if group and self.layout == "inter":
                # NCCL runs the broadcasts of several owners in one launch
                with dist._coalescing_manager(group, self.device if on_gpu else None):
                    for param in trained:
                        dist.broadcast(param.param_shard, group=group, group_src=param.owner)
            elif group:
                for param in trained:
                    # gloo may not read where it writes
                    owned_param = param.owned_param if on_gpu else param.owned_param.clone()
                    all_gather(param.param_shard, owned_param, group=group)

        # if broadcasts do not overlap, they run on the stream of the update
        broadcast_done = stream.record_event() or self.streams["host_update"].record_event()
        for param in trained:
            param.broadcast_done = broadcast_done

    # -- loading and saving

    def state_parts(self) -> dict[str, StatePart]:
        """Return the parts of all states on this rank, for a checkpoint. The keys are
        f"{state}.{parameter name}", and "updates" for the number of updates. A frozen weight has
        only the state "frozen", the weight itself. It is in the compute dtype if it is a matrix.

        The parts are views of tensors into which the next update writes. When must a copy be made?

            tensor on the GPU     the copy must be enqueued before the next update is
            tensor on the host    the copy must be complete before the next update is enqueued
            master weight in two  the same as on the host, for both tensors. They belong together
            tensors, one on each  only until the next update is enqueued"""
        if self.host_states:
            self.host_states.synchronize()
            # host_update also writes the states that stay on the GPU, and a save reads them on
            # another stream
            if event := self.streams["host_update"].record_event():
                event.synchronize()
        return self.parts

    def load(self, weight: Callable[[str], Tensor]) -> None:
        """Set all parameters, and the states that start as the weight. weight(name) returns a full
        parameter of any dtype and device, and each rank copies what it owns. If that fails on one
        rank, all ranks raise ConfigError. A collective of all ranks."""
        all_states = [*self.optimizer.states, *self.vector_optimizer.states]
        names = [state.name for state in all_states if state.starts_as_weight]
        state_names = dict.fromkeys(["master", "frozen", *names])  # each name once

        def load_masters() -> None:
            parts = self.state_parts()
            for name in self.shapes:
                keys = [f"{state}.{name}" for state in state_names]
                owned = [parts[key] for key in keys if key in parts]
                if not owned:
                    continue  # this rank owns nothing of this parameter
                tensor = weight(name)
                if owned[0].tp_slice:
                    tensor = owned[0].tp_slice.extract(tensor)
                for part in owned:
                    part.write(part.select(tensor))

        all_or_none(load_masters)
        self.restore_weights()

    def restore_weights(self) -> None:
        """Set the weights from their master weights, for example after a checkpoint was read into
        state_parts(). StatePart.write has already set two kinds of weights: frozen ones, and those
        whose rest is on the host."""
        for unit in self.units:
            for param in unit.trained_params:
                if REST not in param.states:
                    master = param.states["master"]
                    pieces = map(split_into_pieces, (param.owned_param, master))
                    for weight, master_piece in zip(*pieces):
                        weight.copy_(round_weight(master_piece, self.dtype))
            self.broadcast_params(unit)

    def full_param(self, name: str, state: str = "master") -> Tensor:
        """Return one optimizer state of a full parameter, in accum_dtype. The default state,
        "master", is the parameter itself. A frozen weight has no states, so its value is returned,
        whatever the state. Raises ValueError if the optimizer has no such state. A collective of
        all ranks."""
        is_vector = len(self.shapes[name]) == 1
        optimizer = self.vector_optimizer if is_vector else self.optimizer
        names = [s.name for s in optimizer.states]
        if state not in names:
            raise ValueError(f"{name} has no state {state!r}, but {', '.join(names)}")
        full = self.zeros(self.shapes[name], self.accum_dtype)
        if name in self.frozen_weights:
            state = "frozen"
        part = self.state_parts().get(f"{state}.{name}")
        if part and part.saved_here:
            if part.tp_slice:
                tp_tensor = part.tp_slice.extract(full)  # a copy of the slice, still zeros
                part.copy_to(part.select(tp_tensor))
                part.tp_slice.insert(tp_tensor, full)
            else:
                part.copy_to(part.select(full))
        dist.all_reduce(full)  # each element is on one rank, and 0 on the others
        return full

    def bytes(self) -> dict[str, int]:
        """Return the bytes of each kind of model state on this rank, without the vectors and
        without the buffers for unsharded parameters and gradients."""
        params = self.sharded_params.values()
        return {
            "parameters": sum(param.param_shard.nbytes for param in params),
            "gradients": sum(param.grad_shard.nbytes for param in params),
            "optimizer": sum(state.nbytes for param in params for state in param.states.values()),
        }

    # -- progress, for whoever watches a run

    def enter_phase(self, phase: str) -> None:
        """Note that a phase of the step is enqueued: record an event for `progress`, and call
        on_phase. A CUDA graph has no phases, so nothing happens while one is captured."""
        event = None
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            event = torch.cuda.current_stream().record_event()
        self.progress_events.append((phase, event))
        self.on_phase(phase)

    def progress(self) -> str:
        """Return the last phase that the device has begun, or "" if it has begun none since the
        last call. This does not wait for the device, and any thread may call it."""
        phase = ""
        events = self.progress_events
        while events:
            _, event = events[0]
            if event is not None and not event.query():
                break
            phase, _ = events.popleft()
        return phase
