"""Reads rows of data files: JSON lines, a JSON array or text, each perhaps gzipped, and parquet.

The first bytes of a file decide its kind; only CSV, TSV and plain text, which text_rows.py reads,
are recognised by name. ChatGPT's export may be the archive that one gets. A file of a few
kilobytes can hold gigabytes, so the unpacked size is limited, and parquet is read by pyarrow in a
process whose memory and time are limited: pyarrow unpacks many rows before any can be counted.
"""

import gzip
import importlib.util
import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mlxtune.core.data.problems import (
    PARQUET,
    UTF8_BOM,
    UTF16,
    ZIP,
    BadRowError,
    check_value_count,
    has_elements,
    is_zipped,
    json_type,
    open_data,
    parse_row_json,
    read_head,
)
from mlxtune.core.data.sources import parquet_helper
from mlxtune.core.data.sources.datafiles import CHATGPT_FILE, PARQUET_REMEDY, needs, reading
from mlxtune.core.data.sources.nulls import without_nulls
from mlxtune.core.data.sources.text_rows import (
    NumberedRow,
    is_text_file,
    text_rows,
)
from mlxtune.core.files.processes import LimitedProcess, ProcessEndedError
from mlxtune.core.files.reading import is_lfs_pointer, open_regular, open_zipped, read_end
from mlxtune.core.formatting import byte_size
from mlxtune.core.machine.installation import installs_extra
from mlxtune.errors import DataError, one_line

_MAX_LINE_BYTES = 1 << 26
# The maximum length of a JSON array in bytes. Arrays are read whole, and one character beyond 16
# bits makes every character take 32 bits in memory.
_MAX_ARRAY_BYTES = 1 << 27
# The maximum number of consecutive blank lines and comments; reading a million takes a second.
_MAX_ROWLESS = 1_000_000
# The number of unpacked bytes that any file may have, and the additional number for each packed
# byte. Files whose rows share one long system prompt, the most repetitive files that people train
# on, unpack to some 100 times their size.
_BASE_BYTES, _MAX_RATIO = 2**24, 200
# The maximum number of bytes that one byte of gzip can unpack to.
_MAX_GZIP_RATIO = 1032
_PIECE = 2**20
# The memory of the process that reads parquet, and the maximum length of a row's JSON.
_PARQUET_MEMORY, _MAX_ROW = 2**30, 2**26
# The record at the end of an archive, the length of all records there without a comment, and the
# longest list of files.
_ZIP_END, _ZIP_END_BYTES, _MAX_ZIP_LIST = b"PK\x05\x06", 98, 2**24
_EXPORT_REMEDY = (
    "save it as CSV: in Excel, File > Save As > CSV UTF-8; in Numbers, File > Export To > CSV; in "
    "LibreOffice or Google Sheets likewise"
)
# Files of other kinds by their first bytes, in lower case, each with the remedy.
_OTHER_KINDS = {
    b"\xd0\xcf\x11\xe0": f"is an Excel file: {_EXPORT_REMEDY}",
    b"bzh": "is packed by bzip2: unpack it with bunzip2",
    b"\xfd7zxz\0": "is packed by xz: unpack it with unxz",
    b"(\xb5/\xfd": "is packed by zstd: unpack it with unzstd",
    b"7z\xbc\xaf": "is a 7z archive: unpack it, and name a file in it",
    b"rar!": "is a RAR archive: unpack it, and name a file in it",
    b"%pdf-": "is a PDF: save its text as .txt",
    b"\xff\xff\xff\xff": f"is an Arrow file: {PARQUET_REMEDY}",
    b"arrow1": f"is an Arrow file: {PARQUET_REMEDY}",
    b"sqlite format 3": "is a database: export a table as CSV",
    b"<!doctype html": "is a web page: download the data itself",
    b"<html": "is a web page: download the data itself",
    b"<?xml": "is XML: write JSON lines, one object per row",
}
_TAR_MAGIC, _TAR_OFFSET = b"ustar", 257
# The names of parts of spreadsheets and of text documents, which are zip archives.
_SHEETS = (b"xl/", b"opendocument.spreadsheet", b"Index/Document.iwa")
_DOCUMENTS = (b"word/", b"opendocument.text")


def read_objects(
    path: Path, *, texts: bool = False, split_at: str | None = None
) -> Iterator[NumberedRow]:
    """Yield each row's number, from 1, and its object or the reason why it has none.

    A row of JSON lines is a line that is neither blank nor a comment (`#` first), and its number
    is the line's. Lines end in LF or CRLF; a UTF-8 byte order mark is dropped. A row of CSV or TSV
    has the number of its first line. A row of a JSON array or of parquet is an element, and its
    number is the element's. With `texts`, a file of plain text is a row, or several with
    `split_at`. Objects in a row have no nulls but those that a template writes.

    Only arrays are held in memory as a whole. Raises DataError when a file cannot be read, or
    unpacks to far more than its size.
    """
    for number, row, _ in read_unchanged(path, texts=texts, split_at=split_at):
        yield number, row


