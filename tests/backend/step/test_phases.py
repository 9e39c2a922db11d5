"""Profiling does not change a step's result, and the phases cover all of the step's work."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.device import allocator
from mlxtune.backend.forward.head import BackboneAndHead
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.run.profile import PhaseTimer, StepProfile
from tests.backend.step.executions import PLAIN, SPLIT, WAYS, fixed_step, fresh, model_folder
from tests.long.counts import counted_evaluations
from tests.slow import long_except


def profiled_step(pipeline: InstructPipeline, step: int) -> StepProfile:
    phases = pipeline.phases
    timer = phases.timer = PhaseTimer(phases.memory)
    pipeline.train_batch(fixed_step(), step=step, learning_rate=1e-2)
    phases.timer = None
    return timer.finish(step)


def bits(pipeline: InstructPipeline) -> dict[str, bytes]:
    return {k: np.array(v).tobytes() for k, v in tree_flatten(pipeline.model.parameters())}


@pytest.mark.parametrize("way", long_except(WAYS, "all"))
def test_profiled_run_gives_the_same_bits(way: str) -> None:
    options: dict[str, Any] = {"tokens": 60, "dropout": 0.1}
    plain, profiled = (fresh(model_folder("qwen3"), WAYS[way], **options) for _ in range(2))
    profiled_step(profiled, 1)
    plain.train_batch(fixed_step(), step=1, learning_rate=1e-2)
    one, other = (
        pipeline.train_batch(fixed_step(), step=2, learning_rate=1e-2)
        for pipeline in (plain, profiled)
    )
    assert bits(plain) == bits(profiled)
    assert one.run_tokens == other.run_tokens


@pytest.mark.parametrize("way", ["split head", "cpu kernels with split head", "all"])
def test_step_has_all_its_phases_and_they_add_up(way: str) -> None:
    pipeline = fresh(model_folder("qwen3"), WAYS[way], 60)
    found = profiled_step(pipeline, 1)
    names = ["forward", "loss", "backward", "optimizer", "other"]
    assert [name for name in found.phases if name != "data"] == names
    total = sum(phase.seconds for phase in found.phases.values())
    assert total == pytest.approx(found.seconds, abs=1e-9)
    assert found.phases["forward"].bytes > 0
    assert found.phases["optimizer"].bytes > 0


def test_phases_contain_every_evaluation_of_a_step() -> None:
    pipeline = fresh(model_folder("qwen3"), SPLIT, 60)
    phases = pipeline.phases
    with counted_evaluations() as count:
        # The clock counts evaluations, so that no other process has a part in it.
        timer = phases.timer = PhaseTimer(phases.memory, lambda: float(count[0]))
        pipeline.train_batch(fixed_step(), step=1, learning_rate=1e-2)
        found = timer.finish(1)
    evaluations = {name: phase.seconds for name, phase in found.phases.items()}
    assert evaluations.pop("other") == 0
    assert evaluations["forward"] > 0
    assert evaluations["optimizer"] > 0


def test_loss_counts_to_the_forward_phase_where_a_graph_shows_no_border() -> None:
    found = profiled_step(fresh(model_folder("qwen3"), PLAIN, 60), 1)
    assert "loss" not in found.phases
    assert found.phases["forward"].seconds > 0


def counted(pipeline: InstructPipeline, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the numbers of synchronous and asynchronous evaluations in a step."""
    calls = {"eval": 0, "async_eval": 0}

    def count(name: str) -> Any:
        real = getattr(mx, name)

        def instead(*args: Any) -> Any:
            calls[name] += 1
            return real(*args)

        return instead

    with monkeypatch.context() as patched:
        for name in calls:
            patched.setattr(mx, name, count(name))
        pipeline.train_batch(fixed_step(), step=9, learning_rate=1e-2)
    return calls


def test_step_that_is_not_profiled_evaluates_no_more_than_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = fresh(model_folder("qwen3"), SPLIT, 60)
    batches = len(list(pipeline._engine.micro_batches.iterate(fixed_step())))
    assert batches > 1
    # Each micro-batch is started and awaited once; the last one includes the update.
    expected = {"eval": batches, "async_eval": batches}
    assert counted(pipeline, monkeypatch) == expected
    profiled_step(pipeline, 1)
    assert counted(pipeline, monkeypatch) == expected

    pipeline.phases.timer = PhaseTimer(pipeline.phases.memory)
    assert counted(pipeline, monkeypatch)["eval"] == expected["eval"] + 4 * batches


def test_profiling_does_not_change_the_peaks_of_the_run() -> None:
    plain, profiled = (fresh(model_folder("qwen3"), SPLIT, 100_000) for _ in range(2))
    peaks = []
    for pipeline in (plain, profiled):
        allocator.reset_peaks()
        if pipeline is profiled:
            pipeline.phases.timer = PhaseTimer(pipeline.phases.memory)
        pipeline.train_batch(fixed_step())
        assert allocator.last_peak_bytes() == allocator.peak_bytes() > 0
        peaks.append(allocator.peak_bytes())
    # Profiling resets the peak between phases, which must not lower the step's peak.
    assert peaks[1] == pytest.approx(peaks[0], rel=0.2)


def test_micro_batches_are_halved_in_a_profiled_step_as_in_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = fresh(model_folder("qwen3"), SPLIT, 10_000)
    heard: list[str] = []
    pipeline._engine.runner._warn = heard.append
    whole, errors = (
        BackboneAndHead.hidden,
        iter([RuntimeError("[malloc] Unable to allocate 9 bytes.")]),
    )

    def failing(self: BackboneAndHead, *args: Any) -> Any:
        for error in errors:
            raise error
        return whole(self, *args)

    monkeypatch.setattr(BackboneAndHead, "hidden", failing)
    profiled_step(pipeline, 1)
    assert pipeline._engine.micro_batches.max_tokens < 10_000
    assert len(heard) == 1
