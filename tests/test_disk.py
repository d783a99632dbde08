"""Show that saved checkpoints are whole, torn ones are passed over, and a resume is bit for bit."""

import math
import os
import random
import re
import resource
import shutil
import signal
import time
import weakref
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from pytest import raises
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkpoint
import model as m
import ops
import ranks
import shard
import train
from helpers import edit_meta, fail_disk_full, on_file_event, saved_steps, uninterrupted_losses
from test_all import (
    SMALL,
    SpoilingStream,
    losses,
    main,
    make_case,
    make_run,
    parametrize,
    read_log,
    run,
    save_checkpoint,
    slow,
)


@slow
@parametrize(
    "event, path, flags, step",
    [
        ("open", "step-00000006.tmp/rank", "", 4),  # two steps after the last save
        ("open", "step-00000004.tmp/meta", "--save-async", 2),  # in a save that runs beside steps
        ("os.rename", "step-00000004.tmp", "", 2),  # before a checkpoint gets its final name
        ("shutil.rmtree", "step-00000002", "--keep 1", 4),  # while it deletes an older checkpoint
    ],
)
def test_killed_and_resumed_bitwise(event, path, flags, step, tmp_path):
    """A run that is killed in a save or between saves resumes from the newest whole checkpoint.

    Its losses are those of an uninterrupted run, bit for bit. Catches a torn checkpoint that is
    trusted, and a resume that is not exact.
    """
    flags += f" --out {tmp_path} --save-every"
    run(
        f"{flags} 2",
        code=f"from helpers import *\non_file_event({path!r}, kill_self, {event!r})",
        expect=-signal.SIGKILL,
    )
    assert len(losses(tmp_path)) >= 4 and saved_steps(tmp_path)
    text = run(f"{flags} 3 --resume auto")
    assert f"resumed {tmp_path}/step-0000000{step} at step {step}" in text
    assert losses(tmp_path) == uninterrupted_losses(0) and not list(tmp_path.glob("*.tmp"))


def test_newest_whole_checkpoint_is_found(tmp_path, capsys):
    """The newest whole checkpoint is found among torn ones, copies and files of other checkpoints.

    A run that resumes from an earlier step moves later checkpoints aside. Catches a torn or an
    older checkpoint that is taken.
    """
    (tmp_path / "step-3-backup").mkdir()
    flags = f"--out {tmp_path} --keep 3 --save-every 1"
    main(f"{flags} --steps 3")
    second, third, torn = (tmp_path / f"step-0000000{step}" for step in (2, 3, 9))
    torn.mkdir()
    assert checkpoint.find_checkpoint(tmp_path, "auto").folder == third
    assert f"passed over: --resume: {torn} is not a whole checkpoint" in capsys.readouterr().out
    os.truncate(third / "rank-00000-0.safetensors", 999)
    assert checkpoint.find_checkpoint(tmp_path, "auto").folder == second
    assert checkpoint.find_checkpoint(tmp_path / "empty", "auto") is None
    main(f"{flags} --steps 4 --resume")
    assert saved_steps(tmp_path) == [2, 3, 4] and saved_steps(tmp_path / "earlier-1") == [3, 9]
    assert len(losses(tmp_path)) == 4
    shutil.copy(second / "rank-00000-0.safetensors", tmp_path / "step-00000004")
    with raises(ValueError, match="step-00000004/rank.* is not what was written"):
        main(f"{flags} --resume {tmp_path}/step-00000004")
    dist.destroy_process_group()
    main(f"{flags} --steps 4 --resume")
    said = capsys.readouterr().out
    assert "step-00000004/rank-00000-0.safetensors is not what was written" in said
    assert f"resumed {third}" in said


def test_unread_checkpoint_is_not_passed_over(tmp_path, monkeypatch):
    """A checkpoint that cannot be read now, and may be whole, ends the command.

    Catches a short fault of the storage after which a run starts anew.
    """

    def fail(path):
        raise OSError(116, "Stale file handle", str(path))

    main(f"--out {tmp_path} --steps 1")
    monkeypatch.setattr(checkpoint, "checksum", fail)
    with raises(ranks.ConfigError, match="Stale file handle.*step-00000001/rank-00000-0"):
        main(f"--out {tmp_path} --steps 2 --resume auto")
    assert saved_steps(tmp_path) == [1]


