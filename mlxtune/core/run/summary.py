"""Describes a run alike for all texts, pages, cards and tables, and compares runs' options."""

from __future__ import annotations

import datetime
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Literal

from mlxtune.config import OPTIONS, TrainConfig
from mlxtune.config.fields import flag
from mlxtune.config.objective_config import default_learning_rate, is_rewarded
from mlxtune.config.option import Effect
from mlxtune.core.evaluation.outcome import CANNOT_TELL, HELPED, HURT, Evaluation
from mlxtune.core.evaluation.verdict_text import verdict_lines
from mlxtune.core.formatting import duration, loss_text, pluralize, sentence
from mlxtune.core.run.checkpoint import ADAPTER, BEST
from mlxtune.core.run.metrics import (
    REWARD,
    WITHOUT_REWARD,
    TrainingMetrics,
    validation_measure,
)
from mlxtune.core.run.run_folder import previous_number
from mlxtune.core.run.sampled_answers import (
    MetricChange,
    NoGradient,
    exploit_sentence,
    exploit_warning,
    mean_metric,
    mean_text,
    metric_changes,
    metric_values,
    taught_nothing,
)
from mlxtune.core.run.stored_run import Run, get_int, get_mapping, get_str, number
from mlxtune.errors import resume_command

_CURVE_POINTS = 12
LOSS_MEASURE, REWARD_MEASURE = "validation loss", "mean reward"
# The lines of a verdict on rewards: greedy answers, and sampled ones.
_MAX_REWARD_LINES = 2
Outcome = Literal["good", "uncertain", "bad"]
_OUTCOMES: dict[str, Outcome] = {HELPED: "good", HURT: "bad", CANNOT_TELL: "uncertain"}
# The fields that the JSON of a run leaves out.
_OMITTED_FIELDS = (
    *("problems", "curve", "rows_per_second", "last_val_loss", "best_place", "judged", "changes"),
    *("taught_nothing", "unrewarded_fraction"),
    *("trained_on", "steps_per_epoch"),
)


@dataclass(frozen=True)
class Verdict:
    """An outcome in a sentence, and a command or path that follows."""

    outcome: Outcome
    text: str
    code: str = ""


