"""LoRA's initial values if they are not random: PiSSA's, or those of an adapter."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxtune.backend.adapters.checkpoints import adapter_tensors, unpad_rank
from mlxtune.backend.adapters.files import (
    AdapterInfo,
    adapter_header,
    check_shapes,
    find_adapter,
    module_names,
    options_of,
    read_info,
    read_tensors,
    split_layer,
)
from mlxtune.backend.lora.apply import LoRASummary, adapted_modules
from mlxtune.backend.lora.layers import DoRALinear
from mlxtune.backend.lora.pissa import init_pissa
from mlxtune.core.files.files import file_hash
from mlxtune.errors import ModelError

# The scales of an adapter and of the options are rounded separately.
_SCALE_TOLERANCE = 1e-9


def initialise(model: nn.Module, lora: LoRASummary) -> str | None:
    """Give LoRA its initial values; return the SHA-256 of the adapter it starts from, if any.

    Raises ModelError if that does not fit the options.
    """
    modules, config = adapted_modules(model), lora.config
    for module in modules.values():
        if isinstance(module, DoRALinear):
            module.compute_magnitudes()
    if config.init != "lora":
        init_pissa(modules, config.init, config.seed)
    if config.init_adapter is None:
        return None
    weights = find_adapter(config.init_adapter, "--init-adapter")
    _start_from(weights, model, lora)
    return file_hash(weights)


def _start_from(weights: Path, model: nn.Module, lora: LoRASummary) -> None:
    if problems := _disagreements(read_info(weights), lora):
        raise ModelError(
            f"--init-adapter {weights}: {'; '.join(problems)}: leave these options out to use "
            "the adapter's"
        )
    check_shapes(weights, adapter_header(weights), adapter_tensors(model, lora))
    tensors = read_tensors(weights)
    for name, module in adapted_modules(model).items():
        a, b, rank = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"], module.lora_a.shape[1]
        try:
            a, b = unpad_rank(a, b, rank, module.scale / lora.scale)
        except ValueError as error:
            raise ModelError(f"{weights}: {name} {error}: check --target-rank") from error
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    # Row-major, as a resumed run reads them: products of another layout round differently.
    rows = [(name, mx.contiguous(value)) for name, value in tensors.items()]
    model.update(tree_unflatten(rows))
    mx.eval(model.trainable_parameters())


def _disagreements(info: AdapterInfo, lora: LoRASummary) -> list[str]:
    problems, alpha = [], lora.config.lora_alpha
    if info.kind != lora.kind:
        dora = "on" if lora.config.dora else "off"
        problems.append(f"its type is {info.kind}, but --dora is {dora}")
    if info.rank != lora.written_rank:
        problems.append(
            f"its rank is {info.rank}, but --rank and --target-rank give {lora.written_rank}"
        )
    elif not math.isclose(info.scale, lora.scale, rel_tol=_SCALE_TOLERANCE):
        problems.append(f"its scale is {info.scale:g}, but --alpha {alpha:g} gives {lora.scale:g}")
    return problems


def with_adapter(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a run with the rank, alpha, targets, layers and kind of its `init_adapter`.

    Given options stay, and are an error later if they contradict the adapter. With --rslora among
    them, the scale is expressed as alpha / √rank. Raises ModelError if training cannot continue
    from the adapter.
    """
    adapter = given.get("init_adapter")
    if not isinstance(adapter, str) or not adapter.strip() or given.get("init", "lora") != "lora":
        return dict(given)
    weights = find_adapter(adapter, "--init-adapter")
    info, places = read_info(weights), []
    for name in module_names(weights, adapter_header(weights), info):
        if (place := split_layer(name)) is None:
            raise ModelError(
                f"{weights}: has LoRA on {name:.200}, outside the layers, where mlxtune cannot "
                "train it"
            )
        places.append(place)
    last = 1 + max(layer for layer, _ in places)
    rslora = bool(given["rslora"]) if "rslora" in given else None
    return {
        **options_of(info, rslora),
        "targets": sorted({path for _, path in places}),
        # mlx-lm reads a num_layers beyond the model's as all layers.
        "num_layers": info.num_layers if (info.num_layers or last) < last else None,
        **given,
    }