@slow
def test_meta_json_that_cannot_be_read_ends_all_ranks(tmp_path):
    """If the system cannot read a meta.json, all ranks end with an error that names the file. Once
    it can be read again, the checkpoint is resumed.

    Catches a short fault of the storage after which a run starts anew.
    """
    main(f"--out {tmp_path} --steps 1")
    meta = tmp_path / "step-00000001" / "meta.json"
    meta.rename(tmp_path / "meta.json")
    meta.symlink_to("/proc/self/mem")  # Linux cannot read its first bytes: errno 5, without a name
    flags = f"--out {tmp_path} --steps 2 --resume auto"
    text = run(flags, 2, expect=1)
    error = f"step-00000001 may be whole, but cannot be read: {meta}: .* Input/output error"
    assert len(re.findall(f"ConfigError: --resume: .*{error}", text)) == 2
    assert saved_steps(tmp_path) == [1]
    meta.unlink()
    (tmp_path / "meta.json").rename(meta)
    assert f"resumed {meta.parent} at step 1" in run(flags, 2)


@parametrize("file", ["meta.json", "rank-00000-0.safetensors"])
def test_file_whose_status_is_unknown_is_not_missing(file, tmp_path, monkeypatch):
    """If the system cannot tell whether a file of a checkpoint exists, the error names the file.

    Catches a file that is called missing, so that its checkpoint is passed over.
    """
    system_stat = os.stat

    def fail(path, *args, **options):
        if str(path).endswith(file):
            raise OSError(5, "Input/output error", str(path))
        return system_stat(path, *args, **options)

    main(f"--out {tmp_path} --steps 1")
    monkeypatch.setattr(os, "stat", fail)
    with raises(OSError, match=f"cannot be read: .*Input/output error: .*step-00000001/{file}"):
        checkpoint.find_checkpoint(tmp_path, "auto")


@parametrize("damage", ["a missing meta.json", "no folder", "no regular file"])
def test_incomplete_checkpoints_are_passed_over(damage, tmp_path, capsys):
    """A checkpoint whose meta.json is missing, or that is no folder, is passed over.

    Catches an incomplete checkpoint that ends a run.
    """
    main(f"--out {tmp_path} --steps 1")
    torn = tmp_path / "step-00000002"
    if damage == "no folder":
        torn.touch()
    else:
        torn.mkdir()
        if damage == "no regular file":
            os.mkfifo(torn / "meta.json")
    assert checkpoint.find_checkpoint(tmp_path, "auto").meta["step"] == 1
    assert f"passed over: --resume: {torn} is not a whole checkpoint" in capsys.readouterr().out


def test_going_back_takes_the_log_and_later_checkpoints_back(tmp_path):
    """A run that goes back to an earlier step takes its log back, too, and moves later checkpoints
    aside, even if it ends before it saves.

    An evaluation or an export of an earlier step changes nothing. Catches a checkpoint that does
    not belong to the log.
    """
    flags = f"--out {tmp_path} --keep 9 --save-every 2"
    main(flags)
    uninterrupted = losses(tmp_path)
    back = f"{flags} --resume {tmp_path}/step-00000002 --steps"
    main(f"{back} 0 --eval-every 1 --export {tmp_path}/hf")
    assert saved_steps(tmp_path) == [2, 4, 6] and losses(tmp_path) == uninterrupted
    main(f"{back} 3 --save-every -1")
    assert saved_steps(tmp_path) == [2] and saved_steps(tmp_path / "earlier-1") == [4, 6]
    assert losses(tmp_path) == uninterrupted[:3]
    main(f"{flags} --resume")
    assert saved_steps(tmp_path) == [2, 4, 6] and losses(tmp_path) == uninterrupted


