"""Files that declare a large size but consist of holes, which cost their maker nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxtune.core.files.reading import file_hash

SIZES = {"F32": 4, "F16": 2, "I32": 4, "C64": 8, "U64": 8}


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], content: bytes = b""
) -> None:
    """Write a safetensors file of these dtypes and shapes; after `content`, the data is a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        size = SIZES[dtype]
        for each in shape:
            size *= each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + content)
        file.truncate(8 + len(text) + end)


def enlarge(path: Path, size: int) -> None:
    """Enlarge a file to `size` bytes, with a hole after its present content."""
    with path.open("ab") as file:
        file.truncate(size)


def shapes_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor in a safetensors file."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    return {name: (each["dtype"], tuple(each["shape"])) for name, each in header.items()}


def list_again(checkpoint: Path, *hashed: str) -> None:
    """Update all sizes in a checkpoint's manifest, and the hashes of files not in `hashed`."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        file = checkpoint / name
        manifest["files"][name]["size"] = file.stat().st_size
        if name not in hashed:
            manifest["files"][name]["sha256"] = file_hash(file)
    path.write_text(json.dumps(manifest))
