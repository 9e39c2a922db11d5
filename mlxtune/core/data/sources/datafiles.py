"""Finds data files: the files and folders that options name, and a folder's files by name."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.data.sources.rows import TABLE_ENDINGS, reading
from mlxtune.core.files.reading import check_stored
from mlxtune.errors import DataError

# The suffixes of files in a data folder: mlx-lm's .jsonl, and those of other formats.
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", *TABLE_ENDINGS)
# The names of validation files, and of validation splits on the hub.
VALIDATION = ("validation", "valid", "val", "dev")


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files to train on, and the validation files."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]

    @property
    def all(self) -> tuple[Path, ...]:
        return (*self.train, *self.validation)


def find_data_files(
    paths: Sequence[Path], option: str = "--data", *, validation_files: Sequence[Path] = ()
) -> DataFiles:
    """Return the files that `option` names; from folders, the train and validation files.

    `validation_files` are added to the validation files.

    Raises DataError if a path is missing, a folder has no `train` file, `option` takes no folder,
    or a file is named twice.
    """
    train: list[Path] = []
    validation = [*validation_files]
    for path in paths:
        if not stat.S_ISDIR(_stat(path, option).st_mode):
            train.append(path)
        elif option != "--data":
            raise DataError(f"{path}: is a folder: name a file in it")
        elif not (files := _file_named(("train",), path)):
            names = ", ".join(f"train{ending}" for ending in ENDINGS)
            raise DataError(
                f"{path}: has no file to train on: name a file in it, or rename one to any of "
                f"{names}"
            )
        else:
            train += files
            validation += _file_named(VALIDATION, path)
    seen: dict[tuple[int, int], Path] = {}
    for path in (*train, *validation):
        info = _stat(path, option)
        # Links, and disks that ignore case, give one file several names.
        key = (info.st_dev, info.st_ino)
        if (other := seen.get(key)) is not None:
            same = "" if other == path else f", as {other}"
            raise DataError(f"{path}: is given twice{same}: name each file once in {option}")
        seen[key] = path
    return DataFiles(tuple(train), tuple(validation))


def held_out_file(folder: Path) -> Path:
    """Return the folder's `test` file, or else its validation file. Raises DataError."""
    files = _file_named(("test",), folder) or _file_named(VALIDATION, folder)
    if not files:
        raise DataError(
            f"{folder}: has neither test.jsonl nor validation.jsonl: name the file to evaluate"
        )
    return files[0]


def _stat(path: Path, option: str) -> os.stat_result:
    with reading(path, option):
        info = path.stat()
        # Files are read twice, and a pipe can be read only once.
        if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
            raise DataError(f"{path}: is not a regular file: save the data in one")
        if stat.S_ISREG(info.st_mode):
            check_stored(path)
    return info


def _file_named(stems: Sequence[str], folder: Path) -> list[Path]:
    with reading(folder):
        present = {path.name for path in folder.iterdir()}
    names = [stem + ending for stem in stems for ending in ENDINGS]
    matches = [name for name in names if name in present]
    if len(matches) > 1:
        raise DataError(
            f"{folder}: holds {' and '.join(matches)}: keep one, or name the files to train on"
        )
    return [folder / name for name in matches]
