"""From data files to rows: JSON lines, a JSON array, either of them gzipped, or parquet.

The first bytes decide what a file is, not its name.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlxtune.core.data.bad_rows import TOO_DEEP, BadRow, json_type
from mlxtune.errors import DataError, one_line, shorten

# File names in a data folder: mlx-lm's, and the same with the endings of the other kinds.
_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_HEAD_BYTES = 8192
# When the first line is not JSON, this much is read to see whether an object spans lines.
_SPANNING_OBJECT_BYTES = 1 << 26
# A small gzip file may unpack to any size.
_MAX_LINE_BYTES, _MAX_ARRAY_BYTES = 1 << 26, 1 << 30
_PARQUET_BATCH_ROWS = 256
# The number of a row, and its object or the reason why it has none.
NumberedRow = tuple[int, dict[str, Any] | BadRow]


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files to train on, and the validation files in the same folders."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]

    @property
    def all(self) -> tuple[Path, ...]:
        """The training files, then the validation files."""
        return (*self.train, *self.validation)


def find_data_files(paths: Sequence[Path], option: str = "--data") -> DataFiles:
    """Return the files that `option` names: a folder stands for its `train` and `valid` files.

    Raises DataError when a path is missing, when a folder has no `train` file or `option` takes no
    folder, and when a file is named twice.
    """
    train: list[Path] = []
    validation: list[Path] = []
    for path in paths:
        if stat.S_ISDIR(_stat(path, option).st_mode):
            files = _files_in(path, option)
            train += files.train
            validation += files.validation
        else:
            train.append(path)
    seen: dict[tuple[int, int], Path] = {}
    for path in (*train, *validation):
        info = _stat(path, option)
        # With links, and on disks that ignore case, one file has several names.
        key = (info.st_dev, info.st_ino)
        if (other := seen.get(key)) is not None:
            same = "" if other == path else f", as {other}"
            raise DataError(f"{path}: is given twice{same}: name each file once in {option}")
        seen[key] = path
    return DataFiles(tuple(train), tuple(validation))


def check_data_file(path: Path, option: str = "--data") -> None:
    """Raise DataError unless the file, or each in a folder, can be read and looks like data."""
    is_folder = stat.S_ISDIR(_stat(path, option).st_mode)
    files = _files_in(path, option) if is_folder else DataFiles((path,), ())
    for file in files.all:
        _head(file, option)


def held_out_file(folder: Path) -> Path:
    """Return the folder's `test` file, or else its `valid` file. Raises DataError."""
    with _reading(folder):
        names = [path.name for path in folder.iterdir() if not path.is_dir()]
    files = _file_named("test", folder, names) or _file_named("valid", folder, names)
    if not files:
        raise DataError(
            f"{folder}: has neither test.jsonl nor valid.jsonl: name the file to evaluate"
        )
    return files[0]


def read_objects(path: Path) -> Iterator[NumberedRow]:
    """Yield each row's number, from 1, and its object or the reason why it has none.

    A row of JSON lines is a line that is neither blank nor a comment (`#` first), and its number
    is the line's. Lines end in LF or CRLF; a UTF-8 byte order mark is dropped. A row of a JSON
    array or of parquet is an element, and its number is the element's.

    Only a JSON array is held in memory as a whole. Raises DataError when the file cannot be read.
    """
    head = _head(path)
    if head.startswith(_PARQUET):
        return _parquet_rows(path)
    return _array_rows(path) if _is_array(head) else _line_rows(path)


def rows_are_lines(path: Path) -> bool:
    """Return whether row numbers are line numbers. Raises DataError if the file is not data."""
    head = _head(path)
    return not head.startswith(_PARQUET) and not _is_array(head)


# Paths


@contextmanager
def _reading(path: Path, option: str = "--data") -> Iterator[None]:
    """Turn the errors of reading a file or folder into DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file: check {option}") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder: name a file in it") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: is a damaged gzip file ({_printable(error)}): copy or compress it again"
        ) from error
    except DataError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"{path}: cannot be read: {reason or _printable(error)}") from error


def _printable(error: Exception) -> str:
    # Libraries quote the bytes that they cannot read.
    return "".join(c if c.isprintable() else "\ufffd" for c in one_line(error))


def _stat(path: Path, option: str) -> os.stat_result:
    with _reading(path, option):
        info = path.stat()
    # A pipe could not be read twice.
    if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
        raise DataError(f"{path}: is not a regular file: save the data in one")
    return info


def _files_in(folder: Path, option: str) -> DataFiles:
    if option != "--data":
        raise DataError(f"{folder}: is a folder: name a file in it")
    with _reading(folder, option):
        names = sorted(f"{path.name}{'/' * path.is_dir()}" for path in folder.iterdir())
    train, validation = (_file_named(stem, folder, names) for stem in ("train", "valid"))
    if not train:
        names_read = ", ".join(f"train{ending}" for ending in _ENDINGS)
        holds = ", ".join(map(shorten, names[:8])) + ", …" * (len(names) > 8) or "nothing"
        raise DataError(
            f"{folder}: has no file to train on (it holds {holds}): name a file in it, "
            f"or rename one to any of {names_read}"
        )
    return DataFiles(train, validation)


def _file_named(stem: str, folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Return the folder's file with this stem, if it has one."""
    matches = [name for ending in _ENDINGS if (name := stem + ending) in names]
    if len(matches) > 1:
        raise DataError(
            f"{folder}: holds {' and '.join(matches)}: keep one, or name the files to train on"
        )
    return tuple(folder / name for name in matches)


