"""LLaMA on one device: the model, its attention kernels, its loss, and what it costs.

A layer is token-wise but for one operator, and the code is cut along that line:

    q, k, v = block.pre(x, rope)        # norm, qkv projection, rotary           token-wise
    o, lse  = attention(q, k, v)        # the only operator that mixes tokens
    y       = block.post(x, o)          # output projection, norm, SwiGLU        token-wise

so a layer can be run in chunks of tokens, and a sequence can be split over ranks, from outside:
this file knows neither ranks nor streams. What it offers to the outside are three events, raised
where a matrix is really used (`PlainEvents`): *need* (the weight must be here), *release*, and
*piece* (one piece of its gradient can be computed). They replace PyTorch's hooks, which nested
`torch.autograd.grad` does not fire.

Left out: dropout, biases, mixture of experts, inference caches, tied heads (untied on import).

    model = LLaMA(MODELS["tiny"]); model.init_weights(seed=0)
    loss = model(tokens, labels)        # tokens, labels: (B, T) integers

Legend: B sequences, T tokens, N = B*T, C width, H query heads, K key/value heads, D head width,
F MLP width, V vocabulary, L layers.
"""
import contextlib
import functools
import importlib
import json
import math
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # a label that carries no loss

# ---------------------------------------------------------------------------- sizes and costs


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
    rope_scaling: dict = field(default_factory=dict)  # Hugging Face's keys; empty: none
    max_positions: int = 4096  # the length that the weights were trained at
    tied: bool = False  # the head was imported from the embedding; here they are two matrices

    def __post_init__(self):
        """Raise ValueError for sizes that no kernel computes, or computes wrongly in silence: where
        kv_heads does not divide heads, the CPU's attention reads the next token's heads."""
        sizes = {name: getattr(self, name) for name in
                 ("vocab", "dim", "layers", "heads", "kv_heads", "ffn", "head_dim")}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: a whole number from 1")
        if self.heads % self.kv_heads:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            nearest = min(legal, key=lambda n: abs(n - self.kv_heads))
            raise ValueError(f"kv_heads is {self.kv_heads}, which does not divide the {self.heads} "
                             f"heads; nearest: {nearest}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary embedding turns pairs, so it is "
                             f"even; nearest: {self.head_dim + 1}")


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
    """All parameters: embedding, head, and per layer qkv, output, gate, up, down and two norms."""
    attn = cfg.dim * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
    layer = attn + 3 * cfg.dim * cfg.ffn + 2 * cfg.dim
    return 2 * cfg.vocab * cfg.dim + cfg.layers * layer + cfg.dim


def flops_per_token(cfg: ModelConfig, seq: int) -> tuple[float, float]:
    """Model FLOPs a token, forward and backward, (causal, full).

    A parameter costs one multiply-add in forward and two in backward: 6P (the embedding is counted
    although it is a look-up, as the field does). Attention multiplies each query with s keys and
    the scores with s values: 4*s*H*D a layer, times three with the backward, 12*L*H*D*s ("full",
    the convention of AMSP and Megatron); causality halves the pairs: 6*L*H*D*s (Memo's, 5.1).
    Recomputation is never counted.
    """
    attention = 6.0 * cfg.layers * cfg.heads * cfg.head_dim * seq
    return 6.0 * param_count(cfg) + attention, 6.0 * param_count(cfg) + 2 * attention


def activation_bytes(cfg: ModelConfig, tokens: int, itemsize: int) -> int:
    """Bytes that all layers keep for the backward of `tokens` tokens (Memo's skeletal activations).

    A layer keeps x, norm(x), q, k, v, o, h = x + attention, norm(h), gate|up, SwiGLU: with H = K
    and F = 8/3 C these are 16 C elements a token. The log-sum-exp is float32, one a head.
    """
    qo, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    elements = 4 * cfg.dim + 2 * qo + 2 * kv + 3 * cfg.ffn
    return cfg.layers * tokens * (elements * itemsize + 4 * cfg.heads)


# ---------------------------------------------------------------------------- attention kernels
# A kernel is a pair of functions on (B, T, heads, D) tensors, causal, scaled by 1/sqrt(D):
#   forward(q, k, v) -> o, lse          lse (B, H, T), natural logarithm, float32 or wider
#   backward(do, q, k, v, o, lse) -> dq, dk, dv
# aten's operators want (B, heads, T, D): transposed views, which cost nothing.

