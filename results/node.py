"""Which measurements does a node of GPUs still owe? Run them in pieces, most wanted first.

    make results-node                   all that are missing: pieces of under nine minutes each
    python results/node.py --list       the pieces, and which are there; needs no GPU
    python results/node.py --minutes 9  the next ones that should end within so many minutes

A piece is one command of bench.py or train.py on all GPUs of the node. Its files appear in results/
when it has ended well, so a run that is cut short goes on with the piece that it was in. Before the
first piece that times a mechanism, the mechanism's test runs on these GPUs; if it fails, the pieces
that need it are left out. On fewer GPUs than eight sequences are shorter, by as many tokens a GPU.
What the planner expects of most pieces on eight is in scale.json, before any has run.

Left out: measurements of one GPU, each a single command of bench.py.
"""
import argparse
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from bench import commit, in_file_names, launcher

WRITTEN_FOR = 8  # GPUs: the sequences of PIECES
LIMIT_S = 540  # of a piece, and of a test
TEST_MINUTES = 2.5


@dataclass(frozen=True)
class Piece:
    """A measurement. test: the worker of test_all.py's GPU tests that shows that what is timed is
    right; minutes: what it should take; kilotokens: of its sequences on WRITTEN_FOR GPUs; gpus:
    that it needs."""

    test: str
    minutes: float
    command: str
    kilotokens: tuple[int, ...] = ()
    gpus: int = 2

    def on(self, gpus: int) -> str:
        """Return the command on so many GPUs."""
        seqs = ",".join(f"{kilo * gpus // WRITTEN_FOR}K" for kilo in self.kilotokens)
        return f"{launcher(gpus)} {self.command.format(seq=seqs)}"


PIECES = (
    Piece("swap", 7, "train.py --seq {seq} --batch 1 --steps 1 --save-every -1 --eval-every -1",
          (1024,)),
    Piece("swap", 8, "bench.py long --seq {seq} --skip full,swap,fsdp2", (1024,)),
    Piece("swap", 6, "bench.py long --seq {seq} --skip full,swap", (64, 128, 256)),
    Piece("swap", 8, "bench.py long --seq {seq} --skip full,swap", (512,)),
    Piece("swap", 4, "bench.py long --seq {seq} --batch 8 --skip full,swap", (64,)),
    Piece("factors", 7, "bench.py shard"),
    Piece("factors", 5, "bench.py nodes --nodes 2", gpus=4),
    Piece("factors", 5, "bench.py nodes --nodes 4", gpus=4),
    Piece("ring", 8, "bench.py ring --seq {seq}", (256, 512)),
    Piece("ring", 8, "bench.py ring --seq {seq} --nodes 2", (1024,)),
    Piece("replay", 6, "bench.py memplan --seq {seq}", (64,), gpus=4),
    Piece("replay", 8, "bench.py memplan --seq {seq}", (256,), gpus=4),
    Piece("replay", 8, "bench.py memplan --seq {seq}", (1024,), gpus=4),
)

def log_name(command: str, hardware: str) -> str:
    """Return the file of what a command of train.py prints."""
    seq = re.search(r"--seq (\w+)", command)[1].lower()
    return f"train-{seq}-{in_file_names(hardware)}.log"


def is_there(command: str, hardware: str, folders: list[Path]) -> bool:
    """Return whether a command was measured on this hardware, at any commit: with the same name of
    the file, which --skip and --host-memory do not change."""
    def named(command: str) -> str:
        return re.sub(r" --(skip|host-memory) \S+", "", command)

    if " train.py " in command:
        return any((folder / log_name(command, hardware)).exists() for folder in folders)
    for path in (path for folder in folders for path in folder.glob("*.json")):
        found = json.loads(path.read_text())
        if (named(found.get("command", "")), found.get("hardware")) == (named(command), hardware):
            return True
    return False


