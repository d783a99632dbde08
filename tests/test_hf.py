"""Test that Hugging Face models are imported, trained, resumed and exported as transformers
computes them."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from pytest import approx, raises
from safetensors.torch import load_file, save_file

import checkpoint
import data
import hf
import model as m
import published_configs
import train
from examples.lora import ALPHA, RANK, LoRABlock, LoRAModel
from helpers import (
    fail_disk_full,
    hf_model,
    kill_self,
    on_file_event,
    saved_steps,
    transformers_4,
    uninterrupted_losses,
)
from ranks import ConfigError
from test_all import (
    SMALL,
    example,
    losses,
    main,
    parametrize,
    relative,
    run,
    slow,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True}
# name -> (model type, keys of the published config.json, at a small size: trained at 64 tokens)
PUBLISHED = {
    "Llama 2": ("llama", {}),
    "Llama 3.2": (
        "llama",
        {
            "num_key_value_heads": 2,
            "rope_theta": 5e5,
            "head_dim": 16,
            "rope_scaling": LLAMA3 | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
    ),
    "Vicuna v1.5 16K": ("llama", {"rope_scaling": {"factor": 4.0, "type": "linear"}}),
    "Yarn-Llama-2": ("llama", {"rope_scaling": YARN}),
    "Mistral-Nemo": (
        "mistral",
        {"num_key_value_heads": 2, "rope_theta": 1e6, "head_dim": 24, "sliding_window": None},
    ),
    "Qwen2.5, small": (
        "qwen2",
        {
            "num_key_value_heads": 1,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "sliding_window": 32,
            "use_sliding_window": False,
            "max_window_layers": 1,
        },
    ),
    "Qwen3": (
        "qwen3",
        {
            "num_key_value_heads": 2,
            "rope_theta": 1e6,
            "head_dim": 24,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
}


def hf_edit(folder, file="config.json", **changes) -> None:
    """Change keys of a JSON file. The value ... (Ellipsis) removes a key."""
    path = Path(folder) / file
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not ...}))


def hf_error(model, theirs, seq: int) -> float:
    """Return the relative difference of our logits from those of transformers."""
    tokens, _ = example(seq=seq, vocab=300)
    return relative(model(tokens), theirs(tokens).logits)


def hf_load(folder, **kw):
    """Return a folder's model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **kw)


def hf_back(model, folder: Path, source: dict, dtype=torch.float32):
    """Export a model, and return it as transformers loads it. Needs a group of ranks."""
    folder.mkdir(exist_ok=True)
    weights = dict(model.named_parameters())
    hf.export(folder, model.cfg, lambda name: weights[name].data, dtype, source, [])
    return hf_load(folder)


@parametrize("name", PUBLISHED)
def test_hf_published(name, tmp_path, monkeypatch, group):
    """An import of a model as it is published has transformers' logits, within and beyond the
    trained length. It is exported as the same architecture, in several files.

    Catches rows of a fused matrix in the wrong order, and a key of config.json that is ignored.
    """
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 60_000)
    kind, keys = PUBLISHED[name]
    theirs = hf_model(tmp_path / "in", kind, **{"max_position_embeddings": 64} | keys)
    cfg, _ = hf.read_config(tmp_path / "in")
    older = {
        "rope_parameters": ...,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "dtype": ...,
        "torch_dtype": "bfloat16",
        "auto_map": {"AutoModel": "x.Y"},
    } | keys
    hf_edit(tmp_path / "in", **older)
    model = hf.load_model(tmp_path / "in")
    back = hf_back(model, tmp_path / "out", hf.read_config(tmp_path / "in")[1])
    assert type(back) is type(theirs) and cfg.max_positions == 64
    assert cfg.tied == back.config.tie_word_embeddings == keys.get("tie_word_embeddings", False)
    for seq in (40, 90):
        assert hf_error(model, theirs, seq) < 2e-6 and hf_error(model, back, seq) < 2e-6
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert model.cfg == cfg == hf.read_config(tmp_path / "out")[0]
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1 and "auto_map" not in written
    assert written["dtype"] == "float32"


