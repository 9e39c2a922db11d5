"""Reads rows of data files: JSON lines, a JSON array or CSV, each perhaps gzipped, and parquet.

The first bytes of a file decide its kind; only CSV and TSV are recognised by name. A file of a few
kilobytes can hold gigabytes, so the unpacked size is limited, and parquet is read by pyarrow in a
process whose memory and time are limited: pyarrow unpacks many rows before any can be counted.
"""

import csv
import gzip
import importlib.util
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mlxtune.core.data.problems import (
    PARQUET,
    UTF8_BOM,
    BadRow,
    check_values,
    has_elements,
    is_zipped,
    json_type,
    parse_json,
    read_head,
)
from mlxtune.core.data.sources import parquet_helper
from mlxtune.core.files.processes import LimitedProcess, ProcessEnded
from mlxtune.core.files.reading import open_regular, open_zipped
from mlxtune.core.formatting import byte_size
from mlxtune.errors import DataError, one_line, shorten

_MAX_LINE_BYTES = 1 << 26
# The maximum length of a JSON array in bytes. Arrays are read whole, and one character beyond 16
# bits makes every character take 32 bits in memory.
_MAX_ARRAY_BYTES = 1 << 27
# The maximum number of consecutive blank lines and comments; reading a million takes a second.
_MAX_ROWLESS = 1_000_000
# The number of unpacked bytes that any file may have, and the additional number for each packed
# byte. Files whose rows share one long system prompt, the most repetitive files that people train
# on, unpack to some 100 times their size.
_ALWAYS, _PER_BYTE = 2**24, 200
# The maximum number of bytes that one byte of gzip can unpack to.
_MOST_OF_GZIP = 1032
_PIECE = 2**20
# The memory of the process that reads parquet, and the maximum length of a row's JSON.
_PARQUET_MEMORY, _MAX_ROW = 2**30, 2**26
TABLE_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
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
# The number of a row, and its object or the reason why it has none.
NumberedRow = tuple[int, dict[str, Any] | BadRow]


@contextmanager
def reading(path: Path, option: str = "--data") -> Iterator[None]:
    """Turn errors of reading a path that `option` names into DataError."""
    try:
        yield
    except FileNotFoundError as error:
        several = ", and repeat it for each of several files" * ("," in str(path))
        raise DataError(f"{path}: no such file: check {option}{several}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: is a damaged gzip file ({one_line(error)}): copy or compress it again"
        ) from error
    except DataError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"{path}: cannot be read: {reason or one_line(error)}") from error


def read_objects(path: Path) -> Iterator[NumberedRow]:
    """Yield each row's number, from 1, and its object or the reason why it has none.

    A row of JSON lines is a line that is neither blank nor a comment (`#` first), and its number
    is the line's. Lines end in LF or CRLF; a UTF-8 byte order mark is dropped. A row of CSV or TSV
    has the number of its first line. A row of a JSON array or of parquet is an element, and its
    number is the element's.

    Only arrays are held in memory as a whole. Raises DataError when a file cannot be read, or
    unpacks to far more than its size.
    """
    head = _head(path)
    if head.startswith(PARQUET):
        return _parquet_rows(path)
    if is_zipped(path):
        _check_gzip(path)
    if _is_table(path, head):
        return _table_rows(path)
    return _array_rows(path) if has_elements(head) else _line_rows(path)


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, unzipped. Raises DataError when they are not data."""
    with reading(path):
        head = read_head(path)
    if not head:
        raise DataError(f"{path}: is empty: it needs one JSON object per line")
    _check_no_spreadsheet(path, head)
    if b"\0" in head and not head.startswith(PARQUET):
        raise DataError(f"{path}: is a binary file: save it as JSON lines in UTF-8, or as parquet")
    start = head.removeprefix(UTF8_BOM).lstrip()
    if path.suffix.lower() in (".txt", ".md") and not start.startswith((b"{", b"[", b"#")):
        raise DataError(
            f'{path}: is plain text: write JSON lines, such as {{"text": "…"}} or '
            '{"messages": […]}'
        )
    return head


def _open(path: Path) -> IO[bytes]:
    return open_zipped(path) if is_zipped(path) else open_regular(path)


def _line_rows(path: Path) -> Iterator[NumberedRow]:
    number = last = 0
    with reading(path), _open(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise DataError(
                    f"{path}:{number}: is longer than {_MAX_LINE_BYTES:,} bytes: write one JSON "
                    "object per line"
                )
            content = (line.removeprefix(UTF8_BOM) if number == 1 else line).strip()
            if content and not content.startswith(b"#"):
                last = number
                yield number, _parse(content)
            elif number - last > _MAX_ROWLESS:
                raise DataError(
                    f"{path}:{number}: is the last of {_MAX_ROWLESS:,} consecutive blank lines "
                    "and comments: remove them"
                )


def _parse(line: bytes) -> dict[str, Any] | BadRow:
    if line == b"{":
        advice = "write each on one line, or all as one JSON array, without an object around it"
        return BadRow("a JSON object over several lines", advice)
    try:
        return _object(parse_json(line))
    except BadRow as problem:
        return problem


def _object(content: Any) -> dict[str, Any] | BadRow:
    return content if isinstance(content, dict) else BadRow("not a JSON object", json_type(content))


def _array_rows(path: Path) -> Iterator[NumberedRow]:
    try:
        with reading(path), _open(path) as file:
            content = file.read(_MAX_ARRAY_BYTES + 1).removeprefix(UTF8_BOM)
        if len(content) > _MAX_ARRAY_BYTES:
            raise BadRow(f"a JSON array of more than {_MAX_ARRAY_BYTES:,} bytes")
        elements = parse_json(content, "not a valid JSON array")
    except BadRow as problem:
        advice = "write one JSON object per line, so that only the bad one is skipped"
        if problem.detail.startswith("Extra data at line"):
            advice = 'write each line as an object, such as {"messages": […]}'
        raise DataError(f"{path}: {problem}: {advice}") from problem
    del content
    yield from enumerate(map(_object, elements), start=1)


# Tables


def _is_table(path: Path, head: bytes) -> bool:
    """Return whether a file is named as CSV or TSV, and does not start like JSON."""
    return path.name.lower().endswith(TABLE_ENDINGS) and not head.lstrip().startswith((b"{", b"["))


def _check_no_spreadsheet(path: Path, head: bytes) -> None:
    """Raise DataError for a spreadsheet, and for text in UTF-16, which Excel can write."""
    for start, kind in _SPREADSHEETS.items():
        if head.startswith(start):
            raise DataError(f"{path}: is {kind}: {_EXPORT}")
    if head.startswith(_UTF16):
        raise DataError(f"{path}: is text in UTF-16: save it in UTF-8, from Excel as CSV UTF-8")


def _table_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield rows as `read_objects` does; empty cells are None."""
    csv.field_size_limit(_MAX_LINE_BYTES)
    with reading(path), _open(path) as file:
        lines = _text_lines(path, file)
        start, names, delimiter = _table_header(path, lines)
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
                yield number, _row_of_cells(names, cells)


