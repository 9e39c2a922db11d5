"""Attention by operations that all devices can differentiate, against MLX's own on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

from mlxtune.backend.models.mixers import attention
from mlxtune.backend.models.mixers.attention import (
    attention_in_blocks,
    composed_attention,
    scaled_dot_product_attention,
)
from mlxtune.backend.models.packed import Layout, PackedCache, create_attention_mask, laid_out
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.pack import Segment
from tests.backend.conftest import random_examples
from tests.backend.step.executions import (
    PACKED,
    PLAIN,
    SPLIT,
    assert_same_gradients,
    computed,
    fixed_step,
    fresh,
    gradients_of,
    model_folder,
)
from tests.slow import slow, slow_except

fused = mx.fast.scaled_dot_product_attention
WINDOW_WAYS = {
    "padded": SPLIT,
    "padded with recompute": replace(SPLIT, recompute=True),
    "packed": PACKED,
    "packed with recompute": replace(PACKED, recompute=True),
}


def arrays(length: int, rows: int = 2, heads: int = 4, groups: int = 2, size: int = 8) -> Any:
    """Return random queries, keys, values and sinks."""
    keys = mx.random.split(mx.random.key(0), 4)
    shapes = [(rows, heads, length, size), *[(rows, groups, length, size)] * 2, (heads,)]
    return [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]


def assert_same(one: Callable[..., mx.array], other: Callable[..., mx.array], given: Any) -> None:
    """Compare two functions' values and all their gradients."""
    weight = mx.random.normal(other(*given).shape, key=mx.random.key(9))

    def by(function: Callable[..., mx.array]) -> Any:
        summed = lambda *given: (function(*given) * weight).sum()  # noqa: E731
        return function(*given), *mx.grad(summed, argnums=list(range(len(given))))(*given)

    for found, wanted in zip(by(one), by(other), strict=True):
        assert mx.abs(found - wanted).max() <= 1e-5 * mx.maximum(mx.abs(wanted).max(), 1)


MASKS = {
    "causal": lambda length: "causal",
    "none": lambda length: None,
    "bool": lambda length: create_causal_mask(length, window_size=3),
    "added, each head": lambda length: mx.random.normal(
        (2, 4, length, length), key=mx.random.key(5)
    ),
    "bool, all heads": lambda length: mx.broadcast_to(
        create_causal_mask(length), (2, 1, length, length)
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_every_form_is_attention(mask: str, with_sinks: bool, length: int) -> None:
    *given, sinks = arrays(length)
    made = MASKS[mask](length)
    given += [sinks] * with_sinks

    def wanted(q: mx.array, k: mx.array, v: mx.array, sinks: Any = None) -> mx.array:
        return fused(q, k, v, scale=0.3, mask=made, sinks=sinks)

    def chosen(q: mx.array, k: mx.array, v: mx.array, sinks: Any = None) -> mx.array:
        return scaled_dot_product_attention(q, k, v, None, 0.3, made, sinks)

    def composed(q: mx.array, k: mx.array, v: mx.array, sinks: Any = None) -> mx.array:
        return composed_attention(q, k, v, 0.3, made, sinks)

    assert_same(chosen, wanted, given)
    assert_same(composed, wanted, given)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("length", "window"), [(11, 4), (16, 4), (17, 3), (30, 5)])
def test_blocks_are_attention_in_a_window(
    length: int, window: int, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MIN_BLOCK_QUERIES", 4)
    *given, sinks = arrays(length)
    mask = create_causal_mask(length, window_size=window)
    given += [sinks] * with_sinks

    def wanted(q: mx.array, k: mx.array, v: mx.array, sinks: Any = None) -> mx.array:
        return fused(q, k, v, scale=0.3, mask=mask, sinks=sinks)

    def blocks(q: mx.array, k: mx.array, v: mx.array, sinks: Any = None) -> mx.array:
        return attention_in_blocks(q, k, v, 0.3, window, sinks)

    assert_same(blocks, wanted, given)


def in_line(length: int, window: int) -> Any:
    """Return the mask for the layers of a packed sequence."""
    with laid_out(Layout([Segment(0, length, 0, -1)])):
        return PackedCache().make_mask(length, window_size=window)


def padded(length: int, window: int) -> Any:
    """Return the mask for padded examples, from the replacement of mlx-lm's function."""
    return create_attention_mask(mx.zeros((1, length, 8)), None, window_size=window)


@pytest.mark.parametrize(("make", "cache"), [(in_line, PackedCache()), slow(padded, None)])
def test_long_windows_take_blocks_and_keep_less(make: Callable[..., Any], cache: Any) -> None:
    """Masks are recognised by identity, so a computed copy is not known to be a window."""
    length, window = 3072, 128
    q, k, v, _ = arrays(length, rows=1, heads=2, groups=1, size=8)
    mask = make(length, window)
    changed = mask & mask

    def run(mask: Any, *given: mx.array) -> mx.array:
        return scaled_dot_product_attention(*given, cache, 0.3, mask)

    assert mx.allclose(run(mask, q, k, v), run(changed, q, k, v), atol=1e-5)

    def peak(mask: Any) -> int:
        mx.eval(q, k, v)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda *given: run(mask, *given).sum(), argnums=[0, 1, 2])(q, k, v))
        return mx.get_peak_memory() - before

    assert peak(mask) < 0.5 * peak(changed)


