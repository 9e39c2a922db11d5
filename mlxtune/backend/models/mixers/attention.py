"""Attention with a gradient on every device, and windowed attention in blocks.

MLX's fused attention has a gradient on Metal only for more than 8 queries without sinks; its
library says "the vector kernels do not produce a logsumexp; the VJP path requires the
full-attention kernel" and "[ScaledDotProductAttentionVJP] NYI: attention sinks" (0.32.4).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import base as mlx_lm_base

from mlxtune.backend.models.packed import PackedCache, window_of

# Up to this many queries, Metal's fused attention has no gradient.
_MAX_VECTOR_QUERIES = 8
# The smallest number of queries in a block of windowed attention.
_MIN_BLOCK_QUERIES = 512
# The head sizes for which Metal's fused attention has a gradient.
_HEAD_SIZES = (64, 72, 80, 96, 128, 192, 256)


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return the output of mlx-lm's function of this name, computed so that it has a gradient.

    queries are (B, Hq, T, D), keys and values (B, Hk, S, ·). With a real cache, as in generation,
    mlx-lm's function runs.
    """
    if cache is not None and not isinstance(cache, PackedCache):
        return mlx_lm_base.scaled_dot_product_attention(
            queries, keys, values, cache, scale, mask, sinks
        )
    window = window_of(mask)
    if window is not None and queries.shape[2] > 2 * max(window, _MIN_BLOCK_QUERIES):
        return attention_in_blocks(queries, keys, values, scale, window, sinks)
    return _attention(queries, keys, values, scale, mask, sinks)


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
) -> mx.array:
    if queries.shape[2] <= _MAX_VECTOR_QUERIES:
        return composed_attention(queries, keys, values, scale, mask, sinks)
    if sinks is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    size = next((head_size for head_size in _HEAD_SIZES if head_size > queries.shape[3]), None)
    if not isinstance(mask, str) or size is None or values.shape[3] > size:
        return composed_attention(queries, keys, values, scale, mask, sinks)
    return _with_sink_key(queries, keys, values, scale, sinks, size)


def _with_sink_key(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array, size: int
) -> mx.array:
    """Return causal attention with sinks as an extra key, so that the fused kernel can run.

    Heads are widened to `size`. The first added entry of a query is its head's sink; the extra key
    has 1 there, and its value is zero:

        q' = (q, sink / scale, 0…)    k' = (k, 0, 0…)    k'_sink = (0, 1, 0…)    v'_sink = 0
    """
    rows, heads, length, width = queries.shape
    added = [(0, 0), (0, 0), (0, 0)]
    sink = mx.broadcast_to((sinks / scale).astype(queries.dtype)[:, None, None], (heads, length, 1))
    queries = mx.concatenate([queries, mx.broadcast_to(sink, (rows, heads, length, 1))], axis=-1)
    queries = mx.pad(queries, [*added, (0, size - width - 1)])
    key = mx.zeros((*keys.shape[:2], 1, size), keys.dtype)
    key[..., width] = 1
    keys = mx.concatenate([key, mx.pad(keys, [*added, (0, size - width)])], axis=2)
    # The sink comes first, so that every query sees it: causal masks align the last positions.
    out_width = values.shape[3]
    values = mx.pad(values, [(0, 0), (0, 0), (1, 0), (0, size - out_width)])
    output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
    return output[..., :out_width]


def attention_in_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return causal attention of each query to the last `window` keys, in linear time.

    A block of max(512, window) queries attends to itself and the block before:

        keys      a a a a b b b b c c c c
        block b   [. x x x x . . .]          x: keys of its first query, with a window of 4
    """
    rows, heads, length, _ = queries.shape
    size = max(window, _MIN_BLOCK_QUERIES)
    count = -(-length // size)

    def blocks(x: mx.array) -> mx.array:
        """Return blocks (B * N, H, size, ·) of x (B, H, T, ·)."""
        x = mx.pad(x, [(0, 0), (0, 0), (0, count * size - length), (0, 0)])
        x = x.reshape(rows, x.shape[1], count, size, x.shape[3]).swapaxes(1, 2)
        return x.reshape(rows * count, *x.shape[2:])

    def with_previous_block(x: mx.array) -> mx.array:
        x = blocks(x)
        before = mx.concatenate([mx.zeros_like(x[:1]), x[:-1]])
        return mx.concatenate([before, x], axis=2)

    query, key = mx.arange(size)[:, None], mx.arange(-size, size)[None]
    mask = (key <= query) & (key > query - window)
    # The first block of a row has no predecessor.
    exists = (mx.arange(count) > 0)[:, None, None] | (key >= 0)
    mask = mx.tile((mask & exists)[:, None], (rows, 1, 1, 1))
    output = _attention(
        blocks(queries), with_previous_block(keys), with_previous_block(values), scale, mask, sinks
    )
    output = output.reshape(rows, count, heads, size, -1).swapaxes(1, 2)
    return output.reshape(rows, heads, count * size, -1)[:, :, :length]


def composed_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return attention by MLX's basic operations, which keep the scores (B, Hq, T, S) in memory."""
    rows, heads, length, width = queries.shape
    groups, seen = keys.shape[1], keys.shape[2]
    queries = (queries * scale).reshape(rows, groups, -1, length, width)
    scores = queries @ keys[:, :, None].swapaxes(-1, -2)
    if isinstance(mask, str):
        mask = mx.arange(seen - length, seen)[:, None] >= mx.arange(seen)[None]
    if mask is not None:
        if mask.ndim > 3:
            mask = mask.reshape(mask.shape[0], *_head_axes(mask.shape[1], groups), *mask.shape[2:])
        lowest = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, lowest) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        column = sinks.astype(scores.dtype).reshape(1, groups, -1, 1, 1)
        column = mx.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = mx.concatenate([column, scores], axis=-1)
    probabilities = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        probabilities = probabilities[..., 1:]
    return (probabilities @ values[:, :, None]).reshape(rows, heads, length, -1)


def _head_axes(heads: int, groups: int) -> tuple[int, int]:
    """Return the lengths of a mask's two head axes, which are 1 if all heads share the mask."""
    return (1, 1) if heads == 1 else (groups, heads // groups)
