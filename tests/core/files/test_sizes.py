"""Checks of a file's size against its kind and its blocks on disk."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxtune.config.limits import Limits, TooLarge
from mlxtune.core.files import sizes
from tests.attacks.sparse import enlarge

LARGE = 2**22
LIMITS = Limits(2**30)


def test_file_that_is_there_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(LARGE))
    sizes.check_stored(path)
    assert len(sizes.read_bytes(path, LIMITS)) == LARGE


@pytest.mark.parametrize(("stored", "taken"), [(LARGE // 64, True), (LARGE // 64 - 4096, False)])
def test_64th_of_a_file_has_to_be_there(tmp_path: Path, stored: int, taken: bool) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\1" * stored)
    enlarge(path, LARGE)
    if taken:
        sizes.check_stored(path)
    else:
        with pytest.raises(TooLarge, match="a has 4,194,304 bytes, but only 61,440 of them"):
            sizes.check_stored(path)


def test_small_hole_is_taken(tmp_path: Path) -> None:
    enlarge(tmp_path / "a", 2**20 - 1)
    sizes.check_stored(tmp_path / "a")


@pytest.fixture
def no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file system count no blocks."""
    whole = os.fstat

    def fstat(descriptor: int) -> SimpleNamespace:
        status = whole(descriptor)
        return SimpleNamespace(st_mode=status.st_mode, st_size=status.st_size, st_blocks=0)

    monkeypatch.setattr(os, "fstat", fstat)


def test_file_system_that_counts_no_blocks_is_asked_for_holes(
    tmp_path: Path, no_blocks: None
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\1" * LARGE)
    sizes.check_stored(path)
    path.unlink()
    enlarge(path, LARGE)
    with pytest.raises(TooLarge):
        sizes.check_stored(path)


def test_file_of_many_holes_takes_few_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_blocks: None
) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        for place in range(1000):
            file.seek(place * 2**20)
            file.write(b"\1")
    monkeypatch.setattr(sizes, "_MOST_PIECES", 10)
    with pytest.raises(TooLarge, match=r"only 40,960 of them"):
        sizes.check_stored(path)


def test_large_or_irregular_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert sizes.read_bytes(path, Limits(5)) == b"12345"
    with pytest.raises(TooLarge, match="a is too large: 5 bytes, more than 4"):
        sizes.read_bytes(path, Limits(4))
    with pytest.raises(TooLarge):
        sizes.check_file(path, Limits(4))
    (tmp_path / "link").symlink_to(path)
    assert sizes.read_bytes(tmp_path / "link", Limits(5)) == b"12345"
    with pytest.raises(ValueError, match="link is not a regular file"):
        sizes.read_bytes(tmp_path / "link", Limits(5), links=False)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        sizes.read_bytes(tmp_path / "pipe", Limits(5))


def test_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "a", sizes.check_open
    path.write_bytes(b"1234")

    def check_open(name: str, file: io.BufferedReader) -> None:
        whole(name, file)
        with path.open("ab") as other:
            other.write(b"5")

    monkeypatch.setattr(sizes, "check_open", check_open)
    with pytest.raises(TooLarge, match="a is too large: 5 bytes, more than 4"):
        sizes.read_bytes(path, Limits(4))
