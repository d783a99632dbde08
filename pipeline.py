"""Pipeline parallelism: each stage holds some layers, and sends its results to the next stage.

The model's layers are divided into P stages. A stage is a group of ranks, which share model states
and sequences among themselves as if there were no other stage. The embedding is on the first stage,
the head on the last. If they are one matrix (ModelConfig.tied), both stages hold a copy of it, and
shard.py keeps the copies equal (States.sum_tied_copies).

With --pp-chunks V, each stage has V *virtual stages* (Megatron's interleaving; InternEvo's
num_chunks). A virtual stage is a range of layers, and its number is 0 ... V-1 on its stage. A
sequence then goes round the stages V times. Example: 8 layers, P = 2, V = 2.

    stage 0    virtual stage 0: embedding, layers 0-1    virtual stage 1: layers 4-5
    stage 1    virtual stage 0: layers 2-3               virtual stage 1: layers 6-7, head

A step has M micro-batches. A *pass* takes one micro-batch through one virtual stage, forward or
backward. `pipeline_order` lists the passes of a stage: first some forward passes, then one forward
and one backward pass in turn (1F1B), then the backward passes that are left. In this picture time
goes to the right. 0, 1, 2 and 3 are the forward passes of the micro-batches; aa, bb, cc and dd are
their backward passes, which take twice as long. Dots are idle time:

              P = 4, M = 4, V = 1     P = 4, M = 4, V = 2
    stage 0   0123......aa.bb.cc.dd   01230123......aa.bb.cc.ddaabbccdd
    stage 1   .012....aa3bb.cc.dd..   .01230123...aa.bb.cc.ddaabbccdd..
    stage 2   ..01..aa2bb3cc.dd....   ..0123012.aa3bb.cc.ddaabbccdd....
    stage 3   ...0aa1bb2cc3dd......   ...01230aa1bb2cc3ddaabbccdd......

With V = 2 a virtual stage has half as many layers, so a character of the right picture stands for
half the time: the step takes 33 / 2 = 16.5 units instead of 21. If all virtual stages take equally
long, the idle share of the step is

    idle / total = (P - 1) / (V*M + P - 1)

Here this is 3/7 for V = 1, and 3/11 for V = 2. A larger M makes it smaller, too.

A forward pass sends activations x to the next stage, and a backward pass sends their gradient dx to
the stage before. A *link* carries the messages of one kind, x or dx, between two neighbouring
stages. Each link has a communicator of its own, and so a stream of its own. So x overlaps with
backward passes, and dx with forward passes. On GPUs only the compute stream waits for a message;
the host does not.

    message     launched                             overlaps with      compute waits for it
    sent        after the pass that computes it      the next passes    when its link has launched
                                                                        two more messages, or at the
                                                                        end of the step
    received    one pass early: before pass i - 1,   pass i - 1         before pass i
                if pass i needs it

Without `pipeline` in --overlap, receiving is launched right before pass i, and is exposed. The same
holds for the first backward pass of a stage that runs all its forward passes first, as a stage does
if there are few micro-batches. Its dx is computed after the last forward pass, which therefore does
not hide it, and dx may depend on that pass. If that pass had to wait for the whole GPU, for example
because a kernel is loaded, it would wait for dx, and so for itself. Late receiving prevents this
for a single stage. Two stages that wait at once could still wait for each other. So
Pipeline.warm_up makes the calls that wait for the whole GPU before the first step.

If the embedding and the first layers are frozen, the first virtual stages may need no backward
(LLaMA.forward_only_layers). Then no dx is sent to them, and their backward passes do nothing. These
passes stay in the order above.

Left out: separate passes for the gradients of weights (zero bubble), which need more memory than
long sequences leave; embedding and head split along the vocabulary.

Legend: P stages, V virtual stages per stage, M micro-batches per step, B sequences per micro-batch,
T tokens per sequence, n of them on a rank between a layer's products, C width.
"""

import functools
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
    """One micro-batch goes through one virtual stage, forward or backward."""

    forward: bool
    micro_batch: int
    virtual_stage: int  # 0 ... V-1


def why_no_order(stages: int, virtual_stages: int, micro_batches: int) -> str | None:
    """Return why no order of passes exists for these numbers, or None if one exists.
    virtual_stages: V, on each stage."""
    if virtual_stages == 1 or micro_batches % stages == 0:
        return None
    return (
        f"{micro_batches} micro-batches are no multiple of {stages} stages, and the virtual stages "
        f"of a stage take turns every {stages} micro-batches"
    )


