"""Compare the seconds and bytes of a plan with those counted by hand, launched, and measured."""

import sys
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from pytest import approx, raises
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import costs
import hardware
import model as m
import offload
import ops
import optim
import pipeline
import planner
import shard
from helpers import SMALL_PLAN, built, planned_run, round_machine
from test_all import ROOT, parametrize


def test_legal_factors_and_their_bytes():
    """Shards fill a node before they cross it, p divides os, and g is p or os (AMSP). The bytes of
    model states follow from the factors.

    Catches an illegal factor that is accepted, and bytes of states that lack a term.
    """
    assert shard.legal_sizes(36, 12) == [1, 2, 3, 4, 6, 12, 36]
    # 3, 6 and 12 divide 12 ranks, but neither divide a node's 8 ranks nor are multiples of 8
    assert shard.legal_sizes(12, 8) == shard.legal_sizes(4, 8) == [1, 2, 4]
    legal = shard.legal_factors(8, 8)
    # p and os are equal in 4 cases; in 6 cases they differ, and g is p or os
    assert len(set(legal)) == 4 + 2 * 6 and legal[0] == shard.Factors(1, 1, 1)
    for row in ("ddp 1 1 1", "zero2 1 8 8", "zero3 8 8 8", "mics:4 4 4 4", "zero1.5:2 1 1 2"):
        name, *f = row.split()
        assert shard.parse_strategy(name, 8) == shard.Factors(*map(int, f))
    for f, rule in (
        ((1, 2, 4), "g must be p or os"),
        ((3, 3, 3), "3 shards do not fit 8 ranks"),
        ((4, 4, 2), "dependency rule"),
    ):
        with raises(
            ValueError, match=rf"{rule}.*the nearest legal choice is --p \d --g \d --os \d$"
        ):
            shard.check_factors(shard.Factors(*f), 8)
    for batch, grad_sums, gradients in ((8, "fp32", 0.5), (16, "fp32", 1), (16, "dtype", 0.5)):
        plan = replace(SMALL_PLAN, factors=shard.Factors(2, 4, 8), batch=batch, grad_sums=grad_sums)
        need = [plan.params, gradients * plan.params, 1.5 * plan.params]
        assert [*costs.state_bytes(plan).values()] == need


@parametrize(
    "factors, layout, place, optimizer",
    [
        ((1, 1, 1), "intra", "gpu", "adamw"),
        ((1, 1, 4), "intra", "host", "adamw"),
        ((2, 2, 8), "intra", "gpu", "adamw-bf16"),
        ((2, 8, 8), "intra", "host", "adamw-bf16"),
        ((2, 8, 8), "inter", "gpu", "adamw"),
        ((2, 2, 8), "inter", "host", "adamw"),
        ((1, 8, 8), "inter", "host", "muon"),  # its pieces are whole matrices
        ((2, 2, 8), "intra", "both", "adamw"),
        ((1, 1, 4), "intra", "both", "adamw-bf16"),
        ((8, 8, 8), "inter", "both", "adamw"),  # each rank owns its p-shard of all matrices
    ],
)
def test_bytes_of_states_are_what_shard_allocates(factors, layout, place, optimizer, monkeypatch):
    """Rank 0 of 8 allocates the bytes of model states that are predicted, on the GPU and on the
    host, and the buffers through which states stream from the host. In layout inter, rank 0 owns
    the largest matrix, which is larger than the mean of all owners. Place "both": of two layers,
    the first has its states on the GPU, and so has the embedding.

    Catches bytes of a dtype, of an owner or of a buffer that are not counted.
    """
    for module in (costs, optim):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 1000)
    both = place == "both"
    # matrices are multiples of 8 * 128 elements
    cfg = m.ModelConfig(128, 64, 2 if both else 1, 4, 2, 128, 16)
    plan = costs.Plan(
        cfg,
        torch.bfloat16,
        8,
        8,
        64,
        batch=8,
        factors=shard.Factors(*factors),
        os_layout=layout,
        os_place="host" if both else place,
        resident_states=int(both),
        optimizer=optimizer,
    )
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    _, states, _ = built(planned_run(plan))
    gpu, host = costs.memory_of_states(plan)
    found = states.bytes()
    if both:
        stay = sum(
            state.nbytes
            for param in states.sharded_params.values()
            for state in param.states.values()
            if param.name.startswith(("embed.", "blocks.0."))
        )
        assert stay == gpu["resident states"]
        found["optimizer"] -= stay
    for kind, size in found.items():
        assert size == (gpu | host)[kind], kind
    assert ("optimizer" in host) == (place != "gpu")

    buffers = []
    if states.host_states:
        for _ in range(optim.PIECE_BUFFERS):
            buffers += next(states.host_states.buffers).data
        if states.host_states.master is not None:
            buffers.append(states.host_states.master)
    assert sum(buffer.nbytes for buffer in buffers) == gpu.get("streamed states", 0)


