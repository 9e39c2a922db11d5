"""A folder that appears whole or not at all: made next to its target, then renamed."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxtune.core.files.files import (
    as_output_error,
    beside,
    check_writable,
    same_place,
    sync,
)
from mlxtune.errors import OutputError


@contextmanager
def new_folder(
    target: Path, sources: Iterable[Path], *, marker: str, overwrite: bool
) -> Iterator[Path]:
    """Yield a folder to fill, which becomes the target if all goes well.

    An existing folder is replaced only with `overwrite`, and only if it holds the file `marker`,
    which every folder written here has: mlxtune must not remove any other folder. `sources` are the
    files and folders that are read, which the target must not hold.

    Raises OutputError.
    """
    check_writable(target, "--output")
    _check_apart(target, sources)
    _check_free(target, marker, overwrite)
    # Two processes may write to one target; each has its own folder beside it.
    aside = target.with_name(f".{target.name[:40]}.{os.getpid()}.old")
    with replaced_folder(target, "--output", aside, lambda folder: _has(folder, marker)) as folder:
        yield folder
        for path in folder.rglob("*"):
            sync(path)


@contextmanager
def replaced_folder(
    target: Path, option: str, aside: Path, is_ours: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yield an empty folder to fill, which replaces the target if all goes well.

    Otherwise the target stays as it was. `option` is the one that named it; it steps `aside` until
    the new one is there. Only what `is_ours` is replaced or removed. Raises OutputError.
    """
    temporary = beside(target)

    def clean_up() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        put_back(aside, target)
        if is_ours(aside):
            shutil.rmtree(aside, ignore_errors=True)

    with as_output_error(target, option):
        clean_up()  # a killed process may have left some
        check_ours(target, option, is_ours)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            # rename cannot replace a folder that is not empty, so the old one moves first.
            if target.exists():
                target.rename(aside)
            temporary.rename(target)
            sync(target.parent)
        finally:
            clean_up()


def check_ours(target: Path, option: str, is_ours: Callable[[Path], bool]) -> None:
    """Raise OutputError if a folder is there, not empty, that is not ours."""
    if os.path.lexists(target) and not is_ours(target):
        if is_folder(target) and not any(target.iterdir()):
            return
        raise OutputError(
            f"{target}: holds files that mlxtune did not write: move it away, or choose another "
            f"{option}"
        )


def is_folder(path: Path) -> bool:
    """Return whether this is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def put_back(aside: Path, target: Path) -> None:
    """Rename a folder back if its replacement never came, because the process was killed."""
    if is_folder(aside) and not os.path.lexists(target):
        aside.rename(target)


def _has(folder: Path, marker: str) -> bool:
    return is_folder(folder) and (folder / marker).is_file()


def _check_apart(target: Path, sources: Iterable[Path]) -> None:
    for path in sources:
        source = Path(os.path.realpath(path))
        if any(same_place(target, each) for each in (source, *source.parents)):
            raise OutputError(
                f"{target}: contains {path}, which is an input: choose another --output"
            )


def _check_free(target: Path, marker: str, overwrite: bool) -> None:
    with as_output_error(target, "--output"):
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not target.is_dir():
            raise OutputError(f"{target}: is not a folder: --output takes the name of a folder")
        if not any(target.iterdir()):
            return
        if not (target / marker).is_file():
            raise OutputError(
                f"{target}: already holds other files: choose another --output, or remove it"
            )
        if not overwrite:
            raise OutputError(
                f"{target}: already exists: choose another --output, or add --overwrite"
            )
