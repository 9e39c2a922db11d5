"""Ctrl-C and its like during training: the first asks the run to stop after its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from mlxtune.errors import TrainingInterrupted

# What ends a process: Ctrl-C, `kill` or a shutdown, a terminal that is closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stop:
    """Whether a run was asked to stop, and by which signal."""

    signal: int | None = None

    def __call__(self) -> bool:
        """Tell whether it was."""
        return self.signal is not None


@contextmanager
def stop_on_interrupt(tell: Callable[[], None]) -> Iterator[Stop]:
    """Within it, a first signal calls `tell` and makes the yielded function return True.

    A second one ends the process as usual, SIGINT with KeyboardInterrupt. Outside the main thread,
    where Python cannot handle signals, nothing is changed.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # None is what Python says of a handler that is not its own.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS}
    # In a thread: the handler may interrupt a line that is being printed, and whoever prints lines
    # is safe between threads but not within one.
    teller = threading.Thread(target=tell, daemon=True)

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        # A process started in the background ignores SIGINT; the second is meant all the same.
        interrupt = before[signal.SIGINT]
        signal.signal(
            signal.SIGINT, interrupt if callable(interrupt) else signal.default_int_handler
        )
        for other in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, before[other] if callable(before[other]) else signal.SIG_DFL)
        if number == signal.SIGHUP:
            # Nobody is there to be told, and none to hang up again.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        else:
            teller.start()

    for number in _SIGNALS:
        # What was started with nohup is meant to live on.
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield stop
    except TrainingInterrupted as interrupt:
        interrupt.signal = stop.signal or interrupt.signal
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if stop() and teller.ident is not None:
            teller.join()
