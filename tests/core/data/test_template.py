"""Conversations as text, against exact strings and the models' own Jinja templates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data import problems
from mlxtune.core.data.conversation import Conversation, Message
from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.template import (
    RenderedText,
    Rendering,
    render_gemma,
    render_qwen3,
)
from tests.core.data.conversations import MESSAGES, TOOL, call, converse, text_of


def supervised(rendered: RenderedText) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


def test_answer_and_end_of_turn_are_supervised_as_documented() -> None:
    (rendered,) = render_qwen3(converse(("user", "Hi"), ("assistant", "Hello!"))).texts

    # A newline is two characters wide in the picture.
    text = r"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    marks = "                                                       ^^^^^^^^^^^^^^^^  "
    start, end = marks.index("^"), marks.rindex("^") + 1
    assert rendered.text == text.replace(r"\n", "\n")
    assert rendered.spans == ((start - text[:start].count(r"\n"), end - text[:end].count(r"\n")),)


def test_qwen3_marks_every_assistant_turn_and_no_other() -> None:
    (rendered,) = render_qwen3(
        converse(
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Hello!"),
            ("user", "2 + 2?"),
            ("assistant", "4\n"),
        )
    ).texts

    assert rendered.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4\n<|im_end|>\n"
    )
    assert supervised(rendered) == ["Hello!<|im_end|>", "4\n<|im_end|>"]


@pytest.mark.parametrize("space", ["", "\n", " \n\n"])
def test_tags_of_tool_results_are_written_once(space: str) -> None:
    """Results in Hermes's files have the tags that the templates write."""
    tagged = f"<tool_response>{space}1{space}</tool_response>"

    def rendered(*results: str) -> str:
        row = converse(("user", "a"), ("assistant", "b"), *(("tool", each) for each in results))
        row = replace(row, messages=(*row.messages, Message("assistant", "c")))
        return render_qwen3(row).texts[0].text

    assert rendered(tagged) == rendered("1")
    assert rendered(f"{tagged}\n{tagged}") == rendered("1", "1") or space != "\n"
    for other in ("<result>1</result>", "<tool_response>1", "See <tool_response>1</tool_response>"):
        assert f"<tool_response>\n{other}\n</tool_response>" in rendered(other)


def test_qwen3_tool_calls_are_supervised_and_results_are_not() -> None:
    (rendered,) = render_qwen3(
        converse(
            ("user", "Rain?"),
            Message("assistant", "", (call("weather", {"city": "Köln"}),)),
            ("tool", "yes"),
            ("tool", "no"),
            Message("assistant", "Again.", (call("weather", '{"city": 1}'), {"name": "stop"})),
        )
    ).texts

    assert rendered.text == (
        "<|im_start|>user\nRain?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nyes\n</tool_response>\n<tool_response>\nno\n"
        "</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nAgain.\n<tool_call>\n{"name": "weather", "arguments": {"city": 1}}'
        '\n</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>\n'
    )
    assert supervised(rendered) == [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>',
        'Again.\n<tool_call>\n{"name": "weather", "arguments": {"city": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>',
    ]


@pytest.mark.parametrize("broken", [{}, {"function": {}}, {"function": "f"}, {"name": None}])
def test_tool_call_without_a_name_is_a_bad_row(broken: dict[str, Any]) -> None:
    with pytest.raises(BadRowError) as raised:
        render_qwen3(converse(Message("assistant", "", (broken,))))
    assert raised.value.kind == "a tool call has no function name"


@pytest.mark.parametrize("render", [render_qwen3, render_gemma])
@pytest.mark.parametrize(
    ("turns", "weights", "chosen"),
    [
        ("all", (1, 1, 1), "abc"),
        ("last", (1, 1, 1), "c"),
        ("all", (0, 1, 0), "b"),
        ("last", (0, 0, 1), "c"),
    ],
)
def test_turns_of_weight_0_and_all_but_the_last_if_asked_are_context(
    render: Callable[..., Rendering], turns: str, weights: tuple[int, ...], chosen: str
) -> None:
    messages = [
        message
        for answer, weight in zip("abc", weights, strict=True)
        for message in (
            Message("user", "?"),
            Message("assistant", answer, trained=bool(weight)),
        )
    ]
    (rendered,) = render(converse(*messages), turns).texts

    assert [text[0] for text in supervised(rendered)] == list(chosen)
    assert [text[1:] for text in supervised(rendered)] == [supervised(rendered)[0][1:]] * len(
        chosen
    )
    assert rendered.text == text_of(render(converse(*messages), "all"))


