"""A model's own template: the end of an answer with any content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtune.core.data.model_template import ModelTemplate
from mlxtune.core.data.problems import NO_END_OF_TURN, BadRowError
from tests.core.data.renderers import (
    END,
    END_TOKENS,
    QWEN3_SOURCE,
    RENDERERS,
    TWO_TURNS,
    Messages,
    Render,
    Renderer,
    answers,
    assistant,
    bracketed,
    chatml,
    converse,
    ends_twice,
    prompts,
    prompts_otherwise,
    qwen3_like,
    render,
)


@pytest.mark.parametrize(
    "content",
    [
        "end",
        "|",
        "<",
        "<<",
        ">",
        ">>",
        "e",
        "a" + END + "b",
        END + "\n" + END,
        " padded\n",
        "4",
        "endoftext",
    ],
)
@pytest.mark.parametrize("template", [chatml, ends_twice])
def test_answer_ends_at_its_turn_end_for_any_content(template: Render, content: str) -> None:
    rendering = render(template, converse(("user", "4?"), ("assistant", content)))

    assert answers(rendering) == [content + END]


def test_answer_that_is_itself_an_end_token_keeps_its_own_end() -> None:
    rendering = render(chatml, converse(("user", "?"), ("assistant", END)))

    assert answers(rendering) == [END + END]


@pytest.mark.parametrize("content", ["a" + END + "b", "a" + END])
def test_end_token_in_the_content_does_not_end_the_turn(content: str) -> None:
    with pytest.raises(BadRowError, match="no end-of-turn token"):
        render(bracketed, converse(("user", "?"), ("assistant", content)))


def test_longest_end_token_is_taken_where_one_begins_another() -> None:
    def template(messages: Messages, **options: Any) -> str:
        return chatml(messages, **options).replace(END, "<end><end>2")

    end_tokens = ("<end>", "", "<end><end>2", "2")
    conversation = converse(("user", "?"), ("assistant", "a"))
    rendering = ModelTemplate(Renderer(template), end_tokens)(conversation)

    assert answers(rendering) == ["a<end><end>2"]


def test_answer_that_the_thinking_repeats_is_supervised_with_its_thinking() -> None:
    message = assistant("4", reasoning_content="4, and 4 again")
    template = ModelTemplate(Renderer(qwen3_like), (END, "</think>"), QWEN3_SOURCE)

    rendering = template(converse(("user", "2 + 2"), message))

    assert answers(rendering) == ["<think>\n4, and 4 again\n</think>\n\n4<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "end_tokens", "kind", "detail"),
    [
        (bracketed, END_TOKENS, "no end-of-turn token", f"looked for {END}, <|endoftext|>"),
        (bracketed, (), "no end-of-turn token", "looked for none"),
        (
            bracketed,
            ("", END),
            "no end-of-turn token",
            f": let the template end each answer with {END}",
        ),
        (
            *(prompts_otherwise, END_TOKENS),
            *("the template's generation prompt differs from the start of the turn", ""),
        ),
    ],
)
def test_row_whose_answer_cannot_be_found_is_a_bad_row(
    template: Render, end_tokens: tuple[str, ...], kind: str, detail: str
) -> None:
    with pytest.raises(BadRowError) as raised:
        ModelTemplate(Renderer(template), end_tokens)(TWO_TURNS)
    assert raised.value.kind == kind
    assert detail in raised.value.detail


@pytest.mark.parametrize(
    ("end_tokens", "remedy"),
    [((), ""), (("</s>",), ": let the template end each answer with </s>")],
)
def test_end_of_turn_without_a_token_is_supervised_and_noted(
    end_tokens: tuple[str, ...], remedy: str
) -> None:
    rendering = ModelTemplate(Renderer(chatml), end_tokens)(TWO_TURNS)

    assert answers(rendering) == answers(render(chatml, TWO_TURNS))
    assert rendering.notes == {NO_END_OF_TURN: f"{END}{remedy}"}


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["system", "user", "assistant"]),
        st.text(st.sampled_from("end|<>im_ \n4"), max_size=6),
        st.sampled_from(["", "Hm.", "4"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(name=st.sampled_from(["chatml", "qwen3_like", "r1_like", "ends_twice"]), turns=TURNS)
@example(name="ends_twice", turns=[("assistant", "<<", "")])
def test_every_span_follows_its_turns_prompt_for_any_conversation(
    name: str, turns: list[tuple[str, str, str]]
) -> None:
    template, _ = RENDERERS[name]
    fields = [{"role": "user", "content": "4?"}]
    fields += [
        {"role": role, "content": content}
        | ({"reasoning_content": thought} if role == "assistant" and thought else {})
        for role, content, thought in [*turns, ("assistant", "end", "")]
    ]
    try:
        conversation = converse(*fields)
    except BadRowError:  # an empty answer
        return
    told = any(m.thinking for m in conversation.messages) if template is qwen3_like else None

    rendering = render(template, conversation)

    asked = [
        template(fields[:i], tools=None, add_generation_prompt=True, enable_thinking=told)
        for i, message in enumerate(fields)
        if message["role"] == "assistant"
    ]
    said = [message["content"].strip() for message in fields if message["role"] == "assistant"]
    assert prompts(rendering) == asked
    for answer, content in zip(answers(rendering), said, strict=True):
        # An answer of thinking alone ends at the last control token.
        assert answer.rstrip().endswith(END) or (name == "ends_twice" and not content)
        assert content in answer
        assert answer.count(END) == 1 + content.count(END)
    assert len(rendering.texts) in (1, len(asked))


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (assistant("Hello!"), "two assistant turns in a row"),
        (
            assistant("", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
            "a tool call without a result",
        ),
    ],
)
def test_answer_that_no_prompt_asks_for_has_its_reason(first: dict[str, Any], kind: str) -> None:
    """Some templates open no new turn after an assistant's message."""

    def joins(messages: Messages, **options: Any) -> str:
        joined = [m for m in messages if m["role"] != "assistant"]
        last = [m for m in messages if m["role"] == "assistant"]
        whole = "".join(str(m["content"]) + str(m.get("tool_calls", "")) for m in last)
        if last:
            joined += [{"role": "assistant", "content": whole}]
        return chatml(joined, **options)

    row = converse(("user", "Hi"), first | {"weight": 0}, assistant("Well."))
    with pytest.raises(BadRowError) as raised:
        ModelTemplate(Renderer(joins), END_TOKENS)(row)
    assert (raised.value.kind, raised.value.detail[:9]) == (kind, "message 3")
