"""LLaMA on one device: its sizes, one layer (Block), the model around the layers (LLaMA).

A layer works on each token separately, except for attention. The code is cut along that line:

    q, k, v = block.pre(x, positions)      norm, qkv projection, rotary embedding       per token
    o, lse  = attention(q, k, v)           the only operator that mixes tokens
    y       = block.post(x, o, positions)  output projection, norm, SwiGLU, residuals   per token

    model = LLaMA(MODELS["tiny"])
    model.init_weights(seed=0)
    loss = model(tokens, labels)        # tokens, labels: (B, T) integers

The model knows neither ranks nor streams. The other files act on it from outside, through these
places (and offload.py tells operators through ops.recomputation and ops.deferred_weight_grads what
a backward by hand wants of them):

    matrix.events          raised where a weight is used (ops.PlainEvents): shard.py gathers the
                           weight and reduces its gradient there
    matrix.tp_input ...    called around a projection, with tp_output and tp_prologue: tensor.py exchanges tokens
                           between the ranks that share a matrix
    model.attention        q, k, v -> o, lse: attention.py's kernels, also over several ranks; its
                           `within` gives the attention of a micro-batch's documents
    model.layer_runner     called at the start of a forward pass, returns run_layer(i, x) -> y:
                           offload.py runs layers in chunks of tokens
    its parts and weights  pipeline.py drops the layers of other stages, and calls embedded,
                           run_layers and result itself; shard.py replaces the weights by views of
                           its buffers
    model.select_tp_tokens       positions -> those of x's tokens, where tensor.py splits tokens

A call trace of layer i, with the file and the function of each step. Whole layers:

    forward    model.LLaMA.run_layers                     x = run_layer(i, x)
               model.run_block                          pre, attention, post
                 model.Block.pre
                   ops.project(qkv, norm, x, ...)         matrix.tp_input: nothing, or tensor.TensorParallel
                     ops._Project.forward                 n = norm(x)
                       shard.States.unshard(qkv)          launches the gathers of layer i + 1 (if
                                                          p > 1), and waits until W is here
                                                          y = n W^T; autograd saves x and 1 / rms,
                                                          never W or n
                   ops._SplitRotate.forward               q, k, v
                 attention.Attention.forward              heads travel, a kernel runs, o travels
                 model.Block.post                         out, gate_up, down by ops.project; behind
                                                          out and down matrix.tp_output

    backward   ops._Project.backward(down)                autograd calls it, last operator first
                 shard.States.unshard(down)               W again: gathered ahead, a matrix earlier
                                                          da = dy W; SwiGLU again, and its gradient
                 ops.weight_grad                          dW = dy^T a, by way of an event:
                   shard.States.add_grad(down)            computes dW into a buffer
                     shard.States.scatter_unit            when dW is complete, launches
                       shard.States.scatter_grad          its reduction to the rank's shard (if
                                                          g > 1), and after the last micro-batch
                       shard.States.reduce_unit           the sum over replicas
               ...                                        gate_up, out
               attention.Attention.backward               dq, dk, dv
               ops._SplitRotate.backward
               ops._Project.backward(qkv)                 dx

In chunks of tokens, if the plan says so, the layer_runner is offload.ChunkedLayers.start, and
ops.CustomGradient is what autograd calls:

    forward    offload.ChunkedLayers.forward              pre by chunks, attention, post by chunks;
                                                          `offload` then launches the copy of a
                                                          swapped layer to the host
    backward   offload.ChunkedLayers.backward             load_group launches the next prefetch,
                                                          and waits for this layer's; pre runs
                                                          again on chunks that were not saved
                 attention.Attention.backward             calls backward_post first (make_dout): post
                                                          again on such chunks, then o's gradient
                 offload.ChunkedLayers.backward_pre       dx

Another layer changes class Block only; chunks, swapping, recomputation and sharding follow. Its
operators may be any of PyTorch's that work on each token separately and draw no random numbers,
since they may run again. Biases on q, k, v (Qwen2) and norms on q and k (Qwen3) are fields of
ModelConfig; without them, none of their operators runs.

Left out: dropout, mixture of experts, inference caches, biases elsewhere, tied heads (untied on
import). hf.py reads and writes files.

Legend: B sequences, T tokens per sequence, N = B*T, C width, H query heads, K key/value heads, D
head width, F MLP width, V vocabulary, L layers.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops import (
    IGNORE,
    SWIGLU,
    Matrix,
    Positions,
    Prologue,
    Vector,
    _Embedding,
    _HeadLoss,
    _SplitRotate,
    accumulation_dtype,
    identity,
    norm_backward,
    norm_forward,
    project,
    rms_norm,
)

# ---------------------------------------------------------------------------- sizes


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
            raise ValueError(
                f"kv_heads is {self.kv_heads}, which does not divide the {self.heads} "
                f"heads; nearest: {nearest}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}: rotary embedding turns pairs, so it is "
                f"even; nearest: {self.head_dim + 1}"
            )
        kind = rope_kind(self.rope_scaling)
        if kind not in ("default", *ROPE_KEYS):
            raise ValueError(f"rope scaling {kind!r} is unknown: {', '.join(ROPE_KEYS)} or none")


# ---------------------------------------------------------------------------- the model


class Block(nn.Module):
    """One layer. This is the only class that you edit to change a layer: chunks, swapping,
    recomputation and sharding follow, since they act on what autograd saves and on the events of a
    Matrix. Matrices
    are defined in the order of their use, by which they are gathered. A Matrix or a Vector says
    what its weight begins as; hf._HF says what the weight is called in Hugging Face's files.

    A norm behind the layer (a sandwich), say, is a vector in __init__, and a line in post:

        self.last_norm = Vector(cfg.dim, "norm")        # in files: hf._HF
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
        self.norm1 = Vector(cfg.dim, "norm")
        self.qkv = Matrix(qkv, cfg.dim, cut="rows", parts=(q, kv, kv))
        self.qkv_bias = Vector(qkv, "bias", like=self.qkv) if cfg.qkv_bias else None
        self.q_norm = Vector(cfg.head_dim, "norm") if cfg.qk_norm else None
        self.k_norm = Vector(cfg.head_dim, "norm") if cfg.qk_norm else None
        self.out = Matrix(cfg.dim, q, cut="columns", residual=True)
        self.norm2 = Vector(cfg.dim, "norm")
        self.gate_up = Matrix(2 * cfg.ffn, cfg.dim, cut="rows", parts=2 * (cfg.ffn,))
        self.down = Matrix(cfg.dim, cfg.ffn, cut="columns", residual=True)
        self.norm = Prologue(  # of x and the norm's weight
            lambda x, weight: norm_forward(x, weight, cfg.norm_eps), norm_backward
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return how many of q, k and v the matrices here make."""
        width = self.cfg.head_dim
        q = self.out.shape[1] // width
        kv = (self.qkv.shape[0] // width - q) // 2
        return q, kv, kv

    def pre(self, x: Tensor, positions: Positions):
        """x (B, T, C) -> q (B, T, H, D), k, v (B, T, K, D). T tokens of a sequence, not all of
        them: `positions` says which."""
        eps = self.cfg.norm_eps
        heads = self.heads
        qkv = project(self.qkv, self.norm, x, self.norm1.weight)
        if self.qkv_bias:
            qkv = qkv + self.qkv_bias.local().to(qkv.dtype)
        qkv = qkv.unflatten(-1, (sum(heads), -1))  # (B, T, H+2K, D)
        if self.q_norm:
            q, k, v = qkv.split(heads, dim=2)
            q = rms_norm(q.contiguous(), self.q_norm.weight, eps)
            k = rms_norm(k.contiguous(), self.k_norm.weight, eps)
            qkv = torch.cat((q, k, v), 2)
        return _SplitRotate.apply(qkv, positions.cos, positions.sin, heads)

    def post(self, x: Tensor, o: Tensor, positions: Positions) -> Tensor:
        """The layer's input x (B, T, C) and attention output o (B, T, H, D) -> y (B, T, C). T
        tokens of a sequence, not all of them: `positions` says which."""
        h = x + self.out(o.flatten(2))
        gate_up = project(self.gate_up, self.norm, h, self.norm2.weight)
        return h + project(self.down, SWIGLU, gate_up)


class PlainAttention:
    """Causal attention of (B, T, heads, D) tensors by PyTorch's own function, without documents.
    attention.Attention, which can be called in the same way, has kernels, documents and ranks."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        inputs = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
        o = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2), None

    def of_layer(self, i: int) -> "PlainAttention":
        """Return the attention of layer i: here all are alike."""
        return self


