"""Runs on one machine share its memory; a refused run learns which runs hold it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from mlxtune.core.machine import reservation
from mlxtune.core.machine.reservation import reserve, reserve_when_free
from mlxtune.errors import MemoryLimitError
from tests.holders import hold_elsewhere

GB = 10**9
HOLDER = """
import sys
from pathlib import Path
from mlxtune.core.machine.reservation import reserve
lock = reserve(Path(sys.argv[1]), int(sys.argv[2]), 10**18, "their run")
"""


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_runs_that_fit_are_admitted_and_another_sees_the_reservations(
    tmp_path: Path,
) -> None:
    theirs = hold_elsewhere(HOLDER, tmp_path / "new" / "folder", 6 * GB)
    try:
        mine = reserve(tmp_path / "new" / "folder", 4 * GB, 10 * GB, "mine")
        with pytest.raises(MemoryLimitError) as refused:
            reserve(tmp_path / "new" / "folder", GB, 10 * GB, "another")
        for said in (
            "needs 1.0 GB of 10.0",
            f"process {theirs.pid} holds 6 GB for their run",
            f"process {os.getpid()} holds 4 GB for mine",
            "--wait",
            "--ignore-ledger",
        ):
            assert said in str(refused.value)
        mine.release()
        reserve(tmp_path / "new" / "folder", 4 * GB, 10 * GB, "another").release()
    finally:
        kill(theirs)


def test_reservation_of_a_dead_process_is_released(tmp_path: Path) -> None:
    kill(hold_elsewhere(HOLDER, tmp_path, 10 * GB))
    assert len(list(tmp_path.glob("*.run"))) == 1
    lock = reserve(tmp_path, 10 * GB, 10 * GB, "mine")
    assert list(tmp_path.glob("*.run")) == [lock.path]
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_sole_run_may_reserve_any_amount(tmp_path: Path) -> None:
    # The plan decides whether the run fits.
    reserve(tmp_path, 20 * GB, 10 * GB, "mine").release()


def test_waiting_run_is_admitted_when_the_other_ends(tmp_path: Path) -> None:
    theirs = hold_elsewhere(HOLDER, tmp_path, 10 * GB)
    told: list[str] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            kill(theirs)

    lock = reserve_when_free(tmp_path, GB, 10 * GB, "mine", told.append, sleep)
    assert len(slept) == 3
    (line,) = told
    assert line.startswith("waiting: ")
    assert f"process {theirs.pid} holds 10 GB" in line
    lock.release()


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x"}', '{"pid": 1, "bytes": -5, "run": ""}'])
def test_malformed_file_is_ignored(tmp_path: Path, content: str) -> None:
    lock = reserve(tmp_path, GB, 10 * GB, "mine")
    lock.path.write_text(content)
    reserve(tmp_path, 10 * GB, 10 * GB, "another").release()
    lock.release()


def test_mutex_held_by_another_process_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.core.files.lock import Lock

    monkeypatch.setattr(reservation, "_MUTEX_SECONDS", 0.05)
    door = Lock(tmp_path / "door.lock")
    with pytest.raises(TimeoutError):
        reserve(tmp_path, GB, 10 * GB, "mine")
    door.release()
