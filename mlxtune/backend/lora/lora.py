"""LoRA and its family: which projections get it, with what rank, and what it trains."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.utils import get_total_parameters

from mlxtune.backend.lora.dora import DoRALinear
from mlxtune.backend.lora.lora_layer import DropoutKeys, LoRALinear, Taken, hash_of
from mlxtune.config import InstructConfig
from mlxtune.config.ranks import pattern_of, scale_of, target_ranks
from mlxtune.errors import ModelError

__all__ = [
    "DropoutKeys",
    "LoRALinear",
    "LoRASummary",
    "Update",
    "adapted_modules",
    "adapter_of",
    "apply_lora",
    "chosen_layers",
    "is_projection",
    "match_targets",
    "projections",
    "rank_of",
    "step_keys",
    "summary_of",
]

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class Update:
    """What is put on one projection. `kind` is mlx-lm's fine_tune_type, "lora" or "dora"."""

    rank: int
    scale: float
    kind: str = "lora"
    dropout: float = 0.0
    pissa: bool = False
    seed: int = 0


@dataclass(frozen=True)
class LoRASummary:
    """What `apply_lora` did. `keys` are the matching paths inside a layer, `num_layers` how many
    of the last layers were looked at, `layers` how many of these had a match.

    `rank` is that of the options, `target_ranks` say where it is another. An adapter file has one
    rank and one scale: `written_rank` is the largest, and `scale` the one that belongs to it.
    `trained_as_written` tells whether the file's tensors are those that are trained.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
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
    kind: str = "lora"
    rslora: bool = False
    init: str = "lora"
    init_adapter: str | None = None
    lr_ratio: float = 1.0
    target_ranks: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Say in one line what is trained."""
        share = self.trainable_parameters / self.total_parameters
        ranks = ", ".join(f"{name} {rank}" for name, rank in self.target_ranks.items())
        scale = scale_of(self.alpha, self.rank, rslora=self.rslora)
        formula = " = alpha / √rank" if self.rslora else ""
        ways = [
            "DoRA" if self.kind == "dora" else "",
            f"begun by {self.init}" if self.init != "lora" else "",
            f"going on from {self.init_adapter}" if self.init_adapter is not None else "",
            f"B learns {self.lr_ratio:g} times as fast as A" if self.lr_ratio != 1 else "",
        ]
        return (
            f"rank {self.rank}{f' ({ranks})' if ranks else ''}, alpha {self.alpha:g} "
            f"(scale {scale:g}{formula}) on {', '.join(self.targets)}: {self.modules} modules in "
            f"{self.layers} layers, {self.trainable_parameters:,} trainable parameters "
            f"({share:.3%})" + "".join(f"; {way}" for way in ways if way)
        )


def apply_lora(model: nn.Module, config: InstructConfig) -> LoRASummary:
    """Freeze a model and put LoRA on the targets of its last `num_layers` layers (None: all).

    No weight is read: what PiSSA or an adapter gives it to begin with comes by `begin`.

    Raises ModelError when a target matches nothing, even if another does, with what the model has.
    """
    chosen = chosen_layers(model, config)
    keys = match_targets(chosen, config.targets)
    total = get_total_parameters(model)
    names = {id(module): name for name, module in model.named_modules()}
    ranks = target_ranks(config.target_rank)
    dropout_keys, used = DropoutKeys(), set()
    model.freeze()
    adapted_per_layer = []
    for layer in chosen:
        adapted = []
        for key, module in projections(layer).items():
            if key not in keys:
                continue
            name = names[id(module)]
            used.add(pattern_of(name, ranks))
            update = Update(
                rank=(rank := rank_of(name, config)),
                scale=scale_of(config.lora_alpha, rank, rslora=config.rslora),
                kind="dora" if config.dora else "lora",
                dropout=config.dropout,
                pissa=config.init != "lora",
                seed=config.seed,
            )
            adapted.append((key, adapter_of(module, name, update, dropout_keys)))
        layer.update_modules(tree_unflatten(adapted))
        adapted_per_layer.append(len(adapted))
    if unused := [target for target in ranks if target not in used]:
        raise ModelError(
            f"--target-rank: {', '.join(unused)} is no target; these are {', '.join(sorted(keys))}"
        )
    return summary_of(
        model,
        config,
        keys=keys,
        layers=adapted_per_layer,
        total_parameters=total,
        dropout_keys=dropout_keys,
    )


def summary_of(
    model: nn.Module,
    config: InstructConfig,
    *,
    keys: Iterable[str],
    layers: list[int],
    total_parameters: int,
    dropout_keys: DropoutKeys,
) -> LoRASummary:
    """Return what is said of a model with LoRA; `layers` are its modules in each layer."""
    found = [_written(module) for module in adapted_modules(model).values()]
    rank, scale = max(found)
    return LoRASummary(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.dropout,
        targets=config.targets,
        keys=tuple(sorted(keys)),
        num_layers=len(layers),
        modules=sum(layers),
        layers=sum(count > 0 for count in layers),
        trainable_parameters=sum(p.size for _, p in tree_flatten(model.trainable_parameters())),
        total_parameters=total_parameters,
        dropout_keys=dropout_keys,
        scale=scale,
        written_rank=rank,
        trained_as_written=len(set(found)) == 1 and config.init == "lora",
        kind="dora" if config.dora else "lora",
        rslora=config.rslora,
        init=config.init,
        init_adapter=config.init_adapter,
        lr_ratio=config.lr_ratio,
        target_ranks=target_ranks(config.target_rank),
    )


