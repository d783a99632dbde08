"""Show that bench.py keeps its rows, counts correctly, and compares with peers that take the same
steps."""

import json
import shlex
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from pytest import approx, importorskip, raises, skip
from torch.distributed.elastic.utils.distributed import get_free_port

import bench
import hf
import peers
import planner
import streams
from model import MODELS
from ranks import ConfigError
from test_all import ROOT, finish, on_ranks, parametrize, run_rank, slow, start_processes


@slow
def test_bench_keeps_its_rows_when_it_is_stopped(tmp_path):
    """After Ctrl-C, bench.py writes the rows that it has.

    Catches rows that are lost.
    """
    process = subprocess.Popen(
        [sys.executable, ROOT / "bench.py", "--out", tmp_path],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # where tests run in the background, SIGINT is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if line.startswith("ours, short sequences:"):
            break
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "stopped; the rows so far are in" in text
    rows = [json.loads(line) for line in next(tmp_path.glob("*/machine.jsonl")).open()]
    assert [r["label"] for r in rows] == ["ours, short sequences"]
    first_line = f"tiny, 4 sequences of 256 tokens per step: {rows[0]['tgs']:,.0f} tokens per rank"
    assert first_line in text


@slow
def test_bench_writes_its_rows(tmp_path, monkeypatch, capsys):
    """bench.py adds rows that can be checked and repeated.

    Each has the machine, the versions and the command, and its rates follow from its seconds.
    Catches wrong counts, a row that cannot be run again, and rows of an earlier command that are
    lost.
    """
    file = tmp_path / f"{time.strftime('%Y-%m')}-cpu" / "machine.jsonl"
    file.parent.mkdir()
    file.write_text('{"label": "an earlier row"}')  # as a killed process may leave it: no line end
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", f"{tmp_path}"])
    monkeypatch.setattr(bench, "QUICK_SECONDS", 0.5)  # the longest step, to save time
    bench.main()
    earlier, *ours = map(json.loads, file.read_text().splitlines())
    assert earlier == {"label": "an earlier row"}
    assert all({"flags", "hardware", "versions", "commit", "command"} <= set(r) for r in ours)
    assert [r["label"] for r in ours] == ["ours, short sequences", "ours, longest in the time"]
    assert [r["batch"] for r in ours] == [4, 1]
    for r in ours:
        assert r["tgs"] == approx(r["batch"] * r["seq"] / r["step_s"]) and r["model"] == "tiny"
        assert r["mfu_causal"] is None  # a CPU has no peak FLOP/s
        assert r["host_rank_gib"] is None or 0.1 < r["host_rank_gib"] < 10
        assert r["bound_ratio"] > 0 and f"--seq {r['seq']} " in r["flags"]
        # the command trains by the plan that was measured
        flags = bench.train.parse(r["train_command"].partition("python train.py ")[2].split())
        assert (
            flags["model"] == "tiny" and flags["seq"] == r["seq"] and flags["batch"] == r["batch"]
        )
    assert ours[1]["seq"] > ours[0]["seq"]

    text = capsys.readouterr().out
    start, _, end = text.partition("ours, longest in the time: ")
    assert "This takes about a minute.\nAttention runs with kernel cpu.\n" in start
    for row, sequences in zip(ours, ("4 sequences", "one sequence")):
        head = f"tiny, {sequences} of {row['seq']:,} tokens per step: {row['tgs']:,.0f} tokens per"
        assert head in end and f"percent of kernel bound: {row['bound_ratio']:.1%}\n" in end
    assert "MFU: - causal, - full" in end and "plan: a step is 1 data-parallel group x" in end


def test_bench_says_what_a_faster_kernel_needs(monkeypatch):
    """On a GPU without the best kernel, bench.py says which one runs, and what to install.

    Catches a slow number whose reason nobody sees.
    """
    table = bench.Bench(torch.device("cuda"), 0, 1, True, Path(), {})
    missing = "`pip install 'flash-attn-4[cu13]'` is missing or broken"

    def why_not(name, *_):
        return missing if name == "fa4" else None

    monkeypatch.setattr(bench, "why_not", why_not)
    monkeypatch.setattr(bench, "pick_kernel", lambda *_: "cudnn")
    for major, text in (
        (9, f"kernel cudnn. Kernel fa4 would be faster on this GPU, but {missing}."),
        (8, "kernel cudnn."),  # fa4 does not run on such a GPU
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, major=major: (major, 0))
        assert bench.kernel_note(table) == f"Attention runs with {text}"
    monkeypatch.setattr(bench, "pick_kernel", lambda *_: "fa4")
    assert bench.kernel_note(table) == "Attention runs with kernel fa4."


@parametrize(
    "cluster, model, micro_batch, seconds",
    [("h100x1", "1b", 8, 2), ("h200x8", "7b", 1, 6), ("h100x1 --quick", "1b", 8, 2)],
)
def test_bench_tables_measure_what_they_say(cluster, model, micro_batch, seconds, monkeypatch):
    """On GPUs the first row is a step of 16 sequences of 4K tokens, with the largest model that a
    GPU holds without recomputation. The other row is one sequence of the greatest length whose
    step ends in 30 seconds, or in 4 seconds with --quick. FSDP2 in table step has the first row's
    sequences.

    Catches a first number that shows how fast the host launches kernels, one of a model that barely
    fits, and a first command that takes a quarter of an hour. seconds: a bound on the first row's
    step.
    """
    cluster, _, quick = cluster.partition(" ")

    def plan_runs(_, cfg):
        asked = planner.PlannerFlags(cluster=cluster, ranks=1)
        try:
            constraints = replace(cfg, dtype="bf16", document_token=-1)
            plans = planner.plan(constraints, MODELS[cfg.model], asked.hardware())
        except ValueError as e:
            raise ConfigError(e) from e
        return [SimpleNamespace(plan=plan) for plan in plans]

    monkeypatch.setattr(bench, "plan_runs", plan_runs)
    table = bench.Bench(torch.device("cuda"), 0, 1, bool(quick), Path(), {})
    short, longest = bench.machine_rows(table, "")
    assert [short.label, longest.label] == ["ours, short sequences", "ours, longest in the time"]
    flags = bench.config(short.flags)
    assert (flags.model, flags.seq, flags.batch) == (model, 4096, 16)
    plan = plan_runs(table, flags)[0].plan
    assert plan.step_s < seconds and plan.activations is None and plan.micro_batch == micro_batch

    # a sequence that is twice as long would take too long
    flags = bench.config(longest.flags)
    most_seconds = 4 if quick else 30
    assert (flags.model, flags.batch) == (model, 1)
    assert plan_runs(table, flags)[0].plan.step_s < most_seconds
    flags = bench.config(longest.flags.replace(f"{flags.seq}", f"{2 * flags.seq}"))
    assert plan_runs(table, flags)[0].plan.step_s > most_seconds

    first, *peers, _ = bench.step_rows(table, "")
    assert first == short and [row.label for row in peers] == ([] if quick else FSDP2_LABELS)
    for row in peers:
        flags = bench.config(row.flags)
        assert (flags.seq, flags.batch, flags.micro_batch) == (4096, 16, micro_batch)


FSDP2_LABELS = ["fsdp2 none", "fsdp2 full"]


def fsdp2_worker() -> None:
    """Compare FSDP2's losses and norms with ours from the same weights, up to bf16 rounding, on two
    ranks."""
    table = bench.Bench(torch.device("cpu"), dist.get_rank(), 2, True, Path(), {})
    for recomputed, flags in (
        ("none", "--strategy zero3 --batch 2"),
        ("three-quarters-selective", "--strategy zero2 --batch 4"),
        ("selective host", "--strategy zero3 --sp 2 --batch 2"),
        ("full", "--strategy zero3 --sp 2 --batch 1"),
    ):
        cfg = bench.config(f"--model tiny --seq 64 --micro-batch 1 {flags}")
        ours = bench.make_step(bench.plan_runs(table, cfg)[0])
        theirs = peers.fsdp2_step(bench.peer_run(table, cfg), recomputed.split())
        weights = {
            name: weight.full_tensor().detach() for name, weight in theirs.model.named_parameters()
        }
        ours.states.load(weights.get)
        for _ in range(4):
            loss, norm, _ = ours()
            their_loss, their_norm, _ = theirs()
            assert their_loss.item() == approx(loss.item(), rel=2e-3), (recomputed, flags)
            their_norm = getattr(their_norm, "full_tensor", lambda norm=their_norm: norm)()
            assert their_norm.item() == approx(norm.item(), rel=1e-2), (recomputed, flags)


def test_bench_fsdp2_says_how_much_host_memory_it_needs(group):
    """A row of FSDP2 whose states are on the host fails with the bytes that it needs, if the host
    has fewer. With exactly these bytes, it is built.

    Catches a step that begins although Linux will kill it, and with it the rest of the table.
    """
    table = bench.Bench(torch.device("cpu"), 0, 1, True, Path(), {})
    run = bench.peer_run(table, bench.config("--model tiny --seq 64 --batch 1 --strategy zero3"))
    needed = 16 * run.plan.params

    def step_with(host_bytes):
        limited = replace(run, hardware=replace(run.hardware, host_budget=host_bytes))
        return peers.fsdp2_step(limited, ["full", "host"])

    with raises(ConfigError, match=r"needs .* \(16 bytes per parameter\), of 1\.0 KiB"):
        step_with(1024)
    with raises(ConfigError, match="host memory"):
        step_with(needed - 1)
    step_with(needed)


@slow
def test_bench_fsdp2_takes_the_same_steps():
    """FSDP2, the peer in bench.py, has our losses and norms from the same weights, up to bf16's
    rounding.

    Catches a peer that trains in another way and is compared with us all the same, for example with
    gradients that are averaged where they should be summed.
    """
    on_ranks(2, fsdp2_worker)


def deepspeed_worker() -> None:
    """Compare DeepSpeed's losses, norms and weights with ours from the same weights, on two
    ranks."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    linear = torch.nn.functional.linear
    table = bench.Bench(torch.device("cpu"), dist.get_rank(), 2, True, Path(), {})
    for recomputed, flags in (
        ("none", "--strategy zero3 --batch 2"),
        ("half-selective", "--strategy zero3 --batch 4"),
        ("selective", "--strategy zero3 --sp 2 --batch 2"),
        ("full", "--strategy zero3 --sp 2 --batch 1"),
    ):
        cfg = bench.config(f"--model tiny --seq 64 --micro-batch 1 {flags}")
        ours = bench.make_step(bench.plan_runs(table, cfg)[0])
        with peers.deepspeed_step(bench.peer_run(table, cfg), [recomputed]) as theirs:
            embedding = weakref.ref(theirs.model.embed.weight)
            # weights that are no numbers of bf16: from such a number, a small update would be lost
            torch.manual_seed(0)
            start = {}
            for name, p in theirs.model.named_parameters():
                start[name] = float(len(p.ds_shape) == 1) + 0.02 * torch.randn(p.ds_shape)
                safe_set_full_fp32_param(p, start[name])
            ours.states.load(start.get)
            for _ in range(4):
                loss, norm, _ = ours()
                their_loss, their_norm, _ = theirs()
                assert their_loss.item() == approx(loss.item(), rel=2e-3), (recomputed, flags)
                assert float(their_norm) == approx(norm.item(), rel=1e-2), (recomputed, flags)
            for name, p in theirs.model.named_parameters():
                moved = ours.states.full_param(name).float() - start[name]
                their_moved = safe_get_full_fp32_param(p) - start[name]
                similarity = torch.cosine_similarity(moved.flatten(), their_moved.flatten(), 0)
                assert similarity > 0.95, (name, recomputed, flags)

        del theirs, p
        bench.release(table)
        assert embedding() is None, "the row's weights are still in memory"
    assert torch.nn.functional.linear is linear


@slow
def test_bench_deepspeed_takes_the_same_steps():
    """DeepSpeed's ZeRO-3 has our losses, norms and updates from the same weights, up to bf16's
    rounding.

    Catches gradients that are averaged where they should be summed, or that the last micro-batch
    replaces, a weight that no rank updates, and memory or changes of PyTorch that outlive the row.
    """
    importorskip("deepspeed")
    on_ranks(2, deepspeed_worker)


@slow
@parametrize("options", ["fp32 full", "fp32 by-layer half", "fp32 by-layer three-quarters"])
def test_bench_transformers_takes_the_same_steps(options, group, tmp_path):
    """transformers' own model has our losses from the same weights, up to bf16's rounding.

    Catches a peer that trains in another way.
    """
    torch.compiler.set_stance("force_eager")
    table = bench.Bench(torch.device("cpu"), 0, 1, True, Path(), {})
    cfg = bench.config("--model tiny --seq 64 --batch 4 --micro-batch 2")
    ours = bench.make_step(bench.plan_runs(table, cfg)[0])
    theirs = peers.transformers_step(bench.peer_run(table, cfg), options.split())
    theirs.model.save_pretrained(tmp_path)
    _, read = hf.open_weights(tmp_path, ours.run.plan.model)
    ours.states.load(read)
    for _ in range(4):
        assert theirs()[0].item() == approx(ours()[0].item(), rel=2e-3)


def test_bench_gives_liger_what_its_loss_takes(group, monkeypatch):
    """With liger-loss, a row has the loss of the other rows.

    A class of this test stands for Liger's. It takes Liger's arguments, which are the head's
    weight, rows of activations, and labels, and it calls PyTorch's loss. Catches a loss that is
    scaled twice, and labels that are shifted twice.
    """

    class StandsForLiger:
        def __init__(self, reduction):
            self.reduction = reduction

        def __call__(self, weight, rows, labels):
            logits = torch.nn.functional.linear(rows, weight)
            return torch.nn.functional.cross_entropy(logits, labels, reduction=self.reduction)

    module = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=StandsForLiger)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=module))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    torch.compiler.set_stance("force_eager")
    table = bench.Bench(torch.device("cpu"), 0, 1, True, Path(), {})
    run = bench.peer_run(table, bench.config("--model tiny --seq 64 --batch 4 --micro-batch 2"))
    losses = []
    for options in ("fp32", "fp32 by-layer liger-loss full"):
        torch.manual_seed(0)
        with peers.transformers_step(run, options.split()) as step:
            losses.append([step()[0].item() for _ in range(3)])
    assert losses[1] == approx(losses[0], rel=1e-3) and losses[0][2] < losses[0][0]


def test_bench_counts_what_computation_waits_for():
    """A gap on the compute stream counts as idle, whatever runs on other streams.

    Catches an all-to-all, a copy or a barrier that counts as computation and hides a wait, and an
    all-to-all that seems to take the time for which it waits for other ranks.
    """

    def event(begin: int, end: int, name: str, stream: int, device="CUDA") -> SimpleNamespace:
        """Return an event of PyTorch's profiler. begin, end: in milliseconds. Stream 7 computes."""
        return SimpleNamespace(
            device_type=getattr(torch.autograd.DeviceType, device),
            device_resource_id=stream,
            name=name,
            time_range=SimpleNamespace(start=1000 * begin, end=1000 * end),
        )

    spans = bench.by_kind(
        [
            event(0, 90, "aten::mm", 1, device="CPU"),
            event(0, 10, "gemm", 7),
            event(8, 30, "Memcpy DtoH (Device -> Pinned)", 9),
            event(10, 14, "barrier_kernel", 8),
            event(12, 25, "Memcpy DtoD (Device -> Device)", 8),
            event(25, 26, "Memcpy PtoP (Device -> Device)", 8),
            event(20, 22, "norm", 7),
            event(22, 40, "attention", 7),
            event(24, 33, "ncclDevKernel_AllGather", 10),
            event(43, 44, "gemm", 7),
        ]
    )
    found = bench.waits_of(spans)
    # milliseconds, the kernel before the gap, and the kernel after it
    assert found.pop("waits") == [[10, "gemm", "norm"], [3, "attention", "gemm"]]
    assert found == {
        "idle_ms": 13,
        "communication_ms": 9,
        "exchange_ms": 1,
        "barrier_ms": 4,
        "to_host_ms": 22,
        "from_host_ms": 0,
    }


def test_bench_compares_the_order_of_plans():
    """Table plans says how well the predicted order of plans agrees with the measured one.

    Two neighbours of four plans are swapped: the correlation is 1 - 6 * 2 / (4 * 15) = 0.8. A plan
    that did not fit does not count. Catches a correlation of other columns, or of rows without a
    time.
    """
    rows = [
        {"predicted_s": predicted, "step_s": measured}
        for predicted, measured in [(3.0, 3.5), (1.0, 2.0), (2.0, 1.5), (4.0, 9.0), (0.5, None)]
    ]
    text = bench.order_in_words(rows)
    assert "over 4 plans: 0.80 " in text and "took 2 s, and the fastest one 1.5 s" in text
    assert "2 plans are too few" in bench.order_in_words(rows[:2])


def test_bench_keeps_the_batches_of_a_table_at_other_lengths():
    """--seq replaces the lengths of a table, and keeps its other variants.

    Catches a table of sharding whose rows with many micro-batches are lost.
    """
    tables = bench.make_tables(2, 1, 4096)
    variants = bench.variants_of(tables["shard"], "4K,8K")
    assert variants == [
        "--batch 2 --seq 4K",
        "--batch 16 --seq 4K",
        "--batch 2 --seq 8K",
        "--batch 16 --seq 8K",
    ]
    assert bench.variants_of(tables["shard"], None) == ["--batch 2", "--batch 16"]
    assert bench.variants_of(tables["long"], "64K") == ["--seq 64K"]
    assert bench.variants_of(tables["parallel"], "8K") == ["--seq 8K"]


def test_bench_compares_plans_of_the_same_length():
    """With several lengths, each has a rank correlation of its own.

    Within each length the order is exactly reversed. Catches one correlation over all rows, which
    would be 0.36 here.
    """
    rows = [
        {"seq": seq, "predicted_s": i * seq, "step_s": (5 - i) * seq}
        for seq in (1024, 4096)
        for i in range(1, 5)
    ]
    lines = bench.orders_in_words(rows)
    for line, seq in zip(lines, ("1,024", "4,096"), strict=True):
        assert line.startswith(f"{seq} tokens: ") and "over 4 plans: -1.00" in line


@parametrize("word, recomputed", [("half", 2), ("three-quarters", 3), ("full", 4)])
def test_bench_recomputes_as_many_layers_as_a_label_says(word, recomputed):
    """Of four layers of a peer, half recompute two, three-quarters three, and full four.

    Catches a peer that recomputes more than its label says.
    """
    layers = [SimpleNamespace(gradient_checkpointing=False) for _ in range(4)]
    model = SimpleNamespace(
        model=SimpleNamespace(layers=layers), gradient_checkpointing_enable=lambda: None
    )
    peers.recompute_layers(model, peers.TRANSFORMERS_RECOMPUTED[word])
    assert sum(layer.gradient_checkpointing for layer in layers) == recomputed
    label = {"half": "half-selective", "three-quarters": "three-quarters-selective"}.get(word, word)
    _, n = peers.RECOMPUTED[label]
    assert sum(peers.is_recomputed(i, n) for i in range(4)) == recomputed


def test_bench_float8_peer_takes_nearly_the_same_steps(group, tmp_path, monkeypatch):
    """With torchao's emulation of float8, transformers' model has our losses up to 1 %.

    Catches a row whose products stay in bf16, one whose gradients are lost, and changes of
    PyTorch's compiler that outlive their row.
    """
    importorskip("torchao.float8")
    from torch._inductor.codegen.triton import TritonOverrides
    from torchao.float8.float8_linear import Float8Linear

    compiler = TritonOverrides.maximum
    emulated = partial(peers.float8_linears, emulate=True)
    monkeypatch.setattr(peers, "float8_linears", emulated)
    # torchao's filter leaves smaller matrices in bf16
    small = replace(MODELS["tiny"], layers=2, ffn=1280)
    monkeypatch.setitem(MODELS, "tiny", small)
    torch.compiler.set_stance("force_eager")
    table = bench.Bench(torch.device("cpu"), 0, 1, True, Path(), {})
    cfg = bench.config("--model tiny --seq 64 --batch 4 --micro-batch 2")
    run = bench.peer_run(table, cfg)
    for options in ("bf16 fp8", "bf16 fp8 full", "bf16 fp8 by-layer half"):
        with peers.transformers_step(run, options.split()) as theirs:
            converted = [
                name for name, m in theirs.model.named_modules() if isinstance(m, Float8Linear)
            ]
            assert len(converted) == 4 and not any("lm_head" in name for name in converted)
            assert TritonOverrides.maximum is not compiler
            ours = bench.make_step(bench.plan_runs(table, cfg)[0])
            theirs.model.save_pretrained(tmp_path)
            _, read = hf.open_weights(tmp_path, small)
            ours.states.load(read)
            for _ in range(4):
                assert theirs()[0].item() == approx(ours()[0].item(), rel=1e-2), options
        assert TritonOverrides.maximum is compiler

    monkeypatch.setitem(MODELS, "tiny", replace(small, ffn=512))
    with raises(ConfigError, match="too small for fp8"):
        peers.transformers_step(bench.peer_run(table, cfg), ["bf16", "fp8"])


def test_bench_float8_peer_that_is_not_installed_is_a_result(group, monkeypatch):
    """If torchao is missing, the row that needs it is written, and says "not installed".

    Catches a table that ends at a missing package.
    """
    if find_spec("torchao"):
        skip("torchao is installed")
    monkeypatch.setattr(bench, "kernel_seconds", lambda *_: 1.0)
    table = bench.Bench(torch.device("cpu"), 0, 1, True, Path(), {})
    row = bench.Row("transformers bf16 fp8 full", "--model tiny --seq 64 --batch 2 --products fp8")
    result = bench.measure_row(table, row, lambda *_: {})
    assert result["oom"] and "torchao" in result["error"]
    assert bench.took_text(result) == "not installed"
    assert result["products"] == "fp8"  # so its bound is that of products in float8


def one_rank_fails(everywhere: bool) -> None:
    """Measure a row in which rank 1 runs out of memory, or both ranks do, if it is everywhere.

    A rank that does not fail waits for rank 1 in a collective, as a step does.
    """
    table = bench.Bench(torch.device("cpu"), dist.get_rank(), 2, True, Path(), {})

    def time_step(*_):
        if everywhere or table.rank == 1:
            raise torch.OutOfMemoryError("no room for 3 GiB")
        dist.all_reduce(torch.zeros(1))

    bench.kernel_seconds, bench.time_step = lambda *_: 1.0, time_step
    if not everywhere:
        bench.FAILED_ROW_WAIT_S = 1
    row = bench.Row("ours", "--model tiny --seq 64 --batch 2")
    result = bench.measure_row(table, row, lambda *_: {})
    assert result["oom"] and result["error"] == "no room for 3 GiB"


@slow
@parametrize("everywhere", [True, False])
def test_bench_ends_if_only_one_rank_runs_out_of_memory(everywhere, tmp_path):
    """If a row runs out of memory on all ranks, it says so, and the table goes on. If only one rank
    does, the table ends in a moment, and its last line names the rank and the error.

    Catches ranks that wait an hour for one that has left the step.
    """
    file = tmp_path / "output"
    rest = 2, get_free_port(), 0, one_rank_fails, (everywhere,)
    text = finish(start_processes(run_rank, 2, file, *rest), file, expect=0 if everywhere else 1)
    assert ("rank 1: ours: no room for 3 GiB\nOther ranks did not fail" in text) != everywhere


@parametrize(
    "error, text",
    [
        ("CUDA out of memory. Tried to allocate 3.00 GiB.", "out of memory"),
        ("a step needs at least 131.8 GiB per GPU of 75.2", "does not fit"),
        ("No module named 'torchao'", "not installed"),
        ("torchao's filter finds every matrix too small for fp8", "refused"),
        (None, "out of memory"),  # on another rank
    ],
)
def test_bench_says_why_a_row_has_no_time(error, text):
    """A row without a time says why.

    Catches "does not fit" for a row that has nothing to do with memory.
    """
    row = {"oom": True} | ({"error": error} if error else {})
    assert bench.took_text(row) == text


def test_bench_train_command_has_the_memory_flags(monkeypatch):
    """The command that trains by a row's plan has the memory flags that the plan was made for.

    Catches a command that makes another plan.
    """
    monkeypatch.setattr(bench.train, "plan_in_words", lambda _: "")
    cfg = bench.config("--model tiny --seq 64 --gpu-memory 2G --host-memory 1G")
    plan = SimpleNamespace(ranks=1, seq=64, batch=1)
    step = SimpleNamespace(run=SimpleNamespace(cfg=cfg, plan=plan))
    command = bench.plan_of_step(None, step)["train_command"]
    flags = bench.train.parse(command.partition("python train.py ")[2].split())
    assert (flags["gpu_memory"], flags["host_memory"]) == (2 * 2**30, 2**30)


def test_peak_of_host_memory_begins_anew():
    """A row's peak of host memory is its own, not that of an earlier row.

    Catches a peak that cannot fall.
    """
    if not bench.reset_host_peak():
        skip("this container does not let a process reset its peak")
    torch.ones(2**28, dtype=torch.uint8)  # freed at once
    now, peak = streams.own_host_bytes()
    assert peak > now + 2**27
    bench.reset_host_peak()
    _, anew = streams.own_host_bytes()
    assert anew < peak - 2**27


def test_bench_rows_can_be_chosen_by_their_labels():
    """No label of a table that takes --rows has a comma, because commas separate the labels there.

    Catches a row that --rows cannot choose.
    """
    tables = bench.make_tables(ranks=2, nodes=1, short_seq=64).values()
    labels = [row.label for table in tables if "rows" in table.takes.split() for row in table.rows]
    assert len(labels) > 50 and not [label for label in labels if "," in label]


@parametrize(
    "flags, world, error",
    [
        ("--rows 'transformers fp32'", 2, "model runs on one rank, not 2"),
        ("--rows 'transformers bf16 by-layer full'", 2, "model runs on one rank, not 2"),
        ("--rows 'transformers bf16 fp8'", 1, "float8 products need a GPU with float8"),
        ("--rows 'transformers bf16 fp9'", 1, "there is no such row; the rows are ours"),
        ("--micro-batch 3 --batch 8", 1, "3 does not divide the step's 8 sequences; 2 does"),
        ("--micro-batch 2", 1, "2 does not divide the step's 1 sequences; 1 does"),
        ("--micro-batch none --batch 8", 1, "--micro-batch: none is not a whole number"),
        ("--micro-batch 0 --batch 8", 1, "--micro-batch 0: choose a value from 1"),
    ],
)
def test_bench_refuses_rows_that_cannot_be_measured(flags, world, error, monkeypatch, capsys):
    """A row or a micro-batch that cannot run is refused before anything starts.

    Catches a wait of minutes for an error.
    """
    monkeypatch.setenv("WORLD_SIZE", f"{world}")
    monkeypatch.setattr(sys, "argv", ["bench.py", "long", *shlex.split(flags)])
    with raises(SystemExit) as stopped:
        bench.parse()
    assert stopped.value.code == 2 and error in capsys.readouterr().err


def test_bench_micro_batch_is_for_peers_only(group, monkeypatch, tmp_path):
    """--micro-batch reaches every peer's row and none of ours. Rows that need another machine are
    left out.

    Catches a plan of ours that is forced to a peer's size, and a peer that runs out of memory
    because all sequences run at once.
    """
    measured = []
    monkeypatch.setattr(bench, "attempt", lambda _, row, __: measured.append(row))
    monkeypatch.setattr(sys, "argv", "bench.py long --seq 64 --batch 4 --micro-batch 2".split())
    args = bench.parse()
    bench.measure_table(bench.Bench(torch.device("cpu"), 0, 1, True, tmp_path, {}), args)
    sizes = {row.label: bench.config(row.flags).micro_batch for row in measured}
    assert {size for label, size in sizes.items() if label.startswith("ours")} == {None}
    assert {size for label, size in sizes.items() if not label.startswith("ours")} == {2}
    assert {"ours fp8", "fsdp2 full", "transformers bf16 by-layer full"} < sizes.keys()
    assert not any(label.startswith("transformers bf16 fp8") for label in sizes)
    assert args.given["micro_batch"] == "--micro-batch 2"  # a row's command repeats it


class FakeGpu:
    """A queue of work with a clock of its own: the host enqueues steps, and waits for their end."""

    def __init__(self):
        self.now = self.busy_until = 0.0

    def step(self, seconds: float) -> None:
        self.now += 0.001  # the host enqueues a step faster than the GPU runs it
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)