_aten = torch.ops.aten
_module = importlib.import_module  # a dictionary look-up after the first call


def _swap(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def _fa4_forward(q, k, v):
    warnings.filterwarnings("ignore", "Argument aux_data")  # its compiler's, once a kernel
    o, lse, *_ = _module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, causal=True, return_lse=True)
    return o, lse


def _fa4_backward(do, q, k, v, o, lse):
    exact = torch.are_deterministic_algorithms_enabled()
    return _module("flash_attn.cute.interface")._flash_attn_bwd(
        q, k, v, o, do, lse, causal=True, deterministic=exact)[:3]


_FA2 = dict(dropout_p=0.0, causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0,
            alibi_slopes=None)


def _fa2_forward(q, k, v):
    o, lse, *_ = _module("flash_attn.flash_attn_interface")._flash_attn_forward(
        q, k, v, softmax_scale=q.shape[-1] ** -0.5, return_softmax=False, **_FA2)
    return o, lse


def _fa2_backward(do, q, k, v, o, lse):
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _module("flash_attn.flash_attn_interface")._flash_attn_backward(
        do, q, k, v, o, lse, *grads, softmax_scale=q.shape[-1] ** -0.5,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_FA2)
    return grads


def _cudnn_forward(q, k, v):
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*_swap(q, k, v), None, True, 0.0, True)
    return o.transpose(1, 2), lse.view(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(do, q, k, v, o, lse):
    t, no_seed = q.shape[1], torch.zeros((), dtype=torch.int64, device=q.device)
    do, q, k, v, o = _swap(do, q, k, v, o)
    return _swap(*_aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.unsqueeze(-1), no_seed, no_seed, None, None, None, t, t, 0.0, True))


def _flash_forward(q, k, v):
    o, lse, *_ = _aten._scaled_dot_product_flash_attention(*_swap(q, k, v), 0.0, True)
    return o.transpose(1, 2), lse


def _flash_backward(do, q, k, v, o, lse):
    t, no_seed = q.shape[1], torch.zeros(2, dtype=torch.uint64, device=q.device)
    do, q, k, v, o = _swap(do, q, k, v, o)
    return _swap(*_aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, None, None, t, t, 0.0, True, no_seed, no_seed))


def _cpu_forward(q, k, v):
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*_swap(q, k, v), 0.0, True)
    return o.transpose(1, 2), lse


def _cpu_backward(do, q, k, v, o, lse):
    do, q, k, v, o = _swap(do, q, k, v, o)
    return _swap(*_aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, True))


def _simulated_backward(do, q, k, v, o, lse):
    """The CPU's, requesting what FlashAttention-4's does: its sums of dq, and two rows."""
    grads = _cpu_backward(do, q, k, v, o, lse)
    _ = q.new_empty(q.shape, dtype=torch.float32), lse.clone(), lse.clone()
    return grads


@dataclass(frozen=True)
class Kernel:
    forward: Callable
    backward: Callable
    capability: tuple[int, ...]  # CUDA major versions that it runs on; empty: the CPU alone
    module: str = ""  # what must be importable
    package: str = ""  # and where it comes from