plain_attention = PlainAttention()


class LLaMA(nn.Module):
    """The model around its layers.

    attention: called with (q, k, v), returns (o, lse). Its of_layer(i) is the attention of layer i,
    and its with_documents(documents) that of a micro-batch whose tokens attend inside documents only.
    """

    labels_ahead = 1  # labels of each token: the next token; n: the n tokens that follow it
    select_tp_tokens = staticmethod(
        identity
    )  # of the positions of all tokens here, those of x's tokens

    def __init__(self, cfg: ModelConfig, attention: Callable = plain_attention):
        super().__init__()
        self.cfg = cfg
        self.attention = attention
        self.layer_runner = run_blocks
        self.embed = Matrix(cfg.vocab, cfg.dim, std=1.0)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = Vector(cfg.dim, "norm")
        self.head = Matrix(cfg.vocab, cfg.dim)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple]:
        """Of the whole model's weights, asked for before it is cut. Raises ValueError if two
        modules share one: each would get its own."""
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        for path, module in self.named_modules():
            for name, _ in module.named_parameters(path, recurse=False):
                if name not in shapes:
                    raise ValueError(
                        f"{name} is another module's weight: use one Vector module in "
                        "both places, or two matrices"
                    )
        return shapes

    @functools.cached_property
    def starts(self) -> dict[str, tuple[float, float]]:
        """Of the whole model's weights, by name: the mean and the standard deviation of a fresh
        one, as its module says (Matrix, Vector). Asked for before the model is cut."""
        starts = {}
        for path, module in self.named_modules():
            if isinstance(module, Vector):
                starts[f"{path}.weight"] = module.start, 0.0
            if isinstance(module, Matrix):
                shrink = math.sqrt(2 * self.cfg.layers) if module.residual else 1.0
                starts[f"{path}.weight"] = 0.0, module.std / shrink
        return starts

    def init_weights(self, seed: int) -> None:
        for name, p in self.named_parameters():
            p.data.copy_(initial_weight(name, p.shape, self.starts[name], seed, p.device))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        scale: Tensor | None = None,
        positions: Tensor | None = None,
        documents=None,
        per_token: bool = False,
    ) -> Tensor:
        """Return logits (B, T, V) without labels, else the sum of the valid tokens' losses * scale;
        if per_token, each token's loss (B, T) instead, without gradients: ignored tokens have 0.

        tokens, labels (B, T); labels equal to IGNORE do not count. scale: a 0-dim tensor, by
        default 1 / (valid tokens here). If you split a batch, pass 1 / (valid tokens of the whole
        batch) with every part: losses and gradients then add up. positions (T,), or (B, T): by
        default 0 ... T-1. documents: where they lie (attention.Documents).

        A stage of a pipeline does not call this. It calls embedded, run_layers and result, so a
        fork changes those three.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        own = self.select_tp_tokens(positions)
        x = self.embedded(tokens, own)
        layers = range(len(self.blocks))
        x = self.run_layers(layers, self.layer_runner, x, positions, documents)
        return self.result(x, labels, scale, per_token, own)

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return what the first layer takes, (B, T, C). T tokens of a sequence, not all of them:
        positions (T,), or (B, T), says which."""
        return _Embedding.apply(self.embed.weight, tokens, self.embed)

    def run_layers(
        self, layers: Iterable[int], start: Callable, x: Tensor, positions: Tensor, documents=None
    ) -> Tensor:
        """Return the last layer's result, of x (B, T, C) before the first. start: a
        layer_runner."""
        cos, sin = rope_tables(self.cfg, positions, accumulation_dtype(x.dtype))
        places = Positions(cos, sin, positions, self.select_tp_tokens(positions))
        attention = self.attention
        if documents is not None:  # attention.py's
            attention = attention.with_documents(documents)
        run_layer = start(self, places, attention)
        for i in layers:
            x = run_layer(i, x)
        return x

    def result(
        self,
        x: Tensor,
        labels: Tensor | None,
        scale: Tensor | None,
        per_token: bool,
        positions: Tensor,
    ) -> Tensor:
        """Apply the final norm and the head to x (B, T, C); same return value as forward().

        T tokens of a sequence, not all of them: positions (T,), or (B, T), says which, and the
        label after a token's own may lie on another rank. A model that predicts more than the next
        token sets `labels_ahead`, and gets labels (B, T, labels_ahead)."""
        x = rms_norm(x, self.norm.weight, self.cfg.norm_eps)
        if labels is None:
            return self.head(x)
        if scale is None:
            valid = (labels != IGNORE).sum().clamp(min=1)
            scale = 1 / valid.to(accumulation_dtype(x.dtype))
        loss, losses = _HeadLoss.apply(
            x.flatten(0, 1),
            self.head.weight,
            labels.flatten(),
            scale,
            self.head,
            torch.is_grad_enabled(),
        )
        return losses.view_as(labels) if per_token else loss

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Run a step's micro-batches, each the arguments of `forward`, one after the other; the
        gradients add up. Returns the sum of their losses."""
        loss = 0.0
        for micro_batch in micro_batches:
            part = self(*micro_batch)
            part.backward()
            loss += part.detach()
        return loss


def run_block(block: Block, x: Tensor, positions: Positions, attention: Callable) -> Tensor:
    """x (B, T, C) -> y (B, T, C); autograd keeps what operators save."""
    o, _ = attention(*block.pre(x, positions))
    return block.post(x, o, positions)


def run_blocks(model: "LLaMA", positions: Positions, attention: Callable) -> Callable:
    """Return the layer_runner's run_layer for whole layers."""
    return lambda i, x: run_block(model.blocks[i], x, positions, attention.of_layer(i))


