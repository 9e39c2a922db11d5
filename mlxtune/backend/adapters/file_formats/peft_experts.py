"""LoRA on experts in PEFT's layout, for the stacked parameters of transformers.

transformers has two such parameters in the `experts` of a layer: `gate_up_proj`, with the outputs
of gate and up concatenated or interleaved, and `down_proj`. PEFT wraps the module once for each of
its `target_parameters`, so if both are targets, the LoRA of `gate_up_proj` is at
`experts.base_layer`. `lora_A` is (experts * rank, in), expert-major, and `lora_B` (out, rank *
experts), rank-major.

Source: ParamWrapper in PEFT's tuners/lora/layer.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from mlxtune.backend.adapters.file_formats.adapter import Matrix, WeightUpdate, path_in_layer

# The path of experts in a layer of transformers, by mlx-lm's model type.
EXPERTS_PATHS = {
    "gpt_oss": "mlp.experts",
    "mixtral": "mlp.experts",
    "olmoe": "mlp.experts",
    "qwen3_moe": "mlp.experts",
}
# Models that interleave the outputs of gate and up.
_INTERLEAVED_TYPES = ("gpt_oss",)
# The stacked parameters, in the order in which PEFT wraps them.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# mlx-lm's names for a stack of experts.
_STACKS = ("switch_mlp", "switch_glu", "experts")


def joined(
    modules: Mapping[str, WeightUpdate], model_type: str
) -> dict[tuple[int, str], WeightUpdate]:
    """Return the updates of experts by layer and parameter, with gate and up joined.

    The rank of the joined update is the sum of both ranks: A is stacked, and B is block-diagonal.
    """
    layers: dict[int, dict[str, WeightUpdate]] = {}
    for path, update in modules.items():
        layer, inside = path_in_layer(path)
        layers.setdefault(layer, {})[inside.rsplit(".", 1)[-1]] = _without_padding(update)
    joined_modules = {}
    for layer, named in sorted(layers.items()):
        if "gate_proj" in named or "up_proj" in named:
            one = named.get("gate_proj") or named["up_proj"]
            none = WeightUpdate(one.a[:, :0], one.b[..., :0])
            gate, up = (named.get(name, none) for name in ("gate_proj", "up_proj"))
            b = np.zeros((len(one.b), 2 * one.b.shape[1], gate.rank + up.rank), np.float32)
            first, second = _rows(b.shape[1], model_type)
            b[:, first, : gate.rank], b[:, second, gate.rank :] = gate.b, up.b
            joined_modules[layer, "gate_up_proj"] = WeightUpdate(
                np.concatenate([gate.a, up.a], axis=1), b
            )
        if "down_proj" in named:
            joined_modules[layer, "down_proj"] = named["down_proj"]
    return joined_modules


def gate_up_and_down(
    parameter: str, update: WeightUpdate, model_type: str
) -> dict[str, WeightUpdate]:
    """Split a parameter's update into updates of mlx-lm's projections, by name."""
    if parameter == "down_proj":
        return {parameter: update}
    rows = _rows(update.b.shape[1], model_type)
    halves = (replace(update, b=update.b[:, row]) for row in rows)
    return dict(zip(("gate_proj", "up_proj"), map(_without_padding, halves), strict=True))


def _rows(outputs: int, model_type: str) -> tuple[slice, slice]:
    """Return the rows of gate and the rows of up in `gate_up_proj`."""
    if model_type in _INTERLEAVED_TYPES:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, outputs // 2), slice(outputs // 2, None)


def _without_padding(update: WeightUpdate) -> WeightUpdate:
    """Return an update without the rank-1 terms whose B is zero in all experts."""
    used = update.b.any(axis=(0, 1))
    return (
        update
        if used.all() or not used.any()
        else WeightUpdate(update.a[:, used], update.b[..., used])
    )


def to_matrices(update: WeightUpdate) -> tuple[Matrix, Matrix]:
    """Return `lora_A` and `lora_B` in PEFT's layout for experts."""
    a, b = update.a, update.b.transpose(1, 2, 0)
    return a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1)


def from_matrices(a: Matrix, b: Matrix, rank: int) -> WeightUpdate:
    """Undo `to_matrices`. Raises ValueError if the shapes do not fit whole experts."""
    return WeightUpdate(
        a.reshape(-1, rank, a.shape[1]), b.reshape(len(b), rank, -1).transpose(2, 0, 1)
    )


def wrapped(module: str, parameters: Iterable[str]) -> dict[str, str]:
    """Map a module's parameters to the wrapped modules that hold their LoRA in PEFT."""
    selected = [name for name in EXPERT_PARAMETERS if name in parameters]
    depths = range(len(selected) - 1, -1, -1)
    return {
        name: module + ".base_layer" * depth for name, depth in zip(selected, depths, strict=True)
    }


def stacks(modules: Iterable[str]) -> dict[tuple[int, str], str]:
    """Return the paths of expert stacks among mlx-lm's modules, by layer and projection."""
    return {
        (path_in_layer(name)[0], name.rsplit(".", 1)[-1]): name
        for name in modules
        if name.split(".")[-2] in _STACKS
    }
