"""A folder that appears whole or not at all: made next to its target, then renamed."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxtune.core.machine.files import as_output_error, check_writable, sync
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
    _check_apart(target, sources)
    _check_free(target, marker, overwrite)
    check_writable(target.parent, "--output")
    # Two processes may write to one target; each has its own folder beside it.
    with replaced_folder(target, "--output", f"{target.name}.{os.getpid()}") as folder:
        yield folder
        for path in folder.rglob("*"):
            sync(path)


@contextmanager
def replaced_folder(target: Path, option: str, name: str) -> Iterator[Path]:
    """Yield an empty folder to fill, which replaces the target if all goes well.

    Otherwise the target stays as it was. `option` is the one that named it, and `name` is part of
    the names of the folders beside it. Raises OutputError.
    """
    temporary, replaced = (target.with_name(f".{name}.{state}") for state in ("tmp", "old"))

    def clean_up() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        put_back(replaced, target)
        shutil.rmtree(replaced, ignore_errors=True)

    with as_output_error(target, option):
        clean_up()  # a killed process may have left some
        try:
            temporary.mkdir(parents=True)
            yield temporary
            # rename cannot replace a folder that is not empty, so the old one moves first.
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            sync(target.parent)
        finally:
            clean_up()


def put_back(replaced: Path, target: Path) -> None:
    """Rename a folder back if its replacement never came, because the process was killed."""
    if replaced.exists() and not target.exists():
        replaced.rename(target)


def _check_apart(target: Path, sources: Iterable[Path]) -> None:
    real_target = Path(os.path.realpath(target))
    for path in sources:
        source = Path(os.path.realpath(path))
        if source == real_target or real_target in source.parents:
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
