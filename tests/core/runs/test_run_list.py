"""Runs are found below a folder and sorted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.runs.run_list import SORTS, find_runs
from mlxtune.core.runs.summary import RunSummary, bucket_means
from tests.core.runs.listed_runs import listed, runs
from tests.runs import write_run

__all__ = ["runs"]

# Search


def test_runs_are_found_some_levels_deep_and_checkpoints_are_none(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("b", "a/deep/er", "a/x")]
    write_run(runs[0] / "previous").rename(runs[0] / "previous" / "run")
    before = runs[0] / "previous"
    for path in (before / "run").iterdir():
        path.rename(before / path.name)
    found = list(find_runs(tmp_path))
    assert found == [runs[1], runs[2], runs[0], before]


def test_search_passes_over_what_is_hidden_linked_too_deep_or_of_other_programs(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "seen")
    for hidden in (".hidden", "node_modules/x", "1/2/3/4/5/6/7"):
        write_run(tmp_path / hidden)
    write_run(tmp_path / "venv" / "x")
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "seen")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list(find_runs(tmp_path)) == [run]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all folders")
def test_folder_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "seen")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert list(find_runs(tmp_path)) == [run]


# The curve


@given(st.lists(st.floats(-1e9, 1e9), max_size=50), st.integers(1, 12))
def test_means_of_stretches_are_few_and_between_the_extremes(
    values: list[float], most: int
) -> None:
    found = bucket_means(values, most)
    assert len(found) == min(most, len(values))
    if values:
        margin = 1e-6 * max(1.0, *map(abs, values))
        assert all(min(values) - margin <= mean <= max(values) + margin for mean in found)


def test_mean_of_a_stretch_is_that_of_its_values() -> None:
    assert bucket_means([1, 3, 5, 7], 2) == [2, 6]


def test_curve_is_of_validation_or_else_of_training(tmp_path: Path) -> None:
    assert listed(tmp_path / "a", epochs=3).curve == (4.0, 2.0, 1.0, pytest.approx(2 / 3))
    assert len(listed(tmp_path / "b", epochs=1).curve) == 12, "two losses are no curve"
    assert len(listed(tmp_path / "c", validation=False).curve) == 12


# The order


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("when", ["third", "second", "first"]),
        ("name", ["first", "second", "third"]),
        ("val", ["first", "second", "third"]),
        ("train", ["first", "second", "third"]),
        ("speed", ["first", "second", "third"]),
        ("steps", ["first", "second", "third"]),
    ],
)
def test_runs_are_sorted_by_any_column(runs: list[RunSummary], sort: str, names: list[str]) -> None:
    mixed = [runs[2], runs[0], runs[1]]
    if sort == "speed":
        mixed = [
            replace(run, tokens_per_second=speed)
            for run, speed in zip(mixed, (None, 900.0, 20.0), strict=True)
        ]
    assert [run.name for run in sorted(mixed, key=SORTS[sort])] == names
