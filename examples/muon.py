"""Add an optimizer: one function, and a row of optim.OPTIMIZERS.

Muon keeps a momentum per matrix, and makes the singular values of each update nearly equal. This
needs whole matrices, which `whole=True` says. So Muon runs only with `--os-layout inter --p 1
--tp 1`, and the planner refuses other values. AdamW still updates vectors, such as norms' weights.
It is for small vocabularies: `x @ x.t()` of embedding and head has V * V elements.

To switch it on, write `import examples.muon` in train.py, below its other imports, and pass
`--optimizer muon`.
"""

import torch

from optim import EPS, OPTIMIZERS, Optimizer, State, round_weight


def muon(update):  # an optim.Update
    master = update.states["master"]
    momentum = update.states["momentum"]
    new_momentum = 0.95 * momentum + update.clip_factor * update.grad.to(master.dtype)

    # bring all singular values near 1: five iterations of Newton and Schulz, Muon's coefficients
    x = new_momentum / (new_momentum.norm() + EPS)
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x

    # a step whose gradients are not finite changes nothing
    momentum.copy_(torch.where(update.finite, new_momentum, momentum))
    new_master = master * (1 - update.lr * update.weight_decay) - update.lr * x
    master.copy_(torch.where(update.finite, new_master, master))
    update.weight.copy_(round_weight(master, update.weight.dtype))


OPTIMIZERS["muon"] = Optimizer(muon, (State("master"), State("momentum")), whole=True)
