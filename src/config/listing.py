"""What `list=` prints: the models, GPUs and methods there are, as rows of text."""

from __future__ import annotations

from src.config import zoo
from src.config.gpu import load_gpu
from src.spec import Method

Row = dict[str, str]

_METHODS = {
    Method.SINGLE: "one GPU",
    Method.DDP: "whole copies, gradients averaged (DistributedDataParallel)",
    Method.ZERO1: "optimizer states sharded (DeepSpeed stage 1)",
    Method.ZERO2: "optimizer states and gradients sharded (DeepSpeed stage 2)",
    Method.ZERO3: "optimizer states, gradients and weights sharded (DeepSpeed stage 3)",
    Method.FSDP: "weights, gradients and states sharded (fully_shard)",
    Method.FSDP_GRAD: "as fsdp, weights kept whole after the forward pass",
    Method.TP: "every Linear of a block split over the GPUs",
    Method.DDP_TP: "ddp over groups of tp",
    Method.FSDP_TP: "fsdp over groups of tp",
}


def listing_rows(listing: str) -> list[Row]:
    """The rows of `list=models`, `list=gpus` or `list=methods`; equal columns in each."""
    if listing == "models":
        return [
            {"model": name, "hub id": others[0], "also": ", ".join(others[1:])}
            for name, others in zoo.index("model").items()
        ]
    if listing == "gpus":
        return [_gpu_row(sku, others) for sku, others in zoo.index("gpu").items()]
    return [{"method": str(method), "what it does": text} for method, text in _METHODS.items()]


def _gpu_row(sku: str, others: list[str]) -> Row:
    gpu = load_gpu(sku)
    usable = f"{gpu.usable_gib:.2f} GiB"
    return {"gpu": sku, "usable": usable, "name": gpu.name, "also": ", ".join(others[1:])}
