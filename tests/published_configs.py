"""config.json of published Hugging Face models, for comparisons with transformers.

PUBLISHED is {name of the model: (config.json, refusal)}. refusal is "" for a model that --init
hf:DIR imports, else a regular expression for the error that names what is not supported. The keys
are spelt as in the published file, and the values of rotary embedding, windows and tied heads are
its values. `shrink` replaces the sizes, so that a test can build the model.

Left out: keys that describe the file and not the model, such as _name_or_path.
"""

import copy

WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
# positions are divided by 64, so that 8192 trained positions become 128
POSITIONS = (
    "max_position_embeddings",
    "original_max_position_embeddings",
    "max_sequence_length",
    "model_max_length",
    "sliding_window",
)


def shrink(config: dict) -> dict:
    """Return a config.json with the same keys and small sizes. It has as many K/V heads as query
    heads where the published model has, else 2, and 1 if there are more than 4 queries each. A
    head_dim that differs from hidden_size / heads still differs."""
    small = copy.deepcopy(config)
    for key, size in WIDTHS.items():
        if key in small:
            small[key] = size
    if heads := config.get("num_key_value_heads"):
        ratio = config["num_attention_heads"] // heads
        small["num_key_value_heads"] = 4 if ratio == 1 else 2 if ratio <= 4 else 1
    if head_dim := config.get("head_dim"):
        wide = head_dim * config["num_attention_heads"] != config["hidden_size"]
        small["head_dim"] = 24 if wide else 16
    scaling = small.get("rope_scaling") or small.get("rope_parameters") or {}
    for place in (small, scaling):
        for key in POSITIONS:
            if place.get(key):
                place[key] //= 64
    for key, value in small.items():
        if key.endswith("_token_id") and value is not None:  # ids lie in the small vocabulary
            small[key] = [i % 300 for i in value] if isinstance(value, list) else value % 300
    if "max_window_layers" in small:
        small["max_window_layers"] = 2
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][:2]
    return small


# ---------------------------------------------------------------------------- Llama

