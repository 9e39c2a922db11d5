"""Applies LoRA or DoRA to a model, and describes the result."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.utils import get_total_parameters

from mlxtune.backend.lora.layers import (
    DoRALinear,
    DropoutKeys,
    LoRALinear,
    PrincipalFactors,
    hash_of,
)
from mlxtune.backend.lora.targets import EXPERTS, chosen_layers, match_targets, projections, rank_of
from mlxtune.config import InstructConfig
from mlxtune.config.ranks import pattern_of, scale_of, target_ranks
from mlxtune.errors import ModelError


@dataclass(frozen=True)
class LoRASummary:
    """The LoRA on a model: its options, and the modules that they matched.

    `keys` are the paths of the targets within a layer, `num_layers` how many of the last layers
    were searched, `layers` how many of these had a match. An adapter file has one rank, the
    largest, and its scale. `trained_as_written`: its tensors are the trained ones, unpadded.
    """

    config: InstructConfig
    keys: tuple[str, ...]
    num_layers: int
    modules: int
    layers: int
    trainable_parameters: int
    total_parameters: int
    dropout_keys: DropoutKeys
    scale: float
    written_rank: int
    trained_as_written: bool

    @property
    def kind(self) -> str:
        """mlx-lm's fine_tune_type."""
        return "dora" if self.config.dora else "lora"

    def describe(self) -> str:
        """Describe the trained parameters in one line."""
        config = self.config
        share = self.trainable_parameters / self.total_parameters
        ranks = target_ranks(config.target_rank)
        exceptions = ", ".join(f"{name} {rank}" for name, rank in ranks.items())
        scale = scale_of(config.lora_alpha, config.lora_rank, rslora=config.rslora)
        formula = " = alpha / √rank" if config.rslora else ""
        extras = [
            "DoRA" if config.dora else "",
            f"initialised by {config.init}" if config.init != "lora" else "",
            f"starting from {config.init_adapter}" if config.init_adapter is not None else "",
            f"B learns {config.lr_ratio:g} times as fast as A" if config.lr_ratio != 1 else "",
        ]
        return (
            f"rank {config.lora_rank}{f' ({exceptions})' if ranks else ''}, "
            f"alpha {config.lora_alpha:g} (scale {scale:g}{formula}) on "
            f"{', '.join(config.targets)}: {self.modules} modules in {self.layers} layers, "
            f"{self.trainable_parameters:,} trainable parameters ({share:.3%})"
            + "".join(f"; {extra}" for extra in extras if extra)
        )


def apply_lora(model: nn.Module, config: InstructConfig) -> LoRASummary:
    """Freeze a model and put LoRA on the targets of its last `num_layers` layers (None: all).

    No weight is read. PiSSA and a first adapter are applied by `initialise`.

    Raises ModelError if any target matches nothing.
    """
    layers = chosen_layers(model, config)
    keys = match_targets(layers, config.targets)
    names = {id(module): name for name, module in model.named_modules()}
    dropout_keys = DropoutKeys()
    model.freeze()
    for layer in layers:
        add_lora(layer, names[id(layer)], keys, config, dropout_keys)
    ranks = target_ranks(config.target_rank)
    used = {pattern_of(name, ranks) for name in adapted_modules(model)}
    if unused := [target for target in ranks if target not in used]:
        raise ModelError(
            f"--target-rank: {', '.join(unused)} is not a target; "
            f"the targets are {', '.join(sorted(keys))}"
        )
    return summarise(model, config, dropout_keys)


def add_lora(
    layer: nn.Module,
    name: str,
    keys: Collection[str],
    config: InstructConfig,
    dropout_keys: DropoutKeys,
) -> None:
    """Put LoRA on the projections of a layer that have these paths in it."""
    adapted = []
    for key, module in projections(layer).items():
        if key in keys:
            path = f"{name}.{key}"
            rank = rank_of(path, config)
            scale = scale_of(config.lora_alpha, rank, rslora=config.rslora)
            adapted.append((key, lora_layer(module, path, rank, scale, config, dropout_keys)))
    layer.update_modules(tree_unflatten(adapted))


def summarise(model: nn.Module, config: InstructConfig, dropout_keys: DropoutKeys) -> LoRASummary:
    """Return the summary of a model with LoRA."""
    matches = [list(adapted_modules(layer)) for layer in model.layers]
    # A is (in, rank), or (experts, rank, in); a file holds PiSSA's initial factors too.
    factor = 2 if config.init != "lora" else 1
    written = {(factor * m.lora_a.shape[1], m.scale) for m in adapted_modules(model).values()}
    rank, scale = max(written)
    return LoRASummary(
        config=config,
        keys=tuple(sorted({path for paths in matches for path in paths})),
        num_layers=config.num_layers or len(matches),
        modules=sum(map(len, matches)),
        layers=sum(map(bool, matches)),
        trainable_parameters=sum(p.size for _, p in tree_flatten(model.trainable_parameters())),
        # Those of LoRA are not counted: its layers have children.
        total_parameters=get_total_parameters(model),
        dropout_keys=dropout_keys,
        scale=scale,
        written_rank=rank,
        trained_as_written=len(written) == 1 and config.init == "lora",
    )


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model or layer that have LoRA, by their path in it."""
    return {name: module for name, module in model.named_modules() if "lora_a" in module}


def lora_layer(
    module: nn.Module,
    name: str,
    rank: int,
    scale: float,
    config: InstructConfig,
    dropout_keys: DropoutKeys,
) -> nn.Module:
    """Return a projection with LoRA on it, of this rank and scale whatever those of the config.

    Raises ModelError if that is not possible.
    """
    key = mx.random.key(hash_of(f"{config.seed}/lora/{name}", 8))
    if isinstance(module, EXPERTS):
        return _lora_experts(module, name, rank, scale, config, key)
    kind = DoRALinear if config.dora else LoRALinear
    layer = kind(
        module,
        rank=rank,
        scale=scale,
        dropout=config.dropout,
        key=key,
        dropout_keys=dropout_keys,
        salt=hash_of(f"dropout/{name}", 4),
    )
    if config.init != "lora":
        limit = min(layer.lora_a.shape[0], layer.lora_b.shape[1])
        if rank > limit:
            raise ModelError(
                f"--init pissa: {name} has only {limit} singular vectors, fewer than a rank of "
                f"{rank}: lower its rank with --rank or --target-rank"
            )
        # Placeholders of the right shape until the factors are computed or read.
        layer.principal = PrincipalFactors(mx.zeros_like(layer.lora_a), layer.lora_b)
    return layer


def _lora_experts(
    module: nn.Module, name: str, rank: int, scale: float, config: InstructConfig, key: mx.array
) -> nn.Module:
    if config.dropout:
        raise ModelError(f"--dropout does not work on the experts of {name}: set it to 0")
    for option, given in ("--dora", config.dora), ("--init pissa", config.init != "lora"):
        if given:
            raise ModelError(
                f"{option} does not work on the experts of {name}: "
                "leave it out, or name other --targets"
            )
    experts = LoRASwitchLinear.from_base(module, r=rank, scale=scale)
    bound = 1 / math.sqrt(module.input_dims)
    experts.lora_a = mx.random.uniform(-bound, bound, experts.lora_a.shape, key=key)
    return experts
