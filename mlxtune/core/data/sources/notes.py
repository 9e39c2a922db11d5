"""Likely faults in the texts and keys of a row, each with its kind and a detail.

Notes report only what is almost never intended, so that every note deserves attention.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from mlxtune.core.data.conversation import (
    UNDESIRABLE,
    Conversation,
    Document,
    Message,
    Pair,
    Row,
    function_name,
)
from mlxtune.core.data.problems import (
    EMPTY_PROMPT,
    EMPTY_VALUE,
    MOJIBAKE,
    REFUSAL,
    RENDERED_CHAT,
    REPLACED,
    TWO_THOUGHTS,
    UNANSWERED,
    UNCLOSED_THINKING,
    UNDECLARED_TOOL,
    UNKNOWN_TAGS,
    UNMATCHED_RESULT,
    UNREAD_METADATA,
    unread_key,
)
from mlxtune.core.data.sources.keys import (
    EMPTY,
    Note,
    field_option,
    is_metadata,
    kind_of_text,
    quoted,
    reads_variable,
    unread_in_message,
    unread_in_row,
)
from mlxtune.core.data.sources.messages import call_ids, result_id, thinking_and_answer
from mlxtune.errors import shorten

# The beginnings of refusals, in lower case and with straight apostrophes.
_INABILITY = r"[^.!?]{0,100}\b(?:cannot|can't|unable|not able|don't|do not|have no|not capable)\b"
_REFUSAL = re.compile(
    "|".join(
        (
            rf"(?:as an ai|as a (?:large )?language model)\b{_INABILITY}",
            rf"i(?:'m| am) (?:just |only )?an ai\b{_INABILITY}",
            r"(?:i(?:'m| am) sorry, but |sorry, )i (?:cannot|can't|am unable|am not able)",
            r"i(?:'m| am) (?:unable|not able) to (?:assist|help|fulfill|comply|provide)",
            r"i (?:cannot|can't) (?:assist|help|fulfill|comply|provide|engage)",
        )
    )
)
_OPENING_CHARS = 200
# UTF-8 that was read as Windows-1252: the first bytes of é, of quotes and dashes, of emoji, and
# of signs between U+00A0 and U+00BF.
_MOJIBAKE = re.compile(
    "Ã[\u0080-\u00bf\u0192\u02c6\u02dc\u2013-\u2026\u2030\u2039\u203a\u20ac\u2122]"
    "|â€[\u0080-\u00ff\u0152-\u2122]|ðŸ|Â[\u00a0-\u00bf]"
)
# The beginnings of turns in the templates of Qwen, Gemma, Llama, Mistral, Phi and gpt-oss, and in
# the plain texts of Alpaca and Guanaco.
_TURN = re.compile(
    r"\s*(?:(?:<s>|<bos>|<\|begin_of_text\|>)\s*)?(<\|im_start\|>|<start_of_turn>|<\|turn>"
    r"|<\|start_header_id\|>|\[INST\]|<\|user\|>|<\|system\|>|<\|start\|>"
    r"|### ?(?:Human|User|Instruction|System|Assistant):|Below is an instruction that describes"
    r"|(?:Human|USER|User):(?=.*^[ \t]*(?:Assistant|AI|Bot):|.*\bASSISTANT:))",
    re.DOTALL | re.MULTILINE,
)
# Tags of thinking that few templates write: <reasoning>, [THINK], <|begin_of_thought|>, ◁think▷.
_THOUGHT = r"[\w:]{0,20}(?:think|thought|reasoning|reflection|scratchpad|rationale)[\w:]{0,20}"
_TAGGED_THINKING = re.compile(
    rf"\s*(?!<think>)([<\[◁]\|?{_THOUGHT}\|?[>\]▷])(?=.*[<\[◁][|/]*{_THOUGHT}\|?[>\]▷])",
    re.IGNORECASE | re.DOTALL,
)
# What pandas, Python, SQL and spreadsheets write for a cell without a value.
_EMPTY_VALUES = ("nan", "NaN", "None", "NULL", "<NA>", "N/A", "#N/A")
_REPLACEMENT = "\ufffd"
_CONTEXT_CHARS = 12
# Longer control tokens do not occur in files.
_MAX_CONTROL_TOKEN_CHARS = 1000


def notes_on(row: Conversation | Document, text: str) -> Iterator[Note]:
    """Yield the kind and a detail of each problem; `text` is all the text of the row."""
    if _REPLACEMENT in text:
        yield REPLACED, _around(text, text.index(_REPLACEMENT))
    if match := _MOJIBAKE.search(text):
        yield MOJIBAKE, _around(text, match.start())
    if isinstance(row, Document):
        if match := _TURN.match(row.text):
            yield RENDERED_CHAT, match[1]
        return
    called: set[str] = set()
    for number, message in enumerate(row.messages, start=1):
        called.update(call_ids(message))
        result = result_id(message) if message.role == "tool" else None
        if called and result is not None and result not in called:
            yield UNMATCHED_RESULT, f"message {number}: {shorten(result)}"
        if message.role == "user" and not message.content.strip():
            yield EMPTY_PROMPT, f"message {number}"
        if message.role == "user" and (match := _TURN.match(message.content)):
            yield RENDERED_CHAT, f"message {number}: {match[1]}"
        if message.role == "assistant":
            yield from _on_answer(row, message, f"message {number}")
    if row.messages[-1].role != "assistant":
        yield UNANSWERED, f"message {len(row.messages)}"


def _on_answer(row: Conversation, message: Message, where: str) -> Iterator[Note]:
    beginning = message.content[:_OPENING_CHARS].replace("\u2019", "'").lower()
    good = message.trained and row.role != UNDESIRABLE
    if good and (match := _REFUSAL.search(beginning)):
        yield REFUSAL, f"{where}: {_around(message.content, match.start())}"
    if good and message.content.strip() in _EMPTY_VALUES:
        yield EMPTY_VALUE, f"{where}: {message.content.strip()}"
    if (
        good
        and message.content.lstrip().startswith("<think>")
        and "</think>" not in message.content
    ):
        yield UNCLOSED_THINKING, f"{where}: {_around(message.content, 0)}"
    thought = thinking_and_answer(message.content)[0]
    if thought and message.thinking and thought != message.thinking:
        yield TWO_THOUGHTS, f"{where}: {_around(message.thinking, 0)}"
    for call in message.tool_calls:
        name = function_name(call)
        if name is not None and not _is_declared(row, name):
            yield UNDECLARED_TOOL, f"{where}: {shorten(name)}"


def _thinking_tag(message: Message) -> str:
    """Return the rare tag that opens an answer's thinking, or empty text."""
    match = _TAGGED_THINKING.match(message.content) if message.role == "assistant" else None
    return match[1] if match else ""


