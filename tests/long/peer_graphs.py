"""The graphs of mlx-lm's steps, for counting."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxtune.benchmark.peers import MlxLm
from mlxtune.core.data.encode import Example
from tests.long.counts import Gradient, Traced


class MlxLmGraphs:
    """The graphs of mlx-lm's compiled steps."""

    def __init__(self, side: MlxLm) -> None:
        self._side = side
        self._step = side.make_step(compiled=True)

    def lazy_step(self, examples: Sequence[Example]) -> Any:
        """Return all arrays that a compiled step evaluates; the model's state is unchanged."""
        with self._side.unchanged():
            return list(self._side.parts(self._step, examples)), list(self._side.state)

    def gradients(self, examples: Sequence[Example]) -> Iterator[Gradient]:
        """Yield the gradient of each batch."""
        for batch in self._side.batches(examples):
            tokens, supervised, _ = self._side.batch(batch)

            def gradient(tokens: mx.array, supervised: mx.array = supervised) -> Traced:
                with self._side.unchanged():
                    _, gradients = self._side.loss_and_gradients(tokens, supervised)
                return [array for _, array in tree_flatten(gradients)], []

            yield gradient, tokens

    def heads(self, examples: Sequence[Example]) -> Iterator[Any]:
        """Yield nothing: the head is part of the model."""
        yield from ()
