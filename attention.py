"""Who attends to whom: attention kernels, and sequences that lie on several ranks.

Attention is the only operator of a layer that mixes tokens, and so the only one that crosses ranks
when a sequence is split. A kernel is two functions (`Kernel`) and a row of KERNELS; `Attention` is
a kernel that the model can call. Over a sequence that sp = R * U ranks share it has two dimensions
(LoongTrain, arXiv 2406.18485): by heads in a node, by context across.

By heads: `Ulysses` (InternEvo's ISP; DeepSpeed-Ulysses, arXiv 2309.14509). A rank holds T/sp tokens
of all heads. An all-to-all over U neighbours gives it all their tokens of some heads, the kernel
runs, an all-to-all brings o back:

                    rank 0        rank 1                     rank 0        rank 1
    tokens 0, 1     all heads     .            all-to-all    heads 0, 1    heads 2, 3
    tokens 2, 3     .             all heads    --------->    heads 0, 1    heads 2, 3

By context: `Ring`. U ranks have 1/R of the tokens; their k and v go around the R ranks that have
the same heads of other tokens, and the kernel runs on the keys of one after the other:

    o = sum_j exp(lse_j - lse) o_j,    lse = log sum_j exp(lse_j)

A rank's heads go in G groups, one after the other (`Attention.forward`, `backward`), so that one
group's way hides under another's kernel:

    exchange   | to heads 0 | to heads 1 |        | to tokens 0, to heads 2 | to tokens 1 | .. 2 |
    compute                 | kernel 0            | kernel 1                | kernel 2    | left

    communication        launched in    hidden under                             waited for by
    q, k, v forward      to_heads       the kernel before; the first group's:    its kernel
                                        not
    q, k, v, o backward  to_heads       the kernel before; the first group's:    its kernel
                                        block.post's backward (make_dout)
    do                   to_heads       likewise; the first group's: the last    its kernel
                                        chunk's products for weights
    o; dq, dk, dv        to_tokens      the next kernel; the last group's: in    the next group's
                                        backward the last product for a weight,  way back, the end
                                        in forward not
    ring: k, v           pass_keys,     the ring's step before; in backward the  steps
                         pass_on        first k, v: as q, k, v above
    ring: sums of dk, dv pass_on        the ring's next step                     attend_backward

(Where layers run whole, do is there from the start: the first and last groups' ways are not
hidden.) Each kind of communication has a CUDA stream of its own (CommStream): launch, compute,
wait.

Heads stand as (U ranks, G groups, h heads): in group g rank u has the query heads from (u G + g) h
on, and as many of its K/U key/value heads. Where these are fewer than groups, each travels with the
first of the groups that attend to it, and its gradient back with the last, so no all-to-all sends
it twice. (A ring passes it on for each of them.)

Which keys a query sees is a Mask, which kernels take: where a sequence has several documents, those
of its own (`Attention.within` the documents of a micro-batch). It also says which heads are there.

Left out: dropout, rings of documents, and two rings, one inside nodes (Ulysses serves there).

Legend: B sequences, T tokens of one, H query heads, K key/value heads, D head width; sp ranks of a
sequence, R of a ring, U that share heads, G head groups, h heads of a group on a rank.
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
from typing import ClassVar

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

# ---------------------------------------------------------------------------- who attends to whom


@dataclass(frozen=True)
class Documents:
    """Where documents lie in the N = B*T tokens of a micro-batch, one sequence after the other."""

    bounds: tuple[int, ...]  # where each begins, and N
    offsets: Tensor  # the same, int32, on the device

    @functools.cached_property
    def longest(self) -> int:
        return max(end - begin for begin, end in itertools.pairwise(self.bounds))

    def cuts(self) -> list[slice]:
        return [slice(*bounds) for bounds in itertools.pairwise(self.bounds)]


@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to."""

    causal: bool = True  # those up to its own; else all, of which there may be more than queries
    documents: Documents | None = None  # those of its own document; all sequences are one row
    heads: range | None = None  # which query heads of the model are here; of a rectangle unknown
    layer: int | None = None  # which layer of the model asks; of a rectangle unknown


CAUSAL = Mask()
EVERYTHING = Mask(causal=False)

# ---------------------------------------------------------------------------- attention kernels
# Some of aten's operators want (B, heads, T, D): transposed views, which cost nothing.

_aten = torch.ops.aten
_module = importlib.import_module  # a dictionary look-up after the first call