def _is_declared(row: Conversation, name: str) -> bool:
    """Return whether a row lists a tool or, as in some files, names it in a system message."""
    if any(function_name(tool) == name for tool in row.tools):
        return True
    return any(name in message.content for message in row.messages if message.role == "system")


def _around(text: str, start: int) -> str:
    """Return the characters of `text` around `start`, up to the next NUL each way, quoted."""
    before = text[max(start - _CONTEXT_CHARS, 0) : start].rpartition("\0")[2]
    return shorten(before + text[start : start + 2 * _CONTEXT_CHARS].partition("\0")[0])


def unread_keys(
    content: Mapping[str, Any], read_keys: Collection[str], texts: Sequence[str]
) -> Iterator[Note]:
    """Yield a note for each key with a value that is not among the known keys."""
    unread = {
        key: content[key]
        for key in sorted(content.keys() - {*read_keys})
        if content[key] not in EMPTY
    }
    repeated = {
        key
        for key, value in unread.items()
        # A single word is more likely a label that stands in a text by chance.
        if isinstance(value, str) and len(value.split(maxsplit=1)) > 1
        if any(value.strip() in text for text in texts)
    }
    return unread_in_row(unread, repeated, lambda key: f"use {field_option('system', key)}")


def notes_on_keys(row: Row, template: str) -> dict[str, str]:
    """Return a note on each key of a row and its messages, and each tag, that is not read.

    `template` is the source of the model's own template, or empty.
    """
    notes: dict[str, str] = {}
    metadata = set()
    parts = row.answers if isinstance(row, Pair) else (row,)
    for kind, detail in chain.from_iterable(part.unread for part in parts):
        if kind == UNREAD_METADATA:
            metadata.add(detail)
        else:
            notes[kind] = detail
    for part in parts:
        if isinstance(part, Document):
            continue
        for name in part.options:
            if not reads_variable(template, name):
                notes[unread_key("the template's options", name)] = ""
        for number, message in enumerate(part.messages, start=1):
            if message.trained and (tag := _thinking_tag(message)) and tag not in template:
                notes.setdefault(UNKNOWN_TAGS, f"message {number}: {tag}")
            removed = (("a message", key) for key in message.removed)
            fields = {k: v for k, v in message.fields.items() if v not in EMPTY}
            unread = unread_in_message(message.role, fields.keys(), message.tool_calls, template)
            for level, key in chain(removed, unread):
                holds = kind_of_text(key, fields.get(key)) if level == "a message" else ""
                if is_metadata(key) and not holds:
                    metadata.add(key)
                    continue
                notes.setdefault(unread_key(level, key, holds), f"message {number}")
    if metadata:
        notes[UNREAD_METADATA] = quoted(metadata)
    return notes


class ControlTokens:
    """Finds control tokens in texts; the time hardly depends on the number of control tokens.

    A regular expression of all control tokens would take quadratic time to compile.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        # If one token starts with another, only the shorter is kept. So a text can start with at
        # most one of the remaining tokens, which comes right before the text in sorted order.
        self._tokens: list[str] = []
        for token in sorted(
            {token for token in tokens if 0 < len(token) <= _MAX_CONTROL_TOKEN_CHARS}
        ):
            if not self._tokens or not token.startswith(self._tokens[-1]):
                self._tokens.append(token)
        starts = sorted({token[:2] for token in self._tokens})
        self._starts = re.compile("|".join(map(re.escape, starts)) or "(?!)")
        self._longest = max(map(len, self._tokens), default=0)

    def search(self, text: str) -> str | None:
        """Return the first control token in a text, or None."""
        at = 0
        while start := self._starts.search(text, at):
            at = start.start()
            rest = text[at : at + self._longest]
            before = bisect_right(self._tokens, rest) - 1
            if before >= 0 and rest.startswith(self._tokens[before]):
                return self._tokens[before]
            at += 1
        return None
