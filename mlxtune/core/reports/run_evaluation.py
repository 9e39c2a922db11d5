"""The section of a run's page that says what its adapter changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxtune.core.reports.page_parts import html_text, section
from mlxtune.core.reports.run_sections import note, table
from mlxtune.core.runs.run import Run, mapping, number, objects, text, whole
from mlxtune.core.runs.summary import samples_of
from mlxtune.core.text import count, loss_text

# Of a text, so many characters are shown; of samples so many, and so many without unfolding.
_MOST_TEXT, _MOST_SAMPLES, _OPEN_SAMPLES = 4000, 40, 3


def evaluation_section(run: Run) -> str:
    """Return what an evaluation found, or how to get one."""
    title = "Before and after"
    if not run.evaluation:
        model, data = text(run.config, "model_path") or "MODEL", "FILE"
        command = f"mlxtune eval --model-path {model} --adapter {run.name} --data {data} --generate"
        body = note(
            "Nobody has asked yet whether the adapter helps. A run with validation rows asks at "
            f"its end, and <code>{html_text(command)}</code> does, with answers side by side."
        )
        return section("evaluation", title, body)
    parts = [_interval(run.evaluation), _changed_rows(run.evaluation), _samples(run)]
    return section("evaluation", title, "".join(parts))


def verdict_of(evaluation: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the style of an evaluation's verdict, and what it says; None where it says none."""
    verdict, rows = text(evaluation, "verdict"), whole(evaluation, "rows")
    difference, low, high = (
        number(evaluation, "difference", name) for name in ("loss", "low", "high")
    )
    if difference is None or verdict not in ("helped", "hurt", "cannot tell"):
        return None
    on = f" on {count(rows, 'row')}" if rows else ""
    confidence = number(evaluation, "difference", "confidence") or 0.95
    interval = ""
    if low is not None and high is not None:
        interval = f" ({confidence:.0%} interval {_signed(low)} to {_signed(high)})"
    changed = f"the loss{on} changed by {_signed(difference)} nats a token{interval}."
    if verdict == "helped":
        return "", f"✓ The adapter helped: {changed}"
    if verdict == "hurt":
        return "error", f"✕ The adapter hurt: {changed}"
    return "warning", f"! Nobody can tell whether the adapter helped: {changed}"


def _signed(value: float) -> str:
    return ("−" if value < 0 else "+") + loss_text(abs(value))


def _interval(evaluation: Mapping[str, Any]) -> str:
    """Return base and adapted loss in large type, and the difference with its interval as a bar."""
    base, adapted = (number(evaluation, name, "loss") for name in ("base", "adapted"))
    figures = [("loss of the base model", base), ("loss with the adapter", adapted)]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{loss_text(value)}</dd></div>" for name, value in figures
    )
    generated = mapping(evaluation, "generated")
    exact, answers = mapping(generated, "exact_match"), whole(generated, "rows")
    for name, said in (("base", "exact before"), ("adapted", "exact after")):
        if answers and (right := whole(exact, name)) is not None:
            of = f"of {count(answers, 'answer')} {said}"
            cells += f"<div><dt>{of}</dt><dd>{right:,}</dd></div>"
    found = f'<dl class="figures">{cells}</dl>'
    low, middle, high = (number(evaluation, "difference", name) for name in ("low", "loss", "high"))
    if low is None or middle is None or high is None or not low <= middle <= high:
        return found
    return found + _interval_bar(low, middle, high)


