"""Rows that are held out for validation, against counts by hand and laws."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.held_out import RunRows, hold_out_rows
from tests.core.data.corpora import corpus
from tests.sources import PACKAGE, nodes_of


@settings(deadline=None)
@given(
    count=st.integers(2, 200),
    fraction=st.integers(1, 32),
    seed=st.integers(0, 2**70),
    val_rows=st.integers(1, 300),
)
def test_holds_out_the_ceiling_of_the_fraction_within_its_bounds(
    count: int, fraction: int, seed: int, val_rows: int
) -> None:
    # 64ths are exact in floats, so that integers give the same ceiling.
    training, validation = hold_out_rows(range(count), fraction / 64, seed, val_rows)

    assert len(validation) == min(-(-count * fraction // 64), val_rows, count - 1)
    assert len(validation) >= 1
    assert len(training) >= 1
    assert sorted(training + validation) == list(range(count))
    assert training == sorted(training)
    assert validation == sorted(validation)
    # The values of the identities do not matter, only their equality.
    others = [(i * 7919 + seed) % 2**64 for i in range(count)]
    assert hold_out_rows(others, fraction / 64, seed, val_rows) == (training, validation)


@pytest.mark.parametrize(
    ("count", "val_split", "held_out"),
    [(2, 0.2, 1), (5, 0.2, 1), (6, 0.2, 2), (10, 0.2, 2), (2, 0.5, 1), (3, 0.5, 2), (100, 0.01, 1)],
)
def test_split_of_a_few_rows_matches_hand_computation(
    count: int, val_split: float, held_out: int
) -> None:
    training, validation = hold_out_rows(range(count), val_split, seed=42, val_rows=1000)

    assert (len(training), len(validation)) == (count - held_out, held_out)


@pytest.mark.parametrize("identities", [[], [5], [5, 5, 5]])
def test_split_needs_a_row_for_training_and_validation(identities: list[int]) -> None:
    with pytest.raises(ValueError, match="at least two rows that differ"):
        hold_out_rows(identities, 0.2, seed=42, val_rows=1000)


@settings(deadline=None)
@given(
    identities=st.lists(st.integers(0, 12), min_size=2, max_size=60).filter(
        lambda found: len(set(found)) > 1
    ),
    fraction=st.integers(1, 32),
    seed=st.integers(0, 2**70),
    val_rows=st.integers(1, 60),
)
def test_identical_rows_stay_together_and_no_more_than_asked_is_held_out(
    identities: list[int], fraction: int, seed: int, val_rows: int
) -> None:
    training, validation = hold_out_rows(identities, fraction / 64, seed, val_rows)

    assert training
    assert validation
    assert sorted(training + validation) == list(range(len(identities)))
    assert (training, validation) == (sorted(training), sorted(validation))
    assert not {identities[i] for i in training} & {identities[i] for i in validation}
    wanted = min(-(-len(identities) * fraction // 64), val_rows, len(identities) - 1)
    copies = sorted(map(identities.count, set(identities)))
    # If even the rarest identity has too many copies, it alone is held out.
    assert len(validation) <= max(wanted, copies[0])
    if copies[0] > wanted:
        assert len(validation) == copies[0]
    # No identity remains that would have fitted.
    left = [identities.count(identities[i]) for i in training]
    assert min(left) + len(validation) > wanted


def test_smallest_cluster_is_held_out_if_all_are_too_large() -> None:
    assert hold_out_rows([1, 1, 1, 9, 5, 5, 9, 9], 0.1, 42, 1000) == ([0, 1, 2, 3, 6, 7], [4, 5])


def test_with_copies_the_fraction_is_held_out_and_each_row_at_times() -> None:
    identities = [i // 2 if i < 40 else i for i in range(100)]
    counts = np.zeros(100)
    for seed in range(500):
        validation = hold_out_rows(identities, 0.2, seed, 1000)[1]
        assert len(validation) == 20
        counts[validation] += 1

    # 500 draws at a fifth: each 100 times, standard deviation 9.
    assert np.abs(counts - 100).max() < 6 * 9


def test_split_differs_by_seed_and_keeps_the_first_choice_when_capped() -> None:
    splits = [hold_out_rows(range(100), 0.2, seed, 1000)[1] for seed in range(20)]
    assert len({tuple(split) for split in splits}) == 20

    capped = hold_out_rows(range(100), 0.2, 7, val_rows=5)[1]
    assert len(capped) == 5
    assert set(capped) <= set(splits[7])


def test_split_holds_out_every_row_about_equally_often() -> None:
    # 2,000 draws at a fifth: each row 400 times, standard deviation 18.
    counts = np.zeros(50)
    for seed in range(2000):
        counts[hold_out_rows(range(50), 0.2, seed, 1000)[1]] += 1

    assert counts.sum() == 2000 * 10
    assert np.abs(counts - 400).max() < 6 * 18


def test_held_out_rows_are_a_fraction_of_each_file() -> None:
    rows = corpus([100, 10, 1, 40])

    for seed in range(5):
        of_run = RunRows.of(rows, None, 0.2, seed, 1000)
        training, validation = list(of_run.train.indices), list(of_run.validation.indices)
        assert np.bincount(rows.file_of_row[validation]).tolist() == [20, 2, 0, 8]
        assert sorted(training + validation) == list(range(151))
    capped = RunRows.of(rows, None, 0.2, 7, val_rows=15)
    assert capped.validation_rows_of_files() == [10, 1, 0, 4]


def test_validation_rows_are_counted_in_their_files() -> None:
    training, other = corpus([10, 8]), corpus([3, 1, 2])

    given = RunRows.of(training, other, 0.5, 0, 1000)
    held_out = RunRows.of(training, None, 0.5, 0, 1000)

    assert (given.train.indices, given.validation.indices) == (range(18), range(6))
    assert (given.corpora, given.validation_rows_of_files()) == ([training, other], [0, 0, 3, 1, 2])
    assert (held_out.corpora, held_out.validation_rows_of_files()) == ([training], [5, 4])
    without = RunRows.of(training, Corpus([]), 0.0, 0, 1000)
    assert (list(without.validation), without.validation_rows_of_files()) == ([], [0, 0])


def mentions(path: Path, *names: str) -> bool:
    """Return whether a file's code uses any of these names; docstrings and comments do not."""
    for node in nodes_of(path):
        if isinstance(node, ast.Name | ast.Attribute):
            if (node.id if isinstance(node, ast.Name) else node.attr) in names:
                return True
        elif isinstance(node, ast.alias) and node.name.rpartition(".")[2] in names:
            return True
    return False


