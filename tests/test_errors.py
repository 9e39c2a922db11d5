"""The exception hierarchy, and one-line error messages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxtune
from mlxtune import errors
from mlxtune.errors import ConfigError, MlxTuneError, TrainingInterrupted, one_line

TREE = {
    "ConfigError": ValueError,
    "ModelError": ValueError,
    "DataError": ValueError,
    "OutputError": OSError,
    "MemoryLimitError": MemoryError,
    "GpuError": RuntimeError,
    "WorkerError": RuntimeError,
    "NonFiniteLossError": FloatingPointError,
}


def test_each_error_is_ours_and_the_standard_librarys_as_drawn() -> None:
    drawn = re.findall(r"[├└]── (\w+) .*\(also (\w+)\)", errors.__doc__ or "")
    assert drawn == [(name, base.__name__) for name, base in TREE.items()]

    for name, base in TREE.items():
        error = getattr(errors, name)
        assert issubclass(error, MlxTuneError)
        assert issubclass(error, base)
    found = {
        name
        for name, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, MlxTuneError) and one is not MlxTuneError
    }
    assert found == set(TREE)


def test_every_error_can_be_caught_from_the_package() -> None:
    for name in (*TREE, "MlxTuneError", "TrainingInterrupted"):
        assert name in mlxtune.__all__
        assert getattr(mlxtune, name) is getattr(errors, name)


def test_message_of_each_error_is_what_it_was_given() -> None:
    for name in TREE.keys() - {"ConfigError"}:
        assert str(getattr(errors, name)("chat.jsonl: is empty")) == "chat.jsonl: is empty"


def test_config_error_holds_all_problems_and_joins_them() -> None:
    error = ConfigError(["--rank must be at least 1, not 0", "--data is required"])

    assert error.problems == ["--rank must be at least 1, not 0", "--data is required"]
    assert str(error) == "--rank must be at least 1, not 0; --data is required"


def test_interrupt_is_no_mistake_and_no_plain_exception() -> None:
    interrupt = TrainingInterrupted(Path("checkpoints/step-7"), 7)

    assert isinstance(interrupt, KeyboardInterrupt)
    assert not isinstance(interrupt, Exception)
    assert (interrupt.checkpoint, interrupt.step) == (Path("checkpoints/step-7"), 7)
    assert interrupt.saved.endswith("resume with mlxtune train --resume checkpoints")
    assert str(interrupt) == (
        f"interrupted after step 7; {interrupt.saved}, or in Python with "
        "mlxtune.resume('checkpoints')"
    )
    short = TrainingInterrupted(Path("my out/checkpoints/step-7"), 7)
    assert "train --resume 'my out', or in Python with mlxtune.resume('my out')" in str(short)
    assert TrainingInterrupted(None, 0).saved == "nothing to save"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\n  two\t three\r\n"), "one two three"),
        (ValueError(), "ValueError"),
        (KeyError("name"), "'name'"),
        (ValueError("x" * 300), "x" * 300),
        (ValueError("x" * 301), "x" * 299 + "…"),
    ],
)
def test_another_librarys_message_becomes_one_bounded_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


@settings(deadline=None)
@given(st.text())
def test_one_line_is_never_more_and_never_empty(text: str) -> None:
    line = one_line(RuntimeError(text))

    assert line.splitlines() == [line]
    assert 0 < len(line) <= 300
