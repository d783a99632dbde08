"""Who holds what: parameters, gradients and optimizer states, each sharded as it likes (AMSP).

R ranks hold the states of a model with P parameters. Three factors say in how many shards each kind
lies, p | g | os | R, so that a rank holds (bf16 parameters, AdamW in float32; AMSP, section IV)

    2P/p parameters  +  2P/g gradients (4P/g with several micro-batches)  +  12P/os master, moments

Ranks stand node by node, and shards fill a node before they cross it, so every group is a block of
neighbours or a comb through blocks. With p = 2, os = 4, R = 8, where a letter is a p-shard:

    rank        0   1   2   3   4   5   6   7
    holds       a   b   a   b   a   b   a   b         p group: {0,1} {2,3} {4,5} {6,7}
    updates     a0  b0  a1  b1  a0  b0  a1  b1        os block: {0,1,2,3} {4,5,6,7}
                                                      subgroup (same p-shard in a block): {0,2} ...
                                                      across (same states): {0,4} {1,5} ...
A step of a matrix, from the events that the model raises where it uses one:

    need    gather the shards (p group), the next layer's while this one computes; in backward the
            next matrix alone, so that a gather never delays a reduction (AMSP, section V-C)
    piece   its gradient: reduce-scatter (p group), then over the replicas, under the backward
    update  AdamW on what this rank owns; the new parameters travel under the next forward, in the
            order of use, and `need` waits for them

Each kind of communication is a lane, a CUDA stream of its own: launch, compute, wait. A lane that
is switched off runs on the compute stream. Gathered weights and whole gradients live in fixed
buffers, two of each shape, that neighbouring layers take in turn; the parameters are views of them.

A sequence may lie on sp neighbouring ranks, whatever p, g and os are (InternEvo's ISP): `Ulysses`
is then the model's attention.

Left out: quantised communication, learning rates by parameter, matrices that are used twice.

Legend: R ranks, p g os factors, S elements of a matrix with padding, n subgroup size os/p; sp ranks
of a sequence, B sequences, T tokens of one, H query heads, D head width, G head groups, h heads of
a group on a rank.
"""
import contextlib
import math
import weakref
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, MetadataIndex,
                                                   TensorProperties)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from model import (Attention, Matrix, Norm, accumulation_dtype, attention_backward,
                   attention_forward, compiled, fused)

ALIGN = 128  # elements: every shard starts where the fastest kernels and copies want it
LANES = ("gather", "scatter", "reduce", "spread")
# torch 2.13 renames the flat collectives and deprecates the old names, which 2.11 has alone
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---------------------------------------------------------------------------- factors


@dataclass(frozen=True)
class Factors:
    """Numbers of shards. `second`: ZeRO++'s secondary parameter shard, which the backward gathers
    from (0: none)."""

    p: int = 1
    g: int = 1
    os: int = 1
    second: int = 0


def strategies(ranks: int, k: int) -> dict[str, Factors]:
    """The named baselines are rows of factors; k is their parameter, NAME:K."""
    return {  #                      p      g      os
        "ddp": Factors(1, 1, 1),
        "zero1": Factors(1, 1, ranks),
        "zero2": Factors(1, ranks, ranks),
        "zero3": Factors(ranks, ranks, ranks),
        "mics": Factors(k, k, k),
        "zero++": Factors(ranks, ranks, ranks, k),
        "zero1.5": Factors(1, 1, k),
    }


def parse_strategy(text: str, ranks: int) -> Factors:
    """'zero3', 'mics:4' -> factors. Raises ValueError with the names."""
    name, _, k = text.partition(":")
    table = strategies(ranks, int(k) if k.isdigit() else 0)
    with_k = ("mics", "zero++", "zero1.5")
    if name not in table or (name in with_k) != (k.isdigit() and int(k) > 0):
        names = ", ".join(n + (":K" if n in with_k else "") for n in table)
        raise ValueError(f"--strategy {text}: one of {names}")
    return table[name]


def parse_mesh(text: str, per_node: int) -> int:
    """'8' or '8x4' (GPUs in a node x nodes) -> number of shards. Raises ValueError."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(n.isdigit() and int(n) for n in parts):
        raise ValueError(f"factor {text!r}: a number or GPUs-in-a-node x nodes, as 8 or 8x4")
    inside, nodes = int(parts[0]), int(parts[1]) if len(parts) == 2 else 1
    if nodes > 1 and inside != per_node:
        raise ValueError(f"factor {text}: fill a node before crossing it: {per_node}x{nodes}")
    return inside * nodes


def legal_sizes(ranks: int, per_node: int) -> list[int]:
    """Shard counts s0 x s1: s0 divides a node's GPUs, s1 the nodes, and s1 > 1 fills its nodes."""
    nodes = ranks // per_node
    return ([s for s in range(1, per_node + 1) if per_node % s == 0]
            + [per_node * s for s in range(2, nodes + 1) if nodes % s == 0])


def legal_factors(ranks: int, per_node: int) -> list[Factors]:
    """All (p, g, os) of AMSP's rules, fewest shards first. One node of 8 has 16."""
    sizes = legal_sizes(ranks, per_node)
    return [Factors(p, g, os) for p in sizes for g in sizes for os in sizes
            if os % p == 0 and g in (p, os)]