@parametrize("parts", [1, 2])
def test_bytes_of_states_in_both_places_are_those_of_the_largest_stages(parts, monkeypatch):
    """If the states of a stage's first layers stay on the GPU, the stage with the embedding has the
    most bytes there, and the stage with the head the most on the host. Both are counted.

    Catches a plan that leaves out the head's states, which stream even if those of all layers stay
    on the GPU.
    """
    monkeypatch.setattr(costs, "PIECE_ELEMENTS", 1000)
    monkeypatch.setattr(optim, "PIECE_ELEMENTS", 1000)
    cfg = m.ModelConfig(128, 64, 4, 4, 2, 128, 16)
    for resident_states in (1, 2):
        plan = costs.Plan(
            cfg,
            torch.bfloat16,
            2,
            2,
            64,
            batch=2,
            micro_batch=1,
            os_place="host",
            resident_states=resident_states,
            pp=2,
            pp_chunks=parts,
        )
        on_gpu, on_host = [], []
        for rank in (0, 1):
            dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
            try:
                _, states, _ = built(planned_run(plan))
            finally:
                dist.destroy_process_group()
            place = {True: on_gpu, False: on_host}
            for stays, found in place.items():
                found.append(
                    sum(
                        state.nbytes
                        for param in states.sharded_params.values()
                        for state in param.states.values()
                        if param.unit.has_resident_states == stays
                    )
                )
        gpu, host = costs.memory_of_states(plan)
        assert gpu["resident states"] == max(on_gpu) and on_gpu[0] > on_gpu[1]
        assert host["optimizer"] == max(on_host) and on_host[1] > on_host[0]


class FrozenEmbedding(m.LLaMA):
    """A model whose embedding is frozen, while its head trains."""

    def __init__(self, *args):
        super().__init__(*args)
        self.embed.frozen = True


def test_a_head_streams_its_states_from_a_stage_with_few_layers(monkeypatch):
    """6 layers of a stage may keep their states on the GPU. The last stage has 5 layers and a large
    head, whose states are on the host, as the plan counts them.

    Catches a stage that keeps its head's states on the GPU in place of a layer's.
    """
    monkeypatch.setitem(
        m.ARCHITECTURES, "frozen embedding", m.Architecture(m.Block, FrozenEmbedding)
    )
    plan = costs.Plan(
        m.ModelConfig(4096, 64, 9, 4, 2, 128, 16, architecture="frozen embedding"),
        torch.bfloat16,
        2,
        2,
        64,
        batch=2,
        os_place="host",
        resident_states=6,
        pp=2,
        pp_chunks=2,
    )
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    _, states, _ = built(planned_run(plan))
    streamed = [unit for unit in states.units if not unit.has_resident_states]
    assert [unit.name for unit in streamed] == ["head"]
    on_host = sum(state.nbytes for state in streamed[0].params[0].states.values())
    gpu, host = costs.memory_of_states(plan)
    assert on_host == host["optimizer"]
    assert states.bytes()["optimizer"] - on_host <= gpu["resident states"]


def test_what_does_not_overlap_is_exposed():
    """Without a stream in --overlap, its communication is exposed, and nothing else changes.

    Catches messages that count as hidden, and states that stream twice.
    """
    plan = replace(SMALL_PLAN, ranks=2, per_node=2, pp=2, pp_chunks=3, batch=8, micro_batch=1)
    assert plan.micro_batches == 8
    assert costs.exposed_messages(plan) == 2 * (2 * 3 - 1)
    assert costs.exposed_messages(replace(plan, overlap=())) == 8 * (2 * 3 - 1)
    assert costs.exposed_messages(replace(plan, ranks=4, per_node=4, pp=4, overlap=())) == 8 * 6

    est = costs.Estimator(round_machine())
    streaming = replace(SMALL_PLAN, os_place="host")
    assert costs.link_busy_seconds(est, streaming) == costs.streaming_seconds(est, streaming) > 0
    assert costs.link_busy_seconds(est, replace(streaming, overlap=())) == 0
    bf16 = torch.bfloat16
    assert costs.update_bytes(bf16, grad_bytes=4) == costs.update_bytes(bf16) + 2 == 30


@parametrize(
    "layers, stages, virtual_stages",
    [(32, 2, 1), (32, 2, 3), (32, 4, 3), (9, 2, 2), (7, 3, 1), (5, 2, 2)],
)
def test_stage_layers(layers, stages, virtual_stages):
    """A plan counts as many layers as the largest stage keeps.

    Catches a stage that is counted as if each of its virtual stages was the largest one.
    """
    kept = []
    for stage in range(stages):
        with torch.device("meta"):
            model = m.LLaMA(replace(SMALL_PLAN.model, layers=layers))
        kept.append(sum(map(len, pipeline.keep_stage(model, stage, stages, virtual_stages))))
    plan = replace(
        SMALL_PLAN,
        model=replace(SMALL_PLAN.model, layers=layers),
        ranks=stages,
        per_node=stages,
        pp=stages,
        pp_chunks=virtual_stages,
    )
    assert plan.stage_layers == max(kept)
    assert sum(kept) == layers


def seconds(profile: hardware.Profile, **choices) -> float:
    """Return the predicted seconds of SMALL_PLAN with other choices."""
    return costs.predict(replace(SMALL_PLAN, **choices), profile).step_s


