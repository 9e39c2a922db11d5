"""The table of docs/ranks.md says what is computed now."""

from __future__ import annotations

import pytest

from tests.paths import DOCS, SHARED


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED}")
def test_gains_are_up_to_date() -> None:
    from tests.long import ranks_table  # which imports mlx

    gains = []
    for model, options in ranks_table.ADAPTERS.values():
        found = ranks_table.planned(model, options, 8)
        gains += ranks_table.cells(found)
    row = " | ".join(["8", f"{found.dearest:.1%}", *gains])
    assert f"| {row} |" in (DOCS / "ranks.md").read_text(encoding="utf-8"), (
        "out of date: run python -m tests.long.ranks_table"
    )
