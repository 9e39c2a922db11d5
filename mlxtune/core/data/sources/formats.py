"""Formats: the keys of a row, and the conversion of such a row to a conversation.

format    keys                      a conversation of
chat      messages                  the messages
sharegpt  conversations             {"from": "human" | "gpt" | …, "value": …}
prompt    prompt, completion        two texts, or two lists of messages
alpaca    instruction, output       instruction and `input`; output
text      text                      no conversation: a document
chatgpt   mapping, current_node     a conversation of a ChatGPT export: the path to the current node
gemini    contents                  {"role": "user" | "model", "parts": [{"text": …}]}

conversions.py and services.py have the conversions, conversions.py the keys of preference rows.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlxtune.config.objective_config import (
    LABEL_OBJECTIVES,
    PAIR_OBJECTIVES,
    REWARD_OBJECTIVES,
    is_rewarded,
)
from mlxtune.core.data.conversation import Conversation, Document, Pair, Row
from mlxtune.core.data.problems import CLASS_LABEL, BadRowError
from mlxtune.core.data.sources.conversions import (
    JsonObject,
    from_alpaca,
    from_pair,
    from_preferred,
    from_prompt,
    from_sharegpt,
    from_text,
    labeled,
)
from mlxtune.core.data.sources.keys import (
    EMPTY,
    Note,
    as_bool,
    check_row_is_learned,
    field_option,
    normalized_key,
)
from mlxtune.core.data.sources.messages import (
    check_is_text,
    marks_of,
    parse_conversation,
    turn_marks,
)
from mlxtune.core.data.sources.notes import unread_keys
from mlxtune.core.data.sources.services import (
    CHATGPT_KEYS,
    GEMINI_SYSTEM,
    from_chatgpt,
    from_gemini,
)
from mlxtune.errors import shorten

# Labels of answers that sft must not learn; kto wants true or false.
_BAD = ("bad", "undesirable", "rejected", "dispreferred")
_ANSWER = r"(?:responses?|answers?|outputs?|completions?|messages?)"
# Other tools' keys, without punctuation, for the two answers of a pair.
_PAIR_KEYS = {
    "chosen": re.compile(rf"(?:chosen|preferred|accepted){_ANSWER}"),
    "rejected": re.compile(rf"(?:rejected|dispreferred|nonpreferred){_ANSWER}"),
}
_PAIR = "'chosen' and 'rejected'"
# Words in other tools' keys for a label, and for the two answers of a pair.
_LABEL_WORDS = {"label": {"rating", "score", "feedback", "thumbs", "vote", "liked", "good", "kto"}}
_ANSWER_WORDS = {
    "chosen": {"good", "better", "best", "preferred", "accepted", "winner", "positive"},
    "rejected": {"bad", "worse", "worst", "dispreferred", "loser", "negative"},
}
_CLASSES = ("label", "labels", "labeltext", "labelname")
# Keys beside a conversation that every format of conversations reads.
_OPTIONAL = ("system", "tools", "functions")


@dataclass(frozen=True, slots=True)
class Format:
    """The keys that a row must have, its conversion, and the keys that it may have too.

    `convert` raises BadRowError.
    """

    keys: tuple[str, ...]
    convert: Callable[[int, JsonObject], Row]
    optional: tuple[str, ...] = _OPTIONAL

    def read(self, row: int, content: JsonObject) -> Row:
        """Convert a row, and note the keys that this does not read. Raises BadRowError."""
        check_row_is_learned(marks_of(content))
        check_is_text(content)
        converted = self.convert(row, content)
        texts, keys = _texts(converted), {*self.keys, *self.optional}
        prompt = content.get("input") if "preferred_output" in self.keys else None
        if prompt is None and not isinstance(converted, Document):
            keys |= turn_marks(content).keys()
        classes = _classes(content) if isinstance(converted, Document) else []
        unread = tuple(unread_keys(content, {*keys, *classes}, texts))
        unread += tuple([(CLASS_LABEL, shorten(key)) for key in classes])
        if isinstance(prompt, Mapping):  # OpenAI's pairs, whose prompt is an object
            keys = {"messages", *_OPTIONAL, *turn_marks(prompt)}
            unread += tuple(unread_keys(prompt, keys, texts))
        return with_notes(converted, unread)

    def fits(self, content: JsonObject) -> bool:
        """Return whether the row has the keys; null counts as absent."""
        return all(content.get(key) is not None for key in self.keys)


def with_notes(row: Row, notes: tuple[Note, ...]) -> Row:
    """Return a row with notes on its keys added to it."""
    if not notes:
        return row
    if isinstance(row, Pair):
        return replace(row, chosen=replace(row.chosen, unread=row.chosen.unread + notes))
    return replace(row, unread=row.unread + notes)


def _classes(content: JsonObject) -> list[str]:
    """Return the keys of a text's class, which a classifier would learn."""
    keys = sorted(key for key in content if normalized_key(key) in _CLASSES)
    # A boolean says whether to learn an answer.
    return [
        key
        for key in keys
        if isinstance(value := content[key], str | int) and value not in EMPTY
        if not isinstance(value, bool)
    ]


def _texts(row: Row) -> list[str]:
    """Return the texts of a row's conversation, each with its thinking."""
    if isinstance(row, Document):
        return [row.text]
    answers = row.answers if isinstance(row, Pair) else (row,)
    return [message.content + message.thinking for answer in answers for message in answer.messages]


def formats_of(objective: str) -> Mapping[str, Format]:
    """Return the formats of the rows that an objective accepts, by name."""
    if is_rewarded(objective):
        return PROMPTS
    if objective in PAIR_OBJECTIVES:
        return PAIRS
    return LABELS if objective in LABEL_OBJECTIVES else FORMATS


