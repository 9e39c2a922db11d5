"""`mlxtune report`: shows runs as an HTML page, as lines of text or as JSON."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxtune.config import as_path
from mlxtune.core.files.writing import check_outputs, make_folder, write_file
from mlxtune.core.run.progress import record_values
from mlxtune.core.run.run_folder import REPORT
from mlxtune.core.run.sampled_answers import gradient_warning
from mlxtune.core.run.stored_run import Run, read_run, run_folder_at
from mlxtune.core.run.summary import (
    RunView,
    differing_options,
    measured_plan_values,
    predicted_fractions,
    validated_alike,
)
from mlxtune.errors import ConfigError, OutputError
from mlxtune.views.output import print_json, print_line
from mlxtune.views.pages.run_page import PAGE, comparison_headline, render_runs
from mlxtune.views.parts import verdict_line

COMPARISON = "comparison.html"
# Error codes for read-only folders.
_READ_ONLY_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


def report(*runs: str | Path, html: str | Path | None = None) -> list[RunView]:
    """Return summaries of runs, in the order given; with `html`, also write a page to that path.

    Each run is named by its folder, its adapter, or the adapter's folder.

    Raises OutputError if there is no such run, or if the page cannot be written.
    """
    all_runs = _read_runs(runs)
    if html is not None:
        _write(all_runs, as_path(str(html)))
    return [RunView.of(run) for run in all_runs]


def main(runs: Sequence[str], *, html: str | None, as_json: bool) -> None:
    """Write the page of runs and print a summary of it, or print JSON.

    Without `html`, the page of one run goes into its folder, and the page of several runs into the
    current folder; if that folder is read-only, the summary says so. With `as_json` but without
    `html`, no page is written. Raises the errors of `report`.
    """
    if html is not None and not html.strip():
        raise ConfigError(["--html is empty: name the page to write"])
    all_runs = _read_runs(runs)
    target = all_runs[0].folder / REPORT if len(all_runs) == 1 else Path(COMPARISON)
    if html is not None:
        target = as_path(str(html))
    page = f"page: {target}"
    if html is not None or not as_json:
        try:
            _write(all_runs, target)
        except OutputError as problem:
            cause = problem.__cause__
            if (
                html is not None
                or not isinstance(cause, OSError)
                or cause.errno not in _READ_ONLY_ERRORS
            ):
                raise
            page = f"no page: {problem}"
    if as_json:
        print_json(_as_dict(all_runs))
        return
    for line in (*_lines(all_runs), page):
        print_line(line)


def _read_runs(runs: Sequence[str | Path]) -> list[Run]:
    return [read_run(run_folder_at(as_path(str(run)))) for run in runs]


def _as_dict(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "runs": [
            {
                **RunView.of(run).as_dict(),
                "planned": predicted_fractions(run),
                "measured": measured_plan_values(run),
                "epochs_ended": [record_values(epoch) for epoch in run.progress.epochs],
                "validations": [
                    {"step": validation.step, "loss": validation.val_loss}
                    for validation in run.progress.validations
                ],
                "skipped_steps": [record_values(step) for step in run.progress.skipped],
                "ledgers": [ledger.as_dict() for ledger in run.ledgers],
                "evaluation": run.evaluation.as_dict() if run.evaluation else None,
                "config": dict(run.config),
            }
            for run in runs
        ],
        "validated_alike": validated_alike(runs),
        "differences": differing_options(runs),
    }


def _lines(runs: Sequence[Run]) -> list[str]:
    views = [RunView.of(run) for run in runs]
    lines = []
    for view in views:
        name = f"{view.name}: " if len(views) > 1 else ""
        lines += [f"{name}{view.headline}", verdict_line(view.verdict)]
        if len(views) == 1:
            lines += [
                each.sentence for each in view.changes if each.kind != "answers" or each.moved
            ]
            lines += gradient_warning(view.changes)
        lines += [f"problem: {problem}" for problem in view.problems]
    if len(views) > 1:
        lines.append(comparison_headline(views, validated_alike(runs)))
        for option, values in differing_options(runs).items():
            lines.append(f"{option}: {' | '.join(values)}")
    return lines


def _write(runs: Sequence[Run], target: Path) -> None:
    """Write the page. Raises OutputError if it would replace a file that is not such a page."""
    check_outputs([target], [], "--html")
    PAGE.check_replaceable(target, "--html")
    make_folder(target.parent)
    write_file(target, [render_runs(runs).encode()])
