"""Rows to conversations: every row is kept whole, or is a BadRow for a reason that is counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxtune.core.data.bad_rows import TOO_DEEP, BadRow, json_type
from mlxtune.errors import shorten

ROLES = ("system", "user", "assistant", "tool")
_THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `tool_calls` holds an assistant's calls as JSON objects, in OpenAI's layout.

    `thinking` is what an assistant thought before its answer, from a field of its own or from
    between `<think>` tags. `trained` is False for an assistant's turn that is context only.
    `fields` is the message as a model's own template is to get it: as the file has it, but with
    its content and the arguments of its calls made plain, and without `weight` and nulls.
    """

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    thinking: str = ""
    trained: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row; `row` is its 1-based number: of a line, or of an element."""

    row: int
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A row of plain text: every token of it carries loss."""

    row: int
    text: str


def parse_conversation(row: int, content: Mapping[str, Any]) -> Conversation:
    """Check and convert `{"messages": [...], "tools": [...], "system": "..."}`.

    `tools` may also be the JSON text of a list, as LLaMA-Factory stores it. A `system` text
    stands before the messages, as Anthropic's files have it.

    Raises BadRow, whose kind is the same for all rows with the same problem.
    """
    messages = parse_messages(content.get("messages"))
    if content.get("system") is not None:
        messages = (*_system(content["system"], messages), *messages)
    tools = content.get("tools")
    return Conversation(row, messages, () if tools is None else _tools(tools))


def parse_messages(messages: Any) -> tuple[Message, ...]:
    """Check and convert the messages of a row.

    Raises BadRow, also when no message is a trained assistant's, since nothing could be learned.
    """
    if not isinstance(messages, list):
        raise BadRow("'messages' is not a list", json_type(messages))
    parsed = tuple([_parse_message(i, message) for i, message in enumerate(messages, start=1)])
    if not any(message.role == "assistant" and message.trained for message in parsed):
        untrained = any(message.role == "assistant" for message in parsed)
        raise BadRow("no assistant turn with weight 1" if untrained else "no assistant turn")
    return parsed


def _parse_message(position: int, message: Any) -> Message:
    where = f"message {position}"
    if not isinstance(message, dict):
        raise BadRow("a message is not an object", f"{where} is {json_type(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadRow("a message has no role", where)
    fields = message
    if role not in ROLES or not isinstance(content, str) or len(message) > 2:
        fields = _plain_fields(message, role, where)
        role, content = fields["role"], fields.get("content")
    if role == "assistant":
        return _parse_answer(message, fields, where)
    if not isinstance(content, str):
        raise BadRow("content is not text", f"{where} is {json_type(content)}")
    _check_surrogates(fields, content, where)
    return Message(role, content, fields=fields)


def _plain_fields(message: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Return a copy without nulls and `weight`, its content one text, its role one of ROLES."""
    # OpenAI's newer name for it, which few templates know.
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise BadRow("unknown role", f"{where}: {shorten(role)}; known: {', '.join(ROLES)}")
    fields = {k: value for k, value in message.items() if value is not None and k != "weight"}
    fields["role"] = role
    if isinstance(content := fields.get("content"), list):
        # As mlx_lm.server joins them.
        fields["content"] = "".join([_part(part, where) for part in content])
    return fields


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict):
        kind, part = part.get("type"), part.get("text")
        if kind not in (None, "text"):
            shown = shorten(kind)[1:-1] if isinstance(kind, str) else json_type(kind)
            raise BadRow("content has a part that is not text", f"{where}: {shown}")
    if not isinstance(part, str):
        raise BadRow("content has a part that is not text", f"{where}: {json_type(part)}")
    return part


def _parse_answer(message: dict[str, Any], fields: dict[str, Any], where: str) -> Message:
    """Convert an assistant's message; `fields` is the message itself, or the plain copy of it."""
    content, thinking, trained = fields.get("content"), "", True
    calls: tuple[dict[str, Any], ...] = ()
    if fields is not message:
        trained = _trained(message, where)
        thinking = _thinking_field(fields, where)
        calls = tuple(map(_plain_call, objects(fields, "tool_calls")))
        # Some templates take an empty list for calls.
        fields.pop("tool_calls", None)
        if calls:
            fields["tool_calls"] = list(calls)
        if content is None and (calls or thinking):
            content = fields["content"] = ""
        if content is None:
            raise BadRow("empty answer", f"{where} has no content")
    if not isinstance(content, str):
        raise BadRow("content is not text", f"{where} is {json_type(content)}")
    answer = content
    if "</think>" in content:
        thought, answer = _split_thinking(content)
        thinking = thinking or thought
    if not calls and not thinking and (not answer or answer.isspace()):
        raise BadRow("empty answer", where)
    _check_surrogates(fields, content, where)
    return Message("assistant", content, calls, thinking, trained, fields)


def _trained(message: Mapping[str, Any], where: str) -> bool:
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise BadRow("'weight' is neither 0 nor 1", where)
    return weight != 0


def _thinking_field(fields: Mapping[str, Any], where: str) -> str:
    for name in _THINKING_FIELDS:
        thought = fields.get(name)
        if thought is not None and not isinstance(thought, str):
            raise BadRow("thinking is not text", f"{where} is {json_type(thought)}")
        if thought and (thought := thought.strip()):
            return thought
    return ""


def _split_thinking(content: str) -> tuple[str, str]:
    """Split `<think>thinking</think>answer`, whose opening tag may be in the prompt instead."""
    thought, _, answer = content.partition("</think>")
    thought = thought.lstrip()
    if thought.startswith("<think>"):
        thought = thought[len("<think>") :]
    elif "<think>" in thought:
        return "", content
    return thought.strip(), answer


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object where they were the JSON text of one.

    OpenAI's files have the text; templates expect the object, and mlx_lm.server gives it to them.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        return _plain_arguments(call)
    plain = _plain_arguments(function)
    return call if plain is function else call | {"function": plain}


def _plain_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return function
    return function | {"arguments": parsed} if isinstance(parsed, dict) else function


def _system(text: Any, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the system message of a row's `system`, or none where it is empty or stands there."""
    if not isinstance(text, str):
        raise BadRow("'system' is not text", json_type(text))
    if not text or any(
        message.role == "system" and message.content == text for message in messages
    ):
        return ()
    if any(message.role == "system" for message in messages):
        raise BadRow("'system' differs from the system message")
    check_text(text, "system")
    return (Message("system", text, fields={"role": "system", "content": text}),)


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except RecursionError as error:
            raise BadRow(TOO_DEEP, "tools") from error
        except ValueError as error:
            raise BadRow("'tools' is text that is not JSON") from error
    parsed = objects({"tools": tools}, "tools")
    if parsed:
        check_text(to_json(parsed), "tools")
    return parsed


def _check_surrogates(fields: Mapping[str, Any], content: str, where: str) -> None:
    if len(fields) > 2:
        check_text(to_json(fields), where)
    else:
        check_text(content, where)


def check_text(text: str, where: str) -> None:
    """Raise BadRow when the text is no Unicode; half a pair comes from an escape or a bad byte."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("text holds half a surrogate pair", where) from error


def to_json(value: Any) -> str:
    """Return JSON as the models' templates write it. Raises BadRow when it is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise BadRow(TOO_DEEP) from error


def objects(container: Mapping[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    """Return the objects of a list, none where it is absent. Raises BadRow for another value."""
    value = container.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRow(f"'{key}' is not a list of objects")
    return tuple(value)
