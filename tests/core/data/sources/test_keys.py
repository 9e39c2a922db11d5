"""Keys of rows, messages and tool calls: read, honoured, or noted by name; none in silence."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data import problems
from mlxtune.core.data.conversation import Conversation, Pair
from mlxtune.core.data.encode import Encoder
from mlxtune.core.data.model_template import ModelTemplate
from mlxtune.core.data.problems import RowTally, SkippedRows
from mlxtune.core.data.sources.formats import FORMATS, LABELS, PAIRS
from mlxtune.core.data.sources.notes import notes_on_keys
from mlxtune.core.data.sources.recognition import read_rows
from mlxtune.core.data.template import TEMPLATES
from tests.core.data import renderers
from tests.core.data.encoding import ByteTokenizer
from tests.core.data.rows import (
    ALPACA,
    ANSWER,
    CHAT,
    PROMPT,
    ROWS,
    SHAREGPT,
    TEXT,
    USER,
    converted,
    options_in,
    read,
    reason,
    told,
)

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
CALLS += [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}]
GEMINI = {
    "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Hi"}]},
        {"role": "model", "parts": [{"text": "Hello!"}]},
    ],
}
BAD = {"role": "assistant", "content": "No."}
# A row of each format, with each level that the format has.
EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("sft", row) for name, row in ROWS.items()},
    "chat": ("sft", {"messages": CALLS, "tools": [{"name": "add"}]}),
    "parts": ("sft", {"messages": [USER | {"content": [{"type": "text", "text": "Hi"}]}, ANSWER]}),
    "prompt of messages": ("sft", {"prompt": [USER], "completion": [ANSWER]}),
    "gemini": ("sft", GEMINI),
    "chosen": ("dpo", {"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]}),
    "preferred": (
        "dpo",
        {
            "input": {"messages": [USER]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [BAD],
        },
    ),
    "labelled chat": ("kto", CHAT | {"label": True}),
    "labelled sharegpt": ("kto", SHAREGPT | {"label": True}),
    "labelled prompt": ("kto", PROMPT | {"label": True}),
    "labelled alpaca": ("kto", ALPACA | {"label": True}),
}
# Objects that are content.
CONTENT = {"arguments", "tools", "systemInstruction"}


def objects(value: Any, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield each object of a row that has keys of a format."""
    if isinstance(value, dict) and name not in CONTENT:
        if name == "mapping":
            yield from (each["message"] for each in value.values() if each["message"])
            return
        yield value
        for key, inner in value.items():
            yield from objects(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner, name)


LEVELS = [(name, level) for name, (_, row) in EVERY.items() for level, _ in enumerate(objects(row))]


def notes(
    folder: Path,
    row: Mapping[str, Any],
    objective: str = "sft",
    template: Any = None,
    **others: Any,
) -> dict[str, str]:
    """Return the kinds of notes on a row, each with its detail."""
    path = folder / "data.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    skipped, tally = SkippedRows(path), RowTally()
    encoder = Encoder(
        template or TEMPLATES["qwen3"], ByteTokenizer(narrow=False, eos="<e>"), **others
    )
    rows = read_rows(path, skipped, objective=objective)
    assert list(encoder.encode(rows, skipped, tally))
    assert not skipped.total, skipped.first()
    return {kind: places[0][1] for kind, places in tally.places.items()}


def test_every_format_is_walked() -> None:
    assert EVERY.keys() >= {*FORMATS, *PAIRS, *LABELS}


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_unknown_key_is_noted_by_name_at_every_level(tmp_path: Path, name: str, level: int) -> None:
    objective, row = EVERY[name]
    assert notes(tmp_path, row, objective) == {}
    changed = copy.deepcopy(row)
    list(objects(changed))[level]["zither"] = "Plays softly."

    (kind,) = notes(tmp_path, changed, objective)

    assert kind.startswith("key 'zither' of a ")
    assert problems.advice_on(kind).startswith("the model does not see it")


@pytest.mark.parametrize("name", EVERY)
def test_metadata_is_noted_together(tmp_path: Path, name: str) -> None:
    objective, row = EVERY[name]
    metadata = {"id": 7, "source": "a", "Created At": 3}

    noted = notes(tmp_path, row | metadata, objective)

    assert noted == {problems.UNREAD_METADATA: "'Created At', 'id', 'source'"}


def test_text_that_the_conversation_repeats_is_metadata(tmp_path: Path) -> None:
    row = {"messages": [USER | {"content": "Say hello now."}, ANSWER], "prompt": "Say hello now."}
    assert notes(tmp_path, row) == {problems.UNREAD_METADATA: "'prompt'"}
    assert list(notes(tmp_path, row | {"prompt": "Say it."})) == [
        "key 'prompt' of a row is not read"
    ]


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_empty_value_is_not_a_key(tmp_path: Path, value: Any) -> None:
    assert notes(tmp_path, CHAT | {"zither": value}) == {}


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("system_prompt", "system_prompt"),
        ("System Prompt", "'System Prompt'"),
        ("persona\x1b", "KEY"),
    ],
)
def test_system_prompt_beside_the_messages_is_noted_with_its_option(
    tmp_path: Path, key: str, option: str
) -> None:
    noted = notes(tmp_path, CHAT | {key: "Answer in JSON."})
    assert noted == {f"key {key!r} of a row is not read": f"use --field system={option}"}


