"""The training rows and their order: laws over any rows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxtune
from mlxtune.config import ObjectiveConfig
from mlxtune.core.data.conversation import CHOSEN, REJECTED
from mlxtune.core.data.corpus import CorpusRows, RowExamples
from mlxtune.core.data.held_out import hold_out_rows
from mlxtune.core.objectives.objective import Objective
from mlxtune.core.steps.order import (
    RolloutOfStep,
    rows_of_epoch,
    shuffled_steps,
    steps_by_length,
    steps_of,
)
from tests.core.data.corpora import corpus


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the rows of an epoch in the order in which steps of any size take them."""
    return [row for (row,) in shuffled_steps(rows, 1, seed, epoch)]


@settings(deadline=None)
@given(rows=st.integers(0, 100), seed=st.integers(0, 2**70), epoch=st.integers(1, 1000))
def test_epoch_order_is_a_permutation_from_seed_and_epoch(rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(rows, seed, epoch)

    assert sorted(order) == list(range(rows))
    assert epoch_order(rows, seed, epoch) == order


def test_epoch_order_differs_by_epoch_by_seed_and_from_the_file() -> None:
    orders = [tuple(epoch_order(30, seed, epoch)) for seed in range(10) for epoch in range(1, 11)]

    assert len(set(orders)) == 100
    assert tuple(range(30)) not in orders


LENGTHS = [i * 7 % 20 + 1 for i in range(20)]


@pytest.mark.slow
def test_orders_and_split_are_the_same_in_another_process() -> None:
    program = (
        "from mlxtune.core.data.held_out import hold_out_rows\n"
        "from mlxtune.core.steps import order\n"
        "print(order.shuffled_steps(20, 3, 42, 3))\n"
        "print(order.steps_by_length([i * 7 % 20 + 1 for i in range(20)], 3, 42, 3))\n"
        "print(hold_out_rows([i // 3 for i in range(20)], 0.25, 42, 1000))\n"
    )
    package = str(Path(mlxtune.__file__).parents[1])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": package},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }

    split = hold_out_rows([i // 3 for i in range(20)], 0.25, 42, 1000)
    steps = steps_by_length(LENGTHS, 3, 42, 3)
    assert outputs == {f"{shuffled_steps(20, 3, 42, 3)}\n{steps}\n{split}\n"}


def test_orders_and_split_match_earlier_versions() -> None:
    # Recorded values: a change here changes every run that anyone has made.
    assert epoch_order(10, 42, 1) == [0, 1, 4, 7, 3, 2, 9, 8, 6, 5]
    assert epoch_order(10, 42, 2) == [8, 5, 4, 9, 3, 6, 0, 7, 1, 2]
    assert shuffled_steps(10, 4, 42, 1) == [[0, 1, 4, 7], [3, 2, 9, 8], [6, 5]]
    assert steps_by_length(LENGTHS[:10], 4, 42, 1) == [[5, 8], [1, 4, 7, 2], [0, 3, 6, 9]]
    assert steps_by_length(LENGTHS[:10], 4, 42, 2) == [[0, 3, 6, 9], [1, 4], [7, 2, 5, 8]]
    # These are indices: the 3rd, 5th and 7th rows.
    assert hold_out_rows(range(10), 0.3, 42, 1000)[1] == [2, 4, 6]


# Steps by length


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), max_size=60),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**70),
    epoch=st.integers(1, 1000),
)
def test_steps_by_length_hold_each_row_once_and_are_all_full_but_one(
    lengths: list[int], batch_size: int, seed: int, epoch: int
) -> None:
    steps = steps_by_length(lengths, batch_size, seed, epoch)

    assert sorted(row for step in steps for row in step) == list(range(len(lengths)))
    left = len(lengths) % batch_size
    sizes = [batch_size] * (len(lengths) // batch_size) + [left] * (left > 0)
    assert sorted(map(len, steps), reverse=True) == sizes
    assert steps_by_length(np.array(lengths, dtype=np.int64), batch_size, seed, epoch) == steps


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=60),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_steps_by_length_hold_neighbors_but_for_a_tenth(
    lengths: list[int], batch_size: int, seed: int
) -> None:
    steps = [[lengths[i] for i in s] for s in steps_by_length(lengths, batch_size, seed, 1)]

    for shorter, longer in pairwise(sorted(steps, key=lambda step: sum(step) / len(step))):
        assert max(shorter) <= 1.1 * min(longer)


