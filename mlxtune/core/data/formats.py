"""Formats: recognise the rows of data files by their keys, and read them as conversations.

format    keys                      a conversation of
chat      messages                  the messages
sharegpt  conversations             {"from": "human" | "gpt" | …, "value": …}
prompt    prompt, completion        two texts, or two lists of messages
alpaca    instruction, output       instruction and `input`; output
text      text                      no conversation: a document
chatgpt   mapping, current_node     a conversation of a ChatGPT export: the path to the current node
gemini    contents                  {"role": "user" | "model", "parts": [{"text": …}]}

conversions.py has the conversions, and the keys of preference rows.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mlxtune.config.data_config import MESSAGE_NAMES, ROW_NAMES
from mlxtune.config.objective_config import LABELLED, PAIRED, REWARDED
from mlxtune.core.data.conversation import (
    SHAREGPT_ROLES,
    Conversation,
    Document,
    Pair,
    check_is_text,
    field_option,
    marks_of,
    parse_conversation,
    role_of,
    turn_marks,
)
from mlxtune.core.data.conversions import (
    CLAUDE,
    GEMINI_SYSTEM,
    OF_CHATGPT,
    JsonObject,
    as_sharegpt,
    from_alpaca,
    from_chatgpt,
    from_gemini,
    from_pair,
    from_preferred,
    from_prompt,
    from_sharegpt,
    from_text,
    labelled,
    parsed_list,
)
from mlxtune.core.data.encode import Row
from mlxtune.core.data.problems import BadRow, SkippedRows, json_type, shown, where
from mlxtune.core.data.sources.keys import check_row_is_learned, letters, unread_in_row
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.core.data.sources.text_rows import NumberedRow
from mlxtune.errors import DataError, shorten

# This many bad rows, if they exceed this fraction of all rows, mean a wrong file or format.
_MANY, _MOST_BAD = 100_000, 0.99
# Other tools' keys for a prompt, for an answer, and for texts that belong to a prompt.
_ASKS = ("instruction", "question", "query", "prompt", "input")
_ANSWERS = ("output", "response", "answer", "completion")
_BESIDE = ("context", "passage", "document", "choices")
_VERDICTS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
# Labels of answers that sft must not learn; kto wants true or false.
_BAD = ("bad", "undesirable", "rejected", "dispreferred")
_REJECTED = re.compile(
    r"(?:rejected|dispreferred|nonpreferred)(?:responses?|answers?|outputs?|completions?|messages?)"
)
# Keys beside a conversation that every format of conversations reads.
_OPTIONAL = ("system", "tools", "functions")


@dataclass(frozen=True, slots=True)
class Format:
    """The keys that a row must have, its conversion, and the keys that it may have too.

    `convert` raises BadRow.
    """

    keys: tuple[str, ...]
    convert: Callable[[int, JsonObject], Row]
    optional: tuple[str, ...] = _OPTIONAL

    def read(self, row: int, content: JsonObject) -> Row:
        """Convert a row, and note the keys that this does not read. Raises BadRow."""
        check_row_is_learned(marks_of(content))
        check_is_text(content)
        converted = self.convert(row, content)
        texts, known = _texts(converted), {*self.keys, *self.optional}
        given = content.get("input") if "preferred_output" in self.keys else None
        if given is None and not isinstance(converted, Document):
            known |= turn_marks(content).keys()
        unread = tuple(_unread(content, known, texts))
        if isinstance(given, Mapping):  # OpenAI's pairs, whose prompt is an object
            known = {"messages", *_OPTIONAL, *turn_marks(given)}
            unread += tuple(_unread(given, known, texts))
        if not unread:
            return converted
        if isinstance(converted, Pair):
            return replace(converted, chosen=replace(converted.chosen, unread=unread))
        return replace(converted, unread=unread)

    def fits(self, content: JsonObject) -> bool:
        """Return whether the row has the keys; null counts as absent."""
        return all(content.get(key) is not None for key in self.keys)


def _texts(row: Row) -> list[str]:
    """Return the texts of a row's conversation, each with its thinking."""
    if isinstance(row, Document):
        return [row.text]
    answers = row.answers if isinstance(row, Pair) else (row,)
    return [message.content + message.thinking for answer in answers for message in answer.messages]


