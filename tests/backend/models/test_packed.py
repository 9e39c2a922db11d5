"""Operations on a packed batch, against mlx's own operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from mlxtune.backend.models.packed import CannotPackError, Layout, PackedCache, laid_out, layout
from mlxtune.core.steps.pack import Segment
from tests.backend.cpu.compared import assert_close, assert_same_function, random
from tests.backend.kernels import kernel_module

fast_model, functions = map(kernel_module, ("fast_model", "kernel_functions"))

# Two texts continue one text, which itself continues another; a last text is separate.
FOREST = Layout(
    [
        Segment(0, 5, 0, -1),
        Segment(5, 8, 5, 0),
        Segment(8, 15, 8, 1),
        Segment(15, 16, 8, 1),
        Segment(16, 20, 5, 0),
        Segment(20, 27, 0, -1),
    ]
)
TOKENS = 27


def seen() -> np.ndarray[Any, Any]:
    """Return the mask (T, T) of the keys that each token attends to, built token by token."""
    mask = np.zeros((TOKENS, TOKENS), dtype=bool)
    for segment in FOREST.segments:
        for place in range(segment.start, segment.end):
            mask[place, segment.start : place + 1] = True
            above = segment
            while above.parent >= 0:
                above = FOREST.segments[above.parent]
                mask[place, above.start : above.end] = True
    return mask


@pytest.mark.parametrize("queries_at_once", [2, 128])
@pytest.mark.parametrize("scores_at_once", [1, 1 << 20])
def test_attention_sees_what_a_segment_continues(
    queries_at_once: int, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "ATTENTION_QUERIES", queries_at_once)
    monkeypatch.setattr(functions, "ATTENTION_SCORES", scores_at_once)
    q, k, v = random(1, 4, TOKENS, 8), random(1, 2, TOKENS, 8), random(1, 2, TOKENS, 8, seed=3)
    mask = mx.array(seen())

    def packed(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        with laid_out(FOREST):
            return functions.attention(q, k, v, 0.3, "causal")

    assert_same_function(
        packed,
        lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask),
        q,
        k,
        v,
        tolerance=5e-6,
    )


def test_positions_match_the_examples() -> None:
    x = random(1, 3, TOKENS, 8)
    how = {"traditional": False, "base": 1e4, "scale": 1.0}

    def packed(x: mx.array) -> mx.array:
        with laid_out(FOREST):
            return functions.rope(x, 8, offset=0, **how)

    def each(x: mx.array) -> mx.array:
        turned = [
            mx.fast.rope(x[:, :, one.start : one.end], 8, offset=one.position, **how)
            for one in FOREST.segments
        ]
        return mx.concatenate(turned, axis=2)

    assert FOREST.longest == 15
    assert_same_function(packed, each, x, tolerance=5e-6)


def test_function_without_segment_support_is_refused() -> None:
    x = random(1, 2, TOKENS, 8)
    with laid_out(FOREST):
        with pytest.raises(CannotPackError):
            functions.attention(x, x, x, 0.3, None)
        with pytest.raises(CannotPackError):
            fast_model._attention(x, x, x, None, 0.3, mx.zeros((TOKENS, TOKENS)))
        with pytest.raises(CannotPackError):
            functions.rope(x, 8, traditional=True, base=1e4, scale=1.0, offset=0)
    assert layout() is None


def test_cache_of_a_sequence_keeps_nothing() -> None:
    cache, x = PackedCache(), random(1, 2, 4, 8)
    assert cache.update_and_fetch(x, x) == (x, x)
    assert cache.offset == 0
    cache[0] = x
    assert cache[0] is None
    assert cache.lengths is None


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("window", [None, 4, 15, 100])
def test_mask_of_a_sequence_is_the_mask_of_its_padded_examples(
    as_array: bool, window: int | None
) -> None:
    expected = create_attention_mask(mx.zeros((4, FOREST.longest, 8)), None, window, as_array)
    with laid_out(FOREST):
        found = create_attention_mask(mx.zeros((1, TOKENS, 8)), PackedCache(), window, as_array)
        assert create_ssm_mask(mx.zeros((1, TOKENS, 8)), PackedCache()) is None
    if isinstance(expected, str):
        assert found == expected
    else:
        assert mx.array_equal(found, expected)


def test_rows_hold_what_each_token_sees_and_places_lead_back() -> None:
    rows, flat_indices = np.array(FOREST.padded_indices), np.array(FOREST.flat_indices)
    assert rows.shape == (4, FOREST.longest)
    assert rows.reshape(-1)[flat_indices].tolist() == list(range(TOKENS))
    for token, place in enumerate(flat_indices.tolist()):
        row, column = divmod(place, FOREST.longest)
        assert sorted(rows[row, : column + 1]) == np.flatnonzero(seen()[token]).tolist()
        assert column == FOREST.positions[token]


def test_backward_pass_uses_the_layout_of_its_forward_pass() -> None:
    """The backward pass uses its forward pass's layout, even if another one is current."""
    q, d = random(1, 2, TOKENS, 8), random(1, 2, TOKENS, 8, seed=9)

    def packed(q: mx.array) -> mx.array:
        with laid_out(FOREST):
            return functions.attention(q, q, q, 0.3, "causal")

    _, (expected,) = mx.vjp(packed, [q], [d])
    with laid_out(Layout([Segment(0, TOKENS, 0, -1)])):
        _, (found,) = mx.vjp(packed, [q], [d])
    assert_close(found, expected, 0)


def test_indices_of_tokens_side_by_side_are_listed() -> None:
    rows = np.array(FOREST.padded_indices)
    real = np.array(FOREST.real)
    starts, flat_indices = map(np.array, FOREST.every_index)
    owners = np.array(FOREST.owners)
    for token in range(TOKENS):
        found = flat_indices[starts[token] : starts[token + 1]]
        assert found.tolist() == np.flatnonzero((rows == token) & real).tolist()
        # One of the places is read back.
        (place,) = np.flatnonzero(owners == token)
        assert place == FOREST.flat_indices[token].item()
        assert place in found
    assert starts[-1] == real.sum() == len(flat_indices)
    assert (owners[~real.reshape(-1)] == -1).all()
    assert FOREST.token_positions.tolist() == FOREST.positions.tolist()
