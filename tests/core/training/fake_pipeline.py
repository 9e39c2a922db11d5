"""A pipeline that only records its calls, and a function that trains with it."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.config import InstructTrainingConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.files.remembered import MARK
from mlxtune.core.files.writing import write_file, write_json
from mlxtune.core.run.metrics import InstructBatchResult, InstructTrainResult
from mlxtune.core.training.machine_monitor import MachineMonitor
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.pipeline import StepOutcome
from mlxtune.core.training.requests import Requests
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import NonFiniteLossError

Losses = Callable[[int], float]


class FakePipeline:
    """Records each call.

    The loss of a step is `train_loss(step)`. In validation number v, counted from 0, the loss of a
    token is `val_loss(v)` plus a little that depends on the row. `full` returns whether the disk is
    full, given a folder and a step. Of several workers, the others ask for nothing.
    """

    def __init__(
        self,
        *,
        train_loss: Losses = lambda step: 4.0 / step,
        val_loss: Losses = lambda v: 3.0,
        full: Callable[[Path, int], bool] = lambda folder, step: False,
        workers: int = 1,
    ) -> None:
        self.world_size = workers
        self._train_loss = train_loss
        self._val_loss = val_loss
        self._full = full
        self.batches: list[list[int]] = []
        self.learning_rates: list[float] = []
        # The number of steps before each validation, and the validation's rows.
        self.validations: list[tuple[int, list[int]]] = []
        self.saves: list[tuple[str, int]] = []
        self.loads = 0
        # The number of steps before each release of the cache, and before each halving.
        self.releases: list[int] = []
        self.halvings: list[int] = []
        self.tokens = 64

    @property
    def learning_rate(self) -> float:
        return 3e-4

    def start_batch(
        self, examples: Sequence[Example], *, requests: Requests, **options: Any
    ) -> Callable[[], StepOutcome]:
        """Start a step, which runs once, when it is waited for."""
        started = time.perf_counter()

        @cache
        def take() -> StepOutcome:
            try:
                value: Any = self.train_batch(examples, **options)
            except NonFiniteLossError as error:
                value = error
            return StepOutcome(value, started, time.perf_counter(), requests)

        return take

    def wait(self, step: Callable[[], StepOutcome]) -> StepOutcome:
        return step()

    def train_batch(
        self, examples: Sequence[Example], *, step: int, learning_rate: float
    ) -> InstructBatchResult:
        self.batches.append([example.row for example in examples])
        self.learning_rates.append(learning_rate)
        assert step == len(self.batches)
        return result(self._train_loss(step), examples, grad_norm=0.5 * step)

    def relieve_memory(self, halve_for: Sequence[Example] | None = None) -> int | None:
        self.releases.append(len(self.batches))
        if halve_for is None or self.tokens == 1:
            return None
        self.halvings.append(len(self.batches))
        self.tokens //= 2
        return self.tokens

    def logps(
        self, examples: Sequence[Example], on_progress: Callable[[int], None]
    ) -> npt.NDArray[np.float64]:
        step = len(self.batches)
        if not self.validations or self.validations[-1][0] != step:
            self.validations.append((step, []))
        self.validations[-1][1].extend(example.row for example in examples)
        for done in sorted({len(examples) // 2, len(examples)} - {0}):
            on_progress(done)
        base = self._val_loss(len(self.validations) - 1)
        return np.array([-(base + row_loss(each)) * each.supervised for each in examples])

    def measure(
        self, examples: Sequence[Example], logps: npt.NDArray[np.float64]
    ) -> InstructBatchResult:
        return result(-logps.sum() / sum(example.supervised for example in examples), examples)

    def snapshot(self) -> Callable[[Path], None]:
        batches, rates = list(self.batches), list(self.learning_rates)

        def write(folder: Path) -> None:
            self.saves.append((folder.name, len(batches)))
            if self._full(folder, len(batches)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_file(folder / "adapters.safetensors", [str(len(batches)).encode()])
            write_json(
                folder / "optimizer.safetensors", {"batches": batches, "learning_rates": rates}
            )

        return write

    def load(self, folder: Path) -> None:
        self.loads += 1

    def restore(self, folder: Path) -> None:
        state = json.loads((folder / "optimizer.safetensors").read_text())
        self.batches, self.learning_rates = state["batches"], state["learning_rates"]

    def describe(self) -> Mapping[str, Any]:
        return {
            "lora_rank": 8,
            "lora_alpha": 16.0,
            "targets": ["q_proj"],
            "versions": {"mlx": "0.32.4"},
        }


def row_loss(example: Example) -> float:
    return example.row % 7 / 100


def result(
    loss: float, examples: Sequence[Example], grad_norm: float | None = None
) -> InstructBatchResult:
    return InstructBatchResult(
        avg_loss=loss,
        total_response_tokens=sum(example.supervised for example in examples),
        perplexity=perplexity(loss),
        grad_norm=grad_norm,
        total_tokens=sum(map(len, examples)),
    )


def rows(*numbers: int) -> list[Example]:
    """Return examples of 2 to 6 tokens, 1 to 5 of them supervised, determined by their numbers."""
    return [
        Example(
            i,
            np.arange(i, i + 2 + i % 5, dtype=np.int32),
            np.array([0] + [1] * (1 + i % 5), dtype=np.uint8),
        )
        for i in numbers
    ]


CORPUS = rows(*range(1, 11))


def options(folder: Path, **changes: Any) -> InstructTrainingConfig:
    defaults = {
        "checkpoint_dir": str(folder),
        "batch_size": 3,
        "epochs": 2,
        "learning_rate": 1e-3,
    }
    return InstructTrainingConfig(**defaults | changes)


def train(
    folder: Path,
    pipeline: FakePipeline,
    corpus: Sequence[Example] = CORPUS,
    *,
    validation: Sequence[Example] | None = None,
    observer: TrainingObserver | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    monitor: MachineMonitor | None = None,
    **changes: Any,
) -> InstructTrainResult:
    trainer = InstructTrainer(
        pipeline,
        corpus,
        options(folder, **changes),
        validation=validation,
        observer=observer,
        should_stop=should_stop,
        monitor=monitor,
    )
    return trainer.train()


def metadata(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metadata.json").read_text())
    return content


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times = ("seconds", "epoch_time_ms", "samples_per_sec")
    return [{k: v for k, v in record.items() if k not in times} for record in records]


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, except the mark of a run's folder."""
    return {path.name for path in folder.iterdir()} - {MARK}


def average(losses: Sequence[tuple[float, int]]) -> float:
    total = sum((Fraction(loss) * tokens for loss, tokens in losses), Fraction())
    return float(total / sum(tokens for _, tokens in losses))
