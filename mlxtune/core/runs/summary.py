"""A run in a few numbers and one sentence, and its options compared with the defaults."""

from __future__ import annotations

import datetime
import math
import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import PurePath
from typing import Any

from mlxtune.config import TrainConfig
from mlxtune.config.fields import Affects, flag
from mlxtune.config.options import OPTIONS
from mlxtune.core.runs.run import CHECKPOINTS, Run, mapping, number, text, whole
from mlxtune.core.text import count, loss_text
from mlxtune.core.training.checkpoint import METRICS
from mlxtune.core.training.run_folder import LEDGER


@dataclass(frozen=True)
class RunSummary:
    """A run in a few numbers; None, or empty, for what it did not record.

    `status` is finished, stopped early, running or unfinished; `started` is in ISO 8601. Losses are
    in nats per supervised token, memory in bytes; `tokens_per_second` counts tokens of examples.
    `train_loss` is that of the last epoch, or of the steps so far if none ended.
    """

    name: str
    folder: str
    status: str
    started: str
    model: str
    data: tuple[str, ...]
    step: int
    total_steps: int | None
    epoch: int
    epochs: int | None
    train_loss: float | None
    initial_val_loss: float | None
    best_val_loss: float | None
    best_epoch: int | None
    tokens_per_second: float | None
    peak_memory: int | None
    predicted_memory: int | None
    seconds: float | None
    adapter: str
    sha256: str
    resume: str
    problems: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """Whether training is complete, by its last epoch or by early stopping."""
        return self.status in ("finished", "stopped early")

    @property
    def headline(self) -> str:
        """What the run achieved, in one sentence."""
        model, data = self.model or "The model", " and ".join(self.data[:2]) or "its data"
        if len(self.data) > 2:
            data = f"{self.data[0]} and {len(self.data) - 1} more files"
        before, best = self.initial_val_loss, self.best_val_loss
        validated = before is not None and best is not None
        if not self.finished:
            total = f" of {self.total_steps:,}" if self.total_steps else ""
            verb = "is at" if self.status == "running" else "stopped at"
            losses = f"; validation loss {loss_text(before)} before, {loss_text(best)} at best"
            return f"{model} on {data} {verb} step {self.step:,}{total}{losses * validated}"
        trained = count(self.epoch, "epoch") if self.epoch else count(self.step, "step")
        if before is not None and best is not None:
            if best >= before:
                losses = f"{loss_text(before)} before, {loss_text(best)} at best"
                return f"{trained} on {data} did not improve {model}: validation loss {losses}"
            losses = f"from {loss_text(before)} to {loss_text(best)}"
            return f"{trained} on {data} took {model}’s validation loss {losses}"
        if self.train_loss is not None:
            loss = loss_text(self.train_loss)
            return f"{trained} on {data} brought {model} to a training loss of {loss}"
        return f"{model} on {data}"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of a run in `mlxtune runs` and `mlxtune report`."""
        values = asdict(self) | {"data": list(self.data)}
        del values["problems"]
        return values | {"headline": self.headline, "problems": list(self.problems)}


def summarize(run: Run) -> RunSummary:
    """Return the summary of a run."""
    best_epoch, best_val_loss = _best(run)
    status = _status(run)
    return RunSummary(
        name=run.name,
        folder=str(run.folder),
        status=status,
        started=_started(run),
        model=PurePath(text(run.config, "model_path")).name,
        data=tuple(PurePath(path).name for path in _data(run)),
        step=_step(run),
        total_steps=_total_steps(run),
        epoch=len(run.epochs),
        epochs=whole(run.config, "epochs"),
        train_loss=_train_loss(run),
        initial_val_loss=next((loss for step, loss in run.validations if step == 0), None),
        best_val_loss=best_val_loss,
        best_epoch=best_epoch,
        tokens_per_second=_speed(run),
        peak_memory=_peak(run),
        predicted_memory=whole(mapping(run.about, "plan"), "memory", "peak"),
        seconds=_seconds(run),
        adapter=_adapter(run),
        sha256=text(run.result, "sha256"),
        resume=_resume(run) if status == "unfinished" else "",
        problems=tuple(run.problems),
    )


def _status(run: Run) -> str:
    if run.result:
        return "stopped early" if run.result.get("stopped_early") is True else "finished"
    return "running" if run.holder is not None else "unfinished"


def _step(run: Run) -> int:
    """Return the last step, applied or skipped."""
    skipped = [whole(each, "step") or 0 for each in run.skipped]
    return max([*(int(step) for step in run.steps["step"][-1:]), *skipped, 0])


def _total_steps(run: Run) -> int | None:
    planned = whole(mapping(run.about, "plan"), "steps")
    if planned is not None:
        return planned
    return whole(run.metadata, "total_steps") or whole(run.result, "steps")


def _started(run: Run) -> str:
    started = text(run.about, "started_at")
    try:
        return datetime.datetime.fromisoformat(started).isoformat(timespec="seconds")
    except ValueError:
        pass
    # Earlier versions recorded no time; these files are written first, the ledger only once.
    for name in (LEDGER, METRICS):
        try:
            stamp = (run.folder / name).stat().st_mtime
        except OSError:
            continue
        local = datetime.datetime.fromtimestamp(stamp, datetime.UTC).astimezone()
        return local.isoformat(timespec="seconds")
    return ""


def _data(run: Run) -> list[str]:
    if run.ledgers:
        return [text(ledger, "path") for ledger in run.ledgers]
    data = run.config.get("data")
    return [str(each) for each in data] if isinstance(data, list) else []


def _train_loss(run: Run) -> float | None:
    for epoch in reversed(run.epochs):
        if (loss := number(epoch, "train_loss")) is not None:
            return loss
    steps = run.steps.known("loss", "supervised_tokens")
    tokens = math.fsum(tokens for _, tokens in steps)
    return math.fsum(loss * tokens for loss, tokens in steps) / tokens if tokens else None


def _best(run: Run) -> tuple[int | None, float | None]:
    """Return the epoch with the lowest validation loss, and that loss."""
    epochs = [(whole(each, "epoch"), number(each, "val_loss")) for each in run.epochs]
    known = [(epoch, loss) for epoch, loss in epochs if epoch is not None and loss is not None]
    return min(known, key=lambda pair: pair[1], default=(None, None))


def _speed(run: Run) -> float | None:
    timed = [(tokens, time) for tokens, time in run.steps.known("tokens", "seconds") if time > 0]
    seconds = math.fsum(time for _, time in timed)
    return math.fsum(tokens for tokens, _ in timed) / seconds if seconds else None


def _peak(run: Run) -> int | None:
    of_steps = [int(memory) for (memory,) in run.steps.known("memory")]
    return max([*of_steps, whole(run.result, "peak_memory") or 0]) or None


def _seconds(run: Run) -> float | None:
    for source in (run.result, run.metadata):
        if (milliseconds := number(source, "total_time_ms")) is not None:
            return milliseconds / 1000
    return run.steps.total("seconds") or None


def _adapter(run: Run) -> str:
    adapter = text(run.result, "adapter")
    return os.path.normpath(run.folder / adapter) if adapter else ""


def _resume(run: Run) -> str:
    if not run.checkpoints:
        return ""
    folder = run.folder
    if folder.name == CHECKPOINTS and str(folder.parent) != ".":
        folder = folder.parent
    return f"mlxtune train --resume {shlex.quote(str(folder))}"


# Options


def options_of(run: Run) -> dict[str, tuple[str, str, bool]]:
    """Return each option's value, its default, and whether they differ, by its flag.

    Those that differ come first.
    """
    defaults = {each.name: option_text(each.default) for each in fields(TrainConfig)}
    options = {}
    for name, value in run.config.items():
        own, default = option_text(value), defaults.get(name)
        options[flag(str(name))] = (own, default or "–", own != default)
    return dict(sorted(options.items(), key=lambda item: not item[1][2]))


def option_text(value: Any) -> str:
    """Return an option's value as one would type it."""
    if value is None or value == "" or value == () or value == []:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing_options(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the options whose values differ between runs, with the value in each run."""
    names = {str(name): None for run in runs for name in run.config if _is_compared(name)}
    values = {name: [option_text(run.config.get(name)) for run in runs] for name in names}
    return {flag(name): each for name, each in values.items() if len(set(each)) > 1}


def _is_compared(name: str) -> bool:
    return name not in OPTIONS or OPTIONS[name].affects is not Affects.PLACES


def planned_shares(run: Run) -> dict[str, float | None]:
    """Return the micro-batches, and the shares of padding and of tokens run, that were planned."""
    plan = mapping(run.about, "plan")
    names = ("micro_batches_per_step", "padding_share", "run_share")
    return {name: number(plan, name) for name in names} | {
        "micro_batch_tokens": whole(plan, "micro_batch_tokens")
    }


def measured_shares(run: Run) -> dict[str, float | None]:
    """Return the measured values, without `micro_batch_tokens`; None for those not measured."""
    micro_batches = [number for (number,) in run.steps.known("micro_batches") if number]
    tokens, tokens_run = run.steps.total("tokens"), run.steps.total("run_tokens")
    return {
        "micro_batches_per_step": statistics.fmean(micro_batches) if micro_batches else None,
        "padding_share": run.steps.total("padding") / tokens_run if tokens_run else None,
        "run_share": tokens_run / tokens if tokens_run and tokens else None,
    }


def ledgers_of(run: Run) -> list[dict[str, Any]]:
    """Return the ledgers that have all their numbers, so that a page can add them up."""
    names = (
        *("rows_read", "rows_train", "rows_validation", "rows_truncated", "examples"),
        *("tokens", "tokens_supervised", "tokens_context", "tokens_truncated"),
    )
    ledgers = []
    for ledger in run.ledgers:
        numbers = {name: whole(ledger, name) for name in names}
        skipped = mapping(ledger, "rows_skipped")
        counts = {str(kind): whole(skipped, kind) or 0 for kind in skipped}
        if None not in numbers.values():
            ledgers.append({"path": text(ledger, "path"), **numbers, "rows_skipped": counts})
    return ledgers
