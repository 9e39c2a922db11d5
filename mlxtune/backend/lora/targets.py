"""The projections of a model that get LoRA, and their ranks."""

import difflib
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxtune.backend.models.stored_layers import dimensions
from mlxtune.backend.workers.shards import ShardedLinear
from mlxtune.config import InstructConfig
from mlxtune.config.lora_config import pattern_of
from mlxtune.errors import ModelError

# Layers that stack the matrices of all experts.
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
PROJECTIONS = (nn.Linear, nn.QuantizedLinear, *EXPERTS)
# Config keys of various architectures for the number of experts per token.
_EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)
# Gemma 3n clips the weights of these modules in each pass, so they cannot have LoRA.
_CLIPPED_MODULES = ("prediction_coefs", "correction_coefs")


def experts_per_token(options: Mapping[str, Any]) -> int | None:
    """Return the largest number of experts per token in a model's options; None if unknown."""
    per_token = next((options[name] for name in _EXPERTS_PER_TOKEN_KEYS if options.get(name)), None)
    return max(map(int, per_token)) if isinstance(per_token, list) else per_token and int(per_token)


def projections(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the linear projections of a layer or model, by path."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, PROJECTIONS) and not name.endswith(_CLIPPED_MODULES)
    }


def projections_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the projections in a model's layers by their path in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        names[id(module)]: module
        for layer in model.layers
        for module in projections(layer).values()
    }


def choose_targets(model: nn.Module, config: InstructConfig) -> dict[str, nn.Module]:
    """Return the projections that the options name, by path in the model; read no weights.

    Raises ModelError if an option does not match the model or does not work with a projection.
    """
    layers = list(model.layers)
    if config.num_layers is not None and config.num_layers > len(layers):
        raise ModelError(f"--num-layers {config.num_layers}: the model has {len(layers)} layers")
    layers = layers[-(config.num_layers or len(layers)) :]
    keys = _match(layers, config.targets)
    selected = {
        id(module) for layer in layers for key, module in projections(layer).items() if key in keys
    }
    modules = {
        name: module for name, module in projections_of(model).items() if id(module) in selected
    }
    used = {pattern_of(name, config.target_ranks) for name in modules}
    if unused := [target for target in config.target_ranks if target not in used]:
        raise ModelError(
            f"--target-rank: no target is named {', '.join(unused)}; "
            f"the targets are {', '.join(sorted(keys))}"
        )
    for name, module in modules.items():
        check_trainable(name, module, config)
    return modules


def rank_of(name: str, config: InstructConfig) -> int:
    """Return the rank that the options give the module with this path in the model."""
    pattern = pattern_of(name, config.target_ranks)
    return config.rank if pattern is None else config.target_ranks[pattern]


def check_trainable(name: str, module: nn.Module, config: InstructConfig) -> None:
    """Raise ModelError if an option does not work with a projection."""
    if isinstance(module, ShardedLinear) and (config.dora or config.is_pissa):
        option = "--dora" if config.dora else f"--init {config.init}"
        raise ModelError(f"{option} does not work with --parallel tensor: leave one of them out")
    if hasattr(module, "sharded_in_place"):
        raise ModelError(
            f"--parallel tensor shards {name} in a way that LoRA does not support: "
            "name other --targets"
        )
    if isinstance(module, EXPERTS):
        options = {
            "--dropout": config.dropout > 0,
            "--dora": config.dora,
            f"--init {config.init}": config.is_pissa,
        }
        if refused := [option for option, is_set in options.items() if is_set]:
            raise ModelError(
                f"{refused[0]} does not work on the experts of {name}: "
                "leave it out, or name other --targets"
            )
    elif config.is_pissa and (rank := rank_of(name, config)) > min(dimensions(module)):
        raise ModelError(
            f"--init pissa: {name} has only {min(dimensions(module))} singular vectors, fewer than "
            f"its rank of {rank}: lower the rank with --rank or --target-rank"
        )


def _match(layers: list[nn.Module], targets: tuple[str, ...]) -> set[str]:
    """Return the paths, within a layer, of the projections that the targets match.

    Raises ModelError if any target matches nothing.
    """
    available = sorted({name for layer in layers for name in projections(layer)})
    routers = {name for layer in layers for name in _routers(projections(layer))}
    matches: set[str] = set()
    unmatched = []
    for target in targets:
        matching = {
            name
            for name in available
            if (target == "all" and name not in routers) or is_named(name, target)
        }
        if not matching:
            last_names = [name.rsplit(".", 1)[-1] for name in available]
            close = difflib.get_close_matches(target, available + last_names, n=1)
            close = ["all"] if target.startswith("all") else close  # PEFT's all-linear
            unmatched.append(target + (f" (did you mean {close[0]}?)" if close else ""))
        matches |= matching
    if unmatched:
        raise ModelError(
            f"--targets: no projection is named {', '.join(unmatched)}; "
            f"this model has {', '.join(available)}"
        )
    return matches


def is_named(path: str, target: str) -> bool:
    """Return whether a target equals the last components of a path in a layer."""
    return f".{path}".endswith(f".{target}")


def _routers(modules: dict[str, nn.Module]) -> set[str]:
    """Return the paths of a layer's routers, which choose the experts of each token.

    `all` excludes them: training a router would change which experts the tokens use.
    """
    experts = {len(module.weight) for module in modules.values() if isinstance(module, EXPERTS)}
    return {
        name
        for name, module in modules.items()
        if {"gate", "router"} & set(name.split("."))
        and module.weight.ndim == 2
        and len(module.weight) in experts
    }
