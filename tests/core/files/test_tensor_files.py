"""Headers of safetensors files: accepted, or refused before any tensor is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mlxtune.config.limits import Limits
from mlxtune.core.files import tensor_files
from mlxtune.core.files.tensor_files import TensorInfo, read_header
from tests.attacks.sparse import write_tensors

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]}


def write(path: Path, header: Any, data: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    path.write_bytes(size + text + b"\1" * data)
    return path


def test_header_matches_the_library(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {
        "weight": np.zeros((3, 5), np.float32),
        "step": np.zeros((), np.uint64),
        "none": np.zeros((0, 4), np.int8),
    }
    safetensors.numpy.save_file(arrays, path, metadata={"format": "mlx"})
    header = read_header(path)
    assert header.metadata == {"format": "mlx"}
    assert header.tensors == {
        "weight": TensorInfo("F32", (3, 5)),
        "step": TensorInfo("U64", ()),
        "none": TensorInfo("I8", (0, 4)),
    }


def test_metadata_may_be_null_as_mlx_writes_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"__metadata__": None, "a": A}, 16)
    assert read_header(path).metadata == {}


NOT_VALID = "is not valid: "
REFUSED: dict[str, tuple[Any, str]] = {
    "overlap": ({"a": A, "b": B | {"data_offsets": [8, 16]}}, NOT_VALID),
    "the same place twice": ({"a": A, "b": A}, NOT_VALID),
    "gap": ({"a": A, "b": B | {"data_offsets": [20, 28]}}, NOT_VALID),
    "gap at the start": ({"b": B}, NOT_VALID),
    "beyond the end": ({"a": A, "b": B | {"shape": [8], "data_offsets": [16, 32]}}, NOT_VALID),
    "before the end": ({"a": A}, NOT_VALID),
    "backwards": ({"a": A | {"data_offsets": [16, 0]}}, NOT_VALID),
    "negative": ({"a": A | {"data_offsets": [-16, 0]}}, NOT_VALID),
    "negative shape": ({"a": A | {"shape": [-2, -2]}}, NOT_VALID),
    "shape of a boolean": ({"a": A | {"shape": [True, 4]}}, NOT_VALID),
    "shape of a fraction": ({"a": A | {"shape": [2.0, 2]}}, NOT_VALID),
    "shape of text": ({"a": A | {"shape": "22"}}, NOT_VALID),
    "shape beyond 32 bits": (
        {
            "a": A | {"shape": [2**32, 0], "data_offsets": [0, 0]},
            "b": B | {"shape": [12], "data_offsets": [0, 24]},
        },
        "invalid shape",
    ),
    "shape of many": ({"a": A | {"shape": [1] * 20 + [4]}, "b": B}, "invalid shape"),
    "other size": ({"a": A | {"shape": [2, 3]}}, NOT_VALID),
    "unknown dtype": ({"a": A | {"dtype": "F31"}}, NOT_VALID),
    "dtype of a list": ({"a": A | {"dtype": ["F32"]}}, NOT_VALID),
    "three offsets": ({"a": A | {"data_offsets": [0, 8, 16]}}, NOT_VALID),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, NOT_VALID),
    "no object": ({"a": [1]}, NOT_VALID),
    "a list": ([A], NOT_VALID),
    "not JSON": (b"{", NOT_VALID),
    "nested": (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", NOT_VALID),
    "long name": ({"a" * 1001: A, "b": B}, "a tensor's name has 1,001 characters"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": A, "b": B}, NOT_VALID),
}


@pytest.mark.parametrize("name", REFUSED)
def test_header_that_no_library_writes_is_refused(tmp_path: Path, name: str) -> None:
    header, said = REFUSED[name]
    with pytest.raises(ValueError, match="header of a") as raised:
        read_header(write(tmp_path / "a", header))
    assert said in str(raised.value)


@pytest.mark.parametrize("length", [1000, 2**40, 2**64 - 1])
def test_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ValueError, match="is not complete"):
        read_header(write(tmp_path / "a", {"a": A, "b": B}, length=length))


def test_header_above_the_size_limit_is_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "HEADER_LIMITS", Limits(100))
    path = write(tmp_path / "a", {"a": A, "b": B}, length=101, data=100)
    with pytest.raises(ValueError, match="the header of a is too large: 101 bytes, more than 100"):
        read_header(path)


def test_file_that_is_nearly_all_a_hole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_tensors(path, {"a": ("F32", (1000, 1000))})
    with pytest.raises(ValueError, match=r"a has 4,000,0.. bytes, but only .* are on disk"):
        read_header(path)


def test_pipe_is_not_read(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "a")
    with pytest.raises(ValueError, match="not a regular file"):
        read_header(tmp_path / "a")
