"""Limits for code under attack: 10 s on the CPU and 1.5 GB of additional memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 10.0, 1_500_000_000


class TookTooLong(BaseException):
    """Raised when CPU time is up; not an Exception, so that no `except Exception` catches it."""


@contextmanager
def limited(seconds: float = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Raise an exception in code that exceeds the limits. Without /proc, memory is not limited."""

    def end(*_: Any) -> None:
        raise TookTooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, end)
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)
