"""Rotary embeddings, against mlx's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.cpu import rotary
from tests.backend.cpu.compared import assert_same_function, random

PLAIN: dict[str, Any] = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 0}
FREQS = mx.array([1.0, 3.0, 20.0, 500.0])


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
        lambda x: rotary.rope(x, 8, **chosen),
        lambda x: mx.fast.rope(x, 8, **chosen),
        random(2, 3, 5, width),
    )


def test_other_options_give_other_turns() -> None:
    """What is kept from one call is not taken for another."""
    x = random(1, 2, 6, 8)
    made = [
        rotary.rope(x, 8, **{**PLAIN, **options})
        for options in ({}, {"base": 99.0}, {"scale": 0.5}, {"offset": 1}, {"freqs": FREQS})
        if "freqs" not in options
    ]
    made += [
        rotary.rope(x, 8, **{**PLAIN, "base": None, "freqs": freqs}) for freqs in (FREQS, 3 * FREQS)
    ]
    for i, one in enumerate(made):
        for other in made[i + 1 :]:
            assert mx.abs(one - other).max() > 1e-3


def test_heads_that_are_not_laid_out_in_order() -> None:
    assert_same_function(
        lambda x: rotary.rope(x.transpose(0, 2, 1, 3), 8, **PLAIN),
        lambda x: mx.fast.rope(x.transpose(0, 2, 1, 3), 8, **PLAIN),
        random(2, 5, 3, 8),
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_other_dtypes_are_left_to_mlx(dtype: mx.Dtype) -> None:
    x = random(1, 2, 3, 8).astype(dtype)
    found = rotary.rope(x, 8, **PLAIN)
    assert found.dtype == dtype
    assert mx.array_equal(found, mx.fast.rope(x, 8, **PLAIN))
