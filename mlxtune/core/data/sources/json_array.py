"""The elements of a JSON array, parsed one by one as the file is read."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from mlxtune.core.data.problems import BadRow
from mlxtune.core.data.sources.expansion import check_values

_PIECE = 2**20
_MAX_ELEMENT = 2**26
_SPACE = re.compile(r"[ \t\n\r]*")
# What is cut off at the end of a piece, such as `-Infinity` or an escape, is no longer.
_CUT_OFF = 16
_DECODER = json.JSONDecoder()


def array_elements(read: Callable[[int], bytes]) -> Iterator[Any]:
    """Yield the elements of an array; `read` returns the next bytes of its file.

    Raises BadRow, after the elements before it, for what is no array.
    """
    text = _Text(read)
    try:
        if text.next() != "[":
            raise text.error("Expecting value")
        text.at += 1
        if text.next() == "]":
            text.at += 1
        else:
            yield text.element()
            while text.next() == ",":
                text.at += 1
                text.next()
                yield text.element()
            if text.next() != "]":
                raise text.error("Expecting ',' delimiter")
            text.at += 1
        if text.next():
            raise text.error("Extra data")
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"byte {text.bytes_read + error.start + 1}") from error
    except RecursionError as error:
        raise BadRow("JSON nested too deeply") from error


class _Text:
    """The text of a file from where it is being parsed: `at` is an index into `unread`."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.unread, self.at, self.ended = "", 0, False
        # Bytes that have been decoded; and the line and the column of `unread`.
        self.bytes_read, self._line, self._column = 0, 1, 1

    def next(self) -> str:
        """Skip white space; return the character behind it, empty at the end."""
        while True:
            match = _SPACE.match(self.unread, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.unread) or self.ended:
                return self.unread[self.at : self.at + 1]
            self._read_more()

    def element(self) -> Any:
        """Parse the value that starts here. Raises BadRow."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.unread, self.at)
            except json.JSONDecodeError as error:
                complete = error.pos < len(self.unread) - _CUT_OFF
                complete = complete and not error.msg.startswith("Unterminated string")
                if self.ended or complete:
                    self.at = error.pos
                    raise self.error(error.msg) from error
            except ValueError as error:  # a number with thousands of digits
                raise BadRow("not a valid JSON array", str(error)) from error
            else:
                # A number may go on in the next piece.
                if end < len(self.unread) or self.ended:
                    self.at = end
                    return value
            self._read_more()

    def error(self, message: str) -> BadRow:
        """Return the problem at this place."""
        self._drop()
        line = f"line {self._line}, " if self._line > 1 else ""
        detail = f"{message} at {line}column {self._column}"
        return BadRow("not a valid JSON array", detail)

    def _drop(self) -> None:
        """Forget what has been parsed."""
        lines = self.unread.count("\n", 0, self.at)
        last = self.unread.rfind("\n", 0, self.at)
        self._line += lines
        self._column = self.at - last if lines else self._column + self.at
        self.unread, self.at = self.unread[self.at :], 0

    def _read_more(self) -> None:
        self._drop()
        if len(self.unread) > _MAX_ELEMENT:
            raise self.error(f"an element of more than {_MAX_ELEMENT:,} characters")
        check_values(self.unread)
        # As much as is there already: the start of a long element is parsed again each time.
        piece = self._read(max(_PIECE, len(self.unread)))
        pending = len(self._decoder.getstate()[0])
        self.bytes_read -= pending
        self.unread += self._decoder.decode(piece, final=not piece)
        self.bytes_read += pending + len(piece)
        self.ended = not piece
