"""Counts, sizes, losses and times in a readable form."""

from collections.abc import Iterable


def pluralize(number: int, noun: str) -> str:
    """Return `1 row` or `2,000 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short_number(number: int) -> str:
    """Return 596M for 596,049,920, to three significant digits."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        # Rounding comes first: 999,999 is 1M, not 1000k.
        if (rounded := float(f"{number / size:.3g}")) >= 1:
            return f"{rounded:g}{suffix}"
    return str(number)


def byte_size(number: float) -> str:
    """Return `12 kB`, `3.4 MB` or `24 GB`, to three significant digits."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if (rounded := float(f"{number / size:.3g}")) >= 1:
            return f"{rounded:g} {unit}"
    return f"{max(number, 0):.0f} B"


def loss_text(loss: float | None) -> str:
    """Return a loss to three significant digits, or to one decimal from 10 up; `–` for None."""
    if loss is None:
        return "–"
    return f"{loss:#.3g}" if abs(loss) < 10 else f"{loss:,.1f}"


def signed_loss(change: float) -> str:
    """Format a change in loss, with its sign."""
    return ("−" if change < 0 else "+") + loss_text(abs(change))


def duration(seconds: float) -> str:
    """Return `12.3s`, `4m 05s` or `2h 05m`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, whole = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {whole:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def short_duration(seconds: float) -> str:
    """Return `1.23 s` or `12.3 ms`, to three significant digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def minute_of(time: str) -> str:
    """Return a time in ISO 8601 as `2026-03-04 05:06`."""
    return time[:16].replace("T", " ")


def sentence(line: str) -> str:
    """Return a line with a capital letter and a full stop."""
    return f"{line[0].upper()}{line[1:]}."


def join_few(values: Iterable[str], most: int = 5) -> str:
    """Return the first few names and the number of the rest: `a, b and 3 more`."""
    names = list(values)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def format_name(quantize: str, double_quant: bool = False) -> str:
    """Return the name of a format of weights, including double quantisation if it applies."""
    name = f"{quantize} bits" if quantize.isdecimal() else quantize
    return f"{name} with double quantisation" if double_quant else name
