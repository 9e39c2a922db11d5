"""Writes a run to Trackio's own store."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from typing import Any

import trackio

from mlxtune.tracking.tracker import PROJECT, TrackedRun, Value


class Trackio:
    """One run of the project TRACKIO_PROJECT names, `mlxtune` by default."""

    def __init__(self) -> None:
        self._run: Any = None
        # What the run has of earlier, by name and step.
        self._known: set[tuple[str, int]] = set()

    def start(self, run: TrackedRun) -> None:
        """Open the run. Its name is its identity too, as Trackio goes by names."""
        project, name = os.environ.get("TRACKIO_PROJECT") or PROJECT, f"{run.name}-{run.identity}"
        with _unheard():
            self._run = trackio.init(
                project=project,
                name=name,
                config=dict(run.hyperparameters),
                resume="allow",
                embed=False,
                # A run has its own figures of memory, and the machine may do other work too.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        if run.step:
            logs = trackio.SQLiteStorage.get_logs(project, name)
            self._known = {(name, int(row["step"])) for row in logs for name in row}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values that are not there yet."""
        new = {name: value for name, value in values.items() if (name, step) not in self._known}
        if new:
            self._run.log(new, step=step)

    def finish(self, result: Mapping[str, Value], *, complete: bool) -> None:
        """Write the result at the last step, wait until all is kept, and close the run."""
        if result:
            values = {f"result/{name}": value for name, value in result.items()}
            self._run.log(values, step=int(result["steps"]))
        with _unheard():
            trackio.finish()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep what it prints from standard output, which is for results."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
