"""Curves: no peak is lost where values are left out, and averages are those of the paper."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.reports.curves import decimate, histogram, smooth, span_for

FLOATS = st.one_of(st.floats(-1e9, 1e9), st.just(math.nan), st.just(math.inf))


@given(st.lists(FLOATS, max_size=400), st.integers(4, 60))
def test_few_values_keep_the_ends_and_every_extreme(values: list[float], points: int) -> None:
    chosen = decimate(values, points)
    there = [i for i, value in enumerate(values) if math.isfinite(value)]

    assert len(chosen) <= max(points, 4)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(there)
    if there:
        assert (chosen[0], chosen[-1]) == (there[0], there[-1])
        finite, kept = [values[i] for i in there], [values[i] for i in chosen]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    if len(there) <= points:
        assert chosen == there


@given(st.integers(1, 4999))
def test_one_spike_among_thousands_is_kept(place: int) -> None:
    values = [0.0] * 5000
    values[place] = 9.0
    assert place in decimate(values, 100)


def test_each_stretch_keeps_its_lowest_and_its_highest() -> None:
    values = np.random.default_rng(0).normal(size=10_000).tolist()
    chosen = decimate(values, 1002)
    for number in range(500):
        part = range(number * 20, number * 20 + 20)
        kept = [values[i] for i in chosen if i in part]
        whole = [values[i] for i in part]
        assert (min(kept), max(kept)) == (min(whole), max(whole))


def test_average_is_the_exponential_one_corrected_for_its_start() -> None:
    values, span = [4.0, 2.0, 3.0, 1.0, 5.0], 3
    keep = (span - 1) / (span + 1)
    # As a sum with weights that fall by `keep`, divided by the sum of these.
    expected = [
        sum(keep ** (i - j) * values[j] for j in range(i + 1))
        / sum(keep ** (i - j) for j in range(i + 1))
        for i in range(len(values))
    ]
    assert smooth(values, span) == pytest.approx(expected)
    assert smooth(values, 1) == values
    assert smooth([], 5) == []


def test_value_that_is_missing_stays_missing_and_does_not_count() -> None:
    found = smooth([1.0, math.nan, 1.0, math.inf, 1.0], 10)
    assert [found[i] for i in (0, 2, 4)] == pytest.approx([1.0, 1.0, 1.0])
    assert math.isnan(found[1])
    assert math.isnan(found[3])


def test_span_grows_with_the_run() -> None:
    assert [span_for(count) for count in (0, 1, 8, 40, 600, 20_000)] == [1, 1, 2, 10, 12, 400]


# Histograms


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200))
def test_each_value_stands_in_the_bar_that_begins_at_or_below_it(values: list[int]) -> None:
    found = histogram(np.array(values))
    start, width, counts = found["start"], found["width"], found["counts"]

    assert len(counts) <= 32
    assert counts[0] > 0
    assert counts[-1] > 0
    by_hand = Counter((value - start) // width for value in values)
    assert {i: count for i, count in enumerate(counts) if count} == dict(by_hand)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7], {"start": 7, "width": 1, "counts": [1]}),
        ([3, 5, 5], {"start": 3, "width": 1, "counts": [1, 0, 2]}),
        ([14, 99], {"start": 10, "width": 5, "counts": [1, *[0] * 16, 1]}),
        ([], {"start": 0, "width": 1, "counts": []}),
    ],
)
def test_bars_begin_at_round_numbers(values: list[int], expected: dict[str, object]) -> None:
    assert histogram(np.array(values, dtype=np.int64)) == expected
