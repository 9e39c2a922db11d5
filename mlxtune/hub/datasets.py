"""Downloads data sets from the hub, each at a commit, into the cache of the hub's client."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import RevisionNotFoundError

from mlxtune.config import user_cache
from mlxtune.core.data.cache import key_of
from mlxtune.core.files.files import make_folder, read_json, write_json
from mlxtune.core.names import is_commit
from mlxtune.errors import DataError, OutputError, one_line
from mlxtune.hub.client import asking
from mlxtune.hub.names import DatasetName
from mlxtune.hub.splits import DEFAULT, choose, converted_splits, own_splits

# The branch with the hub's own conversion to parquet.
_CONVERTED = "refs/convert/parquet"
_MISSING = "dataset"
# Starts an error about a name that may be a mistyped path.
_HERE = "no such file or folder here, and "
# Time limit, in seconds, of an answer that is not a file.
_TIMEOUT = 20.0
_LONGEST_LICENSE = 100


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
    with asking(str(name), _MISSING, DataError, quiet=quiet, here=_HERE) as hub:
        listing = (_recorded(name) if not held_out else None) or _listing(hub, name, held_out)
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
            info = hub.dataset_info(name.repository, revision=_CONVERTED, timeout=_TIMEOUT)
            splits = converted_splits(_names(info))
        info = info if splits else about
    else:
        info = hub.dataset_info(name.repository, revision=name.revision, timeout=_TIMEOUT)
    if not splits:
        splits = own_splits(_names(info), (info.card_data or {}).get("configs"))
    if not is_commit(info.sha):
        raise ValueError(f"no commit: {info.sha!r}")
    config, files = choose(name, splits, held_out=held_out)
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
    return [each.rfilename for each in info.siblings or []]


def _license(info: huggingface_hub.DatasetInfo) -> str:
    card = info.card_data or {}
    license = card.get("license")
    if license == "other":
        license = card.get("license_name") or license
    if not license:
        tags = (str(tag) for tag in info.tags or [])
        license = [tag.partition(":")[2] for tag in tags if tag.startswith("license:")]
    text = ", ".join(map(str, license)) if isinstance(license, list) else str(license)
    return one_line(text)[:_LONGEST_LICENSE] if text else ""


# The hub's answers about a commit never change, and are kept so that a run can resume offline.


def _place(name: DatasetName) -> Path:
    return user_cache() / "hub" / f"{key_of(str(name))}.json"


def _record(listing: HubData) -> None:
    place = _place(listing.name)
    values = {
        "license": listing.license,
        "public": listing.public,
        "files": {split: list(map(str, files)) for split, files in listing.files.items()},
    }
    with suppress(OutputError):
        make_folder(place.parent)
        write_json(place, values)


def _recorded(name: DatasetName) -> HubData | None:
    if not name.is_pinned or name.config is None:
        return None
    try:
        values = read_json(_place(name))
        files = {str(split): [*map(Path, each)] for split, each in values["files"].items()}
        return HubData(name, str(values["license"]), values["public"] is True, files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
