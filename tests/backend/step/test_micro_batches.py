"""Work within a step is retried after a GPU fault, and the step's result does not change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from mlx.utils import tree_flatten

from mlxtune.backend.device import allocator
from mlxtune.backend.forward.head import BackboneAndHead
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.step.micro_batches import MicroBatches
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.run.checkpoint import OPTIMIZER
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import GpuError, MemoryLimitError
from tests.backend.conftest import MakePipeline, limit_micro_batches, random_examples

EXAMPLES = random_examples(6)
# Messages of MLX on Metal.
ALLOCATION = "[malloc] Unable to allocate 78643200 bytes."
RESOURCES = "[metal::malloc] Resource limit (499000) exceeded."
TIMEOUT, INTERACTIVITY, VICTIM, IGNORED = (
    f"[METAL] Command buffer execution failed: {text}."
    for text in (
        "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
        "Innocent Victim (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
        "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
    )
)
LARGE = 10**6


@pytest.fixture(autouse=True)
def restore_limit() -> Iterator[None]:
    limit = mx.get_memory_limit()
    yield
    mx.set_memory_limit(limit)


@pytest.fixture
def make(make_pipeline: MakePipeline) -> Callable[..., tuple[InstructPipeline, list[str]]]:
    """Return a function that returns a new pipeline and the list of its warnings."""

    def make(tokens: int) -> tuple[InstructPipeline, list[str]]:
        pipeline, warnings = make_pipeline("qwen3", micro_batch_tokens=tokens), []
        pipeline._engine.runner._warn = warnings.append
        return pipeline, warnings

    return make


def adapters(pipeline: InstructPipeline) -> dict[str, Any]:
    return {
        name: np.array(value) for name, value in tree_flatten(pipeline.model.trainable_parameters())
    }


def fail(monkeypatch: pytest.MonkeyPatch, *texts: str, times: int = 1) -> None:
    """Make the second micro-batch and the following ones fail, with these texts in turn."""
    whole, calls, errors = BackboneAndHead.hidden, iter(range(10**9)), iter(texts * times)

    def failing(self: BackboneAndHead, *args: Any, **options: Any) -> mx.array:
        if next(calls) and (text := next(errors, "")):
            raise RuntimeError(text)
        return whole(self, *args, **options)

    monkeypatch.setattr(BackboneAndHead, "hidden", failing)


def test_out_of_memory_equals_a_run_with_the_halved_limit(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    halved, warnings = make(80)
    with monkeypatch.context() as patch:
        fail(patch, ALLOCATION)
        results = [halved.train_batch(EXAMPLES) for _ in range(2)]

    tokens = halved._engine.micro_batches.max_tokens
    assert tokens <= 40
    assert len(warnings) == 1
    assert f"memory ran out: micro-batches of up to {tokens} " in warnings[0]
    small, _ = make(tokens)
    assert [small.train_batch(EXAMPLES) for _ in range(2)] == results
    expected = adapters(small)
    for name, value in adapters(halved).items():
        assert value.tobytes() == expected[name].tobytes()


def test_out_of_memory_halves_the_largest_micro_batch_that_ran(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, _ = make(LARGE)
    tokens = sum(len(example) for example in EXAMPLES)
    fail(monkeypatch, ALLOCATION, times=2)
    for _ in range(2):
        pipeline.train_batch(EXAMPLES)
    assert pipeline._engine.micro_batches.max_tokens <= tokens / 4


def test_out_of_memory_in_an_evaluation_keeps_the_limit_of_training(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipeline, warnings = make(LARGE)
    expected = pipeline.evaluate(EXAMPLES).avg_loss
    fail(monkeypatch, ALLOCATION, ALLOCATION)
    for _ in range(2):
        assert pipeline.evaluate(EXAMPLES).avg_loss == pytest.approx(expected, rel=1e-5)
    assert len(warnings) == 2
    assert pipeline._engine.micro_batches.max_tokens == LARGE
    pipeline.snapshot()(tmp_path)
    with safetensors.safe_open(tmp_path / OPTIMIZER, "numpy") as file:
        assert file.metadata()["micro_batch_tokens"] == str(LARGE)


@pytest.mark.parametrize("change", ["plan", "memory pressure", "out of memory", "resume"])
def test_every_change_of_the_limit_reaches_steps_evaluations_and_snapshots(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    (pipeline, _), (other, _) = make(80), make(80)

    def micro_batches_of_step_and_evaluation() -> list[int]:
        step, evaluated = pipeline.train_batch(EXAMPLES).micro_batches, list[int]()
        # `evaluate_in_micro_batches_of_training` leaves evaluations no larger batches.
        pipeline.evaluate(EXAMPLES, evaluated.append)
        return [step, len(evaluated)]

    assert micro_batches_of_step_and_evaluation() == [2, 2]
    if change == "plan":
        limit_micro_batches(pipeline, 30)
    elif change == "memory pressure":
        pipeline.relieve_memory(EXAMPLES)
    elif change == "out of memory":
        with monkeypatch.context() as patch:
            fail(patch, ALLOCATION)
            pipeline.train_batch(EXAMPLES)
    else:
        limit_micro_batches(other, 30)
        other.snapshot()(tmp_path)
        pipeline.restore(tmp_path)
    pipeline.snapshot()(tmp_path)
    with safetensors.safe_open(tmp_path / OPTIMIZER, "numpy") as file:
        limit_micro_batches(other, int(file.metadata()["micro_batch_tokens"]))
    after = other.train_batch(EXAMPLES).micro_batches
    assert micro_batches_of_step_and_evaluation() == [after, after]
    assert after > 2


def test_micro_batches_with_another_limit_leave_the_first_unchanged() -> None:
    micro_batches = MicroBatches(Execution(MLX, micro_batch_tokens=80))
    lengths = micro_batches.lengths(EXAMPLES)
    whole = micro_batches.divided(lengths)
    assert len(micro_batches.limited(20).divided(lengths)) > len(whole)
    assert micro_batches.max_tokens == 80
    assert micro_batches.divided(lengths) == whole
    with pytest.raises(FrozenInstanceError):
        micro_batches.fits = lambda load: False  # type: ignore[misc]


def test_micro_batch_size_defaults_to_half_of_the_largest(make: Any) -> None:
    pipeline, _ = make(80)
    before = pipeline._engine.micro_batches
    half = before.halved_limit(before.lengths(EXAMPLES))
    assert before.max_tokens == 80, "the caller sets it"
    assert pipeline.relieve_memory(EXAMPLES) == half < 80
    assert pipeline._engine.micro_batches.max_tokens == half


def test_out_of_memory_on_single_examples_leaves_state_unchanged(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, _ = make(80)
    before = adapters(pipeline)
    fail(monkeypatch, ALLOCATION, times=100)
    with pytest.raises(MemoryLimitError, match="lower --max-seq-len"):
        pipeline.train_batch(EXAMPLES)
    for name, value in adapters(pipeline).items():
        assert np.array_equal(value, before[name])


def test_requested_halving_equals_a_run_with_the_halved_limit(make: Any) -> None:
    halved, warnings = make(80)
    started = halved.start_batch(EXAMPLES, learning_rate=halved.learning_rate)
    tokens = halved.relieve_memory(EXAMPLES)
    assert tokens == halved._engine.micro_batches.max_tokens <= 40
    # The step that was already started keeps its micro-batches.
    whole, _ = make(80)
    assert halved.wait(started).result() == whole.train_batch(EXAMPLES)
    limit_micro_batches(whole, tokens)
    assert halved.train_batch(EXAMPLES) == whole.train_batch(EXAMPLES)
    expected = adapters(whole)
    for name, value in adapters(halved).items():
        assert value.tobytes() == expected[name].tobytes()
    assert warnings == []


def test_single_examples_are_not_halved(make: Any) -> None:
    pipeline, _ = make(80)
    assert pipeline.relieve_memory(EXAMPLES[:1]) is None
    assert pipeline._engine.micro_batches.max_tokens == 80
    while (tokens := pipeline.relieve_memory(EXAMPLES)) is not None:
        assert pipeline._engine.micro_batches.max_tokens == tokens
    assert pipeline.relieve_memory() is None
    assert pipeline.train_batch(EXAMPLES).micro_batches == len(EXAMPLES)


def test_other_errors_pass_through(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> mx.array:
        raise RuntimeError("[matmul] shapes")

    pipeline, warnings = make(80)
    monkeypatch.setattr(BackboneAndHead, "hidden", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        pipeline.train_batch(EXAMPLES)
    assert warnings == []


def taken_alone(make: Any, tokens: int) -> Any:
    """Return the result of a step without faults, and the adapter afterwards."""
    pipeline, _ = make(tokens)
    return pipeline.train_batch(EXAMPLES), adapters(pipeline)


@pytest.mark.parametrize("text", [RESOURCES, VICTIM, IGNORED])
def test_transient_fault_is_retried_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    pipeline, warnings = make(80)
    fail(monkeypatch, text)
    result = pipeline.train_batch(EXAMPLES)

    assert pipeline._engine.micro_batches.max_tokens == 80
    assert len(warnings) == 1
    assert "trying again" in warnings[0]
    expected, parameters = taken_alone(make, 80)
    assert result == expected
    for name, value in adapters(pipeline).items():
        assert value.tobytes() == parameters[name].tobytes()


@pytest.mark.parametrize("text", [RESOURCES, VICTIM, IGNORED])
def test_repeated_fault_is_an_error_that_changes_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    pipeline, _ = make(80)
    before = adapters(pipeline)
    with monkeypatch.context() as patch:
        fail(patch, text, text)
        with pytest.raises(GpuError, match=f"twice in a row .*{re.escape(text)}") as raised:
            pipeline.train_batch(EXAMPLES)
    assert len(str(raised.value).splitlines()) == 1
    for name, value in adapters(pipeline).items():
        assert np.array_equal(value, before[name])
    # The failed step left no trace.
    assert pipeline.train_batch(EXAMPLES) == taken_alone(make, 80)[0]


def test_each_step_may_be_retried(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, warnings = make(80)
    for _ in range(3):
        with monkeypatch.context() as patch:
            fail(patch, VICTIM)
            pipeline.train_batch(EXAMPLES)
    assert len(warnings) == 3


@pytest.mark.parametrize("text", [TIMEOUT, INTERACTIVITY])
def test_timeout_shortens_stages_before_halving_micro_batches(
    make: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    pipeline, warnings = make(80)
    answers = iter([True, False])
    pipeline._engine.runner.shorten_stages = lambda: next(answers)
    fail(monkeypatch, text, text)
    pipeline.train_batch(EXAMPLES)
    assert [warning.split(": ")[1][:7] for warning in warnings] == ["shorter", "micro-b"]
    assert "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1" in warnings[0]
    assert pipeline._engine.micro_batches.max_tokens <= 40


def test_timeout_with_one_example_is_an_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, _ = make(80)
    fail(monkeypatch, TIMEOUT, times=100)
    with pytest.raises(GpuError, match=r"too long with one example .*display sleep.*AGX_"):
        pipeline.train_batch(EXAMPLES)


def test_resource_limit_retries_without_new_shapes(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, _ = make(80)
    fail(monkeypatch, RESOURCES)
    pipeline.train_batch(EXAMPLES)
    assert pipeline._engine.micro_batches.max_tokens == 80


def test_fault_in_an_earlier_micro_batch_retries_the_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, _ = make(40)
    evaluate, waits = mx.eval, iter([VICTIM])

    def failing(*arrays: Any) -> None:
        if text := next(waits, ""):
            raise RuntimeError(text)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", failing)
    result = pipeline.train_batch(EXAMPLES)
    assert result.micro_batches > 1
    assert result == taken_alone(make, 40)[0]


def test_evaluation_is_retried_after_faults(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, warnings = make(80)
    expected = pipeline.evaluate(EXAMPLES).avg_loss
    fail(monkeypatch, VICTIM, ALLOCATION)
    assert pipeline.evaluate(EXAMPLES).avg_loss == pytest.approx(expected, rel=1e-5)
    assert len(warnings) == 2


def test_exceeding_the_memory_limit_warns_once_and_changes_nothing(make: Any) -> None:
    (pipeline, warnings), (other, _) = make(LARGE), make(LARGE)
    expected = [other.train_batch(EXAMPLES) for _ in range(3)]
    mx.set_memory_limit(mx.get_active_memory() + 1000)
    assert [pipeline.train_batch(EXAMPLES) for _ in range(3)] == expected
    pipeline.evaluate(EXAMPLES)
    assert pipeline._engine.micro_batches.max_tokens == LARGE
    assert len(warnings) == 1
    assert "more than the limit" in warnings[0]
    assert "lower --memory-limit" in warnings[0]


def test_no_warning_within_the_memory_limit(make: Any) -> None:
    pipeline, warnings = make(LARGE)
    pipeline.train_batch(EXAMPLES)
    pipeline.evaluate(EXAMPLES)
    assert warnings == []


# The record of a step's execution


def test_step_counts_its_micro_batches_and_their_padding(
    make: Callable[..., tuple[InstructPipeline, list[str]]],
) -> None:
    pipeline, _ = make(LARGE)
    for tokens in (LARGE, 40):
        limit_micro_batches(pipeline, tokens)
        batches = [batch for _, batch in pipeline._engine.micro_batches.iterate(EXAMPLES)]
        micro_batches = [
            micro_batch for micro_batch, _ in pipeline._engine.micro_batches.iterate(EXAMPLES)
        ]
        found = pipeline.train_batch(EXAMPLES)
        assert found.micro_batches == len(batches)
        assert found.run_tokens == sum(micro_batch.tokens for micro_batch in micro_batches)
        # The last token of an example predicts nothing, so it does not run.
        assert found.run_tokens - found.padding == sum(len(example) - 1 for example in EXAMPLES)


def test_step_reports_its_own_memory_peak(
    make: Callable[..., tuple[InstructPipeline, list[str]]],
) -> None:
    pipeline, _ = make(LARGE)
    # Peaks include other tests' memory, so it is subtracted.
    before = mx.get_active_memory()
    wide = pipeline.train_batch(EXAMPLES).memory - before
    large = mx.zeros((100_000_000,), mx.uint8)
    mx.eval(large)
    del large
    limit_micro_batches(pipeline, 1)
    alone = pipeline.train_batch(EXAMPLES).memory - before
    assert 0 < alone < wide < 50_000_000
    assert allocator.peak_bytes() - before >= 50_000_000, "that of the run is kept"


def test_plan_is_cached_until_the_limit_changes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (pipeline, _), limits, plan = make(LARGE), list[int](), Execution.micro_batches

    def counted(self: Execution, lengths: Any) -> Any:
        limits.append(self.micro_batch_tokens)
        return plan(self, lengths)

    monkeypatch.setattr(Execution, "micro_batches", counted)
    batches = pipeline._engine.micro_batches
    first = batches.divided(batches.lengths(EXAMPLES))
    assert batches.divided(batches.lengths(EXAMPLES)) == first
    assert len(limits) == 1
    limit_micro_batches(pipeline, batches.max_tokens // 2)
    batches = pipeline._engine.micro_batches
    batches.divided(batches.lengths(EXAMPLES))
    batches.divided(batches.lengths(EXAMPLES[:1]))
    assert len(limits) == 3


def test_micro_batches_that_do_not_fit_are_halved_and_change_nothing(
    make: Callable[..., tuple[InstructPipeline, list[str]]],
) -> None:
    pipeline, _ = make(LARGE)
    micro_batches = pipeline._engine.micro_batches
    lengths = micro_batches.lengths(EXAMPLES)
    assert len(micro_batches.divided(lengths)) == 1
    whole = pipeline.loss_and_gradients(EXAMPLES)
    pipeline.run_as(pipeline.forward.execution, fits=lambda load: load.examples <= 2)
    divided = pipeline._engine.micro_batches.divided(lengths)
    assert all(len(each.examples) <= 2 for each in divided)
    assert sorted(i for each in divided for i in each.examples) == list(range(len(EXAMPLES)))
    # Evaluations keep nothing for a backward pass.
    evaluated: list[int] = []
    pipeline.evaluate(EXAMPLES, evaluated.append)
    assert evaluated == [len(EXAMPLES)]
    parts = pipeline.loss_and_gradients(EXAMPLES)
    assert parts.counts.micro_batches == len(divided)
    assert float(parts.loss) == pytest.approx(float(whole.loss), rel=1e-5)
    # A single example runs even if it takes more memory than planned.
    pipeline.run_as(pipeline.forward.execution, fits=lambda load: False)
    assert len(pipeline._engine.micro_batches.divided(lengths)) == len(EXAMPLES)
