"""The recipe of `mlxtune report`: what a run's folder says, as a page, as lines, as JSON.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxtune.errors import ConfigError, printable

if TYPE_CHECKING:
    from mlxtune.core.runs.run import Run
    from mlxtune.core.runs.summary import RunSummary

COMPARISON = "comparison.html"


def report(*runs: str | Path, html: str | Path | None = None) -> list[RunSummary]:
    """Return runs in few numbers, in the order given; with `html`, write the page of them there.

    Each is named by its folder, that of its adapter, or its adapter.

    Raises OutputError where there is no run, or the page cannot be written.
    """
    from mlxtune.core.runs.summary import summarize

    found = read_runs(runs)
    if html is not None:
        _write(found, _path(html))
    return [summarize(run) for run in found]


def show(runs: Sequence[str], *, html: str | None, as_json: bool) -> None:
    """Write the page of runs and print what it says in short, or print JSON.

    Without `html`, that of one run is written into its folder, that of several here. With
    `as_json`, one is only written where `html` says so. Raises as `report` does.
    """
    if html is not None and not html.strip():
        raise ConfigError(["--html is empty: name the page to write"])
    found = read_runs(runs)
    target = None
    if html is not None:
        target = _path(html)
        _write(found, target)
    elif not as_json:
        target = _default_target(found)
        _write(found, target)
    if as_json:
        json.dump(as_dict(found), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return
    for line in _lines(found):
        print(_fit(line))
    print(_fit(f"page: {target}"))


def read_runs(runs: Sequence[str | Path]) -> list[Run]:
    """Return the runs that are named. Raises OutputError where one is none."""
    from mlxtune.core.runs.run import read_run, run_folder_at

    return [read_run(run_folder_at(_path(run))) for run in runs]


def as_dict(runs: Sequence[Run]) -> dict[str, Any]:
    """Return runs as docs/report.md describes them."""
    from mlxtune.core.runs.summary import (
        differing_options,
        measured_shares,
        planned_shares,
        summarize,
    )

    return {
        "runs": [
            {
                **summarize(run).as_dict(),
                "planned": planned_shares(run),
                "measured": measured_shares(run),
                "epochs_ended": [dict(epoch) for epoch in run.epochs],
                "validations": [{"step": step, "loss": loss} for step, loss in run.validations],
                "skipped_steps": [dict(each) for each in run.skipped],
                "ledgers": [dict(each) for each in run.ledgers],
                "evaluation": dict(run.evaluation) or None,
                "config": dict(run.config),
            }
            for run in runs
        ],
        "differences": differing_options(runs),
    }


def _lines(runs: Sequence[Run]) -> list[str]:
    from mlxtune.core.reports.run_evaluation import verdict_sentence
    from mlxtune.core.reports.run_page import comparison_headline
    from mlxtune.core.runs.summary import differing_options, summarize

    summaries = [summarize(run) for run in runs]
    lines = []
    for run, summary in zip(runs, summaries, strict=True):
        name = f"{summary.name}: " if len(runs) > 1 else ""
        lines.append(f"{name}{summary.headline}")
        if (verdict := verdict_sentence(run.evaluation)) is not None:
            lines.append(verdict.text)
        lines += [f"problem: {problem}" for problem in summary.problems]
        if summary.resume:
            lines.append(f"resume it with: {summary.resume}")
    if len(runs) > 1:
        lines.append(comparison_headline(summaries))
        for option, values in differing_options(runs).items():
            lines.append(f"{option}: {' | '.join(values)}")
    return lines


def _fit(line: str) -> str:
    from mlxtune.core.reports.visible import escape_unencodable

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    plain = line
    for fancy, simple in (("−", "-"), ("’", "'"), ("–", "-"), ("✓ ", ""), ("✕ ", "")):
        if escape_unencodable(fancy, encoding) != fancy:
            plain = plain.replace(fancy, simple)
    return escape_unencodable(printable(plain), encoding)


def _path(name: str | Path) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111


def _default_target(runs: Sequence[Run]) -> Path:
    """Return where a page goes that nobody named."""
    from mlxtune.core.training.run_folder import REPORT

    return runs[0].folder / REPORT if len(runs) == 1 else Path(COMPARISON)


def _write(runs: Sequence[Run], target: Path) -> None:
    """Write the page; it replaces none but one of its own kind, least of all an adapter."""
    from mlxtune.core.machine.files import make_folder, write_file
    from mlxtune.core.reports.run_page import PAGE, render_runs
    from mlxtune.setup.dataset import check_outputs

    check_outputs([target], [], "--html")
    PAGE.check_replaceable(target, "--html")
    make_folder(target.parent)
    write_file(target, [render_runs(runs).encode()])
