"""One process at a time holds a lock, and a dead process holds none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.files import writing
from mlxtune.core.files.lock import FolderMovedError, Lock, LockHeldError, NoLocksError, holder_of
from mlxtune.core.files.ours import ForeignFileError
from mlxtune.core.run.checkpoint import ADAPTER, prune, write_checkpoint
from mlxtune.core.run.progress import MetricsFile, Progress
from mlxtune.core.run.run_folder import LOCK, lock_run
from mlxtune.core.run.saving import CheckpointContent, CheckpointSaver
from tests.holders import hold_elsewhere

HOLDER = """
import sys
from pathlib import Path
from mlxtune.core.files.lock import Lock
lock = Lock(Path(sys.argv[1]), {"run": "theirs"})
"""


def test_lock_is_held_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = Lock(path, {"run": "mine"})
    with pytest.raises(LockHeldError) as held:
        Lock(path)
    assert held.value.holder["pid"] == os.getpid()
    assert held.value.holder["run"] == "mine"
    assert holder_of(path) == held.value.holder

    lock.release()
    lock.release()
    assert holder_of(path) is None
    assert not path.exists()
    Lock(path).release()


def test_lock_names_its_process_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    process = hold_elsewhere(HOLDER, path)
    try:
        with pytest.raises(LockHeldError) as held:
            Lock(path)
        assert held.value.holder["pid"] == process.pid
        assert held.value.holder["run"] == "theirs"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # The holder's note is still in the file but has no meaning.
    assert json.loads(path.read_text())["pid"] == process.pid
    assert holder_of(path) is None
    Lock(path).release()


def test_lock_removed_while_opening_is_reacquired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    first = Lock(path)
    opened = os.open
    times = 0

    def open_late(*args: object, **options: object) -> int:
        nonlocal times
        times += 1
        descriptor: int = opened(*args, **options)  # type: ignore[arg-type]
        if times == 1:
            first.release()
        return descriptor

    monkeypatch.setattr(os, "open", open_late)
    second = Lock(path)
    assert times == 2
    assert path.exists()
    assert holder_of(path) is not None
    second.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 60_000])
def test_holder_content_is_untrusted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".lock"
    lock = Lock(path)
    path.write_bytes(content)
    assert holder_of(path) == {}
    with pytest.raises(LockHeldError):
        Lock(path)
    lock.release()


def test_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic"):
        Lock(tmp_path / ".lock")
    assert (tmp_path / "theirs").read_text() == "precious"


def test_lock_is_refused_where_inode_numbers_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(NoLocksError, match="changes inode numbers"):
        Lock(tmp_path / ".lock")
    assert len(list(Path("/dev/fd").iterdir())) == before


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_lock_is_refused_where_the_file_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NoLocksError, match="no file locks"):
        Lock(tmp_path / ".lock")
    assert holder_of(tmp_path / ".lock") is None


def test_shared_lock_has_no_holder(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert holder_of(path) is None


def test_brief_reader_does_not_block_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lock"
    path.touch()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(reader, fcntl.LOCK_UN))
        Lock(path).release()


def test_looking_for_a_holder_does_not_modify_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = Lock(path)
    path.chmod(0o444)
    before = path.stat()
    assert (holder_of(path) or {})["pid"] == os.getpid()
    assert path.stat() == before
    lock.release()


@pytest.mark.parametrize("content", ["mine", "[1]", '{"process": 1}', "7"])
def test_lock_of_another_program_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / ".lock"
    path.write_text(content)
    with pytest.raises(ForeignFileError, match="did not write it"):
        Lock(path)
    assert path.read_text() == content
    with path.open() as other:  # the file is not locked either
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# A guarded folder


WRITES: dict[str, Callable[[Path], object]] = {
    "file": lambda folder: writing.write_file(folder / "new", [b"1"]),
    "json": lambda folder: writing.write_json(folder / "new.json", 1),
    "line": lambda folder: writing.append_line(folder / "lines", "1"),
    "append": lambda folder: writing.open_to_append(folder / "lines").close(),
    "stream": lambda folder: writing.open_to_write(folder / "stream").close(),
    "folder": lambda folder: writing.make_folder(folder / "below"),
    "itself": writing.make_folder,
    "checkpoint": lambda folder: write_checkpoint(folder / "step-1", _adapter, {"step": 1}),
    "pruning": lambda folder: prune(folder, set()),
    "metrics": lambda folder: MetricsFile(folder, print).write(Progress()),
}


def _adapter(folder: Path) -> None:
    writing.write_file(folder / ADAPTER, [b"adapter"])


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "replaced"])
@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_where_a_locked_folder_was(
    tmp_path: Path, write: str, replaced: bool
) -> None:
    run = tmp_path / "run"
    lock = lock_run(run)
    try:
        WRITES[write](run)
        run.rename(tmp_path / "moved")
        if replaced:
            run.mkdir()
            (run / LOCK).write_text('{"pid": 1}')
        with pytest.raises(FolderMovedError, match=f"{run} was moved, removed or replaced"):
            WRITES[write](run)
        assert run.exists() == replaced
        if replaced:
            assert [path.name for path in run.iterdir()] == [LOCK]
        writing.write_file(tmp_path / "elsewhere", [b"1"])
    finally:
        lock.release()
    # The next run may make the folder again.
    writing.make_folder(run)
    WRITES[write](run)


def test_checkpoint_is_not_moved_into_another_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lock = lock_run(run)

    def move(folder: Path) -> None:
        _adapter(folder)
        run.rename(tmp_path / "moved")

    with pytest.raises(FolderMovedError):
        write_checkpoint(run / "step-1", move, {"step": 1})
    lock.release()
    assert not run.exists()


def test_run_moved_at_any_moment_of_a_save_is_named_as_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rename = tmp_path / "run", os.rename
    calls = moves_at = 0

    def counting(call: Any) -> Any:
        def counted(path: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if isinstance(path, str | Path) and str(run) in str(path):
                calls += 1
                if calls == moves_at:
                    rename(run, tmp_path / f"moved-{calls}")
            return call(path, *arguments, **options)

        return counted

    def save_two() -> None:
        """Save two checkpoints, and prune the first; the run moves during the second save."""
        nonlocal calls
        saver = CheckpointSaver(
            run,
            epochs=1,
            every_epochs=1,
            every_steps=1,
            every_minutes=0,
            keep=1,
            on_saved=str,
            on_problem=print,
        )
        saver.save("step-1", CheckpointContent(_adapter, {"step": 1}, list))
        with monkeypatch.context() as patched:
            for name in ("listdir", "lstat", "mkdir", "open", "rename", "replace", "stat"):
                patched.setattr(os, name, counting(getattr(os, name)))
            calls = 0
            saver.save("step-2", CheckpointContent(_adapter, {"step": 2}, list))

    save_two()
    total = calls
    assert total > 50
    for moves_at in range(1, total + 1):
        lock = lock_run(run)
        # The removal of an older checkpoint is a best effort.
        with suppress(FolderMovedError):
            save_two()
        lock.release()
        assert (tmp_path / f"moved-{moves_at}").exists()
        shutil.rmtree(run, ignore_errors=True)
