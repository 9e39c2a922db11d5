"""The header of a safetensors file, checked before any of its tensors is read.

The file is 8 bytes with the header's length, the header, which is JSON, and the tensors' data; the
header gives each tensor's dtype, shape and place in the data, without gaps.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxtune.config.limits import HEADER, TENSOR_NAME, check_bytes, parse_json
from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.sizes import check_open

_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_METADATA = "__metadata__"
# MLX's shapes are numbers of 32 bits.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor: its dtype, such as `F32` or `BF16`, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorHeader:
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: Path) -> TensorHeader:
    """Return the header of a safetensors file whose data is there, each byte in one tensor.

    Raises ValueError, which names the file and what is wrong, or OSError.
    """
    with open_regular(path) as file:
        check_open(path.name, file)
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{path.name} is not complete: its header has {length:,} bytes")
        name = f"the header of {path.name}"
        check_bytes(name, length, HEADER)
        entries = parse_json(file.read(length), HEADER, name)
    if not isinstance(entries, dict):
        raise ValueError(f"{name} is not a JSON object")
    # MLX writes null where there is none.
    metadata = entries.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{name} has metadata that is not text")
    tensors, places = {}, []
    for tensor, entry in entries.items():
        tensors[tensor], place = _parse(name, tensor, entry)
        places.append((*place, tensor))
    _check_places(name, sorted(places), size - 8 - length)
    return TensorHeader(tensors, metadata)


def _parse(name: str, tensor: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    if len(tensor) > TENSOR_NAME:
        raise ValueError(f"in {name}, a tensor's name has {len(tensor):,} characters")
    shown = f"{tensor:.100}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name} has no dtype, shape and offsets for {shown}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name} has an unknown dtype for {shown}: {dtype!r:.40}")
    if not _whole(shape) or any(each > _LARGEST for each in shape) or len(shape) > 16:
        raise ValueError(f"{name} has an invalid shape for {shown}: {shape!r:.60}")
    if not _whole(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has invalid offsets for {shown}: {offsets!r:.60}")
    start, end = offsets
    if math.prod(shape) * _BITS[dtype] != (end - start) * 8:
        raise ValueError(
            f"{name} gives {shown} {end - start:,} bytes, which is not {dtype} of {tuple(shape)}"
        )
    return TensorInfo(dtype, tuple(shape)), (start, end)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _check_places(name: str, places: list[tuple[int, int, str]], size: int) -> None:
    end_before = 0
    for start, end, tensor in places:
        if start != end_before:
            problem = "overlaps another" if start < end_before else "leaves a gap before it"
            raise ValueError(f"{name} places {tensor:.100} at {start:,}, where it {problem}")
        end_before = end
    if end_before != size:
        raise ValueError(f"{name} describes {end_before:,} bytes of tensors, the file has {size:,}")
