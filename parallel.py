"""How do ranks share a model's layers? Tensor modes: each has a part of every matrix.

`split_columns` turns a model into what one rank of a column has of it, from outside: model.py's
operators know that a product has four points at which others may have a say (Matrix.split), and no
more.

Legend: B sequences, T tokens of one, sp ranks that share it, tp columns, t = T/sp/tp tokens, C
width, c a column.
"""
import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention import CommStream, Groups, Passing, all_gather, reduce_scatter
from model import Cut, HeadPart, LLaMA, Matrix, ModelConfig

# ---------------------------------------------------------------------------- tensor modes
# tp neighbouring ranks, columns, share each layer's matrices. Of q|k|v and gate|up each makes some
# columns of x W^T, of its heads and its part of F: a column product, which takes all tokens. out
# and down take these, and give a summand of the result: a row product. What the ranks do about it
# is InternEvo's table, POINTS: Megatron's tensor parallelism (mtp); that with its sequence
# parallelism (msp), where a column has its part of the tokens between the products; and msp that
# keeps less (fsp). Attention sees all tokens of a column's heads in all of them.
#
#                               mtp            msp          fsp
#     x and h of a layer        (B, T/sp, C)   (B, t, C)    (B, t, C)
#     q, o of a column          (B, T/sp, H/tp, D) in all of them
#     norm(x) for dW            made again     kept         gathered again
#
# Hidden are in backward the sum for dx, under the product for the weight, and fsp's second gather,
# under the product for dx (model.norm_linear_backward):
#
#     compute  | norm | dx = dy W | dW = dy^T n       | norm's backward
#     stream          | gather n  | sum, scatter dx   |
#
# and nothing else, since what follows needs it. Embedding, last norm, head and loss are whole on
# every column, which computes them for its own tokens in all modes: [c t, (c + 1) t) of T/sp.

MODES = ("mtp", "msp", "fsp")
POINTS = {  # of a product: what happens there (Columns), by mode
    ("column", "input"):       ("keep", "gather",  "gather"),
    ("row", "output"):         ("sum",  "scatter", "scatter"),
    ("row", "output_grad"):    ("keep", "gather",  "gather"),
    ("column", "input_grad"):  ("sum",  "scatter", "scatter"),
}


class Columns:
    """The ranks that share a layer's matrices, and what travels between them. Whatever the stream
    reads or writes is allocated on the compute stream, and held until compute has waited for it.

    poison, delay: for tests; what was sent or received becomes NaN after use, and the stream starts
    so many GPU cycles late.
    """

    def __init__(self, mode: str, groups: Groups, stream: CommStream, poison: bool = False,
                 delay: int = 0):
        """A collective of all ranks."""
        self.mode = mode
        self.ranks = groups.tp
        self.index = groups.place(dist.get_rank())[2]
        self.group = groups.of_places("tensor", lambda stage, r, column: (stage, r))
        self.stream = stream
        self.poison = poison
        self.delay = delay

    def own(self, tokens: int) -> slice:
        """Return which of a rank's tokens this column has at the model's ends."""
        size = tokens // self.ranks
        return slice(self.index * size, (self.index + 1) * size)

    # -- what travels; each returns a function that lets compute wait for it, and returns it

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """(B, t, C) of each column -> (B, T/sp, C)."""
        sent = x.contiguous()
        parts = x.new_empty(self.ranks, *x.shape)  # (tp, B, t, C)
        passing = self.launch(sent, parts, lambda: all_gather(
            parts.flatten(0, 1), sent, group=self.group))
        return lambda: passing.wait().transpose(0, 1).flatten(1, 2)  # of one sequence: a view

    def sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Summands (B, T/sp, C) -> their sum, in their place."""
        return self.launch(None, x, lambda: dist.all_reduce(x, group=self.group)).wait

    def scatter(self, x: Tensor) -> Callable[[], Tensor]:
        """Summands (B, T/sp, C) -> their sum's part of each column (B, t, C)."""
        parts = x.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()  # (tp, B, t, C)
        part = torch.empty_like(parts[0])
        passing = self.launch(parts, part, lambda: reduce_scatter(
            part, parts.flatten(0, 1), group=self.group))

        def wait() -> Tensor:
            part = passing.wait()
            self.poison_if_testing(parts)
            return part

        return wait

    def launch(self, sent: Tensor | None, received: Tensor, collective: Callable) -> Passing:
        with self.stream.after_compute():
            if self.delay and self.stream.stream:
                torch.cuda._sleep(self.delay)
            collective()
        return Passing(sent, received, self.stream.last_event())

    def poison_if_testing(self, used: Tensor) -> None:
        if self.poison:
            used.fill_(torch.nan)


class Split:
    """What happens at the points of one kind of product, "column" or "row" (model.PlainSplit)."""

    alone = False

    def __init__(self, kind: str, columns: Columns):
        ways = {point: actions[MODES.index(columns.mode)]
                for (of, point), actions in POINTS.items() if of == kind}
        self.input, self.output, self.output_grad, self.input_grad = (
            getattr(columns, ways.get(point, "keep"))
            for point in ("input", "output", "output_grad", "input_grad"))
        self.gathers_x = ways.get("input") == "gather"
        self.gathers_dy = ways.get("output_grad") == "gather"
        self.keeps_input = self.gathers_x and columns.mode == "msp"
        self.poison_if_testing = columns.poison_if_testing

    def used(self, x: Tensor, dy: Tensor | None = None) -> None:
        """Poison what was gathered, for tests, unless backward needs it."""
        if self.gathers_x and (dy is not None or not self.keeps_input):
            self.poison_if_testing(x)
        if self.gathers_dy and dy is not None:
            self.poison_if_testing(dy)


