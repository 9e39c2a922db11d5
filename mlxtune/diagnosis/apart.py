"""How far the gradients of two ways to compute a step are apart."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Gradients = Mapping[str, npt.NDArray[Any]]


def largest_difference(found: Gradients, expected: Gradients) -> float:
    """Return the largest difference of an entry, as a share of the largest expected entry."""
    largest = max(np.abs(value).max() for value in expected.values())
    # Python's max may pass over a NaN.
    apart = np.max([np.abs(found[name] - value).max() for name, value in expected.items()])
    return float(apart / largest)


def cosine_and_ratio(found: Gradients, expected: Gradients) -> tuple[float, float]:
    """Return the least cosine of a matrix's gradient, and the ratio of norms farthest from 1."""
    cosines, ratios = [], []
    for name, value in expected.items():
        other = found[name]
        norm, wanted = float(np.linalg.norm(other)), float(np.linalg.norm(value))
        with np.errstate(invalid="ignore"):
            cosines.append(np.divide((other * value).sum(dtype=np.float64), norm * wanted))
        ratios.append(norm / wanted)
    # A NaN is farthest, for both.
    farthest = ratios[int(np.argmax(np.abs(np.array(ratios) - 1)))]
    return float(np.min(cosines)), farthest
