"""The checks and locks of a run's session, before any work."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.workers.launch import WorkerRun
from mlxtune.backend.workers.workers import Workers
from mlxtune.config import TrainConfig
from mlxtune.core.run import run_folder
from mlxtune.errors import MlxTuneError, OutputError
from mlxtune.session.arguments import ResolvedOptions
from mlxtune.session.run_session import RunSession, check_paths, lock_folder, trained_before
from mlxtune.views.console import RunConsole


def session_of(model: Path, chat: Path, **options: Any) -> RunSession:
    config = TrainConfig(str(model), (str(chat),), **options)
    run = WorkerRun(Workers(), config, RunConsole(quiet=True), first_on_machine=True)
    return RunSession(run, ResolvedOptions(config, frozenset()))


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("model", "the model's own folder: choose another --output"),
        ("chat.jsonl", "an adapter is a .safetensors file: name one, or a folder, as --output"),
        ("out/adapter_config.json", "overwritten with the adapter's config"),
    ],
)
def test_output_that_would_replace_other_files_is_refused(
    model: Path, chat: Path, tmp_path: Path, output: str, why: str
) -> None:
    path = model if output == "model" else tmp_path / output
    with pytest.raises(MlxTuneError, match=why):
        check_paths(session_of(model, chat, output=str(path)))


def test_lock_of_a_run_creates_no_folder_that_stays(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    session = session_of(model, chat, output=str(tmp_path / "out"))
    with ExitStack() as cleanup:
        lock_folder(session, cleanup)
        assert session.config.checkpoint_path.is_dir()
        with ExitStack() as other, pytest.raises(OutputError):
            lock_folder(session, other)
    assert not (tmp_path / "out").exists()


def test_unfinished_run_is_replaced_only_with_overwrite(
    model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "is_unfinished", lambda folder: True)
    with ExitStack() as cleanup, pytest.raises(OutputError, match="or start over with --overwrite"):
        lock_folder(session_of(model, chat, output=str(tmp_path / "out")), cleanup)
    with ExitStack() as cleanup:
        lock_folder(session_of(model, chat, output=str(tmp_path / "out"), overwrite=True), cleanup)


def test_new_run_has_no_rows_that_were_trained_on_before(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    assert len(trained_before(session_of(model, chat, output=str(tmp_path / "out")))) == 0
