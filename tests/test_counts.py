"""Products and launches of graphs, counted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from tests.long.counts import (
    Traced,
    _fused,
    counted_evaluations,
    flops,
    launches,
)
from tests.slow import compiled

X, W = mx.ones((3, 5, 8)), mx.ones((8, 16))
mx.eval(X, W)


def test_products_of_a_gradient_are_counted_with_their_shapes() -> None:
    a = mx.ones((8, 16))

    def gradient(x: mx.array) -> Traced:
        return [mx.grad(lambda a: (mx.tanh(x @ a) @ W.T).sum())(a)], []

    # There is one product forward, because nothing reads the second product, and two backward: for
    # the gradients of tanh and of `a`.
    assert flops(gradient, X) == {"products": 3 * 2 * 15 * 8 * 16}


def test_attention_is_apart_from_products_with_weights() -> None:
    heads = mx.ones((2, 4, 7, 8))

    def attend(x: mx.array) -> Traced:
        return [mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, mask="causal") @ W], []

    assert flops(attend, heads) == {
        "attention": 2 * 2 * (2 * 4 * 7 * 7 * 8),
        "products": 2 * (2 * 4 * 7) * 8 * 16,
    }


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (lambda: mx.exp(X.reshape(15, 8).T)[None], {"Exp": 1}),
        (lambda: X.transpose(2, 0, 1).reshape(8, 15), {"Reshape": 1}),
        (lambda: mx.concatenate([X, X + 1, X * 2]), {"Add": 1, "Multiply": 1, "Concatenate": 3}),
        (lambda: mx.split(X @ W, 2, axis=-1), {"Matmul": 1}),
        pytest.param(
            lambda: mx.compile(lambda x: mx.exp(x) * 2 + 1)(X), {"Compiled": 1}, marks=compiled
        ),
        (lambda: {"of a tree": [X @ W, "no array"]}, {"Matmul": 1}),
        (lambda: X, {}),
    ],
)
def test_launches_are_all_but_views(graph: Any, expected: dict[str, int]) -> None:
    assert launches(graph()) == expected


def test_fused_functions_launch_once_each_way() -> None:
    def loss(x: mx.array) -> mx.array:
        y = mx.fast.rms_norm(x, weight, 1e-5)
        y = mx.fast.rope(y, 8, traditional=False, base=1e4, scale=1.0, offset=0)
        return mx.fast.scaled_dot_product_attention(y, y, y, scale=1.0, mask="causal")

    x, weight = mx.ones((1, 2, 5, 8)), mx.ones(8)
    mx.eval(x, weight)
    own = mx.fast.rms_norm
    with _fused():
        forward, both = launches(loss(x)), launches(mx.vjp(loss, [x], [x])[1])
        assert loss(x).shape == x.shape
    assert mx.fast.rms_norm is own
    assert forward == {"CumSum": 1, "CumMax": 1, "CumMin": 1}
    # Nothing reads attention's result; the gradients of queries, keys and values are summed.
    backward = {"CumProd": 1, "CumMax": 1, "CumLogAddExp": 1, "Add": 2}
    assert both == forward - Counter({"CumMin": 1}) + Counter(backward)


def test_evaluations_are_counted_and_take_place() -> None:
    own = mx.eval
    with counted_evaluations() as count:
        x = X @ W
        mx.eval(x, [x])
        mx.async_eval(x + 1)
    assert count == [2]
    assert mx.eval is own
    assert not launches(x)
