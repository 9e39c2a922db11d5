"""Notes incomplete folders in the user's cache, so that later commands can remove the folders.

A note gives a folder's path and inode, and is locked while the process that wrote the note lives.
Only mlxtune writes notes, so folders of other programs are never removed.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxtune.config import user_cache
from mlxtune.core.files.files import is_temporary, make_folder, read_json
from mlxtune.core.files.lock import Lock, LockHeldError, holder_of
from mlxtune.core.files.ours import discard, is_folder, remove_file

_NOTES = "unfinished"


@contextmanager
def noted(folder: Path) -> Iterator[None]:
    """Keep a note that this process is filling a folder, which has a temporary name."""
    status = folder.stat()
    note = {"folder": str(folder.absolute()), "device": status.st_dev, "inode": status.st_ino}
    lock = None
    # Best effort: without a note, a killed process's folder is not cleaned up later.
    with suppress(OSError, LockHeldError):
        notes = user_cache() / _NOTES
        make_folder(notes)
        lock = Lock(notes / f"{secrets.token_hex(8)}.json", note)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def remove_unfinished() -> list[Path]:
    """Remove and return the incomplete folders that this user's killed processes left."""
    removed = []
    with suppress(OSError):
        for path in sorted((user_cache() / _NOTES).iterdir()):
            if holder_of(path) is not None:
                continue
            with suppress(OSError, ValueError, LookupError, TypeError):
                note = read_json(path)
                folder = Path(note["folder"])
                if _is_noted(folder, note["device"], note["inode"]):
                    discard(folder)
                    removed.append(folder)
            with suppress(OSError):
                remove_file(path)
    return removed


def _is_noted(folder: Path, device: object, inode: object) -> bool:
    if not (is_temporary(folder) and is_folder(folder)):
        return False
    status = folder.stat()
    return (status.st_dev, status.st_ino, status.st_uid) == (device, inode, os.geteuid())
