"""The matrices of a model's layers and the sizes in its config, for costs and memory plans."""

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.nn as nn

from mlxtune.backend.lora.targets import experts_per_token, projections
from mlxtune.backend.models.stored_layers import dimensions

# The numbers of attention heads, and of experts per token, assumed if a model's config lacks them.
_HEADS, _EXPERTS = 64, 8


@dataclass(frozen=True)
class Matrix:
    """A frozen matrix, or a stack of `experts` matrices, of which each token uses `used`."""

    inputs: int
    outputs: int
    experts: int
    used: int

    @property
    def entries(self) -> int:
        """The number of entries in all experts."""
        return self.inputs * self.outputs * self.experts

    @property
    def gathered(self) -> int:
        """The width of the inputs gathered for a token, one copy per expert; 0 without experts."""
        return self.inputs * self.used if self.experts > 1 else 0

    @property
    def width(self) -> int:
        """The width of the outputs for a token, over all experts that it uses."""
        return self.outputs * self.used


class ModelFacts:
    """The matrices of each layer by path, and the sizes in the config; no weights are read."""

    def __init__(self, model: nn.Module) -> None:
        text = getattr(model, "language_model", model)
        options = getattr(getattr(text, "args", None), "__dict__", {})
        used = experts_per_token(options) or _EXPERTS
        self.layers = [
            {path: _matrix(module, used) for path, module in projections(layer).items()}
            for layer in model.layers
        ]
        self.heads = int(options.get("num_attention_heads") or _HEADS)
        self.vocab = int(options.get("vocab_size") or 0)
        self._hidden = int(options.get("hidden_size") or 0)

    @property
    def widest_layer(self) -> int:
        """The summed output width of a layer's matmuls, for the widest layer."""
        return max(sum(m.width for m in layer.values()) for layer in self.layers)

    def costs(self, forward: Iterable[int], supervised: Iterable[int]) -> list[float]:
        """Return the number of multiplications by weights for each example, to balance workers.

        `forward` and `supervised` count each example's tokens in the backbone and in the head.
        """
        backbone = float(sum(m.inputs * m.width for layer in self.layers for m in layer.values()))
        head = float(self.vocab * self._hidden)
        return [backbone * run + head * kept for run, kept in zip(forward, supervised, strict=True)]


def _matrix(module: nn.Module, used: int) -> Matrix:
    inputs, outputs = dimensions(module)
    experts = len(module.weight) if module.weight.ndim == 3 else 1
    return Matrix(inputs, outputs, experts, min(experts, used))
