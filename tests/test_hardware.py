"""Test hardware profiles: their files, rates between measured points, and measuring a machine."""

import ast
import math
import shutil
from dataclasses import replace

import torch
from pytest import approx, raises

import costs
import hardware
import measure
from test_all import ROOT, on_ranks, parametrize, slow


def test_profiles_between_points_and_at_their_ends():
    """Between measured points, rates are linear in the logarithm of the size. Beyond the first and
    the last point, they stay as they are there.

    Catches a rate that no machine has.
    """
    points = [[1e6, 10.0], [1e8, 30.0]]
    rates = [hardware.interpolate(points, size) for size in (1, 1e7, 1e8, 1e12)]
    assert rates == approx([10, 20, 30, 30])
    grid = [[16, 1, 1.0], [16, 4, 3.0], [64, 1, 5.0], [64, 4, 7.0]]
    assert hardware.interpolate_twice(grid, 32, 2) == approx(4)
    assert hardware.interpolate_twice(grid, 1, 99) == 3


@parametrize(
    "edit, message",
    [
        ('"memory": 0.0', "memory .*0.0.*positive numbers"),
        ('"to_host": NaN', "to_host .*nan.*positive"),
        ('"per_node": "fast"', "per_node .*fast.*positive"),
        (
            '"launch": {"x": {"forward": 1, "backward": -1, "head group forward": 1, '
            '"head group backward": 1}}',
            "launch x backward .*-1.*positive",
        ),
        ('"launch": {"x": {"forward": 1}}', "is no profile.*backward"),
        (
            '"launch": {"forward": 1, "backward": 1}',
            "launch forward 1: give the seconds of a host for each of forward, backward, head",
        ),
        ('"launch": {}', "at least one host"),
        ('"names": 1', "is no profile.*names"),
        ('"products": {"forward": [[1, 1, 1]]}', "input_grad"),
        ('"attention": {"fa4": {"forward": [[8, 1], [4, 1]], "backward": []}}', "8, 1.*ascending"),
        ('"attention": {"fa4": {"forward": [[4, 1]]}}', "backward"),
        (
            '"attention": {"forward": [[4, 1]], "backward": [[4, 1]]}',
            "attention forward .*4, 1.*: give the rates of a kernel",
        ),
        ('"attention": {}', "at least one kernel"),
        (  # one kernel's rates are whole, another one's are not
            '"attention": {"fa4": {"forward": [[4, 1]], "backward": [[4, 1]]}, '
            '"cudnn": {"forward": [[4, 1]], "backward": [[4, -1]]}}',
            "attention cudnn backward .*-1.*positive",
        ),
        (
            '"attention": {"fa4": {"forward": [[4, 1]], "backward": [[4, 1]]}, '
            '"cudnn": {"forward": [[4, 1]]}}',
            "is no profile.*backward",
        ),
        ('"collectives": {"all_gather": {"2x1": [[1, 1]]}}', "reduce_scatter"),
        ("}", "is no profile"),
    ],
)
def test_broken_profiles_are_refused(edit, message, tmp_path):
    """A profile with a broken value is refused, and the error names the key.

    Catches a broken file that is used. edit: a key and its value. It is added at the end of a whole
    profile, where it counts, because the last one of equal keys does.
    """
    file = tmp_path / "mine.json"
    whole = (hardware.PROFILES / "h200x2.json").read_text()
    file.write_text(whole.rstrip().removesuffix("}") + f", {edit}}}")
    with raises(ValueError, match=f"--cluster .*mine.json.*{message}"):
        hardware.load_profile(str(file))


def test_profiles_are_files(tmp_path, monkeypatch):
    """A profile is found by its name or by its path, even if a folder in the path is named after
    another GPU.

    Catches a file that is taken for another one.
    """
    folder = shutil.copytree(hardware.PROFILES, tmp_path / "H100")
    monkeypatch.setattr(hardware, "PROFILES", folder)
    for name in hardware.profile_files():
        profile = hardware.load_profile(name)
        assert profile.name == name and profile.sources and profile.per_node
        (folder / "H100-mine.json").write_text(hardware.profile_text(profile))
        assert hardware.load_profile(str(folder / "H100-mine.json")) == profile
        assert hardware.load_profile("h100-mine") == profile
    with raises(ValueError, match="or one of .*h200x2.*; or a GPU .*H100 PCIe"):
        hardware.load_profile("h300")


