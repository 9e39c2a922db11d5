"""Events of a training run, and the observers that receive them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.run.metrics import InstructEpochMetrics, InstructTrainResult, StepRecord
from mlxtune.core.run.profile import StepProfile
from mlxtune.core.run.progress import Progress


@dataclass(frozen=True)
class RunStart:
    """The size of a run, and its progress so far, which a resumed run reads from its checkpoint."""

    total_steps: int
    steps_per_epoch: int
    epochs: int
    train_rows: int
    val_rows: int
    progress: Progress
    objective: str = "sft"


class TrainingObserver:
    """Receives the events of a run. Override what you need; each method does nothing by default."""

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        """Training is about to start; an earlier run's files were moved to `previous`."""

    def on_step(self, record: StepRecord) -> None:
        """A step was taken."""

    def on_evaluated(self, done: int, total: int) -> None:
        """`done` of `total` validation examples have been evaluated."""

    def on_sampled(self, done: int, total: int) -> None:
        """`done` of the `total` answers that the next steps train on have been sampled."""

    def on_validation(self, step: int, loss: float) -> None:
        """The validation set was evaluated after `step` steps; `step` is 0 before training."""

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        """An epoch ended; `best` says whether its validation loss is the lowest so far."""

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint was written."""

    def on_profile(self, profile: StepProfile) -> None:
        """A step was profiled."""

    def on_problem(self, message: str) -> None:
        """Something went wrong, and training continues."""

    def on_note(self, topic: str, message: str) -> None:
        """The run has a `message` for the user, under a `topic`."""

    def on_thermal(self, state: str) -> None:
        """Heat now slows the machine as `state` says; it no longer does if `state` is empty."""

    def on_result(self, result: InstructTrainResult) -> None:
        """Training is complete."""

    def on_end(self) -> None:
        """Training ended, complete or not."""


class Callbacks(TrainingObserver):
    """Calls functions after each step and each validation."""

    def __init__(
        self,
        on_step: Callable[[StepRecord], None] | None,
        on_validation: Callable[[int, float], None] | None,
    ) -> None:
        self._on_step, self._on_validation = on_step, on_validation

    def on_step(self, record: StepRecord) -> None:
        """Call the function for steps, if there is one."""
        if self._on_step is not None:
            self._on_step(record)

    def on_validation(self, step: int, loss: float) -> None:
        """Call the function for validations, if there is one."""
        if self._on_validation is not None:
            self._on_validation(step, loss)


def _to_each(event: Callable[..., None]) -> Callable[..., None]:
    """Return a method of `Observers` that passes an event on to each observer."""

    def broadcast(observers: "Observers", *details: object) -> None:
        for observer in observers.observers:
            getattr(observer, event.__name__)(*details)

    return broadcast


@dataclass(frozen=True)
class Observers(TrainingObserver):
    """Passes each event on to several observers, in order."""

    observers: Sequence[TrainingObserver]

    on_start = _to_each(TrainingObserver.on_start)
    on_step = _to_each(TrainingObserver.on_step)
    on_evaluated = _to_each(TrainingObserver.on_evaluated)
    on_sampled = _to_each(TrainingObserver.on_sampled)
    on_validation = _to_each(TrainingObserver.on_validation)
    on_epoch = _to_each(TrainingObserver.on_epoch)
    on_checkpoint = _to_each(TrainingObserver.on_checkpoint)
    on_profile = _to_each(TrainingObserver.on_profile)
    on_problem = _to_each(TrainingObserver.on_problem)
    on_note = _to_each(TrainingObserver.on_note)
    on_thermal = _to_each(TrainingObserver.on_thermal)
    on_result = _to_each(TrainingObserver.on_result)
    on_end = _to_each(TrainingObserver.on_end)
