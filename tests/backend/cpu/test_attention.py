"""Attention by blocks of queries, against mlx's own attention."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.cpu import attention, kernels, model
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
        lambda q, k, v: attention.attention(q, k, v, SCALE, mask),
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
    monkeypatch.setattr(attention, "ATTENTION_SCORES", 1000)  # one group of heads per block
    monkeypatch.setattr(attention, "ATTENTION_QUERIES", 100)
    assert_same_attention(q, k, v, mask)


def window(queries: int, keys: int, size: int) -> mx.array:
    behind = mx.arange(keys - queries, keys)[:, None] - mx.arange(keys)[None]
    return (behind >= 0) & (behind < size)


@pytest.mark.parametrize("shape", [(300, 310), (6, 9)], ids=str)
def test_mask_of_truth_values(shape: tuple[int, int]) -> None:
    mask = window(*shape, 4)
    assert_same_attention(*heads(*shape, batch=1), mask)


@pytest.mark.parametrize("axes", [(), (2, 1), (2, 4), (1, 4)], ids=str)
def test_mask_for_each_line_and_head(axes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((*axes, 6, 9)) < 0.6
    mask[..., 2] = True  # no query is fully masked
    assert_same_attention(*heads(6, 9), mx.array(mask))
    added = np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(np.float32)
    assert_same_attention(*heads(6, 9), mx.array(added))


def test_mask_that_is_added_may_be_finite() -> None:
    assert_same_attention(*heads(6, 9), random(6, 9, scale=3))


def test_scores_of_ten_thousand() -> None:
    q, k, v = heads(5, 5)
    assert mx.abs(SCALE * 1e4 * q[:, ::2] @ k.swapaxes(2, 3)).max() > 1e4
    assert_same_attention(100 * q, 100 * k, v, "causal", tolerance=1e-3)


def test_what_is_masked_weighs_nothing_at_all() -> None:
    """Tiny weights would be subnormal numbers, which make products ten times as slow."""
    lowest = np.finfo(np.float32).min
    scores = np.array([[0, 1, -60, -200, lowest]] * 2, np.float32)
    kernels.softmax_(0, 1, scores, 1, False)
    kernels.softmax_gradient_(1, 2, scores, np.ones_like(scores), 1, False)
    expected = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    for row in scores:
        np.testing.assert_allclose(row[:2], expected, rtol=1e-6)
        assert (row[2:] == 0).all()
    logits, total = np.array([[0, -200]], np.float32), np.zeros(1, np.float32)
    highest = np.full(1, -np.inf, np.float32)
    kernels.online_softmax_(0, 1, logits, highest, total, np.zeros(1, np.float32))
    assert logits.tolist() == [[1, 0]]


def test_query_that_sees_nothing_is_finite() -> None:
    q, k, v = heads(3, 3)
    mask = mx.array([[True, False, False], [False, False, False], [True, True, True]])
    out, (d_q, d_k, d_v) = mx.vjp(
        lambda q, k, v: attention.attention(q, k, v, SCALE, mask),
        [q, k, v],
        [mx.ones((2, 4, 3, 12))],
    )
    for made in (*out, d_q, d_k, d_v):
        assert np.isfinite(np.array(made)).all()
    seen = attention.attention(q, k, v, SCALE, mask)[:, :, ::2]
    assert_close(seen, reference(q, k, v, mask)[:, :, ::2], 5e-6)


def test_inputs_that_are_not_laid_out_in_order() -> None:
    q, k, v = heads(6, 9)

    def turned(function: Function) -> Function:
        return lambda *inputs: function(*(x.transpose(0, 2, 1, 3) for x in inputs))

    assert_same_function(
        turned(lambda q, k, v: attention.attention(q, k, v, SCALE, "causal")),
        turned(lambda q, k, v: reference(q, k, v, "causal")),
        *(mx.contiguous(x.transpose(0, 2, 1, 3)) for x in (q, k, v)),
        tolerance=5e-6,
    )


def test_gradient_flows_through_a_mask_that_is_added() -> None:
    """DeepSeek passes half of its scores as an added mask."""
    q, k, v = heads(6, 9)
    mask = random(2, 4, 6, 9, seed=4)
    assert_same_function(
        lambda mask: model._attention(q, k, v, None, SCALE, mask),
        lambda mask: reference(q, k, v, mask),
        mask,
        tolerance=5e-6,
    )
