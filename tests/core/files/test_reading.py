"""Regular files are read whole, within the limits of their kind, and not if made of holes."""

from __future__ import annotations

import gzip
import io
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxtune.config.limits import Limits, TooLargeError
from mlxtune.core.files import reading
from mlxtune.core.files.reading import (
    NotRegularError,
    check_file,
    check_stored,
    open_regular,
    open_zipped,
    read_bytes,
    read_start,
    read_text,
)
from tests.attacks.sparse import enlarge

LARGE = 2**22
LIMITS = Limits(2**30)


@pytest.mark.parametrize("size", [0, 1, 9, 10])
def test_file_within_its_limit_is_read_whole(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(b"x" * size)
    assert read_bytes(tmp_path / "a", Limits(10)) == b"x" * size


def test_file_beyond_its_limit_is_refused_even_if_it_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 11)
    with pytest.raises(ValueError, match="a is too large"):
        read_bytes(path, Limits(10))
    (tmp_path / "empty").touch()
    smaller = (tmp_path / "empty").stat()
    monkeypatch.setattr(os, "fstat", lambda descriptor: smaller)
    with pytest.raises(ValueError, match="a is too large"):
        read_bytes(path, Limits(10))
    assert read_bytes(path, Limits(11)) == b"x" * 11


def test_pipes_devices_and_folders_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(NotRegularError, match=f"{name} is not a regular file"):
            open_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    assert read_start(tmp_path / "pipe", 10) == b""
    assert read_start(tmp_path / "zero", 10) == bytes(10)


def test_links_are_followed_only_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ü", encoding="utf-8")
    (tmp_path / "link").symlink_to("a")
    assert read_text(tmp_path / "link") == "ü"
    with pytest.raises(NotRegularError):
        read_bytes(tmp_path / "link", links=False)


def test_zipped_file_is_closed_with_its_reader(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text"))
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208
    with open_zipped(tmp_path / "a.gz") as file:
        assert file.read() == b"text"
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit memory")
def test_small_file_takes_no_memory_of_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("small")
    code = (
        "import sys; from pathlib import Path; from mlxtune.core.files import reading; "
        "print(reading.read_bytes(Path(sys.argv[1])))"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (5 * 10**8, 5 * 10**8))

    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "b'small'\n", shown.stderr


def test_existing_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(LARGE))
    check_stored(path)
    assert len(read_bytes(path, LIMITS)) == LARGE


@pytest.mark.parametrize(("stored", "taken"), [(LARGE // 64, True), (LARGE // 64 - 4096, False)])
def test_file_with_under_a_64th_on_disk_is_refused(
    tmp_path: Path, stored: int, taken: bool
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\1" * stored)
    enlarge(path, LARGE)
    if taken:
        check_stored(path)
    else:
        with pytest.raises(TooLargeError, match="a has 4,194,304 bytes, but only 61,440 of them"):
            check_stored(path)


def test_small_hole_is_accepted(tmp_path: Path) -> None:
    enlarge(tmp_path / "a", 2**20 - 1)
    check_stored(tmp_path / "a")


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
    check_stored(path)
    path.unlink()
    enlarge(path, LARGE)
    with pytest.raises(TooLargeError):
        check_stored(path)


def test_sparse_file_takes_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_blocks: None
) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        for place in range(1000):
            file.seek(place * 2**20)
            file.write(b"\1")
    monkeypatch.setattr(reading, "_MAX_PIECES", 10)
    with pytest.raises(TooLargeError, match=r"only 40,960 of them"):
        check_stored(path)


def test_large_or_irregular_file_is_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bytes(path, Limits(5)) == b"12345"
    with pytest.raises(TooLargeError, match="a is too large: 5 bytes, more than 4"):
        read_bytes(path, Limits(4))
    with pytest.raises(TooLargeError):
        check_file(path, Limits(4))
    (tmp_path / "link").symlink_to(path)
    assert read_bytes(tmp_path / "link", Limits(5)) == b"12345"
    with pytest.raises(ValueError, match="link is not a regular file"):
        read_bytes(tmp_path / "link", Limits(5), links=False)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        read_bytes(tmp_path / "pipe", Limits(5))


def test_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "a", reading.check_open
    path.write_bytes(b"1234")

    def check_open(name: str, file: io.BufferedReader) -> None:
        whole(name, file)
        with path.open("ab") as other:
            other.write(b"5")

    monkeypatch.setattr(reading, "check_open", check_open)
    with pytest.raises(TooLargeError, match="a is too large: 5 bytes, more than 4"):
        read_bytes(path, Limits(4))