def test_system_instruction_reaches_the_model(tmp_path: Path) -> None:
    expected = [("system", "Be brief.", True), ("user", "Hi", True), ("assistant", "Hello!", True)]
    assert told(tmp_path, GEMINI) == expected
    snake = {key.replace("I", "_i"): value for key, value in GEMINI.items()}
    assert told(tmp_path, snake) == expected
    assert (
        told(tmp_path, GEMINI, fields={"messages": "contents", "content": "parts"}) == expected[1:]
    )


def test_kinds_of_unread_keys_stay_few() -> None:
    tally = RowTally()
    for number in range(100):
        kind = problems.bounded(problems.unread_key("a row", f"k{number}"), tally.counts)
        tally.count(number, kind)
    assert len(tally.counts) == 33
    assert tally.counts[problems.FURTHER_KEYS] == 68


# Marks

MARKED = [
    *(("weight", 0, 1), ("weight", "0", "1"), ("loss", False, True), ("train", "no", "yes")),
    *(("training", False, None), ("loss_mask", 0, 1), ("lossWeight", 0.0, 1.0)),
    *(("trainable", "False", "true"), ("masked", True, False), ("is_masked", 1, 0)),
    *(("compute_loss", False, True), ("loss_scale", 0, 1), ("Train", "off", "on")),
    *(("sample_weight", 0, 1), ("train_mask", 0, 1), ("response_mask", "0", "1")),
]


@pytest.mark.parametrize(("key", "context", "learned"), MARKED)
@pytest.mark.parametrize("format", ["chat", "sharegpt", "prompt"])
def test_marked_turn_is_context(
    tmp_path: Path, key: str, context: Any, learned: Any, format: str
) -> None:
    turns = [USER, ANSWER | {key: context}, USER, ANSWER | {key: learned}]
    row: dict[str, Any] = {"messages": turns}
    if format == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        row = {
            "conversations": [
                {**turn, "from": names[turn["role"]], "value": turn["content"]} for turn in turns
            ]
        }
        for entry in row["conversations"]:
            del entry["role"], entry["content"]
    if format == "prompt":
        row = {"prompt": turns[:1], "completion": turns[1:]}

    said = told(tmp_path, row)

    assert [trained for role, _, trained in said if role == "assistant"] == [False, True]
    assert notes(tmp_path, row) == {}


@pytest.mark.parametrize(
    "key",
    [
        *("loss", "train", "weight", "loss_mask"),
        *("sample_weight", "response_mask", "assistant_mask", "train_mask"),
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_marked_row_is_skipped(tmp_path: Path, key: str, name: str) -> None:
    row = EVERY[name][1] | {key: False}
    assert reason(tmp_path, row) == f"a row that is marked not to be learned ('{key}': false)"
    assert notes(tmp_path, row | {key: True}) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("split", "test"), ("Split", "Held-out"), ("subset", "validation")),
        *(("status", "do not train"), ("tag", "Don't train"), ("note", "excluded")),
        *(("metadata", {"train": False}), ("extra_info", {"masked": True})),
    ],
)
def test_fact_that_excludes_a_row_from_training_is_noted(
    tmp_path: Path, key: str, value: Any
) -> None:
    assert list(notes(tmp_path, CHAT | {key: value})) == [
        f"key {key!r} of a row is not read as a mark"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("split", "train"), ("status", "reviewed"), ("topic", "test"), ("tag", "training")),
        *(("metadata", {"train": True, "loss": 0}), ("note", "Do not train the dog at night")),
    ],
)
def test_other_facts_are_metadata(tmp_path: Path, key: str, value: Any) -> None:
    assert notes(tmp_path, CHAT | {key: value}) == {problems.UNREAD_METADATA: repr(key)}


def test_measured_row_loss_is_not_read_as_a_mark(tmp_path: Path) -> None:
    assert notes(tmp_path, CHAT | {"loss": 1.25}) == {problems.UNREAD_METADATA: "'loss'"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"loss": 0.5}, "'loss' is neither 0 nor 1 (message 2)"),
        ({"loss_mask": [0, 1]}, "'loss_mask' is neither 0 nor 1 (message 2)"),
        ({"weight": 1, "train": False}, "contradictory marks on a turn"),
        ({"mask": True}, "'mask' of a turn is ambiguous (message 2: write 'weight')"),
    ],
)
def test_unclear_mark_is_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    assert reason(tmp_path, {"messages": [USER, ANSWER | keys]}).startswith(said)