def _swap(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def _lengths(mask: Mask) -> dict:
    """Return where documents lie, as FlashAttention's functions want it."""
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
    warnings.filterwarnings("ignore", "Argument aux_data")  # its compiler's, once a kernel
    o, lse, *_ = _module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, causal=mask.causal, return_lse=True, **_lengths(mask)
    )
    return o, lse


def _fa4_backward(do, q, k, v, o, lse, mask):
    exact = torch.are_deterministic_algorithms_enabled()
    grads = _module("flash_attn.cute.interface")._flash_attn_bwd(
        q, k, v, o, do, lse, causal=mask.causal, deterministic=exact, **_lengths(mask)
    )
    return grads[:3]


def _cudnn_forward(q, k, v, mask):
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_swap(q, k, v), None, True, 0.0, mask.causal
    )
    return o.transpose(1, 2), lse.view(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(do, q, k, v, o, lse, mask):
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    do, q, k, v, o = _swap(do, q, k, v, o)
    return _swap(
        *_aten._scaled_dot_product_cudnn_attention_backward(
            do,
            q,
            k,
            v,
            o,
            lse.unsqueeze(-1),
            no_seed,
            no_seed,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            mask.causal,
        )
    )


def _flash_lengths(q, k, mask: Mask) -> tuple:
    """Return offsets and longest lengths of queries and keys, as torch's functions want them."""
    if mask.documents is None:
        return None, None, q.shape[1], k.shape[1]
    return tuple(_lengths(mask).values())


def _flash_forward(q, k, v, mask):
    o, lse, *_ = _aten._flash_attention_forward(
        q, k, v, *_flash_lengths(q, k, mask), 0.0, mask.causal, False
    )
    return o, lse


def _flash_backward(do, q, k, v, o, lse, mask):
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _aten._flash_attention_backward(
        do, q, k, v, o, lse, *_flash_lengths(q, k, mask), 0.0, mask.causal, no_seed, no_seed
    )


def _cpu_forward(q, k, v, mask):
    if mask.documents is not None:
        parts = [
            _cpu_forward(*(t[None, cut] for t in (q, k, v)), CAUSAL)
            for cut in mask.documents.cuts()
        ]
        o, lse = zip(*parts)
        return torch.cat(o, 1)[0], torch.cat(lse, 2)[0]
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*_swap(q, k, v), 0.0, mask.causal)
    return o.transpose(1, 2), lse


def _cpu_backward(do, q, k, v, o, lse, mask):
    if mask.documents is not None:
        parts = [
            _cpu_backward(*(t[None, cut] for t in (do, q, k, v, o)), lse[None, :, cut], CAUSAL)
            for cut in mask.documents.cuts()
        ]
        return [torch.cat(grads, 1)[0] for grads in zip(*parts)]
    do, q, k, v, o = _swap(do, q, k, v, o)
    return _swap(
        *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, mask.causal
        )
    )


@dataclass(frozen=True)
class Kernel:
    """A pair of functions on q, k, v, o (B, T, heads, D), with scores scaled by 1/sqrt(D):

        forward(q, k, v, mask) -> o, lse    lse (B, H, T), natural logarithm, float32 or wider
        backward(do, q, k, v, o, lse, mask) -> dq, dk, dv

    Of documents, tensors are (B*T, heads, D) and lse (H, B*T), as FlashAttention's functions want.
    """

    forward: Callable
    backward: Callable
    capability: tuple[int, ...]  # CUDA major versions that it runs on; empty: the CPU alone
    module: str = ""  # what must be importable
    package: str = ""  # and where it comes from
    documents: bool = False  # it takes them (Mask.documents); a kernel must say so
    # scores are those of q and k alone, whatever the head and wherever keys stand: only then may it
    # have parts of a sequence, on rings, and an export computes the same
    plain: bool = False


KERNELS = {  # best first: "auto" takes the first usable one
    "fa4": Kernel(
        _fa4_forward,
        _fa4_backward,
        (9, 10),
        "flash_attn.cute.interface",
        "flash-attn-4[cu13]",
        documents=True,
        plain=True,
    ),
    # for each document a graph for its length is built, and none for one of a single token
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, (9, 10), plain=True),
    "flash": Kernel(
        _flash_forward, _flash_backward, (8, 9, 10, 11, 12), documents=True, plain=True
    ),
    "cpu": Kernel(_cpu_forward, _cpu_backward, (), documents=True, plain=True),
}


