"""Writing a block down operation by operation; widths follow from the values read."""

from __future__ import annotations

from dataclasses import dataclass, field

from src.architecture.decoder import Block
from src.architecture.ops import (
    Activation,
    Add,
    Attention,
    Copy,
    Dropout,
    Embed,
    EmbeddingKind,
    Experts,
    Linear,
    Multiply,
    Norm,
    NormKind,
    Op,
    Parallel,
    Rotary,
    RotaryTable,
    View,
)


@dataclass
class BlockBuilder:
    """Collects operations; every method returns the name of the value it adds.

    Attributes:
        source: name of the incoming value.
        width: its width.
        prefix: put before every parameter name.
        plain_linears: whether the Linears' class is `nn.Linear` or `Conv1D` itself.
    """

    source: str = "x"
    width: int = 0
    prefix: str = ""
    plain_linears: bool = True
    _ops: list[Op] = field(default_factory=list)
    _widths: dict[str, int] = field(default_factory=dict)
    _attention_stop: int | None = None

    def __post_init__(self) -> None:
        self._widths[self.source] = self.width

    def build(self, out: str) -> Block:
        """The finished block, which gives out the value `out`."""
        assert out in self._widths
        attention = self._attention_module()
        return Block(source=self.source, out=out, ops=tuple(self._ops), attention=attention)

    def end_attention(self) -> None:
        """Say that what is there so far ends the attention module.

        Without it, the module ends with its last projection.
        """
        self._attention_stop = len(self._ops)

    def _attention_module(self) -> tuple[int, int]:
        inside = [
            index
            for index, op in enumerate(self._ops)
            if isinstance(op, Linear) and op.is_attention
        ]
        return (inside[0], self._attention_stop or inside[-1] + 1) if inside else (0, 0)

    def width_of(self, value: str) -> int:
        """Elements per token of a value."""
        return self._widths[value]

    def add_op(self, op: Op) -> str:
        """Append a ready operation."""
        assert all(value in self._widths for value in op.inputs), op
        assert op.out not in self._widths, op
        self._ops.append(op)
        self._widths[op.out] = op.width
        return op.out

    def _fresh(self, stem: str) -> str:
        name = stem
        while name in self._widths:
            name = f"{stem}{len(self._ops)}"
        return name

    def embed(self, name: str, *, rows: int, width: int, kind: EmbeddingKind) -> str:
        """An embedding lookup."""
        full = self.prefix + name
        return self.add_op(
            Embed(name=full, out=self._fresh(name), rows=rows, width=width, kind=kind)
        )

    def linear(
        self,
        name: str,
        source: str,
        width: int,
        *,
        bias: bool = False,
        parallel: Parallel = Parallel.REPLICATED,
        is_attention: bool = False,
        is_module: bool = True,
        tied: bool = False,
        bias_name: str | None = None,
        stays_fp32: bool = False,
        flat: bool = False,
    ) -> str:
        """A Linear from `source` to `width` features."""
        return self.add_op(
            Linear(
                name=self.prefix + name,
                source=source,
                out=self._fresh(name),
                in_features=self._widths[source],
                width=width,
                bias=bias,
                parallel=parallel,
                is_attention=is_attention,
                is_module=is_module,
                is_plain=self.plain_linears,
                tied=tied,
                bias_name=None if bias_name is None else self.prefix + bias_name,
                stays_fp32=stays_fp32,
                flat=flat,
            )
        )

    def norm(
        self,
        name: str,
        source: str,
        *,
        kind: NormKind,
        features: int | None = None,
        weight: bool = True,
        bias: bool = False,
        weight_shape: tuple[int, ...] | None = None,
        separate: bool = False,
    ) -> str:
        """A norm over the whole width, or over each `features` of it."""
        width = self._widths[source]
        return self.add_op(
            Norm(
                name=self.prefix + name,
                source=source,
                out=self._fresh(name),
                width=width,
                features=features or width,
                kind=kind,
                weight=weight,
                bias=bias,
                weight_shape=weight_shape,
                separate=separate,
            )
        )

    def view(self, source: str, width: int, *, name: str = "view") -> str:
        """A part of a value, sharing its storage."""
        return self.add_op(View(source=source, out=self._fresh(name), width=width))

    def copy(
        self,
        source: str,
        width: int | None = None,
        *,
        name: str = "copy",
        upcast: bool = False,
        like: str | None = None,
    ) -> str:
        """A value of its own storage; `width` may be larger than the source's (expand)."""
        return self.add_op(
            Copy(
                source=source,
                out=self._fresh(name),
                width=self._widths[source] if width is None else width,
                upcast=upcast,
                like=like,
            )
        )

    def rotary(
        self,
        source: str,
        *,
        rotary_width: int | None = None,
        table: RotaryTable = RotaryTable.HIDDEN,
        joined: bool = False,
    ) -> str:
        """Rotary positions on all, or on `rotary_width`, of a value's elements."""
        width = self._widths[source]
        return self.add_op(
            Rotary(
                source=source,
                out=self._fresh(f"{source}_rotated"),
                width=width,
                rotary_width=rotary_width or width,
                table=table,
                joined=joined,
            )
        )

    def attention(
        self,
        query: str,
        key: str,
        value: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        dropout: float = 0.0,
        softmax_fp32: bool = True,
        eager_fp32: bool = False,
        softcap: bool = False,
        alibi: bool = False,
        explicit_mask: bool = False,
        sinks_name: str | None = None,
    ) -> str:
        """Softmax attention."""
        return self.add_op(
            Attention(
                query=query,
                key=key,
                value=value,
                out=self._fresh("attention"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_head_dim=value_head_dim or head_dim,
                dropout=dropout,
                softmax_fp32=softmax_fp32,
                eager_fp32=eager_fp32,
                softcap=softcap,
                alibi=alibi,
                explicit_mask=explicit_mask,
                sinks_name=sinks_name,
            )
        )

    def activation(self, source: str, function: str) -> str:
        """A pointwise function."""
        width = self._widths[source]
        op = Activation(source=source, out=self._fresh("act"), width=width, function=function)
        return self.add_op(op)

    def multiply(self, left: str, right: str) -> str:
        """The product of two values."""
        out = self._fresh("product")
        return self.add_op(Multiply(left=left, right=right, out=out, width=self._widths[left]))

    def add(self, left: str, right: str, *, in_place: bool = False) -> str:
        """The sum of two values."""
        width = self._widths[left]
        op = Add(left=left, right=right, out=self._fresh("sum"), width=width, in_place=in_place)
        return self.add_op(op)

    def dropout(self, source: str, probability: float) -> str:
        """Dropout; no operation at all with probability 0."""
        if not probability:
            return source
        width = self._widths[source]
        out = self._fresh(f"{source}_dropped")
        return self.add_op(Dropout(source=source, out=out, width=width, probability=probability))

    def experts(
        self,
        name: str,
        source: str,
        router: str,
        *,
        num_experts: int,
        top_k: int,
        intermediate: int,
        function: str,
        bias: bool = False,
    ) -> str:
        """Gated experts with stacked weights."""
        return self.add_op(
            Experts(
                name=self.prefix + name,
                source=source,
                router=router,
                out=self._fresh(name),
                width=self._widths[source],
                num_experts=num_experts,
                top_k=top_k,
                intermediate=intermediate,
                function=function,
                bias=bias,
            )
        )
