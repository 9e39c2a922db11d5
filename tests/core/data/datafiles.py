"""A row, and a function that reads the rows of a file, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.sources.rows import read_objects

ROW = {"text": "Hé"}
GOOD = json.dumps(ROW).encode()


def read(path: Path) -> list[tuple[int, Any]]:
    """Return the rows of a file, with the reason as text for each bad row."""
    return [(row, str(r) if isinstance(r, BadRowError) else r) for row, r in read_objects(path)]
