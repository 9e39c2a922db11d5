"""The recipe of `mlxtune runs`: the runs under a folder, with their results.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.errors import OutputError, printable

if TYPE_CHECKING:
    from mlxtune.core.runs.run_list import ListedRun, Search
    from mlxtune.core.runs.summary import RunSummary


def runs(*folders: str | Path, sort: str = "when") -> list[RunSummary]:
    """Return the runs below folders, by default below this one, in few numbers.

    `sort` is one of when, name, val, train, speed and steps. Raises OutputError where a folder is
    missing.
    """
    from mlxtune.core.runs.run_list import Search, in_order

    return [each.summary for each in in_order(_find(folders, Search()), sort)]


def show(folders: Sequence[str], *, sort: str, as_json: bool) -> None:
    """Print the runs below folders: a table that fits the terminal, or JSON."""
    from mlxtune.core.reports.runs_table import table_lines
    from mlxtune.core.runs.run_list import Search, in_order

    search = Search()
    found = in_order(_find(folders, search), sort)
    for folder in search.cut_short:
        message = f"{folder}: too many files to look through all: name the folder of your runs"
        print(printable(f"warning: {message}"), file=sys.stderr)
    if as_json:
        json.dump([each.as_dict() for each in found], sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return
    if not found:
        where = ", ".join(folders) or "this folder"
        print(printable(f"no run below {where}: mlxtune train makes one"), file=sys.stderr)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(found, width, unicode=_is_unicode()):
        print(_fit(line))


def _find(folders: Sequence[str | Path], search: Search) -> list[ListedRun]:
    from mlxtune.core.runs.run import read_run
    from mlxtune.core.runs.run_list import ListedRun

    found: dict[Path, ListedRun] = {}
    for name in folders or ("",):
        folder = Path(os.path.expanduser(name))  # noqa: PTH111
        if not folder.is_dir():
            raise OutputError(f"{folder}: no such folder: name one that holds runs")
        for run in search.runs(folder):
            found.setdefault(run.resolve(), ListedRun.of(read_run(run)))
    return list(found.values())


def _is_unicode() -> bool:
    from mlxtune.core.reports.visible import escape_unencodable

    signs = "▁█→…"
    return escape_unencodable(signs, sys.stdout.encoding or "ascii") == signs


def _fit(line: str) -> str:
    from mlxtune.core.reports.visible import escape_unencodable

    return escape_unencodable(line, sys.stdout.encoding or "ascii")
