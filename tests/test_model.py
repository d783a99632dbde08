"""Test the model by itself: sizes, FLOPs, initial weights, rotary embeddings, operators,
kernels."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx, raises

import attention
import fp8
import hardware
import model as m
import offload
import ops
import optim
import shard
import tensor
from test_all import SMALL, example, needs_gpu, parametrize, relative, seeded_model


@parametrize(
    "cfg, count",
    [
        (m.MODELS["7b"], 6_738_415_616),
        (m.MODELS["13b"], 13_015_864_320),
        (m.MODELS["30b"], 32_528_943_616),
        (m.MODELS["65b"], 65_285_660_672),
        (m.MODELS["llama3-8b"], 8_030_261_248),
        (m.MODELS["qwen3-8b"], 8_190_735_360),
        # Mistral-Nemo, Qwen2.5-7B
        (m.ModelConfig(131072, 5120, 40, 32, 8, 14336), 12_247_782_400),
        (m.ModelConfig(152064, 3584, 28, 28, 4, 18944, qkv_bias=True), 7_615_616_512),
    ],
)
def test_parameters_are_the_published_ones(cfg, count):
    """The number of parameters is the published one, and FLOPs per token follow from it.

    Catches a size of a model that differs from the published one, and a wrong formula for FLOPs.
    """
    assert m.param_count(cfg) == count
    few = replace(cfg, layers=2)
    with torch.device("meta"):
        assert sum(p.numel() for p in m.LLaMA(few).parameters()) == m.param_count(few)
    causal, full = m.flops_per_token(cfg, 2**20)
    attention = 6 * cfg.layers * cfg.heads * cfg.head_dim * 2**20  # 6 L H D s
    assert causal == 6 * count + attention
    assert full == causal + attention


def test_loss_of_no_tokens():
    """A rank without tokens may call the head with x[:0], as States.check_uses advises. Then its
    loss and its gradients are 0.

    Catches an error, or gradients that nobody has set.
    """
    head = m.Matrix(16, 8)
    torch.nn.init.normal_(head.weight)
    x = torch.randn(3, 8, requires_grad=True)
    labels = torch.zeros(3, dtype=torch.long)
    loss, losses = ops.head_loss(head, x[:0], labels[:0], torch.tensor(1.0), differentiate=True)
    loss.backward()
    assert loss == 0 and losses.shape == (0, 1)
    assert not head.weight.grad.any() and not x.grad.any()


def test_peak_flops_are_those_of_data_sheets():
    """A GPU's peak FLOP/s are those of its data sheet, found by the name that its driver reports.

    Catches an MFU that is computed with another GPU's peak.
    """
    for name, tflops in (
        ("A800-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("H200", 989.4),
        ("H100 80GB HBM3", 989.4),
        ("H100 PCIe", 756),
        ("B200", 2250),
    ):
        assert hardware.peak_flops(f"NVIDIA {name}") == tflops * 1e12


@parametrize(
    "sizes, message",
    [
        (dict(head_dim=7), "head_dim is 7.*nearest: 8"),
        (dict(rope_scaling={"type": "dynamic"}), "rope scaling 'dynamic' is unknown: linear"),
    ],
)
def test_model_sizes_that_no_kernel_computes_are_refused(sizes, message):
    """Sizes that no kernel computes are refused, with the nearest legal size. Catches an odd head
    width, whose last element has no partner in the rotary embedding."""
    with raises(ValueError, match=message):
        replace(SMALL, **sizes)


def test_initial_weights_have_their_standard_deviations():
    """With initial matrices, products are as large as their inputs. Matrices that add to the
    residual stream are smaller by sqrt(2L).

    Catches initial weights of the wrong size.
    """
    with torch.device("meta"):
        weight_init = m.LLaMA(m.MODELS["1b"]).weight_init
    for name, cols, std in (
        ("embed", 2048, 1),
        ("head", 2048, 2048**-0.5),
        ("blocks.0.qkv", 2048, 2048**-0.5),
        ("blocks.0.down", 5504, (5504 * 48) ** -0.5),
    ):
        name = f"{name}.weight"
        drawn = m.initial_weight(name, (500, cols), weight_init[name], 0, "cpu")
        assert drawn.std().item() == approx(std, rel=0.01)
    norm = m.initial_weight("norm.weight", (9,), weight_init["norm.weight"], 0, "cpu")
    assert torch.equal(norm, torch.ones(9))


def test_first_loss_of_a_tied_model():
    """A tied model begins near the loss log(V), as an untied one does.

    An untied embedding has a standard deviation of 1. With this, a tied matrix would make logits
    too large. Catches a first loss of 40 or more.
    """
    for cfg in (SMALL, m.MODELS["tiny"]):
        excess = []  # of the first loss over log(V)
        for tied in (False, True):
            model = m.LLaMA(replace(cfg, tied=tied))
            model.init_weights(0)
            loss = model(*example(vocab=cfg.vocab)).item()
            excess.append(loss - math.log(cfg.vocab))
        assert 0 < min(excess) and max(excess) < 0.8
        assert m.param_count(model.cfg) == m.param_count(cfg) - cfg.vocab * cfg.dim
    assert model.weight_init["embed.weight"] == approx((0.0, 192**-0.5))


def test_seeds_make_other_weights():
    """Different seeds draw different weights, and so do different names.

    Catches two seeds or two matrices that get the same weights.
    """

    def weight(seed, name="embed.weight"):
        return m.initial_weight(name, (8, 8), (0.0, 1.0), seed, "cpu")

    seeds = [0, 1, 2, 2**16, 2**30, 2**31 - 1]
    drawn = [weight(s) for s in seeds] + [weight(0, "head.weight")]
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.equal(a, b)
    assert torch.equal(weight(7), weight(7))


def test_logits_follow_from_earlier_tokens_and_distances():
    """A token's logits do not change if later tokens change, or if all positions shift.

    Catches a token that attends to later tokens, and a position that is not relative.
    """
    model = seeded_model(SMALL)
    tokens, _ = example()
    later = torch.arange(40) >= 30
    logits = model(tokens)
    changed = model((tokens + later) % SMALL.vocab)
    assert torch.equal((changed != logits).any(-1), later.expand(2, -1))
    shifted = model(tokens, positions=torch.arange(40) + 2**20)
    assert relative(shifted, logits) < 1e-9


def test_all_labels_ignored():
    """If all labels are ignored, the loss and the gradients are zero.

    Catches a mean over no labels, which would be NaN.
    """
    model = seeded_model(SMALL)
    tokens, labels = example()
    loss = model(tokens, torch.full_like(labels, m.IGNORE))
    loss.backward()
    assert loss == 0
    assert not model.blocks[0].qkv.weight.grad.any()


def test_losses_of_tokens_have_no_gradients():
    """The mean of the tokens' losses is the loss, and they have no gradients.

    Catches an evaluation that holds the graphs of all layers.
    """
    model = seeded_model(SMALL)
    tokens, labels = example()
    losses = model(tokens, labels, per_token=True)
    assert not losses.requires_grad
    assert not losses[labels == m.IGNORE].any()
    mean = losses.sum() / (labels != m.IGNORE).sum()
    assert relative(mean, model(tokens, labels)) < 1e-12


def published_frequencies(kind: str) -> np.ndarray:
    """Return the frequencies of 64 pairs in radians per position, for a model that was trained at
    4096 tokens and is scaled to 8 times this length.

    Sources: Llama 3.1's code, and arXiv 2309.00071 (A.2, YaRN).
    """
    i = np.arange(64, dtype=np.longdouble)
    freq = np.longdouble(10000) ** (-i / 64)
    # how much of a frequency is kept; 1: it is not scaled, 0: it is divided by 8
    keep = {"default": 1.0, "linear": 0.0}.get(kind)
    if kind == "llama3":
        wavelength = 2 * np.pi / freq
        keep = np.clip((4096 / wavelength - 1) / (4 - 1), 0, 1)
    if kind == "yarn":
        fast, slow = (64 * np.log(4096 / (turns * 2 * np.pi)) / np.log(10000) for turns in (32, 1))
        keep = 1 - np.clip((i - np.floor(fast)) / (np.ceil(slow) - np.floor(fast)), 0, 1)
    return keep * freq + (1 - keep) * freq / 8


@parametrize("kind", ["default", *m.ROPE_KEYS])
def test_rope_at_a_million_positions(kind):
    """Rotary angles are the published ones up to a million positions.

    Catches angles that are computed in float32, which are wrong by up to 1/32, or 1/10 with a ramp
    between frequencies. Catches also a ramp that is off by one, and a scaling that is forgotten.
    """
    scaling = {
        "rope_type": kind,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    cfg = replace(m.MODELS["7b"], rope_scaling={} if kind == "default" else scaling)
    positions = torch.tensor([0, 1, 2**19 + 1, 2**20 - 1])
    angles = positions.numpy()[:, None] * published_frequencies(kind)
    factor = 0.1 * np.log(8) + 1 if kind == "yarn" else 1.0
    cos, sin = m.rope_tables(cfg, positions, torch.float64)
    assert np.abs(cos.numpy() - factor * np.cos(angles)).max() < 1e-9
    assert np.abs(sin.numpy() - factor * np.sin(angles)).max() < 1e-9


@parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_products_for_weights_add_up_in_float32(device):
    """Gradients of weights that are products of bf16 tensors add up in float32.

    Catches gradients that are rounded before they are summed.
    """
    torch.manual_seed(0)
    dy, x, earlier = torch.randn(3, 64, 64, device=device).bfloat16()
    out = ops.weight_grad_into(dy, x, earlier.float(), 1)
    assert relative(out, earlier.double() + dy.double().t() @ x.double()) < 1e-6


def test_gradient_of_an_embedding_adds_up_in_float32():
    """The gradient of a bf16 embedding is the sum over all tokens, also if a few ids have most of
    them.

    Catches sums in bf16, which lose what is small beside the sum.
    """
    torch.manual_seed(0)
    embed = m.Matrix(4, 8).bfloat16()
    torch.nn.init.normal_(embed.weight)
    tokens = torch.randint(4, (2, 5000))
    dx = (torch.randn(2, 5000, 8) + 1).bfloat16()
    ops.embedding(embed, tokens).backward(dx)
    want = torch.zeros(4, 8, dtype=torch.float64)
    want.index_add_(0, tokens.flatten(), dx.double().flatten(0, 1))
    assert embed.weight.grad.dtype == torch.bfloat16
    assert relative(embed.weight.grad, want) < 4e-3  # one rounding to bf16


def test_compiled_functions_say_what_they_write_into():
    """A compiled function that writes into a large argument says so (ops.compiled).

    Each compiled function runs once on small tensors, and PyTorch counts how often each argument
    was written. Catches a kernel whose first call saves gigabytes in the host's memory.
    """

    def numbers(*shape):
        return torch.rand(shape, generator=seed)

    seed = torch.Generator().manual_seed(0)
    merged = [numbers(1, 3, 2, 4), numbers(1, 2, 3)]  # o and lse
    arguments = {
        ops.norm_forward: (numbers(3, 4), numbers(4), 1e-5),
        ops.norm_backward: (numbers(3, 4), numbers(3, 4), numbers(4), numbers(3, 1)),
        ops.split_rotate_forward: (numbers(1, 3, 4, 4), numbers(3, 2), numbers(3, 2), (2, 1, 1)),
        ops.rotate_back_into: (
            numbers(1, 3, 2, 4),
            numbers(3, 2),
            numbers(3, 2),
            numbers(1, 3, 2, 4),
        ),
        ops.swiglu_forward: (numbers(3, 4),),
        ops.swiglu_backward_into: (*numbers(5, 3, 4), True),
        ops.softmax_loss: (numbers(3, 4), torch.arange(3), numbers(), numbers(3, 4)),
        fp8.cast_rows: (numbers(3, 4),),
        fp8.add_into: tuple(numbers(2, 3, 4)),
        attention.merge_into: (*merged, *merged),
        attention.merge_document: (*merged, *merged),
        # the weight, its gradient and three states; four rates; finite, weight decay, step and what
        # bf16 moments need
        optim.fused_adamw: (
            *(*numbers(5, 6), *numbers(4)),
            *(torch.tensor(True), 0.1, 1, None, None, None),
        ),
        optim.join_bits: (*torch.ones(3, 6, dtype=torch.int32),),
        optim.split_master: (numbers(6), numbers(6).bfloat16(), torch.ones(6, dtype=torch.int16)),
    }
    compiled = {
        fn
        for module in (ops, fp8, attention, optim, shard, m, offload, tensor)
        for fn in vars(module).values()
        if getattr(fn, "is_compiled", False)
    }
    assert compiled == set(arguments)
    for fn, args in arguments.items():
        tensors = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        before = [getattr(x, "_version", 0) for x in tensors]
        fn(*tensors)
        written = before != [getattr(x, "_version", 0) for x in tensors]
        # softmax_loss writes too, but at most LOSS_ELEMENTS numbers in bf16, 0.25 GiB
        assert written == (fn.writes or fn is ops.softmax_loss), fn.__name__


def test_swiglu_of_a_transposed_tensor():
    """The gradients of SwiGLU do not depend on how its input lies in memory.

    Catches gradients that are written into a copy.
    """
    torch.manual_seed(0)
    down = m.Matrix(5, 6).double()
    torch.nn.init.normal_(down.weight)
    gate_up = torch.randn(3, 2, 12).double().requires_grad_()
    dy = torch.randn(2, 3, 5).double()
    y = ops.project(down, ops.SWIGLU, gate_up.transpose(0, 1))
    gate, up = gate_up.transpose(0, 1).chunk(2, -1)
    plain = F.linear(F.silu(gate) * up, down.weight)
    inputs = gate_up, down.weight
    for ours, want in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(plain, inputs, dy)
    ):
        assert relative(ours, want) < 1e-12


GELU = ops.Prologue(  # as in Prologue's docstring
    lambda u: (F.gelu(u),),
    lambda da, u: (F.gelu(u), torch.ops.aten.gelu_backward(da, u)),
)


class Gelu(m.Block):
    """A layer whose MLP is not gated, as in Block's docstring."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate_up = m.Matrix(cfg.ffn, cfg.dim, cut="rows")

    def post(self, x, o, positions):
        h = x + self.out(o.flatten(2))
        up = ops.project(self.gate_up, self.norm, h, self.norm2.weight)
        return h + ops.project(self.down, GELU, up)


