"""How is the model cut in width and in depth? Tensor modes, and pipelines.

In width, tp neighbouring ranks have a part of each matrix of a layer (`split_columns`, below).

In depth, P stages have V parts of the model each: part c of P*V, layers [c*L/(P*V), (c+1)*L/(P*V)),
lies on stage c mod P, so with V > 1 a sequence goes round the stages V times (InternEvo's
num_chunks). The embedding is on the first stage, the head on the last. A step is M micro-batches. A
*pass* takes one of them through one part, forward or back. The ranks of a stage shard states and
sequences among themselves as if they were alone.

`pipeline_order` says a stage's passes: some forward, then one forward and one backward in turn
(1F1B), then the backwards that are left. Here 0 is the first micro-batch's forward, aa its
backward:

              P = 4, M = 4            P = 4, M = 4, V = 2
    stage 0   0123......aa.bb.cc.dd   01230123......aa.bb.cc.ddaabbccdd
    stage 1   .012....aa3bb.cc.dd..   .01230123...aa.bb.cc.ddaabbccdd..
    stage 2   ..01..aa2bb3cc.dd....   ..0123012.aa3bb.cc.ddaabbccdd....
    stage 3   ...0aa1bb2cc3dd......   ...01230aa1bb2cc3ddaabbccdd......

    idle / total = (P - 1) / (V*M + P - 1),    of passes that all take as long

so V makes small what P and M leave.

What a pass hands to the next stage is a message on a stream of its kind: forward messages travel
under backward passes, and back; the host waits for none.

    message         launched                            hidden under     waited for
    x, forward      to send: behind its pass            the next passes  behind the next but one
                    to receive: before the pass that    that pass        before its own pass
                    comes before its own
    dx, backward    likewise                            likewise         likewise

`--overlap` without `pipeline` receives a message when its pass is due.

Left out: passes for weights' gradients alone (zero bubble), which keep what long sequences have no
room for; embedding and head by columns of the vocabulary.

Legend: tp columns of ranks, t = T/sp/tp tokens at the ends; P stages, s one of them, V parts of the
model on a stage, c one of all P*V (or a column), L layers, M micro-batches, B sequences of one, T
tokens of a sequence, sp ranks that share it, n = T/sp, C width.
"""
import copy
import dataclasses
import functools
import itertools
import os
import string
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention import CommStream, wait
from model import Before, Cut, LLaMA, Matrix, ModelConfig, accumulation_dtype, rope_tables
from offload import ChunkGraph
from ranks import Groups, all_gather, reduce_scatter

# ---------------------------------------------------------------------------- tensor modes
# tp neighbours, columns, share each layer's matrices. Of q|k|v and gate|up (cut="rows") each one
# makes some columns of x W^T, of its heads and its part of F, which takes all tokens; out and down
# (cut="columns") take these, and give a summand of the result. What the ranks do about it is
# InternEvo's table: Megatron's tensor parallelism (mtp); that with its sequence parallelism (msp),
# where a column has its part of the tokens between products; and msp that keeps less (fsp).
# Attention sees all tokens of a column's heads in all of them.
#
#     mode   enter: x into product     join: y behind product     tokens of x    kept for dW
#            of "rows"                 of "columns"
#     mtp    x; mean of dx             sum of y; tp dy            T/sp           x
#     msp    gather x; scatter dx      scatter y; gather dy       t = T/sp/tp    gathered x
#     fsp    x; dx                     scatter y; gather dy       t              own x
#
# (Forward; backward.) In fsp a, which is computed before the product, is gathered, again in
# backward, and da scattered (`around`). In mtp embedding, last norm, head and loss are computed on
# every column, of all tokens: their labels count tp times, so each column has 1/tp of their
# gradients, and of that of x between products. So all modes have one rule: gradients of ends, norms
# and biases are sums over columns. Nothing hides what travels: what follows needs it.

MODES = ("mtp", "msp", "fsp")


