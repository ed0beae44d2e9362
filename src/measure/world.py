"""The process group of a measurement: real ranks where there are any, else one that is faked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from src.errors import UserError
from src.measure.methods import fake_world

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def local_rank() -> int:
    """Which of this machine's GPUs is this process's, as torchrun sets it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def world(num_gpus: int, device: torch.device) -> Iterator[str]:
    """Within it, this process is one of `num_gpus`; who carries the collectives.

    `none` on one GPU. A process that was started as one of `num_gpus` (`RANK` and `WORLD_SIZE`, as
    torchrun sets them) joins the others and connects to them: `nccl`, or `gloo` on CPUs. Any other
    is rank 0 of a group that sends nothing: `fake`.

    Raises:
        UserError: it was started as one of another number.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:
        with fake_world(num_gpus):
            yield "none" if num_gpus == 1 else "fake"
        return
    if num_ranks != num_gpus:
        allowed = f"as many GPUs as processes were started, WORLD_SIZE={num_ranks}"
        raise UserError(key="layout", value=num_gpus, allowed=allowed)
    import torch.distributed as dist

    backend = _BACKENDS[device.type]
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    dist.all_reduce(torch.zeros(1, device=device))
    # The group is never destroyed: that waits for ranks which may have run out of memory. The
    # process ends right after its answer.
    yield backend
