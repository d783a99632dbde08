"""Optimizers, their states in GPU memory or in host memory, and learning-rate schedules.

An optimizer is a function and a list of its states. The arithmetic of AdamW is a dozen lines
(fused_adamw). AMSP splits each parameter matrix into p shards, and the optimizer states into os
shards (section IV; shard.py). A rank updates only the elements whose states it owns: by default
1/os of each matrix. (With --os-layout inter, a rank owns its whole p-shard of some matrices, and
nothing of the others.) Then shard.States sends the updated parameters to the ranks that hold them.

To add an optimizer, write a function like `adamw` and a row of OPTIMIZERS, which --optimizer
chooses. Its states are then sharded, saved, resumed, moved to the host and counted by the planner,
as AdamW's are. examples/muon.py adds one, and examples/ema.py adds a state to one. The shortest is
SGD:

    def sgd(u: Update) -> None:                           # u.weight, u.grad, u.lr, ... by name
        master = u.states["master"]
        new = master - u.lr * u.clip_factor * u.grad.to(master.dtype)
        master.copy_(torch.where(u.finite, new, master))  # if not finite, nothing changes
        u.weight.copy_(round_weight(master, u.weight.dtype))

    OPTIMIZERS["sgd"] = Optimizer(sgd, (State("master"),))

The states of a model with P parameters are in one of two places (--os-place). With AdamW's three
states in float32:

    gpu     12P/os bytes of GPU memory per rank
    host    10P/os bytes of page-locked host memory per rank, if weights are in bf16; the update
            streams them through the GPU in pieces, while the next forward runs (HostStates)

With few tokens, the forward is shorter than the streaming, and layers wait for their new weights.
So with states on the host, those of the first layers may stay on the GPU, as far as it has room
(--resident-states). They are stored as the host stores them, in 10 bytes per parameter, and no copy
delays their update. While these layers run their forward, the states of the other layers stream.

Why 10 bytes and not 12? The bf16 weight on the GPU is the upper half of the master weight, rounded.
So the host keeps only the lower half, the *rest*, and join_master makes the master weight from the
two. With other compute dtypes the host keeps the whole master weight. An optimizer need not know
this. It gets the whole master weight in either place, and both places train alike, bit for bit.

With --moments bf16 the two moments are in bf16: 12P becomes 8P, and 10P becomes 6P. They are
rounded up or down at random, so that their expected value is right (round_stochastically). Rounding
to the nearest number would stop the second moment too early. Each update moves it by 5 % of its
distance to the squared gradient. Neighbouring bf16 numbers differ by 0.4 to 0.8 %. So once the
distance is below 4 to 8 %, an update moves it by less than half of this difference, and rounding
undoes the move.

A row of SCHEDULES says how the learning rate falls (examples/schedule.py adds two rows).

Left out: learning rates per parameter.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ops import TensorSlice, accumulation_dtype, compiled
from ranks import all_or_none
from streams import Buffer, CommStream, buffer_bytes, carve, pin_host_buffers, wait

BETAS = (0.9, 0.95)  # of AdamW's moments
EPS = 1e-8

# ---------------------------------------------------------------------------- what an update gets


class Scalars(NamedTuple):
    """The numbers that all updates in a step share.

    They are 0-dim tensors on the device, so no update waits for the host. set_scalars writes into
    the same tensors in each step, so a CUDA graph sees the new values.
    """

    lr: Tensor  # learning rate
    clip_factor: Tensor  # at most 1; multiply gradients by it to clip their global norm
    step: Tensor  # int64, t: the number of this update, from 1 on. Skipped steps do not count
    bias_correction1: Tensor  # 1 - beta1^t
    bias_correction2: Tensor  # 1 - beta2^t
    finite: Tensor  # bool: whether loss and gradients are finite. If not, nothing may change


class Update(NamedTuple):
    """The argument of an optimizer's function, which writes `weight` and `states` in place.

    The tensors are a range of the flat matrix, (n,). If Optimizer.whole, they are the whole matrix,
    (rows, cols).

    Each step has one more Update, for Optimizer.vectors. Its name is "vectors", and its tensors
    have all norms and biases that train, one after the other. The model computes with the state
    "master" of a vector itself, so vectors have no copy in the compute dtype. In this Update
    `weight` is only scratch memory: write to it, but do not read it.
    """

    name: str  # of the parameter, as in a checkpoint
    # index in the flat matrix of the range's first element; with tensor parallelism, index in the
    # flat slice that this rank has. The range may end in padding, after the end of the matrix
    start: int
    weight: Tensor  # in the compute dtype; of a vector: scratch memory, in float32 or wider
    grad: Tensor  # in the compute dtype or wider
    states: dict[str, Tensor]  # by name, each in its own dtype
    weight_decay: float
    lr: Tensor  # from here on: Scalars
    clip_factor: Tensor
    step: Tensor
    bias_correction1: Tensor
    bias_correction2: Tensor
    finite: Tensor
    # the slice of the whole matrix in which `start` counts; None: the whole matrix
    tp_slice: TensorSlice | None = None
    seed: int = 0  # of the run, for an optimizer that rounds at random. For "vectors" always 0


def make_scalars(device: torch.device, dtype: torch.dtype) -> Scalars:
    """Allocate the numbers of a step, in float32 or wider."""
    lr, clip_factor, bias_correction1, bias_correction2 = torch.ones(
        4, dtype=dtype, device=device
    ).unbind()
    step = torch.zeros((), dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    return Scalars(lr, clip_factor, step, bias_correction1, bias_correction2, finite)


def set_scalars(
    scalars: Scalars, lr: float | Tensor, max_norm: float, norm: Tensor, loss: Tensor | float
) -> Tensor:
    """Set the numbers of a step. norm: the global gradient norm before clipping. max_norm: clipping
    reduces a larger norm to it; 0 switches clipping off. Returns whether norm and loss are
    finite."""
    finite = (norm + loss).isfinite()
    scalars.finite.copy_(finite)
    scalars.step.add_(finite)
    # at least 1: with t = 0, before the first finite step, the optimizer would divide by 0
    t = scalars.step.to(norm.dtype).clamp(min=1)
    scalars.lr.copy_(torch.ones_like(norm) * lr)
    factor = (max_norm or math.inf) / (norm + 1e-6)
    scalars.clip_factor.copy_(factor.clamp(max=1))
    scalars.bias_correction1.copy_(1 - BETAS[0] ** t)
    scalars.bias_correction2.copy_(1 - BETAS[1] ** t)
    return finite


def global_norm(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the norm of all gradients. Each rank passes some of them, and no element is passed by
    two ranks. A collective of all ranks."""
    norms = torch._foreach_norm(grads, dtype=dtype)
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


