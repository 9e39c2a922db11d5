"""Masks of causal attention in a window, with a record of each mask's window."""

import weakref
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

# The length of each mask's window, by the mask's `id`.
_windows: dict[int, int] = {}


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
