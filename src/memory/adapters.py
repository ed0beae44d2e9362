"""PEFT's adapters on a Linear, as autograd nodes: LoRA and DoRA (peft/tuners/lora, 0.21).

Letters: I inputs, O outputs of the Linear, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from src.architecture.ops import Linear, Parallel
from src.memory.pieces import Pieces
from src.memory.size import FLOAT_BYTES, Size, fixed
from src.memory.terms import Term
from src.memory.values import Value
from src.spec import Quantization


@dataclass(kw_only=True)
class Adapters(Pieces):
    """Writes adapters to a tape."""

    def adapter(self, op: Linear, source: Value, base: Value) -> Value:
        """PEFT's `lora.Linear`: `base + B(A(dropout(x.to(fp32)))) * scale`, cast back."""
        taken = self.cast(source, self.regime.adapter_bytes)
        if self.regime.finetune.dora:
            added = self.magnitude_adapter(op, taken, base, weight_bytes=None)
        else:
            added = self.add(base, self.low_rank(op, taken, base))
        self._has(source, taken)
        return self.cast(added, base.dtype_bytes)

    def quantised_adapter(self, op: Linear, source: Value, base: Value) -> Value:
        """PEFT's `lora.bnb`: the result is cloned for NF4, only autocast casts the adapters' input.

        `base + (B(A(dropout(x))) * scale).to(base.dtype)`; of DoRA the whole sum is cast.
        """
        finetune, autocast = self.regime.finetune, self.regime.autocast
        is_int8 = finetune.quantization is Quantization.INT8
        if not is_int8:
            base = self.contiguous(base)
        taken = source if autocast else self.cast(source, self.regime.adapter_bytes)
        if finetune.dora:
            weight_bytes = FLOAT_BYTES if is_int8 else self.regime.compute_bytes
            added = self.magnitude_adapter(op, taken, base, weight_bytes=weight_bytes)
            self._has(source, taken)
            return added if autocast else self.cast(added, base.dtype_bytes)
        scaled = self.low_rank(op, taken, base)
        self._has(source, taken)
        return self.add(base, scaled if autocast else self.cast(scaled, base.dtype_bytes))

    def _has(self, *values: Value) -> None:
        """Names of the adapter's forward, and of its caller, to the end of it."""
        for value in values:
            self.tape.read(value)

    def low_rank(self, op: Linear, taken: Value, base: Value) -> Value:
        """`B(A(dropout(x))) * scale`, split as the Linear's own output `base` is."""
        if self.regime.finetune.dropout:
            taken = self.dropout(taken)
        return self.scaled(self.factors(op, taken, base.share))

    def scaled(self, source: Value) -> Value:
        """The product with a number; keeps nothing."""
        out = self.like(source)
        self.tape.record(out, [source])
        return out

    def factors(self, op: Linear, taken: Value, share: float) -> Value:
        """`B(A(x))`, of which this GPU has `share`.

        Of a row-parallel Linear A's output is summed over the group as the Linear's own is.
        """
        rank, stored = self.regime.finetune.r, self.regime.adapter_bytes
        if self.regime.autocast:
            taken = self.cast(taken, self.regime.compute_bytes)
        rows = self.regime.tp if op.parallel is Parallel.ROW else 1
        down = self.weight(rank * op.in_features / rows, trained=True, stored_bytes=stored)
        part = taken.share if op.parallel is Parallel.REPLICATED else 1.0
        low = self.product(taken, down, rank * part, part)
        if op.parallel.splits_inputs and self.regime.splits_sequence:
            low = self.scattered(low, flat=op.flat)
        columns = self.regime.tp if op.parallel is Parallel.COLUMN else 1
        up = self.weight(rank * op.width / columns, trained=True, stored_bytes=stored)
        return self.product(low, up, op.width * share, share)

    def magnitude_adapter(
        self, op: Linear, taken: Value, base: Value, *, weight_bytes: int | None
    ) -> Value:
        """DoRA: `base + (m - 1) * Wx + m * B(A(x)) * scale`.

        `m` is the magnitude over the norm of `W + BA`, a constant. `Wx` is the Linear's own output
        without its bias; with dropout it is computed again, from what dropout has left of x and
        from W in x's dtype (`DoraLinearLayer.forward`).

        Args:
            op: the Linear.
            taken: the adapters' input.
            base: the Linear's output.
            weight_bytes: per element of W as it is dequantised; None: it is stored as it is.
        """
        regime = self.regime
        if regime.finetune.dropout:
            taken = self.dropout(taken)
        width, bytes_ = op.width, taken.dtype_bytes
        norm = self.tape.tensor(0, bytes_, size=fixed(width * bytes_), requires_grad=False)
        weight = self._frozen(
            op, bytes_, is_copy=weight_bytes is not None or bytes_ != regime.parameter_bytes
        )
        graph, product = _graph(self, op), fixed(op.in_features * width * bytes_)
        for sizes in _before_norm(self, op, bytes_, weight_bytes):
            with self.tape.beside(*sizes):
                self.tape.record(norm, [])
        with self.tape.beside(*graph, product, product, product):
            self.tape.record(weight, [])
        magnitude = self.stored(width, trained=True, stored_bytes=regime.adapter_bytes)
        with self.tape.beside(*graph, product):
            ratio = self._row(width, max(bytes_, regime.adapter_bytes))
            self.tape.record(ratio, [magnitude], saved=[norm])
            low = self.factors(op, taken, base.share)
            plain = self._plain(op, taken, base, weight, is_stored=weight_bytes is None)
            less = self._row(width, ratio.dtype_bytes)
            self.tape.record(less, [ratio])
            own = self._times_row(less, plain)
            added = self.add(own, self.scaled(self._times_row(ratio, low)))
            self.tape.read(weight)
        return self.add(base, added)

    def _row(self, width: int, dtype_bytes: int) -> Value:
        """One element for each output."""
        return self.tape.tensor(0, dtype_bytes, size=fixed(width * dtype_bytes))

    def _times_row(self, row: Value, source: Value) -> Value:
        """A product with a row, whose gradient is summed from a whole one.

        Both gradients come in the product's dtype and are cast and summed behind the node.
        """
        out = self.like(source, dtype_bytes=max(row.dtype_bytes, source.dtype_bytes))
        saved, temporary = [source], out.size
        if self.tape.needs_gradient(source):
            saved.append(row)
            temporary = temporary.plus(out.size).plus(source.size.times(-1))
        self.tape.record(out, [row, source], saved=saved, temporary=temporary)
        return out

    def _frozen(self, op: Linear, dtype_bytes: int, *, is_copy: bool) -> Value:
        """W in another dtype, or as it is stored."""
        return self.tape.tensor(
            0,
            dtype_bytes,
            size=fixed(op.in_features * op.width * dtype_bytes),
            term=Term.CAST_WEIGHTS,
            requires_grad=False,
            counted=is_copy,
        )

    def _plain(
        self, op: Linear, taken: Value, base: Value, weight: Value, *, is_stored: bool
    ) -> Value:
        """`Wx` without the bias, which has the dtype of the weights or of a quantised result."""
        regime = self.regime
        if not regime.finetune.dropout:
            if not op.bias:
                return base
            bias_bytes = regime.parameter_bytes if is_stored else base.dtype_bytes
            out = self.like(base, dtype_bytes=max(base.dtype_bytes, bias_bytes))
            self.tape.record(out, [base])
            return out
        operand = self.cast(taken, regime.compute_bytes) if regime.autocast else taken
        if operand is not taken:
            weight = self._frozen(
                op,
                operand.dtype_bytes,
                is_copy=not is_stored or operand.dtype_bytes != regime.parameter_bytes,
            )
        out = self.tape.tensor(base.width, operand.dtype_bytes, share=base.share)
        self.tape.record(out, [operand], saved=[weight])
        return out


