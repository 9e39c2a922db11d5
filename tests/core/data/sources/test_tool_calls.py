"""Tools and tool calls, as objects or as JSON text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.sources.messages import parse_conversation
from tests.core.data.renderers import answers, assistant, chatml, converse, render
from tests.core.data.sources.test_messages import ANSWER, CALL, USER, parse, refused


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1}', '{"a": {"b": [1, 2.0, null, "é"]}}', "{}", ' {"a": "\\u00e9"}\n'],
)
@pytest.mark.parametrize("bare", [False, True])
def test_arguments_that_hold_an_object_as_text_become_the_object(
    arguments: str, bare: bool
) -> None:
    function = {"name": "f", "arguments": arguments}
    call = function if bare else {"id": "7", "type": "function", "function": function}
    message = {"role": "assistant", "content": "So:", "tool_calls": [call]}

    parsed = parse(message)

    # The same as mlx_lm.server's process_message_content before the template.
    plain = {"name": "f", "arguments": json.loads(arguments)}
    expected = plain if bare else {"id": "7", "type": "function", "function": plain}
    assert parsed.tool_calls == (expected,)
    assert parsed.fields == message | {"tool_calls": [expected]}
    assert function["arguments"] == arguments


@pytest.mark.parametrize(
    "arguments",
    ["", "x", "[1]", "3", "null", '"x"', "{", '{"a": ' * 100_000, "9" * 5000, 3, None, [{}]],
)
@pytest.mark.parametrize("bare", [False, True])
def test_other_arguments_are_refused_with_their_place(arguments: Any, bare: bool) -> None:
    good, bad = ({"name": "f", "arguments": each} for each in ({}, arguments))
    calls = [good, bad if bare else {"function": bad}]

    problem = refused(USER, {"role": "assistant", "content": "", "tool_calls": calls})

    assert problem.kind == "a tool call whose arguments are not an object"
    assert problem.detail.startswith("message 2, call 2: 'arguments' is ")
    assert problem.detail.endswith("write an object, {} if empty")


@pytest.mark.parametrize(
    ("number", "stays"),
    [
        ("12345678901234567890.123", True),
        *(("1e400", True), ("-1E+400", True), ("1e-400", True), ("1e-99999999999999999999", True)),
        *(("0.30000000000000004", False), ("1e300", False), ("1E3", False), ("0.10", False)),
        ("123456789012345678901234567890", False),
    ],
)
def test_text_with_a_number_that_no_float_equals_stays_text(number: str, stays: bool) -> None:
    text = f'{{"a": [{number}]}}'
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}]}

    (call,) = parse(message).tool_calls

    assert call["arguments"] == (text if stays else json.loads(text))


@pytest.mark.parametrize("source", ["{{ x.arguments is string }}", "{{ x.arguments | tojson }}"])
def test_text_that_stays_reaches_only_a_template_that_takes_text(source: str) -> None:
    text = '{"a": 12345678901234567890.123}'
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    conversation = converse(("user", "Hi"), assistant("", tool_calls=[call]))

    (answer,) = answers(render(chatml, conversation, source=source))

    written = text if "string" in source else json.loads(text)
    assert f'"arguments": {json.dumps(written)}' in answer


@pytest.mark.parametrize("text", [False, True])
def test_number_that_json_lacks_is_a_reason(text: bool) -> None:
    arguments = '{"a": 1e400}' if text else {"a": float("inf")}
    said = assistant("", tool_calls=[{"name": "f", "arguments": arguments}])

    with pytest.raises(BadRowError, match="a tool call with a number that JSON lacks"):
        render(chatml, converse(("user", "Hi"), said))


def test_arguments_under_another_key_are_refused() -> None:
    call = {"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}

    problem = refused(USER, {"role": "assistant", "content": "", "tool_calls": [call]})

    assert problem.detail.startswith("message 2, call 1: 'arguments' is null or missing")


def test_old_function_calls_are_tool_calls() -> None:
    function = {"name": "add", "parameters": {}}
    old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    new = {"role": "assistant", "tool_calls": [CALL]}
    results = [{"role": role, "name": "add", "content": "2"} for role in ("function", "tool")]

    assert parse_conversation(
        1, {"messages": [old, results[0], ANSWER], "functions": [function]}
    ) == parse_conversation(
        1,
        {
            "messages": [new, results[1], ANSWER],
            "tools": [{"type": "function", "function": function}],
        },
    )


@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_calls_need_no_content(content: dict[str, Any]) -> None:
    message = parse({"role": "assistant", "tool_calls": [CALL], **content})

    assert message.content == ""
    assert message.fields == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_tools_may_be_the_text_of_a_list() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"messages": [USER, ANSWER]}

    assert parse_conversation(1, row | {"tools": json.dumps(tools)}).tools == tuple(tools)
    for none in ("", " ", "[]", "null"):
        assert parse_conversation(1, row | {"tools": none}).tools == ()
