"""The signatures that MLX compiles for steps: few, and dropped before they take much memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxtune.backend.measure.counts import _nothing_evaluated
from mlxtune.backend.model.compiling import traces
from mlxtune.backend.step.operations import MLX
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import IN_LINE, fresh, model_folder
from tests.core.steps.epochs import LENGTHS, epoch_of


@pytest.mark.parametrize("name", LENGTHS)
def test_steps_of_all_shapes_share_one_signature(name: str) -> None:
    pipeline = fresh(model_folder("qwen3"), IN_LINE, 2048)
    steps = epoch_of(name)
    before = traces()
    with _nothing_evaluated():
        for examples in steps[:6]:
            pipeline.lazy_step(examples)
    # The update's.
    assert traces() - before == 1


def example(length: int) -> list[Example]:
    mask = np.array([0] * (length // 2) + [1] * (length - length // 2), dtype=np.uint8)
    return [Example(1, np.full(length, 7, dtype=np.int32), mask)]


def test_compiled_graphs_are_dropped_before_they_take_a_gigabyte() -> None:
    compiled = Execution(MLX, compile=True)
    pipeline = fresh(model_folder("qwen3"), compiled, 10_000)
    forward = pipeline.forward
    # 12 MB for 36 layers; this model has 2.
    assert 0.9e9 < forward.most_compiled * 12e6 * 2 / 36 <= 1e9
    forward.most_compiled = 3
    before, known, kept = traces(), [], []
    with _nothing_evaluated():
        for length in (30, 60, 90, 120, 150, 180, 210):
            pipeline.lazy_step(example(length))
            known.append(traces() - before)
            kept.append(forward.gradients)
    # One more each time, and the update's; a new function takes the place of one with 3 or more.
    assert known == [2, 3, 4, 5, 6, 7, 8]
    graphs: dict[Any, int] = {}
    for function in kept:
        graphs[function] = graphs.get(function, 0) + 1
    assert list(graphs.values()) == [2, 3, 2]
