"""A run's messages on a terminal, even after it is closed, and with control characters."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
from typing import Any

import pytest
from rich.console import Console

from mlxtune.core.run.metrics import ValidationRecord
from mlxtune.core.run.progress import Progress
from mlxtune.core.training.observer import RunStart
from mlxtune.errors import printable
from mlxtune.views.console import BestEffortStream, RunConsole, TerminalLine, print_stages
from tests.core.training.records import step_record


class Gone(io.StringIO):
    """A terminal that can be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_by_now = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed_by_now:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


def run_start(taken: int = 0) -> RunStart:
    progress = Progress(step_record(step) for step in range(1, taken + 1))
    return RunStart(
        total_steps=10, steps_per_epoch=10, epochs=1, train_rows=40, val_rows=0, progress=progress
    )


@pytest.mark.parametrize("closed_at", ["start", "step", "warning", "end"])
def test_run_goes_on_in_silence_when_its_terminal_is_gone(closed_at: str) -> None:
    terminal = Gone()
    stream: Any = BestEffortStream(terminal)
    console = RunConsole(console=Console(file=stream, force_terminal=True, width=100))
    actions = {
        "start": lambda: console.on_start(run_start(), None),
        "step": lambda: console.on_step(step_record(1)),
        "warning": lambda: console.warn("something"),
        "end": console.on_end,
    }
    for name, act in actions.items():
        if name == closed_at:
            terminal.closed_by_now = True
        act()
    console.on_step(step_record(2))
    console.say("Done", "nobody hears")
    console.close()


def test_validations_within_an_epoch_have_lines_and_say_which_is_the_best_so_far() -> None:
    terminal = io.StringIO()
    console = RunConsole(console=Console(file=terminal, width=120))
    taken = [step_record(1), ValidationRecord(1, 2.5, 12.0)]
    start = dataclasses.replace(run_start(), steps_per_epoch=4, progress=Progress(taken))
    console.on_start(start, None)
    # A loss after the last step of an epoch or run appears in the epoch's line instead.
    for step, loss in ((0, 1.0), (2, 3.0), (3, 2.0), (4, 1.5), (6, 1.5), (10, 1.0)):
        console.on_validation(step, loss)
    lines = [" ".join(line.split()) for line in terminal.getvalue().splitlines()]
    assert lines == [
        "Validation before training: 1.0000 (perplexity 2.718)",
        "Validation step 2 (epoch 0.50): 3.0000 (perplexity 20.09)",
        "Validation step 3 (epoch 0.75): 2.0000 (perplexity 7.389), best so far",
        "Validation step 6 (epoch 1.50): 1.5000 (perplexity 4.482)",
    ]


def test_bar_of_a_resumed_run_begins_where_the_run_stood() -> None:
    terminal = io.StringIO()
    console = RunConsole(console=Console(file=terminal, force_terminal=True, width=120))
    console.on_start(run_start(taken=7), None)
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
        ("two\nlines", "two\nlines"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_what_a_terminal_would_act_on_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    for message in (text, f"{text}: name of a file"):
        terminal = io.StringIO()
        RunConsole(console=Console(file=terminal, width=200)).warn(message)
        assert printable(message) in terminal.getvalue()


def test_heat_stands_in_each_line_for_as_long_as_it_slows_the_machine() -> None:
    terminal = io.StringIO()
    console = RunConsole(log_every=1, console=Console(file=terminal, width=200))
    console.on_start(run_start(), None)
    for step, state in enumerate(["", "serious", ""], 1):
        console.on_thermal(state)
        console.on_step(step_record(step))
    console.on_note("Power", "plugged in: training continues")
    *lines, note = terminal.getvalue().splitlines()
    assert [line.endswith("  thermal: serious") for line in lines] == [False, True, False]
    assert note.split() == ["Power", "plugged", "in:", "training", "continues"]


def test_heat_is_shown_on_the_bar() -> None:
    terminal = io.StringIO()
    console = RunConsole(console=Console(file=terminal, force_terminal=True, width=150))
    console.on_start(run_start(), None)
    console.on_thermal("fair")
    console.on_step(step_record(1))
    console.on_end()
    assert "thermal: fair" in terminal.getvalue()


# Results and verdicts

VERDICTS = {
    "the adapter helped: it takes 30% off": ("32", "helped"),
    "the adapter hurt: it adds 30% to": ("31", "hurt"),
    "the adapter hardly helped: it takes 0.4% off": ("33", "hardly helped"),
    "cannot tell whether the adapter helped: it": ("33", "cannot tell"),
}


@pytest.mark.parametrize("line", VERDICTS)
def test_verdict_has_its_colour_on_a_terminal(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    colour, words = VERDICTS[line]
    for wide in (True, False):  # on one line, and wrapped
        stream = io.StringIO()
        console = Console(
            file=stream, force_terminal=True, color_system="standard", width=100 if wide else 60
        )
        RunConsole(console=console).say("Verdict", line, copyable=not wide)
        assert f"\x1b[{colour}m{words}\x1b[0m" in stream.getvalue()
        RunConsole(console=console).say("Data", line)
        assert stream.getvalue().count(f"\x1b[{colour}m") == 1


def test_results_wrap_at_words_on_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Plan        " + "micro-batches of 384 tokens; " * 8, "a.jsonl:12", ""]
    print_stages(lines)
    assert capsys.readouterr().out == "\n".join([*lines, ""])

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    print_stages(lines)
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 80
    assert len(out) > len(lines)
    assert "".join(out).split() == " ".join(lines).split()
