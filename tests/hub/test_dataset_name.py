"""Values of --data that name data sets on the hub, and values that are paths."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtune.hub.dataset_name import DatasetName, DataValue, data_value, dataset_name
from tests.sources import PACKAGE, nodes_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/gsm8k", DatasetName("org/gsm8k")),
        ("org/gsm8k:train", DatasetName("org/gsm8k", split="train")),
        ("org/gsm8k/main", DatasetName("org/gsm8k", "main")),
        ("org/gsm8k@v1.0:test", DatasetName("org/gsm8k", None, "v1.0", "test")),
        (
            "org/a.b-c_d/en-US@refs/pr/1:x.y",
            DatasetName("org/a.b-c_d", "en-US", "refs/pr/1", "x.y"),
        ),
    ],
)
def test_name_is_parsed_and_written_unchanged(text: str, name: DatasetName) -> None:
    assert dataset_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("chat.jsonl", "/org/gsm8k", "./org/gsm8k", "~/org/gsm8k", "gsm8k", "org/", "org//gsm8k"),
        *("org/rows.jsonl", "org/sub/rows.parquet", "org/rows.json.gz", "org/gsm8k: train"),
        *("org/gsm8k:", "org/gsm8k@", "org/a/b/c", "örg/gsm8k", "org/gsm8k\n", ""),
        *("org/rows.xlsx", "org/rows.TXT", "org/rows.JSONL"),
        *("secret/diary.docx", "secret/diary.PDF", "secret/diary.odt", "secret/diary.html"),
    ],
)
def test_anything_else_is_a_path(text: str) -> None:
    assert dataset_name(text) is None


def test_existing_name_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert dataset_name("org/gsm8k") is not None
    (tmp_path / "org").mkdir()
    assert dataset_name("org/gsm8k") is None, "more likely a mistyped path"
    assert dataset_name("org/gsm8k:test") == DatasetName("org/gsm8k", split="test")
    (tmp_path / "org" / "gsm8k").symlink_to("nowhere")
    assert dataset_name("org/gsm8k") is None
    (tmp_path / "org" / "gsm8k:train").touch()
    assert dataset_name("org/gsm8k:train") is None


def test_only_a_whole_hash_is_a_commit() -> None:
    assert DatasetName("a/b", revision="0123456789" * 4).is_pinned
    assert not DatasetName("a/b", revision="0123456").is_pinned
    assert not DatasetName("a/b", revision="main").is_pinned


@pytest.mark.parametrize(
    ("value", "option", "meaning"),
    [
        ("org/a=2", "data", DataValue("org/a", 2.0, DatasetName("org/a"))),
        ("org/a:b=0.5", "data", DataValue("org/a:b", 0.5, DatasetName("org/a", split="b"))),
        ("a.jsonl=2", "data", DataValue("a.jsonl", 2.0, None)),
        ("org/a", "data", DataValue("org/a", 1.0, DatasetName("org/a"))),
        ("org/a", "val_data", DataValue("org/a", 1.0, DatasetName("org/a"))),
        ("org/a=2", "val_data", DataValue("org/a=2", 1.0, None)),
    ],
)
def test_value_has_a_name_and_a_weight(value: str, option: str, meaning: DataValue) -> None:
    assert data_value(value, option) == meaning


def test_one_function_decides_what_a_value_of_data_means() -> None:
    """The question whether data may be downloaded, and the reader, must not differ."""
    found = {
        (str(path.relative_to(PACKAGE)), node.func.id)
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("weighted", "dataset_name")
    }
    assert found == {
        ("config/data_config.py", "weighted"),
        ("hub/dataset_name.py", "weighted"),
        ("hub/dataset_name.py", "dataset_name"),
        # Only compares recorded paths; it reads no data.
        ("core/run/cross_checks.py", "weighted"),
    }
    assert {
        (str(path.relative_to(PACKAGE)), use)
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        for use in _uses_of_data(node)
    } == {
        # Passes each value to `data_value`, or names all values in a message.
        ("session/dataset.py", "data_value"),
        ("session/dataset.py", "find_named_data"),
        ("session/dataset.py", "map"),
        ("session/dataset.py", "pinned"),
        ("commands/reward.py", "find_named_data"),
        # A file of prompts, whose option takes no names.
        ("commands/generate.py", "str"),
    }


def _uses_of_data(node: ast.AST) -> Iterator[str]:
    """Yield the function, or `for`, that takes values of a config's --data or --val-data."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        yield from (name for each in node.args if _is_data(each))
    elif isinstance(node, ast.For | ast.comprehension) and _is_data(node.iter):
        yield "for"


def _is_data(node: ast.expr) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in ("data", "val_data"):
        return False
    return ast.unparse(node.value).rpartition(".")[2] == "config"
