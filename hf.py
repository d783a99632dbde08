"""Import models from Hugging Face's folders, extend their length, and export models to folders.

An imported model computes the same logits here as in transformers, up to rounding. So does an
exported one. If this is impossible, a ValueError names the reason: a key of config.json, a tensor,
or a file. Before an export, check_export compares the logits of a small model.

    cfg, source = read_config(folder)      config.json -> ModelConfig, and config.json as a dict
    cfg, read = open_weights(folder, cfg)  read(our name) -> tensor, read from disk at each call
    cfg = with_rope("yarn:4", cfg)         --rope-scaling: reach 4 times as many positions
    check_export(cfg, source)              would transformers compute the same?
    export(folder, cfg, read, ...)         write config.json, safetensors, tokenizer, license

    model = load_model(folder)             import a whole model, on the CPU in float32

"Ours" are the weights of model.LLaMA and their names. "Theirs" are the weights in Hugging Face's
files and their names. Some of our matrices are several of theirs, stacked by rows. Example: layer 0
of llama3-8b, which has 32 heads and 8 K/V heads of 128 features:

    ours                      theirs, in model.layers.0                    rows of ours
    blocks.0.qkv.weight       self_attn.q_proj.weight     4096 x 4096          0 ..  4095
    6144 x 4096               self_attn.k_proj.weight     1024 x 4096       4096 ..  5119
                              self_attn.v_proj.weight     1024 x 4096       5120 ..  6143
    blocks.0.gate_up.weight   mlp.gate_proj.weight       14336 x 4096          0 .. 14335
    28672 x 4096              mlp.up_proj.weight         14336 x 4096      14336 .. 28671

So an import concatenates the rows of theirs, and an export splits ours (parts_of). A tied model
(ModelConfig.tied) has no head of its own, neither here nor in an export.

HF_NAMES lists all names. If you add a weight to the model, and a model family in FAMILIES has the
same weight, add a row to HF_NAMES. If no family has it, an export can still merge it into other
weights, as it does with adapters: name it in LLaMA.own_weights, and write LLaMA.export_weight.

Two versions of transformers look for the rotary base and the rotary scaling in different keys of
config.json. An import reads both spellings, as transformers 5 does. An export writes both:

    transformers 4    "rope_theta": 500000.0, "rope_scaling": {"rope_type": "yarn", ...}
    transformers 5    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "yarn", ...}

Left out:
    - Architectures that are not in FAMILIES.
    - Weights in pickles, because reading a pickle may run code.
"""

import copy
import functools
import json
import math
import re
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from checkpoint import first_names, is_finite, pack, sync, write_tensors
from data import fresh_folder, own_file, replace_file
from model import ROPE_KEYS, ROPE_OPTIONS, LLaMA, ModelConfig, rope_kind
from optim import round_weight
from ranks import ConfigError, on_rank_0

# ---------------------------------------------------------------------------- names and keys

# our weight -> their names for it. If there are several, ours is theirs stacked by rows
HF_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    # weights of a layer. Their full names begin with "model.layers.0.", "model.layers.1.", ...
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

# field of ModelConfig -> its key in config.json
CONFIG_KEYS = {
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

# model_type in config.json -> fields of ModelConfig that config.json has no key for, because each
# model of this type has them. A model from scratch is exported as the first family here that
# computes the same
FAMILIES = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "llama": {},
    "mistral": {},
}

# key of config.json -> the only value that this project supports
REQUIRED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "is_heterogeneous": False,
    "is_causal": True,  # False: transformers lets a token attend to later ones
    "transformers_weights": None,  # a value would be the name of another file of weights
}

# files of weights. If there are several, the index says which of them holds a tensor
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# files that an export copies: of the tokenizer, and generation settings and licenses
TOKENIZER_FILES = (
    r"tokenizer.*|(special_tokens_map|added_tokens|vocab|tekken)\.json|merges\.txt|chat_template.*"
)
COMPANION_FILES = rf"{TOKENIZER_FILES}|generation_config\.json|(LICENSE|NOTICE|USE_POLICY).*"

# ---------------------------------------------------------------------------- import


def read_config(folder: str) -> tuple[ModelConfig, dict]:
    """Read a folder's config.json. Return a ModelConfig, and config.json as a dict.

    This file calls the dict `source`. The dict also has the keys that transformers adds by default.
    Raises ValueError for an architecture or a value that this project does not support.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.exists():
        raise ValueError(
            f"--init hf:{folder}: there is no {path}; `hf download NAME --local-dir "
            "DIR` makes a folder for --init hf:DIR"
        )

    try:
        # Check the file before transformers reads it. transformers' errors do not say that this
        # user may not read the file, or which architecture needs Python code from the folder
        check_family(json.loads(own_file(path, path.parent).read_text()).get("model_type"))
        config = AutoConfig.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False
        )
        source = json.loads(config.to_json_string())
        return model_of(source), source
    except Exception as e:  # transformers' errors have no class of their own
        raise ValueError(f"--init hf:{folder}: {path} cannot be imported: {e}") from e


def check_family(model_type: str | None) -> None:
    """Raise ValueError for an architecture that is not in FAMILIES."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type is {model_type!r}; only {', '.join(FAMILIES)} are supported")


