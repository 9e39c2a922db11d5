"""A run's response to the machine around it, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.machine.conditions import Conditions, Pressure
from mlxtune.core.training.machine_monitor import MachineMonitor
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.pipeline import OnProgress, RowSource, Step, StepData
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import TrainingInterrupted
from tests.core.training.fake_pipeline import (
    CORPUS,
    FakePipeline,
    log_of,
    names_in,
    options,
    train,
    without_times,
)

STEPS = 6  # two epochs over the corpus's 8 training rows
NORMAL, WARN, CRITICAL = Pressure
BATTERY = Conditions(on_battery=True)


class Lines(TrainingObserver):
    """Keeps the reported lines, and the steps after which the heat changed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps = 0
        self.heat: list[tuple[int, str]] = []

    def on_step(self, record: Any) -> None:
        self.steps = record.step

    def on_problem(self, message: str) -> None:
        self.lines.append(f"warning: {message}")

    def on_note(self, topic: str, message: str) -> None:
        self.lines.append(f"{topic}: {message}")

    def on_thermal(self, state: str) -> None:
        self.heat.append((self.steps, state))


class Machine:
    """A machine whose conditions at each step are scripted; the last conditions remain."""

    def __init__(self, *readings: Conditions | Pressure) -> None:
        self.readings = [
            Conditions(reading) if isinstance(reading, Pressure) else reading
            for reading in readings
        ]
        # Surroundings read the conditions once before the first step.
        self.readings.insert(0, Conditions())

    def __call__(self) -> Conditions:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def run(
    folder: Path, machine: Callable[[], Conditions], pipeline: FakePipeline, **options: Any
) -> list[str]:
    """Train with an observer, and return its lines."""
    lines = Lines()
    choices = {name: options.pop(name) for name in ("wait", "asleep") if name in options}
    choices["should_stop"] = options.get("should_stop", lambda: False)
    choices["pause_on_battery"] = options.pop("pause_on_battery", False)
    monitor = MachineMonitor(machine, lines, **choices)
    train(folder, pipeline, observer=lines, monitor=monitor, **options)
    return lines.lines


# Memory pressure


