"""The plan of a run: memory that is recorded, cached or measured, and the form of products."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.device import allocator
from mlxtune.backend.models import loading, stored_layers
from mlxtune.backend.models.loading import BaseModel, open_base, read_weights
from mlxtune.backend.models.stored_layers import TimedMatmuls
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.workers.workers import Workers
from mlxtune.config import TrainConfig
from mlxtune.config.objective_config import PolicyConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.objectives.policy import (
    PolicyObjective,
    SampledExample,
    SampleRequest,
    expected_samples,
)
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import MARGIN, MemoryPlan, Workload, predict_sampling
from mlxtune.core.steps.memory_terms import BatchLoad, Factors, MemoryCorrection
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import MemoryLimitError
from mlxtune.session import memory_planning
from mlxtune.session.memory_planning import (
    choose_matmul,
    choose_plan,
    confirm,
    expected_workload,
    recorded_memory,
)
from tests.backend.conftest import random_examples
from tests.models import write_model
from tests.slow import slow

# Kept layers take a thousand times the estimate, recomputed layers the estimate itself.
HUGE = MemoryCorrection(kept=Factors(1000.0, 1000.0), working=Factors(1000.0, 1000.0))
Loaded = tuple[TrainConfig, BaseModel, InstructPipeline, Workload, MemoryPlan]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    # On CUDA, nothing would be measured.
    monkeypatch.setattr("mlxtune.backend.memory.shapes.graph_limits", lambda: None)
    options: dict[str, Any] = {"rank": 4, "memory_limit": 0.02, "cache_dir": tmp_path / "cache"}
    config = TrainConfig(
        str(write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)), ("d",), **options
    )
    base, work = opened(config), expected_workload(config, [StepLengths.of(examples())])
    plan = choose_plan(config, base, work)
    read_weights(base)
    pipeline = InstructPipeline(base.model, config.pipeline_config(), execution=plan.execution)
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
    monkeypatch.setattr(memory_planning, "measure", fails)
    kept = choose_plan(config, opened(config), work)
    assert kept.shapes.measured == first.shapes.measured
    second = confirm(config, base, pipeline, work, kept)
    assert (second.execution, second.peak) == (first.execution, first.peak)
    with pytest.raises(AssertionError, match="measured again"):
        confirm(replace(config, no_cache=True), base, pipeline, work, plan)


def test_recorded_memory_takes_precedence_over_the_cache(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, base, pipeline, work, plan = loaded
    confirm(config, base, pipeline, work, plan)
    monkeypatch.setattr(memory_planning, "measure", fails)
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
    assert pipeline._engine.micro_batches.max_tokens == found.execution.micro_batch_tokens
    pipeline.train_batch(examples())


def test_run_that_turns_out_not_to_fit_is_an_error(loaded: Loaded) -> None:
    config, base, pipeline, work, plan = loaded
    much = MemoryCorrection(HUGE.kept, HUGE.working, again=Factors(1000.0, 1000.0))
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


# Answers that are sampled


@pytest.mark.parametrize(
    ("sizes", "prompt", "answer", "stop_tokens", "largest"),
    [
        slow({"num_hidden_layers": 4}, 100, 60, [], True),
        slow({"num_hidden_layers": 2}, 300, 300, [], False),
        ({"num_hidden_layers": 1, "vocab_size": 30_000}, 20, 8, [], True),
        ({"num_hidden_layers": 4}, 100, 8, [7, 8, 9], True),
    ],
    ids=["layers", "growth", "logits", "stop tokens"],
)
def test_plan_includes_the_caches_and_logits_of_sampled_answers(
    tmp_path: Path,
    sizes: dict[str, int],
    prompt: int,
    answer: int,
    stop_tokens: list[int],
    largest: bool,
) -> None:
    """In the case `largest`, sampling takes more memory than the step.

    When answers end before others, mlx-lm copies the caches of those that remain.
    """
    shape = {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, **sizes}
    config = TrainConfig(
        str(write_model(tmp_path / "model", "qwen3", **shape)),
        ("d",),
        **{"objective": "grpo", "reward": ("length",), "group_size": 8, "batch_size": 4},
        **{"max_new_tokens": answer, "rank": 4, "no_cache": True},
    )
    allocator.release()
    before = mx.get_active_memory()
    base, rng = opened(config), np.random.default_rng(0)
    mask = np.repeat(np.uint8([0, 1]), [prompt, 1])
    rows = [Example(i, rng.integers(0, 300, prompt + 1).astype(np.int32), mask) for i in range(4)]
    steps = [StepLengths.of(expected_samples(rows, 8, answer))]
    work = expected_workload(config, steps, base=base)
    plan = choose_plan(config, base, work)
    read_weights(base)
    objective = PolicyObjective(config.part(PolicyConfig))
    pipeline = InstructPipeline(
        base.model, config.pipeline_config(), execution=plan.execution, objective=objective
    )
    plan = confirm(config, base, pipeline, work, plan)
    sampling = predict_sampling(plan.shapes, work, plan.limit)
    assert plan.peak.total >= sampling.total
    assert (plan.peak == sampling) == largest
    pipeline.run_as(plan.execution, plan.peak.total)
    allocator.release()
    mx.reset_peak_memory()
    requests = [
        SampleRequest(tuple(row.tokens[:-1].tolist()), (row.row, number))
        for row in rows
        for number in range(8)
    ]
    answers = pipeline.sample(requests, Sampling(answer, temperature=1.0), frozenset(stop_tokens))
    assert any(len(each.tokens) < answer for each in answers) == bool(stop_tokens)
    measured = mx.get_peak_memory() - before
    assert measured == pytest.approx(sampling.total, rel=MARGIN)


def test_training_on_short_answers_takes_no_more_memory_than_planned(tmp_path: Path) -> None:
    """More short answers share a micro-batch, and attention repeats the prompt for each."""
    config = TrainConfig(
        str(write_model(tmp_path / "model", "qwen3", num_attention_heads=8)),
        ("d",),
        **{"objective": "grpo", "reward": ("length",), "group_size": 8, "batch_size": 4},
        **{"max_new_tokens": 40, "rank": 4, "no_cache": True},
    )
    allocator.release()
    before = mx.get_active_memory()
    base, rng = opened(config), np.random.default_rng(0)
    tokens = rng.integers(0, 300, (4, 200)).astype(np.int32)
    mask = np.repeat(np.uint8([0, 1]), [199, 1])
    rows = [Example(i, row, mask) for i, row in enumerate(tokens)]
    work = expected_workload(config, [StepLengths.of(expected_samples(rows, 8, 40))])
    plan = choose_plan(config, base, work)
    read_weights(base)
    pipeline = InstructPipeline(
        base.model,
        config.pipeline_config(),
        execution=plan.execution,
        objective=PolicyObjective(config.part(PolicyConfig)),
    )
    plan = confirm(config, base, pipeline, work, plan)
    samples = [
        SampledExample(
            each.row,
            each.tokens,
            each.assistant_mask,
            advantage=1.0,
            logps=np.zeros(3, dtype=np.float32),
        )
        for each in expected_samples(rows, 8, 3)
    ]
    allocator.release()
    mx.reset_peak_memory()
    pipeline.train_batch(samples)
    assert mx.get_peak_memory() - before <= plan.peak.total


def test_sampling_takes_no_more_memory_than_there_is(loaded: Loaded) -> None:
    config, _, _, work, plan = loaded
    much = choose_plan(config, opened(config), replace(work, sampling=(1 << 40, 1000)))
    assert plan.peak.total < much.peak.total <= much.limit / (1 + MARGIN)
    assert much.peak.head == 1000
    assert much.execution == plan.execution


# The form of quantised products that several workers share


class Worker(Workers):
    """One of two workers; `said` is the list of both workers' messages."""

    said: list[str]

    def __init__(self, rank: int, said: list[str]) -> None:
        super().__init__()
        self.rank, self.world_size, self.said = rank, 2, said

    def all_gather_text(self, own: str) -> list[str]:
        self.said.append(own)
        return self.said


