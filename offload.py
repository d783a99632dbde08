"""What does a layer keep for its backward? Tokens that stay, are swapped, or are recomputed.

A layer is token-wise but for attention, so block.pre and block.post run in chunks of tokens. What
autograd saves of a chunk beside the layer's input x and attention output o, its *intermediates*
(q, k, v; of model.Block also the residual stream after attention, and gate|up), is treated in one
of three ways:

    keep        it stays on the GPU                       the last k layers, as far as it has room
    swap        it goes to pinned host memory and back    the other layers, a fraction alpha
    recompute   pre and post run again on the chunk, from x and o

x, o and the log-sum-exp come back, from the GPU in the last k layers, from the host in the
others, so attention runs once (Memo, arXiv 2407.12117, section 4.1). Where even these do not fit,

    drop x    of all but every m-th layer, and all intermediates: backward makes the inputs of a
              group of m layers again, each from the layer before it, x' = post(x, o), which is
              token-wise work alone
    drop o    of the first X layers, whose attention runs twice: the last resort

Two rounding buffers receive what is prefetched, a group of layers each (m = 1: a layer): group g
uses buffer g mod 2, which may be overwritten once compute is done with group g + 2. A host buffer
is written again by a later forward alone, which is behind compute's wait for the last prefetch (if
a backward was given up, behind nothing: nobody reads what it gets).

    forward   compute  | layer i        | layer i+1      | layer i+2        frees what layer i had
              offload  |                | i -> host      | i+1 -> host
    backward  compute  | layer i+2      | layer i+1      | layer i
              prefetch | i+1 -> buffer  | i -> buffer    | i-1 -> buffer    when i+1 is done with it

    copy            launched in            hidden under              waited for in
    to the host     offload, at the end    the next layer's          free_offloaded, before the
                    of its forward         forward                   forward of layer i + 2
    to a buffer     prefetch: enter_group  the backward of group     enter_group of its own group,
                    of group g + 1; of     g + 1, or of the          before its backward
                    the last two, as       resident layers
                    backward begins

Nothing here knows what a block computes: saved_tensors_hooks give each tensor that autograd saves
its place (SavedLayer; a tensor that two operators save has two), so whoever changes model.Block
changes it there alone. planner.py decides how much is kept and swapped (ActivationPlan).

Left out: swapping to disk, and layers of different shapes.

Legend: B sequences, T tokens of one on a rank, N = B*T, n layers (in a shape: tokens of a chunk), k
resident layers, m layers a group (`stride`), g a group of layers, c chunks of a layer, C width, H
query heads, K key/value heads, D head width; i a layer, j a chunk of it, *saved*: kept or swapped.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import model as llama
from attention import Attention
from model import LLaMA, ModelConfig
from ops import (
    CustomGradient,
    Matrix,
    Positions,
    _ChunkInputs,
    accumulation_dtype,
    deferred_weight_grads,
    recomputation,
    run_detached,
    unread_product,
)
from streams import CommStream, aligned, buffer_bytes, carve, pin_host_buffers, wait

# ---------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class ActivationPlan:
    """How the chunks of all layers are treated."""

    layers: int  # n
    chunks: int  # c of a layer
    resident: int  # k: the last layers, which leave nothing on the host
    kept_chunks: int = 0  # that stay, over all resident layers, from the last layer on
    swapped_chunks: int = 0  # over all other layers, evenly
    layers_recomputing_attention: int = 0  # X, the first ones: they drop o, lse
    stride: int = 1  # m: every m-th layer keeps its input x; if not all do, no intermediates stay

    @property
    def swapped_layers(self) -> int:
        """Return how many layers go to the host, the first ones."""
        return self.layers - self.resident

    @property
    def alpha(self) -> float:
        """Return Memo's alpha: the swapped fraction of the intermediates of swapped layers."""
        chunks = self.chunks * max(1, self.swapped_layers)
        return self.swapped_chunks / chunks

    def num_saved_chunks(self, i: int) -> int:
        """Return how many of layer i's chunks are not recomputed: the first ones."""
        if i < self.swapped_layers:
            before = i * self.swapped_chunks // self.swapped_layers
            return (i + 1) * self.swapped_chunks // self.swapped_layers - before
        behind = (self.layers - 1 - i) * self.chunks
        return min(self.chunks, max(0, self.kept_chunks - behind))

    def of_part(self, layers: int) -> "ActivationPlan":
        """Return this plan for a part of a pipeline: of fewer layers, fewer groups leave."""
        leaving = max(0, layers - self.resident) // self.stride * self.stride
        swapped_chunks = self.swapped_chunks * leaving // max(1, self.swapped_layers)
        return replace(
            self, layers=layers, resident=layers - leaving, swapped_chunks=swapped_chunks
        )

    def describe(self) -> str:
        chunks = self.chunks * max(1, self.resident)
        share = self.kept_chunks / chunks
        text = (
            f"{self.resident} of {self.layers} layers resident, {share:.0%} of their "
            f"intermediates kept; alpha {self.alpha:.3f} of the other layers; {self.chunks} "
            "chunks a layer"
        )
        if self.stride > 1:
            text += f"; one layer in {self.stride} keeps its input, the others' are made again"
        if self.layers_recomputing_attention:
            text += f"; ATTENTION RUNS TWICE in {self.layers_recomputing_attention} layers"
        return text