def read_unchanged(
    path: Path, *, texts: bool = False, split_at: str | None = None
) -> Iterator[tuple[int, dict[str, Any] | BadRowError, dict[str, Any] | BadRowError]]:
    """Yield each row as `read_objects` does, followed by the row with its nulls."""
    head = _head(path)
    for number, row in _read_objects(path, head, texts, split_at):
        yield number, _present(row, from_arrow=head.startswith(PARQUET)), row


def _present(
    row: dict[str, Any] | BadRowError, *, from_arrow: bool
) -> dict[str, Any] | BadRowError:
    try:
        if isinstance(row, BadRowError) or not has_nulls(row):
            return row
        return without_nulls(row, from_arrow=from_arrow)
    except RecursionError:
        return BadRowError("JSON nested too deeply")


def has_nulls(value: Any) -> bool:
    """Return whether a row, or a value in it, is or holds null or NaN."""
    if isinstance(value, dict | list):
        return any(map(has_nulls, value.values() if isinstance(value, dict) else value))
    return value is None or value != value


def _read_objects(
    path: Path, head: bytes, texts: bool, split_at: str | None
) -> Iterator[NumberedRow]:
    if head.startswith(PARQUET):
        return _parquet_rows(path)
    if head.startswith(ZIP):
        return _archive_rows(path)
    if is_zipped(path):
        _check_gzip(path)
    if is_text_file(path) and (rows := text_rows(path, head, texts, split_at)) is not None:
        return rows
    return _array_rows(path) if has_elements(head) else _line_rows(path)


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, unzipped. Raises DataError when they are not data."""
    with reading(path):
        head = read_head(path)
    if not head:
        raise DataError(f"{path} is empty: it needs {needs(path)}")
    if head.startswith(ZIP) and _exported(path):
        return head
    if (other := _other_kind(path, head)) is not None:
        raise DataError(f"{path} {other}")
    if head.startswith(UTF16):
        return head if is_text_file(path) else head.decode("utf-16", "ignore").encode()
    if is_lfs_pointer(head[:48]):
        raise DataError(f"{path} is a Git LFS pointer: run git lfs pull in its folder")
    if b"\0" in head and not head.startswith(PARQUET):
        raise DataError(f"{path} is a binary file: save it as JSON lines in UTF-8, or as parquet")
    return head


def _other_kind(path: Path, head: bytes) -> str | None:
    """Return what a file is if it holds no rows, and the remedy; None for any other file."""
    if head.startswith(ZIP):
        named = path.name.lower().endswith((".xlsx", ".ods", ".numbers"))
        if named or any(part in head for part in _SHEETS):
            return f"is a spreadsheet: {_EXPORT_REMEDY}"
        if any(part in head for part in _DOCUMENTS):
            return "is a text document: save it as .txt"
        return "is an archive: unpack it, and name a file in it"
    if head[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        return "is a tar archive: unpack it, and name a file in it"
    if path.name.lower().endswith((".yaml", ".yml")):
        return "is YAML: write JSON lines, one object per row"
    if is_text_file(path) and b"\0" not in head:
        return None
    start = head.removeprefix(UTF8_BOM).lstrip()[:16].lower()
    return next((kind for first, kind in _OTHER_KINDS.items() if start.startswith(first)), None)


class _FromUtf16:
    """Reads a file in UTF-16 as UTF-8."""

    def __init__(self, file: IO[bytes]) -> None:
        self._text = io.TextIOWrapper(file, "utf-16", "replace", newline="\n")

    def read(self, size: int) -> bytes:
        return self._text.read(size).encode()

    def readline(self, size: int) -> bytes:
        return self._text.readline(size).encode()


@contextmanager
def _open_json(path: Path) -> Iterator["IO[bytes] | _FromUtf16"]:
    """Open a file of JSON as UTF-8. Raises DataError."""
    with reading(path), open_data(path) as file:
        in_utf16 = file.read(2) in UTF16
        file.seek(0)
        text = _FromUtf16(file) if in_utf16 else file
        yield text


def _line_rows(path: Path) -> Iterator[NumberedRow]:
    number = last = 0
    with _open_json(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) >= _MAX_LINE_BYTES and not line.endswith(b"\n"):
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


def _parse(line: bytes) -> dict[str, Any] | BadRowError:
    if line == b"{":
        advice = "write each on one line, or all as one JSON array, without an object around it"
        return BadRowError("a JSON object over several lines", advice)
    try:
        return _object(parse_row_json(line))
    except BadRowError as problem:
        return problem


def _object(content: Any) -> dict[str, Any] | BadRowError:
    if isinstance(content, dict):
        return content
    first = content[0] if isinstance(content, list) and content else None
    is_chat = isinstance(first, dict) and ("role" in first or "from" in first)
    remedy = ': write {"messages": […]} around it' * is_chat
    return BadRowError("not a JSON object", f"{json_type(content)}{remedy}")


def _array_rows(path: Path) -> Iterator[NumberedRow]:
    with _open_json(path) as file:
        content = file.read(_MAX_ARRAY_BYTES + 1)
    yield from enumerate(_elements(path, content), start=1)


def _elements(path: Path, content: bytes) -> Iterator[dict[str, Any] | BadRowError]:
    """Yield the elements of a JSON array. Raises DataError."""
    try:
        if len(content) > _MAX_ARRAY_BYTES:
            raise BadRowError(f"a JSON array of more than {_MAX_ARRAY_BYTES:,} bytes")
        elements = parse_row_json(content.removeprefix(UTF8_BOM), "not a valid JSON array")
    except BadRowError as problem:
        advice = "write one JSON object per line, so that only the bad one is skipped"
        if problem.detail.startswith("Extra data at line"):
            advice = 'write each line as an object, such as {"messages": […]}'
        raise DataError(f"{path}: {problem}: {advice}") from problem
    del content
    yield from map(_object, elements)


# ChatGPT's export


def _exported(path: Path) -> list[zipfile.ZipInfo]:
    """Return the files of conversations in an archive; none if it is not ChatGPT's export.

    Raises DataError.
    """
    try:
        with reading(path):
            if _zip_list_size(read_end(path, _ZIP_END_BYTES + 2**16)) > _MAX_ZIP_LIST:
                return []
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                files = archive.infolist()
    except zipfile.BadZipFile as error:
        raise _damage_error(path, "zip", str(error)) from error
    return sorted(
        (each for each in files if CHATGPT_FILE.fullmatch(each.filename.rpartition("/")[2])),
        key=lambda each: each.filename,
    )


def _zip_list_size(end: bytes) -> float:
    """Return the size of an archive's list of files, from the records at its end, as zipfile does.

    Large archives have another record before the last.
    """
    at = end.rfind(_ZIP_END)
    large = end[max(at - 76, 0) : max(at, 0)]
    if at < 0:
        return math.inf
    if large[-20:].startswith(b"PK\x06\x07") and large.startswith(b"PK\x06\x06"):
        return int.from_bytes(large[40:48], "little")
    return int.from_bytes(end[at + 12 : at + 16], "little")


def _archive_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield the conversations of an archive from ChatGPT, numbered from 1. Raises DataError."""
    size, number = path.stat().st_size, 0
    left = min(_MAX_ARRAY_BYTES, _most_bytes(size))
    for each in _exported(path):
        with reading(path):
            try:
                with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                    if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise DataError(f"{path} has an unusual compression: unpack it")
                    content = archive.open(each).read(left + 1)
            except (zipfile.BadZipFile, RuntimeError, EOFError, zlib.error) as error:
                raise _damage_error(path, "zip", str(error)) from error
        left -= len(content)
        if left < 0:
            raise _expands(path, size)
        for element in _elements(path, content):
            number += 1
            yield number, element


