"""What is on disk? Checkpoints that resume under any factors, and Hugging Face's files.

    OUT/step-00000100/   a step's states, in parts that other factors can read (shard.Flat)
        meta.json        step, samples seen, model, flags, size of every file
    OUT/latest           a link to the newest
    OUT/log.jsonl        a line a step
    OUT/lock             held by the run that writes here

A checkpoint is written under another name, synced, and renamed; then the link is replaced. Both are
atomic, so what `latest` names is whole at any moment, whoever is killed. Hugging Face's files
are read and written one tensor at a time; ours are fused: qkv holds q, k and v, gate_up two
matrices.

    find_checkpoint(...) -> folder      load_checkpoint(states, folder)      save_checkpoint(...)
    hf_config(folder) -> ModelConfig    hf_open(folder, config) -> read      hf_export(...)

Left out: checkpoints that are written while training goes on, and other models' files.
"""
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from model import LLaMA, ModelConfig, rope_frequencies
from offload import GIB
from shard import States

# ---------------------------------------------------------------------------- checkpoints


def sync_folder(path: Path) -> None:
    """Bring names in a folder to the disk, where they do not go with the files."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_meta(folder: Path) -> dict:
    """Return a checkpoint's meta.json. Raises ValueError if it is not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        missing = {"files", "model", "config", "step"} - set(meta)
    except (OSError, ValueError, TypeError) as e:
        raise ValueError(f"--resume: {folder} is not a whole checkpoint: {e}") from e
    if missing:
        raise ValueError(f"--resume: {folder} is not a whole checkpoint: no {sorted(missing)}")
    return meta


def check_whole(folder: Path) -> dict:
    """Return a checkpoint's meta.json. Raises ValueError if a file is missing or cut short."""
    meta = read_meta(folder)
    for name, size in meta["files"].items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise ValueError(
                f"--resume: {folder / name} {what}; earlier checkpoints are beside it")
    return meta


def save_number(meta: dict) -> tuple[int, int]:
    """Return what orders checkpoints by when they were saved, whatever the clock says, and also
    where a run went back to an earlier step: their number, or of older files the step."""
    return meta.get("number", 0), meta["step"]


def whole_checkpoints(out: Path) -> list[Path]:
    """Return the whole checkpoints of a folder, in the order in which they were saved."""
    found = []
    for folder in out.glob("step-*"):
        if not re.fullmatch(r"step-\d{8}(-\d+)?", folder.name):
            continue  # being written or deleted
        try:
            found.append((save_number(check_whole(folder)), folder))
        except ValueError:
            continue  # torn: it neither counts nor displaces others
    return [folder for _, folder in sorted(found)]


def save_checkpoint(out: Path, keep: int, states: States, meta: dict) -> None:
    """Write the states of step meta["step"], let OUT/latest name them, and delete all but the last
    `keep`. meta: what a resumed run must know, as JSON. A collective of all ranks."""
    writing = out / f"step-{meta['step']:08d}.tmp"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
    dist.barrier()  # the folder is there
    dcp.save(states.state_dict(), checkpoint_id=writing)
    dist.barrier()  # all ranks' files are there
    if rank == 0:
        sizes = {file.name: file.stat().st_size for file in writing.iterdir()}
        earlier = [save_number(read_meta(folder))[0] for folder in whole_checkpoints(out)]
        more = {"number": max(earlier, default=0) + 1, "files": sizes}
        write_synced(writing / "meta.json", json.dumps(meta | more, indent=1))
        sync_folder(writing)
        publish(out, keep, writing)
    dist.barrier()  # nobody goes on, and is killed, before `latest` names it


def publish(out: Path, keep: int, writing: Path) -> None:
    """Give a whole checkpoint its name, let OUT/latest name it, and delete old ones."""
    name = writing.name.removesuffix(".tmp")
    final = out / name
    branch = 0
    while final.exists():  # an earlier branch of this run: `latest` may name it
        branch += 1
        final = out / f"{name}-{branch}"
    os.rename(writing, final)
    link = out / "latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    sync_folder(out)  # the folder that it names is on disk before the link is
    os.replace(link, out / "latest")
    sync_folder(out)
    for old in whole_checkpoints(out)[:-keep]:
        torn = old.with_name(f"{old.name}.old")
        os.rename(old, torn)  # killed while it deletes, this leaves nothing that looks whole
        shutil.rmtree(torn)
    print(f"saved {final}", flush=True)


