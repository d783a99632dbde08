"""Show what happens at signals, lost ranks and nodes, restarts, and faults of a single rank."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from pytest import raises
from torch.distributed.elastic.utils.distributed import get_free_port

from helpers import on_file_event, saved_steps, uninterrupted_losses
from test_all import ROOT, RUN_SECONDS, finish, losses, main, parametrize, run, slow, start_train


def launch(flags: str, folder: Path, torchrun: str, code: str, **env) -> subprocess.Popen:
    """Start train.py under torchrun. `code` runs before it, from a file in the folder."""
    driver = folder / "driver.py"
    driver.write_text(f"from test_all import *\nfrom helpers import *\n{code}\nmain({flags!r})\n")
    command = f"{sys.executable} -m torch.distributed.run {torchrun} {driver}"
    usual = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command.split(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **usual, **env},
        cwd=ROOT,
    )


@slow
def test_restart(tmp_path):
    """If one of two ranks dies in a save, torchrun restarts both, and they resume bit for bit.

    Catches a restart from the beginning or from a torn checkpoint.
    """
    code = f"""
flag = Path(r'{tmp_path}/died')
def once():
    if not flag.exists():
        flag.touch()
        kill_self()
on_file_event('step-00000004.tmp/rank-00001', once)
"""
    torchrun = "--nproc_per_node 2 --standalone --max-restarts 1 --shutdown-timeout 5"
    flags = f"--save-every 2 --resume auto --out {tmp_path}/o"
    process = launch(flags, tmp_path, torchrun, code)
    text, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, text[-3000:]
    assert (tmp_path / "died").exists() and "step-00000002 at step 2" in text
    assert losses(tmp_path / "o") == uninterrupted_losses(2)


@slow
@parametrize("ranks, number", [(0, signal.SIGINT), (2, signal.SIGTERM)])
def test_signals(ranks, number, tmp_path):
    """After a signal to one rank or to all, all finish the step, save, and end with status 0.

    Catches a stop without a checkpoint, and a rank that waits for ever.
    """
    out, said = tmp_path / "o", tmp_path / "said"
    processes = start_train(f"--steps 1000000 --out {out}", ranks, said)
    deadline = time.time() + 120
    while not ((out / "log.jsonl").exists() and len(losses(out)) > 2):
        assert time.time() < deadline and processes[-1].is_alive()
        time.sleep(0.1)
    os.kill(processes[-1].pid, number)
    text, done = finish(processes, said), len(losses(out))
    assert f"stopped by {number.name}: the run ends after step {done}\n" in text
    assert saved_steps(out) == [done]


def test_signal_in_the_last_step_leaves_nothing_out(tmp_path, monkeypatch):
    """After a signal in the last step, the checkpoint and the export are still written.

    The signal may also have ended the reader of train.py's output. Catches an export that is left
    out.
    """
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", open(writer, "w"))
    on_file_event(
        f"{tmp_path}/o/step-00000001.tmp/rank", lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    main(f"--steps 2 --save-every 1 --out {tmp_path}/o --export {tmp_path}/hf")
    assert saved_steps(tmp_path / "o") == [1, 2]
    assert (tmp_path / "hf" / "model-00001-of-00001.safetensors").stat().st_size > 2**20


def test_data_that_goes_away(tmp_path):
    """If a data file disappears, the run saves its steps and ends with an error that names it.

    With the file back, the run resumes. Catches training that is lost with the data.
    """
    words, out = tmp_path / "words.txt", tmp_path / "o"
    text = bytes(range(97, 122)) * 1600
    words.write_bytes(text)
    flags = f"--save-every 2 --data {words} --out {out}"
    on_file_event(f"{out}/step-00000002.tmp/rank", lambda: os.truncate(words, 3000))
    message = "words.txt has become shorter than the 40000 tokens"
    with raises(SystemExit, match=f"train.py: .*{message}"):
        main(flags)
    words.write_bytes(text)
    assert saved_steps(out) == [2, 3]
    main(f"{flags} --resume")
    assert [step for step, *_ in losses(out)] == [1, 2, 3, 4, 5, 6]


@slow
def test_faults_of_one_rank(tmp_path):
    """Faults of one of two ranks, each with its own folder, end neither rank too early.

    First a disk is full. Then a rank writes for longer than the other one may wait in a collective.
    Then data go away. Catches a fault of one rank that ends or hangs the other, or that loses its
    training.
    """
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "words.txt").write_bytes(bytes(range(97, 122)) * 1600)
    code = f"""
