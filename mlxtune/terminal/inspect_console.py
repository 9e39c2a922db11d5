"""An inspection on a terminal: the same as on the page, and legible without colour."""

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

# Of a long example, the pieces at its two ends are printed.
_HEAD, _TAIL = 240, 80
_EXAMPLES = 3
# Below this width, tables stand upright and numbers are rounded.
_NARROW = 64


@dataclass(frozen=True)
class _Signs:
    """How to mark what cannot be seen, and what is supervised where there is no colour."""

    newline: str = "↵"
    space: str = "·"
    tab: str = "→"
    start: str = "⟦"
    end: str = "⟧"
    rule: str = "─"
    now: str = "▸"


_ASCII = _Signs("\\n", " ", "\\t", "[[", "]]", "-", ">")


def show_inspection(
    inspection: Inspection,
    console: Console,
    *,
    examples: Sequence[ShownExample] | None = None,
) -> None:
    """Print an inspection; without `examples`, the rows of findings and the first, three in all.

    Lines wrap on a terminal and stay whole in a pipe. What data holds never acts on the terminal.
    """
    chosen = _chosen(inspection.shown) if examples is None else examples
    view = _View(inspection, console)
    for section in (
        view.settings,
        view.ledgers,
        view.lengths,
        view.limits,
        view.cost,
        view.findings,
    ):
        section()
        view.line()
    view.examples(chosen)


def _chosen(shown: Sequence[ShownExample]) -> Sequence[ShownExample]:
    """One of each kind of finding first, in the order of the file."""
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

    def line(self, *parts: str | tuple[str, str], indent: int = 0) -> None:
        """Print parts, each a text or a text and its style; they are shown, never obeyed."""
        text = Text()
        for part in parts:
            words, style = (part, "") if isinstance(part, str) else part
            text.append(visible.escape(words), style)
        self._print(text, indent)

    def _print(self, text: Text, indent: int = 0) -> None:
        if not self._encodes(text.plain):
            text = self._in_reach(text)
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

    def _in_reach(self, text: Text) -> Text:
        """Return a text with escapes for what the terminal's encoding lacks, styles kept."""
        reached = Text()
        for one in text.divide(sorted({edge for s in text.spans for edge in (s.start, s.end)})):
            style = one.spans[0].style if one.spans else ""
            reached.append(visible.escape_unencodable(one.plain, self._console.encoding), style)
        return reached

    def _heading(self, text: str, note: str = "") -> None:
        self.line((text, "bold"), (f"  {note}" if note else "", "dim"))

    def settings(self) -> None:
        """What the numbers hold for."""
        inspection = self._inspection
        pairs = {
            "model": inspection.model,
            "template": inspection.template,
            "thinking": inspection.thinking,
            "turns": inspection.turns,
        }
        parts: list[str | tuple[str, str]] = []
        for name, value in pairs.items():
            parts += [(f"{name} ", "dim"), f"{value}  "]
        self.line(*parts, ("--max-seq-len ", "dim"), str(inspection.max_seq_len))

    def ledgers(self) -> None:
        """Where every row and every token went."""
        self._heading("Where every row went")
        for ledger in self._inspection.files:
            self._ledger(ledger)

    def _ledger(self, ledger: dict[str, Any]) -> None:
        skipped = ledger["rows_skipped"]
        self.line(ledger["path"], indent=2)
        self._sum(
            (ledger["rows_read"], "rows read"),
            [
                (ledger["rows_train"], "train"),
                (ledger["rows_validation"], "validation"),
                (sum(skipped.values()), "skipped"),
            ],
        )
        if skipped:
            self._sum(
                (sum(skipped.values()), "skipped"),
                [(number, kind) for kind, number in sorted(skipped.items())],
            )
        self._sum(
            (ledger["tokens"], "tokens"),
            [
                (ledger["tokens_supervised"], "supervised"),
                (ledger["tokens_context"], "context"),
                (ledger["tokens_truncated"], "truncated"),
            ],
        )
        if cut := ledger["rows_truncated"]:
            self.line((f"{count(cut, 'row')} truncated", "yellow"), indent=4)

    def _sum(self, whole: tuple[int, str], terms: Sequence[tuple[int, str]]) -> None:
        number, name = whole
        adds_up = number == sum(term for term, _ in terms)
        parts: list[str | tuple[str, str]] = [(f"{number:,}", "bold"), f" {name}"]
        signs = [" = " if adds_up else " != ", *[" + "] * len(terms)]
        for sign, (term, what) in zip(signs, terms, strict=False):
            style = "bold yellow" if term and what in ("skipped", "truncated") else "bold"
            parts += [(sign, "dim" if adds_up else "bold red"), (f"{term:,}", style), f" {what}"]
        self.line(*parts, indent=4)

    def lengths(self) -> None:
        """How long the examples are."""
        inspection = self._inspection
        self._heading("Tokens of an example", f"of {inspection.examples:,}, before any cut")
        rows = [
            (name, *map(self._number, (one.p50, one.p95, one.max, round(one.mean), one.total)))
            for name, one in (("all", inspection.tokens), ("supervised", inspection.supervised))
        ]
        cells = [("", "median", "p95", "longest", "mean", "sum"), *rows]
        self._table(list(zip(*cells, strict=True)) if self._narrow else cells)

    def limits(self) -> None:
        """What each limit would cut."""
        self._heading("What --max-seq-len would cut", "a lost row has no supervised token left")
        cells: list[tuple[str, ...]] = [
            ("", "rows cut", "rows lost", "tokens cut", "supervised cut")
        ]
        current = None
        for limit in self._inspection.limits:
            sign = " "
            if limit.max_seq_len == self._inspection.max_seq_len:
                sign, current = self._signs.now, len(cells)
            numbers = (limit.rows_cut, limit.rows_lost, limit.tokens_cut, limit.supervised_cut)
            cells.append((f"{sign} {limit.max_seq_len:,}", *map(self._number, numbers)))
        self._table(cells, current)

    def _number(self, number: int) -> str:
        return short_number(number) if self._narrow else f"{number:,}"

    def _table(self, cells: Sequence[tuple[str, ...]], current: int | None = None) -> None:
        """Print cells, of which the first row and column are names."""
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
        """What an epoch takes."""
        inspection, cost = self._inspection, self._inspection.cost
        validation = f"; a validation reads {count(cost.validation_tokens, 'token')}"
        self.line(
            ("One epoch  ", "bold"),
            f"{count(cost.steps, 'step')} of {count(inspection.batch_size, 'row')}, "
            f"{count(cost.tokens, 'token')} through the model, "
            f"{cost.supervised:,} of them supervised{validation if cost.validation_tokens else ''}",
        )

    def findings(self) -> None:
        """What is worth a look, errors first."""
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
        """Rows, token by token."""
        if not examples:
            return
        if self._coloured:
            marks: list[str | tuple[str, str]] = [
                ("supervised", "bold green"),
                ("  context", "dim"),
                "  ",
                ("control", "magenta"),
            ]
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
        head = f"{self._signs.rule * 2} "
        self.line(
            (head, "dim"), (f"{example.path}:{example.row}", "cyan"), facts, (kinds, "yellow")
        )
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
