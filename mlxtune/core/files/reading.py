"""Opens and reads regular files, each within the limits of its kind.

A pipe or a device may block or never end; only `read_start` opens them. A sparse file is refused:
it costs nothing to make, but time and memory to read.
"""

import errno
import gzip
import hashlib
import io
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from mlxtune.config.limits import (
    OWN_FILE_LIMITS,
    OWN_JSON_LIMITS,
    Limits,
    TooLargeError,
    check_bytes,
    check_count,
    parse_json,
)

_PIECE_BYTES = 2**20
# At least one byte in this many must be on disk; otherwise a file is almost all holes. Text that
# APFS, btrfs or ZFS compresses shrinks to about a tenth of its size, and an untrained adapter, half
# of it zeros, to about half.
_MAX_HOLE_RATIO = 64
# Smaller files take little memory, and some file systems store them without blocks.
_SMALL_FILE_BYTES = 2**20
# The limit for files whose kind has none; no such file is this large.
_DEFAULT_LIMITS = Limits(2**30)
# The starts of the names of folders in Hugging Face's cache.
_CACHE_PREFIXES = ("models--", "datasets--")
# The largest number of pieces of a file to check; a file with more pieces is not made of holes.
_MAX_PIECES = 10_000


class NotRegularError(OSError, ValueError):
    """A pipe, a device or, unless links are followed, a link."""


def target_outside(path: Path, folder: Path) -> Path | None:
    """Return where a path in a folder leads, if that is outside the folder.

    Links into `blobs` are allowed in Hugging Face's cache, whose snapshots consist of such links.
    """
    real, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    allowed = [real]
    if real.parent.name == "snapshots" and real.parents[1].name.startswith(_CACHE_PREFIXES):
        allowed.append(real.parents[1] / "blobs")
    return None if any(map(target.is_relative_to, allowed)) else target


def open_regular(path: Path, *, links: bool = True) -> io.BufferedReader:
    """Open a regular file to read it. Raises NotRegularError for other files, or OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and not links):
            raise NotRegularError(f"{path.name} is not a regular file") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegularError(f"{path.name} is not a regular file")


class _Zipped(gzip.GzipFile):
    """A gzip file that also closes the underlying file."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def open_zipped(path: Path) -> IO[bytes]:
    """Open a gzip file to read its unpacked content. Raises OSError as `open_regular` does."""
    return cast(IO[bytes], _Zipped(open_regular(path)))


def read_at_most(file: io.BufferedReader, size: int) -> bytes:
    """Return up to `size` bytes of an open file, positioned at its start. Raises OSError."""
    # A read allocates memory for the full size that it requests.
    content = file.read(min(os.fstat(file.fileno()).st_size + 1, size))
    # A file may grow while it is read.
    while len(content) < size and (more := file.read(min(size - len(content), _PIECE_BYTES))):
        content += more
    return content


def read_start(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, pipe or device. Raises OSError."""
    # Opened without blocking, a pipe without a writer reads as empty.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        os.set_blocking(file.fileno(), True)
        return file.read(size)


def is_lfs_pointer(start: bytes) -> bool:
    """Return whether a file that starts with these bytes stands for a file that Git LFS stores."""
    return start.startswith(b"version https://git-lfs.github.com/spec/")


def read_end(path: Path, size: int) -> bytes:
    """Return the last bytes of a regular file. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - size, 0))
        return file.read(size)


def read_kernel_file(path: Path) -> str:
    """Return the text of a file that the kernel generates when it is read. Raises OSError."""
    return path.read_text(encoding=sys.getfilesystemencoding(), errors="replace")


def check_stored(path: Path) -> None:
    """Raise TooLargeError, naming the file, if nearly all of its declared size is missing on disk.

    A sparse file of terabytes costs nothing to make, but time and memory to read. Raises OSError.
    """
    with open_regular(path) as file:
        check_open(path.name, file)


def check_open(name: str, file: io.BufferedReader) -> None:
    """Apply the checks of `check_stored` to an open file positioned at its start."""
    status = os.fstat(file.fileno())
    size = status.st_size
    if size < _SMALL_FILE_BYTES or status.st_blocks * 512 * _MAX_HOLE_RATIO >= size:
        return
    # Some network file systems count no blocks, and ZFS none for fresh writes. Such file systems
    # report a file's data and holes, or only its data.
    if (stored := stored_bytes(file, size)) * _MAX_HOLE_RATIO < size:
        raise TooLargeError(f"{name} has {size:,} bytes, but only {stored:,} of them are on disk")


def stored_bytes(file: io.BufferedReader, size: int) -> int:
    """Count an open file's bytes outside holes; stop once there are enough to accept the file."""
    if not hasattr(os, "SEEK_DATA"):
        return size
    stored = end = 0
    with suppress(OSError):  # ENXIO: no more data
        for _ in range(_MAX_PIECES):
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            stored += end - start
            if stored * _MAX_HOLE_RATIO >= size:
                break
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return stored


def check_file(path: Path, limits: Limits) -> None:
    """Raise TooLargeError, naming the file, if it exceeds limits or is made of holes.

    Raises OSError.
    """
    with open_regular(path) as file:
        check_bytes(path.name, os.fstat(file.fileno()).st_size, limits)
        check_open(path.name, file)


def check_values(path: Path, limits: Limits) -> None:
    """Raise ValueError for a JSON file with too many values or bytes. Raises OSError."""
    check_count(read_bytes(path, limits), limits, path.name)


def read_bytes(path: Path, limits: Limits = _DEFAULT_LIMITS, *, links: bool = True) -> bytes:
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


def read_text(path: Path, limits: Limits = _DEFAULT_LIMITS) -> str:
    """Return the text of a file in UTF-8 within limits. Raises ValueError or OSError."""
    return read_bytes(path, limits).decode("utf-8")


def read_value(path: Path, limits: Limits) -> Any:
    """Return the JSON value in a file within limits. Raises ValueError or OSError."""
    return parse_json(read_bytes(path, limits), limits, path.name)


def read_own(path: Path, limits: Limits = OWN_FILE_LIMITS) -> bytes:
    """Return the content of a file that we wrote.

    Raises ValueError if the file is too large or not regular (a link, a pipe). Raises OSError.
    """
    return read_bytes(path, limits, links=False)


def read_json(path: Path, limits: Limits = OWN_JSON_LIMITS) -> dict[str, Any]:
    """Return the object in a JSON file that we wrote. Raises ValueError or OSError."""
    value = parse_json(read_own(path, limits), limits, path.name, constants=False)
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex.

    Raises OSError if the file cannot be read, or consists almost entirely of holes, which may take
    days to read.
    """
    with open_regular(path) as file:
        try:
            check_open(path.name, file)
        except TooLargeError as error:
            raise OSError(errno.EINVAL, str(error)) from error
        return hashlib.file_digest(file, "sha256").hexdigest()
