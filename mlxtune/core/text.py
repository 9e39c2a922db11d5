"""Counts, numbers and durations as people read them."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """Return `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short_number(number: int) -> str:
    """Return 596M for 596,049,920, in three digits."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        # Rounded first: 999,999 is 1M and not 1000k.
        if (rounded := float(f"{number / size:.3g}")) >= 1:
            return f"{rounded:g}{suffix}"
    return str(number)


def duration(seconds: float) -> str:
    """Return `12.3s`, `4m 05s` or `2h 05m`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, whole = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {whole:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
