"""Tests whether a model gives packed examples the same results as separate examples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.models.packed import Layout
from mlxtune.core.steps.pack import Segment

# The largest accepted difference, at any layer, between a token's hidden states when packed and
# when run separately, as a root mean square relative to that of the separate states. In both runs,
# random last bits in attention's outputs alone cause up to 0.02 in bfloat16 and 0.0025 in float16.
_TOLERANCES = {mx.bfloat16: 3e-2, mx.float16: 4e-3, mx.float32: 1e-4}
# The tolerance for embeddings, which are exact, as a fraction of the tolerances above. It is low
# enough to detect positional embeddings that add 2% or more.
_EMBEDDING_FRACTION = 0.25


class Texts:
    """Three texts of equal length, two of which share a prefix, and the same texts in one sequence.

    `indices` maps each token of the sequence to its index in the concatenated texts.
    """

    def __init__(self, length: int, prefix: int) -> None:
        self.length, self.prefix = length, prefix
        self.tokens = [
            [(i * i + 3 * i + max(number - (i < prefix), 0)) % 10 for i in range(length)]
            for number in range(3)
        ]
        self.indices = [*range(length), *range(length + prefix, 3 * length)]

    def layout(self) -> Layout:
        """Return the sequence's layout, in which the first two texts share their prefix."""
        length, prefix = self.length, self.prefix
        end = 2 * length - prefix
        return Layout(
            [
                Segment(0, prefix, 0, -1),
                Segment(prefix, length, prefix, 0),
                Segment(length, end, prefix, 0),
                Segment(end, end + length, 0, -1),
            ]
        )

    @property
    def packed(self) -> list[int]:
        """The tokens of the sequence."""
        return [self.tokens[index // self.length][index % self.length] for index in self.indices]


# Metal runs special kernels (`sdpa_vector`) if the number of queries times the number of query
# heads per key head is at most 32. The long texts are long enough, both packed and run separately,
# for the kernels used in training.
_SHORT_TEXTS, _LONG_TEXTS = Texts(4, 2), Texts(36, 16)


def trial_texts() -> Texts:
    """Return the texts to try a model on: long if kernels depend on the length."""
    return _SHORT_TEXTS if on_cpu() else _LONG_TEXTS


class LayerInputs:
    """The hidden states that enter each layer of a model, in the order of the calls.

    `alone` has the states (B, T, ...) of the texts run separately. While the packed sequence runs,
    each layer gets these states again, and `differences` collects how far its actual inputs
    deviate.
    """

    def __init__(self, model: nn.Module, texts: Texts) -> None:
        self._model, self.texts = model, texts
        self.alone: list[mx.array] = []
        self.differences: list[mx.array] = []
        self._dtypes: set[mx.Dtype] = set()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Record the inputs of the layers that run inside the block."""
        self.alone = []

        def keep(layer: nn.Module, *args: Any, **options: Any) -> Any:
            self.alone += args[:1]
            return layer(*args, **options)

        with self._instead(keep):
            yield

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Inside the block, compare layers' inputs with the kept inputs, and pass on the latter."""
        self.differences, self._dtypes, expected = [], set(), iter(self.alone)

        def compare(layer: nn.Module, *args: Any, **options: Any) -> Any:
            alone = next(expected) if args else None
            if not isinstance(alone, mx.array):
                return layer(*args, **options)
            return layer(self.compare(alone, args[0]), *args[1:], **options)

        with self._instead(compare):
            yield

    def compare(self, alone: mx.array, packed: mx.array) -> mx.array:
        """Record how far `packed` (1, N, ...) deviates from `alone`; return `alone` as a
        sequence.
        """
        expected = alone.flatten(0, 1)[mx.array(self.texts.indices)][None]
        self.differences.append(_difference(expected, packed))
        self._dtypes.add(packed.dtype)
        return expected

    def problem(self) -> str:
        """Return where the states differ by more than rounding; empty if nowhere."""
        tolerance = max(map(_tolerance, self._dtypes))
        tolerances = np.full(len(self.differences), tolerance)
        tolerances[: len(self.alone) and 1] *= _EMBEDDING_FRACTION
        differences = np.array(mx.stack(self.differences))
        beyond = np.flatnonzero(~(differences <= tolerances))
        if not len(beyond):
            return ""
        first = int(beyond[0])
        where = f"before layer {first}" if first < len(self.alone) else "after the last layer"
        return (
            f"when packed, hidden states differ by {differences[first]:.2g} {where}, "
            f"but rounding explains only {tolerances[first]:.2g}"
        )

    @contextmanager
    def _instead(self, call: Callable[..., Any]) -> Iterator[None]:
        layers = list(self._model.layers)
        undo = intercept(self._model, layers, [call] * len(layers))
        try:
            yield
        finally:
            undo()


def _tolerance(dtype: mx.Dtype) -> float:
    # A GPU rounds the factors of float32 matmuls to TF32, which has float16's precision.
    if dtype == mx.float32 and not on_cpu():
        dtype = mx.float16
    return _TOLERANCES[dtype]


def _difference(one: mx.array, other: mx.array) -> mx.array:
    """Return the largest RMS difference between a token's states (1, N, ...), relative to `one`."""
    one, other = (each.astype(mx.float32).flatten(2).flatten(0, 1) for each in (one, other))
    squares = (one - other).square().mean(axis=1) / mx.maximum(one.square().mean(axis=1), 1e-12)
    return mx.sqrt(squares.max())
