"""Show that products in float8 round as they should, and that their results do not depend on what
is kept, swapped or recomputed.

Flags that float8 does not allow are refused. Tests of the kernels run on GPUs only.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pytest import raises
from safetensors.torch import load_file

import bench
import costs
import fp8
import model as m
import ops
import planner
import tensor
import train
from examples import lora  # noqa: F401  adds the row "lora" of model.ARCHITECTURES
from helpers import SMALL_PLAN
from test_all import (
    KEEPS,
    SMALL,
    SpoilingStream,
    evaluate_batch,
    expose_races,
    losses,
    main,
    make_case,
    make_run,
    needs_gpu,
    on_ranks,
    parametrize,
    plan_of,
    quantise,
    relative,
    round_to_float8,
)

CPU = torch.device("cpu")


def float8_numbers() -> torch.Tensor:
    """Return all numbers of float8_e4m3 in order, in float64."""
    numbers = torch.arange(256, dtype=torch.uint8).view(fp8.E4M3).double()
    return numbers[numbers.isfinite()].unique()


def cast_with_scale_1(x: torch.Tensor) -> torch.Tensor:
    """Return what the engine casts x to if the largest value of a row is 448, in float64."""
    return fp8.cast_by_amax(x, x.new_tensor([fp8.LARGEST])).values.double()


def values_of(cast: fp8.Cast) -> torch.Tensor:
    """Return the numbers that a cast stands for, in float64."""
    return cast.values.double() * cast.scale.double()


def products_of(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, prologue=ops.IDENTITY, float8=True
) -> list[torch.Tensor]:
    """Return y = prologue(x) W^T, dx and dW, as the engine computes them from dy."""
    rows, cols = w.shape
    matrix = ops.Matrix(rows, cols)
    matrix.replace_weight(w)
    if float8:
        matrix.products = fp8.Float8Products({matrix: 0})
    x = x.clone().requires_grad_()
    y = ops.project(matrix, prologue, x)
    y.backward(dy)
    return [y.detach(), x.grad, matrix.weight.grad]


def random_operands(dtype=torch.float64, device=CPU, tokens=40, rows=48, cols=32, width=0) -> list:
    """Return random x (tokens, width), W (rows, cols) and dy (tokens, rows). width: 0 means
    cols."""
    rng = torch.Generator().manual_seed(0)
    shapes = (tokens, width or cols), (rows, cols), (tokens, rows)
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


# ---------------------------------------------------------------------------- rounding


def test_casts_equal_the_formula():
    """The engine rounds to float8 as the formula of test_all.py does: each number of float8 stays
    itself, and values between two of them go to the nearest, halfway to the even one.

    Catches a cast that truncates, and a formula that is wrong for subnormal numbers.
    """
    numbers = float8_numbers()
    assert len(numbers) == 253 and numbers.max() == fp8.LARGEST  # 0 and -0 are one number
    assert torch.equal(round_to_float8(numbers), numbers)

    low, high = numbers[:-1], numbers[1:]
    between = [low + (high - low) * share for share in (1e-4, 0.25, 0.5, 0.75, 1 - 1e-4)]
    for dtype in (torch.float32, torch.float64):
        for x in (numbers, *between):
            assert torch.equal(cast_with_scale_1(x.to(dtype)), round_to_float8(x))
    assert torch.equal(round_to_float8(between[1]), low)
    assert torch.equal(round_to_float8(between[3]), high)

    # values that were halfway are even now: a multiple of two units in the last place, which is
    # 2^-9 in subnormal numbers, and 1/16 of the mantissa in others
    halfway = round_to_float8(between[2])
    mantissa = torch.frexp(halfway).mantissa * 16
    subnormal = halfway.abs() < 2**-6
    assert torch.all(torch.where(subnormal, halfway * 2**9, mantissa) % 2 == 0)


@parametrize("prologue, width", [(ops.IDENTITY, 32), (ops.SWIGLU, 64)])
def test_products_of_no_tokens(prologue, width):
    """A rank without tokens may use a matrix with x[:0], as States.check_uses advises.

    Catches a largest value of nothing, which PyTorch refuses.
    """
    x, w, dy = random_operands(tokens=3, width=width)
    y, dx, dw = products_of(x[:0], w, dy[:0], prologue)
    assert y.shape == dy[:0].shape and dx.shape == x[:0].shape and not dw.any()


@parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_value_is_cut_off(dtype):
    """Casts by rows and by columns equal the formula, and each row keeps its largest value, whether
    this value is far above 448 or far below 1.

    Catches one scale for the whole matrix, and values that become 448 or 0.
    """
    x, _, _ = random_operands(dtype)
    x = x * torch.logspace(-9, 30, len(x), dtype=torch.float64)[:, None].to(dtype)
    for rows, cast in zip((x, x.t()), fp8.cast_both(x, *fp8.largest_values(x, True, True))):
        assert cast.values.double().abs().amax(1).eq(fp8.LARGEST).all()
        assert relative(values_of(cast), quantise(rows.double())) < 1e-6
        largest = rows.double().abs() == rows.double().abs().amax(1, keepdim=True)
        error = (values_of(cast) / rows.double() - 1).abs()
        assert error[largest].max() < 1e-6


@parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_zeros(dtype):
    """Tokens, features and rows of W that are 0 give products of 0, and finite gradients.

    Catches a division by the largest value of a row of zeros.
    """
    x, w, dy = random_operands(dtype)
    x[3] = dy[5] = w[7] = 0
    x[:, 2] = dy[:, 4] = w[:, 6] = 0
    y, dx, dw = products_of(x, w, dy)
    zeros = y[3], y[:, 7], dx[5], dx[:, 6], dw[4], dw[:, 2]
    assert not torch.cat([zero.flatten() for zero in zeros]).any()
    for ours, expected in zip((y, dx, dw), products_of(x, w, dy, float8=False)):
        assert ours.isfinite().all()
        assert 0.001 < relative(ours, expected) < 0.06  # rounded, and not wrong
    assert not any(result.any() for result in products_of(0 * x, 0 * w, 0 * dy))


@parametrize("dtype", [torch.float64, torch.bfloat16])
@parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite(value, dtype):
    """Wherever a product would not be finite in the model's dtype, it is not in float8 either.

    Catches an inf that becomes 448, so that a step which should be skipped updates the weights.
    """
    check_not_finite(value, dtype, CPU)


def check_not_finite(value: float, dtype: torch.dtype, device: torch.device) -> None:
    """Assert that an element of an operand that is not finite spoils the same elements of products
    as in the model's dtype."""
    for spoiled in range(3):
        operands = random_operands(dtype, device)
        operands[spoiled][9, 8] = value
        spoils = 0
        for ours, expected in zip(products_of(*operands), products_of(*operands, float8=False)):
            wrong = ours.isfinite() & ~expected.isfinite()
            assert not wrong.any()
            spoils += not expected.isfinite().all()
        assert spoils == 2  # each operand belongs to two of the three products