@parametrize("tied", [False, True])
def test_step_seconds_are_counted_by_hand(tied, monkeypatch):
    """On a machine that is slow in nothing but FLOP/s, a step takes the seconds of its FLOPs. If
    one more part of the machine is slow, the step takes the seconds of this part longer.

    A tied matrix is updated and sent once, but the head multiplies by it all the same. Catches
    FLOPs, updates, copies or launches that are forgotten or counted twice.
    """
    monkeypatch.setitem(
        globals(), "SMALL_PLAN", replace(SMALL_PLAN, model=replace(SMALL_PLAN.model, tied=tied))
    )
    n, c, f, v, layers = 2**15, 4096, 11008, 32000, 4
    matrices = 4 * c * c + 3 * f * c
    params = layers * matrices + (1 if tied else 2) * v * c
    forward = 2 * n * matrices + 2 * c * n * n  # causal: half of 4 C N N
    backward = 4 * n * matrices + 5 * c * n * n
    layer, head = (forward + backward) / 1e14, 6 * n * v * c / 1e14
    assert seconds(round_machine()) == approx(layers * layer + head)
    alone = {"overlap": ()}
    host = {"forward": 1.0, "backward": 2.0, "head group forward": 0.5, "head group backward": 0.75}
    launch = {"a host": host}
    rows = [  # what is slow in the machine, choices of the plan, the seconds that this adds
        # recomputation runs everything except the last product
        (
            {},
            {"recompute": "auto", "activations": offload.ActivationPlan(4, 1, 4, 0, 0, 4)},
            layers * (forward - 2 * n * c * f) / 1e14,
        ),
        ({"optimizer": 1e9}, {}, 28 * params / 1e9),
        ({"state_streaming": 1e9}, {"os_place": "host", **alone}, 10 * params / 1e9),
        # the states of three of four layers, and of the embedding, are not streamed
        (
            {"state_streaming": 1e9},
            {"os_place": "host", "resident_states": 3, **alone},
            10 * (params - 3 * matrices - v * c) / 1e9,
        ),
        ({"launch": launch}, {}, layers * (1 + 2 - layer)),
        # each head group launches kernels of its own
        ({"launch": launch}, {"head_groups": 4}, layers * (1 + 2 + 4 * (0.5 + 0.75) - layer)),
        ({"inside": 1e9}, alone, 2 * params / 1e9),  # an all-reduce in bf16
        ({"inside": 1e9}, {"batch": 24, **alone}, 2 * (layers * layer + head) + 2 * params / 1e9),
        # all-to-alls of q, k, v, o, then of q, k, v, o, do, dq, dk, dv, in bf16
        ({"inside": 1e9}, {"sp": 8, **alone}, (layers * 12 * c * 2 * n + 2 * params) / 1e9),
    ]
    for machine, choices, more in rows:
        found = seconds(round_machine(**machine), **choices)
        assert found == approx(layers * layer + head + more), (machine, choices)


def test_launches_are_counted_by_hand():
    """A layer in float8 has launches of its own. A step that is a CUDA graph has no launches. A
    step is a graph only if all of its work is on one stream.

    Catches small steps in float8 that are predicted to be faster, and are slower.
    """
    host = dict.fromkeys(hardware.LAUNCHES, 1.0)
    in_float8 = host | {"fp8 forward": 3.0, "fp8 backward": 4.0}

    def launches(host: dict, **choices) -> float:
        machine = round_machine(launch={"a host": host})
        one_gpu = replace(SMALL_PLAN, ranks=1, per_node=1, batch=1, **choices)
        plan = costs.predict(one_gpu, machine)
        computed = sum(plan.seconds.values()) - plan.seconds["launches"]
        return plan.seconds["launches"] + computed * (plan.seconds["launches"] > 0)

    # each of four layers is launched in 1 s forward and 1 s backward, which hides its computation;
    # the rest is the head
    rest = launches(host) - 4 * (1 + 1)
    assert launches(in_float8) == approx(4 * (1 + 1) + rest)
    assert launches(in_float8, products="fp8") == approx(4 * (3 + 4) + rest)
    # a host without measured launches of float8 is given those of the other products
    assert launches(host, products="fp8") == approx(4 * (1 + 1) + rest)
    assert launches(in_float8, products="fp8", memplan="on") == 0
    swapped = offload.ActivationPlan(4, 1, 2, 2, 1)
    for several_streams in ({"os_place": "host"}, {"recompute": "auto", "activations": swapped}):
        assert launches(host, memplan="on", **several_streams) > 0


class FrozenLayers(m.LLaMA):
    """A model whose layers and head are frozen. The norms of layers train, and so does embed."""

    def __init__(self, *args):
        super().__init__(*args)
        for module in (*self.blocks.modules(), self.head):
            if isinstance(module, m.Matrix):
                module.frozen = True


def test_frozen_matrices_are_counted_by_hand(monkeypatch):
    """Frozen matrices cost no product for a gradient, no reduction, no update and no states.

    Catches seconds or bytes of a gradient that nobody computes, and gathers that are forgotten.
    """
    n, c, f, v, layers = 2**15, 4096, 11008, 32000, 4
    frozen = layers * (4 * c * c + 3 * f * c) + v * c
    params = frozen + v * c
    plan = {"factors": shard.Factors(2, 8, 8), "overlap": ()}
    machines = [round_machine(), round_machine(inside=1e9), round_machine(optimizer=1e9)]
    full = [seconds(machine, **plan) for machine in machines]
    monkeypatch.setattr(m, "LLaMA", FrozenLayers)
    found = [seconds(machine, **plan) for machine in machines]
    assert full[0] - found[0] == approx(2 * n * frozen / 1e14)
    # each of 8 ranks of a node sends bf16: gradients are scattered over p and over os / p, and new
    # parameters are gathered over os / p. All weights are gathered over p, in both passes
    of_reductions = full[1] - full[0] - (found[1] - found[0])
    assert of_reductions == approx(2 * frozen * (1 + 1 / 2 + 1 / 2) / 1e9)
    assert full[2] - full[0] - (found[2] - found[0]) == approx(28 * frozen / 8 / 1e9)

    needed = costs.state_bytes(replace(SMALL_PLAN, **plan))
    assert [*needed.values()] == [2 * params / 2, 2 * v * c / 8, 12 * v * c / 8]


