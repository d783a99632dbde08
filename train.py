"""Train a language model on one device or on many, under a plan that a planner chooses.

    python train.py                                   a laptop: a tiny model on Python sources
    torchrun --nproc_per_node 8 train.py --model 7b   one process (a rank) per GPU, the same code
    python train.py --help                            every flag

One step draws --batch sequences. Every data-parallel group takes its share of them and runs it in
micro-batches, whose gradients accumulate. The ranks of a sequence-parallel group hold different
tokens of the same sequences. The loss is

    sum of the losses of all valid tokens / number of valid tokens        over all ranks

so it does not depend on how the step is split. planner.py chooses the values that the flags leave
open: how many ranks share a sequence (sp), into how many shards parameters, gradients and optimizer
states are split (p, g, os), which activations stay on the GPU, and more. It counts the bytes of
each plan that it compares, predicts the seconds of a step, and takes the fastest plan that fits.

For example, `python train.py --device cpu --seq 64 --batch 4 --steps 4` prints (shortened)

    model: 1,869,504 parameters, on CPU, with attention kernel cpu. A token costs 1.15e+07 FLOPs ...
    data transformers: 7,979,036 tokens, 118,439 training and 6,233 validation sequences
    plan: a step is 1 data-parallel group x 1 micro-batch x 4 sequences; model states are not ...
    step 1/4 loss 6.0963 grad 6.336 lr 1.50e-04 TGS 3,140 0.08 s left 0:00:00
    ...
    step 4/4 loss 4.6575 grad 3.169 lr 6.00e-04 TGS 2,460 0.10 s left 0:00:00 val_loss 4.3319
    saved out/step-00000004
    Open out/loss.png for the losses of all steps. out/log.jsonl lists them
    To read what the model writes: python sample.py out
    To continue the training: python train.py --out out --resume --steps 8

On a GPU `print_plan` also prints why the planner chose this plan. FLOPs are counted in two ways:
"causal" counts only the query-key pairs that a causal mask keeps, about half of all, and "full"
counts all pairs. A step's line has its mean loss, the gradient's global norm before clipping, the
learning rate, the tokens per GPU per second (TGS), the seconds of the step, and the time left.
OUT/log.jsonl has the same numbers and more, one row per step.

SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 lets the run finish its step, save (checkpoint.py) and
end. --stop-after does the same when the time is nearly over. If an evaluation is running, it is
broken off. If training has not begun, the run ends without saving. A killed run loses only the
steps since its last checkpoint: `--resume` continues from there. Under the same plan its losses are
bit-equal, wherever the kernels are deterministic; FlashAttention's backward on a GPU is not. The
exit status is 0 for a finished or stopped run, 1 for a run that failed, and 2 for flags or files
that are refused.

The order of the file is the order of a command:

    configure    check the flags, and choose device, model, data and plan -> Run
    build_run    build this rank's part of the model and its states, and load the first weights
    train        the loop; run_step is one step, and its docstring says what overlaps with what

Legend: there are pp * dp * sp * tp ranks: pp stages of a pipeline, dp data-parallel groups, sp
ranks that share a sequence, tp ranks that share each layer's matrices. M micro-batches per step and
rank, B sequences per micro-batch, b = M * B sequences per rank, T tokens per sequence. A rank holds
T/sp tokens of each sequence, and passes q, k and v of these to attention. In the embedding, the
residual stream, the final norm and the loss it has n tokens of each sequence: n = T/sp, or T/sp/tp
if --tp-mode splits tokens among the tp ranks, too.

Left out: generation, which is sample.py's work.
"""

import contextlib
import functools
import gc
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import Version

import checkpoint
import costs
import hardware
import hf
import planner
from attention import (
    KERNELS,
    Attention,
    Documents,
    Exchange,
    Ring,
    check_ring,
    make_exchange,
    pick_kernel,
    ring_documents,
    sequence_positions,
)
from data import (
    Corpus,
    Mixture,
    block_shares,
    built_in_notes,
    check_apart,
    check_lengths,
    check_same_ids,
    check_tokens,
    choose_document_token,
    fingerprint,
    open_corpus,
    open_to_append,
    own_or_absent,
    parse_mixture,
    replace_file,
    split,
)
from fp8 import MULTIPLE, fits_tensor_cores, has_float8, use_float8
from measure import host_copy_rate
from model import (
    ARCHITECTURES,
    MODELS,
    ROPE_KEYS,
    LLaMA,
    ModelConfig,
    flops_per_token,
    initial_weight,
    param_counts,
    rope_kind,
    run_blocks,
)
from offload import ChunkedLayers
from ops import IGNORE, accumulation_dtype
from optim import OPTIMIZERS, SCHEDULES, check_optimizer
from pipeline import Pass, Pipeline, keep_stage, max_in_flight, pipeline_order
from planner import (
    DTYPES,
    Constraints,
    Hardware,
    check_documents,
    check_values,
    flag,
    flag_name,
    flags_of,
    make_parser,
)
from prepare import tokenise_data
from ranks import (
    ConfigError,
    Groups,
    StopSignal,
    UnexpectedError,
    all_or_none,
    check_same,
    first_error,
    gather_objects,
    heartbeat,
    merge_errors,
    on_rank_0,
    patient_group,
    print0,
    print_error,
    process_seconds,
    set_timeout,
    start_ranks,
    stop_signals,
    use_more_queues,
)
from replay import StepMemory, mark
from shard import States, check_weights
from streams import (
    GIB,
    NO_LIMIT,
    CommStream,
    flag_size,
    host_budget,
    host_memories,
    in_unit,
    own_host_bytes,
)
from tensor import TensorParallel, check_tensor_parallel, split_model

LONGEST_ON_CPU = 2**14  # the longest --seq with which --device auto falls back to the CPU
EVAL_SEQUENCES = 64  # an evaluation runs at most this many sequences
MAX_SKIPS = 5  # the run ends after this many non-finite steps in a row
MOST_SECONDS_LEFT = 10**9  # about 30 years. If more time is left, this is printed

# ---------------------------------------------------------------------------- flags


@dataclass(frozen=True)
class Config(Constraints):
    """All flags of train.py: the fields below, and the Constraints that restrict the planner.

    A flag that is left to `auto` has the value None, or "auto" if its values are words. It keeps
    this value even after `configure` has chosen, so that a resumed run on another number of ranks
    chooses again. There are five exceptions: model, seq, batch, lr and document_token define the
    run. `configure` replaces their `auto` by the value that it chose, and a resumed run keeps it.
    (But --model stays `auto` if --init imports the model.)
    """

    # fmt: off
    model: str = flag(
        "auto", "Model to train. auto: tiny on a CPU, 7b on GPUs, or the model that --init "
        "imports.",
        among=("auto", *MODELS), group="model, data and schedule")
    architecture: str = flag(
        "llama", "Classes of the model and of its layers, a row of model.ARCHITECTURES. --model "
        "says their sizes. A resumed run keeps it.", among=ARCHITECTURES)
    init: str = flag(
        "random", "First weights: random, or hf:DIR, a Hugging Face folder of Llama, Mistral, "
        "Qwen2, Qwen2.5 or Qwen3 in safetensors. A resumed run does not need DIR.")
    untie: bool = flag(
        False, "Train the head as a matrix of its own if the model that --init imports is tied, "
        "that is, if its head is its embedding. The head begins as a copy of the embedding. "
        "Otherwise a tied model stays tied.")
    rope_scaling: str = flag(
        "", "Let the rotary embedding reach longer sequences than the model was trained on. "
        "linear:FACTOR, llama3:FACTOR and yarn:FACTOR multiply the length that it reaches; a model "
        "that has one of these kinds keeps that kind. theta:BASE sets another base. On resume "
        "FACTOR counts from the run's first weights, and may only become larger.")
    data: str = flag(
        "transformers", "Training data: transformers (8 MB of Python files of that package, which "
        "are the same for everybody), stdlib (the Python files of this Python's library), a text "
        "file, a .bin file of token ids, or a folder of texts or of .bin files, of which val.bin "
        "is for validation. A list such as a.bin:0.7,b.bin:0.3 mixes several by weight. Without "
        "--tokenizer the bytes of a text are its tokens. FILE.bin.json says what FILE.bin holds: "
        '{"token_bytes": 4, "document_token": 2, "ignore": 0} means that ids have 4 bytes, that '
        "token 2 ends documents, and that token 0 is never a label.")
    special_tokens: bool = flag(
        False, "Text that spells a special token of --tokenizer, such as <|endoftext|>, becomes "
        "this token. Otherwise it is text like any other.")
    seq: int | None = flag(
        None, "Tokens per sequence. auto: 256 for tiny, else 4096.", 1, 2**40)
    steps: int = flag(
        200, "Steps of the whole run, including those before a resume. 0: initialise, save and "
        "export; with --eval-every 1 also evaluate, but do not save.", 0, 2**40)
    lr: float | None = flag(
        None, "Peak learning rate. auto: 3e-3 for tiny, 6e-4 for 160m, 2e-5 with --init, else "
        "3e-4.", 0, 1e30)
    schedule: str = flag(
        "cosine", "Learning rate after the warm-up. cosine: falls until the --steps of the first "
        "command; a resumed run with more steps stays at the final rate, but if the first command "
        "ended inside its warm-up, the rate falls until the new --steps. constant: stays at --lr. "
        "wsd (warm-up, stable, decay): stays at --lr, and falls in the last --decay-steps. If a "
        "run is resumed before the decay has begun, the decay moves to the end of the new --steps. "
        "After that its end does not change, and further steps stay at the final rate.",
        among=SCHEDULES)
    decay_steps: float | None = flag(
        None, "Steps of the decay of --schedule wsd; below 1, a fraction of --steps. auto: 0.2.",
        0, 2**40)
    min_lr: float = flag(
        0.1, "Final learning rate of a decay, as a fraction of --lr.", 0, 1)
    warmup: int | None = flag(
        None, "Steps of linear warm-up, during which the learning rate rises to --lr. auto: a "
        "quarter of the first command's --steps, but at least 20 and at most 500. So a run of up "
        "to 20 steps ends inside its warm-up, unless --schedule wsd leaves fewer steps for it.",
        0, 2**40)
    weight_decay: float = flag(0.1, "Weight decay of matrices. Norms and biases have none.", 0)
    clip: float = flag(
        1.0, "Largest global norm of the gradient. A larger gradient is scaled down to it. "
        "0: no clipping.", 0, 1e30)
    seed: int = flag(0, "Seed of random weights and of the order of the data.", 0, 2**31 - 1)
    device: str = flag(
        "auto", "Where to train. auto: on GPUs if there are any, else on the CPU.",
        among=("auto", "cpu", "cuda"), group="machine")
    dtype: str = flag(
        "auto", "Dtype of weights and activations. auto: bf16 on GPUs, fp32 on a CPU.",
        among=("auto", *DTYPES))
    timeout: float = flag(
        600.0, "Seconds that a collective waits for a rank before the run fails. On GPUs the "
        "predicted seconds of a step are added.", 1, 1e9)
    dry_run: bool = flag(False, "Print the best plans with their memory, and end without training.")
    stop_after: str = flag(
        "", "Time after which the run has to be over, such as 3h55m, 90m, 1d2h or 45s, or a number "
        "of seconds. It counts from the start of the process, or under torchrun from the start of "
        "torchrun. The run saves and ends before a step or an export that might not fit into the "
        "time. A resumed run does not inherit this flag.")
    out: str = flag(
        "out", "Folder for checkpoints, log.jsonl and loss.png, which draws the loss by step and "
        "by position.", group="files and checkpoints")
    eval_every: int = flag(
        0, "Steps between evaluations. 0: only at the end. -1: never.", -1, 2**40)
    save_every: int = flag(
        0, "Steps between checkpoints. 0: only at the end or when the run is stopped. -1: never.",
        -1, 2**40)
    keep: int = flag(2, "Number of checkpoints to keep. Older ones are deleted.")
    save_async: bool = flag(
        False, "Copy the model states to host memory, and write the checkpoint from there while "
        "the next steps run.")
    resume: str = flag(
        "never", "Checkpoint to continue from: never, latest, auto (latest if there is one), or a "
        "folder. --resume without a value means latest. The run keeps its flags, except those that "
        "this command gives.")
    export: str = flag(
        "", "Folder for a Hugging Face checkpoint of the final weights in --dtype, with tokenizer "
        "and license. Its architecture is the imported model's. Without an import it is Qwen3 for "
        "qwen3-8b, and Llama for the other models. With --save-every, each save also replaces this "
        "folder by an export of the step's weights. A run that is stopped before its last step "
        "saves, but does not export.")
    # fmt: on

    def __post_init__(self):
        """Raise ValueError if a flag is out of its range or contradicts another flag."""
        check_values(self)
        if not re.fullmatch("random|hf:.+", self.init):
            raise ValueError(
                f"--init {self.init} is unknown. Say random, or hf:DIR with a Hugging Face folder"
            )
        if self.stop_after:
            duration(self.stop_after)
        if self.decay_steps is not None and not SCHEDULES[self.schedule].stable:
            stable = " or ".join(name for name in SCHEDULES if SCHEDULES[name].stable)
            raise ValueError(
                f"--decay-steps {self.decay_steps:g} belongs to --schedule {stable}, and the "
                f"schedule is {self.schedule}. Pass --decay-steps auto, or --schedule wsd"
            )
        if self.decay_steps is not None and (
            self.decay_steps == 0 or (self.decay_steps > 1 and self.decay_steps % 1)
        ):
            raise ValueError(
                f"--decay-steps {self.decay_steps:g}: choose a whole number of steps, such as "
                f"{max(1, int(self.decay_steps))}, or a fraction of --steps between 0 and 1. "
                "--schedule constant has no decay"
            )

    @property
    def import_folder(self) -> str:
        """Return DIR of --init hf:DIR, or an empty text."""
        return self.init.partition("hf:")[2]


