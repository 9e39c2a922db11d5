"""A model's trained parameters by name, read and assigned without a walk through the model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


class TrainedParameters:
    """The parameters of a module that are not frozen now, in the module's order.

    Walking a model's modules takes longer than building the graph of several layers.
    """

    def __init__(self, module: nn.Module) -> None:
        names = [name for name, _ in tree_flatten(module.trainable_parameters())]
        self._owners = {name: (_parent(module, name), name.rpartition(".")[2]) for name in names}

    @property
    def names(self) -> list[str]:
        """The parameters' names, dotted paths within the module."""
        return list(self._owners)

    def values(self) -> dict[str, mx.array]:
        """Return the parameters by name."""
        return {name: module[key] for name, (module, key) in self._owners.items()}

    def assign(self, values: Mapping[str, mx.array]) -> None:
        """Assign the parameters with these names. Raises KeyError for any other name."""
        for name, value in values.items():
            module, key = self._owners[name]
            # Module's own __setitem__ is dict's.
            module[key] = value

    @contextmanager
    def replaced(self, values: Mapping[str, mx.array]) -> Iterator[None]:
        """Assign parameters inside the block, then restore the current ones."""
        present = self.values()
        try:
            self.assign(values)
            yield
        finally:
            self.assign(present)


def _parent(module: nn.Module, name: str) -> nn.Module:
    """Return the module that holds the parameter with this dotted path."""
    part: Any = module
    for key in name.split(".")[:-1]:
        part = part[int(key)] if isinstance(part, list) else part[key]
    return part
