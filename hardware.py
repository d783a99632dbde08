"""What does a machine do in a second? Profiles: rates by operation, shape, bytes and mesh.

A Profile is a file, results/profiles/NAME.json: measured by bench.py --profile NAME, or put
together from what others have published, each number with its source. costs.py turns it into the
seconds of a step; nothing in it is fitted to whole steps, and `memory` alone to a whole layer.
Between the points of a profile rates are interpolated, at its ends they are held (AMSP, section IV:
no alpha-beta model follows NCCL's choice of algorithms).

    t(operation, size, mesh) = size / rate(operation, size, mesh)

A GPU without a profile has an H200's rates times the ratios of their data sheets (SHEETS); one that
has no data sheet here, an H200's as they are. The profile's name says so.

Left out: congestion by others, temperatures, GPUs of one machine that differ.

Legend: mesh (GPUs in a node, nodes) of a group of ranks, "8x4" in a file.
"""
import functools
import json
import math
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from attention import Attention, CommStream, Exchange, gpus_reach_each_other
from model import LLaMA, ModelConfig, accumulation_dtype, divisors, weight_grad_into
from offload import HOST_BYTES
from ranks import Groups, all_gather, of_all_ranks, reduce_scatter
from shard import ADAMW, States

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
        for w in sorted({w for _, w, _ in points})]
    return interpolate(along, width)


def update_bytes(dtype: torch.dtype) -> int:
    """Return the bytes that AdamW reads and writes a parameter: a gradient, master and moments; a
    weight, master and moments."""
    return 2 * (dtype.itemsize + len(ADAMW.states) * accumulation_dtype(dtype).itemsize)


def times(rates, factor):
    """Return nested rates, the last numbers of points, times a factor."""
    if isinstance(rates, dict):
        return {key: times(value, factor) for key, value in rates.items()}
    if isinstance(rates, list):
        return [[*at, rate * factor] for *at, rate in rates]
    return rates * factor


def scaled(profile: Profile, name: str,
           flops: float = 1.0, memory: float = 1.0,
           network: float = 1.0, host: float = 1.0,
           **changes) -> Profile:
    """Return a profile whose rates are so many times those of another one."""
    factors = {
        "products": flops, "attention": flops,
        "memory": memory, "optimizer": memory,
        "collectives": network,
        "to_host": host, "visits": host}
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
        return known_profile(name, per_node or 8)
    try:
        profile = Profile(**json.loads(path.read_text()))
        check_profile(profile)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(
            f"--cluster {name}: {path} is no profile as bench.py --profile writes it: "
            f"{e.args[-1]}; or one of {', '.join(profile_files())}; or a GPU by its name, "
            f"{', '.join(SHEETS).replace('.*', ' ')}: another one as the nearest of these, with "
            "--gpu-memory") from e
    return with_node(profile, per_node) if per_node else profile


def check_profile(profile: Profile) -> None:
    """Raise ValueError or KeyError unless all numbers are there, positive, at ascending points."""
    numbers = "per_node gpu_bytes host_bytes memory optimizer to_host visits".split()
    tables = [(name, 1, [[getattr(profile, name)]]) for name in numbers]
    tables += [(f"launch {kind}", 1, [[profile.launch[kind]]]) for kind in PASSES]
    tables += [(f"products {kind}", 3, profile.products[kind]) for kind in PRODUCTS]
    tables += [(f"attention {kind}", 2, profile.attention[kind]) for kind in PASSES]
    tables += [(f"overlap {kind}", 2, [profile.overlap[kind]]) for kind in OVERLAPS]
    for op in COLLECTIVES:
        tables += [(f"{op} {mesh}", 2, points) for mesh, points in profile.collectives[op].items()]
    for name, size, points in tables:
        positive = {tuple(type(x) in (int, float) and 0 < x < math.inf for x in point)
                    for point in points}
        if positive != {size * (True,)}:
            raise ValueError(f"{name} {points}: {size} positive numbers a point")
        if points != sorted(points):
            raise ValueError(f"{name} {points}: ascending points")


