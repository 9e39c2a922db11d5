"""Data sets of the hub: which files each split has, and their download at a commit.

The files go into the cache of the hub's client. A repository may contain several data sets, called
configurations; most contain only one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub.errors import RevisionNotFoundError

from mlxtune.config import user_cache
from mlxtune.core.data.cache import cache_key
from mlxtune.core.data.sources.datafiles import ENDINGS, VALIDATION
from mlxtune.core.files.reading import read_json
from mlxtune.core.files.writing import make_folder, write_json
from mlxtune.core.formatting import join_few
from mlxtune.core.names import is_commit
from mlxtune.errors import DataError, OutputError, one_line, shorten
from mlxtune.hub.client import asking
from mlxtune.hub.dataset_name import DatasetName

# The branch with the hub's own conversion to parquet.
_PARQUET_BRANCH = "refs/convert/parquet"
_REPOSITORY_KIND = "dataset"
# Starts an error about a name that may be a mistyped path.
_MISSING_PATH = "no such file or folder here, and "
# The time limit, in seconds, of a response that is not a file.
_TIMEOUT = 20.0
_MAX_LICENSE_CHARS = 100
# Configurations by name, each with the files of its splits.
Splits = Mapping[str, Mapping[str, Sequence[str]]]
DEFAULT, TRAIN, TEST = "default", "train", "test"
# Paths in the branch with the hub's conversion to parquet. If a data set is very large, the branch
# has only part of each split, whose name gets a prefix.
_CONVERTED_FILE = re.compile(r"([^/]+)/([^/]+)/\d+\.parquet")
_PARTIAL_PREFIX = "partial-"
# Files that the `datasets` library ignores, and file names that it assigns to splits.
_METADATA_FILES = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_SHARD = re.compile(r"(?:^|/)([\w.]+)-\d{5}-of-\d{5}\.")
_WORDS = {
    TRAIN: ("train", "training"),
    "validation": (*VALIDATION,),
    TEST: ("test", "testing", "eval", "evaluation"),
}
_SPLIT_PATTERNS = {
    split: re.compile(rf"(?:^|[-._ /0-9])(?:{'|'.join(words)})(?:[-._ /0-9]|$)", re.IGNORECASE)
    for split, words in _WORDS.items()
}


@dataclass(frozen=True)
class HubData:
    """A data set of the hub: its name, with configuration and commit, and its files by split.

    `license` is empty if the data set names none; `public` says whether anybody may read it.
    """

    name: DatasetName
    license: str
    public: bool
    files: Mapping[str, Sequence[Path]]

    @property
    def train(self) -> list[Path]:
        return [path for files in list(self.files.values())[:1] for path in files]

    @property
    def validation(self) -> list[Path]:
        return [path for files in list(self.files.values())[1:] for path in files]

    @property
    def titles(self) -> dict[str, str]:
        config = None if self.name.config == DEFAULT else self.name.config
        return {
            split: str(DatasetName(self.name.repository, config, split=split))
            for split in self.files
        }

    def title_of_files(self) -> dict[Path, str]:
        """Return a readable name for each file's path in the cache."""
        return {
            path: self.titles[split] + (f"/{path.name}" if len(paths) > 1 else "")
            for split, paths in self.files.items()
            for path in paths
        }

    def about(self) -> dict[str, Any]:
        return {
            "name": str(self.name),
            "repository": self.name.repository,
            "config": self.name.config,
            "titles": self.titles,
            "commit": self.name.revision,
            "license": self.license,
            "public": self.public,
        }


def fetch(name: DatasetName, *, held_out: bool = False, quiet: bool = False) -> HubData:
    """Return a data set with its files, after downloading those that are not cached.

    A name without a split stands for the training data and any validation data or, if `held_out`,
    for the data to evaluate on. Unless `held_out`, a pinned name with cached files needs no
    network.

    Raises DataError.
    """
    with asking(str(name), _REPOSITORY_KIND, DataError, quiet=quiet, here=_MISSING_PATH) as hub:
        listing = (_read_record(name) if not held_out else None) or _listing(hub, name, held_out)
        download = partial(
            hub.hf_hub_download,
            name.repository,
            repo_type="dataset",
            revision=listing.name.revision,
        )
        files = {
            split: [Path(download(str(file))) for file in files]
            for split, files in listing.files.items()
        }
    return replace(listing, files=files)


def _listing(hub: huggingface_hub.HfApi, name: DatasetName, held_out: bool) -> HubData:
    """Ask the hub what a name stands for; the files' paths are those in the repository."""
    about = hub.dataset_info(name.repository, timeout=_TIMEOUT)
    info, splits = about, None
    if name.revision is None:
        with suppress(RevisionNotFoundError):
            info = hub.dataset_info(name.repository, revision=_PARQUET_BRANCH, timeout=_TIMEOUT)
            splits = converted_splits(_names(info))
        info = info if splits else about
    else:
        info = hub.dataset_info(name.repository, revision=name.revision, timeout=_TIMEOUT)
    if not splits:
        splits = own_splits(_names(info), (info.card_data or {}).get("configs"))
    if not is_commit(info.sha):
        raise ValueError(f"no commit: {info.sha!r}")
    config, files = choose_splits(name, splits, held_out=held_out)
    split = next(iter(files)) if held_out else name.split
    listing = HubData(
        name=DatasetName(name.repository, config, info.sha, split),
        license=_license(about),
        public=about.private is False and not about.gated,
        files={split: list(map(Path, each)) for split, each in files.items()},
    )
    _record(listing)
    return listing


