"""Names of data sets on the hub, as --data takes them: owner/name[/config][@revision][:split]."""

import dataclasses
import os
import re

from mlxtune.config import as_path
from mlxtune.core.data.sources.datafiles import ENDINGS
from mlxtune.core.names import is_commit

_PART = r"[A-Za-z0-9_][\w.-]*"
REPOSITORY = re.compile(f"{_PART}/{_PART}", re.ASCII)
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


def dataset_name(text: str) -> DatasetName | None:
    """Return the data set that a value of --data names, or None if the value is a path.

    An existing file or folder, or a name with a data file's suffix, is a path.
    """
    match = _NAME.fullmatch(text)
    if match is None or text.endswith(ENDINGS) or os.path.lexists(as_path(text)):
        return None
    return DatasetName(**match.groupdict())
