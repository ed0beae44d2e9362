"""What operations are made of: casts, products, sums, dropouts, as autograd nodes on a tape.

Sources: PyTorch's `derivatives.yaml` (what a node saves) and `autocast_mode.h` (what runs in fp32
or half precision on CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from src.memory.regime import Regime
from src.memory.size import FLOAT_BYTES, ZERO, Size
from src.memory.tape import Tape
from src.memory.terms import Term
from src.memory.values import Value

MASK_BYTES = 1

SAVES_OUTPUT = frozenset({"relu", "tanh", "sigmoid"})
WRITTEN_OUT = frozenset({"gelu_new", "gelu_fast"})


@dataclass(kw_only=True)
class Pieces:
    """Writes small operations to a tape under one regime.

    Attributes:
        regime: dtypes and switches.
        tape: where the nodes go.
        head_major: tensors laid out head by head, not position by position.
    """

    regime: Regime
    tape: Tape
    head_major: set[Value] = field(default_factory=set)

    def like(self, source: Value, *, dtype_bytes: int | None = None) -> Value:
        """A new tensor of the same width."""
        bytes_ = dtype_bytes or source.dtype_bytes
        size = source.size.times(bytes_ / source.dtype_bytes)
        return self.tape.tensor(
            source.width,
            bytes_,
            share=source.share,
            size=size,
        )

    def cast(self, source: Value, dtype_bytes: int) -> Value:
        """`source.to(dtype)`: itself where it has that dtype."""
        if source.dtype_bytes == dtype_bytes:
            return source
        out = self.like(source, dtype_bytes=dtype_bytes)
        self.tape.record(out, [source])
        return out

    def weight(self, numel: float, *, trained: bool, stored_bytes: int | None = None) -> Value:
        """A weight as a matrix multiply reads it: a half-precision copy of it under autocast."""
        stored = stored_bytes or self.regime.parameter_bytes
        parameter = self.stored(numel, trained=trained, stored_bytes=stored)
        if not self.regime.autocast or stored == self.regime.compute_bytes:
            return parameter
        copy = self.tape.tensor(
            0,
            self.regime.compute_bytes,
            size=Size(fixed=numel * self.regime.compute_bytes),
            term=Term.CAST_WEIGHTS,
            requires_grad=trained,
        )
        self.tape.record(copy, [parameter])
        return copy

    def stored(self, numel: float, *, trained: bool, stored_bytes: int | None = None) -> Value:
        """A weight as it is stored."""
        return self.tape.parameter(
            numel,
            stored_bytes or self.regime.parameter_bytes,
            requires_grad=trained,
            accumulates=self.regime.accumulates,
        )

    def matmul(
        self, source: Value, numel: float, width: float, share: float, *, trained: bool
    ) -> Value:
        """`source @ weight.T`; keeps the source for the weight's gradient, and the weight."""
        operand = self.cast(source, self.regime.compute_bytes) if self.regime.autocast else source
        weight = self.weight(numel, trained=trained)
        return self.product(operand, weight, width, share)

    def product(self, operand: Value, weight: Value, width: float, share: float) -> Value:
        """The matrix multiply itself; each operand is kept for the other's gradient."""
        out = self.tape.tensor(
            width,
            operand.dtype_bytes,
            share=share,
        )
        saved = []
        if self.tape.needs_gradient(weight) or self.regime.keeps_operands:
            saved.append(operand)
        if self.tape.needs_gradient(operand) or self.regime.keeps_operands:
            saved.append(weight)
        self.tape.record(out, [operand, weight], saved=saved)
        return out

    def contiguous(self, source: Value) -> Value:
        """A copy in another layout; its gradient is the source's, seen through a view."""
        out = self.like(source)
        self.tape.record(out, [source], passed=[source])
        return out

    def activation(self, function: str, source: Value) -> Value:
        """A pointwise function; the ones written out in Python keep each intermediate."""
        if function in SAVES_OUTPUT:
            out = self.like(source)
            self.tape.record(out, [source], saved=[out])
            return out
        if function in WRITTEN_OUT:
            return self._written_out_gelu(function, source)
        out = self.like(source)
        self.tape.record(out, [source], saved=[source])
        return out

    def _written_out_gelu(self, function: str, source: Value) -> Value:
        """`0.5 x (1 + tanh(...))` in Python: the half, the tanh, its sum, and the cube's input.

        Under autocast `pow` runs in fp32, and everything behind it. `gelu_fast` multiplies instead
        of raising to a power: three more products, no fp32.
        """
        if function == "gelu_new":
            base = self.cast(source, FLOAT_BYTES) if self.regime.autocast else source
            inner = self.like(base)
            # The cube's gradient, and in `pow_backward` the square and three times it.
            self.tape.record(inner, [base], saved=[base], temporary=base.size.times(3))
        else:
            steep = self.like(source)
            self.tape.record(steep, [source], saved=[source])
            inner = self.multiply(self.like(source), self.multiply(steep, source))
        tanh = self.activation("tanh", inner)
        shifted = self.like(tanh)
        self.tape.record(shifted, [tanh])
        half = self.like(source)
        self.tape.record(half, [source])
        return self.multiply(half, shifted)

    def multiply(self, left: Value, right: Value) -> Value:
        """A product keeps both factors; gradients come in its dtype, then in the narrower one."""
        wider, other = (left, right) if left.dtype_bytes >= right.dtype_bytes else (right, left)
        out = self.like(wider)
        before_cast = other.size.times(wider.dtype_bytes / other.dtype_bytes - 1)
        self.tape.record(out, [left, right], saved=[left, right], temporary=before_cast)
        return out

    def add(self, left: Value, right: Value) -> Value:
        """A sum keeps nothing; its gradient is passed on, cast where a summand is narrower."""
        wider = left if left.size.per_token >= right.size.per_token else right
        out = self.like(wider, dtype_bytes=max(left.dtype_bytes, right.dtype_bytes))
        passed = [summand for summand in (left, right) if summand.size == out.size]
        self.tape.record(out, [left, right], passed=passed)
        return out

    def dropout(self, source: Value) -> Value:
        """CUDA's `native_dropout` keeps a mask of one byte per element."""
        out = self.like(source)
        mask = self.tape.tensor(
            source.width, MASK_BYTES, term=Term.DROPOUT_MASKS, requires_grad=False
        )
        self.tape.record(out, [source], saved=[mask])
        return out

    def copy(self, source: Value, width: int, *, upcast: bool) -> Value:
        """A copy; keeps nothing."""
        bytes_ = FLOAT_BYTES if upcast else source.dtype_bytes
        local = width * source.share
        out = self.tape.tensor(
            local, bytes_, share=source.share, requires_grad=source.requires_grad
        )
        self.tape.record(out, [source])
        return out

    def scattered(self, source: Value, *, flat: bool = False) -> Value:
        """Reduce-scatter behind a row-parallel Linear; the cut of a whole tensor likewise.

        Backward: the gradient is all-gathered, then put in the tensor's order (a copy).
        """
        share = 1 / self.regime.tp
        part = self.tape.tensor(source.width * share, source.dtype_bytes, share=share)
        self.tape.record(part, [source], temporary=ZERO if flat else source.size)
        return part