def _eye_bytes(low: Adapters) -> int:
    """Bytes per element of what A and B are multiplied with and give: that of a Linear."""
    regime = low.regime
    return regime.compute_bytes if regime.autocast else regime.adapter_bytes


def _graph(low: Adapters, op: Linear) -> tuple[Size, ...]:
    """What the graph behind BA keeps until its name goes: the eye that A is applied to, A's output.

    Only BA's detached values are used (`DoraLinearLayer.forward`).
    """
    rows = op.in_features * _eye_bytes(low)
    return fixed(rows * op.in_features), fixed(rows * low.regime.finetune.r)


def _before_norm(
    low: Adapters, op: Linear, bytes_: int, weight_bytes: int | None
) -> Iterator[tuple[Size, ...]]:
    """What is alive on the way to BA and W in x's dtype (`bytes_`), the norm still to be taken.

    BA is B(A(eye)) of an I x I eye, which autocast casts; BA is cast to x's dtype; W is dequantised
    (int8: by two products) and cast. Then BA is scaled and added to W (`get_weight_norm`).
    """
    inputs, numel, eye = op.in_features, op.in_features * op.width, _eye_bytes(low)
    stored, graph = low.regime.adapter_bytes, _graph(low, op)

    def weights(*widths: int) -> tuple[Size, ...]:
        return tuple(fixed(numel * width) for width in widths)

    made = (fixed(inputs * inputs * stored),) if eye != stored else ()
    yield (*made, *graph, *weights(eye))
    if eye != bytes_:
        yield (*graph, *weights(eye, bytes_))
    if weight_bytes == FLOAT_BYTES:
        yield (*graph, *weights(bytes_, FLOAT_BYTES, FLOAT_BYTES))
