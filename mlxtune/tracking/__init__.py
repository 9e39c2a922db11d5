"""Trackers: where runs are recorded in addition to their folders, for people to compare.

Each is an extra. Its package is checked before any work and imported when training starts.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlxtune.config import TrainConfig
from mlxtune.errors import ConfigError
from mlxtune.tracking.observer import TrackedRun, Tracker, TrackingObserver

# The choices of --track.
_CLASSES = {"trackio": "Trackio", "tensorboard": "TensorBoard", "wandb": "WeightsAndBiases"}


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
    run: TrainConfig, options: Mapping[str, Any], warn: Callable[[str], None]
) -> list[TrackingObserver]:
    """Return an observer for each tracker of --track, to which `options` are hyperparameters.

    `warn` is called once for one that fails.
    """
    names = dict.fromkeys(run.track)
    return [TrackingObserver(name, partial(_open, name), run, options, warn) for name in names]


def _open(name: str, run: TrackedRun) -> Tracker:
    module = importlib.import_module(f"mlxtune.tracking.{name}")
    tracker: Tracker = getattr(module, _CLASSES[name])(run)
    return tracker
