"""What is computed: LLaMA on one device, its operators, its loss, and how many FLOPs it takes.

A layer is token-wise but for one operator, and the code is cut along that line:

    q, k, v = block.pre(x, rope)        # norm, qkv projection, rotary           token-wise
    o, lse  = attention(q, k, v)        # the only operator that mixes tokens
    y       = block.post(x, o)          # output projection, norm, SwiGLU        token-wise

This file knows neither ranks nor streams. The outside acts on a model in five ways, and no other
(tests that simulate a step also wrap what `compiled` returns):

    matrix.events        raised where a Matrix is really used (PlainEvents says which, and when):
                         shard.py gathers weights and reduces gradients there; the weights that it
                         gives back are views of its own memory
    matrix.enter, join   called with x, before norm or SwiGLU, and with the product and whether
    and around           nobody reads it; `around` with what is computed before: tensor modes of
                         parallel.py, which give each rank some rows or columns of it (`part`)
    model.attention      called with q, k, v, returns o and the log-sum-exp: attention.py's kernels,
                         or a sequence over several ranks
                         (its `within` gives that of documents)
    model.layer_runner   called at the start of a forward pass with the model, angles and
                         attention, returns run_layer(i, x) -> y: offload.py runs layers in chunks
                         of tokens, and says what it wants of operators in backward (recomputation
                         and deferred_weight_grads, below)
    its parts, shapes    a pipeline's stage drops those that it lacks, and runs embedded, run_layers
                         and result itself; weights become views of what a rank holds

Another block changes class Block alone. Its operators may be any token-wise ones of PyTorch's that
draw no random numbers, since they may run again. Of those here the one to know is before(*inputs)
W^T (`project`): backward keeps what a layer keeps anyway (x, o, the residual stream, gate|up) and
1 / rms, and computes norms and SwiGLU again, in one pass with their gradients. Another activation
is two functions (`Before`). Biases on q, k, v (Qwen2) and norms on q and k (Qwen3) are fields of
ModelConfig; without them, no operator of theirs runs.

Left out: dropout, mixture of experts, inference caches, biases elsewhere, tied heads (untied on
import); files are checkpoint.py's.

    model = LLaMA(MODELS["tiny"])
    model.init_weights(seed=0)
    loss = model(tokens, labels)        # tokens, labels: (B, T) integers

Legend: B sequences, T tokens of one, N = B*T, C width, H query heads, K key/value heads, D head
width, F MLP width, V vocabulary, L layers.
"""
import contextlib
import functools
import math
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

IGNORE = -100  # a label that carries no loss

# ---------------------------------------------------------------------------- sizes and costs


