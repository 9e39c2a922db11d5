"""The folder of a run: archived for the next run, and checked before a run resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlxtune.core.files.writing import write_file
from mlxtune.core.run.checkpoint import ADAPTER, write_checkpoint
from mlxtune.core.run.run_folder import (
    MARK,
    STOP,
    StopRequest,
    archive_previous_run,
    find_resume_point,
    lock_run,
    remove_run,
    reopen,
    request_stop,
)
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import OutputError
from tests.attacks.attack import contents
from tests.core.training.fake_pipeline import CORPUS, FakePipeline, options


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != MARK)


def checkpoint_in(folder: Path, text: str) -> None:
    write_checkpoint(folder, lambda made: write_file(made / ADAPTER, [text.encode()]), {})


def run_in(folder: Path, text: str) -> None:
    for name in ("epoch-1", "epoch-12", "best", "step-7"):
        checkpoint_in(folder / name, text)
    (folder / MARK).write_text("")
    for name in FILES:
        (folder / name).write_text(text)


FILES = (
    *("metrics.jsonl", "ledger.json", "run.json", "result.json"),
    *("evaluation.json", "report.html"),
)
RUN = sorted(["best", "epoch-1", "epoch-12", "step-7", *FILES])


def test_earlier_run_is_set_aside_and_what_is_not_of_a_run_stays(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_in(folder, "first")
    (folder / "notes.txt").write_text("mine")

    assert archive_previous_run(folder) == folder / "previous-1"

    assert names_in(folder) == ["notes.txt", "previous-1"]
    assert names_in(folder / "previous-1") == RUN
    assert (folder / "previous-1" / "best" / ADAPTER).read_text() == "first"


def test_every_earlier_run_is_kept(tmp_path: Path) -> None:
    # An earlier version kept one run, under this name; the number of a removed run is not reused.
    run_in(tmp_path / "previous", "zeroth")
    for text in ("first", "second", "third", "fourth"):
        run_in(tmp_path, text)
        archive_previous_run(tmp_path)
        if text == "second":
            remove_run(tmp_path / "previous-1")

    kept = {"previous": "zeroth", "previous-2": "second", "previous-3": "third"}
    kept["previous-4"] = "fourth"
    assert names_in(tmp_path) == sorted(kept)
    for name, text in kept.items():
        assert names_in(tmp_path / name) == RUN
        assert (tmp_path / name / "metrics.jsonl").read_text() == text


def test_run_is_removed_without_earlier_ones_and_files_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_in(folder, "first")
    archive_previous_run(folder)
    run_in(folder, "second")
    (folder / "notes.txt").write_text("mine")
    remove_run(folder)
    assert names_in(folder) == ["notes.txt", "previous-1"]

    lock = lock_run(folder)
    with pytest.raises(OutputError, match=r"process .* is training here"):
        remove_run(folder)
    lock.release()
    (folder / "previous-1" / "best" / "model.pt").write_text("mine")
    with pytest.raises(OutputError, match="holds best, not written by mlxtune"):
        remove_run(folder / "previous-1")
    (folder / "previous-1" / "best" / "model.pt").unlink()
    (folder / "notes.txt").unlink()
    remove_run(folder / "previous-1")
    remove_run(folder)
    assert not folder.exists()


def test_folder_without_a_run_keeps_the_run_that_was_set_aside(tmp_path: Path) -> None:
    run_in(tmp_path, "first")
    archive_previous_run(tmp_path)

    assert archive_previous_run(tmp_path) is None
    assert archive_previous_run(tmp_path / "none") is None
    assert names_in(tmp_path / "previous-1") == RUN


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    "path",
    ["best/model.pt", "step-3/model.pt", "epoch-1", ".previous.moving/a"],
)
def test_foreign_file_is_an_error(tmp_path: Path, path: str, marked: bool) -> None:
    if marked:
        run_in(tmp_path / "other", "first")
        (tmp_path / MARK).write_text("")
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    name = path.partition("/")[0]
    with pytest.raises(OutputError, match=f"holds {name}, not written by mlxtune: move it away"):
        archive_previous_run(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [*FILES, "tracking.json"])
def test_files_with_a_runs_names_are_a_runs_where_the_folder_is_marked(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match=f"holds {name}, not written by mlxtune"):
        archive_previous_run(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_links_in_place_of_folders_are_not_followed(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for name in ("best", "step-1", ".previous.moving"):
        run_in(run, "first") if not run.exists() else None
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).symlink_to(mine)
        with pytest.raises(OutputError, match=name):
            archive_previous_run(run)
        (run / name).unlink()
    assert (mine / "notes.txt").read_text() == "mine"


def test_run_without_a_record_is_not_kept(tmp_path: Path) -> None:
    for name in (MARK, "run.json", "ledger.json"):
        (tmp_path / name).write_text("")
    assert archive_previous_run(tmp_path) is None
    assert names_in(tmp_path) == []


def test_taken_name_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "previous-7").write_text("mine")
    run_in(tmp_path, "first")
    assert archive_previous_run(tmp_path) == tmp_path / "previous-8"
    assert (tmp_path / "previous-7").read_text() == "mine"


def test_continuing_run_is_not_marked_as_ended(tmp_path: Path) -> None:
    run_in(tmp_path, "first")
    reopen(tmp_path)
    assert set(RUN) - set(names_in(tmp_path)) == {"result.json", "evaluation.json", "report.html"}
    (tmp_path / "report.html").mkdir()
    reopen(tmp_path)
    assert "report.html" in names_in(tmp_path)


@pytest.mark.parametrize("tracked", [True, False])
def test_folders_of_trackers_are_set_aside_with_the_run_that_they_are_of(
    tmp_path: Path, tracked: bool
) -> None:
    for name in ("tensorboard", "wandb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / MARK).write_text("")
    if tracked:
        (tmp_path / "tracking.json").write_text("{}")

    previous = archive_previous_run(tmp_path)

    assert previous is not None
    ours = {"tensorboard", "wandb", "tracking.json"} if tracked else set()
    assert set(names_in(previous)) == {"metrics.jsonl"} | ours
    assert (tmp_path / "wandb").exists() is not tracked


def test_checkpoint_whose_metrics_end_at_another_step_is_not_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    InstructTrainer(FakePipeline(), CORPUS, options(run)).train()
    found = find_resume_point(run)
    assert found is not None
    newest = found.checkpoint
    metrics = newest.metrics.splitlines(keepends=True)
    steps = [i for i, line in enumerate(metrics) if json.loads(line)["kind"] == "step"]
    content = {
        path.name: path.read_bytes()
        for path in newest.folder.iterdir()
        if path.name not in ("metrics.jsonl", "metadata.json", "manifest.json")
    }

    def fill(folder: Path) -> None:
        for name, data in content.items():
            (folder / name).write_bytes(data)

    # The files match their manifest, but the records stop a step short of the adapter.
    write_checkpoint(newest.folder, fill, newest.metadata, metrics[: steps[-1]])

    again = find_resume_point(run)
    assert again is not None
    assert again.checkpoint.folder != newest.folder
    assert "metrics end at step" in again.skipped[newest.folder]


@pytest.mark.parametrize("new", [True, False])
def test_nothing_is_locked_or_written_before_the_folder_is_known(tmp_path: Path, new: bool) -> None:
    names = ("metrics.jsonl", "run.json") if new else ("run.json",)
    for name in names:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / name).symlink_to(tmp_path / "mine")
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=r"holds .*run\.json, not written by mlxtune"):
        lock_run(tmp_path, new=new)
    assert contents(tmp_path) == before


def test_desktop_metadata_files_are_ignored(tmp_path: Path) -> None:
    run_in(tmp_path, "first")
    for folder in (tmp_path, tmp_path / "best"):
        (folder / ".DS_Store").write_text("")
    archive_previous_run(tmp_path)
    run_in(tmp_path, "second")
    assert archive_previous_run(tmp_path) is not None


def test_request_to_stop_is_received_once_and_removed(tmp_path: Path) -> None:
    heard: list[str] = []
    request = StopRequest(tmp_path, lambda: heard.append("stop"))
    lock = lock_run(tmp_path)
    assert not request()
    request_stop(tmp_path)
    assert [request(), request()] == [True, True]
    assert heard == ["stop"]
    assert not (tmp_path / STOP).exists()
    lock.release()


def test_request_to_stop_needs_a_process_that_trains(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no process is training here"):
        request_stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_request_to_an_earlier_run_does_not_stop_the_next(tmp_path: Path) -> None:
    (tmp_path / STOP).write_text("")
    lock_run(tmp_path).release()
    assert not (tmp_path / STOP).exists()


def test_link_in_place_of_a_request_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / STOP).symlink_to(tmp_path / "notes")
    assert not StopRequest(tmp_path, lambda: None)()
    assert (tmp_path / "notes").read_text() == "mine"
