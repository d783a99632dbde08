"""Operators that work on each token separately, and the projection that all matrices go through.

model.Block is written in these operators. Each has a forward and a backward by hand, for one
reason: autograd may only save what a layer keeps anyway (x, o, the residual stream, gate|up) and
numbers as small as 1 / rms. Norms and SwiGLU are computed again in backward, in one pass with their
gradients:

    project(qkv, norm, x, norm_weight)    saves x and 1 / rms(x); norm(x) is computed again
    project(down, SWIGLU, gate_up)        saves gate|up; SwiGLU(gate|up) is computed again

`project` is before(*inputs) W^T. A `Prologue` is a pair of functions, what is computed before the
product and its gradient; another activation is another Before. The weight W itself is never saved:
a Matrix raises an event where it is used, in forward and in backward, and the outside (shard.py)
answers with the weight, which may lie in a buffer that is filled again in between:

    matrix.events.unshard(matrix, backward) -> W        before each use
    matrix.events.add_grad(matrix, compute)             for each contribution to dW

On a GPU, element-wise operators are compiled into one kernel each (`compiled`); on a CPU they run
as they are written. Sums of several gradients are kept in float32 (`weight_grad_into`).

A backward pass that runs operators by hand (offload.py) says what it wants of them in two contexts:
`recomputation` (a forward that runs again) and `deferred_weight_grads` (products for weights wait,
to be run where they hide communication). `run_detached` runs a function as a graph of its own.

Legend: B sequences, T tokens per sequence, N = B*T, C width, H query heads, K key/value heads, D
head width, F MLP width, V vocabulary.
"""

import contextlib
import functools
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


def compiled(fn: Callable, dynamic: bool | None = False) -> Callable:
    """Return fn as one fused kernel on a GPU, and as it is written elsewhere.

    A kernel belongs to the shapes that it is called with (a run has few: whole sequences, chunks,
    a shorter last one), so that its sums do not depend on what ran before. dynamic=None: kernels
    for any shape from the second one on. `torch.compiler.set_stance("force_eager")` turns the
    compilation off. The compiler takes seconds to import, and a CPU does without.
    """

    @functools.cache
    def kernel():
        # kernels of one function: with or without gradients, whole or in chunks ...
        torch._dynamo.config.recompile_limit = 256
        return torch.compile(fn, dynamic=dynamic)

    @functools.wraps(fn)
    def run(x, *args):
        if x.is_cuda:
            return kernel()(x, *args)
        return fn(x, *args)

    run.is_compiled = True
    return run


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def copy_heads(source: Tensor, into: Tensor) -> None:
    """Copy heads (..., D), 16 bytes at a time where a head is one piece of memory: PyTorch's copy
    goes by elements. (Such heads begin at multiples of 16 bytes, or PyTorch refuses to.)"""
    if source.shape[-1] * source.itemsize % 16 == 0 and source.stride(-1) == 1:
        source = source.view(torch.complex128)
        into = into.view(torch.complex128)
    into.copy_(source)


@compiled
def norm_forward(x, weight, eps):
    """Return norm(x) (..., C), and 1 / rms(x) (..., 1)."""
    wide = x.to(accumulation_dtype(x.dtype))
    mean_square = wide.square().mean(-1, keepdim=True)
    scale = torch.rsqrt(mean_square + eps)
    return (wide * scale * weight).to(x.dtype), scale


@compiled
def norm_backward(dn, x, weight, scale):
    """Return n = norm(x) again (..., C), the gradient of x, and that of weight (C,). One kernel
    (where there are 2 C tokens or more), since no sum waits for scale, 1 / rms(x) (..., 1)."""
    unit = x * scale
    dn = dn.to(unit.dtype)
    dunit = dn * weight
    along = (dunit * unit).mean(-1, keepdim=True)  # n does not grow along x
    dx = scale * (dunit - unit * along)
    of_tokens = tuple(range(x.dim() - 1))
    dweight = (dn * unit).sum(of_tokens)
    n = unit * weight
    return n.to(x.dtype), dx.to(x.dtype), dweight


class Positions(NamedTuple):
    """The position of each token of a call, in its sequence or its document.

    A call gets some tokens of a sequence: a chunk of it, or those of one of the ranks that share
    it. Neighbours in a tensor need not be neighbours in the sequence, and the first token need not
    be its first. So read positions from here, and do not derive them from an index in a tensor.
    """

    cos: Tensor  # of the rotary angles of q and k: (T, D/2), or (B, T, D/2)
    sin: Tensor
    of_qkv: Tensor  # integers of the tokens of q, k, v and o: (T,), or (B, T)
    of_x: Tensor  # integers of the tokens of x: fewer, where --tp-mode msp or fsp splits them


