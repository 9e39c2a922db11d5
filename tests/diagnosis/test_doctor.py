"""`mlxtune doctor` on the machine that runs the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import mlxtune
from mlxtune.config import user_cache
from mlxtune.core.machine import facts
from mlxtune.core.machine.reservation import reserve
from mlxtune.diagnosis import doctor
from tests.command import Cli, finish, start
from tests.paths import ROOT


def test_test_machine_can_train(cli: Cli) -> None:
    outcome = cli("doctor")
    assert outcome.code == 0, outcome.out
    *checks, summary = outcome.out.splitlines()
    assert summary.startswith("mlxtune can train here")
    names = [line.split()[1] for line in checks if not line.startswith(" ")]
    assert names[:3] == ["system", "python", "versions"]
    assert {"device", "memory", "speed", "folder", "cache", "temporary"} <= set(names)


def test_json_holds_facts_that_agree_with_mlx(cli: Cli) -> None:
    from mlxtune.backend.device.default_device import on_cpu  # isort: split
    import mlx.core as mx

    found = json.loads(cli("doctor", "--json").out)
    device = found["facts"]["device"]
    assert device["name"] == mx.device_info()["device_name"]
    assert device["gflops"] > 0
    assert (device["kind"] == "CPU") == on_cpu()
    assert found["can_train"] is True


def test_mlx_crash_is_reported_and_exits_1(tmp_path: Path) -> None:
    broken = tmp_path / "mlx"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "core.py").write_text("import os; os.abort()")
    # The broken mlx comes first on the path, also in the command's child process.
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    outcome = finish(start("doctor", env={**os.environ, "PYTHONPATH": path}))
    assert outcome.code == 1
    assert "problem  device" in outcome.out
    assert "MLX does not start: it was killed by signal 6" in outcome.out
    assert "mlxtune cannot train here" in outcome.out


def test_mlx_import_failure_is_reported_by_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: no such file')")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    outcome = finish(start("doctor", env={**os.environ, "PYTHONPATH": path}))
    assert outcome.code == 1
    assert "ImportError: libmlx.so: no such file" in outcome.out
    assert "Traceback" not in outcome.out + outcome.err


def test_user_file_named_like_a_library_is_kept(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise SystemExit(4)")
    # The installed command starts without the current folder on its path.
    code = "import sys; sys.path.remove(''); from mlxtune.cli import main; main(['doctor'])"
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_mlx_imported_first_is_detected() -> None:
    code = (
        "import mlx.core; from mlxtune.diagnosis import doctor\n"
        "device = doctor.facts.Device('CPU', '', 1, None, 1, blas='b')\n"
        "print(doctor._was_mlx_imported_first(device))"
    )
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert first.stdout == "True\n"
    code = code.replace("import mlx.core; ", "")
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ours.stdout == "False\n"


def test_reserved_memory_is_reported() -> None:
    lock = reserve(user_cache() / "memory", 5 * 10**9, 10**12, "/somewhere/run")
    try:
        notes = [check.found for check in mlxtune.doctor().checks if check.name == "reserved"]
    finally:
        lock.release()
    assert notes == [f"process {os.getpid()} holds 5 GB for /somewhere/run"]


# Installed packages


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of made-up distributions, in place of the installed ones."""
    # The real distributions must not be found.
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def distribution(folder: Path, name: str, version: str, *lines: str, files: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    text = [f"Name: {name}", f"Version: {version}", "Metadata-Version: 2.1", *lines]
    (info / "METADATA").write_text("\n".join(text) + "\n")
    (info / "RECORD").write_text(files)


def test_requirements_cover_the_package_its_extras_and_dependencies(
    installed: Path,
) -> None:
    distribution(
        installed,
        "mlxtune-lora",
        "0.1.0",
        "Requires-Dist: mlx>=0.32.1",
        "Requires-Dist: mlx[cpu]>=0.32.1; extra == 'cpu'",
        "Provides-Extra: cpu",
        "Requires-Dist: nowhere>=1; sys_platform == 'plan9'",
        "Requires-Dist: pyarrow>=15; extra == 'parquet'",
        "Requires-Dist: pytest; extra == 'test'",
        "Provides-Extra: parquet",
        "Provides-Extra: test",
    )
    distribution(
        installed,
        "mlx",
        "0.32.4",
        "Requires-Dist: mlx-cpu==0.32.4; extra == 'cpu'",
        "Requires-Dist: mlx-cuda-12; extra == 'cuda12'",
    )
    distribution(installed, "mlx-cpu", "0.31.0", files="mlx/lib/libmlx.so,,\n")
    distribution(installed, "pyarrow", "20.0.0")
    found = {package.name: package for package in doctor.packages()}
    assert set(found) == {"mlxtune", "mlx", "mlx-cpu", "pyarrow"}
    assert found["mlx"].serves
    needed = found["mlx-cpu"]
    assert (needed.extra, needed.needs, needed.serves) == ("cpu", "==0.32.4", False)
    assert (found["pyarrow"].extra, found["pyarrow"].serves) == ("parquet", True)


def test_two_packages_with_the_library_of_mlx_are_found(installed: Path) -> None:
    for name in ("mlx-cpu", "mlx-cuda-13"):
        distribution(installed, name, "0.32.4", files="mlx/lib/libmlx.so,,\n")
    distribution(installed, "mlx-cuda-12", "0.32.4", files="elsewhere,,\n")
    assert doctor.mlx_libraries() == ("mlx-cpu", "mlx-cuda-13")


# Output of the system's tools


def test_folders_are_measured_and_a_missing_one_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(facts, "user_cache", lambda: cache)
    assert facts.folders()["cache"].size is None
    (cache / "encoded").mkdir(parents=True)
    (cache / "encoded" / "a").write_bytes(bytes(1000))
    found = facts.folders()["cache"]
    assert (found.size, found.problem) == (1000, "")
    assert found.free is not None
    assert found.free > 0


@pytest.mark.parametrize("name", ["", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_downloads_are_where_hugging_face_keeps_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for each in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, str(tmp_path / "own"))
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert facts.folders()["downloads"].path == theirs.stdout.strip()


@pytest.mark.parametrize(("value", "name"), [("1", "HF_HUB_OFFLINE"), ("0", ""), ("", "")])
def test_offline_follows_hugging_face(
    monkeypatch: pytest.MonkeyPatch, value: str, name: str
) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert facts.offline() == name


def test_missing_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "cwd", gone)
    monkeypatch.setattr(tempfile, "gettempdir", gone)
    found = facts.folders()
    assert found["folder"].problem == found["temporary"].problem == "No such file or directory"
    assert found["cache"].problem == ""


def test_missing_tool_prints_nothing() -> None:
    assert facts.tool_output("no-such-tool-anywhere", "-g") == ""


def test_cache_that_cannot_be_created_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    found = mlxtune.doctor()
    assert found.can_train
    (cache,) = [check for check in found.checks if check.name == "cache"]
    assert cache.level == "note"
