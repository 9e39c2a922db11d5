"""The layout of the line under way, where the examples of a micro-batch stand end to end in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.core.steps.pack import Segment


class CannotPackError(Exception):
    """An architecture computes what knows of no segments."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The segments of a line; `positions` int32 (T,) are those of its tokens in their examples."""

    segments: Sequence[Segment]
    positions: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        each = [np.arange(len(one), dtype=np.int32) + one.position for one in self.segments]
        object.__setattr__(self, "positions", np.concatenate(each))

    @property
    def longest(self) -> int:
        """One more than the last position of any token."""
        return int(self.positions.max()) + 1

    def before(self, segment: Segment) -> list[slice]:
        """Return where the tokens stand that a segment continues, in order."""
        found: list[slice] = []
        while segment.parent >= 0:
            segment = self.segments[segment.parent]
            found.append(slice(segment.start, segment.end))
        return found[::-1]


_layout: Layout | None = None


def layout() -> Layout | None:
    """Return that of the line under way; None for lines that are one example each."""
    return _layout


@contextmanager
def laid_out(layout: Layout | None) -> Iterator[None]:
    """Have what is computed in here be of a line with this layout."""
    global _layout
    before, _layout = _layout, layout
    try:
        yield
    finally:
        _layout = before


class PackedCache:
    """What a layer of an mlx-lm model takes for its KV cache: it keeps nothing.

    Raises CannotPackError where a layer asks for a mask that is more than causal for the line
    under way. `window` is the smallest sliding window that was asked for.
    """

    offset = 0

    def __init__(self) -> None:
        self.window: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values that are attended to: those of the line."""
        return keys, values

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return what stands for the mask: attention knows the segments."""
        if window_size is not None:
            self.window = min(window_size, self.window or window_size)
        longest = length if _layout is None else _layout.longest
        if return_array or longest > (window_size or longest):
            raise CannotPackError
        return "causal"
