"""Mixtures of experts on the llama shape: Mixtral, Qwen3-MoE, gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder
from src.architecture.families.common import EAGER_ONLY, Heads, rms_norm_fp32, rms_tail
from src.architecture.families.llama import (
    KV_HEADS,
    WINDOW,
    RotaryAttention,
    model_decoder,
    read_gated_mlp,
    window_everywhere,
)
from src.architecture.families.qwen import qwen3_attention
from src.architecture.families.residual import residual_block
from src.architecture.fields import Fields
from src.architecture.ops import CLAMPED_SWIGLU, NormKind


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseMLP:
    """A router and its experts, under `mlp`.

    Attributes:
        router: name of the router, a raw parameter.
        router_fp32: whether the router is kept in fp32 and reads its input so.
        bias: whether router and experts have biases.
    """

    num_experts: int
    top_k: int
    intermediate: int
    function: str
    router: str = "gate"
    router_fp32: bool = False
    bias: bool = False

    def __call__(self, build: BlockBuilder, source: str) -> str:
        """Write it down; gives the name of what it adds to the residual stream."""
        build.prefix = "mlp."
        taken = build.copy(source, upcast=True) if self.router_fp32 else source
        logits = build.linear(
            self.router,
            taken,
            self.num_experts,
            bias=self.bias,
            is_module=False,
            stays_fp32=self.router_fp32,
        )
        out = build.experts(
            "experts",
            source,
            logits,
            num_experts=self.num_experts,
            top_k=self.top_k,
            intermediate=self.intermediate,
            function=self.function,
            bias=self.bias,
        )
        build.prefix = ""
        return out


def read_top_k(fields: Fields, num_experts: int) -> int:
    """`num_experts_per_tok`: at most as many as there are experts."""
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        allowed = f"at most the number of experts, {num_experts}"
        raise fields.error("num_experts_per_tok", top_k, allowed)
    return top_k


def mixtral(fields: Fields) -> Decoder:
    """Mixtral (transformers `modeling_mixtral.py`).

    Defaults where absent: 8 key/value heads, `tie_word_embeddings` false, `attention_dropout` 0,
    `hidden_act` silu, no `sliding_window`. Noise on the router's input is not described, nor the
    auxiliary loss of `output_router_logits`.
    """
    if fields.probability("router_jitter_noise"):
        noise = fields.model.config["router_jitter_noise"]
        raise fields.error("router_jitter_noise", noise, "only 0 is supported")
    hidden = fields.integer("hidden_size")
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden, absent_kv_heads=KV_HEADS),
        bias=False,
        output_bias=False,
        dropout=fields.probability("attention_dropout"),
    )
    num_experts = fields.integer("num_local_experts", "num_experts")
    feed = SparseMLP(
        num_experts=num_experts,
        top_k=read_top_k(fields, num_experts),
        intermediate=fields.integer("intermediate_size"),
        function=fields.function("hidden_act", default="silu"),
    )
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(residual_block(hidden, attend, feed),) * layers,
        windows=window_everywhere(fields, layers, default=None),
    )


def qwen3_moe(fields: Fields) -> Decoder:
    """Qwen3-MoE (transformers `modeling_qwen3_moe.py`): some blocks may have a plain MLP.

    Defaults where absent: 4 key/value heads, `attention_bias`, `tie_word_embeddings` and
    `use_sliding_window` false, `attention_dropout` 0, `hidden_act` silu, `decoder_sparse_step` 1,
    `mlp_only_layers` none. The auxiliary loss of `output_router_logits` is not described.
    """
    hidden = fields.integer("hidden_size")
    attend = qwen3_attention(fields, Heads.read(fields, hidden, absent_kv_heads=4))
    layers = fields.layers("num_hidden_layers")
    sliding = fields.flag("use_sliding_window", default=False)
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=_qwen3_blocks(fields, hidden, attend, layers),
        windows=window_everywhere(fields, layers, default=WINDOW) if sliding else (),
    )


def _qwen3_blocks(
    fields: Fields, hidden: int, attend: RotaryAttention, layers: int
) -> tuple[Block, ...]:
    step = fields.optional_integer("decoder_sparse_step") or 1
    plain_layers = fields.indices("mlp_only_layers")
    is_sparse = [index not in plain_layers and (index + 1) % step == 0 for index in range(layers)]
    by_kind: dict[bool, Block] = {}
    if any(is_sparse):
        num_experts = fields.integer("num_experts", "num_local_experts")
        feed = SparseMLP(
            num_experts=num_experts,
            top_k=read_top_k(fields, num_experts),
            intermediate=fields.integer("moe_intermediate_size"),
            function=fields.function("hidden_act", default="silu"),
        )
        by_kind[True] = residual_block(hidden, attend, feed)
    if not all(is_sparse):
        by_kind[False] = residual_block(hidden, attend, read_gated_mlp(fields))
    return tuple(by_kind[sparse] for sparse in is_sparse)


def gpt_oss(fields: Fields) -> Decoder:
    """gpt-oss (transformers `modeling_gpt_oss.py`): attention sinks, experts with biases.

    Defaults where absent: `head_dim` 64, 8 key/value heads, `attention_bias` true,
    `tie_word_embeddings` false, `attention_dropout` 0, `sliding_window` 128 in every other block.
    There is no SDPA path. transformers replaces FlashAttention-2 by kernels that know sinks
    (`_compatible_flash_implementations`), whose backward pass does not (flash-attention issue
    1797), so training is eager. transformers' own tensor parallel plan leaves the blocks whole;
    they are split as others are.
    """
    hidden = fields.integer("hidden_size")
    bias = fields.flag("attention_bias", default=True)
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden, absent_kv_heads=8, absent_head_dim=64),
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
        sinks=True,
    )
    num_experts = fields.integer("num_local_experts", "num_experts")
    feed = SparseMLP(
        num_experts=num_experts,
        top_k=read_top_k(fields, num_experts),
        intermediate=fields.integer("intermediate_size"),
        function=CLAMPED_SWIGLU,
        router="router",
        bias=True,
    )
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(residual_block(hidden, attend, feed, norm=rms_norm_fp32),) * layers,
        tail=rms_tail(hidden, kind=NormKind.RMS_FP32),
        implementations=EAGER_ONLY,
        windows=fields.alternating_windows(layers, pattern=2, default=128),
    )