def test_another_activation_is_a_prologue(monkeypatch):
    """The example of another activation in Block's docstring has PyTorch's gradients, --tp may
    split it, and recomputation may skip its last product.

    Catches an example that does not run.
    """
    monkeypatch.setattr(m, "Block", Gelu)
    block = seeded_model(SMALL).blocks[0]
    u = torch.randn(2, 3, SMALL.ffn).double().requires_grad_()
    weight = block.down.weight
    dy = torch.randn(2, 3, SMALL.dim).double()
    ours = torch.autograd.grad(ops.project(block.down, GELU, u), (u, weight), dy)
    plain = torch.autograd.grad(F.linear(F.gelu(u), weight), (u, weight), dy)
    for grad, expected in zip(ours, plain):
        assert relative(grad, expected) < 1e-12
    tensor.check_tensor_parallel(SMALL, "mtp")
    x = torch.randn(1, 2, SMALL.dim).double().requires_grad_()
    o = torch.randn(1, 2, SMALL.heads, SMALL.head_dim).double()
    assert ops.find_unread_product(block.post(x, o, None)) is block.down


@parametrize(
    "last_line, unread",
    [
        (lambda h, product: h + product, True),
        (lambda h, product: (h + h.sin()) + product, True),
        (lambda h, product: h * product, False),  # backward of * reads its factors
        (lambda h, product: h + product.tanh(), False),  # tanh reads its result
        (lambda h, product: (h * product) + product, False),  # the first term reads it
        (lambda h, product: product + h, False),  # could be skipped, but is not looked for
    ],
)
def test_unread_product(last_line, unread):
    """Recomputation skips the last product of a layer only if backward does not read it.

    Catches gradients that are computed from a product that was skipped.
    """
    matrix = ops.Matrix(5, 5)
    torch.nn.init.normal_(matrix.weight)
    h, u = torch.randn(2, 3, 5, requires_grad=True).unbind()

    def run():
        return last_line(h, ops.project(matrix, GELU, u))

    found = ops.find_unread_product(run())
    assert (found is matrix) == unread
    expected = torch.autograd.grad(run().sum(), (h, u, matrix.weight))
    with ops.recomputation(found):
        y = run()
    assert isinstance(y, ops.UnreadProduct) == unread
    if unread:
        y = y.unwrap()
    assert y.isnan().all() == unread  # the product that was skipped is NaN
    for grad, same in zip(torch.autograd.grad(y.sum(), (h, u, matrix.weight)), expected):
        assert torch.equal(grad, same)