# Unpacked sizes


def _most_bytes(size: int) -> int:
    return _BASE_BYTES + _MAX_RATIO * size


def _expands(path: Path, size: int) -> DataError:
    return DataError(
        f"{path}: unpacks from {byte_size(size)} to more than {byte_size(_most_bytes(size))}, far "
        "more than conversations do: if you trust the file, unpack it to JSON lines first"
    )


def _check_gzip(path: Path) -> None:
    """Raise DataError for a gzip file that unpacks to too much. A damaged file fails when read."""
    size = path.stat().st_size
    left = _most_bytes(size)
    if size * _MAX_GZIP_RATIO <= left:
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
        raise DataError(f"{path} needs pyarrow: {installs_extra('parquet')}")
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
        raise _damage_error(path, "parquet", row)


def _has_pyarrow() -> bool:
    try:
        return importlib.util.find_spec("pyarrow") is not None
    except ValueError:  # some tests hide pyarrow
        return False


def _parquet_line(process: LimitedProcess, path: Path, size: int) -> bytes:
    try:
        return process.read_line(_MAX_ROW)
    except ProcessEndedError as error:
        if error.reason in ("memory", "length"):
            raise _expands(path, size) from error
        if error.reason == "time":
            raise _damage_error(
                path, "parquet", "reading a few rows takes more than 10 s"
            ) from error
        raise _damage_error(
            path, "parquet", f"the process that reads it ended with {error.reason}"
        ) from error


def _parquet_row(line: bytes) -> dict[str, Any] | BadRowError | str:
    """Return a row's object, or the reason why it has none; for the last line, the string in it."""
    try:
        check_value_count(line)
        content: dict[str, Any] | list[str] | str = json.loads(line)
    except BadRowError as problem:
        return problem
    except RecursionError:
        return BadRowError("nested too deeply")
    if isinstance(content, list):
        return BadRowError(content[0], one_line(content[1]))
    # All rows of a parquet file have the same keys.
    return (
        content if isinstance(content, str) else {k: v for k, v in content.items() if v is not None}
    )


def _damage_error(path: Path, kind: str, reason: str) -> DataError:
    return DataError(
        f"{path} is a damaged {kind} file ({one_line(reason)}): copy or write it again"
    )
