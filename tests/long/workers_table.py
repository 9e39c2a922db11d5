"""Write docs/workers.md's table: the speed-up of 2 to 64 machines, computed from real sizes.

    python -m tests.long.workers_table

The gradients' bytes come from models of real shapes (see memory_table), and the most expensive
worker's share of a step from WikiSQL's rows in Qwen3's tokens. The time of a step on one machine is
assumed, not measured. Needs ../shared; takes a minute.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from mlxtune.commands.plan import plan
from mlxtune.config import PlanConfig
from mlxtune.core.steps.scaling import Scaling
from tests.long.memory_table import MODELS, holes_allowed, write_headers
from tests.paths import DOCS, SHARED

PAGE = DOCS / "workers.md"
BEGIN, END = "<!-- gains: tests/long/workers_table.py -->", "<!-- end of gains -->"
RANKS, LINKS = (2, 4, 8, 16, 32, 64), (1, 10, 40)
ROWS, STEP_S = 64, 4.0
ADAPTERS: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3 0.6B, rank 8 on `q_proj`, `v_proj`": ("Qwen3 0.6B", {}),
    "Qwen3 8B, rank 16 on all": ("Qwen3 8B", {"rank": 16, "targets": ("all",)}),
}


def planned(model: str, options: dict[str, object], workers: int) -> Scaling:
    """Return the predicted scaling of a step on WikiSQL's rows, with the assumed step time."""
    with tempfile.TemporaryDirectory() as scratch, holes_allowed():
        folder = Path(scratch)
        write_headers(folder, MODELS[model], 16)
        for file in (SHARED / "tokenizers" / "qwen3").iterdir():
            shutil.copy(file, folder)
        data = str(SHARED / "chat" / "wikisql_train.jsonl")
        given = {"batch_size": ROWS, "workers": workers, "quiet": True, "memory_limit": 1000.0}
        found = plan(PlanConfig(scratch, (data,), **given, **options)).scaling  # type: ignore[arg-type]
    assert found is not None
    return replace(found, step_s=STEP_S)


def cells(scaling: Scaling) -> list[str]:
    """Return the speed-up for each link."""
    return [f"{replace(scaling, gbps=gbps).speedup:.1f}" for gbps in LINKS]


def table() -> str:
    found = {
        title: [planned(model, options, workers) for workers in RANKS]
        for title, (model, options) in ADAPTERS.items()
    }
    links = [f"{gbps} Gbit/s" for gbps in LINKS]
    heads = [
        f"{title}: {each[0].exchanged / 1e6:.1f} MB, {links[0]}" for title, each in found.items()
    ]
    columns = [part for head in heads for part in (head, *links[1:])]
    lines = [["machines", "largest share", *columns], ["---"] * (2 + len(columns))]
    for i, workers in enumerate(RANKS):
        each = [of[i] for of in found.values()]
        gains = [cell for scaling in each for cell in cells(scaling)]
        lines.append([str(workers), f"{each[0].dearest:.1%}", *gains])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str) -> str:
    """Return the page with a new table."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
