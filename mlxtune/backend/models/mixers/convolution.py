"""Causal convolution of each channel by itself, with a gradient for its input alone."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.device.device import on_cpu
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.replaced import subclasses

# Longer kernels are no sums of few products.
_LONGEST = 8


class DepthwiseConv1d(nn.Module):
    """The convolution of nn.Conv1d where it has a group for each channel; its weight is frozen."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_depthwise(self, x):
            return super().__call__(x)
        y = convolve(x, self["weight"])
        return y + self["bias"] if "bias" in self else y


def _is_depthwise(layer: Any, x: mx.array) -> bool:
    """Return whether `convolve` computes what this nn.Conv1d computes, but for its bias."""
    channels, length, each = layer["weight"].shape
    return (
        layer.groups == channels == x.shape[-1]
        and (each, layer.stride, layer.padding, layer.dilation) == (1, 1, 0, 1)
        and length <= min(_LONGEST, x.shape[1])
    )


def convolve(x: mx.array, weight: mx.array) -> mx.array:
    """Return y_t = sum_k weight_k x_(t+k) for x (B, T + K - 1, C) and weight (C, K, 1)."""

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        # Each input has a part in the K outputs up to its place: a convolution backwards.
        around = (weight.shape[1] - 1,) * 2
        return _convolve(mx.pad(cotangent, [(0, 0), around, (0, 0)]), weight[:, ::-1])

    return differentiable(lambda x: _convolve(x, weight), gradient)(x)


def _convolve(x: mx.array, weight: mx.array) -> mx.array:
    if not on_cpu():
        return mx.conv1d(x, weight, groups=weight.shape[0])
    # MLX's takes many times as long there.
    last = weight.shape[1] - 1
    taps = weight.squeeze(-1).T.astype(mx.float32)
    terms = (x[:, k : x.shape[1] - last + k] * taps[k] for k in range(last + 1))
    return sum(terms, start=mx.array(0.0)).astype(x.dtype)


KINDS = subclasses(DepthwiseConv1d, nn.Conv1d)
