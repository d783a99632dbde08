"""Hardware profiles: how fast a machine runs each operation, by shape, bytes and mesh.

The mesh of a group of ranks says where its GPUs are: (GPUs in each node, nodes). A file writes it
as "8x4". costs.py divides the size of an operation by its rate in a profile:

    seconds(operation, size, mesh) = size / rate(operation, size, mesh)

A profile has rates at a few measured sizes, which are called points. Between points a rate is
interpolated. Before the first point and after the last one it stays constant. As in
AMSP (section IV), collectives have measured bandwidths by size. The model latency + bytes /
bandwidth (alpha-beta) does not fit them, because NCCL changes its algorithm with the size.

Example: profile h200x2 has the forward of cuDNN's attention at 531 TFLOP/s on 4,096 tokens and at
577 on 16,384. On 8,192 tokens the rate is their mean, 554, because log 8,192 is half-way between
log 4,096 and log 16,384.

A Profile is a file, results/profiles/NAME.json. `bench.py --profile NAME` measures one with
measure.py, or someone puts it together from published numbers, each with its source. Rates are
those of single operations, and are not fitted to the times of whole steps. `memory` is computed
from the time of a layer, and `sources` names other exceptions. (For example, in h200x2 the seconds
to launch a head group of attention are derived from the times of steps.) `load_profile` finds a
profile by its name, and `find_profile` by the name of a GPU. For a GPU without a profile, the rates
of an H200 are multiplied by ratios of the data sheets.

The rates of attention depend on the kernel, so a profile has one table per attention kernel. The
seconds that the host takes to launch kernels depend on the host's processor, so a profile has them
by the name of the processor. Predictions say which kernel and which host they are for.

Left out: congestion by other users, temperatures, GPUs of one machine that differ.
"""

import json
import math
import platform
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

PROFILES = Path(__file__).parent / "results" / "profiles"

# ---------------------------------------------------------------------------- profiles

# weight_grad_sum: a weight's gradient that is added to a float32 sum
PRODUCTS = ("forward", "input_grad", "weight_grad", "weight_grad_sum")
# the same products in float8, without the casts of their operands. Only if the GPU has float8
FLOAT8_PRODUCTS = tuple(f"fp8_{kind}" for kind in PRODUCTS)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
PASSES = ("forward", "backward")
# What a host launches. "forward" and "backward": all kernels of a layer in that pass. "head group
# ...": attention's kernel and the all-to-alls of one head group in that pass
HEAD_GROUP_LAUNCHES = ("head group forward", "head group backward")
LAUNCHES = (*PASSES, *HEAD_GROUP_LAUNCHES)
# The same as "forward" and "backward" for a layer whose products run in float8, which has more
# kernels. Only if the GPU has float8
FLOAT8_LAUNCHES = ("fp8 forward", "fp8 backward")
OVERLAPS = ("collectives", "all_to_all")
Points = list[list[float]]  # each [size, rate] or [tokens, width, rate], in ascending order