ROPE_KEYS = {  # kind of rotary scaling: what its frequencies depend on, in Hugging Face's words
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor",
               "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_OPTIONS = ("beta_fast", "beta_slow", "attention_factor")  # of yarn; they have defaults


@dataclass(frozen=True)
class ModelConfig:
    vocab: int
    dim: int  # C
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    ffn: int  # F
    head_dim: int = 128  # D
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    # Hugging Face's keys; empty: none. Not hashed, since a dict cannot be
    rope_scaling: dict = field(default_factory=dict, hash=False)
    max_positions: int = 4096  # the length that the weights were trained at, x scaling's factor
    tied: bool = False  # the head was imported from the embedding; here they are two matrices
    qkv_bias: bool = False  # q, k and v have biases (Qwen2)
    qk_norm: bool = False  # each head of q and k is normalised before it is turned (Qwen3)

    def __post_init__(self):
        """Raise ValueError for what would be computed wrongly in silence: where kv_heads does not
        divide heads, the CPU's attention reads the next token's heads."""
        if self.heads % self.kv_heads:
            nearest = min(divisors(self.heads), key=lambda n: abs(n - self.kv_heads))
            raise ValueError(f"kv_heads is {self.kv_heads}, which does not divide the {self.heads} "
                             f"heads; nearest: {nearest}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary embedding turns pairs, so it is "
                             f"even; nearest: {self.head_dim + 1}")
        kind = rope_kind(self.rope_scaling)
        if kind not in ("default", *ROPE_KEYS):
            raise ValueError(f"rope scaling {kind!r} is unknown: {', '.join(ROPE_KEYS)} or none")


def divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def rope_kind(scaling: dict) -> str:
    """Return the kind of a rotary scaling; older files call it type."""
    return scaling.get("rope_type", scaling.get("type", "default"))


MODELS = {  #                   V       C     L   H   K   F
    "tiny": ModelConfig(256, 192, 4, 6, 6, 512, 32, max_positions=1024),
    "160m": ModelConfig(32000, 768, 12, 12, 12, 3072, 64),
    "1b": ModelConfig(32000, 2048, 24, 16, 16, 5504),
    "7b": ModelConfig(32000, 4096, 32, 32, 32, 11008),
    "13b": ModelConfig(32000, 5120, 40, 40, 40, 13824),
    "30b": ModelConfig(32000, 6656, 60, 52, 52, 17920),
    "65b": ModelConfig(32000, 8192, 80, 64, 64, 22016),
    "llama3-8b": ModelConfig(128256, 4096, 32, 32, 8, 14336, rope_theta=5e5, max_positions=8192),
}


def param_count(cfg: ModelConfig) -> int:
    """Return the number of parameters, as a model on meta has them."""
    return _param_count(cfg, Block)


@functools.cache
def _param_count(cfg: ModelConfig, block):
    with torch.device("meta"):
        model = LLaMA(replace(cfg, layers=1))
    return sum(p.numel() * (cfg.layers if name.startswith("blocks.") else 1)
               for name, p in model.named_parameters())


def flops_per_token(cfg: ModelConfig, seq: int, seen: float | None = None) -> tuple[float, float]:
    """Return model FLOPs a token, forward and backward: (causal, full). seen: of sequences with
    documents, what counts in place of seq: a token that sees k keys counts 2k - 1, and this is the
    mean (without documents it is seq).

    A parameter costs one multiply-add in forward and two in backward: 6P (the embedding is counted
    although it is a look-up, as the field does). Attention multiplies each query with s keys and
    the scores with s values: 4*s*H*D a layer, times three with the backward, 12*L*H*D*s ("full",
    the convention of AMSP and Megatron); causality halves the pairs: 6*L*H*D*s (Memo's, 5.1).
    Recomputation is never counted.
    """
    products = 6.0 * param_count(cfg)
    attention = 6.0 * cfg.layers * cfg.heads * cfg.head_dim * (seen or seq)
    return products + attention, products + 2 * attention


# ---------------------------------------------------------------------------- token-wise operators


def compiled(fn: Callable, dynamic: bool | None = False) -> Callable:
    """Return fn as one fused kernel on a GPU, and as it is written elsewhere.

    A kernel belongs to the shapes that it is called with (a run has few: whole sequences, chunks,
    a shorter last one), so that its sums do not depend on what ran before. dynamic=None: kernels
    for any shape from the second one on. `torch.compiler.set_stance("force_eager")` turns the
    compilation off. The compiler takes seconds to import, and a CPU does without.
    """
    @functools.cache
    def kernel():
        # kernels of one function: with or without gradients, whole or in chunks ...
        torch._dynamo.config.recompile_limit = 256
        return torch.compile(fn, dynamic=dynamic)

    @functools.wraps(fn)
    def run(x, *args):
        if x.is_cuda:
            return kernel()(x, *args)
        return fn(x, *args)

    run.is_compiled = True
    return run


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def copy_heads(source: Tensor, into: Tensor) -> None:
    """Copy heads (..., D), 16 bytes at a time where a head is one piece of memory: PyTorch's copy
    goes by elements. (Such heads begin at multiples of 16 bytes, or PyTorch refuses to.)"""
    if source.shape[-1] * source.itemsize % 16 == 0 and source.stride(-1) == 1:
        source = source.view(torch.complex128)
        into = into.view(torch.complex128)
    into.copy_(source)


@compiled
def norm_forward(x, weight, eps):
    """Return norm(x) (..., C), and 1 / rms(x) (..., 1)."""
    wide = x.to(accumulation_dtype(x.dtype))
    mean_square = wide.square().mean(-1, keepdim=True)
    scale = torch.rsqrt(mean_square + eps)
    return (wide * scale * weight).to(x.dtype), scale


@compiled
def norm_backward(dn, x, weight, scale):
    """Return n = norm(x) again (..., C), the gradient of x, and that of weight (C,). One kernel
    (where there are 2 C tokens or more), since no sum waits for scale, 1 / rms(x) (..., 1)."""
    unit = x * scale
    dn = dn.to(unit.dtype)
    dunit = dn * weight
    along = (dunit * unit).mean(-1, keepdim=True)  # n does not grow along x
    dx = scale * (dunit - unit * along)
    of_tokens = tuple(range(x.dim() - 1))
    dweight = (dn * unit).sum(of_tokens)
    n = unit * weight
    return n.to(x.dtype), dx.to(x.dtype), dweight


Rope = tuple[Tensor, Tensor]  # cos and sin of positions, (T, D/2), or (B, T, D/2)


def turn(x, cos, sin):
    """Turn pairs of x (B, T, heads, D) by their angles (T, D/2), or (B, T, D/2); minus sin turns
    them back.

    The pairs are (i, i + D/2), as in Hugging Face's checkpoints (Meta's own have (2i, 2i+1)).
    """
    cos = cos.unsqueeze(-2)  # (T, 1, D/2)
    sin = sin.unsqueeze(-2)
    x1, x2 = x.to(cos.dtype).chunk(2, -1)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    return torch.cat((y1, y2), -1).to(x.dtype)


@compiled
def split_rotate_forward(qkv, cos, sin, heads):
    """Cut qkv (B, T, H+2K, D) into q (B, T, H, D), k, v (B, T, K, D), q and k turned.

    They are tensors of their own: what a layer keeps for backward is 3 C, not 5 C.
    """
    q, k, v = qkv.split(heads, dim=2)
    q = turn(q, cos, sin)
    k = turn(k, cos, sin)
    return q, k, v.contiguous()


@compiled
def rotate_back_into(dy, cos, sin, dx):
    """Write the gradient of heads (B, T, h, D) before they were turned."""
    dx.copy_(turn(dy, cos, -sin))


@compiled
def swiglu_forward(gate_up):
    """Return silu(gate) * up (..., F) of gate|up (..., 2F)."""
    wide = gate_up.to(accumulation_dtype(gate_up.dtype))
    gate, up = wide.chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@compiled
def swiglu_backward_into(gate, up, da, dgate, dup):
    """Write the gradients of gate and up (N, F), and return a = silu(gate) * up again."""
    wide = accumulation_dtype(da.dtype)
    gate = gate.to(wide)
    up = up.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)
    dgate.copy_(da * up * slope)
    dup.copy_(da * silu)
    return (silu * up).to(da.dtype)