def _text_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    number = 0
    while line := file.readline(_MAX_LINE_BYTES):
        number += 1
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise DataError(f"{path}:{number}: is longer than {_MAX_LINE_BYTES:,} bytes: split it")
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        # Bytes in another encoding are reported with their row.
        yield text.decode("utf-8", "surrogateescape")


def _table_header(path: Path, lines: Iterator[str]) -> tuple[int, list[str], str]:
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
        tried = {each: _cells(line, each) for each in delimiters}
        delimiter = max(tried, key=lambda each: len(tried[each]))
        names = [name.strip() for name in tried[delimiter]]
        twice = {name for name, times in Counter(names).items() if name and times > 1}
        if twice:
            raise DataError(
                f"{path}:{number}: has two columns named {shorten(min(twice))}: rename one of them"
            )
        return number, names, delimiter
    raise DataError(f"{path}: is empty: it needs a line of column names, then one row per line")


def _cells(line: str, delimiter: str) -> Sequence[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error:
        return [line]


def _row_of_cells(names: Sequence[str], cells: Iterable[str]) -> dict[str, Any] | BadRow:
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


# Unpacked sizes


def _most_bytes(size: int) -> int:
    return _ALWAYS + _PER_BYTE * size


def _expands(path: Path, size: int) -> DataError:
    return DataError(
        f"{path}: unpacks from {byte_size(size)} to more than {byte_size(_most_bytes(size))}, far "
        "more than conversations do: if you trust the file, unpack it to JSON lines first"
    )


def _check_gzip(path: Path) -> None:
    """Raise DataError for a gzip file that unpacks to too much. A damaged file fails when read."""
    size = path.stat().st_size
    left = _most_bytes(size)
    if size * _MOST_OF_GZIP <= left:
        return
    with suppress(EOFError, zlib.error, gzip.BadGzipFile), open_zipped(path) as file:
        while piece := file.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise _expands(path, size)


# Parquet


def _parquet_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield each row's number, from 1, and its object or the reason why it has none.

    Raises DataError for a damaged file, and for a file that unpacks to far more than its size.
    """
    if not _has_pyarrow():
        raise DataError(f"{path}: needs pyarrow: pip install 'mlxtune[parquet]'")
    size = path.stat().st_size
    left = _most_bytes(size)
    process = LimitedProcess(Path(parquet_helper.__file__), _PARQUET_MEMORY, str(path.absolute()))
    number = 0
    with closing(process):
        while True:
            line = _parquet_line(process, path, size)
            left -= len(line)
            if left < 0:
                raise _expands(path, size)
            row = _parquet_row(line)
            if isinstance(row, str):
                break
            number += 1
            yield number, row
    if row:
        raise _damaged(path, row)


def _has_pyarrow() -> bool:
    try:
        return importlib.util.find_spec("pyarrow") is not None
    except ValueError:  # some tests hide pyarrow
        return False


def _parquet_line(process: LimitedProcess, path: Path, size: int) -> bytes:
    try:
        return process.read_line(_MAX_ROW)
    except ProcessEnded as error:
        if error.reason in ("memory", "length"):
            raise _expands(path, size) from error
        if error.reason == "time":
            raise _damaged(path, "reading a few rows takes more than 10 s") from error
        raise _damaged(path, f"the process that reads it ended with {error.reason}") from error


def _parquet_row(line: bytes) -> dict[str, Any] | BadRow | str:
    """Return a row's object, or the reason why it has none; for the last line, the string in it."""
    try:
        check_values(line)
        content: dict[str, Any] | list[str] | str = json.loads(line, object_hook=_present)
    except BadRow as problem:
        return problem
    except RecursionError:
        return BadRow("nested too deeply")
    return BadRow(content[0], one_line(content[1])) if isinstance(content, list) else content


def _present(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its nulls: all rows of a parquet file have the same keys."""
    return {key: item for key, item in value.items() if item is not None}


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: is a damaged parquet file ({one_line(reason)}): copy or write it again"
    )
