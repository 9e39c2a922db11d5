"""The record of a run, in the order of metrics.jsonl, and values derived from it.

A checkpoint's copy of metrics.jsonl tells a trainer where to resume.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any

from mlxtune.config.limits import (
    MAX_METRIC_VALUES,
    MAX_OTHER_RECORDS,
    MAX_OTHER_VALUES,
    MAX_STEP_VALUES,
    RECORD_LIMITS,
    TooLargeError,
    has_more_values,
    parse_json,
)
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.files.writing import (
    BestEffort,
    as_output_error,
    make_folder,
    open_to_append,
    write_file,
)
from mlxtune.core.run.checkpoint import METRICS
from mlxtune.core.run.metrics import (
    InstructEpochMetrics,
    InstructTrainResult,
    SkippedStep,
    StepHistory,
    StepRecord,
    TrainingMetrics,
    ValidationRecord,
)

Record = StepRecord | SkippedStep | ValidationRecord | InstructEpochMetrics
_KINDS: dict[str, type] = {
    "step": StepRecord,
    "skipped": SkippedStep,
    "validation": ValidationRecord,
    "epoch": InstructEpochMetrics,
}
# Lines with fewer bytes are parsed without checking limits, to save time: a file has up to a
# million lines, nearly all of them that short.
_SHORT_LINE = 4096
# Only skipped steps, which name their rows, may have longer lines.
_MAX_LINE_BYTES, _KIND_SKIPPED = 65_536, b'"kind": "skipped"'
# The start of a line that is a step, of which there are up to a million.
_STEP = b'{"kind": "step"'
# A line names it only where metrics do not show it: a loss of rows without any, or with metrics a
# loss of tokens.
_IS_OF_ROWS = "is_of_rows"
_KIND_OF = {kind: name for name, kind in _KINDS.items()}


class Progress:
    """The progress of a run: its records in order, with step records stored compactly."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.steps = StepHistory()
        # A step is stored as the index of its record in `steps`.
        self._entries: list[int | SkippedStep | ValidationRecord | InstructEpochMetrics] = []
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)
            self._entries.append(len(self.steps) - 1)
        else:
            self._entries.append(record)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Record:
        entry = self._entries[index]
        return self.steps[entry] if isinstance(entry, int) else entry

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))

    @property
    def step(self) -> int:
        """The number of the last step that was taken or skipped; 0 before the first step."""
        steps = (r.step for r in reversed(self) if isinstance(r, StepRecord | SkippedStep))
        return next(steps, 0)

    @property
    def epochs(self) -> list[InstructEpochMetrics]:
        return [entry for entry in self._entries if isinstance(entry, InstructEpochMetrics)]

    @property
    def best(self) -> ValidationRecord | None:
        """The first validation with the lowest loss; the validation at step 0 does not count."""
        after = (validation for validation in self.validations if validation.step)
        return min(after, key=attrgetter("val_loss"), default=None)

    @property
    def best_epoch(self) -> int | None:
        best = self.best
        steps = (r for r in reversed(self) if isinstance(r, StepRecord | SkippedStep))
        return next((step.epoch for step in steps if best and step.step <= best.step), None)

    @property
    def best_place(self) -> str:
        """The time of the best validation: `epoch 2` or `step 40 (epoch 2)`; empty without one."""
        best, epoch = self.best, self.best_epoch
        if best is None or epoch is None:
            return ""
        # An epoch's metrics follow the validation at its end.
        following = self._entries[self._entries.index(best) + 1 :][:1]
        at_end = any(
            isinstance(each, InstructEpochMetrics) and each.val_loss == best.val_loss
            for each in following
        )
        return f"epoch {epoch}" if at_end else f"step {best.step:,} (epoch {epoch})"

    @property
    def validations_since_best(self) -> int:
        best = self.best
        return sum(
            best is not None and validation.step > best.step for validation in self.validations
        )

    @property
    def validations(self) -> list[ValidationRecord]:
        return [entry for entry in self._entries if isinstance(entry, ValidationRecord)]

    @property
    def skipped(self) -> list[SkippedStep]:
        return [entry for entry in self._entries if isinstance(entry, SkippedStep)]

    @property
    def initial_val_loss(self) -> float | None:
        return next(
            (validation.val_loss for validation in self.validations if validation.step == 0), None
        )

    @property
    def consecutive_skips(self) -> int:
        """The number of steps skipped since the last applied step."""
        recent = takewhile(lambda record: not isinstance(record, StepRecord), reversed(self))
        return sum(isinstance(record, SkippedStep) for record in recent)

    def lines(self, start: int, end: int) -> Iterator[bytes]:
        """Yield lines of metrics.jsonl one by one, to use little memory."""
        for i in range(start, end):
            yield (json.dumps(record_values(self[i]), allow_nan=False) + "\n").encode()

    @classmethod
    def from_jsonl(cls, content: bytes) -> Progress:
        """Parse metrics.jsonl.

        Raises ValueError, with the line number, for an invalid record or a gap between steps.
        """
        progress = cls()
        step = 0
        for number, record in enumerate(parse_records(content), start=1):
            if isinstance(record, ValueError):
                raise ValueError(f"line {number} {record}") from record
            if isinstance(record, StepRecord | SkippedStep):
                step += 1
                if record.step != step:
                    raise ValueError(f"line {number} is step {record.step}, not {step}")
            progress.append(record)
        return progress

    def epoch_metrics(
        self, epoch: int, val_loss: float | None, learning_rate: float, time_ms: int
    ) -> InstructEpochMetrics:
        steps = [record for record in self.steps if record.epoch == epoch]
        train_loss = TrainingMetrics(len(steps), steps).average_loss() or 0.0
        seconds = sum(record.seconds for record in steps)
        return InstructEpochMetrics(
            epoch=epoch,
            train_loss=train_loss,
            train_perplexity=perplexity(train_loss),
            val_loss=val_loss,
            val_perplexity=None if val_loss is None else perplexity(val_loss),
            learning_rate=learning_rate,
            epoch_time_ms=time_ms,
            samples_per_sec=sum(record.rows for record in steps) / max(seconds, 1e-9),
        )

    def result(self, stopped_early: bool, time_ms: int) -> InstructTrainResult:
        best = self.best
        return InstructTrainResult(
            epoch_metrics=self.epochs,
            best_epoch=self.best_epoch,
            best_step=best.step if best else None,
            best_val_loss=best.val_loss if best else None,
            stopped_early=stopped_early,
            total_time_ms=time_ms,
            initial_val_loss=self.initial_val_loss,
            steps=list(self.steps),
            validations=self.validations,
        )

    def reopen_epoch(self, steps_per_epoch: int, total_steps: int, validated: bool = False) -> None:
        """Drop the records that end an unfinished epoch, if more steps may follow.

        The last validation stays if an uninterrupted run would have it too (`validated`), or if its
        adapter has replaced the adapter of a worse validation in `best/`.
        """
        if self.step < total_steps and self.step % steps_per_epoch:
            earlier = any(0 < validation.step < self.step for validation in self.validations)
            replaced = earlier and self.best is not None and self.best.step == self.step
            kept_records = (int, SkippedStep, *[ValidationRecord] * (validated or replaced))
            while not isinstance(self._entries[-1], kept_records):
                self._entries.pop()


