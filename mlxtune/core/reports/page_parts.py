"""Parts of a page that those of `inspect` and `report` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape as escape_html
from typing import Any

from mlxtune.core.reports import visible
from mlxtune.core.text import count


def html_text(text: object) -> str:
    """Return a text as HTML, in which nothing stays invisible and nothing acts."""
    return escape_html(visible.escape(str(text)))


def section(name: str, title: str, body: str) -> str:
    """Return a section with its heading."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{title}</h2>{body}</section>'
    )


def percent(part: float, whole: float) -> str:
    """Return a share in whole percent."""
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def figure_list(figures: Mapping[str, int | str]) -> str:
    """Return numbers in large type, each above what it is."""
    pairs = "".join(
        f"<div><dt>{name}</dt><dd>{value if isinstance(value, str) else f'{value:,}'}</dd></div>"
        for name, value in figures.items()
    )
    return f'<dl class="figures">{pairs}</dl>'


def ledger_article(ledger: Mapping[str, Any]) -> str:
    """Return where the rows and tokens of a file went, as sums that add up."""
    skipped = sum(ledger["rows_skipped"].values())
    rows = [
        (ledger["rows_train"], "train", "train"),
        (ledger["rows_validation"], "validation", "validation"),
        (skipped, "skipped", "skipped"),
    ]
    tokens = [
        (ledger["tokens_supervised"], "supervised", "supervised"),
        (ledger["tokens_context"], "context", "context-part"),
        (ledger["tokens_truncated"], "truncated", "truncated"),
    ]
    reasons = ""
    if skipped:
        parts = " + ".join(
            f"<b>{number:,}</b> {html_text(kind)}"
            for kind, number in sorted(ledger["rows_skipped"].items())
        )
        reasons = f'<p class="reasons"><b>{skipped:,}</b> skipped = {parts}</p>'
    notes = f"in {count(ledger['examples'], 'example')}"
    if cut := ledger["rows_truncated"]:
        notes += f"; truncated: {count(cut, 'row')}"
    return (
        f'<article class="file"><h3 class="path">{html_text(ledger["path"])}</h3>'
        f"{_sum(ledger['rows_read'], 'rows read', rows)}{reasons}"
        f'{_sum(ledger["tokens"], "tokens", tokens)}<p class="reasons">{notes}</p></article>'
    )


def _sum(whole: int, name: str, parts: Sequence[tuple[int, str, str]]) -> str:
    """Return `whole = part + part + part` above a bar; ≠ where it does not add up."""
    adds_up = whole == sum(number for number, _, _ in parts)
    equals = ("operator", "=") if adds_up else ("operator wrong", "≠")
    terms = f'<span class="part"><b>{whole:,}</b> {name}</span>'
    for (style, sign), (number, part, swatch) in zip(
        [equals, *[("operator", "+")] * len(parts)], parts, strict=False
    ):
        terms += (
            f' <span><span class="{style}">{sign}</span> <span class="part"><b>{number:,}</b> '
            f'<span class="swatch {swatch}">{part}</span></span></span>'
        )
    return f'<p class="sum">{terms}</p>{_bar(parts)}'


def _bar(parts: Sequence[tuple[int, str, str]]) -> str:
    whole, start, boxes = sum(number for number, _, _ in parts) or 1, 0.0, ""
    for number, _, style in parts:
        width = 100 * number / whole
        if number:
            boxes += f'<rect class="{style}" x="{start:.2f}" width="{width:.2f}" height="1"/>'
        start += width
    return (
        '<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f"{boxes}</svg>"
    )
