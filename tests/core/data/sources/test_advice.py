"""Rows of other tools are read, or their reason names what to do; advice that is followed works."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlxtune.core.data.conversation import Conversation, Document, Pair
from mlxtune.core.data.problems import SkippedRows
from mlxtune.core.data.sources import (
    advice,
    conversions,
    formats,
    keys,
    messages,
    notes,
    recognition,
)
from mlxtune.core.data.sources.recognition import read_rows
from tests.core.data.rows import ANSWER, CHAT, PROMPT, SHAREGPT, USER, options_in

MODULES = (advice, conversions, formats, keys, messages, notes, recognition)
BAD = "No."
READ = (["user: Hi", "assistant: Hello!"],)
COMPARED = (["user: Hi", "assistant: Hello!"], ["user: Hi", f"assistant: {BAD}"])
HH = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: No."}


def called(name: str, text: str, row: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return messages with other names for the role and the content."""
    return [{name: each["role"], text: each["content"]} for each in row]


# Rows by what they are: an objective, and the conversations that following the advice gives; or the
# end of the last reason, if nothing but another file helps.
FOLLOWED: dict[str, tuple[dict[str, Any], str, tuple[list[str], ...]]] = {
    "ms-swift": (CHAT | {"rejected_response": BAD}, "sft", COMPARED),
    "ms-swift's messages": (
        CHAT | {"rejected_messages": [USER, ANSWER | {"content": BAD}]},
        "dpo",
        COMPARED,
    ),
    "ms-swift's query": (
        {"query": "Hi", "response": "Hello!", "rejected_response": BAD},
        "sft",
        COMPARED,
    ),
    "rejected sharegpt": (
        SHAREGPT | {"rejected_answer": {"from": "gpt", "value": BAD}},
        "dpo",
        COMPARED,
    ),
    "answers": (
        {"prompt": "Hi", "chosen_answer": "Hello!", "rejected_answer": BAD},
        "sft",
        COMPARED,
    ),
    "pair": ({"prompt": "Hi", "better": "Hello!", "worse": BAD}, "dpo", COMPARED),
    "pair's prompt": ({"asked": "Hi", "chosen": "Hello!", "rejected": BAD}, "dpo", COMPARED),
    "hh-rlhf": (HH, "dpo", COMPARED),
    "label": (PROMPT | {"rating": True}, "kto", READ),
    "kto_tag": ({"instruction": "Hi", "output": "Hello!", "kto_tag": True}, "kto", READ),
    "kto_tag of a bad answer": (
        {"instruction": "Hi", "output": "Hello!", "kto_tag": False},
        "sft",
        READ,
    ),
    "from in messages": ({"messages": SHAREGPT["conversations"]}, "sft", READ),
    "conversation": ({"conversation": SHAREGPT["conversations"]}, "sft", READ),
    "dialog": ({"dialog": CHAT["messages"], "id": 1}, "sft", READ),
    "speaker": ({"messages": called("speaker", "content", CHAT["messages"])}, "sft", READ),
    "speaker elsewhere": ({"chat": called("who", "said", CHAT["messages"])}, "sft", READ),
    "from elsewhere": (
        {"chat": [{"who": "human", "said": "Hi"}, {"who": "gpt", "said": "Hello!"}]},
        "sft",
        READ,
    ),
    "text of messages": ({"messages": called("role", "text", CHAT["messages"])}, "sft", READ),
    "other names": ({"Frage": "Hi", "Antwort": "Hello!"}, "sft", READ),
    "one text in a list": ({"prompt": ["Hi"], "completion": ["Hello!"]}, "sft", READ),
    "number": ({"prompt": "Hi", "completion": 2}, "sft", (["user: Hi", "assistant: 2"],)),
    "number of alpaca": (
        {"instruction": "Hi", "input": "", "output": 2.5},
        "sft",
        (["user: Hi", "assistant: 2.5"],),
    ),
    "empty system": (
        {"messages": [{"role": "system", "content": None}, USER, ANSWER]},
        "sft",
        READ,
    ),
    "system beside the messages": (
        CHAT | {"persona": "Be brief."},
        "sft",
        (["system: Be brief.", *READ[0]],),
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "columns": (
        {"prompt": ["a", "b"], "completion": ["c", "d"]},
        "sft",
        'write a row per line, as pandas\' to_json(orient="records", lines=True) does)',
    ),
    "pandas": ({"prompt": {"0": "a"}, "completion": {"0": "b"}}, "sft", "lines=True) does)"),
    "token ids": ({"input_ids": [1], "labels": [1]}, "sft", "the messages that they stand for)"),
    "segments": (
        {"segments": [{"label": True, "text": "a"}]},
        "sft",
        "'segments' are the parts of one row: write them as 'messages': "
        '[{"role": "user", "content": …}, {"role": "assistant", …}])',
    ),
    "nested": (
        {"id": 1, "body": {"chat": {"turns": CHAT}}},
        "sft",
        "the row is under 'body.chat.turns': save that object in place of this one)",
    ),
    "moss": (
        {"conversation": [{"human": "Hi", "assistant": "Hello!"}]},
        "sft",
        '{"role": "assistant", …}])',
    ),
    "ultrachat": ({"id": "1", "data": ["How are you?", "Fine."]}, "sft", "the turns are under"),
    "refusal": (
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "No."}]},
        "sft",
        "write its 'refusal' as the content)",
    ),
    "call of Claude": (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "sft",
        "write the call under 'tool_calls' of the message)",
    ),
    "pair without a prompt": (
        {"chosen": "Hello!", "rejected": BAD},
        "dpo",
        "no prompt (write it under 'prompt')",
    ),
    "boolean": ({"prompt": "Hi", "completion": True}, "sft", "(a boolean: write it in quotes)"),
}


