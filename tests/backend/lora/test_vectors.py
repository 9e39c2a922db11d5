"""LoRA's matrices as vectors, in memory and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from mlx.utils import tree_flatten, tree_map

from mlxtune.backend.lora.vectors import MULTIPLE, LoRAVectorLayout
from mlxtune.core.run.checkpoint import OPTIMIZER
from tests.backend.step.executions import fresh, model_folder
from tests.backend.step.test_pipeline_resume import (
    FOLDERS,
    STEPS,
    WAYS,
    examples,
    pipeline,
    state,
    take,
    write_folder,
)
from tests.long.counts import Traced
from tests.test_refused import refused


def test_no_launch_joins_an_empty_array() -> None:
    """The matrices fill whole rows of their vector, so the vector needs no padding."""
    config: dict[str, Any] = {"lora_rank": 16, "targets": ("q_proj",)}
    model = fresh(model_folder("qwen3"), **config).model
    vectors, matrices = LoRAVectorLayout(model, separate=False), model.trainable_parameters()
    (joined,) = vectors.join(matrices)
    # A (64, 16) and B (16, 64) of two layers.
    assert joined.size == 4 * 64 * 16 == 4 * MULTIPLE

    def join(scale: mx.array) -> Traced:
        return vectors.join(tree_map(lambda value: value * scale, matrices)), []

    assert not refused(join, mx.array(2.0))


@pytest.mark.parametrize("kind", FOLDERS)
def test_shared_projections_resume_from_moments_in_model_order(kind: str, tmp_path: Path) -> None:
    folder = write_folder(kind, tmp_path)
    whole, first, again = (pipeline(folder, WAYS["plain"], dropout=0.0) for _ in range(3))
    expected = take(whole, range(1, STEPS + 1))
    names = dict(tree_flatten(first.model.trainable_parameters()))
    gradients = dict(tree_flatten(first.loss_and_gradients(examples(1), 1).gradients))
    ((_, norm),) = take(first, range(1, 2))
    first.snapshot()(tmp_path)
    # After one step, first moments are (1 - beta) times the clipped gradients. As in older
    # checkpoints, all A come before the other matrices.
    order = sorted(names, key=lambda name: not name.endswith("lora_a"))
    flat = np.concatenate([np.array(gradients[name]).reshape(-1) for name in order])
    clip = min(1.0, (first.config.gradient_clip_norm or np.inf) / (norm or 1))
    moments = safetensors.numpy.load_file(tmp_path / OPTIMIZER)["m.0"]
    np.testing.assert_allclose(moments[: len(flat)], 0.1 * clip * flat, rtol=1e-4, atol=1e-9)
    assert not moments[len(flat) :].any()

    again.restore(tmp_path)
    assert take(again, range(2, STEPS + 1)) == expected[1:]
    assert state(again) == state(whole)