def check_factors(f: Factors, ranks: int, per_node: int) -> None:
    """Raise ValueError naming the broken rule and the nearest legal factors."""
    legal, sizes = legal_factors(ranks, per_node), legal_sizes(ranks, per_node)
    second_fits = not f.second or (f.second in sizes and f.p % f.second == 0)
    if Factors(f.p, f.g, f.os) in legal and second_fits:
        return
    near = min(legal, key=lambda o: abs(o.p - f.p) + abs(o.g - f.g) + abs(o.os - f.os))
    nearest = f"--p {near.p} --g {near.g} --os {near.os}"
    if f.second:
        nearest = "--strategy zero++:%d" % min((s for s in sizes if ranks % s == 0),
                                               key=lambda s: abs(s - f.second))
    if bad := [s for s in (f.p, f.g, f.os, f.second or 1) if s not in sizes]:
        rule = f"{bad[0]} shards do not fit {ranks} ranks, {per_node} a node: {sizes}"
    elif not second_fits:
        rule = f"the secondary shard, {f.second}, must divide p"
    elif f.os % f.p:
        rule = "the dependency rule is p <= g <= os, each dividing the next"
    else:
        rule = "g must be p or os"
    raise ValueError(f"p={f.p} g={f.g} os={f.os}: {rule}; nearest: {nearest}")


def state_bytes(params: int, f: Factors, dtype: torch.dtype, several: bool) -> dict[str, float]:
    """Bytes of states a rank (AMSP, section IV); `several` micro-batches add up in float32."""
    e, wide = dtype.itemsize, accumulation_dtype(dtype).itemsize
    return {"parameters": e * params / f.p + (e * params / f.second if f.second else 0),
            "gradients": (wide if several else e) * params / f.g,
            "optimizer": 3 * wide * params / f.os}


# ---------------------------------------------------------------------------- lanes and shares


class Lane:
    """A stream for one kind of communication, of high priority: its few blocks go before the many
    of a kernel that computes, not behind its last. On a CPU, or switched off, it is the compute
    stream: then everything happens in the order of the program and nothing needs a wait."""

    def __init__(self, device: torch.device, on: bool):
        self.on, gpu = on, device.type == "cuda"
        self.stream = torch.cuda.Stream(device, priority=-1) if on and gpu else None

    @contextlib.contextmanager
    def after_compute(self):
        """Launch what follows on the lane, after all that compute has enqueued so far."""
        if self.stream is None:
            with fused() if self.on else contextlib.nullcontext():
                yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def mark(self):
        """A point in the lane that `wait` can wait for."""
        return self.stream.record_event() if self.stream else None


def wait(event) -> None:
    """The current stream goes on when the event is reached; the host does not stop."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


@dataclass
class Buffer:
    """A fixed place for a whole matrix, a gathered weight or a local gradient, used in turns."""

    data: Tensor  # (S,)
    holder: object = None  # the share whose weight it holds
    event: object = None  # of the lane that filled it (weight) or that still reads it (gradient)


class Groups:
    """Process groups by their ranks, each lane with communicators of its own; made once. timeout:
    of their collectives, PyTorch's if none is given."""

    def __init__(self, timeout: timedelta | None = None):
        self.made: dict[tuple, dist.ProcessGroup] = {}
        self.timeout = timeout

    def get(self, lane: str, key) -> dist.ProcessGroup | None:
        """The ranks r with this rank's key(r); None if it is alone. A collective of all ranks."""
        members: dict = {}
        for r in range(dist.get_world_size()):
            members.setdefault(key(r), []).append(r)
        mine = members[key(dist.get_rank())]
        if len(mine) == 1:
            return None
        for ranks in members.values():
            if (lane, *ranks) not in self.made:
                group = self.made[lane, *ranks] = dist.new_group(ranks, timeout=self.timeout)
                if ranks == mine and torch.cuda.is_initialized():
                    # NCCL takes its memory now, not amid a step that leaves it none
                    one = torch.zeros(1, device="cuda")
                    _all_gather(one.new_empty(len(ranks)), one, group=group)
                    dist.all_reduce(one, group=group)
        return self.made[lane, *mine]


class Share:
    """What this rank holds of one matrix. States fills in

    shard (S/p) of the weight, second (S/K) of ZeRO++'s, store (S/g) of the gradient; start and size
    of what this rank updates, within the matrix; master, exp_avg, exp_avg_sq (size); own_weight
    and own_grad, the same part of shard and store; owner, its subgroup index in the inter layout.
    """

    def __init__(self, name: str, module: Matrix, padded: int):
        self.name, self.module, self.padded = name, module, padded  # S
        self.count = module.weight.numel()
        self.spread_event = None  # the new parameters are in `shard`
        self.pieces, self.done = 1, 0  # of its gradient: in a backward pass, and of them computed


