"""A run on a machine whose memory another run has reserved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import user_cache
from mlxtune.core.files.lock import Lock
from mlxtune.core.machine import reservation
from mlxtune.core.machine.reservation import reservations, reserve
from tests.command import Cli


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The ledger's folder on a machine with 8 GB, nearly all reserved by another run."""
    from mlxtune.backend.device import allocator

    monkeypatch.setattr(allocator, "capacity", lambda: 8 * 10**9)
    folder = user_cache() / "memory"
    lock = reserve(folder, 8 * 10**9 - 1000, 10**18, "/somewhere/checkpoints")
    yield folder
    lock.release()


def test_second_run_is_refused_with_its_need_and_the_holders(
    train: Cli, output: Path, full: Path
) -> None:
    error = train().error
    assert "holds 8 GB for /somewhere/checkpoints" in error
    assert "--wait" in error
    assert not output.parent.exists()


def test_second_run_with_ignore_ledger_trains(train: Cli, output: Path, full: Path) -> None:
    assert train("--ignore-ledger").code == 0
    assert output.is_file()
    assert len(list(full.glob("*.run"))) == 1  # only the other run's reservation is left


def test_plan_and_dry_run_reserve_nothing_and_are_not_refused(train: Cli, full: Path) -> None:
    assert train("--dry-run").code == 0
    assert len(list(full.glob("*.run"))) == 1


def test_second_run_that_waits_trains_when_the_first_has_ended(
    train: Cli, output: Path, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, tries = reservation.reserve, 0

    def end_first_run_before_third_try(*arguments: Any) -> Lock:
        nonlocal tries
        tries += 1
        if tries == 3:
            for path in full.glob("*.run"):
                path.unlink()
        return reserve(*arguments)

    monkeypatch.setattr(reservation, "reserve", end_first_run_before_third_try)
    monkeypatch.setattr(reservation, "POLL_SECONDS", 0.01)
    outcome = train("--wait")
    assert outcome.code == 0
    assert tries == 3
    assert outcome.err.count("warning: waiting: this run needs") == 1
    assert output.is_file()


def test_run_reserves_its_predicted_memory_until_its_end(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.step.pipeline import InstructPipeline

    folder, start = user_cache() / "memory", InstructPipeline.start_batch
    seen = []

    def watched(*args: Any, **options: Any) -> Any:
        seen.extend(reservations(folder))
        return start(*args, **options)

    monkeypatch.setattr(InstructPipeline, "start_batch", watched)
    assert train("--max-steps", 1).code == 0
    (held,) = seen
    assert held.pid == os.getpid()
    assert held.run == str(output.parent / "checkpoints")
    assert 10**5 < held.size < 10**9
    assert reservations(folder) == []


def test_ledger_that_cannot_be_kept_is_a_warning_and_no_error(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file in place of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcome = train("--no-cache")
    assert outcome.code == 0
    assert "other runs will not see the memory that this one takes" in outcome.err
    assert output.is_file()
