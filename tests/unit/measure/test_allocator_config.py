"""Options of the simulated allocator, as PyTorch spells them."""

from __future__ import annotations

import pytest

from src.errors import UserError
from src.measure.allocator import AllocatorConfig, CachingAllocator

M = 1024**2
G = 1024**3


def test_the_usual_options() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "per_process_memory_fraction:0.9,large_segment_size_mb:64,max_non_split_rounding_mb:70"
    )
    assert AllocatorConfig.parse(text) == AllocatorConfig(
        expandable_segments=True,
        max_split_size_bytes=128 * M,
        garbage_collection_threshold=0.8,
        per_process_memory_fraction=0.9,
        large_segment_bytes=64 * M,
        max_non_split_rounding_bytes=70 * M,
    )


def test_an_empty_text_is_the_defaults() -> None:
    assert AllocatorConfig.parse("") == AllocatorConfig.parse(" ") == AllocatorConfig()
    assert AllocatorConfig().text() == ""


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "garbage_collection_threshold:0.8,max_split_size_mb:128",
        "roundup_power2_divisions:[1:4,2:4,4:4,8:4,16:4,32:4,64:4,128:4,256:4,512:4,1024:4,2048:4,"
        "4096:4,8192:4,16384:4,32768:4]",
    ],
)
def test_text_is_what_parse_reads(text: str) -> None:
    assert AllocatorConfig.parse(text).text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "expandable_segment:True",
            "allocator=expandable_segment: not among the allocator options",
        ),
        ("expandable_segments:yes", "allocator.expandable_segments=yes: True or False"),
        ("max_split_size_mb:19", "allocator.max_split_size_mb=19: at least 20"),
        ("max_split_size_mb:all", "allocator.max_split_size_mb=all: whole MiB"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "max_split_size_mb=30: at least 40"),
        ("large_segment_size_mb:10", "allocator.large_segment_size_mb=10: more than 10"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold=1.0: between 0 and 1"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold=nan: between 0 and 1"),
        ("per_process_memory_fraction:0", "per_process_memory_fraction=0.0: above 0"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:[3:4]", "a power of two, or"),
        ("roundup_power2_divisions:[]", "a power of two, or"),
        ("backend:cudaMallocAsync", "allocator.backend=cudaMallocAsync: only native is simulated"),
        ("expandable_segments", "option:value pairs"),
        ("expandable_segments:", "option:value pairs"),
        ("a:b:c", "option:value pairs"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        AllocatorConfig.parse(text)
    assert message in str(caught.value)


def test_what_has_no_effect_is_said() -> None:
    text = "backend:native,pinned_use_background_threads:True"
    config = AllocatorConfig.parse(
        f"{text},garbage_collection_threshold:0.5,max_non_split_rounding_mb:30"
    )
    assert config.warnings() == (
        "pinned_use_background_threads: no effect on device memory",
        "garbage_collection_threshold: no effect without per_process_memory_fraction",
        "max_non_split_rounding_mb: no effect without max_split_size_mb",
    )
    assert AllocatorConfig.parse("expandable_segments:True").warnings() == ()


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes"),
    [
        # 84 MiB lies between 64 and 128; four steps of 16 MiB: 64, 80, 96.
        (84 * M, 96 * M),
        (80 * M, 80 * M),
        (64 * M, 64 * M),
        # 1200 is not above 512 * 4: rounded to 512 B as ever.
        (1200, 1536),
        # 2049 lies between 2048 and 4096; steps of 512.
        (2049, 2560),
    ],
)
def test_rounding_to_a_fraction_of_a_power_of_two(num_bytes: int, block_bytes: int) -> None:
    assert AllocatorConfig.parse("roundup_power2_divisions:4").block_bytes(num_bytes) == block_bytes


def test_rounding_by_size() -> None:
    # From 256 MiB no rounding beyond 512 B (1), from 512 MiB halves, from 1 GiB quarters, then 8.
    config = AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert config.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert config.block_bytes(300 * M + 1) == 300 * M + 512
    assert config.block_bytes(520 * M) == 768 * M
    assert config.block_bytes(1100 * M) == 1280 * M
    assert config.block_bytes(2 * G + 1) == 2 * G + 256 * M
    assert config.block_bytes(100 * G) == 104 * G


def test_rounding_counts_as_allocated_but_not_as_requested() -> None:
    config = AllocatorConfig.parse("roundup_power2_divisions:4")
    allocator = CachingAllocator(config=config)
    allocator.malloc(84 * M)
    assert allocator.statistics.allocated_bytes.current == 96 * M
    assert allocator.statistics.requested_bytes.current == 84 * M


def test_large_segments_of_another_size() -> None:
    # 3M from a segment of 64M leaves 61M; 9M and 50M come from it, too (50M < 61M).
    config = AllocatorConfig.parse("large_segment_size_mb:64")
    allocator = CachingAllocator(config=config)
    for size in (3, 9, 50):
        allocator.malloc(size * M)
    assert allocator.statistics.reserved_bytes.current == 64 * M