def why_not(
    name: str, device: torch.device, dtype: torch.dtype, documents: bool = False
) -> str | None:
    """Return the reason why a kernel cannot run here, None if it can. documents: it is to take
    them."""
    kernel = KERNELS.get(name)
    if kernel is None:
        return "there is no such kernel"
    if documents and not kernel.documents:
        return f"{name} takes no documents (--document-token)"
    if device.type != "cuda":
        return f"{name} needs a GPU, this is {device.type}" if kernel.capability else None
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
    """Return the kernel's name, "auto" resolved. Raises ValueError if it cannot be used here."""
    names = list(KERNELS) if name == "auto" else [name]
    reasons = [why_not(k, device, dtype, documents) for k in names]
    if None in reasons:
        return names[reasons.index(None)]
    usable = [k for k in KERNELS if why_not(k, device, dtype, documents) is None]
    raise ValueError(
        f"--attention {name}: {'; '.join(reasons)}; usable: {', '.join(usable) or 'none'}"
    )


# ---------------------------------------------------------------------------- by heads

MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits: no call sees a larger tensor


def head_group_counts(heads: int, kv_heads: int, elements: int) -> list[int]:
    """Return the numbers of groups in which a rank's query heads may go, H/U of K/U key/value
    heads: a group has some key/value heads, or some query heads of one. elements: of its q; a group
    has at most MAX_ELEMENTS of them."""
    return [
        n
        for n in divisors(heads)
        if (kv_heads % n == 0 or n % kv_heads == 0) and elements // n <= MAX_ELEMENTS
    ]


def gpus_reach_each_other() -> bool:
    """Return whether this GPU reads and writes the memory of the node's others."""
    here = torch.cuda.current_device()
    return all(
        torch.cuda.can_device_access_peer(here, i)
        for i in range(torch.cuda.device_count())
        if i != here
    )


