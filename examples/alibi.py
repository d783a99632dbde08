"""Add an attention kernel: two functions and a row of attention.KERNELS.

ALiBi (arXiv 2108.12409) subtracts from each score a penalty that grows with the distance between
the query and the key, with a slope for each head. So the kernel has to know which heads of the
model it gets: `mask.heads` says so. Ring attention does not know it for every block of keys, and
refuses this kernel.

To switch it on, copy both functions and the row into attention.py below KERNELS, or write `import
examples.alibi` in train.py, and train with `--attention alibi`, on a CPU: the empty tuple in its
row says that no GPU runs it. On a GPU, name the CUDA major versions there.
"""

import torch

from attention import KERNELS, Kernel


def alibi_forward(q, k, v, mask):  # (B, T, heads, D)
    slopes = 0.5 ** (1 + torch.arange(mask.heads.start, mask.heads.stop) % 8)
    at = torch.arange(q.shape[1])
    bias = slopes[:, None, None] * (at - at[:, None])  # (heads, T, T)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    scores = (scores + bias).masked_fill(at > at[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def alibi_backward(do, q, k, v, o, lse, mask):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(alibi_forward(*inputs, mask)[0], inputs, do)


KERNELS["alibi"] = Kernel(alibi_forward, alibi_backward, ())
