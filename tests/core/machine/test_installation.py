"""The commands that add to an installation, by the tool that made its environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from mlxtune.core.machine.installation import installed_version, installs_extra, pip_command


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


@pytest.fixture
def _no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


@pytest.mark.usefixtures("prefix")
def test_extra_is_added_by_pip() -> None:
    assert installs_extra("gguf") == "pip install 'mlxtune-lora[gguf]'"


@pytest.mark.usefixtures("_no_pip")
def test_environment_of_uv_is_named_as_no_shell_activates_it(prefix: Path) -> None:
    assert installs_extra("gguf") == f"uv pip install --python {prefix} 'mlxtune-lora[gguf]'"
    assert (
        pip_command("uninstall", "-y mlx-cpu") == f"uv pip uninstall --python {prefix} -y mlx-cpu"
    )


@pytest.mark.parametrize("backend", ["pip", "uv"])
def test_environment_of_pipx_is_named_by_its_folder(
    prefix: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "uv":
        request.getfixturevalue("_no_pip")
    (prefix / "pipx_metadata.json").write_text("{}")
    assert installs_extra("gguf") == f"pipx runpip {prefix.name} install 'mlxtune-lora[gguf]'"


def test_absent_package_has_no_version() -> None:
    assert installed_version("no-such-package") is None
