"""mlx-lm's adapter folder: the one that training writes, as it is."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
from mlx_lm.tuner.utils import load_adapters

from mlxtune.core.machine.files import write_file
from mlxtune.core.training.checkpoint import ADAPTER, ADAPTER_CONFIG
from mlxtune.errors import ModelError, one_line


def write_mlx_lm(weights: Path, folder: Path) -> None:
    """Copy an adapter and its config, byte for byte. Raises ModelError or OutputError."""
    for path, name in (weights, ADAPTER), (weights.with_name(ADAPTER_CONFIG), ADAPTER_CONFIG):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        write_file(folder / name, [content])


def load_with_mlx_lm(model: nn.Module, folder: Path) -> nn.Module:
    """Put an adapter on a base model by mlx-lm's own code. Raises ModelError."""
    try:
        adapted = load_adapters(model, str(folder))
    except Exception as error:
        raise ModelError(f"{folder}: mlx-lm does not load it: {one_line(error)}") from error
    adapted.eval()
    return adapted
