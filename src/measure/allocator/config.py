"""The caching allocator's options, as `PYTORCH_CUDA_ALLOC_CONF` writes them.

The rules are those of `c10/core/AllocatorConfig` and `c10/cuda/CUDAAllocatorConfig` in PyTorch 2.11
to 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from src.errors import UserError, unknown_name
from src.units import ALLOCATION_GRANULARITY_BYTES, MIB

SMALL_SIZE_BYTES = MIB
"""Largest block of the small pool (`kSmallSize`)."""

SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment and page size of the small pool (`kSmallBuffer`)."""

LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment of a block of 1 to 10 MiB, page size of the large pool (`large_segment_size`)."""

MIN_LARGE_ALLOCATION_BYTES = 10 * MIB
"""From here on a block gets a segment of its own size (`kMinLargeAlloc`)."""

LARGE_ROUNDING_BYTES = 2 * MIB
"""Such a segment is a multiple of this (`kRoundLarge`)."""

_NUM_INTERVALS = 16
"""`roundup_power2_divisions` has one entry per power of two from 1 MiB to 64 GiB."""

_HOST_ONLY = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)
"""Options that PyTorch knows and that move no byte of device memory in a training step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorConfig:
    """Options of the caching allocator; the defaults are PyTorch's.

    Attributes:
        expandable_segments: grow one virtual segment per pool and stream by mapping pages.
        max_split_size_bytes: blocks of this size or more are never split, nor given to smaller
            requests; None: every block may be split. At least `large_segment_bytes`.
        max_non_split_rounding_bytes: by how much such an oversize block may exceed the request;
            None: `large_segment_bytes`.
        garbage_collection_threshold: share of the allowed memory above which old cached blocks are
            released before a new segment; 0 is never. Without a memory fraction it has no effect.
        roundup_power2_divisions: divisions per power of two that requests are rounded up to, from
            1 MiB (and below), 2 MiB, ... to 32 GiB (and above): 16 values; empty rounds to 512 B.
        large_segment_bytes: segment of a request of 1 to 10 MiB; more than 10 MiB.
        per_process_memory_fraction: share of the card's memory that may be reserved, in (0, 1].
        ignored: options given that have no effect on device memory.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = ()
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    per_process_memory_fraction: float = 1.0
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least = self.large_segment_bytes
        _require(
            least > MIN_LARGE_ALLOCATION_BYTES,
            "large_segment_size_mb",
            least // MIB,
            "more than 10",
        )
        for name, size in (
            ("max_split_size_mb", self.max_split_size_bytes),
            ("max_non_split_rounding_mb", self.max_non_split_rounding_bytes),
        ):
            if size is not None:
                _require(size >= least, name, size // MIB, f"at least {least // MIB}")
        threshold = self.garbage_collection_threshold
        _require(0 <= threshold < 1, "garbage_collection_threshold", threshold, "between 0 and 1")
        fraction = self.per_process_memory_fraction
        _require(
            0 < fraction <= 1, "per_process_memory_fraction", fraction, "above 0 and at most 1"
        )
        divisions = self.roundup_power2_divisions
        _require(
            len(divisions) in (0, _NUM_INTERVALS)
            and all(d >= 0 and d & (d - 1) == 0 for d in divisions),
            "roundup_power2_divisions",
            divisions,
            "powers of two, or 0 for none",
        )

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """The options of a `PYTORCH_CUDA_ALLOC_CONF` value; an empty one gives the defaults.

        Args:
            text: `expandable_segments:True,max_split_size_mb:128` and the like.

        Raises:
            UserError: an unknown option, or a value PyTorch or this simulation does not take.
        """
        fields: dict[str, object] = {}
        ignored: list[str] = []
        for name, value in _options(text):
            if name == "backend":
                _require(value == "native", name, value, "only native is simulated")
                continue
            if name in _HOST_ONLY:
                ignored.append(name)
                continue
            if name not in _READERS:
                raise unknown_name(
                    key="allocator",
                    value=name,
                    known=[*_READERS, *_HOST_ONLY],
                    what="allocator options",
                )
            field, read, allowed = _READERS[name]
            try:
                fields[field] = read(value)
            except ValueError:
                raise UserError(key=f"allocator.{name}", value=value, allowed=allowed) from None
        return cls(**fields, ignored=tuple(ignored))  # type: ignore[arg-type]

    def text(self) -> str:
        """The options that differ from the defaults, as `parse` reads them; sizes in whole MiB."""
        default = AllocatorConfig()
        options = []
        for name, (field, read, _) in _READERS.items():
            value = getattr(self, field)
            if value == getattr(default, field):
                continue
            if read is _read_mib:
                value //= MIB
            elif read is _read_divisions:
                pairs = (f"{1 << interval}:{divisions}" for interval, divisions in enumerate(value))
                value = f"[{','.join(pairs)}]"
            options.append(f"{name}:{value}")
        return ",".join(options)

    def warnings(self) -> tuple[str, ...]:
        """Options that were given and have no effect, one sentence each."""
        found = [f"{name}: no effect on device memory" for name in self.ignored]
        if self.garbage_collection_threshold and self.per_process_memory_fraction == 1:
            found.append(
                "garbage_collection_threshold: no effect without per_process_memory_fraction"
            )
        if self.max_non_split_rounding_bytes is not None and self.max_split_size_bytes is None:
            found.append("max_non_split_rounding_mb: no effect without max_split_size_mb")
        return tuple(found)

    def block_bytes(self, num_bytes: int) -> int:
        """Bytes of the block for a request of `num_bytes` (`round_size`)."""
        unit = ALLOCATION_GRANULARITY_BYTES
        if num_bytes < unit:
            return unit
        if self.roundup_power2_divisions:
            interval = min(max(num_bytes.bit_length() - MIB.bit_length(), 0), _NUM_INTERVALS - 1)
            divisions = self.roundup_power2_divisions[interval]
            if divisions > 1 and num_bytes > unit * divisions:
                return _next_division(num_bytes, divisions)
        return -(-num_bytes // unit) * unit

    def segment_bytes(self, block_bytes: int) -> int:
        """Bytes of the new segment for a block (`get_allocation_size`)."""
        if block_bytes <= SMALL_SIZE_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_ALLOCATION_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES


def _next_division(num_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between powers of two."""
    if num_bytes & (num_bytes - 1) == 0:
        return num_bytes
    floor = 1 << (num_bytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-num_bytes // step) * step


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(key=f"allocator.{name}", value=value, allowed=allowed)


_OPTION = re.compile(r"([^:,\[\]]+):(\[[^\]]*\]|[^:,\[\]]+)(,|$)")


def _options(text: str) -> list[tuple[str, str]]:
    """The name and value of each option, in the order given; white space is dropped."""
    compact = "".join(text.split())
    found = []
    position = 0
    while position < len(compact):
        match = _OPTION.match(compact, position)
        if match is None:
            raise UserError(
                key="allocator", value=text, allowed="option:value pairs with commas between"
            )
        found.append((match[1], match[2]))
        position = match.end()
    return found


def _read_bool(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(value)
    return value == "True"


def _read_mib(value: str) -> int:
    return int(value) * MIB


def _read_divisions(value: str) -> tuple[int, ...]:
    """`4`, or `[256:1,512:2,>:4]` with sizes in MiB (`parseRoundUpPower2Divisions`)."""
    if not value.startswith("["):
        return (int(value),) * _NUM_INTERVALS
    divisions = [0] * _NUM_INTERVALS
    last = -1
    for pair in value[1:-1].split(","):
        bound, _, given = pair.partition(":")
        if bound == ">":
            divisions[last + 1 :] = [int(given)] * (_NUM_INTERVALS - last - 1)
            continue
        size_mib = int(bound)
        if size_mib < 1 or size_mib & (size_mib - 1):
            raise ValueError(bound)
        interval = min(size_mib.bit_length() - 1, _NUM_INTERVALS - 1)
        if last < 0:
            divisions[:interval] = [int(given)] * interval
        divisions[interval] = int(given)
        last = interval
    return tuple(divisions)


_READERS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "expandable_segments": ("expandable_segments", _read_bool, "True or False"),
    "garbage_collection_threshold": ("garbage_collection_threshold", float, "between 0 and 1"),
    "large_segment_size_mb": ("large_segment_bytes", _read_mib, "whole MiB, more than 10"),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib, "whole MiB"),
    "max_split_size_mb": ("max_split_size_bytes", _read_mib, "whole MiB, at least 20"),
    "per_process_memory_fraction": (
        "per_process_memory_fraction",
        float,
        "above 0 and at most 1",
    ),
    "roundup_power2_divisions": (
        "roundup_power2_divisions",
        _read_divisions,
        "a power of two, or [size_mib:divisions,...,>:divisions] with powers of two",
    ),
}
