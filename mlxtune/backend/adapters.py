"""Adapters in mlx-lm's layout: adapters.safetensors and adapter_config.json."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import safetensors
import safetensors.numpy
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.lora import LoRASummary
from mlxtune.core.checkpoint import ADAPTER_CONFIG, write_file, write_json
from mlxtune.errors import ModelError


def adapter_tensors(model: nn.Module) -> dict[str, mx.array]:
    """Return the trainable tensors by their full name in the model."""
    return dict(tree_flatten(model.trainable_parameters()))


def write_adapter(weights: Path, model: nn.Module, lora: LoRASummary, base_model: str) -> None:
    """Write an adapter file, and adapter_config.json beside it, each whole or not at all.

    Tensors are float32 and in the order of their names, so that equal adapters are equal bytes.

    Raises OutputError.
    """
    tensors = {
        name: np.ascontiguousarray(np.array(value.astype(mx.float32)))
        for name, value in sorted(adapter_tensors(model).items())
    }
    config = {
        "fine_tune_type": "lora",
        "model": base_model,
        "num_layers": lora.num_layers,
        "lora_parameters": {
            "rank": lora.rank,
            "scale": lora.scale,
            "dropout": lora.dropout,
            "keys": list(lora.keys),
        },
    }
    write_file(weights, [safetensors.numpy.save(tensors, metadata={"format": "mlx"})])
    write_json(weights.with_name(ADAPTER_CONFIG), config)


def read_adapter(weights: Path, model: nn.Module) -> None:
    """Put an adapter file's tensors into a model that has LoRA of the same shapes.

    Raises ModelError, naming every tensor that does not fit, and changes nothing then.
    """
    try:
        tensors = safetensors.numpy.load_file(weights)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{weights}: cannot be read: {error}") from error
    expected = {name: tuple(value.shape) for name, value in adapter_tensors(model).items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    problems = [
        f"{name} is {found.get(name, 'missing')}, the model has {expected.get(name, 'none')}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if problems:
        raise ModelError(f"{weights}: does not fit the model: {'; '.join(problems)}")
    model.update(tree_unflatten([(name, mx.array(value)) for name, value in tensors.items()]))
