"""Writes a run to Weights & Biases, or into files that `wandb sync` sends there later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import wandb

from mlxtune.tracking.tracker import PROJECT, TrackedRun, Value


class WeightsAndBiases:
    """One run of the project WANDB_PROJECT names, `mlxtune` by default.

    Without a login it is kept in files. Nothing is asked on the terminal, nothing of it captured.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open the run. Raises RuntimeError where it is to be sent and nobody has logged in."""
        mode = os.environ.get("WANDB_MODE")
        if mode in (None, "", "online"):
            logged_in = wandb.login(prompt=False, verify=False)
            if mode and not logged_in:
                raise RuntimeError("WANDB_MODE is online without a login: run wandb login")
            mode = "online" if logged_in else "offline"
        self._run = wandb.init(
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
                # Its monitor of the machine writes into the home folder whatever it is told.
                x_disable_stats=True,
            ),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values; those of one step are one point."""
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Value], *, complete: bool) -> None:
        """Write the result and close the run."""
        self._run.summary.update(dict(result))
        self._run.finish(exit_code=0 if complete else 1)
