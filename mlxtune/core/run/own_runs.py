"""The runs that this user made on this machine.

A stranger's run could request downloads and trackers. Each run's mark file has a random id. The
user's cache lists the runs made on this machine, each by its id and the inode of its folder, as a
run that was sent away may come back changed. A run that is not listed, because it was copied or the
cache was emptied, counts as a stranger's.
"""

import re
import secrets
from pathlib import Path

from mlxtune.core.files.files import read_own, write_file
from mlxtune.core.files.remembered import is_remembered, remember

# A file that marks a run's folder: files with known names in that folder belong to the run.
MARK = ".mlxtune"
_ID = re.compile(rb"[0-9a-f]{32}\n")


def mark(run: Path) -> None:
    """Mark a run's folder, and remember it as this user's. Raises OutputError."""
    name = secrets.token_hex(16)
    write_file(run / MARK, [f"{name}\n".encode()])
    remember(_line(run, name))


def is_own(run: Path) -> bool:
    """Return whether this user made the run in a folder, on this machine."""
    try:
        name = read_own(run / MARK)
        return bool(_ID.fullmatch(name)) and is_remembered(_line(run, name.decode().strip()))
    except (OSError, ValueError):
        return False


def _line(run: Path, name: str) -> str:
    return f"{name} {run.stat().st_ino}"
