"""What LoRA begins as, where that is not chance: parts of the weights, or an adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxtune.backend.adapters import adapter_files
from mlxtune.backend.adapters.adapter_state import check_shapes
from mlxtune.backend.adapters.written import as_written, refitted
from mlxtune.backend.lora.dora import DoRALinear
from mlxtune.backend.lora.lora import LoRASummary, adapted_modules
from mlxtune.backend.lora.pissa import begin_pissa
from mlxtune.config.ranks import alpha_of
from mlxtune.core.machine.files import file_hash
from mlxtune.errors import ModelError

# What the scale of an adapter and that of the options may differ by: they are rounded apart.
_SAME = 1e-9


def begin(model: nn.Module, lora: LoRASummary, seed: int) -> str | None:
    """Give LoRA what it begins as. Returns the SHA-256 of the adapter it goes on from, if any.

    Raises ModelError when that does not fit the options.
    """
    modules = adapted_modules(model)
    measure_rows(modules)
    if lora.init != "lora":
        begin_pissa(modules, lora.init, seed)
    if lora.init_adapter is None:
        return None
    weights = adapter_files.find_adapter(lora.init_adapter, "--init-adapter")
    _start_from(weights, model, lora)
    return file_hash(weights)


def measure_rows(modules: dict[str, nn.Module]) -> None:
    """Have DoRA's sizes computed, one dequantised weight after the other."""
    for module in modules.values():
        if isinstance(module, DoRALinear):
            mx.eval(module.m, module._squares)


def _start_from(weights: Path, model: nn.Module, lora: LoRASummary) -> None:
    said = adapter_files.read_said(weights)
    if problems := _disagreements(said, lora):
        raise ModelError(
            f"--init-adapter {weights}: {'; '.join(problems)}: leave these options out to go on "
            "with the adapter's own"
        )
    tensors = adapter_files.read_tensors(weights)
    check_shapes(
        weights,
        {name: tuple(value.shape) for name, value in tensors.items()},
        as_written(model, lora),
    )
    parameters: dict[str, mx.array] = {}
    for name, module in adapted_modules(model).items():
        own_rank = module.lora_a.shape[-1] if module.lora_a.ndim == 2 else module.lora_a.shape[1]
        given = (tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"])
        try:
            a, b = refitted(*given, own_rank, module.scale / lora.scale)
        except ValueError as error:
            raise ModelError(f"{weights}: {name} {error}: check --target-rank") from error
        parameters |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        if "m" in module:
            parameters[f"{name}.m"] = tensors[f"{name}.m"]
    # In rows, as they are read back: products of another layout are rounded otherwise.
    rows = [(name, mx.contiguous(value)) for name, value in parameters.items()]
    model.update(tree_unflatten(rows))
    mx.eval(model.trainable_parameters())


def _disagreements(said: adapter_files.Said, lora: LoRASummary) -> list[str]:
    """Return where an adapter and the options contradict, naming both."""
    problems = []
    if said.kind != lora.kind:
        has = "has --dora" if lora.kind == "dora" else "has no --dora"
        problems.append(f"its type is {said.kind}, this run {has}")
    if said.rank != lora.written_rank:
        problems.append(
            f"its rank is {said.rank}, --rank and --target-rank give {lora.written_rank}"
        )
    elif not math.isclose(said.scale, lora.scale, rel_tol=_SAME):
        problems.append(f"its scale is {said.scale:g}, --alpha {lora.alpha:g} gives {lora.scale:g}")
    return problems


def options_of(adapter: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of TrainConfig under which a run goes on from an adapter.

    `given` are options that are given already; those that say the scale in other words, as --rslora
    does, are followed. Raises ModelError.
    """
    weights = adapter_files.find_adapter(adapter, "--init-adapter")
    said = adapter_files.read_said(weights)
    shapes = adapter_files.read_shapes(weights)
    adapter_files.check_rank(weights, shapes, said)
    names = adapter_files.module_names(weights, shapes, said.kind)
    places = [adapter_files.in_layer(name) for name in names]
    if outside := [name for name, place in zip(names, places, strict=True) if place is None]:
        raise ModelError(f"{weights}: has LoRA on {outside[0]:.200}, which cannot be trained here")
    found = [place for place in places if place is not None]
    last = max(layer for layer, _ in found) + 1
    own = dict(said.own)
    rslora = given.get("rslora", own.get("rslora", False))
    # What PiSSA wrote is twice its rank: it is gone on with as plain LoRA of that.
    exact = own.get("init", "lora") == "lora" and {"rank", "alpha"} <= own.keys()
    exact = exact and rslora == own.get("rslora", False)
    return {
        "rank": own["rank"] if exact else said.rank,
        "alpha": own["alpha"] if exact else alpha_of(said.scale, said.rank, rslora=bool(rslora)),
        "target_rank": own.get("target_ranks", {}) if exact else {},
        "targets": sorted({path for _, path in found}),
        # mlx-lm takes more layers than there are for all.
        "num_layers": said.num_layers if (said.num_layers or last) < last else None,
        "rslora": bool(rslora),
        "dora": said.kind == "dora",
    }
