"""Makes one model compute with the functions of this folder; no class that others use changes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, gemma2, gemma3_text, gemma4_text, rwkv7, ssm
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.models import gated_delta as mlx_lm_gated_delta
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxtune.backend.cpu import attention, elementwise, gated_delta, products, state_space
from mlxtune.backend.cpu.arrays import computes
from mlxtune.backend.cpu.experts import ExpertsGLU, ExpertsMLP
from mlxtune.backend.cpu.layers import product, values_needed
from mlxtune.backend.cpu.rwkv7 import wkv7
from mlxtune.backend.cpu.state_space import DepthwiseConv1d, Mamba
from mlxtune.backend.lora.layers import DoRALinear, LoRALinear
from mlxtune.backend.models import packed
from mlxtune.backend.models.autograd import differentiable
from mlxtune.backend.models.layers import (
    DequantizedEmbedding,
    DequantizedLinear,
    PackedRows,
    StoredEmbedding,
    StoredLinear,
)
from mlxtune.backend.models.mixers import selective_scan
from mlxtune.backend.models.mixers.gated_delta import gated_delta_update
from mlxtune.backend.models.mixers.replacements import FUNCTIONS, KINDS
from mlxtune.backend.models.mixers.rwkv7 import ChunkedTimeMixing
from mlxtune.backend.models.nf4 import NF4Linear
from mlxtune.backend.models.replaced import Instead, Replacements, subclasses


def _product(x: mx.array, module: nn.Module) -> mx.array:
    """Return x times the transpose of a module's frozen weight."""

    def run(x: mx.array) -> mx.array:
        return product(lambda: products.forward(x, _frozen_weight(module)))

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        return products.backward(cotangent, _frozen_weight(module))

    return differentiable(run, gradient)(x)