LLAMA_1 = {
    "architectures": ["LLaMAForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "initializer_range": 0.02,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": -1,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_31 = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "transformers_version": "4.42.3",
}
LLAMA_32 = LLAMA_31 | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA_31["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}

LLAMAS = {
    "decapoda-research/llama-7b-hf": (LLAMA_1, ""),
    "huggyllama/llama-7b": (
        LLAMA_1
        | {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "transformers_version": "4.28.0.dev0",
        },
        "",
    ),
    "meta-llama/Llama-2-7b-hf": (LLAMA_2, ""),
    "meta-llama/Llama-2-70b-hf": (
        LLAMA_2
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
        },
        "",
    ),
    "codellama/CodeLlama-7b-hf": (
        LLAMA_2
        | {
            "max_position_embeddings": 16384,
            "rope_theta": 1000000,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.33.0.dev0",
            "vocab_size": 32016,
        },
        "",
    ),
    "lmsys/vicuna-7b-v1.5-16k": (
        LLAMA_2
        | {
            "max_sequence_length": 16384,
            "pad_token_id": 0,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
            "transformers_version": "4.31.0",
        },
        "",
    ),
    "NousResearch/Yarn-Llama-2-7b-64k": (
        LLAMA_2
        | {
            "auto_map": {
                "AutoConfig": "configuration_llama.LlamaConfig",
                "AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM",
            },
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "factor": 16.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
                "finetuned": True,
            },
            "torch_dtype": "bfloat16",
        },
        "",
    ),
    "togethercomputer/LLaMA-2-7B-32K": (
        LLAMA_2
        | {
            "max_position_embeddings": 32768,
            "rope_scaling": {"factor": 8.0, "type": "linear"},
        },
        "",
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        LLAMA_2
        | {
            "attention_bias": False,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 22,
            "num_key_value_heads": 4,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.35.0",
        },
        "",
    ),
    "deepseek-ai/deepseek-coder-6.7b-base": (
        LLAMA_2
        | {
            "bos_token_id": 32013,
            "eos_token_id": 32014,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
            "rope_theta": 100000,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1",
            "vocab_size": 32256,
        },
        "",
    ),
    "meta-llama/Meta-Llama-3-8B": (LLAMA_3, ""),
    "gradientai/Llama-3-8B-Instruct-262k": (
        LLAMA_3 | {"max_position_embeddings": 262144, "rope_theta": 283461213.0},
        "",
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA_31, ""),
    "meta-llama/Llama-3.1-405B": (
        LLAMA_31
        | {
            "eos_token_id": 128001,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            "num_hidden_layers": 126,
        },
        "",
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        LLAMA_31 | {"eos_token_id": 128001, "transformers_version": "4.43.0.dev0"},
        "",
    ),
    "meta-llama/Llama-3.2-1B": (LLAMA_32 | {"eos_token_id": 128001}, ""),
    "meta-llama/Llama-3.2-3B-Instruct": (
        LLAMA_32
        | {
            "head_dim": 128,
            "hidden_size": 3072,
            "num_attention_heads": 24,
            "num_hidden_layers": 28,
        },
        "",
    ),
    "unsloth/Llama-3.2-1B-Instruct": (
        LLAMA_32
        | {
            "eos_token_id": 128009,
            "pad_token_id": 128004,
            "transformers_version": "4.49.0.dev0",
            "unsloth_fixed": True,
        },
        "",
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        LLAMA_31
        | {
            "head_dim": 128,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "transformers_version": "4.47.0.dev0",
        },
        "",
    ),
    "a Llama 3.1 saved by transformers 5": (
        {
            key: value
            for key, value in LLAMA_31.items()
            if key not in ("rope_scaling", "rope_theta", "torch_dtype")
        }
        | {
            "dtype": "bfloat16",
            "head_dim": 128,
            "rope_parameters": LLAMA_31["rope_scaling"] | {"rope_theta": 500000.0},
            "transformers_version": "5.0.0",
        },
        "",
    ),
    "a Llama 3.1 with the original length beside rope_scaling": (
        LLAMA_31
        | {
            "original_max_position_embeddings": 8192,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "rope_type": "llama3",
            },
        },
        "",
    ),
    "meta-llama/Llama-4-Scout-17B-16E": (
        {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"},
        "model_type is 'llama4'; only qwen2, qwen3, llama, mistral are supported",
    ),
}

# ---------------------------------------------------------------------------- Mistral

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_3 = MISTRAL | {
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.42.0.dev0",
    "vocab_size": 32768,
}

MISTRALS = {
    "mistralai/Mistral-7B-v0.1": (MISTRAL, ""),
    "HuggingFaceH4/zephyr-7b-beta": (
        MISTRAL | {"pad_token_id": 2, "transformers_version": "4.35.0"},
        "",
    ),
    "NousResearch/Yarn-Mistral-7b-128k": (
        MISTRAL
        | {
            "auto_map": {"AutoModelForCausalLM": "modeling_mistral_yarn.MistralForCausalLM"},
            "max_sequence_length": 131072,
            "rope_scaling": {
                "factor": 16.0,
                "finetuned": True,
                "original_max_position_embeddings": 8192,
                "type": "yarn",
            },
            "sliding_window": 131072,
        },
        "",
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": (
        MISTRAL
        | {
            "attention_dropout": 0.0,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "transformers_version": "4.36.0",
        },
        "",
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (MISTRAL_3, ""),
    "mistralai/Mistral-Nemo-Base-2407": (
        MISTRAL_3
        | {
            "head_dim": 128,
            "hidden_size": 5120,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 40,
            "vocab_size": 131072,
        },
        "",
    ),
    "mistralai/Mistral-Large-Instruct-2407": (
        MISTRAL_3
        | {
            "hidden_size": 12288,
            "intermediate_size": 28672,
            "num_attention_heads": 96,
            "num_hidden_layers": 88,
        },
        "",
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        MISTRAL_3
        | {
            "head_dim": 128,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "rope_theta": 100000000.0,
            "sliding_window": 32768,
            "vocab_size": 131072,
        },
        "",
    ),
    "mistralai/Mistral-Small-24B-Base-2501": (
        MISTRAL_3
        | {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "rope_theta": 100000000.0,
            "vocab_size": 131072,
        },
        "",
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        MISTRAL
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
        "model_type is 'mixtral'",
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": {"head_dim": 128, "model_type": "mistral"},
        },
        "model_type is 'mistral3'",
    ),
}

