"""Show that bench.py keeps its rows and counts right, and that its peers take the same steps."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from pytest import approx, raises

import bench
import hf
from test_all import ROOT, on_ranks, slow


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
        if line.startswith("ours:"):
            break
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "stopped; the rows so far are in" in text
    rows = [json.loads(line) for line in next(tmp_path.glob("*/machine.jsonl")).open()]
    assert [r["label"] for r in rows] == ["ours"]
    assert f"tiny, 256 tokens per sequence: {rows[0]['tgs']:,.0f} tokens per rank" in text


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
    bench.main()
    earlier, *ours = map(json.loads, file.read_text().splitlines())
    assert earlier == {"label": "an earlier row"}
    assert all({"flags", "hardware", "versions", "commit", "command"} <= set(r) for r in ours)
    assert [r["label"] for r in ours] == ["ours", "ours, longest in the time"]
    for r in ours:
        assert r["tgs"] == approx(r["seq"] / r["step_s"]) and r["model"] == "tiny"
        assert r["mfu_causal"] is None
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
    for row in ours:
        head = f"tiny, {row['seq']:,} tokens per sequence: {row['tgs']:,.0f} tokens per rank per s"
        assert head in end and f"percent of kernel bound: {row['bound_ratio']:.1%}\n" in end
    assert "MFU: - causal, - full" in end and "plan: a step is 1 data-parallel rank x" in end


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


def test_bench_tables_measure_what_they_say(group, monkeypatch):
    """The default table has our rows only, with steps of at most 30 seconds; table step also has
    FSDP2's.

    Catches a first command that takes a quarter of an hour.
    """
    limits = []

    def rows_of_largest_model(_, __, max_seconds):
        limits.append(max_seconds)
        return [bench.Row("ours", "--model 7b"), bench.Row("ours, longest in the time")]

    monkeypatch.setattr(bench, "rows_of_largest_model", rows_of_largest_model)
    table = bench.Bench(torch.device("cuda"), 0, 1, False, Path(), {})
    labels = [
        [row.label for row in rows(table, "")] for rows in (bench.machine_rows, bench.step_rows)
    ]
    assert labels[0] == ["ours", "ours, longest in the time"] and limits == [30, 45]
    assert labels[1] == ["ours", "fsdp2 none", "fsdp2 full", "ours, longest in the time"]


def fsdp2_worker() -> None:
    """Compare FSDP2's losses with ours from the same weights, up to bf16 rounding, on two ranks."""
    table = bench.Bench(torch.device("cpu"), dist.get_rank(), 2, True, Path(), {})
    for recomputed, flags in (
        ("none", "--strategy zero3 --batch 2"),
        ("half-selective", "--strategy zero2 --batch 4"),
        ("selective host", "--strategy zero3 --sp 2 --batch 2"),
        ("full", "--strategy zero3 --sp 2 --batch 1"),
    ):
        cfg = bench.config(f"--model tiny --seq 64 --micro-batch 1 {flags}")
        ours = bench.make_step(bench.plan_runs(table, cfg)[0])
        theirs = bench.fsdp2_step(bench.peer_run(table, cfg), recomputed.split())
        weights = {
            name: weight.full_tensor().detach() for name, weight in theirs.model.named_parameters()
        }
        ours.states.load(weights.get)
        for _ in range(4):
            wanted, found = ours()[0].item(), theirs()[0].item()
            assert found == approx(wanted, rel=2e-3), (recomputed, flags)


@slow
def test_bench_fsdp2_takes_the_same_steps():
    """FSDP2, the peer in bench.py, has our losses from the same weights, up to bf16's rounding.

    Catches a peer that trains in another way and is compared with us all the same.
    """
    on_ranks(2, fsdp2_worker)


@slow
def test_bench_transformers_takes_the_same_steps(group, tmp_path, monkeypatch, capsys):
    """transformers' own model has our losses from the same weights, up to bf16's rounding.

    Catches a peer that trains in another way.
    """
    torch.compiler.set_stance("force_eager")
    table = bench.Bench(torch.device("cpu"), 0, 1, True, Path(), {})
    cfg = bench.config("--model tiny --seq 64 --batch 4 --micro-batch 2")
    ours = bench.make_step(bench.plan_runs(table, cfg)[0])
    theirs = bench.transformers_step(bench.peer_run(table, cfg), ["fp32", "full"])
    theirs.model.save_pretrained(tmp_path)
    _, read = hf.open_weights(tmp_path, ours.run.plan.model)
    ours.states.load(read)
    for _ in range(4):
        assert theirs()[0].item() == approx(ours()[0].item(), rel=2e-3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["bench.py", "long", "--rows", "transformers fp32"])
    with raises(SystemExit):
        bench.parse()
    assert "model runs on one rank, not" in capsys.readouterr().err
