"""Tiny models and random examples; importing mlxtune first loads a fast BLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxtune.backend.forward.operations import CPU_OPERATIONS, best_execution
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from tests.backend.kernels import REASON
from tests.models import VOCAB_SIZE, write_model

MakePipeline = Callable[..., InstructPipeline]


@pytest.fixture(autouse=True, scope="session")
def skip_kernels_that_are_not_here() -> Iterator[None]:
    """Skip tests that request the CPU's kernels if numba is missing, as on a Mac.

    Only in this folder: elsewhere, a command that requests them without numba must fail.
    """

    def skip(*_: Any) -> None:
        pytest.skip(REASON)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if CPU_OPERATIONS is not None and find_spec("numba") is None:
            for name in ("load", "linear_head", "prepare", "layer_passes"):
                monkeypatch.setattr(type(CPU_OPERATIONS), name, skip)
        yield


@pytest.fixture(autouse=True)
def evaluate_in_micro_batches_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make evaluations use training's micro-batch size instead of a larger one."""
    monkeypatch.setattr("mlxtune.backend.step.evaluator.max_batch_tokens", lambda parameters: 0)


@pytest.fixture
def make_pipeline(tmp_path: Path) -> MakePipeline:
    """Return a function that builds a pipeline over a tiny model of the given type."""

    def make(
        model_type: str,
        *,
        micro_batch_tokens: int = 10_000,
        quantize: int | None = None,
        dtype: str = "float32",
        model_config: dict[str, Any] | None = None,
        **config: Any,
    ) -> InstructPipeline:
        folder = tmp_path / f"{model_type}-{quantize}"
        if not folder.exists():
            write_model(folder, model_type, quantize=quantize, **(model_config or {}))
        settings = InstructConfig(**{"lora_rank": 4, "lora_alpha": 8.0, **config})
        execution = replace(best_execution(0), micro_batch_tokens=micro_batch_tokens)
        pipeline = InstructPipeline(load_base(folder, dtype).model, settings, execution=execution)
        fill_lora_b(pipeline)
        return pipeline

    return make


def limit_micro_batches(pipeline: InstructPipeline, tokens: int) -> None:
    """Make a pipeline run up to `tokens` tokens together from now on."""
    pipeline.run_as(replace(pipeline.forward.execution, micro_batch_tokens=tokens))


def fill_lora_b(pipeline: InstructPipeline, seed: int = 1) -> None:
    """Give B random values: with B's initial zeros, the gradient of A would be zero."""
    rng = np.random.default_rng(seed)
    parameters = tree_flatten(pipeline.model.trainable_parameters())
    filled = [
        (name, mx.array(0.1 * rng.standard_normal(value.shape), dtype=mx.float32))
        for name, value in parameters
        if name.endswith("lora_b")
    ]
    pipeline.model.update(tree_unflatten(filled))


def random_examples(count: int = 5, *, longest: int = 40, seed: int = 0) -> list[Example]:
    """Return random examples, each with at least one supervised token."""
    rng = np.random.default_rng(seed)
    examples = []
    for row in range(1, count + 1):
        length = int(rng.integers(4, longest + 1))
        mask = rng.integers(0, 2, length).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        tokens = rng.integers(0, VOCAB_SIZE, length).astype(np.int32)
        examples.append(Example(row, tokens, mask))
    return examples
