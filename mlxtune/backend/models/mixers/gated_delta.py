"""The gated delta rule in MLX's kernels or in chunks of tokens, instead of mlx-lm's loop.

With a gate for each head and token, the rule is computed in chunks. For each head, with a state S
(Dv, Dk), gates g and betas b (Yang et al., arXiv:2412.06464):

    S_t = g_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T,   y_t = S_t q_t

or, for the C tokens of a chunk that starts with the state S, where `from` includes the decay since
the chunk's start, `to` the decay until the chunk's end, and `.` the decay between two tokens:

    (I + A) D = diag(b) (V - K_from S^T),    A = strictly lower part of diag(b) (K . K^T)
    Y = Q_from S^T + (Q . K^T) D,            S' = S decay + D^T K_to

The terms without S are computed for all chunks together; only D and S are computed in order.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.device.default_device import has_metal
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers.recurrences import by_blocks

# The number of tokens in a chunk.
SIZE = 64
# The logarithm used for a zero gate: sums with it stay finite, and their exponentials are 0.
_MIN_LOG_DECAY = -1e4
# Up to this size, the power series is as accurate as substitution: no coefficient exceeds 3.
_MIN_CHUNK = 4
# The number of tokens, over all rows, computed together; it bounds the memory of long rows.
_TOKENS = 2048
# The head size, and the numbers of key and value heads, for which mlx.metallib 0.32.4 has the
# kernels `seq_gated_delta_*` and `gated_delta_fused_*` with `_vjp_` in their names. CUDA has no
# such kernels.
_KERNEL_SIZE = 128
_KERNEL_HEAD_COUNTS = {(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)}


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
    """Return the result of mlx-lm's function of this name, with its arguments.

    The gates are computed as logarithms, which `delta_rule` takes.
    """
    if use_kernel and _on_metal() and k.shape[-1] % 32 == 0:
        # mlx-lm's kernel, which has no gradient (mlx-lm#482).
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
    if log_gates.ndim > 3:
        # Kimi Linear has a gate for each channel, and uses mlx-lm's loop over tokens.
        loop, gates = mlx_lm_gated_delta.gated_delta_ops, mx.exp(log_gates)
        return by_blocks(loop, (q, k, v, gates, beta), state, SIZE)
    if _has_kernel(k, v):
        y, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_gates), beta, state)
        return y, state
    return by_chunks(q, k, v, log_gates, beta, state)


def by_chunks(*arrays: Any) -> tuple[mx.array, mx.array]:
    """Return the result of `delta_rule`; the backward pass recomputes a few chunks at a time."""
    *inputs, state = arrays
    tokens = max(_TOKENS // (len(state) * SIZE), 1) * SIZE
    return by_blocks(delta_rule, inputs, state, tokens)


def _has_kernel(k: mx.array, v: mx.array) -> bool:
    heads, sizes = (k.shape[2], v.shape[2]), {k.shape[3], v.shape[3]}
    return _on_metal() and heads in _KERNEL_HEAD_COUNTS and sizes == {_KERNEL_SIZE}


def _on_metal() -> bool:
    return has_metal() and mx.default_device() == mx.gpu


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_gates: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return y (B, T, Hv, Dv), in q's dtype, and the state (B, Hv, Dv, Dk) at the end, float32.

    q and k are (B, T, Hk, Dk), v is (B, T, Hv, Dv), where Hv is a multiple of Hk; log-gates and
    beta are (B, T, Hv).
    """
    (rows, tokens, heads, _), dtype = q.shape, q.dtype
    last = state.reshape(rows, heads, -1, *state.shape[2:]).swapaxes(-1, -2).astype(mx.float32)
    q, k, values, log_gates, beta = (_chunks(x, heads) for x in (q, k, v, log_gates, beta))
    from_start, between = _decays(mx.maximum(log_gates, _MIN_LOG_DECAY))
    to_end, whole = between[..., -1, :, None], from_start[..., -1:, :]
    pairs = k.swapaxes(-1, -2)
    inverse = _unit_inverse(beta * _strictly_lower(between * (k @ pairs)))
    own, by_state = inverse @ (beta * values), inverse @ (beta * k * from_start)
    k_to = (k * to_end).swapaxes(-1, -2)
    states, deltas = [], []
    for i in range(len(own)):
        states.append(last)
        deltas.append(own[i] - by_state[i] @ last)
        last = whole[i] * last + k_to[i] @ deltas[i]
    y = (q * from_start) @ mx.stack(states) + (between * (q @ pairs)) @ mx.stack(deltas)
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, *v.shape[2:])[:, :tokens]
    return y.astype(dtype), last.swapaxes(-1, -2).reshape(state.shape)


def _chunks(x: mx.array, key_heads: int) -> mx.array:
    """Return an array (B, T, H, ·) or (B, T, H) as float32 (N, B, Hk, Hv / Hk, C, ·)."""
    rows, tokens, heads = x.shape[:3]
    size = min(1 << (tokens - 1).bit_length(), SIZE)
    x = x.reshape(rows, tokens, heads, -1).astype(mx.float32)
    x = mx.pad(x, [(0, 0), (0, -tokens % size), (0, 0), (0, 0)])
    x = x.reshape(rows, -1, size, key_heads, heads // key_heads, x.shape[-1])
    x = x.transpose(1, 0, 3, 4, 2, 5)
    # Reshaping makes a contiguous copy for the matmuls and, unlike mx.contiguous, can be exported.
    return x.reshape(-1).reshape(x.shape)


def _decays(log_gates: mx.array) -> tuple[mx.array, mx.array]:
    """Return the decay (..., C, 1) from a chunk's start to each token, and (..., C, C) from i to t.

    Every exponent is a sum of log-gates (..., C, 1), never a difference of two such sums, so it is
    at most 0, and the decay is exact for gates of 0 and 1.
    """
    size = log_gates.shape[-2]
    lower = mx.tri(size, size, 0, mx.float32)
    # Row t, column i: the sum of the log-gates after token i up to t.
    sums = (_strictly_lower(lower) * log_gates).cumsum(-2)
    return mx.exp(log_gates.cumsum(-2)), lower * mx.exp(sums)


def _strictly_lower(a: mx.array) -> mx.array:
    return a * mx.tri(a.shape[-1], a.shape[-1], -1, mx.float32)


def _unit_inverse(a: mx.array) -> mx.array:
    """Return (I + A)^-1 for strictly lower triangular A (..., C, C); C is a power of two."""

    def gradient(a: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
        back = inverse.swapaxes(-1, -2)
        return -(back @ cotangent @ back)

    return differentiable(_inverted, gradient)(a)


def _inverted(a: mx.array) -> mx.array:
    """Return (I + A)^-1; if its diagonal blocks are T and U, its lower left block is -U A_21 T.

    For larger matrices, a power series would lose digits, because its terms cancel.
    """
    size = a.shape[-1]
    if size <= _MIN_CHUNK:
        identity = mx.eye(size, dtype=mx.float32)
        return identity - a if size <= 2 else (identity - a) @ (identity + a @ a)
    half = size // 2
    blocks = mx.stack([a[..., :half, :half], a[..., half:, half:]], axis=-3)
    inverses = _inverted(blocks)
    upper, lower = inverses[..., 0, :, :], inverses[..., 1, :, :]
    corner = -(lower @ a[..., half:, :half] @ upper)
    top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, lower], axis=-1)], axis=-2)