class Flat(Tensor):
    """A part of a flat tensor, as torch.distributed.checkpoint saves and loads it: a tensor can be
    read back in any other parts, so any factors and layout resume any others."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # results are plain tensors

    @staticmethod
    def of(part: Tensor, start: int, total: int) -> "Flat":
        flat = part.as_subclass(Flat)
        flat.part, flat.start, flat.total = part, start, torch.Size([total])
        return flat

    def size(self):
        return self.total

    def __create_chunk_list__(self):
        offset, size = torch.Size([self.start]), self.part.shape
        return [ChunkStorageMetadata(offset, size)] if self.part.numel() else []

    def __create_write_items__(self, fqn: str, _):
        properties = TensorProperties.create_from_tensor(self.part)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk, properties, self.total))
                for chunk in self.__create_chunk_list__()]

    def __get_tensor_shard__(self, index):
        return self.part


@compiled
def adamw(weight: Tensor, master: Tensor, m: Tensor, v: Tensor, grad: Tensor, scalars: Tensor,
          beta1: float, beta2: float, eps: float, decay: float) -> None:
    """One AdamW update of flat tensors in place: 14 bytes read and 14 written a bf16 parameter.

    scalars: learning rate, factor on the gradient (clipping), 1 - beta1^t, 1 - beta2^t, and 1 if
    the gradients are finite, else 0: then nothing changes. They are on the device, so that
    nothing waits for the host.
    """
    lr, clip, correct1, correct2, finite = scalars.unbind()
    g = grad.to(master.dtype) * clip
    m_new = m + (1 - beta1) * (g - m)
    v_new = v + (1 - beta2) * (g * g - v)
    step = lr / correct1 * m_new / ((v_new / correct2).sqrt() + eps)
    new = torch.where(finite > 0, master * (1 - lr * decay) - step, master)
    m.copy_(torch.where(finite > 0, m_new, m))
    v.copy_(torch.where(finite > 0, v_new, v))
    master.copy_(new)
    weight.copy_(new)


# ---------------------------------------------------------------------------- sequences


def legal_sp(heads: int, ranks: int) -> list[int]:
    """Sequence degrees: they divide the ranks and the query heads."""
    return [n for n in range(1, ranks + 1) if ranks % n == 0 and heads % n == 0]


def reach_each_other() -> bool:
    """This GPU reads and writes the memory of the node's others."""
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    return all(torch.cuda.can_device_access_peer(here, i) for i in range(count) if i != here)


def move(x: Tensor, into: Tensor) -> None:
    """Copy heads (..., D) of any strides, 16 bytes at a time: PyTorch's copy goes by elements."""
    if x.shape[-1] * x.itemsize % 16 == 0:
        x, into = x.view(torch.complex128), into.view(torch.complex128)
    into.copy_(x)


