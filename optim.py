"""Optimizers, and their states in GPU memory or in host memory.

An optimizer is a function and a list of its states. AdamW here is a dozen lines. A rank updates
only the elements that it owns: 1/os of each matrix, or with --os-layout inter all or nothing of a
p-shard (AMSP, section IV; shard.py). Then shard.States broadcasts the updated parameters.

To add an optimizer, write a function like `adamw` and a row of OPTIMIZERS. Its states are then
sharded, saved, resumed, moved to the host and counted by the planner, as AdamW's are.
examples/muon.py adds one, with its flag. The shortest is SGD:

    def sgd(u: Update) -> None:                           # u.weight, u.grad, u.lr, ... by name
        master = u.states["master"]
        new = master - u.lr * u.clip_factor * u.grad.to(master.dtype)
        master.copy_(torch.where(u.finite, new, master))  # if not finite, nothing changes
        u.weight.copy_(master)                            # rounded to the compute dtype

    OPTIMIZERS["sgd"] = Optimizer(sgd, (State("master"),))

The states of a model with P parameters are in one of two places (--os-place). With AdamW's three
states in float32:

    gpu     12P/os bytes of GPU memory per rank
    host    12P/os bytes of page-locked host memory per rank; the update streams them through the
            GPU in pieces, while the next forward runs (HostStates)

Left out: learning rates per parameter.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ops import compiled
from ranks import all_or_none
from streams import Buffer, CommStream, buffer_bytes, carve, pin_host_buffers, wait

BETAS = (0.9, 0.95)  # of AdamW's moments
EPS = 1e-8

# ---------------------------------------------------------------------------- what an update gets


class Scalars(NamedTuple):
    """The numbers that all updates of a step share.

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
    (rows, cols). shard.States also updates all vectors by one Update, whose name is "vectors"; only
    `adamw` gets it.
    """

    name: str  # of the parameter, as in a checkpoint
    # index in the flat matrix of the range's first element; with tensor parallelism, index in the
    # flat slice that this rank has. The range may end in padding, after the end of the matrix
    start: int
    weight: Tensor  # in the compute dtype
    grad: Tensor  # in the compute dtype or wider
    states: dict[str, Tensor]  # by name, each in its own dtype
    weight_decay: float
    lr: Tensor  # from here on: Scalars
    clip_factor: Tensor
    step: Tensor
    bias_correction1: Tensor
    bias_correction2: Tensor
    finite: Tensor


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
    """Set the numbers of a step. norm: the global gradient norm before clipping. max_norm: what
    clipping reduces it to; 0 switches clipping off. Returns whether norm and loss are finite."""
    finite = (norm + loss).isfinite()
    scalars.finite.copy_(finite)
    scalars.step.add_(finite)
    t = scalars.step.to(norm.dtype).clamp(min=1)
    scalars.lr.copy_(torch.ones_like(norm) * lr)
    scalars.clip_factor.copy_(((max_norm or math.inf) / (norm + 1e-6)).clamp(max=1))
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
    """One tensor that an optimizer keeps per matrix, such as a moment. A rank has only the elements
    that belong to the elements of the matrix that it owns."""

    name: str
    dtype: torch.dtype | None = None  # None: float32, or the compute dtype if that is wider


@dataclass(frozen=True)
class Optimizer:
    """A function and its states.

    update(u: Update) writes u.weight and u.states in place. It must keep three rules. Of the first
    one check_optimizer tests only the name; it tests the other two on an example.

        1. One state is named "master". It is the weight itself, in float32 or wider. The other
           states start at 0.
        2. If u.finite is false, nothing changes. Select by torch.where, as `adamw` does, because
           infinity times 0 is not 0.
        3. The update of a range of a matrix does not depend on the rest of the matrix. If it does,
           set whole=True.

    It updates every Matrix: the embedding, the head, and the matrices of a layer. There q, k and v
    are one Matrix, and so are gate and up. Vectors (norms and biases) are always updated by AdamW.
    """

    update: Callable[[Update], None]
    states: tuple[State, ...]
    whole: bool = False  # it needs whole matrices: --os-layout inter --p 1 --tp 1

    def dtypes(self, accum_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each state by name. accum_dtype: of states that name no dtype; it is
        float32, or the compute dtype if that is wider."""
        return {state.name: state.dtype or accum_dtype for state in self.states}

    def bytes_per_parameter(self, accum_dtype: torch.dtype) -> int:
        return sum(dtype.itemsize for dtype in self.dtypes(accum_dtype).values())


