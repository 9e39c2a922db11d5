"""The work between projections and attention as one kernel each way, for Metal and CUDA.

Projections run on the sequence of a packed micro-batch, and attention on its examples side by side.
One kernel moves queries, keys and values between the two, normalises each head of the queries and
keys if the model does, and applies the rotary embedding:

    queries, keys, values    (1, N, ·)          side by side    (B, T, heads, D)

Its gradient is one kernel too, which adds the gradients of a token that several examples share, in
a fixed order. A third kernel moves attention's output back to the sequence, and its gradient to the
examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.forward.kernels.device_kernels import (
    TOLERANCES,
    KernelSource,
    Language,
    Make,
)
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.packed import Layout

# The threads of a group; 32 lanes share a head of a token.
_GROUP, _LANES = 256, 32
# The largest head for which the lanes keep all entries in registers.
_MAX_HEAD_SIZE = 256
# Kernels index elements and threads with 32-bit integers.
_MAX_INDEX = 2**31 - 1

# The entries of a head that a lane reads, in PACK neighbours at a time, and what both kernels need
# to know of it: whether it holds queries or keys, which are normalised and rotated, and the address
# of its entries. `turns` has the cosine and sine of each position and pair of entries, `norms` the
# weights of the two norms and then their epsilons.
_HEAD = """
    constexpr int heads = QUERIES + 2 * KEYS;
    constexpr int steps = (SIZE + 32 * PACK - 1) / (32 * PACK);
    const unsigned int item = $thread / 32;
    const unsigned int head = item % heads;
    const bool is_query = head < QUERIES, is_value = head >= QUERIES + KEYS;
    const unsigned int own = is_query ? head : (head - QUERIES) % KEYS;
    const unsigned int width = is_query ? QUERIES : KEYS;
    const unsigned int weights = is_query ? 0 : SIZE;
    const float epsilon = norms[2 * SIZE + (is_query ? 0 : 1)];
"""

_FORWARD = KernelSource(
    "mlxtune_heads",
    ("queries", "keys", "values", "rows", "turns", "norms"),
    ("out_queries", "out_keys", "out_values"),
    _HEAD
    + """
    const unsigned int row = item / heads;
    if (row >= rows_shape[0] * rows_shape[1]) return;
    const unsigned int token = rows[row], position = row % rows_shape[1];
    $space const T* from = is_query ? queries : is_value ? values : keys;
    $space T* to = is_query ? out_queries : is_value ? out_values : out_keys;
    from += (token * width + own) * SIZE;
    to += (row * width + own) * SIZE;

    float x[steps * PACK];
    float squares = 0.0f;
    for (int step = 0; step < steps; ++step) {
      const unsigned int at = (step * 32 + $lane) * PACK;
      const auto pack = mlxtune::load<PACK>(from, at, SIZE);
      for (int i = 0; i < PACK; ++i) {
        x[step * PACK + i] = static_cast<float>(pack.at[i]);
        squares += x[step * PACK + i] * x[step * PACK + i];
      }
    }
    float scale = 1.0f;
    if (NORM) scale = mlxtune::rsqrt(mlxtune::lane_sum(squares) / SIZE + epsilon);

    for (int step = 0; step < steps; ++step) {
      const unsigned int at = (step * 32 + $lane) * PACK;
      if (at >= SIZE) continue;
      mlxtune::Pack<T, PACK> pack;
      if (is_value) {
        for (int i = 0; i < PACK; ++i) pack.at[i] = static_cast<T>(x[step * PACK + i]);
      } else {
        const bool first = at < ROTATED / 2;
        const bool turned = at < ROTATED;
        const unsigned int other = !turned ? at : first ? at + ROTATED / 2 : at - ROTATED / 2;
        const unsigned int pair = (position * (ROTATED / 2) + (first ? at : other)) * 2;
        const auto partner = mlxtune::load<PACK>(from, other, SIZE);
        for (int i = 0; i < PACK; ++i) {
          float mine = x[step * PACK + i] * scale;
          float others = static_cast<float>(partner.at[i]) * scale;
          if (NORM) {
            mine *= norms[weights + at + i];
            others *= norms[weights + other + i];
          }
          if (turned) {
            const float cosine = turns[pair + 2 * i], sine = turns[pair + 2 * i + 1];
            mine = mine * cosine + (first ? -others : others) * sine;
          }
          pack.at[i] = static_cast<T>(mine);
        }
      }
      mlxtune::store<PACK>(to, at, SIZE, pack);
    }