class Exchange:
    """All-to-alls between the ranks of a group, on the stream that is current.

    near: every rank reaches the others' memory (GPUs of one node). Then copy engines push each part
    to its place there, between two barriers of one warp, and no multiprocessor is taken from the
    attention that runs beside it; elsewhere it is the group's own collective, whose blocks are.
    """

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, group: dist.ProcessGroup, near: bool, timeout: timedelta | None = None):
        self.group, self.near = group, near
        self.timeout = round(1e3 * (timeout or timedelta(minutes=10)).total_seconds())  # ms
        self.alive.add(self)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.memory, self.handle = torch.empty(0), None

    @classmethod
    def bytes(cls) -> int:
        """What ranks have mapped from each other: it lies outside PyTorch's allocator."""
        return sum(x.memory.nbytes for x in cls.alive)

    def room(self, shapes: list[tuple[int, ...]], like: Tensor) -> list[Tensor]:
        """Places to receive tensors of these shapes; near, all calls share them: what was received
        must be read on this stream, or before it goes on. A collective where they grow."""
        if not self.near:
            return [like.new_empty(shape) for shape in shapes]
        sizes = [-(-math.prod(shape) // ALIGN) * ALIGN for shape in shapes]
        if self.memory.numel() < sum(sizes) and dist.get_backend(self.group) == "fake":
            self.memory = like.new_empty(sum(sizes))  # of a simulated step
        elif self.memory.numel() < sum(sizes):
            torch.cuda.synchronize()  # nobody uses the old place any more
            dist.barrier(self.group)
            self.memory, self.handle = torch.empty(0), None
            torch.cuda.empty_cache()
            self.memory = symm_mem.empty(sum(sizes), dtype=like.dtype, device=like.device)
            self.handle = symm_mem.rendezvous(self.memory, self.group)
        parts = self.memory[: sum(sizes)].split(sizes)
        return [x[: math.prod(shape)].view(shape) for x, shape in zip(parts, shapes)]

    def run(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Part i of each first tensor (n, ...) goes to rank i, into part `rank` of its second one,
        which `room` has given."""
        if self.handle is None:  # not near, or simulated
            for there, here in pairs:
                dist.all_to_all_single(here, there, group=self.group)
            return
        self.handle.barrier(timeout_ms=self.timeout)  # all have read what they received before
        for i in range(self.ranks):
            peer = (self.rank + i) % self.ranks  # another one for each rank
            for there, here in pairs:
                mine = here[self.rank]
                self.handle.get_buffer(peer, mine.shape, mine.dtype, mine.storage_offset()).copy_(
                    there[peer])
        self.handle.barrier(timeout_ms=self.timeout)  # all parts have arrived


class Ulysses(Attention):
    """Attention over a sequence that lies on sp neighbouring ranks (InternEvo's ISP, Ulysses).

    A rank holds T/sp tokens of all heads. An all-to-all gives it all T tokens of H/sp heads, the
    kernel runs on them, and an all-to-all brings the output back:

        q (B, T/sp, sp*G*h, D) -> group by group (B, T, h, D) -> kernel -> o (B, T/sp, H, D)

    G head groups follow one another: the next one's all-to-all runs under this one's attention, on
    a lane of its own, and only two groups are gathered at a time. Key/value heads that sp * G does
    not divide are repeated until it does; their gradients are summed. lse: (G, B, h, T).

    per_node: ranks of a node (0: unknown), for Exchange. poison, delay: for tests; what was
    received becomes NaN after use, and the lane starts so many GPU cycles late. Whatever a lane
    reads or writes is allocated on the compute stream and held until the compute stream has waited
    for the lane: so memory is never given to another too early.
    """

    def __init__(self, kernel: str, sp: int, groups: Groups, lane: Lane, head_groups: int = 1,
                 per_node: int = 0, poison: bool = False, delay: int = 0):
        super().__init__(kernel)
        self.sp, self.lane, self.head_groups = sp, lane, head_groups
        self.poison, self.delay = poison, delay
        self.group, self.begun = groups.get("sequence", lambda r: r // sp), None
        if self.group:
            self.one_node = per_node % sp == 0 < per_node
            near = lane.stream is not None and self.one_node and reach_each_other()
            self.exchange = Exchange(self.group, near, groups.timeout)

    def _repeated(self, *tensors: Tensor) -> list[Tensor]:
        """k, v with as many copies of a head as give each of the sp * G parts whole ones."""
        heads = tensors[0].shape[2]
        copies = math.lcm(heads, self.sp * self.head_groups) // heads
        return [x.repeat_interleave(copies, 2) if copies > 1 else x for x in tensors]

    def _parts(self, x: Tensor) -> Tensor:
        """(B, T/sp, H, D) -> a view (G, sp, B, T/sp, h, D): what a group sends to each rank."""
        return x.unflatten(2, (self.sp, self.head_groups, -1)).permute(3, 2, 0, 1, 4, 5)

    def _gather(self, parts: list[Tensor], got: list[Tensor]):
        """Launch a group's all-to-all from tokens to heads: parts (sp, B, T/sp, h, D), what goes to
        each rank. Returns the event of the arrival in `got`, and what must live until then."""
        send = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parts]
        with self.lane.after_compute():
            if self.delay and self.lane.stream:
                torch.cuda._sleep(self.delay)
            for x, there in zip(parts, send):
                move(x, there)
            self.exchange.run(list(zip(send, got)))
        return self.lane.mark(), send

    def _scatter(self, results: list[Tensor], got: list[Tensor], outputs: list[Tensor]):
        """Launch a group's all-to-all from heads (B, T, h, D) to tokens, into outputs (sp, B, T/sp,
        h, D). Returns what must live until the lane is done."""
        # (B, T, h, D) -> (sp, B, T/sp, h, D); of one sequence: a view
        send = [x.unflatten(1, (self.sp, -1)).transpose(0, 1).contiguous() for x in results]
        with self.lane.after_compute():
            self.exchange.run(list(zip(send, got)))
            for here, out in zip(got, outputs):
                move(here, out)
                if self.poison:
                    here.fill_(torch.nan)
        return send

    def _places(self, inputs: list[Tensor], outputs: list[Tensor]):
        """Where groups arrive on heads, in turn, and where outputs come back: (sp, B, T/sp, h, D),
        the ranks' tokens."""
        shapes = [self._parts(x).shape[1:] for x in (*inputs, *inputs, *outputs)]
        room, n = self.exchange.room(shapes, inputs[0]), len(inputs)
        return (room[:n], room[n : 2 * n]), room[2 * n :]

    def _run(self, inputs: list[Tensor], outputs: list[Tensor], kernel, begun: list = (),
             late=lambda: None) -> None:
        """kernel(j, inputs on heads) -> outputs on heads, group by group, copied into outputs.
        begun: places, and what of the first group is on its way; it is emptied, so that nothing
        outlives its use. late: called while the last outputs are on their way."""
        (slots, back), event, sent = begun or (self._places(inputs, outputs), None, [])
        if begun:
            begun.clear()
        inputs, outputs = ([self._parts(x) for x in xs] for xs in (inputs, outputs))
        if (n := len(sent)) < len(inputs):
            event, send = self._gather([x[0] for x in inputs[n:]], slots[0][n:])
            sent, send = sent + send, None
        ahead, leaving = (event, sent), []
        del sent
        for j in range(self.head_groups):
            (event, send), ahead = ahead, None
            if j + 1 < self.head_groups:
                ahead = self._gather([x[j + 1] for x in inputs], slots[(j + 1) % 2])
            wait(event)
            del send, leaving[:-1]  # the lane had brought these away before it gathered this group
            heads = [x.transpose(0, 1).flatten(1, 2) for x in slots[j % 2]]  # (B, T, h, D)
            leaving.append(self._scatter(kernel(j, heads), back, [x[j] for x in outputs]))
            if self.poison:
                for x in slots[j % 2]:
                    x.fill_(torch.nan)
        late()
        wait(self.lane.mark())

    def forward(self, q, k, v):
        if self.group is None:
            return super().forward(q, k, v)
        assert self.begun is None, "backward was announced"
        o, lse, (k, v) = torch.empty_like(q), [], self._repeated(k, v)
        self._places([q, k, v, q, q], [q, k, v])  # as much as backward needs, from the start

        def kernel(j, heads):
            out, part = attention_forward(self.kernel, *heads)
            lse.append(part)
            return [out]

        self._run([q, k, v], [o], kernel)
        return o, torch.stack(lse)

    def ahead(self, *inputs):
        """Launch the first group's way of what backward gets: q, k, v, o, and then do."""
        if self.group is None:
            return
        if self.begun is None:
            q, k, v, o = inputs
            inputs = [q, *self._repeated(k, v), o]
            places = self._places([*inputs, o], inputs[:3])
            self.begun = [places, None, []], inputs  # the lane reads repeated heads, too
        begun, _ = self.begun
        (slots, _), _, sent = begun
        begun[1], more = self._gather([self._parts(x)[0] for x in inputs], slots[0][len(sent) :])
        sent += more

    def backward(self, do, q, k, v, o, lse, late=lambda: None):
        if self.group is None:
            return super().backward(do, q, k, v, o, lse, late)
        (begun, inputs), self.begun = self.begun or ((), [q, *self._repeated(k, v), o]), None
        heads, grads = k.shape[2], [torch.empty_like(x) for x in inputs[:3]]

        def kernel(j, on_heads):
            *inputs, do = on_heads
            return attention_backward(self.kernel, do, *inputs, lse[j])

        self._run([*inputs, do.contiguous()], grads, kernel, begun, late)
        # a head's copies: the gradients of all are its own
        return grads[0], *(x.unflatten(2, (heads, -1)).sum(3) if x.shape[2] > heads else x
                           for x in grads[1:])


# ---------------------------------------------------------------------------- states


class States:
    """A model's parameters, gradients and AdamW states on this rank.

    model: built on any device, "meta" best: its parameters are replaced. micro_batches: forward and
    backward passes between two updates. pieces: of a layer's gradient in each, if its tokens run in
    chunks (offload.py). layout: "inter" (whole p-shards have one owner in a
    subgroup) or "intra" (each is split evenly). off: lanes without overlap. reduce_dtype: of
    gradients on the wire, the compute dtype by default. recompute: a layer's backward uses its
    matrices more than once, so they are gathered together. poison: released weights and used
    gradients become NaN, for tests.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype,
                 micro_batches: int = 1, factors: Factors = Factors(), layout: str = "intra",
                 groups: Groups | None = None, off: tuple[str, ...] = (),
                 reduce_dtype: torch.dtype | None = None,
                 recompute: bool = False, pieces: int = 1, bucket_bytes: int = 2**25,
                 poison: bool = False,
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, decay: float = 0.1):
        self.f, self.layout, self.recompute, self.poison = factors, layout, recompute, poison
        self.betas, self.eps, self.decay, self.bucket_bytes = betas, eps, decay, bucket_bytes
        self.device, self.dtype, self.micro_batches = device, dtype, micro_batches
        self.wide = accumulation_dtype(dtype)
        self.wire = reduce_dtype or dtype
        several = micro_batches > 1 or self.wire != dtype
        self.grad_dtype, self.pieces = self.wide if several else dtype, pieces
        self.lanes = {name: Lane(device, name not in off) for name in LANES}
        self.prefetch = "gather" not in off
        self._make_groups(groups or Groups())
        self._make_shares(model)
        self._make_norms(model)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.scalars = torch.ones(5, dtype=self.wide, device=device)
        self.backward = False
        self.at, self.marks = None, deque(maxlen=10 * len(self.units))  # (phase, its event)
        self.begin()

    def _make_groups(self, groups: "Groups") -> None:
        """The groups that this rank is in, by the ranks' arithmetic; None where it is alone."""
        rank, f, group = dist.get_rank(), self.f, groups.get

        def same_shard(r):
            return r // f.os, r % f.p

        self.p_gather = group("gather", lambda r: r // f.p)
        self.p_second = group("gather", lambda r: r // f.second) if f.second else None
        self.p_reduce = group("reduce", lambda r: r // f.p)
        self.sub_reduce = group("reduce", same_shard)
        self.sub_spread = group("spread", same_shard)
        self.across = group("reduce", lambda r: r % f.os)
        self.replicas = group("reduce", lambda r: r % f.p)
        self.block = group("reduce", lambda r: r // f.os)
        self.p_index, self.sub_index, self.n = rank % f.p, rank % f.os // f.p, f.os // f.p
        # global rank of each member of this rank's subgroup: the roots of its broadcasts
        self.sub_ranks = [rank // f.os * f.os + i * f.p + self.p_index for i in range(self.n)]

    def _make_shares(self, model: nn.Module) -> None:
        step, units = self.f.os * ALIGN, {}
        self.shares: dict[Matrix, Share] = {}
        for name, module in model.named_modules():
            if isinstance(module, Matrix):
                padded = -(-module.weight.numel() // step) * step
                s = self.shares[module] = Share(f"{name}.weight", module, padded)
                units.setdefault(name.rpartition(".")[0] or name, []).append(s)
        self.by_name = {s.name: s for s in self.shares.values()}
        self.units = list(units.values())  # in the order of use: embedding, layers, head
        self.unit_of = {s.module: i for i, unit in enumerate(self.units) for s in unit}
        for s in (s for unit in self.units[1:-1] for s in unit):
            s.pieces = self.pieces
        order = [s for unit in reversed(self.units[1:-1]) for s in reversed(unit)]
        self.before = dict(zip(order, order[1:]))  # backward: the matrix that is needed next

        loads = [0] * self.n  # greedy, largest first: which subgroup member updates a p-shard
        for s in sorted(self.shares.values(), key=lambda s: -s.padded):
            s.owner = loads.index(min(loads))
            loads[s.owner] += s.padded
        self.imbalance = max(loads) * self.n / sum(loads) - 1 if self.layout == "inter" else 0.0
        pools: tuple[dict, dict] = {}, {}  # gathered weights, local gradients
        for s in self.shares.values():
            self._allocate(s, *pools)

    def _allocate(self, s: Share, weights: dict[tuple, Buffer], grads: dict[tuple, Buffer]) -> None:
        f, part = self.f, s.padded // self.f.p

        def zeros(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=self.device)

        def buffer(pool: dict[tuple, Buffer], dtype: torch.dtype) -> Buffer:
            """One of two buffers of a kind of matrix, by the parity of the layer."""
            key = s.padded, s.name.split(".")[-2], self.unit_of[s.module] % 2
            if key not in pool:
                pool[key] = Buffer(zeros(s.padded, dtype))
            return pool[key]

        s.shard = zeros(part, self.dtype)
        s.second = zeros(s.padded // f.second, self.dtype) if f.second else None
        s.full = Buffer(s.shard, s) if f.p == 1 else buffer(weights, self.dtype)
        if self.layout == "inter":
            offset, s.size = 0, part if s.owner == self.sub_index else 0
        else:
            offset, s.size = self.sub_index * (part // self.n), part // self.n
        s.start = self.p_index * part + offset
        s.store = zeros(part if f.g == f.p else s.size, self.grad_dtype)
        summed = self.wide if s.pieces > 1 else self.dtype  # where the pieces add up
        stay = f.g == 1 and (s.pieces == 1 or self.grad_dtype == self.wide)
        s.local = Buffer(s.store) if stay else buffer(grads, summed)
        s.own_weight = s.shard[offset : offset + s.size]
        s.own_grad = s.store[offset : offset + s.size] if f.g == f.p else s.store
        s.master, s.exp_avg, s.exp_avg_sq = (zeros(s.size, self.wide) for _ in range(3))
        s.module.weight = nn.Parameter(s.full.data[: s.count].view(s.module.shape))
        s.module.events = self

    def _make_norms(self, model: nn.Module) -> None:
        """Norm weights, on every rank: views of one vector, float32 or wider, their own masters."""
        norms = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, Norm)}
        total = sum(m.weight.numel() for m in norms.values())
        self.norm_states = {kind: torch.zeros(total, dtype=self.wide, device=self.device)
                            for kind in ("master", "exp_avg", "exp_avg_sq")}
        self.norm_grad = torch.zeros(total, dtype=self.wide, device=self.device)
        self.norm_parts, start = {}, 0
        for name, module in norms.items():
            part = self.norm_parts[name] = slice(start, start + module.weight.numel())
            module.weight = nn.Parameter(self.norm_states["master"][part])
            module.weight.grad = self.norm_grad[part]  # autograd adds to it in place
            start = part.stop

    # -- parameters: need, release, and the gathers ahead of them

    def need(self, module: nn.Module) -> Tensor:
        s, unit = self.shares[module], self.unit_of[module]
        if unit == 0:
            self.backward = False  # a forward pass starts
        if self.at != (self.backward, unit):
            self._mark(unit)
        if self.f.p == 1:
            wait(s.spread_event)
            s.spread_event = None
            return module.weight
        self._gather([s])  # if it was not launched ahead
        if not self.prefetch:
            pass
        elif self.backward and self.recompute:  # the layer before, once for both of its passes
            self._gather(self.units[unit - 1] if unit > 1 else [])
        elif self.backward:  # the next matrix alone
            self._gather([self.before[s]] if s in self.before else [])
        elif s is self.units[unit][0] and unit + 1 < len(self.units):  # all of the next layer
            self._gather(self.units[unit + 1])
        wait(s.full.event)
        return module.weight

    def _mark(self, unit: int) -> None:
        """A point in the compute stream that `progress` can ask for."""
        self.at, last = (self.backward, unit), len(self.units) - 1
        part = {0: "embedding", last: "head"}.get(unit, f"layer {unit}/{last - 1}")
        cuda = self.device.type == "cuda"
        self.marks.append((f"{'backward' if self.backward else 'forward'}, {part}",
                           torch.cuda.current_stream().record_event() if cuda else None))

    def progress(self) -> str:
        """The last phase that the device has begun, without waiting for it; any thread may ask."""
        text = ""
        while self.marks and (self.marks[0][1] is None or self.marks[0][1].query()):
            text = self.marks.popleft()[0]
        return text

    def release(self, module: nn.Module) -> None:
        """Nothing to free: the buffer goes to the layer after the next. Poison shows late reads."""
        if self.poison and self.f.p > 1:
            s = self.shares[module]
            s.full.data.fill_(torch.nan)
            s.full.holder = None

    def _gather(self, shares: list[Share]) -> None:
        """Launch the all-gather of the weights that their buffers do not hold yet."""
        shares = [s for s in shares if s.full.holder is not s]
        if not shares:
            return
        with self.lanes["gather"].after_compute():
            for s in shares:
                wait(s.spread_event)
                s.spread_event = None
                if s.second is None or not self.backward:
                    _all_gather(s.full.data, s.shard, group=self.p_gather)
                elif self.p_second:
                    _all_gather(s.full.data, s.second, group=self.p_second)
                else:
                    s.full.data.copy_(s.second)
                if s.second is not None and not self.backward:
                    k, size = dist.get_rank() % self.f.second, s.second.numel()
                    s.second.copy_(s.full.data[k * size : (k + 1) * size])
        event = self.lanes["gather"].mark()
        for s in shares:
            s.full.holder, s.full.event = s, event

    # -- gradients: pieces, and the reductions behind them

    def begin(self) -> None:
        """A step starts: no gradient of the last one counts."""
        self.micro_batch, self.bucket = 0, []
        self.norm_grad.zero_()

    def end_micro_batch(self) -> None:
        self.micro_batch += 1

    def piece(self, module: nn.Module, compute) -> None:
        """A piece of a matrix's gradient; after the last of a micro-batch the reductions follow."""
        s, self.backward = self.shares[module], True
        whole = s.local.data is s.store  # gradients add up where they stay
        if not whole and s.done == 0:
            wait(s.local.event)  # the lane has read what the layer after the next left here
        beta = int(s.done > 0 or whole and self.micro_batch > 0)
        compute(s.local.data[: s.count].view(module.shape), beta)
        s.done = (s.done + 1) % s.pieces
        if s.done:
            return
        last = self.micro_batch == self.micro_batches - 1
        if not whole:
            with self.lanes["scatter"].after_compute():
                self._scatter(s, last)
                if self.poison:
                    s.local.data[: s.count].fill_(torch.nan)
                s.local.event = self.lanes["scatter"].mark()
        if last:
            self._synchronise(s)

    def _scatter(self, s: Share, last: bool) -> None:
        """This micro-batch's gradient: from the whole matrix to what is kept, and added to it."""
        x = s.local.data.to(self.wire) if self.f.g > 1 else s.local.data  # _reduce sends it
        if self.p_reduce:
            x = self._reduce_scatter(x, s.padded // self.f.p, self.p_reduce)
        if self.f.g > self.f.p and self.layout == "intra":
            x = self._reduce_scatter(x, s.size, self.sub_reduce)
        elif self.f.g > self.f.p:  # inter: all-reduce, then select & drop
            if last and self.micro_batch:
                x[: s.size] += s.store  # what was kept joins before the final sum, once
            dist.all_reduce(x, group=self.replicas if last else self.sub_reduce)
            x = x[: s.size]
        final = last and self.f.g > self.f.p and self.layout == "inter"
        s.store.copy_(x) if final or self.micro_batch == 0 else s.store.add_(x)

    def _synchronise(self, s: Share) -> None:
        """Sum what is kept over the replicas, in buckets: small matrices travel together."""
        if self.replicas is None or (self.f.g > self.f.p and self.layout == "inter"):
            return  # there are none, or _scatter has done it
        self.bucket.append(s)
        if sum(b.store.nbytes for b in self.bucket) >= self.bucket_bytes:
            self._reduce_bucket()

    def _reduce_bucket(self) -> None:
        bucket, self.bucket = self.bucket, []
        with self.lanes["reduce"].after_compute():
            wait(self.lanes["scatter"].mark())
            self._reduce(bucket)

    def _reduce(self, bucket: list[Share]) -> None:
        intra, parts = self.layout == "intra", [s.store.to(self.wire) for s in bucket]
        if intra and self.f.g == self.f.p and self.n > 1:
            parts = [self._reduce_scatter(x, s.size, self.sub_reduce)
                     for s, x in zip(bucket, parts)]
        if group := self.across if intra else self.replicas:
            fake = dist.get_backend(group) == "fake"  # of a simulated step: it cannot do this
            with contextlib.nullcontext() if fake else dist._coalescing_manager(group):
                for x in parts:
                    dist.all_reduce(x, group=group)
        for s, x in zip(bucket, parts):
            if x is not s.store:
                (s.own_grad if intra else s.store).copy_(x)

    @staticmethod
    def _reduce_scatter(x: Tensor, size: int, group) -> Tensor:
        out = torch.empty(size, dtype=x.dtype, device=x.device)
        _reduce_scatter(out, x, group=group)
        return out

    def reduce(self) -> None:
        """After the last backward: the rest of the buckets and the norms; compute waits for all."""
        if self.bucket:
            self._reduce_bucket()
        dist.all_reduce(self.norm_grad)
        for name in ("scatter", "reduce"):
            wait(self.lanes[name].mark())

    # -- the update

    def update(self, lr: float, clip: float, loss: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """AdamW with the gradient's global norm clipped to `clip` (0: off).

        Returns the norm, and whether it and the loss of all ranks are finite, on the device; if
        not, nothing was changed.
        """
        parts = [torch.linalg.vector_norm(s.own_grad, dtype=self.wide)
                 for s in self.shares.values() if s.size]
        squares = torch.stack(parts).square().sum() if parts else self.scalars.new_zeros(())
        if self.block:  # the ranks of a block own every element once
            dist.all_reduce(squares, group=self.block)
        norm = (squares + self.norm_grad.square().sum()).sqrt()
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
        self.updates += finite
        t = self.updates.to(self.wide).clamp(min=1)
        self.scalars[0].fill_(lr)
        self.scalars[1].copy_((clip / (norm + 1e-6)).clamp(max=1) if clip else norm.new_ones(()))
        self.scalars[2].copy_(1 - self.betas[0] ** t)
        self.scalars[3].copy_(1 - self.betas[1] ** t)
        self.scalars[4].copy_(finite)
        constants = self.scalars, *self.betas, self.eps
        copy = torch.empty_like(self.norm_grad)  # norm weights are their own masters
        adamw(copy, *self.norm_states.values(), self.norm_grad, *constants, 0.0)
        for unit in self.units:
            for s in unit:
                if s.size:
                    adamw(s.own_weight, s.master, s.exp_avg, s.exp_avg_sq, s.own_grad, *constants,
                          self.decay)
            self._spread(unit)
        return norm, finite

    def _spread(self, unit: list[Share]) -> None:
        """Launch the travel of a unit's new parameters from their owners to the subgroup."""
        if self.f.p > 1:
            for s in unit:
                s.full.holder = None  # what was gathered is old
        if self.n == 1:
            return
        with self.lanes["spread"].after_compute(), self._grouped(self.sub_spread):
            for s in unit:
                if self.layout == "inter":
                    dist.broadcast(s.shard, self.sub_ranks[s.owner], group=self.sub_spread)
                else:  # gloo may not read where it writes
                    gpu = self.device.type == "cuda"
                    _all_gather(s.shard, s.own_weight if gpu else s.own_weight.clone(),
                                group=self.sub_spread)
        event = self.lanes["spread"].mark()
        for s in unit:
            s.spread_event = event

    def _grouped(self, group):
        """One launch for all broadcasts of a unit, whose owners differ (NCCL alone can)."""
        if self.layout == "inter" and self.device.type == "cuda":
            return dist._coalescing_manager(group, device=self.device)
        return contextlib.nullcontext()

    # -- loading and saving

    def load(self, name: str, tensor: Tensor) -> None:
        """Set a parameter, each rank its shards, from the whole tensor of any dtype and device."""
        if name in self.norm_parts:
            self.norm_states["master"][self.norm_parts[name]].copy_(tensor)
            return
        s, flat = self.by_name[name], tensor.reshape(-1)
        for part, start in ((s.shard, self.p_index * s.shard.numel()), (s.master, s.start)):
            values = flat[start : start + part.numel()]
            part[: values.numel()].copy_(values)

    def full(self, name: str) -> Tensor:
        """A whole parameter at the optimizer's precision; a collective of all ranks."""
        if name in self.norm_parts:
            return self.norm_states["master"][self.norm_parts[name]]
        s = self.by_name[name]
        whole = torch.zeros(s.padded, dtype=self.wide, device=self.device)
        whole[s.start : s.start + s.size] = s.master
        if self.block:
            dist.all_reduce(whole, group=self.block)  # an element's one owner, and zeros
        return whole[: s.count].view(s.module.shape)

    def state_dict(self) -> dict:
        """By parameter name, free of padding: what a checkpoint holds and is loaded into."""
        out = {"updates": self.updates}
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            for name, part in self.norm_parts.items():
                out[f"{kind}.{name}"] = self.norm_states[kind][part]
            for s in self.shares.values():
                part = getattr(s, kind)[: max(0, s.count - s.start)]
                out[f"{kind}.{s.name}"] = Flat.of(part, s.start, s.count)
        return out

    def loaded(self) -> None:
        """After a checkpoint was read into state_dict(): the weights follow their masters."""
        for unit in self.units:
            for s in unit:
                s.own_weight.copy_(s.master)
            self._spread(unit)

    def bytes(self) -> dict[str, int]:
        """What this rank really holds of each kind, the norms apart."""
        shares = self.shares.values()
        return {"parameters": sum(s.shard.nbytes + (s.second.nbytes if s.second is not None else 0)
                                  for s in shares),
                "gradients": sum(s.store.nbytes for s in shares),
                "optimizer": sum(s.master.nbytes + s.exp_avg.nbytes + s.exp_avg_sq.nbytes
                                 for s in shares)}
