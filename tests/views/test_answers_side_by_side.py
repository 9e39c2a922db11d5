"""Two answers side by side on a terminal."""

from __future__ import annotations

import re

import pytest

from mlxtune.views.output import AnswerConsole


def test_answers_grow_in_columns_and_control_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    console = AnswerConsole(["base model", "adapter"])
    console.add("base model", "one two three four five six seven")
    console.add("adapter", "[b]eins\x1b[2J")
    console.close()
    out = capsys.readouterr().out
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.rpartition("base model")[2])
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[0].strip() == "adapter"
    assert lines[1].strip().startswith("one two three")
    assert "[b]eins\\x1b[2J" in shown
    assert "\x1b[2J" not in out
