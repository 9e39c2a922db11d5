"""Experts on tokens sorted by expert, with gradients that gather instead of scattering.

mlx-lm sorts too, but MLX's gradient of a gather adds into zeros, in any order on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.replaced import subclasses

# Below this number of tokens times experts per token, sorting costs more than it gains, as in
# mlx-lm.
_MIN_TOKENS = 64


class SortedGLU(nn.Module):
    """mlx-lm's SwitchGLU (gated experts), computed on tokens sorted by expert."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        def run(x: mx.array, experts: mx.array) -> mx.array:
            gate, up = (
                layer(x, experts, sorted_indices=True) for layer in (self.gate_proj, self.up_proj)
            )
            y: mx.array = self.down_proj(self.activation(up, gate), experts, sorted_indices=True)
            return y

        return _by_expert(run, x, indices) if _serves(x, indices) else super().__call__(x, indices)


class SortedMLP(nn.Module):
    """mlx-lm's SwitchMLP (experts without gates), computed on tokens sorted by expert."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        def run(x: mx.array, experts: mx.array) -> mx.array:
            hidden = self.activation(self.fc1(x, experts, sorted_indices=True))
            y: mx.array = self.fc2(hidden, experts, sorted_indices=True)
            return y

        return _by_expert(run, x, indices) if _serves(x, indices) else super().__call__(x, indices)


def _serves(x: mx.array, indices: mx.array) -> bool:
    return indices.size >= _MIN_TOKENS and x.shape[:-1] == indices.shape[:-1]


def _by_expert(
    run: Callable[[mx.array, mx.array], mx.array], x: mx.array, indices: mx.array
) -> mx.array:
    """Return the outputs (..., k, out) of experts for x (..., in) and indices (..., k).

    `run(x, experts)` takes the tokens (N k, 1, in), sorted by expert, and their experts (N k,).
    """
    k, flat = indices.shape[-1], mx.stop_gradient(indices).flatten()
    order = mx.argsort(flat)
    inverse = mx.argsort(order)

    def gather(x: mx.array) -> mx.array:
        return x.reshape(-1, 1, x.shape[-1])[order // k]

    def gather_gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        by_token = cotangent[inverse].reshape(-1, k, x.shape[-1])
        return by_token.sum(axis=1).reshape(x.shape)

    def put_back(y: mx.array) -> mx.array:
        return y[inverse].reshape(*indices.shape, y.shape[-1])

    def put_back_gradient(y: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return cotangent.reshape(y.shape)[order]

    def experts(x: mx.array) -> Any:
        y = run(differentiable(gather, gather_gradient)(x), flat[order])
        return differentiable(put_back, put_back_gradient)(y)

    return experts(x)


KINDS = {**subclasses(SortedGLU, SwitchGLU), **subclasses(SortedMLP, SwitchMLP)}
