"""The layout of the current line, in which the examples of a micro-batch stand end to end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.core.steps.pack import Segment


class CannotPackError(Exception):
    """An architecture's computation does not support segments."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The segments of a line; `positions` int32 (T,) is each token's position in its example."""

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
        """Return the places of the tokens that a segment continues, in order."""
        slices: list[slice] = []
        while segment.parent >= 0:
            segment = self.segments[segment.parent]
            slices.append(slice(segment.start, segment.end))
        return slices[::-1]


_layout: Layout | None = None


def layout() -> Layout | None:
    """Return the layout of the current line; None if each line is one example."""
    return _layout


@contextmanager
def laid_out(layout: Layout | None) -> Iterator[None]:
    """Compute on a line with this layout inside the block."""
    global _layout
    before, _layout = _layout, layout
    try:
        yield
    finally:
        _layout = before


class PackedCache:
    """Takes the place of a layer's KV cache in an mlx-lm model, and keeps nothing.

    Raises CannotPackError if a layer asks for a mask that is more than causal for the current line.
    `window` is the smallest sliding window requested.
    """

    offset = 0

    def __init__(self) -> None:
        self.window: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values to attend to: those of the line."""
        return keys, values

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return a placeholder for the mask: attention knows the segments."""
        if window_size is not None:
            self.window = min(window_size, self.window or window_size)
        longest = length if _layout is None else _layout.longest
        if return_array or longest > (window_size or longest):
            raise CannotPackError
        return "causal"
