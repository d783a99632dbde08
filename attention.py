"""Attention: its kernels, and sequences whose tokens lie on several GPUs.

Attention is the only operator of a layer that mixes tokens. So it is the only operator that
communicates when several ranks share a sequence. This file builds it in four steps:

    Kernel      attention on one GPU: a forward function, a backward function, a row of KERNELS
    Ulysses     ranks share the heads: an all-to-all before the kernel and one after it
    Ring        ranks share the context: keys and values go around a ring of ranks
    Attention   all of this together, as the model calls it

To add a kernel, write its two functions and its row (examples/alibi.py does).

Legend:  B sequences   T tokens per sequence   D head width   H query heads   K key/value heads
         sp = R * U    ranks that share a sequence: R ring ranks, each of U ranks that share heads.
                       (In shard.py R is the number of all ranks that share model states)
         G             groups of heads that a rank processes one after the other
         h             heads of one group on one rank (query heads, or key/value heads of k and v)
         o, lse        attention's output, and each query's log-sum-exp of scores
         dx            the gradient of the loss with respect to x, for example dq, dk, dv and do

Sharing heads (InternEvo's ISP; DeepSpeed-Ulysses, arXiv 2309.14509). A rank holds T/sp tokens of
all heads, but the kernel needs all tokens of a head. So an all-to-all among U neighbouring ranks
trades tokens for heads, the kernel runs, and a second all-to-all brings o back. With U = 2, T = 4
and 4 heads:

                    rank 0        rank 1                     rank 0        rank 1
    tokens 0, 1     all heads     .            all-to-all    heads 0, 1    heads 2, 3
    tokens 2, 3     .             all heads    --------->    heads 0, 1    heads 2, 3

Sharing context (Ring Attention, arXiv 2310.01889). Each ring rank keeps its queries, and receives
the keys and values of the other ring ranks one after the other. The kernel runs on each block j of
keys, and returns o_j and lse_j. These results are merged:

    o = sum_j exp(lse_j - lse) o_j,    lse = log sum_j exp(lse_j)

The sequence is cut into 2R parts. Ring rank r has an early one, number r, and a late one, number
2R - 1 - r. So all ranks have the same work. In step 0 its queries attend to its own keys, with a
causal mask (the *square*). In step s > 0 they attend to the keys of ring rank r - s (modulo R),
without a mask (a *rectangle*): if s <= r, all queries attend to that rank's early part; if s > r,
only this rank's late queries attend, to both parts of that rank. `Ring` has a table for R = 4.

LoongTrain (arXiv 2406.18485) combines both: heads inside a node, context across nodes.

Overlap. A rank processes its heads in G groups, so that the all-to-alls of one group run while the
kernel of another group computes. Forward with G = 3, where "heads 0" is group 0's all-to-all before
the kernel, and "tokens 0" the one after it:

    exchange   | heads 0 | heads 1  | tokens 0, heads 2 | tokens 1 | tokens 2 |
    compute              | kernel 0 | kernel 1          | kernel 2 |

    transfer                launched in     hidden under                 waited for before
    q, k, v to heads        to_heads        kernel g - 1; the first      kernel g
                                            group's is exposed
    o to tokens             to_tokens       kernel g + 1; the last       the next to_tokens, and
                                            group's is exposed           the return
    ring: k, v of step s    send_kv, shift  step s - 1 of the ring       step s

Backward first needs do, which the backward of block.post computes ("post" below). The backward of
block.post leaves some gradients of weights for later ("weight grads"), because their computation
can hide transfers:

    exchange   | q,k,v,o 0 | do 0         | heads 1  | tokens 0, heads 2 | tokens 1 | tokens 2    |
    compute    | post      | weight grads | kernel 0 | kernel 1          | kernel 2 | weight grad |

    transfer                launched in     hidden under                 waited for before
    q, k, v, o to heads     to_heads        kernel g - 1; the first      kernel g
                                            group's: post's backward
    do to heads             to_heads        kernel g - 1; the first      kernel g
                                            group's: weight gradients
    dq, dk, dv to tokens    to_tokens       kernel g + 1; the last       the next to_tokens, and
                                            group's: a weight gradient   the return
    ring: first k, v        send_kv         the same as q, k, v, o       the ring's first step
    ring: k, v of step s    shift           step s - 1 of the ring       step s
    ring: sums of dk, dv    shift           step s + 1 of the ring       step s + 1 adds its dk, dv
          after step s

If a layer does not run in chunks of tokens, autograd runs its backward. Then do is complete before
attention's backward begins, and no gradients of weights are left for it. So the first group's
transfers to heads and the last group's transfer to tokens are exposed in backward, too.

Left out: dropout, and two nested rings (Ulysses is used inside a node).
"""

import copy
import functools
import importlib
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from model import divisors
from ops import accumulation_dtype, compiled, copy_heads
from ranks import Groups
from streams import CommStream, Transfer, wait

# ---------------------------------------------------------------------------- masks


class Rectangle(NamedTuple):
    """Queries and keys of one sequence in a step of a ring. Each of these queries attends to each
    of these keys, so the kernel needs no mask."""

    queries: slice  # of the tokens that this ring rank holds; empty if there is nothing to compute
    keys: slice  # of the tokens of the ring rank whose keys have arrived

    def pairs(self) -> int:
        """Return the number of query-key pairs."""
        num_queries = self.queries.stop - self.queries.start
        num_keys = self.keys.stop - self.keys.start
        return num_queries * num_keys


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end among the tokens that one ring rank holds of a micro-batch.

    The rank holds T/R tokens of each of the B sequences (R = 1: there is no ring, and it holds all
    tokens). They stand in one row of N = B*T/R tokens, sequence after sequence. Example: with N = 9
    and bounds (0, 4, 9), tokens 0-3 are one document, and tokens 4-8 are another one.
    """

    bounds: tuple[int, ...]  # each document's first token on this rank, and N at the end
    offsets: Tensor  # the same numbers as int32 on the device, as kernels want them
    # for each step of a ring after the first: one Rectangle per sequence (ring_documents)
    rectangles: tuple[tuple[Rectangle, ...], ...] = ()

    @functools.cached_property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return max(end - begin for begin, end in itertools.pairwise(self.bounds))

    def slices(self) -> list[slice]:
        """Return one slice of tokens per document."""
        return [slice(begin, end) for begin, end in itertools.pairwise(self.bounds)]

    def pairs(self) -> int:
        """Return how many query-key pairs attention computes on this ring rank. Attention takes 4 D
        FLOPs per pair and head in forward, and 10 D in backward."""
        lengths = [end - begin for begin, end in itertools.pairwise(self.bounds)]
        in_squares = sum(n * (n + 1) // 2 for n in lengths)
        in_rectangles = sum(r.pairs() for step in self.rectangles for r in step)
        return in_squares + in_rectangles


@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to: all earlier tokens, or only the earlier tokens of the same
    document. It also tells a kernel which heads and which layer it computes.

    A ring also calls kernels on the keys of another rank. Then every query attends to every key (a
    *rectangle*), `causal` is False, and all other fields are None.
    """

    causal: bool = True  # False: a rectangle, whose numbers of queries and keys may differ
    # None: a query attends to all earlier tokens of its sequence. Otherwise the kernel's tensors
    # have no dimension B: the sequences stand in one row of B*T tokens (B*T/R on a ring rank)
    documents: Documents | None = None
    heads: range | None = None  # which query heads of the model these are
    layer: int | None = None  # which layer of the model this is


