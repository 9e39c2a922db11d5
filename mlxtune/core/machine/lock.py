"""File locks that a process holds until it ends, however it ends, and that name their holder."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Other processes read no more than this of a holder's note.
_MAX_NOTE_BYTES = 64 * 1024


class Held(Exception):
    """Another process holds the lock; `holder` is its note."""

    def __init__(self, holder: Mapping[str, Any]) -> None:
        super().__init__(f"held by process {holder.get('pid', 'unknown')}")
        self.holder = holder


class Lock:
    """A file that is locked until it is released or this process ends.

    The kernel releases it when the process dies. `note` is kept in the file, with the process id
    and the time, for others to read.

    Raises Held at once if another process holds it, OSError if the file cannot be made.
    """

    def __init__(self, path: Path, note: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._descriptor = _open_locked(path)
        content = {"pid": os.getpid(), "since": time.time(), **(note or {})}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(content).encode(), 0)

    def release(self) -> None:
        """Release the lock and remove the file."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


def holder_of(path: Path) -> dict[str, Any] | None:
    """Return the note of a lock's holder; None if no living process holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _try_lock(descriptor) else _note(descriptor)
    finally:
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o644)
        try:
            if not _try_lock(descriptor):
                raise Held(_note(descriptor))
            # The previous holder may have removed the file after we opened it.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        # Even on Ctrl-C: a descriptor left open would hold the lock.
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _note(descriptor: int) -> dict[str, Any]:
    try:
        note = json.loads(os.pread(descriptor, _MAX_NOTE_BYTES, 0))
    except (ValueError, RecursionError):
        return {}  # the holder has not written it yet
    return note if isinstance(note, dict) else {}
