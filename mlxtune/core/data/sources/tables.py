"""Rows of CSV and TSV files with a header. Spreadsheet files are refused.

A row is numbered by its first line; a value in quotes may span several lines.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mlxtune.core.data.problems import BadRow
from mlxtune.errors import DataError, one_line, shorten

NAMES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_DELIMITERS = ",;\t"
_NAMED = re.compile(r'"?sep=([^\w\s"]|\t)"?\r?\n')
# Spreadsheets by their first bytes: .xlsx, .ods and .numbers are zip archives; .xls is older.
_SPREADSHEETS = {
    b"PK\x03\x04": "a spreadsheet or another archive",
    b"\xd0\xcf\x11\xe0": "an Excel file",
}
_EXPORT = (
    "save it as CSV: in Excel, File > Save As > CSV UTF-8; in Numbers, File > Export To > CSV; in "
    "LibreOffice or Google Sheets likewise"
)


def is_table(path: Path, head: bytes) -> bool:
    """Return whether a file is named as CSV or TSV, and does not start like JSON."""
    return path.name.lower().endswith(NAMES) and not head.lstrip().startswith((b"{", b"["))


def check_no_spreadsheet(path: Path, head: bytes) -> None:
    """Raise DataError for a spreadsheet, and for text in UTF-16, which Excel can write."""
    for start, kind in _SPREADSHEETS.items():
        if head.startswith(start):
            raise DataError(f"{path}: is {kind}: {_EXPORT}")
    if head.startswith(_UTF16):
        raise DataError(f"{path}: is text in UTF-16: save it in UTF-8, from Excel as CSV UTF-8")


def table_rows(path: Path, file: IO[bytes], longest: int) -> Iterator[tuple[int, Any]]:
    """Yield each row's number, and its object (empty cells are None) or a BadRow.

    `longest` is the maximum length of a line, and of a value, in bytes. Raises DataError.
    """
    csv.field_size_limit(longest)
    lines = _lines(path, file, longest)
    start, names, delimiter = _header(path, lines)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        number = start + reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield number, BadRow("not valid CSV", one_line(error))
            continue
        if cells is None:
            return
        if any(cells):
            yield number, _object(names, cells)


def _lines(path: Path, file: IO[bytes], longest: int) -> Iterator[str]:
    number = 0
    while line := file.readline(longest):
        number += 1
        if len(line) == longest and not line.endswith(b"\n"):
            raise DataError(f"{path}:{number}: is longer than {longest:,} bytes: split it")
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        # Bytes in another encoding are reported with their row.
        yield text.decode("utf-8", "surrogateescape")


def _header(path: Path, lines: Iterator[str]) -> tuple[int, list[str], str]:
    """Return the line number of the header, the column names, and their separator.

    Spreadsheets write `;` if the comma is the decimal separator, and Excel reads a first line such
    as `sep=;`.
    """
    delimiters = _DELIMITERS
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == 1 and (named := _NAMED.fullmatch(line)):
            delimiters = named[1]
            continue
        tried = {each: _split(line, each) for each in delimiters}
        delimiter = max(tried, key=lambda each: len(tried[each]))
        names = [name.strip() for name in tried[delimiter]]
        twice = {name for name, times in Counter(names).items() if name and times > 1}
        if twice:
            raise DataError(
                f"{path}:{number}: has two columns named {shorten(min(twice))}: rename one of them"
            )
        return number, names, delimiter
    raise DataError(f"{path}: is empty: it needs a line of column names, then one row per line")


def _split(line: str, delimiter: str) -> Sequence[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error:
        return [line]


def _object(names: Sequence[str], cells: Iterable[str]) -> dict[str, Any] | BadRow:
    values = list(cells)
    if len(values) > len(names) and any(values[len(names) :]):
        detail = f"{len(values)} cells, {len(names)} columns: quote values that contain a separator"
        return BadRow("more cells than columns", detail)
    found: dict[str, Any] = {
        name: value or None for name, value in zip(names, values, strict=False) if name
    }
    try:
        for value in filter(None, found.values()):
            value.encode("utf-8")
    except UnicodeEncodeError:
        return BadRow("not UTF-8", "save it as CSV UTF-8")
    return found
