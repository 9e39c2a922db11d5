"""Compare all optimisations with the plain path, on tiny random models of many architectures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import fixed_step, fresh, gradients_of
from tests.long.architectures import ARCHITECTURES
from tests.models import write_model


@dataclass(frozen=True)
class Result:
    """An architecture's optimisations, and its relative deviations from the plain path."""

    gets: dict[str, bool]
    loss: float
    gradient: float

    @property
    def same(self) -> bool:
        """True if both deviations are within the tolerances of the equality tests."""
        return self.loss <= 1e-5 and self.gradient <= 1e-4


def check(name: str, folder: Path, **config: Any) -> Result:
    """Compare all optimisations with the plain path, with and without the CPU's functions."""
    write_model(folder, name.split()[0], **ARCHITECTURES[name])
    examples = fixed_step()
    plain = fresh(folder, **config).loss_and_gradients(examples)
    expected_loss, tree = plain.loss, plain.gradients
    expected = gradients_of(tree)
    largest = max(np.abs(value).max() for value in expected.values())
    loss_distance = distance = 0.0
    for how in (
        Execution(MLX, packs=False, recompute=True),
        Execution(MLX, recompute=True),
        Execution(CPU, packs=False),
        Execution(CPU),
    ):
        fast = fresh(folder, how, 10_000, **config)
        result = fast.loss_and_gradients(examples)
        loss, tree = result.loss, result.gradients
        found = gradients_of(tree)
        loss_distance = max(loss_distance, abs(loss - expected_loss) / abs(expected_loss))
        for key, value in expected.items():
            # NaN counts as an infinite difference.
            difference = np.nan_to_num(np.abs(found[key] - value), nan=np.inf)
            distance = max(distance, float(difference.max() / largest))
    gets = {
        "split": fast.forward.execution.separate_head,
        "head": fast.forward.plain_head,
        "layerwise": fast.forward.layerwise is not None,
        "line": fast.forward.execution.packs,
    }
    return Result(gets, loss_distance, distance)
