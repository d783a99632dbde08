"""What does a layer keep for its backward? Tokens that stay, are swapped, or are recomputed.

A layer is token-wise but for attention, so block.pre and block.post run in chunks of tokens. What
autograd saves of a chunk beside the layer's input x and attention output o, its *intermediates*
(q, k, v; of model.Block also the residual stream after attention, and gate|up), is treated in one
of three ways:

    keep        it stays on the GPU                       the last k layers, as far as it has room
    swap        it goes to pinned host memory and back    the other layers, a fraction alpha
    recompute   pre and post run again on the chunk, from x and o

x, o and the log-sum-exp always come back, from the GPU in the last k layers, from the host in the
others, so attention runs once (Memo, arXiv 2407.12117, section 4.1). Where even these do not fit,

    drop x    of all but every m-th layer, and all intermediates: backward makes the inputs of a
              group of m layers again, each from the layer before it, x' = post(x, o), which is
              token-wise work alone
    drop o    of the first X layers, whose attention runs twice: the last resort

Two rounding buffers receive what is prefetched, a group of layers each (m = 1: a layer): group g
uses buffer g mod 2, which may be overwritten once compute is done with group g + 2; a host buffer
may be once the backward that read it last has waited for its prefetch_done.

    forward   compute  | layer i        | layer i+1      | layer i+2        frees what layer i had
              offload  |                | i -> host      | i+1 -> host
    backward  compute  | layer i+2      | layer i+1      | layer i
              prefetch | i+1 -> buffer  | i -> buffer    | i-1 -> buffer    when i+1 is done with it

Nothing here knows what a block computes: saved_tensors_hooks give each tensor that autograd saves
its place (SavedLayer), so whoever changes model.Block changes it there alone. planner.py decides
how much is kept and swapped (ActivationPlan).

Left out: swapping to disk, and layers of different shapes.

Legend: B sequences, T tokens of one on a rank, N = B*T, n layers, k resident layers, m layers a
group (`stride`), g a group of layers, c chunks of a layer, C width, H query heads, K key/value
heads, D head width; i a layer, j a chunk of it, *saved*: kept or swapped.
"""
import contextlib
import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import model as llama
from attention import Attention, CommStream, wait
from model import (LLaMA, Matrix, ModelConfig, accumulation_dtype, deferred_weight_grads,
                   recomputation)
from ranks import print0

GIB = 2**30
HOST_ALIGN_BYTES = 512  # where a tensor starts in a host buffer

# ---------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class ActivationPlan:
    """How the chunks of all layers are treated."""

    layers: int  # n
    chunks: int  # c of a layer
    resident: int  # k: the last layers, which leave nothing on the host
    kept_chunks: int = 0  # that stay, over all resident layers, from the last layer on
    swapped_chunks: int = 0  # over all other layers, evenly
    layers_recomputing_attention: int = 0  # X, the first ones: they drop o
    stride: int = 1  # m: every m-th layer keeps its input x; if not all do, no intermediates stay

    def keeps_input(self, i: int) -> bool:
        return i % self.stride == 0

    def keeps_output(self, i: int) -> bool:
        """Return whether layer i keeps attention's output o and the log-sum-exp."""
        return i >= self.layers_recomputing_attention

    @property
    def alpha(self) -> float:
        """Return Memo's alpha: the swapped fraction of the intermediates of swapped layers."""
        return self.swapped_chunks / (self.chunks * max(1, self.layers - self.resident))

    def swaps(self, i: int) -> bool:
        """Return whether layer i goes to the host."""
        return i < self.layers - self.resident

    def num_saved_chunks(self, i: int) -> int:
        """Return how many of layer i's chunks are not recomputed: the first ones."""
        if not self.swaps(i):
            behind = (self.layers - 1 - i) * self.chunks
            return min(self.chunks, max(0, self.kept_chunks - behind))
        swapped_layers = self.layers - self.resident
        before = i * self.swapped_chunks // swapped_layers
        return (i + 1) * self.swapped_chunks // swapped_layers - before

    def of_part(self, layers: int) -> "ActivationPlan":
        """Return the same for a part of a model with fewer layers: fewer of them leave."""
        resident = min(self.resident, layers)
        resident += (layers - resident) % self.stride
        away = layers - resident
        return replace(
            self, layers=layers, resident=resident,
            kept_chunks=min(self.kept_chunks, resident * self.chunks),
            swapped_chunks=self.swapped_chunks * away // max(1, self.layers - self.resident),
            layers_recomputing_attention=min(self.layers_recomputing_attention, layers))

    def most_swapped_chunks(self) -> int:
        """Return how many chunks a rounding buffer must hold."""
        return max((self.num_saved_chunks(i) for i in range(self.layers) if self.swaps(i)),
                   default=0)

    def describe(self) -> str:
        share = self.kept_chunks / (self.chunks * max(1, self.resident))
        text = (f"{self.resident} of {self.layers} layers resident, {share:.0%} of their "
                f"intermediates kept; alpha {self.alpha:.3f} of the other layers; {self.chunks} "
                "chunks a layer")
        if self.stride > 1:
            text += f"; one layer in {self.stride} keeps its input, the others' are made again"
        if self.layers_recomputing_attention:
            text += f"; ATTENTION RUNS TWICE in {self.layers_recomputing_attention} layers"
        return text


