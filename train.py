"""What happens, in order? Config -> setup -> plan -> build -> loop.

    python train.py                                   a laptop: a tiny model, the machine's own text
    torchrun --nproc_per_node 8 train.py --model 7b   one process a GPU, the same code path
    python train.py --help                            every flag

A step draws `batch` sequences (data.py), and splits them over the data-parallel ranks and then into
micro-batches; the sp ranks of each hold parts of the same sequences. The loss is the sum over all
valid tokens divided by their number, so no split changes it. What is left open (sp, p, g, os, what
layers keep) is chosen by planner.py, from counted bytes and measured times, and printed. Stopped by
SIGTERM or SIGINT, a run finishes its step and saves (checkpoint.py); killed, it continues from
OUT/latest with `--resume` as if nothing had happened.

    Config (every flag)  ->  Run (what flags, files, devices, planner settle)  ->  model, states

Legend: pp * dp * sp * tp ranks, R = dp * sp of them of one stage and column; M micro-batches a step
and rank, B sequences a micro-batch, T tokens a sequence, T/sp on a rank.
"""
import contextlib
import difflib
import functools
import gc
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import checkpoint
import costs
import hardware
import model as llama
import parallel
import planner
from attention import (CommStream, Documents, Exchange, Ulysses, pick_kernel, sequence_positions)
from checkpoint import Checkpoint
from data import (Sequences, are_ids, check_tokens, document_starts, end_of_text, find_files,
                  fingerprint, load_tokenizer, open_corpus, regular, split, tokenise)
from memplan import StepMemory, library, live_arena, mark
from model import (IGNORE, MODELS, LLaMA, ModelConfig, accumulation_dtype, flops_per_token,
                   initial_weight, param_count, whole_layers)
from offload import GIB, ChunkedLayers, buffer_bytes
from parallel import Pipeline
from planner import (DTYPES, Constraints, Hardware, Plan, check_values, flag, flag_name, flags_of,
                     make_parser, size, types_of)
from ranks import (ConfigError, Groups, Heartbeat, check_same, error_of_any, most_of_ranks,
                   of_rank_0, on_all_ranks, on_rank_0, patient_group, place_of, print0, start_ranks)
from shard import OPTIMIZERS, States

# ---------------------------------------------------------------------------- config

EVAL_SEQUENCES = 64  # most of a validation
TIMEOUTS = (1, 1e9)  # seconds
MAX_SKIPS = 5  # non-finite steps in a row that end the run


@dataclass(frozen=True)
class Config(Constraints):
    """Every flag, with those of the planner. None is `auto`: chosen by what the help says; a Run's
    Config has the choice."""

    model: str = flag(f"auto (a resumed run's; tiny on a CPU, 7b on GPUs),"
                      f" {', '.join(MODELS)}", "auto")
    seq: int | None = flag("tokens a sequence; auto: 256 for tiny, else 4096", None, 1, 2**40)
    steps: int = flag(
        "optimizer steps of the whole run; 0: initialise, save or export, end; with --eval-every "
        "1: evaluate, save nothing; states and gradients are allocated nevertheless", 200, 0, 2**40)
    batch: int | None = flag(
        "sequences a step over all ranks; auto: a resumed run's, else 4K tokens for tiny and "
        "512K tokens for others")
    lr: float | None = flag(
        "peak learning rate; auto: a resumed run's, else 3e-3 for tiny, 6e-4 for 160m, 2e-5 for "
        "--init hf:DIR, else 3e-4", None, 0, 1e30)
    min_lr: float | None = flag(
        "the cosine decay's end at --steps, as a fraction of --lr; auto: a resumed run's, else "
        "0.1", None, 0, 1)
    warmup: int | None = flag(
        "steps of linear warm-up; auto: a resumed run's, else a quarter of --steps, at most 500",
        None, 0, 2**40)
    weight_decay: float = flag("AdamW's, on matrices, not on norms and biases", 0.1, 0, 1e6)
    clip: float = flag("largest global norm of the gradient; 0: no clipping", 1.0, 0, 1e30)
    seed: int = flag("of the weights and of the order of the data", 0, 0, 2**31 - 1)
    data: str = flag(
        "a text file, a folder of them (bytes are the tokens, without --tokenizer), a .bin file "
        'of token ids (uint16, or as FILE.bin.json beside it says: {"token_bytes": 4, "vocab": '
        '128256, "ignore": 0}, of which 0 is never a label), a folder with .bin files (val.bin '
        "is the validation split), or stdlib: the sources of Python's standard library", "stdlib")
    eval_every: int = flag("steps between validations; 0: at the end; -1: never", 0, -1, 2**40)
    out: str = flag(
        "folder of log.jsonl, loss.png, position.png (validation loss by position) and "
        "checkpoints", "out")
    save_every: int = flag(
        "steps between checkpoints; 0: at the end or when stopped; -1: never", 0, -1, 2**40)
    keep: int = flag("checkpoints kept", 2, 1, 2**40)
    save_async: bool = flag(
        "write checkpoints while steps go on, from copies in host memory", False)
    resume: str = flag(
        "never, latest, auto (latest if there is one: what a torchrun that restarts ranks "
        "needs), or a checkpoint's folder; alone: latest", "never")
    init: str = flag(
        "random, or hf:DIR: a Hugging Face checkpoint of Llama, Mistral, Qwen2, Qwen2.5 or "
        "Qwen3, in safetensors; a resumed run needs neither the flag nor DIR", "random")
    export: str = flag(
        "folder for a Hugging Face checkpoint of the final weights in --dtype, of the "
        "architecture that was imported (else Llama), with its tokenizer and license", "")
    rope_scaling: str = flag(
        "for sequences past the trained length: linear:FACTOR, llama3:FACTOR or yarn:FACTOR, "
        "times the length that a checkpoint reaches; one that is scaled takes its own kind alone "
        "(Llama 3.1's 128K, llama3:2: 256K); or theta:BASE, another rotary base", "")
    per_node: int | None = flag("ranks of a node; auto: torchrun's local world size")
    device: str = flag("auto, cpu or cuda", "auto")
    dtype: str = flag(
        "of weights and activations: auto (bf16 on GPUs), bf16, fp32, fp64",
        "auto", among=("auto", *DTYPES))
    memplan: str = flag(
        "addresses of a step's tensors, planned once: off, or on", "off", among=("off", "on"))
    compile: bool = flag("torch.compile the element-wise parts, on GPUs", True)
    timeout: float = flag(
        "seconds after which a collective gives up on a lost rank", 600.0, *TIMEOUTS)
    dry_run: bool = flag("print config, the best plans and their memory, and end", False)
    ranks: int | None = flag(
        "with --dry-run: plan for so many; none of them need be there; auto: the ranks that are")

    @property
    def evaluates_alone(self) -> bool:
        return self.steps == 0 < self.eval_every

    @property
    def import_folder(self) -> str:
        """Return DIR of --init hf:DIR, else an empty text."""
        return self.init.partition("hf:")[2]

    def where_open(self, values: dict) -> dict:
        """Return those of the values whose flags are open."""
        return {name: value for name, value in values.items()
                if getattr(self, name) in (None, "auto")}


def parse(argv: list[str] | None = None) -> Config:
    return Config(**vars(make_parser(Config, __doc__.split("\n")[0]).parse_args(argv)))


def values_of(cfg: Config) -> dict:
    """Return the flags, by name."""
    return {name: getattr(cfg, name) for name in flags_of(cfg)}


