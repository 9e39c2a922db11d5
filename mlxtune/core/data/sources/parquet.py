"""Rows of parquet files, read by pyarrow in a process whose memory and time are limited.

A parquet file of a kilobyte may hold any number of rows of any size, and pyarrow unpacks a batch of
them before anything can be counted.
"""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from mlxtune.core.data.problems import BadRow, check_values
from mlxtune.core.data.sources import parquet_child
from mlxtune.core.data.sources.expansion import expands, most_bytes
from mlxtune.core.files.processes import LimitedProcess, TooMuchMemory
from mlxtune.errors import DataError, one_line

_MEMORY = 2**30
_MAX_ROW = 2**26


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield each row's number, from 1, and its object or the reason why it has none.

    Raises DataError for a damaged file, and for a file that unpacks to far more than its size.
    """
    if not _has_pyarrow():
        raise DataError(f"{path}: needs pyarrow: pip install 'mlxtune[parquet]'")
    size = path.stat().st_size
    left = most_bytes(size)
    process = LimitedProcess(Path(parquet_child.__file__), _MEMORY, str(path.absolute()))
    number = 0
    with closing(process):
        while True:
            line = _read_line(process, path, size)
            left -= len(line)
            if left < 0 or len(line) == _MAX_ROW:
                raise expands(path, size)
            row = _parse(line)
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


def _read_line(process: LimitedProcess, path: Path, size: int) -> bytes:
    try:
        line = process.read_line(_MAX_ROW)
    except TooMuchMemory as error:
        raise expands(path, size) from error
    if line.endswith(b"\n") or len(line) == _MAX_ROW:
        return line
    ended = process.why_ended()
    if ended == "memory":
        raise expands(path, size)
    if ended == "time":
        raise _damaged(path, "reading a few rows takes more than 10 s")
    raise _damaged(path, f"the process that reads it ended with {ended}")


def _parse(line: bytes) -> dict[str, Any] | BadRow | str:
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
