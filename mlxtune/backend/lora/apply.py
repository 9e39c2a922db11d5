"""Applies LoRA or DoRA to a model, and describes the result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import get_total_parameters

from mlxtune.backend.lora.lora_layers import (
    DoRALinear,
    DropoutKeys,
    LoRAExperts,
    LoRALinear,
    PrincipalFactors,
    hash_of,
)
from mlxtune.backend.lora.targets import (
    EXPERTS,
    check_trainable,
    choose_targets,
    is_named,
    projections,
    rank_of,
)
from mlxtune.backend.workers.shards import ShardedLinear, shards_of
from mlxtune.config import InstructConfig
from mlxtune.config.lora_config import scale_of
from mlxtune.core.formatting import join_few, pluralize
from mlxtune.core.steps.memory_terms import lora_bytes, moment_bytes

# Warn if experts account for more than this fraction of an adapter's parameters.
_MAX_EXPERT_FRACTION = 0.5


@dataclass(frozen=True)
class Match:
    """All projections that share a path within their layer, a number of experts, and LoRA or none.

    `layers` is the number of their layers, `experts` the number of stacked experts in each
    projection (0 if it is plain), and `parameters` the number of LoRA parameters (0 without LoRA).
    """

    path: str
    layers: int
    experts: int
    parameters: int


@dataclass(frozen=True)
class LoRASummary:
    """The LoRA on a model: its options, and the projections with and without it.

    `matches` cover the last `num_layers` layers, of which `layers` have LoRA. An adapter file has
    only one rank, the largest (`written_rank`), and the `scale` of that rank. With
    `trained_as_written`, the file contains the trained tensors without padding. `replicated` names
    the modules that are not sharded among workers.
    """

    config: InstructConfig
    matches: tuple[Match, ...]
    num_layers: int
    layers: int
    trainable_parameters: int
    total_parameters: int
    scale: float
    written_rank: int
    trained_as_written: bool
    replicated: frozenset[str]
    parts: int

    @property
    def kind(self) -> str:
        """The value of fine_tune_type in mlx-lm's config."""
        return "dora" if self.config.dora else "lora"

    @property
    def keys(self) -> tuple[str, ...]:
        """The paths, within a layer, of the projections with LoRA."""
        return tuple(match.path for match in self.matches if match.parameters)

    @property
    def written_config(self) -> dict[str, Any]:
        """The entries of adapter_config.json that decide how another tool loads the adapter."""
        loaded = {"rank": self.written_rank, "scale": self.scale, "keys": sorted(self.keys)}
        return {"fine_tune_type": self.kind, "lora_parameters": loaded}

    @property
    def checkpoint_bytes(self) -> int:
        """The approximate size of a checkpoint: the adapter and AdamW's two moments.

        If an adapter file has other tensors than those trained, the trained ones are beside it.
        """
        matrices = (1 if self.trained_as_written else 3) * lora_bytes(self.trainable_parameters)
        return matrices + moment_bytes(self.trainable_parameters)

    @property
    def modules(self) -> int:
        """The number of modules with LoRA."""
        return sum(match.layers for match in self.matches if match.parameters)

    @property
    def expert_matrices(self) -> int:
        """The number of expert matrices with LoRA."""
        return sum(match.layers * match.experts for match in self.matches if match.parameters)

    def describe(self) -> str:
        """Return a one-line description of the trained parameters."""
        config = self.config
        fraction = self.trainable_parameters / (self.total_parameters * self.parts)
        exceptions = ", ".join(f"{name} {rank}" for name, rank in config.target_ranks.items())
        scale = scale_of(config.alpha, config.rank, rslora=config.rslora)
        formula = " = alpha / √rank" if config.rslora else ""
        experts = self.expert_matrices
        extras = [
            *self._mixed_targets(),
            "DoRA" if config.dora else "",
            f"initialised by {config.init}" if config.is_pissa else "",
            f"starting from {config.init_adapter}" if config.init_adapter is not None else "",
            f"B learns {config.lr_ratio:g} times as fast as A" if config.lr_ratio != 1 else "",
        ]
        return (
            f"rank {config.rank}{f' ({exceptions})' if exceptions else ''}, "
            f"alpha {config.alpha:g} (scale {scale:g}{formula}) on "
            f"{', '.join(config.targets)}: {self.modules} modules in {self.layers} layers"
            f"{f' (with {experts:,} matrices of experts)' if experts else ''}, "
            f"{self.trainable_parameters:,} trainable parameters ({fraction:.3%})"
            + "".join(f"; {extra}" for extra in extras if extra)
        )

    def _mixed_targets(self) -> Iterator[str]:
        """Yield a description of each target that matches both experts and other projections."""
        for target in self.config.targets:
            matching = [match for match in self.matches if is_named(match.path, target)]
            if len({bool(match.experts) for match in matching}) == 2:
                layers = (f"{each.path} in {pluralize(each.layers, 'layer')}" for each in matching)
                yield f"{target} matches {', '.join(layers)}"

    def warnings(self) -> Iterator[str]:
        """Yield warnings about experts with and without LoRA, each with a remedy."""
        trained = [match for match in self.matches if match.parameters]
        names = {match.path.rsplit(".", 1)[-1] for match in trained}
        left = [match for match in self.matches if match.experts and not match.parameters]
        if left := [match for match in left if match.path.rsplit(".", 1)[-1] in names]:
            layers = join_few(f"{each.path} in {pluralize(each.layers, 'layer')}" for each in left)
            yield (
                f"--targets {','.join(self.config.targets)} leaves experts untrained: {layers}: "
                f"add {','.join(each.path for each in left)} to train them too"
            )
        experts = [match for match in trained if match.experts]
        if (size := sum(match.parameters for match in experts)) > _MAX_EXPERT_FRACTION * sum(
            match.parameters for match in trained
        ):
            yield (
                f"{size / self.trainable_parameters:.0%} of the adapter's "
                f"{self.trainable_parameters:,} parameters belong to experts, each of which "
                "sees only some of the tokens: leave them out of --targets, or set a lower "
                f"--target-rank to {', '.join(each.path for each in experts)}"
            )


