"""The interface of a tracker, and a run as it sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Values of hyperparameters and results.
Value = bool | int | float | str
PROJECT = "mlxtune"


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it.

    `identity` stays the same when the run is resumed. `folder` is that of its checkpoints, and
    `step` the step that it is resumed after, 0 for a new run.
    """

    identity: str
    name: str
    folder: Path
    step: int
    hyperparameters: Mapping[str, Value]


class Tracker(Protocol):
    """Records a run elsewhere. It may raise anything: the run continues without it."""

    def start(self, run: TrackedRun) -> None:
        """Open a new run, or resume one."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values after a step."""

    def finish(self, result: Mapping[str, Value], *, complete: bool) -> None:
        """Close the run; `complete` is false for one that was interrupted or failed."""
