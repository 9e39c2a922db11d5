"""Reads rows of data files: JSON lines, a JSON array or CSV, each perhaps gzipped, and parquet.

The first bytes of a file decide its kind; only CSV and TSV are recognised by name.
"""

import gzip
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlxtune.core.data.places import PARQUET, UTF8_BOM, has_elements, is_zipped, read_head
from mlxtune.core.data.problems import BadRow, json_type, parse_json
from mlxtune.core.data.sources.expansion import check_gzip
from mlxtune.core.data.sources.parquet import parquet_rows
from mlxtune.core.data.sources.tables import NAMES as TABLES
from mlxtune.core.data.sources.tables import check_no_spreadsheet, is_table, table_rows
from mlxtune.core.files.reading import check_stored, open_regular, open_zipped
from mlxtune.errors import DataError, one_line

# The endings of file names in a data folder: mlx-lm's .jsonl and other formats' suffixes.
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", *TABLES)
# The names of validation files, and of validation splits on the hub.
VALIDATION = ("validation", "valid", "val", "dev")
_MAX_LINE_BYTES = 1 << 26
# The maximum length of a JSON array in bytes. Arrays are read whole, and one character beyond 16
# bits makes every character take 32 bits in memory.
_MAX_ARRAY_BYTES = 1 << 27
# The maximum number of consecutive blank lines and comments; reading a million takes a second.
_MAX_ROWLESS = 1_000_000
# The number of a row, and its object or the reason why it has none.
NumberedRow = tuple[int, dict[str, Any] | BadRow]


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files to train on, and the validation files."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]

    @property
    def all(self) -> tuple[Path, ...]:
        return (*self.train, *self.validation)


def find_data_files(
    paths: Sequence[Path], option: str = "--data", *, validation_files: Sequence[Path] = ()
) -> DataFiles:
    """Return the files that `option` names; from folders, the train and validation files.

    `validation_files` are added to the validation files.

    Raises DataError if a path is missing, a folder has no `train` file, `option` takes no folder,
    or a file is named twice.
    """
    train: list[Path] = []
    validation = [*validation_files]
    for path in paths:
        if not stat.S_ISDIR(_stat(path, option).st_mode):
            train.append(path)
        elif option != "--data":
            raise DataError(f"{path}: is a folder: name a file in it")
        elif not (files := _file_named(("train",), path)):
            names = ", ".join(f"train{ending}" for ending in ENDINGS)
            raise DataError(
                f"{path}: has no file to train on: name a file in it, or rename one to any of "
                f"{names}"
            )
        else:
            train += files
            validation += _file_named(VALIDATION, path)
    seen: dict[tuple[int, int], Path] = {}
    for path in (*train, *validation):
        info = _stat(path, option)
        # Links, and disks that ignore case, give one file several names.
        key = (info.st_dev, info.st_ino)
        if (other := seen.get(key)) is not None:
            same = "" if other == path else f", as {other}"
            raise DataError(f"{path}: is given twice{same}: name each file once in {option}")
        seen[key] = path
    return DataFiles(tuple(train), tuple(validation))


def held_out_file(folder: Path) -> Path:
    """Return the folder's `test` file, or else its validation file. Raises DataError."""
    files = _file_named(("test",), folder) or _file_named(VALIDATION, folder)
    if not files:
        raise DataError(
            f"{folder}: has neither test.jsonl nor validation.jsonl: name the file to evaluate"
        )
    return files[0]


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
        return parquet_rows(path)
    if is_zipped(path):
        check_gzip(path)
    if is_table(path, head):
        return _table_rows(path)
    return _array_rows(path) if has_elements(head) else _line_rows(path)


# Paths


@contextmanager
def _reading(path: Path, option: str = "--data") -> Iterator[None]:
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


def _stat(path: Path, option: str) -> os.stat_result:
    with _reading(path, option):
        info = path.stat()
        # Files are read twice, and a pipe can be read only once.
        if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
            raise DataError(f"{path}: is not a regular file: save the data in one")
        if stat.S_ISREG(info.st_mode):
            check_stored(path)
    return info


def _file_named(stems: Sequence[str], folder: Path) -> list[Path]:
    with _reading(folder):
        present = {path.name for path in folder.iterdir()}
    names = [stem + ending for stem in stems for ending in ENDINGS]
    matches = [name for name in names if name in present]
    if len(matches) > 1:
        raise DataError(
            f"{folder}: holds {' and '.join(matches)}: keep one, or name the files to train on"
        )
    return [folder / name for name in matches]


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, unzipped. Raises DataError when they are not data."""
    with _reading(path):
        head = read_head(path)
    if not head:
        raise DataError(f"{path}: is empty: it needs one JSON object per line")
    check_no_spreadsheet(path, head)
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


def _table_rows(path: Path) -> Iterator[NumberedRow]:
    with _reading(path), _open(path) as file:
        yield from table_rows(path, file, _MAX_LINE_BYTES)


# JSON


def _line_rows(path: Path) -> Iterator[NumberedRow]:
    number = last = 0
    with _reading(path), _open(path) as file:
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
        with _reading(path), _open(path) as file:
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
