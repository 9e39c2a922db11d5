"""Parts of texts and pages that look alike everywhere: verdicts, figures, sums of a ledger."""

from collections.abc import Mapping
from typing import Any

from mlxtune.core.formatting import byte_size, duration, loss_text, pluralize
from mlxtune.core.run.sampled_answers import mean_text
from mlxtune.core.run.summary import Outcome, RunView, Verdict

# The sign of each outcome, and its CSS class on pages.
SIGNS: dict[Outcome, str] = {"good": "✓", "uncertain": "!", "bad": "✕"}
STYLES: dict[Outcome, str] = {"good": "", "uncertain": "warning", "bad": "error"}


def verdict_line(verdict: Verdict) -> str:
    return f"{SIGNS[verdict.outcome]} {verdict.text} {verdict.code}".strip()


def run_figures(view: RunView, limit: float | None = None) -> dict[str, str]:
    """Return a run's main numbers by their labels; with a memory `limit`, the peak names it."""
    figures = {}
    if view.best_val_loss is not None:
        before = view.initial_val_loss
        text = view.validation_text(before)
        improved = f", from {text} before training" if before is not None else ""
        figures[f"best {view.measure}{improved}"] = view.validation_text(view.best_val_loss)
    if (change := view.reward_change) is not None:
        first, last = mean_text(change.first), mean_text(change.last)
        label = f"mean reward of answers sampled in the last third, from {first} in the first"
        figures[label] = last
    elif view.train_loss is not None:
        period = "the last epoch" if view.epoch else "the steps so far"
        figures[f"training loss in {period}"] = loss_text(view.train_loss)
    if view.seconds is not None:
        speed = f", {view.speed}" if view.speed else ""
        figures[f"for {pluralize(view.step, 'step')}{speed}"] = duration(view.seconds)
    if view.peak_memory is not None:
        predicted = view.predicted_memory
        label = f"peak memory, {byte_size(predicted)} predicted" if predicted else "peak memory"
        label += f"; the limit is {byte_size(limit)}" if limit else ""
        figures[label] = byte_size(view.peak_memory)
    return figures


def ledger_sums(ledger: Mapping[str, Any]) -> list[tuple[int, str, list[tuple[int, str]]]]:
    """Return the sums of a ledger: each total, its name, and its parts with their names."""
    reasons = ledger["rows_skipped"]
    skipped, read, tokens = sum(reasons.values()), ledger["rows_read"], ledger["tokens"]
    rows = [(ledger[f"rows_{name}"], name) for name in ("train", "validation")]
    why = [(number, reason) for reason, number in sorted(reasons.items())]
    kinds = ("supervised", "context", "truncated")
    return [
        (read, f"{_noun(read, 'row')} read", [*rows, (skipped, "skipped")]),
        *([(skipped, "skipped", why)] if skipped else []),
        (tokens, _noun(tokens, "token"), [(ledger[f"tokens_{kind}"], kind) for kind in kinds]),
    ]


def _noun(number: int, noun: str) -> str:
    return pluralize(number, noun).partition(" ")[2]
