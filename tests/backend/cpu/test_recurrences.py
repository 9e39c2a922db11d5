"""What the kernels of recurrences have in common; see the tests of each for its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.cpu import gated_delta, rwkv7, state_space
from tests.backend.cpu.compared import random

TOKENS, LOG_GATE = 150, -0.606531
Case = tuple[Callable[..., Any], list[mx.array], int]


def delta() -> Case:
    gates, beta = mx.full((1, TOKENS, 2), LOG_GATE), mx.full((1, TOKENS, 2), 0.5)
    q, k, v = (random(1, TOKENS, 2, 8, seed=i) for i in range(3))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    return gated_delta.gated_delta_rule, [q, k, v, gates, beta, random(1, 2, 8, 8)], 2


def mamba() -> Case:
    def scan(x: mx.array, dt: mx.array, *others: mx.array) -> tuple[mx.array, mx.array]:
        return state_space.selective_scan(x, dt, -mx.ones((8, 4)), *others)

    x, dt = random(1, TOKENS, 8), mx.full((1, TOKENS, 8), -LOG_GATE)
    b, c = (random(1, TOKENS, 4, seed=i) for i in range(2))
    return scan, [x, dt, b, c, random(1, 8, 4)], 0


def mamba2() -> Case:
    def scan(x: mx.array, dt: mx.array, *others: mx.array) -> tuple[mx.array, mx.array]:
        return state_space.scan(x, dt, -mx.ones(2), *others)

    x, dt = random(1, TOKENS, 2, 8), mx.full((1, TOKENS, 2), -LOG_GATE)
    b, c = (random(1, TOKENS, 1, 4, seed=i) for i in range(2))
    return scan, [x, dt, b, c, random(1, 2, 8, 4)], 0


def rwkv() -> Case:
    r, k, v, removed = (random(1, TOKENS, 2, 8, seed=i) for i in range(4))
    removed = removed / mx.linalg.norm(removed, axis=-1, keepdims=True)
    w = mx.full(r.shape, float(np.exp(LOG_GATE)))
    return rwkv7.wkv7, [r, w, k, v, -removed, removed / 2, random(1, 2, 8, 8)], 3


def subnormal(x: mx.array) -> bool:
    values = np.array(x)
    return bool(np.any((values != 0) & (np.abs(values) < np.finfo(np.float32).tiny)))


@pytest.mark.parametrize("case", [delta, mamba, mamba2, rwkv])
def test_gradients_that_decay_become_zero_before_they_are_subnormal(
    case: Callable[[], Case],
) -> None:
    function, inputs, source = case()
    y = function(*inputs)[0]
    d_y = mx.where(mx.arange(TOKENS).reshape(1, -1, *[1] * (y.ndim - 2)) < TOKENS - 1, 0, y)
    found = mx.vjp(lambda *x: function(*x)[0], inputs, [d_y])[1]
    assert not subnormal(found[-1])
    assert np.array(found[source])[0, TOKENS - 30].all()
