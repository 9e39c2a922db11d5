"""The plan of a loaded model: from a recorded, a cached or a measured correction, in that order."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.models.loading import BaseModel, open_base, read_weights
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import TrainConfig
from mlxtune.core.steps.memory_plan import DataSample, MemoryPlan
from mlxtune.core.steps.memory_terms import Factors, Measured
from mlxtune.errors import MemoryLimitError
from mlxtune.session import memory
from mlxtune.session.memory import choose_plan, confirm, planned_work, recorded_memory
from tests.backend.conftest import random_examples
from tests.models import write_model

# Kept layers take a thousand times the estimate, recomputed layers the estimate itself.
HUGE = Measured(kept=Factors(1000.0, 1000.0), working=Factors(1000.0, 1000.0))
Loaded = tuple[TrainConfig, BaseModel, InstructPipeline, DataSample, MemoryPlan]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    # On CUDA, nothing would be measured.
    monkeypatch.setattr("mlxtune.backend.memory.shapes.graph_limits", lambda: None)
    options: dict[str, Any] = {"rank": 4, "memory_limit": 0.02, "cache_dir": tmp_path / "cache"}
    config = TrainConfig(str(write_model(tmp_path / "model", "qwen3")), ("d",), **options)
    base, work = opened(config), planned_work(config, [examples()])
    plan = choose_plan(config, base, work)
    read_weights(base)
    pipeline = InstructPipeline(base.model, config.lora(), execution=plan.execution)
    return config, base, pipeline, work, plan


def opened(config: TrainConfig) -> BaseModel:
    return open_base(Path(config.model_path), "float32")


def examples() -> Any:
    return random_examples(8)


def fails(*arguments: Any) -> None:
    raise AssertionError("measured again")


def test_memory_is_measured_once_and_kept(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, base, pipeline, work, plan = loaded
    assert plan.shapes.measured is None
    first = confirm(config, base, pipeline, work, plan)
    assert first.shapes.measured is not None
    monkeypatch.setattr(memory, "measure", fails)
    kept = choose_plan(config, opened(config), work)
    assert kept.shapes.measured == first.shapes.measured
    second = confirm(config, base, pipeline, work, kept)
    assert (second.execution, second.peak) == (first.execution, first.peak)
    with pytest.raises(AssertionError, match="measured again"):
        confirm(replace(config, no_cache=True), base, pipeline, work, plan)


def test_what_a_run_recorded_comes_before_what_is_kept(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, base, pipeline, work, plan = loaded
    confirm(config, base, pipeline, work, plan)
    monkeypatch.setattr(memory, "measure", fails)
    kept = choose_plan(config, opened(config), work)
    found = confirm(config, base, pipeline, work, kept, HUGE)
    assert found.shapes.measured == HUGE


def test_loaded_model_runs_as_the_measured_plan_says(loaded: Loaded) -> None:
    config, base, pipeline, work, plan = loaded
    assert not pipeline.forward.execution.recompute
    found = confirm(config, base, pipeline, work, plan, HUGE)
    assert found.execution.recompute
    assert pipeline.forward.execution.recompute
    assert pipeline.forward.execution.loss_chunk == found.execution.loss_chunk
    assert pipeline.engine.batches.max_tokens == found.execution.micro_batch_tokens
    pipeline.train_batch(examples())


def test_run_that_turns_out_not_to_fit_is_an_error(loaded: Loaded) -> None:
    config, base, pipeline, work, plan = loaded
    much = Measured(HUGE.kept, HUGE.working, again=Factors(1000.0, 1000.0))
    with pytest.raises(MemoryLimitError, match="raise --memory-limit"):
        confirm(config, base, pipeline, work, plan, much)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"plan": 3}', '{"plan": {"measured": {"kept": {"tokens": "x"}}}}']
)
def test_recorded_memory_is_read_from_the_run_and_nothing_else_is(
    tmp_path: Path, content: str
) -> None:
    assert recorded_memory(tmp_path) is None
    (tmp_path / "run.json").write_text(content)
    assert recorded_memory(tmp_path) is None
    (tmp_path / "run.json").write_text(json.dumps({"plan": {"measured": asdict(HUGE)}}))
    assert recorded_memory(tmp_path) == HUGE
