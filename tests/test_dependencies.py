"""Whether the dependencies in pyproject.toml have wheels for the oldest Mac that is supported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow

# Everything a person may ask for on a Mac.
EXTRAS = ("parquet", "trackio", "tensorboard", "wandb", "gguf")


def resolve(*options: str, macos: str = "14.0") -> subprocess.CompletedProcess[str]:
    """Resolve pyproject.toml from wheels alone, for Apple silicon."""
    beside_python = Path(sys.executable).with_name("uv")
    uv = str(beside_python) if beside_python.exists() else shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv: pip install -e '.[dev]'")
    fixed = ("--only-binary", ":all:", "--python-platform", "aarch64-apple-darwin")
    quiet = ("--quiet", "--no-header", "--no-annotate")
    result = subprocess.run(
        [uv, "pip", "compile", *quiet, *fixed, *options, "pyproject.toml"],
        cwd=ROOT,
        env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": macos},
        capture_output=True,
        text=True,
    )
    if "Failed to fetch" in result.stderr or "error sending request" in result.stderr:
        pytest.skip("needs a package index, and none can be reached")
    return result


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_dependencies_resolve_for_apple_silicon(python: str) -> None:
    extras = [option for name in EXTRAS for option in ("--extra", name)]
    result = resolve("--python-version", python, *extras)

    assert result.returncode == 0, result.stderr
    resolved = dict(line.split("==") for line in result.stdout.splitlines() if "==" in line)
    assert {"mlx", "mlx-metal", "mlx-lm", "trackio", "gguf"} <= resolved.keys()
    # Those are for Linux alone.
    assert not {"mlx-cpu", "mkl", "numba"} & resolved.keys()


def test_macos_before_14_is_refused_by_mlx() -> None:
    """So the test above fails when a dependency stops serving macOS 14."""
    result = resolve("--python-version", "3.11", macos="13.0")

    assert result.returncode != 0
    assert "macosx_13_0_arm64" in result.stderr
