"""The CPU's elementwise functions and rotary embeddings, against mlx's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxtune.backend.cpu import elementwise
from tests.backend.cpu.compared import assert_close, assert_same_function, random

# The last shape needs several blocks of rows.
SHAPES = [(3, 5, 16), (7,), (1, 1, 1), (2, 300, 128)]
UNARY: dict[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]] = {
    "tanh": (elementwise.tanh, mx.tanh),
}
PLAIN: dict[str, Any] = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 0}
FREQS = mx.array([1.0, 3.0, 20.0, 500.0])


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * x


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_function_and_gradient(name: str, shape: tuple[int, ...]) -> None:
    assert_same_function(*UNARY[name], random(*shape, scale=3))


def geglu(gate: mx.array, x: mx.array) -> mx.array:
    return nn.gelu_approx(gate) * x


GATED: dict[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]] = {
    "swiglu": (elementwise.swiglu, swiglu),
    "geglu": (elementwise.geglu, geglu),
}


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_function_and_gradients(name: str, shape: tuple[int, ...]) -> None:
    gate, x = random(*shape, scale=3, seed=1), random(*shape, scale=3, seed=2)
    assert_same_function(*GATED[name], gate, x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_and_gradient(shape: tuple[int, ...]) -> None:
    weight = random(shape[-1], seed=3) + 1
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


def test_norm_of_zeros_and_of_large_numbers() -> None:
    x = mx.stack([mx.zeros(8), mx.full(8, 1e15), random(8) * 1e-4])
    assert_same_function(
        lambda x: elementwise.rms_norm(x, mx.ones(8), 1e-6),
        lambda x: mx.fast.rms_norm(x, None, 1e-6),
        x,
        tolerance=1e-5,
    )


# Rotary embeddings


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"base": 1e6},
        {"scale": 0.25},
        {"offset": 7},
        {"offset": 31, "scale": 0.5, "base": 500.0},
        {"base": None, "freqs": FREQS},
        {"base": None, "freqs": 2 * FREQS, "offset": 5},
        {"base": None, "freqs": FREQS.astype(mx.float32), "scale": 0.5},
        {"traditional": True},
        {"offset": mx.array(3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [8, 12])
def test_rope_and_gradient(options: dict[str, Any], width: int) -> None:
    chosen = {**PLAIN, **options}
    assert_same_function(
        lambda x: elementwise.rope(x, 8, **chosen),
        lambda x: mx.fast.rope(x, 8, **chosen),
        random(2, 3, 5, width),
    )


def test_other_options_give_other_turns() -> None:
    """Cached tables depend on all options."""
    x = random(1, 2, 6, 8)
    made = [
        elementwise.rope(x, 8, **{**PLAIN, **options})
        for options in ({}, {"base": 99.0}, {"scale": 0.5}, {"offset": 1}, {"freqs": FREQS})
        if "freqs" not in options
    ]
    made += [
        elementwise.rope(x, 8, **{**PLAIN, "base": None, "freqs": freqs})
        for freqs in (FREQS, 3 * FREQS)
    ]
    for i, one in enumerate(made):
        for other in made[i + 1 :]:
            assert mx.abs(one - other).max() > 1e-3


def test_heads_that_are_not_laid_out_in_order() -> None:
    assert_same_function(
        lambda x: elementwise.rope(x.transpose(0, 2, 1, 3), 8, **PLAIN),
        lambda x: mx.fast.rope(x.transpose(0, 2, 1, 3), 8, **PLAIN),
        random(2, 5, 3, 8),
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_other_dtypes_are_left_to_mlx(dtype: mx.Dtype) -> None:
    x = random(1, 2, 3, 8).astype(dtype)
    found = elementwise.rope(x, 8, **PLAIN)
    assert found.dtype == dtype
    assert mx.array_equal(found, mx.fast.rope(x, 8, **PLAIN))
