r"""What stands before an answer: the very tokens that training has put there.

tokens           <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello <|im_end|> \n
assistant_mask         0        0  0  0      0      0       0           0      0   1       1      0
prompt           ------------------------------------------------------------------
answer                                                                           -----
end                                                                                    ----------
"""

from __future__ import annotations

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

# Stands for the answer to come; what is before it does not depend on it.
_ANSWER = "The answer."
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Prompt:
    """The tokens that an answer is to follow, and what the template ends it with.

    That is the token `end`, or the text `end_text` where it is no token by itself.
    """

    ids: tuple[int, ...]
    end: int | None
    end_text: str = ""


@dataclass(frozen=True)
class LastTurn:
    """The last turn of a row: the prompt of it, and the tokens of its answer, the end apart."""

    prompt: Prompt
    answer: tuple[int, ...]


def prompt_of(encoder: Encoder, content: Mapping[str, Any], where: str) -> Prompt:
    """Return the prompt that training has before the next answer of a conversation.

    `content` has `messages`, and may have `tools`, as rows of data have them; `where` is what an
    error names. `encoder` is one of the last turn alone.

    Raises DataError where the conversation is none, or the template refuses it.
    """
    messages = content.get("messages")
    try:
        if not isinstance(messages, list):
            raise BadRow("'messages' is not a list", json_type(messages))
        if not messages:
            raise BadRow("there is no message")
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            raise BadRow("the last message is the assistant's: leave out what is asked for")
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
    """Return the last turn of a row that carries loss; `ends` are the tokens that may end one.

    None where it has no prompt, as a text by itself has none, or its end was cut off.
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
    """Return a conversation from the JSON of a list of messages, or of an object with `messages`.

    Raises DataError.
    """
    if len(content) > _MAX_BYTES:
        raise DataError(f"{where}: is larger than {_MAX_BYTES >> 20} MiB: give one conversation")
    try:
        text = content.decode("utf-8-sig")
        if not text.strip():
            raise DataError(f"{where}: is empty: give a list of messages")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not text in UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise DataError(
                f"{where}:{error.lineno}: holds more than one JSON value: give one conversation"
            ) from error
        raise DataError(
            f"{where}:{error.lineno}: is not valid JSON: {error.msg} at column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: is not valid JSON: nested too deeply or too long") from error
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict):
        raise DataError(f"{where}: is {json_type(value)}: give a list of messages")
    return value
