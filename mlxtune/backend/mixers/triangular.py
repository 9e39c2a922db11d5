"""Batches of small triangular matrices, as arrays of MLX or of numpy."""

from typing import Any

import mlx.core as mx
import numpy as np

# Up to this size powers are as accurate as substitution: no coefficient is above 3.
_SMALLEST = 4


def library(x: Any) -> Any:
    """Return the library of an array: mlx.core or numpy."""
    return np if isinstance(x, np.ndarray) else mx


def unit_inverse(a: Any) -> Any:
    """Return (I + A)^-1 for strictly lower triangular A (..., C, C); C is a power of two.

    By blocks: the lower left one of [[T, 0], [X, U]] is -U A_21 T. The series of powers of a matrix
    this large would cancel binomial coefficients.
    """
    size, xp = a.shape[-1], library(a)
    if size <= _SMALLEST:
        identity = xp.eye(size, dtype=xp.float32)
        return identity - a if size <= 2 else (identity - a) @ (identity + a @ a)
    half = size // 2
    blocks = xp.stack([a[..., :half, :half], a[..., half:, half:]], axis=-3)
    inverses = unit_inverse(blocks)
    upper, lower = inverses[..., 0, :, :], inverses[..., 1, :, :]
    return joined(upper, -(lower @ a[..., half:, :half] @ upper), lower)


def strictly_lower(a: Any) -> Any:
    """Return square matrices with zeros on the diagonal and above."""
    xp = library(a)
    return a * xp.tri(a.shape[-1], a.shape[-1], -1, xp.float32)


def joined(upper: Any, corner: Any, lower: Any) -> Any:
    """Return [[upper, 0], [corner, lower]], of blocks (..., c, c)."""
    xp = library(upper)
    top = xp.concatenate([upper, xp.zeros_like(upper)], axis=-1)
    return xp.concatenate([top, xp.concatenate([corner, lower], axis=-1)], axis=-2)
