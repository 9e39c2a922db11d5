"""Axes of a chart: positions of values, and ticks with labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The empty space above and below the values, as a fraction of their range.
_MARGIN = 0.05
# An axis starts at 0 if the lowest value is below this fraction of the highest.
_ZERO_START_FRACTION = 0.4
# The narrowest range with ticks: floats below about 1e-308 lose precision.
_MIN_RANGE = 1e-300
# Values that span more than this factor are shown on a logarithmic axis.
_MIN_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value, from 0 at the low end to 1 at the high end."""
        if self.log:
            low = math.log10(self.low)
            return (math.log10(value) - low) / (math.log10(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5) -> list[float]:
        return (_log_ticks if self.log else _linear_ticks)(self.low, self.high, most)


def linear_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """Return a linear axis for finite values; it starts at 0 if that wastes little space."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and (from_zero or low < _ZERO_START_FRACTION * high or not high):
        return Axis(0.0, max(high * (1 + _MARGIN), _MIN_RANGE) if high else 1.0)
    # Keep nearly equal values close together.
    margin = max(_MARGIN * (high - low), abs(low) * 1e-3, abs(high) * 1e-3, _MIN_RANGE)
    return Axis(low - margin, high + margin)


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis for the values above 0; there must be at least one."""
    positive = [value for value in values if value > 0]
    low, high = min(positive), max(positive)
    margin = max(10 ** (_MARGIN * (math.log10(high) - math.log10(low))), 1.05)
    # The low end must stay within the range of a float.
    return Axis(max(low / margin, math.ulp(0.0)), high * margin, log=True)


def spans_much(values: Sequence[float]) -> bool:
    """Return whether values suit a logarithmic axis: all above 0 and far apart."""
    return bool(values) and min(values) > 0 and max(values) > _MIN_LOG_RATIO * min(values)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = math.log10(high) - math.log10(low)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors: tuple[int, ...] = (1, 2, 5) if decades < 2 else (1,)
    every = max(1, math.ceil(decades / most))
    values = (factor * 10.0**power for power in range(first, last + 1, every) for factor in factors)
    return [value for value in values if low <= value <= high]


def tick_label(value: float) -> str:
    """Format a value with up to six significant digits: 1.5, 2,000, 3e-5."""
    if value and not 1e-3 <= abs(value) < 1e6:
        rounded = float(f"{value:.6g}")
        return np.format_float_scientific(rounded, trim="-", exp_digits=1).replace("e+", "e")
    return f"{value:,.6g}"
