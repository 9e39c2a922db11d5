"""Temporary folders and files, with unpredictable names."""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mlxtune.core.files.ours import NotOurs, private_folder

# The prefix that identifies a killed process's leftovers.
PREFIX = ".mlxtune-"


@contextmanager
def scratch_folder(purpose: str = "", parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, which is removed afterwards if it is still there.

    The folder is in the system's temporary folder, or in `parent`. Raises OSError.
    """
    prefix = PREFIX if parent is not None else _prefix(purpose)
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


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
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
    folder = shared / f"mlxtune-{os.geteuid()}"
    with suppress(NotOurs):
        private_folder(folder)
        folder.chmod(stat.S_IRWXU)
        with suppress(OSError):  # a file system without locks
            # systemd-tmpfiles keeps a locked folder, however old its files are.
            fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)
        return folder
    return lasting_folder("kernels")


def scratch_file() -> IO[bytes]:
    """Return a new unnamed file, open for reading and writing. Raises OSError."""
    return tempfile.TemporaryFile()


def nowhere() -> IO[str]:
    return Path(os.devnull).open("w", encoding="utf-8")


def _prefix(purpose: str) -> str:
    return f"mlxtune-{purpose}-" if purpose else "mlxtune-"
