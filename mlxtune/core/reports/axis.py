"""Axes of a chart: the position of a value, and the ticks with their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The share of the range that stays free above and below the values.
_MARGIN = 0.05
# An axis starts at 0 if the lowest value is below this share of the highest.
_NEAR_ZERO = 0.4
# Values that span more than this factor are first shown on a logarithmic axis.
_SPANS = 20.0


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic range of values."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value, from 0 at the low end to 1 at the high."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Return about `most` values to mark, each with its label."""
        if not self.log:
            return _linear_ticks(self.low, self.high, most)
        ticks = _log_ticks(self.low, self.high, most)
        return ticks if len(ticks) > 1 else _linear_ticks(self.low, self.high, most)


def linear_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """Return a linear axis for finite values; it starts at 0 if that wastes little space."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and (from_zero or low < _NEAR_ZERO * high or not high):
        return Axis(0.0, high * (1 + _MARGIN) or 1.0)
    # Nearly equal values should not look far apart.
    margin = max(_MARGIN * (high - low), abs(low) * 1e-3, abs(high) * 1e-3)
    return Axis(low - margin, high + margin)


def log_axis(values: Sequence[float]) -> Axis | None:
    """Return a logarithmic axis for the values above 0; None if there are none."""
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    low, high = min(positive), max(positive)
    margin = max((high / low) ** _MARGIN, 1.05)
    # Both ends must stay within the range of a float.
    return Axis(max(low / margin, 1e-300), min(high * margin, 1e300), log=True)


def spans_much(values: Sequence[float]) -> bool:
    """Return whether values suit a logarithmic axis: all above 0 and far apart."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > _SPANS


def _linear_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(i * step, tick_label(i * step, step)) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    decades = math.log10(high / low)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors: tuple[int, ...] = (1, 2, 5) if decades < most / 3 else (1,)
    every = max(1, math.ceil(decades / most))
    values = (factor * 10.0**power for power in range(first, last + 1, every) for factor in factors)
    return [(value, tick_label(value, value)) for value in values if low <= value <= high]


def tick_label(value: float, step: float) -> str:
    """Return a value in the digits that ticks of this step need: 1.5, 2,000, 20k, 3e-5."""
    if abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 1e10 or step < 1e-4:
        digits = max(1, math.ceil(math.log10(abs(value) / step) - 1e-9) + 2)
        if 1e-3 < abs(value) < 1e10:
            return f"{value:.{digits}g}"
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if step >= size / 10 and abs(value) >= (size if size > 1e3 else 1e4):
            return f"{value / size:.12g}{suffix}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    # A step of 2.5 or 0.25 needs one more than one of 2 or 0.2.
    if not math.isclose(round(step, decimals), step):
        decimals += 1
    return f"{value:,.{decimals}f}"
