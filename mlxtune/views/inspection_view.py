"""An inspection, printed on a terminal, and as one page that can be sent to a colleague."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape as escape_html
from itertools import groupby
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.inspection import (
    Inspection,
    Piece,
    ShownExample,
    ShownPair,
    together,
)
from mlxtune.core.formatting import pluralize
from mlxtune.core.run.summary import Verdict
from mlxtune.views import visible
from mlxtune.views.output import render_lines
from mlxtune.views.pages.page import PageType, percent
from mlxtune.views.parts import ledger_sums

# A piece of text, and the stretches in which it is shown.
Stretched = tuple[Piece, list[visible.Stretch]]

PAGE = PageType(command="inspect", scripts=("inspect_page.js",))
# The numbers of pieces shown at the start and at the end of a long example, on a terminal and on a
# page, where the pieces between them are folded.
_TERMINAL_ENDS, _PAGE_ENDS = (240, 80), (400, 120)
_MAX_PRINTED_ROWS = 3
# The narrowest terminal for two columns.
_MIN_TWO_COLUMN_WIDTH = 60
# The style of the text that differs between the two answers of a pair.
_DIFFERENCE_STYLES = {"chosen": "bold black on green", "rejected": "bold white on red"}
_MARKS: dict[visible.Kind, str] = {"newline": "↵\n", "tab": "→   "}
_MARKUP = {
    "plain": "%s",
    "space": '<u class="w">%s</u>',
    "newline": '<u class="n">%s</u>',
    "tab": '<u class="t">%s</u>',
    "escape": '<u class="x">%s</u>',
}


def _errors_first(inspection: Inspection) -> list[Finding]:
    return sorted(inspection.findings, key=lambda finding: finding.level != "error")


def _places(finding: Finding, blank: str = "") -> Iterator[tuple[Place, str]]:
    """Yield each place with its name; `blank` stands for each character of a repeated path."""
    before = ""
    for place in finding.places:
        row = place.where.removeprefix(place.path)
        yield place, blank * len(place.path) + row if place.path == before else place.where
        before = place.path


def _more_rows(finding: Finding) -> int:
    return max(0, finding.rows - len({(place.path, place.row) for place in finding.places}))


def _cut_at_ends(
    pieces: Sequence[Piece], ends: tuple[int, int]
) -> tuple[list[Stretched], list[Stretched], list[Stretched], int]:
    """Return the start, the middle and the end of a text, and the number of the middle's tokens."""
    stretched = list(visible.stretches(pieces))
    start, end = visible.middle_of(pieces, *ends)
    tokens = sum(piece.tokens for piece in pieces[start:end])
    return stretched[:start], stretched[start:end], stretched[end:], tokens


# On a terminal


def show_inspection(
    inspection: Inspection, console: Console, *, examples: Sequence[ShownExample] | None = None
) -> None:
    """Print an inspection; by default with three examples, preferably ones with findings.

    Control characters in the data are escaped.
    """
    for line in _summary(inspection):
        console.print(_line(line) if line else "", overflow="fold")
    colored = console.color_system is not None and not console.no_color
    selected = _choose(inspection.shown) if examples is None else examples
    beside = console.is_terminal and console.width >= _MIN_TWO_COLUMN_WIDTH
    for text in _examples(selected, inspection.max_seq_len, colored, beside):
        console.print(text, overflow="fold")


def _choose(shown: Sequence[ShownExample]) -> Sequence[ShownExample]:
    """Return up to three examples, preferably with different findings, in the order of the file.

    A pair counts as one example.
    """
    items = [each.answers if isinstance(each, ShownPair) else (each,) for each in together(shown)]
    first = {item[0].kinds: item for item in reversed(items)}
    # Rank the first example of each set of findings first, and among equals those with findings.
    ranked = sorted(items, key=lambda item: (first[item[0].kinds] is not item, not item[0].kinds))
    return [each for item in sorted(ranked[:_MAX_PRINTED_ROWS], key=items.index) for each in item]


def _line(markup: str) -> Padding:
    """Return a line of rich markup that keeps its indentation when it wraps."""
    text = Text.from_markup(markup.lstrip(" "), emoji=False)
    return Padding(text, (0, 0, 0, len(markup) - len(markup.lstrip(" "))), expand=False)


def _safe(value: object) -> str:
    """Return a value as text for rich markup, with its control characters escaped."""
    return escape_markup(visible.escape(str(value)))


def _summary(inspection: Inspection) -> list[str]:
    """Return an inspection without its examples, as lines of rich markup."""
    lengths: list[tuple[Any, ...]] = [("", "median", "p95", "longest", "mean", "sum")]
    for name, each in (("all", inspection.tokens), ("supervised", inspection.supervised)):
        lengths.append((name, each.p50, each.p95, each.max, round(each.mean), each.total))
    limits: list[tuple[Any, ...]] = [("", "rows cut", "rows lost", "tokens cut", "supervised cut")]
    for limit in inspection.limits:
        mark = "▸" if limit.max_seq_len == inspection.max_seq_len else " "
        cut = (limit.rows_cut, limit.rows_lost, limit.tokens_cut, limit.supervised_cut)
        limits.append((f"{mark} {limit.max_seq_len:,}", *cut))
    return render_lines(
        "inspection.txt",
        _safe,
        seen=inspection,
        findings=_errors_first(inspection),
        sums=ledger_sums,
        more=_more_rows,
        places=_places,
        lengths=map(_columns, lengths),
        limits=map(_columns, limits),
    )


