"""The table of runs fits the terminal and keeps what matters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtune.core.reports.runs_table import sparkline, table_lines
from mlxtune.core.runs.run_list import ListedRun
from tests.core.runs.listed_runs import runs

__all__ = ["runs"]


def test_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1, 0]) == "██▇▆▅▄▃▂▁"
    assert sparkline([0, 1], unicode=False) == "_#"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([1000, 10, 1]) == "█▃▁", "far apart, by their logarithms"
    assert sparkline([]) == ""


def test_list_has_all_columns_where_there_is_room(runs: list[ListedRun]) -> None:
    lines = list(table_lines(runs))
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
    assert "to resume:\n  mlxtune train --resume third" in rest
    assert "damaged" not in rest


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_table_fits_the_terminal_and_keeps_what_matters(runs: list[ListedRun], width: int) -> None:
    lines = list(table_lines(runs, width))
    table = lines[: 1 + len(runs)]
    assert max(map(len, table)) <= width
    assert table[0].startswith("run")
    assert ("val loss" in table[0]) is (width >= 40)
    assert ("model" in table[0]) is (width >= 80)


def test_name_that_is_too_long_keeps_its_end(runs: list[ListedRun]) -> None:
    name = "a/very/long/path/to/the/folder/of/this/run"
    long = replace(runs[0], summary=replace(runs[0].summary, name=name))
    cut = list(table_lines([long], 50))[1].split()[0]
    assert cut.startswith("…")
    assert cut.endswith("of/this/run")


def test_list_in_ascii_has_no_other_character(runs: list[ListedRun]) -> None:
    lines = list(table_lines(runs, 60, unicode=False))
    assert "\n".join(lines).isascii()
    assert "4.00 -> 0.500" in lines[1]


def test_what_a_terminal_would_act_on_is_escaped(runs: list[ListedRun]) -> None:
    bad = "\x1b[31mred\n"
    summary = replace(
        runs[0].summary, name=bad, model=bad, data=(bad,), adapter=bad, problems=(bad,), folder=bad
    )
    text = "\n".join(table_lines([replace(runs[0], summary=summary)]))
    assert "\x1b" not in text
    assert "\\x1b[31mred\\n" in text
