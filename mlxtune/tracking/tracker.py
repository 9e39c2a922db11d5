"""What a tracker is told of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# What hyperparameters and results hold.
Value = bool | int | float | str
PROJECT = "mlxtune"


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it.

    `identity` is the same when the run is gone on with, `folder` that of its checkpoints, and
    `step` the step that it goes on from, 0 for a new one.
    """

    identity: str
    name: str
    folder: Path
    step: int
    hyperparameters: Mapping[str, Value]


class Tracker(Protocol):
    """What writes a run elsewhere. It may raise anything: the run goes on without it."""

    def start(self, run: TrackedRun) -> None:
        """Open the run, or go on with it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values after so many steps."""

    def finish(self, result: Mapping[str, Value], *, complete: bool) -> None:
        """Close the run; `complete` tells whether it came to its end."""