# ---------------------------------------------------------------------------- Qwen

QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_SMALL = QWEN_3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}

QWENS = {
    "Qwen/Qwen-7B": (
        {
            "architectures": ["QWenLMHeadModel"],
            "auto_map": {
                "AutoConfig": "configuration_qwen.QWenConfig",
                "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel",
            },
            "model_type": "qwen",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "rotary_emb_base": 10000,
        },
        "model_type is 'qwen'",
    ),
    "Qwen/Qwen1.5-0.5B": (
        QWEN_2
        | {
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "max_window_layers": 21,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "transformers_version": "4.37.0",
        },
        "",
    ),
    "Qwen/Qwen1.5-32B": (
        QWEN_2
        | {
            "hidden_size": 5120,
            "intermediate_size": 27392,
            "max_window_layers": 35,
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "sliding_window": 32768,
        },
        "",
    ),
    "Qwen/Qwen2-0.5B": (
        QWEN_2
        | {
            "eos_token_id": 151643,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 131072,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        "",
    ),
    "Qwen/Qwen2-7B-Instruct": (QWEN_2, ""),
    "Qwen/Qwen2.5-7B-Instruct": (QWEN_2 | {"transformers_version": "4.43.1"}, ""),
    "Qwen/Qwen2.5-7B-Instruct, with YaRN as its README says": (
        QWEN_2
        | {
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            }
        },
        "",
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": (
        QWEN_2
        | {
            "dual_chunk_attention_config": {
                "chunk_size": 262144,
                "local_size": 8192,
                "original_max_position_embeddings": 262144,
            },
            "max_position_embeddings": 1010000,
            "rope_theta": 10000000.0,
            "sliding_window": 32768,
        },
        "",
    ),
    "Qwen/Qwen2.5-Coder-32B-Instruct": (
        QWEN_2
        | {
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "max_window_layers": 70,
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
        },
        "",
    ),
    "Qwen/Qwen2.5-Math-7B": (
        QWEN_2
        | {
            "eos_token_id": 151643,
            "max_position_embeddings": 4096,
            "rope_theta": 10000,
            "sliding_window": 4096,
            "use_mrope": False,
        },
        "",
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        QWEN_2
        | {
            "bos_token_id": 151646,
            "eos_token_id": 151643,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "max_position_embeddings": 131072,
            "max_window_layers": 21,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "rope_theta": 10000,
            "sliding_window": 4096,
            "transformers_version": "4.44.0",
            "use_mrope": False,
            "vocab_size": 151936,
        },
        "",
    ),
    "Qwen/QwQ-32B": (
        QWEN_2
        | {
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "max_position_embeddings": 40960,
            "max_window_layers": 64,
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "sliding_window": 32768,
        },
        "",
    ),
    "Qwen/Qwen3-0.6B": (QWEN_3_SMALL, ""),
    "Qwen/Qwen3-8B": (QWEN_3, ""),
    "Qwen/Qwen3-32B, with YaRN as its README says": (
        QWEN_3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "max_window_layers": 64,
            "num_attention_heads": 64,
            "num_hidden_layers": 64,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        "",
    ),
    "Qwen/Qwen3-4B-Instruct-2507": (
        QWEN_3
        | {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
        },
        "",
    ),
    "Qwen/Qwen3-Embedding-0.6B": (
        QWEN_3_SMALL | {"max_position_embeddings": 32768, "eos_token_id": 151643},
        "",
    ),
    "Qwen/Qwen3-30B-A3B": (
        QWEN_3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        "model_type is 'qwen3_moe'",
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": (
        QWEN_2 | {"quantization_config": {"bits": 4, "group_size": 128, "quant_method": "gptq"}},
        "quantization_config is .*'gptq'.*; only None is supported",
    ),
}

