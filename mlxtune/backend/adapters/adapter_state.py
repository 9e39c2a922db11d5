"""Adapters in mlx-lm's layout, and the state of an optimizer beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import safetensors
import safetensors.numpy
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.adapters.written import as_written
from mlxtune.backend.lora.lora import LoRASummary, adapted_modules
from mlxtune.backend.lora.lora_layer import Taken
from mlxtune.core.machine.files import write_file, write_json
from mlxtune.core.training.checkpoint import ADAPTER, ADAPTER_CONFIG
from mlxtune.errors import ModelError, one_line


def adapter_tensors(model: nn.Module) -> dict[str, mx.array]:
    """Return the trainable tensors by their full name in the model."""
    return dict(tree_flatten(model.trainable_parameters()))


OPTIMIZER = "optimizer.safetensors"
# Of a checkpoint whose adapter is not what is trained, but LoRA that computes the same.
PARAMETERS = "parameters.safetensors"


def adapter_writer(
    model: nn.Module, lora: LoRASummary, base_model: str, said: Mapping[str, Any] | None = None
) -> Callable[[Path], None]:
    """Return what writes the adapter as it is now to a file, and adapter_config.json beside it.

    `said` is what the latter says under `mlxtune`, for those who load the adapter with it.

    Each is written whole or not at all. Tensors are float32 and in the order of their names, so
    that equal adapters are equal bytes. It raises OutputError.
    """
    tensors = as_written(model, lora)
    config: dict[str, Any] = {
        "fine_tune_type": lora.kind,
        "model": base_model,
        "num_layers": lora.num_layers,
        "lora_parameters": {
            "rank": lora.written_rank,
            "scale": lora.scale,
            "dropout": lora.dropout,
            "keys": list(lora.keys),
        },
        # Nothing that mlx-lm needs to know.
        "mlxtune": {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "rslora": lora.rslora,
            "init": lora.init,
            "target_ranks": dict(lora.target_ranks),
        },
    }

    if said:
        config["mlxtune"] |= said

    def write(weights: Path) -> None:
        arrays = {name: value.astype(mx.float32) for name, value in tensors.items()}
        _write_tensors(weights, arrays, {"format": "mlx"})
        write_json(weights.with_name(ADAPTER_CONFIG), config)

    return write


def parameters_writer(model: nn.Module, lora: LoRASummary) -> Callable[[Path], None]:
    """Return what writes, into a folder, what is trained as it is now, if the adapter is not that.

    It raises OutputError.
    """
    if lora.trained_as_written:
        return lambda folder: None
    tensors = _parameters(model)
    return lambda folder: _write_tensors(folder / PARAMETERS, tensors, {"format": "mlx"})


def read_parameters(folder: Path, model: nn.Module, lora: LoRASummary) -> None:
    """Put what a checkpoint was trained to into a model that has LoRA of the same shapes.

    Raises ModelError, naming every tensor that does not fit, and changes nothing then.
    """
    path = folder / (ADAPTER if lora.trained_as_written else PARAMETERS)
    tensors, _ = _read_tensors(path, _parameters(model))
    taken = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_TAKEN)}
    model.update(tree_unflatten(list(tensors.items())))
    for name, module in adapted_modules(model).items():
        if f"{name}{_TAKEN[0]}" in taken:
            module.taken = Taken(*(taken[name + leaf] for leaf in _TAKEN))


# What PiSSA took, which is not trained, beside what is.
_TAKEN = (".taken_a", ".taken_b")


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    tensors = adapter_tensors(model)
    for name, module in adapted_modules(model).items():
        taken = getattr(module, "taken", None)
        if taken is not None:
            tensors |= {name + leaf: x for leaf, x in zip(_TAKEN, (taken.a, taken.b), strict=True)}
    return tensors


def check_adapter(weights: Path, model: nn.Module, lora: LoRASummary) -> int:
    """Return how many tensors a checkpoint's adapter has, of a model with LoRA of the same shapes.

    Raises ModelError where these, or those of what it was trained to, do not fit.
    """
    if not lora.trained_as_written:
        _read_tensors(weights.with_name(PARAMETERS), _parameters(model))
    return len(_read_tensors(weights, as_written(model, lora))[0])


def optimizer_writer(
    state: Mapping[str, Any], settings: Mapping[str, int]
) -> Callable[[Path], None]:
    """Return what writes an optimizer's state as it is now, with settings, to a file."""
    tensors = dict(tree_flatten(state))
    said = {name: str(value) for name, value in settings.items()}
    return lambda path: _write_tensors(path, tensors, said)


def read_optimizer(path: Path, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the state of an optimizer that has the shapes of `state`, and its settings.

    Raises ModelError when it does not fit.
    """
    tensors, said = _read_tensors(path, dict(tree_flatten(state)))
    try:
        settings = {name: int(value) for name, value in said.items()}
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    return tree_unflatten(list(tensors.items())), settings


def _write_tensors(path: Path, tensors: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
    arrays = {name: np.array(value, order="C") for name, value in sorted(tensors.items())}
    write_file(path, [in_order(safetensors.numpy.save(arrays, metadata=metadata))])


def in_order(content: bytes) -> bytes:
    """Return a safetensors file with its metadata in the order of its names.

    The library has them in another order in each process. Of what a header holds, only the
    tensors' own order means something, and that is kept.
    """
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # As it is padded there, so that tensors begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _read_tensors(
    path: Path, expected: Mapping[str, mx.array]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return the tensors of a file that has those shapes, and its metadata. Raises ModelError."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            check_shapes(path, shapes, expected)
            tensors = {name: mx.array(file.get_tensor(name)) for name in shapes}
    except (OSError, safetensors.SafetensorError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    return tensors, metadata


def check_shapes(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, mx.array]
) -> None:
    """Raise ModelError, naming every tensor whose shape is not the one expected."""
    shapes = {name: tuple(value.shape) for name, value in expected.items()}
    problems = [
        f"{name} is {found.get(name, 'missing')}, the model has {shapes.get(name, 'none')}"
        for name in sorted(shapes.keys() | found.keys())
        if shapes.get(name) != found.get(name)
    ]
    if problems:
        raise ModelError(f"{path}: does not fit the model: {'; '.join(problems)}")
