"""Let the optimizer average the weights: an exponential moving average (EMA), and its export.

The average is one more state, "ema", in float32 (or wider). It starts as the weight. Update number
t changes it to

    keep * ema + (1 - keep) * weight,    keep = min(DECAY, (1 + t) / (10 + t))

so that a short run averages, too. A step that is skipped, because its loss or gradients are not
finite, leaves the average as it is. Training itself and the losses in the log are those of AdamW.

To switch it on, write `import examples.ema` in train.py, below its other imports, and pass
`--optimizer ema`. The state is sharded, moved to the host (`--os-place host`), saved, resumed and
counted by the planner like AdamW's. Each of the model's P parameters takes 4 bytes more: 16 P/os
bytes instead of 12 P/os, or on the host 14 P/os instead of 10 P/os. `--export` writes the average
(`exported="ema"`), and evaluations use the weights themselves. A run that was trained without an
average cannot be resumed with one: an error says so.

`averaged` takes any row of OPTIMIZERS. For Muon, import examples.muon here, and write
OPTIMIZERS["muon"] instead of the first ADAMW in the last line.
"""

from dataclasses import replace

import torch

from optim import ADAMW, OPTIMIZERS, Optimizer, State

DECAY = 0.999  # it averages about the last thousand steps


def averaged(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer that updates as the given one does, and averages the new weights."""

    def update(u):  # an optim.Update
        optimizer.update(u)
        master, ema = u.states["master"], u.states["ema"]
        t = u.step.to(master.dtype)
        keep = ((1 + t) / (10 + t)).clamp(max=DECAY)
        ema.lerp_(master, torch.where(u.finite, 1 - keep, 0))  # a factor of 0 changes nothing

    states = (*optimizer.states, State("ema", starts_as_weight=True))
    return replace(optimizer, update=update, states=states, exported="ema")


OPTIMIZERS["ema"] = replace(averaged(ADAMW), vectors=averaged(ADAMW))  # norms and biases, too
