"""What does a machine do in a second? Profiles: rates by operation, shape, bytes and mesh.

A Profile is a file, results/profiles/NAME.json: measured by bench.py --profile NAME, or put
together from what others have published, each number with its source. costs.py turns it into the
seconds of a step; nothing in it is fitted to whole steps. Between the points of a profile rates are
interpolated, at its ends they are held (AMSP, section IV: no alpha-beta model follows NCCL's choice
of algorithms).

    t(operation, size, mesh) = size / rate(operation, size, mesh)

A GPU without a profile has an H200's rates times the ratios of their data sheets (SHEETS); one that
has no data sheet here is measured when a run starts, at a few points.

Left out: congestion by others, temperatures, GPUs of one machine that differ.

Legend: mesh (GPUs in a node, nodes) of a group of ranks, "8x4" in a file.
"""
import bisect
import contextlib
import dataclasses
import gc
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import model as llama
from attention import Attention, CommStream, Exchange, gpus_reach_each_other
from model import ModelConfig, accumulation_dtype, rope_tables, weight_grad_into
from ranks import Groups, all_gather, of_all_ranks, reduce_scatter
from shard import ADAMW, States, adamw

PROFILES = Path(__file__).parent / "results" / "profiles"

# ---------------------------------------------------------------------------- profiles

PRODUCTS = ("forward", "input_grad", "weight_grad", "weight_grad_sum")  # the last: in float32
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
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
    attention: dict[str, Points]  # forward, backward: [tokens of a sequence, FLOP/s], causal
    memory: float  # bytes/s read and written between products, launches of kernels included
    optimizer: float  # bytes/s of the update
    to_host: float  # bytes/s, while all GPUs of a node copy
    visits: float  # bytes/s each way of optimizer states that lie on the host and are updated
    launch: dict[str, float]  # forward, backward: seconds of the host for a layer
    collectives: dict[str, dict[str, Points]]  # operation: mesh "8x4": [bytes, bytes/s]
    overlap: dict[str, list[float]]  # collectives (beside a layer), all_to_all (beside attention):
    # factors on the seconds of compute, and of communication, while both run
    sources: dict[str, str] = field(default_factory=dict)  # where numbers come from, by field
    about: dict = field(default_factory=dict)  # hardware, versions, commit, command


def rounded(value, digits: int):
    """Return a nested value whose floats have so many digits: those that a file needs."""
    if isinstance(value, dict):
        return {key: rounded(x, digits) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x, digits) for x in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def profile_text(profile: Profile) -> str:
    """Return a profile's file: JSON, a point a line."""
    text = json.dumps(rounded(dataclasses.asdict(profile), 4), indent=1)
    return re.sub(r"\[\s+([-\d.e+]+(?:,\s+[-\d.e+]+)*)\s+\]",
                  lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text) + "\n"


def interpolate(points: Points, at: float) -> float:
    """Return the rate at a size: linear in the logarithm of the size between points [size, rate],
    held at the ends."""
    i = bisect.bisect_left(points, at, key=lambda point: point[0])
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][-1]
    (low, slow), (high, fast) = points[i - 1], points[i]
    return slow + (fast - slow) * math.log(at / low) / math.log(high / low)


def interpolate_twice(points: Points, tokens: float, width: float) -> float:
    """Return the rate at [tokens, width] of points [tokens, width, rate] on a grid: first along
    tokens, then along width."""
    by_width: dict[float, Points] = {}
    for point_tokens, point_width, rate in points:
        by_width.setdefault(point_width, []).append([point_tokens, rate])
    along = [[w, interpolate(of_width, tokens)] for w, of_width in sorted(by_width.items())]
    return interpolate(along, width)


def update_bytes(dtype: torch.dtype) -> int:
    """Return the bytes that AdamW reads and writes a parameter: a gradient, master and moments; a
    weight, master and moments."""
    return 2 * (dtype.itemsize + len(ADAMW.states) * accumulation_dtype(dtype).itemsize)


# ---------------------------------------------------------------------------- which profile


@dataclass(frozen=True)
class Sheet:
    """A GPU's data sheet: what scales another one's profile where it has none of its own."""

    flops: float  # dense bf16
    memory: float  # bytes/s
    nvlink: float  # bytes/s one way
    pcie: float  # bytes/s one way
    gib: float  # of memory, as PyTorch finds it


