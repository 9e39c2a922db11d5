"""Recurrences computed in blocks of tokens, and the convolutions before them.

The backward pass recomputes one block at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rwkv7, ssm

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.replaced import subclasses

# The number of tokens in a block: for RWKV 7, over all rows, because the backward pass holds the
# states of all these tokens; for Mamba 2, mlx-lm's block size, because mlx-lm computes weights for
# all pairs of tokens in a block.
BLOCK, _MAMBA_BLOCK = 64, 256
# The longest kernel for which `convolve` is used: each entry of the kernel takes a product.
_MAX_KERNEL_LENGTH = 8


def by_blocks(
    compute: Callable[..., tuple[mx.array, mx.array]],
    arrays: Sequence[mx.array],
    state: mx.array,
    tokens: int,
) -> tuple[mx.array, mx.array]:
    """Return the outputs (B, T, ...) of a recurrence over arrays (B, T, ...), and its last state.

    `compute` takes a block of `tokens` tokens of each array and the state before the block, and
    returns the block's outputs and the state after it. The arrays and these states are kept for the
    backward pass.
    """
    starts = range(0, arrays[0].shape[1], tokens)

    def block(arrays: Sequence[mx.array], start: int) -> list[mx.array]:
        return [x[:, start : start + tokens] for x in arrays]

    def forward(*inputs: mx.array) -> list[mx.array]:
        *whole, first = inputs
        outputs, states = [], [first]
        for start in starts:
            y, state = compute(*block(whole, start), states[-1])
            outputs.append(y)
            # Each block waits for the one before it, so that only one is in memory.
            states += mx.depends([state], [y])
        return [mx.concatenate(outputs, axis=1), *states[1:]]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        *whole, first = primals
        d_outputs, *_, d_state = cotangents
        gradients = []
        for start, state in reversed(list(zip(starts, [first, *outputs[1:-1]], strict=True))):
            block_inputs = [*block(whole, start), state]
            (d_y,) = block([d_outputs], start)
            d_inputs = mx.vjp(lambda *x: list(compute(*x)), block_inputs, [d_y, d_state])[1]
            # One block's gradients run together; otherwise some would wait for other blocks.
            *block_gradients, d_state = mx.depends(d_inputs, d_inputs)
            gradients.append(block_gradients)
        parts = zip(*gradients[::-1], strict=True)
        return [*(mx.concatenate(list(part), axis=1) for part in parts), d_state]

    y, *_, last = differentiable(forward, backward)(*arrays, state)
    return y, last


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
) -> tuple[mx.array, mx.array]:
    """Return the result of mlx-lm's function of this name.

    The result is y (B, T, H, P) and the state (B, H, P, n). A_log, D and dt_bias are frozen. Only
    generation passes `mask` and `lengths`.
    """
    x = hidden_states
    if mask is not None or lengths is not None or x.shape[1] == 1:
        return ssm.ssm_update(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)
    if state is None:
        state = mx.zeros((x.shape[0], *x.shape[2:], B.shape[-1]))

    def run(
        x: mx.array, B: mx.array, C: mx.array, dt: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        return ssm.ssm_attn(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit)

    return by_blocks(run, (x, B, C, dt), state, _MAMBA_BLOCK)


class TimeMixing(nn.Module):
    """RWKV 7's time mixing by mlx-lm's loop over tokens: mlx-lm's Metal kernel has no gradient."""

    def _wkv7(self, *inputs: Any) -> tuple[mx.array, mx.array]:
        *by_token, state = inputs
        batch, length, heads, width = by_token[0].shape
        if length == 1:
            return super()._wkv7(*inputs)
        if state is None:
            state = mx.zeros((batch, heads, width, width), by_token[0].dtype)
        return by_blocks(_loop, by_token, state, max(BLOCK // batch, 1))


def _loop(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    *by_token, state = inputs
    outputs = []
    for token in range(by_token[0].shape[1]):
        y, state = rwkv7._wkv7_step_ops(*(x[:, token] for x in by_token), state)
        outputs.append(y)
    return mx.stack(outputs, axis=1).astype(by_token[0].dtype), state


class DepthwiseConv1d(nn.Module):
    """nn.Conv1d with a group for each channel and a frozen weight."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_depthwise(self, x):
            return super().__call__(x)
        y = convolve(x, self["weight"])
        return y + self["bias"] if "bias" in self else y


def _is_depthwise(layer: Any, x: mx.array) -> bool:
    """Return whether `convolve` gives the output of this nn.Conv1d, apart from the bias."""
    channels, length, each = layer["weight"].shape
    return (
        layer.groups == channels == x.shape[-1]
        and (each, layer.stride, layer.padding, layer.dilation) == (1, 1, 0, 1)
        and length <= min(_MAX_KERNEL_LENGTH, x.shape[1])
    )


def convolve(x: mx.array, weight: mx.array) -> mx.array:
    """Return y_t = sum_k weight_k x_(t+k) for x (B, T + K - 1, C) and weight (C, K, 1)."""

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        # Each input affects K outputs: its gradient is a convolution with the reversed weight.
        around = (weight.shape[1] - 1,) * 2
        return _convolve(mx.pad(cotangent, [(0, 0), around, (0, 0)]), weight[:, ::-1])

    return differentiable(lambda x: _convolve(x, weight), gradient)(x)


def _convolve(x: mx.array, weight: mx.array) -> mx.array:
    if not on_cpu():
        return mx.conv1d(x, weight, groups=weight.shape[0])
    # MLX's own convolution has a far slower gradient on the CPU.
    last = weight.shape[1] - 1
    taps = weight.squeeze(-1).T.astype(mx.float32)
    terms = (x[:, k : x.shape[1] - last + k] * taps[k] for k in range(last + 1))
    return sum(terms, start=mx.array(0.0)).astype(x.dtype)


KINDS = {**subclasses(TimeMixing, rwkv7.Rwkv7TimeMixing), **subclasses(DepthwiseConv1d, nn.Conv1d)}
