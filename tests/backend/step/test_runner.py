"""Several stages give the same bytes as one; the measured time decides the number of stages."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.step.runner import Graph, GraphRunner
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import MemoryLimitError
from tests.backend.conftest import random_examples
from tests.backend.step.executions import (
    PACKED,
    WAYS,
    fixed_step,
    fresh,
    model_folder,
)
from tests.slow import slow


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate Metal, because CUDA always uses one stage."""
    monkeypatch.setattr("mlxtune.backend.step.runner.has_metal", lambda: True)


def trained(pipeline: InstructPipeline) -> list[bytes]:
    for _ in range(3):
        pipeline.train_batch(fixed_step())
    return [bytes(value) for _, value in tree_flatten(pipeline.model.trainable_parameters())]


@pytest.mark.parametrize("name", ["packed", "packed with recompute", "split head"])
@pytest.mark.parametrize("seconds", [slow(0.01), 1.0])
def test_stages_give_identical_bytes(name: str, seconds: float) -> None:
    whole, staged = (fresh(model_folder("qwen3"), WAYS[name], 10_000) for _ in range(2))
    staged._engine.runner.seconds_per_token = seconds
    assert staged._engine.runner.stages_for(1000) > 1
    assert trained(staged) == trained(whole)


def test_stage_takes_about_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = fresh(model_folder("qwen3"), PACKED, 10_000)
    stages, evaluations = pipeline._engine.runner, [0]
    stages.seconds_per_token = 0.0625
    assert [stages.stages_for(tokens) for tokens in (1, 16, 17, 40)] == [1, 1, 2, 3]
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        evaluations[0] += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    pipeline.train_batch(fixed_step())
    tokens = sum(
        micro_batch.tokens
        for micro_batch, _ in pipeline._engine.micro_batches.iterate(fixed_step())
    )
    assert 2 <= stages.stages_for(tokens) <= evaluations[0] <= stages.stages_for(tokens) + 2


def staged_and_whole(layers: int) -> tuple[InstructPipeline, InstructPipeline]:
    shape = (("num_hidden_layers", layers), ("hidden_size", 64), ("intermediate_size", 128))
    folder = model_folder("qwen3", overrides=shape)
    how = WAYS["packed with recompute"]
    staged, whole = (fresh(folder, how, 10_000) for _ in range(2))
    # So slow that each layer's mixer ends a stage.
    staged._engine.runner.seconds_per_token = 1.0
    return staged, whole


def test_recomputed_layer_ends_one_stage() -> None:
    staged, _ = staged_and_whole(12)
    assert staged._engine.runner.stages_for(1000) == 24
    noted: list[int] = []
    graph_of = staged._engine.runner.graph

    def noting(*arguments: Any) -> Graph:
        graph = graph_of(*arguments)
        noted.append(len(graph.outputs))
        return graph

    staged._engine.runner.graph = noting  # type: ignore[method-assign]
    staged.train_batch(fixed_step())
    assert set(noted) == {12}


@pytest.mark.slow
def test_stages_take_no_more_memory() -> None:
    def peak(pipeline: InstructPipeline) -> int:
        examples = random_examples(4, longest=120)
        pipeline.train_batch(examples)
        peaks = []
        # The lowest of three, because peaks include buffers in flight, which depend on timing.
        for _ in range(3):
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            pipeline.train_batch(examples)
            peaks.append(mx.get_peak_memory() - before)
        return min(peaks)

    staged, whole = staged_and_whole(12)
    # The peak would be 1.24 times as high if stages kept the recomputed values.
    assert peak(staged) < 1.12 * peak(whole)


def test_next_stage_runs_while_the_host_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, _ = staged_and_whole(2)
    calls: list[str] = []
    for name in ("async_eval", "eval"):
        real = getattr(mx, name)

        def noted(*arrays: Any, name: str = name, real: Any = real) -> None:
            calls.append(name)
            real(*arrays)

        monkeypatch.setattr(mx, name, noted)
    staged.train_batch(fixed_step())
    # Each stage starts before the previous one is awaited.
    first, *middle, last = calls
    assert (first, last) == ("async_eval", "eval")
    assert middle == ["async_eval", "eval"] * (len(middle) // 2)
    assert len(middle) >= 6


def test_step_that_compiles_kernels_sets_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtune.backend.step.runner.on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr("mlxtune.backend.step.runner.time.perf_counter", lambda: next(clock))
    stages = fresh(model_folder("qwen3"), PACKED, 10_000)._engine.runner
    guess = stages.seconds_per_token
    for seconds in (guess, 30.0):
        stages.finish(Graph(1, 1, [], {"a": mx.zeros(1)}, mx.zeros(1)))
        assert stages.seconds_per_token == seconds


def test_cuda_uses_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtune.backend.step.runner.on_cpu", lambda: False)
    monkeypatch.setattr("mlxtune.backend.step.runner.has_metal", lambda: False)
    stages = fresh(model_folder("qwen3"), PACKED, 10_000)._engine.runner
    stages.seconds_per_token = 1.0
    assert stages.stages_for(1000) == 1
    assert not stages.shorten_stages()


def test_shorter_stages_are_refused_once_each_layer_has_its_own() -> None:
    stages = fresh(model_folder("qwen3"), PACKED, 10_000)._engine.runner
    counts = []
    while stages.shorten_stages():
        counts.append(stages.stages_for(1))
    assert counts == sorted(counts)
    assert 1 < len(counts) < 10


@pytest.mark.parametrize(
    ("retries", "limits", "expected"),
    [
        (True, [32, 16], ["micro-batches of up to 32", "micro-batches of up to 16"]),
        (True, [32, None], ["micro-batches of up to 32", "with one example"]),
        (False, [], ["on this worker"]),
    ],
)
def test_pass_without_memory_is_halved_by_its_caller_until_it_fits(
    retries: bool, limits: list[int | None], expected: list[str]
) -> None:
    lines: list[str] = []
    forward = fresh(model_folder("qwen3"), PACKED, 10_000).forward
    runner = GraphRunner(forward, 1, remedy="buy", warn=lines.append, retries=retries)
    lengths, left = StepLengths.of(random_examples()), list(limits)

    def halve(given: StepLengths) -> int | None:
        assert given is lengths
        return left.pop(0)

    faults = iter(expected)
    try:
        for attempt in runner.attempts(lengths, halve):
            with attempt:
                if next(faults, None) is not None:
                    raise MemoryError
    except MemoryLimitError as error:
        lines.append(str(error))
    assert left == []
    assert all(part in line for part, line in zip(expected, lines, strict=True))
