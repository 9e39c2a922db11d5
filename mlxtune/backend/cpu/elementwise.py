"""Activations, norms and rotary embeddings as their namesakes in mlx compute them, in float32."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import kernels
from mlxtune.backend.cpu.arrays import (
    Floats,
    by_rows,
    computes,
    copied,
    empty,
    matrix,
    unread,
    view,
)
from mlxtune.backend.models import packed
from mlxtune.backend.models.autograd import differentiable

# Tables for lines of segments have few lengths.
_LENGTH_MULTIPLE = 256


def _by_rows(
    kernel: Any,
    gradient_kernel: Any,
    inputs: Sequence[mx.array],
    *constants: Any,
    needed: bool = True,
) -> mx.array:
    """Return a function of inputs of one shape, with its gradient, by two kernels.

    They take (start, end, *inputs, out, *constants), and (start, end, *inputs, cotangent, one
    gradient for each input, *constants).
    """

    def run(*arrays: mx.array) -> mx.array:
        if not needed:
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


def swiglu(gate: mx.array, x: mx.array, *, needed: bool = True) -> mx.array:
    """Return silu(gate) * x; where the value is not `needed`, only its gradient, none is made."""
    return _by_rows(kernels.swiglu, kernels.swiglu_gradient, (gate, x), needed=needed)


def clamped_swiglu(
    gate: mx.array, x: mx.array, *, alpha: float, limit: float, needed: bool = True
) -> mx.array:
    """Return gpt-oss's SwiGLU: g * sigmoid(alpha g) * (x + 1), both clamped to the limit."""
    constants = np.float32(alpha), np.float32(limit)
    both = kernels.clamped_swiglu, kernels.clamped_swiglu_gradient
    return _by_rows(*both, (gate, x), *constants, needed=needed)


def geglu(gate: mx.array, x: mx.array, *, needed: bool = True) -> mx.array:
    """Return gelu_approx(gate) * x, as `swiglu`."""
    return _by_rows(kernels.geglu, kernels.geglu_gradient, (gate, x), needed=needed)


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x)."""
    return _by_rows(kernels.silu, kernels.silu_gradient, (x,))


def gelu_approx(x: mx.array) -> mx.array:
    """Return GELU by its tanh approximation."""
    return _by_rows(kernels.gelu, kernels.gelu_gradient, (x,))


def tanh(x: mx.array) -> mx.array:
    """Return the hyperbolic tangent."""
    return _by_rows(kernels.tanh, kernels.tanh_gradient, (x,))


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Return x / rms(x) * weight over the last axis; the weight is frozen."""
    gain = mx.ones(x.shape[-1:]) if weight is None else weight.astype(mx.float32)
    constants = np.array(gain), np.float32(eps)
    return _by_rows(kernels.rms_norm, kernels.rms_norm_gradient, (x,), *constants)


def softmax(x: mx.array) -> mx.array:
    """Return the softmax over the last axis."""

    def run(x: mx.array) -> mx.array:
        made = copied(x)
        by_rows(kernels.softmax_, matrix(made), 1, False)
        return made

    def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        made = copied(cotangent)
        by_rows(kernels.softmax_gradient_, matrix(copied(x)), matrix(made), 1, False)
        return made

    return differentiable(run, gradient)(x)


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