def test_weights_that_are_not_finite_are_not_resumed(tmp_path, group):
    """A checkpoint whose weights are not finite is refused, and the error names a weight.

    Catches a run that resumes from NaN.
    """
    run, _, states = make_run(make_case("1"), {}, SpoilingStream)
    train.load_random_weights(run, states)
    states.state_parts()["master.embed.weight"].stored.fill_(math.nan)
    save_checkpoint(states, tmp_path, 1)
    with raises(ValueError, match="step-00000001: .*embed.weight has values that are not"):
        checkpoint.load_checkpoint(states, checkpoint.find_checkpoint(tmp_path, "latest"))


def test_a_damaged_meta_json_is_no_checkpoint(sandbox, tmp_path):
    """A meta.json that is cut off anywhere, or that has one wrong bit anywhere, is refused.

    Catches a torn meta.json that is trusted.
    """
    folder = shutil.copytree(sandbox / "o" / "step-00000001", tmp_path / "o")
    meta = folder / "meta.json"
    whole = meta.read_text()
    places = random.Random(0).sample(range(len(whole)), 40)
    flipped = [f"{whole[:i]}{chr(ord(whole[i]) ^ 1)}{whole[i + 1 :]}" for i in places]
    for text in ("[" * 100_000, "", "\xff", "3", *(whole[:i] for i in places), *flipped):
        meta.write_text(text, encoding="latin-1")
        with raises(ValueError, match=f"--resume: {folder} is not a whole checkpoint"):
            checkpoint.open_checkpoint(folder)


def test_checkpoint_with_a_hole_is_refused(tmp_path, group):
    """A checkpoint is refused if it lacks a part of a matrix, or all parts of one tp rank.

    Catches states that are trained from whatever memory held.
    """
    flat = torch.arange(24.0)
    upper = ops.TensorSlice((6, 4), ((0, 3),), (0, 4))
    for cut, message in ((None, "x ends at element 10, not 24"), (upper, "do not make the whole")):
        saved = shard.StatePart(flat[: 12 if cut else 10], 0, (6, 4), True, cut)
        files = checkpoint.write_states(tmp_path, {"x": saved})
        whole = shard.StatePart(torch.zeros(24), 0, (6, 4), True)
        with raises(ValueError, match=message):
            checkpoint.read_states(checkpoint.Checkpoint(tmp_path, {"files": files}), {"x": whole})


def test_a_save_holds_one_file_on_the_host(tmp_path, group, monkeypatch):
    """While a file's tensors are read from the GPU, those of the file before are freed.

    Catches a save that takes twice as much host memory, which a plan does not count.
    """
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 80)
    copies, alive = [], []

    class CopiedPart(shard.StatePart):
        def read(self):
            alive.append(sum(copy() is not None for copy in copies))
            copy = self.stored.clone()
            copies.append(weakref.ref(copy))
            return copy

    parts = {f"x{i}": CopiedPart(torch.zeros(10), 0, (10,), True) for i in range(6)}
    assert len(checkpoint.write_states(tmp_path, parts)) == 3  # two tensors of 40 bytes each
    assert alive == [0, 1, 0, 1, 0, 1]


