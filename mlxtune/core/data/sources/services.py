"""Converts the layouts of chat services: exports of ChatGPT and Claude, and Gemini's contents."""

from typing import Any

from mlxtune.core.data.conversation import Conversation, to_json
from mlxtune.core.data.problems import BadRowError, json_type
from mlxtune.core.data.sources.conversions import JsonObject
from mlxtune.core.data.sources.keys import normalized_key
from mlxtune.core.data.sources.messages import parse_conversation
from mlxtune.core.data.sources.tool_calls import parse_tools

# What a ChatGPT export has beside a conversation's messages.
CHATGPT_KEYS = (
    *("title", "create_time", "update_time", "moderation_results", "plugin_ids", "voice"),
    *("conversation_id", "conversation_template_id", "conversation_origin", "safe_urls"),
    *("gizmo_id", "gizmo_type", "is_archived", "is_starred", "blocked_urls", "async_status"),
    *("default_model_slug", "disabled_tool_ids", "memory_scope", "context_scopes", "owner"),
    *("sugar_cookie_id", "sugar_cookie_visible", "is_do_not_remember", "is_read_only"),
    *("is_study_mode", "atlas_mode_enabled", "pinned_time"),
)
# The keys of a message of a ChatGPT export, and the messages that are not turns.
_NODE_KEYS = (
    *("id", "author", "create_time", "update_time", "content", "status", "end_turn", "weight"),
    *("metadata", "recipient", "channel"),
)
# Far more than anybody writes in one conversation; each takes kilobytes once it is read.
_MAX_TURNS = 20_000
_ASIDE_TYPES = ("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context")


def from_chatgpt(row: int, content: JsonObject) -> Conversation:
    """Convert a conversation of a ChatGPT export, without its other branches."""
    nodes, key = content["mapping"], content["current_node"]
    if not isinstance(nodes, dict):
        raise BadRowError("'mapping' is not an object", json_type(nodes))
    messages = []
    for _ in nodes:  # the parents of damaged nodes could form a circle
        node = nodes.get(key) if isinstance(key, str) else None
        if not isinstance(node, dict):
            break
        if isinstance(message := node.get("message"), dict):
            messages += [message]
        if len(messages) > _MAX_TURNS:
            raise BadRowError("a ChatGPT conversation with too many turns", f"over {_MAX_TURNS:,}")
        key = node.get("parent")
    turns = list(filter(None, map(_from_node, reversed(messages))))
    return parse_conversation(row, {**content, "messages": turns})


def _from_node(message: JsonObject) -> JsonObject | None:
    """Convert a message of a ChatGPT export; return None if it is hidden or no turn."""
    author, body, about = (
        value if isinstance(value := message.get(key), dict) else {}
        for key in ("author", "content", "metadata")
    )
    hidden = about.get("is_visually_hidden_from_conversation")
    parts = body.get("parts")
    if hidden or parts == [""] or body.get("content_type") in _ASIDE_TYPES:
        return None
    if author.get("role") == "tool" or message.get("recipient") not in (None, "all"):
        raise BadRowError("a ChatGPT conversation with tools", "its export does not declare them")
    if isinstance(parts, list):
        parts = [
            part | {"type": part.get("content_type")}
            if isinstance(part, dict)
            else {"type": "text", "text": part}
            for part in parts
        ]
    other = {key: value for key, value in message.items() if key not in _NODE_KEYS}
    weight = message.get("weight") if author.get("role") == "assistant" else None
    return other | {"role": author.get("role"), "content": parts, "weight": weight}


# What an export of Claude has beside a conversation's messages, and beside a message's parts.
_CLAUDE_KEYS = ("uuid", "name", "summary", "created_at", "updated_at", "account", "chat_messages")
_TURN_KEYS = (
    *("uuid", "sender", "text", "content", "created_at", "updated_at", "parent_message_uuid"),
    *("index", "truncated"),
)


# The key of the messages in a Claude export.
CLAUDE = "chat_messages"