@parametrize("name", published_configs.PUBLISHED)
def test_hf_published_configs(name, tmp_path):
    """A folder with a published config.json gives the logits of transformers, or is refused with an
    error that names what is not supported.

    The sequence is longer than the trained length, or as long as the sliding window. Catches a
    spelling of a key that transformers understands in another way.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config, refusal = published_configs.PUBLISHED[name]
    config = published_configs.shrink(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if refusal:
        with raises(ValueError, match=refusal):
            hf.read_config(tmp_path)
        return

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    weights = {name: p + torch.randn_like(p) / 10 for name, p in theirs.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = hf.load_model(tmp_path)
    window = hf.sliding_window(hf.read_config(tmp_path)[1])
    theirs = hf_load(tmp_path, dtype=torch.float32)  # not in the dtype that config.json names
    assert hf_error(model, theirs, min(150, window or 150)) < 5e-6


@parametrize(
    "name, published",
    [
        ("7b", "meta-llama/Llama-2-7b-hf"),
        ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
    ],
)
def test_hf_rows_of_models_are_the_published_ones(name, published):
    """A row of MODELS equals the configuration that an import of the published model gives. A model
    from scratch is exported in the published architecture.

    Catches a wrong size, norm or rotary base.
    """
    source, _ = published_configs.PUBLISHED[published]
    assert hf.model_of(source) == m.MODELS[name]
    exported = hf.export_config(m.MODELS[name], {}, torch.bfloat16)
    assert exported.model_type == source["model_type"]
    assert hf.model_of(exported.to_dict()) == m.MODELS[name]
    # the ids of another tokenizer would end a text where this model has a word
    assert exported.bos_token_id is None and exported.eos_token_id is None


LENGTH = "original_max_position_embeddings"
LLAMA3_NO_LENGTH = {key: value for key, value in LLAMA3.items() if key != LENGTH}


@parametrize(
    "keys",
    [
        {"rope_theta": 7e5},
        {"rope_scaling": LLAMA3},
        # the trained length may stand beside the scaling, in it and beside it, or nowhere
        {"rope_scaling": LLAMA3_NO_LENGTH, LENGTH: 32},
        {"rope_scaling": LLAMA3, LENGTH: 32},
        {"rope_scaling": LLAMA3_NO_LENGTH},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, LENGTH: 32},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, LENGTH: 32},
        {"rope_scaling": YARN, LENGTH: 64},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, LENGTH: 32},
        {LENGTH: 32},
        {"rope_scaling": {"rope_type": "yarn", "factor": None, LENGTH: 32}},
    ],
)
def test_hf_keys_that_disagree_mean_what_transformers_reads(keys, tmp_path):
    """If an older key of config.json disagrees with rope_parameters, the logits are those of
    transformers.

    Catches an import that follows another key than transformers does.
    """
    hf_model(tmp_path)
    hf_edit(tmp_path, **keys)  # beside rope_parameters
    assert hf_error(hf.load_model(tmp_path), hf_load(tmp_path), 100) < 2e-6


@slow
@parametrize(
    "kind, keys, window",
    [
        ("mistral", {}, 40),
        ("qwen2", {"use_sliding_window": False}, 0),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 40),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 0),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, 40),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
            40,
        ),
    ],
)
def test_hf_windows(kind, keys, window, tmp_path, group):
    """If any layer has a sliding window, our logits differ from those of transformers for sequences
    that are longer than the window, and only for those. An export keeps the window.

    Catches a window that an import does not see, or that an export loses.
    """
    theirs = hf_model(tmp_path / "in", kind, sliding_window=40, **keys)
    model = hf.load_model(tmp_path / "in")
    _, source = hf.read_config(tmp_path / "in")
    assert hf.sliding_window(source) == window
    for seq in (40, 60):
        assert (hf_error(model, theirs, seq) < 2e-6) == (not window or seq <= window)
    assert hf_error(model, hf_back(model, tmp_path / "out", source), 40) < 2e-6
    _, exported = hf.read_config(tmp_path / "out")
    for key in ("sliding_window", "layer_types", *keys):
        assert exported.get(key) == source.get(key), key


@parametrize(
    "changes, kind, message",
    [
        ({}, "llama", ""),
        ({"qkv_bias": True}, "qwen2", ""),
        ({"qk_norm": True}, "qwen3", ""),
        # the family that lacks the fewest keys is named
        (
            {"qkv_bias": True, "qk_norm": True},
            "",
            "qwen2's config.json has no key for qk_norm=True;",
        ),
        ({"qk_norm": True}, "mistral", "mistral's config.json has no key for qk_norm"),
        ({"dim": 50}, "", "hidden size .50. is not a multiple of .* heads .6."),
    ],
)
def test_hf_exports_what_computes_it(changes, kind, message, tmp_path, group):
    """A model from scratch is exported as an architecture that computes the same, or it is refused.

    Catches an export from which transformers would compute something else.
    """
    model = m.LLaMA(replace(SMALL, vocab=300, **changes))
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape).bfloat16() / 8)
    if message:
        with raises(Exception, match=message):  # transformers raises a class of its own for dim
            hf_back(model, tmp_path, {"model_type": kind} if kind else {})
    else:
        back = hf_back(model, tmp_path, {}, torch.bfloat16)
        assert (back.config.model_type, back.dtype) == (kind, torch.bfloat16)
        assert hf_error(model, back.float(), 40) < 2e-6


READ_WITH_4 = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
assert transformers.__version__ == "4.57.1", transformers.__version__
tokens = torch.load(sys.argv[2])
for folder in sys.argv[3:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    torch.save(model(tokens).logits, f"{folder}/logits")
"""
EXPORTED = {  # what differs from SMALL in a model from scratch
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}
        | {"original_max_position_embeddings": 16},
        "max_positions": 64,
    },
    "biases": {"rope_theta": 1e6, "qkv_bias": True},
    "biases and yarn": {
        "qkv_bias": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}
        | {"original_max_position_embeddings": 32, "attention_factor": 1.2},
        "max_positions": 64,
    },
    "qk-norms": {"rope_theta": 1e6, "qk_norm": True},
    "qk-norms and llama3": {"qk_norm": True, "rope_scaling": LLAMA3},
}


@slow
def test_hf_exports_are_read_by_transformers_4(tmp_path, group):
    """transformers 4.57.1 computes our logits from exports of models from scratch and of imports,
    and so does transformers 5.

    Catches a rotary base, a scaling, a bias or a norm that only one of the versions finds.
    """
    models = {}
    for name, changes in EXPORTED.items():
        model = models[name] = m.LLaMA(replace(SMALL, vocab=300, **changes))
        for p in model.parameters():
            p.data.copy_(torch.randn(p.shape) / 8 + (p.dim() == 1))
        hf_back(model, tmp_path / name, {})
    for name in (
        "NousResearch/Yarn-Mistral-7b-128k",
        "Qwen/Qwen2.5-7B-Instruct",
        "HuggingFaceTB/SmolLM2-135M",
        "a Llama 3.1 with the original length beside rope_scaling",
    ):
        config = published_configs.shrink(published_configs.PUBLISHED[name][0])
        short = name.replace("/", "-")
        kind = config.pop("model_type")
        hf_model(tmp_path / "in" / short, kind, **config)
        _, source = hf.read_config(tmp_path / "in" / short)
        models[short] = hf.load_model(tmp_path / "in" / short)
        hf_back(models[short], tmp_path / short, source)

    tokens, _ = example(seq=100, vocab=300)
    torch.save(tokens, tmp_path / "tokens")
    command = [sys.executable, "-c", READ_WITH_4, transformers_4(), tmp_path / "tokens"]
    command += [tmp_path / name for name in models]
    read = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    for name, model in models.items():
        theirs = torch.load(tmp_path / name / "logits")
        assert relative(model(tokens), theirs) < 5e-6, name
        assert hf_error(model, hf_load(tmp_path / name, dtype=torch.float32), 100) < 5e-6, name


def test_hf_without_a_network_says_so(tmp_path, monkeypatch):
    """If pip cannot reach an index, test_hf_exports_are_read_by_transformers_4 fails with a
    sentence.

    Catches a test that is skipped silently, and half an installation that a later test takes for a
    whole one.
    """
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with raises(RuntimeError, match="reads an export with transformers 4.57.1, which pip could no"):
        transformers_4()
    assert not [*tmp_path.iterdir()]


@parametrize(
    "key, value, message",
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu' is supported"),
        ("attention_bias", True, "attention_bias is True; only False is supported"),
        ("is_causal", False, "is_causal is False; only True is supported"),
        (
            "partial_rotary_factor",
            0.5,
            "'default' with .'partial_rotary_factor'. are not supported",
        ),
        ("hidden_size", "64", "'hidden_size' expected int, got str"),
        ("num_key_value_heads", 3, "kv_heads is 3, which does not divide the 4 heads; nearest: 2"),
        ("rope_parameters", [1], "'rope_parameters' with value .1."),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "'dynamic' with .'factor'"),
        (
            "rope_parameters",
            {"rope_type": "yarn", "factor": 2.0, "truncate": False},
            "'yarn' with .'truncate'. are not supported",
        ),
        ("rope_parameters", {"rope_type": "linear", "factor": None}, "'linear' lack .'factor'."),
    ],
)
def test_hf_keys_that_are_not_built_are_refused(key, value, message, tmp_path):
    """A key of config.json that asks for something unsupported is refused, and the error has its
    value.

    Catches a key that is ignored, so that the model computes something else.
    """
    hf_model(tmp_path)
    hf_edit(tmp_path, **{key: value})
    with raises(ValueError, match=message):
        hf.read_config(tmp_path)


def add_shards(folder: Path) -> None:
    """Put files into a folder that its index does not name: older shards, and other formats."""
    for i, file in enumerate(sorted(folder.glob("model-*"))):
        tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}
        for other in (f"model-0000{i + 1}-of-00009", f"consolidated-{i}", "model.fp16"):
            save_file(tensors, folder / f"{other}.safetensors", {"format": "pt"})


