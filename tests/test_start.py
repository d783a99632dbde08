"""Test what a run checks at its start: memory, paths, unreadable files, and other launchers."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from pytest import raises

import bench
import data
import measure
import memplan
import planner
import ranks
import streams
import train
from helpers import make_tokenizer, on_file_event, round_machine, saved_steps
from test_all import ROOT, main, parametrize, run, slow

GIB = 2**30
NONE_V1 = 9223372036854771712  # "no limit" of version 1

V1_MOUNT = "35 31 0:32 {group} {at} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {group} {at} rw,relatime - cgroup2 cgroup2 rw\n"
CPU_MOUNT = "33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"

# name -> (a tree of files, the limit in GiB that follows from them on a machine of 64 GiB). A tree
# has the files cgroup and mountinfo of /proc/self, and files with limits, which are named by their
# paths below /sys/fs/cgroup.
TREES = {
    "no control groups": ({}, 64),
    "version 2": ({"cgroup": "0::/job\n", "job/memory.max": 8 * GIB}, 8),
    "version 2, no limit": ({"cgroup": "0::/job\n", "job/memory.max": "max"}, 64),
    "version 2, a group above": (
        {
            "cgroup": "0::/slurm/job_7/step_0\n",
            "slurm/job_7/step_0/memory.max": "max",
            "slurm/job_7/memory.max": 6 * GIB,
            "slurm/memory.max": 32 * GIB,
        },
        6,
    ),
    "version 2, memory.high": (
        {"cgroup": "0::/job\n", "job/memory.max": 8 * GIB, "job/memory.high": 5 * GIB},
        5,
    ),
    "version 2, a namespace": (
        {
            "cgroup": "0::/\n",
            "mountinfo": V2_MOUNT.format(group="/", at="/sys/fs/cgroup"),
            "memory.max": 3 * GIB,
        },
        3,
    ),
    "version 1": (
        {
            "cgroup": "9:cpu,cpuacct:/\n4:memory:/slurm/job_7\n1:name=systemd:/\n",
            "mountinfo": CPU_MOUNT + V1_MOUNT.format(group="/", at="/sys/fs/cgroup/memory"),
            "memory/memory.limit_in_bytes": NONE_V1,
            "memory/slurm/job_7/memory.limit_in_bytes": 2 * GIB,
        },
        2,
    ),
    "version 1, without mountinfo": (
        {"cgroup": "4:memory:/job\n", "memory/job/memory.limit_in_bytes": 2 * GIB},
        2,
    ),
    "version 1, a group above": (
        {
            "cgroup": "4:cpu,memory:/slurm/job_7\n",
            "memory/slurm/job_7/memory.limit_in_bytes": NONE_V1,
            "memory/slurm/memory.limit_in_bytes": 7 * GIB,
        },
        7,
    ),
    "version 1, no limit": (
        {"cgroup": "4:memory:/job\n", "memory/job/memory.limit_in_bytes": NONE_V1},
        64,
    ),
    "version 1, a container": (
        {
            "cgroup": "4:memory:/docker/7f\n",
            "mountinfo": V1_MOUNT.format(group="/docker/7f", at="/sys/fs/cgroup/memory"),
            "memory/memory.limit_in_bytes": NONE_V1,
            "memory/memory.stat": f"cache 5\nhierarchical_memory_limit {4 * GIB}\nrss 1\n",
        },
        4,
    ),
    "version 1, a container that sees another group's mount": (
        {
            "cgroup": "4:memory:/docker/7f\n",
            "mountinfo": V1_MOUNT.format(group="/kubepods/pod1", at="/sys/fs/cgroup/memory"),
            "memory/memory.limit_in_bytes": 9 * GIB,
        },
        9,
    ),
    "hybrid": (
        {
            "cgroup": "4:memory:/job\n1:name=systemd:/\n0::/user.slice\n",
            "mountinfo": V1_MOUNT.format(group="/", at="/sys/fs/cgroup/memory")
            + V2_MOUNT.format(group="/", at="/sys/fs/cgroup/unified"),
            "memory/job/memory.limit_in_bytes": 2 * GIB,
            "unified/user.slice/cgroup.procs": 1,
        },
        2,
    ),
    "mounted elsewhere, in a path with a space": (
        {
            "cgroup": "4:memory:/a b:c\n",
            "mountinfo": V1_MOUNT.format(group="/", at=r"/sys/fs/cgroup/mem\040ory"),
            "mem ory/a b:c/memory.limit_in_bytes": 2 * GIB,
        },
        2,
    ),
    "files that nobody understands": (
        {"cgroup": "nothing\n0::/job\n", "mountinfo": "?\n\n1 - cgroup2\n", "job/memory.max": "?"},
        64,
    ),
}


@parametrize("name", TREES)
def test_smallest_limit_of_the_control_groups_counts(name, tmp_path, monkeypatch):
    """Of the machine's memory and all limits of a process's control groups, the smallest counts.

    Catches a plan for more memory than a job may use, which the kernel kills.
    """
    files, gib = TREES[name]
    for path, content in files.items():
        folder = "proc/self" if path in ("cgroup", "mountinfo") else "sys/fs/cgroup"
        file = tmp_path / folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}")
    monkeypatch.setattr(streams, "HOST_BYTES", 64 * GIB)
    # two ranks share the memory, and an eighth of it stays free unless --host-memory is given
    assert streams.host_budget(2, None, tmp_path) == gib * GIB * 7 / 8 / 2
    assert streams.host_budget(2, gib * GIB, tmp_path) == gib * GIB / 2
    with raises(ValueError, match=rf"--host-memory .* too much: .* allows {gib}\.0 GiB\. "):
        streams.host_budget(2, gib * GIB + 1, tmp_path)


def left_of(root: Path) -> float:
    """Return the bytes of host memory that a process can still get, as the files in root say."""
    return min(memory.left for memory in streams.host_memories(root))


def test_available_memory_counts_caches_as_free(tmp_path):
    """What Linux estimates is read, and no estimate is no limit."""
    assert left_of(tmp_path) == streams.NO_LIMIT
    (tmp_path / "proc").mkdir()
    lines = "MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable:    3000 kB\nHugePages_Total: 0\n"
    (tmp_path / "proc/meminfo").write_text(lines)
    assert left_of(tmp_path) == 3000 * 2**10


@parametrize(
    "version, usage, stat, caches",
    [
        (2, "memory.current", "inactive_file 100\nactive_file 50\nanon 7\n", 150),
        (2, "memory.current", "inactive_file 100\nslab_reclaimable 30\nslab 40\n", 130),
        (1, "memory.usage_in_bytes", "total_inactive_file 100\ntotal_active_file 50\n", 150),
        (1, "memory.usage_in_bytes", "inactive_file 100\nactive_file 50\n", 150),
    ],
)
def test_available_memory_is_what_a_control_group_has_left(version, usage, stat, caches, tmp_path):
    """A group has its limit left, less what it uses, plus the caches in it: never below 0. A
    process gets no more than the machine has.

    Catches a warning because a group has read many files.
    """
    group = tmp_path / "sys/fs/cgroup" / ("job" if version == 2 else "memory/job")
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n" if version == 2 else "4:memory:/job\n")
    limit = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
    limit.write_text("10000\n")
    assert left_of(tmp_path) == streams.NO_LIMIT  # nobody knows what it uses
    (group / usage).write_text("9000\n")
    (group / "memory.stat").write_text("inactive_file 1\n" * ("total_" in stat) + stat)
    assert left_of(tmp_path) == 10000 - 9000 + caches
    (group / usage).write_text("10200\n")
    assert left_of(tmp_path) == 0
    (group / usage).write_text("0\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable:       3 kB\n")
    assert left_of(tmp_path) == 3 * 2**10


@parametrize(
    "planned, taken, per_node, advice",
    [
        (105, 121, 1, "91G"),  # it takes 16 GiB beyond its plan, and others take 2
        (105, 80, 1, "66G"),  # others take 43 GiB, and it is still pinning
        (25, 27, 4, "86G"),  # others take 15 GiB
        (0, 5, 1, None),  # others take 118 GiB: no smaller plan helps
    ],
)
def test_a_run_that_linux_may_soon_kill_says_why(
    planned, taken, per_node, advice, group, monkeypatch, capfd
):
    """When nearly no host memory is left, a run says what it planned, what it takes and what to
    pass, which would leave an eighth free. It says so once, and goes on.

    Catches a run that Linux kills without a word: nothing can be printed afterwards. Catches advice
    that repeats the plan.
    """
    plan = SimpleNamespace(host_bytes=planned * GIB, per_node=per_node)
    monkeypatch.setattr(train, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(train, "own_host_bytes", lambda: (taken * GIB, taken * GIB))
    for left, said in ((3 * GIB, 0), (2 * GIB, 1)):
        machine = streams.HostMemory("this machine", 125 * GIB, left)
        larger_group = streams.HostMemory("a group", 1000 * GIB, 500 * GIB)
        monkeypatch.setattr(train, "host_memories", lambda: [larger_group, machine])
        with train.host_memory_watch(plan):
            time.sleep(0.2)
        text = capfd.readouterr().err
        assert len(re.findall(r"of 125.0 GiB of .* \(this machine\) only 2.0 GiB", text)) == said
    assert f"plan takes {planned}.0 GiB, and the process of rank 0 takes {taken}.0 GiB" in text
    assert text.rstrip().endswith(f"pass --host-memory {advice}" if advice else "other processes")
    assert not advice or int(advice[:-1]) < planned * per_node


@parametrize(
    "free, reserved, advice",
    [
        (20, 55, None),  # CUDA and NCCL take 5 of 80 GiB, and 75 are left
        (20, 53, "76G"),  # they take 7, and a plan for 76 GiB takes at most 72.2
    ],
)
def test_a_plan_for_more_gpu_memory_than_is_left_is_announced(
    free, reserved, advice, group, monkeypatch, capsys
):
    """If CUDA, NCCL and other programs take more of a GPU than the planner reserves for them, a run
    says what it planned and what to choose.

    Catches a run that ends out of memory although its plan is right.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved * GIB)
    plan = SimpleNamespace(gpu_bytes=75 * GIB)
    train.warn_of_short_gpu_memory(SimpleNamespace(device=torch.device("cuda"), plan=plan))
    text = capsys.readouterr().out
    assert ("WARNING: this plan takes 75.0 GiB" in text) == bool(advice)
    assert not advice or "leave only 73.0 GiB of 80.0 GiB" in text
    assert not advice or f"--gpu-memory {advice} or less" in text


