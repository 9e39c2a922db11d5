"""Rows chosen by index, and their gradient, against MLX's own indexing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.models.gather import Gather, gathered
from tests.long.counts import launches

PLACES = np.array([1, 3, 3, 0, 3, 5])


# Rows of 16 bits that fill words of 64 bits, and rows that do not.
@pytest.mark.parametrize("width", [8, 3])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_gathered_rows_and_gradient_match_indexing(dtype: mx.Dtype, width: int) -> None:
    array = mx.random.normal((6, width), key=mx.random.key(0)).astype(dtype)
    # Sums of these are exact, in any order.
    cotangent = mx.round(8 * mx.random.normal((6, width), key=mx.random.key(1))).astype(dtype)
    selected = Gather(PLACES, 6)
    for _ in range(2):
        found = mx.vjp(selected.gather, [array], [cotangent])
        expected = mx.vjp(lambda x: x[mx.array(PLACES)], [array], [cotangent])
        for one, other in zip(found, expected, strict=True):
            assert one[0].dtype == dtype
            assert mx.array_equal(one[0], other[0])


def test_missing_row_is_gathered_as_zero() -> None:
    array, index = mx.arange(1, 9).reshape(2, 4).astype(mx.float16), mx.array([1, 0, 1])
    exists = mx.array([[True], [False], [True]])
    assert gathered(array, index, exists).tolist() == [[5, 6, 7, 8], [0, 0, 0, 0], [5, 6, 7, 8]]


def test_gradient_takes_two_launches_if_no_row_is_chosen_twice() -> None:
    array, cotangent = mx.ones((6, 8)), mx.ones((3, 8))
    mx.eval(array, cotangent)
    selected = Gather(PLACES[:2], 6)
    (gradient,) = mx.vjp(selected.gather, [array], [cotangent[:2]])[1]
    assert dict(launches(gradient)) == {"Gather": 1, "Select": 1}
