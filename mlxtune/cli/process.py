"""The process of the command: its standard streams, current folder and temporary files.

Streams may be closed, full, or slow.
"""

import io
import os
import select
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mlxtune.errors import OutputError

_STDIN, _STDOUT, _STDERR = range(3)
_TEMPORARY = ("TMPDIR", "TEMP", "TMP", "TEMPDIR")


def open_streams() -> None:
    """Open closed streams on the null device, and report failed writes as our own errors.

    If a stream stayed closed, the next opened file would get the stream's descriptor, and so the
    output that other code writes to the stream.
    """
    for number in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(number)
        except OSError:
            # An opened file takes the lowest free descriptor.
            os.open(os.devnull, os.O_RDONLY if number == _STDIN else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = open(_STDIN, encoding="utf-8", closefd=False)  # noqa: SIM115
    # Leave other streams alone: they belong to a test, or to a program that calls main().
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stream(_STDOUT, "w", closefd=False), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stream(_STDERR, "w", closefd=False), sys.stderr)


def flush_results() -> None:
    """Flush stdout. If that fails, drop the buffer and raise OutputError or BrokenPipeError."""
    try:
        sys.stdout.flush()
    except BaseException:
        drop_results()
        raise


def drop_results() -> None:
    """Drop the buffer of stdout, so that Python does not report a failed write again at exit."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        sys.stdout.flush()


def _text(raw: io.FileIO, before: TextIO | None) -> TextIO:
    # Characters outside the encoding must not crash a command.
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if before is None else before.encoding,
        errors="backslashreplace",
        line_buffering=raw.fileno() == _STDERR or raw.isatty(),
    )


class _Stream(io.FileIO):
    """Standard output, whose failures are reported, or standard error, whose failures are not."""

    def write(self, data: Any, /) -> int:
        """Write bytes. Raises OutputError, or BrokenPipeError if nobody reads stdout."""
        try:
            # Wait if a write would block: other programs can make shared streams non-blocking.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            if self.fileno() == _STDERR:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(
                f"stdout: cannot be written: {error.strerror}: redirect it elsewhere"
            ) from error


def check_current_folder() -> None:
    """Raise OutputError if the current folder is deleted or unreadable."""
    try:
        Path.cwd()
    except OSError as error:
        raise OutputError(
            f"the current folder cannot be read: {error.strerror}: change to another one with cd"
        ) from error


def set_temporary_folder() -> None:
    """Make MLX and child processes use Python's folder for temporary files.

    Unlike Python, they fail if the environment names a missing folder.
    """
    if any(name in os.environ for name in _TEMPORARY):
        # If Python finds no usable folder, the code that needs one reports the problem.
        with suppress(OSError):
            os.environ["TMPDIR"] = tempfile.gettempdir()
