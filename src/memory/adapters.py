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
        regime, dropout = self.regime, self.regime.finetune.dropout
        if dropout:
            taken = self.dropout(taken)
        width, bytes_ = op.width, taken.dtype_bytes
        norm = self.tape.tensor(0, bytes_, size=fixed(width * bytes_), requires_grad=False)
        for sizes in _norm_moments(self, op, bytes_, weight_bytes):
            with self.tape.beside(*sizes):
                self.tape.record(norm, [])
        magnitude = self.stored(width, trained=True, stored_bytes=regime.adapter_bytes)
        with self.tape.beside(*_to_the_end(self, op, bytes_, weight_bytes)):
            ratio = self._row(width, max(bytes_, regime.adapter_bytes))
            self.tape.record(ratio, [magnitude], saved=[norm])
            low = self.factors(op, taken, base.share)
            plain = self._plain(op, taken, base, weight_bytes=weight_bytes)
            less = self._row(width, ratio.dtype_bytes)
            self.tape.record(less, [ratio])
            own = self._times_row(less, plain)
            added = self.scaled(self._times_row(ratio, low))
            return self.add(base, self.add(own, added))

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

    def _plain(self, op: Linear, taken: Value, base: Value, *, weight_bytes: int | None) -> Value:
        """`Wx` without the bias."""
        regime = self.regime
        if not regime.finetune.dropout:
            if not op.bias:
                return base
            stored = regime.parameter_bytes if weight_bytes is None else base.dtype_bytes
            out = self.like(base, dtype_bytes=max(base.dtype_bytes, stored))
            self.tape.record(out, [base])
            return out
        operand = self.cast(taken, regime.compute_bytes) if regime.autocast else taken
        numel, bytes_ = op.in_features * op.width, operand.dtype_bytes
        is_stored = weight_bytes is None and bytes_ == regime.parameter_bytes
        weight = self.tape.tensor(
            0,
            bytes_,
            size=fixed(numel * bytes_),
            term=Term.CAST_WEIGHTS,
            requires_grad=False,
            counted=not is_stored,
        )
        out = self.tape.tensor(base.width, bytes_, share=base.share)
        self.tape.record(out, [operand], saved=[weight])
        return out


def _eye_bytes(low: Adapters) -> int:
    """Bytes per element of what A and B are multiplied with and give: that of a Linear."""
    regime = low.regime
    return regime.compute_bytes if regime.autocast else regime.adapter_bytes


def _copied(low: Adapters, bytes_: int, weight_bytes: int | None) -> bool:
    """Whether W in x's dtype is a tensor of its own."""
    return weight_bytes is not None or bytes_ != low.regime.parameter_bytes


def _to_the_end(
    low: Adapters, op: Linear, bytes_: int, weight_bytes: int | None
) -> tuple[Size, ...]:
    """What DoRA's forward has as local names from the norm on.

    BA in x's dtype; the graph behind it, which ends with the name: the eye that A was applied to,
    and what A gave; W in x's dtype where it is a copy.
    """
    inputs, numel, eye = op.in_features, op.in_features * op.width, _eye_bytes(low)
    copies = 1 + _copied(low, bytes_, weight_bytes)
    graph = (fixed(inputs * inputs * eye), fixed(inputs * low.regime.finetune.r * eye))
    return (*graph, *[fixed(numel * bytes_)] * copies)


def _norm_moments(
    low: Adapters, op: Linear, bytes_: int, weight_bytes: int | None
) -> Iterator[tuple[Size, ...]]:
    """What is alive at each step towards the norm of W + BA (`get_lora_weight`, `get_weight_norm`).

    BA is B(A(eye)) of an I x I eye; then BA and W are taken to x's dtype (int8: W is dequantised by
    two products), scaled BA and its sum with W are made, and autocast takes the norm in fp32.
    """
    inputs, numel, eye = op.in_features, op.in_features * op.width, _eye_bytes(low)
    regime = low.regime

    def weights(*widths: int) -> tuple[Size, ...]:
        return tuple(fixed(numel * width) for width in widths)

    made = fixed(inputs * inputs * regime.adapter_bytes)
    graph = (fixed(inputs * inputs * eye), fixed(inputs * regime.finetune.r * eye))
    casts_eye = eye != regime.adapter_bytes
    yield (*([made] if casts_eye else []), *graph, *weights(eye))
    if eye != bytes_:
        yield (*graph, *weights(eye, bytes_))
    if weight_bytes is not None:
        pair = FLOAT_BYTES if weight_bytes == FLOAT_BYTES else bytes_
        yield (*graph, *weights(bytes_, weight_bytes, pair))
    after = _to_the_end(low, op, bytes_, weight_bytes)
    yield (*after, *weights(bytes_, bytes_))
    if regime.autocast and bytes_ != FLOAT_BYTES:
        yield (*after, *weights(bytes_, FLOAT_BYTES))
