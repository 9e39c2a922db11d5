"""What an adapter file says of LoRA: one rank and one scale for all, on the weights as they are."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.lora.lora import LoRALinear, LoRASummary, adapted_modules


def as_written(model: nn.Module, lora: LoRASummary) -> dict[str, mx.array]:
    """Return an adapter's tensors by their full names, as mlx-lm computes with them.

    Where modules differ in rank, all have the largest, filled up with zeros; where they differ in
    scale, B makes up for it. What PiSSA took out of a weight is taken off again by as many further
    directions: (A | A0), (B / -B0).
    """
    tensors: dict[str, mx.array] = {}
    for name, module in adapted_modules(model).items():
        own = (module.lora_a, module.lora_b)
        a, b = module.factors() if isinstance(module, LoRALinear) else own
        a, b = fitted(a, b, lora.written_rank, module.scale / lora.scale)
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        if "m" in module:
            tensors[f"{name}.m"] = module.m
    return tensors


def fitted(a: mx.array, b: mx.array, rank: int, ratio: float) -> tuple[mx.array, mx.array]:
    """Return A (in, r) and B (r, out) of `rank`, B times a ratio.

    Those of experts are A (experts, r, in) and B (experts, out, r).
    """
    axes = (1, 0) if a.ndim == 2 else (1, 2)
    b = b if ratio == 1 else b * ratio
    return _padded(a, axes[0], rank), _padded(b, axes[1], rank)


def refitted(a: mx.array, b: mx.array, rank: int, ratio: float) -> tuple[mx.array, mx.array]:
    """Return the A and B that `fitted` was given, of a lower rank. Raises ValueError.

    That is if there is more than zeros beyond the rank.
    """
    axes = (1, 0) if a.ndim == 2 else (1, 2)
    (a, beyond_a), (b, beyond_b) = (
        mx.split(x, [rank], axis=axis) for x, axis in zip((a, b), axes, strict=True)
    )
    if beyond_b.size and (mx.any(beyond_b) or mx.any(beyond_a)):
        raise ValueError(f"has more than zeros beyond rank {rank}")
    return a, (b if ratio == 1 else b / ratio)


def _padded(x: mx.array, axis: int, rank: int) -> mx.array:
    missing = rank - x.shape[axis]
    if not missing:
        return x
    return mx.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
