"""What a layer keeps for its backward: tokens that stay, are swapped to the host, or recomputed.

A layer is token-wise but for attention, so it runs in chunks of tokens, and with (q, k, v) and
(h, gu) = (residual stream after attention, gate|up) of a chunk at hand, its backward multiplies
matrices for gradients alone. Those are the chunk's "others"; each chunk's have one of three fates:

    keep        they stay on the GPU                       the last k layers, as far as it has room
    swap        they go to pinned host memory and return   the other layers, a fraction alpha
    recompute   pre and post run again on the chunk, from the layer's input x and its o

The layer's input x, attention output o and log-sum-exp always come back, from the GPU in the last k
layers, from the host in the others: attention runs once (Memo, arXiv 2407.12117, section 4.1).
Two rounding buffers receive what is fetched: layer i uses buffer i mod 2.

    forward   compute  | layer i        | layer i+1      | layer i+2        drops what i had, once
              offload  |                | i -> host      | i+1 -> host      it is on the host
    backward  compute  | layer i+2      | layer i+1      | layer i
              prefetch | i+1 -> buffer  | i -> buffer    | i-1 -> buffer    when i+1 is done with it

`choose` solves for k, alpha and what stays, as one small mixed-integer program over measured times
and sizes. Norm outputs and SwiGLU's are not kept in any case: they cost one pass over memory, and a
third of the bytes. The backward is written out below: whoever changes model.Block changes it here.

Left out: swapping to disk, and layers of different shapes.

Legend: N = B*T tokens of a rank, n layers, k resident layers, c chunks of a layer, C width, H query
heads, K key/value heads, D head width, F MLP width.
"""
import contextlib
import functools
import math
import mmap
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from model import (MAX_ELEMENTS, Attention, Block, LLaMA, ModelConfig, accumulation_dtype,
                   add_rms_norm, compiled, input_grad, param_count, rope_tables, swiglu,
                   weight_grad)
from shard import Lane, move, wait

GIB = 2**30
ALIGN = 512  # bytes: where a tensor starts in a slot

# ---------------------------------------------------------------------------- what is kept where


@dataclass(frozen=True)
class Sizes:
    """Bytes of one layer on one rank, and seconds of its forward."""

    input: int  # x
    attn: int  # o and the log-sum-exp
    others: int  # q, k, v, h, gate|up
    layer_s: float  # forward
    others_s: float  # of it, what recomputing the others takes
    attn_s: float  # of it, attention