# ---------------------------------------------------------------------------- what a block saves


class _ChunkInput(Function):
    """An input of a chunk's graph, whose memory the graph does not hold. Its gradient goes to
    grads[index]. root: any tensor that requires gradients, so that the graph is made."""

    @staticmethod
    def forward(ctx, root, x, grads, index):
        ctx.grads = grads
        ctx.index = index
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        ctx.grads[ctx.index] = dx
        return None, None, None, None


class ChunkGraph:
    """The autograd graph of one chunk's pass through block.pre or block.post (or of a micro-batch's
    through a part of the model: parallel.py). It holds what autograd saves, and neither inputs nor
    outputs."""

    def __init__(self, input_grads: list[Tensor | None], outputs: tuple[Tensor, ...]):
        self.input_grads = input_grads
        self.edges = [torch.autograd.graph.get_gradient_edge(y) for y in outputs]

    @classmethod
    def run(cls, root: Tensor, fn: Callable, *inputs: Tensor):
        """Return the graph of fn(*inputs), and its outputs."""
        grads: list[Tensor | None] = [None] * len(inputs)
        with torch.enable_grad():
            outputs = fn(*(_ChunkInput.apply(root, x, grads, index)
                           for index, x in enumerate(inputs)))
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return cls(grads, outputs), [y.detach() for y in outputs]

    def backward(self, output_grads: tuple[Tensor, ...], *inputs: Tensor) -> list[Tensor]:
        """Return the gradients of the inputs, which are given for their shapes; those of weights go
        where their events say."""
        torch.autograd.backward(self.edges, output_grads)
        return [torch.zeros_like(x) if dx is None else dx  # a block need not use all of them
                for dx, x in zip(self.input_grads, inputs)]


def memory_of(t: Tensor) -> int:
    """Return what two tensors have in common if they lie in the same memory."""
    return t.untyped_storage()._cdata


def same_view(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    return (memory_of(a) == memory_of(b) and a.dtype == b.dtype and a.shape == b.shape
            and a.stride() == b.stride() and a.storage_offset() == b.storage_offset())


@dataclass(frozen=True)
class PartOf:
    """A saved tensor that is a view of the layer's x or o: it is held once."""

    name: str  # x or o
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedLayer:
    """What a layer's backward finds: tensors, which may leave for the host and come back, and the
    graphs of saved chunks, which find their tensors here."""

    def __init__(self, x: Tensor, held_anyway: list[Tensor], num_chunks: int):
        """held_anyway: parameters, buffers and angles, which need no place of their own."""
        self.x: Tensor | None = x  # (1, N, C)
        self.o: Tensor | None = None  # (1, N, H, D); None: dropped
        self.lse: Tensor | None = None
        self.lse_shape: torch.Size | None = None  # attention's own, which the host buffer forgets
        self.qkv: list[Tensor] = []  # (1, tokens of saved chunks, heads, D)
        self.intermediates: list[list[Tensor]] = [[] for _ in range(num_chunks)]  # by chunk
        self.pre_graphs: list[ChunkGraph | None] = []  # of saved chunks, then of recomputed ones
        self.post_graphs: list[ChunkGraph | None] = []
        self.held_anyway = {memory_of(t) for t in held_anyway}

    def tensors(self) -> list[Tensor]:
        intermediates = [t for of_chunk in self.intermediates for t in of_chunk]
        return [t for t in (self.x, self.o, self.lse, *self.qkv, *intermediates) if t is not None]

    def leave(self) -> None:
        """Let go of all tensors: they are on the host."""
        self.x = self.o = self.lse = None
        self.qkv = []
        self.intermediates = []

    @contextlib.contextmanager
    def saving(self, j: int):
        """Make the graph of saved chunk j inside: what autograd saves finds its place here."""
        layer = weakref.proxy(self)  # which holds the graph: a cycle through C++ is never collected
        originals: dict[int, Tensor] = {}  # of intermediates: while they live, memory is not reused

        def pack(t: Tensor):
            if memory_of(t) in layer.held_anyway:
                return t
            for name in ("x", "o"):
                whole = getattr(layer, name)
                if whole is not None and memory_of(whole) == memory_of(t) and (
                        whole.dtype == t.dtype):
                    offset = t.storage_offset() - whole.storage_offset()
                    return PartOf(name, offset, t.shape, t.stride())
            for index, original in originals.items():
                if same_view(original, t):
                    return index
            index = len(layer.intermediates[j])
            originals[index] = t.detach()
            # a part must not hold the whole's memory; what comes back is contiguous
            if t.nbytes < t.untyped_storage().nbytes() or not t.is_contiguous():
                t = t.clone(memory_format=torch.contiguous_format)
            layer.intermediates[j].append(t.detach())  # without the graph that made it
            return index

        def unpack(place) -> Tensor:
            if isinstance(place, Tensor):
                return place
            if isinstance(place, PartOf):
                whole = getattr(layer, place.name)
                return whole.as_strided(place.shape, place.stride,
                                        whole.storage_offset() + place.offset)
            return layer.intermediates[j][place]

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            originals.clear()


@dataclass(frozen=True)
class BlockSaves:
    """What autograd saves of a chunk beside x, o, q, k, v, as (shape, dtype): found by running a
    block, not by a formula."""

    pre: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    post: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    final_matrix: str | None  # whose product ends block.post and is not needed to recompute it

    def bytes(self) -> int:
        fields = self.pre + self.post
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields)