def test_resume_says_what_has_changed(tmp_path, capsys):
    """A resume prints what differs from the run that it goes on with.

    It names data of another size, another number of threads, because sums depend on it, and lines
    of the log that are no step's row. If the run has ended, it says so. Catches a change, or a
    command without effect, that nobody is told about.
    """
    words, out = tmp_path / "a.txt", tmp_path / "o"
    words.write_bytes(bytes(range(97, 123)) * 200)
    flags = f"--data {words} --out {out} --warmup 0 --steps"
    main(f"{flags} 1")
    main(f"{flags} 2 --resume")
    rows, text = read_log(out), capsys.readouterr().out
    assert "at step 1; changed: steps 1 -> 2\n" in text
    words.write_bytes(bytes(range(97, 123)) * 190)
    edit_meta(out / "step-00000002" / "meta.json", "c['config']['threads'] = 7")
    with open(out / "log.jsonl", "ab") as file:
        file.write(b'3\n{"step": null}\n{"no": 1}\n\xff\n{"step": 3, "lo')
    main(f"{flags} 3 --resume")
    text = capsys.readouterr().out
    for sentence in (
        "changed: steps 2 -> 3, the data {'files': 1, ",
        f", threads 7 -> {torch.get_num_threads()}, the tokens of {words} are new to this run, so "
        "the order of samples begins anew\n",
        "log.jsonl: dropped a line that is no step's row: b'{\"step\": 3, \"lo'",
    ):
        assert sentence in text
    assert read_log(out)[:2] == rows and len(read_log(out)) == 3
    main(f"{flags} 3 --resume")
    text = capsys.readouterr().out
    assert "Nothing was trained, because the run had reached --steps 3. To train on, pass" in text
    words.write_bytes(bytes(range(98, 124)) * 190)  # as many tokens in a file of the same name
    main(f"{flags} 4 --resume")
    text = capsys.readouterr().out
    assert f"changed: steps 3 -> 4, the tokens of {words} are new to this run, so the or" in text


def test_weights_that_the_model_lacks_are_not_dropped(tmp_path, monkeypatch):
    """A checkpoint with more weights than the model is refused, and they are named.

    Catches a run of the unedited project that resumes a fork's, trains another function, and saves
    it without the fork's weights.
    """

    class BlockWithNorm(m.Block):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.last_norm = shard.Vector(cfg.dim, "norm")

        def post(self, x, o, positions):
            y = super().post(x, o, positions)
            return m.rms_norm(y, self.last_norm.weight, self.cfg.norm_eps)

    with monkeypatch.context() as fork:
        fork.setattr(m, "Block", BlockWithNorm)
        main(f"--steps 1 --out {tmp_path}")
    for resume in ("latest", tmp_path / "step-00000001"):
        with raises(ValueError, match="also holds blocks.0.last_norm.*, which this model does not"):
            main(f"--steps 2 --resume {resume} --out {tmp_path}")
        dist.destroy_process_group()
    assert saved_steps(tmp_path) == [1]


@parametrize("flags", ["", "--save-async"])
def test_saving_that_fails_ends_no_run(flags, tmp_path, capsys):
    """A save that fails is reported at each step until a save works.

    If the last save fails, the command fails. Catches a full disk that ends a run.
    """
    out = tmp_path / "o"
    flags += " --save-every 2 --out"
    on_file_event(f"{out}/step-0000000[47].tmp/rank", fail_disk_full)
    main(f"{flags} {out}")
    text = capsys.readouterr().out
    assert f"step 4 was not saved: {out}/step-00000004.tmp: [Errno 28] No space left" in text
    assert re.search(r"step 6/6 .*\(step 4 was not saved", text)
    assert saved_steps(out) == [2, 6]
    with raises(SystemExit, match="step 7 was not saved: .* No space left"):
        main(f"{flags} {out} --steps 7 --resume")
    assert saved_steps(out) == [2, 6] and not [*out.glob("*.tmp")]
    full = iter([fail_disk_full])  # only once: the last step is saved at the second try
    on_file_event(f"{tmp_path}/once/step-00000006.tmp/rank", lambda: next(full, lambda: None)())
    main(f"{flags} {tmp_path}/once")
    assert "step 6 was not saved" in capsys.readouterr().out
    assert saved_steps(tmp_path / "once") == [4, 6]
    on_file_event(
        f"{tmp_path}/gone/step-00000002.tmp/rank", lambda: shutil.rmtree(tmp_path / "gone")
    )
    with raises(SystemExit, match="step 6 was not saved: .*No such file or directory"):
        main(f"{flags} {tmp_path}/gone")
    assert "step 6/6" in capsys.readouterr().out