def rename_shards(folder: Path) -> None:
    """Give the shards names that do not begin with `model`, one of them in a folder below."""
    (folder / "below").mkdir()
    index = json.loads((folder / hf.INDEX).read_text())
    for i, file in enumerate(sorted(folder.glob("model-*"))):
        new = "below/x.safetensors" if i == 0 else f"weights.{i} of 9.safetensors"
        file.rename(folder / new)
        for tensor, old in index["weight_map"].items():
            if old == file.name:
                index["weight_map"][tensor] = new
    (folder / hf.INDEX).write_text(json.dumps(index))


def drop_prefix(folder: Path) -> None:
    """Name the tensors as those of a base model, as Qwen3-Embedding has them."""
    index = json.loads((folder / hf.INDEX).read_text())
    weight_map = {name.removeprefix("model."): file for name, file in index["weight_map"].items()}
    hf_edit(folder, hf.INDEX, weight_map=weight_map)
    for file in folder.glob("model-*"):
        tensors = load_file(file)
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(tensors, file, {"format": "pt"})


def forget_a_tensor(folder: Path) -> None:
    """Take a tensor out of the index. transformers reads all tensors of a file that is named."""
    index = json.loads((folder / hf.INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / hf.INDEX).write_text(json.dumps(index))


def no_metadata(folder: Path) -> None:
    hf_edit(folder, hf.INDEX, metadata={})


@parametrize("change", [add_shards, rename_shards, drop_prefix, forget_a_tensor, no_metadata])
def test_hf_index_decides(change, tmp_path):
    """The files that an index names are read, and no others.

    Catches a tensor that comes from a file which transformers does not read.
    """
    theirs = hf_model(tmp_path)
    change(tmp_path)
    assert hf_error(hf.load_model(tmp_path), theirs, 40) < 2e-6
    assert hf_error(hf.load_model(tmp_path), hf_load(tmp_path), 40) < 2e-6


def test_hf_files_without_an_index(tmp_path):
    """Without an index, model.safetensors is read, and no other file.

    Catches weights that come from shards of an earlier download.
    """
    theirs = hf_model(tmp_path, shard="1GB")
    other = {name: tensor + 1 for name, tensor in load_file(tmp_path / hf.WEIGHTS).items()}
    for name in ("model-00001-of-00001", "model.fp16", "consolidated"):
        save_file(other, tmp_path / f"{name}.safetensors", {"format": "pt"})
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos")
    assert hf_error(hf.load_model(tmp_path), theirs, 40) < 2e-6


def weight_map(**changes):
    """Return a function that changes entries of a folder's index. "FIRST": its first file."""

    def change(folder):
        index = json.loads((folder / hf.INDEX).read_text())
        first = sorted(index["weight_map"].values())[0]
        files = {name: first if file == "FIRST" else file for name, file in changes.items()}
        hf_edit(folder, hf.INDEX, weight_map=index["weight_map"] | files)

    return change


def index_text(text: str):
    return lambda folder: (folder / hf.INDEX).write_text(text)


def same_tensor_twice(folder: Path) -> None:
    last = sorted(folder.glob("model-*"))[-1]
    norm = {"model.embed_tokens.weight": torch.ones(300, 64)}
    save_file(load_file(last) | norm, last, {"format": "pt"})


def beside_the_index(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / hf.WEIGHTS, {"format": "pt"})


def without_head(folder: Path) -> None:
    """Take the head out of a folder, as an embedding model has it."""
    index = json.loads((folder / hf.INDEX).read_text())
    file = folder / index["weight_map"].pop("lm_head.weight")
    (folder / hf.INDEX).write_text(json.dumps(index))
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})


def fifo_index(folder: Path) -> None:
    (folder / hf.INDEX).unlink()
    os.mkfifo(folder / hf.INDEX)


EMBED = {"model.embed_tokens.weight": "model-00002-of-00007.safetensors"}


@parametrize(
    "change, message",
    [
        (lambda f: next(f.glob("model-00002*")).unlink(), "names model-00002.*, which is missing"),
        (weight_map(**EMBED), "names model-00002-of-00007.safetensors, which is missing"),
        (
            weight_map(x="FIRST"),
            "says that x lies in model-0.*, but it lies in none of its files",
        ),
        (same_tensor_twice, "says that model.embed_tokens.weight lies in .*, but it lies in model"),
        (weight_map(x="../x.safetensors"), "names ../x.safetensors, which is not in its folder"),
        (weight_map(x="/etc/passwd"), "names /etc/passwd, which is not in its folder"),
        (weight_map(x="."), "cannot be read: .* is no regular file"),
        (weight_map(x="config.json"), "config.json is truncated, or no safetensors file"),
        (index_text("{"), "index.json is not of the form .*weight_map.*JSONDecodeError"),
        (fifo_index, "index.json cannot be read: .*is no regular file"),
        (beside_the_index, "model.safetensors lies beside .*index.json, which names model-00001"),
        (
            lambda f: (f / hf.INDEX).unlink(),
            "there is neither model.safetensors nor .*index.json in it. Other files are not read "
            "without the index: model-00001-of-.*, .... Download",
        ),
        (
            without_head,
            "1 tensor is missing: lm_head.weight. .* A base model or an embedding model",
        ),
    ],
)
def test_hf_files_that_contradict_each_other_are_refused(change, message, tmp_path):
    """A folder whose files are not those of its index is refused, and the error names the file or
    the tensor. No error advises to convert the folder, because it holds no pickles.

    Catches weights of a file that is not part of the model, and a path that leads out of the
    folder.
    """
    hf_model(tmp_path)
    change(tmp_path)
    cfg, _ = hf.read_config(tmp_path)
    with raises(ValueError, match=message) as refused:
        hf.open_weights(tmp_path, cfg)
    assert "save_pretrained" not in str(refused.value)


@parametrize(
    "text, fault",
    [
        ("[]", "it is \\[\\], not an object"),
        ("null", "it is None, not an object"),
        ("{}", "it has no weight_map"),
        ('{"weight_map": {}}', "its weight_map is empty, so it names no files"),
        ('{"weight_map": null}', "its weight_map is None, not an object"),
        ('{"weight_map": ["a"]}', "its weight_map is \\['a'\\], not an object"),
        ('{"weight_map": {"x": 5}}', "its weight_map gives x 5, not the name of a file"),
        ('{"weight_map": {"x": null}}', "its weight_map gives x None, not the name of a file"),
        ('{"weight_map": {"x": ["a"]}}', "its weight_map gives x \\['a'\\], not the name"),
        ('{"weight_map": {"x": ""}}', "its weight_map gives x '', not the name of a file"),
    ],
)
def test_hf_index_of_another_form_is_refused(text, fault, tmp_path):
    """An index without a weight_map that names a file for each tensor is refused. The error names
    the index, and says what is wrong with it.

    Catches an error that only shows which operation of Python has failed.
    """
    (tmp_path / hf.INDEX).write_text(text)
    message = f"{tmp_path}/{hf.INDEX} is not of the form .*: {fault}"
    with raises(ValueError, match=message):
        hf.open_tensors(tmp_path)


