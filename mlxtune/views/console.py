"""Prints a run's messages: with rich on a terminal, plainly in a pipe or a notebook.

Messages go to stderr, but in a notebook to stdout, because notebooks show stderr as an error.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from mlxtune.core.evaluation.outcome import HELPED, HURT, Evaluation
from mlxtune.core.evaluation.verdict_text import verdict_words
from mlxtune.core.formatting import duration, pluralize
from mlxtune.core.run.metrics import InstructEpochMetrics, StepRecord
from mlxtune.core.run.profile import StepProfile
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.errors import as_called, printable
from mlxtune.views import run_text
from mlxtune.views.first_result import COMPILING, FirstResult, Timer, start_timer
from mlxtune.views.output import print_line

_STAGE_WIDTH = 12
VERDICT = "Verdict"
# The displayed loss is the mean loss of this many steps.
_AVERAGED_STEPS = 10
_VERDICT_COLORS = {HELPED: "green", HURT: "red"}
# Minimum seconds between updates of a notebook's line, because every update goes to the browser.
_MIN_UPDATE_SECONDS = 0.1


class BestEffortStream:
    """A stream that ignores failed writes: a run continues when its terminal is closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RunConsole(TrainingObserver):
    """Prints each stage of a run on a line, and shows a live bar during training.

    `peak_gb` returns the peak memory so far. With `quiet`, only warnings are printed. With `brief`,
    for a command that gives a single answer and not one for each row of a file, the machine and the
    model are described only on a terminal. `start_timer` starts the timer of `await_result`.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        brief: bool = False,
        log_every: int = 10,
        peak_gb: Callable[[], float] = lambda: 0.0,
        console: Console | None = None,
        start_timer: Callable[[float, Callable[[], None]], Timer] = start_timer,
    ) -> None:
        self._notebook = console is None and in_notebook()
        stream = cast(TextIO, BestEffortStream(sys.stdout if self._notebook else sys.stderr))
        self._console = console or Console(file=stream, highlight=False, force_jupyter=False)
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        # The stream of a notebook's kernel claims to be a terminal.
        self._wraps = terminal and not self._notebook
        self._quiet, self._brief = quiet, brief
        self._log_every = log_every
        self._peak_gb = peak_gb
        # The line of the current activity, until another line is printed, and the bar of a run.
        self._activity: NotebookLine | TerminalLine | None = None
        self._bar: NotebookLine | TerminalLine | None = None
        self._run: RunStart | None = None
        self._best = math.inf
        self._losses: deque[float] = deque(maxlen=_AVERAGED_STEPS)
        self._thermal = ""
        self._profile = run_text.ProfileSummary()
        # A timer's thread prints too.
        self._printing = threading.RLock()
        self._first = FirstResult(lambda: self.say("Kernels", COMPILING), start_timer)

    def _open_line(self, *, bar: bool) -> "NotebookLine | TerminalLine | None":
        """Return a line that changes in place; None if quiet or not live."""
        if self._quiet or not self.is_live:
            return None
        return NotebookLine() if self._notebook else TerminalLine(self._console, bar=bar)

    @property
    def is_live(self) -> bool:
        """True if a line can change in place: on a terminal or in a notebook."""
        return self._notebook or self._wraps

    @property
    def stopping(self) -> str:
        again = "interrupt the kernel again" if self._notebook else "press Ctrl-C again"
        return f"stopping after this step; {again} to stop at once"

    def say(
        self,
        stage: str,
        message: str,
        *,
        copyable: bool = False,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Print a message with the name of its stage, and escape markup in it.

        On a terminal, wrap a long message at words, indented, unless it is `copyable`, and colour
        the verdict of its `evaluation`.
        """
        if self._quiet:
            return
        name = Text(f"{stage:<{_STAGE_WIDTH}}", "bold")
        self._line(name, message, wrap=not copyable, evaluation=evaluation)

    def describe(self, stage: str, message: str) -> None:
        """Print a line about the machine or the model."""
        if self.is_live or not self._brief:
            self.say(stage, message)

    def warn(self, message: str) -> None:
        self._line(Text("warning: ", "yellow"), message, wrap=True)

    def await_result(self) -> None:
        """Wait for a GPU's first result, and report that kernels compile if it is late.

        A step, a validated example, other progress, or `result_arrived` is a result.
        """
        if not self._quiet:
            self._first.wait()

    def result_arrived(self) -> None:
        self._first.arrived()

    def on_encoding(self, path: Path, rows: int) -> None:
        self.show(f"encoding {path}: {pluralize(rows, 'row')}")

    def show(self, text: str) -> None:
        self.result_arrived()
        with self._printing:
            self._activity = self._activity or self._open_line(bar=False)
            if self._activity is not None:
                self._activity.update(printable(text))

    def close(self) -> None:
        """End the line of the current activity, and wait for no result."""
        self._first.stop()
        self._end_activity()

    def _end_activity(self) -> None:
        with self._printing:
            if self._activity is not None:
                self._activity.close()
                self._activity = None

    def _line(
        self, name: Text, message: str, *, wrap: bool, evaluation: Evaluation | None = None
    ) -> None:
        text = _marked(printable(as_called(message)), evaluation)
        with self._printing:
            self._end_activity()
            if not (self._wraps and wrap):
                self._console.print(Text.assemble(name, text), soft_wrap=True)
                return
            self._console.print(_wrapped(name, text))

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        if previous is not None:
            self.say(
                "Checkpoints",
                f"an earlier run was moved to {previous}: use it with --adapter {previous}",
            )
        self._run = run
        self._best = best.val_loss if (best := run.progress.best) else math.inf
        self._losses.extend(run.progress.steps.column("loss"))
        self._bar = self._open_line(bar=True)
        if self._bar is not None and run.progress.step:
            self._bar.update("starting", run.progress.step / run.total_steps)

    def on_step(self, record: StepRecord) -> None:
        assert self._run is not None
        self.result_arrived()
        self._losses.append(record.loss)
        average, total = fmean(self._losses), self._run.total_steps
        if self._bar is not None:
            position = f"epoch {record.epoch}/{self._run.epochs} step {record.step}/{total}"
            state = run_text.step_state(record, average, self._peak_gb(), self._thermal)
            self._bar.update(f"{position}  {state}", record.step / total)
        elif record.step % self._log_every == 0 or record.step == total:
            line = run_text.step_line(record, total, average, self._peak_gb(), self._thermal)
            self.say("Training", line)

    def on_evaluated(self, done: int, total: int) -> None:
        self._show_progress("validating", done, total)

    def on_sampled(self, done: int, total: int) -> None:
        self._show_progress("sampling", done, total)

    def _show_progress(self, activity: str, done: int, total: int) -> None:
        self.result_arrived()
        if self._bar is not None:
            self._bar.update(f"{activity} {done}/{total}")

    def on_validation(self, step: int, loss: float) -> None:
        """Print a validation loss before the first step or within an epoch.

        `on_epoch` prints the loss at the end of an epoch.
        """
        assert self._run is not None
        if step == 0:
            shown = run_text.loss_and_perplexity(loss, self._run.objective)
            self.say("Validation", f"before training: {shown}")
            return
        is_best, self._best = loss < self._best, min(loss, self._best)
        per_epoch = self._run.steps_per_epoch
        if step % per_epoch and step < self._run.total_steps:
            line = run_text.validation_line(
                step, step / per_epoch, loss, is_best, self._run.objective
            )
            self.say("Validation", line)

    def on_profile(self, profile: StepProfile) -> None:
        self._profile.add(profile)
        self.say("Profile", run_text.profile_line(profile), copyable=True)

    def on_problem(self, message: str) -> None:
        self.warn(message)

    def on_note(self, topic: str, message: str) -> None:
        self.say(topic, message)

    def on_thermal(self, state: str) -> None:
        self._thermal = state

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        assert self._run is not None
        initial = self._run.progress.initial_val_loss
        line = run_text.epoch_line(metrics, best, self._run.objective, initial)
        self.say("Training", line)

    def on_end(self) -> None:
        self._first.stop()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for number, line in enumerate(run_text.profile_table(self._profile)):
            self.say("" if number else "Profile", line, copyable=True)