KERNELS = {  # best first: "auto" takes the first usable one
    "fa4": Kernel(_fa4_forward, _fa4_backward, (9, 10), "flash_attn.cute.interface",
                  "flash-attn-4[cu13]"),
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, (9, 10)),
    "fa2": Kernel(_fa2_forward, _fa2_backward, (8, 9), "flash_attn.flash_attn_interface",
                  "flash-attn"),
    "flash": Kernel(_flash_forward, _flash_backward, (8, 9, 10, 11, 12)),
    "cpu": Kernel(_cpu_forward, _cpu_backward, ()),
}
SIMULATED = Kernel(_cpu_forward, _simulated_backward, ())  # a GPU's, on fake tensors


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why a kernel cannot run here, or None if it can."""
    kernel = KERNELS[name]
    if device.type != "cuda":
        return f"it needs a GPU, this is {device.type}" if kernel.capability else None
    if (major := torch.cuda.get_device_capability(device)[0]) not in kernel.capability:
        return f"it does not run on CUDA capability {major}.x"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if kernel.module:
        try:
            importlib.import_module(kernel.module)
        except Exception as e:  # a broken install raises more than ImportError
            return f"`pip install '{kernel.package}'` is missing or broken: {type(e).__name__}: {e}"
    return None


def pick_kernel(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel's name, "auto" resolved. Raises ValueError if it is unknown or unusable here."""
    reasons = {k: why_not(k, device, dtype) for k in KERNELS}
    usable = [k for k in KERNELS if reasons[k] is None]
    if name == "auto" and usable:
        return usable[0]
    reason = reasons.get(name, "there is no such kernel here")
    if name == "auto":
        reason = "; ".join(f"{k}: {why}" for k, why in reasons.items())
    if reason:
        raise ValueError(f"--attention {name}: {reason}; usable: {', '.join(usable) or 'none'}")
    return name


MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits: no call sees a larger tensor


def _head_groups(q: Tensor, k: Tensor):
    """Cut (B, T, H, D) tensors into (sequence, query heads, kv heads) slices of MAX_ELEMENTS.

    At 1M tokens, 32 heads and D = 128, a tensor has 4.3e9 elements: three groups. Where the query
    heads of one kv head are too many, they are cut too.
    """
    most = MAX_ELEMENTS // (q.shape[1] * q.shape[3])  # heads
    if most == 0:
        raise ValueError(f"a head of {q.shape[1]} tokens x {q.shape[3]} has over {MAX_ELEMENTS} "
                         "elements")
    ratio = q.shape[2] // k.shape[2]
    step = most // ratio * ratio or next(n for n in range(most, 0, -1) if ratio % n == 0)
    for b in range(q.shape[0]):
        for h in range(0, q.shape[2], step):
            end = min(h + step, q.shape[2])
            yield slice(b, b + 1), slice(h, end), slice(h // ratio, -(-end // ratio))


def attention_forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D), k, v (B, T, K, D) -> o like q, lse (B, H, T)."""
    if q.numel() <= MAX_ELEMENTS:
        return kernel.forward(q, k, v)
    o, lse = torch.empty_like(q), None
    for b, h, g in _head_groups(q, k):
        cut = (q[b, :, h], k[b, :, g], v[b, :, g])
        o[b, :, h], part = kernel.forward(*(t.contiguous() for t in cut))
        if lse is None:
            lse = part.new_empty(q.shape[0], q.shape[2], q.shape[1])
        lse[b, h] = part
    return o, lse


def attention_backward(kernel: Kernel, do, q, k, v, o, lse) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the same global o and lse for every head group."""
    if q.numel() <= MAX_ELEMENTS:
        return kernel.backward(do.contiguous(), q, k, v, o, lse)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for b, h, g in _head_groups(q, k):
        cut = (do[b, :, h], q[b, :, h], k[b, :, g], v[b, :, g], o[b, :, h], lse[b, h])
        dq[b, :, h], dk_part, dv_part = kernel.backward(*(t.contiguous() for t in cut))
        dk[b, :, g] += dk_part  # a kv head may serve several groups
        dv[b, :, g] += dv_part
    return dq, dk, dv


class _Attention(Function):
    @staticmethod
    def forward(ctx, q, k, v, op):
        o, lse = op.forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.op = op
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        return *ctx.op.backward(do, *ctx.saved_tensors), None


