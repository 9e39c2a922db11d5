"""Converts rows of each format to conversations, documents and pairs; see formats.py.

Preference rows have two answers to compare, or one answer with a label:

keys                                        a row of
prompt, chosen, rejected                    texts, or lists of messages
chosen, rejected                            two conversations, whose common messages are the prompt
conversations, chosen, rejected             LLaMA-Factory's files
input, preferred_output, …                  OpenAI's and Azure's fine-tuning APIs
prompt, completion, label                   an answer, good if the label is true or 1
messages, label; conversations, label       a labelled conversation that ends with the answer
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from mlxtune.core.data.conversation import (
    CHOSEN,
    DESIRABLE,
    REJECTED,
    UNDESIRABLE,
    Conversation,
    Document,
    Pair,
)
from mlxtune.core.data.problems import (
    MARK_REASONS,
    BadRowError,
    json_text,
    json_type,
    parse_row_json,
)
from mlxtune.core.data.sources.keys import field_option, is_mark
from mlxtune.core.data.sources.messages import (
    ROLES,
    SHAREGPT_ROLES,
    parse_conversation,
    role_of,
    several_texts,
    unknown_role,
)
from mlxtune.core.data.sources.tool_calls import parse_tools

JsonObject = Mapping[str, Any]
# Other tools' keys for a prompt, for an answer, and for texts that belong to a prompt.
PROMPT_KEYS = ("instruction", "question", "query", "prompt", "input")
ANSWER_KEYS = ("output", "response", "answer", "completion")
CONTEXT_KEYS = ("context", "passage", "document", "choices")
# Converts an entry of a conversation to a message; the text names the entry's place in errors.
ToMessage = Callable[[Any, str], Any]
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def from_prompt(row: int, content: JsonObject) -> Conversation:
    """Convert two texts as mlx-lm's CompletionsDataset does, or two lists as TRL does."""
    prompt = _turns(content, "prompt", "user")
    completion = _turns(content, "completion", "assistant")
    if not any(role_of(message) == "assistant" for message in completion):
        raise BadRowError("no assistant turn", "in 'completion'")
    return parse_conversation(row, {**content, "messages": as_context(prompt) + completion})


def _turns(content: JsonObject, key: str, role: str) -> list[Any]:
    value = content[key]
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        if len(value) > 1:
            raise several_texts(value, f"'{key}'")
        (value,) = value
    value = _number_as_text(value)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        remedy = ": write it in quotes" * isinstance(value, bool)
        problem = f"'{key}' is neither text nor a list of messages"
        raise BadRowError(problem, f"{json_type(value)}{remedy}")
    return value


def _number_as_text(value: Any) -> Any:
    """Return the text of a number, which a typed column holds; other values unchanged."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return json_text(value) if is_number else value


def from_alpaca(row: int, content: JsonObject) -> Conversation:
    r"""Convert as LLaMA-Factory does: `history`, then a user turn of `instruction\ninput`."""
    keys = ("instruction", "input", "output")
    *instruction, output = (_number_as_text(content.get(key)) for key in keys)
    history = parsed_list(content, "history")
    for name, text in zip(("instruction", "input"), instruction, strict=True):
        if not isinstance(text, str | None):
            raise BadRowError(f"'{name}' is not text", json_type(text))
    if isinstance(output, list) and len(output) > 1:
        raise several_texts(output, "'output'")
    if not isinstance(history := history or [], list):
        raise BadRowError("'history' is not a list of pairs", json_type(history))
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRowError("'history' is not a list of pairs", f"entry {number}")
    pairs = [*history, ("\n".join(filter(None, instruction)), output)]
    messages = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return parse_conversation(row, {**content, "messages": messages})


def from_sharegpt(row: int, content: JsonObject) -> Conversation:
    entries = content["conversations"]
    if not isinstance(entries, list):
        raise BadRowError("'conversations' is not a list", json_type(entries))
    messages = [
        _from_entry(entry, f"message {number}") if isinstance(entry, dict) else entry
        for number, entry in enumerate(entries, start=1)
    ]
    tools = [
        # LLaMA-Factory's files contain bare functions, which LLaMA-Factory wraps for the models.
        {"type": "function", "function": tool} if "name" in tool and "type" not in tool else tool
        for tool in parse_tools(content.get("tools"))
    ]
    return parse_conversation(row, {**content, "tools": tools, "messages": messages})


def _from_entry(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert `{"from": …, "value": …}`; keep other keys, as they may hold `weight` or thinking."""
    message = {key: value for key, value in entry.items() if key not in ("from", "value")}
    name, value = entry.get("from"), entry.get("value")
    name = entry.get("role") if name is None else name
    value = entry.get("content") if value is None else value
    if isinstance(name, str):
        name = SHAREGPT_ROLES.get(name.lower(), name)
        if role_of({"role": name}) not in ROLES:
            raise unknown_role(name.lower(), (*SHAREGPT_ROLES, "function_call"), where)
    return message | {"role": name, "content": value}


def from_text(row: int, content: JsonObject) -> Document:
    text = content["text"]
    if not isinstance(text, str):
        raise BadRowError("'text' is not text", json_type(text))
    if not text or text.isspace():
        raise BadRowError("empty text")
    return Document(row, text)


def parsed_list(content: JsonObject, key: str) -> Any:
    """Return a value, parsed if it is a list as JSON text, which tables and some files hold."""
    value = content.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        kind = f"'{key}' is text that is not JSON"
        return parse_row_json(value.encode("utf-8", "surrogatepass"), kind)
    return value


