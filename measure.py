"""Measure what a machine does in a second: the rates that planner.py predicts by.

    torchrun --nproc_per_node 8 bench.py --profile NAME

runs every measurement of `Machine` on all ranks at once, and writes a hardware.Profile. It has the
rate of each operation at some shapes (matrix products, attention by each kernel that runs here, the
update, copies to the host, collectives by bytes and mesh), the seconds that the host, whose
processor is named, takes to launch a layer, and the factors by which computation and communication
slow each other down.

One number cannot be measured by itself: `memory`, the bytes per second of the element-wise kernels
between products, launches included. Two whole layers are timed, and the rate follows from what
costs.layer_seconds counts for one:

    seconds of a layer = seconds of its products and attention + element-wise bytes / memory

Left out: rates of a machine that others use at the same time.
"""

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

import costs
from attention import Attention, Exchange, gpus_reach_each_other
from hardware import (
    COLLECTIVES,
    OVERLAPS,
    PASSES,
    PRODUCTS,
    Profile,
    peak_flops,
    processor_name,
)
from model import LLaMA, ModelConfig, divisors
from ops import accumulation_dtype, weight_grad_into
from ranks import Groups, all_gather, gather_objects, reduce_scatter
from shard import States
from streams import HOST_BYTES, CommStream


def layer_seconds(
    profile: Profile, model: ModelConfig, dtype: torch.dtype, tokens: int, kernel: str = "auto"
) -> float:
    """Return the seconds that costs.py counts for a layer's forward and backward, whose attention is
    computed by `kernel`."""
    est = costs.Estimator(profile, kernel)
    layer = costs.layer_seconds(est, costs.Plan(model, dtype, 1, 1, tokens))
    return layer.forward + layer.backward


class Machine:
    """This machine at work: all ranks do the same at once, and the slowest rank's seconds count.
    All methods are collectives."""

    seconds = 0.4  # of work at a point: a GPU's clock rate falls under load
    tokens = (2048, 4096, 16384)
    widths = (2048, 4096, 8192)
    seqs = (1024, 4096, 16384, 65536, 262144)
    sizes = (2**20, 2**23, 2**26, 2**29)  # bytes that are sent, or (the last) copied to the host
    middle = 4096  # tokens and width of whole layers

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kernels: Sequence[str], per_node: int
    ):
        """kernels: the attention kernels to measure, best first. Whole layers run the first one."""
        self.device = device
        self.dtype = dtype
        self.per_node = per_node
        self.kernels = kernels
        self.attention = Attention(kernels[0])
        # not zeros, which are multiplied faster
        self.random = functools.partial(torch.randn, device=device, dtype=dtype)
        self.gpu = device.type == "cuda"
        if not self.gpu:
            self.seconds = 0.02
            self.tokens = self.widths = self.seqs = (256,)
            self.sizes = (2**16, 2**20)
            self.middle = 256

    def profile(self, name: str, about: dict) -> Profile:
        """Measure every rate of a profile. about: hardware, versions, commit and command."""
        device_name, gpu_bytes = "CPU", HOST_BYTES
        if self.gpu:
            properties = torch.cuda.get_device_properties(self.device)
            device_name, gpu_bytes = properties.name, properties.total_memory
        profile = Profile(
            name,
            device_name,
            self.per_node,
            gpu_bytes,
            HOST_BYTES,
            peak_flops(device_name),
            self.product_rates(),
            {kernel: self.attention_rates(Attention(kernel)) for kernel in self.kernels},
            math.inf,  # memory, below
            self.update_rate("gpu"),
            self.copy_rate(),
            self.update_rate("host"),
            {processor_name(): self.launch_seconds()},
            self.collective_rates(),
            self.overlap_factors(),
            {"all": "measured"},
            about,
        )
        return replace(profile, memory=self.memory_rate(profile))

    def time(self, fn):
        """Return the seconds of a call among many, back to back, after as many that warm up."""
        calls = 1
        for turn in range(4):  # all ranks at the same time: gather_objects waits for them
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            if self.gpu:
                torch.cuda.synchronize()
            seconds = max(gather_objects(time.perf_counter() - start))
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
                    lambda: weight_grad_into(x, x, total, 1),
                )
                for kind, fn in zip(PRODUCTS, work):
                    found[kind].append([tokens, width, 2 * tokens * width**2 / self.time(fn)])
        return found

    def attention_rates(self, op):
        """Return a kernel's FLOP/s of causal attention, half of the (T, T) matrix counted."""
        forward, backward = [], []
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

    def memory_rate(self, profile):
        """Return bytes/s between products: those at which layer_seconds counts what a layer takes
        here. In profile memory takes no time."""
        cfg, run = self.make_layers()
        layer = cfg, self.dtype, self.middle, self.kernels[0]
        products = layer_seconds(profile, *layer)
        moved = layer_seconds(replace(profile, memory=1.0), *layer) - products  # bytes
        seconds = self.time(run) / cfg.layers
        return moved / max(seconds - products, seconds / 100)  # whatever the clock's noise

    def update_rate(self, storage):
        """Return bytes/s of layers' update with optimizer states on the GPU: those of update_bytes;
        or on the host: those of states, each way."""
        model = self.make_model(4, self.middle)
        states = States(model, self.device, self.dtype, storage=storage)
        held = states.bytes()
        moved = {
            "gpu": held["parameters"] / self.dtype.itemsize * costs.update_bytes(self.dtype),
            "host": held["optimizer"],
        }
        return moved[storage] / self.time(lambda: states.update(0.0, 0.0))

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
            lambda: exchange.all_to_all([parts], [received]),
        )
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
                lambda: self.attention.forward(q, q, q), run["all_to_all"]
            ),
        }

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
            max(1.0, *gather_objects(begin.elapsed_time(end) / 1e3 / (16 * count * seconds)))
            for begin, end, count, seconds in zip(events[:2], events[2:], calls, alone)
        ]