@dataclass(frozen=True)
class RunView:
    """A run in a few numbers and sentences. Values that the run did not record are None or empty.

    `status` is finished, stopped early, running or unfinished; `started` is in ISO 8601. Losses are
    in nats per supervised token, memory in bytes; `tokens_per_second` counts tokens of examples.
    `train_loss` is the mean over the last epoch, or over the steps so far in the first epoch.
    `curve` has means of the validation losses or, with fewer than three, of the training losses; of
    the mean rewards of sampled answers in a run that learns from rewards.
    `judged` is the verdict of the evaluation, `best_place` the epoch or step of the best
    validation, `changes` the changes of sampled answers' rewards. `trained_on` has the data with
    training rows. `taught_nothing` says why no row of any step taught a run that learns from
    rewards, if none did; `unrewarded_fraction` counts answers without a reward.
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
    best_step: int | None
    tokens_per_second: float | None
    peak_memory: int | None
    predicted_memory: int | None
    seconds: float | None
    adapter: str
    sha256: str
    resume: str
    problems: tuple[str, ...]
    curve: tuple[float, ...]
    rows_per_second: float | None
    last_val_loss: float | None
    best_place: str
    judged: Verdict | None
    objective: str = "sft"
    changes: tuple[MetricChange, ...] = ()
    taught_nothing: NoGradient | None = None
    unrewarded_fraction: float = 0.0
    trained_on: tuple[str, ...] = ()
    steps_per_epoch: int | None = None

    @classmethod
    def of(cls, run: Run) -> RunView:
        progress, best, status = run.progress, run.progress.best, _status(run)
        seconds = math.fsum(run.column("seconds"))
        peak = max([get_int(run.result, "peak_memory") or 0, *map(int, run.column("memory"))])
        return cls(
            name=run.name,
            folder=str(run.folder),
            status=status,
            started=_start_text(run),
            model=PurePath(get_str(run.config, "model_path")).name,
            data=data_names(run),
            step=progress.step,
            total_steps=get_int(run.about, "plan", "steps"),
            epoch=len(progress.epochs),
            epochs=get_int(run.config, "epochs"),
            train_loss=_train_loss(run),
            initial_val_loss=progress.initial_val_loss,
            best_val_loss=best.val_loss if best else None,
            best_epoch=progress.best_epoch,
            best_step=best.step if best else None,
            tokens_per_second=_speed(run, "tokens", seconds),
            peak_memory=peak or None,
            predicted_memory=get_int(run.about, "plan", "memory", "peak"),
            seconds=_seconds(run) or seconds or None,
            adapter=_adapter(run),
            sha256=get_str(run.result, "sha256"),
            resume=_resume(run) if status == "unfinished" else "",
            problems=tuple(run.problems),
            curve=_curve(run),
            rows_per_second=_speed(run, "rows", seconds),
            last_val_loss=progress.epochs[-1].val_loss if progress.epochs else None,
            best_place=progress.best_place,
            judged=_verdict(run.evaluation),
            objective=get_str(run.config, "objective") or "sft",
            changes=tuple(metric_changes(run)),
            taught_nothing=taught_nothing(run),
            unrewarded_fraction=mean_metric(run, WITHOUT_REWARD),
            trained_on=data_names(run, trained=True),
            steps_per_epoch=get_int(run.about, "plan", "steps_per_epoch"),
        )

    @property
    def finished(self) -> bool:
        """Whether training is complete: it took all its steps, or stopped early."""
        return self.status in ("finished", "stopped early")

    @property
    def steps(self) -> str:
        if self.finished:
            epochs = f" in {self.epochs_taken}" if self.epochs_taken else ""
            return f"{self.step:,}{epochs}{', early' * (self.status == 'stopped early')}"
        total = f"/{self.total_steps:,}" if self.total_steps else ""
        return f"{self.step:,}{total} {self.status}"

    @property
    def _is_partial(self) -> bool:
        """Whether training ended within an epoch."""
        return bool(self.steps_per_epoch and self.step % self.steps_per_epoch)

    @property
    def epochs_taken(self) -> str:
        """The epochs of training, such as `2 epochs` or `0.2 epochs`; empty without one."""
        if self.steps_per_epoch and self._is_partial:
            epochs = self.step / self.steps_per_epoch
            digits = 1 if epochs >= 0.1 else 2
            return f"{epochs:,.{digits}f} epochs" if epochs >= 0.01 else "under 0.01 epochs"
        return pluralize(self.epoch, "epoch") if self.epoch else ""

    @property
    def course(self) -> str:
        took = f" in {duration(self.seconds)}" if self.seconds else ""
        return f"{pluralize(self.step, 'step')}{took}"

    @property
    def speed(self) -> str:
        speed = self.tokens_per_second
        return f"{speed:,.0f} tokens/s" if speed else ""

    @property
    def improved(self) -> bool:
        """Whether a validation was better than the one before training; true if unknown."""
        before, best = self.initial_val_loss, self.best_val_loss
        return before is None or best is None or best < before

    @property
    def worsened(self) -> bool:
        """Whether every validation was worse than the one before training."""
        before, best = self.initial_val_loss, self.best_val_loss
        return before is not None and best is not None and best > before

    @property
    def verdict(self) -> Verdict:
        """The outcome of the run; that a reward may be exploited comes first."""
        verdict = self._outcome
        if (warning := " ".join(map(sentence, exploit_warning(self.changes)))) == "":
            return verdict
        outcome = "uncertain" if verdict.outcome == "good" else verdict.outcome
        return Verdict(outcome, f"{warning} {verdict.text}", verdict.code)

    @property
    def _outcome(self) -> Verdict:
        if self.status == "running":
            return Verdict("uncertain", "The run is still training: these are its results so far.")
        if not self.finished:
            resume = " Resume it with" if self.resume else ""
            return Verdict("uncertain", f"The run is unfinished.{resume}", self.resume)
        if self.judged is not None:
            return self.judged
        ended = "stopped early" if self.status == "stopped early" else "finished"
        if self.taught_nothing:
            why = sentence(self.taught_nothing.nothing_learned)
            return Verdict("uncertain", f"The run {ended}. {why}")
        if not self.improved:
            text = f"The run {ended}. {sentence(self.not_better)}"
            if self.worsened and self.adapter:
                text += f" Its adapter, of {self.best_place}, is worse than the starting model:"
                return Verdict("uncertain", text, self.adapter)
            return Verdict("uncertain", text)
        note = f" {sentence(f'{self.best_place} was the best')}" if self.best_place else ""
        adapter = " Its adapter:" if self.adapter else ""
        return Verdict("good", f"The run {ended}.{note}{adapter}", self.adapter)

    @property
    def reward_change(self) -> MetricChange | None:
        """The change of the reward of sampled answers, or None."""
        return next((each for each in self.changes if each.kind != "answers"), None)

    @property
    def not_better(self) -> str:
        """A sentence on a run whose validations never improved, with the remedy."""
        problem = "no epoch was better on the validation rows than the model before training"
        if self.worsened:
            problem = "the starting model was better on the validation rows than after any epoch"
        if self.is_rewarded:
            return f"{problem}: lower --lr, raise --group-size, or change --reward"
        return f"{problem}: lower --lr, or add data"

    @property
    def is_rewarded(self) -> bool:
        """Whether the run learns from rewards of sampled answers."""
        return is_rewarded(self.objective)

    @property
    def measure(self) -> str:
        """The name of what a validation measures."""
        return REWARD_MEASURE if self.is_rewarded else LOSS_MEASURE

    def validation_text(self, loss: float | None) -> str:
        """Return a validation's loss, or mean reward, as text."""
        return loss_text(None if loss is None else validation_measure(loss, self.objective)[1])

    @property
    def headline(self) -> str:
        """The result in a clause, after any reward that got worse while another got better."""
        exploit = exploit_sentence(self.changes)
        return f"{exploit}: {self._result}" if exploit else self._result

    @property
    def _result(self) -> str:
        names = self.trained_on or self.data
        model, data = self.model or "The model", " and ".join(names[:2]) or "its data"
        if len(names) > 2:
            data = f"{names[0]} and {len(names) - 1} more files"
        before, best, shown = self.initial_val_loss, self.best_val_loss, self.validation_text
        validated = before is not None and best is not None
        if not self.finished:
            total = f" of {self.total_steps:,}" if self.total_steps else ""
            verb = "is at" if self.status == "running" else "stopped at"
            losses = f"; {self.measure} {shown(before)} before, {shown(best)} at best"
            return f"{model} on {data} {verb} step {self.step:,}{total}{losses * validated}"
        trained = self.epochs_taken or pluralize(self.step, "step")
        if self._is_partial:
            trained = f"{pluralize(self.step, 'step')} ({self.epochs_taken})"
        if self.taught_nothing and not (validated and self.improved):
            answers = self.taught_nothing.answers
            return f"{trained} on {data} taught {model} nothing: its answers {answers}"
        if before is not None and best is not None:
            if not self.improved:
                losses = f"{shown(before)} before, {shown(best)} at best"
                return f"{trained} on {data} did not improve {model}: {self.measure} {losses}"
            losses = f"from {shown(before)} to {shown(best)}"
            return f"{trained} on {data} took {model}’s {self.measure} {losses}"
        if (change := self.reward_change) is not None:
            rewards = f"from {mean_text(change.first)} to {mean_text(change.last)}"
            return f"{trained} on {data} took {model}’s mean reward of sampled answers {rewards}"
        if self.train_loss is not None:
            loss = loss_text(self.train_loss)
            return f"{trained} on {data} brought {model} to a training loss of {loss}"
        return f"{model} on {data}"

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"data": list(self.data)}
        for name in _OMITTED_FIELDS:
            del values[name]
        return values | {"headline": self.headline, "problems": list(self.problems)}


