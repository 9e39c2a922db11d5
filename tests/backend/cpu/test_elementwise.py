"""Functions in numpy, against those of mlx that they stand in for."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.cpu import elementwise
from tests.backend.cpu.compared import assert_close, assert_same_function, random

# The last takes several blocks of rows.
SHAPES = [(3, 5, 16), (7,), (1, 1, 1), (2, 300, 128)]
UNARY: dict[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]] = {
    "silu": (elementwise.silu, nn.silu),
    "gelu_approx": (elementwise.gelu_approx, nn.gelu_approx),
    "tanh": (elementwise.tanh, mx.tanh),
    "softmax": (elementwise.softmax, lambda x: mx.softmax(x, axis=-1)),
}


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * x


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_function_and_gradient(name: str, shape: tuple[int, ...]) -> None:
    assert_same_function(*UNARY[name], random(*shape, scale=3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_and_gradients(shape: tuple[int, ...]) -> None:
    gate, x = random(*shape, scale=3, seed=1), random(*shape, seed=2)
    assert_same_function(elementwise.swiglu, swiglu, gate, x)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_and_gradient(shape: tuple[int, ...], weighted: bool) -> None:
    weight = random(shape[-1], seed=3) + 1 if weighted else None
    assert_same_function(
        lambda x: elementwise.rms_norm(x, weight, 1e-3),
        lambda x: mx.fast.rms_norm(x, weight, 1e-3),
        random(*shape, scale=2),
        tolerance=5e-6,
    )


def test_weight_of_a_norm_may_be_stored_in_16_bits() -> None:
    weight, x = (random(16) + 1).astype(mx.bfloat16), random(3, 16)
    found = elementwise.rms_norm(x, weight, 1e-6)
    assert_close(found, mx.fast.rms_norm(x, weight.astype(mx.float32), 1e-6), 2e-6)


def test_arrays_that_are_not_laid_out_in_order() -> None:
    x = random(16, 5, 3).transpose(1, 2, 0)
    for fast, plain in UNARY.values():
        assert_same_function(fast, plain, x)
    assert_same_function(elementwise.swiglu, swiglu, x, random(3, 5, 16).transpose(1, 0, 2))


@pytest.mark.parametrize("name", UNARY)
def test_extreme_values_of_unary_functions(name: str) -> None:
    x = mx.array([[-1e4, -200.0, -88.8, -1e-30, 0.0, 1e-30, 88.8, 200.0, 1e4]])
    assert_same_function(*UNARY[name], x)


def test_extreme_gates() -> None:
    gate = mx.array([[-1e4, -200.0, -88.8, 0.0, 88.8, 200.0, 1e4]])
    assert_same_function(elementwise.swiglu, swiglu, gate, random(1, 7))


def test_softmax_of_a_row_with_masked_entries() -> None:
    x = mx.array([[-np.inf, 1.0, 2.0], [-np.inf, -np.inf, 1e4]])
    assert_same_function(*UNARY["softmax"], x)


def test_norm_of_zeros_and_of_large_numbers() -> None:
    x = mx.stack([mx.zeros(8), mx.full(8, 1e15), random(8) * 1e-4])
    assert_same_function(
        lambda x: elementwise.rms_norm(x, None, 1e-6),
        lambda x: mx.fast.rms_norm(x, None, 1e-6),
        x,
        tolerance=1e-5,
    )