class Attention:
    """A kernel of the table: forward and backward as they are, or called, with autograd.

    A subclass may split the work over ranks; lse has then the shape that its backward wants.
    """

    def __init__(self, kernel: str):
        self.kernel = KERNELS[kernel]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention_forward(self.kernel, q, k, v)

    def backward(self, do, q, k, v, o, lse, late=lambda: None) -> tuple[Tensor, Tensor, Tensor]:
        """late: other work, for the time in which a subclass brings the last gradients back."""
        late()
        return attention_backward(self.kernel, do, q, k, v, o, lse)

    def ahead(self, *inputs: Tensor) -> None:
        """backward follows with these, q, k, v and o, then do: a subclass may send them already."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attention.apply(q, k, v, self)


# ---------------------------------------------------------------------------- token-wise operators


FUSED: list[object] = [None]  # a stack; last: a token of the fused kernel or side stream that runs


@contextlib.contextmanager
def fused():
    """What is inside is one kernel on a GPU, or on a stream of its own. memplan.simulate leaves out
    what is born and dies in it."""
    FUSED.append(object())
    try:
        yield
    finally:
        FUSED.pop()


def compiled(fn: Callable) -> Callable:
    """fn as one fused kernel on a GPU, forward and backward; as it is written elsewhere.

    `torch.compiler.set_stance("force_eager")` turns the compilation off.
    """
    torch._dynamo.config.recompile_limit = 64  # with or without gradients, whole or in chunks, ...
    kernel = torch.compile(fn)

    @functools.wraps(fn)
    def run(x, *args):
        if x.is_cuda:
            return kernel(x, *args)
        with fused():
            return fn(x, *args)

    return run


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normalise(x, weight, eps):
    y = x.to(accumulation_dtype(x.dtype))
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@compiled
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32 or wider."""
    return _normalise(x, weight, eps)


@compiled
def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h = x + branch, and its norm."""
    h = x + branch
    return h, _normalise(h, weight, eps)


@compiled
def split_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int):
    """qkv (B, T, (H+2K)D) -> q (B, T, H, D), k, v (B, T, K, D), q and k turned by their angles.

    The pairs are (i, i + D/2), as in Hugging Face's checkpoints (Meta's own have (2i, 2i+1)).
    """
    cos, sin = cos[:, None], sin[:, None]  # (T, 1, D/2)

    def turn(x: Tensor) -> Tensor:
        x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)

    x = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = x.split((heads, kv_heads, kv_heads), dim=2)
    # three tensors of their own: what a layer keeps for backward is 3 C, not 5 C
    return turn(q), turn(k), v.contiguous()


@compiled
def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2F) -> silu(gate) * up (..., F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    acc = accumulation_dtype(gate.dtype)
    return (F.silu(gate.to(acc)) * up.to(acc)).to(gate_up.dtype)


@compiled
def softmax_loss(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """logits (N, V) -> sum of the valid tokens' cross-entropies * scale; its gradient (N, V)."""
    valid = (labels != IGNORE)[:, None]
    target = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]  # (N, V)
    lse = logits.logsumexp(-1, keepdim=True)
    loss = torch.where(valid, lse - (logits * target).sum(-1, keepdim=True), 0).sum()
    grad = ((logits - lse).exp() - target.to(logits.dtype)) * torch.where(valid, scale, 0)
    return loss * scale, grad


def matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with the accumulator's dtype (float32 of bf16 operands) as the result's."""
    wide = accumulation_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    with fused():
        return a.to(wide) @ b.to(wide)


def add_outer(g: Tensor, x: Tensor, out: Tensor | None, beta: int) -> Tensor:
    """beta * out + g^T x, in place: g (N, rows), x (N, cols), out (rows, cols), g's dtype or wider.

    A weight's gradient. Several pieces are summed in float32, which costs no more than bf16: the
    tensor cores accumulate in float32 anyway. beta = 0 ignores what `out` holds.
    """
    if out is None:
        return g.t() @ x
    if out.dtype != g.dtype and not g.is_cuda:  # no CPU kernel mixes the two
        with fused():
            return add_outer(g.to(out.dtype), x.to(out.dtype), out, beta)
    wide = {"out_dtype": out.dtype} if out.dtype != g.dtype else {}
    return (torch.addmm(out, g.t(), x, out=out, **wide) if beta else
            torch.mm(g.t(), x, out=out, **wide))


class PlainEvents:
    """What a matrix says to the outside, and what happens on one device: nothing.

    need(module) -> the weight, there until release(module). piece(module, compute): a piece of the
    weight's gradient is due; compute(out, beta) returns beta*out + piece (out=None: a new tensor).
    What piece returns goes to autograd: the gradient, or None if it was put elsewhere.
    """

    def need(self, module: nn.Module) -> Tensor:
        return module.weight

    def release(self, module: nn.Module) -> None:
        pass

    def piece(self, module: nn.Module, compute: Callable) -> Tensor | None:
        return compute(None, 0)


def input_grad(module: nn.Module, dy: Tensor, out: Tensor | None = None) -> Tensor:
    """dy (..., rows) of a projection -> dx = dy W (..., cols)."""
    dx = torch.matmul(dy, module.events.need(module), out=out)
    module.events.release(module)
    return dx


def weight_grad(module: nn.Module, dy: Tensor, x: Tensor) -> Tensor | None:
    """dy (..., rows), x (..., cols) of a projection: raises *piece* with dW = dy^T x."""
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, rows), (N, cols)
    return module.events.piece(module, lambda out, beta: add_outer(dy, x, out, beta))


class _Linear(Function):
    """y = x W^T. Autograd keeps x but never W, which may be a buffer that is refilled meanwhile."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x)
        ctx.module = module
        y = F.linear(x, module.events.need(module))
        module.events.release(module)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,), module = ctx.saved_tensors, ctx.module
        dx = input_grad(module, dy)
        return dx, weight_grad(module, dy, x), None


