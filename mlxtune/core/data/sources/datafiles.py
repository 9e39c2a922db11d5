"""Finds data files: those that options name, and a folder's files by name."""

import difflib
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mlxtune.core.data.problems import TABLE_ENDINGS, UTF8_BOM
from mlxtune.core.files.reading import check_stored, read_start, target_outside
from mlxtune.errors import DataError, one_line

TEXT_ENDINGS = (".txt", ".md", ".markdown")

# The suffixes of files in a data folder: mlx-lm's .jsonl, and the suffixes of other formats.
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", *TABLE_ENDINGS)
PARQUET_REMEDY = "load it in Python, and save each split with its to_parquet()"
# The names of validation files, and of validation splits on the hub.
VALIDATION = ("validation", "valid", "val", "dev")
# ChatGPT's export is a folder or an archive with this file; long exports have several.
CHATGPT_FILE = re.compile(r"conversations(-\d{1,6})?\.json")
# The most names of a folder to compare with a missing one, and the most text files to read from it.
_MAX_NAMES, _MAX_TEXTS = 10_000, 1000
# The most bytes of a text file that may hold only white space.
_MAX_BLANK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files to train on, the validation files, and text files of a folder without text."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    blank: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        return (*self.train, *self.validation)


@contextmanager
def reading(path: Path, option: str = "--data") -> Iterator[None]:
    """Turn errors of reading a path that `option` names into DataError."""
    try:
        yield
    except FileNotFoundError as error:
        if path.is_symlink():
            raise DataError(
                f"{path} is a link to {path.readlink()}, which does not exist: check {option}"
            ) from error
        several = ", and repeat it for each of several files" * ("," in str(path))
        similar = _similar(path)
        raise DataError(f"{path}: no such file{similar}: check {option}{several}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is a damaged gzip file ({one_line(error)}): copy or compress it again"
        ) from error
    except DataError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"{path} cannot be read: {reason or one_line(error)}") from error


def _similar(path: Path) -> str:
    """Return the name beside a missing path that was probably meant, as part of a message."""
    close: list[str] = []
    with suppress(OSError, ValueError), os.scandir(path.parent) as entries:
        names = [entry.name for entry in islice(entries, _MAX_NAMES) if len(entry.name) < 256]
        close = difflib.get_close_matches(path.name[:256], names, n=1, cutoff=0.8)
    return f" (did you mean {path.with_name(close[0])}?)" if close else ""


def find_data_files(
    paths: Sequence[Path],
    option: str = "--data",
    *,
    validation_files: Sequence[Path] = (),
    texts: bool = False,
) -> DataFiles:
    """Return the files that `option` names; from folders, the train and validation files.

    A folder without a `train` file may be ChatGPT's export or, with `texts`, hold plain text.
    `validation_files` are added to the validation files.

    Raises DataError if a path is missing, a folder has no `train` file, `option` takes no folder,
    or a file is named twice.
    """
    train: list[Path] = []
    blank: list[Path] = []
    validation = [*validation_files]
    for path in paths:
        if not stat.S_ISDIR(_stat(path, option).st_mode):
            train.append(path)
        elif option != "--data":
            raise DataError(f"{path} is a folder: name a file in it")
        elif not (files := _file_named(("train",), path) or _known_files(path, texts=texts)):
            raise DataError(f"{path} {_why_no_files(path, texts=texts)}")
        else:
            without_text = [each for each in files if _is_blank(each)]
            if len(without_text) < len(files):
                files = [each for each in files if each not in without_text]
                blank += without_text
            train += files
            validation += _file_named(VALIDATION, path)
    seen: dict[tuple[int, int], Path] = {}
    for path in (*train, *validation):
        info = _stat(path, option)
        # Links, and disks that ignore case, give one file several names.
        key = (info.st_dev, info.st_ino)
        if (other := seen.get(key)) is not None:
            same = "" if other == path else f", as {other}"
            raise DataError(f"{path} is given twice{same}: name each file once in {option}")
        seen[key] = path
    return DataFiles(tuple(train), tuple(validation), tuple(blank))