def swiglu_backward(da, gate_up):
    """Return a = swiglu(gate_up) (..., F) again, and the gradient of gate_up (..., 2F)."""
    dgate_up = torch.empty_like(gate_up)
    # halves of matrices: of these the compiler sees that they do not overlap, and makes one kernel
    gate, up = gate_up.flatten(0, -2).chunk(2, -1)
    dgate, dup = dgate_up.flatten(0, -2).chunk(2, -1)
    a = swiglu_backward_into(gate, up, da.flatten(0, -2), dgate, dup)
    return a.view_as(da), dgate_up


@compiled
def softmax_loss(logits, labels, scale):
    """Return of logits (N, V) each token's cross-entropy (N, 1), 0 if its label is IGNORE, and the
    gradient of their sum * scale."""
    labels = labels[:, None]
    valid = labels != IGNORE
    target = torch.arange(logits.shape[1], device=logits.device) == labels  # (N, V)
    lse = logits.logsumexp(-1, keepdim=True)
    of_target = (logits * target).sum(-1, keepdim=True)
    losses = torch.where(valid, lse - of_target, 0)
    probability = (logits - lse).exp()
    grad = probability - target.to(logits.dtype)
    return losses, grad * torch.where(valid, scale, 0)


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the accumulator's dtype (float32 of bf16 operands)."""
    accum_dtype = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype != accum_dtype:
        return torch.mm(a, b, out_dtype=accum_dtype)
    return a.to(accum_dtype) @ b.to(accum_dtype)  # no CPU kernel mixes the two


def weight_grad_into(dy: Tensor, x: Tensor, out: Tensor | None, beta: int) -> Tensor:
    """Write beta * out + dy^T x into out (rows, cols), of dy's dtype or wider: dy (N, rows), x (N,
    cols).

    Several contributions are summed in float32, which costs no more than bf16: the tensor cores
    accumulate in float32 anyway. beta = 0 ignores what `out` holds.
    """
    if out is None:
        return dy.t() @ x
    if not dy.is_cuda:  # no CPU kernel mixes the two
        dy = dy.to(out.dtype)
        x = x.to(out.dtype)
    mixed = {} if out.dtype == dy.dtype else {"out_dtype": out.dtype}
    return torch.addmm(out, dy.t(), x, beta=beta, out=out, **mixed)


# ---------------------------------------------------------------------------- matrices and events


