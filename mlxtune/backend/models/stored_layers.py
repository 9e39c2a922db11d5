"""Frozen layers that are stored in fewer bits than they compute in, and the time they take."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.models.autograd import differentiable
from mlxtune.core.formatting import short_duration

# The values of --quantized-compute except auto.
QUANTIZED, DEQUANTIZED = "quantized", "dequantized"
# The numbers of untimed and of timed runs of each form; the second is odd, for the median.
_WARMUPS, _RUNS = 2, 5
# A dequantised matrix takes memory, so its matmuls must be faster by this fraction.
_GAIN = 0.05


class StoredEmbedding(nn.Embedding):
    """Embeddings that are stored in 16 bits and returned in float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.weight = embedding.weight

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(mx.float32)


class StoredLinear(nn.Linear):
    """A linear layer that is stored in 16 bits, and cast to float32 for each matmul."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        for name, value in linear.items():
            setattr(self, name, value)

    def __call__(self, x: mx.array) -> mx.array:
        y = _matmul(x, self.cast)
        return y + self["bias"] if "bias" in self else y

    def cast(self, dtype: mx.Dtype, after: mx.array) -> mx.array:
        """Return the weight (out, in) in a dtype, computed after `after`."""
        return mx.depends([self["weight"]], [after])[0].astype(dtype)


class StoredExperts(SwitchLinear):
    """A layer of experts that are stored in 16 bits, and cast to float32 for each matmul."""

    def __init__(self, experts: SwitchLinear) -> None:
        nn.Module.__init__(self)
        for name, value in experts.items():
            setattr(self, name, value)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        def matmul(x: mx.array, after: mx.array) -> mx.array:
            weight = mx.depends([self["weight"]], [after])[0].astype(x.dtype).swapaxes(-1, -2)
            return mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)

        def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            # Cast again: otherwise the graph would keep the cast weights of all layers in memory.
            return mx.vjp(lambda x: matmul(x, cotangent), [x], [cotangent])[1][0]

        y = differentiable(lambda x: matmul(x, x), gradient)(x)
        return y + self["bias"][indices][..., None, :] if "bias" in self else y


class _Dequantized(nn.Module):
    """A quantised layer whose weight is dequantised for each matmul."""

    def unpacked(
        self, dtype: mx.Dtype, after: mx.array | None = None, index: Any = ...
    ) -> mx.array:
        """Return the weight (out, in) in a dtype, or some of its rows, computed after `after`."""
        return _dequantize(self, dtype, after, index)


class DequantizedLinear(_Dequantized, nn.QuantizedLinear):
    """A quantised linear layer whose weight is dequantised for each matmul."""

    def __init__(self, linear: nn.QuantizedLinear) -> None:
        nn.Module.__init__(self)
        copy_quantized(linear, self)

    def __call__(self, x: mx.array) -> mx.array:
        y = _matmul(x, self.unpacked)
        return y + self["bias"] if "bias" in self else y


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """Quantised embeddings that are returned in the compute dtype.

    MLX's own class returns bfloat16 in modes whose scales are not floating-point numbers, and the
    model would then compute in bfloat16.
    """

    def __init__(self, embedding: nn.QuantizedEmbedding, compute_dtype: mx.Dtype) -> None:
        nn.Module.__init__(self)
        copy_quantized(embedding, self)
        self.num_embeddings, self.dims = embedding.num_embeddings, embedding.dims
        self.compute_dtype = compute_dtype

    def __call__(self, x: mx.array) -> mx.array:
        return _dequantize(self, self.compute_dtype, index=x)


class DequantizedEmbedding(_Dequantized, QuantizedEmbedding):
    """Quantised embeddings that are dequantised for each matmul when used as the output head."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits (..., V) of hidden states (..., H)."""
        return _matmul(x, self.unpacked)


def copy_quantized(source: nn.Module, target: nn.Module) -> None:
    """Copy the arrays and the format of a quantised module to another module."""
    target.group_size, target.bits, target.mode = source.group_size, source.bits, source.mode
    target.biases = None
    for name, value in source.items():
        setattr(target, name, value)
    target.freeze()


