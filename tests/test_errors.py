"""The exception hierarchy, and one-line error messages."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxtune
from mlxtune import errors
from mlxtune.errors import (
    ConfigError,
    DataError,
    MlxTuneError,
    TrainingInterrupted,
    in_keywords,
    one_line,
)
from tests.sources import PACKAGE, tree_of

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
        assert str(getattr(errors, name)("chat.jsonl is empty")) == "chat.jsonl is empty"


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


# Python's names of options


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make messages name options as they do outside the command line."""
    monkeypatch.setattr(MlxTuneError, "names_flags", False)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("--data is required; --lr must be above 0", "data is required; lr must be above 0"),
        (
            "set --val-split 0, or use --max-seq-len 2,048",
            "set val_split=0, or use max_seq_len=2048",
        ),
        ("use --dtype float32", 'use dtype="float32"'),
        ("use --field text=KEY", 'use field="text=KEY"'),
        ("pass --model-path 'my model'", 'pass model_path="my model"'),
        ("--merge is for --format gguf: leave it", 'merge is for format="gguf": leave it'),
        ("a/--data.jsonl is empty", "a/--data.jsonl is empty"),
        ("resume it with mlxtune train --resume out", "resume it with mlxtune train --resume out"),
        (
            "needs pyarrow: pip install --upgrade x: --data",
            "needs pyarrow: pip install --upgrade x: data",
        ),
    ],
)
def test_flags_become_keywords_except_in_commands(message: str, shown: str) -> None:
    assert in_keywords(message) == shown


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("name", [each for each in mlxtune.__all__ if each.endswith("Config")])
def test_problem_of_each_option_names_its_keyword(name: str) -> None:
    config = getattr(mlxtune, name)
    for field in inspect.signature(config).parameters.keys() - config.ignored:
        with pytest.raises(ConfigError) as raised:
            config(**{field: object()})
        assert f"{field} must " in str(raised.value)
        assert "--" not in str(raised.value)


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize(
    "name", [each for each in mlxtune.__all__ if inspect.isfunction(getattr(mlxtune, each))]
)
def test_error_of_each_function_names_no_flag(name: str, tmp_path: Path) -> None:
    function = getattr(mlxtune, name)
    missing = str(tmp_path / "missing")
    takes: dict[str, Any] = {
        "doctor": {},
        "prove": {},
        "push": {"run": missing, "repository": "me/x"},
        "report": {"runs": [missing]},
        "resume": {"run": missing},
        "runs": {"folders": [missing]},
        "verify": {"run": missing},
    }
    if name in ("doctor", "prove"):
        return  # they take no option, and report problems instead of raising
    arguments = takes.get(name, {"model_path": missing, "rank": "many", "unknown": 1})
    with pytest.raises(MlxTuneError) as raised:
        function(*arguments.values()) if name in takes else function(**arguments)
    assert not re.search(r"(?<!mlxtune train )--[a-z]", str(raised.value))


def _raised_texts(tree: ast.AST) -> Iterator[str]:
    """Yield the constant texts in statements that raise, with x for each value in a text."""
    for node in ast.walk(tree):
        for each in ast.walk(node) if isinstance(node, ast.Raise) else ():
            if isinstance(each, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "x" for p in each.values)
                yield "".join(map(str, parts))
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value


def test_no_raised_text_keeps_a_flag_outside_a_command() -> None:
    folders = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "cli"]
    texts = [text for path in folders for text in _raised_texts(tree_of(path)) if "--" in text]
    kept = [text for text in texts if re.search(r"(?<!\w)--[a-z]", in_keywords(text))]
    assert len(texts) > 50
    assert [text for text in kept if not re.search(r"mlxtune|pip install|hf |mlx[._]", text)] == []


@pytest.mark.usefixtures("in_python")
def test_option_of_another_config_is_named_with_the_config() -> None:
    with pytest.raises(ConfigError, match="unknown option 'iters', but TrainConfig has max_steps"):
        mlxtune.InstructConfig(iters=0)
    with pytest.raises(ConfigError, match="use max_steps=5"):
        mlxtune.TrainConfig(model_path="m", data="d", iters=5)


@pytest.mark.usefixtures("in_python")
def test_file_that_is_no_adapter_is_named_with_its_option(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n')
    with pytest.raises(MlxTuneError, match=r"bad\.jsonl .*: check init_adapter"):
        mlxtune.train(model_path="m", data="d", init_adapter=str(bad))
    with pytest.raises(MlxTuneError, match=r"bad\.jsonl .*: check adapter"):
        mlxtune.evaluate(model_path="m", data="d", adapter=str(bad))
    assert str(DataError("give --data")) == "give data"
