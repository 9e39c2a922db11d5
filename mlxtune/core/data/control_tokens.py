"""Finds control tokens that are written out in data, however many a tokenizer has."""

import re
from bisect import bisect_right
from collections.abc import Sequence

# Nobody writes out longer ones.
_LONGEST = 1000


class ControlTokens:
    """Searches texts for any of the tokens, in time that hardly depends on their number.

    A regular expression of all of them takes quadratic time to compile.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        # Where a token starts with another one, that one is found. So each is the only one that
        # a text can start with, and comes right before the text in the order.
        self._tokens: list[str] = []
        for token in sorted({token for token in tokens if 0 < len(token) <= _LONGEST}):
            if not self._tokens or not token.startswith(self._tokens[-1]):
                self._tokens.append(token)
        starts = sorted({token[:2] for token in self._tokens})
        self._starts = re.compile("|".join(map(re.escape, starts)) or "(?!)")
        self._longest = max(map(len, self._tokens), default=0)

    def search(self, text: str) -> str | None:
        """Return the first token in a text, or None."""
        at = 0
        while start := self._starts.search(text, at):
            at = start.start()
            rest = text[at : at + self._longest]
            before = bisect_right(self._tokens, rest) - 1
            if before >= 0 and rest.startswith(self._tokens[before]):
                return self._tokens[before]
            at += 1
        return None