def model_of(source: dict) -> ModelConfig:
    """Return the model that an import's config.json describes. Raises ValueError."""
    try:
        return _model_of(source)
    except ValueError:
        raise
    except Exception as e:  # transformers' errors have no class of their own
        raise ValueError(f"transformers refuses its config.json: {e}") from e


def _model_of(source: dict) -> ModelConfig:
    """Do the work of model_of. It may also raise transformers' own errors, which model_of turns
    into a ValueError."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**copy.deepcopy(source))  # for_model changes the dicts it gets
    # AutoConfig has called this once already. transformers' models call it a second time, and only
    # the second call finds an original_max_position_embeddings outside of rope_parameters. So call
    # it here, too
    config.standardize_rope_params()
    check_family(config.model_type)
    for key, required in REQUIRED_VALUES.items():
        value = getattr(config, key, required)
        if value != required:
            raise ValueError(f"{key} is {value!r}; only {required!r} is supported")

    # drop two keys that change no frequency: "type", an older name of rope_type, and "finetuned"
    rope = {
        key: value
        for key, value in config.rope_parameters.items()
        if value is not None and key not in ("type", "finetuned")
    }
    theta = rope.pop("rope_theta")
    kind = rope["rope_type"]
    supported = {"rope_type", *ROPE_KEYS.get(kind, ()), *ROPE_OPTIONS}
    unknown = rope.keys() - supported
    if unknown:
        raise ValueError(
            f"rope_parameters of type {kind!r} with {sorted(unknown)} are not supported"
        )

    max_positions = config.max_position_embeddings
    if kind == "yarn" and "factor" not in rope:  # null in the file: do as transformers does
        rope["factor"] = max_positions / rope["original_max_position_embeddings"]
    missing = [key for key in ROPE_KEYS.get(kind, ()) if key not in rope]
    if missing:
        raise ValueError(f"rope_parameters of type {kind!r} lack {missing}")
    if kind == "yarn":  # in some files max_position_embeddings is still the trained length
        max_positions = round(rope["original_max_position_embeddings"] * rope["factor"])

    default_head_dim = config.hidden_size // config.num_attention_heads
    values = {"head_dim": default_head_dim} | config.to_dict()
    return ModelConfig(
        **{field: values[key] for field, key in CONFIG_KEYS.items()},
        **FAMILIES[config.model_type],
        max_positions=max_positions,
        rope_theta=theta,
        rope_scaling={} if kind == "default" else rope,
    )


def sliding_window(source: dict) -> int:
    """Return the sliding window of an import: how many tokens a token attends to, including itself.
    Return 0 if no layer has a window, or if source is {} (a model from scratch)."""
    in_all_layers = source.get("model_type") == "mistral"
    in_some_layers = "sliding_attention" in (source.get("layer_types") or [])  # it may be null
    if not in_all_layers and not in_some_layers:
        return 0
    return source["sliding_window"] or 0  # null: this Mistral has none


def is_own_weight(cfg: ModelConfig, name: str) -> bool:
    """Return whether a weight is in our model only, and not in Hugging Face's files
    (LLaMA.own_weights).

    Example: True for blocks.0.qkv.a.weight of examples/lora.py, False for blocks.0.qkv.weight.
    """
    *_, weight, _ = name.split(".")  # "blocks", "0", "qkv", "a", "weight"
    return weight in LLaMA.class_of(cfg).own_weights


def has_own_weights(cfg: ModelConfig) -> bool:
    """Return whether a model has weights that Hugging Face's files lack, such as adapters."""
    return bool(LLaMA.class_of(cfg).own_weights)


