"""Products with quantised matrices that are unpacked for each product, and not kept."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.model.autograd import differentiable
from mlxtune.backend.model.memory import on_cpu

# What is said of how quantised matrices are computed with.
QUANTIZED, DEQUANTIZED = "quantized", "dequantized"


class DequantizedLinear(nn.QuantizedLinear):
    """A quantised linear layer whose weight is unpacked for each product."""

    def __call__(self, x: mx.array) -> mx.array:
        y = product(x, self)
        return y + self["bias"] if "bias" in self else y

    def unpacked(
        self, dtype: mx.Dtype, rows: Any = None, after: mx.array | None = None
    ) -> mx.array:
        """Return the weight (out, in) in a dtype, or some rows of it; made once `after` is."""
        return unpacked(self, dtype, rows, after)


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """Quantised embeddings that are given in the compute dtype, which MLX's give in bfloat16.

    Theirs are that in the modes whose scales are no floating-point numbers; the model would go on
    in it.
    """

    compute_dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        return unpacked(self, self.compute_dtype, x)


class DequantizedEmbedding(QuantizedEmbedding):
    """Quantised embeddings which, as a head, are unpacked for each product."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits (..., V) of hidden states (..., H)."""
        return product(x, self)

    def unpacked(
        self, dtype: mx.Dtype, rows: Any = None, after: mx.array | None = None
    ) -> mx.array:
        """Return the embeddings (V, H) in a dtype, or some rows of them; made once `after` is."""
        return unpacked(self, dtype, rows, after)


class PackedRows:
    """A quantised matrix of which some rows at a time are unpacked to float32, by indexing it."""

    dtype = mx.float32

    def __init__(self, module: Any) -> None:
        self._module = module
        inputs = module.weight.shape[-1] * 32 // module.bits
        self.shape = (module.weight.shape[0], inputs)
        self.size = self.shape[0] * inputs

    def __getitem__(self, rows: Any) -> mx.array:
        return self._module.unpacked(mx.float32, rows)


def product(x: mx.array, module: Any) -> mx.array:
    """Return x (..., in) times the transpose of a module's frozen matrix, in the dtype of x.

    The matrix is made for the product, and again for the gradient of x, in float32 on the CPU,
    whose products of other dtypes are slow. It is asked for no sooner than what it is multiplied
    with is there, so that a graph of many layers does not make all of them first.
    """
    dtype = mx.float32 if on_cpu() else x.dtype

    def forward(x: mx.array) -> mx.array:
        weight = module.unpacked(dtype, after=x)
        return (x.astype(dtype) @ weight.T).astype(x.dtype)

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        weight = module.unpacked(dtype, after=cotangent)
        return (cotangent.astype(dtype) @ weight).astype(cotangent.dtype)

    return differentiable(forward, gradient)(x)


def compute_quantized(model: nn.Module, dtype: mx.Dtype, wanted: str) -> str | None:
    """Have a model's quantised matrices computed with as `wanted`: quantized, dequantized or auto.

    auto is what is faster: MLX's own quantised products on a GPU, and unpacked matrices on the CPU.
    Experts are left to MLX, and nf4, which it has no products of, is unpacked always. Returns what
    was chosen, None where nothing is quantised.
    """
    chosen = wanted
    if wanted == "auto":
        quantised = (module for _, module in model.named_modules() if "scales" in module)
        native = any(module.mode != "nf4" for module in quantised)
        chosen = QUANTIZED if native and not on_cpu() else DEQUANTIZED
    found = False
    for _, module in model.named_modules():
        kind: Any = type(module)
        if kind is nn.QuantizedEmbedding:
            kind = DequantizedEmbedding if chosen == DEQUANTIZED else QuantizedEmbedding
            module.__class__ = kind
            module.compute_dtype = dtype
        elif kind is nn.QuantizedLinear and chosen == DEQUANTIZED:
            module.__class__ = DequantizedLinear
        found = found or "scales" in module
    return chosen if found else None


def unpacked(
    module: Any, dtype: mx.Dtype, rows: Any = None, after: mx.array | None = None
) -> mx.array:
    """Return the weight of a module in one of MLX's formats, or some rows of it, in a dtype.

    It is made once `after` is.
    """
    weight, scales, biases = module["weight"], module["scales"], module.get("biases")
    if rows is not None:
        weight, scales = weight[rows], scales[rows]
        biases = None if biases is None else biases[rows]
    if after is not None:
        weight = mx.depends([weight], [after])[0]
    if mx.issubdtype(scales.dtype, mx.floating):
        # MLX unpacks in the dtype of the scales, and rounds in it.
        scales = scales.astype(dtype)
        biases = None if biases is None else biases.astype(dtype)
    return mx.dequantize(
        weight, scales, biases, module.group_size, module.bits, mode=module.mode, dtype=dtype
    )
