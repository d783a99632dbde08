"""Change the activation of the MLP, which is an ops.Prologue: GELU instead of SwiGLU.

    llama    a = silu(gate) * up    a is the input of the matrix `down`
    geglu    a = gelu(gate) * up    gated: all matrices keep their shapes
    gelu     a = gelu(up)           not gated: `gate_up` has F rows instead of 2 F

To switch it on, write `import examples.gelu` in train.py, below its other imports, and pass
`--architecture gelu` or `--architecture geglu`. Token chunks and all kinds of parallelism follow.
`--init hf:DIR` and `--export` are refused, because hf.py knows only SwiGLU. The planner counts the
bytes that a layer saves. For `gelu` it overestimates temporary tensors and seconds.
"""

import functools

import torch

from model import ARCHITECTURES, Architecture, Block, Matrix
from ops import IDENTITY, Prologue, accumulation_dtype, compiled

gelu = torch.nn.GELU("tanh")
gelu_gradient = functools.partial(torch.ops.aten.gelu_backward, approximate="tanh")


@compiled
def geglu_forward(gate_up):  # gate|up (..., 2F) -> a (..., F)
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, -1)
    return (gelu(gate) * up).to(gate_up.dtype)


@compiled
def geglu_backward(da, gate_up):  # -> a, computed again, and the gradient of gate|up
    gate, up = gate_up.to(accumulation_dtype(da.dtype)).chunk(2, -1)
    activated = gelu(gate)
    dgate_up = torch.cat((gelu_gradient(da * up, gate), da * activated), -1)
    return (activated * up).to(da.dtype), dgate_up.to(da.dtype)


GEGLU = Prologue(lambda gate_up: (geglu_forward(gate_up),), geglu_backward)
GELU = Prologue(lambda up: (gelu(up),), lambda da, up: (gelu(up), gelu_gradient(da, up)))


class GegluBlock(Block):
    activation = GEGLU

    def post(self, x, o, positions):
        h = x + self.project(self.out, IDENTITY, o.flatten(2))
        up = self.project(self.gate_up, self.norm, h, self.norm2.weight)
        return h + self.project(self.down, self.activation, up)


class GeluBlock(GegluBlock):
    activation = GELU

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate_up = Matrix(cfg.ffn, cfg.dim, cut="rows")


ARCHITECTURES |= {"geglu": Architecture(GegluBlock), "gelu": Architecture(GeluBlock)}