def _interval_bar(low: float, middle: float, high: float) -> str:
    """Return the difference of the losses with its interval, beside zero."""
    left, right = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (right - left) or 1.0
    left, right = left - room, right + room

    def at(value: float) -> str:
        return f"{100 * (value - left) / (right - left):.2f}%"

    width = f"{max(100 * (high - low) / (right - left), 0.4):.2f}%"
    said = f"Difference of the losses {_signed(middle)}, from {_signed(low)} to {_signed(high)}"
    return (
        f'<figure class="interval"><figcaption>{said}; below zero is better</figcaption>'
        f'<svg role="img" aria-label="{said}"><line class="base" x1="0" x2="100%" y1="32" '
        f'y2="32"/><line class="zero" x1="{at(0)}" x2="{at(0)}" y1="14" y2="50"/>'
        f'<rect x="{at(low)}" width="{width}" y="25" height="14" rx="3"/>'
        f'<circle cx="{at(middle)}" cy="32" r="5"/>'
        f'<text x="{at(0)}" y="64" class="x">0</text></svg></figure>'
    )


def _changed_rows(evaluation: Mapping[str, Any]) -> str:
    tables = []
    for name, title in (("gained", "Rows that gained most"), ("lost", "Rows that lost most")):
        rows, fell = [], []
        for each in objects(evaluation, name)[:10]:
            before, after = number(each, "base_loss"), number(each, "adapted_loss")
            change = "–" if before is None or after is None else _signed(after - before)
            fell.append(before is not None and after is not None and after < before)
            place = f"{text(each, 'path')}:{whole(each, 'row') or 0}"
            rows.append(
                (
                    f'<span class="path">{html_text(place)}</span>',
                    loss_text(before),
                    loss_text(after),
                    change,
                )
            )
        if name == "lost" and all(fell):
            title = "Rows that gained least"
        if rows:
            tables.append(table(title, ("row", "before", "after", "change"), rows))
    return f'<div class="pair">{"".join(tables)}</div>' if tables else ""


def _samples(run: Run) -> str:
    samples = samples_of(run)
    if not samples:
        return note(
            "No answers were written: <code>mlxtune eval --generate</code> brings them "
            "side by side."
        )
    articles = [_sample(sample) for sample in samples[:_MOST_SAMPLES]]
    found = f'<h3 class="over">Answers side by side</h3>{_articles(articles[:_OPEN_SAMPLES])}'
    if folded := articles[_OPEN_SAMPLES:]:
        of = ""
        if len(samples) > _MOST_SAMPLES:
            of = f"; of {len(samples):,}, {_MOST_SAMPLES} are on this page"
        found += (
            f'<details class="more"><summary>{count(len(folded), "more answer")}{of}</summary>'
            f"{_articles(folded)}</details>"
        )
    return found


def _articles(articles: Sequence[str]) -> str:
    return f'<div class="samples">{"".join(articles)}</div>'


def _sample(sample: Mapping[str, Any]) -> str:
    place = f"{text(sample, 'path')}:{whole(sample, 'row') or 0}"
    expected = _words(sample.get("expected"))
    boxes = [_answer("expected", sample.get("expected"), None)]
    for name, title in (("base", "before"), ("adapted", "after")):
        right = _words(sample.get(name)).strip() == expected.strip()
        boxes.append(_answer(title, sample.get(name), right))
    return (
        f'<article class="sample"><header><h4 class="path">{html_text(place)}</h4></header>'
        f'<div class="prompt">{_block(_words(sample.get("prompt")))}</div>'
        f'<div class="answers">{"".join(boxes)}</div></article>'
    )


def _answer(title: str, value: Any, right: bool | None) -> str:
    mark = ""
    if right is not None:
        mark = (
            '<span class="right">✓ exact</span>' if right else '<span class="other">differs</span>'
        )
    style = "answer" if right is None else f"answer {'same' if right else 'differs'}"
    return f'<div class="{style}"><h5>{title} {mark}</h5>{_block(_words(value))}</div>'


def _words(value: Any) -> str:
    """Return a text, or what stands in place of one, as text."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _block(words: str) -> str:
    more = ""
    if len(words) > _MOST_TEXT:
        more = f'<p class="note">… {len(words) - _MOST_TEXT:,} more characters</p>'
    lines = "\n".join(map(html_text, words[:_MOST_TEXT].split("\n")))
    return f"<pre>{lines or '(nothing)'}</pre>{more}"