def check_flags(cfg: Config) -> None:
    """Raise ValueError for a number out of its range, a word that is none of its choices, flags
    that contradict each other. It reads flags alone."""
    check_values(cfg)
    by_hand = [flag_name(name) for name in ("alpha", "resident_layers", "chunk")
               if getattr(cfg, name) is not None]
    if by_hand and cfg.recompute != "auto":
        raise ValueError(f"{' '.join(by_hand)} and --recompute {cfg.recompute} say different things"
                         ": drop one")
    if cfg.ranks and not cfg.dry_run:
        raise ValueError(f"--ranks {cfg.ranks}: of a plan alone; with --dry-run")
    if not re.fullmatch("random|hf:.+", cfg.init):
        raise ValueError(f"--init {cfg.init}: random or hf:DIR")


# ---------------------------------------------------------------------------- setup

# said once by a backward's thread, whose context PyTorch then makes
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")


def set_allocator(settings: str) -> None:
    """Set PyTorch's CUDA allocator, as PYTORCH_ALLOC_CONF would."""
    # torch 2.11 and later rename this
    getattr(torch._C, "_accelerator_setAllocatorSettings",
            torch.cuda.memory._set_allocator_settings)(settings)


def expandable_segments() -> None:
    """Let PyTorch's allocator map memory where a block needs it: without, the pieces between what
    layers keep add up to gigabytes. What the environment says goes before."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        set_allocator("expandable_segments:True")


@dataclass(frozen=True)
class Run:
    """A command on this machine: what flags, files and devices settle, and then the planner."""

    cfg: Config  # with the choices, where it left them open
    rank: int
    world: int  # R
    device: torch.device
    dtype: torch.dtype
    kernel: str
    model: ModelConfig
    pretrained: Callable[[str], Tensor] | None = None  # name -> tensor of the imported checkpoint
    source: dict = field(default_factory=dict)  # its config.json, also where it resumes
    tokens: Path | None = None  # the .bin file that --tokenizer made of --data
    train: Sequences | None = None
    val: Sequences | None = None
    resume: Checkpoint | None = None
    ignored_id: int = -1  # that is never a label, as the data says; -1: none
    samples: int = 0  # sequences that a resumed run has seen
    decay_steps: int = 0  # the step at which --min-lr is reached: a resumed run's, else --steps
    data: dict = field(default_factory=dict)  # fingerprint of both
    budgets: tuple[float, float] = (2.0**60, 2.0**60)  # bytes of a GPU, of host memory of a rank
    hardware: Hardware | None = None
    plan: Plan | None = None
    second: Plan | None = None  # the next best, by the same prediction

    def but(self, **changes) -> "Run":
        return replace(self, **changes)

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """Return this rank's stage, its number among data-parallel ranks, among those of a
        sequence, and its column."""
        plan = self.plan
        stage, rank, column = place_of(self.rank, self.world, plan.tp, plan.pp)
        return stage, *divmod(rank, plan.sp), column

    @property
    def constraints(self) -> Constraints:
        """Return what the flags leave to the planner, and what they do not."""
        most = self.train.count if self.train else None
        usual = usual_batch(self.cfg)
        return replace(self.cfg, default_batch=min(usual, most or usual),
                       most_sequences=most if self.cfg.ranks is None else None,
                       resumes=self.resume is not None)


def usual_batch(cfg: Config) -> int:
    """Return the sequences of a step where neither flags nor a resumed run say it."""
    return max(1, (2**12 if cfg.model == "tiny" else 2**19) // cfg.seq)


def choose_device(cfg: Config, local_rank: int) -> torch.device:
    """Return this process's device. Raises ValueError if it is not there."""
    gpus = torch.cuda.device_count()
    kind = cfg.device
    if kind == "auto":
        kind = "cuda" if gpus else "cpu"
    if kind not in ("cpu", "cuda") or (kind == "cuda" and local_rank >= gpus):
        fewer = f", or --nproc_per_node {gpus} or fewer" if gpus else ""
        raise ValueError(f"--device {kind}: this node has {gpus} GPUs, and this process is number "
                         f"{local_rank}; cpu{fewer}")
    return torch.device(kind, local_rank if kind == "cuda" else None)


def rope_factor(text: str) -> tuple[str, float]:
    """Return kind and factor of a --rope-scaling. Raises ValueError."""
    kind, _, number = text.partition(":")
    factor = float(number) if re.fullmatch(r"\d+(\.\d*)?", number) else 0.0
    if kind not in ("theta", *llama.ROPE_KEYS) or not 1 <= factor < 1e9:
        raise ValueError(f"--rope-scaling {text}: linear:FACTOR, llama3:FACTOR, yarn:FACTOR or "
                         "theta:BASE, from 1")
    return kind, factor