CAUSAL = Mask()
EVERYTHING = Mask(causal=False)

# ---------------------------------------------------------------------------- attention kernels
# Tensors are (B, T, heads, D) here. Some of aten's operators want (B, heads, T, D): they get
# transposed views, which cost nothing.

_aten = torch.ops.aten
_import = importlib.import_module  # only a dictionary look-up after the first call


def _transpose_heads(*tensors):
    """Return views (B, heads, T, D) of tensors (B, T, heads, D), or the other way round."""
    return [t.transpose(1, 2) for t in tensors]


def _document_lengths(mask: Mask) -> dict:
    """Return where documents begin, as keyword arguments of FlashAttention's functions. Without
    documents there are none."""
    if mask.documents is None:
        return {}
    offsets, longest = mask.documents.offsets, mask.documents.longest
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _fa4_forward(q, k, v, mask):
    # FlashAttention-4's compiler warns of this once per kernel
    warnings.filterwarnings("ignore", "Argument aux_data")
    o, lse, *_ = _import("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, causal=mask.causal, return_lse=True, **_document_lengths(mask)
    )
    return o, lse


def _fa4_backward(do, q, k, v, o, lse, mask):
    grads = _import("flash_attn.cute.interface")._flash_attn_bwd(
        q,
        k,
        v,
        o,
        do,
        lse,
        causal=mask.causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_document_lengths(mask),
    )
    return grads[:3]


def _cudnn_forward(q, k, v, mask):
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_transpose_heads(q, k, v),
        None,  # attn_bias
        True,  # compute_log_sumexp
        0.0,  # dropout_p
        mask.causal,
    )
    return o.transpose(1, 2), lse.view(q.shape[0], q.shape[2], q.shape[1])  # lse (B, H, T)


def _cudnn_backward(do, q, k, v, o, lse, mask):
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    do, q, k, v, o = _transpose_heads(do, q, k, v, o)
    return _transpose_heads(
        *_aten._scaled_dot_product_cudnn_attention_backward(
            do,
            q,
            k,
            v,
            o,
            lse.unsqueeze(-1),  # (B, H, T, 1)
            no_seed,  # philox_seed and philox_offset: random numbers for dropout, which is off
            no_seed,
            None,  # attn_bias
            None,  # cum_seq_q and cum_seq_k: offsets of documents
            None,
            q.shape[2],  # max_q and max_k: numbers of queries and keys
            k.shape[2],
            0.0,  # dropout_p
            mask.causal,
        )
    )


def _flash_lengths(q, k, mask: Mask) -> tuple:
    """Return cum_seq_q, cum_seq_k, max_q and max_k, as torch's flash functions want them."""
    if mask.documents is None:
        return None, None, q.shape[1], k.shape[1]
    return tuple(_document_lengths(mask).values())


def _flash_forward(q, k, v, mask):
    o, lse, *_ = _aten._flash_attention_forward(
        q,
        k,
        v,
        *_flash_lengths(q, k, mask),
        0.0,  # dropout_p
        mask.causal,
        False,  # return_debug_mask
    )
    return o, lse


def _flash_backward(do, q, k, v, o, lse, mask):
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _aten._flash_attention_backward(
        do,
        q,
        k,
        v,
        o,
        lse,
        *_flash_lengths(q, k, mask),
        0.0,  # dropout_p
        mask.causal,
        no_seed,  # rng_state, for dropout
        no_seed,  # not used
    )


def _cpu_forward(q, k, v, mask):
    if mask.documents is not None:  # one call per document, each as a batch of one sequence
        outputs = []
        log_sums = []
        for tokens in mask.documents.slices():
            o, lse = _cpu_forward(q[None, tokens], k[None, tokens], v[None, tokens], CAUSAL)
            outputs.append(o)
            log_sums.append(lse)
        return torch.cat(outputs, 1)[0], torch.cat(log_sums, 2)[0]

    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_transpose_heads(q, k, v),
        0.0,  # dropout_p
        mask.causal,
    )
    return o.transpose(1, 2), lse


def _cpu_backward(do, q, k, v, o, lse, mask):
    if mask.documents is not None:  # as in _cpu_forward
        grads = []
        for tokens in mask.documents.slices():
            inputs = [t[None, tokens] for t in (do, q, k, v, o)]
            grads.append(_cpu_backward(*inputs, lse[None, :, tokens], CAUSAL))
        return [torch.cat(parts, 1)[0] for parts in zip(*grads)]  # dq, dk, dv

    do, q, k, v, o = _transpose_heads(do, q, k, v, o)
    return _transpose_heads(
        *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do,
            q,
            k,
            v,
            o,
            lse,
            0.0,  # dropout_p
            mask.causal,
        )
    )


@dataclass(frozen=True)
class Kernel:
    """An attention kernel: two functions on q, k, v, o (B, T, heads, D). Scores are scaled by
    1/sqrt(D).

        forward(q, k, v, mask) -> o, lse    lse (B, H, T): log of each query's sum of exp(score),
                                            natural logarithm, float32 (float64 for q in float64)
        backward(do, q, k, v, o, lse, mask) -> dq, dk, dv

    With documents, tensors are (B*T, heads, D) and lse is (H, B*T), as in FlashAttention. If the
    hardware profile has no rates for a kernel, the planner takes those of the nearest row of
    KERNELS that it has (costs.nearest_kernel).
    """

    forward: Callable
    backward: Callable
    # major compute capabilities of the GPUs that it runs on; empty: it runs only on a CPU
    capability: tuple[int, ...]
    module: str = ""  # the Python module that must be importable
    package: str = ""  # what to pip install for it
    documents: bool = False  # True: it obeys Mask.documents
    # True: a score depends on its q and k only, not on the head or the positions. Then the kernel
    # may run on a part of a sequence (a ring), and Hugging Face's model computes the same (export)
    plain: bool = False


KERNELS = {  # best first: "auto" takes the first one that can run
    "fa4": Kernel(
        _fa4_forward,
        _fa4_backward,
        (9, 10),
        "flash_attn.cute.interface",
        "flash-attn-4[cu13]",
        documents=True,
        plain=True,
    ),
    # no documents: cuDNN would compile one graph for each length that a document has, and it does
    # not support documents of one token
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, (9, 10), plain=True),
    "flash": Kernel(
        _flash_forward, _flash_backward, (8, 9, 10, 11, 12), documents=True, plain=True
    ),
    "cpu": Kernel(_cpu_forward, _cpu_backward, (), documents=True, plain=True),
}


