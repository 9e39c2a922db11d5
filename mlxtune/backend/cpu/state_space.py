"""Mamba 2's recurrence on the CPU: each head by itself, token by token, in the caches."""

from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import recurrences
from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, view
from mlxtune.backend.cpu.layers import product
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers import state_space


def scan(
    x: mx.array, dt: mx.array, decay: mx.array, B: mx.array, C: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return what `mixers.state_space.scan` does.

    A layer that keeps its products keeps y and the states among them.
    """
    if not computes(x, dt, B, C, state):
        return state_space.scan(x, dt, decay, B, C, state)
    rates = np.ascontiguousarray(view(decay))

    def forward(*inputs: mx.array) -> list[mx.array]:
        run = cache(lambda: _run(rates, *inputs))
        # The states are always read, and y may be the last product, which may not be.
        states = product(lambda: run()[1])
        return [product(lambda: run()[0]), states]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        return _gradients(rates, primals, *map(view, (*cotangents, outputs[1])))

    y, states = differentiable(forward, backward)(x, dt, B, C, state)
    return y, states[-1].swapaxes(-1, -2)


def _run(rates: Floats, *inputs: mx.array) -> tuple[mx.array, mx.array]:
    """Return y, and the states (N + 1, B, H, n, P) before groups of tokens and at the end."""
    x, dt, b, c, state = _laid_out(inputs)
    rows, tokens, heads, _ = x.shape
    y, kept = empty(*x.shape), empty(-(-tokens // recurrences.GROUP) + 1, *state.shape)
    given, found = (x, dt, rates, b, c, state), (view(y), view(kept))
    by_rows(recurrences.state_space, *given, *found, rows=rows * heads)
    return y, kept


def _gradients(
    rates: Floats, inputs: Any, d_y: Floats, d_states: Floats, kept: Floats
) -> list[mx.array]:
    """Return the gradients of all inputs."""
    x, dt, b, c, state = _laid_out(inputs)
    d_y, d_last = np.ascontiguousarray(d_y), np.ascontiguousarray(d_states[-1])
    d_x, d_dt, d_first = [empty(*each.shape) for each in (x, dt, state)]
    d_b, d_c = (np.zeros((2, *b.shape), np.float32) for _ in range(2))
    given = (x, dt, rates, b, c, kept, d_y, d_last)
    found = (view(d_x), view(d_dt), d_b, d_c, view(d_first))
    by_rows(recurrences.state_space_back, *given, *found, rows=x.shape[0] * x.shape[2])
    summed = [mx.array(each.sum(axis=0)) for each in (d_b, d_c)]
    return [d_x, d_dt, *summed, d_first.swapaxes(-1, -2)]


def _laid_out(inputs: Any) -> list[Floats]:
    """Return x, dt, B and C, and the state as (B, H, n, P)."""
    *arrays, state = [np.ascontiguousarray(view(each)) for each in inputs]
    return [*arrays, np.ascontiguousarray(state.swapaxes(-1, -2))]


ssm_update = partial(state_space.ssm_update, rule=scan)
