"""Data files of every kind to rows: JSON lines, a JSON array, either of them gzipped, parquet.

What a file is, its first bytes tell; its name is not asked.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlxtune.core.data.bad_rows import TOO_DEEP, BadRow, json_type
from mlxtune.errors import DataError, one_line, shorten

# The layout of mlx-lm's data folders, and the other kinds of file in place of JSON lines.
_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_HEAD = 8192
# How much is read to find out that one object spans lines, when the first line is none.
_ONE_OBJECT = 1 << 26
# Bytes of a row, and of a file that is read as a whole: a small gzip file may hold any number.
_MAX_LINE, _MAX_ARRAY = 1 << 26, 1 << 30
_ROWS_AT_ONCE = 256
# What the file holds may be anything, so a row is what comes out of the reader or a reason.
NumberedRow = tuple[int, dict[str, Any] | BadRow]


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files to train on, and those to validate on that came with them."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def resolve(paths: Sequence[Path], option: str = "--data") -> DataFiles:
    """Find the files that paths stand for; `option` is what named them.

    A file stands for itself, a folder for the `train` and `valid` files in it.

    Raises DataError when a path is missing, is a folder that holds no such file or that `option`
    does not take, and when a file is named twice.
    """
    train: list[Path] = []
    validation: list[Path] = []
    for path in paths:
        if stat.S_ISDIR(_stat(path, option).st_mode):
            files = _in_folder(path, option)
            train += files.train
            validation += files.validation
        else:
            train.append(path)
    seen: dict[tuple[int, int], Path] = {}
    for path in (*train, *validation):
        found = _stat(path, option)
        # Not the name, for links and disks that ignore case give one file several.
        key = (found.st_dev, found.st_ino)
        if (other := seen.get(key)) is not None:
            same = "" if other == path else f", as {other}"
            raise DataError(f"{path}: is given twice{same}: name each file once in {option}")
        seen[key] = path
    return DataFiles(tuple(train), tuple(validation))


def check_data_file(path: Path, option: str = "--data") -> None:
    """Raise DataError unless the path can be read and looks like data; `option` is what named it.

    A folder is good for --data when the files in it are.
    """
    if stat.S_ISDIR(_stat(path, option).st_mode):
        files = _in_folder(path, option)
        for file in (*files.train, *files.validation):
            _head(file, option)
    else:
        _head(path, option)


def read_objects(path: Path) -> Iterator[NumberedRow]:
    """Yield the number of each row, from 1, and its object, or the reason why it has none.

    A row of JSON lines is a line that is neither blank nor a comment (`#` first), and its number
    is the line's. Lines end in LF or CRLF; a UTF-8 byte order mark is dropped. A row of a JSON
    array or of parquet is an element, numbered likewise.

    Only a JSON array is held in memory as a whole. Raises DataError when the file cannot be read.
    """
    head = _head(path, "--data")
    if head.startswith(_PARQUET):
        yield from _parquet_rows(path)
    elif _is_array(head):
        yield from _array_rows(path)
    else:
        yield from _line_rows(path)


def numbers_lines(path: Path) -> bool:
    """Tell whether rows of the file are numbered by line. Raises DataError when it is no data."""
    head = _head(path, "--data")
    return not head.startswith(_PARQUET) and not _is_array(head)


# Paths


def _stat(path: Path, option: str) -> os.stat_result:
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, option) from error
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        # It is read more than once.
        raise DataError(f"{path}: is no regular file: save the data in one")
    return found


def _in_folder(folder: Path, option: str) -> DataFiles:
    if option != "--data":
        raise DataError(f"{folder}: is a folder: name a file in it")
    try:
        there = sorted(f"{path.name}{'/' * path.is_dir()}" for path in folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error, option) from error
    train, validation = _named(folder, "train", there), _named(folder, "valid", there)
    if not train:
        looked_for = ", ".join(f"train{ending}" for ending in _ENDINGS)
        holds = ", ".join(map(shorten, there[:8])) + ", …" * (len(there) > 8) or "nothing"
        raise DataError(
            f"{folder}: is a folder without a file to train on: looked for {looked_for}; "
            f"it holds {holds}"
        )
    return DataFiles(train, validation)


def held_out_file(folder: Path) -> Path:
    """Return the `test` file of a folder, or else its `valid` file. Raises DataError."""
    try:
        there = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    except OSError as error:
        raise _unreadable(folder, error) from error
    found = _named(folder, "test", there) or _named(folder, "valid", there)
    if not found:
        raise DataError(
            f"{folder}: is a folder without test.jsonl and valid.jsonl: name the file to evaluate"
        )
    return found[0]


def _named(folder: Path, stem: str, there: list[str]) -> tuple[Path, ...]:
    """Return the one file of that name without its ending, if there is one."""
    found = [name for ending in _ENDINGS if (name := stem + ending) in there]
    if len(found) > 1:
        raise DataError(
            f"{folder}: is a folder with {' and '.join(found)}: keep one of them in it, "
            "or name the files to train on"
        )
    return tuple(folder / name for name in found)


def _head(path: Path, option: str) -> bytes:
    """Return the first bytes, unzipped. Raises DataError when they cannot be those of data."""
    try:
        with _open(path) as file:
            head = file.read(_HEAD)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise _unreadable(path, error, option) from error
    if not head:
        raise DataError(f"{path}: is empty: it needs one JSON object a line")
    if head.startswith(_PARQUET):
        if isinstance(file, gzip.GzipFile):
            raise DataError(f"{path}: is gzipped parquet: unzip it, for parquet is compressed")
    elif b"\0" in head:
        raise DataError(f"{path}: is a binary file: save it as JSON lines in UTF-8, or as parquet")
    return head


def _is_array(head: bytes) -> bool:
    return head.removeprefix(_UTF8_BOM).lstrip().startswith(b"[")


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path, "rb") if zipped else path.open("rb")


def _unreadable(path: Path, error: Exception, option: str = "--data") -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: no such file: check {option}")
    if isinstance(error, IsADirectoryError):
        return DataError(f"{path}: is a folder: name a file in it")
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return DataError(
            f"{path}: is a damaged gzip file ({_said(error)}): copy or compress it again"
        )
    reason = error.strerror if isinstance(error, OSError) else None
    return DataError(f"{path}: cannot be read: {reason or _said(error)}")


def _said(error: Exception) -> str:
    # Libraries quote the bytes that they stumble on.
    return "".join(c if c.isprintable() else "\ufffd" for c in one_line(error))


# JSON


def _line_rows(path: Path) -> Iterator[NumberedRow]:
    first = True
    try:
        with _open(path) as file:
            for number, line in enumerate(_lines(file, path), start=1):
                content = line.removeprefix(_UTF8_BOM) if number == 1 else line
                content = content.strip()
                if not content or content.startswith(b"#"):
                    continue
                parsed = _parse(content)
                if first and isinstance(parsed, BadRow):
                    _refuse_object_over_lines(path)
                first = False
                yield number, parsed
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _lines(file: IO[bytes] | gzip.GzipFile, path: Path) -> Iterator[bytes]:
    number = 0
    while line := file.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE and not line.endswith(b"\n"):
            raise DataError(
                f"{path}:{number}: is longer than {_MAX_LINE:,} bytes: write one JSON object a line"
            )
        yield line


def _parse(line: bytes) -> dict[str, Any] | BadRow:
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", f"byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRow("not valid JSON", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return BadRow(TOO_DEEP)
    except ValueError as error:  # a number of thousands of digits
        return BadRow("not valid JSON", str(error))
    return _object(content)


def _object(content: Any) -> dict[str, Any] | BadRow:
    return content if isinstance(content, dict) else BadRow("not a JSON object", json_type(content))


def _refuse_object_over_lines(path: Path) -> None:
    """Raise DataError where the file begins with an object written over several lines."""
    with _open(path) as file:
        head = file.read(_ONE_OBJECT).removeprefix(_UTF8_BOM)
    text = head.decode("utf-8", errors="replace").lstrip()
    try:
        content, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return
    if isinstance(content, dict) and "\n" in text[:end]:
        raise DataError(
            f"{path}: has a JSON object over several lines: write each on a line of its own, "
            "or all of them as one JSON array"
        )


def _array_rows(path: Path) -> Iterator[NumberedRow]:
    try:
        with _open(path) as file:
            content = file.read(_MAX_ARRAY + 1).removeprefix(_UTF8_BOM)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    if len(content) > _MAX_ARRAY:
        raise DataError(
            f"{path}: is a JSON array of more than {_MAX_ARRAY:,} bytes: write one JSON object a "
            "line instead, which are read one by one"
        )
    try:
        elements = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8: save the file in UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not a valid JSON array: {error.msg} at column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:
        # Neither a number of thousands of digits nor what is nested too deeply has a position.
        reason = TOO_DEEP if isinstance(error, RecursionError) else _said(error)
        raise DataError(
            f"{path}: not a valid JSON array: {reason}: write one JSON object a line, "
            "where only the bad one is skipped"
        ) from error
    for number, element in enumerate(elements, start=1):
        yield number, _object(element)


# Parquet


def _parquet_rows(path: Path) -> Iterator[NumberedRow]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow: pip install 'mlxtune[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: is a damaged parquet file ({_said(error)}): copy or write it again"
        ) from error


def _batch_rows(batch: Any) -> list[dict[str, Any] | BadRow]:
    """Return the rows of a pyarrow RecordBatch; where it cannot be converted, one by one."""
    from pyarrow import types

    try:
        return [_plain(row) for row in batch.to_pylist(maps_as_pydicts="lossy")]
    except (ValueError, OverflowError) as error:
        # Times too fine or too far off for Python's: no text to train on stands there.
        other = [i for i, kind in enumerate(batch.schema.types) if not types.is_temporal(kind)]
        if 0 < len(other) < batch.num_columns:
            return _batch_rows(batch.select(other))
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]
        utf8 = isinstance(error, UnicodeDecodeError)
        return [BadRow("not UTF-8" if utf8 else "a value cannot be read", _said(error))]


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it, without the keys that are null.

    A parquet file gives all rows the same keys, so that null and absent are one there.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        # Bytes that are no text become halves of surrogate pairs, which are refused where used.
        return value.decode("utf-8", errors="surrogateescape")
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