def test_a_product_whose_prologue_saves_extras_is_not_skipped():
    """Recomputation never skips a product whose prologue saves more than its inputs.

    Catches a backward that lacks a norm's 1 / rms.
    """
    block = m.Block(SMALL)
    x = torch.randn(2, 3, SMALL.dim, requires_grad=True)
    y = x + ops.project(m.Matrix(SMALL.dim, SMALL.dim), block.norm, x, block.norm1.weight)
    assert ops.find_unread_product(y) is None


def test_attention_choice():
    """`--attention auto` picks a kernel that runs here. If a flag names a kernel that does not run,
    the error says why.

    Catches a kernel that is picked where it cannot run.
    """
    cpu = torch.device("cpu")
    assert attention.pick_kernel("auto", cpu, torch.float32, documents=True) == "cpu"
    no_gpu = dict.fromkeys(("fa4", "cudnn", "flash"), "needs a GPU, but the device is cpu")
    for name, reason in (no_gpu | {"fa5": "no such kernel"}).items():
        with raises(ValueError, match=f"--attention {name}: .*{reason}.*Usable here: cpu"):
            attention.pick_kernel(name, cpu, torch.float32)


def test_run_detached_without_a_gradient():
    """If a function's results need no gradient, its backward does nothing.

    Catches a crash in a pipeline stage in which no weight trains.
    """
    root = torch.zeros((), requires_grad=True)
    backward, (y,) = ops.run_detached(root, lambda: torch.ones(3))
    assert backward([torch.ones(3)]) == [] and not y.requires_grad
    backward, (y,) = ops.run_detached(root, lambda x: 2 * x, torch.ones(3))
    assert torch.equal(backward([torch.ones(3)])[0], torch.full((3,), 2.0))


