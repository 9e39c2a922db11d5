"""Limits the unpacked size of data files: a file of a few kilobytes can hold gigabytes."""

import gzip
import zlib
from contextlib import suppress
from pathlib import Path

from mlxtune.core.files.reading import open_zipped
from mlxtune.core.formatting import byte_size
from mlxtune.errors import DataError

# The number of unpacked bytes that any file may have, and the additional number for each packed
# byte. Files whose rows share one long system prompt, the most repetitive files that people train
# on, unpack to some 100 times their size.
_ALWAYS, _PER_BYTE = 2**24, 200
# The maximum number of bytes that one byte of gzip can unpack to.
_MOST_OF_GZIP = 1032
_PIECE = 2**20


def most_bytes(size: int) -> int:
    return _ALWAYS + _PER_BYTE * size


def expands(path: Path, size: int) -> DataError:
    return DataError(
        f"{path}: unpacks from {byte_size(size)} to more than {byte_size(most_bytes(size))}, far "
        "more than conversations do: if you trust the file, unpack it to JSON lines first"
    )


def check_gzip(path: Path) -> None:
    """Raise DataError for a gzip file that unpacks to too much. A damaged file fails when read."""
    size = path.stat().st_size
    left = most_bytes(size)
    if size * _MOST_OF_GZIP <= left:
        return
    with suppress(EOFError, zlib.error, gzip.BadGzipFile), open_zipped(path) as file:
        while piece := file.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise expands(path, size)