def test_float8_leaves_out_some_matrices():
    """Matrices of layers use float8 if their whole sizes are multiples of 16. Embedding and head
    never do, and neither does a matrix with cut="whole", or one whose rows are few.

    Catches a matrix whose rounding would depend on tp, and a head in float8.
    """
    with torch.device("meta"):
        model = m.LLaMA(SMALL)
        first = model.blocks[0]
        first.router = m.Matrix(32, SMALL.dim, cut="whole")
        first.gate = m.Matrix(3, SMALL.dim)
        first.more = m.Matrix(32, SMALL.dim)
    fp8.use_float8(model)
    in_float8 = {
        name
        for name, module in model.named_modules()
        if isinstance(module, m.Matrix) and isinstance(module.products, fp8.Float8Products)
    }
    names = [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "out", "gate_up", "down")]
    assert in_float8 == {*names, "blocks.0.more"}


# ---------------------------------------------------------------------------- known largest values


def unchanged(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return two things: what SwiGLU gets, which is gate|up itself, and what is added to the loss,
    which is nothing."""
    return gate_up, 0.0


def used_twice(gate_up: torch.Tensor) -> tuple:
    return gate_up, (gate_up * 3).sum()


def seen_as_a_view(gate_up: torch.Tensor) -> tuple:
    return gate_up.unflatten(0, (2, -1)), 0.0


def with_hook(change: Callable) -> Callable:
    """Return a function like `unchanged`, which makes autograd call change(gradient of gate|up)."""

    def hooked(gate_up: torch.Tensor) -> tuple:
        gate_up.register_hook(change)
        return gate_up, 0.0

    return hooked


def double_in_place(grad: torch.Tensor) -> None:
    grad.mul_(2)


def double_through_an_alias(grad: torch.Tensor) -> None:
    grad.detach()[:, 1:].mul_(2)


def double_uncounted(grad: torch.Tensor) -> None:
    """Change a gradient so that its version number stays the same."""
    grad.data.mul_(2)


def move_to_other_memory(grad: torch.Tensor) -> None:
    """Let a gradient be another tensor's memory. Its version number stays the same."""
    grad.data = grad * 2


def move_three_times(grad: torch.Tensor) -> None:
    """Let a gradient be other memory. If nothing held the first memory, the last could be at the
    same address."""
    grad.data = grad.detach() * 1e-6
    grad.data = grad.detach().clone()
    grad.data = grad.detach().clone()


def mlp_grads(
    use: Callable = unchanged,
    frozen: str = "",
    float8: bool = True,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
    tokens: int = 40,
    spoil: Callable | None = None,
) -> list[torch.Tensor]:
    """Return the gradients of x, of gate_up and of down in an MLP, y = down(swiglu(gate_up(x))).

    use: a function of gate|up such as `unchanged`. frozen: the matrix that does not train,
    "gate_up" or "down". spoil: a function that changes x and dy in place.
    """
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(device, dtype)

    gate_up, down = ops.Matrix(2 * 48, 32), ops.Matrix(32, 48)
    matrices = {"gate_up": gate_up, "down": down}
    products = fp8.Float8Products(dict.fromkeys(matrices.values(), 0))
    for name, matrix in matrices.items():
        matrix.frozen = name == frozen
        matrix.replace_weight(random(*matrix.shape))
        if float8:
            matrix.products = products
    x, dy = random(tokens, 32), random(tokens, 32)
    if spoil:
        spoil(x, dy)
    x.requires_grad_()
    wide, extra = use(ops.project(gate_up, ops.IDENTITY, x))
    y = ops.project(down, ops.SWIGLU, wide).flatten(0, -2)
    ((y * dy).sum() + extra).backward()
    grads = x.grad, gate_up.weight.grad, down.weight.grad
    return [grad for grad in grads if grad is not None]


def swiglu_backward_without_amax(da: torch.Tensor, gate_up: torch.Tensor) -> list[torch.Tensor]:
    """Do what fp8.swiglu_backward does, and return results to which nothing is attached."""
    return [result.detach() for result in fp8.swiglu_backward(da, gate_up)]


def check_known_amax(use: Callable, frozen: str, is_known: bool, device, dtype, patch) -> None:
    """Assert whether backward of an MLP knows the largest values of gate|up's gradient, and that
    its gradients are those for which the largest values are found again."""
    read = []  # shapes of tensors that are read to find their largest values
    known = {}  # by the last size of a tensor: whether its largest values were known
    largest_values, take_amax = fp8.largest_values, fp8.take_amax

    def note_read(x, of_rows, of_cols):
        read.append(x.shape)
        return largest_values(x, of_rows, of_cols)

    def note_taken(x, of_rows, of_cols):
        found = take_amax(x, of_rows, of_cols)
        known[x.shape[-1]] = found is not None
        return found

    patch.setattr(fp8, "largest_values", note_read)
    patch.setattr(fp8, "take_amax", note_taken)
    grads = mlp_grads(use, frozen, device=device, dtype=dtype)
    assert known[2 * 48] == is_known
    if frozen != "down":
        assert known[48]  # of a
    times_read = read.count((40, 2 * 48))
    if device.type == "cuda" and frozen != "down":
        times_read += 1  # there SwiGLU's kernel does not read its results again
    assert times_read == (1 if is_known or frozen == "down" else 2)

    patch.setitem(fp8.BACKWARD_WITH_AMAX, ops.swiglu_backward, swiglu_backward_without_amax)
    expected = mlp_grads(use, frozen, device=device, dtype=dtype)
    assert not known[2 * 48] and (frozen == "down" or not known[48])
    assert len(grads) == len(expected) and all(map(torch.equal, grads, expected))
    if device.type == "cpu":
        patch.setattr(fp8, "BACKWARD_WITH_AMAX", {})
        assert all(map(torch.equal, grads, mlp_grads(use, frozen, device=device, dtype=dtype)))


KNOWN_AMAX = [
    (unchanged, "", True),
    (unchanged, "gate_up", True),
    (unchanged, "down", False),  # SwiGLU's backward finds largest values only for a trained matrix
    (used_twice, "", False),
    (seen_as_a_view, "", False),
    (with_hook(double_in_place), "", False),
    (with_hook(double_through_an_alias), "", False),
    (with_hook(lambda grad: 2 * grad), "", False),
    (with_hook(move_to_other_memory), "", False),
    (with_hook(move_three_times), "", False),
]


@parametrize("dtype", [torch.float64, torch.bfloat16])
@parametrize("use, frozen, is_known", KNOWN_AMAX)
def test_largest_values_are_known_unless_the_gradient_changes(
    use, frozen, is_known, dtype, monkeypatch
):
    """The largest values that SwiGLU's backward finds in the gradient of gate|up are used, and that
    tensor is not read again to find them. They are not used if the gradient was changed in place,
    or replaced. The bits of all gradients are the same in any case.

    Catches scales of a gradient as it was before a second one was added to it.
    """
    check_known_amax(use, frozen, is_known, CPU, dtype, monkeypatch)


def test_a_fork_of_swiglu_keeps_its_own_backward(monkeypatch):
    """If a fork gives SwiGLU another backward, that one runs in float8, too.

    Catches gradients of the original SwiGLU.
    """

    def halved_backward(da, gate_up, needs_a=True):
        a, grad = ops.swiglu_backward(da, gate_up, needs_a)
        return a, grad / 2

    dx, dw_gate_up, dw_down = mlp_grads()
    monkeypatch.setattr(ops, "SWIGLU", replace(ops.SWIGLU, backward=halved_backward))
    halved = mlp_grads()
    assert all(map(torch.equal, halved, (dx / 2, dw_gate_up / 2, dw_down)))


def test_largest_values_are_taken_once():
    """The largest values of a tensor can be taken only once, and only if all that are asked for
    are there.

    Catches a second matrix that gets the maxima over all tensor-parallel ranks, where it asks for
    those of its own rank.
    """
    x, row_amax, col_amax = torch.ones(3, 2), torch.ones(3, 1), torch.ones(2, 1)
    assert fp8.take_amax(x, True, True) is None
    fp8.remember_amax(x, row_amax, col_amax)
    assert fp8.take_amax(x, True, False) == (row_amax, None)
    assert fp8.take_amax(x, True, False) is None
    fp8.remember_amax(x, None, col_amax)
    assert fp8.take_amax(x, True, True) is None


def test_a_change_that_pytorch_does_not_count_spoils_the_step():
    """If a hook changes a gradient through grad.data, its largest values are those from before. So
    the values that are larger become NaN.

    Catches gradients that are cut off without an error.
    """
    check_uncounted_change(CPU, torch.float64)


def check_uncounted_change(device: torch.device, dtype: torch.dtype) -> None:
    """Assert that gradients of x and gate_up are NaN if gate|up's gradient is doubled through
    grad.data, and that the gradient of down, which does not depend on it, is finite."""
    dx, dw_gate_up, dw_down = mlp_grads(with_hook(double_uncounted), device=device, dtype=dtype)
    assert dx.isnan().all() and dw_gate_up.isnan().all() and dw_down.isfinite().all()


@parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_of_an_mlp_that_are_not_finite(value):
    """Wherever a gradient of an MLP would not be finite in the model's dtype, it is not in float8.

    Catches NaN that is lost because largest values leave it out.
    """
    check_mlp_not_finite(value, CPU)


def check_mlp_not_finite(value: float, device: torch.device) -> None:
    """Assert that a number of x or dy that is not finite spoils the same gradients of an MLP as in
    bf16."""

    def spoil_x(x, dy):
        x[7, 5] = value

    def spoil_dy(x, dy):
        dy[7, 5] = value

    for spoil in (spoil_x, spoil_dy):
        flags = {"spoil": spoil, "dtype": torch.bfloat16, "device": device}
        for ours, expected in zip(mlp_grads(**flags), mlp_grads(**flags, float8=False)):
            assert not expected.isfinite().all()
            assert not (ours.isfinite() & ~expected.isfinite()).any()


@parametrize("keep", ["all", "mixed"])
def test_weights_do_not_depend_on_who_finds_largest_values(keep, group, monkeypatch):
    """Two steps give the same bits whether or not SwiGLU's backward finds largest values.

    Catches largest values of another chunk, or of another layer.
    """
    line = f"1 products=fp8 micro=2 dtype=bf16 keep={keep}"
    expected = weights_after_two_steps(line)
    monkeypatch.setattr(fp8, "BACKWARD_WITH_AMAX", {})
    assert torch.equal(weights_after_two_steps(line), expected)


# ---------------------------------------------------------------------------- equal results


def weights_after_two_steps(line: str, keeps_casts: bool = True) -> torch.Tensor:
    """Train a case for two steps. Return all weights, in one row.

    keeps_casts: whether casts of weights are kept from one update to the next.
    """
    run, model, states = make_run(make_case(line), {}, SpoilingStream)
    model.blocks[0].qkv.products.keeps_casts = keeps_casts  # all matrices share it
    train.load_random_weights(run, states)
    for i in range(2):
        _, _, finite = train.run_step(model, states, train.load_batch(run, 8 * i), 1e-2, 1.0)
        assert finite
    names = sorted(model.shapes)
    return torch.cat([states.full_param(name).cpu().flatten() for name in names])


@parametrize("dtype", ["fp64", "bf16"])
def test_weights_do_not_depend_on_what_is_kept(dtype, group):
    """Two steps give the same bits whichever chunks are kept, swapped or recomputed, and whether
    casts of weights live for a layer or for a step.

    Catches a recomputed operand that is rounded in another way, and a cast of old weights.
    """
    line = f"1 products=fp8 micro=2 dtype={dtype}"
    expected = weights_after_two_steps(f"{line} keep=kept")
    for keep in [keep for keep, row in KEEPS.items() if row and keep != "kept"]:
        assert torch.equal(weights_after_two_steps(f"{line} keep={keep}"), expected), keep
    for keep in ("kept", "again"):
        assert torch.equal(weights_after_two_steps(f"{line} keep={keep}", False), expected)

    # another chunk size rounds gradients of weights in another way
    assert 0 < relative(weights_after_two_steps(f"{line} keep=all"), expected) < 0.1


def test_a_step_reads_no_casts_of_an_evaluation(group):
    """A step casts all weights anew, even if an evaluation has cast the same weights before it.

    Catches a CUDA graph, captured after an evaluation, that goes on with that evaluation's casts.
    """
    run, model, states = make_run(make_case("1 products=fp8"), {}, SpoilingStream)
    train.load_random_weights(run, states)
    batch = train.load_batch(run, 0)
    evaluate_batch(run, model, batch)
    casts = model.blocks[0].qkv.products.weight_casts
    assert casts
    for cast in casts.values():
        cast.scale.fill_(torch.nan)
    _, _, finite = train.run_step(model, states, batch, 1e-2, 1.0)
    assert finite


def test_resume_and_export(tmp_path, capsys):
    """A resumed run trains in float8 as an uninterrupted one does, and exports its weights. A run
    may change between products in float8 and in the model's dtype when it is resumed.

    Catches a checkpoint that lacks something, casts of the initial weights that are used after a
    resume, and an export of rounded weights.
    """
    main(f"--products fp8 --save-every 3 --keep 9 --out {tmp_path}/a")
    resume = f"--resume {tmp_path}/a/step-00000003"
    main(f"{resume} --out {tmp_path}/b --export {tmp_path}/hf")
    expected = losses(tmp_path / "a")
    assert len(expected) == 6 and losses(tmp_path / "b") == expected[3:]
    folders = tmp_path / "a" / "step-00000006", tmp_path / "b" / "step-00000006"
    ours, resumed = (load_file(folder / "rank-00000-0.safetensors") for folder in folders)
    assert all(torch.equal(ours[name], resumed[name]) for name in ours)
    exported = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    down = exported["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(ours["master.blocks.1.down.weight"], down.flatten())

    main(f"{resume} --out {tmp_path}/c --products dtype")
    assert "--products fp8" not in capsys.readouterr().out.rpartition("resumed")[2]
    in_dtype = losses(tmp_path / "c")
    main(f"--resume {tmp_path}/c/step-00000006 --out {tmp_path}/d --products fp8 --steps 7")
    assert len(losses(tmp_path / "d")) == 1
    for (_, loss, _), (_, other, _) in zip(in_dtype, expected[3:]):
        assert 0 < abs(loss / other - 1) < 0.01


# ---------------------------------------------------------------------------- flags and messages


@parametrize(
    "flags, message",
    [
        (
            "--tp 2 --tp-mode fsp",
            "--tp-mode fsp: it gathers .*, which --products fp8 casts .*Nearest legal choice: "
            "--tp-mode msp",
        ),
        ("--tp auto --tp-mode fsp", "--tp-mode fsp: .*--tp-mode msp"),
        ("--products fp9", "--products.* fp9.*dtype.*fp8"),
    ],
)
def test_planner_refuses_fp8(flags, message, capsys):
    """A tensor-parallel mode that does not work with float8 is refused before anything runs.

    Catches a flag that is ignored without an error.
    """
    with raises(SystemExit) as e:
        planner.main(["--model", "1b", "--ranks", "2", "--products", "fp8", *flags.split()])
    assert e.value.code == 2 and re.search(message, capsys.readouterr().err)


def test_slices_must_be_multiples_of_16():
    """With float8, a tp is refused if a slice of a matrix would have a size that is no multiple of
    16, and the error names the matrix. `--tp auto` leaves out such a tp. It is legal if the whole
    matrix is not in float8 anyway.

    Catches an assertion of the engine in place of an error, and results that depend on tp.
    """

    def shapes(cfg: m.ModelConfig, **flags) -> list[costs.Plan]:
        constraints = planner.Constraints(seq=64, batch=2, dtype="bf16", **flags)
        return planner.shapes(constraints, cfg, planner.Hardware(2, 2, None))

    # q|k|v has 80 rows and out has 48 columns, so each of two ranks would have 40 and 24
    message = (
        "--tp 2: --products fp8 needs multiples of 16, and a matrix 80 x 48 would be 40 x 48 on "
        "each GPU.*--tp 1"
    )
    with raises(ValueError, match=message):
        shapes(SMALL, tp=2, products="fp8")
    assert {plan.tp for plan in shapes(SMALL, tp=None, products="fp8")} == {1}
    assert {plan.tp for plan in shapes(SMALL, tp=None)} == {1, 2}
    # here only down and gate_up stay in bf16, so that their slices may have any size
    odd = replace(SMALL, kv_heads=6, head_dim=16, ffn=84)
    assert {plan.tp for plan in shapes(replace(odd, dim=96), tp=2, products="fp8")} == {2}
    with raises(ValueError, match="--products fp8: no matrix .* multiples of 16.*--products dtype"):
        shapes(replace(SMALL, dim=40), products="fp8")


def test_slices_of_a_forks_matrix_must_be_multiples_of_16():
    """A fork's own matrix, which the planner does not know, is refused by name if its slices have
    sizes that are no multiples of 16.

    Catches an assertion of the engine, which would not say what to do.
    """
    with torch.device("meta"):
        model = m.LLaMA(replace(SMALL, kv_heads=6, head_dim=16, dim=96, ffn=96))
        model.blocks[1].expert = m.Matrix(80, 96, cut="rows")
    parts = "tp_input", "tp_prologue", "tp_output", "select_tp_tokens"
    tensor.split_model(model, SimpleNamespace(tp=2, tp_rank=0, **dict.fromkeys(parts)))
    with raises(ValueError, match="the matrix 1.expert, 80 x 96, would be 40 x 96 .*--tp 1"):
        fp8.use_float8(model)


def test_run_says_what_is_in_float8(tmp_path, monkeypatch, capsys):
    """A run says that a CPU emulates float8, and which matrices stay in the model's dtype.

    Catches a flag that changes nothing and does not say so.
    """
    flags = f"--products fp8 --steps 1 --save-every -1 --out {tmp_path}"
    main(flags)
    text = capsys.readouterr().out
    assert "the matrix products in the layers run in float8. Here they are emulated: " in text

    monkeypatch.setitem(m.MODELS, "tiny", replace(m.MODELS["tiny"], ffn=500))
    main(flags)
    text = capsys.readouterr().out
    assert "except for matrices 1000 x 192, 192 x 500, whose sizes are no multiples of 16: " in text
    assert "those stay in float32. Here they are emulated: " in text
    main(flags.replace("fp8", "dtype"))
    assert "float8" not in capsys.readouterr().out


def test_run_names_matrices_that_tensor_parallelism_leaves_whole(tmp_path, capsys):
    """A run with adapters says which of their matrices stay in the model's dtype, and why, although
    their sizes are multiples of 16.

    Catches a plan that counts float8 products which do not run.
    """
    main(f"--architecture lora --products fp8 --steps 0 --save-every -1 --out {tmp_path}")
    text = capsys.readouterr().out
    assert "except for matrices 16 x 192, 192 x 16, which --tp never splits: those stay" in text


def test_planner_keeps_casts_where_they_fit():
    """Casts of weights are kept for a step if there is room. The plan says so, and it says how much
    faster float8 makes the step.

    Catches casts that are made again in each micro-batch although there is room, and a flag that
    gains little and does not say so.
    """

    def best(model: str, seq: int, batch: int, cluster="h100x1", ranks=1, **flags) -> tuple:
        asked = planner.PlannerFlags(cluster=cluster, ranks=ranks)
        constraints = planner.Constraints(
            seq=seq, batch=batch, products="fp8", document_token=-1, **flags
        )
        hardware = asked.hardware()
        plan = planner.plan(constraints, m.MODELS[model], hardware)[0]
        return plan, planner.describe_plans([plan], hardware)

    plan, text = best("1b", 2**13, 32)
    assert plan.keeps_casts and "float8 casts kept for a step" in planner.in_words(plan)
    gain = float(re.search(r"predicted to be ([\d.]+)% faster\.", text)[1])
    assert 3 < gain < 30
    assert not best("llama3-8b", 2**13, 68)[0].keeps_casts  # there is no room on 80 GB
    _, text = best("1b", 2**19, 1)  # attention takes most of the time
    assert "That is little: " in text
    assert "no rates of products in float8" in best("1b", 2**13, 32, "a800")[1]


def test_bound_is_that_of_float8_products(monkeypatch):
    """The kernels that bound a step with float8 multiply its layers in float8, and its head in its
    own dtype.

    Catches a percent of kernel bound above 100 %.
    """
    calls = []
    monkeypatch.setattr(fp8, "product", lambda *args, **flags: calls.append(args))
    plan = plan_of(make_case("1 products=fp8 dtype=bf16"))
    layer, head = bench.kernels_alone(SimpleNamespace(plan=plan, device=CPU, kernel="cpu"))
    head()
    assert not calls
    layer()
    assert len(calls) == 3 * len(plan.matrices)


def test_float8_bytes_are_counted():
    """A plan with float8 products counts casts of activations and of weights, which a GPU needs in
    addition to all other tensors.

    Catches a run that is planned to fit and runs out of memory.
    """
    plans = [replace(SMALL_PLAN, products=products) for products in ("dtype", "fp8")]
    moment = "product of down"
    in_dtype, in_fp8 = (costs.total_bytes(costs.working_moments(plan)[moment]) for plan in plans)
    n, c, f = SMALL_PLAN.tokens, SMALL_PLAN.model.dim, SMALL_PLAN.model.ffn
    assert in_fp8 - in_dtype >= n * (c + f)  # of dy^T and a^T of `down`

    def bytes_of_casts(plan: costs.Plan) -> float:
        gpu, _ = costs.memory_of_states(plan)
        return gpu.get("float8 casts", 0)

    layer = 4 * c * c + 3 * c * f
    assert bytes_of_casts(plans[0]) == 0 and bytes_of_casts(plans[1]) == 2 * layer
    kept = replace(plans[1], keeps_casts=True)
    assert bytes_of_casts(kept) == 2 * SMALL_PLAN.stage_layers * layer
    # gate_up and down stay in bf16, because one of their sizes is odd
    odd = replace(plans[1], model=replace(SMALL_PLAN.model, ffn=f + 1))
    assert bytes_of_casts(odd) == 2 * 4 * c * c


# ---------------------------------------------------------------------------- GPUs


@needs_gpu
@parametrize("shape", [(1000, 4096), (8192, 14336), (17, 48), (128, 128), (129, 16)])
def test_gpu_casts_equal_the_plain_ones(shape):
    """The kernels of fp8_kernels.py give the bits of the plain casts, by rows and by columns. One
    row and one column are 0. Rows of the transpose are padded with zeros.

    Catches a tile that reads beyond the matrix, and a division that is not exact.
    """
    device = needs_tensor_cores()
    rng = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, generator=rng, device=device).bfloat16()
    x *= torch.logspace(-6, 6, shape[0], device=device)[:, None].bfloat16()
    x[11] = x[:, 5] = 0
    amax = fp8.largest_values(x, True, True)
    for rows, found in zip((x, x.t()), amax):
        assert torch.equal(found, rows.abs().amax(1, True).float())

    casts = fp8.cast_both(x, *amax)
    one_by_one = fp8.cast_both(x, amax[0], None)[0], fp8.cast_both(x, None, amax[1])[1]
    for rows, cast, same, largest in zip((x, x.t()), casts, one_by_one, amax):
        expected = fp8.cast_by_amax(rows, largest)
        assert torch.equal(cast.scale, expected.scale)
        values = cast.values.view(torch.uint8)
        assert torch.equal(values, same.values.view(torch.uint8))
        assert values.shape[1] % fp8.MULTIPLE == 0 or rows is x
        width = rows.shape[1]
        assert torch.equal(values[:, :width], expected.values.contiguous().view(torch.uint8))
        assert not values[:, width:].any()


def needs_tensor_cores() -> torch.device:
    """Return the GPU, or skip the test if it has no float8."""
    device = torch.device("cuda")
    if not fp8.has_float8(device):
        pytest.skip("this GPU does not multiply float8 matrices")
    return device


@needs_gpu
@parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_gpu_values_that_are_not_finite(value):
    """On a GPU, too, a product that would not be finite in bf16 is not in float8.

    Catches a kernel that drops NaN when it looks for the largest value, and casts it to a number.
    """
    check_not_finite(value, torch.bfloat16, needs_tensor_cores())


@needs_gpu
@parametrize("shape", [(1000, 14336), (8192, 1024), (1, 16), (17, 48), (129, 80), (64, 64)])
def test_gpu_swiglu_backward_equals_the_compiled_one(shape):
    """The kernel of fp8_kernels.py for SwiGLU's backward is as exact as the one that PyTorch
    compiles. The largest values that it returns are exactly those of the tensors that it writes.

    Catches a tile that reads or writes beyond the matrix, and largest values of numbers that are
    not rounded to bf16 yet.
    """
    device = needs_tensor_cores()
    rows, cols = shape
    rng = torch.Generator(device).manual_seed(0)
    gate_up = (4 * torch.randn(rows, 2 * cols, generator=rng, device=device)).bfloat16()
    da = torch.randn(rows, cols, generator=rng, device=device).bfloat16()
    # in a batch, as in a model: (1, N, ...)
    ours = fp8.swiglu_backward(da[None], gate_up[None])
    compiled = ops.swiglu_backward(da[None], gate_up[None])
    exact = ops.swiglu_backward(da[None].double(), gate_up[None].double())
    for mine, theirs, expected in zip(ours, compiled, exact):
        assert mine.dtype == torch.bfloat16 and mine.shape == expected.shape
        assert relative(mine, expected) < 1.01 * relative(theirs, expected) + 1e-6
        # at most one unit in the last place apart, and nearly always equal
        assert ((mine - theirs).abs() <= theirs.abs() / 64).all()
        assert (mine == theirs).float().mean() > 0.99

    a, dgate_up = ours
    (a_row_amax, a_col_amax), amax = a.known_amax[:2], fp8.take_amax(dgate_up, True, True)
    assert a_row_amax is None
    expected_amax = fp8.largest_values(dgate_up[0], True, True)
    assert all(map(torch.equal, amax, expected_amax))
    assert torch.equal(a_col_amax, fp8.largest_values(a[0], False, True)[1])
    assert torch.equal(amax[0], dgate_up[0].abs().amax(1, True).float())
    assert torch.equal(amax[1], dgate_up[0].abs().amax(0)[:, None].float())


@needs_gpu
@parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_gpu_swiglu_backward_that_is_not_finite(value):
    """On a GPU, too, SwiGLU's backward is not finite where the compiled kernel's is not, and
    neither are the casts of its results.

    Catches NaN that is lost because largest values leave it out.
    """
    device = needs_tensor_cores()
    check_mlp_not_finite(value, device)
    for where in ((9, 8), (9, 88)):  # in gate, in up
        gate_up, da = random_operands(torch.bfloat16, device, 200, 80, 160)[::2]
        for spoiled in (gate_up, da):
            spoiled[where[0], where[1] % spoiled.shape[1]] = value
            compiled = ops.swiglu_backward(da, gate_up)
            for mine, theirs in zip(fp8.swiglu_backward(da, gate_up), compiled):
                assert torch.equal(mine.isnan(), theirs.isnan())
                assert torch.equal(mine.isinf(), theirs.isinf())
                row_amax, col_amax = mine.known_amax[:2]
                for cast in fp8.cast_both(mine, row_amax, col_amax):
                    if cast is not None:
                        is_rows = cast.values.shape == mine.shape
                        values = mine if is_rows else mine.t()
                        finite = cast.values.float()[:, : values.shape[1]].isfinite()
                        assert not (finite & ~values.isfinite()).any()


@needs_gpu
@parametrize("use, frozen, is_known", KNOWN_AMAX)
def test_gpu_largest_values_are_known_unless_the_gradient_changes(
    use, frozen, is_known, monkeypatch
):
    """On a GPU, too, known largest values are used, but not if the gradient was changed since. If
    PyTorch does not count the change, the gradients become NaN.

    Catches scales of a gradient as it was before a second one was added to it.
    """
    device = needs_tensor_cores()
    check_known_amax(use, frozen, is_known, device, torch.bfloat16, monkeypatch)
    monkeypatch.undo()
    check_uncounted_change(device, torch.bfloat16)


@needs_gpu
@parametrize("prologue", ["identity", "swiglu"])
@parametrize("tokens, rows, cols", [(1000, 512, 1024), (4096, 2048, 512), (17, 48, 32)])
def test_gpu_products_equal_the_emulation(tokens, rows, cols, prologue):
    """The three products on tensor cores are those that a CPU emulates in float64, up to the
    rounding of bf16. The number of tokens need not be a multiple of 16, as in a last chunk.

    Catches an operand that is transposed, or scaled by another row's scale, and lost tokens.
    """
    device = needs_tensor_cores()
    width = 2 * cols if prologue == "swiglu" else 0
    operands = random_operands(torch.bfloat16, device, tokens, rows, cols, width)
    chosen = {"identity": ops.IDENTITY, "swiglu": ops.SWIGLU}[prologue]
    emulated = products_of(*(t.cpu().double() for t in operands), chosen)
    exact = products_of(*(t.cpu().double() for t in operands), chosen, float8=False)
    for ours, expected, unrounded in zip(products_of(*operands, chosen), emulated, exact):
        assert ours.dtype == torch.bfloat16
        # SwiGLU's own result may be rounded to bf16 before it is cast, or not
        assert relative(ours.cpu(), expected) < 0.01 + 0.01 * (prologue == "swiglu")
        assert relative(ours.cpu(), unrounded) < 0.06


def compare_what_is_kept(line: str) -> None:
    """Assert that two steps of a case give the same bits whichever chunks are kept."""
    expose_races()
    expected = weights_after_two_steps(f"{line} keep=kept")
    for keep in ("again", "swapped", "mixed", "no-o"):
        assert torch.equal(weights_after_two_steps(f"{line} keep={keep}"), expected), keep
    assert torch.equal(weights_after_two_steps(f"{line} keep=again", False), expected)
    print("bit-equal")


@needs_gpu
def test_gpu_weights_do_not_depend_on_what_is_kept():
    """On a GPU, too, two steps give the same bits whichever chunks are kept or recomputed.

    Catches two kernels for one operand, of which one runs in forward and the other one when the
    chunk is recomputed, and which round differently.
    """
    needs_tensor_cores()
    line = "1 products=fp8 micro=2 dtype=bf16 model=wide device=cuda kernel=naive"
    assert "bit-equal" in on_ranks(1, compare_what_is_kept, line, gpus=1)