def test_flops_of_frozen_weights(monkeypatch):
    """A trained parameter takes 6 FLOPs per token, a frozen one 4, and 2 before the first trained.

    Catches an MFU that counts gradients that nobody computes.
    """
    cfg = m.MODELS["tiny"]
    layer = 4 * cfg.dim**2 + 3 * cfg.dim * cfg.ffn + 2 * cfg.dim
    vocab = cfg.vocab * cfg.dim
    pairs = 6 * cfg.heads * cfg.head_dim * 100  # attention of a layer, causal, on 100 tokens
    trained = {
        "": (0, 0),
        "blocks.2.qkv": (3 * cfg.dim**2, 2),  # layers 0 and 1 need no backward
        "head": (vocab, 4),
        "embed": (vocab, 0),
    }
    for path, (count, forward_only) in trained.items():

        class Frozen(m.LLaMA):
            def __init__(self, *args, path=path):
                super().__init__(*args)
                self.requires_grad_(path == "")
                if path:
                    self.get_submodule(path).frozen = False

        monkeypatch.setattr(m, "LLaMA", Frozen)
        total = m.param_count(cfg)
        assert total == cfg.layers * layer + 2 * vocab + cfg.dim
        first = forward_only * layer + (0 if path in ("", "embed") else vocab)
        count = count or total
        products = 6 * count + 4 * (total - count - first) + 2 * first
        causal, full = m.flops_per_token(cfg, 100)
        attention = pairs * (cfg.layers - 2 / 3 * forward_only)
        assert causal == approx(products + attention)
        assert full == approx(products + 2 * attention)


class FrozenFirstLayers(m.LLaMA):
    """A model that trains in its last layer and after it."""

    def __init__(self, *args):
        super().__init__(*args)
        for module in (self.embed, *self.blocks[:-1].modules()):
            if isinstance(module, ops.Weight):
                module.frozen = True


def test_recomputation_counts_the_layers_that_backward_reaches(monkeypatch):
    """If backward reaches only one layer of four, recomputation takes a quarter of the time.

    Catches a layer's recomputation that is averaged over layers which recompute nothing.
    """
    step = replace(SMALL_PLAN, recompute="auto")

    def recomputation(n):
        plan = replace(step, activations=offload.ActivationPlan(n, 1, n))
        return costs.predict(plan, round_machine()).seconds["recomputation"]

    of_all = recomputation(4)
    monkeypatch.setattr(m, "LLaMA", FrozenFirstLayers)
    assert step.reached_layers == 1
    assert recomputation(1) == approx(of_all / 4) and of_all > 0


@parametrize(
    "factors, layout",
    [((1, 1, 1), "intra"), ((8, 8, 8), "intra"), ((1, 8, 8), "inter"), ((2, 2, 8), "inter")],
)
@parametrize("micro_batches", [1, 3])
def test_communication_is_hidden_but_not_free(factors, layout, micro_batches):
    """A step with communication takes at least as long as its computation and as its communication,
    and less than their sum. Computation that communication slows down takes longer.

    Catches communication that is counted as free, or as never overlapped.
    """
    plan = {"factors": shard.Factors(*factors), "os_layout": layout, "batch": 8 * micro_batches}
    slow_network = round_machine(inside=3e9)
    computed = seconds(round_machine(), **plan)
    in_turn = seconds(slow_network, **plan, overlap=())
    hidden = seconds(slow_network, **plan)
    assert max(computed, in_turn - computed) * (1 - 1e-9) <= hidden < 0.98 * in_turn
    slowed = {"collectives": [1.2, 1.5], "all_to_all": [1.2, 1.5]}
    assert seconds(round_machine(inside=3e9, overlap=slowed), **plan) > 1.005 * hidden


# stream of costs.predict -> the kind of traffic under which the test below adds up its bytes
KINDS = {
    "param_gather": "gathers",
    "param_broadcast": "new parameters",
    "grad_scatter": "gradients",
    "grad_reduce": "gradients",
}


