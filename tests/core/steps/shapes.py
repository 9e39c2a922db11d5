"""Shapes small enough to count by hand, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlxtune.core.steps.execution import GraphMemory, KernelMemory, ModelShapes

# All that core asks of operations. They stand for those of a backend, which needs mlx.
GRAPH_OPERATIONS: Any = SimpleNamespace(memory=GraphMemory())
KERNEL_OPERATIONS: Any = SimpleNamespace(memory=KernelMemory())


def shapes(**changes: Any) -> ModelShapes:
    """Two layers of width 10 whose products are 100 wide, a vocabulary of 1000, nothing cast."""
    given: dict[str, Any] = {
        "weights": 50_000,
        "stored_itemsize": 4,
        "trainable": 100,
        "itemsize": 4,
        "hidden": 10,
        "vocab": 1000,
        "layers": 2,
        "products": 200,
        "layer_products": 100,
        "widest_product": 30,
        "updated": 40,
        "largest_cast": 0,
        "head_cast": 0,
        "plain_head": True,
        "heads": 0,
        "scores": 4,
        "layer_scores": 6,
    }
    return ModelShapes(**given | changes)
