"""The operations that a decoder consists of: what they read, what they write, what they weigh.

One description serves parameter counts, FLOPs and saved activations: each operation carries its
parameters under transformers' own names and the width of its output, and says nothing of dtypes or
bytes; those depend on the job and are worked out in `src.memory`.

Letters: D hidden size, H heads, K key/value heads, E experts. Width is elements per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

CLAMPED_SWIGLU = "clamped_swiglu"
"""gpt-oss's gate: interleaved with up, both clamped, `(up + 1) * gate * sigmoid(gate * alpha)`."""


class Parallel(StrEnum):
    """How tensor parallelism splits a Linear: its outputs, its inputs, or not at all.

    COLUMN_GATHERED and ROW_SCATTERED split the weight the same way, but gather the output whole and
    take a whole input: what lies between them is whole on every GPU.
    """

    COLUMN = "column"
    COLUMN_GATHERED = "column-gathered"
    ROW = "row"
    ROW_SCATTERED = "row-scattered"
    REPLICATED = "replicated"

    @property
    def splits_outputs(self) -> bool:
        """Whether the weight is split along its outputs."""
        return self in (Parallel.COLUMN, Parallel.COLUMN_GATHERED)

    @property
    def splits_inputs(self) -> bool:
        """Whether the weight is split along its inputs."""
        return self in (Parallel.ROW, Parallel.ROW_SCATTERED)


class NormKind(StrEnum):
    """Norms that keep different tensors for their backward pass.

    LAYER is `nn.LayerNorm`. RMS computes in fp32, casts back, then multiplies by the weight
    (llama); RMS_FP32 multiplies by the weight in fp32 and casts last (gemma, olmo2, gpt_oss).
    """

    LAYER = "layer"
    RMS = "rms"
    RMS_FP32 = "rms-fp32"


class RotaryTable(StrEnum):
    """Dtype of the cosine and sine tables: that of the hidden states, of the value, or fp32."""

    HIDDEN = "hidden"
    VALUE = "value"
    FP32 = "fp32"


