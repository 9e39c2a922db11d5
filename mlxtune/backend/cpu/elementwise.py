"""Activations and norms, as their namesakes in mlx and mlx-lm compute them, on float32 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import kernels
from mlxtune.backend.cpu.arrays import by_rows, copied, empty, matrix, unread
from mlxtune.backend.model.autograd import differentiable


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
