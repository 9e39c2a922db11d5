"""Compare all optimisations with the plain path, on tiny random models of many architectures.

    python -m tests.long.check_architectures [NAME ...]

Prints for each architecture which optimisations apply, and how far loss and gradients are from the
plain path's. tests/backend/step/test_execution_architectures.py tests some architectures.

Results: tests/long/README.md.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import ModelError
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
        "split": fast.forward.execution.split_head,
        "head": fast.forward.plain_head,
        "layerwise": fast.forward.layerwise is not None,
        "line": fast.forward.execution.packs,
    }
    return Result(gets, loss_distance, distance)


def main() -> int:
    """Print a line for each architecture; return the number that differ or fail.

    LoRA is first on all projections, then only on q_proj and v_proj, for which a layer's backward
    pass reads the fewest values.
    """
    failed = 0
    for name, targets in product(sys.argv[1:] or ARCHITECTURES, (("all",), ("q_proj", "v_proj"))):
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = check(name, Path(folder), targets=targets)
            except ModelError:  # the model has no such projections
                continue
            except Exception as error:  # noqa: BLE001
                failed += 1
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(frame.filename).name}:{frame.lineno}"
                print(f"{name:18} FAILS {type(error).__name__}: {str(error)[:150]} ({where})")
                continue
        failed += not result.same
        gets = " ".join(key if value else f"no-{key}" for key, value in result.gets.items())
        verdict = "same" if result.same else "DIFFERS"
        apart = f"loss {result.loss:.0e} grad {result.gradient:.0e}"
        print(f"{name:18} {targets[0]:6} {verdict:8} {apart}  {gets}")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
