"""Show what happens at signals, lost ranks and nodes, restarts, and faults of a single rank."""

import contextlib
import multiprocessing
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from pytest import approx, raises
from torch.distributed.elastic.utils.distributed import get_free_port

import model as m
import train
from helpers import on_file_event, saved_steps, uninterrupted_losses
from ranks import STOP_SIGNALS, HeartbeatThread, StopSignal, stop_signals
from test_all import (
    QUICK_FLAGS,
    ROOT,
    RUN_SECONDS,
    finish,
    losses,
    main,
    parametrize,
    read_log,
    run,
    slow,
    start_train,
)


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


def signal_in(monkeypatch, function: str, call: int, *numbers: int) -> list[int]:
    """Send signals to this process when it calls a function of train.py for the `call`-th time.

    Return a list that gets an entry at each call.
    """
    calls = []
    before = getattr(train, function)

    def call_with_signals(*args, **kw):
        calls.append(1)
        if len(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return before(*args, **kw)

    monkeypatch.setattr(train, function, call_with_signals)
    return calls


@parametrize("number", STOP_SIGNALS)
def test_each_signal_ends_the_step_that_runs(number, tmp_path, monkeypatch, capsys):
    """After each of the signals, the step that is running is the last one, and it is saved once.

    The signal comes while the host waits for a step that it has launched. No evaluation and no
    picture follows, because they take time and can be left out. Catches a signal that ends the
    process, and one after which another step of minutes begins.
    """
    signal_in(monkeypatch, "wait_for_step", 3, number)
    # where tests run in the background, some of the signals are ignored
    before = {each: signal.signal(each, signal.SIG_DFL) for each in STOP_SIGNALS}
    try:
        main(f"--steps 9 --eval-every 3 --save-every 3 --out {tmp_path}", picture=True)
        assert {signal.getsignal(each) for each in STOP_SIGNALS} == {signal.SIG_DFL}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    text, rows = capsys.readouterr().out, read_log(tmp_path)
    assert f"{number.name}: the run ends after this step. SIGQUIT" in text
    assert f"stopped by {number.name}: the run ends after step 3\n" in text
    assert saved_steps(tmp_path) == [3] and text.count("saved ") == 1
    assert len(rows) == 3 and not any("val_loss" in row for row in rows)
    assert not (tmp_path / "loss.png").exists()


@slow
def test_closed_terminal_ends_a_run_with_a_save(tmp_path):
    """If the terminal is closed, the run saves and ends with status 0, although it cannot print.

    Catches an error of print that ends the run before the save.
    """
    pid, terminal = pty.fork()
    if pid == 0:  # in the child, whose terminal this is
        os.chdir(ROOT)
        command = f"{sys.executable} train.py {QUICK_FLAGS} --steps 1000000 --out {tmp_path}"
        os.execv(sys.executable, command.split())
    text = ""
    while "step 3/" not in text:
        text += os.read(terminal, 1000).decode()
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert saved_steps(tmp_path) == [len(read_log(tmp_path))]


@slow
def test_output_on_a_full_disk_ends_no_run(tmp_path):
    """A run whose output cannot be written, because its disk is full, trains and saves.

    Catches an error of print that ends the run, or its last status.
    """
    command = f"{sys.executable} train.py {QUICK_FLAGS} --steps 3 --out {tmp_path}"
    with open("/dev/full", "w") as full:
        done = subprocess.run(command.split(), stdout=full, cwd=ROOT, timeout=RUN_SECONDS)
    assert done.returncode == 0 and saved_steps(tmp_path) == [3] and len(losses(tmp_path)) == 3


def test_heartbeat_ends_a_process_without_stderr(monkeypatch):
    """A process that must end because another rank is silent ends, also if it cannot say so.

    Catches a rank that waits for the lost one because stderr is on a full disk.
    """
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    thread = object.__new__(HeartbeatThread)
    thread.rank, thread.advice, thread.finished = 0, "", threading.Event()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        thread.end_process("rank 1 is silent")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert ended == [1]


def test_ignored_signals_stay_ignored(tmp_path, monkeypatch):
    """A signal that is ignored when a run starts does not stop it, as nohup does with SIGHUP.

    Catches a run that ends when its terminal is closed, in spite of nohup.
    """
    signal_in(monkeypatch, "wait_for_step", 2, *STOP_SIGNALS)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        main(f"--steps 4 --save-every -1 --out {tmp_path}")
        assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(losses(tmp_path)) == 4 and signal.set_wakeup_fd(-1) == -1


def test_signals_of_a_forked_child_are_its_own(capsys):
    """A signal that ends a forked child, such as a pool sends to its workers, does not stop the
    run.

    Catches a run that ends because its workers have ended.
    """
    with stop_signals() as stop:
        for _ in range(20):  # the signal may come before the child has begun to run Python code
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join(30)
            assert child.exitcode == -signal.SIGTERM
        time.sleep(0.1)
        assert not stop.number
    assert capsys.readouterr().err == ""


def test_signals_in_a_save_do_not_lose_it(tmp_path, capsys):
    """Several signals in the middle of a save neither end the save nor lead to a second one.

    Catches an impatient Ctrl-C that loses a run's last steps.
    """

    def act():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)

    on_file_event(f"{tmp_path}/step-00000002.tmp/rank", act)
    main(f"--steps 9 --save-every 2 --out {tmp_path}")
    text = capsys.readouterr().out
    assert saved_steps(tmp_path) == [2] and text.count("saved ") == 1
    assert len(losses(tmp_path)) == 2 and text.count("the run ends after this step") == 1


