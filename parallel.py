"""How is the model cut in width and in depth? Tensor modes, and pipelines.

In width, tp neighbouring ranks have a part of each matrix of a layer (`split_columns`, below).

In depth, P stages have V parts of the model each: part c of P*V, layers [c*L/(P*V), (c+1)*L/(P*V)),
lies on stage c mod P, so with V > 1 a sequence goes round the stages V times (InternEvo's
num_chunks). The embedding is on the first stage, the head on the last. A step is M micro-batches of
K segments each; a segment is a part of all sequences of a micro-batch, and attends to those before
it, whose keys and values stay (attention.Past; Seq1F1B, arXiv 2406.03488). A *pass* takes one
segment through one part, forward or back. The ranks of a stage shard states and sequences among
themselves as if they were alone.

`pipeline_order` says a stage's passes: some forward, then one forward and one backward in turn
(1F1B), then the backwards that are left. Here 0 is the first segment's forward, aa its backward:

              P = 4, M = 4, K = 1     P = 4, M = 1, K = 4     P = 4, M = 4, K = 1, V = 2
    stage 0   0123......aa.bb.cc.dd   0123.........ddccbbaa   01230123......aa.bb.cc.ddaabbccdd
    stage 1   .012....aa3bb.cc.dd..   .0123......ddccbbaa..   .01230123...aa.bb.cc.ddaabbccdd..
    stage 2   ..01..aa2bb3cc.dd....   ..0123...ddccbbaa....   ..0123012.aa3bb.cc.ddaabbccdd....
    stage 3   ...0aa1bb2cc3dd......   ...0123ddccbbaa......   ...01230aa1bb2cc3ddaabbccdd......

    idle / total = (P - 1) / (V*M*K + P - 1),    of passes that all take as long

so V and K make small what P and M leave, and K does it for a single sequence. A pass of long
sequences takes as long as its FLOPs: segments are of equal FLOPs, so the first ones are longer
(`segment_bounds`).

What a pass hands to the next stage is a message on a stream of its kind: forward messages travel
under backward passes, and back; the host waits for none.

    message              launched                      hidden under            waited for
    x, forward           send: behind its pass         the next pass           by the next stage
                         receive: before the pass      that pass               before its own pass
                         before its own
    dx, backward         likewise                      likewise                likewise

`--overlap` without `pipeline` receives a message when its pass is due.

Left out: passes for weights' gradients alone (zero bubble), which keep what long sequences have no
room for; rings, documents and windows in segments; embedding and head by columns of the vocabulary.

Legend: tp columns of ranks, t = T/sp/tp tokens at the ends; P stages, s one of them, V parts of the
model on a stage, c one of all P*V (or a column), L layers, M micro-batches, m one of them, K
segments, k one of them, B sequences of a micro-batch, T tokens of one, sp ranks that share it, n
tokens of a segment on a rank, C width.
"""
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention import CommStream, Groups, Passing, Past, all_gather, reduce_scatter, wait
from model import (Cut, HeadPart, LLaMA, Matrix, ModelConfig, accumulation_dtype, flops_per_token,
                   rope_tables)
from offload import ChunkGraph

SEGMENT_ALIGN_TOKENS = 128  # of a rank: where kernels like a segment to begin

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

    @property
    def between_layers(self) -> int:
        """Return how many ranks share the tokens of x between layers."""
        return 1 if self.mode == "mtp" else self.ranks

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


# ---------------------------------------------------------------------------- the order of passes


@dataclass(frozen=True)
class Pass:
    """One segment's way through one part of the model."""

    forward: bool
    micro_batch: int
    segment: int
    chunk: int  # 0 ... V-1: which of the stage's parts


def no_order(stages: int, chunks: int, micro_batches: int, segments: int) -> str | None:
    """Return why there is no order of passes, None if there is one: several parts on a stage take
    turns by `stages` segments, which are of whole micro-batches, or several turns are of one."""
    if chunks == 1:
        return None
    if micro_batches * segments % stages:
        return (f"{micro_batches} micro-batches of {segments} segments are no multiple of {stages} "
                "stages, by which parts of a stage take turns")
    if segments % stages and stages % segments:
        return f"{segments} segments and {stages} stages, of which neither divides the other"
    return None


