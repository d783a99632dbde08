"""Who attends to whom: attention kernels, and sequences that lie on several ranks.

Attention is the only operator of a layer that mixes tokens, and so the only one that crosses ranks
when a sequence is split. A kernel is two functions (their shapes: above KERNELS) and a row of
KERNELS; `Attention` is a kernel that the model can call. Over a sequence that sp = R * U ranks
share it has two dimensions (LoongTrain, arXiv 2406.18485): by heads in a node, by context across.

By heads: `Ulysses` (InternEvo's ISP; DeepSpeed-Ulysses, arXiv 2309.14509). A rank holds T/sp tokens
of all heads. An all-to-all over U neighbours gives it all their tokens of some heads, the kernel
runs, an all-to-all brings o back:

                    rank 0        rank 1                     rank 0        rank 1
    tokens 0, 1     all heads     .            all-to-all    heads 0, 1    heads 2, 3
    tokens 2, 3     .             all heads    --------->    heads 0, 1    heads 2, 3

By context: `Ring`. U ranks have 1/R of the tokens; their k and v go around the R ranks that have
the same heads of other tokens, and the kernel runs on the keys of one after the other:

    o = sum_j exp(lse_j - lse) o_j,    lse = log sum_j exp(lse_j)

A rank's heads go in G groups, so that one group's all-to-all (Ulysses.send, send_back) hides under
another's kernel (Ulysses.run):

    exchange   | send 0 | send 1 |        | send 2, return 0 | return 1 | return 2 |
    compute             | kernel 0        | kernel 1         | kernel 2 | while_waiting

    communication        launched in  hidden under                              waited for in
    q, k, v forward      send         the kernel before; the first group's: not  run
    q, k, v, o backward  send         the kernel before; the first group's       run
                                      (prefetch_backward): block.post's backward
    do                   send         likewise; the first group's (prefetch_do): run
                                      the last chunk's products for weights
    o; dq, dk, dv        send_back    the next kernel; the last group's: in      run
                                      backward while_waiting, in forward not
    ring: k, v           pass_keys,   the ring's step before; in backward the    attend,
                         pass_on      first k, v: as q, k, v above (one          attend_backward
                                      sequence; q, k, v of all heads, if U = 1)
    ring: sums of dk, dv pass_on      the ring's next step                       attend_backward

(Where layers run whole, autograd calls backward alone: without prefetch and while_waiting, its
first and last groups' ways are not hidden.) Each kind of communication has a CUDA stream of its own
(CommStream): launch, compute, wait.

Which keys a query sees is a Mask, which kernels take: where a sequence has several documents, those
of its own (`Attention.within` the documents of a micro-batch).

Left out: dropout, rings of documents, and two rings, one inside nodes (Ulysses serves there).

Legend: B sequences, T tokens of one, H query heads, K key/value heads, D head width; sp ranks of a
sequence, R of a ring, U that share heads, G head groups, h heads of a group on a rank.
"""
import contextlib
import copy
import functools
import importlib
import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion

from model import accumulation_dtype, compiled, copy_heads
from ranks import Groups

SEND_ALIGN_ELEMENTS = 128  # where a tensor starts in memory that other ranks write to

# ---------------------------------------------------------------------------- streams


class CommStream:
    """A CUDA stream for one kind of communication, of high priority: its few blocks go before the
    many of a kernel that computes, not behind its last.

    On a CPU, or with `overlap` off, it is the compute stream itself: then everything happens in the
    order of the program, and nothing needs a wait.
    """

    def __init__(self, device: torch.device, overlap: bool = True):
        self.stream = None
        self.overlap = overlap
        if overlap and device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)

    @contextlib.contextmanager
    def after_compute(self):
        """Launch what follows on this stream, after all that compute has enqueued so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def beside_compute(self):
        """Launch what follows on this stream, which waits for no computation."""
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def last_event(self):
        """An event behind all that was launched so far, for `wait`; None where nothing can wait."""
        return self.stream.record_event() if self.stream else None

    def used(self, *buffers: Tensor) -> None:
        """Say, on the stream that is current, that buffers which are filled again were read for the
        last time. Nothing happens: a test gives streams that spoil them here, and start late."""


def wait(event) -> None:
    """Let the current stream go on when the event is reached; the host does not stop."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


# ---------------------------------------------------------------------------- who attends to whom


@dataclass(frozen=True)
class Documents:
    """Where documents lie in the N = B*T tokens of a micro-batch, one sequence after the other."""

    bounds: tuple[int, ...]  # where each begins, and N
    offsets: Tensor  # the same, int32, on the device

    def lengths(self) -> list[int]:
        return [end - begin for begin, end in zip(self.bounds, self.bounds[1:])]

    @functools.cached_property
    def longest(self) -> int:
        return max(self.lengths())

    def cuts(self) -> list[slice]:
        return [slice(*bounds) for bounds in zip(self.bounds, self.bounds[1:])]