def load_checkpoint(states: States, folder: Path) -> None:
    """Read states from a checkpoint of any factors and ranks. A collective of all ranks."""
    dcp.load(states.state_dict(), checkpoint_id=folder)
    states.loaded()


def newest_checkpoint(out: Path) -> Path | None:
    """Return the checkpoint that OUT/latest names, or if that leads nowhere the newest whole one;
    None if there is none. Raises ValueError if `latest` names one that is not whole."""
    try:
        folder = (out / "latest").resolve(strict=True)
    except (OSError, RuntimeError) as e:  # not there; dangling; a link to itself
        whole = whole_checkpoints(out)
        if whole and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"{out / 'latest'} leads nowhere ({type(e).__name__}): {whole[-1]} is the newest "
                  "whole checkpoint", flush=True)
        return whole[-1] if whole else None
    check_whole(folder)
    return folder


def find_checkpoint(out: Path, resume: str, launch: str) -> Path | None:
    """Return the whole checkpoint to continue from, or None. resume: never, latest, auto (latest,
    if there is one) or a folder. launch: what started the ranks (train.launch_name); what the same
    launch has saved, before torchrun restarted them, goes before what `resume` says. Raises
    ValueError."""
    whole = whole_checkpoints(out) if launch else []
    if whole and set(launch.split("; ")) & set(read_meta(whole[-1]).get("launch", "").split("; ")):
        return whole[-1]
    if resume == "never":
        return None
    if resume in ("auto", "latest"):
        folder = newest_checkpoint(out)
        if folder is None and resume == "latest":
            raise ValueError(f"--resume {resume}: there is no checkpoint in {out}")
        return folder
    folder = Path(resume)
    if not folder.exists():
        raise ValueError(f"--resume {resume}: there is no {folder}")
    check_whole(folder)
    return folder


def check_same_model(folder: Path, model: ModelConfig, may_differ: set[str]) -> None:
    """Raise ValueError if a checkpoint is of another model. may_differ: fields that flags set, and
    those that change no weight."""
    meta = read_meta(folder)
    ours = dataclasses.asdict(model)
    defaults = {f.name: f.default for f in fields(ModelConfig)}
    theirs = defaults | meta["model"]  # a field that is newer than the checkpoint has its default
    wrong = [f"{name} {value} (here {ours.get(name, 'unknown')})" for name, value in theirs.items()
             if name not in may_differ and (name not in ours or value != ours[name])]
    if wrong:
        made = meta["config"]
        source = "--model " + made["model"]
        if made["model"] == "hf":
            source = "--init " + made["init"]
        raise ValueError(f"--resume: {folder} is of another model: {', '.join(wrong)}; it was made "
                         f"with {source}")


def prepare_out(out: Path, resumed: Path | None, step: int) -> None:
    """Clear what a killed run left. Of the run that goes on here, keep the log up to the step that
    it resumes; put any other run aside."""
    for torn in (*out.glob("step-*.tmp"), *out.glob("step-*.old")):
        shutil.rmtree(torn)
    (out / "latest.tmp").unlink(missing_ok=True)
    log = out / "log.jsonl"
    if resumed is None or resumed.parent.resolve() != out.resolve():
        put_aside(out)
    elif log.exists():
        kept = [line for line in log.read_text().splitlines(True)
                if line.endswith("}\n") and json.loads(line)["step"] <= step]
        (out / "log.tmp").write_text("".join(kept))
        os.replace(out / "log.tmp", log)


