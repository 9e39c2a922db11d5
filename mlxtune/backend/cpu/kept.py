"""The products of a layer's forward pass, for its backward pass to take again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx


class KeptProducts:
    """The products of one layer, in their order.

    What frozen projections read is then not needed again; `reads_needed` says that it is, by an
    update behind the attention or in the MLP.
    """

    def __init__(self, *, reads_needed: bool) -> None:
        self.reads_needed = reads_needed
        self._made: list[mx.array] = []
        self._taken: int | None = None

    @property
    def replays(self) -> bool:
        """Tell whether products are taken again."""
        return self._taken is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Have the products made in here kept."""
        with _use(self):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Have the products asked for in here be those kept, in their order."""
        self._taken = 0
        with _use(self):
            yield
        self._made.clear()

    def product(self, make: Callable[[], mx.array]) -> mx.array:
        """Return the next product: made and kept, or taken again."""
        if self._taken is None:
            self._made.append(make())
            return self._made[-1]
        self._taken += 1
        return self._made[self._taken - 1]


_kept: KeptProducts | None = None


@contextmanager
def _use(kept: KeptProducts) -> Iterator[None]:
    global _kept
    before, _kept = _kept, kept
    try:
        yield
    finally:
        _kept = before


def in_use() -> KeptProducts | None:
    """Return those of the layer that is being run, if it keeps any."""
    return _kept


def values_needed() -> bool:
    """Tell whether the value of what a projection reads is likely needed, not only its gradient."""
    return _kept is None or _kept.reads_needed or not _kept.replays
