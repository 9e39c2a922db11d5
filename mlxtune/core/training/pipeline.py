"""What the trainer needs from a backend."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlxtune.core.data.encode import Example
from mlxtune.core.training.metrics import InstructBatchResult
from mlxtune.core.training.saving import Snapshot


class Pipeline(Protocol):
    """A model with its LoRA matrices and an optimizer."""

    @property
    def learning_rate(self) -> float:
        """The rate that the pipeline was configured with."""

    def train_batch(
        self, examples: Sequence[Example], *, step: int, learning_rate: float
    ) -> InstructBatchResult:
        """Take one optimizer step on all examples.

        Raises NonFiniteLossError, and changes nothing, when the loss or gradient is not finite.
        """

    def evaluate(self, examples: Sequence[Example]) -> InstructBatchResult:
        """Return the loss over all supervised tokens of the examples."""

    def snapshot(self) -> Snapshot:
        """Capture the adapter and whatever else `restore` needs, to write now or later."""

    def load(self, folder: Path) -> None:
        """Load the adapter of a snapshot."""

    def restore(self, folder: Path) -> None:
        """Restore a snapshot, so that training continues as if uninterrupted."""

    def describe(self) -> Mapping[str, Any]:
        """Return the adapter's entries in a checkpoint's metadata: lora_rank, targets, …"""
