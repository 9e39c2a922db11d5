"""Advice on rows that no format reads: what other tools' layouts are, and how to read them.

Advice that names options is followed in a test: the row is then read, or its next reason differs.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlxtune.config.data_config import ROW_NAMES
from mlxtune.core.data.problems import BadRowError, json_type
from mlxtune.core.data.sources.conversions import ANSWER_KEYS, CONTEXT_KEYS, PROMPT_KEYS, JsonObject
from mlxtune.core.data.sources.formats import (
    FORMATS,
    PAIRS,
    PROMPTS,
    Format,
    preference_options,
    recognize,
)
from mlxtune.core.data.sources.keys import field_option, normalized_key
from mlxtune.core.data.sources.messages import role_options
from mlxtune.errors import shorten

_TURNS = 'write them as \'messages\': [{"role": "user", "content": …}, {"role": "assistant", …}]'
# The depth to which objects are searched for a row.
_DEPTH = 3


def missing_keys(
    content: JsonObject,
    renamed: JsonObject,
    file_format: Format | None,
    fields: Mapping[str, str],
    formats: Mapping[str, Format],
    *,
    empty: str | None,
    is_table: bool,
) -> BadRowError:
    """Return the reason for skipping a row without the keys of a format.

    `renamed` is the row with our keys, as far as they are known; `empty` is the key whose empty
    value alone makes the format unknown, if there is one.
    """
    listed = [shorten(k) + " (empty)" * (content[k] is None) for k in list(content)[:5]]
    keys = f"its keys: {', '.join(listed) or 'none'}"
    alike = {normalized_key(key): key for key in content}
    for key in (fields[name] for name in fields if name in ROW_NAMES):
        if key not in content and (close := alike.get(normalized_key(key))):
            return BadRowError(f"no {shorten(key)}", f"did you mean {shorten(close)}?")
    if empty is not None:
        return BadRowError(f"'{fields.get(empty, empty)}' is empty", keys)
    if file_format is not None:
        missing = next(key for key in file_format.keys if renamed.get(key) is None)
        return BadRowError(f"no '{fields.get(missing, missing)}'", keys)
    for each in PAIRS.values() if formats is PAIRS else ():
        answers = [fields.get(key, key) for key in each.keys[-2:] if renamed.get(key) is None]
        if len(answers) == 1:
            return BadRowError(f"no '{answers[0]}'", f"a pair needs both answers; {keys}")
    # Answers are sampled, so a prompt needs none.
    sampled = ("completion",) if formats is PROMPTS else ()
    key_sets = (
        " + ".join(fields.get(key, key) for key in each.keys if key not in sampled)
        for each in formats.values()
    )
    looked = f"looked for: {', '.join(key_sets)}"
    advice = _advice(content, formats, is_table=is_table)
    return BadRowError("no known format", f"{keys}; {looked}; {advice}")


def _advice(content: JsonObject, formats: Mapping[str, Format], *, is_table: bool) -> str:
    """Return the remedy for a row with unknown keys."""
    if layout := next((layout for key, layout in _LAYOUTS.items() if key in content), None):
        return layout
    if inner := _inner(content, formats):
        return inner
    named = {normalized_key(key).rstrip("s") for key in content} & {
        *PROMPT_KEYS,
        *ANSWER_KEYS,
        *ROW_NAMES,
    }
    if options := preference_options(content, formats):
        return options
    if content and not named and any(map(_looks_like_a_value, content)):
        return "if these are the values of a row, write a line of column names above it"
    for key, value in content.items():
        if (name := normalized_key(key).rstrip("s")) in ANSWER_KEYS and not isinstance(
            value, str | None
        ):
            return f"{shorten(key)} is {json_type(value)}: write the answer as text under '{name}'"
    if formats is FORMATS and (keys := _prompt_and_answer(content)) is not None:
        use = f"use {field_option('prompt', keys[0])} {field_option('completion', keys[1])}"
        above = ", or write a line of column names above if these are the values of a row"
        return use + above * (is_table and not named)
    return "if your keys have other names, use --field NAME=KEY"


def _inner(content: JsonObject, formats: Mapping[str, Format], outer: str = "") -> str:
    """Return what holds a row's messages, and how to read them; empty text if nothing does."""
    for key, value in content.items():
        name = f"{outer}.{key}" if outer else key
        where = shorten(name)
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and not outer and (options := role_options(first)):
            return f"use {options}"
        if isinstance(first, dict) and recognize(first, formats) is not None:
            return f"the rows are under {where}: save that list as the file"
        if _is_row(value, formats):
            return f"the row is under {where}: save that object in place of this one"
        if _holds_turns(value):
            return f"the turns are under {where}: {_TURNS}"
        deeper = isinstance(value, dict) and name.count(".") < _DEPTH
        if deeper and (advice := _inner(value, formats, name)):
            return advice
    return ""


def _is_row(value: Any, formats: Mapping[str, Format]) -> bool:
    return isinstance(value, dict) and recognize(value, formats) not in (None, "text")


def _holds_turns(value: Any) -> bool:
    """Return whether turns are listed in pairs or as texts, or by number (`{"turn_1": {…}}`)."""
    if isinstance(value, dict):
        numbered = all(re.fullmatch(r"\D{0,20}\d{1,6}", key) for key in value)
        return bool(value) and numbered and _all_are(dict, value.values())
    if not isinstance(value, list) or not value:
        return False
    if isinstance(value[0], dict):
        return len(value[0]) > 1 and _all_are(str, value[0].values())
    return len(value) > 1 and _all_are(str, value) and any(" " in each for each in value)


def _all_are(kind: type, values: Iterable[Any]) -> bool:
    return all(isinstance(each, kind) for each in values)


# Keys of other tools' layouts that are not read, each with the remedy.
_LAYOUTS = {
    **dict.fromkeys(
        ("input_ids", "token_ids"),
        "token ids are not read: write the text or the messages that they stand for",
    ),
    "segments": f"'segments' are the parts of one row: {_TURNS}",
}


def _looks_like_a_value(key: str) -> bool:
    """Return whether a key is probably a cell of a table without a line of column names."""
    return len(key.split()) > 3 or key.endswith((".", "!", "…")) or key.replace(".", "").isdigit()


def _prompt_and_answer(content: JsonObject) -> tuple[str, str] | None:
    """Return the keys of a prompt and its answer: by their names, else the only two texts."""
    texts = {key: value for key, value in content.items() if isinstance(value, str)}
    if not texts.keys().isdisjoint(ROW_NAMES):
        return None
    asks, answers = (
        [key for key in texts if normalized_key(key).rstrip("s") in names]
        for names in (PROMPT_KEYS, ANSWER_KEYS)
    )
    if len(asks) == len(answers) == 1:
        return asks[0], answers[0]
    if len(content) > 2:
        texts = {key: value for key, value in texts.items() if " " in value.strip()}
    if len(texts) != 2 or normalized_key([*texts][1]) in (*CONTEXT_KEYS, *PROMPT_KEYS):
        return None
    prompt, completion = texts
    return prompt, completion
