"""Shapes small enough for counts by hand, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import GraphMemory
from mlxtune.core.steps.memory_terms import BatchLoad, Entries, ModelShapes


class LeanMemory(GraphMemory):
    """The memory of operations that keep the products of layers but no logits."""

    def kept_entries(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Entries:
        width = shapes.inputs if execution.recompute else shapes.matmuls
        return Entries(0, load.tokens * width, 0)

    def layer_entries(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Entries:
        width = shapes.layer_matmuls * (2 if execution.recompute else 1)
        return Entries(0, load.tokens * width, 0)

    def head_entries(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> int:
        return shapes.hidden * load.tokens

    def unmeasured_entries(self, shapes: ModelShapes, execution: Execution, load: BatchLoad) -> int:
        return 0


# A backend's operations reduced to the part that core uses; the real ones need mlx.
GRAPH_OPERATIONS: Any = SimpleNamespace(memory=GraphMemory())
LEAN_OPERATIONS: Any = SimpleNamespace(memory=LeanMemory())


def shapes(**changes: Any) -> ModelShapes:
    """Return two layers of width 10 with products 100 wide, a vocabulary of 1000, and no casts."""
    given: dict[str, Any] = {
        "weights": 50_000,
        "stored_itemsize": 4,
        "trainable": 100,
        "itemsize": 4,
        "hidden": 10,
        "vocab": 1000,
        "layers": 2,
        "matmuls": 200,
        "layer_matmuls": 100,
        "widest_matmul": 30,
        "updated": 40,
        "largest_cast": 0,
        "head_cast": 0,
        "plain_head": True,
        "heads": 0,
        "scores": 4,
        "layer_scores": 6,
    }
    return ModelShapes(**given | changes)
