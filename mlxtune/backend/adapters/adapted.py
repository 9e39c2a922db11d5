"""A base model with a trained adapter on it, as it is run after training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import get_total_parameters

from mlxtune.backend.adapters.adapter_files import (
    Said,
    check_rank,
    find_adapter,
    in_layer,
    module_names,
    read_adapter_config,
    read_said,
    read_tensors,
)
from mlxtune.backend.adapters.adapter_state import adapter_tensors, check_shapes
from mlxtune.backend.adapters.initial import measure_rows
from mlxtune.backend.lora.lora import (
    DropoutKeys,
    LoRASummary,
    Update,
    adapter_of,
    is_projection,
    summary_of,
)
from mlxtune.backend.model.loading import BaseModel
from mlxtune.config import InstructConfig
from mlxtune.config.ranks import alpha_of
from mlxtune.core.training.checkpoint import ADAPTER_CONFIG
from mlxtune.errors import ConfigError, ModelError, one_line

__all__ = ["Adapted", "find_adapter", "load_adapted", "read_adapter_config"]


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


def load_adapted(base: BaseModel, adapter: str) -> Adapted:
    """Put an adapter in mlx-lm's layout on a base model, ours or one that mlx-lm trained.

    It goes on the modules that the file has tensors of, by their full names.

    Raises ModelError where it does not fit.
    """
    weights = find_adapter(adapter)
    said = read_said(weights)
    tensors = read_tensors(weights)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    check_rank(weights, shapes, said)
    names = module_names(weights, tensors, said.kind)
    total, dropout_keys = get_total_parameters(base.model), DropoutKeys()
    modules = _with_updates(weights, base.model, names, said, dropout_keys)
    base.model.freeze()
    base.model.update_modules(tree_unflatten(list(modules.items())))
    check_shapes(weights, shapes, adapter_tensors(base.model))
    base.model.update(tree_unflatten(list(tensors.items())))
    measure_rows(modules)
    base.model.eval()
    places = [place for name in names if (place := in_layer(name))]
    counts = Counter(layer for layer, _ in places)
    lora = summary_of(
        base.model,
        _config_of(weights, said, sorted({path for _, path in places} or names)),
        keys={path for _, path in places} or names,
        layers=[counts[i] for i in range(min(counts, default=0), base.num_layers)],
        total_parameters=total,
        dropout_keys=dropout_keys,
    )
    return Adapted(base, weights, lora, modules)


def _with_updates(
    weights: Path, model: nn.Module, names: list[str], said: Said, dropout_keys: DropoutKeys
) -> dict[str, nn.Module]:
    """Return the modules of a model that have these names, with LoRA on them."""
    there = dict(model.named_modules())
    update = Update(rank=said.rank, scale=said.scale, kind=said.kind)
    modules = {}
    for name in names:
        module = there.get(name)
        if module is None:
            raise ModelError(f"{weights}: does not fit the model, which has no {name:.200}")
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            raise ModelError(f"{weights}: has LoRA on embeddings, {name}: only projections may")
        if not is_projection(module):
            raise ModelError(f"{weights}: has LoRA on {name}, which is no projection of the model")
        modules[name] = adapter_of(module, name, update, dropout_keys)
    return modules


def _config_of(weights: Path, said: Said, targets: list[str]) -> InstructConfig:
    """Return the options that describe an adapter."""
    own = said.own if said.own.get("init", "lora") == "lora" else {}
    rslora = own.get("rslora") is True
    try:
        return InstructConfig(
            lora_rank=own.get("rank", said.rank),
            lora_alpha=own.get("alpha", alpha_of(said.scale, said.rank, rslora=rslora)),
            targets=tuple(targets),
            dora=said.kind == "dora",
            rslora=rslora,
            target_rank=own.get("target_ranks", {}),
        )
    except ConfigError as error:
        raise ModelError(f"{weights.with_name(ADAPTER_CONFIG)}: {one_line(error)}") from error
