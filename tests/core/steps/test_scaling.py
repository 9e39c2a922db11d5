"""The gain of several machines, against sums by hand."""

from __future__ import annotations

import pytest

from mlxtune.core.steps.scaling import Scaling, dearest_items, dearest_share


def test_exchange_takes_each_byte_twice_around_the_ring() -> None:
    # 8 machines: 7/8 of 100 MB twice at 1 Gbit/s, in 14 messages.
    scaling = Scaling(8, 1.0, 1 / 8, 100_000_000)
    assert scaling.exchange_s == pytest.approx(2 * 7 / 8 * 0.8 + 14e-4)
    assert Scaling(8, 10.0, 1 / 8, 100_000_000).exchange_s == pytest.approx(0.14 + 14e-4)
    assert Scaling(1, 1.0, 1.0, 100_000_000).exchange_s == 0


def test_speedup_is_that_of_the_dearest_share_and_the_exchange() -> None:
    scaling = Scaling(2, 1.0, 0.6, 12_500_000, step_s=1.0)
    assert scaling.exchange_s == pytest.approx(0.1002)
    assert scaling.speedup == pytest.approx(1 / 0.7002)
    at_least = Scaling(2, 1.0, 0.6, 12_500_000, step_s=scaling.least_step_s)
    assert at_least.speedup == pytest.approx(1)
    assert Scaling(2, 1.0, 0.6, 12_500_000).speedup is None
    assert Scaling(2, 1.0, 1.0, 1).least_step_s == float("inf")


def test_dearest_share_is_over_all_steps() -> None:
    # Divided between two workers, the steps cost 5 of 8 and 3 of 4.
    assert dearest_share([[5, 2, 1], [3, 1]], 2) == pytest.approx(8 / 12)
    assert dearest_share([[5, 2, 1]], 1) == 1
    assert dearest_share([], 2) == 1
    assert dearest_items([5, 2, 1], 2) == [0]
    assert dearest_items([1, 1, 1], 2) == [0, 2]
