"""Tensor parallelism: neighbouring ranks share a layer's matrices, in InternEvo's three modes.

tp neighbouring ranks ("columns") each hold some heads and some MLP features of every layer. The
table of `Columns` says what they exchange in each mode: mtp (Megatron's tensor parallelism), msp
(with Megatron's sequence parallelism), fsp (msp that keeps less). `split_columns` cuts a model on
the meta device, before shard.py allocates anything:

    tp = 2     qkv (H+2K heads)      rank 0: first half of the q, k and v heads    rank 1: second
               out (C, H heads)      rank 0: columns of its heads                  rank 1: likewise

A matrix says how it may be cut (ops.Matrix: "rows", "columns" or "whole"). The functions that
exchange tokens are the matrix's enter, join and around.

Left out: embedding and head cut along the vocabulary; hiding the exchanges.

Legend: tp ranks that share a matrix, t = T/sp/tp tokens of a rank between layers' products, B
sequences, T tokens per sequence, sp ranks that share it, C width.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from model import LLaMA
from ops import Before, Cut, Matrix, ThereAndBack, same
from ranks import Groups, all_gather, reduce_scatter


class Columns:
    """The ranks that share a layer's matrices, and what travels between them.

    tp neighbours, columns, share each layer's matrices. Of q|k|v and gate|up (cut="rows") each one
    makes some columns of x W^T, of its heads and its part of F, which takes all tokens; out and
    down (cut="columns") take these, and give a summand of the result. What the ranks do about it is
    InternEvo's table: Megatron's tensor parallelism (mtp); that with its sequence parallelism
    (msp), where a column has its part of the tokens between products; and msp that keeps less
    (fsp). Attention sees all tokens of a column's heads in all of them.

        mode   enter: x into product     join: y behind product     tokens of x    kept for dW
               of "rows"                 of "columns"
        mtp    x; dx                     sum of y; sum of dy        T/sp           x
        msp    gather x; scatter dx      scatter y; gather dy       t = T/sp/tp    gathered x
        fsp    x; dx                     scatter y; gather dy       t              own x

    (Forward; backward. "rows" is Megatron's column-parallel, "columns" its row-parallel.)
    In fsp a, which is computed before the product, is gathered, again in backward, and da scattered
    (`around`). In mtp embedding, last norm, head and loss are computed on every column, of all
    tokens, and labels count tp times: a column's gradient between products is a summand, as in msp
    that of its tokens. So all modes have one rule: gradients of ends, norms, biases and a layer's
    other matrices (cut="whole": a router) are sums over columns. Nothing hides what travels: what
    follows needs it.

    In mtp a column has all tokens, so its layers may run in chunks, each of which enters and joins
    by itself; in msp and fsp it would have its part of every chunk, so there layers run whole.
    """

    def __init__(self, mode: str, groups: Groups):
        """Also enter, join and around of a Matrix, as the table has them. A collective of all
        ranks."""
        self.ranks = groups.tp
        self.index = groups.column
        self.group = groups.of_places("tensor", lambda stage, r, column: (stage, r))
        join = there_and_back(self.scatter, self.gather)  # where tokens are split
        self.enter, self.join, self.around = {
            "mtp": (same, there_and_back(self.sum, self.sum), same),
            "msp": (
                there_and_back(self.gather, self.scatter),
                join,
                same,
            ),
            "fsp": (same, join, self.gather_behind),
        }[mode]

    def gather(self, x: Tensor) -> Tensor:
        """(B, t, C) of each column, or (t, C) -> (B, T/sp, C), or (T/sp, C)."""
        parts = x.new_empty(self.ranks, *x.shape)  # (tp, B, t, C)
        all_gather(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return parts.movedim(0, -3).flatten(-3, -2)  # of one sequence: a view

    def sum(self, x: Tensor) -> Tensor:
        """Summands (B, T/sp, C) -> their sum."""
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Summands (B, T/sp, C), or (T/sp, C) -> their sum's part of each column (B, t, C)."""
        parts = x.unflatten(-2, (self.ranks, -1)).movedim(-3, 0).contiguous()  # (tp, B, t, C)
        part = torch.empty_like(parts[0])
        reduce_scatter(part, parts.flatten(0, 1), group=self.group)
        return part

    def gather_behind(self, before: Before) -> Before:
        """Return it for a column's own tokens, x (B, t, C): a is of all, (B, T/sp, C)."""

        def gathered(a, *others):
            return self.gather(a), *others

        return replace(
            before,
            forward=lambda *inputs: gathered(*before.forward(*inputs)),
            backward=lambda da, *inputs: gathered(*before.backward(self.scatter(da), *inputs)),
        )


def there_and_back(there: Callable, back: Callable) -> Callable:
    """Return the function there(x), whose gradient is back(dy); called with a product x that nobody
    reads (unread), it leaves x where it is."""
    return lambda x, unread=False: ThereAndBack.apply(x, same if unread else there, back)


def part_of(matrix: Matrix, c: int, tp: int) -> Cut:
    """Return what column c of tp has of a matrix. Raises ValueError if it cannot be cut so."""
    rows, cols = matrix.shape
    sizes = (cols,) if matrix.cut == "columns" else matrix.parts
    for size in sizes:
        if size % tp:
            raise ValueError(f"--tp {tp}: does not divide {size} of a matrix {rows} x {cols}")
    firsts = itertools.accumulate(sizes, initial=0)
    runs = tuple(
        (first + c * size // tp, first + (c + 1) * size // tp) for first, size in zip(firsts, sizes)
    )
    if matrix.cut == "columns":
        return Cut(matrix.shape, ((0, rows),), *runs)
    return Cut(matrix.shape, runs, (0, cols))


def split_columns(model: LLaMA, columns: Columns) -> None:
    """Leave of a model what this rank's column has. On meta, before shard.States. Raises ValueError
    for a matrix that does not say how it is cut."""
    if columns.ranks == 1:
        return
    for name, matrix in model.blocks.named_modules():
        if not isinstance(matrix, Matrix) or matrix.cut == "whole":
            continue
        if matrix.cut not in ("rows", "columns"):
            raise ValueError(
                f"--tp {columns.ranks}: the matrix {name} does not say how it is cut:"
                ' Matrix(rows, cols, cut="rows"), "columns" or "whole"; or --tp 1'
            )
        matrix.take(part_of(matrix, columns.index, columns.ranks))
        if matrix.cut == "rows":
            matrix.enter, matrix.around = columns.enter, columns.around
        else:
            matrix.join = columns.join