""",
)

# `starts` and `places` list, for each token of the sequence, its places side by side.
_BACKWARD = KernelSource(
    "mlxtune_heads_vjp",
    (
        *("queries", "keys", "from_queries", "from_keys", "from_values"),
        *("starts", "places", "positions", "turns", "norms"),
    ),
    ("d_queries", "d_keys", "d_values"),
    _HEAD
    + """
    const unsigned int token = item / heads;
    if (token >= positions_shape[0]) return;
    const unsigned int position = positions[token];
    $space const T* from = is_query ? from_queries : is_value ? from_values : from_keys;
    $space const T* input = is_query ? queries : keys;
    $space T* to = is_query ? d_queries : is_value ? d_values : d_keys;
    input += (token * width + own) * SIZE;
    to += (token * width + own) * SIZE;

    float d[steps * PACK];
    float x[steps * PACK];
    float squares = 0.0f, product = 0.0f;
    for (int step = 0; step < steps; ++step) {
      const unsigned int at = (step * 32 + $lane) * PACK;
      const bool first = at < ROTATED / 2;
      const bool turned = at < ROTATED && !is_value;
      const unsigned int other = !turned ? at : first ? at + ROTATED / 2 : at - ROTATED / 2;
      const unsigned int pair = (position * (ROTATED / 2) + (first ? at : other)) * 2;
      float others[PACK];
      for (int i = 0; i < PACK; ++i) d[step * PACK + i] = others[i] = 0.0f;
      for (int each = starts[token]; each < starts[token + 1]; ++each) {
        const unsigned int base = (places[each] * width + own) * SIZE;
        const auto mine = mlxtune::load<PACK>(from + base, at, SIZE);
        for (int i = 0; i < PACK; ++i) d[step * PACK + i] += static_cast<float>(mine.at[i]);
        if (turned) {
          const auto partner = mlxtune::load<PACK>(from + base, other, SIZE);
          for (int i = 0; i < PACK; ++i) others[i] += static_cast<float>(partner.at[i]);
        }
      }
      if (turned) {
        for (int i = 0; i < PACK; ++i) {
          const float cosine = turns[pair + 2 * i], sine = turns[pair + 2 * i + 1];
          const float other_part = (first ? others[i] : -others[i]) * sine;
          d[step * PACK + i] = d[step * PACK + i] * cosine + other_part;
        }
      }
      if (NORM && !is_value) {
        const auto pack = mlxtune::load<PACK>(input, at, SIZE);
        for (int i = 0; i < PACK; ++i) {
          const float value = static_cast<float>(pack.at[i]);
          x[step * PACK + i] = value;
          squares += value * value;
          if (at < SIZE) d[step * PACK + i] *= norms[weights + at + i];
          product += d[step * PACK + i] * value;
        }
      }
    }
    if (NORM && !is_value) {
      // The gradient of x * scale, where scale = 1 / sqrt(mean(x^2) + epsilon).
      const float scale = mlxtune::rsqrt(mlxtune::lane_sum(squares) / SIZE + epsilon);
      const float slope = scale * scale * scale * mlxtune::lane_sum(product) / SIZE;
      for (int i = 0; i < steps * PACK; ++i) d[i] = d[i] * scale - x[i] * slope;
    }
    for (int step = 0; step < steps; ++step) {
      mlxtune::Pack<T, PACK> pack;
      for (int i = 0; i < PACK; ++i) pack.at[i] = static_cast<T>(d[step * PACK + i]);
      mlxtune::store<PACK>(to, (step * 32 + $lane) * PACK, SIZE, pack);
    }
