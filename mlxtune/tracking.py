"""Records a run in the trackers of --track, besides its own folder, under common metric names.

Each tracker has a function that opens or resumes a run in it. The trackers' packages are extras,
imported when training starts.
"""

import importlib.util
import io
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxtune.config import TrainConfig
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.files.reading import read_json
from mlxtune.core.files.writing import write_json
from mlxtune.core.machine.installation import installs_extra
from mlxtune.core.run.metrics import (
    InstructEpochMetrics,
    InstructTrainResult,
    StepRecord,
    validation_measure,
)
from mlxtune.core.run.run_folder import TENSORBOARD, TRACKING
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.errors import ConfigError, one_line

_IDENTITY = re.compile("[0-9a-f]{8}")
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


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
    problems = [
        f"--track {name} needs a package that is not installed: {installs_extra(name)}"
        for name in names
        if importlib.util.find_spec(name) is None
    ]
    if problems:
        raise ConfigError(problems)


class TrackingObserver(TrainingObserver):
    """Records a run in a tracker. If the tracker fails, warns once and stops recording."""

    def __init__(self, name: str, config: TrainConfig, warn: Callable[[str], None]) -> None:
        self._name, self._config, self._warn = name, config, warn
        # None before the start, after the end and after a failure of the tracker.
        self._tracker: Tracker | None = None
        self._step = 0
        self._result: dict[str, Value] = {}
        self._complete = False

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        self._step = run.progress.step
        with self._until_failure():
            self._tracker = TRACKERS[self._name](self._tracked(run))

    def _tracked(self, run: RunStart) -> TrackedRun:
        folder, step = self._config.checkpoint_path, run.progress.step
        identities: dict[str, Any] = {}
        if step:
            with suppress(OSError, ValueError):
                identities = read_json(folder / TRACKING)
        identity = str(identities.get(self._name, ""))
        is_new = not _IDENTITY.fullmatch(identity)
        if is_new:
            identity = secrets.token_hex(4)
            write_json(folder / TRACKING, {**identities, self._name: identity})
        return TrackedRun(
            identity=identity,
            # Users know a run by its adapter's folder.
            name=Path(os.path.abspath(self._config.output_path)).parent.name or "run",  # noqa: PTH100
            folder=folder,
            step=0 if is_new else step,
            hyperparameters=_hyperparameters(self._config, run),
        )

    def on_step(self, record: StepRecord) -> None:
        self._step = record.step
        values = {
            "train/loss": record.loss,
            "train/perplexity": record.perplexity,
            "train/learning_rate": record.learning_rate,
            "train/grad_norm": record.grad_norm,
            "train/tokens_per_second": record.tokens_per_second,
            "train/epoch": record.epoch,
        }
        if record.is_of_rows:
            del values["train/perplexity"]
        values |= {f"train/{name}": value for name, value in record.metrics.items()}
        if record.memory:
            values["train/memory_gb"] = record.memory / 1e9
        self._log(values, record.step)

    def on_validation(self, step: int, loss: float) -> None:
        name, value = validation_measure(loss, self._config.objective)
        values = {f"val/{name}": value}
        if self._config.objective == "sft":
            values["val/perplexity"] = perplexity(loss)
        self._log(values, step)

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        values = {
            "epoch/train_loss": metrics.train_loss,
            "epoch/samples_per_second": metrics.samples_per_sec,
        }
        self._log(values, self._step)

    def on_result(self, result: InstructTrainResult) -> None:
        values = {
            "train_loss": result.epoch_metrics[-1].train_loss,
            **self._measured("initial_val", result.initial_val_loss),
            **self._measured("best_val", result.best_val_loss),
            "best_epoch": result.best_epoch,
            "best_step": result.best_step,
            "stopped_early": result.stopped_early,
            "steps": result.steps[-1].step if result.steps else 0,
        }
        self._result = {name: value for name, value in values.items() if value is not None}
        self._complete = True

    def _measured(self, prefix: str, loss: float | None) -> dict[str, float]:
        """Return the entry of a validation, which starts with `prefix`; empty without a loss."""
        if loss is None:
            return {}
        name, value = validation_measure(loss, self._config.objective)
        return {f"{prefix}_{name}": value}

    def on_end(self) -> None:
        if self._tracker is not None:
            with self._until_failure():
                self._tracker.finish(self._result, self._complete)
        self._tracker = None

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self._tracker is not None:
            with self._until_failure():
                self._tracker.log(values, step)

    @contextmanager
    def _until_failure(self) -> Iterator[None]:
        try:
            yield
        # Trackers raise exceptions of any type, and must not fail the run.
        except Exception as error:  # noqa: BLE001
            self._tracker = None
            self._warn(f"--track {self._name}: {one_line(error)}; training continues without it")


def _hyperparameters(config: TrainConfig, run: RunStart) -> dict[str, Value]:
    """Return the options of a run, and its numbers of steps and rows, as plain values."""
    values = {
        **asdict(config),
        "total_steps": run.total_steps,
        "train_rows": run.train_rows,
        "val_rows_held_out": run.val_rows,
    }
    return {
        name: ",".join(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value not in (None, ())
    }


def open_trackio(run: TrackedRun) -> Tracker:
    """Open a run of the project TRACKIO_PROJECT, `mlxtune` by default, in Trackio's local store.

    Trackio identifies runs by name, so the name contains the identity.
    """
    import trackio

    project, name = os.environ.get("TRACKIO_PROJECT") or _PROJECT, f"{run.name}-{run.identity}"
    # stdout is reserved for results.
    with redirect_stdout(io.StringIO()):
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
    logged = {(name, int(row["step"])) for row in logs for name in row}

    def log(values: Mapping[str, float], step: int) -> None:
        if new := {name: value for name, value in values.items() if (name, step) not in logged}:
            opened.log(new, step=step)

    def finish(result: Mapping[str, Value], _: bool) -> None:
        if result:
            values = {f"result/{name}": value for name, value in result.items()}
            opened.log(values, step=int(result["steps"]))
        with redirect_stdout(io.StringIO()):
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
