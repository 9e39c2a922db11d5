"""Which runs this user made on this machine: other ones may ask for downloads and trackers.

Each run has a random id in its mark, and the user's cache has a line for each run made here: its id
and the number of its folder, as a run that was sent away may come back changed. A run whose line is
missing, because it was copied or the cache was emptied, counts as somebody else's.
"""

import re
import secrets
from contextlib import suppress
from pathlib import Path

from mlxtune.config import user_cache
from mlxtune.core.files.files import append_line, make_folder, read_own, write_file

# Marks a folder whose files of known names are a run's.
MARK = ".mlxtune"
_MAX_LINES = 20_000
_ID = re.compile(rb"[0-9a-f]{32}\n")


def mark(run: Path) -> None:
    """Mark a run's folder, and remember it as this user's. Raises OutputError."""
    name = secrets.token_hex(16)
    write_file(run / MARK, [f"{name}\n".encode()])
    # Without a cache, the run only counts as somebody else's.
    with suppress(OSError, ValueError):
        own = _own_runs()
        make_folder(own.parent)
        append_line(own, _line(run, name))
        lines = read_own(own).splitlines(keepends=True)
        if len(lines) > _MAX_LINES:
            write_file(own, lines[-_MAX_LINES // 2 :])


def is_own(run: Path) -> bool:
    """Return whether this user made the run in a folder, on this machine."""
    try:
        name = read_own(run / MARK)
        lines = read_own(_own_runs()).splitlines()
        return bool(_ID.fullmatch(name)) and _line(run, name.decode().strip()).encode() in lines
    except (OSError, ValueError):
        return False


def _own_runs() -> Path:
    return user_cache() / "runs"


def _line(run: Path, name: str) -> str:
    return f"{name} {run.stat().st_ino}"