@dataclass(frozen=True)
class Profile:
    """How fast one GPU of a machine runs each operation, and what the machine has.

    Rates are sustained rates: a GPU keeps them up for seconds, while all GPUs of the machine work.
    """

    name: str
    device: str  # PyTorch's name of the GPU
    per_node: int  # GPUs per node
    gpu_bytes: float  # memory of a GPU
    host_bytes: float  # memory of a node
    peak_flops: float | None  # dense bf16, by the data sheet. None: unknown, so there is no MFU
    # by PRODUCTS and FLOAT8_PRODUCTS: [tokens, width of a square matrix, FLOP/s]
    products: dict[str, Points]
    # by attention kernel (a name in attention.KERNELS) and by PASSES: [tokens of a sequence,
    # FLOP/s]. Only the FLOPs of causal attention count: half of the attention matrix
    attention: dict[str, dict[str, Points]]
    memory: float  # bytes/s read and written by element-wise kernels, their launches included
    optimizer: float  # bytes/s read and written by the optimizer's update on the GPU
    to_host: float  # bytes/s of copies to the host, while all GPUs of a node copy
    state_streaming: float  # bytes/s each way of optimizer states that stream through the GPU
    # by processor, and by LAUNCHES and FLOAT8_LAUNCHES: seconds
    launch: dict[str, dict[str, float]]
    collectives: dict[str, dict[str, Points]]  # by operation and mesh "8x4": [bytes, bytes/s]
    # by OVERLAPS: two factors, by which computation and communication take longer while both run.
    # "collectives": all-gathers and reduce-scatters while layers run. "all_to_all": all-to-alls
    # while attention runs
    overlap: dict[str, list[float]]
    # bytes/s read and written by casts to float8. None: not measured; costs.py takes `memory`
    casts: float | None = None
    # where the numbers come from, by field. "all": the profile as a whole
    sources: dict[str, str] = field(default_factory=dict)
    about: dict = field(default_factory=dict)  # hardware, date, versions, commit, command


def profile_text(profile: Profile) -> str:
    """Return a profile as JSON with four digits per number and one point per line."""
    exact = json.dumps(asdict(profile))
    rounded = json.loads(exact, parse_float=lambda number: float(f"{float(number):.4g}"))
    return indented(rounded) + "\n"


def indented(value, depth=0) -> str:
    """Return JSON as json.dumps(value, indent=1) writes it, but with each list of numbers on one
    line."""
    outer, inner = " " * depth, " " * (depth + 1)
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {indented(v, depth + 1)}" for key, v in value.items()]
        lines = ",\n".join(inner + item for item in items)
        return f"{{\n{lines}\n{outer}}}"
    if isinstance(value, list) and any(isinstance(v, list) for v in value):
        lines = ",\n".join(inner + indented(v, depth + 1) for v in value)
        return f"[\n{lines}\n{outer}]"
    return json.dumps(value)


def interpolate(points: Points, at: float) -> float:
    """Return the rate at a size. Between points [size, rate] it is linear in the logarithm of the
    size. Before the first point and after the last one it is constant."""
    sizes, rates = zip(*points)
    return float(np.interp(math.log(at), np.log(sizes), rates))


def interpolate_twice(points: Points, tokens: float, width: float) -> float:
    """Return the rate at [tokens, width] of points [tokens, width, rate] on a grid.

    Interpolate along tokens for each width of the grid, then along width.
    """
    rates = []  # [width, rate at `tokens`]
    for grid_width in sorted({w for _, w, _ in points}):
        column = [[t, rate] for t, w, rate in points if w == grid_width]
        rates.append([grid_width, interpolate(column, tokens)])
    return interpolate(rates, width)


def launch_host(profile: Profile, processor: str = "") -> str:
    """Return the processor whose launch seconds are used for `processor`.

    That is `processor` itself if the profile has it, and otherwise the profile's first one.
    """
    if processor in profile.launch:
        return processor
    return next(iter(profile.launch))


def processor_name() -> str:
    """Return the name of this machine's processor from /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: *(\S.*?) *$", text, re.MULTILINE)
    if found:
        return found[1]
    return platform.machine() or "a host without a name"


def scale_rates(rates, factor):
    """Return rates times a factor. rates: a number, points, or nested dictionaries of them."""
    if isinstance(rates, dict):
        return {key: scale_rates(value, factor) for key, value in rates.items()}
    if isinstance(rates, list):
        return [[*at, rate * factor] for *at, rate in rates]
    return rates * factor


def scaled(
    profile: Profile,
    name: str,
    flops: float = 1.0,
    memory: float = 1.0,
    network: float = 1.0,
    host: float = 1.0,
    **changes,
) -> Profile:
    """Return a profile with its rates multiplied by factors. changes: other fields to set.

    flops scales matrix products and attention; memory scales element-wise kernels and the update;
    network scales collectives; host scales copies to and from the host. Casts scale with memory, as
    element-wise kernels do.
    """
    factors = {
        "products": flops,
        "attention": flops,
        "memory": memory,
        "optimizer": memory,
        "collectives": network,
        "to_host": host,
        "state_streaming": host,
    }
    if profile.casts:
        factors["casts"] = memory
    rates = {key: scale_rates(getattr(profile, key), factor) for key, factor in factors.items()}
    return replace(profile, name=name, **rates, **changes)


# ---------------------------------------------------------------------------- which profile


WITHOUT_FLOAT8 = r"A100|A800"  # GPUs whose tensor cores cannot multiply float8


class Sheet(NamedTuple):
    """A GPU's data sheet."""

    flops: float  # dense bf16 FLOP/s
    memory: float  # bytes/s of memory
    nvlink: float  # bytes/s in one direction
    pcie: float  # bytes/s in one direction
    gib: float  # of memory, as PyTorch reports it