@pytest.mark.parametrize("render", [render_qwen3, render_gemma])
def test_last_turn_of_weight_0_is_a_bad_row_with_turns_last(
    render: Callable[..., Rendering],
) -> None:
    messages = (Message("assistant", "a"), Message("assistant", "b", trained=False))

    with pytest.raises(BadRowError, match="the last assistant turn has weight 0"):
        render(converse(*messages), "last")


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("Hi", "<think>\nHm.\n</think>\n\nHi<|im_end|>"),
        ("<think>\nHm.\n</think>\n\nHi", "<think>\nHm.\n</think>\n\nHi<|im_end|>"),
        ("<think>Hm.</think>Hi", "<think>Hm.</think>Hi<|im_end|>"),
        ("Hm. </think", "<think>\nHm.\n</think>\n\nHm. </think<|im_end|>"),
        ("a</think>b", "<think>\nHm.\n</think>\n\na</think>b<|im_end|>"),
    ],
)
def test_qwen3_supervises_thinking_once_in_field_or_content(content: str, written: str) -> None:
    rendering = render_qwen3(converse(("user", "?"), Message("assistant", content, thinking="Hm.")))

    assert supervised(rendering.texts[0]) == [written]
    assert rendering.notes == {}


def test_gemma_keeps_thinking_content_and_reports_dropped_field() -> None:
    tagged = Message("assistant", "<think>Hm.</think>Hi", thinking="Hm.")
    apart = Message("assistant", "Hm.", thinking="Hm.")

    rendering = render_gemma(converse(("user", "?"), tagged, ("user", "?"), apart))

    assert supervised(rendering.texts[0]) == [
        "<think>Hm.</think>Hi<end_of_turn>",
        "Hm.<end_of_turn>",
    ]
    assert rendering.notes == {problems.DROPPED_THINKING: "message 4"}


def test_gemma_marks_model_turns_and_gives_the_system_message_a_user_turn() -> None:
    (rendered,) = render_gemma(
        converse(
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Hello!"),
            ("user", "2 + 2?"),
            ("assistant", "4"),
        )
    ).texts

    assert rendered.text == (
        "<start_of_turn>user\n[System: Be brief.]<end_of_turn>\n"
        "<start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\n2 + 2?<end_of_turn>\n"
        "<start_of_turn>model\n4<end_of_turn>\n"
    )
    assert supervised(rendered) == ["Hello!<end_of_turn>", "4<end_of_turn>"]


@pytest.mark.parametrize(
    "conversation",
    [
        converse(("user", "Hi"), ("assistant", "Hello!"), tools=(TOOL,)),
        converse(("tool", "4"), ("assistant", "Hello!")),
        converse(Message("assistant", "", (call("weather", {}),))),
    ],
    ids=["tools", "tool_result", "tool_call"],
)
def test_gemma_has_no_place_for_tools(conversation: Conversation) -> None:
    with pytest.raises(BadRowError) as raised:
        render_gemma(conversation)
    assert raised.value.kind == "the gemma template does not support tools"


def spans_hold_the_answers(rendered: RenderedText, end_of_turn: str, answers: list[str]) -> bool:
    flat = [edge for span in rendered.spans for edge in span]
    texts = supervised(rendered)
    return (
        flat == sorted(flat)
        and all(text.endswith(end_of_turn) for text in texts)
        and all(text.startswith(answer) for text, answer in zip(texts, answers, strict=True))
    )


@settings(deadline=None)
@given(messages=MESSAGES, tools=st.sampled_from([(), (TOOL,)]))
def test_each_assistant_turn_has_one_span_for_any_messages(
    messages: list[Message], tools: tuple[Any, ...]
) -> None:
    answers = [message.content for message in messages if message.role == "assistant"]

    (rendered,) = render_qwen3(converse(*messages, tools=tools)).texts
    assert spans_hold_the_answers(rendered, "<|im_end|>", answers)
    assert rendered.add_bos

    plain = [Message(message.role, message.content) for message in messages]
    if all(message.role != "tool" for message in plain):
        (rendered,) = render_gemma(converse(*plain)).texts
        assert spans_hold_the_answers(rendered, "<end_of_turn>", answers)
        assert rendered.add_bos
