"""LLaMA on one device: its sizes (ModelConfig), one layer (Block), the whole model (LLaMA).

Legend: B sequences, T tokens per sequence, N = B*T, C width, H query heads, K key/value heads, D
head width, F MLP width, V vocabulary, L layers; n = norm(x), and rms(x) is x's root mean square; dy
is the gradient of the loss with respect to y; p, g AMSP's sharding factors of parameters and
gradients (shard.py).

    model = LLaMA(MODELS["tiny"])
    model.init_weights(seed=0)
    loss = model(tokens, labels)        # tokens, labels: (B, T) integers

A layer works on each token separately, except for attention. So it has three parts:

    q, k, v = block.pre(x, positions)      norm, qkv projection, rotary embedding       per token
    o, lse  = attention(q, k, v)           mixes tokens; lse: log-sum-exp of the scores
    y       = block.post(x, o, positions)  output projection, norm, SwiGLU, residuals   per token

To change a layer, edit class Block and no other, or add a subclass to ARCHITECTURES, as
examples/gemma.py does. Chunks, swapping, recomputation and sharding follow. Predicted seconds
and temporary memory, names in Hugging Face's files, and the plain model of the tests do not follow:
a table in Block's docstring says where to change them. The docstring also says what a layer may do.

The model knows neither ranks nor streams. Other files act on it from outside, in these places:

    matrix.events             Each use of a matrix calls its methods unshard and add_grad
                              (ops.PlainEvents). shard.py gathers the weight there, and reduces its
                              gradient.
    matrix.tp_input,          Called on a projection's input, output and prologue. tensor.py
      tp_output, tp_prologue  exchanges tokens there between the ranks that share the matrix.
    matrix.products           Computes the products of a projection: y in forward, the gradients of
                              its input and its weight in backward. fp8.py replaces it, to compute
                              them in float8.
    model.select_tp_tokens    Called with the positions of all tokens that attention has on this
                              rank. Returns the positions of the tokens that x has: a part of them
                              if tensor-parallel ranks split the tokens of x (tensor.py), else all.
    model.attention           (q, k, v) -> (o, lse). attention.py puts its kernels here, on one rank
                              or several. with_documents() returns the attention of a micro-batch
                              whose tokens attend only to their own document.
    model.layer_runner        Called when a forward pass begins; returns run_layer(i, x) -> y.
                              offload.py runs layers in chunks of tokens here.
    the modules themselves    pipeline.py removes the layers of other stages, and calls
                              embed_tokens, run_layers and apply_head itself. shard.py replaces
                              the weights by views of its buffers.

In backward, offload.py calls a layer's operators itself. It does so inside two context managers,
ops.recomputation and ops.deferred_weight_grads, which change what the operators do.

The next two tables show what happens when layer i runs: file and function on the left, action on
the right. The first one is for a layer that runs whole, on all of its tokens at a time:

    forward    model.LLaMA.run_layers                 x = run_layer(i, x)
               model.run_block                        pre, attention, post
                 model.Block.pre
                   ops.project(qkv, norm, x, ...)     calls matrix.tp_input, which does nothing
                                                      without --tp (tensor.py)
                     ops._Project.forward             calls ops.Products.forward: n = norm(x)
                       shard.States.unshard(qkv)      if p > 1, launches the gathers of layer
                                                      i + 1; waits for qkv's weight W
                     ops._Project.forward, continued  y = n W^T; autograd saves x and 1 / rms,
                                                      but neither W nor n
                   ops.split_rotate                   q, k, v
                 attention.Attention.forward          exchanges heads, runs a kernel, exchanges o
                 model.Block.post                     ops.project of out, gate_up and down; after
                                                      out and down, matrix.tp_output

    backward   ops._Project.backward(down)            autograd calls the last operator first; it
                                                      calls ops.Products.backward
                 shard.States.unshard(down)           if p > 1, waits for W, whose gather was
                                                      launched when layer i + 1 used its qkv
               ops._Project.backward, continued       da = dy W; computes a = SwiGLU(gate|up)
                                                      again, with the gradient of gate|up
                 ops.add_weight_grad                  dW = dy^T a, through an event:
                   shard.States.add_grad(down)        computes dW into a buffer
                     shard.States.scatter_unit        when dW is complete, launches
                       shard.States.scatter_grad      its reduction to the rank's shard (if
                                                      g > 1), and after the last micro-batch
                       shard.States.reduce_unit       the sum over replicas
               ...                                    the same for gate_up and out
               attention.Attention.backward           dq, dk, dv
               ops._SplitRotate.backward              dqkv
               ops._Project.backward(qkv)             dx

The second table is for layers that run in chunks of tokens. model.layer_runner is then
offload.ChunkedLayers.start, and autograd sees each layer as one operator, ops.CustomGradient:

    forward    offload.ChunkedLayers.forward          pre in chunks, attention, post in chunks;
                                                      then `offload` launches the copy of a
                                                      swapped layer to the host
    backward   offload.ChunkedLayers.backward         load_group launches the next prefetch, and
                                                      waits for this layer's; pre runs again on
                                                      the chunks that were not saved
                 attention.Attention.backward         launches the exchange of q, k, v and o, and
                                                      calls its argument make_dout, which hides it:
                   offload.ChunkedLayers              runs post again on the chunks that were
                     .backward_post                   not saved, and returns o's gradient;
                                                      then dq, dk, dv
                 offload.ChunkedLayers.backward_pre   dx

Biases of q, k, v (Qwen2) and norms of q and k (Qwen3) are fields of ModelConfig, off by default.

A weight may be frozen (ops.Weight). Then it has no gradient and no optimizer states. If the
embedding is frozen, a backward pass ends at the first layer with a weight that trains.
examples/lora.py freezes all weights except its adapters.

With ModelConfig.tied, `head` is the same Matrix as `embed`. It appears once among the parameters,
as embed.weight. An import is tied if its files are; the models in MODELS are not tied.

Left out: dropout, mixture of experts, inference caches, other biases. (hf.py reads and writes the
files of Hugging Face.)
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops import (
    IDENTITY,
    IGNORE,
    SWIGLU,
    Matrix,
    Positions,
    Vector,
    accumulation_dtype,
    embedding,
    head_loss,
    identity,
    norm_prologue,
    project,
    rms_norm,
    split_rotate,
)

# ---------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model, and how it differs from LLaMA (biases and norms of Qwen, a tied head).

    Letters such as C are those of the legend at the top of this file.
    """

    vocab: int  # V
    dim: int  # C
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    ffn: int  # F
    head_dim: int = 128  # D
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    # how rotary frequencies are scaled, in Hugging Face's keys (see ROPE_KEYS); {}: not at all.
    # hash=False, because functools.cache hashes a ModelConfig, and a dict cannot be hashed
    rope_scaling: dict = field(default_factory=dict, hash=False)
    # the number of positions that the model supports: max_position_embeddings of config.json
    max_positions: int = 4096
    tied: bool = False  # the head is the embedding: one matrix with two uses
    qkv_bias: bool = False  # biases of q, k and v (Qwen2)
    qk_norm: bool = False  # norms of each head of q and k, before the rotation (Qwen3)
    architecture: str = "llama"  # a row of ARCHITECTURES

    def __post_init__(self):
        """Raise ValueError for sizes that attention or rotary embedding cannot compute, and for an
        unknown architecture or rope scaling.

        Without this check some sizes give wrong results and no error. For example, if kv_heads does
        not divide heads, attention on the CPU reads the next token's heads.
        """
        if self.heads % self.kv_heads:
            nearest = min(divisors(self.heads), key=lambda n: abs(n - self.kv_heads))
            raise ValueError(
                f"kv_heads is {self.kv_heads}, which does not divide the {self.heads} "
                f"heads; nearest: {nearest}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}, but rotary embedding rotates pairs, so it must be "
                f"even; nearest: {self.head_dim + 1}"
            )
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture is {self.architecture!r}, which is no row of model.ARCHITECTURES: "
                f"{', '.join(ARCHITECTURES)}. Import the module that adds this row"
            )
        kind = rope_kind(self.rope_scaling)
        if kind not in ("default", *ROPE_KEYS):
            raise ValueError(
                f"rope scaling {kind!r} is unknown: {', '.join(ROPE_KEYS)}, or 'default' for none"
            )


