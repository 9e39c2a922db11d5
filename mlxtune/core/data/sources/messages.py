"""Checks the messages of a row in OpenAI's format and its relatives, and selects supervised turns.

Checks raise BadRowError.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mlxtune.core.data.conversation import Conversation, Message
from mlxtune.core.data.problems import MARK_REASONS, BadRowError, json_type
from mlxtune.core.data.sources.keys import (
    EMPTY,
    MEDIA,
    OPTIONS_OBJECTS,
    TEMPLATE_OPTIONS,
    THINKING_FIELDS,
    are_learned,
    field_option,
    is_learned,
    is_mark,
    is_media,
    is_thinking,
    lists_marks,
    normalized_key,
    quoted,
    template_options,
)
from mlxtune.core.data.sources.tool_calls import (
    calls_in,
    objects_in,
    parse_tools,
    parsed_text,
    plain_call,
)
from mlxtune.errors import shorten

ROLES = ("system", "user", "assistant", "tool")
# The roles of agents' formats, without punctuation, whose content is a call or the result of one.
_CALL_ROLES = frozenset(["functioncall", "functioncalls", "toolcall", "toolcalls"])
_RESULT_ROLES = (
    *("observation", "functionresponse", "toolresponse", "functionresult", "toolresult"),
    *("toolresults", "functionoutput", "tooloutput", "ipython"),
)
# OpenAI's newer and older names, and Gemini's; few templates know them.
_SAME_ROLES = {
    **{"developer": "system", "function": "tool", "model": "assistant"},
    **dict.fromkeys(_CALL_ROLES, "assistant"),
    **dict.fromkeys(_RESULT_ROLES, "tool"),
}
_MEDIA_TYPES = ("image", "input_image", "audio", "input_audio", "video")
# The names of roles in ShareGPT's files.
SHAREGPT_ROLES = {
    name: role
    for role, names in {
        "user": "human user",
        "assistant": "gpt chatgpt assistant model bot bing bard",
        "system": "system developer",
        "tool": "tool observation",
    }.items()
    for name in names.split()
}
_READ_ROLES = (
    *(*ROLES, "developer", "model", "function", "function_call", "tool_call"),
    *("observation", "tool_response"),
)
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_PART_KEYS = {"type", "text"}
# Keys whose text is never the content of the message.
_NO_CONTENT = {"role", "name", "id", "type", "tool_calls", "tool_call_id", "refusal"}
# The parts of Claude's messages that are not text, and where to write them.
_OTHER_PARTS = {
    "thinking": "write it under 'reasoning_content' of the message",
    "tool_use": "write the call under 'tool_calls' of the message",
    "tool_result": "write it as a message of the role tool",
}


def parse_conversation(row: int, content: Mapping[str, Any]) -> Conversation:
    """Check and convert `{"messages": [...], "tools": [...], "system": "..."}`.

    `tools` may also be the JSON text of a list, as in LLaMA-Factory's files, or bare `functions`,
    as in OpenAI's older files. `system` is put before the messages, as in Anthropic's files. Raises
    BadRowError.
    """
    messages = parse_messages(_marked(content))
    if content.get("system") is not None:
        messages = (*_system(content["system"], messages), *messages)
    tools = parse_tools(content.get("tools")) or tuple(
        {"type": "function", "function": function}
        for function in objects_in(content.get("functions"), "functions")
    )
    return Conversation(row, messages, tools, options=_options(content))


def _options(content: Mapping[str, Any]) -> dict[str, Any]:
    names = (*TEMPLATE_OPTIONS, *OPTIONS_OBJECTS)
    return template_options({name: content[name] for name in names if name in content})


def parse_messages(messages: Any) -> tuple[Message, ...]:
    """Check and convert the messages of a row.

    Raises BadRowError if a message is not valid, or if no assistant turn is trained on.
    """
    if not isinstance(messages, list):
        raise BadRowError("'messages' is not a list", json_type(messages))
    turns = _whole_turns(messages)
    parsed = _in_order_of_calls([_parse_message(where, message) for where, message in turns])
    if not any(message.role == "assistant" and message.trained for message in parsed):
        untrained = any(message.role == "assistant" for message in parsed)
        raise BadRowError(MARK_REASONS["turns"] if untrained else "no assistant turn")
    return parsed


def _in_order_of_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages with the results of each turn's calls in the order of the calls.

    Templates show results in the order of the file, without their `tool_call_id`.
    """
    ordered: list[Message] = []
    index_of: dict[Any, int] = {}
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        turn = list(run)
        results = [result_id(message) for message in turn]
        if is_result and len(turn) > 1 and index_of.keys() >= {*results}:
            turn.sort(key=lambda message: index_of[result_id(message)])
        ordered += turn
        index_of = {name: index for index, name in enumerate(call_ids(turn[-1]))}
    return tuple(ordered)


