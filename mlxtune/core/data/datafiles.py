"""From data files to rows: JSON lines, a JSON array, either of them gzipped, or parquet.

The first bytes decide what a file is, not its name.
"""

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

from mlxtune.core.data.problems import BadRow, json_type, parse_json
from mlxtune.errors import DataError, one_line

# File names in a data folder: mlx-lm's, and the same with the endings of the other kinds.
_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_HEAD_BYTES = 8192
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
        if not stat.S_ISDIR(_stat(path, option).st_mode):
            train.append(path)
        elif option != "--data":
            raise DataError(f"{path}: is a folder: name a file in it")
        elif not (files := _file_named("train", path)):
            names = ", ".join(f"train{ending}" for ending in _ENDINGS)
            raise DataError(
                f"{path}: has no file to train on: name a file in it, or rename one to any of "
                f"{names}"
            )
        else:
            train += files
            validation += _file_named("valid", path)
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


def held_out_file(folder: Path) -> Path:
    """Return the folder's `test` file, or else its `valid` file. Raises DataError."""
    files = _file_named("test", folder) or _file_named("valid", folder)
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


# Paths


@contextmanager
def _reading(path: Path, option: str = "--data") -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file: check {option}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: is a damaged gzip file ({one_line(error)}): copy or compress it again"
        ) from error
    except DataError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"{path}: cannot be read: {reason or one_line(error)}") from error


def _stat(path: Path, option: str) -> os.stat_result:
    with _reading(path, option):
        info = path.stat()
    # A pipe could not be read twice.
    if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
        raise DataError(f"{path}: is not a regular file: save the data in one")
    return info


def _file_named(stem: str, folder: Path) -> list[Path]:
    with _reading(folder):
        present = {path.name for path in folder.iterdir()}
    matches = [name for ending in _ENDINGS if (name := stem + ending) in present]
    if len(matches) > 1:
        raise DataError(
            f"{folder}: holds {' and '.join(matches)}: keep one, or name the files to train on"
        )
    return [folder / name for name in matches]


def _head(path: Path) -> bytes:
    """Return the first bytes, unzipped. Raises DataError when they are not data."""
    with _reading(path), _open(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise DataError(f"{path}: is empty: it needs one JSON object per line")
    if b"\0" in head and not head.startswith(_PARQUET):
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
    number = 0
    with _reading(path), _open(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise DataError(
                    f"{path}:{number}: is longer than {_MAX_LINE_BYTES:,} bytes: write one JSON "
                    "object per line"
                )
            content = (line.removeprefix(_UTF8_BOM) if number == 1 else line).strip()
            if content and not content.startswith(b"#"):
                yield number, _parse(content)


def _parse(line: bytes) -> dict[str, Any] | BadRow:
    if line == b"{":
        advice = "write each object on one line, or all of them as one JSON array"
        return BadRow("a JSON object over several lines", advice)
    try:
        return _object(parse_json(line))
    except BadRow as problem:
        return problem


def _object(content: Any) -> dict[str, Any] | BadRow:
    return content if isinstance(content, dict) else BadRow("not a JSON object", json_type(content))


def _array_rows(path: Path) -> Iterator[NumberedRow]:
    with _reading(path), _open(path) as file:
        content = file.read(_MAX_ARRAY_BYTES + 1).removeprefix(_UTF8_BOM)
    if len(content) > _MAX_ARRAY_BYTES:
        raise DataError(
            f"{path}: is a JSON array of more than {_MAX_ARRAY_BYTES:,} bytes: write one JSON "
            "object per line instead, which are read one by one"
        )
    try:
        elements = parse_json(content, "not a valid JSON array")
    except BadRow as problem:
        raise DataError(
            f"{path}: {problem}: write one JSON object per line, so that only the bad one is "
            "skipped"
        ) from problem
    for number, element in enumerate(elements, start=1):
        yield number, _object(element)


# Parquet


def _parquet_rows(path: Path) -> Iterator[NumberedRow]:
    try:
        import pyarrow
        from pyarrow import parquet, types
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow: pip install 'mlxtune[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            # Times hold no text to train on, and Python cannot represent all of them.
            kinds = enumerate(file.schema_arrow.types)
            columns = [i for i, kind in kinds if not types.is_temporal(kind)]
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS):
                for row in _batch_rows(batch.select(columns)):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: is a damaged parquet file ({one_line(error)}): copy or write it again"
        ) from error


def _batch_rows(batch: Any) -> list[dict[str, Any] | BadRow]:
    """Return the rows of a pyarrow RecordBatch; one by one if it cannot be converted as a whole."""
    try:
        return [_plain(row) for row in batch.to_pylist(maps_as_pydicts="lossy")]
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]
        utf8 = isinstance(error, UnicodeDecodeError)
        return [BadRow("not UTF-8" if utf8 else "a value cannot be read", one_line(error))]


def _plain(row: Any) -> dict[str, Any]:
    """Return a row as JSON would hold it, without the keys that are null.

    All rows of a parquet file have the same keys, so null means absent there.
    """
    content: dict[str, Any] = json.loads(
        json.dumps(row, default=_text, skipkeys=True),
        object_hook=lambda value: {k: item for k, item in value.items() if item is not None},
    )
    return content


def _text(value: Any) -> str:
    # Bytes that are not text become halves of surrogate pairs, which are rejected when used.
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