# ---------------------------------------------------------------------------- the model


class Block(nn.Module):
    """One layer. This is the only class that you edit to change a layer.

    Chunks, swapping, recomputation and sharding follow by themselves, because they know nothing of
    what the block computes. They act only on the tensors that autograd saves, and on the events of
    a Matrix.

    Weights. A large weight is a Matrix, which is sharded; a small one is a Vector. Their arguments
    say how a fresh weight is initialised. Define matrices in the order of their use, because they
    are gathered in this order. hf.HF_NAMES has the weights' names in Hugging Face's files.

    What pre and post may do. They may use any operator of PyTorch's that works on each token
    separately and draws no random numbers, since they may run again in backward.
        - They get a chunk of tokens at a time: only attention mixes tokens.
        - A layer reads nothing of other layers, and all layers are alike.
        - The tensors that autograd saves have shapes that do not depend on the data.
        - With --tp, a rank has only some of the heads, and some of the F features of the MLP. So
          only a matrix product may sum over heads or over features.

    Example 1, a norm at the end of a layer. One vector in __init__, and two lines in place of the
    last line of post:

        self.last_norm = Vector(cfg.dim, "norm")
        ...
        y = h + self.project(self.down, SWIGLU, gate_up)
        return x + rms_norm(y, self.last_norm.weight, self.cfg.norm_eps)

    Example 2, GELU instead of SwiGLU (examples/gelu.py). The input a of `down` is gelu(gate) * up
    (gated), or gelu(up) (not gated). What you change in which file:

                            gated                       not gated
        a Prologue          GEGLU, written like SWIGLU  GELU, as in Prologue's docstring
        here: gate_up       stays, (2F, C)              Matrix(cfg.ffn, cfg.dim, cut="rows"), (F, C)
        here: end of post   self.project(               self.project(
                              self.down, GEGLU, ...)      self.down, GELU, ...)
        hf.py               "hidden_act": "gelu", in    none: no family that hf.py knows has such a
                            REQUIRED_VALUES and         layer, so imports and exports are refused
                            export_config (only if you edit Block:
                            a row of ARCHITECTURES is refused)
        costs.py (seconds)  the SwiGLU rows of the tables above layer_tensors; there gate_up and
                            dgate_up have 2F columns, which without gates are F
        costs.py (bytes)    product_backward_tensors and whole_layer_moments: 2F is F without gates
        test_all.py         a row of ACTIVATIONS, by which PlainLayer computes the same
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
        self.norm = norm_prologue(cfg.norm_eps)  # its inputs: x and the norm's weight

    # all products of a layer go through it, so that a fork can change them all (examples/lora.py)
    project = staticmethod(project)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return how many heads of q, k and v this rank computes: all, or its share with --tp."""
        width = self.cfg.head_dim
        q = self.out.shape[1] // width  # out takes one column per element of q's heads
        q_and_kv = self.qkv.shape[0] // width
        kv = (q_and_kv - q) // 2
        return q, kv, kv

    def pre(self, x: Tensor, positions: Positions):
        """Compute q (B, T, H, D) and k, v (B, T, K, D) from the layer's input x (B, T, C).

        The T tokens may be a part of a sequence; `positions` says which these are.
        """
        eps = self.cfg.norm_eps
        heads = self.heads
        qkv = self.project(self.qkv, self.norm, x, self.norm1.weight)
        if self.qkv_bias:
            qkv = qkv + self.qkv_bias.local().to(qkv.dtype)
        qkv = qkv.unflatten(-1, (sum(heads), -1))  # (B, T, H+2K, D)
        if self.q_norm:
            q, k, v = qkv.split(heads, dim=2)
            q = rms_norm(q.contiguous(), self.q_norm.weight, eps)
            k = rms_norm(k.contiguous(), self.k_norm.weight, eps)
            qkv = torch.cat((q, k, v), 2)
        return split_rotate(qkv, positions.cos, positions.sin, heads)

    def post(self, x: Tensor, o: Tensor, positions: Positions) -> Tensor:
        """Compute the layer's output y (B, T, C) from its input x (B, T, C) and attention's output
        o (B, T, H, D).

        The T tokens may be a part of a sequence; `positions` says which these are.
        """
        h = x + self.project(self.out, IDENTITY, o.flatten(2))
        gate_up = self.project(self.gate_up, self.norm, h, self.norm2.weight)
        return h + self.project(self.down, SWIGLU, gate_up)


