"""The table of runs fits the terminal, and keeps its most important columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from mlxtune.core.run.summary import RunView
from mlxtune.views.terminal import show_runs, sparkline
from tests.core.run.listed_runs import runs

__all__ = ["runs"]


def shown(runs: Sequence[RunView], width: int | None = None) -> list[str]:
    """Return the table's lines on a terminal of this width, or in a pipe."""
    file, terminal = io.StringIO(), width is not None
    console = Console(
        file=file, width=width or 10_000, force_terminal=terminal, color_system=None, _environ={}
    )
    show_runs(runs, console)
    return file.getvalue().splitlines()


def test_sparkline_has_eight_heights() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1, 0]) == "██▇▆▅▄▃▂▁"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([1000, 10, 1]) == "█▃▁", "far apart, by their logarithms"
    assert sparkline([]) == ""


def test_pipe_has_all_columns_and_lists(runs: list[RunView]) -> None:
    lines = shown(runs)
    assert lines[0].split() == [
        *("run", "started", "model", "data", "steps", "train", "val", "loss", "curve", "tok/s")
    ]
    cells = lines[1].split("  ")
    assert [cell.strip() for cell in cells if cell.strip()] == [
        *("first", "2026-01-01 00:00", "tiny", "chat.jsonl", "160 in 4 epochs", "0.750"),
        *("4.00 → 0.500", "█▄▂▁▁", "2,000"),
    ]
    assert "60/80 unfinished" in lines[3]
    rest = "\n".join(lines[4:])
    assert "adapters:\n  first/adapters.safetensors\n  second/adapters.safetensors" in rest
    assert "to resume:\n  mlxtune train --resume third" in rest
    assert "damaged" not in rest


def test_objective_has_a_column_if_runs_differ_in_it(runs: list[RunView]) -> None:
    mixed = [replace(runs[0], objective="dpo"), *runs[1:]]
    for width in (80, 120):
        header, first, second, *_ = shown(mixed, width)
        at = header.index("objective")
        assert first[at:].split()[0] == "dpo"
        assert second[at:].split()[0] == "sft"
        assert "val loss" in header and max(map(cell_len, (header, first, second))) <= width


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_table_fits_the_terminal_and_keeps_its_main_columns(
    runs: list[RunView], width: int
) -> None:
    lines = shown(runs, width)
    table = lines[: 1 + len(runs)]
    assert max(map(cell_len, table)) <= width
    assert table[0].startswith("run")
    assert "val loss" in table[0]
    assert ("steps" in table[0]) is (width >= 60)
    assert ("model" in table[0]) is (width >= 120)


def test_long_name_is_folded_and_complete(runs: list[RunView]) -> None:
    name = "a/very/long/path/to/the/folder/of/this/run"
    long = replace(runs[0], name=name)
    _, first, second, *_ = shown([long], 50)
    assert first.split()[0] + second.split()[0] == name


def test_control_characters_of_a_run_are_escaped(runs: list[RunView]) -> None:
    bad = "\x1b[31mred\n"
    run = replace(
        runs[0], name=bad, model=bad, data=(bad,), adapter=bad, problems=(bad,), folder=bad
    )
    text = "\n".join(shown([run]))
    assert "\x1b" not in text
    assert "\\x1b[31mred\\n" in text
