"""The trainer: epochs, validation, early stopping, and when to save. It knows no mlx."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from mlxtune.config import InstructTrainingConfig
from mlxtune.core import batch, checkpoint
from mlxtune.core.corpus import Corpus
from mlxtune.core.encode import Example
from mlxtune.core.metrics import (
    InstructBatchResult,
    InstructEpochMetrics,
    MetricsLog,
    StepRecord,
    TrainingMetrics,
    perplexity,
)
from mlxtune.core.schedule import Schedule, make_schedule
from mlxtune.errors import NonFiniteLossError, TrainingInterrupted

_EVALUATED_AT_ONCE = 32


class Pipeline(Protocol):
    """What the trainer asks of a backend: a model, its LoRA matrices and an optimizer."""

    @property
    def learning_rate(self) -> float:
        """The peak learning rate, which the schedule scales."""

    def train_batch(
        self, examples: Sequence[Example], *, step: int, learning_rate: float
    ) -> InstructBatchResult:
        """Take one optimizer step on all examples.

        Raises NonFiniteLossError, and changes nothing, when the loss or gradient is not finite.
        """

    def evaluate(self, examples: Sequence[Example]) -> InstructBatchResult:
        """Return the loss over all supervised tokens of the examples."""

    def save(self, folder: Path) -> None:
        """Write the adapter into a folder that exists."""

    def load(self, folder: Path) -> None:
        """Read back what `save` wrote."""

    def describe(self) -> Mapping[str, Any]:
        """Return what a checkpoint says of the adapter: lora_rank, lora_alpha, targets, …"""


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

    def on_end(self) -> None:
        """Training ended, however it did."""


@dataclass(frozen=True)
class InstructTrainResult:
    """A run as a whole. Epochs count from 1.

    `best_epoch` is the one with the lowest validation loss and `best_val_loss` that loss, None
    without validation; `initial_val_loss` is the loss before the first step.
    """

    epoch_metrics: list[InstructEpochMetrics]
    best_epoch: int | None
    best_val_loss: float | None
    stopped_early: bool
    total_time_ms: int
    initial_val_loss: float | None
    steps: list[StepRecord]


class InstructTrainer:
    """Trains a pipeline on a corpus.

    `validation` replaces the split: its examples are evaluated and the whole corpus trains; when
    it is empty there is no validation. `run_config` is kept in each checkpoint. `should_stop` is
    asked after each step and while validating.

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
    ) -> None:
        if not corpus:
            raise ValueError("the corpus is empty: there is nothing to train on")
        self.pipeline = pipeline
        self.config = config
        corpus = Corpus.of(corpus)
        self._data_hash = corpus.data_hash()
        if validation is None:
            chosen, held_out = batch.split_rows(
                corpus.identities, config.val_split, config.seed, config.val_rows
            )
            self.train_rows, self.val_rows = corpus.select(chosen), corpus.select(held_out)
        else:
            self.train_rows, self.val_rows = corpus.select(), Corpus.of(validation).select()
        self.steps_per_epoch = math.ceil(len(self.train_rows) / config.batch_size)
        self.total_steps = config.epochs * self.steps_per_epoch
        if config.max_steps is not None:
            self.total_steps = min(self.total_steps, config.max_steps)
        self.metrics = TrainingMetrics(self.total_steps)
        self._schedule: Schedule = make_schedule(
            config.schedule,
            peak=pipeline.learning_rate,
            total_steps=self.total_steps,
            warmup_fraction=config.warmup_fraction,
            lr_min=config.lr_min,
        )
        self._folder = Path(config.checkpoint_dir)
        self._log = MetricsLog(self._folder / checkpoint.METRICS)
        self._run_config = dict(run_config) if run_config is not None else asdict(config)
        self._observer = observer or TrainingObserver()
        self._should_stop = should_stop
        self._saved: Path | None = None

    def data_hash(self) -> str:
        """Return `sha256:` over the whole corpus, before the split."""
        return self._data_hash

    @property
    def best_folder(self) -> Path:
        """The checkpoint of the best epoch."""
        return self._folder / "best"

    def train(self, records: Mapping[str, Any] | None = None) -> InstructTrainResult:
        """Run all epochs. `records` are written as JSON beside the checkpoints, by file name.

        Raises NonFiniteLossError, OutputError when a checkpoint cannot be written, and
        TrainingInterrupted, with the state saved, when `should_stop` said so.
        """
        checkpoint.make_folder(self._folder)
        previous = checkpoint.set_previous_aside(self._folder)
        for name, record in (records or {}).items():
            checkpoint.write_json(self._folder / name, record)
        started = time.perf_counter()
        self._observer.on_start(self, previous)
        try:
            initial = self._validate(started)
            epochs, best, stopped_early = self._run_epochs()
        except NonFiniteLossError as error:
            kept = (
                f"the last good checkpoint is {self._saved}"
                if self._saved
                else ("no checkpoint had been written")
            )
            raise NonFiniteLossError(f"{error}; {kept}") from error
        finally:
            self._observer.on_end()
        return InstructTrainResult(
            epoch_metrics=epochs,
            best_epoch=best.epoch if best else None,
            best_val_loss=best.val_loss if best else None,
            stopped_early=stopped_early,
            total_time_ms=_milliseconds_since(started),
            initial_val_loss=initial,
            steps=self.metrics.history,
        )

    def _run_epochs(
        self,
    ) -> tuple[list[InstructEpochMetrics], InstructEpochMetrics | None, bool]:
        epochs: list[InstructEpochMetrics] = []
        best: InstructEpochMetrics | None = None
        for epoch in range(1, self.config.epochs + 1):
            metrics = self._run_epoch(epoch)
            epochs.append(metrics)
            is_best = improves(metrics, best)
            self._log.write("epoch", metrics)
            self._observer.on_epoch(metrics, is_best)
            if saves_epoch(epoch, self.config.epochs, self.config.save_every):
                self._save(f"epoch-{epoch}", metrics)
            if is_best:
                best = metrics
                self._save("best", metrics)
            if self.metrics.is_complete():
                break
            if best and epoch - best.epoch >= self.config.early_stopping_patience:
                return epochs, best, True
        return epochs, best, False

    def _run_epoch(self, epoch: int) -> InstructEpochMetrics:
        started = time.perf_counter()
        for chosen in self._steps(epoch):
            if self.metrics.is_complete():
                break
            self._run_step(epoch, chosen)
            if self._should_stop():
                raise self._interrupted(started)
        return self._epoch_metrics(self._validate(started), started)

    def _steps(self, epoch: int) -> list[list[int]]:
        config = self.config
        return self.train_rows.steps(config.batch_size, config.order, config.seed, epoch)

    def _run_step(self, epoch: int, chosen: Sequence[int]) -> None:
        step = len(self.metrics.history) + 1
        learning_rate = self._schedule(step)
        started = time.perf_counter()
        result = self.pipeline.train_batch(
            [example for i in chosen for example in self.train_rows[i]],
            step=step,
            learning_rate=learning_rate,
        )
        record = StepRecord(
            step=step,
            epoch=epoch,
            loss=result.avg_loss,
            learning_rate=learning_rate,
            grad_norm=result.grad_norm or 0.0,
            perplexity=result.perplexity,
            tokens=result.total_tokens,
            supervised_tokens=result.total_response_tokens,
            rows=len(chosen),
            seconds=time.perf_counter() - started,
        )
        self.metrics.add(record)
        self._log.write("step", record)
        self._observer.on_step(record)

    def _validate(self, started: float) -> float | None:
        if not self.val_rows:
            return None
        step = len(self.metrics.history)
        # Neighbours in length share a micro-batch; the sum does not depend on the order.
        examples = sorted((example for row in self.val_rows for example in row), key=len)
        total, tokens = 0.0, 0
        for start in range(0, len(examples), _EVALUATED_AT_ONCE):
            end = min(start + _EVALUATED_AT_ONCE, len(examples))
            result = self.pipeline.evaluate(examples[start:end])
            total += result.avg_loss * result.total_response_tokens
            tokens += result.total_response_tokens
            self._observer.on_evaluated(end, len(examples))
            if self._should_stop():
                raise self._interrupted(started)
        loss = total / tokens
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the validation loss after step {step} is {loss}"
                f"{f' at learning rate {self._schedule(step):g}' if step else ''}: "
                "lower --lr, or check the model and --dtype"
            )
        values = {"step": step, "val_loss": loss, "val_perplexity": perplexity(loss)}
        self._log.write("validation", values)
        self._observer.on_validation(step, loss)
        return loss

    def _epoch_metrics(self, val_loss: float | None, started: float) -> InstructEpochMetrics:
        last = self.metrics.history[-1]
        steps = [record for record in self.metrics.history if record.epoch == last.epoch]
        train_loss = TrainingMetrics(len(steps), steps).average_loss() or 0.0
        training_seconds = sum(record.seconds for record in steps)
        return InstructEpochMetrics(
            epoch=last.epoch,
            train_loss=train_loss,
            train_perplexity=perplexity(train_loss),
            val_loss=val_loss,
            val_perplexity=None if val_loss is None else perplexity(val_loss),
            learning_rate=last.learning_rate,
            epoch_time_ms=_milliseconds_since(started),
            samples_per_sec=sum(record.rows for record in steps) / max(training_seconds, 1e-9),
        )

    def _interrupted(self, started: float) -> TrainingInterrupted:
        step = len(self.metrics.history)
        if step == 0:
            return TrainingInterrupted(None, 0)
        folder = self._save(f"step-{step}", self._epoch_metrics(None, started))
        return TrainingInterrupted(folder, step)

    def _save(self, name: str, metrics: InstructEpochMetrics) -> Path:
        folder = self._folder / name
        metadata = {
            "task": "instruct",
            "step": len(self.metrics.history),
            **asdict(metrics),
            **self.pipeline.describe(),
            "data_hash": self._data_hash,
            "seed": self.config.seed,
            "config": self._run_config,
        }
        checkpoint.write_checkpoint(folder, self.pipeline.save, metadata)
        self._saved = folder
        self._observer.on_checkpoint(folder)
        return folder


def improves(metrics: InstructEpochMetrics, best: InstructEpochMetrics | None) -> bool:
    """Tell whether an epoch has the lowest validation loss so far."""
    if metrics.val_loss is None:
        return False
    return best is None or best.val_loss is None or metrics.val_loss < best.val_loss


def saves_epoch(epoch: int, epochs: int, save_every: int) -> bool:
    """Tell whether `epoch-N/` is written: every `save_every`, or each when there are no more."""
    return epochs <= save_every or epoch % save_every == 0


def _milliseconds_since(started: float) -> int:
    return round((time.perf_counter() - started) * 1000)
