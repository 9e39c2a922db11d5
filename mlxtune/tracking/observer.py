"""Records a run in a tracker, under the metric names that trackers commonly use."""

import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxtune.config import TrainConfig
from mlxtune.core.evaluation.evaluation import perplexity
from mlxtune.core.files.files import read_json, write_json
from mlxtune.core.run.metrics import InstructEpochMetrics, InstructTrainResult, StepRecord
from mlxtune.core.run.run_folder import TRACKING
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.errors import ConfigError, one_line
from mlxtune.tracking.trackers import TRACKERS, TrackedRun, Tracker, Value

_IDENTITY = re.compile("[0-9a-f]{8}")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
    problems = [
        f"--track {name} needs a package that is not installed: pip install 'mlxtune[{name}]'"
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
        if record.metrics:
            del values["train/perplexity"]
            values |= {f"train/{name}": value for name, value in record.metrics.items()}
        if record.memory:
            values["train/memory_gb"] = record.memory / 1e9
        self._log(values, record.step)

    def on_validation(self, step: int, loss: float) -> None:
        values = {"val/loss": loss, "val/perplexity": perplexity(loss)}
        if self._config.objective != "sft":
            del values["val/perplexity"]
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
            "initial_val_loss": result.initial_val_loss,
            "best_val_loss": result.best_val_loss,
            "best_epoch": result.best_epoch,
            "best_step": result.best_step,
            "stopped_early": result.stopped_early,
            "steps": result.steps[-1].step if result.steps else 0,
        }
        self._result = {name: value for name, value in values.items() if value is not None}
        self._complete = True

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
