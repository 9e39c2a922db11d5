"""Every way against the plain one, as `doctor --prove` compares them, on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding
from mlxtune.diagnosis import proofs as proving
from tests.backend.conftest import random_examples
from tests.models import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", "qwen3", num_hidden_layers=1)


def test_each_way_is_compared_with_gradients_that_are_not_zero(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    whole = proving._computed

    def computed(*arguments: Any) -> Any:
        found = whole(*arguments)
        seen.append(found[1])
        return found

    monkeypatch.setattr(proving, "_computed", computed)
    found = list(proving.gradient_differences(folder, random_examples(3)))
    assert [name for name, _, _ in found] == [way.name for way in proving.ways()]
    assert {"plain", "gpu", "gpu, recomputed"} <= {name for name, _, _ in found}
    for name, loss, gradient in found:
        assert loss <= 1e-5, name
        assert 0 < gradient <= 1e-4, name
    for half in ("lora_a", "lora_b"):
        for gradients in seen:
            assert max(np.abs(v).max() for k, v in gradients.items() if k.endswith(half)) > 1e-6


def wrong(scale: float) -> Any:
    """Return a `loss_and_gradients` with one entry of one gradient changed in packed lines."""
    whole = InstructPipeline.loss_and_gradients

    def changed(self: InstructPipeline, *arguments: Any, **options: Any) -> Any:
        result = whole(self, *arguments, **options)
        if self.forward.execution.packs:
            layer = result.gradients["model"]["layers"][-1]["mlp"]["down_proj"]
            value = np.array(layer["lora_b"])
            value.flat[0] += scale
            layer["lora_b"] = value
        return result

    return changed


@pytest.mark.parametrize("scale", [1.0, math.nan])
def test_one_wrong_entry_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr(InstructPipeline, "loss_and_gradients", wrong(scale))
    monkeypatch.setattr(
        proving, "ways", lambda ways=proving.ways: [w for w in ways() if w.dropout == 0][:2]
    )
    (_, _, plain), (_, _, packed) = proving.gradient_differences(folder, random_examples(3))
    assert plain <= 1e-4
    assert not packed <= 1e-4


def test_gpu_has_none_of_the_ways_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "on_cpu", lambda: False)
    assert [way.name for way in proving.ways()] == ["plain", "gpu", "gpu, recomputed"]


def test_dropout_of_the_ways_is_that_of_the_plain_step(folder: Path) -> None:
    way = next(way for way in proving.ways() if way.dropout)
    assert way.execution.recompute
    examples = random_examples(3)
    with_dropout, *_ = proving._computed(folder, examples, way, "auto")
    without, *_ = proving._computed(folder, examples, replace(way, dropout=0.0), "auto")
    assert abs(with_dropout - without) > 1e-4


def test_memory_is_that_of_each_size(folder: Path) -> None:
    def peaks(*sizes: int) -> Iterator[tuple[int, int, int]]:
        return proving.memory_peaks(folder, random_examples(12), sizes, 24.0)

    # The larger first: its peak is not that of the next.
    (large, small) = peaks(512, 32)
    assert (small[0], large[0]) == (32, 512)
    for _, predicted, measured in (small, large):
        assert measured > 0
        assert predicted > 0
    assert small[1] < large[1]
    assert small[2] < large[2]


def test_steps_are_timed_in_each_choice_of_shapes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = {"as they are": lambda each: each, "padded": lambda each: replace(each, packs=False)}
    monkeypatch.setattr(proving, "SHAPES", padded)
    found = dict(proving.timed_steps(folder, random_examples(5)))
    assert list(found) == list(padded)
    assert min(found.values()) > 0


def test_steps_are_timed_with_rounded_shapes_and_without() -> None:
    rounding = Rounding(line=64, width=128)
    execution = Execution(MLX, rounding=rounding)
    found = {name: change(execution).rounding for name, change in proving.SHAPES.items()}
    assert found == {"shapes as they are": NOT_ROUNDED, "shapes rounded": rounding}
