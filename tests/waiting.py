"""Wait for a condition in tests, even on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only a failing test waits this long.
SECONDS = 180


def wait_until(happens: Callable[[], bool]) -> None:
    """Wait until the function returns True; fail after SECONDS."""
    started = time.monotonic()
    while not happens():
        assert time.monotonic() - started < SECONDS
        time.sleep(0.005)
