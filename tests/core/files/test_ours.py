"""Files are checked to be ours before they are written, truncated, locked, moved or removed."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxtune.core.files import ours
from mlxtune.core.files.lock import Lock
from mlxtune.core.files.ours import (
    ForeignFileError,
    open_ours,
    remove_file,
    remove_folder,
    replace_file,
)
from mlxtune.core.files.writing import (
    append_line,
    check_outputs,
    is_temporary,
    open_to_append,
    open_to_write,
    write_file,
)
from mlxtune.errors import OutputError
from tests.attacks.attack import contents

SECRET = "secret: not to be lost"


def _hard_link(path: Path, secret: Path) -> None:
    os.link(secret, path)


def _link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _dangling(path: Path, secret: Path) -> None:
    path.symlink_to(secret.parent / "none")


def _pipe(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, secret: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _folder(path: Path, secret: Path) -> None:
    path.mkdir()
    (path / "mine").write_text(SECRET)


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "hard link": _hard_link,
    "link": _link,
    "dangling link": _dangling,
    "pipe": _pipe,
    "socket": _socket,
    "folder": _folder,
}
OPERATIONS: dict[str, Callable[[Path], object]] = {
    "write": lambda path: write_file(path, [b"new"]),
    "append": lambda path: append_line(path, "new"),
    "open to append": lambda path: open_to_append(path).close(),
    "open to write": lambda path: open_to_write(path).close(),
    "lock": Lock,
    "remove": remove_file,
    "replace": lambda path: replace_file(path, path.with_name("target")),
    "check": lambda path: check_outputs([path], [], "--output"),
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_ed25519"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_foreign_file_is_left_unchanged(
    tmp_path: Path, secret: Path, folder: Path, plant: str, operation: str
) -> None:
    path = folder / "file"
    PLANTS[plant](path, secret)
    before = contents(tmp_path, folder_times=False)
    with pytest.raises(OSError):
        OPERATIONS[operation](path)
    assert contents(tmp_path, folder_times=False) == before


@pytest.mark.parametrize("plant", ["hard link", "link"])
def test_file_does_not_replace_an_existing_one(
    tmp_path: Path, secret: Path, folder: Path, plant: str
) -> None:
    (folder / "new").write_text("new")
    PLANTS[plant](folder / "target", secret)
    before = contents(tmp_path)
    with pytest.raises(ForeignFileError):
        replace_file(folder / "new", folder / "target")
    assert contents(tmp_path) == before


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Act as a user who does not own the files."""
    ours._owner_of_new_files.cache_clear()
    user = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user)
        yield patch
    ours._owner_of_new_files.cache_clear()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_file_of_another_user_is_left_unchanged(
    folder: Path, operation: str, another_user: pytest.MonkeyPatch
) -> None:
    another_user.setattr(ours, "_owner_of_new_files", lambda *_: os.geteuid())
    (folder / "file").write_text(SECRET)
    before = contents(folder, folder_times=False)
    with pytest.raises(OSError, match="belongs to another user"):
        OPERATIONS[operation](folder / "file")
    assert contents(folder, folder_times=False) == before


@pytest.mark.usefixtures("another_user")
def test_where_all_new_files_have_one_owner_its_files_are_ours(folder: Path) -> None:
    (folder / "file").write_text("")
    append_line(folder / "file", "new")
    assert (folder / "file").read_text() == "new\n"
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_error_names_the_file_the_reason_and_the_remedy(secret: Path, folder: Path) -> None:
    os.link(secret, folder / "a")
    with pytest.raises(OutputError) as raised:
        write_file(folder / "a", [b""])
    assert str(raised.value) == (
        f"{folder / 'a'} cannot be written: it also has another name (a hard link): "
        "move it away, or choose another path"
    )


def test_swapped_file_is_checked_by_its_descriptor(
    secret: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = folder / "a", os.open
    os.link(secret, path)

    def open_and_swap(*args: object, **options: object) -> int:
        descriptor: int = opened(*args, **options)  # type: ignore[arg-type]
        path.unlink()
        path.write_text("innocent")
        os.link(secret, folder / "again")
        return descriptor

    monkeypatch.setattr(os, "open", open_and_swap)
    with pytest.raises(ForeignFileError, match="hard link"):
        open_ours(path, os.O_RDWR)


def test_folder_is_removed_only_where_every_file_is_known_and_ours(
    tmp_path: Path, secret: Path, folder: Path
) -> None:
    known = {"a", "b", "inner/c"}.__contains__
    (folder / "inner").mkdir()
    for name in ("a", "inner/c", ".DS_Store"):
        (folder / name).write_text("")
    for name, plant in (("other", _pipe), ("inner/a", _pipe), ("b", _hard_link), ("b", _link)):
        plant(folder / name, secret)
        before = contents(tmp_path)
        with pytest.raises(ForeignFileError):
            remove_folder(folder, known)
        assert contents(tmp_path) == before
        (folder / name).unlink()
    remove_folder(folder, known)
    assert not folder.exists()
    folder.symlink_to(secret.parent)
    with pytest.raises(ForeignFileError, match="not a folder"):
        remove_folder(folder, known)


@pytest.mark.parametrize(
    "name", [".notes.0123456789abcdef.tmp", ".a.0123456789abcdef.tmp", "b.tmp", ".mlxtune-a.tmp"]
)
def test_temporary_files_of_other_programs_differ_in_name(name: str) -> None:
    assert not is_temporary(Path(name))
    assert is_temporary(Path(ours.temporary_name(name)))


def test_folders_nested_too_deeply_are_neither_read_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    top = folder = tmp_path / "top"
    for _ in range(1500):
        folder.mkdir()
        os.chdir(folder)
        folder = Path("a")
    os.chdir(tmp_path)
    try:
        with pytest.raises(ForeignFileError, match="nested more than 100 levels deep"):
            ours.contents(top)
        with pytest.raises(ForeignFileError, match="nested more than 100 levels deep"):
            ours.discard(top)
        ours.discard(top, ignore_errors=True)
        assert top.is_dir()
    finally:
        subprocess.run(["rm", "-rf", top], check=True)
