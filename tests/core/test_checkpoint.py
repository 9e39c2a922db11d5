"""Files and folders are put in place whole or not at all, whichever step of it fails."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxtune
from mlxtune.core.checkpoint import (
    check_writable,
    make_folder,
    set_previous_aside,
    write_checkpoint,
    write_file,
    write_json,
)
from mlxtune.errors import OutputError

# What writing is made of: each of these may fail, at any of its calls.
OPERATIONS = [
    (Path, "mkdir"),
    (Path, "open"),
    (Path, "rename"),
    (Path, "replace"),
    (os, "fsync"),
]


class FailingDisk:
    """Lets operations through until the one of number `fails_at`, which finds the disk full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.calls = 0
        self.fails_at = fails_at
        for owner, name in OPERATIONS:
            monkeypatch.setattr(owner, name, self._watch(getattr(owner, name)))

    def _watch(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return operation(*args, **kwargs)

        return call

    @property
    def failed(self) -> bool:
        return self.calls >= self.fails_at


def adapter(content: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        write_file(folder / "adapters.safetensors", [content.encode()])
        (folder / "more").mkdir()
        write_json(folder / "more" / "adapter_config.json", {"content": content})

    return save


def content_of(folder: Path) -> dict[str, Any]:
    return {
        "adapter": (folder / "adapters.safetensors").read_text(),
        "config": json.loads((folder / "more" / "adapter_config.json").read_text())["content"],
        "metadata": json.loads((folder / "metadata.json").read_text())["content"],
        "files": sorted(path.name for path in folder.iterdir()),
    }


def whole(content: str) -> dict[str, Any]:
    files = ["adapters.safetensors", "metadata.json", "more"]
    return {"adapter": content, "config": content, "metadata": content, "files": files}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_put_in_place_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "adapters.safetensors"
    write_file(target, [b"old"])
    write_file(target, [b"n", b"ew"])

    assert target.read_bytes() == b"new"
    assert names_in(tmp_path) == ["adapters.safetensors"]


def test_who_reads_the_old_file_goes_on_reading_it_whole(tmp_path: Path) -> None:
    target = tmp_path / "adapters.safetensors"
    write_file(target, [b"old"])

    with target.open("rb") as reader:
        write_file(target, [b"new and longer"])
        assert reader.read() == b"old"


def test_file_stays_old_when_its_content_fails_midway(tmp_path: Path) -> None:
    def content() -> Iterator[bytes]:
        yield b"new"
        raise ValueError("no more")

    target = tmp_path / "dump.jsonl"
    write_file(target, [b"old"])

    with pytest.raises(ValueError, match="no more"):
        write_file(target, content())
    assert target.read_bytes() == b"old"
    assert names_in(tmp_path) == ["dump.jsonl"]


@pytest.mark.parametrize("before", [None, b"old"], ids=["none_before", "one_before"])
def test_file_is_old_or_new_and_nothing_lies_beside_it_whichever_step_fails(
    tmp_path: Path, before: bytes | None
) -> None:
    for fails_at in range(1, 20):
        folder = tmp_path / str(fails_at)
        folder.mkdir()
        target = folder / "adapters.safetensors"
        if before is not None:
            target.write_bytes(before)
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FailingDisk(monkeypatch, fails_at)
            if fails_at <= 4:
                with pytest.raises(OutputError) as raised:
                    write_file(target, [b"n", b"ew"])
                assert str(raised.value).startswith(f"{target}: cannot be written: ")
                assert os.strerror(errno.ENOSPC) in str(raised.value)
            else:
                write_file(target, [b"n", b"ew"])
        if not disk.failed:
            break
        # Open, flush, rename; then the folder is flushed.
        found = target.read_bytes() if target.exists() else None
        assert found == (before if fails_at <= 3 else b"new")
        assert set(names_in(folder)) <= {"adapters.safetensors"}

    assert disk.calls == 4
    assert target.read_bytes() == b"new"


def test_json_is_written_for_people_and_refuses_what_json_has_not(tmp_path: Path) -> None:
    target = tmp_path / "metadata.json"
    write_json(target, {"train_loss": 1.5, "val_loss": None, "model": "Köln"})
    assert json.loads(target.read_text()) == {"train_loss": 1.5, "val_loss": None, "model": "Köln"}
    assert target.read_text().count("\n") == 5

    with pytest.raises(ValueError, match="float"):
        write_json(target, {"train_loss": float("nan")})
    assert json.loads(target.read_text())["train_loss"] == 1.5
    assert names_in(tmp_path) == ["metadata.json"]


def test_checkpoint_replaces_a_folder_of_its_name_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "best"
    for content in ("old", "new"):
        write_checkpoint(target, adapter(content), {"content": content})
        assert content_of(target) == whole(content)
        assert names_in(tmp_path) == ["best"]
        (target / "stray").write_text("")


def test_checkpoint_makes_the_folders_above_it(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "1" / "best"
    write_checkpoint(target, adapter("new"), {"content": "new"})

    assert content_of(target) == whole("new")


@pytest.mark.parametrize("before", [None, "old"], ids=["none_before", "one_before"])
def test_checkpoint_is_old_or_new_and_nothing_lies_beside_it_whichever_step_fails(
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
            disk = FailingDisk(monkeypatch, fails_at)
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

    # Once it is new it stays new; before that, every failure left what was there.
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes, key=lambda found: found == "new")
    assert outcomes[0] == before
    assert content_of(target) == whole("new")


@pytest.mark.parametrize("raised", [RuntimeError("no adapter"), KeyboardInterrupt()])
def test_checkpoint_whose_save_fails_otherwise_leaves_the_old_one_and_says_what_failed(
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
from mlxtune.core import checkpoint

calls = 0
def watch(operation):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os._exit(9)
        return operation(*args, **kwargs)
    return call

for owner, name in ((Path, "mkdir"), (Path, "rename"), (Path, "replace"), (os, "fsync")):
    setattr(owner, name, watch(getattr(owner, name)))
os.getpid = lambda: 1
save = lambda folder: checkpoint.write_file(folder / "adapters.safetensors", [b"new"])
checkpoint.write_checkpoint(Path(sys.argv[1]), save, {"content": "new"})
"""


def test_checkpoint_killed_at_any_step_does_not_stop_the_next_run_from_writing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a container each run has the same process id, here 1.
    monkeypatch.setattr(os, "getpid", lambda: 1)
    environment = os.environ | {"PYTHONPATH": str(Path(mlxtune.__file__).parents[1])}
    for killed_at in range(1, 100):
        target = tmp_path / str(killed_at) / "best"
        write_checkpoint(target, adapter("old"), {"content": "old"})
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, str(target), str(killed_at)],
            env=environment,
            check=False,
        )
        assert ended.returncode in (0, 9)
        # What was whole is still there, under its name or, between the two renames, beside it.
        adapters = target.parent.glob("*best*/adapters.safetensors")
        assert {path.read_bytes() for path in adapters} & {b"old", b"new"}

        write_checkpoint(target, adapter("newer"), {"content": "newer"})
        assert content_of(target) == whole("newer")
        assert names_in(target.parent) == ["best"]
        if ended.returncode == 0:
            break

    assert killed_at > 8


def below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "checkpoints"


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_file(folder / "adapters.safetensors", [b""]),
        lambda folder: write_checkpoint(folder / "best", lambda _: None, {}),
        lambda folder: check_writable(folder, "--output"),
        make_folder,
    ],
    ids=["file", "checkpoint", "check", "make"],
)
def test_path_below_a_file_is_an_error_that_names_it(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    folder = below_a_file(tmp_path)

    with pytest.raises(OutputError) as raised:
        write(folder)
    assert str(raised.value).startswith(str(folder))
    assert "\n" not in str(raised.value)
    assert names_in(tmp_path) == ["file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc, where none can write")
def test_folder_that_takes_no_files_is_an_error_that_names_it() -> None:
    with pytest.raises(OutputError, match=r"^/proc/self: cannot be written"):
        check_writable(Path("/proc/self"), "--output")
    with pytest.raises(OutputError, match=r"^/proc/mlxtune: cannot be written"):
        check_writable(Path("/proc/mlxtune"), "--output")


def test_file_in_place_of_a_folder_to_write_into_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")

    with pytest.raises(OutputError, match=r"file is a file, .*choose another --output"):
        check_writable(tmp_path / "file", "--output")
    with pytest.raises(OutputError, match="cannot be written"):
        write_file(tmp_path, [b""])
    assert (tmp_path / "file").read_text() == "kept"


def test_checking_leaves_nothing_behind_whether_the_folder_exists_or_not(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / "checkpoints", "--checkpoint-dir")
    check_writable(tmp_path, "--checkpoint-dir")

    assert names_in(tmp_path) == []


def test_folder_is_made_with_those_above_it_and_may_be_there_already(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "checkpoints"
    make_folder(folder)
    make_folder(folder)

    assert names_in(folder) == []


def run_in(folder: Path, text: str) -> None:
    for name in ("epoch-1", "epoch-12", "best", "step-7"):
        (folder / name).mkdir(parents=True)
        (folder / name / "metadata.json").write_text(text)
    for name in ("metrics.jsonl", "ledger.json"):
        (folder / name).write_text(text)


RUN = ["best", "epoch-1", "epoch-12", "ledger.json", "metrics.jsonl", "step-7"]


def test_earlier_run_is_set_aside_and_what_is_not_of_a_run_stays(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_in(folder, "first")
    (folder / "notes.txt").write_text("mine")

    assert set_previous_aside(folder) == folder / "previous"

    assert names_in(folder) == ["notes.txt", "previous"]
    assert names_in(folder / "previous") == RUN
    assert (folder / "previous" / "best" / "metadata.json").read_text() == "first"


def test_only_the_latest_earlier_run_is_kept(tmp_path: Path) -> None:
    run_in(tmp_path, "first")
    set_previous_aside(tmp_path)
    run_in(tmp_path, "second")
    set_previous_aside(tmp_path)

    assert names_in(tmp_path) == ["previous"]
    assert names_in(tmp_path / "previous") == RUN
    assert (tmp_path / "previous" / "metrics.jsonl").read_text() == "second"


def test_folder_without_a_run_keeps_the_run_that_was_set_aside(tmp_path: Path) -> None:
    run_in(tmp_path, "first")
    set_previous_aside(tmp_path)

    assert set_previous_aside(tmp_path) is None
    assert set_previous_aside(tmp_path / "none") is None
    assert names_in(tmp_path / "previous") == RUN


def test_previous_that_is_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    run_in(tmp_path, "first")
    (tmp_path / "previous").write_text("mine")

    with pytest.raises(OutputError) as raised:
        set_previous_aside(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'previous'}: ")
    assert (tmp_path / "previous").read_text() == "mine"
    assert names_in(tmp_path) == sorted([*RUN, "previous"])
