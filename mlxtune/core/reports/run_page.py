"""A run, or several compared, as one HTML page that needs no network."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from markupsafe import Markup

from mlxtune.core.files.files import write_file
from mlxtune.core.reports.charts import Chart, draw
from mlxtune.core.reports.page import PageType
from mlxtune.core.reports.run_charts import charts_of, comparison_charts, style_of
from mlxtune.core.runs.run import Run, mapping, number, read_run, text, whole
from mlxtune.core.runs.summary import (
    RunSummary,
    differing_options,
    measured_shares,
    option_text,
    options_of,
    planned_shares,
    summarize,
)
from mlxtune.core.text import (
    byte_size,
    count,
    duration,
    join_few,
    loss_text,
    minute_of,
    signed_loss,
)
from mlxtune.core.training.evaluation import CANNOT_TELL, HELPED, HURT, Evaluation, verdict_line
from mlxtune.core.training.metrics import best_place
from mlxtune.core.training.run_folder import REPORT

PAGE = PageType(
    command="report",
    styles=("chart.css", "run_page.css"),
    script="run_page.js",
)
# Answers on a page, and how many of them are not folded.
_MOST_SAMPLES, _OPEN_SAMPLES = 40, 3
# A longer text is cut.
_MOST_TEXT = 4000
_STYLES = {HELPED: ("", "✓"), HURT: ("error", "✕"), CANNOT_TELL: ("warning", "!")}
# Skipped steps, the rows of each, and epochs that are shown at most.
_MOST_SKIPPED, _MOST_ROWS, _MOST_EPOCHS = 100, 8, 200


@dataclass(frozen=True)
class Verdict:
    """A sentence on a run, its style on the page, and a command or path that belongs to it."""

    style: str
    text: str
    code: str = ""


def write_page(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Write the page of a run into its folder and return its path; on an error, warn instead."""
    target = folder / REPORT
    try:
        write_file(target, [render_runs([read_run(folder)]).encode()])
    # The adapter is already written: no error in its page may fail the run.
    except Exception as problem:  # noqa: BLE001
        warn(f"{target}: the report could not be written: {type(problem).__name__}: {problem}")
        return None
    return target


