"""What does a machine do in a second? Profiles: rates by operation, shape, bytes and mesh.

A Profile is a file, results/profiles/NAME.json: measured by bench.py --profile NAME, or put
together from what others have published, each number with its source. costs.py turns it into the
seconds of a step; nothing in it is fitted to whole steps, and `memory` alone to a whole layer.
Between the points of a profile rates are interpolated, at its ends they are held (AMSP, section IV:
no alpha-beta model follows NCCL's choice of algorithms).

    t(operation, size, mesh) = size / rate(operation, size, mesh)

A GPU without a profile has an H200's rates times the ratios of their data sheets (SHEETS); one that
has no data sheet here, an H200's as they are. The profile's name says so.

Attention's rates belong to a kernel, so a profile has a table for each kernel that was measured.
The seconds of launches belong to a host: a faster processor launches a layer sooner. So a profile
has them by the name of the processor, and predictions say which kernel and which host they are for.

Left out: congestion by others, temperatures, GPUs of one machine that differ.

Legend: mesh (GPUs in a node, nodes) of a group of ranks, "8x4" in a file.
"""

import json
import math
import platform
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from attention import KERNELS

PROFILES = Path(__file__).parent / "results" / "profiles"

# ---------------------------------------------------------------------------- profiles

PRODUCTS = ("forward", "input_grad", "weight_grad", "weight_grad_sum")  # the last: in float32
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
PASSES = ("forward", "backward")
OVERLAPS = ("collectives", "all_to_all")
Points = list[list[float]]  # [where ..., rate], sorted


@dataclass(frozen=True)
class Profile:
    """What one GPU of a machine does in a second, and what the machine has. Rates are those that
    hold while all GPUs work, for seconds."""

    name: str
    device: str  # PyTorch's name of the GPU
    per_node: int  # GPUs of a node
    gpu_bytes: float  # memory of a GPU
    host_bytes: float  # memory of a node
    peak_flops: float | None  # dense bf16 of the data sheet; None: unknown, so no MFU
    products: dict[str, Points]  # PRODUCTS: [tokens, width, FLOP/s]
    # kernel of attention.KERNELS: forward, backward: [tokens of a sequence, FLOP/s], causal
    attention: dict[str, dict[str, Points]]
    memory: float  # bytes/s read and written between products, launches of kernels included
    optimizer: float  # bytes/s of the update
    to_host: float  # bytes/s, while all GPUs of a node copy
    state_streaming: (
        float  # bytes/s each way of optimizer states that lie on the host and are updated
    )
    # processor of the host: forward, backward: seconds that it takes to launch a layer
    launch: dict[str, dict[str, float]]
    collectives: dict[str, dict[str, Points]]  # operation: mesh "8x4": [bytes, bytes/s]
    overlap: dict[str, list[float]]  # collectives (beside a layer), all_to_all (beside attention):
    # factors on the seconds of compute, and of communication, while both run
    sources: dict[str, str] = field(default_factory=dict)  # where numbers come from, by field
    about: dict = field(default_factory=dict)  # hardware, versions, commit, command


def profile_text(profile: Profile) -> str:
    """Return a profile's file: JSON, a point a line, four digits a number."""
    exact = json.dumps(asdict(profile))
    rounded = json.loads(exact, parse_float=lambda number: float(f"{float(number):.4g}"))
    text = json.dumps(rounded, indent=1)
    point = r"\[\s+([-\d.e+]+(?:,\s+[-\d.e+]+)*)\s+\]"
    return re.sub(point, lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text) + "\n"


def interpolate(points: Points, at: float) -> float:
    """Return the rate at a size: linear in the logarithm of the size between points [size, rate],
    held at the ends."""
    sizes, rates = zip(*points)
    return float(np.interp(math.log(at), np.log(sizes), rates))


def interpolate_twice(points: Points, tokens: float, width: float) -> float:
    """Return the rate at [tokens, width] of points [tokens, width, rate] on a grid: first along
    tokens, then along width."""
    along = [
        [w, interpolate([[at, rate] for at, other, rate in points if other == w], tokens)]
        for w in sorted({w for _, w, _ in points})
    ]
    return interpolate(along, width)


