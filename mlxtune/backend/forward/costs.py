"""What an example costs, as the workers that share a step weigh it."""

from collections.abc import Sequence

import mlx.nn as nn

from mlxtune.backend.lora.targets import experts_per_token, projections
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import predicted_tokens, run_length


class ExampleCosts:
    """The costs of examples in a model, whose weights are not read."""

    def __init__(self, model: nn.Module) -> None:
        text = getattr(model, "language_model", model)
        options = getattr(getattr(text, "args", None), "__dict__", {})
        used, trunk = experts_per_token(options), 0.0
        for layer in model.layers:
            for module in projections(layer).values():
                weight, packed = module.weight, 32 // module.bits if "scales" in module else 1
                stacked = used and weight.ndim > 2
                trunk += weight.size * packed * (used / weight.shape[0] if stacked else 1)
        self._trunk = trunk
        self._head = float(options.get("vocab_size") or 0) * (options.get("hidden_size") or 0)

    def of(self, examples: Sequence[Example]) -> list[float]:
        """Return what examples cost, as multiplications of their products with weights."""
        return [
            self._trunk * run_length(example) + self._head * predicted_tokens(example)
            for example in examples
        ]
