"""Shows a benchmark on a terminal: a line for each run, and a table."""

from collections.abc import Callable

from rich.console import Console

from mlxtune.benchmark.result import Agreement, Benchmark, BenchmarkRun, Spread
from mlxtune.core.text import byte_size, count, short_duration
from mlxtune.views.tables import plain_table, shown


def show_benchmark(benchmark: Benchmark, console: Console) -> None:
    """Print the title, table and remarks of a benchmark."""
    head, *rows = table(benchmark)
    columns = plain_table(head)
    for row in rows:
        columns.add_row(*map(shown, row))
    title = (
        f"{benchmark.model}, {benchmark.dtype} on {benchmark.device}: "
        f"{count(benchmark.steps, 'step')} of {count(benchmark.batch_size, 'row')}, "
        f"{count(len(benchmark.ours.runs), 'run')}"
    )
    console.print(shown(title, "bold"), soft_wrap=True)
    console.print(columns)
    for line in remarks(benchmark):
        console.print(shown(line), soft_wrap=True)


def run_line(side: str, run: BenchmarkRun) -> str:
    """Return a line with the speed, memory and start-up time of a run."""
    step = Spread.of(step.seconds for step in run.steps).median
    return (
        f"{side}: {run.real_tokens_per_s:,.0f} tokens/s, {short_duration(step)} a step, "
        f"peak {byte_size(run.peak_memory)}, {short_duration(run.startup_s)} to start"
    )


def table(benchmark: Benchmark) -> list[tuple[str, ...]]:
    """Return the table's rows, the header first; with a peer, the last column has the ratios."""
    sides = [side for side in (benchmark.ours, benchmark.theirs) if side is not None]
    ratios = benchmark.ratios()
    rows = [("", *(side.name for side in sides), *(["ratio"] if len(sides) > 1 else []))]
    for name, key, show in _QUANTITIES:
        cells = [show(side.spread(key)) if side.runs else "failed" for side in sides]
        ratio = _range(ratios[key], "{:#.3g}".format) if key in ratios else ""
        rows.append((name, *cells, *([ratio] if len(sides) > 1 else [])))
    return rows


def remarks(benchmark: Benchmark) -> list[str]:
    """Return remarks on MLX's cache, on whether the losses agree, and on a peer's masked loss or
    failure.
    """
    lines = []
    if (ratio := benchmark.cache_ratio()) is not None:
        lines.append(
            f"with MLX's cache limited as in training: {ratio:.2f}x the speed of a cache that may "
            "fill the memory limit"
        )
    theirs = benchmark.theirs
    if (agreed := benchmark.agreement()) is not None:
        lines.append(agreement_line(agreed))
    if theirs is not None and theirs.runs and theirs.runs[0].loss_function == "masked":
        lines.append(
            f"{theirs.name} ran with a masked loss: its own loss supports one span per row, and "
            "some rows have several spans"
        )
    if theirs is not None and theirs.failed:
        lines.append(f"{theirs.name} failed: {theirs.failed}")
    return lines


def agreement_line(agreed: Agreement) -> str:
    """Return a line on whether the losses agree, and how far they differ."""
    if agreed.first is None or agreed.largest is None:
        return "losses do NOT agree: one is not finite"
    verdict = "agree" if agreed.agree else "do NOT agree: the ratios compare different work"
    return (
        f"losses {verdict} (they differ by {agreed.first:.1e} at the first step, later by up to "
        f"{agreed.largest:.1e}; allowed: {agreed.first_tolerance:g} and {agreed.tolerance:g})"
    )


def _range(values: Spread, show: Callable[[float], str]) -> str:
    """Return the median and range, as in `2.1 s (2 s-2.3 s)`; one number if both ends are equal."""
    middle, low, high = map(show, (values.median, values.min, values.max))
    return middle if low == high else f"{middle} ({low}-{high})"


# The rows of the table: a name, a quantity, and the function that formats its spread over runs.
_QUANTITIES: tuple[tuple[str, str, Callable[[Spread], str]], ...] = (
    ("real tokens/s", "real_tokens_per_s", lambda values: f"{values.median:,.0f}"),
    ("supervised tokens/s", "supervised_tokens_per_s", lambda values: f"{values.median:,.0f}"),
    ("a step", "seconds_per_step", lambda values: _range(values, short_duration)),
    ("padding", "padding_share", lambda values: f"{values.median:.1%}"),
    ("peak memory", "peak_memory", lambda values: byte_size(values.median)),
    ("peak of the process", "peak_rss", lambda values: byte_size(values.median)),
    ("start", "startup_s", lambda values: short_duration(values.median)),
)
