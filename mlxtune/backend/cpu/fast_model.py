"""Makes one model compute with this folder's kernels, without changing shared classes."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, gemma, gemma2, gemma3_text, gemma3n, gemma4_text, rope_utils
from mlx_lm.models import base as mlx_lm_base

from mlxtune.backend.cpu import blas_matmuls, kernel_functions
from mlxtune.backend.cpu.arrays import computes
from mlxtune.backend.cpu.kernel_layers import FrozenMatmul, matmul
from mlxtune.backend.lora.lora_layers import DoRALinear, LoRALinear
from mlxtune.backend.models import packed
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.mixers.attention import scaled_dot_product_attention
from mlxtune.backend.models.mixers.replacements import FUNCTIONS, KINDS
from mlxtune.backend.models.nf4 import NF4Linear
from mlxtune.backend.models.replaced import Replacements, subclasses
from mlxtune.backend.models.stored_layers import (
    DequantizedEmbedding,
    DequantizedLinear,
    QuantizedHead,
    StoredEmbedding,
    StoredLinear,
)


def _matmul(x: mx.array, module: nn.Module) -> mx.array:
    """Return x times the transpose of a module's frozen weight."""

    def run(x: mx.array) -> mx.array:
        return matmul(lambda: blas_matmuls.forward(x, _frozen_weight(module)))

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        return blas_matmuls.backward(cotangent, _frozen_weight(module))

    return differentiable(run, gradient)(x)


def _matmul_with_update(x: mx.array, layer: LoRALinear) -> mx.array:
    """Return a LoRA layer's x W^T + scale * (x A) B, with gradients for x, A and B."""

    def run(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        def make() -> mx.array:
            y = blas_matmuls.forward(x, _frozen_weight(layer.linear))
            blas_matmuls.add_update(y, x, a, b, layer.scale)
            return y

        return matmul(make)

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        x, a, b = primals
        weight = _frozen_weight(layer.linear)
        return blas_matmuls.update_gradients(x, a, b, cotangent, weight, layer.scale)

    return differentiable(run, gradient)(x, *layer.factors())


def _frozen_weight(module: nn.Module) -> blas_matmuls.Weight:
    # Quantised weights are unpacked for each use: MLX's quantised matmuls take 30 times as long.
    return QuantizedHead(module) if hasattr(module, "unpacked") else module["weight"]


class _Linear(FrozenMatmul):
    def __call__(self, x: mx.array) -> mx.array:
        if not computes(x):
            return super().__call__(x)
        y = _matmul(x, self)
        return y + self["bias"] if "bias" in self else y


class _TiedHead(nn.Module):
    def as_linear(self, x: mx.array) -> mx.array:
        return _matmul(x, self) if computes(x) else super().as_linear(x)


class _LoRALinear(LoRALinear):
    """A LoRA layer that computes the frozen matmul and the update together."""

    def __call__(self, x: mx.array) -> mx.array:
        if self.drops() or not _serves(self, x):
            return super().__call__(x)
        y = _matmul_with_update(x, self)
        return y + self.linear["bias"] if "bias" in self.linear else y


class _DoRALinear(DoRALinear):
    """A DoRA layer with fast matmuls. They leave out the bias, which must not be scaled."""

    def matmul(self, x: mx.array) -> mx.array:
        return _matmul(x, self.linear) if _serves(self, x) else super().matmul(x)

    def updated_matmul(self, x: mx.array) -> mx.array:
        return _matmul_with_update(x, self) if _serves(self, x) else super().updated_matmul(x)


def _serves(layer: LoRALinear, x: mx.array) -> bool:
    return computes(x) and isinstance(layer.linear, FrozenMatmul)


class _RMSNorm(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        if not computes(x):
            return super().__call__(x)
        return kernel_functions.rms_norm(x, self["weight"], self.eps)


class _GemmaRMSNorm(nn.Module):
    """Gemma's norm, which multiplies by 1 plus its stored weight."""

    def __call__(self, x: mx.array) -> mx.array:
        if not computes(x):
            return super().__call__(x)
        return kernel_functions.rms_norm(x, 1.0 + self["weight"], self.eps)


class _RoPE(nn.Module):
    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return kernel_functions.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=offset,
        )


class _FrequencyRoPE(nn.Module):
    """Rotary embeddings with precomputed frequencies, as in Llama 3, Gemma 4 and other models."""

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        if options or getattr(self, "mscale", 1.0) != 1.0:
            packed.check_not_packed()
            return super().__call__(x, offset, **options)
        return kernel_functions.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


class _GeGLU(nn.Module):
    """Gemma's MLP, with the activation and its product in one kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(_geglu(self.gate_proj(x), self.up_proj(x)))
        return y


def _gated(
    fast: Callable[[mx.array, mx.array], mx.array], plain: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    def call(gate: mx.array, x: mx.array) -> mx.array:
        serves = computes(gate, x) and gate.shape == x.shape
        return fast(gate, x) if serves else plain(gate, x)

    return call


_geglu = _gated(kernel_functions.geglu, gemma4_text.geglu)


def _capped(cap: float, logits: mx.array) -> mx.array:
    if not computes(logits):
        return gemma4_text.logit_softcap(cap, logits)
    return kernel_functions.tanh(logits / cap) * cap


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    # An additive mask may have a gradient, as in DeepSeek's attention.
    constant = not isinstance(mask, mx.array) or mask.dtype == mx.bool_
    fast = constant and sinks is None and not hasattr(cache, "bits")
    if fast and computes(queries, keys, values):
        return kernel_functions.attention(queries, keys, values, scale, mask)
    packed.check_not_packed()
    return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)


_CPU_FUNCTIONS: dict[int, Any] = {
    id(mlx_lm_base.scaled_dot_product_attention): _attention,
    id(activations.swiglu): _gated(kernel_functions.swiglu, activations.swiglu),
    id(gemma4_text.geglu): _geglu,
    id(gemma4_text.logit_softcap): _capped,
    id(gemma3n.logit_softcap): _capped,
}

# The faster subclass of each class. Quantised layers that use MLX's own matmuls have none.
_CPU_KINDS: dict[type, type] = {
    **subclasses(_Linear, nn.Linear, StoredLinear, DequantizedLinear, NF4Linear),
    **subclasses(_TiedHead, nn.Embedding, StoredEmbedding, DequantizedEmbedding),
    **subclasses(_RMSNorm, nn.RMSNorm),
    **subclasses(_GemmaRMSNorm, gemma.RMSNorm, gemma2.RMSNorm, gemma3_text.RMSNorm),
    **subclasses(_RoPE, nn.RoPE),
    **subclasses(
        _FrequencyRoPE, rope_utils.Llama3RoPE, rope_utils.YarnRoPE, rope_utils.ProportionalRoPE
    ),
    **subclasses(_GeGLU, gemma2.MLP, gemma3_text.MLP),
    LoRALinear: _LoRALinear,
    DoRALinear: _DoRALinear,
}

_REPLACEMENTS = Replacements({**FUNCTIONS, **_CPU_FUNCTIONS}, {**KINDS, **_CPU_KINDS})


def make_fast(module: nn.Module) -> Callable[[], None]:
    """Make a module and its children compute with this folder's kernels.

    Returns a function that undoes the change, so that a model can generate text after an
    evaluation.
    """
    return _REPLACEMENTS.apply(module)
