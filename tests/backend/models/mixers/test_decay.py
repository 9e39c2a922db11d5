"""Decay within a chunk and its gradients, against the formula in float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxtune.backend.models.mixers.decay import decay
from tests.backend.cpu.compared import assert_close, random

SIZE = 16


def log_gates(channels: int, strength: float) -> mx.array:
    """Return log-gates (2, C, ·), of which some are 0, and others those of gates of 0."""
    made = -strength * mx.abs(random(2, SIZE, channels))
    made[:, 3] = 0
    made[:, 5] = -mx.inf
    made[:, 11] = -mx.inf
    return made


def between(gates: mx.array) -> npt.NDArray[Any]:
    """Return the decay from i to t, (2, t, i, ·), as products of gates; 0 for i > t."""
    each = np.exp(np.array(gates, np.float64))
    found = np.zeros((2, SIZE, *each.shape[1:]))
    for i in range(SIZE):
        found[:, i:, i] = np.cumprod(np.insert(each[:, i + 1 :], 0, 1, axis=1), axis=1)
    return found


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("strength", [0.0, 0.1, 10.0, 1000.0])
def test_decay_equals_products_of_gates(channels: int, strength: float) -> None:
    gates = log_gates(channels, strength)
    found, expected = decay(gates), between(gates)
    assert_close(found.from_start, np.cumprod(np.exp(np.array(gates, np.float64)), axis=1), 1e-6)
    assert_close(found.to_end, expected[:, -1], 1e-6)
    assert_close(found.whole, np.array(found.from_start)[:, -1:], 0)

    x, k, d = random(2, SIZE, 8), random(2, SIZE, 8, seed=1), random(2, SIZE, SIZE, seed=2)
    wanted = np.einsum("btc,bic,btic->bti", x, k, np.broadcast_to(expected, (2, SIZE, SIZE, 8)))
    assert_close(found.products(x, k), wanted, 1e-6)
    d_x, d_k = found.gradients(d, x, k)
    assert_close(d_x, np.einsum("bti,bic,btic->btc", d, k, expected + np.zeros(8)), 1e-6)
    assert_close(d_k, np.einsum("bti,btc,btic->bic", d, x, expected + np.zeros(8)), 1e-6)
