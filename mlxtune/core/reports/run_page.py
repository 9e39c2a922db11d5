"""A run, or several over one another, as one HTML page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

from mlxtune.core.machine.files import write_file
from mlxtune.core.reports.charts import Drawing, draw
from mlxtune.core.reports.page import Kind
from mlxtune.core.reports.page_parts import figure_list, html_text, section
from mlxtune.core.reports.run_charts import charts_of, comparison_charts, style_of
from mlxtune.core.reports.run_evaluation import evaluation_section, verdict_of
from mlxtune.core.reports.run_sections import (
    data_section,
    epochs_table,
    note,
    options_section,
    origin_section,
    plan_section,
    skipped_section,
    table,
)
from mlxtune.core.runs.run import Run, read_run, text, whole
from mlxtune.core.runs.summary import (
    RunSummary,
    differing_options,
    option_text,
    summarize,
)
from mlxtune.core.text import byte_size, count, duration, loss_text, minute_of
from mlxtune.core.training.run_folder import REPORT

PAGE = Kind(
    command="report",
    start="loss",
    icon="<path d='M1.5 2.5C4 11 8 12.5 14.5 13' fill='none' stroke='#1f8a5b' "
    "stroke-width='2.5' stroke-linecap='round'/>",
    styles=("run_page.css",),
    script="run_page.js",
)


def render_runs(runs: Sequence[Run]) -> str:
    """Return the page of one run or of several."""
    summaries = [summarize(run) for run in runs]
    if len(runs) == 1:
        return _page(_one(runs[0], summaries[0]))
    return _page(_several(runs, summaries))


def _page(parts: dict[str, Any]) -> str:
    drawings: list[Drawing] = parts.pop("drawings")
    data = json.dumps([each.data for each in drawings], separators=(",", ":"), allow_nan=False)
    # In a script element, only `<` could end it.
    escaped = data.replace("<", "\\u003c")
    parts["main"] += f'\n<script type="application/json" id="charts">{escaped}</script>'
    return PAGE.render(**parts)


# One run


def _one(run: Run, summary: RunSummary) -> dict[str, Any]:
    drawings = [draw(chart, i) for i, chart in enumerate(charts_of(run, summary))]
    loss, *course = (each.html for each in drawings)
    sections = [
        section("loss", "Loss", f'<div class="framed">{loss}</div>{epochs_table(run, summary)}'),
        skipped_section(run),
        evaluation_section(run),
        section("course", "How it went", _grid(course)),
        plan_section(run, summary),
        data_section(run),
        options_section(run),
        origin_section(run, summary),
    ]
    links = [
        ("loss", "Loss"),
        *([("skipped", "Skipped steps")] if run.skipped else []),
        *[("evaluation", "Before and after"), ("course", "How it went"), ("plan", "Plan")],
        *[("data", "Data"), ("options", "Options"), ("origin", "Origin")],
    ]
    return {
        "title": html_text(summary.name),
        "header": _header(run, summary),
        "links": links,
        "main": "".join(sections),
        "drawings": drawings,
    }


def _grid(figures: Sequence[str]) -> str:
    return (
        '<div class="pair">' + "".join(f'<div class="framed">{f}</div>' for f in figures) + "</div>"
    )


def _header(run: Run, summary: RunSummary) -> str:
    rank, alpha = run.config.get("rank"), run.config.get("alpha")
    lora = f"rank {option_text(rank)}, alpha {option_text(alpha)}" if rank is not None else ""
    targets = option_text(run.config.get("targets", ""))
    settings = {
        "Run": summary.name,
        "Model": text(run.config, "model_path"),
        "Data": ", ".join(summary.data),
        "LoRA": f"{lora} on {targets}" if lora else "",
        "Learning rate": option_text(run.config.get("lr", "")),
        "Device": text(run.about, "device"),
        "Started": minute_of(summary.started),
    }
    return f"<h1>{_unbroken(summary.headline)}</h1>{_settings(settings)}" + (
        _verdict(run, summary) + _problems([summary]) + figure_list(_figures(summary))
    )


def _unbroken(sentence: str) -> str:
    """Return a sentence as HTML whose names are not broken at their hyphens."""
    words = (html_text(word) for word in sentence.split(" "))
    return " ".join(f"<span>{word}</span>" if "-" in word else word for word in words)


def _settings(settings: dict[str, str]) -> str:
    pairs = "".join(
        f"<div><dt>{name}</dt><dd>{html_text(value)}</dd></div>"
        for name, value in settings.items()
        if value and value != "–"
    )
    return f'<dl class="settings">{pairs}</dl>'


def _verdict(run: Run, summary: RunSummary) -> str:
    style, said = _said(run, summary)
    return f'<p class="verdict {style}">{said}</p>'


def _said(run: Run, summary: RunSummary) -> tuple[str, str]:
    """Return the style of a run's verdict, and what it says as HTML."""
    if summary.status == "running":
        return "warning", "! The run is going on: this is how far it has come."
    if not summary.finished:
        resume = f" Go on with it: <code>{html_text(summary.resume)}</code>" * bool(summary.resume)
        return "warning", f"! The run did not come to its end.{resume}"
    if (found := verdict_of(run.evaluation)) is not None:
        return found
    before, best = summary.initial_val_loss, summary.best_val_loss
    early = " It stopped early." if summary.status == "stopped early" else ""
    if before is not None and best is not None and best >= before:
        return "warning", (
            "! No epoch was better than the base model on the validation rows: lower --lr, or "
            f"bring more data.{early}"
        )
    chosen = f" Epoch {summary.best_epoch} was the best." if summary.best_epoch else ""
    where = f" Its adapter: <code>{html_text(summary.adapter)}</code>" * bool(summary.adapter)
    return "", f"✓ The run came to its end.{early}{chosen}{where}"


