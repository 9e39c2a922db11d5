"""A base model with a trained adapter on it, as it is run after training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxtune.backend.adapters import read_adapter
from mlxtune.backend.lora import LoRALinear, LoRASummary, apply_lora
from mlxtune.backend.model import BaseModel
from mlxtune.config import InstructConfig
from mlxtune.core.checkpoint import ADAPTER, ADAPTER_CONFIG, BEST
from mlxtune.core.files import read_json
from mlxtune.errors import ConfigError, ModelError, one_line


@dataclass(frozen=True)
class Adapted:
    """A model whose adapter can be taken off and put back. `weights` is the adapter's file."""

    base: BaseModel
    weights: Path
    lora: LoRASummary
    modules: Mapping[str, nn.Module]

    @property
    def model(self) -> nn.Module:
        """The model, with the adapter unless `use_adapter` took it off."""
        return self.base.model

    def use_adapter(self, on: bool) -> None:
        """Have the model run with its adapter, or as the base model.

        A `Forward` that was built with the adapter on runs the model as it then stands.
        """
        chosen = [(path, module if on else module.linear) for path, module in self.modules.items()]
        self.model.update_modules(tree_unflatten(chosen))


def find_adapter(path: str) -> Path:
    """Return the adapter file that a path means: the file, its folder, or a run's folder.

    Of a run without an adapter beside its checkpoints, it is that of the best checkpoint.

    Raises ModelError where there is none.
    """
    given = Path(os.path.expanduser(path))  # noqa: PTH111
    candidates = (
        *(given, given / ADAPTER, given / BEST / ADAPTER),
        given / "checkpoints" / BEST / ADAPTER,
    )
    try:
        found = next((each for each in candidates if each.is_file()), None)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}: check --adapter") from error
    if found is None:
        raise ModelError(f"{path}: holds no {ADAPTER}: --adapter takes an adapter or its folder")
    return found


def read_adapter_config(weights: Path) -> dict[str, Any]:
    """Return what adapter_config.json beside an adapter says, in mlx-lm's words.

    Raises ModelError.
    """
    path = weights.with_name(ADAPTER_CONFIG)
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: is missing: an adapter needs it beside its weights") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error


def load_adapted(base: BaseModel, adapter: str) -> Adapted:
    """Put an adapter in mlx-lm's layout on a base model.

    Raises ModelError where it does not fit.
    """
    weights = find_adapter(adapter)
    lora = apply_lora(base.model, _config_of(weights, base))
    read_adapter(weights, base.model)
    base.model.eval()
    modules = {
        name: module
        for name, module in base.model.named_modules()
        if isinstance(module, LoRALinear) or hasattr(module, "lora_a")
    }
    return Adapted(base, weights, lora, modules)


def _config_of(weights: Path, base: BaseModel) -> InstructConfig:
    """Return the options under which LoRA has the shapes of an adapter."""
    config, path = read_adapter_config(weights), weights.with_name(ADAPTER_CONFIG)
    parameters = config.get("lora_parameters")
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora" or not isinstance(parameters, Mapping):
        raise ModelError(f"{path}: is of no kind that mlxtune knows: fine_tune_type {kind!r:.40}")
    layers = config.get("num_layers")
    try:
        rank, scale = int(parameters["rank"]), float(parameters["scale"])
        return InstructConfig(
            lora_rank=rank,
            lora_alpha=scale * rank,
            targets=tuple(parameters.get("keys") or ("all",)),
            num_layers=layers if isinstance(layers, int) and 0 < layers < base.num_layers else None,
        )
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ModelError(f"{path}: does not say rank, scale and keys: {one_line(error)}") from error
