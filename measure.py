"""Measure a hardware profile: the rates from which planner.py predicts the seconds of a step.

    torchrun --nproc_per_node 8 bench.py --profile NAME

This command runs every measurement of `Machine` on all ranks at the same time, and writes a
hardware.Profile to results/profiles/NAME.json (on a CPU to out/results/profiles/NAME.json). Each
measurement is one method:

    product_rates       FLOP/s of matrix products, by tokens and width
    attention_rates     FLOP/s of each attention kernel that runs here, by sequence length
    collective_rates    bytes/s of collectives, by bytes and mesh (see hardware.py)
    update_rate         bytes/s of the update, with optimizer states on the GPU or on the host
    copy_rate           bytes/s of copies to the host
    cast_rate           bytes/s of casts to float8, if the GPU has float8
    launch_seconds      seconds that the host takes to launch a layer, and a head group of attention
    overlap_factors     how much computation and communication slow down each other
    memory_rate         bytes/s of the element-wise kernels between products, launches included

Element-wise kernels are not timed by themselves. `memory_rate` comes last. It times whole layers,
and solves for `memory` the equation by which costs.layer_seconds predicts a layer:

    seconds of a layer = seconds of its products and attention + element-wise bytes / memory

Example: a layer takes 50 ms. By the rates measured before, its products and attention take 40 ms of
them. Its element-wise kernels move 20 GB. Then memory = 20 GB / (50 - 40) ms = 2 TB/s.

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
import fp8
from attention import Attention, Exchange, gpus_reach_each_other, make_exchange
from fp8 import has_float8
from hardware import (
    COLLECTIVES,
    FLOAT8_LAUNCHES,
    FLOAT8_PRODUCTS,
    LAUNCHES,
    OVERLAPS,
    PRODUCTS,
    Profile,
    peak_flops,
    processor_name,
)
from model import LLaMA, ModelConfig, divisors
from ops import accumulation_dtype, weight_grad_into
from ranks import Groups, all_gather, all_or_none, gather_objects, reduce_scatter
from shard import States
from streams import HOST_BYTES, CommStream, pin_host_buffers


def predicted_layer_seconds(
    profile: Profile, model: ModelConfig, dtype: torch.dtype, tokens: int, kernel: str = "auto"
) -> float:
    """Return the seconds that costs.py predicts for a layer's forward and backward.

    One rank runs one sequence of `tokens` tokens. kernel: the attention kernel.
    """
    est = costs.Estimator(profile, kernel)
    layer = costs.layer_seconds(est, costs.Plan(model, dtype, 1, 1, tokens))
    return layer.forward + layer.backward


def host_copy_rate(device: torch.device, nbytes: int = 2**26, copies: int = 8) -> float:
    """Return bytes/s of the slowest GPU's copies to the host, while all GPUs copy. With the default
    sizes it takes about 20 ms. A collective of all ranks."""
    is_gpu = device.type == "cuda"
    on_gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
    (on_host,) = pin_host_buffers([nbytes], pin=is_gpu)
    wait_for_copies = torch.cuda.synchronize if is_gpu else lambda: None
    on_host.copy_(on_gpu, non_blocking=True)  # the first copy takes longer
    wait_for_copies()
    gather_objects(None)  # so that all ranks begin together
    start = time.perf_counter()
    for _ in range(copies):
        on_host.copy_(on_gpu, non_blocking=True)
    wait_for_copies()
    return min(gather_objects(copies * nbytes / (time.perf_counter() - start)))


class Machine:
    """Measure this machine. All ranks do the same at the same time, and the slowest rank's seconds
    count. All methods are collectives: every rank calls them in the same order."""

    # These are for GPUs; __init__ sets smaller ones on a CPU
    seconds = 0.4  # of work per point, long enough that a GPU's clock rate falls as in training
    tokens = (2048, 4096, 16384)  # of matrix products
    widths = (2048, 4096, 8192)  # of matrix products
    seqs = (1024, 4096, 16384, 65536, 262144)  # tokens of a sequence, for attention
    sizes = (2**20, 2**23, 2**26, 2**29)  # bytes of a collective. Copies have the last size
    layer_size = 4096  # tokens and width of whole layers

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
        # random numbers, because a GPU multiplies zeros faster
        self.random = functools.partial(torch.randn, device=device, dtype=dtype)
        self.gpu = device.type == "cuda"
        if not self.gpu:  # small shapes
            self.seconds = 0.02
            self.tokens = self.widths = self.seqs = (256,)
            self.sizes = (2**16, 2**20)
            self.layer_size = 256

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
            casts=self.cast_rate(),
            sources={"all": "measured"},
            about=about,
        )
        return replace(profile, memory=self.memory_rate(profile))

    def synchronize(self):
        """Wait until the GPU has finished all of its work."""
        if self.gpu:
            torch.cuda.synchronize()

    def time(self, fn):
        """Return the seconds per call of fn when it is called many times back to back.

        There are four rounds, and only the last one counts. Rounds 1 and 2 call fn once. Round 2
        tells how many calls take self.seconds. Rounds 3 and 4 call fn that many times. The seconds
        of a round are those of the slowest rank.
        """
        calls = 1
        for round_number in range(4):
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            self.synchronize()
            # gather_objects waits for all ranks, so all of them start the next round together
            seconds = max(gather_objects(time.perf_counter() - start))
            if round_number == 1:
                calls = math.ceil(self.seconds / seconds)
        return seconds / calls

    def product_rates(self):
        """Return FLOP/s of matrix products by kind, as points [tokens, width, FLOP/s].

        x and dy are (tokens, width), W is (width, width).

        forward            y = x W^T
        input_grad         dx = dy W
        weight_grad        dW = dy^T x
        weight_grad_sum    dW += dy^T x, in float32
        fp8_...            the same in float8, without the casts of the operands, if the GPU can
        """
        kinds = PRODUCTS + FLOAT8_PRODUCTS if has_float8(self.device) else PRODUCTS
        found = {kind: [] for kind in kinds}
        for tokens in self.tokens:
            for width in self.widths:
                x = self.random(tokens, width)
                w = self.random(width, width)
                dw = torch.zeros_like(w)
                total = torch.zeros_like(w, dtype=accumulation_dtype(self.dtype))
                flops = 2 * tokens * width**2
                work = [  # x also stands for dy, which has the same shape
                    lambda: x @ w.t(),
                    lambda: x @ w,
                    lambda: weight_grad_into(x, x, dw, 0),
                    lambda: weight_grad_into(x, x, total, 1),
                ]
                if has_float8(self.device):
                    x8, w8, x8_t = map(fp8.cast_rows, (x, w, x.t().contiguous()))
                    work += [
                        lambda: fp8.product(x8, w8, self.dtype, fast=True),
                        lambda: fp8.product(x8, w8, self.dtype),
                        lambda: fp8.weight_grad_into(x8_t, x8_t, self.dtype, dw, 0),
                        lambda: fp8.weight_grad_into(x8_t, x8_t, self.dtype, total, 1),
                    ]
                for kind, fn in zip(kinds, work):
                    found[kind].append([tokens, width, flops / self.time(fn)])
        return found

    def attention_rates(self, op):
        """Return FLOP/s of an attention kernel by pass, as points [sequence length, FLOP/s].

        Attention is causal, so the FLOPs of half of the (T, T) attention matrix are counted.
        Backward has 2.5 times the FLOPs of forward.
        """
        forward, backward = [], []
        for seq in self.seqs:
            # short sequences run in a batch, so that the kernel takes much longer than its launch
            batch = max(1, self.tokens[-1] * 4 // seq)
            q, k, v, do = (self.random(batch, seq, 8, 128) for _ in range(4))  # 8 heads
            o, lse = op.forward(q, k, v)
            flops = 2 * q.numel() * seq  # two products of 2 FLOPs each, with half of the keys
            forward.append([seq, flops / self.time(lambda: op.forward(q, k, v))])
            seconds = self.time(lambda: op.backward(lambda: (do, []), q, k, v, o, lse))
            backward.append([seq, 2.5 * flops / seconds])
        return {"forward": forward, "backward": backward}

    def make_model(self, layers, width):
        """Make a model with head width 128 and a small vocabulary."""
        heads = width // 128
        cfg = ModelConfig(256, width, layers, heads, heads, width * 43 // 16)
        model = LLaMA(cfg, self.attention).to(self.device, self.dtype)
        model.init_weights(0)
        return model

    def make_layers(self):
        """Return the config of a model of two layers, and a function that runs their forward and
        their backward."""
        size = self.layer_size
        model = self.make_model(2, size)
        positions = torch.arange(size, device=self.device)
        x = self.random(1, size, size).requires_grad_()

        def run():
            y = model.run_layers(range(2), model.layer_runner, x, positions)
            y.backward(x.detach())
            model.zero_grad()

        return model.cfg, run

    def memory_rate(self, profile):
        """Return the bytes/s of element-wise kernels with which costs.layer_seconds predicts the
        seconds that a layer takes here.

        profile: has all other rates. Its `memory` is infinity, so that costs.layer_seconds counts
        only products and attention.
        """
        cfg, run = self.make_layers()
        layer = cfg, self.dtype, self.layer_size, self.kernels[0]
        other_seconds = predicted_layer_seconds(profile, *layer)  # of products and attention
        # at 1 byte per second, element-wise kernels take as many seconds as they move bytes
        slow_memory = replace(profile, memory=1.0)
        elementwise_bytes = predicted_layer_seconds(slow_memory, *layer) - other_seconds

        seconds = self.time(run) / cfg.layers
        # positive in spite of timing noise
        elementwise_seconds = max(seconds - other_seconds, seconds / 100)
        return elementwise_bytes / elementwise_seconds

    def update_rate(self, storage):
        """Return bytes/s of an update.

        storage: where optimizer states lie. It also decides which bytes are counted.

            gpu     all bytes that the update reads and writes (costs.update_bytes)
            host    the size of the optimizer states. They stream to the GPU and back at the same
                    time, so this is the rate of one direction
        """
        model = self.make_model(4, self.layer_size)
        states = States(model, self.device, self.dtype, storage=storage)
        state_bytes = states.bytes()
        if storage == "gpu":
            params = state_bytes["parameters"] / self.dtype.itemsize
            moved = params * costs.update_bytes(self.dtype)
        else:
            moved = state_bytes["optimizer"]
        return moved / self.time(lambda: states.update(0.0, 0.0))

    def copy_rate(self):
        """Return bytes/s of copies to page-locked host memory."""
        return host_copy_rate(self.device, self.sizes[-1], copies=40)

    def cast_rate(self):
        """Return bytes/s of casts to float8, or None if the GPU has no float8. A cast reads a bf16
        matrix twice: once to find the largest values, and once to cast. It writes two float8
        matrices: the cast and the transposed cast."""
        if not (self.gpu and has_float8(self.device)):
            return None
        x = self.random(16384, 8192)
        nbytes = 2 * x.nbytes + 2 * x.numel()
        return nbytes / self.time(lambda: fp8.cast_both(x, *fp8.largest_values(x, True, True)))

    def launch_seconds(self):
        """Return the seconds that the host takes to launch kernels, by LAUNCHES and, if the GPU has
        float8, by FLOAT8_LAUNCHES.

        On a CPU, the seconds of an operator include its launch, so a launch counts 1 ns here.
        """
        if not self.gpu:
            return dict.fromkeys(LAUNCHES, 1e-9)
        found = dict(zip(LAUNCHES, self.layer_launches() + self.head_group_launches()))
        if has_float8(self.device):
            found |= zip(FLOAT8_LAUNCHES, self.layer_launches(in_float8=True))
        return found

    def layer_launches(self, in_float8=False):
        """Return the seconds that the host takes to launch a layer's forward and its backward.
        in_float8: with products in float8, each of which also casts its weight.

        The model is so small that the GPU waits for the host. Whole micro-batches run under
        shard.States, whose own kernels count, too, as in training. The result is the mean and not
        the minimum, because a step's time includes the delays of the host.
        """
        layers, micro_batches = 24, 4
        model = self.make_model(layers, 256)
        if in_float8:
            fp8.use_float8(model, None, keeps_casts=False)
        states = States(model, self.device, self.dtype, micro_batches=micro_batches)
        ids = torch.arange(128, device=self.device)[None]
        times = []  # per micro-batch: when forward begins, backward begins and backward ends
        for micro_batch in range(40):
            if micro_batch % micro_batches == 0:
                states.begin_step()
                torch.cuda.synchronize()  # a step begins with no work in the queue
            start = time.perf_counter()
            loss = model(ids, ids)
            middle = time.perf_counter()
            loss.backward()
            times.append([start, middle, time.perf_counter()])
        warm = times[2 * micro_batches :]  # two steps warm up
        seconds = np.diff(warm).mean(0)  # of forward and backward
        return np.max(gather_objects(seconds / layers), axis=0).tolist()

    def head_group_launches(self):
        """Return the seconds that the host takes to launch one head group of attention, in forward
        and in backward.

        For each group, the host launches the all-to-alls among the GPUs of the node, and the kernel
        of attention. The sequence is so short that the GPU waits for the host. Attention is timed
        with 2 and with 8 groups. The difference, divided by 6, is the time of one group. The
        slowest rank's time counts.
        """
        groups = Groups()
        exchange = make_exchange(groups, self.per_node, CommStream(self.device), self.per_node)
        few, many = (
            self.attention_launches(Attention(self.kernels[0], n, exchange)) for n in (2, 8)
        )
        seconds = ((many - few) / 6).clip(1e-9)  # positive in spite of timing noise
        return np.max(gather_objects(seconds), axis=0).tolist()

    def attention_launches(self, op):
        """Return the seconds that the host takes to launch op's forward and its backward, on 8
        heads of head width 128 per rank. Each is a median, because in a mean one delay of the host
        could be larger than the difference that head_group_launches computes."""
        q, k, v, do = (self.random(1, 128, 8 * op.exchange.ranks, 128) for _ in range(4))
        seconds = []  # per call: of forward and of backward
        for _ in range(30):
            start = time.perf_counter()
            o, lse = op.forward(q, k, v)
            forward = time.perf_counter() - start
            self.synchronize()  # so that backward begins with an empty queue, too
            start = time.perf_counter()
            op.backward(lambda: (do, []), q, k, v, o, lse)
            seconds.append([forward, time.perf_counter() - start])
            self.synchronize()
        return np.median(seconds[5:], axis=0)  # five calls warm up

    def collective_rates(self):
        """Return bytes/s of collectives by operation and mesh, as points [bytes, bytes/s].

        All groups of a mesh run at the same time. With 4 nodes of 8 GPUs, mesh 2x4 has 4 groups of
        8 ranks: 2 neighbouring GPUs of each node. Bytes are the size of the whole tensor that is
        gathered, reduced or broadcast. For an all-to-all they are the size of the tensor that one
        rank sends, including the part that it keeps.
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
        """Return {operation: a function that runs this collective on `size` bytes in a group}."""
        ranks = dist.get_process_group_ranks(group)
        part = self.random(size // self.dtype.itemsize // len(ranks))
        parts = part.repeat(len(ranks), 1)
        whole = parts.flatten()
        one_node = ranks[-1] - ranks[0] < self.per_node
        exchange = Exchange(group, self.gpu and one_node and gpus_reach_each_other())
        (received,) = exchange.allocate_buffers([parts.shape], parts)
        return {
            "all_gather": lambda: all_gather(whole, part, group=group),
            "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
            "all_to_all": lambda: exchange.all_to_all([parts], [received]),
        }

    def overlap_factors(self):
        """Return by what factors computation and communication take longer while both run.

        "collectives": all-gathers and reduce-scatters over all ranks, while layers run forward and
        backward. "all_to_all": all-to-alls over all ranks, while attention's forward runs.
        """
        group = Groups().get("profile", lambda r: 0)
        if not self.gpu or group is None:
            return dict.fromkeys(OVERLAPS, [1.0, 1.0])
        collectives = self.collectives(group, self.sizes[-1])
        q = self.random(1, self.tokens[-1], 8, 128)
        _, layers = self.make_layers()

        def gather_and_scatter():
            collectives["all_gather"]()
            collectives["reduce_scatter"]()

        return {
            "collectives": self.slow_downs(layers, gather_and_scatter),
            "all_to_all": self.slow_downs(
                lambda: self.attention.forward(q, q, q), collectives["all_to_all"]
            ),
        }

    def slow_downs(self, *work):
        """Return two factors, by which computation and communication take longer while both run.

        work: two functions, which launch computation and communication. Each function is first
        timed by itself. Then both run at the same time, on two streams. Each stream gets 48 batches
        of calls. The number of calls per batch is such that a batch, by itself, takes about the
        same time on both streams. CUDA events are recorded before each batch and after the last
        one, and slow_down_factors computes the factors from them. A result is at least 1, and the
        largest one of all ranks.
        """
        streams = torch.cuda.current_stream(), CommStream(self.device).stream
        alone = [self.time(fn) for fn in work]  # seconds per call; waits for all earlier work

        batch_seconds = max(self.seconds / 8, *alone)
        calls = [math.ceil(batch_seconds / seconds) for seconds in alone]  # per batch

        events = [], []  # of each stream: before each batch, and after the last one

        def record(stream, its_events):
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            its_events.append(event)

        # the streams get their batches alternately, so that the host stays ahead of both
        for _ in range(48):
            for stream, fn, count, its_events in zip(streams, work, calls, events):
                record(stream, its_events)
                with torch.cuda.stream(stream):
                    for _ in range(count):
                        fn()
        for stream, its_events in zip(streams, events):
            record(stream, its_events)
        torch.cuda.synchronize()

        first = events[0][0]
        begins = [[first.elapsed_time(event) / 1e3 for event in each] for each in events]
        batch_alone = [count * seconds for count, seconds in zip(calls, alone)]
        factors = all_or_none(slow_down_factors, begins, batch_alone)
        return [max(1.0, *gather_objects(factor)) for factor in factors]


def slow_down_factors(begins: Sequence[list[float]], alone: Sequence[float]) -> list[float]:
    """Return by what factor the batches of each of two streams took longer while both had work.

    begins: for each stream, the times in seconds at which its batches began, and the time at which
    the last batch ended. alone: for each stream, the seconds that a batch takes by itself.

    Only the time counts in which both streams certainly have work. It begins when both have done
    four batches to warm up, and ends when the first of them has done all. A batch that is done
    partly in this time counts partly. Raises ValueError if there is no such time.

    Example: computation is not slowed down, and communication takes twice as long:

        seconds          0 ........ 4 ........ 8 ................... 48 .................. 72
        computation      batch 0 to 3 | 4 to 7 | 8 to 47              | done
        communication    batch 0, 1   | 2, 3   | 4 to 23              | 24 to 47, alone
                                               | this time counts     |

    In these 40 seconds computation does 40 batches, and communication 20.
    """
    warm_up = 4
    first = max(times[warm_up] for times in begins)
    last = min(times[-1] for times in begins)
    if first >= last:
        raise ValueError(
            "--profile: computation and communication never ran at the same time, or one of them "
            "slowed the other down more than ten times. End other processes, and measure again"
        )
    factors = []
    for times, seconds in zip(begins, alone):
        done_first, done_last = np.interp([first, last], times, range(len(times)))
        factors.append((last - first) / ((done_last - done_first) * seconds))
    return factors
