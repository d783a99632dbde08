"""Token-wise swapping and recomputation of activations (Memo, arXiv 2407.12117, section 4.1).

A transformer layer works on each token separately, except for attention. So the two token-wise
halves of a layer, block.pre and block.post, run in chunks of tokens:

    x -- pre --> q, k, v -- attention --> o, lse        x, o -- post --> y
      chunk by chunk      all tokens at once              chunk by chunk

Memo calls the tensors that a layer's backward needs its *skeletal activations*. They are the input
x, attention's output o with its log-sum-exp lse, and S_others: q, k, v, the residual stream after
attention, gate|up and a few numbers per token. All other tensors are *transient activations*, which
live only inside a pass. As a rule x, o and lse are not recomputed, so attention runs once. (It is
over 90 % of the FLOPs at a million tokens.) Each chunk's part of S_others is treated in one of
three ways:

    keep        it stays on the GPU
    swap        it is copied to pinned host memory, and prefetched for backward
    recompute   it is dropped, and backward runs pre and post again on the chunk, from x and o. Only
                post's last product is skipped, because backward does not read its result
                (ops.find_unread_product)

Layers that backward does not reach, because they and the layers before them are frozen
(LLaMA.forward_only_layers), save nothing at all. An ActivationPlan is for the other n layers, and
numbers them from 0. The last k of them are *resident*, which means that they copy nothing to the
host:

    layers         x, o, lse          S_others
    first n - k    are swapped        a fraction alpha of chunks is swapped, the rest recomputed
    last k         stay on the GPU    as many chunks as fit are kept, the rest recomputed

Example (results/2026-11-4xh200): 7B, 256K tokens on four H200s. Each GPU has 64K tokens, in
four chunks per layer. In a layer x takes 0.5 GiB per GPU, o and lse 0.5 GiB, S_others 4.7 GiB. The
last 14 layers (k = 14) keep everything, 80 GiB. The first 18 layers swap everything (alpha = 1) to
102.5 GiB of host memory. Nothing is recomputed. planner.py chooses such a plan, and passes it as an
`ActivationPlan`. (In the example of costs.py the host has a little less memory, and a layer has one
chunk. So there one swapped layer and one resident layer recompute all of their S_others.)

If even x and o of all layers do not fit on the GPU and the host, some are dropped, too:

    drop x    Only layers 0, m, 2m, ... save their x, and S_others of all layers is recomputed. The
              m layers from one saved x to the next are a *group*. Backward recomputes the other
              inputs of a group, each from the layer before it: x' = post(x, o), without attention.
    drop o    The first X layers drop o and lse, and run attention twice. This is the last resort.

Copies to and from the host run on two streams of their own. What is copied to the host stays
referenced on the GPU until compute has waited for the copy, so its memory is not reused too early.

When is this memory freed? The *lag* d says it. When layer i + d begins, compute waits for the
copies of layer i, and frees its tensors on the GPU. With d = 14, this happens to layer 6 when layer
20 begins. Its copies had the time of d - 1 = 13 layers, 7 to 19, to finish. So a larger lag hides
more. The smallest lag is 2. It is also Memo's, which has two buffers in forward. Two limits bound
the lag:

    memory    In forward the GPU holds up to d swapped layers: the one that runs, and d - 1 whose
              copies may still run. The planner lets them take no more memory than the resident
              layers take at the end of forward (costs.most_lag).
    d <= k    The last swapped layer is n - k - 1. Compute waits for its copies when layer
              n - k - 1 + d begins, so this must be one of the n layers. Backward relies on it, and
              does not wait for copies to the host again.

The planner chooses the largest d that both allow, but at least 2. If layers drop x, or resident
layers drop o, it takes d = 2.

Backward reads what was swapped from two *rounding buffers* on the GPU, each with room for one group
of layers. Group g uses buffer g mod 2. (Memo uses these buffers in forward, too. Here forward
allocates tensors as usual, and frees them when they are on the host.) With d = 2, and m = 1, where
a group is one layer:

    forward   compute   | layer i       | layer i+1     | layer i+2       frees layer i first
              offload   |               | i -> host     | i+1 -> host
    backward  compute   | layer i+2     | layer i+1     | layer i
              prefetch  | i+1 -> buffer | i -> buffer   | i-1 -> buffer   the one that i+1 used

    copy        launched by                  hidden by                 compute waits in
    offload     `offload`, at the end of     the forward of layers     `free_offloaded`, before the
    of layer i  layer i's forward            i + 1 to i + d - 1        forward of layer i + d
    prefetch    `load_group` of group g + 1  the backward of group     `load_group` of group g,
    of group g  (of the last two swapped     g + 1, or of the          before its backward
                groups: when backward        resident layers
                begins)

Nothing in this file knows what a block computes: hooks of autograd find the tensors that it saves
(`SavedLayer.saving`). So nothing here has to be edited if you change a layer (model.Block).

    ChunkedLayers(model, (B, T), plan, chunk_tokens, device, dtype)    # sets model.layer_runner
    model(tokens, labels).backward()                                   # runs in chunks

Left out: swapping to disk, and layers of different shapes.

Legend

    sizes    B sequences, T tokens of one sequence on a rank (T/sp in attention.py), N = B*T;
             C width, H query heads, K key/value heads, D head width
    layers   n layers that backward reaches, k resident layers, m layers per group, X layers that
             drop o, d the lag; i one of the n layers, from 0, j a chunk of it, g a group
    shapes   in a tensor's shape, such as (1, n, C), n is the number of tokens of a chunk

dx is the gradient of the loss with respect to x. A chunk is *saved* if it is kept or swapped, and
so not recomputed. gate|up are the results of the MLP's first two matrices, side by side.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import model as llama
from attention import Attention
from model import LLaMA, ModelConfig
from ops import (
    CustomGradient,
    Matrix,
    Positions,
    ProductIsReadError,
    UnreadProduct,
    _ChunkInputs,
    accumulation_dtype,
    deferred_weight_grads,
    find_unread_product,
    recomputation,
    run_detached,
)
from streams import CommStream, aligned, buffer_bytes, carve, pin_host_buffers, wait

# ---------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class ActivationPlan:
    """How many chunks are kept and swapped, and which layers drop x or o.

    Example: 4 layers of 4 chunks, resident=2, kept_chunks=5, swapped_chunks=5 (alpha = 5/8):

        layer 0     x, o, lse swapped           2 chunks swapped, 2 recomputed
        layer 1     x, o, lse swapped           3 chunks swapped, 1 recomputed
        layer 2     x, o, lse on the GPU        1 chunk kept, 3 recomputed
        layer 3     x, o, lse on the GPU        4 chunks kept
    """

    layers: int  # n, only those that backward reaches
    chunks: int  # chunks per layer
    resident: int  # k: the last k layers copy nothing to the host
    kept_chunks: int = 0  # in all resident layers together. The last layer is filled first
    swapped_chunks: int = 0  # in all other layers together, spread evenly
    layers_recomputing_attention: int = 0  # X: the first X layers drop o and lse
    stride: int = 1  # m: layers 0, m, 2m, ... save x. If m > 1, no chunk is kept or swapped
    lag: int = 2  # d: before layer i, compute waits for the copies of layer i - d

    @property
    def swapped_layers(self) -> int:
        """Return how many layers are swapped, n - k. They are the first ones."""
        return self.layers - self.resident

    @property
    def alpha(self) -> float:
        """Return Memo's alpha: the fraction of the swapped layers' S_others that is swapped."""
        chunks = self.chunks * max(1, self.swapped_layers)
        return self.swapped_chunks / chunks

    def num_saved_chunks(self, i: int) -> int:
        """Return how many chunks of layer i are kept or swapped. They are its first ones."""
        if i < self.swapped_layers:
            in_earlier_layers = i * self.swapped_chunks // self.swapped_layers
            up_to_this_layer = (i + 1) * self.swapped_chunks // self.swapped_layers
            return up_to_this_layer - in_earlier_layers
        in_later_layers = (self.layers - 1 - i) * self.chunks
        return min(self.chunks, max(0, self.kept_chunks - in_later_layers))

    def for_virtual_stage(self, layers: int) -> "ActivationPlan":
        """Return this plan for a virtual stage in which backward reaches only `layers` layers.

        The swapped layers must be whole groups of m. So up to m - 1 layers more than k are
        resident. alpha stays the same, rounded down to whole chunks. kept_chunks does not change.
        """
        swapped_layers = max(0, layers - self.resident) // self.stride * self.stride
        swapped_chunks = self.swapped_chunks * swapped_layers // max(1, self.swapped_layers)
        return replace(
            self, layers=layers, resident=layers - swapped_layers, swapped_chunks=swapped_chunks
        )


# ---------------------------------------------------------------------------- what a block saves


def storage_id(t: Tensor) -> int:
    """Return a number that is the same for all tensors that are views of the same memory."""
    return t.untyped_storage()._cdata


def check_unchanged(half: str, tensors: Iterable[tuple[Tensor, int]]) -> None:
    """Raise ValueError if one of the tensors was changed in place.

    half: "pre" or "post". tensors: pairs of a tensor and the version number that it should have. (A
    change in place raises a tensor's version number.)

    PyTorch makes this check only for tensors that autograd itself keeps. A saved chunk keeps its
    tensors elsewhere (`SavedLayer.saving`), and x and o are read again by other chunks and in
    backward. So without this function, a change in place would silently give a wrong gradient.
    """
    if any(t._version != version for t, version in tensors):
        raise ValueError(
            f"block.{half} changes in place a tensor that it was given, or one that backward needs "
            "(as `x += y` does). Layers that run in chunks would compute wrong gradients, so "
            "write `x = x + y`"
        )


class SavedView(NamedTuple):
    """Stands in autograd's graph for a saved tensor. It tells where backward finds this tensor:
    `shape`, `stride` and `offset` describe it as a view of SavedLayer.tensors[name]."""

    name: str | int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the first element of that tensor


class SavedLayer:
    """Holds what the backward of one layer needs, from the layer's forward until its backward.

    `tensors` has, by name:

        "x", "o", "lse"     (1, N, C), (1, N, H, D), and lse with B*H*T elements, in the shape that
                            Attention.forward returns (attention.py); unless dropped
        "q", "k", "v"       of saved chunks: (1, tokens of these chunks, heads, D)
        integers            the other tensors that autograd saves of saved chunks. The integers
                            ascend, with gaps

    If the layer is swapped, these are first tensors on the GPU. free_offloaded replaces them by
    views of a host buffer, and load_group by views of a rounding buffer on the GPU.
    """

    def __init__(
        self,
        block: llama.Block,
        positions: Positions,
        x: Tensor,
        attention: Attention | None = None,  # of this layer; None: only pre or post runs
        num_saved: int = 0,
    ):
        self.block = block
        self.positions = positions
        self.attention = attention
        self.num_saved = num_saved  # number of saved chunks. They are the layer's first ones
        self.tensors: dict[str | int, Tensor] = {"x": x}
        # sizes in bytes of the stored tensors that a second operator saves, too. They are stored
        # only once
        self.bytes_saved_again: list[int] = []
        # storage_id -> the tensor's number in self.tensors. Used only until the layer is offloaded
        self.number_of_storage: dict[int, int] = {}
        self.on_host: dict[str | int, Tensor] = {}  # the host buffer's views of these tensors
        self.offload_done = None  # event: the copies to the host buffer are complete
        # backward_fns[half, j] is the backward of a half ("pre" or "post") of chunk j. It takes the
        # gradients of the half's outputs, and returns the gradients of its inputs
        self.backward_fns: dict[tuple[str, int], Callable] = {}
        # ids of the storages of parameters, buffers and positions. If autograd saves a tensor that
        # lies in one of them, it stays with autograd, and is neither stored here nor swapped
        self.never_swapped = {
            storage_id(t) for t in (*positions, *block.parameters(), *block.buffers())
        }

    @contextlib.contextmanager
    def saving(self, half: str):
        """Return a context for a half of a saved chunk: what autograd saves goes to self.tensors.

            forward     autograd saves t  --pack-->  SavedView(name, shape, stride, offset)

                t                               name        stored in self.tensors
                a view of x or o in its dtype   "x", "o"    nothing new
                a view of a stored tensor       its number  nothing new
                any other tensor                a number    t, or a copy of it
                a parameter or a position       none: autograd keeps t itself

            backward    SavedView  --unpack-->  that view of self.tensors[name], wherever these
                                                tensors are by then

        A part of a larger tensor is copied (`store`), so if two operators save it, it is stored
        twice. half: "pre" or "post". Raises ValueError if the block changes a saved tensor in
        place.
        """
        # autograd's graph holds `pack` and `unpack`, and this layer holds the graph. Such a cycle,
        # through C++, is never collected, so the hooks must not hold the layer
        layer = weakref.proxy(self)
        versions = []  # of saved tensors: the tensor, and its version number at that moment

        def pack(t: Tensor) -> Tensor | SavedView:
            if storage_id(t) in layer.never_swapped:
                return t
            name = layer.name_of_stored(t)
            if name is None:
                name, t = layer.store(t)
            else:
                t = t.detach()
                if isinstance(name, int):
                    layer.bytes_saved_again.append(t.nbytes)
            versions.append((t, t._version))
            offset = t.storage_offset() - layer.tensors[name].storage_offset()
            return SavedView(name, t.shape, t.stride(), offset)

        def unpack(saved: Tensor | SavedView) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            stored = layer.tensors[saved.name]
            offset = stored.storage_offset() + saved.offset
            return stored.as_strided(saved.shape, saved.stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        check_unchanged(half, versions)
        versions.clear()  # `pack` lives as long as the graph, and must not hold tensors

    def name_of_stored(self, t: Tensor) -> str | int | None:
        """Return the name of a tensor in self.tensors if t is a view of it in the same dtype, else
        None."""
        for name in ("x", "o", self.number_of_storage.get(storage_id(t))):
            whole = self.tensors.get(name)
            if whole is None or whole.dtype != t.dtype:
                continue
            if storage_id(whole) == storage_id(t):
                return name
        return None

    def store(self, t: Tensor) -> tuple[int, Tensor]:
        """Store t, or a contiguous copy of it, in self.tensors. Return its number there, and the
        stored tensor."""
        t = t.detach()  # without the graph that computed it
        # t is copied in three cases:
        # 1. It is a part of a larger tensor. A view would keep the memory of the whole alive
        # 2. It is not contiguous. A prefetch returns contiguous tensors, and unpack must find the
        #    same strides before and after it
        # 3. It is a view of x or o in another dtype. With several chunks, case 1 copies it. With
        #    one it is copied, too, so that what is stored does not depend on the number of chunks
        is_part = t.nbytes < t.untyped_storage().nbytes()
        inputs = [self.tensors[name] for name in ("x", "o") if name in self.tensors]
        is_input = storage_id(t) in map(storage_id, inputs)
        if is_part or is_input or not t.is_contiguous():
            t = t.clone(memory_format=torch.contiguous_format)
        number = len(self.tensors)
        self.tensors[number] = t
        self.number_of_storage[storage_id(t)] = number
        return number, t

    def numbered_tensors(self) -> list[Tensor]:
        """Return the tensors that `store` has stored."""
        return [t for name, t in self.tensors.items() if isinstance(name, int)]


class BlockTrace(NamedTuple):
    """What a chunk that runs through a block saves. All tensors are on the meta device."""

    pre: list[Tensor]  # the tensors that autograd saves in block.pre, without views of x
    post: list[Tensor]  # the tensors that it saves in block.post, without views of x and o
    # bytes of the largest tensor in `post` that two operators save, or 0. Its gradient is a sum of
    # two, which are both in memory for a while
    most_saved_again: int
    # name of the Matrix whose product recomputation may skip (ops.find_unread_product); "": none
    unread_product_name: str
    stray_tensors: list[str]  # attributes with tensors that are neither parameters nor buffers


def trace_block(
    cfg: ModelConfig, tokens: int, dtype: torch.dtype, block: llama.Block | None = None
) -> BlockTrace:
    """Return what autograd saves when a chunk of `tokens` tokens runs through a block, without x, o
    and what attention saves (q, k, v, lse).

    A new block runs on meta tensors, which have shapes but no data. So this takes no memory of the
    GPU and hardly any time. The new block is of the same class as `block`, and has the same
    tensor-parallel slices of matrices and the same frozen weights. block=None: a block of
    cfg.architecture with whole matrices that all train. Raises ValueError if the block needs data.
    """
    if block is None:
        return _trace_block(llama.block_class(cfg), (), cfg, tokens, dtype)
    tp_slices = tuple(matrix.tp_slice for matrix in matrices_of(block))
    frozen = tuple(not p.requires_grad for p in block.parameters())
    return _trace_block(type(block), tp_slices, cfg, tokens, dtype, frozen)


def matrices_of(block: torch.nn.Module) -> list[Matrix]:
    return [module for module in block.modules() if isinstance(module, Matrix)]


@functools.cache
def _trace_block(block_class, tp_slices, cfg, tokens, dtype, frozen=()) -> BlockTrace:
    accum_dtype = accumulation_dtype(dtype)
    with torch.device("meta"), torch.utils._python_dispatch._disable_current_modes():
        block = block_class(cfg)
        for matrix, tp_slice in zip(matrices_of(block), tp_slices):
            if tp_slice is not None:
                matrix.keep_slice(tp_slice)
        for p, is_frozen in zip(block.parameters(), frozen):
            p.requires_grad_(not is_frozen)  # PyTorch's operators save less for a frozen weight
        for p in block.parameters():
            is_matrix = p.dim() > 1
            p.data = p.data.to(dtype if is_matrix else accum_dtype)

        cos, sin = torch.empty(2, tokens, cfg.head_dim // 2, dtype=accum_dtype).unbind()
        qkv_positions, x_positions = torch.empty(2, tokens, dtype=torch.int64).unbind()
        positions = Positions(cos, sin, qkv_positions, x_positions)
        x = torch.empty(1, tokens, cfg.dim, dtype=dtype)

        saved_by_pre, (q, _, _) = trace_half(block, "pre", positions, {"x": x})
        o = torch.empty_like(q)
        saved_by_post, y = trace_half(block, "post", positions, {"x": x, "o": o})
        unread = find_unread_product(y)
        if unread is not None and reads_product(block, unread, x, o, positions):
            unread = None

    names = {module: name for name, module in block.named_modules()}
    return BlockTrace(
        pre=saved_by_pre.numbered_tensors(),
        post=saved_by_post.numbered_tensors(),
        most_saved_again=max(saved_by_post.bytes_saved_again, default=0),
        unread_product_name=names.get(unread, ""),
        stray_tensors=stray_tensors(block),
    )


def reads_product(
    block: llama.Block, matrix: Matrix, x: Tensor, o: Tensor, positions: Positions
) -> bool:
    """Return whether block.post reads a matrix's product in a way that autograd does not record.
    matrix: what find_unread_product returned for the block. x, o, positions: block.post's
    arguments."""
    try:
        with recomputation(matrix):
            block.post(x, o, positions)
    except ProductIsReadError:
        return True
    return False


def trace_half(
    block: llama.Block, half: str, positions: Positions, inputs: dict[str, Tensor]
) -> tuple[SavedLayer, Tensor | tuple[Tensor, ...]]:
    """Run a half of a block on tensors of the meta device. Return what autograd saves, and what the
    half returns.

    half: "pre" or "post". inputs: x; for "post" x and o. Raises ValueError if the block needs data
    to run, or changes an input in place.
    """
    root = torch.zeros((), requires_grad=True)  # so that autograd makes a graph
    versions = [(t, t._version) for t in inputs.values()]
    saved = SavedLayer(block, positions, inputs["x"])
    saved.tensors |= inputs
    with saved.saving(half), torch.enable_grad():
        chunk_inputs = _ChunkInputs.apply(root, [], *inputs.values())
        try:
            outputs = getattr(block, half)(*chunk_inputs, positions)
        except RuntimeError as e:
            raise ValueError(
                f"block.{half} must run on tensors without data, so that its shapes are known, but "
                f"it raised: {e}. If it has experts, let each expert run on all tokens, masked"
            ) from e
        check_unchanged(half, versions)
    return saved, outputs


def stray_tensors(block: llama.Block) -> list[str]:
    """Return the names of attributes of a block's modules that hold a tensor which is neither a
    parameter nor a buffer. The tensor may be in a list, a tuple or a dictionary."""
    names = []
    for module in block.modules():
        attributes = vars(module) | vars(type(module))
        for name, value in attributes.items():
            is_legal = name in ("_parameters", "_buffers")  # nn.Module's dictionaries
            if not is_legal and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                names.append(name)
    return names


# ---------------------------------------------------------------------------- the layers
# Tokens are (1, N, ...) here, a *row*: so a chunk of tokens is contiguous, for any batch size B.


@dataclass(eq=False)
class MicroBatch:
    """Holds what one micro-batch needs, from its forward to the end of its backward.

    Several micro-batches may be between forward and backward at a time. If layers are swapped,
    there may be as many as ChunkedLayers has sets of host buffers. A forward or a backward may also
    be given up (out of memory, say). Then Python frees the micro-batch, and the next one gets its
    host buffers. A prefetch that was launched may still read these while the next forward writes
    there, but nobody uses what it reads.
    """

    positions: Positions  # of N tokens
    attention: Attention
    host_buffers: list[Tensor] = field(default_factory=list)  # one per swapped layer
    release_host_buffers: Callable | None = None  # gives them to the next micro-batch
    # the output of the last layer that has run, if the next layer drops its input. It is kept
    # alive, because a storage_id is unique only among tensors that are alive
    last_output: Tensor | None = None
    saved: dict[int, SavedLayer] = field(default_factory=dict)  # by layer
    # by group: the event after which the group is in its rounding buffer
    prefetch_done: dict[int, object] = field(default_factory=dict)


class ChunkedLayers:
    """Runs a model's layers in chunks of tokens, as an ActivationPlan says.

    It becomes the model's layer_runner. shape: (B, T) on this rank. chunk_tokens: tokens per chunk;
    the last chunk may have fewer. in_flight: the most micro-batches that are between forward and
    backward at a time; each needs host buffers of its own. layers: the model's layers that run here
    (a virtual stage of a pipeline); None: all. model.attention must be an attention.Attention.
    Raises MemoryError if the host has too little memory, and ValueError for a block that would
    train wrong in chunks.

    plan counts only those of `layers` that backward reaches. The ones before them run without a
    backward, and save nothing (LLaMA.forward_only_layers).
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
        # the model's number of the first layer that backward reaches. All other methods number
        # layers from there
        self.first = min(max(layers.start, model.forward_only_layers), layers.stop)
        self.blocks = model.blocks[self.first : layers.stop]
        self.cfg = model.cfg
        self.plan = plan
        self.dtype = dtype
        self.batch_size, seq = shape
        self.tokens = self.batch_size * seq  # N
        self.chunk_tokens = chunk_tokens
        self.chunks = [
            slice(first, min(first + chunk_tokens, self.tokens))
            for first in range(0, self.tokens, chunk_tokens)
        ]
        self.check_plan()

        # an input of all chunks' graphs that requires a gradient, so that autograd records them
        self.root = torch.zeros((), device=device, requires_grad=True)
        self.offload_stream = CommStream(device)
        self.prefetch_stream = CommStream(device)

        # by block: the matrix whose product recomputation skips, or None
        self.unread_products: dict[llama.Block, Matrix | None] = {}
        for block in model.blocks[layers.start : layers.stop]:
            self.check_block(block)

        self.in_flight = in_flight
        self.allocate_buffers(device)
        model.layer_runner = self.start

    def check_plan(self) -> None:
        """Assert that the plan is for these layers and chunks, and can be carried out."""
        plan = self.plan
        assert len(self.blocks) == plan.layers, (
            f"backward reaches {len(self.blocks)} layers, but the plan is for {plan.layers}: {plan}"
        )
        assert len(self.chunks) == plan.chunks, (
            f"{self.tokens} tokens make {len(self.chunks)} chunks of {self.chunk_tokens}, but the "
            f"plan has {plan.chunks}: {plan}"
        )
        assert plan.lag >= 2, f"a copy needs at least one layer's forward to hide in: {plan}"
        assert plan.resident >= min(plan.lag, plan.layers), (
            f"the last {plan.lag} layers must be resident, so that all copies are done when "
            f"forward ends: {plan}"
        )
        assert plan.swapped_layers % plan.stride == 0, (
            f"the swapped layers must be whole groups of {plan.stride}: {plan}"
        )
        saved_chunks = plan.kept_chunks + plan.swapped_chunks
        assert plan.stride == 1 or saved_chunks == 0, (
            f"if layers drop x, all chunks are recomputed, and none is kept or swapped: {plan}"
        )

    def check_block(self, block: llama.Block) -> None:
        """Raise ValueError for a block that would train wrong in chunks, and note which of its
        products recomputation skips."""
        trace = trace_block(self.cfg, 1, self.dtype, block)
        if trace.stray_tensors:
            raise ValueError(
                "block.pre or block.post stores tensors in attributes of the block "
                f"({', '.join(trace.stray_tensors)}). A layer that runs in chunks sees only some "
                "tokens at a time, and may run again in backward, so such a tensor would be wrong "
                "afterwards. Pass --recompute none"
            )
        name = trace.unread_product_name
        self.unread_products[block] = block.get_submodule(name) if name else None

    def allocate_buffers(self, device: torch.device) -> None:
        """Allocate `in_flight` sets of host buffers, and the two rounding buffers."""
        plan = self.plan
        sizes = [self.host_bytes(i) for i in range(plan.swapped_layers)]
        pinned = iter(pin_host_buffers(self.in_flight * sizes, device.type == "cuda"))
        # per set: one buffer per swapped layer
        self.free_host_buffers = [[next(pinned) for _ in sizes] for _ in range(self.in_flight)]

        groups = [
            range(first, first + plan.stride)
            for first in range(0, plan.swapped_layers, plan.stride)
        ]
        group_sizes = [[sizes[i] for i in group] for group in groups]
        largest = max(map(sum, group_sizes), default=0)
        rounding_buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device) for _ in group_sizes[:2]
        ]
        self.groups = []  # by group: pairs (swapped layer, its part of a rounding buffer)
        for g, group in enumerate(groups):
            used = rounding_buffers[g % 2][: sum(group_sizes[g])]
            self.groups.append(list(zip(group, used.split(group_sizes[g]))))

    def saved_tokens(self, i: int) -> int:
        """Return how many tokens the saved chunks of layer i have."""
        return min(self.tokens, self.plan.num_saved_chunks(i) * self.chunk_tokens)

    def host_bytes(self, i: int) -> int:
        """Return the bytes of swapped layer i's host buffer, which takes all SavedLayer.tensors."""
        cfg = self.cfg
        block = self.blocks[i]
        q_heads, *_ = block.heads
        element = self.dtype.itemsize
        head = cfg.head_dim * element  # bytes of one head of one token

        sizes = [self.saved_tokens(i) * heads * head for heads in block.heads]  # q, k, v
        if i % self.plan.stride == 0:
            sizes.append(self.tokens * cfg.dim * element)  # x
        if i >= self.plan.layers_recomputing_attention:
            sizes.append(self.tokens * q_heads * head)  # o
            sizes.append(self.tokens * q_heads * accumulation_dtype(self.dtype).itemsize)  # lse
        for chunk in self.chunks[: self.plan.num_saved_chunks(i)]:
            trace = trace_block(cfg, chunk.stop - chunk.start, self.dtype, block)
            sizes += [t.nbytes for t in trace.pre + trace.post]
        return sum(map(aligned, sizes))

    def start(
        self, model: LLaMA, positions: Positions, attention: Attention
    ) -> Callable[[int, Tensor], Tensor]:
        """Begin the forward pass of a micro-batch; return the function that runs one layer.

        run_layer(layer, x) runs one layer, given its number in the model: x (B, T, C) ->
        y (B, T, C). Raises RuntimeError if all host buffers belong to micro-batches that wait for
        their backward.
        """

        def for_all_tokens(t: Tensor, *width: int) -> Tensor:
            """(T, *width), or (B, T, *width) -> (N, *width)"""
            seq = self.tokens // self.batch_size
            return t.expand(self.batch_size, seq, *width).flatten(0, 1)

        cos, sin, *numbers = positions
        angles = [for_all_tokens(t, t.shape[-1]) for t in (cos, sin)]
        positions = Positions(*angles, *map(for_all_tokens, numbers))
        needs_backward = torch.is_grad_enabled()
        micro_batch = MicroBatch(positions, attention)

        if needs_backward and self.groups:
            if not self.free_host_buffers:
                raise RuntimeError(
                    f"{self.in_flight} forward passes already wait for their backward, and there "
                    f"are host buffers for no more (in_flight={self.in_flight}): run a backward "
                    "before the next forward"
                )
            micro_batch.host_buffers = self.free_host_buffers.pop()
            # runs once: when backward calls it, or when Python frees the micro-batch
            micro_batch.release_host_buffers = weakref.finalize(
                micro_batch, self.free_host_buffers.append, micro_batch.host_buffers
            )

        def run_layer(layer: int, x: Tensor) -> Tensor:
            if layer < self.first or not needs_backward:
                with torch.no_grad():
                    block = model.blocks[layer]
                    layer_attention = attention.of_layer(layer)
                    saved = SavedLayer(block, positions, self.to_row(x), layer_attention)
                    _, y = self.run_whole(saved)
                    return y.view(x.shape)
            forward_fn = functools.partial(self.forward, micro_batch, layer - self.first)
            backward_fn = functools.partial(self.backward, micro_batch, layer - self.first)
            return CustomGradient.apply(x, forward_fn, backward_fn, self.root)

        return run_layer

    # -- shapes

    def to_batch(self, t: Tensor) -> Tensor:
        """(1, N, ...) -> (B, T, ...)"""
        return t.unflatten(1, (self.batch_size, -1))[0]

    @staticmethod
    def to_row(t: Tensor) -> Tensor:
        """(B, T, ...) -> (1, N, ...), contiguous, as a tensor that is prefetched will be."""
        return t.flatten(0, 1)[None].contiguous()

    def write_chunk(self, whole: Tensor | None, chunk: slice, part: Tensor) -> Tensor:
        """Copy a chunk's part (1, n, ...) into whole (1, N, ...), and return whole.

        whole=None: allocate it. A part that has all tokens is returned as it is, without a copy.
        """
        if part.shape[1] == self.tokens:
            return part
        if whole is None:
            whole = part.new_empty(1, self.tokens, *part.shape[2:])
        whole[:, chunk] = part
        return whole

    # -- one layer

    def run_whole(self, saved: SavedLayer) -> tuple[list[Tensor], Tensor]:
        """Run a layer's forward on saved.tensors["x"] (1, N, C). Return q, k and v, and the layer's
        output y (1, N, C)."""
        qkv = self.run_pre(saved)
        self.run_attention(saved, qkv)
        return qkv, self.run_post(saved)

    def forward(self, micro_batch: MicroBatch, i: int, x: Tensor) -> Tensor:
        """Run layer i, and save what its backward needs: x (B, T, C) -> y (B, T, C)."""
        plan = self.plan
        self.free_offloaded(micro_batch, i - plan.lag)
        drops_x = i % plan.stride != 0
        last = micro_batch.last_output
        if drops_x and (last is None or storage_id(x) != storage_id(last)):
            layer = self.first + i
            raise ValueError(
                f"layer {layer} does not take the very tensor that layer {layer - 1} returned. "
                f"Backward runs layer {layer - 1} again to recompute this input, and would miss "
                "what was done between the two layers: do it inside the block"
            )
        micro_batch.last_output = None

        shape = x.shape
        x = self.to_row(x.detach())
        attention = micro_batch.attention.of_layer(self.first + i)
        num_saved = plan.num_saved_chunks(i)
        saved = SavedLayer(self.blocks[i], micro_batch.positions, x, attention, num_saved)
        qkv, y = self.run_whole(saved)

        saved_tokens = self.saved_tokens(i)
        if saved_tokens < self.tokens:  # copy: a view would keep the memory of all tokens alive
            qkv = [t[:, :saved_tokens].clone() for t in qkv]
        saved.tensors |= zip("qkv", qkv)
        if drops_x:
            del saved.tensors["x"]
        if i < plan.layers_recomputing_attention:
            del saved.tensors["o"], saved.tensors["lse"]
        micro_batch.saved[i] = saved
        if i < plan.swapped_layers:
            self.offload(micro_batch, i)
        next_drops_x = i + 1 < plan.layers and (i + 1) % plan.stride != 0
        if next_drops_x:
            micro_batch.last_output = y
        return y.view(shape)

    def run_half(
        self, saved: SavedLayer, half: str, j: int, for_backward: bool = False
    ) -> Iterable[Tensor]:
        """Run a half of a layer on chunk j, and return its outputs.

            half = "pre"    block.pre(x)        -> q, k, v (1, n, heads, D)
            half = "post"   block.post(x, o)    -> y (1, n, C), in a tuple

        The half runs with an autograd graph in two cases: the chunk is saved, or backward
        recomputes it (for_backward). Then the graph's backward is put into saved.backward_fns. In
        forward, a chunk that is not saved runs without a graph, and leaves nothing.
        """
        chunk = self.chunks[j]
        block = saved.block
        positions = Positions(*(t[chunk] for t in saved.positions))

        def pre(x):
            return block.pre(x, positions)

        def post(x, o):
            y = block.post(x, o, positions)
            return (y.unwrap() if isinstance(y, UnreadProduct) else y,)

        if half == "pre":
            fn = pre
            inputs = [saved.tensors["x"][:, chunk]]
        else:
            fn = post
            inputs = [saved.tensors["x"][:, chunk], saved.tensors["o"][:, chunk]]
        versions = [(t, t._version) for t in inputs]

        backward_fn = None
        if for_backward:
            with recomputation(self.unread_products[block]):
                backward_fn, outputs = run_detached(self.root, fn, *inputs)
        elif j < saved.num_saved:
            with saved.saving(half):
                backward_fn, outputs = run_detached(self.root, fn, *inputs)
        else:
            outputs = fn(*inputs)
        check_unchanged(half, versions)
        if backward_fn is not None:
            saved.backward_fns[half, j] = backward_fn
        return outputs

    def run_pre(self, saved: SavedLayer, for_backward: bool = False) -> list[Tensor]:
        """Return q, k, v (1, N, heads, D) of all tokens.

        for_backward: recompute the chunks that were not saved, and only these. q, k, v of the saved
        chunks are in saved.tensors.
        """
        qkv = [None, None, None]
        first = 0
        if for_backward and saved.num_saved:
            # begin with q, k, v of the saved chunks, which are the first ones, and go on after them
            first = saved.num_saved
            saved_qkv = [saved.tensors[name] for name in "qkv"]
            qkv = [self.write_chunk(None, slice(t.shape[1]), t) for t in saved_qkv]
        for j in range(first, len(self.chunks)):
            chunk = self.chunks[j]
            parts = self.run_half(saved, "pre", j, for_backward)
            qkv = [self.write_chunk(whole, chunk, part) for whole, part in zip(qkv, parts)]
            del parts  # before the next chunk's are allocated
        return qkv

    def run_attention(self, saved: SavedLayer, qkv: list[Tensor]) -> None:
        """Compute o (1, N, H, D) and the log-sum-exp, and put them into saved.tensors."""
        o, lse = saved.attention.forward(*map(self.to_batch, qkv))
        if lse.dtype != accumulation_dtype(self.dtype):
            raise ValueError(
                f"the attention kernel returned lse in {lse.dtype}: "
                f"it must be in {accumulation_dtype(self.dtype)} for inputs in {self.dtype}"
            )
        saved.tensors |= {"o": self.to_row(o), "lse": lse}

    def run_post(self, saved: SavedLayer) -> Tensor:
        """Return the layer's output y (1, N, C)."""
        y = None
        for j, chunk in enumerate(self.chunks):
            (part,) = self.run_half(saved, "post", j)
            y = self.write_chunk(y, chunk, part)
            del part  # before the next chunk's is allocated
        return y

    def backward(self, micro_batch: MicroBatch, i: int, dy: Tensor) -> Tensor:
        """Run the backward of layer i: dy (B, T, C) -> dx (B, T, C).

        Gradients of weights are not returned. A matrix passes its gradient to Matrix.events (ops),
        and autograd adds the gradient of a norm to the norm's weight.grad.
        """
        next_layer = i + 1
        ends_group = next_layer == self.plan.layers or next_layer % self.plan.stride == 0
        if ends_group:  # backward comes to a group at its last layer
            self.load_group(micro_batch, i // self.plan.stride)
            self.recompute_inputs(micro_batch, i)

        saved = micro_batch.saved.pop(i)
        qkv = self.run_pre(saved, for_backward=True)
        if "o" not in saved.tensors:
            self.run_attention(saved, qkv)

        # x gets a gradient from post (the residual path) and one from pre, by way of attention
        dx_of_post = []  # by chunk, (1, n, C); backward_post fills it

        # attention first launches the exchange of q, k, v and o, and then calls make_dout, so the
        # backward of post hides the exchange
        def make_dout():
            return self.backward_post(saved, self.to_row(dy), dx_of_post)

        qkvo = (*qkv, saved.tensors["o"])
        inputs = [*map(self.to_batch, qkvo), saved.tensors["lse"]]
        # With several chunks, q, k and v are copies, so attention may write dq, dk and dv over
        # them. With one chunk they may be the very tensors that block.pre's graph still needs
        in_place = len(self.chunks) > 1
        grads = saved.attention.backward(make_dout, *inputs, in_place)
        del inputs, qkv, qkvo
        dqkv = [self.to_row(t) for t in grads]
        dx = self.backward_pre(saved, dqkv, dx_of_post)
        self.prefetch_stream.done_reading(*saved.tensors.values())
        return dx.view(dy.shape)

    def backward_post(
        self, saved: SavedLayer, dy: Tensor, dx_of_post: list[Tensor]
    ) -> tuple[Tensor, list[Callable]]:
        """Run the backward of block.post: dy (1, N, C) -> do (B, T, H, D).

        The gradients of x are appended to dx_of_post, chunk by chunk. The last chunk's weight
        gradients are not computed yet. They are returned as functions, which attention calls while
        its all-to-alls run.
        """
        do = None
        last = len(self.chunks) - 1
        for j, chunk in enumerate(self.chunks):
            if j >= saved.num_saved:
                self.run_half(saved, "post", j, for_backward=True)
            backward_fn = saved.backward_fns.pop(("post", j))
            with deferred_weight_grads(on=j == last) as pending_weight_grads:
                dx_part, do_part = backward_fn([dy[:, chunk]])
            dx_of_post.append(dx_part)
            do = self.write_chunk(do, chunk, do_part)
            del backward_fn, dx_part, do_part  # before the next chunk's are allocated
        return self.to_batch(do), pending_weight_grads

    def backward_pre(
        self, saved: SavedLayer, dqkv: list[Tensor], dx_of_post: list[Tensor]
    ) -> Tensor:
        """Run the backward of block.pre, add dx_of_post, and return the sum dx (1, N, C).

        dqkv: dq, dk, dv (1, N, heads, D). dx_of_post is freed chunk by chunk.
        """
        dx = torch.empty_like(saved.tensors["x"])
        for j, chunk in enumerate(self.chunks):
            backward_fn = saved.backward_fns.pop(("pre", j))
            grads = [t[:, chunk] for t in dqkv]
            (dx_of_pre,) = backward_fn(grads)
            torch.add(dx_of_post.pop(0), dx_of_pre, out=dx[:, chunk])
            del backward_fn, dx_of_pre
        return dx

    # -- copies

    def offload(self, micro_batch: MicroBatch, i: int) -> None:
        """Launch the copy of layer i's saved tensors to the host."""
        saved = micro_batch.saved[i]
        host_buffer = micro_batch.host_buffers[i]
        needed = buffer_bytes(saved.tensors)
        if needed != len(host_buffer):
            raise ValueError(
                f"layer {self.first + i} saved {needed:,} bytes, but {len(host_buffer):,} bytes "
                "when it ran on tensors without data: the shapes of what a block saves must not "
                "depend on data, nor on attributes that LLaMA.__init__ gives to some blocks"
            )
        saved.on_host = carve(host_buffer, saved.tensors)
        # It is safe to overwrite the host buffer: in load_group, compute has waited for the
        # prefetch that read it last, and this stream waits for compute
        with self.offload_stream.after_compute():  # hidden by layers i + 1 to i + d - 1
            for name, host_tensor in saved.on_host.items():
                host_tensor.copy_(saved.tensors[name], non_blocking=True)
        saved.offload_done = self.offload_stream.record_event()

    def free_offloaded(self, micro_batch: MicroBatch, i: int) -> None:
        """Free the GPU memory of layer i's saved tensors, if the layer is swapped."""
        if i in micro_batch.saved and i < self.plan.swapped_layers:
            saved = micro_batch.saved[i]
            wait(saved.offload_done)  # for the copy to the host, hidden by d - 1 layers' forward
            self.offload_stream.done_reading(*saved.tensors.values())
            saved.tensors = saved.on_host

    def prefetch(self, micro_batch: MicroBatch, g: int) -> None:
        """Launch the copy of group g from the host to its rounding buffer.

        Does nothing if there is no such group, or if its copy was launched already.
        """
        if g < 0 or g in micro_batch.prefetch_done:
            return
        # It is safe to overwrite the rounding buffer: the backward of group g + 2, which used it,
        # is enqueued on compute, and this stream waits for compute. The host buffers are complete,
        # because compute has waited for their offload_done in free_offloaded
        with self.prefetch_stream.after_compute():  # hidden by group g + 1's backward
            for i, gpu_buffer in self.groups[g]:
                host_buffer = micro_batch.host_buffers[i]
                gpu_buffer.copy_(host_buffer, non_blocking=True)
                self.prefetch_stream.done_reading(host_buffer)
        micro_batch.prefetch_done[g] = self.prefetch_stream.record_event()

    def load_group(self, micro_batch: MicroBatch, g: int) -> None:
        """Make group g's saved tensors available on the GPU, and start prefetching group g - 1.

        Resident layers are on the GPU already. At the last layer, where backward begins, both
        rounding buffers are free. So the last two swapped groups are prefetched there.
        """
        last_swapped = len(self.groups) - 1
        if g > last_swapped:
            self.prefetch(micro_batch, last_swapped)
            self.prefetch(micro_batch, last_swapped - 1)
            return
        self.prefetch(micro_batch, g - 1)
        wait(micro_batch.prefetch_done[g])  # hidden by the backward of the layers after group g
        for i, gpu_buffer in self.groups[g]:
            saved = micro_batch.saved[i]
            saved.tensors = carve(gpu_buffer, saved.tensors)
        if g == 0:
            # All groups are prefetched, and compute waits for the last prefetch. The next offload
            # waits for compute, so from now on another micro-batch may use the host buffers
            micro_batch.release_host_buffers()

    def recompute_inputs(self, micro_batch: MicroBatch, last: int) -> None:
        """Recompute the inputs that a group's layers have dropped. last: the group's last layer.

        Does nothing if a group is one layer. Otherwise the group's first layer has its x, and each
        remaining layer gets its x from post of the layer before it.

        If p > 1, the all-gathers of the first layer's weights are exposed: backward has prefetched
        the weights of layer `last`, but this function begins with the group's first layer.
        """
        first = last // self.plan.stride * self.plan.stride
        for i in range(first, last):
            saved = micro_batch.saved[i]
            if "o" not in saved.tensors:
                self.run_attention(saved, self.run_pre(saved))
            micro_batch.saved[i + 1].tensors["x"] = self.run_post(saved)
