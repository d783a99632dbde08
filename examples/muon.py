"""Add an optimizer: one function and a row of optim.OPTIMIZERS.

Muon keeps a momentum for each matrix and makes the update's singular values nearly equal. It needs
whole matrices, and says so by `whole=True`: it runs only with `--os-layout inter --p 1 --tp 1`, and
the planner refuses other flags. Vectors, such as the weights of norms, stay with AdamW.

To switch it on, copy the function and the row into optim.py below OPTIMIZERS, or write `import
examples.muon` in train.py. Then add a flag to the program, which is one more field of train.Config:

    optimizer: str = flag("adamw", "of matrices: adamw, or muon")

and train with `--optimizer muon`.
"""

import torch

from optim import EPS, OPTIMIZERS, Optimizer, State

# the flag: a line of the class train.Config
FLAG = 'optimizer: str = flag("adamw", "of matrices: adamw, or muon")'


def muon(u):  # an optim.Update
    master, momentum = u.states["master"], u.states["momentum"]
    new = 0.95 * momentum + u.clip_factor * u.grad.to(master.dtype)
    x = new / (new.norm() + EPS)
    for _ in range(5):  # singular values near 1, by Newton and Schulz
        square = x @ x.t()
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    momentum.copy_(torch.where(u.finite, new, momentum))
    updated = master * (1 - u.lr * u.weight_decay) - u.lr * x
    master.copy_(torch.where(u.finite, updated, master))
    u.weight.copy_(master)


OPTIMIZERS["muon"] = Optimizer(muon, (State("master"), State("momentum")), whole=True)
