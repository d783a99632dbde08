"""Change what a layer computes: a subclass of model.Block.

ForkBlock adds four things to a layer: biases of q, k and v, norms of q and k, a norm of the layer's
output, and a gate that a matrix computes from the layer's input. A weight of a layer is a Matrix or
a Vector, never a module of torch.nn, because shard.py shards only these two.

To switch it on, write `import examples.block` in train.py, below its other imports, and pass
`--architecture fork`. Sharding, swapping, and sequence, tensor and pipeline parallelism find the
new weights by themselves. `--init hf:DIR` and `--export` are refused, because Hugging Face's files
have no names for these weights. To prove that a layer of your own is right, write it a second time
in test_all.PlainLayer with modules of torch.nn, and run `pytest test_all.py`.
"""

import torch

from model import ARCHITECTURES, Architecture, Block, Matrix, Vector
from ops import rms_norm


class ForkBlock(Block):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.qkv_bias = Vector(self.qkv.shape[0], "bias", like=self.qkv)
        self.q_norm = Vector(cfg.head_dim, "norm")
        self.k_norm = Vector(cfg.head_dim, "norm")
        self.last_norm = Vector(cfg.dim, "norm")
        self.gate = Matrix(3, cfg.dim, cut="whole")  # with --tp, each rank has the whole matrix

    def post(self, x, o, positions):
        y = super().post(x, o, positions)
        y = torch.tanh(rms_norm(y, self.last_norm.weight, self.cfg.norm_eps))
        gate = torch.sigmoid(self.gate(x)).sum(-1, keepdim=True)  # (B, T, 3) -> (B, T, 1)
        return y * gate + x


ARCHITECTURES["fork"] = Architecture(ForkBlock)
