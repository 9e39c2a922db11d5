"""A folder that appears whole or not at all: made next to its target, then renamed."""

from __future__ import annotations

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
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.old")
    with as_output_error(target, "--output"):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for path in temporary.rglob("*"):
                sync(path)
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if replaced.exists() and not target.exists():
                replaced.rename(target)
            shutil.rmtree(replaced, ignore_errors=True)


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
