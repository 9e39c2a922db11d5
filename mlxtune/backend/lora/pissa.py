"""PiSSA: LoRA that begins as the largest part of the weight, which is then no longer frozen."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.lora.lora_layer import LoRALinear, Taken, hash_of, weight_of
from mlxtune.config.ranks import pissa_iterations

# Directions that are followed beyond those asked for, which then converge faster.
_BESIDE = 8

Matrix = npt.NDArray[Any]


def begin_pissa(modules: dict[str, nn.Module], init: str, seed: int) -> None:
    """Take its largest singular vectors out of each weight, for LoRA to begin as them.

    The weights stay as they are: what LoRA begins as is taken off again in the forward pass (see
    `Taken`), so that a quantised weight is not quantised anew, and what is written is LoRA on the
    weights that everyone has.

    Source: PiSSA, arXiv:2404.02948, equations 2 to 4; divided by the scale as in PEFT's pissa_init.
    """
    for name, module in modules.items():
        if isinstance(module, LoRALinear):
            weight = np.array(weight_of(module.linear))
            rank = module.lora_a.shape[1]
            found = principal(weight, rank, pissa_iterations(init), hash_of(f"{seed}/{name}", 8))
            factors = _factors(*found, module.scale)
            # In rows, as they are read back: products of another layout are rounded otherwise.
            rows = [np.ascontiguousarray(each, dtype=np.float32) for each in factors]
            module.lora_a, module.lora_b = map(mx.array, rows)
            # Arrays of their own: to a compiled step, those that are trained are its inputs.
            module.taken = Taken(*map(mx.array, rows))


def _factors(u: Matrix, s: Matrix, v: Matrix, scale: float) -> tuple[Matrix, Matrix]:
    """Return A (in, rank) and B (rank, out) with scale * (A B)^T = U S V^T."""
    root = np.sqrt(s / scale)
    return v * root, (u * root).T


def principal(
    weight: Matrix, rank: int, iterations: int | None, seed: int
) -> tuple[Matrix, Matrix, Matrix]:
    """Return U (out, rank), S (rank,) and V (in, rank) of a weight (out, in): its largest part.

    Without `iterations` they are exact: from the eigenvectors of W W^T or W^T W, the smaller, in
    float64, which takes an eighth of the time of a singular value decomposition. With them, they
    are found from random directions by so many power iterations, arXiv:0909.4061, algorithms 4.4
    and 5.1.
    """
    if iterations is not None:
        return _iterated(weight, rank, iterations, seed)
    if weight.shape[0] > weight.shape[1]:
        v, s, u = principal(weight.T, rank, None, seed)
        return u, s, v
    wide = weight.astype(np.float64)
    u = np.linalg.eigh(wide @ wide.T)[1][:, ::-1][:, :rank]
    projected = u.T @ wide
    s = np.linalg.norm(projected, axis=1)
    # A weight of a lower rank has directions of no size, which take nothing.
    return u, s, (projected / np.where(s > 0, s, 1)[:, None]).T


def _iterated(
    weight: Matrix, rank: int, iterations: int, seed: int
) -> tuple[Matrix, Matrix, Matrix]:
    random = np.random.default_rng(seed)
    count = min(rank + _BESIDE, *weight.shape)
    start = random.standard_normal((weight.shape[1], count), dtype=np.float32)
    q = np.linalg.qr(weight @ start)[0]
    for _ in range(iterations):
        q = np.linalg.qr(weight @ np.linalg.qr(weight.T @ q)[0])[0]
    u, s, v = np.linalg.svd(q.T @ weight, full_matrices=False)
    return (q @ u)[:, :rank], s[:rank], v[:rank].T
