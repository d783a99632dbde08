"""Two Triton kernels that cast a bf16 matrix (M, K) to float8, for fp8.py.

Both read the matrix once, in tiles. The first finds the largest absolute values of rows and
columns. The second writes float8 rows of the matrix, and float8 rows of its transpose. It
transposes each tile inside the GPU's shared memory, so that both results are written in long runs
of bytes. Per element, each kernel reads 2 bytes, and the second one writes 1 byte per result.

torch.compile could make such kernels, too. But it writes the transpose in short runs, which is half
as fast, and it reads the matrix once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

import fp8

TILE = 128  # rows and columns of a tile
# kernels read only constants of this type
LARGEST = tl.constexpr(fp8.LARGEST)
SMALLEST_AMAX = tl.constexpr(fp8.SMALLEST_AMAX)


@triton.jit
def load_tile(x, num_rows, num_cols, TILE: tl.constexpr):
    """Return the tile of this program in float32, and the numbers of its rows and columns. The tile
    is 0 beyond the end of the matrix."""
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tile = tl.load(x + rows[:, None] * num_cols + cols[None, :], mask=inside, other=0.0)
    return tile.to(tl.float32), rows, cols


@triton.jit
def factor(amax):
    """Return 448 / amax. The operator / of Triton may get the last bit wrong. div_rn rounds
    correctly, as the division in fp8.cast_by_amax does."""
    return tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)


@triton.jit
def scale(amax):
    """Return amax / 448, rounded correctly as in `factor`."""
    return tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))


@triton.jit
def largest_values_kernel(
    x,
    row_amax,  # (M,), zeros at first
    col_amax,  # (K,), zeros at first
    num_rows,
    num_cols,
    OF_ROWS: tl.constexpr,
    OF_COLS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, rows, cols = load_tile(x, num_rows, num_cols, TILE)
    magnitude = tl.abs(tile)
    # tiles come in any order, but a maximum does not depend on the order
    if OF_ROWS:
        tl.atomic_max(row_amax + rows, tl.max(magnitude, 1), mask=rows < num_rows, sem="relaxed")
    if OF_COLS:
        tl.atomic_max(col_amax + cols, tl.max(magnitude, 0), mask=cols < num_cols, sem="relaxed")


@triton.jit
def cast_kernel(
    x,
    row_amax,  # (M,)
    col_amax,  # (K,)
    row_values,  # (M, K)
    row_scale,  # (M,)
    col_values,  # (K, padded_rows)
    col_scale,  # (K,)
    num_rows,
    num_cols,
    padded_rows,
    OF_ROWS: tl.constexpr,
    OF_COLS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, rows, cols = load_tile(x, num_rows, num_cols, TILE)
    if OF_ROWS:
        amax = tl.load(row_amax + rows, mask=rows < num_rows, other=1.0)
        amax = tl.where(amax < SMALLEST_AMAX, SMALLEST_AMAX, amax)  # NaN stays NaN
        values = (tile * factor(amax)[:, None]).to(tl.float8e4nv)
        inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        tl.store(row_values + rows[:, None] * num_cols + cols[None, :], values, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(row_scale + rows, scale(amax), mask=rows < num_rows)
    if OF_COLS:
        amax = tl.load(col_amax + cols, mask=cols < num_cols, other=1.0)
        amax = tl.where(amax < SMALLEST_AMAX, SMALLEST_AMAX, amax)
        values = tl.trans((tile * factor(amax)[None, :]).to(tl.float8e4nv))
        inside = (cols < num_cols)[:, None] & (rows < padded_rows)[None, :]
        tl.store(col_values + cols[:, None] * padded_rows + rows[None, :], values, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(col_scale + cols, scale(amax), mask=cols < num_cols)


def grid_of(x: Tensor) -> tuple[int, int]:
    """Return the number of tiles along the rows and along the columns of x."""
    return triton.cdiv(x.shape[0], TILE), triton.cdiv(x.shape[1], TILE)


def largest_values(x: Tensor, of_rows: bool, of_cols: bool) -> tuple[Tensor | None, Tensor | None]:
    """See fp8.largest_values. x (M, K), bf16, contiguous."""
    num_rows, num_cols = x.shape
    sizes = num_rows * of_rows, num_cols * of_cols
    row_amax, col_amax = x.new_zeros(sum(sizes), dtype=torch.float32).split(sizes)
    largest_values_kernel[grid_of(x)](
        x, row_amax, col_amax, num_rows, num_cols, of_rows, of_cols, TILE
    )
    return row_amax[:, None] if of_rows else None, col_amax[:, None] if of_cols else None


def cast(x: Tensor, row_amax: Tensor | None, col_amax: Tensor | None):
    """See fp8.cast_both. Returns two pairs (values, scale), of x and of x^T. A pair whose largest
    values are None is None itself."""
    num_rows, num_cols = x.shape
    padded_rows = triton.cdiv(num_rows, fp8.MULTIPLE) * fp8.MULTIPLE
    of_rows, of_cols = row_amax is not None, col_amax is not None
    rows = cols = (None, None)
    if of_rows:
        rows = x.new_empty(num_rows, num_cols, dtype=fp8.E4M3), torch.empty_like(row_amax)
    if of_cols:
        cols = x.new_empty(num_cols, padded_rows, dtype=fp8.E4M3), torch.empty_like(col_amax)
    cast_kernel[grid_of(x)](
        x,
        row_amax,
        col_amax,
        *rows,
        *cols,
        num_rows,
        num_cols,
        padded_rows,
        of_rows,
        of_cols,
        TILE,
    )
    return rows if of_rows else None, cols if of_cols else None
