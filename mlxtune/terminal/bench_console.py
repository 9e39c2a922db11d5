"""A benchmark on a terminal: how far it has come, then its table."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from mlxtune.core.reports import benchmark_text
from mlxtune.core.runs.benchmark import Benchmark

_PIPE_WIDTH = 160


class Progress:
    """Says on a terminal which step of which run is under way; elsewhere nothing."""

    def __init__(self, steps: int, console: Console, *, quiet: bool) -> None:
        self._steps = steps
        shown = console.is_terminal and not console.is_dumb_terminal and not quiet
        self._status = Status("starting", console=console) if shown else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def on_step(self, side: str, run: int, done: int) -> None:
        """Show how many steps a run of a side has taken."""
        if self._status is not None:
            self._status.update(Text(f"{side}, run {run}: step {done}/{self._steps}"))


def show_benchmark(benchmark: Benchmark, console: Console) -> None:
    """Print the table of a benchmark, and what has to be said of it."""
    head, *rows = benchmark_text.table(benchmark)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(head):
        table.add_column(Text(name), justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if not console.is_terminal:
        # Cells stay whole, as lines do.
        console.width = _PIPE_WIDTH
    console.print(Text(benchmark_text.title(benchmark), "bold"), soft_wrap=True)
    console.print(table)
    for line in benchmark_text.remarks(benchmark):
        console.print(Text(line), soft_wrap=True)
