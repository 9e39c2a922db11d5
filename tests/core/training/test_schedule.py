"""Learning rates against formulas written out here, including transformers'."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.config import InstructTrainingConfig
from mlxtune.core.training.schedule import Schedule, count_steps, schedule_of

PEAK = 2e-4
LR_MIN = 1e-6


def rates(
    name: str, total_steps: int, warmup_fraction: float = 0.1, lr_min: float = LR_MIN
) -> list[float]:
    schedule = made(name, total_steps, warmup_fraction, lr_min=lr_min)
    return [schedule(step) for step in range(1, total_steps + 1)]


def made(
    name: str, total_steps: int, fraction: float, *, peak_rate: float = PEAK, lr_min: float = LR_MIN
) -> Schedule:
    config = InstructTrainingConfig(schedule=name, warmup_fraction=fraction, lr_min=lr_min)
    return schedule_of(config, peak_rate, total_steps)


def transformers_cosine(step: int, warmup_steps: int, total_steps: int, min_rate: float) -> float:
    """Return the factor of transformers' `get_cosine_with_min_lr_schedule_with_warmup`."""
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    factor = 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))
    return max(0, factor * (1 - min_rate) + min_rate)


@pytest.mark.parametrize(
    ("total_steps", "fraction", "warmup_steps"),
    [(100, 0.1, 10), (37, 0.25, 9), (2, 0.5, 1), (1000, 0.5, 500)],
)
def test_cosine_matches_transformers(total_steps: int, fraction: float, warmup_steps: int) -> None:
    expected = [
        PEAK * transformers_cosine(step, warmup_steps, total_steps, LR_MIN / PEAK)
        for step in range(1, total_steps + 1)
    ]

    assert rates("warmup-cosine", total_steps, fraction) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("total_steps", "fraction"), [(100, 0.0), (2, 0.0), (10, 0.05)])
def test_cosine_without_warm_up_starts_at_the_peak_like_transformers(
    total_steps: int, fraction: float
) -> None:
    # transformers counts from 0, so its first step is at the peak too.
    expected = [
        PEAK * transformers_cosine(step, 0, total_steps - 1, LR_MIN / PEAK)
        for step in range(total_steps)
    ]

    assert rates("warmup-cosine", total_steps, fraction) == pytest.approx(expected, rel=1e-12)


def test_cosine_of_ten_steps_matches_hand_computation() -> None:
    third = math.sqrt(3) / 2
    expected = [0.25, 0.5, 0.75, 1.0]
    expected += [(1 + c) / 2 for c in (third, 0.5, 0.0, -0.5, -third, -1.0)]

    schedule = made("warmup-cosine", 10, 0.4, peak_rate=1.0, lr_min=0.0)

    assert [schedule(step) for step in range(1, 11)] == pytest.approx(expected, abs=1e-15)


def test_linear_warmup_rises_to_the_peak_and_stays() -> None:
    expected = [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, PEAK, PEAK, PEAK, PEAK]

    assert rates("linear-warmup", 8, 0.5) == pytest.approx(expected, rel=1e-12)


def test_constant_is_the_peak_at_every_step() -> None:
    assert rates("constant", 5, 0.5) == [PEAK] * 5


@pytest.mark.parametrize("name", ["linear-warmup", "warmup-cosine"])
def test_no_warm_up_begins_at_the_peak(name: str) -> None:
    first, *_ = rates(name, 1000, 0.0)

    assert first == PEAK


@pytest.mark.parametrize("name", ["linear-warmup", "warmup-cosine"])
def test_warm_up_over_the_whole_run_ends_at_the_peak(name: str) -> None:
    expected = [PEAK * step / 8 for step in range(1, 9)]

    assert rates(name, 8, 1.0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", ["constant", "linear-warmup", "warmup-cosine"])
def test_run_of_one_step_trains_at_the_peak(name: str, fraction: float) -> None:
    assert rates(name, 1, fraction) == [PEAK]


@settings(deadline=None)
@given(total_steps=st.integers(1, 300), fraction=st.floats(0, 1))
def test_cosine_rises_to_the_peak_then_falls_to_its_end(total_steps: int, fraction: float) -> None:
    found = rates("warmup-cosine", total_steps, fraction)
    warmup_steps = math.floor(fraction * total_steps)

    assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in found)
    peak_step = max(warmup_steps, 1)
    rising, falling = found[:peak_step], found[peak_step - 1 :]
    assert all(a < b for a, b in pairwise(rising))
    assert all(a > b for a, b in pairwise(falling))
    assert rising[-1] == pytest.approx(PEAK, rel=1e-12)
    if peak_step < total_steps:
        assert found[-1] == pytest.approx(LR_MIN, rel=1e-9)


@settings(deadline=None)
@given(
    name=st.sampled_from(["constant", "linear-warmup", "warmup-cosine"]),
    fraction=st.floats(0, 1),
    steps=st.lists(st.integers(1, 100), min_size=1),
)
def test_rate_depends_only_on_the_step(name: str, fraction: float, steps: list[int]) -> None:
    in_order = rates(name, 100, fraction)
    schedule = made(name, 100, fraction)

    assert [schedule(step) for step in steps] == [in_order[step - 1] for step in steps]


def test_steps_beyond_the_run_stay_at_its_end() -> None:
    schedule = made("warmup-cosine", 10, 0.2)

    assert schedule(11) == schedule(10_000) == pytest.approx(LR_MIN)


@pytest.mark.parametrize(("rows", "max_steps", "expected"), [(9, None, 9), (9, 7, 7), (8, 7, 6)])
def test_last_step_of_an_epoch_takes_the_rows_that_are_left(
    rows: int, max_steps: int | None, expected: int
) -> None:
    config = InstructTrainingConfig(epochs=3, batch_size=4, max_steps=max_steps)

    assert count_steps(config, rows) == (math.ceil(rows / 4), expected)