def test_labels_outside_of_the_vocabulary_make_the_loss_nan():
    """A label that no token has gives a loss of NaN, so that the step is left out. Only IGNORE
    gives 0.

    Catches the padding value -1 of other programs, which would train towards no token at all.
    """
    logits = torch.randn(4, 7)
    labels = torch.tensor([3, m.IGNORE, -1, 7])
    losses = ops.softmax_loss(logits, labels, torch.ones(()), None)[:, 0]
    assert losses.isnan().tolist() == [False, False, True, True]
    assert losses[0] == approx(F.cross_entropy(logits[:1], labels[:1]).item()) and losses[1] == 0


def test_a_factor_on_the_loss_is_not_rounded():
    """If a bf16 model's loss is multiplied by 0.3, all gradients are 0.3 times as large.

    Catches a factor that is rounded to bf16, by 0.2 %, for all weights but the head's.
    """
    model = seeded_model(SMALL, attention.Attention("cpu")).bfloat16()
    norms = []
    for factor in (1.0, 0.3):
        model.zero_grad()
        (factor * model(*example())).backward()
        norms.append(model.embed.weight.grad.double().norm().item())
    assert norms[1] / norms[0] == approx(0.3, rel=5e-4)


def test_ring_positions_need_a_multiple_of_twice_the_ring():
    """The two parts of each ring rank have equally many tokens, or there is an error.

    Catches a plan by hand whose ring ranks would compare each other's positions wrongly.
    """
    assert attention.sequence_positions(16, 4, 2, 1).tolist() == [12, 13, 14, 15]
    with raises(AssertionError):
        attention.sequence_positions(12, 4, 4, 0)


def test_a_matrix_in_a_list_named_blocks_has_a_buffer_of_its_own():
    """In layer 0, the matrices blocks.0.w and blocks.0.blocks.0.w share no buffer. The matrices
    blocks.0.w and blocks.2.w do.

    Catches a gradient that is added to another matrix's.
    """
    states = SimpleNamespace(
        shared_buffers={}, zeros=lambda size, dtype: torch.zeros(size, dtype=dtype)
    )

    def buffer(layer, path):
        unit = SimpleNamespace(index=layer, is_layer=True, name=f"blocks.{layer}")
        module = SimpleNamespace(shape=(4, 4))
        args = "grad", unit, f"{unit.name}.{path}", module, 16, torch.float32
        return shard.States.shared_buffer(states, *args)

    assert buffer(0, "w") is not buffer(0, "blocks.0.w")
    assert buffer(0, "w") is buffer(2, "w")
