"""The flat file: `lora.{layer}.{projection}.lora_a` (rank, in) and `.lora_b` (out, rank), float32.

The file's metadata holds `rank`, `alpha` and `scale`, and `epoch` and `val_loss` if they are known.
`{projection}` is the last part of a module's path, such as `q_proj`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from mlxtune.backend.adapters.adapter_folder import load_tensors, write_tensors
from mlxtune.backend.adapters.file_formats.adapter import Adapter, Matrix, path_in_layer, updates_in
from mlxtune.errors import ModelError

WEIGHTS = "adapter.safetensors"


def write_flat(adapter: Adapter, folder: Path, metadata: Mapping[str, object]) -> None:
    """Write an adapter as a flat file; each `metadata` value is written as JSON.

    Raises ModelError if the format cannot hold the adapter, and OutputError if writing fails.
    """
    adapter.check_plain("the flat file")
    tensors: dict[str, Matrix] = {}
    for module, name in _flat_names(adapter.modules).items():
        update = adapter.modules[module]
        tensors |= {f"{name}.lora_a": update.a.T, f"{name}.lora_b": update.b.T}
    rank, scale = adapter.rank, adapter.scale
    entries = {"rank": rank, "alpha": scale * rank, "scale": scale, **metadata}
    texts = {name: json.dumps(value) for name, value in entries.items() if value is not None}
    write_tensors(folder / WEIGHTS, tensors, texts)


def read_flat(folder: Path, modules: Iterable[str]) -> Adapter:
    """Read a flat file that `write_flat` wrote; `modules` are the base model's module paths."""
    path = folder / WEIGHTS
    tensors, metadata = load_tensors(path)
    present = {name.rpartition(".")[0] for name in tensors}
    names = _flat_names(module for module in modules if _flat_name(module) in present)
    return Adapter(float(metadata["scale"]), updates_in(path, tensors, names))


def _flat_names(modules: Iterable[str]) -> dict[str, str]:
    """Map modules to their names in the file. Raises ModelError if two modules share a name."""
    names: dict[str, str] = {}
    for module in modules:
        if (name := _flat_name(module)) in names.values():
            raise ModelError(
                f"{module}: another module of the layer has a name with the same last part, and "
                "the flat file keeps only that part: use --format peft"
            )
        names[module] = name
    return names


def _flat_name(module: str) -> str:
    layer, path = path_in_layer(module)
    return f"lora.{layer}.{path.rsplit('.', 1)[-1]}"
