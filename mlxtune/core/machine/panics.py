"""Panics of libraries in Rust: an exception of ours, and none of the text that Rust writes."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxtune.core.files.scratch import scratch_file

_STDERR = 2
_lock = threading.Lock()
_inside = 0


class PanicError(Exception):
    """A library in Rust gave up; its own exception is no Exception."""


@contextmanager
def caught_panics() -> Iterator[None]:
    """Raise PanicError for a panic, whose text is not shown.

    What is written to stderr meanwhile is shown afterwards.
    """
    global _inside
    with _lock:
        first = _inside == 0
        _inside += 1
    panicked = False
    held = _hold_back() if first else None
    try:
        yield
    except BaseException as error:
        # Rust's binding makes this class anew in each library.
        panicked = type(error).__name__ == "PanicException"
        if not panicked:
            raise
        raise PanicError(str(error)) from error
    finally:
        with _lock:
            _inside -= 1
        if held is not None:
            _let_go(*held, drop=panicked)


def _hold_back() -> tuple[int, int] | None:
    """Lead stderr into a file; return the file and what stderr was, or None if that fails."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    try:
        before = os.dup(_STDERR)
    except OSError:
        return None
    try:
        with scratch_file() as file:
            held = os.dup(file.fileno())
        os.dup2(held, _STDERR)
    except OSError:
        os.close(before)
        return None
    return held, before


def _let_go(held: int, before: int, *, drop: bool) -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os.dup2(before, _STDERR)
    os.close(before)
    with suppress(OSError):
        os.lseek(held, 0, os.SEEK_SET)
        while not drop and (written := os.read(held, 2**16)):
            os.write(_STDERR, written)
    os.close(held)
