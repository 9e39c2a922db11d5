"""A run in few numbers and one sentence."""

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
from mlxtune.core.runs.run import Run, mapping, number, text, whole
from mlxtune.core.text import count, loss_text


@dataclass(frozen=True)
class RunSummary:
    """A run in few numbers; None, or empty, for what it does not say.

    `status` is finished, stopped early, running or unfinished; `started` is in ISO 8601. Losses are
    in nats per supervised token, memory in bytes, `tokens_per_second` counts those of the examples.
    `train_loss` is that of the last epoch, of the steps so far where none ended.
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
    headline: str
    problems: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """Tell whether the run came to its end."""
        return self.status in ("finished", "stopped early")

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON-ready values."""
        return asdict(self) | {"data": list(self.data), "problems": list(self.problems)}


def summarize(run: Run) -> RunSummary:
    """Return a run in few numbers."""
    best = _best(run)
    status = _status(run)
    values: dict[str, Any] = {
        "name": run.name,
        "folder": str(run.folder),
        "status": status,
        "started": _started(run),
        "model": PurePath(text(run.config, "model_path")).name,
        "data": tuple(PurePath(path).name for path in _data(run)),
        "step": _step(run),
        "total_steps": _total_steps(run),
        "epoch": len(run.epochs),
        "epochs": whole(run.config, "epochs"),
        "train_loss": _train_loss(run),
        "initial_val_loss": _initial(run),
        "best_val_loss": None if best is None else best[1],
        "best_epoch": None if best is None else best[0],
        "tokens_per_second": _speed(run),
        "peak_memory": _peak(run),
        "predicted_memory": whole(mapping(run.about, "plan"), "memory", "peak"),
        "seconds": _seconds(run),
        "adapter": _adapter(run),
        "sha256": text(run.result, "sha256"),
        "resume": _resume(run) if status == "unfinished" else "",
        "problems": tuple(run.problems),
    }
    return RunSummary(**values, headline=_headline(**values))


def _status(run: Run) -> str:
    if run.result:
        return "stopped early" if run.result.get("stopped_early") is True else "finished"
    return "running" if run.holder is not None else "unfinished"


def _step(run: Run) -> int:
    """Return the last step that was taken or skipped."""
    skipped = [whole(each, "step") or 0 for each in run.skipped]
    return max([*(int(step) for step in run.steps["step"][-1:]), *skipped, 0])


def _total_steps(run: Run) -> int | None:
    planned = whole(mapping(run.about, "plan"), "steps")
    if planned is not None:
        return planned
    return whole(run.metadata, "total_steps") or whole(run.result, "steps")


def _started(run: Run) -> str:
    said = text(run.about, "started_at")
    try:
        return datetime.datetime.fromisoformat(said).isoformat(timespec="seconds")
    except ValueError:
        pass
    # Of an earlier version: the first file of a run, which no later step writes again.
    for name in ("ledger.json", "metrics.jsonl"):
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
    losses, weights = run.steps["loss"], run.steps.measured("supervised_tokens")
    pairs = [(x, w) for x, w in zip(losses, weights, strict=True) if not math.isnan(w)]
    tokens = math.fsum(w for _, w in pairs)
    return math.fsum(x * w for x, w in pairs) / tokens if tokens else None


def _initial(run: Run) -> float | None:
    return next((loss for step, loss in run.validations if step == 0), None)


def _best(run: Run) -> tuple[int, float] | None:
    """Return the epoch of the lowest validation loss and that loss."""
    found = [(whole(each, "epoch"), number(each, "val_loss")) for each in run.epochs]
    pairs = [(epoch, loss) for epoch, loss in found if epoch is not None and loss is not None]
    return min(pairs, key=lambda pair: pair[1]) if pairs else None


def _speed(run: Run) -> float | None:
    pairs = zip(run.steps["tokens"], run.steps["seconds"], strict=True)
    measured = [(t, s) for t, s in pairs if s > 0 and not math.isnan(t)]
    seconds = math.fsum(s for _, s in measured)
    return math.fsum(t for t, _ in measured) / seconds if seconds else None