def nearest_kernel(profile: Profile, kernel: str = "auto") -> str:
    """Return the kernel whose rates predict the seconds of an attention kernel: the kernel itself if
    the profile has its rates, else the nearest one in the order of KERNELS. auto: the best kernel
    that the profile has. That is what train.py runs on this machine, if all kernels are installed.

    Example: a profile has fa4 and cudnn. Rates of flash, which comes after both, are cudnn's.
    """
    order = [*KERNELS]
    if kernel == "auto":
        return min(profile.attention, key=order.index)
    wanted = order.index(kernel)
    return min(profile.attention, key=lambda name: abs(order.index(name) - wanted))


def nearest_host(profile: Profile, processor: str = "") -> str:
    """Return the host whose launches predict those of a processor: the processor itself if the
    profile has it, else the profile's first host."""
    return processor if processor in profile.launch else next(iter(profile.launch))


def processor_name() -> str:
    """Return the name of this machine's processor, as Linux says it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: *(\S.*?) *$", text, re.MULTILINE)
    return found[1] if found else platform.machine() or "a host without a name"


def times(rates, factor):
    """Return nested rates, the last numbers of points, times a factor."""
    if isinstance(rates, dict):
        return {key: times(value, factor) for key, value in rates.items()}
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
    """Return a profile whose rates are so many times those of another one."""
    factors = {
        "products": flops,
        "attention": flops,
        "memory": memory,
        "optimizer": memory,
        "collectives": network,
        "to_host": host,
        "state_streaming": host,
    }
    rates = {key: times(getattr(profile, key), factor) for key, factor in factors.items()}
    return replace(profile, name=name, **rates, **changes)


# ---------------------------------------------------------------------------- which profile


# data sheets, which scale another GPU's profile where one has none of its own, by PyTorch's device
# name, first match: dense bf16 FLOP/s; bytes/s of memory, of NVLink and of PCIe one way; GiB of
# memory, as PyTorch finds it
SHEETS = {
    r"A100.*40GB": (312e12, 1.555e12, 300e9, 32e9, 39.4),
    r"A800": (312e12, 2.039e12, 200e9, 32e9, 79.2),
    r"A100": (312e12, 2.039e12, 300e9, 32e9, 79.2),
    r"H100 PCIe": (756e12, 2.0e12, 64e9, 64e9, 79.2),
    r"H100 NVL": (835e12, 3.9e12, 300e9, 64e9, 93.1),
    r"H200 NVL": (835e12, 4.8e12, 450e9, 64e9, 139.8),
    r"H800": (989.4e12, 3.35e12, 200e9, 64e9, 79.2),
    r"H100": (989.4e12, 3.35e12, 450e9, 64e9, 79.2),
    r"H200": (989.4e12, 4.8e12, 450e9, 64e9, 139.8),
    r"B200": (2250e12, 7.7e12, 900e9, 64e9, 178.4),
}
BASE = "NVIDIA H200"  # whose profile others' are scaled from


def find_sheet(device_name: str) -> tuple[float, ...] | None:
    """Return a device's row of SHEETS, None if it has none."""
    for name, sheet in SHEETS.items():
        if re.search(rf"\b({name})\b", device_name, re.IGNORECASE):
            return sheet
    return None


def peak_flops(device_name: str) -> float | None:
    """Return dense bf16 FLOP/s of a device, None if it is not in SHEETS: no MFU, then."""
    sheet = find_sheet(device_name)
    return sheet[0] if sheet else None


def profile_files() -> dict[str, Path]:
    """Return the files of results/profiles, by their names in small letters."""
    return {path.stem.lower(): path for path in sorted(PROFILES.glob("*.json"))}


def load_profile(name: str, per_node: int | None = None) -> Profile:
    """Return a profile by its name in results/profiles, in any case, by its file, or by a GPU's
    name; of nodes of so many GPUs, by default its own or 8. Raises ValueError."""
    path = profile_files().get(name.lower(), Path(name))
    if path.suffix != ".json" and find_sheet(name):
        return find_profile(name, per_node or 8)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        profile = Profile(**json.loads(path.read_text()))
        check_profile(profile)
    except Exception as e:  # whatever such a file may hold
        raise ValueError(
            f"--cluster {name}: {path} is no profile as bench.py --profile writes it: "
            f"{e.args[-1]}; or one of {', '.join(profile_files())}; or a GPU by its name, "
            f"{', '.join(SHEETS).replace('.*', ' ')}: another one as the nearest of these, with "
            "--gpu-memory"
        ) from e
    return with_node(profile, per_node) if per_node else profile


