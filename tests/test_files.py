"""Show that files which somebody else prepared do no harm.

A prepared file runs no code, makes no program hang, and leads out of no folder. A checkpoint is not
trusted if it is not what was written.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytest import raises
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.elastic.utils.distributed import get_free_port

import checkpoint
import data
import hf
import memplan
import shard
from helpers import hf_model, make_tokenizer
from ops import TensorSlice
from ranks import ConfigError
from shard import StatePart
from test_all import ROOT, main, parametrize, slow

PROGRAM = [*ROOT.glob("*.py"), *ROOT.glob("results/*.py"), *ROOT.glob("examples/*.py")]


# ---------------------------------------------------------------------------- code


@parametrize("file", [f for f in PROGRAM if f.name != "test_all.py"], ids=lambda f: f.name)
def test_no_file_of_the_project_runs_what_it_reads(file):
    """No file of the project uses pickle, marshal, eval or the like.

    torch.load and numpy.load may be used only with the argument that forbids pickles. Catches a
    call through which a prepared file could run its code.
    """
    runs_code = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    safe_loads = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not runs_code & {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] not in runs_code
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "ast.literal_eval", "__import__")
            if called in safe_loads:
                assert safe_loads[called] in map(ast.unparse, node.keywords), called


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@parametrize("name", ["trace.pickle", "trace.npz"])
def test_memplan_runs_no_code_of_its_argument(name, tmp_path, capsys):
    """memplan.py runs no code that a trace contains.

    Catches a trace that is unpickled.
    """
    file, trap = tmp_path / name, tmp_path / "trap"
    rows = np.array([Trap(trap)], dtype=object)
    np.savez(file.open("wb"), rows=rows, peak=1, deadline=1.0)
    assert memplan.main([str(file)]) == 2
    assert not trap.exists() and "memplan.py: error: " in capsys.readouterr().err


# ---------------------------------------------------------------------------- FIFOs and links


def fifo(path: Path) -> None:
    """Replace a file by a FIFO, which blocks whoever opens it."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_to(target: Path):
    """Return a function that replaces a file by a link to the target."""

    def make(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return make


@pytest.fixture
def no_hang():
    """End a test that blocks on a file after a minute."""

    def too_long(*_):
        raise TimeoutError("blocked on a file")

    old = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@slow
@parametrize("make", [fifo, link_to(Path("/dev/zero"))], ids=["fifo", "device"])
@parametrize(
    "name, says",
    [
        ("text/tokenizer.json", "no tokenizer.json that can be read"),
        ("text/tokenizer_config.json", "tokenizer_config.json cannot be read: .*no regular file"),
        ("o/lock", "o/lock is (no regular file|a link)"),
        ("o/log.jsonl", "o/log.jsonl is (no regular file|a link)"),
        ("o/step-00000001/meta.json", "meta.json is no regular file"),
        ("o/step-00000001/rank-00000-0.safetensors", "rank-00000-0.safetensors is no regular"),
        ("in/config.json", "config.json is no regular file"),
        ("in/model.safetensors.index.json", "index.json is no regular file"),
        ("ids.bin.json", "ids.bin.json is no regular file"),
    ],
)
def test_special_files_block_no_start(make, name, says, tmp_path, no_hang):
    """A FIFO or an endless device in place of a file does not block a start.

    Catches a start that waits for a FIFO, or that reads a device without end.
    """
    out = f"--out {tmp_path}/o"
    folder = name.split("/")[0]
    if folder == "text":
        make_tokenizer(tmp_path / "text", "one two three\n" * 99, 20)
    elif folder == "o":
        main(f"{out} --steps 1")
    elif folder == "in":
        hf_model(tmp_path / "in")
    else:
        np.arange(4000, dtype="<u2").tofile(tmp_path / "ids.bin")
    make(tmp_path / name)
    flags = {
        "text": f"--tokenizer {tmp_path}/text --out {tmp_path}/new",
        "o": f"{out} --resume {tmp_path}/o/step-00000001 --steps 2",
        "in": f"--init hf:{tmp_path}/in --out {tmp_path}/new",
        "ids.bin.json": f"--data {tmp_path}/ids.bin --out {tmp_path}/new",
    }
    with raises(ConfigError, match=says):
        main(flags[folder])


@slow
@parametrize("name", ["lock", "log.jsonl", "loss.png", "tokens", "step-00000001.tmp", "log.tmp"])
def test_nothing_is_written_through_a_link(name, tmp_path, no_hang):
    """No file outside of the run's folder is changed through a link.

    Catches a link in OUT through which somebody else's file is overwritten or removed.
    """
    outside = tmp_path / "outside"
    if name in ("tokens", "step-00000001.tmp"):
        outside.mkdir()
    else:
        outside.write_text("precious")
    text = tmp_path / "text"
    make_tokenizer(text, "one two three\n" * 99, 20)
    (tmp_path / "words.txt").write_text("one two three\n" * 999)
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / name).symlink_to(outside)
    flags = f"--out {tmp_path}/o --steps 1 --tokenizer {text} --data {tmp_path}/words.txt"
    if name in ("lock", "log.jsonl", "tokens"):
        with raises(ConfigError, match=f"{name} is a link, through which nothing is written"):
            main(flags)
    else:
        main(flags, picture=True)
        if name != "log.tmp":  # this run has no use for it, and leaves it
            assert not (tmp_path / "o" / name).is_symlink()
    if outside.is_dir():
        assert not any(outside.iterdir())
    else:
        assert outside.read_text() == "precious"


