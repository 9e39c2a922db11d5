"""What a run's page says about its evaluation: the verdict, changed rows, answers side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxtune.core.runs.run import Run, mapping, number, objects, text, whole
from mlxtune.core.text import count, loss_text

_MOST_ROWS = 10
# Answers on a page, and how many of them are not folded.
_MOST_SAMPLES, OPEN_SAMPLES = 40, 3
# A longer text is cut.
MOST_TEXT = 4000


@dataclass(frozen=True)
class Verdict:
    """A sentence on a run, its style on the page, and a command or path that belongs to it."""

    style: str
    text: str
    code: str = ""


def verdict_sentence(evaluation: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict of an evaluation; None if it holds none."""
    verdict, rows = text(evaluation, "verdict"), whole(evaluation, "rows")
    difference, interval = number(evaluation, "difference", "loss"), _interval(evaluation)
    if difference is None or verdict not in ("helped", "hurt", "cannot tell"):
        return None
    on = f" on {count(rows, 'row')}" if rows else ""
    changed = f"the loss{on} changed by {_signed(difference)} nats per token"
    changed += f" ({interval})." if interval else "."
    if verdict == "helped":
        return Verdict("", f"✓ The adapter helped: {changed}")
    if verdict == "hurt":
        return Verdict("error", f"✕ The adapter hurt: {changed}")
    return Verdict("warning", f"! It is unclear whether the adapter helped: {changed}")


def evaluation_context(run: Run) -> dict[str, Any]:
    """Return the variables of evaluation.html."""
    model = text(run.config, "model_path") or "MODEL"
    return {
        "evaluation": _evaluation(run.evaluation) if run.evaluation else None,
        "eval_command": f"mlxtune eval --model-path {model} --adapter {run.name} --data FILE "
        "--generate",
        "open_samples": OPEN_SAMPLES,
        "most_text": MOST_TEXT,
    }


def _evaluation(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    samples = objects(mapping(evaluation, "generated"), "samples")
    return {
        "figures": _figures(evaluation),
        "tables": dict(_changed_rows(evaluation)),
        "samples": [_sample(sample) for sample in samples[:_MOST_SAMPLES]],
        "total": len(samples),
    }


def _interval(evaluation: Mapping[str, Any]) -> str:
    """Return the interval of the difference of the losses, an empty text if there is none."""
    low, high, confidence = (
        number(evaluation, "difference", name) for name in ("low", "high", "confidence")
    )
    if low is None or high is None or confidence is None:
        return ""
    return f"{confidence:.0%} interval {_signed(low)} to {_signed(high)}"


def _signed(value: float) -> str:
    return ("−" if value < 0 else "+") + loss_text(abs(value))


def _figures(evaluation: Mapping[str, Any]) -> dict[str, str]:
    figures = {
        "loss of the base model": loss_text(number(evaluation, "base", "loss")),
        "loss with the adapter": loss_text(number(evaluation, "adapted", "loss")),
    }
    if (difference := number(evaluation, "difference", "loss")) is not None:
        figures[f"change, {_interval(evaluation)}".removesuffix(", ")] = _signed(difference)
    generated = mapping(evaluation, "generated")
    if answers := whole(generated, "rows"):
        for name, title in (("base", "exact before"), ("adapted", "exact after")):
            if (exact := whole(generated, "exact_match", name)) is not None:
                figures[f"of {count(answers, 'answer')} {title}"] = f"{exact:,}"
    return figures


def _changed_rows(evaluation: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return tables of the rows whose loss fell or rose most, by their titles."""
    tables = {}
    for name, title in (("gained", "Rows that gained most"), ("lost", "Rows that lost most")):
        rows = [_changed_row(each) for each in objects(evaluation, name)[:_MOST_ROWS]]
        if rows:
            tables[title] = rows
    return tables


def _changed_row(losses: Mapping[str, Any]) -> dict[str, Any]:
    before, after = number(losses, "base_loss"), number(losses, "adapted_loss")
    return {
        "place": _place(losses),
        "before": before,
        "after": after,
        "change": None if before is None or after is None else _signed(after - before),
    }


def _place(row: Mapping[str, Any]) -> str:
    return f"{text(row, 'path')}:{whole(row, 'row') or 0}"


def _sample(sample: Mapping[str, Any]) -> dict[str, str]:
    names = ("prompt", "expected", "base", "adapted")
    return {"place": _place(sample), **{name: _words(sample.get(name)) for name in names}}


def _words(value: Any) -> str:
    """Return a text; anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)
