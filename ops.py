"""The operators that a layer is written in: norm, projection, rotary embedding, SwiGLU, loss.

Legend: B sequences, T tokens per sequence, N = B*T, C width, H query heads, K key/value heads, D
head width, F MLP width, V vocabulary. dy is the gradient of the loss with respect to y; x|y are x
and y in one tensor, side by side.

model.Block uses these operators. They work on each token separately; only attention (attention.py)
mixes tokens. Each has a forward and a backward written by hand, for one reason: to choose what
autograd saves. Of a layer autograd saves only Memo's skeletal activations

    x, q, k, v, o, h, gate|up       h is the residual stream after attention

and a few numbers per token: 1 / rms(x) of each norm, and attention's log-sum-exp. Backward computes
everything else again. Norms and SwiGLU, for example, are computed again by the kernel that computes
their gradients. In bf16 the skeletal activations of a 7B layer take 2 (6 C + 2 F) bytes per token,
or 91 KiB (C = 4096, F = 11008, K = H).

All matrices of a layer go through one function, project(matrix, prologue, *inputs) =
prologue(*inputs) W^T. (The two matrices outside the layers have `embedding` and `head_loss`.) A
Prologue computes the left factor of the product, and backward computes it again:

    call                                  saved for backward         computed again in backward
    project(qkv, norm, x, norm1.weight)   x, norm1.weight, 1 / rms   n = norm(x)
    project(out, IDENTITY, o)             o                          nothing
    project(down, SWIGLU, gate_up)        gate|up only               a = silu(gate) * up

Autograd does not save the weight W either. Instead, each use of a matrix calls a method of
matrix.events, from which shard.py returns W. So W may lie in a buffer that other layers refill
between forward and backward:

    matrix.events.unshard(matrix, backward) -> W        before each use, in forward and in backward
    matrix.events.add_grad(matrix, compute)             for each contribution to dW

On a GPU, `compiled` fuses the element-wise operations and row sums of a norm or of SwiGLU into one
kernel; a CPU runs them as they are written. If several contributions to a gradient are added up,
the sum is kept in float32 (`weight_grad_into`). There is one exception: with --grad-sums dtype,
gradients of micro-batches add up in the model's dtype.

offload.py calls these operators itself, inside a backward pass. Two context managers change what
they do there: `recomputation` (a forward pass runs again) and `deferred_weight_grads` (dW is
computed later, when its products hide communication). `run_detached` gives a chunk of tokens an
autograd graph of its own.
"""

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

IGNORE = -100  # a label that carries no loss

# ---------------------------------------------------------------------------- token-wise kernels


def compiled(
    fn: Callable | None = None, *, dynamic: bool | None = False, writes: bool = False
) -> Callable:
    """Return a function that runs fn as one fused kernel on a GPU, and as it is written on a CPU.
    It is also a decorator, @compiled or @compiled(writes=True).

    By default each set of shapes gets a kernel of its own, so the order of its sums does not depend
    on the shapes that ran before. A run has few shapes: whole sequences, chunks, a shorter last
    chunk. dynamic=None compiles a kernel for any shape when a second shape appears.
    `torch.compiler.set_stance("force_eager")` turns the compilation off.

    writes: fn writes into large arguments. PyTorch times an element-wise kernel with several block
    sizes at its first call. Before that it saves the arguments that the kernel writes into: on the
    GPU, or, if they do not fit, in page-locked memory of the host, which it keeps until the process
    ends. For whole sequences these are gigabytes that no plan counts, and with many of them Linux
    kills the run. So such a kernel takes the first block size, and is not timed. (A kernel that
    also sums over rows is still timed: softmax_loss, whose argument is small.)
    """
    if fn is None:
        return functools.partial(compiled, dynamic=dynamic, writes=writes)
    options = {"triton.autotune_pointwise": False} if writes else None

    @functools.cache
    def kernel():  # compiled at the first call, because importing the compiler takes seconds
        # one function has many kernels: with and without gradients, whole sequences, chunks ...
        torch._dynamo.config.recompile_limit = 256
        return torch.compile(fn, dynamic=dynamic, options=options)

    @functools.wraps(fn)
    def run(x, *args):
        # inside another compiled function, fn becomes a part of that function's kernel
        if x.is_cuda and not torch.compiler.is_compiling():
            return kernel()(x, *args)
        return fn(x, *args)

    run.is_compiled = True
    run.writes = writes
    return run


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def copy_heads(source: Tensor, into: Tensor) -> None:
    """Copy heads (..., D), 16 bytes at a time if possible.

    PyTorch copies a strided tensor element by element. A complex128 element has 16 bytes, so both
    tensors are viewed as complex128 if each head is contiguous and its size is a multiple of 16
    bytes. Heads must then also start at multiples of 16 bytes; otherwise PyTorch raises an error.
    """
    head_bytes = source.shape[-1] * source.itemsize
    if head_bytes % 16 == 0 and source.stride(-1) == 1:
        source = source.view(torch.complex128)
        into = into.view(torch.complex128)
    into.copy_(source)


