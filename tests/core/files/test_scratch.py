"""MLX's compiled code is in a folder that only this user may enter."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mlxtune.backend.device import default_device
from mlxtune.core.files import scratch
from mlxtune.core.files.scratch import use_private_folder
from tests.sources import PACKAGE

# Prints MLX's temporary folder in this process and in a child, and Python's.
_IMPORT = """
import os, subprocess, sys, tempfile
import mlxtune.backend
child = "import mlxtune.backend, os; print(os.environ['TMPDIR'])"
print(os.environ["TMPDIR"], flush=True)
subprocess.run([sys.executable, "-c", child])
print(tempfile.gettempdir())
"""
_COMPILED = """
import mlxtune.backend
import mlx.core as mx
print(mx.compile(lambda x: mx.exp(x) * x + 1)(mx.ones(3)).tolist())
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder that all users may write to."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def chosen() -> Path:
    use_private_folder()
    return Path(os.environ["TMPDIR"])


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_folder_is_private_before_mlx_is_used(shared: Path) -> None:
    os.umask(mask := os.umask(0))
    try:
        os.umask(0)
        own, of_child, of_python = run(_IMPORT)
    finally:
        os.umask(mask)
    assert own == of_child == str(shared / f"mlxtune.{os.geteuid()}")
    assert stat.S_IMODE(Path(own).stat().st_mode) == 0o700
    assert of_python == str(shared)


@pytest.mark.slow
@pytest.mark.skipif(
    not default_device.on_cpu() or shutil.which("g++") is None, reason="needs the CPU's compiler"
)
def test_compiled_code_of_another_user_is_not_loaded(shared: Path) -> None:
    """MLX itself shows where it looks: the folder `mlx` of the shared folder stays as it was."""
    (shared / "mlx").write_text("planted")
    run(_COMPILED)
    own = shared / f"mlxtune.{os.geteuid()}"
    assert list(own.glob("mlx/*/cpu/*.so"))


def test_private_folder_that_the_user_chose_stays(shared: Path) -> None:
    shared.chmod(0o700)
    assert chosen() == shared
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("planted", ["open", "link", "file", "another user's"])
def test_folder_that_others_made_first_is_not_used(
    shared: Path, tmp_path: Path, planted: str
) -> None:
    own = shared / f"mlxtune.{os.geteuid()}"
    if planted == "link":
        (tmp_path / "theirs").mkdir()
        own.symlink_to(tmp_path / "theirs")
    elif planted == "file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777)
    if planted == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root may give folders to other users")
        own.chmod(0o755)
        os.chown(own, 1234, 1234)
    folder = chosen()
    assert folder.parent == shared
    assert folder != own
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_readable_folder_of_this_user_is_closed(shared: Path) -> None:
    own = shared / f"mlxtune.{os.geteuid()}"
    own.mkdir()
    own.chmod(0o755)
    assert chosen() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_modules_that_import_mlx_import_the_backend() -> None:
    """Importing the backend chooses the folder."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"(?m)^ *(?:import|from) mlx(?:_lm)?[. ]", text):
            inside = path.is_relative_to(PACKAGE / "backend")
            assert inside or re.search(r"(?m)^ *(?:import|from) mlxtune\.backend", text), path


# Folders that killed processes left


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scratch._remove_abandoned.cache_clear()
    return tmp_path


def old_folder(path: Path) -> Path:
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").write_text("left")
    os.utime(path, (0, 0))
    return path


def test_folders_of_killed_processes_are_removed(temporary: Path) -> None:
    left = [old_folder(temporary / name) for name in ("mlxtune-data-abcd_123", "mlxtune-abcd1234")]
    with scratch.scratch_folder("data") as folder:
        assert list(temporary.iterdir()) == [folder]
    assert not any(path.exists() for path in left)


def test_other_folders_stay(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = old_folder(tmp_path_factory.mktemp("elsewhere") / "folder")
    (temporary / "mlxtune-data-linked12").symlink_to(elsewhere)
    kept = [
        old_folder(temporary / "mlxtune.12345678"),
        old_folder(temporary / "mlxtune-Mine-abcd1234"),
        old_folder(temporary / "other-data-abcd1234"),
        temporary / "mlxtune-data-linked12",
    ]
    young = temporary / "mlxtune-data-young123"
    young.mkdir()
    with scratch.scratch_folder("data"), scratch.scratch_folder("data") as held:
        os.utime(held, (0, 0))
        scratch._remove_abandoned.cache_clear()
        with scratch.scratch_folder("data"):
            assert held.exists()
        lasting = scratch.lasting_folder("kernels")
        os.utime(lasting, (0, 0))
        scratch._remove_abandoned.cache_clear()
        with scratch.scratch_folder("data"):
            assert lasting.exists()
    assert all(path.exists() for path in (*kept, young, elsewhere / "below" / "file"))
