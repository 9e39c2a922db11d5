"""Activations, norms, rotary embeddings and attention in float32, by kernels and BLAS."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import numba_kernels
from mlxtune.backend.cpu.arrays import (
    THREADS,
    Floats,
    computes,
    empty,
    in_blocks,
    matrix,
    multiplied,
    on_threads,
    view,
)
from mlxtune.backend.cpu.kernel_layers import (
    ATTENTION_QUERIES,
    ATTENTION_SCORES,
    nan_placeholder,
    reads_attention,
    reads_gate,
)
from mlxtune.backend.models import packed
from mlxtune.backend.models.autograd import differentiable

# Table lengths for packed sequences are rounded up to a multiple of this, so that few tables are
# needed.
_LENGTH_MULTIPLE = 256


def _with_gradient(
    kernel: Any,
    gradient_kernel: Any,
    inputs: Sequence[mx.array],
    *constants: Any,
    is_read: bool = True,
) -> mx.array:
    """Apply `kernel` to inputs of one shape; `gradient_kernel` computes the gradients.

    `kernel` takes (start, end, *inputs, out, *constants), `gradient_kernel` (start, end, *inputs,
    cotangent, one gradient for each input, *constants). Without `is_read`, the output is not
    computed.
    """

    def run(*arrays: mx.array) -> mx.array:
        if not is_read:
            return nan_placeholder(*arrays[0].shape)
        outputs = empty(*arrays[0].shape)
        in_blocks(kernel, *map(matrix, (*arrays, outputs)), *constants)
        return outputs

    def gradient(primals: Any, cotangent: mx.array, output: Any) -> Any:
        primals = primals if isinstance(primals, tuple | list) else (primals,)
        outputs = [empty(*x.shape) for x in primals]
        in_blocks(gradient_kernel, *map(matrix, (*primals, cotangent, *outputs)), *constants)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    return differentiable(run, gradient)(*inputs)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x."""
    return _with_gradient(
        numba_kernels.swiglu, numba_kernels.swiglu_gradient, (gate, x), is_read=reads_gate()
    )


def geglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return gelu_approx(gate) * x."""
    return _with_gradient(
        numba_kernels.geglu, numba_kernels.geglu_gradient, (gate, x), is_read=reads_gate()
    )


def tanh(x: mx.array) -> mx.array:
    """Return the hyperbolic tangent of each entry."""
    return _with_gradient(numba_kernels.tanh, numba_kernels.tanh_gradient, (x,))


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return x / rms(x) * weight over the last axis; the weight is frozen."""
    constants = np.array(weight.astype(mx.float32)), np.float32(eps)
    return _with_gradient(numba_kernels.rms_norm, numba_kernels.rms_norm_gradient, (x,), *constants)


