"""What a run says on stderr: rich on a terminal, plain lines when piped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from mlxtune.core import report
from mlxtune.core.metrics import InstructEpochMetrics, StepRecord
from mlxtune.core.trainer import InstructTrainer, TrainingObserver

_SMOOTHING = 0.9


class RunConsole(TrainingObserver):
    """Says each stage of a run in a line, and shows a live bar while it trains.

    `peak_gb` is asked for the peak memory. With `quiet`, only warnings are said.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        log_every: int = 10,
        peak_gb: Callable[[], float] = lambda: 0.0,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._log_every = log_every
        self._peak_gb = peak_gb
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total_steps = 0
        self._smoothed: float | None = None

    def say(self, stage: str, message: str) -> None:
        """Print one line of a stage; text from files is never read as markup."""
        if not self._quiet:
            self._print(Text.assemble((f"{stage:<11}", "bold"), message))

    def warn(self, message: str) -> None:
        """Print a warning, also when quiet."""
        self._print(Text.assemble(("warning: ", "yellow"), message))

    def _print(self, text: Text) -> None:
        # Plain lines stay whole when piped, so that they can be searched.
        self._console.print(text, soft_wrap=True)

    def on_start(self, trainer: InstructTrainer, previous: Path | None) -> None:
        """Say what will run, and open the bar on a terminal."""
        if previous is not None:
            self.say("Checkpoints", f"an earlier run's files were moved to {previous}")
        self._total_steps = trainer.total_steps
        if self._quiet or not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=self._total_steps, state="")
        self._progress.start()

    def on_step(self, record: StepRecord) -> None:
        """Move the bar, or print every so many steps when piped."""
        before = record.loss if self._smoothed is None else self._smoothed
        self._smoothed = _SMOOTHING * before + (1 - _SMOOTHING) * record.loss
        if self._progress is not None and self._task is not None:
            speed = record.tokens / max(record.seconds, 1e-9)
            state = (
                f"loss {record.loss:.3f} ~{self._smoothed:.3f}  lr {record.learning_rate:.2g}  "
                f"{speed:,.0f} tok/s  {self._peak_gb():.1f} GB"
            )
            self._progress.update(
                self._task,
                completed=record.step,
                description=f"step {record.step}/{self._total_steps}",
                state=state,
            )
        elif record.step % self._log_every == 0 or record.step == self._total_steps:
            line = report.step_line(record, self._total_steps, self._smoothed, self._peak_gb())
            self.say("Training", line)

    def on_evaluated(self, done: int, total: int) -> None:
        """Show how far a validation has come."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"validating {done}/{total}")

    def on_validation(self, step: int, loss: float) -> None:
        """Print the loss before the first step; those after an epoch stand in its line."""
        if step == 0:
            self.say("Validation", f"before training: {report.loss(loss)}")

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        """Print the epoch's result."""
        self.say("Training", report.epoch_line(metrics, best))

    def on_end(self) -> None:
        """Close the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
