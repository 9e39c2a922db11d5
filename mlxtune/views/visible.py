r"""Makes text from data safe and fully visible.

Control, bidi, zero-width and other unseen characters become escapes such as `\u202e`. Newlines,
tabs and spaces that are easy to overlook become separate stretches, so that pages and terminals can
mark them.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

from mlxtune.core.data.inspection import Piece

Kind = Literal["plain", "space", "newline", "tab", "escape"]
Stretch = tuple[Kind, str]

# Controls, formats, lone surrogates, private use, line and paragraph separators.
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
# Characters that may control a terminal.
_CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Letters and marks that are invisible or look like a space.
_BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
_SPACES = " \u3000"  # the second is the ideographic space
_UNUSUAL_CHARACTER = re.compile(r"[^ -~]")
_PARTS = re.compile(r" +|\n|\t|[^ \n\t]+")
# The control tokens of the chat templates in use.
_TEMPLATE_TOKENS = re.compile(r"<\|[\w-]{1,40}\|>|<(?:start|end)_of_turn>|<(?:bos|eos)>|</?s>")
_EDGES = ("", " ", "\n", "\r", "\t")


@lru_cache(maxsize=4096)
def _escape(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    space = category == "Zs" and character not in _SPACES
    tag = 0xE0000 <= code <= 0xE0FFF
    if not (category in _HIDDEN_CATEGORIES or space or tag or character in _BLANK):
        return character
    return character.encode("unicode_escape").decode()


def without_template_tokens(answer: str) -> str:
    """Remove the control tokens of chat templates from a model's answer, to show it."""
    return _TEMPLATE_TOKENS.sub("", answer)


def escape(text: str) -> str:
    r"""Return text as one line with escapes such as `\n` and `\u202e`."""
    return _UNUSUAL_CHARACTER.sub(lambda match: _escape(match[0]), text)


def stretches(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, list[Stretch]]]:
    """Yield each piece with its text in stretches of one kind.

    A space is marked if it is one of several, at either end of a line, or next to a control token
    or the edge of a supervised span.
    """
    for i, piece in enumerate(pieces):
        before = pieces[i - 1].text[-1:] if i and _is_same_style(piece, pieces[i - 1]) else ""
        last = i + 1 == len(pieces)
        after = "" if last or not _is_same_style(piece, pieces[i + 1]) else pieces[i + 1].text[:1]
        yield piece, _stretches(piece.text, before, after)


def _is_same_style(one: Piece, other: Piece) -> bool:
    return not (one.control or other.control) and one.supervised == other.supervised


def _stretches(text: str, before: str, after: str) -> list[Stretch]:
    result: list[Stretch] = []
    for match in _PARTS.finditer(text):
        part, (start, end) = match[0], match.span()
        if part[0] == " ":
            left = text[start - 1] if start else before
            right = text[end] if end < len(text) else after
            marked = len(part) > 1 or left in _EDGES or right in _EDGES
            _add(result, "space" if marked else "plain", part)
        elif part in ("\n", "\t"):
            result.append(("newline" if part == "\n" else "tab", part))
        elif part.isascii() and part.isprintable():
            _add(result, "plain", part)
        else:
            for character in part:
                shown = _escape(character)
                _add(result, "plain" if shown == character else "escape", shown)
    return result


def _add(result: list[Stretch], kind: Kind, text: str) -> None:
    if result and result[-1][0] == kind == "plain":
        result[-1] = (kind, result[-1][1] + text)
    else:
        result.append((kind, text))


def middle_of(pieces: Sequence[Piece], head: int, tail: int) -> tuple[int, int]:
    """Return the range [start, end) of pieces to fold between the head and the tail.

    The range is empty if folding would save little.
    """
    start, end = head, len(pieces) - tail
    return (start, end) if end - start > head // 2 else (len(pieces), len(pieces))


def escape_controls(text: str) -> str:
    r"""Return text with an escape such as `\x1b` for each character that controls a terminal.

    Newlines, tabs, visible characters and the joiners of emoji are kept.
    """
    return _UNUSUAL_CHARACTER.sub(lambda match: _escape_control(match[0]), text)


def _escape_control(character: str) -> str:
    is_visible = (
        character in "\n\t\u200c\u200d"
        or unicodedata.category(character) not in _CONTROL_CATEGORIES
    )
    return character if is_visible else character.encode("unicode_escape").decode()
