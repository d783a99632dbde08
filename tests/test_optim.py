"""Test moments in bf16 (their random bits and their rounding), and the master weight as the host
stores it. No plan may change a result."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from pytest import raises

import checkpoint
import costs
import optim
import planner
import shard
from model import MODELS, LLaMA, initial_weight
from ops import TensorSlice
from test_all import (
    main,
    needs_gpu,
    on_ranks,
    parametrize,
    relative,
    save_checkpoint,
    slow,
)

CPU = torch.device("cpu")


def bits_of(count: int, name: str = "a", seed: int = 0, step: int = 1) -> torch.Tensor:
    """Return the random bits (count,) of a matrix's first elements."""
    key, start = optim.element_key_on(name, seed, 0, CPU)
    index = optim.element_index(count, start, None, None)
    return optim.random_bits(index, key, torch.tensor(step))


def test_random_bits_are_random():
    """Each of the 32 bits is 1 half of the time. No two bits are correlated, and neither are the
    bits of neighbours, of consecutive updates, of two names or of two seeds.

    Catches a weak hash.
    """
    count = 2**16

    def signs(bits: torch.Tensor) -> torch.Tensor:  # (32, count) of -1 and 1
        return torch.stack([bits >> i & 1 for i in range(32)]).double() * 2 - 1

    one = bits_of(count)
    assert 0 <= one.min() and 2**32 - 2**18 < one.max() < 2**32
    others = (
        bits_of(count, step=2),
        bits_of(count, name="b"),
        bits_of(count, seed=1),
        one.roll(1),
        bits_of(count, step=2**32 + 2),
    )
    limit = 6 / math.sqrt(count)  # six standard deviations of a mean of random signs
    assert signs(one).mean(1).abs().max() < limit
    own = signs(one) @ signs(one).t() / count - torch.eye(32)
    assert own.abs().max() < limit
    for other in others[:4]:
        assert (signs(one) @ signs(other).t() / count).abs().max() < limit
    assert torch.equal(others[0], others[4])  # the number of the update counts modulo 2^32


def test_random_bits_of_elements_past_two_to_the_32():
    """Elements that are 2^32 apart have different random bits.

    Catches an index of 32 bits.
    """
    key = torch.tensor(7)
    step = torch.tensor(3)
    low = torch.arange(1000)
    high = optim.random_bits(low + 2**32, key, step)
    assert (optim.random_bits(low, key, step) == high).sum() < 3


def test_rounding_is_right_in_the_mean():
    """The mean of 10,000 draws of a number is its value, within four standard deviations. Each draw
    is one of its two neighbours in bf16, and a bf16 number stays as it is.

    Catches a rounding with a bias, and one that also moves exact numbers.
    """
    draws = 10_000
    for x in (1.0001, -1.0001, 3.1e-5, -2.7e8, 1e-39, 0.0, 1.5, 1.99999):
        exact = torch.full((draws,), x, dtype=torch.float32)
        rounded = optim.round_stochastically(exact, bits_of(draws) & 0xFFFF).double()
        x = exact[0].double()
        low, high = rounded.min(), rounded.max()
        neighbours = exact[:1].bfloat16().view(torch.int16) + torch.arange(-1, 2, dtype=torch.int16)
        assert all(value in neighbours.view(torch.bfloat16).double() for value in rounded.unique())
        assert low <= x <= high
        spread = (high - low) / 2 / math.sqrt(draws)
        assert (rounded.mean() - x).abs() <= 4 * spread
        if x == exact[0].bfloat16().double():
            assert torch.equal(rounded, exact.double())


def test_norm_of_bf16_gradients_is_not_rounded(group):
    """The global norm of gradients in bf16 is right to 1e-6. Catches a norm that is rounded to the
    dtype of the gradients, and clips by up to 0.4 percent too much or too little."""
    rng = torch.Generator().manual_seed(0)
    grads = [torch.randn(count, generator=rng).bfloat16() for count in (1000, 77, 0)]
    expected = torch.cat(grads).double().norm()
    norm = optim.global_norm(grads, torch.float32)
    assert norm.dtype == torch.float32 and relative(norm, expected) < 1e-6