def test_steps_by_length_differ_by_epoch_in_their_rows_and_in_their_order() -> None:
    lengths = [100 + i % 50 for i in range(402)]
    epochs = [steps_by_length(lengths, 4, 42, epoch) for epoch in range(1, 21)]

    met = [{frozenset(step) for step in steps} for steps in epochs]
    assert all(len(a & b) < 10 for a, b in combinations(met, 2))
    # The incomplete step may come at any place, with rows of any length.
    places = [next(i for i, step in enumerate(steps) if len(step) == 2) for steps in epochs]
    assert len(set(places)) > 10
    short = [lengths[steps[at][0]] for steps, at in zip(epochs, places, strict=True)]
    assert min(short) < 115 < 135 < max(short)
    # Long and short steps are mixed: lengths show no trend over the epoch.
    for steps in epochs:
        tokens = [sum(lengths[row] for row in step) / len(step) for step in steps]
        assert abs(float(np.corrcoef(tokens, range(len(tokens)))[0, 1])) < 0.4


# Files and their weights


def test_weight_says_how_often_an_epoch_uses_the_rows_of_a_file() -> None:
    rows = corpus([10, 8, 4], [2.5, 1, 0.25]).select()
    epochs = [np.bincount(rows_of_epoch(rows, 7, epoch), minlength=22) for epoch in range(1, 9)]

    for uses in epochs:
        assert sorted(uses[:10]) == [2] * 5 + [3] * 5
        assert uses[10:18].tolist() == [1] * 8
        assert sorted(uses[18:]) == [0, 0, 0, 1]
    # The used part changes with each epoch, so that eventually all rows are used.
    assert (epochs[0] + epochs[1])[:10].tolist() == [5] * 10
    assert sum(epochs[:4])[18:].tolist() == [1] * 4
    assert rows_of_epoch(rows, 7, 3).tolist() == rows_of_epoch(rows, 7, 3).tolist()
    assert rows_of_epoch(rows, 8, 1).tolist() != rows_of_epoch(rows, 7, 1).tolist()


@pytest.mark.parametrize("kind", ["shuffle", "length"])
def test_steps_use_the_rows_of_an_epoch(kind: str) -> None:
    rows = corpus([10, 4], [1.5, 2]).select()

    steps = steps_of(rows, 4, kind, 7, 2)

    assert sorted(i for step in steps for i in step) == sorted(rows_of_epoch(rows, 7, 2))
    assert sorted(map(len, steps)) == [3, 4, 4, 4, 4, 4]


def test_data_hash_covers_the_weights_of_files() -> None:
    hashes = {corpus([10, 4], w).data_hash() for w in (None, [1, 1], [1, 2], [2, 1])}

    assert len(hashes) == 3


def test_row_that_a_step_uses_twice_is_two_rows_of_a_preference_loss() -> None:
    class Pairs(CorpusRows):
        def __getitem__(self, place: int) -> RowExamples:
            (example,) = super().__getitem__(place)
            return replace(example, role=CHOSEN), replace(example, role=REJECTED)

    drawn = Pairs(corpus([2]), range(2)).examples_of([0, 1, 0])

    dpo = Objective(ObjectiveConfig(objective="dpo", beta=1.0))
    logps = np.array([3.0, 0.0, 0.0, 0.0, 3.0, 0.0])
    loss, _ = dpo.evaluate(drawn, logps)
    # -log sigmoid of the margins 3, 0 and 3.
    assert loss == pytest.approx((2 * np.log1p(np.exp(-3.0)) + np.log(2)) / 3, rel=1e-12)
    assert [example.use for example in drawn] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (1, [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]),
        (2, [(1, 1), (1, 1), (2, 3), (2, 3), (3, 5)]),
        (3, [(1, 1), (1, 1), (1, 1), (2, 4), (2, 4)]),
    ],
)
def test_rollout_of_a_step_has_a_number_and_a_first_step(
    updates: int, expected: list[tuple[int, int]]
) -> None:
    assert [RolloutOfStep.of(step, updates) for step in range(1, 6)] == expected
