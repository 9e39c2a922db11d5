"""Finds rows whose texts differ only in white space, case, end punctuation or Unicode form."""

import hashlib
import re
import unicodedata
from collections.abc import Callable

from mlxtune.core.data.encode import Example, Tokenizer

_END = re.compile(r"[.!?…。！？]+(?=\s|$)")


def normalise(text: str) -> str:
    """Return the text that near copies share."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(_END.sub("", text.casefold()).split())


class TextHash:
    """Hashes the text of examples: near copies have the same 64-bit hash, whatever their tokens.

    Masks and roles do not count, so a row is a near copy under any objective. `load_tokenizer` is
    called on the first use.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._spelled: dict[int, bytes] = {}

    def __call__(self, example: Example) -> int:
        tokens, spelled = example.tokens.tolist(), self._spelled
        if new := {token for token in tokens if token not in spelled}:
            self._spell(sorted(new))
        text = b"".join([spelled[token] for token in tokens]).decode(errors="replace")
        content = normalise(text).encode(errors="replace")
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")

    def _spell(self, tokens: list[int]) -> None:
        tokenizer = self._load_tokenizer()
        for token, content in zip(tokens, tokenizer.spell(tokens), strict=True):
            # White space around a control token shows where a message ends.
            is_control = token in tokenizer.control_ids
            self._spelled[token] = b"\n%b\n" % content if is_control else content
