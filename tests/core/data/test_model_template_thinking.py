"""Thinking under a model's own template is trained once, at any place, or reported as dropped."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtune.core.data import problems
from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.template import Rendering
from tests.core.data.renderers import (
    CHANNEL_SOURCE,
    END,
    QWEN3_SOURCE,
    Messages,
    Render,
    answers,
    assistant,
    channelled,
    chatml,
    converse,
    picture,
    prompts,
    qwen3_like,
    r1_like,
    render,
    turn,
)

QUESTION = ("user", "2 + 2?")
THOUGHTFUL = {
    "tags": assistant("<think>\nSum.\n</think>\n\n4"),
    "tight_tags": assistant("<think>Sum.</think>4"),
    "closing_tag": assistant("Sum.\n</think>\n\n4"),
    "reasoning_content": assistant("4", reasoning_content="Sum."),
    "reasoning": assistant("4", reasoning="Sum."),
    "thinking": assistant("4", thinking="Sum."),
    "tags_and_field": assistant("<think>\nSum.\n</think>\n\n4", thinking="Sum."),
    "tags_and_its_field": assistant("<think>Sum.</think>4", reasoning_content="Sum."),
    "two_fields": assistant("4", reasoning="Sum.", thinking="Sum."),
}
DROPPED = {problems.DROPPED_THINKING: "message 2"}


def thoughtful(message: dict[str, Any], template: Render, **options: Any) -> Rendering:
    return render(template, converse(QUESTION, message), **options)


@pytest.mark.parametrize("message", THOUGHTFUL.values(), ids=THOUGHTFUL)
@pytest.mark.parametrize("thinking", ["auto", "on"])
def test_thinking_is_supervised_once_in_field_or_content(
    message: dict[str, Any], thinking: str
) -> None:
    rendering = thoughtful(message, qwen3_like, thinking=thinking)

    assert answers(rendering) == ["<think>\nSum.\n</think>\n\n4" + END]
    assert prompts(rendering) == [turn(*QUESTION) + "<|im_start|>assistant\n"]
    assert rendering.notes == {}


@pytest.mark.parametrize("message", THOUGHTFUL.values(), ids=THOUGHTFUL)
def test_disabled_thinking_is_removed_and_noted(message: dict[str, Any]) -> None:
    rendering = thoughtful(message, qwen3_like, thinking="off")

    assert answers(rendering) == ["4" + END]
    assert prompts(rendering) == [
        turn(*QUESTION) + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ]
    assert rendering.notes == DROPPED


@pytest.mark.parametrize("message", THOUGHTFUL.values(), ids=THOUGHTFUL)
def test_thinking_continues_from_a_prompt_that_opened_it(message: dict[str, Any]) -> None:
    (one,) = thoughtful(message, r1_like).texts

    assert picture(one) == "\n".join(
        [
            r"<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
            r"Sum.\n</think>\n\n4<|im_end|>\n",
            " " * 68 + "^" * 29,
        ]
    )


def test_answer_without_thinking_closes_the_opened_block() -> None:
    rendering = thoughtful(assistant("4"), r1_like)

    assert answers(rendering) == ["\n</think>\n\n4" + END]
    assert rendering.notes == {}


def test_turns_are_separate_if_only_prompts_open_thinking() -> None:
    conversation = converse(QUESTION, assistant("<think>Sum.</think>4"), QUESTION, assistant("5"))

    rendering = render(r1_like, conversation)

    assert answers(rendering) == ["Sum.\n</think>\n\n4" + END, "\n</think>\n\n5" + END]
    assert (
        prompts(rendering)[1]
        == (turn(*QUESTION) + turn("assistant", "4") + turn(*QUESTION))
        + "<|im_start|>assistant\n<think>\n"
    )
    assert len(rendering.texts) == 2


def test_prompt_that_opens_thinking_with_other_space_than_the_turn_is_kept() -> None:
    def spaced(messages: Messages, *, add_generation_prompt: bool, **options: Any) -> str:
        text = chatml(messages, add_generation_prompt=False, **options)
        return text + "<|im_start|>assistant\n<think>\n\n" * add_generation_prompt

    rendering = thoughtful(assistant("<think>\nSum.\n</think>\n\n4"), spaced)

    assert prompts(rendering)[0].endswith("assistant\n<think>\n\n")
    assert answers(rendering) == ["Sum.\n</think>\n\n4" + END]


@pytest.mark.parametrize("message", THOUGHTFUL.values(), ids=THOUGHTFUL)
def test_thinking_is_moved_to_the_field_of_a_template_that_knows_no_tags(
    message: dict[str, Any],
) -> None:
    rendering = thoughtful(message, channelled)

    assert prompts(rendering)[0].endswith("assistant\n<|channel>thought\n")
    assert answers(rendering) == ["Sum.\n<channel|>4" + END]
    off = thoughtful(message, channelled, thinking="off")
    assert prompts(off)[0].endswith("assistant\n")
    assert answers(off) == ["4" + END]
    assert off.notes == DROPPED


def test_channel_is_closed_at_once_where_there_is_no_thinking() -> None:
    rendering = thoughtful(assistant("4"), channelled, thinking="on")

    assert answers(rendering) == ["\n<channel|>4" + END]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_field_gets_the_name_that_the_template_reads(field: str) -> None:
    heard: list[dict[str, Any]] = []

    def listens(messages: Messages, **options: Any) -> str:
        heard.extend(dict(message) for message in messages)
        return chatml(messages, **options)

    for name, message in THOUGHTFUL.items():
        heard.clear()
        thoughtful(message, listens, source=f"{{{{ message['{field}'] }}}}")
        given = {key: value for key, value in heard[-1].items() if key not in ("role", "content")}
        assert given == {field: "Sum."}, name
        assert heard[-1]["content"] == "4"


def test_template_that_splits_tags_gets_unchanged_content() -> None:
    heard: list[str] = []

    def listens(messages: Messages, **options: Any) -> str:
        heard.append(messages[-1]["content"])
        return qwen3_like(messages, **options)

    thoughtful(assistant("<think> Sum.</think>\n4"), listens, source=QWEN3_SOURCE)

    assert heard[-1] == "<think> Sum.</think>\n4"


def test_differing_thinking_in_tags_and_field_is_unchanged() -> None:
    message = assistant("<think>\nOne.\n</think>\n\n4", reasoning_content="Other.")

    (answer,) = answers(thoughtful(message, qwen3_like))

    assert answer.count("One.") == answer.count("Other.") == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_that_the_template_does_not_show_is_noted(name: str) -> None:
    rendering = thoughtful(assistant("4", **{name: "Sum."}), chatml)

    assert answers(rendering) == ["4" + END]
    assert rendering.notes == DROPPED


def test_thinking_tags_stay_if_template_keeps_content() -> None:
    rendering = thoughtful(assistant("<think>\nSum.\n</think>\n\n4"), chatml)

    assert answers(rendering) == ["<think>\nSum.\n</think>\n\n4" + END]
    assert rendering.notes == {}


@pytest.mark.parametrize(
    ("source", "thinking", "thought", "told"),
    [
        (QWEN3_SOURCE, "auto", "Sum.", True),
        (QWEN3_SOURCE, "auto", "", False),
        (QWEN3_SOURCE, "on", "", True),
        (QWEN3_SOURCE, "off", "Sum.", False),
        ("", "auto", "Sum.", None),
        ("", "on", "Sum.", None),
        ("", "off", "Sum.", None),
    ],
)
def test_template_thinks_according_to_the_option_or_the_data(
    source: str, thinking: str, thought: str, told: bool | None
) -> None:
    heard = set()

    def listens(messages: Messages, *, enable_thinking: bool | None, **options: Any) -> str:
        if messages[0]["content"] == "Hi":  # not a probe for the header of an answer
            heard.add(enable_thinking)
        return chatml(messages, **options)

    conversation = converse(
        ("user", "Hi"), assistant("a", reasoning_content=thought), QUESTION, assistant("b")
    )
    render(listens, conversation, source, thinking=thinking)

    assert heard == {told}


def test_empty_think_block_belongs_to_the_prompt_without_thinking() -> None:
    conversation = converse(("user", "Hi"), ("assistant", "Hello!"))

    (prompted,) = render(qwen3_like, conversation).texts
    assert picture(prompted) == "\n".join(
        [
            r"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            r"<think>\n\n</think>\n\nHello!<|im_end|>\n",
            " " * 78 + "^" * 16,
        ]
    )
    # A template without the thinking option leaves the block to the model.
    untold = render(qwen3_like, conversation, source="")
    assert answers(untold) == ["<think>\n\n</think>\n\nHello!<|im_end|>"]


def test_dropped_long_thinking_does_not_hide_answer_end() -> None:
    def forgets(messages: Messages, **options: Any) -> str:
        cut = [{**m, "content": m["content"].rpartition("</think>")[2]} for m in messages]
        return chatml(cut, **options)

    rendering = thoughtful(assistant("<think>" + " long" * 50 + "</think>!"), forgets)

    assert answers(rendering) == ["!" + END]
    assert rendering.notes == DROPPED


def test_prompt_that_opens_thinking_after_other_text_is_a_bad_row() -> None:
    def otherwise(messages: Messages, *, add_generation_prompt: bool, **options: Any) -> str:
        text = chatml(messages, add_generation_prompt=False, **options)
        return text + "<|im_start|>model\n<think>\n" * add_generation_prompt

    with pytest.raises(BadRowError, match="differs from the start of the turn"):
        thoughtful(assistant("4"), otherwise)


def test_thinking_is_noted_at_the_last_message_that_loses_it() -> None:
    conversation = converse(
        *(QUESTION, assistant("4", thinking="a"), QUESTION, assistant("5")),
        *(QUESTION, assistant("6", thinking="b")),
    )

    assert render(chatml, conversation).notes == {problems.DROPPED_THINKING: "message 6"}
    assert "auto" not in problems.ADVICE[problems.DROPPED_THINKING], "auto is the default"
    assert render(channelled, conversation, CHANNEL_SOURCE).notes == {}
