"""The states of a step; steps that start ahead equal steps that start after the one before."""

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.engine import Engine
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.step.runner import GraphRunner
from mlxtune.backend.text.generate import Sampling
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import MemoryLimitError, NonFiniteLossError
from tests.backend.step.executions import PACKED, SPLIT, fixed_step, fresh, model_folder

STEPS = [fixed_step(), fixed_step()[:2], fixed_step()[1:]]


def adapter(pipeline: InstructPipeline) -> list[bytes]:
    return [bytes(value) for _, value in tree_flatten(pipeline.model.trainable_parameters())]


def ahead(pipeline: InstructPipeline) -> list[float]:
    """Return the steps' losses; each step starts before the previous result is read."""
    losses, pending = [], None
    for step, examples in enumerate(STEPS, 1):
        started = pipeline.start_batch(examples, step=step, learning_rate=1e-2)
        if pending:
            losses.append(pipeline.wait(pending).result().avg_loss)
        pending = started
    assert pending
    return [*losses, pipeline.wait(pending).result().avg_loss]


def in_turn(pipeline: InstructPipeline) -> list[float]:
    return [
        pipeline.train_batch(examples, step=step, learning_rate=1e-2).avg_loss
        for step, examples in enumerate(STEPS, 1)
    ]


def test_step_is_built_then_launched_then_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = fresh(model_folder("qwen3"), PACKED, 10_000)
    engine, before, calls = pipeline._engine, adapter(pipeline), []
    for name in ("eval", "async_eval"):
        real = getattr(mx, name)
        monkeypatch.setattr(mx, name, lambda *given, real=real: (calls.append(0), real(*given))[1])
    step = engine.new_step(STEPS[0], learning_rate=1e-2)
    assert step.number == 1
    assert step.built is None

    engine.build(step)
    assert step.built is not None
    assert calls == [], "nothing is computed"
    assert adapter(pipeline) == before

    engine.launch(step)
    assert engine.launched is step
    assert engine.new_step(STEPS[1], learning_rate=1e-2).number == 2
    assert calls
    assert (engine.committed_steps, step.outcome) == (0, None)

    outcome = engine.wait(step)
    assert engine.wait(step) is outcome, "a committed step is not taken again"
    assert engine.launched is step.built is None
    assert engine.committed_steps == 1
    assert outcome.ended > 0
    assert adapter(pipeline) != before


def test_micro_batch_is_launched_when_the_next_one_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = fresh(model_folder("qwen3"), PACKED, 30)
    events: list[str] = []
    for owner, name in ((Engine, "inputs"), (GraphRunner, "graph"), (GraphRunner, "start")):
        real = getattr(owner, name)

        def noted(*given: Any, name: str = name, real: Any = real) -> Any:
            events.append(f"{name} begins")
            result = real(*given)
            events.append(f"{name} ends")
            return result

        monkeypatch.setattr(owner, name, noted)
    count = pipeline.train_batch(fixed_step()).micro_batches
    assert count > 1
    # No micro-batch is launched within the building of another.
    calls = [
        f"{name} {when}" for name in ("inputs", "graph", "start") for when in ("begins", "ends")
    ]
    assert events == calls * count


@pytest.mark.parametrize("tokens", [10_000, 60])
@pytest.mark.parametrize("execution", [PACKED, SPLIT], ids=["packed", "padded"])
def test_steps_built_ahead_equal_sequential_steps(execution: Any, tokens: int) -> None:
    one, other = (fresh(model_folder("qwen3"), execution, tokens) for _ in range(2))
    assert ahead(one) == in_turn(other)
    assert adapter(one) == adapter(other)


