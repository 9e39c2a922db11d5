"""Attention by blocks of queries, and functions by kernels, against mlx's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune.backend.cpu import fast_model, kernel_functions
from tests.backend.cpu.compared import Function, assert_close, assert_same_function, random

SCALE = 0.3


def heads(
    queries: int, keys: int, *, batch: int = 2, groups: int = 2, repeats: int = 2, width: int = 8
) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values; the values are wider than the keys."""
    return (
        random(batch, groups * repeats, queries, width, seed=1),
        random(batch, groups, keys, width, seed=2),
        random(batch, groups, keys, width + 4, seed=3),
    )


def assert_same_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: Any,
    tolerance: float = 5e-6,
) -> None:
    assert_same_function(
        lambda q, k, v: kernel_functions.attention(q, k, v, SCALE, mask),
        lambda q, k, v: reference(q, k, v, mask),
        q,
        k,
        v,
        tolerance=tolerance,
    )


def reference(q: mx.array, k: mx.array, v: mx.array, mask: Any) -> mx.array:
    """Return mlx's attention, computed in two halves because mlx needs values as wide as keys."""
    width = q.shape[-1]
    parts = [v[..., :width], mx.pad(v[..., width:], [(0, 0)] * 3 + [(0, 2 * width - v.shape[-1])])]
    options = {"scale": SCALE, "mask": mask}
    whole = [mx.fast.scaled_dot_product_attention(q, k, p, **options) for p in parts]
    return mx.concatenate(whole, axis=-1)[..., : v.shape[-1]]


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("queries, keys", [(1, 1), (7, 7), (1, 9), (5, 12)])
@pytest.mark.parametrize("groups, repeats", [(2, 2), (1, 4), (3, 1)])
def test_masks_by_name(
    mask: str | None, queries: int, keys: int, groups: int, repeats: int
) -> None:
    assert_same_attention(*heads(queries, keys, groups=groups, repeats=repeats), mask)


