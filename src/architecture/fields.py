"""Typed access to the fields of a Hugging Face config; a missing or wrong one is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from src.errors import UserError, nearest
from src.spec import Model

_MISSING = object()

MAX_LAYERS = 10_000

# transformers' `ACT2FN` without the two that have parameters of their own (prelu, xielu).
FUNCTIONS = (
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "hardswish",
    "laplace",
    "leaky_relu",
    "linear",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "sqrtsoftplus",
    "swish",
    "tanh",
)


@dataclass(frozen=True, slots=True)
class Fields:
    """The config fields of one model. Names may be several: the first that is there counts."""

    model: Model

    def _find(self, names: tuple[str, ...]) -> tuple[str, object]:
        """The first name that is there and not null, and its value; or the first name and None."""
        for name in names:
            value = self.model.config.get(name)
            if value is not None:
                return name, value
        return names[0], None

    def error(self, name: str, value: object, allowed: str) -> UserError:
        """The error that says what is wrong with a field, and of which model."""
        return UserError(
            key=f"arch.{name}",
            value=value,
            allowed=f"{allowed} (config of {self.model.name}, model_type {self.model.model_type})",
        )

    def optional_integer(self, *names: str) -> int | None:
        """A whole number, 1 or more; None where the field is absent or null."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a whole number, 1 or more")
        return value

    def nullable(self, name: str, absent: int | None) -> int | None:
        """A whole number, 1 or more; None where the field is null, `absent` where it is absent."""
        return self.optional_integer(name) if name in self.model.config else absent

    def integer(self, *names: str) -> int:
        """A whole number, 1 or more; its absence is an error."""
        value = self.optional_integer(*names)
        if value is None:
            raise self.error(names[0], "missing", "the field is needed")
        return value

    def layers(self, *names: str) -> int:
        """A number of blocks, 1 to 10,000; its absence is an error."""
        value = self.integer(*names)
        if value > MAX_LAYERS:
            raise self.error(self._find(names)[0], value, f"at most {MAX_LAYERS}")
        return value

    def count(self, *names: str, default: int) -> int:
        """A whole number, 0 or more."""
        name, value = self._find(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, value, "a whole number, 0 or more")
        return value

    def probability(self, *names: str, default: float = 0.0) -> float:
        """A dropout probability, 0 to below 1."""
        name, value = self._find(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.error(name, value, "0 or more and below 1")
        return float(value)

    def positive(self, name: str, *, default: float | None) -> float | None:
        """A number above 0; null stands for none, the default for a config without the field."""
        value = self.model.config.get(name, _MISSING)
        if value is _MISSING:
            return default
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, value, "above 0, or null")
        return float(value)

    def fraction(self, *names: str, default: float) -> float:
        """A number above 0 and at most 1."""
        name, value = self._find(names)
        return default if value is None else self._as_fraction(name, value)

    def _as_fraction(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self.error(name, value, "above 0 and at most 1")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        """A word."""
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, value, "a word")
        return value

    def function(self, *names: str, default: str) -> str:
        """An activation function, by transformers' name of it."""
        value = self.text(*names, default=default)
        if value not in FUNCTIONS:
            close = ", ".join(nearest(value, FUNCTIONS)) or ", ".join(FUNCTIONS)
            raise self.error(self._find(names)[0], value, f"no known function; nearest: {close}")
        return value

    def present(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.model.config.get(name) is not None

    def divisible(self, name: str, value: int, by_name: str, by: int) -> int:
        """`value // by`; an error where that leaves a rest."""
        if value % by:
            raise self.error(name, value, f"a multiple of {by_name}={by}")
        return value // by

    def refuse(self, name: str) -> None:
        """An error where the flag is set: the variant it selects is not described."""
        if self.flag(name, default=False):
            raise self.error(name, True, "only false is supported")

    def sliding_layers(self, layers: int) -> tuple[bool, ...] | None:
        """Which blocks have a sliding window, by `layer_types`; None where that is absent."""
        value = self.model.config.get("layer_types")
        if value is None:
            return None
        kinds = ("sliding_attention", "full_attention")
        if (
            not isinstance(value, list | tuple)
            or len(value) != layers
            or any(kind not in kinds for kind in value)
        ):
            allowed = f"a list of {layers}, one a layer, of {' and '.join(kinds)}"
            raise self.error("layer_types", value, allowed)
        return tuple(kind == kinds[0] for kind in value)

    def alternating_windows(
        self, layers: int, *, pattern: int, default: int
    ) -> tuple[int | None, ...]:
        """`sliding_window` in every block but each `pattern`-th, or as `layer_types` says.

        Empty where no block has one.
        """
        window = self.nullable("sliding_window", default)
        sliding = self.sliding_layers(layers)
        if sliding is None:
            sliding = tuple((index + 1) % pattern != 0 for index in range(layers))
        if window is None or not any(sliding):
            return ()
        return tuple(window if slides else None for slides in sliding)

    def indices(self, name: str) -> frozenset[int]:
        """A list of whole numbers, 0 or more; empty where the field is absent or null."""
        value = self.model.config.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list | tuple) or any(
            isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in value
        ):
            raise self.error(name, value, "a list of whole numbers, 0 or more")
        return frozenset(value)

    def rotary_fraction(self, *names: str, default: float) -> float:
        """The part of each head that is rotated, above 0 and at most 1.

        It is `partial_rotary_factor` of `rope_scaling` or `rope_parameters`, or else the field
        `names` of the config itself.
        """
        for outer in ("rope_scaling", "rope_parameters"):
            mapping = self.model.config.get(outer)
            if isinstance(mapping, Mapping):
                inner = mapping.get("partial_rotary_factor")
                if inner is not None:
                    return self._as_fraction(f"{outer}.partial_rotary_factor", inner)
        return self.fraction(*names, default=default)
