"""The share of an adapter's gain that is lost, and the choice of a storage format by this share."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from mlxtune.backend.adapters.retention import Retention, share_lost, try_in_order

STORAGES = ["as the base", "in 6 bits", "in 8 bits", "plain"]


@pytest.mark.parametrize(
    ("base", "trained", "value", "lost"),
    [
        # Base 7, trained 5, fused 5.5: a quarter of the gain is lost.
        (7.0, 5.0, 5.5, 0.25),
        (7.0, 5.0, 4.9, 0.0),
        (7.0, 5.0, 8.0, 1.5),
        # Divergences from the trained model, whose own divergence is 0.
        (0.4, 0.0, 0.1, 0.25),
        # The adapter changes nothing, so there is no gain to lose.
        (0.0, 0.0, 0.1, 0.0),
        (7.0, 5.0, math.nan, 1.0),
        (math.inf, 5.0, 5.0, 1.0),
    ],
)
def test_share_lost_is_that_of_the_gain(
    base: float, trained: float, value: float, lost: float
) -> None:
    assert share_lost(base, trained, value) == pytest.approx(lost)


def tried(values: dict[str, float], storages: list[str] = STORAGES) -> Retention:
    asked = []

    def value_of(storage: str) -> float:
        asked.append(storage)
        return values[storage]

    found = try_in_order("Loss on 9 validation rows", "nats", 3.0, 2.0, storages, value_of)
    assert asked == [each.storage for each in found.tried]
    return found


def test_storage_of_the_base_is_kept_where_it_loses_at_most_a_tenth() -> None:
    assert tried({"as the base": 2.09}).chosen.storage == "as the base"


def test_first_storage_that_keeps_nine_tenths_is_chosen_and_no_other_is_measured() -> None:
    found = tried({"as the base": 2.5, "in 6 bits": 2.11, "in 8 bits": 2.01})
    assert found.chosen.storage == "in 8 bits"
    assert found.line() == (
        "Loss on 9 validation rows: 3 nats without the adapter, 2 with it, "
        "2.01 stored in 8 bits (1% of the gain lost); "
        "2.5 stored as the base (50% of the gain lost)"
    )


def test_last_storage_is_chosen_whatever_it_loses() -> None:
    found = tried(dict.fromkeys(STORAGES, 2.9))
    assert found.chosen.storage == "plain"
    assert asdict(found)["tried"][-1] == {
        "storage": "plain",
        "value": 2.9,
        "lost": pytest.approx(0.9),
    }
    assert tried({"as the base": 2.9}, ["as the base"]).chosen.storage == "as the base"