def _unread(
    content: JsonObject, known: Collection[str], texts: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield a note for each key with a value that is not among the known keys."""
    unread = {
        key: content[key]
        for key in sorted(content.keys() - {*known})
        if content[key] is not None and content[key] not in ("", [], {})
    }
    repeated = {
        key
        for key, value in unread.items()
        # A single word is more likely a label that stands in a text by chance.
        if isinstance(value, str) and len(value.split(maxsplit=1)) > 1
        if any(value.strip() in text for text in texts)
    }
    return unread_in_row(unread, repeated, _advise_system)


def _advise_system(key: str) -> str:
    return f"use {field_option('system', key)}"


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
    preference rows; `grpo` accepts rows without an answer; `sft` rejects pairs and answers labelled
    as bad. `split_at` splits files of plain text under the format `text`. Raises DataError if the
    file cannot be read, if it has rows of two formats under `auto`, or if nearly all of many rows
    are bad.
    """
    objects = read_objects(path, texts=format == "text", split_at=split_at)
    return convert_rows(objects, path, skipped, format, fields or {}, objective)


def convert_rows(
    objects: Iterable[NumberedRow],
    path: Path,
    skipped: SkippedRows,
    format: str,
    fields: Mapping[str, str],
    objective: str,
) -> Iterator[Row]:
    """Yield the conversation of each good object of a file; `read_rows` describes the others."""
    formats = formats_of(objective)
    file_format = None if format == "auto" else formats[format]
    name, since, good, bad = format, 0, 0, 0
    for row, content in objects:
        try:
            if isinstance(content, BadRow):
                raise content
            renamed = _rename_row(content, fields) if fields else _with_lists(content)
            renamed = _in_our_keys(renamed, objective, formats)
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
            if bad % _MANY == 0 and bad > _MOST_BAD * (bad + good):
                raise DataError(
                    f"{shown(path)}: {bad:,} of its first {bad + good:,} rows cannot be used; "
                    f"the first: {skipped.first()}"
                ) from problem
        else:
            good += 1
            yield _without_placeholder(converted) if formats is PROMPTS else converted


def _in_their_words(problem: BadRow, content: JsonObject, renamed: JsonObject) -> BadRow:
    """Return a problem with the keys of the file in place of our names for them."""
    kind, detail = problem.kind, problem.detail
    for name in renamed.keys() - content.keys():
        value = renamed[name]
        keys = [key for key in content.keys() - renamed.keys() if content[key] is value]
        if len(keys) == 1:
            kind, detail = (text.replace(f"'{name}'", shorten(keys[0])) for text in (kind, detail))
    return BadRow(kind, detail)


def formats_of(objective: str) -> Mapping[str, Format]:
    """Return the formats of the rows that an objective accepts, by name."""
    if objective in REWARDED:
        return PROMPTS
    return PAIRS if objective in PAIRED else LABELS if objective in LABELLED else FORMATS


def recognise(content: JsonObject, formats: Mapping[str, Format] | None = None) -> str | None:
    """Return the name of the format whose keys the row has, or None."""
    formats = FORMATS if formats is None else formats
    return next((name for name, each in formats.items() if each.fits(content)), None)


def label_of(content: JsonObject) -> Any:
    """Return a row's label; 1, 0 and the texts true, false, yes and no become booleans."""
    label = content.get("label")
    if isinstance(label, str | int | float):
        return _VERDICTS.get(f"{label:g}" if label in (0, 1) else str(label).strip().lower(), label)
    return label


def preference_kind(content: JsonObject) -> Literal["pair", "labelled"] | None:
    """Return how a row states a preference: with two answers, or with one labelled answer."""
    if recognise(content, PAIRS):
        return "pair"
    # A number next to plain text is a class label, not a preference.
    is_class = recognise(content) == "text" and str(content.get("label")).strip() in ("0", "1")
    return "labelled" if isinstance(label_of(content), bool) and not is_class else None


def _in_our_keys(content: JsonObject, objective: str, formats: Mapping[str, Format]) -> JsonObject:
    """Return a row with our keys. Raises BadRow for a row that belongs to another objective."""
    if formats is PROMPTS:
        named = _with_our_keys(content, formats)
        if (answered := _with_answer(named)) is not named:
            return answered  # other keys have any meaning
    _check_kind(content, objective)
    return _with_our_keys(content, formats)


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


def _check_kind(content: JsonObject, objective: str) -> None:
    """Raise BadRow for a row that belongs to another objective."""
    kind = preference_kind(content)
    if objective in ("sft", *REWARDED):
        if kind == "pair":
            raise BadRow("a preference pair", f"{_PAIR}: use --objective dpo")
        if (key := next((key for key in content if _rejects(content, key)), None)) is not None:
            use = f"use --objective dpo {field_option('rejected', key)}"
            raise BadRow("a preference pair", f"{shorten(key)}: {use}")
        verdict = label_of(content)
        bad = recognise(content) != "text" and str(verdict).strip().lower() in _BAD
        if bad or (kind == "labelled" and verdict is False):
            label = str(content["label"]).lower()
            raise BadRow("an answer labelled as bad", f"'label' is {label}: use --objective kto")
    elif objective in PAIRED and kind == "labelled":
        raise BadRow("an answer with a label, not a pair", "use --objective kto")
    elif objective in LABELLED and kind == "pair":
        raise BadRow(
            "a preference pair",
            f"{_PAIR}: use --objective dpo, or make two rows of it, each with its answer as "
            "'completion' and 'label' true or false",
        )
    elif kind is None and (name := recognise(content)) and content.get("label") is None:
        add = f"add {_PAIR if objective in PAIRED else 'a label'}"
        add = _preference_options(content, formats_of(objective)) or add
        raise BadRow(
            "an answer without a preference", f"{name} format: {add}, or use --objective sft"
        )


_PAIR = "'chosen' and 'rejected'"


def _rejects(content: JsonObject, key: str) -> bool:
    """Return whether a key holds a rejected answer."""
    return bool(content[key]) and _REJECTED.fullmatch(letters(key)) is not None


# Words in other tools' keys for a label, and for the two answers of a pair.
_LABEL_WORDS = {"label": {"rating", "score", "feedback", "thumbs", "vote", "liked", "good"}}
_ANSWER_WORDS = {
    "chosen": {"good", "better", "best", "preferred", "accepted", "winner", "positive"},
    "rejected": {"bad", "worse", "worst", "dispreferred", "loser", "negative"},
}


def _preference_options(content: JsonObject, formats: Mapping[str, Format]) -> str:
    """Return the --field options for a preference, if one key has a usual word for each field."""
    words = _ANSWER_WORDS if formats is PAIRS else _LABEL_WORDS if formats is LABELS else {}
    options = []
    for name, usual in words.items():
        keys = [key for key in content if usual & {*re.findall(r"[^\W_]+", key[:200].lower())}]
        if len(keys) != 1:
            return ""
        options += [field_option(name, keys[0])]
    return f"use {' '.join(options)}" if options else ""


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
    beside = f" --field input={(texts or contexts)[0]}" if contexts and alpaca else ""
    readings = [f"--field {asks}={ask} --field {answers_as}={answers[0]}" for ask in prompts]
    readings += [f"--field {asks}={prompts[0]} --field {answers_as}={one}" for one in answers[1:]]
    raise BadRow(
        f"two readings of {', '.join(map(repr, (*prompts, *contexts, *answers)))}",
        f"use {readings[0]}{beside}" if beside else f"use {' or '.join(readings[:2])}",
    )


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
    if options := _preference_options(content, formats):
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
        keys = ", ".join(map(repr, (*candidates, *others)))
        raise BadRow(f"two readings of {keys}", "put all of the prompt into 'prompt'")
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


_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")


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


# The order decides the format of a row with the keys of several formats.
FORMATS: Mapping[str, Format] = {
    "chat": Format(("messages",), parse_conversation),
    "sharegpt": Format(("conversations",), from_sharegpt),
    "prompt": Format(("prompt", "completion"), from_prompt),
    "alpaca": Format(("instruction", "output"), from_alpaca, (*_OPTIONAL, "input", "history")),
    "text": Format(("text",), from_text, ()),
    "chatgpt": Format(("mapping", "current_node"), from_chatgpt, (*_OPTIONAL, *OF_CHATGPT)),
    "gemini": Format(("contents",), from_gemini, (*_OPTIONAL, *GEMINI_SYSTEM)),
}
# The formats of prompts, whose last answer, if any, is what a sampled answer is compared with.
PROMPTS: Mapping[str, Format] = {name: each for name, each in FORMATS.items() if name != "text"}


def _labelled(convert: Callable[[int, JsonObject], Conversation]) -> Callable[..., Row]:
    return lambda row, content: labelled(content, label_of(content), convert(row, content))


PAIRS: Mapping[str, Format] = {
    "chosen": Format(
        ("chosen", "rejected"), from_pair, (*_OPTIONAL, "prompt", "conversations", "messages")
    ),
    "preferred": Format(("input", "preferred_output", "non_preferred_output"), from_preferred),
}
LABELS: Mapping[str, Format] = {
    "labelled chat": Format(("messages", "label"), _labelled(parse_conversation)),
    "labelled sharegpt": Format(("conversations", "label"), _labelled(from_sharegpt)),
    "labelled prompt": Format(("prompt", "completion", "label"), _labelled(from_prompt)),
}
