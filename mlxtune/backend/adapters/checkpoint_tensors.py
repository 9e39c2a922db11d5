"""A checkpoint's tensor files: adapter, optimizer and, if the adapter file differs, parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.adapters.adapter_folder import load_tensors, write_tensors
from mlxtune.backend.adapters.file_formats.adapter import Adapter, Matrix, WeightUpdate
from mlxtune.backend.adapters.file_formats.mlx_lm import tensors_of, write_mlx_lm
from mlxtune.backend.lora.apply import LoRASummary, adapted_modules
from mlxtune.backend.lora.lora_layers import LoRALinear, PrincipalFactors
from mlxtune.core.run.checkpoint import ADAPTER, PARAMETERS
from mlxtune.errors import ModelError, one_line

# Suffixes that name PiSSA's initial factors, which are saved with the trained tensors.
_PRINCIPAL = (".taken_a", ".taken_b")


def trained_tensors(model: nn.Module) -> dict[str, mx.array]:
    """Return a model's trainable tensors by their full names."""
    return dict(tree_flatten(model.trainable_parameters()))


def _saved_parameters(model: nn.Module) -> dict[str, mx.array]:
    tensors = trained_tensors(model)
    for name, module in adapted_modules(model).items():
        if (principal := getattr(module, "principal", None)) is not None:
            tensors |= {f"{name}.taken_a": principal.a, f"{name}.taken_b": principal.b}
    return tensors


def _updates(model: nn.Module, lora: LoRASummary) -> dict[str, WeightUpdate]:
    """Return an adapter's updates by module, in the form that mlx-lm applies.

    An adapter file has one rank and one scale, and applies to the stored weights. So lower ranks
    are padded with zeros, B absorbs differing scales, and PiSSA's initial product is subtracted by
    doubling the rank: (A | A0), (B / -B0).
    """
    updates = {}
    for name, module in adapted_modules(model).items():
        plain = (module.lora_a, module.lora_b)
        a, b = module.factors() if isinstance(module, LoRALinear) else plain
        m = np.array(module.m) if "m" in module else None
        update = WeightUpdate(np.array(a), np.array(b), m)
        updates[name] = update.padded(lora.written_rank, module.scale / lora.scale)
    return updates


def adapter_tensors(model: nn.Module, lora: LoRASummary) -> dict[str, Matrix]:
    """Return the tensors of a model's adapter by their mlx-lm names."""
    return tensors_of(_updates(model, lora))


def adapter_writer(
    model: nn.Module, lora: LoRASummary, base_model: str, extra: Mapping[str, Any] | None = None
) -> Callable[[Path], None]:
    """Return a function that writes the current adapter, and adapter_config.json next to it.

    `extra` goes into the config's `mlxtune` part, which mlx-lm ignores. The function raises
    OutputError.
    """
    options = lora.config
    own = {
        "rank": options.rank,
        "alpha": options.alpha,
        "rslora": options.rslora,
        "init": options.init,
        "target_ranks": options.target_ranks,
        **(extra or {}),
    }
    adapter = Adapter(
        scale=lora.scale,
        modules=_updates(model, lora),
        num_layers=lora.num_layers,
        dropout=options.dropout,
        model=base_model,
        settings={"mlxtune": own},
    )
    return partial(write_mlx_lm, adapter)


def parameters_writer(model: nn.Module, lora: LoRASummary) -> Callable[[Path], None]:
    """Return a function that writes the current trained tensors into a folder.

    The function writes nothing if the adapter file has these tensors unchanged. It raises
    OutputError.
    """
    if lora.trained_as_written:
        return lambda folder: None
    tensors = _saved_parameters(model)
    return lambda folder: write_tensors(folder / PARAMETERS, tensors, {"format": "mlx"})


def read_parameters(folder: Path, model: nn.Module, lora: LoRASummary) -> None:
    """Load a checkpoint's trained tensors into a model whose LoRA has the same shapes.

    Raises ModelError if a tensor does not fit, and then leaves the model unchanged.
    """
    path = folder / (ADAPTER if lora.trained_as_written else PARAMETERS)
    tensors, _ = load_tensors(path, _saved_parameters(model))
    principal = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_PRINCIPAL)}
    model.update(tree_unflatten(list(tensors.items())))
    for name, module in adapted_modules(model).items():
        if f"{name}.taken_a" in principal:
            module.principal = PrincipalFactors(*(principal[name + leaf] for leaf in _PRINCIPAL))


def check_tensors_fit(weights: Path, model: nn.Module, lora: LoRASummary) -> int:
    """Return the number of tensors in a checkpoint's adapter.

    Raises ModelError if they, or the checkpoint's trained tensors, do not fit the model.
    """
    if not lora.trained_as_written:
        load_tensors(weights.with_name(PARAMETERS), _saved_parameters(model))
    return len(load_tensors(weights, adapter_tensors(model, lora))[0])


def optimizer_writer(
    state: Mapping[str, Any], settings: Mapping[str, int]
) -> Callable[[Path], None]:
    """Return a function that writes an optimizer's current state, and `settings`, to a path."""
    tensors = dict(tree_flatten(state))
    metadata = {name: str(value) for name, value in settings.items()}
    return lambda path: write_tensors(path, tensors, metadata)


def read_optimizer(path: Path, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a stored optimizer's state and settings.

    Raises ModelError unless the stored state has the names, shapes and dtypes of `state`, and the
    settings are integers.
    """
    tensors, metadata = load_tensors(path, dict(tree_flatten(state)))
    try:
        settings = {name: int(value) for name, value in metadata.items()}
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    return tree_unflatten(list(tensors.items())), settings
