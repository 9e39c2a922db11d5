"""Output on stdout is JSON, lines without control characters, or answers as they stream."""

from __future__ import annotations

import json
import re

import pytest

from mlxtune.views.output import AnswerConsole, print_answer, print_json, print_line


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_is_one_document_or_nothing(number: float, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": [1.5, None]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"loss": [1.5, None]}
    assert out.endswith("}\n")
    with pytest.raises(ValueError, match="JSON"):
        print_json([1, 2, number])
    assert capsys.readouterr().out == ""


def test_line_and_answer_escape_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\x1b[2Jb\nc → d")
    print_line("warning", stderr=True)
    assert capsys.readouterr() == ("a\\x1b[2Jb\\nc → d\n", "warning\n")
    print_answer("a\n\tb\x1b[2J")
    assert capsys.readouterr().out == "a\n\tb\\x1b[2J"


def test_two_answers_stream_in_columns(
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
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == "adapter"
    assert lines[1].startswith("one two three")
    assert "[b]eins\\x1b[2J" in shown
    assert "\x1b[2J" not in out
