"""A row, and a short way to read the rows of a file, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxtune.core.data.problems import BadRow
from mlxtune.core.data.sources.datafiles import read_objects

ROW = {"text": "Hé"}
GOOD = json.dumps(ROW).encode()


def read(path: Path) -> list[tuple[int, Any]]:
    """The rows, bad ones as their reason in text."""
    return [(row, str(r) if isinstance(r, BadRow) else r) for row, r in read_objects(path)]
