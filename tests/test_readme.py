"""Show that README's numbers, files, flags, functions and commands exist."""

import functools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
import torch.distributed.run
from pytest import raises

import bench
import memplan
import planner
import prepare
import train
from test_all import ROOT, slow

README = (ROOT / "README.md").read_text()


def test_readme_numbers_are_measured():
    """Each row of README's table is a row in results/.

    Catches a number that nobody measured.
    """
    rows = []
    for file in (ROOT / "results").glob("*-*.json"):
        rows += json.loads(file.read_text())["rows"]
    measured = {
        (
            r["seq"],
            r["gpus"],
            f"{r['mfu_causal']:.1%}",
            f"{r['bound_ratio']:.1%}",
            f"{r['gpu_gib']:.1f}",
        )
        for r in rows
        if r.get("bound_ratio") and r["gpu_gib"]
    }
    table = README.partition("<!-- table -->")[2].partition("<!-- end -->")[0].split("\n")[3:-1]
    for line in table:
        _, seq, gpus, *figures = line.strip("| ").split(" | ")
        assert (planner.size(seq), int(gpus), *figures) in measured, line


def test_readme_names_every_file():
    """README names every file, and its links lead somewhere.

    Catches a file that no reader finds, and a link to nothing.
    """
    for file in (*ROOT.glob("*.py"), *ROOT.glob("csrc/*.cpp")):
        assert f"`{file.relative_to(ROOT)}`" in README, file.name
    for page in (ROOT / "README.md", ROOT / "results" / "README.md"):
        shown = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        assert shown and all((page.parent / link).exists() for link in shown), shown


def test_readme_names_flags_and_functions_that_exist(monkeypatch, capsys):
    """README's flags, commands and functions exist.

    Flags are in the --help of the programs, which gives the default of each of train.py's flags.
    Commands parse. Catches a flag, a command or a function that does not exist.
    """
    real = set(torch.distributed.run.get_args_parser()._option_string_actions)
    real |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--signal"}  # Slurm's
    for program in (train, bench, memplan, planner, prepare):
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", "--help"])
        with raises(SystemExit) as ended:
            program.main()
        text = capsys.readouterr().out
        assert ended.value.code == 0 and f"usage: {program.__name__}.py" in text
        real |= set(re.findall(r"--[a-z][a-z_-]*", text))
        if program is train:
            assert "binary: 4K is 4096" in " ".join(text.split())
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", README)) <= real
    for command in re.findall(r"train\.py( --(?!help).*)", README.replace("\\\n", "")):
        train.parse(command.partition("#")[0].split())
    for name, path in re.findall(r"`(\w+)\.([\w.]+)`", README):
        if path not in ("py", "cpp") and name in sys.modules:
            assert functools.reduce(getattr, path.split("."), sys.modules[name]), (name, path)


@slow
def test_readme_walk(tmp_path):
    """README's commands for a Hugging Face checkpoint run as they are, in a folder like this one.

    Catches commands that a reader would copy in vain.
    """
    for file in ROOT.iterdir():
        if file.suffix in (".py", ".cpp") or file.name == "csrc":
            (tmp_path / file.name).symlink_to(file)
    (walk,) = re.findall(r"(?:^    .*\n)*^    .*save_pretrained.*\n(?:^    .*\n)*", README, re.M)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", textwrap.dedent(walk)],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    positions, difference = re.findall(r"(\d+) positions, logits differ by (\S+)", done.stdout)[0]
    assert positions == "1024" and float(difference) < 1e-5