def parts_of(cfg: ModelConfig) -> dict[str, dict[str, tuple]]:
    """Return {our name: {their name: their shape}}. Their names are in the order in which our
    tensor stacks them.

    Example: blocks.0.qkv.weight of llama3-8b -> model.layers.0.self_attn.q_proj.weight: (4096,
    4096), ...k_proj.weight: (1024, 4096), ...v_proj.weight: (1024, 4096).

    Weights that only this model has (LLaMA.own_weights) are left out. Raises ValueError if HF_NAMES
    has no name for another weight.
    """
    with torch.device("meta"):  # no memory, and no random numbers
        shapes = LLaMA(cfg).shapes

    parts = {}
    kv_rows = cfg.kv_heads * cfg.head_dim
    for name, (rows, *other_dims) in shapes.items():
        if is_own_weight(cfg, name):
            continue
        *layer, weight, _ = name.split(".")  # "blocks", "0", "qkv", "weight", or "norm", "weight"
        if weight not in HF_NAMES:
            raise ValueError(
                f"{name}: Hugging Face's files have no {weight!r}. hf.HF_NAMES has names for "
                f"{', '.join(HF_NAMES)}. Add a row there, if a family of hf.FAMILIES has it"
            )
        prefix = f"model.layers.{layer[1]}." if layer else ""
        suffix = "bias" if weight == "qkv_bias" else "weight"

        their_names = HF_NAMES[weight].split()
        if len(their_names) == 3:  # q, k and v
            row_counts = [rows - 2 * kv_rows, kv_rows, kv_rows]
        else:  # one name, or gate and up, which are equally large
            row_counts = [rows // len(their_names)] * len(their_names)

        parts[name] = {
            f"{prefix}{their_name}.{suffix}": (count, *other_dims)
            for their_name, count in zip(their_names, row_counts)
        }
    return parts


def open_tensors(folder: str) -> dict[str, object]:
    """Return {their name: a handle that reads the tensor when it is indexed}.

    Only the files that transformers reads are opened, whatever else lies in the folder:

        model.safetensors                  the only file of weights, or
        model.safetensors.index.json       names the files: {"weight_map": {their name: file, ...}}

    Example: a folder has the shards 1 to 5, and six older shards. The index names only the first
    five, so the older ones are not opened. The files may have any names.

    Raises ValueError if neither file exists, or if both exist and contradict each other. Also
    raises it if a file of weights cannot be read or does not have the tensors that the index says.
    """
    root = Path(folder)
    if (root / INDEX).exists():
        index = read_index(root)
        files = sorted(set(index.values()))
        if (root / WEIGHTS).exists() and files != [WEIGHTS]:
            raise ValueError(
                f"--init hf:{folder}: {WEIGHTS} lies beside {INDEX}, which names {files[0]}. "
                f"transformers would read {WEIGHTS}, other programs what the index names. Remove "
                "the one that is out of date"
            )
    elif (root / WEIGHTS).exists():
        index = {}
        files = [WEIGHTS]
    else:
        raise ValueError(no_weights(folder))

    stored, file_of = {}, {}  # their name -> handle, their name -> file
    # sorted, as in transformers: if two files have the same tensor, the later file's counts
    for file in files:
        path = root / file
        if not path.exists():
            raise ValueError(f"--init hf:{folder}: {INDEX} names {file}, which is missing")
        try:
            open(own_file(path, root), "rb").close()  # safetensors' error would not say "denied"
        except OSError as e:
            raise ValueError(f"--init hf:{folder}: {path} cannot be read: {e}") from e
        try:
            handle = safe_open(path, "pt")
            tensors = {their_name: handle.get_slice(their_name) for their_name in handle.keys()}
        except Exception as e:  # the file may hold anything
            raise ValueError(
                f"--init hf:{folder}: {path} is truncated, or no safetensors file: {e}"
            ) from e
        stored |= tensors
        file_of |= dict.fromkeys(tensors, file)

    for their_name, file in index.items():
        if file_of.get(their_name) != file:
            where = (
                f"lies in {file_of[their_name]}"
                if their_name in file_of
                else "lies in none of its files"
            )
            raise ValueError(
                f"--init hf:{folder}: {INDEX} says that {their_name} lies in {file}, but it "
                f"{where}. Download the folder again"
            )

    if "model.embed_tokens.weight" not in stored and "embed_tokens.weight" in stored:
        # this is a base model, whose names lack the prefix "model.". A head never has this prefix
        stored = {
            their_name if their_name.startswith("lm_head.") else f"model.{their_name}": tensor
            for their_name, tensor in stored.items()
        }
    # leave out the rotary frequencies, which old files store: the model computes them itself
    return {
        their_name: tensor
        for their_name, tensor in stored.items()
        if not their_name.endswith("rotary_emb.inv_freq")
    }


def read_index(root: Path) -> dict[str, str]:
    """Return {their name: file} of a folder's model.safetensors.index.json. Raises ValueError if it
    cannot be read, is not of this form, or names a path that leads out of the folder. It does not
    check that the files exist."""
    path = root / INDEX
    try:
        index = json.loads(own_file(path, root).read_text())
        fault = fault_of_index(index)
    except OSError as e:
        raise ValueError(f"--init hf:{root}: {path} cannot be read: {e}") from e
    except Exception as e:  # the file may hold anything
        fault = repr(e)
    if fault:
        raise ValueError(
            f'--init hf:{root}: {path} is not of the form {{"weight_map": {{TENSOR: FILE}}}}: '
            f"{fault}. Download the file again"
        )

    weight_map = index["weight_map"]
    for file in map(Path, weight_map.values()):
        if file.is_absolute() or ".." in file.parts:
            raise ValueError(
                f"--init hf:{root}: {path} names {file}, which is not in its folder. Only files of "
                "the folder are read"
            )
    return weight_map


def fault_of_index(index: object) -> str:
    """Return what is wrong with the content of a model.safetensors.index.json, or "" if it has a
    weight_map that gives each tensor the name of a file."""
    if type(index) is not dict:
        return f"it is {index!r:.60}, not an object"
    if "weight_map" not in index:
        return "it has no weight_map"
    weight_map = index["weight_map"]
    if type(weight_map) is not dict:
        return f"its weight_map is {weight_map!r:.60}, not an object"
    if not weight_map:
        return "its weight_map is empty, so it names no files"
    for their_name, file in weight_map.items():
        if type(file) is not str or not file:
            return f"its weight_map gives {their_name} {file!r:.60}, not the name of a file"
    return ""


def no_weights(folder: str) -> str:
    """Return the error message for a folder with neither model.safetensors nor its index."""
    root = Path(folder)
    pickles = sorted(file.name for file in root.glob("pytorch_model*.bin"))
    others = sorted(file.name for file in root.glob("*.safetensors"))
    text = f"--init hf:{folder}: there is neither {WEIGHTS} nor {INDEX} in it. "
    if others:
        text += f"Other files are not read without the index: {first_names(others)}. "
    if not pickles:
        return text + "Download the weights, too"
    # the assertion stops a conversion that would make up weights, such as a random head
    name = json.dumps(str(folder))
    code = (
        "from transformers import AutoModelForCausalLM as M; "
        f'model, info = M.from_pretrained({name}, dtype="auto", output_loading_info=True); '
        f'assert not info["missing_keys"], info; model.save_pretrained({name})'
    )
    return (
        f"{text}Pickles such as {pickles[0]} are never read, since they may run code; convert "
        f"them: python -c {shlex.quote(code)}"
    )


def open_weights(
    folder: str, cfg: ModelConfig, untie: bool = False
) -> tuple[ModelConfig, Callable[[str], Tensor]]:
    """Check that a folder has exactly the weights of cfg, from read_config. Return the model's
    config, and read(our name) -> tensor.

    read() reads a tensor from disk when it is called. So only one needs to be in memory at a time.

    The config returned is cfg, except that a tied cfg may become untied:

        the files store     the model is
        no head             tied; with untie, its head begins as a copy of the embedding
        an equal head       tied; with untie, its head begins as the stored one
        another head        untied: the head is the stored one, as in transformers 5

    open_weights raises ValueError if a file is missing or truncated, or if a tensor is missing,
    left over or of another shape. read() raises ValueError if a tensor cannot be read, is not of
    floating point with at least 16 bits, or has values that are not finite.
    """
    stored = open_tensors(folder)
    stores_head = "lm_head.weight" in stored
    parts = parts_of(replace(cfg, tied=False))
    if cfg.tied and not stores_head:
        parts["head.weight"] = parts["embed.weight"]
    check_shapes(
        folder,
        expected={
            their_name: shape for theirs in parts.values() for their_name, shape in theirs.items()
        },
        found={their_name: tuple(tensor.get_shape()) for their_name, tensor in stored.items()},
    )

    def read(name):
        tensors = []
        for their_name in parts[name]:
            try:
                tensor = stored[their_name][:]
            except Exception as e:  # the file has changed since it was opened
                raise ValueError(f"--init hf:{folder}: {their_name} cannot be read: {e}") from e
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                raise ValueError(
                    f"--init hf:{folder}: {their_name} is of dtype {tensor.dtype}; only floating "
                    "point of at least 16 bits is supported"
                )
            if not is_finite(tensor):
                raise ValueError(f"--init hf:{folder}: {their_name} has values that are not finite")
            tensors.append(tensor)
        return torch.cat(tensors)

    if cfg.tied and stores_head and not untie:
        head, embedding = read("head.weight"), read("embed.weight")
        wide = torch.promote_types(head.dtype, embedding.dtype)
        untie = not torch.equal(head.to(wide), embedding.to(wide))
    return replace(cfg, tied=cfg.tied and not untie), read


def check_shapes(folder: str, expected: dict[str, tuple], found: dict[str, tuple]) -> None:
    """Raise ValueError unless the tensors in the files are those of config.json's model.

    expected, found: their name -> shape. The message counts the tensors that are missing, left
    over, or of another shape, and names the first four of each kind.
    """
    missing = sorted(expected.keys() - found.keys())
    left_over = sorted(found.keys() - expected.keys())
    misshapen = [
        f"{their_name} ({found[their_name]}, not {expected[their_name]})"
        for their_name in sorted(expected.keys() & found.keys())
        if found[their_name] != expected[their_name]
    ]

    problems = []
    for tensors, problem in (
        (missing, "missing"),
        (left_over, "left over, since config.json's model has no place for them"),
        (misshapen, "of another shape than config.json says"),
    ):
        if tensors:
            count = "1 tensor is" if len(tensors) == 1 else f"{len(tensors)} tensors are"
            problems.append(f"{count} {problem}: {first_names(tensors)}")
    if "lm_head.weight" in missing:
        problems.append(
            "tie_word_embeddings is false, so the head must be stored. A base model or an "
            "embedding model has none: import the language model that it was made from"
        )
    if problems:
        raise ValueError(
            f"--init hf:{folder}: the files of weights and config.json disagree. "
            f"{'. '.join(problems)}"
        )


def load_model(folder: str) -> LLaMA:
    """Return the model of a Hugging Face folder on the CPU, in float32. Raises ValueError."""
    cfg, _ = read_config(folder)
    cfg, read = open_weights(folder, cfg)
    model = LLaMA(cfg)
    model.init_weights(seed=0)  # only weights that the files do not have keep these values
    for name, p in model.named_parameters():
        if not is_own_weight(cfg, name):
            p.data.copy_(read(name))
    return model


def with_rope(text: str, model: ModelConfig) -> ModelConfig:
    """Return the model with the rotary scaling of --rope-scaling, and with more max_positions.

    text: the flag, KIND:FACTOR or theta:BASE. If the model has a scaling already, FACTOR multiplies
    its factor. Example: Llama 3.2 was trained with llama3:32, so `llama3:2` gives factor 64 and
    twice its max_positions. `theta:BASE` replaces only the base. Raises ValueError.
    """
    if not text:
        return model
    match = re.fullmatch(rf"(theta|{'|'.join(ROPE_KEYS)}):([1-9]\d*(\.\d*)?(e\d)?)", text)
    if not match:
        raise ValueError(
            f"--rope-scaling {text}: it must be linear:FACTOR, llama3:FACTOR, yarn:FACTOR or "
            "theta:BASE, with a number of at least 1, as in yarn:4"
        )
    kind, factor = match[1], float(match[2])
    if kind == "theta":
        return replace(model, rope_theta=factor)

    old_scaling = model.rope_scaling
    old_kind = rope_kind(old_scaling)
    if old_scaling and old_kind != kind:
        raise ValueError(
            f"--rope-scaling {text}: the model's rotary embedding has {old_kind} scaling already; "
            f"extend it with {old_kind}:FACTOR"
        )

    if old_scaling:
        scaling = {"rope_type": kind} | old_scaling
    else:
        defaults = {
            "factor": 1.0,
            "original_max_position_embeddings": model.max_positions,
            "low_freq_factor": 1.0,  # Llama 3.1's two values
            "high_freq_factor": 4.0,
        }
        scaling = {"rope_type": kind} | {key: defaults[key] for key in ROPE_KEYS[kind]}
    scaling["factor"] *= factor
    scaling.pop("attention_factor", None)  # a value in the file was for the old factor
    return replace(model, rope_scaling=scaling, max_positions=round(model.max_positions * factor))


# ---------------------------------------------------------------------------- export


def export_config(cfg: ModelConfig, source: dict, dtype: torch.dtype):
    """Return the transformers config of an export.

    source: the import's config.json (read_config). The export keeps its family, and those of its
    keys that ModelConfig does not set, such as token ids. {} means a model from scratch, which is
    exported as the first family that computes the same. dtype: of the stored weights.

    A family computes the same if its config, read back, gives cfg again. Otherwise an export would
    silently lose a field of cfg. Raises ValueError if no family fits, and names the one that loses
    the fewest fields. Also raises it if a weight has no name in Hugging Face's files.
    """
    from transformers import AutoConfig

    parts_of(cfg)  # raises if a weight has no name in Hugging Face's files
    if has_own_weights(cfg):  # they are merged into the other weights, so the export has none
        cfg = replace(cfg, architecture="llama")
    settings = dict(source)
    settings |= {key: getattr(cfg, field) for field, key in CONFIG_KEYS.items()}
    settings |= {
        "max_position_embeddings": cfg.max_positions,
        "dtype": dtype,
        "rope_parameters": {"rope_theta": cfg.rope_theta} | cfg.rope_scaling,
    }
    settings.pop("auto_map", None)  # it names Python files of the import, which are not exported
    settings.pop("original_max_position_embeddings", None)  # it is in rope_parameters
    if not source:  # otherwise AutoConfig would fill in the ids of its family's own tokenizer
        settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

    families = [source["model_type"]] if source else FAMILIES
    lost_fields = {}  # family -> our fields that its config.json has no key for
    for family in families:
        settings["model_type"] = family
        settings["architectures"] = [f"{family.capitalize()}ForCausalLM"]
        read_back = asdict(model_of(settings))
        lost = [
            f"{field}={value!r}"
            for field, value in asdict(cfg).items()
            if read_back[field] != value
        ]
        if not lost:
            return AutoConfig.for_model(**settings)
        lost_fields[family] = lost

    nearest = min(lost_fields, key=lambda family: len(lost_fields[family]))
    raise ValueError(
        f"--export: {nearest}'s config.json has no key for {', '.join(lost_fields[nearest])}; "
        "transformers would compute another model from it"
    )


def check_export(cfg: ModelConfig, source: dict) -> None:
    """Raise ValueError unless transformers computes the same logits as this model.

    A small model is exported to a temporary folder, transformers loads it, and both compute logits
    for the same tokens. The small model has the same classes as the large one:

        kept     number of layers, rotary scaling, and all other fields of cfg
        shrunk   widths, numbers of heads, vocabulary
        random   all weights. This includes norms and biases: with their initial values, 1 and 0,
                 the logits would not show that an export loses one

    The tokens have a few positions at the start, some just below and above the trained length, and
    the last one. Below position 4096, logits may differ by 1e-4 of their size. Over all positions
    they may differ by 1e-4 plus eight times the difference that float32 angles make in this model,
    because transformers computes rotary angles in float32.

    Runs on one rank, without collectives. It takes a few seconds, mostly to import transformers.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    # the small model has as many K/V heads as query heads if cfg does, and otherwise half as many
    kv_heads = 4 if cfg.kv_heads == cfg.heads else 2
    small = replace(cfg, vocab=48, dim=32, heads=4, kv_heads=kv_heads, head_dim=16, ffn=40)
    if source:  # special tokens may lie outside the small vocabulary
        source = source | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    try:
        model = LLaMA(small).double()
    except Exception as e:  # a fork's layer may need anything
        raise ValueError(
            "--export: a small model, which would show that transformers computes the same, cannot "
            f"be made: {e!r}"
        ) from e

    # random weights
    rng = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 1 / math.sqrt(p.shape[-1]), generator=rng)
        if p.dim() == 1:  # norms near 1, and biases so large that the logits show a lost one
            p.data += 1.0

    # tokens at a few positions: the first ones, some around the trained length, and the last one.
    # If the trained length is max_positions itself, two of these positions lie beyond max_positions
    trained = cfg.rope_scaling.get("original_max_position_embeddings", cfg.max_positions)
    last = cfg.max_positions - 1
    positions = {0, 1, 2, 7, 50, trained // 2, trained - 1, trained, trained + 1, last}
    end = max(cfg.max_positions, trained + 2)
    positions = torch.tensor([p for p in sorted(positions) if 0 <= p < end])
    tokens = torch.randint(small.vocab, (1, len(positions)), generator=rng)

    # compare the logits
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_small(folder, model, export_config(small, source, torch.float64))
        exported = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
    with torch.no_grad():
        our_logits = model(tokens, positions=positions)
        their_logits = exported(tokens, position_ids=positions[None]).logits
        model.angle_dtype = torch.float32
        rounded_logits = model(tokens, positions=positions)

    def difference(logits, others):
        return ((logits - others).norm() / others.norm()).item()

    rounding = difference(rounded_logits, our_logits)
    first = slice(int((positions < 2**12).sum()))  # these tokens do not depend on later ones
    for part, limit in ((first, 1e-4), (slice(None), 1e-4 + 8 * rounding)):
        error = difference(our_logits[:, part], their_logits[:, part])
        if not error < limit:  # NaN fails, too
            raise ValueError(
                "--export: transformers computes other logits than this model: they differ by "
                f"{error:.2g} of their size. config.json has no key for what has changed here. "
                "Give ModelConfig a field for it, whose default is what Llama does"
            )


def write_small(folder: Path, model: LLaMA, config) -> None:
    """Write a whole model from one CPU. The files are like those of `export`, which gathers a
    sharded model from all ranks."""
    tensors = {}
    weights = model.state_dict()
    for name, parts in parts_of(model.cfg).items():  # a tied model has no head here, only embed
        weight = model.export_weight(name, weights.__getitem__)
        pieces = weight.split([rows for rows, *_ in parts.values()])
        tensors |= {their_name: piece.contiguous() for their_name, piece in zip(parts, pieces)}
    write_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
    write_config(folder, config)


def write_config(folder: Path, config) -> None:
    """Write config.json. transformers 5 writes the rotary base and scaling only as rope_parameters.
    So this also adds the keys that transformers 4 reads."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    scaling = dict(settings["rope_parameters"])
    settings["rope_theta"] = scaling.pop("rope_theta")
    settings["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def raise_model_max_length(path: Path, positions: int) -> None:
    """Let a tokenizer allow texts of as many tokens as the model has positions.

    transformers cuts texts at model_max_length of tokenizer_config.json. A smaller number there was
    for the model before it was extended. A missing file, and one that is no JSON object, stay as
    they are.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return
    length = settings.get("model_max_length") if isinstance(settings, dict) else None
    if type(length) in (int, float) and length < positions:
        settings["model_max_length"] = positions
        content = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        replace_file(path, lambda new: new.write_text(content, encoding="utf-8"))


def companion_files(folders: list[Path]) -> list[Path]:
    """Return the files of folders that an export copies: of the tokenizer, generation_config.json,
    and licenses.

    All tokenizer files come from the last folder with a tokenizer.json. (A chat template that lies
    beside another tokenizer does not belong to this one.) If two folders have another file of the
    same name, the later folder's is used. Raises OSError if a file cannot be read, is not a regular
    file, or is a link that leads out of its folder: an export would publish the file that the link
    leads to (own_file).
    """
    found = {}  # name -> path
    for folder in folders:
        if (folder / "tokenizer.json").exists():
            found = {n: file for n, file in found.items() if not re.fullmatch(TOKENIZER_FILES, n)}
        for file in sorted(folder.glob("*")):
            if re.fullmatch(COMPANION_FILES, file.name) and not file.is_dir():
                # open it now, because train.py also calls this before the training
                open(own_file(file, folder), "rb").close()
                found[file.name] = file
    return [*found.values()]


# ---------------------------------------------------------------------------- files of an export
#
# An export of a run never writes its files directly into the folder DIR of --export. It fills a new
# folder beside DIR, and then exchanges the two folders:
#
#     DIR.RUN.partial    the new export while it is written. Its index is written last
#     DIR                the newest complete export
#     DIR.RUN.old        the export before the newest one, until it is deleted after the exchange
#
# RUN is a number that is made from --out (run_number). So two runs that export to the same folder
# do not write into each other's files. The index of an export says which run wrote it.


def run_number(out: Path) -> str:
    """Return 8 hex digits that identify --out: all commands with the same --out have the same ones.
    They are a checksum of the path, because an export should not publish the path itself."""
    return f"{zlib.crc32(str(out.resolve()).encode()):08x}"


def partial_folder(folder: Path, run: str) -> Path:
    """Return the folder in which the next export of `folder` is written."""
    folder = folder.resolve()  # a link to the folder stays a link
    return folder.with_name(f"{folder.name}.{run}.partial")


def old_folder(folder: Path, run: str) -> Path:
    """Return the folder to which the previous export moves during an exchange."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.{run}.old")


def exported_step(folder: Path, run: str) -> int | None:
    """Return the step of the export that a run has written to a folder. Return None if the folder
    is empty or missing. Raises ValueError if it holds anything else, such as another run's export.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        written = json.loads(own_file(folder / INDEX, folder).read_text())["metadata"]
        if written["run"] == run:
            return int(written["step"])
    except Exception:  # there is no index, or it is not an index of an export
        pass
    raise ValueError(f"--export {folder} is not empty. Name another folder")


def check_export_folder(folder: Path, run: str, resumed_step: int | None) -> None:
    """Raise ValueError if an export would overwrite files in its folder.

    A resumed run may replace an export that the same run has written, if the export is not of a
    later step than the one that the run resumes.

    resumed_step: the step that the run resumes, or None for a run that begins anew.
    """
    if not folder.resolve().name:
        raise ValueError(f"--export {folder} is the root of all folders. Name a folder in it")
    # if a kill fell between the two renames of an exchange, the export is in old_folder
    for found in (folder, old_folder(folder, run)):
        step = exported_step(found, run)
        if step is None:
            continue
        if resumed_step is None:
            raise ValueError(f"--export {found} is not empty. Name another folder")
        if step > resumed_step:
            raise ValueError(
                f"--export {found} has the weights of step {step}, and this run resumes step "
                f"{resumed_step}. Name another folder"
            )
    if folder.resolve().is_mount():
        raise ValueError(
            f"--export {folder} is a mount point, which cannot be renamed. Name a folder in it"
        )


def finish_exchange(folder: Path, run: str) -> None:
    """Finish an exchange during which a run was killed, and delete the folder that a killed export
    was writing.

    The newest complete export gets the name `folder` again. Raises OSError. Call this only while no
    other process with the same --out runs.
    """
    partial, old = partial_folder(folder, run), old_folder(folder, run)
    if old.exists():
        if exported_step(folder, run) is None:
            newest = partial if (partial / INDEX).exists() else old
            newest.rename(folder.resolve())
        delete_old(folder, run)
    shutil.rmtree(partial, ignore_errors=True)


def exchange(folder: Path, run: str) -> None:
    """Let the complete export in partial_folder take the place of `folder`. Raises OSError.

    Nobody ever sees half an export in `folder`. There are two cases:

        folder is empty or missing    the folder appears with all of its files at once
        folder has an older export    folder is renamed to `old`, then `partial` to folder. Then
                                      `old` is deleted. Between the renames, folder does not exist

    A process that is killed between the renames leaves two complete exports, `old` and `partial`.
    The next run with the same --out and --export finishes the exchange (finish_exchange).

    A program that opens a file of `folder` during the exchange may fail, and must try again. If it
    opens several files, some may be of the old export and some of the new one. To find out, it can
    read the step in the index's metadata before and after: the step must be the same.
    """
    target, old = folder.resolve(), old_folder(folder, run)
    exported_step(target, run)  # raises ValueError if anybody else has put files there
    if target.exists() and any(target.iterdir()):
        delete_old(folder, run)  # an older one, if an earlier exchange could not delete it
        target.rename(old)
    try:
        partial_folder(folder, run).rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    delete_old(folder, run)


def delete_old(folder: Path, run: str) -> None:
    """Delete the previous export. Files that others have put there, such as a user's notes, are
    first moved into the newest export, unless it has a file of this name. Files that the previous
    export wrote are deleted, even if the newest export has none of this name. For example, a chat
    template is deleted with its tokenizer."""
    old = old_folder(folder, run)
    if not old.exists():
        return
    try:
        own_files = json.loads((old / INDEX).read_text())["metadata"].get("files", [])
    except FileNotFoundError:
        # an earlier call was killed while it deleted. It had moved the files of others before
        own_files = [file.name for file in old.iterdir()]
    for file in old.iterdir():
        new = folder.resolve() / file.name
        if file.name not in [*own_files, INDEX] and not new.exists():
            file.rename(new)
    shutil.rmtree(old, ignore_errors=True)


def collect_weights(
    exported_weight: Callable[[str], Tensor], parts: dict[str, dict], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gather the weights of one file. Return {their name: tensor} on rank 0, and {} on all other
    ranks.

    All ranks gather one weight after the other, so this is a collective of all ranks.

    exported_weight: function: our name -> the full tensor to write. parts: see parts_of.
    """
    tensors = {}
    for name, theirs in parts.items():
        full = exported_weight(name)
        if dist.get_rank() == 0:
            row_counts = [rows for rows, *_ in theirs.values()]
            rounded = round_weight(full.cpu(), dtype)  # as training rounds it
            tensors |= zip(theirs, rounded.split(row_counts))
    return tensors


def export(
    folder: Path,
    cfg: ModelConfig,
    full_param: Callable[[str], Tensor],
    dtype: torch.dtype,
    source: dict,
    companion_folders: list[Path],
    group: dist.ProcessGroup | None = None,
    run: str = "",
    step: int = 0,
) -> None:
    """Write a model as a Hugging Face folder and print its family. A collective of all ranks.

    folder              the folder for the files. An earlier export of the same run is replaced
    full_param          function: our name -> the full tensor. All ranks call it together.
                        LLaMA.export_weight turns full tensors into the ones that are written
    dtype               dtype of the stored weights
    source              the import's config.json, from read_config; {} for a model from scratch
    companion_folders   folders whose tokenizer and license files are copied
    group               ranks.patient_group(), because rank 0 may write longer than --timeout
    run, step           the run's run_number, and the steps done. The index records both

    The files are written to a new folder, which takes the place of `folder` when it is complete
    (exchange). So the disk must have room for two exports. If writing fails, the earlier export
    stays. Raises ValueError if the model cannot be exported. Raises ConfigError, which is also a
    ValueError, on all ranks if rank 0 cannot write a file.
    """
    partial = partial_folder(folder, run)
    with torch.device("meta"):
        model = LLaMA(cfg)  # only its method export_weight is used
    exported_weight = functools.partial(model.export_weight, full_param=full_param)

    config = export_config(cfg, source, dtype)
    parts = parts_of(cfg)  # without a head if cfg is tied, because transformers ties it again

    # which weights go into which file
    sizes = {}  # our name -> bytes
    for name, theirs in parts.items():
        elements = sum(math.prod(shape) for shape in theirs.values())
        sizes[name] = dtype.itemsize * elements
    files = pack(sizes)

    weight_map = {}  # their name -> file

    def begin():
        fresh_folder(partial)
        if folder.exists():  # the new folder gets the permissions of the old one
            shutil.copymode(folder, partial)

    def finish():
        for other in companion_folders:
            if not other.is_dir():
                print(f"{other} is not there any more: its tokenizer and license are not exported")
        for file in companion_files(companion_folders):
            shutil.copy(file, partial)
        raise_model_max_length(partial / "tokenizer_config.json", config.max_position_embeddings)
        write_config(partial, config)
        for file in partial.iterdir():
            sync(file)

        names = sorted(file.name for file in partial.iterdir())
        metadata = {"total_size": sum(sizes.values()), "run": run, "step": step, "files": names}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map})
        (partial / INDEX).write_text(index)  # last: a folder with an index is complete
        sync(partial / INDEX)
        sync(partial)
        exchange(folder, run)
        print(f"exported {folder}: {config.model_type}")

    try:
        on_rank_0(begin, group=group)
        for i, names in enumerate(files, 1):
            file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
            tensors = collect_weights(exported_weight, {name: parts[name] for name in names}, dtype)
            on_rank_0(write_tensors, tensors, partial / file, {"format": "pt"}, group=group)
            weight_map |= dict.fromkeys(tensors, file)
        on_rank_0(finish, group=group)
    except ConfigError:
        on_rank_0(shutil.rmtree, partial, True, group=group)  # to free the disk
        raise