def _product_with_update(x: mx.array, layer: LoRALinear) -> mx.array:
    """Return x W^T + scale * (x A) B of a layer, with gradients for x, A and B."""

    def run(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        def make() -> mx.array:
            y = products.forward(x, _frozen_weight(layer.linear))
            products.add_update(y, x, a, b, layer.scale)
            return y

        return product(make)

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        x, a, b = primals
        weight = _frozen_weight(layer.linear)
        return products.update_gradients(x, a, b, cotangent, weight, layer.scale)

    return differentiable(run, gradient)(x, *layer.factors())


def _frozen_weight(module: nn.Module) -> products.Weight:
    # Quantised weights are unpacked for each use: MLX's products of them are 30 times slower.
    return PackedRows(module) if hasattr(module, "unpacked") else module["weight"]


class _Product(nn.Module):
    """The product with a frozen weight, in the place of what a kind of linear layer computes."""

    def __call__(self, x: mx.array) -> mx.array:
        if not computes(x):
            return super().__call__(x)
        y = _product(x, self)
        return y + self["bias"] if "bias" in self else y


class _Head(nn.Module):
    """The same for embeddings that are used as the head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(x, self) if computes(x) else super().as_linear(x)


class _TimeMixing(ChunkedTimeMixing):
    """RWKV 7's time mixing, with its recurrence token by token."""

    rule = staticmethod(wkv7)


class _LoRALinear(LoRALinear):
    """The base's product and the update's, in one."""

    def __call__(self, x: mx.array) -> mx.array:
        if self.drops() or not _serves_layer(self, x):
            return super().__call__(x)
        y = _product_with_update(x, self)
        return y + self.linear["bias"] if "bias" in self.linear else y


class _DoRALinear(DoRALinear):
    """The same, without the bias, for it to be scaled."""

    def product(self, x: mx.array) -> mx.array:
        if not _serves_layer(self, x):
            return super().product(x)
        return _product(x, self.linear)

    def updated_product(self, x: mx.array) -> mx.array:
        if not _serves_layer(self, x):
            return super().updated_product(x)
        return _product_with_update(x, self)


def _serves_layer(layer: LoRALinear, x: mx.array) -> bool:
    return computes(x) and isinstance(layer.linear, _Product)


def _gated(fast: Callable[..., mx.array], plain: Any) -> Callable[..., mx.array]:
    def call(gate: mx.array, x: mx.array, **options: float) -> mx.array:
        if computes(gate, x) and gate.shape == x.shape:
            return fast(gate, x, **options, needed=values_needed())
        return plain(gate, x, **options)

    return call


def _precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    if computes(h, gate, x) and gate.shape == x.shape:
        return elementwise.swiglu(gate, x, needed=values_needed())
    return activations.precise_swiglu(h, gate, x)


_geglu = _gated(elementwise.geglu, gemma4_text.geglu)


class _GeGLU(nn.Module):
    """An MLP of Gemma's, with its activation and the product with it in one kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(_geglu(self.gate_proj(x), self.up_proj(x)))
        return y


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    # A mask that is added may carry a gradient, as in DeepSeek's attention.
    constant = not isinstance(mask, mx.array) or mask.dtype == mx.bool_
    fast = constant and not hasattr(cache, "bits")
    if fast and computes(queries, keys, values, *([] if sinks is None else [sinks])):
        needed = values_needed()
        return attention.attention(queries, keys, values, scale, mask, sinks, needed=needed)
    if packed.layout() is not None:
        raise packed.CannotPackError
    return mlx_lm_base.scaled_dot_product_attention(
        queries, keys, values, cache, scale, mask, sinks
    )


def _unary(fast: Callable[[mx.array], mx.array], plain: Any) -> Callable[..., mx.array]:
    return lambda x: fast(x) if computes(x) else plain(x)


def _softmax(x: mx.array, axis: Any = None, **options: Any) -> mx.array:
    if axis == -1 and computes(x):
        return elementwise.softmax(x)
    return mx.softmax(x, axis, **options)


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    if computes(x):
        return elementwise.rms_norm(x, weight, eps)
    return mx.fast.rms_norm(x, weight, eps)


_FUNCTIONS: dict[int, Any] = {
    id(mlx_lm_gated_delta.gated_delta_update): partial(
        gated_delta_update, rule=gated_delta.gated_delta_rule
    ),
    id(mlx_lm_gated_delta.normalize_qk): gated_delta.normalize_qk,
    id(mlx_lm_base.scaled_dot_product_attention): _attention,
    id(activations.swiglu): _gated(elementwise.swiglu, activations.swiglu),
    id(activations.precise_swiglu): _precise_swiglu,
    id(activations.swiglu_oai): _gated(elementwise.clamped_swiglu, activations.swiglu_oai),
    id(gemma4_text.geglu): _geglu,
    id(ssm.ssm_update): state_space.ssm_update,
    id(mx): Instead(
        mx,
        {
            "softmax": _softmax,
            "tanh": _unary(elementwise.tanh, mx.tanh),
            "fast": Instead(mx.fast, {"rms_norm": _rms_norm, "rope": elementwise.rope}),
        },
    ),
    id(nn): Instead(
        nn,
        {
            "silu": _unary(elementwise.silu, nn.silu),
            "gelu_approx": _unary(elementwise.gelu_approx, nn.gelu_approx),
        },
    ),
}


# The faster subclass of each layer. Quantised layers that use MLX's own products have none.
_KINDS: dict[type, type] = {
    **subclasses(_Product, nn.Linear, StoredLinear, DequantizedLinear, NF4Linear),
    **subclasses(_Head, nn.Embedding, StoredEmbedding, DequantizedEmbedding),
    **subclasses(DepthwiseConv1d, nn.Conv1d),
    **subclasses(_GeGLU, gemma2.MLP, gemma3_text.MLP),
    **subclasses(ExpertsGLU, SwitchGLU),
    **subclasses(ExpertsMLP, SwitchMLP),
    **subclasses(Mamba, *selective_scan.KINDS),
    **subclasses(_TimeMixing, rwkv7.Rwkv7TimeMixing),
    LoRALinear: _LoRALinear,
    DoRALinear: _DoRALinear,
}


_FAST = Replacements({**FUNCTIONS, **_FUNCTIONS}, {**KINDS, **_KINDS})


def make_fast(module: nn.Module) -> Callable[[], None]:
    """Make a module and its children compute with the functions of this folder.

    Returns a function that undoes it, so that one model can be evaluated and then generate.
    """
    return _FAST.apply(module)
