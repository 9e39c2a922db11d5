"""LoRA: which projections get it, what it computes, and what it trains."""

from __future__ import annotations

import difflib
import hashlib
import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.utils import get_total_parameters

from mlxtune.config import InstructConfig
from mlxtune.errors import ModelError

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass
class DropoutKeys:
    """Where LoRA layers find the randomness of the forward pass under way.

    `rows` is uint32 (B,), one number for each line of the micro-batch, or (B, T), one for each
    token, or None for no dropout; `positions` is uint32 (T,), or None for 0 to T - 1. A token's
    mask depends on its row, position and layer alone, so that neither padding nor the split into
    micro-batches changes it.
    """

    rows: mx.array | None = None
    positions: mx.array | None = None

    def set(self, rows: mx.array | None, positions: mx.array | None) -> None:
        """Have the next forward pass use these."""
        self.rows, self.positions = rows, positions


@dataclass(frozen=True)
class LoRASummary:
    """What `apply_lora` did. `keys` are the matching paths inside a layer, `num_layers` how many
    of the last layers were looked at, `layers` how many of these had a match.
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

    @property
    def scale(self) -> float:
        """What multiplies the low-rank update."""
        return self.alpha / self.rank

    def describe(self) -> str:
        """Say in one line what is trained."""
        share = self.trainable_parameters / self.total_parameters
        return (
            f"rank {self.rank}, alpha {self.alpha:g} (scale {self.scale:g}) on "
            f"{', '.join(self.targets)}: {self.modules} modules in {self.layers} layers, "
            f"{self.trainable_parameters:,} trainable parameters ({share:.3%})"
        )


class LoRALinear(nn.Module):
    """A frozen linear layer plus `scale * (dropout(x) @ lora_a) @ lora_b`.

    `lora_a` is float32 (in, rank), `lora_b` float32 (rank, out); both are applied in the dtype of
    `x`. Parameter names and shapes are those of mlx-lm, which loads what is trained here.

    Source: LoRA, arXiv:2106.09685, section 4.1; A as in its code, Kaiming uniform with a = √5,
    which is uniform within ±1/√in.
    """

    def __init__(
        self,
        linear: nn.Module,
        *,
        rank: int,
        scale: float,
        dropout: float,
        key: mx.array,
        dropout_keys: DropoutKeys,
        salt: int,
    ) -> None:
        super().__init__()
        output_dims, input_dims = linear.weight.shape
        if isinstance(linear, nn.QuantizedLinear):
            input_dims = input_dims * 32 // linear.bits
        bound = 1 / math.sqrt(input_dims)
        self.linear = linear
        self.scale = scale
        self.lora_a = mx.random.uniform(-bound, bound, (input_dims, rank), key=key)
        self.lora_b = mx.zeros((rank, output_dims))
        self._dropout = dropout
        self._dropout_keys = dropout_keys
        self._salt = salt

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        # The scale goes where the array is smallest.
        low = (self._drop(x) @ self.lora_a.astype(x.dtype)) * self.scale
        return y + low @ self.lora_b.astype(x.dtype)

    def drops(self) -> bool:
        """Tell whether the forward pass under way drops entries of its input."""
        return self._dropout_keys.rows is not None and self._dropout != 0

    def _drop(self, x: mx.array) -> mx.array:
        """Zero entries of x (B, T, in) with probability p and scale the rest by 1 / (1 - p)."""
        rows, positions = self._dropout_keys.rows, self._dropout_keys.positions
        if rows is None or not self.drops():
            return x
        if x.ndim != 3 or x.shape[0] != rows.shape[0]:
            raise ModelError("--dropout is not possible with this architecture: set it to 0")
        batch, length, width = x.shape
        if positions is None:
            positions = mx.arange(length, dtype=mx.uint32)
        # One counter-based generator for each token, keyed by (row ^ layer, position).
        keys = mx.stack(
            [
                mx.broadcast_to((rows ^ self._salt).reshape(batch, -1), (batch, length)),
                mx.broadcast_to(positions, (batch, length)),
            ],
            axis=-1,
        ).reshape(-1, 2)
        keep_probability = 1 - self._dropout
        draw = mx.vmap(lambda key: mx.random.bernoulli(keep_probability, (width,), key=key))
        keep = draw(keys).reshape(x.shape)
        return mx.where(keep, x / keep_probability, 0).astype(x.dtype)


def apply_lora(model: nn.Module, config: InstructConfig) -> LoRASummary:
    """Freeze a model and put LoRA on the targets of its last `num_layers` layers (None: all).

    Raises ModelError when a target matches nothing, even if another does, with what the model has.
    """
    layers = list(model.layers)
    if config.num_layers is not None and config.num_layers > len(layers):
        raise ModelError(f"--num-layers {config.num_layers}: the model has {len(layers)} layers")
    chosen = layers[-(config.num_layers or len(layers)) :]
    keys = match_targets(chosen, config.targets)
    total = get_total_parameters(model)
    names = {id(module): name for name, module in model.named_modules()}
    dropout_keys = DropoutKeys()
    model.freeze()
    adapted_per_layer = []
    for layer in chosen:
        adapted = [
            (key, _with_lora(module, names[id(module)], config, dropout_keys))
            for key, module in projections(layer).items()
            if key in keys
        ]
        layer.update_modules(tree_unflatten(adapted))
        adapted_per_layer.append(len(adapted))
    return LoRASummary(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.dropout,
        targets=config.targets,
        keys=tuple(sorted(keys)),
        num_layers=len(chosen),
        modules=sum(adapted_per_layer),
        layers=sum(adapted > 0 for adapted in adapted_per_layer),
        trainable_parameters=sum(p.size for _, p in tree_flatten(model.trainable_parameters())),
        total_parameters=total,
        dropout_keys=dropout_keys,
    )


def projections(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the linear projections of a layer by their path in it."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, _LINEAR + _EXPERTS)
    }


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


def _with_lora(
    module: nn.Module, name: str, config: InstructConfig, dropout_keys: DropoutKeys
) -> nn.Module:
    scale = config.lora_alpha / config.lora_rank
    key = mx.random.key(_hash(f"{config.seed}/lora/{name}", 8))
    if not isinstance(module, _EXPERTS):
        return LoRALinear(
            module,
            rank=config.lora_rank,
            scale=scale,
            dropout=config.dropout,
            key=key,
            dropout_keys=dropout_keys,
            salt=_hash(f"dropout/{name}", 4),
        )
    if config.dropout:
        raise ModelError(f"--dropout is not possible on the experts of {name}: set it to 0")
    experts = LoRASwitchLinear.from_base(module, r=config.lora_rank, scale=scale)
    bound = 1 / math.sqrt(module.input_dims)
    experts.lora_a = mx.random.uniform(-bound, bound, experts.lora_a.shape, key=key)
    return experts


def step_keys(seed: int, step: int, rows: tuple[int, ...]) -> mx.array:
    """Return uint32 (B,): the dropout key of each row at a step, whatever ran before."""
    return mx.array([_hash(f"{seed}/{step}/{row}", 4) for row in rows], dtype=mx.uint32)


def _hash(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")
