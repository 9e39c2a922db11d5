"""Trackers: where runs are recorded in addition to their folders, for people to compare.

Each is an extra. Its package is checked before any work and imported when training starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxtune.config import RunConfig
from mlxtune.errors import ConfigError
from mlxtune.tracking.observer import TrackingObserver
from mlxtune.tracking.tracker import Tracker


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
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
    """Return an observer for each tracker of --track, to which `options` are hyperparameters.

    `warn` is called once for one that fails.
    """
    return [TrackingObserver(name, _tracker(name), run, options, warn) for name in run.trackers]


def _tracker(name: str) -> Tracker:
    if name == "tensorboard":
        from mlxtune.tracking.tensorboard import TensorBoard

        return TensorBoard()
    if name == "wandb":
        from mlxtune.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases()
    from mlxtune.tracking.trackio import Trackio

    return Trackio()
