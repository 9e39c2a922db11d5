r"""The prompt of an answer: exactly the tokens that training puts before it.

tokens           <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello <|im_end|> \n
assistant_mask         0        0  0  0      0      0       0           0      0   1       1      0
prompt           ------------------------------------------------------------------
answer                                                                           -----
end                                                                                    ----------
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxtune.config.objective_config import REWARD_OBJECTIVES
from mlxtune.core.data.conversation import (
    ANSWER,
    CHOSEN,
    DESIRABLE,
    UNDESIRABLE,
    Conversation,
    Document,
    Message,
    Row,
)
from mlxtune.core.data.encode import Encoder, Example
from mlxtune.core.data.encoded_file import last_stretch
from mlxtune.core.data.problems import (
    BadRowError,
    RowTally,
    SkippedRows,
    json_type,
    parse_row_json,
    where,
)
from mlxtune.core.data.sources.messages import parse_conversation, role_of, turn_marks
from mlxtune.core.data.sources.recognition import read_with_objects
from mlxtune.core.data.text_stream import text_of
from mlxtune.errors import DataError

# A placeholder for the answer; the prompt does not depend on it.
_ANSWER = "The answer."
# The maximum length of a prompt in bytes, usually half a million tokens. At one token per byte,
# encoding takes 0.7 GB.
MAX_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Prompt:
    """The tokens before an answer, and how the template ends the answer.

    The end is the token `end`, or the text `end_text` if it is not a single token.
    """

    ids: tuple[int, ...]
    end: int | None
    end_text: str = ""


@dataclass(frozen=True)
class LastTurn:
    """The last turn of a row: its prompt, and the tokens of its answer without the end token.

    If the end is text, the answer includes it, as tokens may cross the end's edge.
    """

    prompt: Prompt
    answer: tuple[int, ...]


@dataclass(frozen=True)
class PromptRow:
    """The prompt of a row: its messages, and the answer to compare with, or None.

    `row` is the row as it is in the file `path`, and `number` its number there. `file` is the
    file's name in records, if that is not its path.
    """

    messages: list[dict[str, Any]]
    answer: str | None
    row: Mapping[str, Any]
    path: Path
    number: int
    file: str = ""

    @property
    def place(self) -> str:
        """The row's file and line."""
        return where(self.path, self.number, self.file)

    @property
    def prompt(self) -> str:
        """The text of the last user turn."""
        texts = (each["content"] for each in reversed(self.messages) if each["role"] == "user")
        return str(next(texts, ""))


def read_prompts(
    path: Path,
    skipped: SkippedRows,
    *,
    format: str = "auto",
    fields: Mapping[str, str] | None = None,
) -> Iterator[PromptRow]:
    """Yield the prompt of each good row of a file, and add bad rows to `skipped`.

    A row has any format of `sft` but text, or only a `prompt`; other keys have any meaning. The
    answer is the last turn, if that is the assistant's. Raises DataError as `read_rows` does.
    """
    for row, content in read_with_objects(
        path, skipped, format=format, fields=fields, objective=REWARD_OBJECTIVES[0]
    ):
        assert isinstance(row, Conversation)
        messages, answer = [{**each.fields} for each in row.messages], None
        if (last := row.messages[-1]).role == "assistant":
            messages.pop()
            answer = None if last.tool_calls else last.content
        yield PromptRow(messages, answer, content, path, row.row)


def answered(rows: Iterable[Row], skipped: SkippedRows) -> Iterator[Row]:
    """Yield prompts' rows for encoding: with an answer, and with keys of any meaning.

    The numbers of rows without an answer, which get a placeholder, are added to `skipped`.
    """
    for row in rows:
        if not isinstance(row, Conversation):
            yield row
            continue
        messages = row.messages
        if messages[-1].role != "assistant":
            skipped.unanswered.add(row.row)
            fields = {"role": "assistant", "content": _ANSWER}
            messages = (*messages, Message("assistant", _ANSWER, fields=fields))
        yield replace(row, messages=messages, unread=())