def run(command: list[str], seconds: float) -> tuple[bool, str]:
    """Run a command, at most so many seconds, and show what it prints. Returns whether it ended
    well, and the text."""
    # torchrun gives its ranks 30 seconds to end
    limited = ["timeout", "--foreground", "--kill-after", "45", str(int(seconds)), *command]
    process = subprocess.Popen(limited, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    lines = []
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return process.wait() == 0, "".join(lines)
    finally:
        process.terminate()  # where this program is stopped


class Tests:
    """Which of test_all.py's GPU tests passed on this hardware at this commit."""

    def __init__(self, hardware: str):
        self.file = ROOT / "out" / "node-tests.json"
        self.where = f"{hardware}, {commit()}"
        self.failed: set[str] = set()

    def known(self) -> dict[str, str]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def missing(self, name: str) -> bool:
        return name not in self.failed and self.known().get(name) != self.where

    def run(self, name: str, seconds: float) -> None:
        """One that is skipped shows nothing."""
        well, text = run([sys.executable, "-m", "pytest", "-q", "test_all.py", "-k",
                          f"gpu_{name}_worker"], seconds)
        if well and " passed" in text and " skipped" not in text:
            self.file.parent.mkdir(exist_ok=True)
            self.file.write_text(json.dumps(self.known() | {name: self.where}))
        else:
            self.failed.add(name)


def measure(command: str, hardware: str, out: Path, seconds: float) -> bool:
    """Run a piece, and move its files to `out` if it has ended well. Returns whether it has."""
    folder = Path("out", "node", re.sub(r"\W+", "-", command))
    work = ROOT / folder
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    training = " train.py " in command
    _, *words = shlex.split(command)  # torchrun, of this very Python
    well, text = run([sys.executable, "-m", "torch.distributed.run", "--standalone", *words,
                      "--out", str(folder / "run" if training else folder)], seconds)
    if not well:
        print(f"{command}: did not end well; what there is of it is in {folder}", flush=True)
        return False
    if training:
        (work / log_name(command, hardware)).write_text(f"{command}\n{hardware}\n\n{text}")
    for path in work.glob("*.*"):
        shutil.move(path, out / path.name)
    return True


def name_of_gpu() -> str:
    """Return it as CUDA says it, in a process that holds none of its memory afterwards."""
    ask = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.check_output([sys.executable, "-c", ask], text=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="run nothing; say what is missing")
    parser.add_argument("--minutes", type=float, default=math.inf,
                        help="start nothing that should take longer than what is left of them")
    parser.add_argument("--host-memory", default="", help="of the pieces' commands, as 490G, where "
                        "the machine shows less than it has; default: what it shows")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results files")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    gpus = torch.cuda.device_count()
    if not gpus and not args.list:
        parser.error("there are no GPUs here: --list says what is missing of eight H200s")
    hardware = f"{gpus} x {name_of_gpu()}" if gpus else "8 x NVIDIA H200"
    gpus = gpus or 8
    if gpus < 2:
        parser.error("one GPU: a piece needs two or more; bench.py measures one")
    args.out.mkdir(parents=True, exist_ok=True)
    tests = Tests(hardware)
    ends = Counter()
    for piece in PIECES:
        if gpus < piece.gpus:
            continue
        command = piece.on(gpus)
        if args.host_memory:
            command += f" --host-memory {args.host_memory}"
        state = "there" if is_there(command, hardware, [HERE, args.out]) else "missing"
        if state == "missing" and not args.list:
            state = attempt(piece, command, hardware, tests, args.out, deadline)
        ends[state] += 1
        print(f"{state:8} {piece.minutes:2} min  {command}", flush=True)
    print(", ".join(f"{count} {state}" for state, count in ends.items()))
    return int(bool(ends["failed"]))


def attempt(piece: Piece, command: str, hardware: str, tests: Tests, out: Path,
            deadline: float) -> str:
    """Measure a piece, and before it, once, its test. Returns measured, failed, or missing if it
    should not end before the deadline."""
    def seconds_left() -> float:
        return deadline - time.monotonic()

    if tests.missing(piece.test):
        if seconds_left() < 60 * (TEST_MINUTES + piece.minutes):
            return "missing"
        tests.run(piece.test, min(LIMIT_S, seconds_left()))
    if piece.test in tests.failed:
        return "failed"
    if seconds_left() < 60 * piece.minutes:
        return "missing"
    well = measure(command, hardware, out, min(LIMIT_S, seconds_left()))
    return "measured" if well else "failed"


if __name__ == "__main__":
    sys.exit(main())
