"""Batches of small triangular matrices."""

import mlx.core as mx

# Up to this size powers are as accurate as substitution: no coefficient is above 3.
_SMALLEST = 4


def unit_inverse(a: mx.array) -> mx.array:
    """Return (I + A)^-1 for strictly lower triangular A (..., C, C); C is a power of two.

    By blocks: the lower left one of [[T, 0], [X, U]] is -U A_21 T. The series of powers of a matrix
    this large would cancel binomial coefficients.
    """
    size = a.shape[-1]
    if size <= _SMALLEST:
        identity = mx.eye(size, dtype=mx.float32)
        return identity - a if size <= 2 else (identity - a) @ (identity + a @ a)
    half = size // 2
    blocks = mx.stack([a[..., :half, :half], a[..., half:, half:]], axis=-3)
    inverses = unit_inverse(blocks)
    upper, lower = inverses[..., 0, :, :], inverses[..., 1, :, :]
    return joined(upper, -(lower @ a[..., half:, :half] @ upper), lower)


def strictly_lower(a: mx.array) -> mx.array:
    """Return square matrices with zeros on the diagonal and above."""
    return a * mx.tri(a.shape[-1], a.shape[-1], -1, mx.float32)


def joined(upper: mx.array, corner: mx.array, lower: mx.array) -> mx.array:
    """Return [[upper, 0], [corner, lower]], of blocks (..., c, c)."""
    top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, lower], axis=-1)], axis=-2)
