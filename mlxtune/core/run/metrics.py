"""The measurements of steps, validations, epochs and whole runs."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints, overload

from mlxtune.config.objective_config import is_rewarded

# The metrics of a step's sampled answers, under TRL's names where it has them.
REWARD = "reward"
MEAN_LENGTH = "completions/mean_length"
CLIPPED_RATIO = "completions/clipped_ratio"
WITHOUT_REWARD = "completions/without_reward"
EQUAL_REWARDS = "frac_reward_zero_std"
# The part of these rows of which no answer has a reward, as a fraction of all rows; left out if 0.
ROWS_WITHOUT_REWARD = "frac_without_reward"
# The other rows that teach nothing, because answers are masked; left out if 0.
MASKED_ROWS = "frac_masked"
# Earlier versions did not record these.
ADDED_METRICS = (ROWS_WITHOUT_REWARD, MASKED_ROWS)
_ROWS_SHOWN = 8


def validation_measure(loss: float, objective: object) -> tuple[str, float]:
    """Return the name and the value of what a validation's loss measures.

    A run that learns from rewards records the negative mean reward as its loss.
    """
    return (REWARD, -loss) if is_rewarded(objective) else ("loss", loss)


@dataclass(frozen=True)
class InstructStepResult:
    """The result of an update on one example. `loss` is in nats per supervised token."""

    loss: float
    num_response_tokens: int
    perplexity: float


@dataclass(frozen=True)
class InstructBatchResult:
    """The result of one step or one evaluation.

    `avg_loss` is the mean loss over all supervised tokens, in nats. `grad_norm` is the gradient's
    L2 norm before clipping, or None for an evaluation. `total_tokens` counts context too. The other
    fields describe the execution and are 0 if not measured: peak `memory` in bytes,
    `micro_batches`, and `run_tokens`, the tokens that the model processed, including `padding`.

    Under a preference objective, `avg_loss` is the objective's loss, and `metrics` has rewards and
    log-probabilities under TRL's names.
    """

    avg_loss: float
    total_response_tokens: int
    perplexity: float
    grad_norm: float | None = None
    total_tokens: int = 0
    memory: int = field(default=0, compare=False)
    micro_batches: int = field(default=0, compare=False)
    run_tokens: int = field(default=0, compare=False)
    padding: int = field(default=0, compare=False)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """One optimizer update. `tokens` counts its examples' tokens; `seconds` is wall time, with the
    time to draw its samples, if any.

    The fields after `seconds` are as in InstructBatchResult. The loss is of rows, not of tokens,
    under every objective but `sft`.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    perplexity: float
    tokens: int
    supervised_tokens: int
    rows: int
    seconds: float
    memory: int = 0
    micro_batches: int = 0
    run_tokens: int = 0
    padding: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    is_of_rows: bool = False

    @property
    def weight(self) -> int:
        """The weight in a mean loss: supervised tokens, or rows."""
        return self.rows if self.is_of_rows else self.supervised_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class StepHistory(Sequence[StepRecord]):
    """Step records stored as columns of numbers.

    As objects, the records of a hundred thousand steps would take 70 MB.
    """

    def __init__(self) -> None:
        kinds = get_type_hints(StepRecord)
        self._columns: dict[str, Any] = {
            name: array({int: "q", float: "d"}[kind]) if kind in (int, float) else []
            for name, kind in kinds.items()
        }

    def append(self, record: StepRecord) -> None:
        for name, column in self._columns.items():
            column.append(getattr(record, name))

    def column(self, name: str) -> Sequence[float]:
        column: Sequence[float] = self._columns[name]
        return column

    @property
    def metrics(self) -> Sequence[Mapping[str, float]]:
        """The metrics of each step."""
        metrics: list[dict[str, float]] = self._columns["metrics"]
        return metrics

    def pop(self) -> StepRecord:
        return StepRecord(**{name: column.pop() for name, column in self._columns.items()})

    def __len__(self) -> int:
        return len(self._columns["step"])

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return StepRecord(**{name: column[index] for name, column in self._columns.items()})


@dataclass(frozen=True)
class SkippedStep:
    """A step that was not applied because its loss or gradient was not finite.

    `rows` lists the rows of the step as `path:line`.
    """

    step: int
    epoch: int
    learning_rate: float
    reason: str
    rows: list[str]

    def rows_text(self) -> str:
        """Return the rows as text, abbreviated: `chat.jsonl:4, 11, 12 and 5 more`."""
        parts, file = [], ""
        for row in self.rows[:_ROWS_SHOWN]:
            path, colon, line = row.rpartition(":")
            parts.append(line if colon and path == file else row)
            file = path
        more = len(self.rows) - len(parts)
        return ", ".join(parts) + (f" and {more} more" if more else "")


@dataclass(frozen=True)
class FileLoss:
    """The loss over one file's validation rows, with metrics under a preference objective."""

    path: str
    val_loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ValidationRecord:
    """The loss over the whole validation set after `step` steps; `step` is 0 before training.

    `files` has the loss of each file, if there are several.
    """

    step: int
    val_loss: float
    val_perplexity: float
    metrics: dict[str, float] = field(default_factory=dict)
    files: list[FileLoss] = field(default_factory=list)


@dataclass(frozen=True)
class InstructEpochMetrics:
    """The metrics of one pass over the training rows; epochs count from 1.

    `train_loss` is the mean over the epoch's supervised tokens, `val_loss` the mean over the whole
    validation set after the epoch, or None without validation. Both are in nats per supervised
    token.
    """

    epoch: int
    train_loss: float
    train_perplexity: float
    val_loss: float | None
    val_perplexity: float | None
    learning_rate: float
    epoch_time_ms: int
    samples_per_sec: float


@dataclass(frozen=True)
class TrainingMetrics:
    """The metrics of the steps taken so far, in a run of `max_steps` steps."""

    max_steps: int
    history: Sequence[StepRecord] = ()

    def average_loss(self) -> float | None:
        """Return the mean loss over all supervised tokens so far; None before the first step.

        Under a preference objective, the mean is over all rows.
        """
        weight = sum(record.weight for record in self.history)
        if not weight:
            return None
        return sum(record.loss * record.weight for record in self.history) / weight

    def convergence_rate(self) -> float | None:
        """Return (first loss - last loss) / first loss.

        Returns None with fewer than two steps, or a first loss of zero.
        """
        if len(self.history) < 2 or self.history[0].loss == 0:
            return None
        first, last = self.history[0].loss, self.history[-1].loss
        return (first - last) / first

    def is_complete(self) -> bool:
        return len(self.history) >= self.max_steps


@dataclass(frozen=True)
class InstructTrainResult:
    """The result of a whole run. Epochs count from 1.

    `best_val_loss` is the lowest validation loss, reached after `best_step` in `best_epoch`;
    `initial_val_loss` is the loss before the first step. All four are None without validation.
    `validations` includes the validation before the first step.
    """

    epoch_metrics: list[InstructEpochMetrics]
    best_epoch: int | None
    best_step: int | None
    best_val_loss: float | None
    stopped_early: bool
    total_time_ms: int
    initial_val_loss: float | None
    steps: list[StepRecord]
    validations: list[ValidationRecord] = field(default_factory=list)