def _head(path: Path, option: str = "--data") -> bytes:
    """Return the first bytes, unzipped. Raises DataError when they are not data."""
    with _reading(path, option), _open(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise DataError(f"{path}: is empty: it needs one JSON object per line")
    if head.startswith(_PARQUET):
        if isinstance(file, gzip.GzipFile):
            raise DataError(
                f"{path}: is gzipped parquet: unzip it, as parquet is compressed already"
            )
    elif b"\0" in head:
        raise DataError(f"{path}: is a binary file: save it as JSON lines in UTF-8, or as parquet")
    return head


def _is_array(head: bytes) -> bool:
    return head.removeprefix(_UTF8_BOM).lstrip().startswith(b"[")


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path, "rb") if zipped else path.open("rb")


# JSON


def _line_rows(path: Path) -> Iterator[NumberedRow]:
    first = True
    for number, line in _lines(path):
        content = (line.removeprefix(_UTF8_BOM) if number == 1 else line).strip()
        if not content or content.startswith(b"#"):
            continue
        parsed = _parse(content)
        if first and isinstance(parsed, BadRow):
            _refuse_object_over_lines(path)
        first = False
        yield number, parsed


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    with _reading(path), _open(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise DataError(
                    f"{path}:{number}: is longer than {_MAX_LINE_BYTES:,} bytes: write one JSON "
                    "object per line"
                )
            yield number, line


def _parse(line: bytes) -> dict[str, Any] | BadRow:
    try:
        return _object(json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", f"byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRow("not valid JSON", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return BadRow(TOO_DEEP)
    except ValueError as error:  # a number with thousands of digits
        return BadRow("not valid JSON", str(error))


def _object(content: Any) -> dict[str, Any] | BadRow:
    return content if isinstance(content, dict) else BadRow("not a JSON object", json_type(content))


def _refuse_object_over_lines(path: Path) -> None:
    """Raise DataError if the file starts with an object written over several lines."""
    with _reading(path), _open(path) as file:
        head = file.read(_SPANNING_OBJECT_BYTES).removeprefix(_UTF8_BOM)
    text = head.decode("utf-8", errors="replace").lstrip()
    try:
        content, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return
    if isinstance(content, dict) and "\n" in text[:end]:
        raise DataError(
            f"{path}: has a JSON object over several lines: write each object on one line, "
            "or all of them as one JSON array"
        )


def _array_rows(path: Path) -> Iterator[NumberedRow]:
    with _reading(path), _open(path) as file:
        content = file.read(_MAX_ARRAY_BYTES + 1).removeprefix(_UTF8_BOM)
    if len(content) > _MAX_ARRAY_BYTES:
        raise DataError(
            f"{path}: is a JSON array of more than {_MAX_ARRAY_BYTES:,} bytes: write one JSON "
            "object per line instead, which are read one by one"
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
        # Python gives no position for deep nesting or a number with thousands of digits.
        reason = TOO_DEEP if isinstance(error, RecursionError) else _printable(error)
        raise DataError(
            f"{path}: not a valid JSON array: {reason}: write one JSON object per line, "
            "so that only the bad one is skipped"
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
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: is a damaged parquet file ({_printable(error)}): copy or write it again"
        ) from error


def _batch_rows(batch: Any) -> list[dict[str, Any] | BadRow]:
    """Return the rows of a pyarrow RecordBatch; one by one if it cannot be converted as a whole."""
    from pyarrow import types

    try:
        return [_plain(row) for row in batch.to_pylist(maps_as_pydicts="lossy")]
    except (ValueError, OverflowError) as error:
        # Python's times are coarser and span fewer years, but these columns hold no text to train
        # on.
        other = [i for i, kind in enumerate(batch.schema.types) if not types.is_temporal(kind)]
        if 0 < len(other) < batch.num_columns:
            return _batch_rows(batch.select(other))
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]
        utf8 = isinstance(error, UnicodeDecodeError)
        return [BadRow("not UTF-8" if utf8 else "a value cannot be read", _printable(error))]


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it, without the keys that are null.

    All rows of a parquet file have the same keys, so null means absent there.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        # Bytes that are not text become halves of surrogate pairs, which are rejected when used.
        return value.decode("utf-8", errors="surrogateescape")
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