@pytest.mark.parametrize("mask", ["causal", None])
def test_several_blocks_of_queries(mask: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads(300, 330, batch=1)
    assert_same_attention(q, k, v, mask)
    monkeypatch.setattr(kernel_functions, "ATTENTION_SCORES", 1000)  # one group of heads per block
    monkeypatch.setattr(kernel_functions, "ATTENTION_QUERIES", 100)
    assert_same_attention(q, k, v, mask)


def window(queries: int, keys: int, size: int) -> mx.array:
    behind = mx.arange(keys - queries, keys)[:, None] - mx.arange(keys)[None]
    return (behind >= 0) & (behind < size)


@pytest.mark.parametrize("shape", [(300, 310), (6, 9)], ids=str)
def test_mask_of_truth_values(shape: tuple[int, int]) -> None:
    mask = window(*shape, 4)
    assert_same_attention(*heads(*shape, batch=1), mask)


@pytest.mark.parametrize("axes", [(), (2, 1), (2, 4), (1, 4)], ids=str)
def test_mask_for_each_row_and_head(axes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((*axes, 6, 9)) < 0.6
    mask[..., 2] = True  # no query is fully masked
    assert_same_attention(*heads(6, 9), mx.array(mask))
    added = np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(np.float32)
    assert_same_attention(*heads(6, 9), mx.array(added))


def test_additive_mask_may_be_finite() -> None:
    assert_same_attention(*heads(6, 9), random(6, 9, scale=3))


def test_scores_of_ten_thousand() -> None:
    q, k, v = heads(5, 5)
    assert mx.abs(SCALE * 1e4 * q[:, ::2] @ k.swapaxes(2, 3)).max() > 1e4
    assert_same_attention(100 * q, 100 * k, v, "causal", tolerance=1e-3)


def test_query_that_sees_nothing_is_finite() -> None:
    q, k, v = heads(3, 3)
    mask = mx.array([[True, False, False], [False, False, False], [True, True, True]])
    out, (d_q, d_k, d_v) = mx.vjp(
        lambda q, k, v: kernel_functions.attention(q, k, v, SCALE, mask),
        [q, k, v],
        [mx.ones((2, 4, 3, 12))],
    )
    for made in (*out, d_q, d_k, d_v):
        assert np.isfinite(np.array(made)).all()
    seen = kernel_functions.attention(q, k, v, SCALE, mask)[:, :, ::2]
    assert_close(seen, reference(q, k, v, mask)[:, :, ::2], 5e-6)


def test_inputs_that_are_not_contiguous() -> None:
    q, k, v = heads(6, 9)

    def turned(function: Function) -> Function:
        return lambda *inputs: function(*(x.transpose(0, 2, 1, 3) for x in inputs))

    assert_same_function(
        turned(lambda q, k, v: kernel_functions.attention(q, k, v, SCALE, "causal")),
        turned(lambda q, k, v: reference(q, k, v, "causal")),
        *(mx.contiguous(x.transpose(0, 2, 1, 3)) for x in (q, k, v)),
        tolerance=5e-6,
    )


def test_gradient_flows_through_an_additive_mask() -> None:
    """DeepSeek passes half of its scores as an added mask."""
    q, k, v = heads(6, 9)
    mask = random(2, 4, 6, 9, seed=4)
    assert_same_function(
        lambda mask: fast_model._attention(q, k, v, None, SCALE, mask),
        lambda mask: reference(q, k, v, mask),
        mask,
        tolerance=5e-6,
    )


# The last shape needs several blocks of rows.
SHAPES = [(3, 5, 16), (7,), (1, 1, 1), (2, 300, 128)]
UNARY: dict[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]] = {
    "tanh": (kernel_functions.tanh, mx.tanh),
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
    "swiglu": (kernel_functions.swiglu, swiglu),
    "geglu": (kernel_functions.geglu, geglu),
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
        lambda x: kernel_functions.rms_norm(x, weight, 1e-3),
        lambda x: mx.fast.rms_norm(x, weight, 1e-3),
        random(*shape, scale=2),
        tolerance=5e-6,
    )


def test_weight_of_a_norm_may_be_stored_in_16_bits() -> None:
    weight, x = (random(16) + 1).astype(mx.bfloat16), random(3, 16)
    found = kernel_functions.rms_norm(x, weight, 1e-6)
    assert_close(found, mx.fast.rms_norm(x, weight.astype(mx.float32), 1e-6), 2e-6)


def test_arrays_that_are_not_contiguous() -> None:
    x = random(16, 5, 3).transpose(1, 2, 0)
    for fast, plain in UNARY.values():
        assert_same_function(fast, plain, x)
    assert_same_function(kernel_functions.swiglu, swiglu, x, random(3, 5, 16).transpose(1, 0, 2))


@pytest.mark.parametrize("name", UNARY)
def test_extreme_values_of_unary_functions(name: str) -> None:
    x = mx.array([[-1e4, -200.0, -88.8, -1e-30, 0.0, 1e-30, 88.8, 200.0, 1e4]])
    assert_same_function(*UNARY[name], x)


def test_extreme_gates() -> None:
    gate = mx.array([[-1e4, -200.0, -88.8, 0.0, 88.8, 200.0, 1e4]])
    assert_same_function(kernel_functions.swiglu, swiglu, gate, random(1, 7))


def test_norm_of_zeros_and_of_large_numbers() -> None:
    x = mx.stack([mx.zeros(8), mx.full(8, 1e15), random(8) * 1e-4])
    assert_same_function(
        lambda x: kernel_functions.rms_norm(x, mx.ones(8), 1e-6),
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
        lambda x: kernel_functions.rope(x, 8, **chosen),
        lambda x: mx.fast.rope(x, 8, **chosen),
        random(2, 3, 5, width),
    )


def test_other_options_give_other_turns() -> None:
    """Cached tables depend on all options."""
    x = random(1, 2, 6, 8)
    made = [
        kernel_functions.rope(x, 8, **{**PLAIN, **options})
        for options in ({}, {"base": 99.0}, {"scale": 0.5}, {"offset": 1}, {"freqs": FREQS})
        if "freqs" not in options
    ]
    made += [
        kernel_functions.rope(x, 8, **{**PLAIN, "base": None, "freqs": freqs})
        for freqs in (FREQS, 3 * FREQS)
    ]
    for i, one in enumerate(made):
        for other in made[i + 1 :]:
            assert mx.abs(one - other).max() > 1e-3


def test_heads_that_are_not_contiguous() -> None:
    assert_same_function(
        lambda x: kernel_functions.rope(x.transpose(0, 2, 1, 3), 8, **PLAIN),
        lambda x: mx.fast.rope(x.transpose(0, 2, 1, 3), 8, **PLAIN),
        random(2, 5, 3, 8),
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_other_dtypes_are_left_to_mlx(dtype: mx.Dtype) -> None:
    x = random(1, 2, 3, 8).astype(dtype)
    found = kernel_functions.rope(x, 8, **PLAIN)
    assert found.dtype == dtype
    assert mx.array_equal(found, mx.fast.rope(x, 8, **PLAIN))
