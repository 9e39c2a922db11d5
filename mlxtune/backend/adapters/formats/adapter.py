"""An adapter as numpy tensors by module, without a model: what every format reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters import files
from mlxtune.backend.model.layers import dequantized_weight
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Update:
    """The tensors of a module: float32 `a` (in, rank) and `b` (rank, out); `m` (out,) for DoRA.

    For experts, `a` is (experts, rank, in) and `b` (experts, out, rank), as in mlx-lm.
    """

    a: Matrix
    b: Matrix
    m: Matrix | None = None

    @property
    def of_experts(self) -> bool:
        """Whether it belongs to a layer of experts."""
        return self.a.ndim == 3


@dataclass(frozen=True)
class Adapter:
    """An adapter, with its modules by their path in mlx-lm's model.

    The update of a module is `scale * (x @ a) @ b`. `settings` are further entries of
    adapter_config.json.
    """

    scale: float
    num_layers: int
    modules: Mapping[str, Update]
    dropout: float = 0.0
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_dora(self) -> bool:
        """Whether its modules have magnitudes."""
        return any(update.m is not None for update in self.modules.values())

    @property
    def rank(self) -> int:
        """The rank of its modules, which all have the same."""
        update = next(iter(self.modules.values()))
        return update.a.shape[-2] if update.of_experts else update.a.shape[-1]

    def check_plain(self, format: str) -> None:
        """Raise ModelError for experts, which most formats cannot hold."""
        if experts := [name for name, update in self.modules.items() if update.of_experts]:
            raise ModelError(
                f"{format} cannot hold the experts of a mixture ({join_few(experts, 2)}): "
                "use --format mlx-lm, or mlxtune fuse"
            )


def path_in_layer(name: str) -> tuple[int, str]:
    """Return the number of a module's layer, and its path there.

    Raises ModelError for a module outside the layers, such as a head.
    """
    if (place := files.split_layer(name)) is None:
        raise ModelError(f"{name}: is not in a layer: mlxtune supports LoRA on layers only")
    return place


def layers_from(modules: Mapping[str, Any], num_layers: int) -> int:
    """Return the number of layers from the first that has a module to the last of the model."""
    return num_layers - min(path_in_layer(name)[0] for name in modules)


def completed(adapter: Adapter, modules: Mapping[str, nn.Module]) -> Adapter:
    """Return an adapter with the same projections in each of its layers, as mlx-lm expects.

    `modules` are the base model's projections by path. Added modules are all zeros: they have no
    effect and do not learn. Raises ModelError if the adapter does not fit them.
    """
    if unknown := [name for name in adapter.modules if name not in modules]:
        raise ModelError(f"the base model has no {join_few(unknown)}, which the adapter needs")
    places = {name: path_in_layer(name) for name in modules}
    keys = {places[name][1] for name in adapter.modules}
    start = min(places[name][0] for name in adapter.modules)
    updates = {
        name: adapter.modules.get(name) or _zero_update(adapter, modules[name])
        for name, (layer, path) in places.items()
        if layer >= start and path in keys
    }
    for name, update in updates.items():
        check_fits(modules[name], update, name)
    layers = 1 + max(layer for layer, _ in places.values())
    return replace(adapter, modules=updates, num_layers=layers - start)


def _zero_update(adapter: Adapter, module: nn.Module) -> Update:
    weight = dequantized_weight(module)
    *experts, rows, columns = weight.shape
    a: tuple[int, ...] = (columns, adapter.rank)
    b: tuple[int, ...] = (adapter.rank, rows)
    if experts:
        a, b = (*experts, adapter.rank, columns), (*experts, rows, adapter.rank)
    m = np.array(mx.linalg.norm(weight, axis=1)) if adapter.is_dora else None
    return Update(np.zeros(a, np.float32), np.zeros(b, np.float32), m)


def check_fits(module: nn.Module, update: Update, name: str) -> None:
    """Raise ModelError if an update's shape differs from its projection's."""
    *_, rows, columns = dequantized_weight(module).shape
    a, b = update.a.shape, update.b.shape
    rank, shape = (a[-2], (b[-2], a[-1])) if update.of_experts else (a[-1], (b[-1], a[0]))
    if shape != (rows, columns) or rank != (b[-1] if update.of_experts else b[0]):
        raise ModelError(
            f"{name}: the adapter is for a weight of {shape}, the model's is {(rows, columns)}: "
            "name the base model that it was trained on"
        )
