"""An adapter in memory, as read from or written to any format: its tensors by module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters import adapter_folder
from mlxtune.backend.models.stored_layers import dequantized_weight
from mlxtune.core.formatting import join_few
from mlxtune.errors import ModelError

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class WeightUpdate:
    """A module's LoRA: float32 `a` (in, rank) and `b` (rank, out); `m` (out,) for DoRA.

    For experts, `a` is (experts, rank, in) and `b` (experts, out, rank), as in mlx-lm.
    """

    a: Matrix
    b: Matrix
    m: Matrix | None = None

    @property
    def is_of_experts(self) -> bool:
        """Whether the update belongs to a layer of experts."""
        return self.a.ndim == 3

    @property
    def rank(self) -> int:
        """The rank of the product."""
        return self.a.shape[1]

    @property
    def _rank_axis(self) -> int:
        return 2 if self.is_of_experts else 0

    def padded(self, rank: int, factor: float) -> "WeightUpdate":
        """Return the update padded with zeros to a rank, with B multiplied by a factor."""
        b = self.b if factor == 1 else self.b * np.float32(factor)
        return WeightUpdate(self._pad(self.a, 1, rank), self._pad(b, self._rank_axis, rank), self.m)

    def _pad(self, x: Matrix, axis: int, rank: int) -> Matrix:
        missing = rank - self.rank
        return np.pad(x, [(0, missing * (axis == i)) for i in range(x.ndim)]) if missing else x

    def unpadded(self, rank: int, factor: float) -> "WeightUpdate":
        """Undo `padded`. Raises ValueError unless all values beyond the rank are zero."""
        a, extra_a = np.split(self.a, [rank], axis=1)
        b, extra_b = np.split(self.b, [rank], axis=self._rank_axis)
        if extra_a.any() or extra_b.any():
            raise ValueError(f"has non-zero values beyond rank {rank}")
        return WeightUpdate(a, b if factor == 1 else b / np.float32(factor), self.m)


@dataclass(frozen=True)
class Adapter:
    """An adapter: the update of each module, by the module's path in mlx-lm's model.

    An update adds `scale * (x @ a) @ b` to the module's output. mlx-lm attaches the adapter to the
    last `num_layers` layers, or to all layers for -1. `settings` are further entries of
    adapter_config.json.
    """

    scale: float
    modules: Mapping[str, WeightUpdate]
    num_layers: int = -1
    dropout: float = 0.0
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_dora(self) -> bool:
        """Whether the modules have DoRA's magnitudes."""
        return any(update.m is not None for update in self.modules.values())

    @property
    def rank(self) -> int:
        """The rank, which all modules share."""
        return next(iter(self.modules.values())).rank

    def check_plain(self, format: str, *, dora: bool = False, experts: bool = False) -> None:
        """Raise ModelError if the format cannot hold the adapter's DoRA magnitudes or experts."""
        if self.is_dora and not dora:
            raise ModelError(
                f"{format} cannot hold DoRA's magnitudes: use --format peft, or mlxtune fuse"
            )
        names = [name for name, update in self.modules.items() if update.is_of_experts]
        if names and not experts:
            raise ModelError(
                f"{format} cannot hold the experts of a mixture ({join_few(names, 2)}): "
                "use --format mlx-lm, or mlxtune fuse"
            )


def path_in_layer(name: str) -> tuple[int, str]:
    """Return a module's layer number, and its path in the layer.

    Raises ModelError for a module outside the layers, such as a head.
    """
    if (layer_path := adapter_folder.layer_and_path(name)) is None:
        raise ModelError(f"{name} is not in a layer: mlxtune supports LoRA on layers only")
    return layer_path


def updates_in(
    path: Path, tensors: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, WeightUpdate]:
    """Return the update of each module from a file's tensors.

    The tensors of a module are `{name}.lora_a` (rank, in) and `{name}.lora_b` (out, rank), where
    `names` maps the base model's modules to their names in the file. For experts, the first axis of
    both tensors numbers the experts. Raises ModelError for tensors of other modules and for
    incomplete pairs.
    """
    rest, updates = dict(tensors), {}
    for module, name in names.items():
        if {f"{name}.lora_a", f"{name}.lora_b"} <= rest.keys():
            a, b = (rest.pop(f"{name}.lora_{part}") for part in "ab")
            # The tensors of experts are stored as in mlx-lm.
            updates[module] = (
                WeightUpdate(a, b) if a.ndim == 3 else WeightUpdate(np.array(a.T), np.array(b.T))
            )
    if rest or not updates:
        raise ModelError(
            f"{path} has {join_few(rest) or 'no tensors'}, which does not fit the base model"
        )
    return updates


def completed(adapter: Adapter, modules: Mapping[str, nn.Module]) -> Adapter:
    """Return an adapter with the same projections in each of its layers, as mlx-lm expects.

    `modules` are the base model's projections by path. Added updates have no effect: their A and B
    are zeros, which do not learn. Raises ModelError if the adapter does not fit `modules`.
    """
    if unknown := [name for name in adapter.modules if name not in modules]:
        raise ModelError(f"the base model has no {join_few(unknown)}, which the adapter needs")
    layer_paths = {name: path_in_layer(name) for name in modules}
    keys = {layer_paths[name][1] for name in adapter.modules}
    start = min(layer_paths[name][0] for name in adapter.modules)
    updates = {
        name: adapter.modules.get(name) or _zero_update(adapter, modules[name])
        for name, (layer, path) in layer_paths.items()
        if layer >= start and path in keys
    }
    for name, update in updates.items():
        check_fits(modules[name], update, name)
    layers = 1 + max(layer for layer, _ in layer_paths.values())
    return replace(adapter, modules=updates, num_layers=layers - start)


def _zero_update(adapter: Adapter, module: nn.Module) -> WeightUpdate:
    a, b = (np.zeros(shape, np.float32) for shape in shapes_for(module, adapter.rank))
    norms = mx.linalg.norm(dequantized_weight(module), axis=1)
    return WeightUpdate(a, b, np.array(norms) if adapter.is_dora else None)


def shapes_for(module: nn.Module, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A and B for a projection."""
    *experts, rows, columns = dequantized_weight(module).shape
    if experts:
        return (*experts, rank, columns), (*experts, rows, rank)
    return (columns, rank), (rank, rows)


def check_shapes_fit(
    module: nn.Module | None, a: Sequence[int], b: Sequence[int], name: str
) -> None:
    """Raise ModelError if the shapes of A and B do not fit `module`; None skips the check."""
    shapes = (tuple(a), tuple(b))
    needed = shapes if module is None else shapes_for(module, a[1] if len(a) > 1 else 0)
    if shapes != needed:
        raise ModelError(
            f"{name}: the adapter is for another model: its A and B have shapes {shapes}, but this "
            f"model needs {needed}: name the base model that the adapter was trained on"
        )


def check_fits(module: nn.Module | None, update: WeightUpdate, name: str) -> None:
    """Raise ModelError if an update does not fit `module`; None skips the check of A and B.

    DoRA needs one magnitude for each row of the weight.
    """
    check_shapes_fit(module, update.a.shape, update.b.shape, name)
    rows = update.b.shape[-1:]
    if update.m is not None and (update.is_of_experts or update.m.shape != rows):
        raise ModelError(
            f"{name} has DoRA magnitudes of shape {update.m.shape}, but its layer needs {rows}"
        )
