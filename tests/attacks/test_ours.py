"""Files of other programs and people that have mlxtune's names or lie where mlxtune writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.core.files.lock import Lock
from mlxtune.core.files.reading import file_hash
from tests.attacks.attack import contents
from tests.command import Cli
from tests.slow import slow

MINE = "mine: not to be lost"


def place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE)
    return path


@pytest.fixture
def run(output: Path) -> Path:
    return output.parent / "checkpoints"


@pytest.mark.parametrize("name", [".lock", ".mlxtune.lock"])
@pytest.mark.parametrize("folder", [slow("free"), "of another tool"])
def test_lock_of_another_program_is_neither_emptied_nor_removed(
    train: Cli, run: Path, name: str, folder: str
) -> None:
    place(run / name)
    if folder != "free":
        place(run / "metrics.jsonl")
    before = contents(run)
    outcome = train("--max-steps", 1)
    refused = folder != "free" or name == ".mlxtune.lock"
    assert (outcome.code != 0) == refused
    if refused:
        assert "not written by mlxtune" in outcome.error or "did not write it" in outcome.error
        assert contents(run, folder_times=False) == {
            path: (inode, 0 if path == "." else time, content)
            for path, (inode, time, content) in before.items()
        }
    assert (run / name).read_text() == MINE


HARD_LINKS = [".mlxtune.lock", "profile.jsonl", "metrics.jsonl", ".mlxtune", "run.json"]


@pytest.mark.parametrize("name", [HARD_LINKS[0], HARD_LINKS[1], *map(slow, HARD_LINKS[2:])])
@pytest.mark.parametrize("again", ["--overwrite", slow("--resume")])
def test_hard_link_to_a_private_file_is_never_written(
    cli: Cli, train: Cli, run: Path, tmp_path: Path, name: str, again: str
) -> None:
    secret = place(tmp_path / "home" / "id_ed25519")
    options = ("--max-steps", 1, "--profile-interval", 1)
    if again == "--resume" or name not in HARD_LINKS[:2]:
        assert train(*options).code == 0
    run.mkdir(parents=True, exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.link(secret, run / name)
    if again == "--resume":
        outcome = cli("train", "--resume", run, "--max-steps", 2)
    else:
        outcome = train(*options, "--overwrite")
    assert f"holds {name}, " in outcome.error
    remedy = "copy the run" if again == "--resume" else "move it away"
    assert f"not written by mlxtune: {remedy}" in outcome.error
    assert secret.read_text() == MINE
    assert secret.samefile(run / name)


def test_temporary_files_of_other_programs_stay(train: Cli, run: Path) -> None:
    names = (".anything.0123456789abcdef.tmp", ".best.fedcba9876543210.tmp/model.pt", "a.tmp")
    for name in names:
        place(run / name)
    assert train("--max-steps", 2, "--save-steps", 1, "--keep", 1).code == 0
    assert [(run / name).read_text() for name in names] == [MINE] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best/thesis.tex", "step-1/thesis.tex"])
def test_foreign_file_in_our_folder_is_not_removed(train: Cli, run: Path, name: str) -> None:
    options = ("--max-steps", 2, "--save-steps", 1, "--overwrite")
    for _ in range(2):
        assert train(*options).code == 0
    place(run / name)
    for _ in range(2):
        assert "not written by mlxtune: move it away" in train(*options).error
    assert (run / name).read_text() == MINE


def test_two_small_files_are_not_a_checkpoint(train: Cli, run: Path) -> None:
    thesis = place(run / "step-9" / "thesis.tex")
    manifest = {"format": 1, "files": {"adapters.safetensors": {}, "thesis.tex": {"size": 20}}}
    (run / "step-9" / "manifest.json").write_text(json.dumps(manifest))
    (run / ".mlxtune").touch()
    outcome = train("--max-steps", 1, "--save-steps", 1, "--overwrite")
    assert "holds step-9, not written by mlxtune" in outcome.error
    assert thesis.read_text() == MINE


@pytest.mark.parametrize("name", ["epoch-1", ".previous.moving/tensorboard"])
def test_folders_nested_thousands_deep_are_refused_in_one_line(
    train: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    top = run / name
    top.mkdir(parents=True)
    for folder in (run, run / ".previous.moving"):
        if folder.is_dir():
            (folder / ".mlxtune").touch()
    (run / "epoch-1").mkdir(exist_ok=True)
    (run / "epoch-1" / "manifest.json").write_text('{"files": {"adapters.safetensors": {}}}')
    if name == "epoch-1":
        top = top / "deep"
        top.mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(top)
        for _ in range(1500):
            Path("a").mkdir()
            os.chdir("a")
    try:
        outcome = train("--max-steps", 1, "--overwrite")
        assert f"holds {name.split('/')[0]}, not written by mlxtune: move it away" in outcome.error
    finally:
        subprocess.run(["rm", "-rf", run], check=True)


def _more(out: Path) -> None:
    place(out / "thesis.tex")


def _below(out: Path) -> None:
    place(out / "chapters" / "1.tex")


def _forged(out: Path) -> None:
    shutil.rmtree(out)
    place(out / "thesis.tex")
    for name in ("certificate.json", "adapters.safetensors", "mlxtune-files.json"):
        (out / name).write_text('{"files": {}}')


def _listed(out: Path) -> None:
    """List a foreign file with its hash in the manifests, as somebody who knew the file could."""
    place(out / "thesis.tex")
    for path in (out / "certificate.json", out / "mlxtune-files.json"):
        if path.exists():
            content = json.loads(path.read_text())
            content["files"]["thesis.tex"] = file_hash(out / "thesis.tex")
            path.write_text(json.dumps(content))


def _changed(out: Path) -> None:
    place(out / "adapter_config.json")


# The three commands replace a folder by one function.
CHANGES = [("fuse", each) for each in (_more, _below, _forged, _listed, _changed)]
CHANGES += [("export", _listed), ("import", _listed)]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "change"), CHANGES)
def test_overwriting_removes_no_file_of_the_user(
    cli: Cli,
    run_to_copy: Path,
    model: Path,
    tmp_path: Path,
    command: str,
    change: Callable[[Path], None],
) -> None:
    output, out = run_to_copy / "adapters.safetensors", tmp_path / "written"
    options = [command, "--adapter", output] if command != "import" else [command, output]
    options += ["--output", out, "--overwrite"]
    options += ["--format", "peft"] if command == "export" else ["--model-path", model]
    for _ in range(2):
        assert cli(*options).code == 0
    change(out)
    before = contents(out, folder_times=False)
    outcome = cli(*options)
    assert "move it away, or choose another --output" in outcome.error or (
        change in (_forged, _listed) and "already holds other files" in outcome.error
    )
    assert contents(out, folder_times=False) == before


@pytest.mark.slow
def test_foreign_files_in_a_named_cache_stay(train: Cli, output: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    place(cache / "thesis" / "thesis.tex")
    (cache / "thesis" / "mlxtune-checksums.json").write_text("{}")
    place(cache / ".mlxtune-old" / "thesis.tex")
    for path in (cache / "thesis" / "mlxtune-checksums.json", cache / ".mlxtune-old"):
        os.utime(path, (0, 0))
    assert train("--max-steps", 1, "--cache-dir", cache).code == 0
    for entry in [path for path in cache.iterdir() if len(path.name) == 32]:
        place(entry / "thesis.tex")
        (entry / "tokens").write_bytes(b"damaged")
    assert train("--max-steps", 1, "--cache-dir", cache).code == 0
    assert len([path for path in cache.rglob("thesis.tex") if path.read_text() == MINE]) >= 3


def test_lock_is_removed_only_while_it_is_ours(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "a")
    (tmp_path / "a").unlink()
    place(tmp_path / "a")
    lock.release()
    assert (tmp_path / "a").read_text() == MINE
