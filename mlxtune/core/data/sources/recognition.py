"""Reads rows in the format that their keys show.

Other tools' keys are renamed to ours if they have one reading; if not, the reason names the options
that read them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxtune.config.data_config import MESSAGE_NAMES, ROW_NAMES
from mlxtune.core.data.conversation import Conversation, Row
from mlxtune.core.data.problems import (
    DOUBTFUL_NULLS,
    TABLE_ENDINGS,
    BadRowError,
    SkippedRows,
    path_text,
    where,
)
from mlxtune.core.data.sources.advice import missing_keys
from mlxtune.core.data.sources.conversions import (
    ANSWER_KEYS,
    CONTEXT_KEYS,
    PROMPT_KEYS,
    JsonObject,
    parsed_list,
)
from mlxtune.core.data.sources.formats import (
    PAIRS,
    PROMPTS,
    Format,
    check_kind,
    formats_of,
    pair_keys,
    recognize,
    with_notes,
)
from mlxtune.core.data.sources.messages import ROLES, SHAREGPT_ROLES, role_of
from mlxtune.core.data.sources.nulls import may_be_filled
from mlxtune.core.data.sources.rows import has_nulls, read_unchanged
from mlxtune.core.data.sources.services import CLAUDE, as_sharegpt
from mlxtune.core.data.sources.text_rows import ROWS_REMEDY
from mlxtune.errors import DataError, shorten

# This many bad rows, if they exceed this fraction of all rows, mean a wrong file or format.
_MIN_BAD_ROWS, _MAX_BAD_FRACTION = 100_000, 0.99
_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_TOOLS = ("tools", "functions")
_SLACK_TIME = re.compile(r"\d{10}\.\d{6}")


@dataclass
class _Tally:
    """The numbers of a file's good and bad rows, and of the bad rows that are single messages."""

    path: Path
    skipped: SkippedRows
    good: int = 0
    bad: int = 0
    messages: int = 0

    def skip(self, row: int, content: JsonObject | BadRowError, problem: BadRowError) -> None:
        """Add a bad row. Raises DataError if nearly all of many rows are bad."""
        self.skipped.add(row, problem)
        self.bad += 1
        self.messages += isinstance(content, dict) and _is_message(content)
        rows = self.good + self.bad
        if self.bad % _MIN_BAD_ROWS == 0 and self.bad > _MAX_BAD_FRACTION * rows:
            raise DataError(
                f"{path_text(self.path)}: {self.bad:,} of its first {rows:,} rows cannot be used; "
                f"the first: {self.skipped.first()}"
            ) from problem

    def check_are_rows(self) -> None:
        """Raise DataError if all rows of the file are messages."""
        if self.messages and self.messages == self.bad and not self.good:
            wrap = 'wrap the messages of each conversation, as in [{"messages": […]}]'
            raise DataError(f"{path_text(self.path)} is a list of messages: {wrap}")


def read_rows(
    path: Path,
    skipped: SkippedRows,
    *,
    format: str = "auto",
    fields: Mapping[str, str] | None = None,
    objective: str = "sft",
    split_at: str | None = None,
) -> Iterator[Row]:
    """Yield the conversation of each good row as `read_with_objects` does."""
    rows = read_with_objects(
        path, skipped, format=format, fields=fields, objective=objective, split_at=split_at
    )
    return (row for row, _ in rows)


