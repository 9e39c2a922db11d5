"""Backward passes of layers: kept arrays, or inputs from which the layer runs again."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.models.autograd import differentiable


def run_again(
    function: Callable[..., list[mx.array]],
    primals: list[mx.array],
    cotangents: list[mx.array],
    vjp: Callable[..., Any] = mx.vjp,
) -> list[mx.array]:
    """Run a function again, and return its gradients."""
    # Without this, MLX may run the function before the cotangents arrive, and keep all its values.
    primals = mx.depends(primals, cotangents)
    gradients = list(vjp(function, primals, cotangents)[1])
    # Without this, MLX may compute LoRA's gradients late, and keep each layer's inputs until then.
    return list(mx.depends(gradients, gradients))


class LayerPasses(Protocol):
    """Runs the layers of a model so that their backward passes take less memory."""

    def run(
        self, layer: nn.Module, function: Callable[..., list[mx.array]], inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        """Return the outputs of a layer, which `function` computes from the arrays `inputs`."""

    def run_frozen(self, output: Any) -> Any:
        """Return the output of a layer below the first trained layer."""


class Recompute:
    """Keeps the inputs of each layer, and runs the layer again in the backward pass."""

    def run(
        self, layer: nn.Module, function: Callable[..., list[mx.array]], inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        """Return the outputs of a layer, with a backward pass that runs the layer again."""

        def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            # MLX passes a single array without a list, as for a layer with no trained parameters.
            primals = [primals] if isinstance(primals, mx.array) else list(primals)
            return run_again(function, primals, list(cotangents))

        return list(differentiable(function, backward)(*inputs))

    def run_frozen(self, output: Any) -> Any:
        """Return the output, unchanged, of a layer below the first trained layer."""
        return output
