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
    """Return the cases that this many ranks run on GPUs: test_all.py's float64 cases, and bf16
    cases with each attention kernel that runs here."""
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
    bf16_cases = [make_case(f"{ranks} dtype=bf16 {line}") for line in lines]
    for case in filter(is_usable, bf16_cases):
        cases += [case | {"device": "cuda", "kernel": name} for name in kernels]
    return cases


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
    """Ignore one waiting line of the source at a time, and print whether a case goes wrong then.

    It tries each line that makes a stream wait, that these cases reach, and that is not in
    `hidden`. It prints "RIGHT" if no case goes wrong. Runs on each rank.

    A line is called a *site*, such as "shard.States.reduce_unit:812:begins". It ends in "begins" if
    the line calls after_compute: a side stream's work waits for compute before it begins. Else it
    ends in "waits".
    """
    expose_races()
    print(f"DELAY_SEED={DELAY_SEED} repeats these delays", flush=True)
    torch.compiler.set_stance("force_eager")
    left_out = None  # the site that is ignored now
    reached, groups = [], {}  # for each case: the sites that this rank reached
    passed_on = {"wait", "wait_stream", "after_compute", "__enter__"}  # they wait for their caller

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
                    # delay the side stream's work, for which the ignored line would wait
                    with torch.cuda.stream(args[0]):
                        torch.cuda._sleep(10**6)

        return wait_unless_left_out

    torch.cuda.Stream.wait_event = may_be_left_out(torch.cuda.Stream.wait_event)
    DelayedMessage.wait_for_work = may_be_left_out(DelayedMessage.wait_for_work)

    # run all cases once, and note the sites that they reach
    cases_with_references = list(zip(cases, torch.load(folder / "references")))
    for case, reference in cases_with_references:
        reached.append(set())
        assert_equals_plain(case, groups, reference)
    reached_by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(reached_by_rank, reached)
    # for each case: the sites that any rank reached
    sites_by_case = [set().union(*sites_of_ranks) for sites_of_ranks in zip(*reached_by_rank)]

    # ignore one site after the other
    for left_out in sorted(set().union(*sites_by_case)):
        name, _, kind = left_out.split(":")
        if f"{name} {kind}" in hidden:
            continue
        goes_wrong = False
        reaching = [
            pair for pair, sites in zip(cases_with_references, sites_by_case) if left_out in sites
        ]
        for case, reference in 8 * reaching:  # several times, because delays are random
            try:
                assert_equals_plain(case, groups, reference)
            except AssertionError:  # it fails on all ranks or on none
                goes_wrong = True
                break
        print(f"without {left_out}: {'wrong' if goes_wrong else 'RIGHT'}", flush=True)


@needs_gpu
@parametrize(
    "ranks, least_wrong, hidden, lines",
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
def test_gpu_waits(ranks, least_wrong, hidden, lines, tmp_path):
    """If a line of the source does not wait, a case goes wrong.

    Catches a wait that is missing, or one that no case needs. least_wrong: how many waiting lines
    these cases must show at least. Two ranks need two GPUs, because gloo's collectives make the
    host wait.

    The waits in `hidden` are left out, each for one of these reasons:
        - The wait comes a whole step after the work that it waits for.
        - No work is under way when it waits: on one rank, or when a ring begins.
        - It waits for a message, for which NCCL's own work object may wait already.
        - The cases on one rank show it already.
    """
    if ranks > GPUS:
        pytest.skip(f"{GPUS} GPUs")
    cases = [make_case(f"{ranks} {line} device=cuda kernel=naive") for line in lines]
    torch.save([reference_of_case(case) for case in cases], tmp_path / "references")
    text = on_ranks(ranks, check_waits, cases, hidden, tmp_path, gpus=ranks)
    assert "RIGHT" not in text, text
    assert len(set(re.findall("without .*: wrong", text))) >= least_wrong, text


@needs_gpu
def test_gpu_attention_past_two_to_the_31():
    """Attention over a million tokens and 17 heads is right in its last head.

    The last head equals a run with this head only, and some rows of its second half equal the
    definition in float64. Catches an index past 2^31.
    """
    device, seq, heads = torch.device("cuda"), 2**20, 17  # 17 heads of 128: 2.28e9 elements, > 2^31
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

    rows = torch.arange(seq // 2 + 1, seq, seq // 9, device=device)
    q, k, v, do = (x[0, :, 0].double() for x in last)  # (T, D)
    scores = q[rows] @ k.t() / 128**0.5
    scores.masked_fill_(torch.arange(seq, device=device) > rows[:, None], -torch.inf)
    p = scores.softmax(-1)
    o = p @ v
    ds = p * (do[rows] @ v.t() - (do[rows] * o).sum(-1, keepdim=True))
    assert relative(whole[0][0, rows, -1], o) < 0.02  # 2 %: the rounding of bf16
    assert relative(whole[1][0, rows, -1], ds @ k / 128**0.5) < 0.02


@needs_gpu
def test_gpu_first_call_saves_nothing_on_the_host():
    """The first call of a kernel that writes into large arguments takes no page-locked host memory.

    As a control, the same kernel is compiled as if it did not write. Then PyTorch saves what it
    writes into, because the GPU's memory has never been fuller than now. Catches a first step that
    takes gigabytes of the host's memory, which no plan counts.
    """
    from torch._inductor.utils import fresh_cache

    def host_requests_of(backward) -> int:
        gate_up, dgate_up = torch.rand(2, 4096, 2 * 4096, device="cuda").bfloat16().unbind()
        da = torch.rand(4096, 4096, device="cuda").bfloat16()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.host_memory_stats()["active_requests.allocated"]
        with fresh_cache(), torch.compiler.set_stance("default"):
            backward(*gate_up.chunk(2, -1), da, *dgate_up.chunk(2, -1), False)
        return torch.cuda.host_memory_stats()["active_requests.allocated"] - before

    kernel = ops.swiglu_backward_into
    assert host_requests_of(kernel) == 0
    assert host_requests_of(ops.compiled(kernel.__wrapped__)) > 0


@needs_gpu
def test_gpu_float8_past_two_to_the_31():
    """An MLP in float8 on 131,072 tokens, whose middle has 3.8 billion numbers, is right.

    Its output and its input's gradient equal those of the two halves of the tokens bit for bit. In
    the gradients of its matrices, each half has scales of its own, so they agree up to the rounding
    of float8. Catches an index past 2^31 in our kernels, in the compiler's kernels and in the
    product.
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
    """Attention in two sequences of documents equals the definition in float64, in each document.

    A document has between one token and thousands of tokens. Catches attention across a document's
    border.
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
            # the second term: dq and dk are 0 in a document of one token
            size = y.norm() + 1e-3 * y.numel() ** 0.5
            assert (x - y).norm() < 0.01 * size, (cut, name)
