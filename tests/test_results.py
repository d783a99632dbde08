"""Show that results files can be read, and that the pages and pictures say what is in them."""

import json
import re
import sys
from pathlib import Path

from pytest import fixture, raises

import bench
from shard import Factors
from test_all import ROOT, parametrize

sys.path.insert(0, str(ROOT / "results"))
import pictures
import report

A_ROW = {
    "label": "ours",
    "flags": "--model 7b --seq 64K --model 1b",
    "model": "1b",
    "seq": 2**16,
    "batch": 1,
    "step_s": 2.0,
    "kernel": "fa4",
    "hardware": "2 x NVIDIA H200",
    "versions": {"python": "3.12", "torch": "2.11.0", "flash-attn-4": "4"},
    "commit": "1234567",
    "command": "bench.py long",
}


@fixture
def results(tmp_path, monkeypatch) -> Path:
    """A folder that stands for results/, with one row of table long."""
    monkeypatch.setattr(report, "HERE", tmp_path)
    write_rows(tmp_path / "2026-11-2xh200" / "long.jsonl", [A_ROW])
    return tmp_path


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_pages_are_what_the_results_files_give(monkeypatch, capsys, tmp_path):
    """`report.py --check` finds all pages as they would be written, and names one that is not.

    Catches a number on a page that no row has.
    """
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    assert report.main() == 0, capsys.readouterr().out

    monkeypatch.setattr(report, "ROOT", tmp_path)
    stale = tmp_path / "README.md"
    shown = (ROOT / "README.md").read_text()
    number = re.search(r"<!-- speed -->(?:.*\n){3}.*?(\d\.\d+) s", shown)
    stale.write_text(shown[: number.start(1)] + "9.99" + shown[number.end(1) :])
    monkeypatch.setattr(report, "pages", lambda: [stale])
    assert report.main() == 1
    assert f"{stale} is not what the results files give" in capsys.readouterr().out


def test_compared_rows_are_measured():
    """Each line of README's table is our row and a peer's row, of one machine, model and length.

    Catches a ratio of two rows that do not belong together, and a number that nobody measured.
    """
    rows = report.read_rows("long")
    seconds = {
        (report.hardware_of(r), r["model"], report.step_text(r), f"{r['step_s']:.4g}")
        for r in rows
        if r.get("step_s") and not report.is_older(r)
    }
    page = (ROOT / "README.md").read_text()
    table = page.partition("<!-- speed -->\n")[2].partition("<!-- end -->")[0].splitlines()[2:]
    assert 6 <= len(table) <= 8
    for line in table:
        *where, _, ours, theirs, _, ratio = line.strip("| ").split(" | ")
        ours, theirs = (text.partition(" s,")[0] for text in (ours, theirs))
        assert {(*where, ours), (*where, theirs)} <= seconds, line
        assert abs(float(theirs) / float(ours) - float(ratio)) < 0.006, line


def test_peers_are_compared_at_one_precision(tmp_path, monkeypatch):
    """The fastest peer of a comparison computes its products in bf16, as our row does. DeepSpeed's
    rows count as those of any other peer.

    Catches a peer whose float8 products are compared with our products in bf16.
    """
    monkeypatch.setattr(report, "HERE", tmp_path)
    seconds = {
        "ours": 2.0,
        "ours fp8": 1.5,
        "transformers bf16 by-layer half": 2.5,
        "transformers bf16 fp8 by-layer half": 1.0,
        "fsdp2 full": 3.0,
    }
    rows = [A_ROW | {"label": label, "step_s": s} for label, s in seconds.items()]
    write_rows(tmp_path / "2026-11-2xh200" / "long.jsonl", rows)
    [(ours, peer)] = report.comparisons().values()
    assert (ours["label"], peer["label"]) == ("ours", "transformers bf16 by-layer half")

    rows.append(A_ROW | {"label": "deepspeed selective", "step_s": 2.2})
    write_rows(tmp_path / "2026-11-2xh200" / "long.jsonl", rows)
    [(ours, peer)] = report.comparisons().values()
    assert (ours["label"], peer["label"]) == ("ours", "deepspeed selective")


def test_a_peer_at_its_best_is_compared_with_the_same_kernel(tmp_path, monkeypatch):
    """A peer's best setting may have run only with another kernel than our fastest step. Then our
    row with that kernel is compared, and without such a row nothing is.

    Catches a comparison with a peer's weaker setting.
    """
    monkeypatch.setattr(report, "HERE", tmp_path)
    rows = [
        A_ROW | {"label": "ours", "step_s": 2.0, "kernel": "fa4", "bound_ratio": 0.9},
        A_ROW | {"label": "fsdp2 full", "step_s": 3.0, "kernel": "fa4", "bound_ratio": 0.6},
        A_ROW | {"label": "fsdp2 none", "step_s": 2.6, "kernel": "cudnn", "bound_ratio": 0.8},
    ]
    write_rows(tmp_path / "2026-11-2xh200" / "long.jsonl", rows)
    assert not report.comparisons()

    rows.append(A_ROW | {"label": "ours", "step_s": 2.4, "kernel": "cudnn", "bound_ratio": 0.85})
    write_rows(tmp_path / "2026-11-2xh200" / "long.jsonl", rows)
    [(ours, peer)] = report.comparisons().values()
    assert (ours["step_s"], peer["label"]) == (2.4, "fsdp2 none")