# ---------------------------------------------------------------------------- sizes and counts


def divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


ROPE_KEYS = {  # kind of rotary scaling: what its frequencies depend on, in Hugging Face's words
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_OPTIONS = ("beta_fast", "beta_slow", "attention_factor")  # of yarn; they have defaults


def rope_kind(scaling: dict) -> str:
    """Return the kind of a rotary scaling; older files call it type."""
    return scaling.get("rope_type", scaling.get("type", "default"))


# fmt: off
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
# fmt: on


def param_count(cfg: ModelConfig) -> int:
    """Return the number of parameters, counted layer by layer as a model on meta has them."""
    return _param_count(cfg, LLaMA, Block)


@functools.cache
def _param_count(cfg: ModelConfig, model_class: type, block_class: type) -> int:
    # block_class is part of the key only: a fork's Block has parameters of its own
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(cfg).parameters())


def flops_per_token(
    cfg: ModelConfig, seq: int, keys_seen: float | None = None
) -> tuple[float, float]:
    """Return model FLOPs a token, forward and backward: (causal, full). keys_seen: of sequences with
    documents, what counts in place of seq: a token that sees k keys counts 2k - 1, and this is the
    mean (without documents it is seq).

    A parameter costs one multiply-add in forward and two in backward: 6P (the embedding is counted
    although it is a look-up, as the field does). Attention multiplies each query with s keys and
    the scores with s values: 4*s*H*D a layer, times three with the backward, 12*L*H*D*s ("full",
    the convention of AMSP and Megatron); causality halves the pairs: 6*L*H*D*s (Memo's, 5.1).
    Recomputation is never counted.
    """
    products = 6.0 * param_count(cfg)
    attention = 6.0 * cfg.layers * cfg.heads * cfg.head_dim * (keys_seen or seq)
    return products + attention, products + 2 * attention