def turn_marks(content: Mapping[str, Any]) -> dict[str, list[bool]]:
    """Return whether each turn is learned, by the keys of a row that list this.

    Raises BadRowError.
    """
    return are_learned(
        {k: v for k, v in content.items() if isinstance(v, list) and v and lists_marks(k)}
    )


def call_ids(message: Message) -> list[str]:
    """Return the identifiers of a message's calls."""
    return [name for call in message.tool_calls if isinstance(name := call.get("id"), str)]


def result_id(message: Message) -> str | None:
    """Return the identifier of the call whose result a message is, if it has one."""
    name = message.fields.get("tool_call_id")
    return name if isinstance(name, str) else None


def _whole_turns(messages: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return each turn with its place; calls that are messages of their own join one turn.

    A model ends its turn after its last call, so text and calls in a row, without a result between
    them, are one turn.
    """
    turns: list[tuple[str, Any]] = []
    for message_number, message in enumerate(messages, start=1):
        where = f"message {message_number}"
        if _is_empty_system(message):
            continue
        if not isinstance(message, dict) or not _calls_alone(message):
            turns.append((where, message))
            continue
        calls = message | {
            "role": "assistant",
            "content": "",
            "tool_calls": calls_in(message.get("content"), where),
        }
        if turns and role_of(turns[-1][1]) == "assistant":
            before, earlier = turns.pop()
            if is_learned(marks_of(earlier), before) != is_learned(marks_of(calls), where):
                raise BadRowError("a turn whose calls are marked differently", where)
            listed = earlier.get("tool_calls") or []
            listed = listed if isinstance(listed, list) else [listed]
            calls |= {"content": "", **earlier, "tool_calls": listed + calls["tool_calls"]}
            where = before
        turns.append((where, calls))
    return turns


def _marked(content: Mapping[str, Any]) -> Any:
    """Return the messages of a row, with the marks that the row lists for them."""
    messages = content.get("messages")
    if not isinstance(messages, list):
        return messages
    for key, learned in turn_marks(content).items():
        answers = [index for index, each in enumerate(messages) if role_of(each) == "assistant"]
        indices = range(len(messages)) if len(learned) == len(messages) else answers
        if len(indices) != len(learned):
            fit = f"{shorten(key)} has {len(learned)}, for {len(messages)} messages"
            raise BadRowError("marks of a row that fit neither its messages nor its answers", fit)
        hidden = {index for index, learns in zip(indices, learned, strict=True) if not learns}
        for index in hidden.intersection(answers):
            where, own = f"message {index + 1}", marks_of(messages[index])
            if own and is_learned(own, where):
                raise BadRowError("contradictory marks on a turn", f"{where}: {key}")
            messages = [*messages[:index], messages[index] | {"weight": 0}, *messages[index + 1 :]]
    return messages


def _is_empty_system(message: Any) -> bool:
    """Return whether a message is a system prompt in an empty cell of a table."""
    if role_of(message) != "system" or message.get("content") is not None:
        return False
    return not _other_content(message)


def _calls_alone(message: Mapping[str, Any]) -> bool:
    """Return whether the content of a message is a call, as its role says."""
    role = message.get("role")
    return isinstance(role, str) and normalized_key(role) in _CALL_ROLES


def _parse_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise BadRowError("a message is not an object", f"{where} is {json_type(message)}")
    if (role := role_of(message)) is None:
        use = role_options(message)
        raise BadRowError("a message has no role", where + f": use {use}" * bool(use))
    if role not in ROLES:
        raise unknown_role(message["role"], _READ_ROLES, where)
    check_is_text(message, where)
    fields = {k: value for k, value in message.items() if value is not None and not is_mark(k)}
    fields["role"], removed = role, set()
    if isinstance(content := fields.get("content"), list):
        parts = [part for part in content if isinstance(part, dict)]
        removed = {k for part in parts for k, v in part.items() if v not in EMPTY} - _PART_KEYS
        # mlx_lm.server joins text parts the same way.
        content = fields["content"] = _joined(content, where)
    if role == "assistant":
        answer = _parse_answer(fields, is_learned(marks_of(message), where), where)
        # A template gets one thinking; other fields of thinking are unread unless they repeat it.
        removed |= {
            name
            for name in THINKING_FIELDS
            if isinstance(thought := fields.get(name), str)
            and thought.strip() not in ("", answer.thinking)
        }
        return replace(answer, removed=tuple(sorted(removed))) if removed else answer
    if not isinstance(content, str):
        problem = _other_content(fields) or json_type(content)
        raise BadRowError("content is not text", f"{where}: {problem}")
    # No turn but the assistant's is learned, so a mark that asks for it is not followed.
    removed |= {key for key, value in message.items() if value and is_mark(key)}
    return Message(role, content, fields=fields, removed=tuple(sorted(removed)))


def _other_content(fields: Mapping[str, Any]) -> str:
    """Return how to read a message whose content is under its only other key with text."""
    if fields.get("refusal"):
        return "write its 'refusal' as the content"
    texts = [key for key in fields.keys() - _NO_CONTENT if isinstance(fields[key], str | list)]
    if fields.get("content") is not None or len(texts) != 1:
        return ""
    return f"use {field_option('content', texts[0])}"


def role_options(message: Mapping[str, Any]) -> str:
    """Return the options that read a message whose role is under another key; "" if unknown."""
    texts = {key: value for key, value in message.items() if isinstance(value, str)}
    roles = [key for key, value in texts.items() if value.lower() in (*ROLES, *SHAREGPT_ROLES)]
    content_keys = [key for key in texts if key not in (*roles, *_NO_CONTENT)]
    if len(roles) != 1 or len(content_keys) != 1:
        return ""
    names = ("role", "content") if texts[roles[0]].lower() in ROLES else ("from", "value")
    keys = zip(names, (*roles, *content_keys), strict=True)
    return " ".join(field_option(name, key) for name, key in keys if name != key)


def check_is_text(content: Mapping[str, Any], where: str = "") -> None:
    """Raise BadRowError for a row, a message or a part with images, audio or video."""
    for key, value in content.items():
        if is_media(key) and value not in (*EMPTY, False):
            raise BadRowError(MEDIA, f"{where}: " * bool(where) + shorten(key))


def marks_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marks of a row or a message, which say whether it is learned."""
    return {key: value for key, value in content.items() if value is not None and is_mark(key)}


def role_of(message: Any) -> str | None:
    """Return a message's role by our name for it, if it has one."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        return None
    return _SAME_ROLES.get(normalized_key(role), role.lower())


def unknown_role(role: str, roles: Sequence[str], where: str) -> BadRowError:
    close = difflib.get_close_matches(role[:60].lower(), roles, n=1)
    if (meant := SHAREGPT_ROLES.get(role.lower())) is not None:
        return BadRowError("unknown role", f"{where}: {shorten(role)}; write {meant!r}")
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(roles)}"
    return BadRowError("unknown role", f"{where}: {shorten(role)}; {hint}")


def _joined(parts: list[Any], where: str) -> str:
    """Return the text of parts. Raises BadRowError for bare texts, which may be alternatives."""
    if sum(isinstance(part, str) for part in parts) > 1:
        raise several_texts(parts, where)
    return "".join([_part(part, where) for part in parts])


def several_texts(texts: list[Any], where: str) -> BadRowError:
    remedy = "write one; two answers to compare are 'chosen' and 'rejected' of --objective dpo"
    return BadRowError("several texts where one is expected", f"{where} has {len(texts)}: {remedy}")


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind.startswith(_MEDIA_TYPES):
        raise BadRowError(MEDIA, f"{where}: {shorten(kind)}")
    if isinstance(part, dict):
        check_is_text(part, where)
        if kind is None and "text" not in part:
            raise BadRowError("content has a part that is not text", f"{where}: {quoted(part)}")
    if isinstance(part, dict) and kind in _TEXT_PARTS:
        part = part.get("text")
    if not isinstance(part, str):
        of = f" of type {shorten(kind)}" if isinstance(kind, str) and isinstance(part, dict) else ""
        remedy = f": {_OTHER_PARTS[kind]}" if of and kind in _OTHER_PARTS else ""
        detail = f"{where}: {json_type(part)}{of}{remedy}"
        raise BadRowError("content has a part that is not text", detail)
    return part


def _parse_answer(fields: dict[str, Any], trained: bool, where: str) -> Message:
    if not any(fields.get(name) for name in THINKING_FIELDS):
        rare = (key for key, value in fields.items() if value and isinstance(value, str))
        if (key := next(filter(is_thinking, rare), None)) is not None:
            fields[THINKING_FIELDS[0]] = fields.pop(key)
    thinking = _thinking_field(fields, where)
    if "tool_calls" not in fields and "function_call" in fields:
        function = fields.pop("function_call")
        fields["tool_calls"] = [{"type": "function", "function": function}]
    if isinstance(written := fields.get("tool_calls"), str):
        fields["tool_calls"] = parsed_text(written, "tool_calls")
    listed = enumerate(objects_in(fields.get("tool_calls"), "tool_calls"), start=1)
    calls = tuple([plain_call(call, f"{where}, call {number}") for number, call in listed])
    # Some templates treat an empty list as calls.
    fields.pop("tool_calls", None)
    if calls:
        fields["tool_calls"] = list(calls)
    if calls or thinking:
        fields.setdefault("content", "")
    content = fields.get("content")
    if content is None:
        advice = _other_content(fields)
        raise BadRowError("empty answer", f"{where} has no content" + f": {advice}" * bool(advice))
    if not isinstance(content, str):
        raise BadRowError("content is not text", f"{where}: {json_type(content)}")
    thought, answer = thinking_and_answer(content)
    thinking = thinking or thought
    if not calls and not thinking and (not answer or answer.isspace()):
        raise BadRowError("empty answer", where)
    return Message("assistant", content, calls, thinking, trained, fields)


def _thinking_field(fields: Mapping[str, Any], where: str) -> str:
    for name in THINKING_FIELDS:
        thought = fields.get(name, "")
        if not isinstance(thought, str):
            raise BadRowError("thinking is not text", f"{where}: {json_type(thought)}")
        if thought := thought.strip():
            return thought
    return ""


def thinking_and_answer(content: str) -> tuple[str, str]:
    """Split `<think>thinking</think>answer`, whose opening tag may be in the prompt instead."""
    if "</think>" not in content:
        return "", content
    thought, _, answer = content.partition("</think>")
    thought = thought.lstrip()
    if thought.startswith("<think>"):
        thought = thought[len("<think>") :]
    elif "<think>" in thought:
        return "", content
    return thought.strip(), answer


def _system(text: Any, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the message for a row's `system` text; () if the text is empty or already present."""
    if isinstance(text, dict):  # a message in OpenAI's or Gemini's layout
        text = text.get("parts", text.get("content", text.get("text")))
        text = [text] if isinstance(text, dict) else text
    if isinstance(text, list) and text:
        text = _joined(text, "'system'")
    if not isinstance(text, str):
        raise BadRowError("'system' is not text", json_type(text))
    present = {message.content for message in messages if message.role == "system"}
    if not text or text in present:
        return ()
    if present:
        raise BadRowError("'system' differs from the system message")
    return (Message("system", text, fields={"role": "system", "content": text}),)


def supervised_turns(conversation: Conversation, turns: str) -> list[int]:
    """Return the indices of the assistant turns that carry loss.

    Raises BadRowError if none does.
    """
    messages = conversation.messages
    selected = [i for i, message in enumerate(messages) if message.role == "assistant"]
    selected = [i for i in (selected if turns == "all" else selected[-1:]) if messages[i].trained]
    if not selected:
        raise BadRowError(MARK_REASONS["last turn"])
    return selected