def test_the_profile_that_was_measured_last_is_used(tmp_path, monkeypatch):
    """Of profiles for the same GPU and number of GPUs per node, the newest one is used, whatever
    its name.

    Catches a profile that a user has measured, and that train.py ignores.
    """
    h200 = hardware.load_profile("h200x8")
    monkeypatch.setattr(hardware, "PROFILES", tmp_path)
    for name, about in (("h200x8", {}), ("mine", {"date": "2026-11-28"}), ("z", {})):
        text = hardware.profile_text(replace(h200, about=about))
        (tmp_path / f"{name}.json").write_text(text)
    assert hardware.find_profile("NVIDIA H200", 8).about == {"date": "2026-11-28"}


def test_known_profiles_are_those_of_the_node():
    """Of a GPU's profiles, the one of the smallest node with at least as many GPUs is used, else
    that of the largest node.

    A GPU without a profile has the rates of an H200, scaled by their data sheets. A GPU without a
    data sheet has the rates of an H200, and the profile's name says so. Catches the rates of
    another machine.
    """
    for per_node, name in ((1, "h200x2"), (2, "h200x2"), (3, "h200x8"), (16, "h200x8")):
        assert hardware.find_profile("NVIDIA H200", per_node).name == name
    base, large, unknown = (
        hardware.find_profile(f"NVIDIA {name}", 8) for name in ("H200", "A100-SXM4-80GB", "H20")
    )
    assert unknown.products == base.products and unknown.peak_flops is None
    assert unknown.name == "NVIDIA H20 as an H200, since it has no data sheet here"
    assert hardware.find_profile("CPU", 8) == hardware.load_profile("cpu")
    assert large.gpu_bytes < 0.6 * base.gpu_bytes and large.to_host == base.to_host / 2
    assert large.peak_flops == 312e12 and "data sheets" in large.sources["all"]
    rates = [x.products["forward"][-1][-1] for x in (large, base)]
    assert rates[0] == approx(312 / 989.4 * rates[1])
    rates = [x.collectives["all_gather"]["8x1"][-1][-1] for x in (large, base)]
    assert rates[0] == approx(300 / 450 * rates[1])
    # one and two GPUs were measured; what eight GPUs of a node share is an H200's
    one, two, eight = (hardware.load_profile("h100", n) for n in (1, 2, 8))
    assert (one.name, two.name, eight.name) == ("h100x1", "h100x2", "h100x2")
    assert [x.per_node for x in (one, two, eight)] == [1, 2, 8]
    assert eight.products == two.products and eight.host_bytes > two.host_bytes
    assert two.sources["all"].startswith("measured")
    assert eight.collectives == base.collectives and "h200x8" in eight.sources["collectives"]
    assert hardware.load_profile("H100", 8) == eight
    # no profile has larger nodes than eight GPUs, so what this one has for eight stays
    assert hardware.load_profile("a800", 16) == hardware.load_profile("a800", 8)


def test_six_files_import_no_other_file_of_the_project():
    """Six files can be read by themselves, because they import no other file of the project.

    Catches a helper that ties one of them to the engine.
    """
    project = {path.stem for path in ROOT.glob("*.py")}
    for name in ("data", "hardware", "memplan", "ops", "ranks", "streams"):
        nodes = [*ast.walk(ast.parse((ROOT / f"{name}.py").read_text()))]
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        for node in nodes:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        assert not imported & project, name


def test_rates_belong_to_a_kernel_and_launches_to_a_host():
    """A kernel that the profile lacks has the rates of the nearest kernel, and a host that the
    profile lacks has the launches of the first host.

    Catches a kernel or a host that has the seconds of another one although its own are known.
    """
    machine = hardware.load_profile("h200x2")
    assert [*machine.attention] == ["fa4", "cudnn", "flash"]
    for kernel in machine.attention:
        assert costs.nearest_kernel(machine, kernel) == kernel
    assert costs.nearest_kernel(machine) == "fa4"
    assert costs.nearest_kernel(machine, "cpu") == "flash"
    two = replace(machine, attention={name: machine.attention[name] for name in ("cudnn", "fa4")})
    assert costs.nearest_kernel(two) == "fa4" and costs.nearest_kernel(two, "flash") == "cudnn"
    other = replace(machine, attention={"mine": machine.attention["fa4"]})
    with raises(ValueError, match="kernels mine, and of none of fa4, cudnn"):
        costs.nearest_kernel(other)
    hosts = replace(machine, launch={"first": {}, "second": {}})
    assert [hardware.launch_host(hosts, name) for name in ("second", "third", "")] == [
        "second",
        "first",
        "first",
    ]
    assert hardware.processor_name()
    # a machine without a profile has all kernels of the one that its rates are scaled from
    assert [*hardware.find_profile("NVIDIA A100-SXM4-40GB", 8).attention] == [
        "fa4",
        "cudnn",
        "flash",
    ]


