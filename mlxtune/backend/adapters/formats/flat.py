"""The flat file: `lora.{layer}.{projection}.lora_a` (rank, in) and `.lora_b` (out, rank), float32.

The file's metadata holds `rank`, `alpha` and `scale`, and `epoch` and `val_loss` if they are known.
A projection is named by the last part of its name alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mlxtune.backend.adapters.files import load_tensors, write_tensors
from mlxtune.backend.adapters.formats.adapter import (
    Adapter,
    Matrix,
    Update,
    path_in_layer,
)
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError

WEIGHTS = "adapter.safetensors"
_NAME = re.compile(r"lora\.(\d+)\.([^.]+)\.(lora_a|lora_b)")


def write_flat(adapter: Adapter, folder: Path, metadata: Mapping[str, object]) -> None:
    """Write an adapter as a flat file, with further metadata as JSON.

    Raises ModelError for what the file cannot hold, and OutputError.
    """
    adapter.check_plain("the flat file")
    if adapter.is_dora:
        raise ModelError("the flat file cannot hold DoRA's magnitudes: use --format peft")
    tensors: dict[str, Matrix] = {}
    for module, update in adapter.modules.items():
        layer, path = path_in_layer(module)
        name = f"lora.{layer}.{path.rsplit('.', 1)[-1]}"
        if f"{name}.lora_a" in tensors:
            raise ModelError(
                f"{module}: another module of its layer has the same last name, and the flat file "
                "keeps no more of a name: use --format peft"
            )
        tensors |= {f"{name}.lora_a": update.a.T, f"{name}.lora_b": update.b.T}
    rank, scale = adapter.rank, adapter.scale
    entries = {"rank": rank, "alpha": scale * rank, "scale": scale, **metadata}
    texts = {name: json.dumps(value) for name, value in entries.items() if value is not None}
    write_tensors(folder / WEIGHTS, tensors, texts)


def read_flat(folder: Path, modules: Iterable[str]) -> Adapter:
    """Return the adapter of a flat file; `modules` are the base model's. Raises ModelError."""
    path = folder / WEIGHTS
    by_place: dict[tuple[int, str], list[str]] = {}
    for module in modules:
        layer, inside = path_in_layer(module)
        by_place.setdefault((layer, inside.rsplit(".", 1)[-1]), []).append(module)
    parts: dict[str, dict[str, Matrix]] = {}
    tensors, metadata = load_tensors(path)
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        where = by_place.get((int(match[1]), match[2]), []) if match else []
        if match is None or len(where) != 1:
            raise ModelError(
                f"{path}: {name} matches {join_few(where) or 'no module'} in the base model"
            )
        parts.setdefault(where[0], {})[match[3]] = np.array(tensor.T)
    try:
        scale = float(metadata["scale"])
        updates = {name: Update(each["lora_a"], each["lora_b"]) for name, each in parts.items()}
    except (KeyError, ValueError) as error:
        raise ModelError(f"{path}: has no valid scale, or a module without its A or B") from error
    return Adapter(scale, updates)
