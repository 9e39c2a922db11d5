"""Tells a tracker of a run, in the names that are usual there."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxtune.config import RunConfig
from mlxtune.core.machine.files import read_json, write_json
from mlxtune.core.reports.run_text import tokens_per_second
from mlxtune.core.training.metrics import (
    InstructEpochMetrics,
    SkippedStep,
    StepRecord,
    ValidationRecord,
    perplexity,
)
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.core.training.run_folder import TRACKING
from mlxtune.errors import one_line
from mlxtune.tracking.tracker import TrackedRun, Tracker, Value

if TYPE_CHECKING:
    from mlxtune.core.training.metrics import InstructTrainResult

_IDENTITY = re.compile("[0-9a-f]{8}")


class TrackingObserver(TrainingObserver):
    """Writes what a run says to a tracker, until that fails; `warn` hears of it once."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: RunConfig,
        options: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._name = name
        self._tracker = tracker
        self._run = run
        self._options = options
        self._step = 0
        self._result: dict[str, Value] = {}
        self._complete = False
        self._works = False

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        """Open the run; where it goes on but is new to the tracker, write it from its start."""
        self._works = True
        self._try(lambda: self._start(run))

    def _start(self, run: RunStart) -> None:
        folder, step = self._run.checkpoint_path, run.progress.step
        known = _read(folder / TRACKING) if step else {}
        identity = str(known.get(self._name, ""))
        new = not _IDENTITY.fullmatch(identity)
        if new:
            identity = secrets.token_hex(4)
            write_json(folder / TRACKING, {**known, self._name: identity})
        tracked = TrackedRun(
            identity=identity,
            name=_name_of(self._run),
            folder=folder,
            step=0 if new else step,
            hyperparameters=hyperparameters(self._options, run),
        )
        self._tracker.start(tracked)
        for record in run.progress.records if new and step else ():
            self._replay(record)

    def _replay(self, record: Any) -> None:
        if isinstance(record, StepRecord):
            self.on_step(record)
        elif isinstance(record, ValidationRecord):
            self.on_validation(record.step, record.val_loss)
        elif not isinstance(record, SkippedStep):
            self.on_epoch(record, False)

    def on_step(self, record: StepRecord) -> None:
        """Write a step."""
        self._step = record.step
        values = {
            "train/loss": record.loss,
            "train/perplexity": record.perplexity,
            "train/learning_rate": record.learning_rate,
            "train/grad_norm": record.grad_norm,
            "train/tokens_per_second": tokens_per_second(record),
            "train/epoch": record.epoch,
        }
        if record.memory:
            values["train/memory_gb"] = record.memory / 1e9
        self._try(lambda: self._tracker.log(values, record.step))

    def on_validation(self, step: int, loss: float) -> None:
        """Write a validation."""
        values = {"val/loss": loss, "val/perplexity": perplexity(loss)}
        self._try(lambda: self._tracker.log(values, step))

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        """Write what an epoch was on the whole; its validation is written already."""
        values = {
            "epoch/train_loss": metrics.train_loss,
            "epoch/samples_per_second": metrics.samples_per_sec,
        }
        self._try(lambda: self._tracker.log(values, self._step))

    def on_result(self, result: InstructTrainResult) -> None:
        """Keep how the run ended."""
        found = {
            "train_loss": result.epoch_metrics[-1].train_loss,
            "initial_val_loss": result.initial_val_loss,
            "best_val_loss": result.best_val_loss,
            "best_epoch": result.best_epoch,
            "stopped_early": result.stopped_early,
            "steps": len(result.steps),
        }
        self._result = {name: value for name, value in found.items() if value is not None}
        self._complete = True

    def on_end(self) -> None:
        """Close the run."""
        self._try(lambda: self._tracker.finish(self._result, complete=self._complete))
        self._works = False

    def _try(self, tell: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            tell()
        # Of whatever kind: the libraries have theirs, and a run is worth more than its tracking.
        except Exception as error:  # noqa: BLE001
            self._works = False
            self._warn(f"--track {self._name}: {one_line(error)}; training goes on without it")


def hyperparameters(options: Mapping[str, Any], run: RunStart) -> dict[str, Value]:
    """Return the options of a run and what follows from them, as plain values by name."""
    values = {
        **options,
        "total_steps": run.total_steps,
        "train_rows": run.train_rows,
        "val_rows_held_out": run.val_rows,
    }
    return {name: _plain(value) for name, value in values.items() if value not in (None, ())}


def _plain(value: Any) -> Value:
    if isinstance(value, bool | int | float | str):
        return value
    return ",".join(map(str, value)) if isinstance(value, tuple) else json.dumps(value)


def _name_of(run: RunConfig) -> str:
    """Return what people know the run by: the folder of its adapter."""
    return Path(os.path.abspath(run.output_path)).parent.name or "run"  # noqa: PTH100


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
