"""Records a run as event files for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mlxtune.core.training.run_folder import TENSORBOARD
from mlxtune.tracking.tracker import TrackedRun, Value

_FLUSH_SECONDS = 10


class TensorBoard:
    """Event files in a folder inside the run's own."""

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None

    def start(self, run: TrackedRun) -> None:
        """Open a file; in a resumed run, discard the events after the step it resumes from."""
        self._writer = EventFileWriter(str(run.folder / TENSORBOARD), flush_secs=_FLUSH_SECONDS)
        if run.step:
            restart = SessionLog(status=SessionLog.START)
            self._add(Event(step=run.step + 1, session_log=restart))
        else:
            options = dict(run.hyperparameters)
            self._add(Event(step=0, summary=summary_v2.hparams_pb(options, trial_id=run.identity)))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values."""
        if values:
            parts = [Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
            self._add(Event(step=step, summary=Summary(value=parts)))

    def finish(self, result: Mapping[str, Value], *, complete: bool) -> None:
        """Record the result at the last step, and close the file."""
        assert self._writer is not None
        step = int(result.get("steps", 0))
        self.log({f"result/{name}": float(value) for name, value in result.items()}, step)
        self._writer.close()

    def _add(self, event: Event) -> None:
        assert self._writer is not None
        event.wall_time = time.time()
        self._writer.add_event(event)