class _Embedding(Function):
    @staticmethod
    def forward(ctx, weight, tokens, module):
        ctx.tokens, ctx.module = tokens, module
        x = F.embedding(tokens, module.events.need(module))
        module.events.release(module)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        def compute(out, beta):
            rows = ctx.module.shape[0]
            dw = _aten.embedding_dense_backward(dx, ctx.tokens, rows, -1, False)  # (V, C)
            if out is None:
                return dw
            return out.add_(dw) if beta else out.copy_(dw)

        return ctx.module.events.piece(ctx.module, compute), None, None


class _HeadLoss(Function):
    """Head and cross-entropy over chunks of tokens: N x V logits never exist at once.

    The loss is a scalar, so its gradient is known up to a factor as soon as a chunk's logits are:
    it is computed on the spot, and the head's matrix is read in the forward pass alone.
    """

    @staticmethod
    def forward(ctx, x, weight, labels, scale, module, chunk, differentiate):
        w = module.events.need(module)  # (V, C)
        wide = accumulation_dtype(x.dtype)
        loss = torch.zeros((), dtype=wide, device=x.device)
        if differentiate:
            dx, dw = torch.empty_like(x), torch.empty(w.shape, dtype=wide, device=x.device)
        for i in range(0, x.shape[0], chunk):
            rows = slice(i, i + chunk)
            part, dlogits = softmax_loss(matmul_wide(x[rows], w.t()), labels[rows], scale)
            loss += part
            if differentiate:
                dlogits = dlogits.to(x.dtype)
                torch.mm(dlogits, w, out=dx[rows])
                add_outer(dlogits, x[rows], dw, beta=int(i > 0))
            del dlogits  # before the next ones are made
        module.events.release(module)
        ctx.module = module
        if differentiate:
            ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dx, dw = ctx.saved_tensors

        def compute(out, beta):
            if out is None:
                return (dw * dloss).to(dx.dtype)
            return out.addcmul_(dw, dloss) if beta else torch.mul(dw, dloss, out=out)

        dw_out = ctx.module.events.piece(ctx.module, compute)
        return dx * dloss.to(dx.dtype), dw_out, None, None, None, None, None


LOSS_ELEMENTS = 2**27  # logits of one chunk: 512 MiB of float32


