"""Two Triton kernels that cast a bf16 matrix (M, K) to float8, for fp8.py.

Both read the matrix once, in tiles. The first finds the largest absolute values of rows and
columns. The second writes float8 rows of the matrix, and float8 rows of its transpose. A tile of
the transpose is turned inside the GPU's shared memory, so that both are written in long runs of
bytes. Together they move 2 + 2 bytes per element to read it, and 1 byte per copy to write it.

torch.compile also makes such kernels. But its transposed writes are not in long runs, which makes
them half as fast, and it reads the matrix once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
TILE = 128  # rows and columns of a tile of cast_kernel
AMAX_TILES = (128, 128, 1)  # rows, columns and number of the tiles of largest_values_kernel
LARGEST = tl.constexpr(448.0)  # as in fp8.py
SMALLEST_AMAX = tl.constexpr(1e-12)


@triton.jit
def load_tile(x, rows, cols, num_rows, num_cols):
    """Return elements of a contiguous matrix in float32: 0 outside of it."""
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tile = tl.load(x + rows[:, None] * num_cols + cols[None, :], mask=inside, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def factor(amax):
    """Return 448 / amax. Triton's own division is not exact in the last bit; div_rn is, so that the
    values are those of fp8.cast_by_amax."""
    return tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)


@triton.jit
def scale(amax):
    """Return amax / 448, as `factor` does."""
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
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program looks at TILES tiles of ROWS x COLS elements, one below the other. So it writes
    the columns' largest values only once."""
    first_row = tl.program_id(0).to(tl.int64) * (ROWS * TILES)
    cols = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
    of_cols = tl.zeros((COLS,), tl.float32)
    for i in tl.static_range(TILES):
        rows = first_row + i * ROWS + tl.arange(0, ROWS)
        magnitude = tl.abs(load_tile(x, rows, cols, num_rows, num_cols))
        if OF_ROWS:  # the largest value does not depend on which program comes first
            amax = tl.max(magnitude, 1)
            tl.atomic_max(row_amax + rows, amax, mask=rows < num_rows, sem="relaxed")
        if OF_COLS:
            of_cols = tl.maximum(of_cols, tl.max(magnitude, 0))
    if OF_COLS:
        tl.atomic_max(col_amax + cols, of_cols, mask=cols < num_cols, sem="relaxed")


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
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    tile = load_tile(x, rows, cols, num_rows, num_cols)
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


def largest_values(x: Tensor, of_rows: bool, of_cols: bool) -> tuple[Tensor | None, Tensor | None]:
    """See fp8.largest_values. x (M, K), bf16, contiguous."""
    num_rows, num_cols = x.shape
    sizes = num_rows * of_rows, num_cols * of_cols
    row_amax, col_amax = x.new_zeros(sum(sizes), dtype=torch.float32).split(sizes)
    rows, cols, tiles = AMAX_TILES
    grid = triton.cdiv(num_rows, rows * tiles), triton.cdiv(num_cols, cols)
    largest_values_kernel[grid](
        x, row_amax, col_amax, num_rows, num_cols, of_rows, of_cols, rows, cols, tiles
    )
    return row_amax[:, None] if of_rows else None, col_amax[:, None] if of_cols else None


def cast(x: Tensor, row_amax: Tensor | None, col_amax: Tensor | None, multiple: int):
    """See fp8.cast_both. Returns two pairs of values and scales, or None for either. The rows of
    the transpose are padded to a multiple of elements."""
    num_rows, num_cols = x.shape
    padded_rows = triton.cdiv(num_rows, multiple) * multiple
    of_rows, of_cols = row_amax is not None, col_amax is not None
    rows = cols = (None, None)
    if of_rows:
        rows = x.new_empty(num_rows, num_cols, dtype=E4M3), torch.empty_like(row_amax)
    if of_cols:
        cols = x.new_empty(num_cols, padded_rows, dtype=E4M3), torch.empty_like(col_amax)
    grid = triton.cdiv(num_rows, TILE), triton.cdiv(num_cols, TILE)
    cast_kernel[grid](
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
