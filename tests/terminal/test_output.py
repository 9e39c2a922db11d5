"""What reaches stdout: JSON, and lines that no terminal obeys and every encoding has."""

from __future__ import annotations

import io
import json
import sys

import pytest

from mlxtune.terminal.output import can_print, print_answer, print_json, print_line


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


def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    assert can_print("plain")
    assert not can_print("→")
    print_line("a → b")
    print_answer("ü")
    assert written.getvalue() == b"a \\u2192 b\n\\u00fc"
