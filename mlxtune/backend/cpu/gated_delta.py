"""The gated delta rule on the CPU: each head by itself, token by token, in the caches."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from mlxtune.backend.cpu import elementwise, recurrences
from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, view
from mlxtune.backend.cpu.layers import product
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers.gated_delta import gated_delta_rule as by_mlx


def gated_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_gates: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return what `mixers.gated_delta.gated_delta_rule` does.

    A layer that keeps its products keeps y and the states among them.
    """
    if not computes(q, k, v, log_gates, beta, state):
        return by_mlx(q, k, v, log_gates, beta, state)

    def forward(*inputs: mx.array) -> list[mx.array]:
        run = cache(lambda: _run(*inputs))
        # The states are always read, and y may be the last product, which may not be.
        states = product(lambda: run()[1])
        return [product(lambda: run()[0]), states]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        return _gradients(primals, *map(view, (*cotangents, outputs[1])))

    y, states = differentiable(forward, backward)(q, k, v, log_gates, beta, state)
    return y, states[-1].swapaxes(-1, -2)


def normalize_qk(
    q: mx.array, k: mx.array, *, inv_scale: float, eps: float
) -> tuple[mx.array, mx.array]:
    """Return what mlx-lm's function of this name does: unit vectors, q times inv_scale."""
    if not computes(q, k):
        return mlx_lm_gated_delta.normalize_qk(q, k, inv_scale=inv_scale, eps=eps)
    width = q.shape[-1:]
    return (
        elementwise.rms_norm(q, mx.full(width, inv_scale**2), eps * inv_scale**2),
        elementwise.rms_norm(k, mx.full(width, inv_scale), eps * inv_scale**2),
    )


def _run(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    """Return y, and the states (G + 1, B, Hv, Dk, Dv) before groups of tokens and at the end."""
    arrays, state = _laid_out(inputs)
    rows, tokens, heads = arrays[2].shape[:3]
    made = empty(*arrays[2].shape)
    states = empty(-(-tokens // recurrences.GROUP) + 1, *state.shape)
    y, kept = view(made), view(states)
    by_rows(recurrences.delta, *arrays, state, y, kept, rows=rows * heads)
    return made, states


def _gradients(inputs: Any, d_y: Floats, d_states: Floats, kept: Floats) -> list[mx.array]:
    """Return the gradients of all inputs."""
    arrays, state = _laid_out(inputs)
    d_y, d_last = np.ascontiguousarray(d_y), np.ascontiguousarray(d_states[-1])
    made = [empty(*x.shape) for x in (*arrays, state)]
    rows, _, key_heads, _ = arrays[0].shape
    outs = map(view, made)
    by_rows(recurrences.delta_back, *arrays, kept, d_y, d_last, *outs, rows=rows * key_heads)
    *gradients, d_first = made
    shaped = [d.reshape(x.shape) for d, x in zip(gradients, inputs, strict=False)]
    return [*shaped, d_first.swapaxes(-1, -2)]


def _laid_out(inputs: Any) -> tuple[list[Floats], Floats]:
    """Return q, k, v, log-gates (B, T, Hv, ·) and beta, and the state (B, Hv, Dk, Dv)."""
    q, k, v, log_gates, beta, state = [np.ascontiguousarray(view(x)) for x in inputs]
    by_channel = log_gates.reshape(*beta.shape, -1)
    return [q, k, v, by_channel, beta], np.ascontiguousarray(state.swapaxes(-1, -2))
