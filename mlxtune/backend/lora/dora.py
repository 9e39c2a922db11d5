"""DoRA: LoRA that trains the size of each row of the weight apart from its direction."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.lora.lora_layer import LoRALinear, weight_of
from mlxtune.backend.model import dequantized

# Of a squared size: a row of zeros has none, and stays so.
_SMALLEST = 1e-30


class DoRALinear(LoRALinear):
    """LoRALinear whose weight W + ΔW has its rows scaled to the sizes `m`, float32 (out,).

        y = m / ‖W + ΔW‖ * (W + ΔW) x + bias,   ΔW = scale * (A B)^T

    `m` begins as ‖W‖, the norms of the rows of W, which leaves the layer as it was. The norm in the
    denominator is a constant for the gradient. Dropout, on the input, reaches all that is learned:

        y = W x + (m / ‖W + ΔW‖ - 1) * W dropout(x) + m / ‖W + ΔW‖ * ΔW dropout(x) + bias

    Neither the sum W + ΔW nor a dequantised W is ever made for the norm. Of each row w,
    ‖w + Δw‖² = ‖w‖² + 2 w·Δw + ‖Δw‖², where the first never changes, and the others are
    products as narrow as the rank.

    Source: DoRA, arXiv:2402.09353, equation 5 and section 4.3; dropout as in PEFT's
    DoraLinearVariant; names and shapes as in mlx-lm's DoRALinear.
    """

    kind = "dora"

    def __init__(self, linear: nn.Module, **options: Any) -> None:
        super().__init__(linear, **options)
        # Not computed before it is asked for: a model may stand here of which no weight is read.
        self._squares = row_squares(linear)
        self.m = mx.sqrt(self._squares)

    def __call__(self, x: mx.array) -> mx.array:
        factor = (self.m / self.norm()).astype(x.dtype)
        if self.drops():
            dropped = self._drop(x)
            frozen = self.product(x) + (factor - 1) * self.product(dropped)
            y = frozen + factor * self._low_rank(dropped, self.lora_a, self.lora_b)
        else:
            y = factor * self.updated(x)
        return y + self.linear["bias"] if "bias" in self.linear else y

    def norm(self) -> mx.array:
        """Return the norms of the rows of W + ΔW, float32 (out,), without a gradient."""
        a, b = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b)
        # w·Δw by row is the sum over the rank of B times W A.
        low = self.scale * self.product(a.T) + (0.5 * self.scale**2) * ((a.T @ a) @ b)
        squares = self._squares + 2 * (b * low).sum(axis=0)
        return mx.stop_gradient(mx.sqrt(mx.maximum(squares, _SMALLEST)))

    def product(self, x: mx.array) -> mx.array:
        """Return W x of inputs x (..., in): the frozen layer without its bias."""
        return product(self.linear, x)

    def updated(self, x: mx.array) -> mx.array:
        """Return (W + ΔW) x of inputs x (..., in)."""
        return self.product(x) + self._low_rank(x, self.lora_a, self.lora_b)


def product(linear: nn.Module, x: mx.array) -> mx.array:
    """Return what a linear layer gives for x (..., in), without its bias."""
    if "bias" not in linear:
        return linear(x)
    if hasattr(linear, "unpacked"):
        return dequantized.product(x, linear)
    if isinstance(linear, nn.QuantizedLinear):
        return mx.quantized_matmul(
            x,
            linear["weight"],
            scales=linear["scales"],
            biases=linear.get("biases"),
            transpose=True,
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
        )
    return x @ linear["weight"].T if isinstance(linear, nn.Linear) else linear(x) - linear["bias"]


def row_squares(linear: nn.Module) -> mx.array:
    """Return ‖w‖² of each row of a linear layer's weight, float32 (out,)."""
    return mx.square(weight_of(linear)).sum(axis=1)