def test_hf_explicit_files_of_weights_are_refused(tmp_path):
    """A config.json that names other files of weights is refused.

    Catches model.safetensors that is read in their place.
    """
    hf_model(tmp_path)
    hf_edit(tmp_path, transformers_weights="other.safetensors")
    with raises(ValueError, match="transformers_weights is 'other.safetensors'; only None"):
        hf.read_config(tmp_path)


@parametrize("file", ["config.json", hf.INDEX, "model-00001", "tokenizer.json"])
def test_hf_files_that_cannot_be_read_say_so(file, tmp_path):
    """If a file exists and cannot be read, the error names it with the reason.

    Catches an error that advises to download a file that is there.
    """

    def deny():
        raise PermissionError(13, "Permission denied", file)

    hf_model(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    on_file_event(f"{tmp_path}/in/{file}", deny)
    with raises(ValueError, match=f"{file}.*Permission denied"):
        main(f"--init hf:{tmp_path}/in --steps 0 --out {tmp_path}/o --export {tmp_path}/e")


@parametrize("whole", [True, False])
def test_hf_advice_for_pickles_makes_up_no_weight(whole, tmp_path, capsys):
    """The command that the error for pickles advises converts a whole model, and stops if the head
    is missing.

    Catches advice that writes a random head.
    """
    folder = tmp_path / 'it\'s "$(false)"'
    theirs = hf_model(folder, shard="1GB")
    weights = load_file(folder / hf.WEIGHTS)
    if not whole:
        del weights["lm_head.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / hf.WEIGHTS).unlink()
    with raises(ValueError, match="Pickles such as pytorch_model.bin are never read") as refused:
        hf.load_model(folder)
    _, _, command = str(refused.value).partition("convert them: ")
    _, _, code = shlex.split(command)  # python -c CODE
    if whole:
        exec(code, {})
        assert hf_error(hf.load_model(folder), theirs, 40) < 2e-6
    else:
        with raises(AssertionError, match="lm_head.weight"):
            exec(code, {})
        assert not (folder / hf.WEIGHTS).exists()


@parametrize("kind", ["equal", "equal, in bf16", "another"])
def test_hf_tied_head_that_is_stored_too(kind, tmp_path, capsys):
    """Some checkpoints of a tied model store the head, too. If it equals the embedding, the model
    stays tied. If it differs, the model has two matrices, as in transformers 5.

    Catches a head that is lost, or that is trained as the embedding.
    """
    hf_model(tmp_path / "in", tie_word_embeddings=True, attention_dropout=0.1, shard="1GB")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    if "bf16" in kind:
        embedding = tensors["model.embed_tokens.weight"] = embedding.bfloat16().float()
    head = {"another": embedding + 1, "equal": embedding.clone()}.get(kind, embedding.bfloat16())
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})

    ours = hf.load_model(tmp_path / "in")
    assert torch.equal(ours.head.weight, head.float())
    assert hf_error(ours, hf_load(tmp_path / "in", dtype=torch.float32), 40) < 2e-6
    assert ours.cfg.tied == (ours.head is ours.embed) == (kind != "another")

    if kind == "equal":
        return
    main(f"--init hf:{tmp_path}/in --steps 1 --out {tmp_path}/o --export {tmp_path}/e")
    two = "Here they are two matrices, because its files store a head that differs"
    said = capsys.readouterr().out
    assert (two in said) == (kind == "another")
    assert "config.json has attention_dropout 0.1. Here attention drops nothing" in said
    assert hf_load(tmp_path / "e").config.tie_word_embeddings == (kind != "another")
    main(f"--resume {tmp_path}/o/step-00000001 --steps 2 --out {tmp_path}/p --save-every -1")
    assert len(losses(tmp_path / "p")) == 1


def test_hf_tokenizer_that_lies_unused_is_named(tmp_path, capsys):
    """If an import has a tokenizer and the run does not use it, the run says so.

    Catches a model that is trained on bytes, which it does not know, without a word.
    """
    hf_model(tmp_path / "in")
    flags = f"--init hf:{tmp_path}/in --dry-run --out {tmp_path}/o"
    main(flags)
    assert "has a tokenizer" not in capsys.readouterr().out
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    main(flags)
    assert f"has a tokenizer. To use it, pass --tokenizer {tmp_path}/in" in capsys.readouterr().out


def test_untie_cannot_change_on_resume(tmp_path):
    """--untie is refused without an import, and may not change when a run is resumed.

    Catches a resume that trains another model than the checkpoint has.
    """
    hf_model(tmp_path / "in", tie_word_embeddings=True)
    with raises(ValueError, match="--untie: it is for models that --init hf:DIR imports. Drop"):
        main(f"--untie --out {tmp_path}/o")
    dist.destroy_process_group()
    for flag, other, began in (("", "--untie", "without"), ("--untie", "--no-untie", "with")):
        out = tmp_path / f"o{flag}"
        main(f"--init hf:{tmp_path}/in {flag} --steps 1 --out {out}")
        error = f"{other}: --untie cannot change on resume, and the run began {began} it. Drop"
        with raises(ValueError, match=error):
            main(f"--resume {other} --steps 2 --out {out}")
        dist.destroy_process_group()
        main(f"--resume {flag} --steps 2 --out {out}")
        assert len(losses(out)) == 2


