"""Tensor parallelism: neighbouring ranks share a layer's matrices, in InternEvo's three modes.

tp neighbouring ranks ("columns") each hold some heads and some MLP features of every layer. The
table of `TensorParallel` says what they exchange in each mode: mtp (Megatron's tensor parallelism), msp
(with Megatron's sequence parallelism), fsp (msp that keeps less). `split_model` cuts a model on
the meta device, before shard.py allocates anything:

    tp = 2     qkv (H+2K heads)      rank 0: first half of the q, k and v heads    rank 1: second
               out (C, H heads)      rank 0: columns of its heads                  rank 1: likewise

A matrix says how it may be cut (ops.Matrix: "rows", "columns" or "whole"). The functions that
exchange tokens are the matrix's tp_input, tp_output and tp_prologue. Before a run, `check_tensor_parallel` cuts a small
layer in two, and compares it with the whole one: a layer that says something wrong is refused.

Left out: embedding and head cut along the vocabulary; hiding the exchanges.

Legend: tp ranks that share a matrix, t = T/sp/tp tokens of a rank between layers' products, B
sequences, T tokens per sequence, sp ranks that share it, C width.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import model as llama
from model import LLaMA, ModelConfig, plain_attention, rope_tables, run_block
from ops import CustomGradient, Matrix, Positions, Prologue, TensorSlice, identity
from ranks import Groups, all_gather, reduce_scatter


class TensorParallel:
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
    (`tp_prologue`). In mtp embedding, last norm, head and loss are computed on every column, of all
    tokens, and labels count tp times: a column's gradient between products is a summand, as in msp
    that of its tokens. So all modes have one rule: gradients of ends, norms, biases and a layer's
    other matrices (cut="whole": a router) are sums over columns. Nothing hides what travels: what
    follows needs it.

    In mtp a column has all tokens, so its layers may run in chunks, each of which enters and joins
    by itself; in msp and fsp it would have its part of every chunk, so there layers run whole.
    """

    def __init__(self, mode: str, groups: Groups):
        """A collective of all ranks."""
        self.ranks = groups.tp
        self.index = groups.tp_rank
        self.group = groups.by_position("tensor", lambda stage, r, tp_rank: (stage, r))
        self.set_mode(mode)

    def select_tp_tokens(self, positions: Tensor) -> Tensor:
        """Return what this column has of the positions (..., T/sp) between layers' products."""
        return positions.chunk(self.ranks, -1)[self.index] if self.splits_tokens else positions

    def set_mode(self, mode: str) -> None:
        """Set tp_input, tp_output and tp_prologue of a Matrix, as the table has them."""
        self.splits_tokens = mode != "mtp"
        join = there_and_back(self.scatter, self.gather)  # where tokens are split
        self.tp_input, self.tp_output, self.tp_prologue = {
            "mtp": (identity, there_and_back(self.sum, self.sum), identity),
            "msp": (
                there_and_back(self.gather, self.scatter),
                join,
                identity,
            ),
            "fsp": (identity, join, self.gather_behind),
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

    def gather_behind(self, before: Prologue) -> Prologue:
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
    return lambda x, unread=False: CustomGradient.apply(x, identity if unread else there, back)


def part_of(matrix: Matrix, c: int, tp: int) -> TensorSlice:
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
        return TensorSlice(matrix.shape, ((0, rows),), *runs)
    return TensorSlice(matrix.shape, runs, (0, cols))


def split_model(model: LLaMA, columns: TensorParallel) -> None:
    """Leave of a model what this rank's column has. On meta, before shard.States. Raises ValueError
    for a matrix that does not say how it is cut."""
    if columns.ranks == 1:
        return
    model.select_tp_tokens = columns.select_tp_tokens
    for name, matrix in model.blocks.named_modules():
        if not isinstance(matrix, Matrix) or matrix.cut == "whole":
            continue
        if matrix.cut not in ("rows", "columns"):
            raise ValueError(
                f"--tp {columns.ranks}: the matrix {name} does not say how it is cut:"
                ' Matrix(rows, cols, cut="rows"), "columns" or "whole"; or --tp 1'
            )
        split_matrix(matrix, columns)


def split_matrix(matrix: Matrix, columns: TensorParallel) -> None:
    """Leave of a matrix what this rank's column has, and let it exchange tokens."""
    if matrix.cut == "whole":
        return
    matrix.keep_slice(part_of(matrix, columns.index, columns.ranks))
    if matrix.cut == "rows":
        matrix.tp_input, matrix.tp_prologue = columns.tp_input, columns.tp_prologue
    else:
        matrix.tp_output = columns.tp_output


# ---------------------------------------------------------------------------- a layer proves itself


class TensorParallelThreads(TensorParallel):
    """Two columns that are threads of one process, for check_tensor_parallel."""

    def __init__(self, mode: str, index: int, slots: list, barrier: threading.Barrier):
        self.ranks = 2
        self.index = index
        self.slots = slots  # what each column sends
        self.barrier = barrier
        self.set_mode(mode)

    def both(self, x: Tensor) -> list[Tensor]:
        """Return what both columns send."""
        self.slots[self.index] = x
        self.barrier.wait()
        sent = list(self.slots)
        self.barrier.wait()  # both have read, and may send again
        return sent

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.both(x), -2)

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.both(x)).sum(0)

    def scatter(self, x: Tensor) -> Tensor:
        return self.sum(x).chunk(2, -2)[self.index]