# ---------------------------------------------------------------------------- what a block saves


def memory_of(t: Tensor) -> int:
    """Return what two tensors have in common if they lie in the same memory."""
    return t.untyped_storage()._cdata


def check_unchanged(half: str, tensors: Iterable[tuple[Tensor, int]]) -> None:
    """Raise ValueError if a tensor was changed in place after its version was noted. tensors: pairs
    of a tensor and the version that was noted.

    PyTorch compares versions where autograd itself keeps a tensor. Chunks keep tensors elsewhere
    (SavedLayer.saving), and other chunks and other passes read them again, so a change in place
    would give a wrong gradient without a word."""
    if any(t._version != version for t, version in tensors):
        raise ValueError(
            f"block.{half} changes in place what it was given, or what backward needs (as `x += y` "
            "does): layers in chunks would compute wrong gradients; write `x = x + y`"
        )


class SavedLayer:
    """What a layer's backward finds: tensors, which may leave for the host and come back, and the
    graphs of saved chunks, which find their tensors here."""

    def __init__(self, block: llama.Block, positions: Positions, x: Tensor, num_saved: int = 0):
        self.block = block
        self.positions = positions
        self.attention: Attention | None = None  # of this layer, set by its forward
        self.num_saved = num_saved  # chunks that are not recomputed, the first ones
        # x (1, N, C), o (1, N, H, D) and lse, if they are not dropped; q, k, v (1, tokens of saved
        # chunks, heads, D); and by number what else saved chunks have
        self.tensors: dict[str | int, Tensor] = {"x": x}
        self.on_host: dict[str | int, Tensor] = {}  # their places in the host buffer
        self.offload_done = None  # event: they are there
        self.graphs: dict[tuple[str, int], Callable] = {}  # by half ("pre", "post") and chunk
        # memory that needs no place of its own
        self.held_anyway = {
            memory_of(t) for t in (*positions, *block.parameters(), *block.buffers())
        }

    @contextlib.contextmanager
    def saving(self, half: str):
        """Make the graph of a saved chunk inside: what autograd saves is a view of self.tensors.
        Raises ValueError if `half` of the block, "pre" or "post", changes what is saved."""
        layer = weakref.proxy(self)  # which holds the graph: a cycle through C++ is never collected
        versions = []  # of what is saved, as it was then

        def pack(t: Tensor):
            memory = memory_of(t)
            if memory in layer.held_anyway:
                return t
            for name in ("x", "o"):
                whole = layer.tensors.get(name)
                if whole is not None and memory_of(whole) == memory and whole.dtype == t.dtype:
                    versions.append((t.detach(), t._version))
                    break
            else:
                name = len(layer.tensors)
                t = t.detach()  # without the graph that made it
                # a part must not hold the whole's memory; what comes back is contiguous
                if t.nbytes < t.untyped_storage().nbytes() or not t.is_contiguous():
                    t = t.clone(memory_format=torch.contiguous_format)
                versions.append((t, t._version))
                whole = layer.tensors[name] = t
            offset = t.storage_offset() - whole.storage_offset()
            return name, t.shape, t.stride(), offset

        def unpack(place) -> Tensor:
            if isinstance(place, Tensor):
                return place
            name, shape, stride, offset = place
            whole = layer.tensors[name]
            offset += whole.storage_offset()
            return whole.as_strided(shape, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        check_unchanged(half, versions)
        versions.clear()  # the graph holds `pack`, and `pack` must not hold tensors that leave


# of block.pre, of block.post, a matrix's name, names of attributes
Saves = tuple[list[Tensor], list[Tensor], str, list[str]]


def trace_block(
    cfg: ModelConfig, tokens: int, dtype: torch.dtype, block: llama.Block | None = None
) -> Saves:
    """Return what autograd saves of a chunk of so many tokens in block.pre and in block.post,
    beside x, o, q, k, v: on meta, found by running model.Block there, without memory and in no
    time. And which matrix's product ends block.post and is not needed to recompute it ("": none),
    and which tensors the block then holds for others. block: one of its class runs, with as much of
    each matrix."""
    if block is None:
        return _block_saves(llama.Block, (), cfg, tokens, dtype)
    cuts = tuple(matrix.tp_slice for matrix in matrices_of(block))
    return _block_saves(type(block), cuts, cfg, tokens, dtype)


def matrices_of(block: torch.nn.Module) -> list[Matrix]:
    return [module for module in block.modules() if isinstance(module, Matrix)]


@functools.cache
def _block_saves(block_class, cuts, cfg, tokens, dtype) -> Saves:
    accum_dtype = accumulation_dtype(dtype)
    with torch.device("meta"), torch.utils._python_dispatch._disable_current_modes():
        block = block_class(cfg)
        for matrix, part in zip(matrices_of(block), cuts):
            if part is not None:
                matrix.keep_slice(part)
        for p in block.parameters():
            p.data = p.data.to(dtype if p.dim() > 1 else accum_dtype)
        angles = torch.empty(2, tokens, cfg.head_dim // 2, dtype=accum_dtype).unbind()
        numbers = torch.empty(2, tokens, dtype=torch.int64).unbind()
        positions = Positions(*angles, *numbers)
        x = torch.empty(1, tokens, cfg.dim, dtype=dtype)
        saved = SavedLayer(block, positions, x)
        root = torch.zeros((), requires_grad=True)
        with saved.saving("pre"), torch.enable_grad():
            version = x._version
            inputs = _ChunkInputs.apply(root, [], x)
            q, _, _ = block.pre(*inputs, positions)
            check_unchanged("pre", [(x, version)])
            _, *pre = saved.tensors.values()
        o = torch.empty_like(q)
        saved.tensors = {"x": x, "o": o}
        with saved.saving("post"), torch.enable_grad():
            versions = [(t, t._version) for t in (x, o)]
            inputs = _ChunkInputs.apply(root, [], x, o)
            try:
                y = block.post(*inputs, positions)
            except RuntimeError as e:
                raise ValueError(
                    f"a layer runs without data, so that its shapes are known: {e}; "
                    "experts take all tokens, masked"
                ) from e
            check_unchanged("post", versions)
            final = unread_product(y)
            _, _, *post = saved.tensors.values()
    names = {module: name for name, module in block.named_modules()}
    held = [
        name
        for module in block.modules()
        for name, value in (vars(module) | vars(type(module))).items()
        if isinstance(value, Tensor)
    ]
    return pre, post, names.get(final, ""), held


# ---------------------------------------------------------------------------- the layers
# Tokens are (1, N, ...) here: a chunk of them is contiguous, whatever B is.


@dataclass(eq=False)
class MicroBatch:
    """One micro-batch's way through the layers, forward and back. Several may be in flight, if
    ChunkedLayers has host buffers for so many."""

    positions: Positions  # of N tokens
    attention: Attention
    needs_backward: bool
    host_buffers: list[Tensor] = field(default_factory=list)  # by layer that swaps
    give_back: Callable | None = None  # lets another micro-batch have them
    last: int = 0  # memory of what the last layer has made
    # by layer, from its forward to its backward
    saved: dict[int, SavedLayer] = field(default_factory=dict)
    # by group: event, it is in its rounding buffer, and its host buffers were read
    prefetch_done: dict[int, object] = field(default_factory=dict)


class ChunkedLayers:
    """Runs a model's layers in chunks of tokens, as `plan` says: its layer_runner.

    shape: (B, T) on this rank; chunk_tokens: the most of a chunk. in_flight: micro-batches whose
    backward is due at the same time; each has host buffers of its own. layers: of the model, all by
    default. model.attention: an attention.Attention. Raises MemoryError if there is no host memory.
    """

    def __init__(
        self,
        model: LLaMA,
        shape: tuple[int, int],
        plan: ActivationPlan,
        chunk_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        in_flight: int = 1,
        layers: range | None = None,
    ):
        layers = range(len(model.blocks)) if layers is None else layers
        self.first = layers.start
        self.blocks = model.blocks[layers.start : layers.stop]
        self.cfg = model.cfg
        self.plan = plan
        self.dtype = dtype
        self.batch_size, seq = shape
        self.tokens = self.batch_size * seq
        self.chunk_tokens = chunk_tokens
        self.chunks = [
            slice(first, min(first + chunk_tokens, self.tokens))
            for first in range(0, self.tokens, chunk_tokens)
        ]
        counts = len(self.chunks), len(self.blocks)
        assert counts == (plan.chunks, plan.layers), f"{counts} chunks and layers, planned {plan}"
        assert plan.resident >= min(2, plan.layers), "layer i is freed in layer i + 2's forward"
        assert plan.swapped_layers % plan.stride == 0, f"whole groups are swapped, planned {plan}"
        intermediates = plan.kept_chunks + plan.swapped_chunks
        assert plan.stride == 1 or not intermediates, "what needs x is made again with it"
        self.root = torch.zeros((), device=device, requires_grad=True)  # of all chunks' graphs
        self.offload_stream = CommStream(device)
        self.prefetch_stream = CommStream(device)
        self.unread_product = {}
        for block in self.blocks:
            *_, self.unread_product[block], held = trace_block(self.cfg, 1, dtype, block)
            if held:
                raise ValueError(
                    "layers in chunks run for some tokens at a time, and again: what "
                    f"a block holds for others ({', '.join(held)}) is lost; "
                    "--recompute none"
                )
        sizes = [self.host_bytes(i) for i in range(plan.swapped_layers)]
        pinned = iter(pin_host_buffers(in_flight * sizes, device.type == "cuda"))
        self.in_flight = in_flight
        self.free_buffers = [[next(pinned) for _ in sizes] for _ in range(in_flight)]
        by_group = [
            sizes[first : first + plan.stride] for first in range(0, len(sizes), plan.stride)
        ]
        largest = max(map(sum, by_group), default=0)
        rounding_buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device) for _ in by_group[:2]
        ]
        self.groups = []  # each a list of (layer that swaps, its place in a rounding buffer)
        for g, of_group in enumerate(by_group):
            buffer = rounding_buffers[g % 2][: sum(of_group)]
            places = buffer.split(of_group)
            self.groups.append(list(enumerate(places, g * plan.stride)))
        model.layer_runner = self.start

    def saved_tokens(self, i: int) -> int:
        return min(self.tokens, self.plan.num_saved_chunks(i) * self.chunk_tokens)

    def host_bytes(self, i: int) -> int:
        """Return the bytes of the host buffer of a swapped layer."""
        cfg = self.cfg
        block = self.blocks[i]
        element = self.dtype.itemsize
        width = cfg.head_dim * element
        saved_tokens = self.saved_tokens(i)
        sizes = [saved_tokens * heads * width for heads in block.heads]
        if i % self.plan.stride == 0:
            sizes.append(self.tokens * cfg.dim * element)
        if i >= self.plan.layers_recomputing_attention:
            rows = self.tokens * block.heads[0]
            sizes.append(rows * width)
            sizes.append(rows * accumulation_dtype(self.dtype).itemsize)
        for chunk in self.chunks[: self.plan.num_saved_chunks(i)]:
            tokens = chunk.stop - chunk.start
            pre, post, *_ = trace_block(cfg, tokens, self.dtype, block)
            sizes += [t.nbytes for t in pre + post]
        return sum(map(aligned, sizes))

    def start(
        self, model: LLaMA, positions: Positions, attention: Attention
    ) -> Callable[[int, Tensor], Tensor]:
        """Begin a forward pass. Returns run_layer(i, x), layer i of the model: x (B, T, C) -> y (B,
        T, C). Raises RuntimeError if all host buffers belong to passes that wait for their
        backward."""

        def of_all_tokens(t: Tensor, *width: int) -> Tensor:  # (T, ...), or (B, T, ...)
            return t.expand(self.batch_size, self.tokens // self.batch_size, *width).flatten(0, 1)

        cos, sin, *numbers = positions
        angles = [of_all_tokens(t, t.shape[-1]) for t in (cos, sin)]
        positions = Positions(*angles, *map(of_all_tokens, numbers))  # of N tokens
        micro_batch = MicroBatch(positions, attention, torch.is_grad_enabled())
        if micro_batch.needs_backward and self.groups:
            if not self.free_buffers:
                raise RuntimeError(
                    f"{self.in_flight} forward passes wait for their backward, and there are host "
                    f"buffers for in_flight={self.in_flight}: run a backward first"
                )
            micro_batch.host_buffers = self.free_buffers.pop()
            # once: when its backward has read them, or when it is gone without one
            micro_batch.give_back = weakref.finalize(
                micro_batch, self.free_buffers.append, micro_batch.host_buffers
            )

        def run_layer(i: int, x: Tensor) -> Tensor:
            there = functools.partial(self.forward, micro_batch, i - self.first)
            back = functools.partial(self.backward, micro_batch, i - self.first)
            return CustomGradient.apply(x, there, back, self.root)

        return run_layer

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
        makes. A part of all tokens is the whole."""
        if part.shape[1] == self.tokens:
            return part
        if whole is None:
            whole = part.new_empty(1, self.tokens, *part.shape[2:])
        whole[:, chunk] = part
        return whole

    # -- one layer

    def forward(self, micro_batch: MicroBatch, i: int, x: Tensor) -> Tensor:
        """x (B, T, C) -> y (B, T, C)."""
        plan = self.plan
        num_saved = 0
        if micro_batch.needs_backward:
            num_saved = plan.num_saved_chunks(i)
            self.free_offloaded(micro_batch, i - 2)
        shape = x.shape
        if i % plan.stride and memory_of(x) != micro_batch.last:
            i += self.first
            raise ValueError(
                f"layer {i} takes something else than what layer {i - 1} has made, "
                "which makes it again: let the block change it"
            )
        x = self.join(x.detach())
        saved = SavedLayer(self.blocks[i], micro_batch.positions, x, num_saved)
        saved.attention = micro_batch.attention.of_layer(self.first + i)
        qkv = self.project(saved)
        self.attend(saved, qkv)
        y = self.output(saved)
        if micro_batch.needs_backward:
            tokens = self.saved_tokens(i)
            if tokens < self.tokens:  # a part alone must not hold the memory of the whole
                qkv = [t[:, :tokens].clone() for t in qkv]
            saved.tensors |= zip("qkv", qkv)
            if i % plan.stride:
                del saved.tensors["x"]
            if i < plan.layers_recomputing_attention:
                del saved.tensors["o"], saved.tensors["lse"]
            micro_batch.saved[i] = saved
            if i < plan.swapped_layers:
                self.offload(micro_batch, i)
        micro_batch.last = memory_of(y)
        return y.view(shape)

    def run(self, saved: SavedLayer, half: str, j: int, again: bool = False) -> Iterable[Tensor]:
        """Return what a half of a layer makes of chunk j: block.pre of x, or block.post of x and o.
        The graph of a saved chunk, and of one that runs `again` in backward, goes to
        saved.graphs."""
        chunk = self.chunks[j]
        block = saved.block

        positions = Positions(*(t[chunk] for t in saved.positions))

        def pre(x):
            return block.pre(x, positions)

        def post(x, o):
            return (block.post(x, o, positions),)

        fn, names = {"pre": (pre, "x"), "post": (post, "xo")}[half]
        inputs = [saved.tensors[name][:, chunk] for name in names]
        versions = [(t, t._version) for t in inputs]
        if again:
            unread = block.get_submodule(self.unread_product[block])
            context = recomputation(unread)
        elif j < saved.num_saved:
            context = saved.saving(half)
        else:
            outputs = fn(*inputs)
            check_unchanged(half, versions)
            return outputs
        with context:
            graph, outputs = run_detached(self.root, fn, *inputs)
        check_unchanged(half, versions)
        saved.graphs[half, j] = graph
        return outputs

    def project(self, saved: SavedLayer, again: bool = False) -> list[Tensor]:
        """Return q, k, v (1, N, heads, D) of the layer's input. again: in backward, where saved
        chunks have theirs, and the graphs of others wait for the gradients."""
        qkv = 3 * [None]
        first = 0
        if again and saved.num_saved:
            first = saved.num_saved
            parts = [saved.tensors[name] for name in "qkv"]
            qkv = [self.put(None, slice(t.shape[1]), t) for t in parts]
        for j in range(first, len(self.chunks)):
            chunk = self.chunks[j]
            parts = self.run(saved, "pre", j, again)
            qkv = [self.put(whole, chunk, t) for whole, t in zip(qkv, parts)]
            del parts  # before the next chunk's are made
        return qkv

    def attend(self, saved: SavedLayer, qkv: list[Tensor]) -> None:
        """Set o (1, N, H, D) and the log-sum-exp."""
        o, lse = saved.attention.forward(*map(self.split, qkv))
        saved.tensors |= {"o": self.join(o), "lse": lse}

    def output(self, saved: SavedLayer) -> Tensor:
        """Return y (1, N, C) of the layer's input and o."""
        y = None
        for j, chunk in enumerate(self.chunks):
            y = self.put(y, chunk, *self.run(saved, "post", j))
        return y

    def backward(self, micro_batch: MicroBatch, i: int, dy: Tensor) -> Tensor:
        """dy (B, T, C) -> dx (B, T, C); the weights' gradients go where their events say."""
        behind = i + 1
        if behind == self.plan.layers or behind % self.plan.stride == 0:  # i is its group's last
            self.enter_group(micro_batch, i)
        saved = micro_batch.saved.pop(i)
        qkv = self.project(saved, again=True)
        if "o" not in saved.tensors:
            self.attend(saved, qkv)
        residual = []  # gradients of x that do not come by way of attention (1, n, C), by chunk
        qkvo = (*qkv, saved.tensors["o"])
        inputs = [*map(self.split, qkvo), saved.tensors["lse"]]
        in_place = len(self.chunks) > 1  # of one, block.pre's graph may hold q, k, v themselves
        grads = saved.attention.backward(
            lambda: self.backward_post(saved, self.join(dy), residual), *inputs, in_place
        )
        del inputs, qkv, qkvo
        dqkv = [self.join(t) for t in grads]
        dx = self.backward_pre(saved, dqkv, residual)
        self.prefetch_stream.done_reading(*saved.tensors.values())
        return dx.view(dy.shape)

    def backward_post(
        self, saved: SavedLayer, dy: Tensor, residual: list[Tensor]
    ) -> tuple[Tensor, list[Callable]]:
        """dy (1, N, C) -> do (B, T, H, D), and the last chunk's products for weights, which are
        left: they hide ways of attention's. Adds the chunks' gradients of x to residual."""
        do = None
        for j, chunk in enumerate(self.chunks):
            if j >= saved.num_saved:
                self.run(saved, "post", j, again=True)
            graph = saved.graphs.pop(("post", j))
            with deferred_weight_grads(on=j == len(self.chunks) - 1) as left:
                dx, do_part = graph([dy[:, chunk]])
            residual.append(dx)
            do = self.put(do, chunk, do_part)
            del graph, dx, do_part  # before the next chunk's are made
        return self.split(do), left

    def backward_pre(self, saved: SavedLayer, dqkv: list[Tensor], residual: list[Tensor]) -> Tensor:
        """Return dx (1, N, C): what comes by way of q, k, v (1, N, heads, D), and the residual
        path's, which is let go."""
        dx = torch.empty_like(saved.tensors["x"])
        for j, chunk in enumerate(self.chunks):
            graph = saved.graphs.pop(("pre", j))
            grads = [t[:, chunk] for t in dqkv]
            (part,) = graph(grads)
            torch.add(residual.pop(0), part, out=dx[:, chunk])
            del graph, part
        return dx

    # -- copies

    def offload(self, micro_batch: MicroBatch, i: int) -> None:
        """Launch the way to the host of what layer i's forward has left."""
        saved = micro_batch.saved[i]
        host_buffer = micro_batch.host_buffers[i]
        found = buffer_bytes(saved.tensors)
        if found != len(host_buffer):
            raise ValueError(
                f"layer {i} saved {found:,} bytes, on meta tensors "
                f"{len(host_buffer):,}: shapes must not depend on data"
            )
        saved.on_host = carve(host_buffer, saved.tensors)
        # the host buffer is free: compute has waited for its last backward's prefetch_done (if that
        # backward was given up, a prefetch may still read here; nobody reads what it gets)
        with self.offload_stream.after_compute():  # hidden by layer i + 1
            for name, place in saved.on_host.items():
                place.copy_(saved.tensors[name], non_blocking=True)
        saved.offload_done = self.offload_stream.record_event()

    def free_offloaded(self, micro_batch: MicroBatch, i: int) -> None:
        """Give back the memory of layer i, once it is on the host."""
        if i in micro_batch.saved and i < self.plan.swapped_layers:
            saved = micro_batch.saved[i]
            wait(saved.offload_done)  # hidden by layer i + 1's forward
            self.offload_stream.done_reading(*saved.tensors.values())
            saved.tensors = saved.on_host

    def prefetch(self, micro_batch: MicroBatch, g: int) -> None:
        """Launch the way back of group g into its rounding buffer."""
        if g < 0 or g in micro_batch.prefetch_done:
            return
        # the rounding buffer is free: compute is done with group g + 2, and this stream waits for
        # compute; the host buffers are full: compute waited for their offload_done in
        # free_offloaded
        with self.prefetch_stream.after_compute():  # hidden by group g + 1's backward
            for i, place in self.groups[g]:
                host_buffer = micro_batch.host_buffers[i]
                place.copy_(host_buffer, non_blocking=True)
                self.prefetch_stream.done_reading(host_buffer)
        micro_batch.prefetch_done[g] = self.prefetch_stream.record_event()

    def enter_group(self, micro_batch: MicroBatch, last: int) -> None:
        """Have on the GPU what a group of layers saved, whose last one is due, and launch the next
        ones' way back. Inputs that were dropped are made again, each from the layer before it:
        the first one's weights are gathered in the open, as no backward has asked for them yet."""
        g = last // self.plan.stride
        last_swapped = len(self.groups) - 1
        if g > last_swapped:  # resident layers: the last two groups that left may come
            self.prefetch(micro_batch, last_swapped)
            self.prefetch(micro_batch, last_swapped - 1)
        else:
            self.prefetch(micro_batch, g - 1)
            wait(micro_batch.prefetch_done[g])  # hidden by the backward of what is behind it
            for i, place in self.groups[g]:
                saved = micro_batch.saved[i]
                saved.tensors = carve(place, saved.tensors)
            if g == 0:  # compute waits until the last host buffer is read
                micro_batch.give_back()
        for i in range(g * self.plan.stride, last):
            saved = micro_batch.saved[i]
            if "o" not in saved.tensors:
                self.attend(saved, self.project(saved))
            micro_batch.saved[i + 1].tensors["x"] = self.output(saved)
