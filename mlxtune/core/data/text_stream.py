"""The text of an answer as its tokens arrive, in whole characters and without stop texts."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text, up to the first of the `stops`.

    Incomplete characters, and text that may be the start of a stop, are held back. `stopped` is
    True once a stop has been found.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(filter(None, stops))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def add(self, content: bytes) -> str:
        """Add bytes, and return the text that is now certain."""
        return self._take(self._decoder.decode(content))

    def finish(self) -> str:
        """Return, at the end of the answer, the text that is still held back."""
        shown = self._take(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return shown

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        pending = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - pending :]
        return text[: len(text) - pending]


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at a text's end that may begin a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def text_of(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", errors="replace")
