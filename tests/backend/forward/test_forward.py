"""The compiled update has one signature for all steps, so MLX compiles it once."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mlxtune.backend.lora.optimizer import LoRAOptimizer
from tests.backend.step.executions import PACKED, fresh, model_folder
from tests.core.steps.epochs import LENGTHS, epoch_of
from tests.long.counts import _nothing_evaluated
from tests.long.pipeline_graphs import PipelineGraphs


@pytest.mark.skipif("MLX_DISABLE_COMPILE" in os.environ, reason="MLX compiles nothing here")
@pytest.mark.parametrize("name", LENGTHS)
def test_updates_of_all_steps_share_one_signature(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, take = [], LoRAOptimizer._adamw_step

    def noted(*args: Any) -> Any:
        traced.append(args)
        return take(*args)

    monkeypatch.setattr(LoRAOptimizer, "_adamw_step", noted)
    graphs = PipelineGraphs(fresh(model_folder("qwen3"), PACKED, 2048))
    with _nothing_evaluated():
        for examples in epoch_of(name)[:6]:
            graphs.lazy_step(examples)
    # MLX traces a compiled function once for each signature.
    assert len(traced) == 1