def _problems(summaries: Sequence[RunSummary]) -> str:
    """Return what is wrong with the folders, nothing where nothing is."""
    several = len(summaries) > 1
    items = "".join(
        f"<li>{html_text(f'{each.name}: ' if several else '')}{html_text(problem)}</li>"
        for each in summaries
        for problem in each.problems
    )
    if not items:
        return ""
    return (
        '<div class="verdict error"><p>✕ Not all of it could be read: what follows is the rest. '
        f'<code>mlxtune verify</code> says more.</p><ul class="problems">{items}</ul></div>'
    )


def _figures(summary: RunSummary) -> dict[str, int | str]:
    figures: dict[str, int | str] = {}
    if summary.best_val_loss is not None:
        before = summary.initial_val_loss
        from_ = f", from {loss_text(before)} before" if before is not None else ""
        figures[f"validation loss at best{from_}"] = loss_text(summary.best_val_loss)
    if summary.train_loss is not None:
        epoch = "the last epoch" if summary.epoch else "the steps so far"
        figures[f"training loss of {epoch}"] = loss_text(summary.train_loss)
    if summary.seconds is not None:
        speed = summary.tokens_per_second
        at = f", {speed:,.0f} tokens a second" if speed else ""
        figures[f"for {count(summary.step, 'step')}{at}"] = duration(summary.seconds)
    if summary.peak_memory is not None:
        predicted = summary.predicted_memory
        said = f", {byte_size(predicted)} predicted" if predicted else ""
        figures[f"peak memory{said}"] = byte_size(summary.peak_memory)
    return figures


# Several runs