def known_profile(device_name: str, per_node: int) -> Profile:
    """Return the nearest profile: of the GPUs with the same name or data sheet the one of the
    smallest node of so many, else of the largest node; without any, an H200's by data sheets."""
    kind = find_sheet(device_name) or device_name
    own = [
        p for p in map(load_profile, profile_files())
        if (find_sheet(p.device) or p.device) == kind]
    if not own:
        return by_data_sheet(device_name, per_node)
    nearest = min(
        own, key=lambda p: (p.per_node < per_node, abs(p.per_node - per_node)))
    return with_node(nearest, per_node)


def by_data_sheet(device_name, per_node):
    """Return an H200's profile by the ratios of the data sheets; as it is, if the device has
    none."""
    base = known_profile(BASE, per_node)
    new, old = find_sheet(device_name), find_sheet(BASE)
    how = "by its data sheet" if new else "as an H200, since it has no data sheet here"
    new = new or old
    *ratios, _ = np.divide(new, old).tolist()
    return scaled(
        base, f"{device_name} {how}", *ratios,
        device=device_name,
        peak_flops=peak_flops(device_name),
        gpu_bytes=new[-1] * 2**30,
        sources={"all": f"{base.name}'s, by the ratios of the data sheets"})


def with_node(profile, per_node):
    """Return a profile of one GPU with what GPUs of a node share, the network and the host, of an
    H200's by the ratios of the data sheets; any other as it is."""
    if any(profile.collectives.values()):
        return profile
    shared = by_data_sheet(profile.device, max(2, per_node))
    names = ["collectives", "overlap"]
    if per_node > 1:
        names += ["per_node", "to_host", "visits", "host_bytes"]
    own = profile.sources.get("all", "see its file")
    what = f"{own}; {', '.join(names)} {shared.sources['all']}"
    return replace(
        profile,
        **{name: getattr(shared, name) for name in names},
        sources=profile.sources | dict.fromkeys(names, shared.sources["all"]) | {"all": what})


# ---------------------------------------------------------------------------- measuring