class PlainAttention:
    """Causal attention by PyTorch's own function, on one device and without documents.

    attention.Attention is called in the same way, and adds kernels, documents and ranks.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        inputs = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
        o = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2), None

    def of_layer(self, i: int) -> "PlainAttention":
        """Return the attention of layer i. Here it is the same for all layers."""
        return self


plain_attention = PlainAttention()


class LLaMA(nn.Module):
    """The whole model: embedding, layers, final norm, head and loss.

    A tied model has V * C fewer parameters, and its embedding starts smaller. An untied embedding
    is normal(0, 1). A tied one is normal(0, 1 / sqrt(C)), as a head is. With standard deviation 1,
    the first logits would be sqrt(C) times too large, and the first loss far above log(V).

    attention: (q, k, v) -> (o, lse). Its method of_layer(i) returns the attention of layer i. If
    forward gets documents, it also needs with_documents(documents), which returns the attention of
    a micro-batch whose tokens attend only to their own document. PlainAttention has no such method.

    LLaMA(cfg) returns an object of the class that cfg.architecture names (ARCHITECTURES). So
    train.py and hf.py, which make a model from its sizes, get the right class.
    """

    labels_ahead = 1  # labels per token. A model that predicts the next n tokens sets it to n
    # attribute names of the weights that a fork has in addition to those of Hugging Face's files.
    # For example, "a" stands for blocks.0.qkv.a.weight and for all other weights of this name. An
    # import leaves them at their first values. An export has no tensors for them: export_weight
    # can merge them into other weights
    own_weights: tuple[str, ...] = ()
    angle_dtype = torch.float64  # of rotary angles (rope_tables)
    # positions of the tokens of q, k, v on this rank -> positions of the tokens of x
    select_tp_tokens = staticmethod(identity)

    @classmethod
    def class_of(cls, cfg: ModelConfig) -> type["LLaMA"]:
        """Return the class of the model that LLaMA(cfg) makes."""
        named = ARCHITECTURES[cfg.architecture].model
        return named if issubclass(named, cls) else cls  # cls may itself be a subclass

    def __new__(cls, cfg: ModelConfig | None = None, *args, **kwargs):
        if cls is LLaMA and cfg is not None:  # copy.deepcopy passes no cfg: it knows the class
            cls = cls.class_of(cfg)  # __init__ of this class runs next
        return super().__new__(cls)

    def __init__(self, cfg: ModelConfig, attention: Callable = plain_attention):
        super().__init__()
        self.cfg = cfg
        self.attention = attention
        self.layer_runner = run_blocks
        self.embed = Matrix(cfg.vocab, cfg.dim, std=None if cfg.tied else 1.0)
        self.blocks = nn.ModuleList(block_class(cfg)(cfg) for _ in range(cfg.layers))
        self.norm = Vector(cfg.dim, "norm")
        self.head = self.embed if cfg.tied else Matrix(cfg.vocab, cfg.dim)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple]:
        """Return the shape of each weight by name. Read this before tensor.py splits the model.

        Raises ValueError if two modules share a weight, because each would get its own.
        """
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        for path, module in self.named_modules():
            for name, _ in module.named_parameters(path, recurse=False):
                if name not in shapes:
                    raise ValueError(
                        f"{name} is another module's weight, too. Weights cannot be shared: use "
                        "one Vector module in both places, or two matrices. ModelConfig.tied ties "
                        "the head to the embedding"
                    )
        return shapes

    @functools.cached_property
    def frozen_weights(self) -> set[str]:
        """Return the names of the frozen weights. Read this before pipeline.py splits the model."""
        return {name for name, p in self.named_parameters() if not p.requires_grad}

    @functools.cached_property
    def forward_only_layers(self) -> int:
        """Return how many of the first layers need no backward, because the embedding and these
        layers are frozen. Read this before pipeline.py splits the model.

        Example: of five layers, 0 to 4, only layers 2 and 4 have weights that train, and so does
        the head. Backward passes through layers 4 and 3, and ends at layer 2. Layers 0 and 1 need
        no backward, so the result is 2.
        """
        trained = [name for name in self.shapes if name not in self.frozen_weights]
        paths = [name.split(".") for name in trained]
        # the embedding trains, or another weight, which a fork's embed_tokens may use
        if any(path[0] not in ("blocks", "norm", "head") for path in paths):
            return 0
        layers = [int(path[1]) for path in paths if path[0] == "blocks"]
        return min(layers, default=len(self.blocks))

    @functools.cached_property
    def weight_init(self) -> dict[str, tuple[float, float]]:
        """Return (mean, std) of each fresh weight by name. Read this before the model is split."""
        weight_init = {}
        for path, module in self.named_modules():
            if isinstance(module, Vector):
                weight_init[f"{path}.weight"] = module.start, 0.0
            if isinstance(module, Matrix):
                shrink = math.sqrt(2 * self.cfg.layers) if module.residual else 1.0
                weight_init[f"{path}.weight"] = 0.0, module.std / shrink
        return weight_init

    def export_weight(self, name: str, full_param: Callable[[str], Tensor]) -> Tensor:
        """Return a weight as an export writes it. A fork that has `own_weights` merges them here
        into the other weights (examples/lora.py). full_param(name) returns a whole weight of the
        run, in float32 or wider. It is a collective of all ranks."""
        return full_param(name)

    def init_weights(self, seed: int) -> None:
        """Give each weight its first value (`initial_weight`)."""
        for name, p in self.named_parameters():
            p.data.copy_(initial_weight(name, p.shape, self.weight_init[name], seed, p.device))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        scale: Tensor | None = None,
        positions: Tensor | None = None,
        documents=None,
        per_token: bool = False,
    ) -> Tensor:
        """Return the logits (B, T, V), or the loss if there are labels.

        The loss is the sum over valid tokens of cross-entropy * scale. With per_token=True it is
        the cross-entropy of each token (B, T) instead, without gradients. It is 0 for tokens that
        are not valid.

        tokens (B, T)       integers
        labels (B, T)       integers; a token is valid if its label is not IGNORE
        scale               0-dim tensor; 1 / (number of valid tokens in this call) by default. If
                            you split a batch, pass 1 / (valid tokens of the whole batch) with each
                            part. Then losses and gradients of the parts add up.
        positions           (T,) or (B, T); 0 ... T-1 by default
        documents           where documents begin and end (attention.Documents), if tokens attend
                            only to their own document

        A stage of a pipeline does not call forward. It calls the three methods below, so a fork
        changes those: embed_tokens, run_layers and apply_head.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x_positions = self.select_tp_tokens(positions)
        x = self.embed_tokens(tokens, x_positions)
        layers = range(len(self.blocks))
        x = self.run_layers(layers, self.layer_runner, x, positions, documents)
        return self.apply_head(x, labels, scale, per_token, x_positions)

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input (B, T, C).

        The T tokens may be a part of a sequence; positions (T,) or (B, T) says which these are.
        """
        return embedding(self.embed, tokens)

    def run_layers(
        self,
        layers: Iterable[int],
        layer_runner: Callable,
        x: Tensor,
        positions: Tensor,
        documents=None,
    ) -> Tensor:
        """Run some layers, given by their indices, on x (B, T, C); return the last one's output.

        layer_runner(model, positions, attention) returns run_layer(i, x) -> y: see `run_blocks`.
        """
        dtype = accumulation_dtype(x.dtype)
        cos, sin = rope_tables(self.cfg, positions, dtype, self.angle_dtype)
        token_positions = Positions(cos, sin, positions, self.select_tp_tokens(positions))
        attention = self.attention
        if documents is not None:
            attention = attention.with_documents(documents)
        run_layer = layer_runner(self, token_positions, attention)
        for i in layers:
            x = run_layer(i, x)
        return x

    def apply_head(
        self,
        x: Tensor,
        labels: Tensor | None,
        scale: Tensor | None,
        per_token: bool,
        positions: Tensor,
    ) -> Tensor:
        """Apply the final norm and the head to x (B, T, C); same return value as forward().

        The T tokens may be a part of a sequence; positions (T,) or (B, T) says which these are.
        So do not shift labels: the label after a token's own may lie on another rank. A model that
        predicts more than the next token sets `labels_ahead`, and gets labels (B, T, labels_ahead).
        """
        x = rms_norm(x, self.norm.weight, self.cfg.norm_eps)
        if labels is None:
            return self.head(x)
        if scale is None:
            valid = (labels != IGNORE).sum().clamp(min=1)
            scale = 1 / valid.to(accumulation_dtype(x.dtype))
        loss, losses = head_loss(
            self.head,
            x.flatten(0, 1),
            labels.flatten(),
            scale,
            differentiate=torch.is_grad_enabled(),
        )
        return losses.view_as(labels) if per_token else loss

    def forward_backward(self, micro_batches: Iterable[tuple]) -> Tensor:
        """Run forward and backward of a step's micro-batches; return the sum of their losses.

        Each micro-batch is a tuple of forward's arguments. Their gradients add up.
        """
        loss = 0.0
        for micro_batch in micro_batches:
            micro_batch_loss = self(*micro_batch)
            micro_batch_loss.backward()
            loss += micro_batch_loss.detach()
        return loss


@dataclass(frozen=True)
class Architecture:
    """A row of ARCHITECTURES: the class of a model's layers, and the class of the model, which is a
    subclass of LLaMA if more than its layers differs."""

    block: type[Block]
    model: type[LLaMA] = LLaMA


# --architecture: a fork adds a row (examples/gelu.py, examples/gemma.py), or edits Block
ARCHITECTURES = {"llama": Architecture(Block)}


def block_class(cfg: ModelConfig) -> type[Block]:
    """Return the class of a model's layers."""
    if cfg.architecture == "llama":
        return Block  # not the class in ARCHITECTURES, because tests and forks replace model.Block
    return ARCHITECTURES[cfg.architecture].block


