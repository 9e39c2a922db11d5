"""Axes of charts: the positions of values, and the ticks."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxtune.views.pages.axis import Axis, linear_axis, log_axis, spans_much, tick_label

VALUES = st.lists(st.floats(-1e18, 1e18), min_size=1, max_size=20)


def test_value_is_placed_by_its_fraction_of_the_range() -> None:
    assert [Axis(2.0, 4.0).fraction(value) for value in (2, 3, 4)] == [0.0, 0.5, 1.0]
    log = Axis(0.01, 100.0, log=True)
    assert [round(log.fraction(value), 9) for value in (0.01, 1, 100)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis(0, 600), ["0", "200", "400", "600"]),
        (Axis(0, 20_000), ["0", "5,000", "10,000", "15,000", "20,000"]),
        (Axis(0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis(0, 12), ["0", "2.5", "5", "7.5", "10"]),
        (Axis(0, 0.005), ["0", "0.001", "0.002", "0.003", "0.004", "0.005"]),
        (Axis(0, 1e-4), ["0", "2e-5", "4e-5", "6e-5", "8e-5", "1e-4"]),
        (Axis(1.9, 2.1), ["1.9", "1.95", "2", "2.05", "2.1"]),
        (Axis(0.001, 5, log=True), ["0.001", "0.01", "0.1", "1"]),
        (Axis(0.3, 4, log=True), ["0.5", "1", "2"]),
    ],
)
def test_ticks_are_round_numbers_with_short_labels(axis: Axis, labels: list[str]) -> None:
    assert [tick_label(value) for value in axis.ticks()] == labels


@given(VALUES, st.booleans())
# There is no float between 0 and 5e-324 for a tick.
@example([5e-324], False)
@example([5e-324], True)
@example([-5e-324, 5e-324], False)
def test_linear_axis_contains_all_values_and_some_ticks(
    values: list[float], from_zero: bool
) -> None:
    axis = linear_axis(values, from_zero=from_zero)
    assert all(0 <= axis.fraction(value) <= 1 for value in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12
    assert all(-1e-6 <= axis.fraction(value) <= 1 + 1e-6 for value in ticks)
    assert len(set(map(tick_label, ticks))) == len(ticks)


@given(st.lists(st.floats(1e-12, 1e18), min_size=1, max_size=20).filter(spans_much))
@example([5e-324, 1.0, 9e39])
def test_logarithmic_axis_contains_all_values_and_some_ticks(values: list[float]) -> None:
    axis = log_axis(values)
    places = [axis.fraction(value) for value in sorted(values)]
    assert places == sorted(places)
    assert 0 <= places[0] < places[-1] <= 1
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 16
    assert all(axis.low * 0.999 <= value <= axis.high * 1.001 for value in ticks)


def test_axis_starts_at_zero_if_the_lowest_value_is_near_it() -> None:
    assert linear_axis([0.3, 4.0]).low == 0
    assert linear_axis([1.9, 2.1]).low > 1.8
    assert linear_axis([1.9, 2.1], from_zero=True).low == 0
    assert linear_axis([]) == linear_axis([0.0, 1.0])
    assert linear_axis([0.0, 0.0]) == Axis(0.0, 1.0)


def test_logarithmic_axis_is_for_positive_values_far_apart() -> None:
    assert spans_much([0.001, 4.0])
    assert not any(map(spans_much, ([1.0, 4.0], [0.0, 4.0], [])))


def test_label_has_as_few_digits_as_it_needs() -> None:
    labels = {0.0: "0", 3 * 0.1: "0.3", 2_500.0: "2,500", 3e6: "3e6", 1.25e-4: "1.25e-4"}
    assert {value: tick_label(value) for value in labels} == labels
    assert tick_label(-0.5) == "-0.5"
