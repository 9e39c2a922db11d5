"""Scaled dot-product attention on the CPU: blocks of queries, products by the tuned BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.autograd import differentiable
from mlxtune.backend.cpu import kernels
from mlxtune.backend.cpu.arrays import Floats, by_rows, empty, view

# Scores that are held at once, and queries of a head that are worked on at once.
_SCORES = 1 << 21
_QUERIES = 256


@dataclass(frozen=True)
class _Part:
    """Some heads of one line, some of its queries, and how many keys these can see."""

    line: int
    groups: slice
    queries: slice
    keys: int

    @property
    def count(self) -> int:
        """How many queries of each head."""
        return self.queries.stop - self.queries.start


class _Attention:
    """Attention of q (B, H, T, D) over k and v (B, G, S, D): G groups of H / G heads."""

    def __init__(self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any) -> None:
        self.batch, self.heads, self.length, _ = q.shape
        self.groups, self.keys = k.shape[1], k.shape[2]
        self.scale = np.float32(scale)
        self.causal = isinstance(mask, str)
        self.q, self.k, self.v = self.by_group(view(q)), view(k), view(v)
        self.mask = None
        if mask is not None and not self.causal:
            shape = (self.batch, self.heads, self.length, self.keys)
            self.mask = self.by_group(np.broadcast_to(_additive(mask), shape))

    def by_group(self, x: Floats) -> Floats:
        """Return x (B, H, T, n) as (B, G, H / G, T, n)."""
        return x.reshape(self.batch, self.groups, -1, *x.shape[2:])

    def parts(self) -> Iterator[_Part]:
        """Cut the scores into parts that fit."""
        repeats = self.heads // self.groups
        for start in range(0, self.length, _QUERIES):
            end = min(start + _QUERIES, self.length)
            # Queries are aligned to the end of the keys.
            seen = self.keys - self.length + end if self.causal else self.keys
            at_once = max(_SCORES // (repeats * (end - start) * seen), 1)
            for line in range(self.batch):
                for group in range(0, self.groups, at_once):
                    groups = slice(group, min(group + at_once, self.groups))
                    yield _Part(line, groups, slice(start, end), seen)

    def rows(self, x: Floats, part: _Part) -> Floats:
        """Return a part of x (B, G, H / G, T, n) as contiguous (groups, H / G * queries, n)."""
        chosen = x[part.line, part.groups, :, part.queries]
        return np.ascontiguousarray(chosen).reshape(len(chosen), -1, x.shape[-1])

    def scores(self, q: Floats, part: _Part) -> Floats:
        """Return the scores (groups, H / G * queries, keys) of scaled queries.

        They are masked by an array if there is one; what is causal is left to the softmax.
        """
        keys = self.k[part.line, part.groups, : part.keys]
        scores = q @ keys.swapaxes(1, 2)
        if self.mask is not None:
            by_query = scores.reshape(len(scores), -1, part.count, part.keys)
            by_query += self.mask[part.line, part.groups, :, part.queries]
        return scores

    def forward(self) -> mx.array:
        """Return the weighted values (B, H, T, n)."""
        # Laid out by tokens, as the next projection reads it.
        made, out = empty(self.batch, self.length, self.heads, self.v.shape[-1])
        whole = self.by_group(out.swapaxes(1, 2))
        for part in self.parts():
            weights = self.scores(self.rows(self.q, part) * self.scale, part)
            rows = weights.reshape(-1, part.keys)
            by_rows(kernels.softmax_, len(rows), rows.size, rows, part.count, self.causal)
            values = weights @ self.v[part.line, part.groups, : part.keys]
            target = whole[part.line, part.groups, :, part.queries]
            target[...] = values.reshape(target.shape)
        return made.transpose(0, 2, 1, 3)

    def backward(self, cotangent: mx.array) -> list[Floats]:
        """Return the gradients with respect to q, k and v."""
        d = self.by_group(view(cotangent))
        d_q = np.empty(self.q.shape, dtype=np.float32)
        d_k = np.zeros(self.k.shape, dtype=np.float32)
        d_v = np.zeros(self.v.shape, dtype=np.float32)
        for part in self.parts():
            at = (part.line, part.groups)
            q = self.rows(self.q, part) * self.scale
            weights, part_d = self.scores(q, part), self.rows(d, part)
            d_scores = part_d @ self.v[at][:, : part.keys].swapaxes(1, 2)
            rows, d_rows = (x.reshape(-1, part.keys) for x in (weights, d_scores))
            given = (rows, d_rows, part.count, self.causal)
            by_rows(kernels.softmax_gradient_, len(rows), rows.size, *given)
            d_v[at][:, : part.keys] += weights.swapaxes(1, 2) @ part_d
            d_k[at][:, : part.keys] += d_scores.swapaxes(1, 2) @ q
            d_scores *= self.scale
            target = d_q[part.line, part.groups, :, part.queries]
            target[...] = (d_scores @ self.k[at][:, : part.keys]).reshape(target.shape)
        return [d_q, d_k, d_v]


def _additive(mask: mx.array) -> Floats:
    given = view(mask)
    if given.dtype == np.bool_:
        return np.where(given, np.float32(0), np.finfo(np.float32).min)
    return given


def attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, *, needed: bool = True
) -> mx.array:
    """Return softmax(scale * q k^T + mask) v of shape (B, H, T, n), never holding all scores.

    q is (B, H, T, D), k (B, G, S, D) and v (B, G, S, n) with H a multiple of G; `mask` is None,
    "causal" with the queries aligned to the end of the keys, or broadcasts to (B, H, T, S). The
    value is computed lazily where it is likely not `needed`, only its gradient.
    """

    def run(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        if needed:
            return _Attention(q, k, v, scale, mask).forward()
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        q, k, v = primals
        gradients = _Attention(q, k, v, scale, mask).backward(cotangent)
        return tuple(mx.array(d.reshape(x.shape)) for d, x in zip(gradients, primals, strict=True))

    return differentiable(run, gradient)(q, k, v)