def read_with_objects(
    path: Path,
    skipped: SkippedRows,
    *,
    format: str = "auto",
    fields: Mapping[str, str] | None = None,
    objective: str = "sft",
    split_at: str | None = None,
) -> Iterator[tuple[Row, JsonObject]]:
    """Yield each good row as a conversation and as it is in the file; add others to `skipped`.

    With `auto`, the first row whose format is recognised decides the file's format. `fields` maps
    field names to the keys that the file uses for them, or to an empty key if it has no such field.
    A preference `objective` accepts only preference rows; `grpo` accepts rows without an answer;
    `sft` rejects pairs and answers labelled as bad. `split_at` splits files of plain text under the
    format `text`. Raises DataError if the file cannot be read, if it has rows of two formats under
    `auto`, if its rows are all messages or Slack's, or if nearly all of many rows are bad.
    """
    fields, formats = fields or {}, formats_of(objective)
    file_format = None if format == "auto" else formats[format]
    name, since = format, 0
    tally = _Tally(path, skipped)
    absent = {name: key for name, key in fields.items() if key}
    is_table = path.name.lower().endswith(TABLE_ENDINGS)
    rows = read_unchanged(path, texts=format == "text", split_at=split_at)
    for row, content, unchanged in rows:
        try:
            if isinstance(content, BadRowError):
                raise content
            assert isinstance(unchanged, dict)
            if format == "auto" and "text" not in fields and _is_of_slack(content):
                raise DataError(
                    f"{path_text(path)} is an export of Slack, which does not say who answers "
                    f"whom: {ROWS_REMEDY}, or use --format text to train on each message alone"
                )
            absent = {n: key for n, key in absent.items() if not _has_key(content, n, key)}
            renamed = _in_our_keys(content, fields, objective, name)
            if file_format is None or not file_format.fits(renamed):
                recognized = recognize(renamed, formats) if format == "auto" else None
                if recognized is None:
                    empty = _empty_key(renamed, formats)
                    raise missing_keys(
                        *(content, renamed, file_format, fields, formats),
                        empty=empty,
                        is_table=is_table,
                    )
                if file_format is not None:
                    raise DataError(
                        f"{where(path, row)}: is in the {recognized} format, but the file is in "
                        f"the {name} format from row {since} on: give each format its own file, or "
                        "name one with --format to skip the others"
                    )
                name, since, file_format = recognized, row, formats[recognized]
            try:
                converted = file_format.read(row, renamed)
            except BadRowError as problem:
                raise _in_their_words(problem, content, renamed) from problem
            if has_nulls(content) and may_be_filled(content):
                converted = with_notes(converted, ((DOUBTFUL_NULLS, ""),))
        except BadRowError as problem:
            tally.skip(row, content, problem)
        else:
            tally.good += 1
            converted = _without_placeholder(converted) if formats is PROMPTS else converted
            yield converted, unchanged
    skipped.absent = dict(absent)
    tally.check_are_rows()


def _has_key(content: JsonObject, name: str, key: str) -> bool:
    """Return whether a row, or one of its messages, has the key that stands for a field."""
    if name in ROW_NAMES:
        return key in content
    lists = (value for value in content.values() if isinstance(value, list | str))
    return any(
        key in each
        for value in lists
        for each in ([value] if isinstance(value, str) else value)
        if isinstance(each, dict | str)
    )


def _in_our_keys(
    content: JsonObject, fields: Mapping[str, str], objective: str, file_format: str
) -> JsonObject:
    """Return a row with our keys that fits an objective. Raises BadRowError."""
    formats = formats_of(objective)
    if _is_message(content) and "text" not in fields:
        raise BadRowError("a message, not a row", 'wrap all of a chat: {"messages": […]}')
    if formats is not PROMPTS:
        _check_is_row(content)
    renamed = _in_our_layout(_rename_row(content, fields), formats)
    if formats is PROMPTS:
        named = _with_our_keys(renamed, formats, file_format)
        if (answered := _with_answer(named)) is not named:
            return answered  # other keys have any meaning
    try:
        check_kind(renamed, objective)
    except BadRowError as problem:
        raise _in_their_words(problem, content, renamed) from problem
    return _with_our_keys(renamed, formats, file_format)


# The answer of rows without one, while they are converted.
_PLACEHOLDER = "\ue000no answer\ue000"


def _with_answer(content: JsonObject) -> JsonObject:
    """Return a row that ends with an answer: a placeholder if it ends with a question."""
    turn = {"role": "assistant", "content": _PLACEHOLDER}
    for key in ("messages", "conversations"):
        turns = content.get(key)
        if isinstance(turns, list) and turns and not _is_answer(turns[-1]):
            return {**content, key: [*turns, turn]}
        if turns is not None:
            return content
    if content.get("prompt") is None or content.get("completion") is not None:
        return content
    return {**content, "completion": _PLACEHOLDER}


def _is_answer(turn: Any) -> bool:
    if not isinstance(turn, dict):
        return False
    name = turn.get("from") or turn.get("role")
    role = SHAREGPT_ROLES.get(name.lower(), name) if isinstance(name, str) else name
    return role_of({"role": role}) == "assistant"


def _without_placeholder(row: Row) -> Row:
    if isinstance(row, Conversation) and row.messages[-1].content == _PLACEHOLDER:
        return replace(row, messages=row.messages[:-1])
    return row


