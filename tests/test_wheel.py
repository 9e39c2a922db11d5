"""The wheel's files, and a demo that runs from the installed wheel alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.paths import DATA, ROOT

CARRIED = {
    "bookings.jsonl": 1,
    "bookings_pairs.jsonl": 1,
    "demo-qwen3": 5,
    "demo-gemma3": 5,
}


def build(source: Path, target: str, folder: Path) -> Path:
    """Build the project's `sdist` or `wheel`; return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, as `uv build` builds it."""
    folder = tmp_path_factory.mktemp("built")
    with tarfile.open(build(ROOT, "sdist", folder / "sdist")) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("mlxtune_lora-*")
    return build(source, "wheel", folder / "wheel")


@pytest.mark.slow
def test_wheel_holds_the_package_and_what_the_demo_needs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        contents = {name: archive.read(name) for name in found if "/demo/" in name}
    package = ROOT / "mlxtune"
    own = {path for path in package.rglob("*.*") if path.parent.name != "__pycache__"}
    demo = {
        f"mlxtune/demo/{path.relative_to(DATA)}": path
        for name in CARRIED
        for path in ([DATA / name] if (DATA / name).is_file() else (DATA / name).iterdir())
    }
    assert len(demo) == sum(CARRIED.values())
    assert found == {str(path.relative_to(ROOT)) for path in own} | demo.keys()
    assert contents == {name: path.read_bytes() for name, path in demo.items()}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed wheel's command, in an environment that also sees the current packages."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
    # A folder named in a .pth file is added without its own .pth files, so an editable mlxtune is
    # not found.
    below = Path(found.stdout.strip()) / "below.pth"
    below.write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--force-reinstall", wheel], check=True)
    return folder / "bin" / "mlxtune"


def without_the_clone() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_installed_package_finds_the_demo_that_it_carries(installed: Path, tmp_path: Path) -> None:
    script = "from mlxtune import DemoConfig as D; run = D().training(); print(run.model_path)"
    command = [installed.with_name("python"), "-c", f"{script}; print(*run.data)"]
    found = subprocess.run(
        command, cwd=tmp_path, env=without_the_clone(), check=True, capture_output=True, text=True
    )
    model, data = map(Path, found.stdout.splitlines())
    assert (model / "config.json").is_file()
    assert data.is_file()
    assert model.is_relative_to(installed.parents[1])