@parametrize("rate, warned", [(45e9, False), (25e9, True)])
def test_a_host_that_copies_slowly_is_announced(rate, warned, group, monkeypatch, capsys):
    """A plan that copies to the host is announced if its machine's copies are much slower than its
    profile's. A plan that copies nothing measures nothing.

    Catches a step that waits for copies, and no one knows why.
    """
    assert 1e8 < measure.host_copy_rate(torch.device("cpu")) < 1e12  # it can run without a GPU, too
    profile = round_machine(to_host=50e9)
    run = SimpleNamespace(
        device=torch.device("cuda"),
        plan=SimpleNamespace(host_bytes=GIB, per_node=4),
        hardware=SimpleNamespace(profile=profile),
    )
    monkeypatch.setattr(train, "host_copy_rate", lambda _: rate)
    train.warn_of_slow_host_copies(run)
    text = capsys.readouterr().out
    assert ("WARNING: copies to the host run at 25.0 GB/s per GPU" in text) == warned
    assert not warned or "expects 50.0 GB/s (profile round)" in text
    assert not warned or "torchrun --nproc_per_node 4 bench.py --profile mine" in text

    monkeypatch.setattr(train, "host_copy_rate", None)
    run.plan.host_bytes = 0
    train.warn_of_slow_host_copies(run)