def test_mark_to_learn_a_question_is_noted(tmp_path: Path) -> None:
    row = {"messages": [USER | {"train": True}, ANSWER]}
    assert list(notes(tmp_path, row)) == ["key 'train' of a message is not read as a mark"]
    assert notes(tmp_path, {"messages": [USER | {"train": False}, ANSWER]}) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("ignore", True), ("skip", True), ("exclude", True), ("include_in_loss", False)),
        *(("step_loss_mask", 0), ("train_on", "last"), ("train_on_turns", [1])),
        *(("train_detail", [{"begin_offset": 0}]), ("labels", [0, 1, 1]), ("weights", [0.5])),
    ],
)
@pytest.mark.parametrize("level", ["row", "message"])
def test_mark_of_another_name_is_noted_with_the_mark_to_write(
    tmp_path: Path, key: str, value: Any, level: str
) -> None:
    marked = {key: value}
    row = CHAT | marked if level == "row" else {"messages": [USER, ANSWER | marked]}

    (kind,) = notes(tmp_path, row)

    assert kind == f"key {key!r} of a {level} is not read as a mark"
    assert 'write "weight": 0 on the message' in problems.advice_on(kind)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("loss_mask", [0, 0, 0, 1]), ("loss_mask", [False, True]), ("weights", [0.0, 1.0])),
        *(("step_loss_mask", [0, 0, 0, 1]), ("masked", [1, 1, 1, 0]), ("masked", [1, 0])),
    ],
)
@pytest.mark.parametrize("format", ["chat", "sharegpt", "prompt"])
def test_list_of_marks_in_a_row_is_followed_by_turn(
    tmp_path: Path, key: str, value: list[Any], format: str
) -> None:
    turns = [USER, ANSWER, USER, ANSWER]
    entries = [{"from": turn["role"], "value": turn["content"]} for turn in turns]
    row: dict[str, Any] = {
        "chat": {"messages": turns},
        "sharegpt": {"conversations": entries},
        "prompt": {"prompt": turns[:1], "completion": turns[1:]},
    }[format] | {key: value}

    said = told(tmp_path, row)

    assert [trained for role, _, trained in said if role == "assistant"] == [False, True]
    assert notes(tmp_path, row) == {}


@pytest.mark.parametrize(
    ("turn", "marks", "said"),
    [
        ({}, {"loss_mask": [0, 1, 1]}, "marks of a row that fit neither its messages nor its"),
        ({"weight": 1}, {"loss_mask": [0, 0]}, "contradictory marks on a turn"),
        ({}, {"loss_mask": [1, 0]}, "no assistant turn with weight 1"),
        ({}, {"mask": [0, 1]}, "'mask' of a row is ambiguous"),
        ({}, {"mask": True}, "'mask' of a row is ambiguous"),
        ({}, {"mask": 0}, "'mask' of a row is ambiguous"),
    ],
)
def test_unclear_marks_of_a_row_are_refused(
    tmp_path: Path, turn: dict[str, Any], marks: dict[str, Any], said: str
) -> None:
    assert reason(tmp_path, {"messages": [USER, ANSWER | turn], **marks}).startswith(said)


@pytest.mark.parametrize("name", EVERY)
def test_row_with_images_is_skipped_in_every_format(tmp_path: Path, name: str) -> None:
    objective, row = EVERY[name]
    for key in ("image", "images", "Audio", "audios", "videos", "image_url"):
        said = reason(tmp_path, row | {key: ["a.png"]}, objective=objective)
        assert said.startswith("images, audio and video are out of scope"), key
        assert notes(tmp_path, row | {key: []}, objective) == {}, key


def test_message_with_images_is_skipped(tmp_path: Path) -> None:
    said = reason(tmp_path, {"messages": [USER | {"images": ["a.png"]}, ANSWER]})
    assert said == "images, audio and video are out of scope (message 1: 'images')"


@pytest.mark.parametrize(
    "key", ["reasoning", "reasoning_content", "thinking", "rationale", "thought", "cot"]
)
def test_thinking_in_a_row_is_noted_with_its_field(tmp_path: Path, key: str) -> None:
    (kind,) = notes(tmp_path, PROMPT | {key: "Greet back."})
    assert kind == f"key {key!r} of a row is not read as thinking"
    assert "rename it to reasoning_content in the answer's message" in problems.advice_on(kind)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zither", 3),
        ("zither", 0.5),
        ("labels", ["news"]),
        ("__index_level_0__", 7),
        ("generationConfig", {"a": 1}),
    ],
)
def test_numbers_and_settings_are_metadata(tmp_path: Path, key: str, value: Any) -> None:
    assert notes(tmp_path, CHAT | {key: value}) == {problems.UNREAD_METADATA: repr(key)}


# Values


@pytest.mark.parametrize(
    "row",
    [
        ALPACA | {"output": ["Good.", "Bad."]},
        {"messages": [USER, ANSWER | {"content": ["Good.", "Bad."]}]},
        {"conversations": [{"from": "human", "value": ["A", "B"]}, SHAREGPT["conversations"][1]]},
        PROMPT | {"completion": ["Good.", "Bad."]},
        CHAT | {"system": ["A", "B"]},
        ALPACA | {"history": [["Hi", ["Good.", "Bad."]]]},
        {"contents": [*GEMINI["contents"][:1], {"role": "model", "parts": ["Good.", "Bad."]}]},
    ],
)
def test_several_texts_are_not_glued(tmp_path: Path, row: dict[str, Any]) -> None:
    said = reason(tmp_path, row)
    assert said.startswith("several texts where one is expected")
    assert said.endswith("'chosen' and 'rejected' of --objective dpo)")


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"question": "Hi", "answer": {}}, {}),
        ({"question": "Hi", "answer": ["Good.", "Bad."]}, {}),
        ({"instruction": "Hi", "context": "Here", "answer": ["Good.", "Bad."]}, None),
        ({"asked": "Hi", "answer": True}, {"prompt": "asked", "completion": "answer"}),
    ],
)
def test_reason_names_the_key_of_the_row(
    tmp_path: Path, row: dict[str, Any], fields: dict[str, str] | None
) -> None:
    if fields is None:
        fields = {"input": "context", "output": "answer"}
    said = reason(tmp_path, row, fields=fields)
    assert "'answer'" in said
    assert "'completion'" not in said
    assert "'output'" not in said