def as_context(messages: Iterable[Any]) -> list[Any]:
    """Return messages of which no assistant turn is trained on."""
    return [
        {key: value for key, value in one.items() if not is_mark(key)} | {"weight": 0}
        if role_of(one) == "assistant"
        else one
        for one in messages
    ]


# Preferences


def from_pair(row: int, content: JsonObject) -> Pair:
    """Convert a row with `chosen` and `rejected`. Raises BadRowError."""
    prompt = _prompt(content)
    chosen, rejected = (
        _answer_messages(_dialogue(text) if prompt is None else text, key, _to_message)
        for key in ("chosen", "rejected")
        for text in [content[key]]
    )
    if prompt is None:
        prompt = _common(chosen, rejected)
        if isinstance(content["chosen"], str) and len(chosen) == 1:
            raise BadRowError("no prompt", _advice_on_prompt(content))
        if not prompt:
            raise BadRowError(
                "answers whose prompts differ", "they have no first message in common"
            )
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif any(answer and role_of(answer[0]) in ("system", "user") for answer in (chosen, rejected)):
        raise BadRowError(
            "answers that do not begin with the prompt", "omit 'prompt', or add it to both"
        )
    return _pair(row, content, prompt, chosen, rejected)


def _advice_on_prompt(content: JsonObject) -> str:
    texts = [key for key, value in content.items() if value and isinstance(value, str)]
    others = [key for key in texts if key not in ("chosen", "rejected")]
    if not others:
        return "write it under 'prompt'"
    return f"name its key with {field_option('prompt', others[0] if len(others) == 1 else 'KEY')}"


def _dialogue(value: Any) -> Any:
    """Return the messages of a text such as Anthropic's hh-rlhf has; other values unchanged."""
    before, *parts = _SPEAKER.split(value) if isinstance(value, str) else ("",)
    if len(parts) < 4 or before.strip():
        return value
    return [
        {"role": "user" if speaker == "Human" else "assistant", "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def from_preferred(row: int, content: JsonObject) -> Pair:
    """Convert `input`, `preferred_output` and `non_preferred_output`. Raises BadRowError."""
    prompt = content["input"]
    prompt = prompt if isinstance(prompt, dict) else {"messages": prompt}
    messages = prompt.get("messages")
    if not isinstance(messages, list):
        raise BadRowError("'input' has no list of messages", json_type(messages))
    answers = (
        _answer_messages(content[f"{kind}preferred_output"], f"{kind}preferred_output")
        for kind in _KINDS
    )
    return _pair(row, prompt, messages, *answers)


_KINDS = ("", "non_")


def labeled(content: JsonObject, label: Any, conversation: Conversation) -> Conversation:
    """Return a conversation in the role that its label gives. Only the last answer carries loss."""
    if not isinstance(label, bool):
        written = json_text(content.get("label"))
        raise BadRowError(
            "'label' is neither true nor false", f"{written}: write true, false, 1 or 0"
        )
    messages = list(conversation.messages)
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    for i in answers[:-1]:
        messages[i] = replace(messages[i], trained=False)
    if not messages[answers[-1]].trained:
        raise BadRowError(MARK_REASONS["last turn"])
    role = DESIRABLE if label else UNDESIRABLE
    return replace(conversation, messages=tuple(messages), role=role)


def _pair(
    row: int, content: JsonObject, prompt: list[Any], chosen: list[Any], rejected: list[Any]
) -> Pair:
    if not prompt:
        raise BadRowError("no prompt", "add the messages before 'chosen' and 'rejected'")
    if chosen == rejected:
        raise BadRowError("chosen and rejected are the same")
    context = as_context(prompt)

    def answer(name: str, messages: list[Any], role: int) -> Conversation:
        try:
            parsed = parse_conversation(row, {**content, "messages": context + messages})
        except BadRowError as problem:
            raise BadRowError(problem.kind, f"{name}: {problem.detail}".rstrip(": ")) from problem
        return replace(parsed, role=role)

    return Pair(answer("chosen", chosen, CHOSEN), answer("rejected", rejected, REJECTED))


def _prompt(content: JsonObject) -> list[Any] | None:
    for key in ("prompt", "conversations", "messages"):
        if (value := content.get(key)) is not None:
            return _messages(value, key, "user", _to_message)
    return None


def _answer_messages(
    value: Any, key: str, to_message: ToMessage = lambda entry, where: entry
) -> list[Any]:
    messages = _messages(value, key, "assistant", to_message)
    if not messages:
        raise BadRowError("empty answer", key)
    return messages


def _messages(value: Any, key: str, role: str, to_message: ToMessage) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    entries = [value] if isinstance(value, dict) else value
    if not isinstance(entries, list):
        raise BadRowError(f"'{key}' is neither text nor messages", json_type(value))
    return [to_message(entry, f"{key}, message {i}") for i, entry in enumerate(entries, start=1)]


def _common(chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """Return the messages that both answers start with; each answer keeps at least one more."""
    both = zip(chosen, rejected, strict=False)
    same = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
    shortest = min(len(chosen), len(rejected))
    return same[: shortest - 1] if len(same) == shortest else same


def _to_message(entry: Any, where: str) -> Any:
    is_entry = isinstance(entry, dict) and "role" not in entry and "from" in entry
    return _from_entry(entry, where) if is_entry else entry