@contextlib.contextmanager
def locked(out: Path):
    """Hold OUT for one run. Raises ValueError, with who has it, if another run does. The lock is
    the system's: it goes with the process, however that ends, so none is ever stale. Storage that
    has no locks (some shared file systems) is said, and not guarded."""
    file = open(out / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ValueError(f"--out {out}: another run writes there ({owner}); name another "
                         "--out") from None
    except OSError as e:
        print(f"--out {out}: not guarded against a second run: {e}", flush=True)
    file.truncate(0)
    file.write(f"host {os.uname().nodename}, process {os.getpid()}, since {time.ctime()}\n")
    file.flush()
    try:
        yield
    finally:
        file.close()


def put_aside(out: Path) -> None:
    """Move an earlier run in OUT to OUT/earlier-N."""
    files = [out / name for name in ("log.jsonl", "loss.png", "latest")] + [*out.glob("step-*")]
    old = [path for path in files if path.is_symlink() or path.exists()]
    if not old:
        return
    n = 1
    while (out / f"earlier-{n}").exists():
        n += 1
    aside = out / f"earlier-{n}"
    aside.mkdir()
    for path in old:
        os.rename(path, aside / path.name)
    print(f"moved an earlier run to {aside}")


def check_disk(need: dict[Path, float]) -> None:
    """Compare what will be written to each folder, in bytes, with what is free on the disks that
    they lie on. Raises ValueError."""
    by_disk: dict[int, list[Path]] = {}
    for folder in need:
        by_disk.setdefault(os.stat(folder).st_dev, []).append(folder)
    for folders in by_disk.values():
        free = shutil.disk_usage(folders[0]).free
        wanted = sum(need[folder] for folder in folders)
        if wanted > free:
            names = " and ".join(map(str, folders))
            raise ValueError(
                f"{names}: {free / GIB:.1f} GiB are free, and {wanted / GIB:.1f} will be written: "
                "name another --out or --export, save less often (--save-every), keep fewer "
                "(--keep), or save none (--save-every -1)")


# ---------------------------------------------------------------------------- Hugging Face files

_HF = {  # our matrix: theirs, whose rows follow one another in it
    "embed": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"],
    "norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


_HF_KEYS = {  # our field: its key in config.json
    "vocab": "vocab_size", "dim": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "ffn": "intermediate_size",
    "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling", "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}


def _hf_parts(cfg: ModelConfig, name: str, rows: int) -> list[tuple[str, int]]:
    """Return (their name, rows) of each part of our parameter."""
    *layer, leaf, _ = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    qkv = [n * cfg.head_dim for n in (cfg.heads, cfg.kv_heads, cfg.kv_heads)]
    split = {"qkv": qkv, "gate_up": [cfg.ffn, cfg.ffn]}.get(leaf, [rows])
    return [(f"{prefix}{part}.weight", n) for part, n in zip(_HF[leaf], split)]


def hf_config(folder: str) -> ModelConfig:
    """Read config.json of a LLaMA checkpoint. Raises ValueError for what this model does not
    compute."""
    try:
        c = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{folder}/config.json cannot be read: {e}") from e
    for key, ours in (("model_type", "llama"), ("hidden_act", "silu"), ("attention_bias", False),
                      ("mlp_bias", False)):
        if c.get(key, ours) != ours:
            raise ValueError(f"{folder}/config.json: {key} is {c[key]!r}; only {ours!r} is built")
    known = {"rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast",
             "beta_slow", "attention_factor", "low_freq_factor", "high_freq_factor"}
    try:
        # transformers 5 keeps all of rope in rope_parameters, transformers 4 in two places
        rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", c.get("rope_theta", 10000.0))
        rope = {} if rope.get("rope_type", rope.get("type")) == "default" else rope
        if rope.keys() - known:
            raise ValueError(f"rope scaling with {sorted(rope.keys() - known)} is not built")
        if rope and not rope.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = c["max_position_embeddings"]
        heads = c["num_attention_heads"]
        dim = c["hidden_size"]
        cfg = ModelConfig(
            vocab=c["vocab_size"], dim=dim, layers=c["num_hidden_layers"], heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads, ffn=c["intermediate_size"],
            head_dim=c.get("head_dim") or dim // heads, norm_eps=c.get("rms_norm_eps", 1e-6),
            rope_theta=theta, rope_scaling=rope,
            max_positions=c.get("max_position_embeddings", 2048),
            tied=c.get("tie_word_embeddings", False))
        rope_frequencies(cfg)  # refuses a scaling that it does not know
        return cfg
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, ValueError) as e:
        raise ValueError(f"{folder}/config.json: {type(e).__name__}: {e}") from e


def hf_open(folder: str, cfg: ModelConfig) -> Callable[[str], Tensor]:
    """Check all files, names and shapes against cfg; return name -> tensor, read when it is called.

    So no more than one tensor is in memory at a time. Raises ValueError naming what is missing,
    truncated, misshapen or left over.
    """
    from safetensors import SafetensorError, safe_open

    root = Path(folder)
    files = {}
    index = root / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())
                       if index.exists() else {"model.safetensors"})
        for file in names:
            f = safe_open(root / file, "pt")
            files.update(dict.fromkeys(f.keys(), f))
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise ValueError(f"{folder}: weights missing or truncated: {type(e).__name__}: {e}") from e
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in LLaMA(cfg).named_parameters()}
    stored = {"lm_head.weight": "model.embed_tokens.weight"} if cfg.tied else {}
    used = set(stored)
    for name, shape in shapes.items():
        for part, rows in _hf_parts(cfg, name, shape[0]):
            used.add(part)
            want = (rows, *shape[1:])
            source = stored.get(part, part)
            if files.get(source) is None:
                raise ValueError(f"{folder}: no tensor {part} {want} in the weights")
            got = tuple(files[source].get_slice(source).get_shape())
            if got != want:
                raise ValueError(f"{folder}: {part} is {got}, config.json says {want}")
    if extra := {n for n in set(files) - used if "rotary_emb" not in n}:
        raise ValueError(f"{folder}: {len(extra)} tensors have no place here: {sorted(extra)[:3]}")

    def read(name: str) -> Tensor:
        parts = (stored.get(p, p) for p, _ in _hf_parts(cfg, name, shapes[name][0]))
        parts = [files[p].get_tensor(p) for p in parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return read


def check_exportable(cfg: ModelConfig) -> None:
    """Raise ValueError for a field of the model that config.json has no key for: an export would
    drop it in silence."""
    for f in fields(ModelConfig):
        if f.name not in _HF_KEYS and getattr(cfg, f.name) != f.default:
            raise ValueError(f"--export: a LLaMA's config.json has no key for {f.name}="
                             f"{getattr(cfg, f.name)!r}; what reads it would compute another model")

HF_FILE_BYTES = 4 * 2**30  # one file of an export


def hf_files(shapes: dict[str, torch.Size], itemsize: int) -> dict[str, list[str]]:
    """Return our parameters by the file that they go to: in order, HF_FILE_BYTES a file."""
    groups: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = shape.numel() * itemsize
        if not groups or size > room:
            groups.append([])
            room = HF_FILE_BYTES
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names
            for i, names in enumerate(groups, 1)}