def recognize(content: JsonObject, formats: Mapping[str, Format] | None = None) -> str | None:
    """Return the name of the format whose keys the row has, or None."""
    formats = FORMATS if formats is None else formats
    return next((name for name, each in formats.items() if each.fits(content)), None)


def label_of(content: JsonObject) -> Any:
    """Return a row's label: as a boolean if it means true or false."""
    label = content.get("label")
    return label if (meant := as_bool(label)) is None else meant


def preference_kind(content: JsonObject) -> Literal["pair", "labelled"] | None:
    """Return how a row states a preference: with two answers, or with one labelled answer."""
    if recognize(content, PAIRS):
        return "pair"
    # A number next to plain text is a class label, not a preference.
    is_number = str(content.get("label")).strip() in ("0", "1", "0.0", "1.0")
    is_class = is_number and recognize(content) == "text"
    return "labelled" if isinstance(label_of(content), bool) and not is_class else None


def check_kind(content: JsonObject, objective: str) -> None:
    """Raise BadRowError for a row that belongs to another objective."""
    kind = preference_kind(content)
    if objective in ("sft", *REWARD_OBJECTIVES):
        if kind == "pair":
            raise BadRowError("a preference pair", f"{_PAIR}: use --objective dpo")
        if (key := pair_keys(content).get("rejected")) is not None:
            raise BadRowError("a preference pair", f"{shorten(key)}: use --objective dpo")
        label = label_of(content)
        bad = recognize(content) != "text" and str(label).strip().lower() in _BAD
        if bad or (kind == "labelled" and label is False):
            text = str(content["label"]).lower()
            remedy = "use --objective kto"
            if text.strip() in ("0", "0.0"):
                remedy += ", or --field label= if it is a class"
            raise BadRowError("an answer labelled as bad", f"'label' is {text}: {remedy}")
    elif objective in PAIR_OBJECTIVES and kind == "labelled":
        raise BadRowError("an answer with a label, not a pair", "use --objective kto")
    elif objective in LABEL_OBJECTIVES and kind == "pair":
        raise BadRowError(
            "a preference pair",
            f"{_PAIR}: use --objective dpo, or make two rows of it, each with its answer as "
            "'completion' and 'label' true or false",
        )
    elif kind is None and (name := recognize(content)) and content.get("label") is None:
        add = f"add {_PAIR if objective in PAIR_OBJECTIVES else 'a label'}"
        add = preference_options(content, formats_of(objective)) or add
        raise BadRowError(
            "an answer without a preference", f"{name} format: {add}, or use --objective sft"
        )


def pair_keys(content: JsonObject) -> dict[str, str]:
    """Return other tools' keys for the answers of a pair, by our names for these."""
    openai = {"preferred_output", "non_preferred_output"} & content.keys()
    if "rejected" in content or len(openai) > ("input" not in content):
        return {}
    candidates = {
        name: [key for key in content if content[key] and pattern.fullmatch(normalized_key(key))]
        for name, pattern in _PAIR_KEYS.items()
    }
    return {name: keys[0] for name, keys in candidates.items() if len(keys) == 1}


def preference_options(content: JsonObject, formats: Mapping[str, Format]) -> str:
    """Return the --field options for a preference if each field matches exactly one key."""
    words = _ANSWER_WORDS if formats is PAIRS else _LABEL_WORDS if formats is LABELS else {}
    options = []
    for name, usual in words.items():
        keys = [key for key in content if usual & {*re.findall(r"[^\W_]+", key[:200].lower())}]
        if len(keys) != 1:
            return ""
        options += [field_option(name, keys[0])]
    return f"use {' '.join(options)}" if options else ""


# The order decides the format of a row with the keys of several formats.
FORMATS: Mapping[str, Format] = {
    "chat": Format(("messages",), parse_conversation),
    "sharegpt": Format(("conversations",), from_sharegpt),
    "prompt": Format(("prompt", "completion"), from_prompt),
    "alpaca": Format(("instruction", "output"), from_alpaca, (*_OPTIONAL, "input", "history")),
    "text": Format(("text",), from_text, ()),
    "chatgpt": Format(("mapping", "current_node"), from_chatgpt, (*_OPTIONAL, *CHATGPT_KEYS)),
    "gemini": Format(("contents",), from_gemini, (*_OPTIONAL, *GEMINI_SYSTEM)),
}
# The formats of prompts, whose last answer, if any, is what a sampled answer is compared with.
PROMPTS: Mapping[str, Format] = {name: each for name, each in FORMATS.items() if name != "text"}


def _labeled(convert: Callable[[int, JsonObject], Conversation]) -> Callable[..., Row]:
    return lambda row, content: labeled(content, label_of(content), convert(row, content))


PAIRS: Mapping[str, Format] = {
    "chosen": Format(
        ("chosen", "rejected"), from_pair, (*_OPTIONAL, "prompt", "conversations", "messages")
    ),
    "preferred": Format(("input", "preferred_output", "non_preferred_output"), from_preferred),
}
LABELS: Mapping[str, Format] = {
    "labelled chat": Format(("messages", "label"), _labeled(parse_conversation)),
    "labelled sharegpt": Format(("conversations", "label"), _labeled(from_sharegpt)),
    "labelled prompt": Format(("prompt", "completion", "label"), _labeled(from_prompt)),
    "labelled alpaca": Format(
        ("instruction", "output", "label"),
        _labeled(from_alpaca),
        (*_OPTIONAL, "input", "history"),
    ),
}
