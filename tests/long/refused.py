"""Find kernel launches in a gradient's graph that CUDA refuses, on any device.

    python -m tests.long.refused [NAME ...]

Prints them for the tiny models of architectures.py; tests/test_refused.py tests them.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlxtune.backend.forward.operations import best_execution
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import PLAIN, fresh
from tests.long.architectures import ARCHITECTURES
from tests.long.counts import LAUNCH_NONE, Exported, Traced, exported
from tests.long.graph_order import Operation
from tests.long.pipeline_graphs import PipelineGraphs
from tests.models import write_model

import mlx.core as mx  # isort: skip

# The dynamic shared memory of a kernel whose limit nobody raised.
_SHARED = 48 * 1024
# The least and the most rows of a block in MLX's kernel for unsorted products, the columns, and the
# inner entries: `make_cta_tiler` in mlx/backend/cuda/gemms/gather_gemm.cu.
_ROWS, _COLUMNS, _INNER = (16, 256), 128, 64
_BEST = best_execution(0, kind="gpu")
# MLX cannot export the separate heads of some architectures.
EXECUTIONS = {"plain": PLAIN, "whole head": replace(_BEST, split_head=False), "best": _BEST}


def short_step() -> list[Example]:
    """Return a step of so few tokens that experts are not sorted: MLX exports no sorted ones."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 320, length).astype(np.int32) for length in (5, 3, 2)]
    masks = [np.array([0, *[1] * (len(text) - 1)], np.uint8) for text in texts]
    return [Example(row, *each) for row, each in enumerate(zip(texts, masks, strict=True), 1)]


def refused_in(name: str, folder: Path, execution: Execution) -> list[str]:
    """Return a line for each refused launch in a step of an architecture."""
    write_model(folder, name.split()[0], **ARCHITECTURES[name])
    graphs = PipelineGraphs(fresh(folder, execution, 10_000))
    return [line for gradient in graphs.gradients(short_step()) for line in refused(*gradient)]


def refused(gradient: Callable[[mx.array], Traced], tokens: mx.array) -> list[str]:
    """Return a line for each launch of a gradient that CUDA refuses."""
    graph = exported(gradient, tokens)
    return [line for each in graph.operations for line in _refused(each, graph)]


def _refused(operation: Operation, graph: Exported) -> Iterator[str]:
    if operation.kind in LAUNCH_NONE:
        return
    shapes = [graph.arrays[name][0] for name in (*operation.inputs, *operation.outputs)]
    if not all(math.prod(shape) for shape in shapes):
        yield f"{operation.kind} of an empty array: {shapes}"
    if operation.kind == "GatherMM":
        shape, dtype = graph.arrays[operation.outputs[0]]
        # A tiny model's few rows stand for the thousands of a real model.
        rows = _ROWS[0] if shape[-2] == 1 else _ROWS[1]
        size = (rows + _COLUMNS) * _INNER * dtype.size
        if size > _SHARED:
            yield f"GatherMM in {size} bytes of shared memory: {shapes}"


def main() -> int:
    """Print the refused launches of architectures, and return the number of failures."""
    failed = 0
    for name in sys.argv[1:] or ARCHITECTURES:
        for how, execution in EXECUTIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = refused_in(name, Path(folder) / "m", execution)
                except ValueError as error:  # MLX cannot export the graph
                    found = [str(error)]
            failed += bool(found)
            print(f"{name:24} {how:10} {'; '.join(sorted(set(found))) or 'none'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
