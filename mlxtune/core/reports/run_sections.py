"""What the sections of a run's page show: epochs, plan, data, options, origin."""

from __future__ import annotations

from typing import Any

from mlxtune.core.reports.page import number_text
from mlxtune.core.runs.run import Run, mapping, number, text
from mlxtune.core.runs.summary import (
    RunSummary,
    measured_shares,
    options_of,
    planned_shares,
)
from mlxtune.core.text import byte_size, duration, join_few
from mlxtune.core.training.metrics import InstructEpochMetrics

# Skipped steps, the rows of each, and epochs that are shown at most.
_MOST_SKIPPED, _MOST_ROWS, _MOST_EPOCHS = 100, 8, 200


def sections_context(run: Run, summary: RunSummary) -> dict[str, Any]:
    """Return the variables of the sections of run_page.html."""
    options = options_of(run)
    return {
        "epochs": [_epoch(each, summary) for each in run.progress.epochs[-_MOST_EPOCHS:]],
        "skipped": [
            (each.step, each.reason, join_few(each.rows, _MOST_ROWS))
            for each in run.progress.skipped[:_MOST_SKIPPED]
        ],
        "plan": _plan(run, summary),
        "ledgers": run.ledgers,
        "lengths": _lengths(run),
        "changed": [
            (flag, own, default) for flag, (own, default, differ) in options.items() if differ
        ],
        "defaults": [(flag, own) for flag, (own, _, differ) in options.items() if not differ],
        "origin": _origin(run, summary),
    }


def _epoch(epoch: InstructEpochMetrics, summary: RunSummary) -> dict[str, Any]:
    return {
        "number": epoch.epoch,
        "best": epoch.epoch == summary.best_epoch,
        "losses": [epoch.train_loss, epoch.val_loss, epoch.val_perplexity],
        "speed": epoch.samples_per_sec,
        "time": duration(epoch.epoch_time_ms / 1000),
    }


def _plan(run: Run, summary: RunSummary) -> dict[str, Any] | None:
    """Return the planned and the measured values; None if the run recorded no plan."""
    planned, measured = planned_shares(run), measured_shares(run)
    tokens = planned["micro_batch_tokens"]
    if tokens is None and summary.peak_memory is None:
        return None
    plan = mapping(run.about, "plan")
    peak, measured_peak = summary.predicted_memory, summary.peak_memory
    rows = [
        (
            "peak memory",
            None if peak is None else byte_size(peak),
            None if measured_peak is None else byte_size(measured_peak),
        )
    ]
    for title, name, spec in (
        ("micro-batches a step", "micro_batches_per_step", ".1f"),
        ("padding", "padding_share", ".1%"),
        ("tokens run, relative to the data", "run_share", ".1%"),
    ):
        rows.append(
            (title, number_text(planned[name], spec), number_text(measured[name], spec)),
        )
    rows.append(("steps", number_text(summary.total_steps), f"{summary.step:,}"))
    parts = ("weights", "optimizer", "activations", "head")
    return {
        "rows": rows,
        "limit": number(plan, "memory", "limit"),
        "tokens": tokens,
        "recompute": plan.get("grad_checkpoint") is True,
        "parts": [
            (max(number(plan, "memory", name) or 0.0, 0.0), name, f"p{place}")
            for place, name in enumerate(parts)
        ],
    }


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