def test_rows_of_the_rough_clock_are_left_out():
    """A row that an older, rougher clock measured is known as such. It is left out of a comparison
    if its time may be too short.

    Catches a step that seems faster than it is in a table that compares steps.
    """
    row = {"label": "ours", "flags": "", "step_s": 50.0, "os_place": "host"}
    assert report.may_be_too_short(row)
    assert report.has_rough_clock(row | {"os_place": "gpu"})
    assert not report.may_be_too_short(row | {"os_place": "gpu"})
    for right in ({"timed_steps": 1}, {"step_s": 6.0}, {"step_s": None}, {"flags": None}):
        assert not report.has_rough_clock(row | right), right
    shown = report.precisions()
    rows = [row for row in report.read_rows("long") if row.get("tgs")]
    speeds = {
        rough: {f" {row['tgs']:,.0f} |" for row in rows if report.may_be_too_short(row) == rough}
        for rough in (True, False)
    }
    # two measurements of about the same speed may look alike
    for speed in speeds[True] - speeds[False]:
        assert speed not in shown
    assert len(speeds[True] - speeds[False]) > 3


def test_pictures_say_what_the_rows_say():
    """speed.svg has the ratios and the MFU of README's table, as text.

    Catches a picture that is older than the table beside it.
    """
    picture = (ROOT / "results" / "speed.svg").read_text()
    for *where, ours, peer in report.shown_comparisons():
        assert f">{', '.join(where)}<" in picture
        assert f">{report.ratio(ours, peer):.2f}<" in picture
        assert f">{ours['mfu_causal']:.1%}<" in picture
    for name in ("layer", "shards", "timeline", "predictions", "memory", "speed"):
        text = (ROOT / "results" / f"{name}.svg").read_text()
        assert "<text" in text and "fill: #ffffff" in text  # text as text, on white


def test_pictures_do_not_change_from_run_to_run(tmp_path):
    """The pictures that show ideas, not results, are drawn again byte for byte as in results/.

    Catches a picture that differs from the code that draws it, and a file that changes with each
    run.
    """
    for draw, name in ((pictures.draw_layer, "layer.svg"), (pictures.draw_shards, "shards.svg")):
        draw(tmp_path / name)
        assert (tmp_path / name).read_text() == (ROOT / "results" / name).read_text(), name


@parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON object"),
        ("[1, 2]", "line 2 lacks commit, flags, hardware, label, versions"),
        ("12", "line 2 is no JSON object"),
        ('{"label": "ours", "flags": "", "hardware": "H200", "versions": {}}', "lacks commit"),
    ],
)
def test_a_line_that_is_no_row_is_named(results, line, message):
    """A broken line of a results file is refused, with the file's name and the line's number.

    Catches a half-written row that is left out silently.
    """
    with (results / "2026-11-2xh200" / "long.jsonl").open("a") as f:
        f.write(line + "\n")
    with raises(ValueError, match=re.escape(message)) as e:
        report.read_rows("long")
    assert "2026-11-2xh200/long.jsonl, line 2" in str(e.value)


@parametrize(
    ("text", "message"),
    [
        ("<!-- spede -->\n<!-- end -->\n", "<!-- spede -->: there is no such block, only claim"),
        ("<!-- rows long -->\n| a |\n", "has no line <!-- end -->"),
        ("<!-- rows long -->\n<!-- speed -->\n<!-- end -->\n", "has no line <!-- end -->"),
        ("<!-- rows lnog -->\n<!-- end -->\n", "rows lnog: TABLE_COLUMNS names no columns for it"),
        ("<!-- rows machine -->\n<!-- end -->\n", "no results file has such a row"),
        ("<!-- rows long flash -->\n<!-- end -->\n", "no results file has such a row"),
        ("<!-- scale nothing -->\n<!-- end -->\n", "scale nothing: scale.json has only"),
        ("<!-- answer why -->\n<!-- end -->\n", "answer why: there are only speed"),
    ],
)
def test_a_wrong_block_is_named(text, message):
    """A block of a page that no results file can fill is refused by its name.

    Catches a table that stays empty.
    """
    with raises(ValueError, match=re.escape(message)):
        report.filled(text)


def test_the_newest_row_of_a_setting_is_shown(results):
    """Of rows with the same setting only the newest is shown, even if their flags have another
    order, or a flag is given twice. Other hardware, other nodes, another kernel and another label
    are other settings. All rows without flags are shown.

    Catches a page that shows a number although it was measured again later.
    """
    again = A_ROW | {"step_s": 1.5, "flags": "--seq 64K --model 1b"}
    others = [
        A_ROW | {"hardware": "NVIDIA H200"},
        A_ROW | {"command": A_ROW["command"] + " --nodes 2"},
        A_ROW | {"kernel": "cudnn"},
        A_ROW | {"label": "fsdp2 none"},
        A_ROW | {"flags": "--seq 64K --model 7b"},
        A_ROW | {"flags": None},
        A_ROW | {"flags": None},
    ]
    write_rows(results / "2026-11-2xh200" / "long.jsonl", [A_ROW, *others[:4]])
    write_rows(results / "2026-12-2xh200" / "long.jsonl", [again, *others[4:]])
    shown = report.newest(report.read_rows("long"))
    assert [r["step_s"] for r in shown] == [2.0, 2.0, 2.0, 2.0, 1.5, 2.0, 2.0, 2.0]
    assert report.rows_table("long", "fa4").count("`--model 1b`") == 4
    assert ", older" in report.rows_table("long", "fa4")
    with raises(ValueError, match="these rows ran the attention kernels cudnn, fa4. Write a table"):
        report.rows_table("long")


