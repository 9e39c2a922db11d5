"""Masked cross-entropy: the plain reference."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def cross_entropy_sum(
    model: nn.Module, inputs: mx.array, targets: mx.array, mask: mx.array
) -> mx.array:
    """Return the summed cross-entropy of supervised targets, in nats, as a float32 scalar.

    `inputs` and `targets` are int32 (B, T), `mask` float32 (B, T). The logits are those of one
    forward pass without a KV cache, taken to float32: logsumexp(z) - z[target] where mask is 1.
    """
    logits_BxTxV = model(inputs).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits_BxTxV, targets)
    return (losses * mask).sum()
