"""Finding the runs below a folder, and putting them in order."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlxtune.core.runs.summary import RunSummary
from mlxtune.core.training.checkpoint import MANIFEST, METRICS
from mlxtune.core.training.run_folder import ABOUT, PREVIOUS

# Large folders that never hold runs.
_SKIPPED = ("node_modules", "site-packages", "__pycache__", "proc", "sys", "dev")


def find_runs(folder: Path, depth: int = 6) -> Iterator[Path]:
    """Yield the folders of runs at or some levels below a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            is_folder = {each.name: each.is_dir(follow_symlinks=False) for each in entries}
    except OSError:
        return
    if is_folder.keys() & {MANIFEST, "pyvenv.cfg"}:
        return
    if is_folder.keys() & {METRICS, ABOUT}:
        yield folder
        # Inside a run, only the run that it replaced.
        is_folder = {PREVIOUS: is_folder.get(PREVIOUS, False)}
    for name in sorted(is_folder):
        if depth and is_folder[name] and name not in _SKIPPED and not name.startswith("."):
            yield from find_runs(folder / name, depth - 1)


def _lowest_first(value: float | None) -> float:
    return math.inf if value is None else value


def _newest_first(run: RunSummary) -> float:
    return -datetime.datetime.fromisoformat(run.started).timestamp() if run.started else 0.0


# The keys that sort runs: the newest, the lowest loss, the fastest or the longest first.
SORTS: dict[str, Callable[[RunSummary], Any]] = {
    "when": _newest_first,
    "name": lambda run: run.name,
    "val": lambda run: _lowest_first(run.best_val_loss),
    "train": lambda run: _lowest_first(run.train_loss),
    "speed": lambda run: -(run.tokens_per_second or 0.0),
    "steps": lambda run: -run.step,
}