@compiled
def norm_forward(x, weight, eps):
    """Return n = norm(x) (..., C), and 1 / rms(x) (..., 1), which norm_backward takes."""
    wide = x.to(accumulation_dtype(x.dtype))
    mean_square = wide.square().mean(-1, keepdim=True)
    inv_rms = torch.rsqrt(mean_square + eps)
    return (wide * inv_rms * weight).to(x.dtype), inv_rms


@compiled
def norm_backward(dn, x, weight, inv_rms):
    """Compute n = norm(x) again; return n (..., C), dx (..., C) and dweight (C,).

        u = x / rms(x)                              n = u * weight
        du = dn * weight                            dweight = sum over tokens of dn * u
        dx = (du - u * mean(du * u)) / rms(x)       the means are over C

    Because 1 / rms(x) (..., 1) is saved, this function need not compute it first, in another pass
    over x. So it is one kernel, if there are at least 2 C tokens.
    """
    u = x * inv_rms
    dn = dn.to(u.dtype)
    du = dn * weight
    # the part of du along u drops out, because a change of x along x itself does not change norm(x)
    along_u = (du * u).mean(-1, keepdim=True)
    dx = inv_rms * (du - u * along_u)
    token_dims = tuple(range(x.dim() - 1))
    dweight = (dn * u).sum(token_dims)
    n = u * weight
    return n.to(x.dtype), dx.to(x.dtype), dweight


class Positions(NamedTuple):
    """The position of each token of a call, in its sequence or in its document.

    A call gets some tokens of a sequence: a chunk of it, or the share of one rank. Neighbours in a
    tensor need not be neighbours in the sequence, and the first token need not be the sequence's
    first. So read positions from here, and do not derive them from an index in a tensor.
    """

    cos: Tensor  # of the rotary angles of q and k: (T, D/2) or (B, T, D/2)
    sin: Tensor
    qkv_positions: Tensor  # integers, for the tokens of q, k, v and o: (T,) or (B, T)
    # integers, for the tokens of x. With --tp-mode msp or fsp, x has only a part of the tokens of q
    x_positions: Tensor


def rotate(x, cos, sin):
    """Rotate pairs of x (B, T, heads, D) by angles (T, D/2) or (B, T, D/2); -sin rotates back.

    The pairs are (i, i + D/2), as in Hugging Face's checkpoints (Meta's own have (2i, 2i + 1)).
    """
    cos = cos.unsqueeze(-2)  # (T, 1, D/2)
    sin = sin.unsqueeze(-2)
    x1, x2 = x.to(cos.dtype).chunk(2, -1)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    return torch.cat((y1, y2), -1).to(x.dtype)


@compiled
def split_rotate_forward(qkv, cos, sin, heads):
    """Split qkv (B, T, H+2K, D) into q (B, T, H, D) and k, v (B, T, K, D), and rotate q and k.

    v is copied, too. A view of v would keep all of qkv alive. Then a layer (H = K) would save q, k
    and q|k|v, 5 C numbers per token, instead of q, k and v, 3 C.
    """
    q, k, v = qkv.split(heads, dim=2)
    q = rotate(q, cos, sin)
    k = rotate(k, cos, sin)
    return q, k, v.contiguous()


@compiled(writes=True)
def rotate_back_into(dy, cos, sin, dx):
    """Write into dx the gradient of heads (B, T, heads, D) before their rotation."""
    dx.copy_(rotate(dy, cos, -sin))


@compiled
def swiglu_forward(gate_up):
    """Return silu(gate) * up (..., F) of gate|up (..., 2F)."""
    wide = gate_up.to(accumulation_dtype(gate_up.dtype))
    gate, up = wide.chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@compiled(writes=True)
def swiglu_backward_into(gate, up, da, dgate, dup, needs_a):
    """Write the gradients of gate and up (N, F). Return a = silu(gate) * up, computed again, or
    None if nobody needs it.

    With float8 on a GPU, fp8_kernels.swiglu_backward_kernel runs instead, and repeats these
    formulas. If you change SwiGLU here, change them there, or take swiglu_backward out of
    fp8.BACKWARD_WITH_AMAX."""
    wide = accumulation_dtype(da.dtype)
    gate = gate.to(wide)
    up = up.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)
    dgate.copy_(da * up * slope)
    dup.copy_(da * silu)
    return (silu * up).to(da.dtype) if needs_a else None


def swiglu_backward(da, gate_up, needs_a=True):
    """Return a = swiglu(gate_up) (..., F), computed again, or None without needs_a; and gate_up's
    gradient (..., 2F)."""
    # contiguous even if gate_up is not: flatten must return views, which the kernel writes into
    dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    # (N, 2F) -> (N, F), (N, F): the compiler sees that halves of a matrix do not overlap, and makes
    # one kernel
    gate, up = gate_up.flatten(0, -2).chunk(2, -1)
    dgate, dup = dgate_up.flatten(0, -2).chunk(2, -1)
    a = swiglu_backward_into(gate, up, da.flatten(0, -2), dgate, dup, needs_a)
    return (a.view_as(da) if needs_a else None), dgate_up


