"""Who hears of a run as it goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.core.metrics import InstructEpochMetrics, StepRecord

if TYPE_CHECKING:
    from mlxtune.core.trainer import InstructTrainer


class TrainingObserver:
    """Hears of a run as it goes; each method does nothing by itself."""

    def on_start(self, trainer: InstructTrainer, previous: Path | None) -> None:
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

    def on_problem(self, message: str) -> None:
        """Something went wrong that the run survives."""

    def on_end(self) -> None:
        """Training ended, however it did."""
