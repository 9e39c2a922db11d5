"""When a checkpoint is due, and what happens if the disk refuses it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.files.writing import write_file
from mlxtune.core.run.checkpoint import write_checkpoint
from mlxtune.core.run.saving import CheckpointContent, CheckpointSaver
from mlxtune.errors import OutputError


class Disk:
    """A disk that may be full, with a clock."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now = 0.0
        self.full = False
        self.warnings: list[str] = []
        self.saved: list[str] = []
        given = {"every_steps": None, "every_minutes": 10.0, "keep": 2}
        given |= {"epochs": 6, "every_epochs": 4}
        self.saver = CheckpointSaver(
            folder,
            on_saved=lambda path: self.saved.append(path.name),
            on_problem=self.warnings.append,
            clock=lambda: self.now,
            **given | options,
        )

    def write(self, folder: Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(folder / "adapters.safetensors", [b"adapter"])

    def content(self, step: int) -> CheckpointContent:
        return CheckpointContent(self.write, {"step": step}, list)

    def is_due(self, step: int) -> bool:
        return self.saver.is_due(step) or self.saver.asks_for_save(step, halved=False)

    def save(self, step: int) -> None:
        self.saver.try_save(f"step-{step}", self.content(step))

    def save_best(self, step: int) -> None:
        self.saver.save_best(self.content(step))


def test_checkpoint_is_due_after_steps_or_minutes(tmp_path: Path) -> None:
    disk = Disk(tmp_path, every_steps=5)
    assert not disk.is_due(4)
    assert disk.is_due(5)
    disk.save(5)
    assert not disk.is_due(9)
    assert disk.is_due(10)
    disk.now = 599.9
    assert not disk.is_due(6)
    disk.now = 600.0
    assert disk.is_due(6)
    disk.save(6)
    assert not disk.is_due(7)


def test_checkpoint_that_all_workers_know_is_due_is_not_requested(tmp_path: Path) -> None:
    saver = Disk(tmp_path, every_steps=5).saver
    assert [saver.asks_for_save(step, halved=True) for step in (4, 5)] == [True, False]
    assert [saver.is_due(step) for step in (4, 5)] == [False, True]


@pytest.mark.parametrize(("epochs", "saved"), [(4, [1, 2, 3, 4]), (9, [4, 8])])
def test_long_run_saves_only_some_epochs(tmp_path: Path, epochs: int, saved: list[int]) -> None:
    saver = Disk(tmp_path, epochs=epochs, every_steps=1).saver
    assert [epoch for epoch in range(1, epochs + 1) if saver.is_due_at_end(epoch)] == saved


def test_checkpoint_is_never_due_by_minutes_when_these_are_turned_off(tmp_path: Path) -> None:
    disk = Disk(tmp_path, every_minutes=0.0)
    disk.now = 1e9
    assert not disk.is_due(10**6)


def test_failed_checkpoint_is_retried_after_a_minute_and_reported_once(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path)
    disk.full, disk.now = True, 600.0
    disk.save(1)
    assert (disk.saved, len(disk.warnings)) == ([], 1)
    disk.now = 659.0
    assert not disk.is_due(2)
    disk.now = 660.0
    assert disk.is_due(2)
    disk.save(2)
    assert len(disk.warnings) == 1

    disk.full, disk.now = False, 720.0
    disk.save(3)
    assert disk.saved == ["step-3"]
    assert not disk.is_due(4)
    # A new failure gives a new warning.
    disk.full = True
    disk.save(5)
    assert len(disk.warnings) == 2


def test_nothing_is_written_after_a_missing_best_checkpoint(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path)
    disk.full = True
    disk.save_best(3)
    disk.save(4)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError):
        disk.saver.save("step-5", disk.content(5))
    with pytest.raises(OutputError):
        disk.saver.finish()

    disk.full = False
    disk.save(6)
    assert disk.saved == ["best", "step-6"]
    disk.saver.finish()
    assert disk.saved == ["best", "step-6"]


def test_old_checkpoints_are_removed_but_foreign_files_kept(
    tmp_path: Path,
) -> None:
    left = (".step-0.old", ".step-5.old", ".mlxtune-best.0123456789abcdef.tmp")
    for name in ("step-1", "epoch-1", *left):
        write_checkpoint(tmp_path / name, Disk(tmp_path).write, {"step": 1})
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-2").symlink_to(tmp_path / "elsewhere")
    for name in ("step-notes", "step-3", ".notes.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_text("mine")
    disk = Disk(tmp_path, keep=3)
    disk.saver.resume(tmp_path / "epoch-1", [tmp_path / "epoch-1"], 1)
    disk.save_best(1)
    for step in (5, 6, 7):
        disk.save(step)

    kept = {path.name for path in tmp_path.iterdir()}
    assert kept - {"best", "step-5", "step-6", "step-7"} == {
        *("notes.txt", "elsewhere", "step-2", "step-notes", "step-3", ".notes.tmp"),
        # No new checkpoint has replaced this one.
        ".step-0.old",
    }
