"""Helpers that several files of tests/ share.

They cause faults from outside the program, make Hugging Face models and tokenizers, install an
older transformers, and make machines and plans whose times and bytes can be checked by hand.
"""

import copy
import functools
import json
import os
import re
import signal
import subprocess
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


def on_file_event(path: str, act, event: str = "open") -> None:
    """Run act() each time this process is about to open a file whose path matches a regex.

    event: another of Python's audit events, such as "os.mkdir". So a test can cause a fault without
    replacing any part of the program. If act raises an error, the program sees it as the error of
    the system call. The hook stays until this process ends, because Python cannot remove it.
    """

    def hook(name, args):
        if name == event and re.search(path, str(args[0])):
            act()

    sys.addaudithook(hook)


def kill_self() -> None:
    """End this process at once, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail_disk_full() -> None:
    """Raise the error of a full disk. It names no file, as when a write fails."""
    raise OSError(28, "No space left on device")


def saved_steps(out: Path) -> list[int]:
    """Return the steps whose checkpoints a folder holds."""
    return [int(path.name[5:]) for path in checkpoint.steps_of(out)]


def edit_meta(path: Path, change: str) -> None:
    """Edit a meta.json so that its checksum is still right.

    change: Python code that changes c, the content of the file.
    """
    c = json.loads(path.read_text())
    del c["crc32"]
    exec(change)
    checkpoint.write_meta(path.parent, c)


@functools.cache
def uninterrupted_losses(ranks: int) -> list:
    """Return the losses of a run on this many ranks that nothing interrupts."""
    with tempfile.TemporaryDirectory() as out:
        run(f"--save-every -1 --out {out}", ranks)
        return losses(out)


def hf_model(folder, kind="llama", shard="60KB", **kw):
    """Save a small Hugging Face model with random weights, and return it.

    kind: its model type. shard: the largest size of a weights file. kw: more entries for
    config.json.
    """
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
    config = AutoConfig.for_model(kind, **copy.deepcopy(size | kw))  # it changes rope_scaling
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs


# transformers 4, and the packages that it needs and that are missing here or have other versions
TRANSFORMERS_4 = (
    "transformers==4.57.1",
    "tokenizers==0.22.1",
    "huggingface-hub==0.36.0",
    "requests==2.32.5",
    "urllib3==2.5.0",
    "certifi==2025.10.5",
    "charset-normalizer==3.4.4",
)


def transformers_4() -> Path:
    """Return a folder with transformers 4.57.1, which shares the installed torch and all the rest.

    The first call installs it into a folder of the environment. Two processes may do so at once:
    the folder appears whole, by a rename. Raises RuntimeError with a sentence if it cannot be
    installed, for example without a network.
    """
    folder = Path(sys.prefix) / "transformers-4.57.1"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=sys.prefix) as partial:
        target = Path(partial) / "packages"
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", target]
        pip = subprocess.run([*command, *TRANSFORMERS_4], capture_output=True, text=True)
        if pip.returncode:
            raise RuntimeError(
                "This test reads an export with transformers 4.57.1, which pip could not install. "
                f"Run it where a package index can be reached. pip says: {pip.stderr[-2000:]}"
            )
        try:
            target.rename(folder)
        except OSError:  # another process was faster
            assert folder.exists()
    return folder


def round_machine(inside=1e30, across=1e30, **changes) -> hardware.Profile:
    """Return a profile of a machine with round numbers: 100 TFLOP/s, huge GPUs, 8 GPUs per node.

    Copies and launches take almost no time. inside, across: the network's bytes/s in a node and
    across nodes. changes: fields of the profile that shall have other values.
    """
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
            "launch": {"a host": dict.fromkeys(hardware.LAUNCHES, 1e-9)},
            "collectives": {
                op: {"8x1": [[1, inside]], "8x2": [[1, across]]} for op in hardware.COLLECTIVES
            },
            "overlap": {"collectives": [1.0, 1.0], "all_to_all": [1.0, 1.0]},
            **rates,
            **changes,
        }
    )


# A small plan on 8 ranks of one node: 4 layers of the 7B model, one sequence of 32K tokens per rank
SMALL_PLAN = costs.Plan(
    replace(m.MODELS["7b"], layers=4),
    torch.bfloat16,
    ranks=8,
    per_node=8,
    seq=2**15,
    batch=8,
    chunk=2**15,
)


def fastest(
    ranks, profile, gib, model=m.MODELS["7b"], host=2**40, per_node=8, **flags
) -> costs.Plan:
    """Return the planner's first choice for GPUs of `gib` GiB, and check its list of plans.

    All plans must fit, and the first must be within 0.2 % of the fastest. The remaining plans must
    be sorted by time. host: bytes of host memory per rank. flags: fields of planner.Constraints.
    """
    cluster = planner.Hardware(ranks, min(ranks, per_node), profile, gib * 2**30, host)
    constraints = planner.Constraints(**flags)
    plans = planner.plan(constraints, model, cluster)

    times = [plan.token_s for plan in plans]  # seconds per token
    assert times[1:] == sorted(times[1:])
    assert times[0] <= 1.002 * min(times)
    for plan in plans:
        assert plan.gpu_bytes <= gib * 2**30
        assert plan.host_bytes <= host
    return plans[0]


def swapping_plan(model, ranks, seq, factors, kept, **choices) -> costs.Plan:
    """Return a plan in bf16 whose layers run in token chunks.

    All ranks share one sequence, if `sp` is not among the choices. kept: the arguments of
    offload.ActivationPlan except the lag, which is costs.most_lag. If `kept` is empty, layers run
    whole. choices: more fields of costs.Plan.
    """
    plan = costs.Plan(
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
    if not kept:
        return plan
    lag = int(costs.most_lag(plan.activations, costs.skeletal_bytes(plan)))
    return replace(plan, activations=replace(plan.activations, lag=lag))


def planned_run(plan: costs.Plan) -> train.Run:
    """Return rank 0's run of a plan, on the CPU. The plan gets its GPU and host bytes."""
    return train.Run(train.Config(), 0, torch.device("cpu"), "cpu", planner.with_bytes(plan))


def built(run: train.Run, as_on_gpus=False) -> tuple:
    """Build rank 0 of a run. Return its model, its model states, and a function that runs one step.

    All tokens of the step are 0. as_on_gpus: attention's backward allocates the same scratch
    tensors as FlashAttention-4, and ranks of a node read each other's memory (peer access).
    """

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
    tokens_per_sequence = plan.tokens_between_products // plan.micro_batch
    tokens = torch.zeros(plan.micro_batches, plan.micro_batch, tokens_per_sequence).long()
    batch = train.Batch(
        tokens,
        tokens,
        plan.micro_batches * [torch.arange(plan.seq // plan.sp)],
        torch.ones((), dtype=states.accum_dtype),
    )
    return model, states, lambda: train.run_step(model, states, batch, 1e-4, run.cfg.clip)


def make_tokenizer(folder: Path, text: str, vocab: int = 300) -> None:
    """Train a byte-level BPE tokenizer on a text, and save it as a Hugging Face folder.

    vocab: its number of ids. Each byte of the text has an id, and so has "<end>". With more than
    256 ids, all 256 bytes have one. Otherwise only the text's bytes have one, so that the tiny
    model, which has 256 ids, can take all of them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if vocab > 256 else []
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=vocab,
            initial_alphabet=alphabet,
            special_tokens=["<end>"],
            show_progress=False,
        ),
    )
    tokenizer.enable_truncation(8)  # as some published files do: it must not cut a text
    folder.mkdir()
    tokenizer.save(f"{folder}/tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