class Columns:
    """The ranks that share a layer's matrices, and what travels between them."""

    def __init__(self, mode: str, groups: Groups):
        """A collective of all ranks."""
        self.mode = mode
        self.ranks = groups.tp
        self.index = groups.column
        self.group = groups.of_places("tensor", lambda stage, r, column: (stage, r))

    def gather(self, x: Tensor) -> Tensor:
        """(B, t, C) of each column -> (B, T/sp, C)."""
        parts = x.new_empty(self.ranks, *x.shape)  # (tp, B, t, C)
        all_gather(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return parts.transpose(0, 1).flatten(1, 2)  # of one sequence: a view

    def sum(self, x: Tensor) -> Tensor:
        """Summands (B, T/sp, C) -> their sum."""
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Summands (B, T/sp, C) -> their sum's part of each column (B, t, C)."""
        parts = x.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()  # (tp, B, t, C)
        part = torch.empty_like(parts[0])
        reduce_scatter(part, parts.flatten(0, 1), group=self.group)
        return part

    def enter(self, x: Tensor) -> Tensor:
        if self.mode == "mtp":
            return _ThereAndBack.apply(x, lambda x: x.view_as(x),
                                       lambda dx: self.sum(dx) / self.ranks)
        if self.mode == "msp":
            return _ThereAndBack.apply(x, self.gather, self.scatter)
        return x

    def join(self, y: Tensor) -> Tensor:
        if self.mode == "mtp":
            return _ThereAndBack.apply(y, self.sum, lambda dy: dy * self.ranks)
        return _ThereAndBack.apply(y, self.scatter, self.gather)

    def around(self, before: Before) -> Before:
        if self.mode != "fsp":
            return before

        def backward(*inputs_and_da):
            *inputs, da = inputs_and_da
            a, *grads = before.backward(*inputs, self.scatter(da))
            return self.gather(a), *grads

        return Before(lambda *inputs: self.gather(before.forward(*inputs)), backward)


class _ThereAndBack(Function):
    """there(x), whose gradient is back(dy)."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.back(dy), None, None


@functools.cache
def column_model(cfg: ModelConfig, tp: int) -> ModelConfig:
    """Return the model whose layers are one of tp columns of the model's."""
    return dataclasses.replace(cfg, heads=cfg.heads // tp, kv_heads=cfg.kv_heads // tp,
                               ffn=cfg.ffn // tp)


def part_of(matrix: Matrix, c: int, tp: int) -> Cut:
    """Return what column c of tp has of a matrix. Raises ValueError if it cannot be cut so."""
    rows, cols = matrix.shape

    def part(size: int, first: int = 0) -> tuple[int, int]:
        if size % tp:
            raise ValueError(f"--tp {tp}: does not divide {size} of a matrix {rows} x {cols}")
        return first + c * size // tp, first + (c + 1) * size // tp

    if matrix.cut == "columns":
        return Cut((rows, cols), ((0, rows),), part(cols))
    firsts = [sum(matrix.parts[:i]) for i in range(len(matrix.parts))]
    return Cut((rows, cols), tuple(map(part, matrix.parts, firsts)), (0, cols))


def split_columns(model: LLaMA, columns: Columns) -> None:
    """Leave of a model what this rank's column has. On meta, before shard.States. Raises ValueError
    for a matrix that does not say how it is cut."""
    if columns.ranks == 1:
        return
    for name, matrix in model.blocks.named_modules():
        if not isinstance(matrix, Matrix):
            continue
        if not matrix.cut:
            raise ValueError(f"--tp {columns.ranks}: the matrix {name} does not say how it is cut:"
                             ' Matrix(rows, cols, cut="rows") or "columns", or --tp 1')
        matrix.part = part_of(matrix, columns.index, columns.ranks)
        matrix.shape = matrix.part.shape
        matrix.weight = nn.Parameter(matrix.weight.new_empty(matrix.shape))
        if matrix.cut == "rows":
            matrix.enter, matrix.around = columns.enter, columns.around
        else:
            matrix.join = columns.join


# ---------------------------------------------------------------------------- the order of passes


@dataclass(frozen=True)
class Pass:
    """One micro-batch's way through one part of the model."""

    forward: bool
    micro_batch: int
    chunk: int  # 0 ... V-1: which of the stage's parts


def no_order(stages: int, chunks: int, micro_batches: int) -> str | None:
    """Return why there is no order of passes, None if there is one: several parts on a stage take
    turns by `stages` micro-batches."""
    if chunks == 1 or micro_batches % stages == 0:
        return None
    return (f"{micro_batches} micro-batches are no multiple of {stages} stages, by which parts of "
            "a stage take turns")


def pipeline_order(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return a stage's passes of a step. With several parts on a stage `stages` micro-batches go
    through one before they go through the next (Megatron's order)."""
    assert no_order(stages, chunks, micro_batches) is None
    total = micro_batches * chunks
    forward, backward = [], []
    for i in range(total):
        rounds, within = divmod(i, stages * chunks)
        chunk, item = divmod(within, stages)
        micro_batch = rounds * stages + item
        forward.append(Pass(True, micro_batch, chunk))
        backward.append(Pass(False, micro_batch, chunks - 1 - chunk))
    # a micro-batch's backward begins when it is through the last part, on the last stage at once;
    # those before it have what is under way behind them, there and back
    through = (chunks - 1) * stages
    behind = stages - 1 - stage
    first = min(through + (behind if chunks == 1 else 2 * behind), total)
    in_turn = [one for pair in zip(forward[first:], backward) for one in pair]
    return forward[:first] + in_turn + backward[total - first :]


def in_flight(order: list[Pass], chunk: int) -> int:
    """Return the most passes of a part that wait for their backward at a time."""
    changes = (1 if one.forward else -1 for one in order if one.chunk == chunk)
    return max(itertools.accumulate(changes))


def bubble(stages: int, chunks: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage is idle, if all passes take as long."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def run_times(orders: list[list[Pass]], forward: Sequence[float], backward: Sequence[float],
              message: float = 0) -> list[list[tuple[float, float]]]:
    """Return when each pass of each stage begins and ends: when the stage is free, and what comes
    from another is there. forward, backward: seconds of each part; message: seconds of one. Raises
    ValueError if stages wait for each other for ever."""
    stages, parts = len(orders), len(forward)
    seconds = [*forward, *reversed(backward)]  # of a micro-batch's steps: there, and back
    ends: dict[tuple, float] = {}  # by micro-batch and step
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for stage, (order, done) in enumerate(zip(orders, times)):
            while len(done) < len(order):
                one = order[len(done)]
                part = one.chunk * stages + stage
                step = part if one.forward else 2 * parts - 1 - part
                arrival = ends.get((one.micro_batch, step - 1)) if step > 0 else 0
                if arrival is None:
                    break
                if step not in (0, parts):  # nor on the last stage, where it turns back
                    arrival += message
                start = max(arrival, done[-1][1] if done else 0)
                end = start + seconds[step]
                ends[one.micro_batch, step] = end
                done.append((start, end))
                moved = True
    if any(len(done) < len(order) for done, order in zip(times, orders)):
        raise ValueError("stages wait for each other")
    return times


def draw_order(stages: int, chunks: int, micro_batches: int) -> str:
    """Return the passes of all stages as text, a line a stage: of micro-batch 0, 1 ... a forward is
    0, 1 ..., a backward aa, bb ..., since it takes twice as long; a point is idle."""
    orders = [pipeline_order(s, stages, chunks, micro_batches) for s in range(stages)]
    parts = stages * chunks
    times = run_times(orders, [1] * parts, [2] * parts)
    width = max(end for done in times for _, end in done)
    lines = []
    for s, (order, done) in enumerate(zip(orders, times)):
        line = ""
        for one, (start, end) in zip(order, done):
            number = one.micro_batch
            mark = str(number % 10) if one.forward else string.ascii_lowercase[number % 26]
            line = line.ljust(start, ".") + mark * (end - start)
        lines.append(f"  stage {s}  {line.ljust(width, '.')}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------- parts of the model


def part_layers(layers: int, stages: int, chunks: int, part: int) -> range:
    """Return the layers of a part, of stages * chunks parts that differ by a layer at most."""
    parts = stages * chunks
    return range(part * layers // parts, (part + 1) * layers // parts)


def keep_stage(model: LLaMA, stage: int, stages: int, chunks: int) -> list[range]:
    """Leave of a model what lies on a stage. Returns the layers of its parts."""
    parts = [part_layers(model.cfg.layers, stages, chunks, part)
             for part in range(stage, stages * chunks, stages)]
    for i in range(model.cfg.layers):
        if not any(i in part for part in parts):
            model.blocks[i] = nn.Module()  # elsewhere; those here keep their numbers and names
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None
    return parts


# ---------------------------------------------------------------------------- messages


@dataclass
class Message:
    """A tensor on its way between two stages."""

    tensor: Tensor  # which lives until it is there
    work: dist.Work | None  # on a CPU, where the host waits
    event: object  # on a GPU, of the link's stream

    def wait(self) -> Tensor:
        """Let compute wait until it is sent, or received."""
        if self.work is not None:
            self.work.wait()
        wait(self.event)
        return self.tensor


class Link:
    """Messages from one stage to another, in order, on a stream of their own."""

    def __init__(self, group: dist.ProcessGroup, leaves: bool, stream: CommStream):
        """leaves: messages leave from this stage, else they come to it."""
        self.group = group
        self.leaves = leaves
        self.other = 1 - dist.get_rank(group)
        self.stream = stream
        self.leaving: deque[Message] = deque()

    def send(self, tensor: Tensor) -> None:
        """Launch the way of a tensor that leaves. Two may be under way: more would take memory."""
        self.leaving.append(self.launch(tensor.contiguous()))
        if len(self.leaving) > 2:
            self.leaving.popleft().wait()  # hidden by the passes since: it was received under them

    def finish(self) -> None:
        """Let compute wait for all that leaves."""
        while self.leaving:
            self.leaving.popleft().wait()

    def launch(self, tensor: Tensor) -> Message:
        """Launch the way of a tensor that leaves, or into one that comes."""
        nothing = tensor.new_empty(0, *tensor.shape[1:])
        rows = [0, 0]
        rows[self.other] = len(tensor)
        with self.stream.after_compute():  # it is computed; what comes has a place
            # on this very stream, which send and receive would leave for one of NCCL's own; gloo's
            # threads wait for the other stage instead of the host
            alone = self.stream.stream is None
            received, here = (nothing, [0, 0]) if self.leaves else (tensor, rows)
            sent, there = (tensor, rows) if self.leaves else (nothing, [0, 0])
            work = dist.all_to_all_single(received, sent, here, there, self.group, alone)
        return Message(tensor, work, self.stream.last_event())


class SilentLink:
    """A link of a warm-up: what comes is zero, and nothing leaves."""

    def launch(self, tensor: Tensor) -> Message:
        return Message(tensor.zero_(), None, None)

    def send(self, tensor: Tensor) -> None:
        pass

    def finish(self) -> None:
        pass


def use_more_queues() -> None:
    """Let each stream have a hardware queue of its own, of which a GPU has 8 by default: a message
    that waits must not hold up the one that it waits for. Before CUDA starts."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def make_links(groups: Groups, chunks: int,
               make_stream: Callable[[], CommStream]) -> dict[str, Link]:
    """Return this stage's links: forward_in, forward_out, backward_in and backward_out, if anything
    comes from there, or goes there. Each pair of stages and direction has a communicator of its
    own: none waits for another's messages. A collective of all ranks."""
    links = {}
    for source in range(groups.pp if chunks > 1 else groups.pp - 1):
        target = (source + 1) % groups.pp  # of forward messages; backward ones go the other way

        def key(stage, r, column):
            return (r, column) if stage in (source, target) else (stage, r, column)

        for kind, begin, end in (("forward", source, target), ("backward", target, source)):
            group = groups.of_places(f"{kind} {source}", key)
            if groups.stage == begin:
                links[f"{kind}_out"] = Link(group, True, make_stream())
            if groups.stage == end:
                links[f"{kind}_in"] = Link(group, False, make_stream())
    return links


# ---------------------------------------------------------------------------- the pipeline


@dataclass
class Live:
    """A pass that went forward and has not come back."""

    graph: ChunkGraph  # what autograd saved of the layers
    dy: Tensor | None  # of the last part the gradient of its layers' result: the loss's is known


@dataclass(eq=False, repr=False)
class Pipeline:
    """A stage of a model, which runs a step's passes: as LLaMA, it has forward_backward, and a call
    evaluates. Making one is a collective of all ranks."""

    model: LLaMA  # of which `keep_stage` has left `parts`
    parts: list[range]
    layer_runners: list  # of each part: model.whole_layers, offload.ChunkedLayers.start ...
    groups: Groups
    micro_batches: int
    device: torch.device
    dtype: torch.dtype  # of activations
    overlap: bool = True  # messages are received ahead
    make_stream: Callable[..., CommStream] = CommStream

    def __post_init__(self):
        self.stage = self.groups.stage
        self.order = pipeline_order(self.stage, self.groups.pp, len(self.parts),
                                    self.micro_batches)
        self.links = make_links(self.groups, len(self.parts),
                                functools.partial(self.make_stream, self.device))
        self.root = torch.zeros((), device=self.device, requires_grad=True)  # of all graphs

    # -- where a pass begins and ends

    def is_first(self, this: Pass) -> bool:
        return self.stage == this.chunk == 0

    def is_last(self, this: Pass) -> bool:
        return self.stage == self.groups.pp - 1 and this.chunk == len(self.parts) - 1

    # -- messages

    def receive(self, this: Pass, micro_batch: tuple) -> Message | None:
        """Launch the way here of what a pass needs; None: nothing."""
        if self.is_first(this) if this.forward else self.is_last(this):
            return None
        rows, tokens = micro_batch[0].shape
        between_layers = torch.empty(rows, tokens, self.model.cfg.dim,
                                     dtype=self.dtype, device=self.device)
        return self.links["forward_in" if this.forward else "backward_in"].launch(between_layers)

    def arrived(self, message: Message | None) -> Tensor | None:
        """Let compute wait for a message."""
        return None if message is None else message.wait()

    # -- a step

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Run a step's micro-batches, each the arguments of LLaMA.forward. Returns the sum of the
        losses that are computed here: 0 but on the last stage."""
        micro_batches = list(micro_batches)
        loss = torch.zeros((), device=self.device, dtype=accumulation_dtype(self.dtype))
        live: dict[Pass, Live] = {}  # by forward pass
        arriving = None
        for i, this in enumerate(self.order):
            micro_batch = micro_batches[this.micro_batch]
            if i == 0 or not self.overlap:
                arriving = self.receive(this, micro_batch)
            message, arriving = arriving, None
            if self.overlap and i + 1 < len(self.order):  # hidden by this pass
                following = self.order[i + 1]
                arriving = self.receive(following, micro_batches[following.micro_batch])
            received = self.arrived(message)  # hidden by the pass before
            if this.forward:
                live[this] = self.run_forward(this, received, micro_batch, loss)
                continue
            there = live.pop(dataclasses.replace(this, forward=True))
            dx = self.run_backward(this, there, received)
            if not self.is_first(this):
                self.links["backward_out"].send(dx)
        self.finish_messages()
        return loss

    def finish_messages(self) -> None:
        """Let compute wait for all that leaves: in the open, it is the last of a step."""
        for link in self.links.values():
            link.finish()

    def run_forward(self, this: Pass, x: Tensor | None, micro_batch: tuple, loss: Tensor) -> Live:
        """Run a part on x (B, n, C), None: on tokens, and launch the result's way, or add to the
        loss. Returns what backward needs."""
        layers = functools.partial(self.run_layers, this, micro_batch)
        graph, (y,) = ChunkGraph.run(self.root, layers, *([] if x is None else [x]))
        if not self.is_last(this):
            self.links["forward_out"].send(y)
            return Live(graph, None)
        _, labels, scale, *_ = micro_batch
        # the head's gradient is known with the loss; it is as large as the head: none may wait
        of_loss, (part,) = ChunkGraph.run(
            self.root, lambda y: self.model.result(y, labels, scale, False), y)
        loss += part
        dy, = of_loss.backward((torch.ones_like(part),), y)
        return Live(graph, dy)

    def run_layers(self, this: Pass, micro_batch: tuple, x: Tensor | None = None) -> Tensor:
        """Return the result of a part's layers, (B, n, C), on x like it; None: on the
        embedding's of the tokens."""
        tokens, _, _, positions, *documents = micro_batch
        model = self.model
        if x is None:
            x = model.embedded(tokens)
        rope = rope_tables(model.cfg, positions, accumulation_dtype(self.dtype))
        attention = model.attention.within(*documents) if documents else model.attention
        run_layer = self.layer_runners[this.chunk](model, rope, attention)
        for i in self.parts[this.chunk]:
            x = run_layer(i, x)
        return x

    def run_backward(self, this: Pass, there: Live, dy: Tensor | None) -> Tensor | None:
        """Run a part's backward from dy (B, n, C), None: from the loss's. Returns dx,
        None where tokens went in."""
        there.graph.backward((there.dy if dy is None else dy,))
        return there.graph.input_grads[0] if there.graph.input_grads else None

    def warm_up(self, micro_batch: tuple) -> None:
        """Run all parts once there and back, on zeros and without messages: whatever waits for the
        whole device the first time (compilers, loaders, memory that ranks map from each other)
        would wait for a message of a stage that waits itself. Gradients are spoiled: before a
        step."""
        silent = copy.copy(self)
        silent.links = defaultdict(SilentLink)
        silent.order = []
        for chunk in range(len(self.parts)):
            silent.order += [Pass(True, 0, chunk), Pass(False, 0, chunk)]
        silent.forward_backward([micro_batch])

    # -- evaluation

    @torch.no_grad()
    def __call__(self, tokens: Tensor, labels: Tensor, scale: Tensor | None, positions: Tensor,
                 *documents, each: bool = True) -> Tensor:
        """Return of each token its loss (B, T), as model.token_losses does: on the last stage; 0
        elsewhere."""
        assert each, "a stage has no logits of its own"
        micro_batch = tokens, labels, scale, positions, *documents
        losses = torch.zeros(labels.shape, device=self.device,
                             dtype=accumulation_dtype(self.dtype))
        for chunk in range(len(self.parts)):
            this = Pass(True, 0, chunk)
            x = self.arrived(self.receive(this, micro_batch))
            y = self.run_layers(this, micro_batch, x)
            if not self.is_last(this):
                self.links["forward_out"].send(y)
                continue
            losses = self.model.result(y, labels, scale, True)
        self.finish_messages()
        return losses