def layer_bytes(cfg: ModelConfig, tokens: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """S_input, S_attn and S_others of `tokens` tokens (Memo, section 4.1)."""
    e, wide, qo = dtype.itemsize, accumulation_dtype(dtype).itemsize, cfg.heads * cfg.head_dim
    others = qo + 2 * cfg.kv_heads * cfg.head_dim + cfg.dim + 2 * cfg.ffn
    return tokens * cfg.dim * e, tokens * (qo * e + cfg.heads * wide), tokens * others * e


def places_bytes(cfg: ModelConfig, tokens: int, dtype: torch.dtype, sp: int,
                 head_groups: int) -> int:
    """Where all-to-alls arrive: q, k, v, o and do of two head groups, dq, dk and dv of one
    (shard.Ulysses)."""
    if sp == 1:
        return 0
    kv = math.lcm(cfg.kv_heads, sp * head_groups)  # with the heads that are repeated
    return tokens * cfg.head_dim * dtype.itemsize * (7 * cfg.heads + 6 * kv) // head_groups


def working_bytes(cfg: ModelConfig, tokens: int, chunk: int, dtype: torch.dtype, sp: int,
                  head_groups: int) -> int:
    """Bytes that a layer's backward needs beside what was kept, at the higher of two peaks.

    Attention's: dy, dx, do; o, if it was dropped; q, k, v and their gradients, repeated heads among
    them; of two head groups what is sent and received, or the copies of a part of too many heads;
    the kernel's float32 sums. That of the products before it: dy, dx, do, q, k, v, one chunk's
    temporaries, the first group's parts, and where head groups will be received.
    """
    e, d = dtype.itemsize, cfg.head_dim
    x, qo, kv = tokens * cfg.dim * e, tokens * cfg.heads * d * e, tokens * cfg.kv_heads * d * e
    kv_sent = kv // cfg.kv_heads * math.lcm(cfg.kv_heads, sp * head_groups)  # heads are repeated
    whole = 2 * x + 4 * qo + 2 * kv + 2 * kv_sent + 2 * (kv_sent if kv_sent > kv else 0)
    groups = (4 * (3 * qo + 2 * kv_sent) + 4 * (qo + 2 * kv_sent)) / head_groups
    received = (3 * qo + 2 * kv_sent) / head_groups  # a group's parts
    received += places_bytes(cfg, tokens, dtype, sp, head_groups)
    received += 2 * (kv_sent if kv_sent > kv else 0)
    if sp == 1:
        groups, received = 0 if tokens * cfg.heads * d <= MAX_ELEMENTS else 2 * qo, 0
    sums = 2 * tokens * (cfg.heads + (cfg.heads != cfg.kv_heads) * 2 * cfg.kv_heads) * d * 4
    temporaries = chunk * (8 * cfg.ffn + 6 * cfg.dim) * e
    return round(max(whole + groups + sums / head_groups,
                     2 * x + 2 * qo + 2 * kv + temporaries + received))


@dataclass(frozen=True)
class Fates:
    """What the chunks of all layers are treated like."""

    layers: int  # n
    chunks: int  # c of a layer
    resident: int  # k: the last ones, whose x and o stay on the GPU
    kept: int = 0  # chunks whose others stay, over all resident layers, from the last one on
    swapped: int = 0  # chunks whose others are swapped, over all other layers, evenly
    dropped: int = 0  # of the swapped layers, the first ones: attention runs twice

    @property
    def alpha(self) -> float:
        """Memo's: the swapped fraction of the others, in layers that are swapped."""
        return self.swapped / (self.chunks * max(1, self.layers - self.resident))

    def swaps(self, i: int) -> bool:
        return i < self.layers - self.resident

    def stored(self, i: int) -> int:
        """How many of layer i's chunks are not recomputed: the first ones."""
        if not self.swaps(i):
            behind = (self.layers - 1 - i) * self.chunks
            return min(self.chunks, max(0, self.kept - behind))
        n = self.layers - self.resident
        return (i + 1) * self.swapped // n - i * self.swapped // n

    def describe(self) -> str:
        share = self.kept / (self.chunks * max(1, self.resident))
        text = (f"{self.resident} of {self.layers} layers resident, {share:.0%} of their others "
                f"kept; alpha {self.alpha:.3f} of the other layers; {self.chunks} chunks a layer")
        return text + (f"; ATTENTION RUNS TWICE in {self.dropped} layers" if self.dropped else "")


def gpu_bytes(f: Fates, layer: tuple[int, int, int]) -> float:
    """Of a rank, for what resident layers keep and two rounding buffers; layer: layer_bytes."""
    x, attn, others = layer
    most = max((f.stored(i) for i in range(f.layers) if f.swaps(i)), default=0)
    buffers = 2 * (x + attn + most * others / f.chunks) if f.resident < f.layers else 0
    return f.resident * (x + attn) + f.kept * others / f.chunks + buffers


def host_need(f: Fates, layer: tuple[int, int, int]) -> float:
    """Of a rank, for the slots of the layers that are swapped."""
    x, attn, others = layer
    return ((f.layers - f.resident) * (x + attn) - f.dropped * attn
            + f.swapped * others / f.chunks)


def choose(n: int, s: Sizes, chunks: int, bandwidth: float, gpu: float, host: float,
           resident: int | None = None, alpha: float | None = None,
           memo: bool = False) -> tuple[Fates, float]:
    """The fates that lose the least time, and the seconds lost in a step's forward and backward.

    bandwidth: bytes/s to the host, with all GPUs copying; gpu, host: bytes a rank can give to
    activations. With the number of resident layers k, of kept chunks K, of swapped chunks S, of
    layers without o, X, and of seconds w in which compute waits for copies:

        min  w + X*attn_s - (K + S)*others_s/c            (+ a tenth of a millisecond a GiB swapped)
        GPU    k*(input + attn) + K*others/c + 2*(input + attn + a*others/c)   <= gpu
               (and, while layers leave in forward,  4*(input + attn + a*others/c) <= gpu)
        host   (n - k)*(input + attn) - X*attn + S*others/c                    <= host
        time   (n - k)*(input + attn) - X*attn + S*others/c  <= bandwidth*((n - k)*layer_s + w)
               K <= c*k,  S <= a*(n - k),  X <= n - k

    where a, the chunks that a rounding buffer has room for, takes some values in turn (eighths of a
    layer, as Memo's alpha). The backward takes twice the forward's time and copies as much, so it
    never binds. resident, alpha: set by hand. memo: k = 2, K = 2c, X = w = 0, any fraction of a
    chunk: exactly Memo's rule,

        max alpha:  (input + attn + alpha*others)/bandwidth <= layer_s
                    (n - 2)*(input + attn + alpha*others) <= host

    Raises ValueError with what is missing.
    """
    c, io, best = chunks, (s.input + s.attn) / GIB, None
    tie = 0 if memo else 1e-4  # seconds a GiB: what need not be pinned and copied stays
    attn, part = s.attn / GIB, s.others / chunks / GIB
    rate, gpu, host = bandwidth / GIB, gpu / GIB, host / GIB
    if memo:
        resident = 2
    if alpha is not None:
        some = [math.ceil(alpha * c)]
    else:
        some = [c] if memo else sorted({round(c * e / 8) for e in range(9)})
    for a in [*some, None]:  # None: nothing is swapped, no buffers
        swap = a is not None
        low, high = (2, n - 1) if swap else (n, n)
        if resident is not None:
            low, high = max(low, resident), min(high, resident)
        if low > high or (not swap and (alpha or memo)):
            continue
        a = a or 0
        if swap and 4 * (io + a * part) > gpu:  # in forward, two layers on their way, and buffers
            continue
        kept = 2 * c if memo else 0
        bounds = Bounds([low, kept, 0, 0, 0],
                        [high, c * n, c * n, 0 if memo else n, 0 if memo else np.inf])
        #                k                K     S     X      w
        rows = np.array([
            [-c, 1, 0, 0, 0],  # K <= c*k
            [a, 0, 1, 0, 0],  # S <= a*(n - k)
            [1, 0, 0, 1, 0],  # X <= n - k
            [io, part, 0, 0, 0],  # GPU
            [-io, 0, part, -attn, 0],  # host
            [-io + rate * s.layer_s, 0, part, -attn, -rate]])  # time
        limits = np.array([0, a * n, n, gpu - 2 * swap * (io + a * part), host - n * io,
                           n * rate * s.layer_s - n * io])
        least = np.full(6, -np.inf)
        if alpha is not None:  # S = alpha*c*(n - k), to the nearest chunk
            rows[1, 0] = alpha * c
            least[1], limits[1] = alpha * c * n - 0.5, alpha * c * n + 0.5
        cost = [-tie * io, -s.others_s / c, -s.others_s / c + tie * part, s.attn_s, 1]
        found = milp(cost, integrality=[int(not memo)] * 4 + [0], bounds=bounds,
                     constraints=LinearConstraint(rows, least, limits))
        if found.x is None:
            continue
        value = found.fun + tie * n * io
        if best is None or value < best[0] - 1e-9:
            best = value, found.x
    if best is None:
        need = (f"layer inputs and attention outputs are {n * io:.1f} GiB a rank, {4 * io:.1f} at "
                "least of them on the GPU (two layers, two buffers)")
        if resident is not None or alpha is not None:
            k, slot = resident or 2, io + (alpha or 0) * c * part
            need = (f"with {k} resident layers and alpha {alpha or 0:g} they take "
                    f"{max(4 * slot, k * io + 2 * slot):.1f} GiB of a GPU and {(n - k) * slot:.1f} "
                    "of the host a rank")
        raise ValueError(
            f"activations do not fit: {need}; there is room for {gpu:.1f} GiB on the GPU and "
            f"{host:.1f} on the host; a larger --sp, --host-memory or --gpu-memory, more ranks, or "
            "a shorter --seq")
    k, kept, swapped, dropped, waits = best[1]
    lost = waits + dropped * s.attn_s + max(0.0, n - (kept + swapped) / c) * s.others_s
    whole = (k, kept, swapped, dropped) if memo else map(round, (k, kept, swapped, dropped))
    return Fates(n, c, *whole), lost


# ---------------------------------------------------------------------------- host memory


def host_slots(sizes: list[int], pin: bool) -> list[Future[Tensor]]:
    """Host memory for the slots, in pieces of so many bytes; page-locked if `pin`, by threads, so
    that other work goes on meanwhile.

    Page faults are what takes the time, so four threads touch and register slots in parallel, in
    huge pages. (PyTorch's own pinned allocator would round up to a power of two.) A copy must not
    cross two registrations, so a slot has one of its own. A result raises MemoryError.
    """
    if not pin:
        slots = [Future() for _ in sizes]
        for slot, size in zip(slots, sizes):
            slot.set_result(torch.empty(size, dtype=torch.uint8))
        return slots
    cudart, device = torch.cuda.cudart(), torch.cuda.current_device()

    def lock(size: int) -> Tensor:
        torch.cuda.set_device(device)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        slot = torch.frombuffer(view, dtype=torch.uint8)
        slot.zero_()
        if error := int(cudart.cudaHostRegister(slot.data_ptr(), size, 0)):
            raise MemoryError(f"pinning {size / GIB:.2f} GiB of host memory failed: CUDA error "
                              f"{error}; lower --host-memory")
        # the call keeps the mapping until it is unregistered
        gone = weakref.finalize(view, lambda at, _: cudart.cudaHostUnregister(at), slot.data_ptr(),
                                memory)
        gone.atexit = False
        return slot

    pool = ThreadPoolExecutor(4)
    slots = [pool.submit(lock, size) for size in sizes]
    pool.shutdown(wait=False)
    return slots


def wait_for_slots(slots: list[Future[Tensor]], sizes: list[int], report=print) -> list[Tensor]:
    """The slots, when all are there; report(text) says now and then how far it is. Raises
    MemoryError."""
    start, total = time.perf_counter(), sum(sizes)
    while missing := [s for s in slots if not s.done()]:
        done = sum(size for slot, size in zip(slots, sizes) if slot.done())
        report(f"waiting for host memory: {done / GIB:.1f} of {total / GIB:.1f} GiB a rank pinned, "
               f"{time.perf_counter() - start:.0f} s", flush=True)
        wait_futures(missing, timeout=5)
    return [slot.result() for slot in slots]


def group_limit() -> int | None:
    """Bytes that the control groups around this process allow, None if they do not say."""
    limits, root = [], Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)  # version 2 has no kinds
        here = (root / "memory" if "memory" in kinds else root) / path.lstrip("/")
        for folder in (here, *here.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((folder / name).read_text()))
    return min((x for x in limits if x < 2**50), default=None)  # version 1: none is a huge number