def makes_run_rows(path: Path) -> bool:
    """Return whether a file calls `RunRows` or its `of`."""
    calls = (ast.unparse(node.func) for node in nodes_of(path) if isinstance(node, ast.Call))
    return any(call.removesuffix(".of").split(".")[-1] == "RunRows" for call in calls)


def test_rows_are_held_out_by_one_module() -> None:
    """A second decision could differ from the first, and train on validation rows."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}

    assert {name for name, path in files.items() if mentions(path, "hold_out_rows")} == {
        "core/data/held_out.py"
    }
    # The trainer chooses rows only for programs that give it examples; trained_rows.py repeats the
    # choice of an earlier run, and its hash proves that it is the same.
    assert {name for name, path in files.items() if makes_run_rows(path)} == {
        "session/dataset.py",
        "core/training/trainer.py",
        "core/run/trained_rows.py",
    }


def test_row_in_two_files_is_held_out_or_trained_on_in_both() -> None:
    identities, files = [1, 2, 3, 4, 4, 5, 6, 7], np.array([0, 0, 0, 0, 1, 1, 1, 1])

    for seed in range(20):
        training, validation = hold_out_rows(identities, 0.25, seed, 1000, files)
        sides = [{identities[i] for i in side} for side in (training, validation)]
        assert not sides[0] & sides[1]
        assert 1 <= len(validation) <= 2
