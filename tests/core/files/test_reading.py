"""Regular files are read whole, and never beyond a limit."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mlxtune.config.limits import Limits
from mlxtune.core.files.reading import (
    NotRegular,
    open_regular,
    open_zipped,
    read_start,
)
from mlxtune.core.files.sizes import read_bytes, read_text


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
        with pytest.raises(NotRegular, match=f"{name} is not a regular file"):
            open_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    assert read_start(tmp_path / "pipe", 10) == b""
    assert read_start(tmp_path / "zero", 10) == bytes(10)


def test_links_are_followed_only_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ü", encoding="utf-8")
    (tmp_path / "link").symlink_to("a")
    assert read_text(tmp_path / "link") == "ü"
    with pytest.raises(NotRegular):
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
        "import sys; from pathlib import Path; from mlxtune.core.files import sizes; "
        "print(sizes.read_bytes(Path(sys.argv[1])))"
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
