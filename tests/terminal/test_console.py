"""What a run says to a terminal: one that is gone, and text that would act on it."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

import pytest
from rich.console import Console

from mlxtune.core.training.observer import RunStart
from mlxtune.core.training.progress import Progress
from mlxtune.errors import printable
from mlxtune.terminal.console import RunConsole, Surviving
from tests.core.training.records import step_record


class Gone(io.StringIO):
    """A terminal that has been closed after a while."""

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
    stream: Any = Surviving(terminal)
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


def test_bar_of_a_resumed_run_begins_where_the_run_stood() -> None:
    terminal = io.StringIO()
    console = RunConsole(console=Console(file=terminal, force_terminal=True, width=120))
    console.on_start(run_start(taken=7), None)
    assert console._progress is not None
    assert console._progress.tasks[0].completed == 7
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
