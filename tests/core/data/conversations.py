"""Conversations for tests of templates, built in one line or drawn by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mlxtune.core.data.conversation import Conversation, Message
from mlxtune.core.data.template import Rendering

EMPTY_THINKING = "<think>\n\n</think>\n\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Das Wetter für <eine> Stadt & "mehr" 🌦',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def converse(*messages: tuple[str, str] | Message, tools: tuple[Any, ...] = ()) -> Conversation:
    parsed = tuple(m if isinstance(m, Message) else Message(*m) for m in messages)
    return Conversation(1, parsed, tools)


def text_of(rendering: Rendering) -> str:
    """Return the text of a rendering that has only one."""
    (one,) = rendering.texts
    return one.text


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
CALLS = st.builds(
    call,
    st.text(min_size=1, max_size=5),
    st.text(max_size=5)
    | st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.none()),
)
# Like every row that is read, each conversation has an assistant turn.
MESSAGES = st.lists(
    st.builds(
        lambda role, content, calls: Message(role, content, calls * (role == "assistant")),
        ROLES,
        st.text(max_size=12),
        st.lists(CALLS, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=6,
).filter(lambda messages: any(message.role == "assistant" for message in messages))
