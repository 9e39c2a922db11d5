"""An inspection on a terminal: the contents of the page, legible without colour too."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mlxtune.core.data.findings import Finding
from mlxtune.core.data.inspection import Inspection, Piece, ShownExample
from mlxtune.core.text import count
from mlxtune.views import visible
from mlxtune.views.tables import plain_table

# How many pieces are printed at each end of a long example.
_HEAD, _TAIL = 240, 80
_EXAMPLES = 3
# A text, or a text and its style.
StyledPart = str | tuple[str, str]


def show_inspection(
    inspection: Inspection, console: Console, *, examples: Sequence[ShownExample] | None = None
) -> None:
    """Print an inspection; without `examples`, three rows, those with findings first.

    Control characters in the data are escaped.
    """
    for section in (_settings, _ledgers, _lengths, _limits, _cost, _findings):
        for line in section(inspection):
            console.print(line, overflow="fold")
        console.print()
    coloured = console.color_system is not None and not console.no_color
    chosen = _choose(inspection.shown) if examples is None else examples
    for text in _examples(chosen, inspection.max_seq_len, coloured):
        console.print(text, overflow="fold")


def _choose(shown: Sequence[ShownExample]) -> Sequence[ShownExample]:
    """Return an example with each set of findings, then others, in the order of the file."""
    first = {example.kinds: example for example in reversed(shown)}
    # Examples with findings, then those that show nothing new, keep their order.
    ranked = sorted(
        shown, key=lambda example: (first[example.kinds] is not example, not example.kinds)
    )
    return sorted(ranked[:_EXAMPLES], key=shown.index)


def _line(*parts: StyledPart, indent: int = 0) -> Padding:
    """Return parts as a line, with control characters escaped."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    text = Text.assemble(*((visible.escape(words), style) for words, style in pairs))
    return Padding(text, (0, 0, 0, indent), expand=False)


def _heading(text: str, note: str = "") -> Padding:
    return _line((text, "bold"), (f"  {note}" if note else "", "dim"))


def _settings(inspection: Inspection) -> Iterator[Padding]:
    parts: list[StyledPart] = []
    for name in ("model", "template", "thinking", "turns"):
        parts += [(f"{name} ", "dim"), f"{getattr(inspection, name)}  "]
    yield _line(*parts, ("--max-seq-len ", "dim"), str(inspection.max_seq_len))


def _ledgers(inspection: Inspection) -> Iterator[Padding]:
    yield _heading("Where every row went")
    for ledger in inspection.files:
        yield from _ledger(ledger)


def _ledger(ledger: dict[str, Any]) -> Iterator[Padding]:
    reasons = ledger["rows_skipped"]
    skipped = sum(reasons.values())
    rows = [(ledger[f"rows_{name}"], name) for name in ("train", "validation")]
    kinds = ("supervised", "context", "truncated")
    yield _line(ledger["path"], indent=2)
    yield _sum(ledger["rows_read"], "rows read", [*rows, (skipped, "skipped")])
    if skipped:
        terms = [(number, reason) for reason, number in sorted(reasons.items())]
        yield _sum(skipped, "skipped", terms)
    yield _sum(ledger["tokens"], "tokens", [(ledger[f"tokens_{name}"], name) for name in kinds])
    if cut := ledger["rows_truncated"]:
        yield _line((f"{count(cut, 'row')} truncated", "yellow"), indent=4)


def _sum(number: int, name: str, terms: Sequence[tuple[int, str]]) -> Padding:
    adds_up = number == sum(term for term, _ in terms)
    sign: StyledPart = (" = ", "dim") if adds_up else (" != ", "bold red")
    parts: list[StyledPart] = [(f"{number:,}", "bold"), f" {name}"]
    for term, what in terms:
        style = "bold yellow" if term and what in ("skipped", "truncated") else "bold"
        parts += [sign, (f"{term:,}", style), f" {what}"]
        sign = (" + ", "dim")
    return _line(*parts, indent=4)


def _lengths(inspection: Inspection) -> Iterator[Padding]:
    yield _heading("Tokens of an example", f"of {inspection.examples:,}, before any cut")
    table = plain_table(["", "median", "p95", "longest", "mean", "sum"])
    for name, lengths in (("all", inspection.tokens), ("supervised", inspection.supervised)):
        numbers = (lengths.p50, lengths.p95, lengths.max, round(lengths.mean), lengths.total)
        table.add_row(name, *(f"{number:,}" for number in numbers))
    yield Padding(table, (0, 0, 0, 2), expand=False)


