"""Test what only GPUs show: late streams, missing waits, kernels, and indices past 2^31.

A CPU has no concurrent streams, no copy engines, no allocator that reuses memory, and no kernels
with 32-bit indices. `make test-gpu` runs the cases of test_all.py with streams that are late. If
there is only one GPU, two ranks share it over gloo, without pipelines and without all-to-alls by
copies between GPUs.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import attention
import fp8
import ops
from test_all import (
    CASES,
    DELAY_SEED,
    GPUS,
    DelayedMessage,
    assert_equals_plain,
    compare_with_plain,
    expose_races,
    is_usable,
    make_case,
    needs_gpu,
    on_ranks,
    parametrize,
    reference_of_case,
    relative,
)


def gpu_cases(ranks: int) -> list[dict]:
    """Return this many ranks' cases for GPUs: those in float64, and some with real kernels."""
    cases = [
        case | {"device": "cuda", "kernel": "naive"}
        for case in CASES
        if case["ranks"] == ranks and case["dtype"] == "fp64"
    ]
    device = torch.device("cuda")
    kernels = [
        name
        for name in attention.KERNELS
        if name not in ("naive", "cpu") and attention.why_not(name, device, torch.bfloat16) is None
    ]
    lines = [
        f"model=wide block=norms micro=2 keep=mixed g={ranks} os={ranks}",
        f"model=wide block=norms sp={ranks} p={ranks} g={ranks} os={ranks}",
        f"model=wide block=norms sp={ranks} ring={ranks} keep=swapped os={ranks}",
        f"model=wide block=norms products=fp8 micro=2 keep=mixed p={ranks} g={ranks} os={ranks}",
        f"model=wide block=norms products=fp8 tp={ranks} mode=mtp",
    ]
    wide = [
        case
        for case in (make_case(f"{ranks} dtype=bf16 {line}") for line in lines)
        if is_usable(case)
    ]
    return cases + [case | {"device": "cuda", "kernel": name} for case in wide for name in kernels]


@needs_gpu
@parametrize("ranks", [1, 2, 4, 8])
def test_gpu_equals_one_process(ranks, tmp_path):
    """The float64 cases of test_all.py, and some with bf16 kernels, train as Plain does on GPUs.

    Streams are late. Catches what a CPU hides: streams that run concurrently.
    """
    if ranks > max(2, GPUS):
        pytest.skip(f"{GPUS} GPUs")
    compare_with_plain(ranks, gpu_cases(ranks), tmp_path, gpus=min(ranks, GPUS))


def check_waits(cases: list[dict], hidden: set[str], folder: Path) -> None:
    """Ignore one line that makes a stream wait at a time, and print whether a case goes wrong.

    It tries each line that these cases reach and that is not in `hidden`. Runs on each rank.
    """
    expose_races()
    print(f"DELAY_SEED={DELAY_SEED} repeats these delays", flush=True)
    torch.compiler.set_stance("force_eager")
    left_out, reached, groups = None, [], {}
    passed_on = {"wait", "wait_stream", "after_compute", "__enter__"}

    def may_be_left_out(wait: Callable) -> Callable:
        def wait_unless_left_out(*args):
            frame, through = sys._getframe(1), set()
            while frame.f_code.co_name in passed_on:
                through.add(frame.f_code.co_name)
                frame = frame.f_back
            begins = "after_compute" in through
            site = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"
            site += f":{frame.f_lineno}:{'begins' if begins else 'waits'}"
            reached[-1].add(site)
            if site != left_out:
                wait(*args)
                if begins and left_out and left_out.endswith("waits"):
                    with torch.cuda.stream(args[0]):  # the work that is waited for is late
                        torch.cuda._sleep(10**6)

        return wait_unless_left_out

    torch.cuda.Stream.wait_event = may_be_left_out(torch.cuda.Stream.wait_event)
    DelayedMessage.wait_for_work = may_be_left_out(DelayedMessage.wait_for_work)

    # run all cases once, and note the sites that they reach
    asked = list(zip(cases, torch.load(folder / "references")))
    for case, reference in asked:
        reached.append(set())
        assert_equals_plain(case, groups, reference)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, reached)
    reached_by = [
        set().union(*ranks) for ranks in zip(*every)
    ]  # for each case: the sites that any rank reached

    # ignore one site after the other
    for left_out in sorted(set().union(*reached_by)):
        name, _, what = left_out.split(":")
        if f"{name} {what}" in hidden:
            continue
        missed = False
        reaching = [pair for pair, sites in zip(asked, reached_by) if left_out in sites]
        for case, reference in 8 * reaching:  # several times, because delays are random
            try:
                assert_equals_plain(case, groups, reference)
            except AssertionError:  # it fails on all ranks or on none
                missed = True
                break
        print(f"without {left_out}: {'wrong' if missed else 'RIGHT'}", flush=True)


