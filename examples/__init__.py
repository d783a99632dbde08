"""Forks of a few lines. Each example adds one or more rows to a table, such as
model.ARCHITECTURES or optim.OPTIMIZERS, and a flag of train.py chooses a row by its name.

To switch one on, write `import examples.NAME` in train.py, below its other imports, and pass its
flag. For example, `import examples.gemma` and `python train.py --architecture gemma`. A checkpoint
records the flag, so a resumed run keeps it. Without the import, the resume stops with an error that
names the missing row. To plan for such a model, write the same line in planner.py. sample.py needs
no line, because it imports train.py. To make a fork of your own, copy the module, rename its row,
and edit it.

    NAME        what it changes                              flag and rows                  lines
    alibi       attention: a penalty for distance, whose     --attention alibi                 43
                slope depends on the head
    block       the layer: biases, more norms, a gate        --architecture fork               36
    ema         the optimizer also averages the weights,     --optimizer ema                   45
                and an export writes the average
    gelu        the activation of the MLP, gated or not      --architecture gelu, geglu        59
    gemma       the layer: four norms and GeGLU; the         --architecture gemma              50
                embedding is scaled
    local       attention differs by layer: local and        --attention local                 51
                global layers in turn
    lora        adapters on a frozen model train; an         --architecture lora                60
                export merges them
    muon        the optimizer of matrices                    --optimizer muon                  35
    schedule    how the learning rate falls                  --schedule linear, wsd-linear     27

Flags of several examples can be combined: --architecture gemma --attention local --optimizer ema.
The tests run each example on one rank and on several, with sharded states, Ulysses, tensor and
pipeline parallelism, and with layers that are kept, swapped or recomputed in token chunks. They
compare it with a plain PyTorch model that has the same change (test_all.py). An example's header
says what it cannot do. If a run asks for that, it stops with an error that says so.

Other changes need no example. This table says where to make them:

    attention and MLP side by side           Block.post: both read norm1 (project(..., self.norm,
                                             x, self.norm1.weight)), and their sum is added to x
    latent attention (MLA)                   Block.__init__ and pre. If one matrix computes several
                                             outputs, its `parts` says the rows of each
    a layer without rotary angles (NoPE)     Block.pre returns qkv.split(heads, dim=2) in layers
                                             with an attribute that LLaMA.__init__ sets
    z-loss, label smoothing                  LLaMA.apply_head
    a head for the token after the next      LLaMA.apply_head, with labels_ahead = 2. Its Matrix is
                                             self.head.NAME, so that --pp knows the stage
    learned positions                        LLaMA.embed_tokens, from the positions that it gets. A
                                             Matrix of them is self.embed.NAME, for --pp
    attention sinks, capped scores           a kernel, as alibi and local are
    Lion, SGD                                an optimizer, like SGD in optim.py's docstring
    Adafactor, LARS                          an optimizer of whole matrices, as muon is
    muP: a learning rate per matrix          an optimizer: adamw(u._replace(lr=...)) by u.name
"""