def pipeline_order(stage: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a stage in a step, in order.

    If V > 1, P micro-batches go through virtual stage 0, then the same ones through virtual stage
    1, and so on; then the next P micro-batches (Megatron's order). Backward passes visit the
    virtual stages in reverse. With P = 2, V = 2 and M = 4, the forward passes (micro-batch, virtual
    stage) are 00 10 01 11 20 30 21 31, and the backward passes are 01 11 00 10 21 31 20 30.
    """
    assert why_no_order(stages, virtual_stages, micro_batches) is None
    turns = []  # (micro-batch, virtual stage) of each forward pass, in order
    for first in range(0, micro_batches, stages):
        group = range(first, min(first + stages, micro_batches))
        for virtual_stage in range(virtual_stages):
            turns += [(micro_batch, virtual_stage) for micro_batch in group]
    forward = [Pass(True, micro_batch, v) for micro_batch, v in turns]
    backward = [Pass(False, micro_batch, virtual_stages - 1 - v) for micro_batch, v in turns]

    # Stage s begins with this many forward passes (Megatron's warm-up). After them, one forward and
    # one backward pass alternate
    #     V = 1:   P - 1 - s                     one per later stage
    #     V > 1:   (V - 1) P + 2 (P - 1 - s)     P micro-batches through each virtual stage except
    #                                            the last one, and two per later stage
    # On the last stage, s = P - 1, the next forward pass then takes micro-batch 0 through the
    # model's last virtual stage. The backward pass of micro-batch 0 follows at once
    stages_after = stages - 1 - stage
    if virtual_stages == 1:
        only_forward = stages_after
    else:
        only_forward = (virtual_stages - 1) * stages + 2 * stages_after
    only_forward = min(only_forward, len(turns))

    order = forward[:only_forward]
    for one_forward, one_backward in zip(forward[only_forward:], backward):
        order += [one_forward, one_backward]
    order += backward[len(turns) - only_forward :]
    return order


def received_late(order: list[Pass]) -> int | None:
    """Return the index in `order` of the pass whose message is not received one pass early, or
    None if there is none. It is the first backward pass, if all forward passes come before it (see
    the top of this file)."""
    forward_passes = sum(step_pass.forward for step_pass in order)
    all_forward_first = all(step_pass.forward for step_pass in order[:forward_passes])
    return forward_passes if all_forward_first else None


def max_in_flight(order: list[Pass], virtual_stage: int) -> int:
    """Return the most micro-batches that have gone forward through a virtual stage and wait for
    their backward pass there."""
    waiting = most = 0
    for step_pass in order:
        if step_pass.virtual_stage == virtual_stage:
            waiting += 1 if step_pass.forward else -1
            most = max(most, waiting)
    return most


# ---------------------------------------------------------------------------- layers of a stage


def layers_of_stage(layers: int, stage: int, stages: int, virtual_stages: int) -> list[range]:
    """Return the layers of each virtual stage of a stage. The numbers of layers of any two virtual
    stages differ by at most one. layers: of the whole model."""
    count = stages * virtual_stages  # virtual stages of the whole model
    return [
        range(i * layers // count, (i + 1) * layers // count) for i in range(stage, count, stages)
    ]


@functools.cache
def most_layers_of_a_stage(layers: int, stages: int, virtual_stages: int) -> int:
    """Return how many layers the largest stage has. The arguments are those of layers_of_stage."""
    return max(
        sum(map(len, layers_of_stage(layers, stage, stages, virtual_stages)))
        for stage in range(stages)
    )


def keep_stage(model: LLaMA, stage: int, stages: int, virtual_stages: int) -> list[range]:
    """Remove from a model what belongs to other stages: layers, embedding, final norm and head. A
    tied matrix stays on the first stage as embedding, and on the last one as head. Returns the
    layers of each virtual stage of this stage."""
    layers = model.cfg.layers
    kept = layers_of_stage(layers, stage, stages, virtual_stages)
    for i in set(range(layers)).difference(*kept):
        model.blocks[i] = nn.Module()  # empty, so that the other layers keep their numbers
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = None
        model.head = None
    return kept


# ---------------------------------------------------------------------------- messages


class Link:
    """Messages of one kind, x or dx, between this stage and a neighbour, in order.

    A message starts when the compute stream has run everything that the host enqueued before it. It
    runs on the stream that NCCL has for the link's communicator, or on gloo's threads. `launch`
    returns a dist.Work. Its wait() makes the compute stream wait for the message, and the host goes
    on. With gloo, the host itself waits.
    """

    def __init__(self, group: dist.ProcessGroup, operation: Callable, device: torch.device):
        """operation: what this rank does with messages, dist.isend or dist.irecv. A collective of
        the group.

        NCCL connects two ranks and allocates memory when they launch their first message, and each
        launch returns only when the partner has launched the same message. So the first message is
        sent here. In a step, this stage might wait at one link while its partner waits at another:
        a deadlock.
        """
        self.group = group  # this rank and its partner
        self.sending = deque()  # (tensor, work): the tensor has to live until it is sent
        self.launch(operation, torch.zeros(1, device=device)).wait()

    def launch(self, operation: Callable, x: Tensor) -> dist.Work:
        """Launch dist.isend or dist.irecv of x.

        It is launched as a batch of one, because a batch uses the group's communicator. Without a
        batch, NCCL would make another communicator in the middle of a step.
        """
        message = dist.P2POp(operation, x, group=self.group, group_peer=1 - self.group.rank())
        return dist.batch_isend_irecv([message])[0]

    def send(self, x: Tensor) -> None:
        """Launch sending x. Then let compute wait for older messages, so that at most two are under
        way: this one and the one before it. Each message under way holds the memory of its
        tensor."""
        x = x.contiguous()
        self.sending.append((x, self.launch(dist.isend, x)))
        self.finish(2)  # the passes since that older message was launched hide this wait

    def finish(self, under_way: int = 0) -> None:
        """Let compute wait until at most `under_way` messages are still being sent."""
        while len(self.sending) > under_way:
            _, work = self.sending.popleft()
            work.wait()


@dataclass
class Links:
    """A stage's links to its neighbours. None: it has no such neighbour."""

    x_in: Link | None = None  # from the stage before
    x_out: Link | None = None  # to the stage after
    dx_in: Link | None = None  # from the stage after
    dx_out: Link | None = None  # to the stage before

    def incoming(self, forward: bool) -> Link | None:
        return self.x_in if forward else self.dx_in

    def outgoing(self, forward: bool) -> Link | None:
        return self.x_out if forward else self.dx_out

    def finish(self) -> None:
        """Let compute wait until all messages of this stage are sent."""
        for link in (self.x_out, self.dx_out):
            if link:
                link.finish()


def make_links(groups: Groups, virtual_stages: int, device: torch.device) -> Links:
    """Make this stage's links. Each pair of neighbours has a communicator for x and another one for
    dx, so that no message waits for a message of another link. A collective of all ranks.

    If V > 1, the stage after the last one is the first one: a sequence goes round. All ranks make
    links in the same order, pair by pair, so that none waits for a partner that waits for it.
    """
    links = Links()
    pairs = groups.pp if virtual_stages > 1 else groups.pp - 1
    for before in range(pairs):
        after = (before + 1) % groups.pp

        # Rank (before, r, tp_rank) and rank (after, r, tp_rank) get the same key, so they are a
        # pair. A rank of any other stage is alone with its key
        def pair_of(stage, r, tp_rank):
            return r, tp_rank, (before if stage == after else stage)

        for_x = groups.by_position(f"x from stage {before}", pair_of)
        for_dx = groups.by_position(f"dx to stage {before}", pair_of)
        if groups.stage == before:
            links.x_out = Link(for_x, dist.isend, device)
            links.dx_in = Link(for_dx, dist.irecv, device)
        if groups.stage == after:
            links.x_in = Link(for_x, dist.irecv, device)
            links.dx_out = Link(for_dx, dist.isend, device)
    return links


# ---------------------------------------------------------------------------- the pipeline


@dataclass(eq=False, repr=False)
class Pipeline:
    """One stage of a model. It has the same two calls as a LLaMA: forward_backward(micro_batches)
    trains, and pipeline(*micro_batch) evaluates. Making one is a collective of all ranks."""

    model: LLaMA  # after keep_stage
    virtual_stages: list[range]  # the layers of each virtual stage, from keep_stage
    # the layer_runner of each virtual stage (model.py): model.run_blocks, ChunkedLayers.start ...
    layer_runners: list
    groups: Groups
    order: list[Pass]  # the passes of a step, from pipeline_order
    device: torch.device
    dtype: torch.dtype  # of activations
    overlap: bool = True  # receive a message one pass ahead

    def __post_init__(self):
        self.links = make_links(self.groups, len(self.virtual_stages), self.device)
        # run_detached needs a tensor that requires a gradient, so that autograd records a graph
        self.root = torch.zeros((), device=self.device, requires_grad=True)

    def has_embedding(self, virtual_stage: int) -> bool:
        """Return whether this is the model's first virtual stage, whose input is tokens."""
        return self.model.embed is not None and virtual_stage == 0

    def has_head(self, virtual_stage: int) -> bool:
        """Return whether this is the model's last virtual stage, whose result is the loss."""
        return self.model.head is not None and virtual_stage == len(self.virtual_stages) - 1

    def is_forward_only(self, virtual_stage: int) -> bool:
        """Return whether a virtual stage has no backward, because its weights and all weights
        before them are frozen. The next virtual stage sends it no dx."""
        end = self.virtual_stages[virtual_stage].stop
        is_last = self.has_head(virtual_stage)
        return 0 < end <= self.model.forward_only_layers and not is_last

    def sends_dx(self, virtual_stage: int) -> bool:
        """Return whether this virtual stage sends dx to the one before. The model's first virtual
        stage does not, and neither does one whose predecessor has no backward
        (is_forward_only)."""
        start = self.virtual_stages[virtual_stage].start
        forward_only_before = 0 < start <= self.model.forward_only_layers
        return not forward_only_before and not self.has_embedding(virtual_stage)

    def empty_message(self, micro_batch: tuple) -> Tensor:
        """Return an uninitialised tensor of the shape of a message, x or dx: (B, n, C)."""
        tokens, *_ = micro_batch
        return torch.empty(*tokens.shape, self.model.cfg.dim, dtype=self.dtype, device=self.device)

    def launch_receive(
        self, needed_by: Pass, micro_batches: list[tuple]
    ) -> tuple[dist.Work, Tensor] | tuple[None, None]:
        """Launch receiving the message that a pass needs. Returns the work to wait for, and the
        tensor that will hold the message; or (None, None), if the pass needs no message."""
        virtual_stage = needed_by.virtual_stage
        if needed_by.forward and self.has_embedding(virtual_stage):
            return None, None  # it starts from tokens
        if not needed_by.forward and self.has_head(virtual_stage):
            return None, None  # it starts from the loss
        if not needed_by.forward and self.is_forward_only(virtual_stage):
            return None, None  # it does nothing
        x = self.empty_message(micro_batches[needed_by.micro_batch])
        return self.links.incoming(needed_by.forward).launch(dist.irecv, x), x

    def run_virtual_stage(
        self, virtual_stage: int, micro_batch: tuple, per_token: bool, x: Tensor | None = None
    ) -> Tensor:
        """Run the layers of a virtual stage on x (B, n, C), and return their result (B, n, C).

        If the virtual stage has the embedding, x is None. If it has the head, the result is the
        loss, or with per_token the loss of each token.
        """
        tokens, labels, scale, positions, *documents = micro_batch
        positions_of_x = self.model.select_tp_tokens(positions)
        if x is None:
            x = self.model.embed_tokens(tokens, positions_of_x)
        layers = self.virtual_stages[virtual_stage]
        layer_runner = self.layer_runners[virtual_stage]
        y = self.model.run_layers(layers, layer_runner, x, positions, *documents)
        if self.has_head(virtual_stage):
            return self.model.apply_head(y, labels, scale, per_token, positions_of_x)
        return y

    # -- a step

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Run the passes of a step. A micro-batch is a tuple of the arguments of LLaMA.forward.
        Returns the sum of the losses on the last stage, and 0 on the remaining stages.

        Each turn of the loop runs one pass:

            1. launch receiving the message that this pass needs, unless the last turn did so, and
               the message that the next pass needs, if it is received early
            2. wait for the message that this pass needs
            3. run the virtual stage forward, which saves a graph; or run that graph backward
            4. send the result; the loss is kept, and some backward passes have no result
        """
        micro_batches = list(micro_batches)
        loss = torch.zeros((), device=self.device, dtype=accumulation_dtype(self.dtype))
        backward_fns = {}  # (micro-batch, virtual stage) -> backward of the graph that is saved

        # the passes whose messages are received while the pass before runs, which hides them
        early = set()
        if self.overlap:
            early = set(range(1, len(self.order))) - {received_late(self.order)}
        receiving = {}  # the number of a pass -> (work, x) of the message that it needs
        for i, this_pass in enumerate(self.order):
            if i not in receiving:
                receiving[i] = self.launch_receive(this_pass, micro_batches)
            if i + 1 in early:
                receiving[i + 1] = self.launch_receive(self.order[i + 1], micro_batches)
            work, x = receiving.pop(i)
            if work:
                work.wait()  # for this pass's message, hidden by the pass before

            virtual_stage = this_pass.virtual_stage
            key = this_pass.micro_batch, virtual_stage
            if this_pass.forward:
                micro_batch = micro_batches[this_pass.micro_batch]
                backward_fns[key], results = self.run_forward(virtual_stage, x, micro_batch)
            else:  # x is a gradient dx. If x is None, backward starts from the loss or does nothing
                results = backward_fns.pop(key)([x])

            if this_pass.forward and self.has_head(virtual_stage):
                loss += results[0]
            else:
                for y in results:  # one message, or none (sends_dx)
                    self.links.outgoing(this_pass.forward).send(y)
        self.links.finish()  # exposed: no pass is left to hide the last message
        return loss

    def run_forward(
        self, virtual_stage: int, x: Tensor | None, micro_batch: tuple
    ) -> tuple[Callable, list[Tensor]]:
        """Run a virtual stage forward. Returns its backward function, which holds its graph, and a
        list of its one result (see ops.run_detached).

        If the virtual stage has the head, the graph also holds the gradient of the head's weight,
        because ops.head_loss computes it in forward. Only one such graph exists at a time, since
        its backward is the next pass.
        """
        run = functools.partial(self.run_virtual_stage, virtual_stage, micro_batch, False)
        if self.is_forward_only(virtual_stage):
            with torch.no_grad():
                return lambda output_grads: [], [run(x)]
        if self.sends_dx(virtual_stage):
            return run_detached(self.root, run, x)
        return run_detached(self.root, functools.partial(run, x))

    def warm_up(self, micro_batch: tuple) -> None:
        """Run all virtual stages once, forward and backward, without messages. The one with the
        embedding gets the micro-batch's tokens, and the others get zeros. Call this before the
        first step, because it changes the gradients.

        Some first calls wait until the GPU has finished all of its work: those that compile, load a
        kernel, or map other ranks' memory. In the middle of a step they would also wait for a
        message that is being received. Its sender may be waiting for this stage: a deadlock.

        Raises ConfigError if a virtual stage returns another dtype than messages have. A collective
        of all ranks.
        """
        error = ""
        for virtual_stage in range(len(self.virtual_stages)):
            if self.has_embedding(virtual_stage):
                x = None
            else:
                x = self.empty_message(micro_batch).zero_()
            backward, results = self.run_forward(virtual_stage, x, micro_batch)
            if self.has_head(virtual_stage):
                backward([None])
                continue
            if results[0].dtype != self.dtype:
                error = (
                    f"the layers of a stage return {results[0].dtype}, but messages between stages "
                    f"are {self.dtype}. Let the last layer of each virtual stage cast its result"
                )
            backward(results)
        if self.root.is_cuda:
            # backward has launched sums of gradients over replicas. They must end before the first
            # step launches collectives on other communicators
            torch.cuda.synchronize()
        if error := first_error(error):
            raise ConfigError(error)

    # -- evaluation

    @torch.no_grad()
    def __call__(self, *micro_batch, per_token: bool = True) -> Tensor:
        """Return the loss of each token (B, n) on the last stage, as LLaMA.forward with per_token
        does. On the remaining stages return zeros."""
        assert per_token, "a pipeline evaluates only the loss of each token"
        losses = torch.zeros_like(micro_batch[0], dtype=accumulation_dtype(self.dtype))
        for virtual_stage in range(len(self.virtual_stages)):
            forward = Pass(True, 0, virtual_stage)
            work, x = self.launch_receive(forward, [micro_batch])
            if work:
                work.wait()  # exposed: an evaluation receives nothing ahead
            y = self.run_virtual_stage(virtual_stage, micro_batch, per_token, x)
            if self.has_head(virtual_stage):
                losses = y
            else:
                self.links.x_out.send(y)
        self.links.finish()
        return losses