class Collectives(TorchDispatchMode):
    """Counts the bytes of collectives in bf16, by (kind, ranks of the group, whether an
    all-reduce).

    A collective has the bytes of its largest tensor, and a coalesced one those of all its tensors.
    p: the sharding factor of parameters, which tells gathers from broadcasts of new parameters.
    """

    def __init__(self, p: int):
        super().__init__()
        self.p = p
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            leaves = tree_leaves(args)
            sizes = [
                x.nbytes
                for x in leaves
                if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
            ]
            group = next(x for x in leaves if isinstance(x, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            name = function.__name__
            kind = "gradients"
            if "gather" in name or "broadcast" in name:
                kind = "gathers" if ranks == tuple(range(self.p)) else "new parameters"
            if "alltoall" in name:
                kind = "all_to_all" if ranks == (0, 1) else "ring"
            if sizes:
                many = sum if "coalesced" in name else max
                self.bytes[kind, ranks, "allreduce" in name] += many(sizes)
        return function(*args, **(kwargs or {}))


@parametrize(
    "factors, layout, micro_batches, recompute",
    [
        ((1, 1, 1), "intra", 1, "none"),
        ((1, 1, 8), "inter", 3, "none"),
        ((1, 4, 4), "inter", 3, "auto"),
        ((2, 4, 4), "intra", 3, "none"),
        ((2, 2, 4), "inter", 1, "auto"),
        ((4, 8, 8), "inter", 2, "none"),
        ((4, 4, 8), "intra", 3, "auto"),
        ((8, 8, 8), "intra", 1, "none"),
    ],
)
def test_predictions_and_rings_are_what_shard_launches(factors, layout, micro_batches, recompute):
    """The bytes of the collectives that rank 0 of 8 launches are those that costs.py predicts, and
    those that planner.py sends around rings.

    The collectives send nothing. In the prediction a byte takes a second and nothing is hidden, so
    its seconds are bytes. Attention's exchanges are among them, with two groups of heads that share
    a key/value head. Catches bytes that are predicted or placed but that the engine does not send.
    """
    cfg = m.ModelConfig(128, 64, 5, 4, 2, 128, 16)  # matrices are multiples of 8 * 128 elements
    f = shard.Factors(*factors)
    plan = costs.Plan(
        cfg,
        torch.bfloat16,
        8,
        4,
        128,
        sp=4,
        ring=2,
        batch=2 * micro_batches,
        head_groups=2,
        recompute=recompute,
        activations=offload.ActivationPlan(5, 2, 5) if recompute == "auto" else None,
        chunk=16,
        factors=f,
        os_layout=layout,
    )
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    *_, step = built(planned_run(plan))
    with Collectives(f.p) as launched:
        step()
    in_turn = replace(plan, overlap=())
    found = costs.predict(in_turn, round_machine(1.0, 1.0)).seconds
    predicted, total = Counter(), Counter()  # by kind: bytes of whole tensors
    sent, around = Counter(), Counter()  # by kind and ranks: bytes that a rank sends
    for stream, kind in KINDS.items():
        predicted[kind] += found[stream]
    for (kind, ranks, twice), size in launched.bytes.items():
        if kind in KINDS.values():
            total[kind] += size
        sent[kind, ranks] += size * (1 if kind == "ring" else (1 + twice) * (1 - 1 / len(ranks)))
    assert +predicted == approx(total)
    of_matrices = 1 - 11 * 64 / m.param_count(cfg)  # 11 norms of 64 elements are not in bf16
    for ring in planner.plan_traffic(plan):
        kind = KINDS.get(ring.kind, ring.kind)
        if ring.sent:
            sent_around = ring.sent * (of_matrices if ring.kind in KINDS else 1)
            around[kind, tuple(range(0, ring.block, ring.stride))] += sent_around
    for key in sent.keys() | around.keys():
        share = sent[key] / around[key]
        # fewer gathers: a weight that its buffer still holds is not gathered again
        assert 0.55 < share <= 1 if "gathers" in key else share == approx(1), key


def seconds_of_passes(stages: int, chunks: int, micro_batches: int, message: float) -> float:
    """Simulate pipeline.pipeline_order, and return the seconds that its passes take.

    A forward pass of a virtual stage takes 1 s, and a backward pass 2 s. A pass begins when its
    stage is free and its input has arrived. message: seconds from one stage to another. chunks:
    virtual stages per stage.
    """
    depth = stages * chunks
    # A micro-batch goes through `depth` virtual stages forward, and back in the opposite order.
    # Its passes are numbered from 0 to 2 depth - 1.
    ends = {}  # (micro-batch, number of the pass) -> when the pass ends
    free_at = [0.0] * stages
    orders = [
        list(pipeline.pipeline_order(stage, stages, chunks, micro_batches))
        for stage in range(stages)
    ]
    while any(orders):
        num_left = sum(map(len, orders))
        for stage, order in enumerate(orders):
            while order:
                next_pass = order[0]
                place = next_pass.virtual_stage * stages + stage
                number = place if next_pass.forward else 2 * depth - 1 - place
                before = next_pass.micro_batch, number - 1
                if number and before not in ends:
                    break

                arrival = ends.get(before, 0)
                if number not in (0, depth):  # the first backward is where the last forward was
                    arrival += message
                begin = max(free_at[stage], arrival)
                free_at[stage] = begin + (1 if next_pass.forward else 2)
                ends[next_pass.micro_batch, number] = free_at[stage]
                order.pop(0)
        assert sum(map(len, orders)) < num_left, "stages wait for each other"
    return max(free_at)


@parametrize("pp, v, micro_batches", [(2, 1, 2), (4, 1, 4), (4, 2, 8), (4, 4, 12), (8, 1, 160)])
def test_idle_time_of_pipelines_is_that_of_a_simulation(pp, v, micro_batches):
    """If all passes are equal, P stages of V virtual stages with M micro-batches are idle for
    (P - 1) / (V M + P - 1) of a step, in the order in which stages run their passes. Messages add
    to this time.

    Catches idle time that is miscounted.
    """
    without_messages = seconds_of_passes(pp, v, micro_batches, 0)
    assert without_messages == 3 * (v * micro_batches + pp - 1)
    cfg = replace(m.MODELS["7b"], layers=16, vocab=16)
    shape = {"ranks": 8 * pp, "per_node": 8, "seq": 2**13, "batch": 8 * micro_batches}
    plan = costs.Plan(cfg, torch.bfloat16, **shape, pp=pp, pp_chunks=v)
    with_messages = seconds_of_passes(pp, v, micro_batches, 0.5)
    assert costs.exposed_messages(plan) * 0.5 == approx(with_messages - without_messages)
    found = costs.predict(plan, round_machine())
    idle = found.seconds["pipeline idle"] / found.step_s
    assert idle == approx((pp - 1) / (v * micro_batches + pp - 1), rel=1e-3)

    # At least one activation in bf16 goes to the last stage and back. Its message takes as long as
    # an all-gather of two ranks, which has twice the bytes.
    messages_s = costs.predict(plan, round_machine(across=1e9)).seconds["stage messages"]
    assert messages_s >= 2 * (pp - 1) * 2 * (2 * 2**13 * 4096) / 1e9 * (1 - 1e-6)


@parametrize("factors, layout", [((1, 1, 4), "intra"), ((1, 4, 4), "inter"), ((2, 4, 4), "inter")])
def test_a_tied_matrix_costs_a_pipeline_one_sum(factors, layout):
    """In a pipeline a tied model takes as many bytes as an untied one, because the first and the
    last stage each hold a copy of the matrix. In addition, both sum the gradients that they update.
    The model has V C parameters less.

    Catches a copy or a sum that is forgotten.
    """
    model = replace(m.MODELS["7b"], layers=16)
    untied = replace(
        SMALL_PLAN, model=model, pp=2, factors=shard.Factors(*factors), os_layout=layout, overlap=()
    )
    tied = replace(untied, model=replace(model, tied=True))
    assert costs.with_bytes(tied).memory == costs.with_bytes(untied).memory
    machine = round_machine(inside=1e9)
    untied, tied = (costs.predict(plan, machine).seconds for plan in (untied, tied))
    p, _, os = factors
    shards = p if layout == "inter" else os
    assert tied.pop("tied gradients") == approx(4 * 32000 * 4096 / shards / 1e9)
    assert tied == untied
    less = 6 * 32000 * 4096
    pairs = zip(*(m.flops_per_token(replace(model, tied=t), 2**15) for t in (True, False)))
    assert all(of_untied - of_tied == less for of_tied, of_untied in pairs)


@parametrize("v, most", [(1, 4 * 4), (2, 11 * 2)])
def test_bytes_of_stages_are_those_in_flight(v, most):
    """The first of P stages holds the activations of at most P micro-batches, in its 16 / P layers.
    With V virtual stages it holds those of P (V - 1) + 2 (P - 1) + 1 passes of 16 / (P V) layers
    (Megatron's order).

    Catches bytes of a layer, or micro-batches in flight, that are not counted.
    """
    model = replace(m.MODELS["7b"], layers=16)
    plan = replace(SMALL_PLAN, model=model, ranks=32, seq=2**13, pp=4, pp_chunks=v)
    kept = [
        planner.with_bytes(replace(plan, batch=batch)).memory["activations"]
        for batch in (32, 64, 320)
    ]
    # per token 6 C + 2 F elements in bf16; in float32 H sums of attention, and one per norm
    of_layer = 2**13 * (2 * (6 * 4096 + 2 * 11008) + 4 * (32 + 2))
    assert kept[1] == kept[2] == most * of_layer
    assert kept[0] <= kept[1]
    # a message is x of the stage's tokens. One is sent and one arrives, forward and back
    messages = planner.with_bytes(replace(plan, batch=64)).memory["messages"]
    assert messages == 4 * 2**13 * 4096 * 2
    # if layers swap, each micro-batch in flight has host buffers of its own
    layers = 4 // v  # per pass; one of them swaps
    passes = most // layers
    swapping = offload.ActivationPlan(layers, 1, layers - 1, 0, 1)
    chosen = replace(plan, batch=64, recompute="auto", activations=swapping)
    swapped = sum(costs.skeletal_bytes(chosen))
    assert planner.with_bytes(chosen).host["activations"] == approx(passes * swapped)


def test_bytes_of_an_activation_plan_are_counted_by_hand():
    """x takes 1 byte, o 10 bytes, and a chunk of S_others 100 bytes. Four layers swap five chunks,
    so one of them swaps both of its chunks, and a rounding buffer has room for this layer. Catches
    a buffer or a chunk that is not counted."""
    plan = offload.ActivationPlan(6, 2, 2, kept_chunks=1, swapped_chunks=5)
    layer = (1, 10, 200)
    resident = 2 * 11 + 100
    rounding_buffers = 2 * (11 + 200)
    assert costs.activation_gpu_bytes(plan, layer) == resident + rounding_buffers
    assert costs.activation_host_bytes(plan, layer) == 4 * 11 + 5 * 100


@parametrize(
    "mode, gathers, scatters, reductions, kept",
    [("mtp", 0, 0, 4, 1), ("msp", 4, 4, 0, 1), ("fsp", 6, 4, 0, 0.25)],
)
def test_tensor_parallel_exchanges_are_exposed(mode, gathers, scatters, reductions, kept):
    """A tensor mode takes the seconds of its collectives of (N, C), and the bytes of its
    activations. Each kind of collective has another bandwidth here.

    Catches a collective or a saved tensor that is forgotten. gathers, scatters, reductions: how
    many a layer has. kept: the share of the tokens of x and h that a rank saves.
    """
    rates = {op: 1e12 + 1e11 * i for i, op in enumerate(hardware.COLLECTIVES)}
    tables = {op: {"4x1": [[1.0, rate]]} for op, rate in rates.items()}
    plan = costs.Plan(
        replace(m.MODELS["7b"], layers=4), torch.bfloat16, 4, 4, 2**13, tp=4, tp_mode=mode
    )
    found = costs.predict(plan, round_machine(collectives=tables))
    n, c, f, heads = 2**13, 4096, 11008, 32
    x = 2 * n * c
    of_layer = (
        gathers / rates["all_gather"]
        + scatters / rates["reduce_scatter"]
        + reductions / rates["all_reduce"]
    )
    assert found.seconds["tensor exchanges"] == approx(x * 4 * of_layer)
    split = (4 * x + 2 * 2 * n * f + 4 * n * heads) / 4  # q, k, v, o, gate|up, log-sum-exps
    norms = 2 * 4 * n  # 1 / rms in float32
    assert found.memory["activations"] == approx(4 * (2 * x * kept + split + norms))
    # embedding and head are whole; each rank has a quarter of the matrices of 4 layers
    parameters = 2 * 32000 * c + (4 * c * c + 3 * c * f)
    assert found.memory["parameters"] == approx(2 * parameters, rel=1e-3)


@parametrize("flag, elements", [("qkv_bias", 9), ("qk_norm", 28)])
def test_biases_and_norms_of_heads_take_time(flag, elements):
    """Biases of q, k and v move 9 C elements per token and layer, and norms of q and k 28 C.

    Catches a step of Qwen2 or Qwen3 that is counted as fast as one of LLaMA.
    """
    slow_memory = round_machine(memory=1e9)
    more = seconds(slow_memory, model=replace(SMALL_PLAN.model, **{flag: True}))
    assert SMALL_PLAN.model.layers * SMALL_PLAN.tokens * elements * 4096 * 2 / 1e9 == approx(
        more - seconds(slow_memory), rel=1e-6
    )


def test_a_kernel_changes_only_the_seconds_of_attention():
    """A step with cuDNN's attention differs from one with FlashAttention-4's only in the seconds of
    attention, by the ratio of their rates.

    Catches a prediction that takes the rates of a kernel that does not run.
    """
    rates = {"forward": [[1, 1e14]], "backward": [[1, 1e14]]}
    slower = {"forward": [[1, 0.8e14]], "backward": [[1, 0.8e14]]}
    machine = round_machine(attention={"fa4": rates, "cudnn": slower})
    fa4, cudnn = (costs.predict(SMALL_PLAN, machine, kernel) for kernel in ("fa4", "cudnn"))
    assert cudnn.seconds == approx(fa4.seconds | {"attention": fa4.seconds["attention"] / 0.8})
    assert cudnn.memory == fa4.memory
    # a kernel that the profile lacks is predicted by the nearest one, and "auto" by the best one
    assert costs.predict(SMALL_PLAN, machine, "flash").seconds == cudnn.seconds
    assert costs.predict(SMALL_PLAN, machine).seconds == fa4.seconds


def check_order(rows: list[dict]) -> None:
    """Assert that of the rows of each question, the one that is predicted to be the fastest was the
    fastest."""
    # where it was not: by how much it was slower than the fastest
    regrets = {
        # eight sequences at once were predicted 2.5 % faster than one after the other, and tied
        ("K, 7b 4K", 16, "H200", 2): 0.004,
        # the planner's own step took 2.001 s on one machine, and 2.006 s on another, where it took
        # as long with bf16 states. They were predicted 0.4 % faster
        ("K, 7b 32K", 1, "H200", 2): 0.0025,
        # four sequences at once were predicted 0.6 % faster than one after the other, and took
        # longer: steps of many micro-batches mostly take 2 % less than predicted
        ("K, 7b 8K", 16, "H200", 2): 0.016,
    }
    questions = {}
    for r in rows:
        if r["table"] == "head":  # two programs that ran the same settings
            continue
        asked = r["question"], r["batch"], r["gpu"], r["gpus"], r.get("kernel")
        questions.setdefault(asked, []).append(r)
    assert sum(len(asked) > 1 for asked in questions.values()) >= 27  # else nothing is compared
    for question, asked in questions.items():
        fastest_now = min(asked, key=lambda r: r["now_s"])
        # or it tied: the same step, measured twice on one machine, differs by as much or more
        tie = max(planner.TIE, regrets.get(question[:4], 0))
        fastest_s = min(r["step_s"] for r in asked)
        assert fastest_now["step_s"] <= (1 + tie) * fastest_s, asked


def check_shared_layers(rows: list[dict]) -> None:
    """Check the predictions of steps in which GPUs share matrices or layers, and remove these steps
    from `rows`.

    Pipelines take up to 4 % longer than predicted. Tensor parallelism takes up to 9 % longer with
    sequences of 4K tokens, but 2 % less with 32K. The reasons are not known. The bytes of a
    pipeline are counted a little high.
    """
    # (tp, tokens): the least and the largest ratio of seconds, predicted / measured
    ratios = {
        (1, 2**12): (0.95, 0.98),
        (2, 2**12): (0.91, 0.98),
        (1, 2**15): (0.96, 0.98),
        (2, 2**15): (1.01, 1.03),
    }
    found = [r for r in rows if r.get("tp", 1) * r.get("pp", 1) > 1]
    labels = ["fsp", "interleaved", "msp", "mtp", "pipeline", "plan 3", "plan 4"]
    assert sorted(r["label"] for r in found) == labels
    for r in found:
        least, largest = ratios[r["tp"], r["seq"]]
        assert least < r["now_s"] / r["step_s"] < largest
        assert 0.99 < r["now_gib"] / r["gpu_gib"] < (1.013 if r["pp"] > 1 else 1.001)
        rows.remove(r)


def swapping_steps(rows: list[dict]) -> list[dict]:
    """Return the slow steps of 128K tokens on two H200s whose layers swap all of their activations.

    At these commits they were slower than predicted, for a reason that is not known: without the
    lag by 9 %, with it by 3, 6 and 11 %. Other machines ran the same step at other commits, and
    there it is 1 to 2 % slower."""
    slow = "6601196", "a7f09b1", "e35402f"
    found = [
        r
        for r in rows
        if (r["label"], r["gpus"], r["seq"], r["alpha"]) == ("ours", 2, 2**17, 1)
        and r["commit"] in slow
    ]
    assert len(found) == 4
    return found


def test_predictions_are_what_was_measured():
    """Predictions are near what GPUs measured, in seconds and in bytes, and the setting that is
    predicted to be the fastest was the fastest.

    The order is compared only if the profile has the network and the kernel of the measured
    machine. The ranges below are as narrow as the measurements allow; a comment says why a group of
    rows has a range of its own. Catches seconds or bytes far from what GPUs took.
    """
    sys.path.insert(0, str(ROOT / "results"))
    import report

    rows = list(report.predicted_rows())
    # Rows on four H200s, by tokens, each with the least ratio of seconds (predicted / measured) and
    # the largest of bytes. In steps of 1M tokens, GPUs reach their power limit, and the slowest one
    # has a lower clock than in the short tests that the profile was measured by. One of these steps
    # is also the first of a run. At 512K tokens the bytes are counted a little high. Two steps of
    # 128K tokens that a rougher clock measured took 6 and 13 % longer than predicted.
    apart = {2**20: (0.94, 1.02), 2**19: (0.97, 1.015), 2**17: (0.88, 1.01)}
    found = [
        r
        for r in rows
        if (r["gpu"], r["gpus"]) == ("H200", 4)
        and r["seq"] in apart
        and (r["seq"] > 2**17 or report.has_rough_clock(r))
    ]
    assert sorted(r["seq"] for r in found) == [2**17, 2**17, 2**19, 2**20, 2**20]
    for r in found:
        least_s, most_gib = apart[r["seq"]]
        assert least_s < r["now_s"] / r["step_s"] < 1
        assert 0.99 < r["now_gib"] / r["gpu_gib"] < most_gib
        rows.remove(r)
    # the first step of a run with empty caches compiles its kernels
    (compiling,) = [r for r in rows if r["model"] == "qwen3-8b"]
    for r in [*swapping_steps(rows), compiling]:
        assert 0.88 < r["now_s"] / r["step_s"] < 0.98
        assert 0.99 < r["now_gib"] / r["gpu_gib"] < 1.01
        rows.remove(r)
    check_shared_layers(rows)
    # Where a layer's tokens are one long chunk, bytes are counted a little high. Since these rows
    # were measured, head and loss take less if V = 32,000: they had float32 logits and float32
    # gradients of 4,194 tokens, and now have float32 logits and bf16 gradients of 4,096 tokens
    saved_gib = (2 * 4 * 4194 - (4 + 2) * 4096) * 32000 / 2**30
    for r in rows:
        most_gib = 1.032 if r["chunk"] >= 2**16 else 1.01
        measured_today = r["gpu_gib"] - (saved_gib if m.MODELS[r["model"]].vocab == 32000 else 0)
        assert 0.99 * measured_today < r["now_gib"] < most_gib * r["gpu_gib"], r["label"]
    outlier = 2**14, "ours fp8 and bf16 moments", "6a42b6f", "fa4"
    known = [r for r in rows if r["kind"] != report.pictures.ELSEWHERE]
    unknown = [r for r in rows if r not in known]
    for r in known[:]:
        if r["question"] == "K, 1b 4K" and r["batch"] == 1:  # it waits for its host, a faster one
            assert 1 < r["now_s"] / r["step_s"] < 1.35
            known.remove(r)
        elif r.get("products") == "fp8" and (r["seq"], r["batch"]) == (2**13, 17):
            # a wait of 0.8 s for the host's states is predicted, and the step seems to have none
            assert 1.08 < r["now_s"] / r["step_s"] < 1.13
            known.remove(r)
        elif (r["seq"], r["label"], r["commit"], r.get("kernel")) == outlier:
            # the same step took 0.377 s with cuDNN's attention, which is slower
            assert 0.88 < r["now_s"] / r["step_s"] < 0.91
            known.remove(r)
        elif r.get("products") == "fp8":  # the H100's rate of casts is derived
            assert 0.92 < r["now_s"] / r["step_s"] < 1.095
            known.remove(r)
        elif r["gpus"] == 2 and r["gpu"] == "H100":  # of another machine than the profile's
            assert 0.9 < r["now_s"] / r["step_s"] < 1
            known.remove(r)
    errors = sorted(abs(r["now_s"] / r["step_s"] - 1) for r in known)
    # 22 rows are within 1.6 %, 39 within 3 %, and all within 8 %
    assert len(known) >= 53 and errors[21] < 0.016 and errors[38] < 0.03 and errors[-1] < 0.08
    assert all(0.85 < r["now_s"] / r["step_s"] < 1.05 for r in unknown)
    check_order(known)
