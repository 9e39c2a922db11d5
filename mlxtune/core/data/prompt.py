r"""The prompt of an answer: exactly the tokens that training puts before it.

tokens           <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello <|im_end|> \n
assistant_mask         0        0  0  0      0      0       0           0      0   1       1      0
prompt           ------------------------------------------------------------------
answer                                                                           -----
end                                                                                    ----------
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.core.data.bad_rows import BadRow, SkippedRows, json_type
from mlxtune.core.data.conversation import Conversation, parse_conversation
from mlxtune.core.data.encode import Encoder, Example
from mlxtune.core.data.notes import Notes
from mlxtune.errors import DataError

# A placeholder for the answer; the prompt does not depend on it.
_ANSWER = "The answer."
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Prompt:
    """The tokens before an answer, and how the template ends the answer.

    That is the token `end`, or the text `end_text` if it is not a single token.
    """

    ids: tuple[int, ...]
    end: int | None
    end_text: str = ""


@dataclass(frozen=True)
class LastTurn:
    """The last turn of a row: its prompt, and the tokens of its answer without the end."""

    prompt: Prompt
    answer: tuple[int, ...]


def prompt_of(encoder: Encoder, content: Mapping[str, Any], where: str) -> Prompt:
    """Return the prompt for the next answer of a conversation, as training would encode it.

    `content` has `messages`, and may have `tools`, like a row of data; `where` is the source that
    errors name. `encoder` must encode the last turn only.

    Raises DataError if the conversation is not valid, or the template refuses it.
    """
    messages = content.get("messages")
    try:
        if not isinstance(messages, list):
            raise BadRow("'messages' is not a list", json_type(messages))
        if not messages:
            raise BadRow("there is no message")
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            raise BadRow("the last message is the assistant's: end with the message to answer")
        answered = [*messages, {"role": "assistant", "content": _ANSWER}]
        parsed = parse_conversation(1, {**content, "messages": answered})
        return _before_answer(encoder, parsed)
    except BadRow as problem:
        raise DataError(f"{where}: {problem}") from problem


def _before_answer(encoder: Encoder, conversation: Conversation) -> Prompt:
    skipped = SkippedRows(Path())
    rows = [row for rows in encoder.encode([conversation], skipped, Notes()) for row in rows]
    for problem in skipped.problems.values():
        raise problem
    ((_, examples),) = rows
    start, end = examples[-1].spans[-1]
    ids = examples[-1].ids
    before, last = tuple(ids[:start]), int(ids[end - 1])
    if last in encoder.tokenizer.control_ids:
        return Prompt(before, last)
    written = encoder.template(conversation).texts[-1]
    return Prompt(before, None, written.text[slice(*written.spans[-1])].rpartition(_ANSWER)[2])


def last_turn(row: Sequence[Example], ends: frozenset[int]) -> LastTurn | None:
    """Return the last supervised turn of a row; `ends` are the tokens that may end one.

    None if it has no prompt, as plain text has none, or its end was truncated.
    """
    tokens, mask = row[-1].tokens, row[-1].assistant_mask
    supervised = np.flatnonzero(mask)
    end = int(supervised[-1]) + 1
    start = end - int(np.argmin(mask[:end][::-1])) if not mask[:end].all() else 0
    last = int(tokens[end - 1])
    if start < 2 or last not in ends:
        return None
    prompt = Prompt(tuple(tokens[:start].tolist()), last)
    return LastTurn(prompt, tuple(tokens[start : end - 1].tolist()))


def parse_content(content: bytes, where: str) -> dict[str, Any]:
    """Return the conversation in JSON: a list of messages, or an object with `messages`.

    Raises DataError.
    """
    if len(content) > MAX_BYTES:
        raise DataError(f"{where}: is larger than {MAX_BYTES >> 20} MiB: give one conversation")
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not text in UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        if not content.removeprefix(codecs.BOM_UTF8).strip():
            raise DataError(f"{where}: is empty: give a list of messages") from error
        problem = f"is not valid JSON: {error.msg} at column {error.colno}"
        if error.msg == "Extra data":
            problem = "holds more than one JSON value: give one conversation"
        raise DataError(f"{where}:{error.lineno}: {problem}") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: is not valid JSON: nested too deeply or too long") from error
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict):
        raise DataError(f"{where}: is {json_type(value)}: give a list of messages")
    return value