def test_signal_in_an_evaluation_leaves_it(tmp_path, monkeypatch, capsys):
    """A signal in an evaluation ends it at the next batch, and no validation loss is written.

    Catches an evaluation that goes on for hours after the signal, and a validation loss of only a
    few of the sequences.
    """
    flags = f"--steps 4 --eval-every 2 --micro-batch 2 --batch 2 --out {tmp_path}"
    # the first three calls load the batches of steps 1, 2 and 3, because a step also reads the
    # batch after it. The fourth call loads the evaluation's first batch
    calls = signal_in(monkeypatch, "load_batch", 4, signal.SIGUSR1)
    main(flags)
    assert len(calls) == 4
    text, rows = capsys.readouterr().out, read_log(tmp_path)
    assert "stopped by SIGUSR1: the run ends after step 2\n" in text
    assert len(rows) == 2 and not any("val_loss" in row for row in rows) and "val_loss" not in text
    assert saved_steps(tmp_path) == [2] and text.count("saved ") == 1
    main(f"{flags} --resume auto")
    rows = read_log(tmp_path)
    assert [row["step"] for row in rows if "val_loss" in row] == [4]


def test_signal_in_the_start_ends_it(tmp_path, monkeypatch, capsys):
    """A signal before the first step ends the process at once, with status 0 and a sentence.

    Two signals come, and the first one counts. Catches a start of hours that no signal ends, and
    files of an earlier run that are moved aside although no new run begins.
    """
    main(f"--steps 1 --out {tmp_path}")
    signal_in(monkeypatch, "build_model", 1, signal.SIGUSR2, signal.SIGTERM)
    with raises(SystemExit) as ended:
        main(f"--steps 1 --out {tmp_path}")
    dist.destroy_process_group()
    assert ended.value.code == 0
    sentence = "stopped by SIGUSR2 before the first step, so there is nothing to save\n"
    assert capsys.readouterr().err.endswith(sentence)
    assert saved_steps(tmp_path) == [1] and not (tmp_path / "earlier-1").exists()


