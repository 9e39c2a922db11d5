"""Handles Ctrl-C and other signals: the first signal stops the work at its next step."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlxtune.errors import Interrupted, TrainingInterrupted

# Sent by Ctrl-C, by `kill` or a shutdown, and when the terminal is closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_interrupt(
    notify: Callable[[], None] = lambda: None, signals: Sequence[signal.Signals] = _SIGNALS
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a signal has arrived; the first signal calls `notify`.

    A second signal ends the process as usual: SIGINT raises KeyboardInterrupt. Outside the
    main thread, Python cannot handle signals, and the function always returns False.
    """
    received: list[int] = []
    # Notify in a thread, because the handler may interrupt a method of a console, and consoles are
    # thread-safe but not reentrant.
    notifier = threading.Thread(target=notify, daemon=True)
    # A process started with nohup outlives its terminal.
    hung_up = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [each for each in signals if each != signal.SIGHUP or not hung_up]

    def handle(number: int, before: dict[int, Any]) -> None:
        received.append(number)
        for other, handler in before.items():
            # A background process ignores SIGINT, but a second SIGINT should end it.
            default = signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL
            signal.signal(other, handler if callable(handler) else default)
        if number == signal.SIGHUP:
            # The terminal is gone, so the notice has no reader, and no second SIGHUP will come.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        else:
            notifier.start()

    try:
        with _handled(numbers, handle):
            yield lambda: bool(received)
    except TrainingInterrupted as interrupt:
        if received:
            interrupt.signal, interrupt.by_signal = received[0], True
        raise
    finally:
        if received and notifier.ident is not None:
            notifier.join()


@contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Raise Interrupted on a signal that would end the process, so that scratch files are removed.

    A second signal ends the process as usual. Does nothing outside the main thread.
    """

    def handle(number: int, before: dict[int, Any]) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        interrupt = Interrupted()
        interrupt.signal = number
        raise interrupt

    # Other signals already have handlers, or are ignored as under nohup.
    with _handled([each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL], handle):
        yield


@contextmanager
def _handled(
    numbers: Sequence[int], handle: Callable[[int, dict[int, Any]], None]
) -> Iterator[None]:
    """Call `handle` with each signal and the previous handlers; restore the handlers at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # getsignal returns None for a handler that Python did not install.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    for number in numbers:
        signal.signal(number, lambda number, _: handle(number, before))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
