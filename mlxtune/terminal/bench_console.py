"""The table of a benchmark on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxtune.core.reports import benchmark_text
from mlxtune.core.runs.benchmark import Benchmark

_PIPE_WIDTH = 160


def show_benchmark(benchmark: Benchmark, console: Console) -> None:
    """Print the table of a benchmark, and remarks on it."""
    head, *rows = benchmark_text.table(benchmark)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(head):
        table.add_column(Text(name), justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if not console.is_terminal:
        # Cells stay whole in a pipe, as lines do.
        console.width = _PIPE_WIDTH
    console.print(Text(benchmark_text.title(benchmark), "bold"), soft_wrap=True)
    console.print(table)
    for line in benchmark_text.remarks(benchmark):
        console.print(Text(line), soft_wrap=True)