def head_loss(x: Tensor, head: nn.Module, labels: Tensor, scale: Tensor) -> Tensor:
    """sum over valid tokens of cross-entropy(x W^T, label) * scale; x (B, T, C), labels (B, T)."""
    chunk = max(1, LOSS_ELEMENTS // head.shape[0])
    return _HeadLoss.apply(x.flatten(0, 1), head.weight, labels.flatten(), scale, head, chunk,
                           torch.is_grad_enabled())


# ---------------------------------------------------------------------------- the model


def rope_frequencies(cfg: ModelConfig) -> tuple[Tensor, float]:
    """Angles a position (D/2,) in float64, and the factor on cos and sin (YaRN's temperature).

    Scaling for lengths past the trained one: "linear" (positions shrink), "llama3" (only the slow
    frequencies shrink), "yarn" (a ramp between the two, arXiv 2309.00071).
    """
    half, theta, opt = cfg.head_dim // 2, cfg.rope_theta, cfg.rope_scaling
    freq = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    kind, s = opt.get("rope_type", opt.get("type", "default")), opt.get("factor", 1.0)
    trained = opt.get("original_max_position_embeddings") or cfg.max_positions
    if kind == "default":
        return freq, 1.0
    if kind == "linear":
        return freq / s, 1.0
    if kind == "llama3":
        turns = trained * freq / (2 * math.pi)  # full turns within the trained length
        low, high = opt["low_freq_factor"], opt["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return freq * (keep + (1 - keep) / s), 1.0
    if kind == "yarn":
        def index(turns):  # the frequency that turns so often within the trained length
            return half * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)
        low = max(math.floor(index(opt.get("beta_fast") or 32)), 0)
        high = min(math.ceil(index(opt.get("beta_slow") or 1)), 2 * half - 1)
        steps = torch.arange(half, dtype=torch.float64)
        ramp = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
        factor = opt.get("attention_factor") or 0.1 * math.log(max(s, 1.0)) + 1.0
        return freq * (1 - ramp) + freq / s * ramp, factor
    raise ValueError(f"rope scaling {kind!r} is unknown: linear, llama3, yarn or none")


def rope_tables(cfg: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin (T, D/2) of integer positions (T,).

    The angles are float64: near position 2^20 float32 numbers lie 1/16 apart.
    """
    freq, factor = rope_frequencies(cfg)
    angle = positions.double()[:, None] * freq.to(positions.device)
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


class Matrix(nn.Module):
    """A weight (rows, cols), used as a projection; `events` tells the outside when."""

    events = PlainEvents()

    def __init__(self, rows: int, cols: int):
        super().__init__()
        self.shape = (rows, cols)
        self.weight = nn.Parameter(torch.empty(rows, cols))

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self)


class Norm(nn.Module):
    """The weight of an RMSNorm: float32 or wider, and never sharded, for it is small."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        heads = cfg.heads + 2 * cfg.kv_heads
        self.norm1 = Norm(cfg.dim)
        self.qkv = Matrix(heads * cfg.head_dim, cfg.dim)
        self.out = Matrix(cfg.dim, cfg.heads * cfg.head_dim)
        self.norm2 = Norm(cfg.dim)
        self.gate_up = Matrix(2 * cfg.ffn, cfg.dim)
        self.down = Matrix(cfg.dim, cfg.ffn)

    def pre(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, T, H, D), k, v (B, T, K, D)."""
        qkv = self.qkv(rms_norm(x, self.norm1.weight, self.cfg.norm_eps))
        return split_rotate(qkv, *rope, self.cfg.heads, self.cfg.kv_heads)

    def post(self, x: Tensor, o: Tensor) -> Tensor:
        """The layer's input x (B, T, C) and attention output o (B, T, H, D) -> y (B, T, C)."""
        h, n = add_rms_norm(x, self.out(o.flatten(2)), self.norm2.weight, self.cfg.norm_eps)
        return h + self.down(swiglu(self.gate_up(n)))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        o, _ = attention(*self.pre(x, rope))
        return self.post(x, o)


class LLaMA(nn.Module):
    """attention: called with (q, k, v), returns (o, lse); the CPU's if none is given."""

    def __init__(self, cfg: ModelConfig, attention: Attention | None = None):
        super().__init__()
        self.cfg = cfg
        self.attention = attention or Attention("cpu")
        self.recompute = False  # keep a layer's input alone, and run the layer again in backward
        self.run = None  # (index, x, rope) -> y: how a layer runs, if not as its forward says
        self.embed = Matrix(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = Norm(cfg.dim)
        self.head = Matrix(cfg.vocab, cfg.dim)

    def init_weights(self, seed: int) -> None:
        for name, p in self.named_parameters():
            p.data.copy_(initial_weight(self.cfg, name, p.shape, seed, p.device))

    def forward(self, tokens: Tensor, labels: Tensor | None = None, scale: Tensor | None = None,
                positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) without labels; else the sum of the valid tokens' losses times scale.

        tokens, labels (B, T); labels equal to IGNORE do not count. scale: a 0-dim tensor, by
        default 1 / valid tokens here; whoever splits a batch passes 1 / valid tokens of all parts,
        and the parts' losses and gradients add up. positions (T,): by default 0 ... T-1.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = _Embedding.apply(self.embed.weight, tokens, self.embed)  # (B, T, C)
        rope = rope_tables(self.cfg, positions, accumulation_dtype(x.dtype))
        for i, block in enumerate(self.blocks):
            if self.run:
                x = self.run(i, x, rope)
            elif self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, self.attention, use_reentrant=False)
            else:
                x = block(x, rope, self.attention)
        x = rms_norm(x, self.norm.weight, self.cfg.norm_eps)
        if labels is None:
            return self.head(x)
        if scale is None:
            scale = 1 / (labels != IGNORE).sum().clamp(min=1).to(accumulation_dtype(x.dtype))
        return head_loss(x, self.head, labels, scale)


def initial_weight(cfg: ModelConfig, name: str, shape: tuple, seed: int, device) -> Tensor:
    """One tensor of a fresh model, float32: normal(0, 0.02), the two matrices that write into the
    residual stream smaller by sqrt(2L), norms 1. It depends on (seed, name) alone, so that ranks
    may make their parts in any order."""
    if "norm" in name:
        return torch.ones(shape, device=device)
    # a CPU's generator takes 32 bits; of one name, crc32 gives every start value another result
    rng = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed))
    residual = name.endswith(("out.weight", "down.weight"))
    std = 0.02 / math.sqrt(2 * cfg.layers) if residual else 0.02
    return torch.empty(shape, device=device).normal_(0, std, generator=rng)