class PlainEvents:
    """What a matrix says to the outside, and what happens on one device: nothing.

    unshard(module, backward) -> weight    it is about to be used, in a backward pass or not: what
                                           reads it is enqueued before the next layer is unsharded
    add_grad(module, compute) -> grad      a contribution to its gradient is due: compute(out, beta)
                                           returns beta * out + contribution (out=None: a new
                                           tensor). The result goes to autograd: None if the outside
                                           has put it elsewhere.
    """

    def unshard(self, module: nn.Module, backward: bool) -> Tensor:
        return module.weight

    def add_grad(self, module: nn.Module, compute: Callable) -> Tensor | None:
        return compute(None, 0)


class _Mode(threading.local):
    """What a backward pass that runs operators by hand wants of them (offload.py)."""

    recomputing = False  # a forward runs again: its events say that the pass goes backward
    unneeded: nn.Module | None = None  # a matrix whose product ends a layer that nobody reads
    deferred: list[Callable] | None = None  # where products for weights wait for their turn


_mode = _Mode()


@contextlib.contextmanager
def recomputation(unneeded: nn.Module | None):
    """Run a forward again inside a backward pass. unneeded: a matrix whose product is left out,
    because only gradients of what it is added to are wanted."""
    before = _mode.recomputing, _mode.unneeded
    _mode.recomputing = True
    _mode.unneeded = unneeded
    try:
        yield
    finally:
        _mode.recomputing, _mode.unneeded = before


@contextlib.contextmanager
def deferred_weight_grads(on: bool):
    """Yield a list which, if `on`, takes the products for weights of a backward pass instead of
    running them: functions to call in order, when there is something to hide under them."""
    before = _mode.deferred
    deferred = []
    _mode.deferred = deferred if on else None
    try:
        yield deferred
    finally:
        _mode.deferred = before


def weight_grad(matrix: nn.Module, dy: Tensor, x: Tensor) -> Tensor | None:
    """Raise add_grad with dW = dy^T x of a projection, or defer it: dy (..., rows), x (..., cols).
    Returns what autograd gets."""
    dy = dy.reshape(-1, dy.shape[-1])  # (N, rows)
    x = x.detach().reshape(-1, x.shape[-1])  # (N, cols), without the graph that it was saved from

    compute = functools.partial(weight_grad_into, dy, x)  # of out and beta
    add_grad = functools.partial(matrix.events.add_grad, matrix, compute)

    def add_grad_later():
        grad = add_grad()
        if grad is not None and matrix.weight.requires_grad:  # autograd has gone on without it
            old = matrix.weight.grad
            matrix.weight.grad = grad if old is None else old + grad

    if _mode.deferred is None:
        return add_grad()
    _mode.deferred.append(add_grad_later)
    return None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        n, scale = norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx, dn):
        _, dx, dweight = norm_backward(dn, *ctx.saved_tensors)
        return dx, dweight, None


