"""Conversions of each format's rows, compared with the format's own tools."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.conversation import Document
from tests.core.data.rows import (
    ALPACA,
    ANSWER,
    PROMPT,
    ROWS,
    TOOL,
    USER,
    WRAPPED,
    converted,
    read,
    reason,
    told,
)

# Prompt and completion


def test_prompt_and_completion_are_a_user_and_an_assistant(tmp_path: Path) -> None:
    """The messages equal those that mlx-lm's CompletionsDataset.process builds."""
    row = {"prompt": "What is\n1 + 1?", "completion": " 2", "tools": [WRAPPED]}

    one = converted(tmp_path, row)

    messages = [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]
    assert [message.fields for message in one.messages] == messages
    assert told(tmp_path, row) == [("user", "What is\n1 + 1?", True), ("assistant", " 2", True)]
    assert one.tools == (WRAPPED,)


@pytest.mark.parametrize("answer", [ANSWER, ANSWER | {"role": "Assistant"}])
def test_answers_within_a_prompt_are_context(tmp_path: Path, answer: dict[str, str]) -> None:
    """A longer form of the example in TRL's documentation of prompt-completion data."""
    row: dict[str, Any] = {
        "prompt": [USER, answer, {"role": "user", "content": "What color is the sky?"}],
        "completion": [{"role": "assistant", "content": "It is blue."}],
    }

    one = converted(tmp_path, row)

    assert [message.trained for message in one.messages] == [True, False, True, True]
    expected = [USER, ANSWER, row["prompt"][2], *row["completion"]]
    assert [m.fields for m in one.messages] == expected


def test_text_and_messages_go_together(tmp_path: Path) -> None:
    expected = [("user", "Hi", True), ("assistant", "Hello!", True)]
    assert told(tmp_path, {"prompt": [USER], "completion": "Hello!"}) == expected
    assert told(tmp_path, {"prompt": "Hi", "completion": [ANSWER]}) == expected
    assert told(tmp_path, {"prompt": [], "completion": [ANSWER]}) == expected[1:]
    turns = [ANSWER | {"weight": 0}, USER, ANSWER]
    assert [t for _, _, t in told(tmp_path, {"prompt": "", "completion": turns})] == [
        *(True, False, True, True)
    ]


def test_system_text_comes_first_and_empty_prompts_are_fine(tmp_path: Path) -> None:
    assert told(tmp_path, PROMPT | {"system": "Be brief.", "prompt": ""}) == [
        ("system", "Be brief.", True),
        ("user", "", True),
        ("assistant", "Hello!", True),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (PROMPT | {"completion": ""}, "empty answer (message 2)"),
        (PROMPT | {"completion": " \n"}, "empty answer (message 2)"),
        (PROMPT | {"completion": []}, "no assistant turn (in 'completion')"),
        ({"prompt": [ANSWER], "completion": [USER]}, "no assistant turn (in 'completion')"),
        (PROMPT | {"completion": [ANSWER | {"weight": 0}]}, "no assistant turn with weight 1"),
        (
            PROMPT | {"prompt": True},
            "'prompt' is neither text nor a list of messages (a boolean: write it in quotes)",
        ),
        (PROMPT | {"completion": {}}, "'completion' is neither text nor a list of messages (an "),
        (PROMPT | {"prompt": [3]}, "a message is not an object (message 1 is a number)"),
    ],
)
def test_bad_prompt_or_completion_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    assert reason(tmp_path, row).startswith(said)


# Alpaca


def llama_factory_alpaca(example: dict[str, Any]) -> list[tuple[str, str]]:
    """Convert a row as LLaMA-Factory's AlpacaDatasetConverter does (data/converter.py).

    It omits an empty system text, and trains the answers in the history (data/README.md).
    """
    messages = [("system", example["system"])] if example.get("system") else []
    for question, answer in example.get("history") or []:
        messages += [("user", question), ("assistant", answer)]
    query = [example[key] for key in ("instruction", "input") if example.get(key)]
    return [*messages, ("user", "\n".join(query)), ("assistant", example["output"])]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
ANSWERS = TEXTS.map(lambda text: f"a{text}")


