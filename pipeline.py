"""Pipeline parallelism: a step is an order of passes, and a loop over messages between stages.

P stages have V parts of the model each: part c of P*V, layers [c*L/(P*V), (c+1)*L/(P*V)),
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

What a pass hands to the next stage is a message on a communicator of its kind, and so on a stream
of its own: forward messages travel under backward passes, and back. On GPUs the host waits for
none.

    message         launched                            hidden under     waited for
    x, forward      to send: behind its pass            the next passes  when the link's next
                                                                         message but one is sent
                    to receive: before the pass that    that pass        before its own pass
                    comes before its own
    dx, backward    likewise                            likewise         likewise

`--overlap` without `pipeline` receives a message when its pass is due.

Left out: passes for weights' gradients alone (zero bubble), which keep what long sequences have no
room for; embedding and head by columns of the vocabulary.

Legend: P stages, V parts of the model on a stage, c one of all P*V parts, L layers, M
micro-batches, B sequences of one, n tokens of a sequence that lie on a rank, C width.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import LLaMA
from ops import accumulation_dtype, run_detached
from ranks import ConfigError, Groups, first_error

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
    return (
        f"{micro_batches} micro-batches are no multiple of {stages} stages, by which parts of "
        "a stage take turns"
    )


def pipeline_order(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return a stage's passes of a step. With several parts on a stage `stages` micro-batches go
    through one before they go through the next (Megatron's order)."""
    assert no_order(stages, chunks, micro_batches) is None
    turns = [
        (micro_batch, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for micro_batch in range(micro_batches)[first : first + stages]
    ]
    forward = [Pass(True, *turn) for turn in turns]
    backward = [Pass(False, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in turns]
    # a micro-batch's backward begins when it is through the last part, on the last stage at once;
    # an earlier one runs a forward more for each stage behind it, two if several parts take turns
    behind = stages - 1 - stage
    first = behind if chunks == 1 else (chunks - 1) * stages + 2 * behind
    first = min(first, len(turns))
    in_turn = itertools.chain(*zip(forward[first:], backward))
    return [*forward[:first], *in_turn, *backward[len(turns) - first :]]


def in_flight(order: list[Pass], chunk: int) -> int:
    """Return the most passes of a part that wait for their backward at a time."""
    return max(
        itertools.accumulate(1 if this.forward else -1 for this in order if this.chunk == chunk)
    )


# ---------------------------------------------------------------------------- parts of the model


def keep_stage(model: LLaMA, stage: int, stages: int, chunks: int) -> list[range]:
    """Leave of a model what lies on a stage. Returns the layers of its parts, which differ by one
    at most."""
    layers, count = model.cfg.layers, stages * chunks
    parts = [
        range(part * layers // count, (part + 1) * layers // count)
        for part in range(stage, count, stages)
    ]
    for i in set(range(layers)).difference(*parts):
        model.blocks[i] = nn.Module()  # elsewhere; those here keep their numbers and names
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None
    return parts


# ---------------------------------------------------------------------------- messages


class Link:
    """Messages from one stage to another, in order, each behind what compute has to do so far: on
    the stream that NCCL has for their communicator, or on gloo's threads. The wait() of what is
    launched lets compute wait, with gloo the host."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.leaving = deque()  # tensors, which live until they are there, and their works

    def launch(self, way: Callable, x: Tensor) -> dist.Work:
        """Launch the way of a tensor, dist.isend or dist.irecv, as a batch of one: it takes the
        group's communicator, where without a batch NCCL makes another one, amid a step."""
        message = dist.P2POp(way, x, group=self.group, group_peer=1 - self.group.rank())
        return dist.batch_isend_irecv([message])[0]

    def send(self, x: Tensor) -> None:
        """Launch the way of a tensor. Two may be under way: more would take memory."""
        x = x.contiguous()
        self.leaving.append((x, self.launch(dist.isend, x)))
        self.finish(2)  # hidden by the passes since: it was received under them

    def finish(self, under_way: int = 0) -> None:
        """Let compute wait for what leaves, but so many messages."""
        while len(self.leaving) > under_way:
            _, work = self.leaving.popleft()
            work.wait()


def make_links(groups: Groups, chunks: int) -> dict[tuple, Link]:
    """Return this stage's links by (their messages go forward, they leave from here). Each pair of
    stages and direction has a communicator of its own: none waits for another's messages. A
    collective of all ranks."""
    links = {}
    for source in range(groups.pp if chunks > 1 else groups.pp - 1):
        target = (source + 1) % groups.pp  # of forward messages; backward ones go the other way

        def key(stage, r, tp_rank):
            return r, tp_rank, source if stage == target else stage

        for forward, begin in ((True, source), (False, target)):
            group = groups.by_position(f"messages {forward} {source}", key)
            if groups.stage in (source, target):
                links[forward, groups.stage == begin] = Link(group)
    return links


# ---------------------------------------------------------------------------- the pipeline


@dataclass(eq=False, repr=False)
class Pipeline:
    """A stage of a model, which runs a step's passes: as LLaMA, it has forward_backward, and a call
    evaluates. Making one is a collective of all ranks."""

    model: LLaMA  # of which `keep_stage` has left `parts`
    parts: list[range]
    layer_runners: list  # of each part: model.run_blocks, offload.ChunkedLayers.start ...
    groups: Groups
    order: list[Pass]  # of a step
    device: torch.device
    dtype: torch.dtype  # of activations
    overlap: bool = True  # messages are received ahead

    def __post_init__(self):
        self.first = 0 if self.model.embed else None  # which of its parts is the model's first ...
        self.last = len(self.parts) - 1 if self.model.head else None  # ... and last
        self.links = make_links(self.groups, len(self.parts))
        self.root = torch.zeros((), device=self.device, requires_grad=True)  # of all graphs

    def between_layers(self, micro_batch: tuple) -> Tensor:
        """Return room for what travels, (B, n, C)."""
        tokens, *_ = micro_batch
        return torch.empty(*tokens.shape, self.model.cfg.dim, dtype=self.dtype, device=self.device)

    def receive(self, micro_batch: tuple, this: Pass) -> tuple:
        """Launch the way here of what a pass needs. Returns what lets compute wait for it, and it;
        None: nothing comes."""
        if this.chunk == (self.first if this.forward else self.last):
            return None, None
        x = self.between_layers(micro_batch)
        return self.links[this.forward, False].launch(dist.irecv, x), x

    def run_part(
        self, chunk: int, micro_batch: tuple, per_token: bool, x: Tensor | None = None
    ) -> Tensor:
        """Return the result of a part's layers, (B, n, C), on x like it; None: on the embedding's
        of the tokens. Of the model's last part, its loss; per_token: of each token."""
        tokens, labels, scale, positions, *documents = micro_batch
        own = self.model.select_tp_tokens(positions)
        if x is None:
            x = self.model.embed_tokens(tokens, own)
        y = self.model.run_layers(
            self.parts[chunk], self.layer_runners[chunk], x, positions, *documents
        )
        return self.model.apply_head(y, labels, scale, per_token, own) if chunk == self.last else y

    # -- a step

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Run a step's micro-batches, each the arguments of LLaMA.forward. Returns the sum of the
        losses that are computed here: 0 but on the last stage.

        A pass: launch the receiving of the next one's message; let compute wait for its own; run
        its part forward, which leaves a graph, or that graph backward; send what comes out, behind
        it, unless it is the loss or the gradient of tokens.
        """
        micro_batches = list(micro_batches)
        loss = torch.zeros((), device=self.device, dtype=accumulation_dtype(self.dtype))
        graphs = {}  # of passes that have not come back
        messages = (self.receive(micro_batches[this.micro_batch], this) for this in self.order)
        arriving = deque(itertools.islice(messages, int(self.overlap)))  # launched as it is drawn
        for this in self.order:
            arriving.extend(itertools.islice(messages, 1))  # the next pass's, hidden by this one
            work, x = arriving.popleft()
            if work:
                work.wait()  # hidden by the pass before
            key = this.micro_batch, this.chunk
            if this.forward:
                micro_batch = micro_batches[this.micro_batch]
                graphs[key], results = self.run_forward(this.chunk, x, micro_batch)
            else:
                results = graphs.pop(key)([x])  # from x; None: from the loss
            if this.forward and this.chunk == self.last:
                loss += results[0]
            else:
                for y in results:  # none, where tokens went in
                    self.links[this.forward, True].send(y)
        for link in self.links.values():
            link.finish()  # in the open: it is the last of a step
        return loss

    def run_forward(
        self, chunk: int, x: Tensor | None, micro_batch: tuple
    ) -> tuple[Callable, list[Tensor]]:
        """Return what run_detached does of a part: its graph, and [run_part's]. Of the model's last
        part the graph holds the head's gradient, which is as large as the head: its backward is
        the next pass."""
        inputs = [] if x is None else [x]
        run = functools.partial(self.run_part, chunk, micro_batch, False)
        return run_detached(self.root, run, *inputs)

    def warm_up(self, micro_batch: tuple) -> None:
        """Run all parts once there and back, on zeros and without messages: whatever waits for the
        whole device the first time (compilers, loaders, memory that ranks map from each other)
        would wait for a message of a stage that waits itself. Gradients are spoiled: before a
        step. Raises ConfigError if parts hand on what has no room in a message. A collective."""
        error = ""
        for chunk in range(len(self.parts)):
            x = None if chunk == self.first else self.between_layers(micro_batch).zero_()
            graph, results = self.run_forward(chunk, x, micro_batch)
            if chunk != self.last and results[0].dtype != self.dtype:
                error = (
                    f"layers hand on {results[0].dtype}, and stages {self.dtype}: let the "
                    "last layer of a part cast it"
                )
            graph([None] if chunk == self.last else results)
        if self.root.is_cuda:  # its sums over replicas must not meet those of the first step
            torch.cuda.synchronize()
        if error := first_error(error):
            raise ConfigError(error)

    # -- evaluation

    @torch.no_grad()
    def __call__(self, *micro_batch, per_token: bool = True) -> Tensor:
        """Return of each token its loss (B, T), as `each` of LLaMA.forward: on the last stage; 0
        elsewhere."""
        assert per_token, "a stage has no logits of its own"
        losses = torch.zeros_like(micro_batch[0], dtype=accumulation_dtype(self.dtype))
        for chunk in range(len(self.parts)):
            work, x = self.receive(micro_batch, Pass(True, 0, chunk))
            if work:
                work.wait()
            y = self.run_part(chunk, micro_batch, per_token, x)
            if chunk == self.last:
                losses = y
            else:
                self.links[True, True].send(y)
        for link in self.links.values():
            link.finish()
        return losses
