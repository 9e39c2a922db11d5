"""Temporary folders and files, with unpredictable names."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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


def scratch_file() -> IO[bytes]:
    """Return a new unnamed file, open for reading and writing. Raises OSError."""
    return tempfile.TemporaryFile()


def nowhere() -> IO[str]:
    return Path(os.devnull).open("w", encoding="utf-8")


def _prefix(purpose: str) -> str:
    return f"mlxtune-{purpose}-" if purpose else "mlxtune-"