@parametrize(
    "name, flag, scaling, positions",
    [
        (
            "Llama 2",
            "yarn:4",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            256,
        ),
        ("Llama 3.2", "llama3:2", LLAMA3 | {"factor": 64.0}, 128),
        (
            "Yarn-Llama-2",
            "yarn:2.5",
            {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": 16},
            160,
        ),
        ("Vicuna v1.5 16K", "linear:2", {"rope_type": "linear", "factor": 8.0}, 128),
    ],
)
def test_rope_scaling_counts_from_the_trained_length(name, flag, scaling, positions, tmp_path):
    """`--rope-scaling` multiplies the import's own factor, and the export has the product.

    Catches a factor that replaces the one that the model was trained with.
    """
    kind, keys = PUBLISHED[name]
    hf_model(tmp_path / "in", kind, **{"max_position_embeddings": 64} | keys)
    main(
        f"--init hf:{tmp_path}/in --rope-scaling {flag} --steps 0 --out {tmp_path}/o "
        f"--export {tmp_path}/out"
    )
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    del written["rope_parameters"]["rope_theta"]
    assert written["rope_parameters"] == scaling
    assert written["max_position_embeddings"] == positions


def test_export_rounds_as_training_does(group):
    """In an export in bf16, a weight in the middle between two bf16 numbers is rounded away from
    zero, as training rounds it.

    Catches PyTorch's rounding, to the number whose last bit is 0.
    """
    ties = torch.tensor([[1, -1], [1, 3]]) * (1 + 2.0**-8)
    parts = {"ours": {"theirs.a": (1, 2), "theirs.b": (1, 2)}}
    tensors = hf.collect_weights(lambda name: ties, parts, torch.bfloat16)
    assert [*tensors] == ["theirs.a", "theirs.b"]
    assert tensors["theirs.a"].tolist() == [[1 + 2.0**-7, -1 - 2.0**-7]]
    exact = hf.collect_weights(lambda name: ties, parts, torch.float32)
    assert torch.equal(torch.cat([*exact.values()]), ties)


@parametrize("untie", ["", "--untie"])
def test_hf_train_and_export(untie, tmp_path, capsys):
    """A tied model is imported, trained, exported with its tokenizer and licence, and imported
    again. It stays tied, unless --untie gives it a head of its own.

    Catches a head that an export or an import ties or unties, and a file that an export leaves out.
    """
    hf_model(tmp_path / "in", tie_word_embeddings=True, shard="1GB")
    beside = {
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "LICENSE",
        "USE_POLICY.md",
        "generation_config.json",
    }
    for name in beside | {"my_token", "pytorch_model.bin"}:
        (tmp_path / "in" / name).write_text("{}")
    states = []
    for steps, source, target in ((2, "in", "a"), (0, "a", "b")):
        folder = tmp_path / target
        flags = f"{untie} --steps {steps} --out {folder}-out --export {folder}"
        main(f"--init hf:{tmp_path / source} {flags}")
        text = capsys.readouterr().out
        assert f"exported {folder}: llama" in text
        assert ("one matrix as embedding and as head (tied), and stays so" in text) == (not untie)
        if untie and source == "in":
            assert "Here they are two matrices, because of --untie" in text
        theirs = hf_load(folder)
        assert theirs.config.tie_word_embeddings == (not untie)
        states.append(theirs.state_dict())
    files = {file.name for file in (tmp_path / "a").iterdir()}
    index = "model.safetensors.index.json"
    assert files == {*beside, "config.json", "model-00001-of-00001.safetensors", index}
    head, embedding = states[0]["lm_head.weight"], states[0]["model.embed_tokens.weight"]
    assert torch.equal(head, embedding) == (not untie)  # two matrices are trained apart
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


BATCH = 4  # sequences per step, where we train beside transformers


def train_in_two_runs(folder: Path, name: str, plan: str, lr: float, more: str = "") -> tuple:
    """Import a model of PUBLISHED in float64, train it for two steps on two ranks, resume it on one
    rank for a third step, and export it to folder/e.

    plan: flags of the first run. more: flags of both. Returns the losses of the three steps, the
    sequences on which they were computed, and what the first run printed.
    """
    kind, keys = PUBLISHED[name]
    hf_model(folder / "in", kind, **keys | {"num_key_value_heads": 2, "sliding_window": None})
    corpus = folder / "corpus.txt"
    corpus.write_text(Path(hf.__file__).read_text())
    flags = f"--init hf:{folder}/in --data {corpus} --dtype fp64 --batch {BATCH} --lr {lr}"
    flags += f" --schedule constant --warmup 0 {more}"
    text = run(f"{flags} {plan} --steps 2 --out {folder}/a", 2)
    resume = f"--resume {folder}/a/step-00000002 --p auto --sp auto --pp 1 --micro-batch 2"
    run(f"{flags} {resume} --steps 3 --out {folder}/b --export {folder}/e")
    found = [loss for _, loss, _ in losses(folder / "a") + losses(folder / "b")]
    sequences, _ = data.split(*data.open_corpus(str(corpus), 300, []), 32, 0, 1)
    return found, sequences, text


def train_theirs(model, sequences, steps: int, batch: int, lr: float) -> list[float]:
    """Train a model of transformers by PyTorch's AdamW, with train.py's settings. Return the
    losses.

    sequences: from data.split. Sequence i has the tokens of sample i, and their labels.
    """
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    adamw = torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}],
        lr=lr,
        betas=(0.9, 0.95),
    )
    found = []
    for step in range(steps):
        windows = [sequences.sample(step * batch + i).tokens for i in range(batch)]
        ids = torch.tensor(np.stack(windows)).long()
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        found.append(loss.item())
    return found


