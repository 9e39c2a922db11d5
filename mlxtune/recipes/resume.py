"""The recipe of `train --resume`: a stopped run, trained to the end it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxtune.recipes.train import TrainResult, train
from mlxtune.setup.resuming import find_run


def resume(folder: str | Path = "", **changes: Any) -> TrainResult:
    """Resume the run in a folder, with its own options, to the result it would have had.

    `folder` holds its checkpoints or its adapter. `changes` are options that differ: `epochs` and
    `max_steps` may grow, and options that do not change the result may change.

    Raises what `train` does; ConfigError if a change would change the result; OutputError if there
    is no run to resume.
    """
    config, found = find_run(str(folder), changes)
    return train(config, resume=found)