# ---------------------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class State:
    """One tensor that an optimizer keeps per matrix, such as a moment. It has one element per
    element of the matrix, and a rank holds it only for the elements that it updates."""

    name: str
    dtype: torch.dtype | None = None  # None: float32, or the compute dtype if that is wider
    # True: it starts as the weight. False: at 0. "master" always starts as the weight
    starts_as_weight: bool = False


@dataclass(frozen=True)
class Optimizer:
    """A function and its states.

    update(u: Update) writes u.weight and u.states in place. It must keep four rules.
    check_optimizer tests them on an example, and lists them under the same numbers.

        1. One state is named "master". It is the weight itself, in float32 or wider.
        2. If u.finite is false, nothing changes. Select by torch.where, as `adamw` does, because
           infinity times 0 is not 0.
        3. The update of a range of a matrix does not depend on the rest of the matrix. If it does,
           set whole=True.
        4. The update sets u.weight to round_weight(master, u.weight.dtype).

    An optimizer updates every Matrix that is not frozen: the embedding, the head, and the matrices
    of layers. In a layer, q, k and v are one Matrix, and so are gate and up. The optimizer that
    `vectors` names updates norms and biases.
    """

    update: Callable[[Update], None]
    states: tuple[State, ...]
    # whether `update` needs whole matrices. Such a run has --os-layout inter --p 1 --tp 1
    whole: bool = False
    vectors: "Optimizer | None" = None  # the optimizer of vectors; None: AdamW
    exported: str = "master"  # the state that --export writes

    def dtypes(self, accum_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each state by name. accum_dtype: the dtype of states that name none.
        It is float32, or the compute dtype if that is wider."""
        return {state.name: state.dtype or accum_dtype for state in self.states}

    def stored_dtypes(self, dtype: torch.dtype, storage: str) -> dict[str, torch.dtype]:
        """Return the dtype of each stored tensor by its name, in the order of `states`.

        dtype: the compute dtype. storage: "gpu" or "host". On the host, REST in int16 replaces the
        master weight if weights are in bf16 and the master weight is in float32."""
        stored = {}
        for name, state_dtype in self.dtypes(accumulation_dtype(dtype)).items():
            can_be_joined = (dtype, state_dtype) == (torch.bfloat16, torch.float32)
            if name == "master" and storage == "host" and can_be_joined:
                stored[REST] = torch.int16
            else:
                stored[name] = state_dtype
        return stored

    def bytes_per_parameter(self, dtype: torch.dtype, storage: str = "gpu") -> int:
        """Return the bytes of the stored states per parameter. Arguments: see stored_dtypes."""
        return sum(stored.itemsize for stored in self.stored_dtypes(dtype, storage).values())


def adamw(
    u: Update,
    element_key: Tensor | None = None,
    slice_rows: Tensor | None = None,
    slice_cols: tuple | None = None,
) -> None:
    """Update tensors by AdamW. Per parameter it reads 14 bytes (a bf16 gradient, three float32
    states) and writes 14 (a bf16 weight, the states).

    Only `adamw_bf16` passes the other arguments. element_key: from element_key_on; None if moments
    are not rounded at random. slice_rows, slice_cols: from slice_on; None for a whole matrix."""
    master, m, v = (u.states[state.name] for state in ADAMW.states)
    fused_adamw(
        u.weight,
        u.grad,
        master,
        m,
        v,
        u.lr,
        u.clip_factor,
        u.bias_correction1,
        u.bias_correction2,
        u.finite,
        u.weight_decay,
        u.step,
        element_key,
        slice_rows,
        slice_cols,
    )


def adamw_bf16(u: Update) -> None:
    """Update a matrix by AdamW, and round the new moments stochastically to bf16. Per parameter it
    reads 10 bytes and writes 10."""
    device = u.weight.device
    element_key = element_key_on(u.name, u.seed, u.start, device)
    adamw(u, element_key, *slice_on(u.tp_slice, device))


@compiled(dynamic=None, writes=True)  # one kernel for matrices of many sizes
def fused_adamw(
    weight,
    grad,
    master,
    m,
    v,
    lr,
    clip_factor,
    bias_correction1,
    bias_correction2,
    finite,
    weight_decay,
    step,
    element_key,
    slice_rows,
    slice_cols,
):
    """Do the arithmetic of `adamw`. On a GPU this is one kernel."""
    beta1, beta2 = BETAS
    grad = grad.to(master.dtype) * clip_factor
    m_old = m.to(master.dtype)
    v_old = v.to(master.dtype)
    m_new = m_old + (1 - beta1) * (grad - m_old)
    v_new = v_old + (1 - beta2) * (grad * grad - v_old)
    change = lr / bias_correction1 * m_new / ((v_new / bias_correction2).sqrt() + EPS)
    master_new = master * (1 - lr * weight_decay) - change

    if element_key is not None:
        key = element_key[0]
        start = element_key[1]
        index = element_index(len(m), start, slice_rows, slice_cols)
        bits = random_bits(index, key, step)  # 32 per element: 16 for each moment
        m_new = round_stochastically(m_new, bits & 0xFFFF)
        v_new = round_stochastically(v_new, bits >> 16)
    for state, new in ((master, master_new), (m, m_new), (v, v_new)):
        state.copy_(torch.where(finite, new, state))
    weight.copy_(round_weight(master, weight.dtype))


ADAMW = Optimizer(adamw, (State("master"), State("exp_avg"), State("exp_avg_sq")))
BF16_MOMENTS = Optimizer(
    adamw_bf16,
    (State("master"), State("exp_avg", torch.bfloat16), State("exp_avg_sq", torch.bfloat16)),
)
# --optimizer: the optimizer of matrices. A fork adds a row. --moments bf16 chooses the second row
OPTIMIZERS = {"adamw": ADAMW, "adamw-bf16": BF16_MOMENTS}


# ---------------------------------------------------------------------------- weight and master
#
# A bf16 number has the sign, the exponent and the first 7 bits of the mantissa of a float32 number:
# its upper 16 bits. So a master weight in float32 is a bf16 weight and 16 bits more, the rest.
#
#     master    0x3F80C000 = 1.005859375         master    0x3F804000 = 1.001953125
#     weight    0x3F81     = 1.0078125           weight    0x3F80     = 1.0
#     rest      0xC000     = -0x4000 as int16    rest      0x4000     = +0x4000 as int16
#
#     master = (weight << 16) + rest             as integers
#
# The rest has 16 bits. So at most 2^16 master weights may be rounded to the same bf16 weight. Now
# take a *tie*, a master weight in the middle between two bf16 numbers. PyTorch rounds it to the
# number whose last bit is 0. This number would get the ties on both of its sides, and 2^16 + 1
# master weights in all. So round_weight rounds a tie away from zero. Then a number gets at most one
# tie, with the rest -0x8000. All other master weights are rounded as PyTorch rounds them.

REST = "rest of master"  # the host stores the rest under this name, instead of "master"


def round_weight(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a master weight in the compute dtype. In bf16 a tie is rounded away from zero.

    Infinity, NaN and -0.0 stay what they are. Numbers from the tie above the largest bf16 number on
    become infinity."""
    if (master.dtype, dtype) != (torch.float32, torch.bfloat16):
        return master.to(dtype)
    # A master weight lies between two bf16 numbers, or is one. Its bit 15 is set in two cases:
    #   it is closer to the number that is further from zero   PyTorch rounds it to that number
    #   it is a tie: 0x8000 in the lower half                  PyTorch may round it to either number
    # In both cases this sets bit 0. A tie becomes 0x8001, so it is closer to the number further
    # from zero, and PyTorch rounds it there. No other master weight is rounded to another number
    bits = master.view(torch.int32)
    return (bits | (bits >> 15 & 1)).view(torch.float32).to(dtype)


def join_master(master: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Set the master weight (n,), in float32, from the bf16 weight and the rest, an int16. The
    result has the bits that split_master got. Only a NaN may become another NaN."""
    join_bits(master.view(torch.int32), weight.view(torch.int16), rest)


@compiled(dynamic=None, writes=True)
def join_bits(master_bits, weight_bits, rest):
    master_bits.copy_((weight_bits.to(torch.int32) << 16) + rest)


@compiled(dynamic=None, writes=True)
def split_master(master: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Set the bf16 weight (n,) and the rest, an int16, from the master weight in float32."""
    weight.copy_(round_weight(master, weight.dtype))
    # master - (weight << 16) lies between -0x8000 and 0x7FFF, and weight << 16 ends in 16 zeros. So
    # the difference is the lower half of master, read as an int16
    rest.copy_(master.view(torch.int32).to(torch.int16))


# ---------------------------------------------------------------------------- stochastic rounding
#
# A number x lies between two neighbours in bf16, low and high. It is rounded to high with the
# probability (x - low) / (high - low), so the expected result is x itself.
#
# The random bits of an element are a function of integers: the seed of the run, the name of the
# parameter, the number of the update, and the index of the element in the whole matrix. There is no
# generator with a state. So the bits do not depend on which rank owns the element, on the pieces of
# an update, or on a resume, and a CPU draws the same bits as a GPU. A step that is skipped, because
# its loss or gradients are not finite, does not count as an update.


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round x to bf16, up or down. bits: 16 random bits per element, as integers.

    A bf16 number is a float32 number whose last 16 bits are 0. If a random number below 2^16 is
    added to the float32's bits, read as an integer, it carries into the upper 16 bits with the
    right probability. Example: the last 16 bits are a quarter of 2^16. Then a quarter of all random
    numbers make a carry.
    """
    as_integer = x.to(torch.float32).view(torch.int32) + bits.to(torch.int32)
    upper_bits = as_integer & -0x10000
    return upper_bits.view(torch.float32).to(torch.bfloat16)


def random_bits(index: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """Return 32 random bits per element, as int64. index (n,): indices of the elements in the whole
    matrix. key: a number below 2^32 that depends on the run's seed and the parameter's name. step:
    the number of the update."""
    key_of_step = mix(key ^ mix(step & 0xFFFFFFFF))
    # two rounds with different keys. After one round, all keys would draw the same numbers, in
    # different orders
    first = mix((index & 0xFFFFFFFF) ^ key_of_step)
    return mix(first ^ (index >> 32) ^ mix(key_of_step + 1))


def mix(x: Tensor) -> Tensor:
    """Map integers of 32 bits, stored as int64, to integers of 32 bits. The map is one-to-one. If
    one bit of x changes, about half of the result's bits change.

    The multipliers are odd and below 2^31, so no product exceeds 63 bits.
    """
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def element_index(
    count: int, start: Tensor, slice_rows: Tensor | None, slice_cols: tuple | None
) -> Tensor:
    """Return where `count` consecutive elements lie in the flat whole matrix: indices (count,).

    start: index of the first one, in the flat whole matrix, or in a flat tensor-parallel slice of
    it. slice_rows, slice_cols: from slice_on; None if there is no slice.

    Example: the slice has columns 2 to 4 of rows 4 and 5 of a matrix with 6 columns. Its element 3
    is in row 1 of the slice, so its index in the whole matrix is 5 * 6 + 2 = 32.
    """
    index = torch.arange(count, device=start.device) + start
    if slice_rows is None:
        return index
    first_col, cols, whole_cols = slice_cols
    row = index // cols  # in the slice
    whole_row = row
    for first_row, shift in slice_rows.unbind():  # a later run of rows overrides an earlier one
        whole_row = torch.where(row >= first_row, row + shift, whole_row)
    return whole_row * whole_cols + first_col + index % cols


@functools.cache
def element_key_on(name: str, seed: int, start: int, device: torch.device) -> Tensor:
    """Return [key, start] on the device, int64. The key depends on the seed and the name. The
    result is cached, because a copy to the device in each step would make the host wait."""
    key = zlib.crc32(name.encode(), zlib.crc32(str(seed).encode()))
    return torch.tensor([key, start], device=device)


@functools.cache
def slice_on(
    tp_slice: TensorSlice | None, device: torch.device
) -> tuple[Tensor, tuple[int, int, int]] | tuple[None, None]:
    """Return (rows, cols), which tell element_index what a slice is. No slice: (None, None).

    rows    [first row in the slice, shift] for each run of rows (TensorSlice.rows), as int64 on the
            device. A row r of the run is row r + shift of the whole matrix. Example: rows 4 and 5
            of the whole matrix are the slice's rows 0 and 1, so this is [[0, 4]]
    cols    the slice's first column in the whole matrix, its number of columns, and the number of
            columns of the whole matrix
    """
    if tp_slice is None:
        return None, None
    runs = []
    row = 0
    for first, end in tp_slice.rows:
        runs.append([row, first - row])
        row += end - first
    first_col, end_col = tp_slice.cols
    _, whole_cols = tp_slice.whole
    return torch.tensor(runs, device=device), (first_col, end_col - first_col, whole_cols)


# ---------------------------------------------------------------------------- a check of optimizers


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer breaks one of these rules. Without this check, a run with it
    would train wrong, and no error would say so.

        1. One state is named "master". It is in float32 or wider, because bf16 would round small
           updates away. No two states have the same name, and none is named "frozen" or "rest of
           master", as other tensors are in a checkpoint or on the host. Matrices and vectors have
           the state that --export writes.
        2. A step that is not finite changes neither the weight nor a state.
        3. Updating a matrix in two halves gives the same as updating it at once, unless
           optimizer.whole. A rank relies on this, because it updates only the part that it owns.
        4. The bf16 weight is the master weight, rounded by round_weight. States on the host rely
           on this, and so does a resume.

    The update runs on a matrix of 256 random elements on the CPU: for rules 2 and 3 with the weight
    in float64, and for rule 4 with the weight in bf16 (check_rounding).
    """
    dtypes = optimizer.dtypes(torch.float64)
    if "master" not in dtypes or len(dtypes) < len(optimizer.states):
        raise ValueError(
            f"--optimizer {name}: its states are {', '.join(s.name for s in optimizer.states)}; "
            'states must have different names, and one must be "master", the weight itself'
        )
    if reserved := {"frozen", REST} & set(dtypes):
        raise ValueError(
            f"--optimizer {name}: a state may not be named {' or '.join(sorted(reserved))}. Other "
            "tensors have this name, so choose another one"
        )
    master = optimizer.dtypes(torch.float32)["master"]
    if torch.promote_types(master, torch.float32) != master:
        raise ValueError(
            f'--optimizer {name}: the state "master" is in {master}, which would round small '
            "updates away. It must be in float32 or wider"
        )
    vectors = optimizer.vectors or ADAMW
    for what, states in (("matrices", optimizer.states), ("vectors", vectors.states)):
        if optimizer.exported not in [state.name for state in states]:
            raise ValueError(
                f"--optimizer {name}: --export would write the state {optimizer.exported!r}, which "
                f"{what} do not have; theirs are {', '.join(state.name for state in states)}"
            )
    if optimizer.vectors:
        check_optimizer(name, replace(optimizer.vectors, vectors=None, exported="master"))
    shape = (16, 16) if optimizer.whole else (256,)
    rng = torch.Generator().manual_seed(0)
    random_tensor = functools.partial(torch.rand, shape, generator=rng, dtype=torch.float64)
    before = {state: random_tensor().to(dtype) for state, dtype in dtypes.items()}
    before["weight"] = before["master"].clone()
    grad = random_tensor() - 0.5

    everything = [slice(None)]
    skipped = tensors_after(optimizer, before, torch.full_like(grad, math.inf), everything)
    for key, value in before.items():
        if not torch.equal(skipped[key], value):
            raise ValueError(
                f"--optimizer {name}: a step that is not finite changes {key!r}; write it by "
                "torch.where(u.finite, new, old)"
            )

    if not optimizer.whole:
        whole = tensors_after(optimizer, before, grad, everything)
        halves = tensors_after(optimizer, before, grad, [slice(0, 128), slice(128, 256)])
        for key in whole:
            difference = (whole[key].double() - halves[key].double()).abs().max().item()
            if not difference <= 1e-9:  # NaN differs, too
                raise ValueError(
                    f"--optimizer {name}: updating a matrix in two halves differs from updating "
                    f"the whole by {difference:.2g} in {key!r}, and ranks update parts of a "
                    "matrix; declare Optimizer(..., whole=True)"
                )

    check_rounding(name, optimizer, before, grad)


def check_rounding(
    name: str, optimizer: Optimizer, before: dict[str, Tensor], grad: Tensor
) -> None:
    """Raise ValueError if an optimizer does not set a bf16 weight to the master weight, rounded by
    round_weight. before, grad: the states and the gradient, in float64.

    All master weights are set to ties, because only ties tell round_weight from PyTorch's rounding.
    An update with lr = 0 leaves them ties. A second one, with lr = 0.01, changes them."""
    dtypes = optimizer.dtypes(torch.float32)
    narrow = {state: before[state].to(dtype) for state, dtype in dtypes.items()}
    if narrow["master"].dtype == torch.float32:
        bits = narrow["master"].view(torch.int32)
        bits.copy_(bits & -0x10000 | 0x8000)  # the lower 16 bits of a tie are 0x8000
    narrow["weight"] = round_weight(narrow["master"], torch.bfloat16)
    for lr in (0.0, 0.01):
        after = tensors_after(optimizer, narrow, grad, [slice(None)], lr)
        if not torch.equal(after["weight"], round_weight(after["master"], torch.bfloat16)):
            raise ValueError(
                f"--optimizer {name}: the bf16 weight is not the master weight, rounded as the "
                "host rounds it; write u.weight.copy_(round_weight(master, u.weight.dtype))"
            )


def tensors_after(
    optimizer: Optimizer,
    before: dict[str, Tensor],
    grad: Tensor,
    ranges: list[slice],
    lr: float = 0.01,
) -> dict[str, Tensor]:
    """Return the weight and the states after an update that runs range by range. before: the weight
    and the states, which are copied. If the gradient is not finite, u.finite is false."""
    after = {key: value.clone() for key, value in before.items()}
    dtype = before["weight"].dtype
    accum_dtype = accumulation_dtype(dtype)
    scalars = make_scalars(torch.device("cpu"), accum_dtype)
    norm = torch.tensor(2.0 if grad.isfinite().all() else math.inf, dtype=accum_dtype)
    for _ in range(2):  # t = 2: the random states stand for those after an earlier update
        set_scalars(scalars, lr, 1.0, norm, 0.0)
    for elements in ranges:
        optimizer.update(
            Update(
                name="example",
                start=elements.start or 0,
                weight=after["weight"][elements],
                grad=grad.to(dtype)[elements],
                states={state.name: after[state.name][elements] for state in optimizer.states},
                weight_decay=0.1,
                **scalars._asdict(),
            )
        )
    return after


# ---------------------------------------------------------------------------- schedules


@dataclass(frozen=True)
class Schedule:
    """How the learning rate falls after the warm-up, from --lr to --min-lr * --lr.

    falls(done) returns how far the rate has fallen when the fraction `done` of the decay is over: 0
    means that it is --lr, and 1 that it is the minimum. train.learning_rate uses it.

    stable: False if the decay takes all steps after the warm-up. True if the rate first stays at
    --lr, and falls only in the last --decay-steps. Then a run that is resumed with more steps
    before its decay has begun moves the decay to its new end.
    """

    falls: Callable[[float], float]
    stable: bool = False


# --schedule: a fork adds a row. With wsd (warm-up, stable, decay) the rate falls as
# 1 - sqrt(done), which Hägele et al. (arXiv 2405.18392) found better than a linear decay. In their
# runs, wsd with a decay of 20 % of the steps, our default, was as good as a cosine schedule
SCHEDULES = {
    "cosine": Schedule(lambda done: 0.5 * (1 - math.cos(math.pi * done))),
    "constant": Schedule(lambda done: 0.0),
    "wsd": Schedule(math.sqrt, stable=True),
}

# ---------------------------------------------------------------------------- where states are

# If states are on the host, the update of a matrix runs in pieces
PIECE_ELEMENTS = 2**25  # the largest number of elements in a piece, unless Optimizer.whole
PIECE_BUFFERS = 3  # GPU buffers for the states of a piece; the pieces use them in turn


def allocate_states(
    optimizer: Optimizer,
    sizes: list[int],
    dtype: torch.dtype,
    device: torch.device,
    storage: str,
    resident: Sequence[bool] = (),
) -> tuple[list[dict[str, Tensor]], "HostStates | None"]:
    """Allocate the states of all matrices, filled with zeros. A state of a matrix is (size,).

    sizes: how many elements of each matrix this rank owns. dtype: the compute dtype. storage: "gpu"
    or "host". resident: for each matrix, whether its states stay on the GPU although `storage` is
    "host". The default is that none do.

    Returns the states of each matrix by name, as Optimizer.stored_dtypes lists them. If they are on
    the host, it also returns the HostStates that streams them through the GPU. Raises ConfigError
    if a rank gets no host memory. A collective of all ranks.
    """
    state_dtypes = optimizer.stored_dtypes(dtype, storage)

    # each tensor on the GPU has an allocation of its own. If it were a view of a larger tensor, a
    # compiled update would not know that its address is aligned
    def zeros(size: int, on: torch.device | str) -> dict[str, Tensor]:
        return {
            name: torch.zeros(size, dtype=state_dtype, device=on)
            for name, state_dtype in state_dtypes.items()
        }

    if storage == "gpu":
        return [zeros(size, device) for size in sizes], None

    resident = resident or [False] * len(sizes)
    # the states of one matrix are carved from one host buffer, by their shapes on the meta device
    shapes = [zeros(size, "meta") for size, stays in zip(sizes, resident) if not stays]
    buffer_sizes = [buffer_bytes(shape) for shape in shapes]
    pin = device.type == "cuda"
    buffers = all_or_none(pin_host_buffers, buffer_sizes, pin)
    on_host = iter([carve(buffer, shape) for buffer, shape in zip(buffers, shapes)])
    states = [
        zeros(size, device) if stays else next(on_host) for size, stays in zip(sizes, resident)
    ]

    piece_elements = max(sizes, default=0)  # a pipeline stage may have only frozen weights
    if not optimizer.whole:
        piece_elements = min(piece_elements, PIECE_ELEMENTS)
    return states, HostStates(piece_elements, state_dtypes, device)


class HostStates:
    """Streams optimizer states from page-locked host memory through the GPU, for their update.

    Each matrix goes in pieces. The updates run on host_update, a stream of shard.States that
    overlaps with the next forward. Three things run at a time: one piece is copied to the GPU, one
    is updated, and one is copied back. So there are three buffers A, B and C, which the pieces use
    in turn:

        stream_in      piece 0 -> A  piece 1 -> B  piece 2 -> C      piece 3 -> A
        host_update                 |0|           |1|              |2|
        stream_out                      A -> piece 0  B -> piece 1     C -> piece 2

    The copies of the first three pieces to the GPU wait neither for compute nor for an update,
    because the states do not depend on the gradients. So they may run while the GPU still runs the
    backward.

    If the host stores only the rest of the master weights, each piece does three things on
    host_update: join_master makes its master weights, the optimizer updates them, and split_master
    sets the new weights and the new rest. One buffer for joined master weights is enough, because
    host_update runs the pieces one after the other.

    States that stay on the GPU (--resident-states) are updated in pieces on host_update, too, but
    they are not copied and need none of the three buffers (`pieces_on_gpu`).

    piece_elements: the largest number of elements in a piece. state_dtypes: of the states as the
    host stores them, by name (Optimizer.stored_dtypes).
    """

    def __init__(
        self, piece_elements: int, state_dtypes: dict[str, torch.dtype], device: torch.device
    ):
        self.piece_elements = piece_elements

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(piece_elements, dtype=dtype, device=device)

        buffers = [
            Buffer([zeros(dtype) for dtype in state_dtypes.values()]) for _ in range(PIECE_BUFFERS)
        ]
        self.buffers = itertools.cycle(buffers)  # in turn, without end
        # a buffer for the joined master weights of a piece; None: the host stores them whole
        self.master = zeros(torch.float32) if REST in state_dtypes else None
        self.stream_in = CommStream(device)
        self.stream_out = CommStream(device)

    def begin(self) -> None:
        """Begin an update: its copies from the host must see what the last update wrote there."""
        with self.stream_in.beside_compute():
            # waits for the last update's copies to the host; hidden by the passes since then
            wait(self.stream_out.record_event())

    def stream_through(
        self, states: dict[str, Tensor], weight: Tensor
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yield a matrix piece by piece: the range of its elements, and their states on the GPU.
        When the caller asks for the next piece, the states of this one are copied back.

        states: by name, each (n,), on the host, as they are stored. weight: (n,), on the GPU. The
        yielded states always include the whole master weight, in float32 or wider."""
        for piece in self.pieces_of(weight):
            on_host = [state[piece] for state in states.values()]
            buffer = next(self.buffers)
            on_gpu = [tensor[: piece.stop - piece.start] for tensor in buffer.data]
            with self.stream_in.beside_compute():
                # waits until the buffer's last piece is back on the host; hidden by the updates of
                # the two pieces since then
                wait(buffer.event)
                torch._foreach_copy_(on_gpu, on_host, non_blocking=True)
            # waits for this piece's states; hidden by the forward, under which host_update runs
            wait(self.stream_in.record_event())
            stored = dict(zip(states, on_gpu))
            yield piece, self.join(stored, weight[piece])
            self.split(stored, weight[piece])
            # this copy starts after the update; it is hidden by the next piece's copy from the host
            with self.stream_out.after_compute():
                torch._foreach_copy_(on_host, on_gpu, non_blocking=True)
                self.stream_out.done_reading(*on_gpu)
            buffer.event = self.stream_out.record_event()

    def pieces_on_gpu(
        self, states: dict[str, Tensor], weight: Tensor
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yield the same as stream_through, for a matrix whose states stay on the GPU. Nothing is
        copied to or from the host."""
        for piece in self.pieces_of(weight):
            stored = {name: state[piece] for name, state in states.items()}
            yield piece, self.join(stored, weight[piece])
            self.split(stored, weight[piece])

    def pieces_of(self, weight: Tensor) -> Iterator[slice]:
        """Yield the ranges of a matrix's elements (n,) that are updated one after the other."""
        size = len(weight)
        for start in range(0, size, self.piece_elements):
            yield slice(start, min(start + self.piece_elements, size))

    def join(self, stored: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        """Return the states of a piece as the optimizer gets them, in the order in which it
        declares them: with the whole master weight instead of its rest.

        stored: by name, each (n,), on the GPU. weight: (n,)."""
        states = {}
        for name, tensor in stored.items():
            if name == REST:
                states["master"] = self.master[: len(tensor)]
                join_master(states["master"], weight, tensor)
            else:
                states[name] = tensor
        return states

    def split(self, stored: dict[str, Tensor], weight: Tensor) -> None:
        """Set the weight and the rest of a piece from the master weight that `join` made and the
        optimizer updated. The arguments are those of `join`."""
        if REST in stored:
            rest = stored[REST]
            split_master(self.master[: len(rest)], weight, rest)

    def synchronize(self) -> None:
        """Let the host wait until its memory holds what the last update wrote."""
        if event := self.stream_out.record_event():
            event.synchronize()
