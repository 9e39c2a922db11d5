"""Matrices that stay in 16 bits while float32 is computed in: each use casts one, exactly."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class Embedding(nn.Embedding):
    """Embeddings that are stored in 16 bits and given in float32."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(mx.float32)


def stored_weights(model: nn.Module) -> set[str]:
    """Return the paths of the matrices that may stay in 16 bits while float32 is computed in.

    Those are the weights of linear layers and embeddings, of which each use makes a float32 copy.
    """
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding) and module.weight.dtype != mx.float32
    }


def embed_in_float32(model: nn.Module) -> None:
    """Have the embeddings of a model be given in float32, whatever they are stored in."""
    for _, module in model.named_modules():
        if type(module) is nn.Embedding:
            module.__class__ = Embedding
