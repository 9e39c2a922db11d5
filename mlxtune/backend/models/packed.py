"""The layout of the current sequence, a micro-batch's examples laid end to end, and masks."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models import base

from mlxtune.backend.models.gather import Gather
from mlxtune.core.steps.pack import Segment
from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding

Ints = npt.NDArray[np.int32]
# The length of each mask's window, by the mask's `id`.
_windows: dict[int, int] = {}


class CannotPackError(Exception):
    """An architecture's attention does not support segments."""


class Layout:
    """The segments of a sequence; `positions` int32 (T,) is each token's position in its example.

    `rounding` rounds the width of `padded_indices`.
    """

    def __init__(self, segments: Sequence[Segment], rounding: Rounding = NOT_ROUNDED) -> None:
        self.segments, self.rounding = segments, rounding
        each = [np.arange(len(one), dtype=np.int32) + one.position for one in segments]
        self.positions: Ints = np.concatenate(each)

    @property
    def longest(self) -> int:
        """The largest position of any token, plus one."""
        return int(self.positions.max()) + 1

    def before(self, segment: Segment) -> list[slice]:
        """Return, in order, the slices of the sequence that precede a segment in its example."""
        slices: list[slice] = []
        while segment.parent >= 0:
            segment = self.segments[segment.parent]
            slices.append(slice(segment.start, segment.end))
        return slices[::-1]

    @cached_property
    def padded_indices(self) -> mx.array:
        """The examples as rows, int32 (B, T).

        Each entry is a token's index in the sequence. Shorter examples are padded with index 0.
        """
        return mx.array(np.maximum(self._padded[0], 0))

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The shape (B, T) of `padded_indices`."""
        rows, width = self._padded[0].shape
        return rows, width

    @cached_property
    def flat_indices(self) -> mx.array:
        """One index of each token of the sequence in the flattened `padded_indices`: int32 (N,)."""
        return mx.array(self._padded[1])

    @cached_property
    def token_positions(self) -> mx.array:
        """`positions` as an mx.array."""
        return mx.array(self.positions)

    @cached_property
    def owners(self) -> mx.array:
        """The token at each index of the flattened `padded_indices`, int32 (B * T,).

        -1 for padding, and for all but one index of a token that several rows share.
        """
        rows, first = self._padded
        owners = np.full(rows.size, -1, dtype=np.int32)
        owners[first] = np.arange(len(first), dtype=np.int32)
        return mx.array(owners)

    @cached_property
    def real(self) -> mx.array:
        """Whether each entry of `padded_indices` is a token and not padding, bool (B, T)."""
        return mx.array(self._padded[0] >= 0)

    @cached_property
    def every_index(self) -> tuple[mx.array, mx.array]:
        """All indices of each token in the flattened `padded_indices`.

        The indices of token n are the entries `starts[n]` to `starts[n + 1]` of the second array;
        `starts` is int32 (N + 1,).
        """
        starts, flat_indices = self._flat_indices_by_token
        return mx.array(starts), mx.array(flat_indices)

    @cached_property
    def to_packed(self) -> Gather:
        """Selects the sequence's tokens, in order, from the flattened `padded_indices`."""
        rows, flat_indices = self._padded
        return Gather(flat_indices, rows.size)

    @cached_property
    def shared(self) -> tuple[mx.array, mx.array] | None:
        """The tokens that several rows share, int32 (S,), and indices in the flattened
        `padded_indices`.

        The second array, int32 (N + S * R,), is `flat_indices`, then R entries for each shared
        token, padded at the end if fewer than R rows share it. None if no token is shared.
        """
        rows, first = self._padded
        starts, order = self._flat_indices_by_token
        counts = np.diff(starts)
        tokens = np.flatnonzero(counts > 1).astype(np.int32)
        if not len(tokens):
            return None
        padding = np.flatnonzero(rows.reshape(-1) < 0)
        indices = np.full((len(tokens), counts.max()), padding[:1].max(initial=0), dtype=np.int32)
        for i in range(counts.max()):
            has = counts[tokens] > i
            indices[has, i] = order[starts[tokens[has]] + i]
        return mx.array(tokens), mx.array(np.concatenate([first, indices.reshape(-1)]))

    @cached_property
    def _flat_indices_by_token(self) -> tuple[Ints, Ints]:
        """`every_index` as numpy arrays."""
        flat = self._padded[0].reshape(-1)
        counts = np.bincount(flat[flat >= 0], minlength=len(self.positions))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
        return starts, order.astype(np.int32)

    @cached_property
    def _padded(self) -> tuple[Ints, Ints]:
        """`padded_indices`, with -1 for padding, and `flat_indices`."""
        continued = {segment.parent for segment in self.segments}
        ends = [segment for i, segment in enumerate(self.segments) if i not in continued]
        unpadded = []
        for segment in ends:
            own = slice(segment.start, segment.end)
            unpadded.append(np.concatenate([np.r_[each] for each in (*self.before(segment), own)]))
        lengths = [len(row) for row in unpadded]
        # If only some rows share a token, `shared` needs a place with padding.
        may_share = len(ends) > 1 and len(continued) > 1
        width = max(lengths) + (min(lengths) == max(lengths) and may_share)
        width = self.rounding.rounded_width(width)
        rows = np.full((len(ends), width), -1, dtype=np.int32)
        indices = np.zeros(len(self.positions), dtype=np.int32)
        for i, row in enumerate(unpadded):
            rows[i, : len(row)] = row
            indices[row] = i * width + np.arange(len(row), dtype=np.int32)
        return rows, indices