@needs_gpu
@parametrize(
    "ranks, shown, hidden, lines",
    [
        (
            1,
            8,
            {
                "optim.HostStates.begin waits",
                "shard.States.reduce_unit begins",
                "shard.States.reduce_unit waits",
                "shard.States.finish_gradients waits",
            },
            ["place=host micro=2", "place=host keep=swapped", "keep=neither micro=2"],
        ),
        (
            2,
            13,
            {
                "optim.HostStates.begin waits",
                "pipeline.Link.finish waits",
                "attention.Ring.__init__ waits",
                "offload.ChunkedLayers.load_group waits",
                "shard.States.reduce_unit waits",
            },
            [
                "p=2 g=2 os=2 keep=swapped",
                "p=2 g=2 os=2 place=host",
                "sp=2 groups=2 os=2 keep=mixed",
                "sp=2 ring=2 g=2 os=2",
                "tp=2 mode=msp",
                "tp=2 mode=mtp",
                "g=2 os=2 layout=inter place=host",
                "pp=2 micro=4",
                "pp=2 micro=4 keep=swapped model=deep",
            ],
        ),
    ],
)
def test_gpu_waits(ranks, shown, hidden, lines, tmp_path):
    """If a line of the source does not wait, a case goes wrong.

    Left out are the waits in `hidden`: a whole step hides them, or no work is under way at them (on
    one rank, or when a ring begins), or they are for messages, which NCCL's works may hold, or the
    test with one rank shows them. Two ranks need two GPUs, because gloo's collectives make the host
    wait. Catches a wait that is missing, or one that no case needs.
    """
    if ranks > GPUS:
        pytest.skip(f"{GPUS} GPUs")
    cases = [make_case(f"{ranks} {line} device=cuda kernel=naive") for line in lines]
    torch.save([reference_of_case(case) for case in cases], tmp_path / "references")
    text = on_ranks(ranks, check_waits, cases, hidden, tmp_path, gpus=ranks)
    assert "RIGHT" not in text and len(set(re.findall("without .*: wrong", text))) >= shown, text