def test_warning_gives_caches_back_once_per_event(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    lines = run(tmp_path, Machine(NORMAL, WARN, WARN, NORMAL, WARN), pipeline)
    assert lines == [
        f"warning: the machine is short of memory after step {step}: cached memory was freed"
        for step in (1, 4)
    ]
    assert pipeline.releases == [1, 4]
    assert pipeline.halvings == []


def test_reading_is_acted_on_once_however_many_steps_it_lasts(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    run(tmp_path, Machine(NORMAL, WARN), pipeline)
    assert len(pipeline.batches) == STEPS
    assert pipeline.releases == [1]


def test_critical_pressure_halves_once_until_it_is_normal(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    machine = Machine(CRITICAL, WARN, CRITICAL, NORMAL, CRITICAL, NORMAL)
    lines = run(tmp_path, machine, pipeline)
    assert pipeline.halvings == [0, 4]
    assert lines == [
        f"warning: the machine is very short of memory after step {step}: "
        f"micro-batches of up to {tokens} tokens from now on"
        for step, tokens in ((0, 32), (4, 16))
    ]


def test_single_examples_are_not_halved(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    pipeline.tokens = 1
    lines = run(tmp_path, Machine(NORMAL, NORMAL, CRITICAL), pipeline)
    assert lines == [
        "warning: the machine is very short of memory after step 2: "
        "micro-batches cannot be halved: close other programs"
    ]
    assert not any(name.startswith("step-") for name in names_in(tmp_path))


def test_halving_is_saved_with_its_first_step(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    run(tmp_path, Machine(NORMAL, CRITICAL, NORMAL), pipeline, save_minutes=0, keep=9)
    assert {name for name in names_in(tmp_path) if name.startswith("step-")} == {"step-2"}


def test_previous_step_is_complete_when_micro_batches_are_halved(tmp_path: Path) -> None:
    taken: list[int] = []

    class Pipeline(FakePipeline):
        def relieve_memory(self, halve_for: Any = None) -> int | None:
            # A batch runs when its result is requested.
            taken.append(len(self.batches))
            return super().relieve_memory(halve_for)

    run(tmp_path, Machine(NORMAL, NORMAL, CRITICAL), Pipeline())
    assert taken == [2, 2]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (Conditions(WARN), ["relieve", "draw 2"]),
        (Conditions(CRITICAL), ["relieve", "draw 2", "halve", "draw 2"]),
        (BATTERY, ["paused", "draw 2"]),
    ],
)
def test_samples_are_drawn_only_for_halving_and_after_memory_is_released(
    tmp_path: Path, conditions: Conditions, expected: list[str]
) -> None:
    """Drawing the samples of a step takes memory, power and perhaps minutes."""
    events: list[str] = []

    class Pipeline(FakePipeline):
        def relieve_memory(self, halve_for: Any = None) -> int | None:
            events.append("relieve" if halve_for is None else "halve")
            return super().relieve_memory(halve_for)

    class Source(RowSource):
        def examples_of(self, rows: CorpusRows, step: Step, on_progress: OnProgress) -> StepData:
            events.append(f"draw {step.number}")
            return super().examples_of(rows, step, on_progress)

    pipeline = Pipeline()
    monitor = MachineMonitor(
        Machine(NORMAL, conditions, NORMAL),
        pause_on_battery=True,
        wait=lambda seconds: events.append("paused"),
    )
    config = options(tmp_path, max_steps=2)
    trainer = InstructTrainer(pipeline, CORPUS, config, monitor=monitor, source=Source(pipeline))
    trainer.train()
    assert events == ["draw 1", *expected]


def test_pressure_changes_nothing_else(tmp_path: Path) -> None:
    calm, pressed = FakePipeline(), FakePipeline()
    run(tmp_path / "calm", Machine(NORMAL), calm)
    run(tmp_path / "pressed", Machine(NORMAL, CRITICAL, WARN, NORMAL), pressed)
    assert pressed.batches == calm.batches
    logs = [without_times(log_of(tmp_path / name)) for name in ("calm", "pressed")]
    assert logs[0] == logs[1]


# Battery


def test_run_pauses_on_battery_and_continues_when_plugged_in(tmp_path: Path) -> None:
    waits: list[int] = []
    pipeline = FakePipeline()

    def wait(seconds: float) -> None:
        assert seconds < 1
        waits.append(len(pipeline.batches))

    machine = Machine(NORMAL, NORMAL, BATTERY, BATTERY, BATTERY, NORMAL)
    lines = run(tmp_path, machine, pipeline, pause_on_battery=True, wait=wait)
    assert waits == [2, 2, 2]
    assert len(pipeline.batches) == STEPS
    assert lines == [
        "warning: on battery: paused after step 2 until plugged in; Ctrl-C stops the run",
        "Power: plugged in: training continues",
    ]


def test_run_on_battery_continues_without_the_option(tmp_path: Path) -> None:
    assert run(tmp_path, Machine(BATTERY), FakePipeline(), wait=pytest.fail) == []


def test_unknown_power_does_not_pause(tmp_path: Path) -> None:
    lines = run(tmp_path, Machine(NORMAL), FakePipeline(), pause_on_battery=True, wait=pytest.fail)
    assert lines == []


@pytest.mark.parametrize("step", [0, 2])
def test_ctrl_c_ends_a_pause_and_the_run_with_its_state_saved(tmp_path: Path, step: int) -> None:
    pressed: list[bool] = []
    pipeline = FakePipeline()
    with pytest.raises(TrainingInterrupted) as caught:
        run(
            tmp_path,
            Machine(*[NORMAL] * step, BATTERY),
            pipeline,
            pause_on_battery=True,
            wait=lambda seconds: pressed.append(True),
            should_stop=lambda: bool(pressed),
        )
    assert len(pipeline.batches) == caught.value.step == step
    assert caught.value.checkpoint == (tmp_path / f"step-{step}" if step else None)


def test_paused_worker_takes_the_step_after_which_all_stop(tmp_path: Path) -> None:
    """Workers stop together: if one left during a pause, the others would wait for it."""
    pressed: list[bool] = []
    pipeline = FakePipeline(workers=2)
    with pytest.raises(TrainingInterrupted) as caught:
        run(
            tmp_path,
            Machine(NORMAL, BATTERY),
            pipeline,
            pause_on_battery=True,
            wait=lambda seconds: pressed.append(True),
            should_stop=lambda: bool(pressed),
        )
    # Ctrl-C comes before step 2: step 3 sends it to the others, and step 4 is the last.
    assert len(pipeline.batches) == caught.value.step == 4
    assert len(pressed) == 1


# Sleep and heat


def test_sleep_has_a_line_and_naps_have_none(tmp_path: Path) -> None:
    slept = iter([100.0, 100.0, 105.0, *[7605.0] * 30])
    lines = run(tmp_path, Machine(NORMAL), FakePipeline(), asleep=lambda: next(slept))
    message = "the machine slept for 2h 05m after step 2; times and rates exclude the sleep"
    assert lines == [f"Sleep: {message}"]


def test_heat_is_reported_when_it_changes(tmp_path: Path) -> None:
    lines = Lines()
    hot = Conditions(thermal="serious")
    machine = Machine(NORMAL, hot, hot, NORMAL)
    train(tmp_path, FakePipeline(), observer=lines, monitor=MachineMonitor(machine, lines))
    # The numbers of a step are read after the next one has started.
    assert [state for _, state in lines.heat] == ["serious", ""]
    assert lines.lines == []
