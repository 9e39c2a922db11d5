"""Records a run on Weights & Biases, or in files for `wandb sync` to send later."""

import os
from collections.abc import Mapping
from typing import Any

import wandb

from mlxtune.tracking.observer import PROJECT, TrackedRun, Value


class WeightsAndBiases:
    """A run of the project WANDB_PROJECT, `mlxtune` by default.

    Without a login it stays in files. It never prompts, and captures nothing from the terminal.

    Raises RuntimeError if it must be online without a login.
    """

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE")
        if mode in (None, "", "online"):
            logged_in = wandb.login(prompt=False, verify=False)
            if mode and not logged_in:
                raise RuntimeError("WANDB_MODE is online without a login: run wandb login")
            mode = "online" if logged_in else "offline"
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            id=run.identity,
            resume="allow",
            dir=str(run.folder),
            mode=mode,
            config=dict(run.hyperparameters),
            save_code=False,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                # The system monitor writes into the home folder, whatever `dir` says.
                x_disable_stats=True,
            ),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values; those of one step form one point."""
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Value], *, complete: bool) -> None:
        """Record the result and close the run."""
        self._run.summary.update(dict(result))
        self._run.finish(exit_code=0 if complete else 1)