def measured_profile_worker():
    """Measure a profile, and check its rates. Runs on each rank."""
    machine = measure.Machine(torch.device("cpu"), torch.float32, ["cpu"], 2)
    measured = machine.profile("here", {})
    hardware.check_profile(measured)
    assert measured.sources == {"all": "measured"} and measured.peak_flops is None
    assert [*measured.attention] == ["cpu"] and [*measured.launch] == [hardware.processor_name()]
    assert 1e6 < min(measured.memory, measured.optimizer, measured.state_streaming) < 1e15

    # If a layer takes the seconds that costs.py counts for a memory rate of 1e6, this rate is
    # found.
    cfg, _ = machine.make_layers()
    known = replace(measured, memory=1e6)
    counted = measure.predicted_layer_seconds(known, cfg, machine.dtype, machine.layer_size)
    machine.time = lambda fn: cfg.layers * counted
    rest = replace(measured, memory=math.inf)  # the rest of the profile, without a memory rate
    assert machine.memory_rate(rest) == approx(1e6)
    assert [*measured.collectives["all_gather"]] == ["2x1"]
    forward, backward = machine.head_group_launches()  # as on GPUs, with all-to-alls
    assert 1e-6 < forward < 1 and 1e-6 < backward < 1


@slow
def test_profiles_are_measured_by_all_ranks():
    """Two ranks measure a profile of this machine. Its memory rate is the one with which costs.py
    counts as many seconds for a layer as were measured.

    Catches a rate that no machine has.
    """
    on_ranks(2, measured_profile_worker)


def batches_of_two_streams(slower: list[float], batches: int = 48) -> list[list[float]]:
    """Return when the batches of two streams begin, and when the last ones end. A batch takes one
    second by itself, and slower[i] seconds on stream i while the other stream has work."""
    begins = [0.0], [0.0]
    now, done = 0.0, [0.0, 0.0]
    while min(done) < batches:
        both_work = max(done) < batches
        rates = [1 / factor if both_work else 1.0 for factor in slower]
        left = [(math.floor(d) + 1 - d) / r for d, r in zip(done, rates)]  # seconds until one ends
        step = min(s for s, d in zip(left, done) if d < batches)
        now += step
        for i in range(2):
            if done[i] < batches:
                ends = left[i] <= step + 1e-9
                done[i] = math.floor(done[i]) + 1 if ends else done[i] + step * rates[i]
                if ends:
                    begins[i].append(now)
    return list(begins)


@parametrize("slower", [[1, 1], [1.2, 1.4], [1, 1.7], [1, 2.5], [1, 3], [1.1, 4], [6, 1]])
def test_profile_measures_how_much_two_streams_slow_each_other_down(slower):
    """Whichever stream is slowed down, and by how much, the factors are those of the simulation.

    Catches a window in which only one stream still has work: it would make a large factor small.
    """
    begins = batches_of_two_streams(slower)
    with raises(ValueError, match="never ran at the same time"):
        measure.slow_down_factors([begins[0], [t + 1000 for t in begins[1]]], [1.0, 1.0])
    # when the faster stream ends, the slower one is in the middle of a batch
    assert measure.slow_down_factors(begins, [1.0, 1.0]) == approx(slower, rel=0.04)


def test_a_part_of_a_gpu_has_no_data_sheet():
    """A MIG slice has the profile of its GPU, but no peak. Catches an MFU that is several times too
    low."""
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    part = hardware.find_profile("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 1)
    whole = hardware.find_profile("NVIDIA A100-SXM4-80GB", 1)
    assert part.peak_flops is None and part.name == f"{whole.name}, a whole GPU"
    assert part == replace(whole, peak_flops=None, name=part.name)


def test_profile_of_a_gpu_without_float8_has_no_rates_of_it(monkeypatch):
    """An H200's rates of float8 products are scaled for an H20, which has float8, and left out for
    an A100, which has none.

    Catches a plan that counts on products which an A100 cannot run.
    """
    h200 = hardware.find_profile("NVIDIA H200", 8)
    rates = {kind: [[1, 1, 1e15]] for kind in hardware.FLOAT8_PRODUCTS}
    h200 = replace(h200, products=h200.products | rates)
    monkeypatch.setattr(hardware, "find_profile", lambda *_: h200)
    h20 = hardware.scale_by_data_sheet("NVIDIA H20", 8)
    assert rates.keys() <= h20.products.keys()
    for name in ("NVIDIA A100", "a100"):  # --cluster takes a name in lower case
        a100 = hardware.scale_by_data_sheet(name, 8)
        assert not rates.keys() & a100.products.keys()