def check_profile(profile: Profile) -> None:
    """Raise ValueError or KeyError unless all numbers are there, positive, at ascending points."""
    numbers = "per_node gpu_bytes host_bytes memory optimizer to_host state_streaming".split()
    tables = [(name, 1, [[getattr(profile, name)]]) for name in numbers]
    if not profile.launch or not profile.attention:
        raise ValueError("launch and attention: at least one host, and at least one kernel")
    for host, seconds in profile.launch.items():
        if not isinstance(seconds, dict):
            raise ValueError(
                f"launch {host} {seconds}: the seconds of a host, forward and backward"
            )
        tables += [(f"launch {host} {kind}", 1, [[seconds[kind]]]) for kind in PASSES]
    tables += [(f"products {kind}", 3, profile.products[kind]) for kind in PRODUCTS]
    for kernel, rates in profile.attention.items():
        if kernel not in KERNELS:
            raise ValueError(f"attention {kernel}: the kernels are {', '.join(KERNELS)}")
        tables += [(f"attention {kernel} {kind}", 2, rates[kind]) for kind in PASSES]
    tables += [(f"overlap {kind}", 2, [profile.overlap[kind]]) for kind in OVERLAPS]
    for op in COLLECTIVES:
        tables += [(f"{op} {mesh}", 2, points) for mesh, points in profile.collectives[op].items()]
    for name, size, points in tables:
        positive = {
            tuple(type(x) in (int, float) and 0 < x < math.inf for x in point) for point in points
        }
        if positive != {size * (True,)}:
            raise ValueError(f"{name} {points}: {size} positive numbers a point")
        if points != sorted(points):
            raise ValueError(f"{name} {points}: ascending points")


def find_profile(device_name: str, per_node: int) -> Profile:
    """Return the nearest profile: of the GPUs with the same name or data sheet the one of the
    smallest node of so many, else of the largest node; without any, an H200's by data sheets."""
    kind = find_sheet(device_name) or device_name
    own = [
        p for p in map(load_profile, profile_files()) if (find_sheet(p.device) or p.device) == kind
    ]
    if not own:
        return by_data_sheet(device_name, per_node)
    nearest = min(own, key=lambda p: (p.per_node < per_node, abs(p.per_node - per_node)))
    return with_node(nearest, per_node)


def by_data_sheet(device_name, per_node):
    """Return an H200's profile by the ratios of the data sheets; as it is, if the device has
    none."""
    base = find_profile(BASE, per_node)
    new, old = find_sheet(device_name), find_sheet(BASE)
    how = "by its data sheet" if new else "as an H200, since it has no data sheet here"
    new = new or old
    *ratios, _ = np.divide(new, old).tolist()
    return scaled(
        base,
        f"{device_name} {how}",
        *ratios,
        device=device_name,
        peak_flops=peak_flops(device_name),
        gpu_bytes=new[-1] * 2**30,
        sources={"all": f"{base.name}'s, by the ratios of the data sheets"},
    )


def with_node(profile, per_node):
    """Return a profile of one GPU with what GPUs of a node share, the network and the host, of an
    H200's by the ratios of the data sheets; any other as it is."""
    if any(profile.collectives.values()):
        return profile
    shared = by_data_sheet(profile.device, max(2, per_node))
    names = ["collectives", "overlap"]
    if per_node > 1:
        names += ["per_node", "to_host", "state_streaming", "host_bytes"]
    own = profile.sources.get("all", "see its file")
    what = f"{own}; {', '.join(names)} {shared.sources['all']}"
    return replace(
        profile,
        **{name: getattr(shared, name) for name in names},
        sources=profile.sources | dict.fromkeys(names, shared.sources["all"]) | {"all": what},
    )