def _check_is_row(content: JsonObject) -> None:
    """Raise BadRowError for a table's columns: lists or numbered cells, as many in each column."""
    first, *others = (*content.values(), None)
    if isinstance(first, dict) and len(others) > 1:
        numbered = bool(first) and all(map(str.isdigit, first))
        are_columns = numbered and all(
            isinstance(each, dict) and each.keys() == first.keys() for each in others[:-1]
        )
    else:
        are_columns = (
            isinstance(first, list)
            and len(first) > 1
            and len(others) > 1
            and all(isinstance(each, list) and len(each) == len(first) for each in others[:-1])
            and all(isinstance(cell, str) for each in content.values() for cell in each)
        )
    if are_columns:
        write = 'as pandas\' to_json(orient="records", lines=True) does'
        raise BadRowError("columns, not a row", f"write a row per line, {write}")


def _is_message(content: JsonObject) -> bool:
    """Return whether a row is a single message; rows may also have a role beside their texts."""
    if recognize(content) is not None:
        return False
    return role_of(content) in ROLES or {"from", "value"} <= content.keys()


def _is_of_slack(content: JsonObject) -> bool:
    """Return whether a row is a message of Slack's export, whose `ts` has microseconds."""
    time = content.get("ts")
    return content.get("type") == "message" and (
        isinstance(time, str) and _SLACK_TIME.fullmatch(time) is not None
    )


def _in_their_words(problem: BadRowError, content: JsonObject, renamed: JsonObject) -> BadRowError:
    """Return a problem with the keys of the file in place of our names for them."""
    kind, detail = problem.kind, problem.detail
    for name in renamed.keys() - content.keys():
        value = renamed[name]
        keys = [key for key in content.keys() - renamed.keys() if content[key] is value]
        if len(keys) == 1:
            kind, detail = (text.replace(f"'{name}'", shorten(keys[0])) for text in (kind, detail))
    return BadRowError(kind, detail)


def _with_our_keys(
    content: JsonObject, formats: Mapping[str, Format], file_format: str
) -> JsonObject:
    """Return a row of unknown format with our keys, if its keys have only one reading.

    Raises BadRowError for several readings; --field chooses one of them.
    """
    if formats is PAIRS:
        return _with_prompt(content)
    if recognize(content, formats) is not None:
        return content
    prompts, answers, contexts = (
        [key for key in keys if content.get(key) is not None]
        for keys in (PROMPT_KEYS, ANSWER_KEYS, CONTEXT_KEYS)
    )
    if not prompts or not answers:
        return content
    texts = [key for key in contexts if isinstance(content[key], str)]
    has_input = len(prompts) == 1 and bool(texts)
    alpaca = has_input or prompts in (["instruction"], ["instruction", "input"])
    asks, answers_as = ("instruction", "output") if alpaca else ("prompt", "completion")
    if len(answers) == 1 and not contexts and (alpaca or len(prompts) == 1):
        # An empty instruction leaves Alpaca's `input` and `output`.
        if [*prompts, *answers] == ["input", "output"] and not file_format.endswith("prompt"):
            asks, answers_as = "instruction", "output"
        return _rename(content, {asks: prompts[0], answers_as: answers[0]})
    readings = [f"--field {asks}={ask} --field {answers_as}={answers[0]}" for ask in prompts]
    readings += [f"--field {asks}={prompts[0]} --field {answers_as}={one}" for one in answers[1:]]
    use = " or ".join(readings[:2])
    if texts and alpaca:
        use = f"{readings[0]} --field input={texts[0]} or {readings[0]} without {texts[0]!r}"
    elif len(readings) == 1:
        left = repr(contexts[0])
        use = f"{readings[0]} without {left}, or write {left} into {prompts[0]!r}"
    kind = f"two readings of {', '.join(map(repr, (*prompts, *contexts, *answers)))}"
    raise BadRowError(kind, f"use {use}")