def measure_of(views: Sequence[RunView]) -> str:
    """Return the name of what the validations of runs measure."""
    return " or ".join(dict.fromkeys(view.measure for view in views))


def _verdict(evaluation: Evaluation | None) -> Verdict | None:
    if evaluation is None or evaluation.verdict is None or evaluation.difference is None:
        return None
    # A small gain does not count as success.
    certain = evaluation.verdict == HURT or not evaluation.hardly
    outcome = _OUTCOMES[evaluation.verdict if certain else CANNOT_TELL]
    lines = verdict_lines(evaluation)
    if evaluation.rewards:  # the page has a table of them
        lines = lines[:_MAX_REWARD_LINES]
    return Verdict(outcome, " ".join(map(sentence, lines)))


def hub_data(run: Run) -> list[Mapping[str, Any]]:
    """Return a run's records about its data sets from the hub."""
    recorded = run.about.get("hub")
    entries = recorded if isinstance(recorded, list) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def data_names(run: Run, *, trained: bool = False) -> tuple[str, ...]:
    """Return the names of a run's data; with `trained`, of the data with training rows."""
    ledgers = [each for each in run.ledgers if each.rows_train or not trained]
    return tuple(dict.fromkeys(data_name(run, ledger.path) for ledger in ledgers))


def data_name(run: Run, path: str) -> str:
    """Return the name of a ledger's file, or of its split on the hub."""
    for data in hub_data(run):
        for title in map(str, get_mapping(data, "titles").values()):
            if path == title or path.startswith(f"{title}/"):
                return title
    return PurePath(path).name


