"""Show that bench.py keeps its rows and counts right, and that its peers take the same steps."""

import json
import signal
import subprocess
import sys
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
    rows = json.loads(next(tmp_path.glob("step-*.json")).read_text())["rows"]
    assert [r["system"] for r in rows] == ["ours"]
    assert json.loads(text.splitlines()[-1])["rows"] == rows


@slow
def test_bench_writes_its_rows(tmp_path, monkeypatch):
    """bench.py writes rows that can be checked and repeated.

    They have the machine, the versions and the command, and their rates follow from their seconds.
    Catches wrong counts, and a row that cannot be run again.
    """
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", f"{tmp_path}"])
    bench.main()
    saved = json.loads(next(tmp_path.glob("step-*.json")).read_text())
    assert {"hardware", "versions", "commit", "command"} <= set(saved)
    ours = saved["rows"]
    assert [r["system"] for r in ours] == ["ours", "ours, longest in the time"]
    for r in ours:
        assert r["tgs"] == approx(r["seq"] / r["step_s"]) and r["model"] == "tiny"
        assert r["mfu_causal"] is None
        assert r["bound_ratio"] > 0 and f"--seq {r['seq']} " in r["flags"]
    assert ours[1]["seq"] > ours[0]["seq"]


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