def _with_prompt(content: JsonObject) -> JsonObject:
    """Return a pair of texts whose prompt, followed by any `input`, is under the key `prompt`.

    Raises BadRowError for further text whose place is unknown.
    """
    candidates = [
        key for key in PROMPT_KEYS if isinstance(text := content.get(key), str) and text.strip()
    ]
    if not candidates or not all(
        isinstance(content.get(key), str) for key in ("chosen", "rejected")
    ):
        return content
    others = [key for key in CONTEXT_KEYS if content.get(key)]
    if others or len(candidates) > 2 or (len(candidates) == 2 and candidates[1] != "input"):
        keys = list(map(repr, (*candidates, *others)))
        both = f"{keys[0]} alone, or all together"
        raise BadRowError(
            f"two readings of {', '.join(keys)}", f"{both}: put the whole prompt into 'prompt'"
        )
    renamed = {key: value for key, value in content.items() if key not in candidates}
    return renamed | {"prompt": "\n".join(str(content[key]) for key in candidates)}


def _empty_key(content: JsonObject, formats: Mapping[str, Format]) -> str | None:
    """Return the key whose empty value alone makes a row's format unknown, if there is one."""
    for key in (name for name, value in content.items() if value is None):
        with suppress(BadRowError):
            if recognize(_with_our_keys({**content, key: ""}, formats, ""), formats):
                return key
    return None


def _rename_row(content: JsonObject, fields: Mapping[str, str]) -> JsonObject:
    row = {name: key for name, key in fields.items() if name in ROW_NAMES}
    message = {name: key for name, key in fields.items() if name in MESSAGE_NAMES}
    renamed = _with_parsed_messages(_rename(content, row) if row else content)
    lists = [key for key, value in renamed.items() if isinstance(value, list) and key not in _TOOLS]
    return {
        **renamed,
        **{
            key: [_rename(one, message) if isinstance(one, dict) else one for one in renamed[key]]
            for key in (lists if message else ())
        },
    }


def _with_parsed_messages(content: JsonObject) -> JsonObject:
    if CLAUDE in content:
        content = as_sharegpt(content)
    texts = [name for name in ("messages", "conversations") if isinstance(content.get(name), str)]
    return {**content, **{name: parsed_list(content, name) for name in texts}} if texts else content


def _in_our_layout(content: JsonObject, formats: Mapping[str, Format]) -> JsonObject:
    """Return a row with our names for its list of messages, its label, and the answers of a pair.

    Other tools' rows are unchanged if they have more than one reading.
    """
    if "kto_tag" in content and content.get("label") is None:  # LLaMA-Factory's
        content = _rename(content, {"label": "kto_tag"})
    content = _with_named_list(content)
    return _as_pair(content) if formats is PAIRS else content


def _with_named_list(content: JsonObject) -> JsonObject:
    """Return a row whose only list of messages is under the key of their format."""
    lists = {
        key: first
        for key, value in content.items()
        if isinstance(value, list) and value and isinstance(first := value[0], dict)
        if role_of(first) is not None or {"from", "value"} <= first.keys()
    }
    if len(lists) != 1:
        return content
    ((key, first),) = lists.items()
    name = "messages" if role_of(first) is not None else "conversations"
    others = {*_LISTS, *PROMPT_KEYS, *ANSWER_KEYS} - {"messages"}
    is_known = key in (name, *others) or (key != "messages" and recognize(content) is not None)
    if is_known or any(content.get(other) for other in others):
        return content
    return _rename(content, {name: key})


def _as_pair(content: JsonObject) -> JsonObject:
    """Return a row with a rejected answer beside its own answer, as ms-swift's, as a pair."""
    content = _rename(content, pair_keys(content))
    if content.get("rejected") is None or content.get("chosen") is not None:
        return content
    for key in ("messages", "conversations"):
        if isinstance(turns := content.get(key), list) and turns:
            rejected, rest = content["rejected"], {k: v for k, v in content.items() if k != key}
            if isinstance(rejected, list) and rejected[:1] == turns[:1]:
                return {**rest, "chosen": turns}
            return {**rest, key: turns[:-1], "chosen": turns[-1:]}
    answers = [key for key in ANSWER_KEYS if content.get(key) is not None]
    return _rename(content, {"chosen": answers[0]}) if len(answers) == 1 else content


def _rename(content: JsonObject, names: Mapping[str, str]) -> dict[str, Any]:
    # A renamed field is read only under its new key, as the row may have both keys.
    replaced = {*names, *names.values()}
    renamed = {key: value for key, value in content.items() if key not in replaced}
    return renamed | {name: content[key] for name, key in names.items() if key and key in content}
