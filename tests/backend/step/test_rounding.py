"""Sequences rounded up for a GPU give equal losses and gradients; the added tokens are padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.device import default_device
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.packed import Layout
from mlxtune.backend.step.evaluator import Evaluator
from mlxtune.core.steps import rounding
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.pack import Segment
from mlxtune.core.steps.rounding import Rounding
from tests.backend.step.executions import (
    PACKED,
    PLAIN,
    WAYS,
    assert_same,
    computed,
    fixed_step,
    fresh,
    model_folder,
)
from tests.long.architectures import ARCHITECTURES
from tests.models import write_model
from tests.slow import slow_except

ROUNDING = Rounding(length=64, width=32)
# Models with windows, sinks, experts, and mixers other than attention.
NAMES = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_5", "mamba2", "lfm2")
HOW = {
    name: replace(WAYS[name], rounding=ROUNDING)
    for name in ("packed", "packed with recompute", "all")
}


@pytest.fixture(autouse=True)
def _short_sequences_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more than 3% of padding, because these batches are short."""
    monkeypatch.setattr(rounding, "_MAX_PADDING", 1.0)


def assert_rounded(how: Execution, folder: Path, tokens: int = 10_000, **config: Any) -> None:
    """Compare a rounded step with the plain path, and check its token counts."""
    made = fresh(folder, how, tokens, **config)
    assert made.forward.execution.packs
    for micro_batch, batch in made._engine.micro_batches.iterate(fixed_step()):
        assert batch.inputs.size == micro_batch.tokens
    found = computed(made, fixed_step())
    assert_same(found, computed(fresh(folder, PLAIN, **config), fixed_step()))
    exact = fresh(folder, replace(how, rounding=Rounding()), tokens, **config)
    padding = made.loss_and_gradients(fixed_step(), step=3).counts.padding
    assert padding == found.forward_tokens - computed(exact, fixed_step()).forward_tokens > 0


@pytest.mark.parametrize("name", slow_except(NAMES, "gpt_oss", "qwen3_5"))
def test_rounded_sequence_gives_the_same_step(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", name, **ARCHITECTURES.get(name, {}))
    assert_rounded(HOW["packed"], folder)


@pytest.mark.parametrize("way", slow_except(HOW, "all"))
def test_rounded_sequence_gives_the_same_step_in_every_execution(way: str) -> None:
    assert_rounded(HOW[way], model_folder("gemma3_text"), dropout=0.3)


def test_several_rounded_sequences_give_the_same_step() -> None:
    assert_rounded(HOW["packed"], model_folder("qwen3"), tokens=50)


def test_evaluation_of_rounded_sequences_is_the_same() -> None:
    def losses(how: Execution) -> Any:
        base = load_base(model_folder("qwen3"), "float32")
        each = Evaluator(base, warn=lambda text: None, execution=how)
        return each.losses(fixed_step())

    rounded = losses(replace(HOW["packed"], micro_batch_tokens=10_000))
    expected = losses(replace(PACKED, micro_batch_tokens=10_000))
    np.testing.assert_allclose(rounded, expected, rtol=1e-5)


def test_width_side_by_side_is_rounded() -> None:
    segments = [Segment(0, 21, 0, -1), Segment(21, 40, 0, -1)]
    assert Layout(segments, ROUNDING).padded_indices.shape == (2, 32)
    assert Layout(segments).padded_indices.shape == (2, 21)
    # A single example stays in one row of 64 tokens, which need no padding.
    alone = [Segment(0, 60, 0, -1), Segment(60, 64, 60, 0)]
    assert Layout(alone, ROUNDING).padded_indices.shape == (1, 64)


@pytest.mark.parametrize(
    ("gpu", "metal", "expected"),
    [
        (False, True, Rounding()),
        (True, True, Rounding(length=64, width=32)),
        (True, False, Rounding(length=64, width=128)),
    ],
)
def test_each_device_has_its_own_rounding(
    gpu: bool, metal: bool, expected: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_device, "on_cpu", lambda: not gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    assert best_execution(0, kind="gpu").rounding == expected
