"""Runs layers as functions of arrays, with backward passes that take less memory than MLX's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.lora.parameters import TrainedParameters
from mlxtune.backend.models import packed
from mlxtune.backend.models.autograd import differentiable


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


class Layerwise:
    """Makes `passes` run the layers of one model inside `running()`."""

    def __init__(self, model: nn.Module, dropout: DropoutKeys, passes: LayerPasses) -> None:
        self.passes = passes
        self._dropout = dropout
        self._running = False
        layers = list(model.layers)
        self._trained = {id(layer): TrainedParameters(layer) for layer in layers}
        # Layers below the first trained layer have no backward pass, so they keep no arrays.
        first = first_trained(layers)
        calls = [self._run_frozen if i < first else self._run for i in range(len(layers))]
        # Calling this undoes the replacement of the layers.
        self.restore = intercept(model, layers, calls)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make layers that run inside the block prepare for their backward passes."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _run_frozen(self, layer: nn.Module, *args: Any, **options: Any) -> Any:
        output = layer(*args, **options)
        return self.passes.run_frozen(output) if self._running else output

    def _run(self, layer: nn.Module, *args: Any, **options: Any) -> Any:
        if not self._running:
            return layer(*args, **options)
        call = LayerCall(layer, self._trained[id(layer)], self._dropout, args, options)
        return call.result(self.passes.run(layer, call.run, call.inputs))


class LayerCall:
    """A call of a layer as a pure function of arrays, for gradients.

    `run` takes `inputs`: the `arrays` in the layer's arguments, then its `trained` parameters,
    whose paths are `names`. `result` turns the arrays that `run` returns into the layer's return
    value.
    """

    def __init__(
        self,
        layer: nn.Module,
        parameters: TrainedParameters,
        dropout: DropoutKeys,
        args: Any,
        options: Any,
    ) -> None:
        self.arrays = _floating((args, options))
        self.names = parameters.names
        self.inputs: list[mx.array] = [*self.arrays, *parameters.values().values()]
        self._layer, self._args, self._options = layer, args, options
        self._parameters = parameters
        self._dropout, self._keys, self._layout = dropout, replace(dropout), packed.layout()
        self._output: Any = None

    def run(self, *inputs: mx.array) -> list[mx.array]:
        """Run the layer on arrays like `inputs`; return the arrays in its output."""
        # Another forward pass may have set other dropout keys since construction.
        self._dropout.set(self._keys.keys, self._keys.positions)
        trained = dict(zip(self.names, inputs[len(self.arrays) :], strict=True))
        args, options = _filled((self._args, self._options), inputs)
        with packed.laid_out(self._layout), self._parameters.replaced(trained):
            output = self._layer(*args, **options)
            # The structure of the output is kept, with placeholders for the returned arrays.
            self._output = tree_map(lambda leaf: _ARRAY if _is_floating(leaf) else leaf, output)
            return _floating(output)

    def result(self, outputs: list[mx.array]) -> Any:
        """Return the layer's output with these arrays."""
        return _filled(self._output, outputs)


def first_trained(layers: Sequence[nn.Module]) -> int:
    """Return the index of the first layer that has trained parameters."""
    return [bool(tree_flatten(layer.trainable_parameters())) for layer in layers].index(True)


# A placeholder for an array in the inputs or the output of a layer.
_ARRAY = mx.array(0.0)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _floating(tree: Any) -> list[mx.array]:
    """Return the floating-point arrays in a tree, in order: gradients may flow through them."""
    arrays: list[mx.array] = []
    tree_map(lambda leaf: arrays.append(leaf) if _is_floating(leaf) else None, tree)
    return arrays


def _filled(tree: Any, arrays: Sequence[mx.array]) -> Any:
    """Return a tree with its floating-point arrays replaced by `arrays`, in order."""
    left = iter(arrays)
    return tree_map(lambda leaf: next(left) if _is_floating(leaf) else leaf, tree)
