"""Forks that would train wrong without a word: each is refused by name."""

import functools

import pytest
import torch
from pytest import raises

import attention
import model
import offload
import ops
from test_all import SEQ, SIZES, activations_of, clean_up, example, group, seeded  # noqa: F401

parametrize = pytest.mark.parametrize
CPU = torch.device("cpu")


def chunked(kept: str):
    """Run a model's layers in chunks, forward and backward."""
    llama = seeded(SIZES["gqa"], attention.Attention("cpu"))
    plan = activations_of(kept, 5, 3)
    offload.ChunkedLayers(llama, (2, SEQ), plan, SEQ - 10, CPU, torch.float64)
    llama(*example(seq=SEQ, vocab=67)).backward()
    return llama


class AddsInPlace(model.Block):
    def post(self, x, o):
        x += self.out(o.flatten(2))
        return x + ops.project(self.down, ops.SWIGLU, self.gate_up(x))


class GatesInPlace(model.Block):
    def post(self, x, o):
        o *= 2
        return super().post(x, o)


class ScalesInputInPlace(model.Block):
    def pre(self, x, rope):
        return super().pre(x.mul_(2), rope)


class ChangesWhatIsSaved(model.Block):
    def post(self, x, o):
        gate_up = self.gate_up(x + self.out(o.flatten(2)))
        y = ops.project(self.down, ops.SWIGLU, gate_up)
        gate_up.zero_()  # backward needs it
        return x + y


@parametrize("block", [AddsInPlace, GatesInPlace, ScalesInputInPlace, ChangesWhatIsSaved])
@parametrize("kept", ["kept", "swapped", "mixed", "neither", "again"])
def test_changes_in_place_are_refused(block, kept, monkeypatch, group):
    """Catches a block that writes to its input, or to what backward needs: where all chunks are
    saved, PyTorch compares no versions, and gradients were wrong without a word."""
    monkeypatch.setattr(model, "Block", block)
    half = "pre" if block is ScalesInputInPlace else "post"
    with raises(ValueError, match=f"block.{half} changes in place .* write `x = x \\+ y`"):
        chunked(kept)
    monkeypatch.setattr(offload, "block_saves", functools.partial(unchecked, offload.block_saves))
    recomputed = block is ChangesWhatIsSaved and kept in ("neither", "again")
    error = RuntimeError if recomputed else ValueError  # PyTorch's own, of what autograd keeps
    with raises(error, match="in ?place"):  # also where the block on meta changed nothing
        chunked(kept)


def unchecked(block_saves, *args):
    """block_saves as if the block on meta changed nothing."""
    blocks, model.Block = model.Block, model.Block.__base__
    args = [model.Block(a.cfg) if isinstance(a, blocks) else a for a in args]
    try:
        return block_saves(*args)
    finally:
        model.Block = blocks