def print_stages(lines: Iterable[str], evaluation: Evaluation | None = None) -> None:
    """Print results on stdout; each line starts with a stage, or with spaces in its place.

    On a terminal, lines wrap at words and the verdict of the `evaluation` is coloured.
    """
    console = Console(highlight=False)
    for line in map(printable, lines):
        name, message = line[:_STAGE_WIDTH], line[_STAGE_WIDTH:]
        if console.is_terminal and name.endswith(" ") and message:
            judged = evaluation if name.strip() == VERDICT else None
            console.print(_wrapped(Text(name, "bold"), _marked(message, judged)))
        else:
            print_line(line)


def _wrapped(name: Text, message: Text) -> Table:
    line = Table.grid()
    line.add_row(name, message)
    return line


def _marked(message: str, evaluation: Evaluation | None) -> Text:
    """Return a message with the verdict of its evaluation in colour."""
    text, words = Text(message), "" if evaluation is None else verdict_words(evaluation)
    if evaluation is not None and words and (start := message.find(words)) >= 0:
        clear = "" if evaluation.hardly else str(evaluation.verdict)
        text.stylize(_VERDICT_COLORS.get(clear, "yellow"), start, start + len(words))
    return text


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class TerminalLine:
    """The last line of a terminal: text and, with `bar`, a progress bar and the time left."""

    def __init__(self, console: Console, *, bar: bool) -> None:
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=bar))
        columns = (text, BarColumn(None), TimeRemainingColumn(compact=True))
        self.progress = Progress(
            *(columns if bar else (SpinnerColumn(), text)),
            console=console,
            transient=True,
            expand=bar,
        )
        self._task = self.progress.add_task("starting" if bar else "", total=1.0)
        self._progressed = False
        self.progress.start()

    def update(self, text: str, fraction: float | None = None) -> None:
        """Show `text`; redraw at once at the first `fraction`, as the run may end before a
        refresh.
        """
        first = fraction is not None and not self._progressed
        self._progressed = self._progressed or first
        self.progress.update(self._task, description=text, completed=fraction, refresh=first)

    def close(self) -> None:
        self.progress.stop()


class NotebookLine:
    """A line in a notebook, with a bar and the time left if the progress is known."""

    def __init__(self) -> None:
        from IPython.display import display

        self._shown = -math.inf
        self._first: tuple[float, float] | None = None
        self._handle = display(_content(""), raw=True, display_id=True)

    def update(self, text: str, fraction: float | None = None) -> None:
        now = time.monotonic()
        if now - self._shown < _MIN_UPDATE_SECONDS:
            return
        self._shown = now
        if fraction is not None:
            self._first = self._first or (now, fraction)
            started, before = self._first
            if fraction > before:
                text += f"  {duration((now - started) * (1 - fraction) / (fraction - before))} left"
        self._handle.update(_content(text, fraction), raw=True)

    def close(self) -> None:
        self._handle.update(_content(""), raw=True)


def _content(text: str, fraction: float | None = None) -> dict[str, Any]:
    bar = "" if fraction is None else f'<progress max="1" value="{fraction:.4f}"></progress> '
    html = f'<div style="font-family: monospace">{bar}{escape(text)}</div>' if text else ""
    return {"text/plain": text, "text/html": html}
