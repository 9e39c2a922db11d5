"""The products of a layer's forward pass, for its backward pass to take again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxtune.backend.cpu.arrays import unread


@dataclass(frozen=True)
class Reads:
    """What the backward pass of a layer reads beyond the products that are kept.

    `inputs`: what projections behind the attention read, as those do that have an update. `last`:
    the last product, as a norm behind it does. What is not read is not made again, or not kept.
    """

    inputs: bool
    last: bool = False

    @property
    def more(self) -> Reads | None:
        """What is to be read where this turned out not to be enough; None for nothing."""
        if not self.last:
            return replace(self, last=True)
        return None if self.inputs else replace(self, inputs=True)


class KeptProducts:
    """The products of one layer, in their order."""

    def __init__(self, reads: Reads) -> None:
        self.reads = self._at_first = reads
        self._made: list[mx.array | None] = []
        self._shape: tuple[int, ...] = ()
        self._taken: int | None = None

    @property
    def replays(self) -> bool:
        """Tell whether products are taken again."""
        return self._taken is not None

    @property
    def reads_next(self) -> Reads:
        """What to begin with next time.

        Where the last product had to be made again, and with it what it reads, keeping it may do.
        """
        remade = bool(self._made) and self._made[-1] is None and self.reads.last
        return replace(self._at_first, last=True) if remade else self.reads

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Have the products made in here kept."""
        with _use(self):
            yield
        if self._made and not self.reads.last:
            self._made[-1] = None

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Have the products asked for in here be those kept, in their order."""
        self._taken = 0
        with _use(self):
            yield

    def clear(self) -> None:
        """Let go of all products."""
        self._made.clear()

    def product(self, make: Callable[[], mx.array]) -> mx.array:
        """Return the next product: made and kept, or taken again."""
        if self._taken is None:
            made = make()
            self._made.append(made)
            self._shape = made.shape
            return made
        self._taken += 1
        kept = self._made[self._taken - 1]
        if kept is None:
            return make() if self.reads.last else unread(*self._shape)
        return kept


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
    """Tell whether the value of what a projection reads is needed, not only its gradient."""
    return _kept is None or _kept.reads.inputs or not _kept.replays