def record_values(record: Record) -> dict[str, Any]:
    values = {"kind": _KIND_OF[type(record)], **asdict(record)}
    if isinstance(record, StepRecord) and record.is_of_rows == bool(record.metrics):
        del values[_IS_OF_ROWS]
    # Only preference objectives have metrics, and only runs with several files have a loss per
    # file.
    optional = ("metrics", "files")
    for part in (values, *values.get("files", ())):
        for name in optional:
            if not part.get(name, True):
                del part[name]
    return values


def parse_records(content: bytes) -> Iterator[Record | ValueError]:
    """Yield the record of each line of metrics.jsonl, or the problem with that line.

    Raises TooLargeError if there are more metrics, or more lines and values besides steps, than any
    run writes.
    """
    others = values = metrics = 0
    for line in io.BytesIO(content):
        record: Record | ValueError
        if not line.startswith(_STEP):
            values += line.count(b",")
            if values > MAX_OTHER_VALUES:
                raise TooLargeError(
                    f"{METRICS} has more than {MAX_OTHER_VALUES:,} values besides steps"
                )
        try:
            record = parse_record(line)
        except ValueError as error:
            record = error
        if isinstance(record, StepRecord):
            metrics += len(record.metrics)
            if metrics > MAX_METRIC_VALUES:
                raise TooLargeError(
                    f"{METRICS} has more than {MAX_METRIC_VALUES:,} metrics of steps"
                )
        else:
            others += 1 + (len(record.rows) if isinstance(record, SkippedStep) else 0)
            if others > MAX_OTHER_RECORDS:
                raise TooLargeError(
                    f"{METRICS} has more than {MAX_OTHER_RECORDS:,} lines besides steps"
                )
        yield record


