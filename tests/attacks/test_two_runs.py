"""Only the first of two runs that write to one place trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxtune.commands import train as recipe
from mlxtune.core.files.lock import Lock
from mlxtune.core.run import run_folder
from tests.attacks.test_files import snapshot
from tests.command import Cli


def test_folder_that_another_run_makes_meanwhile_is_locked(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, other = recipe.prepare_run, output.parent / "checkpoints"
    locks = []

    def overtaken(*arguments: Any, **options: Any) -> Any:
        other.mkdir(parents=True)
        locks.append(Lock(other / run_folder.LOCK))
        return prepare(*arguments, **options)

    monkeypatch.setattr(recipe, "prepare_run", overtaken)
    try:
        outcome = train("--max-steps", 1)
    finally:
        locks[0].release()
    assert outcome.code == 1
    assert "is training here" in outcome.err.splitlines()[-1]
    assert list(other.iterdir()) == []


def test_adapter_of_another_run_is_locked_wherever_its_checkpoints_are(
    train: Cli, output: Path, tmp_path: Path
) -> None:
    output.parent.mkdir(exist_ok=True)
    lock = run_folder.lock_output(output)
    assert lock is not None
    before = snapshot(output.parent)
    try:
        outcome = train("--max-steps", 1, "--checkpoint-dir", tmp_path / "second")
    finally:
        lock.release()
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].endswith(
        "is training here: wait until it ends, or choose another --output"
    )
    assert before.items() >= snapshot(output.parent).items()
    assert not (tmp_path / "second").exists()
    assert train("--max-steps", 1, "--checkpoint-dir", tmp_path / "second").code == 0
    assert not list(tmp_path.rglob("*.lock"))