@slow
@parametrize("name", ["config.json", "model-00001*", "tokenizer_private"])
def test_links_of_an_import_stay_in_its_folder(name, tmp_path):
    """An import does not follow links that lead out of its folder.

    Catches a link in a downloaded folder to a private file, which an export would copy and somebody
    would publish.
    """
    folder = tmp_path / "in"
    hf_model(folder)
    private = tmp_path / "private"
    (folder / "tokenizer_private").write_text("secret")
    name = next(folder.glob(name)).name
    shutil.move(folder / name, private)
    (folder / name).symlink_to(private)
    flags = f"--steps 1 --init hf:{folder} --out {tmp_path}/o --export {tmp_path}/e"
    with raises(ConfigError, match=f"{name} is a link out of its folder, to .*private: copy"):
        main(flags)
    dist.destroy_process_group()
    assert not list((tmp_path / "e").glob("*private*"))
    (folder / name).unlink()
    shutil.move(private, folder / "inside")
    (folder / name).symlink_to("inside")  # a link within the folder is followed
    main(flags)
    assert (tmp_path / "e" / "tokenizer_private").read_text() == "secret"


def test_links_into_the_blobs_of_a_cache_are_followed(tmp_path):
    """An import follows links into the blobs of a Hugging Face cache.

    Catches a refusal of the folder that `hf download` makes without --local-dir.
    """
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    hf_model(snapshot)
    blobs.mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, blobs / f"{i}")
        file.symlink_to(f"../../blobs/{i}")
    assert hf.load_model(snapshot)
    main(f"--steps 0 --init hf:{snapshot} --out {tmp_path}/o --export {tmp_path}/e")
    # a folder with the name blobs is not yet a cache
    with raises(OSError, match="is a link out of its folder"):
        data.own_file(snapshot / "config.json", tmp_path / "models--a--b" / "snapshots")


