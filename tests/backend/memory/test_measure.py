"""Short passes through a loaded model measure its memory, and leave the model unchanged."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.cpu import CPU
from mlxtune.backend.device import allocator
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.memory import measure as measuring
from mlxtune.backend.memory.measure import measure
from mlxtune.backend.memory.shapes import model_shapes
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import (
    BatchLoad,
    Entries,
    Factors,
    MemoryCorrection,
    ModelShapes,
)
from tests.backend.conftest import random_examples
from tests.long.architectures import ARCHITECTURES
from tests.models import write_model
from tests.slow import slow

RWKV = ARCHITECTURES["rwkv7"] | {"num_hidden_layers": 5}
# Wide enough to make Python's own objects negligible.
WIDE = {"hidden_size": 256, "intermediate_size": 768}


def started(
    folder: Path, operations: Any, architecture: str = "qwen3", **changes: Any
) -> tuple[InstructPipeline, ModelShapes]:
    base = load_base(write_model(folder, architecture, **changes), "float32")
    targets = ("r_proj",) if architecture == "rwkv7" else ("all",)
    config = InstructConfig(lora_rank=4, targets=targets)
    # On CUDA, nothing would be measured.
    shapes = replace(model_shapes(base, config, operations.memory), graphs=None)
    return InstructPipeline(base.model, config, execution=Execution(operations)), shapes


@pytest.mark.parametrize("operations", [slow(MLX, id="MLX"), pytest.param(CPU, id="CPU")])
def test_measurement_does_not_change_the_steps_result(tmp_path: Path, operations: Any) -> None:
    found = []
    for measures in (False, True):
        pipeline, shapes = started(tmp_path / str(measures), operations)
        if measures:
            allocator.release()
            peak = allocator.peak_bytes()
            assert measure(pipeline, shapes, [False, True]) is not None
            assert allocator.peak_bytes() == peak
        result = pipeline.train_batch(random_examples(3))
        trained = tree_flatten(pipeline.model.trainable_parameters())
        found.append((result.avg_loss, {name: np.array(value) for name, value in trained}))
        assert not pipeline.forward.execution.recompute
    (loss, adapter), (other_loss, other) = found
    assert loss == other_loss
    assert all(np.array_equal(adapter[name], other[name]) for name in adapter)


def test_passes_of_kernels_find_the_same_each_time(tmp_path: Path) -> None:
    pipeline, shapes = started(tmp_path / "model", CPU, **WIDE)
    first, second = (measure(pipeline, shapes, [False, True]) for _ in range(2))
    assert first == second
    assert first != MemoryCorrection()


def test_only_the_modes_that_may_run_are_measured(tmp_path: Path) -> None:
    pipeline, shapes = started(tmp_path / "model", CPU)
    found = measure(pipeline, shapes, [True])
    assert found is not None
    assert (found.kept, found.working) == (Factors(), Factors())
    assert found.again != Factors()


def test_layers_that_cannot_run_alone_are_not_measured(tmp_path: Path) -> None:
    # RWKV 7's layers also pass on the first layer's values.
    pipeline, shapes = started(tmp_path / "model", MLX, "rwkv7", **RWKV)
    assert measure(pipeline, shapes, [False]) is None
    pipeline.train_batch(random_examples(2))


def test_factors_bring_the_estimate_to_the_peaks() -> None:
    estimates = [Entries(0, 100 * n * 1000, n * n * 1000) for n in (32, 96, 256)]
    peaks = np.array([4.0 * (3 * e.tokens + 0.5 * e.scores) + 2**20 for e in estimates])
    found = measuring._fitted(estimates, peaks, 4, 0.01)
    assert found.tokens == pytest.approx(3, abs=0.1)
    assert found.scores == pytest.approx(0.5, abs=0.1)
    # With the default prior, the factors still fit every pass.
    found = measuring._fitted(estimates, peaks, 4)
    assert found.tokens > found.scores
    for estimate, peak in zip(estimates, peaks, strict=True):
        assert found.of(estimate, 4) == pytest.approx(peak, rel=0.1)


def test_factors_are_never_negative_and_bytes_that_are_fixed_are_found() -> None:
    estimates = [Entries(0, n, n * n) for n in (32, 96, 256)]
    assert measuring._fitted(estimates, np.array([3e7] * 3), 4).fixed == pytest.approx(3e7, rel=0.1)
    found = measuring._fitted(estimates, np.array([1e7, 5e6, 1e6]), 4)
    assert min(found.tokens, found.scores, found.fixed or 0) >= 0


def test_peak_is_beyond_what_is_in_use_and_earlier_peaks_stay() -> None:
    allocator.start_peak()
    mx.eval(mx.zeros(5_000_000) + 1)
    held = mx.zeros(1_000_000)
    mx.eval(held)
    assert 4e6 <= allocator.peak_of(lambda: mx.eval(mx.zeros(1_000_000) + 1)) < 9e6
    assert allocator.peak_bytes() >= 20e6


@pytest.mark.skipif(not on_cpu(), reason="numpy computes for steps on the CPU only")
def test_numpy_memory_is_counted(tmp_path: Path) -> None:
    pipeline, shapes = started(tmp_path / "model", CPU, **WIDE)
    mask = np.ones(1025, dtype=np.uint8)
    step = [Example(1, np.arange(1025, dtype=np.int32) % 9, mask)]
    pipeline.train_batch(step)
    tracemalloc.start()
    try:
        pipeline.train_batch(step)
        others = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    execution = pipeline.forward.execution
    counted = 4 * CPU.memory.unmeasured_entries(shapes, execution, BatchLoad.single(1024, 1024))
    assert 0.7 * others <= counted <= 1.4 * others


def test_measurement_replaces_the_estimate(tmp_path: Path) -> None:
    pipeline, shapes = started(tmp_path / "model", CPU, **WIDE)
    before = replace(shapes, measured=MemoryCorrection(Factors(9.0), Factors(9.0)))
    assert measure(pipeline, before, [False]) == measure(pipeline, shapes, [False])
