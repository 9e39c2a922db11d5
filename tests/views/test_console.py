"""A run's messages on a terminal, even after it is closed, and its live line in a notebook.

tests/test_notebook.py runs real kernels.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mlxtune.core.evaluation.outcome import Difference, Evaluation, Loss
from mlxtune.core.evaluation.verdict_text import verdict_lines
from mlxtune.core.run.metrics import ValidationRecord
from mlxtune.core.run.progress import Progress
from mlxtune.core.training.observer import RunStart
from mlxtune.errors import MlxTuneError, printable
from mlxtune.views import console as module
from mlxtune.views.console import (
    BestEffortStream,
    NotebookLine,
    RunConsole,
    TerminalLine,
    in_notebook,
    print_stages,
)
from tests.core.training.records import step_record


class ClosableTerminal(io.StringIO):
    """A terminal whose window can be closed."""

    is_gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


def run_start(taken: int = 0) -> RunStart:
    progress = Progress(step_record(step) for step in range(1, taken + 1))
    return RunStart(
        total_steps=10, steps_per_epoch=10, epochs=1, train_rows=40, val_rows=0, progress=progress
    )


def run_console(
    start: RunStart | None = None, *, terminal: bool = False, **options: Any
) -> tuple[RunConsole, io.StringIO]:
    """Return the console of a run that has started, and its output."""
    output = io.StringIO()
    console = RunConsole(
        console=Console(file=output, force_terminal=terminal, width=200), **options
    )
    console.on_start(start or run_start(), None)
    return console, output


@pytest.mark.parametrize("closed_at", ["start", "step", "warning", "end"])
def test_closed_terminal_does_not_stop_the_run(closed_at: str) -> None:
    terminal = ClosableTerminal()
    stream: Any = BestEffortStream(terminal)
    console = RunConsole(console=Console(file=stream, force_terminal=True, width=100))
    actions = {
        "start": lambda: console.on_start(run_start(), None),
        "step": lambda: console.on_step(step_record(1)),
        "warning": lambda: console.warn("something"),
        "end": console.on_end,
    }
    for name, act in actions.items():
        terminal.is_gone = terminal.is_gone or name == closed_at
        act()
    console.on_step(step_record(2))
    console.say("Done", "nobody hears")
    console.close()


def test_validation_within_an_epoch_has_a_line_that_marks_the_best() -> None:
    taken = [step_record(1), ValidationRecord(1, 2.5, 12.0)]
    start = dataclasses.replace(run_start(), steps_per_epoch=4, progress=Progress(taken))
    console, output = run_console(start)
    # A loss after the last step of an epoch or run appears in the epoch's line instead.
    for step, loss in ((0, 1.0), (2, 3.0), (3, 2.0), (4, 1.5), (6, 1.5), (10, 1.0)):
        console.on_validation(step, loss)
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert lines == [
        "Validation before training: 1.0000 (perplexity 2.718)",
        "Validation step 2 (epoch 0.50): 3.0000 (perplexity 20.09)",
        "Validation step 3 (epoch 0.75): 2.0000 (perplexity 7.389), best so far",
        "Validation step 6 (epoch 1.50): 1.5000 (perplexity 4.482)",
    ]


def test_bar_says_what_progresses() -> None:
    console, _ = run_console(terminal=True)
    assert isinstance(console._bar, TerminalLine)
    for show, text in (
        (console.on_sampled, "sampling 3/64"),
        (console.on_evaluated, "validating 3/64"),
    ):
        show(3, 64)
        assert console._bar.progress.tasks[0].description.strip() == text
    console.on_end()


def test_bar_of_a_resumed_run_starts_at_its_step() -> None:
    console, _ = run_console(run_start(taken=7), terminal=True)
    assert isinstance(console._bar, TerminalLine)
    assert console._bar.progress.tasks[0].completed == pytest.approx(0.7)
    console.on_end()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain – text, 你好 🙂", "plain – text, 你好 🙂"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\tc\x00", "a\\rb\\tc\\x00"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("two\nlines", "two\\nlines"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_control_characters_of_a_message_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    for message in (text, f"{text}: name of a file"):
        console, output = run_console()
        console.warn(message)
        assert printable(message) in output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("brief", [True, False])
def test_model_is_described_on_a_terminal_or_before_long_work(terminal: bool, brief: bool) -> None:
    stream = io.StringIO()
    console = RunConsole(brief=brief, console=Console(file=stream, force_terminal=terminal))
    console.describe("Model", "qwen3")
    assert ("qwen3" in stream.getvalue()) == (terminal or not brief)
    console.say("Done", "1 token")
    assert "1 token" in stream.getvalue()


def test_thermal_state_is_in_each_line_while_it_lasts_and_on_the_bar() -> None:
    console, output = run_console(log_every=1)
    for step, state in enumerate(["", "serious", ""], 1):
        console.on_thermal(state)
        console.on_step(step_record(step))
    console.on_note("Power", "plugged in: training continues")
    *lines, note = output.getvalue().splitlines()
    assert [line.endswith("  thermal: serious") for line in lines] == [False, True, False]
    assert note.split() == ["Power", "plugged", "in:", "training", "continues"]

    console, output = run_console(terminal=True)
    console.on_thermal("fair")
    console.on_step(step_record(1))
    console.on_end()
    assert "thermal: fair" in output.getvalue()


# Results and verdicts


@pytest.mark.parametrize(
    ("outcome", "color", "words"),
    [
        ({"verdict": "helped"}, "32", "helped"),
        ({"verdict": "hurt"}, "31", "hurt"),
        ({"verdict": "helped", "hardly": True}, "33", "hardly helped"),
        ({"verdict": "cannot tell"}, "33", "cannot tell"),
        ({"verdict": "hurt", "against": "helped/run"}, "31", "worse"),
    ],
)
def test_verdict_has_its_color_on_a_terminal(
    outcome: dict[str, Any], color: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The colour comes from the outcome, and not from words of the sentence."""
    monkeypatch.setenv("TERM", "xterm")
    difference = Difference(-0.5, -0.25, -0.6, -0.4, 0.95, 1000, 42)
    evaluation = Evaluation(40, 400, Loss(2, 7.4), Loss(1.5, 4.5), difference, **outcome)
    line = verdict_lines(evaluation)[0]
    for wide in (True, False):  # on one line, and wrapped
        stream = io.StringIO()
        console = Console(
            file=stream, force_terminal=True, color_system="standard", width=400 if wide else 60
        )
        RunConsole(console=console).say("Verdict", line, copyable=not wide, evaluation=evaluation)
        assert f"\x1b[{color}m{words}\x1b[0m" in stream.getvalue()
        RunConsole(console=console).say("Verdict", line)
        assert stream.getvalue().count(f"\x1b[{color}m") == 1


