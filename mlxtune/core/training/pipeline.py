"""The interfaces of the trainer: the backend's, and the source of the steps' examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.run.metrics import FileLoss, InstructBatchResult, StepRecord
from mlxtune.core.run.saving import Snapshot
from mlxtune.core.training.requests import NO_REQUESTS, Requests
from mlxtune.errors import NonFiniteLossError


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of an optimizer step: its result, or the reason why it changed nothing.

    `started` and `ended` are the `time.perf_counter` at the step's start and end, and `agreed` has
    the requests that several workers sent with the step.
    """

    value: InstructBatchResult | NonFiniteLossError
    started: float
    ended: float
    agreed: Requests = NO_REQUESTS

    def result(self) -> InstructBatchResult:
        """Return the result. Raises NonFiniteLossError if a number of the step is not finite."""
        if isinstance(self.value, NonFiniteLossError):
            raise self.value
        return self.value


@dataclass(frozen=True)
class Step:
    """A step of a run.

    `number` and `epoch` count from 1; `row_indices` are indices of training rows.
    """

    number: int
    epoch: int
    learning_rate: float
    row_indices: Sequence[int]

    def record(
        self,
        result: InstructBatchResult,
        seconds: float,
        metrics: Mapping[str, float],
        *,
        is_of_rows: bool,
    ) -> StepRecord:
        """Return the record of the step; `metrics` were known before its result."""
        return StepRecord(
            step=self.number,
            epoch=self.epoch,
            loss=result.avg_loss,
            learning_rate=self.learning_rate,
            grad_norm=result.grad_norm or 0.0,
            perplexity=result.perplexity,
            tokens=result.total_tokens,
            supervised_tokens=result.total_response_tokens,
            rows=len(self.row_indices),
            seconds=seconds,
            memory=result.memory,
            micro_batches=result.micro_batches,
            run_tokens=result.run_tokens,
            padding=result.padding,
            metrics={**metrics, **result.metrics},
            is_of_rows=is_of_rows,
        )


class Pipeline(Protocol):
    """A model with its LoRA matrices and an optimizer."""

    @property
    def learning_rate(self) -> float:
        """The rate that the pipeline was configured with."""

    @property
    def world_size(self) -> int:
        """The number of workers that take each step together."""

    def start_batch(
        self,
        examples: Sequence[Example],
        *,
        step: int,
        learning_rate: float,
        requests: Requests,
    ) -> object:
        """Start one optimizer step on all examples, once the previously started step has ended.

        Returns a handle of the step, for `wait`. Several workers exchange their `requests` with the
        step.
        """

    def wait(self, step: Any) -> StepOutcome:
        """Wait for a started step, if it has not ended yet, and return its outcome."""

    def relieve_memory(self, halve_for: Sequence[Example] | None = None) -> int | None:
        """Release memory that is only cached.

        With `halve_for`, the examples of a step, also limit micro-batches to half the size of the
        step's largest. Return the new limit in tokens, or None if each micro-batch is already a
        single example.
        """

    def logps(
        self, examples: Sequence[Example], on_progress: Callable[[int], None]
    ) -> npt.NDArray[np.float64]:
        """Return each example's summed log-probability over its supervised tokens, in nats, (E,).

        `on_progress` is called now and then with the number of examples done; errors that it raises
        propagate.
        """

    def measure(
        self, examples: Sequence[Example], logps: npt.NDArray[np.float64]
    ) -> InstructBatchResult:
        """Return the loss and metrics of rows from all their examples' log-probabilities (E,)."""

    def reference(self) -> Mapping[str, Any]:
        """Return the facts that decide the starting model's log-probabilities, as JSON values."""

    def snapshot(self) -> Snapshot:
        """Capture the adapter and the state that `restore` needs, to write now or later."""

    def load(self, folder: Path) -> None:
        """Load the adapter of a snapshot."""

    def restore(self, folder: Path) -> None:
        """Restore a snapshot, so that training continues as if uninterrupted."""

    def describe(self) -> Mapping[str, Any]:
        """Return the adapter's entries in a checkpoint's metadata: lora_rank, targets, …"""


# Called with the number of finished examples and the total; an error that it raises propagates.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class StepData:
    """The examples of a step, and metrics that were known before its forward pass."""

    examples: Sequence[Example]
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepSource(Protocol):
    """Supplies the examples of each step, and evaluates rows."""

    @property
    def updates(self) -> int:
        """The number of consecutive steps on the same rows."""

    def describe(self) -> Mapping[str, str]:
        """Return hashes of what decides the examples besides rows, for checkpoints' metadata."""

    def checkpoint_facts(self, step: int) -> Mapping[str, Any]:
        """Return facts on what the source has recorded up to a step, for its checkpoint."""

    def examples_of(self, rows: CorpusRows, step: Step, on_progress: OnProgress) -> StepData:
        """Return the examples of a step's rows, the same ones whenever it is asked.

        `on_progress` is called if this takes long, before any work and now and then.
        """

    def evaluate(
        self, rows: CorpusRows, on_progress: OnProgress
    ) -> tuple[InstructBatchResult, list[FileLoss]]:
        """Return the loss and metrics of rows, and the loss of each file if there are several."""


class RowSource:
    """Supplies the examples of a step's rows, whose losses the pipeline computes."""

    updates = 1

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def describe(self) -> Mapping[str, str]:
        return {}

    def checkpoint_facts(self, step: int) -> Mapping[str, Any]:
        return {}

    def examples_of(self, rows: CorpusRows, step: Step, on_progress: OnProgress) -> StepData:
        return StepData(rows.examples_of(step.row_indices))

    def evaluate(
        self, rows: CorpusRows, on_progress: OnProgress
    ) -> tuple[InstructBatchResult, list[FileLoss]]:
        numbered = [(i, example) for i, row in enumerate(rows) for example in row]
        row_of_example, examples = [i for i, _ in numbered], [example for _, example in numbered]
        logps = self._pipeline.logps(examples, lambda done: on_progress(done, len(examples)))
        losses = []
        for name, indices in rows.by_file():
            of_file = np.flatnonzero(np.isin(row_of_example, indices)).tolist()
            part = self._pipeline.measure([examples[i] for i in of_file], logps[of_file])
            losses.append(FileLoss(name, part.avg_loss, part.metrics))
        return self._pipeline.measure(examples, logps), losses
