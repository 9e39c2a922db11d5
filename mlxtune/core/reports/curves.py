"""What is drawn of many values: an average of them, and few enough with all that stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence


def decimate(values: Sequence[float], points: int = 1000) -> list[int]:
    """Return the places of at most so many values that make the same picture.

    They are the first, the last, and the lowest and highest of each stretch, so that no peak is
    lost; of few enough values, all that are finite.
    """
    there = [i for i, value in enumerate(values) if math.isfinite(value)]
    if len(there) <= points:
        return there
    stretches = max(1, (points - 2) // 2)
    chosen = {there[0], there[-1]}
    for number in range(stretches):
        start, end = (len(there) * n // stretches for n in (number, number + 1))
        part = there[start:end]
        chosen.add(min(part, key=values.__getitem__))
        chosen.add(max(part, key=values.__getitem__))
    return sorted(chosen)


def span_for(count: int) -> int:
    """Return over how many steps the curve of so many steps is averaged."""
    return min(max(10, round(count / 50)), max(1, count // 4))


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the moving average of values, NaN where they are.

    It is exponential with the centre of mass of a window of `span` values, and corrected for its
    start as Adam's moments are (arXiv:1412.6980, section 3).
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
