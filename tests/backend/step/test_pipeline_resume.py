"""A pipeline that is saved, recreated and restored takes the same steps as an uninterrupted one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from mlx.utils import tree_flatten

from mlxtune.backend.adapters import checkpoint_tensors
from mlxtune.backend.cpu import CPU
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.run.checkpoint import ADAPTER, OPTIMIZER
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import ModelError
from tests.backend.conftest import limit_micro_batches
from tests.models import VOCAB_SIZE, write_model
from tests.slow import long_except, slow, slow_except

STEPS, STOP = 6, 3
WAYS = {
    "plain": Execution(MLX),
    "layer by layer": Execution(MLX, recompute=True),
    "the CPU's own functions": Execution(CPU),
}


def pipeline(folder: Path, how: Execution, **options: Any) -> InstructPipeline:
    given: dict[str, Any] = {"lora_rank": 4, "targets": ("all",), "dropout": 0.1}
    config = InstructConfig(**given | options)
    return InstructPipeline(
        load_base(folder, "float32").model, config, execution=replace(how, micro_batch_tokens=60)
    )


def examples(step: int) -> list[Example]:
    """Return six examples of 5 to 25 tokens; three share a prefix."""
    draw = np.random.default_rng(step)
    prefix = draw.integers(3, VOCAB_SIZE, 4)
    found = []
    for row in range(6):
        tokens = draw.integers(3, VOCAB_SIZE, draw.integers(5, 22))
        tokens = np.concatenate([prefix, tokens]) if row % 2 else tokens
        mask = (draw.random(len(tokens)) < 0.5).astype(np.uint8)
        mask[-1] = 1
        found.append(Example(row, tokens.astype(np.int32), mask))
    return found


def take(made: InstructPipeline, steps: range) -> list[tuple[float, float | None]]:
    """Take steps with varying examples and rates; return losses and gradient norms."""
    results = [
        made.train_batch(examples(step), step=step, learning_rate=1e-2 / step) for step in steps
    ]
    return [(result.avg_loss, result.grad_norm) for result in results]


def state(made: InstructPipeline) -> dict[str, bytes]:
    """Return the bytes of every trainable tensor and every moment, by name."""
    tensors = checkpoint_tensors.trained_tensors(made.model) | dict(
        tree_flatten(made._engine.optimizer.state)
    )
    return {name: bytes(memoryview(value)) for name, value in tensors.items()}


FOLDERS = long_except(["qwen3", "gemma3_text", "quantised"], "qwen3")


def write_folder(kind: str, parent: Path) -> Path:
    """Write one of the FOLDERS."""
    bits = 4 if kind == "quantised" else None
    return write_model(parent / kind, "qwen3" if bits else kind, quantize=bits)


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("way", slow_except(WAYS, "layer by layer", "the CPU's own functions"))
@pytest.mark.parametrize("targets", [("all",), slow(("q_proj", "v_proj"))], ids=str)
def test_restored_pipeline_takes_the_same_steps_to_the_last_bit(
    folder: Path, tmp_path: Path, way: str, targets: tuple[str, ...]
) -> None:
    whole = pipeline(folder, WAYS[way], targets=targets)
    expected = take(whole, range(1, STEPS + 1))

    first = pipeline(folder, WAYS[way], targets=targets)
    assert take(first, range(1, STOP + 1)) == expected[:STOP]
    snapshot = first.snapshot()
    # A snapshot writes the state from when it was taken.
    take(first, range(STOP + 1, STEPS + 1))
    snapshot(tmp_path)

    again = pipeline(folder, WAYS[way], targets=targets)
    again.restore(tmp_path)
    assert take(again, range(STOP + 1, STEPS + 1)) == expected[STOP:]
    assert state(again) == state(whole)


def test_restore_keeps_the_smaller_limit_of_micro_batches(folder: Path, tmp_path: Path) -> None:
    made = pipeline(folder, WAYS["plain"])
    take(made, range(1, 2))
    limit_micro_batches(made, 30)
    made.snapshot()(tmp_path)

    again = pipeline(folder, WAYS["plain"])
    again.restore(tmp_path)
    assert again._engine.micro_batches.max_tokens == 30
    limit_micro_batches(again, 20)
    again.restore(tmp_path)
    assert again._engine.micro_batches.max_tokens == 20


@pytest.mark.parametrize("missing", ["step", "micro_batch_tokens"])
def test_optimizer_file_that_does_not_fit_is_an_error_and_changes_nothing(
    folder: Path, tmp_path: Path, missing: str
) -> None:
    made = pipeline(folder, WAYS["plain"])
    take(made, range(1, 3))
    made.snapshot()(tmp_path)
    path = tmp_path / OPTIMIZER
    tensors = safetensors.numpy.load_file(path)
    other = pipeline(folder, WAYS["plain"])
    before = state(other)

    settings = {"step": "2", "micro_batch_tokens": "60"}
    for broken in (
        {name: value for name, value in settings.items() if name != missing},
        settings | {missing: "many"},
        settings | {missing: "-5"},
    ):
        safetensors.numpy.save_file(tensors, path, metadata=broken)
        with pytest.raises(ModelError, match=r"has no step or|cannot be read"):
            other.restore(tmp_path)
    name = next(name for name in tensors if name.startswith("m."))
    safetensors.numpy.save_file({**tensors, name: tensors[name][:1].copy()}, path, settings)
    with pytest.raises(ModelError, match="does not fit"):
        other.restore(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        other.restore(tmp_path)
    assert state(other) == before


def test_snapshot_adapter_loads_in_mlx_lm(folder: Path, tmp_path: Path) -> None:
    from mlx_lm.tuner.utils import load_adapters

    made = pipeline(folder, WAYS["plain"], dropout=0.0)
    take(made, range(1, 3))
    made.snapshot()(tmp_path)
    theirs = load_adapters(load_base(folder, "float32").model, str(tmp_path))
    found = dict(tree_flatten(theirs.trainable_parameters()))
    ours = checkpoint_tensors.trained_tensors(made.model)
    assert (tmp_path / ADAPTER).is_file()
    assert all(mx.array_equal(found[name], value) for name, value in ours.items())
