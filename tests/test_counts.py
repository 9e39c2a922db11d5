"""Products and launches of graphs, counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.core.data.encode import Example
from tests.long.counts import (
    StepCounts,
    Traced,
    _fused,
    count_steps,
    counted_evaluations,
    flops,
    launches,
)

X, W = mx.ones((3, 5, 8)), mx.ones((8, 16))
mx.eval(X, W)


def test_products_of_a_gradient_are_counted_with_their_shapes() -> None:
    a = mx.ones((8, 16))

    def gradient(x: mx.array) -> Traced:
        return [mx.grad(lambda a: (mx.tanh(x @ a) @ W.T).sum())(a)], []

    # There is one product forward, because nothing reads the second product, and two backward: for
    # the gradients of tanh and of `a`.
    assert flops(gradient, X) == {"products": 3 * 2 * 15 * 8 * 16}


def test_products_that_nothing_reads_are_not_counted() -> None:
    stands_in = mx.zeros((5, 16))

    def gradient(x: mx.array) -> Traced:
        real, unread = x[0] @ W, x[1] @ W
        return [mx.exp(stands_in + x[0, 0, 0])], [(stands_in, real), (mx.array(0.0), unread)]

    assert flops(gradient, X) == {"products": 2 * 5 * 8 * 16}


def test_attention_is_apart_from_products_with_weights() -> None:
    heads = mx.ones((2, 4, 7, 8))

    def attend(x: mx.array) -> Traced:
        return [mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, mask="causal") @ W], []

    assert flops(attend, heads) == {
        "attention": 2 * 2 * (2 * 4 * 7 * 7 * 8),
        "products": 2 * (2 * 4 * 7) * 8 * 16,
    }


def test_experts_and_quantised_weights_count_what_they_multiply() -> None:
    experts, chosen = mx.ones((4, 64, 32)), mx.array([0, 2, 3])
    packed = mx.quantize(mx.ones((96, 64)))

    def products(x: mx.array) -> Traced:
        chosen_products = mx.gather_mm(x[:, None], experts, rhs_indices=chosen)
        return [chosen_products, mx.quantized_matmul(x, *packed)], []

    assert flops(products, mx.ones((3, 64))) == {"products": 2 * 3 * 64 * (32 + 96)}


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (lambda: mx.exp(X.reshape(15, 8).T)[None], {"Exp": 1}),
        (lambda: X.transpose(2, 0, 1).reshape(8, 15), {"Reshape": 1}),
        (lambda: mx.concatenate([X, X + 1, X * 2]), {"Add": 1, "Multiply": 1, "Concatenate": 3}),
        (lambda: mx.split(X @ W, 2, axis=-1), {"Matmul": 1}),
        (lambda: mx.compile(lambda x: mx.exp(x) * 2 + 1)(X), {"Compiled": 1}),
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


class Fake:
    """A benchmark side with one product per step."""

    def lazy_step(self, examples: Sequence[Example]) -> Any:
        made = mx.exp(mx.ones((len(examples[0]), 8))) @ W
        mx.eval(made)  # suppressed while counting
        return made

    def gradients(self, examples: Sequence[Example]) -> Iterator[Any]:
        yield lambda x: ([x @ W], []), mx.ones((len(examples[0]), 8))

    def heads(self, examples: Sequence[Example]) -> Iterator[Any]:
        mx.eval(x := mx.ones((2, 8)))
        yield x @ W


def of_lengths(*lengths: int) -> list[list[Example]]:
    return [[Example(1, list(range(n)), [1] * n)] for n in lengths]  # type: ignore[arg-type]


def test_products_and_launches_are_summed_over_the_steps() -> None:
    found = count_steps(Fake(), of_lengths(5, 6, 5))
    assert found.matmul_flops == 2 * 16 * 8 * 16
    assert found.attention_flops == 0
    # Each step creates its input with Full.
    assert found.launches == {"Full": 3, "Exp": 3, "Matmul": 3}
    assert found.head_launches == 3


def test_what_cannot_be_exported_is_left_out() -> None:
    class Opaque(Fake):
        def gradients(self, examples: Sequence[Example]) -> Iterator[Any]:
            yield lambda x: [mx.array(memoryview(x))], X

    found = count_steps(Opaque(), of_lengths(5))
    assert found.matmul_flops is None
    assert found.launches == {"Full": 1, "Exp": 1, "Matmul": 1}

    class Untraceable(Fake):
        def lazy_step(self, examples: Sequence[Example]) -> Any:
            raise RuntimeError("no graph")

        gradients = Opaque.gradients

    assert count_steps(Untraceable(), of_lengths(5)) == StepCounts()
