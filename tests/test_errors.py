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
from mlxtune import config as configs
from mlxtune import errors
from mlxtune.cli.table import COMMANDS
from mlxtune.config.fields import flags_of, options_of
from mlxtune.errors import (
    ConfigError,
    DataError,
    MlxTuneError,
    TrainingInterrupted,
    in_keywords,
    one_line,
)
from tests.sources import PACKAGE, nodes_of

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


def test_error_keeps_its_message() -> None:
    for name in TREE.keys() - {"ConfigError"}:
        assert str(getattr(errors, name)("chat.jsonl is empty")) == "chat.jsonl is empty"


def test_config_error_holds_all_problems_and_joins_them() -> None:
    error = ConfigError(["--rank must be at least 1, not 0", "--data is required"])

    assert error.problems == ["--rank must be at least 1, not 0", "--data is required"]
    assert str(error) == "--rank must be at least 1, not 0; --data is required"


def test_interrupt_is_a_keyboard_interrupt() -> None:
    interrupt = TrainingInterrupted(Path("checkpoints/step-7"), 7)

    assert isinstance(interrupt, KeyboardInterrupt)
    assert not isinstance(interrupt, Exception)
    assert (interrupt.checkpoint, interrupt.step) == (Path("checkpoints/step-7"), 7)
    assert interrupt.saved.endswith("resume with mlxtune train --resume checkpoints")
    assert interrupt.shell_message == f"interrupted after step 7; {interrupt.saved}"
    assert str(interrupt) == (
        f"{interrupt.shell_message}, or in Python with mlxtune.resume('checkpoints')"
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
        (
            "use --field prompt='my key' --field completion=a",
            'use field={"prompt": "my key", "completion": "a"}',
        ),
        ("give --data a.jsonl --data b/c=2", 'give data=["a.jsonl", "b/c=2"]'),
        (
            "--init-adapter o2/adapters.safetensors: no",
            'init_adapter="o2/adapters.safetensors": no',
        ),
        ("use --format text to train", 'use format="text" to train'),
        (
            "start over with --overwrite and --no-cache",
            "start over with overwrite=True and no_cache=True",
        ),
        ("--merge needs --wait: leave out --merge", "merge needs wait: leave out merge"),
        ("add --quantize nf4 --double-quant", 'add quantize="nf4", double_quant=True'),
        ("set --memory-limit 12GB.", 'set memory_limit="12GB".'),
        (
            "resume it with mlxtune train --resume out, or start over with --overwrite",
            "resume it with mlxtune train --resume out, or start over with overwrite=True",
        ),
        ("mlxtune trains DoRA with --dora", "mlxtune trains DoRA with dora=True"),
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
    for field in inspect.signature(config).parameters.keys() - {*config.ignored, "_unset"}:
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


CONFIGS = [
    each for each in vars(configs).values() if isinstance(each, type) and "Config" in each.__name__
]
VALUE = r'(?:"[^"]*"|\{[^}]*\}|\[[^]]*\]|True|[-\d.e]+)'


def _options() -> tuple[set[str], dict[str, set[str]]]:
    """Return the names of options without a value, and the choices of the others."""
    switches: set[str] = set()
    choices: dict[str, set[str]] = {"parallel": {"data", "tensor"}, "init": {"lora", "pissa"}}
    for config in CONFIGS:
        if config is not ConfigError:
            switches |= flags_of(config)
            for name, option in options_of(config).items():
                choices.setdefault(name, set()).update(option.choices)
    return switches, {name: each for name, each in choices.items() if each}


def _templates(path: Path) -> Iterator[str]:
    """Yield the texts with flags in a module, with x for each value in a text."""
    parts = {
        id(part)
        for node in nodes_of(path)
        if isinstance(node, ast.JoinedStr | ast.Expr)
        for part in ast.walk(node)
        if part is not node
        and isinstance(part, ast.Constant | ast.JoinedStr)
        and (isinstance(node, ast.JoinedStr) or part is node.value)
    }
    for each in nodes_of(path):
        text = ""
        if isinstance(each, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "x" for part in each.values
            )
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            text = each.value
        if id(each) not in parts and re.search(r"(?<!\w)--[a-z]", text):
            yield text


OTHER_PROGRAM = r"\b(mlxtune \w+|pip|hf|mlx[._][\w.]+|llama\.cpp) (?!.*(, |; |: )[^'\"]*--)"


def test_names_of_commands_and_switches_are_the_configs() -> None:
    assert set(errors.COMMANDS.split("|")) == {each.name for each in COMMANDS}
    assert _options()[0] == set(errors.SWITCHES.split("|"))


def test_each_text_with_flags_names_keywords_in_python() -> None:
    switches, choices = _options()
    setting = rf"\b(?:add|pass|set|try|use|with) (?:{'|'.join(switches - {'both'})})\b(?!=)"
    modules = (path for path in PACKAGE.rglob("*.py") if path.parent.name != "cli")
    texts = {text for path in modules for text in _templates(path)}
    assert len(texts) > 300
    bare = [
        (name, re.compile(rf"(?<!-)\b{name} (?:{'|'.join(map(re.escape, values))})\b(?!=)"))
        for name, values in choices.items()
    ]
    for shown in map(in_keywords, texts):
        kept = re.search(r"(?<!\w)--[a-z]", shown)
        assert not kept or re.search(OTHER_PROGRAM, shown), shown
        for run in re.finditer(rf"\b\w+={VALUE}(?:, \w+={VALUE})*", shown):
            compile(f"f({run[0]})", "a call", "eval")  # a repeated keyword is a syntax error
        assert not re.search(setting, shown), shown
        for name, pattern in bare:
            assert name not in shown or not pattern.search(shown), shown
        for name, word in re.findall(r'\b(\w+)="([a-z]+)"', shown):
            allowed = choices.get(name, {word})
            assert word in allowed or word.strip("x") == "", shown


@pytest.mark.usefixtures("in_python")
def test_option_of_another_config_is_named_with_the_config() -> None:
    with pytest.raises(ConfigError, match="unknown option 'iters', but TrainConfig has max_steps"):
        mlxtune.InstructConfig(iters=0)
    with pytest.raises(ConfigError, match="use max_steps=5"):
        mlxtune.TrainConfig(model_path="m", data="d", iters=5)


@pytest.mark.usefixtures("in_python")
def test_non_adapter_file_is_reported_with_its_option(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n')
    with pytest.raises(MlxTuneError, match=r"bad\.jsonl .*: check init_adapter"):
        mlxtune.train(model_path="m", data="d", init_adapter=str(bad))
    with pytest.raises(MlxTuneError, match=r"bad\.jsonl .*: check adapter"):
        mlxtune.evaluate(model_path="m", data="d", adapter=str(bad))
    assert str(DataError("give --data")) == "give data"