# ---------------------------------------------------------------------------- rotary angles


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


def rope_tables(cfg: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos, sin (..., D/2) of integer positions, (T,) or (B, T).

    The angles are float64: near position 2^20 float32 numbers lie 1/16 apart.
    """
    freq, factor = rope_frequencies(cfg, positions.device)
    angle = positions.double().unsqueeze(-1) * freq
    cos = angle.cos() * factor
    sin = angle.sin() * factor
    return cos.to(dtype), sin.to(dtype)


# ---------------------------------------------------------------------------- first weights


def initial_weight(
    name: str, shape: tuple[int, ...], start: tuple[float, float], seed: int, device
) -> Tensor:
    """Return one tensor of a fresh model, float32: normal(mean, std), or constant if std is 0.
    start: mean and std, of LLaMA.starts. On one kind of device it depends on nothing but (seed,
    name, shape, start), so ranks may make their parts in any order."""
    mean, std = start
    if std == 0:
        return torch.full(shape, mean, device=device)
    # a CPU's generator takes 32 bits; for one name, different seeds give different crc32 values
    seed_of_name = zlib.crc32(name.encode(), seed)
    rng = torch.Generator(device).manual_seed(seed_of_name)
    return torch.empty(shape, device=device).normal_(mean, std, generator=rng)
