"""Operations of a model as the autograd nodes that PyTorch and transformers record for them.

Each function names the tensors that its operation keeps. Sources: PyTorch's `derivatives.yaml`
(what a node saves), `autocast_mode.h` (what runs in fp32 or half precision on CUDA), transformers'
modelling code (which operations there are). Attention is in `src.memory.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from src.architecture import Block
from src.architecture.ops import (
    CLAMPED_SWIGLU,
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
from src.memory.adapters import Adapters
from src.memory.attention import lower_attention
from src.memory.size import FLOAT_BYTES, ZERO, Size, per_token
from src.memory.tuning import is_quantised, is_target
from src.memory.values import Value
from src.spec import Quantization

INT8_INPUT_BYTES = 2 + 1 + 2 + 1
"""Of an input that is quantised: in fp16, in int8, its magnitudes, and which are outliers."""

INT8_PRODUCT_BYTES = 4 + 2
"""Of an int8 product besides the result: in int32, and dequantised in fp16."""


@dataclass(kw_only=True)
class Lowering(Adapters):
    """Writes a block's operations to a tape.

    Attributes:
        hidden_bytes: bytes per element of the residual stream, which rotary tables follow.
        values: the tensors behind the names of the block at work.
        gathered: of those, what has been gathered along the sequence, for the attention or not.
        named: tensors that the module at work and its caller have names for until it returns.
        named_by: whether that module is the attention; None: none has begun.
    """

    hidden_bytes: int
    values: dict[str, Value] = field(default_factory=dict)
    gathered: dict[tuple[Value, bool], Value] = field(default_factory=dict)
    named: list[Value] = field(default_factory=list)
    named_by: bool | None = None

    def run(self, block: Block, source: Value) -> Value:
        """Lower a block: its incoming tensor in, its outgoing one out."""
        self.values, self.named, self.named_by = {block.source: source}, [], None
        start, stop = block.attention if self.regime.recomputes_attention else (0, 0)
        self._lower(block.ops[:start])
        if start < stop:
            module = block.ops[start:stop]
            read = {name for op in module for name in op.inputs if name in self.values}
            with self.tape.checkpointed([self.values[name] for name in sorted(read)]):
                self._lower(module)
        self._lower(block.ops[stop:])
        return self.values[block.out]

    def _lower(self, ops: tuple[Op, ...]) -> None:
        for op in ops:
            inputs = [self.values[name] for name in op.inputs]
            self.values[op.out] = _HANDLERS[type(op)](self, op, *inputs)

    def copied(self, op: Copy, source: Value) -> Value:
        """A copy; one that only takes another value's dtype is a cast."""
        if op.like is not None:
            return self.cast(source, self.values[op.like].dtype_bytes)
        return self.copy(source, op.width, upcast=op.upcast)

    def linear(self, op: Linear, source: Value) -> Value:
        """A Linear with LoRA's adapters where it is a target."""
        if self.named_by is not op.is_attention:
            self.named, self.named_by = [] if op.flat else [source], op.is_attention
        out = self._linear(op, source)
        for value in self.named:
            self.tape.read(value)
        return out

    def _linear(self, op: Linear, source: Value) -> Value:
        finetune, head = self.regime.finetune, self.regime.head
        if op.parallel.splits_outputs and self.regime.splits_sequence:
            source = self.whole_sequence(op, source)
        quantised = is_quantised(op, finetune, head)
        if quantised:
            out = self.quantised(source, op.in_features * op.width, op.width)
        else:
            out = self.dense(op, source)
        if not is_target(op, finetune, head):
            return out
        if quantised:
            return self.quantised_adapter(op, source, out)
        return self.adapter(op, source, out)

    def attend(self, op: Attention, query: Value, key: Value, value: Value) -> Value:
        """An attention, whose module has names for what it is given."""
        self.named += [query, key, value]
        return lower_attention(self, op, query, key, value)

    def dense(self, op: Linear, source: Value) -> Value:
        """A Linear as it is, split by tensor parallelism."""
        tp = self.regime.tp
        share = source.share if op.parallel is Parallel.REPLICATED else 1.0
        share = 1 / tp if op.parallel.splits_outputs else share
        numel = op.in_features * op.width / (1 if op.parallel is Parallel.REPLICATED else tp)
        # What is whole outside is cut to this GPU's inputs, a copy, and put together again.
        taken = self.scattered(source) if op.parallel is Parallel.ROW_SCATTERED else source
        out = self.matmul(taken, numel, op.width * share, share, trained=self.regime.trains_weights)
        if op.parallel is Parallel.COLUMN_GATHERED:
            out = self.joined(out)
        if op.parallel.splits_inputs and self.regime.splits_sequence:
            out = self.scattered(out, flat=op.flat)
        return out

    def quantised(self, source: Value, numel: float, width: int) -> Value:
        """A Linear of bitsandbytes; the result has the source's dtype.

        NF4 (`MatMul4Bit`): the source in the dtype that computes; both passes dequantise the whole
        weight into it. int8 (`MatMul8bitLt`): keeps the source, as an attribute of the node; the
        backward pass dequantises the weight into the source's dtype.
        """
        if self.regime.finetune.quantization is Quantization.INT8:
            out = self.tape.tensor(width, source.dtype_bytes)
            weight = Size(fixed=numel * source.dtype_bytes)
            inputs = source.width
            with self.tape.beside(per_token(INT8_INPUT_BYTES * inputs)):
                self.tape.read(source)
            with self.tape.beside(per_token(inputs + INT8_PRODUCT_BYTES * width)):
                self.tape.record(out, [source], temporary=weight, retained=[source])
            return out
        operand = self.cast(source, self.regime.compute_bytes)
        product = self.tape.tensor(width, operand.dtype_bytes)
        weight = Size(fixed=numel * operand.dtype_bytes)
        with self.tape.beside(weight):
            self.tape.record(product, [operand], temporary=weight)
        return self.cast(product, source.dtype_bytes)

    def whole_sequence(self, op: Linear, source: Value) -> Value:
        """All-gather in front of column-parallel Linears, once per attention and once per MLP.

        Nothing saves the part that is gathered. Backward: the gradient is put in the order of the
        ranks (a copy, unless tokens are its first dimension), then reduce-scattered.
        """
        key = (source, op.is_attention)
        if key not in self.gathered:
            whole = self.tape.tensor(source.width / source.share, source.dtype_bytes)
            self.tape.record(whole, [source], temporary=ZERO if op.flat else whole.size)
            self.tape.add_apart(whole)
            self.gathered[key] = whole
        return self.gathered[key]

    def joined(self, source: Value) -> Value:
        """A part that is gathered, as the final norm's output for a head; its gradient is cut."""
        whole = self.tape.tensor(source.width / source.share, source.dtype_bytes)
        self.tape.record(whole, [source])
        return whole

    def norm(self, op: Norm, source: Value) -> Value:
        """LayerNorm, or RMSNorm as the families write it out."""
        width = source.width
        groups = op.width / op.features * source.share
        weights: list[Value] = []
        if op.weight and self.regime.trains_weights:
            stored = self.regime.norm_bytes
            weights.append(self.stored(op.features, trained=True, stored_bytes=stored))
        if op.kind is NormKind.LAYER:
            taken = self.cast(source, FLOAT_BYTES) if self.regime.autocast else source
            out = self.like(taken)
            statistics = self.tape.tensor(2 * groups, FLOAT_BYTES, requires_grad=False)
            self.tape.record(out, [taken, *weights], saved=[taken, statistics])
            return out
        taken = self.cast(source, FLOAT_BYTES)
        scale = self.tape.tensor(groups, FLOAT_BYTES, requires_grad=taken.requires_grad)
        self.tape.record(
            scale, [taken], saved=[taken, scale], temporary=per_token(width * FLOAT_BYTES)
        )
        normed = self.like(taken)
        self.tape.record(
            normed, [taken, scale], saved=[taken, scale], temporary=per_token(width * FLOAT_BYTES)
        )
        if op.kind is NormKind.RMS_FP32:
            return self.cast(
                self._scaled_by_weight(normed, FLOAT_BYTES, weights), source.dtype_bytes
            )
        back = self.cast(normed, source.dtype_bytes)
        wider = max(back.dtype_bytes, self.regime.norm_bytes)
        return self._scaled_by_weight(back, wider, weights)

    def _scaled_by_weight(self, source: Value, dtype_bytes: int, weights: Sequence[Value]) -> Value:
        """The product with a weight; `weights`: that weight where it is trained."""
        out = self.like(source, dtype_bytes=dtype_bytes)
        saved = [source] if weights else []
        temporary = source.size if weights else ZERO
        self.tape.record(out, [source, *weights], saved=saved, temporary=temporary)
        return out

    def rotary(self, op: Rotary, source: Value) -> Value:
        """`x * cos + rotate(x) * sin`: keeps only the tables, which all blocks share."""
        table = {
            RotaryTable.HIDDEN: self.hidden_bytes,
            RotaryTable.VALUE: source.dtype_bytes,
            RotaryTable.FP32: FLOAT_BYTES,
        }[op.table]
        out = self.like(source, dtype_bytes=max(source.dtype_bytes, table))
        rotated = source.width * op.rotary_width / op.width * out.dtype_bytes
        self.tape.record(out, [source], temporary=per_token(2 * rotated))
        if op.joined:
            self.head_major.add(out)
        return out

    def experts(self, op: Experts, source: Value, router: Value) -> Value:
        """Tokens sorted by expert, two grouped matrix multiplies, weighted sum.

        `top_k` copies of each token, balanced; transformers' `grouped_mm` implementation, which is
        not on autocast's list and takes its input to the weights' dtype. Tensor parallelism splits
        each expert's width and sums what they give in place.
        """
        routed = self.tape.tensor(op.num_experts, FLOAT_BYTES)
        self.tape.record(routed, [router], saved=[routed])
        trained, copies = self.regime.trains_weights, op.top_k
        stacked = op.num_experts * op.intermediate * op.width / self.regime.tp
        taken = self.cast(
            self.copy(source, copies * op.width, upcast=False), self.regime.parameter_bytes
        )
        inner = copies * op.intermediate / self.regime.tp
        joint = self.product(taken, self.stored(2 * stacked, trained=trained), 2 * inner, 1.0)
        gate, up = self.tape.view(joint, inner), self.tape.view(joint, inner)
        if op.function == CLAMPED_SWIGLU:
            product = self.clamped_gate(gate, up)
        else:
            product = self.multiply(self.activation(op.function, gate), up)
        out = self.product(product, self.stored(stacked, trained=trained), taken.width, 1.0)
        weights = self.tape.tensor(copies, out.dtype_bytes)
        self.tape.record(weights, [routed])
        weighted = self.like(out)
        self.tape.record(weighted, [out, weights], saved=[out, weights], temporary=out.size)
        summed = self.tape.tensor(source.width, weighted.dtype_bytes)
        self.tape.record(summed, [self.copy(weighted, int(weighted.width), upcast=False)])
        return self.cast(summed, source.dtype_bytes)

    def clamped_gate(self, gate: Value, up: Value) -> Value:
        """`(clamp(up) + 1) * (clamp(gate) * sigmoid(clamp(gate) * alpha))`, a step at a time."""
        limited = []
        for part in (gate, up):
            clamped = self.like(part)
            self.tape.record(clamped, [part], saved=[part])
            limited.append(clamped)
        steep = self.like(gate)
        self.tape.record(steep, limited[:1])
        glu = self.multiply(limited[0], self.activation("sigmoid", steep))
        raised = self.like(up)
        self.tape.record(raised, limited[1:])
        return self.multiply(raised, glu)

    def behind_prompt(self, tokens: Value) -> Value:
        """`cat((prompts.to(dtype), embeddings))`; embeddings that are a leaf are held besides."""
        if self.regime.embedding_is_leaf:
            self.tape.keep(tokens)
        return self.like(tokens)

    def embed(self, op: Embed) -> Value:
        """A lookup keeps only its indices; its backward makes a gradient of the whole table.

        Tied to the head, both gradients are added; into a third tensor where the head's is the
        transposed view that its matrix multiply gave (autocast's cast back, and the sum over the
        chunks of a loss, make it a plain one).
        Frozen under checkpointing, its output is made a leaf (`enable_input_require_grads`), which
        the graph then holds.
        """
        bytes_ = self.regime.parameter_bytes
        tokens = op.kind is EmbeddingKind.TOKEN
        table = self.tape.parameter(
            op.rows * op.width,
            bytes_,
            requires_grad=self.regime.trains_weights,
            accumulates=self.regime.accumulates or (tokens and self.regime.tied),
        )
        positions = op.kind is EmbeddingKind.POSITION
        size = Size(per_position=op.width * bytes_) if positions else None
        out = self.tape.tensor(op.width, bytes_, size=size)
        plain = self.regime.casts_weights or self.regime.keeps_operands
        transposed = self.regime.whole_logits and not plain
        separate = tokens and self.regime.tied and transposed
        if tokens and self.regime.finetune.prompt_length:
            return self.behind_prompt(out)
        if tokens and self.regime.embedding_is_leaf:
            self.tape.keep(out)
            return out
        self.tape.record(out, [table], temporary=table.size if separate else ZERO)
        return out


_HANDLERS: dict[type, Callable[..., Value]] = {
    Activation: lambda low, op, source: low.activation(op.function, source),
    Add: lambda low, _, left, right: low.add(left, right),
    Attention: Lowering.attend,
    Copy: Lowering.copied,
    Dropout: lambda low, _, source: low.dropout(source),
    Embed: Lowering.embed,
    Experts: Lowering.experts,
    Linear: Lowering.linear,
    Multiply: lambda low, _, left, right: low.multiply(left, right),
    Norm: Lowering.norm,
    Rotary: Lowering.rotary,
    View: lambda low, op, source: low.tape.view(source, op.width * source.share),
}