def rotate(x, cos, sin):
    """Turn pairs of x (B, T, heads, D) by their angles (T, D/2), or (B, T, D/2); minus sin turns
    them back.

    The pairs are (i, i + D/2), as in Hugging Face's checkpoints (Meta's own have (2i, 2i+1)).
    """
    cos = cos.unsqueeze(-2)  # (T, 1, D/2)
    sin = sin.unsqueeze(-2)
    x1, x2 = x.to(cos.dtype).chunk(2, -1)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    return torch.cat((y1, y2), -1).to(x.dtype)


@compiled
def split_rotate_forward(qkv, cos, sin, heads):
    """Cut qkv (B, T, H+2K, D) into q (B, T, H, D), k, v (B, T, K, D), q and k turned.

    They are tensors of their own: what a layer keeps for backward is 3 C, not 5 C.
    """
    q, k, v = qkv.split(heads, dim=2)
    q = rotate(q, cos, sin)
    k = rotate(k, cos, sin)
    return q, k, v.contiguous()


@compiled
def rotate_back_into(dy, cos, sin, dx):
    """Write the gradient of heads (B, T, h, D) before they were turned."""
    dx.copy_(rotate(dy, cos, -sin))


@compiled
def swiglu_forward(gate_up):
    """Return silu(gate) * up (..., F) of gate|up (..., 2F)."""
    wide = gate_up.to(accumulation_dtype(gate_up.dtype))
    gate, up = wide.chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@compiled
def swiglu_backward_into(gate, up, da, dgate, dup):
    """Write the gradients of gate and up (N, F), and return a = silu(gate) * up again."""
    wide = accumulation_dtype(da.dtype)
    gate = gate.to(wide)
    up = up.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)
    dgate.copy_(da * up * slope)
    dup.copy_(da * silu)
    return (silu * up).to(da.dtype)


def swiglu_backward(da, gate_up):
    """Return a = swiglu(gate_up) (..., F) again, and the gradient of gate_up (..., 2F)."""
    dgate_up = torch.empty_like(gate_up)
    # halves of matrices: of these the compiler sees that they do not overlap, and makes one kernel
    gate, up = gate_up.flatten(0, -2).chunk(2, -1)
    dgate, dup = dgate_up.flatten(0, -2).chunk(2, -1)
    a = swiglu_backward_into(gate, up, da.flatten(0, -2), dgate, dup)
    return a.view_as(da), dgate_up


@compiled
def softmax_loss(logits, labels, scale):
    """Return of logits (N, V) each token's cross-entropy (N, 1), 0 if its label is IGNORE, and the
    gradient of their sum * scale."""
    labels = labels[:, None]
    valid = labels != IGNORE
    target = torch.arange(logits.shape[1], device=logits.device) == labels  # (N, V)
    lse = logits.logsumexp(-1, keepdim=True)
    of_target = (logits * target).sum(-1, keepdim=True)
    losses = torch.where(valid, lse - of_target, 0)
    probability = (logits - lse).exp()
    grad = probability - target.to(logits.dtype)
    return losses, grad * torch.where(valid, scale, 0)


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the accumulator's dtype (float32 of bf16 operands)."""
    accum_dtype = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype != accum_dtype:
        return torch.mm(a, b, out_dtype=accum_dtype)
    return a.to(accum_dtype) @ b.to(accum_dtype)  # no CPU kernel mixes the two


def weight_grad_into(dy: Tensor, x: Tensor, out: Tensor | None, beta: int) -> Tensor:
    """Write beta * out + dy^T x into out (rows, cols), of dy's dtype or wider: dy (N, rows), x (N,
    cols).

    Several contributions are summed in float32, which costs no more than bf16: the tensor cores
    accumulate in float32 anyway. beta = 0 ignores what `out` holds.
    """
    if out is None:
        return dy.t() @ x
    if not dy.is_cuda:  # no CPU kernel mixes the two
        dy = dy.to(out.dtype)
        x = x.to(out.dtype)
    mixed = {} if out.dtype == dy.dtype else {"out_dtype": out.dtype}
    return torch.addmm(out, dy.t(), x, beta=beta, out=out, **mixed)


# ---------------------------------------------------------------------------- weights, events


