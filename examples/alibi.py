"""Add an attention kernel: two functions, and a row of attention.KERNELS.

ALiBi (arXiv 2108.12409) subtracts from each score a penalty that grows with the distance between
query and key. The penalty's slope depends on the head: 1/2, 1/4, ..., 1/256 for heads 0 to 7, as
in the paper. Head 8 begins again with 1/2. So the kernel must know which heads of the model it
computes: `mask.heads` says so. On a ring, `mask.heads` is None for blocks of keys from other ranks,
so `--ring` refuses this kernel.

To switch it on, write `import examples.alibi` in train.py, below its other imports, and pass
`--attention alibi` on a CPU. The empty tuple in the row says that the kernel runs on no GPU. To
allow GPUs, list their major compute capabilities, such as 9 for an H100.
"""

import torch

from attention import KERNELS, Kernel


def alibi_forward(q, k, v, mask):
    """q (B, T, H, D), k and v (B, T, K, D) -> o (B, T, H, D), log-sum-exp (B, H, T)."""
    slopes = 0.5 ** (1 + torch.arange(mask.heads.start, mask.heads.stop, device=q.device) % 8)
    positions = torch.arange(q.shape[1], device=q.device)
    distance = positions - positions[:, None]  # (queries, keys), negative for earlier keys
    bias = slopes[:, None, None] * distance  # (H, T, T)

    queries_per_key = q.shape[2] // k.shape[2]  # query heads that share a key head
    k = k.repeat_interleave(queries_per_key, 2)
    v = v.repeat_interleave(queries_per_key, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    scores = (scores + bias).masked_fill(distance > 0, -torch.inf)  # no later keys
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return o, scores.logsumexp(-1)


def alibi_backward(do, q, k, v, o, lse, mask):
    """Return dq, dk, dv. Autograd finds them by running the forward again."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        o, _ = alibi_forward(*inputs, mask)
        return torch.autograd.grad(o, inputs, do)


KERNELS["alibi"] = Kernel(alibi_forward, alibi_backward, ())
