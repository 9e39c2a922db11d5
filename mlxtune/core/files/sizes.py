"""Reads files within limits for their kind, and rejects files that are almost all holes."""

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxtune.config.limits import Limits, TooLarge, check_bytes, check_count, parse_json
from mlxtune.core.files.reading import open_regular, read_at_most

# At least one byte in this many must be on disk; otherwise a file is almost all holes. Text that
# APFS, btrfs or ZFS compresses shrinks to about a tenth of its size, and an untrained adapter, half
# of it zeros, to about half.
_LEAST_STORED = 64
# Smaller files take little memory, and some file systems store them without blocks.
_SMALL = 2**20
# The limit for files whose kind has none; no such file is this large.
_ANY = Limits(2**30)
# The largest number of pieces of a file to check; a file with more pieces is not made of holes.
_MOST_PIECES = 10_000


def check_stored(path: Path) -> None:
    """Raise TooLarge, naming the file, if nearly all of its declared size is missing on disk.

    A hole of terabytes costs its maker nothing, but its reader time and memory. Raises OSError.
    """
    with open_regular(path) as file:
        check_open(path.name, file)


def check_open(name: str, file: io.BufferedReader) -> None:
    """Check an open file, positioned at its start, as `check_stored` checks a path."""
    status = os.fstat(file.fileno())
    size = status.st_size
    if size < _SMALL or status.st_blocks * 512 * _LEAST_STORED >= size:
        return
    # Some network file systems count no blocks, and ZFS none for fresh writes. Such file systems
    # report a file's data and holes, or only its data.
    if (stored := stored_bytes(file, size)) * _LEAST_STORED < size:
        raise TooLarge(f"{name} has {size:,} bytes, but only {stored:,} of them are on disk")


def stored_bytes(file: io.BufferedReader, size: int) -> int:
    """Count an open file's bytes outside holes; stop once there are enough to accept the file."""
    if not hasattr(os, "SEEK_DATA"):
        return size
    stored = end = 0
    with suppress(OSError):  # ENXIO: no more data
        for _ in range(_MOST_PIECES):
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            stored += end - start
            if stored * _LEAST_STORED >= size:
                break
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return stored


def check_file(path: Path, limits: Limits) -> None:
    """Raise TooLarge, naming the file, if it exceeds limits or is made of holes. Raises OSError."""
    with open_regular(path) as file:
        check_bytes(path.name, os.fstat(file.fileno()).st_size, limits)
        check_open(path.name, file)


def check_values(path: Path, limits: Limits) -> None:
    """Raise ValueError for a JSON file with too many values or bytes. Raises OSError."""
    check_count(read_bytes(path, limits), limits, path.name)


def read_bytes(path: Path, limits: Limits = _ANY, *, links: bool = True) -> bytes:
    """Return the content of a regular file within limits.

    Raises ValueError, which names the file, if it is not a regular file, exceeds the limits or,
    without `links`, is a link. Raises OSError if it cannot be read.
    """
    with open_regular(path, links=links) as file:
        check_bytes(path.name, os.fstat(file.fileno()).st_size, limits)
        check_open(path.name, file)
        content = read_at_most(file, limits.bytes + 1)
    check_bytes(path.name, len(content), limits)
    return content


def read_text(path: Path, limits: Limits = _ANY) -> str:
    """Return the text of a file in UTF-8 within limits. Raises ValueError or OSError."""
    return read_bytes(path, limits).decode("utf-8")


def read_value(path: Path, limits: Limits) -> Any:
    """Return the JSON value in a file within limits. Raises ValueError or OSError."""
    return parse_json(read_bytes(path, limits), limits, path.name)
