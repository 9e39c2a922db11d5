"""Hashes of what rows say: near copies of a row have the same hash."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import numpy as np

from mlxtune.core.data.encode import Example, Tokenizer

# What is left of a text: words, numbers and symbols. Hyphens and points count within numbers and
# names, and exclamation marks where they negate; other punctuation does not.
_WORD = re.compile(
    r"""\w+(?:\.\w+)*|\.\d\w*|-(?=\s*\.?\d)|!(?=[\w=(])"""
    r"""|[^\w\s.\-!,;:?'"`¡¿‘’‚“”„‹›«»、。「」『』《》،؛؟।]"""
)
# What no reader sees: control, format, private and unassigned characters, surrogates, and letters
# and marks to ignore, such as variation selectors. Python takes the first exceptions for spaces.
_UNSEEN = r"[[\p{Default_Ignorable_Code_Point}\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Cs}]--[\x1c-\x1f\s]]"
_ASCII_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
# A pattern of Braille without a dot looks like a space.
_SPACES = {0x2800: " "}
_EMOJI = re.compile("[\u2600-\u27bf\u2b50\u2b55\U0001f000-\U0001faff]")
# Marks of Markdown: around a code block, and around words.
_FENCE = re.compile(r"```[\w+-]*")
_EMPHASIS = re.compile(
    r"(?<!\S)(?:\*{1,3}|_{1,3})(?=[^\s*_])|(?<=[^\s*_])(?:\*{1,3}|_{1,3})(?![^\s.,;:!?)])"
    r"|(?<!\w)_+(?!\w)"
)
_EMPTY_THINKING = re.compile(r"<think>\s*</think>")
# The number of places in a text at which a JSON object is looked for.
_MAX_OBJECTS = 100
_DECODER = json.JSONDecoder()
_DASHES_AND_QUOTES = dict.fromkeys(map(ord, "‐‑‒–—―−"), "-") | dict.fromkeys(map(ord, "“”„«»"), '"')
# The separator of control tokens, a byte that UTF-8 never has.
_CONTROL = b"\xff"
# The hash of a prompt that says nothing.
NO_PROMPT = 0
_SYSTEM_ROLES = ("system", "developer")
_ANSWER_ROLES = ("assistant", "model")
_ROLES = (*_SYSTEM_ROLES, *_ANSWER_ROLES, "user", "tool")
# Marks of messages that are text, because the tokenizer does not know them.
_MARKS = re.compile(
    rb"(?<!\xff)(<\|im_(?:start|end)\|>|<(?:start|end)_of_turn>|<\|(?:start|end)_header_id\|>|<\|eot_id\|>)"
)


def normalize(text: str) -> str:
    """Return the normalised text, which is equal for near copies."""
    text = _folded(text)
    if "<think>" in text:
        text = _EMPTY_THINKING.sub(" ", text)
    if "`" in text:
        text = _FENCE.sub(" ", text)
    if "{" in text:
        text = _folded(_with_sorted_keys(text))  # escapes are resolved now
    if "*" in text or "_" in text:
        text = _EMPHASIS.sub("", text)
    # Pictures decorate a text that has words, and are the content of others.
    plain = text if text.isascii() else _EMOJI.sub(" ", text)
    return " ".join(_WORD.findall(plain) or _WORD.findall(text))


def _folded(text: str) -> str:
    """Return a text in lower case, with one form of equal characters, and no unseen ones."""
    if text.isascii():
        return _ASCII_CONTROLS.sub("", text).lower()
    text = unicodedata.normalize("NFKC", text)
    unseen = dict.fromkeys(map(ord, _unseen().findall("".join(set(text)))))
    return text.translate(_DASHES_AND_QUOTES | _SPACES | unseen).casefold()


@cache
def _unseen() -> re.Pattern[str]:
    # Python's `re` knows no properties of characters, and importing `regex` takes time.
    import regex

    pattern: re.Pattern[str] = regex.compile(_UNSEEN, regex.VERSION1)
    return pattern


def _with_sorted_keys(text: str) -> str:
    """Return a text in which each JSON object has sorted keys and no escapes."""
    pieces, end = [], 0
    start = text.find("{")
    for _ in range(_MAX_OBJECTS):
        if start < 0:
            break
        try:
            value, after = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        pieces += [text[end:start], json.dumps(value, sort_keys=True, ensure_ascii=False)]
        end, start = after, text.find("{", after)
    return "".join([*pieces, text[end:]])


class TextHash:
    """Hashes the text of examples: near copies have the same 64-bit hash, whatever their tokens.

    Masks and roles do not count, so a row is a near copy under any objective, and so is plain text
    of the same messages. Neither does a system message that the template marks as such.
    `load_tokenizer` is called on the first use.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._spelled: dict[int, bytes] = {}

    def __call__(self, example: Example) -> int:
        return _hash_of_texts(text for _, text in self._messages(example))

    def with_pairs(self, example: Example) -> list[int]:
        """Return an example's hash and the hashes of a longer conversation's exchanges.

        An exchange is an answer and the message before it. Without names of roles, every second
        message is an answer.
        """
        messages = self._messages(example)
        named = any(role for role, _ in messages)
        answers = [
            i
            for i, (role, _) in enumerate(messages)
            if i and (role in _ANSWER_ROLES if named else i % 2)
        ]
        pairs = (messages[i - 1 : i + 1] for i in answers if len(messages) > 2)
        return [_hash_of_texts(text for _, text in each) for each in (messages, *pairs)]

    def first_message(self, example: Example) -> str:
        """Return the text of an example's first message; empty without a message."""
        return next((text for _, text in self._messages(example)), "")

    def hash_without_start(self, example: Example, length: int) -> int:
        """Return the hash of an example without the first characters of its first message."""
        texts = [text for _, text in self._messages(example)]
        return _hash_of_texts(["".join(texts[:1])[length:], *texts[1:]])

    def of_prompts(self, example: Example, skipped: int = 0) -> list[tuple[int, int]]:
        """Return the hashes of the prompt before each answer, with and without a system message.

        They differ from the hashes of any whole example. `skipped` is the number of characters to
        leave out at the start of the first message that is not a system message.
        """
        edges = np.diff(example.assistant_mask.astype(np.int8), prepend=0)
        starts = np.flatnonzero(edges == 1).tolist()
        hashes, start = [], 0
        full, bare = _PromptDigest(), _PromptDigest()
        for end in starts:
            part = replace(example, tokens=example.tokens[start:end])
            for digest, has_system in ((full, True), (bare, start > 0)):
                texts = [text for _, text in self._messages(part, has_system=has_system)]
                if texts and digest is bare and not start:
                    texts[0] = texts[0][skipped:]
                digest.update(texts)
            hashes.append((full.value, bare.value))
            start = end
        return hashes

    def _messages(self, example: Example, *, has_system: bool = False) -> list[tuple[str, str]]:
        """Return the messages of an example, with their roles if named.

        System messages are left out unless `has_system`.
        """
        content = self._bytes(example)
        if b"<" in content:
            content = _MARKS.sub(_CONTROL + rb"\1" + _CONTROL, content)
        parts = [part.decode(errors="replace") for part in content.split(_CONTROL)]
        if not has_system:
            parts = _without_system(parts)
        messages: list[tuple[str, str]] = []
        for text in parts[::2]:
            first, _, rest = text.partition("\n")
            if (role := first.strip()) in _ROLES:
                messages.append((role, rest))
            elif messages and messages[-1][0]:
                # A control token within a message, or a head of its own for the role.
                messages[-1] = (messages[-1][0], f"{messages[-1][1]}\n{text}")
            else:
                messages.append(("", text))
        return [(role, text.strip()) for role, text in messages if text.strip()]

    def _bytes(self, example: Example) -> bytes:
        tokens, spelled = example.tokens.tolist(), self._spelled
        if new := {token for token in tokens if token not in spelled}:
            self._spell(sorted(new))
        return b"".join([spelled[token] for token in tokens])

    def _spell(self, tokens: list[int]) -> None:
        tokenizer = self._load_tokenizer()
        for token, content in zip(tokens, tokenizer.token_bytes(tokens), strict=True):
            is_control = token in tokenizer.control_ids
            self._spelled[token] = _CONTROL + content + _CONTROL if is_control else content


class _PromptDigest:
    """The hash of the words of a conversation that grows."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8, person=b"prompt")
        self._is_empty = True

    def update(self, texts: Iterable[str]) -> None:
        for words in filter(None, map(normalize, texts)):
            self._digest.update(f" {words}".encode(errors="replace"))
            self._is_empty = False

    @property
    def value(self) -> int:
        return NO_PROMPT if self._is_empty else int.from_bytes(self._digest.digest(), "little")


def _hash_of_texts(texts: Iterable[str]) -> int:
    content = normalize("\n".join(texts)).encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _without_system(parts: list[str]) -> list[str]:
    """Return texts and the control tokens between them, from the first text after a system message.

    In `<|start|>system<|message|>Be brief.<|end|>`, the role is a text of its own; in ChatML, it is
    the first line; elsewhere, the control token names it, as in `[SYSTEM_PROMPT]Be brief.`
    """
    is_message = False
    for i in range(0, len(parts), 2):
        control, text = parts[i - 1] if i else "", parts[i]
        if is_message:
            is_message = False
        elif text.strip() and not ("system" in control.lower() and "/" not in control):
            role, line_end, _ = text.partition("\n")
            if role.strip() not in _SYSTEM_ROLES:
                return parts[i:]
            is_message = not line_end
    return parts