@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to."""

    causal: bool = True  # those up to its own; else all, of which there may be more than queries
    documents: Documents | None = None  # those of its own document; all sequences are one row


CAUSAL = Mask()
EVERYTHING = Mask(causal=False)

# ---------------------------------------------------------------------------- attention kernels
# A kernel is a pair of functions on (B, T, heads, D) tensors, scaled by 1/sqrt(D):
#   forward(q, k, v, mask) -> o, lse    lse (B, H, T), natural logarithm, float32 or wider
#   backward(do, q, k, v, o, lse, mask) -> dq, dk, dv
# Of documents, B is 1; FlashAttention's functions want (N, heads, D) then, and lse (H, N).
# Some of aten's operators want (B, heads, T, D): transposed views, which cost nothing.

_aten = torch.ops.aten
_module = importlib.import_module  # a dictionary look-up after the first call


def _swap(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def _rows(mask: Mask, *tensors):
    """(1, N, ...) -> (N, ...), of documents."""
    return tensors if mask.documents is None else [t[0] for t in tensors]


def _batch(mask: Mask, *tensors):
    """(N, ...) -> (1, N, ...), of documents."""
    return tensors if mask.documents is None else [t[None] for t in tensors]


def _lengths(mask: Mask) -> dict:
    """Return where documents lie, as FlashAttention's functions want it."""
    if mask.documents is None:
        return {}
    offsets, longest = mask.documents.offsets, mask.documents.longest
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest,
            "max_seqlen_k": longest}


def _fa4_forward(q, k, v, mask):
    warnings.filterwarnings("ignore", "Argument aux_data")  # its compiler's, once a kernel
    o, lse, *_ = _module("flash_attn.cute.interface")._flash_attn_fwd(
        *_rows(mask, q, k, v), causal=mask.causal, return_lse=True, **_lengths(mask))
    return _batch(mask, o, lse)


def _fa4_backward(do, q, k, v, o, lse, mask):
    exact = torch.are_deterministic_algorithms_enabled()
    grads = _module("flash_attn.cute.interface")._flash_attn_bwd(
        *_rows(mask, q, k, v, o, do, lse), causal=mask.causal, deterministic=exact,
        **_lengths(mask))
    return _batch(mask, *grads[:3])


def _cudnn_forward(q, k, v, mask):
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_swap(q, k, v), None, True, 0.0, mask.causal)
    return o.transpose(1, 2), lse.view(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(do, q, k, v, o, lse, mask):
    queries, keys = q.shape[1], k.shape[1]
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    do, q, k, v, o = _swap(do, q, k, v, o)
    return _swap(*_aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.unsqueeze(-1), no_seed, no_seed, None, None, None, queries, keys, 0.0,
        mask.causal))


def _flash_lengths(q, k, mask: Mask) -> tuple:
    """Return offsets and longest lengths of queries and keys, as torch's functions want them."""
    if mask.documents is None:
        return None, None, q.shape[1], k.shape[1]
    return tuple(_lengths(mask).values())


def _flash_forward(q, k, v, mask):
    o, lse, *_ = _aten._flash_attention_forward(
        *_rows(mask, q, k, v), *_flash_lengths(q, k, mask), 0.0, mask.causal, False)
    return _batch(mask, o, lse)


def _flash_backward(do, q, k, v, o, lse, mask):
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _batch(mask, *_aten._flash_attention_backward(
        *_rows(mask, do, q, k, v, o, lse), *_flash_lengths(q, k, mask), 0.0, mask.causal, no_seed,
        no_seed))


def _cpu_forward(q, k, v, mask):
    if mask.documents is not None:
        parts = [_cpu_forward(*(t[:, cut] for t in (q, k, v)), CAUSAL)
                 for cut in mask.documents.cuts()]
        o, lse = zip(*parts)
        return torch.cat(o, 1), torch.cat(lse, 2)
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*_swap(q, k, v), 0.0, mask.causal)
    return o.transpose(1, 2), lse


def _cpu_backward(do, q, k, v, o, lse, mask):
    if mask.documents is not None:
        parts = [_cpu_backward(*(t[:, cut] for t in (do, q, k, v, o)), lse[:, :, cut], CAUSAL)
                 for cut in mask.documents.cuts()]
        return [torch.cat(grads, 1) for grads in zip(*parts)]
    do, q, k, v, o = _swap(do, q, k, v, o)
    return _swap(*_aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, mask.causal))


