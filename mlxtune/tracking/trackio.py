"""Records a run in Trackio's local store."""

import contextlib
import io
import os
from collections.abc import Mapping
from typing import Any

import trackio

from mlxtune.tracking.observer import PROJECT, TrackedRun, Value


class Trackio:
    """A run of the project TRACKIO_PROJECT, `mlxtune` by default.

    Trackio identifies runs by name, so the identity is in it.
    """

    def __init__(self, run: TrackedRun) -> None:
        project, name = os.environ.get("TRACKIO_PROJECT") or PROJECT, f"{run.name}-{run.identity}"
        # What Trackio prints stays off stdout, which is for results.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run: Any = trackio.init(
                project=project,
                name=name,
                config=dict(run.hyperparameters),
                resume="allow",
                embed=False,
                # The run records its own memory; the machine may be busy with other work too.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # The names and steps that a resumed run has already recorded.
        self._known: set[tuple[str, int]] = set()
        if run.step:
            logs = trackio.SQLiteStorage.get_logs(project, name)
            self._known = {(name, int(row["step"])) for row in logs for name in row}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values that are not there yet."""
        new = {name: value for name, value in values.items() if (name, step) not in self._known}
        if new:
            self._run.log(new, step=step)

    def finish(self, result: Mapping[str, Value], *, complete: bool) -> None:
        """Record the result at the last step, wait until everything is stored, close the run."""
        if result:
            values = {f"result/{name}": value for name, value in result.items()}
            self._run.log(values, step=int(result["steps"]))
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()