@slow
@parametrize(
    "name, plan", [("Llama 3.2", "--p 2 --sp 2"), ("Qwen2.5, small", "--pp 2 --micro-batch 1")]
)
def test_tied_models_train_as_in_transformers(name, plan, tmp_path):
    """A tied model is imported, trained for two steps on two ranks, resumed on one rank, trained
    for a third step, and exported.

    Losses and weights are those of transformers' own training in float64. Only rotary angles and
    norms are in float32 there. Catches a gradient of one of a tied matrix's two uses that is lost,
    and a head that is trained apart.
    """
    found, sequences, _ = train_in_two_runs(tmp_path, name, plan, lr=1e-3)
    theirs = hf_load(tmp_path / "in", dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    expected = train_theirs(theirs, sequences, 3, BATCH, lr=1e-3)
    assert found == approx(expected, rel=1e-6)

    exported = hf_load(tmp_path / "e", dtype=torch.float64)
    assert exported.config.tie_word_embeddings
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    weights = dict(exported.named_parameters())
    assert weights.keys() == before.keys()
    for name, p in theirs.named_parameters():
        assert relative(weights[name] - before[name], p.detach() - before[name]) < 0.01, name


@parametrize(
    "flag, scaling, advice",
    [
        ("", {}, "--rope-scaling yarn:3 extends it to 192"),
        ("", LLAMA3, "--rope-scaling llama3:3 extends it to 192"),
        ("yarn:2", {}, "A larger factor of --rope-scaling extends it, such as yarn:3"),
        ("linear:1.5", {}, "A larger factor of --rope-scaling extends it, such as linear:3"),
    ],
)
def test_hf_advice_for_a_longer_seq(flag, scaling, advice):
    """If --seq is longer than an import's positions, the run says which --rope-scaling reaches it.
    With this flag, the model does reach it.

    Catches the advice to enlarge a factor that nobody has passed.
    """
    imported = replace(SMALL, max_positions=64, rope_scaling=scaling)
    cfg = train.Config(seq=160, rope_scaling=flag)
    assert train.how_to_reach(cfg, hf.with_rope(flag, imported)) == advice
    (advised,) = re.findall(r"\w+:\d+", advice)
    assert hf.with_rope(advised, imported).max_positions == 192


@parametrize("text", ["1000000", "1000000.0", "1e6"])
def test_bases_of_rotary_angles_in_all_spellings(text):
    """--rope-scaling theta:BASE takes a base as it is written in papers, and changes only that."""
    assert hf.with_rope(f"theta:{text}", SMALL) == replace(SMALL, rope_theta=1e6)


@slow
def test_hf_resumes_without_its_folder(tmp_path, capsys):
    """A resumed run takes its model from the checkpoint, whether or not its flags name the import
    again. A factor of --rope-scaling still counts from the import. An export works without a
    tokenizer.

    Catches a resume that needs the folder with which the run began.
    """
    theirs = hf_model(tmp_path / "in", "qwen3", max_position_embeddings=64, eos_token_id=[7, 8])
    init = f"--init hf:{tmp_path}/in --rope-scaling yarn:2"
    flags = "--seq 160 --batch 2 --steps 2 --save-every 1"
    main(f"{flags} {init} --out {tmp_path}/a")
    assert (
        "--seq 160 is longer than the 128 tokens that the rotary embedding reaches. "
        "A larger factor of --rope-scaling extends it"
    ) in capsys.readouterr().out
    (tmp_path / "in").rename(tmp_path / "gone")
    for i, again in enumerate(("", init)):
        out = tmp_path / f"b{i}"
        main(f"{flags} {again} --resume {tmp_path}/a/step-00000001 --out {out} --export {out}/hf")
        assert losses(out) == losses(tmp_path / "a")[1:]
        assert f"{tmp_path}/in is not there any more" in capsys.readouterr().out
        back = hf_load(out / "hf")
        assert type(back) is type(theirs) and back.config.eos_token_id == [7, 8]
        assert back.config.max_position_embeddings == 128
        assert back.config.rope_parameters["factor"] == 2.0


@parametrize(
    "flag, message",
    [
        ("yarn:4", None),  # the same again
        ("yarn:8", None),
        ("yarn:2", "the run has yarn scaling by a factor of 4, and this flag makes it yarn by 2"),
        ("linear:8", "the run has yarn scaling by a factor of 4, and this flag makes it linear"),
    ],
)
def test_rope_scaling_may_only_grow_on_resume(flag, message, group):
    """A resumed run may extend its rotary scaling. It may not shrink it, or take another kind.

    Catches a run whose max_positions and factor contradict each other, so that it cannot be
    exported any more.
    """
    resumed_model = hf.with_rope("yarn:4", SMALL)
    meta = {"model": asdict(resumed_model)}
    resumed = SimpleNamespace(meta=meta, folder=Path("o"))
    cfg = train.Config(rope_scaling=flag, seq=32)
    if message is None:
        model = train.extend_positions(cfg, SMALL, {}, resumed)
        factor = model.rope_scaling["factor"]
        assert model.max_positions == factor * SMALL.max_positions
        return
    with raises(ValueError, match=message):
        train.extend_positions(cfg, SMALL, {}, resumed)


@parametrize("flag", ["llama3:2", "yarn:2", "linear:2"])
def test_rope_scaling_counts_from_the_length_of_the_run(flag, tmp_path):
    """A run from scratch that is resumed with --rope-scaling gets the frequencies that an import of
    its export gets with the same flag: they count from the length that the run was trained on.

    Catches a scaling that counts from the length of the row of MODELS, which the run exceeded.
    """
    main(f"--seq 1040 --batch 1 --steps 1 --out {tmp_path}/o --export {tmp_path}/e")  # tiny: 1024
    more = f"--rope-scaling {flag} --seq 1050 --batch 1"
    main(f"--resume --steps 2 {more} --out {tmp_path}/o")
    main(f"--init hf:{tmp_path}/e --steps 0 {more} --save-every 0 --out {tmp_path}/i")
    resumed, imported = (
        json.loads((tmp_path / step / "meta.json").read_text())["model"]
        for step in ("o/step-00000002", "i/step-00000000")
    )
    assert resumed["rope_scaling"] == imported["rope_scaling"] and imported["rope_scaling"]
    assert resumed["max_positions"] == imported["max_positions"] == 2080


def test_hf_weights_of_eight_bits_are_refused(tmp_path):
    """Weights in float8 have scales, which only a quantisation_config would name.

    Catches a traceback, and weights that are read without their scales.
    """
    from safetensors.torch import load_file, save_file

    hf_model(tmp_path, shard="1GB")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with raises(ConfigError, match="float8_e4m3fn; only floating point of at least 16 bits"):
        main(f"--init hf:{tmp_path} --out {tmp_path}/o")


# ---------------------------------------------------------------------------- the newest export


def export_of_step(folder: Path, step: int, run: str = "0123abcd") -> None:
    """Export a model whose weights are all `step`. Needs a group of ranks."""
    model = m.LLaMA(SMALL)
    weights = {name: torch.full_like(p, step) for name, p in model.named_parameters()}
    hf.export(folder, SMALL, weights.get, torch.float32, {}, [], run=run, step=step)


def whole_exports(folder: Path) -> dict[str, int]:
    """Return the whole exports in a folder and in the folders that an exchange makes beside it.

    Each is given as {suffix of the folder's name: step}. The suffix is "", ".partial" or ".old".
    """
    exports = {}
    for place in folder.parent.glob(f"{folder.name}*"):
        if not (place / hf.INDEX).exists():
            continue
        model = hf.load_model(place)
        step = json.loads((place / hf.INDEX).read_text())["metadata"]["step"]
        assert all((p == step).all() for p in model.parameters())
        suffix = place.name.removeprefix(folder.name)
        exports[re.sub("[.][0-9a-f]{8}", "", suffix)] = step  # without the run's number
    return exports


@parametrize(
    "event, path, left",
    [
        ("os.mkdir", "partial$", {"": 2}),
        ("os.chmod", "partial/model-00002", {"": 2}),  # its weights are written
        ("open", "partial/config.json", {"": 2}),
        ("open", "partial/model.safetensors.index.json", {"": 2}),
        ("os.rename", "/x y$", {"": 2, ".partial": 4}),
        ("os.rename", "partial$", {".old": 2, ".partial": 4}),  # between the two renames
        ("shutil.rmtree", "old$", {"": 4, ".old": 2}),
    ],
)
def test_hf_killed_export_leaves_a_whole_one(event, path, left, tmp_path, monkeypatch):
    """A process that is killed while it replaces an export leaves the old or the new export whole.
    The next run gives the newest one its name, and deletes the rest.

    Catches half an export. event, path: where the process is killed. left: the whole exports then.
    """
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 60_000)
    folder = tmp_path / "x y"
    folder.mkdir()
    child = os.fork()
    if not child:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        export_of_step(folder, 2)
        (folder / "notes.md").write_text("mine")
        on_file_event(path, kill_self, event)
        export_of_step(folder, 4)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert whole_exports(folder) == left
    folder.mkdir(exist_ok=True)  # as the start of the next run does
    hf.finish_exchange(folder, "0123abcd")
    newest = 2 if left.get("") == 2 else 4
    assert whole_exports(folder) == {"": newest} and [*tmp_path.iterdir()] == [folder]
    assert (folder / "notes.md").read_text() == "mine"


def test_hf_export_replaces_only_its_own(tmp_path, group):
    """An export replaces the earlier one of its run, even behind a link, and leaves a user's files.
    An export that fails leaves the earlier one. Another run may not export there.

    Catches files of a user or of another run that an export deletes.
    """
    real, folder = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o750)
    folder.symlink_to(real)
    export_of_step(folder, 2)
    (folder / "README.md").write_text("mine")
    (folder / "runs").mkdir()
    export_of_step(folder, 4)
    assert whole_exports(real) == {"": 4} and folder.is_symlink()
    assert (folder / "README.md").read_text() == "mine" and (folder / "runs").is_dir()
    assert real.stat().st_mode & 0o777 == 0o750
    with raises(ConfigError, match="link is not empty|real is not empty"):
        export_of_step(folder, 6, run="89abcdef")
    on_file_event(f"{real}.0123abcd.partial/config.json", fail_disk_full)
    with raises(ConfigError, match="No space left on device"):
        export_of_step(folder, 6)
    assert whole_exports(real) == {"": 4} and {*tmp_path.iterdir()} == {real, folder}


