"""The interval of a change in loss, against reference loops."""

from __future__ import annotations

import random
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from mlxtune.core.evaluation.interval import paired_difference


def drawn_rows(rng: np.random.Generator, rows: int, effect: float) -> tuple[Any, Any, Any]:
    """Draw rows; return losses before and after a mean change of `effect` per token, and tokens."""
    tokens = rng.integers(5, 60, rows)
    base = rng.gamma(4, 0.5, rows) * tokens
    change = (effect + rng.normal(0, 0.3, rows)) * tokens
    return base, base + change, tokens


def test_difference_is_of_sums_and_never_a_mean_of_means() -> None:
    base, adapted = np.array([2.0, 100.0]), np.array([1.0, 103.0])
    found = paired_difference(base, adapted, np.array([1, 99]), 0)
    assert found.loss == pytest.approx(2 / 100)


def test_interval_without_skew_matches_a_bootstrap_loop() -> None:
    base, adapted, tokens = drawn_rows(np.random.default_rng(1), 60, -0.1)
    found = paired_difference(base, adapted, tokens, 7)
    draw = random.Random(3)
    drawn = []
    for _ in range(4000):
        rows = draw.choices(range(60), k=60)
        change = sum(adapted[i] - base[i] for i in rows)
        drawn.append(change / sum(int(tokens[i]) for i in rows))
    drawn.sort()
    # The interval also corrects for bias and skew, and draws with a different generator.
    assert found.low == pytest.approx(drawn[100], abs=0.012)
    assert found.high == pytest.approx(drawn[3900], abs=0.012)
    assert found.low < found.loss < found.high


def test_skewed_rows_shift_the_interval_as_the_correction_does_in_a_loop() -> None:
    """Efron and Tibshirani (1993), equations 14.9 to 14.15, written out with lists."""
    rng, normal = np.random.default_rng(2), NormalDist()
    tokens = np.full(40, 10)
    base, adapted = np.zeros(40), rng.exponential(1.0, 40) ** 2
    found = paired_difference(base, adapted, tokens, 5)
    observed, draw, drawn = adapted.sum() / 400, random.Random(8), []
    for _ in range(10_000):
        drawn.append(sum(draw.choices(adapted.tolist(), k=40)) / 400)
    drawn.sort()
    bias = normal.inv_cdf(sum(array < observed for array in drawn) / len(drawn))
    without = [(adapted.sum() - each) / 390 for each in adapted]
    mean = sum(without) / 40
    cubes, squares = (sum((mean - each) ** power for each in without) for power in (3, 2))
    acceleration = cubes / (6 * squares**1.5)
    ends = []
    # The interval is as wide as Student's, whose quantile is 2.0227 with 39 degrees of freedom.
    tail = normal.cdf(-((40 / 39) ** 0.5) * 2.0227)
    for fraction in (tail, 1 - tail):
        z = bias + normal.inv_cdf(fraction)
        ends.append(drawn[int(normal.cdf(bias + z / (1 - acceleration * z)) * len(drawn))])
    plain = drawn[250], drawn[9750]
    # The plain percentiles are too far away to pass.
    assert abs(ends[1] - plain[1]) > 0.01
    assert (found.low, found.high) == pytest.approx(ends, abs=0.008)


def test_interval_covers_the_true_effect_about_as_often_as_it_says() -> None:
    rng, covered, runs = np.random.default_rng(11), 0, 200
    for seed in range(runs):
        found = paired_difference(*drawn_rows(rng, 50, -0.05), seed, resamples=1000)
        covered += found.low <= -0.05 <= found.high
    # The tolerance is three standard deviations of a count of 200 at 95%.
    assert covered / runs == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize("rows", [6, 10])
def test_interval_of_few_rows_covers_no_effect_about_as_often_as_it_says(rows: int) -> None:
    rng, covered, runs = np.random.default_rng(12), 0, 300
    tokens = np.full(rows, 10)
    for seed in range(runs):
        changes = rng.normal(0.0, 1.0, rows)
        found = paired_difference(np.zeros(rows), changes, tokens, seed, resamples=1000)
        covered += found.low <= 0 <= found.high
    # Without Student's quantile, the coverage would be 0.86 and 0.89.
    assert covered / runs > 0.91


def test_interval_is_a_function_of_the_seed() -> None:
    rows = drawn_rows(np.random.default_rng(0), 30, -0.1)
    assert paired_difference(*rows, 1) == paired_difference(*rows, 1)
    assert paired_difference(*rows, 1).low != paired_difference(*rows, 2).low


@pytest.mark.parametrize("base", [0.0, 1e-320, -1e-320, 1e-17, 1.0])
@pytest.mark.parametrize("change", [0.0, 1e-200, -1.0, 1e39])
def test_difference_from_rewards_around_zero_is_finite(base: float, change: float) -> None:
    """Rewards may have both signs, and so sum to 0 or to what rounding leaves of it."""
    before = np.array([1.0, -1.0] * 4 + [base])
    found = paired_difference(before, before + change * np.arange(9), np.full(9, 1), 0)
    assert np.isfinite([found.loss, found.low, found.high]).all()
    assert found.low <= found.loss <= found.high
    assert abs(found.share) <= 1e6
    # A change from nothing is not negligible.
    assert (found.share == 0) == (found.loss == 0)


def test_share_is_relative_to_the_sum_before() -> None:
    before, tokens = np.array([1.0, 3.0]), np.array([1, 1])
    assert paired_difference(before, before + 1, tokens, 0).share == 0.5
    assert paired_difference(-before, 1 - before, tokens, 0).share == -0.5


@pytest.mark.parametrize("size", [1e-110, 1e-160, 1e-300])
def test_tiny_changes_have_an_interval(size: float) -> None:
    changes = size * np.array([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])
    found = paired_difference(np.zeros(6), changes, np.full(6, 1), 0)
    assert 0 < found.low < found.loss < found.high