def bucket_means(values: Sequence[float], most: int) -> list[float]:
    """Return the means of `most` buckets of values; return fewer values unchanged."""
    parts = min(most, len(values))
    bounds = [len(values) * i // parts for i in range(parts + 1)] if parts else [0]
    return [statistics.fmean(values[a:b]) for a, b in pairwise(bounds)]


def _curve(run: Run) -> tuple[float, ...]:
    losses: Sequence[float] = [each.val_loss for each in run.progress.validations]
    if is_rewarded(run.config.get("objective")):
        _, losses = metric_values(run, REWARD)
    elif len(losses) < 3:
        losses = run.column("loss")
    return tuple(bucket_means(losses, _CURVE_POINTS))


def _start_text(run: Run) -> str:
    try:
        started = datetime.datetime.fromisoformat(get_str(run.about, "started_at"))
        started.astimezone().timestamp()  # the first and last years may have no timestamp
    except (ValueError, OverflowError, OSError):
        return ""
    return started.isoformat(timespec="seconds")


def _status(run: Run) -> str:
    if run.result:
        return "stopped early" if run.result.get("stopped_early") is True else "finished"
    return "running" if run.holder is not None else "unfinished"


def _train_loss(run: Run) -> float | None:
    if run.progress.epochs:
        return run.progress.epochs[-1].train_loss
    steps = run.progress.steps
    return TrainingMetrics(len(steps), steps).average_loss()


def _seconds(run: Run) -> float | None:
    for source in (run.result, run.metadata):
        if (milliseconds := number(source, "total_time_ms")) is not None:
            return milliseconds / 1000
    return None


def _speed(run: Run, name: str, seconds: float) -> float | None:
    # A division by a tiny time may overflow to infinity.
    speed = sum(run.column(name)) / seconds if seconds > 0 else math.inf
    return speed if math.isfinite(speed) else None


def _adapter(run: Run) -> str:
    if previous_number(run.folder.name) is not None:
        # A later run has overwritten this run's adapter.
        best = run.folder / BEST / ADAPTER
        return str(best) if best.exists() else ""
    adapter = get_str(run.result, "adapter")
    return os.path.normpath(run.folder / adapter) if adapter else ""


def _resume(run: Run) -> str:
    if not run.checkpoints:
        return ""
    return resume_command(run.folder)


def _lowest_first(value: float | None) -> float:
    return math.inf if value is None else value


def _newest_first(run: RunView) -> float:
    return -datetime.datetime.fromisoformat(run.started).timestamp() if run.started else 0.0


# Sort keys for runs: the newest, the lowest loss, the fastest or the longest first, or by name.
SORTS: dict[str, Callable[[RunView], Any]] = {
    "when": _newest_first,
    "name": lambda run: run.name,
    "val": lambda run: _lowest_first(run.best_val_loss),
    "train": lambda run: _lowest_first(run.train_loss),
    "speed": lambda run: -(run.tokens_per_second or 0.0),
    "steps": lambda run: -run.step,
}


# Options


def option_texts(run: Run) -> dict[str, tuple[str, str, bool]]:
    """Return, by flag, each option's value, its default, and whether the two differ.

    Options that differ come first.
    """
    defaults = {field.name: option_text(field.default) for field in fields(TrainConfig)}
    defaults["lr"] = option_text(default_learning_rate(run.config.get("objective")))
    options = {}
    for name, value in run.config.items():
        shown, default = option_text(value), defaults.get(name)
        options[flag(str(name))] = (shown, default or "–", shown != default)
    return dict(sorted(options.items(), key=lambda item: not item[1][2]))


def option_text(value: Any) -> str:
    if value is None or value == "" or value == () or value == []:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing_options(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the options whose values differ between runs, with the value in each run."""
    places = {name for name, option in OPTIONS.items() if option.affects is Effect.PLACES}
    models = {get_str(run.metadata, "base_hash") for run in runs}
    if len(models) == 1 and "" not in models:
        places.add("model_path")  # one model may have several paths
    names = dict.fromkeys(name for run in runs for name in run.config if name not in places)
    values = {name: [option_text(run.config.get(name)) for run in runs] for name in names}
    return {flag(name): each for name, each in values.items() if len(set(each)) > 1}


def validated_alike(runs: Sequence[Run]) -> bool:
    """Return whether all runs with validation used the same validation rows and rewards."""
    validated_on = set()
    for run in runs:
        if run.progress.validations:
            rows = get_str(run.about, "validation_hash")
            held_out = rows == get_str(run.about, "data_hash")
            names = ("val_split", "seed", "val_rows") if held_out else ()
            rewards = option_text(run.config.get("reward"))
            validated_on.add((rows, rewards, *(number(run.config, name) for name in names)))
    return len(validated_on) < 2


def predicted_fractions(run: Run) -> dict[str, float | None]:
    names = ("micro_batches_per_step", "padding_share", "run_share")
    return {name: number(run.about, "plan", name) for name in names} | {
        "micro_batch_tokens": get_int(run.about, "plan", "micro_batch_tokens")
    }


def measured_plan_values(run: Run) -> dict[str, float | None]:
    """Return measured values under the keys of `predicted_fractions`; a value is None if
    unmeasured.
    """
    micro_batches = [number for number in run.column("micro_batches") if number]
    tokens, forward_tokens = sum(run.column("tokens")), sum(run.column("run_tokens"))
    return {
        "micro_batches_per_step": statistics.fmean(micro_batches) if micro_batches else None,
        "padding_share": sum(run.column("padding")) / forward_tokens if forward_tokens else None,
        "run_share": forward_tokens / tokens if forward_tokens and tokens else None,
    }
