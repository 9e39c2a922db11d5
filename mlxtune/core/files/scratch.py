"""Temporary folders and files, with unpredictable names."""

import atexit
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO

from mlxtune.core.files.ours import ForeignFileError, discard, private_folder

# The prefix that identifies a killed process's leftovers.
PREFIX = ".mlxtune-"
# The names of temporary folders, with an optional purpose; tempfile adds eight characters.
_FOLDER_NAME = re.compile(r"mlxtune-(?:[a-z]+-)?[a-z0-9_]{8}")
# A folder without changes for this long is removed if no process holds it. A process holds it from
# the moment after it was made, but older versions of mlxtune held none.
_ABANDONED_SECONDS = 3600.0
_MAX_ENTRIES = 10_000


@contextmanager
def scratch_folder(purpose: str = "", parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, which is removed afterwards if it is still there.

    The folder is in the system's temporary folder, or in `parent`. Raises OSError.
    """
    if parent is None:
        _remove_abandoned()
    prefix = PREFIX if parent is not None else _prefix(purpose)
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent, ignore_cleanup_errors=True
    ) as folder:
        held = _held(Path(folder))
        try:
            yield Path(folder)
        finally:
            os.close(held)


@contextmanager
def linked_folder(folder: Path, parent: Path) -> Iterator[Path]:
    """Yield a link `model` to a folder; the link is in a new folder in `parent`. Raises OSError."""
    with scratch_folder(parent=parent) as scratch:
        link = scratch / "model"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link


def lasting_folder(purpose: str = "", parent: Path | None = None) -> Path:
    """Return a new folder, which is removed when this process ends. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=_prefix(purpose), dir=parent))
    _held(folder)  # until this process ends
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _held(folder: Path) -> int:
    """Return the descriptor of a folder; while it is open, no other process removes the folder.

    systemd-tmpfiles keeps a locked folder too, however old its files are.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@cache
def _remove_abandoned() -> None:
    """Remove this user's temporary folders that killed processes left, once per process."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in islice(entries, _MAX_ENTRIES):
            if _FOLDER_NAME.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    status = folder.lstat()
    is_old = time.time() - status.st_mtime > _ABANDONED_SECONDS
    if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and is_old):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        discard(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def use_private_folder() -> None:
    """Make MLX, and the processes started later, use temporary files that only this user may enter.

    On the CPU, MLX compiles functions into `$TMPDIR/mlx/VERSION/cpu/lib….so`, and loads a file of
    such a name if there is one: in a folder that users share, another user may put it there first.
    Python's own choice of a folder stays. Raises OSError.
    """
    shared = Path(tempfile.gettempdir())
    os.environ["TMPDIR"] = str(shared if _is_private(shared) else _private_below(shared))


def _is_private(folder: Path) -> bool:
    try:
        private_folder(folder)
    except OSError:
        return False
    return not stat.S_IMODE(folder.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO)


def _private_below(shared: Path) -> Path:
    """Return the user's folder in a shared one, or a new folder if it cannot be trusted."""
    folder = shared / f"mlxtune.{os.geteuid()}"
    with suppress(ForeignFileError):
        private_folder(folder)
        folder.chmod(stat.S_IRWXU)
        _held(folder)  # until this process ends
        return folder
    return lasting_folder("kernels")


def scratch_file() -> IO[bytes]:
    """Return a new unnamed file, open for reading and writing. Raises OSError."""
    return tempfile.TemporaryFile()


def nowhere() -> IO[str]:
    return Path(os.devnull).open("w", encoding="utf-8")


def _prefix(purpose: str) -> str:
    return f"mlxtune-{purpose}-" if purpose else "mlxtune-"
