"""Rows to conversations: converted messages and refused messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.conversation import Conversation, Message
from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.sources.messages import parse_conversation, parse_messages

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def parse(message: Any) -> Message:
    """Return a message as it is parsed at the start of a conversation."""
    return parse_messages([message, ANSWER])[0]


def refused(*messages: Any, **keys: Any) -> BadRowError:
    with pytest.raises(BadRowError) as raised:
        parse_conversation(1, {"messages": list(messages), **keys})
    return raised.value


def test_messages_tools_and_tool_calls_are_kept_unchanged() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    fields: list[dict[str, Any]] = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "1 + 1? 🦙"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "for the template"},
        {"role": "assistant", "content": "Two."},
    ]
    before = json.dumps(fields)

    conversation = parse_conversation(7, {"messages": fields, "tools": [tool], "id": "ignored"})

    assert conversation == Conversation(
        row=7,
        messages=(
            Message("system", " Be brief.\n", fields=fields[0]),
            Message("user", "1 + 1? 🦙", fields=fields[1]),
            Message("assistant", "", (CALL,), fields=fields[2]),
            Message("tool", "2", fields=fields[3]),
            Message("assistant", "Two.", fields=fields[4]),
        ),
        tools=(tool,),
    )
    assert json.dumps(fields) == before


# Content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([text_part("What "), text_part("is\n"), text_part("it?")], "What is\nit?"),
        (["What ", text_part("is it?")], "What is it?"),
        ([{"text": "Hi"}], "Hi"),
        ([{"type": None, "text": "Hi", "image_url": None}], "Hi"),
        ([], ""),
    ],
    ids=["parts", "bare_text", "no_type", "null_type", "none"],
)
def test_parts_of_a_content_are_joined_without_anything_between(content: Any, text: str) -> None:
    message = parse({"role": "user", "content": content})

    assert message == Message("user", text, fields={"role": "user", "content": text})


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video", "image"])
def test_image_is_out_of_scope_by_name(kind: str) -> None:
    part = {"type": kind, kind: {"url": "x"}}

    problem = refused(USER, {"role": "user", "content": [part]}, ANSWER)

    assert problem.kind == "images, audio and video are out of scope"
    assert problem.detail == f"message 2: {kind!r}"


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "text", "text": 5}, "message 2: a number"),
        ({"type": "text"}, "message 2: null"),
        ({"type": "tool_use", "input": {}}, "message 2: an object of type 'tool_use'"),
        ({"type": []}, "message 2: an object"),
        ({"type": "x\n\x1b" * 100}, "message 2: an object"),
        (None, "message 2: null"),
        ([], "message 2: a list"),
    ],
)
def test_non_text_part_is_named(part: Any, named: str) -> None:
    problem = refused(USER, {"role": "user", "content": [text_part("See:"), part]}, ANSWER)

    assert problem.kind == "content has a part that is not text"
    assert named in str(problem)
    assert str(problem).isprintable()
    assert len(str(problem)) < 300


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *(("developer", "system"), ("function", "tool"), ("model", "assistant")),
        *(("User", "user"), ("ASSISTANT", "assistant")),
    ],
)
def test_other_name_of_a_role_is_ours_also_for_the_template(name: str, role: str) -> None:
    message = parse({"role": name, "content": "Be brief."})

    assert message == Message(role, "Be brief.", fields={"role": role, "content": "Be brief."})


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(["tool_calls", "reasoning_content", "name", "weight", "refusal"])

    assert parse(USER | nulls) == parse(USER)
    assert parse(ANSWER | nulls) == parse(ANSWER)
    assert parse_conversation(
        1, {"messages": [USER, ANSWER], "tools": None, "system": None}
    ) == parse_conversation(1, {"messages": [USER, ANSWER]})


def test_row_with_a_system_text_begins_with_it() -> None:
    row = {"system": "Be brief.", "messages": [USER, ANSWER]}
    system = {"role": "system", "content": "Be brief."}

    written_out = parse_conversation(1, {"messages": [system, USER, ANSWER]})

    assert parse_conversation(1, row) == written_out
    assert parse_conversation(1, row | {"messages": [system, USER, ANSWER]}) == written_out
    assert len(parse_conversation(1, row | {"system": ""}).messages) == 2
    other = refused({"role": "system", "content": "Rhyme."}, USER, ANSWER, system="Be brief.")
    assert other.kind == "'system' differs from the system message"


# Tools


# Thinking


@pytest.mark.parametrize(
    ("message", "thinking"),
    [
        (ANSWER, ""),
        (ANSWER | {"reasoning_content": "\nHm.\n"}, "Hm."),
        (ANSWER | {"thinking": "Hm."}, "Hm."),
        (ANSWER | {"reasoning": "Hm."}, "Hm."),
        (ANSWER | {"reasoning_content": "", "content": "<think>\nHm.\n</think>\n\nHi"}, "Hm."),
        (ANSWER | {"reasoning": "Field.", "content": "<think>Tags.</think>Hi"}, "Field."),
        (ANSWER | {"content": " \n<think>Hm.</think>Hi"}, "Hm."),
        (ANSWER | {"content": "\nHm.\n</think>\n\nHi"}, "Hm."),
        (ANSWER | {"content": "<think>a <think> b</think>Hi"}, "a <think> b"),
        (ANSWER | {"content": "<think>a</think>b</think>c"}, "a"),
        (ANSWER | {"content": "<think>\n\n</think>\n\nHi"}, ""),
        (ANSWER | {"content": "<think> is a tag"}, ""),
        (ANSWER | {"content": "</think> is a tag"}, ""),
        (ANSWER | {"content": "Write <think>x</think>"}, ""),
        (USER | {"content": "<think>Hm.</think>Hi"}, ""),
        (USER | {"reasoning_content": "Hm."}, ""),
        ({"role": "assistant", "content": "", "thinking": "Hm."}, "Hm."),
        ({"role": "assistant", "content": "<think>Hm.</think>"}, "Hm."),
    ],
)
def test_thinking_is_read_from_its_field_or_its_tags(
    message: dict[str, Any], thinking: str
) -> None:
    parsed = parse(message)

    assert parsed == Message(message["role"], message["content"], thinking=thinking, fields=message)


def test_thinking_alone_needs_no_content() -> None:
    message = parse({"role": "assistant", "content": None, "reasoning": "Hm."})

    assert (message.content, message.thinking) == ("", "Hm.")
    assert message.fields["content"] == ""


# Weights


@pytest.mark.parametrize("weight", [0, 0.0, -0.0, False])
def test_answer_of_weight_0_is_context(weight: Any) -> None:
    message = parse(ANSWER | {"weight": weight})

    assert message == Message("assistant", "Hello!", trained=False, fields=ANSWER)


@pytest.mark.parametrize("weight", [1, 1.0, True, None])
def test_answer_of_weight_1_is_trained(weight: Any) -> None:
    assert parse(ANSWER | {"weight": weight}) == Message("assistant", "Hello!", fields=ANSWER)


@pytest.mark.parametrize("weight", [0.5, -1, 2, "", "half", [], {}, float("nan"), 10**400])
def test_other_weight_is_refused(weight: Any) -> None:
    problem = refused(USER, ANSWER | {"weight": weight})

    assert str(problem) == "'weight' is neither 0 nor 1 (message 2)"


def test_weight_of_another_role_means_nothing() -> None:
    assert parse(USER | {"weight": 0.5}) == Message("user", "Hi", fields=USER, removed=("weight",))


# Any value

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text(st.characters()), children, max_size=3)
    ),
    max_leaves=5,
)
FUNCTIONS = st.fixed_dictionaries(
    {}, optional={"name": JSON_VALUES, "arguments": st.just('{"a": 1}') | JSON_VALUES}
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"]) | JSON_VALUES,
        "content": st.just("</think>Hi") | st.lists(st.builds(text_part, st.text())) | JSON_VALUES,
        "tool_calls": st.lists(FUNCTIONS | st.builds(lambda f: {"function": f}, FUNCTIONS))
        | JSON_VALUES,
        "reasoning_content": JSON_VALUES,
        "weight": st.sampled_from([0, 1]) | JSON_VALUES,
    },
)


@settings(deadline=None)
@given(
    messages=st.lists(MESSAGES | JSON_VALUES, max_size=4) | JSON_VALUES,
    rest=st.dictionaries(st.sampled_from(["tools", "system", "id"]), JSON_VALUES),
)
def test_row_is_a_conversation_or_a_bad_row_for_any_content(
    messages: Any, rest: dict[str, Any]
) -> None:
    before = json.dumps([messages, rest])
    try:
        conversation = parse_conversation(3, {"messages": messages, **rest})
    except BadRowError as problem:
        assert problem.kind.isprintable()
        assert str(problem).isprintable()
    else:
        assert conversation.row == 3
        assert any(m.role == "assistant" and m.trained for m in conversation.messages)
        for message in conversation.messages:
            assert message.fields["role"] == message.role
            assert message.fields["content"] == message.content
            assert list(message.fields.get("tool_calls", ())) == list(message.tool_calls) or (
                message.role != "assistant"
            )
            assert "weight" not in message.fields
            assert None not in message.fields.values()
            json.dumps(dict(message.fields), ensure_ascii=False).encode()
        json.dumps(conversation.tools, ensure_ascii=False).encode()
    assert json.dumps([messages, rest]) == before
