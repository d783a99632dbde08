"""Tensor parallelism: neighbouring ranks share a layer's matrices, in InternEvo's three modes.

The tp ranks of a tensor-parallel group each hold some heads and some MLP features of every layer.
As in Megatron, a layer's matrices form pairs, and nothing is exchanged inside a pair. The first
matrix W1 (qkv, gate_up) is split by rows: every rank computes its own heads or features. The second
matrix W2 (out, down) is split by columns: every rank multiplies its own heads or features. Its
product is only a summand of the result y, and the sum over the ranks is y. Let f be the operation
between the two products, attention or SwiGLU, and let W_r be the rows or columns of W that rank r
holds:

    y = f(x W1^T) W2^T = sum over r of  f(x W1_r^T) W2_r^T

Example: the 7B model with tp = 2. Rank 1 holds the other half of each matrix.

    matrix     whole shape      rank 0 holds                                 its shape
    qkv        (12288, 4096)    the rows of heads 0-15 of q, of k and of v   (6144, 4096)
    out        (4096, 4096)     the columns of heads 0-15                    (4096, 2048)
    gate_up    (22016, 4096)    the rows of features 0-5503 of gate and up   (11008, 4096)
    down       (4096, 11008)    the columns of features 0-5503               (4096, 5504)

Before a run there are two calls, in this order:

    check_tensor_parallel(cfg, mode)       split a small layer in two, compare it with the whole
                                           layer, and refuse it if its results differ
    split_model(model, tensor_parallel)    split a model on the meta device, before shard.py
                                           allocates anything

A matrix says how it may be split (ops.Matrix: cut="rows", "columns" or "whole"). `split_model` sets
its tp_input, tp_output and tp_prologue. These are functions that exchange tokens before or after
the product. The table of `TensorParallel` says what they exchange in each mode.

Left out: splitting the embedding and the head along the vocabulary; overlapping the exchanges with
computation.

Legend: tp ranks of a tensor-parallel group, tp_rank a rank's number in its group, B sequences, T
tokens per sequence, sp ranks of a sequence-parallel group, t = T/sp/tp tokens of a sequence that
one rank has if tokens are split, C width.
"""

