"""Nulls of objects: Arrow's are absent keys, others in arguments and tools are values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.problems import DOUBTFUL_NULLS
from tests.core.data.rows import ANSWER, USER, converted, read

ARGUMENTS = {"city": "Oslo", "note": None, "at": [{"day": None}]}
# As pydantic writes a tool, whose nulls transformers renders.
TOOL = {"type": "function", "function": {"name": "look", "strict": None}}
DEFAULT = {"name": "look", "parameters": {"properties": {"at": {"default": None}}}}


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
def test_null_in_the_arguments_of_a_call_is_a_value(tmp_path: Path, arguments: Any) -> None:
    row = converted(tmp_path, {"messages": [USER, calling(arguments)]})

    assert row.messages[-1].tool_calls == (call(ARGUMENTS),)
    assert row.unread == ()


@pytest.mark.parametrize("tool", [TOOL, DEFAULT])
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_null_in_a_tool_is_a_value(tmp_path: Path, tool: Any, key: str) -> None:
    row = converted(tmp_path, {"messages": [USER, calling({})], key: [tool]})

    assert row.tools == (tool if key == "tools" else {"type": "function", "function": tool},)
    assert row.unread == ()


def test_nulls_of_a_table_are_absent_keys(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow to fill objects with null")
    city, unit = (
        {"name": f"of_{name}", "parameters": {"properties": {name: {"type": "string"}}}}
        for name in ("city", "unit")
    )
    rows = [
        {"messages": [USER, calling({"city": "Oslo"}), ANSWER], "tools": [city]},
        {"messages": [USER, calling({"unit": "m"}), ANSWER], "tools": [city, unit]},
        {"messages": [USER, ANSWER], "tools": [unit]},
    ]

    filled = pyarrow.Table.from_pylist(rows).to_pylist()

    assert filled[1]["messages"][1]["tool_calls"] == [call({"city": None, "unit": "m"})]
    assert read(tmp_path, *filled)[0] == read(tmp_path, *rows)[0]


def test_nulls_that_arrow_may_have_filled_in_are_kept_with_a_note(tmp_path: Path) -> None:
    row = converted(tmp_path, {"messages": [USER, ANSWER], "tools": [DEFAULT]})

    assert row.tools == (DEFAULT,)
    assert row.unread == ((DOUBTFUL_NULLS, ""),)
