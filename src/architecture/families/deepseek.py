"""DeepSeek-V2: attention through low-rank latents, shared and routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder
from src.architecture.families.common import attention_output, gated_mlp, rms_norm
from src.architecture.families.llama import model_decoder, read_gated_mlp
from src.architecture.families.moe import SparseMLP, read_top_k
from src.architecture.families.residual import residual_block
from src.architecture.fields import Fields
from src.architecture.ops import Parallel, RotaryTable


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention, under `self_attn`.

    Attributes:
        query_rank: width of the query latent; None: queries are projected directly.
        kv_rank: width of the key/value latent.
        nope_dim: elements of each query and key head without positions; `rope_dim` with.
        value_dim: elements of each value head.
        bias: of the projections into the latents and of the output projection.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool
    dropout: float

    def __call__(self, build: BlockBuilder, source: str) -> str:
        """Write it down; gives the name of what it adds to the residual stream."""
        hidden = build.width_of("x")
        build.prefix = "self_attn."
        heads, head_dim = self.num_heads, self.nope_dim + self.rope_dim
        query = self._query(build, source)
        latent = build.linear(
            "kv_a_proj_with_mqa",
            source,
            self.kv_rank + self.rope_dim,
            bias=self.bias,
            is_attention=True,
        )
        normed = rms_norm(
            build, "kv_a_layernorm", build.view(latent, self.kv_rank, name="kv_latent")
        )
        query_rope = build.view(query, heads * self.rope_dim, name="query_rope")
        key_rope = build.view(latent, self.rope_dim, name="key_rope")
        query_rope, key_rope = (
            build.copy(build.rotary(part, table=RotaryTable.FP32), like=part)
            for part in (query_rope, key_rope)
        )
        query = build.copy(query_rope, heads * head_dim, name="query")
        key, value = self._key_value(build, normed)
        mixed = build.attention(
            query,
            key,
            value,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            value_head_dim=self.value_dim,
            dropout=self.dropout,
        )
        out = attention_output(build, "o_proj", mixed, hidden, bias=self.bias)
        build.prefix = ""
        return out

    def _query(self, build: BlockBuilder, source: str) -> str:
        width = self.num_heads * (self.nope_dim + self.rope_dim)
        name = "q_proj"
        if self.query_rank is not None:
            low = build.linear(
                "q_a_proj", source, self.query_rank, bias=self.bias, is_attention=True
            )
            source = rms_norm(build, "q_a_layernorm", low)
            name = "q_b_proj"
        return build.linear(name, source, width, parallel=Parallel.COLUMN, is_attention=True)

    def _key_value(self, build: BlockBuilder, latent: str) -> tuple[str, str]:
        """Keys are copied together from the projection and the shared rotated part.

        A copy reads one value; the rotated part, one head's, is left out of what it reads.
        """
        heads = self.num_heads
        both = build.linear(
            "kv_b_proj",
            latent,
            heads * (self.nope_dim + self.value_dim),
            parallel=Parallel.COLUMN,
            is_attention=True,
        )
        unrotated = build.view(both, heads * self.nope_dim, name="key_nope")
        value = build.view(both, heads * self.value_dim, name="value")
        return build.copy(unrotated, heads * (self.nope_dim + self.rope_dim), name="key"), value


def deepseek_v2(fields: Fields) -> Decoder:
    """DeepSeek-V2 (transformers `modeling_deepseek_v2.py`).

    Defaults where absent: `attention_bias`, `mlp_bias` and `tie_word_embeddings` false,
    `attention_dropout` 0, `hidden_act` silu, `first_k_dense_replace` 0. `q_lora_rank` has to be
    there; null stands for none. `moe_layer_freq` is not used by the code. The auxiliary loss of
    `output_router_logits` is not described.
    """
    hidden = fields.integer("hidden_size")
    layers = fields.layers("num_hidden_layers")
    num_dense = min(layers, fields.count("first_k_dense_replace", default=0))
    attend = _attention(fields, hidden)
    blocks: list[Block] = []
    if num_dense:
        dense = read_gated_mlp(fields, bias=fields.flag("mlp_bias", default=False))
        blocks += [residual_block(hidden, attend, dense)] * num_dense
    if num_dense < layers:
        blocks += [residual_block(hidden, attend, _experts(fields))] * (layers - num_dense)
    return model_decoder(fields, hidden=hidden, blocks=tuple(blocks))


def _attention(fields: Fields, hidden: int) -> LatentAttention:
    if "q_lora_rank" not in fields.model.config:
        raise fields.error("q_lora_rank", "missing", "the field is needed; null stands for none")
    num_heads = fields.integer("num_attention_heads")
    fields.divisible("hidden_size", hidden, "num_attention_heads", num_heads)
    rope_dim = fields.integer("qk_rope_head_dim")
    fields.divisible("qk_rope_head_dim", rope_dim, "pairs", 2)
    return LatentAttention(
        num_heads=num_heads,
        query_rank=fields.optional_integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias", default=False),
        dropout=fields.probability("attention_dropout"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedAndRouted:
    """Routed experts, then shared ones on the same input, added."""

    routed: SparseMLP
    shared_intermediate: int
    bias: bool

    def __call__(self, build: BlockBuilder, source: str) -> str:
        """Write it down; gives the name of what it adds to the residual stream."""
        routed = self.routed(build, source)
        build.prefix = "mlp.shared_experts."
        shared = gated_mlp(
            build,
            source,
            self.shared_intermediate,
            function=self.routed.function,
            bias=self.bias,
        )
        build.prefix = ""
        return build.add(routed, shared)


def _experts(fields: Fields) -> SharedAndRouted:
    num_experts = fields.integer("n_routed_experts", "num_experts")
    intermediate = fields.integer("moe_intermediate_size")
    return SharedAndRouted(
        routed=SparseMLP(
            num_experts=num_experts,
            top_k=read_top_k(fields, num_experts),
            intermediate=intermediate,
            function=fields.function("hidden_act", default="silu"),
            router_fp32=True,
        ),
        shared_intermediate=intermediate * fields.integer("n_shared_experts"),
        bias=fields.flag("mlp_bias", default=False),
    )
