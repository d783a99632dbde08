"""Show that what README.md, docs/ and results/ name exists, and that their commands can be run."""

import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch.distributed.run
from pytest import raises

import bench
import hardware
import planner
import train
from attention import KERNELS
from model import MODELS
from test_all import ROOT, parametrize, slow

PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("results/*.md")),
]
MODULES = {path.stem for path in ROOT.glob("*.py")}


def blocks(page: Path) -> list[str]:
    """Return the code blocks of a page that are commands for a shell."""
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)


def commands(page: Path) -> list[str]:
    """Return the lines of a page's code blocks. A line that ends with a backslash goes on."""
    text = "".join(blocks(page)).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


ALL_COMMANDS = [(page, line) for page in PAGES for line in commands(page)]


def anchors(page: Path) -> set[str]:
    """Return the names by which links reach a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pages_link_to_what_exists():
    """Each link of each page leads to a file, and to a heading if it names one.

    Catches a link to a file or a heading that does not exist.
    """
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link)


def test_readme_names_every_file():
    """README names every program, example, page and picture.

    Catches a file that no reader finds.
    """
    readme = (ROOT / "README.md").read_text()
    for file in (*ROOT.glob("*.py"), *ROOT.glob("csrc/*.cpp")):
        assert f"`{file.relative_to(ROOT)}`" in readme, file
    linked = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py"), ROOT / "results" / "README.md"]
    for file in linked:
        assert f"]({file.relative_to(ROOT)}" in readme, file
    all_pages = "".join(page.read_text() for page in PAGES)
    for picture in ROOT.glob("results/*.svg"):
        assert picture.name in all_pages, picture


def test_planning_names_every_model():
    """docs/planning.md lists all models that --model takes, in the order of model.MODELS.

    Catches a model that no page names.
    """
    text = (ROOT / "docs/planning.md").read_text()
    table, _, _ = text.partition("| models | are |\n| --- | --- |\n")[2].partition("\n\n")
    listed = [name for row in table.splitlines() for name in row.split("|")[1].strip().split(", ")]
    assert listed == [*MODELS]


def test_pages_name_definitions_that_exist():
    """Definitions such as `shard.States.unshard` exist in the pages' files.

    Catches a name that has changed since.
    """
    found = 0
    for page in PAGES:
        for name, path in re.findall(r"`(\w+)\.([\w.]+)`", page.read_text()):
            if name in MODULES and path not in ("py", "json", "md", "jsonl", "svg", "cpp"):
                functools.reduce(getattr, path.split("."), importlib.import_module(name))
                found += 1
    assert found > 40


def test_pages_name_flags_that_exist(monkeypatch, capsys):
    """All flags on the pages and in the headers of examples are in the --help of a program.

    Catches a flag that does not exist any more.
    """
    real = set(torch.distributed.run.get_args_parser()._option_string_actions)
    real |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--signal"}  # Slurm's
    real |= {"--rdzv-backend", "--rdzv-id", "--rdzv-endpoint"}  # torchrun's, spelled with dashes
    real |= {"--check"}  # report.py's
    for name in ("train", "bench", "memplan", "planner", "prepare", "sample"):
        program = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
        with raises(SystemExit) as ended:
            program.main()
        text = capsys.readouterr().out
        assert ended.value.code == 0 and f"usage: {name}.py" in text
        real |= set(re.findall(r"--[a-z][a-z_-]*", text))
        if name == "train":
            assert "binary: 4K is 4096" in " ".join(text.split())
    for file in (*PAGES, *ROOT.glob("examples/*.py")):
        text = file.read_text()
        if file.parent.name == "results":  # flags of measured rows are those of their commits
            text = re.sub(r"<!-- rows .*?<!-- end -->", "", text, flags=re.S)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", text))
        assert named <= real, (file.name, named - real)


@parametrize(("page", "line"), ALL_COMMANDS, ids=[line[:60] for _, line in ALL_COMMANDS])
def test_commands_parse(page, line, monkeypatch):
    """Every command of the pages is one that its program accepts.

    Files and folders of the reader (DIR, data/train.bin) need not exist. Catches a command that a
    reader would copy in vain.
    """
    if make := re.match(r"make (\S+)", line):
        assert re.search(rf"^{make[1]}:", (ROOT / "Makefile").read_text(), re.M)
    if file := re.search(r"pip install -r (\S+)", line):
        assert (ROOT / file[1]).exists()
    ranks = re.search(r"--nproc_per_node (\d+)", line)
    program = re.search(
        r"\b(train|planner|bench|prepare|sample|memplan|report|scale)\.py\b(.*)", line
    )
    if not program or line.startswith("print("):
        return
    name, rest = program[1], shlex.split(program[2], comments=True)
    if name == "train":
        train.Config(**train.parse(rest))
    elif name == "planner":
        parser = planner.make_parser(planner.PlannerFlags, "")
        asked = planner.PlannerFlags(**vars(parser.parse_args(rest)))
        planner.check_values(asked)
        if not asked.cluster.startswith("my-"):
            assert hardware.load_profile(asked.cluster, asked.per_node)
    elif name == "bench":
        monkeypatch.setattr(sys, "argv", ["bench.py", *rest])
        if ranks:
            monkeypatch.setenv("WORLD_SIZE", ranks[1])
        bench.parse()
    elif name in ("prepare", "sample"):
        importlib.import_module(name).make_parser().parse_args(rest)
    else:
        assert (ROOT / f"{name}.py").exists() or (ROOT / "results" / f"{name}.py").exists()


def test_no_command_is_left_out():
    """test_commands_parse has commands of every program that README promises, and the pages have
    code blocks of one kind only.

    Catches a code block that test_commands_parse would not read.
    """
    text = "\n".join(line for _, line in ALL_COMMANDS)
    for promised in ("make train", "make test", "train.py", "planner.py", "bench.py", "sample.py"):
        assert promised in text
    for page in PAGES:
        fences = re.findall(r"^```(\w*)", page.read_text(), re.M)
        assert set(fences) <= {"sh", ""} and len(fences) == 2 * fences.count("sh"), page.name


def test_requirements_for_gpus_are_those_that_measured():
    """requirements-gpu.txt has the versions of torch and FlashAttention-4 that the measured rows
    have. All other versions are those of requirements.txt.

    README's command for FlashAttention-4 names the same version. Catches an installation that
    nobody has measured.
    """

    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text().splitlines()
        return dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line)

    on_gpus, on_cpus = pins("requirements-gpu.txt"), pins("requirements.txt")
    package = KERNELS["fa4"].package.partition("==")[0]
    versions = {"torch": on_gpus.pop("torch"), "flash-attn-4": on_gpus.pop(package)}
    del on_cpus["torch"]
    assert on_gpus == on_cpus
    readme = (ROOT / "README.md").read_text()
    assert f"pip install '{package}=={versions['flash-attn-4']}'" in readme
    rows = [json.loads(x) for f in ROOT.glob("results/*/long.jsonl") for x in f.open()]
    newest = [row["versions"] for row in rows if row["flags"] and row["kernel"] == "fa4"]
    assert newest
    for measured in newest:
        assert {k: measured[k].partition("+")[0] for k in versions} == versions


@slow
def test_readme_walk(tmp_path):
    """The commands of docs/huggingface.md that make a checkpoint, extend it to four times its
    length, export it and compare it with transformers run as they are, in a folder like this one.

    Catches commands that a reader would copy in vain.
    """
    for file in ROOT.iterdir():
        if file.suffix in (".py", ".cpp") or file.name in ("csrc", "results", "examples"):
            (tmp_path / file.name).symlink_to(file)
    (walk,) = [b for b in blocks(ROOT / "docs" / "huggingface.md") if "save_pretrained" in b]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", walk],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    positions, difference = re.findall(r"(\d+) positions, logits differ by (\S+)", done.stdout)[0]
    assert positions == "1024" and float(difference) < 1e-5
