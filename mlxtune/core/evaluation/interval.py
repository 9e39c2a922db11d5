"""Confidence intervals, over rows, of the changes due to an adapter.

The rows are a sample of the model's future inputs, so the bootstrap resamples rows, each with all
its tokens and its losses under both models: the interval is paired.
"""

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from mlxtune.core.evaluation.outcome import MAX_FRACTION, Difference

RESAMPLES, CONFIDENCE = 10_000, 0.95
_TAIL = (1 - CONFIDENCE) / 2
# The largest number of row indices drawn at the same time, over several resamples.
_MAX_INDICES = 1 << 22

Floats = npt.NDArray[np.float64]


def paired_difference(
    base: Floats,
    adapted: Floats,
    tokens: npt.NDArray[np.int64],
    seed: int,
    *,
    resamples: int = RESAMPLES,
) -> Difference:
    """Return the difference of two losses over the same rows, with its bootstrap interval.

    `base`, `adapted` and `tokens` are (R,): each row's summed losses, and its number of tokens.
    Each resample draws rows with replacement and divides the difference of their summed losses by
    their number of tokens.

    Source: the bias-corrected and accelerated interval, Efron, Better Bootstrap Confidence
    Intervals, JASA 82 (1987), equations 2.3 and 6.6; Efron and Tibshirani, An Introduction to the
    Bootstrap (1993), equations 14.9, 14.10, 14.14 and 14.15. Plain percentiles are too narrow if a
    few rows contribute most of the difference. With few rows, every bootstrap interval is too
    narrow, so `_tail` widens it.
    """
    change = adapted - base
    observed = float(change.sum() / tokens.sum())
    means = _resampled(change, tokens, seed, resamples)
    normal = NormalDist()
    # Equal values count half, so that many of them cause no bias.
    below = float((means < observed).mean() + (means == observed).mean() / 2)
    least = 1 / (2 * resamples)
    bias = normal.inv_cdf(min(max(below, least), 1 - least))
    acceleration = _acceleration(change, tokens)
    levels = []
    tail = _tail(len(change))
    for fraction in (tail, 1 - tail):
        z = bias + normal.inv_cdf(fraction)
        divisor = 1 - acceleration * z
        # The correction diverges if, for example, a single row differs; then it is skipped.
        levels.append(normal.cdf(bias + z / divisor) if divisor > 0 else fraction)
    low, high = np.quantile(means, levels).tolist()
    fraction = _fraction(observed * float(tokens.sum()), float(base.sum()))
    return Difference(observed, fraction, low, high, CONFIDENCE, resamples, seed)


def _fraction(change: float, base: float) -> float:
    """Return a change relative to a sum, at most MAX_FRACTION: rewards may sum to about 0."""
    if abs(change) < MAX_FRACTION * abs(base):
        return change / base
    return math.copysign(MAX_FRACTION, change) * math.copysign(1, base) if change else 0.0


def _tail(rows: int) -> float:
    """Return the fraction of resamples to leave out in each tail.

    This fraction makes the bootstrap's interval of a mean as wide as Student's. Source: Hesterberg,
    What Teachers Should Know About the Bootstrap, The American Statistician 69 (2015), expanded
    percentiles; Abramowitz and Stegun, 26.7.5, for the quantile of Student's distribution.
    """
    if rows < 2:
        return _TAIL
    normal, free = NormalDist(), rows - 1
    z = normal.inv_cdf(_TAIL)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return max(normal.cdf(math.sqrt(rows / free) * t), 1 / RESAMPLES)


def _resampled(change: Floats, tokens: npt.NDArray[np.int64], seed: int, resamples: int) -> Floats:
    generator = np.random.default_rng(seed)
    rows = len(change)
    at_once = max(1, _MAX_INDICES // rows)
    parts = []
    for start in range(0, resamples, at_once):
        indices = generator.integers(0, rows, (min(at_once, resamples - start), rows))
        parts.append(change[indices].sum(axis=1) / tokens[indices].sum(axis=1))
    return np.concatenate(parts)


def _acceleration(change: Floats, tokens: npt.NDArray[np.int64]) -> float:
    """Return BCa's acceleration, from jackknife values of the change, without one row each."""
    if len(change) < 2:
        return 0.0
    without = (change.sum() - change) / (tokens.sum() - tokens)
    deviation = without.mean() - without
    spread = float((deviation**2).sum())
    divisor = 6 * spread**1.5  # 0 for tiny changes
    return float((deviation**3).sum()) / divisor if divisor > 0 else 0.0


def paired_fraction_interval(
    before: npt.NDArray[np.bool_], after: npt.NDArray[np.bool_]
) -> tuple[float, float]:
    """Return the interval of the change in the fraction of true rows, as two numbers from -1 to 1.

    If few rows change, resampled rows vary too little. Source: Newcombe, Statistics in Medicine 17
    (1998), 2635-2650, method 10.
    """
    rows, both, neither = len(before), int((before & after).sum()), int((~before & ~after).sum())
    earlier, later = int(before.sum()), int(after.sum())
    squared = float(earlier * (rows - earlier) * later * (rows - later))
    excess = float(both * neither - (earlier - both) * (later - both))
    excess = max(excess - rows / 2, 0.0) if excess > 0 else excess
    correlation = excess / math.sqrt(squared) if squared else 0.0
    old, new = earlier / rows, later / rows
    (old_low, old_high), (new_low, new_high) = _wilson(old, rows), _wilson(new, rows)

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * correlation * x * y + y * y, 0.0))

    change = new - old
    return (
        change - distance(new - new_low, old_high - old),
        change + distance(new_high - new, old - old_low),
    )


def _wilson(fraction: float, rows: int) -> tuple[float, float]:
    """Return the interval of a proportion of this many rows. Source: Wilson, JASA 22 (1927)."""
    z = NormalDist().inv_cdf(1 - _TAIL)
    center, scale = fraction + z * z / (2 * rows), 1 + z * z / rows
    width = z * math.sqrt(fraction * (1 - fraction) / rows + z * z / (4 * rows * rows))
    return (center - width) / scale, (center + width) / scale


def rank_interval(area: float, good: int, bad: int) -> tuple[float, float]:
    """Return the interval of the fraction of pairs in which the good answer gained more.

    Pairs share answers, so they are not independent. Source: Newcombe, Statistics in Medicine 25
    (2006), method 5, with the variance of Hanley and McNeil, Radiology 143 (1982).
    """
    if not good or not bad:
        return 0.0, 1.0
    z, rows = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), (good + bad) / 2

    def is_outside(fraction: float) -> bool:
        spread = 1 + (rows - 1) * ((1 - fraction) / (2 - fraction) + fraction / (1 + fraction))
        return (area - fraction) ** 2 > z**2 * fraction * (1 - fraction) * spread / (good * bad)

    def bound(outside: float) -> float:
        """Find the interval's bound between the area and `outside`, by bisection."""
        inside = area
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if is_outside(middle) else (middle, outside)
        return inside

    return bound(0.0), bound(1.0)