""",
)

# Rows of `x`, SIZE entries each, by index; a row of zeros where the index is -1.
_ROWS = KernelSource(
    "mlxtune_rows",
    ("x", "index"),
    ("out",),
    """
    constexpr unsigned int packs = SIZE / PACK;
    const unsigned int row = $thread / packs, at = ($thread % packs) * PACK;
    if (row >= index_shape[0]) return;
    const int from = index[row];
    mlxtune::Pack<T, PACK> pack;
    if (from < 0) {
      for (int i = 0; i < PACK; ++i) pack.at[i] = static_cast<T>(0.0f);
    } else {
      pack = mlxtune::load<PACK>(x + from * SIZE, at, SIZE);
    }
    mlxtune::store<PACK>(out + row * SIZE, at, SIZE, pack);
""",
)


@dataclass(frozen=True)
class HeadSizes:
    """The numbers of query heads and of key heads, their size, and how many entries are rotated.

    The first `rotated` entries of a head are rotated in pairs (i, i + rotated / 2).
    """

    queries: int
    keys: int
    size: int
    rotated: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of query, key and value heads."""
        return self.queries, self.keys, self.keys

    @property
    def is_supported(self) -> bool:
        """Whether the kernels support heads of these sizes."""
        return 0 < self.rotated <= self.size <= _MAX_HEAD_SIZE and self.rotated % 2 == 0

    @property
    def pack(self) -> int:
        """The number of neighbouring entries that a lane reads at once."""
        return next(
            each
            for each in (8, 4, 2, 1)
            if self.size % each == 0
            and self.rotated // 2 % each == 0
            and (each == 1 or self.size >= _LANES * each)
        )


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of an attention layer, and the work between its projections and attention.

    `frequencies` are the angles by which each pair of entries turns from one position to the next,
    float32 (rotated / 2,). `norms`, float32 (2 * size + 2,), has the weights of the norms of
    queries and of keys, and then their epsilons; None if heads are not normalised.
    """

    sizes: HeadSizes
    frequencies: tuple[float, ...]
    norms: mx.array | None = None


class AttentionKernels:
    """The kernels around attention, made for one language."""

    def __init__(self, language: Language, make: Make) -> None:
        self._heads = _FORWARD.make(language, make)
        self._heads_vjp = _BACKWARD.make(language, make)
        self._rows = _ROWS.make(language, make)
        self._turns: dict[tuple[float, ...], mx.array] = {}
        self._width = language.width

    def padded(
        self, heads: Heads, layout: Layout, queries: mx.array, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values (1, N, ·) as attention takes them, (B, heads, T, D)."""
        sizes = heads.sizes
        counts = sizes.counts
        template = _template(queries.dtype, sizes, normalized=heads.norms is not None)
        turns = self._turns_of(heads, layout.shape[1])
        norms = _no_norms(sizes.size) if heads.norms is None else heads.norms

        def forward(*projected: mx.array) -> list[mx.array]:
            items = math.prod(layout.shape) * sum(counts)
            shapes = [(*layout.shape, count, sizes.size) for count in counts]
            return self._run(
                self._heads,
                [*projected, layout.padded_indices, turns, norms],
                template,
                items,
                shapes,
            )

        def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            tokens = len(layout.positions)
            # Without norms, the gradient does not depend on the inputs.
            inputs = cotangents[:2] if heads.norms is None else primals[:2]
            arrays = [*inputs, *cotangents, *layout.every_index, layout.token_positions]
            shapes = [(1, tokens, count * sizes.size) for count in counts]
            return self._run(
                self._heads_vjp, [*arrays, turns, norms], template, tokens * sum(counts), shapes
            )

        gathered = differentiable(forward, backward)(queries, keys, values)
        # In memory, heads follow each other within a token, as the kernels read and write them.
        q, k, v = (array.swapaxes(1, 2) for array in gathered)
        return q, k, v

    def packed(self, layout: Layout, output: mx.array) -> mx.array:
        """Return attention's output (B, heads, T, D) on the sequence, (1, N, heads * D)."""
        width = output.shape[1] * output.shape[3]

        def forward(output: mx.array) -> mx.array:
            return self._selected(
                output, layout.flat_indices, width, (1, len(layout.positions), width)
            )

        def backward(primal: mx.array, cotangent: mx.array, _: Any) -> mx.array:
            return self._selected(cotangent, layout.owners, width, primal.shape)

        result: mx.array = differentiable(forward, backward)(output.swapaxes(1, 2))
        return result

    def _turns_of(self, heads: Heads, length: int) -> mx.array:
        """Return cosines and sines, float32 (L, pairs, 2), for L >= `length` positions."""
        turns = self._turns.get(heads.frequencies)
        if turns is None or len(turns) < length:
            longest = max(length, 0 if turns is None else 2 * len(turns))
            # MLX multiplies in float32 too.
            positions = np.arange(longest, dtype=np.float32)
            angles = positions[:, None] * np.array(heads.frequencies, dtype=np.float32)
            turns = mx.array(np.stack([np.cos(angles), np.sin(angles)], axis=-1))
            self._turns[heads.frequencies] = turns
        return turns

    def _selected(
        self, x: mx.array, index: mx.array, width: int, shape: tuple[int, ...]
    ) -> mx.array:
        """Return rows of `width` entries by index in an array of this shape."""
        pack = math.gcd(width, self._width // x.dtype.size)
        output: mx.array = self._rows(
            inputs=[x, index],
            template=[("T", x.dtype), ("SIZE", width), ("PACK", pack)],
            grid=(len(index) * (width // pack), 1, 1),
            threadgroup=(_GROUP, 1, 1),
            output_shapes=[shape],
            output_dtypes=[x.dtype],
        )[0]
        return output

    def _run(
        self,
        kernel: Any,
        arrays: Sequence[mx.array],
        template: list[tuple[str, Any]],
        items: int,
        shapes: Sequence[tuple[int, ...]],
    ) -> list[mx.array]:
        dtype = template[0][1]
        result: list[mx.array] = kernel(
            inputs=list(arrays),
            template=template,
            grid=(items * _LANES, 1, 1),
            threadgroup=(_GROUP, 1, 1),
            output_shapes=shapes,
            output_dtypes=[dtype] * len(shapes),
        )
        return result


def plain_padded(
    heads: Heads, layout: Layout, queries: mx.array, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Return what `AttentionKernels.padded` returns, computed by MLX's operations."""
    sizes, norms = heads.sizes, heads.norms
    periods = 1 / mx.array(heads.frequencies)

    def moved(packed: mx.array, count: int) -> mx.array:
        selected = packed.reshape(-1, packed.shape[-1])[layout.padded_indices]
        return selected.reshape(*layout.shape, count, sizes.size)

    def rotated(x: mx.array, first: int) -> mx.array:
        if norms is not None:
            weights = norms[first * sizes.size :][: sizes.size].astype(x.dtype)
            x = mx.fast.rms_norm(x, weights, float(norms[2 * sizes.size + first]))
        rotate: Any = partial(mx.fast.rope, traditional=False, base=None, scale=1.0, offset=0)
        turned: mx.array = rotate(x.swapaxes(1, 2), sizes.rotated, freqs=periods)
        return turned

    return (
        rotated(moved(queries, sizes.queries), 0),
        rotated(moved(keys, sizes.keys), 1),
        moved(values, sizes.keys).swapaxes(1, 2),
    )


def plain_packed(layout: Layout, output: mx.array) -> mx.array:
    """Return what `AttentionKernels.packed` returns, computed by MLX's operations."""
    return output.swapaxes(1, 2).reshape(math.prod(layout.shape), -1)[layout.flat_indices][None]


def supports_attention(heads: Heads, layout: Layout, arrays: Sequence[mx.array]) -> bool:
    """Return whether the kernels support these queries, keys and values."""
    dtypes = {array.dtype for array in arrays}
    tokens = max(math.prod(layout.shape), len(layout.positions))
    threads = tokens * sum(heads.sizes.counts) * max(_LANES, heads.sizes.size)
    return len(dtypes) == 1 and dtypes <= TOLERANCES.keys() and threads < _MAX_INDEX


@cache
def _no_norms(size: int) -> mx.array:
    """Return an array in place of the norms of heads that have none."""
    return mx.array(np.zeros(2 * size + 2, dtype=np.float32))


def _template(dtype: mx.Dtype, sizes: HeadSizes, *, normalized: bool) -> list[tuple[str, Any]]:
    return [
        ("T", dtype),
        ("QUERIES", sizes.queries),
        ("KEYS", sizes.keys),
        ("SIZE", sizes.size),
        ("ROTATED", sizes.rotated),
        ("PACK", sizes.pack),
        ("NORM", normalized),
    ]
