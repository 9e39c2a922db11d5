"""Every wait has a limit, both while endless rows are rendered and elsewhere in the package."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.limits import limited
from tests.command import Cli
from tests.models import CHATML
from tests.paths import DATA
from tests.slow import long_except, slow
from tests.sources import PACKAGE, tree_of


def row(turns: int, text: str = "Hi") -> str:
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[i % 2], "content": text} for i in range(turns)]})


@pytest.fixture
def templated(broken: Path) -> Path:
    """A model folder with its own chat template, which is rendered for each turn."""
    (broken / "chat_template.jinja").write_text(CHATML)
    return broken


@pytest.mark.parametrize("text", ["Hi", slow("x" * 1000)])
def test_row_of_very_many_turns_is_skipped_and_counted(
    inspect: Cli, templated: Path, tmp_path: Path, text: str
) -> None:
    data = tmp_path / "many.jsonl"
    data.write_text(f"{row(2)}\n{row(20_000, text)}\n")
    options = ["--model-path", templated, "--val-split", 0, "--json"]
    with limited():
        outcome = inspect("--data", data, *options)
    assert outcome.code == 0, outcome.err
    (ledger,) = json.loads(outcome.out)["files"]
    assert ledger["rows_skipped"] == {"it has too many turns to render": 1}


def test_row_of_many_turns_is_rendered(inspect: Cli, templated: Path, tmp_path: Path) -> None:
    data = tmp_path / "many.jsonl"
    data.write_text(f"{row(300)}\n")
    outcome = inspect("--data", data, "--model-path", templated, "--val-split", 0, "--json")
    assert json.loads(outcome.out)["files"][0]["rows_skipped"] == {}


LONG = {
    "a text of 40 MB": (2, "word " * 4_000_000, "its text is too long"),
    # The model's tokens cross the edges of answers, so each prompt is encoded separately.
    "turns of another template": (6000, "Hi", "it has too many turns to encode"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(LONG, "a text of 40 MB"))
def test_row_that_would_take_minutes_to_encode_is_skipped(
    inspect: Cli, tmp_path: Path, name: str
) -> None:
    turns, text, reason = LONG[name]
    data = tmp_path / "long.jsonl"
    data.write_text(f"{row(2)}\n{row(turns, text)}\n")
    options = [
        "--model-path",
        DATA / "demo-qwen3",
        "--template",
        "gemma",
        "--val-split",
        0,
        "--json",
    ]
    outcome = inspect("--data", data, *options)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["files"][0]["rows_skipped"] == {reason: 1}


# Code that waits without a limit

WAITS = {"run", "check_output", "check_call", "communicate", "wait", "urlopen"}
# Functions that may wait without a limit, each with its module and the reason.
PATIENT = {
    ("benchmark/bench.py", "_run_process"): "a worker trains as long as it takes, Ctrl-C ends it",
}


def waits(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each function that waits for a process or a connection without a limit."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            of_process = owner == "subprocess" or "process" in owner.lower()
            asks = of_process and node.func.attr in WAITS
            connects = node.func.attr in ("create_connection", "urlopen")
            limited = any(keyword.arg == "timeout" for keyword in node.keywords) or (
                node.func.attr == "wait" and node.args
            )
            if (asks or connects) and not limited:
                yield function.name


def test_no_process_or_connection_is_waited_for_without_a_limit() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "process" in text or "socket" in text or "urlopen" in text:
            name = str(path.relative_to(PACKAGE))
            found |= {(name, function) for function in waits(tree_of(path))}
    assert found == PATIENT.keys()


GLOBS = {"glob", "iglob"}


def test_folder_names_are_escaped_in_every_glob() -> None:
    """Path.glob takes only its argument as a pattern; glob.glob takes the folder as part of it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "glob" not in text:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in (*GLOBS, "rglob"):
                    continue
                assert ast.unparse(node.func.value) != "glob", f"{path}: glob.{node.func.attr}"
                given = node.args[0]
                names = {each.id for each in ast.walk(given) if isinstance(each, ast.Name)}
                # A pattern may only use constants of the module, or one of two loop variables.
                assert all(name.isupper() or name in ("package", "pattern") for name in names), (
                    f"{path}: {ast.unparse(node)}"
                )


def test_only_the_hubs_folder_and_the_model_folder_ask_a_hub() -> None:
    asks = {"snapshot_download", "hf_hub_download", "HfApi", "get_session"}
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(name in text for name in asks):
            found.add(str(path.relative_to(PACKAGE)))
    assert found == {
        "hub/client.py",
        "hub/dataset_download.py",
        "backend/models/model_folder.py",
    }
