"""A prefix that several examples share, as keys and values that each layer attends to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


class PrefixCache:
    """What a layer of an mlx-lm model takes for its KV cache.

    Without a prefix it records the layer's keys and values (1, G, P, D); with one it prepends them
    to those of each line of the micro-batch. Gradients flow through both.
    """

    def __init__(self, given: Sequence[mx.array] = ()) -> None:
        self.given = list(given)
        self.recorded: list[mx.array] = []

    @property
    def offset(self) -> int:
        """Positions before the first token."""
        return self.given[0].shape[2] if self.given else 0

    @contextmanager
    def substituted(self, given: Sequence[mx.array]) -> Iterator[None]:
        """Use other arrays in the place of the prefix."""
        before, self.given = self.given, list(given)
        try:
            yield
        finally:
            self.given = before

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values that are attended to."""
        if not self.given:
            self.recorded = [keys, values]
            return keys, values
        before = [mx.broadcast_to(x, (keys.shape[0], *x.shape[1:])) for x in self.given]
        return mx.concatenate([before[0], keys], axis=2), mx.concatenate(
            [before[1], values], axis=2
        )

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return the causal mask of `length` tokens behind the prefix, as mlx-lm makes it."""
        offset = self.offset
        if return_array or (window_size and offset + length > window_size):
            return create_causal_mask(length, offset, window_size=window_size)
        return "causal" if length > 1 or not offset else None