def swiglu_input_grads(da, gate_up):
    """Return gate_up's gradient (..., 2F), and nothing else, in a tuple."""
    _, dgate_up = swiglu_backward(da, gate_up, needs_a=False)
    return (dgate_up,)


@compiled
def softmax_loss(logits, labels, scale, dlogits):
    """Return each token's cross-entropy (N, 1), and write the gradient of their sum * scale into
    dlogits (N, V), in its dtype. dlogits=None: compute no gradient.

    logits (N, V), labels (N,), scale 0-dim. A token whose label is IGNORE has loss 0, gradient 0.
    Any other label that is not in the vocabulary makes the loss NaN.
    """
    labels = labels[:, None]
    valid = labels != IGNORE
    target = torch.arange(logits.shape[1], device=logits.device) == labels  # (N, V), one-hot
    lse = logits.logsumexp(-1, keepdim=True)
    target_logit = (logits * target).sum(-1, keepdim=True)
    in_vocab = (labels >= 0) & (labels < logits.shape[1])
    target_logit = torch.where(in_vocab, target_logit, torch.nan)
    if dlogits is not None:
        probability = (logits - lse).exp()
        dlogits.copy_((probability - target.to(logits.dtype)) * torch.where(valid, scale, 0))
    return torch.where(valid, lse - target_logit, 0)


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the accumulator's dtype: float32 for bf16 operands."""
    accum_dtype = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype != accum_dtype:
        return torch.mm(a, b, out_dtype=accum_dtype)
    return a.to(accum_dtype) @ b.to(accum_dtype)  # no CPU kernel takes bf16 and returns float32


def weight_grad_into(dy: Tensor, x: Tensor, out: Tensor | None, beta: int) -> Tensor:
    """Write beta * out + dy^T x into out (rows, cols), and return it.

    This is the gradient of W (rows, cols) in y = x W^T: dy (N, rows), x (N, cols). beta=0 ignores
    what `out` holds; out=None returns a new tensor, in dy's dtype. `out` has dy's dtype or a wider
    one: float32 if several contributions add up (except micro-batches with --grad-sums dtype).
    With a float32 `out` the product takes no longer than with a bf16 one, since tensor cores
    accumulate in float32 anyway.
    """
    if out is None:
        return dy.t() @ x
    if not dy.is_cuda:  # no CPU kernel takes bf16 and adds to float32
        dy = dy.to(out.dtype)
        x = x.to(out.dtype)
    if out.dtype == dy.dtype:
        return torch.addmm(out, dy.t(), x, beta=beta, out=out)
    return torch.addmm(out, dy.t(), x, beta=beta, out=out, out_dtype=out.dtype)


