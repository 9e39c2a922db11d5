"""The trackers of --track: each has a function that opens or resumes a run in the tracker.

Their packages are extras, imported when training starts.
"""

import contextlib
import io
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.run.run_folder import TENSORBOARD

_PROJECT = "mlxtune"
# Values of hyperparameters and results.
Value = bool | int | float | str


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it.

    `identity` stays the same when the run is resumed. `folder` contains the run's checkpoints;
    `step` is the last step before the run was resumed, 0 for a new run.
    """

    identity: str
    name: str
    folder: Path
    step: int
    hyperparameters: Mapping[str, Value]


@dataclass(frozen=True)
class Tracker:
    """An open run: `log` records values after a step; `finish` records the result and ends the run.

    `finish` also gets whether the run is complete. Either function may raise any exception: the run
    then continues without the tracker.
    """

    log: Callable[[Mapping[str, float], int], None]
    finish: Callable[[Mapping[str, Value], bool], None]


def open_trackio(run: TrackedRun) -> Tracker:
    """Open a run of the project TRACKIO_PROJECT, `mlxtune` by default, in Trackio's local store.

    Trackio identifies runs by name, so the name contains the identity.
    """
    import trackio

    project, name = os.environ.get("TRACKIO_PROJECT") or _PROJECT, f"{run.name}-{run.identity}"
    # stdout is reserved for results.
    with contextlib.redirect_stdout(io.StringIO()):
        opened = trackio.init(
            project=project,
            name=name,
            config=dict(run.hyperparameters),
            resume="allow",
            embed=False,
            # Other programs contribute to the machine's load; the run records its own memory.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    # The names and steps that a resumed run has already recorded.
    logs = trackio.SQLiteStorage.get_logs(project, name) if run.step else []
    known = {(name, int(row["step"])) for row in logs for name in row}

    def log(values: Mapping[str, float], step: int) -> None:
        if new := {name: value for name, value in values.items() if (name, step) not in known}:
            opened.log(new, step=step)

    def finish(result: Mapping[str, Value], _: bool) -> None:
        if result:
            values = {f"result/{name}": value for name, value in result.items()}
            opened.log(values, step=int(result["steps"]))
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()

    return Tracker(log, finish)


def open_tensorboard(run: TrackedRun) -> Tracker:
    """Open event files in a subfolder of the run's folder.

    A resumed run discards the events after its checkpoint's step.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run.folder / TENSORBOARD), flush_secs=10)
    if run.step:
        restart = SessionLog(status=SessionLog.START)
        event = Event(step=run.step + 1, session_log=restart, wall_time=time.time())
    else:
        options = summary_v2.hparams_pb(dict(run.hyperparameters), trial_id=run.identity)
        event = Event(step=0, summary=options, wall_time=time.time())
    writer.add_event(event)

    def log(values: Mapping[str, float], step: int) -> None:
        parts = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        if parts:
            summary = Summary(value=parts)
            writer.add_event(Event(step=step, summary=summary, wall_time=time.time()))

    def finish(result: Mapping[str, Value], _: bool) -> None:
        values = {f"result/{name}": float(value) for name, value in result.items()}
        log(values, int(result.get("steps", 0)))
        writer.close()

    return Tracker(log, finish)


def open_wandb(run: TrackedRun) -> Tracker:
    """Open a run of the project WANDB_PROJECT, `mlxtune` by default, on Weights & Biases.

    Without a login, writes files that `wandb sync` can upload later. Never prompts, and captures
    nothing from the terminal. Raises RuntimeError if WANDB_MODE is online without a login.
    """
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode in (None, "", "online"):
        logged_in = wandb.login(prompt=False, verify=False)
        if mode and not logged_in:
            raise RuntimeError("WANDB_MODE is online without a login: run wandb login")
        mode = "online" if logged_in else "offline"
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or _PROJECT,
        name=os.environ.get("WANDB_NAME") or run.name,
        id=run.identity,
        resume="allow",
        dir=str(run.folder),
        mode=mode,
        config=dict(run.hyperparameters),
        save_code=False,
        # The system monitor would write into the home folder, even with `dir`.
        settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
    )

    def finish(result: Mapping[str, Value], complete: bool) -> None:
        opened.summary.update(dict(result))
        opened.finish(exit_code=0 if complete else 1)

    return Tracker(lambda values, step: opened.log(dict(values), step=step), finish)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "trackio": open_trackio,
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
}
