"""Linear layers with LoRA or DoRA, experts with LoRA, and the randomness of dropout."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.stored_layers import (
    dequantized_weight,
    dimensions,
    frozen_gradient,
    frozen_matmul,
)
from mlxtune.backend.workers.shards import ShardedLinear
from mlxtune.errors import ModelError

# The lower bound of a row's squared norm, so that dividing by a zero row's norm stays finite.
_MIN_SQUARED_NORM = 1e-30


@dataclass
class DropoutKeys:
    """The dropout keys of the current forward pass, shared by all LoRA layers of a model.

    `keys` is uint32: (B,), a key for each example, or (B, T), a key for each token;
    None means no dropout. `positions` is uint32 (T,), or None for 0 to T - 1. A token's mask
    depends only on its key, position and layer, so neither padding nor the split into
    micro-batches changes it.
    """

    keys: mx.array | None = None
    positions: mx.array | None = None

    def set(self, keys: mx.array | None, positions: mx.array | None) -> None:
        """Set the dropout keys and positions of the next forward pass."""
        self.keys, self.positions = keys, positions


@dataclass(frozen=True)
class PrincipalFactors:
    """PiSSA's initial values of A and B: A0 float32 (in, rank) and B0 (rank, out).

    With them, the frozen layer is the residual W - scale * (A0 B0)^T. The residual is never stored:
    outputs are computed with the stored weight W, quantised or not, and the term with A0 and B0 is
    subtracted.
    """

    a: mx.array
    b: mx.array


class JoinedLayers(Protocol):
    """Projections with the same input that run together."""

    @property
    def members(self) -> Sequence["LoRALinear"]:
        """The projections with LoRA."""

    @property
    def is_joined(self) -> bool:
        """Whether the layers run together now."""

    def output(self, number: int, x: mx.array) -> mx.array:
        """Return the output of projection `number` for x (..., in)."""


class LoRALinear(nn.Module):
    """A frozen linear layer plus `scale * (dropout(x) @ lora_a) @ lora_b`.

    `lora_a` is float32 (in, rank), `lora_b` float32 (rank, out); both are applied in the dtype of
    `x`. Names and shapes are mlx-lm's. With `principal`, the frozen layer is PiSSA's residual.

    Source: LoRA, arXiv:2106.09685, section 4.1. A is initialised as in that paper's code: Kaiming
    uniform with a = √5, that is, uniform within ±1/√in.
    """

    def __init__(
        self,
        linear: nn.Module,
        *,
        rank: int,
        scale: float,
        dropout: float,
        key: mx.array,
        dropout_keys: DropoutKeys,
        salt: int,
    ) -> None:
        super().__init__()
        input_dims, output_dims = dimensions(linear)
        if isinstance(linear, ShardedLinear):
            output_dims, input_dims = linear.shard.whole(output_dims, input_dims)
        bound = 1 / math.sqrt(input_dims)
        self.linear = linear
        self.scale = scale
        self.lora_a = mx.random.uniform(-bound, bound, (input_dims, rank), key=key)
        self.lora_b = mx.zeros((rank, output_dims))
        self.principal: PrincipalFactors | None = None
        # The dtype of the inputs, if known.
        self.input_dtype: mx.Dtype | None = None
        # The layers that this layer has joined, if any, and its index among them.
        self.shared: JoinedLayers | None = None
        self._number = 0
        self._dropout = dropout
        self._dropout_keys = dropout_keys
        self._salt = salt

    def __call__(self, x: mx.array) -> mx.array:
        if self.shared is not None and self.shared.is_joined:
            return self.shared.output(self._number, x)
        linear = self.linear
        if not isinstance(linear, ShardedLinear):
            return self._run(linear, x)
        return linear.shard.leave(self._run(linear.own_matmul, linear.shard.enter(x)))

    def join(self, shared: JoinedLayers, number: int) -> None:
        """Compute the output as projection `number` of `shared` from now on."""
        self.shared, self._number = shared, number

    def leave(self) -> None:
        """Compute the output alone from now on."""
        self.shared = None

    def expect(self, dtype: mx.Dtype) -> None:
        """Record the dtype of the inputs."""
        self.input_dtype = dtype

    def _run(self, matmul: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        if self.drops():
            return matmul(x) + self.lora_update(x)
        a, b = self.own_factors()
        return _add_update(matmul, x, a.astype(x.dtype), b.astype(x.dtype), self.scale)

    def factors(self) -> tuple[mx.array, mx.array]:
        """Return A (in, k) and B (k, out); the stored weight's update is scale * (A B)^T.

        k is the rank, or twice the rank for PiSSA: (A | A0) and (B / -B0).
        """
        if self.principal is None:
            return self.lora_a, self.lora_b
        return (
            mx.concatenate([self.lora_a, self.principal.a], axis=1),
            mx.concatenate([self.lora_b, -self.principal.b], axis=0),
        )

    def own_factors(self) -> tuple[mx.array, mx.array]:
        """Return A and B for the part of the frozen layer that this worker holds."""
        if isinstance(self.linear, ShardedLinear):
            return self.linear.shard.factors(self.lora_a, self.lora_b)
        return self.factors()

    def lora_update(self, x: mx.array) -> mx.array:
        """Return LoRA's addition to the frozen layer's output for inputs x (..., in)."""
        if not self.drops():
            return self._low_rank(x, *self.own_factors())
        if self.principal is None:
            return self._low_rank(self._drop(x), *self.own_factors())
        update = self._low_rank(self._drop(x), self.lora_a, self.lora_b)
        # A0 and B0 belong to the frozen layer, whose input gets no dropout.
        return update - self._low_rank(x, self.principal.a, self.principal.b)

    def _low_rank(self, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        # The scale is applied to the smallest array.
        return ((x @ a.astype(x.dtype)) * self.scale) @ b.astype(x.dtype)

    @property
    def has_dropout(self) -> bool:
        """Whether training uses dropout on this layer."""
        return self._dropout != 0

    def drops(self) -> bool:
        """Return whether dropout applies to the current forward pass."""
        return self._dropout_keys.keys is not None and self.has_dropout

    def _drop(self, x: mx.array) -> mx.array:
        """Zero entries of x (B, T, in) with probability p and scale the rest by 1 / (1 - p)."""
        rows, positions = self._dropout_keys.keys, self._dropout_keys.positions
        if rows is None or x.ndim != 3 or x.shape[0] != rows.shape[0]:
            raise ModelError("--dropout does not work with this architecture: set it to 0")
        batch, length, _ = x.shape
        width = len(self.lora_a)
        if positions is None:
            positions = mx.arange(length, dtype=mx.uint32)
        # One counter-based generator for each token, keyed by (row ^ salt, position).
        keys = mx.stack(
            [
                mx.broadcast_to((rows ^ self._salt).reshape(batch, -1), (batch, length)),
                mx.broadcast_to(positions, (batch, length)),
            ],
            axis=-1,
        ).reshape(-1, 2)
        keep_probability = 1 - self._dropout
        draw = mx.vmap(lambda key: mx.random.bernoulli(keep_probability, (width,), key=key))
        keep = draw(keys).reshape(batch, length, width)
        if isinstance(self.linear, ShardedLinear):
            keep = self.linear.shard.inputs(keep)
        return mx.where(keep, x / keep_probability, 0).astype(x.dtype)


def _add_update(
    matmul: Callable[[mx.array], mx.array], x: mx.array, a: mx.array, b: mx.array, scale: float
) -> mx.array:
    """Return matmul(x) + scale * (x A) B for x (..., in), A (in, k) and B (k, out).

    With this gradient, the two passes take 8 operations in all; with MLX's own, they would take 12.
    """

    def forward(x: mx.array, a: mx.array, b: mx.array) -> list[mx.array]:
        narrow = x @ a
        return [mx.addmm(matmul(x), narrow, b, alpha=scale), narrow]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        (x, a, b), cotangent, narrow = primals, cotangents[0], outputs[1]
        d_narrow = cotangent @ b.T
        d_x = mx.addmm(frozen_gradient(matmul, x, cotangent), d_narrow, a.T, alpha=scale)
        return [
            d_x,
            matmul_over_tokens(x, d_narrow, scale),
            matmul_over_tokens(narrow, cotangent, scale),
        ]

    return differentiable(forward, backward)(x, a, b)[0]


def matmul_over_tokens(x: mx.array, y: mx.array, scale: float) -> mx.array:
    """Return the sum over all tokens of scale * x y^T, (in, out), for x (..., in), y (..., out)."""
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    return mx.addmm(mx.array(0, x.dtype), x.T, y, alpha=scale, beta=0)


class DoRALinear(LoRALinear):
    """LoRALinear whose weight W + ΔW has its rows scaled to the magnitudes `m`, float32 (out,).

        y = m / ‖W + ΔW‖ * (W + ΔW) x + bias,   ΔW = scale * (A B)^T

    `m` is initialised to ‖W‖, the norms of the rows of W, which leaves the output unchanged. The
    norm in the denominator is a constant for the gradient. Dropout on the input applies to every
    trained term:

        y = W x + (m / ‖W + ΔW‖ - 1) * W dropout(x) + m / ‖W + ΔW‖ * ΔW dropout(x) + bias

    W + ΔW is not materialised for the norm. For each row w, ‖w + Δw‖² = ‖w‖² + 2 w·Δw + ‖Δw‖²,
    where the first term is constant and the others need only matmuls as narrow as the rank, so
    quantised matmuls need no dequantised W.

    Source: DoRA, arXiv:2402.09353, equation 5 and section 4.3; dropout as in PEFT's
    DoraLinearVariant; names and shapes as in mlx-lm's DoRALinear.
    """

    def __init__(self, linear: nn.Module, **options: Any) -> None:
        super().__init__(linear, **options)
        # These arrays are lazy, because the weights may not have been read yet.
        self._squares = mx.square(dequantized_weight(linear)).sum(axis=1)
        self.m = mx.sqrt(self._squares)

    def __call__(self, x: mx.array) -> mx.array:
        factor = (self.m / self.norm()).astype(x.dtype)
        if self.drops():
            dropped = self._drop(x)
            frozen = self.matmul(x) + (factor - 1) * self.matmul(dropped)
            y = frozen + factor * self._low_rank(dropped, self.lora_a, self.lora_b)
        else:
            y = factor * self.updated_matmul(x)
        return y + self.linear["bias"] if "bias" in self.linear else y

    def norm(self) -> mx.array:
        """Return the norms of the rows of W + ΔW, float32 (out,), without a gradient."""
        a, b = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b)
        # By row, with sums over the rank: w·Δw = scale sum(B * W A), ‖Δw‖² = scale² sum(B * A^T A
        # B).
        low = self.scale * self.matmul(a.T) + (0.5 * self.scale**2) * ((a.T @ a) @ b)
        squares = self._squares + 2 * (b * low).sum(axis=0)
        return mx.stop_gradient(mx.sqrt(mx.maximum(squares, _MIN_SQUARED_NORM)))

    def compute_magnitudes(self) -> None:
        """Compute `m` now, so that only one layer's dequantised weight is in memory at a time."""
        mx.eval(self.m, self._squares)

    def matmul(self, x: mx.array) -> mx.array:
        """Return W x for inputs x (..., in): the frozen layer without its bias."""
        return frozen_matmul(self.linear, x)

    def updated_matmul(self, x: mx.array) -> mx.array:
        """Return (W + ΔW) x for inputs x (..., in)."""
        return self.matmul(x) + self._low_rank(x, self.lora_a, self.lora_b)


