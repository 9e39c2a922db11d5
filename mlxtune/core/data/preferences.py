"""Preference rows: two answers to compare, or one answer with a label.

keys                                        a row of
prompt, chosen, rejected                    texts, or lists of messages
chosen, rejected                            two conversations, whose common messages are the prompt
conversations, chosen, rejected             LLaMA-Factory's files
input, preferred_output, …                  OpenAI's and Azure's fine-tuning APIs
prompt, completion, label                   an answer, good if the label is true or 1
messages, label; conversations, label       a labelled conversation that ends with the answer
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from mlxtune.core.data.conversation import (
    CHOSEN,
    DESIRABLE,
    REJECTED,
    UNDESIRABLE,
    Conversation,
    Pair,
    as_context,
    parse_conversation,
    role_of,
)
from mlxtune.core.data.problems import BadRow, json_type
from mlxtune.errors import shorten

JsonObject = Mapping[str, Any]
_VERDICTS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
# Converts an entry of a conversation to a message; the text names the entry's place in errors.
ToMessage = Callable[[Any, str], Any]


def label_of(content: JsonObject) -> Any:
    """Return a row's label; 1, 0 and the texts true, false, yes and no become booleans."""
    label = content.get("label")
    if isinstance(label, str | int | float):
        return _VERDICTS.get(f"{label:g}" if label in (0, 1) else str(label).strip().lower(), label)
    return label


def read_pair(row: int, content: JsonObject, to_message: ToMessage) -> Pair:
    """Convert a row with `chosen` and `rejected`. Raises BadRow."""
    chosen, rejected = (_side(content[key], key, to_message) for key in ("chosen", "rejected"))
    prompt = _prompt(content, to_message)
    if prompt is None:
        prompt = _common(chosen, rejected)
        if isinstance(content["chosen"], str):
            raise BadRow("no prompt", "name its key with --field prompt=KEY")
        if not prompt:
            raise BadRow("sides whose prompts differ", "they have no first message in common")
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif any(side and role_of(side[0]) in ("system", "user") for side in (chosen, rejected)):
        raise BadRow("sides that do not begin with the prompt", "omit 'prompt', or add it to both")
    return _pair(row, content, prompt, chosen, rejected)


def read_preferred(row: int, content: JsonObject) -> Pair:
    """Convert `input`, `preferred_output` and `non_preferred_output`. Raises BadRow."""
    given = content["input"]
    given = given if isinstance(given, dict) else {"messages": given}
    messages = given.get("messages")
    if not isinstance(messages, list):
        raise BadRow("'input' has no list of messages", json_type(messages))
    sides = (
        _side(content[f"{kind}preferred_output"], f"{kind}preferred_output") for kind in _KINDS
    )
    return _pair(row, given, messages, *sides)


_KINDS = ("", "non_")


def read_labelled(content: JsonObject, conversation: Conversation) -> Conversation:
    """Return a conversation in the role that its label gives. Only the last answer carries loss."""
    label = label_of(content)
    if not isinstance(label, bool):
        label = shorten(str(content.get("label")))
        raise BadRow("'label' is neither true nor false", f"{label}: write true, false, 1 or 0")
    messages = list(conversation.messages)
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    for i in answers[:-1]:
        messages[i] = replace(messages[i], trained=False)
    if not messages[answers[-1]].trained:
        raise BadRow("the last assistant turn has weight 0")
    role = DESIRABLE if label else UNDESIRABLE
    return replace(conversation, messages=tuple(messages), role=role)


def _pair(
    row: int, content: JsonObject, prompt: list[Any], chosen: list[Any], rejected: list[Any]
) -> Pair:
    if not prompt:
        raise BadRow("no prompt", "give the messages before 'chosen' and 'rejected'")
    if chosen == rejected:
        raise BadRow("chosen and rejected are the same")
    context = as_context(prompt)

    def side(name: str, messages: list[Any], role: int) -> Conversation:
        try:
            parsed = parse_conversation(row, {**content, "messages": context + messages})
        except BadRow as problem:
            raise BadRow(problem.kind, f"{name}: {problem.detail}".rstrip(": ")) from problem
        return replace(parsed, role=role)

    return Pair(side("chosen", chosen, CHOSEN), side("rejected", rejected, REJECTED))


def _prompt(content: JsonObject, to_message: ToMessage) -> list[Any] | None:
    for key in ("prompt", "conversations", "messages"):
        if (value := content.get(key)) is not None:
            return _messages(value, key, "user", to_message)
    return None


def _side(value: Any, key: str, to_message: ToMessage = lambda entry, where: entry) -> list[Any]:
    messages = _messages(value, key, "assistant", to_message)
    if not messages:
        raise BadRow("empty answer", key)
    return messages


def _messages(value: Any, key: str, role: str, to_message: ToMessage) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    entries = [value] if isinstance(value, dict) else value
    if not isinstance(entries, list):
        raise BadRow(f"'{key}' is neither text nor messages", json_type(value))
    return [to_message(entry, f"{key}, message {i}") for i, entry in enumerate(entries, start=1)]


def _common(chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """Return the messages that both sides start with; each side keeps at least one more."""
    both = zip(chosen, rejected, strict=False)
    same = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
    shortest = min(len(chosen), len(rejected))
    return same[: shortest - 1] if len(same) == shortest else same