class EmbeddingKind(StrEnum):
    """What an embedding is indexed by."""

    TOKEN = "token"
    POSITION = "position"
    TOKEN_TYPE = "token-type"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter tensor, named relative to its block."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Unary:
    """Reads one value, writes one; has no parameters unless it says so."""

    source: str
    out: str
    width: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values read."""
        return (self.source,)

    def parameters(self) -> Iterator[Parameter]:
        """Parameter tensors, in order."""
        yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Binary:
    """Reads two values of equal width, writes one; has no parameters."""

    left: str
    right: str
    out: str
    width: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values read."""
        return (self.left, self.right)

    def parameters(self) -> Iterator[Parameter]:
        """None."""
        yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed:
    """A row lookup. `rows` includes the offset rows that some position embeddings have."""

    name: str
    out: str
    rows: int
    width: int
    kind: EmbeddingKind

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values read."""
        return ()

    def parameters(self) -> Iterator[Parameter]:
        """`<name>.weight`, (rows, width)."""
        yield Parameter(name=f"{self.name}.weight", shape=(self.rows, self.width))


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Unary):
    """`out = source @ weight.T + bias`.

    Attributes:
        in_features: width of the source that is read.
        width: out_features.
        parallel: how tensor parallelism splits it.
        is_attention: whether it is one of the attention projections (LoRA's default targets).
        is_module: whether it is an `nn.Linear` or `Conv1D` that PEFT can adapt (routers are not).
        is_plain: whether its class is one of these, and no subclass.
        tied: whether the weight is the token embedding's; then it is no parameter of its own.
        bias_name: full name of the bias where it is not `<name>.bias` (bert's head).
        stays_fp32: whether transformers keeps it in fp32 in a half-precision model.
        flat: whether it is given (tokens, width), not (sequences, positions, width).
    """

    name: str
    in_features: int
    bias: bool
    parallel: Parallel
    is_attention: bool = False
    is_module: bool = True
    is_plain: bool = True
    tied: bool = False
    bias_name: str | None = None
    stays_fp32: bool = False
    flat: bool = False

    def parameters(self) -> Iterator[Parameter]:
        """`<name>.weight`, (out_features, in_features), unless tied; `<name>.bias`."""
        if not self.tied:
            yield Parameter(name=f"{self.name}.weight", shape=(self.width, self.in_features))
        if self.bias:
            yield Parameter(name=self.bias_name or f"{self.name}.bias", shape=(self.width,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm(Unary):
    """A norm over `features`; `width // features` of them per token (more than one: per head).

    Attributes:
        separate: whether each of them is a module of its own, `<name>.<index>` (stablelm).
    """

    name: str
    features: int
    kind: NormKind
    weight: bool = True
    bias: bool = False
    weight_shape: tuple[int, ...] | None = None
    separate: bool = False

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of its modules: one, or one per head."""
        if not self.separate:
            return (self.name,)
        return tuple(f"{self.name}.{index}" for index in range(self.width // self.features))

    def parameters(self) -> Iterator[Parameter]:
        """`<name>.weight` and `<name>.bias` of each module, where there are any."""
        shape = self.weight_shape or (self.features,)
        for name in self.module_names:
            if self.weight:
                yield Parameter(name=f"{name}.weight", shape=shape)
            if self.bias:
                yield Parameter(name=f"{name}.bias", shape=shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class View(Unary):
    """A part of a value that shares its storage (split, chunk, reshape)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy(Unary):
    """A copy with a storage of its own (`contiguous`, `cat`, an expand that is materialised).

    Attributes:
        upcast: whether the copy is fp32.
        like: the value whose dtype the copy takes; no copy at all where the source has it already.
    """

    upcast: bool = False
    like: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary(Unary):
    """Rotary positions on `rotary_width` of each head's elements.

    Attributes:
        width: width of the value, all heads.
        rotary_width: elements of the value that are rotated, all heads.
        table: dtype of cosine and sine; the result has the wider of it and the value's dtype.
        joined: whether rotated and other elements are put together by `cat`, which lays the result
            out head by head.
    """

    rotary_width: int
    table: RotaryTable = RotaryTable.HIDDEN
    joined: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Softmax attention over causal positions.

    Attributes:
        head_dim: of queries and keys; `value_head_dim` of values and output.
        dropout: probability on the attention weights.
        softmax_fp32: whether eager attention computes its softmax in fp32.
        eager_fp32: whether eager attention multiplies queries and keys in fp32.
        softcap: whether eager attention caps its scores with a tanh.
        alibi: whether a bias per head and position is added to the scores (a mask for SDPA).
        explicit_mask: whether SDPA is always given a mask; others rely on `is_causal` (falcon).
        sinks_name: the parameter with a learned logit per head that joins the softmax (gpt_oss).
    """

    query: str
    key: str
    value: str
    out: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dropout: float = 0.0
    softmax_fp32: bool = True
    eager_fp32: bool = False
    softcap: bool = False
    alibi: bool = False
    explicit_mask: bool = False
    sinks_name: str | None = None

    @property
    def width(self) -> int:
        """Elements of the output per token: all heads."""
        return self.num_heads * self.value_head_dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values read."""
        return (self.query, self.key, self.value)

    def parameters(self) -> Iterator[Parameter]:
        """The sinks, (heads,), where there are any."""
        if self.sinks_name is not None:
            yield Parameter(name=self.sinks_name, shape=(self.num_heads,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation(Unary):
    """A pointwise function, by transformers' name of it."""

    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply(Binary):
    """The product of two values of equal width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Add(Binary):
    """The sum of two values of equal width.

    Attributes:
        in_place: whether it is written over the left value.
    """

    in_place: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout(Unary):
    """Dropout; with probability 0 the value passes through untouched."""

    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Gated experts with stacked weights; every token goes to `top_k` of them, balanced.

    Attributes:
        width: hidden size D.
        intermediate: width I of one expert.
        bias: whether both projections have biases.
    """

    name: str
    source: str
    router: str
    out: str
    width: int
    num_experts: int
    top_k: int
    intermediate: int
    function: str
    bias: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values read."""
        return (self.source, self.router)

    def parameters(self) -> Iterator[Parameter]:
        """`gate_up_proj` (E, 2I, D), `down_proj` (E, D, I) and their biases."""
        count, inner, hidden = self.num_experts, self.intermediate, self.width
        yield Parameter(name=f"{self.name}.gate_up_proj", shape=(count, 2 * inner, hidden))
        yield Parameter(name=f"{self.name}.down_proj", shape=(count, hidden, inner))
        if self.bias:
            yield Parameter(name=f"{self.name}.gate_up_proj_bias", shape=(count, 2 * inner))
            yield Parameter(name=f"{self.name}.down_proj_bias", shape=(count, hidden))


Op = (
    Embed
    | Linear
    | Norm
    | View
    | Copy
    | Rotary
    | Attention
    | Activation
    | Multiply
    | Add
    | Dropout
    | Experts
)