class LoRAExperts(LoRASwitchLinear):
    """mlx-lm's LoRA on experts, with a gradient on CUDA for few tokens too.

    `lora_a` is float32 (experts, rank, in), `lora_b` float32 (experts, out, rank).

    Unsorted, mlx-lm's layer has a gradient by `mx.gather_mm` of matrices with `out` rows. For more
    than 64 float32 rows, CUDA refuses to launch that kernel, with "cuGraphAddKernelNode(…) failed:
    invalid argument": gather_gemm.cu of MLX 0.32 asks for more than 48 KiB of shared memory without
    setting CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    """

    def __init__(self, experts: nn.Module, *, rank: int, scale: float, key: mx.array) -> None:
        super().__init__(
            experts.input_dims, experts.output_dims, experts.num_experts, r=rank, scale=scale
        )
        self.linear = experts
        bound = 1 / math.sqrt(experts.input_dims)
        shape = (experts.num_experts, rank, experts.input_dims)
        self.lora_a: mx.array = mx.random.uniform(-bound, bound, shape, key=key)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the outputs (..., k, 1, out) of experts (..., k) for x (..., k or 1, 1, in)."""
        if sorted_indices:
            output: mx.array = super().__call__(x, indices, sorted_indices)
            return output
        narrow = _unsorted_matmuls(x, self.lora_a, indices)
        wide = _unsorted_matmuls(narrow, self.lora_b, indices)
        return self.linear(x, indices) + (self.scale * wide).astype(x.dtype)


def _unsorted_matmuls(x: mx.array, matrices: mx.array, experts: mx.array) -> mx.array:
    """Return x (..., k or 1, 1, in) times each expert's matrix^T: (..., k, 1, out).

    `matrices` is (experts, out, in), and `experts` (..., k). A matrix is copied for each pair of a
    token and an expert, which are fewer than 64, because mlx-lm sorts more. The backward pass
    copies the matrices again, so none are kept.
    """

    def matmul(x: mx.array, matrices: mx.array) -> mx.array:
        return x @ matrices[experts].swapaxes(-1, -2)

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        x, matrices = primals
        # In a graph of many layers, no copy is made before the layer's gradient.
        later = mx.depends([matrices], [cotangent])[0]
        return mx.vjp(matmul, [x, later], [cotangent])[1]

    y: mx.array = differentiable(matmul, gradient)(x, matrices)
    return y


def step_keys(seed: int, step: int, row_ids: tuple[int, ...]) -> mx.array:
    """Return uint32 (B,): the dropout key of each row at a step, independent of earlier steps."""
    return mx.array([hash_of(f"{seed}/{step}/{row_id}", 4) for row_id in row_ids], dtype=mx.uint32)


def hash_of(text: str, size: int) -> int:
    """Return a hash of `text` as an integer of `size` bytes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")