# ---------------------------------------------------------------------------- meta.json


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder with checkpoints of steps 1 and 2."""
    out = tmp_path_factory.mktemp("trained")
    main(f"--out {out} --steps 2 --save-every 1")
    return out


def rewrite_meta(folder: Path, change) -> None:
    """Change a meta.json, and give it the right checksum."""
    body, _, _ = (folder / "meta.json").read_text().rpartition(',\n "crc32": ')
    meta = json.loads(body + "}")
    change(meta)
    checkpoint.write_meta(folder, meta)


def rename_file(name: str):
    """Return a function that gives the only file in a meta.json another name."""

    def change(meta):
        (old,) = meta["files"]
        meta["files"] = {name: meta["files"][old]}

    return change


def set_value(*path, value):
    """Return a function that sets the value at a path of keys in a meta.json."""

    def change(meta):
        *parents, last = path
        for key in parents:
            meta = meta[key]
        meta[last] = value

    return change


# what is wrong -> (the function that makes a meta.json so, how the error ends)
META = {
    "absolute name": (rename_file("/etc/00000-passwd"), "names a file '/etc/00000-passwd'"),
    "name outside": (rename_file("rank-00000/../../x.safetensors"), "which no checkpoint has"),
    "name with a line": (rename_file("rank-00000-0.safetensors\n"), "which no checkpoint has"),
    "no files": (set_value("files", value={}), "names no files"),
    "files is a list": (set_value("files", value=[]), "files in meta.json is \\[\\]"),
    "step is a text": (set_value("step", value="1"), "step in meta.json is '1'"),
    "step is true": (set_value("step", value=True), "step in meta.json is True"),
    "step is negative": (set_value("step", value=-1), "step in meta.json is -1"),
    "samples is a fraction": (set_value("samples", value=6.5), "samples in meta.json is 6.5"),
    "samples is huge": (set_value("samples", value=2**63), "samples in meta.json is"),
    "trained_to is a number": (set_value("trained_to", value=8), "trained_to in meta.json is 8"),
    "trained_to is negative": (
        set_value("trained_to", value={"300-0": -1}),
        "trained_to in meta.json is -1",
    ),
    "seq is 0": (set_value("config", "seq", value=0), "seq in meta.json is 0"),
    "batch is none": (set_value("config", "batch", value=None), "batch in meta.json is None"),
    "schedule": (
        set_value("config", "schedule_steps", value=1e9),
        "schedule_steps in meta.json is",
    ),
    "warm-up": (set_value("config", "warmup_steps", value=-1), "warmup_steps in meta.json is"),
    "positions": (set_value("model", "max_positions", value="9"), "max_positions in meta.json"),
    "model is a text": (set_value("model", value="tiny"), "model in meta.json is 'tiny'"),
    "source is none": (set_value("source", value=None), "source in meta.json is None"),
}


@slow
@parametrize("kind", META)
def test_meta_json_is_checked_even_if_its_checksum_is_right(kind, trained, tmp_path, capsys):
    """A meta.json with a right checksum but wrong content is refused, and the checkpoint before it
    is resumed.

    Catches file names that lead elsewhere, and numbers that are not numbers.
    """
    change, says = META[kind]
    out = shutil.copytree(trained, tmp_path / "o")
    rewrite_meta(out / "step-00000002", change)
    with raises(ValueError, match=f"is not a whole checkpoint: .*{says}"):
        checkpoint.open_checkpoint(out / "step-00000002")
    main(f"--out {out} --steps 3 --resume auto")  # it passes over the damaged checkpoint
    said = capsys.readouterr().out
    assert "passed over: " in said and f"resumed {out}/step-00000001" in said


@slow
@parametrize(
    "field, value, says",
    [
        ("lr", "fast", "--lr 'fast' must be of type float"),
        ("seed", 1.5, "--seed 1.5 must be of type int"),
        ("save_async", 1, "--save-async 1 must be of type bool"),
        ("strategy", ["zero3"], "--strategy \\['zero3'\\] must be of type str"),
        ("init", 7, "--init 7 must be of type str"),
    ],
)
def test_flags_of_a_checkpoint_have_their_types(field, value, says, trained, tmp_path):
    """A checkpoint's flags are refused if they have the wrong type.

    Catches a recorded flag that a run would compute with.
    """
    out = shutil.copytree(trained, tmp_path / "o")
    rewrite_meta(out / "step-00000002", set_value("config", field, value=value))
    with raises(ConfigError, match=says):
        main(f"--out {out} --steps 3 --resume")


# ---------------------------------------------------------------------------- states


def write_parts(folder: Path, parts: list[dict]) -> checkpoint.Checkpoint:
    """Write one file per rank. parts: for each rank, name -> (values, start, shape, slice)."""
    folder.mkdir(exist_ok=True)
    files = {}
    for rank, parts_of_rank in enumerate(parts):
        path = folder / f"rank-{rank:05d}-0.safetensors"
        positions = {
            name: checkpoint.position_text(StatePart(values, start, shape, True, cut))
            for name, (values, start, shape, cut) in parts_of_rank.items()
        }
        tensors = {name: values for name, (values, *_) in parts_of_rank.items()}
        checkpoint.write_tensors(tensors, path, positions)
        files[path.name] = checkpoint.checksum(path)
    return checkpoint.Checkpoint(folder, {"files": files})


# a matrix (6, 4) in one row, two slices of its rows, and two slices of its columns that overlap
FLAT = torch.arange(24.0)
UPPER, LOWER = TensorSlice((6, 4), ((0, 3),), (0, 4)), TensorSlice((6, 4), ((3, 6),), (0, 4))
LEFT, MIDDLE = TensorSlice((6, 4), ((0, 6),), (0, 2)), TensorSlice((6, 4), ((0, 6),), (1, 3))


@parametrize(
    "parts, says",
    [
        ([(FLAT[:10], 0, None)], "x ends at element 10, not 24"),
        ([(FLAT[:10], 0, None), (FLAT[12:], 12, None)], "elements 10 to 11 of x are missing"),
        # as many elements as the matrix has: half of them twice, half of them never
        ([(FLAT[:12], 0, None), (FLAT[:12], 0, None)], "elements 0 to 11 of x are there twice"),
        ([(FLAT[:12], 0, None), (FLAT[11:23], 11, None)], "elements 11 to 11 of x are there twice"),
        ([(FLAT, 1, None)], "elements 0 to 0 of x are missing"),
        ([(FLAT[:12], 0, UPPER)], "slices of x overlap, or do not make the whole tensor"),
        ([(FLAT[:12], 0, UPPER), (FLAT[:12], 0, UPPER)], "do not make the whole"),
        ([(FLAT[:12], 0, LEFT), (FLAT[:12], 0, MIDDLE)], "do not make the whole"),
        ([(FLAT[:12], 0, LEFT), (FLAT[:12], 0, UPPER)], "do not make the whole"),
        ([(FLAT, 0, None), (FLAT[:12], 0, UPPER)], "do not make the whole"),
        ([(FLAT[:6], 0, UPPER), (FLAT[:12], 0, LOWER)], "x ends at element 6, not 12"),
    ],
)
def test_parts_cover_every_element_once(parts, says, tmp_path):
    """The parts of a state must cover each of its elements once.

    Catches a state of which one part is missing and another is present twice. Training would go on
    from zeros, or from what memory held.
    """
    saved = write_parts(tmp_path / "o", [{"x": (v, start, (6, 4), cut)} for v, start, cut in parts])
    with raises(ValueError, match=says):
        checkpoint.open_parts(saved)


def test_tensors_are_packed_into_files_up_to_a_size(monkeypatch):
    """Tensors fill a file in order, until the next one would exceed FILE_BYTES. A tensor that is
    larger has a file of its own. Catches a file that grows with the number of tensors."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 10)
    sizes = {"a": 4, "b": 4, "c": 4, "d": 12, "e": 3, "f": 3, "g": 4, "h": 1}
    assert checkpoint.pack(sizes) == [["a", "b"], ["c"], ["d"], ["e", "f", "g"], ["h"]]
    assert checkpoint.pack({}) == []


