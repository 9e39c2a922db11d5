"""Mamba's recurrence, in which each channel has states that decay each in its own way.

arXiv:2312.00752, section 3.2; for a channel d and its state n:

    h_t = e^(dt_td A_dn) h_(t-1) + dt_td x_td B_tn        y_td = sum_n h_tdn C_tn

mlx-lm runs it token by token. Here each block of tokens takes log2 of their number of steps, and
the backward pass runs a block again by the state that it began with.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import jamba, mamba
from mlx_lm.models.activations import swiglu

from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.replaced import subclasses

_BLOCK = 32


def scan(
    x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return y (B, T, D) and the last state (B, D, n).

    x and dt (B, T, D), A (D, n), which is frozen and negative, B and C (B, T, n), state (B, D, n).
    """

    def forward(*inputs: mx.array) -> list[mx.array]:
        *whole, state = inputs
        ys, states = [], [state]
        for block in _blocks(whole):
            y, state = _block([*block, states[-1]], A)
            ys.append(y)
            states.append(state)
        return [mx.concatenate(ys, axis=1), *states[1:]]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        *whole, first = primals
        d_y, *_, d_state = cotangents
        blocks = zip(_blocks([*whole, d_y]), [first, *outputs[1:-1]], strict=True)
        gradients = []
        for (*block, d_y), state in reversed(list(blocks)):
            _, found = mx.vjp(lambda *given: _block(given, A), [*block, state], [d_y, d_state])
            # Together, or the arrays in between of each block would wait for the other blocks.
            *made, d_state = mx.depends(found, found)
            gradients.append(made)
        parts = zip(*gradients[::-1], strict=True)
        return [*(mx.concatenate(list(each), axis=1) for each in parts), d_state]

    y, *_, last = differentiable(forward, backward)(x, dt, B, C, state)
    return y, last


class Mamba(nn.Module):
    """The parts of mlx-lm's Mamba and Jamba mixers that run token by token there."""

    scan = staticmethod(scan)

    def ssm_step(
        self, x: mx.array, A: mx.array, state: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return the outputs (B, T, D) of a sequence x, and the last state."""
        rank, size = self.time_step_rank, self.ssm_state_size
        delta, B, C = mx.split(self.x_proj(x), [rank, rank + size], axis=-1)
        if "dt_layernorm" in self:
            delta, B, C = self.dt_layernorm(delta), self.b_layernorm(B), self.c_layernorm(C)
        elif self.use_bcdt_rms:
            eps = self.args.mixer_rms_eps
            delta, B, C = (mx.fast.rms_norm(each, None, eps) for each in (delta, B, C))
        delta = nn.softplus(self.dt_proj(delta))
        if state is None:
            state = mx.zeros((x.shape[0], x.shape[2], size), x.dtype)
        y, state = self.scan(x, delta, A, B, C, state)
        return y + self.D * x, state

    def _process_sequence(
        self, x: mx.array, conv_state: mx.array | None, state: mx.array | None
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        x, z = mx.split(self.in_proj(x), 2, axis=-1)
        before = self.conv_kernel_size - 1
        if conv_state is None:
            x = mx.pad(x, [(0, 0), (before, 0), (0, 0)])
        else:
            x = mx.concatenate([conv_state, x], axis=1)
        y, state = self.ssm_step(nn.silu(self.conv1d(x)), -mx.exp(self.A_log), state)
        return self.out_proj(swiglu(z, y)), (x[:, -before:], state)


def _blocks(arrays: Any) -> list[list[mx.array]]:
    starts = range(0, arrays[0].shape[1], _BLOCK)
    return [[x[:, start : start + _BLOCK] for x in arrays] for start in starts]


def _block(inputs: Sequence[mx.array], A: mx.array) -> list[mx.array]:
    """Return y and the next state of a block, with all of its states in memory (B, T, D, n)."""
    dtype = inputs[0].dtype
    x, dt, B, C, state = (each.astype(mx.float32) for each in inputs)
    decays = mx.exp(dt[..., None] * A)
    states = (dt * x)[..., None] * B[:, :, None]
    # As a parallel prefix sum: each state has taken in the tokens of so many before it.
    taken = 1
    while taken < x.shape[1]:
        behind = mx.concatenate(
            [states[:, :taken], states[:, taken:] + decays[:, taken:] * states[:, :-taken]], axis=1
        )
        decays = mx.concatenate([decays[:, :taken], decays[:, taken:] * decays[:, :-taken]], axis=1)
        states, taken = behind, 2 * taken
    states = states + decays * state[:, None]
    y = (states @ C[..., None]).squeeze(-1)
    return [y.astype(dtype), states[:, -1].astype(dtype)]


KINDS = subclasses(Mamba, jamba.JambaMambaMixer, mamba.MambaBlock)
