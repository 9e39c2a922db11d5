"""Panics of Rust's libraries: an exception, and none of their text."""

from __future__ import annotations

import os
import threading

import pytest

from mlxtune.backend.text.tokenizer import PanicError, caught_panics


class PanicException(BaseException):
    """As Rust's binding names its own."""


def panic() -> None:
    os.write(2, b"thread '<unnamed>' panicked at src/lib.rs:1:1:\n")
    raise PanicException("index out of bounds")


def test_panic_is_an_exception_and_its_text_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PanicError, match="index out of bounds"), caught_panics():
        panic()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_else_is_shown(
    capfd: pytest.CaptureFixture[str], error: type[BaseException] | None
) -> None:
    try:
        with caught_panics():
            os.write(2, b"a message\n")
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert type(raised) is error
    assert capfd.readouterr().err == "a message\n"


def test_within_each_other_and_in_threads_stderr_comes_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with caught_panics():
            inside.set()
            done.wait(5)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(5)
    with pytest.raises(PanicError), caught_panics(), caught_panics():
        panic()
    done.set()
    thread.join()
    os.write(2, b"after\n")
    assert capfd.readouterr().err.endswith("after\n")


def test_no_descriptor_is_left_open() -> None:
    before = os.dup(0)
    os.close(before)
    for _ in range(3):
        with caught_panics():
            pass
    after = os.dup(0)
    os.close(after)
    assert after == before
