"""Buckets and layouts of the distributed methods."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from src.errors import UserError
from src.measure.case import parse_case
from src.measure.dry_run import check
from src.measure.methods import DDP_BUCKET_BYTES, ddp_bucket_bytes
from src.units import MIB

CONFIG = {"model": {"config": {"model_type": "llama"}}}


def parameter(num_bytes: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(num_bytes // 4, device="meta"))


def test_buckets_hold_every_gradient_once_in_ready_order() -> None:
    parameters = [parameter(size * MIB) for size in (2, 30, 10, 20, 1)]
    assert ddp_bucket_bytes(parameters) == [1 * MIB, 30 * MIB, 30 * MIB, 2 * MIB]
    assert DDP_BUCKET_BYTES == 25 * MIB


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layout": {"dp": 2}}, "layout"),
        ({"method": "fsdp", "layout": {"dp": 4}}, "layout.shard"),
        ({"method": "ddp", "layout": {"dp": 2, "tp": 2}}, "layout.tp"),
        ({"method": "ddp", "layout": {"dp": 2}, "loop": {"fsdp1": True}}, "loop.fsdp1"),
        (
            {"method": "tp", "layout": {"tp": 2}, "sequence_parallel": True, "seq_len": 31},
            "seq_len",
        ),
        ({"method": "zero3", "layout": {"dp": 2, "shard": 2}}, "method"),
        (
            {
                "method": "fsdp",
                "layout": {"dp": 2, "shard": 2},
                "finetune": {"kind": "qlora", "quantization": "int8"},
            },
            "finetune.quantization",
        ),
        (
            {"precision": "bf16-true", "finetune": {"kind": "qlora", "upcast": "norms"}},
            "finetune.upcast",
        ),
    ],
)
def test_layouts_that_do_not_belong_to_the_method_are_refused(
    changes: dict[str, object], key: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(parse_case(CONFIG | changes))
    assert caught.value.key == key