def test_hf_export_drops_files_of_another_tokenizer(tmp_path, group):
    """If a run's tokenizer changes, its next export has the files of the new tokenizer only.

    Catches a chat template that stays beside a tokenizer to which it does not belong.
    """
    folder, weights = tmp_path / "export", dict(m.LLaMA(SMALL).named_parameters())
    for step, names in ((1, ["tokenizer.json", "chat_template.jinja"]), (2, ["tokenizer.json"])):
        companions = tmp_path / f"tokenizer {step}"
        companions.mkdir()
        for name in names:
            (companions / name).write_text(f"{step}")
        hf.export(folder, SMALL, weights.get, torch.float32, {}, [companions], run="01", step=step)
        (folder / "notes.md").write_text("mine")
    assert (folder / "tokenizer.json").read_text() == "2" and (folder / "notes.md").exists()
    assert not (folder / "chat_template.jinja").exists()


@parametrize(
    "written, exported",
    [
        ('{"model_max_length": 16, "eos_token": "世"}', {"model_max_length": 64}),
        ('{"model_max_length": 16.0}', {"model_max_length": 64}),
        ('{"model_max_length": 1000000000000000019884624838656}', {}),  # transformers: no limit
        ('{"model_max_length": 128, "eos_token": "</s>"}', {}),
        ('{"model_max_length": null}', {}),
        ("{}", {}),
        ("[]", None),
        ("{", None),
    ],
)
def test_hf_export_extends_the_tokenizer(written, exported, tmp_path, group):
    """The tokenizer of an export allows at least as many tokens as its model. Nothing else in
    tokenizer_config.json changes, and a file with nothing to change is copied byte by byte.

    Catches a model that was extended to longer texts, which transformers then cuts.
    """
    (tmp_path / "tok").mkdir()
    file = tmp_path / "tok" / "tokenizer_config.json"
    file.write_text(written)
    file.chmod(0o444)
    cfg = replace(SMALL, **EXPORTED["yarn"])
    weights = dict(m.LLaMA(cfg).named_parameters())
    hf.export(tmp_path / "e", cfg, weights.get, torch.float32, {}, [tmp_path / "tok"])
    text = (tmp_path / "e" / file.name).read_text()
    if exported:
        assert json.loads(text) == json.loads(written) | exported
    else:
        assert text == written


def test_hf_layer_types_may_be_null():
    """A config.json may say null where it could list the kinds of layers. Catches a traceback."""
    assert hf.sliding_window({"model_type": "llama", "layer_types": None}) == 0


def test_hf_export_takes_the_tokenizer_files_of_one_folder(tmp_path):
    """If --tokenizer names another folder than --init, all tokenizer files come from there.

    Catches the import's chat template beside a tokenizer whose template is another one.
    """
    folders = {
        "import": "tokenizer.json chat_template.jinja merges.txt generation_config.json LICENSE",
        "tokenizer": "tokenizer.json tokenizer_config.json",
    }
    for folder, names in folders.items():
        (tmp_path / folder).mkdir()
        for name in names.split():
            (tmp_path / folder / name).write_text("{}")
    found = hf.companion_files([tmp_path / folder for folder in folders])
    assert {f"{file.parent.name}/{file.name}" for file in found} == {
        "import/generation_config.json",
        "import/LICENSE",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }
    # a folder without a tokenizer replaces nothing
    assert len(hf.companion_files([tmp_path / "import", tmp_path])) == 5


@parametrize(
    "resumed_step, message",
    [
        (None, "hf is not empty. Name another folder"),
        (1, "hf has the weights of step 2, and this run resumes step 1. Name another"),
        (2, ""),
        (3, ""),
    ],
)
@parametrize("place", ["hf", "hf.0123abcd.old"])  # where a kill may have left it
def test_hf_export_folder_is_checked_at_the_start(place, resumed_step, message, tmp_path, group):
    """Only a run that resumes may replace its export, and only by that of the same or a later step.

    Catches an export that is lost because a command is given twice. resumed_step: None for a run
    that begins.
    """
    export_of_step(tmp_path / "new", 2)
    folder = tmp_path / "hf"
    (tmp_path / "new").rename(tmp_path / place)
    if message:
        with raises(ValueError, match=message.replace("hf ", f"{place} ")):
            hf.check_export_folder(folder, "0123abcd", resumed_step)
    else:
        hf.check_export_folder(folder, "0123abcd", resumed_step)
    if place == "hf":
        with raises(ValueError, match="hf is not empty. Name another folder"):
            hf.check_export_folder(folder, "89abcdef", resumed_step)


def test_hf_export_to_a_mount_point_is_refused(tmp_path, monkeypatch):
    """A folder that cannot be renamed is refused at the start.

    Catches a run whose export fails at its end.
    """
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path.resolve())
    with raises(ValueError, match="is a mount point, which cannot be renamed. Name a folder in it"):
        hf.check_export_folder(tmp_path, "0123abcd", None)


def same_weights(a: Path, b: Path) -> bool:
    a, b = hf.load_model(a).state_dict(), hf.load_model(b).state_dict()
    return all(torch.equal(a[name], b[name]) for name in a)


@slow
def test_hf_export_at_every_save(tmp_path, capsys):
    """With --save-every, each save also exports.

    Catches an export of other weights than the checkpoint's, and one that changes the training.
    """
    out, folder = tmp_path / "o", tmp_path / "hf"
    flags = "--save-every 2 --keep 9"
    partial = f"{folder}.{hf.run_number(out)}.partial"

    def keep_a_copy():  # of the export in the folder, when the next one is almost complete
        step = hf.exported_step(folder, hf.run_number(out))
        if step:
            shutil.copytree(folder, tmp_path / f"hf{step}", dirs_exist_ok=True)

    on_file_event(f"{partial}/{hf.INDEX}", keep_a_copy, "open")
    main(f"{flags} --save-async --out {out} --export {folder}")
    text = capsys.readouterr().out
    assert re.findall(r"saved|exported", text) == 3 * ["saved", "exported"]
    assert losses(out) == uninterrupted_losses(0)
    assert [*tmp_path.glob("hf.*")] == []
    for step, place in ((2, tmp_path / "hf2"), (4, tmp_path / "hf4"), (6, folder)):
        main(
            f"--resume {out}/step-{step:08d} --steps {step} --out {tmp_path}/x{step} "
            f"--export {tmp_path}/x{step}-hf"
        )
        assert same_weights(place, tmp_path / f"x{step}-hf"), step