import math
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
    """The tensor-parallel group of this rank, and what its ranks exchange in each mode.

    mtp is Megatron's tensor parallelism. msp adds Megatron's sequence parallelism: between a
    layer's products, each rank has only t tokens of a sequence. (But Megatron gathers after the
    norm, as fsp does. msp gathers x before the norm, so a layer's norms run on all T/sp tokens.)
    fsp saves less than msp: only the rank's own tokens of x. Its price is one more all-gather in
    backward.

    In the table, a "rows" product is a product with a matrix that is split by rows: a W^T, where
    the product's prologue (ops.Prologue) computes a from x, usually a = norm(x). A "columns"
    product is a product with a matrix that is split by columns, and y is its result. dx, da and dy
    are the gradients of x, a and y.

        mode   tokens of x   pass       exchanged at         exchanged at        tokens of x
               on a rank                a "rows" product     a "columns"         saved for
                                                             product             backward
        mtp    T/sp          forward    nothing              all-reduce y        T/sp
                             backward   nothing              all-reduce dy
        msp    t             forward    all-gather x         reduce-scatter y    T/sp
                             backward   reduce-scatter dx    all-gather dy
        fsp    t             forward    all-gather a         reduce-scatter y    t
                             backward   reduce-scatter da,   all-gather dy
                                        all-gather a for dW
                                        (not if W is frozen)

    "rows" is what Megatron calls column-parallel, and "columns" what it calls row-parallel. In all
    modes attention sees all T/sp tokens of a rank's heads. All these exchanges are exposed, because
    the next operation needs their result.

    In mtp, each of the tp ranks computes embedding, final norm, head and loss of the same T/sp
    tokens. So each label is counted tp times. train.valid_label_scale divides the loss by the
    number of all counted labels, so each rank has 1/tp of a label's loss. Therefore the gradient
    dh_r of the residual stream on rank r is only a summand of the gradient dh:

        dh = dh_0 + ... + dh_(tp-1)

    The all-reduce of dy makes the sum. dx of a "rows" product is a summand again, so nothing is
    exchanged there. (In Megatron each rank has the whole loss, and so the whole dh. So Megatron
    all-reduces dx instead of dy.)

    In msp and fsp, dh_r is the gradient of rank r's own tokens. So one rule holds in all modes: the
    gradient of a weight that is not split is the sum of the gradients on all ranks of the group.
    Such weights are embedding, head, norms, biases, and matrices with cut="whole", such as a
    router.

    In mtp, layers may run in token chunks, and each chunk makes these exchanges by itself. In msp
    and fsp, layers run whole, because each token chunk would be spread over all ranks.
    """

    def __init__(self, mode: str, groups: Groups):
        """Make the group. A collective of all ranks."""
        self.tp = groups.tp
        self.tp_rank = groups.tp_rank
        self.group = groups.by_position("tensor", lambda stage, r, tp_rank: (stage, r))
        self.set_mode(mode)

    def select_tp_tokens(self, positions: Tensor) -> Tensor:
        """Return the positions of the tokens that this rank has between a layer's products. In msp
        and fsp these are (..., t). positions (..., T/sp): of all tokens of the group."""
        if self.splits_tokens:
            return positions.chunk(self.tp, -1)[self.tp_rank]
        return positions

    def set_mode(self, mode: str) -> None:
        """Choose the functions that a split Matrix gets (tp_input, tp_output, tp_prologue), as the
        table says."""
        self.splits_tokens = mode != "mtp"
        self.tp_input = identity
        self.tp_prologue = identity
        if mode == "mtp":
            self.tp_output = exchange(self.all_reduce_tokens, self.all_reduce_tokens)
        else:
            self.tp_output = exchange(self.reduce_scatter_tokens, self.gather_tokens)
        if mode == "msp":
            self.tp_input = exchange(self.gather_tokens, self.reduce_scatter_tokens)
        if mode == "fsp":
            self.tp_prologue = self.gather_after

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Gather the tokens of the group's ranks: (B, t, C) -> (B, T/sp, C), or (t, C) -> (T/sp,
        C)."""
        parts = x.new_empty(self.tp, *x.shape)  # (tp, B, t, C)
        all_gather(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return parts.movedim(0, -3).flatten(-3, -2)  # a view if B is 1

    def all_reduce_tokens(self, x: Tensor) -> Tensor:
        """Return the sum of x (B, T/sp, C) over the group's ranks. x itself stays as it is, because
        others may use it: dy, for example, is also the gradient of the residual stream."""
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        """Sum over the group's ranks, and return this rank's tokens of the sum: (B, T/sp, C) ->
        (B, t, C), or (T/sp, C) -> (t, C)."""
        parts = x.unflatten(-2, (self.tp, -1)).movedim(-3, 0).contiguous()  # (tp, B, t, C)
        part = torch.empty_like(parts[0])
        reduce_scatter(part, parts.flatten(0, 1), group=self.group)
        return part

    def gather_after(self, prologue: Prologue) -> Prologue:
        """Return a prologue that computes a (B, t, C) of this rank's tokens as `prologue` does, and
        then gathers a of all tokens (B, T/sp, C)."""

        def forward(*inputs):
            a, *extras = prologue.forward(*inputs)
            return self.gather_tokens(a), *extras

        def backward(da, *inputs_and_extras):
            a, *input_grads = prologue.backward(self.reduce_scatter_tokens(da), *inputs_and_extras)
            return self.gather_tokens(a), *input_grads

        def input_grads(da, *inputs_and_extras):  # of a frozen matrix, whose dW needs no a
            return prologue.grads(self.reduce_scatter_tokens(da), *inputs_and_extras)

        return Prologue(forward, backward, input_grads)


def exchange(forward: Callable, backward: Callable) -> Callable:
    """Return a function apply(x, unread) that returns forward(x), and in the backward pass applies
    `backward` to the gradient of this result.

    unread: recomputation has skipped the product that makes x, because nothing reads it
    (ops.recomputation). Then x is not exchanged, but its gradient is.
    """

    def apply(x: Tensor, unread: bool = False) -> Tensor:
        if unread:
            return CustomGradient.apply(x, identity, backward)
        return CustomGradient.apply(x, forward, backward)

    return apply


# ---------------------------------------------------------------------------- split a model


def tp_slice_of(matrix: Matrix, tp_rank: int, tp: int) -> TensorSlice:
    """Return which rows and columns of a whole matrix a rank holds. Raises ValueError if tp does
    not divide the rows of each part, or the columns.

    Example: with tp = 2, q|k|v of 4 + 2 + 2 rows gives rank 0 the rows 0-1, 4 and 6."""
    rows, cols = matrix.shape
    # the parts of a fused matrix, such as q, k and v, are split one by one, so that each rank has
    # heads of all three
    sizes = (cols,) if matrix.cut == "columns" else matrix.parts
    ranges = []  # this rank's rows of each part, or its columns
    start = 0  # the first row (or column) of the part in the whole matrix
    for size in sizes:
        if size % tp:
            rows_or_columns = "columns" if matrix.cut == "columns" else "rows"
            raise ValueError(
                f"--tp {tp}: it does not divide {size} {rows_or_columns} of a matrix "
                f"{rows} x {cols}; --tp {math.gcd(tp, *sizes)} can split this matrix"
            )
        own_size = size // tp
        ranges.append((start + tp_rank * own_size, start + (tp_rank + 1) * own_size))
        start += size

    if matrix.cut == "columns":
        return TensorSlice(matrix.shape, rows=((0, rows),), cols=ranges[0])
    return TensorSlice(matrix.shape, rows=tuple(ranges), cols=(0, cols))


def split_model(model: LLaMA, tensor_parallel: TensorParallel) -> None:
    """Keep this rank's slice of each matrix of the layers, on the meta device. Call it before
    shard.States allocates weights. Raises ValueError if a matrix does not say how it may be split.
    """
    if tensor_parallel.tp == 1:
        return
    model.select_tp_tokens = tensor_parallel.select_tp_tokens
    for name, matrix in model.blocks.named_modules():
        if not isinstance(matrix, Matrix):
            continue
        if matrix.cut not in ("rows", "columns", "whole"):
            raise ValueError(
                f"--tp {tensor_parallel.tp}: the matrix {name} does not say how it is cut. Write "
                'Matrix(rows, cols, cut="rows"), cut="columns" or cut="whole", or use --tp 1'
            )
        split_matrix(matrix, tensor_parallel)


def split_matrix(matrix: Matrix, tensor_parallel: TensorParallel) -> None:
    """Keep this rank's slice of a matrix, and give the matrix the functions that exchange tokens
    with the group."""
    if matrix.cut == "whole":
        return
    matrix.keep_slice(tp_slice_of(matrix, tensor_parallel.tp_rank, tensor_parallel.tp))
    if matrix.cut == "rows":
        matrix.tp_input = tensor_parallel.tp_input
        matrix.tp_prologue = tensor_parallel.tp_prologue
    else:
        matrix.tp_output = tensor_parallel.tp_output


# ---------------------------------------------------------------------------- test a split layer

TEST_TOKENS = 6  # tokens of the sequence that the test runs on


class TensorParallelThreads(TensorParallel):
    """One of the two ranks that check_tensor_parallel runs as threads of one process. The two
    exchange tensors through the list `slots`, which has one slot per rank."""

    def __init__(self, mode: str, tp_rank: int, slots: list, barrier: threading.Barrier):
        self.tp = 2
        self.tp_rank = tp_rank
        self.slots = slots
        self.barrier = barrier
        self.set_mode(mode)

    def from_both(self, x: Tensor | None) -> list[Tensor]:
        """Return [rank 0's x, rank 1's x]. A rank that makes no more exchanges passes None."""
        self.slots[self.tp_rank] = x
        self.barrier.wait()  # both slots are written
        tensors = list(self.slots)
        self.barrier.wait()  # both ranks have read the slots, and may write them again
        if (tensors[0] is None) != (tensors[1] is None):
            raise RuntimeError("one rank makes more exchanges than the other")
        return tensors

    def gather_tokens(self, x: Tensor) -> Tensor:
        return torch.cat(self.from_both(x), -2)

    def all_reduce_tokens(self, x: Tensor) -> Tensor:
        return torch.stack(self.from_both(x)).sum(0)

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        return self.all_reduce_tokens(x).chunk(2, -2)[self.tp_rank]


def check_tensor_parallel(cfg: ModelConfig, mode: str) -> None:
    """Split a small layer of each kind that the model has between two ranks, and compare it with
    the whole layer: its output, the gradient of its input, and the gradients of its weights. Raises
    ValueError if one of them differs.

    This finds three mistakes that no check of arguments can find: a fused matrix that is cut by
    rows without `parts`, a matrix that is cut by columns although its input is a concatenation, and
    a sum over heads or features that is not a matrix product. The layers run in float64 on the CPU,
    with random weights.
    """
    kv_heads = 4 if cfg.kv_heads == cfg.heads else 2
    small = replace(cfg, vocab=8, dim=32, heads=4, kv_heads=kv_heads, ffn=24, head_dim=8)
    try:
        whole, *halves = (llama.LLaMA(small).double() for _ in range(3))
    except Exception as e:  # a fork's layer may raise anything
        raise ValueError(
            "--tp: a layer is split only if a small one (32 wide, 4 heads of 8, 24 MLP features) "
            f"passes a test, and the small one cannot be made: {e!r}. Use --tp 1"
        ) from e

    rng = torch.Generator().manual_seed(0)
    checked = set()
    for i, layer in enumerate(whole.blocks):
        kind = kind_of(layer)
        if kind in checked:
            continue
        checked.add(kind)
        for p in layer.parameters():
            p.data.normal_(0, 0.5, generator=rng)
        compare_split_layer(layer, [model.blocks[i] for model in halves], small, mode, rng)


def kind_of(layer: "llama.Block") -> tuple:
    """Return a key that is equal for layers that need only one test. It has the layer's class; the
    name and shape of each weight, and whether it trains; and the constants of the layer's modules,
    such as Matrix.cut."""
    weights = [(name, p.shape, p.requires_grad) for name, p in layer.named_parameters()]
    constants = [
        (path, key, value)
        for path, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float, str, tuple))
    ]
    return type(layer), str(weights), str(constants)


def compare_split_layer(
    whole: "llama.Block",
    halves: list["llama.Block"],
    cfg: ModelConfig,
    mode: str,
    rng: torch.Generator,
) -> None:
    """Raise ValueError if a layer that is split between two ranks differs from the whole layer.
    halves: one layer per rank, of the same kind as the whole one, and not split yet.
    run_split_layer splits them, and sets their weights to slices of the whole layer's weights."""
    x, dy = torch.randn(2, 1, TEST_TOKENS, cfg.dim, dtype=torch.float64, generator=rng)
    y, dx = run_layer(whole, cfg, x, dy, torch.arange(TEST_TOKENS))
    (y0, dx0), (y1, dx1) = run_split_layer(whole, halves, cfg, mode, x, dy)

    # name of a tensor -> its value from the two ranks, its value from the whole layer
    if mode == "mtp":  # each rank has all of y, and a summand of dx
        compared = {
            "the output": (torch.stack((y0, y1)), torch.stack((y, y))),
            "the gradient of the input": (dx0 + dx1, dx),
        }
    else:  # each rank has its own tokens
        compared = {
            "the output": (torch.cat((y0, y1), 1), y),
            "the gradient of the input": (torch.cat((dx0, dx1), 1), dx),
        }
    for name, p in whole.named_parameters():
        compared[f"the gradient of {name}"] = joined_grad(halves, name, p), p.grad

    for tensor_name, (found, expected) in compared.items():
        if expected is None:  # the layer does not use this weight
            expected = torch.zeros_like(found)
        error = ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        if not error < 1e-9:
            raise ValueError(
                f"--tp with --tp-mode {mode}: a layer that is split between two ranks does not "
                f"compute the same as the whole layer: {tensor_name} differs by {error:.2g} of its "
                "norm. Give a fused q|k|v matrix parts=(q, k, v). The input of a matrix with "
                'cut="columns" must not be a concatenation. Only a matrix product may sum over '
                "heads or features. Or use --tp 1"
            )


