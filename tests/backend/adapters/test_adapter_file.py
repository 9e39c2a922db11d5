"""An adapter file that changes after its header was checked."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.errors import ModelError


def write(path: Path, rank: int, value: float) -> Path:
    tensors = {
        "layers.0.q_proj.lora_a": np.full((4, rank), value, np.float32),
        "layers.0.q_proj.lora_b": np.full((rank, 4), value, np.float32),
    }
    new = path.with_name("new")
    safetensors.numpy.save_file(tensors, new)
    new.replace(path)
    return path


def test_file_replaced_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    """MLX does not check the header, so only a header that was checked may be loaded."""
    adapter = AdapterFile(write(tmp_path / "adapters.safetensors", rank=2, value=1.0))
    assert adapter.tensors["layers.0.q_proj.lora_a"].shape == (4, 2)
    assert not adapter.has_changed

    write(adapter.path, rank=3, value=1.0)

    assert adapter.has_changed
    with pytest.raises(ModelError, match="has changed since it was opened: run the command again"):
        adapter.read_tensors()


def test_file_replaced_by_tensors_of_the_same_shapes_is_read(tmp_path: Path) -> None:
    adapter = AdapterFile(write(tmp_path / "adapters.safetensors", rank=2, value=1.0))
    header = adapter.header

    write(adapter.path, rank=2, value=7.0)

    assert adapter.header is header
    assert all((np.array(tensor) == 7.0).all() for tensor in adapter.read_tensors().values())


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (b"xxxx", "values beyond 1e\\+12 in layers.0.q_proj.lora_[ab]: it is damaged: copy"),
        (b"\xff\xff\xff\xff", "NaN or infinite values in layers.0.q_proj.lora_[ab]"),
    ],
)
def test_damaged_bytes_of_a_float_are_an_error(tmp_path: Path, damage: bytes, problem: str) -> None:
    adapter = AdapterFile(write(tmp_path / "adapters.safetensors", rank=2, value=1.0))
    with adapter.path.open("r+b") as file:
        file.seek(-8, 2)
        file.write(damage)
    with pytest.raises(ModelError, match=problem):
        adapter.read_tensors()


def test_removed_file_is_an_error(tmp_path: Path) -> None:
    adapter = AdapterFile(write(tmp_path / "adapters.safetensors", rank=2, value=1.0))
    assert adapter.tensors
    adapter.path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        adapter.read_tensors()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8])
def test_dtypes_that_mlx_cannot_read_are_refused_by_the_header(
    tmp_path: Path, dtype: type[np.generic]
) -> None:
    path = tmp_path / "adapters.safetensors"
    safetensors.numpy.save_file({"layers.0.q_proj.lora_a": np.ones((4, 2), dtype)}, path)
    adapter = AdapterFile(path)
    if np.issubdtype(dtype, np.floating) and loads(path):
        assert adapter.read_tensors()
        return
    with pytest.raises(ModelError, match="floats of 16 or 32 bits: save it again as such"):
        _ = adapter.tensors


def loads(path: Path) -> bool:
    """Return whether MLX reads a file."""
    try:
        return bool(mx.load(str(path)))
    except RuntimeError:
        return False