class Machine:
    """This machine at work: all ranks do the same at once, and the slowest rank's seconds count.
    All methods are collectives."""

    seconds = 0.4  # of work at a point: a GPU's clock rate falls under load
    tokens = (2048, 4096, 16384)
    widths = (2048, 4096, 8192)
    seqs = (1024, 4096, 16384, 65536, 262144)
    sizes = (2**20, 2**23, 2**26, 2**29)  # bytes that are sent, or (the last) copied to the host
    middle = 4096  # tokens and width of whole layers

    def __init__(self, device: torch.device, dtype: torch.dtype, kernel: str, per_node: int):
        self.device = device
        self.dtype = dtype
        self.per_node = per_node
        self.attention = Attention(kernel)
        # not zeros, which are multiplied faster
        self.random = functools.partial(torch.randn, device=device, dtype=dtype)
        self.gpu = device.type == "cuda"
        if not self.gpu:
            self.seconds = 0.02
            self.tokens = self.widths = self.seqs = (256,)
            self.sizes = (2**16, 2**20)
            self.middle = 256

    def profile(self, name: str, layer_seconds, about: dict) -> Profile:
        """Measure what this machine does. layer_seconds(profile, model, dtype, tokens): what
        costs.py counts for a layer, forward and backward."""
        device_name, gpu_bytes = "CPU", HOST_BYTES
        if self.gpu:
            properties = torch.cuda.get_device_properties(self.device)
            device_name, gpu_bytes = properties.name, properties.total_memory
        profile = Profile(
            name, device_name, self.per_node, gpu_bytes, HOST_BYTES,
            peak_flops(device_name),
            self.product_rates(),
            self.attention_rates(),
            math.inf,  # memory, below
            self.update_rate("gpu"),
            self.copy_rate(),
            self.update_rate("host"),
            self.launch_seconds(),
            self.collective_rates(),
            self.overlap_factors(),
            {"all": "measured"},
            about)
        return replace(profile, memory=self.memory_rate(profile, layer_seconds))

    def time(self, fn):
        """Return the seconds of a call among many, back to back, after as many that warm up."""
        calls = 1
        for turn in range(4):  # all ranks at the same time: of_all_ranks waits for them
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            if self.gpu:
                torch.cuda.synchronize()
            seconds = max(of_all_ranks(time.perf_counter() - start))
            if turn == 1:
                calls = math.ceil(self.seconds / seconds)
        return seconds / calls

    def product_rates(self):
        """Return FLOP/s of y = x W^T, dx = dy W, dW = dy^T x and, in float32, dW += dy^T x; W
        (width, width)."""
        found = {kind: [] for kind in PRODUCTS}
        for tokens in self.tokens:
            for width in self.widths:
                x = self.random(tokens, width)
                w = self.random(width, width)
                dw = torch.zeros_like(w)
                total = torch.zeros_like(w, dtype=accumulation_dtype(self.dtype))
                work = (
                    lambda: x @ w.t(),
                    lambda: x @ w,
                    lambda: weight_grad_into(x, x, dw, 0),
                    lambda: weight_grad_into(x, x, total, 1))
                for kind, fn in zip(PRODUCTS, work):
                    found[kind].append([tokens, width, 2 * tokens * width**2 / self.time(fn)])
        return found

    def attention_rates(self):
        """Return FLOP/s of causal attention, half of the (T, T) matrix counted."""
        forward, backward = [], []
        op = self.attention
        for seq in self.seqs:
            batch = max(1, self.tokens[-1] * 4 // seq)  # much longer than its launch
            q, k, v, do = (self.random(batch, seq, 8, 128) for _ in range(4))  # 8 heads
            o, lse = op.forward(q, k, v)
            flops = 2 * q.numel() * seq
            forward.append([seq, flops / self.time(lambda: op.forward(q, k, v))])
            seconds = self.time(lambda: op.backward(lambda: (do, []), q, k, v, o, lse))
            backward.append([seq, 2.5 * flops / seconds])
        return {"forward": forward, "backward": backward}

    def make_model(self, layers, width):
        heads = width // 128
        cfg = ModelConfig(256, width, layers, heads, heads, width * 43 // 16)
        model = LLaMA(cfg, self.attention).to(self.device, self.dtype)
        model.init_weights(0)
        return model

    def make_layers(self):
        """Return a model, and a function that runs its layers forward and backward."""
        size = self.middle
        model = self.make_model(2, size)
        positions = torch.arange(size, device=self.device)
        x = self.random(1, size, size).requires_grad_()

        def run():
            y = model.run_layers(range(2), model.layer_runner, x, positions)
            y.backward(x.detach())
            model.zero_grad()

        return model.cfg, run

    def memory_rate(self, profile, layer_seconds):
        """Return bytes/s between products: those at which layer_seconds counts what a layer takes
        here. In profile memory takes no time."""
        cfg, run = self.make_layers()
        layer = cfg, self.dtype, self.middle
        products = layer_seconds(profile, *layer)
        moved = layer_seconds(replace(profile, memory=1.0), *layer) - products  # bytes
        seconds = self.time(run) / cfg.layers
        return moved / max(seconds - products, seconds / 100)  # whatever the clock's noise

    def update_rate(self, place):
        """Return bytes/s of layers' update with optimizer states on the GPU: those of update_bytes;
        or on the host: those of states, each way."""
        model = self.make_model(4, self.middle)
        states = States(model, self.device, self.dtype, place=place)
        held = states.bytes()
        moved = {
            "gpu": held["parameters"] / self.dtype.itemsize * update_bytes(self.dtype),
            "host": held["optimizer"]}
        return moved[place] / self.time(lambda: states.update(0.0, 0.0))

    def copy_rate(self):
        """Return bytes/s to the host, of page-locked memory."""
        here = self.random(self.sizes[-1] // self.dtype.itemsize)
        there = torch.empty_like(here, device="cpu", pin_memory=self.gpu)
        return here.nbytes / self.time(lambda: there.copy_(here, non_blocking=True))

    def launch_seconds(self):
        """Return seconds of the host for a layer's forward and backward: of whole micro-batches,
        with what shard.States does in them, of a model so small that the device waits for the host.
        The mean, since a step takes what its host takes on average. On a CPU they are part of the
        operators'."""
        if not self.gpu:
            return dict.fromkeys(PASSES, 1e-9)
        model = self.make_model(24, 256)
        states = States(model, self.device, self.dtype, micro_batches=4)
        ids = torch.arange(128, device=self.device)[None]
        moments = []
        for micro_batch in range(40):
            if micro_batch % 4 == 0:
                states.begin_step()
                torch.cuda.synchronize()
            start = time.perf_counter()
            loss = model(ids, ids)
            middle = time.perf_counter()
            loss.backward()
            moments.append([start, middle, time.perf_counter()])
        seconds = np.diff(moments[8:])  # two steps warm up
        return dict(zip(PASSES, (seconds.mean(0) / 24).tolist()))

    def collective_rates(self):
        """Return bytes/s by operation and mesh, all groups of a mesh at once. Bytes: of the whole
        tensor, gathered or to be scattered; of an all-to-all, of a rank's own."""
        found = {op: {} for op in COLLECTIVES}
        groups = Groups()
        per_node = self.per_node
        nodes = groups.ranks // per_node
        for n in divisors(nodes):
            for g in divisors(per_node):  # g neighbours in each of n nodes in a row
                group = groups.get("profile", lambda r: (r % per_node // g, r // per_node // n))
                if not group:
                    continue
                for size in self.sizes:
                    for op, fn in self.collectives(group, size).items():
                        found[op].setdefault(f"{g}x{n}", []).append([size, size / self.time(fn)])
        return found

    def collectives(self, group, size):
        """Return functions that run each collective on so many bytes."""
        ranks = dist.get_process_group_ranks(group)
        part = self.random(size // self.dtype.itemsize // len(ranks))
        parts = part.repeat(len(ranks), 1)
        whole = parts.flatten()
        one_node = ranks[-1] - ranks[0] < self.per_node
        exchange = Exchange(group, self.gpu and one_node and gpus_reach_each_other())
        (received,) = exchange.allocate_buffers([parts.shape], parts)
        work = (
            lambda: all_gather(whole, part, group=group),
            lambda: reduce_scatter(part, whole, group=group),
            lambda: dist.all_reduce(whole, group=group),
            lambda: dist.broadcast(whole, group=group, group_src=0),
            lambda: exchange.all_to_all([parts], [received]))
        return dict(zip(COLLECTIVES, work))

    def overlap_factors(self):
        """Return how much longer compute and communication take while both run: gathers and
        scatters of all ranks beside a layer, all-to-alls beside attention."""
        group = Groups().get("profile", lambda r: 0)
        if not self.gpu or group is None:
            return dict.fromkeys(OVERLAPS, [1.0, 1.0])
        run = self.collectives(group, self.sizes[-1])
        q = self.random(1, self.tokens[-1], 8, 128)
        _, layers = self.make_layers()

        def gather_and_scatter():
            run["all_gather"]()
            run["reduce_scatter"]()

        return {
            "collectives": self.slow_downs(layers, gather_and_scatter),
            "all_to_all": self.slow_downs(
                lambda: self.attention.forward(q, q, q), run["all_to_all"])}

    def slow_downs(self, *work):
        """Return the factors on the seconds of computation, and of communication on a stream of its
        own, while both run. work: a function each."""
        streams = torch.cuda.current_stream(), CommStream(self.device).stream
        alone = [self.time(fn) for fn in work]
        longest = max(self.seconds / 8, *alone)
        calls = [math.ceil(longest / seconds) for seconds in alone]
        events = []
        # in turns, so that the host is ahead of both streams; `time` has waited for all before.
        # The middle third is timed: in it both work
        for turn in range(48):
            for stream, fn, count in zip(streams, work, calls):
                with torch.cuda.stream(stream):
                    if turn in (16, 32):
                        events.append(torch.cuda.Event(enable_timing=True))
                        events[-1].record()
                    for _ in range(count):
                        fn()
        torch.cuda.synchronize()
        return [
            max(1.0, *of_all_ranks(begin.elapsed_time(end) / 1e3 / (16 * count * seconds)))
            for begin, end, count, seconds in zip(events[:2], events[2:], calls, alone)]


