"""The trainer: epochs, validation, early stopping, and when to save. It knows no mlx."""

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlxtune.config import InstructTrainingConfig
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.files.files import make_folder, write_json
from mlxtune.core.run import run_folder
from mlxtune.core.run.checkpoint import BEST
from mlxtune.core.run.metrics import (
    InstructEpochMetrics,
    InstructTrainResult,
    SkippedStep,
    TrainingMetrics,
    ValidationRecord,
    perplexity,
)
from mlxtune.core.run.profile import StepProfiler
from mlxtune.core.run.progress import MetricsFile, Progress, Record
from mlxtune.core.run.run_folder import ResumePoint
from mlxtune.core.run.saving import CheckpointContent, CheckpointSaver, saves_epoch
from mlxtune.core.steps import order
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.core.training.pipeline import Pipeline, StartedStep
from mlxtune.core.training.schedule import count_steps, make_schedule
from mlxtune.core.training.surroundings import Surroundings
from mlxtune.errors import (
    GpuError,
    MemoryLimitError,
    NonFiniteLossError,
    OutputError,
    TrainingInterrupted,
)

# A run ends after this many steps in a row that are not finite.
_MAX_SKIPPED_IN_A_ROW = 3


class InstructTrainer:
    """Trains a pipeline on a corpus.

    `validation` replaces the split: its examples are evaluated and the whole corpus trains; if it
    is empty, there is no validation. `run_config` is saved in each checkpoint. `should_stop` is
    called after each step and during validation; after step `stop_after`, it need not be. With
    several workers, `decide` takes whether this one would save, and returns if all stop, and save.

    Raises ValueError when the corpus is empty or too small to split.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        corpus: Sequence[Example],
        config: InstructTrainingConfig,
        *,
        validation: Sequence[Example] | None = None,
        run_config: Mapping[str, Any] | None = None,
        observer: TrainingObserver | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        stop_after: int | None = None,
        decide: Callable[[bool], tuple[bool, bool]] | None = None,
        profiler: StepProfiler | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        if not corpus:
            raise ValueError("the corpus is empty: there is nothing to train on")
        self.pipeline = pipeline
        self.config = config
        corpus = Corpus.of(corpus)
        self._data_hash = corpus.data_hash()
        if validation is None:
            training, held_out = order.split_rows(
                corpus.identities, config.val_split, config.seed, config.val_rows
            )
            self.train_rows, self.val_rows = corpus.select(training), corpus.select(held_out)
        else:
            self.train_rows, self.val_rows = corpus.select(), Corpus.of(validation).select()
        self.steps_per_epoch, self.total_steps = count_steps(config, len(self.train_rows))
        own = config.learning_rate
        self.learning_rate = pipeline.learning_rate if own is None else own
        self._schedule = make_schedule(
            config.schedule,
            peak=self.learning_rate,
            total_steps=self.total_steps,
            warmup_fraction=config.warmup_fraction,
            lr_min=config.lr_min,
        )
        self._folder = Path(config.checkpoint_dir)
        self._run_config = dict(run_config) if run_config is not None else asdict(config)
        self._observer = observer or TrainingObserver()
        self._should_stop = should_stop
        self._stop_after = stop_after
        self._decide = decide or (lambda save: (should_stop(), save))
        self._profiler = profiler
        self._surroundings = surroundings or Surroundings()
        self._saver = CheckpointSaver(
            self._folder,
            every_steps=config.save_steps,
            every_minutes=config.save_minutes,
            keep=config.keep,
            on_saved=self._observer.on_checkpoint,
            on_problem=self._observer.on_problem,
        )
        self._metrics_file = MetricsFile(self._folder, self._observer.on_problem)
        self.progress = Progress()
        self._started = self._epoch_started = self._step_ended = time.perf_counter()

    @property
    def metrics(self) -> TrainingMetrics:
        """The steps of the run so far."""
        return TrainingMetrics(self.total_steps, self.progress.steps)

    def data_hash(self) -> str:
        """Return `sha256:` over the whole corpus, before the split."""
        return self._data_hash

    def validation_hash(self) -> str:
        """Return `sha256:` over the data that validation rows come from; empty without any."""
        corpus = self.val_rows.corpus
        held_out = bool(self.val_rows) and corpus is self.train_rows.corpus
        return self._data_hash if held_out else corpus.data_hash() if self.val_rows else ""

    @property
    def best_folder(self) -> Path:
        """The checkpoint of the best validation loss."""
        return self._folder / BEST

    def train(
        self,
        records: Mapping[str, Any] | None = None,
        *,
        resume: ResumePoint | None = None,
    ) -> InstructTrainResult:
        """Run all epochs, or those after the checkpoint to resume from.

        `records` are JSON values by file name, written to the run's folder.

        Raises NonFiniteLossError, MemoryLimitError or GpuError if a step cannot be taken,
        OutputError if the best or last checkpoint cannot be written, ModelError if the checkpoint
        does not fit, and TrainingInterrupted, with the state saved, once `should_stop` returns
        true.
        """
        make_folder(self._folder)
        previous = None if resume else run_folder.archive_previous_run(self._folder)
        for name, record in (records or {}).items():
            write_json(self._folder / name, record)
        self._start(resume)
        start = RunStart(
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.config.epochs,
            train_rows=len(self.train_rows),
            val_rows=len(self.val_rows),
            progress=self.progress,
        )
        self._observer.on_start(start, previous)
        try:
            if resume is None:
                self._validate()
            elif self.progress.epochs and self._at_epoch_boundary():
                # The run may have ended between the checkpoints of this epoch: write both.
                self._save_epoch(self.progress.epochs[-1])
            stopped_early = self._run_epochs()
            self._saver.finish()
            self._metrics_file.write(self.progress)
            result = self.progress.result(stopped_early, _milliseconds_since(self._started))
            self._observer.on_result(result)
        except (NonFiniteLossError, OutputError, MemoryLimitError, GpuError) as error:
            saved = self._saver.latest
            kept = f"the last good checkpoint is {saved}" if saved else "no checkpoint was written"
            if saved and isinstance(error, MemoryLimitError | GpuError):
                kept += f"; resume with mlxtune train --resume {shlex.quote(str(self._folder))}"
            raise type(error)(f"{error}; {kept}") from error
        finally:
            self._observer.on_end()
        return result

    def _start(self, resume: ResumePoint | None) -> None:
        """Set up the state of the run, from a checkpoint if there is one to resume from."""
        self._started = self._epoch_started = time.perf_counter()
        if resume is not None:
            checkpoint = resume.checkpoint
            self.pipeline.restore(checkpoint.folder)
            run_folder.reopen(self._folder)
            self.progress = resume.progress
            validated = self._validates_within(self.progress.step)
            self.progress.reopen_epoch(self.steps_per_epoch, self.total_steps, validated)
            self._saver.resume(resume.kept, self.progress.step)
            self._started -= checkpoint.seconds("total_time_ms")
            self._epoch_started -= checkpoint.seconds("epoch_time_ms")

    def _at_epoch_boundary(self) -> bool:
        return len(self.progress.epochs) == math.ceil(self.progress.step / self.steps_per_epoch)

    def _run_epochs(self) -> bool:
        """Run the remaining epochs; return whether training stopped early."""
        while True:
            if self._at_epoch_boundary():
                if self.progress.step >= self.total_steps:
                    return False
                if self._is_out_of_patience():
                    return True
            metrics = self._run_epoch(len(self.progress.epochs) + 1)
            self._record(metrics)
            self._observer.on_epoch(metrics, self._is_best())
            self._save_epoch(metrics)

    def _is_best(self) -> bool:
        """Return whether the last step has the best validation loss so far."""
        best = self.progress.best
        return best is not None and best.step == self.progress.step

    def _is_out_of_patience(self) -> bool:
        waited = self.progress.validations_since_best
        return waited >= self.config.early_stopping_patience

    def _validates_within(self, step: int) -> bool:
        """Return whether the run validates after a step because of --val-steps alone."""
        every, within = self.config.val_steps, step % self.steps_per_epoch and self.val_rows
        return bool(every and within and step % every == 0) and step < self.total_steps

    def _run_epoch(self, epoch: int) -> InstructEpochMetrics:
        taken = self.progress.step - (epoch - 1) * self.steps_per_epoch
        if not taken:
            self._epoch_started = time.perf_counter()
        config = self.config
        steps = order.steps_of(self.train_rows, config.batch_size, config.order, config.seed, epoch)
        pending: StartedStep | None = None
        for step, chosen in enumerate(steps[taken:], self.progress.step + 1):
            if step > self.total_steps:
                break
            if self._validates_within(step - 1):
                self._finish_step(pending)
                pending = None
                self._save(self._epoch_metrics(self._validate()), f"step-{step - 1}")
                if self._is_out_of_patience():
                    break
            halved = False
            if self._surroundings.asks(step - 1):
                self._finish_step(pending)
                pending = None
                halved = self._act(chosen)
            started = self._start_step(step, epoch, chosen)
            # The numbers of a step are read while the device computes the next one.
            self._finish_step(pending)
            pending = started
            due = self._saver.is_due_by_steps(step)
            # A run that is resumed has to halve its micro-batches at the same step.
            stopping, saving = self._decide(not due and (halved or self._saver.is_due(step)))
            stopping, saving = stopping or step == self._stop_after, saving or due
            if stopping or saving or self._profiler:
                self._finish_step(pending)
                pending = None
            if stopping:
                raise self._interrupted()
            if saving and not self._validates_within(step):
                self._saver.try_save(f"step-{step}", self._checkpoint())
        self._finish_step(pending)
        if all(record.epoch != epoch for record in self.progress.steps[-1:]):
            raise NonFiniteLossError(f"no step of epoch {epoch} was finite: lower --lr")
        return self._epoch_metrics(self._validate())

    def _act(self, chosen: Sequence[int]) -> bool:
        """Answer the machine before a step on some rows; return if micro-batches were halved."""
        examples = [example for i in chosen for example in self.train_rows[i]]
        halved = self._surroundings.act(self.pipeline, examples, self.progress.step)
        if self._should_stop():
            raise self._interrupted()
        return halved

    def _start_step(self, step: int, epoch: int, chosen: Sequence[int]) -> StartedStep:
        rate, started = self._schedule(step), time.perf_counter()
        examples = [example for i in chosen for example in self.train_rows[i]]
        start = partial(self.pipeline.start_batch, examples, step=step, learning_rate=rate)
        if self._profiler is None:
            return StartedStep(step, epoch, rate, chosen, examples, started, start())
        # Nothing else runs while a step is measured; `_finish_step` reports its error.
        with suppress(NonFiniteLossError), self._profiler.step(step):
            pending = start()
            pending.result()
        return StartedStep(step, epoch, rate, chosen, examples, started, pending)

    def _finish_step(self, taken: StartedStep | None) -> None:
        if taken is None:
            return
        step, epoch, rate, chosen = taken.step, taken.epoch, taken.learning_rate, taken.rows
        try:
            result = taken.pending.result()
        except NonFiniteLossError as error:
            rows = [self.train_rows.where(i) for i in chosen]
            self._skip(SkippedStep(step, epoch, rate, str(error), rows), error)
            return
        # It may have waited for the step before.
        started, self._step_ended = max(taken.started, self._step_ended), taken.pending.ended
        record = taken.record(result, self._step_ended - started)
        self._record(record)
        self._observer.on_step(record)
        if self._profiler:
            self._profiler.record()

    def _skip(self, skipped: SkippedStep, error: NonFiniteLossError) -> None:
        self._record(skipped)
        problem = f"{error}; its rows: {skipped.places()}"
        in_a_row = self.progress.skipped_in_a_row
        if self.config.on_nonfinite == "stop":
            raise NonFiniteLossError(problem) from error
        if in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(f"{problem}; {in_a_row} steps in a row") from error
        self._observer.on_problem(f"{problem}; training continues with the next step")

    def _validate(self) -> float | None:
        if not self.val_rows:
            return None
        step = self.progress.step
        if (last := self.progress.validations[-1:]) and last[0].step == step:
            return last[0].val_loss
        # Neighbours in length share a micro-batch; the sum does not depend on the order.
        examples = sorted((example for row in self.val_rows for example in row), key=len)

        def evaluated(done: int) -> None:
            self._observer.on_evaluated(done, len(examples))
            if self._should_stop():
                raise self._interrupted()

        loss = self.pipeline.evaluate(examples, evaluated).avg_loss
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the validation loss after step {step} is {loss}"
                f"{f' at learning rate {self._schedule(step):g}' if step else ''}: "
                "lower --lr, or check the model and --dtype"
            )
        self._record(ValidationRecord(step, loss, perplexity(loss)))
        self._observer.on_validation(step, loss)
        return loss

    def _epoch_metrics(self, val_loss: float | None) -> InstructEpochMetrics:
        step, time_ms = self.progress.step, _milliseconds_since(self._epoch_started)
        epoch = math.ceil(step / self.steps_per_epoch)
        return self.progress.epoch_metrics(epoch, val_loss, self._schedule(step), time_ms)

    def _record(self, record: Record) -> None:
        self.progress.append(record)
        self._metrics_file.write(self.progress)

    def _interrupted(self) -> TrainingInterrupted:
        step = self.progress.step
        if step == 0:
            return TrainingInterrupted(None, 0)
        return TrainingInterrupted(self._saver.save(f"step-{step}", self._checkpoint()), step)

    def _save_epoch(self, metrics: InstructEpochMetrics) -> None:
        saved = saves_epoch(metrics.epoch, self.config.epochs, self.config.save_every)
        self._save(metrics, f"epoch-{metrics.epoch}" if saved else None)

    def _save(self, metrics: InstructEpochMetrics, name: str | None) -> None:
        """Write what follows a validation: `best/` if it is, and the checkpoint of a name."""
        content = self._checkpoint(metrics)
        if self._is_best():
            self._saver.save_best(content)
        if name:
            self._saver.try_save(name, content)

    def _checkpoint(self, metrics: InstructEpochMetrics | None = None) -> CheckpointContent:
        """Capture the current state for a checkpoint."""
        best = self.progress.best
        metadata = {
            "task": "instruct",
            "step": self.progress.step,
            "total_steps": self.total_steps,
            "total_time_ms": _milliseconds_since(self._started),
            **asdict(metrics or self._epoch_metrics(None)),
            "best_epoch": self.progress.best_epoch,
            "best_step": best.step if best else None,
            "best_val_loss": best.val_loss if best else None,
            **self.pipeline.describe(),
            "data_hash": self._data_hash,
            "validation_hash": self.validation_hash(),
            "seed": self.config.seed,
            "config": self._run_config,
        }
        lines = partial(self.progress.lines, 0, len(self.progress))
        return CheckpointContent(self.pipeline.snapshot(), metadata, lines)


def _milliseconds_since(started: float) -> int:
    return round((time.perf_counter() - started) * 1000)
