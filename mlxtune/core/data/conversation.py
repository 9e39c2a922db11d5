"""The rows of data files, once they are checked: conversations, pairs and documents."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxtune.core.data.problems import BadRowError


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `tool_calls` holds an assistant's calls as JSON objects, in OpenAI's layout.

    `thinking` is an assistant's reasoning before its answer, from a separate field or from between
    `<think>` tags. `trained` is False for an assistant turn that is only context. `fields` is the
    message for a model's own template: the file's message with text content and parsed arguments,
    without marks such as `weight` or nulls. `removed` has the keys that are not read and that
    `fields` lacks.
    """

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    thinking: str = ""
    trained: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


# The roles of examples in their rows: an answer; the chosen answer of a pair, the rejected answer,
# and the prompt with the chosen answer; a good or a bad answer; and the prompt with the answer of
# another row.
ANSWER, CHOSEN, REJECTED, WHOLE, DESIRABLE, UNDESIRABLE, MISMATCHED = range(7)
ROLE_NAMES = (
    *("answer", "chosen", "rejected", "prompt and chosen"),
    *("desirable", "undesirable", "mismatched"),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row; `row` is its 1-based number in the file.

    `options` are variables that the row sets for its template. `unread` has the kind and a detail
    of a note on each key of the row that is not read.
    """

    row: int
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    role: int = ANSWER
    options: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A conversation with two continuations: a preferred one and a rejected one."""

    chosen: Conversation
    rejected: Conversation

    @property
    def row(self) -> int:
        return self.chosen.row

    @property
    def answers(self) -> tuple[Conversation, Conversation]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class Document:
    """A row of plain text, in which every token carries loss."""

    row: int
    text: str
    unread: tuple[tuple[str, str], ...] = ()


Row = Conversation | Document | Pair


def function_name(call: Mapping[str, Any]) -> str | None:
    function = call.get("function") or call
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def to_json(value: Any) -> str:
    """Return a value as JSON in chat templates' style.

    Raises BadRowError if it is nested too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise BadRowError("JSON nested too deeply") from error
