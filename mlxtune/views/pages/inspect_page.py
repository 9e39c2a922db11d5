"""An inspection as one HTML page that needs no network and can be sent to a colleague."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from mlxtune.core.data.inspection import Inspection, Piece, ShownPair, together
from mlxtune.core.text import count
from mlxtune.views import visible
from mlxtune.views.pages.page import PageType, percent
from mlxtune.views.visible import Stretch

# A long example shows this many pieces at its start and end; the others are folded.
_HEAD, _TAIL = 400, 120

PAGE = PageType(command="inspect", scripts=("inspect_page.js",))


def render_page(inspection: Inspection) -> str:
    names = [PurePath(ledger["path"]).name for ledger in inspection.files]
    return PAGE.render(
        "inspect_page.html",
        inspection=inspection,
        files=", ".join(names) or "no file",
        model=PurePath(inspection.model).name or inspection.model,
        options={
            "Model": inspection.model,
            "Template": inspection.template,
            "Thinking": inspection.thinking,
            "Turns": inspection.turns,
            "Limit": f"{count(inspection.max_seq_len, 'token')} (--max-seq-len)",
            "Batch": count(inspection.batch_size, "row"),
        },
        verdict=_verdict(inspection),
        totals=_totals(inspection),
        findings=list(_findings(inspection)),
        examples=(examples := list(_examples(inspection))),
        pairs=any(len(each["sides"]) > 1 for each in examples),
    )


def _verdict(inspection: Inspection) -> dict[str, str]:
    errors = len(inspection.errors)
    warnings = len(inspection.findings) - errors
    if errors:
        also = f" and {count(warnings, 'warning')}" if warnings else ""
        text = f"✕ Not ready: {count(errors, 'error')}{also}. mlxtune train refuses this data."
        return {"style": "error", "text": text}
    if warnings:
        text = f"! Worth a look: {count(warnings, 'warning')}. mlxtune train accepts this data."
        return {"style": "warning", "text": text}
    text = "✓ No findings. Look at some rows below: the marked text will be learned."
    return {"style": "", "text": text}


def _totals(inspection: Inspection) -> dict[str, str]:
    train = sum(ledger["rows_train"] for ledger in inspection.files)
    read = sum(ledger["rows_read"] for ledger in inspection.files)
    tokens, supervised = inspection.tokens, inspection.supervised
    share = percent(supervised.total, tokens.total)
    is_cut = any(ledger["tokens_truncated"] for ledger in inspection.files)
    before = ", before --max-seq-len cuts" if is_cut else ""
    return {
        f"of {count(read, 'row')} read are for training": f"{train:,}",
        f"supervised tokens, {share} of all{before}": f"{supervised.total:,}",
        f"tokens in the longest of {count(inspection.examples, 'example')}": f"{tokens.max:,}",
        f"in an epoch, each of {count(inspection.batch_size, 'row')}": (
            count(inspection.cost.steps, "step")
        ),
    }


def _findings(inspection: Inspection) -> Iterator[dict[str, Any]]:
    """Yield the findings, errors first, with links to their rows on the page."""
    numbers: dict[tuple[str, int], int] = {}
    for number, shown in enumerate(together(inspection.shown)):
        example = shown.chosen if isinstance(shown, ShownPair) else shown
        numbers.setdefault((example.path, example.row), number)
    shown_kinds = {kind for example in inspection.shown for kind in example.kinds}
    for finding in sorted(inspection.findings, key=lambda finding: finding.level != "error"):
        before = ("", *(place.path for place in finding.places))
        # Show the path once for several rows of a file.
        places = [
            (
                place,
                place.where.removeprefix(place.path) if path == place.path else place.where,
                numbers.get((place.path, place.row)),
            )
            for place, path in zip(finding.places, before, strict=False)
        ]
        yield {
            "finding": finding,
            "places": places,
            "more": max(0, finding.rows - len({(p.path, p.row) for p in finding.places})),
            "search": quote(visible.escape(finding.kind), safe="")
            if finding.kind in shown_kinds
            else "",
        }


def _examples(inspection: Inspection) -> Iterator[dict[str, Any]]:
    """Yield the examples with their text as markup; a pair has its prompt and both answers."""
    errors = {finding.kind for finding in inspection.findings if finding.level == "error"}
    for shown in together(inspection.shown):
        if isinstance(shown, ShownPair):
            example, pieces = shown.chosen, shown.chosen.pieces[: shown.common]
            sides = [(side, _folded(side.pieces[shown.common :])) for side in shown.sides]
        else:
            example, pieces, sides = shown, shown.pieces, []
        yield {
            "example": example,
            "kinds": [(kind, kind in errors) for kind in example.kinds],
            "text": _folded(pieces),
            "sides": sides,
        }


def _folded(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return text as markup, with the middle of a long text folded."""
    runs = list(visible.stretches(pieces))
    start, end = visible.middle_of(pieces, _HEAD, _TAIL)
    return {
        "folded": sum(piece.tokens for piece in pieces[start:end]),
        "head": _markup(runs[:start]),
        "middle": _markup(runs[start:end]),
        "tail": _markup(runs[end:]),
    }


def _markup(runs: Sequence[tuple[Piece, list[Stretch]]]) -> Markup:
    """Return tokens as markup; a template would be slow, and could change whitespace."""
    text = ""
    for supervised, run in groupby(runs, key=lambda pair: pair[0].supervised):
        tokens = "".join(
            f"<mark>{each}</mark>" if differs else each
            for differs, few in groupby(run, key=lambda pair: pair[0].differs)
            for each in ["".join(_token(piece, parts) for piece, parts in few)]
        )
        text += f'<b class="s">{tokens}</b>' if supervised else tokens
    return Markup(text)


def _token(piece: Piece, parts: Sequence[Stretch]) -> str:
    tag = "code" if piece.control else "i"
    several = f' data-n="{piece.tokens}" title="{piece.tokens} tokens"' if piece.tokens > 1 else ""
    return f"<{tag}{several}>{''.join(_MARKS[kind] % escape(t) for kind, t in parts)}</{tag}>"


_MARKS = {
    "plain": "%s",
    "space": '<u class="w">%s</u>',
    "newline": '<u class="n">%s</u>',
    "tab": '<u class="t">%s</u>',
    "escape": '<u class="x">%s</u>',
}