def _several(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> dict[str, Any]:
    drawings = [draw(chart, i) for i, chart in enumerate(comparison_charts(runs, summaries))]
    validation, training, *course = (each.html for each in drawings)
    picker = "".join(
        f'<label class="key run {style_of(i)}"><input type="checkbox" value="{i}" checked>'
        f"<span>{html_text(each.name)}</span></label>"
        for i, each in enumerate(summaries)
    )
    framed = "".join(f'<div class="framed">{each}</div>' for each in (validation, training))
    sections = [
        section("results", "Results", _results(summaries)),
        section("differences", "Options that differ", _differences(runs, summaries)),
        section("loss", "Loss", framed),
        section("course", "How they went", _grid(course)),
    ]
    return {
        "title": f"{len(runs)} runs",
        "header": f"<h1>{_unbroken(comparison_headline(summaries))}</h1>"
        + _comparable(runs)
        + _problems(summaries)
        + f'<fieldset class="runs" id="runs"><legend>Runs to show</legend>{picker}</fieldset>',
        "links": [
            *[("results", "Results"), ("differences", "Options that differ")],
            *[("loss", "Loss"), ("course", "How they went")],
        ],
        "main": "".join(sections),
        "drawings": drawings,
    }


def comparison_headline(summaries: Sequence[RunSummary]) -> str:
    """Return in one sentence which of several runs did best."""
    judged = [each for each in summaries if each.best_val_loss is not None]
    runs = count(len(summaries), "run")
    if not judged:
        return f"{runs} side by side"
    best = min(judged, key=lambda each: each.best_val_loss or 0.0)
    return f"Of {runs}, {best.name} has the lowest validation loss, {loss_text(best.best_val_loss)}"


def _comparable(runs: Sequence[Run]) -> str:
    """Return a warning where the runs were judged by different rows."""
    names = ("seed", "val_split", "val_rows")
    judged_by = {
        (
            text(run.about, "validation_hash") or text(run.metadata, "validation_hash"),
            *(
                whole(run.config, name) if name != "val_split" else run.config.get(name)
                for name in names
            ),
        )
        for run in runs
        if run.validations
    }
    if len(judged_by) < 2:
        return ""
    return (
        '<p class="verdict warning">! The runs were not validated on the same rows: compare the '
        "shapes of their validation losses, not the numbers.</p>"
    )


def _results(summaries: Sequence[RunSummary]) -> str:
    losses = [each.best_val_loss for each in summaries if each.best_val_loss is not None]
    best = min(losses, default=None)
    rows = []
    for i, each in enumerate(summaries):
        mark = each.best_val_loss is not None and each.best_val_loss == best
        steps = f"{each.step:,}"
        if not each.finished:
            total = f" of {each.total_steps:,}" if each.total_steps else ""
            steps = f"{each.step:,}{total}, {each.status}"
        speed, peak = each.tokens_per_second, each.peak_memory
        rows.append(
            (
                f'<span class="key {style_of(i)}">{html_text(each.name)}</span>',
                loss_text(each.initial_val_loss),
                loss_text(each.best_val_loss) + (' <span class="now">best</span>' if mark else ""),
                loss_text(each.train_loss),
                html_text(steps),
                "–" if speed is None else f"{speed:,.0f}",
                "–" if peak is None else byte_size(peak),
                "–" if each.seconds is None else duration(each.seconds),
            )
        )
    headings = (
        *("run", "validation loss before", "at best", "training loss", "steps"),
        *("tokens/s", "peak memory", "time"),
    )
    return table("Losses, speed and memory", headings, rows)


def _differences(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> str:
    differing = differing_options(runs)
    if not differing:
        return note("None: the runs have the same options.")
    rows = [
        (f'<span class="path">{html_text(name)}</span>', *map(html_text, values))
        for name, values in differing.items()
    ]
    names = [
        f'<span class="key {style_of(i)}">{html_text(PurePath(each.name).name)}</span>'
        for i, each in enumerate(summaries)
    ]
    return table("The value in each run", ("option", *names), rows)


def write_page(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Write the page of a run into its folder. What goes wrong is a warning, and None returned."""
    target = folder / REPORT
    try:
        write_file(target, [render_runs([read_run(folder)]).encode()])
    # A page is worth no run: whatever it is, the adapter has been written.
    except Exception as problem:  # noqa: BLE001
        warn(f"{target}: the report could not be written: {type(problem).__name__}: {problem}")
        return None
    return target
