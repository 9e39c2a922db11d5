"""What is computed of examples in one line, against mlx's own functions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.cpu import attention, elementwise, model
from mlxtune.backend.model.packed import CannotPackError, Layout, PackedCache, laid_out, layout
from mlxtune.core.steps.pack import ANY_LENGTH, Segment
from tests.backend.cpu.compared import assert_close, assert_same_function, random
from tests.backend.step.executions import (
    SPLIT,
    WAYS,
    computed,
    fixed_step,
    fresh,
    model_folder,
    pipeline,
)

# Two texts that go on from one, which goes on from another, and one by itself.
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
    """Return which keys (T, T) each token sees, one by one."""
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
    monkeypatch.setattr(attention, "_QUERIES", queries_at_once)
    monkeypatch.setattr(attention, "_SCORES", scores_at_once)
    q, k, v = random(1, 4, TOKENS, 8), random(1, 2, TOKENS, 8), random(1, 2, TOKENS, 8, seed=3)
    mask = mx.array(seen())

    def in_line(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        with laid_out(FOREST):
            return attention.attention(q, k, v, 0.3, "causal")

    assert_same_function(
        in_line,
        lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask),
        q,
        k,
        v,
        tolerance=5e-6,
    )


def test_positions_are_those_in_the_examples() -> None:
    x = random(1, 3, TOKENS, 8)
    how = {"traditional": False, "base": 1e4, "scale": 1.0}

    def in_line(x: mx.array) -> mx.array:
        with laid_out(FOREST):
            return elementwise.rope(x, 8, offset=0, **how)

    def each(x: mx.array) -> mx.array:
        turned = [
            mx.fast.rope(x[:, :, one.start : one.end], 8, offset=one.position, **how)
            for one in FOREST.segments
        ]
        return mx.concatenate(turned, axis=2)

    assert FOREST.longest == 15
    assert_same_function(in_line, each, x, tolerance=5e-6)


def test_what_knows_of_no_segments_is_refused() -> None:
    x = random(1, 2, TOKENS, 8)
    with laid_out(FOREST):
        with pytest.raises(CannotPackError):
            attention.attention(x, x, x, 0.3, None)
        with pytest.raises(CannotPackError):
            model._attention(x, x, x, None, 0.3, "causal", sinks=mx.zeros(2))
        with pytest.raises(CannotPackError):
            elementwise.rope(x, 8, traditional=True, base=1e4, scale=1.0, offset=0)
    assert layout() is None


def test_a_cache_of_a_line_keeps_nothing_and_notes_the_window() -> None:
    cache, x = PackedCache(), random(1, 2, 4, 8)
    assert cache.update_and_fetch(x, x) == (x, x)
    with laid_out(FOREST):
        assert cache.make_mask(TOKENS) == "causal"
        assert cache.make_mask(TOKENS, window_size=15) == "causal"
        with pytest.raises(CannotPackError):
            cache.make_mask(TOKENS, window_size=14)
        with pytest.raises(CannotPackError):
            cache.make_mask(TOKENS, return_array=True)
    assert cache.window == 14
    assert cache.offset == 0


IN_LINE = WAYS["in one line in small chunks"]


def test_architectures_that_stand_in_one_line() -> None:
    assert pipeline("qwen3", IN_LINE).forward.execution.packs_up_to == ANY_LENGTH
    assert pipeline("llama", IN_LINE).forward.execution.packs_up_to == ANY_LENGTH
    # Its attention is its own, and makes masks of its own.
    assert pipeline("gemma2", IN_LINE).forward.execution.packs_up_to == 0
    assert pipeline("qwen3", SPLIT).forward.execution.packs_up_to == 0


@pytest.mark.parametrize("window", [8, 64])
def test_examples_longer_than_a_window_are_padded(window: int) -> None:
    folder = model_folder("gemma3_text", overrides=(("sliding_window", window),))
    fast = fresh(folder, IN_LINE, tokens=10_000)
    assert fast.forward.execution.packs_up_to == window
    batches = [batch for _, batch in fast.micro_batches(fixed_step())]
    longest = max(len(example) - 1 for example in fixed_step())
    assert all(hasattr(batch, "segments") == (longest <= window) for batch in batches)
    plain = fresh(folder, tokens=1)
    assert computed(fast, fixed_step()).loss == pytest.approx(computed(plain, fixed_step()).loss)


def test_a_step_in_one_line_runs_each_token_once() -> None:
    fast = pipeline("qwen3", IN_LINE, tokens=10_000)
    run_tokens = computed(fast, fixed_step()).run_tokens
    beginnings = {
        tuple(one.tokens[: i + 1].tolist()) for one in fixed_step() for i in range(len(one) - 1)
    }
    assert run_tokens == len(beginnings)


def test_the_line_under_way_is_that_of_the_backward_pass() -> None:
    """Another line, run between a forward pass and its backward pass, changes nothing."""
    q, d = random(1, 2, TOKENS, 8), random(1, 2, TOKENS, 8, seed=9)

    def in_line(q: mx.array) -> mx.array:
        with laid_out(FOREST):
            return attention.attention(q, q, q, 0.3, "causal")

    _, (expected,) = mx.vjp(in_line, [q], [d])
    with laid_out(Layout([Segment(0, TOKENS, 0, -1)])):
        _, (found,) = mx.vjp(in_line, [q], [d])
    assert_close(found, expected, 0)
