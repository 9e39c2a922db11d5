"""The gated delta rule in MLX's kernels or in chunks, instead of mlx-lm's loop over tokens."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.device.device import has_metal
from mlxtune.backend.models.mixers.delta_chunks import SIZE, delta_rule
from mlxtune.backend.models.mixers.recurrences import by_blocks

# The number of tokens, over all rows, computed together; it bounds the memory of long rows.
_TOKENS = 2048
# The head size, and the numbers of key and value heads, for which mlx.metallib 0.32.4 has the
# kernels `seq_gated_delta_*` and `gated_delta_fused_*` with `_vjp_` in their names. CUDA has no
# such kernels.
_KERNEL_SIZE = 128
_KERNEL_HEADS = {(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)}


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
    return _on_metal() and heads in _KERNEL_HEADS and sizes == {_KERNEL_SIZE}


def _on_metal() -> bool:
    return has_metal() and mx.default_device() == mx.gpu
