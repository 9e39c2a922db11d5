"""Times products with a quantised matrix in both forms of --quantized-compute."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import mlx.core as mx
import mlx.nn as nn

from mlxtune.backend.models.layers import (
    DEQUANTIZED,
    QUANTIZED,
    DequantizedLinear,
    copy_quantized,
    dimensions,
)
from mlxtune.core.text import short_duration

# The numbers of untimed and of timed runs of each form; the second is odd, for the median.
_WARMUPS, _RUNS = 2, 5
# A dequantised matrix takes memory, so its products must be faster by this share.
_GAIN = 0.05


@dataclass(frozen=True)
class TimedProducts:
    """The seconds that a matrix's product and its gradient take for `tokens` tokens, in each form.

    The time of a form that MLX cannot compute is infinite.
    """

    name: str
    tokens: int
    quantized: float
    dequantized: float

    @property
    def faster(self) -> str:
        """The faster form; `quantized` unless dequantised products gain enough."""
        gains = self.dequantized < self.quantized * (1 - _GAIN)
        return DEQUANTIZED if gains else QUANTIZED

    def describe(self) -> str:
        """Return a line that states the choice and the times."""
        times = {QUANTIZED: self.quantized, DEQUANTIZED: self.dequantized}
        other = next(form for form in times if form != self.faster)
        return (
            f"{self.faster} products: {_shown(times[self.faster])} for {self.tokens:,} tokens of "
            f"{self.name}, forward and backward; {other}: {_shown(times[other])}"
        )


def time_products(
    model: nn.Module, dtype: mx.Dtype, tokens: int, clock: Callable[[], float] = time.perf_counter
) -> TimedProducts | None:
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
    return TimedProducts(name.partition("layers.")[2].partition(".")[2], tokens, *times)


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
            drawn = mx.random.randint(0, 2**31 - 1, value.shape, key=mx.random.key(2))
            # Clears bits that are set in every 8-bit NaN.
            native[name] = (drawn & 0x77777777).astype(value.dtype)
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


def _shown(seconds: float) -> str:
    return "not available" if math.isinf(seconds) else short_duration(seconds)
