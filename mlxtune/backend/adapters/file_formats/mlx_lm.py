"""Reads, writes and copies mlx-lm's adapter folder, and loads it with mlx-lm itself."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.utils import load_adapters

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.adapter_folder import LEAVES, OWN_CONFIG, write_tensors
from mlxtune.backend.adapters.file_formats.adapter import (
    Adapter,
    Matrix,
    WeightUpdate,
    check_fits,
    check_shapes_fit,
    path_in_layer,
)
from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.writing import as_output_error, write_file, write_json
from mlxtune.core.run.checkpoint import ADAPTER_CONFIG
from mlxtune.errors import ModelError, one_line

# The number of bytes that are copied at once.
_PIECE_BYTES = 2**20
_NO_MODULES: Mapping[str, nn.Module] = MappingProxyType({})


def read_mlx_lm(file: AdapterFile, modules: Mapping[str, nn.Module] = _NO_MODULES) -> Adapter:
    """Read an adapter from a file in mlx-lm's layout.

    The shapes are checked against `modules`, a base model's projections by path, before the tensors
    are read. Raises ModelError.
    """
    info, names, header = file.info, file.module_names(), file.tensors
    for name in names:
        a, b = (header[f"{name}.lora_{leaf}"].shape for leaf in "ab")
        check_shapes_fit(modules.get(name), a, b, name)
    tensors = file.read_tensors()
    updates = {
        name: WeightUpdate(*(np.array(tensors[f"{name}.{leaf}"]) for leaf in LEAVES[info.kind]))
        for name in names
    }
    for name, update in updates.items():
        check_fits(modules.get(name), update, name)
    return Adapter(
        scale=info.scale,
        modules=updates,
        num_layers=info.num_layers or -1,
        dropout=info.dropout,
        model=info.model,
        settings={"mlxtune": dict(info.mlxtune)} if info.mlxtune else {},
    )


def tensors_of(modules: Mapping[str, WeightUpdate]) -> dict[str, Matrix]:
    """Return the tensors of all updates by their mlx-lm names."""
    tensors: dict[str, Matrix] = {}
    for name, update in modules.items():
        tensors |= {f"{name}.lora_a": update.a, f"{name}.lora_b": update.b}
        if update.m is not None:
            tensors[f"{name}.m"] = update.m
    return tensors


def write_mlx_lm(adapter: Adapter, weights: Path) -> None:
    """Write an adapter file, and adapter_config.json next to it, each atomically.

    The file's metadata also holds the config, because adapter_config.json may be replaced by
    another adapter's. Tensors are sorted by name, so that equal adapters give equal bytes. Raises
    OutputError.
    """
    config = {
        "fine_tune_type": "dora" if adapter.is_dora else "lora",
        "model": adapter.model,
        "num_layers": adapter.num_layers,
        "lora_parameters": {
            "rank": adapter.rank,
            "scale": adapter.scale,
            "dropout": adapter.dropout,
            "keys": sorted({path_in_layer(name)[1] for name in adapter.modules}),
        },
    }
    config |= adapter.settings
    # The model's path is left out, because it is private.
    own = {name: value for name, value in config.items() if name != "model"}
    write_tensors(
        weights,
        tensors_of(adapter.modules),
        {"format": "mlx", OWN_CONFIG: json.dumps(own, sort_keys=True)},
    )
    write_json(weights.with_name(ADAPTER_CONFIG), config)


def copy_mlx_lm(file: AdapterFile, weights: Path) -> None:
    """Copy an adapter and its config, byte for byte and each atomically. Raises OutputError."""
    copies = (file.path, weights), (file.config_path, weights.with_name(ADAPTER_CONFIG))
    for path, target in copies:
        with as_output_error(target), open_regular(path) as opened:
            write_file(target, iter(partial(opened.read, _PIECE_BYTES), b""))


def load_with_mlx_lm(model: nn.Module, folder: Path) -> nn.Module:
    """Attach an adapter to a base model with mlx-lm's own code. Raises ModelError."""
    try:
        adapted = load_adapters(model, str(folder))
    except Exception as error:
        raise ModelError(f"{folder} cannot be loaded by mlx-lm: {one_line(error)}") from error
    adapted.eval()
    return adapted