def _columns(cells: Sequence[Any]) -> str:
    """Return a row's cells as one line of columns, right-aligned except for the first."""
    texts = [cell if isinstance(cell, str) else f"{cell:,}" for cell in cells]
    return f"{texts[0]:<12}" + "".join(f"{text:>16}" for text in texts[1:])


def _examples(
    examples: Sequence[ShownExample], max_seq_len: int, colored: bool, beside: bool
) -> Iterator[Padding | Text | Table]:
    if not examples:
        return
    shown = together(examples)
    pairs = any(isinstance(example, ShownPair) for example in shown)
    marks = f"⟦supervised⟧{', «only in this answer»' if pairs else ''}, all else is context"
    if colored:
        styles = _DIFFERENCE_STYLES
        differs = f"  [{styles['chosen']}]only chosen[/]  [{styles['rejected']}]only rejected[/]"
        marks = "[bold green]supervised[/][dim]  context[/]  [magenta]control[/]"
        marks += differs if pairs else ""
    yield _line(f"[bold]Rows as the model sees them[/]  {marks}")
    for example in shown:
        yield Text()
        if isinstance(example, ShownPair):
            yield from _pair(example, colored, beside)
        else:
            yield from _single(example, max_seq_len, colored)


def _single(example: ShownExample, max_seq_len: int, colored: bool) -> Iterator[Padding | Text]:
    facts = f"{pluralize(example.tokens, 'token')}, {example.supervised:,} supervised"
    role = f"{example.role}, " if example.role != "answer" else ""
    yield _heading(example, role + facts)
    yield _example_text(example.pieces, colored)
    if example.cut:
        verb = "is" if example.cut == 1 else "are"
        more = f"{pluralize(example.cut, 'more token')} {verb} beyond --max-seq-len {max_seq_len}"
        yield _line(f"[yellow]... {more}[/]")


def _pair(pair: ShownPair, colored: bool, beside: bool) -> Iterator[Padding | Text | Table]:
    """Yield the prompt of a pair, then its two answers, next to each other if `beside`."""
    common = pair.chosen.pieces[: pair.common]
    yield _heading(pair.chosen, f"{pluralize(sum(p.tokens for p in common), 'token')} in common")
    yield _example_text(common, colored)
    answers = []
    for answer in pair.answers:
        facts = f"{answer.role}: {answer.supervised:,} supervised, {answer.differing:,} differ"
        text = _example_text(answer.pieces[pair.common :], colored, answer.role)
        answers.append(Text.assemble((facts, "bold"), "\n", text))
    if not beside:
        yield from answers
        return
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in answers:
        table.add_column(ratio=1, overflow="fold")
    table.add_row(*answers)
    yield table


def _heading(example: ShownExample, facts: str) -> Padding:
    part = f"part {example.part} of {example.parts}, " if example.parts > 1 else ""
    kinds = f"  [yellow]{_safe(', '.join(example.kinds))}[/]" if example.kinds else ""
    source = f"[cyan]{_safe(example.where)}[/]"
    return _line(f"[dim]── [/]{source}  {_safe(f'{part}{example.split}, {facts}')}{kinds}")


def _example_text(pieces: Sequence[Piece], colored: bool, role: str = "") -> Text:
    """Return pieces as text, without the middle of a long text."""
    start, _, end, tokens = _cut_at_ends(pieces, _TERMINAL_ENDS)
    text = _styled(start, colored, role)
    if tokens:
        text.append(f"\n... {pluralize(tokens, 'token')} not shown here ...\n", "yellow")
        text.append_text(_styled(end, colored, role))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _styled(stretched: Iterable[Stretched], colored: bool, role: str) -> Text:
    text = Text()
    for supervised, span in groupby(stretched, key=lambda pair: pair[0].supervised):
        bracketed = supervised and not colored
        text.append("⟦" if bracketed else "")
        for differs, parts in groupby(span, key=lambda pair: pair[0].differs):
            quoted = differs and not colored
            text.append("«" if quoted else "")
            for piece, stretches in parts:
                for kind, words in stretches:
                    shown = "·" * len(words) if kind == "space" else _MARKS.get(kind, words)
                    text.append(shown, _style(piece, kind, role))
            text.append("»" if quoted else "")
        text.append("⟧" if bracketed else "")
    return text