# ---------------------------------------------------------------------------- SmolLM

SMOLLM = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
SMOLLM_2 = SMOLLM | {
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "transformers_version": "4.40.1",
}

SMOLLMS = {
    "HuggingFaceTB/SmolLM-135M": (SMOLLM, ""),
    "HuggingFaceTB/SmolLM2-135M": (SMOLLM_2, ""),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (
        SMOLLM_2
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_attention_heads": 15,
            "num_hidden_layers": 32,
            "num_key_value_heads": 5,
            "pad_token_id": 2,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
        },
        "",
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        SMOLLM
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "num_key_value_heads": 32,
            "pad_token_id": 2,
            "rope_theta": 130000,
        },
        "",
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "hidden_size": 2048,
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "no_rope_layers": 9 * [1, 1, 1, 0],
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rope_theta": 5000000.0,
            "tie_word_embeddings": True,
        },
        "model_type is 'smollm3'",
    ),
}

# ---------------------------------------------------------------------------- Phi

PHI_3 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}

PHIS = {
    "microsoft/phi-2": (
        {
            "architectures": ["PhiForCausalLM"],
            "hidden_act": "gelu_new",
            "hidden_size": 2560,
            "layer_norm_eps": 1e-05,
            "model_type": "phi",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "partial_rotary_factor": 0.4,
            "qk_layernorm": False,
            "rope_theta": 10000.0,
            "vocab_size": 51200,
        },
        "model_type is 'phi'",
    ),
    "microsoft/Phi-3-mini-4k-instruct": (PHI_3, "model_type is 'phi3'"),
    "microsoft/Phi-3-mini-128k-instruct": (
        PHI_3
        | {
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "long_factor": 48 * [1.5],
                "short_factor": 48 * [1.0],
                "type": "longrope",
            },
            "sliding_window": 262144,
        },
        "model_type is 'phi3'",
    ),
    "microsoft/phi-4": (
        PHI_3
        | {
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000,
            "sliding_window": None,
        },
        "model_type is 'phi3'",
    ),
    "unsloth/phi-4": (
        LLAMA_3
        | {
            "bos_token_id": 100257,
            "eos_token_id": 100265,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "mlp_bias": False,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "pad_token_id": 100351,
            "rope_theta": 250000,
            "unsloth_fixed": True,
            "vocab_size": 100352,
        },
        "",
    ),
}

# ---------------------------------------------------------------------------- Yi

YI = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0",
    "use_cache": True,
    "vocab_size": 64000,
}

YIS = {
    "01-ai/Yi-6B": (YI, ""),
    "01-ai/Yi-34B-200K": (
        YI
        | {
            "hidden_size": 7168,
            "intermediate_size": 20480,
            "max_position_embeddings": 200000,
            "num_attention_heads": 56,
            "num_hidden_layers": 60,
            "num_key_value_heads": 8,
            "rope_theta": 10000000.0,
        },
        "",
    ),
    "01-ai/Yi-1.5-9B-Chat": (
        YI
        | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "num_hidden_layers": 48,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "transformers_version": "4.36.2",
        },
        "",
    ),
    "01-ai/Yi-Coder-9B": (
        YI
        | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_hidden_layers": 48,
            "rope_theta": 10000000,
            "transformers_version": "4.44.0",
        },
        "",
    ),
    "01-ai/Yi-6B, first release": (
        YI
        | {
            "architectures": ["YiForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_yi.YiConfig",
                "AutoModelForCausalLM": "modeling_yi.YiForCausalLM",
            },
            "model_type": "Yi",
        },
        "model_type is 'Yi'",
    ),
}

PUBLISHED = LLAMAS | MISTRALS | QWENS | SMOLLMS | PHIS | YIS
