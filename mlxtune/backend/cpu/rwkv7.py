"""RWKV 7's recurrence on the CPU: each head by itself, token by token, in the caches."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import rwkv7_kernels
from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, view
from mlxtune.backend.cpu.layers import product
from mlxtune.backend.cpu.recurrences import GROUP
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers.rwkv7 import wkv7 as by_mlx


def wkv7(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    """Return what `mixers.rwkv7.wkv7` does.

    A layer that keeps its products keeps y and the states among them.
    """
    if not computes(*inputs):
        return by_mlx(*inputs)

    def forward(*inputs: mx.array) -> list[mx.array]:
        run = cache(lambda: _run(*inputs))
        # The states are always read, and y may be the last product, which may not be.
        states = product(lambda: run()[1])
        return [product(lambda: run()[0]), states]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        return _gradients(primals, *map(view, (*cotangents, outputs[1])))

    y, states = differentiable(forward, backward)(*inputs)
    return y, states[-1].swapaxes(-1, -2)


def _run(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    """Return y, and the states (G + 1, B, H, D, D) before groups of tokens and at the end."""
    *arrays, state = _laid_out(inputs)
    rows, tokens, heads, _ = arrays[0].shape
    y, states = empty(*arrays[0].shape), empty(-(-tokens // GROUP) + 1, *state.shape)
    by_rows(rwkv7_kernels.wkv7, *arrays, state, view(y), view(states), rows=rows * heads)
    return y, states


def _gradients(inputs: Any, d_y: Floats, d_states: Floats, kept: Floats) -> list[mx.array]:
    """Return the gradients of all inputs."""
    *arrays, state = _laid_out(inputs)
    d_y, d_last = np.ascontiguousarray(d_y), np.ascontiguousarray(d_states[-1])
    made = [empty(*x.shape) for x in (*arrays, state)]
    rows, _, heads, _ = arrays[0].shape
    outs = map(view, made)
    by_rows(rwkv7_kernels.wkv7_back, *arrays, kept, d_y, d_last, *outs, rows=rows * heads)
    *gradients, d_first = made
    return [*gradients, d_first.swapaxes(-1, -2)]


def _laid_out(inputs: Any) -> list[Floats]:
    """Return r, w, k, v, a and b, and the state with keys before values."""
    *arrays, state = [np.ascontiguousarray(view(x)) for x in inputs]
    return [*arrays, np.ascontiguousarray(state.swapaxes(-1, -2))]
