"""Rows of preferences: the result of each layout, and the reasons for skipped rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.conversation import (
    CHOSEN,
    DESIRABLE,
    REJECTED,
    UNDESIRABLE,
    Conversation,
    Pair,
)
from mlxtune.core.data.problems import SkippedRows
from mlxtune.core.data.sources.recognition import read_rows
from tests.core.data.rows import ANSWER, CHAT, USER, reason
from tests.paths import SHARED

BAD = {"role": "assistant", "content": "No."}
FROM_USER, FROM_GPT, FROM_BAD = (
    {"from": name, "value": value}
    for name, value in (("human", "Hi"), ("gpt", "Hello!"), ("gpt", "No."))
)
# The same pair in the layouts of many tools.
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Hi", "chosen": "Hello!", "rejected": "No."},
    "question": {"question": "Hi", "chosen": "Hello!", "rejected": "No."},
    "messages": {"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]},
    "other roles": {"chosen": [USER, ANSWER | {"role": "Assistant"}], "rejected": [USER, BAD]},
    "whole": {"chosen": [USER, ANSWER], "rejected": [USER, BAD]},
    "prompt and whole": {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, BAD]},
    "LLaMA-Factory": {"conversations": [FROM_USER], "chosen": FROM_GPT, "rejected": FROM_BAD},
    "messages and text": {"messages": [USER], "chosen": "Hello!", "rejected": BAD},
    "OpenAI": {
        "input": {"messages": [USER], "tools": []},
        "preferred_output": [ANSWER],
        "non_preferred_output": [BAD],
    },
}


def pair_of(folder: Path, row: Any) -> Pair:
    path = folder / "data.jsonl"
    path.write_text(json.dumps(row))
    skipped = SkippedRows(path)
    (pair,) = read_rows(path, skipped, objective="dpo")
    assert isinstance(pair, Pair) and not skipped.total
    return pair


@pytest.mark.parametrize("layout", PAIRS)
def test_pair_is_the_same_in_every_layout(tmp_path: Path, layout: str) -> None:
    pair = pair_of(tmp_path, PAIRS[layout])
    sides = [[(m.role, m.content) for m in side.messages] for side in pair.answers]
    assert sides == [
        [("user", "Hi"), ("assistant", "Hello!")],
        [("user", "Hi"), ("assistant", "No.")],
    ]
    assert [side.role for side in pair.answers] == [CHOSEN, REJECTED]


def test_answers_after_the_prompt_carry_loss_and_those_within_it_do_not(tmp_path: Path) -> None:
    more = [USER, {"role": "assistant", "content": "Bye!"}]
    row = {"chosen": [USER, ANSWER, USER, ANSWER, *more], "rejected": [USER, ANSWER, USER, BAD]}
    pair = pair_of(tmp_path, row)
    assert [m.trained for m in pair.chosen.messages if m.role == "assistant"] == [False, True, True]
    assert [m.trained for m in pair.rejected.messages if m.role == "assistant"] == [False, True]


def test_tools_and_system_belong_to_both_answers(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    pair = pair_of(tmp_path, PAIRS["texts"] | {"system": "Be brief.", "tools": [tool]})
    for side in pair.answers:
        assert side.messages[0].content == "Be brief."
        assert side.tools == (tool,)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (PAIRS["texts"] | {"rejected": "Hello!"}, "chosen and rejected are the same"),
        (PAIRS["texts"] | {"rejected": " "}, "empty answer (rejected: message 2)"),
        (PAIRS["texts"] | {"chosen": []}, "empty answer (chosen)"),
        (
            PAIRS["texts"] | {"chosen": ["x"]},
            "a message is not an object (chosen: message 2 is text)",
        ),
        (PAIRS["texts"] | {"chosen": 3}, "'chosen' is neither text nor messages (a number)"),
        (PAIRS["messages"] | {"prompt": []}, "no prompt"),
        (PAIRS["whole"] | {"prompt": "Hello "}, "answers that do not begin with the prompt"),
        (
            PAIRS["whole"] | {"prompt": "Hi", "rejected": [BAD]},
            "answers that do not begin with the",
        ),
        (
            PAIRS["texts"] | {"context": "C"},
            "two readings of 'prompt', 'context' ('prompt' alone, or all together: put the",
        ),
        (
            {"chosen": "Hello!", "rejected": "No."},
            "no prompt (write it under 'prompt')",
        ),
        (
            {key: PAIRS["texts"][key] for key in ("prompt", "chosen")},
            "no 'rejected' (a pair needs both answers; its keys:",
        ),
        (PAIRS["texts"] | {"rejected": None}, "'rejected' is empty (its keys:"),
        (
            {key: PAIRS["OpenAI"][key] for key in ("input", "preferred_output")},
            "no 'non_preferred_output' (a pair needs both answers; its keys:",
        ),
        (
            {"prompt": "Hi", "good": "Yes"},
            "no known format (its keys: 'prompt', 'good'; looked for",
        ),
        (CHAT, "an answer without a preference (chat format: add 'chosen' and 'rejected', or use"),
        (
            {"prompt": "Hi", "good one": "Yes", "bad": "No"},
            "; use --field chosen='good one' --field rejected=bad)",
        ),
        (
            {"prompt": "Hi", "good": "Yes", "best": "Yes.", "bad": "No"},
            "; if your keys have other names, use --field NAME=KEY)",
        ),
        (
            {"chosen": [{"role": "user", "content": "Hey"}, ANSWER], "rejected": [USER, BAD]},
            "answers whose prompts differ",
        ),
        ({"prompt": "Hi", "completion": "Hello!"}, "an answer without a preference"),
        ({"prompt": "Hi", "completion": "Hello!", "label": True}, "use --objective kto"),
        (PAIRS["OpenAI"] | {"input": "Hi"}, "'input' has no list of messages"),
    ],
)
def test_bad_pair_is_skipped_with_its_reason(tmp_path: Path, row: Any, problem: str) -> None:
    assert problem in reason(tmp_path, row, objective="dpo")


LABELED: list[dict[str, Any]] = [
    {"prompt": "Hi", "completion": "Hello!"},
    {"messages": [USER, ANSWER]},
    {"conversations": [FROM_USER, FROM_GPT]},
]


@pytest.mark.parametrize("row", LABELED)
@pytest.mark.parametrize("label", [True, False, "true", "False", 1, 0, "1", "0", "on", "off"])
def test_label_makes_an_answer_good_or_bad(tmp_path: Path, row: Any, label: Any) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**row, "label": label}))
    (found,) = read_rows(path, SkippedRows(path), objective="kto")
    assert isinstance(found, Conversation)
    assert found.role == (DESIRABLE if label in (True, "true", "1", "on") else UNDESIRABLE)


def test_label_is_for_the_last_answer(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [USER, BAD, USER, ANSWER], "label": True}))
    (found,) = read_rows(path, SkippedRows(path), objective="kto")
    assert isinstance(found, Conversation)
    assert [message.trained for message in found.messages] == [True, False, True, True]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            LABELED[0] | {"label": "good"},
            "'label' is neither true nor false (\"good\": write true, false, 1 or 0)",
        ),
        (LABELED[0], "an answer without a preference (prompt format: add a label, or use"),
        (
            LABELED[0] | {"user_rating": "up", "lang": "en"},
            "(prompt format: use --field label=user_rating, or use --objective sft)",
        ),
        ({"ask": "Hi", "reply": "Yes", "liked": True}, "; use --field label=liked)"),
        (PAIRS["texts"], "use --objective dpo, or make two rows of it, each with its answer as"),
    ],
)
def test_bad_label_is_skipped_with_its_reason(tmp_path: Path, row: Any, problem: str) -> None:
    assert problem in reason(tmp_path, row, objective="kto")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize(
    ("name", "objective"), [("lf_dpo_en_demo.json", "dpo"), ("lf_kto_en_demo.json", "kto")]
)
def test_real_preference_files_are_read_unchanged(name: str, objective: str) -> None:
    path = SHARED / "preferences" / name
    skipped = SkippedRows(path)
    rows = list(read_rows(path, skipped, objective=objective))
    assert (len(rows), skipped.total) == (300, 0)


def test_input_of_a_pair_follows_its_instruction(tmp_path: Path) -> None:
    row = {"instruction": "Sum up.", "input": "A fox.", "chosen": "Fox", "rejected": "Cat"}
    pair = pair_of(tmp_path, row)
    assert [side.messages[0].content for side in pair.answers] == ["Sum up.\nA fox."] * 2