_current: ContextVar[Layout | None] = ContextVar("layout", default=None)


def layout() -> Layout | None:
    """Return the layout of the current sequence; None if each sequence is one example."""
    return _current.get()


def check_not_packed() -> None:
    """Raise CannotPackError if the current sequence holds several examples."""
    if layout() is not None:
        raise CannotPackError


@contextmanager
def laid_out(layout: Layout | None) -> Iterator[None]:
    """Set the layout of the current sequence inside the block; None for one example in each
    sequence.
    """
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


class PackedCache:
    """Replaces a layer's cache in an mlx-lm model while a sequence runs, and stores nothing.

    Attention uses it as an empty KV cache, convolutions and recurrences as an empty cache of
    arrays.
    """

    offset = 0
    lengths = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the call, unchanged."""
        return keys, values

    def make_mask(self, length: int, **options: Any) -> Any:
        """Return mlx-lm's causal mask for rows of one example each; None without options.

        The model passes options for attention, and no options if it needs no mask.
        """
        if not options:
            return None
        current = layout()
        width = length if current is None else current.padded_indices.shape[1]
        window = options.get("window_size")
        if window is not None and width > window:
            return window_mask(width, window)
        return base.create_causal_mask(width) if options.get("return_array") else "causal"

    def __getitem__(self, index: int) -> None:
        return None

    def __iter__(self) -> Iterator[None]:
        # Only Kimi Linear unpacks its cache, which has four arrays.
        return iter([None] * 4)

    def __setitem__(self, index: int, state: Any) -> None:
        pass

    def advance(self, tokens: int) -> None:
        """Do nothing: no token follows the sequence."""


def window_mask(length: int, window: int) -> mx.array:
    """Return the mask, bool (T, T), with which each query sees only the last `window` keys."""
    mask = base.create_causal_mask(length, window_size=window)
    _windows[id(mask)] = window
    weakref.finalize(mask, _windows.pop, id(mask), None)
    return mask


def window_of(mask: Any) -> int | None:
    """Return the length of the window that a mask was made for; None for any other mask."""
    return _windows.get(id(mask))


def create_attention_mask(
    h: mx.array, cache: Any = None, window_size: int | None = None, return_array: bool = False
) -> Any:
    """Return the mask that mlx-lm's function of this name returns; `h` is (B, T, ·).

    Without a cache, as in training with padding, `window_of` finds the mask's window.
    """
    length = h.shape[1]
    if cache is None and window_size is not None and length > window_size:
        return window_mask(length, window_size)
    return base.create_attention_mask(h, cache, window_size=window_size, return_array=return_array)
