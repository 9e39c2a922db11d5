"""Reads rows of text files that are not JSON: CSV and TSV with column names, and plain text.

The encoding is UTF-8, UTF-16 if the file starts with its mark, or one in which Excel saves CSV:
cp1252 on Windows, or mac_roman, with lines that end in CR, as CSV for the Macintosh.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from mlxtune.core.data.problems import (
    TABLE_ENDINGS,
    UTF8_BOM,
    UTF16,
    BadRowError,
    open_data,
    read_head,
    uses_carriage_returns,
)
from mlxtune.core.data.sources.datafiles import TEXT_ENDINGS, needs, reading
from mlxtune.errors import DataError, one_line, shorten

_MAX_LINE_BYTES = 1 << 26
# The maximum number of columns of a table, and of characters in a piece of plain text.
_MAX_COLUMNS, _MAX_TEXT = 1_000_000, 1 << 26
# Encodings of text that is neither UTF-8 nor UTF-16: a guess, of which users are warned.
GUESSED_ENCODINGS = ("cp1252", "mac_roman")
_DELIMITERS = ",;\t|"
_SEPARATOR_LINE = re.compile(r'"?sep=([^\w\s"]|\t)"?\r?\n')
_JSON_START = re.compile(rb"\s*(\{|\[\s*[\[{\]\"])")
# A line of a chat that WhatsApp exports, on iOS and on Android.
_WHATSAPP = re.compile(
    rb"\[?\d{1,4}[./-]\d{1,2}[./-]\d{1,4},? \d{1,2}[:.]\d\d[^\n]{0,20}?(\] | - )[^\n]*"
)
ROWS_REMEDY = 'write JSON lines, such as {"text": "…"} or {"messages": […]}'
_HEADING = re.compile(r" {0,3}#{1,6}([ \t]|$)")
_FENCE = re.compile(r" {0,3}(```|~~~)")
# The number of a row, and its object or the reason why it has none.
NumberedRow = tuple[int, dict[str, Any] | BadRowError]


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file: utf-8, utf-16, cp1252 or mac_roman. Raises DataError.

    A file with some lines in UTF-8 is a file in UTF-8 with damaged lines.
    """
    with reading(path), open_data(path) as file:
        if file.read(2) in UTF16:
            return "utf-16"
        file.seek(0)
        other, foreign = GUESSED_ENCODINGS[_has_cr_lines(path)], False
        while piece := file.readline(_MAX_LINE_BYTES):
            for line in () if piece.isascii() else piece.split(b"\r"):
                if line.isascii():
                    continue
                for encoding in ("utf-8", other):
                    try:
                        line.decode(encoding)
                        break
                    except UnicodeDecodeError:
                        continue
                else:
                    return "utf-8"
                if encoding == "utf-8":
                    return "utf-8"
                foreign = True
        return other if foreign else "utf-8"


def _has_cr_lines(path: Path) -> bool:
    return path.name.lower().endswith(TABLE_ENDINGS) and uses_carriage_returns(read_head(path))


def is_text_file(path: Path) -> bool:
    """Return whether a file may hold text in any encoding: a table or, by its name, plain text."""
    return path.name.lower().endswith((*TABLE_ENDINGS, *TEXT_ENDINGS))


def text_rows(
    path: Path, head: bytes, texts: bool, split_at: str | None
) -> Iterator[NumberedRow] | None:
    """Return the rows of a text file that starts with `head`; None for JSON under such a name.

    Plain text has rows only with `texts`. Raises DataError.
    """
    if path.name.lower().endswith(TABLE_ENDINGS):
        return None if head.lstrip().startswith((b"{", b"[")) else _table_rows(path)
    # Files of JSON lines may start with comments, and Markdown with a heading.
    every = head.removeprefix(UTF8_BOM).splitlines()
    lines = (line for line in every if line.strip() and not line.startswith(b"#"))
    if _JSON_START.match(next(lines, b"")) is not None:
        return None
    if not texts:
        raise _refusal(path, head)
    return _plain_text_rows(path, split_at)


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file, whose lines end in LF. Raises DataError."""
    encoding = encoding_of(path)
    with reading(path):
        newline = None if _has_cr_lines(path) else "\n"
    # Bytes that are not UTF-8 are reported with their row.
    errors = "surrogateescape" if encoding == "utf-8" else "replace"
    name = "utf-8-sig" if encoding == "utf-8" else encoding
    with (
        reading(path),
        open_data(path) as file,
        io.TextIOWrapper(file, name, errors, newline=newline) as text,
    ):
        yield text


def _lines(path: Path, text: TextIO) -> Iterator[str]:
    number = 0
    while line := text.readline(_MAX_LINE_BYTES):
        number += 1
        if len(line) == _MAX_LINE_BYTES and not line.endswith("\n"):
            raise DataError(f"{path}:{number}: is longer than {_MAX_LINE_BYTES:,} bytes: split it")
        yield line


# Tables


def _table_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield the line number and the object of each row; empty cells are None. Raises DataError."""
    csv.field_size_limit(_MAX_LINE_BYTES)
    with _open_text(path) as file:
        lines = _lines(path, file)
        start, names, delimiter, spaced = _table_header(path, lines)
        separators = [0]
        bounded = _bounded(path, start, lines, delimiter, separators)
        reader = csv.reader(bounded, delimiter=delimiter, strict=True, skipinitialspace=spaced)
        while True:
            separators[0] = 0
            number = start + reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield number, BadRowError("not valid CSV", one_line(error))
                continue
            if cells is None:
                return
            if any(cells):
                yield number, _row_of_cells(names, cells)


