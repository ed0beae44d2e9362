"""Small configs of every family and of its variants, with widths that are all different.

Dropouts have different probabilities, so that one cannot be taken for another.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

LAYERS = 3

_LLAMA: Config = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.11,
}
_GPT: Config = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": LAYERS,
    "n_head": 6,
    "n_inner": 80,
    "n_positions": 64,
    "attn_pdrop": 0.11,
    "resid_pdrop": 0.12,
    "embd_pdrop": 0.13,
}
_GPTJ: Config = {**_GPT, "rotary_dim": 4}
_NEOX: Config = {
    "model_type": "gpt_neox",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "rotary_pct": 0.5,
    "attention_dropout": 0.11,
    "hidden_dropout": 0.12,
}
_OPT: Config = {
    "model_type": "opt",
    "vocab_size": 97,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "dropout": 0.12,
    "attention_dropout": 0.11,
}
_BLOOM: Config = {
    "model_type": "bloom",
    "vocab_size": 97,
    "hidden_size": 48,
    "n_layer": LAYERS,
    "n_head": 6,
    "hidden_dropout": 0.12,
    "attention_dropout": 0.11,
}
_BIOGPT: Config = {
    "model_type": "biogpt",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.12,
    "attention_probs_dropout_prob": 0.11,
    "activation_dropout": 0.13,
}
_GPT_NEO: Config = {
    "model_type": "gpt_neo",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": LAYERS,
    "num_heads": 6,
    "attention_types": [[["global", "local", "global"], 1]],
    "max_position_embeddings": 64,
    "window_size": 8,
    "attention_dropout": 0.11,
    "resid_dropout": 0.12,
    "embed_dropout": 0.13,
}
_GEMMA: Config = {**_LLAMA, "head_dim": 10}
_FALCON: Config = {
    "model_type": "falcon",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "ffn_hidden_size": 80,
    "max_position_embeddings": 64,
    "hidden_dropout": 0.12,
    "attention_dropout": 0.11,
}
_PHI: Config = {
    **_LLAMA,
    "model_type": "phi",
    "resid_pdrop": 0.12,
    "embd_pdrop": 0.13,
    "partial_rotary_factor": 0.5,
}
_STABLELM: Config = {
    **_LLAMA,
    "model_type": "stablelm",
    "hidden_dropout": 0.12,
    "partial_rotary_factor": 0.5,
}
_EXPERTS: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK: Config = {
    **_LLAMA,
    **_EXPERTS,
    "model_type": "deepseek_v2",
    "num_key_value_heads": 6,
    "n_routed_experts": 5,
    "n_shared_experts": 3,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}

SMALL_CONFIGS: dict[str, Config] = {
    "bert": {
        "model_type": "bert",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.12,
        "attention_probs_dropout_prob": 0.11,
    },
    "biogpt": _BIOGPT,
    "biogpt-unscaled": {**_BIOGPT, "scale_embedding": False, "tie_word_embeddings": False},
    "bloom": _BLOOM,
    "bloom-residual-after-norm": {
        **_BLOOM,
        "apply_residual_connection_post_layernorm": True,
        "tie_word_embeddings": False,
    },
    "codegen": {**_GPTJ, "model_type": "codegen", "n_head": 8, "n_embd": 64},
    "codegen-four-heads": {
        **_GPTJ,
        "model_type": "codegen",
        "n_head": 4,
        "activation_function": "relu",
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v2-query-latent": {
        **_DEEPSEEK,
        "q_lora_rank": 14,
        "attention_bias": True,
        "mlp_bias": True,
        "first_k_dense_replace": 0,
    },
    "falcon-multi-query": _FALCON,
    "falcon-new": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-new-one-norm": {
        **_FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 3,
        "num_ln_in_parallel_attn": 1,
    },
    "falcon-alibi-sequential": {
        **_FALCON,
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "tie_word_embeddings": False,
    },
    "gemma": {**_GEMMA, "model_type": "gemma", "hidden_act": "gelu", "attention_bias": True},
    "gemma2": {**_GEMMA, "model_type": "gemma2", "sliding_window": 8},
    "gemma2-uncapped": {
        **_GEMMA,
        "model_type": "gemma2",
        "sliding_window": 8,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3_text": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 12.0,
    },
    "gpt2": {**_GPT, "model_type": "gpt2"},
    "gpt2-untied": {**_GPT, "model_type": "gpt2", "n_inner": None, "tie_word_embeddings": False},
    "gpt_bigcode": {**_GPT, "model_type": "gpt_bigcode"},
    "gpt_bigcode-multi-head": {**_GPT, "model_type": "gpt_bigcode", "multi_query": False},
    "gpt_neo": _GPT_NEO,
    "gpt_neo-inner-4x": {**_GPT_NEO, "intermediate_size": None},
    "gpt_neox": _NEOX,
    "gpt_neox-sequential": {
        **_NEOX,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **_LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 10,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "gptj": {**_GPTJ, "model_type": "gptj"},
    "gptj-tied": {**_GPTJ, "model_type": "gptj", "tie_word_embeddings": True},
    "granite": {**_LLAMA, "model_type": "granite", "mlp_bias": True, "logits_scaling": 4.0},
    "llama": {**_LLAMA, "model_type": "llama"},
    "llama-biases": {
        **_LLAMA,
        "model_type": "llama",
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 8, "attention_bias": True},
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "olmo2": {**_LLAMA, "model_type": "olmo2"},
    "opt": _OPT,
    "opt-post-norm-projected": {
        **_OPT,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 24,
    },
    "opt-no-final-norm": {
        **_OPT,
        "_remove_final_layer_norm": True,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "tie_word_embeddings": False,
    },
    "phi": _PHI,
    "phi-normed": {**_PHI, "qk_layernorm": True, "tie_word_embeddings": True},
    "phi3": {
        **_LLAMA,
        "model_type": "phi3",
        "resid_pdrop": 0.12,
        "embd_pdrop": 0.13,
        "pad_token_id": None,
    },
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "qwen2-upper-windows": {
        **_LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 10},
    "qwen3_moe": {**_LLAMA, **_EXPERTS, "model_type": "qwen3_moe", "num_experts": 5},
    "qwen3_moe-mixed": {
        **_LLAMA,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "decoder_sparse_step": 2,
        "attention_bias": True,
    },
    "stablelm": _STABLELM,
    "stablelm-parallel-normed": {
        **_STABLELM,
        "use_parallel_residual": True,
        "qk_layernorm": True,
        "use_qkv_bias": True,
    },
    "starcoder2": {
        **_LLAMA,
        "model_type": "starcoder2",
        "residual_dropout": 0.12,
        "embedding_dropout": 0.13,
        "sliding_window": 8,
    },
    "starcoder2-no-bias": {**_LLAMA, "model_type": "starcoder2", "use_bias": False},
}