def second_moment_after(updates: int, optimizer: optim.Optimizer, rounds: bool) -> float:
    """Return the mean second moment of 1000 elements whose gradient is 1 for 50 updates, then 0.1.

    rounds: round the moment to the nearest bf16 number after each update.
    """
    states = {s.name: torch.zeros(1000, dtype=s.dtype or torch.float32) for s in optimizer.states}
    scalars = optim.make_scalars(CPU, torch.float32)
    weight = torch.zeros(1000)
    for i in range(updates):
        optim.set_scalars(scalars, 1e-3, 0.0, torch.tensor(1.0), 0.0)
        grad = torch.full((1000,), 1.0 if i < 50 else 0.1)
        update = optim.Update("a", 0, weight, grad, states, 0.0, **scalars._asdict())
        optimizer.update(update)
        if rounds:
            states["exp_avg_sq"].copy_(states["exp_avg_sq"].bfloat16().float())
    return states["exp_avg_sq"].double().mean().item()


def test_plain_rounding_loses_the_second_moment():
    """After gradients of 1, then of 0.1, the second moment falls to 0.01, also with stochastic
    rounding. If it is rounded to the nearest number, it stops falling before that.

    Catches moments that are rounded to the nearest number.
    """
    exact = second_moment_after(300, optim.ADAMW, rounds=False)
    stochastic = second_moment_after(300, optim.BF16_MOMENTS, rounds=False)
    nearest = second_moment_after(300, optim.ADAMW, rounds=True)
    assert abs(exact / 0.01 - 1) < 1e-3
    assert abs(stochastic / exact - 1) < 0.01
    assert nearest / exact > 1.04


def test_moments_are_rounded_by_bits_of_their_own():
    """An update rounds both moments right in the mean, and whether one is rounded up tells nothing
    about the other. Both hold within six standard deviations.

    Catches moments that share random bits, and a moment that gets fewer than 16 of them.
    """
    count = 2**16
    states = {
        s.name: torch.zeros(count, dtype=s.dtype or torch.float32)
        for s in optim.BF16_MOMENTS.states
    }
    scalars = optim.make_scalars(CPU, torch.float32)
    optim.set_scalars(scalars, 1e-3, 0.0, torch.tensor(1.0), 0.0)
    grad = torch.full((count,), 0.3)
    weight = torch.zeros(count)
    optim.adamw_bf16(optim.Update("a", 0, weight, grad, states, 0.0, **scalars._asdict()))

    limit = 3 / math.sqrt(count)  # the standard deviation is at most 1 / (2 sqrt(count))
    deviations = []
    for name, exact in (("exp_avg", 0.1 * 0.3), ("exp_avg_sq", 0.05 * 0.3**2)):
        values = states[name].double()
        low, high = values.aminmax()
        is_up = (values > low).double()
        probability = (exact - low) / (high - low)
        assert (is_up.mean() - probability).abs() < limit, name
        deviations.append(is_up - probability)
    assert (deviations[0] * deviations[1]).mean().abs() < limit


def test_moments_are_rounded_by_the_seed_of_the_run(tmp_path, monkeypatch):
    """The random bits of a run depend on its --seed. Catches a seed that is lost on its way to the
    optimizer, so that all runs round alike."""
    seeds = set()
    element_key_on = optim.element_key_on

    def note_seed(name: str, seed: int, *rest) -> torch.Tensor:
        if name != "example":  # of check_optimizer, which is no part of the run
            seeds.add(seed)
        return element_key_on(name, seed, *rest)

    monkeypatch.setattr(optim, "element_key_on", note_seed)
    main(f"--out {tmp_path} --steps 1 --save-every -1 --moments bf16 --seed 7")
    assert seeds == {7}


def test_index_in_a_slice_is_that_in_the_whole_matrix():
    """The elements of a tensor-parallel slice have the indices that they have in the whole matrix.

    Catches ranks that draw other random bits than one rank would.
    """
    whole = torch.arange(12 * 10).view(12, 10)
    for rows, cols in (
        (((0, 12),), (0, 10)),
        (((2, 4), (8, 9), (10, 11)), (0, 10)),
        (((0, 12),), (5, 10)),
    ):
        tp_slice = TensorSlice((12, 10), rows, cols)
        expected = tp_slice.extract(whole).flatten()
        for start in (0, 7):
            index = optim.element_index(
                len(expected) - start, torch.tensor(start), *optim.slice_on(tp_slice, CPU)
            )
            assert torch.equal(index, expected[start:])