SHEETS = {  # by PyTorch's device name, first match
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


BASE = "NVIDIA H200"  # whose profile others' are scaled from


def find_sheet(device_name: str) -> Sheet | None:
    return next((sheet for name, sheet in SHEETS.items()
                 if re.search(rf"\b({name})\b", device_name, re.IGNORECASE)), None)


def peak_flops(device_name: str) -> float | None:
    """Return dense bf16 FLOP/s of a device, None if it is not in SHEETS: no MFU, then."""
    sheet = find_sheet(device_name)
    return sheet.flops if sheet else None


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name: str, per_node: int | None = None) -> Profile:
    """Return a profile by its name in results/profiles, in any case, by its file, or by a GPU's
    name; of nodes of so many GPUs, by default its own or 8. Raises ValueError."""
    if not name.endswith(".json") and name not in profile_names():
        if name.lower() in profile_names():
            name = name.lower()
        elif find_sheet(name):
            return known_profile(name, per_node or 8)
    path = Path(name) if name.endswith(".json") else PROFILES / f"{name}.json"
    try:
        profile = Profile(**json.loads(path.read_text()))
    except OSError as e:
        raise ValueError(f"--cluster {name}: {path}: {e.strerror}; a file as bench.py --profile "
                         f"writes it, a GPU (A100, H100, ...), or one of "
                         f"{', '.join(profile_names())}") from e
    except (ValueError, TypeError) as e:
        raise ValueError(f"--cluster {name}: {path} is no profile: {e}") from e
    check_profile(profile, name)
    return with_node(profile, per_node) if per_node else profile


def scaled(profile: Profile, name: str, flops: float = 1.0, memory: float = 1.0,
           network: float = 1.0, host: float = 1.0, **changes) -> Profile:
    """Return a profile whose rates are so many times those of another one."""
    def times(rates, factor: float):
        if isinstance(rates, dict):
            return {key: times(points, factor) for key, points in rates.items()}
        return [[*at, rate * factor] for *at, rate in rates]

    return dataclasses.replace(
        profile, name=name, products=times(profile.products, flops),
        attention=times(profile.attention, flops), collectives=times(profile.collectives, network),
        memory=profile.memory * memory, optimizer=profile.optimizer * memory,
        to_host=profile.to_host * host, visits=profile.visits * host, **changes)


def known_profile(device_name: str, per_node: int) -> Profile | None:
    """Return the profile of a device with the same data sheet, or the same name: of the smallest
    node of so many GPUs, else of the largest; an H200's by the ratio of their data sheets, if there
    is none; None if it has neither."""
    profiles = [load_profile(name) for name in profile_names()]
    sheet = find_sheet(device_name)
    own = [p for p in profiles
           if p.device == device_name or (sheet and find_sheet(p.device) is sheet)]
    if own:
        nearest = min(own, key=lambda p: (p.per_node < per_node, abs(p.per_node - per_node)))
        return with_node(nearest, per_node)
    if sheet is None:
        return None
    base = known_profile(BASE, per_node)
    of_base = find_sheet(BASE)
    ratio = sheet.flops / of_base.flops
    return scaled(base, f"{device_name} by its data sheet", ratio, sheet.memory / of_base.memory,
                  sheet.nvlink / of_base.nvlink, sheet.pcie / of_base.pcie, device=device_name,
                  peak_flops=sheet.flops, gpu_bytes=sheet.gib * 2**30,
                  sources={"all": f"{base.name}'s, by the ratios of the data sheets"})


def with_node(profile: Profile, per_node: int) -> Profile:
    """Return the profile of a machine that has one GPU with what GPUs of an H200's node share, the
    network and the host, by the ratio of their data sheets."""
    sheet = find_sheet(profile.device)
    if any(profile.collectives.values()) or sheet is None or profile.device == BASE:
        return profile
    base = known_profile(BASE, max(2, per_node))
    of_base = find_sheet(BASE)
    shared = scaled(base, base.name, network=sheet.nvlink / of_base.nvlink,
                    host=sheet.pcie / of_base.pcie)
    names = ["collectives", "overlap"]
    if per_node > 1:
        names += ["per_node", "to_host", "visits", "host_bytes"]
    by_sheets = f"{base.name}'s, by the ratio of the data sheets"
    return dataclasses.replace(
        profile, **{name: getattr(shared, name) for name in names},
        sources=profile.sources | dict.fromkeys(names, by_sheets))


