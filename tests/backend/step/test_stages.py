"""Evaluation in stages: the same bytes, in as many evaluations as the clock asks for."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.step.operations import MLX
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import IN_LINE, WAYS, fixed_step, fresh, model_folder


def trained(pipeline: InstructPipeline) -> list[bytes]:
    for _ in range(3):
        pipeline.train_batch(fixed_step())
    return [bytes(value) for _, value in tree_flatten(pipeline.model.trainable_parameters())]


@pytest.mark.parametrize("name", ["in one line", "in one line with recompute", "split head"])
@pytest.mark.parametrize("seconds", [0.01, 1.0])
def test_stages_change_no_byte(name: str, seconds: float) -> None:
    whole, staged = (fresh(model_folder("qwen3"), WAYS[name], 10_000) for _ in range(2))
    staged._stages.seconds_per_token = seconds
    assert staged._stages.count(1000) > 1
    assert trained(staged) == trained(whole)


def test_stage_takes_about_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = fresh(model_folder("qwen3"), IN_LINE, 10_000)
    stages, evaluations = pipeline._stages, [0]
    stages.seconds_per_token = 0.0625
    assert [stages.count(tokens) for tokens in (1, 16, 17, 40)] == [1, 1, 2, 3]
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        evaluations[0] += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    pipeline.train_batch(fixed_step())
    tokens = sum(group.tokens for group, _ in pipeline.micro_batches(fixed_step()))
    assert 2 <= stages.count(tokens) <= evaluations[0] <= stages.count(tokens) + 2


def test_shorter_stages_are_refused_once_each_layer_has_its_own() -> None:
    stages = fresh(model_folder("qwen3"), IN_LINE, 10_000)._stages
    counts = []
    while stages.shorten():
        counts.append(stages.count(1))
    assert counts == sorted(counts)
    assert 1 < len(counts) < 10
    compiled = Execution(MLX, compile=True)
    assert not fresh(model_folder("qwen3"), compiled, 10_000)._stages.shorten()
