"""Train adapters on a frozen model (LoRA, arXiv 2106.09685).

Each of a layer's four matrices W gets two small ones, A (r, cols) and B (rows, r). The product is
x W^T + alpha / r * (x A^T) B^T. A starts random, B starts as 0, and only A and B train. All other
weights are frozen: they take 2/p bytes per parameter, and are gathered if p > 1, but have no
gradients and no optimizer states. With r = 16, the adapters of an 8B model have 36 million
parameters. Their weights, gradients and states take 0.5 GiB; those of the whole model would take
15 + 15 + 90 GiB. A layer saves 4 r more elements per token, and runs norms and SwiGLU twice.

To switch it on, write `import examples.lora` in train.py, below its other imports, and pass
`--architecture lora`. `--init hf:DIR` imports the base. `--export` merges the adapters: it writes
W + alpha / r * B A, and proves on a small model that transformers computes the same from it.

Example: no plan trains all 8B weights on 512K tokens and one H100, because a step needs at least
89.0 GiB, and 75.2 GiB are free. With adapters planner.py predicts 537 s per step, 977 tokens per
second, 75.1 GiB on the GPU, 56.3 GiB on the host. It does not count adding the two products:

    planner.py --model llama3-8b --architecture lora --cluster h100x1 --ranks 1 --seq 512K --batch 1
    train.py --init hf:DIR --architecture lora --tokenizer DIR --data TEXT --seq 512K --batch 1
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
            by_rows = matrix.cut == "rows"  # with --tp, A or B is cut in the same way as W
            matrix.a = Matrix(RANK, cols, "whole" if by_rows else "columns")
            b_cut = ("rows", matrix.parts) if by_rows else ("whole",)
            matrix.b = Matrix(rows, RANK, *b_cut, std=0.0)

    @staticmethod
    def project(matrix, prologue, *inputs):
        y = project(matrix, prologue, *inputs)
        # both products save the same inputs; the adapter also saves x A^T, (..., r)
        return matrix.b(ALPHA / RANK * project(matrix.a, prologue, *inputs)) + y


class LoRAModel(LLaMA):
    own_weights = ("a", "b")  # Hugging Face's files do not have them

    def __init__(self, *args):
        super().__init__(*args)
        self.embed.frozen = self.norm.frozen = self.head.frozen = True

    def export_weight(self, name, full_param):
        w, a, b = name, name.replace("weight", "a.weight"), name.replace("weight", "b.weight")
        if a not in self.shapes:
            return full_param(w)
        return full_param(w) + ALPHA / RANK * full_param(b) @ full_param(a)


ARCHITECTURES["lora"] = Architecture(LoRABlock, LoRAModel)