def follow(folder: Path, row: dict[str, Any], objective: str) -> tuple[list[Any], str]:
    """Return what a row is read as, and the last reason, with every option that reasons advise."""
    path = folder / "data.jsonl"
    path.write_text(json.dumps(row))
    fields: dict[str, str] = {}
    reasons: list[str] = []
    while True:
        skipped = SkippedRows(path)
        good = list(read_rows(path, skipped, fields=fields, objective=objective))
        if good:
            noted = " ".join(detail for each in good for _, detail in getattr(each, "unread", ()))
            if not (options := options_in(noted)) or options.items() <= fields.items():
                return good, ""
        else:
            ((_, problem),) = skipped.problems.items()
            assert str(problem) not in reasons, "following the advice changes nothing"
            reasons.append(str(problem))
            options = options_in(reasons[-1])
            for other in ("dpo", "kto"):
                if f"use --objective {other}" in reasons[-1]:
                    objective, options = other, {**options, **fields}
            if not options and f"--objective {objective}" not in reasons[-1]:
                return [], reasons[-1]
        fields |= options


def turns(row: Conversation | Document | Pair) -> tuple[list[str], ...]:
    assert not isinstance(row, Document)
    answers = row.answers if isinstance(row, Pair) else (row,)
    return tuple([f"{m.role}: {m.content}" for m in each.messages] for each in answers)


@pytest.mark.parametrize("name", FOLLOWED)
def test_row_is_read_once_the_advice_is_followed(tmp_path: Path, name: str) -> None:
    row, objective, expected = FOLLOWED[name]

    (good,), _ = follow(tmp_path, row, objective)

    assert turns(good) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_layout_is_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    row, objective, said = REFUSED[name]

    good, reason = follow(tmp_path, row, objective)

    assert good == []
    assert said in reason


def test_every_place_that_names_a_field_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        (Path(str(module.__file__)).name, call.lineno)
        for module in MODULES
        for call in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "field_option"
    }
    reached = set()
    written = keys.field_option

    def field_option(name: str, key: str) -> str:
        caller = sys._getframe(1)
        reached.add((Path(caller.f_code.co_filename).name, caller.f_lineno))
        return written(name, key)

    for module in MODULES:
        if isinstance(module, ModuleType) and hasattr(module, "field_option"):
            monkeypatch.setattr(module, "field_option", field_option)
    for row, objective, *_ in (*FOLLOWED.values(), *REFUSED.values()):
        follow(tmp_path, row, objective)

    assert places - reached == set()


@pytest.mark.parametrize("fields", [{"prompt": "role", "completion": "content"}, {}])
def test_messages_are_never_rows(tmp_path: Path, fields: dict[str, str]) -> None:
    path = tmp_path / "data.json"
    for rows in (CHAT["messages"], SHAREGPT["conversations"]):
        path.write_text(json.dumps(rows))
        with pytest.raises(ValueError, match="is a list of messages: wrap the messages"):
            list(read_rows(path, SkippedRows(path), fields=fields))


def test_table_without_column_names_gets_advice(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("Hello,Hi there\nBye,See you\n")
    assert list(read_rows(path, skipped := SkippedRows(path))) == []
    assert skipped.first().endswith(
        "use --field prompt=Hello --field completion='Hi there', or write a line of column names "
        "above if these are the values of a row)"
    )


@pytest.mark.parametrize("first", [0, 1, 2])
def test_empty_instruction_is_in_the_format_of_its_file(tmp_path: Path, first: int) -> None:
    rows: list[dict[str, Any]] = [
        {"instruction": "I", "input": None, "output": "O"},
        {"instruction": "I", "input": "x", "output": "O"},
        {"instruction": None, "input": "x", "output": "O"},
    ]
    present = [{key: row[key] for key in row if row[key] is not None} for row in rows]  # parquet
    path = tmp_path / "data.jsonl"
    for several in (rows, present):
        path.write_text("\n".join(map(json.dumps, several[first:] + several[:first])))
        skipped = SkippedRows(path)
        found = sorted(turns(each)[0][0] for each in read_rows(path, skipped))
        assert (found, skipped.total) == (["user: I", "user: I\nx", "user: x"], 0)
