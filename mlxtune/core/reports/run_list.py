"""Runs under a folder, found and listed in lines for a terminal."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxtune.core.reports.axis import spans_much
from mlxtune.core.reports.run_page import when
from mlxtune.core.runs.run_record import Run
from mlxtune.core.runs.run_summary import RunSummary, loss_text, summarize
from mlxtune.core.training.checkpoint import BEST, MANIFEST, METRICS
from mlxtune.core.training.run_folder import ABOUT, LEDGER

# How deep runs are sought, and among how many files and folders.
DEPTH, ENTRIES = 6, 200_000
# Folders that hold no run of anybody's, and are large.
_PASSED_OVER = ("node_modules", "site-packages", "__pycache__", "proc", "sys", "dev")
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_CURVE = 12
SORTS = ("when", "name", "val", "train", "speed", "steps")


@dataclass
class Search:
    """Looks for runs below folders; `cut_short` are those it did not look through as a whole."""

    depth: int = DEPTH
    entries: int = ENTRIES

    def __post_init__(self) -> None:
        self._left = self.entries
        self.cut_short: list[Path] = []

    def runs(self, folder: Path) -> Iterator[Path]:
        """Yield the folders of runs below one, or itself, in the order of their names."""
        yield from self._below(folder, self.depth)

    def _below(self, folder: Path, depth: int) -> Iterator[Path]:
        names, folders = set(), []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        self.cut_short.append(folder)
                        return
                    names.add(entry.name)
                    if _may_hold_runs(entry):
                        folders.append(entry.name)
        except OSError:
            return
        if MANIFEST in names or "pyvenv.cfg" in names:
            return
        if names & {METRICS, ABOUT, LEDGER}:
            yield folder
            # Of a run, only that which it replaced.
            folders = [name for name in folders if name == "previous"]
        if depth > 0:
            for name in sorted(folders):
                yield from self._below(folder / name, depth - 1)


def _may_hold_runs(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    if name.startswith((".", "epoch-", "step-")) or name in (*_PASSED_OVER, BEST):
        return False
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


@dataclass(frozen=True)
class ListedRun:
    """A run in few numbers, with the losses of its curve: of validation where it has some."""

    summary: RunSummary
    curve: tuple[float, ...]

    @classmethod
    def of(cls, run: Run) -> ListedRun:
        """Return a run in few numbers."""
        losses = [loss for _, loss in run.validations]
        if len(losses) < 3:
            losses = stretch_means(run.steps["loss"], _CURVE)
        else:
            losses = stretch_means(losses, _CURVE)
        return cls(summarize(run), tuple(losses))

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON-ready values."""
        return {**self.summary.as_dict(), "curve": list(self.curve)}