@dataclass(frozen=True)
class Kernel:
    forward: Callable
    backward: Callable
    capability: tuple[int, ...]  # CUDA major versions that it runs on; empty: the CPU alone
    module: str = ""  # what must be importable
    package: str = ""  # and where it comes from
    documents: bool = True  # it takes them; else it would leave them out


KERNELS = {  # best first: "auto" takes the first usable one
    "fa4": Kernel(_fa4_forward, _fa4_backward, (9, 10), "flash_attn.cute.interface",
                  "flash-attn-4[cu13]"),
    # for each document a graph for its length is built, and none for one of a single token
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, (9, 10), documents=False),
    "flash": Kernel(_flash_forward, _flash_backward, (8, 9, 10, 11, 12)),
    "cpu": Kernel(_cpu_forward, _cpu_backward, ()),
}


def why_not(name: str, device: torch.device, dtype: torch.dtype,
            documents: bool = False) -> str | None:
    """Return the reason why a kernel cannot run here, None if it can. documents: it is to take
    them."""
    kernel = KERNELS[name]
    if documents and not kernel.documents:
        return "it has no documents (--document-token)"
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


def pick_kernel(name: str, device: torch.device, dtype: torch.dtype,
                documents: bool = False) -> str:
    """Return the kernel's name, "auto" resolved. Raises ValueError if it cannot be used here."""
    reasons = {k: why_not(k, device, dtype, documents) for k in KERNELS}
    usable = [k for k in KERNELS if reasons[k] is None]
    if name == "auto" and usable:
        return usable[0]
    reason = reasons.get(name, "there is no such kernel here")
    if name == "auto":
        reason = "; ".join(f"{k}: {why}" for k, why in reasons.items())
    if reason:
        raise ValueError(f"--attention {name}: {reason}; usable: {', '.join(usable) or 'none'}")
    return name


VERSIONS = {  # package: the first and the last release that this ran with (README.md, On GPUs)
    "torch": ("2.11", "2.13"),
    "flash-attn-4": ("4.0.0b36", "4.0.0b36"),
}


def untried_versions(kernel: str) -> list[str]:
    """Return a sentence for each package, of those that matter here, whose version this did not run
    with. Raises ValueError for a torch that is too old."""
    found = []
    for name in ("torch", KERNELS[kernel].package.partition("[")[0]):
        if name not in VERSIONS:
            continue
        first, last = VERSIONS[name]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:  # built here: nothing is known of it
            continue
        parts = version.partition("+")[0].split(".")
        series = TorchVersion(".".join(parts[: last.count(".") + 1]))  # compares as versions do
        if name == "torch" and series < first:
            raise ValueError(f"torch {version}: this needs what {first} to {last} have")
        if not first <= series <= last:
            found.append(f"{name} {version} was not tried, {first} to {last} were")
    return found


MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits: no call sees a larger tensor