def pipeline_order(stage: int, stages: int, chunks: int, micro_batches: int,
                   segments: int) -> list[Pass]:
    """Return a stage's passes of a step. Segments go forward in order, and back in reverse; with
    several parts on a stage `stages` segments go through one before they go through the next
    (Megatron's order)."""
    assert no_order(stages, chunks, micro_batches, segments) is None
    total = micro_batches * segments * chunks

    def place(i: int) -> tuple[int, int, int]:
        """Return micro-batch, segment and chunk of the i-th pass."""
        rounds, within = divmod(i, stages * chunks)
        chunk, item = divmod(within, stages)
        return *divmod(rounds * stages + item, segments), chunk

    forward, backward = [], []
    for micro_batch, segment, chunk in map(place, range(total)):
        forward.append(Pass(True, micro_batch, segment, chunk))
        backward.append(Pass(False, micro_batch, segments - 1 - segment, chunks - 1 - chunk))
    # a micro-batch's backward begins when its last segment is through the last part, on the last
    # stage at once; those before it have what is under way behind them, there and back
    ends = [(Pass(forward, m, segments - 1, chunks - 1) for forward in (True, False))
            for m in range(micro_batches)]
    through = max(forward.index(there) - backward.index(back) for there, back in ends)
    behind = stages - 1 - stage
    first = min(through + (behind if chunks == 1 else 2 * behind), total)
    in_turn = [one for pair in zip(forward[first:], backward) for one in pair]
    return forward[:first] + in_turn + backward[total - first :]


def in_flight(order: list[Pass], chunk: int) -> int:
    """Return the most passes of a part that wait for their backward at a time."""
    most = now = 0
    for one in order:
        if one.chunk == chunk:
            now += 1 if one.forward else -1
            most = max(most, now)
    return most


def bubble(stages: int, chunks: int, micro_batches: int, segments: int) -> float:
    """Return the share of a step in which a stage is idle, if all passes take as long."""
    return (stages - 1) / (chunks * micro_batches * segments + stages - 1)


def run_times(orders: list[list[Pass]], forward: Sequence[float], backward: Sequence[float],
              message: float = 0) -> list[list[tuple[float, float]]]:
    """Return when each pass of each stage begins and ends: when the stage is free, and what comes
    from another is there. forward, backward: seconds of each part; message: seconds of one. Raises
    ValueError if stages wait for each other for ever."""
    stages = len(orders)
    last = len(forward) - 1
    ends: dict[tuple, float] = {}  # by pass and part
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for stage, (order, done) in enumerate(zip(orders, times)):
            while len(done) < len(order):
                one = order[len(done)]
                part = one.chunk * stages + stage
                item = one.forward, one.micro_batch, one.segment
                start = done[-1][1] if done else 0
                if part != (0 if one.forward else last):
                    before = *item, part - 1 if one.forward else part + 1
                    if before not in ends:
                        break
                    start = max(start, ends[before] + message)
                elif not one.forward and (True, *item[1:], part) not in ends:
                    break
                end = start + (forward if one.forward else backward)[part]
                ends[*item, part] = end
                done.append((start, end))
                moved = True
    if any(len(done) < len(order) for done, order in zip(times, orders)):
        raise ValueError("stages wait for each other")
    return times