def test_parts_of_a_chatgpt_message_are_one_text(tmp_path: Path) -> None:
    row = copy.deepcopy(EVERY["chatgpt"][1])
    row["mapping"]["a"]["message"]["content"]["parts"] = ["Hel", "lo!"]
    assert told(tmp_path, row)[-1] == ("assistant", "Hello!", True)


# Results of calls


def calls_and_results(*results: str | None) -> dict[str, Any]:
    calls = [CALL | {"id": name} for name in ("a", "b")]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    told_back = [{"role": "tool", "content": str(name), "tool_call_id": name} for name in results]
    return {"messages": [USER, answer, *told_back, ANSWER], "tools": [{"name": "add"}]}


def test_results_are_in_the_order_of_their_calls(tmp_path: Path) -> None:
    row = calls_and_results("b", "a")
    assert [text for role, text, _ in told(tmp_path, row) if role == "tool"] == ["a", "b"]
    assert notes(tmp_path, row) == {}


@pytest.mark.parametrize("results", [("b", "c"), ("b", None, "a")])
def test_results_without_their_call_stay_in_order(
    tmp_path: Path, results: tuple[str | None, ...]
) -> None:
    said = told(tmp_path, calls_and_results(*results))
    assert [text for role, text, _ in said if role == "tool"] == [*map(str, results)]


def test_result_of_no_call_is_a_finding(tmp_path: Path) -> None:
    assert notes(tmp_path, calls_and_results("a", "c")) == {
        problems.UNMATCHED_RESULT: "message 4: 'c'"
    }


def test_title_and_time_of_a_chatgpt_export_are_expected(tmp_path: Path) -> None:
    row = EVERY["chatgpt"][1] | {"title": "Greeting", "create_time": 1.5, "is_archived": False}
    assert notes(tmp_path, row) == {}


# Parts


