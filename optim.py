"""Optimizers, optimizer states on the host, and the update of what a rank owns.

An optimizer is a function and its states: AdamW here is a dozen lines. A rank updates only the part
of each matrix that it owns (1/os of it; AMSP, section IV), and shard.States broadcasts the updated
parameters. Another optimizer is a function like `adamw` and a row of OPTIMIZERS (examples/muon.py);
its states are then sharded, saved, resumed, moved to the host and counted like AdamW's.

    def sgd(u: Update) -> None:                         # u.weight, u.grad, u.lr, ... by name
        master = u.states["master"]
        new = master - u.lr * u.clip * u.grad.to(master.dtype)
        master.copy_(torch.where(u.finite, new, master))  # if not finite, nothing changes
        u.weight.copy_(master)

    OPTIMIZERS["sgd"] = Optimizer(sgd, (State("master"),))

Where the states of P parameters lie, with AdamW's three states in float32:

    --os-place gpu     12P/os bytes of the GPU
    --os-place host    12P/os bytes of page-locked host memory; they visit the GPU part by part,
                       under the next forward (HostStates)

Left out: learning rates by parameter.

Legend: P parameters, os shards of the optimizer states, S elements of a matrix with padding, t the
number of the update, m and v AdamW's moments.
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
    """The numbers of a step that all of its updates share: 0-dim tensors on the device, so that
    nothing waits for the host. They stay in place, so that a CUDA graph hears new values."""

    lr: Tensor  # learning rate
    clip: Tensor  # factor on the gradient: at most 1, less if the global norm is clipped
    step: Tensor  # t: the number of this update, from 1 on; skipped steps do not count. int64
    correction1: Tensor  # 1 - beta1^t
    correction2: Tensor  # 1 - beta2^t
    finite: Tensor  # bool: whether loss and gradients are finite; if not, nothing may change


class Update(NamedTuple):
    """What an optimizer is called with. It writes `weight` and `states` in place."""

    name: str  # of the parameter, as in a checkpoint
    # index of the first element within the whole matrix; with tensor parallelism, within this
    # rank's part of it. The last elements may be padding behind the matrix's end
    first: int
    weight: Tensor  # in the compute dtype: (n,), a part of a matrix; (rows, cols) if `whole`
    grad: Tensor  # of the same shape, in the compute dtype or wider
    states: dict[str, Tensor]  # of the same shape, each in its own dtype
    lr: Tensor
    clip: Tensor
    step: Tensor
    correction1: Tensor
    correction2: Tensor
    finite: Tensor
    decay: float  # weight decay


def make_scalars(device: torch.device, dtype: torch.dtype) -> Scalars:
    """Return places for a step's numbers, in float32 or wider."""
    lr, clip, correction1, correction2 = torch.ones(4, dtype=dtype, device=device).unbind()
    step = torch.zeros((), dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    return Scalars(lr, clip, step, correction1, correction2, finite)


def set_scalars(
    scalars: Scalars, lr: float | Tensor, max_norm: float, norm: Tensor, loss: Tensor | float
) -> Tensor:
    """Set a step's numbers from its global gradient norm, clipped to max_norm (0: not clipped).
    Returns whether the norm and the loss are finite."""
    finite = (norm + loss).isfinite()
    scalars.finite.copy_(finite)
    scalars.step.add_(finite)
    t = scalars.step.to(norm.dtype).clamp(min=1)
    scalars.lr.copy_(torch.ones_like(norm) * lr)
    scalars.clip.copy_(((max_norm or math.inf) / (norm + 1e-6)).clamp(max=1))
    scalars.correction1.copy_(1 - BETAS[0] ** t)
    scalars.correction2.copy_(1 - BETAS[1] ** t)
    return finite


def global_norm(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the norm of all ranks' gradients together. A collective of all ranks, of which each
    passes other elements."""
    norms = torch._foreach_norm(grads, dtype=dtype)
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


# ---------------------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class State:
    """One tensor that an optimizer keeps for each matrix, as large as the part that a rank owns."""

    name: str
    dtype: torch.dtype | None = None  # None: float32, or the compute dtype if that is wider


@dataclass(frozen=True)
class Optimizer:
    """A function and its states: all that an optimizer is.

    update(u: Update) writes u.weight and u.states in place. One state is named "master": the weight
    itself, in float32 or wider. The others start at 0. Where u.finite is false, it changes nothing:
    by torch.where, as in `adamw`, because what is not finite times 0 is not 0.

    It updates every Matrix: embedding, head, and q|k|v and gate|up as they are fused. Vectors
    (norms and biases) are always updated by AdamW.
    """

    update: Callable[[Update], None]
    states: tuple[State, ...]
    whole: bool = False  # it needs whole matrices: --os-layout inter --p 1 --tp 1

    def dtypes(self, accum_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each state by name. accum_dtype: of states that name none."""
        return {state.name: state.dtype or accum_dtype for state in self.states}

    def bytes_per_parameter(self, accum_dtype: torch.dtype) -> int:
        return sum(dtype.itemsize for dtype in self.dtypes(accum_dtype).values())


def adamw(u: Update) -> None:
    """Update flat tensors by AdamW. A bf16 parameter's update reads 14 bytes and writes 14."""
    master, m, v = (u.states[state.name] for state in ADAMW.states)
    fused_adamw(
        u.weight,
        u.grad,
        master,
        m,
        v,
        u.lr,
        u.clip,
        u.correction1,
        u.correction2,
        u.finite,
        u.decay,
    )


@functools.partial(compiled, dynamic=None)  # matrices of many sizes
def fused_adamw(weight, grad, master, m, v, lr, clip, correction1, correction2, finite, decay):
    beta1, beta2 = BETAS
    grad = grad.to(master.dtype) * clip
    m_new = m + (1 - beta1) * (grad - m)
    v_new = v + (1 - beta2) * (grad * grad - v)
    step = lr / correction1 * m_new / ((v_new / correction2).sqrt() + EPS)
    master_new = master * (1 - lr * decay) - step
    for state, new in ((master, master_new), (m, m_new), (v, v_new)):
        state.copy_(torch.where(finite, new, state))
    weight.copy_(master)


ADAMW = Optimizer(adamw, (State("master"), State("exp_avg"), State("exp_avg_sq")))
OPTIMIZERS = {"adamw": ADAMW}  # of matrices, by the name in a plan


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer would train wrong without a word: if the update of a matrix
    in two halves is not the update of the whole (a rank updates only the part that it owns), if a
    step that is not finite changes the weight or a state, or if no state is the master weight.

    It is tried on 256 numbers in float64 on the CPU; weight, gradient and states are random."""
    dtypes = optimizer.dtypes(torch.float64)
    if "master" not in dtypes or len(dtypes) < len(optimizer.states):
        raise ValueError(
            f"--optimizer {name}: its states are {', '.join(s.name for s in optimizer.states)}; "
            'they have names of their own, and one is "master", the weight itself'
        )
    shape = (16, 16) if optimizer.whole else (256,)
    rng = torch.Generator().manual_seed(0)
    random = functools.partial(torch.rand, shape, generator=rng, dtype=torch.float64)
    before = {state: random().to(dtype) for state, dtype in dtypes.items()}
    before["weight"] = before["master"].clone()
    gradient = random() - 0.5

    def updated(parts: list[slice], finite: bool) -> dict[str, Tensor]:
        after = {key: value.clone() for key, value in before.items()}
        scalars = make_scalars(torch.device("cpu"), torch.float64)
        norm = torch.tensor(2.0 if finite else math.inf, dtype=torch.float64)
        for _ in range(2):  # t = 2: at t = 1 a bias-corrected m and v carry the same information
            set_scalars(scalars, 0.01, 1.0, norm, 0.0)
        grad = gradient if finite else torch.full_like(gradient, math.inf)
        for part in parts:
            states = {state: after[state][part] for state in dtypes}
            weight, first = after["weight"][part], part.start or 0
            optimizer.update(
                Update(name, first, weight, grad[part], states, decay=0.1, **scalars._asdict())
            )
        return after

    everything = slice(None)
    skipped = updated([everything], finite=False)
    for key, value in before.items():
        if not torch.equal(skipped[key], value):
            raise ValueError(
                f"--optimizer {name}: a step that is not finite changes {key!r}: write it by "
                "torch.where(u.finite, new, old)"
            )
    if not optimizer.whole:
        whole = updated([everything], finite=True)
        halves = updated([slice(0, 128), slice(128, 256)], finite=True)
        for key in whole:
            difference = (whole[key].double() - halves[key].double()).abs().max().item()
            if difference > 1e-9:
                raise ValueError(
                    f"--optimizer {name}: the update of a matrix in two halves differs from the "
                    f"update of the whole by {difference:.2g} in {key!r}, and ranks update parts: "
                    "say Optimizer(..., whole=True)"
                )


# ---------------------------------------------------------------------------- where states lie

VISIT_ELEMENTS = 2**25  # the most of a matrix that is updated at once if states lie on the host ...
VISIT_BUFFERS = 3  # ... in this many buffers, which take turns


def allocate_states(
    optimizer: Optimizer,
    sizes: list[int],
    accum_dtype: torch.dtype,
    device: torch.device,
    storage: str,
) -> tuple[list[dict[str, Tensor]], "HostStates | None"]:
    """Return the states (size,) of each matrix by name, zeros, and what brings them to the GPU if
    they lie on the host. sizes: elements that this rank owns; storage: "gpu" or "host". Raises
    ConfigError if a rank gets no host memory. A collective of all ranks."""
    dtypes = optimizer.dtypes(accum_dtype)
    if storage == "gpu":
        # tensors of their own: a compiled update does not know that parts of one are aligned
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
    elements = max(sizes) if optimizer.whole else min(max(sizes), VISIT_ELEMENTS)
    buffers = [
        Buffer([torch.zeros(elements, dtype=dtype, device=device) for dtype in dtypes.values()])
        for _ in range(VISIT_BUFFERS)
    ]
    return states, HostStates(
        elements, itertools.cycle(buffers), CommStream(device), CommStream(device)
    )


@dataclass(eq=False)
class HostStates:
    """Optimizer states in page-locked memory of the host. They visit the GPU part by part, in three
    buffers that take turns: while one is filled and one goes back, one waits for its update, whose
    kernel has to find room between those of the next forward.

        stream_in      part 0 -> A   part 1 -> B   part 2 -> C     part 3 -> A
        host_update                 |0|           |1|             |2|
        stream_out                      A -> part 0   B -> part 1     C -> part 2

    The first buffers are filled under the backward: what they hold does not depend on it.
    """

    elements: int  # the most of a matrix that visits at once
    buffers: Iterator[Buffer]  # without end; each has a tensor (elements,) per state
    stream_in: CommStream
    stream_out: CommStream

    def begin(self) -> None:
        """Begin an update: what is read must be what the last one has written."""
        with self.stream_in.beside_compute():
            wait(self.stream_out.record_event())  # hidden by a whole step

    def visits(self, states: dict[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yield one part of a matrix after the other: which elements, and their states on the GPU.
        The new values go back to the host when the caller asks for the next part."""
        size = len(next(iter(states.values())))
        for first in range(0, size, self.elements):
            part = slice(first, min(first + self.elements, size))
            on_host = [state[part] for state in states.values()]
            buffer = next(self.buffers)
            on_gpu = [room[: part.stop - part.start] for room in buffer.data]
            with self.stream_in.beside_compute():
                wait(buffer.event)  # what was in it is on the host; hidden by the visits between
                torch._foreach_copy_(on_gpu, on_host, non_blocking=True)
            wait(self.stream_in.record_event())  # hidden by the forward that host_update runs under
            yield part, dict(zip(states, on_gpu))
            with self.stream_out.after_compute():  # hidden by the next part's way in
                torch._foreach_copy_(on_host, on_gpu, non_blocking=True)
                self.stream_out.done_reading(*on_gpu)
            buffer.event = self.stream_out.record_event()

    def synchronize(self) -> None:
        """Let the host wait until its memory holds what the last update has written."""
        if event := self.stream_out.record_event():
            event.synchronize()
