"""Matrix products in float8 (`--products fp8`): the three products of each projection of a layer.

A Hopper GPU multiplies float8 numbers twice as fast as bf16 numbers. float8_e4m3 has four
significant bits, and its largest number is 448. So a tensor is divided by a scale before it is
rounded, and the product is multiplied by the scale again. Here each row of an operand has its own
scale, which makes the row's largest number 448:

    scale of a row = amax / 448              amax: the largest absolute value in the row
    values of the row = row / scale, rounded to float8_e4m3

Scales are computed from the tensor itself each time (dynamic scaling), so nothing is carried from
one step to the next, and a checkpoint holds nothing of it. A product of A (M, K) and B (N, K) sums
over K, and element (m, n) is multiplied by the scales of row m of A and row n of B:

    product       operands with a scale per row       accumulation      shape of the result
    y = a W^T     a (N, cols)      W (rows, cols)     fast              (N, rows)
    da = dy W     dy (N, rows)     W^T (cols, rows)   in float32        (N, cols)
    dW = dy^T a   dy^T (rows, N)   a^T (cols, N)      in float32        (rows, cols)

"fast" means that tensor cores add up with fewer bits than float32 has. Example: if a8 and W8 are
the float8 values, y[5, 7] is the sum over k of a8[5, k] W8[7, k], times scale_a[5] * scale_W[7].

What a result depends on. A row of a, and a row of dy, is one token. So y and da of a token do not
depend on the other tokens, and not on chunks, swapping or recomputation. A row of dy^T is one
feature, and its scale depends on all tokens of the product. So dW depends on which tokens one
product has: on the chunk size, on the micro-batch, and on sp. If several tensor-parallel ranks hold
parts of a row, they agree on its scale first (an all-reduce of maxima). So no scale depends on tp.

What stays in the model's dtype: embedding, head and loss; attention; norms and the residual stream;
gathers of parameters and reductions of gradients; a matrix whose sizes are no multiples of 16,
which tensor cores need; a matrix with cut="whole" (a gate, or one matrix of each adapter). If
several products add up to dW, each is rounded to bf16, and the sum is kept in float32. (With
--grad-sums dtype, gradients of micro-batches add up in bf16.)

How an operand is cast on a GPU. The rows of `a` are cast by the kernel that computes a (a norm,
SwiGLU): torch.compile fuses the two. The rows of W are cast by a compiled kernel (cast_rows). W^T
and the operands of backward are cast by two kernels of fp8_kernels.py. The first finds the largest
values, and the second writes the rows of dy, and the rows of the transposed matrix: of dy^T, a^T or
W^T. If tensor-parallel ranks hold parts of a row, these two kernels also cast the rows of a and W,
because the ranks agree on the largest values in between.

SwiGLU's backward has a kernel of its own in fp8_kernels.py. While it computes a and the gradient of
gate|up, it finds their largest values. Otherwise the kernel that finds largest values would read
both tensors once more, 6 F bytes per token. The largest values of a are used at once. Those of the
gradient are used later, when backward comes to the product that computed gate|up (KnownAmax).

W changes once per step, but a step may use it in many micro-batches and chunks. By default, casts
of W are kept while one layer runs. If they are kept until the next update, they take 2 bytes per
parameter, and the planner decides whether there is room (costs.Plan.keeps_casts). The largest
values that fp8_kernels.py finds in W are always kept until the update.

On a CPU, or on a GPU without float8, products are emulated: the same numbers are rounded to float8,
and they are multiplied in float32, or in float64 if the model is in float64.

Left out: float8 gathers of parameters, float8 attention, scales that are delayed by a step.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ops
from ops import Matrix, Products, Prologue, accumulation_dtype, add_weight_grad, compiled

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of E4M3
SMALLEST_AMAX = 1e-12  # a smaller largest value counts as this: a row of zeros is not divided by 0
MULTIPLE = 16  # tensor cores need rows and columns that are multiples of this number


class Cast(NamedTuple):
    """A matrix (M, K) in float8, with a scale per row: about values * scale."""

    values: Tensor  # (M, K), E4M3, rows are contiguous
    scale: Tensor  # (M, 1), float32 or wider


# ---------------------------------------------------------------------------- casts


@functools.cache
def has_float8(device: torch.device) -> bool:
    """Return whether the device multiplies float8 matrices with a scale per row (Hopper, later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def uses_tensor_cores(x: Tensor) -> bool:
    """Return whether products of x run in float8. If not, they are emulated."""
    return x.dtype == torch.bfloat16 and has_float8(x.device)


def cast_by_amax(x: Tensor, amax: Tensor) -> Cast:
    """Cast x (..., K). amax (..., 1): the largest absolute value of each row.

    No value needs to be clamped: if the scaled amax is slightly more than 448, the cast to float8
    rounds it to 448. If a value is inf or NaN, every product with its row is NaN. So the step is
    not finite, as it would be in bf16.
    """
    wide = accumulation_dtype(x.dtype)
    amax = amax.to(wide).clamp(min=SMALLEST_AMAX)
    # a tensor, because PyTorch divides by a number less exactly on a GPU than on a CPU
    largest = torch.full_like(amax, LARGEST)
    return Cast((x.to(wide) * (largest / amax)).to(E4M3), amax / largest)


@compiled
def cast_rows(x: Tensor) -> Cast:
    """Cast x (..., K) with a scale per row. On a GPU one kernel reads each row once."""
    return cast_by_amax(x, x.abs().amax(-1, keepdim=True))


@functools.cache
def prologue_with_cast(prologue: Prologue) -> Callable:
    """Return a function that does what prologue.forward does, and then casts a: it returns
    (values, scale, *extras) instead of (a, *extras). On a GPU it is one kernel, which does not
    write a itself to memory."""

    def forward(*inputs):
        a, *extras = prologue.forward(*inputs)
        return *cast_rows(a), *extras

    return compiled(forward)


def largest_values(x: Tensor, of_rows: bool, of_cols: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the largest absolute values of the rows of x (M, K), as (M, 1), and of its columns, as
    (K, 1). A result that is not asked for is None."""
    if uses_tensor_cores(x):
        import fp8_kernels  # needs Triton, which comes with PyTorch for GPUs

        return fp8_kernels.largest_values(x.contiguous(), of_rows, of_cols)
    magnitude = x.abs()
    row_amax = magnitude.amax(1, keepdim=True) if of_rows else None
    col_amax = magnitude.amax(0)[:, None] if of_cols else None
    return row_amax, col_amax


def cast_both(
    x: Tensor, row_amax: Tensor | None, col_amax: Tensor | None
) -> tuple[Cast | None, Cast | None]:
    """Return two casts with a scale per row: of x (M, K), if row_amax is given, and of x^T (K, M),
    if col_amax is given. The other result is None.

    If a value is larger than the largest value of its row, it becomes NaN, so that the step is not
    finite. Otherwise largest values that are too small would cut off values without notice. Those
    that are too large are not noticed: values lose precision then, or become 0.

    On a GPU the rows of x^T are padded with zeros, from M elements to a multiple of 16, because
    tensor cores need it. Both operands of dW, dy^T and a^T, are padded to the same length, and the
    zeros add nothing to their product.
    """
    if uses_tensor_cores(x):
        import fp8_kernels

        x = x.contiguous()
        rows, cols = fp8_kernels.cast(x, row_amax, col_amax)
        return rows and Cast(*rows), cols and Cast(*cols)
    rows = None if row_amax is None else cast_by_amax(spoil_larger(x, row_amax), row_amax)
    cols = None if col_amax is None else cast_by_amax(spoil_larger(x.t(), col_amax), col_amax)
    return rows, cols


def spoil_larger(x: Tensor, amax: Tensor) -> Tensor:
    """Return x (M, K), with NaN in place of each value that is larger than amax (M, 1)."""
    return x.masked_fill(x.abs() > amax, torch.nan)


def product(
    a: Cast, b: Cast, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return a b^T (M, N) in `dtype`, of a (M, K) and b (N, K). fast: add up with fewer bits. out:
    write the product into it."""
    if dtype == torch.bfloat16 and has_float8(a.values.device):
        operands = a.values, b.values.t(), a.scale, b.scale.t()
        if out is None:
            return torch._scaled_mm(*operands, out_dtype=dtype, use_fast_accum=fast)
        return torch._scaled_mm(*operands, out_dtype=dtype, use_fast_accum=fast, out=out)
    wide = accumulation_dtype(dtype)
    result = a.values.to(wide) @ b.values.to(wide).t() * a.scale * b.scale.t()
    result = result.to(dtype)
    return result if out is None else out.copy_(result)


@compiled(writes=True)
def add_into(out: Tensor, dw: Tensor) -> None:
    """Add dW to a sum of gradients. weight_grad_into says which dtype the sum has."""
    out.add_(dw)


def weight_grad_into(
    dy_t: Cast, x_t: Cast, dtype: torch.dtype, out: Tensor | None, beta: int
) -> Tensor:
    """Write beta * out + dy^T x into out (rows, cols), and return it. beta is 0 or 1. out=None:
    return dy^T x in a new tensor. This is ops.weight_grad_into for float8, with transposed
    operands: casts of dy^T (rows, N) and of x^T (cols, N).

    The product is rounded to `dtype`. Then it is added in out's dtype, which is float32 if several
    products add up. There is one exception: with --grad-sums dtype, whole gradients of
    micro-batches add up in `dtype`. Token chunks still add up in float32.
    """
    if out is None or (beta == 0 and out.dtype == dtype):
        return product(dy_t, x_t, dtype, out=out)
    dw = product(dy_t, x_t, dtype)
    if beta:
        add_into(out, dw)
    else:
        out.copy_(dw)
    return out


# ---------------------------------------------------------------------------- known largest values


class KnownAmax(NamedTuple):
    """The largest values that a kernel found in a tensor (..., K) while it wrote the tensor.

    They are an attribute of the tensor, `known_amax`. Autograd passes a gradient from one operator
    to the next as the same tensor, so its largest values reach the next operator, too. But a
    gradient may change on its way: if two operators use gate|up, for example, autograd adds the
    second gradient, and it may add in place. So the largest values hold only as long as the tensor
    is what it was (`identity`). A sum or a view is another tensor, and has no such attribute.

    PyTorch does not count all changes in place. It does not count those through `x.data`, nor those
    of a collective such as dist.all_reduce(x). So a fork's hook must not change a gradient of
    gate|up in this way. If a value becomes larger than its row's or its column's largest value,
    cast_both makes it NaN. But if all values of a row become much smaller, nothing notices that
    they lose precision.
    """

    row_amax: Tensor | None  # (M, 1), of the tensor as a matrix (M, K)
    col_amax: Tensor | None  # (K, 1)
    identity: tuple
    # the tensor's memory. As long as it is held here, no other memory can have its address
    storage: torch.UntypedStorage


def identity_of(x: Tensor) -> tuple:
    """Return what tells two states of a tensor apart: the address of its storage, its layout, and
    the number of changes in place that PyTorch counts."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x._version


def remember_amax(x: Tensor, row_amax: Tensor | None, col_amax: Tensor | None) -> None:
    """Attach the largest values of x (..., K) to x. row_amax (M, 1), col_amax (K, 1): see
    KnownAmax. Call this when x is complete."""
    x.known_amax = KnownAmax(row_amax, col_amax, identity_of(x), x.untyped_storage())


def take_amax(
    x: Tensor, of_rows: bool, of_cols: bool
) -> tuple[Tensor | None, Tensor | None] | None:
    """Return what largest_values returns for x (..., K) as a matrix, if x has the attribute and is
    unchanged, else None.

    The attribute is removed, because the caller may change the largest values: tensor-parallel
    ranks replace them by the maximum over the ranks.
    """
    known = getattr(x, "known_amax", None)
    if known is None:
        return None
    del x.known_amax
    row_amax = known.row_amax if of_rows else None
    col_amax = known.col_amax if of_cols else None
    is_missing = (of_rows and row_amax is None) or (of_cols and col_amax is None)
    if is_missing or known.identity != identity_of(x):
        return None
    return row_amax, col_amax


def swiglu_backward(da: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return a = swiglu(gate_up) (..., F) and gate_up's gradient (..., 2F), as ops.swiglu_backward
    does. The largest values that the casts of both need are attached to them: of the columns of a,
    and of the rows and the columns of the gradient."""
    if uses_tensor_cores(da):
        import fp8_kernels

        flat = da.flatten(0, -2).contiguous(), gate_up.flatten(0, -2).contiguous()
        a, dgate_up, a_cols, rows, cols = fp8_kernels.swiglu_backward(*flat)
        a = a.view(da.shape)
        dgate_up = dgate_up.view(gate_up.shape)
    else:
        a, dgate_up = ops.swiglu_backward(da, gate_up)
        _, a_cols = largest_values(a.flatten(0, -2), of_rows=False, of_cols=True)
        rows, cols = largest_values(dgate_up.flatten(0, -2), of_rows=True, of_cols=True)
    remember_amax(a, None, a_cols)
    remember_amax(dgate_up, rows, cols)
    return a, dgate_up


# backward of a Prologue -> a function that computes the same, and attaches largest values to what
# it returns. If the matrix trains, that function runs instead of the Prologue's backward. If a fork
# gives a Prologue another backward, this table does not have it, and the fork's backward runs
BACKWARD_WITH_AMAX = {ops.swiglu_backward: swiglu_backward}


# ---------------------------------------------------------------------------- projections


class Float8Products(Products):
    """The three products of a projection in float8.

    layer_of: the number of the layer to which each matrix belongs.

    group: this rank's tensor-parallel group; None without tensor parallelism. If a matrix is cut by
    columns, each rank has a part of each row of a and of W. If it is cut by rows, each rank has a
    part of each row of dy and of W^T.

    keeps_casts: keep the casts of all weights until the next update. If it is False, the casts are
    kept only while the same layer runs: its token chunks and its recomputation use them again.
    """

    def __init__(
        self,
        layer_of: dict[Matrix, int],
        group: dist.ProcessGroup | None = None,
        keeps_casts: bool = False,
    ):
        self.layer_of = layer_of
        self.group = group
        self.keeps_casts = keeps_casts
        self.weight_casts = {}  # (matrix, "rows") -> Cast of W; (matrix, "cols") -> Cast of W^T
        self.weight_amax = {}  # the same keys -> (row_amax, col_amax), until the next update
        self.layer = None  # the layer whose casts are in weight_casts, unless keeps_casts

    def new_weights(self) -> None:
        """Drop the casts of weights, because the weights change. shard.States calls this."""
        self.weight_casts.clear()
        self.weight_amax.clear()

    def cast_weight(self, matrix: Matrix, w: Tensor, shared: bool, cols: bool = False) -> Cast:
        """Return the cast of W (rows, cols), or of W^T if `cols`. shared: other tensor-parallel
        ranks hold the rest of the rows that are cast."""
        layer = self.layer_of[matrix]
        if not self.keeps_casts and layer != self.layer:
            self.weight_casts.clear()
            self.layer = layer
        key = matrix, "cols" if cols else "rows"
        if key in self.weight_casts:
            return self.weight_casts[key]

        if not cols and not shared:
            cast = Cast(*cast_rows(w))
        else:
            if key not in self.weight_amax:
                self.weight_amax[key] = self.largest_values_of_group(
                    w, of_rows=not cols, of_cols=cols, shared=shared
                )
            rows_cast, cols_cast = cast_both(w, *self.weight_amax[key])
            cast = cols_cast if cols else rows_cast
        self.weight_casts[key] = cast
        return cast

    def largest_values_of_group(
        self, x: Tensor, of_rows: bool, of_cols: bool, shared: bool, known: tuple | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what the function largest_values returns, for whole rows or columns.

        known: what that function would return for this rank's x, if take_amax has returned it.

        shared: other tensor-parallel ranks hold the rest of x's rows, or the rest of its columns if
        only of_cols is True. Then this is a collective of these ranks. It replaces the values of
        the shared rows (or columns) by the maximum over the ranks."""
        row_amax, col_amax = known or largest_values(x, of_rows, of_cols)
        if shared:
            amax = row_amax if of_rows else col_amax
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        return row_amax, col_amax

    def shares_rows(self, matrix: Matrix, cut: str) -> bool:
        """Return whether several ranks have parts of the same row of an operand: whether the matrix
        is split by tensor parallelism, and its cut is this one ("rows" or "columns")."""
        return matrix.tp_slice is not None and matrix.cut == cut

    def forward(self, matrix: Matrix, prologue: Prologue, recomputing: bool, inputs: tuple):
        """See Products.forward."""
        if inputs[0].numel() == 0:  # no tokens, so no row has a largest value
            return super().forward(matrix, prologue, recomputing, inputs)
        shared = self.shares_rows(matrix, "columns")
        # shared rows cannot be cast in the prologue's kernel, because between the prologue and the
        # cast the ranks agree on the largest values
        if shared or not uses_tensor_cores(inputs[0]):
            a, *extras = prologue.forward(*inputs)
            dtype, leading = a.dtype, a.shape[:-1]
            a = a.flatten(0, -2)
            amax = self.largest_values_of_group(a, of_rows=True, of_cols=False, shared=shared)
            a8, _ = cast_both(a, *amax)
        else:
            dtype = inputs[0].dtype
            values, scale, *extras = prologue_with_cast(prologue)(*inputs)
            leading = values.shape[:-1]
            a8 = Cast(values.flatten(0, -2), scale.flatten(0, -2))
        w = matrix.events.unshard(matrix, backward=recomputing)
        w8 = self.cast_weight(matrix, w, shared)
        y = product(a8, w8, dtype, fast=True)
        return y.view(*leading, -1), extras

    def backward(self, matrix: Matrix, prologue: Prologue, dy: Tensor, saved: tuple):
        """See Products.backward."""
        if dy.numel() == 0:
            return super().backward(matrix, prologue, dy, saved)
        trains = not matrix.frozen
        shared = self.shares_rows(matrix, "rows")
        flat = dy.reshape(-1, dy.shape[-1])
        known = take_amax(dy, of_rows=True, of_cols=trains)
        amax = self.largest_values_of_group(
            flat, of_rows=True, of_cols=trains, shared=shared, known=known
        )
        dy8, dy8_t = cast_both(flat, *amax)
        w = matrix.events.unshard(matrix, backward=True)
        w8_t = self.cast_weight(matrix, w, shared, cols=True)
        da = product(dy8, w8_t, dy.dtype).view(*dy.shape[:-1], -1)
        del flat, dy8, w8_t, w  # before prologue.backward allocates more
        if not trains:
            return None, prologue.grads(da, *saved)

        backward = BACKWARD_WITH_AMAX.get(prologue.backward, prologue.backward)
        a, *input_grads = backward(da, *saved)
        known = take_amax(a, of_rows=False, of_cols=True)
        a = a.detach().flatten(0, -2)  # it may be a saved tensor, which has a graph
        amax = known or largest_values(a, of_rows=False, of_cols=True)
        _, a8_t = cast_both(a, *amax)
        compute = functools.partial(weight_grad_into, dy8_t, a8_t, dy.dtype)
        return add_weight_grad(matrix, compute), input_grads


# ---------------------------------------------------------------------------- which matrices


def fits_tensor_cores(shape: tuple[int, int]) -> bool:
    """Return whether a matrix of this shape can be multiplied in float8."""
    return all(size % MULTIPLE == 0 for size in shape)


def can_use_float8(shape: tuple[int, int], cut: str) -> bool:
    """Return whether the products of a whole matrix run in float8. cut: see ops.Matrix.

    A matrix with cut="whole" stays in the model's dtype. Each tensor-parallel rank multiplies it by
    its own tokens, or by its own summand of dy (tensor.py), and a sum of rounded summands is not
    the rounded sum.
    """
    return cut != "whole" and fits_tensor_cores(shape)


def use_float8(
    model: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    keeps_casts: bool = False,
) -> None:
    """Let the matrices of the model's layers compute their products in float8. Call this after
    tensor.py has split the matrices. group, keeps_casts: see Float8Products.

    Matrices for which can_use_float8 is False stay as they are. It looks at the whole matrix, so
    whether a matrix uses float8 does not depend on tp. But the sizes of each slice must be
    multiples of 16, too. The planner checks this for the matrices of model.Block. It does not know
    the matrices that a fork adds, so this function raises ValueError for them.
    """
    layer_of = {
        matrix: i
        for i, block in enumerate(model.blocks)
        for matrix in block.modules()
        if isinstance(matrix, Matrix)
    }
    products = Float8Products(layer_of, group, keeps_casts)
    for name, matrix in model.blocks.named_modules():
        if matrix not in layer_of:
            continue
        whole = matrix.tp_slice.whole if matrix.tp_slice else matrix.shape
        if not can_use_float8(whole, matrix.cut):
            continue
        if not fits_tensor_cores(matrix.shape):
            raise ValueError(
                f"--tp: --products fp8 needs multiples of {MULTIPLE}, and the matrix {name}, "
                f"{whole[0]} x {whole[1]}, would be {matrix.shape[0]} x {matrix.shape[1]} on each "
                "GPU. Nearest legal choice: --tp 1"
            )
        matrix.products = products