def render_runs(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of several compared."""
    summaries = [summarize(run) for run in runs]
    problems = [
        f"{summary.name}: {problem}" if len(runs) > 1 else problem
        for summary in summaries
        for problem in summary.problems
    ]
    if len(runs) == 1:
        context = _run_context(runs[0], summaries[0])
        return PAGE.render("run_page.html", problems=problems, **context)
    context = _comparison_context(runs, summaries)
    return PAGE.render("comparison_page.html", problems=problems, **context)


def _chart_context(charts: Sequence[Chart]) -> dict[str, Any]:
    drawings = [draw(chart, number) for number, chart in enumerate(charts)]
    data = json.dumps([data for _, data in drawings], separators=(",", ":"), allow_nan=False)
    # Only `<` can end a script element.
    escaped = Markup(data.replace("<", "\\u003c"))
    return {"charts": [html for html, _ in drawings], "chart_data": escaped}


# One run


def _run_context(run: Run, summary: RunSummary) -> dict[str, Any]:
    """Return the variables of run_page.html."""
    plan, options = mapping(run.about, "plan"), options_of(run)
    parts = ("weights", "optimizer", "activations", "head")
    return {
        "run": run,
        "summary": summary,
        "header": _settings(run, summary),
        "verdict": verdict(run, summary),
        "totals": totals(summary),
        "epochs": run.progress.epochs[-_MOST_EPOCHS:],
        "skipped": [
            (each.step, each.reason, join_few(each.rows, _MOST_ROWS))
            for each in run.progress.skipped[:_MOST_SKIPPED]
        ],
        "planned": planned_shares(run),
        "measured": measured_shares(run),
        "memory_limit": number(plan, "memory", "limit"),
        "recompute": plan.get("grad_checkpoint") is True,
        "memory_parts": [
            (max(number(plan, "memory", name) or 0.0, 0.0), name, f"p{place}")
            for place, name in enumerate(parts)
        ],
        "lengths": _lengths(run),
        "changed": [
            (flag, own, default) for flag, (own, default, differ) in options.items() if differ
        ],
        "defaults": [(flag, own) for flag, (own, _, differ) in options.items() if not differ],
        "origin": _origin(run, summary),
        **_chart_context(charts_of(run, summary)),
        **_evaluation_context(run),
    }


def _settings(run: Run, summary: RunSummary) -> dict[str, str]:
    config, lora = run.config, ""
    if (rank := config.get("rank")) is not None:
        lora = f"rank {option_text(rank)}, alpha {option_text(config.get('alpha'))}"
        lora += f" on {option_text(config.get('targets', ''))}"
    return {
        "Run": summary.name,
        "Model": text(config, "model_path"),
        "Data": ", ".join(summary.data),
        "LoRA": lora,
        "Learning rate": option_text(config["lr"]) if "lr" in config else "",
        "Device": text(run.about, "device"),
        "Started": minute_of(summary.started),
    }


def verdict_sentence(evaluation: Evaluation | None) -> Verdict | None:
    """Return the verdict of an evaluation; None if it holds none."""
    if evaluation is None or evaluation.verdict is None or evaluation.difference is None:
        return None
    style, sign = _STYLES[evaluation.verdict]
    line = verdict_line(evaluation)
    return Verdict(style, f"{sign} {line[0].upper()}{line[1:]}.")


def verdict(run: Run, summary: RunSummary) -> Verdict:
    """Return what became of a run, in a sentence."""
    if summary.status == "running":
        return Verdict("warning", "! The run is still training: this page shows it so far.")
    if not summary.finished:
        resume = " Resume it with" if summary.resume else ""
        return Verdict("warning", f"! The run is unfinished.{resume}", summary.resume)
    if (judged := verdict_sentence(run.evaluation)) is not None:
        return judged
    before, best = summary.initial_val_loss, summary.best_val_loss
    ended = "stopped early" if summary.status == "stopped early" else "finished"
    if before is not None and best is not None and best >= before:
        worse = "No epoch was better than the base model on the validation rows"
        return Verdict("warning", f"! The run {ended}. {worse}: lower --lr, or add data.")
    chosen = ""
    if best is not None and summary.best_step and summary.best_epoch:
        place = best_place(summary.best_step, summary.best_epoch, best, run.progress.epochs)
        chosen = f" {place.capitalize()} was the best."
    adapter = " Its adapter:" if summary.adapter else ""
    return Verdict("", f"✓ The run {ended}.{chosen}{adapter}", summary.adapter)


def totals(summary: RunSummary) -> dict[str, str]:
    """Return the numbers of a run, each by what it is."""
    figures = {}
    if summary.best_val_loss is not None:
        before = summary.initial_val_loss
        improved = f", from {loss_text(before)} before training" if before is not None else ""
        figures[f"best validation loss{improved}"] = loss_text(summary.best_val_loss)
    if summary.train_loss is not None:
        period = "the last epoch" if summary.epoch else "the steps so far"
        figures[f"training loss in {period}"] = loss_text(summary.train_loss)
    if summary.seconds is not None:
        speed = summary.tokens_per_second
        at = f", {speed:,.0f} tokens a second" if speed else ""
        figures[f"for {count(summary.step, 'step')}{at}"] = duration(summary.seconds)
    if summary.peak_memory is not None:
        predicted = summary.predicted_memory
        prediction = f", {byte_size(predicted)} predicted" if predicted else ""
        figures[f"peak memory{prediction}"] = byte_size(summary.peak_memory)
    return figures


def _evaluation_context(run: Run) -> dict[str, Any]:
    """Return the variables of evaluation.html."""
    model = text(run.config, "model_path") or "MODEL"
    return {
        "evaluation": run.evaluation,
        "evaluation_figures": _figures(run.evaluation) if run.evaluation else {},
        "eval_command": f"mlxtune eval --model-path {model} --adapter {run.name} --data FILE "
        "--generate",
        "most_samples": _MOST_SAMPLES,
        "open_samples": _OPEN_SAMPLES,
        "most_text": _MOST_TEXT,
    }


def _figures(evaluation: Evaluation) -> dict[str, str]:
    adapted, change = evaluation.adapted, evaluation.difference
    figures = {"loss of the base model": loss_text(evaluation.base.loss)}
    if adapted is not None and change is not None:
        interval = f"{signed_loss(change.low)} to {signed_loss(change.high)}"
        figures["loss with the adapter"] = loss_text(adapted.loss)
        figures[f"change, {change.confidence:.0%} interval {interval}"] = signed_loss(change.loss)
    if generated := evaluation.generated:
        answers, match = count(generated.rows, "answer"), generated.exact_match
        figures[f"of {answers} exact before"] = f"{match.base:,}"
        if match.adapted is not None:
            figures[f"of {answers} exact after"] = f"{match.adapted:,}"
    return figures


def _lengths(run: Run) -> dict[str, Any] | None:
    """Return the distributions of the tokens of an example; None if the run recorded none."""
    recorded = mapping(run.about, "lengths")
    lengths = {
        name: {key: number(recorded, name, key) for key in ("p50", "p95", "max", "mean", "total")}
        for name in ("tokens", "supervised")
    }
    return lengths if recorded else None


def _origin(run: Run, summary: RunSummary) -> list[tuple[str, str]]:
    """Return what the result depends on in addition to the options, and its files."""
    pairs = [
        ("run", str(run.folder)),
        ("adapter", summary.adapter),
        ("adapter's SHA-256", summary.sha256),
        ("base model", text(run.about, "model", "description")),
        ("base model's hash", text(run.metadata, "base_hash")),
        ("data's hash", text(run.about, "data_hash")),
        ("LoRA", text(run.about, "lora", "description")),
        ("template", text(run.about, "template")),
        ("device", text(run.about, "device")),
        ("checkpoints", ", ".join(run.checkpoints)),
    ]
    pairs += [(name, str(version)) for name, version in mapping(run.about, "versions").items()]
    return [(name, value) for name, value in pairs if value]


# Several runs


def _comparison_context(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> dict[str, Any]:
    """Return the variables of comparison_page.html."""
    losses = [each.best_val_loss for each in summaries if each.best_val_loss is not None]
    styles = [style_of(place) for place in range(len(runs))]
    return {
        "summaries": summaries,
        "styles": styles,
        "results": list(zip(summaries, styles, strict=True)),
        "sentence": comparison_headline(summaries),
        "comparable": _comparable(runs),
        "best": min(losses, default=None),
        "differing": differing_options(runs),
        "short_names": [PurePath(summary.name).name for summary in summaries],
        **_chart_context(comparison_charts(runs, summaries)),
    }


def comparison_headline(summaries: Sequence[RunSummary]) -> str:
    """Return in one sentence which of several runs did best."""
    validated = [each for each in summaries if each.best_val_loss is not None]
    runs = count(len(summaries), "run")
    if not validated:
        return f"{runs} side by side"
    best = min(validated, key=lambda each: each.best_val_loss or 0.0)
    return f"Of {runs}, {best.name} has the lowest validation loss, {loss_text(best.best_val_loss)}"


def _comparable(runs: Sequence[Run]) -> bool:
    """Return whether all runs that validated did so on the same rows."""
    validated_on = {
        (
            text(run.about, "validation_hash"),
            run.config.get("val_split"),
            *(whole(run.config, name) for name in ("seed", "val_rows")),
        )
        for run in runs
        if run.progress.validations
    }
    return len(validated_on) < 2
