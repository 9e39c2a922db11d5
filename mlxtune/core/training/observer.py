"""Who hears of a run as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.training.metrics import InstructEpochMetrics, InstructTrainResult, StepRecord
from mlxtune.core.training.profile import ProfileRecord
from mlxtune.core.training.progress import Progress


@dataclass(frozen=True)
class RunStart:
    """What a run is about to do, and the records of what it did before a pause."""

    total_steps: int
    epochs: int
    train_rows: int
    val_rows: int
    progress: Progress


class TrainingObserver:
    """Hears of a run as it goes; each method does nothing by itself."""

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        """Training is about to begin; `previous` holds the files of an earlier run."""

    def on_step(self, record: StepRecord) -> None:
        """A step was taken."""

    def on_evaluated(self, done: int, total: int) -> None:
        """So many of the validation examples have been evaluated."""

    def on_validation(self, step: int, loss: float) -> None:
        """The validation set was evaluated after `step` steps, 0 before the first."""

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        """An epoch ended; `best` tells whether no epoch had a lower validation loss."""

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint was written."""

    def on_profile(self, record: ProfileRecord) -> None:
        """A step, or the writing of a checkpoint, was profiled."""

    def on_problem(self, message: str) -> None:
        """Something went wrong that the run survives."""

    def on_result(self, result: InstructTrainResult) -> None:
        """Training came to its end."""

    def on_end(self) -> None:
        """Training ended, however it did."""


class Observers(TrainingObserver):
    """Several observers, each of which hears of everything, in their order."""

    def __init__(self, observers: Sequence[TrainingObserver]) -> None:
        self._observers = list(observers)

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_start(run, previous)

    def on_step(self, record: StepRecord) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_step(record)

    def on_evaluated(self, done: int, total: int) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_evaluated(done, total)

    def on_validation(self, step: int, loss: float) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_validation(step, loss)

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_epoch(metrics, best)

    def on_checkpoint(self, folder: Path) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_checkpoint(folder)

    def on_profile(self, record: ProfileRecord) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_profile(record)

    def on_problem(self, message: str) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_problem(message)

    def on_result(self, result: InstructTrainResult) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_result(result)

    def on_end(self) -> None:
        """Tell each."""
        for each in self._observers:
            each.on_end()