def cut_heads(q: Tensor, k: Tensor, groups: int = 1):
    """Yield (sequence, query heads, key/value heads) slices of (B, T, H, D) tensors that have at
    most MAX_ELEMENTS each, and at most H/groups heads. Raises ValueError if one head has more.

    At 1M tokens, 32 heads and D = 128, a tensor has 4.3e9 elements: three cuts. Where the query
    heads of one key/value head are too many, they are cut too.
    """
    _, _, heads, width = q.shape
    tokens = max(q.shape[1], k.shape[1])
    most = MAX_ELEMENTS // (tokens * width)  # heads
    if most == 0:
        raise ValueError(f"a head of {tokens} tokens x {width} has over {MAX_ELEMENTS} elements")
    ratio = heads // k.shape[2]
    step = min(most, heads // groups) // ratio * ratio
    if step == 0:  # a part of one key/value head's query heads
        step = next(n for n in range(most, 0, -1) if ratio % n == 0)
    for b in range(q.shape[0]):
        for first in range(0, heads, step):
            last = min(first + step, heads)
            kv_heads = slice(first // ratio, -(-last // ratio))
            yield slice(b, b + 1), slice(first, last), kv_heads


def attention_forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor,
                      mask: Mask = CAUSAL) -> tuple[Tensor, Tensor]:
    """Attend: q (B, T, H, D), k, v (B, T, K, D) -> o like q, lse (B, H, T); of documents (1, H,
    B*T)."""
    if mask.documents is not None and len(q) > 1:
        o, lse = attention_forward(kernel, *one_row(q, k, v), mask)
        return o.view_as(q), lse
    if max(q.numel(), k.numel()) <= MAX_ELEMENTS:
        return kernel.forward(q, k, v, mask)
    o = torch.empty_like(q)
    lse = None
    for b, h, kv in cut_heads(q, k):
        of_queries = (b, slice(None), h)
        of_keys = (b, slice(None), kv)
        cut = (q[of_queries], k[of_keys], v[of_keys])
        o[of_queries], part = kernel.forward(*(t.contiguous() for t in cut), mask)
        if lse is None:
            lse = part.new_empty(q.shape[0], q.shape[2], q.shape[1])
        lse[b, h] = part
    return o, lse


def attention_backward(kernel: Kernel, do, q, k, v, o, lse, groups: int = 1, in_place: bool = False,
                       mask: Mask = CAUSAL) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the same global o and lse for every cut. groups: of
    heads, one after the other, so that the kernel's sums are of one alone; they divide the
    key/value heads. in_place: gradients take the places of q, k and v, if no cut shares heads."""
    if mask.documents is not None and len(q) > 1:
        grads = attention_backward(kernel, *one_row(do, q, k, v, o), lse, groups, in_place, mask)
        return tuple(grad.view_as(x) for grad, x in zip(grads, (q, k, v)))
    if max(q.numel(), k.numel()) <= MAX_ELEMENTS and groups == 1:
        return kernel.backward(do.contiguous(), q, k, v, o, lse, mask)
    cuts = list(cut_heads(q, k, groups))
    in_place = in_place and sum(kv.stop - kv.start for _, _, kv in cuts) == len(q) * k.shape[2]
    if in_place:
        dq, dk, dv = q, k, v
    else:
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
    for b, h, kv in cuts:
        of_queries = (b, slice(None), h)
        of_keys = (b, slice(None), kv)
        cut = (do[of_queries], q[of_queries], k[of_keys], v[of_keys], o[of_queries], lse[b, h])
        dq[of_queries], dk_part, dv_part = kernel.backward(*(t.contiguous() for t in cut), mask)
        if in_place:
            dk[of_keys] = dk_part
            dv[of_keys] = dv_part
        else:  # a key/value head may serve several cuts
            dk[of_keys] += dk_part
            dv[of_keys] += dv_part
    return dq, dk, dv


def one_row(*tensors: Tensor) -> list[Tensor]:
    """(B, T, ...) -> (1, B*T, ...)"""
    return [t.flatten(0, 1)[None] for t in tensors]


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


def do_nothing() -> None:
    pass


class Attention:
    """A kernel of the table: called, with autograd; or forward and backward, as they are.

    A subclass may split the work over ranks; lse has then the shape that its own backward wants.
    """

    head_groups = 1  # that run one after the other, in backward
    ring = 1  # ranks that share a sequence by context
    mask = CAUSAL

    def __init__(self, kernel: str):
        self.kernel = KERNELS[kernel]

    def within(self, documents: Documents) -> "Attention":
        """Return this op for a micro-batch whose tokens attend inside their documents alone."""
        assert self.ring == 1, "documents would cut rectangles"
        op = copy.copy(self)
        op.mask = Mask(documents=documents)
        return op

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attention.apply(q, k, v, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return o, lse of the q, k, v of a head group, (B, T, heads, D) each. (Ring: of a rank's
        part of the tokens; its queries attend to the keys of all ring ranks.)"""
        return attention_forward(self.kernel, q, k, v, self.mask)

    def attend_backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                        groups: int = 1, in_place: bool = False, passing=None):
        """Return their dq, dk, dv: attention_backward. passing: what Ring has under way."""
        return attention_backward(self.kernel, do, q, k, v, o, lse, groups, in_place, self.mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(q, k, v)

    def prefetch_backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor):
        """Launch what backward needs of its inputs before do is known. Returns what `prefetch_do`
        and `backward` take as `prefetched`."""

    def prefetch_do(self, prefetched, do: Tensor) -> None:
        """Launch what backward needs of do, too."""

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                 prefetched=None, while_waiting: Callable[[], None] = do_nothing,
                 in_place: bool = False):
        """Return dq, dk, dv. while_waiting: work for the time in which a subclass brings the last
        gradients back. in_place: they may take the places of q, k and v."""
        while_waiting()
        return self.attend_backward(do, q, k, v, o, lse, self.head_groups, in_place, prefetched)


# ---------------------------------------------------------------------------- rings


