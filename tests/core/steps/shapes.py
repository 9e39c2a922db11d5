"""Shapes small enough to count by hand, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mlxtune.core.steps.execution import GraphMemory, KernelMemory, LayersUse, ModelShapes

# Two layers that keep 400 bytes a token and 8 a score; one works with 100 a token and 24 a score,
# or first with 800 alone, and with 500 a token if it runs again.
LAYERS = LayersUse(
    layers=2,
    kept=np.array([0.0, 400.0, 0.0, 8.0]),
    working=np.array([[0.0, 100.0, 0.0, 24.0], [800.0, 0.0, 0.0, 0.0]]),
    again=np.array([[0.0, 500.0, 0.0, 32.0]]),
)
NO_LAYERS = LayersUse(2, np.zeros(4), np.zeros((1, 4)), np.zeros((1, 4)))
# All that core asks of operations. They stand for those of a backend, which needs mlx.
GRAPH_OPERATIONS: Any = SimpleNamespace(memory=GraphMemory(lambda packs, width: [LAYERS]))
HEAD_OPERATIONS: Any = SimpleNamespace(memory=GraphMemory(lambda packs, width: [NO_LAYERS]))
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
        "heads": 2,
        "layers": 2,
        "products": 200,
        "layer_products": 100,
        "widest_product": 30,
        "updated": 40,
        "largest_cast": 0,
        "head_cast": 0,
        "plain_head": True,
    }
    return ModelShapes(**given | changes)