def _style(piece: Piece, kind: visible.Kind, role: str) -> str:
    if piece.differs:
        return _DIFFERENCE_STYLES[role] + (" underline" if kind == "escape" else "")
    if kind == "escape":
        return "bold red underline" if piece.supervised else "bold red"
    if piece.control:
        return "bold green reverse" if piece.supervised else "magenta"
    return "bold green" if piece.supervised else "dim"


# On a page


def render_inspection(inspection: Inspection) -> str:
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
            "Limit": f"{pluralize(inspection.max_seq_len, 'token')} (--max-seq-len)",
            "Batch": pluralize(inspection.batch_size, "row"),
        },
        verdict=_verdict(inspection),
        totals=_totals(inspection),
        findings=list(_linked_findings(inspection)),
        examples=(examples := list(_articles(inspection))),
        pairs=any(len(example["answers"]) > 1 for example in examples),
    )


def _verdict(inspection: Inspection) -> Verdict:
    errors = len(inspection.errors)
    warnings = len(inspection.findings) - errors
    if errors:
        also = f" and {pluralize(warnings, 'warning')}" if warnings else ""
        text = f"Not ready: {pluralize(errors, 'error')}{also}. mlxtune train refuses this data."
        return Verdict("bad", text)
    if warnings:
        text = f"Worth a look: {pluralize(warnings, 'warning')}. mlxtune train accepts this data."
        return Verdict("uncertain", text)
    return Verdict("good", "No findings. Look at some rows below: the marked text will be learned.")


def _totals(inspection: Inspection) -> dict[str, str]:
    train = sum(ledger["rows_train"] for ledger in inspection.files)
    read = sum(ledger["rows_read"] for ledger in inspection.files)
    tokens, supervised = inspection.tokens, inspection.supervised
    fraction = percent(supervised.total, tokens.total)
    is_cut = any(ledger["tokens_truncated"] for ledger in inspection.files)
    before = ", before --max-seq-len cuts" if is_cut else ""
    return {
        f"of {pluralize(read, 'row')} read are for training": f"{train:,}",
        f"supervised tokens, {fraction} of all{before}": f"{supervised.total:,}",
        f"tokens in the longest of {pluralize(inspection.examples, 'example')}": f"{tokens.max:,}",
        f"in an epoch, each of {pluralize(inspection.batch_size, 'row')}": (
            pluralize(inspection.cost.steps, "step")
        ),
    }


def _linked_findings(inspection: Inspection) -> Iterator[dict[str, Any]]:
    """Yield the findings with links to their rows on the page."""
    numbers: dict[tuple[str, int], int] = {}
    for number, shown in enumerate(together(inspection.shown)):
        example = shown.chosen if isinstance(shown, ShownPair) else shown
        numbers.setdefault((example.path, example.row), number)
    shown_kinds = {kind for example in inspection.shown for kind in example.kinds}
    for finding in _errors_first(inspection):
        search = quote(visible.escape(finding.kind), safe="")
        yield {
            "finding": finding,
            "places": [
                (place, name, numbers.get((place.path, place.row)))
                for place, name in _places(finding)
            ],
            "more": _more_rows(finding),
            "search": search if finding.kind in shown_kinds else "",
        }


def _articles(inspection: Inspection) -> Iterator[dict[str, Any]]:
    """Yield the examples with their text as markup; a pair has its prompt and both answers."""
    errors = {finding.kind for finding in inspection.errors}
    for shown in together(inspection.shown):
        if isinstance(shown, ShownPair):
            example, pieces = shown.chosen, shown.chosen.pieces[: shown.common]
            answers = [(answer, _folded(answer.pieces[shown.common :])) for answer in shown.answers]
        else:
            example, pieces, answers = shown, shown.pieces, []
        yield {
            "example": example,
            "kinds": [(kind, kind in errors) for kind in example.kinds],
            "text": _folded(pieces),
            "answers": answers,
        }


def _folded(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return text as markup, with the middle of a long text folded."""
    start, middle, end, tokens = _cut_at_ends(pieces, _PAGE_ENDS)
    return {
        "head": _markup(start),
        "middle": _markup(middle),
        "tail": _markup(end),
        "folded": tokens,
    }


def _markup(stretched: Iterable[Stretched]) -> Markup:
    """Return tokens as markup; a template would be slow, and could change whitespace."""
    text = ""
    for supervised, span in groupby(stretched, key=lambda pair: pair[0].supervised):
        tokens = "".join(
            f"<mark>{each}</mark>" if differs else each
            for differs, group in groupby(span, key=lambda pair: pair[0].differs)
            for each in ["".join(_token(piece, parts) for piece, parts in group)]
        )
        text += f'<b class="s">{tokens}</b>' if supervised else tokens
    return Markup(text)


def _token(piece: Piece, parts: Sequence[visible.Stretch]) -> str:
    tag = "code" if piece.control else "i"
    several = f' data-n="{piece.tokens}" title="{piece.tokens} tokens"' if piece.tokens > 1 else ""
    shown = "".join(_MARKUP[kind] % escape_html(text) for kind, text in parts)
    return f"<{tag}{several}>{shown}</{tag}>"
