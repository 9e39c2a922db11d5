"""The trainer: one loop over steps, validation and early stopping. It does not use mlx."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.config import InstructTrainingConfig
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import Example
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.files.writing import make_folder, write_file, write_json
from mlxtune.core.objectives import preference_rows
from mlxtune.core.objectives.objective import SFT
from mlxtune.core.objectives.policy import StepObjective
from mlxtune.core.objectives.preference_rows import PreferenceRows
from mlxtune.core.run import run_folder
from mlxtune.core.run.checkpoint import BEST
from mlxtune.core.run.metrics import (
    FileLoss,
    InstructBatchResult,
    InstructTrainResult,
    SkippedStep,
    TrainingMetrics,
    ValidationRecord,
)
from mlxtune.core.run.profile import StepProfiler
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.run_folder import ResumePoint
from mlxtune.core.run.saving import Snapshot
from mlxtune.core.steps import order
from mlxtune.core.training.machine_monitor import MachineMonitor
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.core.training.pipeline import Pipeline, RowSource, Step, StepSource
from mlxtune.core.training.recorder import RunRecorder
from mlxtune.core.training.requests import RequestExchange, Requests
from mlxtune.core.training.schedule import count_steps, schedule_of
from mlxtune.errors import NonFiniteLossError

# A run ends after this many consecutive steps without a finite loss and gradient.
_MAX_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class _RunningStep:
    """A step that the pipeline has started: its handle, and the metrics known before its result.

    `drawing` is the time that drawing its samples took, in seconds.
    """

    step: Step
    handle: object
    metrics: Mapping[str, float]
    drawing: float


class InstructTrainer:
    """Trains a pipeline on a corpus.

        pipeline      minimises `objective`
        corpus        the examples, or `RunRows`, whose validation rows are already selected
        validation    examples to evaluate, perhaps none; no rows of `corpus` are then held out
        run_config    the options to save in each checkpoint; default: `config`
        observer      receives the run's events
        should_stop   called after each step and during validation; the run stops once it is true
        stop_after    the step after which the run stops
        profiler      times the phases of some steps
        monitor       answers the machine's memory pressure, battery, heat and sleep
        objective     decides the examples of a row and, for preferences, the need of a reference
        cache         keeps the reference's log-probabilities, besides the run's folder
        source        supplies the examples of the steps; default: the rows' examples

    Several workers stop and save together, after a step. `progress` has the records of the run so
    far, and `best_folder` the checkpoint of the best validation.

    Raises ValueError when the corpus is empty or too small to hold rows out.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        corpus: Sequence[Example] | RunRows,
        config: InstructTrainingConfig,
        *,
        validation: Sequence[Example] | None = None,
        run_config: Mapping[str, Any] | None = None,
        observer: TrainingObserver | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        stop_after: int | None = None,
        profiler: StepProfiler | None = None,
        monitor: MachineMonitor | None = None,
        objective: StepObjective = SFT,
        cache: Path | None = None,
        source: StepSource | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.config = config
        rows = _selected_rows(corpus, validation, config)
        self._data_hash = rows.train.corpus.data_hash()
        self.train_rows, self.val_rows = (
            preference_rows.of_objective(each, objective) for each in (rows.train, rows.validation)
        )
        self.objective, self._cache = objective, cache
        self._source = source or RowSource(pipeline)
        self.steps_per_epoch, self.total_steps = count_steps(
            config, len(order.rows_of_epoch(self.train_rows, config.seed, 1)), self._source.updates
        )
        self.learning_rate = pipeline.learning_rate if config.lr is None else config.lr
        self._schedule = schedule_of(config, self.learning_rate, self.total_steps)
        self._folder = Path(config.checkpoint_dir)
        self.best_folder = self._folder / BEST
        self._observer = observer or TrainingObserver()
        self._should_stop = should_stop
        self._stop_after = stop_after
        self._requests = RequestExchange(pipeline.world_size)
        self._profiler = profiler
        self._monitor = monitor or MachineMonitor()
        self.progress = Progress()
        self._recorder = RunRecorder(
            pipeline,
            config,
            self.progress,
            self._observer,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
            schedule=self._schedule,
            metadata={
                **self.data_hashes(),
                "seed": config.seed,
                "config": dict(run_config) if run_config is not None else asdict(config),
            },
            facts_at=self._source.checkpoint_facts,
        )
        self._running: _RunningStep | None = None
        self._step_ended = time.perf_counter()
        # When the source started to draw samples for a step, and the seconds that it took.
        self._draw_started: float | None = None
        self._drawing = 0.0

    @property
    def unwritten_best(self) -> Snapshot | None:
        """The state after the best validation while `best_folder` cannot be written, else None."""
        pending = self._recorder.saver.pending_best
        return None if pending is None else pending.snapshot

    @property
    def metrics(self) -> TrainingMetrics:
        """The steps of the run so far."""
        return TrainingMetrics(self.total_steps, self.progress.steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self._schedule(step)

    def data_hash(self) -> str:
        """Return `sha256:HASH` of the whole corpus, held-out rows included."""
        return self._data_hash

    def validation_hash(self) -> str:
        """Return `sha256:HASH` of the data of the validation rows; empty if there are none."""
        corpus = self.val_rows.corpus
        held_out = bool(self.val_rows) and corpus is self.train_rows.corpus
        return self._data_hash if held_out else corpus.data_hash() if self.val_rows else ""

    def data_hashes(self) -> dict[str, str]:
        """Return the data's hashes, by their names in a checkpoint's metadata."""
        hashes = {"data_hash": self.data_hash(), "validation_hash": self.validation_hash()}
        return {**hashes, **self._source.describe()}

    def describe(self) -> dict[str, Any]:
        """Return the facts in a checkpoint's metadata that a resumed run must share."""
        return {**self.pipeline.describe(), **self.data_hashes()}

    def train(
        self,
        files: Mapping[str, Any] | None = None,
        *,
        resume: ResumePoint | None = None,
        write_adapter: Callable[[InstructTrainResult], None] | None = None,
    ) -> InstructTrainResult:
        """Take all steps, or the steps after the checkpoint to resume from.

        `files` are JSON values or bytes by file name, written to the run's folder. An interrupt
        before the first step removes these files. `write_adapter` writes the adapter of the run's
        result, before the last checkpoints are written.

        Raises NonFiniteLossError, MemoryLimitError or GpuError if a step cannot be taken,
        OutputError if the best or last checkpoint cannot be written, ModelError if the checkpoint
        does not fit the model, and TrainingInterrupted, with the state saved, once `should_stop`
        returns true.
        """
        make_folder(self._folder)
        previous = None if resume else run_folder.archive_previous_run(self._folder)
        if resume is not None:
            self._recorder.continue_from(resume)
        try:
            with self._removing_unstarted_run(resume), self._recorder.adding_checkpoint_to_errors():
                self._begin(files or {}, resume, previous)
                over = self._validate_and_end_epoch(self.progress.step)
                if self._stop_after == 0:
                    self._recorder.save_and_interrupt()
                for step in () if over else self._remaining_steps():
                    halved = self._respond_to_machine(step)
                    with self._timing_draw():
                        data = self._source.examples_of(
                            self.train_rows, step, self._on_draw_progress
                        )
                    with self._profiler.step(step.number) if self._profiler else nullcontext():
                        handle = self.pipeline.start_batch(
                            data.examples,
                            step=step.number,
                            learning_rate=step.learning_rate,
                            requests=self._requests.sent,
                        )
                        if self._profiler:
                            # While a step is profiled, no other step may run.
                            self.pipeline.wait(handle)
                    # A step's results are read while the device computes the next step.
                    self._record_running_step()
                    self._running = _RunningStep(step, handle, data.metrics, self._drawing)
                    self._drawing = 0.0
                    self._stop_or_save(step, halved)
                    if self._validate_and_end_epoch(step.number):
                        break
                result = self._recorder.finish(self.progress.step < self.total_steps, write_adapter)
                self._observer.on_result(result)
        finally:
            self._observer.on_end()
        return result

    def _begin(
        self, files: Mapping[str, Any], resume: ResumePoint | None, previous: Path | None
    ) -> None:
        """Write the run's files, compute the reference, and restore a run that stopped."""
        for name, content in files.items():
            if isinstance(content, bytes):
                write_file(self._folder / name, [content])
            else:
                write_json(self._folder / name, content)
        self._recorder.add_file_hashes(files)
        self._recorder.start_timing()
        self._load_reference_logps(resume)
        if resume is not None:
            self._recorder.resume(resume, self._validates_within)
        start = RunStart(
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.config.epochs,
            train_rows=len(self.train_rows),
            val_rows=len(self.val_rows),
            progress=self.progress,
            objective=self.objective.name,
        )
        self._observer.on_start(start, previous)

    @contextmanager
    def _removing_unstarted_run(self, resume: ResumePoint | None) -> Iterator[None]:
        """Remove the run's files if the run is interrupted before its first step."""
        try:
            yield
        except KeyboardInterrupt:
            if resume is None and not self.progress.step:
                run_folder.discard_unstarted(self._folder)
            raise

    def _load_reference_logps(self, resume: ResumePoint | None) -> None:
        """Give the preference rows the reference's log-probabilities.

        A new run computes them before its first step unless they are cached; a resumed run must
        find them.
        """
        if self.objective.needs_reference:
            self.train_rows, self.val_rows = preference_rows.with_reference_logps(
                [
                    PreferenceRows.of(each, self.objective)
                    for each in (self.train_rows, self.val_rows)
                ],
                self.pipeline.reference(),
                self._folder / run_folder.REFERENCE,
                self._cache,
                self._reference_logps,
                None if resume is None else resume.checkpoint.run / run_folder.REFERENCE,
            )

    def _reference_logps(self, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        def evaluated(done: int) -> None:
            self._observer.on_evaluated(done, len(examples))
            self._stop_if_requested()

        self._observer.on_note("Reference", f"log-probabilities of {len(examples):,} answers")
        return self.pipeline.logps(examples, evaluated)

    def _remaining_steps(self) -> Iterator[Step]:
        """Yield the steps after the last recorded step, in order."""
        config, rows = self.config, self.train_rows

        @lru_cache(1)
        def steps_of(epoch: int) -> list[list[int]]:
            return order.steps_of(rows, config.batch_size, config.order, config.seed, epoch)

        for number in range(self.progress.step, self.total_steps):
            epoch, index = divmod(number, self.steps_per_epoch)
            rollout = order.RolloutOfStep.of(index + 1, self._source.updates)
            indices = steps_of(epoch + 1)[rollout.number - 1]
            yield Step(number + 1, epoch + 1, self._schedule(number + 1), indices)

    @contextmanager
    def _timing_draw(self) -> Iterator[None]:
        """Count the time of drawing samples for the next step, if any are drawn."""
        self._draw_started = None
        yield
        if self._draw_started is not None:
            self._drawing += time.perf_counter() - self._draw_started

    def _on_draw_progress(self, done: int, total: int) -> None:
        """Show the progress of work before a step, which starts from the running step's update."""
        self._record_running_step()
        if self._draw_started is None:
            self._draw_started = time.perf_counter()
        self._observer.on_sampled(done, total)
        self._stop_if_requested()

    def _respond_to_machine(self, step: Step) -> bool:
        """Release memory or pause before a step, if the machine's conditions demand it.

        Return whether micro-batches were halved.
        """
        done = step.number - 1
        if (demand := self._monitor.check(done)) is None:
            return False
        self._record_running_step()

        def examples() -> Sequence[Example]:
            with self._timing_draw():
                data = self._source.examples_of(self.train_rows, step, self._on_draw_progress)
            return data.examples

        halved = self._monitor.respond(demand, self.pipeline, examples, done)
        self._stop_if_requested()
        return halved

    def _stop_or_save(self, step: Step, halved: bool) -> None:
        """Stop or save after a step that has started, if asked to or if a checkpoint is due."""
        number, saver = step.number, self._recorder.saver
        own = Requests(self._should_stop(), saver.asks_for_save(number, halved=halved))
        agreed = self._requests.exchange(own)
        stopping = agreed.stop or number == self._stop_after
        saving = agreed.save or saver.is_due(number)
        if stopping or saving or self._profiler:
            self._record_running_step()
        if stopping:
            self._recorder.save_and_interrupt()
        # A validation within the epoch saves its own checkpoint.
        if saving and not self._validates_within(number):
            self._recorder.save_step()

    def _stop_if_requested(self) -> None:
        """Stop between two steps, if asked to; several workers stop only together, after a step."""
        if self.pipeline.world_size == 1 and self._should_stop():
            self._recorder.save_and_interrupt()

    def _validates_within(self, step: int) -> bool:
        """Return whether the run validates after a step only because of --val-steps."""
        every = self.config.val_steps
        if every is None or not self.val_rows or self._ends_epoch(step):
            return False
        return step % every == 0

    def _ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0 or step >= self.total_steps

    def _validate_and_end_epoch(self, step: int) -> bool:
        """Validate after a step if it is time, and end the epoch that ends there, if any.

        Return whether the run is over. A new run validates before its first step.
        """
        within, ends_epoch = self._validates_within(step), self._ends_epoch(step)
        if not (within or ends_epoch):
            return False
        self._record_running_step()
        epoch = math.ceil(step / self.steps_per_epoch)
        if ends_epoch:
            self._check_epoch(epoch)
        val_loss = self._validate()
        if within:
            self._recorder.save_validated(val_loss)
        out_of_patience = self.progress.validations_since_best >= self.config.patience
        if within and out_of_patience:
            self._check_epoch(epoch)
        if step and (ends_epoch or out_of_patience):
            self._recorder.end_epoch(epoch, val_loss)
        return step >= self.total_steps or out_of_patience

    def _check_epoch(self, epoch: int) -> None:
        """Raise NonFiniteLossError if no step of an epoch was applied; epoch 0 has no steps."""
        steps = self.progress.steps
        if epoch and (not steps or steps[-1].epoch != epoch):
            raise NonFiniteLossError(
                f"no step of epoch {epoch} had a finite loss and gradient: lower --lr"
            )

    def _record_running_step(self) -> None:
        """Wait for the step that is running, if any, and record it.

        Called once the next step has started and, earlier, before anything that needs the result
        or an idle device.
        """
        running, self._running = self._running, None
        if running is None:
            return
        step = running.step
        outcome = self.pipeline.wait(running.handle)
        self._requests.receive(outcome.agreed)
        try:
            result = outcome.result()
        except NonFiniteLossError as error:
            rows = [self.train_rows.where(i) for i in step.row_indices]
            if self._profiler:
                self._profiler.discard()
            skipped = SkippedStep(
                step.number, step.epoch, step.learning_rate, error.with_flags, rows
            )
            self._skip(skipped, error)
            return
        # The step may have waited for the previous step.
        started, self._step_ended = max(outcome.started, self._step_ended), outcome.ended
        seconds = self._step_ended - started + running.drawing
        is_of_rows = not self.objective.is_sft
        record = step.record(result, seconds, running.metrics, is_of_rows=is_of_rows)
        self._recorder.add(record)
        self._observer.on_step(record)
        if self._profiler:
            self._profiler.record()

    def _skip(self, skipped: SkippedStep, error: NonFiniteLossError) -> None:
        self._recorder.add(skipped)
        problem = f"{error}; its rows: {skipped.rows_text()}"
        in_a_row = self.progress.consecutive_skips
        if self.config.on_nonfinite == "stop":
            raise NonFiniteLossError(problem) from error
        if in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(f"{problem}; skipped {in_a_row} steps in a row") from error
        self._observer.on_problem(f"{problem}; training continues with the next step")

    def _validate(self) -> float | None:
        if not self.val_rows:
            return None
        step = self.progress.step
        if (last := self.progress.validations[-1:]) and last[0].step == step:
            return last[0].val_loss
        result, files = self._evaluate()
        loss = result.avg_loss
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the validation loss after step {step} is {loss}"
                + (
                    f" at learning rate {self._schedule(step):g}: lower --lr, or check the model "
                    "and --dtype"
                    if step
                    else ": check the model, --alpha and --dtype"
                )
            )
        record = ValidationRecord(step, loss, perplexity(loss), result.metrics, files)
        self._recorder.add(record)
        self._observer.on_validation(step, loss)
        return loss

    def _evaluate(self) -> tuple[InstructBatchResult, list[FileLoss]]:
        """Evaluate all validation rows; return the loss of each file too, if there are several."""

        def evaluated(done: int, total: int) -> None:
            self._observer.on_evaluated(done, total)
            self._stop_if_requested()

        return self._source.evaluate(self.val_rows, evaluated)


def _selected_rows(
    corpus: Sequence[Example] | RunRows,
    validation: Sequence[Example] | None,
    config: InstructTrainingConfig,
) -> RunRows:
    """Return given rows unchanged; select the rows of examples."""
    if isinstance(corpus, RunRows):
        return corpus
    if not corpus:
        raise ValueError("the corpus is empty: there is nothing to train on")
    corpus_of_validation = None if validation is None else Corpus.of(validation)
    return RunRows.of(
        Corpus.of(corpus), corpus_of_validation, config.val_split, config.seed, config.val_rows
    )