# ---------------------------------------------------------------------------- Hugging Face files

_HF = {  # our matrix: theirs, whose rows follow one another in it
    "embed": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"],
    "norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


def _hf_parts(cfg: ModelConfig, name: str, rows: int) -> list[tuple[str, int]]:
    """Our parameter's name -> (their name, rows) of each of its parts."""
    *layer, leaf, _ = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    qkv = [n * cfg.head_dim for n in (cfg.heads, cfg.kv_heads, cfg.kv_heads)]
    split = {"qkv": qkv, "gate_up": [cfg.ffn, cfg.ffn]}.get(leaf, [rows])
    return [(f"{prefix}{part}.weight", n) for part, n in zip(_HF[leaf], split)]


def hf_config(folder: str) -> ModelConfig:
    """config.json of a LLaMA checkpoint. Raises ValueError for what this model does not compute."""
    try:
        c = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{folder}/config.json cannot be read: {e}") from e
    for key, ours in (("model_type", "llama"), ("hidden_act", "silu"), ("attention_bias", False),
                      ("mlp_bias", False)):
        if c.get(key, ours) != ours:
            raise ValueError(f"{folder}/config.json: {key} is {c[key]!r}; only {ours!r} is built")
    known = {"rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast",
             "beta_slow", "attention_factor", "low_freq_factor", "high_freq_factor"}
    try:
        # transformers 5 keeps all of rope in rope_parameters, transformers 4 in two places
        rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", c.get("rope_theta", 10000.0))
        rope = {} if rope.get("rope_type", rope.get("type")) == "default" else rope
        if rope.keys() - known:
            raise ValueError(f"rope scaling with {sorted(rope.keys() - known)} is not built")
        if rope and not rope.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = c["max_position_embeddings"]
        heads, dim = c["num_attention_heads"], c["hidden_size"]
        cfg = ModelConfig(
            c["vocab_size"], dim, c["num_hidden_layers"], heads,
            c.get("num_key_value_heads") or heads, c["intermediate_size"],
            c.get("head_dim") or dim // heads, c.get("rms_norm_eps", 1e-6), theta, rope,
            c.get("max_position_embeddings", 2048), c.get("tie_word_embeddings", False))
        rope_frequencies(cfg)  # refuses a scaling that it does not know
        return cfg
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, ValueError) as e:
        raise ValueError(f"{folder}/config.json: {type(e).__name__}: {e}") from e