def test_labels_are_words():
    """A row's first column says in words what its label and its plan say.

    Catches a label that a reader must decode, and a plan that is described wrongly.
    """
    plan = {"layers": 32, "chunks": 4, "resident": 20, "kept_chunks": 60, "swapped_chunks": 12}
    ours = A_ROW | {"p": 1, "g": 2, "os": 2, "sp": 2, "ring": 2, "activations": plan}
    assert report.what_ran(ours) == (
        "this project; 2 GPUs share the sequence in a ring; gradients and optimizer states in 2 "
        "parts; 20 layers stay on the GPU with 75% of their chunks; the other 12 swap x, o and 25% "
        "of their chunks"
    )
    whole = plan | {"chunks": 1, "resident": 32, "kept_chunks": 32, "swapped_chunks": 0}
    texts = [
        (A_ROW | {"activations": None}, "this project; all layers stay on the GPU"),
        (A_ROW | {"activations": whole}, "this project; all layers stay on the GPU"),
        (
            A_ROW | {"activations": plan, "recompute": "full"},
            "this project; every layer is recomputed",
        ),
        (
            A_ROW | {"activations": plan | {"kept_chunks": 0, "swapped_chunks": 0, "stride": 3}},
            "this project; 20 layers stay on the GPU with x and o only, one in 3 with x; the other "
            "12 swap x and o",
        ),
        (
            A_ROW | {"label": "fsdp2 selective host"},
            "FSDP2, recomputes all but attention, model states on the host",
        ),
        (A_ROW | {"label": "deepspeed full"}, "DeepSpeed, recomputes every layer"),
        (
            A_ROW | {"label": "fsdp2 none", "command": "bench.py ring --nodes=2"},
            "FSDP2, recomputes nothing, 2 nodes, which sockets connect",
        ),
        (
            A_ROW | {"label": "by heads", "command": "bench.py ring --nodes 4", "sp": 8},
            "this project; 4 nodes, which sockets connect; 8 GPUs share the sequence",
        ),
        (
            A_ROW | {"label": "transformers bf16 fp8 by-layer three-quarters"},
            "transformers, bf16 weights and states, torchao's float8 products, compiled by layer, "
            "recomputes three of four layers",
        ),
        (
            A_ROW | {"label": "transformers bf16 liger full"},
            "transformers, bf16 weights and states, Liger's kernels, recomputes every layer",
        ),
        (
            A_ROW | {"label": "ours 1,1,4 intra M=1", "flags": None},
            "this project; intra; optimizer states in 4 parts",
        ),
        (
            A_ROW | {"label": "4,4,4 M=1 without spread, reduce"},
            "this project; without param_broadcast, grad_reduce; parameters, gradients and "
            "optimizer states in 4 parts",
        ),
    ]
    for row, text in texts:
        assert report.what_ran(row) == text
    assert report.factors_text(Factors(1, 1, 1)) == "every GPU holds all model states"
    assert report.hardware_of({"hardware": "NVIDIA H100 80GB HBM3"}) == "1 H100"
    assert report.tokens_text(1_392_640) == "1,360K" and report.tokens_text(100) == "100"
    # no row that a page shows is described by the short forms of its label
    for table in report.TABLE_COLUMNS:
        for row in report.shown(table):
            words = report.what_ran(row)
            assert not re.search(r"\bk=|alpha=|M=\d|^ours|\bspread\b|--", words), words


def test_results_files_are_named_by_month_machine_and_table(tmp_path, monkeypatch):
    """bench.py's files are OUT/MONTH-MACHINE/TABLE.jsonl. A new row begins on a new line.

    Catches rows of two machines or two tables in one file, and a row that is appended to a broken
    line.
    """
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(tmp_path)])
    args = bench.parse()
    for hardware, machine in (
        ("4 x NVIDIA H200", "4xh200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("2 x NVIDIA A100-SXM4-80GB", "2xa100-sxm4-80gb"),
        ("CPU", "cpu"),
    ):
        file = bench.results_file(args, True, hardware)
        assert re.fullmatch(rf"\d{{4}}-\d\d-{machine}", file.parent.name)
        assert file.name == f"{args.table}.jsonl"

    file = tmp_path / "rows.jsonl"
    bench.append_line(file, "{}")
    with file.open("a") as f:
        f.write('{"half')
    bench.append_line(file, "[]")
    assert file.read_text().splitlines() == ["{}", '{"half', "[]"]
