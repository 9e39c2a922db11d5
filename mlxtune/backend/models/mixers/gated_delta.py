"""The gated delta rule by MLX's kernels or by chunks, in the place of mlx-lm's loop over tokens.

Metal has kernels with a gradient for some shapes. The gradient of the chunks is written by hand,
and keeps little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.device.device import has_metal
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers import delta_chunks

# The tokens of all rows that are computed at once, which bounds the memory of long rows.
_TOKENS = 2048
# The head size, and the key and value heads, of `seq_gated_delta_*` and `gated_delta_fused_*` with
# their `_vjp_` in mlx.metallib of 0.32.4. CUDA's library says "has no CUDA implementation".
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
    rule: Callable[..., tuple[mx.array, mx.array]] | None = None,
) -> tuple[mx.array, mx.array]:
    """Return what mlx-lm's function of this name does, and arguments; see there.

    Gates are computed as their logarithms. `rule` takes the place of `best_rule`.
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
    return (rule or best_rule(k, v, log_gates))(q, k, v, log_gates, beta, state)


def best_rule(
    k: mx.array, v: mx.array, log_gates: mx.array
) -> Callable[..., tuple[mx.array, mx.array]]:
    """Return MLX's own function where Metal has kernels for these shapes, else that by chunks."""
    heads, sizes = (k.shape[2], v.shape[2]), {k.shape[3], v.shape[3]}
    by_head = log_gates.ndim == 3
    served = by_head and heads in _KERNEL_HEADS and sizes == {_KERNEL_SIZE}
    return kernel_rule if served and _on_metal() else gated_delta_rule


def _on_metal() -> bool:
    return has_metal() and mx.default_device() == mx.gpu


def kernel_rule(
    q: mx.array, k: mx.array, v: mx.array, log_gates: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return what `gated_delta_rule` does, by MLX's own function; gates are one a head."""
    y, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_gates), beta, state)
    return y, state


def gated_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_gates: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return y (B, T, Hv, Dv), in q's dtype, and the state (B, Hv, Dv, Dk) at the end, float32.

    q and k are (B, T, Hk, Dk), v is (B, T, Hv, Dv), where Hv is a multiple of Hk; log-gates are
    (B, T, Hv), or (B, T, Hv, Dk) with a gate for each channel; beta is (B, T, Hv). For the gradient
    only the inputs are kept, and the states at which groups of chunks start.
    """
    parts = groups(q, _TOKENS)

    def forward(*inputs: mx.array) -> list[mx.array]:
        *arrays, state = inputs
        outputs, starts = [], []
        for group in parts:
            starts.append(state)
            y, state = delta_chunks.outputs([x[:, group] for x in arrays], state)
            outputs.append(y.astype(arrays[0].dtype))
            # One group after the other, so that only one is in memory.
            state = mx.depends([state], [y])[0]
        return [mx.concatenate(outputs, axis=1), state, *starts[1:]]

    def backward(primals: Any, cotangents: Any, kept: Any) -> list[mx.array]:
        *arrays, state = primals
        starts, d_state = [state, *kept[2:]], cotangents[1]
        found = []
        for group, start in zip(reversed(parts), reversed(starts), strict=True):
            given = [x[:, group] for x in arrays]
            *gradients, d_state = delta_chunks.gradients(
                given, start, cotangents[0][:, group], d_state
            )
            gradients = [d.astype(x.dtype) for d, x in zip(gradients, given, strict=True)]
            d_state = mx.depends([d_state], gradients)[0]
            found.append(gradients)
        whole = zip(*reversed(found), strict=True)
        return [*(mx.concatenate(list(each), axis=1) for each in whole), d_state]

    y, state, *_ = differentiable(forward, backward)(q, k, v, log_gates, beta, state)
    return y, state


def groups(q: Any, tokens: int) -> list[slice]:
    """Return the groups of chunks of q (B, T, Hk, Dk), each of so many tokens of all rows."""
    rows, length = q.shape[:2]
    size = max(tokens // (rows * delta_chunks.SIZE), 1) * delta_chunks.SIZE
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
