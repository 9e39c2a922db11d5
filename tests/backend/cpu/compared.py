"""Compares a function and its gradients with an equivalent function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

Function = Callable[..., mx.array]


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> mx.array:
    """Return normally distributed numbers in float32."""
    values = scale * np.random.default_rng([seed, *shape]).standard_normal(shape)
    return mx.array(values.astype(np.float32))


def assert_same_function(
    fast: Function, plain: Function, *inputs: mx.array, tolerance: float = 2e-6
) -> None:
    """Compare the value and the gradients for all inputs, relative to the largest entry of each."""
    given = list(inputs)
    outputs, expected = fast(*given), plain(*given)
    assert outputs.dtype == expected.dtype
    assert_close(outputs, expected, tolerance)
    # A random cotangent whose memory layout differs from the output's.
    cotangent = random(*expected.shape[::-1], seed=9).transpose()
    _, found = mx.vjp(lambda *x: fast(*x), given, [cotangent])
    _, wanted = mx.vjp(lambda *x: plain(*x), given, [cotangent])
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 5 * tolerance)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    one, other = np.array(found), np.array(expected)
    assert one.shape == other.shape
    assert np.isfinite(other).all()
    assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), 0.1)