def _bounded(
    path: Path, start: int, lines: Iterator[str], delimiter: str, separators: list[int]
) -> Iterator[str]:
    """Yield lines, and count the separators of a row, which make cells unless they are quoted."""
    for number, line in enumerate(lines, start=start + 1):
        separators[0] += line.count(delimiter)
        if separators[0] >= _MAX_COLUMNS:
            raise _too_wide(path, number)
        yield line


def _too_wide(path: Path, number: int) -> DataError:
    return DataError(f"{path}:{number}: has more than {_MAX_COLUMNS:,} columns: remove some")


def _table_header(path: Path, lines: Iterator[str]) -> tuple[int, list[str], str, bool]:
    """Return the line number of the header, the column names, their separator, and whether a space
    follows every separator.

    Spreadsheets write `;` if the comma is the decimal separator, and Excel reads a first line such
    as `sep=;`.
    """
    delimiters = _DELIMITERS
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == 1 and (named := _SEPARATOR_LINE.fullmatch(line)):
            delimiters = named[1]
            continue
        # Counted before the line is split, since each cell takes far more memory than its text.
        if max(map(line.count, delimiters)) >= _MAX_COLUMNS:
            raise _too_wide(path, number)
        tried = {each: _cells(line, each) for each in delimiters}
        # `|` separates only where nothing else does.
        most = max(",;\t" if len(tried) > 1 else tried, key=lambda each: len(tried[each]))
        delimiter = "|" if len(tried[most]) == 1 < len(tried.get("|", "")) else most
        following = tried[delimiter][1:]
        spaced = bool(following) and all(cell.startswith(" ") for cell in following)
        names = [name.strip() for name in _cells(line, delimiter, spaced=spaced)]
        twice = {name for name, times in Counter(names).items() if name and times > 1}
        if twice:
            raise DataError(
                f"{path}:{number}: has two columns named {shorten(min(twice))}: rename one of them"
            )
        return number, names, delimiter, spaced
    raise DataError(f"{path} is empty: it needs {needs(path)}")


def _cells(line: str, delimiter: str, *, spaced: bool = False) -> Sequence[str]:
    try:
        reader = csv.reader([line], delimiter=delimiter, strict=True, skipinitialspace=spaced)
        return next(reader)
    except csv.Error:
        return [line]


def _row_of_cells(names: Sequence[str], cells: Iterable[str]) -> dict[str, Any] | BadRowError:
    values = list(cells)
    if len(values) > len(names) and any(values[len(names) :]):
        detail = f"{len(values)} cells, {len(names)} columns: quote values that contain a separator"
        return BadRowError("more cells than columns", detail)
    row: dict[str, Any] = {
        name: value or None for name, value in zip(names, values, strict=False) if name
    }
    try:
        for value in filter(None, row.values()):
            value.encode("utf-8")
    except UnicodeEncodeError:
        return BadRowError("not UTF-8", "save it as CSV UTF-8")
    return row


# Plain text


def _refusal(path: Path, head: bytes) -> DataError:
    """Return the error for plain text under a format that needs rows."""
    if _WHATSAPP.match(head.removeprefix(UTF8_BOM).removeprefix(b"\xe2\x80\x8e")):
        return DataError(
            f"{path} is a chat of WhatsApp, which does not say who answers whom: {ROWS_REMEDY}"
        )
    return DataError(
        f"{path} is plain text: {ROWS_REMEDY}, or use --format text to train on it as it is"
    )


def _plain_text_rows(path: Path, split_at: str | None) -> Iterator[NumberedRow]:
    """Yield the text of a file or, with `split_at`, each piece, with the number of its first line.

    `heading` starts a piece at each heading of Markdown, `paragraph` after blank lines.
    """
    with _open_text(path) as file:
        piece: list[str] = []
        start, size = 1, 0
        for number, (line, begins) in enumerate(_marked(_lines(path, file), split_at), start=1):
            if begins and piece:
                yield start, _document(piece)
                start, piece, size = number, [], 0
            if not piece and not line.strip():
                start = number + 1
                continue
            piece.append(line)
            size += len(line)
            if size > _MAX_TEXT:
                raise DataError(f"{path} is longer than {_MAX_TEXT:,} characters: split it")
        if piece:
            yield start, _document(piece)


def _marked(lines: Iterable[str], split_at: str | None) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether a new piece begins with it."""
    fence, blank = "", False
    for line in lines:
        if split_at == "paragraph":
            yield line, blank and bool(line.strip())
            blank = not line.strip()
            continue
        if match := _FENCE.match(line):
            # In a block of code, `#` starts a comment.
            fence = "" if fence == match[1] else fence or match[1]
        yield line, split_at == "heading" and not fence and _HEADING.match(line) is not None


def _document(lines: Sequence[str]) -> dict[str, Any] | BadRowError:
    text = "".join(lines).rstrip()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return BadRowError("not UTF-8", "save it in UTF-8")
    return {"text": text.replace("\r\n", "\n")}
