"""Count what a plan costs: the bytes that a rank needs, and the seconds of a training step.

The planner compares plans by these two counts (`predict`). No number is fitted to whole steps. But
two choices of what to count were made by comparing predictions with measured steps. A comment says
so at each of them.

Bytes. Model states, their buffers and the skeletal activations (Memo's name for the tensors that
forward saves for backward) stay allocated between operations. They are counted term by term, as
shard.py and offload.py allocate them. The term `working` is all the rest, at the moment of a step
when it is largest: `working_moments` lists the tensors alive at a few moments.

Legend:

    N tokens of a micro-batch on a rank     L layers, M micro-batches per step
    C width, F feed-forward width           H query heads, K key/value heads
    V vocabulary                            P parameters of a rank before they are sharded. (Frozen
                                            ones have no gradients and no optimizer states)
    p, g, os sharding factors (AMSP)        e bytes per element, tp tensor-parallel ranks
    n number of layers of a virtual stage that backward reaches. These are all its layers, unless
      the first ones are frozen
    k number of resident layers: the last k of the n layers, which copy nothing to the host
    m layers per group. Only a group's first layer saves its input x
    x a layer's input, o attention's output, h = x + the output projection of o
    y the layer's output, dx the gradient of x, and so on
    pre and post: the parts of a layer before and after attention. They run whole, or in chunks of
    the tokens (token chunks); attention always runs on all tokens
    mesh of a group of ranks: (GPUs in each node, nodes)

In code, `tokens` is N, unless a function says otherwise, `own` is the number of
tokens_between_products, and `n` is n. In tables of tensors, n1 and n2 are the results of a layer's
two norms.

Example: 7B (P = 6.74e9 parameters) with one sequence of 256K tokens on four H200s,

    python planner.py --model 7b --ranks 4 --seq 256K --batch 1 --cluster h200x8 --host-memory 400G

The planner shards with p,g,os = 2,2,4. The 4 ranks share the sequence, so each has N = 64K tokens,
which run in one token chunk per layer. The skeletal activations of a layer have three parts:
S_input (x, 0.50 GiB), S_attn (o and its log-sum-exp, 0.51 GiB) and S_others (the rest, 4.69 GiB).
The last 14 of 32 layers are resident on the GPU. 13 of them keep all three parts, and one
recomputes its S_others. The first 18 layers swap S_input and S_attn to the host; 17 of them also
swap S_others.

    term                formula                                                         GiB
    parameters          2 P / p bytes, bf16                                            6.28
    gradients           2 P / g bytes, bf16; 4 P / g in float32 if several             6.28
                        micro-batches add up (grad_sums)
    optimizer           12 P / os bytes: master weight and two moments in float32;    18.83
                        on the host 10 P / os (optim.py)
    gathered weights    2 bytes x (matrices of 2 layers + embedding + head); 0 if      1.24
                        p = 1
    whole gradients     2 bytes x (the same matrices) if g > 1, and 0 if g = 1. In     1.24
                        layers in several token chunks they add up in float32: 4
                        bytes if g > 1; and 4 if g = 1, unless the gradients that a
                        rank keeps are in float32 already (weight_buffer_bytes)
    activations         14 x (S_input + S_attn) = 14.11, 13 x S_others = 60.94,       86.44
                        and two rounding buffers of all three = 2 x 5.70
                        (backward reads swapped layers from these buffers)
    working             largest moment, backward of a chunk's products: dy, dx and     8.03
                        do 1.50, gate|up's gradient 2.69, SwiGLU and its gradient
                        2.69, all-to-all buffers 0.81 and 0.31, cos and sin 0.03
    all                                                                              128.34
    host memory         18 x (S_input + S_attn) + 17 x S_others                       97.84

Seconds. They are computed in three levels:

    operations   FLOPs / rate(shape), bytes / bandwidth(operation, bytes, mesh)    Estimator
    layers       matrix products, attention with its all-to-alls, and              layer_seconds
                 element-wise kernels, by the tensors that they read and write
    step         forward and backward passes. Communication that overlaps with     step_seconds
                 a pass slows the pass down. Communication that the pass cannot
                 hide is exposed: it makes the step longer

In a pipeline the stages differ. We count an imaginary stage, which has the most of everything: the
micro-batches in flight of the first stage, the logits of the last stage, as many layers as the
largest stage, and in each virtual stage the activations of the largest one. Its seconds are those
of these layers, of head and loss, and its idle time.

Left out: ranks that wait for a slower one, the first step's compilation, reductions of a few
numbers such as the loss (0.1 % of the shortest steps), the embedding's forward, and the last norm.
If optimizer states stream from the host, three things are counted: the seconds by which streaming
exceeds the first forward, the seconds of the update itself, and longer waits for copies of
activations, because both use the link to the host (link_busy_seconds). Left out is that a layer may
wait for its own update during the first forward. Bytes of CUDA's context, of NCCL and of fragments
between tensors are not counted either: the planner leaves 5 % of the GPU for them
(planner.GPU_SHARE). A pipeline is timed as if a micro-batch ran through all layers of a stage at
once. Its activations are counted as if backward reached as many layers of every stage as of the
last one, which is too many if the first layers are frozen.

If you change model.Block, its matrices and what it saves are counted without an edit here. Its
element-wise kernels are rows of the tables above `layer_tensors`: add yours there. The temporary
tensors of its backward are rows of `product_backward_tensors` and `whole_layer_moments`.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

import model as llama
from attention import KERNELS
from fp8 import E4M3, can_use_float8
from hardware import Profile, interpolate, interpolate_twice, launch_host
from model import ModelConfig, flops_per_token
from offload import ActivationPlan, matrices_of, trace_block
from ops import accumulation_dtype, loss_chunks
from optim import ADAMW, OPTIMIZERS, PIECE_BUFFERS, PIECE_ELEMENTS, REST, Optimizer
from pipeline import most_layers_of_a_stage
from shard import STREAMS, Factors

# ---------------------------------------------------------------------------- plans

# what --overlap may name: the streams of model states, and the messages between pipeline stages
OVERLAP_CHOICES = (*STREAMS, "pipeline")


@dataclass(frozen=True)
class Plan:
    """The choices that make a plan, and what it costs."""

    model: ModelConfig
    dtype: torch.dtype
    ranks: int
    per_node: int  # ranks per node
    seq: int  # tokens of a sequence
    sp: int = 1  # ranks of a sequence-parallel group, which share a sequence
    ring: int = 1  # ranks of a ring, which pass k and v on; sp / ring ranks split the heads
    batch: int = 1  # sequences per step, over all ranks
    micro_batch: int = 1  # sequences that a sequence-parallel group runs at once
    head_groups: int = 1  # parts of the heads, which attention runs one after the other
    # none: each layer runs whole. auto: layers run in token chunks (also for --recompute full)
    recompute: str = "none"
    chunk: int = 0  # the most tokens of a token chunk
    factors: Factors = Factors()
    os_layout: str = "intra"  # intra: each matrix is cut; inter: each matrix has one owner
    os_place: str = "gpu"  # where optimizer states lie: gpu, or host
    # with os_place host: how many of a stage's first layers have their states on the GPU
    resident_states: int = 0
    optimizer: str = "adamw"  # a row of optim.OPTIMIZERS, for matrices
    # how gradients of micro-batches add up. "fp32": in float32. "dtype": in the field dtype
    grad_sums: str = "fp32"
    # how layers multiply matrices. "dtype": in the field dtype. "fp8": in float8 (fp8.py)
    products: str = "dtype"
    keeps_casts: bool = False  # fp8: keep casts of all weights from one update to the next
    # on: the addresses of a step's tensors are planned, and a step on one stream is a CUDA graph
    memplan: str = "off"
    overlap: tuple[str, ...] = OVERLAP_CHOICES  # streams and messages that overlap computation
    activations: ActivationPlan | None = None  # None: layers keep all skeletal activations on GPU
    memory: dict[str, float] = field(default_factory=dict)  # bytes of GPU memory, by term
    host: dict[str, float] = field(default_factory=dict)  # bytes of host memory per rank, by term
    seconds: dict[str, float] | None = None  # seconds of a step, by what takes them
    tp: int = 1  # ranks of a tensor-parallel group, which share each layer's matrices
    tp_mode: str = "msp"  # mtp, msp or fsp: see tp_exchange_seconds
    pp: int = 1  # stages of a pipeline
    pp_chunks: int = 1  # virtual stages per stage

    @functools.cached_property
    def local_model(self) -> ModelConfig:
        """Return a model whose layers have the sizes that one tensor-parallel rank holds.

        These are H/tp query heads, K/tp key/value heads and F/tp features. Most counts then
        treat the local model as any other model.
        """
        cfg, tp = self.model, self.tp
        if tp == 1:
            return cfg  # plans are made by the thousand, so this saves seconds
        return replace(
            cfg,
            heads=cfg.heads // tp,
            kv_heads=cfg.kv_heads // tp,
            ffn=cfg.ffn // tp,
        )

    @property
    def matrices(self):
        """Return (rows, cols) of each matrix of a layer on one rank, in the order of use."""
        return block_matrices(llama.block_class(self.model), self.local_model)

    @property
    def q_kv_widths(self):
        """Return two widths in elements per token: of q (which is also that of o), and of k and v
        together."""
        cfg = self.local_model
        return cfg.heads * cfg.head_dim, 2 * cfg.kv_heads * cfg.head_dim

    @property
    def on_one_stream(self) -> bool:
        """Return whether a step runs on the compute stream only, because one GPU holds all model
        states and all activations."""
        return self.ranks == 1 and self.os_place == "gpu" and self.activations is None

    @property
    def vocab_matrix(self):
        """Return (rows, cols) of the embedding, which are also those of the head."""
        return self.model.vocab, self.model.dim

    @property
    def num_vocab_matrices(self) -> int:
        """Return how many vocabulary matrices a stage has. Without a pipeline it has the embedding
        and the head, which are one matrix if the model is tied. In a pipeline a stage has at most
        one of them, and we count one."""
        return 2 if self.pp == 1 and not self.model.tied else 1

    @property
    def sums_vocab_grads(self) -> bool:
        """Return whether a vocabulary matrix's gradient is a sum on this stage. A tied matrix gets
        two contributions: one as the head, and one as the embedding."""
        return self.model.tied and self.pp == 1 and self.counts.trains_head

    @functools.cached_property
    def counts(self) -> "WeightCounts":
        """Return the number of parameters of each layer, and which matrices train."""
        return count_weights(llama.LLaMA, llama.block_class(self.model), self.local_model)

    @property
    def trained_shares(self) -> tuple[float, ...]:
        """Return the share of layers in which each of `matrices` trains: 0 if it is frozen."""
        return self.counts.trained_shares

    @property
    def trained_matrices(self) -> list[tuple[int, int]]:
        """Return (rows, columns) of each matrix of a layer that trains in at least one layer."""
        return [matrix for matrix, share in zip(self.matrices, self.trained_shares) if share]

    @property
    def trained_vocab_matrices(self) -> int:
        """Return how many of num_vocab_matrices train."""
        trained = int(self.counts.trains_embedding) + int(self.counts.trains_head)
        return min(trained, self.num_vocab_matrices)

    @property
    def backward_share(self) -> float:
        """Return the share of the layers that backward reaches (LLaMA.forward_only_layers). In a
        pipeline it is counted as 1, because the last stages may reach all of theirs."""
        if self.pp > 1:
            return 1.0
        return 1 - self.counts.forward_only_layers / self.model.layers

    @functools.cached_property
    def params(self) -> int:
        """Return P, the parameters of a rank's matrices before they are sharded. Vectors, such as
        norm weights, are not counted."""
        vocab = self.num_vocab_matrices * math.prod(self.vocab_matrix)
        return self.sum_over_stage(self.counts.layer_params) + vocab

    @functools.cached_property
    def trained_params(self) -> int:
        """Return how many of `params` are not frozen, so that they have gradients and states."""
        vocab = self.trained_vocab_matrices * math.prod(self.vocab_matrix)
        return self.sum_over_stage(self.counts.trained_layer_params) + vocab

    def sum_over_stage(self, per_layer: tuple[int, ...]) -> int:
        """Return the sum over the layers of a stage. per_layer: numbers of all layers."""
        if self.pp == 1:
            return sum(per_layer)
        # a fork's layers may differ, and a stage may have the largest ones
        return self.stage_layers * max(per_layer)

    @functools.cached_property
    def in_float8(self) -> tuple[bool, ...]:
        """Return for each of `matrices` whether its products run in float8."""
        if self.products != "fp8":
            return (False,) * len(self.matrices)
        return float8_by_matrix(llama.block_class(self.model), self.model)

    @property
    def float8_matrices(self) -> list[tuple[int, int]]:
        """Return the sizes of the matrices whose products run in float8."""
        return [matrix for matrix, in_float8 in zip(self.matrices, self.in_float8) if in_float8]

    @property
    def accum_dtype(self) -> torch.dtype:
        """Return the dtype in which sums are accumulated: float32 or wider."""
        return accumulation_dtype(self.dtype)

    @property
    def accum_bytes(self) -> int:
        """Return the bytes per element of accum_dtype."""
        return self.accum_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Return the bytes per element of the gradients that a rank keeps. Gradients accumulated
        over micro-batches are in accum_dtype, unless grad_sums is "dtype"."""
        return self.accum_bytes if self.sums_wide else self.dtype.itemsize

    @property
    def sums_wide(self) -> bool:
        """Return whether gradients of several micro-batches add up in accum_dtype."""
        return self.micro_batches > 1 and self.grad_sums == "fp32"

    @property
    def parts_of_matrix(self) -> int:
        """Return into how many parts a matrix is cut among the ranks that update it. In layout
        inter, one owner updates the whole p-shard of a matrix."""
        return self.factors.p if self.os_layout == "inter" else self.factors.os

    def params_by_place(self, resident_states: int) -> tuple[int, int]:
        """Return two numbers, for os_place "host": how many parameters have their optimizer states
        on the GPU, and how many on the host, if the first `resident_states` layers of a stage have
        theirs on the GPU.

        If any layers have resident states, the embedding's states are on the GPU, too, because the
        forward needs the embedding first. The states of a head that is not tied to it are on the
        host. In a pipeline the first stage has the embedding, and the last one the head. So the
        first number is largest in the first stage, the second one in the last stage, and each is
        counted there."""
        if resident_states == 0:
            return 0, self.trained_params
        layers = sum(self.counts.trained_layer_params[:resident_states])
        if self.pp > 1:
            resident_layers = min(resident_states, self.stage_layers)
            layers = resident_layers * max(self.counts.trained_layer_params)
        embedding = 0
        if self.counts.trains_embedding or self.sums_vocab_grads:
            embedding = math.prod(self.vocab_matrix)
        on_host = self.trained_params - layers
        if self.pp == 1:
            on_host -= embedding
        return layers + embedding, on_host

    @property
    def optimizer_bytes_per_param(self) -> int:
        """Return the bytes of optimizer states per parameter, where they are stored."""
        return OPTIMIZERS[self.optimizer].bytes_per_parameter(self.dtype, self.os_place)

    @property
    def virtual_stage_layers(self) -> int:
        """Return how many layers the largest virtual stage has."""
        return ceil_div(self.model.layers, self.pp * self.pp_chunks)

    @property
    def stage_layers(self) -> int:
        """Return how many layers the largest stage has."""
        return most_layers_of_a_stage(self.model.layers, self.pp, self.pp_chunks)

    @property
    def tokens(self) -> int:
        """Return N, the tokens of a micro-batch on a rank."""
        return self.micro_batch * self.seq // self.sp

    @property
    def tokens_between_products(self) -> int:
        """Return how many tokens a tensor-parallel rank has between matrix products.

        In modes msp and fsp, the ranks share the tokens of the residual stream there.
        """
        if self.splits_tokens:
            return self.tokens // self.tp
        return self.tokens

    @property
    def splits_tokens(self) -> bool:
        """Return whether a tensor-parallel rank has only a part of the tokens between products."""
        return self.tp > 1 and self.tp_mode != "mtp"

    @property
    def in_chunks(self) -> bool:
        """Return whether layers run in token chunks. One chunk may have all tokens of a layer."""
        return self.recompute == "auto"

    @property
    def chunks(self) -> int:
        """Return in how many token chunks a layer runs."""
        if self.in_chunks:
            return ceil_div(self.tokens, self.chunk)
        return 1

    @property
    def state_ranks(self) -> int:
        """Return how many ranks share their model states. They have the same pipeline stage and the
        same tensor-parallel rank."""
        return self.ranks // (self.tp * self.pp)

    @property
    def state_ranks_per_node(self) -> int:
        """Return how many of the state_ranks are in one node."""
        return min(self.per_node, self.ranks // self.pp) // self.tp

    def mesh(self, ranks, inner=1):
        """Return the mesh (GPUs in a node, nodes) of a group of ranks.

        The group takes every inner-th of `ranks` neighbours among the state_ranks. Example: with 8
        of them per node, mesh(16) is (8, 2), and mesh(16, 4) is (2, 2).
        """
        node = self.state_ranks_per_node
        gpus = min(ranks, node) // min(inner, node)
        nodes = ceil_div(ranks, node) // ceil_div(inner, node)
        return gpus, nodes

    @property
    def dp(self) -> int:
        """Return how many sequence-parallel groups there are. Each has sequences of its own."""
        return self.state_ranks // self.sp

    @property
    def head_ranks(self) -> int:
        """Return how many ranks share the heads of a sequence by all-to-all (Ulysses)."""
        return self.sp // self.ring

    @property
    def kv_groups(self) -> int:
        """Return how many different sets of key/value heads the head groups have. If there are more
        head groups than a rank has key/value heads, several groups share a key/value head. Example:
        8 head groups and 2 key/value heads make 2 sets."""
        return min(self.head_groups, max(1, self.local_model.kv_heads // self.head_ranks))

    @property
    def head_group_widths(self):
        """Return q_kv_widths of one head group. Groups that share a key/value head each have all of
        it."""
        q, kv = self.q_kv_widths
        return q / self.head_groups, kv / self.kv_groups

    @property
    def ring_sum_dtype(self) -> torch.dtype:
        """Return the dtype in which the sums of dk and dv are passed around a ring."""
        return self.dtype if self.ring == 2 else self.accum_dtype

    @property
    def ring_sum_bytes(self) -> int:
        """Return the bytes per element of ring_sum_dtype."""
        return self.ring_sum_dtype.itemsize

    @property
    def micro_batches(self) -> int:
        """Return M, the micro-batches per step."""
        return self.batch // self.dp // self.micro_batch

    @property
    def reached_layers(self) -> int:
        """Return n, how many layers of a virtual stage backward reaches at most. They are the
        model's last ones (LLaMA.forward_only_layers)."""
        reached = self.model.layers - self.counts.forward_only_layers
        return min(reached, self.virtual_stage_layers)

    @property
    def passes_in_flight(self) -> int:
        """Return how many micro-batches at most have run forward but not backward, on one stage.

        A micro-batch counts once per virtual stage. In Megatron's order of passes, the first stage
        has the most. `forwards_ahead` is how many forwards of virtual stages it runs before its
        first backward ends.
        """
        stages, virtual_stages = self.pp, self.pp_chunks
        if virtual_stages == 1:
            forwards_ahead = stages
        else:
            forwards_ahead = stages * (virtual_stages - 1) + 2 * (stages - 1) + 1

        forwards = virtual_stages * self.micro_batches  # of a step
        return min(forwards_ahead, forwards)

    @functools.cached_property
    def collectives(self):
        """Return each Collective of model states, as the table in shard.py's docstring has them."""
        p, g, os = astuple(self.factors)

        # if g > p, a rank keeps only the gradients that it updates with. So gradients are reduced
        # after each micro-batch, and not only after the last one
        reduces_early = g > p
        reduce_stream = "grad_scatter" if reduces_early else "grad_reduce"

        if self.os_layout == "intra":
            subgroup_sum = Collective(
                reduce_stream, "reduce_scatter", os, p, reduces_early, in_last=True
            )
            sum_over_replicas = Collective(
                "grad_reduce", "all_reduce", self.state_ranks, os, in_earlier=False, in_last=True
            )
            broadcast = "all_gather"
        else:  # inter: the last micro-batch has one sum over all replicas, and none inside os
            subgroup_sum = Collective(
                reduce_stream, "all_reduce", os, p, reduces_early, in_last=False
            )
            sum_over_replicas = Collective(
                reduce_stream, "all_reduce", self.state_ranks, p, in_earlier=False, in_last=True
            )
            broadcast = "broadcast"

        return (
            Collective("param_gather", "all_gather", p, 1, in_earlier=True, in_last=True),
            Collective("grad_scatter", "reduce_scatter", p, 1, in_earlier=True, in_last=True),
            subgroup_sum,
            sum_over_replicas,
            Collective("param_broadcast", broadcast, os, p, in_earlier=False, in_last=True),
        )

    @property
    def gpu_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def step_s(self) -> float:
        return float(sum(self.seconds.values()))  # some of them are numpy's

    def rates(self, seconds: float, peak: float | None, keys_seen: float | None = None) -> dict:
        """Return tokens per GPU per second (TGS), and MFU causal and full, of a step that takes
        `seconds`.

        peak: the GPU's FLOP/s. If it is None, so is MFU. keys_seen: see flops_per_token.
        """
        tgs = self.batch * self.seq / seconds / self.ranks
        causal, full = flops_per_token(self.model, self.seq, keys_seen)
        if not peak:
            return {"tgs": tgs, "mfu_causal": None, "mfu_full": None}
        return {"tgs": tgs, "mfu_causal": causal * tgs / peak, "mfu_full": full * tgs / peak}

    @property
    def token_s(self) -> float:
        """Return the GPU-seconds per token, by which plans with different batches are compared."""
        return self.step_s * self.ranks / (self.batch * self.seq)


def ceil_div(a, b):
    """Return a / b, rounded up."""
    return -(-a // b)


@functools.cache
def block_matrices(block_class, cfg):
    """Return (rows, cols) of each matrix of a block, in the order of use."""
    with torch.device("meta"):
        return tuple(matrix.shape for matrix in matrices_of(block_class(cfg)))


@functools.cache
def float8_by_matrix(block_class: type, cfg: ModelConfig) -> tuple[bool, ...]:
    """Return for each matrix of a block, in the order of use, whether float8 can multiply it."""
    with torch.device("meta"):
        matrices = matrices_of(block_class(cfg))
    return tuple(can_use_float8(matrix.shape, matrix.cut) for matrix in matrices)


class Collective(NamedTuple):
    """A collective of model states. Its group has every inner-th rank of `ranks` neighbours (as in
    Plan.mesh). It works on 1/inner of each matrix, the part that its ranks have in common. Example:
    with ranks=4 and inner=2, ranks 0 and 2 are a group, which works on one half of each matrix.
    Ranks 1 and 3 are the group of the other half."""

    stream: str  # one of shard.STREAMS
    op: str  # for example "all_gather"
    ranks: int
    inner: int
    in_earlier: bool  # whether it runs in the earlier micro-batches of a step
    in_last: bool  # whether it runs in the last one


class WeightCounts(NamedTuple):
    """Parameters of a model's matrices."""

    layer_params: tuple[int, ...]  # of each layer
    trained_layer_params: tuple[int, ...]  # of each layer, without frozen matrices
    # by matrix of a layer, in the order of use: the share of layers in which it is not frozen
    trained_shares: tuple[float, ...]
    trains_embedding: bool
    trains_head: bool
    forward_only_layers: int  # how many of the first layers backward does not reach


@functools.cache
def count_weights(model_class: type, block_class: type, cfg: ModelConfig) -> WeightCounts:
    """Count the parameters of a model's matrices, on the meta device.

    block_class is only part of the cache's key: a fork's Block may have other matrices.
    """
    with torch.device("meta"):
        model = model_class(cfg)
    layers = [matrices_of(block) for block in model.blocks]
    trained = [[matrix for matrix in layer if not matrix.frozen] for layer in layers]
    # zip ends at the layer with the fewest matrices. If other layers have more matrices, their
    # bytes are counted, but not their seconds
    shares = [
        sum(not matrix.frozen for matrix in same_matrix) / len(layers)
        for same_matrix in zip(*layers)
    ]
    return WeightCounts(
        tuple(map(count_elements, layers)),
        tuple(map(count_elements, trained)),
        tuple(shares),
        not model.embed.frozen,
        not model.head.frozen,
        model.forward_only_layers,
    )


def count_elements(matrices: list) -> int:
    return sum(math.prod(matrix.shape) for matrix in matrices)


# ---------------------------------------------------------------------------- tables of tensors


class TensorSize(NamedTuple):
    """A row of a table of tensors, for `copies` tensors of shape (rows, columns)."""

    name: str
    rows: float
    columns: float
    dtype: torch.dtype
    copies: float = 1

    @property
    def nbytes(self) -> float:
        return self.copies * self.rows * self.columns * self.dtype.itemsize


def total_bytes(tensors: Iterable[TensorSize]) -> float:
    return sum(t.nbytes for t in tensors)


class ElementwiseKernel(NamedTuple):
    """A kernel that reads each element of some tensors once, and writes each of some others once.
    The fields have the tensors' names."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def elementwise(name: str, reads: str, writes: str) -> ElementwiseKernel:
    """Make a row of a table of kernels. reads, writes: names of tensors, separated by spaces."""
    return ElementwiseKernel(name, tuple(reads.split()), tuple(writes.split()))


def moved_bytes(kernels: Iterable[ElementwiseKernel], nbytes: dict[str, float]) -> float:
    """Return the bytes that kernels read and write. nbytes: bytes of each tensor, by name."""
    return sum(nbytes[name] for row in kernels for name in row.reads + row.writes)


# ---------------------------------------------------------------------------- bytes of layers

LayerBytes = tuple[float, float, float]  # S_input, S_attn, S_others: see skeletal_bytes


def skeletal_bytes(plan: Plan) -> LayerBytes:
    """Return the bytes of a layer's skeletal activations on one rank, for one micro-batch (Memo,
    section 4.1).

        S_input     x
        S_attn      o and its log-sum-exp
        S_others    all other tensors that model.Block saves: q, k, v, h, gate|up (the result of
                    the matrix gate_up), and 1 / rms of x and of h

    trace_block finds these others by running a block. If H = K and F = 8/3 C, all three are
    11 1/3 C elements per token, plus the log-sum-exp and the two values of 1 / rms. Memo counts
    16 C elements: it also saves norm(x), norm(h) and SwiGLU's result, which are recomputed here.
    """
    cfg, e, tokens = plan.local_model, plan.dtype.itemsize, plan.tokens
    q, kv = plan.q_kv_widths
    trace = trace_block(cfg, tokens, plan.dtype)

    x = tokens * cfg.dim * e
    attn = tokens * (q * e + cfg.heads * plan.accum_bytes)
    others = tokens * (q + kv) * e + sum(t.nbytes for t in trace.pre + trace.post)

    if plan.tp_mode == "fsp":  # a rank saves x and h of its own tokens only
        # 1 / rms is also saved for its own tokens only. We count it for all tokens: 8 bytes each
        on_other_ranks = x - x / plan.tp  # bytes of x, and as many of h
        return x - on_other_ranks, attn, others - on_other_ranks
    if plan.splits_tokens and has_whole_matrices(llama.block_class(cfg), cfg):
        # msp saves x and h of all tokens, for the matrices that are split. The other matrices, such
        # as adapters or a router, save x and h of the rank's own tokens
        others += 2 * x / plan.tp
    return x, attn, others


@functools.cache
def has_whole_matrices(block_class: type, cfg: ModelConfig) -> bool:
    """Return whether a block has matrices of C columns that --tp does not split."""
    with torch.device("meta"):
        matrices = matrices_of(block_class(cfg))
    return any(matrix.cut == "whole" and matrix.shape[1] == cfg.dim for matrix in matrices)


def swapped_inputs_and_outputs(plan):
    """Return how many layers swap their x to the host, and how many swap their o.

    The planner compares many plans at once. So here and in the next functions, the fields of an
    ActivationPlan may be arrays with one entry per plan.
    """
    swapped = plan.swapped_layers
    inputs = swapped // plan.stride  # whole groups are swapped; each swaps its first layer's x
    outputs = np.maximum(0, swapped - plan.layers_recomputing_attention)
    return inputs, outputs


def most_swapped_chunks(plan: ActivationPlan):
    """Return how many chunks the layer that swaps most of them swaps."""
    return ceil_div(plan.swapped_chunks, np.maximum(1, plan.swapped_layers))


def activation_gpu_bytes(plan: ActivationPlan, layer: LayerBytes) -> float:
    """Return the most GPU bytes that skeletal activations take at any moment of a step.

    layer: from skeletal_bytes. "Inputs" are layers' x; "outputs" are o with its log-sum-exp. A
    layer "drops" o if it runs attention again in backward instead of saving o.

    The two rounding buffers stay allocated all the time. Forward and backward need more bytes than
    these, and the larger one of the two needs counts.

    Forward: while swapped layers run, the GPU holds x and o of two of them: of the one that runs,
    and of the one before it, whose copies to the host may still run. (With a lag of more than two
    it holds more, but not more than backward needs: most_lag.) Chunks of these layers are not
    counted here, because planner.ActivationProgram leaves room for them (most_swapped). Forward
    also needs less working memory than backward, and the term `working` counts what backward needs.
    So this count can be too low only for a plan made by hand, with few resident layers that keep
    few chunks.

    Backward: the GPU holds the resident layers' activations and what it recomputes for a group of m
    layers (group_bytes). The resident layers are freed from the last one on. So when backward
    reaches a group, the resident layers in and before it are still held, and a later group has more
    of them. A group also recomputes m - 1 inputs, and one output for each of its layers that drops
    o. So there are three kinds of groups, in this order:

        all layers drop o       m outputs are recomputed: the last such group needs the most
        some layers drop o      there is one such group at most
        no layer drops o        no output is recomputed: the last group needs the most

    Four groups are compared. `last_dropping` is the last group in which a layer drops o. It and the
    group before it cover the first two kinds. Of the third kind, the very last group may have fewer
    than m layers and so recompute less. Therefore the last group of m layers is compared, too.
    """
    x, attn, others = layer
    n, m = plan.layers, plan.stride
    swapped, dropping = plan.swapped_layers, plan.layers_recomputing_attention

    most = np.where(swapped > 0, 2 * (x + attn), 0.0)
    last_dropping = (dropping - 1) // m
    for group in ((n - 1) // m, n // m - 1, last_dropping, last_dropping - 1):
        most = np.maximum(most, group_bytes(plan, layer, np.maximum(0, group)))

    # a rounding buffer has room for the largest swapped group. That is the last one, because the
    # layers that drop o are the first ones
    groups, outputs = swapped_inputs_and_outputs(plan)
    chunk = others / plan.chunks
    largest = x + np.minimum(m, outputs) * attn + most_swapped_chunks(plan) * chunk
    return most + np.where(groups > 0, 2 * largest, 0.0)


def group_bytes(plan: ActivationPlan, layer: LayerBytes, group) -> float:
    """Return the GPU bytes of resident and of recomputed activations when backward has reached a
    group of m layers. The activations of later layers are already freed."""
    x, attn, others = layer
    n, m = plan.layers, plan.stride
    swapped, dropping = plan.swapped_layers, plan.layers_recomputing_attention
    first = group * m
    end = np.minimum(n, first + m)

    resident_inputs = ceil_div(np.maximum(0, end - swapped), m)
    recomputed_inputs = np.maximum(0, end - first - 1)  # 0 if there are no layers at all
    resident_outputs = np.maximum(0, end - np.maximum(swapped, dropping))
    recomputed_outputs = np.clip(dropping - first, 0, end - first)

    inputs = resident_inputs + recomputed_inputs
    outputs = resident_outputs + recomputed_outputs
    # kept chunks (S_others) count for the very last group only, when none of them is freed yet.
    # Earlier groups may count none: with m = 1 the last group needs most anyway, and with m > 1 no
    # chunk is kept
    kept = np.where(end == n, plan.kept_chunks * others / plan.chunks, 0.0)
    return inputs * x + outputs * attn + kept


def most_lag(plan: ActivationPlan, layer: LayerBytes):
    """Return the largest lag d (offload.py) that does not raise the peak of GPU memory. It is at
    least 2.

    layer: from skeletal_bytes. In forward the GPU holds the activations of d swapped layers: of the
    d - 1 whose copies may still run, and of the one that runs. When resident layers run, each adds
    its activations, and a swapped layer is freed. So the GPU holds no more than at the end of
    forward if

        d (x + attn + chunks of a swapped layer) <= k (x + attn) + kept chunks     and     d <= k

    The plan's own lag is not read.
    """
    x, attn, others = layer
    chunk = others / plan.chunks
    at_the_end = plan.resident * (x + attn) + plan.kept_chunks * chunk
    lag = np.floor(at_the_end / (x + attn + most_swapped_chunks(plan) * chunk) + 1e-9)
    # if layers drop x, or resident layers drop o, the end of forward holds less than this
    holds_all = (plan.stride == 1) & (plan.layers_recomputing_attention <= plan.swapped_layers)
    return np.where(holds_all, np.clip(lag, 2, np.maximum(2, plan.resident)), 2)


def activation_host_bytes(plan: ActivationPlan, layer: LayerBytes) -> float:
    """Return the bytes of a rank's host buffers, which hold what the swapped layers swap."""
    x, attn, others = layer
    inputs, outputs = swapped_inputs_and_outputs(plan)
    return inputs * x + outputs * attn + plan.swapped_chunks * others / plan.chunks


# ---------------------------------------------------------------------------- bytes of a step


def all_to_all_buffer_bytes(plan: Plan) -> float:
    """Return the bytes of the buffers in which all-to-alls receive."""
    return total_bytes(receive_buffers(plan))


def receive_buffers(plan: Plan) -> list[TensorSize]:
    """Return the buffers in which all-to-alls receive (attention.Ulysses).

    The inputs of attention (q, k, v, and in backward o and do) have buffers for two head groups,
    because one group arrives while the kernel reads the other. Gradients have buffers for one.
    """
    if plan.head_ranks == 1:
        return []
    tokens, dtype = plan.tokens, plan.dtype
    q, kv = plan.head_group_widths
    q_slots = min(2, plan.head_groups)
    kv_slots = min(2, plan.kv_groups)  # head groups that share k and v share their buffers
    return [
        TensorSize("q, o and do of two head groups", tokens, 3 * q, dtype, q_slots),
        TensorSize("dq of a head group", tokens, q, dtype),
        TensorSize("k and v of two head groups", tokens, kv, dtype, kv_slots),
        TensorSize("dk and dv of a head group", tokens, kv, dtype),
    ]


def working_bytes(plan):
    """Return the bytes of the largest of working_moments."""
    return max(map(total_bytes, working_moments(plan).values()))


def working_moments(plan) -> dict[str, list[TensorSize]]:
    """Return the moments of a step that may need most memory, and the tensors alive at each.

    Model states, their buffers and skeletal activations are not among these tensors. Example, the
    loss of 1b (V = 32000) with 4096 tokens in bf16:

        logits                                (4096, 32000) float32
        gradients of the logits               (4096, 32000) bf16
        gradient of the head                  (32000, 2048) float32
        the last layer's output, its norm,    (4096, 3 x 2048) bf16
        the norm's gradient
    """
    cfg = plan.local_model
    passes = plan.passes_in_flight  # each has cos and sin of its own
    angles = TensorSize("cos and sin", plan.tokens, cfg.head_dim, plan.accum_dtype, passes)
    backward = [angles, *layer_backward_tensors(plan)]
    received = receive_buffers(plan)
    moments = {
        "attention's backward": backward + attention_backward_tensors(plan),
        "head and loss": [angles, *received, *loss_tensors(plan)],
    }
    if not plan.in_chunks:
        for name, tensors in whole_layer_moments(plan).items():
            moments[name] = [angles, *received, *tensors]
    else:
        products = product_backward_tensors(plan)
        moments["backward of a chunk's products"] = backward + received + products
        for name, tensors in pre_backward_moments(plan).items():
            moments[name] = [angles, *received, *tensors]
    return moments


def recomputes_chunks(plan) -> bool:
    """Return whether the last layer recomputes some of its chunks in backward.

    Working memory is largest in the last layer. If only earlier layers recompute chunks, the chunks
    of later layers are freed by then, and leave more room than recomputation needs.
    """
    activations = plan.activations
    return activations is not None and activations.kept_chunks < activations.chunks


def layer_backward_tensors(plan) -> list[TensorSize]:
    """Return what is alive throughout a layer's backward, besides its skeletal activations."""
    cfg, tokens, dtype = plan.local_model, plan.tokens, plan.dtype
    own = plan.tokens_between_products
    q, kv = plan.q_kv_widths
    tensors = [
        TensorSize("dy, of the layer's output", own, cfg.dim, dtype),
        TensorSize("dx, as far as it comes from block.post", own, cfg.dim, dtype),
        TensorSize("do, of attention's output", tokens, q, dtype),
    ]
    if recomputes_chunks(plan):
        tensors.append(TensorSize("q, k and v, recomputed", tokens, q + kv, dtype))
        if cfg.qk_norm:  # a norm's backward needs its input
            tensors.append(TensorSize("q and k before their norms", tokens, q + kv / 2, dtype))
    return tensors


def overwrites_qkv(plan) -> bool:
    """Return whether attention's backward writes dq, dk and dv over q, k and v.

    It does so if a layer runs in chunks, and the kernel gets only some of a rank's heads at a time.
    """
    one_call = plan.head_ranks * plan.head_groups == 1  # the kernel gets all of them at once
    return plan.activations is not None and plan.activations.chunks > 1 and not one_call


def attention_backward_tensors(plan) -> list[TensorSize]:
    """Return what attention's backward allocates in addition to layer_backward_tensors.

    It runs one head group after the other.
    """
    cfg, tokens, dtype, wide = plan.local_model, plan.tokens, plan.dtype, plan.accum_dtype
    q, kv = plan.head_group_widths
    groups, kv_groups = plan.head_groups, plan.kv_groups
    one_call = plan.head_ranks * groups == 1  # the kernel sees all heads of these tokens at once
    tensors = []
    if not overwrites_qkv(plan):
        tensors.append(TensorSize("dq, dk and dv", tokens, sum(plan.q_kv_widths), dtype))

    # with several head groups or all-to-alls, a group's inputs and gradients are copies, not views
    # of whole tensors. With all-to-alls we count two groups, each with a copy to send and one
    # received. This is an upper bound. Measured peaks differed by less than 1 % from this count
    copies = kv_copies = 1
    if plan.head_ranks > 1:
        copies, kv_copies = 2 * min(2, groups), 2 * min(2, kv_groups)
    if not one_call:
        tensors += [
            TensorSize("q, o, do, dq of a head group", tokens, 4 * q, dtype, copies),
            TensorSize("k, v, dk, dv of a head group", tokens, 2 * kv, dtype, kv_copies),
        ]
    if groups > kv_groups:  # several head groups add to the same dk and dv
        tensors.append(TensorSize("sums of dk and dv over head groups", tokens, kv, wide))

    # the kernel's own float32 buffers. Those of a group are alive when the next group begins
    alive = min(2, groups)
    tensors += [
        TensorSize("the kernel's dq", tokens, q, wide, alive),
        TensorSize("the kernel's two numbers per row", tokens, 2 * cfg.heads / groups, wide, alive),
    ]
    if cfg.heads / groups > cfg.kv_heads / kv_groups:  # several query heads share dk and dv
        tensors.append(TensorSize("the kernel's dk and dv", tokens, kv, wide, alive))

    if plan.ring > 1:
        tensors += ring_backward_tensors(plan)
    return tensors


def ring_backward_tensors(plan) -> list[TensorSize]:
    """Return what a ring allocates in attention's backward (attention.Ring.attend_backward)."""
    tokens, dtype = plan.tokens, plan.dtype
    q, kv = plan.head_group_widths
    steps = min(2, plan.ring - 1)  # k and v of this step, and of the next one, which arrive
    tensors = [
        TensorSize("k and v of other ranks", tokens, kv, dtype, steps),
        TensorSize("sums of dk and dv, received and sent", tokens, kv, plan.ring_sum_dtype, 2),
        TensorSize("sum of dq", tokens, q, plan.accum_dtype),
        TensorSize("dq, dk and dv of the step before", tokens, q + kv, dtype),
    ]
    if plan.head_groups > 1:
        tensors.append(
            TensorSize("k and v of the next group, sent and received", tokens, kv, dtype, 2)
        )
    return tensors


def product_backward_tensors(plan) -> list[TensorSize]:
    """Return what backward allocates for the product of a chunk with the matrix `down`.

    This is the product that needs most. The tensors are in addition to layer_backward_tensors. At
    the same time an all-to-all sends the first head group's inputs, so they are counted, too.
    """
    cfg, tokens, dtype = plan.local_model, plan.tokens, plan.dtype
    q, kv = plan.head_group_widths
    rows = tokens / plan.chunks
    tensors = float8_backward_tensors(plan, rows, cfg.dim + cfg.ffn)
    tensors += [
        TensorSize("a = SwiGLU(gate|up), and da", rows, cfg.ffn, dtype, 2),
        TensorSize("gradient of gate|up", rows, 2 * cfg.ffn, dtype),
    ]
    width = width_saved_twice(plan)
    if width:
        # two operators save the same tensor, as gate_up and its adapters do, so its gradient is a
        # sum. First the second gradient is alive beside a and da. Then it is alive together with
        # the sum, but da, of cfg.ffn columns, is freed
        with_da = width
        without_da = 2 * width - cfg.ffn
        columns = max(with_da, without_da)
        tensors.append(
            TensorSize("a second gradient of one tensor, and their sum", rows, columns, dtype)
        )
    if recomputes_chunks(plan):
        tensors.append(TensorSize("gate|up, recomputed", rows, 2 * cfg.ffn, dtype))
    if plan.head_ranks > 1:
        tensors.append(
            TensorSize("q, k, v, o, do of a head group, sent", tokens, 3 * q + kv, dtype)
        )
    if plan.ring > 1:
        tensors.append(TensorSize("k and v, sent and received", tokens, kv, dtype, 2))
    if plan.tp > 1:
        tensors += [
            TensorSize("dy, all-reduced", rows, cfg.dim, dtype),
            TensorSize("n = norm(h), dn and dh", rows, cfg.dim, dtype, 3),
        ]
    return tensors


def pre_backward_moments(plan) -> dict[str, list[TensorSize]]:
    """Return the moments of block.pre's backward that may need most, if layers run in chunks.

    They are moments of the first chunk: no chunk of the gradient from block.post is freed yet, and
    dx of all chunks is allocated. Attention has freed do and the recomputed q, k and v. So the
    tensors of layer_backward_tensors are not the ones that are alive here.
    """
    cfg, tokens, dtype = plan.local_model, plan.tokens, plan.dtype
    own = plan.tokens_between_products
    q, kv = plan.q_kv_widths
    rows, own_rows = tokens / plan.chunks, own / plan.chunks
    alive = [
        TensorSize("dy, of the layer's output", own, cfg.dim, dtype),
        TensorSize("dx, as far as it comes from block.post", own, cfg.dim, dtype),
        TensorSize("dx, of the layer's input", own, cfg.dim, dtype),
    ]
    # if they overwrite saved q, k and v, they are counted among the skeletal activations
    if recomputes_chunks(plan) or not overwrites_qkv(plan):
        alive.append(TensorSize("dq, dk and dv", tokens, q + kv, dtype))
    if recomputes_chunks(plan) and cfg.qk_norm:
        alive.append(TensorSize("q and k before their norms", tokens, q + kv / 2, dtype))

    dqkv = TensorSize("gradient of q|k|v of a chunk", rows, q + kv, dtype)
    moments = {
        "product of qkv": [
            *alive,
            dqkv,
            TensorSize("n = norm(x), dn and dx of a chunk", own_rows, cfg.dim, dtype, 3),
            *float8_backward_tensors(plan, rows, q + kv + cfg.dim),
        ]
    }
    if cfg.qk_norm:
        # autograd joins the gradients of q and k before their norms with dv, which is still a view
        # of the gradient after the norms
        moments["norms of q and k"] = [
            *alive,
            dqkv._replace(copies=2),
            TensorSize("gradients before the norms", rows, q + kv / 2, dtype),
        ]
    return moments


def whole_layer_moments(plan) -> dict[str, list[TensorSize]]:
    """Return the moments of backward's products that may need most, if layers run whole.

    Autograd frees what a product has saved when its backward is done. So at the moment of `gate_up`
    the gradient of gate|up takes the place of gate|up itself. n = norm(h), and dn is its gradient.
    Tensor-parallel ranks exchange tensors of C columns, of all tokens of their group. If tp is
    large, these tensors are larger than a rank's tensors of F / tp columns.
    """
    cfg, tokens, dtype = plan.local_model, plan.tokens, plan.dtype
    own = plan.tokens_between_products
    # several sequences that are cut by tokens are copied to bring their tokens in order
    copies = int(plan.splits_tokens and plan.micro_batch > 1)
    dy = [TensorSize("dy of the layer's output", own, cfg.dim, dtype)]
    da = TensorSize("da, of a = SwiGLU(gate|up)", tokens, cfg.ffn, dtype)
    dgate_up = TensorSize("gradient of gate|up", tokens, 2 * cfg.ffn, dtype)
    norms = [TensorSize("n, dn and dh", tokens, cfg.dim, dtype, 3)]
    if plan.tp_mode == "fsp" and plan.tp > 1:
        norms = [
            TensorSize("dn, and n gathered", tokens, cfg.dim, dtype, 2 + copies),
            TensorSize("n, dn and dh of the rank's own tokens", own, cfg.dim, dtype, 3),
        ]

    moments = {}
    exchanged = []
    if plan.tp > 1:
        exchanged = [TensorSize("dy, gathered or all-reduced", tokens, cfg.dim, dtype)]
        received = [tensor._replace(copies=1 + copies) for tensor in exchanged]
        moments["exchange of dy"] = [*dy, *received, dgate_up]
    down = [*dy, *exchanged, da, dgate_up]
    moments["product of down"] = [
        *down,
        da._replace(name="a"),
        *float8_backward_tensors(plan, tokens, cfg.dim + cfg.ffn),
    ]
    moments["product of gate_up"] = [
        *dy,
        *norms,
        *float8_backward_tensors(plan, tokens, cfg.dim + 2 * cfg.ffn),
    ]
    width = width_saved_twice(plan)
    if width:  # adapters of gate|up, for example: a second gradient, and then the sum of the two
        second = TensorSize("a second gradient of one tensor", tokens, width, dtype)
        moments["second product of down"] = [*down, second]
        moments["sum of two gradients"] = [*dy, dgate_up, second, second._replace(name="their sum")]
    return moments


def float8_backward_tensors(plan, rows, columns) -> list[TensorSize]:
    """Return what the backward of a product in float8 allocates besides its operands
    (fp8.Float8Products.backward). columns: of the product's dy and a, together."""
    if plan.products != "fp8":
        return []
    largest = max(map(math.prod, plan.float8_matrices), default=0)
    return [
        TensorSize("dy^T and a^T in float8", rows, columns, E4M3),
        TensorSize("dW of one product", 1, largest, plan.dtype),
    ]


def width_saved_twice(plan) -> float:
    """Return the elements per token of the largest tensor of block.post that two operators save, or
    0 (offload.BlockTrace)."""
    trace = trace_block(plan.local_model, plan.tokens, plan.dtype)
    return trace.most_saved_again / plan.tokens / plan.dtype.itemsize


def loss_tensors(plan) -> list[TensorSize]:
    """Return what head and loss allocate (ops._HeadLoss).

    There are logits of one chunk of tokens, and their gradients for one group of chunks.
    """
    own, wide = plan.tokens_between_products, plan.accum_dtype
    vocab, dim = plan.vocab_matrix
    chunk, group = loss_chunks(vocab)
    return [
        TensorSize("logits", min(chunk, own), vocab, wide),
        TensorSize("gradients of the logits", min(group, own), vocab, plan.dtype),
        TensorSize("gradient of the head", vocab, dim, wide, int(plan.counts.trains_head)),
        TensorSize(
            "the last layer's output, its norm, the norm's gradient", own, 3 * dim, plan.dtype
        ),
    ]


def largest_trained_matrix(plan):
    """Return the elements of a rank's largest matrix that is not frozen."""
    trained = plan.trained_matrices
    if plan.trained_vocab_matrices:
        trained.append(plan.vocab_matrix)
    return max(map(math.prod, trained), default=0)


def imbalance(plan):
    """Return the largest share of optimizer states that a rank owns, divided by the mean share.

    In layout inter each matrix has one owner. The owners hold nearly equal numbers of parameters,
    unless one matrix is larger than the mean.
    """
    if plan.os_layout == "intra":
        return 1.0
    owners = plan.factors.os / plan.factors.p
    return max(1.0, largest_trained_matrix(plan) * owners / max(1, plan.trained_params))


def state_bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of a rank's model states (AMSP, section IV). Frozen matrices have neither
    gradients nor optimizer states."""
    f = plan.factors
    owned = imbalance(plan)
    gradients = plan.grad_bytes * plan.trained_params / f.g
    if f.g > f.p:  # a rank keeps only the gradients of the matrices that it owns
        gradients *= owned
    return {
        "parameters": plan.dtype.itemsize * plan.params / f.p,
        "gradients": gradients,
        "optimizer": plan.optimizer_bytes_per_param * plan.trained_params / f.os * owned,
    }


def weight_buffer_bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of the buffers for gathered weights and for whole gradients (shard.States).

    There is one buffer for each of embedding and head, and two for each matrix of a layer. A tied
    matrix has one buffer. Frozen matrices have no gradient. A matrix that trains in only one layer
    has one buffer, but is counted with two.
    """
    f, e = plan.factors, plan.dtype.itemsize
    vocab_elements = plan.num_vocab_matrices * math.prod(plan.vocab_matrix)
    layer_elements = 2 * sum(map(math.prod, plan.matrices))

    weights = 0
    if f.p > 1:
        weights = (layer_elements + vocab_elements) * e

    # several contributions to a gradient, of token chunks or of a tied matrix's two uses, are
    # summed in accum_dtype. If the gradients that a rank keeps are whole (g = 1) and in
    # accum_dtype, the sum is made in them. Otherwise it is made in a buffer
    trained_vocab_elements = plan.trained_vocab_matrices * math.prod(plan.vocab_matrix)
    trained_layer_elements = 2 * sum(map(math.prod, plan.trained_matrices))

    def grad_buffer_bytes(elements, adds_up):
        needs_wider = adds_up and plan.grad_bytes != plan.accum_bytes
        if f.g == 1 and not needs_wider:
            return 0
        return elements * (plan.accum_bytes if adds_up else e)

    gradients = grad_buffer_bytes(trained_vocab_elements, plan.sums_vocab_grads)
    gradients += grad_buffer_bytes(trained_layer_elements, plan.chunks > 1)
    return {"gathered weights": weights, "whole gradients": gradients}


def streaming_buffer_bytes(plan: Plan) -> float:
    """Return the bytes of the buffers through which optimizer states stream from the host and back
    (optim.HostStates). If the host stores only the part of a master weight that the weight itself
    does not have (optim.REST), one more buffer holds the whole master weights of a piece."""
    elements = largest_trained_matrix(plan) / plan.parts_of_matrix
    if not OPTIMIZERS[plan.optimizer].whole:  # it updates a matrix in pieces
        elements = min(elements, PIECE_ELEMENTS)
    stored = OPTIMIZERS[plan.optimizer].stored_dtypes(plan.dtype, plan.os_place)
    joined = torch.float32.itemsize if REST in stored else 0
    return (PIECE_BUFFERS * plan.optimizer_bytes_per_param + joined) * elements


def memory_of_states(plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes of model states and their buffers by term, on the GPU and on the host."""
    memory = state_bytes(plan) | weight_buffer_bytes(plan)
    if plan.products == "fp8":  # a cast of W and one of W^T, with 1 byte per element each
        layers = plan.stage_layers if plan.keeps_casts else 1
        memory["float8 casts"] = 2 * layers * sum(map(math.prod, plan.float8_matrices))
    host = {}
    if plan.os_place == "host":
        bytes_per_param = memory.pop("optimizer") / max(1, plan.trained_params)
        on_gpu, on_host = plan.params_by_place(plan.resident_states)
        host["optimizer"] = bytes_per_param * on_host
        memory["streamed states"] = streaming_buffer_bytes(plan)
        if plan.resident_states:
            memory["resident states"] = bytes_per_param * on_gpu
    return memory, host


def with_bytes(plan: Plan) -> Plan:
    """Return the plan with its fields `memory` and `host` counted."""
    layer, activations = skeletal_bytes(plan), plan.activations
    memory, host = memory_of_states(plan)

    if activations:
        memory["activations"] = plan.passes_in_flight * activation_gpu_bytes(activations, layer)
        host["activations"] = plan.passes_in_flight * activation_host_bytes(activations, layer)
    else:
        memory["activations"] = plan.passes_in_flight * plan.reached_layers * sum(layer)

    # one message sent and one received, in forward and in backward
    memory["messages"] = 4 * message_bytes(plan)
    memory["working"] = working_bytes(plan)
    return replace(plan, memory=memory, host=host)


def message_bytes(plan):
    """Return the bytes that a pipeline stage sends to the next one per micro-batch."""
    if plan.pp == 1:
        return 0
    return plan.tokens_between_products * plan.model.dim * plan.dtype.itemsize


# ---------------------------------------------------------------------------- seconds of operations


def nearest_kernel(profile: Profile, kernel: str = "auto") -> str:
    """Return the kernel whose rates predict the seconds of an attention kernel.

    That is the kernel itself if the profile has its rates, and otherwise the nearest one in the
    order of KERNELS, which has the best kernel first. "auto" means the best kernel that the profile
    has. In train.py it means the best kernel that can run. Raises ValueError if the profile has no
    kernel of KERNELS.

    Example: a profile has fa4 and cudnn. Then flash, which comes after both, has cudnn's rates.
    """
    order = [*KERNELS]
    known = [name for name in order if name in profile.attention]
    if not known:
        raise ValueError(
            f"profile {profile.name} has rates of the attention kernels "
            f"{', '.join(profile.attention)}, and of none of {', '.join(order)}"
        )
    if kernel == "auto":
        return known[0]
    position = order.index(kernel)
    return min(known, key=lambda name: abs(order.index(name) - position))


class Estimator:
    """Predict the seconds of single operations from a hardware profile.

    kernel: the attention kernel. processor: the name of the host's processor, which launches
    kernels. If the profile does not have them, the nearest ones are used (nearest_kernel,
    hardware.launch_host).
    """

    def __init__(self, profile: Profile, kernel: str = "auto", processor: str = ""):
        self.profile = profile
        self.attention = profile.attention[nearest_kernel(profile, kernel)]
        self.launch = profile.launch[launch_host(profile, processor)]
        self.outside_profile = set()  # operations that the profile has no points for, in words
        self.product_seconds = functools.cache(self.product_seconds)
        self.collective_seconds = functools.cache(self.collective_seconds)

    def product_seconds(self, kinds, tokens, rows, cols):
        """Return the seconds of products between (tokens, cols) and a matrix (rows, cols).

        kinds: some of hardware.PRODUCTS or FLOAT8_PRODUCTS. The profile has rates of square
        matrices only, so we take the rate of a square matrix with as many elements.
        """
        for kind in kinds:
            if kind not in self.profile.products:
                self.outside_profile.add("products in float8, predicted by the rates of bf16")
        kinds = [k if k in self.profile.products else k.removeprefix("fp8_") for k in kinds]
        flops = 2 * tokens * rows * cols
        width = math.sqrt(rows * cols)
        return sum(
            flops / interpolate_twice(self.profile.products[kind], tokens, width) for kind in kinds
        )

    def layer_launch(self, name, in_float8):
        """Return the seconds that the host takes to launch a layer's kernels. name: forward or
        backward. in_float8: whether the layer has products in float8."""
        if in_float8 and f"fp8 {name}" in self.launch:
            return self.launch[f"fp8 {name}"]
        if in_float8:
            self.outside_profile.add("launches of a layer in float8, predicted by those of bf16")
        return self.launch[name]

    def attention_rate(self, name, seq):
        """Return FLOP/s of the attention kernel on a causal sequence. name: forward or backward."""
        points = self.attention[name]
        shortest, longest = points[0][0], points[-1][0]
        if seq < shortest or seq > longest:
            self.outside_profile.add(f"attention on {seq:,.0f} tokens")
        return interpolate(points, seq)

    def elementwise_seconds(self, nbytes):
        """Return the seconds of element-wise kernels that read and write `nbytes`."""
        return nbytes / self.profile.memory

    def collective_seconds(self, op, size, mesh):
        """Return the seconds of a collective: t = bytes / bandwidth(op, bytes, mesh) (AMSP,
        section IV). size: bytes of the whole tensor that is gathered, reduced or broadcast. For an
        all-to-all, size is the bytes that one rank sends, including the part that it keeps.

        The profile has tables for some meshes only. For another mesh, three rules apply in turn:

            1. if the profile has both, use tables of one node for a mesh on one node, and tables of
               several nodes for a mesh on several nodes
            2. of these, use the tables with the nearest number of GPUs per node
            3. between their numbers of nodes, interpolate; beyond them, use the nearest table
        """
        if mesh == (1, 1) or not size:
            return 0.0
        per_node, nodes = mesh
        tables = self.profile.collectives[op]
        if f"{per_node}x{nodes}" not in tables:
            self.outside_profile.add(f"{op} over {per_node}x{nodes}")

        bandwidths = {}  # by distance: [nodes, bytes/s] of each table
        for name, points in tables.items():
            table_per_node, table_nodes = map(int, name.split("x"))
            other_network = (table_nodes > 1) != (nodes > 1)
            distance = other_network, abs(math.log(table_per_node / per_node))
            row = [table_nodes, interpolate(points, size)]
            bandwidths.setdefault(distance, []).append(row)

        nearest = bandwidths[min(bandwidths)]
        return size / interpolate(sorted(nearest), nodes)


def exposed_and_slowed(compute, communication, slowdowns):
    """Return the seconds of communication that computation does not hide, and the seconds by which
    computation gets longer.

    slowdowns: two factors, by which computation and communication get longer while both run, as in
    Galvatron. So hiding is not free.

    Example: 10 s of computation, 4 s of communication, slowdowns 1.1 and 1.5. While the
    communication runs, for 4 x 1.5 = 6 s, computation does what takes 6 / 1.1 = 5.45 s without it.
    So it gets longer by 0.55 s, and nothing is exposed.
    """
    slow_compute, slow_communication = slowdowns
    # the most communication that can be hidden, in the seconds that it takes by itself
    hideable = compute * slow_compute / slow_communication
    hidden = min(communication, hideable)
    both_run = hidden * slow_communication
    return communication - hidden, both_run * (1 - 1 / slow_compute)


# ---------------------------------------------------------------------------- seconds of a layer


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer for a micro-batch, without the communication of model states.

    If backward reaches only some layers, `backward`, `last_matrix` and the backward part of `named`
    are means over all layers. `recompute` is for a layer that backward reaches.
    """

    forward: float
    backward: float
    last_matrix: float  # the first part of backward, which ends with the gradients of `down`
    attention: float  # of forward: attention and its all-to-alls
    post: float  # of forward: from attention's output to the next layer's input
    recompute: float  # what backward adds if a layer recomputes S_others of all its tokens
    # of forward and backward together: attention, all-to-all, tensor exchanges, as step_seconds
    # names them
    named: dict[str, float] = field(hash=False)  # a dict has no hash


# The element-wise kernels of model.Block, as ops.py runs them. layer_tensors names the tensors: n1
# and n2 are the norms of x and h; o_out and a_down are the results of the matrices out and down.
#
# Residual sums (x + ...) are counted as if they were fused with the norm next to them. PyTorch runs
# each sum as a kernel of its own, which moves up to 5 C elements more per token. This time is not
# lost: measure.py chooses the rate `memory` such that this count gives the seconds of a measured
# layer. Counting the sums separately did not improve the predictions of measured steps.

PRE = [
    elementwise("norm", "x", "n1"),
    elementwise("cut into heads and rotate", "qkv", "q kv"),
]
QKV_BIAS = [elementwise("add the biases of q, k and v", "qkv", "qkv")]
QK_NORM = [
    elementwise("copy q and k, so that each is contiguous", "qk", "qk"),
    elementwise("norms of q and k", "qk", "qk"),
    elementwise("join q, k and v", "qkv", "qkv"),
]
PRE_CHUNKS = [elementwise("copy a chunk's heads to those of all tokens", "q kv", "q kv")]

POST = [
    elementwise("h = x + out, and its norm", "x o_out", "h n2"),
    elementwise("SwiGLU", "gate_up", "a"),
    elementwise("y = h + down", "h a_down", "y"),
]
POST_CHUNKS = [elementwise("copy a chunk's y to that of all tokens", "y", "y")]

BACKWARD_DOWN = [elementwise("recompute SwiGLU, and its gradient", "da gate_up", "a dgate_up")]
BACKWARD = [
    elementwise("recompute the norm, its gradient, and the sum with dy", "dn2 h dy", "n2 dh"),
    elementwise("rotate back", "dq dkv", "dqkv"),
]
QKV_BIAS_BACKWARD = [elementwise("gradient of the biases, a sum over tokens", "dqkv", "")]
QK_NORM_BACKWARD = [
    elementwise("recompute the norms of q and k, and their gradients", "dqk qk", "qk dqk"),
    elementwise("join the gradients of q, k and v", "dqkv", "dqkv"),
]
BACKWARD_WHOLE = [
    elementwise("recompute the norm, its gradient, and the sum with dh", "dn1 x dh", "n1 dx")
]
BACKWARD_CHUNKS = [
    elementwise("copy a chunk's do to that of all tokens", "do", "do"),
    elementwise("recompute the norm, and its gradient", "dn1 x", "n1 dx"),
    elementwise("sum with dh, into dx of all tokens", "dx dh", "dx"),
]


def layer_tensors(plan: Plan) -> dict[str, float]:
    """Return the bytes of a layer's tensors for all tokens, by their names in the tables above."""
    cfg, tokens = plan.local_model, plan.tokens
    q, kv = plan.q_kv_widths
    # in fsp, norms and residual sums run on the rank's own tokens. In msp, norms run on all tokens
    # and sums on the rank's own ones, but we count all tokens for both
    own = tokens
    if plan.tp_mode == "fsp":
        own = plan.tokens_between_products
    table = (
        ("x h y o_out a_down dx dh dy", own, cfg.dim),
        ("n1 n2 dn1 dn2", own, cfg.dim),
        ("q o do dq", tokens, q),
        ("kv dkv", tokens, kv),  # k and v
        ("qkv dqkv", tokens, q + kv),
        ("qk dqk", tokens, q + kv / 2),  # q and k
        ("a da", tokens, cfg.ffn),
        ("gate_up dgate_up", tokens, 2 * cfg.ffn),
    )
    return {
        name: rows * columns * plan.dtype.itemsize
        for names, rows, columns in table
        for name in names.split()
    }


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of a layer's element-wise kernels."""

    pre: float
    post: float
    backward_down: float  # of backward, before the gradient of the matrix down
    backward_rest: float


def kernel_seconds(est: Estimator, plan: Plan) -> KernelSeconds:
    """Return the seconds of the element-wise kernels in the tables above."""
    if plan.chunks > 1:
        pre = PRE + PRE_CHUNKS
        post = POST + POST_CHUNKS
        backward_rest = BACKWARD + BACKWARD_CHUNKS
    else:
        pre = PRE
        post = POST
        backward_rest = BACKWARD + BACKWARD_WHOLE
    if plan.model.qkv_bias:
        pre = pre + QKV_BIAS
        backward_rest = backward_rest + QKV_BIAS_BACKWARD
    if plan.model.qk_norm:
        pre = pre + QK_NORM
        backward_rest = backward_rest + QK_NORM_BACKWARD

    nbytes = layer_tensors(plan)
    return KernelSeconds(
        pre=est.elementwise_seconds(moved_bytes(pre, nbytes)),
        post=est.elementwise_seconds(moved_bytes(post, nbytes)),
        backward_down=est.elementwise_seconds(moved_bytes(BACKWARD_DOWN, nbytes)),
        backward_rest=est.elementwise_seconds(moved_bytes(backward_rest, nbytes)),
    )


def product_seconds(est: Estimator, plan: Plan, kind: str) -> list[float]:
    """Return the seconds of a layer's products of a kind, one number per matrix, in the order of
    use. kind: one of hardware.PRODUCTS."""
    seconds = []
    for matrix, in_float8 in zip(plan.matrices, plan.in_float8):
        kinds = (f"fp8_{kind}" if in_float8 else kind,)
        taken = plan.chunks * est.product_seconds(kinds, plan.tokens / plan.chunks, *matrix)
        if in_float8:
            taken += cast_seconds(est, plan, matrix, kind)
        seconds.append(taken)
    return seconds


def weight_grad_kind(plan: Plan) -> str:
    """Return which of hardware.PRODUCTS computes the gradients of a layer's weights.

    A gradient that is the sum of several products is accumulated in float32, unless grad_sums is
    "dtype" and the summands are whole gradients of micro-batches.
    """
    sums_chunks = plan.chunks > 1
    sums_micro_batches = plan.sums_wide and plan.factors.g == 1
    return "weight_grad_sum" if sums_chunks or sums_micro_batches else "weight_grad"


def layer_seconds(est: Estimator, plan: Plan) -> LayerSeconds:
    """Return the seconds of model.Block, whole or in token chunks."""
    # model.Block uses its first matrix (qkv) in block.pre and its last one (down) last. A fork's
    # other matrices, such as adapters of qkv, are counted as if block.post used them
    first, *later = product_seconds(est, plan, "forward")
    input_grads = product_seconds(est, plan, "input_grad")
    weight_grads = product_seconds(est, plan, weight_grad_kind(plan))
    backward = []  # of each matrix; a frozen one has no gradient of its own
    for of_input, of_weight, share in zip(input_grads, weight_grads, plan.trained_shares):
        backward.append(of_input + share * of_weight)
    *earlier, last = backward

    kernels = kernel_seconds(est, plan)
    tp_forward, tp_backward = tp_exchange_seconds(est, plan)
    kernel, exchange = attention_seconds(est, plan, backward=False)
    kernel_backward, exchange_backward = attention_seconds(est, plan, backward=True)

    pre = first + kernels.pre
    post = sum(later) + kernels.post + tp_forward
    last_matrix = last + kernels.backward_down
    rest = sum(earlier) + kernels.backward_rest
    # a mean over all layers, of which backward may reach only some
    reached = plan.backward_share

    # recomputing block.post does not run the last product, the exchange that follows it, or
    # SwiGLU, and does not need y. We count the kernels of SwiGLU and of y nevertheless (they are in
    # kernels.post), because this predicts measured steps better
    recomputed_post = sum(later[:-1]) + kernels.post + tp_forward / 2
    return LayerSeconds(
        forward=pre + kernel + exchange + post,
        backward=reached * (last_matrix + rest + kernel_backward + exchange_backward + tp_backward),
        last_matrix=reached * last_matrix,
        attention=kernel + exchange,
        post=post,
        recompute=pre + recomputed_post,
        named={
            "attention": kernel + reached * kernel_backward,
            # and a ring's exchanges
            "all-to-all": exchange + reached * exchange_backward,
            "tensor exchanges": tp_forward + reached * tp_backward,
        },
    )


# The kernels that fp8.py runs besides a product. (A norm or SwiGLU casts its own result, which
# costs nothing more.) Each kind of product has three lists of kernels:
#
#     1. they cast activations, in each micro-batch
#     2. they cast W in each micro-batch, or once per step if casts are kept (Plan.keeps_casts)
#     3. they run once per step in any case
#
# SwiGLU's backward finds the largest values of two tensors itself (fp8.KnownAmax): dy for the
# product gate_up, and a^T for the product down. Reading them again is counted here nevertheless. So
# a float8 layer is predicted to take slightly longer than it does, by 6 F bytes per token.

CASTS = {
    "forward": ([], [elementwise("cast rows of W", "w", "w8")], []),
    "input_grad": (
        [elementwise("largest values of dy", "dy", ""), elementwise("cast dy", "dy", "dy8")],
        [elementwise("cast W^T", "w", "w8")],
        [elementwise("largest values of W^T", "w", "")],
    ),
    "weight_grad": (
        [
            elementwise("dy^T, by the same kernel as dy", "", "dy8"),
            elementwise("largest values of a^T", "a", ""),
            elementwise("cast a^T", "a", "a8"),
        ],
        [],
        [],
    ),
}


def cast_seconds(est: Estimator, plan: Plan, matrix: tuple[int, int], kind: str) -> float:
    """Return the seconds per micro-batch that casts to float8 take, for the products of one kind of
    one matrix. kind: one of hardware.PRODUCTS."""
    rows, cols = matrix
    e = plan.dtype.itemsize
    nbytes = {
        "w": rows * cols * e,
        "w8": rows * cols,
        "dy": plan.tokens * rows * e,
        "dy8": plan.tokens * rows,
        "a": plan.tokens * cols * e,
        "a8": plan.tokens * cols,
    }
    of_tokens, of_weight, once = CASTS[kind.removesuffix("_sum")]
    uses = plan.micro_batches if plan.keeps_casts else 1  # micro-batches that use one cast of W
    moved = moved_bytes(of_tokens, nbytes)
    moved += moved_bytes(of_weight, nbytes) / uses
    moved += moved_bytes(once, nbytes) / plan.micro_batches
    return moved / (est.profile.casts or est.profile.memory)


def tp_exchange_seconds(est, plan):
    """Return the seconds in which tensor-parallel ranks exchange tokens, in a layer's forward and
    in its backward. All of them are exposed.

        mode   forward                      backward              saved x and h
        mtp    2 all-reduces (N, C)         the same              of N tokens
        msp    2 all-gathers and 2          the same              of N tokens
               reduce-scatters (N, C)
        fsp    as msp                       the same, and 2       of N/tp tokens
                                            more all-gathers
    """
    size = plan.tokens * plan.model.dim * plan.dtype.itemsize
    mesh = (plan.tp, 1)
    if plan.tp_mode == "mtp":
        reduces = 2 * est.collective_seconds("all_reduce", size, mesh)
        return reduces, reduces

    gathers = 2 * est.collective_seconds("all_gather", size, mesh)
    both = gathers + 2 * est.collective_seconds("reduce_scatter", size, mesh)
    if plan.tp_mode == "fsp":  # backward gathers norm(x) and norm(h) again
        return both, both + gathers
    return both, both


# The element-wise kernels of attention.Ring, besides the attention kernel. In the first step a rank
# attends to its own keys: the *square* of the attention matrix. Every later step is a *rectangle*.
# o_sum, dq_sum and dkv_sum are float32. Two things are simpler here than in attend_backward: the
# last sum of dk and dv is counted as one kernel, and setting their sums to 0 is left out.

RING = [
    elementwise("o of the square in float32", "o", "o_sum"),
    elementwise("o in its own dtype", "o_sum", "o"),
]
RING_STEP = [elementwise("merge_into", "o_sum o", "o_sum")]

RING_BACKWARD = [
    elementwise("dq = 0", "", "dq_sum"),
    elementwise("add dq of the square", "dq_sum dq", "dq_sum"),
    elementwise("dq in its own dtype", "dq_sum", "dq"),
    elementwise("add dk, dv of the square, in their own dtype", "dkv_sum dkv", "dkv"),
]
RING_BACKWARD_STEP = [
    elementwise("add dq of a rectangle", "dq_sum dq", "dq_sum"),
    elementwise("add dk, dv of a rectangle", "dkv_sum dkv", "dkv_sum"),
]

# A rectangle has all of a rank's queries and half of the keys, or half of the queries and all keys.
# Over all ranks and steps both kinds are equally frequent. So a step moves 3/4 of q, and 3/4 of k
# and v.
SHARE_OF_RECTANGLE = 0.75


def ring_bytes(plan, backward):
    """Return the bytes that a ring's element-wise kernels read and write in one pass."""
    tokens, e, wide = plan.tokens, plan.dtype.itemsize, plan.accum_bytes
    q, kv = plan.q_kv_widths
    nbytes = {
        "o": tokens * q * e,
        "dq": tokens * q * e,
        "dkv": tokens * kv * e,
        "o_sum": tokens * q * wide,
        "dq_sum": tokens * q * wide,
        "dkv_sum": tokens * kv * wide,
    }
    if backward:
        once, step = RING_BACKWARD, RING_BACKWARD_STEP
    else:
        once, step = RING, RING_STEP
    steps = (plan.ring - 1) * SHARE_OF_RECTANGLE
    return moved_bytes(once, nbytes) + steps * moved_bytes(step, nbytes)


def attention_seconds(est, plan, backward):
    """Return (kernel, communication), the seconds of attention in forward or in backward.

    kernel: seconds of the attention kernel and of the copies made for it. communication: seconds by
    which all-to-alls and the ring make attention longer.

    An all-to-all "to heads" gives a rank all tokens of some heads, and one "to tokens" goes back.
    While the kernel runs, it hides the all-to-alls of other head groups, and the ring's next step.
    The first group's all-to-all to heads and the last group's to tokens are exposed. There is one
    exception: if layers run in chunks, matrix products hide these two in backward
    (attention.Ulysses).
    """
    groups, e = plan.head_groups, plan.dtype.itemsize
    q, kv = plan.q_kv_widths
    if backward:
        name, flops_per_pair = "backward", 5  # five products of 2 FLOPs, over half of the keys
        to_heads = 3 * q + kv  # widths of q, k, v, o, do
        to_tokens = q + kv  # of dq, dk, dv
    else:
        name, flops_per_pair = "forward", 2  # two products of 2 FLOPs, over half of the keys
        to_heads = q + kv  # of q, k, v
        to_tokens = q  # of o

    # a ring's kernels see 1 / ring of the sequence, so they run at the rate of that length
    own_seq = plan.seq / plan.ring
    flops = flops_per_pair * q * plan.tokens * plan.seq
    kernel = flops / est.attention_rate(name, own_seq)
    if plan.ring > 1:
        kernel += est.elementwise_seconds(ring_bytes(plan, backward))
    if plan.head_ranks * groups > 1:  # copies to and from the order of heads: read and written
        kernel += est.elementwise_seconds(plan.tokens * 2 * (to_heads + to_tokens) * e)

    # the all-to-alls of one head group: to heads and to tokens
    exchange = sum(
        est.collective_seconds(
            "all_to_all", plan.tokens * width * e / groups, plan.mesh(plan.head_ranks)
        )
        for width in (to_heads, to_tokens)
    )
    exposed_exchange = exchange
    if backward and plan.in_chunks:
        # matrix products hide the all-to-alls of the first and of the last group, and the kernel
        # hides the others. To keep it simple, we let the kernel hide all of them
        exposed_exchange = 0.0

    # the exchanges of the ring
    kv_bytes = plan.ring * plan.tokens * kv * e / plan.kv_groups
    ring_mesh = plan.mesh(plan.sp, plan.head_ranks)
    ring_exchange = groups * est.collective_seconds("all_gather", kv_bytes, ring_mesh)
    if backward:  # dk and dv are passed on, too
        ring_exchange *= 1 + plan.ring_sum_bytes / e

    # a ring's exchanges run on the GPU's multiprocessors. All-to-alls use only its copy engines
    slowdowns = est.profile.overlap["collectives" if plan.ring > 1 else "all_to_all"]
    hideable = groups * exchange - exposed_exchange + ring_exchange
    exposed, slowed = exposed_and_slowed(kernel, hideable, slowdowns)
    return kernel, exposed_exchange + (exposed + slowed)


# The element-wise kernels of ops._HeadLoss and ops._Embedding. Logits and dhead_wide, the head's
# gradient as it is computed, are float32. A gradient that is added to the kept gradients of earlier
# micro-batches is counted as if it were written to a buffer.

LOSS = [
    elementwise("largest logit of a token", "logits", ""),
    elementwise("sum of exponentials", "logits", ""),
    elementwise("gradient", "logits", "dlogits"),
]
HEAD_GRAD = [elementwise("the head's gradient, times that of the loss", "dhead_wide", "dhead")]
EMBEDDING_GRAD = [
    elementwise("the embedding's gradient = 0", "", "dembed"),
    elementwise("the embedding's gradient, to its buffer", "dembed", "dembed"),
]
TIED_GRADS = [  # dtied, the sum of both, is float32
    elementwise("the head's gradient, times that of the loss", "dhead_wide", "dtied"),
    elementwise("the embedding's gradient = 0", "", "dembed"),
    elementwise("add the embedding's gradient", "dembed dtied", "dtied"),
]


def head_seconds(est, plan):
    """Return the seconds of a micro-batch's head and loss, forward and backward, and of the
    embedding's gradient."""
    own = plan.tokens_between_products
    vocab, dim = plan.vocab_matrix
    e, wide = plan.dtype.itemsize, plan.accum_bytes
    logits, matrix = own * vocab, vocab * dim
    nbytes = {
        "logits": logits * wide,
        "dlogits": logits * e,
        "dhead_wide": matrix * wide,
        "dhead": matrix * e,
        "dembed": matrix * e,
        "dtied": matrix * wide,
    }
    chunk, group = (min(size, own) for size in loss_chunks(vocab))
    of_group = ("input_grad",)
    kernels = list(LOSS)
    if plan.counts.trains_head:
        of_group += ("weight_grad_sum",)
    if plan.sums_vocab_grads:
        kernels += TIED_GRADS
    else:
        kernels += HEAD_GRAD if plan.counts.trains_head else []
        kernels += EMBEDDING_GRAD if plan.counts.trains_embedding else []
    products = own / chunk * est.product_seconds(("forward",), chunk, vocab, dim)
    products += own / group * est.product_seconds(of_group, group, vocab, dim)
    return products + est.elementwise_seconds(moved_bytes(kernels, nbytes))


# ---------------------------------------------------------------------------- seconds of states


class UnitSeconds(NamedTuple):
    """Seconds of communication for some matrices, while nothing else runs. There is one field per
    stream of Plan.collectives, and one more for grad_scatter in earlier micro-batches."""

    param_gather: float  # in each pass, forward or backward
    grad_scatter: float  # in the last micro-batch
    grad_reduce: float  # in the last micro-batch
    param_broadcast: float  # once per step
    early_grad_scatter: float  # in each earlier micro-batch


def unit_seconds(est, plan, matrices, trained_shares):
    """Return the UnitSeconds of some matrices as an array. trained_shares: of each matrix, the
    share of its copies in the model that train. Frozen ones are only gathered."""
    seconds = np.zeros(5)
    for row in plan.collectives:
        mesh, size = plan.mesh(row.ranks, row.inner), plan.dtype.itemsize / row.inner
        taken = 0.0
        for matrix, trained_share in zip(matrices, trained_shares):
            share = 1.0 if row.stream == "param_gather" else trained_share
            if share:
                taken += share * est.collective_seconds(row.op, size * math.prod(matrix), mesh)
        if row.in_last:
            seconds[UnitSeconds._fields.index(row.stream)] += taken
        if row.in_earlier and row.stream == "grad_scatter":
            seconds[UnitSeconds._fields.index("early_grad_scatter")] += taken
    return seconds


def update_bytes(
    dtype: torch.dtype,
    optimizer: Optimizer = ADAMW,
    place: str = "gpu",
    grad_bytes: int | None = None,
) -> int:
    """Return the bytes per parameter that an update reads and writes in GPU memory.

    place: where the states are stored, "gpu" or "host". grad_bytes: of an element of the gradient;
    None: as many as of a weight.

    AdamW reads a gradient, the master weight and two moments. It writes a weight, the master weight
    and two moments. If the host stores only the rest of the master weight, join_master and
    split_master move 16 bytes more: each of them reads 4 and writes 4.
    """
    if grad_bytes is None:
        grad_bytes = dtype.itemsize
    moved = grad_bytes + dtype.itemsize + 2 * optimizer.bytes_per_parameter(dtype)
    if REST in optimizer.stored_dtypes(dtype, place):
        moved += 16
    return moved


def streaming_seconds(est: Estimator, plan: Plan) -> float:
    """Return the seconds of streaming optimizer states from the host to the GPU and back, per layer
    and micro-batch.

    This is a mean over a whole step. In fact all states stream at the beginning of the step, during
    the first forward (traffic_seconds).
    """
    if plan.os_place != "host":
        return 0.0
    _, host = memory_of_states(plan)
    layers = plan.stage_layers * plan.micro_batches
    return host["optimizer"] / est.profile.state_streaming / layers


def link_busy_seconds(est: Estimator, plan: Plan) -> float:
    """Return the seconds of a layer's forward in which optimizer states occupy the link to the
    host, so that copies of activations wait. A mean, as streaming_seconds is.

    It is 0 if the states stream while nothing else runs, without host_update in --overlap.
    """
    return streaming_seconds(est, plan) if "host_update" in plan.overlap else 0.0


def exposed_seconds(est, plan, compute, traffic, last_matrix=math.inf):
    """Yield, by name, the seconds by which communication makes a pass longer.

    compute: seconds of the pass. traffic: seconds of communication by stream. last_matrix: for a
    backward pass, LayerSeconds.last_matrix of all its layers together.

    Streams that are not in plan.overlap are exposed in full. The other streams use two networks at
    the same time, one inside nodes and one across nodes. Only the network that delays the pass
    more counts.
    """
    crosses_nodes = {
        row.stream for row in plan.collectives if row.ranks > plan.state_ranks_per_node
    }
    inside = across = 0.0
    for stream, seconds in traffic.items():
        if stream not in plan.overlap:
            yield stream, seconds
        elif stream in crosses_nodes:
            across += seconds
        else:
            inside += seconds

    # In backward, a layer that runs whole gathers only one matrix ahead, and a gather waits for the
    # reductions that were launched before it. So less computation hides this traffic. We count that
    # any computation hides one half of the gathers. But only the computation of each layer's last
    # matrix, which backward reaches first, hides the other half and the reductions
    slowdowns = est.profile.overlap["collectives"]
    slow_compute, slow_communication = slowdowns
    compute_inside = compute_across = compute  # the computation that hides each network's traffic
    gathers = traffic["param_gather"]
    if gathers and not plan.in_chunks:
        hides_half_of_gathers = gathers / 2 * slow_communication / slow_compute
        usable = min(compute, last_matrix + hides_half_of_gathers)
        if "param_gather" in crosses_nodes:
            compute_across = usable
        else:
            compute_inside = usable

    networks = {
        "communication across nodes": exposed_and_slowed(compute_across, across, slowdowns),
        "communication in a node": exposed_and_slowed(compute_inside, inside, slowdowns),
    }
    slower = max(networks, key=lambda name: sum(networks[name]))  # on a tie the first
    exposed, slowed = networks[slower]
    yield slower, exposed
    yield "slowed by communication", slowed


class CommunicationPass(NamedTuple):
    """Passes of a step that have the same communication of model states."""

    times: int  # how many such passes a step has
    compute: float  # seconds of one of them
    traffic: dict[str, float]  # seconds of communication by stream
    last_matrix: float = math.inf  # of backward: LayerSeconds.last_matrix of all layers together


def communication_passes(est, plan, forward, backward, last_backward, last_matrix):
    """Return the passes of a step, and the communication that overlaps with each.

    forward, backward, last_backward: seconds of a pass through all layers of a stage.

        outside of all passes    gathers, reductions and broadcasts of one vocabulary matrix and of
                                 one layer. No pass hides them: they are exposed
        first forward            gathers, and broadcasts of updated parameters
        other forwards           gathers
        backwards but the last   gathers, and reduce-scatters of gradients
        last backward            the same, and sums of gradients over replicas
    """
    layers, count = plan.stage_layers, plan.micro_batches
    per_layer = unit_seconds(est, plan, plan.matrices, plan.trained_shares)
    trained_vocab_share = plan.trained_vocab_matrices / plan.num_vocab_matrices
    per_vocab_matrix = unit_seconds(est, plan, [plan.vocab_matrix], [trained_vocab_share])
    outside = UnitSeconds(*(per_layer + per_vocab_matrix))
    within = UnitSeconds(
        *((layers - 1) * per_layer + (plan.num_vocab_matrices - 1) * per_vocab_matrix)
    )

    outside_passes = {
        "param_gather": outside.param_gather,
        "grad_scatter": outside.grad_scatter,
        "grad_reduce": outside.grad_reduce,
        "param_broadcast": outside.param_broadcast,
    }
    first_forward = {
        "param_gather": within.param_gather,
        "param_broadcast": within.param_broadcast,
    }
    # when another pass begins, the buffers already hold the weights of two layers and of the
    # vocabulary matrices (the docstring of shard.py), so it gathers only the other layers' weights
    gathers = {"param_gather": max(0, layers - 2) * UnitSeconds(*per_layer).param_gather}
    # after an earlier micro-batch comes another pass, so all of its gradients overlap
    early_scatters = gathers | {
        "grad_scatter": within.early_grad_scatter + outside.early_grad_scatter
    }
    last_reductions = gathers | {
        "grad_scatter": within.grad_scatter,
        "grad_reduce": within.grad_reduce,
    }
    return [
        CommunicationPass(1, 0.0, outside_passes),
        CommunicationPass(1, forward, first_forward),
        CommunicationPass(count - 1, forward, gathers),
        CommunicationPass(count - 1, backward, early_scatters, last_matrix),
        CommunicationPass(1, last_backward, last_reductions, last_matrix),
    ]


def traffic_seconds(est, plan, forward, backward, last_matrix):
    """Return the seconds by name that model states add to a step: exposed communication, and what
    the GPU does for gradients and the update.

    forward, backward: seconds of a micro-batch through all layers of a stage. last_matrix:
    LayerSeconds.last_matrix of all these layers together.
    """
    sums, casts, update = local_seconds(est, plan)
    passes = communication_passes(
        est, plan, forward, backward + sums, backward + sums + casts, last_matrix
    )

    # optimizer states stream under the first forward
    count = plan.micro_batches
    streaming = plan.stage_layers * count * streaming_seconds(est, plan)
    if "host_update" in plan.overlap:
        streaming = max(0.0, streaming - forward)
    total = Counter(
        {"gradient sums": count * sums + casts, "optimizer": update, "host_update": streaming}
    )
    for step_pass in passes:
        for name, seconds in exposed_seconds(
            est, plan, step_pass.compute, step_pass.traffic, step_pass.last_matrix
        ):
            total[name] += step_pass.times * seconds
    return total


# The work on gradients that a rank does without communication (shard.States). The tensors:
#
#     whole         a matrix's gradient before it is reduced
#     whole_wide    the same in float32
#     kept          the part that the rank keeps, 1/g
#     sent          a copy of `kept` in the dtype in which gradients travel
#     owned         the part with which the rank updates its parameters, 1/os
#     summed        the sum over replicas, as it arrives: of `owned` if it is scattered over the os
#                   ranks, else of `kept`
#     result        the same in the dtype in which it stays

SET_GRADIENTS = [elementwise("keep the first micro-batch's gradient", "sent", "kept")]
ADD_GRADIENTS = [elementwise("add a micro-batch's gradient to the kept one", "sent kept", "kept")]
CAST_SUM = [
    elementwise("a sum of contributions, in the dtype in which it travels", "whole_wide", "whole")
]
CAST_TO_SEND = [
    elementwise("a sum of micro-batches, in the dtype in which it travels", "kept", "sent")
]
COPY_RESULT = [elementwise("the sum over replicas, where it stays", "summed", "result")]
NORM = [elementwise("norm of owned gradients", "owned", "")]


def local_seconds(est, plan):
    """Return (sums, casts, update), the seconds of a GPU's own work on gradients and the update.

    sums      per micro-batch, on average: add its gradients to those that the GPU keeps. Those of
              the first one are only copied
    casts     per step: cast accumulated gradients to the dtype in which they travel, and copy their
              sum over replicas to where it stays
    update    per step: compute the norm of the gradients, and update the parameters
    """
    f, e = plan.factors, plan.dtype.itemsize
    params = plan.trained_params
    nbytes = {
        "whole": params * e,
        "whole_wide": params * plan.accum_bytes,
        "kept": params * plan.grad_bytes / f.g,
        "sent": params * e / f.g,
        "owned": params * plan.grad_bytes / f.os,
    }
    is_scattered = plan.os_layout == "intra" and f.g < f.os
    parts = f.os if is_scattered else f.g
    nbytes |= {"summed": params * e / parts, "result": params * plan.grad_bytes / parts}

    sums = casts = 0.0
    if f.g > 1:
        n = plan.micro_batches
        set_once, add = moved_bytes(SET_GRADIENTS, nbytes), moved_bytes(ADD_GRADIENTS, nbytes)
        sums = (set_once + (n - 1) * add) / n
        if plan.chunks > 1:
            sums += moved_bytes(CAST_SUM, nbytes)
        elif plan.sums_vocab_grads:  # only a tied matrix's gradient is a sum
            share = math.prod(plan.vocab_matrix) / params
            sums += share * moved_bytes(CAST_SUM, nbytes)
    sums_replicas = any(
        row.stream == "grad_reduce" and row.in_last and row.ranks > row.inner
        for row in plan.collectives
    )
    if sums_replicas:
        is_cast = plan.grad_bytes != e
        if is_cast:
            casts += moved_bytes(CAST_TO_SEND, nbytes)
        if is_cast or is_scattered:  # otherwise it is summed in place
            casts += moved_bytes(COPY_RESULT, nbytes)

    optimizer = OPTIMIZERS[plan.optimizer]
    bytes_per_param = update_bytes(plan.dtype, optimizer, plan.os_place, plan.grad_bytes)
    updated = imbalance(plan) * params * bytes_per_param / f.os
    update = updated / est.profile.optimizer + est.elementwise_seconds(moved_bytes(NORM, nbytes))
    return est.elementwise_seconds(sums), est.elementwise_seconds(casts), update


# ---------------------------------------------------------------------------- seconds of a step


def recomputation_seconds(plan: ActivationPlan, s: LayerSeconds) -> float:
    """Return the seconds in which a micro-batch's backward recomputes, over all layers of a virtual
    stage."""
    n, m = plan.layers, plan.stride
    saved_layers = (plan.kept_chunks + plan.swapped_chunks) / plan.chunks
    recomputed_inputs = n - ceil_div(n, m)
    dropped_outputs = plan.layers_recomputing_attention
    pre = s.forward - s.attention - s.post

    # to recompute o, a layer needs q, k and v, so block.pre runs once more than s.recompute counts.
    # The last layer of a group is an exception: its backward comes next, with the same q, k and v
    attention_inputs = dropped_outputs - dropped_outputs // m
    return (
        (n - saved_layers) * s.recompute
        + recomputed_inputs * s.post
        + attention_inputs * pre
        + dropped_outputs * s.attention
    )


def copy_waits(
    plan: ActivationPlan, layer: LayerBytes, s: LayerSeconds, bandwidth: float, busy: float
) -> float:
    """Return the seconds that a micro-batch's layers wait for copies to and from the host.

    bandwidth: bytes per second to the host, and from it. busy: seconds of a layer's forward in
    which optimizer states occupy the link to the host.

    Layer i begins when the copies of layer i - d are done (offload.py; d is plan.lag). Copies run
    one after the other, each after its layer. Take L consecutive layers. Their copies begin when
    the first of these layers has run, and must be done when the d-th layer after the last one of
    them begins. In between, L + d - 2 layers run. With d = 2 and L = 1, for example, only the next
    layer hides a layer's copies. The seconds that forward waits are estimated in two ways, and the
    larger result counts:

        in_a_row      For each L, take the copies of the L consecutive layers that swap most, less
                      the forward of L + d - 2 layers. The largest of these differences is the
                      result. If none is above 0, no layer waits.
        one_by_one    Take L = 1, and add up the waits of all layers. Example: d = 2, and a forward
                      takes 50 ms. The copies of every second layer take 80 ms, and the other layers
                      copy nothing. Then half of the layers wait for 30 ms each, although the mean
                      of all copies is 40 ms.

    In backward, the backward of one layer hides each prefetch. The backward of the resident layers
    hides the prefetches of the last two swapped layers.

    For forward, the result is exact if all layers swap equally much. Otherwise it is an estimate.
    If layers wait at several points of a pass, `in_a_row` counts only the longest of these waits.
    """
    x, attn, others = layer
    chunk = others / plan.chunks
    inputs, outputs = swapped_inputs_and_outputs(plan)
    swapped = np.maximum(1, plan.swapped_layers)
    forward = max(0.0, s.forward - busy)

    # for L = 1, 2, ..., the most bytes that L consecutive layers copy. Chunks are spread over the
    # layers as evenly as whole chunks allow. np.ceil is used because ceil_div is slow for arrays.
    # 1e-9 is subtracted because float arithmetic may give 2.0000001 for 2
    lengths = np.arange(1.0, np.max(swapped) + 1).reshape(-1, *[1] * np.ndim(swapped))
    most_bytes = (
        np.ceil(lengths / plan.stride - 1e-9) * x
        + np.minimum(lengths, outputs) * attn
        + np.ceil(lengths * (plan.swapped_chunks / swapped) - 1e-9) * chunk
    )
    exposed = most_bytes / bandwidth - (lengths + plan.lag - 2) * forward
    in_a_row = np.max(np.where(lengths <= swapped, exposed, 0.0), axis=0)

    # the copies of layers have two sizes. The larger ones have one more chunk, or (if m > 1) an x
    larger = x + outputs / swapped * attn + most_swapped_chunks(plan) * chunk
    smaller = larger - np.where(plan.stride > 1, x, chunk)
    uneven = plan.swapped_chunks % swapped
    num_larger = np.where(plan.stride > 1, inputs, np.where(uneven > 0, uneven, swapped))

    def one_by_one(hidden: float) -> float:
        """Return the sum, over layers, of the seconds by which a layer's copies exceed `hidden`."""
        of_larger = np.maximum(0.0, larger / bandwidth - hidden)
        of_smaller = np.maximum(0.0, smaller / bandwidth - hidden)
        return num_larger * of_larger + (swapped - num_larger) * of_smaller

    forward_waits = np.maximum(in_a_row, one_by_one((plan.lag - 1) * forward))
    forward_waits = np.maximum(0.0, forward_waits)
    share_that_may_wait = 1 - np.minimum(2, swapped) / swapped  # all but two swapped layers
    waits = forward_waits + share_that_may_wait * one_by_one(s.backward)
    return np.where(plan.swapped_layers > 0, waits, 0.0)


def launch_seconds(est: Estimator, plan: Plan) -> tuple[float, float]:
    """Return the seconds that the host takes to launch a layer's forward and its backward.

    The host launches a layer's kernels once per token chunk. If attention runs in head groups or
    exchanges heads, it also launches each group's all-to-alls and kernel. Example: 8 groups of
    3.7 ms each take 30 ms. Then 32 layers take about a second, however fast the GPU is. A CUDA
    graph is launched as a whole, which takes next to nothing.
    """
    if plan.memplan == "on" and plan.on_one_stream:
        return 0.0, 0.0
    several = plan.head_ranks * plan.head_groups > 1
    groups = plan.head_groups if several else 0
    forward, backward = (
        plan.chunks * est.layer_launch(name, any(plan.in_float8))
        + groups * est.launch[f"head group {name}"]
        for name in ("forward", "backward")
    )
    return forward, backward


def step_seconds(est: Estimator, plan: Plan, states: bool = True) -> dict[str, float]:
    """Return a step's seconds by what takes them. The sum of all is the step.

    states: whether to add the seconds of model states and of messages between pipeline stages. The
    search leaves them out of its lower bounds. A plan without an activation plan recomputes
    nothing.
    """
    layers, count = plan.stage_layers, plan.micro_batches
    s = layer_seconds(est, plan)
    recomputation = waits = 0.0  # per layer
    if plan.activations:
        recomputation = recomputation_seconds(plan.activations, s) / plan.virtual_stage_layers
        busy = link_busy_seconds(est, plan)
        host = est.profile.to_host
        waits = copy_waits(plan.activations, skeletal_bytes(plan), s, host, busy)
        waits = waits / plan.virtual_stage_layers

    # a pass takes at least as long as the host takes to launch its kernels
    launch_forward, launch_backward = launch_seconds(est, plan)
    forward = max(s.forward, launch_forward)
    backward = max(s.backward + recomputation, launch_backward)
    computed = s.forward + s.backward
    per_layer = s.named | {
        "rest of layers": computed - sum(s.named.values()),
        "recomputation": recomputation,
        "copies": waits,
        "launches": forward + backward - computed - recomputation,
    }
    seconds = {name: count * layers * value for name, value in per_layer.items()}
    seconds["head and loss"] = count * head_seconds(est, plan)

    # a stage is idle while a micro-batch runs through one virtual stage of every other stage
    other_layers = plan.model.layers - layers
    seconds["pipeline idle"] = (forward + backward) * other_layers / plan.pp_chunks

    if states:
        two_stages = (1, 2) if plan.ranks > plan.per_node else (2, 1)
        if plan.pp > 1:
            # a message takes as long as an all-gather of two GPUs, which each send one half
            message = est.collective_seconds("all_gather", 2 * message_bytes(plan), two_stages)
            seconds["stage messages"] = exposed_messages(plan) * message
        if plan.pp > 1 and plan.model.tied and plan.counts.trains_head:
            # at the end of a step, the owners in the first and in the last stage sum its gradients
            owned = math.prod(plan.vocab_matrix) / plan.parts_of_matrix
            seconds["tied gradients"] = est.collective_seconds(
                "all_reduce", plan.grad_bytes * owned, two_stages
            )
        seconds |= traffic_seconds(
            est, plan, layers * forward, layers * backward, layers * s.last_matrix
        )
    return seconds


def exposed_messages(plan):
    """Return how many messages between pipeline stages are exposed, over a step.

    S stages with one virtual stage each: a stage runs a backward as soon as its gradient arrives. A
    micro-batch takes S - 1 messages to the last stage and S - 1 back. S micro-batches are on their
    way at the same time, and they wait for these 2 (S - 1) messages together. So M micro-batches
    expose 2 (S - 1) M / S messages. The start and the end of a step expose 2 (S - 2) more, to and
    from the stages before the last one.

    Several virtual stages per stage: only the first micro-batch's messages are exposed. Later, a
    stage has other passes to run while a message travels.

    Without "pipeline" in --overlap, each message that a stage receives is exposed. A micro-batch
    brings two of them to a virtual stage, and only one to the model's first and last one.
    """
    stages, virtual_stages = plan.pp, plan.pp_chunks
    if virtual_stages > 1:
        exposed = 2 * (stages * virtual_stages - 1)
    else:
        exposed = 2 * (stages - 1) * plan.micro_batches / stages + 2 * (stages - 2)
    if "pipeline" in plan.overlap:
        return exposed
    received = 2 * virtual_stages - (stages == 2)  # with two stages, each is the first or the last
    return max(exposed, received * plan.micro_batches)


def predict(plan: Plan, profile: Profile, kernel: str = "auto", processor: str = "") -> Plan:
    """Return the plan with its bytes and its seconds counted.

    kernel: the attention kernel that runs. processor: the name of the host's processor. The plan's
    `activations` are taken as they are.
    """
    est = Estimator(profile, kernel, processor)
    return replace(with_bytes(plan), seconds=step_seconds(est, plan))