def kinds_and_cuts(cfg: ModelConfig, c: int, tp: int) -> dict[str, tuple[str, Cut]]:
    """Return of each matrix of a layer which product it is of, and what column c of tp has of it.
    cfg: of the whole model."""
    dim, heads, ffn = cfg.dim, cfg.heads * cfg.head_dim, cfg.ffn
    qkv = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
    part = HeadPart(c, tp)
    of_heads = c * heads // tp, (c + 1) * heads // tp
    gate = c * ffn // tp, (c + 1) * ffn // tp
    up = ffn + gate[0], ffn + gate[1]
    return {
        "qkv": ("column", Cut((qkv, dim), tuple((rows.start, rows.stop)
                                                for rows in part.rows(cfg)), (0, dim))),
        "out": ("row", Cut((dim, heads), ((0, dim),), of_heads)),
        "gate_up": ("column", Cut((2 * ffn, dim), (gate, up), (0, dim))),
        "down": ("row", Cut((dim, ffn), ((0, dim),), gate)),
    }


def split_columns(model: LLaMA, columns: Columns) -> None:
    """Leave of a model what this rank's column has. On meta, before shard.States. Raises ValueError
    for a block with other matrices: which part of it a column has is not known."""
    if columns.ranks == 1:
        return
    c, tp = columns.index, columns.ranks
    parts = kinds_and_cuts(model.cfg, c, tp)
    splits = {kind: Split(kind, columns) for kind in ("column", "row")}
    for block in model.blocks:
        matrices = {name: module for name, module in block.named_modules()
                    if isinstance(module, Matrix)}
        if matrices.keys() != parts.keys():
            raise ValueError(f"--tp {tp}: a layer has the matrices {', '.join(matrices)}, columns "
                             f"share {', '.join(parts)}: --tp 1, or another row of kinds_and_cuts")
        for name, (kind, cut) in parts.items():
            take_part(matrices[name], cut, splits[kind])
        block.cfg = dataclasses.replace(model.cfg, heads=model.cfg.heads // tp,
                                        kv_heads=model.cfg.kv_heads // tp, ffn=model.cfg.ffn // tp)
        if block.qkv_bias is not None:
            block.qkv_bias.rows = HeadPart(c, tp).rows(model.cfg)
        # all columns have all tokens there, so the sum over ranks takes column 0's gradient alone;
        # split tokens add up, as do heads, of which q_norm, k_norm and the bias see a column's
        block.norm1.repeated = block.norm2.repeated = columns.mode == "mtp" and c > 0
    ends = Ends(model, columns)
    model.embedded, model.result = ends.embedded, ends.result


def take_part(matrix: Matrix, cut: Cut, split: Split) -> None:
    """Leave a part of a matrix."""
    matrix.cut = cut
    matrix.shape = cut.shape
    matrix.weight = nn.Parameter(matrix.weight.new_empty(cut.shape))
    matrix.split = split


class Ends:
    """Embedding, last norm, head and loss of a column's own tokens, and the ways to the layers and
    from there: in mtp these have all tokens."""

    def __init__(self, model: LLaMA, columns: Columns):
        self.columns = columns
        self.whole_embedded = model.embedded
        self.whole_result = model.result

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return what the first layer takes of tokens (B, T/sp): (B, T/sp, C), or (B, t, C)."""
        x = self.whole_embedded(tokens[:, self.columns.own(tokens.shape[1])])
        return _Enter.apply(x, self.columns) if self.columns.mode == "mtp" else x

    def result(self, x: Tensor, labels: Tensor | None, scale: Tensor | None, each: bool):
        """Return what model.result does; labels (B, T/sp) are IGNORE but for the own tokens, as are
        those of `each` 0 and False. Logits are of the own tokens alone."""
        if self.columns.mode == "mtp":
            x = _Leave.apply(x, self.columns)
        if labels is None:
            return self.whole_result(x, None, scale, each)
        own = self.columns.own(labels.shape[1])
        found = self.whole_result(x, labels[:, own], scale, each)
        if not each:
            return found
        padded = [part.new_zeros(labels.shape) for part in found]
        for part, whole in zip(found, padded):
            whole[:, own] = part
        return tuple(padded)


class _Enter(Function):
    """(B, t, C) of each column -> (B, T/sp, C) of all, whose gradient all of them have."""

    @staticmethod
    def forward(ctx, x, columns):
        ctx.columns = columns
        return columns.gather(x)()  # nothing hides it, once a micro-batch

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return dx[:, ctx.columns.own(dx.shape[1])].contiguous(), None


class _Leave(Function):
    """The mirror image: (B, T/sp, C) -> the own tokens (B, t, C)."""

    @staticmethod
    def forward(ctx, x, columns):
        ctx.columns = columns
        return x[:, columns.own(x.shape[1])].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return ctx.columns.gather(dx)(), None  # nothing hides it, either