def test_clock_does_not_count_what_was_queued_before(monkeypatch):
    """A step's time does not include warm-up steps that the GPU has not finished yet.

    Catches a clock that starts when the host has enqueued the warm-up, but before the GPU has run
    it. A single timed step would then seem to take as long as two.
    """
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: gpu.now)
    for _ in range(3):
        gpu.step(5.0)
    for repeats in (1, 4):
        seconds = bench.clock(SimpleNamespace(gpu=True), lambda: gpu.step(2.0), repeats)
        assert seconds == [approx(2.0, rel=0.01)] * repeats
        gpu.step(7.0)


def test_clock_warms_up_at_least_once():
    """The first step is never timed, even if only one step is timed because steps are long.

    Catches a time that contains the compilation of kernels.
    """
    seconds = iter([0.2, 0.001, 0.001])

    class SlowFirst:
        memory = None
        run = SimpleNamespace(plan=SimpleNamespace(step_s=50.0))  # the prediction: a long step

        def __call__(self):
            time.sleep(next(seconds))

    assert max(bench.time_step(SimpleNamespace(gpu=False), SlowFirst())) < 0.1


def test_clock_counts_the_first_step_if_it_is_told_so(monkeypatch):
    """A step that is warm already is timed once, from the end of what ran on the GPU before.

    Catches a time that contains the step that warmed up.
    """
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(bench, "gather_objects", lambda _: None)  # there is one rank
    monkeypatch.setattr(bench.time, "perf_counter", lambda: gpu.now)
    gpu.step(5.0)
    steps = iter([2.0])
    seconds = bench.clock(SimpleNamespace(gpu=True), lambda: gpu.step(next(steps)), 1, True)
    assert seconds == [approx(2.0, rel=0.01)]