def dimensions(module: nn.Module) -> tuple[int, int]:
    """Return the input and output dimensions of a projection, or of one expert of a stack."""
    outputs, inputs = module.weight.shape[-2:]
    return (inputs * 32 // module.bits if "scales" in module else inputs), outputs


class QuantizedHead:
    """A quantised matrix whose rows are dequantised to float32 when indexed."""

    dtype = mx.float32

    def __init__(self, module: Any) -> None:
        self._module = module
        inputs, rows = dimensions(module)
        self.shape = (rows, inputs)
        self.size = rows * inputs

    def __getitem__(self, index: Any) -> mx.array:
        return self._module.unpacked(mx.float32, index=index)


def dequantized_weight(module: nn.Module) -> mx.array:
    """Return the weight of a layer in float32, dequantised if it is quantised."""
    if hasattr(module, "unpacked"):
        return module.unpacked(mx.float32)
    return _dequantize(module) if "scales" in module else module.weight.astype(mx.float32)


def frozen_gradient(matmul: Any, x: mx.array, cotangent: mx.array) -> mx.array:
    """Return the gradient of x (..., in) through a frozen layer or another matmul."""
    if is_plain(matmul, x.dtype):
        return cotangent @ matmul.weight
    # Nothing reads the product of this second call, so MLX does not compute it.
    (gradient,) = mx.vjp(matmul, [x], [cotangent])[1]
    return gradient


def is_plain(matmul: Any, dtype: mx.Dtype) -> bool:
    """Return whether a matmul is MLX's own layer, whose weight needs no cast for this dtype."""
    return type(matmul) is nn.Linear and bool(matmul["weight"].dtype == dtype)


def frozen_matmul(linear: nn.Module, x: mx.array) -> mx.array:
    """Return the output of a frozen linear layer for x (..., in), without the layer's bias."""
    if "bias" not in linear:
        return linear(x)
    if hasattr(linear, "unpacked"):
        return _matmul(x, linear.unpacked)
    if isinstance(linear, StoredLinear):
        return _matmul(x, linear.cast)
    if not isinstance(linear, nn.QuantizedLinear):
        return x @ linear["weight"].T
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


def _matmul(x: mx.array, unpack: Callable[[mx.Dtype, mx.array], mx.array]) -> mx.array:
    """Return x (..., in) times the transpose of a frozen matrix, in the dtype of x.

    `unpack(dtype, after)` makes the matrix for the matmul, and again for the gradient of x. On the
    CPU, the matrix is float32, because matmuls in other dtypes are slow there. The matrix is
    unpacked after the other factor is computed, so that a graph of many layers does not unpack all
    their matrices first.
    """
    dtype = mx.float32 if on_cpu() else x.dtype

    def forward(x: mx.array) -> mx.array:
        return (x.astype(dtype) @ unpack(dtype, x).T).astype(x.dtype)

    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        return (cotangent.astype(dtype) @ unpack(dtype, cotangent)).astype(cotangent.dtype)

    return differentiable(forward, gradient)(x)


def _dequantize(
    module: Any, dtype: mx.Dtype = mx.float32, after: mx.array | None = None, index: Any = ...
) -> mx.array:
    """Return the weight, or some of its rows, of a module quantised in one of MLX's formats."""
    weight, scales = module["weight"][index], module["scales"][index]
    biases = module["biases"][index] if "biases" in module else None
    if after is not None:
        weight = mx.depends([weight], [after])[0]
    if mx.issubdtype(scales.dtype, mx.floating):
        # MLX computes in the dtype of the scales, and rounds to it.
        scales = scales.astype(dtype)
        biases = None if biases is None else biases.astype(dtype)
    return mx.dequantize(
        weight, scales, biases, module.group_size, module.bits, mode=module.mode, dtype=dtype
    )


def compute_quantized(model: nn.Module, dtype: mx.Dtype, option: str) -> str | None:
    """Make a model multiply by its quantised matrices as --quantized-compute says.

    `auto` means dequantised matrices on the CPU and MLX's quantised matmuls on a GPU, where
    training then times both forms with `time_matmuls`. Experts always use MLX's matmuls; nf4, for
    which MLX has no matmuls, is always dequantised. Returns the choice, or None if nothing is
    quantised.
    """
    quantized = [module for _, module in model.named_modules() if "scales" in module]
    if not quantized:
        return None
    if option == "auto":
        native = any(module.mode != "nf4" for module in quantized)
        option = QUANTIZED if native and not on_cpu() else DEQUANTIZED

    def make(module: nn.Module) -> nn.Module | None:
        if type(module) in (nn.QuantizedEmbedding, QuantizedEmbedding):
            kind = DequantizedEmbedding if option == DEQUANTIZED else QuantizedEmbedding
            return kind(module, dtype)
        if type(module) is nn.QuantizedLinear and option == DEQUANTIZED:
            return DequantizedLinear(module)
        return None

    replace_modules(model, make)
    return option


@dataclass(frozen=True)
class TimedMatmuls:
    """The seconds that a matrix's matmul and its gradient take for `tokens` tokens, in each form.

    The time of a form that MLX cannot compute is infinite.
    """

    name: str
    tokens: int
    quantized: float
    dequantized: float

    @property
    def faster(self) -> str:
        """The faster form; `quantized` unless dequantised matmuls gain enough."""
        gains = self.dequantized < self.quantized * (1 - _GAIN)
        return DEQUANTIZED if gains else QUANTIZED

    def describe(self) -> str:
        """Return a line that states the choice and the times."""
        times = {QUANTIZED: self.quantized, DEQUANTIZED: self.dequantized}
        other = next(form for form in times if form != self.faster)
        return (
            f"{self.faster} products: {_seconds_text(times[self.faster])} for {self.tokens:,} "
            f"tokens of {self.name}, forward and backward; {other}: {_seconds_text(times[other])}"
        )


def time_matmuls(
    model: nn.Module, dtype: mx.Dtype, tokens: int, clock: Callable[[], float] = time.perf_counter
) -> TimedMatmuls | None:
    """Time both forms on the model's largest quantised matrix; return None if there is no choice.

    No weights are read: random weights of the same shape and format are timed. Embeddings and
    heads, which run on few tokens, and experts, which use different kernels, are not timed.
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.QuantizedLinear and ".layers." in f".{name}"
    ]
    if not layers:
        return None
    name, largest = max(layers, key=lambda each: (each[1].weight.size, each[0]))
    quantized, dequantized = _stand_ins(largest)
    inputs, outputs = dimensions(largest)
    x = mx.random.normal((1, tokens, inputs), dtype, key=mx.random.key(0))
    cotangent = mx.random.normal((1, tokens, outputs), dtype, key=mx.random.key(1))
    mx.eval(quantized.parameters(), x, cotangent)

    def seconds(layer: nn.Module) -> float:
        started = clock()
        mx.eval(mx.vjp(layer, [x], [cotangent]))
        return clock() - started

    times = [_median(partial(seconds, layer)) for layer in (quantized, dequantized)]
    mx.clear_cache()
    return TimedMatmuls(name.partition("layers.")[2].partition(".")[2], tokens, *times)


def _stand_ins(linear: nn.QuantizedLinear) -> tuple[nn.Module, nn.Module]:
    """Return random layers of a quantised layer's shape, without a bias, in both forms."""
    native = nn.QuantizedLinear.__new__(nn.QuantizedLinear)
    nn.Module.__init__(native)
    copy_quantized(linear, native)
    native.pop("bias", None)
    for name, value in native.items():
        if not isinstance(value, mx.array):
            continue
        if name == "weight":
            words = mx.random.randint(0, 2**31 - 1, value.shape, key=mx.random.key(2))
            # Clears bits that are set in every 8-bit NaN.
            native[name] = (words & 0x77777777).astype(value.dtype)
        elif mx.issubdtype(value.dtype, mx.floating):
            native[name] = mx.full(value.shape, 0.01, value.dtype)
        else:
            # Scales of 1: an 8-bit float in nvfp4, a biased exponent in the other formats.
            native[name] = mx.full(value.shape, 56 if linear.mode == "nvfp4" else 127, value.dtype)
    return native, DequantizedLinear(native)


def _median(run: Callable[[], float]) -> float:
    try:
        times = [run() for _ in range(_WARMUPS + _RUNS)]
    # Any error may occur: some devices lack kernels for some formats.
    except Exception:  # noqa: BLE001
        return math.inf
    return median(times[_WARMUPS:])


def _seconds_text(seconds: float) -> str:
    return "not available" if math.isinf(seconds) else short_duration(seconds)


def replace_modules(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace a model's modules for which `make` returns another module."""
    # Modules are found by identity, so that a module shared by two layers stays shared.
    modules = {id(module): module for _, module in model.named_modules()}
    new_modules = {key: new for key, old in modules.items() if (new := make(old)) is not None}
    paths = [
        (path, new_modules[id(old)])
        for path, old in model.named_modules()
        if id(old) in new_modules
    ]
    model.update_modules(tree_unflatten(paths))


def cast_parameters(model: nn.Module, dtype: mx.Dtype, kept: Collection[str] = ()) -> None:
    """Cast the floating-point parameters of a model, except those at the paths `kept`.

    Parameters that the architecture excludes from casting keep their dtype too.
    """
    castable = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and path not in kept and castable(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))
