"""An inspection as one HTML page that needs no network and can be sent to a colleague."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape as escape_html
from itertools import groupby
from pathlib import PurePath
from string import Template
from urllib.parse import quote

from mlxtune.core.data.findings import Finding
from mlxtune.core.data.inspection import Inspection, Piece, ShownExample
from mlxtune.core.reports import visible
from mlxtune.core.reports.page import Kind, read_part
from mlxtune.core.reports.page_parts import figure_list, html_text, ledger_article, percent, section
from mlxtune.core.reports.visible import Stretch
from mlxtune.core.text import count

# Of a long example, the pieces at its two ends are in view and the others unfold.
_HEAD, _TAIL = 400, 120

PAGE = Kind(
    command="inspect",
    start="rows",
    icon="<g fill='#1f8a5b'><path d='M1 2h14v3H1z' opacity='.35'/><path d='M1 6.5h9v3H1z'/>"
    "<path d='M1 11h12v3H1z'/></g>",
    script="inspect_page.js",
)


def render_page(inspection: Inspection) -> str:
    """Return the page."""
    sections = {
        "findings": ("Findings", _findings(inspection)),
        "ledger": ("Where every row went", "".join(map(ledger_article, inspection.files))),
        "lengths": ("Lengths", _lengths(inspection)),
        "cost": ("Cost of an epoch", _cost(inspection)),
        "rows": ("Rows as the model sees them", _rows(inspection)),
    }
    short = {"cost": "Cost", "rows": "Rows"}
    return PAGE.render(
        title=html_text(_file_names(inspection)),
        header=_header(inspection),
        links=[(name, short.get(name, title)) for name, (title, _) in sections.items()],
        main="\n".join(section(name, *said) for name, said in sections.items()),
    )


def _rows(inspection: Inspection) -> str:
    return Template(read_part("inspect_rows.html")).substitute(
        shown_note=_shown_note(inspection),
        count=f"{len(inspection.shown):,}",
        examples="\n".join(_examples(inspection)),
    )


def _file_names(inspection: Inspection) -> str:
    return ", ".join(PurePath(ledger["path"]).name for ledger in inspection.files) or "no file"


def _header(inspection: Inspection) -> str:
    model = PurePath(inspection.model).name or inspection.model
    settings = {
        "Model": inspection.model,
        "Template": inspection.template,
        "Thinking": inspection.thinking,
        "Turns": inspection.turns,
        "Limit": f"{count(inspection.max_seq_len, 'token')} (--max-seq-len)",
        "Batch": count(inspection.batch_size, "row"),
    }
    pairs = "".join(
        f"<div><dt>{name}</dt><dd>{html_text(value)}</dd></div>" for name, value in settings.items()
    )
    return (
        f"<h1><span>{html_text(_file_names(inspection))},</span> "
        f"as <span>{html_text(model)}</span> will read it</h1>"
        f'<dl class="settings">{pairs}</dl>{_verdict(inspection)}{_figures(inspection)}'
    )


def _verdict(inspection: Inspection) -> str:
    errors = len(inspection.errors)
    warnings = len(inspection.findings) - errors
    if errors:
        also = f" and {count(warnings, 'warning')}" if warnings else ""
        text = f"✕ Not ready: {count(errors, 'error')}{also}. mlxtune train refuses this data."
        return f'<p class="verdict error">{text}</p>'
    if warnings:
        text = f"! Worth a look: {count(warnings, 'warning')}. mlxtune train accepts this data."
        return f'<p class="verdict warning">{text}</p>'
    text = "✓ Nothing was found. Look at some rows below: what is marked will be learned."
    return f'<p class="verdict">{text}</p>'


def _figures(inspection: Inspection) -> str:
    train = sum(ledger["rows_train"] for ledger in inspection.files)
    read = sum(ledger["rows_read"] for ledger in inspection.files)
    whole, supervised = inspection.tokens, inspection.supervised
    return figure_list(
        {
            f"of {count(read, 'row')} read are for training": train,
            f"supervised tokens, {percent(supervised.total, whole.total)} of all": (
                supervised.total
            ),
            f"tokens in the longest of {count(inspection.examples, 'example')}": whole.max,
            f"in an epoch, each of {count(inspection.batch_size, 'row')}": (
                count(inspection.cost.steps, "step")
            ),
        }
    )


def _findings(inspection: Inspection) -> str:
    if not inspection.findings:
        return '<p class="note">None.</p>'
    ids: dict[tuple[str, int], int] = {}
    for number, example in enumerate(inspection.shown):
        ids.setdefault((example.path, example.row), number)
    shown_kinds = {kind for example in inspection.shown for kind in example.kinds}
    ordered = sorted(inspection.findings, key=lambda finding: finding.level != "error")
    items = "".join(_finding(finding, ids, finding.kind in shown_kinds) for finding in ordered)
    return f'<ul class="findings">{items}</ul>'


def _finding(finding: Finding, ids: dict[tuple[str, int], int], searchable: bool) -> str:
    level, sign = ("error", "✕ Error") if finding.level == "error" else ("warning", "! Warning")
    places = []
    for place in finding.places:
        name = f'<span class="path">{html_text(place.path)}:{place.row}</span>'
        number = ids.get((place.path, place.row))
        if number is not None:
            name = f'<a href="#e{number}">{name}</a>'
        detail = f' <span class="detail">{html_text(place.detail)}</span>' if place.detail else ""
        places.append(f"<li>{name}{detail}</li>")
    if more := max(0, finding.rows - len({(p.path, p.row) for p in finding.places})):
        places.append(f'<li class="muted">and {count(more, "more row")}</li>')
    if searchable:
        address = escape_html("#q=kind:" + quote(visible.escape(finding.kind), safe=""))
        places.append(f'<li><a href="{address}">Show its rows on this page</a></li>')
    return (
        f'<li class="finding {level}"><header><span class="level">{sign}</span>'
        f"<h3>{html_text(finding.kind)}</h3> "
        f'<span class="rows">{count(finding.rows, "row") if finding.rows else ""}</span></header>'
        f'<p>{html_text(finding.advice)}</p><ul class="places">{"".join(places)}</ul></li>'
    )


def _lengths(inspection: Inspection) -> str:
    def cells(name: str, value: str) -> str:
        both = (getattr(one, value) for one in (inspection.tokens, inspection.supervised))
        return f'<tr><th scope="row">{name}</th>' + "".join(
            f"<td>{number:,.1f}</td>" if value == "mean" else f"<td>{number:,}</td>"
            for number in both
        )

    names = {"median": "p50", "95th percentile": "p95", "longest": "max", "mean": "mean"}
    rows = "</tr>".join(cells(name, value) for name, value in (names | {"sum": "total"}).items())
    return (
        '<div class="columns"><div class="scroll" tabindex="0" role="region" '
        'aria-label="Tokens of an example"><table><caption>Tokens of an example'
        f"<span>over {count(inspection.examples, 'example')}, before any cut</span></caption>"
        '<thead><tr><td></td><th scope="col">all</th><th scope="col">supervised</th></tr></thead>'
        f"<tbody>{rows}</tr></tbody></table></div>{_limits(inspection)}</div>"
    )


def _limits(inspection: Inspection) -> str:
    rows = ""
    for limit in inspection.limits:
        current = limit.max_seq_len == inspection.max_seq_len
        style = ' class="current" aria-current="true"' if current else ""
        now = ' <span class="now">now</span>' if current else ""
        numbers = (limit.rows_cut, limit.rows_lost, limit.tokens_cut, limit.supervised_cut)
        cells = "".join(
            f"<td>{number:,}</td>" if number else '<td class="none">0</td>' for number in numbers
        )
        rows += f'<tr{style}><th scope="row">{limit.max_seq_len:,}{now}</th>{cells}</tr>'
    headings = ("rows cut", "rows lost", "tokens cut", "supervised cut")
    columns = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="What a limit would cut">'
        "<table><caption>What a limit would cut"
        "<span>a lost row has no supervised token left</span></caption>"
        f'<thead><tr><th scope="col">--max-seq-len</th>{columns}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cost(inspection: Inspection) -> str:
    cost = inspection.cost
    return figure_list(
        {
            f"optimizer steps of {count(inspection.batch_size, 'row')}": cost.steps,
            "tokens through the model, without padding": cost.tokens,
            f"of them supervised ({percent(cost.supervised, cost.tokens)})": cost.supervised,
            "tokens in one validation": cost.validation_tokens,
        }
    )


def _shown_note(inspection: Inspection) -> str:
    shown, whole = len(inspection.shown), inspection.examples
    if shown >= whole:
        return f"All {count(whole, 'example')}, token by token."
    return f"{shown:,} of {count(whole, 'example')}, token by token."


def _examples(inspection: Inspection) -> Iterator[str]:
    levels = {finding.kind: finding.level for finding in inspection.findings}
    for number, example in enumerate(inspection.shown):
        yield _example(example, number, levels, inspection.max_seq_len)


def _example(example: ShownExample, number: int, levels: dict[str, str], max_seq_len: int) -> str:
    facts = [f"part {example.part} of {example.parts}"] * (example.parts > 1) + [
        html_text(example.split),
        count(example.tokens, "token"),
        f"{example.supervised:,} supervised ({percent(example.supervised, example.tokens)})",
    ]
    kinds = " ".join(
        f'<span class="kind{" error" if levels.get(kind) == "error" else ""}">'
        f"{html_text(kind)}</span>"
        for kind in example.kinds
    )
    cut = ""
    if example.cut:
        verb = "is" if example.cut == 1 else "are"
        more = count(example.cut, "more token")
        cut = f'<p class="cut">… {more} {verb} beyond --max-seq-len {max_seq_len}</p>'
    return (
        f'<article class="example" id="e{number}" data-row="{example.row}" '
        f'data-split="{html_text(example.split)}"><header>'
        f'<h3 class="path">{html_text(example.path)}:{example.row}</h3><p>{" · ".join(facts)}</p>'
        + (f'<p class="kinds">{kinds}</p>' if kinds else "")
        + f"</header>{_text(example.pieces)}{cut}</article>"
    )


def _text(pieces: Sequence[Piece]) -> str:
    runs = list(visible.stretches(pieces))
    start, end = visible.middle_of(pieces, _HEAD, _TAIL)
    if start == end:
        return _block(runs)
    tokens = count(sum(piece.tokens for piece in pieces[start:end]), "token")
    return (
        f"{_block(runs[:start])}<details><summary>… {tokens} more in between</summary>"
        f"{_block(runs[start:end])}</details>{_block(runs[end:])}"
    )


def _block(runs: Sequence[tuple[Piece, list[Stretch]]]) -> str:
    text = ""
    for supervised, run in groupby(runs, key=lambda pair: pair[0].supervised):
        tokens = "".join(_token(piece, parts) for piece, parts in run)
        text += f'<b class="s">{tokens}</b>' if supervised else tokens
    return f'<div class="text">{text}</div>'


def _token(piece: Piece, parts: Sequence[Stretch]) -> str:
    tag = "code" if piece.control else "i"
    several = f' data-n="{piece.tokens}" title="{piece.tokens} tokens"' if piece.tokens > 1 else ""
    return f"<{tag}{several}>{''.join(_MARKS[kind] % escape_html(t) for kind, t in parts)}</{tag}>"


_MARKS = {
    "plain": "%s",
    "space": '<u class="w">%s</u>',
    "newline": '<u class="n">%s</u>',
    "tab": '<u class="t">%s</u>',
    "escape": '<u class="x">%s</u>',
}