class _SplitRotate(Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, heads):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return split_rotate_forward(qkv, cos, sin, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        batch, tokens, _, width = dq.shape
        dqkv = dq.new_empty(batch, tokens, sum(ctx.heads), width)
        of_q, of_k, of_v = dqkv.split(ctx.heads, dim=2)
        cos, sin = ctx.saved_tensors  # once: PyTorch's checkpoints give them once
        rotate_back_into(dq, cos, sin, of_q)
        rotate_back_into(dk, cos, sin, of_k)
        copy_heads(dv, of_v)
        return dqkv, None, None, None


@dataclass(frozen=True)
class Before:
    """What a projection computes of its inputs before the product, and computes again in backward:
    forward(*inputs) -> (a, what backward wants too, if anything), and backward(da, *inputs,
    *wanted) -> (a, the inputs' gradients) in one pass."""

    forward: Callable
    backward: Callable


def same(x, *_):
    return x


class ThereAndBack(Function):
    """there(x), whose gradient is back(dy). root: any tensor that requires gradients, if x should
    not."""

    @staticmethod
    def forward(ctx, x, there, back, root=None):
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.back(dy), None, None, None


NOTHING = Before(lambda x: (x,), lambda da, x: (x, da))
SWIGLU = Before(lambda gate_up: (swiglu_forward(gate_up),), swiglu_backward)


class _Project(Function):
    """before(*inputs) W^T. Autograd keeps the inputs, and what else `before` wants: never W, which
    may be a buffer that is refilled meanwhile, nor what goes into the product."""

    @staticmethod
    def forward(ctx, matrix, before, weight, *inputs):
        ctx.matrix = matrix
        ctx.before = before
        if _mode.unneeded is matrix:  # nobody reads it
            ctx.save_for_backward(*inputs)
            x = inputs[0]
            # whoever reads it all the same shall not get numbers
            return x.new_full((), math.nan).expand(*x.shape[:-1], matrix.shape[0])
        a, *wanted = before.forward(*inputs)
        ctx.wants_more = bool(wanted)
        ctx.save_for_backward(*inputs, *wanted)
        w = matrix.events.unshard(matrix, backward=_mode.recomputing)
        return F.linear(a, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        matrix = ctx.matrix
        da = dy @ matrix.events.unshard(matrix, backward=True)
        a, *grads = ctx.before.backward(da, *ctx.saved_tensors)
        dw = weight_grad(matrix, dy, a)
        return None, None, dw, *grads


def project(matrix: nn.Module, before: Before, x: Tensor, *inputs: Tensor) -> Tensor:
    """Return before(x, *inputs) W^T (..., rows)."""
    x = matrix.enter(x)
    before = matrix.around(before)
    y = _Project.apply(matrix, before, matrix.weight, x, *inputs)
    return matrix.join(y, _mode.unneeded is matrix)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32 or wider."""
    return _RMSNorm.apply(x, weight, eps)


def final_matrix(y: Tensor) -> nn.Module | None:
    """Return the matrix of y = h + project(matrix, ...), if no other gradient passes that product:
    it may be left out where only gradients of y are wanted, so its values alone, as of
    product.detach(), are nobody else's. None: y is of another kind, or backward wants what is
    computed before the product."""
    if y.grad_fn.name() != "AddBackward0":
        return None
    (h, _), (product, _) = y.grad_fn.next_functions
    if (not isinstance(product, _Project._backward_cls) or product.wants_more
            or product in graph_of(h)):
        return None
    return product.matrix


def graph_of(node) -> set:
    """Return all nodes of autograd's graph from one on, and None."""
    found = {None}
    left = [node]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found


class _Embedding(Function):
    @staticmethod
    def forward(ctx, weight, tokens, module):
        ctx.tokens = tokens
        ctx.module = module
        w = module.events.unshard(module, backward=False)  # (V, C)
        return F.embedding(tokens, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        module = ctx.module
        vocab, _ = module.shape

        def compute(out, beta):
            dw = torch.ops.aten.embedding_dense_backward(
                dx, ctx.tokens, vocab, -1, False)  # (V, C)
            if out is None:
                return dw
            return out.add_(dw) if beta else out.copy_(dw)

        return module.events.add_grad(module, compute), None, None


LOSS_ELEMENTS = 2**27  # logits of one chunk: 512 MiB of float32


class _HeadLoss(Function):
    """Head and cross-entropy over chunks of tokens: N x V logits never exist at once.

    The loss is a scalar, so its gradient is known up to a factor as soon as a chunk's logits are:
    it is computed on the spot, and the head's matrix is read in the forward pass alone.

    Takes x (N, C), labels (N,); returns the sum over valid tokens of cross-entropy(x W^T, label) *
    scale, and each token's cross-entropy (N, 1), which has no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, labels, scale, head, differentiate):
        w = head.events.unshard(head, backward=False)  # (V, C)
        chunk = max(1, LOSS_ELEMENTS // len(w))
        if differentiate:
            dx = torch.empty_like(x)
            dw = torch.empty_like(w, dtype=accumulation_dtype(x.dtype))
            ctx.save_for_backward(dx, dw)
            ctx.head = head
        losses = []
        for i in range(0, len(x), chunk):
            rows = slice(i, i + chunk)
            part, dlogits = softmax_loss(matmul_fp32(x[rows], w.t()), labels[rows], scale)
            losses.append(part)
            if differentiate:
                dlogits = dlogits.to(x.dtype)
                torch.mm(dlogits, w, out=dx[rows])
                weight_grad_into(dlogits, x[rows], dw, int(i > 0))
            del dlogits  # before the next ones are made
        loss = sum(part.sum() * scale for part in losses)
        losses = torch.cat(losses)
        ctx.mark_non_differentiable(losses)
        return loss, losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _):
        dx, dw = ctx.saved_tensors

        def compute(out, beta):
            if beta:
                return out.addcmul_(dw, dloss)
            return torch.mul(dw, dloss, out=out)

        dw_out = ctx.head.events.add_grad(ctx.head, compute)
        dx = dx * dloss.to(dx.dtype)
        return dx, dw_out, None, None, None, None


# ---------------------------------------------------------------------------- the model


def rope_frequencies(cfg: ModelConfig, device=None) -> tuple[Tensor, float]:
    """Return angles a position (D/2,), float64, made on the device, so that nothing waits for a
    copy; and the factor on cos and sin (YaRN's temperature).

    Scaling for lengths past the trained one: "linear" (positions shrink), "llama3" (only the slow
    frequencies shrink), "yarn" (a ramp between the two, arXiv 2309.00071).
    """
    theta = cfg.rope_theta
    half = cfg.head_dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=device)
    freq = theta ** -(steps / half)
    opt = cfg.rope_scaling
    kind = rope_kind(opt)
    if kind == "default":
        return freq, 1.0
    shrunk = freq / opt["factor"]
    if kind == "linear":
        return shrunk, 1.0
    trained = opt["original_max_position_embeddings"]
    if kind == "llama3":
        turns = trained * freq / (2 * math.pi)  # full turns within the trained length
        low = opt["low_freq_factor"]
        high = opt["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        scale = keep + (1 - keep) / opt["factor"]
        return freq * scale, 1.0

    def index(turns):  # the frequency that turns so often within the trained length
        return half * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

    fast = index(opt.get("beta_fast") or 32)
    slow = index(opt.get("beta_slow") or 1)
    low = max(0, math.floor(fast))
    high = min(math.ceil(slow), cfg.head_dim - 1)
    width = high - low or 1e-3
    ramp = ((steps - low) / width).clamp(0, 1)
    usual = 0.1 * math.log(max(opt["factor"], 1)) + 1
    return freq * (1 - ramp) + shrunk * ramp, opt.get("attention_factor") or usual


def rope_tables(cfg: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Rope:
    """Return cos, sin (..., D/2) of integer positions, (T,) or (B, T).

    The angles are float64: near position 2^20 float32 numbers lie 1/16 apart.
    """
    freq, factor = rope_frequencies(cfg, positions.device)
    angle = positions.double().unsqueeze(-1) * freq
    cos = angle.cos() * factor
    sin = angle.sin() * factor
    return cos.to(dtype), sin.to(dtype)


@dataclass(frozen=True)
class Cut:
    """Which rows and columns of a whole matrix are here, one after the other."""

    whole: tuple[int, int]  # its shape
    rows: tuple[tuple[int, int], ...]  # first and end of each run of rows
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        first_col, end_col = self.cols
        rows = sum(end - first for first, end in self.rows)
        return rows, end_col - first_col

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return what of the whole matrix (rows, cols) is here, run by run."""
        cols = slice(*self.cols)
        return [whole[first:end, cols] for first, end in self.rows]

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of it as one matrix."""
        return torch.cat(self.views(whole))

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write it, as one matrix, to its places in the whole one."""
        for view in self.views(whole):
            rows = len(view)
            view.copy_(part[:rows])
            part = part[rows:]


class Matrix(nn.Module):
    """A weight (rows, cols), used as a projection; `events` tells the outside when.

    cut: how neighbouring ranks may share it (parallel.py): "rows", and in these `parts` each by
    itself, or "columns". Such a rank has `part` of it, and the outside says how x enters the
    product and how products join, and what goes around what is computed before. "whole": it is not
    cut, and each column applies all of it to its own tokens. "": nobody has said; --tp refuses it.
    A matrix of columns is cut in equal runs: its input is no concatenation of `parts`. A weight is
    project's to use: the gradient of another use of it ends the run.
    """

    events = PlainEvents()
    enter = join = around = staticmethod(same)
    part: Cut | None = None  # what of the whole matrix is here; None: all

    def __init__(self, rows: int, cols: int, cut: str = "", parts: tuple[int, ...] = ()):
        super().__init__()
        self.shape = (rows, cols)
        self.cut = cut
        self.parts = parts or (rows,)
        if cut == "columns" and parts or sum(self.parts) != rows:
            raise ValueError(f"Matrix({rows}, {cols}, {cut!r}, parts={parts}): parts are of rows, "
                             'add up to them, and belong to cut="rows"; columns are cut in equal '
                             "runs")
        self.weight = nn.Parameter(torch.empty(rows, cols))

    def take(self, part: Cut) -> None:
        """Have a part of the matrix alone; on meta."""
        self.part = part
        self.shape = part.shape
        self.weight = nn.Parameter(self.weight.new_empty(self.shape))

    def forward(self, x: Tensor) -> Tensor:
        return project(self, NOTHING, x)


class Vector(nn.Module):
    """A weight that is too small to shard, of a norm or a bias: float32 or wider, whole on every
    rank. like: the matrix whose rows it goes along with."""

    def __init__(self, dim: int, like: Matrix | None = None):
        super().__init__()
        self.like = (like,)  # no module of this one
        self.weight = nn.Parameter(torch.empty(dim))

    def here(self) -> Tensor:
        """Return the elements that go along with what is here of the matrix."""
        (matrix,) = self.like
        if matrix is None or matrix.part is None:
            return self.weight
        return torch.cat([self.weight[first:end] for first, end in matrix.part.rows])


class Block(nn.Module):
    """One layer. Whoever changes it changes it here alone: chunks, swapping, recomputation and
    sharding follow, since they act on what autograd saves and on the events of a Matrix. Matrices
    are defined in the order of their use, by which they are gathered. A weight's name says what it
    begins as (initial_weight: norms, out, down) and where it is in files (checkpoint._HF).

    A norm behind the layer (a sandwich), say, is a vector in __init__, and a line in post:

        self.last_norm = Vector(cfg.dim)        # files: checkpoint._HF
        ...
        y = h + project(self.down, SWIGLU, gate_up)
        return x + rms_norm(y, self.last_norm.weight, self.cfg.norm_eps)

    A new weight is a Matrix if it is large, so that it is sharded, and a Vector if it is small.
    Chunks call pre and post of some tokens each: nothing but attention mixes tokens, a layer sees
    no other layer, all are alike, and shapes of what autograd saves do not depend on data. Under
    --tp a column has some heads and features: nothing but a product sums over them.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        q = cfg.heads * cfg.head_dim
        kv = cfg.kv_heads * cfg.head_dim
        qkv = q + 2 * kv
        self.norm1 = Vector(cfg.dim)
        self.qkv = Matrix(qkv, cfg.dim, cut="rows", parts=(q, kv, kv))
        self.qkv_bias = Vector(qkv, like=self.qkv) if cfg.qkv_bias else None
        self.q_norm = Vector(cfg.head_dim) if cfg.qk_norm else None
        self.k_norm = Vector(cfg.head_dim) if cfg.qk_norm else None
        self.out = Matrix(cfg.dim, q, cut="columns")
        self.norm2 = Vector(cfg.dim)
        self.gate_up = Matrix(2 * cfg.ffn, cfg.dim, cut="rows", parts=2 * (cfg.ffn,))
        self.down = Matrix(cfg.dim, cfg.ffn, cut="columns")
        self.norm = Before(  # of x and the norm's weight
            lambda x, weight: norm_forward(x, weight, cfg.norm_eps), norm_backward)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return how many of q, k and v the matrices here make."""
        width = self.cfg.head_dim
        q = self.out.shape[1] // width
        kv = (self.qkv.shape[0] // width - q) // 2
        return q, kv, kv

    def pre(self, x: Tensor, rope: Rope):
        """x (B, T, C) -> q (B, T, H, D), k, v (B, T, K, D)."""
        eps = self.cfg.norm_eps
        heads = self.heads
        qkv = project(self.qkv, self.norm, x, self.norm1.weight)
        if self.qkv_bias:
            qkv = qkv + self.qkv_bias.here().to(qkv.dtype)
        qkv = qkv.unflatten(-1, (sum(heads), -1))  # (B, T, H+2K, D)
        if self.q_norm:
            q, k, v = qkv.split(heads, dim=2)
            q = rms_norm(q.contiguous(), self.q_norm.weight, eps)
            k = rms_norm(k.contiguous(), self.k_norm.weight, eps)
            qkv = torch.cat((q, k, v), 2)
        return _SplitRotate.apply(qkv, *rope, heads)

    def post(self, x: Tensor, o: Tensor) -> Tensor:
        """The layer's input x (B, T, C) and attention output o (B, T, H, D) -> y (B, T, C)."""
        h = x + self.out(o.flatten(2))
        gate_up = project(self.gate_up, self.norm, h, self.norm2.weight)
        return h + project(self.down, SWIGLU, gate_up)


def plain_attention(q: Tensor, k: Tensor, v: Tensor):
    """Causal attention of (B, T, heads, D) tensors by PyTorch alone, without documents;
    attention.py has kernels."""
    inputs = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
    o = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2), None


def whole_layer(block: Block, x: Tensor, rope: Rope, attention: Callable) -> Tensor:
    """x (B, T, C) -> y (B, T, C); autograd keeps what operators save."""
    o, _ = attention(*block.pre(x, rope))
    return block.post(x, o)


def whole_layers(model: "LLaMA", rope: Rope, attention: Callable) -> Callable:
    """Return the layer_runner's run_layer for whole layers."""
    return lambda i, x: whole_layer(model.blocks[i], x, rope, attention)


class LLaMA(nn.Module):
    """attention: called with (q, k, v), returns (o, lse); its within(documents) is that of a
    micro-batch in which tokens attend inside documents alone."""

    def __init__(self, cfg: ModelConfig, attention: Callable = plain_attention):
        super().__init__()
        self.cfg = cfg
        self.attention = attention
        self.layer_runner = whole_layers
        self.embed = Matrix(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = Vector(cfg.dim)
        self.head = Matrix(cfg.vocab, cfg.dim)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple]:
        """Of the whole model's weights, asked for before it is cut. Raises ValueError if two
        modules share one: each would get its own."""
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        for path, module in self.named_modules():
            for name, _ in module.named_parameters(path, recurse=False):
                if name not in shapes:
                    raise ValueError(f"{name} is another module's weight: use one Vector module in "
                                     "both places, or two matrices")
        return shapes

    def init_weights(self, seed: int) -> None:
        for name, p in self.named_parameters():
            p.data.copy_(initial_weight(self.cfg, name, p.shape, seed, p.device))

    def forward(self, tokens: Tensor, labels: Tensor | None = None, scale: Tensor | None = None,
                positions: Tensor | None = None, documents=None, each: bool = False) -> Tensor:
        """Return logits (B, T, V) without labels, else the sum of the valid tokens' losses * scale;
        each: of each token its loss (B, T) instead, 0 where it does not count, and without
        gradients.

        tokens, labels (B, T); labels equal to IGNORE do not count. scale: a 0-dim tensor, by
        default 1 / valid tokens here; whoever splits a batch passes 1 / valid tokens of all parts,
        and the parts' losses and gradients add up. positions (T,), or (B, T): by default 0 ... T-1.
        documents: where they lie, as model.attention wants it (attention.Documents).

        A stage of a pipeline runs embedded, run_layers (of x of the stage before it) and result,
        not this: what a fork changes is changed in them.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.run_layers(range(len(self.blocks)), self.layer_runner, self.embedded(tokens),
                            positions, documents)
        return self.result(x, labels, scale, each)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return what the first layer takes, (B, T, C)."""
        return _Embedding.apply(self.embed.weight, tokens, self.embed)

    def run_layers(self, layers: Iterable[int], start: Callable, x: Tensor, positions: Tensor,
                   documents=None) -> Tensor:
        """Return the last layer's result, of x (B, T, C) before the first. start: a
        layer_runner."""
        rope = rope_tables(self.cfg, positions, accumulation_dtype(x.dtype))
        attention = self.attention
        if documents is not None:  # attention.py's
            attention = attention.within(documents)
        run_layer = start(self, rope, attention)
        for i in layers:
            x = run_layer(i, x)
        return x

    def result(self, x: Tensor, labels: Tensor | None, scale: Tensor | None, each: bool) -> Tensor:
        """Return what `forward` does, of the last layer's result (B, T, C)."""
        x = rms_norm(x, self.norm.weight, self.cfg.norm_eps)
        if labels is None:
            return self.head(x)
        if scale is None:
            valid = (labels != IGNORE).sum().clamp(min=1)
            scale = 1 / valid.to(accumulation_dtype(x.dtype))
        loss, losses = _HeadLoss.apply(
            x.flatten(0, 1), self.head.weight, labels.flatten(), scale, self.head,
            torch.is_grad_enabled())
        return losses.view_as(labels) if each else loss

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Run a step's micro-batches, each the arguments of `forward`, one after the other; the
        gradients add up. Returns the sum of their losses."""
        loss = 0.0
        for micro_batch in micro_batches:
            part = self(*micro_batch)
            part.backward()
            loss += part.detach()
        return loss


def initial_weight(cfg: ModelConfig, name: str, shape: tuple, seed: int, device) -> Tensor:
    """Return one tensor of a fresh model, float32: embeddings normal(0, 1), matrices
    normal(0, 1/sqrt(columns)), so that each product is as large as its input, the two that write
    into the residual stream smaller by sqrt(2L), norms 1, biases 0. It depends on (seed, name)
    alone, so that ranks may make their parts in any order."""
    if len(shape) == 1:
        return torch.full(shape, float("norm" in name), device=device)
    # a CPU's generator takes 32 bits; of one name, crc32 gives every start value another result
    seed_of_name = zlib.crc32(name.encode(), seed)
    rng = torch.Generator(device).manual_seed(seed_of_name)
    std = 1.0 if name == "embed.weight" else 1 / math.sqrt(shape[1])
    if name.endswith(("out.weight", "down.weight")):
        std /= math.sqrt(2 * cfg.layers)
    return torch.empty(shape, device=device).normal_(0, std, generator=rng)
