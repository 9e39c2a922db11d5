"""Ctrl-C during training: the first asks the run to stop after its step, the second ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt(tell: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Within it, a first SIGINT calls `tell` and makes the yielded function return True.

    A second SIGINT raises KeyboardInterrupt as usual. Outside the main thread, where Python cannot
    handle signals, nothing is changed.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT)
    # In a thread: the handler may interrupt a line that is being printed, and whoever prints lines
    # is safe between threads but not within one.
    teller = threading.Thread(target=tell, daemon=True)

    def handle(number: int, frame: FrameType | None) -> None:
        asked.set()
        # A process started in the background ignores SIGINT; the second is meant all the same.
        signal.signal(signal.SIGINT, before if callable(before) else signal.default_int_handler)
        teller.start()

    signal.signal(signal.SIGINT, handle)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
        if asked.is_set():
            teller.join()
