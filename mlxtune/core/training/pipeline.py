"""What the core asks of a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlxtune.core.data.encode import Example
from mlxtune.core.training.metrics import InstructBatchResult
from mlxtune.core.training.saving import Snapshot


class Pipeline(Protocol):
    """What the trainer asks of a backend: a model, its LoRA matrices and an optimizer."""

    def train_batch(
        self, examples: Sequence[Example], *, step: int, learning_rate: float
    ) -> InstructBatchResult:
        """Take one optimizer step on all examples.

        Raises NonFiniteLossError, and changes nothing, when the loss or gradient is not finite.
        """

    def evaluate(self, examples: Sequence[Example]) -> InstructBatchResult:
        """Return the loss over all supervised tokens of the examples."""

    def snapshot(self) -> Snapshot:
        """Return what writes the adapter, and all else that `restore` needs, into a folder.

        It writes what is now, whenever it is called.
        """

    def load(self, folder: Path) -> None:
        """Read back the adapter of a snapshot."""

    def restore(self, folder: Path) -> None:
        """Go on from a snapshot as if nothing had come between."""

    def describe(self) -> Mapping[str, Any]:
        """Return what a checkpoint says of the adapter: lora_rank, lora_alpha, targets, …"""