@pytest.mark.parametrize("snake", [False, True])
def test_calls_and_results_of_gemini_are_read(tmp_path: Path, snake: bool) -> None:
    call, result, declared = (
        ("function_call", "function_response", "function_declarations")
        if snake
        else ("functionCall", "functionResponse", "functionDeclarations")
    )
    row = {
        "tools": [{declared: [{"name": "add"}]}],
        "contents": [
            {"role": "user", "parts": [{"text": "Hi"}]},
            {"role": "model", "parts": [{call: {"name": "add", "args": {"a": 1}}}]},
            {"role": "user", "parts": [{result: {"name": "add", "response": {"sum": 1}}}]},
            {"role": "model", "parts": [{"text": "One."}]},
        ],
    }

    one = converted(tmp_path, row)

    assert [message.role for message in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[1].tool_calls == (CALL,)
    assert one.messages[2].content == '{"sum": 1}'
    assert one.tools == ({"type": "function", "function": {"name": "add"}},)
    assert notes(tmp_path, row) == {}


@pytest.mark.parametrize("part", ["inlineData", "inline_data", "fileData", "file_data"])
def test_media_of_gemini_are_images(tmp_path: Path, part: str) -> None:
    entry = {"role": "user", "parts": [{"text": "Hi"}, {part: {"mimeType": "image/png"}}]}
    said = reason(tmp_path, {"contents": [entry, GEMINI["contents"][1]]})
    assert said.startswith("images, audio and video are out of scope")


def test_part_without_text_is_named(tmp_path: Path) -> None:
    entry = {"role": "model", "parts": [{"executableCode": {"code": "1"}}]}
    said = reason(tmp_path, {"contents": [GEMINI["contents"][0], entry]})
    assert said == "content has a part that is not text (message 2: 'executableCode')"


def test_text_parts_of_all_names_are_text(tmp_path: Path) -> None:
    asked = [{"type": "input_text", "text": "Hi"}]
    said = [{"type": "output_text", "text": "Hello!", "annotations": []}]
    row = {"messages": [USER | {"content": asked}, ANSWER | {"content": said}]}
    assert told(tmp_path, row) == told(tmp_path, CHAT)
    assert notes(tmp_path, row) == {}


def test_one_part_without_a_list_is_read(tmp_path: Path) -> None:
    row = {
        "system_instruction": {"parts": {"text": "Be brief."}},
        "contents": [
            {"role": "user", "parts": {"text": "Hi"}},
            {"role": "model", "parts": {"text": "Hello!"}},
        ],
    }
    assert told(tmp_path, row) == told(tmp_path, GEMINI)


# JSON text


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("place", ["arguments", "role", "tool_calls", "tools"])
def test_number_that_json_lacks_is_refused_in_json_text(
    tmp_path: Path, number: str, place: str
) -> None:
    arguments, tools = f'{{"a": {number}}}', "[]"
    call = f'{{"name": "add", "arguments": {arguments}}}'
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    if place == "arguments":
        turn["tool_calls"][0]["arguments"] = arguments
    elif place == "role":
        turn = {"role": "function_call", "content": call}
    elif place == "tool_calls":
        turn["tool_calls"] = f"[{call}]"
    else:
        turn, tools = ANSWER, f'[{{"name": "add", "default": {number}}}]'
    assert f"{number} in JSON text" in reason(tmp_path, {"messages": [USER, turn], "tools": tools})


def test_tool_calls_as_json_text_are_read(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}
    one = converted(tmp_path, {"messages": [USER, turn]})
    assert one.messages[-1].tool_calls == (CALL,)
    assert one.messages[-1].fields["tool_calls"] == [CALL]


@pytest.mark.parametrize("sharegpt", [False, True])
def test_call_without_arguments_has_none_in_every_format(tmp_path: Path, sharegpt: bool) -> None:
    def answers(call: dict[str, Any]) -> list[dict[str, Any]]:
        written = json.dumps(call)
        row: dict[str, Any] = {"messages": [USER, {"role": "function_call", "content": written}]}
        if sharegpt:
            entry = {"from": "function_call", "value": written}
            row = {"conversations": [SHAREGPT["conversations"][0], entry]}
        listed = {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": call}]}]}
        return [row, listed]

    for row in answers({"name": "f"}):
        (call,) = converted(tmp_path, row).messages[-1].tool_calls
        assert call["function"] == {"name": "f", "arguments": {}}
    one, other = (reason(tmp_path, row) for row in answers({"name": "f", "parameters": {"a": 1}}))
    assert one == other
    assert one.startswith("a tool call whose arguments are not an object")


# Exports, roles and preferences


def claude(*content: Any, **others: Any) -> dict[str, Any]:
    answer = {"uuid": "2", "sender": "assistant", "text": "Hello!", "content": [*content]}
    asked = {"uuid": "1", "sender": "human", "text": "Hi", "created_at": "2025", "files": []}
    return {
        **{"uuid": "0", "name": "Greeting", "account": {"uuid": "9"}, "created_at": "2025"},
        "chat_messages": [asked, answer | others],
    }


@pytest.mark.parametrize(
    "content", [(), ({"type": "text", "text": "Hello!", "start_timestamp": "2025"},)]
)
def test_claude_export_is_read(tmp_path: Path, content: tuple[Any, ...]) -> None:
    assert told(tmp_path, claude(*content)) == told(tmp_path, CHAT)
    assert notes(tmp_path, claude(*content)) == {}


def test_thinking_and_attachments_of_a_claude_export_are_not_lost(tmp_path: Path) -> None:
    parts = ({"type": "thinking", "thinking": "Greet."}, {"type": "text", "text": "Hello!"})
    row = claude(*parts, attachments=[{"extracted_content": "A"}])
    assert converted(tmp_path, row).messages[-1].thinking == "Greet."
    assert list(notes(tmp_path, row)) == ["key 'attachments' of a message is not read"]


def test_tools_of_a_claude_export_are_refused(tmp_path: Path) -> None:
    said = reason(tmp_path, claude({"type": "tool_use", "name": "f", "input": {}}))
    assert said.startswith("a Claude conversation with tools (message 2")


@pytest.mark.parametrize(
    ("role", "hint"),
    [
        ("human", "write 'user'"),
        ("GPT", "write 'assistant'"),
        ("zither", "known: system, user, assistant, tool, developer, model, function"),
    ],
)
def test_unknown_role_names_the_roles_to_write(tmp_path: Path, role: str, hint: str) -> None:
    row = {"messages": [{"role": role, "content": "Hi"}, ANSWER]}
    assert reason(tmp_path, row).startswith(f"unknown role (message 1: {role!r}; {hint}")


@pytest.mark.parametrize("label", ["bad", "Bad", "undesirable", "no"])
def test_answer_labeled_as_bad_is_not_trained_on(tmp_path: Path, label: str) -> None:
    assert reason(tmp_path, PROMPT | {"label": label}).startswith("an answer labelled as bad")


@pytest.mark.parametrize("key", ["label", "labels", "label_text"])
@pytest.mark.parametrize("value", ["bad", 0, 1, "1.0"])
def test_class_of_plain_text_is_noted_with_the_options_that_learn_it(
    tmp_path: Path, key: str, value: Any
) -> None:
    assert notes(tmp_path, TEXT | {key: value}) == {problems.CLASS_LABEL: repr(key)}
    fields = options_in(problems.ADVICE[problems.CLASS_LABEL].replace("KEY", key))
    learned = converted(tmp_path, TEXT | {key: value}, fields=fields)
    assert [m.content for m in learned.messages] == [TEXT["text"], str(value)]


@pytest.mark.parametrize("key", ["rejected_response", "rejected_answer", "non_preferred_output"])
def test_row_with_a_rejected_answer_is_a_pair(tmp_path: Path, key: str) -> None:
    said = reason(tmp_path, PROMPT | {key: "No."})
    assert said == f"a preference pair ({key!r}: use --objective dpo)"
    (pair,), _ = read(tmp_path, PROMPT | {key: "No."}, objective="dpo")
    assert isinstance(pair, Pair)
    assert [each.messages[-1].content for each in pair.answers] == ["Hello!", "No."]


# Templates

READS = "{{ message.zither }} {{ mood }} {{ message['reasoning_content'] }} {{ enable_thinking }}"


def own_template(source: str = READS) -> tuple[ModelTemplate, renderers.Renderer]:
    renderer = renderers.Renderer(renderers.qwen3_like)
    return ModelTemplate(renderer, renderers.END_TOKENS, source), renderer


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{{ tool_call.name }}{{ function['name'] }}{{ tool.name }}", False),
        ("{{ message.name }}", True),
        ("{{ message['name'] }}", True),
        ("{{ messages[0].get('name') }}", True),
    ],
)
def test_name_of_a_user_is_read_only_from_a_message(
    tmp_path: Path, source: str, read: bool
) -> None:
    template, _ = own_template()
    row = {"messages": [USER | {"name": "Bob"}, ANSWER]}
    expected = {} if read else {problems.UNREAD_METADATA: "'name'"}
    assert notes(tmp_path, row, template=template, template_text=source) == expected


