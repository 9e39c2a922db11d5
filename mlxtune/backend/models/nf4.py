"""QLoRA's 4-bit NormalFloat: 16 levels, and blocks of 64 entries with one scale each.

Sources: QLoRA, arXiv:2305.14314, section 3 and appendix E. The packed codes and the quantised
scales equal bitsandbytes' byte for byte.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.models.stored_layers import DequantizedLinear

BLOCK = 64
# The number of scales that share a nested scale in double quantisation.
SCALES_BLOCK = 256
# Appendix E: quantiles of the normal distribution, exact at zero, scaled to [-1, 1].
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# The number of entries to quantise at a time: temporary arrays take several times their memory.
_BLOCK_ENTRIES = 1 << 20
# The two levels that each byte encodes, float32 (256, 2).
_PAIRS = mx.array(np.array(list(product(LEVELS, repeat=2)), np.float32))

Floats = npt.NDArray[np.float32]


class NF4Linear(DequantizedLinear):
    """A frozen linear layer in NF4, whose weight is dequantised for each matmul.

    `weight` is uint32 (out, in / 8), whose bytes hold two codes each, the first in the high half;
    `scales` is float32 (out, in / 64). With `double_quant`, `scales` are uint8 indices into
    `scale_levels`: a scale is the level at its index, times the nested scale of its block of 256,
    plus `nested_mean`. `nested_scales` and `nested_mean` are float32.
    """

    def __init__(self, linear: nn.Linear, *, double_quant: bool = False) -> None:
        nn.Module.__init__(self)
        self.group_size, self.bits, self.mode = BLOCK, 4, "nf4"
        self.weight, self.scales = quantize(linear.weight)
        self.biases = None
        if double_quant:
            self.scales, self.nested_scales, self.nested_mean = quantize_scales(self.scales)
        if "bias" in linear:
            self.bias = linear.bias
        self.freeze()

    def unpacked(
        self, dtype: mx.Dtype, after: mx.array | None = None, index: Any = ...
    ) -> mx.array:
        """Return the weight (out, in) in a dtype, or some of its rows, computed after `after`."""
        codes, scales = self["weight"][index], self.plain_scales()[index]
        if after is not None:
            codes = mx.depends([codes], [after])[0]
        return dequantize(codes, scales).astype(dtype)

    def plain_scales(self) -> mx.array:
        """Return the scales, float32 (out, in / 64), dequantised if necessary."""
        if "nested_scales" not in self:
            return self["scales"]
        return dequantize_scales(self["scales"], self["nested_scales"], self["nested_mean"])


def quantize(weight: mx.array) -> tuple[mx.array, mx.array]:
    """Return the codes uint32 (out, in / 8) and scales float32 (out, in / 64) of a weight.

    Each block of 64 entries is divided by its largest magnitude, and each entry becomes the nearest
    level (the lower level in a tie). `in` is a multiple of 64.
    """

    def codes_and_scales(rows: mx.array) -> tuple[mx.array, mx.array]:
        blocks = rows.astype(mx.float32).reshape(rows.shape[0], -1, BLOCK)
        nearest, largest = _nearest(blocks, np.array(LEVELS, np.float32))
        halves = nearest.reshape(rows.shape[0], -1, 2)
        return ((halves[..., 0] << 4) | halves[..., 1]).view(mx.uint32), largest

    codes, scales = in_parts(weight, _BLOCK_ENTRIES, codes_and_scales)
    return codes, scales


def in_parts(
    weight: mx.array, entries: int, make: Callable[[mx.array], Sequence[mx.array]]
) -> list[mx.array]:
    """Apply `make` to a weight (out, in), about `entries` entries at a time; join the results.

    Temporary arrays then cover only one part of the weight.
    """
    step = max(entries // weight.shape[1], 1)
    parts: list[Sequence[mx.array]] = []
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        if parts:
            rows = mx.depends([rows], [parts[-1][0]])[0]
        parts.append(make(rows))
    return [mx.concatenate(list(each)) for each in zip(*parts, strict=True)]


def _nearest(blocks: mx.array, levels: Floats) -> tuple[mx.array, mx.array]:
    """Return the index of each entry's nearest level, uint8, and the blocks' largest magnitudes."""
    largest = mx.abs(blocks).max(axis=-1)
    scaled = blocks / mx.where(largest == 0, 1, largest)[..., None]
    between = mx.array((levels[:-1] + levels[1:]) / np.float32(2))
    return mx.searchsorted(between, scaled).astype(mx.uint8), largest


def dequantize(codes: mx.array, scales: mx.array) -> mx.array:
    """Return the float32 weight (..., in) of codes (..., in / 8) and scales (..., in / 64)."""
    levels = _PAIRS[codes.view(mx.uint8)]
    blocks = levels.reshape(*scales.shape, BLOCK) * scales[..., None]
    return blocks.reshape(*codes.shape[:-1], -1)


def quantize_scales(scales: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the uint8 codes of scales, the nested float32 scales, and the mean of the scales.

    Section 3, "double quantization": the mean is subtracted, and the rest is quantised to 8 bits in
    blocks of 256, with the levels of arXiv:2110.02861 as in bitsandbytes.
    """
    mean = scales.mean()
    flat = (scales - mean).reshape(-1)
    padded = mx.pad(flat, (0, -flat.size % SCALES_BLOCK)).reshape(-1, SCALES_BLOCK)
    codes, largest = _nearest(padded, scale_levels())
    return codes.reshape(-1)[: flat.size].reshape(scales.shape), largest, mean


def dequantize_scales(codes: mx.array, nested: mx.array, mean: mx.array) -> mx.array:
    """Return the float32 scales from the results of `quantize_scales`."""
    levels = mx.array(scale_levels())[codes].reshape(-1)
    each = mx.repeat(nested, SCALES_BLOCK)[: levels.size]
    return (levels * each + mean).reshape(codes.shape)


@lru_cache(maxsize=1)
def scale_levels() -> Floats:
    """Return the 256 values of an 8-bit number with a dynamic exponent, float32, sorted.

    Source: 8-bit Optimizers, arXiv:2110.02861, section 1.3: a sign, an exponent of 10 in unary, and
    a linear fraction in the remaining bits.
    """
    levels: list[float] = [0.0, 1.0]
    for exponent in range(7):
        bounds = np.linspace(0.1, 1, 2**exponent + 1, dtype=np.float32)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        values = means * np.float32(10.0 ** (exponent - 6))
        levels += [*values.tolist(), *(-values).tolist()]
    return np.sort(np.array(levels, dtype=np.float32))