@slow
def test_signals_to_ranks_that_wait(tmp_path):
    """Ranks that wait for each other end at a signal, in the start and in an evaluation.

    In the start, rank 1 waits for rank 0 in a collective, so that it cannot run a Python signal
    handler. In the evaluation, only rank 1 gets the signal, and both leave at the same batch.
    Catches a rank that no signal reaches, and a rank that waits for another one that has left.
    """
    code = """
import ranks
ranks.EXIT_SECONDS = 0.5
ranks.BEAT_S = 1e3
if os.environ['RANK'] == '0':
    train.check_folders = lambda *args: time.sleep(60)
"""
    said = tmp_path / "said"
    both = start_train(f"--out {tmp_path}/o", 2, said, code)
    deadline = time.time() + 120
    while not all(handles(process.pid, signal.SIGUSR1) for process in both):
        assert time.time() < deadline
        time.sleep(0.2)
    time.sleep(2)  # until rank 1 waits in the collective
    for process in both:
        os.kill(process.pid, signal.SIGUSR1)
    started = time.time()
    text = finish(both, said)
    assert time.time() - started < 30
    for rank in "01":
        assert f"rank {rank}: stopped by SIGUSR1 before the first step, so" in text

    code = """
load, batches = train.load_batch, []
def load_batch(run, first, *args):
    batches.append(first)
    if run.rank and len(batches) == 6:  # 3 of training, then 1 and 2 of the evaluation
        os.kill(os.getpid(), signal.SIGTERM)
    return load(run, first, *args)
train.load_batch = load_batch
"""
    flags = f"--steps 9 --eval-every 2 --micro-batch 1 --batch 2 --out {tmp_path}/o"
    text = run(flags, 2, code)
    assert "stopped by SIGTERM: the run ends after step 2\n" in text and "val_loss" not in text
    assert saved_steps(tmp_path / "o") == [2] and len(losses(tmp_path / "o")) == 2


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal (proc(5))."""
    (mask,) = re.findall("SigCgt:\\s+(\\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


@slow
def test_each_signal_to_torchrun(tmp_path):
    """Each signal to torchrun itself lets its ranks save, if --signals-to-handle names it.

    The flags are those of the Slurm script in docs/runs.md. torchrun passes the signal on, and
    waits for its ranks. Its own status is 1. Catches a scheduler's signal that kills torchrun at
    once, and its ranks 20 seconds later.
    """
    page = (ROOT / "docs" / "runs.md").read_text()
    (handled,) = set(re.findall(r"--signals-to-handle ([A-Z0-9,]+)", page))
    assert {number.name for number in STOP_SIGNALS} == set(handled.split(","))
    torchrun = "-m torch.distributed.run --nproc_per_node 1 --standalone --shutdown-timeout 60"
    command = f"{sys.executable} {torchrun} --signals-to-handle {handled} {ROOT}/train.py"
    started = {}
    for number in STOP_SIGNALS:
        flags = f"{QUICK_FLAGS} --steps 1000000 --out {tmp_path / number.name}"
        started[number] = subprocess.Popen(
            f"{command} {flags}".split(),
            stdout=open(f"{tmp_path / number.name}.txt", "w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    for number, process in started.items():
        out = tmp_path / number.name
        deadline = time.time() + RUN_SECONDS
        while not ((out / "log.jsonl").exists() and len(losses(out)) > 2):
            assert time.time() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
    for number, process in started.items():
        process.wait(RUN_SECONDS)
        out = tmp_path / number.name
        text = Path(f"{out}.txt").read_text()
        done = len(losses(out))
        assert f"stopped by {number.name}: the run ends after step {done}\n" in text, text
        # torchrun exits with status 1, or now and then aborts after its ranks have ended
        assert saved_steps(out) == [done] and process.returncode in (1, -signal.SIGABRT), text


@parametrize(
    "text, seconds",
    [
        ("3h55m", 14100),
        ("90m", 5400),
        ("45s", 45),
        ("1d2h", 93600),
        ("7200", 7200),
        ("1d0h0m1s", 86401),
    ],
)
def test_forms_of_stop_after(text, seconds):
    """--stop-after takes days, hours, minutes and seconds, in this order, or seconds."""
    assert train.duration(text) == seconds


@parametrize(
    "text",
    ["0", "0m", "m", "2h30", "9" * 99, "55m3h", "3h 55m", "1:30", "1.5h", "-5m", "3H", "5w", "٣h"],
)
def test_times_that_are_refused(text):
    """Any other --stop-after is refused, with examples. Catches a time that is read as another."""
    with raises(ValueError, match=f"--stop-after {re.escape(text)}: choose .* such as 3h55m"):
        train.Config(stop_after=text)


def test_stop_after_counts_a_step_and_the_save(monkeypatch):
    """The run stops if another step and a save would end after --stop-after. Only rank 0 decides.

    The step is expected to take as long as the longest recent one. Catches a step that is begun too
    late, a run that stops without need, and a rank that stops by itself.
    """
    now = [0.0]
    monkeypatch.setattr(train, "process_seconds", lambda: now[0])
    # a save of these two parts is expected to take 8 seconds, 4 for each
    part = SimpleNamespace(nbytes=4 * int(train.SAVE_RATE), saved_here=True)
    states = SimpleNamespace(state_parts=lambda: {"a": part, "b": part})
    saver = SimpleNamespace(seconds=0.0, writing=False)
    signals = StopSignal()

    def make(rank=0, **flags):
        plan = SimpleNamespace(model=m.MODELS["tiny"], dtype=torch.float32)
        run = SimpleNamespace(cfg=train.Config(**flags), rank=rank, plan=plan)
        return train.Stop(run, signals, saver, states)

    stop, other_rank, no_limit = make(stop_after="100s"), make(1, stop_after="100s"), make()
    never_saves = make(stop_after="100s", save_every=-1)

    def requests(at: float) -> list[float]:
        """Return what each of the four requests when `at` seconds of the 100 have passed."""
        now[0] = at
        return [each.request() for each in (stop, other_rank, no_limit, never_saves)]

    time_is_up = train.TIME_IS_UP

    def assert_stops_after(last_second: float) -> None:
        """Assert that `stop` goes on at this second, and requests a stop at the next one."""
        assert requests(last_second) == [0, 0, 0, 0]
        assert requests(last_second + 1) == [time_is_up, 0, 0, 0]

    assert_stops_after(100 - 8)  # before the first step only the save is expected to take time
    assert requests(101) == [time_is_up, 0, 0, time_is_up]
    stop.step_seconds.extend([30, 10, 10])
    assert_stops_after(100 - 8 - 30)  # the longest step counts
    stop.step_seconds.extend(train.RECENT_STEPS * [10])
    assert_stops_after(100 - 8 - 10)  # but only if it is recent
    saver.seconds = 20.0
    assert_stops_after(100 - 20 - 10)  # the time of the last save is known now
    saver.writing = True
    assert_stops_after(100 - 20 - 20 - 10)  # the save that is under way has to end first

    # before the first export, its seconds are estimated from its bytes
    exports = make(stop_after="100s", export="folder")
    assert exports.export_seconds == approx(4 * m.param_count(m.MODELS["tiny"]) / train.SAVE_RATE)
    exports.export_seconds = 15.0
    monkeypatch.setattr(dist, "all_reduce", lambda *args: None)  # as on a single rank
    now[0] = 100 - 15
    assert exports.ask_before_export() == "" and exports.request() == time_is_up
    now[0] = 101 - 15  # no save follows, so only the export counts
    assert exports.ask_before_export().endswith("the work that comes next may take 0:00:15")
    assert exports.time_is_up

    signals.number = int(signal.SIGUSR1)
    assert requests(0) == 4 * [signal.SIGUSR1]
    assert requests(101) == [time_is_up, *2 * [signal.SIGUSR1], time_is_up]
    assert stop.agree_on(signal.SIGUSR1) == "stopped by SIGUSR1"
    stop.request()
    now[0] = 3661.2  # 1:01:01
    assert stop.agree_on(time_is_up) == (
        "--stop-after 100s: 1:01:01 have passed, and the work that comes next, with a save, may "
        "take 0:00:50"
    )


@slow
def test_stop_after_ends_all_ranks_in_time(tmp_path):
    """Two ranks stop together in time, with status 0, and --resume auto goes on.

    A resumed run has no limit unless its command gives one. Rank 1's clock is wrong, which changes
    nothing because rank 0 decides. Catches ranks that stop at different steps, and a limit that a
    resumed run inherits.
    """
    code = "if os.environ['RANK'] == '1': train.process_seconds = lambda: 1e9"
    flags = f"--out {tmp_path} --save-every 2 --steps"
    text = run(f"{flags} 1000000 --stop-after 15s", 2, code)
    done = len(losses(tmp_path))
    passed = re.search("--stop-after 15s: 0:00:(..) have passed", text)
    assert 10 <= int(passed[1]) <= 15, text[-500:]
    assert re.search(
        f"--stop-after 15s: 0:00:.* may take .*: the run ends after step {done}\n", text
    )
    assert saved_steps(tmp_path)[-1] == done > 0
    text = run(f"{flags} {done + 2} --resume auto", 2)
    assert f"at step {done}; changed: steps 1000000 -> {done + 2}\n" in text
    assert len(losses(tmp_path)) == done + 2


def test_stop_after_before_the_first_step(tmp_path, capsys):
    """If the start took all the time, the run ends without a step and without a checkpoint.

    Catches a checkpoint of initial weights, which would be resumed as if they were trained.
    """
    main(f"--steps 3 --stop-after 1s --out {tmp_path}")  # this process is older than a second
    assert "have passed, and the work that comes next" in capsys.readouterr().out
    assert not saved_steps(tmp_path) and not read_log(tmp_path)
    main(f"--steps 3 --resume auto --out {tmp_path}")
    main(f"--steps 5 --resume auto --stop-after 1s --out {tmp_path}")
    assert saved_steps(tmp_path) == [3] and len(losses(tmp_path)) == 3


def test_stop_after_leaves_out_the_last_export(tmp_path, capsys, monkeypatch):
    """If no time is left for the export at the end of a run, the run says so, and the same command
    with --resume exports. A step that no checkpoint has is exported nevertheless.

    Catches an export that a scheduler kills, and a model that is neither saved nor exported.
    """
    flags = f"--steps 1 --out {tmp_path}/o --export {tmp_path}/e"
    before = train.Stop.ask_before_export

    def ask_before_export(stop):
        stop.export_seconds = 1e9
        return before(stop)

    monkeypatch.setattr(train.Stop, "ask_before_export", ask_before_export)
    main(f"{flags} --stop-after 1d")
    said = capsys.readouterr().out
    assert "step 1 was not exported. To export it: the same command with --resume" in said
    assert saved_steps(tmp_path / "o") == [1] and not (tmp_path / "e" / "config.json").exists()
    main(f"{flags} --resume")
    assert (tmp_path / "e" / "config.json").exists()
    main(f"--steps 1 --out {tmp_path}/p --export {tmp_path}/f --save-every -1 --stop-after 1d")
    assert (tmp_path / "f" / "config.json").exists()
    # an export in the middle of the run ends it, after the save
    main(f"--steps 3 --out {tmp_path}/q --export {tmp_path}/g --save-every 2 --stop-after 1d")
    assert saved_steps(tmp_path / "q") == [2] and "step 2" in capsys.readouterr().out
    assert not (tmp_path / "g" / "config.json").exists()


@slow
@parametrize("ranks, number", [(0, signal.SIGINT), (2, signal.SIGTERM)])
def test_signals(ranks, number, tmp_path):
    """After a signal to one rank, all ranks finish the step, save, and end with status 0.

    Catches a stop without a checkpoint, and a rank that waits for ever.
    """
    out, said = tmp_path / "o", tmp_path / "said"
    # a shell without job control starts a process in the background with SIGINT ignored
    code = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    processes = start_train(f"--steps 1000000 --out {out}", ranks, said, f"import signal; {code}")
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
    signal_in(monkeypatch, "wait_for_step", 2, signal.SIGTERM)
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
    # if not even the first batch can be read, there is nothing to save
    on_file_event(f"{tmp_path}/new/log.jsonl", lambda: os.truncate(words, 3000))
    with raises(SystemExit, match=f"train.py: .*{message}"):
        main(f"--data {words} --out {tmp_path}/new")
    assert saved_steps(tmp_path / "new") == []


@slow
def test_log_that_cannot_be_opened(tmp_path):
    """If rank 0 cannot open log.jsonl, both ranks end with one error.

    Catches an error of rank 0 for which the other rank waits.
    """
    code = "from helpers import *\non_file_event('log.jsonl', fail_disk_full)"
    text = run(f"--out {tmp_path}", 2, code, expect=1)
    assert text.count("ConfigError: [Errno 28] No space left on device (on ranks [0])") == 2


def test_resumed_run_inherits_its_timeout(tmp_path, monkeypatch):
    """The --timeout that a resumed run inherits holds for collectives of all ranks, too.

    Catches a resumed run that waits for as long as a run without --timeout.
    """
    timeouts = []

    def note_timeout() -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        timeouts.append(backend.options._timeout.total_seconds())

    def ten_seconds_more(run) -> float:
        note_timeout()
        return run.cfg.timeout + 10

    def train_nothing(*args) -> str:
        note_timeout()
        return ""

    main(f"--out {tmp_path} --steps 1 --timeout 77")
    monkeypatch.setattr(train, "collective_timeout", ten_seconds_more)
    monkeypatch.setattr(train, "train", train_nothing)
    main(f"--out {tmp_path} --steps 2 --resume")
    assert timeouts == [77, 87]  # before and after the seconds of a step are added


def test_a_long_step_does_not_time_out():
    """On GPUs a collective may take a whole step longer than --timeout, because NCCL counts from
    its launch, and the host launches it minutes before it runs.

    Catches a step of 20 minutes that fails after 10.
    """
    plan = SimpleNamespace(step_s=1200.0)
    for device, seconds in (("cuda", 1277.0), ("cpu", 77.0)):
        run = train.Run(train.Config(timeout=77.0), 0, torch.device(device), "naive", plan)
        assert train.collective_timeout(run) == seconds


@slow
def test_faults_of_one_rank(tmp_path):
    """Faults of one of two ranks, each with its own folder, end neither rank too early.

    At step 2, rank 1's disk is full. At step 3, rank 0 writes for longer than rank 1 may wait in a
    collective. At step 4, rank 1's data disappear. Catches a fault of one rank that ends or hangs
    the other one, or that loses its training.
    """
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "words.txt").write_bytes(bytes(range(97, 122)) * 1600)
    code = f"""
import ranks
from helpers import *
ranks.BEAT_S, ranks.SILENT_BEATS = 0.2, 10
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

    Each node is a torchrun with one rank. When the second node is back, the two have counted
    different numbers of restarts. Catches a node that cannot come back.
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
    """If a rank stops in a collective with its sockets open, the other rank ends and names it.

    Catches a dead rank that nobody names.
    """
    code = f"""
import ranks
from helpers import *
ranks.BEAT_S, ranks.SILENT_BEATS = 0.2, 10
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