@parametrize("steps_before", [0, 2])
def test_a_run_that_ends_while_another_starts_is_resumed(
    steps_before, tmp_path, monkeypatch, capsys
):
    """With --resume auto, a run that starts while another one still trains in the same folder
    begins from the last checkpoint of the other one, if that ends before it needs the folder.

    Catches a run that begins with an older checkpoint, and moves the newer one out of the way, and
    a run that loads one checkpoint with the flags of another one of the same step.
    """
    flags, check_tokens = f"--out {tmp_path}", train.check_tokens
    if steps_before:
        main(f"{flags} --steps {steps_before} --seed 1")

    def check_slowly(*args):
        monkeypatch.setattr(train, "check_tokens", check_tokens)
        run(f"{flags} --steps 2 --seed 2")  # the other run
        return check_tokens(*args)

    monkeypatch.setattr(train, "check_tokens", check_slowly)
    main(f"{flags} --steps 3 --resume auto")
    text = capsys.readouterr().out
    assert f"another run has saved in {tmp_path} meanwhile: starting again" in text
    assert "step-00000002 at step 2; changed: steps 2 -> 3, schedule_steps 2 -> 3\n" in text
    meta = json.loads((tmp_path / "step-00000003" / "meta.json").read_text())
    assert saved_steps(tmp_path) == [2, 3] and meta["config"]["seed"] == 2
    assert (tmp_path / "earlier-1").exists() == bool(steps_before)  # the first run's checkpoint


