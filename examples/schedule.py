"""Add learning-rate schedules: rows of optim.SCHEDULES.

    linear       the rate falls in a straight line from the end of the warm-up to the last step
    wsd-linear   (warm-up, stable, decay) the rate stays at --lr, and falls in a straight line in
                 the last --decay-steps

To switch them on, write `import examples.schedule` in train.py, below its other imports, and pass
`--schedule linear` or `--schedule wsd-linear`. With `--min-lr 0` the rate falls to zero, which
Bergsma et al. (arXiv 2502.15938) found better than a cosine to a tenth.

The function in a row gets the fraction of the decay that is done, and returns how far the rate has
fallen: 0 at --lr, 1 at --min-lr * --lr. `stable=True` keeps the rate at --lr until the decay, and
lets a run that is resumed before its decay move the decay to a new end. Warm-up and resumed runs
follow by themselves.

Left out: rates that depend on the number of the step and have no end, such as its inverse square
root. For these, edit train.learning_rate.
"""

from optim import SCHEDULES, Schedule


def line(done):
    return done


SCHEDULES |= {"linear": Schedule(line), "wsd-linear": Schedule(line, stable=True)}