@parametrize("index", [0, 5, 11])
@parametrize("on_host", [False, True])
def test_values_that_are_not_finite_are_refused_wherever_they_are(
    on_host, index, tmp_path, monkeypatch
):
    """A state with one value that is not finite is refused, also if it is joined in pieces from the
    two halves that the host and the GPU store. Catches a check that sees only some pieces."""
    monkeypatch.setattr(shard, "SMALL_PIECE_ELEMENTS", 5)
    values = FLAT[:12].clone()
    values[index] = torch.inf
    saved = write_parts(tmp_path / "o", [{"x": (values, 0, (12,), None)}])
    part = StatePart(torch.zeros(12), 0, (12,), True)
    if on_host:
        weight = torch.zeros(12, dtype=torch.bfloat16)
        part = StatePart(torch.zeros(12, dtype=torch.int16), 0, (12,), True, weight=weight)
    with raises(ValueError, match="x has values that are not finite"):
        checkpoint.read_states(saved, {"x": part})


@parametrize("world", [1, 2, 3, 4])
def test_each_file_is_checked_by_one_rank(world, tmp_path):
    """Whatever the number of ranks, one of them compares the checksum of a file that is damaged.

    Catches files that nobody compares if a run resumes on fewer ranks than have saved them.
    """
    parts = [{"x": (FLAT[first : first + 8], first, (6, 4), None)} for first in (0, 8, 16)]
    saved = write_parts(tmp_path / "o", parts)
    for name in saved.meta["files"]:
        path = saved.folder / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        errors = [checkpoint.find_damage(saved, rank, world) for rank in range(world)]
        path.write_bytes(content)
        (error,) = filter(None, errors)
        assert f"{name} is not what was written" in error
        assert checkpoint.find_damage(saved) == ""