@parametrize(
    "label, flags, warms_up",
    [
        ("ours", "--chunk 128 --head-groups 2", True),
        ("ours full recompute", "--recompute full", True),
        ("ours full swap", "--alpha 1 --resident-layers 2", True),
        ("ours", "--resident-layers 3 --alpha 0.5 --chunk 128", True),
        ("ours streams all states", "--os-place host --resident-states 0", True),
        ("ours", "--strategy zero1", True),
        ("ours fp8", "--products fp8", True),
        ("ours planned memory", "--memplan on", False),
        ("fsdp2 none", "", False),
    ],
)
def test_bench_warms_up_a_long_step_with_few_layers(label, flags, warms_up, group, monkeypatch):
    """If a step is predicted to be long, a step with two layers runs before it, on the same shapes.

    The threshold is lowered, so that a short step counts as long. Catches a warm-up that
    contradicts the row's flags or runs other kernels, a row that times the model with two layers,
    and a peer that is warmed up like this: its compiler may compile anew for another number of
    layers.
    """
    monkeypatch.setattr(bench, "SHALLOW_WARM_UP_SECONDS", 0)
    monkeypatch.setattr(bench, "kernel_seconds", lambda *_: 1.0)
    monkeypatch.setattr(bench, "timed_steps", lambda *_: 1)
    torch.compiler.set_stance("force_eager")
    ran = []
    call = peers.Step.__call__
    monkeypatch.setattr(peers.Step, "__call__", lambda step: (ran.append(step.run), call(step))[1])
    table = bench.Bench(torch.device("cpu"), 0, 1, True, Path(), {})
    row = bench.Row(label, f"--model tiny --seq 512 --batch 2 --micro-batch 1 {flags}")
    result = bench.measure_row(table, row, lambda *_: {})
    assert not result["oom"], result.get("error")
    assert result.get("warm_up") == ("a step with 2 layers" if warms_up else None)
    if not warms_up:
        assert len(ran) > 1 and all(run.plan.model == MODELS["tiny"] for run in ran)
        return

    (shallow, run) = (step_run.plan for step_run in ran)
    assert (shallow.model.layers, run.model) == (2, MODELS["tiny"])
    names = "factors sp chunk chunks micro_batch head_groups recompute products keeps_casts"
    for name in [*names.split(), "os_place"]:
        assert getattr(shallow, name) == getattr(run, name), name
