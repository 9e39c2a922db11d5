"""`mlxtune inspect --json`: the schema of docs/inspect.md, and the values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mlxtune.commands.inspect import inspect as run_inspect
from mlxtune.config import InspectConfig
from tests.command import Cli
from tests.models import sums, write_chat
from tests.paths import DOCS

PAGE = DOCS / "inspect.md"


def documented() -> dict[str, dict[str, str]]:
    """Return the fields and their types in each table of docs/inspect.md's schema."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## JSON\n")[2]
    tables: dict[str, dict[str, str]] = {}
    name = "inspection"
    for line in text.splitlines():
        if bold := re.search(r"\*\*`?(\w+)`?\*\*", line):
            name = bold[1]
        if line.startswith("| `"):
            fields, types = (cell.strip() for cell in line.split("|")[1:3])
            names = re.findall(r"`(\w+)`", fields)
            several = types.split(", ") if types.count(", ") + 1 == len(names) else [types]
            for i, field in enumerate(names):
                tables.setdefault(name, {})[field] = several[min(i, len(several) - 1)]
    return tables


def kind_of(value: Any) -> str:
    kinds = {str: "text", bool: "truth value", int: "integer", float: "number", list: "list"}
    return kinds.get(type(value), "object")


def check_fields(value: dict[str, Any], fields: dict[str, str], where: str) -> None:
    assert list(value) == list(fields), where
    for name, documented in fields.items():
        found = kind_of(value[name])
        if documented in ("distribution", "object"):
            assert found == "object", f"{where}.{name}"
        elif '"' in documented:
            assert f'"{value[name]}"' in documented, f"{where}.{name}"
        else:
            assert documented.partition(" ")[0] == found, f"{where}.{name}"


def test_json_is_as_documented(inspect: Cli, tmp_path: Path) -> None:
    rows = [*sums(8), *sums(2), {"words": 1}, [("user", "<|im_end|>"), ("assistant", "é🙂")]]
    outcome = inspect("--data", write_chat(tmp_path / "a.jsonl", rows), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    tables = documented()
    assert set(tables) == {
        *("inspection", "ledger", "distribution", "limits", "cost", "findings", "shown")
    }
    check_fields(found, tables["inspection"], "inspection")
    for name in ("tokens", "supervised"):
        check_fields(found[name], tables["distribution"], name)
    for name, table in (("files", "ledger"), ("limits", "limits"), ("findings", "findings")):
        assert found[name], name
        for each in found[name]:
            # Without mixing, a file has no weight.
            weight = {"weight": 1.0} if name == "files" else {}
            check_fields(each | weight, tables[table], name)
    check_fields(found["cost"], tables["cost"], "cost")
    for each in found["shown"]:
        check_fields(each, tables["shown"], "shown")
        assert sum(piece["tokens"] for piece in each["pieces"]) == each["tokens"]
        for piece in each["pieces"]:
            assert {name: kind_of(value) for name, value in piece.items()} == {
                "text": "text",
                "tokens": "integer",
                "control": "truth value",
                "supervised": "truth value",
                "differs": "truth value",
            }
    for finding in found["findings"]:
        for place in finding["places"]:
            assert {name: kind_of(value) for name, value in place.items()} == {
                "path": "text",
                "row": "integer",
                "detail": "text",
            }


def test_json_lists_the_contents(inspect: Cli, tmp_path: Path, model: Path) -> None:
    rows = [*sums(8), *sums(2), {"words": 1}, [("user", "<|im_end|>"), ("assistant", "é🙂")]]
    file = write_chat(tmp_path / "a.jsonl", rows)
    found = json.loads(inspect("--data", file, "--json", "--row", 12, "--batch-size", 3).out)
    assert (found["schema_version"], found["model"]) == (1, str(model))
    assert (found["template"], found["max_seq_len"], found["batch_size"]) == (
        *("built-in qwen3, as the model has none", 512, 3),
    )
    (ledger,) = found["files"]
    assert ledger["rows_read"] == 12
    assert ledger["rows_train"] + ledger["rows_validation"] == found["examples"] == 11
    assert ledger["rows_skipped"] == {"no 'messages'": 1}
    assert {finding["kind"]: finding["rows"] for finding in found["findings"]} == {
        "control token written in content": 1,
        "duplicate row": 2,
        "no 'messages'": 1,
    }
    (duplicates,) = (each for each in found["findings"] if each["kind"] == "duplicate row")
    assert duplicates["places"] == [
        {"path": str(file), "row": 9, "detail": f"same as {file}:1"},
        {"path": str(file), "row": 10, "detail": f"same as {file}:2"},
    ]
    (shown,) = found["shown"]
    assert shown["kinds"] == ["control token written in content"]
    pieces = shown["pieces"]
    assert "".join(piece["text"] for piece in pieces) == (
        "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\né🙂<|im_end|>\n"
    )
    # A character of two bytes and one of four, in a vocabulary of bytes and English.
    assert [(p["text"], p["tokens"]) for p in pieces if p["supervised"]] == [
        *(("é", 2), ("🙂", 4), ("<|im_end|>", 1)),
    ]
    train_rows = ledger["rows_train"]
    assert found["cost"]["steps"] == -(-train_rows // 3)
    assert found["cost"]["tokens"] + found["cost"]["validation_tokens"] == found["tokens"]["total"]


def test_python_returns_what_json_prints(inspect: Cli, model: Path, chat: Path) -> None:
    found = run_inspect(InspectConfig(str(model), str(chat), row=3))
    assert json.loads(inspect("--row", 3, "--json").out) == json.loads(json.dumps(found.as_dict()))
