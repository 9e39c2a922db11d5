"""The recurrences of Mamba 2 and Mamba on the CPU, token by token, and their convolution."""

from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import recurrences
from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, unread, view
from mlxtune.backend.cpu.layers import product
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers import convolution, state_space
from mlxtune.backend.models.mixers import selective_scan as mlx_selective_scan


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


def selective_scan(
    x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return what `mixers.selective_scan.scan` does. A layer that keeps its products keeps y."""
    if not computes(x, dt, A, B, C, state):
        return mlx_selective_scan.scan(x, dt, A, B, C, state)
    decays = np.ascontiguousarray(view(A))

    def forward(*inputs: mx.array) -> list[mx.array]:
        made: list[mx.array] = []

        def run() -> mx.array:
            x, dt, b, c, first = _by_channel(inputs)
            y, last = np.empty_like(x), np.empty_like(first)
            by_rows(recurrences.scan, x, dt, decays, b, c, first, y, last)
            made.append(mx.array(last.reshape(inputs[4].shape)))
            return _by_tokens(y, inputs[0].shape)

        y = product(run)
        # Training has no use for the last state.
        return [y, made[0] if made else unread(*inputs[4].shape)]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        x, dt, b, c, first = _by_channel(primals)
        (d_y,) = _by_channels(cotangents[0])
        d_state = np.array(cotangents[1]).reshape(first.shape)
        d_x, d_dt = np.empty_like(x), np.empty_like(x)
        d_b, d_c = (np.zeros((2, *b.shape), np.float32) for _ in range(2))
        by_rows(
            recurrences.scan_back, x, dt, decays, b, c, first, d_y, d_state, d_x, d_dt, d_b, d_c
        )
        shape = primals[0].shape
        by_tokens = [_by_tokens(each, shape) for each in (d_x, d_dt)]
        summed = [mx.array(each.sum(axis=0)) for each in (d_b, d_c)]
        return [*by_tokens, *summed, mx.array(d_state.reshape(primals[4].shape))]

    y, last = differentiable(forward, backward)(x, dt, B, C, state)
    return y, last


def _by_channel(inputs: Any) -> list[Floats]:
    """Return x and dt by channels (B D, T), B and C, and the state (B D, n)."""
    x, dt, b, c, state = inputs
    whole = [np.ascontiguousarray(view(each)) for each in (b, c)]
    return [*_by_channels(x, dt), *whole, np.array(state).reshape(-1, state.shape[-1])]


def _by_channels(*arrays: mx.array) -> list[Floats]:
    turned = (np.ascontiguousarray(view(x).swapaxes(1, 2)) for x in arrays)
    return [x.reshape(-1, x.shape[-1]) for x in turned]


def _by_tokens(rows: Floats, shape: tuple[int, ...]) -> mx.array:
    made = empty(*shape)
    view(made)[...] = rows.reshape(shape[0], shape[2], shape[1]).swapaxes(1, 2)
    return made


class Mamba(mlx_selective_scan.Mamba):
    """Mamba's mixer with the recurrence of this module."""

    scan = staticmethod(selective_scan)


def convolve(x: mx.array, weight: mx.array) -> mx.array:
    """Return what `mixers.convolution.convolve` does."""
    if not computes(x):
        return convolution.convolve(x, weight)
    rows, length, channels = x.shape
    taps = np.ascontiguousarray(view(weight.astype(mx.float32)).squeeze(-1).T)
    tokens = length - len(taps) + 1

    def forward(x: mx.array) -> mx.array:
        made = empty(rows, tokens, channels)
        given = np.ascontiguousarray(view(x))
        by_rows(recurrences.convolve, given, taps, view(made), rows=rows * tokens)
        return made

    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        made = empty(rows, length, channels)
        d = np.ascontiguousarray(view(cotangent))
        by_rows(recurrences.convolve_back, d, taps, view(made), rows=rows * length)
        return made

    return differentiable(forward, backward)(x)


class DepthwiseConv1d(convolution.DepthwiseConv1d):
    """The convolution of each channel with the function of this module."""

    convolve = staticmethod(convolve)