def hf_settings(cfg: ModelConfig, source: dict, dtype: torch.dtype, tied: bool) -> dict:
    """Return config.json, which transformers 4 and 5 read. source: that of the import, or {}."""
    rope = cfg.rope_scaling or {"rope_type": "default"}
    name = str(dtype).removeprefix("torch.")
    ours = {theirs: getattr(cfg, ours) for ours, theirs in _HF_KEYS.items()}
    return source | ours | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "tie_word_embeddings": tied, "attention_bias": False, "mlp_bias": False,
        "torch_dtype": name,  # transformers 4
        "dtype": name,  # transformers 5
        "rope_scaling": cfg.rope_scaling or None,  # 4
        "rope_parameters": {"rope_theta": cfg.rope_theta, **rope},  # 5
    }


def hf_export(folder: Path, cfg: ModelConfig, read: Callable[[str], Tensor], dtype: torch.dtype,
              write: bool = True, source: Path | None = None) -> None:
    """Write config.json and safetensors, file by file.

    read(name) -> the full tensor; where ranks read together, all call this and one has write=True.
    An imported tied head that still equals the embedding is tied again. source: the folder of the
    import, whose tokenizer, other settings and dtype go along.
    """
    from safetensors.torch import save_file

    settings = json.loads((source / "config.json").read_text()) if source else {}
    stored = settings.get("dtype") or settings.get("torch_dtype") or str(dtype)
    dtype = getattr(torch, stored.removeprefix("torch."))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LLaMA(cfg).named_parameters()}
    tied = cfg.tied and torch.equal(read("embed.weight"), read("head.weight"))
    if tied:
        del shapes["head.weight"]
    if write:
        folder.mkdir(parents=True, exist_ok=True)
    places = {}  # their name: file
    total = 0
    for file, names in hf_files(shapes, dtype.itemsize).items():
        tensors = {}
        for name in names:
            tensor = read(name)
            if write:
                theirs, rows = zip(*_hf_parts(cfg, name, shapes[name][0]))
                parts = tensor.to("cpu", dtype).split(rows)
                tensors |= {part: t.contiguous() for part, t in zip(theirs, parts)}
        if write:
            save_file(tensors, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
            total += sum(t.nbytes for t in tensors.values())
    if not write:
        return
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for pattern in ("*token*", "generation_config.json", "chat_template*"):
        for file in source.glob(pattern) if source else []:
            if file.is_file():
                shutil.copy(file, folder)
    config = hf_settings(cfg, settings, dtype, tied)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def export(folder: Path, cfg: ModelConfig, states: States, dtype: torch.dtype,
           source: Path | None) -> None:
    """Write the weights as a Hugging Face checkpoint, all of it or nothing. A collective."""
    writes = dist.get_rank() == 0
    partial = folder / "partial"  # its files move up when all are there
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
    hf_export(partial, cfg, states.full, dtype, writes, source)
    if writes:
        for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, folder / file.name)
        partial.rmdir()
