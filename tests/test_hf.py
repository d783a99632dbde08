"""Hugging Face models: imported, trained, resumed and exported as transformers computes them."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from pytest import raises
from safetensors.torch import load_file, save_file

import checkpoint
import hf
import model as m
from helpers import hf_model
from test_all import SMALL, example, losses, main, parametrize, relative, slow

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True}
PUBLISHED = {  # what config.json of each says, at a small size: trained at 64 tokens
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


def hf_edit(folder, file="config.json", **changes) -> Path:
    """Change keys of a JSON file; ... takes one away."""
    path = Path(folder) / file
    c = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in c.items() if v is not ...}))
    return path


def hf_error(model, theirs, seq: int) -> float:
    """Return how far the logits are from those of transformers."""
    tokens, _ = example(seq=seq, vocab=300)
    return relative(model(tokens), theirs(tokens).logits)


def hf_load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def hf_back(model, folder: Path, source: dict, dtype=torch.float32):
    """Export a model, and return it as transformers loads it. Needs a group of ranks."""
    folder.mkdir(exist_ok=True)
    weights = dict(model.named_parameters())
    hf.export(folder, model.cfg, lambda name: weights[name].data, dtype, source, [])
    return hf_load(folder)


@parametrize("name", PUBLISHED)
def test_hf_published(name, tmp_path, monkeypatch, group):
    """Models as they are published have transformers' logits within and beyond the trained length,
    and go back as the same architecture in several files. Catches rows of a fused matrix in the
    wrong order, and a key that is not heard."""
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


@parametrize("keys", [{"rope_theta": 7e5}, {"rope_scaling": LLAMA3}])
def test_hf_keys_that_disagree_mean_what_transformers_reads(keys, tmp_path):
    """Where an older key of config.json disagrees with rope_parameters, the logits are those of
    transformers. Catches the key that is believed although transformers does not."""
    hf_model(tmp_path)
    hf_edit(tmp_path, **keys)  # beside rope_parameters
    assert hf_error(hf.load_model(tmp_path), hf_load(tmp_path), 40) < 2e-6


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
    """A sliding window counts from where transformers' logits differ: where the sequence is longer,
    in whichever layer. It goes along on export. Catches a window that is not seen, or is lost on
    export."""
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
    """A model from scratch is exported as an architecture that computes the same, or is refused.
    Catches an export that transformers would compute in another way."""
    model = m.LLaMA(replace(SMALL, vocab=300, **changes))
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape).bfloat16() / 8)
    if message:
        with raises(Exception, match=message):  # transformers' own has no other class
            hf_back(model, tmp_path, {"model_type": kind} if kind else {})
    else:
        back = hf_back(model, tmp_path, {}, torch.bfloat16)
        assert (back.config.model_type, back.dtype) == (kind, torch.bfloat16)
        assert hf_error(model, back.float(), 40) < 2e-6


@parametrize(
    "key, value, message",
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu' is supported"),
        ("attention_bias", True, "attention_bias is True; only False is supported"),
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
    ],
)
def test_hf_keys_that_are_not_built_are_refused(key, value, message, tmp_path):
    """A key of config.json that asks for what is not supported is refused with its value. Catches a
    key that is passed over, and a model that computes something else."""
    hf_model(tmp_path)
    hf_edit(tmp_path, **{key: value})
    with raises(ValueError, match=message):
        hf.read_config(tmp_path)


@parametrize("other", [0, 1])
def test_hf_tied_head_that_is_stored_too(other, tmp_path):
    """Some checkpoints of a tied model store the head, too. It is the embedding, or, if it differs,
    it is the head, as transformers 5 has it. Catches a head that is lost."""
    hf_model(tmp_path, tie_word_embeddings=True, shard="1GB")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"] + other
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
    ours = hf.load_model(tmp_path)
    assert torch.equal(ours.head.weight, head) and hf_error(ours, hf_load(tmp_path), 40) < 2e-6


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
    """`--rope-scaling` multiplies the import's own factor, through the command and into an export.
    Catches a factor that forgets the one that the model was trained with."""
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


def test_hf_train_and_export(tmp_path, capsys):
    """A tied model is imported, trained, exported with the files that lay beside it, and imported
    again. Catches a head that is tied again, and a tokenizer or licence that does not go along."""
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
        main(f"--init hf:{tmp_path / source} --steps {steps} --out {folder}-out --export {folder}")
        assert f"exported {folder}: llama" in capsys.readouterr().out
        theirs = hf_load(folder)
        states.append(theirs.state_dict())
    files = {file.name for file in (tmp_path / "a").iterdir()}
    index = "model.safetensors.index.json"
    assert files == {*beside, "config.json", "model-00001-of-00001.safetensors", index}
    assert not theirs.config.tie_word_embeddings  # two matrices, trained apart
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


@slow
def test_hf_resumes_without_its_folder(tmp_path, capsys):
    """The model comes from the checkpoint, whether or not flags name the import again; a factor
    counts from the import, and an export does without a tokenizer. Catches a resume that needs the
    folder that the run began with."""
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
