"""Finds the attention layers that kernels can serve."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE

from mlxtune.backend.forward.kernels.attention_kernels import (
    AttentionKernels,
    Heads,
    HeadSizes,
    plain_packed,
    plain_padded,
    supports_attention,
)
from mlxtune.backend.forward.kernels.attention_trial import KernelsFor
from mlxtune.backend.lora.lora_layers import LoRALinear
from mlxtune.backend.lora.targets import PROJECTIONS
from mlxtune.backend.models.mixers.attention import scaled_dot_product_attention
from mlxtune.backend.models.packed import Layout, PackedCache
from mlxtune.backend.models.stored_layers import dimensions
from mlxtune.core.steps.pack import Segment

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
# The number of tokens in a trial: more than the few queries for which attention has another form.
_TRIAL_TOKENS = 12
# The largest accepted difference in a trial, as a fraction of the largest value.
_TOLERANCE = 1e-4


class KernelAttention:
    """An attention layer that runs by kernels between its projections."""

    def __init__(self, mixer: nn.Module, heads: Heads, kernels: AttentionKernels) -> None:
        self._scale, self._heads, self._kernels = mixer.scale, heads, kernels

    def run(
        self, mixer: nn.Module, layout: Layout, x: mx.array, mask: Any = None, cache: Any = None
    ) -> mx.array | None:
        """Return the layer's output (1, N, ·) for a sequence; None if the kernels do not
        support it.
        """
        projected = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
        if not supports_attention(self._heads, layout, projected):
            return None
        q, k, v = self._kernels.padded(self._heads, layout, *projected)
        output = scaled_dot_product_attention(q, k, v, cache, self._scale, mask)
        attended: mx.array = mixer.o_proj(self._kernels.packed(layout, output))
        return attended


def kernel_attention(mixer: nn.Module, kernels_for: KernelsFor) -> KernelAttention | None:
    """Return how a mixer runs by kernels; None if it does other work, or kernels do not pay."""
    heads = find_attention_heads(mixer)
    kernels = None if heads is None else kernels_for(heads)
    return None if heads is None or kernels is None else KernelAttention(mixer, heads, kernels)


def find_attention_heads(mixer: nn.Module) -> Heads | None:
    """Return the heads of a mixer that kernels can serve; None if it does other work."""
    if not _looks_standard(mixer):
        return None
    try:
        return _computed_heads(mixer)
    # Any error may occur: some mixers need arguments or attributes that most mixers lack.
    except Exception:  # noqa: BLE001
        return None


def _looks_standard(mixer: nn.Module) -> bool:
    """Return whether a mixer has the parts of a standard attention layer, and no others."""
    parts = set(mixer.children())
    parameters = list(inspect.signature(type(mixer).__call__).parameters)
    return (
        # A trial on a few tokens cannot tell what other code does to later tokens.
        type(mixer).__module__.startswith("mlx_lm.models.")
        and {*_PROJECTIONS, "rope"} <= parts <= {*_PROJECTIONS, *_NORMS, "rope"}
        and len(parts & set(_NORMS)) != 1
        and not any(isinstance(each, mx.array) for each in dict.values(mixer))
        and parameters == ["self", "x", "mask", "cache"]
        and all(isinstance(_frozen(mixer[name]), PROJECTIONS) for name in _PROJECTIONS)
        and type(mixer.rope) in (nn.RoPE, Llama3RoPE)
        and not mixer.rope.traditional
        and not any(tree_flatten(mixer[name].trainable_parameters()) for name in parts & {*_NORMS})
    )


def _frozen(projection: nn.Module) -> nn.Module:
    return projection.linear if isinstance(projection, LoRALinear) else projection


def _computed_heads(mixer: nn.Module) -> Heads | None:
    """Return the heads of a mixer; None if a trial shows that they do not describe it."""
    shapes: list[tuple[int, ...]] = []

    def rope(x: mx.array, offset: int = 0) -> mx.array:
        shapes.append(x.shape)
        turned: mx.array = own_rope(x, offset=offset)
        return turned

    own_rope = mixer.rope
    widths = [dimensions(_frozen(mixer[name]))[1] for name in _PROJECTIONS[:3]]
    keys = mx.random.split(mx.random.key(0), 3)
    # Large scores reveal a bound on scores.
    projected = [
        4 * mx.random.normal((1, _TRIAL_TOKENS, width), key=key)
        for width, key in zip(widths, keys, strict=True)
    ]
    expected = _with_parts(mixer, projected, rope)
    (_, queries, _, size), (_, count, _, _) = shapes
    heads = Heads(
        HeadSizes(queries, count, size, mixer.rope.dims), _frequencies(mixer.rope), _norms(mixer)
    )
    if not heads.sizes.is_supported:
        return None
    alone = Layout([Segment(0, _TRIAL_TOKENS, 0, -1)])
    q, k, v = plain_padded(heads, alone, *projected)
    output = scaled_dot_product_attention(q, k, v, PackedCache(), mixer.scale, "causal")
    apart = mx.abs(plain_packed(alone, output) - expected).max() / mx.abs(expected).max()
    return heads if float(apart) <= _TOLERANCE else None


def _with_parts(
    mixer: nn.Module, projected: list[mx.array], rope: Callable[..., mx.array]
) -> mx.array:
    """Return what a mixer computes between given projections and its output projection."""
    parts = {name: mixer[name] for name in (*_PROJECTIONS, "rope")}
    replacements: dict[str, Callable[..., mx.array]] = {
        name: lambda _, array=array: array
        for name, array in zip(_PROJECTIONS[:3], projected, strict=True)
    }
    try:
        dict.update(mixer, {**replacements, "o_proj": lambda x: x, "rope": rope})
        output: mx.array = mixer(projected[0], "causal", PackedCache())
        return output
    finally:
        dict.update(mixer, parts)


def _frequencies(rope: nn.Module) -> tuple[float, ...]:
    """Return the angle between neighbouring positions for each pair of entries."""
    if isinstance(rope, Llama3RoPE):
        return tuple((1 / rope._freqs).tolist())
    pairs = np.arange(rope.dims // 2)
    return tuple(map(float, rope.scale * rope.base ** (-2 * pairs / rope.dims)))


def _norms(mixer: nn.Module) -> mx.array | None:
    """Return the `norms` of `Heads`: effective weights, as some norms add 1 to the stored ones."""
    if "q_norm" not in mixer:
        return None
    weights, epsilons = [], []
    for name in _NORMS:
        norm = mixer[name]
        ones = norm(mx.ones((1, 1, 1, norm.weight.size)))
        weights.append(ones.reshape(-1) * math.sqrt(1 + norm.eps))
        epsilons.append(norm.eps)
    return mx.concatenate([*weights, mx.array(epsilons)]).astype(mx.float32)