# Flags that count for one command only: a resumed run does not inherit them
NOT_INHERITED = {"resume", "out", "export", "dry_run", "stop_after"}


def duration(text: str) -> int:
    """Return the time of --stop-after in seconds. Example: 3h55m is 14100. Raises ValueError."""
    in_units = re.fullmatch("([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?", text)
    total = 0
    if re.fullmatch("[0-9]{1,12}", text):
        total = int(text)
    elif in_units and len(text) < 40:
        unit_seconds = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        total = sum(int(part[:-1]) * unit_seconds[part[-1]] for part in in_units.groups() if part)
    if not total:
        raise ValueError(
            f"--stop-after {text}: choose a time of at least one second, such as 3h55m, 90m, 1d2h, "
            "45s, or a number of seconds"
        )
    return total


def parse(argv: list[str] | None = None) -> dict:
    """Return only the flags that a command gives, by the names of Config's fields."""
    return vars(make_parser(Config, __doc__.split("\n")[0]).parse_args(argv))


# The two sets of a row contradict each other. On resume, the command's flags win, and inherited
# flags of the other set are dropped. (--os-place host contradicts nothing.)
CONTRADICTIONS = [
    ({"strategy"}, {"p", "g", "os"}),
    ({"recompute"}, {"alpha", "resident_layers", "chunk"}),
    ({"os_place"}, {"resident_states"}),
]


def without_contradicted(inherited: dict, given: dict) -> dict:
    """Return the flags that a resumed run inherits, less those that contradict the flags that the
    command gives (CONTRADICTIONS). They get their defaults again."""

    def restricting(flags):
        harmless = None, "", "auto", "host"
        return {name for name, value in flags.items() if value not in harmless}

    chosen, old = restricting(given), restricting(inherited)
    dropped = set()
    for one_side, other_side in CONTRADICTIONS:
        if chosen & one_side:
            dropped |= old & other_side
        if chosen & other_side:
            dropped |= old & one_side
    return {name: value for name, value in inherited.items() if name not in dropped}