def draw_order(stages: int, chunks: int, micro_batches: int, segments: int) -> str:
    """Return the passes of all stages as text, a line a stage: of segment 0, 1 ... a forward is 0,
    1 ..., a backward aa, bb ..., since it takes twice as long; a point is idle."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    orders = [pipeline_order(s, stages, chunks, micro_batches, segments) for s in range(stages)]
    parts = stages * chunks
    times = run_times(orders, [1] * parts, [2] * parts)
    width = max(end for done in times for _, end in done)
    lines = []
    for s, (order, done) in enumerate(zip(orders, times)):
        line = ["."] * width
        for one, (start, end) in zip(order, done):
            number = one.micro_batch * segments + one.segment
            mark = str(number % 10) if one.forward else letters[number % len(letters)]
            line[start:end] = [mark] * (end - start)
        lines.append(f"  stage {s}  {''.join(line)}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------- parts of the model


def part_layers(layers: int, stages: int, chunks: int, part: int) -> range:
    """Return the layers of a part, of stages * chunks parts that differ by a layer at most."""
    parts = stages * chunks
    return range(part * layers // parts, (part + 1) * layers // parts)


def keep_stage(model: LLaMA, stage: int, stages: int, chunks: int) -> list[range]:
    """Leave of a model what lies on a stage. Returns the layers of its parts."""
    parts = [part_layers(model.cfg.layers, stages, chunks, chunk * stages + stage)
             for chunk in range(chunks)]
    for i in range(model.cfg.layers):
        if not any(i in part for part in parts):
            model.blocks[i] = nn.Module()  # elsewhere
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None
    return parts


def segment_bounds(cfg: ModelConfig, seq: int, segments: int, ranks: int) -> list[int]:
    """Return where the segments of a sequence begin, and seq: parts of equal FLOPs. The first t
    tokens of n take a*t + b*t^2; ranks: that share each segment evenly. Raises ValueError if there
    are too few tokens."""
    multiple = ranks * SEGMENT_ALIGN_TOKENS
    if seq % multiple or seq < 4 * segments * multiple:
        multiple = ranks
    units = seq // multiple
    if seq % multiple or units < segments:
        raise ValueError(f"--pp-segments {segments}: --seq {seq} has {units} tokens a rank for "
                         f"{ranks} ranks of a sequence; at most {units}")
    linear, _ = flops_per_token(dataclasses.replace(cfg, window=0), 0)
    with_attention, _ = flops_per_token(dataclasses.replace(cfg, window=0), 1)
    square = with_attention - linear  # of a token, a token of the sequence
    total = linear * seq + square * seq**2
    bounds = [0]
    for k in range(1, segments):
        share = total * k / segments
        t = (math.sqrt(linear**2 + 4 * square * share) - linear) / (2 * square)
        unit = min(max(round(t / multiple), bounds[-1] // multiple + 1), units - segments + k)
        bounds.append(unit * multiple)
    return [*bounds, seq]


# ---------------------------------------------------------------------------- messages


@dataclass
class Message:
    """A tensor on its way between two stages."""

    tensor: Tensor  # which lives until it is there
    work: dist.Work
    event: object  # of its stream; None on a CPU, where the host waits

    def wait(self) -> Tensor:
        """Let compute wait until it is sent, or received."""
        if self.event is None:
            self.work.wait()
        wait(self.event)
        return self.tensor

    def is_done(self) -> bool:
        return self.work.is_completed() if self.event is None else self.event.query()


class Link:
    """Messages from one stage to another, in order, on a stream of their own."""

    def __init__(self, group: dist.ProcessGroup, here: bool, device: torch.device, delay: int):
        """here: they leave from this stage, else they come to it."""
        self.group = group
        self.other = 1 - dist.get_rank(group)
        self.stream = CommStream(device)
        self.delay = delay
        self.here = here
        if device.type == "cuda":  # NCCL connects the two now, not amid a step
            self.launch(torch.zeros(1, device=device)).wait()

    def launch(self, tensor: Tensor) -> Message:
        """Launch the way of a tensor that leaves, or into one that comes."""
        with self.stream.after_compute():  # it is computed; what comes has a place
            if self.delay and self.stream.stream:
                torch.cuda._sleep(self.delay)
            if self.here:
                work = dist.isend(tensor, group=self.group, group_dst=self.other)
            else:
                work = dist.irecv(tensor, group=self.group, group_src=self.other)
            if self.stream.stream:
                work.wait()  # this stream alone
        return Message(tensor, work, self.stream.last_event())


def make_links(groups: Groups, chunks: int, device: torch.device,
               delay: int) -> dict[tuple[bool, bool], Link]:
    """Return this stage's links by (forward, leaves). Each pair of stages and direction has a
    communicator of its own: none waits for another's messages. A collective of all ranks."""
    stages = groups.pp
    found = {}
    for source in range(stages if chunks > 1 else stages - 1):
        pair = (source, (source + 1) % stages)

        def key(s, r, column):
            return (r, column) if s in pair else (s, r, column)

        for forward in (True, False):
            direction = "forward" if forward else "backward"
            group = groups.of_places(f"{direction} {source}", key)
            for end, s in enumerate(pair):
                if s == groups.stage:  # of backward messages the source is where they come to
                    leaves = forward == (end == 0)
                    found[forward, leaves] = Link(group, leaves, device, delay)
    return found


# ---------------------------------------------------------------------------- the pipeline


@dataclass
class Live:
    """A pass that went forward and has not come back."""

    graph: ChunkGraph  # what autograd saved
    shape: Tensor | None  # of the part's input (B, n, C), for its gradient: a tensor of no memory
    received: Tensor | None  # the input, if it is to be poisoned


