"""Histograms of lengths: every value stands in one bar, and bars are round."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.reports.histogram import histogram


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
