"""PiSSA: A and B initialised to the principal part of the weight, which is then trained."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.lora.layers import LoRALinear, PrincipalFactors, hash_of
from mlxtune.backend.models.layers import dequantized_weight
from mlxtune.config.ranks import pissa_iterations

# Extra directions, which make the power iteration converge faster.
_OVERSAMPLING = 8

Matrix = npt.NDArray[Any]


def init_pissa(modules: dict[str, nn.Module], init: str, seed: int) -> None:
    """Initialise LoRA to the largest singular vectors of each weight.

    The stored weights do not change: the initial product is subtracted in the forward pass (see
    `PrincipalFactors`), so that a quantised weight is not quantised again, and the written adapter
    applies to the published weights.

    Source: PiSSA, arXiv:2404.02948, equations 2 to 4; divided by the scale as in PEFT's pissa_init.
    """
    for name, module in modules.items():
        if isinstance(module, LoRALinear):
            weight = np.array(dequantized_weight(module.linear))
            rank, key = module.lora_a.shape[1], hash_of(f"{seed}/{name}", 8)
            u, s, v = principal_svd(weight, rank, pissa_iterations(init), key)
            root = np.sqrt(s / module.scale)
            # Row-major, as a resumed run reads them: products of another layout round differently.
            a, b = (np.ascontiguousarray(x, dtype=np.float32) for x in (v * root, (u * root).T))
            module.lora_a, module.lora_b = mx.array(a), mx.array(b)
            # Separate arrays: a compiled step takes the trained ones as its inputs.
            module.principal = PrincipalFactors(mx.array(a), mx.array(b))


def principal_svd(
    weight: Matrix, rank: int, iterations: int | None, seed: int
) -> tuple[Matrix, Matrix, Matrix]:
    """Return the largest part of a weight (out, in): U (out, rank), S (rank,) and V (in, rank).

    Without `iterations` the result is exact: from the eigenvectors of W W^T or W^T W, whichever is
    smaller, in float64, in an eighth of the time of a singular value decomposition. With them, it
    comes from random directions by that many power iterations, arXiv:0909.4061, algorithms 4.4
    and 5.1.
    """
    if iterations is not None:
        return _randomized_svd(weight, rank, iterations, seed)
    if weight.shape[0] > weight.shape[1]:
        v, s, u = principal_svd(weight.T, rank, None, seed)
        return u, s, v
    wide = weight.astype(np.float64)
    u = np.linalg.eigh(wide @ wide.T)[1][:, ::-1][:, :rank]
    projected = u.T @ wide
    s = np.linalg.norm(projected, axis=1)
    # A weight of lower rank has singular values of zero, whose vectors contribute nothing.
    return u, s, (projected / np.where(s > 0, s, 1)[:, None]).T


def _randomized_svd(
    weight: Matrix, rank: int, iterations: int, seed: int
) -> tuple[Matrix, Matrix, Matrix]:
    random = np.random.default_rng(seed)
    count = min(rank + _OVERSAMPLING, *weight.shape)
    start = random.standard_normal((weight.shape[1], count), dtype=np.float32)
    q = np.linalg.qr(weight @ start)[0]
    for _ in range(iterations):
        q = np.linalg.qr(weight @ np.linalg.qr(weight.T @ q)[0])[0]
    u, s, v = np.linalg.svd(q.T @ weight, full_matrices=False)
    return (q @ u)[:, :rank], s[:rank], v[:rank].T
