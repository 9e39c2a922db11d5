"""The distribution of examples to workers."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.steps.deal import deal

COSTS = st.lists(st.integers(1, 50), max_size=7)


@given(COSTS, st.integers(1, 4))
def test_each_item_is_dealt_once(costs: list[int], workers: int) -> None:
    dealt = deal(costs, workers)
    assert len(dealt) == workers
    assert sorted(i for items in dealt for i in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in dealt)


@given(COSTS, st.integers(1, 3))
def test_no_worker_takes_a_third_longer_than_it_must(costs: list[int], workers: int) -> None:
    longest = max((sum(costs[i] for i in items) for items in deal(costs, workers)), default=0)
    best = min(
        max(
            sum(c for c, r in zip(costs, to, strict=True) if r == worker)
            for worker in range(workers)
        )
        for to in product(range(workers), repeat=len(costs))
    )
    assert 3 * longest <= 4 * best


def test_alone_a_worker_gets_all() -> None:
    assert deal([3, 1, 2], 1) == [[0, 1, 2]]
    assert deal([], 2) == [[], []]
