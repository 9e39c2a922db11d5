"""Causal convolutions of each channel by itself, by kernels: MLX's take many times as long."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.cpu import recurrences
from mlxtune.backend.cpu.arrays import by_rows, computes, empty, view
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers import convolution


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