def _peak(run: Run) -> int | None:
    highest = [value for value in run.steps.measured("memory") if not math.isnan(value)]
    said = whole(run.result, "peak_memory")
    return int(max([*highest, *([said] if said else [])], default=0)) or None


def _seconds(run: Run) -> float | None:
    for source in (run.result, run.metadata):
        if (milliseconds := number(source, "total_time_ms")) is not None:
            return milliseconds / 1000
    return run.steps.total("seconds") or None


def _adapter(run: Run) -> str:
    said = text(run.result, "adapter")
    return os.path.normpath(run.folder / said) if said else ""


def _resume(run: Run) -> str:
    if not run.checkpoints:
        return ""
    folder = run.folder
    if folder.name == "checkpoints" and str(folder.parent) != ".":
        folder = folder.parent
    return f"mlxtune train --resume {shlex.quote(str(folder))}"


def _headline(**said: Any) -> str:
    """Return in one sentence what the run achieved."""
    model, data = said["model"] or "The model", " and ".join(said["data"][:2]) or "its data"
    if len(said["data"]) > 2:
        data = f"{said['data'][0]} and {len(said['data']) - 1} more files"
    before, best, train = said["initial_val_loss"], said["best_val_loss"], said["train_loss"]
    ended = said["status"] in ("finished", "stopped early")
    epochs = count(said["epoch"], "epoch") if said["epoch"] else count(said["step"], "step")
    if not ended:
        total = f" of {said['total_steps']:,}" if said["total_steps"] else ""
        verb = "is at" if said["status"] == "running" else "stands at"
        so_far = (
            ""
            if best is None or before is None
            else (f", its validation loss at {loss_text(best)} from {loss_text(before)}")
        )
        return f"{model} on {data} {verb} step {said['step']:,}{total}{so_far}"
    if best is not None and before is not None:
        if best >= before:
            stays = f"its validation loss was {loss_text(before)} before, {loss_text(best)} at best"
            return f"{epochs} on {data} made {model} no better: {stays}"
        return (
            f"{epochs} on {data} took {model}’s validation loss from "
            f"{loss_text(before)} to {loss_text(best)}"
        )
    if train is not None:
        return f"{epochs} on {data} brought {model} to a training loss of {loss_text(train)}"
    return f"{model} on {data}"


# Options


def options_of(run: Run) -> dict[str, tuple[str, str, bool]]:
    """Return each option by its flag: its value, its default, and whether they differ.

    Those that differ come first.
    """
    defaults = {each.name: each.default for each in fields(TrainConfig)}
    found = {}
    for name, value in run.config.items():
        known = name in defaults
        default = option_text(defaults[name]) if known else "–"
        own = option_text(value)
        found[flag(str(name))] = (own, default, not known or own != default)
    return dict(sorted(found.items(), key=lambda item: not item[1][2]))


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
    """Return the options that are not the same in all runs, each with its value in each."""
    every = {str(name): None for run in runs for name in run.config if _is_compared(name)}
    values = {name: [option_text(run.config.get(name)) for run in runs] for name in every}
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
    """Return the same as measured, `micro_batch_tokens` aside; None for what was not measured."""
    micro_batches = [each for each in run.steps.measured("micro_batches") if not math.isnan(each)]
    pairs = zip(run.steps.measured("run_tokens"), run.steps["padding"], strict=True)
    padded = [(tokens, padding) for tokens, padding in pairs if not math.isnan(tokens)]
    tokens_run = math.fsum(tokens for tokens, _ in padded)
    padding = math.fsum(padding for _, padding in padded if not math.isnan(padding))
    tokens = run.steps.total("tokens")
    return {
        "micro_batches_per_step": statistics.fmean(micro_batches) if micro_batches else None,
        "padding_share": padding / tokens_run if tokens_run else None,
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
