"""Triton kernels for fp8.py: two cast a bf16 matrix (M, K) to float8, and one is SwiGLU's backward.

The first two read the matrix once, in tiles. The first finds the largest absolute values of rows
and columns. The second writes float8 rows of the matrix, and float8 rows of its transpose. It
transposes each tile inside the GPU's shared memory, so that both results are written in long runs
of bytes. Per element, each kernel reads 2 bytes, and the second one writes 1 byte per result.

The third kernel computes SwiGLU's backward, by the formulas of ops.swiglu_backward_into. It also
finds the largest values of its results, so that the first kernel need not read them.

torch.compile could make such kernels, too. But it writes the transpose in short runs, which is half
as fast, and it reads the matrix once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

import fp8

TILE = 128  # rows and columns of a tile of the first two kernels
# Each program of swiglu_backward_kernel walks down a strip of the matrix, in tiles. These are the
# rows and columns of a tile, the tiles of a strip, and the warps of a program: the fastest of 24
# choices on an H200. With one tile of 64 x 64 per program the kernel takes 1.8 times as long
SWIGLU_TILE = 4, 128
SWIGLU_TILES = 32
SWIGLU_WARPS = 2
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
        scaled = tile * factor(amax)[:, None]
        scaled = tl.where(tl.abs(tile) > amax[:, None], float("nan"), scaled)  # see fp8.cast_both
        values = scaled.to(tl.float8e4nv)
        inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        tl.store(row_values + rows[:, None] * num_cols + cols[None, :], values, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(row_scale + rows, scale(amax), mask=rows < num_rows)
    if OF_COLS:
        amax = tl.load(col_amax + cols, mask=cols < num_cols, other=1.0)
        amax = tl.where(amax < SMALLEST_AMAX, SMALLEST_AMAX, amax)
        scaled = tile * factor(amax)[None, :]
        scaled = tl.where(tl.abs(tile) > amax[None, :], float("nan"), scaled)
        values = tl.trans(scaled.to(tl.float8e4nv))
        inside = (cols < num_cols)[:, None] & (rows < padded_rows)[None, :]
        tl.store(col_values + cols[:, None] * padded_rows + rows[None, :], values, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(col_scale + cols, scale(amax), mask=cols < num_cols)


@triton.jit
def write_tile(tile, out, offsets, inside):
    """Round a tile to bf16 and write it. Return the absolute values of the rounded tile, in
    float32."""
    rounded = tile.to(tl.bfloat16)
    tl.store(out + offsets, rounded, mask=inside)
    return tl.abs(rounded.to(tl.float32))


@triton.jit
def swiglu_backward_kernel(
    da,  # (N, F)
    gate_up,  # (N, 2F)
    a,  # (N, F)
    dgate_up,  # (N, 2F)
    a_col_amax,  # (F,), zeros at first
    row_amax,  # (N,), of dgate_up, zeros at first
    col_amax,  # (2F,), of dgate_up, zeros at first
    num_rows,  # N
    num_cols,  # F
    TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    cols = tl.program_id(0).to(tl.int64) * TILE_COLS + tl.arange(0, TILE_COLS)
    # These hold the largest value of each position of a tile, over the tiles so far. At the end
    # they give the largest values of columns. Finding those in each tile would take longer,
    # because warps would wait for each other
    a_largest = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)
    dgate_largest = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)
    dup_largest = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)

    for i in range(TILES):
        first_row = (tl.program_id(1).to(tl.int64) * TILES + i) * TILE_ROWS
        rows = first_row + tl.arange(0, TILE_ROWS)
        inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        narrow = rows[:, None] * num_cols + cols[None, :]  # offsets in matrices of F columns
        wide = rows[:, None] * (2 * num_cols) + cols[None, :]  # of gate in matrices of 2F columns

        # the tiles are 0 beyond the end of the matrices, and so are all results
        dy = tl.load(da + narrow, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + wide + num_cols, mask=inside, other=0.0).to(tl.float32)

        # the formulas of ops.swiglu_backward_into
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid + silu * (1 - sigmoid)
        a_values = write_tile(silu * up, a, narrow, inside)
        dup = write_tile(dy * silu, dgate_up + num_cols, wide, inside)
        dgate = write_tile(dy * up * slope, dgate_up, wide, inside)

        a_largest = tl.maximum(a_largest, a_values)
        dgate_largest = tl.maximum(dgate_largest, dgate)
        dup_largest = tl.maximum(dup_largest, dup)
        # a row of dgate_up has a tile of dgate and one of dup
        of_rows = tl.max(tl.maximum(dgate, dup), 1)
        tl.atomic_max(row_amax + rows, of_rows, mask=rows < num_rows, sem="relaxed")

    exists = cols < num_cols
    tl.atomic_max(a_col_amax + cols, tl.max(a_largest, 0), mask=exists, sem="relaxed")
    tl.atomic_max(col_amax + cols, tl.max(dgate_largest, 0), mask=exists, sem="relaxed")
    tl.atomic_max(col_amax + num_cols + cols, tl.max(dup_largest, 0), mask=exists, sem="relaxed")


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


def swiglu_backward(da: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
    """Compute SwiGLU's backward as ops.swiglu_backward does, and the largest values of its results.

    da (N, F) and gate_up (N, 2F) are bf16 and contiguous. Returns a (N, F), dgate_up (N, 2F), the
    largest values of the columns of a (F, 1), and those of the rows (N, 1) and of the columns
    (2F, 1) of dgate_up. They are exactly what largest_values would find in the two tensors.
    """
    num_rows, num_cols = da.shape
    a, dgate_up = torch.empty_like(da), torch.empty_like(gate_up)
    sizes = num_cols, 2 * num_cols, num_rows
    a_cols, cols, rows = da.new_zeros(sum(sizes), dtype=torch.float32).split(sizes)
    tile_rows, tile_cols = SWIGLU_TILE
    grid = triton.cdiv(num_cols, tile_cols), triton.cdiv(num_rows, SWIGLU_TILES * tile_rows)
    swiglu_backward_kernel[grid](
        da,
        gate_up,
        a,
        dgate_up,
        a_cols,
        rows,
        cols,
        num_rows,
        num_cols,
        SWIGLU_TILES,
        tile_rows,
        tile_cols,
        num_warps=SWIGLU_WARPS,
    )
    return a, dgate_up, a_cols[:, None], rows[:, None], cols[:, None]