def test_results_wrap_at_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Plan        " + "micro-batches of 384 tokens; " * 8, "a.jsonl:12", ""]
    print_stages(lines)
    assert capsys.readouterr().out == "\n".join([*lines, ""])

    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    print_stages(lines)
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 80
    assert len(out) > len(lines)
    assert "".join(out).split() == " ".join(lines).split()

    stream = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    terminal = Console(file=stream, force_terminal=True, color_system=None, width=60)
    RunConsole(console=terminal).say("Plan", lines[0][12:])
    wrapped = stream.getvalue().splitlines()
    assert len(wrapped) > 3
    assert {line[:12].strip() for line in wrapped[1:]} == {""}, "indented"


# In a notebook


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The states that a notebook receives; its clock advances by a second at each reading."""
    states: list[dict[str, str]] = []

    def display(content: dict[str, str], **options: Any) -> SimpleNamespace:
        assert options == {"raw": True, "display_id": True}
        states.append(content)
        return SimpleNamespace(update=lambda content, raw: states.append(content))

    monkeypatch.setattr("IPython.display.display", display)
    seconds = iter(range(100))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    return states


def test_notebook_line_shows_progress_and_the_time_left(shown: list[dict[str, str]]) -> None:
    line = NotebookLine()
    line.update("step 1/10", 0.1)
    line.update("step 2/10", 0.2)
    line.update("validating <3>")
    line.close()
    texts = ["", "step 1/10", "step 2/10  8.0s left", "validating <3>", ""]
    assert [state["text/plain"] for state in shown] == texts
    assert '<progress max="1" value="0.2000">' in shown[2]["text/html"]
    assert "&lt;3&gt;" in shown[3]["text/html"]
    assert shown[-1]["text/html"] == ""


def test_notebook_line_skips_quick_updates(
    shown: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0))
    line = NotebookLine()
    for step in range(1, 4):
        line.update(f"step {step}/3", step / 3)
    assert [state["text/plain"] for state in shown] == ["", "step 1/3"]


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, expected in (
        (None, False),
        (SimpleNamespace(), False),  # IPython without a kernel
        (SimpleNamespace(kernel=object()), True),
    ):
        ipython = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert in_notebook() is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_console_outside_a_notebook_does_not_load_ipython() -> None:
    code = (
        "import sys; from mlxtune.views.console import RunConsole\n"
        "console = RunConsole(); console.show('a'); console.close()\n"
        "assert not {'IPython', 'ipywidgets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lines_of_a_run_from_python_name_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlxTuneError, "names_flags", False)
    console, output = run_console()
    console.warn("it rose: lower --lr 0.1")
    console.say("Next", "1 step is too few: try --auto")
    assert "it rose: lower lr=0.1" in output.getvalue()
    assert "too few: try auto=True" in output.getvalue()
