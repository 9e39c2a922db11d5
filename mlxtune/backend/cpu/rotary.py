"""Rotary position embeddings on the CPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import kernels
from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, view
from mlxtune.backend.model import packed
from mlxtune.backend.model.autograd import differentiable

# Tables for lines of segments have few lengths.
_LENGTH_MULTIPLE = 256


@lru_cache(maxsize=64)
def _table(
    length: int, dims: int, offset: int, base: float | None, scale: float, freqs: bytes | None
) -> tuple[Floats, Floats]:
    """Return cosines and sines (T, dims / 2): those that MLX turns a unit vector by."""
    half = (1, 1, length, dims // 2)
    turned = mx.fast.rope(
        mx.concatenate([mx.ones(half), mx.zeros(half)], axis=-1),
        dims,
        traditional=False,
        base=base,
        scale=scale,
        offset=offset,
        freqs=None if freqs is None else mx.array(np.frombuffer(freqs, dtype=np.float32)),
    )
    cosines, sines = np.split(np.array(turned)[0, 0], 2, axis=1)
    return np.ascontiguousarray(cosines), np.ascontiguousarray(sines)


def rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: Any,
    freqs: mx.array | None = None,
) -> mx.array:
    """Return mx.fast.rope of x (B, H, T, D), by a kernel where that serves."""
    fast = not traditional and isinstance(offset, int) and x.ndim == 4
    layout = packed.layout()
    if not (fast and computes(x)):
        if layout is not None:
            raise packed.CannotPackError
        return mx.fast.rope(
            x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs
        )
    given = None if freqs is None else np.array(freqs.astype(mx.float32)).tobytes()
    if layout is None:
        cosines, sines = _table(x.shape[2], dims, offset, base, scale, given)
    else:
        length = -(-layout.longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        whole = _table(length, dims, offset, base, scale, given)
        cosines, sines = (values[layout.positions] for values in whole)

    # The projection before lays its heads out by tokens, attention after wants them by head.
    def run(x: mx.array) -> mx.array:
        source = np.ascontiguousarray(view(x).swapaxes(1, 2))
        made, lines = empty(*x.shape), source.shape[0] * source.shape[1]
        by_rows(kernels.turn, source, cosines, sines, view(made), rows=lines)
        return made

    def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        source = np.ascontiguousarray(view(cotangent))
        batch, heads, length, width = source.shape
        made = empty(batch, length, heads, width)
        by_rows(kernels.turn_back, source, cosines, sines, view(made), rows=batch * length)
        return made.transpose(0, 2, 1, 3)

    return differentiable(run, gradient)(x)