def parse_record(line: bytes) -> Record:
    """Parse a line of metrics.jsonl. Raises ValueError; the caller adds the line number."""
    if len(line) > _MAX_LINE_BYTES and _KIND_SKIPPED not in line[:_SHORT_LINE]:
        raise ValueError("is not a record of a run: it is too long")
    if line.startswith(_STEP) and has_more_values(line, MAX_STEP_VALUES):
        raise ValueError(f"is not a record of a run: it has more than {MAX_STEP_VALUES} values")
    text = line.decode()
    try:
        short = len(line) < _SHORT_LINE
        values = json.loads(text) if short else parse_json(line, RECORD_LIMITS, "the line")
        kind = _KINDS[values.pop("kind")]
        if kind is StepRecord:
            values.setdefault(_IS_OF_ROWS, bool(values.get("metrics")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("is not a record of a run") from error
    try:
        record: Record = from_json(kind, values)
        return record
    except ValueError as error:
        raise ValueError(f"is not a record of a run: {error}") from error


# Fields that the machine and its memory decide, and that are not part of the result.
MEASURED_FIELDS = (
    *("seconds", "epoch_time_ms", "samples_per_sec"),
    *("memory", "micro_batches", "run_tokens", "padding"),
)


def have_equal_results(some: Iterable[Record], others: Iterable[Record]) -> bool:
    """Return whether records are equal in all fields that are not in MEASURED_FIELDS."""
    return [_without_measurements(r) for r in some] == [_without_measurements(r) for r in others]


def _without_measurements(record: Record) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name not in MEASURED_FIELDS}


@dataclass
class MetricsFile:
    """Writes the record of a run to metrics.jsonl.

    If a write fails, `on_problem` is called once; the next write that succeeds completes the file.
    """

    folder: Path
    on_problem: Callable[[str], None]

    def __post_init__(self) -> None:
        self._path = self.folder / METRICS
        self._best_effort = BestEffort(self.on_problem, "the next write will try again")
        # The numbers of records and of bytes in the file; `_size` is None if the file must be
        # replaced.
        self._written = 0
        self._size: int | None = None

    def write(self, progress: Progress) -> None:
        """Append the records that are not in the file yet."""
        with self._best_effort.attempt(), as_output_error(self._path):
            self._write(progress)

    def _write(self, progress: Progress) -> None:
        count, size, self._size = len(progress), self._size, None
        if size is None or not self._path.exists() or self._path.stat().st_size != size:
            content = b"".join(progress.lines(0, count))
            make_folder(self._path.parent)  # the file may have been removed
            write_file(self._path, [content])
            size = len(content)
        else:
            content = b"".join(progress.lines(self._written, count))
            with open_to_append(self._path) as file:
                file.write(content)
            size += len(content)
        self._written, self._size = count, size
