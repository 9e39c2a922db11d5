"""The first Ctrl-C requests a stop, and the second ends the process."""

from __future__ import annotations

import signal

import pytest

from mlxtune.session.interrupt import stop_on_interrupt


def test_first_interrupt_asks_to_stop_and_the_second_raises() -> None:
    told = []
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt(lambda: told.append("told")) as should_stop:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert told == ["told"]
    assert signal.getsignal(signal.SIGINT) is before