def test_key_that_the_template_reads_is_not_noted(tmp_path: Path) -> None:
    row = {"messages": [USER | {"zither": "a", "lute": "b"}, ANSWER]}
    template, _ = own_template()

    noted = notes(tmp_path, row, template=template, template_text=READS)

    assert noted == {"key 'lute' of a message is not read": "message 1"}


def test_options_of_a_row_reach_a_template_that_reads_them(tmp_path: Path) -> None:
    row = CHAT | {"chat_template_kwargs": {"mood": "calm", "lute": 1, "bos_token": "x"}}
    template, renderer = own_template()

    noted = notes(tmp_path, row, template=template, template_text=READS)

    assert noted.keys() == {
        f"key {key!r} of the template's options is not read" for key in ("lute", "bos_token")
    }
    asked = [request.options.get("options") for request in renderer.requests]
    assert {"mood": "calm"} in asked
    assert all(each in (None, {"mood": "calm"}) for each in asked)


@pytest.mark.parametrize("given", ["row", "object", "text"])
@pytest.mark.parametrize("thinks", [True, False])
def test_row_decides_whether_the_template_thinks(tmp_path: Path, given: str, thinks: bool) -> None:
    option = {"enable_thinking": thinks}
    several = json.dumps(option) if given == "text" else option
    row = CHAT | (option if given == "row" else {"chat_template_kwargs": several})
    template, renderer = own_template()

    assert notes(tmp_path, row, template=template, template_text=READS) == {}

    asked = {request.options["enable_thinking"] for request in renderer.requests}
    assert asked - {None} == {thinks}


@pytest.mark.parametrize(("given", "thinks"), [("false", False), ("True", True), (0, False)])
def test_switch_of_a_template_may_be_text_or_a_number(
    tmp_path: Path, given: Any, thinks: bool
) -> None:
    for row in ({"enable_thinking": given}, {"chat_template_kwargs": {"enable_thinking": given}}):
        assert converted(tmp_path, CHAT | row).options == {"enable_thinking": thinks}


def test_non_boolean_switch_is_a_reason(tmp_path: Path) -> None:
    said = reason(tmp_path, CHAT | {"enable_thinking": "maybe"})
    assert said == """'enable_thinking' is neither true nor false ("maybe")"""


def test_options_are_noted_where_the_built_in_template_has_none(tmp_path: Path) -> None:
    noted = notes(tmp_path, CHAT | {"enable_thinking": False})
    (kind,) = noted
    assert kind == "key 'enable_thinking' of the template's options is not read"
    assert problems.advice_on(kind).startswith("it changes nothing here")


@pytest.mark.parametrize(
    "key", ["reasoning_content", "thinking", "reasoning", "thought", "Thoughts"]
)
def test_thinking_under_a_rare_name_is_trained_on(tmp_path: Path, key: str) -> None:
    row = {"messages": [USER, ANSWER | {key: "Greet back."}]}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row))

    (conversation,) = read_rows(path, SkippedRows(path))

    assert isinstance(conversation, Conversation)
    assert conversation.messages[-1].thinking == "Greet back."
    assert notes(tmp_path, row) == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("thinking", "thought"),
        ("reasoning_content", "thinking"),
        ("reasoning_content", "reasoning"),
        ("thinking", "reasoning"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_second_thinking_is_noted(tmp_path: Path, first: str, second: str, own: bool) -> None:
    row = {"messages": [USER, ANSWER | {first: "Greet.", second: "Or not."}]}
    template = own_template()[0] if own else None

    assert list(notes(tmp_path, row, template=template, template_text=READS * own)) == [
        f"key {second!r} of a message is not read as thinking"
    ]


# Templates, each with whether it reads a key of messages.
READERS = {
    "{% for message in messages %}{{ message.KEY }}": True,
    "{{ messages[0]['KEY'] }}": True,
    '{{ messages[loop.index0 - 1].get("KEY") }}': True,
    "{% for m in messages[1:] %}{% if 'KEY' in m %}x": True,
    "{%- set turns = messages -%}{% for turn in turns if turn %}{{ turn['KEY'] }}": True,
    "{%- set last = messages[-1] %}{{ last.KEY }}": True,
    "{{ messages | map(attribute='KEY') }}": True,
    "{{ messages | selectattr('KEY') }}": True,
    "{% for message in messages %}{{ message | tojson }}": True,
    '{{ tool_call.KEY }}{{ tool["KEY"] }} {"KEY": <a string>}': False,
    "{% for call in message.tool_calls %}{{ call.KEY }}": False,
    "{% set function = messages[0]['tool_calls'][0] %}{{ function.KEY }}": False,
}


@pytest.mark.parametrize("key", ["name", "arguments", "function"])
@pytest.mark.parametrize("source", READERS)
def test_key_of_a_message_is_noted_if_only_calls_or_tools_have_it(
    tmp_path: Path, source: str, key: str
) -> None:
    row = converted(tmp_path, {"messages": [USER | {key: "Bob"}, ANSWER]})

    noted = notes_on_keys(row, source.replace("KEY", key))

    assert bool(noted) is not READERS[source]
    assert all(repr(key) in f"{kind} {detail}" for kind, detail in noted.items())


# Agents' formats


@pytest.mark.parametrize("call", ["function_call", "tool_call", "toolCall", "Tool_Calls"])
@pytest.mark.parametrize("result", ["observation", "tool_response", "function_response", "tool"])
@pytest.mark.parametrize("sharegpt", [False, True])
def test_roles_of_agents_are_calls_and_results(
    tmp_path: Path, call: str, result: str, sharegpt: bool
) -> None:
    written = json.dumps(CALL["function"])
    turns = [("user", "Hi"), (call, written), (result, "1"), ("assistant", "One.")]
    role, content = ("from", "value") if sharegpt else ("role", "content")
    entries = [{role: name, content: text} for name, text in turns]
    row = {"conversations" if sharegpt else "messages": entries}

    assert told(tmp_path, row) == told(tmp_path, {"messages": CALLS})


@pytest.mark.parametrize(
    ("between", "turns"),
    [
        ([], ["user", "assistant", "tool", "assistant"]),
        ([("observation", "0")], ["user", "assistant", "tool", "assistant", "tool", "assistant"]),
    ],
)
def test_calls_in_a_row_are_one_turn(
    tmp_path: Path, between: list[tuple[str, str]], turns: list[str]
) -> None:
    calls = [("function_call", json.dumps({"name": name, "arguments": {}})) for name in "fg"]
    entries = [("human", "Hi"), ("gpt", "I look."), calls[0], *between, calls[1]]
    entries += [("observation", "1"), ("gpt", "One.")]
    row = {"conversations": [{"from": name, "value": text} for name, text in entries]}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row))

    (one,) = read_rows(path, SkippedRows(path))

    assert isinstance(one, Conversation)
    assert [message.role for message in one.messages] == turns
    first = one.messages[1]
    assert first.content == "I look."
    assert [call["function"]["name"] for call in first.tool_calls] == ["f", "g"][: 2 - len(between)]


