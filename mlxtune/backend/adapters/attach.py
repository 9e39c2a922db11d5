"""A trained adapter put on its base model, as it runs after training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import get_total_parameters

from mlxtune.backend.adapters.checkpoints import trained_tensors
from mlxtune.backend.adapters.files import (
    AdapterInfo,
    check_rank,
    check_shapes,
    find_adapter,
    module_names,
    read_info,
    read_tensors,
    split_layer,
)
from mlxtune.backend.lora.apply import LayerSettings, LoRASummary, lora_layer, summarise
from mlxtune.backend.lora.layers import DoRALinear, DropoutKeys
from mlxtune.backend.lora.targets import PROJECTIONS
from mlxtune.backend.model.loading import BaseModel, base_quantization
from mlxtune.backend.model.model_folder import read_config
from mlxtune.backend.model.quantize import (
    FORMATS,
    NF4,
    format_name,
    format_parameters,
    is_quantized,
    quantization_of,
)
from mlxtune.config import InstructConfig
from mlxtune.config.ranks import alpha_of
from mlxtune.core.training.checkpoint import ADAPTER_CONFIG
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
        """Switch the adapter on or off, also in a `Forward` that was built with the adapter on."""
        chosen = [(path, module if on else module.linear) for path, module in self.modules.items()]
        self.model.update_modules(tree_unflatten(chosen))


def load_adapted(base: BaseModel, adapter: str) -> Adapted:
    """Put an adapter in mlx-lm's layout on a base model.

    It goes on the modules that the file has tensors for, by their full names. Raises ModelError if
    it does not fit.
    """
    weights = find_adapter(adapter)
    info, tensors = read_info(weights), read_tensors(weights)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    check_rank(weights, shapes, info)
    names = module_names(weights, tensors, info.kind)
    total, dropout_keys = get_total_parameters(base.model), DropoutKeys()
    modules = _lora_layers(weights, base.model, names, info, dropout_keys)
    base.model.freeze()
    base.model.update_modules(tree_unflatten(list(modules.items())))
    check_shapes(weights, shapes, trained_tensors(base.model))
    base.model.update(tree_unflatten(list(tensors.items())))
    for module in modules.values():
        if isinstance(module, DoRALinear):
            module.compute_magnitudes()
    base.model.eval()
    places = [place for name in names if (place := split_layer(name))]
    keys = sorted({path for _, path in places} or names)
    counts = Counter(layer for layer, _ in places)
    matches = [counts[i] for i in range(min(counts, default=0), base.num_layers)]
    config = _config_of(weights, info, keys)
    lora = summarise(base.model, config, keys, matches, total, dropout_keys)
    return Adapted(base, weights, lora, modules)


def _lora_layers(
    weights: Path, model: nn.Module, names: list[str], info: AdapterInfo, dropout_keys: DropoutKeys
) -> dict[str, nn.Module]:
    """Return LoRA layers for the modules of these names."""
    modules = dict(model.named_modules())
    settings = LayerSettings(rank=info.rank, scale=info.scale, kind=info.kind)
    layers = {}
    for name in names:
        module = modules.get(name)
        if module is None:
            raise ModelError(f"{weights}: does not fit the model, which has no {name:.200}")
        if not isinstance(module, PROJECTIONS):
            raise ModelError(
                f"{weights}: has LoRA on {name}, which is not a projection: "
                "mlxtune supports LoRA on projections only"
            )
        layers[name] = lora_layer(module, name, settings, dropout_keys)
    return layers


def _config_of(weights: Path, info: AdapterInfo, targets: list[str]) -> InstructConfig:
    """Return the options that describe an adapter."""
    # A PiSSA adapter has twice the rank of its options: they do not describe the file.
    saved = info.mlxtune if info.mlxtune.get("init", "lora") == "lora" else {}
    rslora = saved.get("rslora") is True
    try:
        return InstructConfig(
            lora_rank=saved.get("rank", info.rank),
            lora_alpha=saved.get("alpha", alpha_of(info.scale, info.rank, rslora=rslora)),
            targets=tuple(targets),
            dora=info.kind == "dora",
            rslora=rslora,
            target_rank=saved.get("target_ranks", {}),
        )
    except ConfigError as error:
        raise ModelError(f"{weights.with_name(ADAPTER_CONFIG)}: {one_line(error)}") from error


def base_options(weights: Path, folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the keywords with which `load_base` loads the base that an adapter was trained on.

    They are empty if training used the folder as stored, or if the folder is already quantised in
    the same format, as by `mlx_lm.convert`. Raises ModelError if it is quantised in another.
    """
    saved, path = read_info(weights).mlxtune, weights.with_name(ADAPTER_CONFIG)
    quantize, double = saved.get("quantize"), saved.get("double_quant", False)
    if quantize is None:
        return {}
    if quantize not in FORMATS or (double and quantize != NF4):
        raise ModelError(
            f"{path}: quantize is {quantize!r:.40}, which this version does not support: "
            "upgrade mlxtune"
        )
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if not is_quantized(config):
        return {"quantize": quantize, "double_quant": bool(double)}
    if quantize == NF4 or quantization_of(config) != format_parameters(quantize):
        raise ModelError(
            f"{folder}: is quantised, but not to {quantize}, as in training: "
            "name the full-precision model"
        )
    return {}


def base_mismatch(weights: Path, base: BaseModel, *, trust_remote_code: bool = False) -> str | None:
    """Return a warning if an adapter was trained on a different base than this one, else None."""
    try:
        trained = base_options(weights, base.folder, trust_remote_code=trust_remote_code)
    except ModelError as problem:
        return str(problem)
    if trained == base_quantization(base):
        return None
    trained_on, remedy = "the base as stored", "leave out --quantize"
    if trained:
        trained_on = f"the base quantised to {format_name(**trained)}"
        double = " --double-quant" if trained["double_quant"] else ""
        remedy = f"add --quantize {trained['quantize']}{double}"
    return f"{weights}: was trained on {trained_on}: {remedy} to continue with that"