def why_not(
    name: str, device: torch.device, dtype: torch.dtype, documents: bool = False
) -> str | None:
    """Return the reason why a kernel cannot run here, or None if it can.

    documents: whether the kernel must obey Mask.documents.
    """
    kernel = KERNELS.get(name)
    if kernel is None:
        return "there is no such kernel"
    if documents and not kernel.documents:
        return f"{name} takes no documents (--document-token)"
    if device.type != "cuda":
        return f"{name} needs a GPU, but the device is {device.type}" if kernel.capability else None
    if (major := torch.cuda.get_device_capability(device)[0]) not in kernel.capability:
        return f"{name} does not run on CUDA capability {major}.x"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{name} needs bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if kernel.module:
        try:
            importlib.import_module(kernel.module)
        except Exception as e:  # a broken install raises more than ImportError
            return f"`pip install '{kernel.package}'` is missing or broken: {type(e).__name__}: {e}"
    return None


def pick_kernel(
    name: str, device: torch.device, dtype: torch.dtype, documents: bool = False
) -> str:
    """Return the name of a kernel that can run here; "auto" becomes the best one that can.

    Raises ValueError, with the reasons, if the kernel cannot run.
    """
    names = list(KERNELS) if name == "auto" else [name]
    reasons = [why_not(k, device, dtype, documents) for k in names]
    if None in reasons:
        return names[reasons.index(None)]
    usable = [k for k in KERNELS if why_not(k, device, dtype, documents) is None]
    raise ValueError(
        f"--attention {name}: {'; '.join(reasons)}. Usable here: {', '.join(usable) or 'none'}"
    )


# ---------------------------------------------------------------------------- by heads

MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits, so no call may get a larger tensor


def head_group_counts(heads: int, kv_heads: int, elements: int) -> list[int]:
    """Return the numbers of groups G into which a rank can divide its heads.

    Each group has whole key/value heads with all of their query heads, or some of the query heads
    of one key/value head. A group's q and k have at most MAX_ELEMENTS elements.

    heads, kv_heads: H/U and K/U, the heads that a rank computes. elements: the number of elements
    of the rank's q, or of its k if that is larger.

    Example: 8 query heads and 2 key/value heads can make 1, 2, 4 or 8 groups. With 2 groups, each
    group has a key/value head. With 4 groups, groups 0 and 1 share the first key/value head, and
    groups 2 and 3 share the second one.
    """
    return [
        n
        for n in divisors(heads)
        if (kv_heads % n == 0 or n % kv_heads == 0) and elements // n <= MAX_ELEMENTS
    ]


def gpus_reach_each_other() -> bool:
    """Return whether this GPU can read and write the memory of all other GPUs of its node."""
    here = torch.cuda.current_device()
    return all(
        torch.cuda.can_device_access_peer(here, i)
        for i in range(torch.cuda.device_count())
        if i != here
    )