def adamw(u: Update) -> None:
    """Update tensors by AdamW. Per parameter it reads 14 bytes (a bf16 gradient, three float32
    states) and writes 14 (a bf16 weight, the states)."""
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
    )


@functools.partial(compiled, dynamic=None)  # one kernel for matrices of many sizes
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
):
    beta1, beta2 = BETAS
    grad = grad.to(master.dtype) * clip_factor
    m_new = m + (1 - beta1) * (grad - m)
    v_new = v + (1 - beta2) * (grad * grad - v)
    step = lr / bias_correction1 * m_new / ((v_new / bias_correction2).sqrt() + EPS)
    master_new = master * (1 - lr * weight_decay) - step
    for state, new in ((master, master_new), (m, m_new), (v, v_new)):
        state.copy_(torch.where(finite, new, state))
    weight.copy_(master)


ADAMW = Optimizer(adamw, (State("master"), State("exp_avg"), State("exp_avg_sq")))
OPTIMIZERS = {"adamw": ADAMW}  # of matrices, by the name in a plan (planner.py)


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer breaks one of these rules. Without this check it would train
    wrong without an error.

        One state is named "master", and no two have the same name.
        A step that is not finite changes neither the weight nor a state.
        Updating a matrix in two halves gives the same as updating it at once, unless
        optimizer.whole. A rank relies on this, because it updates only the part that it owns.

    The update runs on a matrix of 256 random elements, in float64 on the CPU.
    """
    dtypes = optimizer.dtypes(torch.float64)
    if "master" not in dtypes or len(dtypes) < len(optimizer.states):
        raise ValueError(
            f"--optimizer {name}: its states are {', '.join(s.name for s in optimizer.states)}; "
            'states must have different names, and one must be "master", the weight itself'
        )
    shape = (16, 16) if optimizer.whole else (256,)
    rng = torch.Generator().manual_seed(0)
    random = functools.partial(torch.rand, shape, generator=rng, dtype=torch.float64)
    before = {state: random().to(dtype) for state, dtype in dtypes.items()}
    before["weight"] = before["master"].clone()
    random_grad = random() - 0.5

    def tensors_after(ranges: list[slice], finite: bool) -> dict[str, Tensor]:
        """Return weight and states after an update that runs range by range."""
        after = {key: value.clone() for key, value in before.items()}
        scalars = make_scalars(torch.device("cpu"), torch.float64)
        norm = torch.tensor(2.0 if finite else math.inf, dtype=torch.float64)
        for _ in range(2):  # t = 2: the random states stand for those after an earlier update
            set_scalars(scalars, 0.01, 1.0, norm, 0.0)
        grad = random_grad if finite else torch.full_like(random_grad, math.inf)
        for elements in ranges:
            optimizer.update(
                Update(
                    name=name,
                    start=elements.start or 0,
                    weight=after["weight"][elements],
                    grad=grad[elements],
                    states={state: after[state][elements] for state in dtypes},
                    weight_decay=0.1,
                    **scalars._asdict(),
                )
            )
        return after

    everything = slice(None)
    skipped = tensors_after([everything], finite=False)
    for key, value in before.items():
        if not torch.equal(skipped[key], value):
            raise ValueError(
                f"--optimizer {name}: a step that is not finite changes {key!r}; write it by "
                "torch.where(u.finite, new, old)"
            )

    if not optimizer.whole:
        whole = tensors_after([everything], finite=True)
        halves = tensors_after([slice(0, 128), slice(128, 256)], finite=True)
        for key in whole:
            difference = (whole[key].double() - halves[key].double()).abs().max().item()
            if difference > 1e-9:
                raise ValueError(
                    f"--optimizer {name}: updating a matrix in two halves differs from updating "
                    f"the whole by {difference:.2g} in {key!r}, and ranks update parts of a "
                    "matrix; declare Optimizer(..., whole=True)"
                )


# ---------------------------------------------------------------------------- where states are

# If states are on the host, the update of a matrix runs in pieces
PIECE_ELEMENTS = 2**25  # the largest number of elements in a piece, unless Optimizer.whole
PIECE_BUFFERS = 3  # GPU buffers for the states of a piece; the pieces use them in turn


def allocate_states(
    optimizer: Optimizer,
    sizes: list[int],
    accum_dtype: torch.dtype,
    device: torch.device,
    storage: str,
) -> tuple[list[dict[str, Tensor]], "HostStates | None"]:
    """Allocate the states (size,) of matrices, zeros. sizes: the elements that this rank owns of
    each matrix; storage: "gpu" or "host".

    Returns the states of each matrix by name and, if they are on the host, the HostStates that
    streams them through the GPU. Raises ConfigError if a rank gets no host memory. A collective of
    all ranks.
    """
    dtypes = optimizer.dtypes(accum_dtype)
    if storage == "gpu":
        # one allocation per tensor, because a compiled update does not know that views of a large
        # one are aligned
        states = [
            {name: torch.zeros(size, dtype=dtype, device=device) for name, dtype in dtypes.items()}
            for size in sizes
        ]
        return states, None

    shapes = [
        {name: torch.empty(size, dtype=dtype, device="meta") for name, dtype in dtypes.items()}
        for size in sizes
    ]
    on_gpu = device.type == "cuda"
    pinned = all_or_none(pin_host_buffers, [buffer_bytes(shape) for shape in shapes], on_gpu)
    states = [carve(memory, shape) for memory, shape in zip(pinned, shapes)]

    piece_elements = max(sizes, default=0)  # a pipeline stage may have only frozen weights
    if not optimizer.whole:
        piece_elements = min(piece_elements, PIECE_ELEMENTS)
    buffers = [
        Buffer(
            [torch.zeros(piece_elements, dtype=dtype, device=device) for dtype in dtypes.values()]
        )
        for _ in range(PIECE_BUFFERS)
    ]
    stream_in = CommStream(device)
    stream_out = CommStream(device)
    return states, HostStates(piece_elements, itertools.cycle(buffers), stream_in, stream_out)


@dataclass(eq=False)
class HostStates:
    """Streams optimizer states from page-locked host memory through the GPU, for their update.

    Each matrix goes in pieces, and the pieces use three buffers A, B and C in turn. There are three
    because an update takes long: its kernels share the GPU with those of the next forward. While
    one buffer is being updated, the next one is filled, and the one before is copied back:

        stream_in      piece 0 -> A  piece 1 -> B  piece 2 -> C      piece 3 -> A
        host_update                 |0|           |1|              |2|
        stream_out                      A -> piece 0  B -> piece 1     C -> piece 2

    The copies into the first three buffers do not wait for compute, because the states do not
    depend on the gradients. So they may run while the GPU still runs the backward.
    """

    piece_elements: int  # the largest number of elements in a piece
    # the buffers in turn, without end; each has one tensor (piece_elements,) per state
    buffers: Iterator[Buffer]
    stream_in: CommStream
    stream_out: CommStream

    def begin(self) -> None:
        """Begin an update: its copies from the host must see what the last update wrote there."""
        with self.stream_in.beside_compute():
            # waits for the last update's copies to the host; hidden by the passes since then
            wait(self.stream_out.record_event())

    def stream_through(
        self, states: dict[str, Tensor]
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yield a matrix piece by piece: the range of its elements, and their states on the GPU.
        When the caller asks for the next piece, the states of this one are copied back."""
        size = len(next(iter(states.values())))
        for start in range(0, size, self.piece_elements):
            piece = slice(start, min(start + self.piece_elements, size))
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
            yield piece, dict(zip(states, on_gpu))
            # this copy starts after the update; it is hidden by the next piece's copy from the host
            with self.stream_out.after_compute():
                torch._foreach_copy_(on_host, on_gpu, non_blocking=True)
                self.stream_out.done_reading(*on_gpu)
            buffer.event = self.stream_out.record_event()

    def synchronize(self) -> None:
        """Let the host wait until its memory holds what the last update wrote."""
        if event := self.stream_out.record_event():
            event.synchronize()