def test_calls_of_one_turn_have_one_mark(tmp_path: Path) -> None:
    call = {"role": "tool_call", "content": json.dumps({"name": "f", "arguments": {}})}
    row = {"messages": [USER, call, call | {"loss": False}, ANSWER]}
    assert reason(tmp_path, row) == "a turn whose calls are marked differently (message 3)"


# Nulls


def test_nan_is_an_empty_cell(tmp_path: Path) -> None:
    row = {"instruction": "Hi", "input": float("nan"), "output": "Hello!"}
    assert told(tmp_path, row) == [("user", "Hi", True), ("assistant", "Hello!", True)]
    assert reason(tmp_path, row | {"output": float("nan")}).startswith("'output' is empty")


# Further rows as other tools write them, and what they are read as

QUESTION = {"role": "user", "content": "Sum?"}
SUM = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        # ms-swift, with a call that is not learned
        (
            {
                "messages": [
                    USER,
                    {"role": "tool_call", "content": json.dumps(CALL["function"]), "loss": False},
                    {"role": "tool_response", "content": "1"},
                    ANSWER | {"loss": True},
                ]
            },
            [False, True],
        ),
        # axolotl's names in ShareGPT's turns
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi", "train": False},
                    {"from": "gpt", "value": "Hello!", "train": "false"},
                    {"from": "human", "value": "Well?", "train": 0},
                    {"from": "gpt", "value": "Well.", "train": "true"},
                ]
            },
            [False, True],
        ),
        # NeMo's, torchtune's and tinker's marks
        ({"messages": [USER, ANSWER | {"masked": True}, USER, ANSWER]}, [False, True]),
        ({"messages": [USER, ANSWER | {"trainable": False}, USER, ANSWER]}, [False, True]),
        # Gemini's marks beside the parts
        (
            {
                "contents": [
                    *GEMINI["contents"][:1],
                    {"role": "model", "parts": [{"text": "A."}], "weight": 0},
                    *GEMINI["contents"],
                ]
            },
            [False, True],
        ),
        # a table that went through Arrow, with a mark for every turn
        (
            {
                "messages": [
                    USER | {"loss_mask": None, "tool_calls": None},
                    ANSWER | {"loss_mask": 0.0, "tool_calls": None},
                    USER | {"loss_mask": None, "tool_calls": None},
                    ANSWER | {"loss_mask": 1.0, "tool_calls": None},
                ]
            },
            [False, True],
        ),
        # marks of a prompt of messages, which is context anyway
        ({"prompt": [USER, ANSWER | {"loss": True}, USER], "completion": [ANSWER]}, [False, True]),
        # calls with arguments as JSON text beside calls of a role of their own
        (
            {
                "messages": [
                    QUESTION,
                    SUM | {"tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]},
                    {"role": "function_call", "content": json.dumps(CALL["function"])},
                    {"role": "observation", "content": "1"},
                    ANSWER,
                ]
            },
            [True, True],
        ),
        # OpenAI's older functions
        (
            {
                "messages": [
                    QUESTION,
                    {"role": "assistant", "content": None, "function_call": CALL["function"]},
                    {"role": "function", "name": "add", "content": "1"},
                    ANSWER,
                ]
            },
            [True, True],
        ),
        # a system prompt as a message of OpenAI's, beside ShareGPT's turns
        (SHAREGPT | {"system": {"role": "system", "content": "Be brief."}}, [True]),
    ],
)
def test_rows_of_other_tools_are_learned_as_these_tools_do(
    tmp_path: Path, row: dict[str, Any], learned: list[bool]
) -> None:
    said = told(tmp_path, row)
    assert [trained for role, _, trained in said if role == "assistant"] == learned
    quiet = {problems.UNDECLARED_TOOL, problems.UNREAD_METADATA}
    assert notes(tmp_path, row).keys() <= quiet


