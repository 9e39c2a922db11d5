"""The predicted peaks of steps on an H200, against the peaks measured there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.device import allocator
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.memory.measure import measure
from mlxtune.backend.memory.shapes import model_shapes
from mlxtune.backend.models.loading import load_base, open_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig, TrainConfig
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_in_flight import GraphLimits
from mlxtune.core.steps.memory_plan import predict
from mlxtune.core.steps.memory_terms import BatchLoad, ModelShapes, load_of
from mlxtune.core.steps.pack import StepLengths
from mlxtune.session.dataset import load_dataset
from mlxtune.session.memory_planning import first_epoch
from mlxtune.session.reader import Reader
from tests.backend.queued import queued
from tests.long.memory_table import MODELS, holes_allowed, on_a_gpu, write_headers
from tests.models import write_model
from tests.paths import DOCS, SHARED
from tests.slow import long, slow

H200: dict[str, Any] = json.loads((DOCS / "measured" / "h200-memory.json").read_text())
INFO = {"device_name": H200["device"], "architecture": "sm_90", "total_memory": 150 * 10**9}
STEPS: list[dict[str, Any]] = H200["steps"]
IDS = [f"{case['model']}, {case['data']}" for case in STEPS]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.mx, "device_info", lambda: INFO)
    for name in ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"):
        monkeypatch.delenv(name, raising=False)


def shapes_and_execution(folder: Path, case: Mapping[str, Any]) -> tuple[ModelShapes, Execution]:
    """Return a case's shapes and execution on the H200, from the headers of empty files."""
    write_headers(folder, MODELS[case["model"]], 16)
    config = InstructConfig(lora_rank=H200["rank"], targets=tuple(H200["targets"]))
    with on_a_gpu(), holes_allowed():
        base = open_base(folder, H200["dtype"])
        execution = best_execution(base.parameters, base.dtype, model=base.model)
        shapes = model_shapes(base, config, execution.operations.memory)
    return shapes, replace(execution, micro_batch_tokens=case["micro_batch_tokens"])


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("case", STEPS, ids=IDS)
def test_predicted_peak_on_an_h200_is_near_the_measured(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    shapes, execution = shapes_and_execution(tmp_path, case)
    loads = [BatchLoad(*micro_batch) for micro_batch in case["micro_batches"]]
    predicted = max(predict(shapes, execution, load).total for load in loads)
    for peak in case["peaks"]:
        assert 0.85 <= predicted / peak <= 1.15


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("case", [slow(STEPS[0]), *map(long, STEPS[1:])], ids=IDS)
def test_micro_batches_of_the_measured_steps_come_from_their_data(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    data = SHARED / "chat" / case["data"]
    if not data.exists():
        pytest.skip(f"needs {data}, which is not part of the repository")
    _, execution = shapes_and_execution(tmp_path, case)
    for file in (SHARED / "tokenizers" / "qwen3").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    options = {"batch_size": case["rows"], "max_seq_len": case["max_seq_len"], "val_split": 0.0}
    config = TrainConfig(str(tmp_path), str(data), no_cache=True, quiet=True, **options)
    dataset = load_dataset(config, Reader(config, tmp_path))
    steps = [dataset.rows.train.examples_of(step) for step in first_epoch(config, dataset)]
    steps = steps[: len(case["lengths"])]
    assert [[len(each) for each in step] for step in steps] == case["lengths"]
    assert [[each.supervised for each in step] for step in steps] == case["supervised"]
    lengths = map(StepLengths.of, steps)
    loads = [load_of(group, step) for step in lengths for group in execution.micro_batches(step)]
    assert loads == [BatchLoad(*micro_batch) for micro_batch in case["micro_batches"]]


def test_no_passes_are_measured_where_all_their_buffers_are_in_flight(tmp_path: Path) -> None:
    base = load_base(write_model(tmp_path / "model", "qwen3"), "float32")
    execution, config = best_execution(0, kind="gpu"), InstructConfig(lora_rank=4)
    shapes = model_shapes(base, config, execution.operations.memory)
    pipeline = InstructPipeline(base.model, config, execution=execution)
    limits = GraphLimits(100, 1 << 30)
    assert measure(pipeline, replace(shapes, graphs=None), [False]) is not None
    assert measure(pipeline, replace(shapes, graphs=limits), [False]) is None


@pytest.mark.usefixtures("h200")
def test_bounds_of_the_head_hold_for_the_peaks_on_an_h200() -> None:
    # Peaks of `test_head_holds_a_few_blocks_of_logits` and
    # `test_losses_of_a_head_are_lazy_and_hold_the_logits_of_few_chunks`, and their bounds.
    blocks, chunks = 4 * 300 * 40_000, 4 * 128 * 160_000
    assert blocks < H200["head"]["peak"] < blocks + queued(10 * 14, 2 * blocks)
    assert chunks / 3 < 62_251_640 - 23_420_856 < chunks / 3 + queued(64 * 12, 2 * chunks)
