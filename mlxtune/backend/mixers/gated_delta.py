"""The gated delta rule by chunks, in the place of mlx-lm's loop over tokens.

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
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.mixers.decay import decay
from mlxtune.backend.mixers.triangular import unit_inverse
from mlxtune.backend.model.autograd import differentiable

_CHUNK = 64
# The tokens of all rows that are computed at once, which bounds the memory of long rows.
_TOKENS = 2048


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Return what mlx-lm's function of this name does, and arguments; see there.

    Gates are computed as their logarithms, which exist for gates of 0 too.
    """
    on_gpu = mx.metal.is_available() and mx.default_device() == mx.gpu
    if use_kernel and on_gpu and k.shape[-1] % 32 == 0:
        # mlx-lm's kernel, which has no gradient.
        return mlx_lm_gated_delta.gated_delta_update(
            *(q, k, v, a, b, A_log, dt_bias, state, mask),
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )
    rate, x = mx.exp(A_log.astype(mx.float32)), a.astype(mx.float32) + dt_bias
    log_gates = (
        -rate * nn.softplus(x) if lower_bound is None else lower_bound * mx.sigmoid(rate * x)
    )
    beta = mx.sigmoid(b.astype(mx.float32)) * (2 if allow_neg_eigval else 1)
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0)
        log_gates = mx.where(mask.reshape(*mask.shape, *[1] * (log_gates.ndim - 2)), log_gates, 0)
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]))
    return gated_delta_rule(q, k, v, log_gates, beta, state)


def gated_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_gates: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return y (B, T, Hv, Dv), in q's dtype, and the state (B, Hv, Dv, Dk) at the end, float32.

    q and k are (B, T, Hk, Dk), v is (B, T, Hv, Dv), where Hv is a multiple of Hk; log-gates are
    (B, T, Hv), or (B, T, Hv, Dk) with a gate for each channel; beta is (B, T, Hv). For the gradient
    only the inputs are kept, and the states at which groups of chunks start.
    """
    groups = _groups(*q.shape[:2])

    def forward(*inputs: mx.array) -> list[mx.array]:
        *arrays, state = inputs
        outputs, starts = [], []
        for group in groups:
            starts.append(state)
            chunks = _Chunks.of([x[:, group] for x in arrays])
            states, deltas, last = chunks.scan(chunks.state(state))
            y = chunks.values(chunks.outputs(states, deltas), arrays[2][:, group])
            outputs.append(y.astype(arrays[0].dtype))
            # One group after the other, so that only one is in memory.
            state = mx.depends([chunks.from_state(last)], [y])[0]
        return [mx.concatenate(outputs, axis=1), state, *starts[1:]]

    def backward(primals: Any, cotangents: Any, kept: Any) -> list[mx.array]:
        *arrays, state = primals
        starts, d_state = [state, *kept[2:]], cotangents[1]
        found = []
        for group, start in zip(reversed(groups), reversed(starts), strict=True):
            given = [x[:, group] for x in arrays]
            *gradients, d_state = _group_gradients(given, start, cotangents[0][:, group], d_state)
            gradients = [d.astype(x.dtype) for d, x in zip(gradients, given, strict=True)]
            d_state = mx.depends([d_state], gradients)[0]
            found.append(gradients)
        whole = zip(*reversed(found), strict=True)
        return [*(mx.concatenate(list(each), axis=1) for each in whole), d_state]

    y, state, *_ = differentiable(forward, backward)(q, k, v, log_gates, beta, state)
    return y, state


def _groups(rows: int, tokens: int) -> list[slice]:
    size = max(_TOKENS // (rows * _CHUNK), 1) * _CHUNK
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _group_gradients(
    arrays: Sequence[mx.array], start: mx.array, d_y: mx.array, d_state: mx.array
) -> list[mx.array]:
    """Return the gradients of the arrays and of the state at the start of a group of chunks."""
    chunks = _Chunks.of(arrays)
    q, k, v, beta, by_decay = chunks.q, chunks.k, chunks.v, chunks.beta, chunks.decay
    states, deltas, _ = chunks.scan(chunks.state(start))
    d_y = chunks.split(d_y)
    d_deltas, d_nexts, d_start = chunks.scan_back(d_y, chunks.state(d_state))

    error = chunks.inverse.swapaxes(-1, -2) @ d_deltas
    d_a = mx.tri(q.shape[-2], q.shape[-2], -1) * -(error @ deltas.swapaxes(-1, -2))
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
    d_gates = mx.cumsum(inner, axis=-2, reverse=True) + mx.cumsum(ends, axis=-2, inclusive=False)
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
    decay: Any
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
        keys = mx.tri(q.shape[-2], q.shape[-2], -1) * by_decay.products(k, k)
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

    def outputs(self, states: mx.array, deltas: mx.array) -> mx.array:
        """Return y."""
        return self.q_from @ states + self.scores @ deltas

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

    def split(self, x: mx.array) -> mx.array:
        """Return an array (B, T, Hv, ·) by chunks."""
        return _split(x, self.q.shape[2])

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
    size = min(1 << (tokens - 1).bit_length(), _CHUNK)
    x = mx.pad(x.reshape(rows, tokens, heads, -1), [(0, 0), (0, -tokens % size), (0, 0), (0, 0)])
    x = x.reshape(rows, -1, size, key_heads, heads // key_heads, x.shape[-1])
    return mx.contiguous(x.transpose(1, 0, 3, 4, 2, 5).astype(mx.float32))
