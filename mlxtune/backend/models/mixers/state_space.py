"""Mamba 2's recurrence by chunks, as it is trained: arXiv:2405.21060, section 6.

For each head, with the inputs u_t = dt_t x_t and the log decays a_t = dt_t A, which are negative:

    S_t = e^(a_t) S_(t-1) + B_t u_t^T        y_t = S_t^T C_t

Within a chunk that begins with S, where L_i is the sum of a_1 to a_i and M_ij = e^(L_i - L_j) for
j <= i:

    y_i = sum_j M_ij (C_i . B_j) u_j + e^(L_i) S^T C_i
    S' = e^(L_c) S + sum_j e^(L_c - L_j) B_j u_j^T

Arrays are float32 and have chunks N, groups G of R heads, places I in a chunk, states K (of size n)
and values P: groups have one B and one C, so that products serve all heads of a group at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import ssm

from mlxtune.backend.models.autograd import differentiable

_CHUNK = 64
# What is in memory at once: products of pairs of tokens, for the chunks of so many tokens.
_BLOCK = 2048
# A decay by less than e^-50 leaves nothing.
_LOWEST = -50.0
# Sums of a chunk's decays are below 4,096: multiples of 1/4096 of that size are float32 numbers.
_COARSE = 4096.0


def _decays(sums: mx.array) -> mx.array:
    decays = _exp((sums[..., :, None] - sums[..., None, :]).sum(axis=0))
    return mx.where(mx.tril(mx.ones(decays.shape[-2:], dtype=mx.bool_)), decays, 0)


def _exp(x: mx.array) -> mx.array:
    # Products with subnormal numbers, which smaller ones lead to, are slow on the CPU.
    return mx.where(x < _LOWEST, 0, mx.exp(x))


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    rule: Callable[..., tuple[mx.array, mx.array]] | None = None,
) -> tuple[mx.array, mx.array]:
    """Return what mlx-lm's function of this name returns: y (B, T, H, P), state (B, H, P, n).

    A_log, D and dt_bias are frozen. `rule` takes the place of `scan`. Masks and lengths, with which
    mlx-lm generates, are left to it.
    """
    x = hidden_states
    if mask is not None or lengths is not None or x.shape[1] == 1:
        return ssm.ssm_update(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)
    if state is None:
        state = mx.zeros((x.shape[0], *x.shape[2:], B.shape[-1]))
    steps = mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), *time_step_limit)
    y, state = (rule or scan)(x, steps, -mx.exp(A_log.astype(mx.float32)), B, C, state)
    return y + x * D[:, None], state


def scan(
    x: mx.array,
    dt: mx.array,
    decay: mx.array,
    B: mx.array,
    C: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Return y (B, T, H, P) and the last state (B, H, P, n).

    x (B, T, H, P), dt (B, T, H), decay A (H,), which is frozen, B and C (B, T, G, n), state
    (B, H, P, n). Only the inputs and the state of each block are kept for the backward pass.
    """

    def forward(*inputs: mx.array) -> list[mx.array]:
        *whole, state = inputs
        chunks = [_Chunks(block, decay) for block in _blocks(whole)]
        begun, last = [], [state.astype(mx.float32)]
        for each in chunks:
            states, state = each.states(last[-1])
            begun.append(states)
            last.append(state)
        ys = (each.outputs(states) for each, states in zip(chunks, begun, strict=True))
        y = mx.concatenate(list(ys), axis=1).astype(x.dtype)
        return [y, *last[1:]]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        *whole, first = primals
        d_y, *_, d_state = cotangents
        blocks = zip(_blocks([*whole, d_y]), [first, *outputs[1:-1]], strict=True)
        gradients = []
        for block, state in reversed(list(blocks)):
            *made, d_state = _backward(block, state, decay, d_state)
            # Together, or the arrays in between of each block would wait for the other blocks.
            gradients.append(mx.depends(made, made))
        joined = [
            mx.concatenate(list(parts), axis=1) for parts in zip(*gradients[::-1], strict=True)
        ]
        return [
            each.astype(primal.dtype)
            for each, primal in zip([*joined, d_state], primals, strict=True)
        ]

    y, *_, last = differentiable(forward, backward)(x, dt, B, C, state)
    return y, last


def _blocks(arrays: Sequence[mx.array]) -> list[list[mx.array]]:
    starts = range(0, arrays[0].shape[1], _BLOCK)
    return [[x[:, start : start + _BLOCK] for x in arrays] for start in starts]


def _backward(
    block: Sequence[mx.array], state: mx.array, decay: mx.array, d_last: mx.array
) -> list[mx.array]:
    """Return the gradients of x, dt, B, C and the state of a block, which has that of y, too."""
    *inputs, d_y = block
    c = _Chunks(inputs, decay)
    d_y = c.cut(d_y, c.x.shape[4])
    d_read = (d_y * c.since[..., None]).flatten(-2)
    states, _ = c.states(state)
    states = states.flatten(-2)
    d_states, d_first = c.back_through_states(d_last, _transposed(c.C) @ d_read)
    d_states = d_states.flatten(-2)
    left = (c.inputs * c.until[..., None]).flatten(-2)
    d_left = c.B @ d_states

    d_weights = _by_head(d_y) @ _transposed(_by_head(c.inputs))
    decays = _decays(c.sums)
    weights, d_pairs = c.pairs * decays, (d_weights * decays).sum(axis=3, keepdims=True)
    # A decay is between all tokens before it and those from it on.
    across = mx.tril(mx.cumsum(d_weights * weights, axis=-2, reverse=True), -1)
    d_decays = across.sum(axis=-1)
    d_C = d_pairs.squeeze(3) @ c.B + d_read @ _transposed(states)
    d_B = _transposed(d_pairs.squeeze(3)) @ c.C + left @ _transposed(d_states)
    d_inputs = _by_head(_transposed(weights) @ _by_head(d_y))
    d_inputs += c.until[..., None] * c.heads(d_left)

    d_decays = d_decays.swapaxes(3, 4)
    d_decays += mx.cumsum(c.heads(d_read * (c.C @ states)).sum(axis=-1), axis=3, reverse=True)
    d_decays += mx.cumsum(c.heads(left * d_left).sum(axis=-1), axis=3, inclusive=False)
    carried = c.heads((d_states * states).sum(axis=-2, keepdims=True)).sum(axis=-1)
    d_decays += c.since[..., -1:, :] * carried
    d_dt = c.decay * d_decays + (c.x * d_inputs).sum(axis=-1)
    made = zip((c.dt[..., None] * d_inputs, d_dt, d_B, d_C), inputs, strict=True)
    return [*(c.line(gradient, like.shape) for gradient, like in made), d_first]


