"""Checkpoint folders are wholly old or wholly new, checked before use, and pruned."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlxtune
from mlxtune.core.files.writing import write_file, write_json
from mlxtune.core.run.checkpoint import (
    find_checkpoints,
    prune,
    restore_interrupted_best,
    write_checkpoint,
)
from mlxtune.errors import OutputError
from tests.faults import FaultyDisk


def adapter(content: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        write_file(folder / "adapters.safetensors", [content.encode()])
        write_json(folder / "adapter_config.json", {"content": content})

    return save


def content_of(folder: Path) -> dict[str, Any]:
    return {
        "adapter": (folder / "adapters.safetensors").read_text(),
        "config": json.loads((folder / "adapter_config.json").read_text())["content"],
        "metadata": json.loads((folder / "metadata.json").read_text())["content"],
        "files": sorted(path.name for path in folder.iterdir()),
    }


def whole(content: str) -> dict[str, Any]:
    files = ["adapter_config.json", "adapters.safetensors"]
    files += ["manifest.json", "metadata.json", "metrics.jsonl"]
    return {"adapter": content, "config": content, "metadata": content, "files": files}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoint_replaces_a_folder_of_its_name_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "best"
    for content in ("old", "new"):
        write_checkpoint(target, adapter(content), {"content": content})
        assert content_of(target) == whole(content)
        assert names_in(tmp_path) == ["best"]

    (target / "stray").write_text("mine")
    with pytest.raises(OutputError, match="best holds files that mlxtune did not write"):
        write_checkpoint(target, adapter("newer"), {})
    prune(tmp_path, set())
    assert (target / "stray").read_text() == "mine"
    assert (target / "adapters.safetensors").read_text() == "new"


@pytest.mark.parametrize("strange", ["folder", "file", "link"])
def test_foreign_file_is_not_replaced(tmp_path: Path, strange: str) -> None:
    target, mine = tmp_path / "best", tmp_path / "mine" / "model.pt"
    mine.parent.mkdir()
    mine.write_text("mine")
    if strange == "folder":
        mine.parent.rename(target)
    elif strange == "file":
        mine.rename(target)
    else:
        target.symlink_to(mine.parent)
    before = names_in(tmp_path)
    with pytest.raises(OutputError, match="best holds files that mlxtune did not write"):
        write_checkpoint(target, adapter("new"), {"content": "new"})
    assert names_in(tmp_path) == before
    assert "mine" in {path.read_text() for path in tmp_path.rglob("*") if path.is_file()}


def test_checkpoint_makes_the_folders_above_it(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "1" / "best"
    write_checkpoint(target, adapter("new"), {"content": "new"})

    assert content_of(target) == whole("new")


@pytest.mark.parametrize("before", [None, "old"], ids=["none_before", "one_before"])
def test_checkpoint_is_old_or_new_whichever_operation_fails(
    tmp_path: Path, before: str | None
) -> None:
    outcomes = []
    for fails_at in range(1, 100):
        folder = tmp_path / str(fails_at)
        folder.mkdir()
        target = folder / "best"
        if before is not None:
            write_checkpoint(target, adapter(before), {"content": before})
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FaultyDisk(monkeypatch, fails_at)
            try:
                write_checkpoint(target, adapter("new"), {"content": "new"})
            except OutputError as error:
                assert str(folder) in str(error)
                assert os.strerror(errno.ENOSPC) in str(error)
            else:
                assert not disk.failed
        if not disk.failed:
            break
        found = content_of(target)["adapter"] if target.exists() else None
        assert found in (before, "new")
        if found is not None:
            assert content_of(target) == whole(found)
        assert names_in(folder) == ["best"] * (found is not None)
        outcomes.append(found)

    # Early failures leave the old checkpoint, later failures the new one.
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes, key=lambda found: found == "new")
    assert outcomes[0] == before
    assert content_of(target) == whole("new")


@pytest.mark.parametrize("raised", [RuntimeError("no adapter"), KeyboardInterrupt()])
def test_failed_save_keeps_the_old_checkpoint_and_names_the_failure(
    tmp_path: Path, raised: BaseException
) -> None:
    target = tmp_path / "best"
    write_checkpoint(target, adapter("old"), {"content": "old"})

    def save(folder: Path) -> None:
        adapter("new")(folder)
        raise raised

    with pytest.raises(type(raised)) as caught:
        write_checkpoint(target, save, {})
    assert caught.value is raised
    assert content_of(target) == whole("old")
    assert names_in(tmp_path) == ["best"]


KILLED = """
import os, sys
from pathlib import Path
from mlxtune.core.files import writing
from mlxtune.core.run import checkpoint

def write(target, text):
    save = lambda folder: writing.write_file(folder / "adapters.safetensors", [text.encode()])
    checkpoint.write_checkpoint(target, save, {"content": text})

def die_at(last):
    calls = 0
    def watch(operation):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == last:
                os._exit(9)
            return operation(*args, **kwargs)
        return call
    for owner, name in ((Path, "mkdir"), (Path, "rename"), (Path, "replace"), (os, "fsync")):
        setattr(owner, name, watch(getattr(owner, name)))

# In a container each run has the same process id.
os.getpid = lambda: 1
for killed_at in range(1, 100):
    target = Path(sys.argv[1]) / str(killed_at) / "best"
    write(target, "old")
    child = os.fork()
    if child == 0:
        die_at(killed_at)
        write(target, "new")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code)
    if code == 0:
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_checkpoint_killed_at_any_point_can_be_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(mlxtune.__file__).parents[1])},
        check=True,
        capture_output=True,
        text=True,
    )
    *killed, last = map(int, ended.stdout.split())
    assert (set(killed), last) == ({9}, 0)
    assert len(killed) >= 8
    for killed_at in range(1, len(killed) + 2):
        target = tmp_path / str(killed_at) / "best"
        # A complete checkpoint remains, under its name or, between the two renames, next to it.
        adapters = target.parent.glob("*best*/adapters.safetensors")
        assert {path.read_bytes() for path in adapters} & {b"old", b"new"}

        write_checkpoint(target, adapter("newer"), {"content": "newer"})
        assert content_of(target) == whole("newer")
        prune(target.parent, set())
        assert names_in(target.parent) == ["best"]


def test_checkpoint_moved_aside_for_a_failed_write_is_restored(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path / "best", adapter("old"), {"content": "old", "step": 3})
    # Killed between the two renames.
    (tmp_path / "best").rename(tmp_path / ".best.old")
    # Readers change nothing.
    assert find_checkpoints(tmp_path) == ([], {})
    restore_interrupted_best(tmp_path)
    good, bad = find_checkpoints(tmp_path)
    assert [checkpoint.folder for checkpoint in good] == [tmp_path / "best"]
    assert bad == {}
    assert content_of(tmp_path / "best") == whole("old")
    assert names_in(tmp_path) == ["best"]
