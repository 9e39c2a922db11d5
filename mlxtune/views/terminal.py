"""Tables on a terminal, and the table of runs."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlxtune.core.formatting import loss_text, minute_of
from mlxtune.core.run.summary import REWARD_MEASURE, RunView
from mlxtune.errors import printable
from mlxtune.views.pages.axis import spans_much
from mlxtune.views.visible import escape

# Wide enough that no line wraps in a pipe.
_PIPE_WIDTH = 10_000
_BLOCKS = "▁▂▃▄▅▆▇█"
# The columns that a narrow terminal drops, in this order.
_DROPPED_COLUMNS = (
    *("train", "tok/s", "model", "data", "started", "objective", "steps", "curve", "val loss"),
)
_MAX_NAME_CHARS = 32


def result_console(*, stderr: bool = False) -> Console:
    """Return a console for results, which wraps lines on a terminal but not in a pipe."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def styled(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Return a table without borders, right-aligned except for its first column."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(headings):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(styled, row))
    return table


def show_runs(runs: Sequence[RunView], console: Console) -> None:
    """Print a table of runs, with the columns that fit the terminal.

    Below the table are the adapters, the commands that resume unfinished runs, and damaged folders.
    """
    rows = [_cells(each) for each in runs]
    columns = list(rows[0])
    if all(each.objective == "sft" for each in runs):
        columns.remove("objective")
    unlimited = console.options.update(width=_PIPE_WIDTH)
    for name in ("", *_DROPPED_COLUMNS):
        columns = [column for column in columns if column != name]
        table = plain_table(columns, ([row[column] for column in columns] for row in rows))
        if console.is_terminal:
            table.columns[0].max_width = _MAX_NAME_CHARS
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
    console.print(table)
    lists = {
        "adapters": [run.adapter for run in runs if run.adapter],
        "to resume": [run.resume for run in runs if run.resume],
        "damaged": [f"{run.folder}: {run.problems[0]}" for run in runs if run.problems],
    }
    for title, lines in lists.items():
        if lines:
            console.print(f"\n{title}:")
            for line in lines:
                console.print(styled(f"  {escape(line)}"), soft_wrap=True)


def _cells(run: RunView) -> dict[str, str]:
    before, best, text = run.initial_val_loss, run.best_val_loss, run.validation_text
    validated = before is not None or best is not None
    more = f" +{len(run.data) - 1}" if len(run.data) > 1 else ""
    speed, kind = run.tokens_per_second, " reward" * (run.measure == REWARD_MEASURE)
    train = (
        loss_text(run.reward_change.last) + kind if run.reward_change else loss_text(run.train_loss)
    )
    return {
        "run": escape(run.name),
        "started": minute_of(run.started) or "–",
        "model": escape(run.model) or "–",
        "data": escape(run.data[0]) + more if run.data else "–",
        "objective": escape(run.objective),
        "steps": run.steps,
        "train": train,
        "val loss": f"{text(before)} → {text(best)}{kind}" if validated else "–",
        "curve": sparkline(run.curve),
        "tok/s": "–" if speed is None else f"{speed:,.0f}",
    }


def sparkline(values: Sequence[float]) -> str:
    """Draw values as blocks of eight heights, on a linear or logarithmic scale as in charts."""
    if spans_much(values):
        values = [math.log(value) for value in values]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high == low:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / (high - low)))] for value in values)
