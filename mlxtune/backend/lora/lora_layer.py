"""A linear layer with LoRA on it, and the randomness of its dropout."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxtune.errors import ModelError


@dataclass
class DropoutKeys:
    """Where LoRA layers find the randomness of the forward pass under way.

    `rows` is uint32 (B,), one number for each line of the micro-batch, or (B, T), one for each
    token, or None for no dropout; `positions` is uint32 (T,), or None for 0 to T - 1. A token's
    mask depends on its row, position and layer alone, so that neither padding nor the split into
    micro-batches changes it.
    """

    rows: mx.array | None = None
    positions: mx.array | None = None

    def set(self, rows: mx.array | None, positions: mx.array | None) -> None:
        """Have the next forward pass use these."""
        self.rows, self.positions = rows, positions


@dataclass(frozen=True)
class Taken:
    """What PiSSA takes out of a weight, to be trained: A0 float32 (in, rank) and B0 (rank, out).

    The residual W - scale * (A0 B0)^T stands nowhere: it is the weight as it is stored, quantised
    or not, less this product.
    """

    a: mx.array
    b: mx.array


class LoRALinear(nn.Module):
    """A frozen linear layer plus `scale * (dropout(x) @ lora_a) @ lora_b`.

    `lora_a` is float32 (in, rank), `lora_b` float32 (rank, out); both are applied in the dtype of
    `x`. Parameter names and shapes are those of mlx-lm, which loads what is trained here. With
    `taken`, the frozen layer is the weight's residual.

    Source: LoRA, arXiv:2106.09685, section 4.1; A as in its code, Kaiming uniform with a = √5,
    which is uniform within ±1/√in.
    """

    kind = "lora"

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
        input_dims, output_dims = widths(linear)
        bound = 1 / math.sqrt(input_dims)
        self.linear = linear
        self.scale = scale
        self.lora_a = mx.random.uniform(-bound, bound, (input_dims, rank), key=key)
        self.lora_b = mx.zeros((rank, output_dims))
        self.taken: Taken | None = None
        self._dropout = dropout
        self._dropout_keys = dropout_keys
        self._salt = salt

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + self.update_of(x)

    def factors(self) -> tuple[mx.array, mx.array]:
        """Return A (in, k) and B (k, out), whose product is the update of the weight as stored.

        That is (A | A0) and (B / -B0) where something was taken out of it, k then twice the rank.
        """
        if self.taken is None:
            return self.lora_a, self.lora_b
        return (
            mx.concatenate([self.lora_a, self.taken.a], axis=1),
            mx.concatenate([self.lora_b, -self.taken.b], axis=0),
        )

    def update_of(self, x: mx.array) -> mx.array:
        """Return what is added to the frozen layer's output for inputs x (..., in)."""
        if not self.drops():
            return self._low_rank(x, *self.factors())
        update = self._low_rank(self._drop(x), self.lora_a, self.lora_b)
        # The residual belongs to the frozen layer, whose input is not dropped.
        return (
            update if self.taken is None else update - self._low_rank(x, self.taken.a, self.taken.b)
        )

    def _low_rank(self, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        # The scale goes where the array is smallest.
        return ((x @ a.astype(x.dtype)) * self.scale) @ b.astype(x.dtype)

    def drops(self) -> bool:
        """Tell whether the forward pass under way drops entries of its input."""
        return self._dropout_keys.rows is not None and self._dropout != 0

    def _drop(self, x: mx.array) -> mx.array:
        """Zero entries of x (B, T, in) with probability p and scale the rest by 1 / (1 - p)."""
        rows, positions = self._dropout_keys.rows, self._dropout_keys.positions
        if rows is None or not self.drops():
            return x
        if x.ndim != 3 or x.shape[0] != rows.shape[0]:
            raise ModelError("--dropout is not possible with this architecture: set it to 0")
        batch, length, width = x.shape
        if positions is None:
            positions = mx.arange(length, dtype=mx.uint32)
        # One counter-based generator for each token, keyed by (row ^ layer, position).
        keys = mx.stack(
            [
                mx.broadcast_to((rows ^ self._salt).reshape(batch, -1), (batch, length)),
                mx.broadcast_to(positions, (batch, length)),
            ],
            axis=-1,
        ).reshape(-1, 2)
        keep_probability = 1 - self._dropout
        draw = mx.vmap(lambda key: mx.random.bernoulli(keep_probability, (width,), key=key))
        keep = draw(keys).reshape(x.shape)
        return mx.where(keep, x / keep_probability, 0).astype(x.dtype)


def widths(linear: nn.Module) -> tuple[int, int]:
    """Return how many inputs and outputs a linear layer has, quantised or not."""
    outputs, inputs = linear.weight.shape
    return (inputs * 32 // linear.bits if "scales" in linear else inputs), outputs


def weight_of(linear: nn.Module) -> mx.array:
    """Return a linear layer's weight (out, in) in float32, dequantised where it is quantised."""
    if hasattr(linear, "unpacked"):
        return linear.unpacked(mx.float32)
    weight = linear.weight
    if "scales" in linear:
        scales, biases = linear.scales, linear.get("biases")
        sizes = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        weight = mx.dequantize(weight, scales, biases, **sizes)
    return weight.astype(mx.float32)


def hash_of(text: str, size: int) -> int:
    """Return a number of so many bytes that depends on a text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")