def sequence_positions(seq: int, sp: int, ring: int, rank: int) -> Tensor:
    """Return where the tokens (T/sp,) of one of its sp ranks stand in a sequence.

    ring > 1: the sequence is cut in 2R parts; ring rank r, its sp/R neighbours in a row, has parts
    r and 2R-1-r one after the other (zigzag), so that each has as much of the causal triangle:

        R = 2    ring rank 0: parts 0, 3    ring rank 1: parts 1, 2
    """
    size = seq // sp
    if ring == 1:
        return torch.arange(rank * size, (rank + 1) * size)
    r, u = divmod(rank, sp // ring)
    length = seq // (2 * ring)
    of_ring_rank = torch.cat([torch.arange(part * length, (part + 1) * length)
                              for part in (r, 2 * ring - 1 - r)])
    return of_ring_rank[u * size : (u + 1) * size]


@compiled
def merge_into(o: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> None:
    """Make o (B, T, H, D), lse (B, H, T) of some keys those of more: softmax over parts of a row.
    """
    both = torch.logaddexp(lse, lse_more)
    share = torch.exp(lse_more - both).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    o.copy_(o + share * (more - o))
    lse.copy_(both)


@dataclass
class Passing:
    """A tensor on its way to the next ring rank, and that of the previous one to here."""

    sent: Tensor | None  # read until `arrival`
    received: Tensor | None
    arrival: object  # event

    def wait(self) -> Tensor:
        """Let compute wait for what was received, and return it, once."""
        wait(self.arrival)
        received, self.sent, self.received = self.received, None, None
        return received


class Ring(Attention):
    """Attention over a sequence whose tokens lie on R ranks (`sequence_positions`), with all heads
    that they share on each: its queries stay, keys and values go around (Ring Attention, arXiv
    2310.01889; zigzag).

    After s steps ring rank r has the keys of r - s. Its own ones make a causal square. Of those of
    an earlier rank both its parts attend to the first part, and of those of a later one its second
    part attends to both, so each further step is a rectangle without a mask, as large as the
    square: any kernel serves. Steps are merged in float32.

        forward    compute  | square 0   | rectangle 1 | rectangle 2 |
                   ring     | k, v to 1  | k, v to 2   |

        backward   compute  | rectangle 1 | rectangle 2              | square 0    |
                   ring     | k, v to 2   | sum of dk, dv of 1 to 2  | sum to 0    |

    backward computes the square last: under it the sums of what other ranks computed for these
    keys, which travel one step behind them, come home (R - 1 steps, in float32; of R = 2 it is one
    step, and no sum: in the dtype of dk). Its first k, v travel under what comes before
    (prefetch_backward).

    sp: ranks of a sequence; those of a ring are sp/R apart.
    """

    def __init__(self, kernel: str, sp: int, ring: int, groups: Groups, stream: CommStream):
        super().__init__(kernel)
        assert sp % ring == 0, f"{ring} does not divide {sp} ranks of a sequence"
        self.sp = sp
        self.ring = ring
        self.ring_stream = stream
        self.ring_group = groups.get("ring", lambda r: (r // sp, r % (sp // ring)))
        if self.ring_group is not None:
            self.ring_rank = dist.get_rank(self.ring_group)
            if stream.stream is not None:  # NCCL connects neighbours now, not amid a step
                self.pass_on(torch.zeros(1, device=stream.stream.device)).wait()

    def pass_keys(self, k: Tensor, v: Tensor, after=None) -> Passing:
        """Send k, v to the next ring rank, once the event `after` is reached, as one tensor (2, B,
        T/R, heads, D); and receive those of the previous one."""
        both = k.new_empty(2, *k.shape)
        with self.ring_stream.after_compute():
            wait(after)
            torch.stack([k, v], out=both)
        return self.pass_on(both)

    def pass_on(self, sent: Tensor) -> Passing:
        """Send a tensor to the next ring rank, and receive that of the previous one."""
        received = torch.empty_like(sent)
        there, here = [0] * self.ring, [0] * self.ring  # rows of the tensor, by rank
        there[(self.ring_rank + 1) % self.ring] = here[self.ring_rank - 1] = len(sent)
        with self.ring_stream.after_compute():
            # on this very stream, which send and receive would leave for one of NCCL's own
            dist.all_to_all_single(received, sent, here, there, group=self.ring_group)
        return Passing(sent, received, self.ring_stream.last_event())

    def rectangle(self, step: int, half: int) -> tuple[slice, slice]:
        """Return which of this rank's queries attend to which of the keys that it has."""
        if step <= self.ring_rank:  # of an earlier rank
            return slice(None), slice(0, half)
        return slice(half, None), slice(None)

    def attend(self, q, k, v):
        if self.ring_group is None:
            return super().attend(q, k, v)
        half = q.shape[1] // 2
        passing = self.pass_keys(k, v)  # hidden by the square
        o, lse = attention_forward(self.kernel, q, k, v)
        o = o.to(accumulation_dtype(q.dtype))
        for step in range(1, self.ring):
            kv = passing.wait()
            if step + 1 < self.ring:
                passing = self.pass_on(kv)  # hidden by this step's rectangle
            queries, keys = self.rectangle(step, half)
            part = attention_forward(self.kernel, q[:, queries].contiguous(),
                                     *(t[:, keys].contiguous() for t in kv), EVERYTHING)
            merge_into(o[:, queries], lse[:, :, queries], *part)
        self.ring_stream.used(kv)
        return o.to(q.dtype), lse

    def attend_backward(self, do, q, k, v, o, lse, groups=1, in_place=False, passing=None):
        if self.ring_group is None:
            return super().attend_backward(do, q, k, v, o, lse, groups, in_place)
        passing = passing or self.pass_keys(k, v)
        half = q.shape[1] // 2
        wide = accumulation_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        summing = None  # sums of dk, dv (2, B, T/R, heads, D), one step behind their k, v
        for step in range(1, self.ring):
            kv = passing.wait()
            if step + 1 < self.ring:
                passing = self.pass_on(kv)  # hidden by this step's rectangle
            queries, keys = self.rectangle(step, half)
            dq_part, *parts = attention_backward(
                self.kernel, *(t[:, queries].contiguous() for t in (do, q)),
                *(t[:, keys].contiguous() for t in kv), o[:, queries].contiguous(),
                lse[:, :, queries].contiguous(), groups, mask=EVERYTHING)
            dq[:, queries] += dq_part
            if summing is None:
                sums = torch.zeros_like(kv, dtype=q.dtype if self.ring == 2 else wide)
            else:
                sums = summing.wait()  # hidden by this step's rectangle
            for total, part in zip(sums, parts):
                total[:, keys] += part
            summing = self.pass_on(sums)  # hidden by the next step's, at last by the square
        dq_part, *parts = attention_backward(self.kernel, do, q, k, v, o, lse, groups)
        dq += dq_part
        sums = summing.wait()
        dk, dv = ((total.to(wide) + part).to(q.dtype) for total, part in zip(sums, parts))
        self.ring_stream.used(kv, sums)
        return dq.to(q.dtype), dk, dv

    def prefetch_backward(self, q, k, v, o):
        return self.pass_keys(k, v) if self.ring_group else None


# ---------------------------------------------------------------------------- sequences over ranks


def gpus_reach_each_other() -> bool:
    """Return whether this GPU reads and writes the memory of the node's others."""
    here = torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != here]
    return all(torch.cuda.can_device_access_peer(here, i) for i in others)


class Exchange:
    """All-to-alls between the ranks of a group, on the stream that is current.

    peer_access: every rank reaches the others' memory (GPUs of one node). Then copy engines push
    each part to its destination, between two barriers of one warp, and no multiprocessor is taken
    from the attention that runs beside it. Elsewhere it is the group's own collective, whose blocks
    take some.
    """

    in_use: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, group: dist.ProcessGroup, peer_access: bool,
                 timeout: timedelta | None = None):
        self.group = group
        self.peer_access = peer_access
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.timeout_ms = round(1e3 * (timeout or timedelta(minutes=10)).total_seconds())
        self.memory = torch.empty(0)  # that the others write to
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
        padded = [-(-n // SEND_ALIGN_ELEMENTS) * SEND_ALIGN_ELEMENTS for n in sizes]
        if self.memory.numel() < sum(padded):
            self.map_memory(sum(padded), like)
        parts = self.memory[: sum(padded)].split(padded)
        return [x[:n].view(shape) for x, n, shape in zip(parts, sizes, shapes)]

    def map_memory(self, elements: int, like: Tensor) -> None:
        """Allocate memory that all ranks of the group write to. A collective."""
        torch.cuda.synchronize()  # nobody uses the old memory any more: it is about to go
        dist.barrier(self.group)
        self.memory = torch.empty(0)
        self.handle = None
        torch.cuda.empty_cache()
        self.memory = symm_mem.empty(elements, dtype=like.dtype, device=like.device)
        self.handle = symm_mem.rendezvous(self.memory, self.group)

    def all_to_all(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Send part i of each first tensor (n, ...) to rank i, into part `rank` of the second one,
        which `allocate_buffers` has given."""
        if self.handle is None:
            for send_buffer, recv_buffer in pairs:
                dist.all_to_all_single(recv_buffer, send_buffer, group=self.group)
            return
        self.handle.barrier(timeout_ms=self.timeout_ms)  # all have read what they received before
        for i in range(self.ranks):
            peer = (self.rank + i) % self.ranks  # another one for each rank
            for send_buffer, recv_buffer in pairs:
                mine = recv_buffer[self.rank]
                theirs = self.handle.get_buffer(peer, mine.shape, mine.dtype, mine.storage_offset())
                theirs.copy_(send_buffer[peer])
        self.handle.barrier(timeout_ms=self.timeout_ms)  # all parts have arrived


@dataclass
class HeadGroup:
    """One group of heads on its way from tokens to heads: its inputs, one after the other."""

    recv_buffers: list[Tensor]  # (U, B, T/sp, h, D) each: the tokens of every rank
    send_buffers: list[Tensor] = field(default_factory=list)  # read until `arrival`
    arrival: object = None  # event: all that was sent so far is in recv_buffers
    backward: bool = False  # its k, v go around the ring as soon as they are there
    passing: Passing | None = None  # to the next ring rank

    def on_heads(self) -> list[Tensor]:
        """Return the inputs as the kernel takes them: (B, T/R, h, D)."""
        return [x.transpose(0, 1).flatten(1, 2) for x in self.recv_buffers]


@dataclass
class Prefetched:
    """A backward's first head group, on its way before the backward begins."""

    buffers: tuple  # of Ulysses.allocate
    group: HeadGroup


class Ulysses(Ring):
    """Attention over a sequence that lies on sp = R * U neighbouring ranks: U of them by heads,
    whose R rows are ring ranks.

        q (B, T/sp, G*U*h, D) -> group by group (B, T/R, h, D) -> Ring -> o (B, T/sp, H, D)

    Two groups are on heads at a time, in two sets of receive buffers. G * U divides the key/value
    heads (more ranks than these take a ring). lse: (G, B, h, T/R), of documents (G, 1, h, B*T).

    per_node: ranks of a node (0: unknown), for Exchange.

    Whatever the exchange stream reads or writes is allocated on the compute stream, and held until
    compute has waited for the exchange: so memory is never given to another too early.
    """

    def __init__(self, kernel: str, sp: int, groups: Groups, stream: CommStream,
                 head_groups: int = 1, per_node: int = 0, ring: int = 1,
                 ring_stream: CommStream | None = None):
        super().__init__(kernel, sp, ring, groups, ring_stream or stream)
        self.head_ranks = head_ranks = sp // ring  # U
        self.stream = stream
        self.head_groups = head_groups
        self.group = groups.get("sequence", lambda r: r // head_ranks)
        if self.group is not None:
            self.one_node = per_node > 0 and per_node % head_ranks == 0
            overlap = stream.stream is not None
            peer_access = overlap and self.one_node and gpus_reach_each_other()
            self.exchange = Exchange(self.group, peer_access, groups.timeout)

    # -- layouts

    def by_rank(self, x: Tensor) -> Tensor:
        """A group's heads (B, T/sp, U*h, D) -> a view (U, B, T/sp, h, D): each rank's part."""
        return x.unflatten(2, (self.head_ranks, -1)).permute(2, 0, 1, 3, 4)

    def allocate(self, like: Tensor, inputs: list[int], outputs: list[int]):
        """Return receive buffers (U, B, T/sp, h, D): two lists for inputs, which groups take in
        turn, and one for outputs on their way back. like: (B, T/sp, H, D); inputs, outputs: heads,
        of all groups."""
        n = len(inputs)
        b, t, _, d = like.shape
        shapes = [(self.head_ranks, b, t, heads // (self.head_groups * self.head_ranks), d)
                  for heads in (*inputs, *inputs, *outputs)]
        buffers = self.exchange.allocate_buffers(shapes, like)
        return (buffers[:n], buffers[n : 2 * n]), buffers[2 * n :]

    def allocate_backward(self, o: Tensor, kv_heads: int):
        """Return receive buffers of q, k, v, o, do; and of dq, dk, dv."""
        heads = o.shape[2]
        return self.allocate(o, [heads, kv_heads, kv_heads, heads, heads],
                             [heads, kv_heads, kv_heads])

    # -- one group's way

    def send(self, group: HeadGroup, inputs: list[Tensor]) -> None:
        """Launch the all-to-all from tokens to heads of a group's next inputs, (B, T/sp, U*h, D)
        each."""
        first = len(group.send_buffers)
        parts = [self.by_rank(x) for x in inputs]
        send_buffers = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parts]
        recv_buffers = group.recv_buffers[first : first + len(parts)]
        with self.stream.after_compute():
            for x, buffer in zip(parts, send_buffers):
                copy_heads(x, buffer)
            self.exchange.all_to_all(list(zip(send_buffers, recv_buffers)))
        group.send_buffers += send_buffers
        group.arrival = self.stream.last_event()
        one_sequence = len(inputs[0]) == 1  # what has arrived is in order, without a copy
        if group.backward and self.ring_group and one_sequence and group.passing is None:
            # hidden by the kernel before, too
            _, k, v = group.on_heads()[:3]
            group.passing = self.pass_keys(k, v, group.arrival)

    def send_back(self, results: list[Tensor], recv_buffers: list[Tensor],
                  outputs: list[Tensor]) -> list[Tensor]:
        """Launch the all-to-all from heads (B, T/R, h, D) to tokens, into outputs (B, T/sp, U*h,
        D). Returns what must live until the stream has sent it."""
        # (B, T/R, h, D) -> (U, B, T/sp, h, D); of one sequence: a view
        send_buffers = [x.unflatten(1, (self.head_ranks, -1)).transpose(0, 1).contiguous()
                        for x in results]
        with self.stream.after_compute():
            self.exchange.all_to_all(list(zip(send_buffers, recv_buffers)))
            for buffer, output in zip(recv_buffers, outputs):
                copy_heads(buffer, self.by_rank(output))
                self.stream.used(buffer)
        return send_buffers

    def run(self, run_kernel: Callable, group: HeadGroup, buffers: tuple,
            inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...],
            while_waiting: Callable[[], None] = do_nothing) -> None:
        """Run run_kernel(g, group) -> outputs on heads for each group of inputs, and bring what it
        returns into outputs, (B, T/sp, heads, D) each. group: the first, under way."""
        recv_buffers, return_buffers = buffers
        returning = []  # send buffers of outputs on their way back
        for g in range(self.head_groups):
            arriving = None
            if g + 1 < self.head_groups:  # the next group's way, hidden by this group's kernel
                # its receive buffers are free: the stream is behind kernel g - 1, on every rank
                arriving = HeadGroup(recv_buffers[(g + 1) % 2], backward=group.backward)
                self.send(arriving, self.of_group(g + 1, *inputs))
            # hidden: by the kernel before; of the first group, by what the caller ran since it was
            # sent
            wait(group.arrival)
            group.send_buffers.clear()  # they have been read
            del returning[:-1]  # the stream sent these before it brought this group
            results = run_kernel(g, group)
            # return_buffers are free: the stream has copied what came back before
            returning.append(self.send_back(results, return_buffers, self.of_group(g, *outputs)))
            came_back = self.stream.last_event()
            self.stream.used(*group.recv_buffers)
            group = arriving
            del results
        while_waiting()
        wait(came_back)  # hidden by while_waiting, those of the groups before by kernels
        returning.clear()

    # -- attention

    def of_group(self, g: int, *tensors: Tensor) -> list[Tensor]:
        """Return views of group g's heads (B, T/sp, U*h, D) of (B, T/sp, heads, D) tensors."""
        return [x.chunk(self.head_groups, 2)[g] for x in tensors]

    def forward(self, q, k, v):
        if self.group is None:
            return super().forward(q, k, v)
        heads, kv_heads = q.shape[2], k.shape[2]
        o = torch.empty_like(q)
        self.allocate_backward(o, kv_heads)  # as much as backward needs, from the start
        buffers = self.allocate(o, [heads, kv_heads, kv_heads], [heads])
        lse = []

        def run_kernel(g, group):
            out, part = self.attend(*group.on_heads())
            lse.append(part)
            return [out]

        first = HeadGroup(buffers[0][0])
        self.send(first, self.of_group(0, q, k, v))
        self.run(run_kernel, first, buffers, (q, k, v), (o,))
        return o, torch.stack(lse)

    def prefetch_backward(self, q, k, v, o):
        if self.group is None:
            return super().prefetch_backward(q, k, v, o)
        buffers = self.allocate_backward(o, k.shape[2])
        prefetched = Prefetched(buffers, HeadGroup(buffers[0][0], backward=True))
        self.send(prefetched.group, self.of_group(0, q, k, v, o))
        return prefetched

    def prefetch_do(self, prefetched, do):
        if prefetched is not None and self.group is not None:
            self.send(prefetched.group, self.of_group(0, do))

    def backward(self, do, q, k, v, o, lse, prefetched=None, while_waiting=do_nothing,
                 in_place=False):
        if self.group is None:
            return super().backward(do, q, k, v, o, lse, prefetched, while_waiting, in_place)
        do = do.contiguous()
        if prefetched is None:
            prefetched = self.prefetch_backward(q, k, v, o)
            self.prefetch_do(prefetched, do)

        def run_kernel(g, group):
            q, k, v, o, do = group.on_heads()
            return self.attend_backward(do, q, k, v, o, lse[g], passing=group.passing)

        grads = tuple(map(torch.empty_like, (q, k, v)))
        self.run(run_kernel, prefetched.group, prefetched.buffers, (q, k, v, o, do), grads,
                 while_waiting)
        return grads
