"""Updates of LoRA's matrices are AdamW's, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.lora.apply import adapted_modules
from mlxtune.backend.lora.vectors import MULTIPLE
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import lora_bytes, moment_bytes
from tests.backend.conftest import MakePipeline, random_examples
from tests.backend.step.test_family_resume import pipeline
from tests.models import write_model


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_update_is_adamw_with_bias_correction_and_clipping(
    make_pipeline: MakePipeline, clip: float
) -> None:
    """AdamW (arXiv:1711.05101, algorithm 2) in float64, from the pipeline's own gradients."""
    pipeline = make_pipeline("llama", gradient_clip_norm=clip, weight_decay=0.1)
    examples = random_examples(3)
    theta = {
        name: np.array(value, dtype=np.float64)
        for name, value in tree_flatten(pipeline.model.trainable_parameters())
    }
    m = {name: np.zeros_like(value) for name, value in theta.items()}
    v = {name: np.zeros_like(value) for name, value in theta.items()}
    for step, rate in enumerate((1e-2, 5e-3, 2e-2), start=1):
        gradients = pipeline.loss_and_gradients(examples).gradients
        g = {name: np.array(value, np.float64) for name, value in tree_flatten(gradients)}
        norm = np.sqrt(sum((value**2).sum() for value in g.values()))
        shrink = min(1.0, clip / norm) if clip else 1.0

        result = pipeline.train_batch(examples, step=step, learning_rate=rate)

        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
        for name in theta:
            m[name] = 0.9 * m[name] + 0.1 * shrink * g[name]
            v[name] = 0.999 * v[name] + 0.001 * (shrink * g[name]) ** 2
            adam = (m[name] / (1 - 0.9**step)) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-8)
            theta[name] = theta[name] - rate * 0.1 * theta[name] - rate * adam
    for name, value in tree_flatten(pipeline.model.trainable_parameters()):
        np.testing.assert_allclose(np.array(value), theta[name], atol=2e-5, err_msg=name)


def test_matrices_and_moments_take_the_bytes_that_plans_count(make_pipeline: MakePipeline) -> None:
    made = make_pipeline("llama")
    matrices, state = made.model.trainable_parameters(), made._engine.optimizer.state
    parameters = made.lora.trainable_parameters

    def size(arrays: Any) -> int:
        return sum(array.nbytes for _, array in tree_flatten(arrays))

    assert size(matrices) == lora_bytes(parameters)
    padding = moment_bytes(MULTIPLE * len(state["m"]))
    assert 0 <= size([state["m"], state["v"]]) - moment_bytes(parameters) < padding


def reference(
    value: Any, gradients: list[Any], rate: float, decay: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a value after updates by AdamW (arXiv:1711.05101, algorithm 2)."""
    x = np.array(value, np.float64)
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, gradient in enumerate(gradients, 1):
        g = np.array(gradient, np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        moved = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        x = x - rate * (moved + decay * x)
    return x


def test_b_and_magnitudes_learn_at_the_higher_rate(tmp_path: Path) -> None:
    rate, ratio, decay = 1e-3, 16.0, 0.5
    made = pipeline(
        write_model(tmp_path, "qwen3"),
        Execution(MLX),
        dora=True,
        lr_ratio=ratio,
        learning_rate=rate,
        weight_decay=decay,
        gradient_clip_norm=0.0,
    )
    for module in adapted_modules(made.model).values():
        module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape, key=mx.random.key(1))
    begun = {name: np.array(x) for name, x in tree_flatten(made.model.trainable_parameters())}
    seen: dict[str, list[Any]] = {name: [] for name in begun}
    for step in (1, 2, 3):
        one = random_examples(2, seed=step)
        gradients = made.loss_and_gradients(one, step).gradients
        for name, value in tree_flatten(gradients):
            seen[name].append(np.array(value))
        made.train_batch(one, step=step)
    for name, value in tree_flatten(made.model.trainable_parameters()):
        own = rate if name.endswith("lora_a") else rate * ratio
        expected = reference(begun[name], seen[name], own, decay)
        np.testing.assert_allclose(np.array(value), expected, atol=own * 1e-3, err_msg=name)