def as_sharegpt(content: JsonObject) -> JsonObject:
    """Return a conversation of a Claude export in ShareGPT's layout; other rows unchanged."""
    messages = content.get(CLAUDE)
    if not isinstance(messages, list):
        return content
    turns = [
        _from_claude(each, f"message {number}") if isinstance(each, dict) else each
        for number, each in enumerate(messages, start=1)
    ]
    others = {key: value for key, value in content.items() if key not in _CLAUDE_KEYS}
    return others | {"conversations": turns}


def _from_claude(message: JsonObject, where: str) -> JsonObject:
    parts = message.get("content") or [{"type": "text", "text": message.get("text")}]
    content, thoughts = [], []
    for part in parts if isinstance(parts, list) else [parts]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("tool_use", "tool_result"):
            raise BadRowError(
                "a Claude conversation with tools", f"{where}: its export has no tools"
            )
        if kind == "thinking":
            thoughts += [str(part.get("thinking", ""))]
        else:
            text = {"type": kind, "text": part.get("text")} if isinstance(part, dict) else part
            content += [text]
    others = {key: value for key, value in message.items() if key not in _TURN_KEYS}
    thinking = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return others | thinking | {"from": message.get("sender"), "value": content}


def from_gemini(row: int, content: JsonObject) -> Conversation:
    """Convert Gemini's `contents`, whose messages have `parts`, and its system instruction."""
    entries = content["contents"]
    if not isinstance(entries, list):
        raise BadRowError("'contents' is not a list", json_type(entries))
    messages = [
        message
        for number, entry in enumerate(entries, start=1)
        for message in (
            _from_gemini(entry, f"message {number}") if isinstance(entry, dict) else [entry]
        )
    ]
    tools = _gemini_tools(content.get("tools"))
    system = next((content[key] for key in GEMINI_SYSTEM if content.get(key) is not None), None)
    return parse_conversation(
        row, {**content, "system": system, "tools": tools, "messages": messages}
    )


GEMINI_SYSTEM = ("systemInstruction", "system_instruction", "system")


def _from_gemini(entry: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Convert `{"role": …, "parts": [{"text": …}]}`; results become messages of their own.

    A part may also be thinking or a call.
    """
    message = {key: value for key, value in entry.items() if key != "parts"}
    parts = entry.get("parts", entry.get("content"))
    parts = [parts] if isinstance(parts, dict) else parts
    if not isinstance(parts, list):
        return [message | {"content": parts}]
    content, thoughts, calls, results = [], [], [], []
    for part in parts:
        named = (
            {normalized_key(key): value for key, value in part.items()} if _is_object(part) else {}
        )
        if (call := named.get("functioncall")) is not None:
            calls += [_gemini_call(call, where)]
        elif (result := named.get("functionresponse")) is not None:
            results += [_gemini_result(result, where)]
        elif named.get("thought"):
            thoughts += [str(named.get("text", ""))]
        else:
            content += [_without_thought(part)]
    if results and not content:
        return results
    message["content"] = content
    if calls:
        message["tool_calls"] = calls
    if thinking := "".join(thoughts):
        message["reasoning_content"] = thinking
    return [*results, message]


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _gemini_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise BadRowError("a functionCall is not an object", f"{where}: {json_type(call)}")
    function = {"name": call.get("name"), "arguments": call.get("args") or {}}
    others = {key: call[key] for key in call.keys() - {"name", "args"}}
    return {"type": "function", "function": function, **others}


def _gemini_result(result: Any, where: str) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise BadRowError("a functionResponse is not an object", f"{where}: {json_type(result)}")
    response = result.get("response")
    content = response if isinstance(response, str) else to_json(response)
    others = {key: result[key] for key in result.keys() - {"response", "id"}}
    return {"role": "tool", "content": content, "tool_call_id": result.get("id"), **others}


def _gemini_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools, with Gemini's lists of functions as the tools that templates expect."""
    expected = []
    for tool in parse_tools(tools):
        listed = next(
            (tool[key] for key in tool if normalized_key(key) == "functiondeclarations"), None
        )
        functions = parse_tools(listed)
        expected += [{"type": "function", "function": each} for each in functions] or [tool]
    return expected


def _without_thought(part: Any) -> Any:
    return {k: v for k, v in part.items() if k != "thought"} if isinstance(part, dict) else part