class Exchange:
    """All-to-alls between the ranks of a group, on the stream that is current.

    peer_access: every rank reaches the others' memory (GPUs of one node). Then copy engines push
    each part to its destination, between two barriers of one warp, and no multiprocessor is taken
    from the attention that runs beside it. Elsewhere it is the group's own collective, whose blocks
    take some.
    """

    in_use: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        peer_access: bool = False,
        timeout_ms: int = 600_000,
        stream: CommStream | None = None,
    ):
        self.group = group  # None: of one rank, where nothing has to travel
        self.peer_access = peer_access
        self.rank = group.rank() if group else 0
        self.ranks = group.size() if group else 1
        self.stream = stream
        self.timeout_ms = timeout_ms
        self.memory = torch.empty(0)  # that the others write to, outside PyTorch's allocator
        self.handle = None  # to theirs
        self.in_use.add(self)

    @classmethod
    def mapped_bytes(cls) -> int:
        """Return the bytes that ranks have mapped from each other, outside PyTorch's allocator."""
        return sum(exchange.memory.nbytes for exchange in cls.in_use)

    def allocate_buffers(self, shapes: list[tuple[int, ...]], like: Tensor) -> list[Tensor]:
        """Return tensors of these shapes to receive in. A collective where mapped memory grows.

        With peer access all calls share one memory, so what was received must be read on this
        stream, or before this stream goes on.
        """
        if not self.peer_access:
            return [like.new_empty(shape) for shape in shapes]
        sizes = [math.prod(shape) for shape in shapes]
        if self.memory.numel() < sum(sizes):
            self.map_memory(sum(sizes), like)
        parts = self.memory[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def map_memory(self, elements: int, like: Tensor) -> None:
        """Allocate memory that all ranks of the group write to. A collective."""
        torch.cuda.synchronize()  # nobody uses the old memory any more: it is about to go
        dist.barrier(self.group)
        self.memory = torch.empty(0)
        self.handle = None
        torch.cuda.empty_cache()
        self.memory = symm_mem.empty(elements, dtype=like.dtype, device=like.device)
        self.handle = symm_mem.rendezvous(self.memory, self.group)

    def all_to_all(self, sent: list[Tensor], received: list[Tensor]) -> None:
        """Send part i of each tensor (n, ...) to rank i, into part `rank` of what is received
        there, which `allocate_buffers` has given."""
        if self.handle is None:
            for send_buffer, recv_buffer in zip(sent, received):
                dist.all_to_all_single(recv_buffer, send_buffer, group=self.group)
            return
        self.handle.barrier(timeout_ms=self.timeout_ms)  # all have read what they received before
        for i in range(self.ranks):
            peer = (self.rank + i) % self.ranks  # another one for each rank
            for send_buffer, recv_buffer in zip(sent, received):
                mine = recv_buffer[self.rank]
                theirs = self.handle.get_buffer(peer, mine.shape, mine.dtype, mine.storage_offset())
                theirs.copy_(send_buffer[peer])
        self.handle.barrier(timeout_ms=self.timeout_ms)  # all parts have arrived


def make_exchange(groups: Groups, ranks: int, stream: CommStream, per_node: int) -> Exchange:
    """Return the exchange between U neighbouring ranks of a sequence. per_node: ranks of a node, 0:
    unknown. A collective of all ranks."""
    group = groups.get("sequence", lambda r: r // ranks)
    one_node = per_node > 0 and per_node % ranks == 0
    peer_access = one_node and stream.stream is not None and gpus_reach_each_other()
    return Exchange(group, peer_access, round(1e3 * groups.timeout.total_seconds()), stream)


class Ulysses:
    """The heads of one attention in G groups, and their way between U neighbouring ranks.

        tokens (B, T/sp, heads, D)    <->    heads (B, U, T/sp, h, D), T/R tokens in order

    Where a rank has fewer key/value heads than groups, some groups in a row share one: it travels
    with the first of them, and the sum of its gradients back with the last. U divides the key/value
    heads (more ranks than these take a ring). On one rank nothing has to travel.

    Two groups are on heads at a time, in two sets of places. Whatever the exchange stream reads or
    writes is allocated on the compute stream, and held until compute has waited for the exchange:
    so memory is never given to another too early.
    """

    def __init__(self, exchange: Exchange, count: int, q: Tensor, k: Tensor, backward: bool):
        self.exchange = exchange
        self.ranks = exchange.ranks  # U
        self.count = count  # G
        if self.ranks == 1:
            return
        inputs = [q, k, k, q, q]  # as q, k, v, o, do: places (2, U, B, T/sp, h, D), for two groups
        outputs = [q, k, k]  # as dq, dk, dv, or o: places (U, B, T/sp, h, D)
        if not (backward or exchange.peer_access):  # mapped memory grows once, from the start
            inputs, outputs = inputs[:3], outputs[:1]
        shapes = [(min(2, count // self.sharing(x)), *self.of(0, x).shape) for x in inputs]
        shapes += [self.of(0, x).shape for x in outputs]
        places = exchange.allocate_buffers(shapes, q)
        self.inputs, self.outputs = places[: len(inputs)], places[len(inputs) :]

    def sharing(self, x: Tensor) -> int:
        """Return how many groups in a row have the same heads of x (B, T/sp, heads, D)."""
        return max(1, self.ranks * self.count // x.shape[2])

    def of(self, g: int, x: Tensor) -> Tensor:
        """Return a view (U, B, T/sp, h, D) of group g's heads of x (B, T/sp, heads, D), by rank."""
        n = self.sharing(x)
        b, t, _, d = x.shape
        x = x.view(b, t, self.ranks, self.count // n, -1, d)
        return x.select(3, g // n).permute(2, 0, 1, 3, 4)

    def to_heads(self, g: int, tensors: list[Tensor], first: int = 0) -> Transfer:
        """Launch the way of group g's heads of tensors (B, T/sp, heads, D), the first so many of q,
        k, v, o, do; they arrive as views (B, U, T/sp, h, D)."""
        if self.ranks * self.count == 1:  # whole already: views of views cost the host time
            return Transfer([x.unsqueeze(1) for x in tensors])
        parts = [self.of(g, x) for x in tensors]
        if self.ranks == 1:
            return Transfer([part.transpose(0, 1) for part in parts])
        places = [
            sets[g // self.sharing(x) % len(sets)] for x, sets in zip(tensors, self.inputs[first:])
        ]
        # others came with an earlier group
        new = [i for i, x in enumerate(tensors) if g % self.sharing(x) == 0]
        received = [places[i] for i in new]
        sent = [torch.empty_like(place) for place in received]
        stream = self.exchange.stream
        stream.done_reading(*received)  # by kernel g - 2
        with stream.after_compute():  # so the places are free, on every rank
            for i, buffer in zip(new, sent):
                copy_heads(parts[i], buffer)
            self.exchange.all_to_all(sent, received)
        # of one sequence in order, without a copy
        arrived = [place.transpose(0, 1) for place in places]
        return Transfer(arrived, stream.record_event(), sent)

    def new_outputs(self, *like: Tensor) -> list[Tensor]:
        """Return tensors to bring parts back into. Where one group on one rank has all heads its
        results are whole, and nothing is brought."""
        if self.ranks * self.count == 1:
            return list(like)
        return [torch.empty_like(x) for x in like]

    def to_tokens(self, g: int, results: list[Tensor], into: list[Tensor]) -> Transfer:
        """Launch the way back of group g's results (B, T/R, h, D), of documents (B*T, h, D), into
        its part of tensors (B, T/sp, heads, D)."""
        if self.ranks * self.count == 1:
            return Transfer([x.reshape(whole.shape) for x, whole in zip(results, into)])
        by_rank = len(into[0]), self.ranks, -1
        parts = [x.reshape(*by_rank, *x.shape[-2:]).transpose(0, 1) for x in results]  # as `of`
        if self.ranks == 1:
            for part, whole in zip(parts, into):
                copy_heads(part, self.of(g, whole))
            return Transfer(into)
        stream = self.exchange.stream
        sent = [part.contiguous() for part in parts]
        with stream.after_compute():  # on which the group before was copied out of its places
            self.exchange.all_to_all(sent, self.outputs)
            for _, place, whole in zip(sent, self.outputs, into):
                copy_heads(place, self.of(g, whole))
                stream.done_reading(place)
        return Transfer(into, stream.record_event(), sent)

    def ready(self, g: int, k: Tensor, dq: Tensor, *dkv: Tensor) -> list[Tensor]:
        """Return what may go back of group g's gradients (B, T/R, h, D)."""
        n = self.sharing(k)
        if n == 1:
            return [dq, *dkv]
        if g % n == 0:
            # of dk, dv, which groups share
            self.sums = [part.to(accumulation_dtype(dq.dtype)) for part in dkv]
        else:
            for total, part in zip(self.sums, dkv):
                total += part
        if (g + 1) % n:
            return [dq]
        return [dq, *(total.to(dq.dtype) for total in self.sums)]


# ---------------------------------------------------------------------------- by context


def sequence_positions(seq: int, sp: int, ring: int, rank: int) -> Tensor:
    """Return where the tokens (T/sp,) of one of its sp ranks stand in a sequence.

    ring > 1: the sequence is cut in 2R parts; ring rank r, its sp/R neighbours in a row, has parts
    r and 2R-1-r one after the other (zigzag), so that each has as much of the causal triangle:

        R = 2    ring rank 0: parts 0, 3    ring rank 1: parts 1, 2
    """
    r, u = divmod(rank, sp // ring)
    parts = torch.arange(seq).tensor_split(2 * ring)
    return torch.cat([parts[r], parts[-1 - r]]).view(-1, seq // sp)[u]


@compiled
def merge_into(o: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> None:
    """Merge attention over more keys into o (B, T, H, D) and lse (B, H, T), which are changed."""
    both = torch.logaddexp(lse, lse_more)
    share = torch.exp(lse_more - both).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    o.copy_(o + share * (more - o))
    lse.copy_(both)


def take(tokens: slice, *tensors: Tensor) -> list[Tensor]:
    """Return tokens of tensors (B, T/R, h, D), for a kernel."""
    return [x[:, tokens].contiguous() for x in tensors]


class Ring:
    """Attention over a sequence whose tokens lie on R ranks (`sequence_positions`), with all heads
    that they share on each: its queries stay, keys and values go around (Ring Attention, arXiv
    2310.01889; zigzag). Of one rank it is the kernel itself.

    After s steps ring rank r has the keys of r - s. Its own ones make a causal square. A rank has
    an early and a late part of the sequence: of an earlier rank's keys both its parts attend to the
    early ones, and of a later rank's its late part attends to all, so each further step is a
    rectangle without a mask, as large as the square: any kernel serves. Steps are merged in
    float32.

        forward    compute  | square 0   | rectangle 1 | rectangle 2 |
                   ring     | k, v to 1  | k, v to 2   |

        backward   compute  | rectangle 1 | rectangle 2              | square 0    |
                   ring     | k, v to 2   | sum of dk, dv of 1 to 2  | sum to 0    |

    backward computes the square last: under it the sums of what other ranks computed for these
    keys, which travel one step behind them, come home (R - 1 steps, in float32; of R = 2 it is one
    step, and no sum: in the dtype of dk).

    sp: ranks of a sequence; those of a ring are sp/R apart.
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
            if stream.stream is not None:  # NCCL connects neighbours now, not amid a step
                self.pass_on(torch.zeros(1, device=stream.stream.device)).wait()

    def pass_keys(self, arriving: Transfer) -> Transfer | None:
        """Send k, v (B, U, T/sp, h, D) of a group, once they are there, to the next ring rank, as
        one tensor (2, B, T/R, h, D); and receive those of the previous one."""
        if self.ranks == 1:
            return None
        _, k, v, *_ = arriving.tensors
        both = k.new_empty(2, *k.shape)
        with self.stream.after_compute():
            wait(arriving.done_event)
            torch.stack([k, v], out=both)
        return self.pass_on(both.flatten(2, 3))

    def pass_on(self, sent: Tensor) -> Transfer:
        """Send a tensor to the next ring rank, and receive that of the previous one."""
        received = torch.empty_like(sent)
        there, here = [0] * self.ranks, [0] * self.ranks  # rows of the tensor, by rank
        there[(self.rank + 1) % self.ranks] = here[self.rank - 1] = len(sent)
        with self.stream.after_compute():
            # on this very stream, which send and receive would leave for one of NCCL's own
            dist.all_to_all_single(received, sent, here, there, group=self.group)
        return Transfer(received, self.stream.record_event(), [sent])

    def steps(self, passing: Transfer) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield k, v (2, B, T/R, h, D) of one ring rank after the other, and which of this rank's
        queries attend to which of them."""
        for step in range(1, self.ranks):
            # hidden by the step before; emptied, since the caller holds the first Transfer for all steps
            kv, passing.tensors = passing.wait(), []
            if step + 1 < self.ranks:
                passing = self.pass_on(kv)  # hidden by this step's rectangle
            half = kv.shape[2] // 2
            if step <= self.rank:  # of an earlier rank
                yield kv, slice(None), slice(0, half)
            else:
                yield kv, slice(half, None), slice(None)
        self.stream.done_reading(kv)

    def attend(
        self, kernel: Kernel, mask: Mask, passing: Transfer | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q (B, T/R, h, D), k, v -> o like q, lse (B, h, T/R): these queries attend to the keys of
        all ring ranks. passing: of pass_keys."""
        o, lse = kernel.forward(q, k, v, mask)  # hides the first k, v
        if self.ranks == 1:
            return o, lse
        o = o.to(accumulation_dtype(q.dtype))
        for kv, queries, keys in self.steps(passing):
            part = kernel.forward(*take(queries, q), *take(keys, *kv), EVERYTHING)
            merge_into(o[:, queries], lse[:, :, queries], *part)
            del kv
        return o.to(q.dtype), lse

    def attend_backward(
        self,
        kernel: Kernel,
        mask: Mask,
        passing: Transfer | None,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        do: Tensor,
    ) -> list[Tensor]:
        """Return dq, dk, dv."""
        if self.ranks == 1:
            return kernel.backward(do, q, k, v, o, lse, mask)
        wide = accumulation_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        # of dk, dv (2, B, T/R, h, D), one step behind their k, v
        sums = torch.zeros(2, *k.shape, dtype=q.dtype if self.ranks == 2 else wide, device=q.device)
        summing = Transfer(sums)
        for kv, queries, keys in self.steps(passing):
            dq_part, *parts = kernel.backward(
                *take(queries, do, q),
                *take(keys, *kv),
                *take(queries, o),
                lse[:, :, queries].contiguous(),
                EVERYTHING,
            )
            dq[:, queries] += dq_part
            sums = summing.wait()  # hidden by this step's rectangle
            for total, part in zip(sums, parts):
                total[:, keys] += part
            summing = self.pass_on(sums)  # hidden by the next step's, at last by the square
            del kv
        dq_part, *parts = kernel.backward(do, q, k, v, o, lse, mask)
        dq += dq_part
        sums = summing.wait()
        dk, dv = ((total.to(wide) + part).to(q.dtype) for total, part in zip(sums, parts))
        self.stream.done_reading(sums)
        return [dq.to(q.dtype), dk, dv]


@torch.compiler.set_stance("force_eager")  # small shapes are not worth a compilation
def check_ring(
    name: str, heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError if a kernel may not run on a ring: if the causal square and the rectangles
    that a ring of two makes of a small sequence, merged, are not attention over the whole sequence,
    forward and backward.

    A kernel that looks at heads or at positions fails here, and so does a backward that recomputes
    its own o and log-sum-exp: on a ring these are of the keys of all ranks. heads, kv_heads: of a
    rank; two at most are tried."""
    refused = f"--attention {name} on a ring"
    try:
        errors = ring_errors(KERNELS[name], heads, kv_heads, head_dim, device, dtype)
    except Exception as e:  # of a rectangle a kernel is not told its heads
        raise ValueError(
            f"{refused}: the kernel fails where queries attend to the keys of another rank "
            f"({type(e).__name__}: {e}), so it is not Kernel(..., plain=True); --ring 1"
        ) from e
    for what, error in errors.items():
        if not error < (1e-4 if dtype.itemsize > 2 else 3e-2):
            raise ValueError(
                f"{refused}: {what} differs by {error:.2g} of its size from attention over the "
                "whole sequence. Its backward must use the o and log-sum-exp that it is given, and "
                "its scores may depend on q and k only; --ring 1"
            )


def ring_errors(
    kernel: Kernel,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return how far o, dq, dk and dv of a ring of two are from attention over the whole of a small
    sequence, as fractions of their size."""
    shared = heads > kv_heads
    n, n_kv = (2, 1) if shared else (min(2, heads), min(2, heads))
    part = 64  # tokens; a ring of two cuts a sequence into four parts
    rng = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, 4 * part, count, head_dim, generator=rng).to(device, dtype)
        for count in (n, n_kv, n_kv, n)
    )
    causal, every = Mask(heads=range(n)), EVERYTHING
    o, lse = kernel.forward(q, k, v, causal)
    want = [o, *kernel.backward(do, q, k, v, o, lse, causal)]
    found = [torch.zeros_like(t, dtype=accumulation_dtype(dtype)) for t in (q, q, k, v)]
    for ring_rank in (0, 1):
        own = sequence_positions(4 * part, 2, 2, ring_rank).to(device)
        other = sequence_positions(4 * part, 2, 2, 1 - ring_rank).to(device)
        # as Ring.steps yields them: which of its queries attend to which of the other's keys
        queries, keys = (own, other[:part]) if ring_rank else (own[part:], other)
        here = slice(None) if ring_rank else slice(part, None)
        o, lse = kernel.forward(q[:, own], k[:, own], v[:, own], causal)
        o = o.to(accumulation_dtype(dtype))
        more = kernel.forward(q[:, queries], k[:, keys], v[:, keys], every)
        merge_into(o[:, here], lse[:, :, here], *more)
        o = o.to(dtype)
        found[0][:, own] = o.to(found[0].dtype)
        square = kernel.backward(do[:, own], q[:, own], k[:, own], v[:, own], o, lse, causal)
        rectangle = kernel.backward(
            do[:, queries],
            q[:, queries],
            k[:, keys],
            v[:, keys],
            o[:, here].contiguous(),
            lse[:, :, here].contiguous(),
            every,
        )
        for total, grad, at in zip(found[1:], square, (own, own, own)):
            total[:, at] += grad
        for total, grad, at in zip(found[1:], rectangle, (queries, keys, keys)):
            total[:, at] += grad
    return {
        what: ((ring - whole).norm() / whole.norm()).item()
        for what, ring, whole in zip(("o", "dq", "dk", "dv"), found, want)
    }


# ---------------------------------------------------------------------------- all of it


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
        return *ctx.op.backward(lambda: (do, []), *ctx.saved_tensors), None


class Attention:
    """A kernel of the table, for one group of heads after the other, over a sequence that lies on
    sp = R * U neighbouring ranks: U of them by heads, whose R rows are ring ranks. Called, with
    autograd; or forward and backward, as they are. lse: (G, B, h, T/R); of documents (G, h, B*T).

        q (B, T/sp, H, D) -> group by group (B, T/R, h, D) -> o (B, T/sp, H, D)

    head_groups: the fewest; more, where a kernel would see too large a tensor. tp_rank: of tensor
    parallelism. Raises ValueError for a kernel that sees heads, on a ring: a rectangle's keys do
    not stand where it would count them.
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
                f"--attention {kernel} --ring {self.ring.ranks}: this kernel may see heads, or "
                "where keys stand (Kernel.plain), and a ring gives it parts of a sequence: --ring 1"
            )

    def with_documents(self, documents: Documents) -> "Attention":
        """Return this op for a micro-batch whose tokens attend inside their documents alone."""
        assert self.ring.ranks == 1, "documents would cut rectangles"
        op = copy.copy(self)
        op.mask = replace(self.mask, documents=documents)
        return op

    def of_layer(self, i: int) -> "Attention":
        """Return this op for layer i, whose number kernels find in their mask: so attention that
        differs by layer (local and global layers in turn) is one line of a kernel."""
        op = copy.copy(self)
        op.mask = replace(self.mask, layer=i)
        return op

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attention.apply(q, k, v, self)

    def cut(self, q: Tensor, k: Tensor, backward: bool = False) -> Ulysses:
        """Return the groups of heads of q (B, T/sp, H, D), k (B, T/sp, K, D)."""
        ranks = self.exchange.ranks
        elements = max(q.numel(), k.numel())
        legal = head_group_counts(q.shape[2] // ranks, k.shape[2] // ranks, elements)
        count = next((n for n in legal if n >= self.head_groups), None)
        assert count, f"{self.head_groups} groups of heads of {tuple(q.shape)}: one of {legal}"
        return Ulysses(self.exchange, count, q, k, backward)

    def mask_of(self, heads: Ulysses, g: int, q: Tensor) -> Mask:
        """Return the mask of group g, which says where its heads of q (B, T/sp, H, D), or of a
        column's, stand in the model."""
        n = q.shape[2] // (heads.ranks * heads.count)
        first = self.tp_rank * q.shape[2] + (self.exchange.rank * heads.count + g) * n
        return replace(self.mask, heads=range(first, first + n))

    def on_heads(self, arrived: list[Tensor]) -> list[Tensor]:
        """(B, U, T/sp, h, D) -> as kernels take them, (B, T/R, h, D); of documents (B*T, h, D)."""
        first = 1 if self.mask.documents is None else 0
        return [x.flatten(first, 2).contiguous() for x in arrived]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, T/sp, H, D), k, v (B, T/sp, K, D) -> o like q, lse."""
        heads = self.cut(q, k)
        into = heads.new_outputs(q)
        lse = []
        back = Transfer([])
        arriving = heads.to_heads(0, [q, k, v])
        for g in range(heads.count):
            arrived = arriving.wait()  # hidden by the kernel before; of the first group, not
            passing = self.ring.pass_keys(arriving)  # hidden by the square
            if g + 1 < heads.count:  # hidden by this kernel
                arriving = heads.to_heads(g + 1, [q, k, v])
            mask = self.mask_of(heads, g, q)
            o, lse_of_group = self.ring.attend(self.kernel, mask, passing, *self.on_heads(arrived))
            lse.append(lse_of_group)
            back.wait()  # hidden by this kernel
            back = heads.to_tokens(g, [o], into)
            del o
        (o,) = back.wait()  # not hidden
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
        """Return dq, dk, dv. make_dout() -> do (B, T/sp, H, D), and a list of functions, work that is
        left: both hide what travels. in_place: gradients may take the places of q, k and v."""
        heads = self.cut(q, k, backward=True)
        arriving = heads.to_heads(0, [q, k, v, o])
        passing = self.ring.pass_keys(arriving)
        do, left = make_dout()  # hides the first group's q, k, v, o
        do = do.contiguous()
        of_do = heads.to_heads(0, [do], first=4)
        while len(left) > (heads.ranks > 1):  # hides the first group's do
            left.pop(0)()
        into = [q, k, v] if in_place else heads.new_outputs(q, k, v)
        back = Transfer([])
        for g in range(heads.count):
            arrived = arriving.wait()  # hidden by the kernel before
            if g == 0:
                arrived += of_do.wait()
            passed = passing
            if g + 1 < heads.count:  # hidden by this kernel
                arriving = heads.to_heads(g + 1, [q, k, v, o, do])
                passing = self.ring.pass_keys(arriving)
            mask = self.mask_of(heads, g, q)
            grads = self.ring.attend_backward(
                self.kernel, mask, passed, lse[g], *self.on_heads(arrived)
            )
            grads = heads.ready(g, k, *grads)
            back.wait()  # hidden by this kernel
            back = heads.to_tokens(g, grads, into)
            del grads
        for product in left:
            product()  # hides the last group's way back
        return back.wait()
