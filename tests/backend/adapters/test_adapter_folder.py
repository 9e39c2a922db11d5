"""Paths at which an adapter is found, and errors that name what to do where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.backend.adapters.adapter_folder import find_adapter
from mlxtune.core.run.checkpoint import write_checkpoint
from mlxtune.errors import ModelError


def test_adapter_is_found_by_file_folder_and_run(tmp_path: Path) -> None:
    file = tmp_path / "out" / "adapters.safetensors"
    best = tmp_path / "run" / "checkpoints" / "best" / "adapters.safetensors"
    for path in (file, best):
        path.parent.mkdir(parents=True)
        path.touch()
    assert find_adapter(str(file)) == find_adapter(str(file.parent)) == file
    assert find_adapter(str(tmp_path / "run" / "checkpoints")) == best
    assert find_adapter(str(tmp_path / "run")) == best


def test_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapters\.safetensors: --adapter takes"):
        find_adapter(str(tmp_path))


def test_path_without_an_adapter_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="x: no such file or folder: check --init-adapter"):
        find_adapter(str(tmp_path / "x"), "--init-adapter")
    run = tmp_path / "my run" / "checkpoints"
    for step in (9, 12):
        write_checkpoint(run / f"step-{step}", save_adapter, {"step": step})
    for path in (run, run.parent):
        with pytest.raises(ModelError, match=r"not finished: .*my run', or .*/step-12'$"):
            find_adapter(str(path))
    (run / "result.json").touch()
    with pytest.raises(ModelError, match=r"has no adapters.safetensors: use --adapter '.*step-12'"):
        find_adapter(str(run.parent))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match=r"convert it with mlxtune import .* --output imported"):
        find_adapter(str(tmp_path))


def save_adapter(folder: Path) -> None:
    (folder / "adapters.safetensors").touch()
