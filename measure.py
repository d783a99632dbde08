"""Measure a hardware profile: the rates from which planner.py predicts the seconds of a step.

    torchrun --nproc_per_node 8 bench.py --profile NAME

runs every measurement of `Machine` on all ranks at the same time, and writes a hardware.Profile to
results/profiles/NAME.json. Each measurement is one method:

    product_rates       FLOP/s of matrix products, by tokens and width
    attention_rates     FLOP/s of each attention kernel that runs here, by sequence length
    collective_rates    bytes/s of collectives, by bytes and mesh
    update_rate         bytes/s of the update, with optimizer states on the GPU and on the host
    copy_rate           bytes/s of copies to the host
    launch_seconds      seconds that the host, whose processor is named, takes to launch a layer
    overlap_factors     how much computation and communication slow down each other
    memory_rate         bytes/s of the element-wise kernels between products, launches included

All but one are timed by themselves. `memory_rate` is not: two whole layers are timed, and the rate
follows from what costs.layer_seconds counts for one layer,

    seconds of a layer = seconds of its products and attention + element-wise bytes / memory

Example: products and attention of a layer take 40 ms by the rates measured before, its element-wise
kernels move 20 GB, and a layer takes 50 ms. Then memory = 20 GB / (50 - 40) ms = 2 TB/s.

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
    """Return the seconds that costs.py counts for a layer's forward and backward.

    kernel: the attention kernel. tokens: of the one sequence that one rank runs.
    """
    est = costs.Estimator(profile, kernel)
    layer = costs.layer_seconds(est, costs.Plan(model, dtype, 1, 1, tokens))
    return layer.forward + layer.backward


class Machine:
    """Measure this machine. All ranks do the same at the same time, and the slowest rank's seconds
    count. All methods are collectives: every rank calls them in the same order."""

    # the shapes that are measured on GPUs
    seconds = 0.4  # of work per point: long enough that a GPU's clock rate falls, as under load
    tokens = (2048, 4096, 16384)
    widths = (2048, 4096, 8192)
    seqs = (1024, 4096, 16384, 65536, 262144)
    sizes = (2**20, 2**23, 2**26, 2**29)  # bytes of collectives, and (the last) of copies
    middle = 4096  # tokens and width of whole layers

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kernels: Sequence[str], per_node: int
    ):
        """kernels: the attention kernels to measure, best first. Whole layers run the first one.
        per_node: ranks per node."""
        self.device = device
        self.dtype = dtype
        self.per_node = per_node
        self.kernels = kernels
        self.attention = Attention(kernels[0])
        # random numbers: zeros are multiplied faster
        self.random = functools.partial(torch.randn, device=device, dtype=dtype)
        self.gpu = device.type == "cuda"
        if not self.gpu:  # small shapes
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
            name=name,
            device=device_name,
            per_node=self.per_node,
            gpu_bytes=gpu_bytes,
            host_bytes=HOST_BYTES,
            peak_flops=peak_flops(device_name),
            products=self.product_rates(),
            attention={kernel: self.attention_rates(Attention(kernel)) for kernel in self.kernels},
            memory=math.inf,  # measured last, because it needs all other rates
            optimizer=self.update_rate("gpu"),
            to_host=self.copy_rate(),
            state_streaming=self.update_rate("host"),
            launch={processor_name(): self.launch_seconds()},
            collectives=self.collective_rates(),
            overlap=self.overlap_factors(),
            sources={"all": "measured"},
            about=about,
        )
        return replace(profile, memory=self.memory_rate(profile))

    def time(self, fn):
        """Return the seconds per call of fn, of many calls back to back. The slowest rank counts.

        There are four rounds. Two rounds of one call warm up, and the second one says how many
        calls take self.seconds. The third round runs so many, still to warm up. The fourth counts.
        """
        calls = 1
        for round_number in range(4):
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            if self.gpu:
                torch.cuda.synchronize()
            # gather_objects waits for all ranks, so all of them start the next round together
            seconds = max(gather_objects(time.perf_counter() - start))
            if round_number == 1:
                calls = math.ceil(self.seconds / seconds)
        return seconds / calls

    def product_rates(self):
        """Return FLOP/s of matrix products by kind: [tokens, width, FLOP/s], W (width, width).

        forward            y = x W^T
        input_grad         dx = dy W
        weight_grad        dW = dy^T x
        weight_grad_sum    dW += dy^T x, in float32
        """
        found = {kind: [] for kind in PRODUCTS}
        for tokens in self.tokens:
            for width in self.widths:
                x = self.random(tokens, width)
                w = self.random(width, width)
                dw = torch.zeros_like(w)
                total = torch.zeros_like(w, dtype=accumulation_dtype(self.dtype))
                flops = 2 * tokens * width**2
                work = (
                    lambda: x @ w.t(),
                    lambda: x @ w,
                    lambda: weight_grad_into(x, x, dw, 0),
                    lambda: weight_grad_into(x, x, total, 1),
                )
                for kind, fn in zip(PRODUCTS, work):
                    found[kind].append([tokens, width, flops / self.time(fn)])
        return found

    def attention_rates(self, op):
        """Return FLOP/s of an attention kernel by pass: [sequence length, FLOP/s].

        Attention is causal, and half of the (T, T) matrix is counted. Backward has 2.5 times the
        FLOPs of forward.
        """
        forward, backward = [], []
        for seq in self.seqs:
            batch = max(
                1, self.tokens[-1] * 4 // seq
            )  # enough work to take much longer than its launch
            q, k, v, do = (self.random(batch, seq, 8, 128) for _ in range(4))  # 8 heads
            o, lse = op.forward(q, k, v)
            flops = 2 * q.numel() * seq
            forward.append([seq, flops / self.time(lambda: op.forward(q, k, v))])
            seconds = self.time(lambda: op.backward(lambda: (do, []), q, k, v, o, lse))
            backward.append([seq, 2.5 * flops / seconds])
        return {"forward": forward, "backward": backward}

    def make_model(self, layers, width):
        """Make a model with heads of 128 and a small vocabulary."""
        heads = width // 128
        cfg = ModelConfig(256, width, layers, heads, heads, width * 43 // 16)
        model = LLaMA(cfg, self.attention).to(self.device, self.dtype)
        model.init_weights(0)
        return model

    def make_layers(self):
        """Return the config of a model of two layers, and a function that runs both passes."""
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
        """Return bytes/s of element-wise kernels, such that costs.layer_seconds counts for a layer
        what it takes here. profile: all other rates. Its own memory is infinitely fast."""
        cfg, run = self.make_layers()
        layer = cfg, self.dtype, self.middle, self.kernels[0]
        products = layer_seconds(profile, *layer)  # seconds of products and attention
        # at 1 byte per second, a layer's element-wise seconds are its element-wise bytes
        moved = layer_seconds(replace(profile, memory=1.0), *layer) - products
        seconds = self.time(run) / cfg.layers
        elementwise = max(seconds - products, seconds / 100)  # positive in spite of timing noise
        return moved / elementwise

    def update_rate(self, storage):
        """Return bytes/s of an update.

        storage: where optimizer states lie. gpu: bytes that the update reads and writes
        (costs.update_bytes). host: bytes of optimizer states, which stream to the GPU and back;
        each way counts once.
        """
        model = self.make_model(4, self.middle)
        states = States(model, self.device, self.dtype, storage=storage)
        state_bytes = states.bytes()
        if storage == "gpu":
            params = state_bytes["parameters"] / self.dtype.itemsize
            moved = params * costs.update_bytes(self.dtype)
        else:
            moved = state_bytes["optimizer"]
        return moved / self.time(lambda: states.update(0.0, 0.0))

    def copy_rate(self):
        """Return bytes/s of copies to pinned host memory."""
        on_gpu = self.random(self.sizes[-1] // self.dtype.itemsize)
        on_host = torch.empty_like(on_gpu, device="cpu", pin_memory=self.gpu)
        return on_gpu.nbytes / self.time(lambda: on_host.copy_(on_gpu, non_blocking=True))

    def launch_seconds(self):
        """Return the seconds that the host takes to launch a layer's forward and backward.

        The model is so small that the device waits for the host. Whole micro-batches run, with what
        shard.States does in them. The mean counts, because a step takes what its host takes on
        average. On a CPU the launches are part of the operators' seconds.
        """
        if not self.gpu:
            return dict.fromkeys(PASSES, 1e-9)
        layers, micro_batches = 24, 4
        model = self.make_model(layers, 256)
        states = States(model, self.device, self.dtype, micro_batches=micro_batches)
        ids = torch.arange(128, device=self.device)[None]
        moments = []
        for micro_batch in range(40):
            if micro_batch % micro_batches == 0:
                states.begin_step()
                torch.cuda.synchronize()  # a step begins with no work in the queue
            start = time.perf_counter()
            loss = model(ids, ids)
            middle = time.perf_counter()
            loss.backward()
            moments.append([start, middle, time.perf_counter()])
        warm = moments[2 * micro_batches :]  # two steps warm up
        seconds = np.diff(warm).mean(0)  # of forward and backward
        return dict(zip(PASSES, (seconds / layers).tolist()))

    def collective_rates(self):
        """Return bytes/s of collectives by operation and mesh: [bytes, bytes/s].

        All groups of a mesh run at the same time. Bytes are those of the whole tensor that is
        gathered, reduced or broadcast. For an all-to-all they are those that one rank has.
        """
        found = {op: {} for op in COLLECTIVES}
        groups = Groups()
        per_node = self.per_node
        nodes = groups.ranks // per_node
        for n in divisors(nodes):
            for g in divisors(per_node):
                # a group: g neighbours in each of n neighbouring nodes
                group = groups.get("profile", lambda r: (r % per_node // g, r // per_node // n))
                if not group:  # it would have one rank only
                    continue
                for size in self.sizes:
                    for op, fn in self.collectives(group, size).items():
                        found[op].setdefault(f"{g}x{n}", []).append([size, size / self.time(fn)])
        return found

    def collectives(self, group, size):
        """Return functions that run each collective of a group on `size` bytes, by operation."""
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
        """Return by what factors computation and communication take longer while both run.

        collectives: all-gathers and reduce-scatters of all ranks, next to a layer. all_to_all:
        all-to-alls, next to attention.
        """
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
        """Return two factors on the seconds of computation, and of communication on a stream of its
        own, while both run. work: two functions that launch computation and communication.

        Each function is first timed by itself. Then both streams get 48 batches of calls each. A
        batch takes about equally long on either stream when it runs by itself. Only the middle
        third is timed, between two events, because there both streams certainly have work:

            batch          0 ........ 15 | 16 ........ 31 | 32 ........ 47
            computation    warms up      | timed          | keeps the other stream company
            communication  warms up      | timed          | keeps the other stream company

        The events are recorded before batches 16 and 32. The factor is the time between them over
        the time that 16 batches take by themselves.
        """
        streams = torch.cuda.current_stream(), CommStream(self.device).stream
        alone = [self.time(fn) for fn in work]  # seconds per call; waits for all earlier work

        batch_seconds = max(self.seconds / 8, *alone)
        calls = [math.ceil(batch_seconds / seconds) for seconds in alone]  # per batch

        batches, begin, end = 48, 16, 32
        events = {begin: [], end: []}  # by batch: an event per stream
        # the streams get their batches alternately, so that the host stays ahead of both
        for batch in range(batches):
            for stream, fn, count in zip(streams, work, calls):
                with torch.cuda.stream(stream):
                    if batch in events:
                        event = torch.cuda.Event(enable_timing=True)
                        event.record()
                        events[batch].append(event)
                    for _ in range(count):
                        fn()
        torch.cuda.synchronize()

        factors = []
        for first, last, count, seconds in zip(events[begin], events[end], calls, alone):
            together = first.elapsed_time(last) / 1e3  # seconds of the timed batches
            by_itself = (end - begin) * count * seconds
            factors.append(max(1.0, *gather_objects(together / by_itself)))
        return factors
