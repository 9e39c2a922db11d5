"""Observers of a run receive its events in order, several observers one after another."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.run.metrics import InstructEpochMetrics, StepRecord
from mlxtune.core.training.observer import Observers, RunStart, TrainingObserver
from mlxtune.errors import NonFiniteLossError
from tests.core.training.fake_pipeline import FakePipeline, rows, train

CALLS = [name for name in vars(TrainingObserver) if name.startswith("on_")]


class Listener(TrainingObserver):
    """Records every call."""

    def __init__(self, name: str, heard: list[tuple[Any, ...]]) -> None:
        for call in CALLS:
            setattr(self, call, lambda *args, call=call: heard.append((name, call, *args)))


@pytest.mark.parametrize("call", CALLS)
def test_all_observers_receive_events_in_order(call: str) -> None:
    heard: list[tuple[Any, ...]] = []
    both = Observers([Listener("first", heard), Listener("second", heard)])
    count = len(inspect.signature(getattr(TrainingObserver, call)).parameters) - 1
    arguments = [object() for _ in range(count)]
    getattr(both, call)(*arguments)
    assert heard == [("first", call, *arguments), ("second", call, *arguments)]


class RunListener(TrainingObserver):
    """Records the events."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        self.heard.append(("start", run.total_steps))

    def on_step(self, record: StepRecord) -> None:
        self.heard.append(("step", record.step))

    def on_evaluated(self, done: int, total: int) -> None:
        self.heard.append(("evaluated", done, total))

    def on_validation(self, step: int, loss: float) -> None:
        self.heard.append(("validation", step))

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        self.heard.append(("epoch", metrics.epoch, best))

    def on_checkpoint(self, folder: Path) -> None:
        self.heard.append(("checkpoint", folder.name))

    def on_end(self) -> None:
        self.heard.append(("end",))


def test_observer_receives_all_events_in_order(tmp_path: Path) -> None:
    listener = RunListener()
    train(tmp_path, FakePipeline(val_loss=lambda v: 1.0 + v), epochs=2, observer=listener)

    assert [event for event in listener.heard if event[0] != "evaluated"] == [
        ("start", 6),
        ("validation", 0),
        *(("step", step) for step in (1, 2, 3)),
        *(("validation", 3), ("epoch", 1, True), ("checkpoint", "best"), ("checkpoint", "epoch-1")),
        *(("step", step) for step in (4, 5, 6)),
        *(("validation", 6), ("epoch", 2, False), ("checkpoint", "epoch-2")),
        ("end",),
    ]


def test_observer_receives_the_number_of_evaluated_examples(tmp_path: Path) -> None:
    listener = RunListener()
    pipeline = FakePipeline()
    train(tmp_path, pipeline, validation=rows(*range(100, 180)), observer=listener, max_steps=1)

    heard = [event[1:] for event in listener.heard if event[0] == "evaluated"]
    first = heard[: len(heard) // 2]
    assert first == heard[len(heard) // 2 :]
    done = [done for done, _ in first]
    assert done == sorted(set(done))
    assert done[0] > 0
    assert first[-1] == (80, 80)


def test_observer_is_always_notified_of_the_end(tmp_path: Path) -> None:
    listener = RunListener()
    with pytest.raises(NonFiniteLossError):
        train(tmp_path, FakePipeline(val_loss=lambda v: math.nan), observer=listener)

    assert listener.heard[-1] == ("end",)


def test_observers_pass_on_every_event() -> None:
    events = {name for name in vars(TrainingObserver) if name.startswith("on_")}

    assert events == {name for name in vars(Observers) if name.startswith("on_")}
