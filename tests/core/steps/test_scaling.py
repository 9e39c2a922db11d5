"""The division of a step among workers, and its gain against sums by hand."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.steps.scaling import Scaling, balance, busiest_fraction, busiest_items

COSTS = st.lists(st.integers(1, 50), max_size=7)


def test_exchange_takes_each_byte_twice_around_the_ring() -> None:
    # 8 machines: 7/8 of 100 MB twice at 1 Gbit/s, in 14 messages.
    scaling = Scaling(8, 1.0, 1 / 8, 100_000_000)
    assert scaling.exchange_s == pytest.approx(2 * 7 / 8 * 0.8 + 14e-4)
    assert Scaling(8, 10.0, 1 / 8, 100_000_000).exchange_s == pytest.approx(0.14 + 14e-4)
    assert Scaling(1, 1.0, 1.0, 100_000_000).exchange_s == 0


def test_speedup_follows_from_the_busiest_fraction_and_the_exchange() -> None:
    scaling = Scaling(2, 1.0, 0.6, 12_500_000, step_s=1.0)
    assert scaling.exchange_s == pytest.approx(0.1002)
    assert scaling.speedup == pytest.approx(1 / 0.7002)
    at_least = Scaling(2, 1.0, 0.6, 12_500_000, step_s=scaling.least_step_s)
    assert at_least.speedup == pytest.approx(1)
    assert Scaling(2, 1.0, 0.6, 12_500_000).speedup is None
    assert Scaling(2, 1.0, 1.0, 1).least_step_s == float("inf")


def test_busiest_fraction_covers_all_steps() -> None:
    # Divided between two workers, the steps cost 5 of 8 and 3 of 4.
    assert busiest_fraction([[5, 2, 1], [3, 1]], 2) == pytest.approx(8 / 12)
    assert busiest_fraction([[5, 2, 1]], 1) == 1
    assert busiest_fraction([], 2) == 1
    assert busiest_items([5, 2, 1], 2) == [0]
    assert busiest_items([1, 1, 1], 2) == [0, 2]


@given(COSTS, st.integers(1, 4))
def test_each_item_is_dealt_once(costs: list[int], workers: int) -> None:
    dealt = balance(costs, workers)
    assert len(dealt) == workers
    assert sorted(i for items in dealt for i in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in dealt)


@given(COSTS, st.integers(1, 3))
def test_slowest_worker_takes_at_most_a_third_longer(costs: list[int], workers: int) -> None:
    longest = max((sum(costs[i] for i in items) for items in balance(costs, workers)), default=0)
    best = min(
        max(
            sum(c for c, r in zip(costs, to, strict=True) if r == worker)
            for worker in range(workers)
        )
        for to in product(range(workers), repeat=len(costs))
    )
    assert 3 * longest <= 4 * best


def test_single_worker_gets_all_items() -> None:
    assert balance([3, 1, 2], 1) == [[0, 1, 2]]
    assert balance([], 2) == [[], []]
