"""Every execution against the plain one, as in `doctor --prove`, on a tiny model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding
from mlxtune.diagnosis import proof_helper
from tests.backend.conftest import random_examples
from tests.models import write_model
from tests.paths import DATA


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proof_helper, "_examples", lambda *_: random_examples(5))
    return write_model(tmp_path / "tiny", "qwen3", num_hidden_layers=1)


def test_executions_are_compared_with_nonzero_gradients(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    whole = proof_helper._computed

    def computed(*arguments: Any) -> Any:
        found = whole(*arguments)
        seen.append(found[0][1])
        return found

    monkeypatch.setattr(proof_helper, "_computed", computed)
    found = list(proof_helper.gradients(folder, folder))
    assert [check.name for check in found] == [
        variant.name for variant in proof_helper.step_variants()
    ]
    assert {"plain", "gpu", "gpu, recomputed"} <= {check.name for check in found}
    for check in found:
        assert check.passed, check
        assert check.values["gradient_difference"] > 0, check
    for half in ("lora_a", "lora_b"):
        for gradients in seen:
            assert max(np.abs(v).max() for k, v in gradients.items() if k.endswith(half)) > 1e-6


def wrong(scale: float) -> Any:
    """Return a `loss_and_gradients` that changes one entry of one gradient in packed sequences."""
    whole = InstructPipeline.loss_and_gradients

    def changed(self: InstructPipeline, *arguments: Any, **options: Any) -> Any:
        result = whole(self, *arguments, **options)
        if self.forward.execution.packs:
            name = [
                gradient for gradient in result.gradients if gradient.endswith("down_proj.lora_b")
            ][-1]
            value = np.array(result.gradients[name])
            value.flat[0] += scale
            result.gradients[name] = value
        return result

    return changed


@pytest.mark.parametrize("scale", [1.0, math.nan])
def test_one_wrong_entry_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr(InstructPipeline, "loss_and_gradients", wrong(scale))
    monkeypatch.setattr(
        proof_helper,
        "step_variants",
        lambda variants=proof_helper.step_variants: [v for v in variants() if v.dropout == 0][:2],
    )
    plain, packed = proof_helper.gradients(folder, folder)
    assert (plain.passed, packed.passed) == (True, False)


def test_gpu_uses_no_cpu_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_helper, "on_cpu", lambda: False)
    assert [variant.name for variant in proof_helper.step_variants()] == [
        "plain",
        "gpu",
        "gpu, recomputed",
    ]


def test_dropout_of_each_execution_matches_the_plain_step(folder: Path) -> None:
    variant = next(each for each in proof_helper.step_variants() if each.dropout)
    assert variant.execution.recompute
    examples = random_examples(3)
    with_dropout, _ = proof_helper._computed(folder, examples, variant, "auto")
    without, _ = proof_helper._computed(folder, examples, replace(variant, dropout=0.0), "auto")
    assert abs(with_dropout[0] - without[0]) > 1e-4


def test_memory_matches_each_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_helper, "_examples", lambda *_: random_examples(12))
    # The larger size runs first; its peak must not count for the next.
    monkeypatch.setattr(proof_helper, "SIZES", (512, 32))
    large, small = proof_helper.memory_peaks(folder, folder)
    assert (small.name, large.name) == ("32 tokens", "512 tokens")
    for key in ("predicted", "measured"):
        assert 0 < small.values[key] < large.values[key]


def test_steps_are_timed_in_each_choice_of_shapes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = {"as they are": lambda each: each, "padded": lambda each: replace(each, packs=False)}
    monkeypatch.setattr(proof_helper, "SHAPES", padded)
    found = list(proof_helper.steps(folder, folder))
    assert [check.name for check in found] == list(padded)
    assert min(check.values["tokens_per_s"] for check in found) > 0


def test_steps_are_timed_with_rounded_shapes_and_without() -> None:
    rounding = Rounding(length=64, width=128)
    execution = Execution(MLX, rounding=rounding)
    found = {name: change(execution).rounding for name, change in proof_helper.SHAPES.items()}
    assert found == {"shapes as they are": NOT_ROUNDED, "shapes rounded": rounding}


def test_base_is_loaded_by_mlx_lm_in_4_bits_and_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("_CPU_WIDTH", "_GPU_WIDTH"):
        monkeypatch.setattr(proof_helper, width, 128)
    from mlx_lm.utils import load

    for name in ("a", "b"):
        proof_helper.write_base(DATA / "demo-qwen3", tmp_path / name, quantized=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]
    model, tokenizer = load(str(tmp_path / "a"))
    assert model.model.layers[0].self_attn.q_proj.bits == 4
    assert tokenizer.encode("a table")
    base = load_base(tmp_path / "a", "float32")
    assert base.hidden_size == 128
    assert base.quantization
