"""One process at a time holds a lock, and none after its death."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from mlxtune.core.machine.lock import Held, Lock, holder_of
from tests.holders import hold_elsewhere

HOLDER = """
import sys
from pathlib import Path
from mlxtune.core.machine.lock import Lock
lock = Lock(Path(sys.argv[1]), {"run": "theirs"})
"""


def test_lock_is_held_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = Lock(path, {"run": "mine"})
    with pytest.raises(Held) as held:
        Lock(path)
    assert held.value.holder["pid"] == os.getpid()
    assert held.value.holder["run"] == "mine"
    assert holder_of(path) == held.value.holder

    lock.release()
    lock.release()
    assert holder_of(path) is None
    assert not path.exists()
    Lock(path).release()


def test_lock_of_another_process_says_who_it_is_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    process = hold_elsewhere(HOLDER, path)
    try:
        with pytest.raises(Held) as held:
            Lock(path)
        assert held.value.holder["pid"] == process.pid
        assert held.value.holder["run"] == "theirs"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # What it said is still in the file, and means nothing any more.
    assert json.loads(path.read_text())["pid"] == process.pid
    assert holder_of(path) is None
    Lock(path).release()


def test_lock_whose_holder_removes_the_file_while_it_is_opened_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    first = Lock(path)
    opened = os.open
    times = 0

    def open_late(*args: object, **options: object) -> int:
        nonlocal times
        times += 1
        descriptor: int = opened(*args, **options)  # type: ignore[arg-type]
        if times == 1:
            first.release()
        return descriptor

    monkeypatch.setattr(os, "open", open_late)
    second = Lock(path)
    assert times == 2
    assert path.exists()
    assert holder_of(path) is not None
    second.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 60_000])
def test_what_a_holder_says_may_be_anything(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".lock"
    lock = Lock(path)
    path.write_bytes(content)
    assert holder_of(path) == {}
    with pytest.raises(Held):
        Lock(path)
    lock.release()


def test_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic"):
        Lock(tmp_path / ".lock")
    assert (tmp_path / "theirs").read_text() == "precious"