def test_next_step_is_built_while_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = fresh(model_folder("qwen3"), PACKED, 10_000)
    events: list[str] = []
    inputs, finish = Engine.inputs, type(pipeline._engine.runner).finish
    monkeypatch.setattr(
        Engine, "inputs", lambda *given: (events.append("build"), inputs(*given))[1]
    )
    monkeypatch.setattr(
        type(pipeline._engine.runner),
        "finish",
        lambda *given: (events.append("finish"), finish(*given))[1],
    )
    ahead(pipeline)
    assert events == ["build", "build", "finish", "build", "finish", "finish"]


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["MLX", "CPU"])
def test_time_of_a_step_ends_before_the_next_one_is_computed(
    operations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = fresh(model_folder("qwen3"), Execution(operations), 10_000)
    started: list[float] = []
    # The CPU's kernels compute a step while it is built, MLX once it is started.
    runner = type(pipeline._engine.runner)
    place, name = (Engine, "inputs") if operations is CPU else (runner, "start")
    whole = getattr(place, name)
    monkeypatch.setattr(
        place, name, lambda *given: (started.append(time.perf_counter()), whole(*given))[1]
    )
    first = pipeline.start_batch(STEPS[0], step=1, learning_rate=1e-2)
    second = pipeline.start_batch(STEPS[1], step=2, learning_rate=1e-2)
    ended = [pipeline.wait(step).ended for step in (first, second)]
    assert started[0] < ended[0] <= started[1] < ended[1]


def test_non_finite_step_is_undone_and_the_next_is_kept() -> None:
    one, other = (fresh(model_folder("qwen3"), PACKED, 10_000) for _ in range(2))
    first = one.start_batch(STEPS[0], step=1, learning_rate=float("inf"))
    second = one.start_batch(STEPS[1], step=2, learning_rate=1e-2)
    with pytest.raises(NonFiniteLossError, match="step 1"):
        one.wait(first).result()
    wanted = other.train_batch(STEPS[1], step=2, learning_rate=1e-2)
    assert one.wait(second).result().avg_loss == wanted.avg_loss
    assert adapter(one) == adapter(other)


def test_out_of_memory_retries_a_step_and_rebuilds_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (fresh(model_folder("qwen3"), PACKED, 10_000) for _ in range(2))
    evaluate, calls = mx.eval, [0]

    def failing(*arrays: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("[malloc] Unable to allocate 5 bytes.")
        evaluate(*arrays)

    first = one.start_batch(STEPS[0], step=1, learning_rate=1e-2)
    monkeypatch.setattr(mx, "eval", failing)
    with pytest.warns(UserWarning, match="micro-batches"):
        second = one.start_batch(STEPS[1], step=2, learning_rate=1e-2)
    losses = [one.wait(each).result().avg_loss for each in (first, second)]
    assert losses == pytest.approx(in_turn(other)[:2], rel=1e-5)


def test_failed_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = fresh(model_folder("qwen3"), PACKED, 10_000)
    before = adapter(pipeline)

    def failing(*arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 5 bytes.")

    pending = pipeline.start_batch(STEPS[0][:1], step=1, learning_rate=1e-2)
    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", failing)
        with pytest.raises(MemoryLimitError):
            pipeline.wait(pending)
    assert adapter(pipeline) == before


# The methods that read or change the model or the optimizer, and the others.
IDLE: dict[str, Callable[[InstructPipeline, Path], object]] = {
    "adapter_hash": lambda pipeline, _: pipeline.adapter_hash(),
    "evaluate": lambda pipeline, _: pipeline.evaluate(STEPS[0]),
    "load": InstructPipeline.load,
    "logps": lambda pipeline, _: pipeline.logps(STEPS[0]),
    "loss_and_gradients": lambda pipeline, _: pipeline.loss_and_gradients(STEPS[0]),
    "restore": InstructPipeline.restore,
    "sample": lambda pipeline, _: pipeline.sample([], Sampling(1), frozenset()),
    "snapshot": lambda pipeline, _: pipeline.snapshot(),
    "token_logps": lambda pipeline, _: pipeline.token_logps(STEPS[0]),
    "write": lambda pipeline, folder: pipeline.write(folder / "out" / ADAPTER),
}
RUNNING = {
    *(
        "describe",
        "load_reference_lora",
        "measure",
        "reference",
        "reference_lora_file",
        "relieve_memory",
        "run_as",
        "start_batch",
    ),
    *("step_inputs", "train_batch", "train_step", "wait"),
}


def test_every_method_either_ends_the_running_step_or_lets_it_run(tmp_path: Path) -> None:
    methods = {name for name, each in vars(InstructPipeline).items() if inspect.isfunction(each)}
    assert {name for name in methods if not name.startswith("_")} == RUNNING | set(IDLE)
    pipeline = fresh(model_folder("qwen3"), PACKED, 10_000)
    pipeline.snapshot()(tmp_path)
    for name, call in IDLE.items():
        step = pipeline.start_batch(STEPS[0], step=1, learning_rate=1e-2)
        call(pipeline, tmp_path)
        assert step.outcome is not None, name
        assert pipeline._engine.launched is None


def test_pipeline_without_values_must_be_restored_first(tmp_path: Path) -> None:
    made = fresh(model_folder("qwen3"))
    made.snapshot()(tmp_path)
    uses = {name: call for name, call in IDLE.items() if name not in ("load", "restore")}
    for fill in (InstructPipeline.load, InstructPipeline.restore):
        model = load_base(model_folder("qwen3"), "float32").model
        pipeline = InstructPipeline(model, made.config, fresh=False)
        for use in (*uses.values(), lambda made, _: made.train_batch(STEPS[0])):
            with pytest.raises(AssertionError, match="restored before its use"):
                use(pipeline, tmp_path)
        fill(pipeline, tmp_path)
        pipeline.train_batch(STEPS[0])
