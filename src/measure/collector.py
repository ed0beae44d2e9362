"""Python's cycle collector, at rest while a step is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it, nothing that lies in a cycle is freed.

    The collector would take a fifth of the time, while libraries are imported above all, and free
    tensors of cycles whenever enough else was made: bytes would depend on that.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