class Pipeline:
    """A stage of a model, which runs a step's passes: as LLaMA, it has forward_backward, and a call
    evaluates.

    model: of which `keep_stage` has left `parts`; layer_runners: of each part (model.whole_layers,
    offload.ChunkedLayers.start ...). bounds: of segments, in a rank's tokens, of which it has one
    in `sharing` between layers (Columns). dtype: of activations. overlap: messages are received
    ahead. poison, delay: for tests; what was received becomes NaN after use, and messages leave so
    many GPU cycles late. idle: a list that gets, while it is one, pairs of events around each wait
    for a message.
    """

    def __init__(self, model: LLaMA, parts: list[range], layer_runners: list, groups: Groups,
                 micro_batches: int, bounds: list[int], sharing: int, device: torch.device,
                 dtype: torch.dtype, overlap: bool = True, poison: bool = False, delay: int = 0):
        self.model = model
        self.parts = parts
        self.layer_runners = layer_runners
        self.stages = groups.pp
        self.stage = groups.stage
        self.bounds = bounds
        self.sharing = sharing
        self.segments = len(bounds) - 1
        self.device = device
        self.dtype = dtype
        self.overlap = overlap
        self.poison = poison
        self.order = pipeline_order(self.stage, self.stages, len(parts), micro_batches,
                                    self.segments)
        self.links = make_links(groups, len(parts), device, delay)
        self.root = torch.zeros((), device=device, requires_grad=True)  # of all passes' graphs
        self.sending: deque[Message] = deque()
        self.idle: list | None = None

    # -- where a pass begins and ends

    def is_first(self, one: Pass) -> bool:
        return self.stage == one.chunk == 0

    def is_last(self, one: Pass) -> bool:
        return self.stage == self.stages - 1 and one.chunk == len(self.parts) - 1

    def segment(self, t: Tensor, k: int, dim: int = 1) -> Tensor:
        """Return segment k's tokens of a tensor (B, T, ...)."""
        return t.narrow(dim, self.bounds[k], self.bounds[k + 1] - self.bounds[k])

    # -- messages

    def receive(self, one: Pass, micro_batches: list[tuple]) -> Message | None:
        """Launch the way here of what a pass needs (B, n / sharing, C); None: nothing."""
        if self.is_first(one) if one.forward else self.is_last(one):
            return None
        rows, tokens = self.segment(micro_batches[one.micro_batch][0], one.segment).shape
        x = torch.empty(rows, tokens // self.sharing, self.model.cfg.dim, dtype=self.dtype,
                        device=self.device)
        return self.links[one.forward, False].launch(x)

    def send(self, forward: bool, tensor: Tensor) -> None:
        """Launch the way of a pass's result to the next stage."""
        self.sending.append(self.links[forward, True].launch(tensor.contiguous()))
        while self.sending[0].is_done():  # by now: what is not keeps its memory
            self.sending.popleft()
            if not self.sending:
                break

    def arrived(self, message: Message | None) -> Tensor | None:
        """Let compute wait for a message."""
        if message is None:
            return None
        if self.idle is None or self.device.type != "cuda":
            return message.wait()
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        message.wait()
        after.record()
        self.idle.append((before, after))
        return message.tensor

    def idle_seconds(self) -> float:
        """Return the seconds in which compute has waited for messages since `idle` became a list.
        Waits for the device."""
        torch.cuda.synchronize(self.device)
        return sum(before.elapsed_time(after) for before, after in self.idle) / 1e3

    # -- a step

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Run a step's micro-batches, each the arguments of LLaMA.forward. Returns the sum of the
        losses that are computed here: 0 but on the last stage."""
        micro_batches = list(micro_batches)
        loss = torch.zeros((), device=self.device, dtype=accumulation_dtype(self.dtype))
        live: dict[tuple, Live] = {}
        pasts: dict[tuple, Past] = {}
        arriving = None
        for i, one in enumerate(self.order):
            if i == 0 or not self.overlap:
                arriving = self.receive(one, micro_batches)
            message, arriving = arriving, None
            if self.overlap and i + 1 < len(self.order):  # hidden by this pass
                arriving = self.receive(self.order[i + 1], micro_batches)
            received = self.arrived(message)  # hidden by the pass before
            key = one.micro_batch, one.segment, one.chunk
            if one.forward:
                live[key], result = self.run_forward(one, received, micro_batches, pasts)
                if self.is_last(one):
                    loss += result
                else:
                    self.send(True, result)
                del result
            else:
                dx = self.run_backward(live.pop(key), received)
                self.poison_if_testing(received)
                if one.segment == 0:
                    for layer in self.parts[one.chunk]:
                        pasts.pop((one.micro_batch, layer), None)
                if dx is not None:
                    self.send(False, dx)
                del dx
        while self.sending:
            self.sending.popleft().wait()  # hidden: they were received before the step could end
        return loss

    def run_forward(self, one: Pass, x: Tensor | None, micro_batches: list[tuple],
                    pasts: dict[tuple, Past]) -> tuple[Live, Tensor]:
        """Run a part on x (B, n, C), None: on tokens. Returns what backward needs, and y (B, n, C)
        or the loss."""
        def part(*inputs: Tensor) -> Tensor:
            return self.run_part(one, inputs, micro_batches[one.micro_batch], pasts)

        inputs = () if x is None else (x,)
        graph, (y,) = ChunkGraph.run(self.root, part, *inputs)
        shape = None if x is None else x.to("meta")
        return Live(graph, shape, x if self.poison else None), y

    def run_part(self, one: Pass, inputs: tuple[Tensor, ...], micro_batch: tuple,
                 pasts: dict[tuple, Past], each: bool = False):
        """Return y (B, n, C) of a part, or what LLaMA.result does."""
        tokens, labels, scale, positions, *documents = micro_batch
        model = self.model
        k = one.segment
        x, = inputs or (model.embedded(self.segment(tokens, k)),)
        where = self.segment(positions, k, positions.dim() - 1)
        rope = rope_tables(model.cfg, where, accumulation_dtype(self.dtype))
        attention = model.attention.within(*documents) if documents else model.attention
        start = self.bounds[k] * self.bounds_ranks()

        def attention_of(layer: int):
            if self.segments == 1:
                return attention
            past = pasts.setdefault((one.micro_batch, layer),
                                    Past(self.bounds[-1] * self.bounds_ranks()))
            return attention.after(past, start)

        run_layer = self.layer_runners[one.chunk](model, rope, attention_of)
        for i in self.parts[one.chunk]:
            x = run_layer(i, x)
        if not self.is_last(one):
            return x
        return model.result(x, self.segment(labels, k), scale, each)

    def bounds_ranks(self) -> int:
        """Return how many ranks share a segment: attention has all their tokens."""
        return getattr(self.model.attention, "head_ranks", 1)

    def run_backward(self, live: Live, dy: Tensor | None) -> Tensor | None:
        """Run a part's backward from dy (B, n, C), None: from the loss. Returns dx (B, n, C), None
        where tokens went in."""
        if dy is None:
            dy = torch.ones((), device=self.device, dtype=accumulation_dtype(self.dtype))
        inputs = () if live.shape is None else (live.shape,)
        grads = live.graph.backward((dy,), *inputs)
        self.poison_if_testing(live.received)
        return grads[0] if grads else None

    # -- evaluation

    @torch.no_grad()
    def __call__(self, tokens: Tensor, labels: Tensor, scale: Tensor | None, positions: Tensor,
                 *documents, each: bool = True) -> tuple[Tensor, Tensor]:
        """Return of each token its loss, and whether its label is the likeliest (B, T), as
        model.token_losses does: on the last stage; 0 and False elsewhere."""
        assert each, "a stage has no logits of its own"
        micro_batch = tokens, labels, scale, positions, *documents
        losses = torch.zeros(labels.shape, device=self.device,
                             dtype=accumulation_dtype(self.dtype))
        hits = torch.zeros_like(labels, dtype=torch.bool)
        pasts: dict[tuple, Past] = {}
        for k in range(self.segments):
            for chunk in range(len(self.parts)):
                one = Pass(True, 0, k, chunk)
                x = self.arrived(self.receive(one, [micro_batch]))
                y = self.run_part(one, () if x is None else (x,), micro_batch, pasts, each=True)
                if not self.is_last(one):
                    self.send(True, y)
                    continue
                for whole, found in zip((losses, hits), y):
                    self.segment(whole, k).copy_(found)
        while self.sending:
            self.sending.popleft().wait()  # in the open
        return losses, hits

    # -- for tests

    def poison_if_testing(self, received: Tensor | None) -> None:
        if self.poison and received is not None:
            received.fill_(torch.nan)
