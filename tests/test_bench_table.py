"""The tables of docs/performance.md against mlx-lm, and the script that measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.long import bench_table
from tests.long.bench_table import CASES, EXECUTIONS, Case, measure, tables
from tests.paths import DOCS
from tests.slow import long_except


def test_tables_of_the_page_are_those_of_the_measurements() -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    made = tables(DOCS / "measured")
    assert "auto" in made
    for table in made.values():
        assert table in page


def test_both_shapes_are_measured_in_both_ways() -> None:
    for execution in EXECUTIONS:
        cases = [each for each in CASES.values() if each.execution == execution]
        pairs = {(each.shape, each.data) for each in cases}
        assert len(pairs) >= 4
        steps = {each.data: each.batch_size for each in cases if each.shape == "small"}
        assert steps == {"lf_alpaca_en_demo": 4, "wikisql_train": 8}


@pytest.mark.slow
@pytest.mark.parametrize("execution", long_except(EXECUTIONS, "gpu"))
def test_case_is_measured_and_its_row_made(
    execution: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {**bench_table.SHAPES["small"], "hidden_size": 64, "num_hidden_layers": 2}
    monkeypatch.setitem(bench_table.SHAPES, "tiny", shape)
    case = Case("tiny shape", "tiny", "wikisql_train", 2, 2, 4, execution=execution, target=3)
    monkeypatch.setitem(CASES, "tiny", case)
    measure("tiny", tmp_path, tmp_path)
    assert json.loads((tmp_path / "tiny.json").read_text())["options"]["execution"] == execution
    (table,) = tables(tmp_path).values()
    header, _, row = table.splitlines()
    assert EXECUTIONS[execution] in header
    assert row.startswith("| tiny shape | ")
    assert header.count("|") == row.count("|")