@pytest.mark.parametrize("way", slow_except(WINDOW_WAYS, "padded with recompute", "packed"))
@pytest.mark.parametrize("model_type", slow_except(["gemma3_text", "gpt_oss"], "gemma3_text"))
def test_step_in_windows_takes_blocks(
    way: str, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers padded micro-batches, packed sequences, and recomputed layers."""
    monkeypatch.setattr(attention, "_MIN_BLOCK_QUERIES", 4)
    folder = model_folder(model_type, overrides=(("sliding_window", 6),))
    wanted = computed(fresh(folder, PLAIN, 10_000), fixed_step())
    lengths: list[int] = []

    def counted(queries: mx.array, *given: Any) -> mx.array:
        lengths.append(queries.shape[2])
        return attention_in_blocks(queries, *given)

    pipeline = fresh(folder, WINDOW_WAYS[way], 10_000)
    monkeypatch.setattr(attention, "attention_in_blocks", counted)
    found = computed(pipeline, fixed_step())
    assert lengths
    assert min(lengths) > 12
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert_same_gradients(found.gradients, wanted.gradients)


def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fused attention refuse gradients with the error of Metal's kernel."""

    def refusing(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        few, sinks = q.shape[2] <= 8, options.get("sinks")

        def backward(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
            if few:
                raise RuntimeError("the VJP path requires the full-attention kernel")
            if sinks is not None:
                raise RuntimeError("[ScaledDotProductAttentionVJP] NYI: attention sinks")
            return mx.vjp(lambda *given: fused(*given, **options), primals, [cotangent])[1]

        function = mx.custom_function(lambda q, k, v: fused(q, k, v, **options))
        function.vjp(backward)
        return function(q, k, v)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", refusing)


SHORT = [Example(i, np.array(tokens, np.int32), np.array([0, 1, 1][: len(tokens)], np.uint8))
         for i, tokens in enumerate([[1, 2, 3], [4, 5], [6, 7, 8]], 1)]  # fmt: skip


@pytest.mark.parametrize("how", [PACKED, slow(SPLIT)], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("model_type", "examples"),
    [("qwen3", SHORT), ("gpt_oss", random_examples(4)), ("gpt_oss", SHORT)],
    ids=["short", "sinks", "short with sinks"],
)
def test_step_that_metal_cannot_differentiate_trains(
    how: Any, model_type: str, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(model_type)
    wanted = fresh(folder, PLAIN, 10_000).loss_and_gradients(examples)
    expected = gradients_of(wanted.gradients)
    metal(monkeypatch)
    with pytest.raises(RuntimeError, match=r"full-attention kernel|attention sinks"):
        fresh(folder, PLAIN, 10_000).loss_and_gradients(examples)
    found = fresh(folder, how, 10_000).loss_and_gradients(examples)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    largest = max(np.abs(value).max() for value in expected.values())
    for name, value in gradients_of(found.gradients).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-4 * largest, err_msg=name)
