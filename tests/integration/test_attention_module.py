"""Where a description says that the attention module begins and ends, against transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from src.architecture import describe
from src.measure.blocks import find_blocks
from src.measure.checkpointing import attention_module
from src.spec import Model
from tests.forward_events import Recorder, forward_events
from tests.integration.test_forward_order import Expected, comparable
from tests.small_configs import SMALL_CONFIGS
from tests.transformers_models import build


@contextmanager
def counted(module: Any) -> Iterator[list[int]]:
    """How many events there were when `module` began and ended."""
    counts: list[int] = []
    before = Recorder.add
    events: list[int] = [0]

    def add(recorder: Recorder, *args: Any, **options: Any) -> None:
        before(recorder, *args, **options)
        events[0] = len(recorder.events)

    Recorder.add = add  # type: ignore[method-assign]
    begin = module.register_forward_pre_hook(lambda *_: counts.append(events[0]))
    end = module.register_forward_hook(lambda *_: counts.append(events[0]))
    try:
        yield counts
    finally:
        Recorder.add = before  # type: ignore[method-assign]
        begin.remove()
        end.remove()


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_the_module_has_the_operations_that_the_description_puts_into_it(name: str) -> None:
    decoder = describe(Model(name=name, hf_id=None, config=SMALL_CONFIGS[name]))
    model = build(SMALL_CONFIGS[name], device="cpu", attn_implementation="eager")
    module = attention_module(find_blocks(model)[0])
    with counted(module) as counts:
        events = forward_events(model, sequence=6)
    begin, end = counts
    block, predicted = decoder.blocks[0], Expected(eager=True)
    start, stop = block.attention
    predicted.made_by = {block.source: None}
    predicted.run(block.ops[:start], f"{decoder.blocks_path}.0.")
    outside = len(predicted.events)
    predicted.run(block.ops[start:stop], f"{decoder.blocks_path}.0.")
    inside = comparable(predicted.events[outside:])
    found = comparable(events[begin:end])
    # the softmax's dtype is another test's
    assert [event[:2] for event in found] == [event[:2] for event in inside]
    assert found[0][1].startswith(f"{decoder.blocks_path}.0.")