def test_parts_of_any_slices_are_read_as_any_others(tmp_path):
    """A state that was saved whole, by slices of rows or by slices of columns can be read as any
    other of these.

    Catches an element that is read from the wrong place.
    """
    matrix = FLAT.view(6, 4)
    right = TensorSlice((6, 4), ((0, 6),), (2, 4))
    for cuts in ([None], [UPPER, LOWER], [LEFT, right]):
        parts = []
        for cut in cuts:
            flat = (cut.extract(matrix) if cut else matrix).flatten()
            parts += [
                {"x": (flat[first:end].clone(), first, (6, 4), cut)}
                for first, end in ((0, 5), (5, len(flat)))
            ]
        saved = write_parts(tmp_path / "o", parts)
        for cut in (None, UPPER, LOWER, LEFT, right):
            expected = (cut.extract(matrix) if cut else matrix).flatten()[3:11]
            found = StatePart(torch.zeros(8), 3, (6, 4), True, cut)
            checkpoint.read_states(saved, {"x": found})
            assert found.read().equal(expected), (cuts, cut)


# what is wrong -> the text that says where a tensor belongs in its state
POSITIONS = {
    "no JSON": "(0, (6, 4), None)",
    "deep": 100_000 * "[",
    "start is a text": '{"start": "0", "shape": [24], "slice": null}',
    "start is huge": '{"start": 1e40, "shape": [24], "slice": null}',
    "negative": '{"start": -1, "shape": [24], "slice": null}',
    "no shape": '{"start": 0, "slice": null}',
    "shape is true": '{"start": 0, "shape": [true], "slice": null}',
    "cut of a vector": '{"start": 0, "shape": [24], "slice": {"rows": [[0, 3]], "cols": [0, 4]}}',
    "rows backwards": '{"start": 0, "shape": [6, 4], "slice": {"rows": [[3, 0]], "cols": [0, 4]}}',
    "rows outside": '{"start": 0, "shape": [6, 4], "slice": {"rows": [[0, 9]], "cols": [0, 4]}}',
    "no rows": '{"start": 0, "shape": [6, 4], "slice": {"rows": [], "cols": [0, 4]}}',
    "code": '__import__("os").mkdir("trap")',
}


