"""Pipelines do not change their base model or other models, and give equal results in every run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters, load_model

from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.steps.execution import Execution
from tests.backend.cpu.compared import assert_close
from tests.backend.step.executions import (
    PLAIN,
    WAYS,
    Step,
    assert_same,
    computed,
    fixed_step,
    fresh,
    model_folder,
)
from tests.models import write_model
from tests.slow import slow, slow_except

ALL = WAYS["all"]
TOKENS = mx.array([[5, 9, 200, 33, 7, 7, 1, 64, 12, 90]])


def same_bytes(one: Step, other: Step) -> bool:
    return one.loss == other.loss and all(
        np.array_equal(value, other.gradients[name]) for name, value in one.gradients.items()
    )


@pytest.mark.parametrize("architecture", ["qwen3", slow("gemma3_text")])
def test_other_models_in_the_process_are_unchanged(architecture: str) -> None:
    folder = model_folder(architecture)
    other = fresh(folder)
    kinds = {name: type(part) for name, part in other.model.named_modules()}
    calls = {kind: kind.__call__ for kind in kinds.values()}
    before = computed(other, fixed_step())
    for how in (ALL, WAYS["recompute"], WAYS["cpu kernels, packed"]):
        computed(fresh(folder, how, 10_000), fixed_step())
    assert {name: type(part) for name, part in other.model.named_modules()} == kinds
    assert all(kind.__call__ is call for kind, call in calls.items())
    assert same_bytes(computed(other, fixed_step()), before)
    later = fresh(folder)
    assert {name: type(part) for name, part in later.model.named_modules()} == kinds
    assert same_bytes(computed(later, fixed_step()), before)


@pytest.mark.parametrize("how", [WAYS["packed"], ALL], ids=["mlx", "all"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3_text"])
def test_parameters_keep_their_names_and_order(architecture: str, how: Execution) -> None:
    folder = model_folder(architecture)
    fast, plain = fresh(folder, how, 10_000), fresh(folder)
    computed(fast, fixed_step())
    expected = tree_flatten(plain.model.parameters())
    found = tree_flatten(fast.model.parameters())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(mx.array_equal(x, y) for (_, x), (_, y) in zip(found, expected, strict=True))
    names = [name for name, _ in tree_flatten(plain.model.trainable_parameters())]
    assert [name for name, _ in tree_flatten(fast.model.trainable_parameters())] == names


@pytest.mark.parametrize("how", [WAYS["packed"], ALL], ids=["mlx", "all"])
@pytest.mark.parametrize("quantize", [None, 4])
def test_fused_model_matches_mlx_lm_with_the_adapter(
    how: Execution, quantize: int | None, tmp_path: Path
) -> None:
    folder = model_folder("gemma3_text", quantize)
    fast = fresh(folder, how, 10_000)
    fast.train_batch(fixed_step())
    fast.snapshot()(tmp_path)
    theirs = load_adapters(load_model(folder)[0], str(tmp_path))
    fast.model.eval()
    assert_close(fast.model(TOKENS), theirs(TOKENS), 1e-5)


def test_weights_stored_in_16_bits_are_computed_with_in_32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, matrices stay in bfloat16, and products of them are computed in float32."""
    monkeypatch.setattr("mlxtune.backend.models.loading.on_cpu", lambda: True)
    for architecture in ("qwen3", "gemma2"):
        folder = write_model(tmp_path / architecture, architecture, dtype="bfloat16")
        model, wide = load_base(folder, "float32").model, load_model(folder)[0]
        wide.set_dtype(mx.float32)
        steps = {}
        for name, each, how in (("fast", model, ALL), ("plain", wide, PLAIN)):
            made = fresh_of(each, how)
            steps[name] = computed(made, fixed_step())
        stored = {value.dtype for _, value in tree_flatten(model.parameters())}
        assert mx.bfloat16 in stored
        assert_same(steps["fast"], steps["plain"])


def fresh_of(model: object, how: Execution) -> InstructPipeline:
    from mlxtune.config import InstructConfig
    from tests.backend.conftest import fill_lora_b

    made = InstructPipeline(model, InstructConfig(lora_rank=4, targets=("all",)), execution=how)
    fill_lora_b(made)
    return made


DIGEST = """
import sys
from pathlib import Path
from tests.backend.step.test_execution_models import digest
print(digest(Path(sys.argv[1])))
"""


def digest(folder: Path) -> str:
    """Return a hash of two steps' losses and gradients, and of the resulting matrices."""
    made = fresh(folder, WAYS["cpu kernels, packed"], 60, dropout=0.1)
    hashed = hashlib.sha256()
    for _ in range(2):
        step = computed(made, fixed_step())
        hashed.update(np.float64(step.loss).tobytes())
        for _, value in sorted(step.gradients.items()):
            hashed.update(value.tobytes())
        made.train_batch(fixed_step())
    for _, value in tree_flatten(made.model.trainable_parameters()):
        hashed.update(np.array(value).tobytes())
    return hashed.hexdigest()


@pytest.mark.slow
def test_steps_give_the_same_bytes_again_and_in_another_process() -> None:
    folder = model_folder("gemma3_text")
    here = digest(folder)
    assert digest(folder) == here
    command = [sys.executable, "-c", DIGEST, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == here


@pytest.mark.parametrize("way", slow_except(WAYS, "recompute", "cpu kernels", "all"))
def test_step_gives_the_same_bytes_again(way: str) -> None:
    made = fresh(model_folder("qwen3"), WAYS[way], 60)
    first = computed(made, fixed_step())
    assert same_bytes(computed(made, fixed_step()), first)