class _Chunks:
    """A block cut into chunks of equal length, and what follows from the decays.

    x and `inputs` u are (B, N, G, I, R, P), B and C (B, N, G, I, n), dt and the decays `since` the
    chunk began and `until` it ends (B, N, G, I, R), `pairs` C_i . B_j (B, N, G, 1, I, I), and
    `sums` L (2, B, N, G, R, I).
    """

    def __init__(self, block: Sequence[mx.array], decay: mx.array) -> None:
        x, dt, B, C = block
        heads = x.shape[2] // B.shape[2]
        # As many chunks as chunks of 64 would be, so that little is padded.
        self._count = math.ceil(x.shape[1] / _CHUNK)
        self._length = math.ceil(x.shape[1] / self._count)
        self.x, self.dt = self.cut(x, heads), self.cut(dt, heads)
        self.B, self.C = (self.cut(each, 0) for each in (B, C))
        self.shape, self.decay = x.shape, decay.reshape(-1, 1, heads)
        self.inputs = self.dt[..., None] * self.x
        decays = mx.maximum(self.dt * self.decay, _LOWEST)
        # The sums of the coarse parts are exact, and so are their differences.
        coarse = mx.round(decays * _COARSE) / _COARSE
        sums = mx.cumsum(mx.stack([coarse, decays - coarse]), axis=4)
        self.since = _exp(sums.sum(axis=0))
        self.until = _exp((sums[..., -1:, :] - sums).sum(axis=0))
        self.sums = sums.swapaxes(4, 5)
        self.pairs = (self.C @ _transposed(self.B))[:, :, :, None]

    def cut(self, line: mx.array, heads: int) -> mx.array:
        """Return (B, T, ...) as (B, N, G, I, ...); heads (B, T, H, ...) as (B, N, G, I, R, ...)."""
        batch, length, *rest = line.shape
        over = self._count * self._length - length
        padded = mx.pad(line.astype(mx.float32), [(0, 0), (0, over)] + [(0, 0)] * len(rest))
        split = [-1, heads, *rest[1:]] if heads else rest
        return padded.reshape(batch, self._count, self._length, *split).swapaxes(2, 3)

    def line(self, cut: mx.array, shape: tuple[int, ...]) -> mx.array:
        """Return what was cut as it was before, in this shape."""
        batch, length, *rest = shape
        return cut.swapaxes(2, 3).reshape(batch, -1, *rest)[:, :length]

    def heads(self, flat: mx.array) -> mx.array:
        """Return (..., R P) as (..., R, P)."""
        return flat.reshape(*flat.shape[:-1], *self.x.shape[-2:])

    def states(self, first: mx.array) -> tuple[mx.array, mx.array]:
        """Return the states (B, N, G, n, R, P) that chunks begin with, and the last one."""
        added = _transposed(self.B) @ (self.inputs * self.until[..., None]).flatten(-2)
        states = [self._grouped(first)]
        for chunk in range(self._count):
            states.append(self._next(states[-1], added, chunk))
        return mx.stack(states[:-1], axis=1), self._by_heads(states[-1])

    def outputs(self, states: mx.array) -> mx.array:
        """Return y (B, T, H, P) by the states that chunks begin with."""
        read = self.heads(self.C @ states.flatten(-2))
        y = _by_head((self.pairs * _decays(self.sums)) @ _by_head(self.inputs))
        return self.line(y + self.since[..., None] * read, self.shape)

    def back_through_states(self, last: mx.array, read: mx.array) -> tuple[mx.array, mx.array]:
        """Return the gradients of the states that chunks end with, and that of the first.

        `read` (B, N, G, n, R P) are those of the states that chunks begin with, by what they read.
        """
        states = [self._grouped(last)]
        for chunk in reversed(range(self._count)):
            states.append(self._next(states[-1], read, chunk))
        return mx.stack(states[-2::-1], axis=1), self._by_heads(states[-1])

    def _grouped(self, state: mx.array) -> mx.array:
        """Return a state (B, H, P, n) as (B, G, n, R, P)."""
        groups, _, heads, width = self.x.shape[2:]
        return state.reshape(-1, groups, heads, width, state.shape[-1]).moveaxis(4, 2)

    def _by_heads(self, state: mx.array) -> mx.array:
        """Return a state (B, G, n, R, P) as (B, H, P, n)."""
        return state.moveaxis(2, 4).flatten(1, 2)

    def _next(self, state: mx.array, added: mx.array, chunk: int) -> mx.array:
        return self.since[:, chunk, :, -1:, :, None] * state + self.heads(added[:, chunk])


def _by_head(x: mx.array) -> mx.array:
    """Return (B, N, G, I, R, P) as (B, N, G, R, I, P), and back."""
    return x.swapaxes(3, 4)


def _transposed(x: mx.array) -> mx.array:
    return x.swapaxes(-1, -2)
