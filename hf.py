"""Hugging Face's folders: read a model from one, extend its length, write one.

Exactly or not at all: an imported model has the logits that transformers computes, up to rounding,
and so has an exported one. Otherwise a ValueError names what stands in the way: a key, a tensor, a
file, or the difference of the logits of a small model (`check_export`).

    cfg, source = read_config(folder)          config.json -> ModelConfig
    read = open_weights(folder, cfg)           name -> tensor; one tensor is in memory at a time
    export(folder, cfg, read, ...)             config.json, safetensors, tokenizer, license

Our matrices are fused, theirs are not: qkv holds the rows of q_proj, k_proj and v_proj one after
the other, gate_up those of gate_proj and up_proj (the table _HF).

Left out: other architectures than those of _FAMILIES; weights in pickles, which may run code;
exports for transformers 4, which would read an export without its rotary base and scaling.
"""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from checkpoint import is_finite, pack, write_tensors
from data import fresh_folder, own_file
from model import ROPE_KEYS, ROPE_OPTIONS, LLaMA, ModelConfig, rope_kind
from ranks import on_rank_0

# ---------------------------------------------------------------------------- names and keys

_HF = {  # our weight: theirs, whose rows follow one another in it
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "qkv_bias": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "gate_up": "mlp.gate_proj mlp.up_proj",
    "down": "mlp.down_proj",
}
_HF_KEYS = {  # our field: its key in config.json
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "head_dim": "head_dim",
}
_FAMILIES = {  # of transformers: our fields that it implies; from scratch, the first that fits
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "llama": {},
    "mistral": {},
}
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,  # all that is built
    "quantization_config": None,
    "is_heterogeneous": False,
}
_BESIDE = (
    r"tokenizer.*|(special_tokens_map|added_tokens|vocab|tekken|generation_config)\.json"
    r"|merges\.txt|chat_template.*|(LICENSE|NOTICE|USE_POLICY).*"
)  # goes along

# ---------------------------------------------------------------------------- in


def read_config(folder: str) -> tuple[ModelConfig, dict]:
    """Return the model of a folder's config.json, and all that this says, as transformers completes
    it. Raises ValueError for what is not built."""
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.exists():
        raise ValueError(
            f"--init hf:{folder}: there is no {path}; `hf download NAME --local-dir "
            "DIR` makes a folder for --init hf:DIR"
        )
    try:
        config = AutoConfig.from_pretrained(
            own_file(path, path.parent).parent, local_files_only=True, trust_remote_code=False
        )
        source = json.loads(config.to_json_string())
        return model_of(source), source
    except Exception as e:  # its errors have no class of their own
        raise ValueError(f"{path} cannot be read or is not built: {e}") from e


def model_of(source: dict) -> ModelConfig:
    """Return the model of what an import's config.json said. Raises ValueError."""
    try:
        return _model_of(source)
    except ValueError:
        raise
    except Exception as e:  # transformers' errors have no class of their own
        raise ValueError(f"transformers refuses its config.json: {e}") from e


