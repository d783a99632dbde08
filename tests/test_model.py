"""The model by itself: sizes, FLOPs, first weights, rotary embeddings, operators, kernels."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from pytest import approx, raises

import attention
import hardware
import model as m
import ops
from test_all import SMALL, example, needs_gpu, parametrize, relative, seeded


@parametrize(
    "cfg, count",
    [
        (m.MODELS["7b"], 6_738_415_616),
        (m.MODELS["13b"], 13_015_864_320),
        (m.MODELS["30b"], 32_528_943_616),
        (m.MODELS["65b"], 65_285_660_672),
        (m.MODELS["llama3-8b"], 8_030_261_248),
        # Mistral-Nemo, Qwen2.5-7B, Qwen3-8B
        (m.ModelConfig(131072, 5120, 40, 32, 8, 14336), 12_247_782_400),
        (m.ModelConfig(152064, 3584, 28, 28, 4, 18944, qkv_bias=True), 7_615_616_512),
        (m.ModelConfig(151936, 4096, 36, 32, 8, 12288, qk_norm=True), 8_190_735_360),
    ],
)
def test_counts(cfg, count):
    """Parameters are as many as published, and FLOPs a token follow from them. Catches a size or a
    FLOP formula that differs from the published one."""
    assert m.param_count(cfg) == count
    with torch.device("meta"):
        few = replace(cfg, layers=2)
        assert sum(p.numel() for p in m.LLaMA(few).parameters()) == m.param_count(few)
    causal, full = m.flops_per_token(cfg, 2**20)
    attention = 6 * cfg.layers * cfg.heads * cfg.head_dim * 2**20  # 6 n h s
    assert causal == 6 * count + attention and full == causal + attention


def test_counts_of_peak():
    """The peak rates of GPUs are those of their data sheets, by the names that drivers report.
    Catches an MFU that is computed with another GPU's rate."""
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
    """Sizes that no kernel computes are refused, with the nearest legal one. Catches heads of an
    odd size, which a kernel would read from the next token."""
    with raises(ValueError, match=message):
        replace(SMALL, **sizes)


def test_first_weights():
    """A product is as large as its input, and what writes into the residual stream adds up to its
    size. Catches a first product or a residual sum of the wrong size."""
    with torch.device("meta"):
        starts = m.LLaMA(m.MODELS["1b"]).starts
    for name, cols, std in (
        ("embed", 2048, 1),
        ("head", 2048, 2048**-0.5),
        ("blocks.0.qkv", 2048, 2048**-0.5),
        ("blocks.0.down", 5504, (5504 * 48) ** -0.5),
    ):
        name = f"{name}.weight"
        drawn = m.initial_weight(name, (500, cols), starts[name], 0, "cpu")
        assert drawn.std().item() == approx(std, rel=0.01)
    assert m.initial_weight("norm.weight", (9,), starts["norm.weight"], 0, "cpu").equal(
        torch.ones(9)
    )


def test_seeds_make_other_weights():
    """Seeds that differ by a bit, or above the 32 bits that a CPU's generator takes, draw other
    weights. Catches two seeds or two matrices that get the same weights."""

    def weight(seed, name="embed.weight"):
        return m.initial_weight(name, (8, 8), (0.0, 1.0), seed, "cpu")

    seeds = [0, 1, 2, 2**16, 2**30, 2**31 - 1]
    drawn = [weight(s) for s in seeds] + [weight(0, "head.weight")]
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.equal(a, b)
    assert torch.equal(weight(7), weight(7))


def test_logits_follow_from_earlier_tokens_and_distances():
    """Later tokens change no logit, nor does a shift of all positions. Catches a token that sees
    later ones, and a position that is not relative."""
    model = seeded(SMALL)
    tokens, _ = example()
    later = torch.arange(40) >= 30
    logits = model(tokens)
    changed = model((tokens + later) % SMALL.vocab)
    assert torch.equal((changed != logits).any(-1), later.expand(2, -1))
    shifted = model(tokens, positions=torch.arange(40) + 2**20)
    assert relative(shifted, logits) < 1e-9


def test_all_labels_ignored():
    """Where all labels are ignored, the loss and the gradients are zero. Catches a mean over no
    labels, which would be NaN."""
    model = seeded(SMALL)
    tokens, labels = example()
    loss = model(tokens, torch.full_like(labels, m.IGNORE))
    loss.backward()
    assert loss == 0 and not model.blocks[0].qkv.weight.grad.any()


def test_losses_of_tokens_have_no_gradients():
    """The loss of each token averages to the loss and has no gradients. Catches a validation that
    holds the graphs of all layers."""
    model = seeded(SMALL)
    tokens, labels = example()
    losses = model(tokens, labels, per_token=True)
    assert not losses.requires_grad and not losses[labels == m.IGNORE].any()
    assert relative(losses.sum() / (labels != m.IGNORE).sum(), model(tokens, labels)) < 1e-12


def published_frequencies(kind: str) -> np.ndarray:
    """Return the angles a position of 64 pairs, at 8 times the trained 4096 tokens: as Llama 3.1's
    code has them, and arXiv 2309.00071 (A.2, YaRN)."""
    i = np.arange(64, dtype=np.longdouble)
    freq = np.longdouble(10000) ** (-i / 64)
    keep = {"default": 1.0, "linear": 0.0}.get(kind)  # how much of a frequency is as it was
    if kind == "llama3":
        wavelength = 2 * np.pi / freq
        keep = np.clip((4096 / wavelength - 1) / (4 - 1), 0, 1)
    if kind == "yarn":
        fast, slow = (64 * np.log(4096 / (turns * 2 * np.pi)) / np.log(10000) for turns in (32, 1))
        keep = 1 - np.clip((i - np.floor(fast)) / (np.ceil(slow) - np.floor(fast)), 0, 1)
    return keep * freq + (1 - keep) * freq / 8


@parametrize("kind", ["default", *m.ROPE_KEYS])
def test_rope_at_a_million_positions(kind):
    """Rotary angles are the published ones up to a million positions, in float64. Catches float32
    angles, which would be wrong by 1/32, and with a ramp by 1/10; a ramp that is off by one; and a
    factor that forgets another one."""
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
    """Products of bf16 tensors add up in float32. Catches gradients that are rounded before they
    are summed."""
    torch.manual_seed(0)
    dy, x, before = torch.randn(3, 64, 64, device=device).bfloat16()
    out = ops.weight_grad_into(dy, x, before.float(), 1)
    assert relative(out, before.double() + dy.double().t() @ x.double()) < 1e-6


def test_attention_choice():
    """`--attention` chooses a kernel that runs here, or says why the asked one does not. Catches a
    kernel that is chosen where it cannot run."""
    cpu = torch.device("cpu")
    assert attention.pick_kernel("auto", cpu, torch.float32, documents=True) == "cpu"
    no_gpu = dict.fromkeys(("fa4", "cudnn", "flash"), "needs a GPU, but the device is cpu")
    for name, reason in (no_gpu | {"fa5": "no such kernel"}).items():
        with raises(ValueError, match=f"--attention {name}: .*{reason}.*Usable here: cpu"):
            attention.pick_kernel(name, cpu, torch.float32)
