"""Checks that a file is ours to change: regular, the user's, not a link, and with only one name.

Every file that the package writes, truncates, locks, appends to, replaces or removes is checked
here: an open file by its descriptor, any other file just before it is replaced or removed.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

# Files that desktops leave in folders and that users do not need.
_LITTER = {".DS_Store"}
# No run nests folders nearly this deeply, and Python removes trees recursively.
_MAX_LEVELS = 100
_DEPTH_PROBLEM = f"its folders are nested more than {_MAX_LEVELS} levels deep"
# As many as Linux follows.
_MAX_LINKS = 40
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ForeignFileError(OSError):
    """A file that mlxtune must not change."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EEXIST, reason, str(path))


def open_ours(path: Path, flags: int) -> int:
    """Return the descriptor of a file that is ours, or that this call creates.

    `flags` must not truncate, as the file has not been checked yet. Raises ForeignFileError or
    OSError.
    """
    assert not flags & os.O_TRUNC
    try:
        descriptor = os.open(path, flags | _OPEN_FLAGS, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise ForeignFileError(path, "it is a symbolic link") from error
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise ForeignFileError(path, "it is not a regular file") from error
        raise
    try:
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_is_ours(path: Path) -> None:
    """Raise ForeignFileError if there is a file at this path that is not ours. Raises OSError."""
    with suppress(FileNotFoundError):
        _check(path, path.lstat())


def is_ours(path: Path) -> bool:
    try:
        _check(path, path.lstat())
    except OSError:
        return False
    return True


def remove_file(path: Path) -> None:
    """Remove a file of ours, if it exists. Raises ForeignFileError or OSError."""
    check_is_ours(path)
    path.unlink(missing_ok=True)


def replace_file(path: Path, target: Path) -> None:
    """Rename a file of ours, replacing another file of ours. Raises ForeignFileError or OSError."""
    check_is_ours(path)
    check_is_ours(target)
    path.replace(target)


def move(path: Path, target: Path) -> None:
    """Rename a file or folder to a name that is not taken. Raises OSError."""
    if os.path.lexists(target):
        raise ForeignFileError(target, "it is in the way")
    path.rename(target)


def ensure_folder(folder: Path) -> None:
    """Make a folder and its missing parents. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)


def private_folder(folder: Path) -> None:
    """Make a folder to which only this user may write, and its missing parents.

    Raises ForeignFileError if other users may write to it or replace it; makes nothing below a
    folder of theirs. Raises OSError.
    """
    _check_parents(folder)
    ensure_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status, user = folder.lstat(), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignFileError(folder, "it is not a folder")
    if status.st_uid != user:
        raise ForeignFileError(folder, "it belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignFileError(folder, "other users may write to it")
    _check_parents(folder)


def _check_parents(path: Path) -> None:
    """Raise ForeignFileError if other users may replace a folder or a link on the way to a path."""
    for parent in _on_the_way(path):
        status = parent.lstat()
        if status.st_uid not in (os.geteuid(), 0):
            raise ForeignFileError(parent, "it belongs to another user")
        if stat.S_ISLNK(status.st_mode):
            continue
        # Many systems give each user a group, which may write to the user's folders.
        others = stat.S_IWOTH if status.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP
        # In a sticky folder, users rename only their own files.
        if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
            raise ForeignFileError(parent, "other users may write to it")


def _on_the_way(path: Path) -> Iterator[Path]:
    """Yield the existing folders and links that a path passes through, following links."""
    folder, parts, links = Path(path.absolute().anchor), list(path.absolute().parts[1:]), 0
    while parts:
        yield folder
        following = folder.parent if (part := parts.pop(0)) == ".." else folder / part
        if following.is_symlink():
            yield following
            if (links := links + 1) > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = following.readlink()
            parts[:0] = target.parts[1:] if target.is_absolute() else target.parts
            folder = Path(target.anchor) if target.is_absolute() else folder
        elif not following.exists():
            return
        else:
            folder = following


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, not a link to a folder."""
    return path.is_dir() and not path.is_symlink()


def is_empty(folder: Path) -> bool:
    """Return whether a path is an empty folder, not a link to a folder. Raises OSError."""
    return is_folder(folder) and not entries(folder)


def entries(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted, without files that desktops add. Raises OSError."""
    return sorted(path for path in folder.iterdir() if path.name not in _LITTER)


def contents(folder: Path) -> dict[str, Path]:
    """Return all files and links below a folder, by relative path.

    Raises ForeignFileError or OSError.
    """
    files: dict[str, Path] = {}
    level = [folder]
    for _ in range(_MAX_LEVELS):
        below = []
        for path in (path for entry in level for path in entries(entry)):
            if is_folder(path):
                below.append(path)
            else:
                files[path.relative_to(folder).as_posix()] = path
        if not below:
            return dict(sorted(files.items()))
        level = below
    raise ForeignFileError(folder, _DEPTH_PROBLEM)


def is_shallow(folder: Path) -> bool:
    """Return whether a folder's subfolders are nested shallowly enough to be removed."""
    try:
        contents(folder)
    except ForeignFileError:
        return False
    except OSError:
        pass  # the reader, or the removal, reports the problem
    return True


def others_in(folder: Path, is_own_path: Callable[[str], bool]) -> list[str]:
    """Return the relative paths below a folder that are unknown or not ours. Raises OSError."""
    return [
        name for name, path in contents(folder).items() if not (is_own_path(name) and is_ours(path))
    ]


def remove_folder(folder: Path, is_own_path: Callable[[str], bool]) -> None:
    """Remove a folder if every file in it is ours and has a known relative path.

    Raises ForeignFileError, and removes nothing, if there are other files. Raises OSError.
    """
    if not is_folder(folder):
        raise ForeignFileError(folder, "it is not a folder")
    if others := others_in(folder, is_own_path):
        raise ForeignFileError(folder / others[0], "mlxtune did not write it")
    discard(folder)


def discard(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder that is known to be ours, and all its content.

    Links in it are removed, not followed. Raises ForeignFileError if folders are nested too deeply.
    Raises OSError.
    """
    if is_folder(folder) and not is_shallow(folder):
        if ignore_errors:
            return
        raise ForeignFileError(folder, _DEPTH_PROBLEM)
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def _check(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise ForeignFileError(path, "it is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise ForeignFileError(path, "it is not a regular file")
    if status.st_nlink > 1:
        raise ForeignFileError(path, "it also has another name (a hard link)")
    user = os.geteuid()
    if status.st_uid != user and status.st_uid != _owner_of_new_files(status.st_dev, path.parent):
        raise ForeignFileError(path, "it belongs to another user")


@cache
def _owner_of_new_files(device: int, folder: Path) -> int:
    """Return the id of the user whom a file system names as the owner of new files.

    Some network and shared file systems give all files one owner.
    """
    del device  # part of the cache's key, as another file system may be mounted on the folder
    path = folder / temporary_name("owner")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
    except OSError:
        return os.geteuid()
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        path.unlink()


def temporary_name(name: str) -> str:
    """Return an unpredictable name that only mlxtune gives, for an incomplete file."""
    # Any file system takes names of this length.
    return f".mlxtune-{name[:40]}.{secrets.token_hex(8)}.tmp"
