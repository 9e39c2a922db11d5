"""Turns that a model's own template omits or does not prompt for are reported; rows are kept."""

from __future__ import annotations

import pytest

from mlxtune.core.data import problems
from mlxtune.core.data.problems import BadRow
from tests.core.data.renderers import (
    END,
    Messages,
    Renderer,
    answers,
    assistant,
    chatml,
    converse,
    qwen3_like,
    render,
)

CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
SYSTEM = ("system", "You are Bob.")


def says_or_calls(messages: Messages, **options: object) -> str:
    """Like Llama 3.1's template, writes none of the content if there is a call."""
    silent = [m | {"content": ""} if m.get("tool_calls") else m for m in messages]
    return chatml(silent, **options)  # type: ignore[arg-type]


def blocks_behind_a_question(
    messages: Messages, *, add_generation_prompt: bool, **options: object
) -> str:
    """Like Qwen3's template, prompts with a block that it omits from turns without a question."""
    if any(message["role"] == "user" for message in messages):
        return qwen3_like(
            messages, add_generation_prompt=add_generation_prompt, enable_thinking=False
        )
    text = chatml(messages, tools=None, add_generation_prompt=add_generation_prompt)
    return text + "<think>\n\n</think>\n\n" * add_generation_prompt


def test_greeting_behind_a_system_message_is_context_where_it_cannot_be_prompted_for() -> None:
    greeting = (SYSTEM, ("assistant", "Welcome!"))
    asked = (("user", "Hi"), ("assistant", "Hello!"))

    rendering = render(blocks_behind_a_question, converse(*greeting, *asked))

    assert answers(rendering) == [f"Hello!{END}"]
    assert "Welcome!" in rendering.texts[0].text
    assert rendering.notes == {problems.NO_PROMPT: ""}
    # The turn is trained if the template has a prompt for it.
    assert answers(render(chatml, converse(*greeting, *asked))) == [
        f"Welcome!{END}",
        f"Hello!{END}",
    ]


def test_greeting_that_cannot_be_prompted_for_and_stands_alone_is_refused_with_its_place() -> None:
    with pytest.raises(BadRow, match="generation prompt") as raised:
        render(blocks_behind_a_question, converse(SYSTEM, ("assistant", "Welcome!")))
    assert raised.value.detail == "message 2"


def test_words_beside_a_tool_call_that_are_left_out_are_told() -> None:
    said = assistant("Let me look.", tool_calls=[CALL])

    rendering = render(says_or_calls, converse(("user", "Hi"), said))

    assert rendering.notes == {problems.DROPPED_CONTENT: "message 2"}
    assert render(chatml, converse(("user", "Hi"), said)).notes == {}
    bare = assistant("", tool_calls=[CALL])
    assert render(says_or_calls, converse(("user", "Hi"), bare)).notes == {}


@pytest.mark.parametrize("thought", ["a", "abc", "\x00"])
def test_thinking_that_is_left_out_is_told_though_the_answer_holds_its_words(thought: str) -> None:
    conversation = converse(("user", "Hi"), assistant("abc", reasoning_content=thought))

    assert render(chatml, conversation).notes == {problems.DROPPED_THINKING: "message 2"}


def test_empty_list_of_calls_is_none_for_the_template() -> None:
    heard = []

    def listens(messages: Messages, **options: object) -> str:
        heard.extend("tool_calls" in message for message in messages)
        return chatml(messages, **options)  # type: ignore[arg-type]

    render(listens, converse(("user", "Hi"), assistant("Hello!", tool_calls=[])))

    assert heard
    assert not any(heard)


def test_reason_names_a_few_of_many_end_tokens() -> None:
    from mlxtune.core.data.model_template import ModelTemplate

    def endless(messages: Messages, *, add_generation_prompt: bool, **_: object) -> str:
        return "".join(f"[{m['role']}] {m['content']}\n" for m in messages) + (
            "[assistant] " * add_generation_prompt
        )

    template = ModelTemplate(Renderer(endless), tuple(f"<{i}>" for i in range(30)))
    with pytest.raises(BadRow) as raised:
        template(converse(("user", "Hi"), ("assistant", "Hello!")))
    assert raised.value.detail.startswith("looked for <0>, <1>, <2>, <3>: let")