def _names(info: huggingface_hub.DatasetInfo) -> list[str]:
    return [sibling.rfilename for sibling in info.siblings or []]


def _license(info: huggingface_hub.DatasetInfo) -> str:
    card = info.card_data or {}
    license = card.get("license")
    if license == "other":
        license = card.get("license_name") or license
    if not license:
        tags = (str(tag) for tag in info.tags or [])
        license = [tag.partition(":")[2] for tag in tags if tag.startswith("license:")]
    text = ", ".join(map(str, license)) if isinstance(license, list) else str(license)
    return one_line(text)[:_MAX_LICENSE_CHARS] if text else ""


# The hub's responses about a commit never change, and are kept so that a run can resume offline.


def _place(name: DatasetName) -> Path:
    return user_cache() / "hub" / f"{cache_key(str(name))}.json"


def _record(listing: HubData) -> None:
    path = _place(listing.name)
    values = {
        "license": listing.license,
        "public": listing.public,
        "files": {split: list(map(str, files)) for split, files in listing.files.items()},
    }
    with suppress(OutputError):
        make_folder(path.parent)
        write_json(path, values)


def _read_record(name: DatasetName) -> HubData | None:
    if not name.is_pinned or name.config is None:
        return None
    try:
        values = read_json(_place(name))
        files = {str(split): [*map(Path, each)] for split, each in values["files"].items()}
        return HubData(name, str(values["license"]), values["public"] is True, files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def converted_splits(files: Iterable[str]) -> Splits:
    """Return the splits in the hub's parquet branch; none if the branch lacks part of the data."""
    splits: dict[str, dict[str, list[str]]] = {}
    for file in sorted(files):
        if match := _CONVERTED_FILE.fullmatch(file):
            config, split = match.groups()
            if split.startswith(_PARTIAL_PREFIX):
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
        if name.endswith(ENDINGS) and name not in _METADATA_FILES and not name.startswith("."):
            kind = next(
                ending for ending in sorted(ENDINGS, key=len)[::-1] if name.endswith(ending)
            )
            kinds.setdefault(kind, []).append(file)
    return max(kinds.values(), key=len, default=[])


def _declared(entries: Any, data: Sequence[str]) -> dict[str, list[str]]:
    """Return the files that a card declares for each split; the default split is train."""
    by_split: dict[str, list[str]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        one = entry if isinstance(entry, Mapping) else {"path": entry}
        paths = one.get("path")
        patterns = paths if isinstance(paths, list) else [paths]
        selected = [
            file
            for file in data
            if any(isinstance(pattern, str) and _matches(file, pattern) for pattern in patterns)
        ]
        if selected:
            by_split.setdefault(str(one.get("split", TRAIN)), []).extend(selected)
    return by_split


def _matches(file: str, pattern: str) -> bool:
    return len(pattern) < 500 and fnmatchcase(file, pattern.replace("**/", "*"))


def _split_in(file: str) -> str | None:
    if shard := _SHARD.search(file):
        return shard[1]
    # A file's own name is searched before its whole path, because a folder's name may mislead.
    for text in (PurePosixPath(file).name, file):
        if split := next(
            (each for each, word in _SPLIT_PATTERNS.items() if word.search(text)), None
        ):
            return split
    return None


def choose_splits(
    name: DatasetName, splits: Splits, *, held_out: bool = False
) -> tuple[str, dict[str, Sequence[str]]]:
    """Return the configuration that a name stands for, and the files of the wanted splits.

    A name without a split stands for the training data and any validation data or, if `held_out`,
    for the test data or else the validation data. Raises DataError, which lists any existing
    configurations or splits.
    """
    if not splits:
        raise DataError(
            f"{name} has no JSON lines, CSV or parquet to read: download it, convert it to JSON "
            "lines, and name the file"
        )
    config = name.config or (DEFAULT if DEFAULT in splits else min(splits))
    if config not in splits or (name.config is None and len(splits) > 1 and config != DEFAULT):
        problem = (
            f"has no configuration {shorten(config)}"
            if name.config
            else "has several configurations"
        )
        names, example = sorted(splits), replace(name, config=min(splits))
        raise DataError(f"{name}: {problem} ({join_few(names, 20)}): name one, as {example}")
    by_split = splits[config]
    validation = [each for each in VALIDATION if each in by_split][:1]
    if name.split is not None:
        wanted = [name.split]
    elif held_out:
        wanted = [TEST] if TEST in by_split or not validation else validation
    else:
        wanted = [TRAIN, *validation]
    if wanted[0] not in by_split:
        names, example = sorted(by_split), replace(name, split=min(by_split))
        raise DataError(
            f"{name} has no split {shorten(wanted[0])} ({join_few(names, 20)}): name one, as "
            f"{example}"
        )
    return config, {split: by_split[split] for split in wanted}
