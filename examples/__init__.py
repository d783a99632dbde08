"""Forks of a few lines. Each one adds a row to a table, and a flag of train.py chooses the row.

To switch one on, write `import examples.NAME` in train.py, below its other imports, and pass its
flag. For example, `import examples.gemma` and `python train.py --block gemma`. A checkpoint records
the flag, so a resumed run keeps it, and without the import it is refused by name. If you use
planner.py with the same flag, write the same line there. To make a fork of your own, copy the
module, rename its row, and edit it.

    NAME        what it changes                                 flag and rows               lines
    alibi       attention: each head has its own slope          --attention alibi              45
    block       the layer: biases, more norms, a gate           --block fork                   36
    ema         the optimizer also averages the weights,        --optimizer ema                48
                and an export writes the average
    gelu        the activation of the MLP, gated or not         --block geglu, gelu            60
    gemma       the layer: four norms and GeGLU; the            --block gemma                  44
                embedding is scaled
    local       attention differs by layer: local and global    --attention local              58
                layers in turn
    muon        the optimizer of matrices                       --optimizer muon               35
    schedule    how the learning rate falls                     --schedule linear, wsd-linear  27

Flags of several examples go together: --block gemma --attention local --optimizer ema. The tests
run each example on one rank and on several, with sharded states, Ulysses, tensor and pipeline
parallelism, and layers that are kept, swapped or recomputed in token chunks. They compare it with
the same change of a plain PyTorch model (test_all.py). What an example cannot do is in its header,
and is refused by name.
"""
