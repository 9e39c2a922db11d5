"""`mlxtune runs`: lists the runs below folders with their results, or removes runs."""

from collections.abc import Sequence
from pathlib import Path

from mlxtune.config import as_path
from mlxtune.core.formatting import join_few
from mlxtune.core.run.run_folder import remove_run
from mlxtune.core.run.stored_run import find_runs, read_run, run_folder_at
from mlxtune.core.run.summary import SORTS, RunView
from mlxtune.errors import ConfigError, OutputError
from mlxtune.views.output import ask, print_json, print_line
from mlxtune.views.terminal import result_console, show_runs


def runs(*folders: str | Path, sort: str = "when") -> list[RunView]:
    """Return summaries of the runs below folders, by default the current folder.

    `sort` is one of when, name, val, train, speed and steps. Raises OutputError if a folder is
    missing.
    """
    views: dict[Path, RunView] = {}
    for name in folders or ("",):
        folder = as_path(str(name))
        if not folder.is_dir():
            raise OutputError(f"{folder}: no such folder: name one that holds runs")
        for run in find_runs(folder):
            views.setdefault(run.resolve(), RunView.of(read_run(run)))
    return sorted(views.values(), key=SORTS[sort])


def remove_runs(*folders: str | Path) -> None:
    """Remove the runs in these folders with their checkpoints; keep adapters and earlier runs.

    Raises OutputError if a folder contains no run, or if it contains a run in training or other
    programs' files.
    """
    for name in folders:
        remove_run(run_folder_at(as_path(str(name))))


def main(folders: Sequence[str], *, sort: str, as_json: bool, remove: bool, yes: bool) -> None:
    """Print the runs below folders as JSON or as a table that fits the terminal, or remove runs."""
    if remove:
        if not folders:
            raise ConfigError(["--remove needs the folders of the runs to remove"])
        removed = [str(run_folder_at(as_path(folder))) for folder in folders]
        if yes or ask(f"Remove {join_few(removed)} with all checkpoints?"):
            remove_runs(*removed)
        return
    views = runs(*folders, sort=sort)
    if as_json:
        print_json([{**view.as_dict(), "curve": list(view.curve)} for view in views])
        return
    if not views:
        where = ", ".join(folders) or "this folder"
        print_line(f"no run below {where}: start one with mlxtune train", stderr=True)
        return
    show_runs(views, result_console())
