"""Rows of prompts: any format of sft, or a prompt with further keys, passed through unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.problems import SkippedRows
from mlxtune.core.data.prompt import PromptRow, read_prompts
from mlxtune.core.data.sources.recognition import read_rows
from mlxtune.errors import DataError

USER = {"role": "user", "content": "2 + 3?"}
ANSWER = {"role": "assistant", "content": "5"}


def read(folder: Path, *rows: Any, **options: Any) -> tuple[list[PromptRow], list[str]]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skipped = SkippedRows(path)
    return list(read_prompts(path, skipped, **options)), list(skipped.warnings())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]},
        {"prompt": "2 + 3?", "completion": "5"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"question": "2 + 3?", "answer": "5"},
        {"instruction": "2 + 3?", "output": "5"},
        {
            "contents": [
                {"role": "user", "parts": [{"text": "2 + 3?"}]},
                {"role": "model", "parts": [{"text": "5"}]},
            ]
        },
    ],
    ids=lambda row: "+".join(row),
)
def test_last_assistant_turn_of_every_format_is_the_answer(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    ((found,), warnings) = read(tmp_path, row)
    assert warnings == []
    assert (found.messages, found.answer, found.prompt) == ([USER], "5", "2 + 3?")
    assert found.row == row
    assert found.place == f"{tmp_path}/rows.jsonl:1"
    (same,) = read_rows(tmp_path / "rows.jsonl", SkippedRows(tmp_path))
    assert getattr(same, "messages")[-1].content == found.answer  # noqa: B009


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 3?"},
        {"prompt": [USER]},
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "2 + 3?"}]},
        {"conversations": [USER]},
    ],
    ids=str,
)
def test_row_that_ends_with_a_question_has_no_answer(tmp_path: Path, row: dict[str, Any]) -> None:
    more = {"label": 0, "total": 5, "chosen": "5", "rejected": "6", "want": {"note": None}}
    ((found,), warnings) = read(tmp_path, row | more)
    assert warnings == []
    assert (found.messages, found.answer, found.prompt) == ([USER], None, "2 + 3?")
    assert found.row == row | more


def test_conversation_keeps_its_earlier_turns(tmp_path: Path) -> None:
    row = {"system": "Add.", "messages": [USER, ANSWER, USER]}
    ((found,), _) = read(tmp_path, row)
    system = {"role": "system", "content": "Add."}
    assert found.messages == [system, USER, ANSWER, USER]
    assert found.answer is None


def test_rows_with_and_without_an_answer_may_be_in_one_file(tmp_path: Path) -> None:
    found, warnings = read(tmp_path, {"prompt": "a"}, {"prompt": "b", "completion": "c"})
    assert [row.answer for row in found] == [None, "c"]
    assert warnings == []


def test_calls_are_not_compared_with_answers(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    ((found,), _) = read(tmp_path, {"messages": [USER, {"role": "assistant", "tool_calls": calls}]})
    assert (found.messages, found.answer) == ([USER], None)


def test_row_without_a_prompt_is_skipped_and_counted(tmp_path: Path) -> None:
    found, warnings = read(tmp_path, {"prompt": "a"}, {"text": "b"}, {"prompt": None}, [])
    assert [row.number for row in found] == [1]
    assert [warning.partition("rows.jsonl")[2] for warning in warnings] == [
        ":2: no 'prompt' (its keys: 'text'); row skipped",
        ":3: no 'prompt' (its keys: 'prompt' (empty)); row skipped",
        ":4: not a JSON object (a list); row skipped",
    ]


def test_answer_labeled_as_bad_is_not_compared_with(tmp_path: Path) -> None:
    _, (warning,) = read(tmp_path, {"prompt": "a", "completion": "b", "label": False})
    assert "an answer labelled as bad" in warning


def test_fields_and_formats_are_those_of_sft(tmp_path: Path) -> None:
    ((found,), _) = read(tmp_path, {"ask": "a", "total": 1}, fields={"prompt": "ask"})
    assert (found.prompt, found.row) == ("a", {"ask": "a", "total": 1})
    with pytest.raises(DataError, match="is in the prompt format, but the file is in the chat"):
        read(tmp_path, {"messages": [USER]}, {"prompt": "a"})
    found_rows, _ = read(tmp_path, {"messages": [USER]}, {"prompt": "a"}, format="prompt")
    assert [row.number for row in found_rows] == [2]
