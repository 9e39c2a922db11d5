"""A row of each format, and functions that read rows, for tests."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from mlxtune.config.data_config import parse_fields
from mlxtune.core.data.conversation import Conversation, Document
from mlxtune.core.data.problems import SkippedRows
from mlxtune.core.data.sources.recognition import read_rows

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!"}
CHAT = {"messages": [USER, ANSWER]}
PROMPT = {"prompt": "Hi", "completion": "Hello!"}
ALPACA = {"instruction": "Hi", "input": "", "output": "Hello!"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
TEXT = {"text": "Hello!"}
CHATGPT = {
    "mapping": {
        "root": {"message": None, "parent": None},
        "u": {
            "message": {"author": {"role": "user"}, "content": {"parts": ["Hi"]}},
            "parent": "root",
        },
        "a": {
            "message": {"author": {"role": "assistant"}, "content": {"parts": ["Hello!"]}},
            "parent": "u",
        },
    },
    "current_node": "a",
}
ROWS: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "prompt": PROMPT,
    "alpaca": ALPACA,
    "sharegpt": SHAREGPT,
    "text": TEXT,
    "chatgpt": CHATGPT,
}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": TOOL}


def options_in(text: str) -> dict[str, str]:
    """Return the fields of the --field options in a message."""
    found = re.findall(r"--field (\w+=(?:'[^']*'|[^\s',)]+))", text)
    return parse_fields([shlex.split(each)[0] for each in found])


def read(
    folder: Path, *rows: Any, **options: Any
) -> tuple[list[Conversation | Document], SkippedRows]:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    skipped = SkippedRows(path)
    return list(read_rows(path, skipped, **options)), skipped


def converted(folder: Path, row: Any, **options: Any) -> Conversation:
    (one,), skipped = read(folder, row, **options)
    assert skipped.total == 0
    assert isinstance(one, Conversation)
    return one


def told(folder: Path, row: Any, **options: Any) -> list[tuple[str, str, bool]]:
    """Return the role, the content and `trained` of each message."""
    return [(m.role, m.content, m.trained) for m in converted(folder, row, **options).messages]


def reason(folder: Path, row: Any, **options: Any) -> str:
    good, skipped = read(folder, row, **options)
    assert not good
    return skipped.first().removeprefix(f"{skipped.path}:1: ")
