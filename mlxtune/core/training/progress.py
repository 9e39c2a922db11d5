"""How far a run has come: its records, in the order of metrics.jsonl, and what follows from them.

That file in a checkpoint is all that a trainer needs to know where it stood.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, overload

from mlxtune.core.machine.files import make_folder, write_file
from mlxtune.core.training.checkpoint import METRICS
from mlxtune.core.training.metrics import (
    InstructEpochMetrics,
    SkippedStep,
    StepHistory,
    StepRecord,
    ValidationRecord,
)
from mlxtune.errors import OutputError

Record = StepRecord | SkippedStep | ValidationRecord | InstructEpochMetrics
_KINDS: dict[str, type] = {
    "step": StepRecord,
    "skipped": SkippedStep,
    "validation": ValidationRecord,
    "epoch": InstructEpochMetrics,
}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}


class Records(Sequence[Record]):
    """Records in their order, those of steps in little memory."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.steps = StepHistory()
        # All others, and where they stand.
        self.others: list[Record] = []
        self._places: list[int] = []
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        """Add a record."""
        if isinstance(record, StepRecord):
            self.steps.append(record)
        else:
            self._places.append(len(self))
            self.others.append(record)

    def pop(self) -> Record:
        """Take the last record away."""
        if self._places and self._places[-1] == len(self) - 1:
            self._places.pop()
            return self.others.pop()
        return self.steps.pop()

    def __len__(self) -> int:
        return len(self.steps) + len(self.others)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        before = bisect_left(self._places, place)
        if before < len(self._places) and self._places[before] == place:
            return self.others[before]
        return self.steps[place - before]


class Progress:
    """The records of a run so far.

    `step` counts the steps that were taken or skipped: it is also the place in the run's order.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records = Records(records)

    def of(self, kind: type) -> Iterator[Any]:
        """Yield the records of a kind."""
        if kind is StepRecord:
            return iter(self.records.steps)
        return (record for record in self.records.others if isinstance(record, kind))

    @property
    def step(self) -> int:
        """The last step that was taken or skipped, 0 before the first."""
        steps = (r.step for r in reversed(self.records) if isinstance(r, StepRecord | SkippedStep))
        return next(steps, 0)

    @property
    def epochs(self) -> list[InstructEpochMetrics]:
        """The epochs that ended."""
        return list(self.of(InstructEpochMetrics))

    @property
    def best(self) -> InstructEpochMetrics | None:
        """The first epoch of the lowest validation loss; None without validation."""
        best = None
        for metrics in self.epochs:
            best = metrics if improves(metrics, best) else best
        return best

    @property
    def initial_val_loss(self) -> float | None:
        """The validation loss before the first step."""
        found = (r.val_loss for r in self.of(ValidationRecord) if r.step == 0)
        return next(found, None)

    @property
    def skipped_in_a_row(self) -> list[SkippedStep]:
        """The steps skipped since the last that was taken."""
        skipped = []
        for record in reversed(self.records):
            if isinstance(record, StepRecord):
                break
            if isinstance(record, SkippedStep):
                skipped.append(record)
        return skipped[::-1]

    def is_validated(self, step: int) -> bool:
        """Tell whether the validation set was evaluated after so many steps."""
        return any(record.step == step for record in self.of(ValidationRecord))

    def as_jsonl(self) -> bytes:
        """Return the content of metrics.jsonl."""
        return b"".join(self.lines(len(self.records)))

    def lines(self, count: int) -> Iterator[bytes]:
        """Yield the first lines of metrics.jsonl, so that it is never in memory as a whole."""
        return (_line(self.records[i]).encode() for i in range(count))

    @classmethod
    def from_jsonl(cls, content: bytes) -> Progress:
        """Read the content of a metrics.jsonl. Raises ValueError, with the line, where it is none.

        Steps are checked to be without gaps.
        """
        progress = cls()
        step = 0
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
            record = _record(line, number)
            if isinstance(record, StepRecord | SkippedStep):
                step += 1
                if record.step != step:
                    raise ValueError(f"line {number} is step {record.step}, not {step}")
            try:
                progress.records.append(record)
            except OverflowError as error:
                raise ValueError(f"line {number} has a number that is too large") from error
        return progress

    def reopen(self, steps_per_epoch: int, total_steps: int) -> None:
        """Forget the end of an epoch that a limit had cut short, where more steps are to follow."""
        if self.step < total_steps and self.step % steps_per_epoch:
            while self.records and not isinstance(self.records[-1], StepRecord | SkippedStep):
                self.records.pop()


def _line(record: Record) -> str:
    return json.dumps({"kind": _KIND_OF[type(record)], **asdict(record)}, allow_nan=False) + "\n"


def _record(line: str, number: int) -> Record:
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("kind")]
        record: Record = kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"line {number} is no record of a run") from error
    for each in fields(kind):
        value = getattr(record, each.name)
        kinds = _VALUES[str(each.type)]
        if not isinstance(value, kinds) or isinstance(value, bool) or not _is_plain(value):
            raise ValueError(f"line {number}: its {each.name} is {value!r:.40}")
    return record


def _is_plain(value: Any) -> bool:
    return not isinstance(value, list) or all(isinstance(each, str) for each in value)


# What a field holds, by how it is annotated.
_VALUES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str": (str,),
    "list[str]": (list,),
}


# Values that depend on the machine and its memory, not on what was learned.
MEASURED = (
    *("seconds", "epoch_time_ms", "samples_per_sec"),
    *("memory", "micro_batches", "run_tokens", "padding"),
)


def same_but_for_times(some: Sequence[Record], others: Sequence[Record]) -> bool:
    """Tell whether records are the same, whatever time and memory each took."""
    return [_without_times(record) for record in some] == [_without_times(r) for r in others]


def _without_times(record: Record) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name not in MEASURED}


def improves(metrics: InstructEpochMetrics, best: InstructEpochMetrics | None) -> bool:
    """Tell whether an epoch has the lowest validation loss so far."""
    if metrics.val_loss is None:
        return False
    return best is None or best.val_loss is None or metrics.val_loss < best.val_loss


class MetricsLog:
    """Keeps metrics.jsonl in step with the records of a run, as far as the disk lets it.

    What cannot be written stays in the records, and is written when the disk takes it again.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._path = folder / METRICS
        self._progress = progress
        # How many records the file holds, and in how many bytes; None where it is to be replaced.
        self._written = 0
        self._size: int | None = None

    def write(self) -> None:
        """Append the records that are not in the file yet. Raises OutputError."""
        new = self._progress.records[self._written :]
        if not new and self._path.exists():
            return
        try:
            if self._size is None or self._path.stat().st_size != self._size:
                self._replace()
                return
            content = "".join(map(_line, new)).encode()
            size, self._size = self._size, None
            with self._path.open("ab") as file:
                file.write(content)
            self._size = size + len(content)
        except FileNotFoundError:
            self._replace()
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._written = len(self._progress.records)

    def _replace(self) -> None:
        content = self._progress.as_jsonl()
        make_folder(self._path.parent)  # which may have been removed since
        write_file(self._path, [content])
        self._size = len(content)
        self._written = len(self._progress.records)