import ranks
from helpers import *
ranks.BEAT_S = 0.2
os.chdir(r'{tmp_path}/' + os.environ['RANK'])
on_file_event('step-00000002.tmp/rank-00001', fail_disk_full)
on_file_event('step-00000003.tmp/rank-00000', lambda: time.sleep(7))
on_file_event('step-00000004.tmp/rank-00001', lambda: Path('words.txt').unlink(missing_ok=True))
"""
    flags = f"--data words.txt --out {tmp_path}/o --save-every 1 --timeout 5"
    text = run(flags, 2, code, expect=1)
    assert re.search(r"step 2 was not saved: .* No space left on device \(on ranks \[1\]\)", text)
    assert re.search(r"'words.txt' \(on ranks \[1\]\): the run ends after step 5", text)
    assert text.count("train.py: [Errno") == 1 and "Traceback" not in text
    assert saved_steps(tmp_path / "o") == [4, 5]


@slow
def test_lost_node_comes_back(tmp_path):
    """If one of two nodes is killed and comes back, the run resumes on both.

    Each node is a torchrun with one rank. Their counts of restarts differ then. Catches a node that
    cannot come back.
    """
    port = get_free_port()
    torchrun = (
        f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id x "
        "--max-restarts 2 --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=2"
    )
    code = """
def lost():
    time.sleep(1)
    os.kill(os.getppid(), signal.SIGKILL)
    kill_self()
if 'LOST' in os.environ:
    on_file_event('step-00000004.tmp/rank', lost)
"""

    def node(name, **env):
        folder = tmp_path / name
        folder.mkdir()
        flags = f"--save-every 2 --resume auto --out {tmp_path}/out"
        return launch(flags, folder, torchrun, code, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env)

    first = node("first")  # this node holds the rendezvous
    deadline = time.time() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.time() < deadline and first.poll() is None
        time.sleep(0.1)
    node("second", LOST="1").wait(120)
    again = node("again")
    texts = [process.communicate(timeout=120)[0] for process in (first, again)]
    assert first.returncode == again.returncode == 0, texts
    assert re.search("resumed .*step-00000002 at step 2", "".join(texts))
    assert losses(tmp_path / "out") == uninterrupted_losses(2)


@slow
@parametrize(
    "victim, says",
    [
        (
            1,
            "rank 1 on host {host} .process {pid}. gave no sign for 2 s: it is dead or unreachable",
        ),
        (0, "the store on rank 0's node, 127.0.0.1, has not answered for 2 s"),
    ],
)
def test_failed_rank_is_named(victim, says, tmp_path):
    """If a rank stops in a collective with its sockets open, the other one ends and names it.

    Catches a dead rank that nobody names.
    """
    code = f"""
import ranks
from helpers import *
ranks.BEAT_S = 0.2
on_file_event('step-00000002.tmp/rank-0000{victim}', lambda: os.kill(os.getpid(), signal.SIGSTOP))
"""
    said = tmp_path / "said"
    both = start_train(f"--save-every 2 --out {tmp_path}", 2, said, code)
    both[1 - victim].join(120)
    assert both[victim].is_alive()
    both[victim].kill()
    both[victim].join(30)
    text = said.read_text()
    says = says.format(host=r"\S+", pid=both[victim].pid)
    assert both[1 - victim].exitcode == 1 and "Traceback" not in text, text
    assert re.search(f"rank {1 - victim}: {says}.*; this run ends", text), text
