"""Reduces many values to what a chart can show: averages, outliers, and bars of a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST_BARS = 32


def decimate(values: Sequence[float], points: int = 1000) -> list[int]:
    """Return the indices of at most `points` finite values that draw the same picture.

    They are the first, the last, and the lowest and highest of each stretch: no peak is lost.
    """
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    if len(finite) <= points:
        return finite
    stretches = max(1, (points - 2) // 2)
    chosen = {finite[0], finite[-1]}
    for number in range(stretches):
        start, end = (len(finite) * n // stretches for n in (number, number + 1))
        part = finite[start:end]
        chosen.add(min(part, key=values.__getitem__))
        chosen.add(max(part, key=values.__getitem__))
    return sorted(chosen)


def span_for(steps: int) -> int:
    """Return the number of steps to average over, for a curve of this many."""
    return min(max(10, round(steps / 50)), max(1, steps // 4))


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the moving average of the finite values, NaN in place of the others.

    It is exponential, with the centre of mass of a window of `span` values, and corrects the bias
    of its start as Adam does (arXiv:1412.6980, section 3).
    """
    keep = (span - 1) / (span + 1)
    total = weight = 0.0
    averages = []
    for value in values:
        if not math.isfinite(value):
            averages.append(math.nan)
            continue
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        averages.append(total / weight)
    return averages


def histogram(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the `start`, `width` and `counts` of at most 32 bars over whole numbers (N,).

    The width is 1, 2 or 5 times a power of ten; a bar holds its lower end.
    """
    if not len(values):
        return {"start": 0, "width": 1, "counts": []}
    low, high = int(values.min()), int(values.max())
    widths = (factor * 10**power for power in count() for factor in (1, 2, 5))
    width = next(width for width in widths if high // width - low // width < _MOST_BARS)
    start = low // width
    counts = np.bincount(values // width - start, minlength=high // width - start + 1)
    return {"start": start * width, "width": width, "counts": counts.tolist()}