def prompt_of(encoder: Encoder, content: Mapping[str, Any], where: str) -> Prompt:
    """Return the prompt for the next answer of a conversation, as training would encode it.

    `content` has `messages`, and may have `tools`, like a row of data; `where` names the source in
    errors. `encoder` must encode the last turn only.

    Raises DataError if the conversation is not valid, or the template refuses it.
    """
    messages = content.get("messages")
    try:
        if not isinstance(messages, list):
            raise BadRowError("'messages' is not a list", json_type(messages))
        if not messages:
            raise BadRowError("there is no message")
        if role_of(messages[-1]) == "assistant":
            raise BadRowError("the last message is the assistant's: end with the message to answer")
        answered = [*messages, {"role": "assistant", "content": _ANSWER}]
        row = {key: content[key] for key in content.keys() - turn_marks(content).keys()}
        parsed = parse_conversation(1, {**row, "messages": answered})
        return _before_answer(encoder, parsed)
    except BadRowError as problem:
        raise DataError(f"{where}: {problem}") from problem


def text_prompt(encoder: Encoder, text: str, where: str) -> Prompt:
    """Return plain text as a prompt to complete, encoded as training encodes plain text.

    Raises DataError if the text cannot be encoded.
    """
    skipped = SkippedRows(Path())
    encoded = encoder.encode([Document(1, text)], skipped, RowTally())
    rows = [row for rows in encoded for row in rows]
    for problem in skipped.problems.values():
        raise DataError(f"{where}: {problem}")
    (((example,)),) = rows
    *before, end = example.tokens.tolist()
    return Prompt(tuple(before), end)


def _before_answer(encoder: Encoder, conversation: Conversation) -> Prompt:
    skipped = SkippedRows(Path())
    rows = [row for rows in encoder.encode([conversation], skipped, RowTally()) for row in rows]
    for problem in skipped.problems.values():
        raise problem
    ((*_, example),) = rows
    start, end = last_answer(example)
    before, last = tuple(example.tokens[:start].tolist()), int(example.tokens[end - 1])
    if last in encoder.tokenizer.control_ids:
        return Prompt(before, last)
    written = encoder.template(conversation).texts[-1]
    return Prompt(before, None, written.text[slice(*written.spans[-1])].rpartition(_ANSWER)[2])


def last_answer(example: Example) -> tuple[int, int]:
    """Return the [start, end) range of the last run of tokens that carry loss."""
    return last_stretch(example.assistant_mask)


# The roles of answers that a model is asked to give: in a pair, the chosen answer.
_ANSWER_ROLES = (ANSWER, CHOSEN, DESIRABLE, UNDESIRABLE)


@dataclass(frozen=True)
class TurnEnds:
    """What may end a turn: one of the `tokens`, or `text` if the tokenizer has no token for it.

    `token_bytes` returns the bytes of tokens.
    """

    tokens: frozenset[int]
    text: str = ""
    token_bytes: Callable[[Sequence[int]], Sequence[bytes]] = lambda ids: ()


def last_turn(row: Sequence[Example], ends: TurnEnds) -> LastTurn | None:
    """Return the last supervised turn of a row.

    Return None if the turn has no prompt, as in plain text, or its end was truncated.
    """
    example = [each for each in row if each.role in _ANSWER_ROLES][-1]
    tokens = example.tokens
    start, end = last_answer(example)
    last = int(tokens[end - 1])
    before = tuple(tokens[:start].tolist())
    if start < 2:
        return None
    if last in ends.tokens:
        return LastTurn(Prompt(before, last), tuple(tokens[start : end - 1].tolist()))
    answer = tuple(tokens[start:end].tolist())
    if not ends.text or not text_of(ends.token_bytes(answer)).endswith(ends.text):
        return None
    return LastTurn(Prompt(before, None, ends.text), answer)


def check_size(content: bytes, where: str) -> None:
    """Raise DataError if a prompt has more bytes than any model reads."""
    if len(content) > MAX_BYTES:
        raise DataError(f"{where} is larger than {MAX_BYTES >> 20} MiB: pass one conversation")


def parse_content(content: bytes, where: str) -> dict[str, Any]:
    """Return the conversation that JSON contains: a list of messages, or an object with `messages`.

    Raises DataError.
    """
    check_size(content, where)
    try:
        value = parse_row_json(content.removeprefix(codecs.BOM_UTF8))
    except BadRowError as problem:
        raise DataError(f"{where}: {problem}: pass one list of messages") from problem
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict):
        raise DataError(f"{where} is {json_type(value)}: pass a list of messages")
    return value
