"""Turns that a model's own template omits or does not prompt for are reported; rows are kept."""

from __future__ import annotations

import pytest

from mlxtune.core.data import problems
from mlxtune.core.data.conversation import to_json
from mlxtune.core.data.problems import BadRowError
from tests.core.data.renderers import (
    END,
    QWEN3_SOURCE,
    Messages,
    Render,
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


def thinks_once(messages: Messages, **options: object) -> str:
    """Like Qwen3's template, writes the first thinking and the text after the last."""
    written = []
    for message in messages:
        thought, closed, _ = message["content"].partition("</think>")
        answer = message["content"].rpartition("</think>")[2].lstrip()
        thought = f"<think>{thought.rpartition('<think>')[2].strip()}</think>" * bool(closed)
        written.append(message | {"content": thought + answer})  # type: ignore[operator]
    return chatml(written, **options)  # type: ignore[arg-type]


def test_greeting_after_a_system_message_is_context_if_it_has_no_prompt() -> None:
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


def test_lone_greeting_without_a_prompt_is_refused_with_its_position() -> None:
    with pytest.raises(BadRowError, match="generation prompt") as raised:
        render(blocks_behind_a_question, converse(SYSTEM, ("assistant", "Welcome!")))
    assert raised.value.detail == "message 2"


def test_omitted_text_next_to_a_tool_call_is_noted() -> None:
    said = assistant("Let me look.", tool_calls=[CALL])

    rendering = render(says_or_calls, converse(("user", "Hi"), said))

    assert rendering.notes == {problems.DROPPED_CONTENT: "message 2"}
    assert render(chatml, converse(("user", "Hi"), said)).notes == {}
    bare = assistant("", tool_calls=[CALL])
    assert render(says_or_calls, converse(("user", "Hi"), bare)).notes == {}


@pytest.mark.parametrize("thought", ["a", "abc", "\x00"])
def test_omitted_thinking_is_noted_even_if_the_answer_repeats_it(thought: str) -> None:
    conversation = converse(("user", "Hi"), assistant("abc", reasoning_content=thought))

    assert render(chatml, conversation).notes == {problems.DROPPED_THINKING: "message 2"}


@pytest.mark.parametrize(
    ("content", "noted"),
    [
        ("<think>a</think> One. <think>b</think> Two.", {"DROPPED_TEXT", "DROPPED_THINKING"}),
        ("One. <think>a</think> Two.", {"DROPPED_TEXT"}),
        ("<think>a</think> One. </think> Two.", {"DROPPED_TEXT"}),
        ("Thought. </think> One. </think> Two.", {"DROPPED_TEXT"}),
        ("<think>a</think><think>b</think>Two.", {"DROPPED_THINKING"}),
        ("<think>a</think> Two. <think>", set()),
        ("a</think>Two.", set()),
        ("Two. <think>", set()),
    ],
)
def test_text_and_thinking_between_tags_are_noted_if_omitted(content: str, noted: set[str]) -> None:
    kinds = {getattr(problems, name) for name in noted}
    asked = (("user", "Hi"), assistant(content, weight=0), ("user", "Well?"))

    assert render(thinks_once, converse(("user", "Hi"), assistant(content))).notes.keys() == kinds
    # Earlier thinking is omitted at inference too.
    earlier = render(thinks_once, converse(*asked, ("assistant", "Well.")))
    assert earlier.notes.keys() == kinds - {problems.DROPPED_THINKING}


def test_empty_call_list_is_passed_as_no_calls() -> None:
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
    with pytest.raises(BadRowError) as raised:
        template(converse(("user", "Hi"), ("assistant", "Hello!")))
    assert raised.value.detail.startswith("looked for <0>, <1>, <2>, <3>: let")


@pytest.mark.parametrize("template", [chatml, qwen3_like])
@pytest.mark.parametrize("thinking", ["auto", "off", "on"])
def test_answer_that_begins_like_a_turn_keeps_its_beginning(
    template: Render, thinking: str
) -> None:
    content = "<|im_start|>assistant\nHello"
    conversation = converse(("user", "Hi"), ("assistant", content))

    rendering = render(template, conversation, source=QWEN3_SOURCE, thinking=thinking)

    assert answers(rendering)[0].endswith(content + END)
    assert rendering.notes == {}


@pytest.mark.parametrize("left_out", ["user", "assistant", "tool"])
@pytest.mark.parametrize("last", [True, False])
def test_text_that_the_template_drops_is_noted_with_its_message(left_out: str, last: bool) -> None:
    def drops(messages: Messages, **options: object) -> str:
        """Writes only the last line of some messages."""
        lines = [
            {**m, "content": m["content"].rpartition("\n")[2]} if m["role"] == left_out else m
            for m in messages
        ]
        return chatml(lines, **options)  # type: ignore[arg-type]

    turns = [("user", "One.\nTwo?"), ("tool", "a\nb"), ("assistant", "Three.\nFour.")]
    turns = turns if last else [*turns, ("user", "More?"), ("assistant", "Five.")]

    notes = render(drops, converse(*turns)).notes

    assert notes[problems.DROPPED_TEXT] == f"message {[r for r, _ in turns].index(left_out) + 1}"
    assert render(chatml, converse(*turns)).notes == {}


def test_result_that_the_template_writes_as_json_is_not_dropped() -> None:
    def as_json(messages: Messages, **options: object) -> str:
        written = [
            {**m, "content": to_json(m["content"])} if m["role"] == "tool" else m for m in messages
        ]
        return chatml(written, **options)  # type: ignore[arg-type]

    conversation = converse(("user", "Hi"), ("tool", 'a\n"b"'), ("assistant", "Yes."))
    assert render(as_json, conversation).notes == {}