def embedding_grad(dx: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """Return an embedding's gradient (V, C), in dx's dtype: row i is the sum of dx (B, T, C) over
    all tokens (B, T) that are i."""
    dtype = dx.dtype
    if not dx.is_cuda:  # a CPU adds in dx's dtype: long sums in bf16 lose most of their summands
        dx = dx.to(accumulation_dtype(dtype))
    return torch.ops.aten.embedding_dense_backward(dx, tokens, vocab, -1, False).to(dtype)


# ---------------------------------------------------------------------------- weights, events


class PlainEvents:
    """The two methods that are called when a matrix is used, for one device: they move nothing.
    shard.States takes the place of this object, and has the same methods.

    unshard(matrix, backward) -> W (rows, cols)
        Is called before each use, in a forward (backward=False) or a backward pass. The caller must
        launch all kernels that read W before it unshards a matrix of the next layer. After that,
        W's buffer may be refilled.
    add_grad(matrix, compute) -> dW (rows, cols), or None
        Is called once per contribution to dW, and never for a frozen matrix. compute(out, beta)
        writes beta * out + contribution into `out`, and returns `out`; compute(None, 0) returns the
        contribution as a new tensor. What add_grad returns goes to autograd. shard.States keeps dW
        in a buffer of its own, and returns None.
    """

    def unshard(self, matrix: nn.Module, backward: bool) -> Tensor:
        return matrix.weight

    def add_grad(self, matrix: nn.Module, compute: Callable) -> Tensor | None:
        return compute(None, 0)


class Products:
    """The three products of a projection y = a W^T, where a = prologue(*inputs):

        y = a W^T         da = dy W         dW = dy^T a

    `forward` and `backward` compute them in the model's dtype. The subclass fp8.Float8Products
    computes them in float8. matrix.products says which of the two classes a matrix uses.
    """

    def new_weights(self) -> None:
        """Drop what was computed from the weights, because they change. Here that is nothing."""

    def forward(self, matrix: "Matrix", prologue: "Prologue", recomputing: bool, inputs: tuple):
        """Return y (..., rows) and the prologue's extras. recomputing: whether this is a second
        forward pass, inside backward."""
        a, *extras = prologue.forward(*inputs)
        w = matrix.events.unshard(matrix, backward=recomputing)
        return F.linear(a, w), extras

    def backward(self, matrix: "Matrix", prologue: "Prologue", dy: Tensor, saved: tuple):
        """Return two values: what `add_weight_grad` returns (None for a frozen matrix), and the
        gradients of the prologue's inputs. dy (..., rows). saved: the inputs and the extras."""
        da = dy @ matrix.events.unshard(matrix, backward=True)
        if matrix.frozen:
            return None, prologue.grads(da, *saved)
        a, *input_grads = prologue.backward(da, *saved)
        dy = dy.reshape(-1, dy.shape[-1])  # (N, rows)
        a = a.detach().reshape(-1, a.shape[-1])  # (N, cols); it may be a saved tensor with a graph
        dw = add_weight_grad(matrix, functools.partial(weight_grad_into, dy, a))
        return dw, input_grads


def identity(x, *_):
    return x


@dataclass(frozen=True)
class TensorSlice:
    """The rows and columns of a whole matrix that one rank holds, as one smaller matrix.

    Example: q|k|v has 4 + 2 + 2 rows and two tensor-parallel ranks split each of the three. Rank 0
    holds rows ((0, 2), (4, 5), (6, 7)).
    """

    whole: tuple[int, int]  # shape of the whole matrix
    rows: tuple[tuple[int, int], ...]  # runs of rows, each from `first` to before `end`
    cols: tuple[int, int]  # from `first` to before `end`

    @property
    def shape(self) -> tuple[int, int]:
        first_col, end_col = self.cols
        rows = sum(end - first for first, end in self.rows)
        return rows, end_col - first_col

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return views of the whole matrix, one per run of rows."""
        cols = slice(*self.cols)
        return [whole[first:end, cols] for first, end in self.rows]

    def extract(self, whole: Tensor) -> Tensor:
        """Return a copy of the slice, as one matrix."""
        return torch.cat(self.views(whole))

    def insert(self, part: Tensor, whole: Tensor) -> None:
        """Write `part`, which is the slice as one matrix, to its rows and columns of `whole`."""
        for view in self.views(whole):
            rows = len(view)
            view.copy_(part[:rows])
            part = part[rows:]


class Weight(nn.Module):
    """What a Matrix and a Vector have in common: a parameter `weight` that may be frozen.

    A frozen weight keeps its values: it has no gradient and no optimizer states. Backward still
    computes the gradients of its products' inputs, which earlier layers need. Freeze weights while
    the model is on the meta device, in `__init__` of a Block or of a LLaMA:

        self.norm1.frozen = True           one weight
        self.requires_grad_(False)         all weights of a module that are defined so far
    """

    weight: nn.Parameter

    @property
    def frozen(self) -> bool:
        return not self.weight.requires_grad

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.weight.requires_grad_(not frozen)

    def replace_weight(self, tensor: Tensor) -> None:
        """Make this tensor the weight. The weight stays frozen if it was frozen."""
        self.weight = nn.Parameter(tensor, requires_grad=not self.frozen)


class Matrix(Weight):
    """A weight (rows, cols) of a projection. `events` tells shard.py about each use, and `products`
    computes what a projection computes.

    Use the weight only through `project`, `embedding` or `head_loss`, or by calling the matrix. A
    gradient from any other use stops the run with an error that names the matrix.

    cut: how tensor-parallel ranks may share the matrix (tensor.py):
        "rows"      by rows, each of `parts` by itself (q, k and v, say)
        "columns"   by columns, evenly: the input must not be a concatenation such as q|k|v
        "whole"     not at all: each rank applies the whole matrix to its own tokens
        ""          not said: --tp refuses the matrix
    If the ranks do share it, tensor.py sets `tp_slice`, and `tp_input` and `tp_prologue` (rows) or
    `tp_output` (columns), which exchange tokens between these ranks.

    A fresh weight is normal(0, std). std is 1 / sqrt(cols) by default, so that the elements of y
    are about as large as those of x. residual=True says that the product is added to the residual
    stream. Then std is divided by sqrt(2L), since each of L layers adds two products.

    frozen: see Weight. A use of a frozen matrix calls events.unshard in forward and in backward,
    and never events.add_grad. The matrix takes 2/p bytes per parameter in bf16, and is still
    gathered if p > 1. Nothing is computed or sent for its gradient. So no error stops the run if a
    frozen matrix is used without `project`, `embedding` or `head_loss`.

    A pass uses a matrix once. Only the embedding may be used twice, as embedding and as head
    (model.ModelConfig.tied): shard.py expects two contributions to its gradient.
    """

    events = PlainEvents()
    products = Products()
    tp_input = tp_output = tp_prologue = staticmethod(identity)
    tp_slice: TensorSlice | None = None  # the part of the whole matrix on this rank; None: all

    def __init__(
        self,
        rows: int,
        cols: int,
        cut: str = "",
        parts: tuple[int, ...] = (),
        std: float | None = None,
        residual: bool = False,
        frozen: bool = False,
    ):
        super().__init__()
        self.shape = (rows, cols)
        self.std = 1 / math.sqrt(cols) if std is None else std
        self.residual = residual
        self.cut = cut
        self.parts = parts or (rows,)
        parts_of_columns = cut == "columns" and parts
        if parts_of_columns or sum(self.parts) != rows:
            raise ValueError(
                f"Matrix({rows}, {cols}, {cut!r}, parts={parts}): parts are numbers of rows. They "
                f'must add up to {rows}, and cut="columns" takes none, because columns are split '
                "evenly"
            )
        self.weight = nn.Parameter(torch.empty(rows, cols), requires_grad=not frozen)

    def keep_slice(self, tp_slice: TensorSlice) -> None:
        """Shrink the matrix to the slice that this rank holds, while it is on the meta device."""
        self.tp_slice = tp_slice
        self.shape = tp_slice.shape
        self.replace_weight(self.weight.new_empty(self.shape))

    def forward(self, x: Tensor) -> Tensor:
        return project(self, IDENTITY, x)


class Vector(Weight):
    """A weight that is too small to shard: float32 or wider, whole on every rank.

    kind: "norm" starts as 1, "bias" starts as 0. like: the matrix to whose rows the elements
    belong, if there is one. A tensor-parallel rank uses the elements of the rows that it holds.
    frozen: see Weight. A frozen vector takes 4 bytes per parameter, and has no states.
    """

    STARTS = {"norm": 1.0, "bias": 0.0}

    def __init__(self, dim: int, kind: str, like: Matrix | None = None, frozen: bool = False):
        super().__init__()
        if kind not in self.STARTS:
            raise ValueError(f"Vector({dim}, {kind!r}): kind must be {' or '.join(self.STARTS)}")
        self.start = self.STARTS[kind]
        self.like = (like,)  # in a tuple, so that nn.Module does not register it as a child
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=not frozen)

    def local(self) -> Tensor:
        """Return the elements that belong to this rank's rows of the matrix `like`."""
        (matrix,) = self.like
        if matrix is None or matrix.tp_slice is None:
            return self.weight
        return torch.cat([self.weight[first:end] for first, end in matrix.tp_slice.rows])


# ---------------------------------------------------------------------------- the projection


@dataclass(frozen=True)
class Prologue:
    """What a projection computes before its product. Backward computes it again.

    forward(*inputs) -> (a, *extras)
        a (..., cols) is multiplied by W^T. The extras are saved for backward in addition to the
        inputs: 1 / rms for a norm, and nothing for most others.
    backward(da, *inputs, *extras) -> (a, *input_grads)
        Computes a again together with the gradients of the inputs, in one pass.

    Another activation function is another Prologue, for example GELU of u (..., F):

        GELU = Prologue(
            lambda u: (F.gelu(u),),
            lambda da, u: (F.gelu(u), torch.ops.aten.gelu_backward(da, u)),
        )

    input_grads(da, *inputs, *extras) -> input_grads
        The same as backward, without a. A frozen matrix calls it, because only dW needs a. None:
        call backward, and drop its a.
    """

    forward: Callable
    backward: Callable
    input_grads: Callable | None = None

    def grads(self, da: Tensor, *saved: Tensor) -> list[Tensor]:
        """Return the gradients of the inputs. saved: the inputs and the extras."""
        if self.input_grads:
            return [*self.input_grads(da, *saved)]
        _, *input_grads = self.backward(da, *saved)
        return input_grads


@functools.cache
def norm_prologue(eps: float) -> Prologue:
    """Return the Prologue whose inputs are x (..., C) and a norm's weight (C,). All layers share
    one object, so that a function that fp8.py compiles for it is compiled only once."""
    return Prologue(lambda x, weight: norm_forward(x, weight, eps), norm_backward)


IDENTITY = Prologue(lambda x: (x,), lambda da, x: (x, da))
SWIGLU = Prologue(lambda gate_up: (swiglu_forward(gate_up),), swiglu_backward, swiglu_input_grads)


class ProductIsReadError(ValueError):
    """A block reads a product that recomputation has left out."""


class UnreadProduct(Tensor):
    """Stands for a product that recomputation has left out (find_unread_product), or for a sum that
    it is a term of. Its values are NaN.

    It may be added to another tensor, because the gradients of a sum do not depend on its terms. It
    may also say its shape, dtype and device. Any other operator raises ProductIsReadError. NaN
    alone would not be enough: a comparison makes an ordinary bool of it.
    """

    SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
    SAY_SHAPE = {
        Tensor.size,
        Tensor.dim,
        Tensor.shape.__get__,
        Tensor.ndim.__get__,
        Tensor.dtype.__get__,
        Tensor.device.__get__,
    }

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in cls.SUMS and function not in cls.SAY_SHAPE:
            raise ProductIsReadError(
                f"a layer's last product is read by {function.__name__}, although recomputation "
                "leaves it out"
            )
        with torch._C.DisableTorchFunctionSubclass():  # function acts as on ordinary tensors
            result = function(*args, **kwargs or {})
            return result.as_subclass(cls) if function in cls.SUMS else result

    def unwrap(self) -> Tensor:
        """Return the same as an ordinary Tensor, for a caller that reads only its graph."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class _Project(Function):
    """y = prologue(*inputs) W^T. Autograd saves the inputs and the prologue's extras.

    Autograd does not save a = prologue(*inputs), which backward computes again. Nor does it save W,
    whose buffer may be refilled before backward. If the matrix is frozen, backward computes neither
    dW nor what only dW needs.

    weight: the parameter. It is an input only so that autograd knows where dW belongs.
    """

    @staticmethod
    def forward(ctx, matrix, prologue, is_unread, weight, *inputs):
        ctx.matrix = matrix
        ctx.prologue = prologue
        if is_unread:  # backward needs the inputs, but nobody needs the product
            ctx.save_for_backward(*inputs)
            x = inputs[0]
            # NaN (..., rows) instead of the product: see UnreadProduct
            return x.new_full((), math.nan).expand(*x.shape[:-1], matrix.shape[0])
        y, extras = matrix.products.forward(matrix, prologue, _mode.recomputing, inputs)
        ctx.has_extras = bool(extras)
        ctx.save_for_backward(*inputs, *extras)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        matrix = ctx.matrix
        dw, input_grads = matrix.products.backward(matrix, ctx.prologue, dy, ctx.saved_tensors)
        return None, None, None, dw, *input_grads


def project(matrix: Matrix, prologue: Prologue, x: Tensor, *inputs: Tensor) -> Tensor:
    """Return y (..., rows) = prologue(x, *inputs) W^T. inputs: a norm's weight, for example."""
    is_unread = matrix is _mode.unread_product
    x = matrix.tp_input(x)
    prologue = matrix.tp_prologue(prologue)
    y = _Project.apply(matrix, prologue, is_unread, matrix.weight, x, *inputs)
    # if the product is unread, tp_output exchanges nothing in forward, and the gradient in backward
    y = matrix.tp_output(y, is_unread)
    if is_unread and type(y) is Tensor:  # PyTorch cannot change the class of a FakeTensor
        return y.as_subclass(UnreadProduct)
    return y


def add_weight_grad(matrix: Matrix, compute: Callable) -> Tensor | None:
    """Contribute dW (rows, cols) to the matrix's gradient, now or later.

    compute(out, beta) runs the product, as weight_grad_into(dy, x, out, beta) does. It is passed to
    matrix.events.add_grad, which knows the buffer that receives dW and calls it. Inside
    `deferred_weight_grads`, this happens later, when the caller runs the list. Returns what
    autograd adds to matrix.weight.grad: dW, or None if dW goes elsewhere or comes later.
    """
    add_grad = functools.partial(matrix.events.add_grad, matrix, compute)

    def add_grad_later():
        grad = add_grad()
        # autograd has received None in place of dW, so dW is added to weight.grad here
        if grad is not None and matrix.weight.requires_grad:
            old = matrix.weight.grad
            matrix.weight.grad = grad if old is None else old + grad

    if _mode.deferred is None:
        return add_grad()
    _mode.deferred.append(add_grad_later)
    return None


# ---------------------------------------------------------------------------- backward by hand


class _Mode(threading.local):
    """What offload.py asks of operators while it runs a layer's backward by hand."""

    recomputing = False  # a forward pass runs again: it unshards weights with backward=True
    unread_product: nn.Module | None = None  # recomputation skips the product of this matrix
    deferred: list[Callable] | None = None  # collects products for dW; None: they run at once


_mode = _Mode()


@contextlib.contextmanager
def recomputation(unread_product: nn.Module | None):
    """Run a forward pass again inside this context, to get gradients of its inputs and weights.

    unread_product: the matrix whose product nobody reads, as `find_unread_product` returns it. Its
    product is not computed. None: all products are computed.
    """
    outer = _mode.recomputing, _mode.unread_product
    _mode.recomputing = True
    _mode.unread_product = unread_product
    try:
        yield
    finally:
        _mode.recomputing, _mode.unread_product = outer


def find_unread_product(y: Tensor) -> Matrix | None:
    """Return the matrix whose product recomputation may skip, or None. y: what block.post returns.

    Most layers end with a sum, as model.Block does:

        h ---------------------------------------- + --> y = h + product
        |                                          |
        +--> gate_up --> project(down, SWIGLU) ----+
                                         product

    Backward of the sum is dh = dy and dproduct = dy, and reads neither h nor the product. Backward
    of the product reads gate|up, which project() saves, and W. Recomputation serves backward only:
    y itself is not needed again. So nobody reads the product, and recomputation skips it. This
    saves 22 % of the FLOPs of a recomputed 7B layer.

    A block declares nothing. This function reads the graph that autograd recorded for y, and
    checks four conditions:

        condition                                 why
        1. y is a sum                             other operators may read their inputs in backward
        2. its second term is a product           only the result of `project` can be skipped. The
                                                  term may also be a sum again, whose second term is
                                                  such a product
        3. the product's Prologue has no extras   extras (such as 1 / rms) come from the forward
                                                  that would be skipped
        4. no other term of these sums depends    otherwise another operator reads it, too
           on the product

    If one of the four does not hold, this returns None, and recomputation computes everything. A
    read that autograd does not record, such as product.detach(), is not noticed here, but by
    UnreadProduct, which stands for the skipped product.
    """
    product = y.grad_fn
    other_terms = []
    while product is not None and product.name() == "AddBackward0":
        (first, _), (product, _) = product.next_functions
        other_terms.append(first)
    if not other_terms or not isinstance(product, _Project._backward_cls):
        return None
    if product.has_extras or product in operators_before(other_terms):
        return None
    return product.matrix


def operators_before(nodes: list) -> set:
    """Return the nodes of autograd's graph that some nodes depend on, and these nodes."""
    found = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in found:  # None: an input without a gradient
            continue
        found.add(node)
        pending += [earlier for earlier, _ in node.next_functions]
    return found


@contextlib.contextmanager
def deferred_weight_grads(on: bool):
    """Collect the products dW = dy^T x of a backward pass in a list, if `on`, and yield the list.

    Backward of a projection computes dx, which the next operator waits for, and dW, which no
    operator waits for. So dW can be computed later, while attention communicates. The caller calls
    the functions of the list in order; they take no arguments.
    """
    outer = _mode.deferred
    deferred = []
    _mode.deferred = deferred if on else None
    try:
        yield deferred
    finally:
        _mode.deferred = outer


# ---------------------------------------------------------------------------- autograd functions


class CustomGradient(Function):
    """y = forward_fn(x), and dx = backward_fn(dy). Both functions are the caller's.

    root: any tensor that requires a gradient. Pass it if x may require none; without it, autograd
    would then not call backward_fn.
    """

    @staticmethod
    def forward(ctx, x, forward_fn, backward_fn, root=None):
        ctx.backward_fn = backward_fn
        return forward_fn(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.backward_fn(dy), None, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        n, inv_rms = norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inv_rms)
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx, dn):
        _, dx, dweight = norm_backward(dn, *ctx.saved_tensors)
        return dx, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32 or wider.

    Before a projection, use a Prologue (model.Block.norm): then autograd does not save the result.
    """
    return _RMSNorm.apply(x, weight, eps)


class _SplitRotate(Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, heads):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return split_rotate_forward(qkv, cos, sin, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        batch, tokens, _, width = dq.shape
        dqkv = dq.new_empty(batch, tokens, sum(ctx.heads), width)
        q_part, k_part, v_part = dqkv.split(ctx.heads, dim=2)
        cos, sin = ctx.saved_tensors  # read once: PyTorch's checkpoints return them only once
        rotate_back_into(dq, cos, sin, q_part)
        rotate_back_into(dk, cos, sin, k_part)
        copy_heads(dv, v_part)
        return dqkv, None, None, None


def split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv (B, T, H+2K, D) into q, k, v, and apply the rotary embedding to q and k.

    heads: (H, K, K). q (B, T, H, D), k and v (B, T, K, D). Autograd saves only cos and sin.
    """
    return _SplitRotate.apply(qkv, cos, sin, heads)