class PlainEvents:
    """What a matrix says to the outside, and what happens on one device: nothing.

    unshard(module, backward) -> weight    it is about to be used, in a backward pass or not: what
                                           reads it is enqueued before the next layer is unsharded
    add_grad(module, compute) -> grad      a contribution to its gradient is due: compute(out, beta)
                                           returns beta * out + contribution (out=None: a new
                                           tensor). The result goes to autograd: None if the outside
                                           has put it elsewhere.
    """

    def unshard(self, module: nn.Module, backward: bool) -> Tensor:
        return module.weight

    def add_grad(self, module: nn.Module, compute: Callable) -> Tensor | None:
        return compute(None, 0)


def identity(x, *_):
    return x


@dataclass(frozen=True)
class TensorSlice:
    """Which rows and columns of a whole matrix are here, one after the other."""

    whole: tuple[int, int]  # its shape
    rows: tuple[tuple[int, int], ...]  # first and end of each run of rows
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        first_col, end_col = self.cols
        rows = sum(end - first for first, end in self.rows)
        return rows, end_col - first_col

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return what of the whole matrix (rows, cols) is here, run by run."""
        cols = slice(*self.cols)
        return [whole[first:end, cols] for first, end in self.rows]

    def extract(self, whole: Tensor) -> Tensor:
        """Return a copy of it as one matrix."""
        return torch.cat(self.views(whole))

    def insert(self, part: Tensor, whole: Tensor) -> None:
        """Write it, as one matrix, to its places in the whole one."""
        for view in self.views(whole):
            rows = len(view)
            view.copy_(part[:rows])
            part = part[rows:]


class Matrix(nn.Module):
    """A weight (rows, cols), used as a projection; `events` tells the outside when.

    cut: how tensor-parallel ranks may share the matrix (tensor.py).
        "rows"      split by rows, each of `parts` (q, k and v, say) by itself
        "columns"   split by columns, evenly: the input must not be a concatenation such as q|k|v
        "whole"     not split: each rank applies all of it to its own tokens
        ""          nobody has said; --tp refuses it
    tensor.py then sets `tp_slice`, `tp_input`, `tp_output` and `tp_prologue`. Use a weight only through `project`: a
    gradient from any other use stops the run with an error that names it.

    A fresh weight is normal(0, std). std: 1/sqrt(columns) by default, so that each product is as
    large as its input. residual: the product is added to the residual stream, so std is smaller by
    sqrt(2L), for L layers that add two products each.
    """

    events = PlainEvents()
    tp_input = tp_output = tp_prologue = staticmethod(identity)
    tp_slice: TensorSlice | None = None  # what of the whole matrix is here; None: all

    def __init__(
        self,
        rows: int,
        cols: int,
        cut: str = "",
        parts: tuple[int, ...] = (),
        std: float | None = None,
        residual: bool = False,
    ):
        super().__init__()
        self.shape = (rows, cols)
        self.std = 1 / math.sqrt(cols) if std is None else std
        self.residual = residual
        self.cut = cut
        self.parts = parts or (rows,)
        if cut == "columns" and parts or sum(self.parts) != rows:
            raise ValueError(
                f"Matrix({rows}, {cols}, {cut!r}, parts={parts}): parts are of rows, "
                'add up to them, and belong to cut="rows"; columns are cut in equal '
                "runs"
            )
        self.weight = nn.Parameter(torch.empty(rows, cols))

    def keep_slice(self, tp_slice: TensorSlice) -> None:
        """Have a part of the matrix alone; on meta."""
        self.tp_slice = tp_slice
        self.shape = tp_slice.shape
        self.weight = nn.Parameter(self.weight.new_empty(self.shape))

    def forward(self, x: Tensor) -> Tensor:
        return project(self, IDENTITY, x)


class Vector(nn.Module):
    """A weight that is too small to shard: float32 or wider, whole on every rank.

    kind: "norm", which begins as 1, or "bias", which begins as 0. like: the matrix to whose rows
    its elements belong, so that tensor parallelism takes the same ones."""

    STARTS = {"norm": 1.0, "bias": 0.0}

    def __init__(self, dim: int, kind: str, like: Matrix | None = None):
        super().__init__()
        if kind not in self.STARTS:
            raise ValueError(f"Vector({dim}, {kind!r}): of kind {' or '.join(self.STARTS)}")
        self.start = self.STARTS[kind]
        self.like = (like,)  # in a tuple, so that nn.Module does not register it as a child
        self.weight = nn.Parameter(torch.empty(dim))

    def local(self) -> Tensor:
        """Return the elements that go along with what is here of the matrix."""
        (matrix,) = self.like
        if matrix is None or matrix.tp_slice is None:
            return self.weight
        return torch.cat([self.weight[first:end] for first, end in matrix.tp_slice.rows])


# ---------------------------------------------------------------------------- the projection


@dataclass(frozen=True)
class Prologue:
    """What a projection computes of its inputs before the product, and computes again in backward:
    forward(*inputs) -> (a, what backward wants too, if anything), and backward(da, *inputs,
    *wanted) -> (a, the inputs' gradients) in one pass."""

    forward: Callable
    backward: Callable


IDENTITY = Prologue(lambda x: (x,), lambda da, x: (x, da))
SWIGLU = Prologue(lambda gate_up: (swiglu_forward(gate_up),), swiglu_backward)


class _Project(Function):
    """before(*inputs) W^T. Autograd keeps the inputs, and what else `before` wants: never W, which
    may be a buffer that is refilled meanwhile, nor what goes into the product."""

    @staticmethod
    def forward(ctx, matrix, before, weight, *inputs):
        ctx.matrix = matrix
        ctx.before = before
        if _mode.unread is matrix:  # nobody reads it
            ctx.save_for_backward(*inputs)
            x = inputs[0]
            # whoever reads it all the same shall not get numbers
            return x.new_full((), math.nan).expand(*x.shape[:-1], matrix.shape[0])
        a, *wanted = before.forward(*inputs)
        ctx.wants_more = bool(wanted)
        ctx.save_for_backward(*inputs, *wanted)
        w = matrix.events.unshard(matrix, backward=_mode.recomputing)
        return F.linear(a, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        matrix = ctx.matrix
        da = dy @ matrix.events.unshard(matrix, backward=True)
        a, *grads = ctx.before.backward(da, *ctx.saved_tensors)
        dw = weight_grad(matrix, dy, a)
        return None, None, dw, *grads


def project(matrix: nn.Module, before: Prologue, x: Tensor, *inputs: Tensor) -> Tensor:
    """Return before(x, *inputs) W^T (..., rows)."""
    x = matrix.tp_input(x)
    before = matrix.tp_prologue(before)
    y = _Project.apply(matrix, before, matrix.weight, x, *inputs)
    return matrix.tp_output(y, _mode.unread is matrix)


def unread_product(y: Tensor) -> nn.Module | None:
    """Return the matrix of y = h + project(matrix, ...), if no other gradient passes that product:
    it may be left out where only gradients of y are wanted, so its values alone, as of
    product.detach(), are nobody else's. None: y is of another kind, or backward wants what is
    computed before the product."""
    if y.grad_fn.name() != "AddBackward0":
        return None
    (h, _), (product, _) = y.grad_fn.next_functions
    if (
        not isinstance(product, _Project._backward_cls)
        or product.wants_more
        or product in graph_of(h)
    ):
        return None
    return product.matrix


def graph_of(node) -> set:
    """Return all nodes of autograd's graph from one on, and None."""
    found = {None}
    left = [node]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found


# ---------------------------------------------------------------------------- backward by hand


class _Mode(threading.local):
    """What a backward pass that runs operators by hand wants of them (offload.py)."""

    recomputing = False  # a forward runs again: its events say that the pass goes backward
    unread: nn.Module | None = None  # a matrix whose product ends a layer that nobody reads
    deferred: list[Callable] | None = None  # where products for weights wait for their turn


_mode = _Mode()


@contextlib.contextmanager
def recomputation(unread: nn.Module | None):
    """Run a forward again inside a backward pass. unread: a matrix whose product is left out,
    because only gradients of what it is added to are wanted."""
    before = _mode.recomputing, _mode.unread
    _mode.recomputing = True
    _mode.unread = unread
    try:
        yield
    finally:
        _mode.recomputing, _mode.unread = before


@contextlib.contextmanager
def deferred_weight_grads(on: bool):
    """Yield a list which, if `on`, takes the products for weights of a backward pass instead of
    running them: functions to call in order, when there is something to hide under them."""
    before = _mode.deferred
    deferred = []
    _mode.deferred = deferred if on else None
    try:
        yield deferred
    finally:
        _mode.deferred = before


def weight_grad(matrix: nn.Module, dy: Tensor, x: Tensor) -> Tensor | None:
    """Raise add_grad with dW = dy^T x of a projection, or defer it: dy (..., rows), x (..., cols).
    Returns what autograd gets."""
    dy = dy.reshape(-1, dy.shape[-1])  # (N, rows)
    x = x.detach().reshape(-1, x.shape[-1])  # (N, cols), without the graph that it was saved from

    compute = functools.partial(weight_grad_into, dy, x)  # of out and beta
    add_grad = functools.partial(matrix.events.add_grad, matrix, compute)

    def add_grad_later():
        grad = add_grad()
        if grad is not None and matrix.weight.requires_grad:  # autograd has gone on without it
            old = matrix.weight.grad
            matrix.weight.grad = grad if old is None else old + grad

    if _mode.deferred is None:
        return add_grad()
    _mode.deferred.append(add_grad_later)
    return None


# ---------------------------------------------------------------------------- autograd functions


class CustomGradient(Function):
    """there(x), whose gradient is back(dy). root: any tensor that requires gradients, if x should
    not."""

    @staticmethod
    def forward(ctx, x, there, back, root=None):
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.back(dy), None, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        n, scale = norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx, dn):
        _, dx, dweight = norm_backward(dn, *ctx.saved_tensors)
        return dx, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32 or wider."""
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
        of_q, of_k, of_v = dqkv.split(ctx.heads, dim=2)
        cos, sin = ctx.saved_tensors  # once: PyTorch's checkpoints give them once
        rotate_back_into(dq, cos, sin, of_q)
        rotate_back_into(dk, cos, sin, of_k)
        copy_heads(dv, of_v)
        return dqkv, None, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx, weight, tokens, module):
        ctx.tokens = tokens
        ctx.module = module
        w = module.events.unshard(module, backward=False)  # (V, C)
        return F.embedding(tokens, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        module = ctx.module
        vocab, _ = module.shape

        def compute(out, beta):
            dw = torch.ops.aten.embedding_dense_backward(dx, ctx.tokens, vocab, -1, False)  # (V, C)
            if out is None:
                return dw
            return out.add_(dw) if beta else out.copy_(dw)

        return module.events.add_grad(module, compute), None, None


LOSS_ELEMENTS = 2**27  # logits of one chunk: 512 MiB of float32


class _HeadLoss(Function):
    """Head and cross-entropy over chunks of tokens: N x V logits never exist at once.

    The loss is a scalar, so its gradient is known up to a factor as soon as a chunk's logits are:
    it is computed on the spot, and the head's matrix is read in the forward pass alone.

    Takes x (N, C), labels (N,); returns the sum over valid tokens of cross-entropy(x W^T, label) *
    scale, and each token's cross-entropy (N, 1), which has no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, labels, scale, head, differentiate):
        w = head.events.unshard(head, backward=False)  # (V, C)
        chunk = max(1, LOSS_ELEMENTS // len(w))
        if differentiate:
            dx = torch.empty_like(x)
            dw = torch.empty_like(w, dtype=accumulation_dtype(x.dtype))
            ctx.save_for_backward(dx, dw)
            ctx.head = head
        losses = []
        for i in range(0, len(x), chunk):
            rows = slice(i, i + chunk)
            part, dlogits = softmax_loss(matmul_fp32(x[rows], w.t()), labels[rows], scale)
            losses.append(part)
            if differentiate:
                dlogits = dlogits.to(x.dtype)
                torch.mm(dlogits, w, out=dx[rows])
                weight_grad_into(dlogits, x[rows], dw, int(i > 0))
            del dlogits  # before the next ones are made
        loss = sum(part.sum() * scale for part in losses)
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

        dw_out = ctx.head.events.add_grad(ctx.head, compute)
        dx = dx * dloss.to(dx.dtype)
        return dx, dw_out, None, None, None, None


# ---------------------------------------------------------------------------- graphs of their own


class _ChunkInputs(Function):
    """The inputs of a chunk's graph, apart from the graph that made them. Their gradients go to the
    list `grads`. root: any tensor that requires gradients, so that the graph is made."""

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
    """Return the backward of one chunk's pass through block.pre or block.post (or of a
    micro-batch's through a part of the model: pipeline.py), and its outputs fn(*inputs), detached.

    backward(output_grads) -> the gradients of the inputs; those of weights go where their events
    say. It holds the pass's graph, and with it what autograd saves: an input too, where an operator
    saves it and SavedLayer.saving does not place it elsewhere. The graph is no part of the one that
    made its inputs."""
    grads = []
    with torch.enable_grad():
        outputs = fn(*_ChunkInputs.apply(root, grads, *inputs))
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in outputs]

    def backward(output_grads):
        torch.autograd.backward(edges, output_grads)
        return grads

    return backward, [y.detach() for y in outputs]
