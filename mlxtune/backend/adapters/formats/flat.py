"""The flat file: `lora.{layer}.{projection}.lora_a` (rank, in) and `.lora_b` (out, rank), float32.

The file's metadata says `rank`, `alpha` and `scale`, and `epoch` and `val_loss` where they are
known. A projection goes by its last name alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors

from mlxtune.backend.adapters.formats.adapter import (
    Adapter,
    Matrix,
    Update,
    place_in_layer,
    read_tensors,
    write_tensors,
)
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError

WEIGHTS = "adapter.safetensors"
_NAME = re.compile(r"lora\.(\d+)\.([^.]+)\.(lora_a|lora_b)")


def write_flat(adapter: Adapter, folder: Path, said: Mapping[str, object]) -> None:
    """Write an adapter as a flat file. `said` goes into the file's metadata, as JSON.

    Raises ModelError for what the file has no place for, and OutputError.
    """
    adapter.check_plain("the flat file")
    if adapter.is_dora:
        raise ModelError("the flat file has no place for DoRA's magnitudes: use --format peft")
    tensors: dict[str, Matrix] = {}
    for path, update in adapter.modules.items():
        layer, inside = place_in_layer(path)
        name = f"lora.{layer}.{inside.rsplit('.', 1)[-1]}"
        if f"{name}.lora_a" in tensors:
            raise ModelError(f"{path}: the flat file has one name for it and for another module")
        tensors |= {f"{name}.lora_a": update.a.T, f"{name}.lora_b": update.b.T}
    rank = adapter.rank
    said = {"rank": rank, "alpha": adapter.scale * rank, "scale": adapter.scale, **said}
    metadata = {name: json.dumps(value) for name, value in said.items() if value is not None}
    write_tensors(folder / WEIGHTS, tensors, metadata)


def read_flat(folder: Path, modules: Iterable[str], num_layers: int) -> Adapter:
    """Return the adapter of a flat file. `modules` are the paths of the base model's modules.

    Raises ModelError.
    """
    path = folder / WEIGHTS
    places: dict[tuple[int, str], list[str]] = {}
    for module in modules:
        layer, inside = place_in_layer(module)
        places.setdefault((layer, inside.rsplit(".", 1)[-1]), []).append(module)
    parts: dict[str, dict[str, Matrix]] = {}
    for name, tensor in read_tensors(path).items():
        found = _NAME.fullmatch(name)
        where = places.get((int(found[1]), found[2]), []) if found else []
        if found is None or len(where) != 1:
            raise ModelError(
                f"{path}: {name} means {join_few(where) or 'nothing'} in the base model"
            )
        parts.setdefault(where[0], {})[found[3]] = tensor.T
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    try:
        scale = float(metadata["scale"])
        updates = {name: Update(each["lora_a"], each["lora_b"]) for name, each in parts.items()}
        first_layer = min(place_in_layer(name)[0] for name in updates)
    except (KeyError, ValueError) as error:
        raise ModelError(f"{path}: lacks its scale, or half of a module") from error
    return Adapter(scale=scale, num_layers=num_layers - first_layer, modules=updates)