@needs_gpu
def test_gpu_attention_past_two_to_the_31():
    """Attention over a million tokens and 17 heads is right in its last head.

    The last head equals a run with this head only, and its later rows equal the definition in
    float64. Catches an index past 2^31.
    """
    device, seq, heads = torch.device("cuda"), 2**20, 17
    op = attention.Attention(attention.pick_kernel("auto", device, torch.bfloat16))
    torch.manual_seed(0)
    inputs = [torch.randn(1, seq, heads, 128, device=device).bfloat16() for _ in range(4)]

    def passes(q, k, v, do) -> list[torch.Tensor]:
        o, lse = op.forward(q, k, v)
        return [o, *op.backward(lambda: (do, []), q, k, v, o, lse)]

    whole = passes(*inputs)
    last = [x[:, :, -1:].contiguous() for x in inputs]
    for ours, alone in zip(whole, passes(*last)):
        assert relative(ours[:, :, -1:], alone) < 1e-3
    at = torch.arange(seq // 2 + 1, seq, seq // 9, device=device)
    q, k, v, do = (x[0, :, 0].double() for x in last)  # (T, D)
    scores = q[at] @ k.t() / 128**0.5
    scores.masked_fill_(torch.arange(seq, device=device) > at[:, None], -torch.inf)
    p = scores.softmax(-1)
    o = p @ v
    ds = p * (do[at] @ v.t() - (do[at] * o).sum(-1, keepdim=True))
    assert relative(whole[0][0, at, -1], o) < 0.02
    assert relative(whole[1][0, at, -1], ds @ k / 128**0.5) < 0.02


@needs_gpu
def test_gpu_float8_past_two_to_the_31():
    """An MLP in float8 on 131,072 tokens, whose middle has 3.8 billion numbers, is right.

    Its output and its input's gradient equal those of the two halves bit for bit. The gradients of
    its matrices have other scales per half, so they agree as float8 does. Catches an index past
    2^31 in our kernels, in the compiler's and in the product.
    """
    device, tokens, dim, hidden = torch.device("cuda"), 2**17, 4096, 14336
    if not fp8.has_float8(device):
        pytest.skip("a GPU without float8")
    torch.manual_seed(0)
    gate_up, down = ops.Matrix(2 * hidden, dim), ops.Matrix(dim, hidden)
    matrices = gate_up, down
    products = fp8.Float8Products(dict.fromkeys(matrices, 0))
    for matrix in matrices:
        matrix.to(device, torch.bfloat16).products = products
        torch.nn.init.normal_(matrix.weight, std=matrix.std)
    norm = torch.ones(dim, device=device)
    x, dy = (torch.randn(tokens, dim, device=device).bfloat16() for _ in range(2))

    def passes(part: slice) -> list[torch.Tensor]:
        inputs = x[part].requires_grad_()
        wide = ops.project(gate_up, ops.norm_prologue(1e-5), inputs, norm)
        y = ops.project(down, ops.SWIGLU, wide)
        grads = torch.autograd.grad(y, [inputs, gate_up.weight, down.weight], dy[part])
        return [y.detach(), *grads]

    whole = passes(slice(None))
    middle = tokens // 2
    halves = [passes(slice(middle)), passes(slice(middle, None))]
    for ours, parts in zip(whole[:2], zip(*halves)):
        assert torch.equal(ours, torch.cat(parts))
    for ours, parts in zip(whole[2:], [*zip(*halves)][2:]):
        assert relative(ours, sum(part.float() for part in parts)) < 0.06


@needs_gpu
@parametrize("kernel", attention.KERNELS)
def test_gpu_documents(kernel):
    """Attention in two sequences of documents equals the definition in float64 per document.

    Documents have from one token to thousands. Catches attention across a document's border.
    """
    device = torch.device("cuda")
    if why := attention.why_not(kernel, device, torch.bfloat16, documents=True):
        pytest.skip(why)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 6000, heads, 128, device=device).bfloat16() for heads in (8, 2, 2, 8)]
    bounds = (0, 1, 2, 130, 131, 5000, 6000, 6064, 6065, 6600, 11999, 12000)
    documents = attention.Documents(bounds, torch.tensor(bounds, dtype=torch.int32, device=device))

    def passes(kernel: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        *inputs, do = inputs
        op = attention.Attention(kernel).with_documents(documents)
        o, lse = op.forward(*inputs)
        return [o, *op.backward(lambda: (do, []), *inputs, o, lse)]

    exact = passes("naive", *(t.double() for t in inputs))
    for name, ours, want in zip("o dq dk dv".split(), passes(kernel, *inputs), exact):
        for cut in documents.slices():
            x, y = (t.flatten(0, 1)[cut] for t in (ours, want))
            size = y.norm() + 1e-3 * y.numel() ** 0.5  # dq and dk are 0 in a document of one token
            assert (x - y).norm() < 0.01 * size, (cut, name)