@slow
@parametrize("kind", POSITIONS)
def test_positions_that_do_not_parse_are_refused(kind, trained, tmp_path, capsys):
    """A checkpoint is refused if the text that says where a tensor belongs is wrong, even if all
    checksums are right. The checkpoint before it is resumed.

    Catches a file that causes a traceback.
    """
    out = shutil.copytree(trained, tmp_path / "o")
    folder = out / "step-00000002"
    path = folder / "rank-00000-0.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        positions = file.metadata()
    positions["master.norm.weight"] = POSITIONS[kind]
    save_file(tensors, path, positions)
    rewrite_meta(folder, lambda meta: meta["files"].update({path.name: checkpoint.checksum(path)}))
    with raises(ValueError, match="is not a whole checkpoint: "):
        checkpoint.open_checkpoint(folder)
    main(f"--out {out} --steps 3 --resume auto")
    assert f"resumed {out}/step-00000001" in capsys.readouterr().out


@slow
@parametrize("kind", ["no metadata", "bad header", "long header", "flipped bit"])
def test_damaged_files_are_passed_over(kind, trained, tmp_path, capsys):
    """A damaged checkpoint is passed over if the one before it is whole.

    Catches a damaged file that ends a run.
    """
    out = shutil.copytree(trained, tmp_path / "o")
    folder = out / "step-00000002"
    path = folder / "rank-00000-0.safetensors"
    content = bytearray(path.read_bytes())
    if kind == "no metadata":
        with safe_open(path, "pt") as file:
            save_file({name: file.get_tensor(name) for name in file.keys()}, path)
    elif kind == "bad header":
        content[8] ^= 255
        path.write_bytes(content)
    elif kind == "long header":
        content[0:8] = (2**62).to_bytes(8, "little")
        path.write_bytes(content)
    else:
        content[-3] ^= 1
        path.write_bytes(content)
    if kind != "flipped bit":  # the checksums are made right again
        sums = {path.name: checkpoint.checksum(path)}
        rewrite_meta(folder, lambda meta: meta["files"].update(sums))
    main(f"--out {out} --steps 3 --resume auto")
    said = capsys.readouterr().out
    assert "passed over: " in said and f"resumed {out}/step-00000001" in said
    with raises(ConfigError, match="is not (a whole checkpoint|what was written)"):
        main(f"--out {tmp_path}/p --steps 3 --resume {out}/earlier-1/step-00000002")


# ---------------------------------------------------------------------------- unexpected exceptions


@slow
def test_an_unexpected_exception_ends_all_ranks_together(tmp_path):
    """An unexpected exception on one rank ends all ranks with its traceback.

    Catches a bug that is reported as bad input, or leaves the other ranks waiting.
    """
    code = """
import os
import attention
def pick_kernel(*args):
    if os.environ["RANK"] == "1":
        return {}["what nobody foresaw"]
    return "cpu"
attention.pick_kernel = pick_kernel
"""
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"{code}import runpy\nrunpy.run_path('{ROOT}/train.py', run_name='__main__')\n"
    )
    flags = f"--device cpu --model tiny --seq 32 --batch 2 --steps 1 --out {tmp_path}/o".split()
    shared = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, driver, *flags],
            env=os.environ | shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = "".join(rank.communicate(timeout=120)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert said.count("Traceback") == 1 and "KeyError: 'what nobody foresaw'" in said
    assert "train.py: error: rank 1: " in said and "dead or unreachable" not in said


def test_the_checksum_of_meta_json_is_that_of_its_text(tmp_path):
    """The crc32 in a meta.json is that of the text before it.

    Catches a checksum that nobody can compute from the file alone.
    """
    checkpoint.write_meta(tmp_path, {"step": 1})
    body, _, crc32 = (tmp_path / "meta.json").read_text().rpartition(',\n "crc32": ')
    assert int(crc32.split()[0]) == zlib.crc32(body.encode())