# By a pattern of PyTorch's device name. The first pattern that matches counts. If a GPU has no
# profile, the ratios between its row and the H200's row scale the H200's profile
SHEETS = {
    r"A100.*40GB": Sheet(312e12, 1.555e12, 300e9, 32e9, 39.4),
    r"A800": Sheet(312e12, 2.039e12, 200e9, 32e9, 79.2),
    r"A100": Sheet(312e12, 2.039e12, 300e9, 32e9, 79.2),
    r"H100 PCIe": Sheet(756e12, 2.0e12, 64e9, 64e9, 79.2),
    r"H100 NVL": Sheet(835e12, 3.9e12, 300e9, 64e9, 93.1),
    r"H200 NVL": Sheet(835e12, 4.8e12, 450e9, 64e9, 139.8),
    r"H800": Sheet(989.4e12, 3.35e12, 200e9, 64e9, 79.2),
    r"H100": Sheet(989.4e12, 3.35e12, 450e9, 64e9, 79.2),
    r"H200": Sheet(989.4e12, 4.8e12, 450e9, 64e9, 139.8),
    r"B200": Sheet(2250e12, 7.7e12, 900e9, 64e9, 178.4),
}
MIG = " MIG "  # in the name of a slice of a GPU, such as "NVIDIA H200 MIG 1g.18gb"
BASE = "NVIDIA H200"  # profiles of other GPUs are scaled from its profile


