"""The table of `mlxtune runs`, as lines for a terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence

from mlxtune.core.reports.axis import spans_much
from mlxtune.core.runs.run_list import ListedRun
from mlxtune.core.runs.summary import RunSummary
from mlxtune.core.text import loss_text, minute_of

_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_COLUMNS = ("run", "started", "model", "data", "steps", "train", "val loss", "curve", "tok/s")
# In a narrow terminal, the last of these are left out first.
_PRIORITY = ("run", "val loss", "curve", "steps", "started", "data", "model", "tok/s", "train")
_RIGHT_ALIGNED = ("train", "val loss", "tok/s")
_LEAST_NAME, _MOST_NAME = 12, 32


def sparkline(values: Sequence[float], *, unicode: bool = True) -> str:
    """Return values as blocks of eight heights, on the scale that a chart would choose."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    if not values:
        return ""
    if spans_much(values):
        values = [math.log(value) for value in values]
    low, high = min(values), max(values)
    if high == low:
        return blocks[0] * len(values)
    return "".join(blocks[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def table_lines(
    runs: Sequence[ListedRun], width: int | None = None, *, unicode: bool = True
) -> Iterator[str]:
    """Yield a table no wider than `width` columns; None sets no limit.

    Below it are the adapters, the commands that resume unfinished runs, and damaged folders.
    """
    rows = [_cells(each, unicode) for each in runs]
    widths = {name: max(len(name), *(_width(row[name]) for row in rows)) for name in _COLUMNS}
    chosen = _columns_that_fit(widths, width)
    shown = [name for name in _COLUMNS if name in chosen]
    if width is not None:
        others = sum(widths[name] + 2 for name in shown if name != "run")
        widths["run"] = min(widths["run"], max(_LEAST_NAME, width - others))
    for row in [{name: name for name in _COLUMNS}, *rows]:
        cells = (_pad(_cut(row[name], widths[name], unicode), widths[name], name) for name in shown)
        yield "  ".join(cells).rstrip()
    yield from _lines_below([each.summary for each in runs])


def _columns_that_fit(widths: dict[str, int], width: int | None) -> set[str]:
    if width is None:
        return set(_COLUMNS)
    chosen: set[str] = set()
    taken = 0
    for name in _PRIORITY:
        needed = (min(widths[name], _MOST_NAME) if name == "run" else widths[name]) + 2
        if not chosen or taken + needed <= width:
            chosen.add(name)
            taken += needed
    return chosen


def _cells(listed: ListedRun, unicode: bool) -> dict[str, str]:
    run = listed.summary
    arrow = "→" if unicode else "->"
    before, best = run.initial_val_loss, run.best_val_loss
    validated = before is not None or best is not None
    more = f" +{len(run.data) - 1}" if len(run.data) > 1 else ""
    speed = run.tokens_per_second
    return {
        "run": _plain(run.name),
        "started": minute_of(run.started) or "-",
        "model": _plain(run.model) or "-",
        "data": _plain(run.data[0]) + more if run.data else "-",
        "steps": _steps(run),
        "train": _loss(run.train_loss),
        "val loss": f"{_loss(before)} {arrow} {_loss(best)}" if validated else "-",
        "curve": sparkline(listed.curve, unicode=unicode),
        "tok/s": "-" if speed is None else f"{speed:,.0f}",
    }


def _loss(value: float | None) -> str:
    return loss_text(value).replace("–", "-")


def _plain(text: str) -> str:
    """Return a text in one line, without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _steps(run: RunSummary) -> str:
    if run.finished:
        early = " early" if run.status == "stopped early" else ""
        epochs = f" in {run.epoch} ep." if run.epoch else ""
        return f"{run.step:,}{epochs}{early}"
    total = f"/{run.total_steps:,}" if run.total_steps else ""
    return f"{run.step:,}{total} {run.status}"


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _cut(text: str, width: int, unicode: bool) -> str:
    """Return a text that fits; if it is too long, its end, which distinguishes runs."""
    if _width(text) <= width:
        return text
    sign = "…" if unicode else ".."
    while text and _width(text) + len(sign) > width:
        text = text[1:]
    return sign + text


def _pad(text: str, width: int, name: str) -> str:
    space = " " * (width - _width(text))
    return space + text if name in _RIGHT_ALIGNED else text + space


def _lines_below(runs: Sequence[RunSummary]) -> Iterator[str]:
    lists = {
        "adapters": [run.adapter for run in runs if run.adapter],
        "to resume": [run.resume for run in runs if run.resume],
        "damaged": [f"{run.folder}: {run.problems[0]}" for run in runs if run.problems],
    }
    for title, lines in lists.items():
        if lines:
            yield ""
            yield f"{title}:"
            yield from (f"  {_plain(line)}" for line in lines)