@lru_cache(maxsize=64)
def _table(
    length: int, dims: int, offset: int, base: float | None, scale: float, freqs: bytes | None
) -> tuple[Floats, Floats]:
    """Return the cosines and sines (T, dims / 2) of MLX's rotary embedding at T positions."""
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
    """Return mx.fast.rope of x (B, H, T, D), by a kernel if it supports x."""
    fast = not traditional and isinstance(offset, int) and x.ndim == 4
    layout = packed.layout()
    if not (fast and computes(x)):
        packed.check_not_packed()
        return mx.fast.rope(
            x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs
        )
    frequencies = None if freqs is None else np.array(freqs.astype(mx.float32)).tobytes()
    if layout is None:
        cosines, sines = _table(x.shape[2], dims, offset, base, scale, frequencies)
    else:
        length = -(-layout.longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        whole = _table(length, dims, offset, base, scale, frequencies)
        cosines, sines = (values[layout.positions] for values in whole)

    # The projection before the rotation orders memory by token, the attention after it by head.
    def run(x: mx.array) -> mx.array:
        source = np.ascontiguousarray(view(x).swapaxes(1, 2))
        rotated, count = empty(*x.shape), source.shape[0] * source.shape[1]
        in_blocks(numba_kernels.turn, source, cosines, sines, view(rotated), count=count)
        return rotated

    def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        source = np.ascontiguousarray(view(cotangent))
        batch, heads, length, width = source.shape
        rotated = empty(batch, length, heads, width)
        in_blocks(
            numba_kernels.turn_back, source, cosines, sines, view(rotated), count=batch * length
        )
        return rotated.transpose(0, 2, 1, 3)

    return differentiable(run, gradient)(x)


@dataclass(frozen=True)
class _AttentionPart:
    """A block of groups and queries of one sequence, and the ranges of keys that the queries
    see.
    """

    batch_index: int
    groups: slice
    queries: slice
    keys: tuple[slice, ...]

    @property
    def count(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def seen(self) -> int:
        return sum(at.stop - at.start for at in self.keys)


class _Attention:
    """Attention of q (B, H, T, D) over k (B, G, S, D) and v (B, G, S, n), in G groups of heads."""

    def __init__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scale: float,
        mask: Any,
        layout: packed.Layout | None,
    ) -> None:
        self.batch, self.heads, self.length, _ = q.shape
        self.groups, self.keys = k.shape[1], k.shape[2]
        self.scale = np.float32(scale)
        self.causal = isinstance(mask, str)
        self.layout = layout
        self.q, self.k, self.v = self.by_group(view(q)), view(k), view(v)
        self.mask = None
        if mask is not None and not self.causal:
            shape = (self.batch, self.heads, self.length, self.keys)
            self.mask = self.by_group(np.broadcast_to(_additive(mask), shape))

    def by_group(self, x: Floats) -> Floats:
        """Return x (B, H, T, n) as (B, G, H / G, T, n)."""
        return x.reshape(self.batch, self.groups, -1, *x.shape[2:])

    def blocks(self) -> Iterator[tuple[int, slice, tuple[slice, ...]]]:
        if self.layout is not None:
            for segment in self.layout.segments:
                before = self.layout.before(segment)
                for start in range(segment.start, segment.end, ATTENTION_QUERIES):
                    end = min(start + ATTENTION_QUERIES, segment.end)
                    yield 0, slice(start, end), (*before, slice(segment.start, end))
            return
        for start in range(0, self.length, ATTENTION_QUERIES):
            end = min(start + ATTENTION_QUERIES, self.length)
            # Queries are aligned to the end of the keys.
            seen = self.keys - self.length + end if self.causal else self.keys
            for batch_index in range(self.batch):
                yield batch_index, slice(start, end), (slice(0, seen),)

    def for_each_part(self, compute: Callable[[_AttentionPart], None]) -> None:
        """Call `compute` for every part. Threads divide the groups if each thread can take one."""

        def run_those(_: int, first: int, last: int) -> None:
            for batch_index, queries, keys in self.blocks():
                whole = _AttentionPart(batch_index, slice(first, last), queries, keys)
                scores = self.heads // self.groups * whole.count * whole.seen
                at_once = max(ATTENTION_SCORES // (scores * (THREADS if shared else 1)), 1)
                for group in range(first, last, at_once):
                    compute(replace(whole, groups=slice(group, min(group + at_once, last))))

        shared = self.groups >= THREADS
        on_threads(run_those, self.groups) if shared else run_those(0, 0, self.groups)

    def block_of(self, x: Floats, part: _AttentionPart) -> Floats:
        """Return a part of x (B, G, H / G, T, n) as contiguous (groups, H / G * queries, n)."""
        selected = x[part.batch_index, part.groups, :, part.queries]
        return np.ascontiguousarray(selected).reshape(len(selected), -1, x.shape[-1])

    def seen(self, x: Floats, part: _AttentionPart) -> Floats:
        """Return the keys of x (B, G, S, n) that a part sees: (groups, keys, n)."""
        pieces = [x[part.batch_index, part.groups, at] for at in part.keys]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def add_seen(self, into: Floats, part: _AttentionPart, values: Floats) -> None:
        """Add values (groups, keys, n) to the keys of `into` (B, G, S, n) that a part sees."""
        start = 0
        for at in part.keys:
            end = start + at.stop - at.start
            into[part.batch_index, part.groups, at] += values[:, start:end]
            start = end

    def scores(self, q: Floats, part: _AttentionPart) -> Floats:
        """Return the scores (groups, H / G * queries, keys) of scaled queries.

        This method adds an array mask; the softmax applies a causal mask.
        """
        scores = multiplied(q, self.seen(self.k, part).swapaxes(1, 2))
        if self.mask is not None:
            by_query = scores.reshape(len(scores), -1, part.count, part.seen)
            by_query += self.mask[part.batch_index, part.groups, :, part.queries]
        return scores

    def forward(self) -> mx.array:
        # Memory is ordered by token, as the next projection reads it.
        output = empty(self.batch, self.length, self.heads, self.v.shape[-1])
        whole = self.by_group(view(output).swapaxes(1, 2))

        def run(part: _AttentionPart) -> None:
            weights = self.scores(self.block_of(self.q, part) * self.scale, part)
            rows = weights.reshape(-1, part.seen)
            in_blocks(numba_kernels.softmax_, rows, part.count, self.causal)
            values = multiplied(weights, self.seen(self.v, part))
            block = whole[part.batch_index, part.groups, :, part.queries]
            block[...] = values.reshape(block.shape)

        self.for_each_part(run)
        return output.transpose(0, 2, 1, 3)

    def backward(self, cotangent: mx.array) -> list[Floats]:
        d = self.by_group(view(cotangent))
        d_q = np.empty(self.q.shape, dtype=np.float32)
        d_k = np.zeros(self.k.shape, dtype=np.float32)
        d_v = np.zeros(self.v.shape, dtype=np.float32)

        def run(part: _AttentionPart) -> None:
            q = self.block_of(self.q, part) * self.scale
            weights, part_d = self.scores(q, part), self.block_of(d, part)
            d_scores = multiplied(part_d, self.seen(self.v, part).swapaxes(1, 2))
            rows, d_rows = (x.reshape(-1, part.seen) for x in (weights, d_scores))
            in_blocks(numba_kernels.softmax_gradient_, rows, d_rows, part.count, self.causal)
            self.add_seen(d_v, part, multiplied(weights.swapaxes(1, 2), part_d))
            self.add_seen(d_k, part, multiplied(d_scores.swapaxes(1, 2), q))
            block = d_q[part.batch_index, part.groups, :, part.queries]
            block[...] = multiplied(d_scores, self.seen(self.k, part)).reshape(block.shape)

        self.for_each_part(run)
        d_q *= self.scale
        return [d_q, d_k, d_v]


def _additive(mask: mx.array) -> Floats:
    if mask.dtype == mx.bool_:
        return np.where(view(mask), np.float32(0), np.finfo(np.float32).min)
    return view(mask)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any) -> mx.array:
    """Return softmax(scale * q k^T + mask) v, (B, H, T, n), from one block of scores at a time.

    q is (B, H, T, D), k (B, G, S, D) and v (B, G, S, n) with H a multiple of G; `mask` is None,
    "causal" with the queries aligned to the end of the keys, or an array that broadcasts to
    (B, H, T, S).
    """
    # The layout is kept, because another sequence may be running by the time of the backward pass.
    layout = packed.layout()
    if not isinstance(mask, str):
        packed.check_not_packed()

    def run(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        if not reads_attention():
            return nan_placeholder(*q.shape[:-1], v.shape[-1])
        return _Attention(q, k, v, scale, mask, layout).forward()

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        q, k, v = primals
        gradients = _Attention(q, k, v, scale, mask, layout).backward(cotangent)
        return tuple(mx.array(d.reshape(x.shape)) for d, x in zip(gradients, primals, strict=True))

    return differentiable(run, gradient)(q, k, v)