def _written(module: nn.Module) -> tuple[int, float]:
    """Return the rank and the scale of what an adapter file has of a module."""
    rank = module.lora_a.shape[-1] if module.lora_a.ndim == 2 else module.lora_a.shape[1]
    return rank * (2 if getattr(module, "taken", None) else 1), module.scale


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have LoRA by their full names."""
    return {name: module for name, module in model.named_modules() if "lora_a" in module}


def chosen_layers(model: nn.Module, config: InstructConfig) -> list[nn.Module]:
    """Return the layers that are looked at for targets. Raises ModelError."""
    layers = list(model.layers)
    if config.num_layers is not None and config.num_layers > len(layers):
        raise ModelError(f"--num-layers {config.num_layers}: the model has {len(layers)} layers")
    return layers[-(config.num_layers or len(layers)) :]


def rank_of(name: str, config: InstructConfig) -> int:
    """Return the rank that the options give to a module, by its full name."""
    ranks = target_ranks(config.target_rank)
    pattern = pattern_of(name, ranks)
    return config.lora_rank if pattern is None else ranks[pattern]


def projections(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the linear projections of a layer by their path in it."""
    return {name: module for name, module in layer.named_modules() if is_projection(module)}


def is_projection(module: nn.Module) -> bool:
    """Tell whether LoRA can be put on a module."""
    return isinstance(module, _LINEAR + _EXPERTS)


def match_targets(layers: list[nn.Module], targets: tuple[str, ...]) -> set[str]:
    """Return the paths, in layers, of the projections that targets name. Raises ModelError."""
    available = sorted({name for layer in layers for name in projections(layer)})
    keys: set[str] = set()
    problems = []
    for target in targets:
        matching = {
            name
            for name in available
            if target == "all" or name == target or name.endswith("." + target)
        }
        if not matching:
            last_names = [name.rsplit(".", 1)[-1] for name in available]
            close = difflib.get_close_matches(target, available + last_names, n=1)
            problems.append(target + (f" (did you mean {close[0]}?)" if close else ""))
        keys |= matching
    if problems:
        raise ModelError(
            f"--targets: no projection is named {', '.join(problems)}; "
            f"this model has {', '.join(available)}"
        )
    return keys


def adapter_of(
    module: nn.Module, name: str, update: Update, dropout_keys: DropoutKeys
) -> nn.Module:
    """Return a projection with LoRA on it. Raises ModelError where that is not possible."""
    key = mx.random.key(hash_of(f"{update.seed}/lora/{name}", 8))
    if isinstance(module, _EXPERTS):
        return _experts(module, name, update, key)
    kind = DoRALinear if update.kind == "dora" else LoRALinear
    adapted = kind(
        module,
        rank=update.rank,
        scale=update.scale,
        dropout=update.dropout,
        key=key,
        dropout_keys=dropout_keys,
        salt=hash_of(f"dropout/{name}", 4),
    )
    if update.pissa:
        most = min(adapted.lora_a.shape[0], adapted.lora_b.shape[1])
        if update.rank > most:
            raise ModelError(
                f"--init pissa: {name} has {most} singular vectors, fewer than a rank of "
                f"{update.rank}: lower its rank with --rank or --target-rank"
            )
        # Of the right shape, until it is found or read.
        shapes = (adapted.lora_a.shape, adapted.lora_b.shape)
        adapted.taken = Taken(*(mx.zeros(shape) for shape in shapes))
    return adapted


def _experts(module: nn.Module, name: str, update: Update, key: mx.array) -> nn.Module:
    refused = {
        "--dropout": bool(update.dropout),
        "--dora": update.kind == "dora",
        "--init pissa": update.pissa,
    }
    for option, given in refused.items():
        if given:
            remedy = "set it to 0" if option == "--dropout" else "leave it out or name other"
            remedy += "" if option == "--dropout" else " --targets"
            raise ModelError(f"{option} is not possible on the experts of {name}: {remedy}")
    experts = LoRASwitchLinear.from_base(module, r=update.rank, scale=update.scale)
    bound = 1 / math.sqrt(module.input_dims)
    experts.lora_a = mx.random.uniform(-bound, bound, experts.lora_a.shape, key=key)
    return experts


def step_keys(seed: int, step: int, rows: tuple[int, ...]) -> mx.array:
    """Return uint32 (B,): the dropout key of each row at a step, whatever ran before."""
    return mx.array([hash_of(f"{seed}/{step}/{row}", 4) for row in rows], dtype=mx.uint32)
