"""Reads rows in the format that their keys show.

Other tools' keys are renamed to ours if they have one reading; if not, the reason names the options
that read them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxtune.config.data_config import MESSAGE_NAMES, ROW_NAMES
from mlxtune.core.data.conversation import Row
from mlxtune.core.data.problems import BadRow, SkippedRows, json_type, shown, where
from mlxtune.core.data.sources.conversions import JsonObject, parsed_list
from mlxtune.core.data.sources.formats import (
    FORMATS,
    PAIRS,
    Format,
    check_kind,
    formats_of,
    preference_options,
    recognise,
)
from mlxtune.core.data.sources.keys import field_option, letters
from mlxtune.core.data.sources.messages import role_of
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.core.data.sources.services import CLAUDE, as_sharegpt
from mlxtune.errors import DataError, shorten

# This many bad rows, if they exceed this fraction of all rows, mean a wrong file or format.
_MANY, _MOST_BAD = 100_000, 0.99
# Other tools' keys for a prompt, for an answer, and for texts that belong to a prompt.
_ASKS = ("instruction", "question", "query", "prompt", "input")
_ANSWERS = ("output", "response", "answer", "completion")
_BESIDE = ("context", "passage", "document", "choices")
_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")


def read_rows(
    path: Path,
    skipped: SkippedRows,
    *,
    format: str = "auto",
    fields: Mapping[str, str] | None = None,
    objective: str = "sft",
    split_at: str | None = None,
) -> Iterator[Row]:
    """Yield the conversation of each good row, and add bad rows to `skipped`.

    With `auto`, the first row whose format is recognised decides the file's format. `fields` maps
    field names to the keys that the file uses for them. A preference `objective` accepts only
    preference rows; `sft` rejects pairs and answers labelled as bad. `split_at` splits files of
    plain text under the format `text`. Raises DataError if the file
    cannot be read, if it has rows of two formats under `auto`, if its rows are all messages, or if
    nearly all of many rows are bad.
    """
    fields, formats = fields or {}, formats_of(objective)
    file_format = None if format == "auto" else formats[format]
    name, since, good, bad, bare = format, 0, 0, 0, 0
    for row, content in read_objects(path, texts=format == "text", split_at=split_at):
        try:
            if isinstance(content, BadRow):
                raise content
            renamed = _rename_row(content, fields) if fields else _with_lists(content)
            check_kind(renamed, objective)
            renamed = _with_our_keys(renamed, formats)
            if file_format is None or not file_format.fits(renamed):
                recognised = recognise(renamed, formats) if format == "auto" else None
                if recognised is None:
                    raise _missing_keys(content, renamed, file_format, fields, formats)
                if file_format is not None:
                    raise DataError(
                        f"{where(path, row)}: is in the {recognised} format, but the file is in "
                        f"the {name} format from row {since} on: give each format its own file, or "
                        "name one with --format to skip the others"
                    )
                name, since, file_format = recognised, row, formats[recognised]
            try:
                converted = file_format.read(row, renamed)
            except BadRow as problem:
                raise _in_their_words(problem, content, renamed) from problem
        except BadRow as problem:
            skipped.add(row, problem)
            bad += 1
            bare += isinstance(content, dict) and _is_message(content)
            if bad % _MANY == 0 and bad > _MOST_BAD * (bad + good):
                raise DataError(
                    f"{shown(path)}: {bad:,} of its first {bad + good:,} rows cannot be used; "
                    f"the first: {skipped.first()}"
                ) from problem
        else:
            good += 1
            yield converted
    if bare and bare == bad and not good:
        wrap = 'wrap those of each conversation, as in [{"messages": […]}]'
        raise DataError(f"{shown(path)} is a list of messages: {wrap}")


def _is_message(content: JsonObject) -> bool:
    return role_of(content) is not None or {"from", "value"} <= content.keys()


def _in_their_words(problem: BadRow, content: JsonObject, renamed: JsonObject) -> BadRow:
    """Return a problem with the keys of the file in place of our names for them."""
    kind, detail = problem.kind, problem.detail
    for name in renamed.keys() - content.keys():
        value = renamed[name]
        keys = [key for key in content.keys() - renamed.keys() if content[key] is value]
        if len(keys) == 1:
            kind, detail = (text.replace(f"'{name}'", shorten(keys[0])) for text in (kind, detail))
    return BadRow(kind, detail)


def _with_our_keys(content: JsonObject, formats: Mapping[str, Format]) -> JsonObject:
    """Return a row of unknown format with our keys, if its keys have only one reading.

    Raises BadRow for several readings; --field chooses one of them.
    """
    if formats is PAIRS:
        return _with_prompt(content)
    if recognise(content, formats) is not None:
        return content
    prompts, answers, contexts = (
        [key for key in keys if content.get(key) is not None] for keys in (_ASKS, _ANSWERS, _BESIDE)
    )
    if not prompts or not answers:
        return content
    texts = [key for key in contexts if isinstance(content[key], str)]
    has_input = len(prompts) == 1 and bool(texts)
    alpaca = has_input or prompts in (["instruction"], ["instruction", "input"])
    asks, answers_as = ("instruction", "output") if alpaca else ("prompt", "completion")
    if len(answers) == 1 and not contexts and (alpaca or len(prompts) == 1):
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
    raise BadRow(kind, f"use {use}")


def _missing_keys(
    content: JsonObject,
    renamed: JsonObject,
    file_format: Format | None,
    fields: Mapping[str, str],
    formats: Mapping[str, Format],
) -> BadRow:
    shown = [shorten(k) + " (empty)" * (content[k] is None) for k in list(content)[:5]]
    keys = f"its keys: {', '.join(shown) or 'none'}"
    alike = {letters(key): key for key in content}
    for key in (fields[name] for name in fields if name in ROW_NAMES):
        if key not in content and (close := alike.get(letters(key))):
            return BadRow(f"no {shorten(key)}", f"did you mean {shorten(close)}?")
    if (empty := _empty_key(renamed, formats)) is not None:
        return BadRow(f"'{fields.get(empty, empty)}' is empty", keys)
    if file_format is not None:
        missing = next(key for key in file_format.keys if renamed.get(key) is None)
        return BadRow(f"no '{fields.get(missing, missing)}'", keys)
    for each in PAIRS.values() if formats is PAIRS else ():
        answers = [fields.get(key, key) for key in each.keys[-2:] if renamed.get(key) is None]
        if len(answers) == 1:
            return BadRow(f"no '{answers[0]}'", f"a pair needs both answers; {keys}")
    known = (" + ".join(fields.get(k, k) for k in each.keys) for each in formats.values())
    looked = f"looked for: {', '.join(known)}"
    return BadRow("no known format", f"{keys}; {looked}; {_advice(content, formats)}")


def _advice(content: JsonObject, formats: Mapping[str, Format]) -> str:
    """Return the remedy for a row with unknown keys."""
    named = {letters(key).rstrip("s") for key in content} & {*_ASKS, *_ANSWERS, *ROW_NAMES}
    for key, value in content.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and recognise(first, formats) is not None:
            return f"the rows are under {shorten(key)}: save that list as the file"
        if isinstance(first, dict) and role_of(first) is not None and formats is FORMATS:
            return f"use {field_option('messages', key)}"
        if isinstance(value, dict) and recognise(value, formats) not in (None, "text"):
            return f"the row is under {shorten(key)}: save that object in place of this one"
        if isinstance(value, dict) and _holds_turns(value):
            layout = '{"role": "user", "content": …}, {"role": "assistant", "content": …}'
            return f"the turns are under {shorten(key)}: write them as 'messages': [{layout}]"
    if options := preference_options(content, formats):
        return options
    if content and not named and any(map(_looks_like_a_value, content)):
        return "if these are the values of a row, write a line of column names above it"
    for key, value in content.items():
        if (name := letters(key).rstrip("s")) in _ANSWERS and not isinstance(value, str | None):
            return f"{shorten(key)} is {json_type(value)}: write the answer as text under '{name}'"
    if formats is FORMATS and (keys := _prompt_and_answer(content)) is not None:
        return " ".join(
            ("use", field_option("prompt", keys[0]), field_option("completion", keys[1]))
        )
    return "if your keys have other names, use --field NAME=KEY"


def _holds_turns(value: JsonObject) -> bool:
    """Return whether an object holds turns by number, such as `{"turn_1": {…}}`."""
    numbered = all(re.fullmatch(r"\D{0,20}\d{1,6}", key) for key in value)
    return bool(value) and numbered and all(isinstance(turn, dict) for turn in value.values())


def _looks_like_a_value(key: str) -> bool:
    """Return whether a key is probably a cell of a table without a line of column names."""
    return len(key.split()) > 3 or key.endswith((".", "!", "…")) or key.replace(".", "").isdigit()


def _prompt_and_answer(content: JsonObject) -> tuple[str, str] | None:
    """Return the keys of a prompt and its answer: by their names, else the only two texts."""
    texts = {key: value for key, value in content.items() if isinstance(value, str)}
    if not texts.keys().isdisjoint(ROW_NAMES):
        return None
    asks, answers = (
        [key for key in texts if letters(key).rstrip("s") in names] for names in (_ASKS, _ANSWERS)
    )
    if len(asks) == len(answers) == 1:
        return asks[0], answers[0]
    if len(content) > 2:
        texts = {key: value for key, value in texts.items() if " " in value.strip()}
    if len(texts) != 2 or letters([*texts][1]) in (*_BESIDE, *_ASKS):
        return None
    prompt, completion = texts
    return prompt, completion


def _with_prompt(content: JsonObject) -> JsonObject:
    """Return a pair of texts whose prompt, followed by any `input`, is under the key `prompt`.

    Raises BadRow for further text whose place is unknown.
    """
    candidates = [
        key for key in _ASKS if isinstance(text := content.get(key), str) and text.strip()
    ]
    if not candidates or not all(
        isinstance(content.get(key), str) for key in ("chosen", "rejected")
    ):
        return content
    others = [key for key in _BESIDE if content.get(key)]
    if others or len(candidates) > 2 or (len(candidates) == 2 and candidates[1] != "input"):
        keys = list(map(repr, (*candidates, *others)))
        both = f"{keys[0]} alone, or all together"
        raise BadRow(
            f"two readings of {', '.join(keys)}", f"{both}: put the whole prompt into 'prompt'"
        )
    renamed = {key: value for key, value in content.items() if key not in candidates}
    return renamed | {"prompt": "\n".join(str(content[key]) for key in candidates)}


def _empty_key(content: JsonObject, formats: Mapping[str, Format]) -> str | None:
    """Return the key whose empty value alone makes a row's format unknown, if there is one."""
    for key in (name for name, value in content.items() if value is None):
        with suppress(BadRow):
            if recognise(_with_our_keys({**content, key: ""}, formats), formats):
                return key
    return None


def _rename_row(content: JsonObject, fields: Mapping[str, str]) -> JsonObject:
    row = {name: key for name, key in fields.items() if name in ROW_NAMES}
    message = {name: key for name, key in fields.items() if name in MESSAGE_NAMES}
    renamed = dict(_with_lists(_rename(content, row)))
    for name in _LISTS if message else ():
        if isinstance(value := renamed.get(name), list):
            renamed[name] = [
                _rename(one, message) if isinstance(one, dict) else one for one in value
            ]
    return renamed


def _with_lists(content: JsonObject) -> JsonObject:
    if CLAUDE in content:
        content = as_sharegpt(content)
    texts = [name for name in ("messages", "conversations") if isinstance(content.get(name), str)]
    return {**content, **{name: parsed_list(content, name) for name in texts}} if texts else content


def _rename(content: JsonObject, names: Mapping[str, str]) -> dict[str, Any]:
    # A renamed field is read only under its new key, as the row may have both keys.
    taken = {*names, *names.values()}
    renamed = {key: value for key, value in content.items() if key not in taken}
    return renamed | {name: content[key] for name, key in names.items() if key in content}
