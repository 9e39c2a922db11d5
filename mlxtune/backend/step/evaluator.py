"""The losses of examples under a model, with nothing kept for a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.cpu.arrays import quiet
from mlxtune.backend.lora.layers import DropoutKeys
from mlxtune.backend.model import memory
from mlxtune.backend.step.forward import Execution, Forward
from mlxtune.backend.step.micro_batches import MicroBatches, step_cost
from mlxtune.core.data.encode import Example

# Without a backward pass, activations are those of one layer: little beside the weights.
_TOKENS_AT_ONCE = 2048


class Evaluator:
    """Computes the losses of one model on the fast paths that training takes.

    `parameters` are those of the base, by which the paths are chosen. An adapter that is taken off
    and put back in between has to be on the model here: then both are evaluated as it stands.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: int,
        warn: Callable[[str], None],
        *,
        how: Execution | None = None,
        tokens_at_once: int = _TOKENS_AT_ONCE,
    ) -> None:
        model.eval()
        how = how or Execution.best(parameters)
        self.forward = Forward(model, DropoutKeys(), how, trains=False)
        self._micro_batches = MicroBatches(
            self.forward,
            max_tokens=tokens_at_once,
            cost=step_cost(),
            remedy="lower --max-seq-len, or use a quantised base",
            warn=warn,
        )

    def close(self) -> None:
        """Make the model compute as it did before it was evaluated."""
        self.forward.restore_model()

    def losses(self, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return each example's summed cross-entropy over its supervised tokens, float64 (B,).

        Raises MemoryLimitError where one example at a time takes more memory than there is.
        """
        return self._micro_batches.within_memory(examples, lambda: self._losses(examples))

    def _losses(self, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        found = np.zeros(len(examples))
        for group, batch in self._micro_batches.of(examples):
            with quiet():
                found[list(group.examples)] = self.forward.losses(batch)
            memory.relieve_pressure()
        return found
