"""The number of a run's steps, and learning rates as pure functions of the step.

Steps count from 1, the first update.
"""

import math
from collections.abc import Callable

from mlxtune.config import InstructTrainingConfig

Schedule = Callable[[int], float]


def count_steps(config: InstructTrainingConfig, rows: int, updates: int = 1) -> tuple[int, int]:
    """Return the steps of an epoch and of the run, with `updates` steps on each batch of rows."""
    per_epoch = math.ceil(rows / config.batch_size) * updates
    steps = config.epochs * per_epoch
    return per_epoch, steps if config.max_steps is None else min(steps, config.max_steps)


def schedule_of(config: InstructTrainingConfig, peak_rate: float, total_steps: int) -> Schedule:
    """Return the schedule that the options select, over a run of `total_steps`.

    `linear-warmup` rises linearly to the peak and stays there; `warmup-cosine` rises likewise, then
    falls along half a cosine to `lr_min` at `total_steps`.

    Source: SGDR, arXiv:1608.03983, equation 5, one cycle after the warm-up.
    """
    warmup_steps = int(config.warmup_fraction * total_steps)

    def warmup(step: int) -> float:
        return peak_rate * min(step / warmup_steps, 1.0) if warmup_steps else peak_rate

    def warmup_cosine(step: int) -> float:
        # Without a warm-up the first step is at the peak, so that a run of one step trains.
        peak_step = max(warmup_steps, 1)
        if step <= peak_step:
            return warmup(step)
        progress = min((step - peak_step) / (total_steps - peak_step), 1.0)
        amplitude = (peak_rate - config.lr_min) * 0.5
        return config.lr_min + amplitude * (1.0 + math.cos(math.pi * progress))

    schedules = {
        "constant": lambda step: peak_rate,
        "linear-warmup": warmup,
        "warmup-cosine": warmup_cosine,
    }
    return schedules[config.schedule]
