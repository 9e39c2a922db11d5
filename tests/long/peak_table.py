"""Write the table of peaks in docs/plan.md: estimated, corrected by short passes, and measured.

    python -m tests.long.peak_table

The cases are from tests/backend/memory/test_shapes.py, including the ones marked `long`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.paths import DOCS

PAGE = DOCS / "plan.md"
BEGIN, END = "<!-- peaks: tests/long/peak_table.py -->", "<!-- end of peaks -->"
FILE = "tests/backend/memory/test_shapes.py"


class Recorder:
    """A pytest plugin that records each test's measured peak as a row of the table."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Replace the test module's `case_of` with a function that also records the result."""
        module = items[0].module
        whole = module.case_of

        def case_of(base: Any, config: Any, how: Any, step: Any) -> Any:
            case = whole(base, config, how, step)
            test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].rpartition(" ")[0]
            name = test.partition("[")[2].rstrip("]") or "MLPs in slices"
            for flag in ("-True", "-False", "True-", "False-"):
                name = name.replace(flag, "")
            operations = "MLX's" if how.operations is module.MLX else "the CPU's"
            kept = "recomputed" if how.recompute else "kept"
            shares = [each / case.measured for each in (case.estimated, case.corrected)]
            values = [f"{case.measured / 1e6:.0f}", *(f"{share:.2f}" for share in shares)]
            self.rows.append(f"| {' | '.join([name, operations, kept, *values])} |")
            return case

        module.case_of = case_of


def table() -> str:
    recorder = Recorder()
    given = ["-n0", "-q", "-m", "long or not long", "-k", "near_the_measured", "-W", "ignore"]
    pytest.main([*given, FILE], plugins=[recorder])
    head = "case | operations | activations | measured, MB | estimated | after short passes"
    return "\n".join([f"| {head} |", f"|{' --- |' * 6}", *recorder.rows])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")