def block_saves(cfg: ModelConfig, tokens: int, dtype: torch.dtype,
                block: llama.Block | None = None) -> BlockSaves:
    """Return what a chunk of so many tokens saves: model.Block runs on meta tensors, without memory
    and in no time. block: one of its class does, with as much of each matrix."""
    cuts = tuple(matrix.part for matrix in matrices_of(block)) if block else ()
    return _block_saves(type(block) if block else llama.Block, cfg, cuts, tokens, dtype)


def matrices_of(block: torch.nn.Module) -> list[Matrix]:
    return [module for module in block.modules() if isinstance(module, Matrix)]


@functools.cache
def _block_saves(block_class, cfg: ModelConfig, cuts: tuple, tokens: int,
                 dtype: torch.dtype) -> BlockSaves:
    accum_dtype = accumulation_dtype(dtype)
    with torch.device("meta"), torch.utils._python_dispatch._disable_current_modes():
        block = block_class(cfg)
        for matrix, part in zip(matrices_of(block), cuts):
            if part is not None:
                matrix.take(part)
        for p in block.parameters():
            p.data = p.data.to(dtype if p.dim() > 1 else accum_dtype)
        rope = llama.rope_tables(cfg, torch.arange(tokens, device="meta"), accum_dtype)
        x = torch.empty(1, tokens, cfg.dim, dtype=dtype)
        saved = SavedLayer(x, [*rope, *block.parameters(), *block.buffers()], 2)
        root = torch.zeros((), requires_grad=True)
        with saved.saving(0):
            _graph, qkv = ChunkGraph.run(root, lambda x: block.pre(x, rope), x)
        saved.o = torch.empty_like(qkv[0])
        with saved.saving(1), torch.enable_grad():
            inputs = (_ChunkInput.apply(root, t, [None, None], 0) for t in (x, saved.o))
            final = llama.final_matrix(block.post(*inputs))
    names = {module: name for name, module in block.named_modules()}
    pre, post = (tuple((tuple(t.shape), t.dtype) for t in part) for part in saved.intermediates)
    return BlockSaves(pre, post, names.get(final))


def unneeded_matrix(block: llama.Block, dtype: torch.dtype) -> torch.nn.Module | None:
    """Return the matrix whose product a recomputed block.post leaves out, if there is one."""
    name = block_saves(block.cfg, 1, dtype, block).final_matrix
    return block.get_submodule(name) if name else None


# ---------------------------------------------------------------------------- host memory

