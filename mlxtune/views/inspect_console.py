"""Prints the content of an inspection's page on a terminal, with or without colour."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mlxtune.core.data.findings import Finding
from mlxtune.core.data.inspection import (
    Inspection,
    Piece,
    ShownExample,
    ShownPair,
    together,
)
from mlxtune.core.text import count
from mlxtune.views import visible
from mlxtune.views.output import render_lines

# The numbers of pieces printed at the start and at the end of a long example.
_HEAD, _TAIL = 240, 80
_EXAMPLES = 3
# The narrowest terminal for two columns.
_TWO_COLUMNS = 60
# The style of the text that differs between the two answers of a pair.
_DIFFERS = {"chosen": "bold black on green", "rejected": "bold white on red"}
_MARKS: dict[visible.Kind, str] = {"newline": "↵\n", "tab": "→   "}


def show_inspection(
    inspection: Inspection, console: Console, *, examples: Sequence[ShownExample] | None = None
) -> None:
    """Print an inspection; by default with three examples, preferably ones with findings.

    Control characters in the data are escaped.
    """
    for line in _summary(inspection):
        console.print(_line(line) if line else "", overflow="fold")
    coloured = console.color_system is not None and not console.no_color
    chosen = _choose(inspection.shown) if examples is None else examples
    beside = console.is_terminal and console.width >= _TWO_COLUMNS
    for text in _examples(chosen, inspection.max_seq_len, coloured, beside):
        console.print(text, overflow="fold")


def _choose(shown: Sequence[ShownExample]) -> Sequence[ShownExample]:
    """Return up to three examples, preferably with different findings, in the order of the file.

    A pair counts as one example.
    """
    items = [each.sides if isinstance(each, ShownPair) else (each,) for each in together(shown)]
    first = {item[0].kinds: item for item in reversed(items)}
    # Rank the first example of each set of findings first, and among equals those with findings.
    ranked = sorted(items, key=lambda item: (first[item[0].kinds] is not item, not item[0].kinds))
    return [each for item in sorted(ranked[:_EXAMPLES], key=items.index) for each in item]


def _line(markup: str) -> Padding:
    """Return a line of rich markup that keeps its indentation when it wraps."""
    text = Text.from_markup(markup.lstrip(" "), emoji=False)
    return Padding(text, (0, 0, 0, len(markup) - len(markup.lstrip(" "))), expand=False)


def _safe(value: object) -> str:
    """Return a value as text for rich markup, with its control characters escaped."""
    return escape(visible.escape(str(value)))


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
    tables = {"lengths": map(_columns, lengths), "limits": map(_columns, limits)}
    return render_lines(
        "inspection.txt", _safe, seen=inspection, sums=_sums, more=_more, places=_places, **tables
    )


def _columns(cells: Sequence[Any]) -> str:
    """Return a row's cells as one line of columns, right-aligned except for the first."""
    texts = [each if isinstance(each, str) else f"{each:,}" for each in cells]
    return f"{texts[0]:<12}" + "".join(f"{text:>16}" for text in texts[1:])


def _sums(ledger: Mapping[str, Any]) -> list[tuple[int, str, list[tuple[int, str]]]]:
    """Return the sums of a ledger: each total, its name, and its parts with their names."""
    reasons = ledger["rows_skipped"]
    skipped = sum(reasons.values())
    kept = [(ledger[f"rows_{name}"], name) for name in ("train", "validation")]
    kept += [(skipped, "skipped")]
    kinds = ("supervised", "context", "truncated")
    tokens = [(ledger[f"tokens_{name}"], name) for name in kinds]
    why = [(skipped, "skipped", [(number, reason) for reason, number in sorted(reasons.items())])]
    return [
        (ledger["rows_read"], f"{_noun(ledger['rows_read'], 'row')} read", kept),
        *(why if skipped else []),
        (ledger["tokens"], _noun(ledger["tokens"], "token"), tokens),
    ]


def _noun(number: int, noun: str) -> str:
    return count(number, noun).partition(" ")[2]


