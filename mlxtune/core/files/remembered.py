"""Remembers, by ids and hashes in the user's cache, what this user made on this machine."""

from contextlib import suppress

from mlxtune.config import user_cache
from mlxtune.core.files.files import append_line, make_folder, read_own, write_file

_MAX_LINES = 20_000


def remember(line: str) -> None:
    """Add a line to the list in the user's cache; if that fails, nothing is remembered."""
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
