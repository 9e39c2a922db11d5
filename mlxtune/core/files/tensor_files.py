"""The header of a safetensors file, checked before any of its tensors is read.

The safetensors library checks that the tensors cover each byte of the data once. This module limits
the header's size, names and shapes, and refuses a file made of holes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxtune.config.limits import HEADER_LIMITS, MAX_TENSOR_NAME_CHARS, check_bytes, check_count
from mlxtune.core.files.reading import check_open, is_lfs_pointer, open_regular
from mlxtune.errors import one_line

# MLX stores dimensions as 32-bit integers.
_MAX_DIMENSION, _MAX_DIMENSIONS = 2**31 - 1, 16


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in a header: its dtype, such as `F32` or `BF16`, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorHeader:
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: Path) -> TensorHeader:
    """Return the header of a safetensors file, after checking that its data is complete.

    Raises ValueError, which names the file and the fault. Raises OSError.
    """
    # Imported here, as the core must be importable without safetensors.
    from safetensors import SafetensorError, safe_open

    name = f"the header of {path.name}"
    with open_regular(path) as file:
        check_open(path.name, file)
        start = file.read(8)
        if start == b"version " and is_lfs_pointer(start + file.read(64)):
            raise ValueError(f"{path.name} is a Git LFS pointer: run git lfs pull in its folder")
        length = int.from_bytes(start, "little")
        if length > os.fstat(file.fileno()).st_size - 8:
            raise ValueError(f"{path.name} is not complete: its header has {length:,} bytes")
        check_bytes(name, length, HEADER_LIMITS)
        check_count(file.read(length), HEADER_LIMITS, name)
    try:
        with safe_open(path, "numpy") as opened:
            slices = {each: opened.get_slice(each) for each in opened.keys()}  # noqa: SIM118
            header = TensorHeader(
                {
                    each: TensorInfo(part.get_dtype(), tuple(part.get_shape()))
                    for each, part in slices.items()
                },
                opened.metadata() or {},
            )
    except SafetensorError as error:
        raise ValueError(f"{name} is not valid: {one_line(error)}") from error
    for tensor, info in header.tensors.items():
        if len(tensor) > MAX_TENSOR_NAME_CHARS:
            raise ValueError(f"in {name}, a tensor's name has {len(tensor):,} characters")
        if len(info.shape) > _MAX_DIMENSIONS or any(each > _MAX_DIMENSION for each in info.shape):
            raise ValueError(f"{name} has an invalid shape for {tensor}: {info.shape!r:.60}")
    return header
