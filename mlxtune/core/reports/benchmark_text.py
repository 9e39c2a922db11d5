"""A benchmark as lines and table cells. Nothing here prints."""

from __future__ import annotations

from collections.abc import Callable

from mlxtune.core.runs.benchmark import Agreement, Benchmark, BenchmarkRun, Side, Spread
from mlxtune.core.text import byte_size, count, short_duration


def title(benchmark: Benchmark) -> str:
    """Return the model, device, steps and runs in a line."""
    return (
        f"{benchmark.model}, {benchmark.dtype} on {benchmark.device}: "
        f"{count(benchmark.steps, 'step')} of {count(benchmark.batch_size, 'row')}, "
        f"{count(len(benchmark.ours.runs), 'run')}"
    )


def run_line(side: str, run: BenchmarkRun) -> str:
    """Return the speed, memory and start-up time of a run in a line."""
    steps = Spread.of(step.seconds for step in run.steps)
    return (
        f"{side}: {run.per_second('tokens'):,.0f} tokens/s, {short_duration(steps.median)} a step, "
        f"peak {byte_size(run.peak_memory)}, {short_duration(run.startup_s)} to start"
    )


def table(benchmark: Benchmark) -> list[tuple[str, ...]]:
    """Return the rows of the table, the header first; a peer adds its column and the ratios."""
    sides = [side for side in (benchmark.ours, benchmark.theirs) if side is not None]
    ratios = benchmark.ratios()
    rows = [("", *(side.name for side in sides), *(["ratio"] if len(sides) > 1 else []))]
    for name, of, key in _QUANTITIES:
        cells = [of(side) if side.runs else "failed" for side in sides]
        of_both = spread(ratios[key], "", "#.3g") if key in ratios else ""
        rows.append((name, *cells, *([of_both] if len(sides) > 1 else [])))
    efficiency = spread(benchmark.efficiency(), "%", ".1f", 0.01)
    rows.append(("step efficiency", efficiency, *[""] * (len(rows[0]) - 2)))
    return rows


def remarks(benchmark: Benchmark) -> list[str]:
    """Return remarks on the comparison: whether losses agree, another loss function, a failure."""
    lines = []
    theirs = benchmark.theirs
    if (agreed := benchmark.agreement()) is not None:
        lines.append(agreement_line(agreed))
    if theirs is not None and theirs.runs and theirs.runs[0].loss_function == "masked":
        lines.append(
            f"{theirs.name} ran with a masked loss: its own supports one span a row, and some rows "
            "have several"
        )
    if theirs is not None and theirs.failed:
        lines.append(f"{theirs.name} failed: {theirs.failed}")
    return lines


def agreement_line(agreed: Agreement) -> str:
    """Return whether the losses agree, and how far they differ."""
    if agreed.first is None or agreed.largest is None:
        return "losses do NOT agree: one is not finite"
    verdict = "agree" if agreed.agree else "do NOT agree: the ratios compare different work"
    return (
        f"losses {verdict} (they differ by {agreed.first:.1e} at the first step, by up to "
        f"{agreed.largest:.1e} after; allowed: {agreed.first_tolerance:g} and {agreed.tolerance:g})"
    )


def spread(values: Spread, unit: str, form: str, size: float = 1) -> str:
    """Return `2.1 s (2.0-2.3)` for values in units of `size`, or one number if all are equal."""
    middle, low, high = (format(x / size, form) for x in (values.median, values.min, values.max))
    unit = f" {unit}" if unit and unit != "%" else unit
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}-{high})"


def _step_seconds(side: Side) -> str:
    steps = side.seconds_per_step
    return spread(steps, "ms", ".3g", 0.001) if steps.max < 1 else spread(steps, "s", ".3g")


def _rate(side: Side, tokens: str) -> str:
    return f"{side.per_second(tokens).median:,.0f}"


# The rows of the table: a name, the cell of a side, and the key of the ratio. Cells are medians
# over the runs; that of the steps is over all of them.
_QUANTITIES: tuple[tuple[str, Callable[[Side], str], str], ...] = (
    ("real tokens/s", lambda side: _rate(side, "tokens"), "real_tokens_per_s"),
    (
        "supervised tokens/s",
        lambda side: _rate(side, "supervised_tokens"),
        "supervised_tokens_per_s",
    ),
    ("a step", _step_seconds, ""),
    ("padding", lambda side: f"{side.spread('padding_share').median:.1%}", ""),
    ("peak memory", lambda side: byte_size(side.spread("peak_memory").median), "peak_memory"),
    ("peak of the process", lambda side: byte_size(side.spread("peak_rss").median), "peak_rss"),
    ("start", lambda side: short_duration(side.spread("startup_s").median), ""),
)
