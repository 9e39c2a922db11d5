"""What a value of --data means: a path, or the name of a data set on the hub.

A name is owner/name[/config][@revision][:split].
"""

import dataclasses
import os
import re

from mlxtune.config import as_path
from mlxtune.config.data_config import weighted
from mlxtune.core.data.sources.datafiles import ENDINGS
from mlxtune.core.names import is_commit

_PART = r"[A-Za-z0-9_][\w.-]*"
REPOSITORY = re.compile(f"{_PART}/{_PART}", re.ASCII)
# Endings of files that hold no rows that we read, but that are often meant to.
_OTHER_ENDINGS = (
    *(".arrow", ".bz2", ".db", ".doc", ".docx", ".epub", ".gz", ".htm", ".html", ".key", ".log"),
    *(".markdown", ".md", ".numbers", ".ods", ".odt", ".pages", ".pdf", ".ppt", ".pptx", ".rst"),
    *(".rtf", ".sqlite", ".tar", ".tex", ".tgz", ".toml", ".txt", ".xls", ".xlsm", ".xlsx"),
    *(".xml", ".xz", ".yaml", ".yml", ".zip", ".zst"),
)
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:/(?P<config>[^/@:]+))?"
    r"(?:@(?P<revision>[^:\s]+))?(?::(?P<split>[\w.-]+))?",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """The name of a data set on the hub. A part that is None stands for the default."""

    repository: str
    config: str | None = None
    revision: str | None = None
    split: str | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the name has a commit, whose files never change."""
        return self.revision is not None and is_commit(self.revision)

    def __str__(self) -> str:
        parts = [("/", self.config), ("@", self.revision), (":", self.split)]
        return self.repository + "".join(mark + each for mark, each in parts if each)


@dataclasses.dataclass(frozen=True)
class DataValue:
    """The meaning of a value of --data or --val-data.

    `text` is the value without its `weight`, and `name` the data set that it names on the hub; None
    if it is a path.
    """

    text: str
    weight: float
    name: DatasetName | None


def data_value(value: str, option: str = "data") -> DataValue:
    """Return the meaning of an option's value; only values of --data have weights.

    Used both to read the data and to ask before a download.
    """
    text, weight = weighted(value) if option == "data" else (value, 1.0)
    return DataValue(text, weight, dataset_name(text))


def dataset_name(text: str) -> DatasetName | None:
    """Return the data set that a value of --data names, or None if the value is a path.

    An existing file or folder, or a name with a file's suffix, is a path. So is a name without
    revision and split whose parent folder exists, which is more likely a mistyped path.
    """
    match, path = _NAME.fullmatch(text), as_path(text)
    if match is None or text.lower().endswith((*ENDINGS, *_OTHER_ENDINGS)):
        return None
    if os.path.lexists(path) or (not set("@:") & set(text) and os.path.lexists(path.parent)):
        return None
    return DatasetName(**match.groupdict())