def hf_open(folder: str, cfg: ModelConfig) -> Callable[[str], Tensor]:
    """Check all files, names and shapes against cfg; return name -> tensor, read when it is called.

    So no more than one tensor is in memory at a time. Raises ValueError naming what is missing,
    truncated, misshapen or left over.
    """
    from safetensors import SafetensorError, safe_open

    root, files = Path(folder), {}
    index = root / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())
                       if index.exists() else {"model.safetensors"})
        for file in names:
            f = safe_open(root / file, "pt")
            files.update(dict.fromkeys(f.keys(), f))
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise ValueError(f"{folder}: weights missing or truncated: {type(e).__name__}: {e}") from e
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in LLaMA(cfg).named_parameters()}
    if cfg.tied and "lm_head.weight" not in files:
        files["lm_head.weight"] = files.get("model.embed_tokens.weight")
    stored = {"lm_head.weight": "model.embed_tokens.weight"} if cfg.tied else {}
    used = set(stored)
    for name, shape in shapes.items():
        for part, rows in _hf_parts(cfg, name, shape[0]):
            used.add(part)
            want = (rows, *shape[1:])
            if files.get(part) is None:
                raise ValueError(f"{folder}: no tensor {part} {want} in the weights")
            got = tuple(files[part].get_slice(stored.get(part, part)).get_shape())
            if got != want:
                raise ValueError(f"{folder}: {part} is {got}, config.json says {want}")
    if extra := {n for n in set(files) - used if "rotary_emb" not in n}:
        raise ValueError(f"{folder}: {len(extra)} tensors have no place here: {sorted(extra)[:3]}")

    def read(name: str) -> Tensor:
        parts = (stored.get(p, p) for p, _ in _hf_parts(cfg, name, shapes[name][0]))
        parts = [files[p].get_tensor(p) for p in parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return read


HF_FILE_BYTES = 4 * 2**30  # one file of an export


def hf_export(folder: Path, cfg: ModelConfig, read: Callable[[str], Tensor], dtype: torch.dtype,
              write: bool = True, source: Path | None = None) -> None:
    """Write config.json and safetensors, which transformers 4 and 5 load, file by file.

    read(name) -> the full tensor; where ranks read together, all call this and one has write=True.
    An imported tied head that still equals the embedding is tied again. source: the folder of the
    import, whose tokenizer, other settings and dtype go along.
    """
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text()) if source else {}
    stored = config.get("dtype") or config.get("torch_dtype") or str(dtype)
    dtype = getattr(torch, stored.removeprefix("torch."))
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in LLaMA(cfg).named_parameters()}
    tied = cfg.tied and torch.equal(read("embed.weight"), read("head.weight"))
    files, room = [[]], HF_FILE_BYTES
    for name, shape in shapes.items():
        if tied and name == "head.weight":
            continue
        size = shape.numel() * dtype.itemsize
        if size > room and files[-1]:
            files.append([])
            room = HF_FILE_BYTES
        files[-1].append(name)
        room -= size
    root, weight_map, total = Path(folder), {}, 0
    if write:
        root.mkdir(parents=True, exist_ok=True)
    for i, names in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        if len(files) == 1:
            file = "model.safetensors"
        tensors = {}
        for name in names:
            tensor = read(name)
            if write:
                theirs, rows = zip(*_hf_parts(cfg, name, shapes[name][0]))
                parts = tensor.to("cpu", dtype).split(rows)
                tensors.update({n: p.contiguous() for n, p in zip(theirs, parts)})
        if write:
            save_file(tensors, root / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file))
            total += sum(t.nbytes for t in tensors.values())
    if not write:
        return
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    rope = cfg.rope_scaling or {"rope_type": "default"}
    config |= {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": cfg.vocab, "hidden_size": cfg.dim, "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim, "intermediate_size": cfg.ffn, "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_positions, "tie_word_embeddings": tied,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": str(dtype).split(".")[1],
        "rope_theta": cfg.rope_theta, "rope_scaling": cfg.rope_scaling or None,  # transformers 4
        "rope_parameters": {"rope_theta": cfg.rope_theta, **rope},  # transformers 5
    }
    config["dtype"] = config["torch_dtype"]
    for f in [f for pattern in ("*token*", "generation_config.json", "chat_template*")
              for f in (source.glob(pattern) if source else []) if f.is_file()]:
        shutil.copy(f, root)
    (root / "config.json").write_text(json.dumps(config, indent=1) + "\n")