class _Embedding(Function):
    @staticmethod
    def forward(ctx, weight, tokens, matrix):
        ctx.tokens = tokens
        ctx.matrix = matrix
        w = matrix.events.unshard(matrix, backward=False)  # (V, C)
        return F.embedding(tokens, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        matrix = ctx.matrix
        vocab, _ = matrix.shape

        def compute(out, beta):
            dw = embedding_grad(dx, ctx.tokens, vocab)
            if out is None:
                return dw
            if beta:
                return out.add_(dw)
            return out.copy_(dw)

        return matrix.events.add_grad(matrix, compute), None, None


def embedding(matrix: Matrix, tokens: Tensor) -> Tensor:
    """Return the rows (B, T, C) of the matrix (V, C) that tokens (B, T) name."""
    return _Embedding.apply(matrix.weight, tokens, matrix)


# Head and loss run in chunks of tokens, and several chunks form a group (_HeadLoss says why)
LOSS_ELEMENTS = 2**27  # a chunk has at most this many logits: 512 MiB of float32
LOSS_GRAD_TOKENS = 4096  # a group has at most this many tokens, unless one chunk has more
TILE_TOKENS = 128  # a matrix product computes its result in tiles of this many tokens or more


def loss_chunks(vocab: int) -> tuple[int, int]:
    """Return the tokens of a chunk and of a group of chunks, in head and loss (_HeadLoss)."""
    chunk = max(1, LOSS_ELEMENTS // vocab)
    if chunk > TILE_TOKENS:
        chunk -= chunk % TILE_TOKENS  # a tile that is not full takes as long as a full one
    return chunk, chunk * max(1, LOSS_GRAD_TOKENS // chunk)


class _HeadLoss(Function):
    """Compute the head and the cross-entropy loss together, in groups of chunks of tokens.

    Why chunks: the logits of all tokens (N, V) never exist at once. In float32, the logits of 128K
    tokens would take 15.6 GiB (V = 32,000). A chunk has at most LOSS_ELEMENTS logits.

    Why groups: with a large vocabulary a chunk has few tokens, 1,024 for V = 128,256. The product
    dW += dlogits^T x reads and writes all of dW. With so few tokens, this takes about as long as
    the arithmetic. So the chunks of a group write their gradients into one tensor, dlogits, and the
    group has one product. dlogits is in x's dtype. In bf16 it takes half as many bytes per token as
    the logits, which are in float32.

    Why gradients in the forward pass: the loss is a scalar, so its gradient dloss is one number.
    The gradients for dloss = 1 are computed as soon as a chunk's logits exist, and backward
    multiplies them by dloss. So the logits are computed once, and W is read in the forward pass
    only. Autograd saves these gradients: dx (N, C) in x's dtype, dW (V, C) in float32 or wider. A
    frozen head has no dW.
    """

    @staticmethod
    def forward(ctx, x, weight, labels, scale, head, differentiate):
        w = head.events.unshard(head, backward=False)  # (V, C)
        chunk, group = loss_chunks(len(w))
        accum_dtype = accumulation_dtype(x.dtype)
        dw = dlogits = None
        if differentiate:
            dx = torch.empty_like(x)
            if not head.frozen:
                dw = torch.empty_like(w, dtype=accum_dtype)
            ctx.save_for_backward(dx, dw)
            ctx.head = head
            dlogits = x.new_empty(min(group, len(x)), len(w))  # each group overwrites it
        losses = []
        for first in range(0, len(x), group):
            end = min(first + group, len(x))
            for start in range(first, end, chunk):
                rows = slice(start, min(start + chunk, end))  # n tokens
                chunk_dlogits = None
                if differentiate:
                    chunk_dlogits = dlogits[start - first : rows.stop - first]
                # float32 logits (n, V) -> losses (n, 1). The logits are only an argument, without a
                # variable that holds them, so they are freed at once
                losses.append(
                    softmax_loss(matmul_fp32(x[rows], w.t()), labels[rows], scale, chunk_dlogits)
                )
            if differentiate:
                group_dlogits = dlogits[: end - first]
                torch.mm(group_dlogits, w, out=dx[first:end])
                if dw is not None:
                    beta = 0 if first == 0 else 1  # the first group overwrites dw
                    weight_grad_into(group_dlogits, x[first:end], dw, beta)
        if not losses:  # a rank without tokens has no chunks
            losses.append(x.new_empty(0, 1, dtype=accum_dtype))
            if dw is not None:
                dw.zero_()
        loss = sum(token_losses.sum() * scale for token_losses in losses)
        losses = torch.cat(losses)
        ctx.mark_non_differentiable(losses)
        return loss, losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _):
        dx, dw = ctx.saved_tensors

        def compute(out, beta):
            if beta:
                return out.addcmul_(dw, dloss)
            return torch.mul(dw, dloss, out=out)

        dw_out = None
        if dw is not None:
            dw_out = ctx.head.events.add_grad(ctx.head, compute)
        dx = dx * dloss  # a tensor without dimensions is not rounded to dx's dtype first
        return dx, dw_out, None, None, None, None


def head_loss(
    head: Matrix, x: Tensor, labels: Tensor, scale: Tensor, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Return the sum over valid tokens of cross-entropy(x W^T, label) * scale, and all losses.

    x (N, C), W (V, C), labels (N,), scale 0-dim. A token whose label is IGNORE is not valid: its
    loss is 0. The sum is 0-dim. The losses per token (N, 1) are not scaled and have no gradient.
    differentiate: whether backward will follow; if not, no gradients are computed.
    """
    return _HeadLoss.apply(x, head.weight, labels, scale, head, differentiate)


# ---------------------------------------------------------------------------- graphs of their own


class _ChunkInputs(Function):
    """Return the inputs as the first tensors of a new autograd graph: backward ends here, and does
    not go on into the graph that made them.

    The list `grads` receives the inputs' gradients. root: any tensor that requires a gradient, so
    that autograd records the graph.
    """

    @staticmethod
    def forward(ctx, root, grads, *inputs):
        ctx.grads = grads
        return tuple(x.detach() for x in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        ctx.grads.extend(grads)  # zeros for an input that the block does not use
        return None, None, *(None for _ in grads)


def run_detached(root: Tensor, fn: Callable, *inputs: Tensor) -> tuple[Callable, list[Tensor]]:
    """Run fn(*inputs) with an autograd graph of its own; return its backward and its outputs.

    offload.py runs block.pre and block.post of a chunk of tokens this way, pipeline.py a stage of a
    micro-batch. The graph ends at the inputs, and the outputs (detached) do not belong to it.

    backward(output_grads) returns the inputs' gradients. A Matrix's gradient goes to its events, a
    Vector's to weight.grad.

    As long as the function `backward` lives, it keeps the tensors that autograd saved, and these
    may include the inputs. Inside SavedLayer.saving (offload.py), the SavedLayer keeps them.
    """
    grads = []
    with torch.enable_grad():
        outputs = fn(*_ChunkInputs.apply(root, grads, *inputs))
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    # an output has no gradient if there are no inputs and no weight trains
    with_gradient = [y.requires_grad for y in outputs]
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in outputs if y.requires_grad]

    def backward(output_grads):
        if edges:
            needed = list(itertools.compress(output_grads, with_gradient))
            torch.autograd.backward(edges, needed)
        return grads

    return backward, [y.detach() for y in outputs]