def run_block(block: Block, x: Tensor, positions: Positions, attention: Callable) -> Tensor:
    """Run one layer on all of its tokens, x (B, T, C) -> y (B, T, C), under autograd."""
    o, _ = attention(*block.pre(x, positions))
    return block.post(x, o, positions)


def run_blocks(model: "LLaMA", positions: Positions, attention: Callable) -> Callable:
    """Return run_layer(i, x) -> y, which runs layer i whole. This is the default layer_runner."""

    def run_layer(i: int, x: Tensor) -> Tensor:
        return run_block(model.blocks[i], x, positions, attention.of_layer(i))

    return run_layer


# ---------------------------------------------------------------------------- rotary angles

# A rotary scaling is a dictionary {"rope_type": kind, key: value, ...}, as in Hugging Face's files.
ROPE_KEYS = {  # by kind, the keys that rope_frequencies needs
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_OPTIONS = ("beta_fast", "beta_slow", "attention_factor")  # further keys of yarn, with defaults


def rope_kind(scaling: dict) -> str:
    """Return the kind of a rotary scaling. Older files call the key "type"."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def rope_frequencies(cfg: ModelConfig, device=None) -> tuple[Tensor, float]:
    """Return the D/2 rotary frequencies in radians per position, and the factor on cos and sin.

    A scaling serves sequences longer than the trained length. "linear" divides all frequencies by
    its factor. "llama3" and "yarn" (arXiv 2309.00071) keep the high ones, divide the low ones, and
    blend the two in between. Only "yarn" has a factor on cos and sin other than 1.

    Frequencies are float64. They are computed on the device, so that nothing waits for a copy.
    """
    half = cfg.head_dim // 2
    pairs = torch.arange(half, dtype=torch.float64, device=device)  # 0 ... D/2 - 1
    freq = cfg.rope_theta ** -(pairs / half)
    scaling = cfg.rope_scaling
    kind = rope_kind(scaling)
    if kind == "default":
        return freq, 1.0
    if kind == "linear":
        return freq / scaling["factor"], 1.0
    if kind == "yarn":
        return yarn_frequencies(cfg, freq)

    # the remaining kind is "llama3"
    trained = scaling["original_max_position_embeddings"]
    turns = trained * freq / (2 * math.pi)  # full turns within the trained length
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divided, 1: as it was
    scale = keep + (1 - keep) / scaling["factor"]
    return freq * scale, 1.0


def yarn_frequencies(cfg: ModelConfig, freq: Tensor) -> tuple[Tensor, float]:
    """Return the frequencies of "yarn", and its factor on cos and sin. freq (D/2,): the frequencies
    without scaling."""
    scaling = cfg.rope_scaling
    factor = scaling["factor"]
    trained = scaling["original_max_position_embeddings"]
    half = len(freq)

    def pair_with_turns(turns):
        """Return the index of the pair that makes so many full turns within the trained length. It
        may be a fraction."""
        return half * math.log(trained / (turns * 2 * math.pi)) / math.log(cfg.rope_theta)

    # pairs before `first` keep their frequency, pairs after `last` have it divided
    first = max(0, math.floor(pair_with_turns(scaling.get("beta_fast") or 32)))
    last = min(math.ceil(pair_with_turns(scaling.get("beta_slow") or 1)), cfg.head_dim - 1)
    width = last - first
    if width == 0:
        width = 1e-3
    pairs = torch.arange(half, dtype=freq.dtype, device=freq.device)
    divide = ((pairs - first) / width).clamp(0, 1)  # 0: as it was, 1: divided
    # sqrt(1/t) of the YaRN paper, where t is a temperature. It multiplies q and k, so the scores
    # are divided by t
    attention_factor = scaling.get("attention_factor")
    if not attention_factor:
        attention_factor = 0.1 * math.log(max(factor, 1)) + 1
    return freq * (1 - divide) + freq / factor * divide, attention_factor


def rope_tables(
    cfg: ModelConfig,
    positions: Tensor,
    dtype: torch.dtype,
    angle_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (..., D/2) of the angles at integer positions, (T,) or (B, T).

    Angles are computed in float64: between positions 2^19 and 2^20, float32 angles would be
    multiples of 1/16 radian.
    """
    freq, factor = rope_frequencies(cfg, positions.device)
    angle = positions.to(angle_dtype).unsqueeze(-1) * freq.to(angle_dtype)
    cos = angle.cos() * factor
    sin = angle.sin() * factor
    return cos.to(dtype), sin.to(dtype)


# ---------------------------------------------------------------------------- sizes and counts


def divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


# fmt: off
# the positional arguments: V, C, L, H, K, F, and D if it is not 128
MODELS = {
    "tiny": ModelConfig(256, 192, 4, 6, 6, 512, 32, max_positions=1024),
    "160m": ModelConfig(32000, 768, 12, 12, 12, 3072, 64),
    "1b": ModelConfig(32000, 2048, 24, 16, 16, 5504),
    "7b": ModelConfig(32000, 4096, 32, 32, 32, 11008),
    "13b": ModelConfig(32000, 5120, 40, 40, 40, 13824),
    "30b": ModelConfig(32000, 6656, 60, 52, 52, 17920),
    "65b": ModelConfig(32000, 8192, 80, 64, 64, 22016),
    "llama3-8b": ModelConfig(128256, 4096, 32, 32, 8, 14336, rope_theta=5e5, max_positions=8192),
    "qwen3-8b": ModelConfig(151936, 4096, 36, 32, 8, 12288, rope_theta=1e6, max_positions=40960,
                            norm_eps=1e-6, qk_norm=True),
}
# fmt: on


class ParamCounts(NamedTuple):
    """The numbers of a model's parameters, by what a step computes for them."""

    trained: int
    frozen: int  # those that backward passes through
    forward_only: int  # frozen ones that backward does not reach

    def __str__(self) -> str:
        all_frozen = self.frozen + self.forward_only
        frozen = f" ({all_frozen:,} of them frozen)" if all_frozen else ""
        return f"{sum(self):,} parameters{frozen}"


def param_count(cfg: ModelConfig) -> int:
    """Return the number of parameters, counted on a model on the meta device."""
    return sum(param_counts(cfg))


def param_counts(cfg: ModelConfig) -> ParamCounts:
    """Return the numbers of parameters, counted on a model on the meta device."""
    counts, _ = _param_counts(cfg, LLaMA, block_class(cfg))
    return counts


@functools.cache
def _param_counts(
    cfg: ModelConfig, model_class: type, layer_class: type
) -> tuple[ParamCounts, int]:
    """Return the numbers of parameters, and how many of the first layers need no backward."""
    # layer_class is not used, but it is a part of the cache's key: tests and forks replace
    # model.Block, and another Block has another number of parameters
    with torch.device("meta"):
        model = model_class(cfg)
    counts = {"trained": 0, "frozen": 0, "forward_only": 0}
    for name, p in model.named_parameters():
        first, *rest = name.split(".")
        if p.requires_grad:
            kind = "trained"
        elif first in ("norm", "head") or (first == "embed" and cfg.tied):
            kind = "frozen"
        elif first == "blocks" and int(rest[0]) >= model.forward_only_layers:
            kind = "frozen"
        else:
            kind = "forward_only"
        counts[kind] += p.numel()
    return ParamCounts(**counts), model.forward_only_layers


def flops_per_token(
    cfg: ModelConfig, seq: int, keys_seen: float | None = None
) -> tuple[float, float]:
    """Return model FLOPs per token, forward and backward: (causal, full).

    A parameter costs one multiply-add in forward and two in backward, which are 6 FLOPs. A frozen
    one costs 4, because it has no gradient of its own. A frozen one that backward does not reach,
    in the embedding or in the first layers, costs 2 (LLaMA.forward_only_layers). The embedding is
    counted although it is a look-up, as is usual. A tied matrix is counted once, for the head.

    For a sequence of s = `seq` tokens, attention multiplies each query with s keys and the scores
    with s values: 4 s H D per layer, and three times that with the backward, if there is one. So
    "full" adds 12 L H D s, the convention of AMSP and Megatron. A causal mask halves the pairs, so
    "causal" adds 6 L H D s (Memo, 5.1). Recomputation is never counted.

    keys_seen replaces s if sequences consist of documents. It is the mean of 2i - 1 over all
    tokens, where a token is number i of its document (i = 1, 2, ...), so it attends to i keys. For
    one document of s tokens this mean is s.
    """
    counts, forward_only_layers = _param_counts(cfg, LLaMA, block_class(cfg))
    products = 6.0 * counts.trained + 4.0 * counts.frozen + 2.0 * counts.forward_only
    # a layer without backward computes a third: backward computes twice as much as forward
    equivalent_layers = cfg.layers - 2 / 3 * forward_only_layers
    attention = 6.0 * equivalent_layers * cfg.heads * cfg.head_dim * (keys_seen or seq)
    return products + attention, products + 2 * attention


# ---------------------------------------------------------------------------- first weights


def initial_weight(
    name: str, shape: tuple[int, ...], mean_std: tuple[float, float], seed: int, device
) -> Tensor:
    """Return one fresh weight in float32: normal(mean, std), or the constant mean if std is 0.

    mean_std: from LLaMA.weight_init. On one kind of device the weight depends only on the
    arguments, so ranks may make weights in any order.
    """
    mean, std = mean_std
    if std == 0:
        return torch.full(shape, mean, device=device)
    # one seed per weight. A CPU's generator uses only 32 bits of a seed, so crc32 loses nothing;
    # and for one name, two different seeds of 32 bits give two different values
    seed_of_name = zlib.crc32(name.encode(), seed)
    rng = torch.Generator(device).manual_seed(seed_of_name)
    return torch.empty(shape, device=device).normal_(mean, std, generator=rng)
