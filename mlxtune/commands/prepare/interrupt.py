"""Ctrl-C and other signals: the first one stops the work at its next step."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from mlxtune.errors import Interrupted, TrainingInterrupted

# Ctrl-C; `kill` or a shutdown; a closed terminal.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_interrupt(
    notify: Callable[[], None] = lambda: None, signals: Sequence[signal.Signals] = _SIGNALS
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after a first signal, which also calls `notify`.

    A second signal ends the process as usual, SIGINT with KeyboardInterrupt. Outside the main
    thread, where Python cannot handle signals, nothing changes.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    # getsignal returns None for a handler that Python did not install.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in signals}
    # In a thread: the handler may interrupt the printing of a line, and consoles are safe to call
    # from another thread but not from within themselves.
    notifier = threading.Thread(target=notify, daemon=True)

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        for other in signals:
            # A process started in the background ignores SIGINT, but a second one is meant.
            default = signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL
            signal.signal(other, before[other] if callable(before[other]) else default)
        if number == signal.SIGHUP:
            # The terminal is gone: nobody reads the notice, and none can hang up again.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        else:
            notifier.start()

    for number in signals:
        # A process started with nohup outlives its terminal.
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    except TrainingInterrupted as interrupt:
        if received:
            interrupt.signal, interrupt.by_signal = received[0], True
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received and notifier.ident is not None:
            notifier.join()


@contextmanager
def end_in_order() -> Iterator[None]:
    """Have a signal that would end the process raise Interrupted, so that scratch is removed.

    A second one ends it as usual. Outside the main thread, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Others have their own handlers, or ignore the signal as under nohup.
    numbers = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL]

    def handle(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        interrupt = Interrupted()
        interrupt.signal = number
        raise interrupt

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