def find_profile(device_name: str, device: torch.device, dtype: torch.dtype, kernel: str,
                 per_node: int, say: Callable = print) -> Profile:
    """Return a device's profile by its name; as measured here, if any rank has none. A
    collective."""
    profile = known_profile(device_name, per_node)
    unknown = torch.tensor(float(profile is None), device=device)
    dist.all_reduce(unknown, dist.ReduceOp.MAX)
    if unknown.item():
        effort = AT_START if device.type == "cuda" else ON_CPU
        profile = measure_profile(device_name, device, dtype, kernel, per_node, effort)
        say(f"{device_name}: no profile and no data sheet of it here; measured: matrix products "
            f"{profile.products['forward'][0][-1] / 1e12:.3g} TFLOP/s, attention "
            f"{profile.attention['forward'][0][-1] / 1e12:.3g}, memory {profile.memory / 1e9:.0f} "
            f"GB/s, to the host {profile.to_host / 1e9:.0f}; no MFU, whose peak comes from data "
            "sheets alone")
    return profile


def check_profile(profile: Profile, name: str) -> None:
    """Raise ValueError unless all rates are there and positive, at ascending points."""
    of_kinds = {"products": profile.products, "attention": profile.attention} | profile.collectives
    tables = {f"{name} {kind}": points for name, kinds in of_kinds.items()
              for kind, points in kinds.items()}
    tables |= {key: [[1, getattr(profile, key)]] for key in
               ("memory", "optimizer", "to_host", "visits", "gpu_bytes", "host_bytes")}
    for table, points in tables.items():
        numbers = [x for point in points for x in point]
        good = numbers and all(isinstance(x, int | float) and 0 < x < math.inf for x in numbers)
        if not good or points != sorted(points):
            raise ValueError(f"--cluster {name}: {table}: {points}: positive numbers at ascending "
                             "points")
    missing = [op for op in COLLECTIVES if not profile.collectives.get(op) and profile.per_node > 1]
    missing += [kind for kind in PRODUCTS if kind not in profile.products]
    wanted = {"attention": ("forward", "backward"), "launch": ("forward", "backward"),
              "overlap": ("collectives", "all_to_all")}
    missing += [f"{name}: {kind}" for name, kinds in wanted.items() for kind in kinds
                if kind not in getattr(profile, name)]
    if missing:
        raise ValueError(f"--cluster {name}: lacks {', '.join(missing)}")


