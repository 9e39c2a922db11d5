"""The recipe of `train --resume`: a stopped run trained to the end it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxtune.recipes.train import TrainResult, train
from mlxtune.setup.resuming import find_run


def resume(folder: str | Path = "", **changes: Any) -> TrainResult:
    """Go on with the run in a folder, with its own options, to the result it would have had.

    `folder` is that of its checkpoints, or that of its adapter; `changes` are options that may
    differ from its own: `epochs` and `max_steps` may grow, and what does not change the result may
    be anything.

    Raises what `train` does; ConfigError when a change would change the result; OutputError when
    there is no run to go on with.
    """
    config, found = find_run(str(folder), changes)
    return train(config, resume=found)
