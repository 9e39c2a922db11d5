"""Sections of the page of a run, as HTML. What stands in files is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxtune.core.reports.charts import draw_bars
from mlxtune.core.reports.page_parts import html_text, ledger_article, section
from mlxtune.core.reports.run_charts import planned_shares
from mlxtune.core.runs.run import Run, mapping, number, text, whole
from mlxtune.core.runs.summary import RunSummary, ledgers_of, options_of, tokens_run
from mlxtune.core.text import byte_size, count, duration

# Of skipped steps and of epochs, so many are shown.
_MOST_SKIPPED, _MOST_EPOCHS = 100, 200


def table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], style: str = ""
) -> str:
    """Return a table that scrolls within itself; cells are HTML, the first of a row its name."""
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll {style}" tabindex="0" role="region" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        "</div>"
    )


def note(body: str) -> str:
    """Return a remark; `body` is HTML."""
    return f'<p class="note">{body}</p>'


# The course


def epochs_table(run: Run, summary: RunSummary) -> str:
    """Return a line for each epoch that ended."""
    if not run.epochs:
        return ""
    rows = []
    for epoch in run.epochs[-_MOST_EPOCHS:]:
        best = summary.best_epoch is not None and whole(epoch, "epoch") == summary.best_epoch
        took, speed = number(epoch, "epoch_time_ms"), number(epoch, "samples_per_sec")
        mark = ' <span class="now">best</span>' if best else ""
        rows.append(
            (
                f"{whole(epoch, 'epoch') or 0:,}{mark}",
                _digits(number(epoch, "train_loss")),
                _digits(number(epoch, "val_loss")),
                _digits(number(epoch, "val_perplexity")),
                "–" if speed is None else f"{speed:,.1f}",
                "–" if took is None else duration(took / 1000),
            )
        )
    headings = ("epoch", "training loss", "validation loss", "perplexity", "rows/s", "time")
    return table("Epochs", headings, rows, "spaced")


def _digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def skipped_section(run: Run) -> str:
    """Return the steps that were not applied, nothing where there are none."""
    if not run.skipped:
        return ""
    rows = []
    for each in run.skipped[:_MOST_SKIPPED]:
        places = each.get("rows")
        named = [str(place) for place in places] if isinstance(places, list) else []
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        shown = ", ".join(named[:8]) + more
        rows.append(
            (
                f"{whole(each, 'step') or 0:,}",
                html_text(text(each, "reason")),
                f'<span class="path">{html_text(shown)}</span>',
            )
        )
    caption = f"{count(len(run.skipped), 'step')} not applied"
    body = table(caption, ("step", "why", "its rows"), rows, "words")
    return section("skipped", "Skipped steps", body)


# Plan, data, options, origin


def plan_section(run: Run, summary: RunSummary) -> str:
    """Return what was planned beside what came of it."""
    planned, came = planned_shares(run), tokens_run(run)
    if planned["micro_batch_tokens"] is None and summary.peak_memory is None:
        body = note("The run did not write down its plan: an earlier version made it.")
        return section("plan", "The plan, and what came of it", body)
    peak, limit = summary.predicted_memory, number(mapping(run.about, "plan"), "memory", "limit")
    rows = [
        ("peak memory", _bytes(peak), _bytes(summary.peak_memory)),
        (
            "micro-batches a step",
            _decimal(planned["micro_batches_per_step"]),
            _decimal(came["micro_batches_per_step"]),
        ),
        ("padding", _part(planned["padding_share"]), _part(came["padding_share"])),
        (
            "tokens run, of those of the data",
            _part(planned["run_share"]),
            _part(came["run_share"]),
        ),
        ("steps", _whole(summary.total_steps), f"{summary.step:,}"),
    ]
    body = table("Planned and measured", ("", "planned", "measured"), rows)
    if limit is not None:
        tokens = planned["micro_batch_tokens"]
        kept = mapping(run.about, "plan").get("grad_checkpoint") is True
        body += note(
            f"Within {_bytes(limit)}: micro-batches of up to {_whole(tokens)} tokens; activations "
            + ("computed again in the backward pass." if kept else "kept for the backward pass.")
        )
    return section("plan", "The plan, and what came of it", body + _memory_parts(run))


def _memory_parts(run: Run) -> str:
    """Return of what the predicted peak is made, as a bar."""
    plan = mapping(run.about, "plan")
    parts = [(name, number(plan, "memory", name) or 0.0) for name in _PARTS]
    whole_ = sum(size for _, size in parts)
    if not whole_:
        return ""
    start, boxes, keys = 0.0, "", ""
    for place, (name, size) in enumerate(parts):
        share = 100 * max(size, 0.0) / whole_
        boxes += f'<rect class="p{place}" x="{start:.2f}" width="{share:.2f}" height="1"/>'
        keys += f'<li class="swatch p{place}">{name} <b>{_bytes(size)}</b></li>'
        start += share
    return (
        '<figure class="parts"><figcaption>Of what the predicted peak is made</figcaption>'
        '<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'{boxes}</svg><ul class="keys">{keys}</ul></figure>'
    )


_PARTS = ("weights", "optimizer", "activations", "head")


def _bytes(value: float | None) -> str:
    return "–" if value is None else byte_size(value)


def _decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _part(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def data_section(run: Run) -> str:
    """Return where every row and token went, and how long examples are."""
    ledgers = ledgers_of(run)
    body = "".join(map(ledger_article, ledgers)) or note("The run wrote down no ledger.")
    lengths, charts = mapping(run.about, "lengths"), ""
    for name, title, style in (
        ("tokens", "Length", "context-part"),
        ("supervised", "Supervised", "supervised"),
    ):
        charts += _histogram(mapping(lengths, name), title, style)
    if charts:
        body += f'<div class="pair over">{charts}</div>'
    return section("data", "Where every row went", body)


def _histogram(found: Mapping[str, Any], title: str, style: str) -> str:
    counts = found.get("counts")
    start, width = whole(found, "start"), whole(found, "width")
    numbers = counts if isinstance(counts, list) else []
    if not all(type(each) is int and 0 <= each < 2**53 for each in numbers):
        return ""
    if start is None or not width or width < 1 or not any(numbers) or len(numbers) > 1000:
        return ""
    drawn = draw_bars(title, "tokens", start, width, numbers, "examples", style)
    middle = ", ".join(
        f"{name} <b>{whole(found, key) or 0:,}</b>"
        for key, name in (("p50", "median"), ("p95", "95th percentile"), ("max", "longest"))
    )
    return f'<div class="framed">{drawn}<p class="reasons">{middle}</p></div>'


def options_section(run: Run) -> str:
    """Return the options, those that are not the default first."""
    options = options_of(run)
    if not options:
        body = note("The run wrote down no options before its first checkpoint.")
        return section("options", "Options", body)

    def rows(differ: bool) -> list[tuple[str, str, str]]:
        return [
            (f'<span class="path">{html_text(name)}</span>', html_text(own), html_text(default))
            for name, (own, default, differs) in options.items()
            if differs == differ
        ]

    others = rows(False)
    body = table("Not the default", ("option", "value", "default"), rows(True), "words")
    same = table("At its default", ("option", "value"), [row[:2] for row in others], "words")
    return section(
        "options",
        "Options",
        f"{body}<details class='more'><summary>{count(len(others), 'option')} at the default"
        f"</summary>{same}</details>",
    )


def origin_section(run: Run, summary: RunSummary) -> str:
    """Return what the result depends on beside the options: model, data, versions; and itself."""
    pairs = [
        ("run", str(run.folder)),
        ("adapter", summary.adapter),
        ("adapter's SHA-256", summary.sha256),
        ("base model", text(run.about, "model", "description")),
        ("base model's hash", text(run.metadata, "base_hash")),
        ("data's hash", text(run.about, "data_hash") or text(run.metadata, "data_hash")),
        ("LoRA", text(run.about, "lora", "description")),
        ("template", text(run.about, "template")),
        ("device", text(run.about, "device")),
        ("checkpoints", ", ".join(run.checkpoints)),
    ]
    versions = mapping(run.about, "versions") or mapping(run.metadata, "versions")
    pairs += [(str(name), str(version)) for name, version in versions.items()]
    rows = [
        (html_text(name), f'<span class="path">{html_text(value)}</span>')
        for name, value in pairs
        if value
    ]
    return section("origin", "Origin", table("Model, data and versions", ("", ""), rows, "words"))