def host_limit(asked: int | None = None) -> int:
    """Bytes of a node for what is swapped: as asked, or what control groups or the machine allow,
    less an eighth for all else. Raises ValueError if the control groups allow less than asked."""
    allowed = group_limit()
    if asked is not None and allowed and asked > allowed:
        raise ValueError(f"--host-memory {asked / GIB:.0f}G: the control group allows "
                         f"{allowed / GIB:.0f}G, and other things need some of it")
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return (allowed or total) * 7 // 8 if asked is None else asked


Field = tuple[str, tuple[int, ...], torch.dtype]


def span(fields: list[Field]) -> int:
    """Bytes of a slot with these fields."""
    return sum(-(-int(np.prod(shape)) * t.itemsize // ALIGN) * ALIGN for _, shape, t in fields)


def carve(memory: Tensor, fields: list[Field]) -> dict[str, Tensor]:
    """Tensors that lie one after the other in a slot."""
    out, start = {}, 0
    for name, shape, t in fields:
        size = int(np.prod(shape)) * t.itemsize
        out[name] = memory[start : start + size].view(t).view(shape)
        start += -(-size // ALIGN) * ALIGN
    return out


# ---------------------------------------------------------------------------- token-wise backward
# Tokens are (1, N, ...) here and below: torch.compile, which model.py's operators see with (B, T,
# ...), would make every dimension dynamic, and slow, if their number changed.


@compiled
def rms_norm_backward(x: Tensor, weight: Tensor, eps: float, dn: Tensor, dy: Tensor, dx: Tensor):
    """n = norm(x) again (1, N, C) and the gradient of weight (C,). Sets dx, which may be dy, to dy
    + the gradient of x."""
    wide = x.to(accumulation_dtype(x.dtype))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit, dn = wide * r, dn.to(wide.dtype)
    g = dn * weight
    dx.copy_(dy + r * (g - unit * (g * unit).mean(-1, keepdim=True)))
    return (unit * weight).to(x.dtype), (dn * unit).sum((0, 1))


@compiled
def swiglu_backward(gate_up: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    """a = swiglu(gate_up) (1, N, F) again, and the gradient of gate_up (1, N, 2F)."""
    gate, up = gate_up.to(accumulation_dtype(da.dtype)).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    silu = gate * s
    grads = da * up * (s + silu * (1 - s)), da * silu
    return (silu * up).to(da.dtype), torch.cat(grads, dim=-1).to(da.dtype)


@compiled
def unrotate(d: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """The gradient of rotated heads (1, N, h, D) -> out, that of the projection they came from."""
    d1, d2 = d.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # (N, 1, D/2)
    out.copy_(torch.cat((d1 * cos + d2 * sin, d2 * cos - d1 * sin), dim=-1))


# ---------------------------------------------------------------------------- the layers


@dataclass
class Saved:
    """What a layer's backward finds. q, k, v: of the stored chunks' tokens; h, gu: by chunk."""

    x: Tensor  # (1, N, C)
    o: Tensor | None  # (1, N, H, D); None: dropped
    lse: Tensor | None
    qkv: list[Tensor] = field(default_factory=list)
    h: list[Tensor] = field(default_factory=list)
    gu: list[Tensor] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.x, self.o, self.lse, *self.qkv, *self.h, *self.gu)
                if t is not None]


class _Layer(Function):
    @staticmethod
    def forward(ctx, x, cos, sin, layers, i):
        ctx.layers, ctx.i, ctx.rope = layers, i, (cos, sin)
        return layers.forward(i, x, (cos, sin), keep=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.layers.backward(ctx.i, dy, ctx.rope), None, None, None, None


class Layers:
    """Runs a model's layers as `fates` say; model.run is this object.

    model: its matrices belong to shard.States (pieces = the number of chunks, recompute = True),
    which takes their gradients. shape: (B, T) on this rank; chunk: tokens. poison, delay: for
    tests; what was used becomes NaN, and copies start so many GPU cycles late.
    """

    def __init__(self, model: LLaMA, shape: tuple[int, int], fates: Fates, chunk: int,
                 device: torch.device, dtype: torch.dtype, poison: bool = False, delay: int = 0):
        self.blocks, self.attention, self.cfg = model.blocks, model.attention, model.cfg
        self.heads = self.cfg.heads, self.cfg.kv_heads, self.cfg.kv_heads  # of q, k, v
        self.batch, self.tokens, self.fates = shape[0], shape[0] * shape[1], fates
        self.chunks = [slice(i, min(i + chunk, self.tokens)) for i in range(0, self.tokens, chunk)]
        assert len(self.chunks) == fates.chunks and len(self.blocks) == fates.layers
        assert fates.resident >= min(2, fates.layers), "the last two layers start their backward"
        self.device, self.dtype, self.poison, self.delay = device, dtype, poison, delay
        self.out, self.back = Lane(device, True), Lane(device, True)
        swapped = [i for i in range(fates.layers) if fates.swaps(i)]
        self.last_swapped = max(swapped, default=-1)
        sizes = self.slot_sizes = [span(self.fields(i)) for i in swapped]
        self.coming, self.slots = host_slots(sizes, device.type == "cuda"), []
        self.buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device)
                        for _ in swapped[:2]]
        self.nan = torch.full_like(self.buffers[0], 255) if poison and swapped else None
        self.alive: dict[int, Saved] = {}  # of resident layers, and of those on their way out
        self.offloaded: dict[int, object] = {}  # layer: event, it is on the host
        self.fetched: dict[int, object] = {}  # layer: event, its slot was read
        self.here: set[int] = set()  # layers that are in a rounding buffer, or on their way in
        self.rope: tuple[Tensor, Tensor] | None = None  # for N tokens, in this pass
        model.run = self

    def wait_for_slots(self, report=print) -> None:
        """The host memory was asked for when this object was made; a pass needs all of it. Raises
        MemoryError."""
        self.slots = wait_for_slots(self.coming, self.slot_sizes, report)
        self.coming = []

    def fields(self, i: int) -> list[Field]:
        """What the slot of a swapped layer holds."""
        cfg, stored = self.cfg, self.fates.stored(i)
        m = self.chunks[stored - 1].stop if stored else 0
        fields = [("x", (1, self.tokens, cfg.dim), self.dtype)]
        if i >= self.fates.dropped:
            fields += [("o", (1, self.tokens, cfg.heads, cfg.head_dim), self.dtype),
                       ("lse", (self.tokens * cfg.heads,), accumulation_dtype(self.dtype))]
        fields += [(name, (1, m, n, cfg.head_dim), self.dtype)
                   for name, n in zip("qkv", self.heads)]
        wide = (("h", cfg.dim), ("gu", 2 * cfg.ffn))
        return fields + [(name, (1, m, n), self.dtype) for name, n in wide]

    def __call__(self, i: int, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Layer i: x (B, T, C), rope (T, D/2) each -> y (B, T, C)."""
        if self.coming:
            self.wait_for_slots()
        if i == 0:
            self.rope = tuple(t.repeat(self.batch, 1) for t in rope) if self.batch > 1 else rope
        rope = self.rope
        if torch.is_grad_enabled():
            return _Layer.apply(x, *rope, self, i)
        return self.forward(i, x, rope, keep=False)

    # -- one layer

    def _project(self, block: Block, x: Tensor, rope, stored: list[Tensor] = ()) -> list[Tensor]:
        """q (1, N, H, D), k, v (1, N, K, D); stored: those of the first tokens, if any."""
        if len(self.chunks) == 1:  # nothing to put together
            return list(block.pre(x, rope))
        first = stored[0].shape[1] if stored else 0
        out = [x.new_empty(1, self.tokens, n, self.cfg.head_dim) for n in self.heads]
        for whole, part in zip(out, stored):
            whole[:, :first] = part
        for c in self.chunks:
            if c.start >= first:
                for whole, part in zip(out, block.pre(x[:, c], (rope[0][c], rope[1][c]))):
                    whole[:, c] = part
        return out

    def _attend(self, qkv: list[Tensor]) -> tuple[Tensor, Tensor]:
        o, lse = self.attention.forward(*(self._split(t) for t in qkv))
        return self._join(o), lse

    def _split(self, t: Tensor) -> Tensor:
        """(1, N, ...) -> (B, T, ...)"""
        return t.unflatten(1, (self.batch, -1))[0]

    @staticmethod
    def _join(t: Tensor) -> Tensor:
        """(B, T, ...) -> (1, N, ...)"""
        return t.flatten(0, 1)[None]

    def forward(self, i: int, x: Tensor, rope, keep: bool) -> Tensor:
        block, shape, x = self.blocks[i], x.shape, self._join(x)
        stored = self.fates.stored(i) if keep else 0
        if keep:
            self._leave(i - 2)
        qkv = self._project(block, x, rope)
        o, lse = self._attend(qkv)
        saved, y = Saved(x, o, lse), torch.empty_like(x)
        for j, c in enumerate(self.chunks):
            h, n = add_rms_norm(x[:, c], block.out(o[:, c].flatten(2)), block.norm2.weight,
                                self.cfg.norm_eps)
            gu = block.gate_up(n)
            torch.add(h, block.down(swiglu(gu)), out=y[:, c])
            if j < stored:
                saved.h.append(h)
                saved.gu.append(gu)
        if keep:
            m = self.chunks[stored - 1].stop if stored else 0
            # a part alone must not hold the memory of the whole
            saved.qkv = qkv if m == self.tokens else [t[:, :m].clone() for t in qkv]
            self.alive[i] = saved
            if self.fates.swaps(i):
                self._offload(i, saved)
        return y.view(shape)

    def backward(self, i: int, dy: Tensor, rope) -> Tensor:
        """dy (B, T, C) -> dx (B, T, C); the weights' gradients go where their events say."""
        block, shape, dy, eps = self.blocks[i], dy.shape, self._join(dy), self.cfg.norm_eps
        saved, stored = self._fetch(i), self.fates.stored(i)
        x, o, lse, qkv = saved.x, saved.o, saved.lse, saved.qkv
        if stored < len(self.chunks):
            qkv = self._project(block, x, rope, saved.qkv)
        if o is None:
            o, lse = self._attend(qkv)
        inputs = [self._split(t) for t in (*qkv, o)]
        self.attention.ahead(*inputs)
        dx, do = torch.empty_like(x), o.new_empty(1, self.tokens, o.shape[2] * o.shape[3])
        for j, c in enumerate(self.chunks):  # post
            if j < stored:
                h, gu = saved.h[j], saved.gu[j]
            else:
                h, n = add_rms_norm(x[:, c], block.out(o[:, c].flatten(2)), block.norm2.weight, eps)
                gu = block.gate_up(n)
                del n
            a, dgu = swiglu_backward(gu, input_grad(block.down, dy[:, c]))
            dn, dh = input_grad(block.gate_up, dgu), dx[:, c]
            n, dweight = rms_norm_backward(h, block.norm2.weight, eps, dn, dy[:, c], dh)
            block.norm2.weight.grad += dweight
            input_grad(block.out, dh, out=do[:, c])
            if last := j == len(self.chunks) - 1:  # on its way under the products of the weights
                self.attention.ahead(self._split(do.view(o.shape)))
            weight_grad(block.down, dy[:, c], a)
            weight_grad(block.gate_up, dgu, n)
            late = functools.partial(weight_grad, block.out, dh, o[:, c].flatten(2))
            None if last else late()
        del dy, h, gu, a, dgu, dn, n, dh
        do = self._split(do.view(o.shape))
        grads = [self._join(t) for t in self.attention.backward(do, *inputs, lse, late)]
        del do, o, qkv, inputs, late
        for c in self.chunks:  # pre
            dqkv = x.new_empty(1, c.stop - c.start, sum(self.heads) * self.cfg.head_dim)
            parts = dqkv.unflatten(2, (-1, self.cfg.head_dim)).split(self.heads, 2)
            for d, part in zip(grads[:2], parts):
                unrotate(d[:, c], rope[0][c], rope[1][c], part)
            move(grads[2][:, c], parts[2])
            dn, dy = input_grad(block.qkv, dqkv), dx[:, c]
            n, dweight = rms_norm_backward(x[:, c], block.norm1.weight, eps, dn, dy, dy)
            weight_grad(block.qkv, dqkv, n)
            block.norm1.weight.grad += dweight
        self._used(i, saved)
        return dx.view(shape)

    # -- copies

    def _offload(self, i: int, saved: Saved) -> None:
        """Launch the way to the host of what a layer's forward has left."""
        with self.out.after_compute():  # which waited for the slot's last prefetch, in _fetch
            self._late(self.out)
            slot = carve(self.slots[i], self.fields(i))
            for name, t in zip(("x", "o", "lse", *"qkv"), (saved.x, saved.o, saved.lse,
                                                           *saved.qkv)):
                if name in slot:
                    slot[name].view(-1).copy_(t.reshape(-1), non_blocking=True)
            for c, h, gu in zip(self.chunks, saved.h, saved.gu):
                slot["h"][:, c].copy_(h, non_blocking=True)
                slot["gu"][:, c].copy_(gu, non_blocking=True)
            self.lse_shape = saved.lse.shape
        self.offloaded[i] = self.out.mark()

    def _leave(self, i: int) -> None:
        """Give back the memory of a layer that is on its way to the host, once it is there."""
        if i in self.alive and self.fates.swaps(i):
            wait(self.offloaded[i])
            saved = self.alive.pop(i)
            for t in saved.tensors() if self.poison else []:
                t.fill_(torch.nan)

    def _prefetch(self, i: int) -> None:
        """Launch the way back of layer i, into the buffer that layer i + 2 is done with."""
        if i < 0 or i in self.here:
            return
        self.here.add(i)
        slot = self.slots[i]
        with self.back.after_compute():  # which waited for the slot to be filled, in _leave
            self._late(self.back)
            self.buffers[i % 2][: len(slot)].copy_(slot, non_blocking=True)
            if self.poison:
                slot.copy_(self.nan[: len(slot)], non_blocking=True)
        self.fetched[i] = self.back.mark()

    def _fetch(self, i: int) -> Saved:
        """What layer i has kept, on the device; and the next layer's way back begins."""
        ahead = (self.last_swapped, self.last_swapped - 1) if i > self.last_swapped else (i - 1,)
        for j in ahead:
            self._prefetch(j)
        if not self.fates.swaps(i):
            return self.alive.pop(i)
        wait(self.fetched[i])
        t = carve(self.buffers[i % 2], self.fields(i))
        stored = self.chunks[: self.fates.stored(i)]
        o, lse = t.get("o"), t["lse"].view(self.lse_shape) if "lse" in t else None
        return Saved(t["x"], o, lse, [t[name] for name in "qkv"], [t["h"][:, c] for c in stored],
                     [t["gu"][:, c] for c in stored])

    def _used(self, i: int, saved: Saved) -> None:
        self.here.discard(i)
        for t in saved.tensors() if self.poison else []:
            t.fill_(torch.nan)

    def _late(self, lane: Lane) -> None:
        if self.delay and lane.stream:
            torch.cuda._sleep(self.delay)


# ---------------------------------------------------------------------------- measurements


def repeated_share(cfg: ModelConfig) -> float:
    """Of a layer's matrix products, those that recomputing its others takes: all but the last."""
    layer = (param_count(cfg) - 2 * cfg.vocab * cfg.dim) / cfg.layers
    return 1 - cfg.dim * cfg.ffn / layer


def measure(cfg: ModelConfig, attention: Attention, shape: tuple[int, int], chunk: int,
            device: torch.device, dtype: torch.dtype) -> tuple[Sizes, float]:
    """A layer's forward on this machine, timed part by part, and the bytes/s to the host with all
    ranks copying at once. shape: (B, T) of this rank. A collective of all ranks; needs the memory
    of a layer."""
    n = shape[0] * shape[1]
    with torch.device(device):
        block = Block(cfg).to(dtype)
    for p in block.parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    c = min(chunk, n)
    x = torch.randn(1, c, cfg.dim, device=device).to(dtype)
    rope = rope_tables(cfg, torch.arange(c, device=device), accumulation_dtype(dtype))
    o = torch.randn(1, c, cfg.heads, cfg.head_dim, device=device).to(dtype)
    q = torch.randn(*shape, cfg.heads, cfg.head_dim, device=device).to(dtype)
    kv = torch.randn(*shape, cfg.kv_heads, cfg.head_dim, device=device).to(dtype)

    def seconds(fn, repeats: int) -> float:
        """Of one call, on the slowest rank."""
        times = []
        for _ in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            fn()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(min(times[1:]), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    with torch.no_grad():
        tokenwise = (seconds(lambda: block.pre(x, rope), 3) + seconds(lambda: block.post(x, o), 3))
        attn = seconds(lambda: attention.forward(q, kv, kv), 1)
    tokenwise *= n / c
    size = 2**28 if device.type == "cuda" else 2**22
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rate = size / seconds(lambda: there.copy_(here, non_blocking=True), 3)
    others = tokenwise * repeated_share(cfg)
    return Sizes(*layer_bytes(cfg, n, dtype), tokenwise + attn, others, attn), rate
