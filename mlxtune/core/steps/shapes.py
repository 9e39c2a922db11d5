"""What the memory of a step depends on: the model's shapes, and the load of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import predicted_tokens
from mlxtune.core.steps.groups import Group


@dataclass(frozen=True)
class ModelShapes:
    """A model with LoRA. Sizes are bytes, all else counts entries of arrays.

    `weights` is the base as stored, at `stored_itemsize` an entry (0 if quantised); `itemsize` is
    that of the compute dtype. `trainable` counts the LoRA parameters. `layers` are those from the
    first with LoRA; the outputs of all their linear layers are `products` wide together, those of
    one layer `layer_products`, that of a single linear layer `widest_product`. `updated` is the
    width of one layer's outputs with LoRA, `read` of all inputs with LoRA that are not hidden
    states, `scaled` of all outputs that DoRA scales. `cast` and `layer_cast` are the entries of
    matrices that are cast for each use, of all layers and of one, `head_cast` those of the head.
    `plain_head`: the head is one product. `unpacked` are the entries of the largest quantised
    matrix that is unpacked for each product.
    """

    weights: int
    stored_itemsize: int
    trainable: int
    itemsize: int
    hidden: int
    vocab: int
    heads: int
    layers: int
    products: int
    layer_products: int
    widest_product: int
    updated: int
    read: int
    largest_matrix: int
    cast: int
    layer_cast: int
    head_cast: int
    plain_head: bool
    scaled: int = 0
    unpacked: int = 0

    @property
    def inputs(self) -> int:
        """Width of the inputs of all layers with LoRA."""
        return self.layers * self.hidden

    def with_layers(self, layers: int) -> ModelShapes:
        """Return the shapes with LoRA on the last `layers` layers only."""
        share = layers / self.layers
        names = ("trainable", "products", "read", "scaled", "cast")
        fewer: dict[str, Any] = {name: int(getattr(self, name) * share) for name in names}
        return replace(self, layers=layers, **fewer)


@dataclass(frozen=True)
class Load:
    """The load of a micro-batch: a prefix once, then `lines` of `width` tokens each."""

    lines: int
    width: int
    positions: int
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that run through the model."""
        return self.prefix + self.lines * self.width

    @property
    def scores(self) -> int:
        """Attention scores of one head."""
        return self.prefix**2 + self.lines * self.width * (self.prefix + self.width)


def load_of(group: Group, examples: Sequence[Example]) -> Load:
    """Return the load of a group of a step's examples."""
    positions = sum(predicted_tokens(examples[i]) for i in group.examples)
    return Load(group.lines, group.width, positions, group.prefix)
