"""Files are written atomically, whichever step fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxtune.config.limits import OWN_JSON_LIMITS
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.files.writing import (
    BestEffort,
    check_writable,
    is_same_place,
    make_folder,
    write_file,
    write_json,
)
from mlxtune.core.run.checkpoint import write_checkpoint
from mlxtune.errors import OutputError
from tests.faults import FaultyDisk


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_written_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "adapters.safetensors"
    write_file(target, [b"old"])
    write_file(target, [b"n", b"ew"])

    assert target.read_bytes() == b"new"
    assert names_in(tmp_path) == ["adapters.safetensors"]


def test_open_reader_sees_the_whole_old_file(tmp_path: Path) -> None:
    target = tmp_path / "adapters.safetensors"
    write_file(target, [b"old"])

    with target.open("rb") as reader:
        write_file(target, [b"new and longer"])
        assert reader.read() == b"old"


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
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
def test_file_is_old_or_new_whichever_operation_fails(tmp_path: Path, before: bytes | None) -> None:
    for fails_at in range(1, 20):
        folder = tmp_path / str(fails_at)
        folder.mkdir()
        target = folder / "adapters.safetensors"
        if before is not None:
            target.write_bytes(before)
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FaultyDisk(monkeypatch, fails_at)
            if fails_at <= 6:
                with pytest.raises(OutputError) as raised:
                    write_file(target, [b"n", b"ew"])
                assert str(raised.value).startswith(f"{target} cannot be written: ")
                assert os.strerror(errno.ENOSPC) in str(raised.value)
            else:
                write_file(target, [b"n", b"ew"])
        if not disk.failed:
            break
        # Open, write twice, flush, rename; then the folder is flushed.
        found = target.read_bytes() if target.exists() else None
        assert found == (before if fails_at <= 5 else b"new")
        assert set(names_in(folder)) <= {"adapters.safetensors"}

    assert disk.calls == 6
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
    with pytest.raises(OutputError, match=r"^/proc/self cannot be written"):
        check_writable(Path("/proc/self"), "--output")
    with pytest.raises(OutputError, match=r"^/proc/mlxtune cannot be written"):
        check_writable(Path("/proc/mlxtune"), "--output")


def test_file_instead_of_an_output_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")

    with pytest.raises(OutputError, match=r"file is a file, .*choose another --output"):
        check_writable(tmp_path / "file", "--output")
    with pytest.raises(OutputError, match="cannot be written"):
        write_file(tmp_path, [b""])
    assert (tmp_path / "file").read_text() == "kept"


def test_checking_leaves_no_files_whether_or_not_the_folder_exists(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / "checkpoints", "--checkpoint-dir")
    check_writable(tmp_path, "--checkpoint-dir")

    assert names_in(tmp_path) == []


def test_folder_is_created_with_its_parents_and_may_exist(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "checkpoints"
    make_folder(folder)
    make_folder(folder)

    assert names_in(folder) == []


def test_file_hash_covers_the_whole_content(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"ab" * (1 << 20) + b"c")

    assert file_hash(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(FileNotFoundError):
        file_hash(tmp_path / "none")


def test_parsed_json_is_bounded_in_size_depth_and_type(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    assert read_json(path) == {"step": 1}

    with path.open("wb") as file:
        file.truncate(OWN_JSON_LIMITS.bytes + 1)
    with pytest.raises(ValueError, match="too large"):
        read_json(path)
    for content, why in (
        ("[" * 100_000, "too deep"),
        ("{", "not valid"),
        ("[1]", "not a JSON object"),
        ("\udc80", "not valid"),
    ):
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match=why):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_json(tmp_path / name)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_files_are_written_where_folders_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(code, os.strerror(code))
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"new"


def test_own_file_is_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text('{"secret": 1}')
    (tmp_path / "own.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "own.json")


def test_path_with_a_null_character_equals_no_other(tmp_path: Path) -> None:
    assert not is_same_place(tmp_path / "a\0b", tmp_path)


def test_first_failure_in_a_row_is_reported() -> None:
    reports: list[str] = []
    best_effort = BestEffort(reports.append, "the next write will try again")
    for fails in (True, True, False, True):
        with best_effort.attempt():
            if fails:
                raise OutputError("a cannot be written")
        assert best_effort.failing == fails
    report = "a cannot be written; training continues, and the next write will try again"
    assert reports == [report, report]
    with pytest.raises(KeyboardInterrupt), best_effort.attempt():
        raise KeyboardInterrupt