def check_tensor_parallel(cfg: ModelConfig, mode: str) -> None:
    """Raise ValueError if a layer that is cut in two columns computes something else than the whole
    layer: its output, the gradient of its input, or the gradient of a weight.

    It finds three mistakes that no check of arguments can find: a fused matrix cut by rows without
    `parts`, a matrix cut by columns whose input is a concatenation, and a sum over heads or
    features that is no matrix product. A small layer of each kind that the model has runs in
    float64 on the CPU, with random weights."""
    kv_heads = 4 if cfg.kv_heads == cfg.heads else 2
    small = replace(cfg, vocab=8, dim=32, heads=4, kv_heads=kv_heads, ffn=24, head_dim=8)
    try:
        models = [llama.LLaMA(small).double() for _ in range(3)]
    except Exception as e:  # whatever a fork's layer may need
        raise ValueError(
            f"--tp: a small layer, which proves that it may be cut, cannot be made: {e!r}; --tp 1"
        ) from e
    rng = torch.Generator().manual_seed(0)
    seen = set()
    for i, whole in enumerate(models[0].blocks):
        kind = type(whole), str([(name, p.shape) for name, p in whole.named_parameters()])
        constants = [(k, v) for k, v in vars(whole).items() if isinstance(v, (int, float, str))]
        if (kind := (*kind, str(constants))) in seen:
            continue
        seen.add(kind)
        for p in whole.parameters():
            p.data.normal_(0, 0.5, generator=rng)
        compare_columns(whole, [model.blocks[i] for model in models[1:]], small, mode, rng)


def compare_columns(
    whole: "llama.Block",
    columns: list["llama.Block"],
    cfg: ModelConfig,
    mode: str,
    rng: torch.Generator,
) -> None:
    """Raise ValueError if two columns of a layer differ from the whole layer. columns: two layers
    of the same kind, whose weights are set here."""
    tokens = 6
    x, dy = torch.randn(2, 1, tokens, cfg.dim, dtype=torch.float64, generator=rng)
    numbers = torch.arange(tokens)
    angles = rope_tables(cfg, numbers, torch.float64)
    splits_tokens = mode != "mtp"
    slots, barrier = [None, None], threading.Barrier(2, timeout=60)

    def run(block, x: Tensor, dy: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = run_block(block, x, Positions(*angles, numbers, own), plain_attention)
        y.backward(dy)
        return y.detach(), x.grad

    def run_column(c: int) -> tuple[Tensor, Tensor]:
        block = columns[c]
        exchange = TensorParallelThreads(mode, c, slots, barrier)
        try:
            for matrix in block.modules():
                if isinstance(matrix, Matrix):
                    split_matrix(matrix, exchange)
            weights = dict(whole.named_parameters())
            for name, p in block.named_parameters():
                part = block.get_submodule(name.rpartition(".")[0])
                cut = getattr(part, "tp_slice", None)
                p.data.copy_(cut.extract(weights[name].data) if cut else weights[name].data)
            if splits_tokens:
                return run(block, x.chunk(2, 1)[c], dy.chunk(2, 1)[c], numbers.chunk(2)[c])
            return run(block, x, dy / 2, numbers)  # a column's gradient is a summand
        except BaseException:
            barrier.abort()  # the other column would wait
            raise

    want_y, want_dx = run(whole, x, dy, numbers)
    with ThreadPoolExecutor(2) as pool:
        (y0, dx0), (y1, dx1) = pool.map(run_column, range(2))
    if splits_tokens:
        compared = {"the output": (torch.cat((y0, y1), 1), want_y)}
        compared["the gradient of the input"] = torch.cat((dx0, dx1), 1), want_dx
    else:
        compared = {"the output": (torch.stack((y0, y1)), torch.stack((want_y, want_y)))}
        compared["the gradient of the input"] = dx0 + dx1, want_dx
    of_columns = [dict(block.named_parameters()) for block in columns]
    for name, p in whole.named_parameters():
        found = torch.zeros_like(p)
        for block, of_column in zip(columns, of_columns):
            module = block.get_submodule(name.rpartition(".")[0])
            grad = of_column[name].grad
            if grad is not None and (cut := getattr(module, "tp_slice", None)):
                grad, part = torch.zeros_like(p), grad
                cut.insert(part, grad)
            found += 0 if grad is None else grad
        compared[f"the gradient of {name}"] = found, p.grad
    for what, (found, want) in compared.items():
        want = torch.zeros_like(found) if want is None else want
        error = ((found - want).norm() / want.norm().clamp(min=1e-30)).item()
        if not error < 1e-9:
            raise ValueError(
                f"--tp with --tp-mode {mode}: a layer that is cut in two columns computes "
                f"something else than the whole layer: {what} differs by {error:.2g} of its size. "
                "Give a fused q|k|v matrix parts=(q, k, v); the input of a matrix of columns must "
                "not be a concatenation; only a matrix product may sum over heads or features; or "
                "--tp 1"
            )