def find_sheet(device_name: str) -> Sheet | None:
    """Return a device's row of SHEETS, or None."""
    for name, sheet in SHEETS.items():
        if re.search(rf"\b({name})\b", device_name, re.IGNORECASE):
            return sheet
    return None


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device, or None if it is not in SHEETS, or is only a MIG
    slice of a GPU. (MFU is then unknown.)"""
    sheet = find_sheet(device_name)
    return sheet.flops if sheet and MIG not in device_name else None


def profile_files() -> dict[str, Path]:
    """Return the files of results/profiles by their names in lower case."""
    return {path.stem.lower(): path for path in sorted(PROFILES.glob("*.json"))}


def load_profile(name: str, per_node: int | None = None) -> Profile:
    """Return the profile that `--cluster NAME` means.

    name: the name of a profile in results/profiles (upper or lower case), the path of a profile's
    file, or the name of a GPU (find_profile).

    per_node: GPUs per node. None: 8 for the name of a GPU, and a profile's own number for a
    profile. If it is larger than a profile's own number, add_network may take the network from an
    H200's profile. Otherwise the profile keeps its own number.

    Raises ValueError if there is no such profile, or if its file is wrong.
    """
    path = profile_files().get(name.lower(), Path(name))
    if path.suffix != ".json" and find_sheet(name):
        return find_profile(name, per_node or 8)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        profile = Profile(**json.loads(path.read_text()))
        check_profile(profile)
    except Exception as e:  # the file may hold anything
        gpus = ", ".join(SHEETS).replace(".*", " ")
        reason = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) else e.args[-1]
        raise ValueError(
            f"--cluster {name}: {path} is no profile as bench.py --profile writes it: "
            f"{reason}. Give a profile's file, or one of {', '.join(profile_files())}; or a "
            f"GPU by its name, {gpus}. For another GPU, name the nearest of these, and give "
            "--gpu-memory"
        ) from e
    if per_node:
        return add_network(profile, per_node)
    return profile


def check_profile(profile: Profile) -> None:
    """Raise ValueError or KeyError unless all rates are there and positive, and the points of each
    table are sorted by size."""
    for name, size, points in tables_of(profile):
        valid = all(len(point) == size and all(map(is_positive, point)) for point in points)
        if not points or not valid:
            raise ValueError(f"{name} {points}: give {size} positive numbers per point")
        if points != sorted(points):
            raise ValueError(f"{name} {points}: the points must be in ascending order")


def tables_of(profile: Profile) -> list[tuple[str, int, Points]]:
    """Return (name, numbers per point, points) of each table of a profile. A single number is a
    table of one point. Raises ValueError or KeyError if a table is missing."""
    tables = []
    for name in "per_node gpu_bytes host_bytes memory optimizer to_host state_streaming".split():
        tables.append((name, 1, [[getattr(profile, name)]]))
    if profile.casts is not None:
        tables.append(("casts", 1, [[profile.casts]]))

    if not profile.launch or not profile.attention:
        raise ValueError("launch needs at least one host, and attention at least one kernel")
    for host, seconds in profile.launch.items():
        if not isinstance(seconds, dict):
            raise ValueError(
                f"launch {host} {seconds}: give the seconds of a host for each of "
                f"{', '.join(LAUNCHES)}"
            )
        float8 = [kind for kind in FLOAT8_LAUNCHES if kind in seconds]
        tables += [(f"launch {host} {kind}", 1, [[seconds[kind]]]) for kind in (*LAUNCHES, *float8)]

    float8 = [kind for kind in FLOAT8_PRODUCTS if kind in profile.products]
    tables += [(f"products {kind}", 3, profile.products[kind]) for kind in (*PRODUCTS, *float8)]
    for kernel, rates in profile.attention.items():
        if not isinstance(rates, dict):
            raise ValueError(
                f"attention {kernel} {rates}: give the rates of a kernel, forward and backward"
            )
        tables += [(f"attention {kernel} {kind}", 2, rates[kind]) for kind in PASSES]
    tables += [(f"overlap {kind}", 2, [profile.overlap[kind]]) for kind in OVERLAPS]
    for op in COLLECTIVES:
        tables += [(f"{op} {mesh}", 2, points) for mesh, points in profile.collectives[op].items()]
    return tables


def is_positive(x) -> bool:
    """Return whether x is a positive, finite number."""
    return type(x) in (int, float) and 0 < x < math.inf


def find_profile(device_name: str, per_node: int) -> Profile:
    """Return the profile for a GPU by PyTorch's device name, and for nodes of `per_node` GPUs.

    A GPU's own profiles are those of devices with the same row of SHEETS. If the GPU has no row,
    they are those of devices with the same name.

        the GPU has profiles for ...     example              returned profile
        nodes of at least per_node       H200, 3 per node     h200x8: of these, the smallest nodes
        only smaller nodes, and is an    H200, 16 per node    h200x8: of these, the largest nodes
          H200
        only smaller nodes, and is       H100, 8 per node     h100x2, with the network of h200x8,
          another GPU                                         scaled (add_network)
        nothing, but a data sheet        A100, 8 per node     h200x8, scaled
        nothing, and no data sheet       H20, 8 per node      h200x8 as it is

    A profile that was measured on one GPU has no rates of the network. It takes them from a profile
    of the H200, also in the first row (add_network).

    If a whole profile is scaled or borrowed, its name says so. Of profiles for nodes of the same
    size, the one that was measured last is returned, for example your own. A MIG slice gets the
    profile of its whole GPU, without a peak.
    """
    whole_gpu, is_slice, _ = device_name.partition(MIG)
    if is_slice:
        profile = find_profile(whole_gpu, per_node)
        return replace(profile, name=f"{profile.name}, a whole GPU", peak_flops=None)
    kind = sheet_or_name(device_name)
    profiles = [load_profile(name) for name in profile_files()]
    own = [profile for profile in profiles if sheet_or_name(profile.device) == kind]
    if not own:
        return scale_by_data_sheet(device_name, per_node)

    def distance(profile):
        too_small = profile.per_node < per_node
        return too_small, abs(profile.per_node - per_node)

    # the profiles that come with this project have no date. On a tie, min takes the first one
    own.sort(key=lambda profile: profile.about.get("date", ""), reverse=True)
    return add_network(min(own, key=distance), per_node)


def sheet_or_name(device_name):
    """Return a value that is equal for two device names if they are the same kind of GPU."""
    return find_sheet(device_name) or device_name


def scale_by_data_sheet(device_name, per_node):
    """Return an H200's profile, scaled by the ratios of the data sheets. If the device has no data
    sheet, return the H200's rates as they are."""
    base = find_profile(BASE, per_node)
    base_sheet = find_sheet(BASE)
    sheet = find_sheet(device_name)
    if sheet:
        how = "by its data sheet"
    else:
        sheet = base_sheet
        how = "as an H200, since it has no data sheet here"

    ratios = Sheet(*np.divide(sheet, base_sheet).tolist())
    if re.search(WITHOUT_FLOAT8, device_name, re.IGNORECASE):
        products = {kind: base.products[kind] for kind in PRODUCTS}
        base = replace(base, products=products)
    return scaled(
        base,
        f"{device_name} {how}",
        flops=ratios.flops,
        memory=ratios.memory,
        network=ratios.nvlink,
        host=ratios.pcie,
        device=device_name,
        peak_flops=peak_flops(device_name),
        gpu_bytes=sheet.gib * 2**30,
        sources={"all": f"{base.name}'s, by the ratios of the data sheets"},
    )


