"""Activations and norms, as their namesakes in mlx and mlx-lm compute them, on float32 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import kernels
from mlxtune.backend.cpu.arrays import by_rows, empty, matrix, unread, view
from mlxtune.backend.model.autograd import differentiable


def _elementwise(
    kernel: Any, gradient_kernel: Any, inputs: Sequence[mx.array], *, needed: bool = True
) -> mx.array:
    """Return an elementwise function of inputs of one shape, with its gradient."""

    def run(*arrays: mx.array) -> mx.array:
        if not needed:
            return unread(*arrays[0].shape)
        given = [matrix(x) for x in arrays]
        made, out = empty(*arrays[0].shape)
        by_rows(kernel, len(given[0]), out.size, *given, out.reshape(given[0].shape))
        return made

    def gradient(primals: Any, cotangent: mx.array, output: Any) -> Any:
        primals = primals if isinstance(primals, tuple | list) else (primals,)
        given = [matrix(x) for x in (*primals, cotangent)]
        made = [empty(*x.shape) for x in primals]
        outs = [out.reshape(given[0].shape) for _, out in made]
        by_rows(gradient_kernel, len(given[0]), given[0].size, *given, *outs)
        return tuple(array for array, _ in made) if len(made) > 1 else made[0][0]

    return differentiable(run, gradient)(*inputs)


def swiglu(gate: mx.array, x: mx.array, *, needed: bool = True) -> mx.array:
    """Return silu(gate) * x; where the value is not `needed`, only its gradient, none is made."""
    return _elementwise(kernels.swiglu, kernels.swiglu_gradient, (gate, x), needed=needed)


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x)."""
    return _elementwise(kernels.silu, kernels.silu_gradient, (x,))


def gelu_approx(x: mx.array) -> mx.array:
    """Return GELU by its tanh approximation."""
    return _elementwise(kernels.gelu, kernels.gelu_gradient, (x,))


def tanh(x: mx.array) -> mx.array:
    """Return the hyperbolic tangent."""
    return _elementwise(kernels.tanh, kernels.tanh_gradient, (x,))


def softmax(x: mx.array) -> mx.array:
    """Return the softmax over the last axis."""

    def run(x: mx.array) -> mx.array:
        made, out = empty(*x.shape)
        out[...] = view(x)
        rows = out.reshape(-1, x.shape[-1])
        by_rows(kernels.softmax_, len(rows), rows.size, rows, 1, False)
        return made

    def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        made, out = empty(*x.shape)
        out[...] = view(cotangent)
        rows = out.reshape(-1, x.shape[-1])
        scores = np.array(matrix(x))
        by_rows(kernels.softmax_gradient_, len(rows), rows.size, scores, rows, 1, False)
        return made

    return differentiable(run, gradient)(x)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Return x / rms(x) * weight over the last axis; the weight is frozen."""
    given = mx.ones(x.shape[-1:]) if weight is None else weight.astype(mx.float32)
    gain, small = np.array(given), np.float32(eps)

    def run(x: mx.array) -> mx.array:
        rows = matrix(x)
        made, out = empty(*x.shape)
        out = out.reshape(rows.shape)
        by_rows(kernels.rms_norm, len(rows), rows.size, rows, gain, small, out)
        return made

    def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        rows = matrix(x)
        made, out = empty(*x.shape)
        out = out.reshape(rows.shape)
        given = (rows, gain, small, matrix(cotangent), out)
        by_rows(kernels.rms_norm_gradient, len(rows), rows.size, *given)
        return made

    return differentiable(run, gradient)(x)
