"""Untrusted runs decide neither what is downloaded nor who learns of the downloads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.models import model_folder
from mlxtune.config import user_cache
from mlxtune.core.files import remembered
from mlxtune.core.run import checkpoint
from tests.command import Cli
from tests.hub_server import Hub
from tests.slow import slow

HUB = "evil/model"


def change(run: Path, working_directory: str = "", **options: Any) -> None:
    """Change options in a run's checkpoints, as the sender of the run might."""
    for folder in checkpoint.checkpoint_folders(run):
        metadata = json.loads((folder / "metadata.json").read_text())
        metadata["config"] |= {"epochs": 5, "max_steps": None, **options}
        if working_directory:
            metadata["working_directory"] = working_directory
        (folder / "metadata.json").write_text(json.dumps(metadata))
        (folder / "manifest.json").unlink()
        checkpoint.write_json(folder / "manifest.json", checkpoint._manifest(folder))


@pytest.fixture
def run(own_run: Path) -> Path:
    return own_run


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the requested models, none of which exists."""
    asked: list[str] = []

    def refuse(name: str, **_: object) -> str:
        asked.append(name)
        raise OSError("no such model")

    monkeypatch.setattr(model_folder.mlx_lm_utils, "snapshot_download", refuse)
    return asked


def copied(run: Path) -> Path:
    """Copy a run, as if another person had sent it."""
    return Path(shutil.copytree(run.parent, run.parent.with_name("received"))) / run.name


def without_mark(run: Path) -> Path:
    (run / remembered.MARK).unlink()
    return run


def with_old_mark(run: Path) -> Path:
    (run / remembered.MARK).write_text("")
    return run


def with_other_mark(run: Path) -> Path:
    (run / remembered.MARK).write_text("0" * 32 + "\n")
    return run


def with_long_mark(run: Path) -> Path:
    (run / remembered.MARK).write_text((run / remembered.MARK).read_text() * 2)
    return run


def with_several_marks(run: Path) -> Path:
    (run / remembered.MARK).write_text((user_cache() / "runs").read_text())
    return run


def with_linked_mark(run: Path) -> Path:
    (run / remembered.MARK).rename(run.parent / "mark")
    (run / remembered.MARK).symlink_to(run.parent / "mark")
    return run


def with_folder_as_mark(run: Path) -> Path:
    (without_mark(run) / remembered.MARK).mkdir()
    return run


def with_binary_mark(run: Path) -> Path:
    (run / remembered.MARK).write_bytes(b"\xff" * 33)
    return run


STRANGERS: dict[str, Callable[[Path], Path]] = {
    each.__name__: each
    for each in (
        *(copied, without_mark, with_old_mark, with_other_mark, with_long_mark),
        *(with_several_marks, with_linked_mark, with_folder_as_mark, with_binary_mark),
    )
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_run_without_this_users_mark_is_a_strangers(run: Path, stranger: str) -> None:
    assert remembered.is_own(run)
    assert not remembered.is_own(STRANGERS[stranger](run))


@pytest.mark.parametrize("options", [{"model_path": HUB}, {"track": ["wandb"]}], ids=str)
def test_strangers_run_names_neither_download_nor_tracker(
    cli: Cli, run: Path, downloads: list[str], options: dict[str, Any]
) -> None:
    change(run, **options)
    error = cli("train", "--resume", copied(run)).error
    assert "was not made by you on this machine" in error
    assert "--model-path evil/model" in error or "--track wandb (or --track '' for none)" in error
    assert downloads == []


@pytest.mark.parametrize(
    "options",
    [
        {"data": [f"{HUB}:train"]},
        {"val_data": HUB},
        {"data": [f"{HUB}=2"]},
        {"data": [f"{HUB}/main=0.5"]},
        {"data": [f"{HUB}:train=1e0"]},
    ],
    ids=str,
)
def test_strangers_run_names_no_data_to_download(
    cli: Cli, hub: Hub, run: Path, options: dict[str, Any]
) -> None:
    change(run, **options)
    received = copied(run)
    error = cli("train", "--resume", received).error
    assert "was not made by you on this machine" in error
    ((option, value),) = options.items()
    asked = value if isinstance(value, str) else value[0]
    assert error.endswith(f"--{option.replace('_', '-')} {asked}")
    assert "was not made by you" in cli("verify", received, "--replay").out
    assert hub.requests == []


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("checkpoints", "a/b"),
        ("adapters.safetensors", HUB),
        (".", "evil/model.v1-2_x"),
        ("checkpoints/best", "e/" + "m" * 90),
    ],
)
def test_untrusted_model_is_not_downloaded_by_any_run_name(
    cli: Cli, run: Path, downloads: list[str], place: str, name: str
) -> None:
    change(run, model_path=name)
    received = copied(run).parent / place
    assert f"--model-path {name}" in cli("train", "--resume", received).error
    outcome = cli("verify", received)
    assert outcome.code == 1
    assert "was not made by you" in outcome.out
    assert downloads == []


@pytest.mark.parametrize("track", ["wandb", ["wandb"] * 1000, ["x; rm -rf ~"], [["wandb"]]])
def test_strangers_trackers_are_asked_for_in_one_bounded_line(
    cli: Cli, run: Path, track: object
) -> None:
    change(run, track=track)
    error = cli("train", "--resume", copied(run)).error
    assert "was not made by you" in error
    assert len(error) < 600
    assert "--track x; rm" not in error


def test_options_of_a_foreign_run_must_be_repeated(
    cli: Cli, run: Path, model: Path, downloads: list[str]
) -> None:
    change(run, model_path=HUB, track=["wandb"])
    received = copied(run)
    assert "--track" in cli("train", "--resume", received, "--model-path", model).error
    assert "--model-path" in cli("train", "--resume", received, "--track", "").error
    again = ["--model-path", model, "--track", "", "--quiet", "--samples", 0]
    assert cli("train", "--resume", received, *again).code == 0
    assert downloads == []
    assert json.loads((received / "run.json").read_text())["config"]["track"] == []


def test_repeated_download_of_a_foreign_run_is_made(
    cli: Cli, run: Path, downloads: list[str]
) -> None:
    change(run, model_path=HUB)
    outcome = cli("train", "--resume", copied(run), "--model-path", HUB)
    assert "downloading it failed" in outcome.error
    assert downloads == [HUB]


def test_own_run_resumes_with_its_own_model_and_trackers(
    cli: Cli, run: Path, downloads: list[str]
) -> None:
    change(run, model_path=HUB)
    assert "downloading it failed" in cli("train", "--resume", run).error
    assert downloads == [HUB]


def test_moved_own_run_stays_own(run: Path) -> None:
    assert remembered.is_own(run)
    moved = run.parent.rename(run.parent.with_name("moved")) / run.name
    assert remembered.is_own(moved)
    assert not remembered.is_own(copied(moved))


def test_replaced_own_run_stays_own(train: Cli, run: Path) -> None:
    assert train("--max-steps", 1, "--overwrite").code == 0
    assert remembered.is_own(run)
    assert remembered.is_own(run / "previous-1")


def test_replaced_foreign_run_stays_foreign(train: Cli, run: Path) -> None:
    with_other_mark(run)
    assert train("--max-steps", 1, "--overwrite").code == 0
    assert remembered.is_own(run)
    assert not remembered.is_own(run / "previous-1")


def test_strangers_run_with_a_model_folder_resumes_unasked(
    cli: Cli, run: Path, downloads: list[str]
) -> None:
    change(run)
    assert cli("train", "--resume", copied(run), "--quiet", "--samples", 0).code == 0
    assert downloads == []


@pytest.mark.parametrize("damage", [slow("missing"), "folder", "binary", slow("unwritable")])
def test_damaged_cache_fails_no_run(train: Cli, run: Path, damage: str) -> None:
    cache = user_cache() / "runs"
    before = cache.read_bytes()
    cache.unlink()
    if damage == "folder":
        cache.mkdir()
    elif damage == "binary":
        cache.write_bytes(b"\xff\x00" * 1000)
    elif damage == "unwritable":
        cache.symlink_to("/dev/full")
    try:
        assert not remembered.is_own(run)
        assert train("--max-steps", 1, "--overwrite").code == 0
        assert remembered.is_own(run) == (damage in ("missing", "binary"))
        if damage == "folder":
            assert cache.is_dir(), "what is not ours is left"
    finally:
        if cache.is_dir():
            cache.rmdir()
        cache.unlink(missing_ok=True)
        cache.write_bytes(before)


def test_list_of_own_runs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "_MAX_LINES", 10)
    runs = [tmp_path / f"run{number}" for number in range(11)]
    for run in runs:
        run.mkdir()
        remembered.mark(run)
    assert [remembered.is_own(run) for run in runs] == [False] * 6 + [True] * 5


@pytest.mark.parametrize(
    "command",
    [("fuse", "--adapter"), ("export", "--format", "mlx-lm", "--adapter"), ("import",)],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("own", [False, True])
def test_base_that_a_strangers_adapter_names_is_not_downloaded(
    cli: Cli, run: Path, downloads: list[str], command: tuple[str, ...], own: bool
) -> None:
    folder = run.parent if own else copied(run).parent
    config = json.loads((run / "best" / "adapter_config.json").read_text())
    assert "model" in config
    shutil.copy(run / "best" / "adapters.safetensors", folder)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"model": HUB}))
    options = [*command, folder, "--output", run.parent.parent / "made"]
    error = cli(*options).error
    assert ("pass --model-path evil/model" in error) != own
    assert downloads == [HUB] * own
    assert "downloading it failed" in cli(*options, "--model-path", HUB).error
    assert downloads == [HUB] * (1 + own)


@pytest.mark.parametrize(
    ("place", "options"),
    [("x" * 5000, {"model_path": "a/b"}), ("a\0b", {"output": "a\0b/c"})],
    ids=["long", "NUL"],
)
def test_invalid_working_directory_ends_in_one_line(
    cli: Cli, run: Path, downloads: list[str], place: str, options: dict[str, Any]
) -> None:
    change(run, working_directory=place, **options)
    received = copied(run)
    assert cli("train", "--resume", received).error
    verified = cli("verify", received)
    assert "Traceback" not in verified.err
    assert downloads == []
