"""Opens regular files, which never block or go on forever; only `read_start` opens pipes too."""

import errno
import gzip
import io
import os
import stat
import sys
from pathlib import Path
from typing import IO, cast

_PIECE = 2**20


class NotRegular(OSError, ValueError):
    """A pipe, a device or, unless links are followed, a link."""


def open_regular(path: Path, *, links: bool = True) -> io.BufferedReader:
    """Open a regular file to read it. Raises NotRegular for other files, or OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and not links):
            raise NotRegular(f"{path.name} is not a regular file") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegular(f"{path.name} is not a regular file")


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
    while len(content) < size and (more := file.read(min(size - len(content), _PIECE))):
        content += more
    return content


def read_start(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, pipe or device. Raises OSError."""
    # Opened without blocking, a pipe without a writer reads as empty.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        os.set_blocking(file.fileno(), True)
        return file.read(size)


def read_kernel_file(path: Path) -> str:
    """Return the text of a file that the kernel generates when it is read. Raises OSError."""
    return path.read_text(encoding=sys.getfilesystemencoding(), errors="replace")
