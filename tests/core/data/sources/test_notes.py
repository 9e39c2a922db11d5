"""Notes on the text of a row: contents that are rarely intended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data import problems
from mlxtune.core.data.conversation import UNDESIRABLE, Document
from mlxtune.core.data.sources.notes import notes_on, notes_on_keys
from tests.core.data.encoding import converse
from tests.core.data.rows import ALPACA, ANSWER, CHAT, PROMPT, SHAREGPT, TOOL, USER, read


def notes(folder: Path, row: dict[str, Any]) -> dict[str, str]:
    (one,), _ = read(folder, row)
    text = getattr(one, "text", None) or " ".join(message.content for message in one.messages)  # type: ignore[union-attr]
    return dict(notes_on(one, text))


def chat(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages, ANSWER], **others}


def test_refusal_labeled_as_bad_is_not_noted() -> None:
    refusal = ("assistant", "I cannot assist with that request.")
    row = converse(("user", "Hi"), refusal)
    assert problems.REFUSAL in dict(notes_on(row, ""))
    assert problems.REFUSAL not in dict(notes_on(replace(row, role=UNDESIRABLE), ""))


@pytest.mark.parametrize(
    "text",
    [
        "As an AI assistant developed by Acme, I got the name Ada.",
        "No, I am an AI assistant built to help.",
        "As an AI assistant, I'd be more than happy to help you plan.",
    ],
)
def test_self_description_is_not_a_refusal(text: str) -> None:
    assert problems.REFUSAL not in dict(notes_on(converse(("user", "Hi"), ("assistant", text)), ""))


@pytest.mark.parametrize("text", ["opcodes = table[INST]", "Phi's turns begin with <|user|>."])
def test_mentioned_marker_does_not_make_text_a_rendered_chat(text: str) -> None:
    assert not dict(notes_on(Document(1, text), text))


@pytest.mark.parametrize(
    "text", ["They write <think> first.", "<think>The tag</think>It is <think>.", "Ends </think>"]
)
def test_mentioned_thinking_tag_does_not_open_thinking(text: str) -> None:
    row = converse(("user", "Hi"), ("assistant", text))
    assert problems.UNCLOSED_THINKING not in dict(notes_on(row, ""))


def call(name: str = "add", arguments: Any = "{}") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


VALUE = {"value": "And now?"}


def thought(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": "hmm"}


def answering(text: str) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": text}]}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (chat(call("sub"), tools=[TOOL]), problems.UNDECLARED_TOOL),
        (chat(call()), problems.UNDECLARED_TOOL),
        ({"messages": [{"role": "user", "content": " \n"}, ANSWER]}, problems.EMPTY_PROMPT),
        (ALPACA | {"instruction": ""}, problems.EMPTY_PROMPT),
        (answering("As an AI language model, I have no taste."), problems.REFUSAL),
        (answering("I’m sorry, but I can’t help with that."), problems.REFUSAL),
        (answering("I cannot assist with that request."), problems.REFUSAL),
        (answering("<think>3 + 3 Six."), problems.UNCLOSED_THINKING),
        (answering("nan"), problems.EMPTY_VALUE),
        (PROMPT | {"completion": " NULL\n"}, problems.EMPTY_VALUE),
        (PROMPT | {"completion": "N/A"}, problems.EMPTY_VALUE),
        (answering("caf\ufffd"), problems.REPLACED),
        (answering("cafÃ© au lait"), problems.MOJIBAKE),
        (answering("it isnâ€™t"), problems.MOJIBAKE),
        ({"text": "15Â°C ðŸ˜€"}, problems.MOJIBAKE),
        ({"text": "<|im_start|>user\nHi<|im_end|>"}, problems.RENDERED_CHAT),
        ({"text": "<s>[INST] Hi [/INST] Hello!</s>"}, problems.RENDERED_CHAT),
        ({"text": "### Human: Hi\n### Assistant: Hello!"}, problems.RENDERED_CHAT),
        (PROMPT | {"prompt": "### Instruction:\nSay hi.\n"}, problems.RENDERED_CHAT),
        (PROMPT | {"prompt": "\n<|im_start|>user\nHi<|im_end|>"}, problems.RENDERED_CHAT),
        (PROMPT | {"prompt": "\n\nHuman: Hi\n\nAssistant:"}, problems.RENDERED_CHAT),
        (PROMPT | {"prompt": "USER: Hi ASSISTANT:"}, problems.RENDERED_CHAT),
        ({"text": "User: Hi\nAssistant: Hello!"}, problems.RENDERED_CHAT),
        (CHAT | {"messages": [*CHAT["messages"], USER]}, problems.UNANSWERED),
        (
            SHAREGPT | {"conversations": [*SHAREGPT["conversations"], {"from": "human"} | VALUE]},
            problems.UNANSWERED,
        ),
        (chat(thought("<think>x</think>A")), problems.TWO_THOUGHTS),
    ],
)
def test_problem_is_noted(tmp_path: Path, row: dict[str, Any], kind: str) -> None:
    assert list(notes(tmp_path, row)) == [kind]
    assert kind in problems.ADVICE


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        chat(call(), tools=[TOOL]),
        chat(call(arguments={"a": 1}), tools=[{"type": "function", "function": TOOL}]),
        chat(call()) | {"system": "Call add(a, b) for sums."},
        answering("The film A.I. is from 2001; I am sorry that I was late."),
        CHAT | {"context": "finance", "input": CHAT["messages"][0]["content"]},
        CHAT | {"prompt": "Another text.", "source": "a b", "category": "c d", "url": "e f"},
        ALPACA | {"instruction": "Say hello.", "input": "To all."},
        answering("Nan"),
        chat(thought("<think>hmm</think>A")),
        chat(thought("A")),
        PROMPT | {"prompt": "User: Ada\nPassword: Assistant"},
        PROMPT | {"prompt": "Human: a short history.\nSum it up."},
        answering("none"),
        PROMPT
        | {"prompt": "### Humans: a history\nSum it up.", "completion": "### User: a heading"},
        answering("SÃO PAULO, naïve “quotes” – 15 °C 😀"),
        {"messages": [USER, {**answering("I cannot assist.")["messages"][1], "weight": 0}, ANSWER]},
    ],
)
def test_usual_values_are_not_noted(tmp_path: Path, row: dict[str, Any]) -> None:
    assert notes(tmp_path, row) == {}


@pytest.mark.parametrize("start", ["", "Human: ", "<thinking>", "<thinking><", "<thinking><think"])
@pytest.mark.parametrize("more", [" ", "\n ", "<", "think", "<|", " ASSISTANT"])
def test_beginnings_of_long_texts_are_read_in_linear_time(start: str, more: str) -> None:
    text = start + more * 100_000 + "x"
    row = converse(("user", text), ("assistant", text))
    assert len(list(notes_on(row, ""))) + len(notes_on_keys(row, "")) <= 2


def test_excerpt_ends_with_the_text_that_it_is_from() -> None:
    row = converse(("user", "caf\ufffd"), ("assistant", "Yes."))
    assert dict(notes_on(row, "So:\0caf\ufffd\0Yes."))[problems.REPLACED] == "'caf\ufffd'"
