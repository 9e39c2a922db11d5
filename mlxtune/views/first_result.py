"""Reports that MLX compiles a GPU's kernels if the first result is late."""

import threading
from collections.abc import Callable
from typing import Protocol

SECONDS = 5.0
COMPILING = (
    f"no result for {SECONDS:.0f} s: MLX compiles a GPU's kernels at their first use, some for "
    "tens of seconds, and keeps them"
)


class Timer(Protocol):
    """A timer that calls its function once, unless it is cancelled."""

    def cancel(self) -> None:
        """Stop the timer."""


def start_timer(seconds: float, act: Callable[[], None]) -> Timer:
    """Start a timer that calls `act` in its own thread, and that no process waits for."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


class FirstResult:
    """Calls `late` if no result arrives within SECONDS after the call of `wait`.

    Once a result has arrived, or `late` was called, later waits do nothing: kernels are compiled.
    """

    def __init__(
        self,
        late: Callable[[], None],
        start: Callable[[float, Callable[[], None]], Timer] = start_timer,
    ) -> None:
        self._on_late, self._start = late, start
        self._timer: Timer | None = None
        self._over = False

    def wait(self) -> None:
        """Start to wait for a result."""
        if self._timer is None and not self._over:
            self._timer = self._start(SECONDS, self._be_late)

    def arrived(self) -> None:
        """Note that a result has arrived, if one was waited for."""
        self._over = self._over or self._timer is not None
        self.stop()

    def stop(self) -> None:
        """Stop waiting, without a result."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _be_late(self) -> None:
        # A timer that was cancelled too late to stop it must stay silent.
        if self._timer is not None:
            self._over, self._timer = True, None
            self._on_late()
