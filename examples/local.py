"""Let attention differ by layer: local and global layers in turn.

In layers 0, 2, 4, ... a token attends only to the last WINDOW tokens, itself included. In layers 1,
3, 5, ... it attends to all earlier tokens. A kernel finds the number of its layer in `mask.layer`.

To switch it on, write `import examples.local` in train.py, below its other imports, and pass
`--attention local`. Ulysses, token chunks, and tensor and pipeline parallelism follow, because a
rank has all tokens of the heads that it computes. These flags and devices are refused:

    --ring             a ring calls the kernel on blocks of keys, without their positions and layer
    --document-token   the row does not say documents=True, because the function ignores documents
    --export           Llama's files have no window
    GPUs               the row lists no compute capabilities of GPUs. This function computes all
                       T x T scores, so use a kernel with a window there

MFU and predicted seconds count all earlier tokens, also in local layers.
"""

import torch

from attention import KERNELS, Kernel

WINDOW = 16  # tokens; so small that the tests notice it. Gemma 3 has 1024


def local_forward(q, k, v, mask):
    """q (B, T, H, D), k and v (B, T, K, D) -> o (B, T, H, D), log-sum-exp (B, H, T)."""
    positions = torch.arange(q.shape[1], device=q.device)
    distance = positions[:, None] - positions  # (queries, keys), negative for later keys
    seen = distance >= 0
    if mask.layer % 2 == 0:
        seen &= distance < WINDOW

    queries_per_key = q.shape[2] // k.shape[2]  # query heads that share a key head
    k = k.repeat_interleave(queries_per_key, 2)
    v = v.repeat_interleave(queries_per_key, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return o, scores.logsumexp(-1)


def local_backward(do, q, k, v, o, lse, mask):
    """Return dq, dk, dv. Autograd finds them by running the forward again."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        o, _ = local_forward(*inputs, mask)
        return torch.autograd.grad(o, inputs, do)


KERNELS["local"] = Kernel(local_forward, local_backward, ())
