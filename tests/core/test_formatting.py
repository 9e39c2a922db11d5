"""Counts, sizes, losses and times in few digits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.formatting import (
    byte_size,
    duration,
    join_few,
    loss_text,
    minute_of,
    pluralize,
    short_duration,
    short_number,
)
from tests.sources import PACKAGE


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 rows"),
        (1, "1 row"),
        (2, "2 rows"),
        (1000, "1,000 rows"),
        (1_234_567, "1,234,567 rows"),
    ],
)
def test_count_has_its_noun_and_thousands_apart(number: int, text: str) -> None:
    assert pluralize(number, "row") == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (260_032, "260k"),
        (999_499, "999k"),
        (999_999, "1M"),
        (1_000_000, "1M"),
        (596_049_920, "596M"),
        (999_999_999, "1B"),
        (1_720_574_976, "1.72B"),
        (70_553_706_496, "70.6B"),
    ],
)
def test_short_number_has_three_digits_and_a_suffix(number: int, text: str) -> None:
    assert short_number(number) == text


@settings(deadline=None)
@given(st.integers(0, 10**12 - 10**9))
def test_short_number_is_within_half_a_percent_and_never_in_powers(number: int) -> None:
    text = short_number(number)
    sizes = {"k": 1e3, "M": 1e6, "B": 1e9}

    assert "e" not in text
    value = float(text.rstrip("kMB")) * sizes.get(text[-1], 1)
    assert value == pytest.approx(number, rel=0.005)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (12.34, "12.3s"),
        (59.9, "59.9s"),
        (59.97, "1m 00s"),
        (60, "1m 00s"),
        (245.4, "4m 05s"),
        (3599.7, "1h 00m"),
        (7500, "2h 05m"),
        (360_000, "100h 00m"),
    ],
)
def test_duration_has_readable_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((-5, "0 B"), (0, "0 B"), (999, "999 B"), (1_200, "1.2 kB"), (34_600_000, "34.6 MB")),
        *((999_999_999, "1 GB"), (8_254_000_000, "8.25 GB"), (24e9, "24 GB")),
    ],
)
def test_byte_size_has_three_digits(size: float, text: str) -> None:
    assert byte_size(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.6897, "4.69"), (0.003356, "0.00336"), (5.0, "5.00"), (12.34, "12.3"), (None, "–")],
)
def test_loss_has_three_digits(value: float | None, text: str) -> None:
    assert loss_text(value) == text


def test_short_duration_is_in_seconds_or_milliseconds() -> None:
    assert [short_duration(s) for s in (0.00012, 0.0123, 1.234)] == [
        *("0.12 ms", "12.3 ms", "1.23 s"),
    ]


def test_minute_of_an_iso_time() -> None:
    assert minute_of("2026-03-04T05:06:07+00:00") == "2026-03-04 05:06"
    assert minute_of("") == ""


def test_join_few_counts_the_rest() -> None:
    assert join_few("abc", 2) == "a, b and 1 more"
    assert join_few("abc") == "a, b, c"


def test_counted_noun_has_no_verb_of_the_plural() -> None:
    """`count` may write "1 row", so that "1 row that were" could follow."""
    plural = re.compile(r"count\([^{}]*\)\}(?: that| which)? (?:are|were|have|do|differ|agree)\b")
    found = {path.name: plural.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name: texts for name, texts in found.items() if texts} == {}
