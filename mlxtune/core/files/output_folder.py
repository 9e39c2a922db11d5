"""Writes folders atomically: next to their target, which they then replace."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxtune.core.files.lock import check_not_moved
from mlxtune.core.files.ours import contents, discard, is_empty, is_folder, is_ours, move
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.files.remembered import is_remembered, remember
from mlxtune.core.files.writing import as_output_error, beside, check_writable, is_same_place, sync
from mlxtune.core.formatting import join_few
from mlxtune.errors import OutputError

# Each file's inode, size and modification time when it was found to be ours.
_Known = Mapping[str, tuple[int, int, int]]


@contextmanager
def new_folder(
    target: Path, sources: Iterable[Path], *, manifest: str, overwrite: bool
) -> Iterator[Path]:
    """Yield a folder to fill, which becomes the target if all goes well.

    The caller writes the file `manifest` into the folder: JSON whose `files` has the SHA-256 of all
    other files. An existing folder is replaced only with `overwrite`, and only if it contains
    exactly the unchanged files of its manifest, and the manifest is remembered as this user's.
    `sources` are the files and folders to read, which must not be in the target.

    Raises OutputError.
    """
    check_writable(target, "--output")
    _check_apart(target, sources)
    fingerprints = _check_free(target, manifest, overwrite)

    def is_known(folder: Path) -> bool:
        return is_folder(folder) and _fingerprints(folder) == fingerprints

    # Two processes may write to one target, so each fills a separate folder next to it.
    with replaced_folder(target, "--output", beside(target), is_known) as folder:
        yield folder
        for path in folder.rglob("*"):
            sync(path)
        remember(file_hash(folder / manifest))


@contextmanager
def replaced_folder(
    target: Path, option: str, aside: Path, is_known: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yield an empty folder to fill, which replaces the target if all goes well.

    Otherwise the target stays as it was. `option` is named in errors. The target moves `aside`
    until the new folder is in place. The target and `aside` change only if `is_known` accepts them.
    Raises OutputError, or FolderMovedError if this process locked a folder above that was moved.
    """
    temporary = beside(target)

    def clean_up() -> None:
        discard(temporary, ignore_errors=True)
        put_back(aside, target, is_known)
        if is_known(aside):
            discard(aside, ignore_errors=True)

    with as_output_error(target, option):
        clean_up()  # a killed process may have left `aside`
        _check_known(target, option, is_known)
        try:
            check_not_moved(target)
            temporary.mkdir(parents=True)
            yield temporary
            check_not_moved(target)
            _check_known(target, option, is_known)
            # rename cannot replace a folder that is not empty, so the old folder moves first.
            if target.exists():
                move(target, aside)
            move(temporary, target)
            sync(target.parent)
        finally:
            clean_up()


def _check_known(target: Path, option: str, is_known: Callable[[Path], bool]) -> None:
    if os.path.lexists(target) and not is_empty(target) and not is_known(target):
        raise OutputError(
            f"{target} holds files that mlxtune did not write: move it away, or choose another "
            f"{option}"
        )


def put_back(aside: Path, target: Path, is_known: Callable[[Path], bool]) -> None:
    """Rename `aside` back if a process was killed before it put a new folder in place."""
    if not os.path.lexists(target) and is_known(aside):
        move(aside, target)


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by relative path. Raises OSError."""
    return {name: file_hash(path) for name, path in contents(folder).items() if path.is_file()}


def _fingerprints(folder: Path) -> _Known:
    fingerprints = {}
    with suppress(OSError):
        for name, path in contents(folder).items():
            status = path.lstat()
            fingerprints[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return fingerprints


def _check_apart(target: Path, sources: Iterable[Path]) -> None:
    for path in sources:
        source = Path(os.path.realpath(path))
        if any(is_same_place(target, parent) for parent in (source, *source.parents)):
            raise OutputError(
                f"{target} contains {path}, which is an input: choose another --output"
            )


def _check_free(target: Path, manifest: str, overwrite: bool) -> _Known:
    """Check that the target may be written; return fingerprints of its files, all of them ours."""
    with as_output_error(target, "--output"):
        if not os.path.lexists(target):
            return {}
        if target.is_symlink() or not target.is_dir():
            raise OutputError(f"{target} is not a folder: --output takes the name of a folder")
        if is_empty(target):
            return {}
        if not _is_remembered(target / manifest):
            raise OutputError(
                f"{target}: already holds other files, or was not written by you on this machine: "
                "choose another --output, or remove the folder"
            )
        if not overwrite:
            raise OutputError(
                f"{target}: already exists: choose another --output, or add --overwrite"
            )
        fingerprints = _fingerprints(target)
        _check_written(target, {**read_json(target / manifest)["files"], manifest: None})
    return fingerprints


def _is_remembered(manifest: Path) -> bool:
    with suppress(OSError, ValueError):
        return is_remembered(file_hash(manifest))
    return False


def _check_written(target: Path, files: Mapping[str, Any]) -> None:
    """Raise OutputError unless a folder holds only `files`, each with the SHA-256 given, if any."""
    remedy = "move it away, or choose another --output"
    written = contents(target)
    if others := [name for name in written if name not in files or not is_ours(written[name])]:
        raise OutputError(f"{target} holds {join_few(others, 3)}, not written by mlxtune: {remedy}")
    for name, path in written.items():
        if files[name] is not None and file_hash(path) != files[name]:
            raise OutputError(f"{path} was changed after mlxtune wrote it: {remedy}")
