"""Output on stdout is JSON, or lines without control characters."""

from __future__ import annotations

import json

import pytest

from mlxtune.views.output import print_answer, print_json, print_line


def test_json_is_one_document_and_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": [1.5, None]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"loss": [1.5, None]}
    assert out.endswith("}\n")
    with pytest.raises(ValueError, match="JSON"):
        print_json({"loss": float("nan")})


def test_control_characters_of_a_line_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\x1b[2Jb\nc → d")
    print_line("warning", stderr=True)
    assert capsys.readouterr() == ("a\\x1b[2Jb\nc → d\n", "warning\n")


def test_answer_keeps_its_lines_and_controls_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_answer("a\n\tb\x1b[2J")
    assert capsys.readouterr().out == "a\n\tb\\x1b[2J"


def test_document_that_is_no_json_is_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json([1, 2, float("inf")])
    assert capsys.readouterr().out == ""
