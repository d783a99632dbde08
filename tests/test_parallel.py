"""Show that the parts of sequences, matrices and the depth are each computed once."""

import itertools
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from pytest import approx

import attention
import pipeline
import tensor
import train
from ranks import Groups, gather_objects
from streams import CommStream
from test_all import (
    END_TOKEN,
    SEQ,
    SpoilingStream,
    evaluate_batch,
    make_case,
    make_run,
    on_ranks,
    parametrize,
)


@parametrize("seq, sp, ring", [(45, 3, 1), (24, 6, 2), (48, 8, 8), (72, 12, 4)])
def test_parts_of_a_sequence_are_all_of_it(seq, sp, ring):
    """The ranks that share a sequence hold each token once, and the ranks of a ring share the work
    equally: each has as much of the causal triangle as any other.

    Catches a token that no rank has, or that two ranks have, and a rank with more work.
    """
    of_rank = [attention.sequence_positions(seq, sp, ring, r).tolist() for r in range(sp)]
    assert sorted(i for tokens in of_rank for i in tokens) == list(range(seq))
    assert all(tokens == sorted(tokens) and len(tokens) == seq // sp for tokens in of_rank)
    if ring > 1:
        # a token at position i attends to i + 1 keys, so the sum of positions measures the work
        ranks_per_position = sp // ring  # ranks that split heads between them
        works = [
            sum(itertools.chain(*of_rank[first : first + ranks_per_position]))
            for first in range(0, sp, ranks_per_position)
        ]
        assert len(set(works)) == 1


def test_positions_restart_with_documents(group):
    """Positions, and the number of keys that a token sees, restart with each document.

    Catches positions or keys that go on across a document's border.
    """
    run, _, _ = make_run(make_case("1 docs=1"), {}, SpoilingStream)
    batch = train.load_batch(run, 0)
    tokens, positions = batch.tokens.flatten(0, 1), batch.positions.flatten(0, 1)
    expected = torch.zeros_like(positions)
    for i in range(1, SEQ):
        expected[:, i] = torch.where(tokens[:, i - 1] == END_TOKEN, 0, expected[:, i - 1] + 1)
    assert (expected[:, -1] < SEQ - 1).any()  # some sequence has a document's border
    assert torch.equal(positions, expected)
    # keys_seen is the mean of 2k - 1, and a token at position i sees k = i + 1 keys
    assert batch.keys_seen.item() == approx((2 * expected + 1).double().mean().item())


def test_tensor_parallel_ranks_exchange_tokens_with_or_without_sequences(monkeypatch):
    """Tensor-parallel ranks gather and scatter tokens, not features, of activations with shape
    (tokens, C) and (B, tokens, C).

    Catches a gather along the wrong dimension.
    """
    group = SimpleNamespace(tp=2, group=None)
    x = torch.arange(24.0).view(2, 4, 3)  # tp_rank 0 has x, and tp_rank 1 has x + 100
    monkeypatch.setattr(
        tensor, "all_gather", lambda out, x, group: out.copy_(torch.cat([x, x + 100]))
    )
    monkeypatch.setattr(
        tensor, "reduce_scatter", lambda out, x, group: out.copy_(2 * x[: len(out)])
    )
    for tokens in (x, x[0]):
        expected = torch.cat([tokens, tokens + 100], -2)
        assert tensor.TensorParallel.gather_tokens(group, tokens).equal(expected)
        part = tensor.TensorParallel.reduce_scatter_tokens(group, tokens)
        assert part.equal(2 * tokens.chunk(2, -2)[0])


@parametrize("stages, micro_batches, chunks", [(2, 4, 2), (4, 8, 2), (4, 8, 4)])
def test_pipeline_order_is_torchs(stages, micro_batches, chunks):
    """Stages run their passes in the order of torch's interleaved 1F1B schedule.

    Catches stages that wait for each other for ever.
    """
    from torch.distributed.pipelining import schedules

    for stage in range(stages):
        theirs = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
        vars(theirs).update(
            n_local_stages=chunks,
            microbatches_per_round=stages,
            pp_group_size=stages,
            _n_microbatches=micro_batches,
        )
        expected = [
            (
                action.computation_type == schedules.FORWARD,
                action.microbatch_index,
                action.stage_index // stages,
            )
            for action in theirs._calculate_single_rank_operations(stage)
            if action  # None: the stage is idle
        ]
        ours = pipeline.pipeline_order(stage, stages, chunks, micro_batches)
        assert [(p.forward, p.micro_batch, p.virtual_stage) for p in ours] == expected


class MessageLikeNccl:
    """Stands for the message that pipeline.Link.launch returns, and waits where NCCL waits.

    The first message of a link connects two ranks: launching it returns when both have launched it.
    Sending any message ends when the partner has launched receiving it. gloo does neither: it sends
    into a buffer.
    """

    launch = pipeline.Link.launch
    connected = set()  # links
    under_way = []  # messages that this rank has not waited for

    def __init__(self, link, operation, x):
        if link not in self.connected:
            self.connected.add(link)
            dist.monitored_barrier(link.group, timeout=timedelta(seconds=20))
        self.work = MessageLikeNccl.launch(link, operation, x)
        reply = {"group": link.group, "tag": 1}
        self.received = torch.zeros(1)
        if operation is dist.isend:
            self.reply = dist.irecv(self.received, group_src=1 - link.group.rank(), **reply)
        else:
            self.reply = dist.isend(self.received, group_dst=1 - link.group.rank(), **reply)
        self.under_way.append(self)

    def wait(self):
        if self in self.under_way:  # else wait_for_device has waited for it
            self.under_way.remove(self)
            self.work.wait(timedelta(seconds=20))
            self.reply.wait(timedelta(seconds=20))

    @classmethod
    def wait_for_device(cls):
        """Wait as a call does that waits for all work of a GPU, messages included."""
        for message in [*cls.under_way]:
            message.wait()


def pipeline_like_nccl_worker(case: dict) -> None:
    """Run a step and an evaluation of a pipeline, on each rank."""
    pipeline.Link.launch = lambda *message: MessageLikeNccl(*message)
    torch.compiler.set_stance("force_eager")
    run, model, states = make_run(case, {}, CommStream)
    links = [link for link in vars(model.links).values() if link]
    assert MessageLikeNccl.connected == set(links)
    train.load_random_weights(run, states)
    batch = train.load_batch(run, 0)
    model.warm_up(next(batch.micro_batches()))
    train.run_step(model, states, batch, 1e-3, 1.0)
    evaluate_batch(run, model, batch)


@parametrize(
    "line",
    [
        "2 pp=2",
        "2 pp=2 micro=4",
        "3 model=deeper pp=3",
        "4 model=deep pp=4 parts=2 micro=4",
        "4 model=deeper pp=2 parts=2 micro=2 g=2 os=2",
    ],
)
def test_pipelines_end_if_messages_wait_as_nccl_does(line):
    """All links are connected before the first step, and no stage waits for a partner that waits
    for this stage.

    Catches links that connect in the middle of a step, messages that are received in another order
    than they are sent, and so a step that never ends on GPUs.
    """
    case = make_case(line)
    on_ranks(case["ranks"], pipeline_like_nccl_worker, case)


def busy_device_worker(case: dict) -> None:
    """Run a step per forward pass of each stage, in which this pass waits for the whole device."""
    pipeline.Link.launch = lambda *message: MessageLikeNccl(*message)
    torch.compiler.set_stance("force_eager")
    run, model, states = make_run(case, {}, CommStream)
    train.load_random_weights(run, states)
    batch = train.load_batch(run, 0)
    model.warm_up(next(batch.micro_batches()))
    run_forward = model.run_forward
    turns = itertools.product(
        range(run.plan.pp), range(sum(step_pass.forward for step_pass in model.order))
    )
    for waiting_stage, waiting_turn in turns:
        turn = itertools.count()

        def forward_that_waits(*args):
            if (model.groups.stage, next(turn)) == (waiting_stage, waiting_turn):
                MessageLikeNccl.wait_for_device()
            return run_forward(*args)

        model.run_forward = forward_that_waits
        train.run_step(model, states, batch, 1e-3, 1.0)


@parametrize(
    "line",
    [
        "2 pp=2",
        "3 model=deeper pp=3 micro=2",
        "4 model=deep pp=4 micro=2",
        "4 model=deep pp=4 parts=2 micro=4",
    ],
)
def test_a_forward_pass_may_wait_for_the_whole_gpu(line):
    """A stage does not receive a message that depends on the pass that is running.

    Some calls of the host wait until the GPU has finished all of its work, messages included: those
    that free GPU memory or load a kernel. Here one forward pass of one stage does so per step.
    Catches a stage with few micro-batches that receives dx while it runs its last forward pass,
    whose result its partner needs to compute this dx. On a GPU such a step never ends.
    """
    case = make_case(line)
    on_ranks(case["ranks"], busy_device_worker, case)


@parametrize(
    "stage, stages, virtual_stages, micro_batches, late",
    [
        (0, 2, 1, 1, 1),  # F B
        (0, 3, 1, 2, 2),  # F F B B
        (1, 3, 1, 4, None),  # F F B F B F B B
        (2, 3, 1, 1, 1),  # F B on the last stage, whose B needs no message
        (0, 4, 2, 4, 8),
    ],
)
def test_messages_are_received_early(stage, stages, virtual_stages, micro_batches, late):
    """A message is received during the pass before, unless that is the last one of all forward
    passes, and all backward passes follow.

    Catches a pipeline that exposes its messages.
    """
    order = pipeline.pipeline_order(stage, stages, virtual_stages, micro_batches)
    assert pipeline.received_late(order) == late


def random_starts(sequences: int, seq: int, seed: int) -> torch.Tensor:
    """Return where the document of each token begins, (B, T), for documents of any lengths."""
    rng = torch.Generator().manual_seed(seed)
    starts = torch.zeros(sequences, seq, dtype=torch.int64)
    for row in starts:
        ends = torch.rand(seq, generator=rng) < torch.rand(1, generator=rng) ** 3
        row[1:] = torch.where(ends[:-1], torch.arange(1, seq), 0).cummax(0).values
    return starts


def documents_on_ring_worker(seq: int, ranks: int) -> None:
    """Compare attention inside documents on a ring with that over whole sequences, on each rank."""
    groups = Groups()
    stream = CommStream(torch.device("cpu"))
    ring = attention.Ring(groups, ranks, ranks, stream)
    for seed in range(12):
        rng = torch.Generator().manual_seed(seed)
        b, heads, kv_heads = 1 + seed % 3, 4, 2
        starts = random_starts(b, seq, seed)
        q, k, v, do = (
            torch.randn(b, seq, n, 8, generator=rng, dtype=torch.float64)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        whole = attention.ring_documents(starts, 1, 0)
        op = attention.Attention("cpu").with_documents(whole)
        o, lse = op.forward(q, k, v)
        expected = o, *op.backward(lambda: (do, []), q, k, v, o, lse)

        own = attention.sequence_positions(seq, ranks, ranks, ring.rank)
        documents = attention.ring_documents(starts, ranks, ring.rank)
        op = attention.Attention("cpu", 1 + seed % 2, ring=ring).with_documents(documents)
        inputs = [x[:, own] for x in (q, k, v)]
        o, lse = op.forward(*inputs)
        found = o, *op.backward(lambda: (do[:, own], []), *inputs, o, lse)
        for name, ours, all_tokens in zip("o dq dk dv".split(), found, expected):
            assert torch.allclose(ours, all_tokens[:, own], rtol=1e-12, atol=1e-12), (seed, name)

        # no pair of query and key is computed twice, or left out
        pairs = sum(gather_objects(documents.pairs()))
        assert pairs == whole.pairs() == (torch.arange(seq) - starts + 1).sum()


@parametrize("ranks", [2, 3, 4])
def test_documents_on_a_ring_are_those_of_the_whole_sequence(ranks):
    """On rings of 2, 3 and 4 ranks, attention stays inside documents of any lengths, forward and
    backward, with several sequences per micro-batch and with head groups.

    Catches a query that sees a key of another document, or misses one of its own.
    """
    on_ranks(ranks, documents_on_ring_worker, 12 * ranks, ranks)


def ring_sums_worker() -> None:
    """Sum gradients that a made-up kernel returns in bf16, on each rank of a ring of four."""
    ring = attention.Ring(Groups(), 4, 4, CommStream(torch.device("cpu")))
    op = attention.Attention("cpu", ring=ring)
    # one gradient per call: of three rectangles, and last of the square. Their sum is 258. From 256
    # to 512, numbers of bf16 are 2 apart, so in bf16 both 256 + 0.5 and 256 + 1 are 256 again
    gradients = iter((256.0, 0.5, 0.5, 1.0))

    def backward(do, q, k, v, o, lse, mask):
        gradient = next(gradients)
        return [torch.full_like(x, gradient) for x in (q, k, v)]

    op.kernel = replace(op.kernel, backward=backward)
    q, k, v, o, do = torch.zeros(5, 1, 8, 2, 4, dtype=torch.bfloat16)
    lse = torch.zeros(1, 1, 2, 8)
    dq, dk, dv = op.backward(lambda: (do, []), q, k, v, o, lse)
    # each step's rectangle has the late queries of this rank, and the early keys of another one
    for name, grad in {"dq": dq[:, 4:], "dk": dk[:, :4], "dv": dv[:, :4]}.items():
        assert grad.dtype == torch.bfloat16 and grad.eq(258).all(), (name, grad.unique())


def test_sums_of_groups_that_share_a_head_are_float32():
    """If groups of heads share a key/value head, dk and dv in bf16 are sums that are rounded once.

    Catches sums that are rounded after each group. Cases in bf16 pass in spite of this.
    """
    parts = iter((256.0, 1.0, 1.0, 0.0))  # in bf16, 256 + 1 is 256

    def backward(do, q, k, v, o, lse, mask):
        part = next(parts)
        return torch.zeros_like(q), torch.full_like(k, part), torch.full_like(v, part)

    op = attention.Attention("cpu", 4)
    op.kernel = replace(op.kernel, backward=backward)
    q, o, do = torch.zeros(3, 1, 8, 4, 16, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 1, 8, 1, 16, dtype=torch.bfloat16)
    _, dk, dv = op.backward(lambda: (do, []), q, k, v, o, torch.zeros(4, 1, 1, 8))
    assert dk.eq(258).all() and dv.eq(258).all()


def test_sums_of_a_ring_are_float32():
    """On a ring of four ranks, dq, dk and dv in bf16 are sums that are rounded only once.

    Catches sums of dk and dv that go around in bf16, and so are rounded on each rank. Cases that
    train on a ring of four in bf16 pass in spite of this, because the error is within their bounds.
    """
    on_ranks(4, ring_sums_worker)