@slow
def test_hf_export_that_fails_loses_nothing(tmp_path, capsys):
    """If the disk is full at an export, the run goes on and says so. If it is the last export, the
    command fails.

    Catches a run, a checkpoint or an earlier export that is lost because a disk is full.
    """
    out, folder = tmp_path / "o", tmp_path / "hf"
    full = [4, 7]  # the disk is full when these steps are exported

    def fill_disk():
        if saved_steps(out)[-1] in full:
            fail_disk_full()

    on_file_event(f"{folder}.{hf.run_number(out)}.partial$", fill_disk, "os.mkdir")
    flags = f"--save-every 2 --keep 9 --out {out} --export {folder}"
    main(flags)
    text = capsys.readouterr().out
    assert f"step 4 was not exported: {folder}: [Errno 28] No space left on device" in text
    assert re.search(r"step 5/6 .*\(step 4 was not exported: ", text)
    assert saved_steps(out) == [2, 4, 6] and losses(out) == uninterrupted_losses(0)
    with raises(SystemExit, match="train.py: step 7 was not exported: .*No space left"):
        main(f"{flags} --steps 7 --resume")
    assert saved_steps(out) == [2, 4, 6, 7]
    assert json.loads((folder / hf.INDEX).read_text())["metadata"]["step"] == 6
    full.clear()
    main(f"{flags} --steps 7 --resume")
    assert json.loads((folder / hf.INDEX).read_text())["metadata"]["step"] == 7
    resume = f"--resume {out}/step-00000007 --steps 7"
    main(f"{resume} --out {tmp_path}/x --export {tmp_path}/x-hf")
    assert same_weights(folder, tmp_path / "x-hf")


@slow
def test_hf_killed_and_resumed_export(tmp_path):
    """A run that is killed between the two renames of an export is resumed with the same command.
    It leaves the export of its last step, and nothing beside it.

    Catches a resume that refuses its own export.
    """
    flags = f"--save-every 2 --out {tmp_path}/o --export {tmp_path}/hf --resume auto"
    code = f"""
from helpers import *
on_file_event('hf.*[.]partial', lambda: os.path.exists('{tmp_path}/hf') or kill_self(), 'os.rename')
"""
    run(flags, code=code, expect=-signal.SIGKILL)
    assert not (tmp_path / "hf").exists()
    assert len([*tmp_path.glob("hf.*.old")]) == len([*tmp_path.glob("hf.*.partial")]) == 1
    main(flags)
    assert losses(tmp_path / "o") == uninterrupted_losses(0)
    assert [path.name for path in tmp_path.glob("hf*")] == ["hf"]
    assert hf.exported_step(tmp_path / "hf", hf.run_number(tmp_path / "o")) == 6


# ---------------------------------------------------------------------------- adapters


class Adapted(torch.nn.Module):
    """Stands for a Linear of transformers: its weight W is frozen, and A and B are adapters."""

    def __init__(self, linear: torch.nn.Linear, a: torch.nn.Parameter, b: torch.Tensor):
        super().__init__()
        self.linear = linear
        self.a = a
        self.b = torch.nn.Parameter(b)

    def forward(self, x):
        return self.linear(x) + ALPHA / RANK * (x @ self.a.t() @ self.b.t())


def first_adapters(cfg: m.ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return the first values of examples/lora.py's adapters, by name, as a run with this seed."""
    with torch.device("meta"):
        model = m.LLaMA(cfg)
    return {
        name: m.initial_weight(name, shape, model.weight_init[name], seed, "cpu").double()
        for name, shape in model.shapes.items()
        if hf.is_own_weight(cfg, name)
    }


def add_adapters(theirs, cfg: m.ModelConfig, adapters: dict[str, torch.Tensor]) -> None:
    """Put adapters on transformers' matrices. Ours are on fused matrices, so q, k and v share one
    A, and each of them has its own rows of B."""
    theirs.requires_grad_(False)
    for name, parts in hf.parts_of(cfg).items():
        path = name.removesuffix(".weight")
        if f"{path}.a.weight" not in adapters:
            continue
        a = torch.nn.Parameter(adapters[f"{path}.a.weight"].clone())
        rows = [rows for rows, *_ in parts.values()]
        for part, b in zip(parts, adapters[f"{path}.b.weight"].split(rows)):
            parent, _, child = part.removesuffix(".weight").rpartition(".")
            linear = theirs.get_submodule(part.removesuffix(".weight"))
            setattr(theirs.get_submodule(parent), child, Adapted(linear, a, b.clone()))


@slow
@parametrize(
    "name, plan",
    [
        ("Llama 2", "--p 2 --sp 2"),
        ("Llama 3.2", "--pp 2 --micro-batch 1"),  # tied
    ],
)
def test_adapters_train_as_on_transformers(name, plan, tmp_path):
    """Adapters are trained on a frozen import for two steps on two ranks, resumed on one rank,
    trained for a third step, and exported, which merges them.

    Losses and merged weights are those of the same adapters on transformers' model, trained by
    PyTorch in float64. Catches an adapter that is lost, merged twice or scaled wrongly, and a base
    that does not stay as it was.
    """
    found, sequences, text = train_in_two_runs(
        tmp_path, name, plan, lr=1e-2, more="--architecture lora"
    )
    assert "16 weights are not in the import, and begin with fresh values: blocks.0.qkv.a" in text

    theirs = hf_load(tmp_path / "in", dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    cfg, _ = hf.read_config(str(tmp_path / "in"))
    cfg = replace(cfg, architecture="lora")
    add_adapters(theirs, cfg, first_adapters(cfg, train.Config.seed))
    expected = train_theirs(theirs, sequences, 3, BATCH, lr=1e-2)
    assert found == approx(expected, rel=1e-6)

    exported = hf_load(tmp_path / "e", dtype=torch.float64)
    weights = dict(exported.named_parameters())
    assert weights.keys() == before.keys()
    num_merged = 0
    for name, p in weights.items():
        module = theirs.get_submodule(name.rpartition(".")[0])
        if isinstance(module, Adapted) and name.endswith(".weight"):
            num_merged += 1
            update = ALPHA / RANK * (module.b @ module.a).detach()
            assert update.norm() > 0.01
            assert relative(p - before[name], update) < 1e-3, name
        else:
            assert torch.equal(p, before[name]), name
    assert num_merged == 14


class NotMerged(LoRAModel):
    """Adapters that an export forgets."""

    export_weight = m.LLaMA.export_weight


def test_adapters_are_merged_or_refused(tmp_path, monkeypatch):
    """An export that does not merge adapters is refused, and so is an import without a base weight.

    Catches adapters that an export drops, and a base weight that begins with random values.
    """
    cfg = replace(SMALL, head_dim=16, architecture="lora")
    hf.check_export(cfg, {})
    monkeypatch.setitem(m.ARCHITECTURES, "lost", m.Architecture(LoRABlock, NotMerged))
    with raises(ValueError, match="--export: transformers computes other logits than this model"):
        hf.check_export(replace(cfg, architecture="lost"), {})

    hf_model(tmp_path, shard="1GB")
    file = tmp_path / hf.WEIGHTS
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    cfg, _ = hf.read_config(str(tmp_path))
    cfg = replace(cfg, architecture="lora")
    with raises(ValueError, match="1 tensor is missing: model.norm.weight"):
        hf.open_weights(str(tmp_path), cfg)

    # a model that does not name its own weights lacks names for them
    monkeypatch.setattr(LoRAModel, "own_weights", ())
    with raises(ValueError, match="blocks.0.qkv.a.weight: Hugging Face's files have no 'a'"):
        hf.parts_of(cfg)
    hf_model(tmp_path, shard="1GB")
    with raises(ValueError, match="--architecture lora: --init hf:DIR brings its own layers"):
        main(f"--init hf:{tmp_path} --architecture lora --out {tmp_path}/o")
