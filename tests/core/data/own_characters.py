"""Drawn rows whose characters identify their message, for tests.

Each message has its own character in its content (あ, い, …), its thinking (ア, イ, …) and its
calls (ㄅ, ㄆ, …).
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.core.data.renderers import END_TOKENS

ENDS = (
    *(*END_TOKENS, "<end_of_turn>", "<turn|>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)
PIECES = [
    *(
        "",
        " ",
        "\n",
        "\n\n",
        "é",
        "e\u0301",
        "🦙",
        "\u200b",
        "\u2028",
        "\x00",
        '"',
        "{{ x }}",
        "\\",
    ),
    *("<|im_end|>", "<|im_start|>", "<bos>", "<think>", "</think>", "<end_of_turn>", "<|", "|>"),
]


def own(kind: str, message: int) -> str:
    """Return a character that only this message has."""
    return chr({"content": 0x3042, "thinking": 0x30A2, "call": 0x3105}[kind] + 2 * message)


def owners(text: str) -> set[int]:
    """Return the messages whose characters occur in a text."""
    bases = (0x3042, 0x30A2, 0x3105)
    return {
        message
        for character in text
        for base in bases
        if 0 <= (message := (ord(character) - base) // 2) < 16
    }


@st.composite
def texts(draw: st.DrawFn, character: str, longest: int = 5) -> str:
    pieces = st.sampled_from(PIECES) | st.just(character) | st.just(f"{character} {character}")
    text = "".join(draw(st.lists(pieces, max_size=longest)))
    return text if draw(st.integers(0, 9)) == 0 else text + character


@st.composite
def calls(draw: st.DrawFn, message: int) -> dict[str, Any]:
    arguments: Any = {draw(st.sampled_from("xy")): draw(texts(own("call", message), 2))}
    function = {"name": draw(st.sampled_from(["f", "get_weather"])), "arguments": arguments}
    kind = draw(st.sampled_from(["plain", "plain", "json", "bare", "nameless"]))
    if kind == "json":
        function["arguments"] = json.dumps(arguments)
    if kind == "nameless":
        function.pop("name")
    return function if kind == "bare" else {"type": "function", "function": function}


@st.composite
def messages(draw: st.DrawFn, i: int, role: str) -> dict[str, Any]:
    content: Any = draw(texts(own("content", i)))
    if draw(st.integers(0, 7)) == 0:
        content = [{"type": "text", "text": content[:2]}, {"type": "text", "text": content[2:]}]
    message = {"role": role, "content": content}
    if role != "assistant":
        return message
    thought = draw(st.sampled_from(["", "", "tags", "reasoning_content", "reasoning", "thinking"]))
    if thought == "tags" and isinstance(content, str):
        inner = own("thinking", i) + draw(st.sampled_from(["", "\n", " so"]))
        message["content"] = f"<think>\n{inner}\n</think>\n\n{content}"
    elif thought:
        message[thought] = draw(texts(own("thinking", i), 2))
    if draw(st.integers(0, 4)) == 0:
        message["tool_calls"] = draw(st.lists(calls(i), max_size=2))
        message["content"] = draw(st.sampled_from([content, None]))
    if draw(st.integers(0, 4)) == 0:
        message["weight"] = draw(st.sampled_from([0, 1, 1]))
    return message


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    roles = draw(
        st.lists(
            st.sampled_from(["system", "developer", "user", "assistant", "tool", "critic"]),
            max_size=4,
        )
        | st.lists(st.just(["user", "assistant"]), min_size=1, max_size=3).map(
            lambda pairs: [role for pair in pairs for role in pair]
        )
        | st.just(["system", "user", "assistant", "user", "assistant", "user"])
        | st.just(["user", "assistant", "tool", "tool", "assistant"])
    )
    row: dict[str, Any] = {"messages": [draw(messages(i, role)) for i, role in enumerate(roles)]}
    if draw(st.integers(0, 3)) == 0:
        row["tools"] = [{"type": "function", "function": {"name": "f", "description": "겉"}}]
    return row
