"""RWKV 7's recurrence on the CPU: each head by itself, token by token, in the caches."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu.arrays import Floats, by_rows, computes, empty, view
from mlxtune.backend.cpu.kernels import inline, kernel
from mlxtune.backend.cpu.layers import product
from mlxtune.backend.cpu.recurrences import GROUP, SEGMENT, drop_tiny
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers.rwkv7 import wkv7 as by_mlx

_f = np.float32
_ZERO = _f(0)


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
    by_rows(_recur, *arrays, state, view(y), view(states), rows=rows * heads)
    return y, states


def _gradients(inputs: Any, d_y: Floats, d_states: Floats, kept: Floats) -> list[mx.array]:
    """Return the gradients of all inputs."""
    *arrays, state = _laid_out(inputs)
    d_y, d_last = np.ascontiguousarray(d_y), np.ascontiguousarray(d_states[-1])
    made = [empty(*x.shape) for x in (*arrays, state)]
    rows, _, heads, _ = arrays[0].shape
    outs = map(view, made)
    by_rows(_recur_back, *arrays, kept, d_y, d_last, *outs, rows=rows * heads)
    *gradients, d_first = made
    return [*gradients, d_first.swapaxes(-1, -2)]


def _laid_out(inputs: Any) -> list[Floats]:
    """Return r, w, k, v, a and b, and the state with keys before values."""
    *arrays, state = [np.ascontiguousarray(view(x)) for x in inputs]
    return [*arrays, np.ascontiguousarray(state.swapaxes(-1, -2))]


@kernel
def _recur(start, end, r, w, k, v, a, b, first, y, kept):  # type: ignore[no-untyped-def]
    """Run the recurrence for rows and heads from `start` to `end`, of B H.

    Arrays are (B, T, H, D), `first` (B, H, D, D); `kept` (G + 1, B, H, D, D) gets the states before
    each group of tokens and at the end.
    """
    tokens, heads = v.shape[1], v.shape[2]
    removed = np.empty(v.shape[3], _f)
    for item in range(start, end):
        row, head = item // heads, item % heads
        state = first[row, head].copy()
        for t in range(tokens):
            if t % GROUP == 0:
                kept[t // GROUP, row, head] = state
            _read(state, a[row, t, head], removed)
            out, reads, given = y[row, t, head], r[row, t, head], v[row, t, head]
            decays, keys, changes = w[row, t, head], k[row, t, head], b[row, t, head]
            out[:] = _ZERO
            for i in range(len(state)):
                line, decay, key = state[i], decays[i], keys[i]
                change, read = changes[i], reads[i]
                for j in range(len(out)):
                    value = decay * line[j] + change * removed[j] + key * given[j]
                    line[j] = value
                    out[j] += read * value
        kept[len(kept) - 1, row, head] = state


@kernel
def _recur_back(  # type: ignore[no-untyped-def]
    start, end, r, w, k, v, a, b, kept, d_y, d_last, d_r, d_w, d_k, d_v, d_a, d_b, d_first
):
    """Write the gradients of what `wkv7` takes, for rows and heads from `start` to `end`."""
    tokens, heads, width = v.shape[1], v.shape[2], v.shape[3]
    starts = np.empty((-(-GROUP // SEGMENT), width, width), _f)
    before, removed = np.empty((SEGMENT, width, width), _f), np.empty((SEGMENT, width), _f)
    state, d_removed = np.empty((width, width), _f), np.empty(width, _f)
    for item in range(start, end):
        row, head = item // heads, item % heads
        d_state = d_last[row, head].copy()
        for group in range(len(kept) - 2, -1, -1):
            begin, stop = group * GROUP, min((group + 1) * GROUP, tokens)
            state[:] = kept[group, row, head]
            for t in range(begin, stop):
                if (t - begin) % SEGMENT == 0:
                    starts[(t - begin) // SEGMENT] = state
                _read(state, a[row, t, head], removed[0])
                keys, given = k[row, t, head], v[row, t, head]
                changes = b[row, t, head]
                _advanced(state, w[row, t, head], changes, removed[0], keys, given, state)
            for segment in range((stop - begin - 1) // SEGMENT, -1, -1):
                left = begin + segment * SEGMENT
                right = min(left + SEGMENT, stop)
                before[0] = starts[segment]
                drop_tiny(d_state)
                for t in range(left, right):
                    at = t - left
                    _read(before[at], a[row, t, head], removed[at])
                    if t + 1 < right:
                        keys, given, changes = k[row, t, head], v[row, t, head], b[row, t, head]
                        decays, after = w[row, t, head], before[at + 1]
                        _advanced(before[at], decays, changes, removed[at], keys, given, after)
                for t in range(right - 1, left - 1, -1):
                    earlier, gone = before[t - left], removed[t - left]
                    d_out, given, d_given = d_y[row, t, head], v[row, t, head], d_v[row, t, head]
                    reads, d_reads = r[row, t, head], d_r[row, t, head]
                    decays, d_decays = w[row, t, head], d_w[row, t, head]
                    keys, d_keys = k[row, t, head], d_k[row, t, head]
                    changes, d_changes = b[row, t, head], d_b[row, t, head]
                    where, d_where = a[row, t, head], d_a[row, t, head]
                    by_removed, by_given = _ZERO, _ZERO
                    for j in range(width):
                        by_removed += gone[j] * d_out[j]
                        by_given += given[j] * d_out[j]
                        d_removed[j] = _ZERO
                        d_given[j] = _ZERO
                    for i in range(width):
                        d_line, line, read, key = d_state[i], earlier[i], reads[i], keys[i]
                        change = changes[i]
                        by_read, by_decay, by_key, by_change = _ZERO, _ZERO, _ZERO, _ZERO
                        for j in range(width):
                            d = d_line[j] + read * d_out[j]
                            d_line[j] = d
                            d_removed[j] += change * d
                            by_read += line[j] * d_out[j]
                            by_decay += line[j] * d
                            d_given[j] += key * d
                            by_key += given[j] * d
                            by_change += gone[j] * d
                        d_reads[i] = decays[i] * by_read + change * by_removed + key * by_given
                        d_decays[i], d_keys[i], d_changes[i] = by_decay, by_key, by_change
                    for i in range(width):
                        d_line, line, decay, factor = d_state[i], earlier[i], decays[i], where[i]
                        by_where = _ZERO
                        for j in range(width):
                            by_where += line[j] * d_removed[j]
                            d_line[j] = decay * d_line[j] + factor * d_removed[j]
                        d_where[i] = by_where
        d_first[row, head] = d_state


@inline
def _read(state, where, out):  # type: ignore[no-untyped-def]
    """Set `out` to what the state holds for the key `where`."""
    out[:] = _ZERO
    for i in range(len(state)):
        line, factor = state[i], where[i]
        for j in range(len(out)):
            out[j] += factor * line[j]


@inline
def _advanced(state, decays, changes, removed, keys, given, out):  # type: ignore[no-untyped-def]
    """Set `out`, which may be the state, to it decayed + changes removed^T + keys given^T."""
    for i in range(len(state)):
        line, made, decay, change, key = state[i], out[i], decays[i], changes[i], keys[i]
        for j in range(len(given)):
            made[j] = decay * line[j] + change * removed[j] + key * given[j]
