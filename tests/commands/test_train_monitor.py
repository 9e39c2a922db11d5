"""A run on a machine that is short of memory, on battery, or to be kept awake."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import mlxtune
from mlxtune import TrainConfig, train
from mlxtune.commands import train as recipe
from mlxtune.core.machine.conditions import Conditions, Pressure, Sensors
from mlxtune.core.training.machine_monitor import MachineMonitor
from tests.models import sums, write_chat

ADAPTER = "adapters.safetensors"
STEPS, HALVED = 6, 3


class Killed(BaseException):
    """Ends the run without saving, as a kill would."""


@pytest.fixture
def configured(model: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A function that configures a six-step run that saves only at its end."""
    chat = write_chat(tmp_path / "chat.jsonl", sums(24))

    def make(name: str, **options: Any) -> TrainConfig:
        output = str(tmp_path / name / ADAPTER)
        defaults = {"lr": 1e-2, "targets": ("all",), "quiet": True, "val_split": 0.0}
        return TrainConfig(
            str(model), str(chat), output=output, save_minutes=0, **(defaults | options)
        )

    return make


def press(monkeypatch: pytest.MonkeyPatch, *, killed: bool) -> None:
    """Make memory very short before one step and, if `killed`, end the run before the next."""
    # The run reads the conditions once more before its first step.
    looks = [Pressure.NORMAL] * HALVED + [Pressure.CRITICAL] + [Pressure.NORMAL] * STEPS

    class Pressed:
        script = iter(looks[: HALVED + 1] if killed else looks)

        @property
        def latest(self) -> Conditions:
            if (pressure := next(self.script, None)) is None:
                raise Killed
            return Conditions(pressure)

    monkeypatch.setattr(recipe, "ConditionsPoller", lambda sensors: nullcontext(Pressed()))


def micro_batches(config: TrainConfig) -> list[int]:
    lines = (config.checkpoint_path / "metrics.jsonl").read_text().splitlines()
    return [each["micro_batches"] for each in map(json.loads, lines) if each["kind"] == "step"]


def test_run_killed_after_halving_resumes_to_the_same_bytes(
    configured: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = configured("whole"), configured("stopped")
    with monkeypatch.context() as patch:
        press(patch, killed=False)
        train(whole)
    with monkeypatch.context() as patch:
        press(patch, killed=True)
        with pytest.raises(Killed):
            train(stopped)
    assert {path.name for path in stopped.checkpoint_path.glob("*-*")} == {f"step-{HALVED}"}
    mlxtune.resume(stopped.checkpoint_path)

    assert stopped.output_path.read_bytes() == whole.output_path.read_bytes()
    counts = micro_batches(whole)
    assert max(counts[: HALVED - 1]) < min(counts[HALVED - 1 :])
    assert micro_batches(stopped) == counts


def test_machine_is_kept_awake_unless_it_may_sleep_or_nothing_trains(
    configured: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def kept_awake() -> Iterator[None]:
        events.append("kept awake")
        yield
        events.append("released")

    def monitor(*arguments: Any, **options: Any) -> MachineMonitor:
        events.append("training")
        return MachineMonitor(*arguments, **options)

    monkeypatch.setattr("mlxtune.session.run_session.keep_awake", kept_awake)
    monkeypatch.setattr(recipe, "MachineMonitor", monitor)
    train(configured("awake", max_steps=1))
    assert events == ["kept awake", "training", "released"]
    events.clear()
    train(configured("asleep", max_steps=1, allow_sleep=True))
    train(configured("dry"), dry_run=True)
    assert events == ["training"] * 2


def test_machine_is_watched_for_the_battery_if_the_option_asks(
    configured: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[bool] = []

    def check(monitor: MachineMonitor, step: int) -> None:
        paused.append(monitor._should_pause())

    monkeypatch.setattr(Sensors, "on_battery", lambda sensors: True)
    monkeypatch.setattr(MachineMonitor, "check", check)
    for pauses in (False, True):
        train(configured(f"pauses-{pauses}", max_steps=1, pause_on_battery=pauses))
        assert paused[-1] is pauses
