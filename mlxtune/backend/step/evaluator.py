"""The losses of examples under a model, with nothing kept for a backward pass."""

from collections.abc import Callable, Sequence

import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.lora.layers import DropoutKeys
from mlxtune.backend.model import memory
from mlxtune.backend.step.forward import Forward
from mlxtune.backend.step.micro_batches import MicroBatches
from mlxtune.backend.step.operations import best_execution
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution


class Evaluator:
    """Computes the losses of one model by the same fast computations as training.

    `parameters` counts those of the base, by which the execution is chosen unless one is given. An
    adapter that is taken off and put back later has to be on the model here: both are then
    evaluated as the model stands.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: int,
        warn: Callable[[str], None],
        *,
        execution: Execution | None = None,
    ) -> None:
        model.eval()
        execution = execution or best_execution(parameters)
        self.forward = Forward(model, DropoutKeys(), execution, trains=False)
        remedy = "lower --max-seq-len, or use a quantised base"
        self._micro_batches = MicroBatches(self.forward, remedy=remedy, warn=warn)

    def close(self) -> None:
        """Make the model compute as it did before it was evaluated."""
        self.forward.restore_model()

    def losses(self, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return each example's summed cross-entropy over its supervised tokens, float64 (B,).

        Raises MemoryLimitError where even one example at a time takes too much memory.
        """
        losses = np.zeros(len(examples))

        def compute() -> npt.NDArray[np.float64]:
            for group, batch in self._micro_batches.of(examples):
                losses[list(group.examples)] = self.forward.losses(batch)
                memory.relieve_pressure()
            return losses

        return self._micro_batches.run(examples, compute)