def _known_files(folder: Path, *, texts: bool) -> list[Path]:
    """Return the files of ChatGPT's export in a folder or, with `texts`, its files of plain text.

    Hidden files and folders are left out. Raises DataError.
    """
    with reading(folder):
        if exported := sorted(
            path for path in folder.iterdir() if CHATGPT_FILE.fullmatch(path.name)
        ):
            return _without_links_out(folder, exported)
        text_files = list(islice(_text_files(folder), _MAX_TEXTS + 1)) if texts else []
    if len(text_files) > _MAX_TEXTS:
        raise DataError(
            f"{folder} has more than {_MAX_TEXTS:,} text files: write them as JSON lines, such as "
            '{"text": "…"}'
        )
    return _without_links_out(folder, sorted(text_files))


def _without_links_out(folder: Path, files: list[Path]) -> list[Path]:
    """Return the files of a data folder. Raises DataError for a link that leaves the folder.

    A folder from someone else could otherwise have a private file trained on.
    """
    for path in files:
        if target := target_outside(path, folder):
            raise DataError(
                f"{path} links to {target}, which is outside the folder: name that file itself, or "
                "remove the link"
            )
    return files


def _text_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown = (name for name in names if not name.startswith("."))
        yield from (Path(parent, name) for name in shown if name.lower().endswith(TEXT_ENDINGS))


def _is_blank(path: Path) -> bool:
    """Return whether a small file of plain text holds only white space."""
    if (
        not path.name.lower().endswith(TEXT_ENDINGS)
        or _stat(path, "--data").st_size > _MAX_BLANK_BYTES
    ):
        return False
    with reading(path):
        return not read_start(path, _MAX_BLANK_BYTES).removeprefix(UTF8_BOM).strip()


def needs(path: Path) -> str:
    """Return what a file of such a name needs in order to have rows."""
    name = path.name.lower()
    if name.endswith(TABLE_ENDINGS):
        return "a line of column names, then one row per line"
    return "text to train on" if name.endswith(TEXT_ENDINGS) else "one JSON object per line"


def _why_no_files(folder: Path, *, texts: bool) -> str:
    """Return why a folder has no files to train on, and the remedy."""
    with reading(folder):
        names = sorted(path.name for path in folder.iterdir())[:_MAX_NAMES]
        inner = [folder / name for name in names if (folder / name).is_dir()]
    if "dataset_dict.json" in names or "state.json" in names:
        return f"is a data set of save_to_disk: {PARQUET_REMEDY}"
    problem = "has no file to train on"
    for each in inner:
        if not each.name.startswith(".") and not each.is_symlink():
            if _file_named(("train",), each):
                return f"{problem}, but its folder {each.name} has one: use --data {each}"
            with reading(each):
                files = sorted(file for file in each.iterdir() if file.name.endswith(ENDINGS))
            if files:
                return f"{problem}, but its folder {each.name} has some: name them, as {files[0]}"
    names = [f"train{ending}" for ending in ENDINGS]
    has_texts = not texts and next(_text_files(folder), None) is not None
    advice = "; for its .txt and .md files, use --format text" * has_texts
    return f"{problem}: name a file in it, or rename one to any of {', '.join(names)}{advice}"


def held_out_file(folder: Path) -> Path:
    """Return the folder's `test` file, or else its validation file. Raises DataError."""
    files = _file_named(("test",), folder) or _file_named(VALIDATION, folder)
    if not files:
        raise DataError(
            f"{folder} has neither test.jsonl nor validation.jsonl: name the file to evaluate"
        )
    return files[0]


def _stat(path: Path, option: str) -> os.stat_result:
    with reading(path, option):
        info = path.stat()
        # Files are read twice, and a pipe can be read only once.
        if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
            raise DataError(f"{path} is not a regular file: save the data in one")
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
            f"{folder} holds {' and '.join(matches)}: keep one, or name the files to train on"
        )
    return _without_links_out(folder, [folder / name for name in matches])
