"""The recipe of `mlxtune runs`: the runs under a folder, with their results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mlxtune.core.runs.run import read_run
from mlxtune.core.runs.run_list import ListedRun, Search, in_order
from mlxtune.core.runs.summary import RunSummary
from mlxtune.errors import OutputError
from mlxtune.terminal.output import print_json, print_line
from mlxtune.terminal.tables import result_console, show_runs


def runs(*folders: str | Path, sort: str = "when") -> list[RunSummary]:
    """Return summaries of the runs below folders, by default below this one.

    `sort` is one of when, name, val, train, speed and steps. Raises OutputError if a folder is
    missing.
    """
    return [each.summary for each in in_order(_find(folders, Search()), sort)]


def show(folders: Sequence[str], *, sort: str, as_json: bool) -> None:
    """Print the runs below folders: a table that fits the terminal, or JSON."""
    search = Search()
    found = in_order(_find(folders, search), sort)
    for folder in search.cut_short:
        message = f"{folder}: too many files to search: name the folder of your runs"
        print_line(f"warning: {message}", stderr=True)
    if as_json:
        print_json([each.as_dict() for each in found])
        return
    if not found:
        where = ", ".join(folders) or "this folder"
        print_line(f"no run below {where}: start one with mlxtune train", stderr=True)
        return
    show_runs(found, result_console())


def _find(folders: Sequence[str | Path], search: Search) -> list[ListedRun]:
    found: dict[Path, ListedRun] = {}
    for name in folders or ("",):
        folder = Path(os.path.expanduser(name))  # noqa: PTH111
        if not folder.is_dir():
            raise OutputError(f"{folder}: no such folder: name one that holds runs")
        for run in search.runs(folder):
            found.setdefault(run.resolve(), ListedRun.of(read_run(run)))
    return list(found.values())