def stretch_means(values: Sequence[float], most: int) -> list[float]:
    """Return the means of so many stretches of values, or the values where they are as few."""
    there = [value for value in values if math.isfinite(value)]
    parts = min(most, len(there))
    bounds = [len(there) * i // parts for i in range(parts + 1)] if parts else [0]
    return [math.fsum(there[a:b]) / (b - a) for a, b in pairwise(bounds)]


def sparkline(values: Sequence[float], *, unicode: bool = True) -> str:
    """Return values as blocks of eight heights, the lowest value being the lowest.

    Heights are those of the logarithms where values are far apart, as in a chart.
    """
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    if not values:
        return ""
    if spans_much(values):
        values = [math.log(value) for value in values]
    low, high = min(values), max(values)
    if high == low:
        return blocks[0] * len(values)
    return "".join(blocks[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def in_order(runs: Sequence[ListedRun], sort: str) -> list[ListedRun]:
    """Return runs in the order of a column: the newest, the lowest loss or the fastest first."""
    last = math.inf

    def or_last(value: float | None, sign: int = 1) -> float:
        return last if value is None else sign * value

    keys: dict[str, Callable[[ListedRun], Any]] = {
        "name": lambda each: each.summary.name,
        "val": lambda each: or_last(each.summary.best_val_loss),
        "train": lambda each: or_last(each.summary.train_loss),
        "speed": lambda each: or_last(each.summary.tokens_per_second, -1),
        "steps": lambda each: -each.summary.step,
    }
    if sort != "when":
        return sorted(runs, key=keys[sort])
    return sorted(runs, key=lambda each: _moment(each.summary.started), reverse=True)


def _moment(started: str) -> float:
    import datetime

    try:
        return datetime.datetime.fromisoformat(started).timestamp()
    except ValueError:
        return 0.0


# Columns by how much they are missed where the terminal is narrow.
_PRIORITY = ("run", "val loss", "curve", "steps", "started", "data", "model", "tok/s", "train")
_ORDER = ("run", "started", "model", "data", "steps", "train", "val loss", "curve", "tok/s")
_RIGHT = ("train", "val loss", "tok/s")
_NAME_AT_LEAST = 12


def list_lines(
    runs: Sequence[ListedRun], width: int | None = None, *, unicode: bool = True
) -> Iterator[str]:
    """Yield the lines of a table in so many columns, in as many as it takes without a width.

    Below it stand the adapters, and how to go on with what did not end.
    """
    rows = [_cells(each, unicode) for each in runs]
    wide = {name: max(len(name), *(_width(row[name]) for row in rows)) for name in _ORDER}
    shown = [name for name in _ORDER if name in _that_fit(wide, width)]
    room = None
    if width is not None:
        others = sum(wide[name] + 2 for name in shown if name != "run")
        room = max(_NAME_AT_LEAST, width - others)
        wide["run"] = min(wide["run"], room)
    for row in [{name: name for name in _ORDER}, *rows]:
        cells = [_padded(_cut(row[name], wide[name], unicode), wide[name], name) for name in shown]
        yield "  ".join(cells).rstrip()
    yield from _below_table(runs)


def _that_fit(wide: dict[str, int], width: int | None) -> set[str]:
    chosen: set[str] = set()
    taken = 0
    for name in _PRIORITY:
        needs = min(wide[name], 32 if width else wide[name]) if name == "run" else wide[name]
        if width is not None and chosen and taken + needs + 2 > width:
            continue
        chosen.add(name)
        taken += needs + 2
    return chosen


def _cells(run: ListedRun, unicode: bool) -> dict[str, str]:
    each = run.summary
    arrow = "→" if unicode else "->"
    before, best = each.initial_val_loss, each.best_val_loss
    validation = (
        "-" if before is None and best is None else (f"{_loss(before)} {arrow} {_loss(best)}")
    )
    more = f" +{len(each.data) - 1}" if len(each.data) > 1 else ""
    speed = each.tokens_per_second
    return {
        "run": _plain(each.name),
        "started": when(each.started) or "-",
        "model": _plain(each.model) or "-",
        "data": _plain(each.data[0]) + more if each.data else "-",
        "steps": _steps(each),
        "train": _loss(each.train_loss),
        "val loss": validation,
        "curve": sparkline(run.curve, unicode=unicode),
        "tok/s": "-" if speed is None else f"{speed:,.0f}",
    }


def _loss(value: float | None) -> str:
    return loss_text(value).replace("–", "-")


def _plain(text: str) -> str:
    """Return a text in one line in which nothing acts on a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _steps(each: RunSummary) -> str:
    if each.finished:
        early = " early" if each.status == "stopped early" else ""
        epochs = f" in {each.epoch} ep." if each.epoch else ""
        return f"{each.step:,}{epochs}{early}"
    total = f"/{each.total_steps:,}" if each.total_steps else ""
    return f"{each.step:,}{total} {each.status}"


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _cut(text: str, width: int, unicode: bool) -> str:
    """Return the end of a text, which tells runs apart, where it is too wide."""
    if _width(text) <= width:
        return text
    sign = "…" if unicode else ".."
    while text and _width(text) + len(sign) > width:
        text = text[1:]
    return sign + text


def _padded(text: str, width: int, name: str) -> str:
    space = " " * (width - _width(text))
    return space + text if name in _RIGHT else text + space


def _below_table(runs: Sequence[ListedRun]) -> Iterator[str]:
    adapters = [each.summary for each in runs if each.summary.adapter]
    unfinished = [each.summary for each in runs if each.summary.resume]
    damaged = [each.summary for each in runs if each.summary.problems]
    for title, found, say in (
        ("adapters", adapters, lambda each: each.adapter),
        ("to go on with", unfinished, lambda each: each.resume),
        ("damaged", damaged, lambda each: f"{each.folder}: {each.problems[0]}"),
    ):
        if found:
            yield ""
            yield f"{title}:"
            yield from (f"  {_plain(say(each))}" for each in found)