def test_a_plan_for_more_host_memory_than_is_left_is_announced(tmp_path, monkeypatch, capsys):
    """Linux kills a process that takes more, and then nothing is printed."""
    flags = f"--steps 1 --os-place host --save-every -1 --out {tmp_path}"
    for left, warned in ((16 * GIB, False), (2**23, True), (0, True)):
        memory = streams.HostMemory("this machine", 32 * GIB, left)
        monkeypatch.setattr(train, "host_memories", lambda: [memory])
        monkeypatch.setattr(train, "LAST_SHARE", -1)
        main(f"{flags}/{left}")
        text, *_ = capsys.readouterr().out.partition("step 1/1")
        assert ("WARNING: this plan takes" in text) == warned
        assert ("--host-memory 7168K" in text) == (left == 2**23)
    assert re.search(r"takes \S+ MiB of host memory per node, and a node has only 0\.0 GiB", text)


TEXT_FLAGS = [  # all flags whose value may be any text, so also a path
    (program, name)
    for program in (train.Config, planner.PlannerFlags)
    for name, field in planner.flags_of(program).items()
    if field.type is str and not field.metadata["among"]
]


@parametrize("program, name", TEXT_FLAGS)
def test_home_is_expanded_in_every_flag(program, name, monkeypatch):
    """~ at the beginning of a flag's text is the home, however the flag is spelt.

    Catches a folder with the name ~, and a new flag whose ~ is forgotten.
    """
    monkeypatch.setenv("HOME", "/home/me")
    parser = planner.make_parser(program, "")
    flag = planner.flag_name(name)
    for command in ([f"{flag}=~/a b"], [flag, "~/a b"]):
        assert getattr(parser.parse_args(command), name) == "/home/me/a b"
    for text in ("./~/x", "a~/b", "/~", "hf:x/~", "a.txt, ~", "none"):
        assert getattr(parser.parse_args([flag, text]), name) == text


def test_home_is_expanded_inside_of_values(monkeypatch, capsys):
    """~ is also expanded after hf: and after a comma, and an unknown home is refused.

    Catches a run that writes to a folder with the name ~nobody.
    """
    monkeypatch.setenv("HOME", "/home/me")
    flags = train.parse(["--init=hf:~/m", "--data=~/a.bin:0.7,b.bin:0.2,~/c:0.1", "--resume=~"])
    assert flags["init"] == "hf:/home/me/m" and flags["resume"] == "/home/me"
    assert flags["data"] == "/home/me/a.bin:0.7,b.bin:0.2,/home/me/c:0.1"
    assert train.parse(["--data", "~root/x"])["data"] == str(Path("~root/x").expanduser())
    for text in ("~no-such-user/x", "hf:~no-such-user", "a,~no-such-user/x"):
        with raises(SystemExit) as refused:
            train.parse([f"--out={text}"])
        said = capsys.readouterr().err
        assert refused.value.code == 2 and f"--out: {text}: this machine knows no home" in said
        assert "or ./~no-such-user" in said

    monkeypatch.setattr(sys, "argv", ["bench.py", "--out=~/x"])
    assert bench.parse().out == "/home/me/x"
    assert memplan.main(["/no/file", "--out=~/x"]) == 2
    assert memplan.main(["~/trace.csv"]) == 2
    assert "'/home/me/trace.csv'" in capsys.readouterr().err


