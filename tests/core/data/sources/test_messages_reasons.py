"""The reasons why a row is not a conversation, and their messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.problems import BadRowError, SkippedRows
from mlxtune.core.data.sources.messages import parse_conversation
from tests.core.data.sources.test_messages import ANSWER, USER, refused

# Reasons

CALLS = {"role": "assistant", "content": ""}
BAD_ROWS: list[tuple[str, Any, dict[str, Any], str, str]] = [
    # name, messages, other keys, the counted kind, the rest of the reason
    ("messages_null", None, {}, "'messages' is not a list", "null"),
    ("messages_object", {}, {}, "'messages' is not a list", "an object"),
    ("messages_empty", [], {}, "no assistant turn", ""),
    ("no_assistant", [USER], {}, "no assistant turn", ""),
    (
        "all_weights_0",
        [ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 0}],
        {},
        "no assistant turn with weight 1",
        "",
    ),
    ("text", [USER, "Hello!"], {}, "a message is not an object", "message 2 is text"),
    ("null", [None, ANSWER], {}, "a message is not an object", "message 1 is null"),
    ("no_role", [USER, {"content": "Hello!"}], {}, "a message has no role", "message 2"),
    ("role_number", [{"role": 1, "content": ""}], {}, "a message has no role", "message 1"),
    ("role_list", [{"role": ["user"], "content": ""}], {}, "a message has no role", "message 1"),
    ("unknown_role", [{"role": "human", "content": "Hi"}], {}, "unknown role", "'human'"),
    (
        "near_role",
        [{"role": "assitant"}],
        {},
        "unknown role",
        "'assitant'; did you mean 'assistant'?",
    ),
    ("no_content", [{"role": "user"}, ANSWER], {}, "content is not text", "message 1: null"),
    (
        "text_key",
        [{"role": "user", "name": "Al", "a b": "Hi"}],
        {},
        "content",
        "use --field content='a b'",
    ),
    ("parts_key", [{"role": "model", "parts": ["Hi"]}], {}, "empty answer", "content=parts"),
    ("number", [USER | {"content": 5}, ANSWER], {}, "content is not text", "a number"),
    ("nan", [USER, ANSWER | {"content": float("nan")}], {}, "content is not text", "a number"),
    ("bool", [USER, ANSWER | {"content": True}], {}, "content is not text", "boolean"),
    ("object", [USER, ANSWER | {"content": {}}], {}, "content is not text", "an object"),
    ("empty_answer", [USER, ANSWER | {"content": ""}], {}, "empty answer", "message 2"),
    ("blank_answer", [USER, ANSWER | {"content": " \n"}], {}, "empty answer", "message 2"),
    ("no_parts", [USER, ANSWER | {"content": []}], {}, "empty answer", "message 2"),
    ("later_empty", [ANSWER, USER, ANSWER | {"content": ""}], {}, "empty answer", "message 3"),
    ("null_answer", [USER, ANSWER | {"content": None}], {}, "empty answer", "2 has no content"),
    ("absent_answer", [USER, {"role": "assistant"}], {}, "empty answer", "2 has no content"),
    ("no_thought", [ANSWER | {"content": "<think>\n</think>\n"}], {}, "empty answer", ""),
    ("blank_thought", [CALLS | {"reasoning": " "}], {}, "empty answer", "message 1"),
    ("no_calls", [USER, CALLS | {"tool_calls": []}], {}, "empty answer", ""),
    (
        "calls_text",
        [ANSWER | {"tool_calls": "f()"}],
        {},
        "'tool_calls' is text that is not JSON",
        "",
    ),
    ("functions", [ANSWER], {"functions": {}}, "'functions' is not a list of objects", ""),
    ("calls_list", [ANSWER | {"tool_calls": [[]]}], {}, "'tool_calls' is not a list", ""),
    (
        "thinking_list",
        [USER, ANSWER | {"reasoning_content": ["Hm."]}],
        {},
        "thinking is not text",
        "message 2: a list",
    ),
    ("thinking_number", [ANSWER | {"thinking": 0}], {}, "thinking is not text", "a number"),
    ("reasoning", [ANSWER | {"reasoning": {}}], {}, "thinking is not text", "an object"),
    ("tools_object", [USER, ANSWER], {"tools": {}}, "'tools' is not a list of objects", ""),
    ("tools_of_text", [USER, ANSWER], {"tools": '["f"]'}, "'tools' is not a list", ""),
    ("tools_are_text", [USER, ANSWER], {"tools": "f()"}, "'tools' is text that is", "column 1"),
    ("deep_tools", [ANSWER], {"tools": "[" * 100_000}, "JSON nested too deeply", ""),
    ("system_list", [USER, ANSWER], {"system": []}, "'system' is not text", "a list"),
]


@pytest.mark.parametrize(
    ("messages", "keys", "kind", "detail"),
    [case[1:] for case in BAD_ROWS],
    ids=[case[0] for case in BAD_ROWS],
)
def test_bad_row_is_refused_with_its_reason(
    messages: Any, keys: dict[str, Any], kind: str, detail: str
) -> None:
    with pytest.raises(BadRowError) as raised:
        parse_conversation(1, {"messages": messages, **keys})

    problem = raised.value
    assert kind in problem.kind
    assert detail in str(problem).removeprefix(problem.kind)
    assert not re.search(r"message \d", problem.kind)


# Messages for the user


def test_reason_is_one_short_line_for_any_row() -> None:
    role = "\x1b[31m\nuser\u2028\ud800" + "x" * 10_000

    problem = refused({"role": role, "content": "Hi"})

    assert str(problem).isprintable()
    assert len(str(problem)) < 400


def test_first_two_rows_of_a_kind_are_shown_and_the_others_counted() -> None:
    skipped = SkippedRows(Path("chat.jsonl"))
    for row in range(1, 15):
        if row % 2:
            skipped.add(row, BadRowError("empty answer", f"message {row}"))
        else:
            skipped.add(row, BadRowError("no assistant turn"))

    warnings = list(skipped.warnings())

    assert warnings == [
        "chat.jsonl:1: empty answer (message 1); row skipped",
        "chat.jsonl:3: empty answer (message 3); row skipped",
        "chat.jsonl: 5 more rows skipped: empty answer",
        "chat.jsonl:2: no assistant turn; row skipped",
        "chat.jsonl:4: no assistant turn; row skipped",
        "chat.jsonl: 5 more rows skipped: no assistant turn",
    ]
    assert skipped.total == 14


def test_first_names_the_first_row_in_the_file() -> None:
    skipped = SkippedRows(Path("chat.jsonl"))
    skipped.add(9, BadRowError("empty answer", "message 2"))
    skipped.add(4, BadRowError("no assistant turn"))
    skipped.add(10, BadRowError("empty answer", "message 4"))

    assert skipped.first() == "chat.jsonl:4: no assistant turn"