def resumed_flags(command_flags: dict, old: dict) -> Config:
    """Return the flags of the run to resume, updated by the flags that the command gives.

    Old flags that contradict the command's are dropped (without_contradicted). If the command gives
    --seq but not --batch, the batch changes so that a step keeps its number of tokens: half as many
    sequences if they are twice as long. `old` has the flags from the checkpoint's meta.json. Raises
    ValueError if they are not valid, if --init names other weights than those that the run began
    with, or if the command changes --untie.
    """
    flags = {
        name: old[name] for name in flags_of(Config) if name in old and name not in NOT_INHERITED
    }
    try:
        Config(**flags)
        if "init" not in flags:
            raise ValueError("init is missing")
    except Exception as e:  # a file may hold anything
        raise ValueError(
            f"--resume: the flags in the checkpoint's meta.json are invalid: {e}"
        ) from e

    def source_of(init: str) -> tuple[bool, Path]:
        """Return whether the weights are imported, and the folder, which may be spelt in two
        ways."""
        return init.startswith("hf:"), Path(init.removeprefix("hf:")).resolve()

    init = command_flags.get("init", old["init"])
    if source_of(init) != source_of(old["init"]):
        raise ValueError(
            f"--init {init}: --init cannot change on resume, and the run began with --init "
            f"{old['init']}. Drop --init"
        )
    old_untie = old.get("untie", False)
    if command_flags.get("untie", old_untie) != old_untie:
        asked, began = ("--no-untie", "with") if old_untie else ("--untie", "without")
        raise ValueError(
            f"{asked}: --untie cannot change on resume, and the run began {began} it. Drop {asked}"
        )

    flags = without_contradicted(flags, command_flags) | command_flags
    flags["seq"] = flags["seq"] or old["seq"]
    if "batch" not in command_flags:
        flags["batch"] = max(1, old["batch"] * old["seq"] // flags["seq"])
    return Config(**flags)


# ---------------------------------------------------------------------------- a run


class Coordinates(NamedTuple):
    """The position of a rank in the grid of pp x dp x sp x tp ranks. From one rank to the next,
    tp_rank changes fastest, then sp_rank, then data_rank, and the stage changes last.

    Example: pp = 1, dp = 2, sp = 2, tp = 1. Rank 1 has data_rank 0 and sp_rank 1, and rank 2 has
    data_rank 1 and sp_rank 0.
    """

    stage: int  # of the pipeline
    data_rank: int  # ranks with different values have different sequences
    sp_rank: int  # ranks that differ only here have different tokens of the same sequences
    tp_rank: int  # ranks that differ only here share each layer's matrices


@dataclass(frozen=True)
class Run:
    """What `configure` has decided about a training run, before anything is built."""

    cfg: Config
    rank: int
    device: torch.device
    kernel: str  # the name of an attention kernel
    plan: costs.Plan
    hardware: Hardware | None = None  # the cluster that the plan is for
    training: Mixture | None = None
    validation: Mixture | None = None
    start_step: int = 0  # steps that were done before this command ...
    start_samples: int = 0  # ... and the sequences that they have seen
    meta: dict | None = None  # what meta.json of each checkpoint says: flags, model, config.json
    # The first weights come from `resumed`, else from read_weights(name), else they are random
    resumed: checkpoint.Checkpoint | None = None
    read_weights: Callable | None = None  # of an import

    @property
    def labels_ahead(self) -> int:
        """Return the number of labels per token."""
        return LLaMA.class_of(self.plan.model).labels_ahead

    @property
    def coordinates(self) -> Coordinates:
        plan = self.plan
        indices = np.unravel_index(self.rank, (plan.pp, plan.dp, plan.sp, plan.tp))
        return Coordinates(*map(int, indices))


# ---------------------------------------------------------------------------- the learning rate

DECAY_FRACTION = 0.2  # --decay-steps auto: the decay of wsd as a fraction of the steps
# --warmup auto: a quarter of the steps, but at least 20 and at most 500. With a warm-up of fewer
# than 20 steps, the first rates would be so high that the loss of a large model rises
WARMUP_LIMITS = 20, 500


def decay_length(decay_steps: float | None, steps: int) -> int:
    """Return how many steps the decay of wsd takes in a schedule of `steps` steps.

    decay_steps: --decay-steps, which is a number of steps, a fraction of `steps`, or None for auto.
    A fraction gives at least one step.
    """
    if decay_steps is None:
        decay_steps = DECAY_FRACTION
    if decay_steps < 1:
        return max(1, round(decay_steps * steps))
    return int(decay_steps)


def lay_out_schedule(cfg: Config, resumed: checkpoint.Checkpoint | None) -> dict[str, int]:
    """Return how many steps the warm-up and the whole schedule have, as meta.json records them.

    A run's first command decides both, so the learning rate does not jump if a later command
    resumes the run with other --steps. There are two exceptions: the later command may set another
    --warmup, and it may move the end of the schedule (end_moves). Raises ValueError if warm-up and
    decay do not fit into the steps, or if --decay-steps changes after the decay has begun.
    """
    start_step = resumed.meta["step"] if resumed else 0
    old = resumed.meta["config"] if start_step else {}
    moves = not old or end_moves(cfg, old, start_step)
    steps = cfg.steps if moves else old["schedule_steps"]

    warmup = cfg.warmup
    if warmup is None:
        warmup = old["warmup_steps"] if old else automatic_warmup(cfg, steps)
    if cfg.steps > start_step:  # something is trained
        check_schedule_fits(cfg, warmup, steps, start_step, moves)
    return {"warmup_steps": warmup, "schedule_steps": steps}


def end_moves(cfg: Config, old: dict, start_step: int) -> bool:
    """Return whether the schedule of a resumed run ends at the --steps of this command. Otherwise
    it ends where it ended before. old: the flags of the run to resume, from meta.json.

    The end moves in three cases:

        The schedule is wsd, and the decay has not begun.
        This command changes the schedule to wsd.
        The schedule had so few steps that it ended inside its warm-up, and now there are more.

    Example: a run has begun with --schedule wsd --steps 100 --decay-steps 20.

        resumed at   with --steps   the decay
        60           200            begins at step 180
        80           200            begins at step 180
        90           200            began at step 80 and ends at step 100; then the rate stays

    Raises ValueError if the decay has begun, and --decay-steps would change it.
    """
    old_steps = old["schedule_steps"]
    only_warmed_up = old_steps <= old["warmup_steps"]
    if only_warmed_up and cfg.steps > old_steps:
        return True
    if not SCHEDULES[cfg.schedule].stable or cfg.steps <= start_step:
        return False
    if not SCHEDULES[old["schedule"]].stable:
        return True

    decay = decay_length(old["decay_steps"], old_steps)
    decay_start = old_steps - decay
    if start_step <= decay_start:
        return True
    if decay_length(cfg.decay_steps, old_steps) != decay:
        raise ValueError(
            f"--decay-steps cannot change any more: the run resumes at step {start_step}, and its "
            f"decay of {decay} steps began at step {decay_start}. Drop --decay-steps, or resume a "
            "checkpoint from before the decay"
        )
    return False


def automatic_warmup(cfg: Config, steps: int) -> int:
    """Return how many steps --warmup auto gives to the warm-up, in a schedule of `steps` steps."""
    least, most = WARMUP_LIMITS
    warmup = min(max(steps // 4, least), most)
    if SCHEDULES[cfg.schedule].stable:  # in a short run, the warm-up leaves room for the decay
        warmup = min(warmup, max(0, steps - decay_length(cfg.decay_steps, steps)))
    return warmup


def check_schedule_fits(
    cfg: Config, warmup: int, steps: int, start_step: int, decides_end: bool
) -> None:
    """Raise ValueError if the schedule's `steps` are too few for --warmup, or for the warm-up and
    the decay of wsd together. A warm-up that --warmup auto chose may be longer than the schedule:
    then the run ends inside it.

    decides_end: whether this command decides where the schedule ends. If it does not, the command
    that did has checked the decay."""
    checks_decay = SCHEDULES[cfg.schedule].stable and decides_end
    decay = decay_length(cfg.decay_steps, steps)
    if cfg.warmup is not None and warmup > steps:
        most = max(0, steps - decay) if checks_decay else steps
        more_steps = ", or more --steps" if decides_end else ""
        raise ValueError(
            f"--warmup {warmup} is longer than the {steps} steps of the schedule. Choose at most "
            f"--warmup {most}{more_steps}"
        )
    if not checks_decay:
        return

    earliest = max(warmup, start_step)  # the first step at which the decay may begin
    if earliest + decay <= steps:
        return
    remedies = []
    if steps > earliest:
        remedies.append(f"at most --decay-steps {steps - earliest}")
    if warmup > start_step and steps - decay >= start_step:
        remedies.append(f"at most --warmup {steps - decay}")
    advice = ", ".join([*remedies, "or more --steps"]) if remedies else "more --steps"
    raise ValueError(
        f"--decay-steps: a decay of {decay} steps that ends with step {steps} would begin at step "
        f"{steps - decay}, which is before step {earliest}, the end of the warm-up or the start of "
        f"this command. Choose {advice}"
    )


def learning_rate(run: Run, step: int) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises linearly to lr in the warm-up. Then it follows --schedule. With cosine and wsd it is
    min_lr * lr from the end of the schedule on. For example, with --schedule wsd --steps 10
    --warmup 2 --decay-steps 4 --lr 1 --min-lr 0 the decay begins at step 6:

        step   0    1    2    3    4    5    6    7    8     9     10
        done                                 0    1/4  2/4   3/4   1    fraction of the decay
        rate   0.5  1    1    1    1    1    1    0.5  0.29  0.13  0    1 - sqrt(done) in the decay
    """
    cfg, recorded = run.cfg, run.meta["config"]
    warmup, end = recorded["warmup_steps"], recorded["schedule_steps"]
    if step < warmup:
        return cfg.lr * (step + 1) / warmup

    schedule = SCHEDULES[cfg.schedule]
    decay = end - warmup
    if schedule.stable:
        decay = decay_length(cfg.decay_steps, end)
    done = 1.0  # fraction of the decay
    if step < end:
        done = max(0, step - (end - decay)) / decay
    fallen = schedule.falls(done)
    return cfg.lr * (1 - fallen + fallen * cfg.min_lr)


# ---------------------------------------------------------------------------- configuration

# When cuBLAS first runs on the thread of backward, that thread has no CUDA context. PyTorch makes
# one, and warns about it once.
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")


def use_expandable_segments() -> None:
    """Turn on expandable segments in PyTorch's allocator, unless the environment configures it.

    An expandable segment grows by mapping more memory to its end. With segments of fixed sizes, the
    gaps between the activations that layers save would add up to gigabytes."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def choose_device(cfg: Config, local_rank: int) -> torch.device:
    """Return this process's device, and make it the current one if it is a GPU.

    Raises ValueError in three cases: this node has fewer GPUs than processes, --device auto finds
    no GPU and a step would take hours on the CPU, or PyTorch is too old."""
    # `release` has only the numbers. NVIDIA's containers have versions such as 2.11.0a0+hash
    if Version(torch.__version__).release < (2, 11):
        raise ValueError(f"torch {torch.__version__} is too old: train.py needs at least 2.11")
    gpus = torch.cuda.device_count()
    if cfg.device == "auto" and not gpus and (cfg.seq or 0) > LONGEST_ON_CPU:
        raise ValueError(
            f"--seq {cfg.seq}: there is no GPU here, or PyTorch does not see it. A CPU would take "
            f"hours for a step. Pass --device cpu if you want that, or --seq {LONGEST_ON_CPU}. To "
            "plan for GPUs without having them, run planner.py"
        )
    if cfg.device == "cpu" or (cfg.device == "auto" and not gpus):
        return torch.device("cpu")
    if local_rank >= gpus:
        advice = f"Start at most {gpus} processes per node, or pass" if gpus else "Pass"
        raise ValueError(
            f"--device {cfg.device}: this node has {gpus} GPUs, so the process with local rank "
            f"{local_rank} has none. {advice} --device cpu"
        )
    if cfg.pp != 1:
        use_more_queues()  # `main` has not done so if a resumed run inherits --pp
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    use_expandable_segments()
    return device


def check_extends(flag: str, earlier: dict, scaling: dict) -> None:
    """Raise ValueError if a resumed run would change its rotary scaling, but not extend it.

    flag: --rope-scaling. earlier: the scaling of the checkpoint, or {}. scaling: what the flag
    makes of the first model's scaling.
    """
    if not earlier or scaling == earlier:
        return
    kind, first_kind = rope_kind(scaling), rope_kind(earlier)
    if kind != first_kind or scaling["factor"] < earlier["factor"]:
        raise ValueError(
            f"--rope-scaling {flag}: the run has {first_kind} scaling by a factor of "
            f"{earlier['factor']:g}, and this flag makes it {kind} by "
            f"{scaling.get('factor', 1):g}. A resumed run may only extend its scaling, and FACTOR "
            "counts from the run's first weights. Drop the flag, or pass the same kind with a "
            "larger FACTOR"
        )


def trained_positions(resumed: checkpoint.Checkpoint) -> int:
    """Return the number of positions on which a run was trained before --rope-scaling, if any."""
    model = resumed.meta["model"]
    scaling = model["rope_scaling"]
    before = model["max_positions"] / scaling.get("factor", 1)
    return round(scaling.get("original_max_position_embeddings", before))


def extend_positions(
    cfg: Config, model: ModelConfig, source: dict, resumed: checkpoint.Checkpoint | None
) -> ModelConfig:
    """Return the model with --rope-scaling, and with as many positions as the run needs.

    max_positions is the number of positions that the model supports. An export writes it into
    config.json. source: config.json of the imported model, or {}. Raises ValueError, also if the
    checkpoint to resume is of another model.
    """
    if cfg.rope_scaling and resumed and not source:
        # a scaling counts from the length that the run's weights were trained on
        model = replace(model, max_positions=max(model.max_positions, trained_positions(resumed)))
    model = hf.with_rope(cfg.rope_scaling, model)
    kind, _, _ = cfg.rope_scaling.partition(":")
    if resumed:
        may_differ = {"max_positions"}
        if kind == "theta":
            may_differ.add("rope_theta")
        elif kind:
            may_differ.add("rope_scaling")
        checkpoint.check_same_model(resumed, model, may_differ)
        check_extends(cfg.rope_scaling, resumed.meta["model"]["rope_scaling"], model.rope_scaling)
    # a resumed run may have had a longer --seq before
    earlier = resumed.meta["model"]["max_positions"] if resumed else 0
    if source and kind != "theta":
        needed = earlier  # an import supports more positions only if --rope-scaling says so
    elif rope_kind(model.rope_scaling) == "yarn":
        needed = earlier  # with YaRN, max_positions is factor * original length, also in an export
    else:
        needed = max(earlier, cfg.seq)
    return replace(model, max_positions=max(model.max_positions, needed))


def find_model(
    cfg: Config, device: torch.device, resumed: checkpoint.Checkpoint | None
) -> tuple[str, ModelConfig, dict, Callable | None]:
    """Return the model that the flags or the checkpoint to resume name: its name, the model, its
    config.json, and a function that reads its first weights.

    name          a key of MODELS. If this command or the run to resume imported the model: `auto`
    model         --rope-scaling is not applied yet
    config.json   the dict of the imported model, or {} if the model was not imported
    the function  name -> tensor, if this command imports the model; otherwise None

    Raises ValueError if two flags contradict each other, or if the import cannot be read.
    """
    name, read_weights = cfg.model, None
    source = resumed.meta["source"] if resumed else {}
    if cfg.import_folder and not resumed:
        imported, source = hf.read_config(cfg.import_folder)
        if name != "auto":
            raise ValueError(
                f"--model {name}: --init hf:DIR brings its own model. Drop --model, or --init"
            )
        model, read_weights = hf.open_weights(cfg.import_folder, imported, cfg.untie)
    elif name == "auto" and source:
        # whether an import is tied depends on its files, too
        model = replace(hf.model_of(source), tied=resumed.meta["model"].get("tied", False))
    else:
        if name == "auto":
            name = "tiny" if device.type == "cpu" else "7b"
        model = MODELS[name]

    if cfg.untie and not source:
        raise ValueError(
            "--untie: it is for models that --init hf:DIR imports. Drop --untie, or pass --init"
        )
    own_weights = ARCHITECTURES[cfg.architecture].model.own_weights
    if name == "auto" and cfg.architecture != "llama" and not own_weights:
        raise ValueError(
            f"--architecture {cfg.architecture}: --init hf:DIR brings its own layers. Drop "
            "--architecture, or --init"
        )
    return name, replace(model, architecture=cfg.architecture), source, read_weights


def choose_model(
    cfg: Config, device: torch.device, resumed: checkpoint.Checkpoint | None
) -> tuple[Config, ModelConfig, dict, Callable | None]:
    """Return the flags, the model, its config.json, and a function that reads its first weights.

    flags         cfg with values for --model, --seq and --lr if they were `auto`. --model stays
                  `auto` for an imported model
    model         --rope-scaling is applied
    the last two  as find_model returns them

    Raises ValueError, for example if the checkpoint to resume is of another model. Only one flag
    may change the model on resume: --rope-scaling may add a scaling, extend one of its own kind, or
    set another base.
    """
    name, model, source, read_weights = find_model(cfg, device, resumed)
    default_lrs = {"tiny": 3e-3, "160m": 6e-4, "auto": 2e-5}  # "auto": an imported model
    cfg = replace(
        cfg,
        model=name,
        seq=cfg.seq or (256 if name == "tiny" else 4096),
        lr=default_lrs.get(name, 3e-4) if cfg.lr is None else cfg.lr,
    )

    window = hf.sliding_window(source)
    if 0 < window < cfg.seq:
        raise ValueError(
            f"--seq {cfg.seq}: the imported weights were trained with sliding windows of {window} "
            f"tokens, which train.py does not support. Take at most --seq {window}"
        )

    model = extend_positions(cfg, model, source, resumed)
    if cfg.steps > 0 and param_counts(model).trained == 0:
        raise ValueError(
            f"--steps {cfg.steps}: all weights of the model are frozen, so a step would change "
            "nothing. Let a weight train, or use --steps 0"
        )
    return cfg, model, source, read_weights


def tokenise_sources(
    cfg: Config, model: ModelConfig, paths: list[str], own_folders: list[str]
) -> list[str]:
    """Return the paths of the token files that --tokenizer makes of the text at these paths. A path
    that has .bin files already is returned as it is.

    Rank 0 writes the files unless an earlier run has done so. The other ranks wait, which may take
    hours. Raises ConfigError. A collective of all ranks.
    """
    # patient_group waits for up to 30 days. If rank 0 dies, its connections close, so the
    # collective fails on the remaining ranks
    group = patient_group()
    token_paths = []
    for path in paths:
        token_path, _ = on_rank_0(
            tokenise_data,
            path,
            cfg.tokenizer,
            Path(cfg.out) / "tokens",
            cfg.document_token,
            cfg.special_tokens,
            model.vocab,
            own_folders,
            group=group,
        )
        token_paths.append(token_path)
    return token_paths


def open_sources(
    cfg: Config, model: ModelConfig, paths: list[str], own_folders: list[str]
) -> tuple[list[tuple[Corpus, Corpus | None]], int]:
    """Return (training data, validation data or None) of each source, and the id that ends each
    document (choose_document_token). Raises ValueError or OSError."""
    opened = [open_corpus(path, model.vocab, own_folders) for path in paths]
    corpora = all_corpora(opened)
    check_apart(corpora)
    check_same_ids(corpora, model.vocab)
    document_token = choose_document_token(corpora, cfg.document_token)
    if document_token >= model.vocab:
        raise ValueError(
            f"--document-token {document_token}: the model's vocabulary ends at token "
            f"{model.vocab - 1}"
        )
    check_documents(cfg.memplan, document_token)
    return opened, document_token


def all_corpora(opened: list[tuple[Corpus, Corpus | None]]) -> list[Corpus]:
    """Return the corpora that open_sources has opened, in one list."""
    return [corpus for pair in opened for corpus in pair if corpus is not None]


def open_data(
    cfg: Config, model: ModelConfig, resumed: checkpoint.Checkpoint | None
) -> tuple[Config, Mixture, Mixture, dict]:
    """Return the flags, the training and validation sequences, and a fingerprint of the data files.
    In the flags, document_token is no longer `auto`. resumed: the validation sequences avoid the
    tokens that this checkpoint has trained on, as far as the data suffice
    (warn_of_trained_validation). Raises ConfigError. A collective of all ranks."""
    if cfg.special_tokens and not cfg.tokenizer:
        raise ConfigError(
            "--special-tokens: it says how --tokenizer reads text. Drop --special-tokens, or pass "
            "--tokenizer"
        )
    sources = all_or_none(parse_mixture, cfg.data)
    paths = [source.path for source in sources]
    # files that the run writes are not data
    own_folders = [folder for folder in (cfg.out, cfg.export) if folder]
    if cfg.tokenizer:
        paths = tokenise_sources(cfg, model, paths, own_folders)
    opened, document_token = all_or_none(open_sources, cfg, model, paths, own_folders)
    cfg = replace(cfg, document_token=document_token)

    def check_and_split() -> tuple[Mixture, Mixture, dict]:
        corpora = all_corpora(opened)
        with_documents = document_token >= 0
        check_tokens(corpora, model.vocab, dist.get_rank(), dist.get_world_size(), with_documents)
        check_lengths(sources, opened, cfg.seq)
        ahead = LLaMA.class_of(model).labels_ahead
        files = fingerprint(corpora)
        known = resumed.meta["trained_to"] if resumed else {}
        trained_to = [known.get(corpus.content, 0) for corpus, _ in opened]
        pairs = [
            split(corpus, val_corpus, cfg.seq, cfg.seed, ahead, end)
            for (corpus, val_corpus), end in zip(opened, trained_to)
        ]
        shares = tuple(block_shares(sources))
        training, validation = (Mixture(sequences, shares) for sequences in zip(*pairs))
        return training, validation, files

    return cfg, *all_or_none(check_and_split)


def warn_of_trained_validation(run: Run) -> None:
    """Print a warning if val_loss is measured on tokens that a resumed run has trained on, or may
    have. This happens if its --seq or its data have changed, and there is no val.bin."""
    if not run.resumed or run.cfg.eval_every < 0:
        return
    known = run.resumed.meta["trained_to"]
    unknown, leaks = False, []
    for training, validation in zip(run.training.sources, run.validation.sources):
        if training.corpus is not validation.corpus:
            continue
        end = known.get(training.corpus.content)
        if end is None:
            unknown = True
        elif end > validation.first:
            tokens = min(validation.count, EVAL_SEQUENCES) * run.cfg.seq
            leaks.append(f"{min(1, (end - validation.first) / tokens):.0%}")
    if unknown:
        print0(
            "WARNING: some of the data are new to this run, and their end is held out for "
            "val_loss. If earlier data of the run had the same tokens, it may have trained on "
            "them. Put text that it has never seen into val.bin"
        )
    if leaks:
        print0(
            f"WARNING: with --seq {run.cfg.seq}, {' and '.join(leaks)} of the tokens that val_loss "
            "is measured on were in the training data of this run, because an earlier --seq left "
            "fewer tokens at the end of the data. Put text that it has never seen into val.bin"
        )


def try_folder(folder: str | Path, name: str) -> None:
    """Raise ValueError if files cannot be written to a folder, which is made if it is missing.
    name: what the error calls the folder, for example the flag that names it."""
    if os.path.isfile(folder):
        raise ValueError(f"{name} {folder} is a file. Name a folder")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        shown = folder or "''"
        raise ValueError(f"{name} {shown} cannot be written: {e}. Name another folder") from e


def check_folders(
    cfg: Config, model: ModelConfig, source: dict, resumed: checkpoint.Checkpoint | None
) -> None:
    """Check before the training that its results can be written. Raise ValueError if --out or
    --export cannot be written, if the export would overwrite files, or if Hugging Face's format
    cannot express the model."""
    resumed_step = resumed.meta["step"] if resumed else None
    try_folder(cfg.out, "--out")
    for name in ("lock", "log.jsonl"):
        own_or_absent(Path(cfg.out, name))
    if not cfg.export:
        return

    try_folder(cfg.export, "--export")
    if os.path.samefile(cfg.export, cfg.out):
        raise ValueError(f"--export {cfg.export} is also --out. Name another folder")
    hf.check_export_folder(Path(cfg.export), hf.run_number(Path(cfg.out)), resumed_step)
    # an export is first written beside its folder
    try_folder(Path(cfg.export).resolve().parent, "--export: its parent")
    if cfg.attention in KERNELS and not KERNELS[cfg.attention].plain:
        raise ValueError(
            f"--export: Hugging Face's models cannot compute --attention {cfg.attention}. "
            "Drop --export"
        )
    hf.export_config(model, source, torch.float32)
    hf.companion_files(companion_folders(cfg))


def choose_plans(
    cfg: Config,
    model: ModelConfig,
    device: torch.device,
    kernel: str,
    gpu_bytes: float | None = None,
) -> tuple[list[costs.Plan], Hardware]:
    """Return the best plans by predicted time, and the hardware that they are for.

    The plans choose all that the flags leave open, except the dtype, which cfg must name. The
    hardware says how many ranks there are, the profile of their devices, and the memory of the rank
    that has least. kernel: the attention kernel that runs; the profile's rates of this kernel
    predict its seconds. gpu_bytes: the memory to plan for, instead of this GPU's. Raises
    ConfigError. A collective of all ranks, which all get the same plans.
    """
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    profile = on_rank_0(hardware.find_profile, device_name(device), per_node)

    total = NO_LIMIT
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    own_gpu_bytes = planner.GPU_SHARE * min(total, cfg.gpu_memory or total)
    gpu_budgets = gather_objects(gpu_bytes or own_gpu_bytes)
    host_budgets = gather_objects(all_or_none(host_budget, per_node, cfg.host_memory))
    processor = on_rank_0(hardware.processor_name)  # of rank 0, which plans for all ranks
    cluster = Hardware(
        world, per_node, profile, min(gpu_budgets), min(host_budgets), kernel, processor
    )

    constraints = replace(cfg, default_tokens=planner.default_tokens(cfg.model))
    # only rank 0 plans. If each rank planned, two plans that tie could be ranked differently by
    # processors that round differently
    return on_rank_0(planner.plan, constraints, model, cluster), cluster


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def choose_flags(
    command_flags: dict,
) -> tuple[Config, checkpoint.Checkpoint | None, dict[str, int]]:
    """Return the flags, the checkpoint to resume (or None), and how many steps the warm-up and the
    schedule have (lay_out_schedule). Raises ConfigError. A collective of all ranks."""
    cfg = all_or_none(lambda: Config(**command_flags))
    may_differ = {"host_memory", "gpu_memory"}  # the smallest value of all ranks counts
    check_same(
        {flag_name(name): value for name, value in asdict(cfg).items() if name not in may_differ}
    )
    resumed = checkpoint.choose_checkpoint(Path(cfg.out), cfg.resume)
    if resumed:
        cfg = all_or_none(resumed_flags, command_flags, resumed.meta["config"])
    return cfg, resumed, all_or_none(lay_out_schedule, cfg, resumed)


def reads_text(training: Mixture) -> bool:
    """Return whether all data are text, whose bytes are the tokens."""
    files = [file for source in training.sources for file in source.corpus.files]
    return all(file.is_text for file in files)


def make_meta(
    cfg: Config,
    model: ModelConfig,
    source: dict,
    schedule: dict[str, int],
    training: Mixture,
    data_fingerprint: dict,
    resumed: checkpoint.Checkpoint | None,
) -> dict:
    """Return the part of meta.json that is the same in all checkpoints of this command. Each
    checkpoint adds its step, its samples and its files.

    source: config.json of the imported model, or {}. schedule: from lay_out_schedule.
    """
    # "config" has what a resumed run compares (print_changes): the flags, the data, the schedule
    # and the number of CPU threads. Each thread adds up a part of a sum, so their number changes
    # how the sum is rounded
    config = asdict(cfg) | {
        "the data": data_fingerprint,
        "threads": torch.get_num_threads(),
        **schedule,
    }
    trained_to = dict(resumed.meta["trained_to"]) if resumed else {}
    for sequences in training.sources:
        content = sequences.corpus.content
        trained_to[content] = max(sequences.end, trained_to.get(content, 0))
    return {
        "config": config,
        "model": asdict(model),
        "source": source,
        "bytes_are_tokens": not cfg.tokenizer and reads_text(training),
        # for each corpus of the run so far: where its training data end. --seq moves this end, so
        # it is the latest one of all values of --seq so far
        "trained_to": trained_to,
    }


def configure(command_flags: dict, local_rank: int) -> Run:
    """Check the flags, choose device, model, data and plan, and print these choices.

    command_flags: the flags that the command gives, as `parse` returns them. local_rank: this
    rank's number on its node. Raises ConfigError. A collective of all ranks.
    """
    # ---- flags
    cfg, resumed, schedule = choose_flags(command_flags)
    set_timeout(cfg.timeout)  # main does not know a --timeout that a resumed run inherits

    # ---- device
    device = all_or_none(choose_device, cfg, local_rank)
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "bf16" if device.type == "cuda" else "fp32"

    # ---- model
    cfg, model, source, read_weights = all_or_none(choose_model, cfg, device, resumed)

    # ---- data
    if not cfg.dry_run:
        all_or_none(check_folders, cfg, model, source, resumed)
    cfg, training, validation, data_fingerprint = open_data(cfg, model, resumed)

    # ---- plan
    with_documents = cfg.document_token >= 0
    kernel = all_or_none(pick_kernel, cfg.attention, device, DTYPES[dtype], with_documents)
    check_same(
        {
            "the data": data_fingerprint,
            "the model": model,
            "--attention": kernel,
            "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE"),
        }
    )
    planner_flags = replace(cfg, dtype=dtype, most_sequences=training.count)
    plans, cluster = choose_plans(planner_flags, model, device, kernel)
    cfg = replace(cfg, batch=plans[0].batch)

    # ---- where to start
    start_step = start_samples = 0
    if resumed:
        start_step = resumed.meta["step"]
        # If all data are new, they begin with their first epoch. Otherwise count the old run's
        # tokens in sequences of this run, because --seq may have changed
        if any(s.corpus.content in resumed.meta["trained_to"] for s in training.sources):
            start_samples = resumed.meta["samples"] * resumed.meta["config"]["seq"] // cfg.seq

    run = Run(
        cfg,
        dist.get_rank(),
        device,
        kernel,
        plans[0],
        hardware=cluster,
        training=training,
        validation=validation,
        start_step=start_step,
        start_samples=start_samples,
        meta=make_meta(cfg, model, source, schedule, training, data_fingerprint, resumed),
        resumed=resumed,
        read_weights=read_weights,
    )
    print_run(run, plans)
    if not cfg.dry_run:
        warn_of_short_host_memory(run.plan)
    return run


# ---------------------------------------------------------------------------- what it prints


def float8_in_words(plan: costs.Plan, device: torch.device) -> str:
    """Return a text that says which products of the layers run in float8 (--products fp8)."""
    left_out = [shape for shape, used in zip(plan.matrices, plan.in_float8) if not used]
    shapes_by_reason = {}
    for rows, cols in dict.fromkeys(left_out):  # each shape once
        reason = f"whose sizes are no multiples of {MULTIPLE}"
        if fits_tensor_cores((rows, cols)):
            reason = "which --tp never splits"
        shapes_by_reason.setdefault(reason, []).append(f"{rows} x {cols}")
    exceptions = [f"{', '.join(shapes)}, {why}" for why, shapes in shapes_by_reason.items()]
    text = "--products fp8: the matrix products in the layers run in float8"
    if exceptions:
        text += (
            f", except for matrices {', and '.join(exceptions)}: those stay in "
            f"{str(plan.dtype).removeprefix('torch.')}"
        )
    if not (has_float8(device) and plan.dtype == torch.bfloat16):
        text += (
            ". Here they are emulated: operands are rounded to float8 and multiplied in a wider "
            "dtype, so it is slower. It is faster in bf16 on GPUs like H100"
        )
    return text


def print_run(run: Run, plans: list[costs.Plan]) -> None:
    """Print flags that differ from their defaults, model, data and plan. A dry run prints all of
    the plans, other runs on GPUs the best two."""
    cfg = run.cfg
    not_default = [
        f"{name}={getattr(cfg, name)}"
        for name, field in flags_of(cfg).items()
        if getattr(cfg, name) != field.default
    ]
    print0("flags that differ from their defaults, some of them chosen for auto:", *not_default)
    if cfg.device == "auto" and run.device.type == "cpu":
        print0("There is no GPU here, or PyTorch does not see it. So this run is on the CPU")
    print_model(run)
    print_data(run)
    print_plan(run, plans[1:] if cfg.dry_run else plans[1:2])


def how_to_reach(cfg: Config, model: ModelConfig) -> str:
    """Return a sentence that says with which --rope-scaling the rotary embedding reaches --seq.
    model: the model with the --rope-scaling that the run has."""
    kind, _, factor = cfg.rope_scaling.partition(":")
    if kind in ROPE_KEYS:
        # the flag's factor counts from the positions without the flag
        positions = round(model.max_positions / float(factor))
        needed = math.ceil(cfg.seq / positions)
        return f"A larger factor of --rope-scaling extends it, such as {kind}:{needed}"
    kind = rope_kind(model.rope_scaling)  # an import may have a scaling already
    if kind == "default":
        kind = "yarn"
    needed = math.ceil(cfg.seq / model.max_positions)
    reached = needed * model.max_positions
    return f"--rope-scaling {kind}:{needed} extends it to {reached:,}"


def print_model(run: Run) -> None:
    """Print the model's size and the FLOPs of a token. Add a note if products run in float8, if the
    rotary embedding is too short for --seq, if the head is (or was) tied to the embedding, or if an
    import's config.json has dropout."""
    cfg, model = run.cfg, run.plan.model
    causal, full = flops_per_token(model, cfg.seq)
    print0(
        f"model: {param_counts(model)}, on {device_name(run.device)}, with attention kernel "
        f"{run.kernel}. A token costs {causal:.3g} FLOPs if attention counts each token's earlier "
        f"tokens (causal), {full:.3g} if it counts all tokens of a sequence (full)"
    )
    if cfg.products == "fp8":
        print0(float8_in_words(run.plan, run.device))
    if cfg.seq > model.max_positions:
        print0(
            f"--seq {cfg.seq:,} is longer than the {model.max_positions:,} tokens that the rotary "
            f"embedding reaches. {how_to_reach(cfg, model)}"
        )
    if model.tied:
        print0("The model uses one matrix as embedding and as head (tied), and stays so")
    elif run.meta["source"].get("tie_word_embeddings"):
        reason = "of --untie" if cfg.untie else "its files store a head that differs"
        print0(
            "The imported model's config.json ties head and embedding. Here they are two matrices, "
            f"because {reason}"
        )
    if dropout := run.meta["source"].get("attention_dropout"):
        print0(
            f"The imported model's config.json has attention_dropout {dropout}. Here attention "
            "drops nothing in training"
        )


def print_data(run: Run) -> None:
    """Print the size of the data, where documents end, and a note if the imported model has a
    tokenizer that the run does not use. If there are several sources, also print for each one its
    share of the samples, its size, and how many epochs of it the steps take."""
    cfg = run.cfg
    sources = run.training.sources
    files = [file for source in sources for file in source.corpus.files]
    documents = ""
    if cfg.document_token >= 0:
        documents = f"; documents end with token {cfg.document_token}"
    elif any(file.document_token not in (None, -1) for file in files):
        documents = "; attention crosses documents, because --document-token is -1"
    print0(f"data {cfg.data}: {describe_sources(run, range(len(sources)))}{documents}")
    paths = [source.path for source in parse_mixture(cfg.data)]
    for note in built_in_notes(paths):
        print0(note)
    has_tokenizer = cfg.import_folder and Path(cfg.import_folder, "tokenizer.json").exists()
    if run.meta["bytes_are_tokens"] and has_tokenizer:
        print0(
            f"The tokens of this text are its bytes, but {cfg.import_folder} has a tokenizer. To "
            f"use it, pass --tokenizer {shlex.quote(cfg.import_folder)}"
        )
    if len(sources) == 1:
        return

    samples = run.start_samples + cfg.batch * max(0, cfg.steps - run.start_step)
    epochs = run.training.epochs(samples)
    evaluated = min(run.validation.count, EVAL_SEQUENCES)
    in_evaluations = {run.validation.place(i)[0] for i in range(evaluated)}
    for k, path in enumerate(paths):
        fraction = run.training.shares[k] / sum(run.training.shares)
        note = ""
        if k not in in_evaluations and cfg.eval_every >= 0:
            note = f"; none of the {evaluated} sequences of an evaluation is from it"
        print0(
            f"source {path}: {fraction:.1%} of the samples; {describe_sources(run, [k])}; "
            f"{epochs[k]:.2f} epochs until step {cfg.steps}{note}"
        )


def describe_sources(run: Run, numbers: Iterable[int]) -> str:
    """Return a text about the data of these sources: tokens, training and validation sequences."""
    training = [run.training.sources[k] for k in numbers]
    validation = [run.validation.sources[k] for k in numbers]
    return (
        f"{sum(len(source.corpus) for source in training):,} tokens, "
        f"{sum(source.count for source in training):,} training and "
        f"{sum(source.count for source in validation):,} validation sequences"
    )


def plan_in_words(plan: costs.Plan) -> str:
    """Return the choices of a plan in one line. Leave out tp, pp, sp, ring and head groups that
    are 1.

    Example: a step is 1 data-parallel group x 1 micro-batch x 16 sequences; model states are not
    sharded; activations: keep all
    """

    def counted(count: int, noun: str, plural: str) -> str:
        return f"{count} {noun if count == 1 else plural}"

    chosen = planner.choices(plan)
    factors = [
        counted(plan.dp, "data-parallel group", "data-parallel groups"),
        counted(plan.micro_batches, "micro-batch", "micro-batches"),
        counted(plan.micro_batch, "sequence", "sequences"),
    ]
    parts = [f"a step is {' x '.join(factors)}"]
    for name in ("tp", "pp", "sp", "ring", "head groups"):
        if chosen[name] != "1":
            parts.append(f"{planner.TITLES[name]}: {chosen[name]}")
    if plan.factors == costs.Factors(1, 1, 1) and plan.os_place == "gpu":
        parts.append("model states are not sharded")
    else:
        parts.append(
            f"shards of parameters (p), gradients (g), optimizer states (os): {chosen['states']}"
        )
    return "; ".join([*parts, f"activations: {chosen['activations']}"])


def print_legend(run: Run) -> None:
    """Print how to read the line of a step."""
    unit = "GPU" if run.device.type == "cuda" else "rank"
    text = (
        "A step's line has its loss in nats per token, the gradient's norm before clipping, the "
        f"learning rate, TGS (tokens per {unit} per second), "
    )
    if run.hardware.profile.peak_flops:
        text += "MFU (model FLOPs as a fraction of the GPU's peak), "
    text += "its seconds, and the time left."
    if not (run.resumed or run.read_weights):
        vocab = run.plan.model.vocab
        text += f" The first loss is near ln {vocab} = {math.log(vocab):.1f}, as if by guessing"
    print0(text)


def print_plan(run: Run, other_plans: Sequence[costs.Plan] = ()) -> None:
    """Print what the plan chooses. On a GPU or in a dry run, also print the predicted time and
    memory of this plan and of others."""
    print0(f"plan: {plan_in_words(run.plan)}")
    if run.device.type == "cuda" or run.cfg.dry_run:
        print0(planner.describe_plans([run.plan, *other_plans], run.hardware))
        for line in planner.graph_gain_in_words(run.cfg, run.plan):
            print0(line)
    for line in planner.alpha_in_words(run.cfg, run.plan):
        print0(line)


WATCH_SECONDS = 0.5  # time between two looks at the host's memory
LAST_SHARE = 0.02  # if no more than this fraction of the host's memory is left, a run warns


def host_memory_advice(smaller: float) -> str:
    """Return what to do if host memory is short. smaller: the --host-memory to recommend, in bytes
    per node. If it is 0 or less, no --host-memory is small enough, and none is recommended."""
    if smaller <= 0:
        return "End other processes"
    return f"End other processes, or pass --host-memory {flag_size(smaller)}"


@contextlib.contextmanager
def host_memory_watch(plan: costs.Plan) -> Iterator[None]:
    """Print a message before Linux kills this run because no host memory is left.

    While the `with` block runs, a thread on the first rank of each node watches how much memory is
    left. When too little is left, it prints one warning: how much the plan takes, how much this
    rank's process takes, and a --host-memory that would leave an eighth free. The thread does not
    stop the run, because another process may hold the memory, and may free it.
    """
    finished = threading.Event()
    rank, per_node = dist.get_rank(), max(1, plan.per_node)

    def watch():
        while not finished.wait(WATCH_SECONDS):
            memories = host_memories()
            name, limit, left = min(memories, key=lambda memory: memory.left / max(1, memory.limit))
            if left > LAST_SHARE * limit:
                continue
            taken, _ = own_host_bytes()
            of_others = max(0, limit - left - per_node * taken)
            beyond_plan = max(0, taken - plan.host_bytes)
            smaller = limit * 7 / 8 - of_others - per_node * beyond_plan
            print_error(
                f"WARNING: of {in_unit(limit)} of host memory on {os.uname().nodename} ({name}) "
                f"only {in_unit(left)} are left, and Linux may kill this run now. A rank's plan "
                f"takes {in_unit(plan.host_bytes)}, and the process of rank {rank} takes "
                f"{in_unit(taken)}. {host_memory_advice(smaller)}"
            )
            return

    thread = threading.Thread(target=watch, daemon=True)
    if rank % per_node == 0:
        thread.start()
    try:
        yield
    finally:
        finished.set()
        if thread.is_alive():
            thread.join()


def warn_of_short_host_memory(plan: costs.Plan) -> None:
    """Print a warning if a plan takes more host memory than a node has left.

    Linux kills a process that takes more, and the process cannot print why. A collective of all
    ranks, before any of them takes this memory.
    """
    available = min(gather_objects(min(memory.left for memory in host_memories())))
    needed = plan.host_bytes * plan.per_node
    if needed > available:
        print0(
            f"WARNING: this plan takes {in_unit(needed)} of host memory per node, and a node has "
            f"only {in_unit(available)} left. Linux may kill this run. "
            f"{host_memory_advice(available * 7 / 8)}"
        )


# ---------------------------------------------------------------------------- build


def make_attention(run: Run, groups: Groups) -> Attention:
    """Return attention over the ranks of a sequence-parallel group. A collective of all ranks."""
    plan = run.plan
    exchange = make_exchange(
        groups, plan.head_ranks, CommStream(run.device), plan.per_node // plan.tp
    )
    ring = Ring(groups, plan.sp, plan.ring, CommStream(run.device))
    return Attention(run.kernel, plan.head_groups, exchange, ring, groups.tp_rank)


def self_test(run: Run) -> None:
    """Test on small random tensors what this run uses and a fork may have changed.

    These are an optimizer that updates shards of a matrix, a kernel in a ring, a layer that is
    split by tensor parallelism, and an export. A mistake in one of them would raise no error later,
    and only change the results. Raises ConfigError that says what differs. A collective of all
    ranks.
    """
    plan = run.plan
    all_or_none(check_optimizer, plan.optimizer, OPTIMIZERS[plan.optimizer])
    if plan.ring > 1:
        cfg = plan.local_model
        heads, kv_heads = cfg.heads // plan.head_ranks, cfg.kv_heads // plan.head_ranks
        all_or_none(check_ring, run.kernel, heads, kv_heads, cfg.head_dim, run.device, plan.dtype)
    if plan.tp > 1:
        all_or_none(check_tensor_parallel, plan.model, plan.tp_mode)
    if run.cfg.export:
        on_rank_0(hf.check_export, plan.model, run.meta["source"])


def build_model(run: Run, attention: Attention, groups: Groups) -> tuple[LLaMA | Pipeline, States]:
    """Build this rank's part of the model, and its model states. Raises ConfigError. A collective
    of all ranks.

    The model is a Pipeline if there are several stages. Weights have no values yet.
    """
    plan = run.plan
    if run.device.type == "cuda" and plan.host_bytes >= 8 * GIB:
        print0(
            f"Each rank page-locks {in_unit(plan.host_bytes)} of host memory, which can take a "
            "minute or two"
        )
    with torch.device("meta"):
        model = LLaMA(plan.model, attention)
    # cached properties, which must see the whole model: read them before it is split
    for whole_model_property in ("shapes", "weight_init", "frozen_weights", "forward_only_layers"):
        all_or_none(getattr, model, whole_model_property)
    all_or_none(check_weights, model, plan.pp)

    # split matrices over the tensor-parallel group, then keep the layers of this stage
    tensor_parallel = TensorParallel(plan.tp_mode, groups)
    all_or_none(split_model, model, tensor_parallel)
    if plan.products == "fp8":
        all_or_none(use_float8, model, tensor_parallel.group, plan.keeps_casts)
    virtual_stages = keep_stage(model, groups.stage, plan.pp, plan.pp_chunks)
    order = pipeline_order(groups.stage, plan.pp, plan.pp_chunks, plan.micro_batches)
    runners = all_or_none(make_layer_runners, run, model, virtual_stages, order)
    model.layer_runner = runners[0]  # without a pipeline, the only one

    # If one GPU holds everything, a step runs on the compute stream only, and nothing overlaps.
    # With --memplan on, it becomes a CUDA graph, whose capture must not wait for other streams
    on_one_stream = run.device.type == "cuda" and plan.on_one_stream
    overlaps = () if on_one_stream else run.cfg.overlaps
    states = States(
        model,
        run.device,
        plan.dtype,
        plan.micro_batches,
        plan.factors,
        plan.os_layout,
        groups,
        overlap=overlaps,
        gather_layers=plan.activations is not None,
        num_chunks=plan.chunks,
        decay=run.cfg.weight_decay,
        storage=plan.os_place,
        resident_states=plan.resident_states,
        optimizer=OPTIMIZERS[plan.optimizer],
        seed=run.cfg.seed,
        grad_sums=plan.grad_sums,
    )
    states.on_phase = mark  # tells --memplan where a layer's pass begins
    if plan.pp > 1:
        model = Pipeline(
            model,
            virtual_stages,
            runners,
            groups,
            order,
            run.device,
            plan.dtype,
            "pipeline" in overlaps,
        )
    return model, states


def make_layer_runners(
    run: Run, model: LLaMA, virtual_stages: list[range], order: list[Pass]
) -> list[Callable]:
    """Return a function per virtual stage that runs its layers: in token chunks if the plan has an
    ActivationPlan, otherwise on all tokens at once. (Chunks save memory even if an ActivationPlan
    keeps all activations.) Raises ValueError."""
    plan = run.plan
    if plan.activations is None:
        return [run_blocks for _ in virtual_stages]
    micro_batch_shape = plan.micro_batch, plan.seq // plan.sp
    runners = []
    for i, layers in enumerate(virtual_stages):
        with_backward = [layer for layer in layers if layer >= model.forward_only_layers]
        chunked_layers = ChunkedLayers(
            model,
            micro_batch_shape,
            plan.activations.for_virtual_stage(len(with_backward)),
            plan.chunk,
            run.device,
            plan.dtype,
            in_flight=max_in_flight(order, i),
            layers=layers,
        )
        runners.append(chunked_layers.start)
    return runners


def cap_gpu(run: Run) -> None:
    """Limit PyTorch's allocator to --gpu-memory, minus the buffers for all-to-alls. Ranks map these
    from each other, so they lie outside the allocator."""
    if run.cfg.gpu_memory and run.device.type == "cuda":
        _, total = torch.cuda.mem_get_info()
        share = (run.cfg.gpu_memory - costs.all_to_all_buffer_bytes(run.plan)) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def warn_of_short_gpu_memory(run: Run) -> None:
    """Print a warning if a plan needs more GPU memory than CUDA, NCCL's communicators and other
    programs leave. The planner leaves them a fixed share, 1 - planner.GPU_SHARE. A collective of
    all ranks, after the communicators are made."""
    if run.device.type == "cpu":
        return
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved() + Exchange.mapped_bytes()
    left = min(gather_objects(free + own))
    if run.plan.gpu_bytes > left:
        print0(
            f"WARNING: this plan takes {in_unit(run.plan.gpu_bytes)} of a GPU, and CUDA, NCCL and "
            f"other programs leave only {in_unit(left)} of {in_unit(total)}. The run may end out "
            f"of memory. Choose --gpu-memory {flag_size(left / planner.GPU_SHARE)} or less"
        )


SLOW_COPIES = 0.8  # a run warns if copies to the host reach less than this share of the profile's


def warn_of_slow_host_copies(run: Run) -> None:
    """Print a warning if this machine copies to the host more slowly than the plan expects.

    Machines with the same GPU differ in how it reaches the host. A plan that swaps activations or
    streams states would then wait for copies, and nothing else would say why. A collective of all
    ranks."""
    if run.device.type == "cpu" or not run.plan.host_bytes:
        return
    rate, profile = host_copy_rate(run.device), run.hardware.profile
    if rate < SLOW_COPIES * profile.to_host:
        print0(
            f"WARNING: copies to the host run at {rate / 1e9:.1f} GB/s per GPU, and the plan "
            f"expects {profile.to_host / 1e9:.1f} GB/s (profile {profile.name}). So a step may "
            "wait for copies. To plan with the rates of this machine, measure them: "
            f"torchrun --nproc_per_node {run.plan.per_node} bench.py --profile mine"
        )


def random_weight(run: Run, states: States, name: str) -> Tensor:
    """Return the first value of a weight that no file holds."""
    shape, mean_std = states.shapes[name], states.weight_init[name]
    return initial_weight(name, shape, mean_std, run.cfg.seed, run.device)


def load_random_weights(run: Run, states: States) -> None:
    states.load(functools.partial(random_weight, run, states))


def load_imported_weights(run: Run, states: States) -> None:
    """Load the weights of an import, one tensor at a time. Weights that only this model has
    (LLaMA.own_weights) get random first values."""
    own = [name for name in states.shapes if hf.is_own_weight(run.plan.model, name)]

    def read(name: str) -> Tensor:
        return random_weight(run, states, name) if name in own else run.read_weights(name)

    states.load(read)
    if own:
        print0(
            f"{len(own)} weights are not in the import, and begin with fresh values: "
            f"{', '.join(own[:4])}{', ...' if len(own) > 4 else ''}"
        )


def print_changes(run: Run) -> None:
    """Print which flags, data or threads have changed since the checkpoint that is resumed."""
    old = run.resumed.meta["config"]
    changes = [
        f"{name} {old.get(name)} -> {value}"
        for name, value in run.meta["config"].items()
        if name not in NOT_INHERITED and old.get(name) != value
    ]
    # "the data" in config is a checksum of names and numbers of tokens, but not of the tokens
    known = run.resumed.meta["trained_to"]
    pairs = zip(parse_mixture(run.cfg.data), run.training.sources)
    new = [source.path for source, data in pairs if data.corpus.content not in known]
    if new:
        # if all data are new, the run begins with their first sample (configure)
        order = "" if run.start_samples else ", so the order of samples begins anew"
        changes.append(f"the tokens of {', '.join(new)} are new to this run{order}")
    print0(
        f"resumed {run.resumed.folder} at step {run.start_step}; changed:",
        ", ".join(changes) or "nothing",
    )
    warn_of_trained_validation(run)


def collective_timeout(run: Run) -> float:
    """Return the seconds after which a collective fails: --timeout, plus the predicted seconds of a
    step on GPUs. NCCL counts from the launch, and the host launches a thousand kernels before they
    run. In a long step these take minutes."""
    return run.cfg.timeout + (run.plan.step_s if run.device.type == "cuda" else 0)


def build_run(
    run: Run,
) -> tuple[LLaMA | Pipeline, States, StepMemory | None, checkpoint.Saver]:
    """Build what is planned, and load the first weights, from a checkpoint or an import; otherwise
    they are random.

    Returns the model, its states, the memory plan of a step (or None), and the Saver of
    checkpoints. Raises ConfigError. A collective of all ranks.
    """
    cfg, out = run.cfg, Path(run.cfg.out)
    self_test(run)
    if cfg.save_every >= 0:
        checkpoint.check_shared(out)
    memory = all_or_none(plan_memory, run)
    cap_gpu(run)
    timeout = collective_timeout(run)
    set_timeout(timeout)
    groups = Groups(timeout, run.plan.tp, run.plan.pp)
    model, states = build_model(run, make_attention(run, groups), groups)

    if run.resumed:
        checkpoint.load_checkpoint(states, run.resumed)
        print_changes(run)
    elif run.read_weights:
        load_imported_weights(run, states)
    else:
        load_random_weights(run, states)
    warn_of_short_gpu_memory(run)
    warn_of_slow_host_copies(run)

    room = None  # bytes of host memory for the copies that --save-async makes
    if cfg.save_async:
        room = run.hardware.host_budget - run.plan.host_bytes
    saver = all_or_none(checkpoint.Saver, out, cfg.keep, states, patient_group(), room)
    # prepare_out comes last: a run that is refused above must not move files of an earlier run
    trains = run.start_step < cfg.steps
    on_rank_0(checkpoint.prepare_out, out, run.resumed, trains)
    if cfg.export:
        on_rank_0(hf.finish_exchange, Path(cfg.export), hf.run_number(out))
    return model, states, memory, saver


# ---------------------------------------------------------------------------- one step


@dataclass(frozen=True)
class Batch:
    """A rank's share of the sequences of a step, split into micro-batches. The letters of shapes
    are in the Legend at the top of this file.

    positions and documents have one entry for each micro-batch. Without documents, one entry serves
    all micro-batches.
    """

    tokens: Tensor  # (M, B, n)
    labels: Tensor  # (M, B, n); (M, B, n, labels_ahead) if the model predicts several tokens
    # of the tokens that attention has: (1, T/sp), counted in the sequence; with documents
    # (M, B, T/sp), counted in the document
    positions: Tensor
    # 1 / number of valid labels, summed over ranks. With --tp-mode mtp, all tp ranks have the same
    # labels, so each label counts tp times, both here and in the loss
    scale: Tensor
    documents: Sequence[Documents | None] = (None,)
    # mean of 2k - 1 over the tokens of all ranks, if a token attends to k keys (valid_label_scale)
    keys_seen: Tensor | None = None
    # the number of valid labels of all ranks. If it is 0, the cross-entropy and its gradients are
    # 0. The step updates the weights nevertheless, by weight decay and by what the moments hold
    valid_labels: Tensor | None = None
    read_error: str = ""  # why this rank could not read all of its sequences

    def micro_batches(self) -> Iterable[tuple]:
        """Yield tokens, labels, scale, positions and documents of each micro-batch, in the order of
        LLaMA.forward's arguments."""
        return zip(
            self.tokens,
            self.labels,
            itertools.repeat(self.scale),
            itertools.cycle(self.positions),
            itertools.cycle(self.documents),
        )


def run_step(
    model: LLaMA | Pipeline, states: States, batch: Batch, lr: float, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one step: forward, backward and update. Every run uses this function.

    Returns the loss, the gradient's norm, and whether they are finite, as tensors on the device.
    The compute stream does the following, in order. The names of streams are those of
    shard.STREAMS.

        call               computes                       overlaps with
        begin_step         nothing: forgets the           -
                           gradients of the last step
        forward_backward   forward of a micro-batch       param_gather, copies to the host,
                                                          all-to-alls, rings; in the first one also
                                                          param_broadcast and host_update of the
                                                          last update
                           its backward                   param_gather, grad_scatter, prefetches
                                                          from the host, all-to-alls, rings; in the
                                                          last one also grad_reduce
        finish_gradients   sums the gradients of          -
                           vectors; waits for
                           grad_scatter, grad_reduce
        all_reduce         the loss, over all ranks       -
        update             global norm (an all-reduce),   -
                           clipping, vectors;
                           the optimizer on this rank's   param_broadcast of updated parameters,
                           shards, unit by unit           which goes on during the next forward

    forward_backward does this for each micro-batch; with a pipeline, in the order of
    pipeline.pipeline_order. Before each use of a Matrix, its unshard waits for param_gather, or for
    param_broadcast if p = 1. In backward its add_grad launches grad_scatter. If optimizer states
    are on the host, the optimizer itself runs on the stream host_update, and overlaps with the next
    forward, too.
    """
    states.begin_step()
    loss = model.forward_backward(batch.micro_batches())
    states.finish_gradients()
    dist.all_reduce(loss)
    return loss, *states.update(lr, clip, loss)


def plan_memory(run: Run) -> StepMemory | None:
    """Return the memory plan of a step, which the first steps fill; None without --memplan on.

    A step that runs on a single stream of a GPU becomes a CUDA graph. Raises ValueError if the
    allocator cannot be compiled.
    """
    if run.cfg.memplan == "off":
        return None
    as_graph = run.device.type == "cuda" and run.plan.on_one_stream
    return StepMemory(str(run.device), as_graph=as_graph)


def run_planned(
    memory: StepMemory | None,
    model: LLaMA | Pipeline,
    states: States,
    batch: Batch,
    lr: float,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a step, at planned addresses if there is a memory plan. Print the memory plan when it is
    new. Returns the same as run_step."""
    if memory is None:
        return run_step(model, states, batch, lr, clip)

    # Everything that changes from step to step must be an argument of `step`: a CUDA graph gets new
    # values only through its inputs. Documents are missing, because check_documents refuses them
    def step(lr, *tensors):
        return run_step(model, states, Batch(*tensors), lr, clip)

    plans_before = memory.plans
    result = memory.run(
        step,
        torch.full_like(batch.scale, lr),
        batch.tokens,
        batch.labels,
        batch.positions,
        batch.scale,
    )
    if memory.plans > plans_before:
        print0(f"memory plan of a step: {memory.plan}")
        if memory.as_graph:
            print0("From now on a step is a CUDA graph")
    return result


# ---------------------------------------------------------------------------- data of a step


def load_batch(run: Run, first: int, read: Callable | None = None, count: int = 0) -> Batch:
    """Return this rank's share of the `count` sequences first, first + 1, ...

    Only a sequence's number decides its tokens, so a resumed run continues in the same order.

    read    read(i) returns sequence i, a data.Window of T + labels_ahead tokens or fewer, or None
            for a blank one; by default it reads training sample i
    count   sequences of all data-parallel groups together; 0: as many as a step has

    Example: dp=2, batch 8, first=16. data_rank 1 gets the sequences 20 to 23.

    If this rank cannot read a file, Batch.read_error says why, and the missing labels are IGNORE.
    A collective of all ranks.
    """
    plan, ahead = run.plan, run.labels_ahead
    rank_count = (count or plan.batch) // plan.dp  # b
    rank_first = first + run.coordinates.data_rank * rank_count
    numbers = range(rank_first, rank_first + rank_count)
    windows, counts, read_error = read_windows(run, numbers, read or run.training.sample)

    # which tokens of each sequence this rank has: in attention sp_tokens (T/sp,), and in embedding,
    # residual stream, final norm and loss own_tokens (n,)
    sp_tokens = sequence_positions(plan.seq, plan.sp, plan.ring, run.coordinates.sp_rank)
    own_tokens = select_tp_tokens(run, sp_tokens)
    tokens = windows[:, own_tokens]  # (b, n)
    labels = make_labels(run, windows, counts, own_tokens)  # (b, n, ahead)

    positions, documents = sp_tokens[None], [None]
    if run.cfg.document_token >= 0:
        positions, documents = document_positions(run, windows, sp_tokens)
    scale, keys_seen, valid_labels = valid_label_scale(run, labels, positions)

    # Tokens and labels go to the device in one copy, (1 + ahead, M, B, n). A blank token is IGNORE,
    # which is negative and has no embedding. So it becomes token 0, whose labels are IGNORE
    both = torch.stack([tokens.clip(0), *labels.unbind(-1)])
    both = both.view(1 + ahead, -1, plan.micro_batch, len(own_tokens))
    tokens, *labels = to_device(both, run)
    labels = torch.stack(labels, -1) if ahead > 1 else labels[0]
    positions = to_device(positions, run)
    return Batch(tokens, labels, positions, scale, documents, keys_seen, valid_labels, read_error)


def read_windows(run: Run, numbers: range, read: Callable) -> tuple[Tensor, Tensor, str]:
    """Return (windows, counts, error) for the sequences of these numbers.

    windows   (b, T + labels_ahead): their tokens; IGNORE where a sequence has no token
    counts    the same shape: whether a token counts as a label; False where there is no token
    error     why a sequence could not be read, or ""
    """
    windows = torch.full((len(numbers), run.plan.seq + run.labels_ahead), IGNORE)
    counts = torch.zeros(windows.shape, dtype=torch.bool)
    try:
        for i, number in enumerate(numbers):
            window = read(number)
            if window is not None:
                size = len(window.tokens)
                windows[i, :size] = torch.as_tensor(window.tokens)
                counts[i, :size] = torch.as_tensor(window.is_label)
    except OSError as e:  # a file has gone or has changed: `train` tells all ranks
        return windows, counts, str(e)
    return windows, counts, ""


def make_labels(run: Run, windows: Tensor, counts: Tensor, own_tokens: Tensor) -> Tensor:
    """Return the labels (b, n, labels_ahead) of this rank's tokens.

    Label i of a token is the token i + 1 places after it. The label is IGNORE in three cases:

        - The data say that it does not count, because of an ignored id or a mask.
        - It lies in a later document than the token.
        - This rank's stage is not the last one. Only the last stage computes the loss.

    Example: token 0 ends a document, labels_ahead is 1, and the data say that token 7 does not
    count.

        tokens   5   6   0        3        7   8
        labels   6   0   IGNORE   IGNORE   8   ...
    """
    ahead = run.labels_ahead
    labels = torch.stack([windows[:, own_tokens + 1 + i] for i in range(ahead)], -1)
    label_counts = torch.stack([counts[:, own_tokens + 1 + i] for i in range(ahead)], -1)
    # Label i lies in a later document if the token itself, or one between the two, ends a document
    ends_document = torch.stack(
        [windows[:, own_tokens + i] == run.cfg.document_token for i in range(ahead)], -1
    )
    in_next_document = ends_document.cummax(-1).values
    no_loss_here = run.coordinates.stage < run.plan.pp - 1
    labels[~label_counts | in_next_document | no_loss_here] = IGNORE
    return labels


def document_positions(
    run: Run, windows: Tensor, sp_tokens: Tensor
) -> tuple[Tensor, list[Documents]]:
    """Return the positions (M, B, T/sp) of this rank's tokens in their documents, and where
    documents begin in each micro-batch.

    Example, if token 0 ends a document:

        tokens      5   6   0   7   8
        positions   0   1   2   0   1
    """
    plan = run.plan
    ends = windows[:, : plan.seq] == run.cfg.document_token
    begins = ends.roll(1, 1)  # (b, T): a document begins after each end ...
    begins[:, 0] = True  # ... and with the sequence

    index = torch.arange(plan.seq)
    document_start = (begins * index).cummax(1).values  # 0 where no document begins
    positions = (index - document_start)[:, sp_tokens]
    positions = positions.view(-1, plan.micro_batch, len(sp_tokens))

    ring_rank = run.coordinates.sp_rank // (plan.sp // plan.ring)
    documents = []
    for starts in document_start.split(plan.micro_batch):
        found = ring_documents(starts, plan.ring, ring_rank)
        documents.append(replace(found, offsets=to_device(found.offsets, run)))
    return positions, documents


def valid_label_scale(run: Run, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three numbers for a Batch: scale, which is 1 / number of valid labels of all ranks;
    keys_seen, which flops_per_token needs; and the number of valid labels itself. If a token has
    several labels (labels_ahead), only its first label counts.

    keys_seen is the mean over all tokens of 2k - 1, where k is the number of keys that a token
    attends to. At position i this is k = i + 1, so 2k - 1 = 2i + 1. Example: in a sequence of 4
    tokens without documents, the mean of 1, 3, 5, 7 is 4, the length.

    All are tensors on the device. A collective of all ranks.
    """
    valid = (labels[..., 0] != IGNORE).sum()
    keys_seen = (1 + 2 * positions.double().mean()) / run.plan.ranks
    sums = to_device(torch.stack([valid, keys_seen]), run)
    dist.all_reduce(sums)
    at_least_1 = sums[0].clamp(min=1)  # a batch may have no valid label
    return 1 / at_least_1.to(accumulation_dtype(run.plan.dtype)), sums[1], sums[0]


def select_tp_tokens(run: Run, x: Tensor) -> Tensor:
    """Return the part (..., n) of x (..., T/sp) that this rank has between matrix products."""
    if not run.plan.splits_tokens:
        return x
    return x.chunk(run.plan.tp, -1)[run.coordinates.tp_rank]


def to_device(tensor: Tensor, run: Run) -> Tensor:
    """Return a tensor on the device. The host does not wait for the copy."""
    if run.device.type == "cuda":
        tensor = tensor.pin_memory().to(run.device, non_blocking=True)
    return tensor


# ---------------------------------------------------------------------------- when to stop

# A request to stop is a number. A signal requests it by its own number, and --stop-after by this
# one, which is larger than all numbers of signals
TIME_IS_UP = 1000.0
RECENT_STEPS = 10  # the next step is expected to take as long as the longest of these last steps
# Until a save or an export has been timed, a rank is assumed to write this many bytes per second.
# The number is low, because many ranks may share the storage
SAVE_RATE = 200e6


class Stop:
    """Why the run has to end before --steps: a signal, or --stop-after.

    A rank must not stop by itself, because the remaining ranks would wait for it. So each rank
    makes a request. The ranks exchange their requests, mostly in collectives that they need anyway,
    and all of them follow the largest request (agree_on). Ranks may get a signal at different
    times. Only the clock of rank 0 counts.
    """

    def __init__(self, run: Run, signals: StopSignal, saver: checkpoint.Saver, states: States):
        self.run = run
        self.signals = signals
        self.saver = saver
        self.limit = math.inf  # seconds since the process started
        self.step_seconds = deque(maxlen=RECENT_STEPS)
        self.save_seconds = 0.0  # an estimate, used until a save has been timed (saver.seconds)
        self.export_seconds = 0.0  # of the last export; until one has been timed, an estimate
        self.next_seconds = 0.0  # the arguments of the last request
        self.next_saves = True
        self.reason = ""  # the request that the ranks have agreed on, as text; "": go on
        self.time_is_up = False  # whether this request was TIME_IS_UP
        if run.cfg.stop_after:
            self.limit = duration(run.cfg.stop_after)
            if run.cfg.save_every >= 0:
                parts = states.state_parts().values()
                saved_bytes = sum(part.nbytes for part in parts if part.saved_here)
                self.save_seconds = saved_bytes / SAVE_RATE
            if run.cfg.export:
                exported_bytes = sum(param_counts(run.plan.model)) * run.plan.dtype.itemsize
                self.export_seconds = exported_bytes / SAVE_RATE

    def request(self, next_seconds: float | None = None, saves: bool = True) -> float:
        """Return this rank's request: the number of a signal, TIME_IS_UP, or 0.0 to go on.

        next_seconds: how long the run will work until it asks again; None: for one step. saves:
        whether it will save after this work. Time is up if the work, with the save, would end after
        --stop-after.
        """
        if next_seconds is None:
            next_seconds = max(self.step_seconds, default=0.0)
        self.next_seconds, self.next_saves = next_seconds, saves
        if self.run.rank == 0 and process_seconds() + self.time_needed() > self.limit:
            return TIME_IS_UP
        return float(self.signals.number or 0)

    def time_needed(self) -> float:
        """Return the seconds that the work of the last request, and the save after it, may take."""
        saves = 0
        if self.next_saves:  # with --save-async, the previous save must end first
            saves = 2 if self.saver.writing else 1
        return self.next_seconds + saves * (self.saver.seconds or self.save_seconds)

    def agree_on(self, request: float) -> str:
        """Note the largest request of all ranks, and return the reason to stop, or ""."""
        self.time_is_up = request == TIME_IS_UP
        if self.time_is_up:
            passed = timedelta(seconds=round(process_seconds()))
            needed = timedelta(seconds=math.ceil(self.time_needed()))
            with_save = ", with a save," if self.next_saves else ""
            self.reason = (
                f"--stop-after {self.run.cfg.stop_after}: {passed} have passed, and the work that "
                f"comes next{with_save} may take {needed}"
            )
        elif request:
            self.reason = f"stopped by {signal.Signals(int(request)).name}"
        return self.reason

    def ask_all(self, next_seconds: float | None = None, saves: bool = True) -> str:
        """Ask all ranks whether to stop before the next step, or before other work (see request),
        and return the reason, or "". A collective of all ranks."""
        request = torch.tensor(self.request(next_seconds, saves))
        dist.all_reduce(request, dist.ReduceOp.MAX)
        return self.agree_on(request.item())

    def ask_before_export(self) -> str:
        """Ask all ranks whether to stop before an export of a step that is saved, and return the
        reason, or "". A collective of all ranks."""
        return self.ask_all(self.export_seconds, saves=False)


# ---------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(run: Run, model: LLaMA | Pipeline, stop: Stop) -> dict:
    """Return the loss on the first validation sequences, as fields of a row of log.jsonl:

        val_loss               mean loss; None if all labels are IGNORE
        val_loss_by_position   [[first position of a bin, mean loss in it], ...]; the bins are the
                               positions 0, 1, 2 to 3, 4 to 7, 8 to 15, ... in a sequence, or in a
                               document if there are documents

    If the run has to stop, the evaluation is broken off between two batches. Then the result is
    empty, because the loss of only some sequences would mislead. Raises ConfigError if a rank
    cannot read its data. A collective of all ranks.
    """
    plan = run.plan
    count = min(run.validation.count, EVAL_SEQUENCES)
    sequences_at_once = plan.dp * plan.micro_batch

    def read(i):  # None: a rank for which no sequence is left runs a blank one
        return run.validation.window(i) if i < count else None

    # (bins, 2): the sum of the losses, and the number of valid labels
    total = torch.zeros(plan.seq.bit_length() + 1, 2, dtype=torch.float64, device=run.device)
    batch_began = time.perf_counter()
    for first in range(0, count, sequences_at_once):
        batch = load_batch(run, first, read, sequences_at_once)
        # wait for the previous batch. Otherwise the host would enqueue the kernels of all batches
        # long before the GPU runs them, and a request to stop could not cancel them
        if run.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        batch_seconds = time.perf_counter() - batch_began
        batch_began += batch_seconds
        errors, requests = zip(*gather_objects((batch.read_error, stop.request(batch_seconds))))
        if error := merge_errors([*errors]):
            raise ConfigError(error)
        if stop.agree_on(max(requests)):
            return {}
        # the batch is one micro-batch. per_token needs no scale
        [(tokens, labels, _, positions, documents)] = batch.micro_batches()
        losses = model(tokens, labels, None, positions, documents, per_token=True)  # (B, n)
        valid = (labels if run.labels_ahead == 1 else labels[..., 0]) != IGNORE
        both = torch.stack([losses, valid], -1).double()  # (B, n, 2)

        # a position's bin is the number of its binary digits: 0 -> 0, 1 -> 1, 2 and 3 -> 2, ...
        own_positions = select_tp_tokens(run, positions).expand_as(valid)
        bins = torch.frexp(own_positions.double()).exponent
        total.index_add_(0, bins.flatten(), both.flatten(0, 1))
    dist.all_reduce(total)

    loss, valid = total.sum(0).tolist()
    by_position = []
    for digits, (bin_loss, bin_valid) in enumerate(total.tolist()):
        if bin_valid:
            first_position = 2**digits // 2
            by_position.append([first_position, bin_loss / bin_valid])
    return {"val_loss": loss / valid if valid else None, "val_loss_by_position": by_position}


# ---------------------------------------------------------------------------- export


def companion_folders(cfg: Config) -> list[Path]:
    """Return the folders whose tokenizer and license an export copies. The tokenizer that made the
    data takes precedence over the import's, so its folder is the last one."""
    return [Path(folder) for folder in (cfg.import_folder, cfg.tokenizer) if folder]


def export(run: Run, states: States, step: int, group: dist.ProcessGroup) -> str:
    """Write the weights after a step to --export, with a tokenizer and a license.

    Returns why this failed, or "". A failure does not end the run, and the earlier export stays. A
    collective of all ranks.
    """
    cfg = run.cfg
    exported = OPTIMIZERS[run.plan.optimizer].exported  # the weights, or an average of them
    try:
        hf.export(
            Path(cfg.export),
            run.plan.model,
            lambda name: states.full_param(name, exported),
            run.plan.dtype,
            run.meta["source"],
            companion_folders(cfg),
            group,
            hf.run_number(Path(cfg.out)),
            step,
        )
    except ValueError as e:
        failed = f"step {step} was not exported: {cfg.export}: {e}"
        print0(failed)
        return failed
    return ""


# ---------------------------------------------------------------------------- progress in a step

PROGRESS_SECONDS = 30.0  # between two lines about a long step, while it runs


class Progress:
    """The step that runs now, for the thread that reports it.

    `running` is one tuple, so that the thread never sees one step with the time of another one.
    """

    def __init__(self):
        self.running = 0, 0.0  # the step, and the time when it began; step 0: no step runs

    def begin(self, step: int) -> float:
        """Say that a step begins, and return the time."""
        self.running = step, time.perf_counter()
        return self.running[1]

    def end(self) -> None:
        self.running = 0, 0.0


def start_progress_thread(run: Run, states: States) -> Progress:
    """Start a thread on rank 0 that says, every 30 seconds of a long step, which phase the device
    has reached. The thread polls events, so neither the device nor the loop waits for it. Returns
    the Progress that the loop updates."""
    progress = Progress()

    def report():
        phase, phase_step = "", 0
        while True:
            time.sleep(PROGRESS_SECONDS)
            step, since = progress.running
            new_phase = states.progress()
            if new_phase:
                phase = new_phase
            elif phase_step != step:
                phase = ""  # the last known phase belongs to an earlier step
            phase_step = step
            seconds = time.perf_counter() - since
            if step and phase and seconds > PROGRESS_SECONDS:
                print0(f"step {step}: {phase}, {seconds:.0f} s so far")

    if run.rank == 0:
        threading.Thread(target=report, daemon=True).start()
    return progress


# ---------------------------------------------------------------------------- statistics of a step


def gpu_peak_gib() -> float:
    """Return the peak memory of this GPU in GiB: of PyTorch's allocator, and of the buffers that
    ranks map from each other, which lie outside the allocator."""
    return (torch.cuda.max_memory_allocated() + Exchange.mapped_bytes()) / GIB


def host_peak_gib() -> float:
    """Return the peak memory of this process on the host, in GiB."""
    _, peak = own_host_bytes()
    return peak / GIB


def wait_for_step(step_stats: dict[str, Tensor]) -> dict[str, float]:
    """Return the statistics of a step as numbers. One copy brings them all to the host, and the
    host waits for it until the step is done.

    step_stats: 0-dim tensors on the device. "finite" must be equal on all ranks, because ranks
    decide by it whether to stop. Of the other tensors, the values of rank 0 are logged.
    """
    values = torch.hstack([*step_stats.values()]).tolist()
    return dict(zip(step_stats, values))


def largest_of_ranks(device: torch.device, rank_stats: dict[str, float]) -> dict[str, float]:
    """Return the maximum over all ranks of each number. A collective of all ranks."""
    largest = torch.tensor([*rank_stats.values()], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(rank_stats, largest.tolist()))


def finish_step(
    run: Run,
    stop: Stop,
    step_stats: dict[str, Tensor],
    next_batch: Batch,
    started: float,
    last: bool,
) -> dict[str, float]:
    """Wait for a step, and return its statistics, equal on all ranks.

    Each rank makes its request to stop after this wait. So a signal that came during the step ends
    the run now, and not after the next step.

    started: the time at which the step began. last: whether it is the last step of the run. A
    collective of all ranks.
    """
    row = wait_for_step(step_stats)
    stop.step_seconds.append(time.perf_counter() - started)
    return row | largest_of_ranks(
        run.device,
        {
            "stop": stop.request(0.0 if last else None),
            "writing": stop.saver.writing,  # whether this rank still writes a checkpoint
            "read_failed": bool(next_batch.read_error),
            "gpu_gib": gpu_peak_gib(),
            "host_gib": host_peak_gib(),
        },
    )


# ---------------------------------------------------------------------------- the log


def open_log(run: Run) -> TextIO:
    """Open log.jsonl on rank 0, to append to it. On another rank, open a file that keeps nothing.
    Raises OSError."""
    if run.rank == 0:
        return open_to_append(Path(run.cfg.out, "log.jsonl"))
    return open(os.devnull, "a")


def log_step(run: Run, log: TextIO, row: dict, unsaved: str) -> None:
    """Print the line of a step, and write its row to log.jsonl. unsaved: why the last checkpoint
    or export was not written, or ""."""
    step, steps, seconds = row["step"], run.cfg.steps, row["seconds"]
    row |= run.plan.rates(seconds, run.hardware.profile.peak_flops, row["keys_seen"])
    if row.pop("valid_labels") == 0 and row["loss"] == 0:  # a fork's loss may have other parts
        row["loss"] = None
    parts = [
        f"step {step}/{steps} loss {loss_text(row['loss'])} grad {row['grad_norm']:.3f}",
        f"lr {row['lr']:.2e} TGS {row['tgs']:,.0f}",
    ]
    if row["mfu_full"]:
        parts.append(f"MFU {row['mfu_causal']:.1%} causal {row['mfu_full']:.1%} full")
    if row["gpu_gib"]:
        parts.append(f"GPU {in_unit(row['gpu_gib'] * GIB)}")
    left = min(seconds * (steps - step), MOST_SECONDS_LEFT)
    parts.append(f"{seconds:.2f} s left {timedelta(seconds=round(left))}")
    if not row["finite"]:
        parts.append("SKIPPED: the loss or the gradient is not finite")
    if unsaved:
        parts.append(f"({unsaved})")
    log_row(log, row, *parts)


def loss_text(loss: float | None) -> str:
    """Return a loss as the run prints it. None: there was no label to predict."""
    return "none (all labels are ignored)" if loss is None else f"{loss:.4f}"


def log_row(log: TextIO, row: dict, *parts: str) -> None:
    """Print a line of these parts, with the evaluation if the row has one, and write the row."""
    if "val_loss" in row:
        parts = (*parts, f"val_loss {loss_text(row['val_loss'])}")
    print0(*parts)

    # JSON has no numbers that are not finite: they become null
    line = re.sub("NaN|-?Infinity", "null", json.dumps(row))
    try:
        print(line, file=log, flush=True)
    except OSError as e:  # the disk is full. Python tries to write this row again with the next one
        print0(f"log.jsonl cannot be written: {e.strerror}")


def close_log(run: Run, log: TextIO, draw: bool) -> bool:
    """Close log.jsonl, and draw loss.png from it on rank 0 if `draw`. Return whether it has drawn
    it."""
    try:
        log.close()
        if draw and run.rank == 0:
            draw_losses(Path(log.name))
            return True
    except Exception as e:  # log.jsonl may hold anything, and a picture must not end a run
        print0(f"log.jsonl or loss.png could not be written: {e!r}")
    return False


def draw_losses(log: Path) -> None:
    """Draw loss.png beside log.jsonl: on the left the losses by step, on the right those of the
    first and the last evaluation by position."""
    from matplotlib.figure import Figure

    rows = checkpoint.read_log(log)
    fig = Figure(figsize=(12, 4), layout="tight")
    by_step, by_position = fig.subplots(1, 2)

    for key in ("loss", "val_loss"):
        points = {row["step"]: row[key] for row in rows if row.get(key)}
        by_step.plot(points.keys(), points.values(), ".-", label=key)
    by_step.set(xlabel="step", ylabel="cross-entropy, nats per token")
    by_step.legend()

    evaluated = [row for row in rows if row.get("val_loss")]
    if len(evaluated) > 2:
        evaluated = [evaluated[0], evaluated[-1]]
    for row in evaluated:
        points = np.transpose(row["val_loss_by_position"])
        by_position.plot(*points, ".-", label=f"step {row['step']}")
        by_position.legend()
    by_position.set(
        xlabel="position in the sequence or document (first one of each bin)",
        ylabel="validation loss, nats per token",
        xscale="symlog",
    )
    replace_file(log.with_name("loss.png"), lambda new: fig.savefig(new, dpi=120))


# ---------------------------------------------------------------------------- the loop


@dataclass
class LoopState:
    """Where the loop is, and why it stops."""

    step: int  # steps done
    samples: int  # sequences seen
    needs_save: bool  # whether the weights of this step must still be saved, unless --save-every -1
    is_saved: bool  # whether a checkpoint has this step
    # how many steps in a row, up to this one, were not finite and so changed no weight
    skips_in_a_row: int = 0
    export_failed: str = ""  # why the last export failed, as a sentence; "" if it did not
    failure: str = ""  # what went wrong; the run saves, and exits with status 1
    stop_reason: str = ""  # why the run ends before --steps: a failure, a signal or --stop-after

    def begin_step(self, sequences: int) -> None:
        """Count a step of this many sequences. No checkpoint has it yet."""
        self.step += 1
        self.samples += sequences
        self.needs_save = True
        self.is_saved = False


def freeze_gc() -> None:
    """Exclude all objects that exist now from garbage collection, because most of them live until
    the end, and walking them takes time in every collection."""
    gc.collect()
    gc.freeze()


def is_due(every: int, step: int) -> bool:
    """Return whether something that happens once per `every` steps happens after this step. 0 (only
    at the end) and -1 (never) are never due."""
    return every > 0 and step % every == 0


def check_stop(state: LoopState, stop: Stop, stats: dict, next_batch: Batch) -> None:
    """Set the reasons to stop after a step. stats: its statistics, equal on all ranks. A collective
    of all ranks."""
    state.skips_in_a_row = 0 if stats["finite"] else state.skips_in_a_row + 1
    if state.skips_in_a_row == MAX_SKIPS:
        state.failure = f"the loss or the gradient was not finite, {MAX_SKIPS} steps in a row"
    if stats["read_failed"]:
        state.failure = first_error(next_batch.read_error)
    state.stop_reason = stop.agree_on(stats["stop"]) or state.failure


def begin_save(run: Run, saver: checkpoint.Saver, state: LoopState) -> None:
    """Begin to save a checkpoint of the step that is done. A collective of all ranks."""
    saver.begin(run.meta | {"step": state.step, "samples": state.samples})
    state.needs_save = False
    state.is_saved = True


def begin_loop(
    run: Run,
    model: LLaMA | Pipeline,
    stop: Stop,
    signals: StopSignal,
    log: TextIO,
    state: LoopState,
) -> Batch | None:
    """Load the first batch and return it. If no step is left, evaluate if --eval-every is above 0,
    and return None.

    Sets the reason to stop if the batch cannot be read, or if the ranks are asked to stop. A
    collective of all ranks.
    """
    cfg, batch = run.cfg, None
    if state.step < cfg.steps:
        batch = load_batch(run, state.samples)
        state.failure = state.stop_reason = first_error(batch.read_error)
        if state.failure:  # nothing is trained, so there is nothing to save
            state.needs_save = False
        if run.plan.pp > 1:
            model.warm_up(next(batch.micro_batches()))
    elif cfg.eval_every > 0:
        if evaluation := evaluate(run, model, stop):
            log_row(log, {"step": state.step} | evaluation, f"step {state.step}")
        state.stop_reason = stop.reason

    trains = state.step < cfg.steps and not state.stop_reason
    if trains:
        print_legend(run)
    signals.begin_training()  # only now, because until here a signal may simply end the run
    if trains:
        state.stop_reason = stop.ask_all()
        if state.stop_reason:  # nothing was trained, so there is nothing to save
            state.needs_save = False
    return batch


def save_and_export(run: Run, states: States, stop: Stop, state: LoopState) -> None:
    """Begin to save the step that is done, and export it if the run goes on. A collective of all
    ranks."""
    saver = stop.saver
    begin_save(run, saver, state)
    if run.cfg.export and state.step < run.cfg.steps and not state.stop_reason:
        # Complete the checkpoint first, also with --save-async. If the run is then killed during
        # the export, it resumes from this step, and may replace this step's export
        saver.finish()
        state.stop_reason = stop.ask_before_export()
        if not state.stop_reason:
            began = time.perf_counter()
            state.export_failed = export(run, states, state.step, saver.group)
            if not state.export_failed:
                stop.export_seconds = time.perf_counter() - began


def end_loop(run: Run, states: States, stop: Stop, log: TextIO, state: LoopState) -> str:
    """Save a last checkpoint unless the last step is saved already, draw loss.png and export.
    Returns what went wrong, or "". A collective of all ranks."""
    cfg, saver = run.cfg, stop.saver
    if state.stop_reason:
        print0(f"{state.stop_reason}: the run ends after step {state.step}")
    saver.finish()
    if cfg.save_every >= 0 and (state.needs_save or saver.failed):
        begin_save(run, saver, state)
        saver.finish()
    drawn = close_log(run, log, draw=not stop.reason)
    if cfg.export and state.step >= cfg.steps and state.skips_in_a_row < MAX_SKIPS:
        # without a checkpoint of this step, a later command could not export it
        can_export_later = state.is_saved and not saver.failed
        # only --stop-after puts the export off. After a signal it still runs
        if can_export_later and stop.ask_before_export() and stop.time_is_up:
            print0(
                f"{stop.reason}. So step {state.step} was not exported. To export it: the same "
                "command with --resume and a longer --stop-after"
            )
        else:
            state.export_failed = export(run, states, state.step, saver.group)
    failure = state.failure or saver.failed or state.export_failed
    if not failure and state.step > run.start_step:
        print0(closing_advice(run, state, drawn))
    elif not failure and run.resumed and not cfg.export and 0 < cfg.steps <= state.step:
        print0(
            f"Nothing was trained, because the run had reached --steps {cfg.steps}. To train on, "
            f"pass a larger --steps, such as {2 * state.step}"
        )
    return failure


def train(
    run: Run,
    model: LLaMA | Pipeline,
    states: States,
    memory: StepMemory | None,
    saver: checkpoint.Saver,
    signals: StopSignal,
) -> str:
    """Run the steps that are left, and save. Returns what went wrong, or "". A collective of all
    ranks."""
    cfg = run.cfg
    # weights that a checkpoint already has, or that are only evaluated, need no new checkpoint
    only_evaluates = cfg.steps == 0 and cfg.eval_every > 0
    needs_save = not (run.resumed or only_evaluates)
    state = LoopState(run.start_step, run.start_samples, needs_save, is_saved=bool(run.resumed))
    log = all_or_none(open_log, run)
    stop = Stop(run, signals, saver, states)

    batch = begin_loop(run, model, stop, signals, log, state)
    progress = start_progress_thread(run, states)
    while state.step < cfg.steps and not state.stop_reason:
        # schedule: the learning rate of this step, and what happens after it
        lr = learning_rate(run, state.step)
        state.begin_step(run.plan.batch)
        last = state.step == cfg.steps
        evaluates = is_due(cfg.eval_every, state.step) or (last and cfg.eval_every >= 0)
        saves = is_due(cfg.save_every, state.step)

        # step: the host launches it, and does not wait for the device
        started = progress.begin(state.step)
        loss, grad_norm, finite = run_planned(memory, model, states, batch, lr, cfg.clip)
        step_stats = {
            "loss": loss,
            "grad_norm": grad_norm,
            "finite": finite,
            "keys_seen": batch.keys_seen,
            "valid_labels": batch.valid_labels,
        }

        # next batch: read while the GPU works on the step
        if not last:
            batch = load_batch(run, state.samples)

        # statistics: here the host waits for the step
        row = finish_step(run, stop, step_stats, batch, started, last)
        if not row["finite"]:
            states.check_uses()  # a matrix that was not used once per pass makes a step not finite
        row |= {"step": state.step, "lr": lr, "seconds": time.perf_counter() - started}
        progress.end()
        if state.step == run.start_step + 1:
            freeze_gc()  # now, because the first step has compiled everything

        # stop? Then the run only does what it must, because the process may be killed soon
        check_stop(state, stop, row, batch)
        evaluates = evaluates and not stop.reason

        # evaluate. This, saving and exporting may need the memory of planned steps, so free it
        if memory and (evaluates or saves or state.stop_reason or last):
            memory.give_back()
        if evaluates:
            try:
                row |= evaluate(run, model, stop)
            except ConfigError as e:
                state.failure = str(e)
            state.stop_reason = stop.reason or state.failure

        # log
        if not row["writing"]:
            saver.finish()  # all ranks have written their files, so the checkpoint gets its name
        unsaved = ", ".join(filter(None, [saver.failed, state.export_failed]))
        log_step(run, log, row | {"memplan": memory.counts if memory else None}, unsaved)

        # save
        if saves:
            save_and_export(run, states, stop, state)
        if (evaluates or saves) and not (last or state.stop_reason):
            state.stop_reason = stop.ask_all()  # because evaluating and saving may take minutes

    return end_loop(run, states, stop, log, state)


def closing_advice(run: Run, state: LoopState, drawn: bool) -> str:
    """Return the last lines of a run: what to open, and what to try next. drawn: whether the run
    has drawn its losses."""
    cfg, out = run.cfg, shlex.quote(run.cfg.out)
    lines = []
    if drawn:
        lines.append(f"Open {out}/loss.png for the losses of all steps. {out}/log.jsonl lists them")

    if not state.needs_save:
        knows_tokens = run.meta["bytes_are_tokens"] or cfg.tokenizer or cfg.import_folder
        tokenizer = "" if knows_tokens else " --tokenizer DIR"
        lines.append(f"To read what the model writes: python sample.py {out}{tokenizer}")
        command = f"python train.py --out {out}"
        if run.plan.ranks > 1:
            command = "the same torchrun command with"
        steps = f" --steps {2 * cfg.steps}" if state.step == cfg.steps else ""
        lines.append(f"To continue the training: {command} --resume{steps}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------- the program


def main(argv: list[str] | None = None) -> None:
    """Run a command: start or join the ranks, configure, build, train. Exits with status 1 if the
    training has failed. Raises what `all_or_none` raises."""
    command_flags = parse(argv)
    if command_flags.get("pp", 1) != 1:
        use_more_queues()  # it must be set before CUDA starts
    # The ranks join before `configure` checks the flags, so that all of them refuse a wrong flag
    # together. Joining needs a timeout already, so one that is out of range is clamped here
    timeout = min(max(1.0, command_flags.get("timeout", Config.timeout)), 1e9)
    failure = ""
    advice = "All saved checkpoints are complete. Start the run again, or continue it with --resume"
    with stop_signals() as signals:
        rank, world, local_rank = start_ranks(timeout)
        with heartbeat(rank, world, advice), contextlib.ExitStack() as lock:
            out = Path(command_flags.get("out", Config.out))
            seen = on_rank_0(checkpoint.steps_of, out)
            run = configure(command_flags, local_rank)
            if not run.cfg.dry_run:
                on_rank_0(lambda: lock.enter_context(checkpoint.locked(out)))
                # `configure` may read much data, and meanwhile another run may have saved and ended
                if on_rank_0(checkpoint.is_outdated, run.resumed, run.cfg.resume, out, seen):
                    print0(f"another run has saved in {out} meanwhile: starting again")
                    run = configure(command_flags, local_rank)
                with host_memory_watch(run.plan):
                    failure = train(run, *build_run(run), signals)
                on_rank_0(lock.close)
        dist.destroy_process_group()
    if failure:
        sys.exit(f"train.py: {failure}" if rank == 0 else 1)


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, UnexpectedError) as e:  # raised on all ranks alike: rank 0 says it
        joined = dist.is_initialized()  # start_ranks may raise before the ranks have joined
        if not joined or dist.get_rank() == 0:
            print(f"train.py: error: {e}", file=sys.stderr)
        if joined:
            dist.destroy_process_group()
        sys.exit(2 if isinstance(e, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(
            "train.py: interrupted. All saved checkpoints are complete: continue with --resume"
        )
    except torch.OutOfMemoryError as e:
        sys.exit(
            f"train.py: out of GPU memory: {e}\nThe table 'memory of plan 1' above says what "
            "was planned. Shorten --seq, lower --micro-batch, --chunk, --alpha or "
            "--resident-layers, or take more GPUs or a larger --sp. All saved checkpoints are "
            "complete: continue with --resume"
        )
