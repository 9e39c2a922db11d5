"""The dependencies in pyproject.toml have wheels for all supported machines.

Each extra installs one MLX library: the CPU's and CUDA's packages own the same file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlxtune.core.machine.facts import MLX_LIBRARIES
from tests.paths import ROOT
from tests.slow import long

# All extras that a Mac user may choose.
EXTRAS = ("parquet", "schema", "trackio", "tensorboard", "wandb", "gguf")
LIBRARIES = {"cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13"}
MACOS, LINUX = "aarch64-apple-darwin", "x86_64-manylinux_2_35"


def resolve(
    *options: str, platform: str = MACOS, macos: str = "14.0", versions: bool = False
) -> set[str]:
    """Return the names of the packages that pyproject.toml resolves to, from wheels only.

    With `versions`, return a requirement of each package's version instead.
    """
    beside_python = Path(sys.executable).with_name("uv")
    uv = str(beside_python) if beside_python.exists() else shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv: pip install -e '.[dev]'")
    fixed = ("--only-binary", ":all:", "--python-platform", platform)
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
    if result.returncode:
        raise LookupError(result.stderr)
    pinned = (line for line in result.stdout.splitlines() if "==" in line)
    return {line.strip() if versions else line.partition("==")[0] for line in pinned}


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", long("3.12"), long("3.13"), "3.14"])
def test_dependencies_resolve_for_apple_silicon(python: str) -> None:
    extras = [option for name in (*EXTRAS, *LIBRARIES, "test") for option in ("--extra", name)]
    resolved = resolve("--python-version", python, *extras)

    assert {"mlx", "mlx-metal", "mlx-lm", "trackio", "gguf"} <= resolved
    # On a Mac, Linux's extras add no package.
    assert resolved & {*MLX_LIBRARIES, "mkl", "numba"} == {"mlx-metal"}


@pytest.mark.slow
def test_macos_before_14_is_refused_by_mlx() -> None:
    """Show that `resolve` notices a dependency without support for a macOS version."""
    with pytest.raises(LookupError, match="macosx_13_0_arm64"):
        resolve("--python-version", "3.11", macos="13.0")


def test_extras_that_a_person_may_name_are_known_here() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = known["optional-dependencies"].keys()
    assert extras == {*EXTRAS, *LIBRARIES, "test", "interop", "docs", "dev"}


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", *LIBRARIES, "test"])
def test_extra_leads_to_one_owner_of_libmlx_on_linux(extra: str) -> None:
    chosen = ["--extra", extra] if extra else []
    resolved = resolve("--python-version", "3.12", *chosen, platform=LINUX)

    expected = LIBRARIES["cpu"] if extra == "test" else LIBRARIES.get(extra)
    assert resolved & set(MLX_LIBRARIES) == ({expected} if expected else set())
    assert {"numba", "mkl", "threadpoolctl"} <= resolved or expected != "mlx-cpu"
    assert not {"numba", "mkl"} & resolved or expected == "mlx-cpu"