def with_rope(cfg: Config, model: ModelConfig, made: str = "") -> ModelConfig:
    """Return the model with --rope-scaling, and the positions that it reaches; made: a
    --rope-scaling that it has already. Raises ValueError."""
    if not cfg.rope_scaling:
        return model
    kind, factor = rope_factor(cfg.rope_scaling)
    if kind == "theta":
        return replace(model, rope_theta=factor)
    if made.startswith(kind):
        factor /= rope_factor(made)[1]
    old = model.rope_scaling
    has = llama.rope_kind(old)
    if old and has != kind:
        raise ValueError(f"--rope-scaling {cfg.rope_scaling}: its rotary embedding has {has} "
                         f"scaling already; extend it with {has}:FACTOR")
    fresh = {"factor": 1.0, "original_max_position_embeddings": model.max_positions,
             "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # Llama 3.1's
    scaling = {"rope_type": kind} | (old or {key: fresh[key] for key in llama.ROPE_KEYS[kind]})
    scaling["factor"] *= factor
    scaling.pop("attention_factor", None)  # a fixed one was the old factor's
    return replace(model, rope_scaling=scaling,
                   max_positions=round(model.max_positions * factor))


Chosen = tuple[Config, ModelConfig, Callable | None, dict]  # cfg, model, pretrained, source of Run


def choose_model(cfg: Config, device: torch.device, resumed: Checkpoint | None) -> Chosen:
    """Return the flags with the model's name, the model of --model or --init, and for --init hf:DIR
    name -> tensor and DIR's config.json. A run that resumes has them from its checkpoint, unless
    flags name them. Raises ValueError."""
    folder = cfg.import_folder
    if folder and cfg.model not in ("auto", "hf"):
        raise ValueError(f"--model {cfg.model}: with --init hf:DIR the model is DIR's; drop it")
    there = folder and (Path(folder) / "config.json").exists()
    if resumed and cfg.model in ("auto", "hf") and not there:
        return resumed_model(cfg, resumed)
    pretrained = None
    source = {}
    if folder:
        name = "hf"
        source = checkpoint.hf_source(folder)
        model = checkpoint.hf_config(folder)
        if not resumed:
            pretrained = checkpoint.hf_open(folder, model)
    else:
        name = cfg.model
        if name == "auto":
            name = "tiny" if device.type == "cpu" else "7b"
        if name not in MODELS:
            near = difflib.get_close_matches(name.lower(), MODELS, 1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise ValueError(f"--model {name}: auto, {', '.join(MODELS)}{hint}")
        model = MODELS[name]
    trained = resumed.meta["model"] if resumed else {}
    if trained.get("rope_scaling") == model.rope_scaling:  # it may have been trained at more
        model = replace(model, max_positions=trained["max_positions"])
    return replace(cfg, model=name), with_rope(cfg, model), pretrained, source


def resumed_model(cfg: Config, resumed: Checkpoint) -> Chosen:
    """Return what choose_model does, of the checkpoint to resume. The flags that made it may be
    repeated or left out. Raises ValueError."""
    old = recorded_flags(resumed)
    try:
        model = ModelConfig(**resumed.meta["model"])
    except (TypeError, ValueError) as e:
        raise ValueError(f"--resume: {resumed.folder} is of another model: {e}") from e
    cfg = replace(cfg, model=old.model, init=old.init,
                  rope_scaling=cfg.rope_scaling or old.rope_scaling)
    return cfg, with_rope(cfg, model, old.rope_scaling), None, resumed.meta["source"]


def default_flags(cfg: Config, world: int, device: torch.device) -> Config:
    """Return the flags with the usual values where they are open and nothing need be known."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return replace(cfg, **cfg.where_open({
        "device": device.type,
        "dtype": "bf16" if device.type == "cuda" else "fp32",
        "seq": 256 if cfg.model == "tiny" else 4096,
        "per_node": math.gcd(8, world) if cfg.ranks else per_node}))


def machine(cfg: Config, rank: int, world: int, local_rank: int,
            resumed: Checkpoint | None = None) -> Run:
    """Return the run as far as flags, devices and the model settle it; resumed: the checkpoint that
    it continues from. Raises ValueError for what cannot work, with numbers."""
    device = choose_device(cfg, local_rank)
    cfg, model, pretrained, source = choose_model(cfg, device, resumed)
    cfg = default_flags(cfg, world, device)
    # an import reaches further by its flags alone, and YaRN's reach is a number that it computes by
    new_base = cfg.rope_scaling.startswith("theta")
    by_length = resumed is None and (cfg.model != "hf" or new_base)
    if by_length and llama.rope_kind(model.rope_scaling) != "yarn":
        model = replace(model, max_positions=max(model.max_positions, cfg.seq))
    dtype = DTYPES[cfg.dtype]
    cfg = with_documents(cfg, model, resumed)
    window = checkpoint.hf_window(source)
    if 0 < window < cfg.seq:
        raise ValueError(f"--seq {cfg.seq}: the weights were trained with sliding windows of "
                         f"{window} tokens, which are not built; at most --seq {window}")
    if torch.__version__ < "2.11":
        raise ValueError(f"torch {torch.__version__}: at least 2.11")
    kernel = pick_kernel(cfg.attention, device, dtype, cfg.document_token != -1)
    cfg = replace(cfg, attention=kernel)
    run = Run(cfg, rank, world, device, dtype, kernel, model, pretrained, source)
    planner.check(run.constraints, model, world, cfg.per_node)
    ranks_of_node = max(cfg.per_node, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return run.but(budgets=(
        planner.gpu_budget(device, cfg.gpu_memory),
        planner.host_budget(ranks_of_node, cfg.host_memory, bool(cfg.ranks))))


def with_documents(cfg: Config, model: ModelConfig, resumed: Checkpoint | None) -> Config:
    """Return the flags with --document-token, as far as they and the checkpoint say it: None is the
    id that --tokenizer will end each text with. Raises ValueError."""
    end = cfg.document_token
    if end is None and resumed:
        end = recorded_flags(resumed).document_token
    if end is None and (not cfg.tokenizer or are_ids(find_files(cfg.data)[0])):
        end = -1
    if end is not None and end >= model.vocab:
        raise ValueError(f"--document-token {end}: the model's vocabulary ends at "
                         f"{model.vocab - 1}")
    if end != -1 and cfg.memplan == "on":
        raise ValueError("--memplan on: requests differ with each batch's documents: "
                         "--memplan off, or --document-token -1")
    return replace(cfg, document_token=end)


def with_tokens(run: Run) -> Run:
    """Return the run with the file of what --tokenizer makes of text, and the id that ends each:
    the first rank writes it if it is not there, and the others wait, which may take hours. Raises
    ConfigError. A collective of all ranks."""
    cfg = run.cfg
    if not cfg.tokenizer:
        return run

    def tokens_and_end() -> tuple[Path | None, int]:
        path = tokenise(cfg.data, cfg.tokenizer, Path(cfg.out) / "tokens", run.model.vocab)
        return path, end_of_text(cfg.tokenizer, load_tokenizer(cfg.tokenizer)) if path else -1

    # not within --timeout; a first rank that dies closes its connections, which ends the others
    patient = patient_group()
    tokens, end = on_rank_0(tokens_and_end, patient)
    dist.destroy_process_group(patient)
    cfg = replace(cfg, **cfg.where_open({"document_token": end}))
    return run.but(cfg=cfg, tokens=tokens)


SCHEDULE = ("lr", "min_lr", "warmup")


def kept_flags(cfg: Config, old: Config, step: int) -> dict:
    """Return the flags that a resumed run takes from its checkpoint's, where they are open: the
    same tokens a step, whatever ranks there are now; and the schedule, once it has begun, so that
    the rate of an extended run does not rise again."""
    kept = {"batch": max(1, old.batch * old.seq // cfg.seq)}
    if step:
        kept |= {name: getattr(old, name) for name in SCHEDULE}
    return cfg.where_open(kept)


def with_files(run: Run, resumed: Checkpoint | None) -> Run:
    """Return the run with its data and the checkpoint that it resumes. Raises ValueError."""
    cfg = run.cfg
    corpus, val_corpus = open_corpus(str(run.tokens or cfg.data), run.model.vocab)
    train, val = split(corpus, val_corpus, cfg.seq, cfg.seed)
    corpora = [c for c in (corpus, val_corpus) if c is not None]
    check_tokens(corpora, run.model.vocab, run.rank, run.world)
    if not cfg.dry_run:
        check_folders(cfg, run)
    usual = {"lr": {"tiny": 3e-3, "160m": 6e-4, "hf": 2e-5}.get(cfg.model, 3e-4),
             "min_lr": 0.1, "warmup": min(cfg.steps // 4, 500)}
    samples = 0
    decay_steps = cfg.steps
    if resumed:
        may_differ = {"max_positions", "tied"}
        if cfg.rope_scaling:
            is_base = cfg.rope_scaling.startswith("theta")
            may_differ.add("rope_theta" if is_base else "rope_scaling")
        checkpoint.check_same_model(resumed, run.model, may_differ)
        old = recorded_flags(resumed)
        samples = resumed.meta["samples"] * old.seq // cfg.seq
        kept = kept_flags(cfg, old, resumed.meta["step"])
        if resumed.meta["step"]:
            decay_steps = resumed.meta["decay_steps"]
        if kept:
            print0(f"kept from {resumed.folder}: " + " ".join(
                f"{flag_name(name)} {value}" for name, value in kept.items())
                + f"; --lr decays until step {decay_steps}")
        usual |= kept
    cfg = replace(cfg, **cfg.where_open(usual))
    return run.but(cfg=cfg, train=train, val=val, ignored_id=corpus.ignored_id, resume=resumed,
                   samples=samples, decay_steps=decay_steps, data=fingerprint(corpora))


def recorded_flags(resumed: Checkpoint) -> Config:
    """Return the flags that a checkpoint was made with: those that it does not know have their
    defaults. Raises ValueError for one of another type."""
    folder = resumed.folder
    recorded = resumed.meta["config"]
    known = {}
    for f in flags_of(Config).values():
        value = known[f.name] = recorded.get(f.name, f.default)
        types = types_of(f)
        if float in types:
            types += (int,)
        if type(value) not in types:
            raise ValueError(f"--resume: {folder} has {flag_name(f.name)} {value!r}")
    old = Config(**known)
    if None in [getattr(old, name) for name in ("seq", "batch", *SCHEDULE)]:
        raise ValueError(f"--resume: {folder} does not say its --seq, --batch or schedule")
    return old


def check_folders(cfg: Config, run: Run) -> None:
    """Raise ValueError unless --out and --export can be written, and an export overwrites and
    drops nothing."""
    if cfg.export:
        folder = Path(cfg.export)
        full = folder.is_dir() and any(f.name != "partial" for f in folder.iterdir())
        if full or folder.resolve() == Path(cfg.out).resolve():
            raise ValueError(
                f"--export {cfg.export}: the folder is not empty, or --out; name another")
        checkpoint.hf_architecture(run.model, run.source)
    for folder in {cfg.out, cfg.export} - {""}:
        try_folder(folder)


def try_folder(folder: str, advice: str = "") -> None:
    """Raise ValueError, with advice, if files cannot be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise ValueError(f"{folder} cannot be written: {e}{advice}") from e


def with_hardware(run: Run) -> Run:
    """Return the run with the profile of its devices, and with what the smallest rank has. A
    collective of all ranks."""
    budgets = torch.tensor(run.budgets, dtype=torch.float64, device=run.device)
    dist.all_reduce(budgets, dist.ReduceOp.MIN)
    cfg = run.cfg
    name = device_name(run.device)
    if cfg.ranks and run.device.type == "cpu":
        name = "NVIDIA H200"
    profile = of_rank_0(hardware.find_profile(  # of mixed devices, one plan
        name, run.device, run.dtype, run.kernel, cfg.per_node, print0))
    return run.but(hardware=Hardware(run.world, cfg.per_node, profile, *budgets.tolist()))


PLANNED = ("sp", "ring", "tp", "pp", "pp_chunks", "batch", "micro_batch",
           "head_groups", "chunk", "os_layout", "os_place")


def with_plan(run: Run) -> Run:
    """Return the run with the best plan by the profile of its devices, and its choices as flags.
    Raises ConfigError. A collective of all ranks: all come to the same plan."""
    constraints = run.constraints
    plans = on_all_ranks(lambda: planner.plan(constraints, run.model, run.hardware))
    best = plans[0]
    if run.cfg.batch is None and best.batch != constraints.default_batch:
        print0(f"--batch: {constraints.default_batch} by default, {best.batch} so that "
               f"{best.dp} data-parallel ranks divide it")
    if run.cfg.dry_run:
        print0(planner.describe_plans(plans, run.hardware))
    cfg = replace(run.cfg, **{name: getattr(best, name) for name in PLANNED})
    return run.but(cfg=cfg, plan=best, second=plans[1] if len(plans) > 1 else None)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def cap_gpu(run: Run) -> None:
    """Hold PyTorch's allocator to --gpu-memory, less what ranks map from each other beside it."""
    if run.device.type == "cuda":
        total = torch.cuda.get_device_properties(run.device).total_memory
        mapped = costs.sent_bytes(run.plan)
        share = 1.0
        if run.cfg.gpu_memory:
            share = min(1.0, (run.cfg.gpu_memory - mapped) / total)
        torch.cuda.set_per_process_memory_fraction(share, run.device)


def describe(run: Run) -> None:
    """Print what was chosen and why."""
    cfg = run.cfg
    plan = run.plan
    f = plan.factors
    there = ""
    if cfg.os_place == "host":
        there = f", {plan.host['optimizer'] / GIB:.1f} GiB a rank"
    if plan.tp > 1:
        print0(f"layers: {plan.tp_mode}, shared by {plan.tp} neighbouring ranks, columns")
    print0(f"states: p={f.p} g={f.g} os={f.os} of {plan.state_ranks} ranks, "
           f"{cfg.per_node // plan.tp} a node; {cfg.os_layout}-tensor; optimizer states on the "
           f"{cfg.os_place}{there}; overlapped: {cfg.overlap}; recomputed: {cfg.recompute}")
    print0(f"batch: {plan.batch} sequences = {plan.dp} data-parallel ranks x "
           f"{plan.micro_batches} micro-batches x {plan.micro_batch}; sp={plan.sp} "
           f"ring={plan.ring}, "
           f"{plan.head_groups} head groups; {plan.tokens:,} tokens a rank at once")
    if plan.pp > 1:
        idle = (plan.pp - 1) / (plan.pp_chunks * plan.micro_batches + plan.pp - 1)
        print0(f"pipeline: {plan.pp} stages x {plan.pp_chunks} parts of {run.model.layers} layers, "
               f"{plan.micro_batches} micro-batches: idle {idle:.1%} if all passes take as long")
    if plan.activations:
        print0(f"activations: {plan.activations.describe()} of {plan.chunk:,} tokens; "
               f"{plan.host['activations'] / GIB:.1f} GiB of host memory a rank")
    print0(planner.describe_choice(plan, run.second, run.hardware))
    print0(f"memory a device: {planner.in_gib(plan)}: {plan.gpu_bytes / GIB:.2f} GiB in all",
           flush=True)


# ---------------------------------------------------------------------------- build, step


def make_groups(run: Run, made: dict[tuple[int, int], Groups]) -> Groups:
    """Return the groups of the plan's stages and columns, made once for all plans whose model is
    cut alike."""
    key = run.plan.tp, run.plan.pp
    if key not in made:
        made[key] = Groups(timedelta(seconds=run.cfg.timeout), *key)
    return made[key]


def make_attention(run: Run, groups: Groups,
                   make_stream: Callable[..., CommStream] = CommStream) -> Ulysses:
    """Return attention over the ranks of a sequence. A collective of all ranks."""
    return Ulysses(run.kernel, run.plan.sp, groups, make_stream(run.device), run.plan.head_groups,
                   run.cfg.per_node // run.plan.tp, run.plan.ring, make_stream(run.device))


def build(run: Run, op: Ulysses, groups: Groups,
          make_stream: Callable[..., CommStream] = CommStream) -> tuple[LLaMA | Pipeline, States]:
    """Make what this rank has of the model, with layers in chunks if that is planned, and its
    states; their streams are of make_stream. A collective of all ranks."""
    cfg = run.cfg
    plan = run.plan
    kept = plan.activations
    with torch.device("meta"):
        model = LLaMA(run.model, op)
    columns = parallel.Columns(plan.tp_mode, groups)
    on_all_ranks(lambda: parallel.split_columns(model, columns))
    parts = parallel.keep_stage(model, groups.stage, plan.pp, plan.pp_chunks)
    order = parallel.pipeline_order(groups.stage, plan.pp, plan.pp_chunks, plan.micro_batches)
    runners = on_all_ranks(lambda: layer_runners(run, model, parts, order, make_stream))
    model.layer_runner = runners[0]  # of one stage, the only one
    states = States(
        model, run.device, run.dtype, plan.micro_batches, plan.factors, plan.os_layout, groups,
        overlap=cfg.overlaps,
        gather_layers=kept is not None,
        num_chunks=kept.chunks if kept else 1, decay=cfg.weight_decay, place=plan.os_place,
        optimizer=OPTIMIZERS[plan.optimizer], make_stream=make_stream)
    states.on_phase = mark  # a layer's pass, for plans of two levels
    if plan.pp > 1:
        model = Pipeline(model, parts, runners, groups, order, run.device, run.dtype,
                         "pipeline" in cfg.overlaps)
    return model, states


def layer_runners(run: Run, model: LLaMA, parts: list[range], order: list[parallel.Pass],
                  make_stream: Callable[..., CommStream]) -> list[Callable]:
    """Return what runs the layers of each part of the model on this stage, whose passes are in this
    order. Raises MemoryError."""
    plan = run.plan
    kept = plan.activations
    if kept is None:
        return len(parts) * [whole_layers]
    shape = (plan.micro_batch, plan.seq // plan.sp)
    return [ChunkedLayers(model, shape, kept.of_part(len(part)), plan.chunk, run.device, run.dtype,
                          parallel.in_flight(order, v), part, make_stream).start
            for v, part in enumerate(parts)]


def warm_up(model: LLaMA | Pipeline, batch: "Batch") -> None:
    """Prepare what must be ready before stages wait for each other. Before a step."""
    if isinstance(model, Pipeline):
        model.warm_up(next(batch.micro_batches()))


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step."""

    tokens: Tensor  # (M, B, n): T/sp, or a column's own of them (own_tokens)
    labels: Tensor  # likewise
    positions: Tensor | None = None  # (T/sp,); (M, B, T/sp) of documents; None: 0, 1, ...
    documents: list[Documents] | None = None  # of each micro-batch
    scale: Tensor | None = None  # 1 / valid labels of all ranks
    seen: Tensor | None = None  # flops_per_token's, the mean of all ranks' tokens
    unread: str = ""  # why this rank could not read its part, which is blank then

    def micro_batches(self) -> Iterator[tuple]:
        """Yield tokens, labels, scale, positions and documents of each, as a model takes them."""
        for i, (tokens, labels) in enumerate(zip(self.tokens, self.labels)):
            if self.documents is None:
                yield tokens, labels, self.scale, self.positions
            else:
                yield tokens, labels, self.scale, self.positions[i], self.documents[i]


def run_step(model: LLaMA | Pipeline, states: States, batch: Batch, lr: float | None,
             clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Run forward, backward and update: the only step there is. lr None: no update. Returns the
    loss, the gradient's norm, and whether they are finite, on the device. In order, with what runs
    beside it:

        forward_backward   of each micro-batch first embedding, layers, head and loss; a Matrix
                           raises unshard before its use
                             beside it: host_update and param_broadcast of the last update,
                             param_gather, offload, all-to-alls
                           then the same in reverse; a layer's Matrix raises unshard, then add_grad
                             beside it: param_gather, grad_scatter, prefetch, all-to-alls
                             in the last micro-batch: grad_reduce
                           a stage of a pipeline alternates, in parallel.pipeline_order
        finish_gradients   compute waits for grad_scatter and grad_reduce; vectors' gradients
        update             global norm, clipping, the optimizer on what this rank owns, unit by unit
                             beside it, and under the next forward: param_broadcast; all of it,
                             if states lie on the host: host_update
    """
    states.begin_step()
    loss = model.forward_backward(batch.micro_batches())
    states.finish_gradients()
    dist.all_reduce(loss)
    if lr is None:
        return loss, torch.zeros_like(loss), torch.isfinite(loss)
    return loss, *states.update(lr, clip, loss)


def plan_memory(run: Run) -> StepMemory | None:
    """Return what plans a step's memory, for --memplan. Raises ConfigError if its allocator cannot
    be built. A collective of all ranks."""
    if run.cfg.memplan == "off":
        return None

    def load_allocator() -> StepMemory:
        try:
            library(run.device.type)
        except RuntimeError as e:
            raise ValueError(f"--memplan on: {e}") from None
        return StepMemory(str(run.device))

    return on_all_ranks(load_allocator)


def run_planned(memory: StepMemory | None, step: Callable[[], tuple]) -> tuple:
    """Run a step in planned memory, if there is any; print a plan that is new."""
    if memory is None:
        return step()
    plans = memory.plans
    result = memory.run(step)
    if memory.plans > plans:
        print0(f"memory plan of a step: {memory.plan}")
    return result


# ---------------------------------------------------------------------------- the loop


def local_positions(run: Run) -> np.ndarray:
    """Return where this rank's tokens (T/sp,) stand in their sequence."""
    plan = run.plan
    _, _, rank, _ = run.coordinates
    return sequence_positions(plan.seq, plan.sp, plan.ring, rank).numpy()


def own_tokens(run: Run) -> slice:
    """Return which of a rank's T/sp tokens its column has between layers' products."""
    plan = run.plan
    tokens = plan.seq // plan.sp
    if not plan.splits_tokens:
        return slice(0, tokens)
    _, _, _, column = run.coordinates
    return slice(column * tokens // plan.tp, (column + 1) * tokens // plan.tp)


def to_device(array: np.ndarray, run: Run) -> Tensor:
    """Return an array on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if run.device.type == "cuda":
        tensor = tensor.pin_memory().to(run.device, non_blocking=True)
    return tensor


def local_batch(windows: list[np.ndarray], run: Run) -> Batch:
    """Return this rank's part of windows (T + 1,), and of documents in them where they lie. Labels
    count on the last stage."""
    size = run.plan.micro_batch
    here = local_positions(run)
    both = np.stack([[window[here + shift] for window in windows] for shift in (0, 1)])
    both = to_device(both, run).view(2, -1, size, len(here))
    tokens, labels = both[..., own_tokens(run)].contiguous()
    labels = labels.masked_fill(labels == run.ignored_id, IGNORE)
    stage, _, _, _ = run.coordinates
    if stage < run.plan.pp - 1:
        labels.fill_(IGNORE)
    end = run.cfg.document_token
    if end < 0:
        return Batch(tokens, labels, to_device(here, run))
    bounds = [np.append(document_starts(window[:-1], end), run.cfg.seq) for window in windows]
    positions = np.stack([np.arange(run.cfg.seq) - np.repeat(b[:-1], np.diff(b)) for b in bounds])
    documents = []
    for first in range(0, len(windows), size):  # one row of a micro-batch's sequences
        row = [b[:-1] + i * run.cfg.seq for i, b in enumerate(bounds[first : first + size])]
        row = np.append(np.concatenate(row), size * run.cfg.seq)
        documents.append(Documents(tuple(row.tolist()), to_device(row.astype(np.int32), run)))
    return Batch(tokens, labels.masked_fill(tokens == end, IGNORE),
                 to_device(positions[:, here], run).view(-1, size, len(here)), documents)


def load_batch(run: Run, samples: int) -> Batch:
    """Return this rank's share of the next batch. samples: sequences that the run has seen, which
    alone decides what comes next. A collective of all ranks."""
    each = run.plan.batch // run.plan.dp
    _, data_rank, _, _ = run.coordinates
    first = samples + data_rank * each
    windows, unread = read_windows(run, run.train.sample, range(first, first + each))
    batch = local_batch(windows, run)
    lengths = each * [run.cfg.seq]
    if batch.documents is not None:
        lengths = [n for documents in batch.documents for n in documents.lengths()]
    seen = sum(n * n for n in lengths)
    sums = torch.stack([(batch.labels != IGNORE).sum().double(), torch.full(
        (), seen * run.plan.dp / run.world, device=run.device, dtype=torch.float64)])
    dist.all_reduce(sums)
    scale = 1 / sums[0].clamp(min=1).to(accumulation_dtype(run.dtype))
    return replace(batch, scale=scale, unread=unread,
                   seen=sums[1] / (run.plan.batch * run.cfg.seq))


def read_windows(run: Run, read: Callable[[int], np.ndarray],
                 ids: Iterable[int]) -> tuple[list[np.ndarray], str]:
    """Return windows (T + 1,), and why some could not be read: then they are blank, since other
    ranks count on this one's collectives until all know of it."""
    try:
        return [read(i) for i in ids], ""
    except OSError as e:  # a file has gone, or is shorter than it was
        return [np.zeros(run.cfg.seq + 1, np.int64) for _ in ids], str(e)


def score(run: Run, model: LLaMA, count: int):
    """Run the first `count` windows of the validation, whatever R. Yields of this rank's
    micro-batches positions, (n,) or (B, n), labels and losses (B, n), and why they could not be
    read. Ranks without one run a blank, whose labels are IGNORE. A collective of all ranks.
    """
    size = run.plan.micro_batch
    _, data_rank, _, _ = run.coordinates
    for first in range(0, count, run.plan.dp * size):
        mine = first + data_rank * size
        ids = [min(mine + i, count - 1) for i in range(size)]
        windows, unread = read_windows(run, run.val.window, ids)
        (tokens, labels, _, *where), = local_batch(windows, run).micro_batches()
        labels[[row for row in range(size) if mine + row >= count or unread]] = IGNORE
        losses = model(tokens, labels, None, *where, each=True)
        yield where[0][..., own_tokens(run)], labels, losses, unread


@torch.no_grad()
def evaluate(run: Run, model: LLaMA) -> dict:
    """Return what a row of the log says of a validation: the mean loss over the first sequences,
    None if all their labels are ignored; and that of positions from 0, 1, 2, 4, 8 ... on, in their
    document, as [first position, loss]. Raises ConfigError if a rank could not read its data. A
    collective of all ranks."""
    count = min(run.val.count, EVAL_SEQUENCES)
    firsts = 2 ** torch.arange((run.cfg.seq - 1).bit_length(), device=run.device)  # 1, 2, 4, ...
    total = torch.zeros(len(firsts) + 1, 2, dtype=torch.float64, device=run.device)  # loss, labels
    error = ""
    for positions, labels, losses, unread in score(run, model, count):
        error = error or unread
        both = torch.stack([losses.double(), (labels != IGNORE).double()], -1)  # (B, n, 2)
        part = torch.bucketize(positions, firsts, right=True)  # 0 for position 0
        total.index_add_(0, part.expand_as(labels).flatten(), both.flatten(0, 1))
    if error := error_of_any(error):
        raise ConfigError(error)
    dist.all_reduce(total)
    loss, valid = total.sum(0).tolist()
    by_position = [[first, loss / n]
                   for first, (loss, n) in zip([0, *firsts.tolist()], total.tolist()) if n]
    return {"val_loss": loss / valid if valid else None, "val_loss_by_position": by_position}


def describe_evaluation(found: dict) -> str:
    if found["val_loss"] is None:
        return "val_loss none (all labels are ignored)"
    return f"val_loss {found['val_loss']:.4f}"


def load_random_weights(run: Run, states: States) -> None:
    for name, shape in states.shapes.items():
        if states.holds(name):
            states.load(name, initial_weight(run.model, name, shape, run.cfg.seed, run.device))


def load_weights(run: Run, states: States) -> int:
    """Load the checkpoint to resume, else the first weights. Returns the step that they are of. A
    collective of all ranks."""
    cfg = run.cfg
    if run.resume is None:
        if run.pretrained:
            for name in states.shapes:  # one tensor at a time
                tensor = on_all_ranks(
                    lambda: run.pretrained(name) if states.holds(name) else None)
                if tensor is not None:
                    states.load(name, tensor)
        else:
            load_random_weights(run, states)
        print0(f"weights: {cfg.init}, seed {cfg.seed}")
        return 0
    checkpoint.load_checkpoint(states, run.resume)
    meta = run.resume.meta
    if meta["data"] != run.data:
        print0(f"THE DATA HAS CHANGED since the checkpoint: {meta['data']} then, {run.data} now; "
               "what was drawn may come again")
    then = meta["config"]
    changed = [f"{name} {then.get(name)} -> {value}" for name, value in values_of(cfg).items()
               if then.get(name) != value and name not in ("resume", "out", "device")]
    text = f"; changed: {', '.join(changed)}" if changed else ""
    print0(f"resumed {run.resume.folder} at step {meta['step']}{text}")
    threads = torch.get_num_threads()
    if run.device.type == "cpu" and meta["threads"] != threads:
        print0(f"it was saved by ranks of {meta['threads']} threads, these have {threads}: losses "
               "differ by the order of sums")
    return meta["step"]


def make_saver(run: Run, states: States) -> checkpoint.Saver:
    """Return what saves this run's checkpoints. A collective of all ranks."""
    cfg = run.cfg
    background = cfg.save_async and cfg.save_every >= 0
    if background:
        need = most_of_ranks(buffer_bytes(checkpoint.host_fields(states)), run.device)
        free = run.hardware.host_budget - run.plan.host_bytes
        background = need <= free
        print0(f"--save-async: copies take {need / GIB:.2f} GiB of host memory a rank, "
               f"{free / GIB:.2f} are left"
               + ("" if background else ": steps wait while checkpoints are written"))
    group = patient_group()
    return on_all_ranks(
        lambda: checkpoint.Saver(Path(cfg.out), cfg.keep, states, background, group))


def checkpoint_meta(run: Run, step: int, samples: int) -> dict:
    """Return what a resumed run must know."""
    return {"step": step, "samples": samples, "decay_steps": run.decay_steps, "data": run.data,
            "model": asdict(run.model), "config": values_of(run.cfg), "source": run.source,
            "threads": torch.get_num_threads()}


def learning_rate(cfg: Config, decay_steps: int, step: int) -> float:
    """Linear warm-up, then a cosine from lr to min_lr * lr at decay_steps; step counts from 0."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    done = min(1, (step - cfg.warmup) / max(1, decay_steps - cfg.warmup))
    return cfg.lr * (cfg.min_lr + (1 - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


class Progress(threading.Thread):
    """Shows where in a step the device is, for steps that take long: it polls, and nothing waits
    for it. A terminal gets one line that is rewritten, a file one every half minute."""

    def __init__(self, states: States, on: bool):
        super().__init__(daemon=True)
        self.states = states
        self.step = 0  # 0: between steps
        self.since = 0.0
        self.text = ""
        self.every = 1.0 if sys.stdout.isatty() else 30.0
        if on:
            self.start()

    def begin(self, step: int) -> None:
        self.since = time.perf_counter()
        self.text = ""
        self.step = step

    def end(self) -> None:
        self.step = 0

    def run(self) -> None:
        page = resource.getpagesize()
        while True:
            time.sleep(self.every)
            self.text = self.states.progress() or self.text
            if not (self.step and self.text and time.perf_counter() - self.since > self.every):
                continue
            host = int(Path("/proc/self/statm").read_text().split()[1]) * page / GIB
            gpu = 0.0
            if torch.cuda.is_initialized():
                gpu = (torch.cuda.memory_allocated() + Exchange.mapped_bytes()) / GIB
            line = (f"step {self.step}: {self.text}, {time.perf_counter() - self.since:.0f} s, GPU "
                    f"{gpu:.1f} GiB, host {host:.1f} GiB a rank")
            if self.every == 1:
                print(f"\r{line}\033[K", end="\r", flush=True)
            else:
                print(line, flush=True)


@dataclass
class Stop:
    """A signal that asks the run to end after its step."""

    signal: int = 0  # that this rank has got; all ranks agree on it at the end of a step

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self.take)
        signal.signal(signal.SIGINT, self.take)

    def take(self, number: int, _) -> None:
        if self.signal == signal.SIGINT == number and "RANK" not in os.environ:
            raise KeyboardInterrupt  # Ctrl-C twice: now (torchrun itself sends it twice)
        self.signal = number


@dataclass(frozen=True)
class Facts:
    """What the host knows of a finished step, of all ranks."""

    loss: float
    norm: float
    finite: float  # 0 or 1
    seen: float  # flops_per_token's
    signal: float  # that a rank has got, else 0
    writing: float  # whether a rank still writes a checkpoint
    unread: float  # whether a rank could not read the next batch
    gpu_gib: float  # of the rank that has most
    host_gib: float


def gpu_peak_gib(device: torch.device) -> float:
    """Return the peak of PyTorch's allocator with what ranks have mapped from each other, which
    lies outside it."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return (peak + Exchange.mapped_bytes()) / GIB


def agree(run: Run, result: tuple[Tensor, ...], stop: Stop, writing: bool, unread: bool) -> Facts:
    """Return what the host must know of a step: its only wait for the device, in one copy. result:
    the first facts. A collective of all ranks."""
    host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    worst = torch.tensor([stop.signal, writing, unread, gpu_peak_gib(run.device), host_gib],
                         device=run.device).double()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    own = torch.stack([value.double() for value in result])
    return Facts(*torch.cat([own, worst]).tolist())


@dataclass
class Log:
    """OUT/log.jsonl, and the line of a step."""

    run: Run
    file: typing.TextIO | None  # of rank 0
    failed: str = ""  # why log.jsonl could not be written
    times: list[float] = field(default_factory=list)  # of the last steps

    def write(self, step: int, facts: Facts, lr: float, seconds: float, first: int,
              found: dict | None, memory: StepMemory | None, unsaved: str = "") -> None:
        """Print and log a step; first: that this process has run; found: by an evaluation; unsaved:
        what is to be said of checkpoints."""
        cfg = self.run.cfg
        if step == first + 1:
            self.times.clear()  # the first one compiles
        self.times = self.times[-19:] + [seconds]
        left = timedelta(seconds=round(sum(self.times) / len(self.times) * (cfg.steps - step)))
        tgs = cfg.batch * cfg.seq / seconds / self.run.world
        peak = self.run.hardware.profile.peak_flops
        mfu = [flops * tgs / peak if peak else None
               for flops in flops_per_token(self.run.model, cfg.seq, facts.seen)]
        print0(" ".join(filter(None, [
            f"step {step}/{cfg.steps} loss {facts.loss:.4f} grad {facts.norm:.3f} lr {lr:.2e}",
            f"TGS {tgs:,.0f}",
            peak and f"MFU {mfu[0]:.1%} causal {mfu[1]:.1%} full",
            facts.gpu_gib and f"GPU {facts.gpu_gib:.1f} GiB",
            f"{seconds:.2f} s left {left}",
            found and describe_evaluation(found),
            not facts.finite and "SKIPPED: not finite",
            unsaved and f"({unsaved})",
            self.failed and f"({self.failed})"])), flush=True)
        row = {"step": step, "loss": facts.loss, "grad_norm": facts.norm, "lr": lr, "tgs": tgs,
               "mfu_causal": mfu[0], "mfu_full": mfu[1], "keys_seen": facts.seen,
               "gpu_gib": facts.gpu_gib or None,
               "host_gib": facts.host_gib, "seconds": seconds}
        row |= found or {}
        if not facts.finite:
            row["skipped"] = True
        if memory and memory.counts:
            row["memplan"] = memory.counts
        self.append(row)

    def write_evaluation(self, step: int, found: dict) -> None:
        """Print and log an evaluation without a step."""
        print0(f"step {step} {describe_evaluation(found)}", flush=True)
        self.append({"step": step} | found)

    def append(self, row: dict) -> None:
        """Write a row, on rank 0."""
        if self.file is None:
            return
        # null for numbers that are not finite, which JSON has not
        row = json.loads(json.dumps(row), parse_constant=lambda name: None)
        try:
            print(json.dumps(row), file=self.file, flush=True)
            self.failed = ""
        except OSError as e:  # the disk is full; what is not written is tried again with the next
            self.failed = f"log.jsonl cannot be written: {e.strerror}"

    def close(self) -> None:
        """Close the file, and draw what it holds."""
        if self.file is None:
            return
        out = Path(self.run.cfg.out)
        try:
            rows = self.file.tell()
            self.file.close()
            if rows:
                draw_losses(out)
                print0(f"wrote {out / 'log.jsonl'} and {out / 'loss.png'}")
        except (OSError, ValueError, TypeError, OverflowError) as e:  # full; or rows are not ours
            why = getattr(e, "strerror", None) or e
            print0(f"{out}: log.jsonl or loss.png could not be written: {why}")


def draw_losses(out: Path) -> None:
    """OUT/log.jsonl -> OUT/loss.png, and OUT/position.png if there was an evaluation."""
    rows, _ = checkpoint.read_log(out / "log.jsonl")
    lines = []
    for key, style in (("loss", "-"), ("val_loss", "o--")):
        points = sorted((r["step"], r[key]) for r in rows if r.get(key) is not None)
        lines.append((key.replace("_", " "), style, points))
    draw_lines(out / "loss.png", lines, xlabel="step")
    evaluated = [r for r in rows if r.get("val_loss_by_position")]
    lines = []
    for row in (evaluated[-1:] + evaluated[:1])[: len(evaluated)]:
        # a token at 2^k - 1, a bucket's last position, sees 2^k tokens
        points = [(max(1, 2 * first), loss) for first, loss in row["val_loss_by_position"]]
        lines.append((f"step {row['step']}", "o-", points))
    if lines:
        draw_lines(out / "position.png", lines, xlabel="tokens of context, at most", xbase=2)


def draw_lines(path: Path, lines: list[tuple], xlabel: str, xbase: int = 0) -> None:
    """Draw losses. lines: label, style, points (x, loss) of each; xbase: of a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4))
    for label, style, points in lines:
        if points:
            ax.plot(*zip(*points), style, markersize=4, label=label)
    if xbase:
        ax.set_xscale("log", base=xbase)
    ax.set(xlabel=xlabel, ylabel="cross-entropy, nats a token")
    if ax.lines:
        ax.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def introduce(run: Run) -> None:
    """Print the resolved flags, the model and the data."""
    cfg = run.cfg
    print0("config: " + " ".join(f"{name}={'auto' if value is None else value}"
                                 for name, value in values_of(cfg).items()))
    causal, full = flops_per_token(run.model, cfg.seq)
    print0(f"model {cfg.model}: {param_count(run.model):,} parameters, {causal:.3g} FLOPs a token "
           f"causal, {full:.3g} full, at {cfg.seq:,} tokens; on {device_name(run.device)}")
    reached = run.model.max_positions
    if cfg.seq > reached:
        kind = llama.rope_kind(run.model.rope_scaling).replace("default", "yarn")
        asked, _, factor = cfg.rope_scaling.partition(":")
        factor = float(factor) if asked == kind else 1.0
        print0(f"--seq {cfg.seq:,} is past the {reached:,} tokens that the rotary embedding reaches"
               f"; --rope-scaling {kind}:{math.ceil(factor * cfg.seq / reached)} extends it")
    if cfg.document_token >= 0:
        print0(f"documents end with token {cfg.document_token}: attention stays inside them, which "
               "MFU counts; predicted are times of sequences that are one each")
    as_tokens = f" as {run.tokens}" if run.tokens else ""
    print0(f"data {cfg.data}{as_tokens}: {len(run.train.corpus):,} tokens, {run.train.count:,} "
           f"training and {run.val.count:,} validation sequences of {cfg.seq:,}")
    if cfg.model == "hf" and run.train.corpus.dtype.itemsize == 1 and run.model.vocab != 256:
        has_one = (Path(cfg.import_folder) / "tokenizer.json").exists()
        print0(f"bytes are read as ids of {cfg.init}, which they hardly are: --tokenizer "
               f"{cfg.import_folder if has_one else 'DIR'} makes tokens of the text")
    if are_ids(run.train.corpus.files) and not run.tokens:
        others = [f for f in Path(cfg.data).rglob("*") if f.is_file() and f.suffix != ".bin"
                  and not f.name.endswith(".bin.json")]
        if others or cfg.tokenizer:
            print0(f"--data {cfg.data} is read as ids: {len(others)} other files there are not "
                   "read, nor is --tokenizer")
    if run.model.tied:
        print0("the head of the import is its embedding: here they are trained as two matrices, "
               "and exported as two unless they are still equal")


def due(step: int, every: int) -> bool:
    """Whether this step is one of every so many; none is, if that is 0 or -1."""
    return every > 0 and step % every == 0


def train(run: Run, model: LLaMA, states: States, saver: checkpoint.Saver, start: int) -> str:
    """Run the steps after `start`, with evaluations and checkpoints. Returns what went wrong: too
    many steps in a row were not finite, the data cannot be read any more, or the last checkpoint
    was not saved. A collective of all ranks."""
    cfg = run.cfg
    log = Log(run, open(regular(Path(cfg.out) / "log.jsonl"), "a") if run.rank == 0 else None)
    gc.collect()
    gc.freeze()  # what lives until the end need not be walked by every collection
    samples = run.samples
    if start < cfg.steps:
        batch = load_batch(run, samples)
        if error := error_of_any(batch.unread):
            raise ConfigError(error)
    stop = Stop()
    stop.listen()  # until here there is nothing to save
    clock = time.perf_counter()
    progress = Progress(states, run.rank == 0)
    memory = plan_memory(run)
    if start < cfg.steps:
        warm_up(model, batch)
    elif cfg.eval_every > 0:
        log.write_evaluation(start, evaluate(run, model))
    saved = step = start
    skipped = in_a_row = 0
    unread = ""  # why the data cannot be read any more
    while step < cfg.steps:
        # ---- the step, and while the GPU works at it the next batch
        step += 1
        progress.begin(step)
        lr = learning_rate(cfg, run.decay_steps, step - 1)
        work = functools.partial(run_step, model, states, batch, lr, cfg.clip)
        result = *run_planned(memory, work), batch.seen
        del work  # it holds the batch
        samples += cfg.batch
        if step < cfg.steps:
            batch = load_batch(run, samples)
        facts = agree(run, result, stop, saver.writing, bool(batch.unread))
        if not facts.finite:
            states.check_uses()
        seconds = time.perf_counter() - clock
        progress.end()

        # ---- what follows from it
        skipped += not facts.finite
        in_a_row = 0 if facts.finite else in_a_row + 1
        unread = error_of_any(batch.unread) if facts.unread else ""
        evaluates = due(step, cfg.eval_every) or (step == cfg.steps and cfg.eval_every >= 0)

        # ---- evaluate, log, save
        if memory and (evaluates or unread or facts.signal or in_a_row == MAX_SKIPS
                       or due(step, cfg.save_every)):
            memory.give_back()  # what is not a step must not starve beside the arena
        found = None
        if evaluates:
            try:
                found = evaluate(run, model)
            except ConfigError as e:
                unread = str(e)
        ends = facts.signal or in_a_row == MAX_SKIPS or unread
        saves = due(step, cfg.save_every) or (ends and cfg.save_every >= 0)
        if not facts.writing:
            saver.finish()
        log.write(step, facts, lr, seconds, start + 1, found, memory, saver.failed)
        if facts.signal:
            print0(f"stopped by {signal.Signals(int(facts.signal)).name} after step {step}")
        if in_a_row == MAX_SKIPS:
            print0(f"{in_a_row} steps in a row were not finite: the run ends here")
        if unread:
            print0(f"the data cannot be read any more, the run ends after step {step}: {unread}")
        if saves:
            saver.begin(checkpoint_meta(run, step, samples))
            saved = step
        if ends:
            break
        clock = time.perf_counter()

    # ---- what is left to save, draw, export
    if memory:
        memory.give_back()
    saver.finish()
    first_weights = step == 0 and not run.resume and not cfg.evaluates_alone  # of --steps 0
    if cfg.save_every >= 0 and (saved != step or saver.failed or first_weights):
        saver.begin(checkpoint_meta(run, step, samples))
        saver.finish()
    if skipped:
        print0(f"{skipped} steps were skipped: the loss or the gradient was not finite")
    log.close()
    if cfg.export and step >= cfg.steps and in_a_row < MAX_SKIPS:
        export(run, states, saver.group)
    if in_a_row == MAX_SKIPS:
        return "the loss or the gradient was not finite; see the log"
    return unread or saver.failed


def export(run: Run, states: States, group: dist.ProcessGroup) -> None:
    """Write the weights to --export, with what the import had beside them. A collective."""
    cfg = run.cfg
    # what made the data goes before
    beside = [Path(folder) for folder in (cfg.import_folder, cfg.tokenizer) if folder]
    if cfg.import_folder and not beside[0].is_dir():
        print0(f"{beside[0]} is not there any more: the export has no tokenizer and no license of "
               "it")
    checkpoint.export(Path(cfg.export), run.model, states, run.dtype, run.source, beside, group)
    kind = checkpoint.hf_architecture(run.model, run.source)
    print0(f"exported {cfg.export}: {kind}, {cfg.dtype}")


def build_and_train(run: Run) -> str:
    """Build what is planned, load weights, and train. Returns what went wrong. A collective of all
    ranks."""
    cfg = run.cfg
    fused = cfg.compile and run.device.type == "cuda"
    torch.compiler.set_stance("default" if fused else "force_eager")
    print0(f"attention kernel: {run.kernel}; element-wise parts: "
           f"{'compiled' if fused else 'eager'}")
    groups = make_groups(run, {})
    op = make_attention(run, groups)
    describe(run)
    model, states = build(run, op, groups)
    if states.imbalance:
        print0(f"optimizer states: the largest share is {states.imbalance:.1%} above the mean")
    start = load_weights(run, states)
    if start >= cfg.steps > 0:
        print0(f"nothing to train: at step {start} of {cfg.steps}")
    on_rank_0(lambda: checkpoint.prepare_out(Path(cfg.out), run.resume, start < cfg.steps))
    saver = make_saver(run, states)
    return train(run, model, states, saver, start)


def run_ranks(cfg: Config, rank: int, world: int, local_rank: int) -> str:
    """Do what the flags say. Returns what went wrong. A collective of all ranks."""
    on_all_ranks(lambda: check_flags(cfg))
    check_same({flag_name(name): value for name, value in values_of(cfg).items()
                if name not in ("host_memory", "gpu_memory")})  # of these the smallest counts
    # rank 0's choice: for a minute, another node may see a shared folder as it was
    resumed = on_rank_0(lambda: checkpoint.find_checkpoint(Path(cfg.out), cfg.resume))
    run = on_all_ranks(lambda: machine(cfg, rank, cfg.ranks or world, local_rank, resumed))
    run = with_tokens(run)
    run = on_all_ranks(lambda: with_files(run, resumed))
    check_same({"the data": run.data, "the model": run.model, "--per-node": run.cfg.per_node,
                "--attention": run.kernel})
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
        expandable_segments()
    run = with_plan(with_hardware(run))
    cap_gpu(run)
    introduce(run)
    if cfg.dry_run:
        describe(run)
        return ""

    with contextlib.ExitStack() as lock:  # of OUT, for this run
        on_rank_0(lambda: lock.enter_context(checkpoint.locked(Path(cfg.out))))
        if cfg.save_every >= 0:
            checkpoint.check_shared(Path(cfg.out))
        trouble = build_and_train(run)
    dist.barrier()
    return trouble


def main(argv: list[str] | None = None) -> None:
    cfg = parse(argv)
    # any other is refused, as all flags are, once ranks have met
    timeout = cfg.timeout if TIMEOUTS[0] <= cfg.timeout <= TIMEOUTS[1] else Config.timeout
    if cfg.pp != 1:
        parallel.use_more_queues()
    rank, world, local_rank = start_ranks(timeout)
    saved = "What was saved is whole: start it again, or continue with --resume"
    with Heartbeat(rank, world, saved):
        trouble = run_ranks(cfg, rank, world, local_rank)
    dist.destroy_process_group()
    if trouble:
        sys.exit(f"train.py: {trouble}" if rank == 0 else 1)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: error: {e}", file=sys.stderr)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted; what was saved is whole: continue with --resume")
    except torch.OutOfMemoryError as e:
        arena = live_arena.get("cuda")
        held = "" if arena is None else f", and --memplan holds {arena.nbytes / GIB:.2f} GiB"
        sys.exit(f"train.py: out of GPU memory: {e}\nThe line 'memory a device' above says what "
                 f"was planned{held}. Shorten --seq, lower --micro-batch, --chunk, --alpha or "
                 "--resident-layers, or use more GPUs or a larger --sp. What was saved is whole: "
                 "continue with --resume.")