def plan_of(tokens: int) -> Any:
    return SimpleNamespace(execution=Execution(None, tokens))


def work_of(*lengths: list[int]) -> Workload:
    steps = [
        StepLengths.of([Example(0, np.zeros(n, np.int32), np.ones(n, np.uint8)) for n in step])
        for step in lengths
    ]
    return Workload(steps=steps, alone=(BatchLoad.single(70, 70),))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The token counts of timed products, on a fake GPU where the dequantised form is faster."""
    tokens: list[int] = []

    def time_matmuls(model: Any, dtype: Any, count: int) -> TimedMatmuls:
        tokens.append(count)
        return TimedMatmuls("mlp.up_proj", count, 2.0, 1.0)

    for module in (stored_layers, loading):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    monkeypatch.setattr(loading, "time_matmuls", time_matmuls)
    return tokens


def quantized(tmp_path: Path) -> loading.BaseModel:
    return loading.open_base(write_model(tmp_path / "model", "llama", quantize=4), "float32")


CONFIG = TrainConfig(model_path="m", data=("d",))


def test_worker_0_decides_for_all(tmp_path: Path, timed: list[int]) -> None:
    said: list[str] = []
    lines = set()
    for index in range(2):
        base = quantized(tmp_path)
        found, line = choose_matmul(
            CONFIG, base, work_of([8]), plan_of(1), workers=Worker(index, said)
        )
        assert found.quantized_compute == "dequantized"
        lines.add(line)
    assert len(timed) == len(lines) == 1


def test_choice_of_the_options_is_not_timed(tmp_path: Path, timed: list[int]) -> None:
    base = quantized(tmp_path)
    given = replace(CONFIG, quantized_compute="quantized")
    assert choose_matmul(given, base, work_of([8]), plan_of(1)) == (base, "")
    assert timed == []


@pytest.mark.parametrize("form", ["quantized", "dequantized"])
def test_resumed_run_is_not_timed(tmp_path: Path, timed: list[int], form: str) -> None:
    resume: Any = SimpleNamespace(checkpoint=SimpleNamespace(metadata={"quantized_compute": form}))
    found, line = choose_matmul(CONFIG, quantized(tmp_path), work_of([8]), plan_of(1), resume)
    assert (found.quantized_compute, line, timed) == (form, "", [])


@pytest.mark.parametrize(
    ("micro_batch", "steps", "tokens"),
    [
        (1, [[8, 20], [5]], 20),  # a micro-batch is one example
        (24, [[8, 20], [5]], 24),
        (1000, [[8, 20], [5]], 28),  # no step has more tokens
        (1000, [], 1000),
        (1, [], 70),  # without data, the longest possible example
    ],
)
def test_tokens_match_a_large_micro_batch(
    tmp_path: Path, timed: list[int], micro_batch: int, steps: list[list[int]], tokens: int
) -> None:
    choose_matmul(CONFIG, quantized(tmp_path), work_of(*steps), plan_of(micro_batch))
    assert timed == [tokens]


def test_cpu_keeps_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stored_layers, loading):
        monkeypatch.setattr(module, "on_cpu", lambda: True)
    base = quantized(tmp_path)
    resume: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(metadata={"quantized_compute": "quantized"})
    )
    for each in (None, resume):
        assert choose_matmul(CONFIG, base, work_of([8]), plan_of(1), each) == (base, "")