# ---------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Effort:
    """At which points a profile is measured, and for how long at each."""

    seconds: float  # of work at a point: a GPU's clock rate falls under load
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    seqs: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes of collectives
    heads: int = 8
    layers: int = 1  # whose optimizer states visit the device
    copied: int = 2**28  # bytes to the host and of element-wise kernels

    @property
    def width(self) -> int:
        """Return that of whole layers."""
        return self.widths[len(self.widths) // 2]


FULL = Effort(0.4, (2048, 4096, 16384), (2048, 4096, 8192),
              (1024, 4096, 16384, 65536, 262144), (2**20, 2**23, 2**26, 2**29),
              layers=4)
AT_START = Effort(0.05, (4096,), (4096,), (8192,), (2**23, 2**27))
ON_CPU = Effort(0.02, (256,), (256,), (256,), (2**16, 2**20), 2, copied=2**22)


class Stopwatch:
    """Times work that all ranks do at once; the slowest rank's. All methods are collectives."""

    def __init__(self, device: torch.device, seconds: float):
        self.device = device
        self.seconds = seconds

    def once(self, fn: Callable, calls: int = 1) -> float:
        dist.barrier()  # all ranks copy and send at the same time
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(of_all_ranks(time.perf_counter() - start))

    def __call__(self, fn: Callable) -> float:
        """Return the seconds of a call among many, back to back, after as many that warm up."""
        self.once(fn)
        calls = max(2, min(2000, math.ceil(self.seconds / self.once(fn))))
        self.once(fn, calls)
        return self.once(fn, calls) / calls


def measure_profile(name: str, device: torch.device, dtype: torch.dtype, kernel: str,
                    per_node: int, effort: Effort = FULL, about: dict | None = None) -> Profile:
    """Measure what this machine does, all ranks at once. A collective."""
    clock = Stopwatch(device, effort.seconds)
    host_bytes = float(Path("/proc/meminfo").read_text().split()[1]) * 1024
    device_name, gpu_bytes = "CPU", host_bytes
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
        gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    products = measure_products(clock, dtype, effort)
    attention = measure_attention(clock, dtype, kernel, effort)
    layer = Layer(clock, dtype, kernel, effort)
    return Profile(
        name, device_name, per_node, gpu_bytes, host_bytes, peak_flops(device_name),
        products, attention, layer.memory_rate(products, attention),
        measure_optimizer(clock, dtype, effort), measure_copies(clock, effort.copied),
        measure_visits(clock, dtype, kernel, effort),
        measure_launches(clock, dtype, kernel),
        measure_collectives(clock, dtype, per_node, effort.sizes),
        measure_overlap(clock, dtype, effort, layer), {"all": "measured"}, about or {})


def random_tensor(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)  # zeros are multiplied faster


def measure_products(clock: Stopwatch, dtype: torch.dtype, effort: Effort) -> dict[str, Points]:
    """Return FLOP/s of y = x W^T, dx = dy W, dW = dy^T x and, in float32, dW += dy^T x; W (width,
    width)."""
    found: dict[str, Points] = {kind: [] for kind in PRODUCTS}
    for tokens in effort.tokens:
        for width in effort.widths:
            x = random_tensor(tokens, width, device=clock.device, dtype=dtype)
            w = random_tensor(width, width, device=clock.device, dtype=dtype)
            dw = torch.zeros_like(w)
            total = torch.zeros(width, width, device=clock.device,
                                dtype=accumulation_dtype(dtype))
            work = {"forward": lambda: x @ w.t(), "input_grad": lambda: x @ w,
                    "weight_grad": lambda: weight_grad_into(x, x, dw, 0),
                    "weight_grad_sum": lambda: weight_grad_into(x, x, total, 1)}
            for kind, fn in work.items():
                found[kind].append([tokens, width, 2 * tokens * width**2 / clock(fn)])
    return found


def measure_attention(clock: Stopwatch, dtype: torch.dtype, kernel: str,
                      effort: Effort) -> dict[str, Points]:
    """Return FLOP/s of causal attention, half of the (T, T) matrix counted."""
    found: dict[str, Points] = {"forward": [], "backward": []}
    op = Attention(kernel)
    for seq in effort.seqs:
        heads = effort.heads
        batch = max(1, effort.tokens[-1] * 4 // seq)  # much longer than its launch
        q, k, v, do = (random_tensor(batch, seq, heads, 128, device=clock.device, dtype=dtype)
                       for _ in range(4))
        o, lse = op.forward(q, k, v)
        pairs = 2 * batch * heads * 128 * seq**2
        found["forward"].append([seq, pairs / clock(lambda: op.forward(q, k, v))])
        found["backward"].append(
            [seq, 2.5 * pairs / clock(lambda: op.backward(lambda: (do, []), q, k, v, o, lse))])
    return found


def sample_layers(layers: int, width: int, tokens: int, device: torch.device, dtype: torch.dtype,
                  kernel: str) -> tuple[llama.LLaMA, Callable, torch.Tensor]:
    """Return a model of layers alike, the function that runs one, and their input (1, T, C)."""
    cfg = ModelConfig(vocab=256, dim=width, layers=layers, heads=width // 128,
                      kv_heads=width // 128, ffn=width * 43 // 16)
    with torch.device(device):
        model = llama.LLaMA(cfg, Attention(kernel)).to(dtype)
    model.init_weights(0)
    rope = rope_tables(cfg, torch.arange(tokens, device=device), torch.float32)
    x = random_tensor(1, tokens, width, device=device, dtype=dtype).requires_grad_()
    return model, llama.whole_layers(model, rope, model.attention), x


class Layer:
    """A layer whose forward and backward are timed whole: what its products and attention leave is
    of the kernels between them, and of launching all of them."""

    def __init__(self, clock: Stopwatch, dtype: torch.dtype, kernel: str, effort: Effort):
        self.clock = clock
        self.tokens = effort.tokens[len(effort.tokens) // 2]
        self.dtype = dtype
        self.model, self.run_layer, self.x = sample_layers(
            2, effort.width, self.tokens, clock.device, dtype, kernel)
        self.cfg = self.model.cfg

    def __call__(self) -> None:
        y = self.run_layer(1, self.run_layer(0, self.x))
        y.backward(self.x.detach())
        self.model.zero_grad()

    def memory_rate(self, products: dict[str, Points], attention: dict[str, Points]) -> float:
        """Return bytes/s between products: those that costs.layer_seconds counts."""
        n = self.tokens
        cfg = self.cfg
        c, f = cfg.dim, cfg.ffn
        left = self.clock(self) / cfg.layers
        for rows, cols in ((3 * c, c), (c, c), (2 * f, c), (c, f)):
            for kind in ("forward", "input_grad", "weight_grad"):
                rate = interpolate_twice(products[kind], n, math.sqrt(rows * cols))
                left -= 2 * n * rows * cols / rate
        left -= 2 * c * n**2 / interpolate(attention["forward"], n)
        left -= 5 * c * n**2 / interpolate(attention["backward"], n)
        size = n * self.dtype.itemsize * (19 * c + 4 * 3 * c + 9 * f)
        copied = copy_rate(self.clock, size)
        return size / left if left > size / copied else copied


def copy_rate(clock: Stopwatch, size: int) -> float:
    """Return bytes/s, read and written, of a copy within the device."""
    here = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    there = torch.zeros_like(here)
    return 2 * size / clock(lambda: there.copy_(here))


def measure_optimizer(clock: Stopwatch, dtype: torch.dtype, effort: Effort) -> float:
    """Return bytes/s of the update: a master and two moments read and written, a gradient read, a
    weight written."""
    count = effort.copied // 4
    accum_dtype = accumulation_dtype(dtype)
    weight, grad = (torch.zeros(count, device=clock.device, dtype=dtype) for _ in range(2))
    states = tuple(torch.zeros(count, device=clock.device, dtype=accum_dtype)
                   for _ in ADAMW.states)
    scalars = torch.ones(5, device=clock.device, dtype=accum_dtype)
    seconds = clock(lambda: adamw(weight, grad, states, scalars, 0.1))
    return update_bytes(dtype) * count / seconds


def measure_copies(clock: Stopwatch, size: int) -> float:
    """Return bytes/s to the host, of page-locked memory."""
    here = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=clock.device.type == "cuda")
    return size / clock(lambda: there.copy_(here, non_blocking=True))


def measure_visits(clock: Stopwatch, dtype: torch.dtype, kernel: str, effort: Effort) -> float:
    """Return bytes/s each way of optimizer states that lie on the host: of updates of layers, back
    to back."""
    model, _, _ = sample_layers(effort.layers, effort.width, 128, clock.device, dtype, kernel)
    states = States(model, clock.device, dtype, place="host")
    rate = states.bytes()["optimizer"] / clock(lambda: states.update(0.0, 0.0))
    del model, states
    gc.collect()  # they refer to each other, and a run that has measured wants the memory
    return rate


def measure_launches(clock: Stopwatch, dtype: torch.dtype, kernel: str) -> dict[str, float]:
    """Return seconds of the host for a layer's forward and backward: of whole micro-batches, with
    what shard.States does in them, of a model so small that the device waits for the host. The
    mean, since a step takes what its host takes on average. On a CPU they are part of the
    operators'. A collective."""
    if clock.device.type == "cpu":
        return {"forward": 0.0, "backward": 0.0}
    layers, tokens, micro_batches = 24, 128, 4
    model, _, _ = sample_layers(layers, 256, tokens, clock.device, dtype, kernel)
    states = States(model, clock.device, dtype, micro_batches=micro_batches)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=clock.device)
    positions = torch.arange(tokens, device=clock.device)
    scale = torch.ones((), device=clock.device)
    seconds = {"forward": 0.0, "backward": 0.0}
    steps = 8
    for step in range(-2, steps):  # the first two warm up
        states.begin_step()
        torch.cuda.synchronize(clock.device)
        for _ in range(micro_batches):
            start = time.perf_counter()
            loss = model(ids, ids, scale, positions)
            middle = time.perf_counter()
            loss.backward()
            if step >= 0:
                seconds["forward"] += middle - start
                seconds["backward"] += time.perf_counter() - middle
    return {kind: total / (steps * micro_batches * layers) for kind, total in seconds.items()}


def meshes_of(ranks: int, per_node: int) -> list[tuple[int, int]]:
    """Return the meshes (GPUs in a node, nodes) at which collectives are measured: powers of 2, and
    all."""
    def counts(most: int) -> list[int]:
        return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})

    return [(g, n) for n in counts(ranks // per_node) for g in counts(per_node) if g * n > 1]


def mesh_name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


def measure_collectives(clock: Stopwatch, dtype: torch.dtype, per_node: int,
                        sizes: tuple[int, ...]) -> dict[str, dict[str, Points]]:
    """Return bytes/s by operation and mesh, all groups of a mesh at once. Bytes: of the whole
    tensor, gathered or to be scattered; of an all-to-all, of a rank's own."""
    found: dict[str, dict[str, Points]] = {op: {} for op in COLLECTIVES}
    groups = Groups()
    ranks = dist.get_world_size()
    for g, n in meshes_of(ranks, per_node):
        def members(r):  # g neighbours in each of n nodes in a row
            return r % per_node // g, r // per_node // n

        if per_node % g or ranks // per_node % n:
            continue
        group = groups.get("profile", members)
        mesh = mesh_name((g, n))
        for size in sizes:
            for op, fn in operations(group, size, dtype, clock.device, one_node=n == 1).items():
                found[op].setdefault(mesh, []).append([size, size / clock(fn)])
    return found


def operations(group: dist.ProcessGroup, size: int, dtype: torch.dtype, device: torch.device,
               one_node: bool) -> dict[str, Callable]:
    """Return functions that run each collective on so many bytes."""
    ranks = dist.get_world_size(group)
    count = size // dtype.itemsize // ranks
    whole = torch.zeros(ranks * count, device=device, dtype=dtype)
    part = torch.zeros(count, device=device, dtype=dtype)
    peer_access = device.type == "cuda" and one_node and gpus_reach_each_other()
    exchange = Exchange(group, peer_access)
    parts = whole.view(ranks, count)
    received = exchange.allocate_buffers([(ranks, count)], parts)[0]
    first = dist.get_global_rank(group, 0)
    return {"all_gather": lambda: all_gather(whole, part, group=group),
            "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, first, group=group),
            "all_to_all": lambda: exchange.all_to_all([parts], [received])}


def measure_overlap(clock: Stopwatch, dtype: torch.dtype, effort: Effort,
                    layer: Layer) -> dict[str, list[float]]:
    """Return how much longer compute and communication take while both run: gathers and scatters of
    all ranks beside a layer, all-to-alls beside attention."""
    alone = {"collectives": [1.0, 1.0], "all_to_all": [1.0, 1.0]}
    if clock.device.type != "cuda" or dist.get_world_size() == 1:
        return alone
    group = Groups().get("profile", lambda r: 0)
    run = operations(group, effort.copied, dtype, clock.device, one_node=True)
    side = CommStream(clock.device)
    q = random_tensor(1, effort.tokens[-1], effort.heads, 128, device=clock.device, dtype=dtype)
    attention = layer.model.attention

    def collectives() -> None:
        run["all_gather"]()
        run["reduce_scatter"]()

    return {"collectives": slow_downs(clock, layer, collectives, side),
            "all_to_all": slow_downs(clock, lambda: attention.forward(q, q, q),
                                     run["all_to_all"], side)}


def slow_downs(clock: Stopwatch, compute: Callable, other: Callable,
               side: CommStream) -> list[float]:
    """Return the factors on the seconds of compute, and of the other on a stream of its own, while
    both run."""
    alone = clock(compute), clock(other)
    calls = [max(4, math.ceil(2 * clock.seconds / seconds)) for seconds in alone]
    factors = []
    for timed, beside in ((0, 1), (1, 0)):
        # twice as much of the other, so that it is there to the end
        more = math.ceil(3 * calls[timed] * alone[timed] / alone[beside])
        torch.cuda.synchronize(clock.device)
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for which, stream in ((1, side.after_compute()), (0, contextlib.nullcontext())):
            with stream:
                if which == timed:
                    begin.record()
                for _ in range(calls[timed] if which == timed else more):
                    (compute, other)[which]()
                if which == timed:
                    end.record()
        torch.cuda.synchronize(clock.device)
        factor = torch.tensor(begin.elapsed_time(end) / 1e3 / calls[timed] / alone[timed],
                              device=clock.device)
        dist.all_reduce(factor, dist.ReduceOp.MAX)
        factors.append(max(1.0, factor.item()))
    return factors