class Exchange:
    """All-to-alls among the ranks of a group. They run on the current stream.

    With `peer_access`, every rank can write to the memory of the others (GPUs of one node). Then
    the GPU's copy engines write each part to its destination. The only kernels are a barrier before
    the copies and one after them, of one warp each. So attention, which runs at the same time, has
    nearly all multiprocessors. Without `peer_access`, the group's own all-to-all runs. On GPUs that
    is NCCL's, which takes some multiprocessors away from attention.
    """

    instances: ClassVar[weakref.WeakSet] = weakref.WeakSet()  # all objects of this class

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        peer_access: bool = False,
        timeout_ms: int = 600_000,
        stream: CommStream | None = None,
    ):
        self.group = group  # None: a single rank, which has nothing to exchange
        self.peer_access = peer_access
        self.rank = group.rank() if group else 0
        self.ranks = group.size() if group else 1  # U
        self.stream = stream  # callers launch all_to_all on it
        self.timeout_ms = timeout_ms  # of a barrier
        self.memory = torch.empty(0)  # other ranks write here; not from PyTorch's allocator
        self.handle = None  # gives access to the other ranks' memory; None before map_memory
        self.instances.add(self)

    @classmethod
    def mapped_bytes(cls) -> int:
        """Return the bytes of this rank that others can write to. PyTorch's allocator does not
        count them."""
        return sum(exchange.memory.nbytes for exchange in cls.instances)

    def allocate_buffers(self, shapes: list[tuple[int, ...]], like: Tensor) -> list[Tensor]:
        """Return tensors of these shapes to receive in. A collective if mapped memory has to grow.

        With peer access, all calls return views of the same memory. So an all-to-all into the
        buffers of one call overwrites the buffers of the call before, and must not start before
        those have been read. If compute reads them, the exchange's stream must first wait for
        compute.
        """
        if not self.peer_access:
            return [like.new_empty(shape) for shape in shapes]
        sizes = [math.prod(shape) for shape in shapes]
        if self.memory.numel() < sum(sizes):
            self.map_memory(sum(sizes), like)
        parts = self.memory[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def map_memory(self, elements: int, like: Tensor) -> None:
        """Allocate memory that all ranks of the group can write to. A collective."""
        torch.cuda.synchronize()  # this rank no longer uses the old memory, which is freed next
        dist.barrier(self.group)  # nor does any other rank
        self.memory = torch.empty(0)
        self.handle = None
        torch.cuda.empty_cache()
        self.memory = symm_mem.empty(elements, dtype=like.dtype, device=like.device)
        self.handle = symm_mem.rendezvous(self.memory, self.group)

    def all_to_all(self, sent: list[Tensor], received: list[Tensor]) -> None:
        """Send part i of each tensor (U, ...) to rank i, which receives it as part `self.rank`.

        received: one buffer per tensor, of the same shape, from `allocate_buffers`.
        """
        if self.handle is None:
            for send_buffer, recv_buffer in zip(sent, received):
                dist.all_to_all_single(recv_buffer, send_buffer, group=self.group)
            return

        self.handle.barrier(timeout_ms=self.timeout_ms)  # all ranks have read their old parts
        for i in range(self.ranks):
            peer = (self.rank + i) % self.ranks  # at each i, every rank writes to another peer
            for send_buffer, recv_buffer in zip(sent, received):
                mine = recv_buffer[self.rank]
                # the peer's buffers lie at the same offsets as this rank's
                theirs = self.handle.get_buffer(peer, mine.shape, mine.dtype, mine.storage_offset())
                theirs.copy_(send_buffer[peer])
        self.handle.barrier(timeout_ms=self.timeout_ms)  # all parts have arrived


def make_exchange(groups: Groups, ranks: int, stream: CommStream, per_node: int) -> Exchange:
    """Return the exchange among this rank and its neighbours that share heads. A collective of all
    ranks.

    ranks: U. per_node: how many ranks of a node can share a sequence (with tensor parallelism, only
    those with the same tp_rank); 0 if unknown.
    """
    group = groups.get("sequence", lambda r: r // ranks)
    one_node = per_node > 0 and per_node % ranks == 0
    peer_access = one_node and stream.stream is not None and gpus_reach_each_other()
    return Exchange(group, peer_access, round(1e3 * groups.timeout.total_seconds()), stream)


class Ulysses:
    """The heads of one call of attention in G groups, and their all-to-alls among U ranks.

        tokens (B, T/sp, heads, D)    <->    heads (B, U, T/sp, h, D): T/R tokens, in order

    The heads of a tensor are laid out as (U ranks, G groups, h heads). So rank u computes, in group
    g, the h query heads that begin with number (u G + g) h. With 8 heads, U = 2 and G = 2 (h = 2):

        query heads    0 1              2 3              4 5              6 7
                       rank 0 group 0   rank 0 group 1   rank 1 group 0   rank 1 group 1

    Each group has the key/value heads that its query heads use. If a rank has fewer key/value heads
    than groups, consecutive groups share one. Its k and v then travel with the first of these
    groups, and the sum of its dk and dv travels back with the last one. So no all-to-all sends a
    head twice. Each rank needs a key/value head of its own, so U divides K. If more than U ranks
    share a sequence, a ring has R = sp/U ranks.

    Memory: one group computes while the next one arrives. So if there are several groups, each
    input of the kernel (q, k, v, and in backward o and do) has two receive buffers, called slots,
    and group g uses slot g % 2. (Groups that share k and v use the same slot for these.) The
    results (o, or dq, dk and dv) have one buffer, because the exchange stream copies a group's
    results out of it before it receives the next ones. Every tensor that the exchange stream reads
    or writes is allocated on the compute stream, and is kept alive until compute has waited for the
    transfer. So PyTorch never gives its memory to another tensor too early.

    If U = 1, nothing travels, and the methods only cut tensors into groups.
    """

    def __init__(self, exchange: Exchange, num_groups: int, q: Tensor, k: Tensor, backward: bool):
        self.exchange = exchange
        self.ranks = exchange.ranks  # U
        self.num_groups = num_groups  # G
        if self.ranks == 1:
            return

        q_shape = self.heads_of_group(0, q).shape  # (U, B, T/sp, h, D)
        kv_shape = self.heads_of_group(0, k).shape
        kv_groups = num_groups // self.groups_per_head(k)  # groups that share k and v count once
        q_slots = (min(2, num_groups), *q_shape)
        kv_slots = (min(2, kv_groups), *kv_shape)

        slots = {"q": q_slots, "k": kv_slots, "v": kv_slots}
        results = [q_shape]  # o
        # with peer access forward allocates for backward, too: mapped memory then grows only once
        if backward or exchange.peer_access:
            slots |= {"o": q_slots, "do": q_slots}
            results = [q_shape, kv_shape, kv_shape]  # dq, dk, dv
        buffers = exchange.allocate_buffers([*slots.values(), *results], q)
        self.slots = dict(zip(slots, buffers))  # receive what travels to heads
        self.result_buffers = buffers[len(slots) :]  # receive what travels back to tokens

    def groups_per_head(self, x: Tensor) -> int:
        """Return how many consecutive groups use the same heads of x (B, T/sp, heads, D).

        It is 1 for query heads, and for key/value heads if there are enough of them.
        """
        return max(1, self.ranks * self.num_groups // x.shape[2])

    def heads_of_group(self, g: int, x: Tensor) -> Tensor:
        """Return group g's heads of x (B, T/sp, heads, D) as a view (U, B, T/sp, h, D), by rank."""
        b, t, _, d = x.shape
        groups_per_head = self.groups_per_head(x)
        x = x.view(b, t, self.ranks, self.num_groups // groups_per_head, -1, d)
        return x.select(3, g // groups_per_head).permute(2, 0, 1, 3, 4)

    def to_heads(self, g: int, tensors: dict[str, Tensor]) -> Transfer:
        """Launch the transfer of group g's heads from the ranks that hold their tokens to the ranks
        that compute them.

        tensors: (B, T/sp, heads, D), some of "q", "k", "v", "o" and "do". They arrive in the same
        order as views (B, U, T/sp, h, D).
        """
        if self.ranks * self.num_groups == 1:  # all heads: heads_of_group would only cost host time
            return Transfer([x.unsqueeze(1) for x in tensors.values()])
        parts = {name: self.heads_of_group(g, x) for name, x in tensors.items()}
        if self.ranks == 1:
            return Transfer([part.transpose(0, 1) for part in parts.values()])

        buffers = {}  # where group g's heads are, once they have arrived
        to_send = []  # names of the tensors to send; the others came with an earlier group
        for name, x in tensors.items():
            groups_per_head = self.groups_per_head(x)
            slot = (g // groups_per_head) % 2
            buffers[name] = self.slots[name][slot]
            if g % groups_per_head == 0:
                to_send.append(name)
        received = [buffers[name] for name in to_send]
        sent = [torch.empty_like(buffer) for buffer in received]

        stream = self.exchange.stream
        stream.done_reading(*received)  # kernel g - 2, or an earlier one, read these slots last
        # This waits for all work that compute has queued: that kernel, and the kernels that compute
        # `tensors`. Every rank waits so before it exchanges, so the slots are free on every rank
        with stream.after_compute():
            for name, buffer in zip(to_send, sent):
                copy_heads(parts[name], buffer)
            self.exchange.all_to_all(sent, received)
        # (U, B, T/sp, ...) -> (B, U, T/sp, ...), so that each sequence's tokens are in order. If
        # B = 1 the view is contiguous, and to_kernel_shape copies nothing
        arrived = [buffer.transpose(0, 1) for buffer in buffers.values()]
        return Transfer(arrived, stream.record_event(), sent)

    def new_outputs(self, *like: Tensor) -> list[Tensor]:
        """Return tensors like these, into which `to_tokens` writes the results of all groups.

        If there is only one group on one rank, its result is the output. Then nothing is allocated.
        """
        if self.ranks * self.num_groups == 1:
            return list(like)
        return [torch.empty_like(x) for x in like]

    def to_tokens(self, g: int, results: list[Tensor], outputs: list[Tensor]) -> Transfer:
        """Launch the transfer of group g's results back to the ranks that hold their tokens.

        results: [o], [dq, dk, dv] or only [dq], each (B, T/R, h, D), or with documents
        (B*T/R, h, D). They become group g's heads of outputs (B, T/sp, heads, D).
        """
        if self.ranks * self.num_groups == 1:
            return Transfer([x.reshape(output.shape) for x, output in zip(results, outputs)])
        b = len(outputs[0])
        parts = []  # (U, B, T/sp, h, D), as heads_of_group has them
        for x in results:
            h, d = x.shape[-2:]
            parts.append(x.reshape(b, self.ranks, -1, h, d).transpose(0, 1))
        if self.ranks == 1:
            for part, output in zip(parts, outputs):
                copy_heads(part, self.heads_of_group(g, output))
            return Transfer(outputs)

        stream = self.exchange.stream
        sent = [part.contiguous() for part in parts]
        received = self.result_buffers[: len(sent)]
        # This waits for the kernel and for the copies into `sent`. The result buffers are free:
        # this same stream has copied the previous group's results out of them
        with stream.after_compute():
            self.exchange.all_to_all(sent, received)
            for buffer, output in zip(received, outputs):
                copy_heads(buffer, self.heads_of_group(g, output))
                stream.done_reading(buffer)
        return Transfer(outputs, stream.record_event(), sent)

    def complete_grads(self, g: int, k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> list[Tensor]:
        """Return those of group g's gradients (B, T/R, h, D) that can travel back now.

        dq always can. If several groups share a key/value head, its dk and dv are sums over these
        groups, so they travel after the last one.
        """
        groups_per_head = self.groups_per_head(k)
        if groups_per_head == 1:
            return [dq, dk, dv]
        if g % groups_per_head == 0:  # the first group of a key/value head
            wide = accumulation_dtype(dq.dtype)
            self.kv_sums = [dk.to(wide), dv.to(wide)]
        else:
            for total, grad in zip(self.kv_sums, (dk, dv)):
                total += grad
        is_last = (g + 1) % groups_per_head == 0
        if not is_last:
            return [dq]
        return [dq, *(total.to(dq.dtype) for total in self.kv_sums)]


# ---------------------------------------------------------------------------- by context


def sequence_positions(seq: int, sp: int, ring: int, rank: int) -> Tensor:
    """Return the positions (T/sp,) in the sequence of the tokens that a rank holds.

    seq: T. ring: R. rank: 0 ... sp - 1, the number of a rank among those that share the sequence.
    If R = 1, each rank has T/sp consecutive tokens. Otherwise the sequence is cut into 2R parts,
    and ring rank r has parts r and 2R-1-r (zigzag). So all ring ranks compute equally much of the
    causal triangle. The U ranks of a ring rank divide its two parts among them.

        T = 16, R = 2    ring rank 0: parts 0, 3        ring rank 1: parts 1, 2
        sp = 4, U = 2    rank 0: 0-3, rank 1: 12-15     rank 2: 4-7, rank 3: 8-11
    """
    assert seq % sp == 0 and (ring == 1 or seq % (2 * ring) == 0), (seq, sp, ring)
    r, u = divmod(rank, sp // ring)
    parts = torch.arange(seq).tensor_split(2 * ring)
    return torch.cat([parts[r], parts[-1 - r]]).view(-1, seq // sp)[u]


def ring_documents(starts: Tensor, ring: int, rank: int) -> Documents:
    """Return the Documents of a ring rank, with a rectangle per sequence for each step after the
    first. The offsets are on the CPU.

    starts: (B, T), for each token the position in its sequence where its document begins. ring: R.
    rank: 0 ... R - 1, the number of the ring rank.

    In a step after the first, the keys are tokens of another rank, and all of them come before all
    queries (step_slices). So at most one document of a sequence has both keys and queries in the
    step: the document of the last key and the first query. Its keys are the last ones of the step,
    and its queries are the first ones.

    Example: T = 16, R = 2 and documents 0-2, 3-12, 13-15. Ring rank 1 holds the tokens 4-11, which
    are all of the second document. In step 1 it gets the keys 0-3 of rank 0. Only key 3 is of the
    second document, so the rectangle has the queries 4-11 and the key 3.
    """
    b, t = starts.shape

    def tokens_of(ring_rank: int) -> Tensor:  # (T/R,) positions
        return sequence_positions(t, ring, ring, ring_rank)

    own = starts[:, tokens_of(rank)]  # (B, T/R)
    begins = own.diff(dim=1, prepend=own.new_full((b, 1), -1)) != 0
    first_tokens = begins.flatten().nonzero().flatten()  # there may be millions
    bounds = torch.cat([first_tokens, torch.tensor([own.numel()])])

    rectangles = []
    for step in range(1, ring):
        queries, keys = step_slices(step, rank, t // ring)
        others = starts[:, tokens_of((rank - step) % ring)]
        step_rectangles = []
        # per sequence: where the document of each query, and of each key, begins
        for query_starts, key_starts in zip(own[:, queries], others[:, keys]):
            document = query_starts[0]
            num_queries = int((query_starts == document).sum())
            num_keys = int((key_starts == document).sum())
            if num_keys == 0:
                num_queries = 0
            step_rectangles.append(
                Rectangle(
                    slice(queries.start, queries.start + num_queries),
                    slice(keys.stop - num_keys, keys.stop),
                )
            )
        rectangles.append(tuple(step_rectangles))
    return Documents(tuple(bounds.tolist()), bounds.int(), tuple(rectangles))


def step_slices(step: int, rank: int, tokens: int) -> tuple[slice, slice]:
    """Return which queries attend to which keys in a step of a ring after the first (see Ring).

    Both are slices of the `tokens` = T/R tokens of a ring rank. The queries are tokens of `rank`,
    and the keys are tokens of the rank whose keys have arrived.
    """
    early, late, all_tokens = slice(0, tokens // 2), slice(tokens // 2, tokens), slice(0, tokens)
    if step <= rank:  # the keys of an earlier rank
        return all_tokens, early
    return late, all_tokens  # the keys of a later rank


def merge(o: Tensor, lse: Tensor, o_more: Tensor, lse_more: Tensor) -> None:
    """Merge attention over more keys into o (B, T, H, D) and lse (B, H, T), in place.

    lse_new = log(exp(lse) + exp(lse_more))
    o_new = o + exp(lse_more - lse_new) (o_more - o)
    """
    lse_new = torch.logaddexp(lse, lse_more)
    weight = torch.exp(lse_more - lse_new).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    o.copy_(o + weight * (o_more - o))
    lse.copy_(lse_new)


merge_into = compiled(merge, writes=True)
# documents have any length, and one compiled kernel serves all lengths
merge_document = compiled(merge, dynamic=True, writes=True)


def select_tokens(sequences: slice, tokens: slice, *tensors: Tensor) -> list[Tensor]:
    """Return these tokens of these sequences of tensors (B, T/R, h, D), contiguous as kernels want
    them."""
    return [x[sequences, tokens].contiguous() for x in tensors]


def rows_of(mask: Mask, lse: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return lse as a view (B, h, T/R) and the tensors as views (B, T/R, h, D): one row per
    sequence.

    With documents, the arguments have the shapes that kernels take then: lse (h, B*T/R), tensors
    (B*T/R, h, D). Without documents, they already have one row per sequence, and are returned as
    they are. Call this only if R > 1.
    """
    if mask.documents is None:
        return [lse, *tensors]
    b = len(mask.documents.rectangles[0])
    return [lse.unflatten(1, (b, -1)).transpose(0, 1), *(x.unflatten(0, (b, -1)) for x in tensors)]


class Ring:
    """Attention over a sequence whose tokens lie on R ranks: queries stay, keys and values go
    around (Ring Attention, arXiv 2310.01889). If R = 1 it only calls the kernel.

    The sequence is cut in zigzag (`sequence_positions`): a rank has an early and a late part of it.
    In each step a rank passes k and v on to the next rank. So in step s ring rank r has the keys of
    rank r - s (modulo R). What its queries attend to depends on whose keys these are:

        s = 0        its own keys: a causal square.
        0 < s <= r   an earlier rank's keys. Both parts of r lie between that rank's two parts, so
                     all queries attend to the early keys.
        s > r        a later rank's keys. Both parts of that rank lie between the two of r, so the
                     late queries attend to all keys.

    For R = 4 (7 x 3,4: the queries of part 7 attend to the keys of parts 3 and 4):

        ring rank   its parts   step 0     step 1     step 2     step 3
        0           0, 7        causal     7 x 3,4    7 x 2,5    7 x 1,6
        1           1, 6        causal     1,6 x 0    6 x 3,4    6 x 2,5
        2           2, 5        causal     2,5 x 1    2,5 x 0    5 x 3,4
        3           3, 4        causal     3,4 x 2    3,4 x 1    3,4 x 0

    So each step after the first is a rectangle without a mask, and has as much work as the square.
    Every kernel whose row says plain=True can compute it. The results of the steps are merged in
    float32. For R = 3, where "k, v 1" are the keys and values for step 1:

        forward    compute  | square 0    | rectangle 1 | rectangle 2         |
                   ring     | k, v 1      | k, v 2      |

        backward   compute  | rectangle 1 | rectangle 2                       | square 0           |
                   ring     | k, v 2      | sum of dk, dv after rectangle 1   | sum of dk, dv home |

    In backward a sum of dk and dv follows each k and v around, one step behind them, and each rank
    adds its part. After R - 1 transfers the sum comes home to the rank whose keys these are. The
    square is computed last, because it hides this last transfer. The sums are float32. If R = 2,
    they have the dtype of dk, because a single part travels and nothing is added to it on the way.

    Documents. In the square, a rank's tokens of a document stand one after the other, in order. So
    the kernel can compute the square as it does without a ring, with the bounds of the documents. A
    rectangle shrinks to the queries and keys of at most one document per sequence, and it still
    needs no mask (ring_documents). All keys and values are sent nevertheless. Zigzag gives all
    ranks the same work only if each document fills its sequence. Otherwise a ring waits for its
    busiest rank. The table shows the query-key pairs of the busiest rank, divided by the mean of
    all ranks (Documents.pairs). R is 8, T is 16,384, the lengths of documents are distributed
    exponentially, and each number is the mean of 100 draws:

        mean length    4 T     T       T/4     T/16    T/64    T/256
        busiest/mean   1.07    1.28    1.59    1.85    1.69    1.37

    sp: ranks that share a sequence. Each ring has every U-th of them, U = sp/R. ranks: R. groups
    and stream are needed only if R > 1. Making a ring is a collective of all ranks.
    """

    def __init__(
        self,
        groups: Groups | None = None,
        sp: int = 1,
        ranks: int = 1,
        stream: CommStream | None = None,
    ):
        self.ranks = ranks  # R
        self.stream = stream
        if ranks > 1:
            self.group = groups.get("ring", lambda r: (r // sp, r % (sp // ranks)))
            self.rank = self.group.rank()
            if stream.stream is not None:  # connect NCCL to the neighbours now, not during a step
                self.shift(torch.zeros(1, device=stream.stream.device)).wait()

    def send_kv(self, to_heads: Transfer) -> Transfer | None:
        """Launch the first transfer of a group's keys and values to the next ring rank.

        to_heads: the transfer that brings q, k, v (B, U, T/sp, h, D), and in backward more, to this
        rank. When k and v have arrived, they are sent as one tensor (2, B, T/R, h, D). If groups
        share a key/value head, it goes around once per group. Returns None if R = 1.
        """
        if self.ranks == 1:
            return None
        _, k, v, *_ = to_heads.tensors
        both = k.new_empty(2, *k.shape)
        with self.stream.after_compute():
            # in backward, compute has not waited for k and v yet, so after_compute does not ensure
            # that they have arrived
            wait(to_heads.done_event)
            torch.stack([k, v], out=both)
        return self.shift(both.flatten(2, 3))

    def shift(self, sent: Tensor) -> Transfer:
        """Launch the transfer of a tensor to the next ring rank, and of the previous rank's tensor
        of the same shape to this one."""
        received = torch.empty_like(sent)
        rows_to = [0] * self.ranks  # how many rows of the tensor go to each ring rank
        rows_from = [0] * self.ranks
        rows_to[(self.rank + 1) % self.ranks] = len(sent)
        rows_from[self.rank - 1] = len(sent)
        with self.stream.after_compute():
            # an all-to-all to one neighbour, because NCCL would run a send and a receive on a
            # stream of its own
            dist.all_to_all_single(received, sent, rows_from, rows_to, group=self.group)
        return Transfer(received, self.stream.record_event(), [sent])

    def kv_blocks(
        self, kv_transfer: Transfer, mask: Mask
    ) -> Iterator[tuple[Tensor, list[tuple[slice, slice, slice]]]]:
        """Yield (kv, rectangles) for each step after the first.

        kv: k and v (2, B, T/R, h, D) of another rank. rectangles: (sequences, queries, keys), all
        as slices: this rank's queries in these sequences attend to these keys of kv. Without
        documents there is one rectangle for all sequences. With documents there is at most one per
        sequence.
        kv_transfer: what `send_kv` has returned. The next step's transfer is launched before a step
        is yielded.
        """
        for step in range(1, self.ranks):
            kv = kv_transfer.wait()  # hidden by the step before, or by what ran after send_kv
            # The caller keeps the first Transfer until the ring is done. Without this line, that
            # would keep the memory of its k and v, too
            kv_transfer.tensors = []
            if step + 1 < self.ranks:
                kv_transfer = self.shift(kv)  # hidden by this step's rectangle

            if mask.documents is None:
                rectangles = [(slice(None), *step_slices(step, self.rank, kv.shape[2]))]
            else:
                rectangles = [
                    (slice(i, i + 1), queries, keys)
                    for i, (queries, keys) in enumerate(mask.documents.rectangles[step - 1])
                    if queries.start < queries.stop
                ]
            yield kv, rectangles
        self.stream.done_reading(kv)

    def attend(
        self,
        kernel: Kernel,
        mask: Mask,
        kv_transfer: Transfer | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return attention of this rank's queries to the keys of all ring ranks.

        q (B, T/R, h, D), this rank's k and v -> o like q, lse (B, h, T/R). With documents, q, k and
        v are (B*T/R, h, D), and lse is (h, B*T/R).
        kv_transfer: the first k and v of another rank, from `send_kv`.
        """
        o, lse = kernel.forward(q, k, v, mask)  # the square; it hides the first k and v
        if self.ranks == 1:
            return o, lse
        o = o.to(accumulation_dtype(q.dtype))
        merge_more = merge_into if mask.documents is None else merge_document
        lse_rows, q_rows, o_rows = rows_of(mask, lse, q, o)  # views
        for kv, rectangles in self.kv_blocks(kv_transfer, mask):
            for sequences, queries, keys in rectangles:
                more = kernel.forward(  # o and lse of these keys only
                    *select_tokens(sequences, queries, q_rows),
                    *select_tokens(sequences, keys, *kv),
                    EVERYTHING,
                )
                merge_more(o_rows[sequences, queries], lse_rows[sequences, :, queries], *more)
                del more
            del kv  # so that its memory is free when the next k and v arrive
        return o.to(q.dtype), lse

    def attend_backward(
        self,
        kernel: Kernel,
        mask: Mask,
        kv_transfer: Transfer | None,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        do: Tensor,
    ) -> list[Tensor]:
        """Return dq, dk, dv of this rank's queries and keys.

        kv_transfer, q, k, v: as in `attend`. o, lse: what it returned. do: like o.
        """
        if self.ranks == 1:
            return kernel.backward(do, q, k, v, o, lse, mask)
        wide = accumulation_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        lse_rows, do_rows, q_rows, k_rows, o_rows, dq_rows = rows_of(mask, lse, do, q, k, o, dq)
        # dk and dv (2, B, T/R, h, D) of the keys that this rank has in a step
        sum_dtype = q.dtype if self.ranks == 2 else wide
        kv_sums = torch.zeros(2, *k_rows.shape, dtype=sum_dtype, device=q.device)
        sums_transfer = Transfer(kv_sums)

        for kv, rectangles in self.kv_blocks(kv_transfer, mask):
            # (sequences, keys, dk and dv) of each rectangle. They are added only after all
            # rectangles, because the sums arrive while the rectangles are computed
            parts = []
            for sequences, queries, keys in rectangles:
                dq_part, *kv_parts = kernel.backward(
                    *select_tokens(sequences, queries, do_rows, q_rows),
                    *select_tokens(sequences, keys, *kv),
                    *select_tokens(sequences, queries, o_rows),
                    lse_rows[sequences, :, queries].contiguous(),
                    EVERYTHING,
                )
                dq_rows[sequences, queries] += dq_part
                parts.append((sequences, keys, kv_parts))
            kv_sums = sums_transfer.wait()  # hidden by this step's rectangles
            for sequences, keys, kv_parts in parts:
                for total, part in zip(kv_sums, kv_parts):
                    total[sequences, keys] += part
            del parts
            # hidden by the next step's rectangle; in the last step by the square
            sums_transfer = self.shift(kv_sums)
            del kv

        dq_part, *kv_parts = kernel.backward(do, q, k, v, o, lse, mask)  # the square
        dq += dq_part
        kv_sums = sums_transfer.wait()  # hidden by the square
        dk, dv = (
            (total.view_as(part).to(wide) + part).to(q.dtype)
            for total, part in zip(kv_sums, kv_parts)
        )
        self.stream.done_reading(kv_sums)
        return [dq.to(q.dtype), dk, dv]


def check_ring(
    name: str, heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError if a kernel is wrong on a ring.

    The kernel computes a small sequence twice, forward and backward: as a whole, and in the squares
    and rectangles of a ring of two. Both results must be equal, except for rounding. This finds two
    kinds of wrong kernels:

        1. Scores depend on heads or positions. A kernel does not know these in a rectangle.
        2. backward recomputes o or lse from the keys that it gets. On a ring it gets only some of
           the keys, but its arguments o and lse are over the keys of all ranks.

    heads, kv_heads: H and K of one rank. At most two of them are tried.
    """
    refused = f"--attention {name} on a ring"
    try:
        # Small shapes are not worth a compilation. (set_stance is not used as a decorator, because
        # it would then import the compiler with this file, which takes a second)
        with torch.compiler.set_stance("force_eager"):
            errors = ring_errors(KERNELS[name], heads, kv_heads, head_dim, device, dtype)
    except Exception as e:  # for example, the kernel reads Mask.heads, which is None in a rectangle
        raise ValueError(
            f"{refused}: the kernel fails when queries attend to the keys of another rank "
            f"({type(e).__name__}: {e}). So its row in KERNELS must not say plain=True. "
            "Run it with --ring 1"
        ) from e
    tolerance = 1e-4 if dtype.itemsize > 2 else 3e-2
    for what, error in errors.items():
        if not error < tolerance:  # nan is refused, too
            raise ValueError(
                f"{refused}: {what} differs by {error:.2g} of its size from attention over the "
                "whole sequence. The kernel's backward must use the o and log-sum-exp that it is "
                "given, and its scores may depend on q and k only. Otherwise run with --ring 1"
            )


def ring_errors(
    kernel: Kernel,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return how far o, dq, dk and dv of a ring of two are from those of the whole sequence.

    An error is the norm of the difference, divided by the norm of the whole sequence's result. The
    sequence is small and random.
    """
    if heads > kv_heads:  # query heads share a key/value head
        num_heads, num_kv_heads = 2, 1
    else:
        num_heads = num_kv_heads = min(2, heads)
    part_tokens = 64  # a ring of two cuts a sequence into four parts
    seq = 4 * part_tokens
    rng = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, seq, count, head_dim, generator=rng).to(device, dtype)
        for count in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    mask = Mask(heads=range(num_heads))
    o, lse = kernel.forward(q, k, v, mask)
    whole_results = [o, *kernel.backward(do, q, k, v, o, lse, mask)]
    ring_results = ring_of_two(kernel, mask, do, q, k, v)
    return {
        what: ((ours - want).norm() / want.norm()).item()
        for what, ours, want in zip(("o", "dq", "dk", "dv"), ring_results, whole_results)
    }


def ring_of_two(
    kernel: Kernel, mask: Mask, do: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> list[Tensor]:
    """Return o, dq, dk and dv (1, T, heads, D) as a ring of two computes them: in squares and
    rectangles. This process computes for both ranks of the ring. mask: of the squares."""
    dtype = q.dtype
    seq = q.shape[1]
    ring_results = [torch.zeros_like(t, dtype=accumulation_dtype(dtype)) for t in (q, q, k, v)]
    for ring_rank in (0, 1):
        own = sequence_positions(seq, 2, 2, ring_rank).to(q.device)
        other = sequence_positions(seq, 2, 2, 1 - ring_rank).to(q.device)
        # the rectangle: as slices of the ranks' tokens, and as positions in the sequence
        own_queries, other_keys = step_slices(1, ring_rank, seq // 2)
        queries, keys = own[own_queries], other[other_keys]

        # forward, as Ring.attend
        o, lse = kernel.forward(q[:, own], k[:, own], v[:, own], mask)
        o = o.to(accumulation_dtype(dtype))
        more = kernel.forward(q[:, queries], k[:, keys], v[:, keys], EVERYTHING)
        merge_into(o[:, own_queries], lse[:, :, own_queries], *more)
        o = o.to(dtype)
        ring_results[0][:, own] = o.to(ring_results[0].dtype)

        # backward, as Ring.attend_backward
        square = kernel.backward(do[:, own], q[:, own], k[:, own], v[:, own], o, lse, mask)
        rectangle = kernel.backward(
            do[:, queries],
            q[:, queries],
            k[:, keys],
            v[:, keys],
            o[:, own_queries].contiguous(),
            lse[:, :, own_queries].contiguous(),
            EVERYTHING,
        )
        for total, grad in zip(ring_results[1:], square):
            total[:, own] += grad
        for total, grad, positions in zip(ring_results[1:], rectangle, (queries, keys, keys)):
            total[:, positions] += grad
    return ring_results


# ---------------------------------------------------------------------------- what the model calls


class _Attention(Function):
    """Attention under autograd, for layers that do not run in chunks of tokens."""

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
        # do is complete, and no gradients of weights are left to compute (see Overlap above)
        return *ctx.op.backward(lambda: (do, []), *ctx.saved_tensors), None


class Attention:
    """Causal attention with one kernel, over a sequence that sp = R * U neighbouring ranks share.

        q (B, T/sp, H, D) -> group by group (B, T/R, h, D) -> o (B, T/sp, H, D)

    Call it to run under autograd. offload.py calls `forward` and `backward` by hand. The U ranks
    that share heads are neighbours, and every U-th rank is in the same ring. With sp = 4, U = 2:
    ranks {0, 1} and {2, 3} share heads, and {0, 2} and {1, 3} are rings.

    It also returns lse, which is (G, B, h, T/R), or (G, h, B*T/R) with documents.

    kernel: its name in KERNELS. head_groups: the least number of groups G. There are more groups if
    a kernel would otherwise get a tensor with more than MAX_ELEMENTS elements. exchange: the
    all-to-alls of the U ranks that share heads; None if U = 1. ring: None if R = 1. tp_rank: with
    tensor parallelism, which slice of the model's heads this rank has. Raises ValueError for a ring
    with a kernel that is not `plain`.
    """

    def __init__(
        self,
        kernel: str,
        head_groups: int = 1,
        exchange: Exchange | None = None,
        ring: Ring | None = None,
        tp_rank: int = 0,
    ):
        self.kernel = KERNELS[kernel]
        self.head_groups = head_groups
        self.exchange = exchange or Exchange()
        self.ring = ring or Ring()
        self.tp_rank = tp_rank
        self.mask = CAUSAL
        if self.ring.ranks > 1 and not self.kernel.plain:
            raise ValueError(
                f"--attention {kernel} --ring {self.ring.ranks}: a ring gives a kernel parts of a "
                "sequence, and the scores of this kernel may depend on heads or positions: its row "
                "in KERNELS does not say plain=True. Run it with --ring 1"
            )

    def with_documents(self, documents: Documents) -> "Attention":
        """Return this attention for a micro-batch whose queries attend only to keys of their own
        document."""
        assert len(documents.rectangles) == self.ring.ranks - 1
        op = copy.copy(self)
        op.mask = replace(self.mask, documents=documents)
        return op

    def of_layer(self, i: int) -> "Attention":
        """Return this attention for layer i. Kernels find the number in `mask.layer`.

        For example, if layers with local and with global attention alternate in a model, its kernel
        can choose between them by this number.
        """
        op = copy.copy(self)
        op.mask = replace(self.mask, layer=i)
        return op

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attention.apply(q, k, v, self)

    def split_heads(self, q: Tensor, k: Tensor, backward: bool = False) -> Ulysses:
        """Divide the heads of q (B, T/sp, H, D) and k (B, T/sp, K, D) into groups: as few as
        MAX_ELEMENTS allows, but at least `head_groups`."""
        ranks = self.exchange.ranks
        elements = max(q.numel(), k.numel())
        counts = head_group_counts(q.shape[2] // ranks, k.shape[2] // ranks, elements)
        num_groups = next((n for n in counts if n >= self.head_groups), None)
        assert num_groups, (
            f"q {tuple(q.shape)} and k {tuple(k.shape)} cannot have {self.head_groups} groups of "
            f"heads or more on each of {ranks} ranks, only {counts}"
        )
        return Ulysses(self.exchange, num_groups, q, k, backward)

    def group_mask(self, ulysses: Ulysses, g: int, q: Tensor) -> Mask:
        """Return the mask of group g. It says which heads of the model the group has.

        q: (B, T/sp, H, D), with the H heads of this rank's tensor-parallel slice.
        """
        h = q.shape[2] // (ulysses.ranks * ulysses.num_groups)
        first_of_slice = self.tp_rank * q.shape[2]
        first = first_of_slice + (self.exchange.rank * ulysses.num_groups + g) * h
        return replace(self.mask, heads=range(first, first + h))

    def to_kernel_shape(self, arrived: list[Tensor]) -> list[Tensor]:
        """Return what `Ulysses.to_heads` delivers, (B, U, T/sp, h, D), contiguous and in the shape
        that kernels take: (B, T/R, h, D), or (B*T/R, h, D) with documents."""
        first = 1 if self.mask.documents is None else 0
        return [x.flatten(first, 2).contiguous() for x in arrived]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute o, which is like q, and lse from q (B, T/sp, H, D) and k, v (B, T/sp, K, D)."""
        ulysses = self.split_heads(q, k)
        inputs = {"q": q, "k": k, "v": v}
        outputs = ulysses.new_outputs(q)
        lse = []
        to_tokens = Transfer([])
        to_heads = ulysses.to_heads(0, inputs)
        for g in range(ulysses.num_groups):
            arrived = to_heads.wait()  # hidden by kernel g - 1; exposed for the first group
            kv_transfer = self.ring.send_kv(to_heads)  # hidden by the ring's square
            if g + 1 < ulysses.num_groups:
                to_heads = ulysses.to_heads(g + 1, inputs)  # hidden by kernel g

            mask = self.group_mask(ulysses, g, q)
            o, lse_of_group = self.ring.attend(
                self.kernel, mask, kv_transfer, *self.to_kernel_shape(arrived)
            )
            lse.append(lse_of_group)

            to_tokens.wait()  # of group g - 1; hidden by kernel g
            to_tokens = ulysses.to_tokens(g, [o], outputs)
            del o
        (o,) = to_tokens.wait()  # exposed
        return o, torch.stack(lse)

    def backward(
        self,
        make_dout: Callable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        in_place: bool = False,
    ) -> list[Tensor]:
        """Return dq, dk, dv, like q, k, v.

        make_dout() runs block.post's backward. It returns do (B, T/sp, H, D), and a list of
        functions, each of which computes a gradient of a weight that was left for later. make_dout
        and these functions hide transfers.
        in_place: dq, dk and dv may overwrite q, k and v.
        """
        ulysses = self.split_heads(q, k, backward=True)

        # the first group's transfers, while block.post's backward runs
        inputs = {"q": q, "k": k, "v": v, "o": o}
        to_heads = ulysses.to_heads(0, inputs)
        next_kv_transfer = self.ring.send_kv(to_heads)
        do, pending_weight_grads = make_dout()  # hides the first group's q, k, v, o
        do = do.contiguous()
        do_to_heads = ulysses.to_heads(0, {"do": do})
        inputs["do"] = do

        # if U > 1, keep one weight gradient for the end, where it hides the last group's to_tokens
        num_kept = 1 if ulysses.ranks > 1 else 0
        while len(pending_weight_grads) > num_kept:
            pending_weight_grads.pop(0)()  # hides the first group's do

        outputs = [q, k, v] if in_place else ulysses.new_outputs(q, k, v)
        to_tokens = Transfer([])
        for g in range(ulysses.num_groups):
            arrived = to_heads.wait()  # hidden by kernel g - 1; of group 0, by make_dout
            if g == 0:
                arrived += do_to_heads.wait()  # hidden by the weight gradients above
            kv_transfer = next_kv_transfer
            if g + 1 < ulysses.num_groups:  # both are hidden by kernel g
                to_heads = ulysses.to_heads(g + 1, inputs)
                next_kv_transfer = self.ring.send_kv(to_heads)

            mask = self.group_mask(ulysses, g, q)
            grads = self.ring.attend_backward(
                self.kernel, mask, kv_transfer, lse[g], *self.to_kernel_shape(arrived)
            )
            grads = ulysses.complete_grads(g, k, *grads)

            to_tokens.wait()  # of group g - 1; hidden by kernel g
            to_tokens = ulysses.to_tokens(g, grads, outputs)
            del grads

        for compute_weight_grad in pending_weight_grads:
            compute_weight_grad()
        return to_tokens.wait()  # hidden by the last weight gradient
