"""The products of a layer's forward pass, which its backward pass replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxtune.backend.cpu.arrays import unread


@dataclass(frozen=True)
class Reads:
    """What the backward pass of a layer reads beyond the products that are kept.

    `inputs`: the inputs of projections behind the attention, which those with LoRA read. `last`:
    the last product, which a norm behind it reads. What is not read is neither recomputed nor kept.
    """

    inputs: bool
    last: bool = False

    @property
    def more(self) -> Reads | None:
        """What to read when this was not enough; None if this is everything."""
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
        """Return whether products are replayed."""
        return self._taken is not None

    @property
    def reads_next(self) -> Reads:
        """What to start from next time.

        Where the last product had to be made again, and with it what it reads, keeping it may do.
        """
        remade = bool(self._made) and self._made[-1] is None and self.reads.last
        return replace(self._at_first, last=True) if remade else self.reads

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the products made in here."""
        with _use(self):
            yield
        if self._made and not self.reads.last:
            self._made[-1] = None

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay the kept products in here, in their order."""
        self._taken = 0
        with _use(self):
            yield

    def clear(self) -> None:
        """Free all products."""
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
    """Return the products of the layer that is running, if it keeps any."""
    return _kept


def values_needed() -> bool:
    """Return whether the value of a projection's input is needed, not only its gradient."""
    return _kept is None or _kept.reads.inputs or not _kept.replays