def _limits(inspection: Inspection) -> Iterator[Padding]:
    yield _heading("What --max-seq-len would cut", "a lost row has no supervised token left")
    table = plain_table(["", "rows cut", "rows lost", "tokens cut", "supervised cut"])
    for limit in inspection.limits:
        current = limit.max_seq_len == inspection.max_seq_len
        numbers = (limit.rows_cut, limit.rows_lost, limit.tokens_cut, limit.supervised_cut)
        table.add_row(
            f"{'▸' if current else ' '} {limit.max_seq_len:,}",
            *(f"{number:,}" for number in numbers),
            style="bold" if current else "",
        )
    yield Padding(table, (0, 0, 0, 2), expand=False)


def _cost(inspection: Inspection) -> Iterator[Padding]:
    cost = inspection.cost
    validation = f"; a validation reads {count(cost.validation_tokens, 'token')}"
    yield _line(
        ("One epoch  ", "bold"),
        f"{count(cost.steps, 'step')} of {count(inspection.batch_size, 'row')}, "
        f"{count(cost.tokens, 'token')} through the model, "
        f"{cost.supervised:,} of them supervised{validation if cost.validation_tokens else ''}",
    )


def _findings(inspection: Inspection) -> Iterator[Padding]:
    yield _heading("Findings", "" if inspection.findings else "none")
    for finding in sorted(inspection.findings, key=lambda finding: finding.level != "error"):
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[Padding]:
    style = "bold red" if finding.level == "error" else "bold yellow"
    rows = f" ({count(finding.rows, 'row')})" if finding.rows else ""
    yield _line((f"{finding.level}: ", style), (finding.kind, "bold"), rows, indent=2)
    yield _line(finding.advice, indent=4)
    for place in finding.places:
        detail = f"  {place.detail}" if place.detail else ""
        yield _line((f"{place.path}:{place.row}", "cyan"), (detail, "dim"), indent=4)
    if (more := finding.rows - len({(place.path, place.row) for place in finding.places})) > 0:
        yield _line((f"and {count(more, 'more row')}", "dim"), indent=4)


def _examples(
    examples: Sequence[ShownExample], max_seq_len: int, coloured: bool
) -> Iterator[Padding | Text]:
    if not examples:
        return
    marks: list[StyledPart] = ["⟦supervised⟧, all else is context"]
    if coloured:
        marks = [("supervised", "bold green"), ("  context", "dim"), "  ", ("control", "magenta")]
    yield _line(("Rows as the model sees them  ", "bold"), *marks)
    for example in examples:
        part = f"part {example.part} of {example.parts}, " if example.parts > 1 else ""
        facts = (
            f"  {part}{example.split}, {count(example.tokens, 'token')}, "
            f"{example.supervised:,} supervised"
        )
        kinds = f"  {', '.join(example.kinds)}" if example.kinds else ""
        place = f"{example.path}:{example.row}"
        yield Text()
        yield _line(("── ", "dim"), (place, "cyan"), facts, (kinds, "yellow"))
        yield _example_text(example.pieces, coloured)
        if example.cut:
            verb = "is" if example.cut == 1 else "are"
            more = f"{count(example.cut, 'more token')} {verb} beyond --max-seq-len {max_seq_len}"
            yield _line((f"... {more}", "yellow"))


def _example_text(pieces: Sequence[Piece], coloured: bool) -> Text:
    """Return pieces as text, the middle of many left out."""
    runs = list(visible.stretches(pieces))
    start, end = visible.middle_of(pieces, _HEAD, _TAIL)
    text = _styled(runs[:start], coloured)
    if start < end:
        tokens = count(sum(piece.tokens for piece in pieces[start:end]), "token")
        text.append(f"\n... {tokens} not shown here ...\n", "yellow")
        text.append_text(_styled(runs[end:], coloured))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _styled(runs: Iterable[tuple[Piece, list[visible.Stretch]]], coloured: bool) -> Text:
    text = Text()
    for supervised, run in groupby(runs, key=lambda pair: pair[0].supervised):
        bracketed = supervised and not coloured
        text.append("⟦" if bracketed else "")
        for piece, parts in run:
            for kind, words in parts:
                shown = "·" * len(words) if kind == "space" else _MARKS.get(kind, words)
                text.append(shown, _style(piece, kind))
        text.append("⟧" if bracketed else "")
    return text


_MARKS: dict[visible.Kind, str] = {"newline": "↵\n", "tab": "→   "}


def _style(piece: Piece, kind: visible.Kind) -> str:
    if kind == "escape":
        return "bold red underline" if piece.supervised else "bold red"
    if piece.control:
        return "bold green reverse" if piece.supervised else "magenta"
    return "bold green" if piece.supervised else "dim"
