"""Runs found below a folder, and listed in lines that fit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.reports.run_list import (
    SORTS,
    ListedRun,
    Search,
    in_order,
    list_lines,
    sparkline,
    stretch_means,
)
from mlxtune.core.runs.run_record import read_run
from tests.runs import write_run


def listed(folder: Path, **changes: object) -> ListedRun:
    return ListedRun.of(read_run(write_run(folder, **changes)))  # type: ignore[arg-type]


# Search


def test_runs_are_found_some_levels_deep_and_checkpoints_are_none(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("b", "a/deep/er", "a/x")]
    write_run(runs[0] / "previous").rename(runs[0] / "previous" / "run")
    before = runs[0] / "previous"
    for path in (before / "run").iterdir():
        path.rename(before / path.name)
    found = list(Search().runs(tmp_path))
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
    assert list(Search().runs(tmp_path)) == [run]


def test_search_that_would_take_too_long_is_cut_short_and_says_so(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
    search = Search(entries=10)
    assert list(search.runs(tmp_path)) == []
    assert search.cut_short == [tmp_path / "many"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all folders")
def test_folder_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "seen")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert list(Search().runs(tmp_path)) == [run]


# The curve


def test_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1, 0]) == "██▇▆▅▄▃▂▁"
    assert sparkline([0, 1], unicode=False) == "_#"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([1000, 10, 1]) == "█▃▁", "far apart, by their logarithms"
    assert sparkline([]) == ""


@given(st.lists(st.floats(-1e9, 1e9), max_size=50), st.integers(1, 12))
def test_means_of_stretches_are_few_and_between_the_extremes(
    values: list[float], most: int
) -> None:
    found = stretch_means(values, most)
    assert len(found) == min(most, len(values))
    if values:
        room = 1e-6 * max(1.0, *map(abs, values))
        assert all(min(values) - room <= mean <= max(values) + room for mean in found)


def test_mean_of_a_stretch_is_that_of_its_values() -> None:
    assert stretch_means([1, 3, float("nan"), 5, 7], 2) == [2, 6]


def test_curve_is_of_validation_or_else_of_training(tmp_path: Path) -> None:
    assert listed(tmp_path / "a", epochs=3).curve == (4.0, 2.0, 1.0, pytest.approx(2 / 3))
    assert len(listed(tmp_path / "b", epochs=1).curve) == 12, "two losses are no curve"
    assert len(listed(tmp_path / "c", validation=False).curve) == 12


# The list


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[ListedRun]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        early = {"started_at": "2026-01-01T00:00:00+00:00"}
        return [
            listed(Path("first"), epochs=4, about=early),
            listed(Path("second"), epochs=2, about={"started_at": "2026-03-01T12:30:00+01:00"}),
            listed(Path("third"), epochs=2, validation=False, finished=False),
        ]


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
def test_runs_are_in_the_order_that_is_asked_for(
    runs: list[ListedRun], sort: str, names: list[str]
) -> None:
    mixed = [runs[2], runs[0], runs[1]]
    if sort == "speed":
        mixed = [
            replace(run, summary=replace(run.summary, tokens_per_second=speed))
            for run, speed in zip(mixed, (None, 900.0, 20.0), strict=True)
        ]
    assert sort in SORTS
    assert [each.summary.name for each in in_order(mixed, sort)] == names


def test_list_has_all_columns_where_there_is_room(runs: list[ListedRun]) -> None:
    lines = list(list_lines(runs))
    assert lines[0].split() == [
        *("run", "started", "model", "data", "steps", "train", "val", "loss", "curve", "tok/s")
    ]
    cells = lines[1].split("  ")
    assert [cell.strip() for cell in cells if cell.strip()] == [
        *("first", "2026-01-01 00:00", "tiny", "chat.jsonl", "160 in 4 ep.", "0.750"),
        *("4.00 → 0.500", "█▄▂▁▁", "2,000"),
    ]
    assert "60/80 unfinished" in lines[3]
    rest = "\n".join(lines[4:])
    assert "adapters:\n  first/adapters.safetensors\n  second/adapters.safetensors" in rest
    assert "to go on with:\n  mlxtune train --resume third" in rest
    assert "damaged" not in rest


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_table_fits_the_terminal_and_keeps_what_matters(runs: list[ListedRun], width: int) -> None:
    lines = list(list_lines(runs, width))
    table = lines[: 1 + len(runs)]
    assert max(map(len, table)) <= width
    assert table[0].startswith("run")
    assert ("val loss" in table[0]) is (width >= 40)
    assert ("model" in table[0]) is (width >= 80)


def test_name_that_is_too_long_keeps_its_end(runs: list[ListedRun]) -> None:
    name = "a/very/long/path/to/the/folder/of/this/run"
    long = replace(runs[0], summary=replace(runs[0].summary, name=name))
    cut = list(list_lines([long], 50))[1].split()[0]
    assert cut.startswith("…")
    assert cut.endswith("of/this/run")


def test_list_in_ascii_has_no_other_character(runs: list[ListedRun]) -> None:
    lines = list(list_lines(runs, 60, unicode=False))
    assert "\n".join(lines).isascii()
    assert "4.00 -> 0.500" in lines[1]


def test_what_a_terminal_would_act_on_is_escaped(runs: list[ListedRun]) -> None:
    bad = "\x1b[31mred\n"
    summary = replace(
        runs[0].summary, name=bad, model=bad, data=(bad,), adapter=bad, problems=(bad,), folder=bad
    )
    text = "\n".join(list_lines([replace(runs[0], summary=summary)]))
    assert "\x1b" not in text
    assert "\\x1b[31mred\\n" in text
