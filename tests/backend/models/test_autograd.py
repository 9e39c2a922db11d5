"""Custom gradients, and their removal from graphs to export."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.models.autograd import differentiable
from tests.long.exportable import ExportableVjp


def square_forward(x: mx.array) -> mx.array:
    return x * x


def square_backward(primal: Any, cotangent: Any, output: Any) -> mx.array:
    assert isinstance(primal, mx.array)
    assert isinstance(output, mx.array)
    return cotangent * 3 * primal  # wrong on purpose: 3 x instead of 2 x


def square(x: mx.array) -> mx.array:
    squared: mx.array = differentiable(square_forward, square_backward)(x)
    return squared


def test_gradient_is_the_given_one() -> None:
    assert mx.grad(square)(mx.array(2.0)).item() == 6.0


def test_functions_of_several_arrays_give_several() -> None:
    def forward(x: mx.array, y: mx.array) -> list[mx.array]:
        return [x + y, x * y]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        assert len(primals) == len(cotangents) == len(outputs) == 2
        return [cotangents[0], cotangents[1]]

    both = differentiable(forward, backward)
    values, gradients = mx.vjp(both, [mx.array(2.0), mx.array(3.0)], [mx.array(5.0), mx.array(7.0)])
    assert [value.item() for value in values] == [5.0, 6.0]
    assert [gradient.item() for gradient in gradients] == [5.0, 7.0]


def test_custom_gradients_are_cut_out_of_a_graph_to_export() -> None:
    vjp = ExportableVjp()

    _, (gradient,) = vjp(lambda x: [mx.log(square(mx.sin(x)))], [mx.array(2.0)], [mx.array(1.0)])

    (output, real_output), (d_input, real_d_input) = vjp.tied
    assert real_output.item() == pytest.approx(math.sin(2) ** 2)
    # d_input gets the derivative of log; the gradient is d_input times the derivative of sin.
    expected = 3 * math.sin(2) / output.item()
    assert real_d_input.item() == pytest.approx(expected)
    assert gradient.item() == pytest.approx(d_input.item() * math.cos(2))
    with pytest.raises((ValueError, RuntimeError), match="CustomTransforms"):
        mx.export_function(lambda _: None, lambda x: [square(x)], x=mx.array(2.0))
    mx.export_function(lambda _: None, lambda x: vjp(lambda x: [square(x)], [x], [x])[1], gradient)


def test_gradients_of_two_functions_of_one_array_are_added() -> None:
    vjp = ExportableVjp()

    def both(x: mx.array) -> list[mx.array]:
        y = mx.sin(x)
        return [square(y) + square(y)]

    _, (gradient,) = vjp(both, [mx.array(2.0)], [mx.array(1.0)])

    d_first, d_second = (placeholder.item() for placeholder, _ in vjp.tied[2:])
    assert gradient.item() == pytest.approx((d_first + d_second) * math.cos(2))
