"""A profiled step gives what any other gives; what is measured is what ran."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.measure.profile import PipelineMeter
from mlxtune.backend.model import memory
from mlxtune.backend.step.head import SplitModel
from mlxtune.backend.step.operations import MLX
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.steps.execution import Execution
from mlxtune.core.training.profile import LayerProfile, PhaseTimer, StepProfile
from tests.backend.step.executions import PLAIN, SPLIT, WAYS, fixed_step, fresh, model_folder
from tests.slow import slow, slow_except


def profiled_step(pipeline: InstructPipeline, step: int) -> tuple[StepProfile, list[LayerProfile]]:
    meter = PipelineMeter(pipeline)
    timer = PhaseTimer(meter.memory)
    meter.attach(timer)
    pipeline.train_batch(fixed_step(), step=step, learning_rate=1e-2)
    found = timer.finish(step)
    meter.attach(None)
    return found, meter.layers(fixed_step(), step)


def bits(pipeline: InstructPipeline) -> dict[str, bytes]:
    return {k: np.array(v).tobytes() for k, v in tree_flatten(pipeline.model.parameters())}


@pytest.mark.parametrize("way", slow_except(WAYS, "split head", "all"))
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


@pytest.mark.parametrize("model_type", [slow("llama"), slow("gemma2"), "gemma3_text"])
@pytest.mark.parametrize("way", ["in one line with recompute", "all"])
def test_layers_are_measured_in_every_architecture(model_type: str, way: str) -> None:
    pipeline = fresh(model_folder(model_type), WAYS[way], 60, targets=("v_proj",), num_layers=1)
    before, arrays = bits(pipeline), dict(tree_flatten(pipeline.model.parameters()))
    gc.collect()  # what is freed while a layer is measured would be taken from what it keeps
    layers = PipelineMeter(pipeline).layers(fixed_step(), 1)
    assert bits(pipeline) == before
    # The same arrays, which hold no graph of the pass.
    after = dict(tree_flatten(pipeline.model.parameters()))
    assert all(after[name] is array for name, array in arrays.items())
    count = len(pipeline.model.layers)
    assert [layer.name for layer in layers] == [*(f"layers.{i}" for i in range(count)), "head"]
    for layer in layers:
        assert layer.forward_seconds > 0
        assert layer.peak_bytes >= layer.kept_bytes > 0
    # LoRA is in the last layer alone: nothing flows back through those below.
    has_backward = [layer.backward_seconds > 0 for layer in layers]
    assert has_backward == [False] * (count - 1) + [True, True]


@pytest.mark.parametrize("way", ["split head", "cpu kernels with split head", "all"])
def test_step_has_all_its_phases_and_they_add_up(way: str) -> None:
    pipeline = fresh(model_folder("qwen3"), WAYS[way], 60)
    found, _ = profiled_step(pipeline, 1)
    names = ["forward", "loss", "backward", "optimizer", "other"]
    assert [name for name in found.phases if name != "data"] == names
    total = sum(phase.seconds for phase in found.phases.values())
    assert total == pytest.approx(found.seconds, abs=1e-9)
    assert found.phases["forward"].bytes > 0
    assert found.phases["optimizer"].bytes > 0


def test_next_to_nothing_of_a_step_is_left_to_no_phase() -> None:
    pipeline = fresh(model_folder("qwen3"), SPLIT, 60)
    steps = [profiled_step(pipeline, step)[0] for step in range(1, 4)]
    # In the best of a few: another process may come between anywhere.
    assert min(step.phases["other"].seconds / step.seconds for step in steps) < 0.05


def test_loss_counts_to_the_forward_phase_where_a_graph_shows_no_border() -> None:
    found, _ = profiled_step(fresh(model_folder("qwen3"), PLAIN, 60), 1)
    assert "loss" not in found.phases
    assert found.phases["forward"].seconds > 0


def test_layer_keeps_what_its_backward_pass_needs() -> None:
    """Of a layer that is computed again in the backward pass, its outputs alone are kept."""
    found = {}
    for way in ("split head", "recompute"):
        how = Execution(MLX, recompute=way == "recompute")
        pipeline = fresh(model_folder("qwen3"), how, 10_000)
        (layer, *_) = PipelineMeter(pipeline).layers(fixed_step(), 1)
        arrays = [batch.inputs for _, batch in pipeline.micro_batches(fixed_step())]
        found[way] = layer.kept_bytes, max(inputs.size for inputs in arrays)
    kept, tokens = found["recompute"]
    outputs = tokens * 64 * 4
    # And the places of the examples, which are side by side in attention.
    assert outputs <= kept < 1.2 * outputs + 8192
    # Queries, keys, values and the three arrays of the MLP, at the least.
    assert found["split head"][0] > (64 * 2 + 32 * 2 + 96 * 3) * 4 * tokens


def counted(pipeline: InstructPipeline, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return how often a step evaluates."""
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
    batches = len(list(pipeline.micro_batches(fixed_step())))
    assert batches > 1
    # Each is started and waited for, the last of them together with the update.
    expected = {"eval": batches, "async_eval": batches}
    assert counted(pipeline, monkeypatch) == expected
    profiled_step(pipeline, 1)
    assert counted(pipeline, monkeypatch) == expected

    PipelineMeter(pipeline).attach(PhaseTimer(PipelineMeter(pipeline).memory))
    assert counted(pipeline, monkeypatch)["eval"] == expected["eval"] + 4 * batches


def test_profiling_leaves_the_peaks_of_the_run_as_they_are() -> None:
    pipeline = fresh(model_folder("qwen3"), SPLIT, 100_000)
    meter = PipelineMeter(pipeline)
    memory.forget_peak()
    pipeline.train_batch(fixed_step())
    highest, last = memory.peak_bytes(), memory.last_peak_bytes()
    meter.layers(fixed_step() * 20, 1)
    assert memory.peak_bytes() == highest
    assert memory.last_peak_bytes() == last


def test_micro_batches_are_halved_in_a_profiled_step_as_in_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = fresh(model_folder("qwen3"), SPLIT, 10_000)
    heard: list[str] = []
    pipeline._micro_batches._warn = heard.append
    whole, errors = SplitModel.hidden, iter([RuntimeError("[malloc] Unable to allocate 9 bytes.")])

    def failing(self: SplitModel, *args: Any) -> Any:
        for error in errors:
            raise error
        return whole(self, *args)

    monkeypatch.setattr(SplitModel, "hidden", failing)
    profiled_step(pipeline, 1)
    assert pipeline.micro_batch_tokens < 10_000
    assert len(heard) == 1


def test_layers_are_left_out_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = fresh(model_folder("qwen3"), SPLIT, 60)
    before = bits(pipeline)

    def run_out(*_: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 10 bytes.")

    meter = PipelineMeter(pipeline)
    with monkeypatch.context() as patched:
        patched.setattr(meter, "_measure", run_out)
        assert meter.layers(fixed_step(), 1) == []
    assert bits(pipeline) == before
    assert len(meter.layers(fixed_step(), 1)) == 3