def add_network(profile, per_node):
    """Return a profile that also has rates of the network, for nodes of `per_node` GPUs.

    A profile measured on one GPU has no such rates, and those measured on two GPUs do not hold for
    eight. Such a profile takes the network's rates from the H200's profile that find_profile finds,
    scaled by the data sheets. Its seconds to launch a head group become at least those of the
    H200's profile: in an all-to-all the host launches one copy per GPU of a node, and the profile
    was measured with fewer GPUs. If per_node > 1, the profile also takes the rates of copies to the
    host and the host's memory, because the GPUs of a node share them.

    A profile that has rates of the network is returned as it is in four cases: it was measured on a
    node of this size or a larger one, or of the size of the H200's profile or a larger one; it is
    an H200's; or its device has no data sheet, so that nothing can be scaled.
    """
    has_network = any(profile.collectives.values())
    if has_network:
        sheet = find_sheet(profile.device)
        if profile.per_node >= per_node or sheet in (None, find_sheet(BASE)):
            return profile
    shared = scale_by_data_sheet(profile.device, max(2, per_node))
    if has_network and shared.per_node <= profile.per_node:
        return profile
    names = ["collectives", "overlap"]
    if per_node > 1:
        names += ["per_node", "to_host", "state_streaming", "host_bytes"]

    own = profile.sources.get("all", "see its file")
    all_sources = f"{own}; {', '.join(names)} {shared.sources['all']}"
    sources = profile.sources | dict.fromkeys(names, shared.sources["all"]) | {"all": all_sources}
    rates = {name: getattr(shared, name) for name in names}
    rates["launch"] = {}
    for host, seconds in profile.launch.items():
        with_all_to_alls = shared.launch[launch_host(shared, host)]
        longer = {kind: max(seconds[kind], with_all_to_alls[kind]) for kind in HEAD_GROUP_LAUNCHES}
        rates["launch"][host] = seconds | longer
    return replace(profile, **rates, sources=sources)