def _places(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield each place of a finding with its detail; a repeated path is left blank."""
    before = ""
    for place in finding.places:
        number = place.where.removeprefix(place.path)
        shown = " " * len(place.path) + number if before == place.path else place.where
        yield shown, place.detail.replace(place.path, "")
        before = place.path


def _more(finding: Finding) -> int:
    return finding.rows - len({(place.path, place.row) for place in finding.places})


def _examples(
    examples: Sequence[ShownExample], max_seq_len: int, coloured: bool, beside: bool
) -> Iterator[Padding | Text | Table]:
    if not examples:
        return
    shown = together(examples)
    pairs = any(isinstance(each, ShownPair) for each in shown)
    marks = f"⟦supervised⟧{', «only on this side»' if pairs else ''}, all else is context"
    if coloured:
        differs = (
            f"  [{_DIFFERS['chosen']}]only chosen[/]  [{_DIFFERS['rejected']}]only rejected[/]"
        )
        marks = "[bold green]supervised[/][dim]  context[/]  [magenta]control[/]"
        marks += differs if pairs else ""
    yield _line(f"[bold]Rows as the model sees them[/]  {marks}")
    for each in shown:
        yield Text()
        if isinstance(each, ShownPair):
            yield from _pair(each, coloured, beside)
        else:
            yield from _single(each, max_seq_len, coloured)


def _single(example: ShownExample, max_seq_len: int, coloured: bool) -> Iterator[Padding | Text]:
    facts = f"{count(example.tokens, 'token')}, {example.supervised:,} supervised"
    role = f"{example.role}, " if example.role != "answer" else ""
    yield _heading(example, role + facts)
    yield _example_text(example.pieces, coloured)
    if example.cut:
        verb = "is" if example.cut == 1 else "are"
        more = f"{count(example.cut, 'more token')} {verb} beyond --max-seq-len {max_seq_len}"
        yield _line(f"[yellow]... {more}[/]")


def _pair(pair: ShownPair, coloured: bool, beside: bool) -> Iterator[Padding | Text | Table]:
    """Yield the prompt of a pair, then its two answers, next to each other if `beside`."""
    common = pair.chosen.pieces[: pair.common]
    yield _heading(pair.chosen, f"{count(sum(p.tokens for p in common), 'token')} in common")
    yield _example_text(common, coloured)
    sides = []
    for side in pair.sides:
        facts = f"{side.role}: {side.supervised:,} supervised, {side.differing:,} differ"
        text = _example_text(side.pieces[pair.common :], coloured, side.role)
        sides.append(Text.assemble((facts, "bold"), "\n", text))
    if not beside:
        yield from sides
        return
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in sides:
        table.add_column(ratio=1, overflow="fold")
    table.add_row(*sides)
    yield table


def _heading(example: ShownExample, facts: str) -> Padding:
    part = f"part {example.part} of {example.parts}, " if example.parts > 1 else ""
    kinds = f"  [yellow]{_safe(', '.join(example.kinds))}[/]" if example.kinds else ""
    place = f"[cyan]{_safe(example.where)}[/]"
    return _line(f"[dim]── [/]{place}  {_safe(f'{part}{example.split}, {facts}')}{kinds}")


def _example_text(pieces: Sequence[Piece], coloured: bool, role: str = "") -> Text:
    """Return pieces as text, without the middle of a long text."""
    runs = list(visible.stretches(pieces))
    start, end = visible.middle_of(pieces, _HEAD, _TAIL)
    text = _styled(runs[:start], coloured, role)
    if start < end:
        tokens = count(sum(piece.tokens for piece in pieces[start:end]), "token")
        text.append(f"\n... {tokens} not shown here ...\n", "yellow")
        text.append_text(_styled(runs[end:], coloured, role))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _styled(runs: Iterable[tuple[Piece, list[visible.Stretch]]], coloured: bool, role: str) -> Text:
    text = Text()
    for supervised, run in groupby(runs, key=lambda pair: pair[0].supervised):
        bracketed = supervised and not coloured
        text.append("⟦" if bracketed else "")
        for differs, parts in groupby(run, key=lambda pair: pair[0].differs):
            quoted = differs and not coloured
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
        return _DIFFERS[role] + (" underline" if kind == "escape" else "")
    if kind == "escape":
        return "bold red underline" if piece.supervised else "bold red"
    if piece.control:
        return "bold green reverse" if piece.supervised else "magenta"
    return "bold green" if piece.supervised else "dim"
