"""Moments in bf16: their random bits, their rounding, and that no plan changes a result."""

import json
import math
from dataclasses import replace

import torch
from pytest import raises

import costs
import optim
import planner
from model import MODELS
from ops import TensorSlice
from test_all import main, needs_gpu, parametrize, relative, slow

CPU = torch.device("cpu")


def bits_of(count: int, name: str = "a", seed: int = 0, step: int = 1) -> torch.Tensor:
    """Return the random bits (count,) of a matrix's first elements."""
    key, start = optim.element_key_on(name, seed, 0, CPU)
    index = optim.element_index(count, start, None, None)
    return optim.random_bits(index, key, torch.tensor(step))


def test_random_bits_are_random():
    """Each of the 32 bits is 1 half of the time, no two bits go together, and neither do the bits
    of neighbours, of consecutive updates, of two names or of two seeds. Catches a weak hash."""
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
    """Elements that are 2^32 apart have different bits. Catches an index of 32 bits."""
    key = torch.tensor(7)
    step = torch.tensor(3)
    low = torch.arange(1000)
    high = optim.random_bits(low + 2**32, key, step)
    assert (optim.random_bits(low, key, step) == high).sum() < 3


def test_rounding_is_right_in_the_mean():
    """10,000 draws of a number have its value as their mean, within four standard deviations; each
    draw is one of its two neighbours in bf16. A bf16 number stays as it is. Catches a rounding with
    a bias, and one that also moves exact numbers."""
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


def second_moment_after(updates: int, optimizer: optim.Optimizer, rounds: bool) -> float:
    """Return the mean second moment of 1000 elements whose gradient is 1, then 0.1 for good."""
    states = {s.name: torch.zeros(1000, dtype=s.dtype or torch.float32) for s in optimizer.states}
    scalars = optim.make_scalars(CPU, torch.float32)
    weight = torch.zeros(1000)
    for i in range(updates):
        optim.set_scalars(scalars, 1e-3, 0.0, torch.tensor(1.0), 0.0)
        grad = torch.full((1000,), 1.0 if i < 50 else 0.1)
        update = optim.Update("a", 0, weight, grad, states, 0.0, **scalars._asdict())
        optimizer.update(update)
        if rounds:  # to the nearest number
            states["exp_avg_sq"].copy_(states["exp_avg_sq"].bfloat16().float())
    return states["exp_avg_sq"].double().mean().item()


def test_plain_rounding_loses_the_second_moment():
    """After gradients of 1, then 0.1, the second moment falls to 0.01. With stochastic rounding it
    does so, too. With plain rounding it stands still before. Catches plain rounding."""
    exact = second_moment_after(300, optim.ADAMW, rounds=False)
    stochastic = second_moment_after(300, optim.BF16_MOMENTS, rounds=False)
    nearest = second_moment_after(300, optim.ADAMW, rounds=True)
    assert abs(exact / 0.01 - 1) < 1e-3
    assert abs(stochastic / exact - 1) < 0.01
    assert nearest / exact > 1.04


def test_index_in_a_slice_is_that_in_the_whole_matrix():
    """The elements of a tensor-parallel slice have the indices that they have in the whole matrix.
    Catches ranks that draw other bits than one rank would."""
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
def test_either_moments_resume_from_the_other(first, second, tmp_path):
    """A run goes on with moments of the other kind, and its losses stay near those of float32. With
    the same kind, it goes on as if it had never stopped. Catches moments that are read as bits, and
    random bits that depend on how often a run was started."""

    def losses(name: str, *commands: str) -> list[float]:
        for flags in commands:
            main(f"--out {tmp_path}/{name} --save-every 3 {flags}")
        log = (tmp_path / name / "log.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, log) if "loss" in row]

    whole = losses("whole", f"--moments {second} --schedule constant")
    until_3 = f"--moments {first} --steps 3 --schedule constant"
    parts = losses("parts", until_3, f"--resume latest --steps 6 --moments {second}")
    assert relative(torch.tensor(parts), torch.tensor(whole)) < 1e-3
    assert parts == whole or first != second
    meta = sorted((tmp_path / "parts").glob("step-*/meta.json"))[-1]
    assert json.loads(meta.read_text())["config"]["moments"] == second


def test_moments_are_adamws_and_are_counted():
    """A plan with moments in bf16 takes 8 bytes per parameter for optimizer states, not 12, and its
    update moves 20, not 28. Another optimizer is refused. Catches a plan that counts float32."""
    asked = planner.Constraints(batch=1)
    hardware = planner.Hardware(1, 1, None)

    def plan_with(**flags):
        return planner.shapes(replace(asked, **flags), MODELS["1b"], hardware)[0]

    wide, narrow = (plan_with(moments=kind) for kind in ("fp32", "bf16"))
    assert wide.optimizer_bytes_per_param == 12 and narrow.optimizer_bytes_per_param == 8
    moved = [
        costs.update_bytes(torch.bfloat16, optim.OPTIMIZERS[plan.optimizer])
        for plan in (wide, narrow)
    ]
    assert moved == [28, 20]
    with raises(ValueError, match="--moments bf16: only AdamW has .* is muon. Drop --moments"):
        plan_with(moments="bf16", optimizer="muon")


@needs_gpu
def test_gpu_rounds_as_a_cpu_does():
    """A GPU draws the same random bits as a CPU, and its update gives the same moments, up to the
    rounding of a compiled kernel. Catches integers that overflow in another way."""
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
