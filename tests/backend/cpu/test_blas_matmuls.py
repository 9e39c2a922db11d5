"""Products with frozen weights and the head's cross-entropy, against their formulas."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.cpu import blas_matmuls
from tests.backend.cpu.compared import assert_close, assert_same_function, random

STORED = [mx.float32, mx.bfloat16, mx.float16]


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_product_and_its_gradient(dtype: mx.Dtype) -> None:
    weight, x = random(7, 5).astype(dtype), random(2, 3, 5)
    wide = weight.astype(mx.float32)
    assert_close(blas_matmuls.forward(x, weight), x @ wide.T, 2e-6)
    cotangent = random(2, 3, 7, seed=1)
    assert_close(blas_matmuls.backward(cotangent, weight), cotangent @ wide, 2e-6)


@pytest.mark.parametrize("count, size", [(5, 11), (1, 1), (40, 3000)])
def test_losses_and_gradient(count: int, size: int) -> None:
    labels = mx.array(np.random.default_rng(0).integers(0, size, count))
    assert_same_function(
        lambda logits: blas_matmuls.losses(logits, labels),
        lambda logits: nn.losses.cross_entropy(logits, labels),
        random(count, size, scale=5),
        tolerance=5e-6,
    )


def test_losses_of_extreme_logits() -> None:
    logits = mx.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [30.0, -np.inf, 29.0]])
    labels = mx.array([1, 0, 2])
    assert_same_function(
        lambda logits: blas_matmuls.losses(logits, labels),
        lambda logits: nn.losses.cross_entropy(logits, labels),
        logits,
    )


def test_update_and_its_gradients() -> None:
    weight, scale = random(9, 6), 1.7

    def plain(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return x @ weight.T + scale * (x @ a) @ b

    x, a, b = random(2, 5, 6), random(6, 3), random(3, 9)
    y = blas_matmuls.forward(x, weight)
    blas_matmuls.add_update(y, x, a, b, scale)
    assert_close(y, plain(x, a, b), 2e-6)
    cotangent = random(2, 5, 9, seed=1)
    found = blas_matmuls.update_gradients(x, a, b, cotangent, weight, scale)
    _, expected = mx.vjp(plain, [x, a, b], [cotangent])
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 2e-6)
