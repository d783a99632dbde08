"""Change the layer and the embedding, as Gemma 2 and 3 have them.

    norms        before and after attention, and before and after the MLP: four per layer, not two
    activation   GeGLU instead of SwiGLU
    embedding    multiplied by sqrt(C); a fresh one has the standard deviation 1 / sqrt(C)

A norm multiplies by its weight, which starts at 1. Gemma's files hold the weight minus 1. Both
train alike, because norms have no weight decay.

To switch it on, write `import examples.gemma` in train.py, below its other imports, and pass
`--architecture gemma`. Sharding, token chunks, and sequence, tensor and pipeline parallelism
follow. Autograd saves two more tensors (B, T, C) per layer, the inputs of the two new norms, and
the planner counts them. `--init hf:DIR` and `--export` are refused, because hf.py knows no family
with these norms.

Left out: Gemma 2 caps attention's scores (write a kernel, as examples/local.py does) and the logits
(edit LLaMA.apply_head). Gemma 3 has norms of q and k (ModelConfig.qk_norm). For local and global
layers in turn, add examples/local.py.
"""

from examples.gelu import GEGLU
from model import ARCHITECTURES, Architecture, Block, LLaMA, Vector
from ops import IDENTITY, rms_norm


class GemmaBlock(Block):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.attention_norm = Vector(cfg.dim, "norm")  # of what attention adds to x
        self.mlp_norm = Vector(cfg.dim, "norm")  # of what the MLP adds to h

    def post(self, x, o, positions):
        eps = self.cfg.norm_eps
        out = self.project(self.out, IDENTITY, o.flatten(2))
        h = x + rms_norm(out, self.attention_norm.weight, eps)
        gate_up = self.project(self.gate_up, self.norm, h, self.norm2.weight)
        down = self.project(self.down, GEGLU, gate_up)
        return h + rms_norm(down, self.mlp_norm.weight, eps)


class Gemma(LLaMA):
    def __init__(self, cfg, *args):
        super().__init__(cfg, *args)
        self.embed.std = cfg.dim**-0.5

    def embed_tokens(self, tokens, positions):
        return super().embed_tokens(tokens, positions) * self.cfg.dim**0.5


ARCHITECTURES["gemma"] = Architecture(GemmaBlock, Gemma)