def run_layer(
    layer: "llama.Block", cfg: ModelConfig, x: Tensor, dy: Tensor, positions_of_x: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a layer forward and backward, and return its output y and the gradient dx of its input.
    positions_of_x: those of the tokens that x has; attention has all TEST_TOKENS tokens."""
    positions = torch.arange(TEST_TOKENS)
    angles = rope_tables(cfg, positions, torch.float64)
    x = x.clone().requires_grad_()
    y = run_block(layer, x, Positions(*angles, positions, positions_of_x), plain_attention)
    y.backward(dy)
    return y.detach(), x.grad


def run_split_layer(
    whole: "llama.Block",
    halves: list["llama.Block"],
    cfg: ModelConfig,
    mode: str,
    x: Tensor,
    dy: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Split a layer between two ranks, which are threads, and run it. Return y and dx of each rank.

    x, dy (1, TEST_TOKENS, C): of the whole layer. In mtp each rank gets all of x. In msp and fsp it
    gets its own tokens of both.
    """
    slots = [None, None]
    barrier = threading.Barrier(2, timeout=60)
    weights = dict(whole.named_parameters())

    def run_half(tp_rank: int) -> tuple[Tensor, Tensor]:
        layer = halves[tp_rank]
        tensor_parallel = TensorParallelThreads(mode, tp_rank, slots, barrier)
        for matrix in layer.modules():
            if isinstance(matrix, Matrix):
                split_matrix(matrix, tensor_parallel)
        for name, p in layer.named_parameters():
            weight = weights[name].data
            tp_slice = tp_slice_in(layer, name)
            p.data.copy_(tp_slice.extract(weight) if tp_slice else weight)

        positions = tensor_parallel.select_tp_tokens(torch.arange(TEST_TOKENS))
        if mode == "mtp":
            # in mtp the gradient of y is the sum of the two ranks' gradients (TensorParallel), so
            # each of them gets half of dy
            results = run_layer(layer, cfg, x, dy / 2, positions)
        else:
            own_x = x.chunk(2, 1)[tp_rank]
            own_dy = dy.chunk(2, 1)[tp_rank]
            results = run_layer(layer, cfg, own_x, own_dy, positions)
        tensor_parallel.from_both(None)
        return results

    return on_two_threads(run_half, barrier, mode)


def on_two_threads(run_half: Callable, barrier: threading.Barrier, mode: str) -> list:
    """Return run_half(0) and run_half(1), which run at the same time and wait for each other at the
    barrier. Raises ValueError if one of them fails, because a fork's layer may raise anything."""

    def run(tp_rank: int):
        try:
            return run_half(tp_rank)
        except BaseException:
            barrier.abort()  # otherwise the other thread would wait for this one
            raise

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, tp_rank) for tp_rank in range(2)]
    errors = [e for future in futures if (e := future.exception())]
    if not errors:
        return [future.result() for future in futures]

    # A BrokenBarrierError is only a consequence: the thread waited for the other one, which failed.
    # If both threads have one, a thread took longer than the barrier's timeout
    causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    cause = (causes or errors)[0]
    if isinstance(cause, ValueError):
        raise cause
    advice = "Nearest legal choice: --tp 1"
    if mode != "mtp":
        advice = (
            "In this mode x has only the rank's own tokens, and attention's output o has all "
            "tokens, so a layer cannot multiply one by the other. "
            "Nearest legal choice: --tp-mode mtp"
        )
    raise ValueError(
        f"--tp with --tp-mode {mode}: a layer that is split between two ranks does not run: "
        f"{type(cause).__name__}: {cause}. {advice}"
    ) from cause


def tp_slice_in(layer: "llama.Block", name: str) -> TensorSlice | None:
    """Return which slice of a weight a split layer holds; None if it holds the whole weight."""
    module = layer.get_submodule(name.rpartition(".")[0])
    return getattr(module, "tp_slice", None)


def joined_grad(halves: list["llama.Block"], name: str, whole_weight: Tensor) -> Tensor:
    """Return the gradient of a whole weight, made of the gradients on the two ranks. If the weight
    is split, each rank's gradient fills its slice. If it is not split, the two gradients are added
    up."""
    joined = torch.zeros_like(whole_weight)
    for layer in halves:
        grad = layer.get_parameter(name).grad
        if grad is None:
            continue
        tp_slice = tp_slice_in(layer, name)
        if tp_slice:
            whole_grad = torch.zeros_like(whole_weight)  # zero outside the slice
            tp_slice.insert(grad, whole_grad)
            grad = whole_grad
        joined += grad
    return joined
