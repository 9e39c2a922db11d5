"""Interrupted and resumed runs of LoRA's family take the same steps as uninterrupted runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from mlx.utils import tree_flatten

from mlxtune.backend.adapters import checkpoint_tensors, initialise
from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.lora.apply import adapted_modules
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.run.checkpoint import PARAMETERS
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import ModelError
from tests.backend.conftest import random_examples
from tests.backend.step.test_pipeline_resume import STEPS, STOP, state, take
from tests.models import write_model
from tests.slow import slow

FAMILY: dict[str, dict[str, Any]] = {
    "DoRA": {"dora": True, "dropout": 0.1},
    "LoRA+": {"lr_ratio": 4.0, "rslora": True},
    "PiSSA": {"init": "pissa", "dropout": 0.1},
    "PiSSA with ranks": {"init": "pissa_niter_2", "target_rank": ("q_proj=2",)},
    "all": {"dora": True, "rslora": True, "lr_ratio": 4.0, "target_rank": ("q_proj=2",)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("resume") / "qwen3", "qwen3")


def pipeline(folder: Path, how: Execution, *, fresh: bool = True, **options: Any) -> Any:
    config = InstructConfig(**{"lora_rank": 4, "targets": ("q_proj", "down_proj"), **options})
    model = load_base(folder, "float32").model
    return InstructPipeline(
        model, config, execution=replace(how, micro_batch_tokens=60), fresh=fresh
    )


@pytest.mark.parametrize(
    ("member", "how"),
    [
        *((member, Execution(MLX)) for member in ("PiSSA with ranks", "all")),
        *(slow(member, Execution(MLX)) for member in ("DoRA", "LoRA+", "PiSSA")),
        *(("PiSSA", Execution(CPU)), slow("all", Execution(CPU))),
    ],
)
def test_restored_pipeline_takes_the_same_steps_to_the_last_bit(
    folder: Path, tmp_path: Path, member: str, how: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FAMILY[member]
    whole = pipeline(folder, how, **options)
    expected = take(whole, range(1, STEPS + 1))

    first = pipeline(folder, how, **options)
    assert take(first, range(1, STOP + 1)) == expected[:STOP]
    first.snapshot()(tmp_path)

    # The initial matrices must be read from the checkpoint: computing them would fail.
    monkeypatch.setattr(initialise, "principal_svd", None)
    again = pipeline(folder, how, fresh=False, **options)
    again.restore(tmp_path)
    assert take(again, range(STOP + 1, STEPS + 1)) == expected[STOP:]
    assert state(again) == state(whole)
    for made, name in ((whole, "whole"), (again, "again")):
        (tmp_path / name).mkdir()
        made.write(tmp_path / name / "adapters.safetensors")
    for file in ("adapters.safetensors", "adapter_config.json"):
        written = [(tmp_path / name / file).read_bytes() for name in ("whole", "again")]
        assert written[0] == written[1]


@pytest.mark.parametrize("member", ["PiSSA with ranks", "all", "DoRA"])
def test_snapshot_is_checked_against_the_model_before_any_weight_is_read(
    folder: Path, tmp_path: Path, member: str
) -> None:
    made = pipeline(folder, Execution(MLX), **FAMILY[member])
    made.snapshot()(tmp_path)
    weights = tmp_path / "adapters.safetensors"
    count = len(safetensors.numpy.load_file(weights))
    assert checkpoint_tensors.check_adapter(weights, made.model, made.lora) == count
    other = pipeline(folder, Execution(MLX), **FAMILY[member] | {"lora_rank": 3})
    with pytest.raises(ModelError, match="does not fit the model"):
        checkpoint_tensors.check_adapter(weights, other.model, other.lora)
    path = tmp_path / PARAMETERS
    assert path.exists() == ("ranks" in member or member == "all")
    if path.exists():
        tensors = safetensors.numpy.load_file(path)
        name = next(iter(tensors))
        del tensors[name]
        safetensors.numpy.save_file(tensors, path)
        with pytest.raises(ModelError, match=f"{name} is missing"):
            checkpoint_tensors.check_adapter(weights, made.model, made.lora)


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


def test_b_and_sizes_learn_faster_by_the_ratio(folder: Path) -> None:
    rate, ratio, decay = 1e-3, 16.0, 0.5
    made = pipeline(
        folder,
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
