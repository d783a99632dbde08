"""Train adapters on a frozen model (LoRA, arXiv 2106.09685).

Each of a layer's four matrices W gets two small ones, A (r, cols) and B (rows, r). The product with
W becomes

    y = x W^T + alpha / r * (x A^T) B^T        A starts random, B starts as 0

Only A and B train. All other weights are frozen: they have no gradients and no optimizer states,
and take 2/p bytes per parameter. With p > 1 they are still gathered in forward and in backward, but
nothing of them is reduced or broadcast. The adapters of an 8B model have 36 million parameters at
r = 16. Their weights, gradients and states take 0.5 GiB, where training all weights takes another
15 GiB of gradients and 90 GiB of states. Per token a layer saves 4 r more elements for backward,
and an adapter computes its prologue (a norm, or SwiGLU) a second time.

To switch it on, write `import examples.lora` in train.py, below its other imports, and pass
`--architecture lora`. `--init hf:DIR` imports the base, and adapters begin with fresh values.
Checkpoints hold both. `--export` merges them: it writes W + alpha / r * B A. Before the run, a small
model proves that transformers computes the same from that.

Example: half a million tokens on one H100 with 80 GB. To train all 8B weights no plan fits: a step
needs at least 100.5 GiB of the 75.2 GiB. With adapters planner.py predicts 502.6 s per step, 1,043
tokens per second, 75.1 GiB on the GPU and 109.1 GiB on the host. The sums of W's product and the
adapter's are not counted in these seconds.

    planner.py --model llama3-8b --architecture lora --cluster h100x1 --ranks 1 --seq 512K --batch 1
    train.py --init hf:DIR --architecture lora --seq 512K --batch 1
"""

from model import ARCHITECTURES, Architecture, Block, LLaMA, Matrix
from ops import project

RANK, ALPHA = 16, 32


class LoRABlock(Block):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.requires_grad_(False)  # freezes all that is defined so far
        for matrix in (self.qkv, self.out, self.gate_up, self.down):
            rows, cols = matrix.shape
            # with --tp, the one of the two is cut as W is, and the other one is whole
            a_cut, b_cut, parts = "columns", "whole", ()
            if matrix.cut == "rows":
                a_cut, b_cut, parts = "whole", "rows", matrix.parts
            matrix.a = Matrix(RANK, cols, a_cut)
            matrix.b = Matrix(rows, RANK, b_cut, parts, std=0.0)

    @staticmethod
    def project(matrix, prologue, *inputs):
        y = project(matrix, prologue, *inputs)
        if not hasattr(matrix, "a"):
            return y
        # autograd saves the inputs, which y's product saves anyway, and (..., r)
        return matrix.b(ALPHA / RANK * project(matrix.a, prologue, *inputs)) + y


class LoRAModel(LLaMA):
    own_weights = ("a", "b")  # an import does not have them

    def __init__(self, *args):
        super().__init__(*args)
        self.embed.frozen = self.norm.frozen = self.head.frozen = True

    def export_weight(self, name, full_param):
        weight = full_param(name)
        path = name.removesuffix(".weight")
        if not hasattr(self.get_submodule(path), "a"):
            return weight
        return weight + ALPHA / RANK * full_param(f"{path}.b.weight") @ full_param(
            f"{path}.a.weight"
        )


ARCHITECTURES["lora"] = Architecture(LoRABlock, LoRAModel)
