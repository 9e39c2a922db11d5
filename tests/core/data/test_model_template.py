"""A model's own template: the turns of a conversation, their prompts and their ends."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mlxtune.core.data import problems
from mlxtune.core.data.conversation import Conversation
from mlxtune.core.data.model_template import ModelTemplate
from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.template import PendingRendering, Rendering
from tests.core.data.renderers import (
    END,
    REFUSED,
    RENDERERS,
    TWO_TURNS,
    Messages,
    Render,
    Renderer,
    answers,
    assistant,
    chatml,
    converse,
    drops_system,
    picture,
    prompts,
    qwen3_like,
    refuses_system,
    render,
    turn,
)

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TOOL = {"type": "function", "function": {"name": "add"}}

# Turns


def test_chatml_is_one_rendering_with_every_turn() -> None:
    (one,) = render(chatml, TWO_TURNS).texts

    assert picture(one) == "\n".join(
        [
            r"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
            r"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n!<|im_end|>\n",
            "                                                       ^^^^^^^^^^^^^^^^  "
            "                                                      ^^^^^^^^^^^",
        ]
    )
    assert not one.add_bos
    assert not one.add_end


def test_messages_after_the_last_answer_are_left_out() -> None:
    rendering = render(chatml, converse(("user", "a"), ("assistant", "b"), ("user", "c")))

    assert [one.text for one in rendering.texts] == [turn("user", "a") + turn("assistant", "b")]
    assert rendering.notes == {}


def test_each_turn_is_a_rendering_where_the_template_rewrites_earlier_ones() -> None:
    conversation = converse(
        ("user", "Hi"),
        assistant("Hello!", reasoning_content="Greet."),
        ("user", "?"),
        ("assistant", "!"),
    )

    first, second = render(qwen3_like, conversation).texts

    assert picture(first) == "\n".join(
        [
            r"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            r"<think>\nGreet.\n</think>\n\nHello!<|im_end|>",
            " " * 55 + "^" * 45,
        ]
    )
    assert picture(second) == "\n".join(
        [
            r"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
            r"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
            r"<think>\n\n</think>\n\n!<|im_end|>",
            " " * 127 + "^" * 34,
        ]
    )
    assert not first.add_bos
    assert not second.add_bos


@pytest.mark.parametrize("template", [chatml, qwen3_like])
@pytest.mark.parametrize(
    ("turns", "weights", "chosen"),
    [
        ("all", (1, 1, 1), "abc"),
        ("last", (1, 1, 1), "c"),
        ("all", (1, 0, 1), "ac"),
        ("all", (1, 1, 0), "ab"),
        ("last", (0, 0, 1), "c"),
    ],
)
def test_turns_of_weight_0_and_all_but_the_last_if_asked_are_context(
    template: Render, turns: str, weights: tuple[int, ...], chosen: str
) -> None:
    messages = [
        message
        for answer, weight in zip("abc", weights, strict=True)
        for message in (("user", f"{answer}?"), assistant(answer, weight=weight))
    ]

    rendering = render(template, converse(*messages), turns=turns)

    assert [answer.removesuffix(END)[-1] for answer in answers(rendering)] == list(chosen)
    assert all(f"{last}?{END}" in p for last, p in zip(chosen, prompts(rendering), strict=True))


def test_last_turn_of_weight_0_is_a_bad_row_with_turns_last() -> None:
    conversation = converse(("user", "?"), ("assistant", "a"), assistant("b", weight=0))

    with pytest.raises(BadRowError, match="the last assistant turn has weight 0"):
        render(chatml, conversation, turns="last")


def test_first_turn_without_a_prompt_is_context_where_others_follow() -> None:
    conversation = converse(("assistant", "Welcome!"), ("user", "Hi"), ("assistant", "Hello!"))

    rendering = render(chatml, conversation)

    assert answers(rendering) == ["Hello!" + END]
    assert prompts(rendering)[0].startswith(turn("assistant", "Welcome!"))
    assert rendering.notes == {problems.NO_PROMPT: ""}


@pytest.mark.parametrize(
    "messages",
    [
        [("assistant", "Welcome!")],
        [("assistant", "Welcome!"), ("user", "Hi"), assistant("Hello!", weight=0)],
    ],
)
def test_row_whose_only_trained_turn_has_no_prompt_is_a_bad_row(messages: list[Any]) -> None:
    with pytest.raises(BadRowError, match="an assistant turn without a prompt"):
        render(chatml, converse(*messages))


def test_consecutive_turn_is_prompted_with_the_previous_one() -> None:
    rendering = render(chatml, converse(("user", "Hi"), ("assistant", "a"), ("assistant", "b")))

    assert answers(rendering) == ["a" + END, "b" + END]


def test_empty_template_prefix_supervises_from_the_first_character() -> None:
    def answers_only(messages: Messages, **_: Any) -> str:
        return "".join(m["content"] + END for m in messages if m["role"] == "assistant")

    (one,) = render(answers_only, TWO_TURNS).texts

    assert one.text == f"Hello!{END}!{END}"
    assert one.spans == ((0, 16), (16, 27))


# Tools


def test_template_receives_the_fields_unchanged_and_the_tools() -> None:
    heard = []
    fields = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "7"}

    def listens(messages: Messages, *, tools: Any, **options: Any) -> str:
        heard.append((list(messages), list(tools or ())))
        return chatml(messages, tools=tools, **options)

    (one,) = render(listens, converse(fields, ("assistant", "4"), tools=[TOOL])).texts

    assert ([fields], [TOOL]) in heard
    assert one.text.startswith(turn("system", json.dumps([TOOL])))


@pytest.mark.parametrize("content", ["", "Let me see.", "weather"])
@pytest.mark.parametrize("call", [CALL, CALL["function"]])
def test_tool_call_is_supervised_with_its_content_to_the_end_of_its_turn(
    content: str, call: dict[str, Any]
) -> None:
    message = {"role": "assistant", "content": content or None, "tool_calls": [call, call]}
    conversation = converse(("user", "Rain?"), message, ("tool", "no"), ("assistant", "No."))

    rendering = render(chatml, conversation)

    written = f"<call>{json.dumps(call, ensure_ascii=False)}</call>"
    assert answers(rendering) == [content + written + written + END, "No." + END]
    assert len(rendering.texts) == 1


@pytest.mark.parametrize("name", ["weather", "Hm", "I", "end"])
def test_row_whose_tool_call_the_template_leaves_out_is_a_bad_row(name: str) -> None:
    def without_calls(messages: Messages, **options: Any) -> str:
        return chatml([{**m, "tool_calls": ()} for m in messages], **options)

    message = assistant("I see.", thinking="Hm.", tool_calls=[{"name": name, "arguments": {}}])
    with pytest.raises(BadRowError) as raised:
        render(without_calls, converse(("user", "What weather?"), message))
    assert raised.value.kind == "the model's template leaves out a tool call"
    assert str(raised.value).endswith("tool calls, such as --template qwen3)")


def test_model_without_the_tokens_of_qwen_is_not_pointed_to_its_template() -> None:
    def without_calls(messages: Messages, **options: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}</s>" for m in messages)

    conversation = converse(
        ("user", "What?"), assistant("", tool_calls=[{"name": "weather", "arguments": {}}])
    )
    with pytest.raises(BadRowError, match=r"name a template that writes tool calls\)$"):
        ModelTemplate(Renderer(without_calls), ("</s>",), "")(conversation)


def test_tool_call_turn_ends_after_all_its_control_tokens() -> None:
    def with_tokens(messages: Messages, **options: Any) -> str:
        return chatml(messages, **options).replace("<call>", "<|endoftext|>")

    message = assistant("See: f", tool_calls=[{"name": "f", "arguments": {}}])
    rendering = render(with_tokens, converse(("user", "?"), message))

    assert answers(rendering) == ['See: f<|endoftext|>{"name": "f", "arguments": {}}</call>' + END]


@pytest.mark.parametrize("call", [{}, {"function": {}}, {"function": "f"}, {"name": None}])
def test_row_with_a_tool_call_without_a_name_is_a_bad_row(call: dict[str, Any]) -> None:
    with pytest.raises(BadRowError, match=r"a tool call has no function name \(message 2\)"):
        render(chatml, converse(("user", "?"), assistant("a", tool_calls=[call])))


def test_tools_that_the_template_leaves_out_are_noted() -> None:
    def without_tools(messages: Messages, *, tools: Any, **options: Any) -> str:
        return chatml(messages, tools=None, **options)

    conversation = converse(("user", "1 + 1"), ("assistant", "2"), tools=[TOOL])
    assert render(without_tools, conversation).notes == {problems.DROPPED_TOOLS: ""}
    assert render(chatml, conversation).notes == {}


# System messages


def system_then(content: str = "Be brief.") -> Any:
    return converse(("system", content), ("user", "Hi"), ("assistant", "Hello!"))


def test_row_that_the_template_refuses_is_a_bad_row_with_its_own_reason() -> None:
    with pytest.raises(BadRowError) as raised:
        render(refuses_system, system_then())
    detail = "System role not supported: try --merge-system"
    assert (raised.value.kind, raised.value.detail) == (REFUSED, detail)


def test_system_message_that_the_template_drops_is_noted() -> None:
    rendering = render(drops_system, system_then())

    assert rendering.texts[0].text == turn("user", "Hi") + turn("assistant", "Hello!")
    assert rendering.notes == {problems.DROPPED_SYSTEM: ""}
    assert render(drops_system, system_then(" ")).notes == {}
    assert render(chatml, system_then()).notes == {}


@pytest.mark.parametrize("template", [refuses_system, drops_system])
def test_system_message_is_merged_into_the_first_user_turn_where_asked(
    template: Render,
) -> None:
    rendering = render(template, system_then(), merge_system=True)

    assert prompts(rendering) == [turn("user", "Be brief.\n\nHi") + "<|im_start|>assistant\n"]
    assert answers(rendering) == ["Hello!" + END]
    assert rendering.notes == {problems.MERGED_SYSTEM: ""}


def test_system_message_supported_by_template_is_not_merged() -> None:
    rendering = render(chatml, system_then(), merge_system=True)

    assert rendering == render(chatml, system_then())


def test_merging_empty_system_message_keeps_user_turn() -> None:
    rendering = render(refuses_system, system_then(" "), merge_system=True)

    assert rendering.texts[0].text.startswith(turn("user", "Hi"))


def test_system_message_without_a_user_turn_to_merge_it_into_is_a_bad_row() -> None:
    conversation = converse(("system", "Be brief."), ("tool", "4"), ("assistant", "4"))

    with pytest.raises(BadRowError, match="no user turn to merge it into"):
        render(refuses_system, conversation, merge_system=True)


def test_merging_is_not_advised_where_it_did_not_help() -> None:
    two = converse(("system", "a"), ("system", "b"), ("user", "Hi"), ("assistant", "Hello!"))

    with pytest.raises(BadRowError) as raised:
        render(refuses_system, two, merge_system=True)
    assert raised.value.detail == "System role not supported"


# Renderings that start before they are needed

CONVERSATIONS = (
    TWO_TURNS,
    converse(("system", "Be brief."), ("user", "a"), assistant("b", reasoning_content="c")),
    converse(("system", "Be brief."), ("tool", "4"), ("assistant", "4")),
    converse(("user", "a"), ("assistant", "<think>\nb\n</think>\n\nc"), tools=[TOOL]),
    converse(("assistant", "a"), ("user", "b"), ("assistant", "c")),
)


def outcome(rendering: PendingRendering) -> Rendering | str:
    try:
        return rendering()
    except BadRowError as problem:
        return str(problem)


@pytest.mark.parametrize("name", sorted(RENDERERS))
@pytest.mark.parametrize("thinking", ["auto", "on", "off"])
def test_renderings_are_the_same_however_many_requests_start_ahead(
    name: str, thinking: str
) -> None:
    template, source = RENDERERS[name]
    options: dict[str, Any] = {"thinking": thinking, "merge_system": True}
    plain = ModelTemplate(Renderer(template), (END, "[end]"), source, **options)
    expected = [outcome(partial(plain, conversation)) for conversation in CONVERSATIONS]
    for most in (0, 1, 4, None):
        renderer = Renderer(template, most)
        model = replace(plain, renderer=renderer)
        # Facts about a template are determined once.
        _ = model._shows_system, model._header
        renderer.requests.clear()

        pending = model.start(CONVERSATIONS)
        started = [request.options for request in renderer.requests if request.started]
        assert most is None or len(started) == most
        assert list(map(outcome, pending)) == expected
        # Each request is made once.
        calls = [request.options for request in renderer.requests]
        assert not [call for i, call in enumerate(calls) if call in calls[:i]]
        assert most is not None or started == calls


def test_conversation_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, prepared = ModelTemplate._prepare, list[Conversation]()

    def counted(template: ModelTemplate, conversation: Conversation) -> Any:
        prepared.append(conversation)
        return prepare(template, conversation)

    monkeypatch.setattr(ModelTemplate, "_prepare", counted)
    for pending in ModelTemplate(Renderer(chatml), (END,)).start(CONVERSATIONS):
        outcome(pending)
    assert prepared == list(CONVERSATIONS)


def test_conversation_whose_last_turn_is_not_trained_has_no_requests() -> None:
    last = {"role": "assistant", "content": "d", "weight": 0}
    conversation = converse(("user", "a"), ("assistant", "b"), ("user", "c"), last)
    renderer = Renderer(chatml)

    (pending,) = ModelTemplate(renderer, (END,), turns="last").start([conversation])
    assert not renderer.requests
    with pytest.raises(BadRowError, match="weight 0"):
        pending()
