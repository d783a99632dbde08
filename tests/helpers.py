"""What several files of tests/ share: faults from outside, machines and plans that are counted by
hand, steps that are simulated.
"""

import copy
import functools
import json
import os
import re
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import attention
import checkpoint
import costs
import hardware
import model as m
import offload
import planner
import shard
import train
from test_all import groups_of, losses, run


def at_file(path: str, act, event: str = "open") -> None:
    """From now on run act() whenever this process is about to open such a file, or to do something
    else with it (an audit event of Python's): faults come from outside, and name no part of the
    program. An error that act raises is the system's."""

    def hook(name, args):
        if name == event and re.search(path, str(args[0])):
            act()

    sys.addaudithook(hook)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk() -> None:
    raise OSError(28, "No space left on device")  # the system names no file when a write fails


def saved(out: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    return [int(path.name[5:]) for path in checkpoint.steps_of(out)]


def changed_meta(path: Path, change: str) -> None:
    """Change c, the content of a meta.json, as somebody would who wants it to be believed."""
    c = json.loads(path.read_text())
    del c["crc32"]
    exec(change)
    checkpoint.write_meta(path.parent, c)


@functools.cache
def straight(ranks: int) -> list:
    """Return the losses of an uninterrupted run."""
    with tempfile.TemporaryDirectory() as out:
        run(f"--save-every -1 --out {out}", ranks)
        return losses(out)


def hf_model(folder, kind="llama", shard="60KB", **kw):
    """Save a small model of transformers, with random weights, whose config.json also says kw."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    size = dict(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
    )
    config = AutoConfig.for_model(kind, **copy.deepcopy(size | kw))  # it adds to rope_scaling
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs


def round_machine(inside=1e30, across=1e30, **changes) -> hardware.Profile:
    """Return a machine of 100 TFLOP/s and huge GPUs. All else takes no time but what is given: the
    network's bytes/s inside a node of 8 and across nodes, or a field of the profile."""
    rates = dict.fromkeys(("memory", "optimizer", "to_host", "state_streaming"), 1e30)
    return hardware.Profile(
        **{
            "name": "round",
            "device": "none",
            "per_node": 8,
            "peak_flops": 1e14,
            "gpu_bytes": 2.0**50,
            "host_bytes": 2.0**50,
            "products": {kind: [[1, 1, 1e14]] for kind in hardware.PRODUCTS},
            "attention": {"fa4": {"forward": [[1, 1e14]], "backward": [[1, 1e14]]}},
            "launch": {"a host": {"forward": 1e-9, "backward": 1e-9}},
            "collectives": {
                op: {"8x1": [[1, inside]], "8x2": [[1, across]]} for op in hardware.COLLECTIVES
            },
            "overlap": {"collectives": [1.0, 1.0], "all_to_all": [1.0, 1.0]},
            **rates,
            **changes,
        }
    )


# of all ranks; one sequence each
STEP = costs.Plan(
    replace(m.MODELS["7b"], layers=4), torch.bfloat16, 8, 8, 2**15, batch=8, chunk=2**15
)


def fastest(
    ranks, profile, gib, model=m.MODELS["7b"], host=2**40, per_node=8, **flags
) -> costs.Plan:
    """Return the planner's first choice for GPUs of so many GiB; host: bytes a rank."""
    there = planner.Hardware(ranks, min(ranks, per_node), profile, gib * 2**30, host)
    constraints = planner.Constraints(**flags)
    found = planner.plan(constraints, model, there)
    rates = [plan.token_s for plan in found]
    assert rates[1:] == sorted(rates[1:]) and rates[0] <= 1.002 * min(rates)
    for plan in found:
        assert plan.gpu_bytes <= gib * 2**30 and plan.host_bytes <= host
    return found[0]


def swapping_plan(model, ranks, seq, factors, kept, **choices) -> costs.Plan:
    """Return a plan whose layers run in chunks, one sequence over all ranks, if `sp` is not chosen;
    kept: layers, chunks, and so on, of offload.ActivationPlan; none: they run whole."""
    return costs.Plan(
        model,
        torch.bfloat16,
        ranks,
        ranks,
        seq,
        choices.pop("sp", ranks),
        recompute="auto" if kept else "none",
        factors=shard.Factors(*factors),
        activations=offload.ActivationPlan(*kept) if kept else None,
        **choices,
    )


def planned_run(plan: costs.Plan) -> train.Run:
    """Return the first rank's run of a plan, whose bytes are counted."""
    return train.Run(train.Config(), 0, torch.device("cpu"), "cpu", planner.with_bytes(plan))


def built(run: train.Run, as_on_gpus=False) -> tuple:
    """Return the first rank's model and states, and a step on tokens 0. as_on_gpus: attention
    requests what FlashAttention-4 does, and ranks of a node reach each other's memory."""

    def backward(do, q, k, v, o, lse, mask):
        grads = attention.KERNELS["cpu"].backward(do, q, k, v, o, lse, mask)
        _ = q.new_empty(q.shape, dtype=torch.float32), lse.clone(), lse.clone()
        return grads

    torch.compiler.set_stance("force_eager")
    groups = groups_of(run.plan, {})
    op = train.make_attention(run, groups)
    if as_on_gpus:
        op.kernel = replace(op.kernel, backward=backward)
    if as_on_gpus and run.plan.head_ranks > 1:
        op.exchange.peer_access = True
    model, states = train.build_model(run, op, groups)
    plan = run.plan
    own = plan.tokens_between_products // plan.micro_batch
    tokens = torch.zeros(plan.micro_batches, plan.micro_batch, own).long()
    batch = train.Batch(
        tokens,
        tokens,
        plan.micro_batches * [torch.arange(plan.seq // plan.sp)],
        torch.ones((), dtype=states.accum_dtype),
    )
    return model, states, lambda: train.run_step(model, states, batch, 1e-4, run.cfg.clip)


def make_tokenizer(folder: Path, text: str, vocab: int = 300) -> None:
    """Write a byte-level tokenizer that is trained on a text, as a Hugging Face folder has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=vocab,
            initial_alphabet=alphabet,
            special_tokens=["<end>"],
            show_progress=False,
        ),
    )
    tokenizer.enable_truncation(8)  # some files have it: it must not cut a text
    folder.mkdir()
    tokenizer.save(f"{folder}/tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
