"""How often lengths occur, in bars of one width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_BARS = 32


def histogram(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the width of a bar, where the first begins, and how many values (N,) each holds.

    Bars are 1, 2 or 5 times a power of ten wide, and there are at most 32. A value stands in the
    bar that begins at it or below it.
    """
    if not len(values):
        return {"start": 0, "width": 1, "counts": []}
    low, high = int(values.min()), int(values.max())
    width = next(width for width in _widths() if high // width - low // width < _BARS)
    start = low // width
    counts = np.bincount(values // width - start, minlength=high // width - start + 1)
    return {"start": start * width, "width": width, "counts": counts.tolist()}


def _widths() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10
