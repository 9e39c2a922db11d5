"""Notes on likely faults in the text of rows, by kind.

Only text that is hardly ever intended is noted, so that every note deserves a look.
"""

import re
from collections.abc import Iterator

from mlxtune.core.data.conversation import (
    UNDESIRABLE,
    Conversation,
    Document,
    Message,
    function_name,
)
from mlxtune.core.data.problems import (
    BAD_ARGUMENTS,
    EMPTY_PROMPT,
    EMPTY_VALUE,
    MOJIBAKE,
    REFUSAL,
    RENDERED_CHAT,
    REPLACED,
    UNCLOSED_THINKING,
    UNDECLARED_TOOL,
    UNREAD_KEY,
)
from mlxtune.errors import shorten

# The beginnings of refusals, in lower case and with straight apostrophes.
_CANNOT = r"[^.!?]{0,100}\b(?:cannot|can't|unable|not able|don't|do not|have no|not capable)\b"
_REFUSES = re.compile(
    "|".join(
        (
            rf"(?:as an ai|as a (?:large )?language model)\b{_CANNOT}",
            rf"i(?:'m| am) (?:just |only )?an ai\b{_CANNOT}",
            r"(?:i(?:'m| am) sorry, but |sorry, )i (?:cannot|can't|am unable|am not able)",
            r"i(?:'m| am) (?:unable|not able) to (?:assist|help|fulfill|comply|provide)",
            r"i (?:cannot|can't) (?:assist|help|fulfill|comply|provide|engage)",
        )
    )
)
_BEGINNING = 200
# UTF-8 that was read as Windows-1252: the first bytes of é, of quotes and dashes, of emoji, and
# of signs between U+00A0 and U+00BF.
_MOJIBAKE = re.compile(
    "Ã[\u0080-\u00bf\u0192\u02c6\u02dc\u2013-\u2026\u2030\u2039\u203a\u20ac\u2122]"
    "|â€[\u0080-\u00ff\u0152-\u2122]|ðŸ|Â[\u00a0-\u00bf]"
)
# The beginnings of turns in the templates of Qwen, Gemma, Llama, Mistral, Phi and gpt-oss, and in
# the plain texts of Alpaca and Guanaco.
_TURN = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>)?\s*(<\|im_start\|>|<start_of_turn>|<\|turn>"
    r"|<\|start_header_id\|>|\[INST\]|<\|user\|>|<\|system\|>|<\|start\|>"
    r"|### ?(?:Human|User|Instruction|System|Assistant):|Below is an instruction that describes)"
)
# What pandas, Python, SQL and spreadsheets write for a cell without a value.
_EMPTY_VALUES = ("nan", "NaN", "None", "NULL", "<NA>", "#N/A")
_REPLACEMENT = "\ufffd"
_AROUND = 12


def notes_on(row: Conversation | Document, text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and a detail of each problem; `text` is all the text of the row."""
    if _REPLACEMENT in text:
        yield REPLACED, _around(text, text.index(_REPLACEMENT))
    if found := _MOJIBAKE.search(text):
        yield MOJIBAKE, _around(text, found.start())
    if isinstance(row, Document):
        if found := _TURN.match(row.text):
            yield RENDERED_CHAT, found[1]
        return
    if row.unread:
        yield UNREAD_KEY, row.unread
    for position, message in enumerate(row.messages, start=1):
        if message.role == "user" and not message.content.strip():
            yield EMPTY_PROMPT, f"message {position}"
        if message.role == "user" and (found := _TURN.match(message.content)):
            yield RENDERED_CHAT, f"message {position}: {found[1]}"
        if message.role == "assistant":
            yield from _on_answer(row, message, f"message {position}")


def _on_answer(row: Conversation, message: Message, where: str) -> Iterator[tuple[str, str]]:
    beginning = message.content[:_BEGINNING].replace("\u2019", "'").lower()
    good = message.trained and row.role != UNDESIRABLE
    if good and (found := _REFUSES.search(beginning)):
        yield REFUSAL, f"{where}: {_around(message.content, found.start())}"
    if good and message.content.strip() in _EMPTY_VALUES:
        yield EMPTY_VALUE, f"{where}: {message.content.strip()}"
    if (
        good
        and message.content.lstrip().startswith("<think>")
        and "</think>" not in message.content
    ):
        yield UNCLOSED_THINKING, f"{where}: {_around(message.content, 0)}"
    for call in message.tool_calls:
        name = function_name(call)
        if name is not None and not _is_declared(row, name):
            yield UNDECLARED_TOOL, f"{where}: {shorten(name)}"
        function = call.get("function") or call
        if isinstance(arguments := function.get("arguments"), str):
            yield BAD_ARGUMENTS, f"{where}: {shorten(arguments)}"


def _is_declared(row: Conversation, name: str) -> bool:
    """Return whether a row lists a tool or, as in some files, names it in a system message."""
    if any(function_name(tool) == name for tool in row.tools):
        return True
    return any(name in message.content for message in row.messages if message.role == "system")


def _around(text: str, start: int) -> str:
    """Return the characters of `text` around `start`, up to the next NUL each way, quoted."""
    before = text[max(start - _AROUND, 0) : start].rpartition("\0")[2]
    return shorten(before + text[start : start + 2 * _AROUND].partition("\0")[0])
