"""Finding the runs below a folder, and putting them in order."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxtune.core.runs.run import Run
from mlxtune.core.runs.summary import RunSummary, summarize
from mlxtune.core.training.checkpoint import BEST, MANIFEST, METRICS
from mlxtune.core.training.run_folder import ABOUT, LEDGER, PREVIOUS

# How many levels a search descends, and how many files and folders it looks at.
DEPTH, ENTRIES = 6, 200_000
# Large folders that never hold runs.
_SKIPPED = ("node_modules", "site-packages", "__pycache__", "proc", "sys", "dev")
_CURVE_POINTS = 12
SORTS = ("when", "name", "val", "train", "speed", "steps")


@dataclass
class Search:
    """Finds runs below folders; `cut_short` lists the folders it could not search completely."""

    entries: int = ENTRIES

    def __post_init__(self) -> None:
        self._left = self.entries
        self.cut_short: list[Path] = []

    def runs(self, folder: Path, depth: int = DEPTH) -> Iterator[Path]:
        """Yield the folders of runs at or below a folder, sorted by name."""
        names, folders = set(), []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        self.cut_short.append(folder)
                        return
                    names.add(entry.name)
                    if _may_hold_runs(entry):
                        folders.append(entry.name)
        except OSError:
            return
        if MANIFEST in names or "pyvenv.cfg" in names:
            return
        if names & {METRICS, ABOUT, LEDGER}:
            yield folder
            # Inside a run, only the run that it replaced.
            folders = [name for name in folders if name == PREVIOUS]
        if depth > 0:
            for name in sorted(folders):
                yield from self.runs(folder / name, depth - 1)


def _may_hold_runs(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    if name.startswith((".", "epoch-", "step-")) or name in (*_SKIPPED, BEST):
        return False
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


@dataclass(frozen=True)
class ListedRun:
    """A run's summary and its loss curve: validation loss, or training loss without three."""

    summary: RunSummary
    curve: tuple[float, ...]

    @classmethod
    def of(cls, run: Run) -> ListedRun:
        """Summarize a run for a list."""
        losses = [each.val_loss for each in run.progress.validations]
        values = losses if len(losses) >= 3 else run.column("loss")
        return cls(summarize(run), tuple(bucket_means(values, _CURVE_POINTS)))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `mlxtune runs --json`."""
        return {**self.summary.as_dict(), "curve": list(self.curve)}


def bucket_means(values: Sequence[float], most: int) -> list[float]:
    """Return the means of `most` buckets of the finite values, or the values if there are fewer."""
    finite = [value for value in values if math.isfinite(value)]
    parts = min(most, len(finite))
    bounds = [len(finite) * i // parts for i in range(parts + 1)] if parts else [0]
    return [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]


def in_order(runs: Sequence[ListedRun], sort: str) -> list[ListedRun]:
    """Return runs sorted by one of SORTS: the newest, the lowest loss or the fastest first."""

    def or_last(value: float | None, sign: int = 1) -> float:
        return math.inf if value is None else sign * value

    keys: dict[str, Callable[[RunSummary], Any]] = {
        "when": lambda run: -_timestamp(run.started),
        "name": lambda run: run.name,
        "val": lambda run: or_last(run.best_val_loss),
        "train": lambda run: or_last(run.train_loss),
        "speed": lambda run: or_last(run.tokens_per_second, -1),
        "steps": lambda run: -run.step,
    }
    return sorted(runs, key=lambda each: keys[sort](each.summary))


def _timestamp(started: str) -> float:
    try:
        return datetime.datetime.fromisoformat(started).timestamp()
    except ValueError:
        return 0.0
