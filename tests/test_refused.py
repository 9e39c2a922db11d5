"""No training step launches a kernel that CUDA refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.lora import apply
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from tests.backend.step.executions import PLAIN, fresh
from tests.long.architectures import ARCHITECTURES
from tests.long.counts import LAUNCH_NONE, Exported, Traced, exported
from tests.long.graph_order import Operation
from tests.long.pipeline_graphs import PipelineGraphs
from tests.models import write_model
from tests.slow import long, slow

# The dynamic shared memory of a kernel whose limit nobody raised.
_SHARED = 48 * 1024
# The least and the most rows of a block in MLX's kernel for unsorted products, the columns, and the
# inner entries: `make_cta_tiler` in mlx/backend/cuda/gemms/gather_gemm.cu.
_ROWS, _COLUMNS, _INNER = (16, 256), 128, 64
_BEST = best_execution(0, kind="gpu")
# MLX cannot export the separate heads of some architectures.
EXECUTIONS = {"plain": PLAIN, "whole head": replace(_BEST, separate_head=False), "best": _BEST}


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
    return [line for operation in graph.operations for line in _refused(operation, graph)]


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


QUICK = ("gemma3_text", "gpt_oss", "qwen3_5", "deepseek_v3")


# The two executions differ in the head alone.
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "plain") for name in QUICK]
    + [slow(name, "whole head") for name in QUICK]
    + [slow(name, "plain") for name in ARCHITECTURES if name not in QUICK]
    + [long(name, "whole head") for name in ARCHITECTURES if name not in QUICK],
)
def test_no_launch_of_a_step_is_refused(name: str, how: str, tmp_path: Path) -> None:
    assert not refused_in(name, tmp_path / "m", EXECUTIONS[how])


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_no_launch_of_a_step_with_a_separate_head_is_refused(name: str, tmp_path: Path) -> None:
    assert not refused_in(name, tmp_path / "m", EXECUTIONS["best"])


def test_launches_on_empty_arrays_are_found() -> None:
    def empty(x: mx.array) -> Traced:
        return [mx.exp(x[:0]), mx.concatenate([x, x[2:2]]), x[:, :0].reshape(0)], []

    found = refused(empty, mx.ones((4, 3)))
    assert {line.partition(" ")[0] for line in found} == {"Exp", "Concatenate"}


def test_mlx_lms_lora_on_experts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses this gradient, as a run on an H200 showed."""

    def theirs(module: Any, *, rank: int, scale: float, key: mx.array) -> LoRASwitchLinear:
        return LoRASwitchLinear.from_base(module, r=rank, scale=scale)

    monkeypatch.setattr(apply, "LoRAExperts", theirs)
    found = refused_in("gpt_oss", tmp_path / "m", EXECUTIONS["plain"])
    assert found
    assert all(line.startswith("GatherMM in 98304 bytes of shared memory") for line in found)