def pin_host_buffers(sizes: list[int], pin: bool) -> list[Tensor]:
    """Return host buffers of so many bytes, of zeros, page-locked if `pin`. Raises MemoryError.

    Page faults are what takes the time: huge pages have fewer, and threads, as many as cores, touch
    buffers in parallel. (PyTorch's own pinned allocator would round up to a power of two.) A copy
    must not cross two registrations, so a buffer has one of its own.
    """
    if not pin:
        return [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    cudart = torch.cuda.cudart()
    device = torch.cuda.current_device()

    def lock(size: int) -> Tensor:
        if not size:  # nothing to map: a rank that saves nothing
            return torch.empty(0, dtype=torch.uint8)
        torch.cuda.set_device(device)  # of this thread
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # before a page is touched
        view = memoryview(memory)
        buffer = torch.frombuffer(view, dtype=torch.uint8)
        buffer.zero_()
        error = int(cudart.cudaHostRegister(buffer.data_ptr(), size, 0))
        if error:
            raise MemoryError(f"pinning {size / GIB:.2f} of {sum(sizes) / GIB:.2f} GiB of host "
                              f"memory failed: CUDA error {error}; lower --host-memory")
        # the call keeps the mapping until it is unregistered
        gone = weakref.finalize(view, lambda address, _: cudart.cudaHostUnregister(address),
                                buffer.data_ptr(), memory)
        gone.atexit = False
        return buffer

    if sum(sizes) > 8 * GIB:
        print0(f"pinning {sum(sizes) / GIB:.0f} GiB of host memory a rank")
    threads = min(len(sizes), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return list(pool.map(lock, sizes))


Field = tuple[str, tuple[int, ...], torch.dtype]


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // HOST_ALIGN_BYTES) * HOST_ALIGN_BYTES


def buffer_bytes(fields: list[Field]) -> int:
    """Return the bytes of a buffer with these fields."""
    return sum(aligned_bytes(shape, dtype) for _, shape, dtype in fields)


def carve(memory: Tensor, fields: list[Field]) -> dict[str, Tensor]:
    """Return tensors that lie one after the other in a buffer of bytes."""
    tensors = {}
    start = 0
    for name, shape, dtype in fields:
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += aligned_bytes(shape, dtype)
    return tensors


# ---------------------------------------------------------------------------- the layers
# Tokens are (1, N, ...) here: a chunk of them is contiguous, whatever B is.


class MicroBatch:
    """One micro-batch's way through the layers, forward and back. Several may be in flight, if
    ChunkedLayers has host buffers for so many."""

    def __init__(self, layers: "ChunkedLayers", rope: tuple[Tensor, Tensor],
                 attention: Attention, host_buffers: list[Tensor]):
        self.layers = layers
        self.rope = rope  # cos, sin (N, D/2)
        self.attention = attention
        self.host_buffers = host_buffers  # by layer
        self.saved: dict[int, SavedLayer] = {}  # from a layer's forward to its backward
        self.offload_done: dict[int, object] = {}  # layer: event, its tensors are on the host
        self.prefetch_done: dict[int, object] = {}  # group: event, its host buffers were read
        self.prefetched: set[int] = set()  # groups in a rounding buffer, or on their way into it
        self.entered: int | None = None  # the group in which backward is
        self.finished = False  # its last backward is done: its host buffers are free

    def run_layer(self, i: int, x: Tensor) -> Tensor:
        """Layer i of the model: x (B, T, C) -> y (B, T, C)."""
        i -= self.layers.first
        if torch.is_grad_enabled():
            return _ChunkedLayer.apply(self.layers.root, x, self, i)
        return self.layers.forward(self, i, x, needs_backward=False)

    def rope_of(self, chunk: slice) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope
        return cos[chunk], sin[chunk]


class _ChunkedLayer(Function):
    @staticmethod
    def forward(ctx, root, x, micro_batch, i):  # root requires gradients, if x should not
        ctx.micro_batch = micro_batch
        ctx.i = i
        return micro_batch.layers.forward(micro_batch, i, x, needs_backward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return None, ctx.micro_batch.layers.backward(ctx.micro_batch, ctx.i, dy), None, None


class ChunkedLayers:
    """Runs a model's layers in chunks of tokens, as `plan` says: its layer_runner.

    shape: (B, T) on this rank; chunk_tokens: the most of a chunk. in_flight: micro-batches whose
    backward is due at the same time; each has host buffers of its own. layers: of the model, all by
    default. make_stream: as CommStream. model.attention: an attention.Attention. Raises MemoryError
    if there is no host memory.
    """

    def __init__(self, model: LLaMA, shape: tuple[int, int], plan: ActivationPlan,
                 chunk_tokens: int, device: torch.device, dtype: torch.dtype, in_flight: int = 1,
                 layers: range | None = None,
                 make_stream: Callable[..., CommStream] = CommStream):
        layers = range(len(model.blocks)) if layers is None else layers
        self.first = layers.start
        self.blocks = model.blocks[layers.start : layers.stop]
        self.cfg = model.cfg
        self.batch_size = shape[0]
        self.tokens = shape[0] * shape[1]
        self.plan = plan
        self.chunks = [slice(first, min(first + chunk_tokens, self.tokens))
                       for first in range(0, self.tokens, chunk_tokens)]
        assert len(self.chunks) == plan.chunks, f"{len(self.chunks)} chunks, planned {plan.chunks}"
        assert len(self.blocks) == plan.layers, f"{len(self.blocks)} layers, planned {plan.layers}"
        assert plan.resident >= min(2, plan.layers), "the last two layers start their backward"
        swapped = plan.layers - plan.resident
        assert swapped % plan.stride == 0, f"{swapped} swapped layers are whole groups"
        intermediates = plan.kept_chunks + plan.swapped_chunks
        assert plan.stride == 1 or not intermediates, "what needs x is made again with it"
        self.device = device
        self.dtype = dtype
        self.offload_stream = make_stream(device)
        self.prefetch_stream = make_stream(device)
        self.root = torch.zeros((), device=device, requires_grad=True)  # of all chunks' graphs
        sizes = [buffer_bytes(self.fields(i)) for i in range(swapped)]
        self.last_swapped = swapped // plan.stride - 1  # group
        # of one micro-batch after the other
        self.host_buffers = pin_host_buffers(in_flight * sizes, device.type == "cuda")
        groups = [sum(sizes[i : i + plan.stride]) for i in range(0, swapped, plan.stride)]
        self.rounding_buffers = [
            torch.empty(max(groups), dtype=torch.uint8, device=device) for _ in groups[:2]]
        self.in_flight = in_flight
        self.owners: list = [None] * in_flight  # weak references: who holds which host buffers
        model.layer_runner = self.start

    def fields(self, i: int) -> list[Field]:
        """Return what the host buffer of a swapped layer holds."""
        cfg = self.cfg
        heads = self.blocks[i].heads
        saved_chunks = self.chunks[: self.plan.num_saved_chunks(i)]
        saved_tokens = saved_chunks[-1].stop if saved_chunks else 0
        fields = []
        if self.plan.keeps_input(i):
            fields.append(("x", (1, self.tokens, cfg.dim), self.dtype))
        if self.plan.keeps_output(i):
            fields.append(("o", (1, self.tokens, heads[0], cfg.head_dim), self.dtype))
            fields.append(("lse", (self.tokens * heads[0],), accumulation_dtype(self.dtype)))
        for name, n in zip("qkv", heads):
            fields.append((name, (1, saved_tokens, n, cfg.head_dim), self.dtype))
        for j, chunk in enumerate(saved_chunks):
            saves = block_saves(cfg, chunk.stop - chunk.start, self.dtype, self.blocks[i])
            for index, (shape, dtype) in enumerate(saves.pre + saves.post):
                fields.append((f"{j}.{index}", shape, dtype))
        return fields

    def start(self, model: LLaMA, rope: tuple[Tensor, Tensor],
              attention: Attention) -> Callable[[int, Tensor], Tensor]:
        """Begin a forward pass: rope (T, D/2) each, or (B, T, D/2). Returns run_layer."""
        # (N, D/2)
        rope = tuple(angles.expand(self.batch_size, -1, -1).flatten(0, 1) for angles in rope)
        micro_batch = MicroBatch(self, rope, attention, [])
        if torch.is_grad_enabled() and self.host_buffers:
            place = self.free_place()
            self.owners[place] = weakref.ref(micro_batch)
            count = len(self.host_buffers) // self.in_flight
            micro_batch.host_buffers = self.host_buffers[place * count : (place + 1) * count]
        return micro_batch.run_layer

    def free_place(self) -> int:
        """Return whose host buffers no micro-batch needs: its backward is done, or it is gone.
        Raises RuntimeError if all wait for their backward."""
        for place, owner in enumerate(self.owners):
            micro_batch = owner() if owner else None
            if micro_batch is None or micro_batch.finished:
                return place
        raise RuntimeError(f"{self.in_flight} forward passes wait for their backward, and there "
                           f"are host buffers for in_flight={self.in_flight}: run a backward first")

    # -- shapes

    def split(self, t: Tensor) -> Tensor:
        """(1, N, ...) -> (B, T, ...)"""
        return t.unflatten(1, (self.batch_size, -1))[0]

    @staticmethod
    def join(t: Tensor) -> Tensor:
        """(B, T, ...) -> (1, N, ...), contiguous, as it comes back from the host."""
        return t.flatten(0, 1)[None].contiguous()

    def put(self, whole: Tensor | None, chunk: slice, part: Tensor) -> Tensor:
        """Copy a chunk's part (1, n, ...) into the tensor of all tokens, which the first part
        makes. Of a single chunk the part is the whole."""
        if len(self.chunks) == 1:
            return part
        if whole is None:
            whole = part.new_empty(1, self.tokens, *part.shape[2:])
        whole[:, chunk] = part
        return whole

    # -- one layer

    def forward(self, micro_batch: MicroBatch, i: int, x: Tensor, needs_backward: bool) -> Tensor:
        """x (B, T, C) -> y (B, T, C). needs_backward: one follows."""
        block = self.blocks[i]
        shape = x.shape
        x = self.join(x.detach())
        num_saved = 0
        if needs_backward:
            num_saved = self.plan.num_saved_chunks(i)
            self.free_offloaded(micro_batch, i - 2)
        held_anyway = [*micro_batch.rope, *block.parameters(), *block.buffers()]
        saved = SavedLayer(x, held_anyway, num_saved)
        qkv = self.attend(i, micro_batch, saved, num_saved)
        y = self.output(block, saved, num_saved)
        if needs_backward:
            saved_tokens = self.chunks[num_saved - 1].stop if num_saved else 0
            if saved_tokens < self.tokens:  # a part alone must not hold the memory of the whole
                qkv = [t[:, :saved_tokens].clone() for t in qkv]
            saved.qkv = qkv
            micro_batch.saved[i] = saved
            saved.lse_shape = saved.lse.shape
            if not self.plan.keeps_input(i):
                saved.x = None
            if not self.plan.keeps_output(i):
                saved.o = saved.lse = None
            if self.plan.swaps(i):
                self.offload(micro_batch, i)
        return y.view(shape)

    def attend(self, i: int, micro_batch: MicroBatch, saved: SavedLayer,
               num_saved: int = 0) -> list[Tensor]:
        """Set o (1, N, H, D) and lse of saved.x. Returns q, k, v (1, N, heads, D), which leave the
        graphs of saved chunks."""
        qkv = self.project(self.blocks[i], micro_batch, saved, num_saved)
        o, saved.lse = micro_batch.attention.forward(*(self.split(t) for t in qkv))
        saved.o = self.join(o)
        return qkv

    def project(self, block, micro_batch: MicroBatch, saved: SavedLayer,
                num_saved: int) -> list[Tensor]:
        """Return q, k, v (1, N, heads, D) of saved.x, which leave the graphs of saved chunks."""
        qkv = [None, None, None]
        for j, chunk in enumerate(self.chunks):
            if j < num_saved:
                with saved.saving(j):
                    graph, parts = self.run_pre(block, micro_batch, saved.x, chunk)
                saved.pre_graphs.append(graph)
            else:
                parts = block.pre(saved.x[:, chunk], micro_batch.rope_of(chunk))
            qkv = [self.put(whole, chunk, t) for whole, t in zip(qkv, parts)]
            del parts  # before the next chunk's are made
        return qkv

    def output(self, block, saved: SavedLayer, num_saved: int) -> Tensor:
        """Return y (1, N, C) of saved.x and saved.o, which leaves the graphs of saved chunks."""
        y = None
        for j, chunk in enumerate(self.chunks):
            inputs = saved.x[:, chunk], saved.o[:, chunk]
            if j < num_saved:
                with saved.saving(j):
                    graph, (part,) = ChunkGraph.run(self.root, block.post, *inputs)
                saved.post_graphs.append(graph)
            else:
                part = block.post(*inputs)
            y = self.put(y, chunk, part)
            del part
        return y

    def run_pre(self, block, micro_batch: MicroBatch, x: Tensor, chunk: slice):
        """Return the graph of a chunk's block.pre, and its q, k, v (1, n, heads, D)."""
        rope = micro_batch.rope_of(chunk)
        return ChunkGraph.run(self.root, lambda x: block.pre(x, rope), x[:, chunk])

    def backward(self, micro_batch: MicroBatch, i: int, dy: Tensor) -> Tensor:
        """dy (B, T, C) -> dx (B, T, C); the weights' gradients go where their events say."""
        block = self.blocks[i]
        attention = micro_batch.attention
        num_saved = self.plan.num_saved_chunks(i)
        saved = self.fetch(micro_batch, i)
        q, k, v = self.recompute_qkv(block, micro_batch, saved, num_saved)
        if saved.o is None:
            o, saved.lse = attention.forward(*(self.split(t) for t in (q, k, v)))
            saved.o = self.join(o)
        residual = []  # gradients of x that do not come by way of attention (1, n, C), by chunk

        def make_do() -> tuple[Tensor, list[Callable]]:
            return self.backward_post(block, saved, self.join(dy), num_saved, residual)

        inputs = [self.split(t) for t in (q, k, v, saved.o)]
        in_place = len(self.chunks) > 1  # of one, block.pre's graph may hold q, k, v themselves
        grads = attention.backward(make_do, *inputs, saved.lse, in_place)
        del inputs, q, k, v
        dx = self.backward_pre(saved, [self.join(t) for t in grads], residual)
        if self.plan.keeps_input(i):  # the last of its group
            micro_batch.prefetched.discard(i // self.plan.stride)
        micro_batch.finished = not micro_batch.saved
        self.prefetch_stream.used(*saved.tensors())
        return dx.view(dy.shape)

    def backward_post(self, block, saved: SavedLayer, dy: Tensor, num_saved: int,
                      residual: list[Tensor]) -> tuple[Tensor, list[Callable]]:
        """dy (1, N, C) -> do (B, T, H, D), and the last chunk's products for weights, which are
        left: they hide do's way. Adds the chunks' gradients of x to residual."""
        do = None
        for j, chunk in enumerate(self.chunks):
            graph = self.take_post(block, saved, j, num_saved)
            with deferred_weight_grads(on=j == len(self.chunks) - 1) as left:
                dx, do_part = graph.backward((dy[:, chunk],), saved.x[:, chunk], saved.o[:, chunk])
            residual.append(dx)
            do = self.put(do, chunk, do_part)
            del graph, dx, do_part  # before the next chunk's are made
        return self.split(do), left

    def backward_pre(self, saved: SavedLayer, dqkv: list[Tensor],
                     residual: list[Tensor]) -> Tensor:
        """Return dx (1, N, C): what comes by way of q, k, v (1, N, heads, D), and the residual
        path's, which is let go."""
        graphs = saved.pre_graphs
        dx = torch.empty_like(saved.x)
        for j, chunk in enumerate(self.chunks):
            (part,) = graphs[j].backward(tuple(t[:, chunk] for t in dqkv), saved.x[:, chunk])
            torch.add(residual[j], part, out=dx[:, chunk])
            graphs[j] = residual[j] = None
            del part
        return dx

    def recompute_qkv(self, block, micro_batch: MicroBatch, saved: SavedLayer,
                      num_saved: int) -> list[Tensor]:
        """Return q, k, v of all tokens: of saved chunks as they are, of others by block.pre again,
        whose graphs wait for the gradients."""
        if num_saved == len(self.chunks):
            return saved.qkv
        qkv = [None, None, None]
        if num_saved:
            tokens = slice(0, self.chunks[num_saved - 1].stop)
            qkv = [self.put(None, tokens, part) for part in saved.qkv]
        for chunk in self.chunks[num_saved:]:
            with recomputation():
                graph, parts = self.run_pre(block, micro_batch, saved.x, chunk)
            saved.pre_graphs.append(graph)
            qkv = [self.put(whole, chunk, t) for whole, t in zip(qkv, parts)]
            del parts
        return qkv

    def take_post(self, block, saved: SavedLayer, j: int, num_saved: int) -> ChunkGraph:
        """Return the graph of chunk j's block.post: the one that was saved, or run again."""
        if j < num_saved:
            graph = saved.post_graphs[j]
            saved.post_graphs[j] = None
            return graph
        chunk = self.chunks[j]
        with recomputation(unneeded_matrix(block, self.dtype)):
            graph, _ = ChunkGraph.run(self.root, block.post, saved.x[:, chunk], saved.o[:, chunk])
        return graph

    # -- copies

    def offload(self, micro_batch: MicroBatch, i: int) -> None:
        """Launch the way to the host of what layer i's forward has left."""
        saved = micro_batch.saved[i]
        whole = dict(zip("qkv", saved.qkv))
        if self.plan.keeps_input(i):
            whole["x"] = saved.x
        if self.plan.keeps_output(i):
            whole |= {"o": saved.o, "lse": saved.lse}
        for j, of_chunk in enumerate(saved.intermediates):
            whole |= {f"{j}.{index}": t for index, t in enumerate(of_chunk)}
        fields = self.fields(i)
        shapes = {name: (math.prod(shape), dtype) for name, shape, dtype in fields}
        found = {name: (t.numel(), t.dtype) for name, t in whole.items()}
        if found != shapes:
            name = min(name for name, _ in found.items() ^ shapes.items())
            raise ValueError(f"layer {i} saved {found.get(name)} elements as {name}, on meta "
                             f"tensors {shapes.get(name)}: shapes must not depend on data")
        # the host buffer is free: compute has waited for its last backward's prefetch_done (if that
        # backward was given up, a prefetch may still read here; nobody reads what it gets)
        with self.offload_stream.after_compute():  # hidden by layer i + 1
            for name, place in carve(micro_batch.host_buffers[i], fields).items():
                place.view(-1).copy_(whole[name].reshape(-1), non_blocking=True)
        micro_batch.offload_done[i] = self.offload_stream.last_event()

    def free_offloaded(self, micro_batch: MicroBatch, i: int) -> None:
        """Give back the memory of layer i, once it is on the host."""
        if i in micro_batch.saved and self.plan.swaps(i):
            wait(micro_batch.offload_done[i])  # hidden by layer i + 1's forward
            self.offload_stream.used(*micro_batch.saved[i].tensors())
            micro_batch.saved[i].leave()

    def places(self, g: int, buffers: list[Tensor]) -> list[tuple[int, Tensor, Tensor]]:
        """Return of each layer of group g: its number, host buffer, place in a rounding buffer."""
        found = []
        start = 0
        for i in range(g * self.plan.stride, (g + 1) * self.plan.stride):
            end = start + len(buffers[i])
            found.append((i, buffers[i], self.rounding_buffers[g % 2][start:end]))
            start = end
        return found

    def prefetch(self, micro_batch: MicroBatch, g: int) -> None:
        """Launch the way back of group g into its rounding buffer."""
        if g < 0 or g in micro_batch.prefetched:
            return
        micro_batch.prefetched.add(g)
        # the rounding buffer is free: compute is done with group g + 2, and this stream waits for
        # compute; the host buffers are full: compute waited for their offload_done in
        # free_offloaded
        with self.prefetch_stream.after_compute():  # hidden by group g + 1's backward
            for _, host_buffer, place in self.places(g, micro_batch.host_buffers):
                place.copy_(host_buffer, non_blocking=True)
                self.prefetch_stream.used(host_buffer)
        micro_batch.prefetch_done[g] = self.prefetch_stream.last_event()

    def fetch(self, micro_batch: MicroBatch, i: int) -> SavedLayer:
        """Return what layer i has saved, on the GPU."""
        g = i // self.plan.stride
        if micro_batch.entered != g:
            micro_batch.entered = g
            self.fetch_group(micro_batch, g)
            self.remake_inputs(micro_batch, g * self.plan.stride, i)
        return micro_batch.saved.pop(i)

    def fetch_group(self, micro_batch: MicroBatch, g: int) -> None:
        """Let compute wait for a group of layers, and launch the next ones' way back."""
        if g > self.last_swapped:  # resident layers: the first two groups that left may come
            self.prefetch(micro_batch, self.last_swapped)
            self.prefetch(micro_batch, self.last_swapped - 1)
            return
        self.prefetch(micro_batch, g - 1)
        wait(micro_batch.prefetch_done[g])  # hidden by group g + 1's backward, or resident layers'
        for i, _, place in self.places(g, micro_batch.host_buffers):
            saved = micro_batch.saved[i]
            tensors = carve(place, self.fields(i))
            saved.x = tensors.get("x")
            if "o" in tensors:
                saved.o = tensors["o"]
                saved.lse = tensors["lse"].view(saved.lse_shape)
            saved.qkv = [tensors[name] for name in "qkv"]
            saved.intermediates = [
                [t for name, t in tensors.items() if name.startswith(f"{j}.")]
                for j in range(self.plan.num_saved_chunks(i))]

    @torch.no_grad()
    def remake_inputs(self, micro_batch: MicroBatch, first: int, last: int) -> None:
        """Make the inputs of layers first + 1 to last again, each from the layer before it. Their
        weights are gathered in the open, as no backward has asked for them yet."""
        for i in range(first, last):
            saved = micro_batch.saved[i]
            if saved.o is None:
                self.attend(i, micro_batch, saved)
            micro_batch.saved[i + 1].x = self.output(self.blocks[i], saved, 0)
