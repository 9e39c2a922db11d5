"""Learning rates as pure functions of the step. Steps count from 1, the first update's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

Schedule = Callable[[int], float]


def constant(step: int, *, peak: float) -> float:
    """Return the peak at every step."""
    return peak


def linear_warmup(step: int, *, peak: float, warmup_steps: int) -> float:
    """Rise linearly to the peak, reached at step `warmup_steps`, then stay."""
    return peak * min(step / warmup_steps, 1.0) if warmup_steps else peak


def warmup_cosine(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, lr_min: float
) -> float:
    """Rise linearly to the peak, then fall along half a cosine to `lr_min` at `total_steps`.

    Source: SGDR, arXiv:1608.03983, equation 5, one cycle after the warm-up.
    """
    # Without a warm-up the first step is at the peak, so that a run of one step trains.
    peak_step = max(warmup_steps, 1)
    if step <= peak_step:
        return linear_warmup(step, peak=peak, warmup_steps=warmup_steps)
    progress = min((step - peak_step) / (total_steps - peak_step), 1.0)
    return lr_min + (peak - lr_min) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_schedule(
    name: str, *, peak: float, total_steps: int, warmup_fraction: float, lr_min: float
) -> Schedule:
    """Return the named schedule over a run of `total_steps`."""
    warmup_steps = int(warmup_fraction * total_steps)
    if name == "constant":
        return partial(constant, peak=peak)
    if name == "linear-warmup":
        return partial(linear_warmup, peak=peak, warmup_steps=warmup_steps)
    return partial(
        warmup_cosine,
        peak=peak,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        lr_min=lr_min,
    )
