"""What this user made on this machine, remembered by ids and hashes in the user's cache.

An untrusted run could request downloads and trackers. A run's folder has a mark, a file with a
random id, and the list in the cache has that id with the inode of the folder, as a run that was
sent away may come back changed. What is not listed, because it was copied or the cache was emptied,
counts as untrusted.
"""

import re
import secrets
from contextlib import suppress
from pathlib import Path

from mlxtune.config import user_cache
from mlxtune.core.files.reading import read_own
from mlxtune.core.files.writing import append_line, make_folder, write_file

# A file that marks a run's folder: files with known names in that folder belong to the run.
MARK = ".mlxtune"
_ID = re.compile(rb"[0-9a-f]{32}\n")
_MAX_LINES = 20_000


def remember(line: str) -> None:
    """Add a line to the list in the user's cache; failures are ignored."""
    with suppress(OSError, ValueError):
        path = user_cache() / "runs"
        make_folder(path.parent)
        append_line(path, line)
        lines = read_own(path).splitlines(keepends=True)
        if len(lines) > _MAX_LINES:
            write_file(path, lines[-_MAX_LINES // 2 :])


def is_remembered(line: str) -> bool:
    """Return whether a line was remembered. Raises OSError or ValueError for an unreadable list."""
    return line.encode() in read_own(user_cache() / "runs").splitlines()


def mark(folder: Path) -> None:
    """Mark a run's folder, and remember it as this user's. Raises OutputError."""
    name = secrets.token_hex(16)
    write_file(folder / MARK, [f"{name}\n".encode()])
    remember(_line(folder, name))


def is_own(folder: Path) -> bool:
    """Return whether this user made the run in a folder, on this machine."""
    try:
        name = read_own(folder / MARK)
        return bool(_ID.fullmatch(name)) and is_remembered(_line(folder, name.decode().strip()))
    except (OSError, ValueError):
        return False


def _line(folder: Path, name: str) -> str:
    return f"{name} {folder.stat().st_ino}"
