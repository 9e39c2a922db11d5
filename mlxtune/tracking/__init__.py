"""Where else a run is written than into its own folder: trackers that people compare runs in.

Each is an extra: its package is imported when training begins, and asked for before any work.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxtune.errors import ConfigError

if TYPE_CHECKING:
    from mlxtune.config import RunConfig
    from mlxtune.tracking.observer import TrackingObserver


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError where the package of a tracker is missing."""
    problems = [
        f"--track {name} needs a package that is not installed: pip install 'mlxtune[{name}]'"
        for name in names
        if importlib.util.find_spec(name) is None
    ]
    if problems:
        raise ConfigError(problems)


def trackers_of(
    run: RunConfig, options: Mapping[str, Any], warn: Callable[[str], None]
) -> list[TrackingObserver]:
    """Return an observer for each tracker that a run is to be written to.

    `warn` hears of one that fails, once.
    """
    if not run.trackers:
        return []
    from mlxtune.tracking.observer import TrackingObserver
    from mlxtune.tracking.tracker import Tracker

    def make(name: str) -> Tracker:
        if name == "tensorboard":
            from mlxtune.tracking.tensorboard import TensorBoard

            return TensorBoard()
        if name == "wandb":
            from mlxtune.tracking.wandb import WeightsAndBiases

            return WeightsAndBiases()
        from mlxtune.tracking.trackio import Trackio

        return Trackio()

    return [TrackingObserver(name, make(name), run, options, warn) for name in run.trackers]
