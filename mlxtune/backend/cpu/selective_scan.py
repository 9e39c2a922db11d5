"""Mamba's recurrence on the CPU: each channel by itself, token by token, in the caches."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import recurrences
from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, unread, view
from mlxtune.backend.cpu.layers import product
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers import selective_scan


def scan(
    x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return what `mixers.selective_scan.scan` does. A layer that keeps its products keeps y."""
    if not computes(x, dt, A, B, C, state):
        return selective_scan.scan(x, dt, A, B, C, state)
    decays = np.ascontiguousarray(view(A))

    def forward(*inputs: mx.array) -> list[mx.array]:
        made: list[mx.array] = []

        def run() -> mx.array:
            x, dt, b, c, first = _laid_out(inputs)
            y, last = np.empty_like(x), np.empty_like(first)
            by_rows(recurrences.scan, x, dt, decays, b, c, first, y, last)
            made.append(mx.array(last.reshape(inputs[4].shape)))
            return _by_tokens(y, inputs[0].shape)

        y = product(run)
        # Training has no use for the last state.
        return [y, made[0] if made else unread(*inputs[4].shape)]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        x, dt, b, c, first = _laid_out(primals)
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


def _laid_out(inputs: Any) -> list[Floats]:
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


class Mamba(selective_scan.Mamba):
    """Mamba's mixer with the recurrence of this module."""

    scan = staticmethod(scan)
