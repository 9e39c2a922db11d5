"""Which projections of a model get LoRA, and with what rank."""

import difflib

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxtune.config import InstructConfig
from mlxtune.config.ranks import pattern_of, target_ranks
from mlxtune.errors import ModelError

# The experts of a mixture, stacked in one layer.
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
PROJECTIONS = (nn.Linear, nn.QuantizedLinear, *EXPERTS)
# Gemma 3n clips the weights of these itself whenever it runs.
_CLIPPED = ("prediction_coefs", "correction_coefs")


def projections(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the linear projections of a layer, or of a model, by their path in it."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, PROJECTIONS) and not name.endswith(_CLIPPED)
    }


def projections_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the projections in a model's layers by their path in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        names[id(module)]: module
        for layer in model.layers
        for module in projections(layer).values()
    }


def chosen_layers(model: nn.Module, config: InstructConfig) -> list[nn.Module]:
    """Return the last `num_layers` layers, or all of them. Raises ModelError."""
    layers = list(model.layers)
    if config.num_layers is not None and config.num_layers > len(layers):
        raise ModelError(f"--num-layers {config.num_layers}: the model has {len(layers)} layers")
    return layers[-(config.num_layers or len(layers)) :]


def rank_of(name: str, config: InstructConfig) -> int:
    """Return the rank that the options give to a module, by its full name."""
    ranks = target_ranks(config.target_rank)
    pattern = pattern_of(name, ranks)
    return config.lora_rank if pattern is None else ranks[pattern]


def match_targets(layers: list[nn.Module], targets: tuple[str, ...]) -> set[str]:
    """Return the paths within a layer of the projections that targets name.

    Raises ModelError if any target matches nothing.
    """
    available = sorted({name for layer in layers for name in projections(layer)})
    matches: set[str] = set()
    unmatched = []
    for target in targets:
        matching = {
            name
            for name in available
            if target == "all" or name == target or name.endswith("." + target)
        }
        if not matching:
            last_names = [name.rsplit(".", 1)[-1] for name in available]
            close = difflib.get_close_matches(target, available + last_names, n=1)
            unmatched.append(target + (f" (did you mean {close[0]}?)" if close else ""))
        matches |= matching
    if unmatched:
        raise ModelError(
            f"--targets: no projection is named {', '.join(unmatched)}; "
            f"this model has {', '.join(available)}"
        )
    return matches