def apply_lora(
    model: nn.Module, config: InstructConfig, dropout_keys: DropoutKeys | None = None
) -> LoRASummary:
    """Freeze a model and put LoRA on the targets of its last `num_layers` layers (None: all).

    Dropout reads `dropout_keys`, which the caller sets before each forward pass; by default, there
    is no dropout. No weights are read: `initialize` computes PiSSA's factors or loads
    `init_adapter`.

    Raises ModelError if LoRA cannot be applied.
    """
    dropout_keys, adapted = dropout_keys or DropoutKeys(), []
    for path, module in choose_targets(model, config).items():
        rank = rank_of(path, config)
        scale = scale_of(config.alpha, rank, rslora=config.rslora)
        adapted.append((path, lora_layer(module, path, rank, scale, config, dropout_keys)))
    model.freeze()
    model.update_modules(tree_unflatten(adapted))
    return summarize(model, config)


def summarize(model: nn.Module, config: InstructConfig) -> LoRASummary:
    """Count the layers, projections and parameters with LoRA, and say how an adapter holds them."""
    num_layers = config.num_layers or len(model.layers)
    # A is (in, rank), or (experts, rank, in) for experts. An adapter file also contains PiSSA's
    # factors.
    factor = 2 if config.is_pissa else 1
    modules = adapted_modules(model)
    written = {(factor * m.lora_a.shape[1], m.scale) for m in modules.values()}
    rank, scale = max(written)
    return LoRASummary(
        config=config,
        matches=_matches(model.layers[-num_layers:]),
        num_layers=num_layers,
        layers=sum(bool(adapted_modules(layer)) for layer in model.layers),
        trainable_parameters=sum(p.size for _, p in tree_flatten(model.trainable_parameters())),
        # This counts only leaf modules, which LoRA's matrices do not belong to.
        total_parameters=get_total_parameters(model),
        scale=scale,
        written_rank=rank,
        trained_as_written=len(written) == 1 and not config.is_pissa,
        replicated=frozenset(
            name for name, m in modules.items() if not isinstance(m.linear, ShardedLinear)
        ),
        parts=max(map(shards_of, model.modules()), default=1),
    )


def _matches(layers: Sequence[nn.Module]) -> tuple[Match, ...]:
    """Return the projections of these layers, with and without LoRA, grouped by path."""
    layers_of: dict[tuple[str, int, bool], list[int]] = {}
    for layer in layers:
        adapted = adapted_modules(layer)
        inner = {id(module.linear) for module in adapted.values()}
        plain = {path: m for path, m in projections(layer).items() if id(m) not in inner}
        for path, module in (plain | adapted).items():
            matrices = module.lora_a if path in adapted else module.weight
            experts = len(matrices) if matrices.ndim == 3 else 0
            trained = tree_flatten(module.trainable_parameters()) if path in adapted else []
            sizes = layers_of.setdefault((path, experts, bool(trained)), [])
            sizes.append(sum(value.size for _, value in trained))
    return tuple(
        Match(path, len(sizes), experts, sum(sizes))
        for (path, experts, _), sizes in sorted(layers_of.items())
    )


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with LoRA in a model or layer, by path."""
    return {name: module for name, module in model.named_modules() if "lora_a" in module}


def lora_layer(
    module: nn.Module,
    name: str,
    rank: int,
    scale: float,
    config: InstructConfig,
    dropout_keys: DropoutKeys,
) -> nn.Module:
    """Return a projection with LoRA of this rank and scale, which override the config's.

    Raises ModelError if LoRA cannot be applied.
    """
    check_trainable(name, module, config)
    key = mx.random.key(hash_of(f"{config.seed}/lora/{name}", 8))
    if isinstance(module, EXPERTS):
        return LoRAExperts(module, rank=rank, scale=scale, key=key)
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
    if config.is_pissa:
        # Placeholders of the right shape until the factors are computed or read.
        layer.principal = PrincipalFactors(mx.zeros_like(layer.lora_a), layer.lora_b)
    return layer
