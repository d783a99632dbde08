"""Change the activation of the MLP: GELU instead of SwiGLU, gated or not gated.

The MLP is y = W_down a. Its input a is

    llama    silu(gate) * up
    geglu    gelu(gate) * up    gated: all matrices keep their shapes
    gelu     gelu(up)           not gated: `gate_up` has F rows instead of 2 F

An activation is an ops.Prologue: autograd saves its inputs only, and backward computes `a` again,
together with the gradients of these inputs. GELU is the approximation by tanh that Gemma has.

To switch it on, write `import examples.gelu` in train.py, below its other imports, and pass `--block
geglu` or `--block gelu`. Sharding, token chunks, and sequence, tensor and pipeline parallelism
follow. What does not follow: `--init hf:DIR` and `--export` are refused, because the families that
hf.py knows have SwiGLU; and predictions count SwiGLU's tensors, which for `gelu` is too much.
"""

import functools

import torch
import torch.nn.functional as F

from model import BLOCKS, Block, Matrix
from ops import Prologue, accumulation_dtype, compiled, project

gelu = functools.partial(F.gelu, approximate="tanh")
gelu_gradient = functools.partial(torch.ops.aten.gelu_backward, approximate="tanh")


@compiled
def geglu_forward(gate_up):
    """Return gelu(gate) * up (..., F) of gate|up (..., 2F)."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, -1)
    return (gelu(gate) * up).to(gate_up.dtype)


@compiled
def geglu_backward(da, gate_up):
    """Return a (..., F), computed again, and the gradient of gate|up (..., 2F)."""
    wide = accumulation_dtype(da.dtype)
    gate, up = gate_up.to(wide).chunk(2, -1)
    activated = gelu(gate)
    dgate_up = torch.cat((gelu_gradient(da * up, gate), da * activated), -1)
    return (activated * up).to(da.dtype), dgate_up.to(da.dtype)


GEGLU = Prologue(lambda gate_up: (geglu_forward(gate_up),), geglu_backward)
GELU = Prologue(lambda up: (gelu(up),), lambda da, up: (gelu(up), gelu_gradient(da, up)))


class GegluBlock(Block):
    activation = GEGLU

    def post(self, x, o, positions):
        h = x + self.out(o.flatten(2))
        up = project(self.gate_up, self.norm, h, self.norm2.weight)
        return h + project(self.down, self.activation, up)


class GeluBlock(GegluBlock):
    activation = GELU

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate_up = Matrix(cfg.ffn, cfg.dim, cut="rows")  # only `up`


BLOCKS |= {"geglu": GegluBlock, "gelu": GeluBlock}
