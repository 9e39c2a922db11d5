"""Finds the files of each configuration and split in a data set's repository.

A repository may contain several data sets, called configurations; most contain only one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from mlxtune.core.data.sources.datafiles import ENDINGS, VALIDATION
from mlxtune.core.text import join_few
from mlxtune.errors import DataError, shorten
from mlxtune.hub.names import DatasetName

# Configurations by name, each with the files of its splits.
Splits = Mapping[str, Mapping[str, Sequence[str]]]
DEFAULT, TRAIN, TEST = "default", "train", "test"
# Paths in the branch with the hub's conversion to parquet. If a data set is very large, the branch
# has only part of each split, whose name gets a prefix.
_CONVERTED = re.compile(r"([^/]+)/([^/]+)/\d+\.parquet")
_PARTIAL = "partial-"
# Files that the `datasets` library ignores, and file names that it assigns to splits.
_NOT_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_SHARD = re.compile(r"(?:^|/)([\w.]+)-\d{5}-of-\d{5}\.")
_WORDS = {
    TRAIN: ("train", "training"),
    "validation": (*VALIDATION,),
    TEST: ("test", "testing", "eval", "evaluation"),
}
_IN_NAME = {
    split: re.compile(rf"(?:^|[-._ /0-9])(?:{'|'.join(words)})(?:[-._ /0-9]|$)", re.IGNORECASE)
    for split, words in _WORDS.items()
}


def converted_splits(files: Iterable[str]) -> Splits:
    """Return the splits in the hub's parquet branch; none if the branch lacks part of the data."""
    splits: dict[str, dict[str, list[str]]] = {}
    for file in sorted(files):
        if match := _CONVERTED.fullmatch(file):
            config, split = match.groups()
            if split.startswith(_PARTIAL):
                return {}
            splits.setdefault(config, {}).setdefault(split, []).append(file)
    return splits


def own_splits(files: Iterable[str], configs: Any) -> Splits:
    """Return the splits of a repository's own files.

    `configs` is the entry of that name in the repository's card, and may have any type. Without a
    usable entry, the names of files and folders decide.
    """
    data = _data_files(files)
    declared = {
        str(config.get("config_name", DEFAULT)): by_split
        for config in (configs if isinstance(configs, list) else [])
        if isinstance(config, Mapping) and (by_split := _declared(config.get("data_files"), data))
    }
    if declared:
        return declared
    if converted := converted_splits(data):
        return converted
    named: dict[str, list[str]] = {}
    for file in data:
        if split := _split_in(file):
            named.setdefault(split, []).append(file)
    named = named or ({TRAIN: data} if data else {})
    return {DEFAULT: named} if named else {}


def _data_files(files: Iterable[str]) -> list[str]:
    """Return the data files of the most common type; other types probably repeat the same rows."""
    kinds: dict[str, list[str]] = {}
    for file in sorted(files):
        name = PurePosixPath(file).name
        if name.endswith(ENDINGS) and name not in _NOT_DATA and not name.startswith("."):
            kind = next(each for each in sorted(ENDINGS, key=len)[::-1] if name.endswith(each))
            kinds.setdefault(kind, []).append(file)
    return max(kinds.values(), key=len, default=[])


def _declared(entries: Any, data: Sequence[str]) -> dict[str, list[str]]:
    """Return the files that a card declares for each split; the default split is train."""
    by_split: dict[str, list[str]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        one = entry if isinstance(entry, Mapping) else {"path": entry}
        paths = one.get("path")
        patterns = paths if isinstance(paths, list) else [paths]
        chosen = [
            file
            for file in data
            if any(isinstance(each, str) and _matches(file, each) for each in patterns)
        ]
        if chosen:
            by_split.setdefault(str(one.get("split", TRAIN)), []).extend(chosen)
    return by_split


def _matches(file: str, pattern: str) -> bool:
    return len(pattern) < 500 and fnmatchcase(file, pattern.replace("**/", "*"))


def _split_in(file: str) -> str | None:
    if shard := _SHARD.search(file):
        return shard[1]
    # A file's own name is searched before its whole path, because a folder's name may mislead.
    for text in (PurePosixPath(file).name, file):
        if split := next((each for each, word in _IN_NAME.items() if word.search(text)), None):
            return split
    return None


def choose(
    name: DatasetName, splits: Splits, *, held_out: bool = False
) -> tuple[str, dict[str, Sequence[str]]]:
    """Return the configuration that a name stands for, and the files of the wanted splits.

    A name without a split stands for the training data and any validation data or, if `held_out`,
    for the test data or else the validation data. Raises DataError, which lists any existing
    configurations or splits.
    """
    if not splits:
        raise DataError(
            f"{name}: has no JSON lines, CSV or parquet to read: download it, convert it to JSON "
            "lines, and name the file"
        )
    config = name.config or (DEFAULT if DEFAULT in splits else min(splits))
    if config not in splits or (name.config is None and len(splits) > 1 and config != DEFAULT):
        problem = (
            f"has no configuration {shorten(config)}"
            if name.config
            else "has several configurations"
        )
        known, example = sorted(splits), replace(name, config=min(splits))
        raise DataError(f"{name}: {problem} ({join_few(known, 20)}): name one, as {example}")
    by_split = splits[config]
    validation = [each for each in VALIDATION if each in by_split][:1]
    if name.split is not None:
        wanted = [name.split]
    elif held_out:
        wanted = [TEST] if TEST in by_split or not validation else validation
    else:
        wanted = [TRAIN, *validation]
    if wanted[0] not in by_split:
        known, example = sorted(by_split), replace(name, split=min(by_split))
        raise DataError(
            f"{name}: has no split {shorten(wanted[0])} ({join_few(known, 20)}): name one, as "
            f"{example}"
        )
    return config, {split: by_split[split] for split in wanted}