def test_home_is_expanded_in_a_run(tmp_path, monkeypatch):
    """A run reads and writes in the home.

    Catches a run that reads or writes in a folder with the name ~.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "text").write_text(500 * "text")
    monkeypatch.chdir(tmp_path)
    main("--steps 1 --data=~/text --out=~/run --export=~/hf")
    main("--steps 1 --data=~/text --out=~/run --init=hf:~/hf --seq 16")
    assert Path("home/run/step-00000001").exists() and Path("home/run/earlier-1").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


UNREADABLE = [  # a file or folder that this user may not read, and the flags of a run that reads it
    ("o/step-00000001/meta.json", "--resume --out o --steps 2"),
    ("o/step-00000001/meta.json", "--resume auto --out o --steps 2"),
    ("o/step-00000001/rank-00000-0.safetensors", "--resume auto --out o --steps 2"),
    ("o/step-00000001/rank-00000-0.safetensors", "--resume o/step-00000001 --out new"),
    ("o/log.jsonl", "--resume auto --out o --steps 2"),
    ("o", "--resume auto --out o --steps 2"),
    ("words.txt", "--data words.txt --out new"),
    ("big.bin.json", "--data big.bin --out new"),
    ("tok/tokenizer.json", "--data words.txt --tokenizer tok --out new"),
    ("hf/config.json", "--init hf:hf --out new"),
]


@parametrize("file, flags", UNREADABLE)
def test_files_that_cannot_be_read_say_so(file, flags, sandbox, tmp_path, monkeypatch):
    """A file that exists and cannot be read is refused by these words.

    A checkpoint that cannot be read is not passed over, because a new run would begin without it.
    Root reads every file, so the refusal is simulated. Catches a file that is called missing or
    broken.
    """

    def deny():
        if Path.cwd() == tmp_path:  # not in a later test
            raise PermissionError(13, "Permission denied", file)

    shutil.copytree(sandbox, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text(500 * "words ")
    Path("big.bin.json").write_text('{"token_bytes": 2}')
    make_tokenizer(Path("tok"), 500 * "words ")
    if file == "o":
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != file)
    else:
        on_file_event(rf"{tmp_path}/{file}$|^{file}$", deny)
    with raises(ValueError, match=f"{file} exists, but user .* may not read it .Permission denied"):
        main(flags)
    assert saved_steps(Path("o")) == [1] and not Path("o/earlier-1").exists()


def test_owner_and_mode_of_an_unreadable_file(tmp_path):
    """The error names the owner, who may allow the reading.

    Catches an error that only repeats the path.
    """
    file = tmp_path / "file"
    file.touch(0o600)
    owned = f"it has mode 600, and user {os.geteuid()} owns it"
    assert owned in str(data.may_not_read(file))
    assert "a folder above it is closed" in str(data.may_not_read(tmp_path / "none"))


LAUNCHED = [  # the variables of a launcher, and how the error begins; "": no error
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "srun runs 2 tasks (SLURM_NTASKS=2), "),
    ({"SLURM_STEP_NUM_TASKS": "8"}, "srun runs 8 tasks (SLURM_STEP_NUM_TASKS=8), "),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun runs 4 tasks (OMPI_COMM_WORLD_SIZE=4), "),
    ({"PMI_SIZE": "16", "PMI_RANK": "3"}, "mpirun runs 16 tasks"),
    ({"FLUX_JOB_SIZE": "2"}, "flux runs 2 tasks"),
    ({"SLURM_NTASKS": "1"}, ""),
    ({"SLURM_NTASKS": "many"}, ""),
    # one task of a job that has several: srun --ntasks 1
    ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, ""),
    # torchrun below srun
    ({"SLURM_NTASKS": "4", "RANK": "0"}, ""),
]


@parametrize("env, begins", LAUNCHED)
def test_other_launchers_are_refused(env, begins, monkeypatch, tmp_path):
    """Several tasks that another launcher starts without torchrun are refused, with the command of
    docs/runs.md.

    Catches tasks that each train by themselves, or of which all but one find OUT locked.
    """
    for names in ranks.LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if not begins:
        ranks.check_launcher()
        return
    with raises(ranks.ConfigError, match=re.escape(begins)) as refused:
        main(f"--out {tmp_path}/o")
    assert "unset " in str(refused.value) and not list(tmp_path.iterdir())

    # the command has no flag that the page's command does not have
    (recipe,) = re.findall("srun torchrun .* train.py", str(refused.value))
    page = (ROOT / "docs" / "runs.md").read_text().replace("\\\n", "")
    (line,) = re.findall("srun torchrun .* train.py", page)
    assert set(recipe.split()) <= set(line.split())


@slow
def test_srun_without_torchrun_ends_with_status_2(tmp_path):
    """Each of two tasks ends at once, with one sentence and status 2. Catches a traceback."""
    for program in ("train.py", "bench.py"):
        done = subprocess.run(
            [sys.executable, ROOT / program, f"--out={tmp_path}/o"],
            env={**os.environ, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and done.stdout == "", done.stderr
        assert done.stderr.startswith(f"{program}: error: srun runs 2 tasks")
        assert done.stderr.count("\n") == 1
