"""An inspection on a terminal: the contents of the page, legible without colour too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mlxtune.core.data.findings import Finding
from mlxtune.core.data.inspection import Inspection, Piece, ShownExample
from mlxtune.core.reports import visible
from mlxtune.core.text import count, short_number

# How many pieces are printed at each end of a long example.
_HEAD, _TAIL = 240, 80
_EXAMPLES = 3
# Below this width, tables are transposed and numbers rounded.
_NARROW = 64
# A text, or a text and its style.
Part = str | tuple[str, str]


@dataclass(frozen=True)
class _Signs:
    """Marks for whitespace, and for supervised text without colour."""

    newline: str = "↵"
    space: str = "·"
    tab: str = "→"
    start: str = "⟦"
    end: str = "⟧"
    rule: str = "─"
    now: str = "▸"


_ASCII = _Signs("\\n", " ", "\\t", "[[", "]]", "-", ">")


def show_inspection(
    inspection: Inspection, console: Console, *, examples: Sequence[ShownExample] | None = None
) -> None:
    """Print an inspection; without `examples`, three rows, those with findings first.

    Lines wrap on a terminal and stay whole in a pipe. Control characters in the data are escaped.
    """
    view = _View(inspection, console)
    for section in (
        *(view.settings, view.ledgers, view.lengths),
        *(view.limits, view.cost, view.findings),
    ):
        section()
        view.line()
    view.examples(_choose(inspection.shown) if examples is None else examples)


def _choose(shown: Sequence[ShownExample]) -> Sequence[ShownExample]:
    """Return one example of each kind of finding, then others, in the order of the file."""
    kinds: set[str] = set()
    first = []
    for example in shown:
        if set(example.kinds) - kinds:
            first.append(example)
            kinds.update(example.kinds)
    ranked = first[: _EXAMPLES - 1] + [example for example in shown if example not in first]
    chosen = {id(example) for example in ranked[:_EXAMPLES]}
    return [example for example in shown if id(example) in chosen]


class _View:
    """The sections, each a method that prints."""

    def __init__(self, inspection: Inspection, console: Console) -> None:
        self._inspection = inspection
        self._console = console
        self._wraps = console.is_terminal and not console.is_dumb_terminal
        self._coloured = console.color_system is not None and not console.no_color
        self._narrow = console.width < _NARROW
        self._signs = _Signs() if self._encodes("".join(vars(_Signs()).values())) else _ASCII

    def _encodes(self, text: str) -> bool:
        return visible.escape_unencodable(text, self._console.encoding) == text

    def line(self, *parts: Part, indent: int = 0) -> None:
        """Print parts, with control characters escaped."""
        text = Text()
        for part in parts:
            words, style = (part, "") if isinstance(part, str) else part
            text.append(visible.escape(words), style)
        self._print(text, indent)

    def _print(self, text: Text, indent: int = 0) -> None:
        if not self._encodes(text.plain):
            text = self._encodable(text)
        if self._wraps:
            text.overflow = "fold"
            self._console.print(
                Padding(text, (0, 0, 0, indent), expand=False) if indent else text, highlight=False
            )
        else:
            for one in text.split("\n", allow_blank=True):
                self._console.print(
                    Text.assemble(" " * indent, one), soft_wrap=True, highlight=False
                )

    def _encodable(self, text: Text) -> Text:
        """Escape characters that the terminal's encoding lacks, and keep the styles."""
        escaped = Text()
        for one in text.divide(sorted({edge for s in text.spans for edge in (s.start, s.end)})):
            style = one.spans[0].style if one.spans else ""
            escaped.append(visible.escape_unencodable(one.plain, self._console.encoding), style)
        return escaped

    def _heading(self, text: str, note: str = "") -> None:
        self.line((text, "bold"), (f"  {note}" if note else "", "dim"))

    def settings(self) -> None:
        """Print the settings that the numbers are for."""
        parts: list[Part] = []
        for name in ("model", "template", "thinking", "turns"):
            parts += [(f"{name} ", "dim"), f"{getattr(self._inspection, name)}  "]
        self.line(*parts, ("--max-seq-len ", "dim"), str(self._inspection.max_seq_len))

    def ledgers(self) -> None:
        """Print where every row and every token went."""
        self._heading("Where every row went")
        for ledger in self._inspection.files:
            self._ledger(ledger)

    def _ledger(self, ledger: dict[str, Any]) -> None:
        reasons = ledger["rows_skipped"]
        skipped = sum(reasons.values())
        rows = [(ledger[f"rows_{name}"], name) for name in ("train", "validation")]
        kinds = ("supervised", "context", "truncated")
        self.line(ledger["path"], indent=2)
        self._sum(ledger["rows_read"], "rows read", [*rows, (skipped, "skipped")])
        if skipped:
            reason_counts = [(number, reason) for reason, number in sorted(reasons.items())]
            self._sum(skipped, "skipped", reason_counts)
        self._sum(ledger["tokens"], "tokens", [(ledger[f"tokens_{name}"], name) for name in kinds])
        if cut := ledger["rows_truncated"]:
            self.line((f"{count(cut, 'row')} truncated", "yellow"), indent=4)

    def _sum(self, number: int, name: str, terms: Sequence[tuple[int, str]]) -> None:
        adds_up = number == sum(term for term, _ in terms)
        parts: list[Part] = [(f"{number:,}", "bold"), f" {name}"]
        signs = [" = " if adds_up else " != ", *[" + "] * len(terms)]
        for sign, (term, what) in zip(signs, terms, strict=False):
            style = "bold yellow" if term and what in ("skipped", "truncated") else "bold"
            parts += [(sign, "dim" if adds_up else "bold red"), (f"{term:,}", style), f" {what}"]
        self.line(*parts, indent=4)

    def lengths(self) -> None:
        """Print how long the examples are."""
        inspection = self._inspection
        self._heading("Tokens of an example", f"of {inspection.examples:,}, before any cut")
        rows = [
            (name, *map(self._number, (one.p50, one.p95, one.max, round(one.mean), one.total)))
            for name, one in (("all", inspection.tokens), ("supervised", inspection.supervised))
        ]
        cells = [("", "median", "p95", "longest", "mean", "sum"), *rows]
        self._table(list(zip(*cells, strict=True)) if self._narrow else cells)

    def limits(self) -> None:
        """Print the losses under each limit."""
        self._heading("What --max-seq-len would cut", "a lost row has no supervised token left")
        cells: list[tuple[str, ...]] = [
            ("", "rows cut", "rows lost", "tokens cut", "supervised cut")
        ]
        current = None
        for i, limit in enumerate(self._inspection.limits, start=1):
            if limit.max_seq_len == self._inspection.max_seq_len:
                current = i
            sign = self._signs.now if i == current else " "
            numbers = (limit.rows_cut, limit.rows_lost, limit.tokens_cut, limit.supervised_cut)
            cells.append((f"{sign} {limit.max_seq_len:,}", *map(self._number, numbers)))
        self._table(cells, current)

    def _number(self, number: int) -> str:
        return short_number(number) if self._narrow else f"{number:,}"

    def _table(self, cells: Sequence[tuple[str, ...]], current: int | None = None) -> None:
        """Print cells; the first row and column are headings, the row `current` is bold."""
        table = Table.grid(padding=(0, 1 if self._narrow else 3, 0, 0))
        for i in range(len(cells[0])):
            table.add_column(justify="right" if i else "left", overflow="fold")
        for i, row in enumerate(cells):
            if self._narrow and i == 0:
                row = tuple(heading.replace(" ", "\n") for heading in row)
            style = "dim" if i == 0 else "bold" if i == current else ""
            table.add_row(*(Text(cell, style) for cell in row))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False), highlight=False)

    def cost(self) -> None:
        """Print the cost of an epoch."""
        inspection, cost = self._inspection, self._inspection.cost
        validation = f"; a validation reads {count(cost.validation_tokens, 'token')}"
        self.line(
            ("One epoch  ", "bold"),
            f"{count(cost.steps, 'step')} of {count(inspection.batch_size, 'row')}, "
            f"{count(cost.tokens, 'token')} through the model, "
            f"{cost.supervised:,} of them supervised{validation if cost.validation_tokens else ''}",
        )

    def findings(self) -> None:
        """Print the findings, errors first."""
        if not self._inspection.findings:
            self.line(("Findings  ", "bold"), "none")
            return
        self._heading("Findings")
        for finding in sorted(self._inspection.findings, key=lambda one: one.level != "error"):
            self._finding(finding)

    def _finding(self, finding: Finding) -> None:
        style = "bold red" if finding.level == "error" else "bold yellow"
        self.line(
            (f"{finding.level}: ", style),
            (finding.kind, "bold"),
            f" ({count(finding.rows, 'row')})" if finding.rows else "",
            indent=2,
        )
        self.line(finding.advice, indent=4)
        for place in finding.places:
            detail = f"  {place.detail}" if place.detail else ""
            self.line((f"{place.path}:{place.row}", "cyan"), (detail, "dim"), indent=4)
        if (more := finding.rows - len({(one.path, one.row) for one in finding.places})) > 0:
            self.line((f"and {count(more, 'more row')}", "dim"), indent=4)

    def examples(self, examples: Sequence[ShownExample]) -> None:
        """Print examples token by token."""
        if not examples:
            return
        if self._coloured:
            marks: list[Part] = [("supervised", "bold green"), ("  context", "dim"), "  "]
            marks.append(("control", "magenta"))
        else:
            marks = [f"{self._signs.start}supervised{self._signs.end}, all else is context"]
        self.line(("Rows as the model sees them  ", "bold"), *marks)
        for example in examples:
            self.line()
            self._example(example)

    def _example(self, example: ShownExample) -> None:
        part = f"part {example.part} of {example.parts}, " if example.parts > 1 else ""
        facts = (
            f"  {part}{example.split}, {count(example.tokens, 'token')}, "
            f"{example.supervised:,} supervised"
        )
        kinds = f"  {', '.join(example.kinds)}" if example.kinds else ""
        place = f"{example.path}:{example.row}"
        self.line((f"{self._signs.rule * 2} ", "dim"), (place, "cyan"), facts, (kinds, "yellow"))
        self._print(self._text(example.pieces))
        if example.cut:
            verb = "is" if example.cut == 1 else "are"
            limit = self._inspection.max_seq_len
            more = f"{count(example.cut, 'more token')} {verb} beyond --max-seq-len {limit}"
            self.line((f"... {more}", "yellow"))

    def _text(self, pieces: Sequence[Piece]) -> Text:
        runs = list(visible.stretches(pieces))
        start, end = visible.middle_of(pieces, _HEAD, _TAIL)
        text = self._run(runs[:start])
        if start < end:
            tokens = count(sum(piece.tokens for piece in pieces[start:end]), "token")
            text.append(f"\n... {tokens} not shown here ...\n", "yellow")
            text.append_text(self._run(runs[end:]))
        if text.plain.endswith("\n"):
            text.right_crop(1)
        return text

    def _run(self, runs: Iterable[tuple[Piece, list[visible.Stretch]]]) -> Text:
        text = Text()
        for supervised, run in groupby(runs, key=lambda pair: pair[0].supervised):
            bracketed = supervised and not self._coloured
            text.append(self._signs.start if bracketed else "")
            for piece, parts in run:
                for kind, words in parts:
                    text.append(self._shown(kind, words), self._style(piece, kind))
            text.append(self._signs.end if bracketed else "")
        return text

    def _shown(self, kind: visible.Kind, text: str) -> str:
        if kind == "newline":
            return self._signs.newline + "\n"
        if kind == "tab":
            return self._signs.tab + "   "
        return self._signs.space * len(text) if kind == "space" else text

    def _style(self, piece: Piece, kind: visible.Kind) -> str:
        if kind == "escape":
            return "bold red underline" if piece.supervised else "bold red"
        if piece.control:
            return "bold green reverse" if piece.supervised else "magenta"
        return "bold green" if piece.supervised else "dim"