def _model_of(source: dict) -> ModelConfig:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**source)
    if config.model_type not in _FAMILIES:
        raise ValueError(
            f"model_type is {config.model_type!r}; one of {', '.join(_FAMILIES)} is built"
        )
    for key, only in _FIXED.items():
        if getattr(config, key, only) != only:
            raise ValueError(f"{key} is {getattr(config, key)!r}; only {only!r} is built")
    rope = {
        key: value
        for key, value in config.rope_parameters.items()
        if value is not None and key not in ("type", "finetuned")
    }  # no frequency reads these
    theta = rope.pop("rope_theta")
    kind = rope["rope_type"]
    if unknown := rope.keys() - {"rope_type", *ROPE_KEYS.get(kind, ()), *ROPE_OPTIONS}:
        raise ValueError(f"rope_parameters of type {kind!r} with {sorted(unknown)} are not built")
    reach = config.max_position_embeddings
    if kind == "yarn":  # whether or not the file says it
        reach = round(rope["original_max_position_embeddings"] * rope["factor"])
    keys = {"head_dim": config.hidden_size // config.num_attention_heads} | config.to_dict()
    return ModelConfig(
        **{ours: keys[key] for ours, key in _HF_KEYS.items()},
        **_FAMILIES[config.model_type],
        max_positions=reach,
        rope_theta=theta,
        rope_scaling={} if kind == "default" else rope,
    )


def sliding_window(source: dict) -> int:
    """Return how many tokens a token attends to, itself among them, in layers with a sliding window
    of an import; 0: no layer has one. source: of read_config, or {}."""
    slides = source.get("model_type") == "mistral" or "sliding_attention" in source.get(
        "layer_types", []
    )
    return slides and source["sliding_window"] or 0


def parts_of(cfg: ModelConfig) -> dict[str, dict[str, tuple]]:
    """Return {our weight: {their weight: its shape}}. Raises ValueError if _HF lacks one."""
    with torch.device("meta"):
        shapes = LLaMA(cfg).shapes
    parts = {}
    kv = cfg.kv_heads * cfg.head_dim
    for name, (rows, *cols) in shapes.items():
        *layer, leaf, _ = name.split(".")
        if leaf not in _HF:
            raise ValueError(
                f"{name}: Hugging Face's files have no {leaf!r}, only {', '.join(_HF)} (hf._HF)"
            )
        prefix = f"model.layers.{layer[1]}." if layer else ""
        suffix = "bias" if leaf == "qkv_bias" else "weight"
        theirs = _HF[leaf].split()
        counts = len(theirs) * [rows // len(theirs)]
        if len(theirs) == 3:
            counts = [rows - 2 * kv, kv, kv]
        parts[name] = {
            f"{prefix}{part}.{suffix}": (count, *cols) for part, count in zip(theirs, counts)
        }
    return parts


def open_weights(folder: str, cfg: ModelConfig) -> Callable[[str], Tensor]:
    """Check all files, names, dtypes and shapes against cfg; return name -> tensor, read when it is
    called.

    So no more than one tensor is in memory at a time. Raises ValueError naming what is missing,
    truncated, misshapen or left over; a read raises it for what is not finite.
    """
    stored = {}  # their name: the tensor, read when it is taken
    # where model.safetensors lies beside model-00001-of-... it is what counts, as in transformers
    for path in sorted(Path(folder).glob("model*.safetensors")):
        try:
            file = safe_open(own_file(path, path.parent), "pt")
            stored |= {
                part: file.get_slice(part)
                for part in file.keys()
                if not part.endswith("rotary_emb.inv_freq")
            }
        except Exception as e:  # whatever such a file may hold
            raise ValueError(f"{path}: weights missing or truncated: {e}") from e
    parts = parts_of(cfg)
    if cfg.tied and "lm_head.weight" not in stored:  # one that is there is the head
        parts["head.weight"] = parts["embed.weight"]
    wanted = {part for each in parts.values() for part in each.items()}
    found = {(part, tuple(tensor.get_shape())) for part, tensor in stored.items()}
    if wrong := sorted(wanted ^ found):
        raise ValueError(
            f"{folder}: {len(wrong)} tensors are in config.json's model alone, or in the weights "
            f"alone (model*.safetensors): {wrong[:4]}. Pickles are never read, since they may run "
            'code; convert them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\""
        )

    def read(name):
        try:
            tensors = [stored[part][:] for part in parts[name]]
        except Exception as e:  # the file has changed since it was opened
            raise ValueError(f"{folder}: {[*parts[name]]} cannot be read: {e}") from e
        if not all(tensor.is_floating_point() and is_finite(tensor) for tensor in tensors):
            raise ValueError(
                f"{folder}: {[*parts[name]]} has values that are not finite, or no floating point"
            )
        return torch.cat(tensors)

    return read


def load_model(folder: str) -> LLaMA:
    """Return the model of a Hugging Face folder on the CPU, in float32. Raises ValueError."""
    cfg, _ = read_config(folder)
    read = open_weights(folder, cfg)
    model = LLaMA(cfg)
    model.load_state_dict({name: read(name) for name in model.state_dict()})
    return model


def with_rope(text, model):
    """Return the model with a --rope-scaling, and the positions that it reaches. Raises
    ValueError."""
    if not text:
        return model
    found = re.fullmatch(rf"(theta|{'|'.join(ROPE_KEYS)}):([1-9]\d*(\.\d*)?)", text)
    if not found:
        raise ValueError(
            f"--rope-scaling {text}: linear:FACTOR, llama3:FACTOR, yarn:FACTOR or "
            "theta:BASE, from 1"
        )
    kind, factor = found[1], float(found[2])
    if kind == "theta":
        return replace(model, rope_theta=factor)
    old = model.rope_scaling
    has = rope_kind(old)
    if old and has != kind:
        raise ValueError(
            f"--rope-scaling {text}: its rotary embedding has {has} scaling already; "
            f"extend it with {has}:FACTOR"
        )
    fresh = {
        "factor": 1.0,
        "original_max_position_embeddings": model.max_positions,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }  # Llama 3.1's
    scaling = {"rope_type": kind} | (old or {key: fresh[key] for key in ROPE_KEYS[kind]})
    scaling["factor"] *= factor
    scaling.pop("attention_factor", None)  # a fixed one was the old factor's
    return replace(model, rope_scaling=scaling, max_positions=round(model.max_positions * factor))


# ---------------------------------------------------------------------------- out


def export_config(cfg: ModelConfig, source: dict, dtype: torch.dtype):
    """Return the transformers config of an export: of its import's family, else of the first that
    computes cfg. source: of read_config, or {}; what changes no logits is kept. Raises ValueError
    if cfg cannot be read from it again, or a weight has no name there: an export would drop a
    field in silence, or end at its end. The error names the family that lacks the fewest keys."""
    from transformers import AutoConfig

    parts_of(cfg)  # raises if a weight has no name there
    settings = (
        source
        | {key: getattr(cfg, ours) for ours, key in _HF_KEYS.items()}
        | {
            "max_position_embeddings": cfg.max_positions,
            "dtype": dtype,
            "rope_parameters": {"rope_theta": cfg.rope_theta} | cfg.rope_scaling,
        }
    )
    settings.pop("auto_map", None)  # other code
    missing = {}  # family: our fields that its config.json has no key for
    for kind in [source["model_type"]] if source else _FAMILIES:
        settings["model_type"] = kind
        settings["architectures"] = [f"{kind.capitalize()}ForCausalLM"]
        read = asdict(model_of(settings))
        lost = [f"{name}={value!r}" for name, value in asdict(cfg).items() if read[name] != value]
        if not lost:
            return AutoConfig.for_model(**settings)
        missing[kind] = lost
    nearest = min(missing, key=lambda kind: len(missing[kind]))
    raise ValueError(
        f"--export: {nearest}'s config.json has no key for {', '.join(missing[nearest])}; what reads "
        "it would compute another model"
    )


def check_export(cfg: ModelConfig, source: dict) -> None:
    """Raise ValueError unless transformers computes what this model computes.

    A small model of the same Block is exported to a temporary folder and loaded by transformers,
    and the logits are compared. It keeps the number of layers, all flags of the configuration, and
    positions on both sides of each length that its rotary scaling distinguishes; only widths, head
    counts and the vocabulary shrink. All weights are random, norms and biases too: first weights
    would hide a norm that is lost. Not a collective; it takes some seconds, most of them to import
    transformers.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    kv_heads = 4 if cfg.kv_heads == cfg.heads else 2
    small = replace(cfg, vocab=48, dim=32, heads=4, kv_heads=kv_heads, head_dim=16, ffn=40)
    shrunk = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if source:
        source = source | shrunk
    try:
        model = LLaMA(small).double()
    except Exception as e:  # whatever a fork's layer may need
        raise ValueError(
            f"--export: a small model, which proves that transformers computes the same, cannot be "
            f"made: {e!r}"
        ) from e
    rng = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 1 / math.sqrt(p.shape[-1]), generator=rng)
        p.data += float(p.dim() == 1)  # norms near 1, and biases that are large enough to be missed
    if small.tied:
        model.head.weight.data.copy_(model.embed.weight.data)
    trained = cfg.rope_scaling.get("original_max_position_embeddings", cfg.max_positions)
    reach = cfg.max_positions
    positions = sorted({0, 1, 2, 7, 50, trained // 2, trained - 1, trained, trained + 1, reach - 1})
    positions = torch.tensor([p for p in positions if 0 <= p < max(reach, trained + 2)])
    tokens = torch.randint(small.vocab, (1, len(positions)), generator=rng)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_small(folder, model, export_config(small, source, torch.float64))
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
    with torch.no_grad():
        ours = model(tokens, positions=positions)
        theirs = theirs(tokens, position_ids=positions[None]).logits
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error < 1e-4:  # transformers computes angles in float32
        raise ValueError(
            f"--export: transformers computes other logits than this model: they differ by "
            f"{error:.2g} of their size. What has changed here, config.json has no key for. Give "
            "ModelConfig a field for it, whose default is what Llama does"
        )


def write_small(folder: Path, model: LLaMA, config) -> None:
    """Write a whole model that lies on the CPU, as `export` writes one that ranks share."""
    tensors = {}
    weights = model.state_dict()
    for name, parts in parts_of(model.cfg).items():
        if not (name == "head.weight" and model.cfg.tied):
            pieces = weights[name].split([rows for rows, *_ in parts.values()])
            tensors |= {part: piece.contiguous() for part, piece in zip(parts, pieces)}
    write_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)


def files_beside(folders: list[Path]) -> list[Path]:
    """Return the tokenizer and license files of folders, which an export copies. If two folders
    have a file of the same name, the last folder's is used. Raises OSError for a link that leads
    out of its folder (own_file), since an export would publish the file that it leads to, and for
    what is no regular file."""
    found = {}
    for folder in folders:
        for file in sorted(folder.glob("*")):
            if re.fullmatch(_BESIDE, file.name) and not file.is_dir():
                found[file.name] = own_file(file, folder)
    return [*found.values()]


def export(
    folder: Path,
    cfg: ModelConfig,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    source: dict,
    beside: list[Path],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write config.json and safetensors, file by file, all of them or none, and print the family.

    read(name) -> the whole tensor, on all ranks together; group: as in Saver. An imported tied head
    that still equals the embedding is tied again. source: of read_config of the import, or {}.
    beside: folders whose tokenizer and license go along. Raises ConfigError. A collective.
    """
    partial = folder / "partial"  # its files move up when all are there
    tied = cfg.tied and torch.equal(read("embed.weight"), read("head.weight"))
    config = export_config(replace(cfg, tied=tied), source, dtype)

    def finish():
        index = json.dumps({"metadata": {}, "weight_map": places})
        (partial / "model.safetensors.index.json").write_text(index)
        config.save_pretrained(partial)
        for other in beside:
            if not other.is_dir():
                print(f"{other} is not there any more: its tokenizer and license are not exported")
        for file in files_beside(beside):
            shutil.copy(file, partial)
        for file in partial.iterdir():
            file.rename(folder / file.name)
        partial.rmdir()
        print(f"exported {folder}: {config.model_type}")

    on_rank_0(fresh_folder, partial, group=group)
    parts = parts_of(cfg)
    if tied:
        del parts["head.weight"]
    files = pack(
        {name: dtype.itemsize * sum(map(math.prod, each.values())) for name, each in parts.items()}
    )
    places = {}  # their name: file
    for i, names in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for name in names:
            whole = read(name)
            if dist.get_rank() == 0:
                pieces = whole.to("cpu", dtype).split([rows for rows, *_ in parts[name].values()])
                tensors |= zip(parts[name], pieces)
        on_rank_0(write_tensors, tensors, partial / file, {"format": "pt"}, group=group)
        places |= dict.fromkeys(tensors, file)
    on_rank_0(finish, group=group)