def test_disk_that_is_full_ends_no_run(tmp_path, capsys):
    """If neither the log nor states can be written, the run still takes all its steps.

    The system's limit on the size of files stands for a full disk. Catches a run that a full disk
    ends in the middle.
    """
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
    try:
        with raises(SystemExit, match="step 6 was not saved: .*: File too large"):
            main(f"--out {tmp_path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    printed = capsys.readouterr().out
    assert re.search("step 6/6 .*\nlog.jsonl cannot be written: File too l", printed)


def test_save_async_saves_the_same(tmp_path, capsys, monkeypatch):
    """`--save-async` saves the states of its step, although it writes them after the next step.

    Run a saves without it, with states on the GPU. Run b saves with it, with states on the host. In
    bf16 the host stores only the rest of the master weights, so copies of the rest and of the
    weights are joined before they are written. Catches a copy of the next step's states.
    """
    write_states = checkpoint.write_states

    def write_late(folder: Path, parts: dict) -> dict:
        deadline = time.time() + 20
        assert all(part.weight is None for part in parts.values())
        late = folder == tmp_path / "b" / "step-00000002.tmp"
        while late and len(losses(tmp_path / "b")) < 3 and time.time() < deadline:
            time.sleep(0.1)
        return write_states(folder, parts)

    monkeypatch.setattr(checkpoint, "write_states", write_late)
    flags = f"--save-every 2 --keep 9 --dtype bf16 --out {tmp_path}"
    main(f"{flags}/a")
    capsys.readouterr()
    main(f"{flags}/b --save-async --os-place host")
    for step in (2, 4, 6):
        file = f"step-0000000{step}/rank-00000-0.safetensors"
        assert len({path.stat().st_mode for path in (tmp_path / "a" / file).parent.iterdir()}) == 1
        a, b = load_file(tmp_path / "a" / file), load_file(tmp_path / "b" / file)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    text = capsys.readouterr().out
    assert text.index("step 3/6") < text.index(f"saved {tmp_path}")


def test_copies_for_a_save_say_where_they_belong(tmp_path, monkeypatch):
    """With --save-async, the copies that a rank writes have the positions of the states that they
    were copied from. Catches a checkpoint of several shards that no run can read."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    with torch.device("meta"):
        model = m.LLaMA(SMALL)
    factors = shard.Factors(1, 4, 4)
    states = shard.States(model, torch.device("cpu"), torch.bfloat16, factors=factors)
    written = {}
    monkeypatch.setattr(checkpoint, "write_states", lambda folder, parts: written.update(parts))
    saver = checkpoint.Saver(tmp_path, 2, states, room=1e9)
    saver.begin({"step": 1})
    saver.job.result()

    def positions(parts: dict) -> dict[str, str]:
        return {key: checkpoint.position_text(part) for key, part in parts.items()}

    expected = {key: part for key, part in states.parts.items() if part.saved_here}
    assert any(part.start > 0 for part in expected.values())
    assert positions(written) == positions(expected)


class FrozenLayer(m.LLaMA):
    """A model whose second layer is frozen: its weights are saved as they are."""

    def __init__(self, *args):
        super().__init__(*args)
        for module in self.blocks[1].modules():
            if isinstance(module, ops.Weight):
                module.frozen = True


@parametrize(
    "factors, layout",
    [((1, 1, 1), "intra"), ((2, 2, 2), "intra"), ((1, 2, 2), "inter"), ((1, 4, 4), "intra")],
)
def test_ranks_share_the_work_of_a_save(factors, layout):
    """Of four ranks, one saves each element of a state, and each rank saves some matrices.

    Catches an element that two ranks save, or none, and a rank that saves what its replicas could
    save meanwhile.
    """
    saved = []  # by rank: the parts that it saves
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        with torch.device("meta"):
            model = FrozenLayer(SMALL)
        device = torch.device("cpu")
        states = shard.States(
            model, device, torch.float32, factors=shard.Factors(*factors), layout=layout
        )
        saved.append({key: part for key, part in states.parts.items() if part.saved_here})
        dist.destroy_process_group()

    elements = Counter()
    for key, part in [item for of_rank in saved for item in of_rank.items()]:
        elements.update((key, i) for i in range(part.start, part.start + part.count))
    assert set(elements.values()) == {1}
    for name, shape in states.shapes.items():
        kinds = ["frozen"] if name.startswith("blocks.1.") else ["master", "exp_avg", "exp_avg_sq"]
        for kind in kinds:
            count = sum(key == f"{kind}.{name}" for key, _ in elements)
            assert count == math.prod(shape), (kind, name)
    for of_rank in saved:
        matrices = {key.partition(".")[0] for key, part in of_rank.items() if len(part.shape) > 1}
        assert matrices == {"frozen", "master", "exp_avg", "exp_avg_sq"}


def test_saving_that_cannot_begin_moves_nothing(tmp_path):
    """If the copies for `--save-async` do not fit into host memory, a run is refused before it
    moves a file.

    Catches a run that moves an earlier one aside and then cannot begin.
    """
    main(f"--steps 1 --out {tmp_path}")
    before = {*tmp_path.iterdir()}
    with raises(
        ValueError,
        match="--save-async: copies take [0-9.]+ MiB .*, but only 1.0 KiB are left. Use --no-save-",
    ):
        main(f"--steps 1 --save-async --host-memory 1K --out {tmp_path}")
    dist.destroy_process_group()
    assert {*tmp_path.iterdir()} == before


def test_run_whose_folder_was_renamed_saves_no_more(tmp_path, capsys):
    """If another run begins in a new folder of the same name, the old run says so, and writes
    nothing there.

    Catches two runs whose checkpoints are in one folder, and one that deletes the other's.
    """
    out, theirs = tmp_path / "o", tmp_path / "o" / "step-00000001"

    def replace_folder():
        if not (tmp_path / "moved").exists():  # a save opens several files
            out.rename(tmp_path / "moved")
            theirs.mkdir(parents=True)
            (out / "lock").write_text("host far, process 1, since today\n")

    on_file_event(f"{out}/step-00000004.tmp/rank", replace_folder)
    with raises(SystemExit, match="step 6 was not saved: .* another run writes to .* \\(host far"):
        main(f"--save-every 2 --keep 1 --out {out}")
    assert "step 4 was not saved" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["lock", "step-00000001"]
    assert saved_steps(tmp_path / "moved") == [2]


def test_later_checkpoints_of_another_run_stay(tmp_path):
    """A run deletes only older checkpoints, also if those of later steps appear in its folder.

    Catches a run that deletes the checkpoint that it has just saved.
    """
    on_file_event(f"{tmp_path}/step-00000002.tmp/rank", (tmp_path / "step-00000009").mkdir)
    main(f"--steps 4 --save-every 2 --keep 1 --out {tmp_path}")
    assert saved_steps(tmp_path) == [4, 9]


def test_checkpoint_that_is_a_link_belongs_to_its_folder(tmp_path, capsys):
    """A run continues a checkpoint of its folder that was moved, with a link in its place.

    Catches a run that moves its own log aside. A run's folder in place of a checkpoint is refused,
    and the error names the newest checkpoint.
    """
    out, step = tmp_path / "o", tmp_path / "o" / "step-00000002"
    main(f"--steps 2 --out {out}")
    step.rename(tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    main(f"--steps 3 --resume --out {out}")
    assert "moved" not in capsys.readouterr().out and len(read_log(out)) == 3
    with raises(ValueError, match="this is the folder of a run.*the newest is .*step-00000003"):
        main(f"--steps 4 --resume {out} --out {out}")
    dist.destroy_process_group()


def test_one_run_writes_to_a_folder(tmp_path, monkeypatch, capsys):
    """A second run in a folder is refused, and the error names the process of the first one.

    A run that is over holds no lock. If the storage has no locks, the run says so. Catches two runs
    in one folder, and a lock that outlives its run.
    """
    flags = f"--steps 1 --out {tmp_path}"
    with checkpoint.locked(tmp_path):
        with raises(ValueError, match=f"another run writes there .*process {os.getpid()}"):
            main(flags)
    dist.destroy_process_group()
    main(flags)

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    main(f"{flags} --resume")
    assert "a second run that writes here would not be noticed" in capsys.readouterr().out
