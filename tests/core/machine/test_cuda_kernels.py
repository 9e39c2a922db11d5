"""MLX keeps compiled kernels where only this user may write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from mlxtune.config import user_cache
from mlxtune.core.files.ours import ForeignFileError, private_folder
from mlxtune.core.machine import cuda, facts
from mlxtune.core.machine.cuda import VARIABLE, KernelCache
from mlxtune.diagnosis.doctor import read_machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA GPUs are Linux's")

# Prints MLX's folder at the moment at which mlx is imported, and the folder of a child process.
_IMPORT = """
import importlib.abc, os, subprocess, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "mlx.core":
            sys.meta_path.remove(self)
            print(os.environ.get("MLX_PTX_CACHE_DIR"))
sys.meta_path.insert(0, Watch())
import mlxtune.backend.device.default_device
child = "import mlxtune.backend, os; print(os.environ.get('MLX_PTX_CACHE_DIR'))"
subprocess.run([sys.executable, "-c", child])
"""


@pytest.fixture
def seen(tmp_path: Path) -> Callable[..., list[str]]:
    """A function that imports mlxtune in a new process, and returns the folders it saw."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)

    def run(**variables: str) -> list[str]:
        kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
        own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
        path = {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
        env = {**kept, **own, **path, **variables}
        command = [sys.executable, "-u", "-c", _IMPORT]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_folder_is_private_and_known_before_mlx_is_imported(
    tmp_path: Path, seen: Callable[..., list[str]]
) -> None:
    os.umask(mask := os.umask(0))
    try:
        os.umask(0o002)
        first, child = seen()
    finally:
        os.umask(mask)
    assert first == child
    folder = Path(first)
    assert folder.parent == tmp_path / "cache" / "mlxtune" / "kernels"
    assert folder.name.startswith("0.")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert seen() == [first, first]


def test_chosen_folder_stays_chosen(tmp_path: Path, seen: Callable[..., list[str]]) -> None:
    assert seen(**{VARIABLE: "/elsewhere"}) == ["/elsewhere", "/elsewhere"]
    assert not (tmp_path / "cache" / "mlxtune" / "kernels").exists()


@pytest.mark.slow
def test_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, seen: Callable[..., list[str]]
) -> None:
    folder = Path(seen()[0])
    for spoilt, mode in ((folder, 0o770), (folder, 0o702), (folder.parents[1], 0o777)):
        before = spoilt.stat().st_mode & 0o777
        spoilt.chmod(mode)
        first, child = seen()
        assert first == child
        assert Path(first).parent == tmp_path
        # It lasted as long as its process.
        assert not Path(first).exists()
        spoilt.chmod(before)
    assert seen()[0] == str(folder)


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an NVIDIA GPU; the folder of its driver's facts on each GPU."""
    monkeypatch.setattr(facts, "has_nvidia", lambda: True)
    monkeypatch.setattr(cuda, "has_nvidia", lambda: True)
    monkeypatch.setattr(cuda, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(cuda, "_GPUS", tmp_path / "gpus")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "gpus"


def folder() -> KernelCache:
    found = cuda.kernel_cache.__wrapped__()
    assert found is not None
    return found


def add_gpu(gpus: Path, model: str) -> None:
    made = gpus / f"0000:{len(list(gpus.glob('*')))}"
    made.mkdir(parents=True)
    (made / "information").write_text(f"Model: \t\t {model}\nIRQ:   32\n")


def test_other_gpus_have_their_own_kernels(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = folder().path
    add_gpu(nvidia, "NVIDIA H200")
    one = folder().path
    assert one == f"{unknown}-NVIDIA-H200"
    add_gpu(nvidia, "NVIDIA H200")
    assert folder().path == one
    add_gpu(nvidia, "NVIDIA A100/../x")
    both = folder().path
    assert both.endswith("-NVIDIA-A100-..-x-NVIDIA-H200-all")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert folder().path == both.replace("all", "1")


def test_folder_of_another_user_or_a_link_is_not_used(
    nvidia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Path(folder().path)
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    spoilt = folder()
    assert "belongs to another user" in spoilt.problem
    assert Path(spoilt.path).parent == tmp_path
    monkeypatch.undo()
    monkeypatch.setattr(cuda, "has_nvidia", lambda: True)
    monkeypatch.setattr(cuda, "user_cache", lambda: tmp_path / "cache")
    kept.rename(tmp_path / "moved")
    kept.symlink_to(tmp_path / "moved")
    assert folder().problem == f"{kept}: it is not a folder"


@pytest.mark.slow
def test_doctor_shows_the_folder(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = KernelCache("/here", "/cache: other users may write to it")
    for shown in (found, None):
        monkeypatch.setattr("mlxtune.diagnosis.doctor.kernel_cache", lambda shown=shown: shown)
        kernels = read_machine().folders.get("kernels")
        assert (kernels and (kernels.path, kernels.problem)) == (
            ("/here", found.problem) if shown else None
        )


def test_user_without_a_home_gets_a_temporary_folder(
    nvidia: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(cuda, "user_cache", user_cache)
    monkeypatch.setattr(platformdirs, "user_cache_path", fails)
    found = folder()
    assert Path(found.path).is_dir()
    assert found.problem == "this user has no home folder: set HOME or XDG_CACHE_HOME"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders to other users")
@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
def test_nothing_is_made_in_a_folder_of_another_user(tmp_path: Path, linked: bool) -> None:
    """Also where only a link on the way is in that user's folder, who could change it."""
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    theirs.mkdir()
    own.mkdir()
    start = theirs
    if linked:
        (theirs / "link").symlink_to(own)
        start = tmp_path / "first"
        start.symlink_to(theirs / "link")
    os.chown(theirs, 1234, 1234)
    with pytest.raises(ForeignFileError, match="it belongs to another user"):
        private_folder(start / "cache" / "kernels")
    assert not (start / "cache").exists()