@settings(deadline=None)
@given(
    row=st.fixed_dictionaries(
        {"instruction": TEXTS, "output": ANSWERS},
        optional={
            "input": TEXTS | st.none(),
            "system": TEXTS | st.none(),
            "history": st.lists(st.tuples(TEXTS, ANSWERS).map(list)) | st.none(),
        },
    )
)
def test_alpaca_rows_become_what_llama_factory_makes_of_them(row: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        messages = told(Path(folder), row)

    assert messages == [(*message, True) for message in llama_factory_alpaca(row)]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"output": ""}, "empty answer (message 2)"),
        ({"output": True}, "content is not text (message 2: a boolean)"),
        ({"input": []}, "'input' is not text (a list)"),
        ({"instruction": {}}, "'instruction' is not text (an object)"),
        ({"history": "x"}, "'history' is not a list of pairs (text)"),
        ({"history": [["a", "b"], ["a"]]}, "'history' is not a list of pairs (entry 2)"),
        ({"history": ["ab"]}, "'history' is not a list of pairs (entry 1)"),
        ({"history": [["a", ""]]}, "empty answer (message 2)"),
        ({"history": [[None, "b"]]}, "content is not text (message 1: null)"),
        ({"system": 3}, "'system' is not text (a number)"),
    ],
)
def test_bad_alpaca_row_is_named(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    assert reason(tmp_path, ALPACA | keys) == said


# ShareGPT


def test_sharegpt_row_of_llama_factory_is_read_with_its_calls_and_tools(tmp_path: Path) -> None:
    """The layout in LLaMA-Factory's data/README.md and glaive_toolcall_en_demo.json."""
    row = {
        "conversations": [
            {"from": "human", "value": "1 + 1 and 2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 1}}'},
            {"from": "observation", "value": "2"},
            {
                "from": "function_call",
                "value": '[{"name": "add", "arguments": "{\\"a\\": 2}"}, {"name": "now"}]',
            },
            {"from": "tool", "value": "4"},
            {"from": "gpt", "value": "2 and 4."},
        ],
        "system": "Be exact.",
        "tools": json.dumps([TOOL]),
    }

    one = converted(tmp_path, row)

    def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    assert [(m.role, m.content, list(m.tool_calls)) for m in one.messages] == [
        ("system", "Be exact.", []),
        ("user", "1 + 1 and 2 + 2?", []),
        ("assistant", "", [call("add", {"a": 1, "b": 1})]),
        ("tool", "2", []),
        ("assistant", "", [call("add", {"a": 2}), call("now", {})]),
        ("tool", "4", []),
        ("assistant", "2 and 4.", []),
    ]
    # LLaMA-Factory's tool_utils.py wraps a bare function for the models.
    assert one.tools == (WRAPPED,)
    assert converted(tmp_path, row | {"tools": [WRAPPED]}).tools == (WRAPPED,)
    for message in one.messages:
        assert set(message.fields) <= {"role", "content", "tool_calls"}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("system", "system"),
        *((name, "user") for name in ("human", "user", "Human")),
        *((n, "assistant") for n in ("gpt", "chatgpt", "assistant", "model", "bot", "bing")),
        ("bard", "assistant"),
        *((name, "tool") for name in ("tool", "observation")),
    ],
)
def test_sharegpt_names_map_to_roles(tmp_path: Path, name: str, role: str) -> None:
    last = {"from": "gpt", "value": "Bye"}
    for entry in ({"from": name, "value": "x"}, {"role": name, "content": "x"}):
        messages = told(tmp_path, {"conversations": [entry, last]})
        assert messages == [(role, "x", True), ("assistant", "Bye", True)]


def test_other_keys_of_an_entry_count(tmp_path: Path) -> None:
    turns = [
        {"from": "gpt", "value": "No", "weight": 0},
        {"from": "human", "value": "Why?", "name": "Ann"},
        {"from": "gpt", "value": "Yes", "reasoning": "Hm.", "weight": 1},
    ]

    one = converted(tmp_path, {"conversations": turns})

    assert [message.trained for message in one.messages] == [False, True, True]
    assert one.messages[1].fields == {"role": "user", "content": "Why?", "name": "Ann"}
    assert one.messages[2].thinking == "Hm."


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("x", "'conversations' is not a list (text)"),
        ([], "no assistant turn"),
        ([3], "a message is not an object (message 1 is a number)"),
        ([{"value": "x"}], "a message has no role (message 1)"),
        ([{"from": ["gpt"], "value": "x"}], "a message has no role (message 1)"),
        ([{"from": "alien", "value": "x"}], "unknown role (message 1: 'alien'; known: human, us"),
        ([{"from": "gpt", "value": ""}], "empty answer (message 1)"),
        ([{"from": "gpt", "content": None}], "empty answer (message 1 has no content)"),
        ([{"from": "human", "value": 5}], "content is not text (message 1: a number)"),
        (
            [{"from": "function_call", "value": "f()"}],
            "a function_call is not JSON (Expecting",
        ),
        ([{"from": "function_call", "value": "[" * 99_999}], "JSON nested too deeply"),
        ([{"from": "function_call"}], "a function_call has no name (message 1)"),
        ([{"from": "function_call", "value": "[3]"}], "a function_call has no name (message 1)"),
        ([{"from": "function_call", "value": "[]"}], "empty answer (message 1)"),
    ],
)
def test_bad_sharegpt_entry_is_named(tmp_path: Path, entries: Any, said: str) -> None:
    assert reason(tmp_path, {"conversations": entries}).startswith(said)


def test_position_of_a_bad_message_does_not_count_the_system_text(tmp_path: Path) -> None:
    for name, row in ROWS.items():
        if name not in ("text", "chatgpt"):
            broken = json.loads(json.dumps(row | {"system": "x"}).replace("Hello!", ""))
            assert reason(tmp_path, broken) == "empty answer (message 2)"


# Text


def test_text_is_a_document_unchanged(tmp_path: Path) -> None:
    good, skipped = read(tmp_path, {"text": " Once\n"}, {"text": "é", "messages": None})

    assert good == [Document(1, " Once\n"), Document(2, "é")]
    assert skipped.total == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty text"),
        (" \n", "empty text"),
        (5, "'text' is not text (a number)"),
        ([], "'text' is not text (a list)"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, text: Any, said: str) -> None:
    assert reason(tmp_path, {"text": text}) == said
