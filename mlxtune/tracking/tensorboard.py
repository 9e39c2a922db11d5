"""Records a run as event files for TensorBoard."""

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mlxtune.core.run.run_folder import TENSORBOARD
from mlxtune.tracking.observer import TrackedRun, Value


class TensorBoard:
    """Event files in a folder inside the run's own.

    Opening a resumed run discards the events after the step that it is resumed after.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._writer = EventFileWriter(str(run.folder / TENSORBOARD), flush_secs=10)
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
        step = int(result.get("steps", 0))
        self.log({f"result/{name}": float(value) for name, value in result.items()}, step)
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
