"""Files of other programs and people in and around a run's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.core.run import checkpoint
from tests.command import Cli

MINE = "mine: not to be lost"


def snapshot(folder: Path) -> dict[str, str]:
    """Return the text of each file in a folder, and the target of each link."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_text(errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def place(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE)


OTHERS = [
    *("checkpoints/best/model.pt", "checkpoints/step-4/model.pt", "checkpoints/epoch-1/notes.txt"),
    *("checkpoints/best", "checkpoints/metrics.jsonl", "checkpoints/run.json"),
    *("checkpoints/result.json", "checkpoints/evaluation.json", "checkpoints/report.html"),
    *("checkpoints/ledger.json", "checkpoints/profile.jsonl", "checkpoints/tracking.json"),
    "checkpoints/.previous.moving/a",
    *("adapters.safetensors", "adapter_config.json"),
]


@pytest.mark.parametrize("name", OTHERS)
def test_foreign_file_is_refused_before_training(train: Cli, output: Path, name: str) -> None:
    place(output.parent / name)
    before = snapshot(output.parent)
    outcome = train("--max-steps", 2)
    assert "move it away, or choose another --" in outcome.error
    assert name.removeprefix("checkpoints/").partition("/")[0] in outcome.error
    assert snapshot(output.parent) == before


def test_foreign_file_survives_two_runs(train: Cli, output: Path) -> None:
    run = output.parent / "checkpoints"
    names = ["step-notes/a.txt", "epoch-/a", "step-1.5/a", "best-of/a", ".best.tmp/a", "wandb/a"]
    for name in names:
        place(run / name)
    for _ in range(2):
        assert train("--max-steps", 2, "--save-steps", 1, "--keep", 1).code == 0
    assert [(run / name).read_text() for name in names] == [MINE] * len(names)


def test_foreign_file_written_between_two_runs_is_refused(train: Cli, own_run: Path) -> None:
    run = own_run
    place(run / "best" / "model.pt")
    outcome = train("--max-steps", 2)
    assert "holds best, not written by mlxtune" in outcome.error
    assert (run / "best" / "model.pt").read_text() == MINE


@pytest.mark.parametrize(
    ("name", "dangling"),
    [
        *(
            (name, False)
            for name in ("run.json", "ledger.json", "metrics.jsonl", "profile.jsonl", "result.json")
        ),
        *((name, False) for name in (".mlxtune", "best", "step-1", ".mlxtune.lock")),
        *((name, True) for name in ("metrics.jsonl", "profile.jsonl", "best", ".mlxtune.lock")),
    ],
)
def test_links_in_a_runs_folder_are_not_written_through(
    train: Cli, own_run: Path, tmp_path: Path, name: str, dangling: bool
) -> None:
    target = tmp_path / "elsewhere" / "mine"
    target.parent.mkdir()
    if not dangling:
        target.write_text(MINE)
    link = own_run / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    train("--max-steps", 2, "--save-steps", 1, "--profile-interval", 1, "--overwrite")
    assert snapshot(target.parent) == ({} if dangling else {"mine": MINE})


OUTPUTS: dict[str, Callable[[Path], str]] = {
    "below the current folder": lambda folder: str(folder / "home" / ".zshrc"),
    "of the same folder": lambda folder: str(folder / "run" / ".zshrc"),
    "upwards": lambda folder: str(folder / "run" / ".." / "home" / ".zshrc"),
}


@pytest.mark.parametrize("where", OUTPUTS)
@pytest.mark.parametrize("name", ["checkpoints", "ck"])
def test_untrusted_run_does_not_choose_what_is_replaced(
    cli: Cli,
    run_to_copy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    name: str,
) -> None:
    run = Path(shutil.copytree(run_to_copy, tmp_path / "run")) / name
    (tmp_path / "run" / "checkpoints").rename(run)
    target = OUTPUTS[where](tmp_path)
    for folder in checkpoint.checkpoint_folders(run):
        metadata = json.loads((folder / "metadata.json").read_text())
        metadata["config"] |= {"output": target, "epochs": 5, "max_steps": None}
        metadata["config"]["checkpoint_dir"] = None if name == "checkpoints" else str(run)
        (folder / "metadata.json").write_text(json.dumps(metadata))
        (folder / "manifest.json").unlink()
        checkpoint.write_json(folder / "manifest.json", checkpoint._manifest(folder))
    place(Path(target).resolve())
    monkeypatch.chdir(tmp_path)
    outcome = cli("train", "--resume", run)
    # In the other cases, a run may write a new file of that name in its own folder.
    if name == "ck" or where == "of the same folder":
        assert outcome.code != 0
        assert "--output" in outcome.error
    assert Path(target).read_text() == MINE
