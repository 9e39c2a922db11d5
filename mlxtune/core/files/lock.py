"""File locks that name their holder, and that the kernel releases however the holder ends."""

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxtune.core.files.ours import ForeignFileError, open_ours, remove_file
from mlxtune.core.files.reading import open_regular
from mlxtune.errors import MlxTuneError

# The largest number of bytes of a holder's note that other processes read.
_MAX_NOTE_BYTES = 64 * 1024
# Readers hold a lock for an instant to see whether it is free; several may do so together.
_INSTANT_SECONDS, _TRY_SECONDS = 0.1, 0.01
# Errors of file systems without locks.
_LOCKLESS_ERRORS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


# The locks that guard their folders, by their open files.
_guards: dict[int, Path] = {}


class LockHeldError(Exception):
    """Another process holds the lock; `holder` is that process's note."""

    def __init__(self, holder: Mapping[str, Any]) -> None:
        super().__init__(f"held by process {holder.get('pid', 'unknown')}")
        self.holder = holder


class NoLocksError(OSError):
    """The file system has no locks, or no reliable locks."""


class FolderMovedError(MlxTuneError):
    """A locked folder was moved, removed or replaced, so nothing may be written to its path."""


class Lock:
    """A file that is locked until `release` is called or this process ends.

    The kernel releases the lock when the process dies. `note` is kept in the file, with the process
    id and the time, for other processes to read. With `guards`, this process writes to the lock's
    folder only while the folder is in place: see `check_not_moved`.

    Raises LockHeldError if another process still holds the lock after `seconds`, NoLocksError if
    the file system has no locks, ForeignFileError for a file that is not our lock, and OSError if
    the file cannot be created.
    """

    def __init__(
        self,
        path: Path,
        note: Mapping[str, Any] | None = None,
        seconds: float = _INSTANT_SECONDS,
        *,
        guards: bool = False,
    ) -> None:
        self.path = path
        self._descriptor = _open_locked(path, seconds)
        if guards:
            _guards[self._descriptor] = path
        content = {"pid": os.getpid(), "since": time.time(), **(note or {})}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(content).encode(), 0)

    def release(self) -> None:
        if self._descriptor < 0:
            return
        _guards.pop(self._descriptor, None)
        with suppress(OSError):
            if os.path.samestat(self.path.lstat(), os.fstat(self._descriptor)):
                remove_file(self.path)
        os.close(self._descriptor)
        self._descriptor = -1


def check_not_moved(target: Path) -> None:
    """Raise FolderMovedError if this process locked a folder above `target` that is now gone.

    Another folder at its path may belong to another run, and a new one would have no lock.
    """
    for descriptor, path in list(_guards.items()):
        if not _absolute(target).is_relative_to(_absolute(path.parent)):
            continue
        with suppress(OSError):
            if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                continue
        raise FolderMovedError(
            f"{path.parent} was moved, removed or replaced during the run: resume it at its new "
            "place with mlxtune train --resume FOLDER"
        )


def _absolute(path: Path) -> Path:
    # Unlike Path.resolve, this follows no links.
    return Path(os.path.abspath(path))  # noqa: PTH100


def holder_of(path: Path) -> dict[str, Any] | None:
    """Return the note of a lock's holder; None if no living process holds the lock.

    Changes nothing, and works in a read-only folder.
    """
    try:
        with open_regular(path, links=False) as file:
            # A shared lock: two readers must not take each other for the holder.
            return None if _try_lock(file.fileno(), fcntl.LOCK_SH) else _note(file.fileno())
    except OSError:
        return None


def _open_locked(path: Path, seconds: float) -> int:
    for left in reversed(range(round(seconds / _TRY_SECONDS))):
        descriptor = open_ours(path, os.O_RDWR | os.O_CREAT)
        try:
            if _try_lock(descriptor, fcntl.LOCK_EX):
                # The previous holder may have removed the file after we opened it.
                with suppress(FileNotFoundError):
                    if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                        # A file whose content is not a note belongs to another program.
                        if os.fstat(descriptor).st_size and "pid" not in _note(descriptor):
                            raise ForeignFileError(path, "mlxtune did not write it")
                        return descriptor
            elif not left:
                raise LockHeldError(_note(descriptor))
            else:
                time.sleep(_TRY_SECONDS)
        # Even on Ctrl-C: a descriptor left open would hold the lock.
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise NoLocksError(errno.ENOLCK, "its file system changes inode numbers", str(path))


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _LOCKLESS_ERRORS:
            raise NoLocksError(error.errno, "its file system has no file locks") from error
        raise
    return True


def _note(descriptor: int) -> dict[str, Any]:
    try:
        note = json.loads(os.pread(descriptor, _MAX_NOTE_BYTES, 0))
    except (ValueError, RecursionError):
        return {}  # the holder has not written it yet
    return note if isinstance(note, dict) else {}