# More variants of the same situations: marks, nulls, arguments, roles, calls, system prompts

LATER = {"role": "assistant", "content": "Well."}
ADD = json.dumps(CALL["function"])
NAN = float("nan")


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        *(
            ({"messages": [USER, ANSWER | mark, USER, LATER]}, [False, True])
            for mark in ({"weight": 0.0}, {"loss": "0"}, {"train": "no"}, {"learn": False})
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi", "weight": None, "tool": None},
                    {"from": "gpt", "value": "Hello!", "weight": None, "tool": None},
                ],
                "system": None,
                "tools": None,
            },
            [True],
        ),
        ({"instruction": "Hi", "input": None, "output": "Hello!", "history": None}, [True]),
        (
            {
                "messages": [
                    USER | {"content": [{"type": "text", "text": "Hi", "image_url": None}]},
                    ANSWER | {"name": None},
                ]
            },
            [True],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Sum?"},
                    {"from": "function_call", "value": ADD},
                    {"from": "function_response", "value": "1"},
                    {"from": "gpt", "value": "One."},
                ]
            },
            [True, True],
        ),
        *(
            ({"messages": [QUESTION, SUM, {"role": role, "content": "1"}, ANSWER]}, [True, True])
            for role in ("tool_result", "ipython")
        ),
        ({"messages": [USER | {"name": NAN}, ANSWER]}, [True]),
        (PROMPT | {"system": NAN}, [True]),
        (
            {
                "messages": [
                    QUESTION,
                    *[{"role": "function_call", "content": ADD}] * 3,
                    {"role": "observation", "content": "1"},
                    ANSWER,
                ]
            },
            [True, True],
        ),
        (
            {
                "messages": [
                    QUESTION,
                    {"role": "assistant", "content": "Let me see."},
                    {"role": "tool_call", "content": ADD},
                    {"role": "tool_response", "content": "1"},
                    ANSWER,
                ]
            },
            [True, True],
        ),
        (CHAT | {"system": "Be brief."}, [True]),
        ({"system_instruction": "Be brief.", "contents": GEMINI["contents"]}, [True]),
        ({"messages": [{"role": "developer", "content": "Be brief."}, USER, ANSWER]}, [True]),
    ],
)
def test_variants_of_these_rows_are_learned_alike(
    tmp_path: Path, row: dict[str, Any], learned: list[bool]
) -> None:
    said = told(tmp_path, row)
    assert [trained for role, _, trained in said if role == "assistant"] == learned
    assert notes(tmp_path, row).keys() <= {problems.UNDECLARED_TOOL}
    instructions = [text for role, text, _ in said if role == "system"]
    assert instructions == (["Be brief."] if "Be brief." in json.dumps(row) else [])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (PROMPT | {"train": False}, "a row that is marked not to be learned"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight"),
        ({"messages": [USER, ANSWER | {"loss": True, "train": False}]}, "train"),
        *(
            (
                {
                    "messages": [
                        QUESTION,
                        SUM | {"tool_calls": [{"name": "add", "arguments": arguments}]},
                    ]
                },
                "arguments",
            )
            for arguments in ("", [1], json.dumps(ADD))
        ),
    ],
)
def test_row_that_no_rule_covers_is_skipped_with_a_reason(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    assert said in reason(tmp_path, row)


@pytest.mark.parametrize(
    ("tag", "end"),
    [
        *((tag, f"{tag[0]}/{tag[1:]}") for tag in ("<thinking>", "<reasoning>", "<Thought>")),
        ("[THINK]", "[/THINK]"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("◁think▷", "◁/think▷"),
        ("<seed:think>", "</seed:think>"),
    ],
)
def test_thinking_in_tags_that_the_template_does_not_write_is_a_finding(
    tmp_path: Path, tag: str, end: str
) -> None:
    said = f"{tag}Greet.{end}Hello!"
    row = {"messages": [USER, ANSWER | {"content": said}]}
    template, _ = own_template()

    assert notes(tmp_path, row) == {problems.UNKNOWN_TAGS: f"message 2: {tag}"}
    assert notes(tmp_path, row, template=template, template_text=f"{tag} {READS}") == {}
    context = {"messages": [USER, row["messages"][1] | {"weight": 0}, USER, ANSWER]}
    assert notes(tmp_path, context) == {}
    assert notes(tmp_path, {"messages": [USER, ANSWER | {"content": f"{tag} opens it"}]}) == {}


@pytest.mark.parametrize("key", ["system_prompt", "instructions"])
def test_system_prompt_of_another_name_is_noted_with_its_field(tmp_path: Path, key: str) -> None:
    found = notes(tmp_path, CHAT | {key: "Be brief."})
    assert found == {f"key {key!r} of a row is not read": f"use --field system={key}"}
