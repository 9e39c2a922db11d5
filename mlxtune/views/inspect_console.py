"""An inspection on a terminal: the contents of the page, legible without colour too."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from mlxtune.core.data.findings import Finding
from mlxtune.core.data.inspection import Inspection, Piece, ShownExample
from mlxtune.core.text import count
from mlxtune.views import visible
from mlxtune.views.output import render_lines

# The number of pieces printed at each end of a long example.
_HEAD, _TAIL = 240, 80
_EXAMPLES = 3
_MARKS: dict[visible.Kind, str] = {"newline": "↵\n", "tab": "→   "}


def show_inspection(
    inspection: Inspection, console: Console, *, examples: Sequence[ShownExample] | None = None
) -> None:
    """Print an inspection; without `examples`, three rows, rows with findings first.

    Control characters in the data are escaped.
    """
    for line in _summary(inspection):
        console.print(_line(line) if line else "", overflow="fold")
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


def _line(markup: str) -> Padding:
    """Return a line of rich's markup, whose continuation keeps its indentation."""
    text = Text.from_markup(markup.lstrip(" "), emoji=False)
    return Padding(text, (0, 0, 0, len(markup) - len(markup.lstrip(" "))), expand=False)


def _safe(value: object) -> str:
    """Return a value in rich's markup, with escapes for control characters."""
    return escape(visible.escape(str(value)))


def _summary(inspection: Inspection) -> list[str]:
    """Return all but the examples as lines of rich's markup."""
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
    """Return the cells of a row, aligned to the right but for the first."""
    texts = [each if isinstance(each, str) else f"{each:,}" for each in cells]
    return f"{texts[0]:<12}" + "".join(f"{text:>16}" for text in texts[1:])


def _sums(ledger: Mapping[str, Any]) -> list[tuple[int, str, list[tuple[int, str]]]]:
    """Return the sums of a ledger: a whole, its name, and its parts with theirs."""
    reasons = ledger["rows_skipped"]
    skipped = sum(reasons.values())
    rows = [(ledger[f"rows_{name}"], name) for name in ("train", "validation")]
    kinds = ("supervised", "context", "truncated")
    tokens = [(ledger[f"tokens_{name}"], name) for name in kinds]
    why = [(skipped, "skipped", [(number, reason) for reason, number in sorted(reasons.items())])]
    return [
        (ledger["rows_read"], "rows read", [*rows, (skipped, "skipped")]),
        *(why if skipped else []),
        (ledger["tokens"], "tokens", tokens),
    ]


def _places(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield the rows of a finding and its evidence; the path of several only once."""
    before = ""
    for place in finding.places:
        number = place.where.removeprefix(place.path)
        shown = " " * len(place.path) + number if before == place.path else place.where
        yield shown, place.detail.replace(place.path, "")
        before = place.path


def _more(finding: Finding) -> int:
    return finding.rows - len({(place.path, place.row) for place in finding.places})


def _examples(
    examples: Sequence[ShownExample], max_seq_len: int, coloured: bool
) -> Iterator[Padding | Text]:
    if not examples:
        return
    marks = "⟦supervised⟧, all else is context"
    if coloured:
        marks = "[bold green]supervised[/][dim]  context[/]  [magenta]control[/]"
    yield _line(f"[bold]Rows as the model sees them[/]  {marks}")
    for example in examples:
        part = f"part {example.part} of {example.parts}, " if example.parts > 1 else ""
        facts = (
            f"{part}{example.split}, {count(example.tokens, 'token')}, "
            f"{example.supervised:,} supervised"
        )
        kinds = f"  [yellow]{_safe(', '.join(example.kinds))}[/]" if example.kinds else ""
        place = f"[cyan]{_safe(example.where)}[/]"
        yield Text()
        yield _line(f"[dim]── [/]{place}  {_safe(facts)}{kinds}")
        yield _example_text(example.pieces, coloured)
        if example.cut:
            verb = "is" if example.cut == 1 else "are"
            more = f"{count(example.cut, 'more token')} {verb} beyond --max-seq-len {max_seq_len}"
            yield _line(f"[yellow]... {more}[/]")


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


def _style(piece: Piece, kind: visible.Kind) -> str:
    if kind == "escape":
        return "bold red underline" if piece.supervised else "bold red"
    if piece.control:
        return "bold green reverse" if piece.supervised else "magenta"
    return "bold green" if piece.supervised else "dim"
