"""Put the tables of docs/measured and docs/devices into the pages, and draw the charts.

    pip install matplotlib && python -m tests.long.measured_pages

A table stands between `<!-- measured: NAME -->` and `<!-- end -->`. Without matplotlib, only the
tables are made. tests/test_bench_table.py fails if a page is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxtune.core.formatting import pluralize
from tests.long import bench_table, device_proofs
from tests.long.measured import FOLDER, SIDES, Card, CardCase, read_cards
from tests.paths import DOCS, ROOT

DEVICES = DOCS / "devices.md"
PAGES = (ROOT / "README.md", DOCS / "performance.md", DEVICES)
_MARKED = re.compile(r"(?ms)^<!-- measured: ([\w -]+) -->\n.*?^<!-- end -->$")
_PEERS = [side for side in SIDES if side != "mlxtune"]


def filled(page: str, made: Mapping[str, str]) -> str:
    """Return a page with its marked tables as they are made now. Raises KeyError for a name."""

    def replace(found: re.Match[str]) -> str:
        return f"<!-- measured: {found[1]} -->\n{made[found[1]]}\n<!-- end -->"

    return _MARKED.sub(replace, page)


def sections(folder: Path = FOLDER) -> dict[str, str]:
    """Return every table, by its name in the pages."""
    cards = read_cards(folder)
    by_execution = bench_table.tables(folder)
    return {
        "summary": summary(cards, cpu_results(folder)),
        "cards": "\n\n".join(map(card_table, cards)),
        "machines": machines(cards),
        "cpu": by_execution["auto"],
        "gpu execution": by_execution["gpu"],
        "proofs": device_proofs.table(device_proofs.FOLDER.glob("*.json")),
    }


def cpu_results(folder: Path) -> list[Any]:
    """Return the results of the CPU's own cases beside mlx-lm."""
    names = [name for name, case in bench_table.CASES.items() if case.execution == "auto"]
    paths = [path for name in names if (path := folder / f"{name}.json").exists()]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def summary(cards: Iterable[Card], cpu: Iterable[Mapping[str, Any]]) -> str:
    """Return README's table: mlxtune's speed and memory against each peer on each machine."""
    rows = [["", "against", "tokens per second", "peak memory"]]
    for card in cards:
        for peer in _PEERS:
            if ratios := [_ratios(case, peer) for case in card.cases if case.comparable(peer)]:
                machine = f"{card.device}, bfloat16, {pluralize(len(ratios), 'case')}"
                rows.append([machine, SIDES[peer], *_ranges(ratios)])
    ratios = [
        (result["ratio"]["real_tokens_per_s"], result["ratio"]["peak_memory"]) for result in cpu
    ]
    machine = f"two x86-64 cores, float32, {pluralize(len(ratios), 'case')}"
    rows.append([machine, "mlx-lm", *_ranges(ratios)])
    rows.append(["a Mac", "", "not measured", "not measured"])
    return _table(rows)


def card_table(card: Card) -> str:
    """Return the table of a card's cases: the time of a step, and the peak, on each side."""
    rows = [[card.device, "tokens a step", *SIDES.values(), *(f"against {p}" for p in _PEERS)]]
    for case in card.cases:
        ratios = [_ratio_text(case, peer) for peer in _PEERS]
        sides = [_figures(case, side) for side in SIDES]
        rows.append([case.title, f"{case.tokens / case.steps:,.0f}", *sides, *ratios])
    return _table(rows)


def machines(cards: Iterable[Card]) -> str:
    """Return the table of the cards: software, date, and mlxtune against mlx-lm."""
    columns = ["card", "driver, CUDA", "mlx, mlx-lm, transformers", "measured", "commit"]
    rows = [[*columns, "tokens per second, against mlx-lm", "against transformers + PEFT"]]
    for card in cards:
        report = card.report
        packages = [report["versions"][name] for name in ("mlx", "mlx-lm", "transformers")]
        drivers = [report[name] or "unknown" for name in ("driver", "cuda")]
        facts = [", ".join(drivers), ", ".join(packages), report["date"]]
        speeds = []
        for peer in _PEERS:
            ratios = [_ratios(case, peer) for case in card.cases if case.comparable(peer)]
            speeds.append(_ranges(ratios)[0] if ratios else "")
        rows.append([card.device, *facts, f"`{report['commit'] or 'unknown'}`", *speeds])
    return _table(rows)


def _figures(case: CardCase, side: str) -> str:
    if case.measured(side):
        return f"{1e3 * case.seconds(side):.0f} ms, {case.peak_gb(side):.1f} GB"
    return case.missing(side) or "–"


def _ratios(case: CardCase, peer: str) -> tuple[float, float]:
    """Return mlxtune's speed and peak, as multiples of a peer's."""
    speed = case.tokens_per_s("mlxtune") / case.tokens_per_s(peer)
    return speed, case.peak_gb("mlxtune") / case.peak_gb(peer)


def _ratio_text(case: CardCase, peer: str) -> str:
    if not case.comparable(peer):
        return "the losses differ" if case.measured(peer) else ""
    speed, memory = _ratios(case, peer)
    return f"**{speed:.1f}×**, {memory:.2f}"


def _ranges(ratios: Iterable[tuple[float, float]]) -> list[str]:
    """Return the ranges of speeds and of peaks, as text."""
    speeds, peaks = (sorted(values) for values in zip(*ratios, strict=True))
    return [
        f"{_range([f'{speed:.{1 if speed < 9.95 else 0}f}' for speed in speeds])} times",
        f"{_range([f'{peak:.2f}' for peak in peaks])} of theirs",
    ]


def _range(values: list[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _table(rows: list[list[str]]) -> str:
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |") for cells in lines)


def main() -> None:
    """Write the pages and the charts."""
    made = sections()
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    if find_spec("matplotlib"):
        from tests.long import plot_measured

        plot_measured.draw_all()
    else:
        print("no charts: matplotlib is not installed")


if __name__ == "__main__":
    main()
