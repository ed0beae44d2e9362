"""Configs that are wrong are refused in one line that names the field."""

from __future__ import annotations

import pytest

from src.architecture import describe, supported_model_types
from src.errors import UserError
from src.spec import Model
from tests.small_configs import SMALL_CONFIGS, Config

REQUIRED = {
    "bert": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings type_vocab_size",
    "biogpt": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings",
    "bloom": "vocab_size hidden_size n_layer n_head",
    "codegen": "vocab_size n_embd n_layer n_head n_positions",
    "deepseek_v2": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings n_routed_experts n_shared_experts num_experts_per_tok kv_lora_rank "
    "q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size",
    "falcon-multi-query": "vocab_size hidden_size num_hidden_layers num_attention_heads "
    "max_position_embeddings",
    "gpt2": "vocab_size n_embd n_layer n_head n_positions",
    "gpt_bigcode": "vocab_size n_embd n_layer n_head n_positions",
    "gpt_neo": "vocab_size hidden_size num_layers num_heads max_position_embeddings",
    "gptj": "vocab_size n_embd n_layer n_head n_positions",
    "mixtral": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings num_local_experts num_experts_per_tok",
    "gpt_oss": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings num_local_experts num_experts_per_tok",
    "opt": "vocab_size hidden_size ffn_dim num_hidden_layers num_attention_heads "
    "max_position_embeddings",
    "qwen3_moe": "vocab_size hidden_size moe_intermediate_size num_hidden_layers "
    "num_attention_heads max_position_embeddings num_experts num_experts_per_tok",
    "qwen3_moe-mixed": "intermediate_size moe_intermediate_size num_experts",
}
LLAMA_LIKE = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "stablelm",
    "starcoder2",
)
REQUIRED.update(
    dict.fromkeys(
        LLAMA_LIKE,
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "max_position_embeddings",
    )
)
MISSING = [(name, field) for name, fields in REQUIRED.items() for field in fields.split()]

UNREAD = {
    "attention_bias": {"mistral"},
    "embd_pdrop": {"phi3"},
    "hidden_dropout": set[str](),
    "num_key_value_heads": {"deepseek_v2", "deepseek_v2-query-latent"},
    "num_kv_heads": set[str](),
    "window_size": {"gpt_neo", "gpt_neo-inner-4x"},
    "logits_scaling": {"granite"},
    "intermediate_size": {"qwen3_moe", "deepseek_v2-query-latent"},
    "attention_dropout": {"falcon-multi-query", "falcon-new", "falcon-new-one-norm"},
    "max_position_embeddings": {"falcon-alibi-sequential"},
}
VALUES = [
    (name, field)
    for name, config in SMALL_CONFIGS.items()
    for field, value in config.items()
    if isinstance(value, int | float) and name not in UNREAD.get(field, set())
]


def wrong(name: str, **changes: object) -> UserError:
    config: Config = {**SMALL_CONFIGS[name], **changes}
    return refused({key: value for key, value in config.items() if value is not ...})


def refused(config: Config) -> UserError:
    with pytest.raises(UserError) as caught:
        describe(Model(name="mine", hf_id=None, config=config))
    assert "\n" not in str(caught.value)
    return caught.value


def test_every_family_has_a_case() -> None:
    assert {config["model_type"] for config in SMALL_CONFIGS.values()} == set(
        supported_model_types()
    )
    assert {SMALL_CONFIGS[name]["model_type"] for name in REQUIRED} == set(supported_model_types())


@pytest.mark.parametrize(("name", "field"), MISSING)
def test_a_missing_size_is_named(name: str, field: str) -> None:
    error = wrong(name, **{field: ...})
    assert error.key == f"arch.{field}"
    assert SMALL_CONFIGS[name]["model_type"] in str(error)


@pytest.mark.parametrize(("name", "field"), VALUES)
def test_a_wrong_value_is_named(name: str, field: str) -> None:
    value = SMALL_CONFIGS[name][field]
    bad: list[object] = ["4", [4], {}]
    if isinstance(value, bool):
        bad += [0, 1]
    elif isinstance(value, int):
        bad += [-1, 1.5, True, float("nan")]
    else:
        bad += [-0.1, True, float("nan")]
    for candidate in bad:
        assert wrong(name, **{field: candidate}).key == f"arch.{field}", candidate


@pytest.mark.parametrize(("name", "field"), MISSING)
def test_zero_is_no_size(name: str, field: str) -> None:
    assert wrong(name, **{field: 0}).key == f"arch.{field}"


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llama", {"num_attention_heads": 7}, "num_attention_heads"),
        ("llama", {"hidden_size": 50, "head_dim": 8}, "hidden_size"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads"),
        ("llama", {"hidden_size": 42}, "head_dim"),
        ("llama", {"head_dim": 9}, "head_dim"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama", {"hidden_act": "sillu"}, "hidden_act"),
        ("llama", {"hidden_act": "prelu"}, "hidden_act"),
        ("opt", {"num_attention_heads": 7}, "hidden_size"),
        ("gpt2", {"n_head": 7}, "hidden_size"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("gptj", {"rotary_dim": 10}, "rotary_dim"),
        ("gptj", {"rotary_dim": 3}, "rotary_dim"),
        ("codegen", {"n_embd": 66, "n_head": 6}, "hidden_size"),
        ("gpt_neox", {"rotary_pct": 0.1}, "rotary_pct"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 2}}, "rope_parameters"),
        ("phi", {"rope_scaling": {"partial_rotary_factor": "x"}}, "rope_scaling"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("qwen3_moe", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
        ("deepseek_v2", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2 + ["x"]}, "layer_types"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "attention_types"),
        ("gpt_neo", {"attention_types": ["global"]}, "attention_types"),
        ("gpt_neo", {"attention_types": 3}, "attention_types"),
        ("falcon-new", {"num_kv_heads": 4}, "num_attention_heads"),
        ("falcon-new", {"parallel_attn": False}, "parallel_attn"),
        ("falcon-new", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        ("falcon-multi-query", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}, "slow_but_exact"),
    ],
)
def test_impossible_combinations(name: str, changes: dict[str, object], key: str) -> None:
    assert wrong(name, **changes).key.startswith(f"arch.{key}")


def test_an_alias_is_named_as_it_was_written() -> None:
    assert wrong("gpt2", n_embd=..., hidden_size="x").key == "arch.hidden_size"
    assert wrong("gpt2", n_layer=..., num_hidden_layers=0).key == "arch.num_hidden_layers"


@pytest.mark.parametrize(
    ("model_type", "near"),
    [("lama", "llama"), ("gptneox", "gpt_neox"), ("Qwen-3", "qwen3"), ("mamba", "llama")],
)
def test_an_unknown_model_type_gets_the_nearest_names(model_type: str, near: str) -> None:
    error = refused({**SMALL_CONFIGS["llama"], "model_type": model_type})
    assert error.key == "model_type"
    assert near in error.allowed


def test_a_model_type_like_no_other() -> None:
    assert "28" in refused({"model_type": "xyzzy"}).allowed
