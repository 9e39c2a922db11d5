"""The gated delta rule by chunks of tokens.

Of each head, with a state S (Dv, Dk), gates g, and betas b (Yang et al., arXiv:2412.06464):

    S_t = S_{t-1} diag(g_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T,   y_t = S_t q_t

or, for the C tokens of a chunk that starts with the state S, with decay from one token to another
in `from`, `to` and between:

    (I + A) D = diag(b) (V - K_from S^T),    A = strictly lower part of diag(b) (K . K^T)
    Y = Q_from S^T + (Q . K^T) D,            S' = S diag(decay) + D^T K_to

What a chunk computes without its state runs for all chunks at once, and only D and S in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxtune.backend.models.mixers.decay import (
    ChannelDecay,
    HeadDecay,
    decay,
    sums_before,
    sums_from,
)
from mlxtune.backend.models.mixers.triangular import strictly_lower, unit_inverse

# The tokens of a chunk.
SIZE = 64


def outputs(arrays: Sequence[mx.array], state: mx.array) -> tuple[mx.array, mx.array]:
    """Return y (B, T, Hv, Dv) of q, k, v, log-gates and beta, and the state at the end, float32.

    Shapes are those of `gated_delta.gated_delta_rule`.
    """
    chunks = _Chunks.of(arrays)
    states, deltas, last = chunks.scan(chunks.state(state))
    y = chunks.q_from @ states + chunks.scores @ deltas
    return chunks.values(y, arrays[2]), chunks.from_state(last)


def gradients(
    arrays: Sequence[mx.array], start: mx.array, d_y: mx.array, d_state: mx.array
) -> list[mx.array]:
    """Return the gradients of the arrays and of the state at the start of a group of chunks."""
    chunks = _Chunks.of(arrays)
    q, k, v, beta, by_decay = chunks.q, chunks.k, chunks.v, chunks.beta, chunks.decay
    states, deltas, _ = chunks.scan(chunks.state(start))
    d_y = _split(d_y, q.shape[2])
    d_deltas, d_nexts, d_start = chunks.scan_back(d_y, chunks.state(d_state))

    error = chunks.inverse.swapaxes(-1, -2) @ d_deltas
    d_a = strictly_lower(-(error @ deltas.swapaxes(-1, -2)))
    d_beta = (error * (v - chunks.k_from @ states)).sum(-1, keepdims=True)
    d_beta += (d_a * chunks.keys).sum(-1, keepdims=True)
    d_v = beta * error

    d_q, d_k = by_decay.gradients(d_y @ deltas.swapaxes(-1, -2), q, k)
    d_later, d_earlier = by_decay.gradients(beta * d_a, k, k)
    d_q += by_decay.from_start * (d_y @ states.swapaxes(-1, -2))
    d_later -= by_decay.from_start * (d_v @ states.swapaxes(-1, -2))
    d_earlier += d_k
    d_end = by_decay.to_end * (deltas @ d_nexts.swapaxes(-1, -2))

    # A log-gate is in every decay from before it to its token or after it. Scaling x_t from the
    # start of the chunk is scaling it by what `from_start` is multiplied by.
    inner = chunks.as_gates(q * d_q + k * (d_later - d_earlier))
    ends = chunks.as_gates(k * d_end)
    whole = (states * d_nexts).sum(-1)[..., None, :]
    d_gates = sums_from(inner) + sums_before(ends)
    d_gates += chunks.as_gates(by_decay.whole * whole)

    d_k = d_later + d_earlier + d_end
    found = [d_q.sum(3, keepdims=True), d_k.sum(3, keepdims=True), d_v, d_gates, d_beta]
    joined = [chunks.values(d, x) for d, x in zip(found, arrays, strict=True)]
    return [*joined, chunks.from_state(d_start)]


@dataclass(frozen=True)
class _Chunks:
    """What the N chunks of C tokens compute without their states, for all of them at once.

    Arrays are (N, B, Hk, Hv / Hk, C, ·), float32; states (N, B, Hk, Hv / Hk, Dk, Dv).
    """

    q: mx.array
    k: mx.array
    v: mx.array
    beta: mx.array
    decay: HeadDecay | ChannelDecay
    # The products of keys, strictly lower, and of queries and keys, with decay.
    keys: mx.array
    scores: mx.array
    inverse: mx.array
    # Queries and keys with decay from the start, keys with that to the end.
    q_from: mx.array
    k_from: mx.array
    k_to: mx.array
    # Deltas for a state of zeros, and by how much each entry of the state changes them.
    own: mx.array
    by_state: mx.array

    @staticmethod
    def of(arrays: Sequence[mx.array]) -> _Chunks:
        """Compute them from q, k, v, log-gates and beta."""
        heads = arrays[0].shape[2]
        q, k, v, log_gates, beta = [_split(x, heads) for x in arrays]
        by_decay = decay(log_gates)
        if by_decay.channels:
            q, k = (mx.broadcast_to(x, log_gates.shape) for x in (q, k))
        keys = strictly_lower(by_decay.products(k, k))
        inverse = unit_inverse(beta * keys)
        k_from = k * by_decay.from_start
        return _Chunks(
            q=q,
            k=k,
            v=v,
            beta=beta,
            decay=by_decay,
            keys=keys,
            scores=by_decay.products(q, k),
            inverse=inverse,
            q_from=q * by_decay.from_start,
            k_from=k_from,
            k_to=k * by_decay.to_end,
            own=inverse @ (beta * v),
            by_state=inverse @ (beta * k_from),
        )

    def scan(self, state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the states at which the chunks start, their deltas, and the state at the end."""
        states, deltas = [], []
        k_to, whole = self.k_to.swapaxes(-1, -2), self.decay.whole.swapaxes(-1, -2)
        for i in range(len(self.own)):
            states.append(state)
            deltas.append(self.own[i] - self.by_state[i] @ state)
            state = whole[i] * state + k_to[i] @ deltas[i]
        return mx.stack(states), mx.stack(deltas), state

    def scan_back(self, d_y: mx.array, d_state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the gradients of deltas, of states where chunks end, and of that at the start."""
        from_y = self.scores.swapaxes(-1, -2) @ d_y
        to_state = self.q_from.swapaxes(-1, -2) @ d_y
        by_state, whole = self.by_state.swapaxes(-1, -2), self.decay.whole.swapaxes(-1, -2)
        d_deltas, d_ends = [], []
        for i in reversed(range(len(d_y))):
            d_ends.append(d_state)
            d_deltas.append(from_y[i] + self.k_to[i] @ d_state)
            d_state = whole[i] * d_state + to_state[i] - by_state[i] @ d_deltas[-1]
        return mx.stack(d_deltas[::-1]), mx.stack(d_ends[::-1]), d_state

    def as_gates(self, d: mx.array) -> mx.array:
        """Return the gradients of what gates multiply, by channels, as those of the gates."""
        return d if self.decay.channels else d.sum(-1, keepdims=True)

    def values(self, x: mx.array, like: mx.array) -> mx.array:
        """Return an array by chunks in the shape of `like`, (B, T, H, ·) or (B, T, H)."""
        rows, tokens = like.shape[:2]
        return x.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, *like.shape[2:])[:, :tokens]

    def state(self, state: mx.array) -> mx.array:
        """Return a state (B, Hv, Dv, Dk) as the chunks have it."""
        heads, (rows, _, *shape) = self.q.shape[2], state.shape
        return state.reshape(rows, heads, -1, *shape).swapaxes(-1, -2)

    def from_state(self, state: mx.array) -> mx.array:
        """Return a state of the chunks as (B, Hv, Dv, Dk)."""
        return state.swapaxes(-1, -2).reshape(len(state), -1, *state.shape[:2:-1])


def _split(x: mx.array, key_heads: int) -> mx.array:
    """Return an array (B, T, H, ·) or (B, T, H) by chunks, padded with zeros."""
    rows, tokens, heads = x.shape[:3]
    size = min(1 << (tokens - 1).bit_length(), SIZE)
    x = x.reshape(rows, tokens, heads, -1)
    if tokens % size:
        x = mx.pad(x, [(0, 0), (0, -tokens % size), (0, 0), (0, 0)])
    x = x.reshape(rows, -1, size, key_heads, heads // key_heads, x.shape[-1])
    x = x.transpose(1, 0, 3, 4, 2, 5).astype(mx.float32)
    # Laid out as its products read it, by a copy that MLX can export, unlike mx.contiguous.
    return x.reshape(-1).reshape(x.shape)
