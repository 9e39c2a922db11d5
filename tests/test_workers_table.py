"""The table of docs/workers.md matches the computed figures."""

from __future__ import annotations

import pytest

from tests.paths import DOCS, SHARED


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED}")
def test_gains_are_up_to_date() -> None:
    from tests.long import workers_table  # imports mlx

    gains = []
    for model, options in workers_table.ADAPTERS.values():
        found = workers_table.planned(model, options, 8)
        gains += workers_table.cells(found)
    row = " | ".join(["8", f"{found.dearest:.1%}", *gains])
    assert f"| {row} |" in (DOCS / "workers.md").read_text(encoding="utf-8"), (
        "out of date: run python -m tests.long.workers_table"
    )