@slow
@parametrize("first, second", [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_moments_may_change_their_dtype_on_resume(first, second, tmp_path):
    """A resumed run may have moments of the other dtype, and its losses stay near those of a run
    that had this dtype from the start. With the same dtype, the losses are equal.

    Catches moments that are read in the wrong dtype, and random bits that depend on how often a run
    was started.
    """

    def losses(name: str, *commands: str) -> list[float]:
        for flags in commands:
            main(f"--out {tmp_path}/{name} --save-every 3 {flags}")
        log = (tmp_path / name / "log.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, log) if "loss" in row]

    whole = losses("whole", f"--moments {second} --schedule constant")
    until_3 = f"--moments {first} --steps 3 --schedule constant"
    parts = losses("parts", until_3, f"--resume latest --steps 6 --moments {second}")
    assert relative(torch.tensor(parts), torch.tensor(whole)) < 1e-3
    if first == second:
        assert parts == whole
    meta = sorted((tmp_path / "parts").glob("step-*/meta.json"))[-1]
    assert json.loads(meta.read_text())["config"]["moments"] == second


def test_moments_are_adamws_and_are_counted():
    """With moments in bf16, a plan counts 8 bytes per parameter for optimizer states in place of
    12, and its update moves 20 bytes in place of 28.

    With states on the host, both kinds store 2 bytes less, and joining and splitting the master
    weight moves 16 bytes more. Only AdamW may have moments in bf16. Catches a plan that counts
    float32 moments.
    """
    asked = planner.Constraints(batch=1)
    hardware = planner.Hardware(1, 1, None)

    def plan_with(**flags):
        return planner.shapes(replace(asked, **flags), MODELS["1b"], hardware)[0]

    found = {}
    for moments, place in itertools.product(("fp32", "bf16"), ("gpu", "host")):
        plan = replace(plan_with(moments=moments), os_place=place)
        optimizer = optim.OPTIMIZERS[plan.optimizer]
        found[moments, place] = (
            plan.optimizer_bytes_per_param,
            costs.update_bytes(torch.bfloat16, optimizer, place),
        )
    assert found == {
        ("fp32", "gpu"): (12, 28),
        ("fp32", "host"): (10, 44),
        ("bf16", "gpu"): (8, 20),
        ("bf16", "host"): (6, 36),
    }
    with raises(ValueError, match="--moments bf16: only AdamW has .* is muon. Drop --moments"):
        plan_with(moments="bf16", optimizer="muon")


# ---------------------------------------------------------------------------- weight and rest


def masters_with_all_lower_halves() -> torch.Tensor:
    """Return float32 numbers with 20 upper halves, and with all 2^16 lower halves for each of them.

    The upper halves are those of zeros, denormals, powers of two and their neighbours, an arbitrary
    number, and the largest numbers, with both signs.
    """
    upper = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x4123, 0x7F00, 0x7F7F]
    upper = torch.tensor(upper, dtype=torch.int64)
    upper = torch.cat([upper, upper + 0x8000])
    bits = (upper[:, None] * 2**16 + torch.arange(2**16)).flatten()
    return bits.to(torch.int32).view(torch.float32)  # the conversion keeps the lower 32 bits


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def test_weight_and_rest_give_the_master_bit_for_bit():
    """A master weight that is split into a bf16 weight and the rest, and joined again, has the same
    bits. The weight is the nearest bf16 number, and a tie is rounded away from zero.

    Catches a tie that becomes its neighbour, a borrow that is lost, and a sign that flips.
    """
    master = masters_with_all_lower_halves()
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    rest = torch.empty_like(master, dtype=torch.int16)
    optim.split_master(master, weight, rest)
    joined = torch.empty_like(master)
    optim.join_master(joined, weight, rest)
    assert same_bits(joined, master)

    assert torch.equal(weight, optim.round_weight(master, torch.bfloat16))
    tie = master.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight[~tie], master[~tie].bfloat16())
    finite = tie & weight.isfinite()  # above the largest number is infinity
    assert finite.sum() == 18  # of 20 upper halves, all but the largest number's with both signs
    assert (weight[finite].double().abs() > master[finite].double().abs()).all()

    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
    rounded = optim.round_weight(special, torch.bfloat16)
    assert torch.equal(rounded[:2], special[:2].bfloat16()) and rounded[2].isnan()
    assert rounded[3].signbit()
    for dtype in (torch.float32, torch.float64):  # dtypes that need no rounding
        assert torch.equal(optim.round_weight(master, dtype), master.to(dtype))


@parametrize("master", [0, 1, 2])
@parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize("storage", ["gpu", "host", "both"])
def test_states_have_the_order_that_an_optimizer_declares(storage, dtype, master, group):
    """An optimizer that unpacks `u.states.values()` gets its states in the order in which it has
    declared them, whether they lie on the GPU or on the host, or stay on the GPU although others
    are on the host ("both").

    Catches a joined master weight that comes last, so that another state is updated as if it were
    the weight. master: its position among the states.
    """
    names = ["momentum", "ema"]
    names.insert(master, "master")
    optimizer = optim.Optimizer(optim.adamw, tuple(map(optim.State, names)))
    place = "gpu" if storage == "gpu" else "host"
    stays = storage == "both"
    (states,), host_states = optim.allocate_states(optimizer, [8], dtype, CPU, place, [stays])
    weight = torch.ones(8, dtype=dtype)
    pieces = [(slice(None), states)]
    if stays:
        pieces = host_states.pieces_on_gpu(states, weight)
    elif host_states:
        host_states.begin()
        pieces = host_states.stream_through(states, weight)
    for _, piece_states in pieces:
        assert [*piece_states] == names
        assert all(state.dtype == torch.float32 for state in piece_states.values())
        if optim.REST in states:
            assert torch.equal(piece_states["master"], torch.ones(8))


def states_in(place: str, layout: str, factors: shard.Factors, moments: str) -> tuple:
    """Return a model in bf16 and its states. One in 16 of its initial master weights is a tie: it
    lies in the middle between two bf16 numbers. The first element of each matrix is one."""
    with torch.device("meta"):
        llama = LLaMA(replace(MODELS["tiny"], layers=2))
    optimizer = optim.BF16_MOMENTS if moments == "bf16" else optim.ADAMW
    states = shard.States(
        llama,
        CPU,
        torch.bfloat16,
        factors=factors,
        layout=layout,
        storage="gpu" if place == "gpu" else "host",
        resident_states=int(place == "both"),
        optimizer=optimizer,
    )

    def weight_with_ties(name: str) -> torch.Tensor:
        shape = states.shapes[name]
        weight = initial_weight(name, shape, states.weight_init[name], 0, CPU).float().contiguous()
        bits = weight.view(torch.int32).view(-1)[::16]
        bits.copy_(bits & -0x10000 | 0x8000)
        return weight

    states.load(weight_with_ties)
    return llama, states


def train_a_step(llama: LLaMA, states: shard.States, seed: int, lr: float, finite: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(llama.cfg.vocab, (1, 65), generator=rng)
    states.begin_step()
    loss = llama(tokens[:, :-1], tokens[:, 1:])
    (loss if finite else loss * math.inf).backward()
    states.finish_gradients()
    states.update(lr, 1.0)


def all_values(states: shard.States) -> dict[str, torch.Tensor]:
    """Return copies of the full values of all states by name, and of this rank's weights."""
    values = {}
    for name in states.shapes:
        for state in ("master", "exp_avg", "exp_avg_sq"):
            values[f"{state}.{name}"] = states.full_param(name, state)
    for param in states.sharded_params.values():
        values[f"weight.{param.name}"] = param.owned_param.clone()
    return values


def list_streamed(states: shard.States) -> list[str]:
    """Return the names of the matrices whose states stream from the host."""
    if states.host_states is None:
        return []
    return [
        param.name for param in states.sharded_params.values() if not param.unit.has_resident_states
    ]


def check_places(ranks: int, folder: Path) -> None:
    """Train in bf16 with states on the GPU, on the host and in both places, and assert that they
    have the same bits after each step, one of which is skipped. Then resume each from another's
    checkpoint, with the same or with other sharding factors."""
    optim.PIECE_ELEMENTS = 1000  # each matrix has several pieces
    shard.SMALL_PIECE_ELEMENTS = 700
    split = shard.Factors(ranks, ranks, ranks)
    whole = shard.Factors(1, 1, 1)
    for i, (layout, moments) in enumerate([("intra", "fp32"), ("inter", "bf16")]):
        ours = split if layout == "intra" else shard.Factors(1, 1, ranks)
        places = ["gpu", "host", "both"]
        runs = [states_in(place, layout, ours, moments) for place in places]
        for _, states in runs[1:]:
            for param in states.sharded_params.values():
                assert optim.REST in param.states and "master" not in param.states
        streamed = [list_streamed(states) for _, states in runs]
        assert streamed[0] == [] and len(streamed[1]) == 10 and len(streamed[2]) == 5
        before = {}
        # a step with lr = 0 leaves the ties; the third step is skipped
        steps = [(0.0, True), (0.01, True), (0.01, False), (0.01, True)]
        for step, (lr, finite) in enumerate(steps):
            for llama, states in runs:
                train_a_step(llama, states, step, lr, finite)
            on_gpu, on_host, on_both = (all_values(states) for _, states in runs)
            for name in on_gpu:
                assert torch.equal(on_gpu[name], on_host[name]), (step, name)
                assert torch.equal(on_both[name], on_host[name]), (step, name)
                if not finite:
                    assert torch.equal(on_host[name], before[name]), (step, name)
            before = on_host
        changed = on_host["master.embed.weight"]
        assert (changed.view(torch.int32) & 0xFFFF != 0).float().mean() > 0.5

        for place, factors, other in (
            ("host", ours, "gpu"),
            ("gpu", whole, "both"),
            ("both", whole, "host"),
        ):
            run = folder / f"{i}-{place}"
            run.mkdir(exist_ok=True)
            save_checkpoint(runs[places.index(place)][1], run, 4)
            llama, states = states_in(other, layout, factors, moments)
            checkpoint.load_checkpoint(states, checkpoint.find_checkpoint(run, "latest"))
            found = all_values(states)
            for name in on_host:
                if not name.startswith("weight") or factors == ours:
                    assert torch.equal(found[name], on_host[name]), (place, name)
            for param in states.sharded_params.values():
                master = found[f"master.{param.name}"].flatten()
                if factors == whole:  # this rank owns all elements
                    owned = param.owned_param[: len(master)]
                    assert torch.equal(owned, optim.round_weight(master, torch.bfloat16))


def test_places_train_alike_bit_for_bit(tmp_path):
    """In bf16, training with states on the host equals training with states on the GPU bit for bit,
    and each resumes from the other's checkpoint.

    Catches a master weight that is joined from the wrong weight, a tie that is rounded in two ways,
    and a skipped step that changes a weight.
    """
    on_ranks(2, check_places, 2, tmp_path)


@needs_gpu
def test_gpu_splits_and_joins_as_a_cpu_does():
    """On a GPU, the compiled kernels give each bit of the master weight back, and round as a CPU.

    Catches a tie that a GPU rounds to even.
    """
    master = masters_with_all_lower_halves()
    on_gpu = master.cuda()
    weight = torch.empty_like(on_gpu, dtype=torch.bfloat16)
    rest = torch.empty_like(on_gpu, dtype=torch.int16)
    optim.split_master(on_gpu, weight, rest)
    joined = torch.empty_like(on_gpu)
    optim.join_master(joined, weight, rest)
    assert same_bits(joined.cpu(), master)
    assert torch.equal(weight.cpu(), optim.round_weight(master, torch.bfloat16))


@needs_gpu
def test_gpu_rounds_as_a_cpu_does():
    """A GPU draws the same random bits as a CPU, and its update gives the same moments, up to the
    rounding of a compiled kernel.

    Catches integers that overflow in another way.
    """
    device = torch.device("cuda")
    index = torch.arange(2**20) * 5003
    key, step = torch.tensor(2**32 - 5), torch.tensor(7)
    bits = optim.random_bits(index, key, step)
    on_gpu = torch.compile(optim.random_bits)(index.to(device), key.to(device), step.to(device))
    assert torch.equal(bits, on_gpu.cpu())

    results = []
    for where in (CPU, device):
        rng = torch.Generator().manual_seed(0)
        grads = [torch.randn(100_000, generator=rng).bfloat16().to(where) for _ in range(3)]
        states = {
            s.name: torch.zeros(100_000, dtype=s.dtype or torch.float32, device=where)
            for s in optim.BF16_MOMENTS.states
        }
        scalars = optim.make_scalars(where, torch.float32)
        weight = torch.zeros(100_000, device=where).bfloat16()
        for grad in grads:
            optim.set_scalars(scalars, 1e-3, 0.0, torch.ones((), device=where), 0.0)
            update = optim.Update("a", 0, weight, grad, states, 0.1, **scalars._asdict())
            optim.BF16_MOMENTS.update(update)
        results.append({name: state.cpu() for name, state in states.items()})
    for name, on_cpu in results[0].items():
        same = (results[1][name] == on_cpu).double().mean()
        assert relative(results[1][name].float(), on_cpu.float()) < 1e-4, name
        assert same > 0.99 or name == "master", name  # a compiled kernel rounds it differently
