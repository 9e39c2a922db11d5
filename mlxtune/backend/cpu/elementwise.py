"""Activations, norms and rotary embeddings in float32 that replace MLX's functions."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import kernels
from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, matrix, view
from mlxtune.backend.cpu.layers import reads_gate, unread
from mlxtune.backend.models import packed
from mlxtune.backend.models.autograd import differentiable

# Table lengths for packed lines are rounded up to a multiple of this, so that few tables are
# needed.
_LENGTH_MULTIPLE = 256


def _by_rows(
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
            return unread(*arrays[0].shape)
        made = empty(*arrays[0].shape)
        by_rows(kernel, *map(matrix, (*arrays, made)), *constants)
        return made

    def gradient(primals: Any, cotangent: mx.array, output: Any) -> Any:
        primals = primals if isinstance(primals, tuple | list) else (primals,)
        made = [empty(*x.shape) for x in primals]
        by_rows(gradient_kernel, *map(matrix, (*primals, cotangent, *made)), *constants)
        return tuple(made) if len(made) > 1 else made[0]

    return differentiable(run, gradient)(*inputs)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x."""
    return _by_rows(kernels.swiglu, kernels.swiglu_gradient, (gate, x), is_read=reads_gate())


def geglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return gelu_approx(gate) * x."""
    return _by_rows(kernels.geglu, kernels.geglu_gradient, (gate, x), is_read=reads_gate())


def tanh(x: mx.array) -> mx.array:
    """Return the hyperbolic tangent of each entry."""
    return _by_rows(kernels.tanh, kernels.tanh_gradient, (x,))


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return x / rms(x) * weight over the last axis; the weight is frozen."""
    constants = np.array(weight.astype(mx.float32)), np.float32(eps)
    return _by_rows(kernels.rms_norm, kernels.rms_norm_gradient, (x,), *constants)


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
    given = None if freqs is None else np.array(freqs.astype(mx.float32)).tobytes()
    if layout is None:
        cosines, sines = _table(x.shape[2], dims, offset, base, scale, given)
    else:
        length = -(-layout.longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        whole = _table(length, dims, offset, base, scale, given)
        cosines, sines = (values[layout.positions] for values in whole)

    # The projection before the rotation orders memory by token, the attention after it by head.
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
