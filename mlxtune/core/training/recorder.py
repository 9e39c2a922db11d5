"""Records a run: its progress, its metrics.jsonl and its checkpoints."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from mlxtune.config import InstructTrainingConfig
from mlxtune.core.files.writing import as_json
from mlxtune.core.run import run_folder
from mlxtune.core.run.checkpoint import FILE_HASHES, epoch_name, step_name
from mlxtune.core.run.extension import extended
from mlxtune.core.run.metrics import InstructEpochMetrics, InstructTrainResult
from mlxtune.core.run.progress import MetricsFile, Progress, Record
from mlxtune.core.run.run_folder import ResumePoint
from mlxtune.core.run.saving import CheckpointContent, CheckpointSaver
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.pipeline import Pipeline
from mlxtune.errors import (
    GpuError,
    MemoryLimitError,
    NonFiniteLossError,
    OutputError,
    TrainingInterrupted,
    resume_command,
)


@dataclass
class RunRecorder:
    """Adds records to the `progress` of a run, and writes metrics.jsonl and checkpoints.

    `schedule` returns the learning rate of a step. `metadata` has the entries of each checkpoint's
    metadata that are known before the run starts, and `facts_at` returns the entries of a step.
    """

    pipeline: Pipeline
    config: InstructTrainingConfig
    progress: Progress
    observer: TrainingObserver
    steps_per_epoch: int
    total_steps: int
    schedule: Callable[[int], float]
    metadata: Mapping[str, Any]
    facts_at: Callable[[int], Mapping[str, Any]]

    def __post_init__(self) -> None:
        self._folder = Path(self.config.checkpoint_dir)
        self._file_hashes: Mapping[str, Any] = {}
        self._extensions: Mapping[str, Any] = {}
        self._metrics_file = MetricsFile(self._folder, self.observer.on_problem)
        self.saver = CheckpointSaver(
            self._folder,
            every_steps=self.config.save_steps,
            every_minutes=self.config.save_minutes,
            epochs=self.config.epochs,
            every_epochs=self.config.save_every,
            keep=self.config.keep,
            on_saved=self.observer.on_checkpoint,
            on_problem=self.observer.on_problem,
        )
        self.start_timing()

    def add_file_hashes(self, files: Mapping[str, Any]) -> None:
        """Put the hashes of files into the checkpoints, for `mlxtune verify`."""
        hashes = {
            name: sha256(content if isinstance(content, bytes) else as_json(content)).hexdigest()
            for name, content in files.items()
        }
        self._file_hashes = {FILE_HASHES: hashes} if hashes else {}

    def start_timing(self) -> None:
        self._started = self._epoch_started = time.perf_counter()

    def continue_from(self, point: ResumePoint) -> None:
        """Take over the checkpoints of a run that stopped; errors name the last of them."""
        self.saver.resume(point.checkpoint.folder, point.kept, point.progress.step)

    def resume(self, point: ResumePoint, validated: Callable[[int], bool]) -> None:
        """Take over the progress and times of a run that stopped.

        `validated` returns whether a validation follows a step within an epoch. Raises ModelError
        if the checkpoint does not fit the pipeline.
        """
        progress, checkpoint = self.progress, point.checkpoint
        self._extensions = extended(checkpoint.metadata, self.total_steps)
        self.pipeline.restore(checkpoint.folder)
        run_folder.reopen(self._folder)
        for record in point.progress:
            progress.append(record)
        step = progress.step
        progress.reopen_epoch(self.steps_per_epoch, self.total_steps, validated(step))
        self._started -= checkpoint.seconds("total_time_ms")
        self._epoch_started -= checkpoint.seconds("epoch_time_ms")

    def add(self, record: Record) -> None:
        self.progress.append(record)
        self._metrics_file.write(self.progress)

    def end_epoch(self, epoch: int, val_loss: float | None) -> None:
        """Record an epoch that the last step ended, write its checkpoints, and start the next."""
        if len(self.progress.epochs) < epoch:
            metrics = self._epoch_metrics(val_loss)
            self.add(metrics)
            self.observer.on_epoch(metrics, self._is_best())
        # A killed run that is resumed at the end of an epoch may lack checkpoints of the epoch.
        metrics = self.progress.epochs[-1]
        self._save(metrics, epoch_name(epoch) if self.saver.is_due_at_end(epoch) else None)
        self._epoch_started = time.perf_counter()

    def save_validated(self, val_loss: float | None) -> None:
        """Write the checkpoints of a validation within an epoch."""
        self._save(self._epoch_metrics(val_loss), step_name(self.progress.step))

    def save_step(self) -> None:
        """Write the checkpoint of the last step."""
        self.saver.try_save(step_name(self.progress.step), self._checkpoint())

    def save_and_interrupt(self) -> NoReturn:
        """Save the run's state, and end the run early. Raises TrainingInterrupted."""
        step = self.progress.step
        saved = self.saver.save(step_name(step), self._checkpoint()) if step else None
        raise TrainingInterrupted(saved, step)

    def finish(
        self, stopped_early: bool, write_adapter: Callable[[InstructTrainResult], None] | None
    ) -> InstructTrainResult:
        """Write the adapter and the files that are still due, and return the run's result."""
        result = self.progress.result(stopped_early, _milliseconds_since(self._started))
        # The adapter comes first: on a full disk, it may fit where no checkpoint does.
        if write_adapter is not None:
            write_adapter(result)
        try:
            self.saver.finish()
        except OutputError as error:
            raise OutputError(f"{error}; the adapter is written") from error
        self._metrics_file.write(self.progress)
        return result

    @contextmanager
    def adding_checkpoint_to_errors(self) -> Iterator[None]:
        """Add the last good checkpoint, and the way to resume, to an error that ends the run."""
        try:
            yield
        except (NonFiniteLossError, OutputError, MemoryLimitError, GpuError) as error:
            saved = self.saver.latest
            remedy = (
                f"the last good checkpoint is {saved}" if saved else "no checkpoint was written"
            )
            if saved and not isinstance(error, NonFiniteLossError):
                remedy += f"; resume with {resume_command(self._folder)}"
            raise type(error)(f"{error}; {remedy}") from error
        except KeyboardInterrupt as interrupt:
            # Training that stops on request has just saved its state.
            if not isinstance(interrupt, TrainingInterrupted):
                saved, resume = self.saver.latest, resume_command(self._folder)
                kept = f"the last checkpoint is {saved}; resume with {resume}"
                interrupt.args = (kept if saved else "no checkpoint was written",)
            raise

    def _is_best(self) -> bool:
        best = self.progress.best
        return best is not None and best.step == self.progress.step

    def _epoch_metrics(self, val_loss: float | None) -> InstructEpochMetrics:
        step, time_ms = self.progress.step, _milliseconds_since(self._epoch_started)
        epoch = math.ceil(step / self.steps_per_epoch)
        return self.progress.epoch_metrics(epoch, val_loss, self.schedule(step), time_ms)

    def _save(self, metrics: InstructEpochMetrics, name: str | None) -> None:
        """Write `best/` if the last validation is the best, and the named checkpoint."""
        content = self._checkpoint(metrics)
        if self._is_best():
            self.saver.save_best(content)
        if name:
            self.saver.try_save(name, content)

    def _checkpoint(self, metrics: InstructEpochMetrics | None = None) -> CheckpointContent:
        progress = self.progress
        best = progress.best
        metadata = {
            "task": "instruct",
            "step": progress.step,
            "total_steps": self.total_steps,
            "total_time_ms": _milliseconds_since(self._started),
            **asdict(metrics or self._epoch_metrics(None)),
            "best_epoch": progress.best_epoch,
            "best_step": best.step if best else None,
            "best_val_loss": best.val_loss if best else None,
            **self.pipeline.describe(),
            **self.metadata,
            **self.facts_at(progress.step),
            **self._file_hashes,
            **self._extensions,
        }
        lines = partial(progress.lines, 0, len(progress))
        return CheckpointContent(self.pipeline.snapshot(), metadata, lines)


def _milliseconds_since(started: float) -> int:
    return round((time.perf_counter() - started) * 1000)
